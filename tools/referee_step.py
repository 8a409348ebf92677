"""
One update of another trainer, done again in float32, for tools/referee.py: what moved, by how much and in which
direction, beside what the formula says and what it would say with one mistake. No tool by itself.
"""

import math
import types

import torch
from referee_formats import read
from referee_hypotheses import Reference
from safetensors.torch import load_file

import kernels
from configurator import require
from models.folders import fetch_model, weight_files
from train_grpo import advantages_of, aggregate, make_sample, pack, plan_leaves, policy_loss

FLAT = 1e-30
ALIKE = 0.02  # relative distance of an update that is the formula's
EXPLAINS = 0.5  # share of the distance
SCALES = {
    0.5: "half: a mean over two ranks taken twice, or two accumulated batches averaged as one?",
    0.25: "a quarter: a mean over four taken twice?",
    0.125: "an eighth: a mean over eight taken twice?",
    2.0: "twice: a sum over two ranks that should be a mean?",
    4.0: "four times: a sum over four that should be a mean?",
    8.0: "eight times: a sum over eight that should be a mean?",
}


def samples_of(rows, args):
    """Samples with advantages, from the rows of a batch: theirs, or those of the rewards by --advantage."""
    if all(r.advantage is None for r in rows):
        require(all(r.reward is not None for r in rows), "BATCH: neither advantage nor reward in every row")
        size = args.group_size
        require(size and len(rows) % size == 0, f"--group_size={size}: must divide BATCH's {len(rows)} rows")
        rewards = torch.tensor([float(r.reward) for r in rows]).view(-1, size)
        for r, a in zip(rows, advantages_of(rewards, args.advantage).flatten().tolist()):
            r.advantage = a
    samples = []
    for r in rows:
        n = len(r.response)
        mask = torch.tensor(r.mask or [1] * n).bool()
        old = torch.tensor(r.trainer_logprobs or r.logprobs or [math.nan] * n)
        made = make_sample(torch.tensor(r.prompt), torch.tensor(r.response), mask, old)
        advantages = torch.tensor(r.advantage if isinstance(r.advantage, list) else [r.advantage] * n)
        samples.append(made._replace(advantages=advantages.float()[mask]))
    return samples


def gradients(reference, samples, args, head_apart=False):
    """{parameter: gradient} of the step's loss. head_apart: 'head' is what a tied embedding got as the head alone."""
    model, tokens = reference.model, sum(len(s.loss_at) for s in samples)
    head = model.lm_head.weight.detach().clone().requires_grad_() if head_apart else model.lm_head.weight
    model.zero_grad()
    for chosen in plan_leaves([len(s.tokens) for s in samples], 4096, 1):
        leaf = pack([samples[i] for i in chosen], "cpu")
        plan = kernels.packed_plan(leaf.lengths)
        ids = dict(input_ids=leaf.ids[None], position_ids=leaf.positions[None])
        hidden = model.model(**ids, use_cache=False, plan=plan).last_hidden_state[0]
        logprobs, _ = kernels.token_logprobs(hidden[leaf.predictors], head, leaf.targets, args.temperature)
        old = torch.where(leaf.old_logprobs.isnan(), logprobs.detach(), leaf.old_logprobs)
        counts = leaf.counts.tolist()
        losses, _ = policy_loss(args.loss, logprobs, old, leaf.advantages, counts, args.clip_low, args.clip_high)
        aggregate(losses, counts, args.aggregation, len(samples), tokens, args.max_new_tokens).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    return found | ({"head": head.grad} if head_apart else {})


def norm(tensors):
    return math.sqrt(sum(float(x.double().square().sum()) for x in tensors.values()))


def update(before, grads, args, decay=None):
    """{parameter: its change} by the first step of AdamW, or by SGD. decay(parameter): whether it decays."""
    if args.grad_clip and norm(grads) > args.grad_clip:
        scale = args.grad_clip / norm(grads)
        grads = {name: g * scale for name, g in grads.items()}
    decay = decay or (lambda p: p.dim() > 1)
    moved = {}
    for name, g in grads.items():
        step = g if args.optimizer == "sgd" else g / (g.abs() + args.eps)
        held = before[name] * args.weight_decay if decay(before[name]) else 0.0
        after = before[name] - args.learning_rate * (step + held)
        moved[name] = after - before[name]
    return moved


