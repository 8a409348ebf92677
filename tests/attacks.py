"""
More attacks of programs on their sandbox than tests/test_sandbox.py has time for, a line each: held, or broken and how.

    python tests/attacks.py            # some two minutes; exit status 1 if one got out
    python tests/attacks.py memory     # those of a group

CI does not run it. A program prints OUT where it got what it should not; an error of the sandbox itself counts, too, as
it would end a run. Numbers of system calls are x86-64's. Bombs are bounded.
"""

import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from onecurve.graders.sandbox import SandboxError, code, run_program  # noqa: E402
from onecurve.run.own import CONFIG  # noqa: E402
from train_grpo import DEFAULTS  # noqa: E402

HELP = """
import ctypes, mmap, os, signal, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    return libc.syscall(ctypes.c_long(number), *args)
def out(got=True):
    if got: print('OUT', flush=True)
def tries(action):
    try: out(action() not in (-1, None))
    except (OSError, ValueError): pass
def grows(piece, MiB, most):  # OUT if more than `most` MiB of such pieces can be had
    kept = []
    try:
        while len(kept) * MiB <= most: kept.append(piece())
        out()
    except (OSError, MemoryError): pass
"""
FILES = {
    "other descriptors": "for fd in range(3, 256): tries(lambda: os.fstat(fd))",
    "/proc": "tries(lambda: os.listdir('/proc'))",
    "/sys": "tries(lambda: os.listdir('/sys'))",
    "/dev/shm": "tries(lambda: os.listdir('/dev/shm'))",
    "/root, /home, /var, /run": "[tries(lambda: os.listdir(x)) for x in ('/root', '/home', '/var', '/run', '/opt')]",
    "/etc/passwd": "tries(lambda: open('/etc/passwd').read())",
    "a folder that can be written": "[out(os.access(d, os.W_OK)) for d, _, _ in os.walk('/') if d != '/tmp']",
    "chmod in /usr": "tries(lambda: os.chmod('/usr/bin/env', 0o777))",
    "times in /usr": "tries(lambda: os.utime('/usr/bin/env'))",
    "a link into /usr": "tries(lambda: os.link('/usr/bin/env', '/tmp/env'))",
    "a file without a name in /usr": "tries(lambda: os.open('/usr', os.O_TMPFILE | os.O_RDWR))",
    "attributes in /usr": "tries(lambda: os.setxattr('/usr/bin/env', 'user.a', b'b'))",
    "open by handle": "out(call(304, -100, ctypes.create_string_buffer(64), 0) >= 0)",
    "up from /": "tries(lambda: os.listdir('/../../../root'))",
}
MOUNTS = {
    "mount proc": "out(libc.mount(b'proc', b'/tmp', b'proc', 0, None) == 0)",
    "mount tmpfs": "out(libc.mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0)",
    "remount": "out(libc.mount(b'', b'/', None, 32 | 4096, None) == 0)",
    "unmount": "out(libc.umount2(b'/tmp', 2) == 0)",
    "fsopen": "out(call(430, b'proc', 0) >= 0)",
    "open_tree": "out(call(428, -100, b'/', 1) >= 0)",
    "pivot_root": "out(call(155, b'/', b'/tmp') == 0)",
    "chroot": "tries(lambda: os.chroot('/tmp') or 1)",
    "setns": "out(call(308, call(434, 1, 0), 0x20000) == 0)",
    "unshare": "[out(libc.unshare(1 << n) == 0) for n in (17, 25, 26, 27, 28, 29, 30)]",
    "clone3": "out(call(435, ctypes.create_string_buffer(88), 88) >= 0)",
}
RIGHTS = {
    "root": "tries(lambda: os.setuid(0) or 1)",
    "groups": "tries(lambda: os.setgroups([0]) or 1)",
    "capabilities": "out(libc.prctl(47, 2, 21, 0, 0) == 0)",
    "no_new_privs": "out(libc.prctl(39, 0, 0, 0, 0) != 1)",
    "bpf": "out(call(321, 5, ctypes.create_string_buffer(128), 128) >= 0)",
    "userfaultfd": "out(call(323, 1) >= 0)",
    "perf": "out(call(298, ctypes.create_string_buffer(128), 0, -1, -1, 0) >= 0)",
    "kernel log": "out(call(103, 3, ctypes.create_string_buffer(99), 99) >= 0)",
    "clock": "tries(lambda: time.clock_settime(0, 0) or 1)",
    "modules": "out(call(175, b'', 0, b'') == 0)",
    "reboot": "out(call(169, 0xfee1dead, 672274793, 0, 0) == 0)",
    "priority": "tries(lambda: os.setpriority(0, 0, -5) or 1)",
    "io_uring": "out(call(425, 8, ctypes.create_string_buffer(120)) >= 0)",
    "a terminal's input": "import fcntl; tries(lambda: fcntl.ioctl(0, 0x5412, b'x'))",
}
TALK = {
    "session keyring": "out(call(250, 0, -3, 0) >= 0 or call(250, 10, -3, b'user', b'x', 0) >= 0)",
    "user keyring": "out(call(248, b'user', b'x', b'y', 1, -4) >= 0)",
    "request_key": "out(call(249, b'user', b'x', None, -3) >= 0)",
    "all families of sockets": "[tries(lambda: socket.socket(n, t)) for n in (0, *range(2, 46)) for t in (1, 2, 3, 5)]",
    "pairs of sockets": "[tries(lambda: socket.socketpair(n, t)) for n in range(2, 46) for t in (1, 2, 5)]",
    "names without a file": "tries(lambda: socket.socket(1).connect('\\0/tmp/.X11-unix/X0') or 1)",
    "System V": "out(call(29, 7, 99, 0o1666) >= 0 or call(64, 7, 1, 0o1666) >= 0 or call(68, 7, 0o1666) >= 0)",
    "a lock on a file": "import fcntl; tries(lambda: fcntl.flock(os.open('/usr/bin/env', 0), 2) or 1)",
    "contexts of AIO": "out(call(206, 1, ctypes.byref(ctypes.c_ulong())) == 0)",
    "watch a folder": "out(call(254, call(253), b'/usr/bin', 32) >= 0)",
    "page cache": "tries(lambda: os.preadv(os.open('/usr/bin/env', 0), [bytearray(9)], 0, os.RWF_NOWAIT))",
    "mounts": "out(call(457, *4 * [0]) >= 0 or ctypes.get_errno() != 1 or call(458, *4 * [0]) >= 0)",
    "POSIX queue": "out(call(240, b'q', 66, 0o600, None) >= 0)",
}
PROCESSES = {
    "fork": "tries(os.fork)",
    "vfork": "out(call(58) >= 0)",
    "clone without a thread": "out(call(56, 17, 0, 0, 0, 0) >= 0)",
    "posix_spawn": "tries(lambda: os.posix_spawn('/usr/bin/env', ['env'], {}))",
    "17 threads": "[threading.Thread(target=time.sleep, args=(9,), daemon=True).start() for _ in range(17)]; out()",
    "processes seen": "for pid in range(2, 32768): tries(lambda: os.kill(pid, 0) or 1)",
    "trace process 1": "out(call(101, 0x4206, 1, 0, 0x100000) >= 0)",
    "read process 1": "a, b = map(ctypes.create_string_buffer, (32, 32)); out(call(310, 1, a, 1, b, 1, 0) >= 0)",
    "take a descriptor": "out(call(438, call(434, 1, 0), 2, 0) >= 0)",
    "advise process 1": "out(call(440, call(434, 1, 0), ctypes.create_string_buffer(16), 1, 21, 0) >= 0)",
    "compare processes": "out(call(312, 1, 1, 0, 0, 0) >= 0)",
}
KILLS = "for n in range(1, 65):\n try: os.kill({}, n)\n except (OSError, KeyboardInterrupt): pass"
ENDS = {f"all signals to {whom}": KILLS.format(whom) for whom in ("0", "1", "-1", "os.getppid()")}
ENDS |= {f"status {n}": f"os._exit({n})" for n in (1, 2, 64, 65, 66, 67, 126, 127, 128, 129, 130, 137, 139, 143, 255)}
ENDS |= {
    f"signal {n}": f"signal.signal({n}, 0); signal.raise_signal({n}); os.kill(1, {n})" for n in (2, 3, 6, 8, 11, 14)
}
ENDS |= {
    "closed descriptors": "os.closerange(0, 256)",
    "no limits": "import resource\nfor n in range(16): tries(lambda: resource.setrlimit(n, (0, 0)))",
    "freezes itself": "signal.pthread_sigmask(0, range(1, 65)); os.kill(0, signal.SIGSTOP)",
}
PIPE = """
import fcntl
def pipe():
    r, w = os.pipe()
    fcntl.fcntl(w, 1031, 2**20)
    return os.write(w, bytes(2**20))
grows(pipe, 1, 150)"""
PAIRS = """
def pair():
    a, b = socket.socketpair()
    a.setblocking(0)
    tries(lambda: a.setsockopt(1, 7, 2**22))
    while True:
        try: sent[0] += a.send(bytes(9999))
        except BlockingIOError: return a, b
sent, kept = [0], []
try:
    while True: kept.append(pair())
except OSError: out(sent[0] > 150 * 2**20)"""
MEMORY = {
    "one array": "grows(lambda: bytearray(2**23), 8, 256)",
    "shared and anonymous": "grows(lambda: mmap.mmap(-1, 2**24), 16, 256)",
    "memfd": "grows(lambda: os.memfd_create('x'), 1, 1)",
    "memfd, secret": "out(call(447, 0) >= 0)",
    "System V segments": "out(call(29, 0, 2**26, 0o1600) >= 0)",
    "System V semaphores": "out(call(64, 0, 32000, 0o1600) >= 0)",
    "attributes": "open('x', 'w'); tries(lambda: os.setxattr('x', 'user.a', bytes(2**16)) or 1)",
    "its folder": "grows(lambda: 1 / (os.write(os.open(str(time.time_ns()), 66), bytes(60000)) == 60000), 0.057, 9)",
    "its folder, by fallocate": "fd = os.open('x', 66); tries(lambda: os.posix_fallocate(fd, 0, 2**26) or 1)",
    "output, by ftruncate": "tries(lambda: os.ftruncate(1, 2**30) or 1)",
    "a thread's own files": "out(libc.unshare(0x400) == 0)",
    "a thread with its own files": "out(call(56, 0x10900, 0, 0, 0, 0) != -1)",  # CLONE_THREAD without CLONE_FILES
    "pipes": PIPE,
    "buffers of sockets": PAIRS,
}
SPIN = "threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()"
TIME = {
    "a loop": "while True: pass",
    "threads that loop": f"[{SPIN} for _ in range(3)]\nwhile True: pass",
    "a power tower": "9 ** 9 ** 9",
    "digits": "sys.set_int_max_str_digits(0); str(9 ** 10 ** 7)",
    "a pattern": "import re; re.match('(a+)+$', 'a' * 40 + 'b')",
    "deep recursion": "sys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
    "deep repr": "x = []\nfor _ in range(10 ** 6): x = [x]\nprint(x)",
    "a deep program": "compile('(' * 10 ** 6, '', 'eval')",
    "a wide program": "eval('+'.join(['1'] * 10 ** 6))",
    "pickles": "import pickle; pickle.loads(b'(' * 10 ** 7)",
}
SQUARES = "assert f(2) == 4\nassert f(3) == 9"
LATER = """
import threading, os, time
threading.Thread(target=lambda: (time.sleep(.1), os.write(1, b'\\nlist(4, 9)')), daemon=True).start()"""
FORGED = {
    "equal to all": "class Y:\n def __eq__(s, o): return True\ndef f(x): return Y()",
    "a class that says int": "class Y(int):\n __class__ = int\n def __repr__(s): return '4'\ndef f(x): return Y(0)",
    "repr": "class Y:\n def __repr__(s): return '4'\ndef f(x): return Y()",
    "reduce": "class Y:\n def __reduce__(s): return int, (4,)\ndef f(x): return Y()",
    "a list without an end": "class Y(list):\n def __iter__(s):\n  while 1: yield 4\ndef f(x): return Y([4])",
    "writes now": "import os\ndef f(x): os.write(1, b'list(0, 0)'); os._exit(0)",
    "writes later": f"{LATER}\ndef f(x): time.sleep(.2); return 0",
    "patches ascii": "import builtins\nbuiltins.ascii = lambda x: '4'\nbuiltins.ascii = print\ndef f(x): return 0",
    "another namespace": "import sys\nsys._getframe(1).f_globals['calls'] = ()\ndef f(x): return 0",
    "traces": "import sys\nsys.settrace(lambda *a: None); sys.setprofile(lambda *a: None)\ndef f(x): return 0",
    "NaN": "def f(x): return float('nan')",
    "a generator": "def f(x): yield x * x",
    "separators": "def f(x): return '4, 9'",
    "surrogates": "def f(x): return '\\ud800'",
    "an enum": "import enum\nclass E(enum.IntEnum): A = 4; B = 9\ndef f(x): return E(x * x)",
    "true for one": "def f(x): return True",
    "floats": "def f(x): return float(x * x)",
    "no answer": "import os\ndef f(x): os._exit(0)",
}
GROUPS = dict(files=FILES, mounts=MOUNTS, rights=RIGHTS, talk=TALK, processes=PROCESSES, ends=ENDS, memory=MEMORY)


def attack(group, name, program):
    """What got out: '' if nothing did."""
    began = time.monotonic()
    try:
        if group == "verdict":
            value, notes = code("", program, SQUARES)
            return "passes" * bool(value)
        run = run_program(HELP + program)
    except SandboxError as error:
        return str(error)
    if group == "time" and (run.verdict == "pass" or run.cpu_seconds > 3):
        return f"{run.verdict} after {run.cpu_seconds:.1f} s"
    mine = re.search(r"^(Syntax|Name|Type|Attribute)Error.*", run.errors, re.MULTILINE)  # an attack that is none
    return "OUT" * ("OUT" in run.output) or mine and mine[0] or "late" * (time.monotonic() - began > 60)


def main():
    CONFIG.set(DEFAULTS | dict(sandbox_seconds=1.0))
    broken = 0
    for group, programs in (GROUPS | dict(time=TIME, verdict=FORGED)).items():
        for name, program in programs.items() if not sys.argv[1:] or group in sys.argv else ():
            problem = attack(group, name, program)
            broken += bool(problem)
            print(f"{group:9} {name:32} {'BROKEN: ' + problem if problem else 'held'}", flush=True)
    print(f"{broken} broken")
    sys.exit(broken > 0)


if __name__ == "__main__":
    main()
