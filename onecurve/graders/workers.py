"""Other people's graders in separate processes: no verdict can change another one, whatever it does."""

import functools
import inspect
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import distributions
from queue import SimpleQueue

SECONDS = 5  # CPU time that a verdict may take
MEMORY = 2**31  # bytes of address space
CORES = max(1, os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))  # for this rank


def serve(grader, seconds, memory, rules):
    """
    The work of a process: for each line of JSON, (the arguments of `grader`, its question), it prints an empty line,
    forks, so that every verdict begins in the same state, and prints a line [exit status, CPU seconds, score].
    The kernel ends a fork after `seconds` of CPU time, limits its address space to `memory` bytes and, if there are
    `rules`, a program of seccomp's, refuses system calls; one that raises gives no score.
    """
    import ctypes
    import gc
    import resource
    import struct

    grader = functools.cache(grader)
    for line in sys.stdin:
        about, question = json.loads(line)
        grade = grader(*about)
        gc.freeze()  # else each fork's collector may go through all that was imported
        print(flush=True)
        read, write = os.pipe()
        if not (child := os.fork()):
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            if rules:
                text = ctypes.create_string_buffer(rules)
                program = struct.pack("HP", len(rules) // 8, ctypes.addressof(text))  # sock_fprog
                assert ctypes.CDLL(None).prctl(22, 2, program, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
            os.dup2(2, 1)  # a text that is evaluated may print
            try:
                os.write(write, repr(float(grade(*question))).encode())
            except MemoryError:
                os.abort()  # a limit, as others that signals tell
            os._exit(0)
        os.close(write)
        _, status, used = os.wait4(child, 0)
        score = float(os.read(read, 64) or 0)
        os.close(read)
        print(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, score]), flush=True)


class Workers:
    """
    As many processes as there are cores for this rank, each with nothing else of ours. `prepare()`, a function without
    globals but json and os, returns their grader (see `serve`). name: what they run, for errors; around(): (a command
    that runs the command behind it, [] for none, the rules of `serve`).
    """

    def __init__(self, prepare, name, around=lambda: ([], b"")):
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
        around, rules = self.around()
        code = f"import functools, json, os, sys\n{inspect.getsource(serve)}"
        code += f"{inspect.getsource(self.prepare)}serve({self.prepare.__name__}(), {SECONDS}, {MEMORY}, {rules})"
        return subprocess.Popen([*around, sys.executable, "-P", "-c", code], **pipes, env=env)

    def ask(self, about, *question, again=False):
        """
        (exit status, score, notes) of grader(*about)(*question). The verdict that is noted is 'limit' if a signal ended
        it, as the kernel sends after SECONDS, and else 'pass' for status 0. If the process itself ends in the midst of
        it, another one is tried; if that ends, too, the verdict is 'limit'. Blocks; RuntimeError if the process has
        ended before.
        """
        worker = self.idle.get() or self._start()
        begun = ""
        try:
            print(json.dumps([about, question]), file=worker.stdin, flush=True)
            begun = worker.stdout.readline()
            status, seconds, score = json.loads(worker.stdout.readline())
        except (OSError, ValueError) as error:
            self.idle.put(None)
            ended = worker.wait()
            if not begun:
                raise RuntimeError(f"a process of {self.name} ended with status {ended}; resume the run") from error
            if not again:
                return self.ask(about, *question, again=True)
            status, seconds, score = -signal.SIGKILL, SECONDS, 0.0
        else:
            self.idle.put(worker)
        verdict = "limit" if status < 0 else "fail" if status else "pass"
        return status, score, dict(verdict=verdict, near_limit=status < 0 or seconds > SECONDS / 2)


def needs(package, version, group):
    """Raises ValueError, with the cure, unless this version is there: another one may judge otherwise."""
    found = next((x.version for x in distributions(name=package)), "none")
    if found != version:
        raise ValueError(f"needs {package} {version}, and there is {found}; install it by `uv sync --group {group}`")
