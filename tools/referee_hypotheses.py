"""
What tools/referee.py tries: the log-probs that a system with one mistake would report, and how likely its samples are
under other ways to draw. The model is in float32 and by kernels.py, whose answer does not depend on the batch. No tool
by itself.
"""

import math
from contextlib import suppress

import runs  # noqa: F401 (it lets the files of the root be imported)
import torch
from transformers import AutoModelForCausalLM

import kernels
from models.dense import build_model, check_model, rope_frequencies
from models.folders import fetch_model, load_tokenizer, load_weights
from sync import Shard
from train_grpo import DEFAULTS

TEMPERATURES = [x / 20 for x in range(2, 41)]
TOP_P = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)
TOP_K = (1, 2, 5, 10, 20, 40, 50, 64, 100)
MIN_P = (0.01, 0.02, 0.05, 0.1, 0.2)
LOGITS = 2**26  # that are there at a time
OUTSIDE = 1e-3  # chance of a token that a rule forbids: engines round, too
PROMPTS = 16  # samples on which other prompts are tried


class Reference:
    """A model folder in float32. key: the argument that names it. rounded: its weights rounded to bfloat16."""

    def __init__(self, folder, key="MODEL", rounded=False):
        self.folder = fetch_model(folder, key)
        settings = DEFAULTS | dict(max_prompt_tokens=0, max_new_tokens=0, device="cpu")
        self.hf = check_model(self.folder, settings, key)
        self.model = build_model(self.hf, None, "cpu", True)
        if self.hf.tie_word_embeddings:  # made on meta, they are two
            self.model.lm_head.weight = self.model.model.embed_tokens.weight
        weights = [Shard(name, tuple(p.shape), 0, p.data) for name, p in self.model.named_parameters()]
        load_weights(weights, self.folder, self.hf.tie_word_embeddings, key)
        for p in self.model.parameters() if rounded else ():
            p.data.copy_(p.data.bfloat16())

    @property
    def head(self):
        return self.model.lm_head.weight

    def states(self, ids, lengths):
        """Hidden states (N, H) of sequences end to end, ids (N,)."""
        positions = torch.cat([torch.arange(n) for n in lengths])
        plan = kernels.packed_plan(lengths)
        options = dict(position_ids=positions[None], use_cache=False, plan=plan)
        return self.model.model(input_ids=ids[None], **options).last_hidden_state[0]

    @torch.no_grad()
    def predictors(self, samples, prompts=None):
        """Of each sample the states (R + 1, H) that predict its response, and what would come after it."""
        for s, prompt in zip(samples, prompts or [s.prompt for s in samples]):
            ids = torch.tensor([*prompt, *s.response])
            yield self.states(ids, [len(ids)])[len(prompt) - 1 :]

    @torch.no_grad()
    def logprobs(self, samples, temperature, prompts=None, weight=None):
        """(log-probs (N,), entropies (N,)) of all response tokens, sample after sample."""
        parts = []
        weight = self.head if weight is None else weight
        for s, states in zip(samples, self.predictors(samples, prompts)):
            size = max(1, LOGITS // len(weight))
            for h, targets in zip(states[:-1].split(size), torch.tensor(s.response).split(size)):
                parts.append(kernels.token_logprobs(h, weight, targets, temperature))
        return [torch.cat(x) for x in zip(*parts)]


@torch.no_grad()
def in_bfloat16(folder, samples, temperature):
    """Log-probs (N,) by transformers in bfloat16: what that type costs."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    parts = []
    for s in samples:
        logits = model(torch.tensor([[*s.prompt, *s.response]])).logits[0, len(s.prompt) - 1 : -1]
        parts.append((logits.float() / temperature).log_softmax(-1)[range(len(s.response)), s.response])
    return torch.cat(parts)


def least_probabilities(p):
    """{sampling rule: the probability (N,) below which it keeps no token} of probabilities (N, V), falling."""
    before = p.cumsum(1) - p
    last = {f"top-p {x:g}": (before < x).sum(1) - 1 for x in TOP_P}
    last |= {f"top-k {k}": torch.full((len(p),), k - 1) for k in TOP_K if k < p.shape[1]}
    least = {name: p.gather(1, index[:, None])[:, 0] for name, index in last.items()}
    return least | {f"min-p {x:g}": x * p[:, 0] for x in MIN_P}


@torch.no_grad()
def of_distribution(reference, samples, temperature):
    """
    What the whole softmax says: ({hypothesis: log-probs (N,)}, {temperature or rule: log-likelihood of the samples
    minus that of plain sampling, nats}).
    """
    reported = {}
    gains = {}
    states = torch.cat([x[:-1] for x in reference.predictors(samples)])
    targets = torch.tensor([token for s in samples for token in s.response])
    size = max(1, LOGITS // len(reference.head))
    for h, t in zip(states.split(size), targets.split(size)):
        z = kernels.head_logits(h, reference.head)
        rounded = kernels.head_logits(h.bfloat16().float(), reference.head.bfloat16().float()).bfloat16().float()
        own = (z / temperature).log_softmax(-1)
        rows = range(len(t))
        plain = own[rows, t]
        found = {"the head in bfloat16": (rounded / temperature).log_softmax(-1)[rows, t]}
        for x in TEMPERATURES:
            found[f"temperature {x:g}"] = (z / x).log_softmax(-1)[rows, t]
            gains.setdefault(f"temperature {x:g}", []).append(found[f"temperature {x:g}"] - plain)
        p = own.exp().sort(descending=True).values
        for rule, least in least_probabilities(p).items():
            mass = (p * (p >= least[:, None])).sum(1)
            inside = plain.exp() >= least * (1 - 1e-4)
            found[f"{rule}, renormalised"] = torch.where(inside, plain - mass.log(), plain)
            gains.setdefault(rule, []).append(((1 - OUTSIDE) * inside / mass + OUTSIDE).log())
        for name, logprobs in found.items():
            reported.setdefault(name, []).append(logprobs)
    gains = {name: float(torch.cat(x).sum()) for name, x in gains.items()}
    return {name: torch.cat(x) for name, x in reported.items()}, gains


def shifted(logprobs, by):
    """Log-probs of one response, by some tokens too late; nan where none is left."""
    moved = logprobs.roll(by)
    if by > 0:
        moved[:by] = math.nan
    else:
        moved[by:] = math.nan
    return moved


def other_prompts(prompts, tokenizer):
    """{hypothesis: prompts}: one token more or less, or the chat template."""
    found = {"prompts without their first token": [p[1:] for p in prompts]}
    found["prompts without their last token"] = [p[:-1] for p in prompts]
    for token in sorted({*tokenizer.all_special_ids})[:12]:
        name = tokenizer.convert_ids_to_tokens(token)
        found[f"{name} before the prompts"] = [[token, *p] for p in prompts]
        found[f"{name} after the prompts"] = [[*p, token] for p in prompts]
    texts = [tokenizer.decode(p, skip_special_tokens=True) for p in prompts]
    settings = {}, dict(add_generation_prompt=False), dict(enable_thinking=False), dict(enable_thinking=True)
    for setting in settings if tokenizer.chat_template else ():
        options = dict(add_generation_prompt=True, return_dict=False) | setting
        chats = [[dict(role="user", content=text)] for text in texts]
        with suppress(Exception):  # a template refuses what it does not know
            made = [[*tokenizer.apply_chat_template(chat, **options)] for chat in chats]
            found[f"prompts by the chat template {setting or ''}"] = made
    return {name: x for name, x in found.items() if all(x) and x != prompts}


def joined(logprobs, others, theirs):
    """Of one response's log-probs (R,): the first up to a token and the others from it on, which fits theirs best."""
    far = torch.stack([(x - theirs).abs() for x in (logprobs, others)])
    cut = int((far[0].cumsum(0) - far[1].cumsum(0)).argmin()) + 1
    return torch.cat([logprobs[:cut], others[cut:]])


def hypotheses(reference, others, samples, theirs, ours, temperature):
    """{hypothesis: log-probs (N,)}, nan where it says nothing. others: {name: Reference}; theirs, ours: (N,)."""
    lengths = [len(s.response) for s in samples]
    found = {"log-probs with the other sign": -ours, "probabilities": ours.exp()}
    found |= {"bits": ours / math.log(2), "log10": ours / math.log(10)}
    for by in (-2, -1, 1, 2):
        found[f"log-probs shifted by {by:+d}"] = torch.cat([shifted(x, by) for x in ours.split(lengths)])
    rotary = reference.model.model.rotary_emb
    frequencies = rope_frequencies(reference.hf, "cpu")
    own = rotary.forward
    rotary.forward = lambda x, ids: kernels.rope_table(frequencies.bfloat16().float(), ids[0])
    found["RoPE's frequencies in bfloat16"] = reference.logprobs(samples, temperature)[0]
    rotary.forward = lambda x, ids: [y.bfloat16().float() for y in own(x, ids)]
    found["RoPE's cos and sin in bfloat16"] = reference.logprobs(samples, temperature)[0]
    rotary.forward = own
    rounded = Reference(reference.folder, rounded=True)
    found["weights rounded to bfloat16"] = rounded.logprobs(samples, temperature)[0]
    few = samples[:PROMPTS]
    rest = torch.full((sum(lengths[PROMPTS:]),), math.nan)
    for name, prompts in other_prompts([s.prompt for s in few], load_tokenizer(reference.folder)[0]).items():
        found[name] = torch.cat([reference.logprobs(few, temperature, prompts)[0], rest])
    for name, other in others.items():
        its = other.logprobs(samples, temperature)[0]
        found[f"weights of {name}"] = its
        for word, first, last in (("up to", its, ours), ("from", ours, its)):
            parts = zip(first.split(lengths), last.split(lengths), theirs.split(lengths))
            found[f"{word} a token weights of {name}"] = torch.cat([joined(*x) for x in parts])
    return found
