"""
The rollout side: a real SGLang engine started inside a torchrun rank; prompts in, scored groups of samples out.

    models          all that is known here of Hugging Face's and SGLang's model classes: our operators in both of them
    the scheduler   SGLang's child process, in which a model runs
    RolloutEngine   starts that process, notices its death, lends its memory, supplies it with the trainers' weights
    Sampler         makes samples with it
    sample_step     has a step's samples made: whole ones, or a segment of each that is in flight

The life of one prompt:

    plan       which prompts a step has follows from (seed, step) alone, so all ranks make the same Job by themselves
    share      an engine that has room takes the next prompt, by a counter in torchrun's store: this decides who does
               the work, not what comes out of it
    generate   SGLang draws G samples side by side, the noise of each from a seed of its own
    score      the reward function sees the texts while other prompts are generated; user code, one text at a time
    write      group_0003.safetensors appears whole: tokens, log-probs, rewards and weight version under one checksum
    take       all ranks wait until every engine has said that its files are there, and read them in the order of the
               prompts (sync.Queue)

A group whose file exists is never made again.

`install_operators` hooks kernels.py into SGLang's classes in the scheduler's process; `kernels.draw` takes the place
of its draw. On a CPU SGLang needs three replacements more (in `run_scheduler`; 0.5.17 has no switch for them): a flag
that keeps RoPE from importing vLLM, its batch-invariant mode (Triton kernels), and process groups that ask for no CUDA
device; `sample_tokens` and `decode_results` only save time. Nothing here imports sglang before an engine is wanted:
that takes seconds.
"""

import asyncio
import copy
import functools
import hashlib
import itertools
import multiprocessing
import os
import pkgutil
import re
import signal
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import kernels
from configurator import close_bars, lean_imports, require
from rewards import MODELS, RewardError, rows_of_step, score_all
from sync import (
    RunError,
    Shard,
    TreeReduceScatter,
    group_path,
    hidden_torchrun,
    least_memory,
    lora_settings,
    tensor_hashes,
    write_group,
)

MODEL_TYPES = ("qwen3", "qwen2", "llama")
SCORES = "ForSequenceClassification"  # how Hugging Face calls the class of a reward model
ATTENTION_BACKEND = {"cpu": "torch_native", "cuda": "triton"}  # SGLang's names; ours takes their place
SIGN_OF_LIFE = 50  # tokens of a sample after which SGLang sends what it has of it; SGLang's own number
LENT = ["kv_cache", "weights"]  # SGLang's names of the memory that sleeps

# ------------------------------------------------------------------------------------------------------------------
# models: all that is known here of Hugging Face's and SGLang's classes


