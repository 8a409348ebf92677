"""
What tools/referee.py tries: the log-probs that a system with one mistake would report, and how likely its samples are
under other ways to draw. The model is in float32 and by kernels.py, whose answer does not depend on the batch. No tool
by itself.
"""

import math
from contextlib import suppress
from types import SimpleNamespace

import runs  # noqa: F401 (it lets the files of the root be imported)
import torch
from transformers import AutoModelForCausalLM

import kernels
from models.dense import build_model, check_model, rope_frequencies
from models.folders import fetch_model, load_tokenizer, load_weights
from sync import Shard
from train_grpo import DEFAULTS, make_sample, pack

TEMPERATURES = [x / 20 for x in range(2, 41)]
TOP_P = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)
TOP_K = (1, 2, 5, 10, 20, 40, 50, 64, 100)
MIN_P = (0.01, 0.02, 0.05, 0.1, 0.2)
OUTSIDE = 1e-3  # chance of a token that a rule forbids: engines round, too
PROMPTS = 16  # samples on which other prompts are tried
EXPLAINS = 0.5  # share of a distance


class Reference:
    """A model folder in float32. key: the argument that names it."""

    def __init__(self, folder, key):
        self.folder = fetch_model(folder, key)
        self.hf = check_model(self.folder, DEFAULTS | dict(max_prompt_tokens=0, max_new_tokens=0), key)
        self.tokenizer, self.stop = load_tokenizer(self.folder)
        self.model = build_model(self.hf, None, "cpu", True)
        self.model.value_head = None
        if self.hf.tie_word_embeddings:  # made on meta, they are two
            self.model.lm_head.weight = self.model.model.embed_tokens.weight
        weights = [Shard(name, tuple(p.shape), 0, p.data) for name, p in self.model.named_parameters()]
        load_weights(weights, self.folder, self.hf.tie_word_embeddings, key)
        self.head = self.model.lm_head.weight

    @torch.no_grad()
    def logits(self, sample, rounded=lambda x: x):
        """(R + 1, V) that predict a sample's response, and what would come after it. rounded: what the head does."""
        leaf = leaf_of(sample)
        ids = dict(input_ids=leaf.ids[None], position_ids=leaf.positions[None], plan=kernels.packed_plan(leaf.lengths))
        states = self.model.model(**ids, use_cache=False).last_hidden_state[0]
        states = rounded(states[len(sample.prompt) - 1 :])
        return rounded(kernels.head_logits(states, rounded(self.head)))

    @torch.no_grad()
    def logprobs(self, samples, temperature):
        """(log-probs (N,), entropies (N,)) of all response tokens, sample after sample."""
        parts = [self.model.token_logprobs(leaf_of(s), kernels.Sampling(temperature))[:2] for s in samples]
        return [torch.cat(x) for x in zip(*parts)]


def bfloat16(x):
    return x.bfloat16().float()


def leaf_of(sample):
    """A sample alone, with its loss at every response token."""
    response = torch.tensor(sample.response)
    zeros = torch.zeros(len(response))
    return pack([make_sample(torch.tensor(sample.prompt), response, zeros == 0, zeros)], "cpu")


def library_logprobs(model, leaf, temperature):
    """Log-probs (M,) at a leaf's targets by transformers and torch."""
    logits = torch.cat([model(ids[None]).logits[0] for ids in leaf.ids.split(leaf.lengths.tolist())])
    z = logits[leaf.predictors].float() / temperature
    return z.log_softmax(-1).gather(1, leaf.targets[:, None])[:, 0]


