"""
Tasks of Reasoning Gym (github.com/open-thought/reasoning-gym): procedural, with verifiers. dataset='reasoning_gym:maze'
takes rows from it, by dataset_config='size=500, seed=7', the arguments of its create_dataset; --reward=reasoning_gym
asks the task's own verifier.

Some verifiers evaluate the text that they judge. So they run where that can write no file and reach no network: in
processes that bubblewrap isolates, or with sandbox='none' in plain ones.
"""

import json
import re
import shutil
import sys

from configurator import named_arguments, require
from graders.workers import Workers, needs
from rewards import SETTINGS
from sync import reason

VERSION = "0.1.25"  # pyproject.toml's; the rows and the verdicts of another one may be others


def gym_worker():
    """The grader of Workers: a task's verifier, by its name and the JSON of its arguments. Some raise on some texts."""
    import reasoning_gym

    return lambda task, arguments: reasoning_gym.create_dataset(task, **json.loads(arguments)).score_answer


def isolated():
    """A command that runs one which reads all, writes nothing and reaches nobody; [] with sandbox='none'."""
    bubble = "bwrap --unshare-all --die-with-parent --new-session --ro-bind / / --dev /dev --proc /proc --tmpfs /tmp"
    command = bubble.split()
    for path in (sys.base_prefix, sys.prefix):  # which may be in /tmp
        command += ["--ro-bind", path, path]
    return command if SETTINGS["sandbox"] == "bwrap" else []


WORKERS = Workers(gym_worker, "Reasoning Gym", isolated)


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
        return [
            {"prompt": x["question"], "answer": json.dumps(dict(task=task, arguments=known, entry=x))}
            for x in reasoning_gym.create_dataset(task, **known)
        ]
    except Exception as error:  # its own assertions, too
        require(False, f"dataset={name!r}, dataset_config={arguments!r}: {reason(error)}")


def reasoning_gym(prompt, response, answer):
    """
    What the task's verifier gives the last <answer>..</answer> of the response, or without such tags all of it. A
    verdict of more than workers.SECONDS of CPU time is a 0, and 'limit'.
    """
    task, arguments, entry = entry_of(answer)
    texts = [response, *re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)]
    return WORKERS.ask((task, arguments), texts[-1].strip(), entry)[1:]


def entry_of(answer):
    """(task, JSON of its arguments, entry) of what `rows` has written. Raises ValueError."""
    try:
        asked = json.loads(answer)
        return asked["task"], json.dumps(asked["arguments"]), asked["entry"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError("is no entry of dataset='reasoning_gym:..'") from error


def needs_gym():
    needs("reasoning-gym", VERSION, "gym")
    if SETTINGS.get("sandbox") == "bwrap" and not shutil.which("bwrap"):
        raise ValueError("its verifiers run in bubblewrap: apt-get install bubblewrap, or --sandbox=none")


reasoning_gym.check = needs_gym
reasoning_gym.reads = entry_of
