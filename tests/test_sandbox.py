"""
Programs in the sandbox: attacks, each beside a control in which it succeeds, so that it is the sandbox that holds it;
verdicts and limits; and what a judge that keeps its answers to itself makes of programs that tamper with it.

    pytest tests/test_sandbox.py
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from conftest import error_of_run, finish, read_groups
from referee_others import write_rows
from trials import failing_sandbox, lines, processes_of, replay_of

from onecurve.graders import sandbox
from onecurve.graders.sandbox import SandboxError, canonical, code, programs, run_program
from onecurve.run.own import CONFIG, run_of
from rewards import load_reward
from train_grpo import DEFAULTS

pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="install bubblewrap")


@pytest.fixture(autouse=True)
def settings():
    """A sandbox with limits that a test need not wait for long. settings(key, value) changes the test's config."""
    config = DEFAULTS | dict(sandbox_seconds=1.0)
    with run_of(config):
        yield config.__setitem__


def finds(condition, seconds=10.0):
    """What `condition` returns as soon as it is true, or in the end."""
    until = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.01)
    return found


# ------------------------------------------------------------------------------------------------------------------
# out of the sandbox: each program prints 'out' if it gets there

ATTACKS = {
    "read a file of the system": "open('/etc/passwd').read(); print('out')",
    "read the run's folder": "open({secret!r}).read(); print('out')",
    "list the run's folder": "import os; os.listdir({folder!r}); print('out')",
    "a link out of its folder": """
import os
try:
    os.symlink({secret!r}, {name!r}); open({name!r}).read(); print('out')
finally:
    os.remove({name!r})""",
    "the environment of the trainer": "print('out' if b'PATH=' in open('/proc/{pid}/environ', 'rb').read() else '')",
    "signal the trainer": "import os; os.kill({pid}, 0); print('out')",
    "connect to the machine": "import socket; socket.create_connection(('127.0.0.1', {port}), 5); print('out')",
    "connect to a socket without a file": r"""
import socket; socket.socket(socket.AF_UNIX).connect('\0' '{name}'); print('out')""",
    "a fork bomb": """
import os, time
for child in range(64):
    if os.fork() == 0:
        time.sleep(60)
print('out')""",
    "a bomb of threads": """
import threading, time
for child in range(64):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print('out')""",
    "fill the disk": """
import os
names = [{name!r} + str(i) for i in range(200)]
try:
    for name in names:
        with open(name, 'wb') as file: file.write(bytes(60000))
    print('out')
finally:
    for name in filter(os.path.exists, names): os.remove(name)""",
    "more files than a process may have": """
import ctypes, threading
def more():
    print('out' if ctypes.CDLL(None).unshare(0x400) == 0 else '')  # a table of descriptors of this thread's own
(thread := threading.Thread(target=more)).start(); thread.join()""",
    "a lock that others see": """
import fcntl; fcntl.flock(open('/usr/bin/env'), fcntl.LOCK_EX); print('out')""",
    "another user namespace": """
import ctypes, os
if os.getuid() and open('/proc/sys/user/max_user_namespaces').read() == '0': raise OSError
print('out' if ctypes.CDLL(None).unshare(0x10000000) == 0 else '')""",
}


@pytest.fixture
def trainer():
    """A process with something in its environment."""
    process = subprocess.Popen(["sleep", "600"], env=dict(PATH=os.environ["PATH"]))
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_stays_inside_and_gets_out_without_the_sandbox(attack, trainer, settings, monkeypatch, tmp_path):
    secret = tmp_path / "secret"
    name = uuid.uuid4().hex
    secret.write_text("weights")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0" + name)
        abstract.listen()
        facts = dict(secret=str(secret), folder=str(tmp_path), pid=trainer.pid, name=name)
        program = ATTACKS[attack].format(port=server.getsockname()[1], **facts)
        held = run_program(program)
        settings("sandbox", "none")
        # of addresses: each thread takes some for its stack and its heap
        monkeypatch.setattr(sandbox, "MOST_MEMORY", 2**20)
        succeeds = run_program(program)
    assert succeeds.output.split() == ["out"], succeeds.errors
    assert held.output.split() == [], held


