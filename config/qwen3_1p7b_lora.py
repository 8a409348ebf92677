"""
Qwen3-1.7B on GSM8K with LoRA, on one 24 GB card that trains and samples in turn.

    python train_grpo.py config/qwen3_1p7b_lora.py

Memory of the trainer: 1.7 G frozen weights in bfloat16 3.4 GB; rank 32 in all seven linear layers of the 28 is 34.9 M
adapters in float32, with AdamW's two moments and the gradients (the sum over the batch, and log2(lanes) of the row that
is being added) 0.14 * 6 = 0.8 GB. While it trains, also one activation per layer of a leaf of 8,192 tokens
28 * 8,192 * 2,048 * 2 bytes = 0.9 GB, one layer's inner ones 0.6 GB, and 1,024 rows of float32 logits 0.6 GB twice:
7 GB, and the engine's memory sleeps.
The engine gets 65 % of what the trainer's 3.9 GB and CUDA's own 1 GB leave, 12.4 GB: 3.4 GB are its weights and 9.0 GB
the cache, at 112 KiB a token 78,000 tokens: 61 samples at their full length at a time. While weights are published a
bucket of them is there twice, 2.1 GB: 19.4 GB with all that is held, and the rest is for the graphs of decode steps.
`tools/plan.py config/qwen3_1p7b_lora.py --gpus=1 --card=RTX4090` counts so.

Qwen3-0.6B in full fits as well, with --init_from=Qwen/Qwen3-0.6B --lora_rank=0 --lanes=1 --learning_rate=1e-6: 14 GB
while it trains, 22 GB while weights are published.

Wall time and result: not measured yet.
"""

from config.gsm8k import *  # the data, and its steps

out_dir = "out/qwen3_1p7b_lora"
init_from = "Qwen/Qwen3-1.7B"
lora_rank = 32
leaf_tokens = 8192
lanes = 4
learning_rate = 1e-5  # ten times that of config/qwen3_0p6b.py
engine_memory = 0.65
