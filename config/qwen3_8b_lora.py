"""
Qwen3-8B on GSM8K with LoRA, on one 80 GB card that trains and samples in turn.

    python train_grpo.py config/qwen3_8b_lora.py

Memory of the trainer: 8.2 G frozen weights in bfloat16 16.4 GB; rank 32 in all seven linear layers of the 36 is 87.3 M
adapters in float32, with AdamW's two moments and the gradients (the sum over the batch, and log2(lanes) of the row that
is being added) 0.35 * 7 = 2.4 GB. While it trains, also one activation per layer of a leaf of 16,384 tokens
36 * 16,384 * 4,096 * 2 bytes = 4.8 GB, one layer's inner ones 2.4 GB, and 1,024 rows of float32 logits 0.6 GB twice:
27 GB, and the engine's memory sleeps. A merged weight is 0.1 GB and lives for one product. Several cards share what is
held, and gather what they use by FSDP2.
While weights are published: the trainer's 17.4 GB, a bucket of merged weights twice 2.5 GB, and the engine's share,
70 % of what the trainer and CUDA's own 1 GB leave of the card, 43 GB: 64 GB. Of the share 16.4 GB are its weights and
26.7 GB the cache, at 144 KiB a token 181,000 tokens: 141 samples at their full length at a time.
Full training needs 8.2 G * 16 bytes = 131 GB for weights, moments and one gradient alone.

A model of this shape with random weights took 13.9 s for a step of 256 samples of 256 tokens on an H100, before LoRA's
gradients went to the tensor cores and FSDP2 was left out (docs/results.md).
Wall time and result of this preset: not measured yet.
"""

from config.gsm8k import *  # the data, and its steps

out_dir = "out/qwen3_8b_lora"
init_from = "Qwen/Qwen3-8B"
lora_rank = 32
colocate = True  # on several cards, too
learning_rate = 1e-5  # ten times that of config/qwen3_8b.py
engine_memory = 0.7