def test_a_program_has_threads_but_no_process_and_root_no_more(monkeypatch, settings):
    monkeypatch.setattr(sandbox, "MOST_MEMORY", 2**14)  # of addresses: each takes some for its stack and its heap
    count = "import threading, time\nn = 0\ntry:\n while n < 64:\n  "
    count += "threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); n += 1\nexcept RuntimeError: pass\n"
    run = run_program(count + "import os\nprint(os.getuid() != 0, n, os.getpid(), flush=True)\nos.fork()")
    assert run.output.split() == ["True", str(sandbox.THREADS - 1), "1"] and "not permitted" in run.errors


CALL = """
import ctypes, errno
call = ctypes.CDLL(None, use_errno=True).syscall
for number in {numbers}: print(number, errno.errorcode.get(-call(number, *6 * [-1]) and ctypes.get_errno()))
"""


def test_system_calls_that_namespaces_or_limits_do_not_hold_are_refused(settings):
    """Such as a key of the trainer's session, memory of System V, memfd, io_uring, any socket of a network."""
    _, _, single, pair, *refused = sandbox.CALLS[os.uname().machine]
    fork = {57, 58} if os.uname().machine == "x86_64" else set()
    calls = CALL.format(numbers=sorted({*refused, single, pair} - fork))
    held = dict(line.split() for line in run_program(calls).output.splitlines())
    assert len(held) == len(refused) + 2 - len(fork) and {*held.values()} == {"EPERM"}
    families = "import socket\nfor n in range(46):\n try: socket.socket(n, 2); print(n)\n except PermissionError: pass"
    assert run_program(families).output == "1\n"  # AF_UNIX
    assert "ENOSYS" in run_program(CALL.format(numbers=[435, 1 << 30])).output.splitlines()[0]  # clone3; and x32's
    settings("sandbox", "none")
    several = {"x86_64": [250, 101, 319, 188, 29], "aarch64": [219, 117, 279, 5, 194]}[os.uname().machine]
    assert "EPERM" not in run_program(CALL.format(numbers=several)).output


@pytest.mark.parametrize("whom", ["0", "os.getppid()", "1", "-1"])
def test_a_program_can_signal_only_itself_and_so_ends_no_run(whom):
    send = f"import os, signal\nfor n in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):\n os.kill({whom}, n)"
    assert run_program(send).verdict in ("fail", "pass")  # KeyboardInterrupt, or nobody there


def test_a_python_in_your_home_does_not_bring_your_home(settings):
    with tempfile.TemporaryDirectory(dir="/var/tmp") as home:
        os.chmod(home, 0o755)
        python = Path(home, "bin", "python3")
        library = Path(home, "lib")
        python.parent.mkdir()
        library.mkdir()
        shutil.copy(os.path.realpath("/usr/bin/python3"), python)
        for path in Path("/usr/lib").glob("python3*"):
            (library / path.name).symlink_to(path)
        (secret := Path(home, "id_ed25519")).write_text("key")
        look = f"import sys, json; print(sys.executable); open({str(secret)!r}).read(); print('out')"
        assert run_program(look, python=str(python)).output.split() == [str(python)]
        settings("sandbox", "none")
        assert run_program(look, python=str(python)).output.split() == [str(python), "out"]


def test_the_environment_is_empty_and_sets_have_one_order():
    see = "import os; print(sorted(os.environ)); print(hash('a'), list(map(str, {'a', 'b', 'c', 'd'})))"
    first, second = (run_program(see).output.splitlines() for _ in range(2))
    assert first[0] == "['LC_CTYPE', 'PWD', 'PYTHONHASHSEED']" and first == second


def test_the_root_cannot_be_written_and_the_own_folder_can():
    run = run_program("open('mine', 'w').write('x'); print(open('mine').read()); open('/theirs', 'w')")
    assert run.output == "x\n" and run.verdict == "fail" and "Read-only file system" in run.errors


