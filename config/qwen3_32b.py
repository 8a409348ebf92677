"""
Qwen3-32B on GSM8K, two nodes of eight H200 (141 GB): one trains under FSDP2, the other hosts four engines over two
cards each. The same ledger with `--rollout_tp=4`, or with one engine only: `tp_split` is what decides the bits.

    torchrun --nnodes=2 --nproc_per_node=8 .. train_grpo.py config/qwen3_32b.py --out_dir=/shared/run  # docs/scale.md

Memory of a trainer, 32.8 G parameters over 8 ranks: float32 weights 16.4 + AdamW's two moments 32.8 + gradients
16.4 (8 lanes are one per rank) = 66 GB; embedding and head gathered in bfloat16, and their gradients, 6 GB, two
layers 2 GB; at the end of a backward pass the gradients of embedding and head in float32, as sent and received, 13
GB: 90 GB. With --lag=1, 9 GB more.
Memory of an engine's card: half of the bfloat16 weights 32.8 GB; 85 % of what is free less these leaves 86 GB of cache
at 128 KiB a token, 658,000 tokens in the two of them: all 64 samples of an engine at their full length.
`tools/plan.py config/qwen3_32b.py --gpus=16 --card=H200` counts so, and estimates a step of 23.7 s, or 14.4 with a lag.

Wall time and result: not measured yet.
"""

from config.gsm8k import *  # the data, and its steps

out_dir = "out/qwen3_32b"
init_from = "Qwen/Qwen3-32B"
rollout_ranks = 8
rollout_tp = 2
tp_split = 4
lanes = 8
learning_rate = 1e-6
engine_memory = 0.85
