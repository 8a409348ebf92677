"""
LoRA: matrices A (rank, in) and B (out, rank) beside a linear layer's weight, of which an engine gets the sum. Names,
files and meanings are PEFT's (github.com/huggingface/peft).
"""

import functools
import json
import math
import sys
from pathlib import Path

import torch
from safetensors import safe_open

import kernels
from configurator import MODES, require
from onecurve.keys.seeds import seed_of
from onecurve.models.folders import FullWeights, load_weights
from onecurve.run.checkpoint import write_file
from sync import Shard, content_hash, reason, tensor_hashes, whole

LINEAR = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()  # a layer's, of attention and MLP
PEFT = "base_model.model."  # before every name in its files
OTHER_KINDS = "use_dora use_rslora modules_to_save rank_pattern alpha_pattern layers_to_transform fan_in_fan_out"


def add_adapters(model, config):
    """
    Freezes the model and puts LoRA's A (rank, in) and B (out, rank) beside the weights of the linear layers that the
    config names, all of attention and MLP if it names none. The names are PEFT's, and so are the meanings.
    """
    rank = config["lora_rank"]
    here = {path.rpartition(".")[2] for path, _ in model.named_modules()}
    linear = [name for name in LINEAR if name in here]  # a mixture's experts are none
    names = config["lora_targets"].replace(",", " ").split() or linear
    known = f"the linear layers of attention and MLP are {', '.join(linear)}"
    for name in names:
        require(name in linear, f"lora_targets: no layer has {name!r} to adapt; {known}")
    model.requires_grad_(False)
    for path, m in model.named_modules():
        name = path.rpartition(".")[2]
        if name in names:
            most = min(m.weight.shape)
            require(rank <= most, f"lora_rank={rank}: {name} has rank {most} itself; use less, or train it in full")
            m.lora_A = torch.nn.Linear(m.in_features, rank, bias=False)
            m.lora_B = torch.nn.Linear(rank, m.out_features, bias=False)
            m.forward = functools.partial(adapted, m, config["lora_alpha"] / rank)


def adapted(m, scale, x, split=1):
    """A linear layer with LoRA's matrices: x (.., in) -> (.., out)."""
    y = kernels.LoRALinear.apply(x.flatten(0, -2), m.weight, m.bias, m.lora_A.weight, m.lora_B.weight, scale, split)
    return y.unflatten(0, x.shape[:-1])


class Merged(Shard):
    """
    A Shard made with (W's rows here, A, B's rows here, scale) in place of its rows. They are W + scale B A, computed
    at each access: so no more of them exist than are in use.
    """

    @property
    def data(self):
        return kernels.merge(*self[3])


def adapter_config(c, adapters):
    """adapter_config.json of these shards."""
    return dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(Path(c.out_dir, "model").resolve()) if c.init_from == "scratch" else c.init_from,
        inference_mode=True,
        r=c.lora_rank,
        lora_alpha=c.lora_alpha,
        target_modules=sorted({s.name.split(".")[-3] for s in adapters}),
        lora_dropout=0.0,
        bias="none",
    )


def read_adapter_config(folder):
    """The adapter_config.json of PEFT's folder, as a dict. Ends the run with one line if it is not plain LoRA."""
    name = f"lora={str(folder)!r}"
    try:
        found = json.loads(Path(folder, "adapter_config.json").read_text())
        found["target_modules"] = sorted(found["target_modules"])
        other = [f"{key}={found[key]!r}" for key in OTHER_KINDS.split() if found.get(key)]
        require(found["r"] > 0 < found["lora_alpha"] and not other, f"{name}: {', '.join(other)}; use plain LoRA")
        return found
    except (OSError, ValueError, KeyError, TypeError) as e:
        require(False, f"{name}: no usable adapter_config.json: {reason(e)}")


def base_name(dtype, hashes):
    """'dtype hash' of a base's weights in this dtype, from their hashes: the adapters that are for it carry it."""
    return f"{str(dtype)[6:]} {content_hash(hashes)}"


