"""
The run of the tests and of tools/prove.py: as small as can be, for bits and not for rewards. Sums of two one-digit
numbers with a Qwen3 of 0.1 M parameters, from scratch: a warm-up after which one sample in five is right, so that every
step has something to learn from and moves every weight, then 24 steps of RL, too few to see it in the reward.

    python train_grpo.py config/small.py
    torchrun --nproc_per_node=2 train_grpo.py config/small.py --out_dir=out/again
"""

out_dir = "out/small"
dataset = "arithmetic:0:10"
max_prompt_tokens = 8
max_new_tokens = 6
eval_size = 20
threads = 1
warmup_sft_steps = 60
sft_learning_rate = 2e-3
sft_batch = 32
prompts_per_step = 8
group_size = 8
leaf_tokens = 104  # so that some RL steps are one row of leaves and some are two
lanes = 4
max_steps = 24
learning_rate = 2e-4
checkpoint_every = 8
scratch_args = "num_hidden_layers=2, hidden_size=64, intermediate_size=128"
