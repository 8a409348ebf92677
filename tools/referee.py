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
import types
from pathlib import Path

import plot
import runs  # noqa: F401 (it lets the files of the root be imported)
import torch

import kernels
import sync
from configurator import require

SAMPLED = 4000  # tokens on which hypotheses are tried
FLOAT32 = 0.02  # times what bfloat16 costs: a difference below is float32's rounding
EXPLAINS = 0.5  # share of a difference
NATS = 10  # of evidence, before samples are said to be drawn in another way
BFLOAT16 = "bfloat16 throughout"
EDGES = {
    "position": (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096),
    "entropy": (0.01, 0.1, 0.5, 1, 2, 4),
    "log-prob": (-10, -5, -2, -1, -0.1, -0.01),
    "turn": range(1, 16),
}


def figures(ours, theirs):
    """Tokens, mean and largest distance, KL(theirs || ours) by k3, effective sample size, total variation; (N,) each."""
    d = (theirs - ours).double()
    w = (-d).exp()  # p_ours / p_theirs of tokens that were drawn from theirs
    found = d.abs().mean(), d.abs().max(), (w - 1 + d).mean(), w.mean() ** 2 / (w * w).mean(), (w - 1).abs().mean() / 2
    return [len(d), *(f"{float(x):.3g}" for x in found)]


def distances(name, ours, theirs, keys):
    """Rows of `figures`, of all tokens and by each of keys {name: (N,)}."""
    for what, key in ({"all": ours} | keys).items():
        edges = [-math.inf, *EDGES.get(what, ())]
        index = torch.bucketize(key.double(), torch.tensor(edges[1:], dtype=torch.float64), right=True)
        for i, low in enumerate(edges):
            chosen = (index == i) & ~theirs.isnan()
            if chosen.any():
                yield [name, f"{what} from {low:g}" if what != "all" else what, *figures(ours[chosen], theirs[chosen])]


def where(parts):
    """In words, where the distances of responses, [(R,)], sit."""
    broken = 0
    for x in (x for x in parts if len(x) > 8):
        sums = x.cumsum(0)[3:-4]
        k = torch.arange(4, len(x) - 3)
        broken += bool(((sums / k) / ((x.sum() - sums) / (len(x) - k))).log().abs().max() > math.log(30))
    if broken > len(parts) / 4:
        return f"{broken} of {len(parts)} responses agree up to a token or from one on: weights changed in flight?"
    first = float(torch.stack([x[0] for x in parts]).mean() / torch.cat(parts).mean())
    return f"first tokens are {first:.2g} times as far"


def judge(name, ours, theirs, predicted, unit, lengths):
    """(a verdict, whether it is a finding, rows of hypotheses) of log-probs (N,). unit: what bfloat16 costs."""
    far = (theirs - ours).abs()
    scores = {}
    for hypothesis, logprobs in predicted.items():
        left = (theirs - logprobs).abs()
        scores[hypothesis] = 1 - float(left.nanmean() / far[~left.isnan()].mean().clamp(min=1e-30))
    best = sorted(scores, key=scores.get, reverse=True)
    mean = float(far.nanmean())
    words = f"{name}: {mean:.3g} nats a token from float32, {mean / unit:.2g} times what bfloat16 costs: "
    finding = False
    if mean <= FLOAT32 * unit:
        words += "float32's rounding"
    elif scores[best[0]] > EXPLAINS:
        finding = best[0] != BFLOAT16
        words += f"{best[0]} explains {scores[best[0]]:.1%}"
    elif mean <= 2 * unit:
        words += "bfloat16's rounding"
    else:
        finding = True
        words += f"unexplained; {where([x.nan_to_num() for x in far.split(lengths)])}"
    return words, finding, [[name, hypothesis, f"{scores[hypothesis]:.1%}"] for hypothesis in best[:6]]


def endings(reference, samples):
    """What is wrong with the ends of responses, in words."""
    from models.folders import load_tokenizer

    stop = load_tokenizer(reference.folder)[1]
    masked = [s for s in samples if s.mask and s.response[-1] in stop and not s.mask[-1]]
    if len(masked) > len(samples) / 10:
        yield f"endings: the mask leaves out the EOS of {len(masked)} of {len(samples)} responses"
    longest = max(len(s.response) for s in samples)
    short = [s for s in samples if s.response[-1] not in stop and len(s.response) < longest]
    if len(short) > len(samples) / 10:
        states = torch.stack([x[-1] for x in reference.predictors(short)])
        chance = float(kernels.head_logits(states, reference.head).softmax(-1)[:, stop].sum(1).mean())
        if chance > 0.2:
            yield f"endings: EOS dropped: {len(short)} end without one; the model gives it {chance:.0%} there"


