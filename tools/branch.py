"""
Two futures of a run: from one of its steps on some keys are changed, and nothing else.

    python tools/branch.py out/tiny --step=40 --out_dir=out/tiny_high --learning_rate=1e-3

The new folder has the run's past up to the step (ledger, metrics, the state of weights and moments) and then its own:
the same prompts and the same noise under another config, so what differs comes from what was changed. If the run kept
no checkpoint of that step, one is made first, from the checkpoint before it and the rollout files. The new run is like
any other: it can be resumed, replayed, compared (tools/diff.py, tools/plot.py) and branched again.

    python tools/branch.py out/tiny --step=40 --out_dir=out/twin --ulp=model.norm.weight[7]

The twin differs in the last bit of one weight, and in all that grows from that bit.

Exit status 2: no such run, step or weight, flags that the run cannot have, or a run that requires trust
(tools/verify.py).
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from runs import check_links, check_trusted, lines, saved_config
from safetensors.torch import load_file
from verify import copy_run, go_on, link, starts_of

import configurator
from configurator import require
from onecurve.run.checkpoint import seal_checkpoint, write_file
from onecurve.run.record import LOGS
from sync import run_id
from train_grpo import DEFAULTS


def checkpoint_of(run, step, scratch, said):
    """
    The run's checkpoint of this step: its own, or one made in the folder `scratch` from the one before it. said: {key:
    value} of the command line.
    """
    starts = starts_of(run)
    if step in starts:
        return starts[step]
    check_trusted(run, saved_config(run), said)
    before = max((s for s in starts if s < step), default=None)
    copy_run(run, scratch / "past", starts.get(before))
    # A run is evaluated at its end, which this step was not. Repeated steps are not to be stopped by a watch.
    flags = f"--checkpoint_every={max(1, step)} --keep_checkpoints=2 --watch=".split()
    problem = go_on(scratch / "past", step + 1, flags)
    require(not problem, f"{run}: up to step {step} it cannot be done again: {problem}")
    require((made := starts_of(scratch / "past")).get(step), f"{run}: no checkpoint of step {step} could be made")
    return made[step]


def reseal_checkpoint(old, new, nudged=None, **changes):
    """Makes `new` a copy of the checkpoint `old` with these fields of its record changed, and one file: see `nudge`."""
    record = json.loads((old / "checkpoint.json").read_text())
    partial = new.with_name(f".{new.name}")
    shutil.copytree(old, partial, copy_function=link)
    (partial / "checkpoint.json").unlink()
    if nudged:
        file, weights = nudged
        (partial / file).unlink()  # a link, of the other checkpoint's
        write_file(partial / file, weights)
    kept = {key: x for key, x in record.items() if key not in ("files", "sha256")}
    seal_checkpoint(partial, new, **kept | changes)


def branch(run, checkpoint, folder, config, nudged=None):
    """Makes `folder` the run as it was at the checkpoint, with another config from there on."""
    sizes = json.loads((checkpoint / "checkpoint.json").read_text())["bytes"]
    past = checkpoint.parent.parent  # `run`, or the copy in which the checkpoint was made
    (folder / "ckpt").mkdir(parents=True)
    for name in filter(sizes.get, LOGS):
        (folder / name).write_bytes((past / name).read_bytes()[: sizes[name]])
    reseal_checkpoint(checkpoint, folder / "ckpt" / checkpoint.name, nudged, run=run_id(config))
    step = int(checkpoint.name[5:])
    origin = f"# branched from {run}, digest {lines(run, 'ledger.jsonl')[-1]['chain']}, at step {step}\n"
    (folder / "config.py").write_text(origin + configurator.config_source(config))


def nudge(checkpoint, where):
    """(file, its tensors) of the checkpoint with one weight, 'name[i,j]', made the next larger float32."""
    name, _, at = where.rstrip("]").partition("[")
    for path in checkpoint.glob("*.safetensors"):
        weights = load_file(path)
        if name in weights:
            shape = list(weights[name].shape)
            at = [int(i) for i in at.split(",") if i.isdigit()]
            inside = len(at) == len(shape) and all(i < n for i, n in zip(at, shape))
            require(inside, f"--ulp={where}: the weight has the shape {shape}; name one number of it")
            weight = weights[name][tuple(at)]
            weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))
            return path.name, weights
    require(False, f"--ulp={where}: the checkpoint has no such weight; its files name them")


def main():
    argv = sys.argv[1:]
    if len(argv) < 2 or argv[0].startswith("-"):
        configurator.fail(
            "wants a run, a step and flags, as in: out/tiny --step=40 --out_dir=out/b --learning_rate=1e-3"
        )
    run = Path(argv[0])
    check_links(run)
    config = saved_config(run)
    saved = {key: config[key] for key in DEFAULTS}
    config = configurator.configure(saved | {"step": -1, "ulp": "", "__file__": ""}, argv[1:])
    step, ulp, folder = config.pop("step"), config.pop("ulp"), Path(config["out_dir"])
    said = {key: config[key] for key in configurator.ORIGINS if key in config}
    check_trusted(run, saved, {key: saved[key] for key in said})  # another value will do: the branch has that one
    steps = len(lines(run, "ledger.jsonl", "rl"))
    require(steps, f"{run}: has no RL steps to branch from; name a run that has")
    require(0 <= step < steps, f"--step={step}: the run has steps 0 to {steps - 1}")
    most = config["max_steps"]
    require(most > step, f"--max_steps={most}: ends before --step={step} is done; use more")
    require(folder != run and not folder.exists(), f"--out_dir={folder}: choose a folder that is not there yet")
    configurator.check_config(config, 1, DEFAULTS)  # before there is a folder, which a second try would find
    changed = [f"{key}={config[key]!r} (the run has {saved[key]!r})" for key in saved if config[key] != saved[key]]
    changed += [f"{ulp} by one bit"] * bool(ulp)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = checkpoint_of(run, step, Path(scratch), said)
        nudged = nudge(checkpoint, ulp) if ulp else None
        print(f"from step {step} on: {', '.join(changed)}", flush=True)
        branch(run, checkpoint, folder, config, nudged)
    try:
        problem = go_on(folder, config["max_steps"], [])
    except SystemExit:  # of a mistake in the flags: mended, they find no folder
        if len(lines(folder, "ledger.jsonl", "rl")) == step:
            shutil.rmtree(folder)
        raise
    require(not problem, f"{folder}: {problem}")
    for name in "reward_mean", "pass@1":
        for future in run, folder:
            figures = [f"{x['step']}: {x[name]:.4f}" for x in lines(future) if name in x and x["step"] >= step]
            if figures:
                print(f"{name} of {future} from step {', '.join(figures[:: -(-len(figures) // 8)])}")


if __name__ == "__main__":
    main()
