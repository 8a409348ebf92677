"""
Tasks: scores, and the rows of a data set with their prompts. A reward is a pure function

    reward(prompt: str, response: str, answer: str) -> float, or (float, a dict of what to note with it)

of its arguments alone: a clock, a random number or the order of a set of strings (it changes with PYTHONHASHSEED) would
end the promise that a run can be repeated bit for bit. `load_reward("numeric + 0.2*format + my_rewards.py:short")`
gives a weighted sum of such functions, built in or yours; `score` calls it and names the culprit when it fails.
'model:folder' is what a reward model gives (rollout_server.RewardModel).

Sources: GSM8K and its `#### 42` are from Cobbe et al. 2021 (arXiv:2110.14168), \\boxed{42} from MATH, Hendrycks et al.
2021 (arXiv:2103.03874), the <think> format from DeepSeek-R1 (arXiv:2501.12948).
"""

import ast
import importlib.util
import inspect
import json
import math
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from difflib import get_close_matches
from fractions import Fraction
from functools import lru_cache
from importlib.metadata import distributions
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from traceback import walk_tb
from typing import NamedTuple

import torch

from configurator import require, template_arguments
from sync import content_hash, reason


class RewardError(RuntimeError):
    """A reward function raised, or returned something that is no finite number. The message is one line."""


# ------------------------------------------------------------------------------------------------------------------
# the built-in rewards

# A model may write anything, and an engine waits while it is read: so the alternatives of a pattern are disjoint and no
# + stands inside a *, else some text would take exponential time. ASCII: \d would mean the digits of every script.
DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\w)\.\d+)"  # 1,234.5 or 1234.5 or .5
SIGN = r"(?:(?<![\w)}])[-+])?"  # in 50-8 and (a)-8 the minus is an operation
NUMBER = re.compile(rf"({SIGN})(?:\\?\$)?({DIGITS})(?: ?/ ?({DIGITS}))?(?:\\?%)?", re.ASCII)
MARK = re.compile(r"#{4,}\s*([^\n#]*)|\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
ANSWER_IS = re.compile("answer is", re.IGNORECASE)
FRAC = re.compile(r"(?<!\d)\\[dt]?frac\{(-?\d+)\}\{(\d+)\}", re.ASCII)  # not in 5\frac{1}{2}, which is no 51/2
LENGTH_MAX = 1000  # characters of a number; int() refuses 4300 digits, and takes quadratic time on the way there


def _plain(text):
    """`text` with LaTeX's fractions and thousands and the typographic minus written as NUMBER reads them."""
    return FRAC.sub(r"\1/\2", text.replace("\u2212", "-").replace("{,}", ","))


def _value(number):
    """The exact value of a NUMBER match: 42, 42.0 and 84/2 are equal. None if it has none that we can use."""
    sign, top, bottom = (part.replace(",", "") for part in number.groups(default=""))
    if len(number[0]) > LENGTH_MAX or (bottom and not Fraction(bottom)):
        return None
    return Fraction(top) / Fraction(bottom or 1) * (-1 if sign == "-" else 1)


def final_number(text):
    """
    The number a response ends up with, as a Fraction, or None. Whichever comes last of `#### 42` and `\\boxed{42}`
    decides, even when no number is in it; else the first number after the last "answer is"; else the last number.
    Units are dropped ($42, 42%, 42 km). Not read: powers, mixed numbers (1 1/2), words.
    """
    text = _plain(text)
    if marked := MARK.findall(text):
        text, which = "".join(marked[-1]), 0  # one of the two groups is empty
    else:
        *before, text = ANSWER_IS.split(text)
        which = 0 if before else -1
    numbers = list(NUMBER.finditer(text))
    return _value(numbers[which]) if numbers else None


def numeric(prompt, response, answer):
    """1.0 if the response's final number equals the answer's: a plain number, or a text that ends in `#### 42`."""
    number = NUMBER.fullmatch(_plain(answer).rpartition("####")[2].strip())
    expected = number and _value(number)
    if expected is None:  # a data set of another kind would otherwise score 0 (or worse, 1) without a word
        raise ValueError(f"answer {answer[-40:]!r} is neither a number nor ends in '#### 42'")
    return float(final_number(response) == expected)


def exact(prompt, response, answer):
    """1.0 if response and answer are the same text, but for white space around them."""
    return float(response.strip() == answer.strip())


def format(prompt, response, answer):  # hides Python's format(), which nothing here calls
    """
    1.0 for `<think>...</think>` and then a non-empty answer, with one pair of tags and nothing before it. The thought
    may be empty. A prompt that ends in <think>, as some chat templates do, has opened the pair already.
    """
    if prompt.rstrip().endswith("<think>"):
        response = "<think>" + response
    thought, _, rest = response.partition("</think>")
    one_pair = response.count("<think>") == response.count("</think>") == 1
    return float(one_pair and thought.lstrip().startswith("<think>") and rest.strip() != "")


# ------------------------------------------------------------------------------------------------------------------
# math: whether two expressions are equal, by math-verify (github.com/huggingface/Math-Verify) in other processes

MATH_VERIFY = "0.9.0"  # pyproject.toml's; another version may judge otherwise
MATH_SECONDS = 5.0  # of CPU time that a comparison may take
MATH_VERDICTS = {10: "pass", 11: "fail", -signal.SIGPROF: "limit"}  # by the exit status of who compares
MATH_WORKERS = SimpleQueue()  # idle ones; None: one that is started when it is wanted
for _ in range(max(1, os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))):
    MATH_WORKERS.put(None)


