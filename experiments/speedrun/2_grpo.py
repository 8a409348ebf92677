"""
GRPO's advantage and PPO's clip, four updates of each batch, and the same curriculum.
"""

max_steps = 120
learning_rate = 5e-4
warmup_steps = 4
lr_decay_steps = 120
prompts_per_step = 32
group_size = 8
leaf_tokens = 1024
updates_per_batch = 4
curriculum = 4
