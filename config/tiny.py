"""
Sums of two-digit numbers below 50 with a Qwen3 of 0.8 M parameters, from scratch, on two CPU cores: a warm-up until
about half of the held-out sums are right, then RL. docs/results.md has the figures and the machine.

    python train_grpo.py config/tiny.py
    torchrun --nproc_per_node=2 train_grpo.py config/tiny.py
"""

out_dir = "out/tiny"
dataset = "arithmetic:10:50"
max_prompt_tokens = 8
max_new_tokens = 4
warmup_sft_steps = 257
sft_learning_rate = 1e-3
prompts_per_step = 64
group_size = 8
max_steps = 230
leaf_tokens = 2048
share_prefixes = True
lanes = 4
learning_rate = 5e-4  # high, as for any model this small; the cosine to 0 makes the last gains
lr_decay_steps = 230
