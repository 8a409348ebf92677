"""
A plan of a run, before there are the cards for it: memory per role, seconds per step, and where the design stops. It is
a model on paper: nothing is started, and every figure for a GPU is an estimate.

    python tools/plan.py config/qwen3_8b.py --gpus=8
    python tools/plan.py config/qwen3_8b.py --gpus=16 --card=H200 --rollout_ranks=8 --lanes=8
    python tools/plan.py config/qwen3_8b.py --init_from=Qwen/Qwen3-32B --lora_rank=32    # or a folder, its config.json
    python tools/plan.py --check    # on a CPU: seconds of real runs beside those that the model says, 20 minutes

Takes train_grpo.py's files and flags, and: `gpus`, `gpus_per_node`, `card` (a key of CARDS), and the mean lengths
`prompt_tokens` and `response_tokens` (0: half of the longest).

Work is counted from the model's shape (bytes, operations, decode steps, layers), and divided by the rates of a machine
(`Rates`). A card's rates are its data sheet's times shares, most of them measured on an H200, without the host's work
between a trainer's kernels, for which a small model waits. A CPU's are four speeds, of Python and of
arithmetic in engine and trainer: `--check` finds them from two runs that are not among those that it then predicts, and
from a third run how much slower two processes are side by side. How much one kind of work costs relative to another is
a property of the code, and written below.

To go beyond the limits that are printed at the end, this would have to change:
- more trainers than `lanes`, or than a step has leaves: one tree over lanes that several ranks share (the ranks of a
  sample's tensor or context parallelism), which cuts sums in another place;
- a longer sample: sequences cut over ranks, with attention's partial sums at fixed absolute positions, as the paged
  kernel has them already;
- a larger model in full: embedding and head in FSDP units of their own, moments and sums in host memory;
- more nodes: one copy of the weights over the network for all engines of a node, not one for each of their cards.
"""

import math
import os
import re
import statistics
import sys
import tempfile
import types
from pathlib import Path
from typing import NamedTuple

from runs import ROOT, run
from scipy.optimize import nnls  # SGLang's own dependency

import train_grpo
from configurator import check_config, configure, load_features, named_arguments, require, roles
from kernels import CHUNK
from onecurve.keys.scratch import scratch_sizes
from onecurve.models.dense import check_model
from onecurve.models.folders import fetch_model
from onecurve.models.moe import KIND
from onecurve.run.machine import MOST_COPIED, least_memory, machine_memory
from onecurve.run.past import max_staleness
from rewards import arithmetic

KEYS = dict(gpus=8, gpus_per_node=8, card="H100", prompt_tokens=0.0, response_tokens=0.0)
GB = 1e9


