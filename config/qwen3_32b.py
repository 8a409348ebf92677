"""
Qwen3-32B on GSM8K, two nodes of eight H200 (141 GB): one trains under FSDP2, the other hosts four engines over two
cards each. The same ledger with `--rollout_tp=4`, or with one engine only: `tp_split` is what decides the bits.

    torchrun --nnodes=2 --nproc_per_node=8 .. train_grpo.py config/qwen3_32b.py --out_dir=/shared/run  # see README

Memory of a trainer, 32.8 G parameters over 8 ranks: float32 weights 16.4 + AdamW's two moments 32.8 + gradients
16.4 * 2 (8 lanes are one per rank) = 82 GB; embedding and head gathered in bfloat16, and their gradients, 6 GB, two
layers 2 GB; at the end of a backward pass the gradients of embedding and head in float32, as sent and received, 12
GB: 106 GB. With --lag=1, 9 GB more.
Memory of an engine's card: half of the bfloat16 weights 32.8 GB; 85 % of what is free less these leaves 86 GB of cache
at 128 KiB a token, 658,000 tokens in the two of them: all 64 samples of an engine at their full length.
`tools/plan.py config/qwen3_32b.py --gpus=16 --card=H200` counts so, and estimates a step of 24.8 s, or 14.5 with a lag.

Wall time and result: not measured yet.
"""

out_dir = "out/qwen3_32b"
device = "cuda"
init_from = "Qwen/Qwen3-32B"
dataset = "openai/gsm8k"
dataset_config = "main"
prompt_column = "question"
prompt_template = "{question}\nPlease reason step by step, and put your final answer after ####."
chat_template = True
chat_template_args = "enable_thinking=False"  # with it, samples want 4,096 tokens and more
eval_split = "test"
max_prompt_tokens = 256
max_new_tokens = 1024
rollout_ranks = 8
rollout_tp = 2
tp_split = 4
prompts_per_step = 32
group_size = 8
lanes = 8
gradient_checkpointing = True
learning_rate = 1e-6
warmup_steps = 10
max_steps = 200
eval_every = 50
engine_memory = 0.85
keep_rollouts = 20
