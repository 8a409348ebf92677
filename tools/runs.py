"""
How the tools start train_grpo.py, and how they read what a run has left in its folder. No tool by itself.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # whoever imports this can import the files there
import configurator  # noqa: E402
from configurator import require  # noqa: E402


def command(*args, ranks=1, restarts=0, script=(ROOT / "train_grpo.py",)):
    """The command line of a run; several ranks, and restarts, are torchrun's."""
    torchrun = f"-m torch.distributed.run --nproc_per_node={ranks} --max-restarts={restarts} --standalone".split()
    return [sys.executable, *(torchrun if ranks > 1 or restarts else []), *map(str, script), *map(str, args)]


def launch(command, env=None, cwd=None, timeout=None):
    """Runs a command to its end: (exit status, everything it printed)."""
    options = dict(cwd=cwd, env=os.environ | (env or {}), timeout=timeout)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    return done.returncode, done.stdout


def problem(output):
    """The line in which a run said why it ended; else the last one of its output."""
    said = output.splitlines() or ["no output"]
    return next((line for line in said if line.startswith(("error: ", "watch: "))), said[-1]).removeprefix("error: ")


def lines(folder, file="metrics.jsonl", phase=None):
    """The lines of a run's metrics.jsonl or ledger.jsonl, of one phase or of all; but not a half one at the end."""
    path = Path(folder) / file
    require(path.is_file(), f"{folder}: no {file} in it: not the folder of a run")
    text = path.read_text()
    try:
        every = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    except ValueError as e:
        require(False, f"{path}: not lines of JSON: {e}")
    whole = all(isinstance(line, dict) and {"phase", "step"} <= line.keys() for line in every)
    require(whole, f"{path}: a line that has no phase and step")
    return [line for line in every if phase in (None, line["phase"])]


def run(folder, *flags, ranks=1):
    """Makes a run in this folder: its metrics.jsonl, line by line. Ends this process with one line if the run fails."""
    status, output = launch(command(*flags, f"--out_dir={folder}", ranks=ranks))
    require(not status, f"{folder}: {problem(output)}")
    return lines(folder)


def saved_config(folder):
    """{key: value} of a run's config.py."""
    path = Path(folder) / "config.py"
    require(path.is_file(), f"{folder}: no config.py in it: not the folder of a run")
    return configurator.saved_config(path)


def check_trusted(run, saved, said):
    """
    Ends this process with one line, unless `said`, {key: value} of the command line, repeats all by which a run's saved
    config, which may be a stranger's, would have programs run here or other machines called.
    """

    def text(key):
        return str(saved.get(key, ""))

    def elsewhere(name):
        return name.strip() not in ("", "scratch", "arithmetic", "programs") and not os.path.exists(name.strip())

    asks = dict(agent=text("agent"), judge=text("judge"), sandbox=text("sandbox") == "none")
    asks |= dict(mode=text("mode") == "serve", track=text("track") == "wandb")
    asks |= {key: elsewhere(text(key)) for key in ("init_from", "teacher", "reference", "lora", "dataset")}
    for key in "reward", "truth_reward":
        asks[key] = ".py:" in text(key) or any(map(elsewhere, re.findall("model:([^+*]*)", text(key))))
    flags = [f"--{key}={saved[key]}" for key, asked in asks.items() if asked and said.get(key) != saved[key]]
    why = "its config has programs run here, or other machines called; if you trust it, repeat"
    require(not flags, f"{run}: {why} {shlex.join(flags)}")