def test_a_file_is_gone_with_its_sandbox(settings):
    name = Path("/tmp") / uuid.uuid4().hex
    write = f"open({str(name)!r}, 'w').write('x')"
    assert run_program(write).verdict == "pass" and not name.exists()
    settings("sandbox", "none")
    assert run_program(write).verdict == "pass" and name.exists()
    name.unlink()


def test_a_program_cannot_raise_its_limits():
    lower = "from resource import *\nsetrlimit(RLIMIT_CPU, (1, 1)); print('lower')\n"
    for limit in ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_CORE", "RLIMIT_NOFILE"):
        run = run_program(f"{lower}setrlimit({limit}, (2**40, 2**40)); print('higher')")
        assert run.output == "lower\n" and "not allowed to raise" in run.errors


def test_no_process_is_left(settings, monkeypatch):
    """Neither behind a program that ends nor behind one that the guard ends; without the sandbox one is."""
    thread = "import os, threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n"
    assert run_program(thread + "os._exit(0)").verdict == "pass"
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "PATIENCE", 0.4)  # of wall time, so for no program whose own end is wanted
        assert run_program(thread).verdict == "limit"
    assert finds(lambda: not descendants())
    marker = uuid.uuid4().hex
    stay = f"[sys.executable, '-c', 'import time; time.sleep(60)', {marker!r}]"
    program = f"""
import os, sys
r, w = os.pipe()
if os.fork() == 0:
    os.setsid()
    os.write(w, b".")
    os.execv(sys.executable, {stay})
os.read(r, 1)  # before, it would end with the program's group
"""
    assert run_program(program).verdict == "fail" and not processes_of(marker)
    settings("sandbox", "none")
    run_program(program)
    assert (left := finds(lambda: processes_of(marker)))
    for pid in left:
        os.kill(pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------------------------
# limits, and who is killed by whom


@pytest.mark.parametrize(
    "beyond, within, verdict, near",
    [
        ("while True: pass", "for i in range(10**5): pass", "limit", True),
        ("x = bytearray(300 * 2**20)", "x = bytearray(100 * 2**20)", "limit", True),
        ("import os; os.fork()", "import threading; threading.Thread(target=print).start()", "fail", False),
        ("while True: print('x' * 99)", "for i in range(99): print('x' * 99)", "limit", False),
        ("import os\nwhile True: os.write(2, b'x' * 9999)", "import os; os.write(2, b'x' * 9999)", "limit", False),
        ("open('x', 'wb').write(bytes(99999))", "open('x', 'wb').write(bytes(9999))", "fail", False),
        ("import os; os._exit(137)", "import os; os.kill(1, 9)", "limit", True),
        ("import ctypes; ctypes.string_at(0)", "import ctypes", "fail", False),
        ("raise SystemExit(3)", "raise SystemExit(0)", "fail", False),
        ("x = [", "x = []", "fail", False),
        ("x = '\ud800'; print(x)", "x = '\ufffd'; print(x)", "fail", False),
    ],
)
def test_verdicts(beyond, within, verdict, near):
    over = run_program(beyond)
    control = run_program(within)
    assert (over.verdict, over.near_limit) == (verdict, near), over.errors
    assert (control.verdict, control.near_limit) == ("pass", False), control.errors


def test_waiting_is_ended_and_is_a_limit(monkeypatch):
    assert run_program("import time; time.sleep(0.5)").verdict == "pass"
    monkeypatch.setattr(sandbox, "PATIENCE", 0.1)
    run = run_program("import time; time.sleep(60)")
    assert run.verdict == "limit" and run.near_limit


def test_more_than_half_of_the_time_is_near_the_limit(settings):
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    assert not run_program(busy).near_limit
    settings("sandbox_seconds", 0.5)
    assert run_program(busy)[:2] == ("pass", True)
    settings("sandbox_seconds", 0.2)  # less than the whole second that the kernel counts by
    assert run_program(busy)[:2] == ("limit", True)


def killed_in(program, *which):
    """The Run of a program of which somebody kills the sandbox (0) or the program's own process (1), each time anew."""
    sandbox.interpreter("bwrap", 1.0)
    killed = []
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(copy_context().run, run_program, program)
        for i in which:
            tree = finds(lambda: len(x := descendants()) == 2 and not {*killed} & {*x} and x)
            killed += tree
            os.kill(tree[i], signal.SIGKILL)
        return future.result()


def descendants():
    """This process's sandbox: bwrap and the program; as many as there are yet."""
    parents = {}
    chain = [os.getpid()]
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            other = b"--seccomp" not in (path.parent / "cmdline").read_bytes()
            if other and f" {os.getpid()} " in path.read_text()[:60]:
                continue  # a child that starts runs, or a worker of Reasoning Gym in its own bwrap
            parents[int(path.read_text().rpartition(")")[2].split()[1])] = int(path.parent.name)
    while chain[-1] in parents:
        chain.append(parents[chain[-1]])
    return chain[1:]


@pytest.mark.parametrize("which", [0, 1])
def test_a_program_killed_from_outside_runs_again_but_once(which):
    waits = "import time; time.sleep(1.5); print('done')"
    assert killed_in(waits, which)[::3] == ("pass", "done\n")
    assert killed_in(waits, which, which)[:2] == ("limit", True)


def test_a_sandbox_that_is_killed_before_it_is_made_runs_again(monkeypatch):
    killed, refused = (["/bin/sh", "-c", f"exit {code}"] for code in (137, 1))  # as bubblewrap ends, with no word
    commands = [killed, killed]
    made = sandbox.sandbox_command
    monkeypatch.setattr(sandbox, "sandbox_command", lambda *args: commands.pop() if commands else made(*args))
    assert run_program("print(1)")[:2] == ("limit", True) and not commands
    commands.append(killed)
    assert run_program("print(1)")[::3] == ("pass", "1\n") and not commands
    commands.append(refused)
    with pytest.raises(SandboxError, match="status 1"):
        run_program("print(1)")


def test_a_sandbox_that_does_not_start_is_an_error(monkeypatch):
    sandbox.interpreter("bwrap", 1.0)
    monkeypatch.setattr(sandbox, "OWN", [*sandbox.OWN, "--no-such-option"])
    with pytest.raises(SandboxError, match="status 1: bwrap: Unknown option --no-such-option"):
        run_program("print(1)")


def test_as_many_programs_run_at_once_as_there_are_cores(monkeypatch):
    running = []
    most = []
    wait = sandbox._wait
    lock = threading.Lock()

    def counted(pid, seconds):
        with lock:
            running.append(pid)
            most.append(len(running))
        ended = wait(pid, seconds)
        running.remove(pid)
        return ended

    monkeypatch.setattr(sandbox, "_wait", counted)
    with ThreadPoolExecutor(16) as pool:
        runs = list(pool.map(partial(run_program, config=CONFIG.get()), [f"print({i})" for i in range(16)]))
    assert [run.output for run in runs] == [f"{i}\n" for i in range(16)]
    assert max(most) == os.cpu_count()


# ------------------------------------------------------------------------------------------------------------------
# the judge

SQUARES = "assert f(2) == 4\nassert f(3) == 9"
TAMPERS = {
    "leaves": "import sys; sys.exit(0)",
    "leaves at once": "import os; os._exit(0)",
    "leaves when called": "import os\ndef f(x): os._exit(0)",
    "equal to all": "class Yes:\n def __eq__(self, other): return True\ndef f(x): return Yes()",
    "ends well": "import atexit, os; atexit.register(os._exit, 0)",
    "hides errors": "import os, sys; sys.excepthook = lambda *error: os._exit(0)",
    "no errors": "import sys\nsys.settrace(lambda *a: sys.exit(0))\ndef f(x): return 0",
    "another judge": """
import builtins, os, sys
frame = sys._getframe()
while frame:
    for name in ('canonical', 'eval', 'ascii'): frame.f_globals[name] = lambda *a: 'True'
    frame = frame.f_back
def f(x): sys.exit(0)""",
    "says so on every channel": r"""
import os
for fd in range(64):
    for said in (b'pass', b'True', b'1.0', b'\nlist(True, True)', b'\nlist()'):
        try: os.write(fd, said)
        except OSError: pass
os._exit(0)""",
}


@pytest.mark.parametrize("tamper", TAMPERS)
def test_tampering_with_the_judge_gains_nothing(tamper):
    """The control judges by the exit status of the program's own process, as is often done, and is deceived."""
    assert code("", TAMPERS[tamper], SQUARES)[0] == 0.0
    assert run_program(f"{TAMPERS[tamper]}\n{SQUARES}").verdict == "pass"


def test_what_is_expected_is_nowhere_in_the_sandbox():
    """The program looks into all objects, frames, its input and /proc, and finds it where the tests run beside it."""
    look = r"""
import gc, os, re, sys
def f(x):
    texts, frame = [], sys._getframe()
    while frame:
        texts += [repr(frame.f_locals), repr(frame.f_globals), repr(frame.f_code.co_consts)]
        frame = frame.f_back
    texts += [repr(x) for x in gc.get_objects() if type(x) in (list, tuple, dict)]
    os.lseek(0, 0, 0)
    texts += [os.read(fd, 99999).decode() for fd in (0,)] + sys.orig_argv
    return ''.join(re.findall('secret' + '-[0-9]{4}', ''.join(texts))[:1])
"""
    test = "assert f(2) == 'secret-7341'"
    assert code("", look, test)[0] == 0.0
    assert code("", look + "f = lambda x: 'secret-7341'", test)[0] == 1.0
    assert run_program(f"{look}\n{test}").verdict == "pass"


@pytest.mark.parametrize(
    "value", ["1", "'1'", "[1, 2]", "{1: (2, 'a')}", "{3, 1, 2}", "1.5", "None", "'\\u00e9\\n'", "-2"]
)
def test_values_are_compared_with_their_types(value):
    others = {"1", "1.0", "True", "'1'", "[1, 2]", "(1, 2)", "{1: [2, 'a']}", "{1: (2, 'a')}", "{3, 1, 2}", "'None'"}
    assert code("", f"def f(): return {value}", f"assert f() == {value}")[0] == 1.0
    for other in sorted(others - {value}):
        assert canonical(eval(other)) != canonical(eval(value))
    assert canonical({"b": {3, 1}, "a": 0}) == canonical({"a": 0, "b": {1, 3}})  # no order where there is none


@pytest.mark.parametrize(
    "prompt, response, passes",
    [
        ("", "def f(x): return x * x", True),
        ("", "So:\n```python\ndef f(x): return 0\n```\nno:\n```python\ndef f(x): return x * x\n```\nDone.", True),
        ("", "```python\ndef f(x): return x * x\n```\nor\n```python\ndef f(x): return 0\n```", False),
        ("", "```python\ndef f(x): return x * x", True),  # it was cut
        ("def f(x):\n", "    return x * x", True),
        ("def f(x):\n", "def f(x): return x * x", True),
        ("def f(x):\n", "return x * x", False),
        ("", "def f(x): return x * x\nprint('list(4, 5)')", True),
        ("", "", False),
    ],
)
def test_which_part_of_a_response_is_the_program(prompt, response, passes):
    value, notes = code(prompt, response, SQUARES)
    assert value == passes and notes["verdict"] == ("pass" if passes else "fail") and not notes["near_limit"]


def test_input_and_output():
    tests = json.dumps(dict(inputs=["2\n", "3\n"], outputs=["4\n", "9"]))
    assert code("", "x = int(input())\nprint(x * x, end=' \\n\\n')", tests)[0] == 1.0
    assert code("", "import sys\nx = int(sys.stdin.read())\nprint(x * x)\nsys.stderr.write('!')", tests)[0] == 1.0
    assert code("", "input(); print(4)", tests)[0] == 0.0  # right once
    assert code("", "while True: pass", tests)[1]["verdict"] == "limit"


@pytest.mark.parametrize(
    "answer, problem",
    {
        "assert f(1) == 2\nassert g(f(1)) == f(2)": "line 2: 'assert g(f(1)) == f(2)' is not",
        "assert f(1)": "line 1",
        "import math": "line 1",
        "assert f(1) == 2 == 2": "line 1",
        "assert f(1) = 2": "line 1",
        "42": "line 1",
        "": "no test",
        '{"inputs": ["1"]}': "inputs and outputs",
        '{"inputs": ["1"], "outputs": []}': "as many",
        '{"inputs": [[1]], "outputs": ["1"]}': "texts",
        '{"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}': "alone",
        '{"inputs": ': "Expecting value",
        '{"inputs": 5, "outputs": 5}': "as many",
        '{"a":' * 99999: "as many",
        "\0": "line 1",
        "[['assert f(1) == 2']]": "line 1",
        "[" * 99999: "line 1",
        f"assert f({'f(' * 5000}1{')' * 5000}) == 1": "line 1",
    }.items(),
)
def test_an_answer_without_tests_is_refused(answer, problem):
    with pytest.raises(ValueError) as error:
        code("", "def f(x): return 2", answer)
    assert problem in str(error.value)


def test_a_list_of_asserts_is_read():
    assert sandbox.tests_of(repr(SQUARES.splitlines())) == sandbox.tests_of(SQUARES)


def test_rewards_of_programs_have_notes_and_are_summed(settings):
    reward = load_reward("code + 0.5*exact", DEFAULTS)
    value, notes = reward("", "def f(x): return x*x", SQUARES)
    assert value == 1.0 and notes["code"]["verdict"] == "pass" and notes["code"]["cpu_seconds"] > 0


def test_a_users_reward_runs_programs_with_the_limits_of_its_run(tmp_path):
    (tmp_path / "mine.py").write_text("""
from onecurve.graders.sandbox import run_program
def f(p, r, a):
    return run_program(r).verdict == a
""")
    busy = "import time\nwhile time.process_time() < 1.5: pass"
    for seconds, verdict in ((1.0, "limit"), (9.0, "pass")):
        reward = load_reward(f"{tmp_path}/mine.py:f", DEFAULTS | dict(sandbox_seconds=seconds))
        assert reward("", busy, verdict)[0] == 1.0


def test_what_is_missing_is_told_in_one_line_at_the_start(monkeypatch, refusal):
    def why():
        sandbox.interpreter.cache_clear()
        line = refusal(load_reward, "code", DEFAULTS)
        sandbox.interpreter.cache_clear()
        assert "--sandbox=none" in line
        return line

    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "BUBBLE", ["--no-user-namespaces"])
        assert re.search("Unknown option.*user.max_user_namespaces", why())
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    assert "apt-get install bubblewrap" in why()
    assert load_reward("code", DEFAULTS | dict(sandbox="none"))("", "def f(x): return x*x", SQUARES)[0] == 1.0


