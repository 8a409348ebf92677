"""
Dense decoders (Llama, Qwen2, Qwen3) in Hugging Face's classes, for the trainer, and in SGLang's, for the engine: both
made to compute with kernels.py. And reward models of these kinds.

SGLang is imported late: that takes seconds, and most processes need none of it.
"""

import functools
import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import kernels
from configurator import MODES, require
from onecurve.cpu import host
from onecurve.keys.engine import SPARE
from onecurve.models import moe
from onecurve.models.adapters import add_adapters, read_adapter_config
from onecurve.run.checkpoint import checkpoints
from onecurve.run.machine import MOST_COPIED, least_memory, machine_memory
from onecurve.run.start import lean_imports
from sync import Shard, TreeReduceScatter, reason

MODEL_TYPES = ("qwen3", "qwen2", "llama", moe.KIND)
SCORES = "ForSequenceClassification"  # how Hugging Face calls the class of a reward model
ROW_PARALLEL = "o_proj", "down_proj"  # the layers whose sums an engine over several GPUs cuts

# ------------------------------------------------------------------------------------------------------------------
# Hugging Face's, in the trainer


def check_model(folder, config, key="init_from"):
    """
    The Hugging Face config of a language model, or with key='reward' of a reward model. With mode='rm' it is the config
    of the reward model that the language model becomes. Ends the run with one line if we cannot train and serve it.
    """
    name = f"{key}={str(folder)!r}"
    with lean_imports():  # reading a config imports half of transformers
        from transformers import AutoConfig

        try:
            hf = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except Exception as e:
            why = f"no usable config.json: {reason(e)}"
            if Path(folder, "adapter_config.json").exists():
                found = read_adapter_config(folder)
                base = found.get("base_model_name_or_path") or "BASE"
                merge = f"make one model of both (tools/merge.py {base} {folder} out/merged)"
                train = f"train on with --init_from={base} --lora_rank={found['r']} --lora={folder}"
                why = f"adapters of {base}; {merge}, or {train}"
            if sealed := checkpoints(Path(folder, "ckpt")):
                why = f"the folder of a run; use a checkpoint in it, such as {sealed[-1]}"
            require(False, f"{name}: {why}")
    require(hf.model_type in MODEL_TYPES, f"{name}: a {hf.model_type} model; known are {', '.join(MODEL_TYPES)}")
    sliding = getattr(hf, "use_sliding_window", False) or "sliding_attention" in str(getattr(hf, "layer_types", ""))
    require(not sliding, f"{name}: sliding-window attention is not supported; use a model without it")
    tokens = config["max_prompt_tokens"] + config["max_new_tokens"]
    most = hf.max_position_embeddings
    why = f"{tokens} tokens with the prompt, and {SPARE} to spare; the model has {most} positions; use less"
    require(tokens + SPARE <= most, f"max_new_tokens={config['max_new_tokens']}: {why}")
    if key == "reward":
        require(gives_scores(hf), f"{name}: a language model; a reward model is wanted, such as --mode=rm trains")
        require(hf.num_labels == 1, f"{name}: it gives {hf.num_labels} numbers; a reward model gives one")
    else:
        require(not gives_scores(hf), f"{name}: a reward model, which writes nothing; use the model that it began with")
    if hf.model_type == moe.KIND:
        moe.check_mixture(hf, name, config)
    coefficient = config["router_aux_loss_coef"]
    routed = hf.model_type == moe.KIND and config["batch_invariant"] or not coefficient
    require(routed, f"router_aux_loss_coef={coefficient}: {name} has no routers that we compute; use 0")
    heads = hf.num_attention_heads
    attended = heads * (getattr(hf, "head_dim", None) or hf.hidden_size // heads)
    for what, n, by in (
        ("attention's width", attended, "tp_split"), ("the MLP's width", hf.intermediate_size, "tp_split"),
        ("its number of heads", heads, "rollout_tp"), ("its number of key heads", hf.num_key_value_heads, "rollout_tp"),
    ):  # fmt: skip
        require(
            n % config[by] == 0, f"{by}={config[by]}: does not divide {what}, {n}, of {name}; use another power of two"
        )
    if key == "init_from" and MODES[config["mode"]].scores:
        hf.architectures = [class_name(hf.model_type) + SCORES]
        hf.num_labels = 1
        if hf.pad_token_id == hf.eos_token_id:  # Hugging Face's class would read the score before the EOS
            hf.pad_token_id = None
    return hf


def check_memory(hf, config, place, judges=()):
    """
    Ends the run with one line, before any weight is read, if the model cannot fit on cards like this rank's, or on a
    CPU in this machine's memory with all ranks. judges: the Hugging Face configs of the reward models that a rank with
    an engine has as well.
    """
    world = int(os.environ.get("WORLD_SIZE", 1))
    counts = parameter_counts(hf, config if config["lora_rank"] else None)
    scores = sum(kernels.compute_dtype(place).itemsize * parameter_counts(judge)[0] for judge in judges)
    needs = least_memory(*counts, config, world, scores, place)
    if place == "cpu":
        has, what = machine_memory(), "machine"
        needs["run"] *= int(os.environ.get("LOCAL_WORLD_SIZE", world)) / world
    else:
        has, what = torch.cuda.get_device_properties("cuda").total_memory, "card"
    cures = dict(
        train=f"lanes={config['lanes']}: use more trainers, fewer lanes, --lora_rank=32",
        sample=f"engine_memory={config['engine_memory']}: use a larger share, --rollout_tp=2",
        run=f"lanes={config['lanes']}: use fewer lanes, --lora_rank=32",
    )
    for role, needed in needs.items():
        why = f"to {role} a {what} needs {needed / 1e9:.1f} GB and more, this one has {has / 1e9:.1f}"
        if os.environ.get("RANK", "0") == "0":
            print(f"memory: {why}", flush=True)
        require(needed <= has, f"{cures[role]}, or a smaller model than init_from: {why}")


def parameter_counts(hf, lora=None):
    """(parameters of the model of a Hugging Face config, parameters that are learned: these or LoRA's)."""
    model = build_model(hf, None, "meta", batch_invariant=False, lora=lora)
    learned = model.num_parameters(only_trainable=True)
    frozen = model.num_parameters() - learned
    return frozen or learned, learned


def class_name(model_type):
    """How Hugging Face's and SGLang's classes of such a model begin."""
    return model_type.title().replace("_", "")


def gives_scores(hf):
    return SCORES in str(hf.architectures)


def rope_frequencies(hf, device):
    """
    RoPE's inverse frequencies (head dim / 2,), by transformers on the CPU: trainer and engine take these very numbers.
    Ends the run if kernels.py cannot compute a model of this Hugging Face config on this device.
    """
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    # the rope_types left out change with the length, or scale cos and sin
    rope = {"partial_rotary_factor": 1.0, **hf.rope_parameters, "hidden_act": hf.hidden_act}
    known = dict(rope_type=("default", "linear", "llama3"), partial_rotary_factor=(1.0,), hidden_act=("silu",))
    for key, values in known.items():
        why = f"{rope[key]!r} in config.json; known: {', '.join(map(str, values))}"
        require(rope[key] in values, f"init_from: {key}={why}")
    inv_freq = LlamaRotaryEmbedding(hf, device="cpu").inv_freq
    dim = 2 * len(inv_freq)
    if device == "cuda" and kernels.FLOAT32:
        require(dim >= 16 and dim.bit_count() == 1, f"init_from: head_dim={dim}; on CUDA a power of two from 16 on")
    elif device == "cuda":
        groups = hf.num_attention_heads / hf.num_key_value_heads
        require(dim in (64, 128), f"init_from: head_dim={dim}; on CUDA it must be 64 or 128")
        require(groups in range(1, 9), f"init_from: {groups:g} query heads to a key head; on CUDA 1 to 8")
    return inv_freq


def is_sharded(mesh, model, computed_in):
    """
    One trainer has nothing to gather: it goes without FSDP2, which would copy all of it twice in each leaf, unless a
    copy of all in the compute dtype would be too much.
    """
    copied = model.num_parameters() * (model.dtype != computed_in)
    return mesh is not None and (mesh.size() > 1 or copied > MOST_COPIED)


def build_model(hf, mesh, device, batch_invariant, critic=False, lora=None, tp_split=1):
    """
    The Hugging Face model, its weights still unset. `model.token_logprobs` is its forward pass for training. Where
    `is_sharded`, FSDP2 cuts it, holds it in float32 and casts it; else it is held in `kernels.compute_dtype`, and
    `FullWeights` has what is trained in float32. critic: with a value head (hidden size,). lora: the config whose
    adapters, in float32, it gets; its own weights are then frozen. mesh None: for forward passes only. tp_split: parts
    of row-parallel sums.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    with lean_imports():
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # `install_in_trainer` replaces the layers that would call it; under this name no attention mask is made
    ALL_ATTENTION_FUNCTIONS.register("batch_invariant", kernels.attention)
    kind = AutoModelForSequenceClassification if gives_scores(hf) else AutoModelForCausalLM
    computed_in = kernels.compute_dtype(device)
    held_in = torch.float32 if mesh and not lora else computed_in
    with torch.device("meta"):
        model = kind.from_config(
            hf, dtype=held_in, attn_implementation="batch_invariant" if batch_invariant else "sdpa"
        )
        if lora:
            add_adapters(model, lora)
        model.value_head = torch.nn.Parameter(torch.empty(hf.hidden_size)) if critic else None
    sharded = is_sharded(mesh, model, computed_in)
    if not sharded and not lora:
        model.to(computed_in)
    # cast_forward_inputs would round RoPE's float32 cos and sin to bfloat16, which the engine does not do
    policy = MixedPrecisionPolicy(
        param_dtype=None if lora else computed_in, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for part in (*model.model.layers, model) if sharded else ():
        fully_shard(part, mesh=mesh, mp_policy=policy)
        part.set_custom_reduce_scatter(TreeReduceScatter())
    model.to_empty(device=device)
    if not sharded:
        model.tie_weights()  # FSDP2 does
    model.model.rotary_emb = type(model.model.rotary_emb)(hf).to(device)  # its buffers are in no checkpoint
    if batch_invariant:
        install_in_trainer(model, rope_frequencies(hf, device).to(device), tp_split)
    model.token_logprobs = functools.partial(token_logprobs, model)
    if sharded:
        register_fsdp_forward_method(model, "token_logprobs")
    return model


class Output(NamedTuple):
    """The results of a forward pass over a leaf, at its M targets. A reward model gives scores and nothing else."""

    logprobs: Tensor | None = None  # (M,)
    entropy: Tensor | None = None  # (M,)
    kept: Tensor | None = None  # (2, K) what a sampling rule kept: only with a rule, and where no gradient is wanted
    values: Tensor | None = None  # (M,) the critic's
    last_values: Tensor | None = None  # (samples,) the critic's after each sample's last token
    scores: Tensor | None = None  # (samples,) a reward model's


def token_logprobs(model, leaf, sampling=kernels.Sampling()):
    """The Output of a leaf."""
    plan = leaf.plan
    ids, positions = (x[plan.first][None] for x in (leaf.ids, leaf.positions))
    output = model.model(input_ids=ids, position_ids=positions, plan=plan, use_cache=False)
    hidden = plan.spread(output.last_hidden_state.squeeze(0))
    for layer in model.model.layers if plan.row is not None else ():
        if moe.is_mixture(layer.mlp):
            layer.mlp.routed = [*map(plan.spread, layer.mlp.routed)]
    last = plan.kv_lens.cumsum(0) - 1
    if gives_scores(model.config):  # in float32: the difference of two scores counts
        return Output(scores=(hidden[last].float() @ model.score.weight.float().t())[:, 0])
    found = None if torch.is_grad_enabled() or not sampling.cuts() else []
    args = hidden[leaf.predictors], model.lm_head.weight, leaf.targets
    logprobs, entropy = kernels.token_logprobs(*args, *sampling, leaf.kept, found)
    kept = torch.cat(found, 1) if found else None
    if model.value_head is None:
        return Output(logprobs, entropy, kept)
    values = (hidden @ model.value_head[:, None].to(hidden.dtype))[:, 0].float()
    return Output(logprobs, entropy, kept, values[leaf.predictors], values[last])


def head_norms(attention):
    """The weights and eps of the norms of a layer's queries and keys; () of a model that has none."""
    if not hasattr(attention, "q_norm"):
        return ()
    return attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon


def install_in_trainer(model, inv_freq, tp_split):
    """Makes a Hugging Face model compute with kernels.py: rotary embedding, attention, norms, MLPs, cut sums."""

    def attend(self, hidden_states, position_embeddings, plan, **_):
        x = hidden_states.squeeze(0)  # the gradient of [0] would be a tensor of zeros and a copy
        q, k, v = (p(x).unflatten(1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = kernels.norm_rope(q, k, *position_embeddings, *head_norms(self))
        return self.o_proj(kernels.attention(q, k, v, plan, self.scaling).flatten(1))[None], None

    def swiglu_mlp(self, x):
        x = x.squeeze(0)
        return self.down_proj(kernels.swiglu(self.gate_proj(x), self.up_proj(x)))[None]

    model.model.rotary_emb.forward = lambda x, position_ids: kernels.rope_table(inv_freq, position_ids[0])
    for name, module in model.named_modules():
        if name.endswith(".self_attn"):
            module.forward = functools.partial(attend, module)
        elif name.endswith("norm"):
            module.forward = lambda x, m=module: kernels.rms_norm(x, m.weight, m.variance_epsilon)
        elif moe.is_mixture(module):
            module.forward = functools.partial(moe.in_trainer, module)
        elif name.endswith(".mlp"):
            module.forward = functools.partial(swiglu_mlp, module)
        elif tp_split > 1 and name.endswith(ROW_PARALLEL):
            if hasattr(module, "lora_A"):
                module.forward = functools.partial(module.forward, split=tp_split)
            else:
                module.forward = lambda x, m=module: kernels.SplitLinear.apply(x, m.weight, m.bias, tp_split)


# ------------------------------------------------------------------------------------------------------------------
# SGLang's, in the engine


def paged_attention(inv_freq):
    """The class of an attention backend, as SGLang wants one; made here, as its base is imported late."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    class PagedAttention(AttentionBackend):
        """
        The data that all layers' attention shares, in prefill and decode. Made once per forward, where SGLang captures
        it: a graph's replay makes it anew, from the runner's static buffers.
        """

        needs_cpu_seq_lens = False  # a decode step does not wait for its lengths

        def __init__(self, runner):
            super().__init__()
            self.req_to_token_pool = runner.req_to_token_pool
            self.token_to_kv_pool = runner.token_to_kv_pool
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

    return PagedAttention


def layer_on_cpu(layer, pool):
    """The `loops.layer_on_cpu` of an SGLang layer with its keys and values in this pool."""
    from onecurve.cpu import loops

    attention = layer.self_attn
    norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
    return loops.layer_on_cpu(
        (*norms, *(head_norms(attention)[:2] or (None, None))),
        (attention.qkv_proj, attention.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj),
        pool.get_kv_buffer(attention.attn.layer_id),
        layer.input_layernorm.variance_epsilon, attention.num_heads, attention.num_kv_heads, attention.head_dim,
        layer.mlp.down_proj.weight.shape[-1], attention.attn.scaling, *moe.sizes_on_cpu(layer.mlp),
    )  # fmt: skip


def add_rows(group, x):
    """Adds rows that one rank has and the others fill with zeros; as integers, since -0.0 + 0.0 loses its sign."""
    rows = group.all_gather(x[None], 0).view({2: torch.int16, 4: torch.int32}[x.itemsize])
    return rows.sum(0, dtype=rows.dtype).view(x.dtype)


def norm_in_engine(norm, x, residual=None):
    return kernels.rms_norm(x, norm.weight, norm.variance_epsilon, residual)


def head_in_engine(_, hidden, head, bias=None):
    return kernels.head_logits(hidden, head.weight)


def layer_in_engine(tp_split, in_one_call):
    """
    `forward` of SGLang's decoder layers. Its own does the same, but looks at each part for several GPUs, quantization
    and a platform. tp_split: number of parts into which sums are cut for several ranks. in_one_call: whether all
    layers' operators are, which a CPU's can be, else they are called one by one.

    log_softmax and softmax end in aten operators, which `kernels.enable_batch_invariant` replaces. Not replaced:
    VocabParallelEmbedding copies rows; the head's columns are put side by side.
    """
    from sglang.srt.distributed.parallel_state import get_tp_group
    from sglang.srt.model_executor.forward_context import get_attn_backend

    def linear(module, x):
        return kernels.linear(x, module.weight, module.bias)

    def row_parallel(module, x):
        gather = (lambda y: get_tp_group().all_gather(y[None], 0)) if module.tp_size > 1 else None
        return kernels.linear(x, module.weight, module.bias, tp_split // module.tp_size, gather)

    def attend(attention, x, batch):
        qkv = linear(attention.qkv_proj, x).view(len(x), -1, attention.head_dim)
        q, k, v = qkv.split([attention.num_heads, attention.num_kv_heads, attention.num_kv_heads], 1)
        backend = get_attn_backend()
        cache = backend.token_to_kv_pool.get_kv_buffer(attention.attn.layer_id)
        to = *backend.rope_table, *cache, batch.out_cache_loc
        q = kernels.norm_rope_to_cache(q, k, v, *to, *head_norms(attention))
        y = kernels.attention(q, *cache, backend.plan, attention.attn.scaling)
        return row_parallel(attention.o_proj, y.flatten(1))

    def layer(self, positions, x, batch, residual, **_):
        if in_one_call and host.panel_cache is not None:  # the first layer's call does the work of all
            return layers_on_cpu(x, batch) if residual is None else (x, residual)
        ln = self.input_layernorm
        x, residual = (norm_in_engine(ln, x), x) if residual is None else norm_in_engine(ln, x, residual)
        attended = attend(self.self_attn, x, batch)
        x, residual = norm_in_engine(self.post_attention_layernorm, attended, residual)
        if moe.is_mixture(self.mlp):
            return moe.in_engine(self.mlp, x, get_tp_group().all_reduce), residual
        hidden = kernels.swiglu(*linear(self.mlp.gate_up_proj, x).chunk(2, -1))
        return row_parallel(self.mlp.down_proj, hidden), residual

    def layers_on_cpu(x, batch):
        from onecurve.cpu import loops

        backend = get_attn_backend()
        if "layers" not in host.panel_cache:
            host.panel_cache["layers"] = [layer_on_cpu(m, backend.token_to_kv_pool) for m in backend.layers]
        plan = backend.rope_table, batch.out_cache_loc, backend.plan
        return loops.layers_on_cpu(x, *plan, host.panel_cache["layers"])

    return layer


def hugging_face_parameters(model):
    """
    Yields (Shard under Hugging Face's name, whether other ranks have the rest of it) of an SGLang model: views, nothing
    is copied. SGLang has q, k and v, and gate and up, as the rows of one parameter, and fills an embedding up to a
    multiple of 64 rows. Ranks have the columns of a row-parallel layer's weight, and all of its bias.
    """
    fused = {"qkv_proj": "q_proj k_proj v_proj", "gate_up_proj": "gate_proj up_proj"}
    for module_name, module in model.named_modules():
        path, _, last = module_name.rpartition(".")
        rank = getattr(module, "moe_ep_rank", getattr(module, "tp_rank", 0))
        ranks = getattr(module, "moe_ep_size", getattr(module, "tp_size", 1))
        for kind, p in module.named_parameters(recurse=False):
            columns = p.shape[1:]
            column = 0
            if last in ROW_PARALLEL:
                rows = [(p.data, len(p), 0)]  # of each part (what is here, rows of the whole, first one here)
                column = rank * sum(columns)
                columns = [n * ranks for n in columns]
            elif hasattr(module, "shard_indices"):
                has = module.shard_indices
                rows = [(p.data[: has.num_org_elements], module.org_vocab_size, has.org_vocab_start_index)]
            else:
                sizes = getattr(module, "output_sizes", None) or [len(p) * ranks]
                here = p.data.split([size // ranks for size in sizes])
                rows = [(x, size, rank * len(x)) for x, size in zip(here, sizes)]
            for part, (x, size, first) in zip(fused.get(last, last).split(), rows):
                shape = (size, *columns)
                name = f"{path}.{part}.{moe.OF_SGLANG.get(kind, kind)}".lstrip(".")
                yield Shard(name, shape, first, x, column), x.shape != shape
