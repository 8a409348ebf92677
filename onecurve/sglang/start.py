"""
How SGLang's processes start on a CPU: while the rank that will have the engine still imports its libraries.

    start_engine_early   starts processes that import SGLang and wait
    started_early        has SGLang's engine take them as its schedulers

Nothing here imports SGLang or torch before it is needed.
"""

import atexit
import multiprocessing
import os
import types
import warnings
from contextlib import contextmanager

from configurator import on_cpu, roles
from onecurve.run.start import end_with_parent, lean_imports, output_to, write_to


def allow_deterministic_backend():
    """Has SGLang's deterministic mode take the CPU's backend and keep the radix cache with it; in both processes."""
    from sglang.srt import server_args

    server_args.add_deterministic_attention_backend_choices(["torch_native"])
    server_args.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


early = []  # (process, where its orders go, where its answers come from) of schedulers that wait for an engine


def waiting_scheduler(orders, writer):
    """A process that imports SGLang, and then follows its orders."""
    end_with_parent()
    import setproctitle

    setproctitle.setproctitle("sglang::waiting")  # now: it finds its place by the environment as it was
    import_engine()
    log, environment, run, args = orders.recv()
    log = os.open(log, os.O_WRONLY | os.O_APPEND)
    write_to(log, log)
    os.environ.clear()
    os.environ.update(environment)
    run(*args, writer)


def import_engine():
    """Imports the parts of SGLang that an engine's rank and its scheduler need on a CPU."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # before torch reads it: SGLang would compile, with g++, for nothing here
    # some packages warn that they can do nothing without a GPU
    with lean_imports(), warnings.catch_warnings(action="ignore", category=UserWarning):
        import sglang.srt.entrypoints.engine
        import sglang.srt.models.qwen3  # noqa: F401


def start_schedulers(count, method):
    """
    Starts processes for an engine's schedulers on a CPU. method 'fork': after what all of them import, which takes each
    of them as long as one; the rank must have no threads yet, as a fork copies the locks of gloo's and OpenMP's in
    whatever state they are; else 'spawn'.
    """
    if method == "fork":
        import_engine()
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


@contextmanager
def started_early(run, count):
    """
    Inside, SGLang's engine gets the processes of `start_schedulers` when it starts its `count`, and they execute `run`.
    """
    if not early:
        start_schedulers(count, "spawn")
    started = [early.pop() for _ in range(count)]
    import_engine()
    from sglang.srt.entrypoints import engine

    processes = iter(started)
    readers = (reader for _, _, reader in started)

    def stand_in(target, args):  # its last argument is the writer, which the process has
        process, commands, _ = next(processes)
        log = os.readlink("/proc/self/fd/1")
        process.start = lambda: commands.send((log, dict(os.environ), run, args[:-1]))
        return process

    engine.mp = types.SimpleNamespace(
        Process=stand_in,
        Pipe=lambda duplex: (next(readers), None),
        set_start_method=lambda *_, **__: None,
    )
    allow_deterministic_backend()
    try:
        yield
    finally:
        for process, *_ in processes:  # of arguments that SGLang has refused
            process.kill()
