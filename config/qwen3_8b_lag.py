"""
Qwen3-8B on GSM8K, eight 80 GB GPUs: config/qwen3_8b.py with its two sides at work at the same time. Four train on the
samples of the step before, while four draw the next with weights that are one step old; all the log-probs are checked
with the weights that sampled them.

    torchrun --nproc_per_node=8 train_grpo.py config/qwen3_8b_lag.py

Memory of a trainer: that of config/qwen3_8b.py and the version that is being sent, bfloat16 4 GB, and the rows of a
bucket of it twice, 0.6 GB, together 54 GB. The version before it waits in pinned host memory, 4 GB a rank, and comes
back over the bus as bfloat16; while its log-probs are checked today's float32 weights are there twice, 8 GB, which is
before there are gradients. An engine: 16.4 GB of weights, 51 GB of cache, 344,000 tokens.
`tools/plan.py` counts so, and estimates a step of 9.6 s where taking turns needs 14.6.

Wall time and result: not measured yet.
"""

from config.qwen3_8b import *

out_dir = "out/qwen3_8b_lag"
lag = 1