def base_of(folder):
    """The `base_name` that a folder's adapters carry; None: they carry none."""
    return (safe_open(Path(folder, "adapter_model.safetensors"), "pt").metadata() or {}).get("base")


def load_adapters(adapters, folder, c, base):
    """
    Fills the shards from PEFT's folder, or without one with new adapters: B is 0, so that the first step is the base's,
    and A even within +-1 / sqrt(in). base: the `base_name` of the weights that they are for. Ends the run with one line
    if the folder's are of another kind.
    """
    if folder:
        name = f"lora={str(folder)!r}"
        theirs = read_adapter_config(folder)
        ours = adapter_config(c, adapters)
        for flag, key in dict(lora_rank="r", lora_alpha="lora_alpha", lora_targets="target_modules").items():
            use = str(theirs[key]).translate(dict.fromkeys(b"[' ]"))
            why = f"the adapters of {folder} have others; use {use}"
            require(theirs[key] == ours[key], f"{flag}={getattr(c, flag)!r}: {why}")
        load_weights([s._replace(name=PEFT + s.name) for s in adapters], folder, False, "lora")
        known = base_of(folder) or base
        comparable = known.split()[0] == base.split()[0]
        require(known == base or not comparable, f"{name}: made for another base than init_from={c.init_from!r}")
        return
    generator = torch.Generator().manual_seed(seed_of(vars(c), "init"))
    for s in adapters:
        s.data.zero_()
        if s.name.endswith("lora_A.weight"):  # of whole numbers, as a scratch model's: the same on every CPU
            whole_numbers = torch.randint(-(2**24), 2**24, s.shape, generator=generator)
            s.data.copy_(whole_numbers[s.first : s.first + len(s.data)] * (2**-24 / math.sqrt(s.shape[1])))


class Adapters(FullWeights):
    """The parameters that a Trainer trains with LoRA. base: the `base_name` of the frozen weights."""

    def load(self, folder, checkpoint=None):
        super().load(folder)
        if self.c.init_from == "scratch" and self.mesh.get_local_rank() == 0:
            why = "adapters beside a frozen model of random weights learn little; --init_from=a trained model"
            print(f"warning: lora_rank={self.c.lora_rank}: {why}", file=sys.stderr)
        hashes = tensor_hashes([s.data for s in self.frozen], self.frozen, self.mesh.get_group())
        self.base = base_name(self.frozen[0].data.dtype, hashes)
        load_adapters(self.policy, checkpoint or self.c.lora, self.c, self.base)

    def anchor(self):
        """The adapters in the config's `reference`, or zeros; None if it names a whole model."""
        anchor = [s._replace(data=torch.zeros_like(s.data)) for s in self.policy]
        if folder := self.c.reference or MODES[self.c.mode].pairs and self.c.lora:  # DPO's is where the run began
            if not Path(folder, "adapter_config.json").exists():
                return None
            load_adapters(anchor, folder, self.c, self.base)
        return anchor

    def published(self, policy):
        adapters = {s.name: s for s in policy}
        scale = self.c.lora_alpha / self.c.lora_rank
        merged = []
        for s in self.frozen:
            stem = s.name.removesuffix("weight")
            if A := adapters.get(f"{stem}lora_A.weight"):
                B = adapters[f"{stem}lora_B.weight"].data  # its rows are where W's are
                s = Merged(s.name, s.shape, s.first, (s.data, whole(A, self.mesh), B, scale))
            merged.append(s)
        return merged

    def save(self, folder):
        """Writes PEFT's folder."""
        tensors = {PEFT + s.name: whole(s, self.mesh).cpu() for s in self.policy}
        if self.mesh.get_local_rank() == 0:
            write_file(folder / "adapter_model.safetensors", tensors, base=self.base)
            (folder / "adapter_config.json").write_text(json.dumps(adapter_config(self.c, self.policy), indent=1))
