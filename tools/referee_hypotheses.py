"""
The hypotheses of tools/referee.py: the log-probs that a system with one mistake would report, and how likely its
samples are under other ways to draw. The model is in float32 and by kernels.py, whose answer does not depend on the
batch. No tool by itself.
"""

import copy
import math
from types import SimpleNamespace

import runs  # noqa: F401 (it lets the files of the root be imported)
import torch
from transformers import AutoModelForCausalLM

import kernels
from onecurve.models.dense import build_model, check_model, rope_frequencies
from onecurve.models.folders import fetch_model, load_tokenizer, load_weights
from sync import Shard
from train_grpo import DEFAULTS

FLOAT32 = 0.004  # times what bfloat16 costs: a difference up to that is float32's rounding
BFLOAT16 = 2.0  # times what it costs here: a difference above is more than that
THROUGHOUT = "bfloat16 throughout"
EXPLAINS = 0.5  # share of a distance
TEMPERATURES = [x / 20 for x in range(2, 41)]
TOP_P = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)
TOP_K = (1, 2, 5, 10, 20, 40, 50, 64, 100)
MIN_P = (0.01, 0.02, 0.05, 0.1, 0.2)
OUTSIDE = 1e-3  # chance of a token that a rule forbids: engines round, too


class Reference:
    """A model folder in float32, with kernels.py. key: the argument that names it."""

    def __init__(self, folder, key):
        self.folder = fetch_model(folder, key)
        self.hf = check_model(self.folder, DEFAULTS | dict(max_prompt_tokens=0, max_new_tokens=0), key)
        self.tokenizer, self.stop = load_tokenizer(self.folder)
        self.model = build_model(self.hf, None, "cpu", True)
        self.model.tie_weights()
        # by transformers in bfloat16: its cost is the measure of distances. Not from_pretrained, which would fetch what
        # the folder names: another's adapters, or an attention of the hub
        options = dict(dtype=torch.bfloat16, attn_implementation="sdpa")
        self.rounded = AutoModelForCausalLM.from_config(copy.deepcopy(self.hf), **options).eval()
        for model in (self.model, self.rounded):
            self.load({name: p.data for name, p in model.named_parameters()}, self.folder, key)

    def load(self, weights, folder, key):
        """Fills {parameter: tensor} from a model folder."""
        shards = [Shard(name, tuple(p.shape), 0, p) for name, p in weights.items()]
        load_weights(shards, folder, self.hf.tie_word_embeddings, key)


def bfloat16(x):
    return x.bfloat16().float()


def logits(model, sample):
    """(R + 1, V) that predict a sample's response, and what would come after it."""
    ids = torch.tensor([sample.prompt + sample.response])
    plan = kernels.packed_plan([ids.numel()])
    return model(ids, plan=plan, logits_to_keep=len(sample.response) + 1).logits[0].float()


def logprobs(model, sample, temperature):
    """(R,) of a sample's response."""
    z = logits(model, sample)[:-1] / temperature
    return z.log_softmax(-1)[range(len(z)), sample.response]


@torch.no_grad()
def over(samples, columns_of, *args):
    """{name: (N,)} of columns_of(sample, *args): pairs of a name and (R,)."""
    parts = [dict(columns_of(s, *args)) for s in samples]
    return {name: torch.cat([x[name] for x in parts]) for name in parts[0]}


def drawn(sample, model, temperature):
    """
    By temperature and by sampling rule, the log-probs that such an engine reports, and how likely it draws the samples;
    and the entropies.
    """
    z = logits(model, sample)[:-1]
    at = range(len(z)), sample.response
    for x in (temperature, *TEMPERATURES):
        yield f"temperature {x:g}", (z / x).log_softmax(-1)[at]
    p = (z / temperature).softmax(-1)
    yield "entropy", torch.special.entr(p).sum(1)
    falling = p.sort(descending=True).values
    before = falling.cumsum(1) - falling
    least = {f"top-p {x:g}": falling[at[0], (before < x).sum(1) - 1] for x in TOP_P}
    least |= {f"top-k {k}": falling[:, k - 1] for k in TOP_K if k < p.shape[1]}
    least |= {f"min-p {x:g}": x * falling[:, 0] for x in MIN_P}
    for rule, x in least.items():  # it keeps no token below this probability
        share = (p[at] >= x * (1 - 1e-4)) / (p * (p >= x[:, None])).sum(1)
        yield rule, (p[at] * share.clamp(min=OUTSIDE)).log()


