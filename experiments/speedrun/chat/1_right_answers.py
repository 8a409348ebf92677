"""
Four updates of each batch of 32 samples towards its right samples alone.
"""

max_steps = 8
prompts_per_step = 8
group_size = 4
updates_per_batch = 4
advantage = "experiments/speedrun/1_right_answers.py:right"
loss = "experiments/speedrun/1_right_answers.py:likelihood"
