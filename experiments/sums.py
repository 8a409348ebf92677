"""
The task of the studies: config/tiny.py with a quarter of the samples and 30 steps, of which RL takes 10 s of a core and
the warm-up 40 s. Held-out sums go from 0.56 right to 0.7.

    python train_grpo.py config/tiny.py experiments/sums.py
"""

out_dir = "out/sums"
threads = 1
share_prefixes = False  # as when the digests of the studies were written
prompts_per_step = 16
max_steps = 30
learning_rate = 2e-4
lr_decay_steps = 0
eval_samples = 4
checkpoint_every = 1000  # after the warm-up and after the last step
sample_every = 0
