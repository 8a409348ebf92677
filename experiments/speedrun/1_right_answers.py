"""
Four updates of each batch towards its right samples alone, and a curriculum: what is solved comes less often.
"""


def right(rewards, **_):
    """The advantage: 1 of a right sample, else 0."""
    return rewards


def likelihood(logprobs, advantages, **_):
    """The loss of supervised learning, on samples in place of data; none is clipped."""
    return -advantages * logprobs, advantages != advantages


max_steps = 40
learning_rate = 5e-4
warmup_steps = 4
lr_decay_steps = 40
prompts_per_step = 64
group_size = 4
leaf_tokens = 1024
updates_per_batch = 4
curriculum = 4
advantage = "experiments/speedrun/1_right_answers.py:right"
loss = "experiments/speedrun/1_right_answers.py:likelihood"
