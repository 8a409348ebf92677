"""
One update of another trainer, done again in float32, for tools/referee.py: what moved, how far and where to, beside
what the formula says, and what it would say with one mistake. Of AdamW it is the first step: its moments are 0 before.
No tool by itself.
"""

import math
import types

import torch
from referee_formats import read
from referee_hypotheses import Reference
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import kernels
from configurator import require
from models.folders import weight_files
from train_grpo import advantages_of, aggregate, make_sample, pack, plan_leaves, policy_loss

EXPLAINS = 0.5  # share of the distance
FLOAT32 = 4.0  # times the distance between two float32 programs
BFLOAT16 = 1.5  # times the distance between float32 and bfloat16
SCALES = {
    0.125: "all gradients an eighth: a mean over eight ranks twice?",
    0.25: "all gradients a quarter: a mean over four ranks twice?",
    0.5: "all gradients half: a mean over two ranks twice?",
    2.0: "all gradients twice: a sum over two ranks?",
    4.0: "all gradients four times: a sum over four ranks?",
    8.0: "all gradients eight times: a sum over eight ranks?",
}


def samples_of(rows, args):
    """Samples with advantages, from a batch's rows: their own, or by --advantage those of the rewards."""
    if any(r.advantage is None for r in rows):
        size = args.group_size
        known = all(r.reward is not None for r in rows)
        require(known, "BATCH: a row without advantage and reward")
        require(size > 1 and len(rows) % size == 0, f"--group_size={size}: must be the samples of a group of BATCH")
        rewards = torch.tensor([r.reward for r in rows]).view(-1, size)
        for r, advantage in zip(rows, advantages_of(rewards, args.advantage).flatten().tolist()):
            r.advantage = advantage
    samples = []
    for r in rows:
        n = len(r.response)
        mask = torch.tensor(r.mask or [1] * n).bool()
        old = torch.tensor(r.trainer_logprobs or r.logprobs or [math.nan] * n)
        made = make_sample(torch.tensor(r.prompt), torch.tensor(r.response), mask, old)
        advantages = torch.tensor(r.advantage) * torch.ones(n)
        samples.append(made._replace(advantages=advantages[mask]))
    return samples


def with_loss_at(samples, choose):
    """The samples with their loss at the tokens that choose(own loss mask (T,)) leaves or adds."""
    for s in samples:
        own = torch.zeros(len(s.tokens)).bool().index_fill(0, s.loss_at, True)
        chosen = choose(own)
        made = make_sample(s.tokens[:0], s.tokens, chosen, torch.full((len(own),), math.nan))
        yield made._replace(advantages=s.advantages[:1].expand(int(chosen.sum())))


def gradients(model, logprobs_of, samples, args):
    """{parameter: gradient} of the step's loss. logprobs_of(leaf): log-probs (M,) before the temperature's division."""
    tokens = sum(len(s.loss_at) for s in samples)
    model.zero_grad()
    for chosen in plan_leaves([len(s.tokens) for s in samples], 4096, 1):
        leaf = pack([samples[i] for i in chosen], "cpu")
        logprobs = logprobs_of(leaf, args.temperature)
        old = leaf.old_logprobs.where(~leaf.old_logprobs.isnan(), logprobs.detach())
        counts = leaf.counts.tolist()
        losses, _ = policy_loss(args.loss, logprobs, old, leaf.advantages, counts, args.clip_low, args.clip_high)
        aggregate(losses, counts, args.aggregation, len(samples), tokens, args.max_new_tokens).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def library_gradients(reference, samples, args, rounded):
    """The same by transformers and torch, in float32 or by autocast to bfloat16."""
    kernels.disable_batch_invariant()
    model = AutoModelForCausalLM.from_pretrained(reference.folder, dtype=torch.float32)

    def logprobs_of(leaf, temperature):
        logits = [model(ids[None]).logits[0] for ids in leaf.ids.split(leaf.lengths.tolist())]
        z = torch.cat(logits)[leaf.predictors].float() / temperature
        return z.log_softmax(-1).gather(1, leaf.targets[:, None])[:, 0]

    with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
        found = gradients(model, logprobs_of, samples, args)
    kernels.enable_batch_invariant(args.threads)
    return found


def clipped(grads, most):
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
    return {name: g * min(1.0, most / norm) for name, g in grads.items()} if most else grads


def update(before, grads, args, correct=1.0, decays=lambda p: p.dim() > 1):
    """{parameter: its change}, rounded as float32 weights are. correct: what AdamW's bias correction lacks."""
    moved = {}
    for name, g in clipped(grads, args.grad_clip).items():
        p = before[name]
        direction = g if args.optimizer == "sgd" else correct * g / (g.abs() + args.eps)
        held = args.weight_decay * p if decays(p) else 0.0
        moved[name] = p - args.learning_rate * (direction + held) - p
    return moved


def compare(theirs, ours):
    """(cosine, relative distance, best factor on ours) of two {parameter: tensor}."""
    dot, a, b, far = 0.0, 1e-60, 1e-60, 0.0
    for name, y in ours.items():
        x = theirs[name].double()
        dot += float((x * y).sum())
        a += float((x * x).sum())
        b += float((y.double() * y).sum())
        far += float((x - y).square().sum())
    return dot / math.sqrt(a * b), math.sqrt(far / a), dot / b


