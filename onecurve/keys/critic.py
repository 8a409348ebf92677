"""
PPO's critic, for advantage='gae': a head on the policy's trunk learns each token's value.
Code: onecurve/algorithms/critic.py. Manual: docs/algorithms.md.
"""

from configurator import at_most, not_negative, untouched

gamma = 1.0  # discount per token with advantage='gae', per turn with credit='turn'
gae_lambda = 0.95
value_coef = 0.5  # weight of the critic's loss
value_clip = 0.2  # bound of a value's change in one batch; 0: none


def rules(c):
    yield from not_negative(c, "gamma gae_lambda value_coef value_clip")
    yield from at_most(c, 1, "gamma gae_lambda")
    if c.advantage != "gae":
        yield from untouched(c, "gae_lambda value_coef value_clip", "is for --advantage=gae")
    if c.advantage != "gae" and c.credit != "turn":
        yield from untouched(c, "gamma", "is for --advantage=gae or --credit=turn")