def other_prompts(prompt, tokenizer):
    """A prompt with a token more or less."""
    yield "prompts without their first token", prompt[1:]
    yield "prompts without their last token", prompt[:-1]
    for name, token in zip(tokenizer.all_special_tokens, tokenizer.all_special_ids):
        yield f"{name} before the prompts", [token, *prompt]
        yield f"{name} after the prompts", [*prompt, token]


def mistaken(sample, reference, temperature):
    """By mistake the log-probs that are then reported, nan where it says nothing."""
    yield THROUGHOUT, logprobs(reference.rounded, sample, temperature)
    model = reference.model
    own = logprobs(model, sample, temperature)
    yield "bits", own / math.log(2)
    wide = torch.nn.functional.pad(own, (2, 2), value=math.nan)
    for by in (-2, -1, 1, 2):
        yield f"log-probs shifted by {by:+d}", wide[2 - by :][: len(own)]
    rotary = model.model.rotary_emb
    frequencies = bfloat16(rope_frequencies(reference.hf, "cpu"))
    head = bfloat16(model.lm_head.weight)
    coarse = {
        "RoPE's frequencies": (rotary, lambda x, position_ids: kernels.rope_table(frequencies, position_ids[0])),
        "RoPE's cos and sin": (rotary, lambda x, position_ids: [*map(bfloat16, right(x, position_ids))]),
        "the head": (model.lm_head, lambda x: bfloat16(bfloat16(x) @ head.t())),
    }
    for name, (module, forward) in coarse.items():
        right = module.forward
        module.forward = forward
        yield f"{name} in bfloat16", logprobs(model, sample, temperature)
        module.forward = right
    for name, prompt in other_prompts(sample.prompt, reference.tokenizer):
        other = SimpleNamespace(prompt=prompt or sample.prompt, response=sample.response)
        yield name, logprobs(model, other, temperature)


def judge(theirs, ours, predicted, power=1):
    """
    (mean distance, a verdict, whether it is a finding, rows of the best hypotheses) of numbers (N,). predicted: pairs
    of a hypothesis, THROUGHOUT among them, and numbers (n,) for the first n, nan where it says nothing. power: of the
    mean; 2 is a norm.
    """

    def size(x):
        return float(x.abs().pow(power).nanmean() ** (1 / power))

    far = (theirs - ours).abs()
    average = size(far)
    left = {}
    for name, x in predicted:
        its = theirs[: len(x)] - x
        same = size(far[: len(x)] + 0 * its)  # of the tokens of which it says anything
        left[name] = size(its) / max(same, 1e-30) if same == same else 1.0
        if name == THROUGHOUT:
            unit = size(ours[: len(x)] - x)
    best = sorted(left, key=left.get)
    rows = [[f"{1 - left[name]:.1%}", name] for name in best[:6]]
    finding = False
    if average <= FLOAT32 * unit:
        verdict = "float32's rounding"
    elif 1 - left[best[0]] > EXPLAINS:
        verdict = f"{best[0]}: explains {rows[0][0]}"
        finding = best[0] != THROUGHOUT
    elif average <= BFLOAT16 * unit:
        verdict = "bfloat16's rounding"
    else:
        agree = float((far <= FLOAT32 * unit).float().mean())
        verdict = "unexplained" + f"; {agree:.0%} of it agree: weights changed in flight?" * (0.05 < agree < 0.95)
        finding = True
    return average, f"{average / max(unit, 1e-30):.2g} times what bfloat16 costs: {verdict}", finding, rows
