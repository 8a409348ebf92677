"""
A referee for other people's stacks: what their log-probs, updates and servers are beside our operators in float32.

    python tools/referee.py MODEL ROLLOUTS                   # an engine's log-probs, and a trainer's
    python tools/referee.py --step BEFORE BATCH AFTER --learning_rate=1e-6    # one update, done again
    python tools/referee.py --server http://127.0.0.1:8000   # what changes a server's answers

ROLLOUTS, BATCH: JSON lines of prompt_ids, response_ids, logprobs[, trainer_logprobs, mask, turn, advantage or reward],
or what TRL, vLLM, prime-rl, verl and slime write (docs/referee.md). MODEL, BEFORE, AFTER: model folders (Qwen3, Qwen2,
Llama). Prints what it finds, and writes it with pictures to --out. Exit status 0: nothing found, 1: a mistake named, or
a difference that nothing explains, 2: files that cannot be judged.
"""

import argparse
import html
import os
import sys
import types
from pathlib import Path

import runs  # noqa: F401 (it lets the files of the root be imported)

import sync
from configurator import lean_imports, require

SAMPLED = 4000  # tokens on which hypotheses are tried, fewer with a large vocabulary
FLOAT32 = 0.02  # a difference below this share of what bfloat16 costs is float32's rounding
EXPLAINS = 0.5  # share of a difference
NATS = 10  # of evidence, before samples are said to come from another distribution


def figures(ours, theirs):
    """Of log-probs (N,): how far apart, with w = p_ours / p_theirs of tokens drawn from theirs."""
    d = theirs - ours
    w = (-d).exp()
    return dict(
        mean=float(d.abs().mean()), max=float(d.abs().max()), k3=float((w - 1 + d).mean()),
        effective=float(w.sum() ** 2 / (len(w) * (w * w).sum())), variation=float((w - 1).abs().mean() / 2),
    )  # fmt: skip


def by(what, keys, edges, distance):
    """Rows (what, bin, tokens, mean distance) of tokens by their keys (N,); edges: the bins' lower ends."""
    import torch

    index = torch.bucketize(keys, torch.tensor(edges[1:], dtype=keys.dtype), right=True)
    ends = [*map(str, edges[1:]), ".."]
    for i, (low, high) in enumerate(zip(edges, ends)):
        chosen = distance[index == i]
        if len(chosen):
            label = str(low) if high == str(low + 1) else f"{low} to {high}"
            yield [what, label, len(chosen), f"{float(chosen.mean()):.3g}"]


class Tokens:
    """The response tokens of samples, end to end, with what MODEL says of them. N: those that the mask leaves in."""

    def __init__(self, reference, samples, temperature):
        import torch

        self.samples = samples
        self.lengths = [len(s.response) for s in samples]
        prompts, responses = [s.prompt for s in samples], [s.response for s in samples]
        self.parts = types.SimpleNamespace(prompts=prompts, responses=responses)
        self.ours, self.entropy = reference.logprobs(prompts, responses, temperature)
        self.position = torch.cat([torch.arange(n) for n in self.lengths])
        self.mask = self.column("mask", 1).bool()

    def column(self, name, default=float("nan")):
        import torch

        filled = [getattr(s, name) or [default] * n for s, n in zip(self.samples, self.lengths)]
        return torch.tensor([x for part in filled for x in part], dtype=torch.float32)


def judge(name, tokens, theirs, predicted, unit):
    """(a verdict in words, whether it is a finding, rows of the hypotheses) of a column of log-probs (N,)."""
    seen = tokens.mask & ~theirs.isnan()
    distance = float((theirs - tokens.ours)[seen].abs().mean())
    scores = {}
    for hypothesis, logprobs in predicted.items():
        both = seen & ~logprobs.isnan()
        plain = float((theirs - tokens.ours)[both].abs().mean())
        scores[hypothesis] = 1 - float((theirs - logprobs)[both].abs().mean()) / max(plain, 1e-30)
    best = sorted(scores, key=scores.get, reverse=True)
    rows = [[name, hypothesis, f"{scores[hypothesis]:.1%}"] for hypothesis in best[:5]]
    size = f"{name}: {distance:.3g} nats a token from float32, {distance / unit:.2g} times what bfloat16 costs"
    if distance <= FLOAT32 * unit:
        return f"{size}: float32's rounding", False, rows
    if scores[best[0]] >= EXPLAINS:
        verdict = f"{size}: {best[0]} explains {scores[best[0]]:.1%} of it"
        return verdict, best[0] != BFLOAT16, rows
    if distance <= 2 * unit:
        return f"{size}: bfloat16's rounding", False, rows
    return f"{size}: nothing that was tried explains it; {where(tokens, (theirs - tokens.ours).abs())}", True, rows


