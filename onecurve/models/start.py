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
        gc.set_threshold(50_000)  # from 700: a step makes little garbage, and many objects to look through
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


def waiting_scheduler(orders, writer):
    """A process that has SGLang imported, and then does what it is ordered to."""
    end_with_parent()
    import setproctitle

    setproctitle.setproctitle("sglang::waiting")  # now: it finds its place by the environment as it was
    import_engine()
    log, environment, run, args = orders.recv()
    log = os.open(log, os.O_WRONLY | os.O_APPEND)
    _write_to(log, log)
    os.environ.clear()
    os.environ.update(environment)
    run(*args, writer)


def import_engine():
    """What an engine's rank and its scheduler need of SGLang, on a CPU."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # before torch reads it: SGLang would compile, with g++, for nothing here
    with lean_imports():
        import sglang.srt.entrypoints.engine
        import sglang.srt.models.qwen3  # noqa: F401


def start_schedulers(count, method):
    """
    Starts processes for an engine's schedulers on a CPU, whose imports need not wait for those of the rank. method
    'fork': they have the rank's so far, which must have no threads yet, as a fork copies the locks of gloo's and
    OpenMP's in whatever state they are; else 'spawn'.
    """
    context = multiprocessing.get_context(method)
    for _ in range(count):
        orders, commands = context.Pipe(duplex=False)
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=waiting_scheduler, args=(orders, writer))
        with output_to(os.devnull):
            process.start()
        for end in (orders, writer):
            end.close()  # so that this end notices when the other dies
        early.append((process, commands, reader))
        atexit.register(lambda: [process.kill() for process, *_ in early])


def start_engine_early(config):
    """Starts the schedulers of the engine that this rank will have on a CPU."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    tp = config["rollout_tp"]
    place = int(os.environ.get("RANK", 0)) - world + roles(config, world)[1] * tp  # among the ranks that sample
    if on_cpu(config) and place >= 0 and place % tp == 0:
        import onecurve.cpu.loops  # noqa: F401  # before the fork: once for both

        start_schedulers(tp, "fork")
