"""
Where two runs part: the first step, stage and item that differ.

    python tools/diff.py out/a out/b

Reads the ledgers, of steps and of evaluations; what one run alone has, such as evaluations that a replay lacks, is not
compared. If both runs keep the rollout files, it names prompt, sample and token; if both have a checkpoint of
that step, the element of the parameter; with both values in decimal and hex. Exit status 0: identical, 1: different, 2:
not two runs, or nothing to compare.
"""

import itertools
import json
import sys
from functools import partial
from pathlib import Path

import torch
from runs import evaluations, lines, saved_config
from safetensors import safe_open
from safetensors.torch import load_file

from configurator import require

STAGES = (
    "device",
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
    "scores",
)


def first_difference(a, b):
    """
    (line of a, line of b, stage, item or '') of the first difference of the lines that both ledgers have; None without
    one.
    """
    theirs = {(y["phase"], y["step"]): y for y in b}
    alike = True  # the ledgers so far, line by line: only then are the chains
    for i, x in enumerate(a):
        y = theirs.get((x["phase"], x["step"]))
        alike &= b[i : i + 1] == [y]
        for stage in STAGES if y else ():
            if x.get(stage) != y.get(stage):
                if isinstance(x.get(stage), dict) and isinstance(y.get(stage), dict):
                    return x, y, stage, next((n for n in x[stage] if x[stage][n] != y[stage].get(n)), "")
                return x, y, stage, ""
        if alike and x.get("chain") != y.get("chain"):
            return x, y, "chain", ""


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
    """Lines about the first element that differs between two checkpoints, of a weight or of its optimizer state."""
    files = "model-*" if stage == "weights" else "optimizer/*"
    a, b = (
        {k: v for file in folder.glob(f"{files}.safetensors") for k, v in load_file(file).items()}
        for folder in (folder_a, folder_b)
    )
    for key in (k for k in a if k in b and name in (k, k.partition(".")[2])):
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
    held_out = [evaluations(folder) for folder in (folder_a, folder_b)]
    what = "steps"
    if not (a or b):
        what = "evaluations"
        a, b = held_out
    require(a or b, f"{folder_a}, {folder_b}: neither has a step or an evaluation, and so nothing to compare")
    difference = first_difference(a, b) or first_difference(*held_out)
    if difference is None and len(a) == len(b):
        print(f"identical: {sum(x['phase'] in ('rl', 'eval') for x in a)} {what}, digest {a[-1]['chain']}")
        return 0
    if difference is None:
        print(f"identical as far as they go: {len(a)} and {len(b)} lines of ledger")
    else:
        x, y, stage, item = difference
        phase = x["phase"]
        print(f"first difference: {phase} step {x['step']}, {stage}{f' of {item}' if item else ''}")
        if item:
            print(f"    {x[stage][item]}\n    {y[stage].get(item)}")
            kept = (Path(f) / "ckpt" / f"step_{x['step'] + 1:06d}" for f in (folder_a, folder_b))
            if phase == "rl" and stage in ("weights", "optimizer"):
                print(*describe_parameter(*kept, stage, item), sep="\n")
        elif stage in ("weight_version", "tokens", "logprobs", "rewards", "journal") and phase in ("rl", "eval"):
            # With segments, a group may have been drawn in earlier steps than the one that trains on it.
            for step in range(x["step"] + 1) if "weight_version" in x and phase == "rl" else [x["step"]]:
                queues = (Path(f) / "queue" / f"{phase}_{step:06d}" for f in (folder_a, folder_b))
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