def check_model(folder, config, key="init_from"):
    """
    The Hugging Face config of a language model, or with key='reward' of a reward model. With mode='rm' it is the config
    of the reward model that the language model becomes. Ends the run with one line if we cannot train and serve it.
    """
    with lean_imports():  # reading a config imports half of transformers
        from transformers import AutoConfig

        try:
            hf = AutoConfig.from_pretrained(folder)
        except Exception as e:
            require(False, f"{key}={str(folder)!r}: no usable config.json: {str(e).splitlines()[0]}")
    name = f"{key}={str(folder)!r}"
    require(hf.model_type in MODEL_TYPES, f"{name}: a {hf.model_type} model; known are {', '.join(MODEL_TYPES)}")
    sliding = getattr(hf, "use_sliding_window", False) or "sliding_attention" in (getattr(hf, "layer_types", 0) or ())
    require(not sliding, f"{name}: sliding-window attention is not supported; use a model without it")
    tokens, most = config["max_prompt_tokens"] + config["max_new_tokens"], hf.max_position_embeddings
    fits = f"max_new_tokens={config['max_new_tokens']}: {tokens} tokens with the prompt, and 8 to spare"
    require(tokens + 8 <= most, f"{fits}; the model has {most} positions; use less")
    if key == "reward":
        require(gives_scores(hf), f"{name}: a language model; a reward model is wanted, such as --mode=rm trains")
        require(hf.num_labels == 1, f"{name}: it gives {hf.num_labels} numbers; a reward model gives one")
    else:
        require(not gives_scores(hf), f"{name}: a reward model, which writes nothing; use the model that it began with")
    heads, key_heads, width = hf.num_attention_heads, hf.num_key_value_heads, hf.intermediate_size
    attended = heads * (getattr(hf, "head_dim", None) or hf.hidden_size // heads)
    for what, n, by in (
        (f"attention's width, {attended},", attended, "tp_split"), (f"the MLP's width, {width},", width, "tp_split"),
        (f"its {heads} heads", heads, "rollout_tp"), (f"its {key_heads} key heads", key_heads, "rollout_tp"),
    ):  # fmt: skip
        require(n % config[by] == 0, f"{by}={config[by]}: does not divide {what} of {name}; use another power of two")
    if key == "init_from" and config["mode"] == "rm":
        hf.architectures, hf.num_labels = [hf.model_type.capitalize() + SCORES], 1
        if hf.pad_token_id == hf.eos_token_id:  # Hugging Face's class would read the score before the EOS
            hf.pad_token_id = None
    if key == "init_from" and config["device"] != "cpu" and torch.cuda.is_available():
        check_card(hf, config)
    return hf


def check_card(hf, config):
    """Ends the run with one line, before any weight is read, if the model cannot fit on cards like this rank's."""
    lora = lora_settings(types.SimpleNamespace(**config)) if config["lora_rank"] else None
    parameters, learned = parameter_counts(hf, lora)
    scores = sum(2 * parameter_counts(model.hf)[0] for model in MODELS.values())
    world = int(os.environ.get("WORLD_SIZE", 1))
    card = torch.cuda.get_device_properties("cuda").total_memory
    cures = dict(
        train=f"lanes={config['lanes']}: use more trainers, fewer lanes, --lora_rank=32",
        sample=f"engine_memory={config['engine_memory']}: use a larger share, --rollout_tp=2",
    )
    for role, needed in least_memory(parameters, learned, config, world, scores).items():
        why = f"to {role} a card needs {needed / 1e9:.1f} GB and more, this one has {card / 1e9:.1f}"
        require(needed <= card, f"{cures[role]}, or a smaller model than init_from: {why}")


def parameter_counts(hf, lora=None):
    """(parameters of the model of a Hugging Face config, parameters that are learned: these or LoRA's)."""
    model = build_model(hf, None, "meta", batch_invariant=False, lora=lora)
    every = sum(p.numel() for p in model.parameters())
    learned = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return every - learned if lora else every, learned


def gives_scores(hf):
    return (hf.architectures or [""])[0].endswith(SCORES)


def rope_frequencies(hf, device):
    """
    RoPE's inverse frequencies (head dim / 2,), by transformers on the CPU: trainer and engine take these very numbers.
    Ends the run if kernels.py cannot compute a model of this Hugging Face config on this device.
    """
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    # the rope_types left out change with the length, or scale cos and sin
    rope = dict(partial_rotary_factor=1.0) | hf.rope_parameters | dict(hidden_act=hf.hidden_act)
    known = dict(rope_type=("default", "linear", "llama3"), partial_rotary_factor=(1.0,), hidden_act=("silu",))
    for key, values in known.items():
        cure = f"known: {', '.join(map(str, values))}"
        require(rope[key] in values, f"init_from: {key}={rope[key]!r} in config.json; {cure}")
    inv_freq = LlamaRotaryEmbedding(hf, device="cpu").inv_freq
    if device == "cuda":
        dim = 2 * len(inv_freq)
        groups = hf.num_attention_heads / hf.num_key_value_heads
        require(dim in (64, 128), f"init_from: head_dim={dim}; on CUDA it must be 64 or 128")
        require(groups in range(1, 9), f"init_from: {groups:g} query heads to a key head; on CUDA 1 to 8")
    return inv_freq


def build_model(hf, mesh, device, batch_invariant, critic=False, lora=None, tp_split=1):
    """
    The Hugging Face model, sharded by FSDP2, its weights still unset. Master weights are float32, the compute dtype is
    bfloat16 on CUDA and float32 elsewhere. `model.token_logprobs` is its forward pass for training. critic: with a
    value head (hidden size,). lora: (rank, scale, targets) of adapters; the model's own weights are then frozen and
    held in the compute dtype. mesh None: a whole model for forward passes only, in the compute dtype. tp_split: parts
    of row-parallel sums.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    with lean_imports():
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # `install_in_trainer` replaces the layers that would call it; under this name no attention mask is made
    ALL_ATTENTION_FUNCTIONS.register("batch_invariant", kernels.attention)
    attention = "batch_invariant" if batch_invariant else "sdpa"
    kind = AutoModelForSequenceClassification if gives_scores(hf) else AutoModelForCausalLM
    computed_in = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device("meta"):
        model = kind.from_config(hf, dtype=computed_in if lora else torch.float32, attn_implementation=attention)
        if lora:
            add_adapters(model, *lora)
        model.value_head = torch.nn.Parameter(torch.empty(hf.hidden_size)) if critic else None
    # cast_forward_inputs would round RoPE's float32 cos and sin to bfloat16, which the engine does not do
    dtypes = dict(param_dtype=None if lora else computed_in, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtypes))
    for part in (*model.model.layers, model) if mesh else ():
        fully_shard(part, **options)
        part.set_custom_reduce_scatter(TreeReduceScatter())
    model.to_empty(device=device)
    if mesh is None:
        model.to(computed_in)
    model.model.rotary_emb = type(model.model.rotary_emb)(hf).to(device)  # its buffers are in no checkpoint
    if batch_invariant:
        install_in_trainer(model, rope_frequencies(hf, device).to(device), tp_split)
    model.token_logprobs = functools.partial(token_logprobs, model)
    if mesh:
        register_fsdp_forward_method(model, "token_logprobs")
    return model


LINEAR = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()  # a layer's, of attention and MLP


def add_adapters(model, rank, scale, targets):
    """
    Freezes the model and puts LoRA's A (rank, in) and B (out, rank) beside the weights of its linear layers of these
    names, all of them if there are none. The names are PEFT's, and so are the meanings.
    """
    layers, names = [(name.rpartition(".")[2], m) for name, m in model.named_modules()], targets or LINEAR
    known = f"the linear layers of attention and MLP are {', '.join(LINEAR)}"
    for name in names:
        require(name in LINEAR and name in dict(layers), f"lora_targets: no layer has {name!r} to adapt; {known}")
    model.requires_grad_(False)
    for name, m in layers:
        if name in names:
            most = min(m.weight.shape)
            require(rank <= most, f"lora_rank={rank}: {name} has rank {most} itself; use less, or train it in full")
            m.lora_A = torch.nn.Linear(m.in_features, rank, bias=False)
            m.lora_B = torch.nn.Linear(rank, m.out_features, bias=False)
            m.forward = functools.partial(adapted, m, scale)


def adapted(m, scale, x, split=1):
    """A linear layer with LoRA's matrices: x (.., in) -> (.., out)."""
    y = kernels.LoRALinear.apply(x.flatten(0, -2), m.weight, m.bias, m.lora_A.weight, m.lora_B.weight, scale, split)
    return y.view(*x.shape[:-1], -1)


def in_parts(m, x, split):
    """A linear layer as a sum of `split` products: x (.., in) -> (.., out)."""
    return kernels.SplitLinear.apply(x.flatten(0, -2), m.weight, m.bias, split).view(*x.shape[:-1], -1)


def token_logprobs(model, leaf, temperature):
    """
    At the leaf's targets (log-probs (M,), entropies (M,), the critic's values (M,), its values after each sample's last
    token (samples,)); without a critic the values are None. Of a reward model (None, None, None, scores (samples,)).
    """
    plan = kernels.packed_plan(leaf.lengths)
    ids, positions = leaf.ids[None], leaf.positions[None]
    hidden = model.model(input_ids=ids, position_ids=positions, use_cache=False, plan=plan).last_hidden_state[0]
    last = leaf.lengths.cumsum(0) - 1
    if gives_scores(model.config):  # in float32: the difference of two scores counts
        return None, None, None, (hidden[last].float() @ model.score.weight.float().t())[:, 0]
    logprobs, entropy = kernels.token_logprobs(hidden[leaf.predictors], model.lm_head.weight, leaf.targets, temperature)
    if model.value_head is None:
        return logprobs, entropy, None, None
    values = (hidden @ model.value_head[:, None].to(hidden.dtype))[:, 0].float()
    return logprobs, entropy, values[leaf.predictors], values[last]


def head_norms(attention):
    """The weights and eps of the norms of a layer's queries and keys; () of a model that has none."""
    if not hasattr(attention, "q_norm"):
        return ()
    return attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon


ROW_PARALLEL = "o_proj", "down_proj"  # the layers whose sums an engine over several GPUs cuts


def install_in_trainer(model, inv_freq, tp_split=1):
    """Makes a Hugging Face model compute with kernels.py: rotary embedding, attention, norms, MLPs, cut sums."""

    def attend(self, hidden_states, position_embeddings, plan, **_):
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (p(hidden_states[0]).unflatten(1, (-1, self.head_dim)) for p in projections)
        q, k = kernels.norm_rope(q, k, *position_embeddings, *head_norms(self))
        return self.o_proj(kernels.attention(q, k, v, plan, self.scaling).flatten(1))[None], None

    model.model.rotary_emb.forward = lambda x, position_ids: kernels.rope_table(inv_freq, position_ids[0])
    for name, module in model.named_modules():
        if name.endswith(".self_attn"):
            module.forward = functools.partial(attend, module)
        elif name.endswith("norm"):
            module.forward = lambda x, m=module: kernels.rms_norm(x, m.weight, m.variance_epsilon)
        elif name.endswith(".mlp"):
            module.forward = lambda x, m=module: m.down_proj(kernels.swiglu(m.gate_proj(x), m.up_proj(x)))
        elif tp_split > 1 and name.endswith(ROW_PARALLEL):
            own = module.forward if hasattr(module, "lora_A") else functools.partial(in_parts, module)
            module.forward = functools.partial(own, split=tp_split)


def paged_attention(inv_freq):
    """The class of an attention backend, as SGLang wants one; made here, as its base is imported late."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    class PagedAttention(AttentionBackend):
        """
        Our attention over SGLang's paged cache, prefill and decode alike. What the layers share is made once per
        forward, where SGLang captures it: a graph's replay makes it anew, from the runner's static buffers.
        """

        needs_cpu_seq_lens = False  # a decode step does not wait for its lengths

        def __init__(self, runner):
            super().__init__()
            self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
            self.layers = runner.model.model.layers
            self.inv_freq = torch.tensor(inv_freq, device=runner.device)

        def init_forward_metadata_in_graph(self, batch):
            q_lens = torch.ones_like(batch.seq_lens) if batch.forward_mode.is_decode() else batch.extend_seq_lens
            table = self.req_to_token_pool.req_to_token
            table[:1, :1].zero_()  # a graph's empty slots read this entry, and memory comes back from a loan as garbage
            self.plan = kernels.paged_plan(q_lens, batch.seq_lens, table, batch.req_pool_indices)
            self.rope_table = kernels.rope_table(self.inv_freq, batch.positions)

        def init_cuda_graph_state(self, max_bs, max_num_tokens):
            pass

        def get_cuda_graph_seq_len_fill_value(self):
            return 1

        def attend(self, q, k, v, layer, batch):
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc), k, v)
            keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
            return kernels.attention(q, keys, values, self.plan, layer.scaling)

    return PagedAttention


def layer_on_cpu(decoder):
    """The kernels.CpuLayer of one of SGLang's decoder layers."""
    attention, norms = decoder.self_attn, (decoder.input_layernorm, decoder.post_attention_layernorm)
    parts = attention.qkv_proj, attention.o_proj, decoder.mlp.gate_up_proj, decoder.mlp.down_proj
    return kernels.CpuLayer(
        [(part.weight, part.bias) for part in parts], [n.weight for n in norms], head_norms(attention)[:2],
        norms[0].variance_epsilon, (attention.num_heads, attention.num_kv_heads), attention.head_dim,
        attention.attn.scaling,
    )  # fmt: skip


def install_operators(backend, inv_freq, tp_split):
    """
    Makes SGLang's models in this process compute with kernels.py. The hooks replace `forward` of its classes, above the
    choice of a platform's kernel. backend: the name under which our attention is registered; by it SGLang decides how
    the cache is laid out. Decoder layers are the same operators on a CPU and on CUDA; on a CPU all of them are one call
    unless sums are cut into parts (tp_split).

    log_softmax and softmax end in aten operators, which `kernels.enable_batch_invariant` replaces. Without a hook:
    VocabParallelEmbedding and set_kv_buffer copy rows; the head's columns are put side by side; Sampler.forward divides
    once, by a tensor of temperatures, before the log_softmax that it returns.
    """
    from sglang.srt.distributed.parallel_state import GroupCoordinator, get_tp_group
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.model_executor.forward_context import get_attn_backend
    from sglang.srt.models import llama, qwen2, qwen3

    def linear(module, x):
        return kernels.linear(x, module.weight, module.bias)

    def row_parallel(module, x):
        gather = (lambda y: get_tp_group().all_gather(y[None], 0)) if module.tp_size > 1 else None
        return kernels.linear(x, module.weight, module.bias, tp_split // module.tp_size, gather)

    def add_rows(group, x):
        """Adds rows that one rank has and the others fill with zeros; as integers, since -0.0 + 0.0 loses its sign."""
        rows = group.all_gather(x[None], 0).view({2: torch.int16, 4: torch.int32}[x.itemsize])
        return rows.sum(0, dtype=rows.dtype).view(x.dtype)

    def attend(attention, x, batch):
        qkv = linear(attention.qkv_proj, x).view(len(x), -1, attention.head_dim)
        q, k, v = qkv.split([attention.num_heads, attention.num_kv_heads, attention.num_kv_heads], 1)
        backend = get_attn_backend()
        q, k = kernels.norm_rope(q, k, *backend.rope_table, *head_norms(attention))
        return row_parallel(attention.o_proj, backend.attend(q, k, v, attention.attn, batch).flatten(1))

    def layer(self, positions, x, batch, residual):
        if kernels.kept is not None and tp_split == 1:  # the first layer's call does the work of all
            return layers_on_cpu(x, batch) if residual is None else (x, residual)
        if residual is None:
            x, residual = norm(self.input_layernorm, x), x
        else:
            x, residual = norm(self.input_layernorm, x, residual)
        x, residual = norm(self.post_attention_layernorm, attend(self.self_attn, x, batch), residual)
        hidden = kernels.swiglu(*linear(self.mlp.gate_up_proj, x).chunk(2, -1))
        return row_parallel(self.mlp.down_proj, hidden), residual

    def layers_on_cpu(x, batch):
        backend = get_attn_backend()
        if "layers" not in kernels.kept:
            kernels.kept["layers"] = [*map(layer_on_cpu, backend.layers)]
        caches = [backend.token_to_kv_pool.get_kv_buffer(i) for i in range(len(backend.layers))]
        its = backend.rope_table, caches, batch.out_cache_loc, backend.plan
        return kernels.cpu_layers(kernels.kept["layers"], x, *its)

    def norm(self, x, residual=None, more=None):
        assert more is None
        return kernels.rms_norm(x, self.weight, self.variance_epsilon, residual)

    RMSNorm.forward, GroupCoordinator.all_reduce = norm, add_rows
    # SGLang's own layers do the same, but ask at each part for several GPUs, for quantization and for a platform
    for decoder in (llama.LlamaDecoderLayer, qwen2.Qwen2DecoderLayer, qwen3.Qwen3DecoderLayer):
        decoder.forward = layer
    LogitsProcessor._compute_lm_head = lambda self, hidden, head, bias=None: kernels.head_logits(hidden, head.weight)
    register_attention_backend(backend)(paged_attention(inv_freq))


def hugging_face_parameters(model):
    """
    Yields (Shard under Hugging Face's name, whether other ranks have the rest of it) of an SGLang model: views, nothing
    is copied. SGLang has q, k and v, and gate and up, as the rows of one parameter, and fills an embedding up to a
    multiple of 64 rows. Ranks have the columns of a row-parallel layer's weight, and all of its bias.
    """
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for module_name, module in model.named_modules():
        path, _, last = module_name.rpartition(".")
        rank, ranks = getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)
        for kind, p in module.named_parameters(recurse=False):
            data, by_columns = p.data, last in ROW_PARALLEL
            if by_columns:
                columns = p.shape[1] if kind == "weight" else 0
                shape = (len(p), columns * ranks)[: p.dim()]
                parts = [(data, shape, 0, rank * columns)]
            elif hasattr(module, "shard_indices"):
                has = module.shard_indices
                shape = module.org_vocab_size, p.shape[1]
                parts = [(data[: has.num_org_elements], shape, has.org_vocab_start_index, 0)]
            else:
                sizes = getattr(module, "output_sizes", None) or [len(p) * ranks]
                rows = [size // ranks for size in sizes]
                parts = [(x, (size, *p.shape[1:]), rank * len(x), 0) for x, size in zip(data.split(rows), sizes)]
            for part, (x, shape, first, column) in zip(fused.get(last, (last,)), parts):
                yield Shard(f"{path}.{part}.{kind}".lstrip("."), shape, first, x, column), x.shape != shape


# ------------------------------------------------------------------------------------------------------------------
# in the scheduler's process


def check_weights(scheduler, expected):
    """
    Raises ValueError, with names, unless the parameters of the model that the engine's schedulers run together have the
    hashes `expected`, {Hugging Face's name: hash}.
    """
    found = [x for x in hugging_face_parameters(scheduler.tp_worker.model_runner.model) if x[0].name in expected]
    hashes, group = {}, scheduler.tp_group
    for cut, among in ((False, None), (True, group.device_group)):
        if shards := [shard for shard, is_cut in found if is_cut == cut]:
            hashes |= tensor_hashes([s.data for s in shards], shards, among)
    everyone = [None] * group.world_size
    dist.all_gather_object(everyone, [n for n in expected if hashes.get(n) != expected[n]], group=group.cpu_group)
    wrong = [*dict.fromkeys(itertools.chain(*everyone))]
    if wrong:
        raise ValueError(", ".join(wrong[:3]) + ", .." * (len(wrong) > 3))


def receive_rows(self, names, dtypes, shapes, *_):
    """
    In place of SGLang's WeightUpdater.update_weights_from_distributed, which takes whole tensors from one sender: each
    trainer sends its rows, in the group that it has with all workers. Tensor after tensor, trainer after trainer: in
    the same order in every worker, as NCCL wants it. Returns (whether it worked, why not).
    """
    groups = self._model_update_group.values()  # in the order of the trainers
    weights = []
    try:
        for name, dtype, shape in zip(names, dtypes, shapes):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            for group, rows in zip(groups, tensor.chunk(len(groups))):  # as FSDP2 cuts it
                dist.broadcast(rows.view(torch.uint8), src=0, group=group)
            weights.append((name, tensor))
        self.get_model().load_weights(weights)
    except Exception as e:
        return False, str(e)
    return True, ""


def allow_deterministic_backend():
    """Has deterministic mode take the CPU's backend and keep the radix cache with it; needed in both processes."""
    from sglang.srt import server_args

    server_args.add_deterministic_attention_backend_choices(["torch_native"])
    server_args.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


def sample_tokens(self, by_sglang, output, info, return_logprob, *others):
    """
    SGLang's sampler where all requests are drawn from the whole softmax: its log-softmax and its draw, without a
    softmax of its own and the log of that between them.
    """
    from sglang.srt.layers import sampler

    cut = info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling
    if cut or info.is_all_greedy or not return_logprob:
        return by_sglang(self, output, info, return_logprob, *others)
    logprobs = kernels.log_softmax(output.next_token_logits.div_(info.temperatures), -1, False)
    tokens = sampler.multinomial_with_seed(logprobs, info.sampling_seed, others[-1])
    output.next_token_logprobs = logprobs.gather(1, tokens)[:, 0]
    return tokens[:, 0].int()


def decode_results(self, by_sglang, batch, result):
    """
    What SGLang's scheduler does with the tokens of a decode step, in less time: it is half of its own work. Most
    requests just go on, and only keep their token and its log-prob. Requests that may end here, are streamed, or have a
    sign of life to send are left to SGLang's own function.
    """
    if not batch.return_logprob:
        return by_sglang(self, batch, result)
    logits, special = result.logits_output, []
    rows = zip(batch.reqs, result.next_token_ids.tolist(), logits.next_token_logprobs.tolist())
    for i, (req, token, logprob) in enumerate(rows):
        params, length = req.sampling_params, len(req.output_ids) + 1
        stops = token in (params.stop_token_ids or ()) or token in (req.eos_token_ids or ())
        ends = stops and not params.ignore_eos or length >= params.max_new_tokens or req.to_finish
        if ends or params.stop_strs or req.stream or length % SIGN_OF_LIFE == 0:
            special.append(i)
        else:
            req.output_ids.append(token)
            req.logprob.output_token_logprobs_val.append(logprob)
            req.logprob.output_token_logprobs_idx.append(token)
    if special:
        logits, batch, result = copy.copy(logits), copy.copy(batch), copy.copy(result)
        batch.reqs = [batch.reqs[i] for i in special]
        logits.next_token_logprobs = logits.next_token_logprobs[special]
        result.logits_output, result.next_token_ids = logits, result.next_token_ids[special]
        by_sglang(self, batch, result)


def run_scheduler(device, threads, inv_freq, tokenizer, tp_split, *args, **kwargs):
    """
    SGLang's scheduler process, with our operators unless inv_freq is None; its `run_scheduler_process_func`. tokenizer:
    the folder of one, where turns end at strings.
    """
    from sglang.srt import batch_invariant_ops, models
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import sampler
    from sglang.srt.layers.rotary_embedding import base as rotary_embedding
    from sglang.srt.managers.scheduler_components import batch_result_processor
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.model_executor import forward_batch_info
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup, weight_updater

    enable = functools.partial(kernels.enable_batch_invariant, threads)
    # what deterministic mode switches on; SGLang's own would put its Triton kernels in
    batch_invariant_ops.enable_batch_invariant_mode = enable if inv_freq else lambda: None
    sampler.multinomial_with_seed = kernels.draw
    weight_updater.WeightUpdater.update_weights_from_distributed = receive_rows
    if device == "cpu":
        torch.set_num_threads(threads)
        allow_deterministic_backend()
        rotary_embedding._is_cpu = True
        sampler.Sampler.forward = functools.partialmethod(sample_tokens, sampler.Sampler.forward)
        kernels.kept = None if kernels.INTERPRET else {}
        processor = batch_result_processor.SchedulerBatchResultProcessor
        own = processor.process_batch_result_decode
        processor.process_batch_result_decode = functools.partialmethod(decode_results, own)
        os.environ["SGLANG_EAGER_INPUT_NO_COPY"] = "1"  # no copy into buffers that only a graph would need

        def group_on_cpu(self, own=parallel_state.GroupCoordinator.__init__, **options):
            own(self, **options | dict(use_pynccl=False, use_custom_allreduce=False))

        parallel_state.GroupCoordinator.__init__ = group_on_cpu  # it would ask for a CUDA device
    else:
        # SGLang would have nvcc compile these at the first steps. Keys and values are then written by two index_put of
        # torch's a layer instead of one kernel, inside the graph of a decode step; both copy rows.
        forward_batch_info.clamp_position = forward_batch_info._clamp_position_native
        memory_pool.can_use_store_cache = lambda *_: False
    if inv_freq:
        install_operators(ATTENTION_BACKEND[device], inv_freq, tp_split)
        attention_backend_setup.init_cublas = lambda: None  # a product of float16, which kernels.py refuses
        # the next batch may write the page table once this one has read it: SGLang's own backend copies it before a
        # graph's replay, PagedAttention reads it until the end
        os.environ["SGLANG_FORCE_COARSE_WAR_BARRIER"] = "1"
        # for its own backend's sake SGLang would cut prefills at multiples of 4096, and wait for ever for larger chunks
        os.environ["SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE"] = "1"
    # SGLang would import all its two hundred models before it picks one: seconds
    others = {module.name for module in pkgutil.iter_modules(models.__path__)} - set(MODEL_TYPES)
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(others)
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process

    def flush_cache(self, *args, own=Scheduler.flush_cache, **kwargs):
        if kernels.kept:
            kernels.kept.clear()
        return own(self, *args, **kwargs)

    Scheduler.flush_cache = flush_cache  # as with every change of the weights
    if tokenizer:
        from sglang.srt.utils.hf_transformers.tokenizer import get_tokenizer

        def init_tokenizer(self, own=Scheduler.init_tokenizer):
            own(self)
            self.tokenizer = get_tokenizer(tokenizer)

        # SGLang's own switch would have it send texts, to a process that we do not start.
        Scheduler.init_tokenizer = init_tokenizer
    Scheduler.check_weights = check_weights  # for Engine.collective_rpc
    run_scheduler_process(*args, **kwargs)


def early_scheduler(run, orders, writer):
    """A process that imports SGLang while its rank does, and then does what SGLang has the rank's child do: `run`."""
    import setproctitle

    setproctitle.getproctitle()  # it finds where the title is by the environment, as long as that is unchanged
    with lean_imports():
        import sglang.srt.managers.scheduler
        import sglang.srt.models.qwen3  # noqa: F401

    try:
        environment, args = orders.recv()
    except EOFError:  # the rank is no more, or SGLang has refused its arguments
        return
    os.environ.update(environment)
    run(*args, writer)


@contextmanager
def started_early(run, count):
    """
    Starts SGLang's scheduler processes before SGLang is imported here: on a CPU the imports are most of an engine's
    start, and they do not have to wait for each other. Inside, SGLang's engine gets these when it wants its `count`.

    Spawned, not forked: a rank has threads of gloo and OpenMP, whose locks a fork would copy in whatever state they
    are, and its lock on the run's folder.
    """
    spawn, started = multiprocessing.get_context("spawn"), []
    with ExitStack() as stack:
        for _ in range(count):
            (orders, commands), (reader, writer) = spawn.Pipe(duplex=False), spawn.Pipe(duplex=False)
            process = spawn.Process(target=early_scheduler, args=(run, orders, writer))
            process.start()
            orders.close(), writer.close()  # so that each end notices when the other dies
            started.append((process, stack.enter_context(commands), reader))
        with lean_imports():
            from sglang.srt.entrypoints import engine

        processes, readers = iter(started), (reader for _, _, reader in started)

        def stand_in(target, args):  # its last argument is the writer, which the process has
            process, commands, _ = next(processes)
            process.start = lambda: commands.send((dict(os.environ), args[:-1]))
            return process

        pipe = lambda duplex: (next(readers), None)  # noqa: E731
        engine.mp = types.SimpleNamespace(Process=stand_in, Pipe=pipe, set_start_method=lambda *_, **__: None)
        allow_deterministic_backend()
        yield


# ------------------------------------------------------------------------------------------------------------------
# the engine, in its rank


@contextmanager
def output_to(path):
    """Sends this process's and its new children's stdout and stderr to the file: SGLang starts noisily."""
    sys.stdout.flush(), sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with open(path, "a") as log:
        os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        for fd, old in zip((1, 2), kept):
            os.dup2(old, fd)
            os.close(old)


def unlink_shared_memory(pids):
    """
    Takes from /dev/shm the names of what these processes have there: tqdm's lock, statistics for a router. SGLang's
    processes are ended by SIGKILL and would leave them behind; nobody opens them by name again, and without the names
    the memory goes when the processes go, however that happens.
    """
    for pid in pids:
        mapped = re.findall(r"(\d+) +/dev/shm/", Path(f"/proc/{pid}/maps").read_text())
        inodes = set(map(int, mapped))  # of files; a semaphore has two names
        for entry in os.scandir("/dev/shm"):  # its inode came with the name: the file itself may just have gone
            if entry.inode() in inodes and not entry.name.startswith(("cuda", "nccl")):
                Path(entry).unlink(missing_ok=True)


def engine_arguments(config, model_path, device, dtype, gpu, lends, died):
    """What SGLang is started with, as its ServerArgs name it."""
    on_cpu = device == "cpu"
    tokens = config["max_prompt_tokens"] + config["max_new_tokens"]
    samples = max(config["prompts_per_step"], config["groups_in_flight"]) * config["group_size"]
    requests = max(samples, config["eval_size"] * config["eval_samples"])
    args = dict(
        model_path=str(model_path), device=device, dtype=str(dtype).removeprefix("torch."), log_level="error",
        skip_tokenizer_init=True, enable_deterministic_inference=True, sampling_backend="pytorch",
        context_length=tokens + 8, random_seed=config["seed"] % 2**31, base_gpu_id=gpu, tp_size=config["rollout_tp"],
        disable_radix_cache=not config["radix_cache"], attention_backend=ATTENTION_BACKEND[device],
        max_total_tokens=config["engine_kv_tokens"] or (on_cpu and samples * (tokens + 1)) or None,
        max_running_requests=config["engine_max_running"] or (on_cpu and samples) or None,
        chunked_prefill_size=config["engine_prefill_chunk"] or None, weight_version="0", custom_sigquit_handler=died,
        sleep_on_idle=True,  # else it polls, and takes a core from whoever trains meanwhile
    )  # fmt: skip
    if on_cpu:
        return args | dict(disable_cuda_graph=True, disable_overlap_schedule=True)
    return args | dict(
        disable_cuda_graph=not config["cuda_graphs"], cuda_graph_max_bs_decode=min(512, requests),
        disable_prefill_cuda_graph=True,  # of decode steps only: a prefill has work enough to hide its launches
        bf16_gemm_backend="torch",  # F.linear, whose aten operators are ours
        mem_fraction_static=config["engine_memory"], enable_memory_saver=lends,
    )  # fmt: skip


class Drawn(NamedTuple):
    """A sample as far as it is drawn, token by token."""

    tokens: list
    logprobs: list
    versions: list  # of the weights


class RolloutEngine:
    """
    One SGLang engine, kept alive and supplied with weights. Raises RunError when it dies while it is asked for
    something, or says nothing for `engine_timeout` seconds; a death at another moment ends the process with one line.

    hf: the model's Hugging Face config. config: the keys of train_grpo.py's block. log: the file that takes SGLang's
    output. lends: `sleep` gives the memory of weights and cache to this rank's trainer.
    """

    def __init__(self, index, model_path, hf, config, device, dtype, log, gpu=0, lends=False):
        self.index, self.config, self.log, self.version = index, config, log, 0  # as loaded
        self.sign = log.with_suffix(".alive")  # touched while SGLang lives and works (sync.Queue)
        self.name, self.stderr = f"engine {index}", os.dup(2)  # while it starts, 2 is the log
        self.inv_freq = rope_frequencies(hf, device).tolist() if config["batch_invariant"] else None
        self.lends, self.asleep, self.model_type = lends, False, hf.model_type
        self.asked, self.since, self.busy = 0, 0.0, 0.0  # open requests, since when, seconds with any before that
        started = time.monotonic()
        print(f"{self.name}: starting SGLang, its output goes to {log}", flush=True)
        if device == "cuda":
            print(f"{self.name}: compiling kernels: takes minutes at a first start", flush=True)
        for model in MODELS.values():  # SGLang takes its share of what these leave of a card
            model.load()
        try:
            with hidden_torchrun(), output_to(log):
                self.sglang = self._start(model_path, device, dtype, gpu)
        except Exception as e:
            raise RunError(f"{self.name}: SGLang did not start: {e} (see {log})")
        from sglang.srt.managers import io_struct

        self.loop, self.manager, self.requests = self.sglang.loop, self.sglang.tokenizer_manager, io_struct
        self.loop.run_until_complete(self._take_signals_back())
        print(f"{self.name}: ready after {time.monotonic() - started:.0f} s", flush=True)

    def _start(self, model_path, device, dtype, gpu):
        threads = max(kernels.threads, torch.get_num_threads())
        tokenizer = str(model_path) if self.config["agent"] or self.config["mode"] == "serve" else ""
        split, tp = self.config["tp_split"], self.config["rollout_tp"]
        run = functools.partial(run_scheduler, device, threads, self.inv_freq, tokenizer, split)
        if device == "cpu":
            if tp > 1:  # SGLang would want a NUMA node for each
                os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(tp * [f"0-{os.cpu_count() - 1}"])
            os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the sampler is torch.compile'd: minutes of g++ for nothing here
        else:
            torch.cuda.empty_cache()  # SGLang measures what is free
        if self.lends:
            # torch_memory_saver is LD_PRELOADed into the scheduler; ld.so drops it unless CUDA's folders are on
            # LD_LIBRARY_PATH
            loaded = re.findall(r"(/\S+)/libcuda(?:rt)?\.so", Path("/proc/self/maps").read_text())
            folders = dict.fromkeys([*loaded, *os.environ.get("LD_LIBRARY_PATH", "").split(":")])
            os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, folders))
        with started_early(run, tp) if device == "cpu" else nullcontext():
            from sglang.srt.entrypoints.engine import Engine

            class EngineInRank(Engine):
                run_scheduler_process_func = run
                # tokens in, tokens out: the detokenizer's process would only import SGLang once more and wait
                _launch_detokenizer_subprocesses = staticmethod(lambda *_, **__: ([], []))

            arguments = engine_arguments(self.config, model_path, device, dtype, gpu, self.lends, self._died)
            sglang = EngineInRank(**arguments)
        unlink_shared_memory(sglang.get_all_child_pids())
        if device == "cpu":  # the first tokens wait for the loops to compile: before anybody counts seconds of silence
            params = dict(max_new_tokens=2, sampling_seed=0, ignore_eos=True)
            sglang.generate(input_ids=[0], sampling_params=params, return_logprob=True)
        return sglang

    async def _take_signals_back(self):
        """
        Takes SIGTERM and SIGQUIT back from SGLang, which would drain its requests first. A SIGTERM, torchrun's too,
        ends this process (the kernel then ends the scheduler), and a dead scheduler is reported in one line.
        """
        self.manager.auto_create_handle_loop()  # SGLang takes the signals here, if no request has made it do so yet
        for s in (signal.SIGTERM, signal.SIGQUIT):
            self.loop.remove_signal_handler(s)  # outside of the loop uvloop would not
        signal.signal(signal.SIGQUIT, self._died)

    def _died(self, *_):
        """SGLang's watchdog and its failing children send SIGQUIT."""
        self.end(f"{self.name}: the SGLang process died; see {self.log}")

    def fail(self, line):
        """
        Ends the run at once, with status 2, for a mistake of the user's code. An exception would first wait for the
        rewards and tools that are still at work, and one of them may wait for a judge.
        """
        close_bars()
        sys.stdout.flush()
        self.end(line, 2)

    def end(self, line, status=1):
        """Ends the process, whatever its threads wait for."""
        os.write(self.stderr, f"\nerror: {line}\n".encode())  # maybe behind the first rank's bar
        for process in multiprocessing.active_children():
            process.kill()
        os._exit(status)

    def close(self):
        with output_to(self.log):
            self.sglang.shutdown()

    def run(self, coroutines, when):
        """The results of coroutines, run side by side. Raises RunError where SGLang falls silent while it is asked."""
        return self.loop.run_until_complete(self._watched(coroutines, when))

    async def ask(self, request):
        """The result of one of SGLang's coroutines."""
        self.asked, self.since = self.asked + 1, self.since if self.asked else time.time()
        try:
            return await request
        finally:
            self.asked -= 1
            self.busy += 0 if self.asked else time.time() - self.since

    def worked(self):
        """Seconds so far in which SGLang was asked for something."""
        return self.busy + (time.time() - self.since if self.asked else 0)

    async def generate(self, ids, params, hear=None):
        """
        SGLang's output for these token ids, or for each list of them. hear: called after each token but the last, with
        all tokens so far, [(log-prob, id, None)].
        """
        options = dict(input_ids=ids, sampling_params=params, return_logprob=True)
        if not hear:
            return await self.ask(self.sglang.async_generate(**options))

        async def stream():
            async for output in await self.sglang.async_generate(**options, stream=True):
                if not output["meta_info"]["finish_reason"]:
                    hear(output["meta_info"]["output_token_logprobs"])
            return output

        return await self.ask(stream())

    def drawn(self, output, version):
        """The Drawn of an output of `generate`. Raises RunError if other weights than `version` drew it."""
        meta = output["meta_info"]
        if int(meta["weight_version"]) != version:
            raise RunError(f"{self.name}: a sample of weights {meta['weight_version']}, expected {version}")
        logprobs = [x for x, _, _ in meta["output_token_logprobs"]]
        return Drawn(output["output_ids"], logprobs, [version] * len(logprobs))

    async def _watched(self, coroutines, when):
        tasks = [asyncio.ensure_future(c) for c in coroutines]
        results = asyncio.gather(*tasks)  # done when all are, or at the first error
        timeout = self.config["engine_timeout"]
        try:
            while not (await asyncio.wait([results], timeout=min(1, timeout / 4)))[0]:
                # SGLang sends a sign of life every SIGN_OF_LIFE tokens of the slowest sample
                if self.asked and time.time() - max(self.since, self.manager.last_receive_tstamp) > timeout:
                    raise RunError(f"{self.name}: silent for {timeout:g} s {when}; see {self.log}")
                self.sign.touch()
            return results.result()
        except Exception:  # the first error is the one to report (a RunError is a SystemExit and ends us as it is)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    def _call(self, request, doing):
        """The result of one of SGLang's coroutines."""
        return self.run([self.ask(request)], f"while {doing}")[0]

    # ---- weights

    def join_weight_group(self, name, host, port, rank, size, backend):
        """Enters the group in which one trainer broadcasts, as its member `rank`; returns when all are in it."""
        where = dict(master_address=host, master_port=port, rank_offset=rank, world_size=size)
        request = self.requests.InitWeightsUpdateGroupReqInput(**where, group_name=name, backend=backend)
        ok, message = self._call(self.manager.init_weights_update_group(request), "joining the weight group")
        if not ok:
            raise RunError(f"{self.name}: could not join the weight group: {message}")

    def leave_weight_group(self, name):
        """Leaves it again; returns when all have left."""
        request = self.requests.DestroyWeightsUpdateGroupReqInput(group_name=name)
        ok, message = self._call(self.manager.destroy_weights_update_group(request), "leaving the weight group")
        if not ok:
            raise RunError(f"{self.name}: could not leave the weight group: {message}")

    def flush(self):
        """Empties the prefix cache. Asks until it is done: just after its last token the scheduler is still busy."""
        end = time.monotonic() + self.config["engine_timeout"]
        while not self._call(self.manager.flush_cache(), "flushing its cache").success:
            if time.monotonic() > end:
                raise RunError(f"{self.name}: did not flush its cache; see {self.log}")
            time.sleep(0.002)

    def sleep(self):
        """If it lends: gives up the memory of weights and cache until the next weights come."""
        if self.lends:
            self.flush()  # waits until it is idle
            free, _ = torch.cuda.mem_get_info()
            request = self.requests.ReleaseMemoryOccupationReqInput(tags=LENT)
            self._call(self.manager.release_memory_occupation(request), "giving its memory back")
            self.version, self.asleep = None, True
            if torch.cuda.mem_get_info()[0] <= free:  # all else goes on as if it had
                print(f"{self.name}: SGLang lends no memory, its torch_memory_saver is not loaded; see {self.log}")
                self.lends = False

    def wake(self):
        """Takes the memory again; what was in it is lost."""
        if self.asleep:
            torch.cuda.empty_cache()  # what this rank's trainer holds and does not use now
            request = self.requests.ResumeMemoryOccupationReqInput(tags=LENT)
            self._call(self.manager.resume_memory_occupation(request), "taking its memory again")
            self.asleep = False

    def _load(self, update, request, version, last=True):
        """Has SGLang take some weights; with the last of them the engine holds `version`."""
        self.wake()
        if last:  # SGLang flushes too and asserts that it worked: old keys under new weights would spoil every sample
            self.flush()
        request.flush_cache, request.weight_version = last, str(version) if last else None
        ok, message, *_ = self._call(update(request), f"loading weights {version}")
        if not ok:
            raise RunError(f"{self.name}: did not load weights {version}: {message}")
        self.version = version if last else None

    def receive_weights(self, bucket, dtype, version, last):
        """One bucket [(name, shape)], of which each trainer broadcasts its rows (receive_rows)."""
        request = self.requests.UpdateWeightsFromDistributedReqInput(
            names=[name for name, _ in bucket], dtypes=[str(dtype).removeprefix("torch.")] * len(bucket),
            shapes=[list(shape) for _, shape in bucket],
        )  # fmt: skip
        self._load(self.manager.update_weights_from_distributed, request, version, last)

    def take_weights(self, tensors, version, last):
        """One bucket [(name, tensor)] out of this process's own memory."""
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        flat = FlattenedTensorBucket(named_tensors=tensors)
        content = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        request = self.requests.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(content)], load_format="flattened_bucket"
        )
        self._load(self.manager.update_weights_from_tensor, request, version, last)

    def check_weights(self, expected):
        """Raises RunError unless the parameters the engine computes with have these hashes, {name: hash}."""
        self.sglang.send_to_rpc.rcvtimeo = int(1000 * self.config["engine_timeout"])
        try:
            self.sglang.collective_rpc("check_weights", expected=expected)
        except Exception as e:
            raise RunError(f"{self.name}: weights {self.version} did not arrive as sent: {e or 'no answer'}")


