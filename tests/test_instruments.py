"""
tools/verify.py, branch.py and compare.py, on a real run.

    pytest tests/test_instruments.py
"""

import io
import json
import math
import os
import shutil
import statistics
import sys
import threading
import types
from pathlib import Path

import pytest
from conftest import digest, error_line, finish, launch_warm, run_warm
from safetensors.torch import load_file, save_file
from trials import interrupt, reseal

import configurator
import sync
from onecurve.run.checkpoint import read_checkpoint
from onecurve.run.record import LOGS
from train_grpo import DEFAULTS

TOOLS = Path(__file__).parent.parent / "tools"
sys.path.insert(0, str(TOOLS))
import branch  # noqa: E402
import compare  # noqa: E402
import diff  # noqa: E402
import runs  # noqa: E402
import verify  # noqa: E402
from compare import figure, intervals  # noqa: E402
from diff import first_difference  # noqa: E402
from runs import lines  # noqa: E402
from verify import chosen, differing_weight, unlike_metrics  # noqa: E402


@pytest.fixture
def tool(tmp_path, monkeypatch, capsys):
    """tool(name, arguments): (exit status, output) of a tool in this process, whose runs are forks of a warm one."""

    def launch(command, *bar):
        return run_warm(command[1:], tmp_path / "output")

    def call(name, *args):
        for module, function in (
            (compare.runs, "launch"),
            (compare.runs, "launch_with_bar"),
            (verify, "launch_with_bar"),
        ):
            monkeypatch.setattr(module, function, launch)
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        capsys.readouterr()
        try:
            status = dict(verify=verify.main, branch=branch.main, compare=compare.main)[name]()
        except SystemExit as end:
            status = end.code
        said = capsys.readouterr()
        return status or 0, said.out + said.err

    return call


def forged(run, folder, step, field):
    """A copy of a run whose ledger claims something else of a step, with a chain that fits; its digest."""
    shutil.copytree(run, folder)
    entries = lines(run, "ledger.jsonl")
    (folder / "ledger.jsonl").unlink()
    ledger = sync.Ledger(folder / "ledger.jsonl")
    for line in entries:
        del line["chain"]
        if (line["phase"], line["step"]) == ("rl", step):
            line[field] = "0" * 16
        ledger.append(**line)
    return ledger.digest


# ---- verify


@pytest.mark.law("steps of a published run, made again elsewhere")
def test_L14_a_run_made_on_two_ranks_is_verified_by_one_process(tool, two_ranks, tmp_path, assert_it_learned):
    run, output = two_ranks
    assert_it_learned(run, steps=24)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    status, said = tool("verify", run, "--steps=2", "--seed=mine", "--threads=1", f"--keep={tmp_path}/again")
    steps = ", ".join(map(str, chosen("mine", range(24), 2)))
    lines = (
        f"the samples of steps {steps} are made again (--seed=mine)",
        "evaluations after 0, 24 steps as published",
        f"verified: steps {steps} of 24, {digest(output)}",
    )
    assert (status, said.splitlines()) == (0, [*lines])
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    groups = (tmp_path / "again").glob("queue/rl_*/group_0000*")
    own = {int(path.parent.name[3:]) for path in groups if path.stat().st_nlink == 1}
    assert sorted(own) == chosen("mine", range(24), 2)  # the engine was asked for these steps, and for them alone


def with_other_weights(run, folder):
    """
    A run whose weights after 16 steps came from elsewhere. From there on it was made as any other, and all that it says
    of itself fits.
    """
    checkpoint = interrupt(run, folder) / "ckpt" / "step_000016"
    path = checkpoint / "model-00001-of-00001.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] += 0.25
    save_file(tensors, path)
    (folder / "ledger.jsonl").unlink()
    ledger = sync.Ledger(folder / "ledger.jsonl")
    for line in lines(run, "ledger.jsonl")[:76]:
        del line["chain"]
        if line["step"] == 15 and line["phase"] == "rl":
            x = tensors["model.norm.weight"]
            line["weights"] |= sync.tensor_hashes([x], [sync.Shard("model.norm.weight", tuple(x.shape), 0, x)], None)
        ledger.append(**line)
    for step in ("eval_000024", *(f"rl_{i:06d}" for i in range(16, 22))):
        shutil.rmtree(folder / "queue" / step)
    reseal(checkpoint, digest=ledger.digest)
    return digest(finish(folder, "--init_from=resume", launch=launch_warm))


