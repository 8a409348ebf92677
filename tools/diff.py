"""
Where two runs part: the first step, stage and item that differ.

    python tools/diff.py out/a out/b

Reads the ledgers. If both runs keep the rollout files, it names prompt, sample and token; if both have a checkpoint of
that step, the element of the parameter; with both values in decimal and hex. Exit status 0: identical, 1: different, 2:
not two runs.
"""

import itertools
import json
import sys
from functools import partial
from pathlib import Path

import torch
from runs import lines, saved_config
from safetensors import safe_open
from safetensors.torch import load_file

STAGES = (
    "prompts",
    "weight_version",
    "tokens",
    "loss_mask",
    "journal",
    "logprobs",
    "rewards",
    "turn_rewards",
    "advantages",
    "gradients",
    "weights",
    "optimizer",
)


def first_difference(a, b):
    """(line number, stage, item or '') of the first difference; None if one ledger is the start of the other."""
    for i, (x, y) in enumerate(zip(a, b)):
        for stage in STAGES:
            if x.get(stage) != y.get(stage):
                if isinstance(x.get(stage), dict) and isinstance(y.get(stage), dict):
                    return i, stage, next((n for n in x[stage] if x[stage][n] != y[stage].get(n)), "")
                return i, stage, ""
        if x["chain"] != y["chain"]:
            return i, "chain", ""


def hexadecimal(x):
    return f"0x{x.numpy().tobytes()[::-1].hex()}"


def describe_rollouts(folder_a, folder_b, stage):
    """Lines about the first sample whose `stage` differs between two folders of group files."""
    names = sorted({p.name for f in (folder_a, folder_b) for p in f.glob("group_*.safetensors")})
    for name in names:
        if not (folder_a / name).exists() or not (folder_b / name).exists():
            yield f"  {name}: kept in one run only"
            continue
        a, b = load_file(folder_a / name), load_file(folder_b / name)
        sizes_a, sizes_b = a["lengths"].tolist(), b["lengths"].tolist()
        per_token = stage in ("weight_version", "tokens", "logprobs")
        x = a[stage].split(sizes_a) if per_token else a[stage].split(1)
        y = b[stage].split(sizes_b) if per_token else b[stage].split(1)
        for g, (u, v) in enumerate(zip(x, y)):
            for t, (p, q) in enumerate(zip(u, v)):
                if hexadecimal(p) != hexadecimal(q):
                    token = f", token {t}" if per_token else ""
                    of = f"{int(a['sample'][g])}, row {g}" if len(a["sample"]) > len(a["rewards"]) and per_token else g
                    yield f"  prompt {int(name[6:10])}, sample {of}{token}:"
                    yield f"    {p.item():.9g}  {hexadecimal(p)}"
                    yield f"    {q.item():.9g}  {hexadecimal(q)}"
                    return
            if len(u) != len(v):
                yield f"  prompt {int(name[6:10])}, sample {g}: {len(u)} and {len(v)} tokens, equal as far as they go"
                return


def describe_journals(folder_a, folder_b):
    """Lines about the first entry in which the journals of two folders of group files differ."""
    for path in sorted(folder_a.glob("group_*.safetensors")):
        if (folder_b / path.name).exists():
            files = (safe_open(folder / path.name, "pt").metadata()["meta"] for folder in (folder_a, folder_b))
            entries = (itertools.chain(*json.loads(meta)["journal"]) for meta in files)
            for x, y in itertools.zip_longest(*entries):
                if x != y:
                    yield f"  prompt {int(path.stem[6:])}, sample {(x or y)['sample']}, {(x or y)['at']}:"
                    yield from (f"    {e and (e['name'], e['arguments'], e['result'])}" for e in (x, y))
                    return


def describe_parameter(folder_a, folder_b, stage, name):
    """Lines about the first element that differs between two checkpoints, of a weight or of AdamW's moments of it."""
    files = "model-*" if stage == "weights" else "optimizer/*"
    names = [name] if stage == "weights" else [f"exp_avg.{name}", f"exp_avg_sq.{name}"]
    a, b = (
        {k: v for file in folder.glob(f"{files}.safetensors") for k, v in load_file(file).items()}
        for folder in (folder_a, folder_b)
    )
    for key in (n for n in names if n in a and n in b):
        differs = (a[key].view(torch.int32) != b[key].view(torch.int32)).nonzero()
        if len(differs):
            index = tuple(differs[0].tolist())
            yield f"  {key}{list(index)}, the first of {len(differs)} elements that differ:"
            for value in (a[key][index], b[key][index]):
                yield f"    {value.item():.9g}  {hexadecimal(value)}"
            return


def main(folder_a, folder_b):
    """Prints where the runs part; the exit status."""
    a, b = (lines(folder, "ledger.jsonl") for folder in (folder_a, folder_b))
    difference = first_difference(a, b)
    if difference is None and len(a) == len(b):
        print(f"identical: {sum(x['phase'] == 'rl' for x in a)} steps, digest {a[-1]['chain'] if a else 'none'}")
        return 0
    if difference is None:
        print(f"identical as far as they go: {len(a)} and {len(b)} lines of ledger")
    else:
        i, stage, item = difference
        print(f"first difference: {a[i]['phase']} step {a[i]['step']}, {stage}{f' of {item}' if item else ''}")
        if item:
            print(f"    {a[i][stage][item]}\n    {b[i][stage].get(item)}")
            kept = (Path(f) / "ckpt" / f"step_{a[i]['step'] + 1:06d}" for f in (folder_a, folder_b))
            if a[i]["phase"] == "rl" and stage in ("weights", "optimizer"):
                print(*describe_parameter(*kept, stage, item), sep="\n")
        elif stage in ("weight_version", "tokens", "logprobs", "rewards", "journal") and a[i]["phase"] == "rl":
            # With segments, a group may have been drawn in earlier steps than the one that trains on it.
            for step in range(a[i]["step"] + 1) if "weight_version" in a[i] else [a[i]["step"]]:
                queues = (Path(f) / "queue" / f"rl_{step:06d}" for f in (folder_a, folder_b))
                describe = describe_journals if stage == "journal" else partial(describe_rollouts, stage=stage)
                if found := list(describe(*queues)):
                    print(f"  drawn in step {step}:", *found, sep="\n")
                    break
            else:
                print("  (the rollout files are not kept)")
    x, y = (saved_config(folder) for folder in (folder_a, folder_b))
    for key in sorted(k for k in x.keys() | y.keys() if x.get(k) != y.get(k)):
        print(f"  config: {key} = {x.get(key)!r} | {y.get(key)!r}")
    return 1


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print(__doc__.strip().splitlines()[2].strip(), file=sys.stderr)
        sys.exit(2)
    sys.exit(main(*sys.argv[1:]))