def math_worker(seconds):
    """
    What a worker runs, in a process that has nothing else of ours: lines [response, answer] in; for each a fork that
    compares them, and a line [its exit status, its CPU seconds] out. So each comparison begins in the same state,
    whatever came before it (SymPy keeps results and draws random numbers). The kernel ends one that takes too much CPU
    time; math-verify's own limits are of wall time, which a busy machine would decide, and need a main thread.
    """
    import sympy
    from math_verify import parse, verify

    def status_of(response, answer):
        expected = parse(answer, parsing_timeout=None)
        if not any(hasattr(x, "has") and not x.has(sympy.zoo, sympy.nan) for x in expected):  # it takes 11:00 for 11/0
            return 12
        return 10 if verify(expected, parse(response, parsing_timeout=None), timeout_seconds=None) else 11

    sympy.core.random.seed(0)
    for pair in (("$(x+1)^2$", "$x^2+2x+1$"), ("0.5", "$1/2$"), (r"$\{1, 2\}$", r"$\{2, 1\}$"), ("$x<3$", "$x>3$")):
        status_of(*pair)  # imports and tables that the forks then have
    for line in sys.stdin:
        if not (child := os.fork()):
            signal.setitimer(signal.ITIMER_PROF, seconds)
            os._exit(status_of(*json.loads(line)))
        _, status, used = os.wait4(child, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime]), flush=True)


