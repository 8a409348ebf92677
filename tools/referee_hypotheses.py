"""
What tools/referee.py tries: log-probs that another system would report if it had one mistake, and samples that it would
draw. A model in float32 by kernels.py, whose answer does not depend on the batch. No tool by itself.
"""

import math
import types
from contextlib import contextmanager, suppress

import runs  # noqa: F401 (it lets the files of the root be imported)
import torch

import kernels
from models.dense import build_model, check_model, rope_frequencies
from models.folders import fetch_model, load_tokenizer, load_weights
from sync import Shard
from train_grpo import DEFAULTS

TEMPERATURES = [x / 20 for x in range(2, 41)]
TOP_P = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)
TOP_K = (1, 2, 5, 10, 20, 40, 50, 64, 100)
MIN_P = (0.01, 0.02, 0.05, 0.1, 0.2)
BATCH = 16384  # tokens of a forward pass
LOGITS = 2**26  # that are there at a time
OUTSIDE = 1e-3  # chance of a token that a sampling rule forbids: engines round, too


class Reference:
    """A model folder in float32. key: the argument that named it."""

    def __init__(self, folder, key="MODEL"):
        self.folder = fetch_model(folder, key)
        settings = DEFAULTS | dict(max_prompt_tokens=0, max_new_tokens=0, device="cpu")
        self.hf = check_model(self.folder, settings, key)
        self.model = build_model(self.hf, None, "cpu", True)
        weights = [Shard(name, tuple(p.shape), 0, p.data) for name, p in self.model.named_parameters()]
        load_weights(weights, self.folder, self.hf.tie_word_embeddings, key)

    @property
    def head(self):
        return self.model.lm_head.weight

    def hidden(self, prompts, responses):
        """Of each sample the states (R + 1, H) that predict its response and what would come after it."""
        lengths = [len(p) + len(r) for p, r in zip(prompts, responses)]
        ids = torch.tensor([[token for pair in zip(prompts, responses) for part in pair for token in part]])
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        plan = kernels.packed_plan(lengths)
        states = self.model.model(input_ids=ids, position_ids=positions, use_cache=False, plan=plan).last_hidden_state
        return [part[len(p) - 1 :] for p, part in zip(prompts, states[0].split(lengths))]

    @torch.no_grad()
    def logprobs(self, prompts, responses, temperature, head=None):
        """(log-probs (N,), entropies (N,)) of all response tokens, sample after sample."""
        parts, first = [], 0
        while first < len(prompts):
            last, tokens = first, 0
            while last < len(prompts) and (last == first or tokens < BATCH):
                tokens += len(prompts[last]) + len(responses[last])
                last += 1
            states = self.hidden(prompts[first:last], responses[first:last])
            states = torch.cat([x[:-1] for x in states])
            targets = torch.tensor([token for r in responses[first:last] for token in r])
            size = max(1, LOGITS // len(self.head))
            head = head or (lambda h, t: kernels.token_logprobs(h, self.head, t, temperature))
            parts += [head(h, t) for h, t in zip(states.split(size), targets.split(size))]
            first = last
        return [torch.cat(x) for x in zip(*parts)]

    def bfloat16_head(self, temperature):
        """A head whose operands and logits are rounded to bfloat16."""
        weight = self.head.bfloat16().float()

        def head(hidden, targets):
            z = kernels.head_logits(hidden.bfloat16().float(), weight).bfloat16().float() / temperature
            return torch.log_softmax(z, -1).gather(1, targets[:, None])[:, 0], targets

        return head

    @contextmanager
    def rope(self, change):
        """Inside, RoPE's cos and sin are what `change` makes of (frequencies (D / 2,), positions (N,))."""
        rotary, frequencies = self.model.model.rotary_emb, rope_frequencies(self.hf, "cpu")
        own = rotary.forward
        rotary.forward = lambda x, position_ids: change(frequencies, position_ids[0])
        try:
            yield
        finally:
            rotary.forward = own

    @contextmanager
    def rounded(self):
        """Inside, the weights are rounded to bfloat16."""
        own = [p.data.clone() for p in self.model.parameters()]
        for p in self.model.parameters():
            p.data.copy_(p.data.bfloat16().float())
        try:
            yield
        finally:
            for p, data in zip(self.model.parameters(), own):
                p.data.copy_(data)

    @torch.no_grad()
    def in_bfloat16(self, prompts, responses, temperature):
        """Log-probs (N,) by transformers in bfloat16, sample by sample: a measure of what that type costs."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.bfloat16)
        parts = []
        for p, r in zip(prompts, responses):
            logits = model(torch.tensor([[*p, *r]])).logits[0, len(p) - 1 : -1].float() / temperature
            parts.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(r)[:, None])[:, 0])
        return torch.cat(parts)


# ---- what a system with one mistake would report, {hypothesis: log-probs (N,), nan where it says nothing}


def shifted(logprobs, lengths):
    """Log-probs that stand one or two tokens too early or too late in their response."""
    found = {}
    for by in (-2, -1, 1, 2):
        parts = []
        for part in logprobs.split(lengths):
            moved = torch.full_like(part, math.nan)
            if by > 0:
                moved[by:] = part[:-by]
            else:
                moved[:by] = part[-by:]
            parts.append(moved)
        found[f"log-probs shifted by {by:+d}"] = torch.cat(parts)
    return found


def in_other_units(logprobs):
    return {
        "log-probs in bits (log2)": logprobs / math.log(2),
        "log-probs as log10": logprobs / math.log(10),
        "log-probs with the other sign": -logprobs,
        "probabilities, not log-probs": logprobs.exp(),
    }


def least_probabilities(p):
    """{sampling rule: the probability (N,) below which it keeps no token} of probabilities (N, V), falling."""
    before = p.cumsum(1) - p
    last = {f"top-p {x:g}": (before < x).sum(1) - 1 for x in TOP_P}
    last |= {f"top-k {k}" if k > 1 else "greedy": torch.full((len(p),), k - 1) for k in TOP_K if k < p.shape[1]}
    least = {name: p.gather(1, index[:, None])[:, 0] for name, index in last.items()}
    return least | {f"min-p {x:g}": x * p[:, 0] for x in MIN_P}


@torch.no_grad()
def of_distribution(hidden, head, targets, temperature):
    """
    What the whole softmax says: ({hypothesis: log-probs (N,)}, {rule or temperature: its log-likelihood of the samples
    minus that of plain sampling, nats}).
    """
    reported, gains = {}, {}
    size = max(1, LOGITS // len(head))
    for h, t in zip(hidden.split(size), targets.split(size)):
        z = kernels.head_logits(h, head)
        at = t[:, None]
        own = torch.log_softmax(z / temperature, -1)
        plain = own.gather(1, at)[:, 0]
        for x in TEMPERATURES:
            if x != temperature:
                logprobs = torch.log_softmax(z / x, -1).gather(1, at)[:, 0]
                reported.setdefault(f"temperature {x:g}", []).append(logprobs)
                gains.setdefault(f"temperature {x:g}", []).append(logprobs - plain)
        p = own.exp().sort(descending=True).values
        for rule, least in least_probabilities(p).items():
            kept = (p * (p >= least[:, None])).sum(1)
            inside = plain.exp() >= least * (1 - 1e-4)
            reported.setdefault(f"{rule}, renormalised", []).append(torch.where(inside, plain - kept.log(), plain))
            gains.setdefault(rule, []).append(((1 - OUTSIDE) * inside / kept + OUTSIDE).log())
    return {k: torch.cat(x) for k, x in reported.items()}, {k: float(torch.cat(x).sum()) for k, x in gains.items()}


def other_prompts(prompts, tokenizer):
    """{hypothesis: prompts}: a special token or the chat template, more or less."""
    found = {"prompts without their first token": [p[1:] for p in prompts]}
    found["prompts without their last token"] = [p[:-1] for p in prompts]
    for token in sorted({*tokenizer.all_special_ids})[:12]:
        name = tokenizer.convert_ids_to_tokens(token)
        found[f"{name} before the prompts"] = [[token, *p] for p in prompts]
        found[f"{name} after the prompts"] = [[*p, token] for p in prompts]
    texts = [tokenizer.decode(p, skip_special_tokens=True) for p in prompts]
    settings = ({}, dict(add_generation_prompt=False), dict(enable_thinking=False), dict(enable_thinking=True))
    for setting in settings if tokenizer.chat_template else ():
        with suppress(Exception):  # a template refuses what it does not know
            options = dict(add_generation_prompt=True, tokenize=True, return_dict=False) | setting
            chats = [[dict(role="user", content=text)] for text in texts]
            name = "the chat template" + "".join(f", {k}={v}" for k, v in setting.items())
            found[f"prompts in {name}"] = [[*tokenizer.apply_chat_template(chat, **options)] for chat in chats]
    return {k: x for k, x in found.items() if all(x) and x != prompts}


def bfloat16_rope(frequencies, positions):
    angles = (positions.bfloat16()[:, None] * frequencies.bfloat16()).float()
    return angles.cos().bfloat16().float(), angles.sin().bfloat16().float()


def of_arithmetic(reference, prompts, responses, temperature):
    """Coarser arithmetic in one place."""

    def now(head=None):
        return reference.logprobs(prompts, responses, temperature, head)[0]

    found = {"the head in bfloat16": now(reference.bfloat16_head(temperature))}
    changes = {
        "RoPE's frequencies in bfloat16": lambda f, x: kernels.rope_table(f.bfloat16().float(), x),
        "RoPE's cos and sin in bfloat16": lambda f, x: [y.bfloat16().float() for y in kernels.rope_table(f, x)],
        "RoPE in bfloat16, its positions too": bfloat16_rope,
    }
    for name, change in changes.items():
        with reference.rope(change):
            found[name] = now()
    with reference.rounded():
        found["weights rounded to bfloat16"] = now()
    return found


def in_flight(logprobs, others, theirs, lengths):
    """Of each response the first part with one model's weights and the rest with another's, cut where it fits best."""
    parts = []
    for a, b, c in zip(logprobs.split(lengths), others.split(lengths), theirs.split(lengths)):
        zero = torch.zeros(1)
        before = torch.cat([zero, (a - c).abs().cumsum(0)])
        after = (b - c).abs().sum() - torch.cat([zero, (b - c).abs().cumsum(0)])
        cut = int((before + after).argmin())
        parts += [a[:cut], b[cut:]]
    return torch.cat(parts)


def hypotheses(reference, others, samples, theirs, logprobs, temperature):
    """
    {hypothesis: log-probs (N,)}, whatever the system. samples: types.SimpleNamespace(prompts, responses); theirs, ours:
    log-probs (N,); others: {name: Reference} of other checkpoints.
    """
    prompts, responses = samples.prompts, samples.responses
    lengths = [len(r) for r in responses]
    tokenizer = load_tokenizer(reference.folder)[0]
    found = shifted(logprobs, lengths) | in_other_units(logprobs) | of_arithmetic(reference, prompts, responses, temperature)
    for name, changed in other_prompts(prompts, tokenizer).items():
        found[name] = reference.logprobs(changed, responses, temperature)[0]
    for name, other in others.items():
        older = other.logprobs(prompts, responses, temperature)[0]
        found[f"weights of {name}"] = older
        found[f"from a token on weights of {name}"] = in_flight(logprobs, older, theirs, lengths)
        found[f"up to a token weights of {name}"] = in_flight(older, logprobs, theirs, lengths)
    return found
