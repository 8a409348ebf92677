"""
A Qwen3 of 250 M parameters from scratch on one Hopper GPU, on the sums of config/tiny.py: bfloat16, our Triton kernels
and CUDA graphs, no download. Run it twice: the digests must be equal, and no log-prob may differ in any step.

    python train_grpo.py config/one_gpu.py
    python train_grpo.py config/one_gpu.py --out_dir=out/one_gpu_again --engine_args=disable_cuda_graph=True

On an H200, with 40 warm-up and 12 RL steps: no log-prob differed, 1.5 s a step beside other work. docs/results.md
has its flags and digest. The whole run has not been measured yet.
"""

out_dir = "out/one_gpu"
device = "cuda"
dataset = "arithmetic:10:50"
max_prompt_tokens = 8
max_new_tokens = 4
warmup_sft_steps = 200
sft_learning_rate = 2e-4
prompts_per_step = 64
group_size = 8
max_steps = 60
leaf_tokens = 2048
lanes = 4
learning_rate = 2e-5
lr_decay_steps = 60
engine_memory = 0.3
checkpoint_every = 0
scratch_args = (
    "num_hidden_layers=16, hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, "
    "head_dim=128, intermediate_size=3072"
)
