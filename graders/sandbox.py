"""
Programs that a model wrote, in a sandbox: the reward `code`, which judges them by tests, and the tool `python` for
agents. bubblewrap isolates them: no network, no files but the interpreter's and a small folder of their own, an empty
environment, another user, limits of time, memory, processes and output.
"""

import ast
import inspect
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from rewards import SETTINGS
from sync import reason

OUTPUT = 65536  # bytes that a program may write to its output, to its errors or to a file
PROCESSES = 16  # of a program, threads counted
PASSED, NO_MEMORY, KILLED, FAILED = 64, 65, 66, 67  # exit statuses of INIT; any other one is not the program's doing
NOBODY = "65534"  # the user of a sandbox that root starts: for root the kernel does not limit the number of processes
PATIENCE = 10  # a program may take PATIENCE * (sandbox_seconds + 1) seconds of wall time
RUNNING = threading.BoundedSemaphore(max(1, os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))

# The sandbox's first process: a shell, which sets limits that the program cannot raise, is not the program's to signal,
# and takes all processes with it when it ends. $1: seconds, $2: KiB, $3: processes or 'any', and then the program.
INIT = f"""
ulimit -t $1 && ulimit -v $2 && ulimit -f {OUTPUT // 512} && ulimit -c 0 || exit
test $3 = any || ulimit -p $3 2>&- || ulimit -u $3 || exit  # dash, or bash
shift 3
"$@"
case $? in 0) exit {PASSED};; {NO_MEMORY}) exit {NO_MEMORY};; 137) exit {KILLED};; *) exit {FAILED};; esac
"""
BUBBLE = """--unshare-all --unshare-user --disable-userns --as-pid-1 --die-with-parent --new-session --ro-bind /usr /usr
    --ro-bind-try /bin /bin --ro-bind-try /lib /lib --ro-bind-try /lib64 /lib64
    --ro-bind-try /etc/ld.so.cache /etc/ld.so.cache""".split()
OWN = ["--size", str(2**23), "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/"]  # the program's own folder


class SandboxError(ValueError):
    """A sandbox that does not start, or that something else killed: no verdict on the program. One line."""


class Run(NamedTuple):
    """What became of a program."""

    verdict: str  # 'pass': it ended with status 0; 'fail': with another; 'limit': of time, memory or output
    near_limit: bool  # so near to a limit of time or memory that another run may end with another verdict
    cpu_seconds: float  # of all its processes, the start of Python included; incomplete if wall time ran out
    output: str
    errors: str


def canonical(value):
    """A text that two values of built-in types share if they are equal and of the same types: 1 is no 1.0 or True."""
    kind = next((kind for kind in (list, tuple, dict, set, frozenset) if isinstance(value, kind)), None)
    if not kind:
        return ascii(value)
    parts = [canonical(part) for part in (value.items() if kind is dict else value)]
    return f"{kind.__name__}({', '.join(parts if kind in (list, tuple) else sorted(parts))})"


# What runs inside: standard input starts with the program and the calls whose values are wanted; the values become the
# output's last line. Status 0 without that line: the program has ended itself. posix, as os would have to be imported.
INSIDE = f"""
import posix
{inspect.getsource(canonical)}
source, calls = eval(posix.read(0, int(posix.read(0, 8))))
names = {{"__name__": "__main__"}}
try:
    exec(compile(source, "program", "exec"), names)
    if calls:
        posix.write(1, b"\\n" + canonical([eval(call, names) for call in calls]).encode())
        posix._exit(0)
except MemoryError:
    posix._exit({NO_MEMORY})
"""


