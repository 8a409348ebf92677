"""
tools/diff.py on run folders made by hand.

    pytest tests/test_diff.py
"""

import subprocess
import sys

import pytest
import torch
from conftest import ROOT, group_tensors, lines, write_ledger
from diff import main
from safetensors.torch import save_file

import sync


def make_run(folder, steps=3, seed=1, change=lambda step, tensors: None, weight=None):
    """A run folder of `steps` steps of two prompts; `change` alters a step's tensors, `weight` one hash of step 1."""
    folder.mkdir()
    (folder / "config.py").write_text(f"seed = {seed}\nout_dir = {folder.name!r}\n")
    ledger = sync.Ledger(folder / "ledger.jsonl")
    for step in range(steps):
        groups = []
        for i in range(2):
            tensors = group_tensors([3, 4], logprobs=torch.arange(7) * -0.5)
            if i == 1:
                change(step, tensors)
            queue = folder / "queue" / f"rl_{step:06d}"
            queue.mkdir(parents=True, exist_ok=True)
            sync.write_group(sync.group_path(queue, i), tensors, dict(step=step))
            groups.append(tensors)
        stages = {k: sync.content_hash(*(t[k] for t in groups)) for k in ("tokens", "logprobs", "rewards")}
        weights = {"a": "00", "b": weight if weight and step == 1 else "11"}
        ledger.append(phase="rl", step=step, prompts="0", **stages, advantages="0", weights=weights)
    return folder


def rewrite(folder, change):
    """Gives a run's ledger these lines: change(line) of each."""
    path = folder / "ledger.jsonl"
    write_ledger(path, [entry | change(entry) for entry in lines(folder, path.name)])


@pytest.fixture
def diff(capsys):
    """(exit status, output) of tools/diff.py."""

    def run(a, b):
        return main(a, b), capsys.readouterr().out

    return run


@pytest.fixture
def parted(diff):
    """parted(a, b): what is printed of two runs that differ."""

    def run(a, b):
        status, output = diff(a, b)
        assert status == 1
        return output

    return run


@pytest.fixture
def a(tmp_path):
    return make_run(tmp_path / "a")


def test_equal_runs_are_identical_and_the_exit_status_says_so(a, tmp_path):
    def compared(b):
        return subprocess.run([sys.executable, "tools/diff.py", a, b], cwd=ROOT, capture_output=True, text=True)

    same = compared(make_run(tmp_path / "b"))
    assert same.returncode == 0
    assert same.stdout.startswith("identical: 3 steps, digest ")
    shorter = compared(make_run(tmp_path / "c", steps=2))
    assert shorter.returncode == 1
    assert shorter.stderr == ""
    assert "identical as far as they go: 3 and 2 lines" in shorter.stdout


def test_a_logprob_one_bit_off_is_found_with_both_values(parted, a, tmp_path):
    def change(step, tensors):
        if step == 2:
            tensors["logprobs"][5] = torch.nextafter(tensors["logprobs"][5], torch.tensor(0.0))

    output = parted(a, make_run(tmp_path / "b", change=change))
    assert "first difference: rl step 2, logprobs" in output
    assert "prompt 1, sample 1, token 2:" in output
    assert "-2.5  0xc0200000" in output
    assert "0xc01fffff" in output


def test_step_and_versions_are_named_where_other_weights_drew_a_group(parted, tmp_path):
    """The group was begun in step 1 and trained on in step 2: the ledger names step 2, the files step 1."""

    def run(name, version):
        def change(step, tensors):
            tensors["weight_version"][5:] = step and version

        folder = make_run(tmp_path / name, change=change)
        rewrite(folder, lambda line: dict(weight_version=name if line["step"] == 2 else "the same"))
        return folder

    output = parted(run("a", 1), run("b", 2))
    assert "first difference: rl step 2, weight_version\n  drawn in step 1:\n" in output
    assert "prompt 1, sample 1, token 2:\n    1  0x0000000000000001\n    2  0x0000000000000002\n" in output


