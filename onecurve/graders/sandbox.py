"""
Programs that a model wrote, in a sandbox: the reward `code`, which judges them by tests, the tasks for it that are made
here (dataset='programs'), and the tool `python` for agents. bubblewrap isolates them: no network, no files but the
interpreter's and their own small folder, an empty environment, another user, few system calls that reach further, and
limits of time, memory, threads and output. A program is one process, which may have threads: so the kernel's limits of
a process are those of the program.
"""

import ast
import errno
import inspect
import json
import math
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from onecurve.graders.workers import CORES
from onecurve.run.own import CONFIG
from rewards import Reward
from sync import content_hash, reason

MOST_MEMORY = 256  # MiB of address space of a program
OUTPUT = 65536  # bytes that a program may write to its output, to its errors or to a file
THREADS = 16  # of a program
FILES = 64  # that a program may have open; each may be a socket or a pipe, whose buffers no limit of memory counts
NO_MEMORY = 65  # exit status of INSIDE
KILLED = 128 + signal.SIGKILL  # exit status of what the kernel or somebody has killed
NOBODY = "65534"  # the user of a sandbox that root starts: for root the kernel does not limit the number of threads
PATIENCE = 10  # a program may take PATIENCE * (sandbox_seconds + 1) seconds of wall time
RUNNING = threading.BoundedSemaphore(CORES)

# A shell that sets limits, which the program cannot raise, and becomes the program: the first process of its namespace,
# so that nothing in there is left to be signalled, or stays when it ends. $1: seconds, $2: KiB, $3: threads or 'any'.
INIT = f"""
ulimit -t $1 && ulimit -v $2 && ulimit -f {OUTPUT // 512} && ulimit -n {FILES} && ulimit -c 0 || exit
test $3 = any || ulimit -p $3 2>&- || ulimit -u $3 || exit  # dash, or bash
shift 3
exec "$@"
"""
BUBBLE = """--unshare-all --unshare-user --disable-userns --as-pid-1 --die-with-parent --new-session --ro-bind /usr /usr
    --ro-bind-try /bin /bin --ro-bind-try /lib /lib --ro-bind-try /lib64 /lib64
    --ro-bind-try /etc/ld.so.cache /etc/ld.so.cache""".split()
OWN = f"--size {2**23} --tmpfs /tmp --chdir /tmp --remount-ro /".split()  # the program's own folder


# From the kernel's tables: the machine's number in seccomp's data, its calls clone, socket and socketpair, and those
# that are refused: other processes (fork, vfork); what namespaces do not part (add_key to userfaultfd, io_uring_setup
# to process_madvise, flock to listmount); memory that no limit counts (shmget to fsetxattr, memfd_secret, setxattrat;
# setsockopt, by which buffers grow; unshare and setns, by which a thread has files of its own).
TABLE = """call              x86_64     aarch64
AUDIT_ARCH        0xC000003E 0xC00000B7
clone             56         220
socket            41         198
socketpair        53         199
fork              57         -
vfork             58         -
add_key           248        217
request_key       249        218
keyctl            250        219
ptrace            101        117
process_vm_readv  310        270
process_vm_writev 311        271
kcmp              312        272
perf_event_open   298        241
bpf               321        280
userfaultfd       323        282
shmget            29         194
semget            64         190
msgget            68         186
mq_open           240        180
memfd_create      319        279
setxattr          188        5
lsetxattr         189        6
fsetxattr         190        7
setsockopt        54         208
io_uring_setup    425        425
io_uring_enter    426        426
io_uring_register 427        427
pidfd_getfd       438        438
process_madvise   440        440
memfd_secret      447        447
setxattrat        463        463
unshare           272        97
setns             308        268
flock             73         32
io_setup          206        0
inotify_add_watch 254        27
preadv2           327        286
statmount         457        457
listmount         458        458"""
CALLS = {
    machine: [int(number, 0) for number in numbers if number != "-"]
    for machine, *numbers in [*zip(*map(str.split, TABLE.splitlines()))][1:]
}
CLONE3 = 435
CLONE_FILES = 0x400
CLONE_THREAD = 0x10000
X32 = 1 << 30


