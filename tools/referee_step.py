"""
One update of another trainer, done again in float32, for tools/referee.py: what moved, how far and where to, beside
what the formula says, and what it would say with one mistake. Of AdamW it is the first step: its moments are 0 before.
No tool by itself.
"""

import math
from functools import partial
from types import SimpleNamespace

import torch
from referee_formats import read
from referee_hypotheses import Reference, judge, library_logprobs
from transformers import AutoModelForCausalLM

import kernels
from configurator import require
from models.folders import weight_files
from train_grpo import advantages_of, aggregate, make_sample, pack, plan_leaves, policy_loss

FLOAT32 = 4.0  # times the distance between two float32 programs
BFLOAT16 = 1.5  # times the distance between float32 and bfloat16
SCALES = {0.125: "an eighth", 0.25: "a quarter", 0.5: "half", 2: "twice", 4: "four times", 8: "eight times"}
EMBEDDING = "model.embed_tokens.weight"


def changed(x, **columns):
    return SimpleNamespace(**vars(x) | columns)


def read_batch(path, args):
    """The rows of BATCH, with an advantage each: their own, or by --advantage from the rewards of groups."""
    rows = read(path)
    if any(r.advantage is None for r in rows):
        known = all(r.reward is not None for r in rows) and args.group_size and len(rows) % args.group_size == 0
        require(
            known, f"{path}: wants an advantage in each row, or a reward and --group_size, which divides {len(rows)}"
        )
        rewards = torch.tensor([r.reward for r in rows]).view(-1, args.group_size)
        advantages = advantages_of(rewards, args.advantage).flatten().tolist()
        rows = [changed(r, advantage=a) for r, a in zip(rows, advantages)]
    require(all(isinstance(r.advantage, float) for r in rows), f"{path}: wants one advantage a response")
    return [changed(r, mask=r.mask or [1] * len(r.response), old=r.trainer_logprobs or r.logprobs) for r in rows]


def sample_of(row):
    mask = torch.tensor(row.mask).bool()
    old = torch.tensor(row.old or [math.nan] * len(mask))
    made = make_sample(torch.tensor(row.prompt), torch.tensor(row.response), mask, old)
    return made._replace(advantages=torch.full_like(made.logprobs, row.advantage))


def gradients(model, logprobs_of, rows, args):
    """{parameter: gradient} of the step's loss. logprobs_of(leaf, temperature): (M,)."""
    samples = [sample_of(r) for r in rows]
    tokens = sum(len(s.loss_at) for s in samples)
    model.zero_grad()
    for chosen in plan_leaves([len(s.tokens) for s in samples], 4096, 1):
        leaf = pack([samples[i] for i in chosen], "cpu")
        logprobs = logprobs_of(leaf, args.temperature)
        old = leaf.old_logprobs.where(~leaf.old_logprobs.isnan(), logprobs.detach())
        counts = leaf.counts.tolist()
        losses, _ = policy_loss(args.loss, logprobs, old, leaf.advantages, counts, args.clip_low, args.clip_high)
        aggregate(losses, counts, args.aggregation, len(rows), tokens, args.max_new_tokens).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def library_gradients(folder, rows, args, rounded):
    """The same by transformers and torch, in float32 or by autocast to bfloat16."""
    kernels.disable_batch_invariant()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
        found = gradients(model, partial(library_logprobs, model), rows, args)
    kernels.enable_batch_invariant(kernels.threads)
    return found


def update(before, grads, args, decays=lambda p: p.dim() > 1):
    """{parameter: its change}, rounded as float32 weights are."""
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
    scale = min(1.0, args.grad_clip / norm) if args.grad_clip else 1.0
    moved = {}
    for name, p in before.items():
        g = scale * grads[name]
        direction = g if args.optimizer == "sgd" else g / (g.abs() + args.eps)
        held = args.weight_decay * p if decays(p) else 0.0
        moved[name] = p - args.learning_rate * (direction + held) - p
    return moved


