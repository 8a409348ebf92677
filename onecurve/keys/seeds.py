"""
A seed of its own for each source of chance.
Code: whoever draws calls `seed_of`. Manual: docs/run.md.
"""

from configurator import arguments, named_arguments

# other seeds than `seed` for some of them, such as 'data=2, noise=7, init=1, eval=3': the order of the data, the noise
# of samples, the first weights of a scratch model or of adapters, the noise of held-out samples
seeds = ""


def seed_of(config, source):
    """The seed of a source of chance: its own, if `seeds` has one, or the run's."""
    return named_arguments(config["seeds"]).get(source, config["seed"])


def noise_seed(config, stream):
    """The seed of the noise in the samples of a stream: held-out ones have their own."""
    return seed_of(config, "eval" if stream == "eval" else "noise")


def rules(c):
    what = "whole numbers for some of data, noise, init, eval, such as 'data=2, eval=3'"
    yield from arguments(c, "seeds", what, numbers=("data", "noise", "init", "eval"))
    for key, seeds in dict(seed=[c.seed], seeds=named_arguments(c.seeds).values()).items():
        yield key, all(-(2**63) <= seed < 2**64 for seed in seeds), "beyond torch's 64 bits; use a smaller number"