class Shape(NamedTuple):
    """A decoder as its config.json has it."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool
    kind: str  # one of MODEL_TYPES
    positions: int
    experts: int = 0  # of a layer, each as wide as `mlp`; 0: a dense MLP
    active: int = 0  # experts that compute a token


# Published config.json files: huggingface.co/Qwen/Qwen3-0.6B, -1.7B, -8B, -32B and -30B-A3B (tables 1 and 2 of
# arXiv:2505.09388 have layers and heads), meta-llama/Llama-3.3-70B-Instruct (table 3 of arXiv:2407.21783). The defaults
# of transformers' classes fit no published model: Qwen3Config's MLP has 22,016.
MODELS = {
    "Qwen/Qwen3-0.6B": Shape(28, 1024, 16, 8, 128, 3072, 151936, True, "qwen3", 40960),
    "Qwen/Qwen3-1.7B": Shape(28, 2048, 16, 8, 128, 6144, 151936, True, "qwen3", 40960),
    "Qwen/Qwen3-8B": Shape(36, 4096, 32, 8, 128, 12288, 151936, False, "qwen3", 40960),
    "Qwen/Qwen3-32B": Shape(64, 5120, 64, 8, 128, 25600, 151936, False, "qwen3", 40960),
    "Qwen/Qwen3-30B-A3B": Shape(48, 2048, 32, 4, 128, 768, 151936, False, KIND, 40960, 128, 8),
    "meta-llama/Llama-3.3-70B-Instruct": Shape(80, 8192, 64, 8, 128, 28672, 128256, False, "llama", 131072),
}


class Card(NamedTuple):
    memory: float  # bytes
    bandwidth: float  # bytes per second
    products: float  # bfloat16 operations per second, dense
    link: float  # bytes per second to the other cards of a node, in one direction
    network: float  # .. to the cards of another node
    bus: float  # .. to the host's memory


# NVIDIA's data sheets "H100 Tensor Core GPU" (SXM) and "H200 Tensor Core GPU" (SXM): bfloat16 without sparsity, half of
# NVLink's 900 GB/s, half of PCIe's 128 GB/s. Network: one ConnectX-7 of 400 Gbit/s per card, as a DGX has. RTX 4090:
# "NVIDIA Ada GPU Architecture", bfloat16 with float32 sums; it has PCIe 4.0 alone, and a network of 100 Gbit/s here.
CARDS = {
    "H100": Card(80e9, 3.35e12, 989e12, 450e9, 50e9, 64e9),
    "H200": Card(141e9, 4.8e12, 989e12, 450e9, 50e9, 64e9),
    "RTX4090": Card(24e9, 1.008e12, 165e12, 32e9, 12.5e9, 32e9),
}

# Shares of the data sheet, as measured on an H200 (docs/results.md), of Qwen3-8B's operators.
PRODUCT = 0.68  # 8,192 rows; 0.99 of cuBLAS
ATTENTION = 0.31  # forward, sequences of 1,024; 0.43 of 4,096
ATTENTION_BACKWARD = 0.25  # .. backward; 0.33
COPY = 0.80  # of bandwidth: elementwise kernels
DECODE_WEIGHTS = 0.72  # of bandwidth: 64 samples, from 0.58 in o_proj to 0.80 in gate and up
DECODE_CACHE = 0.70  # of bandwidth: paged attention, 128 sequences of 2,048
LINK = 0.75  # of NVLink, the network or the bus: large messages; an ESTIMATE
# seconds. ESTIMATES, where nothing is said
DECODE_STEP = 1.5e-3  # SGLang's scheduler and the launch of a graph
REQUEST = 1e-5  # .. per sample and decode step; measured on an H200 before patches.keep_tokens, so now an upper bound
RECORD = 0.1  # of a step: files, JSON, ledger, the last rewards; 0.05 to 0.13 s for 256 samples were measured
WAKE = 0.1  # sleep and wake of an engine that lends its memory: no more than that, with 1.2 GB of weights
BUCKET_SECONDS = 8e-3  # SGLang's round trip for a bucket of weights
CONTEXT = 1e9  # bytes that CUDA and NCCL hold on a card
# counted in the code
SAMPLER_PASSES = 20  # over the float32 logits, to draw a token
ELEMENTWISE_PASSES = 3  # over a layer's inner activations in a pass forward; a backward is two of those
BACKWARD_ATTENTION = 2.5  # five products, where forward has two
UPDATE_BYTES = 48  # per parameter: AdamW 28, the norm 4, four hashes 16
BUCKET = 1 << 30  # bytes of weights that are sent at a time; a larger tensor is sent by itself
ROLLOUT_BYTES = 21  # per token of a group's file: token, log-prob, mask, version


class Rates(NamedTuple):
    """The work of an engine's or a trainer's processor in a second, and the seconds of work without a size."""

    products: float  # operations of matrix products
    attention: float  # operations, forward
    attention_backward: float
    elementwise: float  # bytes
    weights: float  # bytes, in decode
    cache: float  # bytes, in decode
    link: float  # bytes
    bus: float  # bytes
    step: float  # seconds of a decode step
    layer: float  # .. more per layer
    request: float  # .. more per sample
    leaf: float  # seconds of a pass over a leaf, per layer


def card_rates(card, nodes=1):
    attention, backward = ATTENTION * card.products, ATTENTION_BACKWARD * card.products
    memory = (share * card.bandwidth for share in (COPY, DECODE_WEIGHTS, DECODE_CACHE))
    link = LINK * (card.link if nodes == 1 else card.network)
    bus = LINK * card.bus
    return Rates(PRODUCT * card.products, attention, backward, *memory, link, bus, DECODE_STEP, 0.0, REQUEST, 0.0)


# How long kinds of work take on a CPU relative to each other, whatever the speed of the CPU: fitted to eleven runs of
# 0.8 to 12 M parameters on two cores of a server. The fit gives all of these runs but the one with a lag within 11 %.
# Seven of the runs of CHECKED are like some of them, the others are not.
CPU_ATTENTION, CPU_BYTES, CPU_CACHE = 0.25, 0.03, 0.02  # operations, or bytes, per operation of a product
CPU_LAYER, CPU_REQUEST, CPU_LEAF = 0.1, 0.012, 1.0  # seconds per second of a decode step


def cpu_rates(products, step):
    """Rates of an engine or a trainer, from its operations per second and the seconds of Python in a decode step."""
    attention, memory = CPU_ATTENTION * products, (CPU_BYTES * products, math.inf, CPU_CACHE * products)
    steps = (cost * step for cost in (1.0, CPU_LAYER, CPU_REQUEST, CPU_LEAF))
    return Rates(products, attention, attention, *memory, math.inf, math.inf, *steps)


# ---- the model's numbers


def shape_of(c, key="init_from", name=None):
    """The Shape of a model, the one that `init_from` names: a published one, a folder's, or the scratch model's."""
    name = name or c.init_from
    if name in MODELS:
        return MODELS[name]
    if name == "scratch":
        vocab = 98 + 4 * bool(c.agent)  # folders.make_scratch_model's characters
        *sizes, experts, active = scratch_sizes(vars(c)).values()
        dense = Shape(*sizes, vocab, True, "qwen3", 4096)
        return dense._replace(tied=False, experts=experts, active=active) if experts else dense
    if name.endswith(".gguf"):
        name = fetch_model(name, key)
    file, known = Path(name, "config.json"), ", ".join(MODELS)
    require(file.is_file(), f"{key}={name!r}: use a folder with a config.json, a GGUF file, scratch, or one of {known}")
    hf = check_model(name, vars(c) | dict(device="cpu"), key)  # whatever card this machine has
    heads = hf.num_attention_heads
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // heads
    sizes = heads, hf.num_key_value_heads, head_dim, hf.intermediate_size, hf.vocab_size, hf.tie_word_embeddings
    dense = Shape(hf.num_hidden_layers, hf.hidden_size, *sizes, hf.model_type, hf.max_position_embeddings)
    if hf.model_type != KIND:
        return dense
    return dense._replace(mlp=hf.moe_intermediate_size, experts=hf.num_experts, active=hf.num_experts_per_tok)


def linears(s):
    """{name: (out, in)} of a layer's matrices; of experts one's."""
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    up = (s.mlp, s.hidden)
    attention = dict(q_proj=(q, s.hidden), k_proj=(kv, s.hidden), v_proj=(kv, s.hidden), o_proj=(s.hidden, q))
    return attention | dict(gate_proj=up, up_proj=up, down_proj=(s.hidden, s.mlp))


def beside_linears(s, experts):
    """Parameters of a mixture's router, and of this number of experts but the one in `linears`."""
    return s.experts and s.experts * s.hidden + (experts - 1) * 3 * s.mlp * s.hidden


