"""
The engine computes with rounded weights, as other stacks' engines do; the trainer does not.
Code: `rounded_to` of sync.py, onecurve/run/dial.py. Manual: docs/algorithms.md.
"""

from configurator import choice, untouched

# the engine's weights, and with ':act' the results of its operators, are rounded to this: fp32, bf16, fp16, fp8 or int8
# (a scale for each row). Log-probs that differ are then counted, and stop nothing
engine_bits = "fp32"


def rules(c):
    yield from choice(c, "engine_bits", "fp32 bf16 fp16 fp8 int8 bf16:act fp16:act fp8:act int8:act")
    if c.mode not in ("grpo", "replay"):
        yield from untouched(c, "engine_bits", "is for --mode=grpo or replay")
