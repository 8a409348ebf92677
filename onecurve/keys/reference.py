"""
A frozen model: the KL to it is a cost, or it is the teacher of advantage='distill'.
Code: onecurve/algorithms/reference.py, `kl` of train_grpo.py. Manual: docs/algorithms.md.
"""

from configurator import choice, not_negative, untouched

kl_coef = 0.0  # weight of the KL to the frozen reference
kl_in_reward = False  # True: subtract the KL from a sample's reward (with gae each token's); False: add it to the loss
kl_estimator = "k3"  # k1, k2 or k3
reference = ""  # model folder or hub name, with advantage='distill' the teacher; '': that of init_from

ESTIMATORS = "k1 k2 k3"


def rules(c):
    yield from choice(c, "kl_estimator", ESTIMATORS)
    yield from not_negative(c, "kl_coef")
    distills = c.advantage == "distill"
    if not (c.kl_coef or distills):
        yield from untouched(c, "reference", "is for --kl_coef or --advantage=distill")
    if not c.kl_coef:
        yield from untouched(c, "kl_in_reward", "is for --kl_coef")
    if distills:
        yield from untouched(c, "kl_coef", "is not for --advantage=distill")
    yield "kl_coef", c.kl_coef > 0 or c.mode != "dpo", "is DPO's beta; use more than 0, such as 0.1"
    yield "advantage", c.reference or not distills, "needs a teacher; --reference=model folder"
    refers = not c.kl_coef or c.reference or c.init_from != "scratch"
    yield "kl_coef", refers, "needs a reference, as a scratch model is random; --reference=model folder"
