"""
"""

out_dir = "out/guess"
agent = "agents/guess.py:solve"
credit = "turn"
arithmetic_size = 30
max_prompt_tokens = 8
max_new_tokens = 56
pass_reward = 0.5  # found with at most four guesses
threads = 1
warmup_sft_steps = 300
sft_learning_rate = 2e-3
prompts_per_step = 16
group_size = 8
max_steps = 120
leaf_tokens = 2048
lanes = 4
learning_rate = 1e-3
lr_decay_steps = 120
scratch_layers = 2
scratch_hidden = 64
scratch_mlp = 128
