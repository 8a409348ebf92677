"""
Whole runs with the real engine, launched as a user launches them: test_run.py and test_resume.py read them.

One engine takes 10 to 30 s to start, so the runs are few and many tests share each.
"""

import fcntl
import os
import re
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import kernels

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
from prove import launch  # noqa: E402

torch.set_num_threads(1)  # two workers share the machine
kernels.enable_batch_invariant()  # here, since MKL reads its switch only once, at the first matmul of any test
kernels.disable_batch_invariant()


def digest(output):
    last = [line for line in output.splitlines() if line.strip()][-1]
    assert re.fullmatch(r"digest [0-9a-f]{64}", last), output[-2000:]
    return last


def finish(folder, *flags, **options):
    """A run that has to succeed and to leave nothing in shared memory: (folder, output)."""
    before = orphans()
    status, output = launch(folder, *flags, **options)
    assert status == 0, output[-4000:]
    with shared_memory():
        wait_for(lambda: orphans() <= before, 5)  # the other worker's engines come and go
    return folder, output


@contextmanager
def shared_memory():
    """One worker at a time: who kills engines while they start leaves names behind, and removes them in here."""
    with open(Path(tempfile.gettempdir(), "onecurve_tests.lock"), "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def orphans():
    """Names in /dev/shm that no process has mapped."""
    there, mapped = {x.inode(): x.name for x in os.scandir("/dev/shm")}, set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped |= set(map(int, re.findall(r"(\d+) +/dev/shm/", path.read_text())))
        except OSError:
            pass  # it ended
    return {name for inode, name in there.items() if inode not in mapped}


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    """One trainer and one engine under torchrun."""
    return finish(tmp_path_factory.mktemp("runs") / "two_ranks", ranks=2)


@pytest.fixture(scope="session")
def one_process(tmp_path_factory):
    """The same run in one process that does both, and with all that must not matter changed."""
    folder = tmp_path_factory.mktemp("runs") / "one_process"
    free = "--threads=2 --radix_cache=False --engine_max_running=17 --engine_prefill_chunk=32 --gradient_checkpointing"
    free += " --weight_sync=ipc --checkpoint_every=0"
    return finish(folder, *free.split())


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)
