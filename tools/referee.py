"""
A referee for other people's stacks: their log-probs and updates beside our operators in float32.

    python tools/referee.py MODEL ROLLOUTS                   # an engine's log-probs, and a trainer's
    python tools/referee.py --step BEFORE BATCH AFTER --learning_rate=1e-6    # one update, done again

ROLLOUTS, BATCH: JSON lines of prompt_ids, response_ids, logprobs[, trainer_logprobs, mask, turn, advantage or reward],
or what TRL, vLLM, prime-rl, verl and slime write (docs/referee.md). MODEL, BEFORE, AFTER: model folders (Qwen3, Qwen2,
Llama). Prints what it finds, and writes it with pictures to --out. Exit status 0: nothing found, 1: a mistake named, or
a difference that nothing explains, 2: files that cannot be judged.
"""

import argparse
import html
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import plot
import torch
from referee_formats import read
from referee_hypotheses import Reference, drawn, judge, logits, mistaken, over
from referee_step import step

import kernels
from configurator import require

FEW = 16  # samples on which mistakes are tried
LIKELY = 0.2  # chance of an EOS
NATS = 10  # of evidence, before samples are said to be drawn in another way
EDGES = {
    "all": (),
    "position": (1, 4, 16, 64, 256, 1024, 4096),
    "entropy": (0.01, 0.1, 0.5, 1, 2, 4),
    "log-prob": (-10, -5, -2, -1, -0.1, -0.01),
    "turn": range(1, 16),
}
FLAGS = dict(
    out="referee.html", temperature=1.0, tokens=4000, loss="ppo", aggregation="token", advantage="grpo",
    clip_low=0.2, clip_high=0.2, max_new_tokens=1, group_size=0, learning_rate=0.0, eps=1e-8, weight_decay=0.0,
    grad_clip=1.0,
)  # fmt: skip


def distances(name, ours, theirs, keys):
    """Rows by each of EDGES of distance, KL(theirs || ours) by k3, effective sample size, total variation."""
    for what, edges in EDGES.items():
        index = torch.bucketize(keys[what].float(), torch.tensor(edges), right=True)
        for i, low in enumerate(["", *edges]):
            d = (theirs - ours)[(index == i) & ~theirs.isnan()].double()
            w = (-d).exp()  # p_ours / p_theirs of tokens that were drawn from theirs
            if len(d):
                found = [d.abs().mean(), d.abs().max(), (w - 1 + d).mean(), w.mean() ** 2 / (w * w).mean()]
                yield [name, what, low, len(d), *(f"{float(x):.3g}" for x in [*found, (w - 1).abs().mean() / 2])]


def endings(reference, samples):
    """What is wrong with the ends of responses, in words."""
    stop = reference.stop
    masked = sum(s.response[-1] in stop and not s.mask[-1] for s in samples)
    chances = [logits(reference.model, s)[-1].softmax(-1)[stop].sum() for s in samples if s.response[-1] not in stop]
    dropped = sum(x.item() > LIKELY for x in chances)
    if masked > len(samples) / 10:
        yield f"endings: the mask leaves out the EOS of {masked} of {len(samples)} responses"
    if dropped > len(samples) / 10:
        yield f"endings: EOS dropped: {dropped} of {len(samples)} lack it where its chance is above {LIKELY:.0%}"


def given(sample):
    """The columns of a sample's response."""
    yield "position", torch.arange(len(sample.response))
    for name in ("logprobs", "trainer_logprobs", "mask", "turn"):
        yield name, torch.tensor(getattr(sample, name))


def rollouts(args):
    """(words, findings, tables, pictures) of an engine's samples."""
    folder, path = args.paths
    samples = read(path)
    while sum(len(s.response) for s in samples[1:]) > args.tokens:
        samples.pop()
    reference = Reference(folder, "MODEL")
    size = reference.hf.vocab_size
    require(max(max(s.prompt + s.response) for s in samples) < size, f"{path}: tokens beyond MODEL's {size}")
    by_draw = over(samples, drawn, reference.model, args.temperature)
    ours = by_draw[f"temperature {args.temperature:g}"]
    keys = over(samples, given) | {"all": ours, "log-prob": ours, "entropy": by_draw.pop("entropy")}
    predicted = by_draw | over(samples[:FEW], mistaken, reference, args.temperature)
    masked = keys["mask"] == 0
    columns = dict(engine=keys["logprobs"], trainer=keys["trainer_logprobs"])
    columns = {name: x.masked_fill(masked, math.nan) for name, x in columns.items() if not x.isnan().all()}
    words = []
    found = [*endings(reference, samples)]
    hypotheses = [["log-probs", "explains", "hypothesis"]]
    rows = [["log-probs", "by", "from", "tokens", "mean", "max", "k3", "ESS", "TV"]]
    averages = {}
    for name, theirs in columns.items():
        averages[name], verdict, finding, more = judge(theirs, ours, predicted.items())
        first = float((theirs - ours)[keys["position"] == 0].abs().nanmean())
        size = f"{averages[name]:.3g} nats a token from float32, {first:.3g} on first tokens"
        words.append(f"{name}: {size}, {verdict}")
        found += words[-1:] * finding
        hypotheses += [[name, *row] for row in more]
        rows += distances(name, ours, theirs, keys)
    if len(columns) == 2:
        rows += distances("both", columns["trainer"], columns["engine"], keys)
        best, worst = sorted(averages, key=averages.get)
        words.append(f"the {worst} is {averages[worst] / max(averages[best], 1e-30):.2g} times as far from float32")
    gains = {name: float((x - ours)[~masked].sum()) for name, x in by_draw.items()}
    best = max(gains, key=gains.get)
    if gains[best] > NATS:
        found.append(f"samples: as if drawn by {best}, by {gains[best]:.0f} nats likelier than as they say")
    words += [line for line in found if line not in words]
    return words, found, [hypotheses, rows], panels(columns, keys)


def panels(columns, keys):
    """SVGs of the distances of tokens by each of keys."""
    for what in ("position", "entropy", "log-prob"):
        figure, axis = plot.new_panel(f"Distance by {what}, nats", [])
        for name, theirs in columns.items():
            axis.semilogy(keys[what], (theirs - keys["log-prob"]).abs() + 1e-9, ".", alpha=0.4, label=name)
        axis.legend()
        yield plot.svg(figure, what)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", metavar="MODEL ROLLOUTS", type=Path)
    parser.add_argument("--step", nargs=3, metavar=("BEFORE", "BATCH", "AFTER"), type=Path)
    for name, default in FLAGS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help="default: %(default)s")
    args = parser.parse_args()
    judged = step if args.step else rollouts
    fits = len(args.paths) == 2 * (judged is rollouts)
    require(fits, "wants MODEL ROLLOUTS, or --step BEFORE BATCH AFTER")
    kernels.enable_batch_invariant(os.cpu_count())
    words, found, tables, pictures = judged(args)
    texts = ["\n".join("".join(f"{x!s:<18}" for x in row) for row in rows) for rows in tables]
    print(*words, *texts, sep="\n")
    shown = [f"<pre>{html.escape(text)}</pre>" for text in texts]
    page = plot.page([SimpleNamespace(name="referee")], words, [*pictures, *shown], "")
    Path(args.out).write_text(page)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
