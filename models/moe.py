"""
Mixtures of experts (Qwen3-MoE): what a decoder with experts in place of its MLPs needs beside models/dense.py.

Hugging Face's class and SGLang's both hold a layer's experts as two parameters, gate_up_proj (E, 2 F, C) and down_proj
(E, C, F). As such they are cut by FSDP2, trained, hashed and sent; the files of a model have a name for each expert's
matrices.
"""

import types

import kernels
from configurator import require

KIND = "qwen3_moe"
OF_SGLANG = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}


def check_mixture(hf, name, config):
    """Ends the run with one line if a mixture's Hugging Face config says what we do not compute. name: of its key."""
    E = hf.num_experts
    k = hf.num_experts_per_tok
    for key, known in dict(
        mlp_only_layers=[], decoder_sparse_step=1, norm_topk_prob=True, tie_word_embeddings=False
    ).items():
        found = getattr(hf, key)
        require(found == known, f"{name}: {key}={found} in config.json; of mixtures only {known} is supported")
    require(0 < k <= E, f"{name}: {k} experts per token of {E} in config.json; 1 to all of them are needed")
    for key in ("tp_split", "rollout_tp"):
        require(config[key] == 1, f"{key}={config[key]}: the sums of a mixture's experts are not cut; use 1")


def per_expert(shard):
    """Yields a parameter's shards under a model folder's names: of a mixture's each expert's matrices, else itself."""
    layer, _, last = shard.name.rpartition(".experts.")
    names = dict(gate_up_proj=("gate_proj", "up_proj"), down_proj=("down_proj",)).get(layer and last)
    if not names:
        yield shard
        return
    for e, expert in enumerate(shard.data, shard.first):
        for name, data in zip(names, expert.chunk(len(names))):
            name = f"{layer}.experts.{e}.{name}.weight"
            yield shard._replace(name=name, shape=tuple(data.shape), first=0, data=data)


def is_mixture(mlp):
    return hasattr(mlp, "experts")


def in_trainer(mlp, x):
    """Hugging Face's block of x (1, N, C)."""
    experts = mlp.experts
    return kernels.moe(x[0], mlp.gate.weight, experts.gate_up_proj, experts.down_proj, mlp.gate.top_k)[None]


def in_engine(mlp, x):
    """SGLang's block of x (N, C)."""
    experts = mlp.experts
    return kernels.moe(x, mlp.gate.weight, experts.w13_weight, experts.w2_weight, mlp.topk.topk_config.top_k)


def sizes_on_cpu(mlp):
    """What `kernels.layer_on_cpu` wants to know of a mixture; () of a dense MLP."""
    if not is_mixture(mlp):
        return ()
    router = mlp.gate.weight
    return ((kernels.panels_of(router.t()), len(router), mlp.topk.topk_config.top_k),)


def install_in_engine():
    """Has SGLang's model take parameters (E, .., ..) as they are sent, and its blocks show them as a dense MLP does."""
    from sglang.srt.models import qwen3_moe

    def load_weights(self, weights, own=qwen3_moe.Qwen3MoeForCausalLM.load_weights):
        parameters = dict(self.named_parameters())

        def others():
            for name, tensor in weights:
                layer, _, last = name.rpartition(".experts.")
                if layer and last in of_ours:
                    parameters[f"{layer}.experts.{of_ours[last]}"].data.copy_(tensor)
                else:
                    yield name, tensor

        own(self, others())

    of_ours = {ours: theirs for theirs, ours in OF_SGLANG.items()}

    def shown_as(name):
        return property(lambda self: types.SimpleNamespace(weight=getattr(self.experts, name), bias=None))

    qwen3_moe.Qwen3MoeForCausalLM.load_weights = load_weights
    for theirs, ours in OF_SGLANG.items():
        setattr(qwen3_moe.Qwen3MoeSparseMoeBlock, ours, shown_as(theirs))