def start_math_worker():
    """A process that ends with its standard input, and so with this one, however that ends."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    env = os.environ | dict(PYTHONHASHSEED="0")  # sets of strings have an order by their hashes
    code = f"import json, os, signal, sys\n{inspect.getsource(math_worker)}\nmath_worker({MATH_SECONDS})"
    return subprocess.Popen([sys.executable, "-P", "-c", code], **pipes, env=env)


def equivalent(prompt, response, answer):
    """
    `math`: 1.0 if math-verify finds the response equal to the answer. Of the response it takes \\boxed{..} (several are
    a set), else the last expression; the answer is an expression in LaTeX or plain, alone or behind `####`, or a text
    with \\boxed{..} or $..$. 1/2, 0.5 and \\frac12 are equal, and {1, 2} and {2, 1}; decimals to 6 places. What takes
    more CPU time than MATH_SECONDS gets no reward, and the verdict 'limit'.
    """
    text = answer.rpartition("####")[2].strip()
    if re.fullmatch(r"[A-Za-z\s]{4,}", text):  # to SymPy a product of letters: Paris = pairs
        raise ValueError(f"answer {text[-40:]!r} is words; --reward=exact, or write them as \\text{{..}}")
    text = text if "\\boxed" in text or text.count("$") > 1 else f"\\boxed{{{text}}}"
    worker = MATH_WORKERS.get() or start_math_worker()
    try:
        print(json.dumps([response, text]), file=worker.stdin, flush=True)
        status, seconds = json.loads(worker.stdout.readline())
    except (OSError, ValueError) as error:
        MATH_WORKERS.put(None)
        raise RuntimeError(f"a process of math-verify ended with status {worker.wait()}; resume the run") from error
    MATH_WORKERS.put(worker)
    if status not in MATH_VERDICTS:
        why = "is no expression that math-verify can read" if status == 12 else f"was not compared: status {status}"
        raise ValueError(f"answer {text[-40:]!r} {why}")
    near_limit = status < 0 or seconds > MATH_SECONDS / 2
    return float(status == 10), dict(verdict=MATH_VERDICTS[status], near_limit=near_limit)


def needs_math():
    found = next((x.version for x in distributions(name="math-verify")), "none")
    if found != MATH_VERIFY:
        raise ValueError(f"needs math-verify {MATH_VERIFY}, and there is {found}; install it by `uv sync --group math`")


# ------------------------------------------------------------------------------------------------------------------
# judge: a model behind an OpenAI-compatible endpoint

JUDGE_SECONDS = 120  # that a try may take
JUDGE_WAIT = 1.0  # seconds before the second try; twice as many before each next one
JUDGE_TOKENS = 1024  # of a verdict with its reasons


@lru_cache
def judge_client():
    """(client, model, the prompt file's text) of the run's config. Raises ValueError with a cure."""
    import openai

    url, model, path = (SETTINGS[key] for key in ("judge", "judge_model", "judge_prompt"))
    text = Path(path).read_text(encoding="utf-8") if Path(path).is_file() else ""
    if "{response}" not in text:
        raise ValueError(f"judge_prompt={path!r}: no text file with {{response}} in it, where the judge is to see it")
    key = os.environ.get("JUDGE_API_KEY") or os.environ.get("OPENAI_API_KEY") or "none"
    try:
        client = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=JUDGE_SECONDS)
        known = [its.id for its in client.models.list(timeout=10).data]
    except Exception as error:  # what answers there may be anything
        cure = "an OpenAI-compatible endpoint such as http://127.0.0.1:8000/v1 (its key: JUDGE_API_KEY)"
        raise ValueError(f"judge={url!r}: {reason(error.__cause__ or error)[:100]}; use {cure}") from error
    if not known or model not in ("", *known):
        raise ValueError(f"judge_model={model!r}: the judge has {', '.join(known) or 'none'}")
    return client, model or known[0], text


def judge(prompt, response, answer):
    """
    The number from 0 to 1 behind the last 'score:' of what a model answers to the judge_prompt, in which {prompt},
    {response} and {answer} are filled in; what it answers is noted. After judge_tries failures, of which a verdict that
    cannot be read is one, it raises and the run stops: a failure is no 0.

    The verdict is in the group file before anything uses it, and resumes and replays read it there. If the run is
    killed before that file is written, a resume asks again, and nothing was computed from what was said before. Two
    fresh runs agree if the judge gives equal answers to equal requests, as our own endpoint does (mode='serve').
    In an agent: score, notes = await chat.do(judge, prompt, response, answer).
    """
    texts = dict(prompt=prompt, response=response, answer=answer)
    for i in range(SETTINGS["judge_tries"]):
        time.sleep(JUDGE_WAIT * 2 ** (i - 1) if i else 0)
        try:
            client, model, template = judge_client()
            # In one pass: a response may have an {answer} in it.
            asked = re.sub(r"\{(prompt|response|answer)\}", lambda place: texts[place[1]], template)
            asked = dict(model=model, messages=[{"role": "user", "content": asked}], max_tokens=JUDGE_TOKENS)
            choice = client.chat.completions.create(**asked, temperature=0, seed=0).choices[0]
            return score_of(choice.message.content, choice.finish_reason), {"judge": choice.message.content}
        except Exception as error:  # what is no JSON, or JSON of another kind, fails in many ways
            failure = error
    why = f"failed {i + 1} times: {reason(failure.__cause__ or failure)[:140]}"
    raise RuntimeError(f"judge={SETTINGS['judge']!r} {why}") from failure


def score_of(verdict, finish_reason):
    """What stands alone in its line behind the last 'score:', from 0 to 1; 7/10 will do. Raises ValueError."""
    *before, said = re.split("score:", verdict, flags=re.IGNORECASE)
    number = NUMBER.fullmatch(said.strip("* \n").partition("\n")[0].rstrip("*. "))
    value = _value(number) if number and before else None
    if finish_reason == "length" or value is None or not 0 <= value <= 1:
        raise ValueError(f"no line ends in 'score: ' and a number from 0 to 1: {verdict[-60:]!r} ({finish_reason})")
    return float(value)


# ------------------------------------------------------------------------------------------------------------------
# programs: run in a sandbox, and judged outside of it

OUTPUT = 65536  # bytes that a program may write to its output, to that of errors or to a file
PROCESSES = 16  # of a program, threads counted
PASSED, NO_MEMORY, KILLED, FAILED = 64, 65, 66, 67  # exit statuses of INIT; any other one is not the program's doing
NOBODY = "65534"  # the user of a sandbox that root starts: of root's own processes the kernel allows any number
PATIENCE = 10  # times the seconds of CPU time, and one more, that a program may wait
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
    """A sandbox that does not start, or was killed by somebody else: it says nothing of the program. One line."""


class Run(NamedTuple):
    """What became of a program."""

    verdict: str  # 'pass': it ended with status 0; 'fail': with another; 'limit': of time, memory or output
    near_limit: bool  # so near to a limit of time or memory that another run may end with another verdict
    cpu_seconds: float  # of all its processes, the start of Python included; not counted where wall time was up
    output: str
    errors: str


def canonical(value):
    """A text that two values of built-in types share if they are equal and of the same types: 1 is no 1.0 or True."""
    kind = next((kind for kind in (list, tuple, dict, set, frozenset) if isinstance(value, kind)), None)
    if not kind:
        return ascii(value)
    parts = [canonical(part) for part in (value.items() if kind is dict else value)]
    return f"{kind.__name__}({', '.join(parts if kind in (list, tuple) else sorted(parts))})"


# Inside: standard input starts with the program and the calls whose values are wanted, which become the output's last
# line. With status 0 and without such a line the program has ended itself.
INSIDE = f"""
import os
{inspect.getsource(canonical)}
source, calls = eval(os.read(0, int(os.read(0, 8))))
names = {{"__name__": "__main__"}}
try:
    exec(compile(source, "program", "exec"), names)
    if calls:
        os.write(1, b"\\n" + canonical([eval(call, names) for call in calls]).encode())
        os._exit(0)
except MemoryError:
    os._exit({NO_MEMORY})
"""


def sandbox_command(python):
    """The command that runs `python` (a path) as SETTINGS say, up to its arguments. Raises SandboxError: no bwrap."""
    limits = [str(math.ceil(SETTINGS["sandbox_seconds"])), str(SETTINGS["sandbox_memory"] * 1024)]
    if SETTINGS["sandbox"] == "none":  # the kernel would count all of the user's processes
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
        # files, not pipes: a limit of the kernel's bounds them, and nobody has to read while the program runs
        files = dict(stdin=given, stdout=output, stderr=errors, cwd=tempfile.gettempdir())
        process = subprocess.Popen(command, env={"PYTHONHASHSEED": "0"}, start_new_session=True, **files)
        ended = _wait(process.pid, PATIENCE * (seconds + 1))
        os.killpg(process.pid, signal.SIGKILL)  # reaches nobody where all have ended
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = code = os.waitstatus_to_exitcode(status)  # so that nobody waits for it again
        full = max(os.fstat(file.fileno()).st_size for file in (output, errors)) >= OUTPUT
        said, complaints = (os.pread(file.fileno(), OUTPUT, 0).decode(errors="replace") for file in (output, errors))
    cpu = usage.ru_utime + usage.ru_stime
    near = not ended or cpu > seconds / 2 or code == NO_MEMORY
    if ended and code not in (PASSED, NO_MEMORY, KILLED, FAILED):
        raise SandboxError(f"the sandbox itself ended with status {code}: {reason(complaints.strip() or 'killed')}")
    if code == KILLED and not near and not again:  # by itself, and it will again; or by a system short of memory
        return run_program(source, calls, stdin, python, again=True)
    limited = not ended or full or cpu >= seconds or code in (NO_MEMORY, KILLED)
    verdict = "limit" if limited else "pass" if code == PASSED else "fail"
    return Run(verdict, near or code == KILLED, cpu, said, complaints)


def _memory_file():
    return open(os.memfd_create("sandbox"), "r+b", buffering=0)


def _wait(pid, seconds):
    """Whether the process ends within so many seconds. It stays a zombie, so its id stays its own."""
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
    White space at the ends of lines, and of the whole, does not count in an output. Two runs of a program differ if it
    asks a clock, a random number or an address, or is near to a limit.
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


python.impure = True  # for agents/chat.py: near a limit it may say something else

# ------------------------------------------------------------------------------------------------------------------
# from a config's string to a function, and its call

BUILT_IN = {"code": code, "exact": exact, "format": format, "judge": judge, "math": equivalent, "numeric": numeric}
# {built-in name: function that raises ValueError, with a cure, if what it needs is not there}
NEEDS = {
    "code": lambda: interpreter(SETTINGS["sandbox"]),
    "judge": lambda: os.environ.get("RANK", "0") == "0" and judge_client(),  # one rank's word is enough
    "math": needs_math,
}
SETTINGS = {}  # the run's config, for what is built in
MODELS = {}  # {term such as 'model:folder': RewardModel}
ONE_AT_A_TIME = threading.Lock()


def load_reward(spec, config=None):
    """
    The reward function for `spec`: terms joined by +, each a built-in name, path/to/file.py:function or model:folder,
    each optionally weighted (0.2*format; 0*format is only noted). A file is looked up in the working directory, then
    beside this file; a path cannot contain + or *. What it returns is noted, too: (the sum, {term: {"reward": number,
    ..}}). config: the run's. Ends the run with one line if there is no such function, or if what it needs is not there.
    """
    SETTINGS.update(config or {})
    terms = []
    for term in spec.split("+"):
        weight, star, name = (part.strip() for part in term.rpartition("*"))
        try:
            if star and not re.fullmatch(r"-?\d*\.?\d+(e-?\d\d?)?", weight):
                raise ValueError(f"weight {weight!r} is not a number, as in 0.2*format (and a path cannot contain *)")
            if name.startswith("model:"):
                from rollout_server import RewardModel

                MODELS[name] = RewardModel(name.removeprefix("model:"), SETTINGS)
            terms.append((float(weight or 1), name, find_function(name, BUILT_IN | MODELS, "reward")))
            if name in NEEDS:
                NEEDS[name]()
        except ValueError as error:
            require(False, f"reward={spec!r}: {error}")

    def weighted_sum(prompt, response, answer):
        noted, summands = {}, []
        for weight, name, f in terms:
            # User code is not asked to be thread-safe; what is built in may wait for another process or machine.
            with nullcontext() if name in BUILT_IN or name in MODELS else ONE_AT_A_TIME:
                value, notes = verdict(f(prompt, response, answer), name)
            summands.append(weight * value)
            noted[name] = {"reward": value, **notes}
        return math.fsum(summands), noted  # it rounds once, at the end; sum() gives other bits in Python 3.12

    return weighted_sum


def check_vocabulary(tokenizer):
    """Ends the run with one line where a reward model reads texts by another vocabulary than the policy writes them."""
    for name, model in MODELS.items():
        why = "of another vocabulary than the policy; use one that --mode=rm made of the same model"
        require(model.tokenizer.get_vocab() == tokenizer.get_vocab(), f"reward={name!r}: {why}")


def score(reward, prompt, response, answer, where):
    """
    What reward(prompt, response, answer) returns as a finite float and a dict of what to note with it; or RewardError,
    with `where` to say which sample it was.
    """
    try:
        return verdict(reward(prompt, response, answer), "it")
    except (Exception, SystemExit) as error:  # an exit() in a reward would end the run as if it had succeeded
        start = f"{response[:80]!r}{'...' if len(response) > 80 else ''}"
        raise RewardError(f"reward failed on {where}: {describe(error)}; response {start}") from error


def verdict(returned, name):
    """(finite float, notes) of what the function `name` returned: a number, or a number and a dict of notes."""
    value, notes = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    return finite(value, name), notes


def reward_metrics(groups):
    """
    {metric: value} of what was noted with the rewards of groups [(tensors, meta)]: the mean of each of several terms,
    how many verdicts were a limit of time or space, and how many so near to one that another run may differ there.
    """
    noted = [terms for _, meta in groups for terms in meta.get("noted", ()) if terms]
    names = list(noted[0]) if noted else []
    means = {f"reward_{name}": math.fsum(terms[name]["reward"] for terms in noted) / len(noted) for name in names}
    limited = [notes for terms in noted for notes in terms.values() if "verdict" in notes]
    counts = dict(limits=sum(notes["verdict"] == "limit" for notes in limited))
    counts["near_limit"] = sum(notes["near_limit"] for notes in limited)
    return (means if len(means) > 1 else {}) | (counts if limited else {})


def finite(value, name):
    """What the function `name` returned, as a float. Raises TypeError; for "1.0" too, which float() would accept."""
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: torch, of two elements
        number = math.nan
    if not math.isfinite(number):
        raise TypeError(f"{name} returned {value!r}, not a finite number")
    return number


def find_function(name, built_in, what):
    """The function called `name`, one of `built_in` or from a file, which is run only once. Raises ValueError."""
    if name in built_in:
        return built_in[name]
    file, _, attribute = name.rpartition(":")
    if not file.endswith(".py"):
        known = f"Built in: {', '.join(built_in)}; or " if built_in else "Use "
        known += "'my_file.py:my_function'" + " (no + or * in the path)" * bool(built_in)
        raise ValueError(f"no such {what} as {name!r}{_near(name, built_in)} {known}")
    folders = Path.cwd(), Path(__file__).resolve().parent
    path = next((folder / file for folder in folders if (folder / file).is_file()), None)
    if path is None:
        raise ValueError(f"no file {file} in {folders[0]} or {folders[1]}")

    key = str(path.resolve())  # a name of its own, although two files may share a stem; dataclasses look it up too
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, key)
        sys.modules[key] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[key]
            raise ValueError(f"{file} does not load: {describe(error)}") from error
    functions = {key: x for key, x in vars(sys.modules[key]).items() if callable(x)}
    if attribute not in functions:
        raise ValueError(f"{file} has no function {attribute!r}{_near(attribute, functions)}")
    return functions[attribute]


def _near(name, names):
    """The end of a sentence that refuses `name`: the nearest of `names`, if one is near."""
    return "".join(f"; did you mean {near!r}?" for near in get_close_matches(name, names, n=1)) or "."


def describe(error):
    """One line for an exception, with the deepest line in the user's own file, not the one in a library it called."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    others = "<frozen importlib", os.path.dirname(os.__file__), __file__, str(Path(__file__).parent / "agents/chat.py")
    lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    lines = [(file, line) for file, line in lines if not file.startswith(others)]
    deepest = [f" ({Path(file).name}:{line})" for file, line in lines if file == lines[0][0]][-1:]
    return text + "".join(deepest)


def pass_at_k(n, right, k):
    """Chance that one of k samples is right, from n of which `right` are, unbiased: Chen et al. 2021, equation 1."""
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def pass_rates(rewards, pass_reward):
    """{metric: value} of rewards (P, n): the mean, and pass@k for k = 1, 2, 4 .. n with 95 % intervals over prompts."""
    n, right = rewards.shape[1], (rewards >= pass_reward).sum(1).tolist()
    scores = {"eval_reward_mean": float(rewards.double().mean())}
    for k in (2**i for i in range(n.bit_length())):
        chances = torch.tensor([pass_at_k(n, m, k) for m in right], dtype=torch.float64)
        scores[f"pass@{k}"] = float(chances.mean())
        # 95 % of the normal distribution of a mean over prompts: Miller 2024 (arXiv:2411.00640), section 2
        scores[f"pass@{k}_ci95"] = 1.96 * float(chances.std()) / math.sqrt(len(right))
    return scores


def pair_rates(figures, n):
    """{metric: value} of the figures of n held-out pairs, with a 95 % interval of the share in the right order."""
    share = figures["accuracy"]
    ci95 = 1.96 * math.sqrt(share * (1 - share) / max(1, n - 1))
    return {f"eval_{name}": x for name, x in figures.items()} | {"eval_accuracy_ci95": ci95}


# ------------------------------------------------------------------------------------------------------------------
# data


def arithmetic(size_max=100, size_min=0):
    """Rows {"prompt": "17+25=", "answer": "42"} of all sums of two numbers in [size_min, size_max), in their order."""
    numbers = range(size_min, size_max)
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in numbers for b in numbers]


