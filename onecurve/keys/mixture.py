"""
A loss for the routers of a mixture of experts.
Code: onecurve/models/moe.py. Manual: docs/scale.md.
"""

from configurator import not_negative

router_aux_loss_coef = 0.0  # weight of the loss that spreads the tokens over the experts


def rules(c):
    yield from not_negative(c, "router_aux_loss_coef")
