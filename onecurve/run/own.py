"""
Functions in a user's file, named 'mine.py:f': rewards, losses, advantages, agents, data sets. How they are loaded, and
how their errors become one line.
"""

import importlib.util
import inspect
import os
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from pathlib import Path
from traceback import extract_tb

import torch

from configurator import printable, require, suggestion
from onecurve.run.versions import ROOT

# The config of the run that calls the user's function: `code`, `python` and `judge` of onecurve/graders/ use it.
CONFIG = ContextVar("CONFIG")


@contextmanager
def run_of(config):
    """Within it, in this thread or task, CONFIG has this config."""
    token = CONFIG.set(config)
    try:
        yield
    finally:
        CONFIG.reset(token)


@contextmanager
def left_alone():
    """Raises ValueError where the code inside leaves behind what the whole run would have from then on."""

    def state():
        folder = os.stat(".")  # of one that was deleted, too
        return folder.st_dev, folder.st_ino, torch.get_default_dtype(), torch.is_grad_enabled()

    before = state()
    yield
    if state() != before:
        raise ValueError("it changes the working directory, or torch's dtype or gradients, for the run; set them back")


def find_function(name, what, known=()):
    """
    The function called `name`, from a file, which is run only once. Raises ValueError with a cure. known: names
    without a file that are valid, too.
    """
    file, _, attribute = name.rpartition(":")
    if not file.endswith(".py"):
        cure = f"Use {', '.join(known)}{' or ' * bool(known)}'my_file.py:my_function' (no + or * in the path)"
        raise ValueError(f"no such {what} as {name!r}{suggestion(name, known) or '.'} {cure}")
    folders = Path.cwd(), ROOT.resolve()
    path = next(filter(Path.is_file, (folder / file for folder in folders)), None)
    if path is None:
        raise ValueError(f"no file {file} in {' or '.join(dict.fromkeys(map(str, folders)))}")

    key = str(path.resolve())  # the module's name, not the stem, which two files may share; dataclasses need it, too
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, key)
        sys.modules[key] = module = importlib.util.module_from_spec(spec)
        try:
            with left_alone():
                spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[key]
            raise ValueError(f"{file} does not load: {describe(error)}") from error
    functions = {key: x for key, x in vars(sys.modules[key]).items() if callable(x)}
    if attribute not in functions:
        raise ValueError(f"{file} has no function {attribute!r}{suggestion(attribute, functions)}")
    return functions[attribute]


def parameters_of(function):
    """The names of a function's parameters; none where Python does not know them."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # of something written in C
        return ()


@lru_cache
def own_function(key, name):
    """
    The user's function that a key names as 'mine.py:f', to be called with named arguments; None for a built-in name.
    Ends the run with one line if there is no such function, if it or its attribute `before` raises, or if it returns
    other shapes than that of the log-probs (a loss, and what it clips) or of the rewards (an advantage).
    """
    if ".py:" not in name:
        return None
    try:
        function = find_function(name, key)
    except ValueError as error:
        require(False, f"{key}={name!r}: {error}")

    def guarded(call=function, **inputs):
        try:
            returned = call(**inputs)
            if call is function:
                # raises unless all have one shape
                torch.stack([inputs["logprobs"], *returned] if key == "loss" else [inputs["rewards"], returned])
                if key == "loss" and inputs["logprobs"].requires_grad > returned[0].requires_grad:
                    raise ValueError("its loss has no gradient; compute it from logprobs, without detach() or item()")
        except (Exception, SystemExit) as error:
            require(False, f"{key}={name!r}: {describe(error)}")
        return returned

    if hasattr(function, "before"):
        guarded.before = partial(guarded, function.before)
    return guarded


def describe(error):
    """One line for an exception, with the deepest line in the user's own file, not the one in a library it called."""
    others = (
        "<frozen importlib",
        os.path.dirname(os.__file__),
        str(ROOT / "rewards.py"),
        str(ROOT / "onecurve"),
    )
    own = ""
    place = ""
    for file, line, *_ in extract_tb(error.__traceback__):
        if file == own or not (own or file.startswith(others)):
            own = file
            place = f" ({Path(file).name}:{line})"
    return printable(" ".join(f"{type(error).__name__}: {error}".split())[:200]) + place
