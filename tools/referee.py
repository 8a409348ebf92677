"""
A referee for other people's stacks: their log-probs, updates and servers beside our operators in float32.

    python tools/referee.py MODEL ROLLOUTS                   # an engine's log-probs, and a trainer's
    python tools/referee.py --step BEFORE BATCH AFTER --learning_rate=1e-6    # one update, done again
    python tools/referee.py --server=http://127.0.0.1:8000   # what changes a server's answers

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
from itertools import accumulate
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import plot
import referee_hypotheses as tried
import runs  # noqa: F401 (it lets the files of the root be imported)
import torch
from referee_formats import read

import kernels
import sync
from configurator import require

FLOAT32 = 0.02  # times what bfloat16 costs: a difference below is float32's rounding
BFLOAT16 = 2.0  # times what it costs here: a difference above is more than that
NATS = 10  # of evidence, before samples are said to be drawn in another way
EDGES = {
    "all": (),
    "position": (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096),
    "entropy": (0.01, 0.1, 0.5, 1, 2, 4),
    "log-prob": (-10, -5, -2, -1, -0.1, -0.01),
    "turn": range(1, 16),
}
FLAGS = dict(
    temperature=1.0, tokens=4000, loss="ppo", aggregation="token", advantage="grpo", clip_low=0.2, clip_high=0.2,
    max_new_tokens=0, group_size=0, optimizer="adamw", learning_rate=0.0, eps=1e-8, weight_decay=0.0, grad_clip=1.0,
)  # fmt: skip


def distances(name, ours, theirs, keys):
    """Rows by each of keys, {name: (N,)}, of distance, KL(theirs || ours) by k3, effective samples, total variation."""
    for what, key in keys.items():
        index = torch.bucketize(key.float(), torch.tensor(EDGES[what]), right=True)
        for i, low in enumerate(["", *EDGES[what]]):
            d = (theirs - ours)[(index == i) & ~theirs.isnan()].double()
            w = (-d).exp()  # p_ours / p_theirs of tokens that were drawn from theirs
            if len(d):
                found = [d.abs().mean(), d.abs().max(), (w - 1 + d).mean(), w.mean() ** 2 / (w * w).mean()]
                yield [name, what, low, len(d), *(f"{float(x):.3g}" for x in [*found, (w - 1).abs().mean() / 2])]


def judge(name, ours, theirs, predicted, unit, first):
    """As tried.judge, of log-probs (N,). unit: what bfloat16 costs; first: which are first tokens."""
    far = (theirs - ours).abs()
    average = float(far.nanmean())
    left = {}
    for hypothesis, logprobs in predicted.items():  # as a share of the same tokens' distance
        its = (theirs - logprobs).abs()
        left[hypothesis] = average * float(its.nanmean() / far[~its.isnan()].mean().clamp(min=1e-30))
    verdict, finding, rows = tried.judge(average, FLOAT32 * unit, BFLOAT16 * unit, left)
    if verdict == "unexplained":
        verdict += f", {float(far[first].nanmean()) / average:.2g} times that on first tokens"
        agree = float((far <= FLOAT32 * unit).float().mean())
        if 0.05 < agree < 0.95:
            verdict += f"; {agree:.0%} of the tokens agree: weights changed in flight?"
    words = (
        f"{name}: {average:.3g} nats a token from float32, {average / unit:.2g} times what bfloat16 costs: {verdict}"
    )
    return words, finding, [[name, *row] for row in rows]


def endings(reference, samples):
    """What is wrong with the ends of responses, in words."""
    stop = reference.stop
    longest = max(len(s.response) for s in samples)
    masked = sum(bool(s.mask) and s.response[-1] in stop and not s.mask[-1] for s in samples)
    short = [s for s in samples if s.response[-1] not in stop and len(s.response) < longest]
    if masked > len(samples) / 10:
        yield f"endings: the mask leaves out the EOS of {masked} of {len(samples)} responses"
    if len(short) > len(samples) / 10:
        chances = [float(reference.logits(s)[-1].softmax(-1)[stop].sum()) for s in short]
        if mean(chances) > 0.2:
            yield f"endings: EOS dropped: {len(short)} end without one; the model gives it {mean(chances):.0%} there"


def rollouts(args):
    """(words, findings, tables, pictures) of an engine's samples."""
    samples = read(args.paths[1])
    ends = accumulate(len(s.response) for s in samples)
    samples = [s for s, end in zip(samples, ends) if end - len(s.response) < args.tokens]
    reference = tried.Reference(args.paths[0], "MODEL")
    top = max(max(s.prompt + s.response) for s in samples)
    require(top < len(reference.head), f"{args.paths[1]}: token {top}; MODEL has {len(reference.head)}")
    given = samples, args.temperature
    ours, entropy = reference.logprobs(*given)

    def column(name, default=math.nan):
        return torch.tensor([x for s in samples for x in getattr(s, name) or [default] * len(s.response)])

    drawn = tried.of_distribution(reference, *given)
    rounded = tried.in_bfloat16(reference.folder, *given)
    unit = float((rounded - ours).abs().mean())
    predicted = drawn | {"bfloat16 throughout": rounded}
    columns = dict(engine=column("logprobs"), trainer=column("trainer_logprobs"))
    masked = column("mask", 1) == 0
    columns = {name: x.masked_fill(masked, math.nan) for name, x in columns.items() if not x.isnan().all()}
    far = {float((x - ours).abs().nanmean()): name for name, x in columns.items()}
    if max(far, default=0) > FLOAT32 * unit:
        predicted |= tried.hypotheses(reference, samples, ours, args.temperature)
    keys = {"all": ours, "position": torch.cat([torch.arange(len(s.response)) for s in samples]), "entropy": entropy}
    keys |= {"log-prob": ours, "turn": column("turn", 0)}
    words, found = [], [*endings(reference, samples)]
    hypotheses = [["log-probs", "explains", "hypothesis"]]
    rows = [["log-probs", "by", "from", "tokens", "mean", "max", "k3", "ESS", "TV"]]
    for name, theirs in columns.items():
        verdict, finding, more = judge(name, ours, theirs, predicted, unit, keys["position"] == 0)
        words.append(verdict)
        found += [verdict] * finding
        hypotheses += more
        rows += distances(name, ours, theirs, keys)
    if len(columns) == 2:
        rows += distances("both", columns["trainer"], columns["engine"], dict(all=ours))
        words.append(f"the {far[max(far)]} is {max(far) / max(min(far), 1e-30):.2g} times as far from float32")
    gains = {name: float((x - ours)[~masked].sum()) for name, x in drawn.items()}
    best = max(gains, key=gains.get)
    if gains[best] > NATS:
        found.append(f"samples: as if drawn by {best}, by {gains[best]:.0f} nats likelier than as they say")
    words += [line for line in found if line not in words]
    return words, found, [hypotheses, rows], panels(ours, columns, keys)


