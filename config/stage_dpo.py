"""
DPO in place of the second and third stage: the first stage's model learns from the reward model's pairs, a right sum
and one with wrong digits each, and stays near to where it began. The held-out rows are those of the other stages.

    python train_grpo.py config/stage_dpo.py
    python train_grpo.py config/stage_dpo.py --mode=eval --init_from=out/stage_dpo/ckpt/step_000100 --out_dir=out/sums
"""

out_dir = "out/stage_dpo"
mode = "dpo"
init_from = "out/stage_sft/ckpt/step_000257"
dataset = "arithmetic:10:50"
max_prompt_tokens = 8
max_new_tokens = 4
kl_coef = 0.1  # DPO's beta
max_steps = 100
eval_every = 50
leaf_tokens = 2048
lanes = 4
learning_rate = 1e-4
warmup_steps = 10
lr_decay_steps = 100
checkpoint_every = 100
