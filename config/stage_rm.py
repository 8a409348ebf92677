"""
The second stage: the first stage's model becomes a reward model, on pairs of a right sum and one with wrong digits. The
held-out rows are the same in all three stages.

    python train_grpo.py config/stage_rm.py
"""

out_dir = "out/stage_rm"
mode = "rm"
init_from = "out/stage_sft/ckpt/step_000257"
dataset = "arithmetic:10:50"
max_prompt_tokens = 8
max_new_tokens = 4
max_steps = 300
eval_every = 100
leaf_tokens = 2048
lanes = 4
learning_rate = 1e-3
warmup_steps = 20
lr_decay_steps = 300
checkpoint_every = 300