def rollouts(args):
    """(words, findings, tables, panels) of an engine's samples."""
    import referee_hypotheses as tried
    from referee_formats import read

    samples = read(args.paths[1])
    reference = tried.Reference(args.paths[0])
    top = max(max(s.prompt + s.response) for s in samples)
    require(
        top < len(reference.head), f"{args.paths[1]}: token {top}, MODEL has {len(reference.head)}: another model's"
    )
    lengths = [len(s.response) for s in samples]
    ours, entropy = reference.logprobs(samples, args.temperature)

    def column(name, default=math.nan):
        return torch.tensor([x for s in samples for x in getattr(s, name) or [default] * len(s.response)])

    loss = column("mask", 1.0) > 0
    columns = dict(engine=column("logprobs"), trainer=column("trainer_logprobs"))
    columns = {name: x.where(loss, math.nan) for name, x in columns.items() if not x.isnan().all()}
    few = sum(sum(lengths[:i]) < SAMPLED for i in range(len(samples)))
    n = sum(lengths[:few])
    judged = samples[:few], args.temperature
    reported, gains = tried.of_distribution(reference, *judged)
    reported[BFLOAT16] = tried.in_bfloat16(reference.folder, *judged)
    unit = float((reported[BFLOAT16] - ours[:n]).abs().mean())
    others = {str(folder): tried.Reference(folder, "--also") for folder in args.also}
    words, found = [], []
    tried_rows = [["log-probs", "hypothesis", "explains"]]
    rows = [["log-probs", "where", "tokens", "mean", "max", "k3", "effective samples", "total variation"]]
    keys = dict(position=torch.cat([torch.arange(x) for x in lengths]), entropy=entropy, turn=column("turn", 0))
    keys["log-prob"] = ours
    for name, theirs in columns.items():
        predicted = dict(reported)
        if float((theirs - ours)[:n].abs().nanmean()) > FLOAT32 * unit:
            predicted |= tried.hypotheses(reference, others, samples[:few], theirs[:n], ours[:n], args.temperature)
        verdict, finding, more = judge(name, ours[:n], theirs[:n], predicted, unit, lengths[:few])
        words.append(verdict)
        found += [verdict] * finding
        tried_rows += more
        rows += distances(name, ours, theirs, keys)
    if len(columns) == 2:
        rows += distances("engine to trainer", columns["trainer"], columns["engine"], {})
        far = {name: float((x - ours).abs().nanmean()) for name, x in columns.items()}
        near, farther = sorted(far, key=far.get)
        words.append(
            f"the {farther} is {far[farther] / max(far[near], 1e-30):.2g} times as far from float32 as the {near}"
        )
    best = max(gains, key=gains.get)
    if gains[best] > NATS:
        found.append(f"samples: as if drawn by {best}, by {gains[best]:.0f} nats more likely than by the whole softmax")
    found += endings(reference, samples)
    words += [line for line in found if line not in words]
    return words, found, {"hypotheses": tried_rows, "distances": rows}, panels(ours, columns, keys)


def panels(ours, columns, keys):
    """SVGs of the distances of tokens over each of keys."""
    made = []
    for what, key in keys.items():
        figure, axis = plot.new_panel(
            f"Distance, nats, by {what}", [types.SimpleNamespace(name=x, ledger=x) for x in columns]
        )
        for color, theirs in zip(plot.COLORS, columns.values()):
            far = (theirs - ours).abs().clamp(min=1e-9)
            axis.plot(key[:SAMPLED], far[:SAMPLED], ".", markersize=2, alpha=0.4, color=color)
        axis.set(yscale="log", xlabel=what)
        made.append(plot.svg(figure, what))
    return made


def page(title, words, tables, pictures):
    parts = [f"<p>{html.escape(line)}</p>" for line in words]
    for name, rows in tables.items():
        cells = ("".join(f"<td>{html.escape(str(x))}</td>" for x in row) for row in rows)
        parts.append(f"<h2>{name}</h2><table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>")
    return f"""<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<meta http-equiv="Content-Security-Policy" content="{plot.POLICY}"><style>{plot.STYLE} td {{ padding-right: 16px }}
</style></head><body><h1>{html.escape(title)}</h1>{"".join(parts)}
<div class="panels">{"".join(pictures)}</div></body>"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, metavar="MODEL ROLLOUTS")
    parser.add_argument("--step", action="store_true", help="BEFORE BATCH AFTER: judge an update")
    parser.add_argument("--server", default="", metavar="URL", help="judge an endpoint with OpenAI's protocol")
    parser.add_argument("--also", type=Path, nargs="+", default=[], help="other checkpoints that may have sampled")
    parser.add_argument("--out", type=Path, default=Path("referee.html"))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    flags = dict(learning_rate=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, grad_clip=1.0, clip_low=0.2)
    flags |= dict(clip_high=0.2, temperature=1.0, max_new_tokens=0, group_size=0, loss="ppo", aggregation="token")
    for name, default in (flags | dict(advantage="grpo", optimizer="adamw")).items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help="what they say they use")
    args = parser.parse_args()
    sys.excepthook = sync.report_error
    wanted = 0 if args.server else 3 if args.step else 2
    require(len(args.paths) == wanted, "wants MODEL ROLLOUTS, or --step BEFORE BATCH AFTER, or --server=URL")
    judged = rollouts
    if args.server:
        from referee_server import server as judged
    elif args.step:
        from referee_step import step as judged
    kernels.enable_batch_invariant(args.threads)
    words, found, tables, pictures = judged(args)
    print(*words, sep="\n")
    for rows in tables.values():
        widths = [max(len(str(x)) for x in column) for column in zip(*rows)]
        print(*("  ".join(str(x).ljust(w) for x, w in zip(row, widths)) for row in rows), sep="\n")
    args.out.write_text(page(args.server or " ".join(map(str, args.paths)), words, tables, pictures))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