def sides(mode):
    """The names of the texts that a row of the data has for a prompt."""
    return ("chosen", "rejected") if mode == "rm" else ("answer",)


def with_wrong_sum(row):
    """A sum's row as a pair: its answer is chosen, and the same with digits changed is rejected; a hash says which."""
    right, h = row["answer"], int(content_hash(row["prompt"]), 16)
    h, changed = divmod(h, 2 ** len(right) - 1)  # a bit for each digit; 0 stands for all of them
    wrong = ""
    for i, digit in enumerate(right):
        h, by = divmod(h, 9)
        wrong += str((int(digit) + (1 + by) * (changed == 0 or changed >> i & 1)) % 10)
    return {"prompt": row["prompt"], "chosen": right, "rejected": wrong}


def programs():
    """
    Rows {"prompt": "plus 13, times 4:", "answer": tests, "program": "def f(x):return(x+13)*4"} of all pairs of steps
    with numbers from 2 to 19. Every other program is a careless one, without the parentheses that some need.
    """
    words, rows = {"+": "plus", "-": "minus", "*": "times"}, []
    for first, a, second, b in product(words, range(2, 20), words, range(2, 20)):
        prompt = f"{words[first]} {a}, {words[second]} {b}:"
        careful = f"(x{first}{a}){second}{b}"
        careless = int(content_hash(prompt), 16) % 2 or "*" not in second or "*" in first
        value = eval(f"lambda x: {careful}")
        tests = "\n".join(f"assert f({x}) == {value(x)}" for x in (-7, 1, 10))
        program = "def f(x):return" + (f" x{first}{a}{second}{b}" if careless else careful)
        rows.append(dict(prompt=prompt, answer=tests, program=program))
    return rows


