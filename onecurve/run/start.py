"""
How a run's processes start: before the libraries are imported, which takes seconds, and with as little of them as they
need. SGLang's processes: onecurve/sglang/start.py.
"""

import ctypes
import gc
import os
import re
import signal
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

from configurator import require

LIBC = ctypes.CDLL(None)


def at_parents_end(number):
    """Has the kernel send this process a signal when the one that started it ends in any way."""
    LIBC.prctl(1, number)  # PR_SET_PDEATHSIG


def end_with_parent():
    """
    Makes the kernel end this process when the one that started it ends in any way: torchrun's agent, or a rank. Ends it
    now if that is gone already. A shell is no such parent: its children may have to outlive it.
    """
    at_parents_end(signal.SIGKILL)
    parent = Path("/proc", str(os.getppid()))
    alive = parent.name != "1"
    try:  # an agent or a rank has torch; what stands between them, such as a shell, was started by an agent
        alive = b"libtorch" in (parent / "maps").read_bytes() or b"TORCHELASTIC" in (parent / "environ").read_bytes()
    except OSError:
        pass  # it is another user's, as init is
    if spawned := re.search(r"spawn_main\(parent_pid=(\d+)", " ".join(sys.orig_argv)):  # by multiprocessing
        alive = spawned[1] == parent.name
    if not alive:
        os._exit(1)


PATIENCE = 3.0  # seconds without a line at a start


@contextmanager
def lean_imports(aloud=False):
    """
    Inside, importing torch, transformers and SGLang takes half as long: without packages that the latter two import
    only because they are installed, and without garbage collection among the modules, now and at the process's end.
    aloud: a line says what is being waited for, if that takes long, and what a Ctrl-C ends.
    """
    line = "waiting for the imports of torch, transformers and SGLang, which read 1 GB at a first start"
    said = threading.Timer(PATIENCE, print, [line], dict(flush=True))
    if aloud:
        said.start()
    gc.disable()
    hidden = {}
    try:
        import torch

        unused = () if torch.cuda.is_available() else ("flashinfer", "sklearn", "torchao")
        hidden |= dict.fromkeys(name for name in unused if name not in sys.modules)
        sys.modules.update(hidden)  # None: as if they were not installed
        yield
    except KeyboardInterrupt:
        require(not aloud, "interrupted; nothing was written; start again")
        raise
    finally:
        said.cancel()
        gc.freeze()
        gc.enable()
        gc.set_threshold(50_000)  # from 700: a step makes little garbage, and many objects to look through
        for name in hidden:
            del sys.modules[name]


@contextmanager
def output_to(path):
    """Sends this process's and its new children's stdout and stderr to the file: SGLang starts noisily."""
    kept = os.dup(1), os.dup(2)
    with open(path, "a") as log:
        write_to(log.fileno(), log.fileno())
    try:
        yield
    finally:
        write_to(*kept)
        for fd in kept:
            os.close(fd)


def write_to(stdout, stderr):
    """Makes these file descriptors the stdout and stderr of this process and its new children."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
