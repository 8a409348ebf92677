"""What a dialled run keeps of its tokens: how far engine and trainer are from each other, by the entropy there."""

import math

import torch
from safetensors.torch import load_file
from study import mean_of

EDGES = torch.tensor([0.05, 0.2, 0.4, 0.6, 0.8, 1.0])  # of entropy, nats
BINS = [f"to {x:.2g}" for x in EDGES] + ["above"]


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


def parts(run, steps):
    """tokens_of the first and of the last quarter of the steps."""
    return tokens_of(run, 0, steps // 4), tokens_of(run, steps - steps // 4, steps)


def changes(runs, steps):
    """
    In words: mean entropy in the first quarter of the steps and by how much the last one's is more; the same of the
    mean distance; and the latter if late tokens of an entropy were as far as early ones of that entropy.
    """
    found = []
    for run in runs:
        early, late = parts(run, steps)
        count, _, _ = by_entropy(*late)
        expected = (count * by_entropy(*early)[2].nan_to_num()).sum() / count.sum()
        before = early[1].abs().mean()
        entropy = early[0].mean()
        found.append([entropy, late[0].mean() - entropy, before, late[1].abs().mean() - before, expected - before])
    means = (mean_of([float(x) for x in same]) for same in zip(*found))
    return [f"{mean:{sign}.2g} +- {half:.1g}" for (mean, half), sign in zip(means, ["", "+", "", "+", "+"])]


def late_over_early(axis, runs, steps, color, place):
    """
    In words, and drawn: in each bin of entropy the late distance over the early one, the seeds' geometric mean with its
    95 % interval; of bins that are empty in a seed "none".
    """
    logs = []
    for run in runs:
        early, late = (by_entropy(*part)[2] for part in parts(run, steps))
        logs.append((late / early).log().tolist())
    words = []
    for i, same in enumerate(zip(*logs)):
        mean, half = mean_of(same) if all(map(math.isfinite, same)) else (math.nan, math.nan)
        low, middle, high = (math.exp(mean + k * half) for k in (-1, 0, 1))
        axis.errorbar(
            [i + 0.15 * place], [middle], [[middle - low], [high - middle]], fmt="o", color=color, markersize=3
        )
        words.append(f"{middle:.2f} ({low:.2f} .. {high:.2f})" if middle > 0 else "none")
    axis.axhline(1, color="#444444", linewidth=0.7)
    axis.set(yscale="log", xlabel="entropy of the policy there, nats", ylabel="late distance / early distance")
    axis.set(ylim=(0.1, 10), yticks=(0.1, 0.2, 0.5, 1, 2, 5, 10), yticklabels=(0.1, 0.2, 0.5, 1, 2, 5, 10))
    axis.set_xticks(range(len(BINS)), BINS)
    return words


def draw(axis, runs, steps, color):
    """The distance of the tokens of these runs by entropy, early and late; returns where the last line ends."""
    for part, style in enumerate(("o-", "o:")):
        tokens = zip(*(parts(run, steps)[part] for run in runs))
        _, entropies, distances = by_entropy(*map(torch.cat, tokens))
        axis.plot(entropies, distances, style, color=color, markersize=4, linewidth=1.2)
    return float(distances[-1])


def sizes(runs, steps):
    """In words: mean and largest distance of all tokens, and the shares whose ratio is past 1.2 and past 2."""
    apart = torch.cat([tokens_of(run, 0, steps)[1].abs() for run in runs])
    shares = (float((apart > math.log(bound)).double().mean()) for bound in (1.2, 2))
    return [f"{apart.mean():.2g}", f"{apart.max():.2g}", *(f"{x:.2%}" for x in shares)]
