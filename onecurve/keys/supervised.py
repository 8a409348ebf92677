"""
Steps on known answers or pairs: a warm-up before RL, or all of mode='sft', 'rm' and 'dpo'.
Code: onecurve/algorithms/supervised.py, onecurve/algorithms/pairs.py. Manual: docs/run.md, docs/algorithms.md.
"""

from configurator import not_negative, positive, untouched

warmup_sft_steps = 0
sft_learning_rate = 1e-3  # of the warm-up: constant, after 20 steps
sft_batch = 64  # samples per step; with mode='rm' or 'dpo' pairs
sft_column = ""  # column of the responses that supervised steps train on; '': answer_column
chosen_column = "chosen"  # with mode='rm' or 'dpo': column of the preferred responses
rejected_column = "rejected"  # with mode='rm' or 'dpo': column of the other responses


def rules(c):
    yield from not_negative(c, "warmup_sft_steps sft_learning_rate")
    yield from positive(c, "sft_batch")
    if c.mode not in ("rm", "dpo"):
        yield from untouched(c, "chosen_column rejected_column", "is for --mode=rm or dpo")