@pytest.mark.control("weights from elsewhere in a checkpoint; an edited step; an edited score")
def test_L14_control_a_forged_run_is_refused(tool, two_ranks, tmp_path):
    run = two_ranks[0]
    assert with_other_weights(run, tmp_path / "run") != digest(two_ranks[1])
    status, said = tool("verify", tmp_path / "run", "--steps=1", "--seed=mine", "--threads=1")
    assert status == 1 and said.splitlines()[1] == "parted: rl step 15, weights of model.norm.weight"
    status, said = tool("verify", tmp_path / "run", "--steps=1", "--trust=16", "--threads=1")  # and that is said
    assert status == 0 and said.splitlines()[2].startswith("verified, if the checkpoint of step 16 is right: steps ")

    forged(run, tmp_path / "edited", 3, "rewards")
    metrics = (run / "metrics.jsonl").read_text()
    (tmp_path / "edited" / "metrics.jsonl").write_text(metrics.replace('"pass@1": 0.15,', '"pass@1": 0.95,'))
    assert unlike_metrics(tmp_path / "edited", run) == "eval step 24, pass@1 of metrics.jsonl: 0.95 | 0.15"
    status, said = tool("verify", tmp_path / "edited", "--steps=all", "--threads=1")
    assert status == 1 and said.splitlines()[1] == "parted: rl step 3, rewards"
    shutil.copy2(run / "ledger.jsonl", tmp_path / "edited")
    status, said = tool("verify", tmp_path / "edited", "--steps=1", "--threads=1")
    assert (status, said.splitlines()[1]) == (1, "parted: eval step 24, pass@1 of metrics.jsonl: 0.95 | 0.15")


def test_evaluations_have_a_digest_of_their_own_and_are_verified(tool, two_ranks, tmp_path, capsys):
    """They all had that of an empty ledger."""
    flags = ("--mode=eval", f"--init_from={two_ranks[0] / 'ckpt' / 'step_000016'}", "--eval_samples=2")
    runs = [tmp_path / name for name in "ab"]
    ends = [
        digest(finish(run, *flags, f"--eval_temperature={x}", launch=launch_warm)) for run, x in zip(runs, (1.0, 0.0))
    ]
    assert ends[0] != ends[1]
    status, said = tool("verify", runs[0], "--threads=1", f"--init_from={two_ranks[0] / 'ckpt' / 'step_000016'}")
    assert (status, said.splitlines()[-1]) == (0, f"verified: steps 0 of 1, {ends[0]}")
    assert diff.main(runs[0], runs[0]) == 0 and diff.main(*runs) == 1
    said = capsys.readouterr().out
    assert f"identical: 1 evaluations, {ends[0]}\nfirst difference: eval step 0, tokens\n  drawn in step 0:\n" in said


