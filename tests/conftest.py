"""
Whole runs with the real engine, launched as a user launches them: test_run.py and test_resume.py read them.

One engine takes 10 to 30 s to start, so the runs are few and many tests share each.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# small, and yet it learns: a warm-up that leaves about half of the samples wrong, then 24 steps of RL
SMALL = """
arithmetic_size = 10
max_prompt_tokens = 8
max_new_tokens = 6
eval_size = 20
warmup_sft_steps = 60
sft_learning_rate = 2e-3
sft_batch = 32
prompts_per_step = 8
group_size = 8
leaves = 4
max_steps = 24
learning_rate = 2e-4
checkpoint_every = 8
scratch_layers = 2
scratch_hidden = 64
scratch_mlp = 128
"""


def launch(folder, *flags, ranks=0, timeout=240):
    """Runs train_grpo.py on the small config with out_dir=folder, under torchrun if ranks: (status, output)."""
    command = command_of(folder, *flags, ranks=ranks)
    both = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    done = subprocess.run(command, cwd=ROOT, timeout=timeout, **both)
    return done.returncode, done.stdout


def command_of(folder, *flags, ranks=0):
    config = folder.parent / f"{folder.name}.py"
    config.write_text(SMALL)
    torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"] if ranks else []
    return [sys.executable, *torchrun, "train_grpo.py", str(config), f"--out_dir={folder}", *flags]


def lines(folder, file, phase=None):
    out = [json.loads(line) for line in (folder / file).read_text().splitlines()]
    return [line for line in out if phase in (None, line["phase"])]


def digest(output):
    last = [line for line in output.splitlines() if line.strip()][-1]
    assert re.fullmatch(r"digest [0-9a-f]{64}", last), output[-2000:]
    return last


def processes_of(folder):
    """{id: command line} of living processes that name the folder or have a file in it open, as the engine its log."""
    out = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            files = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        if any(str(folder) in x for x in (command, *files)):
            out[int(pid)] = command
    return out


@pytest.fixture(scope="session")
def in_shared_memory():
    return set(os.listdir("/dev/shm"))


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory, in_shared_memory):
    """One trainer and one engine under torchrun."""
    folder = tmp_path_factory.mktemp("runs") / "two_ranks"
    status, output = launch(folder, ranks=2)
    assert status == 0, output[-4000:]
    return folder, output


@pytest.fixture(scope="session")
def one_process(tmp_path_factory):
    """The same run in one process that does both, and with all that must not matter changed."""
    folder = tmp_path_factory.mktemp("runs") / "one_process"
    free = "--threads=1 --radix_cache=False --engine_max_running=17 --engine_prefill_chunk=32 --gradient_checkpointing"
    free += " --weight_sync=ipc --checkpoint_every=0"
    status, output = launch(folder, *free.split())
    assert status == 0, output[-4000:]
    return folder, output


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)
