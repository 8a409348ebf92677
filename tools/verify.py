"""
Repeats a published run and says whether it comes out the same.

    python tools/verify.py out/tiny                          # draws the samples of five steps again
    python tools/verify.py out/tiny --steps=all --threads=1  # of every step; other flags are train_grpo.py's
    python tools/verify.py user/name                         # of the hub, where tools/publish.py has put it

From the run's beginning every update is made again, from the published rollout files. The engine makes samples,
log-probs and rewards of some steps again, and of evaluations. These must come out as published: every line of the
ledger, every evaluation, metrics.jsonl except times, the weights and moments of each checkpoint. The steps are drawn
here and now, so that whoever publishes a run cannot know them; --seed, which is printed, draws the same ones again.

With --trust=40 all begins at the checkpoint of step 40, and nothing says that its weights came from the steps before.
A branch (tools/branch.py) needs it, as another config made its past.

The run may be a stranger's. Its files are read, none is executed; if its config would run code here or call other
machines (an agent, a reward, loss or advantage in a file, a judge, a model of the hub, sources, arguments of SGLang),
nothing begins until your command line repeats it: so no program is run, and no key sent, that you have not named. A
path into the run's folder is the stranger's, too; symbolic links are refused.

config.py and ledger.jsonl are enough; queue/ saves time: without rollout files the engine makes all samples again.

Exit status 0: verified; 1: it parted, and where; 2: nothing to verify.
"""

import argparse
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from diff import first_difference
from runs import (
    HUB,
    check_links,
    check_trusted,
    command,
    evaluations,
    launch_with_bar,
    lines,
    problem,
    saved_config,
)
from safetensors import SafetensorError
from safetensors.torch import load_file

import sync
from configurator import MODES, ORIGINS, configure, fail, printable, require
from onecurve.models.adapters import PEFT
from onecurve.run.checkpoint import checkpoints
from onecurve.run.record import LOGS
from onecurve.run.versions import library_versions

# What metrics.jsonl says of times, of an engine's caches, and of texts where there is a watch
UNLIKE = re.compile(
    ".*_seconds|.*_per_second|engine_retractions|prefix_hit_rate|near_limit|unique_answers|distinct_2|repetition|symbols"
)


def chosen(seed, steps, count):
    """`count` of the steps, in their order: those with the least hashes of (seed, step)."""
    by_hash = sorted(steps, key=lambda step: hashlib.sha256(f"{seed} {step}".encode()).digest())
    return sorted(by_hash[:count])


def starts_of(run):
    """{step: folder} of the run's checkpoints that these versions of the libraries can resume from."""
    found = {}
    for folder in checkpoints(run / "ckpt"):
        try:
            record = json.loads((folder / "checkpoint.json").read_text())
            step, versions, sizes = record["step"], record["versions"], record["bytes"]
            logs = {run / name: sizes[name] for name in LOGS if sizes.get(name)}
            fits = folder.name == f"step_{step:06d}" and all(0 < x <= log.stat().st_size for log, x in logs.items())
        except (OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError):
            fits = False
        require(fits, f"{folder}: not a checkpoint of this run, whose logs go on from there; delete it")
        why = f"{folder} is of {versions}, here are {library_versions()}: bits may differ"
        require(versions == library_versions(), why)
        found[step] = folder
    return found