@torch.no_grad()
def in_bfloat16(folder, samples, temperature):
    """Log-probs (N,) by transformers in bfloat16: what that type costs."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return torch.cat([library_logprobs(model, leaf_of(s), temperature) for s in samples])


def judge(far, fine, coarse, left):
    """
    (a verdict, whether it is a finding, rows of the best hypotheses) of a distance; up to `fine` it is float32's
    rounding, up to `coarse` bfloat16's. left: {hypothesis: the distance that it leaves}.
    """
    scores = {name: 1 - x / max(far, 1e-30) for name, x in left.items()}
    best = sorted(scores, key=scores.get, reverse=True)
    rows = [[f"{scores[name]:.1%}", name] for name in best[:6]]
    if far <= fine:
        return "float32's rounding", False, rows
    if scores[best[0]] > EXPLAINS:
        return f"{best[0]}: explains {scores[best[0]]:.1%}", "throughout" not in best[0], rows
    return ("bfloat16's rounding", False, rows) if far <= coarse else ("unexplained", True, rows)


def least_probabilities(p):
    """{sampling rule: the probability (N, 1) below which it keeps no token} of probabilities (N, V), falling."""
    before = p.cumsum(1) - p
    least = {f"top-p {x:g}": p.gather(1, (before < x).sum(1, keepdim=True) - 1) for x in TOP_P}
    least |= {f"top-k {k}": p[:, k - 1 : k] for k in TOP_K if k < p.shape[1]}
    return least | {f"min-p {x:g}": x * p[:, :1] for x in MIN_P}


def of_distribution(reference, samples, temperature):
    """{temperature or sampling rule: log-probs (N,)}: what an engine that draws so reports, and how likely it draws."""
    parts = {}
    for s in samples:
        z = reference.logits(s)[:-1]
        target = torch.tensor(s.response)[:, None]
        p = (z / temperature).softmax(-1)
        own = p.gather(1, target)
        p = p.sort(descending=True).values
        for x in TEMPERATURES:
            parts.setdefault(f"temperature {x:g}", []).append((z / x).log_softmax(-1).gather(1, target))
        for rule, least in least_probabilities(p).items():
            mass = (p * (p >= least)).sum(1, keepdim=True)
            kept = (own >= least * (1 - 1e-4)) / mass
            parts.setdefault(rule, []).append((own * kept.clamp(min=OUTSIDE)).log())
    return {name: torch.cat(x)[:, 0] for name, x in parts.items()}


def other_prompts(prompts, tokenizer):
    """{hypothesis: prompts}: a token more or less, or the chat template."""
    found = {"prompts without their first token": [p[1:] for p in prompts]}
    found["prompts without their last token"] = [p[:-1] for p in prompts]
    for name, token in zip(tokenizer.all_special_tokens, tokenizer.all_special_ids):
        found[f"{name} before the prompts"] = [[token, *p] for p in prompts]
        found[f"{name} after the prompts"] = [[*p, token] for p in prompts]
    chats = [[dict(role="user", content=tokenizer.decode(p, skip_special_tokens=True))] for p in prompts]
    for name in ("add_generation_prompt=True", "add_generation_prompt=False", "enable_thinking=False"):
        key, value = name.split("=")
        options = dict(add_generation_prompt=True, return_dict=False) | {key: value == "True"}
        with suppress(Exception):  # no template, or one that refuses this
            made = [[*tokenizer.apply_chat_template(chat, **options)] for chat in chats]
            found[f"prompts by the chat template, {name}"] = made
    return {name: x for name, x in found.items() if all(x) and x != prompts}


def hypotheses(reference, samples, ours, temperature):
    """{hypothesis: log-probs (N,)}, nan where it says nothing."""

    def now(samples):
        return reference.logprobs(samples, temperature)[0]

    found = {"log-probs with the other sign": -ours, "probabilities": ours.exp(), "bits": ours / math.log(2)}
    position = torch.cat([torch.arange(len(s.response)) for s in samples])
    for by in (-2, -1, 1, 2):  # where the neighbour is of the same response
        found[f"log-probs shifted by {by:+d}"] = ours.roll(by).where(position - position.roll(by) == by, math.nan)
    rotary = reference.model.model.rotary_emb
    own = rotary.forward
    frequencies = bfloat16(rope_frequencies(reference.hf, "cpu"))
    rotary.forward = lambda x, ids: kernels.rope_table(frequencies, ids[0])
    found["RoPE's frequencies in bfloat16"] = now(samples)
    rotary.forward = lambda x, ids: [*map(bfloat16, own(x, ids))]
    found["RoPE's cos and sin in bfloat16"] = now(samples)
    rotary.forward = own
    heads = [(reference.logits(s, bfloat16)[:-1] / temperature).log_softmax(-1) for s in samples]
    heads = [x[range(len(s.response)), s.response] for x, s in zip(heads, samples)]
    found["the head in bfloat16"] = torch.cat(heads)
    few = samples[:PROMPTS]
    for name, prompts in other_prompts([s.prompt for s in few], reference.tokenizer).items():
        changed = [SimpleNamespace(prompt=p, response=s.response) for p, s in zip(prompts, few)]
        found[name] = torch.full_like(ours, math.nan)
        logprobs = now(changed)
        found[name][: len(logprobs)] = logprobs
    return found
