"""
Llama-3.3-70B on GSM8K with LoRA, eight 80 GB GPUs: four train the adapters under FSDP2, four host one engine over all
of them. Both sides work at the same time, with samples that are one step old.

    torchrun --nproc_per_node=8 train_grpo.py config/llama_70b_lora.py

Memory of a trainer, 70.6 G frozen parameters over 4 ranks: bfloat16 weights 35.3 GB; rank 32 in all seven linear layers
of the 80 is 414 M adapters in float32, with AdamW's two moments, gradients and the version that is sent 2 GB; the
merged rows of a bucket that is sent, twice, 1 GB; embedding and head as FSDP2 gathers them 4.2 GB, two layers 3.4 GB;
one activation per layer of a leaf of 8,192 tokens 80 * 8,192 * 8,192 * 2 bytes = 10.7 GB, one layer's inner ones 2.6
GB, and 1,024 rows of float32 logits 1.1 GB: 60 GB.
Memory of an engine's card: a quarter of the weights 35.3 GB; 85 % of what is free less these leaves 32 GB of cache at
80 KiB a token, 389,000 tokens: all 256 samples at their full length.
`tools/plan.py config/llama_70b_lora.py --gpus=8` counts so, and estimates a step of 43.3 s.

Wall time and result: not measured yet.
"""

from config.gsm8k import *  # the data, and its steps

out_dir = "out/llama_70b_lora"
init_from = "meta-llama/Llama-3.3-70B-Instruct"
lora_rank = 32
chat_template_args = ""  # it does not think
rollout_ranks = 4
rollout_tp = 4
tp_split = 4
lag = 1
leaf_tokens = 8192
lanes = 4
learning_rate = 1e-5
engine_memory = 0.85
