"""
Makes one model of a base and LoRA's adapters: a folder that mode='eval', tools/serve.py or any other program takes.

    python tools/merge.py out/stage_sft/ckpt/step_000257 out/lora/ckpt/step_000100 out/merged [bfloat16]

The base is that of the run, its init_from; the adapters are a checkpoint, or any folder of PEFT's. The type is that of
the base unless it is named. A run on a GPU merges in bfloat16, one on a CPU in float32: in that type the folder has the
weights that the engine had, bit for bit.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import kernels  # noqa: E402
import sync  # noqa: E402
from configurator import require  # noqa: E402
from onecurve.models.adapters import PEFT, base_name, base_of, read_adapter_config  # noqa: E402
from onecurve.models.folders import fetch_model, load_weights, weight_files  # noqa: E402
from onecurve.run.checkpoint import write_file  # noqa: E402


def name_of(base, dtype, place):
    """The `base_name` of a model folder's weights in this dtype, such as 'bfloat16'."""
    from transformers import AutoConfig, AutoModelForCausalLM

    hf = AutoConfig.from_pretrained(base)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf)
    dtype = getattr(torch, dtype)
    hashes = {}
    for name, p in model.named_parameters():
        weight = torch.empty(p.shape, dtype=dtype, device=place)
        shard = sync.Shard(name, tuple(p.shape), 0, weight)
        load_weights([shard], base, hf.tie_word_embeddings, "base")
        hashes |= sync.tensor_hashes([weight], [shard], None)
    return base_name(dtype, hashes)


def main(base, adapters, out, dtype=""):
    base, out, place = fetch_model(base, "base"), Path(out), "cuda" if torch.cuda.is_available() else "cpu"
    require(not out.exists(), f"{out}: is there already; name another folder")
    require(dtype in ("", "bfloat16", "float32"), f"{dtype}: not a type of weights; use bfloat16 or float32")
    config, files = read_adapter_config(adapters), weight_files(adapters, "lora")
    paths, known, wanted = sorted(base.glob("*.safetensors")), weight_files(base, "base"), {}
    for name in (name for name in files if name.endswith("lora_A.weight")):
        A, B = (files[x].get_tensor(x).to(place) for x in (name, name.replace("lora_A", "lora_B")))
        weight = name.removeprefix(PEFT).replace("lora_A.", "")
        fits = weight in known and known[weight].get_slice(weight).get_shape() == [len(B), A.shape[1]]
        require(fits, f"{adapters}: {name} fits no weight of {base}; use the base of these adapters")
        wanted[weight] = A, B
    made_for = base_of(adapters)
    right = not made_for or made_for == name_of(base, made_for.split()[0], place)
    require(right, f"{base}: {adapters} was trained beside another base; use that, the run's init_from")
    out.mkdir(parents=True)
    for path in paths:
        tensors = load_file(path, place)
        for name, weight in tensors.items():
            weight = weight.to(getattr(torch, dtype)) if dtype else weight
            if name in wanted:
                weight = kernels.merge(weight, *wanted[name], config["lora_alpha"] / config["r"])
            tensors[name] = weight.cpu()
        write_file(out / path.name, tensors)
    for path in (path for path in base.iterdir() if path.is_file()):  # the index, the config, the tokenizer's
        if path.suffix != ".safetensors" and path.name != "checkpoint.json":
            shutil.copy(path, out)
    if dtype:
        hf = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps(hf | dict(dtype=dtype), indent=1))


if __name__ == "__main__":
    require(len(sys.argv) in (4, 5), "usage: merge.py BASE ADAPTERS OUT [bfloat16 | float32]")
    main(*sys.argv[1:])
