"""
DAPO's data (Yu et al. 2025, arXiv:2503.14476): 14,000 competition problems in English whose answers are whole numbers;
AIME 2024, which DAPO reports, held out. The data alone, behind a preset with a model:

    uv sync --group math
    torchrun --nproc_per_node=8 train_grpo.py config/qwen3_8b.py config/dapo_17k.py --out_dir=out/dapo
"""

dataset = "open-r1/DAPO-Math-17k-Processed"
dataset_config = "en"
prompt_column = "prompt"
answer_column = "solution"
prompt_template = "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
reward = "math"
eval_split = ""
eval_samples = 8
max_prompt_tokens = 512
max_new_tokens = 4096
_aime = dict(weight=0, dataset="HuggingFaceH4/aime_2024", dataset_config="default", eval_size=30)
_aime |= dict(prompt_column="problem", answer_column="answer")
_aime |= dict(prompt_template=prompt_template.replace("prompt", "problem"))
sources = f"train={{'eval_size': 0}}, aime24={_aime}"
