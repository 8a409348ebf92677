"""
The third stage: PPO trains the first stage's model on the second stage's scores, with a critic and a KL to that model.
The sums' true accuracy is recorded beside the scores: reward_numeric in metrics.jsonl.

    python train_grpo.py config/stage_ppo.py
"""

out_dir = "out/stage_ppo"
init_from = "out/stage_sft/ckpt/step_000257"
# A tenth of the score is about as large as a reward of 0 or 1: value_clip and the critic's loss, whose gradient moves
# the policy, too, are made for such rewards.
reward = "0.1*model:out/stage_rm/ckpt/step_000300 + 0*numeric"
dataset = "arithmetic:10:50"
max_prompt_tokens = 8
max_new_tokens = 4
pass_reward = 0.0  # of pass@1 and of easy and hard groups: a score that leans to right
advantage = "gae"
kl_coef = 0.05
kl_in_reward = True
kl_estimator = "k1"
prompts_per_step = 32
group_size = 8
max_steps = 60
eval_every = 20
leaf_tokens = 2048
lanes = 4
learning_rate = 1e-4
checkpoint_every = 0
