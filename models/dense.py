"""
Dense decoders (Llama, Qwen2, Qwen3) in Hugging Face's classes, for the trainer, and in SGLang's, for the engine: both
made to compute with kernels.py. And reward models of these kinds.

SGLang is imported late: that takes seconds, and most processes need none of it.
"""

import functools
import os
import types

import torch

import kernels
from configurator import MODES, lean_imports, require
from models.adapters import add_adapters, lora_settings
from sync import Shard, TreeReduceScatter, least_memory

MODEL_TYPES = ("qwen3", "qwen2", "llama")
SCORES = "ForSequenceClassification"  # how Hugging Face calls the class of a reward model
ROW_PARALLEL = "o_proj", "down_proj"  # the layers whose sums an engine over several GPUs cuts

# ------------------------------------------------------------------------------------------------------------------
# Hugging Face's, in the trainer


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
    tokens = config["max_prompt_tokens"] + config["max_new_tokens"]
    most = hf.max_position_embeddings
    fits = f"max_new_tokens={config['max_new_tokens']}: {tokens} tokens with the prompt, and 8 to spare"
    require(tokens + 8 <= most, f"{fits}; the model has {most} positions; use less")
    if key == "reward":
        require(gives_scores(hf), f"{name}: a language model; a reward model is wanted, such as --mode=rm trains")
        require(hf.num_labels == 1, f"{name}: it gives {hf.num_labels} numbers; a reward model gives one")
    else:
        require(not gives_scores(hf), f"{name}: a reward model, which writes nothing; use the model that it began with")
    heads = hf.num_attention_heads
    key_heads = hf.num_key_value_heads
    width = hf.intermediate_size
    attended = heads * (getattr(hf, "head_dim", None) or hf.hidden_size // heads)
    for what, n, by in (
        (f"attention's width, {attended},", attended, "tp_split"), (f"the MLP's width, {width},", width, "tp_split"),
        (f"its {heads} heads", heads, "rollout_tp"), (f"its {key_heads} key heads", key_heads, "rollout_tp"),
    ):  # fmt: skip
        require(n % config[by] == 0, f"{by}={config[by]}: does not divide {what} of {name}; use another power of two")
    if key == "init_from" and MODES[config["mode"]].scores:
        hf.architectures = [hf.model_type.capitalize() + SCORES]
        hf.num_labels = 1
        if hf.pad_token_id == hf.eos_token_id:  # Hugging Face's class would read the score before the EOS
            hf.pad_token_id = None
    return hf


def check_card(hf, config, judges=()):
    """
    Ends the run with one line, before any weight is read, if the model cannot fit on cards like this rank's. judges:
    the Hugging Face configs of the reward models that a rank with an engine has as well.
    """
    if config["device"] == "cpu" or not torch.cuda.is_available():
        return
    parameters, learned = parameter_counts(hf, lora_settings(types.SimpleNamespace(**config)))
    scores = sum(2 * parameter_counts(judge)[0] for judge in judges)
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


def in_parts(m, x, split):
    """A linear layer as a sum of `split` products: x (.., in) -> (.., out)."""
    return kernels.SplitLinear.apply(x.flatten(0, -2), m.weight, m.bias, split).view(*x.shape[:-1], -1)


def token_logprobs(model, leaf, sampling=kernels.Sampling()):
    """
    At the leaf's targets (log-probs (M,), entropies (M,), what a sampling rule kept (2, K), the critic's values (M,),
    its values after each sample's last token (samples,)). What was kept is None without a rule and where gradients are
    wanted; the values are None without a critic. Of a reward model (None, None, None, None, scores (samples,)).
    """
    plan = kernels.packed_plan(leaf.lengths)
    ids = leaf.ids[None]
    positions = leaf.positions[None]
    hidden = model.model(input_ids=ids, position_ids=positions, use_cache=False, plan=plan).last_hidden_state[0]
    last = leaf.lengths.cumsum(0) - 1
    if gives_scores(model.config):  # in float32: the difference of two scores counts
        return None, None, None, None, (hidden[last].float() @ model.score.weight.float().t())[:, 0]
    found = None if torch.is_grad_enabled() or not sampling.cuts() else []
    args = hidden[leaf.predictors], model.lm_head.weight, leaf.targets
    logprobs, entropy = kernels.token_logprobs(*args, *sampling, leaf.kept, found)
    kept = torch.cat(found, 1) if found else None
    if model.value_head is None:
        return logprobs, entropy, kept, None, None
    values = (hidden @ model.value_head[:, None].to(hidden.dtype))[:, 0].float()
    return logprobs, entropy, kept, values[leaf.predictors], values[last]


def head_norms(attention):
    """The weights and eps of the norms of a layer's queries and keys; () of a model that has none."""
    if not hasattr(attention, "q_norm"):
        return ()
    return attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon


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


# ------------------------------------------------------------------------------------------------------------------
# SGLang's, in the engine


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

        def attend(self, q, k, v, layer, batch):
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc), k, v)
            keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
            return kernels.attention(q, keys, values, self.plan, layer.scaling)

    return PagedAttention


def install_operators(backend, inv_freq, tp_split):
    """
    Makes SGLang's models in this process compute with kernels.py. The hooks replace `forward` of its classes, above the
    choice of a platform's kernel. backend: the name under which our attention is registered; by it SGLang decides how
    the cache is laid out. tp_split: number of parts into which sums are cut for several ranks.

    log_softmax and softmax end in aten operators, which `kernels.enable_batch_invariant` replaces. Without a hook:
    VocabParallelEmbedding and set_kv_buffer copy rows; the head's columns are put side by side.
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
        if residual is None:
            residual = x
            x = norm(self.input_layernorm, x)
        else:
            x, residual = norm(self.input_layernorm, x, residual)
        x, residual = norm(self.post_attention_layernorm, attend(self.self_attn, x, batch), residual)
        hidden = kernels.swiglu(*linear(self.mlp.gate_up_proj, x).chunk(2, -1))
        return row_parallel(self.mlp.down_proj, hidden), residual

    def norm(self, x, residual=None, more=None):
        assert more is None
        return kernels.rms_norm(x, self.weight, self.variance_epsilon, residual)

    RMSNorm.forward = norm
    GroupCoordinator.all_reduce = add_rows
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
        rank = getattr(module, "tp_rank", 0)
        ranks = getattr(module, "tp_size", 1)
        for kind, p in module.named_parameters(recurse=False):
            data = p.data
            by_columns = last in ROW_PARALLEL
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
