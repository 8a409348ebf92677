"""
Qwen3-0.6B on GSM8K, one GPU, one process that samples and trains in turn.

    python train_grpo.py config/qwen3_0p6b.py

A kernel's start does not depend on a leaf's length, and a small model waits for starts: so a leaf is as long as an 80
GB card holds with ease, and a row is one leaf. Memory, 0.60 G parameters: float32 weights 2.4 and bfloat16 copies of
them 1.2 + AdamW's two moments 4.8 + the sum of gradients 2.4 = 10.8 GB; one activation per layer of a leaf of 65,536
tokens 28 * 65,536 * 1,024 * 2 bytes = 3.8 GB, a layer's others 3.2 GB, the leaf's own gradients 1.2 GB, and 1,024 rows
of float32 logits 0.6 GB twice; the engine gets 45 % of what the trainer's 8 GB and CUDA's own 1 GB leave, 32 GB. None
of it grows with prompts_per_step or group_size.

Wall time and result: not measured yet.
"""

from config.gsm8k import *  # the data, and its steps

out_dir = "out/qwen3_0p6b"
init_from = "Qwen/Qwen3-0.6B"
lanes = 1
leaf_tokens = 65536
learning_rate = 1e-6
engine_memory = 0.45