def sandbox_command(python):
    """The command that runs `python` (a path) as SETTINGS say, up to its arguments. SandboxError: no bwrap."""
    limits = [str(math.ceil(SETTINGS["sandbox_seconds"])), str(SETTINGS["sandbox_memory"] * 1024)]
    if SETTINGS["sandbox"] == "none":  # any number of processes, as the kernel would count all of the user's
        return ["/bin/sh", "-c", INIT, "sh", *limits, "any", python]
    # Popen could change the user, but would then copy the page tables of this process, which may be large.
    user = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"] if os.geteuid() == 0 else []
    home, bubble = str(Path(python).parent.parent), shutil.which("bwrap")
    if not bubble:
        cure = "install it (apt-get install bubblewrap), or --sandbox=none: programs run as you, with all that is yours"
        raise SandboxError(f"programs are run by bubblewrap, and there is no bwrap here; {cure}")
    inside = [*BUBBLE, *(["--ro-bind", home, home] if home != "/usr" else []), *OWN]
    return [*user, bubble, *inside, "/bin/sh", "-c", INIT, "sh", *limits, str(PROCESSES), python]


def run_program(source, calls=(), stdin="", python="", again=False):
    """
    A Run of the Python program `source` in a sandbox, with `calls` evaluated after it; blocks. Raises SandboxError
    where the sandbox does not start or is killed.
    """
    seconds, job = SETTINGS["sandbox_seconds"], ascii((source, [*calls])).encode()
    command = sandbox_command(python or interpreter(SETTINGS["sandbox"]))
    command += ["-s", "-S", "-c", INSIDE]  # not -I, which ignores PYTHONHASHSEED
    with RUNNING, _memory_file() as given, _memory_file() as output, _memory_file() as errors:
        given.write(b"%08d" % len(job) + job + stdin.encode(errors="replace"))
        given.seek(0)
        # files, not pipes: the kernel bounds their size, and nobody has to read while the program runs
        files = dict(stdin=given, stdout=output, stderr=errors, cwd=tempfile.gettempdir())
        process = subprocess.Popen(command, env={"PYTHONHASHSEED": "0"}, start_new_session=True, **files)
        ended = _wait(process.pid, PATIENCE * (seconds + 1))
        os.killpg(process.pid, signal.SIGKILL)  # harmless if all have ended
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = code = os.waitstatus_to_exitcode(status)  # so that nobody waits for it again
        full = max(os.fstat(file.fileno()).st_size for file in (output, errors)) >= OUTPUT
        said, complaints = (os.pread(file.fileno(), OUTPUT, 0).decode(errors="replace") for file in (output, errors))
    cpu = usage.ru_utime + usage.ru_stime
    near = not ended or cpu > seconds / 2 or code == NO_MEMORY
    if ended and code not in (PASSED, NO_MEMORY, KILLED, FAILED):
        raise SandboxError(f"the sandbox itself ended with status {code}: {reason(complaints.strip() or 'killed')}")
    if code == KILLED and not near and not again:  # it killed itself, and will again; or the system was short of memory
        return run_program(source, calls, stdin, python, again=True)
    limited = not ended or full or cpu >= seconds or code in (NO_MEMORY, KILLED)
    verdict = "limit" if limited else "pass" if code == PASSED else "fail"
    return Run(verdict, near or code == KILLED, cpu, said, complaints)


def _memory_file():
    return open(os.memfd_create("sandbox"), "r+b", buffering=0)


def _wait(pid, seconds):
    """Whether the process ends within so many seconds. It stays a zombie, so no other process can get its id."""
    with open(os.pidfd_open(pid), "rb", buffering=0) as ends:
        poll = select.poll()
        poll.register(ends, select.POLLIN)
        return bool(poll.poll(seconds * 1000))


@lru_cache
def interpreter(sandbox):
    """
    The Python that programs run with: this one, or the system's where a sandbox's user cannot read this one (as below
    /root). Says which. Raises SandboxError with a cure.
    """
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        try:
            run = run_program("import sys; print(sys.version.split()[0])", python=python)
        except (SandboxError, OSError) as error:
            problem = error
            continue
        if run.verdict == "pass":
            if os.environ.get("RANK", "0") == "0":
                print(f"programs run in sandbox={sandbox!r} with {python}, version {run.output.strip()}", flush=True)
            return python
        problem = run.errors
    cure = (
        "bwrap 0.8 needs user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns"
        "; docker --security-opt seccomp=unconfined) and, for root, setpriv and a Python that all users can read; "
        "or --sandbox=none: programs run as you, with all that is yours"
    )
    raise SandboxError(f"no program starts in sandbox={sandbox!r} ({reason(problem)}); {cure}")


