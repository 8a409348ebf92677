"""
Sums of two numbers below 50, answered twice (examples/self_check.py): the model has to check its first answer. A
Qwen3 of 0.1 M parameters from scratch.

    python train_grpo.py config/self_check.py
    python train_grpo.py config/self_check.py --seed=2 --out_dir=out/self_check_2

pass@1 is the share of right second answers; that of right first answers is 2 * (mean reward - pass@1).

| seed | after the warm-up: first, second right, mean reward | after 60 RL steps | digest |
|---|---|---|---|
| 1 | 0.441, 0.809, 1.029 | 0.922, 0.957, 1.418 | f6fbffa4 |
| 2 | 0.242, 0.262, 0.383 | 0.402, 0.434, 0.635 | dc9759f6 |

256 held-out sums, sampled at temperature 1.0: +- 0.06. No log-prob differed in any step. A model of this size learns
sums all of a sudden: with seed 1 the warm-up ends after that, with seed 2 in the middle of it, and a warm-up of 350
steps with seed 2 before it (0.07 right). With seed 1 and 350 steps the first answer overtook the second (0.258 and
0.473, then 0.699 and 0.652), as the model kept changing right answers: perhaps because every other first answer
that it was shown is wrong. 2026-11-22, the digests 2026-11-29, torch 2.11.0, sglang 0.5.17, 2 cores of
an AMD EPYC, 1 thread: 3.4 min.
"""

out_dir = "out/self_check"
agent = "examples/self_check.py:solve"
dataset = "arithmetic:0:50"
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
scratch_args = "num_hidden_layers=2, hidden_size=64, intermediate_size=128"