def compare(theirs, ours):
    """(cosine, relative distance, best factor on ours) of two {parameter: tensor}."""
    x, y = (torch.cat([tensors[name].flatten() for name in ours]).double() for tensors in (theirs, ours))
    dot, a, b = (float(u @ v) + 1e-60 for u, v in ((x, y), (x, x), (y, y)))
    return dot / math.sqrt(a * b), float((x - y).norm()) / math.sqrt(a), dot / b


def mistakes(before, grads, rows, args, gradients_of, stop):
    """{mistake: changes} of an update that was put together in another way."""
    found = {f"all gradients {word}: a mean over ranks too many, or too few?": c for c, word in SCALES.items()}
    found |= {"advantages with the other sign": -1}
    found = {text: {name: c * g for name, g in grads.items()} for text, c in found.items()}
    for kind in ("token", "sequence", "constant"):
        if kind != args.aggregation and args.max_new_tokens + (kind != "constant"):
            found[f"loss aggregated by {kind}"] = gradients_of(rows, changed(args, aggregation=kind))
    for by in (1, -1, len(rows) // 2):
        others = zip(rows, rows[by:] + rows[:by])
        found[f"advantages of other samples, {by:+d}"] = gradients_of(
            [changed(r, advantage=x.advantage) for r, x in others]
        )
    last = [changed(r, mask=[m and token not in stop for m, token in zip(r.mask, r.response)]) for r in rows]
    whole = [changed(r, prompt=r.prompt[:1], response=r.prompt[1:] + r.response, old=None) for r in rows]
    found["EOS without loss"] = gradients_of(last)
    found["prompts in the loss"] = gradients_of([changed(r, mask=[1] * len(r.response)) for r in whole])
    other = changed(args, temperature=1.0)
    found["no temperature in the trainer"] = gradients_of([changed(r, old=None) for r in rows], other)
    found = {name: update(before, g, args) for name, g in found.items()}
    found["weight decay on norms and biases, too"] = update(before, grads, args, lambda p: True)
    found["no weight decay"] = update(before, grads, args, lambda p: False)
    return found


def step(args):
    """(words, findings, tables, pictures) of one update."""
    reference = Reference(args.paths[0], "BEFORE")
    rows = read_batch(args.paths[1], args)
    before = {name: p.detach().clone() for name, p in reference.model.named_parameters()}
    files = weight_files(args.paths[2], "AFTER")
    fits = all(n in files and files[n].get_slice(n).get_shape() == [*p.shape] for n, p in before.items())
    require(fits, f"{args.paths[2]}: no safetensors with all parameters of BEFORE")
    theirs = {name: files[name].get_tensor(name).float() - p for name, p in before.items()}

    def logprobs_of(leaf, temperature):
        return reference.model.token_logprobs(leaf, kernels.Sampling(temperature))[0]

    def gradients_of(rows, args=args):
        return gradients(reference.model, logprobs_of, rows, args)

    grads = gradients_of(rows)
    ours = update(before, grads, args)
    tried = mistakes(before, grads, rows, args, gradients_of, reference.stop)
    cosine, far, factor = compare(theirs, ours)
    tried[f"the update times {factor:.3g}"] = {name: factor * x for name, x in ours.items()}
    single, half = (update(before, library_gradients(reference.folder, rows, args, x), args) for x in (False, True))
    tried["bfloat16 throughout"] = half
    left = {name: compare(theirs, x)[1] for name, x in tried.items()}
    fine, coarse = FLOAT32 * compare(single, ours)[1], BFLOAT16 * compare(half, ours)[1]
    verdict, finding, hypotheses = judge(far, fine, coarse, left)
    still = [name for name in ours if ours[name].any() and not theirs[name].any()]
    if still:
        verdict, finding = f"did not move: {', '.join(still[:3])}{' (tied weights?)' * (EMBEDDING in still)}", True
    size = f"cosine {cosine:.5f}, relative distance {far:.2g}, best factor {factor:.3g}"
    words = [f"the update: {size}; float32's rounding makes {fine:.2g}, bfloat16's {coarse:.2g}: {verdict}"]
    parameters = [["cosine", "distance", "best factor", "parameter"]]
    for name in ours:
        parameters.append([*(f"{x:.3g}" for x in compare(theirs, {name: ours[name]})), name])
    return words, words * finding, [[["explains", "hypothesis"], *hypotheses], parameters], []