def seccomp_filter(machine):
    """
    The system calls that a program may make, as bytes of Linux's struct sock_filter: (code, instructions to skip if
    true, if false, number). Raises SandboxError for a machine whose numbers are not known.
    """
    if machine not in CALLS:
        raise SandboxError(f"no list of system calls for {machine}, only for {', '.join(CALLS)}")
    kind, clone, single, pair, *refused = CALLS[machine]
    refuse, unknown, allow = ((6, 0, 0, value) for value in (0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x7FFF0000))
    load, equal, at_least, has_bits = 0x20, 0x15, 0x35, 0x45
    program = [(load, 0, 0, 4), (equal, 1, 0, kind), unknown, (load, 0, 0, 0), (at_least, 0, 1, X32), unknown]
    program += [(equal, 0, 1, CLONE3), unknown]  # its flags are in memory; where it is unknown libc takes clone
    for number in refused:
        program += [(equal, 0, 1, number), refuse]
    program += [(equal, 0, 5, clone), (load, 0, 0, 16), (has_bits, 0, 2, CLONE_THREAD), (has_bits, 0, 1, CLONE_FILES)]
    program += [allow, refuse]
    program += [(equal, 2, 0, single), (equal, 1, 0, pair), allow]
    program += [(load, 0, 0, 16), (equal, 0, 1, socket.AF_UNIX), allow, refuse]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


class SandboxError(ValueError):
    """A sandbox that does not start: no verdict on the program. One line."""


class Run(NamedTuple):
    """The outcome of a program."""

    verdict: str  # 'pass': it ended with status 0; 'fail': with another; 'limit': of time, memory or output
    near_limit: bool  # so near to a limit of time or memory that another run may end with another verdict
    cpu_seconds: float  # the start of Python included; incomplete if wall time ran out
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


def sandbox_command(config, python, rules, status):
    """
    The command that runs `python` (a path) as the config says, up to its arguments. rules, status: files of
    bubblewrap's, seccomp's program and its report of the end. SandboxError: no bwrap.
    """
    seconds = math.ceil(config["sandbox_seconds"])
    limited = ["/bin/sh", "-c", INIT, "sh", str(seconds), str(MOST_MEMORY * 1024)]
    if config["sandbox"] == "none":  # any number of processes, as the kernel would count all of the user's
        return [*limited, "any", python]
    # Popen could change the user, but would then copy the page tables of this process, which may be large.
    user = f"setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups".split() if os.geteuid() == 0 else []
    home = Path(python).parent.parent
    bubble = shutil.which("bwrap")
    if not bubble:
        cure = "install it (apt-get install bubblewrap), or --sandbox=none: programs run as you, with all that is yours"
        raise SandboxError(f"programs are run by bubblewrap, and there is no bwrap here; {cure}")
    own = [python, str(home / "lib"), str(home / "lib64")] if str(home) != "/usr" else []  # not `home`: it may be yours
    binds = [word for path in own for word in ("--ro-bind-try", path, path)]
    files = f"--seccomp {rules.fileno()} --json-status-fd {status.fileno()}".split()
    return [*user, bubble, *files, *BUBBLE, *binds, *OWN, *limited, str(THREADS), python]