def test_a_strangers_folder_of_anything_ends_in_one_line(tool, two_ranks, tmp_path):
    run = tmp_path / "run"

    def refused(**record):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(two_ranks[0], run)
        path = run / "ckpt" / "step_000016" / "checkpoint.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | record))
        for args in (("verify", run), ("branch", run, "--step=20", f"--out_dir={tmp_path}/b")):
            status, said = tool(*args)
            assert status == 2 and f"{path.parent}: not a checkpoint of this run, whose logs" in error_line(said)

    sizes = json.loads((two_ranks[0] / "ckpt/step_000016/checkpoint.json").read_text())["bytes"]
    for name in LOGS:
        refused(bytes=sizes | {name: 10**11})  # which took all memory
    for step in (17, "16", [16], None, 10**400):
        refused(step=step)
    refused(bytes=None)
    refused(bytes=sizes | {"ledger.jsonl": "5"})

    shutil.copy2(two_ranks[0] / "ckpt/step_000016/checkpoint.json", run / "ckpt/step_000016")
    reseal(run / "ckpt" / "step_000016")
    record = json.loads((run / "ckpt/step_000016/checkpoint.json").read_text())
    record["files"] = {"/dev/zero": "0"}
    record.pop("sha256")
    record["sha256"] = sync.checksum(record)
    (run / "ckpt/step_000016/checkpoint.json").write_text(json.dumps(record))
    with pytest.raises(sync.RunError, match="/dev/zero: missing or damaged"):
        read_checkpoint(run / "ckpt" / "step_000016", 0, 1)

    shutil.rmtree(run / "ckpt" / "step_000016")
    (run / "ckpt" / "step_000024" / "model-00001-of-00001.safetensors").write_text("x")
    status, said = tool("verify", run)
    assert status == 2 and "step_000024: it and the ledger are not of one model: " in error_line(said)
    (run / "ckpt" / "step_000016").mkdir()
    os.mkfifo(run / "ckpt" / "step_000016" / "z.safetensors")
    status, said = tool("verify", run)
    assert status == 2 and "z.safetensors: a symbolic link, a pipe or a device" in error_line(said)
    (run / "ckpt" / "step_000016" / "z.safetensors").unlink()
    for line in ("[" * 10**5, '{"phase": "rl", "step": "0"}', '{"phase": ["rl"], "step": 0}', "1" * 5000):
        (run / "ledger.jsonl").write_text(f"{line}\n")
        status, said = tool("verify", run)
        assert status == 2 and "ledger.jsonl: " in error_line(said), said


@pytest.mark.parametrize("made", ["two_ranks", "mixture"])
def test_other_weights_in_a_checkpoint_are_found_before_any_computation(made, tmp_path, request):
    run = shutil.copytree(request.getfixturevalue(made)[0], tmp_path / "run")
    last = sorted((run / "ckpt").iterdir())[-2]
    line = next(x for x in lines(run, "ledger.jsonl") if (x["phase"], x["step"]) == ("rl", int(last.name[5:]) - 1))
    assert differing_weight(last, line) is None
    for file, name in ("model-00001-of-00001", "model.norm.weight"), ("optimizer/optimizer-00001-of-00001", None):
        path = last / f"{file}.safetensors"
        tensors = load_file(path)
        name = name or "exp_avg.model.norm.weight"
        tensors[name].view(-1)[5] += 2**-20
        right = path.read_bytes()
        save_file(tensors, path)
        assert differing_weight(last, line) == "model.norm.weight"
        path.write_bytes(right)
    assert differing_weight(last, line) is None


def test_an_altered_line_of_the_ledger_does_not_fit_its_chain(tool, two_ranks, tmp_path):
    (tmp_path / "config.py").write_text("")
    text = (two_ranks[0] / "ledger.jsonl").read_text().replace('"rewards": "', '"rewards": "0', 1)
    (tmp_path / "ledger.jsonl").write_text(text)
    status, said = tool("verify", tmp_path)
    assert status == 1 and said.startswith(f"parted: {tmp_path}/ledger.jsonl: line 61 is altered or torn")


@pytest.mark.parametrize(
    "args,line",
    [
        ((), "no config.py in it, and so nothing to verify"),
        (("--steps=0",), "--steps=0: a number or all"),
    ],
)
def test_nothing_to_verify_is_status_2(tool, args, line, two_ranks, tmp_path):
    status, said = tool("verify", two_ranks[0] if args else tmp_path, *args)
    assert status == 2 and said.startswith("error: ") and line in said and said.count("\n") == 1


