"""
Sums of two three-digit numbers with a tool that adds (agents/calculator.py). A Qwen3 of 0.1 M parameters from scratch,
which is shown the tool in half of the demonstrations and an answer from the head in the others.

    python train_grpo.py config/calculator.py
    python train_grpo.py config/calculator.py --seed=2 --out_dir=out/calculator_2
    python train_grpo.py config/calculator.py --agent= --tool_call_parser= --out_dir=out/no_calculator    # no tool

The last one is the comparison: the same data and numbers of steps, one turn and no tool.
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
