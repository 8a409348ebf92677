"""
Repeats steps of a published run and says whether they come out the same.

    python tools/verify.py out/tiny                          # five steps, chosen by the run's digest
    python tools/verify.py out/tiny --steps=all --threads=1  # every step; other flags are train_grpo.py's
    python tools/verify.py user/name                         # of the hub, where tools/publish.py has put it

In a folder of its own, a chosen step is reached from the last checkpoint before it, whose weights and moments must be
those of the ledger. Updates up to the step are made from the published rollout files, the step's own samples, log-probs
and rewards by the engine, and every line of the ledger on the way must come out as published. The digest chooses the
steps: whoever changes a step to hide something changes the choice. With --steps=all all is made again from the run's
beginning, the warm-up too, which chosen steps take from the first checkpoint.

The run may be a stranger's. Its files are read, none is executed; where its config names what would run here or call
other machines (an agent, a reward, loss or advantage in a file, a judge, a model of the hub, sources, arguments of
SGLang), nothing begins until your command line repeats it: so no program is run, and no key sent, that you have not
named. A path into the run's folder is the stranger's, too; symbolic links are refused.

config.py and ledger.jsonl are enough; queue/ and ckpt/ save time. Without the rollout files between a checkpoint and a
step the engine makes them again, without a checkpoint the run begins anew.

Exit status 0: verified; 1: it parted, and where; 2: nothing to verify.
"""

import argparse
import hashlib
import itertools
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from diff import first_difference
from runs import HUB, check_links, check_trusted, command, launch_with_bar, lines, problem, saved_config
from safetensors.torch import load_file

import sync
from configurator import MODES, ORIGINS, configure, fail, library_versions, printable, require
from models.adapters import PEFT

# Repeated steps are not to be stopped by a watch.
QUIET = ("--eval_samples=1", "--watch=")


def chosen(digest, steps, count):
    """`count` of the steps, in their order: those with the least hashes of (digest, step)."""
    by_hash = sorted(steps, key=lambda step: hashlib.sha256(f"{digest} {step}".encode()).digest())
    return sorted(by_hash[:count])


def starts_of(run):
    """{step: folder} of the run's checkpoints that these versions of the libraries can go on from."""
    found = {}
    for folder in sync.checkpoints(run / "ckpt"):
        record = json.loads((folder / "checkpoint.json").read_text())
        why = f"{folder} is of {record['versions']}, here are {library_versions()}: bits may differ"
        require(record["versions"] == library_versions(), why)
        found[record["step"]] = folder
    return found


def whole_experts(tensors):
    """The tensors {name: tensor} of a model folder's files, with a mixture's experts as one, as it is trained."""

    def stacked(layer, part):
        names = (f"{layer}.experts.{e}.{part}_proj.weight" for e in itertools.count())
        return torch.stack([tensors[name] for name in itertools.takewhile(tensors.__contains__, names)])

    found = {name: x for name, x in tensors.items() if ".experts." not in name}
    for layer in {name.partition(".experts.")[0] for name in tensors.keys() - found}:
        found[f"{layer}.experts.gate_up_proj"] = torch.cat([stacked(layer, part) for part in ("gate", "up")], 1)
        found[f"{layer}.experts.down_proj"] = stacked(layer, "down")
    return found


def differing_weight(checkpoint, line):
    """The first parameter of a checkpoint whose value or moments are not those of the ledger's line; or None."""
    files = [*checkpoint.glob("*.safetensors"), *checkpoint.glob("optimizer/*.safetensors")]
    tensors = {name.removeprefix(PEFT): x for file in files for name, x in load_file(file).items()}
    shards = [sync.Shard(name, tuple(x.shape), 0, x) for name, x in whole_experts(tensors).items()]
    hashes = sync.tensor_hashes([s.data for s in shards], shards, None)
    for name in line["weights"]:
        moments = "".join(hashes.get(f"{kind}.{name}", "") for kind in ("exp_avg", "exp_avg_sq"))
        if (hashes.get(name), moments) != (line["weights"][name], line["optimizer"][name]):
            return name


def fetched(name):
    """
    A run's folder, which is run/ in one that tools/publish.py has written; of one that it has put on the hub as
    user/name, a copy in out/hub/user/name.
    """
    if name.is_dir() or len(name.parts) != 2:
        published = (name / "run" / "config.py").is_file() and not (name / "config.py").is_file()
        return name / "run" if published else name
    from huggingface_hub import snapshot_download

    folder = HUB / name
    try:
        return Path(snapshot_download(str(name), allow_patterns="run/*", local_dir=folder)) / "run"
    except Exception as e:
        fail(f"{name}: neither the folder of a run nor one on the hub: {sync.reason(e)}")


