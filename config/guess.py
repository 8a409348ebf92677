"""
A game of several turns (examples/guess.py): guess a number from 1 to 15 by 'up' and 'down', in at most six guesses. A
Qwen3 of 0.1 M parameters from scratch, which is shown play without a plan; RL then has to find better play.

    python train_grpo.py config/guess.py
    python train_grpo.py config/guess.py --seed=2 --out_dir=out/guess_2

Right (pass@1) is a game of at most four guesses. Picking any number that is still possible, as the demonstrations do,
gets 0.60 of the games right and a mean reward of 0.49; halving what is left gets all right and 0.62.

| seed | after the warm-up: pass@1, mean reward | after 120 RL steps | in training: first, last 20 steps | digest |
|---|---|---|---|---|
| 1 | 0.539, 0.439 | 0.645, 0.504 | 0.448, 0.508 | 0ba43931 |
| 2 | 0.496, 0.411 | 0.578, 0.455 | 0.420, 0.515 | b6fe1edc |

256 held-out rows, sampled at temperature 1.0: +- 0.06 of pass@1, so its rise is no more than likely with seed 2; 20
training steps are 2560 games. Play gets a little better than what was shown, and stays far from halving. No log-prob
differed in any step. 2026-11-22, the digests 2026-11-29, torch 2.11.0, sglang 0.5.17, 2 cores of an AMD
EPYC, 1 thread: 3.8 min.
"""

out_dir = "out/guess"
agent = "examples/guess.py:solve"
credit = "turn"  # a guess is compared with the group's guesses of the same number, not with those of shorter games
dataset = "arithmetic:0:30"
max_prompt_tokens = 8
max_new_tokens = 56
pass_reward = 0.5  # four guesses
threads = 1
warmup_sft_steps = 300
sft_learning_rate = 2e-3
prompts_per_step = 16
group_size = 8
max_steps = 120
leaf_tokens = 2048
lanes = 4
learning_rate = 1e-3
lr_decay_steps = 120
scratch_args = "num_hidden_layers=2, hidden_size=64, intermediate_size=128"
