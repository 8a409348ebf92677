"""
Exercise 3: the clipped loss of PPO and GRPO. The page beside this file says more.
"""

import torch


def clipped_loss(logprobs, old_logprobs, advantages, clip_low, clip_high):
    """
    (loss, clipped), (M,) each, of M tokens: their log-probs now and when they were sampled, and their advantages.
    x.clamp(low, high) and torch.minimum may be of use.
    """
    raise NotImplementedError
