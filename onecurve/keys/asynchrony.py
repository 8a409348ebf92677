"""
Samples are begun with older weights, or made a part at a time.
Code: the loop of train_grpo.py, `Flight` of rollout_server.py. Manual: docs/asynchrony.md.
"""

from configurator import not_negative, untouched

lag = 0  # samples are begun with the weights of lag steps before; 0: training and sampling wait for each other
segment_tokens = 0  # partial rollouts: tokens that an unfinished sample gets per step; 0: all of them
groups_in_flight = 0  # with segment_tokens: number of groups begun but not yet trained on, prompts_per_step or more


def rules(c):
    yield from not_negative(c, "lag segment_tokens groups_in_flight")
    if c.segment_tokens:
        yield from untouched(c, "curriculum dynamic_sampling", "is not for --segment_tokens")
        fits = c.segment_tokens <= c.max_new_tokens
        yield "segment_tokens", fits, f"not within max_new_tokens={c.max_new_tokens}; use less, or 0: whole samples"
        prompts = c.prompts_per_step
        why = f"a step trains on prompts_per_step={prompts} groups out of these; use {2 * prompts}"
        yield "groups_in_flight", c.groups_in_flight >= prompts, why
    else:
        yield from untouched(c, "groups_in_flight", "is for --segment_tokens")
