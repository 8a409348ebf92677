"""
Qwen3-0.6B on GSM8K, one GPU, one process that samples and trains in turn.

    python train_grpo.py config/qwen3_0p6b.py

Memory on an 80 GB card, 0.60 G parameters: float32 weights 2.4 + AdamW's two moments 4.8 + gradients 2.4 * 5 (the sum
over 16 leaves holds up to 5 partial sums) = 19 GB; one activation per layer of a leaf of 16 * 1,280 tokens
28 * 20,480 * 1,024 * 2 bytes = 1.2 GB, and 1,024 rows of float32 logits 0.6 GB twice; the engine gets 45 % of the card.

Wall time and result: not measured yet.
"""

out_dir = "out/qwen3_0p6b"
init_from = "Qwen/Qwen3-0.6B"
dataset = "openai/gsm8k"
dataset_config = "main"
prompt_column = "question"
prompt_template = "{question}\nPlease reason step by step, and put your final answer after ####."
chat_template = True
eval_split = "test"
max_prompt_tokens = 256
max_new_tokens = 1024
prompts_per_step = 32
group_size = 8
leaves = 16
gradient_checkpointing = True
learning_rate = 1e-6
warmup_steps = 10
max_steps = 200
eval_every = 50
engine_memory = 0.45
keep_rollouts = 20
