"""
The sums of config/tiny.py with adapters: the supervised start of config/stage_sft.py is frozen, and LoRA of rank 16
learns beside it. docs/results.md has the figures, beside full training and other ranks.

    python train_grpo.py config/stage_sft.py
    python train_grpo.py config/tiny_lora.py
"""

out_dir = "out/tiny_lora"
init_from = "out/stage_sft/ckpt/step_000257"
lora_rank = 16
dataset = "arithmetic:10:50"
max_prompt_tokens = 8
max_new_tokens = 4
prompts_per_step = 64
group_size = 8
max_steps = 100
leaf_tokens = 2048
lanes = 4
learning_rate = 1.5e-3  # three times that of full training; ten times is a little worse here
lr_decay_steps = 100
