"""
How the tools start train_grpo.py, and how they read what a run has left in its folder. No tool by itself.
"""

import atexit
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache, partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HUB = Path("out", "hub")  # where runs of the hub are copied to
sys.path.insert(0, str(ROOT))  # whoever imports this can import the files there
import configurator  # noqa: E402
from configurator import require  # noqa: E402
from onecurve.keys.prompts import SUMS  # noqa: E402
from onecurve.run.start import at_parents_end  # noqa: E402


def report_error(*error):
    """A sys.excepthook: what ends a run in one line ends a tool in one. Status 1 is for what a tool has found."""
    from onecurve.run import machine  # imports torch, which some tools do without

    machine.report_error(*error, kept="", cure="start again")
    sys.exit(2)


sys.excepthook = report_error
MOST_STEPS = 2**40  # more than any run has: a stranger's log may have any number


def command(*args, ranks=1, restarts=0, script=(ROOT / "train_grpo.py",)):
    """The command line of a run; several ranks, and restarts, are torchrun's."""
    torchrun = f"-m torch.distributed.run --nproc_per_node={ranks} --max-restarts={restarts} --standalone".split()
    return [sys.executable, *(torchrun if ranks > 1 or restarts else []), *map(str, script), *map(str, args)]


end_with_tool = partial(at_parents_end, signal.SIGTERM)  # in a run that a tool starts


def launch(command, env=None, cwd=None, timeout=None):
    """Runs a command to its end: (exit status, everything it printed)."""
    options = dict(cwd=cwd, env=os.environ | (env or {}), timeout=timeout, preexec_fn=end_with_tool)
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    done = subprocess.run(command, text=True, **options, **pipes)
    return done.returncode, done.stdout


def listening():
    """A socket of the machine's for those who may read a new folder, which is deleted at the end."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{folder}/warm")
    server.listen(64)
    return server


def start_warm(server):
    """The address of the process that tests/warm.py describes: it takes orders there, and ends with this one."""
    command = [sys.executable, ROOT / "tests" / "warm.py", str(server.fileno())]
    quiet = dict(stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen(command, cwd=ROOT, pass_fds=[server.fileno()], **quiet)
    atexit.register(process.communicate)  # closes its input, at the end of which it ends
    return server.getsockname()


@cache
def warm():
    """The address of such a process: one for all of a test session's, else of this process's own."""
    return os.environ.get("ONECURVE_WARM") or start_warm(listening())


ONE_AT_A_TIME = threading.Lock()


def run_warm(command, output, ranks=0, file_size=0, timeout=600, env=None, address=None):
    """(status, output) of a script and its arguments, whose output goes to a file. address: of another than `warm`."""
    envs = [{}]
    if ranks:  # as torchrun says it
        with socket.create_server(("127.0.0.1", 0)) as free:
            rendezvous = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
        world = rendezvous | dict(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        envs = [world | dict(RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(ranks)]
    envs = [(env or {}) | rank for rank in envs]
    job = dict(command=command, output=str(output), file_size=file_size, ranks=envs)
    with ONE_AT_A_TIME:
        address = address or warm()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        said = connection.makefile("rw", buffering=1)
        said.write(json.dumps(job) + "\n")
        process = int(said.readline())
        timer = threading.Timer(timeout, os.kill, (process, signal.SIGKILL))
        timer.start()
        try:
            status = int(said.readline())
        finally:
            timer.cancel()  # this process would wait for it, even where the other is gone
    return status, output.read_text()


def launch_with_bar(command, folder, what, steps):
    """
    `launch` of a run in this folder that ends after `steps`, with a bar that follows its metrics.jsonl: engines take
    seconds to start.
    """
    from tqdm import tqdm

    def done():
        there = (Path(folder) / "metrics.jsonl").exists()
        return sum(line["phase"] != "eval" for line in lines(folder)) if there else 0

    with ThreadPoolExecutor(1) as pool, tqdm(desc=what, unit="step", mininterval=0.5) as bar:
        begun = done()
        running = pool.submit(launch, command)
        ended = False
        while not ended:
            ended = wait([running], 0.5).done
            begun = min(begun, done())  # a resume cuts the log back first
            bar.total = steps - begun
            bar.update(done() - begun - bar.n)
        return running.result()


def problem(output):
    """The line in which a run said why it ended; else the last one of its output."""
    said = output.splitlines() or ["no output"]
    return next((line for line in said if line.startswith(("error: ", "watch: "))), said[-1]).removeprefix("error: ")


def lines(folder, file="metrics.jsonl", phase=None):
    """The lines of a run's metrics.jsonl or ledger.jsonl, of one phase or of all; but not a half one at the end."""
    path = Path(folder) / file
    require(path.is_file(), f"{folder}: no {file} in it: not the folder of a run")
    text = path.read_text()
    try:
        every = [*map(json.loads, filter(None, text[: text.rfind("\n") + 1].splitlines()))]
    except (ValueError, RecursionError) as e:
        require(False, f"{path}: not lines of JSON: {e}")
    whole = all(isinstance(line, dict) and named(**line) for line in every)
    require(whole, f"{path}: a line that has no phase and step")
    return [line for line in every if phase in (None, line["phase"])]


