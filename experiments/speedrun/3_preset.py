"""
What config/tiny.py does: GRPO, one update of each batch of 512 samples, 230 steps.
"""

max_steps = 230
learning_rate = 5e-4
lr_decay_steps = 230
prompts_per_step = 64
group_size = 8
