"""An advantage for pass@k."""

import torch

from configurator import require
from onecurve.run.scores import pass_at_k
from train_grpo import advantages_of

K = 4


def pass_at_4(rewards, **_):
    """
    For rewards of 0 and 1: of an unbiased gradient of pass@4. A right sample has 1; a wrong one the chance that one of
    three others of its group is right, which is what the four would have got without it. Minus the group's mean. PKPO,
    Walder and Karkhanis 2025 (arXiv:2505.15201), equations 6 and 7 without their common factor.
    """
    n = rewards.shape[1]
    require(n >= K, f"group_size={n}: pass@{K} is of a group of at least {K}; use {K} or more")
    chance = [pass_at_k(n - 1, min(right, n - 1), K - 1) for right in range(n + 1)]
    others = torch.tensor(chance)[rewards.sum(1).long()]
    return advantages_of(torch.where(rewards > 0, 1.0, others[:, None]), "dr_grpo")