def named(phase=None, step=None, **_):
    """Whether a line of a log has a phase and a step."""
    return isinstance(phase, str) and type(step) is int and 0 <= step < MOST_STEPS


def evaluations(folder):
    """The lines of a run's evaluations.jsonl, which older runs do not have."""
    return lines(folder, "evaluations.jsonl") if (Path(folder) / "evaluations.jsonl").is_file() else []


def run(folder, *flags, ranks=1):
    """Makes a run in this folder: its metrics.jsonl, line by line. Ends this process with one line if the run fails."""
    status, output = launch(command(*flags, f"--out_dir={folder}", ranks=ranks))
    require(not status, f"{folder}: {problem(output)}")
    return lines(folder)


class Saved(dict):
    """A run's config: without a key that is read, this process ends with one line."""

    def __missing__(self, key):
        require(False, f"{self.path}: has no {key}: it was saved by another version of this program, or edited")


def saved_config(folder):
    """{key: value} of a run's config.py."""
    path = Path(folder) / "config.py"
    require(path.is_file(), f"{folder}: no config.py in it: not the folder of a run")
    saved = Saved(configurator.saved_config(path))
    saved.path = path
    return saved


# values that name nothing elsewhere; a GGUF file of an installed package is read, and the package is not imported
MADE_HERE = {"init_from": r"scratch|\w+/[\w.-]+\.gguf", "dataset": f"programs|{SUMS}"}


def check_links(run):
    """
    Ends this process with one line if a run's folder has links, pipes or devices: a stranger's could lead to your
    files, or have no end.
    """
    every = sorted(run.rglob("*"))
    # a run in progress may have deleted one meanwhile
    others = (path for path in every if path.is_symlink() or path.exists() and not (path.is_file() or path.is_dir()))
    link = next(others, None)
    require(not link, f"{link}: a symbolic link, a pipe or a device; put a file there, or nothing")


def check_trusted(run, saved, said):
    """
    Ends this process with one line if a run's saved config, which may be a stranger's, would run programs here or call
    other machines, unless `said`, {key: value} of the command line, repeats it.
    """

    def text(key):
        return str(saved.get(key, ""))

    def elsewhere(key, name):
        path = Path(name).resolve()
        theirs = path.exists() and any(path.is_relative_to(Path(folder).resolve()) for folder in (run, HUB))
        # a folder of data may name addresses
        own = path.exists() and not theirs and not (key == "dataset" and path.is_dir())
        return name and not own and (theirs or not re.fullmatch(MADE_HERE.get(key, ""), name))

    asks = {key: text(key) for key in ("agent", "judge", "sources", "engine_args")}
    asks["sandbox"] = text("sandbox") == "none"
    asks |= {key: elsewhere(key, text(key)) for key in ("init_from", "reference", "lora", "dataset")}
    asks |= {key: ".py:" in text(key) for key in (*configurator.OWN, "eval_split")}
    asks["reward"] = ".py:" in text("reward") or any(
        elsewhere("reward", name.strip()) for name in re.findall("model:([^+*]*)", text("reward"))
    )
    flags = [f"--{key}={saved[key]}" for key, asked in asks.items() if asked and said.get(key) != saved[key]]
    why = "its config has programs run here, or other machines called; if you trust it, repeat"
    require(not flags, f"{run}: {why} {shlex.join(flags)}")
