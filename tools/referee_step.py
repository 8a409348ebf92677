"""
One update of another trainer, done again in float32, for tools/referee.py: the change of the weights beside that of the
formula, and beside those with one mistake. It is AdamW's first step: its moments are 0 before. No tool by itself.
"""

import math
from types import SimpleNamespace

import torch
from referee_formats import read
from referee_hypotheses import THROUGHOUT, Reference, judge, logprobs

import kernels
from configurator import require
from onecurve.cpu import host
from train_grpo import advantages_of, aggregate, policy_loss

SCALES = {0.125: "an eighth", 0.25: "a quarter", 0.5: "half", 2: "twice", 4: "four times", 8: "eight times"}


def changed(x, **columns):
    return SimpleNamespace(**vars(x) | columns)


def read_batch(path, args):
    """The rows of BATCH, with an advantage each: their own, or by --advantage from the rewards of groups."""
    rows = read(path)
    if None in [r.advantage for r in rows]:
        fits = args.group_size and len(rows) % args.group_size == 0 and None not in [r.reward for r in rows]
        why = f"wants an advantage in each row, or a reward and --group_size, which divides {len(rows)}"
        require(fits, f"{path}: {why}")
        rewards = torch.tensor([r.reward for r in rows]).view(-1, args.group_size)
        for row, advantage in zip(rows, advantages_of(rewards, args.advantage).flatten()):
            row.advantage = advantage
    for row in rows:
        own, engine = torch.tensor([row.trainer_logprobs, row.logprobs])
        row.old = own.where(~own.isnan(), engine)
        row.advantage = torch.as_tensor(row.advantage)
    return rows


def gradients(model, rows, args):
    """{parameter: gradient} of the step's loss."""
    tokens = sum(sum(r.mask) for r in rows)
    model.zero_grad()
    for row in rows:
        at = torch.tensor(row.mask).nonzero()[:, 0]
        now = logprobs(model, row, args.temperature)
        old = now.detach().where(row.old.isnan(), row.old)
        columns = [x[at] for x in (now, old, row.advantage.expand(len(now)))]
        losses, _ = policy_loss(args.loss, *columns, [len(at)], args.clip_low, args.clip_high)
        aggregate(losses, [len(at)], args.aggregation, len(rows), tokens, args.max_new_tokens).backward()
    return {name: p.grad.float() for name, p in model.named_parameters()}


def update(before, grads, args, norms=False):
    """The change (N,) of all parameters, rounded as float32 weights are. norms: whether these decay, too."""
    after = {name: p.clone() for name, p in before.items()}
    for name, p in after.items():
        p.grad = grads[name].clone()
    torch.nn.utils.clip_grad_norm_(after.values(), args.grad_clip or math.inf)
    groups = [dict(params=[p], weight_decay=args.weight_decay * (norms or p.dim() > 1)) for p in after.values()]
    torch.optim.AdamW(groups, args.learning_rate, eps=args.eps).step()
    return torch.cat([(p - before[name]).flatten() for name, p in after.items()])


def compare(theirs, ours):
    """(cosine, relative distance, best factor on ours) of two vectors."""
    x = theirs.double()
    y = ours.double()
    return float(torch.cosine_similarity(x, y, 0)), float((x - y).norm() / x.norm()), float(x @ y / (y @ y))


def mistaken(reference, rows, args, before, grads, factor):
    """By mistake the change (N,) that is then made."""

    def again(rows, **others):
        return update(before, gradients(reference.model, rows, changed(args, **others)), args)

    kernels.disable_batch_invariant()
    coarse = gradients(reference.rounded, rows, args)
    kernels.enable_batch_invariant(host.threads)
    yield THROUGHOUT, update(before, coarse, args)
    yield f"the update times {factor:.3g}", factor * update(before, grads, args)
    yield "weight decay on norms and biases, too", update(before, grads, args, norms=True)
    yield "no weight decay", update(before, grads, changed(args, weight_decay=0.0))
    for scale, word in SCALES.items():
        scaled = {name: scale * g for name, g in grads.items()}
        yield f"all gradients {word}: a mean over ranks too many, or too few?", update(before, scaled, args)
    for kind in ("token", "sequence", "constant"):
        yield f"loss aggregated by {kind}", again(rows, aggregation=kind)
    for by in (1, -1):
        firsts = [x.advantage.flatten()[0] for x in rows[by:] + rows[:by]]
        others = [changed(r, advantage=x) for r, x in zip(rows, firsts)]
        yield f"advantages of other samples, {by:+d}", again(others)
    ends = [[m and token not in reference.stop for m, token in zip(r.mask, r.response)] for r in rows]
    yield "EOS without loss", again([changed(r, mask=m) for r, m in zip(rows, ends)])
    fresh = [changed(r, old=torch.tensor(math.nan)) for r in rows]
    yield "no temperature in the trainer", again(fresh, temperature=1.0)


def step(args):
    """(words, findings, tables, pictures) of one update."""
    folder, batch, after = args.step
    reference = Reference(folder, "BEFORE")
    rows = read_batch(batch, args)
    before = {name: p.detach() for name, p in reference.model.named_parameters()}
    moved = {name: p.clone() for name, p in before.items()}
    reference.load(moved, after, "AFTER")
    theirs = torch.cat([(moved[name] - p).flatten() for name, p in before.items()])
    grads = gradients(reference.model, rows, args)
    ours = update(before, grads, args)
    cosine, far, factor = compare(theirs, ours)
    predicted = mistaken(reference, rows, args, before, grads, factor)
    _, verdict, finding, hypotheses = judge(theirs, ours, predicted, power=2)
    parameters = [["cosine", "distance", "best factor", "parameter"]]
    sizes = [p.numel() for p in before.values()]
    still = []
    for name, x, y in zip(before, theirs.split(sizes), ours.split(sizes)):
        parameters.append([*(f"{number:.3g}" for number in compare(x, y)), name])
        if y.any() and not x.any():
            still.append(name)
    if still:
        tied = " (tied weights?)" * ("model.embed_tokens.weight" in still)
        verdict = f"did not move: {', '.join(still[:3])}{tied}"
    words = [f"the update: cosine {cosine:.5f}, relative distance {far:.2g}, best factor {factor:.3g}, {verdict}"]
    return words, words * (finding or bool(still)), [[["explains", "hypothesis"], *hypotheses], parameters], []
