"""
Runs train_grpo.py again and again, but imports the libraries only once: a process that has them forks itself for each
run, which saves 5 to 10 s of each. From the fork on it is as if the user had typed the command. `run_warm` in
tools/runs.py talks to it, over a connection for each run: a line of JSON in, the run's process id and then its exit
status out. With several ranks it does what torchrun would: each is such a process, and when one fails the others end,
too. It ends when its input does.

On a card SGLang's schedulers would be spawned by the run, and import all of it again: here they are forks, too, made
before the run has a thread, that wait until the run wants them.
"""

import atexit
import json
import multiprocessing
import os
import resource
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

os.environ["JOBLIB_MULTIPROCESSING"] = "0"  # as train_grpo.py, before transformers imports joblib by the way
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # a thread that spins while it waits takes the core from another run
ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # transformers has an optional `kernels`: let it be ours

from onecurve.run.start import lean_imports  # noqa: E402
from onecurve.sglang.start import import_engine  # noqa: E402

import_engine()
with lean_imports():
    import setproctitle
    import sglang.srt.model_executor.model_runner  # noqa: F401
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    from numba.core.dispatcher import Dispatcher
    from sglang.srt.environ import envs
    from sglang.srt.managers import scheduler

    import train_grpo  # noqa: F401
    from onecurve.cpu import loops

OURS = {path.stem for path in ROOT.iterdir()}
LOOPS = [x for x in vars(loops).values() if isinstance(x, Dispatcher)]


def load_loops():
    """The loops that any process has compiled so far: each run would load them from their files."""
    for loop in LOOPS:
        for signature, *_ in loop._cache._cache_file._load_index() if hasattr(loop._cache, "_cache_file") else ():
            if signature not in loop.overloads:
                loop.compile(signature)


def leave(status):
    """
    Ends this process with what was given to sys.exit, but without Python's own last steps: they take all modules apart,
    and so would copy every page that this process shares with the one that forked it, which takes a tenth of a run.
    Whether those steps go well is seen where runs are launched as a user launches them.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    if isinstance(status, str):
        print(status, file=sys.stderr)
    sys.stdout.flush()
    os._exit(1 if isinstance(status, str) else status or 0)


def wait_for_job(orders, jobs):
    """What the fork does: it waits for the target of one process that was to be spawned, and runs it."""
    jobs.close()
    try:
        output, environment, target, args = orders.recv()
    except EOFError:  # the run has ended without it
        return
    orders.send("received")
    for fd in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), fd)
    setproctitle.getproctitle()  # it finds where the title is by the environment, as long as that is unchanged
    os.environ.clear()
    os.environ.update(environment)
    target(*args)


def fork_for_spawn(number):
    """Forks so many processes now, which take the place of the next ones that are to be spawned."""
    fork, spawned = multiprocessing.get_context("fork"), multiprocessing.context.SpawnProcess
    own, ready = spawned._Popen, []
    for _ in range(number):
        orders, jobs = fork.Pipe()
        process = fork.Process(target=wait_for_job, args=(orders, jobs))
        process.start()
        orders.close()
        atexit.register(jobs.close)
        ready.append((process, jobs))

    def take(wanted):
        process, jobs = ready.pop(0)
        if not ready:
            spawned._Popen = staticmethod(own)
        jobs.send((os.readlink("/proc/self/fd/1"), dict(os.environ), wanted._target, wanted._args))
        jobs.recv()  # a thread hands it the pipes among args, and would say so if the run killed it before it has them
        return process._popen

    spawned._Popen = staticmethod(take)


def schedulers_of(command):
    """How many an engine of the run has: one for each of its ranks."""
    said = [flag.partition("=")[2] for flag in command if flag.startswith("--rollout_tp=")]
    return int([1, *said][-1])


def run(said):
    """What the fork for a run does: it forks the ranks, and waits for them."""
    job = json.loads(said.readline())
    children = []
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    for env in job["ranks"]:
        if not (child := os.fork()):
            rank(job, env, output)
        children.append(child)
    os.close(output)
    said.write(f"{children[0]}\n")
    left, status = set(children), 0
    while left:
        child, ended = os.wait()
        left -= {child}
        if ended and not status:
            status = os.waitstatus_to_exitcode(ended)
            for other in left:
                os.kill(other, signal.SIGKILL)
    said.write(f"{status}\n")


def rank(job, env, output):
    """What the fork for a rank does: it becomes the script."""
    if "--device=cuda" in job["command"]:
        fork_for_spawn(schedulers_of(job["command"]))
    os.environ.update(env)
    tempfile.tempdir = None  # as if nothing had asked for it under another TMPDIR
    scheduler.TEST_RETRACT = envs.SGLANG_TEST_RETRACT.get()  # it has read that at its import
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if job["file_size"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_size"], job["file_size"]))
    script, *sys.argv[1:] = job["command"]
    sys.argv[0] = script
    folder = Path(script).resolve().parent
    sys.path[0] = str(folder)
    if not folder.is_relative_to(ROOT):  # it has modules of its own
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            del sys.modules[name]
    status = None
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as e:
        status = e.code
    leave(status)


server = socket.socket(fileno=int(sys.argv.pop()))
while server in select.select([server, sys.stdin], [], [])[0]:
    connection, _ = server.accept()
    load_loops()
    with suppress(ChildProcessError):  # there is none
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    if not os.fork():
        server.close()
        with connection, connection.makefile("rw", buffering=1) as said:
            run(said)
        os._exit(0)
    connection.close()
