"""
The sizes of a model that is made here, for init_from='scratch'.
Code: `make_scratch_model` of onecurve/models/folders.py. Manual: docs/data.md.
"""

from configurator import arguments, named_arguments

# sizes as Hugging Face's configs name them: 'num_hidden_layers=8', with 'num_experts=8' a mixture of experts; those
# that are not named are SCRATCH's
scratch_args = ""

SCRATCH = (
    "num_hidden_layers=4, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32, "
    "intermediate_size=384, num_experts=0, num_experts_per_tok=2"
)


def scratch_sizes(config):
    """{name: size} of a scratch model."""
    return named_arguments(SCRATCH) | named_arguments(config["scratch_args"])


def rules(c):
    what = f"whole numbers, of a scratch model that has else {SCRATCH}"
    yield from arguments(c, "scratch_args", what, numbers=named_arguments(SCRATCH))
    *sizes, experts, active = scratch_sizes(vars(c)).values()
    fits = 0 < min(*sizes, active) and active <= (experts or active)
    yield "scratch_args", fits, f"sizes must be more than 0, and a token's experts no more than num_experts={experts}"