@lru_cache(maxsize=2)
def permutation(n, *key):
    """Of 0 .. n-1, from a hash of the key."""
    source = torch.Generator().manual_seed(int(content_hash(list(key)), 16) % 2**63)
    return torch.randperm(n, generator=source).tolist()


def rows_of_step(n, per_step, step, *key):
    """
    Indices of the rows of a step: the data in a new order every epoch, epochs end to end. A function of the step's
    number, so there is no iterator to save.
    """
    places = (divmod(step * per_step + i, n) for i in range(per_step))
    return [permutation(n, *key, epoch)[place] for epoch, place in places]


def load_rows(config):
    """(training rows, held-out rows), dicts with prompt and answer (str), or with mode='rm' chosen and rejected."""
    name, size, texts = config["dataset"], config["eval_size"], sides(config["mode"])
    if name == "arithmetic":
        data, held_out = arithmetic(config["arithmetic_size"], config["arithmetic_min"]), None
        data = [with_wrong_sum(row) for row in data] if config["mode"] == "rm" else data
    elif name == "programs":
        data, held_out = programs(), None
    else:
        import datasets

        datasets.disable_progress_bars()
        kind = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}.get(Path(name).suffix)
        there = not kind or Path(name).is_file() and Path(name).stat().st_size
        require(there, f"dataset={name!r}: no such file, or an empty one")

        def load(split):
            try:
                hub = dict(path=name, name=config["dataset_config"] or None, split=split)
                return datasets.load_dataset(**dict(path=kind, data_files=name, split="train") if kind else hub)
            except Exception as e:
                require(False, f"dataset={name!r}: cannot load split {split!r}: {reason(e)}")

        data = load(config["split"])
        held_out = load(config["eval_split"]) if config["eval_split"] else None
    columns = sorted(data[0]) if len(data) else []
    for key in ("prompt_column", *(f"{side}_column" for side in texts), *["sft_column"] * bool(config["sft_column"])):
        require(config[key] in columns, f"{key}={config[key]!r}: the data set has the columns {', '.join(columns)}")

    def row(example):
        try:
            prompt = (config["prompt_template"] or "{" + config["prompt_column"] + "}").format(**example)
        except (KeyError, IndexError, ValueError) as e:
            problem = f"{type(e).__name__}: {e}; the data set has the columns {', '.join(columns)}"
            require(False, f"prompt_template={config['prompt_template']!r}: {problem}")
        others = example if config["agent"] else {}  # an agent gets all columns
        known = {side: example[config[f"{side}_column"]] for side in texts}
        for side in texts if config["mode"] == "rm" else ():
            why = f"for prompt {prompt!r:.60} it is no text but {known[side]!r:.60}; use a column of responses"
            require(isinstance(known[side], str), f"{side}_column={config[f'{side}_column']!r}: {why}")
        if config["sft_column"]:
            known["shown_answer"] = example[config["sft_column"]]
        return {**others, "prompt": prompt, **{side: str(text) for side, text in known.items()}}

    if held_out is None:
        require(size < len(data), f"eval_size={size}: dataset={name!r} has {len(data)} rows in all")
        order = permutation(len(data), "held out")  # the same for every seed
        data, held_out = [data[i] for i in order[size:]], [data[i] for i in order[:size]]
    return [row(x) for x in data], [row(x) for x, _ in zip(held_out, range(size))]


