"""
How a run's processes start: before the libraries are imported, which takes seconds, and with as little of them as they
need.
"""

import atexit
import ctypes
import gc
import multiprocessing
import os
import re
import signal
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

from configurator import on_cpu, roles


def end_with_parent():
    """
    Has the kernel end this process when the one that started it ends, however that ends: torchrun's agent, or a rank.
    Ends it now if that is gone already. A shell is no such parent: what it starts may have to outlive it.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
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
    aloud: a line says what is being waited for, if that takes long.
    """
    line = "waiting for the imports of torch, transformers and SGLang, which read 1 GB at a first start"
    said = threading.Timer(PATIENCE, print, [line], dict(flush=True))
    if aloud:
        said.start()
    gc.disable()
    import torch

    unused = () if torch.cuda.is_available() else ("flashinfer", "sklearn", "torchao")
    hidden = dict.fromkeys(name for name in unused if name not in sys.modules)
    sys.modules.update(hidden)  # None: as if they were not installed
    try:
        yield
    finally:
        said.cancel()
        gc.freeze()
        gc.enable()
        for name in hidden:
            del sys.modules[name]


@contextmanager
def output_to(path):
    """Sends this process's and its new children's stdout and stderr to the file: SGLang starts noisily."""
    kept = os.dup(1), os.dup(2)
    with open(path, "a") as log:
        _write_to(log.fileno(), log.fileno())
    try:
        yield
    finally:
        _write_to(*kept)
        for fd in kept:
            os.close(fd)


def _write_to(stdout, stderr):
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)


def allow_deterministic_backend():
    """Has SGLang's deterministic mode take the CPU's backend and keep the radix cache with it; in both processes."""
    from sglang.srt import server_args

    server_args.add_deterministic_attention_backend_choices(["torch_native"])
    server_args.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


early = []  # (process, where its orders go, where its answers come from) of schedulers that wait for an engine


def early_scheduler(orders, writer):
    """A process that imports SGLang while its rank does other things, and then does what it is ordered to."""
    import setproctitle

    setproctitle.getproctitle()  # it finds where the title is by the environment, as long as that is unchanged
    with lean_imports():
        import sglang.srt.managers.scheduler
        import sglang.srt.models.qwen3  # noqa: F401

    try:
        log, environment, run, args = orders.recv()
    except EOFError:  # the rank is no more, or SGLang has refused its arguments
        return
    log = os.open(log, os.O_WRONLY | os.O_APPEND)
    _write_to(log, log)
    os.environ.clear()
    os.environ.update(environment)
    run(*args, writer)


def start_schedulers(count):
    """
    Starts processes for SGLang's schedulers. On a CPU imports are most of an engine's start, and they do not have to
    wait for those of the rank. Spawned, not forked: a rank has threads of gloo and OpenMP, whose locks a fork would
    copy in whatever state they are, and its lock on the run's folder.
    """
    spawn = multiprocessing.get_context("spawn")
    started = []
    for _ in range(count):
        orders, commands = spawn.Pipe(duplex=False)
        reader, writer = spawn.Pipe(duplex=False)
        process = spawn.Process(target=early_scheduler, args=(orders, writer))
        with output_to(os.devnull):
            process.start()
        for end in (orders, writer):
            end.close()  # so that each end notices when the other dies
        started.append((process, commands, reader))
    return started


def start_engine_early(config):
    """Has the process of an engine that this rank will have on a CPU begin with its imports."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    _, engines = roles(config, world)
    mine = int(os.environ.get("RANK", 0)) >= world - engines
    if mine and on_cpu(config) and config["rollout_tp"] == 1:
        early.extend(start_schedulers(1))
        atexit.register(lambda: [process.kill() for process, *_ in early])
