"""What a dialled run keeps of its tokens: how far engine and trainer are from each other, by the entropy there."""

import math

import torch
from safetensors.torch import load_file

EDGES = torch.tensor([0.05, 0.2, 0.4, 0.6, 0.8, 1.0])  # of entropy, nats


def tokens_of(run, first, last):
    """(entropies, log-ratios of the trainer's probability to the engine's) of the tokens of these steps, (M,) each."""
    tables = [load_file(run / f"queue/rl_{i:06d}/trainer.safetensors") for i in range(first, last)]
    entropies, ours, theirs = (torch.cat([t[k] for t in tables]) for k in ("entropy", "logprobs", "rollout_logprobs"))
    return entropies.double(), (ours - theirs).double()


def by_entropy(entropies, ratios):
    """(3, 7): the number of tokens between EDGES, their mean entropy and their mean distance; no tokens have nan."""
    part = torch.bucketize(entropies, EDGES)
    count = torch.bincount(part, minlength=len(EDGES) + 1)
    sums = (torch.bincount(part, x, len(EDGES) + 1) for x in (entropies, ratios.abs()))
    return torch.stack([count, *(x / count for x in sums)])


def early_and_late(run, steps):
    """
    Of the first and the last quarter of the steps: mean entropy and mean distance; and what the late distance would be
    if tokens of an entropy were as far as early ones of that entropy.
    """
    parts = [tokens_of(run, 0, steps // 4), tokens_of(run, steps - steps // 4, steps)]
    early, late = (by_entropy(*part) for part in parts)
    expected = (late[0] * early[2].nan_to_num()).sum() / late[0].sum()
    return [float(x) for part in parts for x in (part[0].mean(), part[1].abs().mean())] + [float(expected)]


def draw(axis, runs, steps, color):
    """The distance of the tokens of these runs by entropy, early and late; returns where the last line ends."""
    for first, style in ((0, "o-"), (steps - steps // 4, "o:")):
        parts = zip(*(tokens_of(run, first, first + steps // 4) for run in runs))
        _, entropies, distances = by_entropy(*map(torch.cat, parts))
        axis.plot(entropies, distances, style, color=color, markersize=4, linewidth=1.2)
    return float(distances[-1])


def sizes(runs, steps):
    """In words: mean and largest distance of all tokens, and the shares whose ratio is past 1.2 and past 2."""
    apart = torch.cat([tokens_of(run, 0, steps)[1].abs() for run in runs])
    shares = (float((apart > math.log(bound)).double().mean()) for bound in (1.2, 2))
    return [f"{apart.mean():.2g}", f"{apart.max():.2g}", *(f"{x:.2%}" for x in shares)]