def prompt_ids(prompt, tokenizer, config):
    """The tokens of a prompt's text, which a chat template has begun in its own way."""
    return tokenizer(prompt, add_special_tokens=not config["chat_template"])["input_ids"]


def answer_ids(text, tokenizer, stop_tokens):
    """The tokens of a whole response, with an EOS."""
    return tokenizer(text, add_special_tokens=False)["input_ids"] + stop_tokens[:1]


def encode_prompts(rows, what, tokenizer, config):
    """Adds prompt_tokens to each row and drops those with too many, in one line that counts them as `what`."""
    arguments = template_arguments(config["chat_template_args"])
    for row in rows:
        if config["chat_template"]:
            messages = [{"role": "user", "content": row["prompt"]}]
            row["prompt"] = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **arguments
            )
        row["prompt_tokens"] = prompt_ids(row["prompt"], tokenizer, config)
    return _short_enough(rows, "prompt_tokens", "max_prompt_tokens", f"{what} prompts", config)


def encode_answers(rows, tokenizer, stop_tokens, config):
    """
    The rows with answer_tokens, or chosen_tokens and rejected_tokens, which end with an EOS; without those of more
    tokens than a sample may have. Ends the run with one line at a pair whose sides are the same tokens.
    """
    texts = sides(config["mode"])
    for row in rows:
        row |= {
            f"{side}_tokens": answer_ids(row.get(f"shown_{side}", row[side]), tokenizer, stop_tokens) for side in texts
        }
        same = len(texts) == 2 and row["chosen_tokens"] == row["rejected_tokens"]
        where = f"a pair of prompt {row['prompt']!r:.60} has equal sides"
        require(not same, f"mode='rm': {where}, {row[texts[-1]]!r:.60}; drop what nobody prefers")
    for side in texts:
        rows = _short_enough(rows, f"{side}_tokens", "max_new_tokens", f"{side} texts", config)
    return rows


def _short_enough(rows, field, key, what, config):
    kept = [row for row in rows if 0 < len(row[field]) <= config[key]]
    require(kept or not rows, f"{key}={config[key]}: all {len(rows)} {what} are longer (or empty)")
    if len(kept) < len(rows) and os.environ.get("RANK", "0") == "0":
        print(f"dropped {len(rows) - len(kept)} of {len(rows)} {what}: over {key}={config[key]}")
    return kept