ASKS = {
    "agent": "touch {mark}", "reward": "numeric+0.1*{mark}.py:f",
    "judge": "http://127.0.0.1:9/v1", "init_from": "theirs/model", "reference": "theirs/model", "sandbox": "none",
    "dataset": "theirs/rows", "loss": "{mark}.py:f", "advantage": "{mark}.py:f",
    "sources": 'a={{"dataset": "theirs/rows", "reward": "{mark}.py:f"}}', "engine_args": "trust_remote_code=True",
}  # fmt: skip


@pytest.mark.parametrize("name", ["verify", "branch"])
@pytest.mark.parametrize(
    "key,value",
    [
        *ASKS.items(), ("dataset", "arithmetic:theirs/rows"), ("dataset", "scratch"), ("reference", "programs"),
        ("reward", "model:scratch"), *[(key, "{mark}_folder") for key in ("init_from", "lora", "dataset")],
    ],
)  # fmt: skip
def test_a_strangers_run_runs_nothing_that_the_command_does_not_repeat(tool, tmp_path, name, key, value):
    value = value.format(mark=tmp_path / "mark")
    flags = ["--step=1", f"--out_dir={tmp_path}/b"] * (name == "branch")
    (tmp_path / "mark.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nf = len\n")
    (tmp_path / "config.py").write_text(configurator.config_source(DEFAULTS | {key: value}, {}))
    (tmp_path / "ledger.jsonl").touch()
    (tmp_path / "mark_folder").mkdir()  # in the run's folder, and so the stranger's
    status, said = tool(name, tmp_path, *flags)
    assert status == 2 and f"--{key}={value}" in said.replace("'", "") and "if you trust it, repeat" in said
    assert said.count("\n") == 1 and not (tmp_path / "mark").exists()
    status, said = tool(name, tmp_path, *flags, f"--{key}={value}")
    assert status == 2 and ("its ledger is empty" in said or "the run has steps 0 to -1" in said)


@pytest.mark.parametrize("name", ["verify", "branch"])
@pytest.mark.parametrize(
    "source",
    [
        "open({!r}, 'w')", "seed = open({!r}, 'w')", "def f(x=open({!r}, 'w')): pass", "seed = [{!r}]",
        "seed = 0x" + 5000 * "f", r"dataset = '\0'",
    ],
)  # fmt: skip
def test_the_config_of_a_published_run_is_read_and_not_executed(tool, tmp_path, name, source):
    (tmp_path / "config.py").write_text(source.format(str(tmp_path / "mark")))
    (tmp_path / "ledger.jsonl").touch()
    status, said = tool(name, tmp_path, "--step=1")
    assert status == 2 and "config.py: not only lines 'key = literal'" in said and said.count("\n") == 1
    assert not (tmp_path / "mark").exists()


def test_an_invented_ledger_and_a_mode_without_samples_are_not_verified(tool, two_ranks, tmp_path):
    def forge(name, lines, **config):
        folder = tmp_path / name
        folder.mkdir()
        saved = configurator.saved_config(two_ranks[0] / "config.py") | config
        (folder / "config.py").write_text(configurator.config_source(saved, {}))
        ledger = sync.Ledger(folder / "ledger.jsonl")
        for line in lines:
            ledger.append(**{key: x for key, x in line.items() if key != "chain"})
        return folder

    made = lines(two_ranks[0], "ledger.jsonl")
    twice = [line | dict(step=0) if line["phase"] == "rl" else line for line in made]
    for folder, why in (
        (forge("device", [*made, dict(phase="device", step=0)]), "its steps are not those of a run"),
        (forge("twice", twice), "its steps are not those of a run"),
        (forge("gap", made[:70] + made[71:]), "its steps are not those of a run"),
        (forge("eval", made, mode="eval"), "its ledger is empty"),
        (forge("replay", made, mode="replay", queue_dir="queue"), "mode='replay': a run of this mode draws no samples"),
    ):
        status, said = tool("verify", folder, "--steps=all")
        assert status == 2 and why in said and said.count("\n") == 1, said