def test_what_a_tool_gave_is_named_with_both_results(parted, tmp_path):
    def run(name, given):
        folder = make_run(tmp_path / name)
        for step in range(3):
            result = given if step == 1 else "0"
            for i in range(2):
                path = sync.group_path(folder / "queue" / f"rl_{step:06d}", i)
                tensors, _ = sync.read_group(path)
                call = dict(sample=1, at="turn 0, call 2", name="add", arguments=dict(a=2, b=2), result=result)
                sync.write_group(path, tensors, dict(journal=[[], [dict(call, result="0")] * 2 + [call] * i]))
        rewrite(folder, lambda line: dict(journal=given if line["step"] == 1 else "0"))
        return folder

    output = parted(run("a", "4"), run("b", "5"))
    assert "first difference: rl step 1, journal\n  drawn in step 1:\n  prompt 1, sample 1" in output
    assert "turn 0, call 2:\n    ('add', {'a': 2, 'b': 2}, '4')\n    ('add', {'a': 2, 'b': 2}, '5')\n" in output


def test_a_parameter_is_named_and_its_element_where_checkpoints_are_kept(parted, a, tmp_path):
    b = make_run(tmp_path / "b", weight="12")
    output = parted(a, b)
    assert "first difference: rl step 1, weights of b\n    11\n    12\n" in output
    for folder, value in ((a, -2.5), (b, -2.0)):
        checkpoint = folder / "ckpt" / "step_000002"
        checkpoint.mkdir(parents=True)
        tensor = torch.zeros(3, 4)
        tensor[1, 2] = value
        save_file({"b": tensor}, checkpoint / "model-00001-of-00001.safetensors")
    output = parted(a, b)
    assert "b[1, 2], the first of 1 elements that differ:\n    -2.5  0xc0200000\n    -2  0xc0000000\n" in output


def test_the_first_stage_in_the_order_of_a_step_is_named(parted, a, tmp_path):
    def change(step, tensors):
        tensors["tokens"][0] += 1
        tensors["logprobs"][0] -= 1

    output = parted(a, make_run(tmp_path / "b", seed=2, change=change))
    assert "first difference: rl step 0, tokens" in output
    assert "prompt 1, sample 0, token 0:" in output
    assert "config: seed = 1 | 2" in output


@pytest.mark.parametrize("phase", ["base", "device"])
def test_a_line_that_one_run_alone_has_is_no_difference(parted, a, tmp_path, phase):
    """Lines were paired by number, and a run with LoRA differed first in the prompts of step 0."""
    b = make_run(tmp_path / "b")
    c = make_run(tmp_path / "c", weight="12")
    for folder in (b, c):
        first = dict(phase=phase, step=0, weights={"a": "99"})
        write_ledger(folder / "ledger.jsonl", [first, *lines(folder, "ledger.jsonl")])
    assert "identical as far as they go: 3 and 4 lines" in parted(a, b)
    assert "first difference: rl step 1, weights of b\n    11\n    12\n" in parted(a, c)


def test_evaluations_are_compared_and_of_nothing_nothing_is_said(diff, refusal, tmp_path):
    """Two empty ledgers were identical, and so were runs with other held-out scores."""
    a, b, c = (make_run(tmp_path / name) for name in "abc")
    for folder, rewards in ((a, "1"), (b, "2")):
        line = dict(phase="eval", step=3, tokens="0", rewards=rewards, scores={"pass@1": 0})
        write_ledger(folder / "evaluations.jsonl", [line])
    status, output = diff(a, b)
    assert status == 1 and output.startswith("first difference: eval step 3, rewards\n")
    assert diff(a, c)[0] == 0 == diff(a, a)[0]
    for folder in (a, b, c):
        (folder / "ledger.jsonl").write_text("")
    status, output = diff(a, a)
    assert status == 0
    assert output.startswith("identical: 1 evaluations, digest ")
    assert diff(a, b)[0] == 1
    assert "nothing to compare" in refusal(main, c, c)


@pytest.mark.parametrize("other", ["nothing", "."])
def test_what_is_no_run_is_refused_in_one_line(refusal, a, tmp_path, other):
    assert refusal(main, a, tmp_path / other).startswith("error: ")