def where(tokens, distance):
    """In words, where a difference (N,) sits."""
    parts = distance.nan_to_num().split(tokens.lengths)
    for first, last, word in ((0, 1, "up to a token and not after it"), (1, 0, "from a token on and not before it")):
        halves = [[(x[:k].mean(), x[k:].mean()) for k in range(4, len(x) - 3)] for x in parts]
        broken = sum(any(30 * half[first] < half[last] for half in each) for each in halves)
        if broken > len(parts) / 4:
            return f"{broken} of {len(parts)} responses agree {word}: weights changed in flight?"
    first = float(distance[tokens.position == 0].nanmean()) / max(1e-30, float(distance[tokens.position > 0].nanmean()))
    if first > 3:
        return f"it is {first:.0f} times as large on first tokens: another prompt?"
    return "it is on all tokens alike"


BFLOAT16 = "bfloat16 throughout"


def draws(gains):
    """(what the samples say of how they were drawn, whether that is a finding), given each rule's log-likelihood."""
    best = max(gains, key=gains.get)
    if gains[best] < NATS:
        return "samples: as if drawn from the whole softmax at this temperature", False
    return f"samples: as if drawn by {best}, which is {gains[best]:.0f} nats more likely than plain sampling", True


def endings(reference, samples, stop):
    """What is wrong with the ends of responses, in words."""
    import torch

    import kernels

    longest = max(len(s.response) for s in samples)
    short = [s for s in samples if s.response[-1] not in stop and len(s.response) < longest]
    masked = [s for s in samples if s.mask and s.response[-1] in stop and not s.mask[-1]]
    if len(masked) > len(samples) / 10:
        yield f"endings: the mask leaves out the EOS of {len(masked)} of {len(samples)} responses"
    if len(short) > len(samples) / 10:
        short = short[:64]
        with torch.no_grad():
            states = reference.hidden([s.prompt for s in short], [s.response for s in short])
            ends = torch.cat([x[-1:] for x in states])
            chance = torch.softmax(kernels.head_logits(ends, reference.head), -1)[:, stop].sum(1).mean()
        if chance > 0.2:
            what = f"{len(short)} responses end without an EOS, to which the model gives {chance:.0%} there"
            yield f"endings: EOS dropped: {what}"


