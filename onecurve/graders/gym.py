"""
Tasks of Reasoning Gym (github.com/open-thought/reasoning-gym): procedural, with verifiers. dataset='reasoning_gym:maze'
takes rows from it, by dataset_config='size=500, seed=7', the arguments of its create_dataset; --reward=reasoning_gym
calls the task's own verifier.

An answer is data: where a verifier would evaluate it as Python, only literals and arithmetic are evaluated. Verifiers
run in processes that bubblewrap isolates, where no text could write a file, start a process or reach anybody, or with
sandbox='none' in plain ones.
"""

import json
import os
import re
import shutil
import sys
from functools import lru_cache, partial

from configurator import named_arguments, require
from onecurve.graders.sandbox import BUBBLE, seccomp_filter
from onecurve.graders.workers import Workers, needs
from onecurve.run.own import CONFIG
from rewards import Reward
from sync import reason

VERSION = "0.1.25"  # pyproject.toml's; the rows and the verdicts of another one may be others


def gym_worker():
    """
    The grader of Workers: a task's verifier, by its name and the JSON of its arguments. Some raise on some texts. Four
    call eval on an answer, five SymPy's parse_expr, which calls it, too: here they get what can name nothing of Python.
    """
    import ast
    from unittest.mock import MagicMock

    # cellpylib brings matplotlib, which wants a folder to write to; nothing here draws
    for name in ("", ".animation", ".collections", ".pyplot"):
        sys.modules["matplotlib" + name] = MagicMock()
    for name in ("", ".mplot3d"):
        sys.modules["mpl_toolkits" + name] = MagicMock()

    import reasoning_gym
    import sympy

    games = reasoning_gym.games
    algorithmic = reasoning_gym.algorithmic
    for module in (algorithmic.string_insertion, algorithmic.spiral_matrix, algorithmic.binary_matrix, games.n_queens):
        module.eval = ast.literal_eval
    parse = sympy.parse_expr
    arithmetic = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Call, ast.Name, ast.Load)
    named = dict(sqrt=sympy.sqrt, __builtins__={})
    for name, x in vars(sympy).items():
        if issubclass(x if isinstance(x, type) else type(x), sympy.Expr):  # such as sin and pi
            named[name] = x

    def parse_expr(text, local_dict=None, **options):
        for node in ast.walk(ast.parse(text.strip(), mode="eval")):
            number = isinstance(node, ast.Constant) and isinstance(node.value, (int, float, complex))
            if not number and not isinstance(node, arithmetic):
                raise ValueError(f"no arithmetic: {type(node)}")
        return parse(text, local_dict, **options | dict(global_dict=dict(named)))

    for module in (sympy, sympy.parsing.sympy_parser, games.countdown, games.puzzle24):
        module.parse_expr = parse_expr
    return lambda task, arguments: reasoning_gym.create_dataset(task, **json.loads(arguments)).score_answer


def isolated():
    """
    (a command that runs another one so that it sees Python alone, writes nothing and reaches nobody; seccomp's program
    for each verdict).
    """
    command = ["bwrap", *BUBBLE, *"--clearenv --setenv PYTHONHASHSEED 0 --setenv OPENBLAS_NUM_THREADS 1".split()]
    for path in (sys.base_prefix, sys.prefix):
        command += ["--ro-bind", path, path]
    return [*command, "--remount-ro", "/"], seccomp_filter(os.uname().machine)


@lru_cache
def workers_in(sandbox):
    """The processes of the verifiers, in bubblewrap or with sandbox='none' in nothing."""
    around = dict(around=isolated) if sandbox == "bwrap" else {}
    return Workers(gym_worker, "Reasoning Gym", **around)


def rows(name, arguments):
    """
    Rows {"prompt": question, "answer": JSON of the task, its arguments and the entry} of a task. arguments: the text of
    create_dataset's. Ends the run with one line if there is no such task or argument.
    """
    task = name.partition(":")[2]
    try:
        needs("reasoning-gym", VERSION, "gym")
        import reasoning_gym

        known = named_arguments(arguments)
        return [
            {"prompt": x["question"], "answer": json.dumps(dict(task=task, arguments=known, entry=x))}
            for x in reasoning_gym.create_dataset(task, **known)
        ]
    except Exception as error:  # its own assertions, too
        require(False, f"dataset={name!r}, dataset_config={arguments!r}: {reason(error)}")


def reasoning_gym(prompt, response, answer, config=None):
    """
    The score by the task's verifier of the last <answer>..</answer> of the response, or without such tags of all of it.
    A verdict that reaches a limit of workers.py is a 0, and 'limit'; a score outside 0 .. 1 is no reward. config: by
    default that of the run that calls the user's function.
    """
    workers = workers_in((config or CONFIG.get())["sandbox"])
    task, arguments, entry = entry_of(answer)
    texts = [response, *re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)]
    _, value, notes = workers.ask((task, arguments), texts[-1].strip(), entry)
    return (value if 0 <= value <= 1 else 0.0), notes


def entry_of(answer):
    """(task, JSON of its arguments, entry) of an answer that `rows` has written. Raises ValueError."""
    try:
        known = json.loads(answer)
        return known["task"], json.dumps(known["arguments"]), known["entry"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError("is no entry of dataset='reasoning_gym:..'") from error


def make(config):
    """The Reward 'reasoning_gym'. Raises ValueError, with a cure, if something that it needs is missing."""
    needs("reasoning-gym", VERSION, "gym")
    if config["sandbox"] == "bwrap" and not shutil.which("bwrap"):
        raise ValueError("its verifiers run in bubblewrap: apt-get install bubblewrap, or --sandbox=none")
    return Reward(partial(reasoning_gym, config=config), reads=entry_of, waits=True)