def layer_parameters(s):
    norms = 2 * s.hidden + 2 * s.head_dim * s.kind.startswith("qwen3") + beside_linears(s, s.experts)
    biases = (s.heads + 2 * s.kv_heads) * s.head_dim * (s.kind == "qwen2")
    return sum(a * b for a, b in linears(s).values()) + norms + biases


def root_parameters(s):
    """Parameters of embedding, head and the last norm, which are one unit of FSDP2."""
    return s.vocab * s.hidden * (1 if s.tied else 2) + s.hidden


def parameters(s):
    return s.layers * layer_parameters(s) + root_parameters(s)


def adapted_linears(s, c):
    """(out, in) of each of a layer's matrices that LoRA adapts."""
    names = c.lora_targets.replace(",", " ").split() or [*linears(s)][: 4 if s.experts else None]
    return [linears(s)[name] for name in names]


def learned_parameters(s, c):
    """Parameters that are trained: all, or LoRA's."""
    if not c.lora_rank:
        return parameters(s)
    return s.layers * c.lora_rank * sum(map(sum, adapted_linears(s, c)))


def operations(s, tokens, predicted, squares, causal=0.5):
    """
    Operations of one forward pass, 2 for a product and its sum: (of the layers' products, the head's, attention's).
    predicted: tokens whose logits are computed. squares: the sum of the samples' squared lengths, of which causal
    attention computes half.
    """
    matrices = sum(a * b for a, b in linears(s).values()) + beside_linears(s, s.active)
    attention = 4 * s.heads * s.head_dim * squares * causal
    return 2 * s.layers * matrices * tokens, 2 * s.vocab * s.hidden * predicted, s.layers * attention


def read_bytes(s, samples):
    """Bytes of weights that a decode step reads: few rows of the embedding, and of experts, taken at random, any's."""
    unread = s.experts and s.experts * (1 - s.active / s.experts) ** samples
    of_experts = s.layers * unread * 3 * s.mlp * s.hidden
    return 2 * (parameters(s) - s.vocab * s.hidden * (not s.tied) - of_experts)


def cache_bytes(s):
    """Bytes of a token's keys and values, in bfloat16."""
    return 2 * 2 * s.layers * s.kv_heads * s.head_dim


def inner_bytes(s, tokens):
    """Bytes that a layer keeps for its backward pass: five hidden states, q, k, v twice, attention's, three MLP's."""
    qkv = (s.heads + 2 * s.kv_heads) * s.head_dim
    pairs = s.active * 2 * s.hidden  # the experts' inputs and outputs
    return 2 * tokens * (5 * s.hidden + 2 * qkv + s.heads * s.head_dim + 3 * s.mlp * max(1, s.active) + pairs)


# ---- memory