@lru_cache(maxsize=1024)
def tests_of(answer):
    """
    [(calls, stdin, the text that is expected)] of a data set's tests: lines `assert call == literal` or a list of them
    (MBPP), or JSON {"inputs": [..], "outputs": [..]} of standard input and output (APPS). Raises ValueError.
    """
    if answer.lstrip().startswith("{"):
        tests = json.loads(answer)
        fits = tests.keys() == {"inputs", "outputs"} and len(tests["inputs"]) == len(tests["outputs"]) > 0
        if not fits or not all(isinstance(text, str) for text in tests["inputs"] + tests["outputs"]):
            raise ValueError(f"answer {answer[:40]!r} wants inputs and outputs alone, as many texts of each")
        return [((), given, _without_margins(wanted)) for given, wanted in zip(tests["inputs"], tests["outputs"])]
    calls, wanted = [], []
    try:
        if answer.lstrip().startswith("["):
            answer = "\n".join(ast.literal_eval(answer))
        for line in ast.parse(answer).body:
            match line:
                case ast.Assert(test=ast.Compare(left=call, ops=[ast.Eq()], comparators=[literal])):
                    calls.append(ast.unparse(call))
                    wanted.append(ast.literal_eval(literal))
                case _:
                    raise ValueError
    except (ValueError, SyntaxError, TypeError) as error:
        number = getattr(error, "lineno", 0) or line.lineno
        wrong = answer.splitlines()[number - 1][:80]
        raise ValueError(f"answer, line {number}: {wrong!r} is not 'assert call == literal'") from None
    if not calls:
        raise ValueError("answer has no test, such as 'assert f(1) == 2'")
    return [(calls, "", canonical(wanted))]


def _without_margins(text):
    return "\n".join(map(str.rstrip, text.strip().splitlines()))


def code(prompt, response, answer):
    """
    1.0 if the response's program passes the answer's tests (tests_of): its last ```python fence; without one the whole
    response, behind the prompt if it begins with an indent (a function's body, as in HumanEval).

    What is expected never enters the sandbox: the calls do, and what comes back is compared outside, as text. So a
    program may patch what it likes, end itself or forge that text: it passes only with values that it had to know.
    White space at the ends of an output and of its lines does not count. Two runs of a program may differ if it uses a
    clock, random numbers or addresses, or comes near to a limit.
    """
    _, fence, program = response.rpartition("```python")
    program = program.partition("```")[0]
    if not fence and response[:1] in (" ", "\t"):
        program = prompt + program
    runs = []
    for calls, stdin, wanted in tests_of(answer):
        runs.append(run := run_program(program, calls, stdin))
        said = run.output.rpartition("\n")[2] if calls else _without_margins(run.output)
        if not (passed := run.verdict == "pass" and said == wanted):
            break
    verdict = "fail" if run.verdict == "pass" and not passed else run.verdict
    seconds, near = math.fsum(run.cpu_seconds for run in runs), any(run.near_limit for run in runs)
    return float(passed), dict(verdict=verdict, cpu_seconds=round(seconds, 3), near_limit=near)


def python(code: str) -> str:
    """Runs a Python program and returns what it prints.

    Args:
        code: the program
    """
    run = run_program(code)
    return run.output + run.errors + "\nstopped: too much time, memory or output" * (run.verdict == "limit")


python.impure = True  # for episodes/chat.py: near a limit two runs may differ


code.check, code.reads = lambda: interpreter(SETTINGS["sandbox"]), tests_of
