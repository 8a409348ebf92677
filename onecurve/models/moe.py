"""
Mixtures of experts (Qwen3-MoE): what a decoder with experts in place of its MLPs needs beside onecurve/models/dense.py.

Hugging Face's class and SGLang's both hold a layer's experts as two parameters, gate_up_proj (E, 2 F, C) and down_proj
(E, C, F). As such they are cut by FSDP2, trained, hashed and sent; the files of a model have a name for each expert's
matrices.
"""

import types

import torch
import torch.distributed as dist

import kernels
from configurator import MODES, require
from onecurve.run.observers import Observer
from sync import rounded_to

KIND = "qwen3_moe"
OF_SGLANG = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}


def check_mixture(hf, name, config):
    """Ends the run with one line if we do not compute a mixture of this Hugging Face config. name: of its key."""
    E = hf.num_experts
    k = hf.num_experts_per_tok
    for key, known in dict(
        mlp_only_layers=[], decoder_sparse_step=1, norm_topk_prob=True, tie_word_embeddings=False
    ).items():
        found = getattr(hf, key)
        require(found == known, f"{name}: {key}={found} in config.json; of mixtures only {known} is supported")
    require(0 < k <= E, f"{name}: {k} experts per token of {E} in config.json; 1 to all of them are needed")
    tp = config["rollout_tp"]
    require(E % tp == 0, f"rollout_tp={tp}: does not divide the {E} experts of {name}; use a number that does")


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
    """Hugging Face's block of x (1, N, C). `Routers` reads in mlp.routed what the router gave."""
    experts = mlp.experts
    mlp.routed = []
    weights = mlp.gate.weight, experts.gate_up_proj, experts.down_proj
    return kernels.moe(x.squeeze(0), *weights, mlp.gate.top_k, mlp.routed)[None]


def in_engine(mlp, x, add):
    """SGLang's block of x (N, C). add: adds up the rows of the engine's ranks, of which all but one's are zeros."""
    experts = mlp.experts
    own = dict(first=first_expert(experts), add=add) if experts.moe_ep_size > 1 else {}
    weights = mlp.gate.weight, experts.w13_weight, experts.w2_weight
    return kernels.moe(x, *weights, mlp.topk.topk_config.top_k, **own)


def first_expert(experts):
    """The number of the first of the experts that this rank of an engine has."""
    return experts.moe_ep_rank * experts.num_local_experts


def balance_loss(p, counts):
    """
    E sum_e f_e p_e, of probabilities p (layers, N, E) and how many tokens each expert got, counts (layers, E): f_e is
    the tokens of expert e over all, p_e its mean probability, of all layers together, as in transformers. Where all
    experts get the same it is the number of experts per token. Fedus et al. 2021 (arXiv:2101.03961), equations 4 to 6.
    """
    layers, N, E = p.shape
    return E * (counts.sum(0) / (layers * N) * p.mean((0, 1))).sum()


class Routers(Observer):
    """The routers of a mixture's blocks in a trainer, and a record of their choices in a step."""

    def __init__(self, trainer, blocks):
        self.trainer = trainer
        self.blocks = blocks
        self.coefficient = trainer.c.router_aux_loss_coef
        self.counts = 0  # (layers, E) tokens of each expert in this rank's leaves
        self.dialled = []  # of leaves still to come, what `choices` would be under a dialled engine's weights

    def before(self, samples, phase, check):
        self.tokens = sum(len(s.tokens) for s in samples)
        self.dialled = self.dialled_choices(samples) if check else []

    @torch.no_grad()
    def dialled_choices(self, samples):
        """The choices in each leaf with weights rounded like the engine's; [] without a dial."""
        trainer = self.trainer
        if trainer.c.engine_bits == "fp32" or trainer.c.lora_rank:
            return []
        rounded = [s._replace(data=rounded_to(s.data, trainer.c.engine_bits)) for s in trainer.policy]
        return [self.choices() for _ in trainer.passes(samples, trainer.model, weights=rounded)]

    def choices(self):
        """The experts (layers, N, k) of the last forward pass, ascending."""
        return torch.stack([block.routed[1] for block in self.blocks]).sort().values

    def note(self, loss, chosen, leaf, output, figures):
        """As an Observer's; with router_aux_loss_coef the loss gains `balance_loss`."""
        share = len(leaf.ids) / self.tokens if chosen else 0  # of the step's tokens
        z = torch.stack([block.routed[0] for block in self.blocks])
        choices = self.choices()
        p = torch.exp(z - z.detach().amax(-1, keepdim=True))
        p = p / p.sum(-1, keepdim=True)
        entropy = -(p * p.clamp(min=1e-30).log()).sum(-1).mean(0)
        figures["router_entropy"] = entropy[leaf.predictors]
        if self.dialled:
            changed = (choices != self.dialled.pop(0)).any(2).any(0)
            figures["choice_changed"] = changed[leaf.predictors]
        counts = torch.stack([torch.bincount(x.flatten(), minlength=z.shape[2]) for x in choices])
        self.counts = self.counts + counts * (share > 0)
        return loss + (self.coefficient * share * balance_loss(p, counts) if self.coefficient else 0.0)

    def metrics(self, metrics):
        """Of the step: the load of the busiest expert of any layer, over the mean."""
        total = self.counts
        self.counts = 0
        dist.all_reduce(total, group=self.trainer.process_group)
        return dict(expert_load_max=float((total.amax(1) / total.double().mean(1)).max()))


def routers_of(trainer):
    """[the Routers of a trainer's model]; [] of a dense one, without our operators, and where pairs are trained on."""
    c = trainer.c
    blocks = [m for m in trainer.model.modules() if is_mixture(m)]
    noted = blocks and c.batch_invariant and not MODES[c.mode].pairs
    return [Routers(trainer, blocks)] if noted else []


def sizes_on_cpu(mlp):
    """The argument of `loops.layer_on_cpu` about a mixture; () for a dense MLP."""
    if not is_mixture(mlp):
        return ()
    from onecurve.cpu import loops

    router = mlp.gate.weight
    return ((loops.panels_of(router.t()), len(router), mlp.topk.topk_config.top_k),)


def load_weights(own, self, weights):
    """SGLang's, `own`, of a model that takes parameters (E, .., ..) as they are sent."""
    modules = dict(self.named_modules())
    of_ours = {ours: theirs for theirs, ours in OF_SGLANG.items()}

    def others():
        for name, tensor in weights:
            layer, _, last = name.rpartition(".")
            if layer.endswith(".experts") and last in of_ours:
                experts = modules[layer]
                here = getattr(experts, of_ours[last]).data
                here.copy_(tensor[first_expert(experts) :][: len(here)])
            else:
                yield name, tensor

    own(self, others())


def shown_as(name):
    """A property of SGLang's block that shows its experts' parameter of this name as a dense MLP's layer."""
    return property(lambda self: types.SimpleNamespace(weight=getattr(self.experts, name), bias=None))