def trainer_memory(s, c, ranks, leaf=0):
    """{phase: {part: bytes}} of a trainer's card: the constant part, and the needs of each phase of a step."""
    leaf, root, full = leaf or c.leaf_tokens, root_parameters(s), not c.lora_rank
    mine, learned, kept = parameters(s) / ranks, learned_parameters(s, c) / ranks, max_staleness(c)
    alone = full and ranks == 1 and parameters(s) <= MOST_COPIED  # a model of bfloat16 copies, not FSDP2
    gathered = ranks > 1 or full and not alone
    held = {"weights, float32": 4 * mine} if full else {"base, bfloat16": 2 * mine, "adapters, float32": 4 * learned}
    held["copies of them, bfloat16"] = alone * 2 * mine
    held["AdamW's moments"] = 8 * learned
    whole = full or c.advantage == "distill"
    reference = (4 if gathered else 2) * mine if whole else 4 * learned
    held["reference"] = bool(c.kl_coef or c.advantage == "distill") * reference
    held["the version that is being sent"] = (kept > 0) * (2 * mine if full else 4 * learned)
    # An engine on the same card gets whole tensors, others each trainer's rows of them, if need be while it trains.
    both = ranks == c.gpus
    beside, bucket = kept > 0 and not both, 2 * max(BUCKET, 2 * s.vocab * s.hidden) / (1 if both else ranks)
    held["a bucket of it, as cut and as sent"] = beside * bucket
    row = math.log2(c.lanes / ranks)
    train = {f"gradients: the sum, and {row:.0f} of the row that is added": 4 * learned * (1 + row)}
    train["a leaf's gradients, bfloat16"] = alone * 2 * mine
    train["embedding and head, gathered" + ", and their gradients" * full] = gathered * 2 * root * (1 + full)
    train["two layers, gathered"] = gathered * 2 * 2 * layer_parameters(s)
    inner, again = inner_bytes(s, leaf), c.gradient_checkpointing
    leaves = {"activations": s.layers * (2 * leaf * s.hidden if again else inner)}
    leaves["a layer's inner activations, made again"] = inner * again
    leaves["1,024 rows of logits, and their gradient"] = 2 * 4 * CHUNK * s.vocab
    scattered = full * gathered * 4 * root * (2 * (ranks > 1) + 1 / ranks)
    reduce = {"embedding's and head's gradient, float32: sent, received, added": scattered}
    check = {"today's weights, while log-probs of older ones are checked": (kept > 0) * 4 * learned}
    publish = {"weights to send, bfloat16": 2 * mine * (full and not kept)}
    publish["a bucket, as cut and as sent"] = (not beside) * bucket
    return dict(held=held, train=train, leaf=leaves, reduce=reduce, check=check, publish=publish)


def peaks(phases):
    """Bytes: (the most while it trains, the most while it publishes)."""
    held, train, leaf, reduce, check, publish = (sum(parts.values()) for parts in phases.values())
    return held + max(check, train + max(leaf, reduce)), held + publish


def reward_bytes(c):
    """Bytes of the reward models, which a rank with an engine has: a head of one row has no weight."""
    names = re.findall(r"model:([^+*\s]+)", c.reward)
    return sum(2 * parameters(shape_of(c, "reward", name)._replace(tied=True)) for name in names)


def engine_memory(s, c, card, trainers=0):
    """
    (bytes of weights on an engine's card, bytes of cache, tokens that the engine's cache has room for). trainers: ranks
    over which the trainer on the same card is cut, 0 if there is none. The engine's share is one of what is free.
    """
    weights, tp = 2 * parameters(s) / c.rollout_tp, c.rollout_tp
    held = sum(trainer_memory(s, c, trainers)["held"].values()) if trainers else 0.0
    cache = max(0.0, c.engine_memory * (card.memory - CONTEXT - reward_bytes(c) - held) - weights)
    return weights, cache, named_arguments(c.engine_args).get("max_total_tokens") or cache * tp / cache_bytes(s)


# ---- seconds of a step


def rollout_seconds(s, c, engines, r, room=math.inf):
    """{part: seconds} of sampling, where the cache of an engine has room for `room` tokens."""
    mine = c.samples / min(engines, c.prompts_per_step)  # an engine takes whole groups
    waves = max(1.0, mine * (c.prompt + c.response) / max(room, 1))
    parts = ("prefill", "decode: weights", "decode: cache", "decode: sampler", "decode: scheduler")
    shares = not named_arguments(c.engine_args).get("disable_radix_cache")
    prefilled = mine * c.prompt / (c.group_size if shares else 1)
    out = dict.fromkeys(parts, 0.0) | {"prefill": sum(operations(s, prefilled, mine, 0)) / r.products / c.rollout_tp}
    points = 64
    for i in range(points):
        t, steps = (i + 0.5) * c.max_new_tokens / points, waves * c.max_new_tokens / points
        running = mine / waves * (1 - t / c.max_new_tokens) ** c.tail
        products = sum(operations(s, running, running, 0)) / r.products
        out["decode: weights"] += steps * max(read_bytes(s, running) / r.weights, products) / c.rollout_tp
        out["decode: cache"] += steps * running * (c.prompt + t) * cache_bytes(s) / r.cache / c.rollout_tp
        out["decode: sampler"] += steps * running * SAMPLER_PASSES * 4 * s.vocab / r.elementwise
        out["decode: scheduler"] += steps * (r.step + s.layers * r.layer + running * r.request)
    return out