def branched(run):
    """The step from which on tools/branch.py gave this run a config of its own; None if it is no branch."""
    found = re.match(r"# branched from .*, at step (\d{1,9})\n", (run / "config.py").read_text())
    return int(found[1]) if found else None


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
    """The first parameter of a checkpoint whose value or moments are not those of the ledger's line; None without."""
    files = [*checkpoint.glob("*.safetensors"), *checkpoint.glob("optimizer/*.safetensors")]
    tensors = {name.removeprefix(PEFT): x for file in files for name, x in load_file(file).items()}
    shards = [sync.Shard(name, tuple(x.shape), 0, x) for name, x in whole_experts(tensors).items()]
    hashes = sync.tensor_hashes([s.data for s in shards], shards, None)
    for name, weight in line["weights"].items():
        moments = sorted(x for key, x in hashes.items() if key.partition(".")[2] == name and key[:8] != "version ")
        if hashes.get(name) != weight or moments != sorted(re.findall(".{16}", line["optimizer"][name])):
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
    for name in ("config.py", *LOGS):
        if (run / name).is_file():
            shutil.copy2(run / name, folder)
    if start:
        shutil.copytree(start, folder / "ckpt" / start.name, copy_function=link)
    for step in sorted(run.glob(f"queue/rl_{6 * '[0-9]'}/")):
        if step.name not in {f"rl_{i:06d}" for i in without}:
            journals = shutil.ignore_patterns("journal_*")  # which are written on
            shutil.copytree(step, folder / "queue" / step.name, copy_function=link, ignore=journals)


def go_on(folder, steps, flags, nproc=1):
    """
    Runs train_grpo.py from the latest checkpoint in the folder up to `steps`; returns its error line, '' if it does
    not fail.
    """
    config = saved_config(folder)
    before = config["warmup_sft_steps"] * (MODES[config["mode"]].steps == "rl")
    words = command("--init_from=resume", f"--out_dir={folder}", f"--max_steps={steps}", *flags, ranks=nproc)
    status, output = launch_with_bar(words, folder, f"{folder.name}: making steps", before + steps)
    require(status != 2, problem(output))  # of a config that no run can have
    return problem(output) if status else ""


def unlike_metrics(run, folder):
    """Where the metrics of two folders of a run say other things of a line that both have, in words; '' if nowhere."""
    found = {(y["phase"], y["step"]): y for y in lines(folder)}
    for x in lines(run) if (run / "metrics.jsonl").is_file() else ():
        if y := found.get((x["phase"], x["step"])):
            wrong = [k for k in x if not UNLIKE.fullmatch(k) and repr(x[k]) != repr(y.get(k))]  # NaN is not NaN
            if wrong:
                return f"{x['phase']} step {x['step']}, {wrong[0]} of metrics.jsonl: {x[wrong[0]]} | {y.get(wrong[0])}"
    return ""


