"""
Grades an exercise: first the values of the functions in a file, then 24 steps of training with them in place.

    cp -n learn/exercises/1_advantages.py mine_1.py      # and fill in what is missing
    python learn/exercises/check.py mine_1.py            # a minute on two cores
    python learn/exercises/check.py mine_1.py --values   # only the values: some seconds

A value that is wrong is shown for the smallest input at which it is, with a sentence if the mistake is a known one.
Then the run's digest decides: it is the project's own, or tools/diff.py says where your run parts from it. It is the
same on every CPU. The file is executed: grade other people's in a container.

Exit status 0: right; 1: wrong; 2: nothing to grade.
"""

import argparse
import importlib.util
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import torch  # noqa: E402
from cases import CRITIC, EXERCISES, PLAIN, REFERENCE  # noqa: E402
from runs import ROOT, command, launch, problem  # noqa: E402

import kernels  # noqa: E402
from configurator import fail, require  # noqa: E402

DIGESTS = {
    PLAIN: "a0dc934371551f7ec6352c90f264ac92f992978dbc9c378e2d9fb450bf6fcae9",
    CRITIC: "b03ea46ede27f6d2430fe839bdc04fa514a44a8ced666bfa0e37cf46d8535c62",
}
PATIENCE = 60  # seconds for a function's value
LONGEST = 1800  # seconds for a run


class Wrong(Exception):
    """An answer is wrong; the message says where, and why if that is known."""


# ---- values


