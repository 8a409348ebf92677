"""
Programs to write: two steps of arithmetic in words, such as "plus 13, times 4:", and a function that does them, judged
by tests in a sandbox (docs/rewards.md says how to install bubblewrap). A Qwen3 of 0.1 M parameters from scratch. Of the
programs that it is shown and that need parentheses, half lack them; the tests do not forgive that.

    python train_grpo.py config/programs.py

| seed | held-out pass@1 after the warm-up | after 80 RL steps |
|---|---|---|
| 1 | 0.562 | 0.848 |

256 held-out descriptions, sampled at temperature 1.0: +- 0.06; the warm-up and the rates were chosen by such figures.
No log-prob differed in any step. 2026-11-22, torch 2.11.0, sglang 0.5.17, 2 cores, 1 thread, a busy machine: 8 min.
"""

out_dir = "out/programs"
dataset = "programs"
reward = "code"
sft_column = "program"
max_prompt_tokens = 24
max_new_tokens = 32
threads = 1
warmup_sft_steps = 220
sft_learning_rate = 2e-3
prompts_per_step = 16
group_size = 8
max_steps = 80
leaf_tokens = 2048
lanes = 4
learning_rate = 5e-4
scratch_args = "num_hidden_layers=2, hidden_size=64, intermediate_size=128"
