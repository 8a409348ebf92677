"""
A sum that is answered twice (agents/self_check.py). A Qwen3 of 0.1 M parameters from scratch.

    python train_grpo.py config/self_check.py
    python train_grpo.py config/self_check.py --seed=2 --out_dir=out/self_check_2
"""

out_dir = "out/self_check"
agent = "agents/self_check.py:solve"
arithmetic_size = 50
max_prompt_tokens = 12
max_new_tokens = 24
threads = 1
warmup_sft_steps = 600
sft_learning_rate = 2e-3
prompts_per_step = 32
group_size = 8
max_steps = 60
leaf_tokens = 2048
lanes = 4
learning_rate = 5e-4
scratch_layers = 2
scratch_hidden = 64
scratch_mlp = 128