def answers_in(path):
    """{name: function} of the exercises that a file answers. Ends with one line if there are none."""
    path = Path(path)
    require(path.is_file(), f"{path}: no such file; begin with a copy of learn/exercises/1_advantages.py")
    spec = importlib.util.spec_from_file_location("answers", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["answers"] = module  # where numba looks for what it compiles
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a file that exits with status 0 would be right
        fail(f"{path}: {where(error, path)}{type(error).__name__}: {error}")
    answers = {name: value for name, value in vars(module).items() if name in EXERCISES and callable(value)}
    require(answers, f"{path}: defines none of {', '.join(EXERCISES)}")
    return answers


def where(error, path):
    """'line 7: ' of the last line of the file that an error went through, or ''."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == Path(path)]
    return f"line {lines[-1]}: " if lines else ""


def tensors(result):
    """What a function returned, as a list of tensors."""
    if isinstance(result, tuple):
        return [x for part in result for x in tensors(part)]
    return [torch.as_tensor(result)]


def difference(a, b):
    """'' if two results are equal as bits, 'bits' if they are equal but for rounding, else 'values'."""
    a = tensors(a)
    b = tensors(b)
    if [x.shape for x in a] != [y.shape for y in b]:
        return "values"
    if all(torch.allclose(x.double(), y.double(), 0, 0, equal_nan=True) for x, y in zip(a, b)):
        return ""
    near = all(torch.allclose(x.double(), y.double(), 1e-4, 1e-5, equal_nan=True) for x, y in zip(a, b))
    return "bits" if near else "values"


def shown(x):
    """A value in a message: tensors as lists, a long text cut."""
    if isinstance(x, tuple):
        return ", ".join(map(shown, x))
    text = repr(x.tolist() if hasattr(x, "tolist") else x)
    return text if len(text) < 300 else f"{text[:300]} .."


def result_of(exercise, answer, case, path):
    """What an answer gives for a case. Raises Wrong if it gives nothing."""
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE)
    try:
        result = exercise.result(answer, *case)
        if result is None:
            raise TypeError("it returned None")
        tensors(result)
        return result
    except NotImplementedError:
        raise Wrong("the hole is still there") from None
    except (Exception, SystemExit) as error:
        raise Wrong(f"{where(error, path)}{type(error).__name__}: {error}\n  for ({shown(case)})") from error
    finally:
        signal.alarm(0)


def give_up(*_):
    """A handler of SIGALRM; what numba has compiled is not interrupted by it."""
    raise TimeoutError(f"no end after {PATIENCE} s")


def known_mistake(exercise, cases, results, kind, first):
    """
    The sentence about the wrong answer whose results are most like these, at the first wrong case and at four of five
    at least; as bits, if only bits are wrong. '' if there is none.
    """
    enough = ("",) if kind == "bits" else ("", "bits")
    best = ""
    most = 0.8 * len(cases)
    for mistake in exercise.mistakes:
        theirs = (exercise.result(mistake.wrong, *case) for case in cases)
        same = [difference(a, b) in enough for a, b in zip(theirs, results)]
        if same[first] and sum(same) > most:
            most = sum(same)
            best = mistake.sentence
    return best


def check_values(name, answer, path):
    """A line about an answer whose values are right. Raises Wrong at the smallest input at which they are not."""
    exercise = EXERCISES[name]
    cases = list(exercise.cases())
    results = [result_of(exercise, answer, case, path) for case in cases]
    right = [exercise.result(exercise.own, *case) for case in cases]
    kinds = [difference(*pair) for pair in zip(right, results)]
    flaw = exercise.flaw(answer, cases)
    kind = "values" if "values" in kinds else "bits" if "bits" in kinds else ""
    if not kind and not flaw:
        return f"right at {len(cases)} inputs"
    if kind == "bits" and not exercise.exact and not flaw:
        i = kinds.index(kind)
        rounded = {x for case, found in zip(cases, kinds) if found for x in case if isinstance(x, str)}
        decided = not exercise.used or exercise.used in rounded
        end = "the digest decides" if decided else f"the 24 steps use {exercise.used!r} alone"
        return f"right but for rounding, first for ({shown(cases[i])}): {end}"
    i = kinds.index(kind) if kind else 0
    sentence = flaw or known_mistake(exercise, cases, results, kind, i)
    pairs = f"\n  for ({shown(cases[i])})\n  yours  {shown(results[i])}\n  right  {shown(right[i])}" if kind else ""
    raise Wrong(f"{kind or 'behaviour'} differ{pairs}" + f"\n  {sentence}" * bool(sentence))


# ---- 24 steps


def train(folder, flags, file=None, run=launch):
    """The digest of a new run in the folder, with a file's functions in place. Raises Wrong if it fails."""
    script = [ROOT / "learn" / "exercises" / "train.py", file.resolve()] if file else [ROOT / "train_grpo.py"]
    if flags == CRITIC:
        reference = folder.with_name("reference")
        if not (reference / "ckpt" / "step_000060").is_dir():
            train(reference, REFERENCE, run=run)
        flags = (*flags, f"--reference={reference / 'ckpt' / 'step_000060'}")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        status, output = run(command(*flags, f"--out_dir={folder}", script=script), timeout=LONGEST)
    except subprocess.TimeoutExpired:
        raise Wrong(f"the run has no end after {LONGEST} s") from None
    if status:
        raise Wrong(f"the run ended: {problem(output)}")
    return output.split()[-1]


def check_digest(file, folder, flags, run=launch):
    """A line with the digest of a run with the file's functions. Raises Wrong if it is not the project's own."""
    digest = train(folder, flags, file, run)
    if digest == DIGESTS[flags]:
        return f"24 steps: digest {digest}, the project's own"
    print(f"24 steps: digest {digest}, not {DIGESTS[flags]}. To see where, the project's own run:", flush=True)
    own = folder.with_name("own")
    train(own, flags, run=run)
    _, parted = launch([sys.executable, ROOT / "tools" / "diff.py", own, folder])
    raise Wrong(parted.splitlines()[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--values", action="store_true", help="only the values, no training")
    args = parser.parse_args()
    kernels.enable_batch_invariant()
    answers = answers_in(args.file)
    folder = ROOT / "out" / "exercises" / args.file.stem
    try:
        for name, answer in answers.items():
            print(f"{name}: {check_values(name, answer, args.file)}", flush=True)
        for flags in () if args.values else dict.fromkeys(EXERCISES[name].flags for name in answers):
            name = "training"
            print(check_digest(args.file, folder, flags))
    except Wrong as wrong:
        print(f"{name}: {wrong}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