def run_program(source, calls=(), stdin="", python="", again=False, config=None):
    """
    A Run of the Python program `source` in a sandbox, with `calls` evaluated after it; blocks. A program that is killed
    without a limit near runs again, once: the system may be short of memory. Raises SandboxError where no sandbox
    starts. config: by default that of the run that calls the user's function.
    """
    config = config or CONFIG.get()
    seconds = config["sandbox_seconds"]
    python = python or interpreter(config["sandbox"], seconds)
    job = ascii((source, [*calls])).encode()
    job = b"%08d" % len(job) + job + stdin.encode(errors="replace")
    rules = seccomp_filter(os.uname().machine) if config["sandbox"] == "bwrap" else b""
    # files, not pipes: the kernel bounds their size, and nobody has to read while the program runs
    with RUNNING, ExitStack() as stack:
        contents = (job, b"", b"", rules, b"")  # the last two are bubblewrap's: the filter, and what it says of the end
        given, output, errors, *bubbles = (stack.enter_context(_memory_file(content)) for content in contents)
        command = [*sandbox_command(config, python, *bubbles), "-s", "-S", "-c", INSIDE]  # -I ignores PYTHONHASHSEED
        files = dict(stdin=given, stdout=output, stderr=errors, cwd=tempfile.gettempdir())
        files["pass_fds"] = [file.fileno() for file in bubbles if rules]
        process = subprocess.Popen(command, env={"PYTHONHASHSEED": "0"}, start_new_session=True, **files)
        ended = _wait(process.pid, PATIENCE * (seconds + 1))
        os.killpg(process.pid, signal.SIGKILL)  # harmless if all have ended
        _, wait_status, usage = os.wait4(process.pid, 0)
        process.returncode = code = os.waitstatus_to_exitcode(wait_status)  # so that nobody waits for it again
        texts = [os.pread(file.fileno(), OUTPUT, 0) for file in (output, errors, bubbles[1])]
    said, complaints, told = (text.decode(errors="replace") for text in texts)
    full = max(map(len, texts[:2])) >= OUTPUT
    cpu = usage.ru_utime + usage.ru_stime
    own = re.search(r'"exit-code": (\d+)', told)  # the program's, and not bubblewrap's
    foreign = bool(rules) and not own
    if ended and foreign and code >= 0 and code != KILLED:  # which bubblewrap is, too, while it makes the sandbox
        raise SandboxError(f"the sandbox itself ended with status {code}: {reason(complaints.strip() or 'no word')}")
    code = int(own[1]) if own else 128 - code if code < 0 else code  # as a shell says it
    killed = code == KILLED or foreign
    near = not ended or cpu > seconds / 2 or code == NO_MEMORY
    if killed and not near and not again:
        return run_program(source, calls, stdin, python, again=True, config=config)
    limited = killed or full or cpu >= seconds or code == NO_MEMORY
    return Run("limit" if limited else "fail" if code else "pass", near or killed, cpu, said, complaints)


def _memory_file(content):
    """A file in memory, to be read from its beginning."""
    file = open(os.memfd_create("sandbox"), "r+b", buffering=0)
    file.write(content)
    file.seek(0)
    return file


def _wait(pid, seconds):
    """Whether the process ends within `seconds`. It stays a zombie, so no other process can get its id."""
    with open(os.pidfd_open(pid), "rb", buffering=0) as ends:
        poll = select.poll()
        poll.register(ends, select.POLLIN)
        return bool(poll.poll(seconds * 1000))


@lru_cache
def interpreter(sandbox, seconds):
    """
    The Python that programs run with: this one, or the system's where a sandbox's user cannot read this one (as below
    /root). Says which. Raises SandboxError with a cure. sandbox, seconds: the config's.
    """
    config = dict(sandbox=sandbox, sandbox_seconds=seconds)
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        try:
            run = run_program("import sys; print(sys.version.split()[0])", python=python, config=config)
        except (SandboxError, OSError) as error:
            problem = error
            continue
        if run.verdict == "pass":
            if os.environ.get("RANK", "0") == "0":
                print(f"programs run in sandbox={sandbox!r} with {python}, version {run.output.strip()}", flush=True)
            return python
        problem = run.errors or run.verdict
    raise SandboxError(
        f"no program starts in sandbox={sandbox!r} ({reason(problem)}); bwrap 0.8 needs user namespaces (sysctl "
        "user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns; docker --security-opt "
        "seccomp=unconfined) and, for root, setpriv and a Python that all users can read; "
        "or --sandbox=none: programs run as you, with all that is yours"
    )