def test_the_tool_says_what_is_printed_and_what_is_raised():
    assert sandbox.python("print(6 * 7)") == "42\n"
    assert sandbox.python("print(1); 1/0").startswith("1\nTraceback") and "division by zero" in sandbox.python("1/0")
    assert sandbox.python("while True: pass").endswith("stopped: too much time, memory or output")


def test_programs_of_the_small_task_are_right_or_careless():
    rows = programs()
    right = 0
    for row in rows:
        [(calls, _, wanted)] = sandbox.tests_of(row["answer"])
        names = {}
        exec(row["program"], names)
        right += canonical([eval(call, names) for call in calls]) == wanted
    assert len(rows) == len({row["prompt"] for row in rows}) == 2916
    assert 0.85 < right / len(rows) < 0.92  # two in nine need parentheses, half of those are without


def test_the_interpreter_is_one_that_the_sandbox_can_read(capsys):
    sandbox.interpreter.cache_clear()
    assert sandbox.interpreter("bwrap", 1.0) in (os.path.realpath(sys.executable), "/usr/bin/python3")
    assert "programs run in sandbox='bwrap' with /" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------------
# whole runs


@pytest.mark.in_turn
def test_runs_judged_by_tests_have_one_ledger_though_sandboxes_fail(tmp_path):
    """
    Undisturbed; with a sandbox that is killed, stopped by one that does not start, and resumed by two trainers and two
    engines with other batches and no shared prefixes; and from the rollout files, where no program runs.
    """
    rows = []
    for op, n in product("+-*", range(2, 10)):
        calls = "\n".join(f"assert f({x}) == {eval(f'{x}{op}{n}')}" for x in (-3, 1, 7))
        rows.append(dict(prompt=f"{op}{n}:", answer=calls, program=f"f=lambda x:x{op}{n}"))
    write_rows(tmp_path / "rows.jsonl", rows)
    data = f"--dataset={tmp_path}/rows.jsonl --eval_size=0 --max_new_tokens=16 --leaf_tokens=512".split()
    supervised = "--mode=sft --answer_column=program --max_steps=80 --learning_rate=2e-3".split()
    finish(tmp_path / "taught", *data, *supervised)
    flags = f"""--reward=code --init_from={tmp_path}/taught/ckpt/step_000080 --warmup_sft_steps=0 --max_steps=4
        --checkpoint_every=1""".split()
    flags += data
    finish(tmp_path / "a", *flags)
    error = error_of_run(tmp_path / "b", *flags, broken=failing_sandbox)
    assert re.search(r"rl step 1, prompt \d, sample \d: SandboxError: the sandbox itself ended", error)
    others = "--init_from=resume --rollout_ranks=2 --engine_args=disable_radix_cache=True,max_running_requests=5"
    finish(tmp_path / "b", *flags, *others.split(), ranks=4)
    finish(tmp_path / "c", *flags, *replay_of(tmp_path / "a"))
    one, *same = (lines(tmp_path / name, "ledger.jsonl") for name in "abc")
    assert same == [one] * 2 and len(one) == 4
    steps = lines(tmp_path / "a", "metrics.jsonl", "rl")
    assert all(0 < m["reward_mean"] < 1 and m["grad_norm"] > 1e-3 and m["limits"] == 0 for m in steps)
    verdicts = [noted["code"] for _, meta in read_groups(tmp_path / "b") for noted in meta["noted"]]
    assert len(verdicts) == 4 * 64 and {x["verdict"] for x in verdicts} == {"pass", "fail"}
    assert all((x["verdict"] == "pass") == (x["reward"] == 1) for x in verdicts)


AGENT = """
from onecurve.graders.sandbox import python

async def solve(chat, row):
    chat.user(row["prompt"])
    reply = await chat.generate()
    said = await chat.do(python, f"print(len({reply.text!r}) + {row['prompt'].rstrip('=')})")
    return float(said.strip()[-1:] in reply.text)
"""


def test_programs_of_an_agent_are_in_the_journal_and_a_replay_runs_none(tmp_path):
    (tmp_path / "mine.py").write_text(AGENT)
    flags = f"""--agent={tmp_path}/mine.py:solve --eval_size=0 --max_steps=2 --max_prompt_tokens=16
        --warmup_sft_steps=0 --prompts_per_step=2 --leaf_tokens=512""".split()
    finish(tmp_path / "a", *flags)
    finish(tmp_path / "b", *flags, *replay_of(tmp_path / "a"))
    assert lines(tmp_path / "a", "ledger.jsonl") == lines(tmp_path / "b", "ledger.jsonl")
    entries = [e for _, meta in read_groups(tmp_path / "a") for journal in meta["journal"] for e in journal]
    assert len(entries) == 2 * 2 * 8 and {e["name"] for e in entries} == {"python"}
    assert all(re.fullmatch(r"\d+\n", e["result"]) for e in entries)
