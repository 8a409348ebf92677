"""
A loss for the routers of a mixture of experts.
Code: onecurve/models/moe.py. Manual: docs/scale.md.
"""

from configurator import MODES, not_negative, untouched

router_aux_loss_coef = 0.0  # weight of the loss that spreads the tokens over the experts


def rules(c):
    yield from not_negative(c, "router_aux_loss_coef")
    if MODES[c.mode].pairs:
        yield from untouched(c, "router_aux_loss_coef", "is not for --mode=rm or dpo")