def compare(theirs, ours):
    """(cosine, relative distance, best factor on ours) of two {parameter: tensor}."""
    pairs = [(theirs[name].double().flatten(), ours[name].double().flatten()) for name in ours]
    dot, a, b, far = (float(sum(f(x, y) for x, y in pairs)) for f in (
        lambda x, y: x @ y, lambda x, y: x @ x, lambda x, y: y @ y, lambda x, y: (x - y) @ (x - y),
    ))  # fmt: skip
    return dot / max(math.sqrt(a * b), FLAT), math.sqrt(far / max(a, FLAT)), dot / max(b, FLAT)


def masked(samples, change):
    """Samples whose loss is at the tokens for which change(sample) is true (T,)."""
    found = []
    for s in samples:
        at = change(s).nonzero()[:, 0]
        advantage = s.advantages[0] if len(s.advantages) else torch.tensor(0.0)
        column = advantage.expand(len(at))
        nan = torch.full_like(column, math.nan)
        found.append(s._replace(loss_at=at, advantages=column, old_logprobs=nan, logprobs=nan, **{
            k: torch.zeros(len(at)) for k in ("staleness", "reference", "values", "returns")
        }))  # fmt: skip
    return found


def mistakes(samples, args):
    """Yields (mistake, samples, flags) that give other gradients."""

    def flags(**changed):
        return types.SimpleNamespace(**vars(args) | changed)

    for kind in {"token", "sequence", "constant"} - {args.aggregation}:
        yield f"loss aggregated by {kind}", samples, flags(aggregation=kind)
    yield "advantages with the other sign", [s._replace(advantages=-s.advantages) for s in samples], args
    for by in (1, -1):
        rolled = samples[by:] + samples[:by]
        given = [s._replace(advantages=(o.advantages[:1] if len(o.advantages) else torch.zeros(1)).expand(len(s.loss_at)))
                 for s, o in zip(samples, rolled)]  # fmt: skip
        yield f"advantages of the sample {by:+d}", given, args
    if args.temperature != 1:
        yield "no temperature in the trainer", samples, flags(temperature=1.0)
    last = [torch.arange(len(s.tokens)) == len(s.tokens) - 1 for s in samples]
    own = [torch.isin(torch.arange(len(s.tokens)), s.loss_at) for s in samples]
    of = {id(s): i for i, s in enumerate(samples)}
    yield "last tokens (EOS) masked", masked(samples, lambda s: own[of[id(s)]] & ~last[of[id(s)]]), args
    yield "prompts in the loss", masked(samples, lambda s: torch.arange(len(s.tokens)) > 0), args
    yield "first tokens masked", masked(samples, lambda s: own[of[id(s)]] & own[of[id(s)]].roll(1)), args
    yield "no clip of the ratio", samples, flags(clip_low=1.0, clip_high=1e9)
    yield "as plain policy gradient", samples, flags(loss="pg")


def judge(theirs, grads, update_of, reference, samples, args):
    """(words, findings, tables) of their changes or gradients {parameter: tensor}; update_of(grads): ours."""
    ours = update_of(grads)
    rows = [["parameter", "cosine", "relative distance", "best factor"]]
    still = []
    for name in ours:
        cosine, far, factor = compare({name: theirs[name]}, {name: ours[name]})
        rows.append([name, f"{cosine:.4f}", f"{far:.3g}", f"{factor:.4g}"])
        if not theirs[name].any() and ours[name].any():
            still.append(name)
    cosine, far, factor = compare(theirs, ours)
    words = [f"all parameters: cosine {cosine:.4f}, relative distance {far:.3g}, best factor {factor:.4g}"]
    scored = {}
    for what, others, flags in mistakes(samples, args):
        scored[what] = update_of(gradients(reference, others, flags))
    return words, far, factor, still, rows, scored
