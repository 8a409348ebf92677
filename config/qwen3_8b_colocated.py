"""
Qwen3-8B on GSM8K, eight 80 GB GPUs, each of which trains and samples in turn.

    torchrun --nproc_per_node=8 train_grpo.py config/qwen3_8b_colocated.py

Memory of a card while it trains, 8.2 G parameters over 8 ranks, and the engine's memory sleeps: float32 weights 4.1 +
AdamW's two moments 8.2 + gradients 4.1 (8 lanes are one per rank) = 16 GB; embedding and head gathered in bfloat16
and their gradients 5 GB, two layers 0.8 GB; at the end of a backward pass the gradients of embedding and head in
float32, as sent and received, 11 GB: 33 GB.
While weights are published: weights and moments 12 GB, the bfloat16 ones that are handed over 2 GB and a bucket of
them twice 2.5 GB, and the engine's share, 70 % of what weights, moments and CUDA's own 1 GB leave of the card, 47 GB:
65 GB. Of the share 16.4 GB are its weights, 30 GB the cache, 206,000 tokens at 144 KiB: all 32 samples of an engine at
their full length.
`tools/plan.py` counts so, and estimates a step of 11.5 s.

Wall time and result: not measured yet.
"""

from config.gsm8k import *  # the data, and its steps

out_dir = "out/qwen3_8b_colocated"
init_from = "Qwen/Qwen3-8B"
colocate = True
lanes = 8
learning_rate = 1e-6
engine_memory = 0.7
