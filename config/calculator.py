"""
Sums of two three-digit numbers with a tool that adds (examples/calculator.py). A Qwen3 of 0.1 M parameters from
scratch, which is shown the tool in half of the demonstrations and an answer from the head in the others.

    python train_grpo.py config/calculator.py
    python train_grpo.py config/calculator.py --seed=2 --out_dir=out/calculator_2
    python train_grpo.py config/calculator.py --agent= --tool_call_parser= --out_dir=out/no_calculator    # no tool

The last one is the comparison: the same data and numbers of steps, one turn and no tool.

| run | held-out pass@1 after the warm-up | after 60 RL steps | digest |
|---|---|---|---|
| with the tool, seed 1 | 0.305 | 0.840 | fa5ca89c |
| with the tool, seed 2 | 0.074 | 0.430 | ba491260 |
| no tool, seed 1 | 0.004 | 0.012 | d44a0eb3 |

256 held-out sums, sampled at temperature 1.0: +- 0.06. No log-prob differed in any step. RL first finds out that the
tool pays, with seed 1 in 0.32 calls a sample in the first step and in 0.93 twenty steps later (calls_mean in
metrics.jsonl), and then makes fewer mistakes in copying the numbers, which is what seed 2 still lacks. 2026-11-22,
the digests 2026-11-29, torch 2.11.0, sglang 0.5.17, 2 cores of an AMD EPYC, 1 thread: 2.3 min.
"""

out_dir = "out/calculator"
agent = "examples/calculator.py:solve"
tool_call_parser = "pythonic"
dataset = "arithmetic:100:300"
max_prompt_tokens = 24
max_new_tokens = 48
threads = 1
warmup_sft_steps = 200
sft_learning_rate = 2e-3
prompts_per_step = 16
group_size = 8
max_steps = 60
leaf_tokens = 2048
lanes = 4
learning_rate = 3e-4
scratch_args = "num_hidden_layers=2, hidden_size=64, intermediate_size=128"