def panels(ours, columns, keys):
    """SVGs of the distances of tokens by each of keys."""
    for what in ("position", "entropy", "log-prob"):
        figure, axis = plot.new_panel(f"Distance by {what}, nats", [SimpleNamespace(name=x, ledger=x) for x in columns])
        for color, theirs in zip(plot.COLORS, columns.values()):
            far = (theirs - ours).abs().clamp(min=1e-9)
            axis.plot(keys[what], far, ".", markersize=2, alpha=0.4, color=color)
        axis.set(yscale="log", xlabel=what)
        yield plot.svg(figure, what)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, metavar="MODEL ROLLOUTS")
    parser.add_argument("--step", action="store_true", help="BEFORE BATCH AFTER: judge an update")
    parser.add_argument("--server", metavar="URL", help="judge an endpoint with OpenAI's protocol")
    parser.add_argument("--chat", action="store_true", help="with --server: by chat completions")
    parser.add_argument("--out", type=Path, default=Path("referee.html"))
    for name, default in FLAGS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help="default: %(default)s")
    args = parser.parse_args()
    sys.excepthook = sync.report_error
    judged = rollouts
    wanted = 2
    if args.server:
        from referee_server import server as judged

        wanted = 0
    elif args.step:
        from referee_step import step as judged

        wanted = 3
    require(len(args.paths) == wanted, "wants MODEL ROLLOUTS, or --step BEFORE BATCH AFTER, or --server=URL")
    kernels.enable_batch_invariant(os.cpu_count())
    words, found, tables, pictures = judged(args)
    texts = ["\n".join("".join(f"{x!s:<18}" for x in row) for row in rows) for rows in tables]
    print(*words, *texts, sep="\n")
    title = SimpleNamespace(name=args.server or " ".join(map(str, args.paths)))
    shown = [f"<pre>{html.escape(text)}</pre>" for text in texts]
    args.out.write_text(plot.page([title], words, [*pictures, *shown], ""))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
