"""
Grade-school word problems (Cobbe et al. 2021, arXiv:2110.14168) as all presets for GPUs train on them: the data, its
samples and steps. The presets import this file, and set the model, who does what, and what differs.
"""

device = "cuda"
dataset = "openai/gsm8k"
dataset_config = "main"
prompt_column = "question"
prompt_template = "{question}\nPlease reason step by step, and put your final answer after ####."
chat_template = True
chat_template_args = "enable_thinking=False"  # for Qwen3: with it, samples want 4,096 tokens and more
eval_split = "test"
max_prompt_tokens = 256
max_new_tokens = 1024
prompts_per_step = 32
group_size = 8
gradient_checkpointing = True
warmup_steps = 10
max_steps = 200
eval_every = 50
keep_rollouts = 20