def training_seconds(s, c, ranks, r):
    """{part: seconds} of a step's update."""
    products, head, attention = (x / ranks for x in operations(s, c.tokens, c.samples * c.response, c.squares))
    full, updates, kept = not c.lora_rank, c.updates_per_batch, max_staleness(c)
    # Passes over the batch without a gradient: with older weights, our own before the first update, a reference's.
    frozen = bool(c.kl_coef or c.advantage == "distill")
    own = bool(c.importance or c.advantage == "gae")
    # Samples have tokens of one age, or of as many as they have segments.
    ages = min(kept, -(-c.max_new_tokens // (c.segment_tokens or c.max_new_tokens)))
    looks, forward = ages + (own or frozen) + frozen, updates * (1 + c.gradient_checkpointing)
    # A backward pass takes two products for each one forward, or one without a weight's gradient. The head's logits are
    # made again.
    backward = updates * (1 + full)
    leaves = -(-c.tokens // (c.leaf_tokens * c.lanes)) * c.lanes / ranks
    around = ELEMENTWISE_PASSES * s.layers * inner_bytes(s, c.tokens / ranks) / r.elementwise
    out = {"other weights' log-probs": looks * ((products + head) / r.products + attention / r.attention + around)}
    out["forward"] = (forward * products + updates * head) / r.products
    out["backward"] = (backward * products + updates * (2 + full) * head) / r.products
    out["attention"] = attention * (forward / r.attention + updates * BACKWARD_ATTENTION / r.attention_backward)
    out["elementwise"] = (forward + 2 * updates) * around + (forward + backward + looks) * leaves * s.layers * r.leaf
    # Four thin products read a linear layer's input and gradient twice each; each pass over a leaf makes W + B A.
    if c.lora_rank:
        read = 2 * c.tokens / ranks * updates * sum(map(sum, adapted_linears(s, c)))
        made = 2 * (forward + updates + looks) * leaves * sum(a * b for a, b in adapted_linears(s, c))
        out["LoRA"] = 2 * s.layers * (read + made) / r.elementwise
    # Each pass gathers the layers in bfloat16, and a backward one sends float32 gradients, beside the computing.
    moved = 2 * (forward + updates + looks) + 4 * updates * full
    sent = leaves * moved * parameters(s) * (ranks - 1) / ranks / r.link
    out["gathers, scatters not hidden"] = max(0.0, sent - sum(out.values()))
    # Each step one version goes to the host's memory, and each one that is checked comes back.
    out["older weights over the bus"] = (kept > 0) * (1 + ages) * (2 if full else 4) * learned_parameters(s, c) / ranks
    out["older weights over the bus"] /= r.bus
    out["norm, optimizer, hashes"] = updates * UPDATE_BYTES * learned_parameters(s, c) / ranks / r.elementwise
    return out


def seconds(s, c, engine, trainer):
    """[seconds of a step's rollout, of its training] with one engine and one trainer of these Rates."""
    return [sum(x.values()) for x in (rollout_seconds(s, c, 1, engine), training_seconds(s, c, 1, trainer))]


def roof(argv, card):
    """`seconds` of this command line at the rates of a card's data sheet, with a host that takes none."""
    s, c, card = read([*argv, "--gpus=1", f"--card={card}"])
    rates = Rates(*3 * [card.products], *3 * [card.bandwidth], *2 * [math.inf], *4 * [0.0])
    return seconds(s, c, rates, rates)


def plan(s, c, card):
    """The plan of a run of this config: its roles, {group: {part: seconds}} of a step, and bytes of its cards."""
    trainers, _ = roles({key: vars(c)[key] for key in train_grpo.DEFAULTS}, c.gpus)
    both, size = trainers == c.gpus, 2 * parameters(s)
    cards = c.gpus if both else c.gpus - trainers
    r, link, far = (card_rates(card, -(-n // c.gpus_per_node)) for n in (1, trainers, c.gpus))
    weights, cache, room = engine_memory(s, c, card, trainers * both)
    rollout = rollout_seconds(s, c, max(1, cards // c.rollout_tp), r, room)
    training = training_seconds(s, c, trainers, link)
    # Trainers send their rows side by side; an engine's card takes in the rows of all.
    sends = {"gathered by each card": both * size * (trainers - 1) / trainers / link.link}
    sends["into each engine's card"] = 0.0 if both else size / far.link
    sends["SGLang's requests"] = math.ceil(size / BUCKET) * BUCKET_SECONDS
    sends["hashed at both ends"] = 3 * size / r.elementwise
    parts = dict(rollout=rollout, training=training, weights=sends | {"sleep and wake": WAKE * both})
    roll, train, send = (sum(x.values()) for x in parts.values())
    # Side by side engines take weights between two of their steps, while the trainers continue.
    step = max(roll + send, train + RECORD) if c.lag and not both else roll + train + send + RECORD
    trains, publishes = peaks(trainer_memory(s, c, trainers))
    # Where both are on one card, the engine's memory sleeps while it trains.
    beside = CONTEXT + reward_bytes(c) * both
    gpu = beside + (max(trains, publishes + weights + cache) if both else max(trains, publishes))
    learned = learned_parameters(s, c)
    least = max(least_memory(parameters(s), learned, vars(c), c.gpus, reward_bytes(c)).values())
    on_cpus = least_memory(parameters(s), learned, vars(c), c.gpus, 2 * reward_bytes(c), "cpu")["run"]
    idle = 1 - (cards * roll + trainers * train) / c.gpus / step
    return types.SimpleNamespace(**locals())


def ways(s, c, card):
    """{way: plan} of training and sampling in turn, side by side, and on the same cards."""
    split = c.gpus // 2 if c.colocate or c.rollout_ranks >= c.gpus else c.rollout_ranks
    apart = dict(colocate=False, rollout_ranks=split, lanes=max(c.lanes, c.gpus - split))
    found = {"in turn": apart | dict(lag=0), f"lag={max(1, c.lag)}": apart | dict(lag=max(1, c.lag))}
    found = found if c.gpus > 1 else {}
    if c.gpus & (c.gpus - 1) == 0 and c.rollout_tp == 1:  # else the trainers could not share lanes
        found["colocated"] = dict(colocate=True, lag=0, lanes=max(c.lanes, c.gpus))
    return {way: plan(s, types.SimpleNamespace(**vars(c) | keys), card) for way, keys in found.items()}


# ---- where it stops


def most(fits, limit):
    """The largest n up to a limit that fits, by bisection; 0 if 1 does not."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def limits(s, c, card, made):
    """The limits of the design with this config, a line each."""
    size, ranks = 2 * parameters(s), 2 ** int(math.log2(c.gpus))

    def trains(shape, rank, trainers=ranks, leaf=0):
        its = vars(c) | dict(lora_rank=rank, lanes=max(c.lanes, trainers), gradient_checkpointing=True)
        return peaks(trainer_memory(shape, types.SimpleNamespace(**its), trainers, leaf))[0] <= card.memory

    def holds(shape):
        return engine_memory(shape, c, card, made.trainers * made.both)[2] > c.max_prompt_tokens + c.max_new_tokens

    def largest(fits):  # of this width, by the number of layers
        layers = most(lambda n: fits(s._replace(layers=n)), 1000)
        return f"{parameters(s._replace(layers=layers)) / 1e9 * (layers > 0):.0f} G"

    context = most(lambda n: trains(s, c.lora_rank, made.trainers, n), 1 << 24)
    one, two = (size / card_rates(card, nodes).link for nodes in (1, 2))
    full, adapted = (largest(lambda shape: trains(shape, rank)) for rank in (0, c.lora_rank or 32))
    scattered = 3 * 4 * root_parameters(s) / GB * (not c.lora_rank)
    leaves = f"{math.ceil(c.tokens / c.leaf_tokens)} leaves of {c.leaf_tokens:,} tokens"
    return [
        f"trainers: lanes={c.lanes}, of which no more than a step's {leaves} have work",
        f"engines: prompts_per_step={c.prompts_per_step}, since a group is one engine's",
        f"embedding's and head's gradient: {scattered:.1f} GB of each trainer's card in the all-to-all",
        f"weights: {size / GB:.1f} GB into each engine's card each step, {one:.2f} s, or over a network {two:.2f} s",
        f"rollout files: {c.tokens * ROLLOUT_BYTES / 1e6:.1f} MB a step, in one folder that every rank reads",
        f"a sample: {context:,} tokens as a leaf of one trainer's card, {made.room:,.0f} in an engine's cache, "
        f"{s.positions:,} positions of the model",
        f"a model with more of these layers: {full} parameters in full, {adapted} with LoRA, on {ranks} trainers; "
        f"{largest(holds)} in an engine",
    ]


def table(first, columns):
    print(f"| {first} | {' | '.join(columns)} |")


def report(s, c, card):
    every = ways(s, c, card)
    chosen = "colocated" if c.colocate or c.gpus == 1 else f"lag={c.lag}" if c.lag else "in turn"
    made, cards = plan(s, c, card), f"{c.gpus} {c.card} of {card.memory / GB:.0f} GB"
    lengths = f"{c.prompt:.0f} + {c.response:.0f} tokens in the mean, {c.max_new_tokens:,} at most"
    print(f"{c.init_from}, {parameters(s) / 1e9:.2f} G parameters, on {cards}, {chosen}")
    print(f"{c.samples} samples of {lengths}: {c.tokens:,.0f} tokens a step")
    print(f"ESTIMATES all of it, from the speed of the operators\n\nGB of a trainer's card, of {made.trainers}")

    def row(phase, part, size):
        if size:
            print(f"  {phase:9}{part:65}{size / GB:6.1f}")

    for phase, parts in trainer_memory(s, c, made.trainers).items():
        for part, size in parts.items():
            row(phase, part, size)
    row("at most", "with CUDA's own" + ", and the engine's below" * made.both, made.gpu)
    row("at least", "a smaller card is refused at the start", made.least)
    row("on CPUs", f"all {c.gpus} together, at least; this machine has {machine_memory() / GB:.1f}", made.on_cpus)
    print(f"\nGB of an engine's card, of {made.cards}")
    row("held", "weights", made.weights)
    row("held", "reward models", reward_bytes(c))
    row("held", f"cache, {made.room:,.0f} tokens", made.cache)
    if made.room < c.max_prompt_tokens + c.max_new_tokens:
        print("  no room for one whole sample: use a larger card; the seconds of rollout below are of no run")
    print()
    table("seconds of a step", (f"{way}, {x.trainers} + {x.cards}" for way, x in every.items()))
    table("---", ["---"] * len(every))
    for group, parts in made.parts.items():
        for part in parts:
            table(f"{group}: {part}", (f"{x.parts[group][part]:.2f}" for x in every.values()))
    table("files, ledger", [f"{RECORD:.2f}"] * len(every))
    table("**step**", (f"**{x.step:.1f}**" for x in every.values()))
    table("cards that neither sample nor learn", (f"{x.idle:.0%}" for x in every.values()))
    table("GB of a trainer's card", (f"{x.gpu / GB:.0f}" for x in every.values()))
    print("\nWhere it stops\n" + "\n".join(f"- {line}" for line in limits(s, c, card, made)))


def read(argv):
    """(Shape, the config as a namespace with what a step's samples are, Card) of a command line."""
    defaults = train_grpo.DEFAULTS
    namespace = KEYS | defaults | {"__file__": str(ROOT / "train_grpo.py")}
    c = types.SimpleNamespace(**configure(namespace, argv, load_features()))
    require(c.card in CARDS, f"card={c.card!r}: use {' or '.join(CARDS)}")
    require(c.dtype != "float32", "dtype='float32': a plan is of bfloat16; leave it out")
    require(c.mode == "grpo", f"mode={c.mode!r}: a plan is of RL steps; use 'grpo'")
    for key in ("gpus", "gpus_per_node"):
        require(vars(c)[key] > 0, f"{key}={vars(c)[key]}: must be more than 0")
    check_config({key: vars(c)[key] for key in defaults}, c.gpus, defaults)
    for key, longest in dict(prompt_tokens=c.max_prompt_tokens, response_tokens=c.max_new_tokens).items():
        require(0 <= vars(c)[key] <= longest, f"{key}={vars(c)[key]}: the longest has {longest}; use 0 .. {longest}")
    c.samples, c.prompt = c.prompts_per_step * c.group_size, c.prompt_tokens or c.max_prompt_tokens / 2
    c.response = c.response_tokens or c.max_new_tokens / (1 if c.ignore_eos else 2)
    c.tokens = c.samples * (c.prompt + c.response)
    # The share (1 - t / longest)^tail of the samples continues at token t: with tail 0 all are the longest, with 1
    # their lengths are uniform.
    c.tail = c.max_new_tokens / c.response - 1
    squared = c.prompt**2 + 2 * c.prompt * c.response + 2 * c.max_new_tokens**2 / ((c.tail + 1) * (c.tail + 2))
    c.squares = c.samples * squared  # the sum of the samples' squared lengths
    return shape_of(c), c, CARDS[c.card]


# ---- the model beside real runs

ALIKE = "--device=cpu --threads=1 --lanes=1 --ignore_eos --eval_size=0 --checkpoint_every=0 --max_prompt_tokens=16"
CHECKED = {  # name: ranks, flags; 64 samples of 32 tokens and 0.8 M parameters, unless the flags say otherwise
    "as it is": (1, ""),
    "group_size 16": (1, "--group_size=16"),
    "prompts_per_step 2": (1, "--prompts_per_step=2"),
    "max_new_tokens 96": (1, "--max_new_tokens=96"),
    "8 layers": (1, "--scratch_args=num_hidden_layers=8"),
    "hidden 256": (
        1,
        "--scratch_args=hidden_size=256,num_attention_heads=8,num_key_value_heads=4,intermediate_size=768",
    ),
    "lanes 4, checkpointing": (1, "--lanes=4 --gradient_checkpointing"),
    "128 samples of 80, 2 layers": (
        1,
        "--prompts_per_step=16 --max_new_tokens=80 --scratch_args=num_hidden_layers=2,intermediate_size=128",
    ),
    "hidden 320, 3 rows of 2 leaves": (
        1,
        "--scratch_args=hidden_size=320,num_attention_heads=10,num_key_value_heads=5,num_hidden_layers=3"
        " --lanes=2 --leaf_tokens=512",
    ),
    "2 ranks in turn": (2, "--max_new_tokens=64"),
    "2 ranks, lag 1": (2, "--max_new_tokens=64 --lag=1"),
}
CALIBRATION = [
    (1, "--prompts_per_step=3 --scratch_args=num_hidden_layers=3,hidden_size=96 --max_new_tokens=40 --lanes=4"),
    (
        1,
        "--scratch_args=hidden_size=384,num_attention_heads=12,num_key_value_heads=6,intermediate_size=1024"
        " --max_new_tokens=24",
    ),
    (2, "--prompts_per_step=5 --lag=1 --max_new_tokens=48"),  # how much slower the two are beside each other
]


def measured(ranks, flags, steps=12):
    """(Shape, config, medians of seconds: rollout, training, step) of a run here, without its first two steps."""
    flags = f"{ALIKE} --max_new_tokens=32 {flags}".split()
    prompt = statistics.mean(len(row["prompt"]) for row in arithmetic())  # a token is a character
    with tempfile.TemporaryDirectory() as folder:
        # rewards that differ, so that there are gradients
        source = "def reward(prompt, response, answer):\n    return len(set(response)) / 9\n"
        Path(folder, "variety.py").write_text(source)
        own = f"--reward={folder}/variety.py:reward --max_steps={steps}".split()
        lines = run(Path(folder, "run"), *flags, *own, ranks=ranks)[2:]
    found = [statistics.median(x[f"{key}_seconds"] for x in lines) for key in ("rollout", "train", "step")]
    print(f"{' '.join(flags)}: {', '.join(f'{x:.3f}' for x in found)} s", file=sys.stderr, flush=True)
    return *read([*flags, f"--gpus={ranks}", f"--prompt_tokens={prompt}"])[:2], found


def check():
    """Calibrates this CPU's rates by the runs of CALIBRATION, and prints what they predict for those of CHECKED."""
    runs = [*CALIBRATION, *CHECKED.values()]
    rounds = [[measured(*run) for run in runs] for _ in range(2)]
    # Other work on the machine can only slow a run down: the faster of two rounds counts.
    runs = [(s, c, [*map(min, found, again)]) for (s, c, found), (_, _, again) in zip(*rounds)]
    *alone, (s, c, found) = runs[: len(CALIBRATION)]
    # Seconds are linear in those of an operation and of a step, so two runs give both.
    units, rates = [cpu_rates(1.0, 0.0), cpu_rates(math.inf, 1.0)], []
    for i, role in enumerate(("engine", "trainer")):
        costs = [[seconds(*run[:2], unit, unit)[i] for unit in units] for run in alone]
        (operation, step), _ = nnls(costs, [run[2][i] for run in alone])
        rates.append(cpu_rates(1 / max(operation, 1e-15), step))
        print(f"{role}: {rates[-1].products / 1e9:.0f} G operations per second, {step * 1e3:.2f} ms of Python")
    rest = statistics.mean(step - roll - train for *_, (roll, train, step) in alone)
    slower = (found[2] - rest) / max(seconds(s, c, *rates))
    print(f"weights, files, ledger: {rest:.3f} s; beside each other both are {slower:.2f} times as slow\n")
    table("run", ["predicted: rollout, training, step", "measured", "predicted / measured"])
    table("---", ["---"] * 3)
    ratios = []
    for name, (s, c, found) in zip(CHECKED, runs[len(CALIBRATION) :]):
        roll, train = seconds(s, c, *rates)
        step = rest + (slower * max(roll, train) if c.lag else roll + train)
        ratios.append(step / found[2])
        figures = [", ".join(f"{x:.3f}" for x in row) for row in ((roll, train, step), found)]
        table(name, [*figures, f"{ratios[-1]:.2f}"])
    near = sum(0.75 <= ratio <= 1.25 for ratio in ratios)
    print(f"\n{near} of {len(ratios)} within 25 %; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    sys.exit(int(near < len(ratios)))


if __name__ == "__main__":
    require("--check" not in sys.argv or len(sys.argv) == 2, "--check: goes alone, without files and flags")
    check() if sys.argv[1:] == ["--check"] else report(*read(sys.argv[1:]))