def link(source, target):
    """A second name for a file that nobody writes into, or where that cannot be a copy of it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def copy_run(run, folder, start, without=()):
    """
    Makes `folder` the run as it was after checkpoint `start` (a folder, or None for the beginning), but with its whole
    ledger, for comparison, and all rollout files except those of the steps `without`.
    """
    folder.mkdir(parents=True)
    for name in ("config.py", *sync.LOGS):
        if (run / name).is_file():
            shutil.copy2(run / name, folder)
        elif start:  # as long as the checkpoint says that it was
            record = json.loads((start / "checkpoint.json").read_text())
            (folder / name).write_text("\n" * record["bytes"][name])
    if start:
        shutil.copytree(start, folder / "ckpt" / start.name, copy_function=link)
    for step in sorted(run.glob("queue/rl_*")):
        if int(step.name[3:]) not in without:
            journals = shutil.ignore_patterns("journal_*")  # which are written on
            shutil.copytree(step, folder / "queue" / step.name, copy_function=link, ignore=journals)


def go_on(folder, steps, flags, nproc=1):
    """
    Runs train_grpo.py from the latest checkpoint in the folder to so many steps; returns its error line, '' if it does
    not fail.
    """
    config = saved_config(folder)
    before = config["warmup_sft_steps"] * (MODES[config["mode"]].steps == "rl")
    words = command("--init_from=resume", f"--out_dir={folder}", f"--max_steps={steps}", *flags, ranks=nproc)
    status, output = launch_with_bar(words, folder, f"{folder.name}: making steps", before + steps)
    return problem(output) if status else ""


def parted(run, folder, start, steps, flags, nproc):
    """Repeats the steps of `run` from a checkpoint: where they part from its ledger, in words; '' if nowhere."""
    ledger = lines(run, "ledger.jsonl")
    phase = ledger[-1]["phase"]
    first = int(start.name[5:]) if start else 0
    if start:
        before = [line for line in ledger if line["phase"] != phase or line["step"] < first]
        if before and (name := differing_weight(start, before[-1])):
            return f"{start}: {name} is not that of {before[-1]['phase']} step {before[-1]['step']} in the ledger"
    copy_run(run, folder, start, steps)
    quiet = ["--checkpoint_every=0", "--sample_every=0", "--strict=False", *QUIET]
    failure = go_on(folder, steps[-1] + 1, [*quiet, *flags], nproc)
    again = lines(folder, "ledger.jsonl")
    if difference := first_difference(ledger, again):
        line, stage, item = difference
        return f"{ledger[line]['phase']} step {ledger[line]['step']}, {stage}{f' of {item}' * bool(item)}"
    if failure or [(line["phase"], line["step"]) for line in again[-1:]] != [(phase, steps[-1])]:
        return failure or f"{phase} step {steps[-1]}: the repeated run ends before it"
    for line in lines(folder, phase="rl") if saved_config(run)["engine_bits"] == "fp32" else ():
        if line["step"] >= first and line.get("logprob_mismatch_tokens"):
            return f"rl step {line['step']}, {line['logprob_mismatch_tokens']} log-probs of engine and trainer differ"
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", default="5", help="how many, or 'all'")
    parser.add_argument("--nproc", type=int, default=1, help="processes; more than one are torchrun's")
    parser.add_argument("--keep", type=Path, help="a folder for what is done again, for tools/diff.py")
    args, flags = parser.parse_known_args()
    run = fetched(args.run)
    for name in ("config.py", "ledger.jsonl"):
        require((run / name).is_file(), f"{run}: no {name} in it, and so nothing to verify")
    require(args.steps == "all" or args.steps.isdigit() and args.steps != "0", f"--steps={args.steps}: a number or all")
    if args.keep and args.keep.exists():
        fail(f"--keep={args.keep}: exists; choose another folder")
    check_links(run)
    saved = saved_config(run)
    config = configure({**saved, "__file__": ""}, flags)
    check_trusted(run, saved | {"track": ""}, {key: config[key] for key in ORIGINS})
    flags = [flag for flag in flags if not flag.startswith("--init_from=")]  # which is 'resume' for what is repeated
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "ledger.jsonl"
        shutil.copy2(run / "ledger.jsonl", whole)
        try:
            digest = sync.Ledger(whole, whole.stat().st_size).digest
        except sync.RunError as error:
            where = str(error).removeprefix("error: ").replace(str(whole), str(run / "ledger.jsonl"))
            print(f"parted: {where}")
            return 1
        ledger = lines(run, "ledger.jsonl")
        require(ledger, f"{run}: its ledger is empty, and so nothing to verify")
        everything = [line["step"] for line in ledger if line["phase"] == ledger[-1]["phase"]]
        mode = saved.get("mode")
        why = f"mode={mode!r}: a run of this mode draws no samples of its own, or has no steps: nothing to verify"
        require(mode in MODES and MODES[mode].steps and mode != "replay", why)
        phase = "rl" if MODES[mode].steps == "rl" else mode
        fits = ledger[-1]["phase"] == phase and everything == [*range(len(everything))]
        require(fits, f"{run}/ledger.jsonl: its steps are not those of a run with mode={mode!r}")
        steps = chosen(digest, everything, len(everything) if args.steps == "all" else int(args.steps))
        starts = starts_of(run)
        if args.steps == "all":  # the warm-up, too
            starts = {}
        legs = {}
        for step in steps:
            legs.setdefault(max((s for s in starts if s <= step), default=None), []).append(step)
        for start, some in legs.items():
            folder = (args.keep or Path(scratch)) / f"from_{'the_beginning' if start is None else start}"
            if where := parted(run, folder, starts.get(start), some, flags, args.nproc):
                print(f"parted: {printable(where)}")
                return 1
    print(f"verified: steps {', '.join(map(str, steps))} of {len(everything)}, digest {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
