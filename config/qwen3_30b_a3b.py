"""
Qwen3-30B-A3B, a mixture of 128 experts, on GSM8K: eight H200 (141 GB), each of which trains and samples in turn.

    torchrun --nproc_per_node=8 train_grpo.py config/qwen3_30b_a3b.py

A token uses 8 experts of each layer, 3.3 G of the 30.5 G parameters; memory has all of them.
Memory of a card while it trains, and the engine's memory sleeps: float32 weights 15.3 + AdamW's two moments 30.5 +
gradients 15.3 (8 lanes are one per rank) = 61 GB; embedding and head gathered in bfloat16 and their gradients 2.5
GB, two layers 2.5 GB; of a leaf of 16,384 tokens one activation per layer 48 * 16,384 * 2,048 * 2 bytes = 3.2 GB, a
layer's inner ones 2.5 GB, of which nearly half are the experts' rows, eight for a token, and 1,024 rows of float32
logits 1.2 GB; at the most: 73 GB. Not in it: a layer's float32 gradient, as sent and received, another 5 GB.
While weights are published: weights and moments 46 GB, the bfloat16 ones that are handed over 7.6 GB and a bucket of
them twice 2.1 GB, and the engine's share, 75 % of what weights, moments and CUDA's own 1 GB leave of the card, 71
GB: 127 GB. Of the share 61.1 GB are its weights, 9.6 GB the cache, 97,500 tokens at 96 KiB: all 32 samples of an engine
at their full length.
`tools/plan.py config/qwen3_30b_a3b.py --card=H200` counts so, and estimates a step of 15.1 s.

Wall time and result: not measured yet.
"""

from config.gsm8k import *  # the data, and its steps

out_dir = "out/qwen3_30b_a3b"
init_from = "Qwen/Qwen3-30B-A3B"
colocate = True
lanes = 8
gradient_checkpointing = True
learning_rate = 1e-6
engine_memory = 0.75