def mistakes(reference, samples, args, logprobs_of, grads):
    """{mistake: gradients}: losses put together in another way, and what tied weights may lack."""

    def of(samples, **flags):
        return gradients(reference.model, logprobs_of, [*samples], types.SimpleNamespace(**vars(args) | flags))

    found = {text: {name: c * g for name, g in grads.items()} for c, text in SCALES.items()}
    for kind in {"token", "sequence", "constant" if args.max_new_tokens else "token"} - {args.aggregation}:
        found[f"loss aggregated by {kind}"] = of(samples, aggregation=kind)
    found["advantages with the other sign"] = {name: -g for name, g in grads.items()}
    for by in {1, -1, len(samples) // 2} - {0, len(samples)}:
        pairs = zip(samples, samples[by:] + samples[:by])
        moved = [s._replace(advantages=x.advantages[:1].expand(len(s.loss_at))) for s, x in pairs]
        found[f"advantages of other samples, {by:+d}"] = of(moved)
    found["no temperature in the trainer"] = of(samples, temperature=1.0)
    found["last tokens (EOS) without loss"] = of(with_loss_at(samples, lambda own: own & own.roll(-1)))
    found["first tokens without loss"] = of(with_loss_at(samples, lambda own: own & own.roll(1)))
    found["prompts in the loss"] = of(with_loss_at(samples, lambda own: torch.arange(len(own)) > 0))
    if reference.hf.tie_word_embeddings:
        head, name = reference.head.detach().requires_grad_(), "model.embed_tokens.weight"
        alone = gradients(reference.model, lambda *x: logprobs_of(*x, head), samples, args)
        found["tied weights without the head's gradient"] = alone
        found["tied weights without the embedding's gradient"] = grads | {name: grads[name] - alone[name]}
    return found


def changes(path, before):
    """{parameter: its change} up to a checkpoint, or the gradients in a .safetensors file."""
    files = {}
    if path.is_dir():
        opened = weight_files(path, "AFTER")
        files = {name: opened[name].get_tensor(name).float() - before[name] for name in before if name in opened}
    elif path.suffix == ".safetensors" and path.exists():
        files = {name: g.float() for name, g in load_file(path).items()}
    shapes = {name: p.shape for name, p in before.items()}
    wrong = [name for name in before if name not in files or files[name].shape != shapes[name]]
    require(not wrong, f"{path}: not the weights or gradients of BEFORE's parameters: {', '.join(wrong[:2])}")
    return files


def step(args):
    """(words, findings, tables, pictures) of one update."""
    reference = Reference(args.paths[0], "BEFORE")
    samples = samples_of(read(args.paths[1]), args)
    before = {name: p.detach().clone() for name, p in reference.model.named_parameters()}
    theirs = changes(args.paths[2], before)

    def logprobs_of(leaf, temperature, head=reference.head):
        states = reference.states(leaf.ids, leaf.lengths.tolist())[leaf.predictors]
        return kernels.token_logprobs(states, head, leaf.targets, temperature)[0]

    def moved(grads, **options):
        return update(before, grads, args, **options) if args.paths[2].is_dir() else clipped(grads, args.grad_clip)

    grads = gradients(reference.model, logprobs_of, samples, args)
    ours = moved(grads)
    single, half = (compare(moved(library_gradients(reference, samples, args, x)), ours)[1] for x in (False, True))
    tried = {name: moved(g) for name, g in mistakes(reference, samples, args, logprobs_of, grads).items()}
    cosine, far, factor = compare(theirs, ours)
    tried[f"the update times {factor:.3g}"] = {name: factor * x for name, x in ours.items()}
    if args.paths[2].is_dir():
        tried["weight decay on norms and biases, too"] = moved(grads, decays=lambda p: True)
        tried["no weight decay"] = moved(grads, decays=lambda p: False)
        tried["AdamW without bias correction"] = moved(grads, correct=(1 - args.beta1) / math.sqrt(1 - args.beta2))
        rounded = {name: (before[name] + x).bfloat16().float() - before[name] for name, x in ours.items()}
        tried["weights kept in bfloat16"] = rounded
    scores = {name: 1 - compare(theirs, x)[1] / max(far, 1e-30) for name, x in tried.items()}
    best = sorted(scores, key=scores.get, reverse=True)
    still = [name for name in ours if ours[name].any() and not theirs[name].any()]
    words = [f"cosine {cosine:.5f}, relative distance {far:.2g}, best factor {factor:.3g}"]
    words.append(f"two float32 programs are {single:.2g} apart, float32 and bfloat16 {half:.2g}")
    found = []
    if still:
        why = "tied weights?" if reference.hf.tie_word_embeddings and "embed" in still[0] else ""
        found.append(f"did not move: {', '.join(still[:3])} {why}")
    elif far > FLOAT32 * single and scores[best[0]] > EXPLAINS:
        found.append(f"{best[0]}: explains {scores[best[0]]:.1%}")
    elif far > max(FLOAT32 * single, BFLOAT16 * half):
        found.append("nothing that was tried explains it")
    else:
        words.append("as the formula says")
    rows = [["parameter", "cosine", "relative distance", "best factor"]]
    for name in ours:
        numbers = compare({name: theirs[name]}, {name: ours[name]})
        rows.append([name, *(f"{x:.3g}" for x in numbers)])
    hypotheses = [["hypothesis", "explains"], *([name, f"{scores[name]:.1%}"] for name in best[:6])]
    return words + found, found, dict(hypotheses=hypotheses, parameters=rows), []