@lru_cache(maxsize=1024)
def tests_of(answer):
    """
    [(calls, stdin, the text that is expected)] of a data set's tests: lines `assert call == literal` or a list of them
    (MBPP), or JSON {"inputs": [..], "outputs": [..]} of standard input and output (APPS). Raises ValueError.
    """
    if answer.lstrip().startswith("{"):
        try:
            tests = json.loads(answer)
        except RecursionError:
            tests = {}
        given, wanted = (tests.get(key) for key in ("inputs", "outputs"))
        fits = len(tests) == 2 and type(given) is type(wanted) is list and len(given) == len(wanted) > 0
        if not fits or not all(isinstance(text, str) for text in given + wanted):
            raise ValueError(f"answer {answer[:40]!r} wants inputs and outputs alone, as many texts of each")
        return [((), text, _without_margins(other)) for text, other in zip(given, wanted)]
    calls = []
    wanted = []
    line = None
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
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        number = getattr(error, "lineno", None) or getattr(line, "lineno", 1)
        wrong = "".join(answer.splitlines()[number - 1 : number])[:80]
        raise ValueError(f"answer, line {number}: {wrong!r} is not 'assert call == literal'") from None
    if not calls:
        raise ValueError("answer has no test, such as 'assert f(1) == 2'")
    return [(calls, "", canonical(wanted))]


def _without_margins(text):
    return "\n".join(map(str.rstrip, text.strip().splitlines()))


def code(prompt, response, answer, config=None):
    """
    1.0 if the response's program passes the answer's tests (tests_of): its last ```python fence; without one the whole
    response, behind the prompt if it begins with an indent (a function's body, as in HumanEval).

    The expected values never enter the sandbox: the calls do, and their values are compared outside, as text. So a
    program may patch what it likes, end itself or forge that text: it passes only with values that it had to know.
    White space at the ends of an output and of its lines does not count. Two runs of a program may differ if it uses a
    clock, random numbers or addresses, or comes near to a limit. config: as in `run_program`.
    """
    _, fence, program = response.rpartition("```python")
    program = program.partition("```")[0]
    if not fence and response[:1] in (" ", "\t"):
        program = prompt + program
    runs = []
    for calls, stdin, wanted in tests_of(answer):
        runs.append(run := run_program(program, calls, stdin, config=config))
        said = run.output.rpartition("\n")[2] if calls else _without_margins(run.output)
        if not (passed := run.verdict == "pass" and said == wanted):
            break
    verdict = "fail" if run.verdict == "pass" and not passed else run.verdict
    seconds = math.fsum(run.cpu_seconds for run in runs)
    near = any(run.near_limit for run in runs)
    return float(passed), dict(verdict=verdict, cpu_seconds=round(seconds, 3), near_limit=near)


def programs():
    """
    Rows {"prompt": "plus 13, times 4:", "answer": tests, "program": "def f(x):return(x+13)*4"} of all pairs of steps
    with numbers from 2 to 19. Of the programs that need parentheses, about every other one lacks them.
    """
    words = {"+": "plus", "-": "minus", "*": "times"}
    rows = []
    for first, a, second, b in product(words, range(2, 20), words, range(2, 20)):
        prompt = f"{words[first]} {a}, {words[second]} {b}:"
        careful = f"(x{first}{a}){second}{b}"
        careless = int(content_hash(prompt), 16) % 2 or "*" not in second or "*" in first
        value = eval(f"lambda x: {careful}")
        tests = "\n".join(f"assert f({x}) == {value(x)}" for x in (-7, 1, 10))
        program = "def f(x):return" + (f" x{first}{a}{second}{b}" if careless else careful)
        rows.append(dict(prompt=prompt, answer=tests, program=program))
    return rows


def python(code: str) -> str:
    """Runs a Python program and returns what it prints.

    Args:
        code: the program
    """
    run = run_program(code)
    return run.output + run.errors + "\nstopped: too much time, memory or output" * (run.verdict == "limit")


python.impure = True  # for onecurve/agents/chat.py: near a limit two runs may differ


def make(config):
    """The Reward 'code'. Raises ValueError, with a cure, where no program starts."""
    interpreter(config["sandbox"], config["sandbox_seconds"])
    return Reward(partial(code, config=config), reads=tests_of, waits=True)
