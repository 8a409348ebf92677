"""
The rule by which tokens are drawn, in training, evaluation and the log-probs of both.
Code: `Sampling` of kernels.py. Manual: docs/algorithms.md.
"""

from configurator import not_negative

top_p = 1.0  # the likeliest that together have this probability; 1: all
top_k = 0  # the likeliest, this number of them; 0: all
min_p = 0.0  # those with at least this part of the likeliest token's probability; 0: all
ignore_eos = False  # sample on to max_new_tokens: for benchmarks


def rules(c):
    yield from not_negative(c, "top_k min_p")
    yield "top_p", 0 < c.top_p <= 1, "a probability; use more than 0, or 1: all tokens"
    yield "top_k", c.top_k != 1, "samples of a group must differ; use 2 or more, or 0: all tokens"
    yield "min_p", c.min_p < 1, "a part of the largest probability; use less than 1, or 0: all tokens"
