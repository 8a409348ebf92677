"""Other people's graders in processes of their own: what one verdict does or takes changes no other."""

import functools
import inspect
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import distributions
from queue import SimpleQueue

SECONDS = 5.0  # CPU time that a verdict may take
CORES = max(1, os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))  # for this rank


def serve(grader, seconds):
    """
    What a process does: for each line of JSON, (what a grader is made of, once; what it is asked), it forks, so that
    every verdict begins in the same state, and prints a line [exit status, CPU seconds, score]. The kernel ends a fork
    after so many seconds of CPU time; one that raises gives no score.
    """
    grader = functools.cache(grader)
    for line in sys.stdin:
        about, question = json.loads(line)
        grade = grader(*about)
        read, write = os.pipe()
        if not (child := os.fork()):
            signal.setitimer(signal.ITIMER_PROF, seconds)
            os.dup2(2, 1)  # a text that is evaluated may print
            os.write(write, repr(float(grade(*question))).encode())
            os._exit(0)
        os.close(write)
        _, status, used = os.wait4(child, 0)
        score = os.read(read, 64).decode()
        os.close(read)
        print(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, score]), flush=True)


class Workers:
    """
    As many processes as there are cores for this rank, each with nothing else of ours. `prepare()`, a function without
    globals but json and os, returns their grader (see `serve`). name: what they run, for errors; around(): a command
    that runs the command behind it, [] for none.
    """

    def __init__(self, prepare, name, around=list):
        self.prepare = prepare
        self.name = name
        self.around = around
        self.idle = SimpleQueue()  # None: a place for one that has not been started
        for _ in range(CORES):
            self.idle.put(None)

    def _start(self):
        """A process that ends with its standard input, and so with this one, however that ends."""
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        env = os.environ | dict(PYTHONHASHSEED="0")  # sets of strings have an order by their hashes
        code = f"import functools, json, os, signal, sys\n{inspect.getsource(serve)}{inspect.getsource(self.prepare)}"
        code += f"serve({self.prepare.__name__}(), {SECONDS})"
        return subprocess.Popen([*self.around(), sys.executable, "-P", "-c", code], **pipes, env=env)

    def ask(self, about, *question):
        """
        (exit status, score, notes) of grader(*about)(*question). The verdict that is noted is 'limit' after SECONDS,
        and else 'pass' for status 0. Blocks; RuntimeError if the process has ended.
        """
        worker = self.idle.get() or self._start()
        try:
            print(json.dumps([about, question]), file=worker.stdin, flush=True)
            status, seconds, score = json.loads(worker.stdout.readline())
        except (OSError, ValueError) as error:
            self.idle.put(None)
            raise RuntimeError(f"a process of {self.name} ended with status {worker.wait()}; resume the run") from error
        self.idle.put(worker)
        limited = status == -signal.SIGPROF
        verdict = "limit" if limited else "fail" if status else "pass"
        return status, float(score or 0), dict(verdict=verdict, near_limit=limited or seconds > SECONDS / 2)


def needs(package, version, group):
    """Raises ValueError, with the cure, unless this version is there: another one may judge otherwise."""
    found = next((x.version for x in distributions(name=package)), "none")
    if found != version:
        raise ValueError(f"needs {package} {version}, and there is {found}; install it by `uv sync --group {group}`")