def test_a_config_that_no_run_can_have_is_nothing_to_verify(tool, tmp_path):
    config = DEFAULTS | dict(scratch_args=f"num_hidden_layers={10**12}")
    (tmp_path / "config.py").write_text(configurator.config_source(config, {}))
    sync.Ledger(tmp_path / "ledger.jsonl").append(phase="rl", step=0)
    status, said = tool("verify", tmp_path)
    assert status == 2 and "its weights do not fit into this machine" in error_line(said)


@pytest.mark.parametrize("name", ["verify", "branch"])
def test_a_run_with_links_in_it_is_refused(tool, name, tmp_path):
    (tmp_path / "ledger.jsonl").touch()
    (tmp_path / "config.py").write_text(configurator.config_source(DEFAULTS, {}))
    (tmp_path / "queue").symlink_to("/etc")
    status, said = tool(name, tmp_path, *["--step=1", "--out_dir=x"] * (name == "branch"))
    assert status == 2 and f"{tmp_path}/queue: a symbolic link" in said and said.count("\n") == 1


def test_of_a_strangers_queue_folders_of_steps_alone_are_copied(tmp_path):
    """Others ended in a traceback, here or in the run."""
    for name in ("rl_000000", "rl_x", "rl_1x"):
        (tmp_path / "run" / "queue" / name).mkdir(parents=True)
    (tmp_path / "run" / "queue" / "rl_000009").touch()
    verify.copy_run(tmp_path / "run", tmp_path / "again", None)
    assert [path.name for path in (tmp_path / "again" / "queue").iterdir()] == ["rl_000000"]


def test_the_seed_chooses_the_steps():
    assert chosen("a", range(100), 5) != chosen("b", range(100), 5) == sorted(chosen("b", range(100), 5))
    assert chosen("a", range(7), 9) == [*range(7)]


def test_a_comparison_without_two_sides_is_refused(tool):
    status, said = tool("compare")
    assert status == 2 and said.startswith("error: wants the flags of two sides") and said.count("\n") == 1


# ---- branch


def test_a_branch_has_the_past_of_its_run_and_a_future_of_its_own(tool, two_ranks, tmp_path):
    """
    From a step without a checkpoint; with nothing changed, which is the run itself: the control; and with one bit of
    one weight changed.
    """
    run, output = two_ranks
    cases = (
        ("--step=20 --learning_rate=1e-3", "weights", "learning_rate=0.001 (the run has 0.0002)"),
        ("--step=16 --learning_rate=2e-4", "", ""),
        ("--step=20 --ulp=model.norm.weight[7]", "logprobs", "model.norm.weight[7] by one bit"),
    )
    for i, (change, differs, told) in enumerate(cases):
        status, said = tool("branch", run, f"--out_dir={tmp_path}/{i}", "--threads=1", *change.split())
        assert status == 0 and told in said, said
        a, b = (lines(folder, "ledger.jsonl") for folder in (run, tmp_path / str(i)))
        if not differs:
            assert f"digest {b[-1]['chain']}" == digest(output)
            continue
        x, y, stage, _ = first_difference(a, b)
        assert (x["phase"], x["step"], stage) == ("rl", 20, differs)
        assert x["tokens"] == y["tokens"] and len(a) == len(b)


def test_what_cannot_be_branched_is_one_line(tool, two_ranks, tmp_path):
    for args, line in (
        ((tmp_path, "--step=1"), "no config.py in it: not the folder of a run"),
        ((two_ranks[0], "--step=99", f"--out_dir={tmp_path}/x"), "--step=99: the run has steps 0 to 23"),
        ((two_ranks[0], "--step=9"), "choose a folder that is not there yet"),
        ((two_ranks[0], "--step=9", "--learning_rat=1"), "--learning_rat: no such key; did you mean learning_rate?"),
        ((two_ranks[0], "--step=16", f"--out_dir={tmp_path}/x", "--ulp=lm.weight[0]"), "has no such weight"),
        ((two_ranks[0], "--step=16", f"--out_dir={tmp_path}/y", "--ulp=model.norm.weight[64]"), "has the shape [64]"),
        ((), "wants a run, a step and flags"),
    ):
        status, said = tool("branch", *args)
        assert status == 2 and line in said and said.count("\n") == 1, said


