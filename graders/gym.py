"""
Tasks of Reasoning Gym (github.com/open-thought/reasoning-gym): procedural, with verifiers. dataset='reasoning_gym:maze'
takes rows from it, by dataset_config='size=500, seed=7', the arguments of its create_dataset; --reward=reasoning_gym
asks the task's own verifier.

Some verifiers evaluate the text that they judge. So they run where that can write no file and reach no network: in
processes that bubblewrap isolates, or with sandbox='none' in plain ones.
"""

import json
import os
import re
import shutil
import signal
import sys

from configurator import named_arguments, require
from graders.workers import Workers, needs
from rewards import SETTINGS
from sync import reason

VERSION = "0.1.25"  # pyproject.toml's; the rows and the verdicts of another one may be others
SECONDS = 5.0  # CPU time that a verdict may take


def gym_worker(seconds):
    """
    What a worker runs (Workers): lines [task, arguments, entry, response] in; for each a line [exit status, CPU
    seconds, score] out. A verifier that raises on a text, as some do, gives it no score.
    """
    import reasoning_gym

    tasks = {}
    for line in sys.stdin:
        task, arguments, entry, response = json.loads(line)
        key = json.dumps([task, arguments])
        if key not in tasks:
            tasks[key] = reasoning_gym.create_dataset(task, **arguments)
        read, write = os.pipe()
        if not (child := os.fork()):
            signal.setitimer(signal.ITIMER_PROF, seconds)
            os.dup2(2, 1)  # a text that is evaluated may print
            os.write(write, repr(float(tasks[key].score_answer(response, entry))).encode())
            os._exit(0)
        os.close(write)
        _, status, used = os.wait4(child, 0)
        score = os.read(read, 64).decode()
        os.close(read)
        print(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, score]), flush=True)


def isolated():
    """The command of a Python that reads all, writes nothing and reaches nobody."""
    bubble = "bwrap --unshare-all --die-with-parent --new-session --ro-bind / / --dev /dev --proc /proc --tmpfs /tmp"
    python = [word for path in (sys.base_prefix, sys.prefix) for word in ("--ro-bind", path, path)]  # may be in /tmp
    return [*[*bubble.split(), *python] * (SETTINGS["sandbox"] == "bwrap"), sys.executable]


WORKERS = Workers(gym_worker, SECONDS, "Reasoning Gym", isolated)


def rows(name, arguments):
    """
    Rows {"prompt": question, "answer": JSON of the task, its arguments and the entry} of a task. arguments: the text of
    create_dataset's. Ends the run with one line if there is no such task or argument.
    """
    task = name.partition(":")[2]
    try:
        needs_gym()
        import reasoning_gym

        known = named_arguments(arguments)
        entries = reasoning_gym.create_dataset(task, **known)
        return [
            {"prompt": x["question"], "answer": json.dumps(dict(task=task, arguments=known, entry=x))} for x in entries
        ]
    except Exception as error:  # its own assertions, too
        require(False, f"dataset={name!r}, dataset_config={arguments!r}: {reason(error)}")


def reasoning_gym(prompt, response, answer):
    """
    What the task's verifier gives the last <answer>..</answer> of the response, or without such tags all of it. A
    verdict of more than SECONDS of CPU time is a 0, and 'limit'.
    """
    asked = entry_of(answer)
    tagged = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
    text = (tagged or [response])[-1].strip()
    status, seconds, score = WORKERS.ask(asked["task"], asked["arguments"], asked["entry"], text)
    verdict = {0: "pass", -signal.SIGPROF: "limit"}.get(status, "fail")
    return float(score or 0), dict(verdict=verdict, near_limit=status == -signal.SIGPROF or seconds > SECONDS / 2)


def entry_of(answer):
    """What `rows` has written. Raises ValueError."""
    try:
        asked = json.loads(answer)
        return {key: asked[key] for key in ("task", "arguments", "entry")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError("is no entry of dataset='reasoning_gym:..'") from error


def needs_gym():
    needs("reasoning-gym", VERSION, "gym")
    if SETTINGS.get("sandbox") == "bwrap" and not shutil.which("bwrap"):
        raise ValueError("its verifiers run in bubblewrap: apt-get install bubblewrap, or --sandbox=none")


reasoning_gym.check, reasoning_gym.reads = needs_gym, entry_of
