"""
Importance weights of tokens, and a bound on the ratio where the advantage is negative.
Code: `importance_weights` and `policy_loss` of train_grpo.py. Manual: docs/algorithms.md.
"""

from configurator import choice, not_negative

# 'full', 'truncate' or 'mask': importance-weight each token by pi_old / pi_rollout, its probability before the update
# over that when it was sampled, which is exactly 1 where the weights are the same ones; '': no weights
importance = ""
importance_floor = 0.0  # 'truncate' clamps the weight to floor .. cap, 'mask' makes it 0 outside
importance_cap = 2.0
dual_clip = 0.0  # bound of the ratio where the advantage is negative, such as 3.0; 0: none


def rules(c):
    yield from choice(c, "importance", "full truncate mask")
    yield from not_negative(c, "importance_floor importance_cap")
    why = f"the weight of equal log-probs, 1, must lie between it and importance_cap={c.importance_cap}"
    yield "importance_floor", c.importance_floor < 1 < c.importance_cap, why
    yield "dual_clip", not c.dual_clip or c.dual_clip > 1, "a bound of the ratio; use more than 1, or 0"