def parted(run, folder, start, ledger, steps, flags, nproc):
    """
    Repeats a run from its beginning, or from a checkpoint, with the samples of `steps` made anew: where it parts from
    what was published, in words; '' if nowhere.
    """
    phase = ledger[-1]["phase"]
    done = [line for line in ledger if line["phase"] == phase]
    before = {line["step"]: last for last, line in itertools.pairwise(ledger) if line["phase"] == phase}
    before[len(done)] = ledger[-1]
    for step, checkpoint in starts_of(run).items():
        line = before.get(step, {})
        try:
            name = "optimizer" in line and differing_weight(checkpoint, line)
        except (SafetensorError, OSError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as e:
            fail(f"{checkpoint}: it and the ledger are not of one model: {sync.reason(e)}")
        if name:
            return f"{checkpoint}: {name} is not that of {line['phase']} step {line['step']} in the ledger"
    copy_run(run, folder, start, steps)
    total = ledger[-1]["step"] + (phase != "eval")
    quiet = ["--checkpoint_every=0", "--sample_every=0", "--strict=False", "--watch="]
    failure = go_on(folder, total, [*quiet, *flags], nproc)
    again = evaluations(folder) if phase == "eval" else lines(folder, "ledger.jsonl")
    if difference := first_difference(ledger, again) or first_difference(evaluations(run), evaluations(folder)):
        x, _, stage, item = difference
        return f"{x['phase']} step {x['step']}, {stage}{f' of {item}' * bool(item)}"
    if failure or again != ledger:
        return failure or f"{phase} step {ledger[-1]['step']}: the repeated run ends before it"
    for line in lines(folder, phase="rl") if saved_config(run)["engine_bits"] == "fp32" else ():
        if line["step"] >= (int(start.name[5:]) if start else 0) and line.get("logprob_mismatch_tokens"):
            return f"rl step {line['step']}, {line['logprob_mismatch_tokens']} log-probs of engine and trainer differ"
    return unlike_metrics(run, folder)


def checked_digest(path, scratch, **first):
    """The digest of a run's ledger. Raises RunError if its chain is broken."""
    whole = Path(scratch) / path.name
    shutil.copy2(path, whole)
    try:
        return sync.Ledger(whole, whole.stat().st_size, **first).digest
    except sync.RunError as error:
        raise sync.RunError(str(error).removeprefix("error: ").replace(str(whole), str(path)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", default="5", help="how many have their samples made again, or 'all'")
    parser.add_argument("--seed", default=secrets.token_hex(8), help="what draws the steps; default: by chance")
    parser.add_argument("--trust", type=int, help="a checkpoint's step, from which to begin")
    parser.add_argument("--nproc", type=int, default=1, help="processes; more than one are torchrun's")
    parser.add_argument("--keep", type=Path, help="a folder for what is done again, for tools/diff.py")
    args, flags = parser.parse_known_args()
    require(args.nproc > 0, f"--nproc={args.nproc}: must be more than 0")
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
        held_out = evaluations(run)
        mode = saved.get("mode")
        evaluates = mode == "eval"
        ledger = held_out if evaluates else lines(run, "ledger.jsonl")
        try:
            digest = checked_digest(run / "ledger.jsonl", scratch)
            if held_out:
                of_evaluations = checked_digest(run / "evaluations.jsonl", scratch, first=sync.FIRST_EVALUATION)
                digest = of_evaluations if evaluates else digest
        except sync.RunError as error:
            print(f"parted: {str(error).removeprefix('error: ')}")
            return 1
        require(ledger, f"{run}: its ledger is empty, and so nothing to verify")
        why = f"mode={mode!r}: a run of this mode draws no samples of its own: nothing to verify"
        require(mode in MODES and mode != "replay", why)
        phase = "rl" if MODES[mode].steps == "rl" else mode
        everything = [line["step"] for line in ledger if line["phase"] == phase]
        require(everything or evaluates, f"{run}: its ledger has no step of mode={mode!r}, and so nothing to verify")
        fits = ledger[-1]["phase"] == phase and everything == [*range(len(everything))]
        require(fits or evaluates, f"{run}/ledger.jsonl: its steps are not those of a run with mode={mode!r}")
        start = starts_of(run).get(args.trust)
        require(start or args.trust is None, f"--trust={args.trust}: the run has no checkpoint of that step")
        rest = [step for step in everything if not start or step >= args.trust]
        require(rest or evaluates, f"--trust={args.trust}: the run's last checkpoint; nothing to verify after it")
        steps = chosen(args.seed, rest, len(rest) if args.steps == "all" else int(args.steps))
        print(f"the samples of steps {', '.join(map(str, steps))} are made again (--seed={args.seed})", flush=True)
        folder = args.keep or Path(scratch) / "again"
        if where := parted(run, folder, start, ledger, steps, flags, args.nproc):
            print(f"parted: {printable(where)}")
            if (step := branched(run)) and not start:
                print(f"a branch: another config made its steps before {step}; --trust begins at a later checkpoint")
            return 1
        repeated = {line["step"] for line in evaluations(folder)}
        after = [
            line["step"] for line in held_out if line["step"] in repeated and (not start or line["step"] > args.trust)
        ]
    print(f"evaluations after {', '.join(map(str, after)) or 'no'} steps as published")
    trusting = f", if the checkpoint of step {args.trust} is right" * bool(start)
    print(f"verified{trusting}: steps {', '.join(map(str, steps))} of {len(everything)}, digest {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
