"""
The first of three stages (Ouyang et al. 2022): supervised steps on sums of two numbers from 10 to 49, with a Qwen3 of
0.8 M parameters from scratch, until about half of the sums are right.

    python train_grpo.py config/stage_sft.py
"""

out_dir = "out/stage_sft"
mode = "sft"
dataset = "arithmetic:10:50"
max_prompt_tokens = 8
max_new_tokens = 4
max_steps = 257
leaf_tokens = 2048
lanes = 4
learning_rate = 1e-3
warmup_steps = 20
checkpoint_every = 257
