"""
Competition problems (Hendrycks et al. 2021, arXiv:2103.03874), 7,500 to train on, and the 500 of "Let's verify step by
step" (Lightman et al. 2023, arXiv:2305.20050) held out. The data alone, behind a preset with a model:

    uv sync --group math
    torchrun --nproc_per_node=8 train_grpo.py config/qwen3_8b.py config/math.py --out_dir=out/math
"""

dataset = "DigitalLearningGmbH/MATH-lighteval"
dataset_config = "default"
prompt_column = "problem"
answer_column = "solution"
prompt_template = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
reward = "math"
eval_split = ""
eval_size = 500
max_prompt_tokens = 512
max_new_tokens = 2048
sources = """
train={'eval_size': 0},
math500={'weight': 0, 'dataset': 'HuggingFaceH4/MATH-500', 'split': 'test'},
"""
