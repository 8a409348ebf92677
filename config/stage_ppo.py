"""
ppo
"""

out_dir = "out/stage_ppo"
init_from = "out/stage_sft/ckpt/step_000257"
reward = "model:out/stage_rm/ckpt/step_000200 + 0*numeric"
arithmetic_min = 10
arithmetic_size = 50
max_prompt_tokens = 8
max_new_tokens = 4
advantage = "gae"
kl_coef = 0.1
kl_in_reward = True
kl_estimator = "k1"
prompts_per_step = 32
group_size = 8
max_steps = 60
eval_every = 20
leaf_tokens = 2048
lanes = 4
learning_rate = 2e-4
checkpoint_every = 0
