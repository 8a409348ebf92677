"""
Qwen3-8B on GSM8K, eight 80 GB GPUs: four train under FSDP2, four host an engine each.

    torchrun --nproc_per_node=8 train_grpo.py config/qwen3_8b.py

Memory of a trainer, 8.2 G parameters over 4 ranks: float32 weights 8.2 + AdamW's two moments 16.4 + gradients 8.2
(the sum over the batch, to which each leaf's are added: 4 lanes are one per rank) = 33 GB; embedding and head unsharded
in bfloat16 and their gradients 5 GB. At the end of a backward pass the gradients of these two in float32, as sent and
received, 11 GB: 50 GB. Before that, one activation per layer of a leaf of 16,384 tokens 36 * 16,384 * 4,096 *
2 bytes = 4.8 GB, one layer's inner ones 2.4 GB, and 1,024 rows of float32 logits 0.6 GB twice. None of it grows with
prompts_per_step, group_size or max_new_tokens (a sample of up to leaf_tokens); 8 trainers want lanes = 8.
With --lag=1 the two sides work at the same time, for 5 GB more of a trainer: the version that is being sent, and a
bucket of it. The one before it waits in host memory; while it checks that version's log-probs the float32 weights are
there twice (8 GB), which is before there are gradients.
Memory of an engine: bfloat16 weights 16.4 GB; 85 % of what is free less these leaves 51 GB of cache at 144 KiB a token
(36 layers * 2 * 8 heads * 128 * 2 bytes), 344,000 tokens: all 64 samples of an engine at their full length.

Wall time and result: not measured yet.
"""

from config.gsm8k import *  # the data, and its steps

out_dir = "out/qwen3_8b"
init_from = "Qwen/Qwen3-8B"
rollout_ranks = 4
lanes = 4
learning_rate = 1e-6
engine_memory = 0.85
