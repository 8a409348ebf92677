"""
Adapters are trained beside the model's weights, which are frozen.
Code: onecurve/models/adapters.py. Manual: docs/scale.md.
"""

from configurator import MODES, not_negative, positive, untouched

# Hu et al. 2021 (arXiv:2106.09685): in place of a weight W the model has W + lora_alpha / lora_rank * B A. A and B
# usually want a learning_rate some ten times that of full training
lora_rank = 0  # rows of A and columns of B; 0: no LoRA, all weights are trained
lora_alpha = 32.0
lora_targets = ""  # such as 'q_proj,v_proj'; '': all linear layers of attention and MLP
lora = ""  # a folder of adapters to begin with, one of our checkpoints or PEFT's; '': new adapters


def rules(c):
    yield from not_negative(c, "lora_rank")
    yield from positive(c, "lora_alpha")
    if not c.lora_rank:
        yield from untouched(c, "lora_alpha lora_targets", "is for --lora_rank")
    if c.mode == "rm":
        yield from untouched(c, "lora_rank", "is not for --mode=rm")
    if not MODES[c.mode].trains:
        why = f"mode={c.mode!r}: adapters are trained here; to use them first make one model of both (tools/merge.py)"
        yield "lora_rank", not c.lora_rank, why
        yield "lora", not c.lora, why
    yield "lora", not c.lora or c.lora_rank, "adapters to train on; use --lora_rank, with their rank, too"