# ---- compare


def test_intervals_are_those_of_the_textbook():
    """Student's sleep data (1908), whose paired and Welch intervals are in R's documentation of t.test."""
    a = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    b = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = intervals(a, b)
    assert found["mean"] == pytest.approx(1.58)
    assert found["mean"] - found["paired"] == pytest.approx(0.7001142, abs=1e-6)
    assert found["mean"] - found["unpaired"] == pytest.approx(-0.2054832, abs=1e-6)
    ratio = (statistics.variance(a) + statistics.variance(b)) / statistics.variance(y - x for x, y in zip(a, b))
    assert found["seeds"] == pytest.approx(10 * ratio)
    assert intervals([1, 2], [2, 3])["seeds"] == math.inf and intervals([1, 1], [1, 1])["seeds"] == 2


def test_a_figure_is_the_last_evaluation_or_a_mean_of_the_last_steps(capsys):
    steps = [dict(phase="rl", step=i, reward_mean=i) for i in range(8)]
    lines = [*steps, {"phase": "eval", "pass@1": 0.25}, {"phase": "eval", "pass@1": 0.5}]
    assert figure(lines, "pass@1") == 0.5 and figure(lines, "reward_mean") == 6.5
    with pytest.raises(SystemExit):
        figure(lines, "pass@2")
    assert "--metric=pass@2: the runs have pass@1, reward_mean" in capsys.readouterr().err


def test_two_settings_are_compared_on_equal_noise_and_runs_are_made_once(tool, tmp_path):
    both = "config/small.py --mode=rm --max_steps=3 --checkpoint_every=0 --warmup_sft_steps=0".split()
    both.append("--dataset=arithmetic:0:20")
    args = "compare", "", "--learning_rate=1e-2", *both, "--seeds=2", f"--out={tmp_path}", "--metric=eval_loss"
    status, said = tool(*args)
    assert status == 0 and "the first step's samples are equal with 2 of 2 seeds" in said, said
    assert said.splitlines()[2].count("paired") == 2 and "2 seeds are too few to trust" in said.splitlines()[2]
    runs = sorted(tmp_path.glob("*/seed_*"))
    figures = [json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["eval_loss"] for run in runs]
    assert len(runs) == 4 and len({*figures}) == 4
    times = [(run / "finished").stat().st_mtime_ns for run in runs]
    assert tool(*args)[1].splitlines()[:4] == said.splitlines()[:4]
    assert [(run / "finished").stat().st_mtime_ns for run in runs] == times


def test_a_bar_says_how_much_is_left_and_does_not_wait_for_a_log(tmp_path, capsys):
    """A run's log begins when the run does; its evaluations are no steps; a resume cuts it back."""
    steps = [json.dumps(dict(phase=phase, step=0)) + "\n" for phase in ("sft", "eval", "rl", "rl")]
    for text, begun, bar in (("".join(steps), "", "3/8 "), ("".join(steps[:3]), "\n\n" + "".join(steps), "0/6 ")):
        (tmp_path / "metrics.jsonl").write_text(begun) if begun else None
        code = f"import time; time.sleep(0.6); open({str(tmp_path / 'metrics.jsonl')!r}, 'w').write({text!r})"
        assert runs.launch_with_bar([sys.executable, "-c", code], tmp_path, "making", 8) == (0, "")
        assert bar in capsys.readouterr().err


def test_a_worker_that_is_gone_leaves_no_timer_to_wait_for(tmp_path, monkeypatch):
    gone = types.SimpleNamespace(stdin=io.StringIO(), stdout=io.StringIO("999999999\n"))  # a process, and no end
    monkeypatch.setattr(runs, "warm", lambda worker: gone)
    with pytest.raises(ValueError):
        run_warm([], tmp_path / "output")
    timers = [x for x in threading.enumerate() if isinstance(x, threading.Timer)]
    for timer in timers:
        timer.join(2)
    assert not any(timer.is_alive() for timer in timers)
