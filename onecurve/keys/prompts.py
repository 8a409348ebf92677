"""
Several data sets, and a choice of prompts by what the model learns from.
Code: `load_sources` and `draw_rows` of rewards.py, onecurve/algorithms/curriculum.py. Manual: docs/data.md.
"""

from configurator import MODES, WANTED, arguments, at_most, named_arguments, not_negative, untouched

# several data sets, each with its own values of these keys and a weight, its share of each step; 0: held out only. Such
# as "easy={'dataset': 'arithmetic:0:10', 'weight': 3}, hard={'reward': 'exact'}"
sources = ""
# prompts are drawn by how much a model learns from them: one with half of its samples right when last seen is this
# number of times (and once more) as likely as one with all or none; 0: each once an epoch
curriculum = 0
dynamic_sampling = 0  # number of further rounds, at most, that replace groups of equal rewards; 0: such groups are kept

SOURCE = """
    weight dataset dataset_config split eval_split eval_size
    prompt_column answer_column sft_column prompt_template reward""".split()
SUMS = r"arithmetic(?::(\d+):(\d+))?"  # a `dataset` that is made here


def sources_of(config):
    """{name: the config by which a source's rows are read and scored, and its weight}; an only one has the name ''."""
    given = named_arguments(config["sources"]) or {"": {}}
    return {name: config | {"weight": 1} | own for name, own in given.items()}


def rules(c):
    yield from not_negative(c, "curriculum dynamic_sampling")
    yield from at_most(c, 10**6, "curriculum")  # the weights of all prompts together have 63 bits
    if c.advantage in ("reinforce++", "gae", "distill"):
        yield from untouched(c, "dynamic_sampling", "is not for --advantage=reinforce++, gae or distill")
    what = "names with a dictionary each, of " + ", ".join(SOURCE)
    yield from arguments(c, "sources", what)
    for name, own in named_arguments(c.sources).items():
        yield "sources", isinstance(own, dict) and own.keys() <= {*SOURCE}, f"{name}: use {what}"
        for key, x in own.items():
            kind = type(c.defaults.get(key, 0))
            yield "sources", type(x) is kind, f"{name}: {key}={x!r}: wants {WANTED[kind]}"
            yield "sources", key != "eval_size" or x >= 0, f"{name}: {key}={x!r}: use 0 or more"
    yield from share_rules(c)


def share_rules(c):
    """The sources share a step's prompts by their weights."""
    weights = [own["weight"] for own in sources_of(vars(c)).values()]
    total = sum(weights)
    steps = MODES[c.mode].steps
    yield "sources", min(weights) >= 0, "a weight is 0, for held-out prompts only, or more"
    yield "sources", total > 0 or not steps, "all weights are 0; use more for what is trained on"
    why = f"the weights of sources add up to {total}; use a multiple, so that each has its share of a step"
    yield "prompts_per_step", steps != "rl" or c.prompts_per_step % total == 0, why
    supervised = steps == "supervised" or c.warmup_sft_steps > 0
    yield "sft_batch", not (supervised and total) or c.sft_batch % total == 0, why