# ------------------------------------------------------------------------------------------------------------------
# samples


SCORERS = ThreadPoolExecutor(64, "reward")  # rewards are worked out beside the engine, which does not wait for them


def sampling_seed(*key):
    """64 bits, signed, of (run seed, stream, step, prompt, sample, turn): each sample its own, whoever draws it."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little", signed=True)


class Job(NamedTuple):
    """Prompts that the engines are to sample together: a step's, or the held-out ones."""

    stream: str  # 'rl' or 'eval', and how often the watch has turned back; samples of two streams never share a seed
    step: int  # RL steps done before it
    version: int  # of the weights to sample with
    rows: dict  # {prompt's index in the step: dict(prompt text, answer text, prompt_tokens list)}
    samples: int  # G, per prompt
    temperature: float  # 0: greedy
    tokens: int = 0  # most tokens that each sample gets in this job; 0: as many as max_new_tokens leaves it
    begun: dict = {}  # {prompt's index: ((step, index) with which its group was begun, the group so far or None)}


class Sampler:
    """
    Makes samples with one of a run's `engines` engines: prompts in, group files out.

    config has the keys of train_grpo.py's block, run is the run's id; reward is load_reward's; decode(tokens) -> text;
    a sample ends with the first of the stop_tokens.
    """

    def __init__(self, engine, config, run, engines, reward, decode, stop_tokens):
        self.engine, self.config, self.run, self.engines = engine, config, run, engines
        self.reward, self.decode, self.stop_tokens = reward, decode, stop_tokens
        self.params = dict(ignore_eos=config["ignore_eos"], stop_token_ids=stop_tokens)

    def sample(self, folder, job, prompts):
        """
        Samples prompts of this job and writes their group files into `folder`, which exists. prompts: an iterator of
        their indices, which the engines share: each engine has an even share in flight, and takes the next prompt when
        one is done.
        """
        share = -(-len(job.rows) // self.engines)
        self.began = time.time(), self.engine.worked()
        try:
            self.engine.run([self._work(prompts, folder, job) for _ in range(share)], f"in step {job.step}")
        except RewardError as e:
            self.engine.fail(str(e))

    async def _work(self, prompts, folder, job):
        """Prompts one after the other, from the counter to the file."""
        for index in prompts:
            if group_path(folder, index).exists():
                continue
            row, began = job.rows[index], time.time()
            tensors, meta = await self._group(folder, index, job)
            elapsed, worked = (now - then for now, then in zip((time.time(), self.engine.worked()), self.began))
            meta |= dict(
                run=self.run, stream=job.stream, step=job.step, prompt=index, version=job.version,
                prompt_text=row["prompt"], answer=row["answer"], engine=self.engine.index,
                time=time.strftime("%Y-%m-%dT%H:%M:%S"), began=began, elapsed=elapsed, idle=elapsed - worked,
            )  # fmt: skip
            await asyncio.to_thread(write_group, folder, index, tensors, meta)  # it waits for the disk

    async def _group(self, folder, index, job):
        """A prompt's samples of one turn: (tensors, meta) of the group file."""
        row, began = job.rows[index], time.time()
        born, group = job.begun.get(index, ((job.step, index), None))
        seeds = [sampling_seed(self.config["seed"], job.stream, *born, g, 0) for g in range(job.samples)]
        samples = self._drawn(group) if group else [Drawn([], [], []) for _ in seeds]
        retractions = await self._draw(samples, row["prompt_tokens"], seeds, job)
        seconds, texts = time.time() - began, [self.decode(sample.tokens) for sample in samples]
        finished, scored = all(map(self._is_finished, samples)), [(0.0, {})] * len(samples)
        if finished:
            where = f"{job.stream} step {job.step}, prompt {index}, sample "
            calls = [(self.reward, row["prompt"], x, row["answer"], f"{where}{g}") for g, x in enumerate(texts)]
            # Those that wait for a process or an answer do so side by side; others would only wake each other.
            parts = [[call] for call in calls] if self.reward.waits else [calls]
            run = functools.partial(asyncio.get_running_loop().run_in_executor, SCORERS, score_all)
            scored = [*itertools.chain(*await asyncio.gather(*map(run, parts)))]
        rewards, noted = zip(*scored)
        meta = dict(
            born=list(born), finished=finished, responses=texts, noted=noted, seconds=seconds, retractions=retractions
        )
        return self._tensors(row, samples, seeds, rewards), meta

    def _is_finished(self, sample):
        ended = not self.config["ignore_eos"] and sample.tokens[-1] in self.stop_tokens
        return ended or len(sample.tokens) == self.config["max_new_tokens"]

    async def _draw(self, samples, prompt, seeds, job):
        """Draws the job's tokens for the unfinished samples of a prompt; returns SGLang's number of retractions."""
        left = [self.config["max_new_tokens"] - len(sample.tokens) for sample in samples]
        goes_on = [g for g, sample in enumerate(samples) if not (sample.tokens and self._is_finished(sample))]
        most = [min(n, job.tokens or n) for n in left]
        params = [
            dict(self.params, temperature=job.temperature, sampling_seed=seeds[g], max_new_tokens=most[g])
            for g in goes_on
        ]
        outputs = await self.engine.generate([prompt + samples[g].tokens for g in goes_on], params)
        for g, output in zip(goes_on, outputs):
            for mine, drawn in zip(samples[g], self.engine.drawn(output, job.version)):
                mine.extend(drawn)
        return sum(output["meta_info"]["num_retractions"] for output in outputs)

    def _drawn(self, group):
        """The samples of a group file."""
        tensors, lengths = group[0], group[0]["lengths"].tolist()
        fields = (tensors[k].split(lengths) for k in ("tokens", "logprobs", "weight_version"))
        return [Drawn(*(part.tolist() for part in sample)) for sample in zip(*fields)]

    def _tensors(self, row, samples, seeds, rewards):
        """The tensors of a group file: the samples' tokens end to end, T in all, which `lengths` cuts apart again."""
        tokens, logprobs, versions = (torch.tensor([*itertools.chain(*field)]) for field in zip(*samples))
        return dict(
            prompt_tokens=torch.tensor(row["prompt_tokens"]),
            lengths=torch.tensor([len(s.tokens) for s in samples]),  # (G,)
            tokens=tokens,  # (T,)
            logprobs=logprobs,  # (T,)
            loss_mask=torch.ones(len(tokens), dtype=torch.bool),  # one turn: every token is the model's own, EOS too
            weight_version=versions,  # (T,)
            truncated=torch.tensor([s.tokens[-1] not in self.stop_tokens for s in samples]),  # (G,)
            seeds=torch.tensor(seeds),  # (G,)
            rewards=torch.tensor(rewards, dtype=torch.float32),  # (G,)
        )


# ------------------------------------------------------------------------------------------------------------------
# what a step trains on


class Flight(NamedTuple):
    """Groups that were begun and that no step has trained on yet: all that one step's samples pass on to the next's."""

    begun: int = 0  # number of prompts begun so far, in the order of the data
    groups: tuple = ()  # (tensors, meta) each, in that order


class Batch(NamedTuple):
    groups: list  # (tensors, meta) of each of the P groups to train on
    made: list  # of all that were sampled for the step
    flight: Flight  # what is in flight after it


def sample_step(queue, step, rows, c, version, flight):
    """
    Has the engines make samples (Queue.sample, Sampler.sample, SGLang's async_generate); returns the Batch of RL step
    `step` on every rank, in the order of the prompts. With dynamic sampling (DAPO, equation 11) groups of equal rewards
    are replaced by the next round's; if groups are missing after the last round, they fill up the batch. Each round has
    its own prompts, so the number of rounds in a step changes no other step's prompts.
    """
    if c.segment_tokens:
        return sample_segments(queue, step, rows, c, version, flight)
    kept, dropped, rounds, P, stream = [], [], 1 + c.dynamic_sampling, c.prompts_per_step, f"rl{c.branch}"
    for k in range(rounds):
        chosen = rows_of_step(len(rows), P, step * rounds + k, c.seed, stream)
        # The numbers of a round's prompts go on from the round before: they are part of a sample's seed.
        prompts = {k * P + i: rows[row] for i, row in enumerate(chosen)}
        for t, meta in queue.sample(Job(stream, step, version, prompts, c.group_size, c.temperature)):
            equal = c.dynamic_sampling and (t["rewards"] == t["rewards"][0]).all()
            (dropped if equal else kept).append((t, meta))
        if len(kept) >= P:
            break
    made = kept + dropped
    return Batch(made[:P], made, flight)


def sample_segments(queue, step, rows, c, version, flight):
    """
    The same with partial rollouts (Kimi k1.5, arXiv:2501.12599, 3.2; APRIL, arXiv:2509.18521), cut by counts alone.
    Each step every unfinished sample in flight gets up to `segment_tokens` more, and goes on from its own tokens; fresh
    prompts fill the flight up. The step trains on the first P finished groups in the order in which they were begun;
    where fewer are finished, all go on under the same weights.
    """
    P, places, made, stream = c.prompts_per_step, c.groups_in_flight, [], f"rl{c.branch}"
    begun = flight.begun + places - len(flight.groups)
    born = [tuple(meta["born"]) for _, meta in flight.groups] + [divmod(n, P) for n in range(flight.begun, begun)]
    prompts = [rows[rows_of_step(len(rows), P, s, c.seed, stream)[i]] for s, i in born]
    groups = [*flight.groups, *[None] * (begun - flight.begun)]
    for first in itertools.count(0, places):  # a file's number says in which round it was made, and for which place
        todo = {first + i: i for i, group in enumerate(groups) if not (group and group[1]["finished"])}
        job = Job(
            stream, step, version, {n: prompts[i] for n, i in todo.items()}, c.group_size, c.temperature,
            c.segment_tokens, {n: (born[i], groups[i]) for n, i in todo.items()},
        )  # fmt: skip
        drawn = queue.sample(job)
        made += drawn
        for i, group in zip(todo.values(), drawn):
            groups[i] = group
        finished = [i for i, group in enumerate(groups) if group[1]["finished"]]
        if len(finished) >= P:
            break
    rest = tuple(group for i, group in enumerate(groups) if i not in finished[:P])
    return Batch([groups[i] for i in finished[:P]], made, Flight(begun, rest))
