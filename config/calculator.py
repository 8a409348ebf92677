"""
"""

out_dir = "out/calculator"
agent = "agents/calculator.py:solve"
tool_call_parser = "pythonic"
arithmetic_min = 100
arithmetic_size = 300
max_prompt_tokens = 24
max_new_tokens = 48
threads = 1
warmup_sft_steps = 200
sft_learning_rate = 2e-3
prompts_per_step = 16
group_size = 8
max_steps = 60
leaf_tokens = 2048
lanes = 4
learning_rate = 3e-4
scratch_layers = 2
scratch_hidden = 64
scratch_mlp = 128