def rollouts(args):
    """Judges an engine's samples: (verdicts, findings, tables, panels)."""
    with lean_imports():
        import torch

        import kernels
        import referee_hypotheses as tried
        from models.folders import load_tokenizer
        from referee_formats import read
    kernels.enable_batch_invariant(args.threads)
    samples = read(args.paths[1])
    reference = tried.Reference(args.paths[0])
    top = max(max(*s.prompt, *s.response) for s in samples)
    require(top < len(reference.head), f"{args.paths[1]}: token {top}; MODEL has {len(reference.head)}: another model's")
    tokens = Tokens(reference, samples, args.temperature)
    columns = {"engine": tokens.column("logprobs"), "trainer": tokens.column("trainer_logprobs")}
    columns = {name: x for name, x in columns.items() if not x.isnan().all()}
    words, found = [], []
    # what is tried needs passes of its own, so it is tried on some samples
    budget, few = min(SAMPLED, tried.LOGITS * 4 // len(reference.head)), []
    for s in samples:
        if sum(len(x.response) for x in few) < budget:
            few.append(s)
    part = Tokens(reference, few, args.temperature)
    n = len(part.ours)
    with torch.no_grad():
        states = torch.cat([x[:-1] for x in reference.hidden(part.parts.prompts, part.parts.responses)])
    targets = torch.tensor([token for r in part.parts.responses for token in r])
    reported, gains = tried.of_distribution(states, reference.head, targets, args.temperature)
    rounded = reference.in_bfloat16(part.parts.prompts, part.parts.responses, args.temperature)
    unit = float((rounded - part.ours).abs().mean())
    others = {str(folder): tried.Reference(folder, "--also") for folder in args.also}
    tables = {"hypotheses": [["log-probs", "hypothesis", "explains"]]}
    for name, theirs in columns.items():
        predicted = {BFLOAT16: rounded} | reported
        its = theirs[:n]
        if float((its - part.ours).abs().nanmean()) > FLOAT32 * unit:
            predicted |= tried.hypotheses(reference, others, part.parts, its, part.ours, args.temperature)
        verdict, finding, rows = judge(name, part, its, predicted, unit)
        words.append(verdict)
        found += [verdict] * finding
        tables["hypotheses"] += rows
    if len(columns) == 2:
        far = {name: float((x - tokens.ours)[tokens.mask].abs().nanmean()) for name, x in columns.items()}
        a, b = sorted(far, key=far.get)
        words.append(f"the {b} is {far[b] / max(far[a], 1e-30):.3g} times as far from float32 as the {a}")
    verdict, finding = draws(gains)
    stop = load_tokenizer(reference.folder)[1]
    for line, bad in [(verdict, finding), *((line, True) for line in endings(reference, samples, stop))]:
        words.append(line)
        found += [line] * bad
    compared = dict(columns) | ({"engine to trainer": columns["engine"] - columns["trainer"] + tokens.ours} if len(columns) == 2 else {})
    tables["distances"] = [["log-probs", "tokens", "mean", "max", "k3", "effective samples", "total variation"]]
    for name, theirs in compared.items():
        seen = tokens.mask & ~theirs.isnan()
        row = figures(tokens.ours[seen].double(), theirs[seen].double())
        tables["distances"].append([name, int(seen.sum()), *(f"{x:.3g}" for x in row.values())])
    for name, theirs in columns.items():
        seen = tokens.mask & ~theirs.isnan()
        d = (theirs - tokens.ours)[seen].abs()
        rows = [["by", "from", "tokens", "mean distance"]]
        rows += by("position", tokens.position[seen], [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384], d)
        rows += by("entropy", tokens.entropy[seen], [0, 0.01, 0.1, 0.5, 1, 2, 4], d)
        rows += by("log-prob", tokens.ours[seen], [-1000, -10, -5, -2, -1, -0.1, -0.01], d)
        if any(s.turn for s in samples):
            rows += by("turn", tokens.column("turn", 0)[seen], [*range(16)], d)
        tables[name] = rows
    return words, found, tables, (tokens, columns)


def panels(tokens, columns):
    """SVGs of how far each column is from ours: by position, by log-prob, and theirs over ours."""
    import plot

    made = []
    shown = tokens.mask.nonzero()[:, 0][:4000]
    kinds = {"Position in the response": tokens.position, "Entropy, nats": tokens.entropy, "Log-prob in float32": tokens.ours}
    for title, x in kinds.items():
        runs_ = [types.SimpleNamespace(name=name, ledger=name) for name in columns]
        figure, axis = plot.new_panel(f"{title}: distance, nats", runs_)
        for i, theirs in enumerate(columns.values()):
            d = (theirs - tokens.ours).abs()[shown].clamp(min=1e-9)
            axis.plot(x[shown], d, ".", markersize=2, alpha=0.4, color=plot.COLORS[i], rasterized=True)
        axis.set(yscale="log", xlabel=title)
        made.append(plot.svg(figure, title))
    return made


def page(title, words, tables, pictures):
    import plot

    text = "".join(f"<p>{html.escape(line)}</p>" for line in words)
    for name, rows in tables.items():
        cells = ("".join(f"<td>{html.escape(str(x))}</td>" for x in row) for row in rows)
        text += f"<h2>{html.escape(name)}</h2><table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
    return f"""<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<meta http-equiv="Content-Security-Policy" content="{plot.POLICY}"><style>{plot.STYLE} td {{ padding: 1px 12px 1px 0 }}
</style></head><body><h1>{html.escape(title)}</h1>{text}<div class="panels">{"".join(pictures)}</div></body></html>"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, metavar="MODEL ROLLOUTS")
    parser.add_argument("--temperature", type=float, default=1.0, help="at which they say they sampled")
    parser.add_argument("--also", type=Path, nargs="+", default=[], help="other checkpoints that may have sampled")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=Path("referee.html"))
    args = parser.parse_args()
    sys.excepthook = sync.report_error
    words, found, tables, tokens = rollouts(args)
    print(*words, sep="\n")
    for name, rows in tables.items():
        print(f"\n{name}")
        widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
        print(*("  ".join(str(x).ljust(w) for x, w in zip(row, widths)).rstrip() for row in rows), sep="\n")
    args.out.write_text(page(" ".join(map(str, args.paths)), words, tables, panels(*tokens)))
    print(args.out)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
