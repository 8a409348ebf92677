"""
A penalty, or no loss, for samples that are too long (DAPO).
Code: `overlong_penalty` and `samples_of` of train_grpo.py. Manual: docs/algorithms.md.
"""

overlong_cache = 0  # number of tokens before max_new_tokens over which the reward falls by up to 1; 0: no penalty
overlong_filter = False  # samples cut off at max_new_tokens give no loss; their rewards still count in the group


def rules(c):
    yield "overlong_cache", 0 <= c.overlong_cache < c.max_new_tokens, f"not within max_new_tokens={c.max_new_tokens}"
