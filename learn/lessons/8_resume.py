"""
Lesson 8: kill it, resume it, prove it.

    uv run learn/lessons/8_resume.py
"""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
# As small as can be: nothing is learned before RL begins, and the reward is the function below.
FLAGS = "--device=cpu --warmup_sft_steps=0 --eval_size=0 --learning_rate=1e-3 --max_steps=12 --checkpoint_every=4"
FLAGS = [*FLAGS.split(), "--reward=learn/lessons/8_resume.py:digits"]


def digits(prompt, response, answer):
    """The fraction of a response's characters that are digits: something to learn for a model that knows nothing."""
    return sum(c.isdigit() for c in response) / max(1, len(response))


def start(folder, *flags):
    """A run of train_grpo.py, as one types it."""
    command = [sys.executable, "train_grpo.py", "config/small.py", f"--out_dir={folder}", *FLAGS, *flags]
    with open(f"{folder}.output", "a") as output:
        return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)


def steps(folder, file):
    """The lines of the RL steps in ledger.jsonl or metrics.jsonl; the last one may be half written."""
    text = (folder / file).read_text() if (folder / file).exists() else ""
    every = [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]
    return [line for line in every if line["phase"] == "rl"]


def main(folder):
    whole, killed, damaged = folder / "whole", folder / "killed", folder / "damaged"
    runs = start(whole), start(killed)
    while runs[1].poll() is None and len(steps(killed, "ledger.jsonl")) < 5:
        time.sleep(0.02)
    runs[1].send_signal(signal.SIGKILL)
    print("the exit status of the run that was killed:", runs[1].wait())
    print("it had done all its steps:", len(steps(killed, "ledger.jsonl")) == 12)
    print("the exit status of its resume:", start(killed, "--init_from=resume").wait())
    print("the exit status of the run that nobody killed:", runs[0].wait())
    for run in (whole, killed):
        if len(steps(run, "ledger.jsonl")) < 12:
            sys.exit((folder / f"{run.name}.output").read_text()[-3000:])
        rewards = [line["reward_mean"] for line in steps(run, "metrics.jsonl")]
        print(f"{run.name}: mean rewards", *(f"{r:.4f}" for r in rewards[::4]), f"{rewards[-1]:.4f}")
        print(f"{run.name}: digest", steps(run, "ledger.jsonl")[-1]["chain"])

    # a copy, in which one bit of one log-prob is another, and the hash of the log-probs with it
    shutil.copytree(whole, damaged)
    path = damaged / "queue" / "rl_000002" / "group_0003.safetensors"
    tensors = load_file(path)
    tensors["logprobs"].view("int32")[10] ^= 1
    save_file(tensors, path)
    ledger = damaged / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace(steps(whole, "ledger.jsonl")[2]["logprobs"], "another"))
    for other in (killed, damaged):
        print(f"$ python tools/diff.py whole {other.name}", flush=True)
        command = [sys.executable, str(ROOT / "tools" / "diff.py"), "whole", other.name]
        print(subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout, end="")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
