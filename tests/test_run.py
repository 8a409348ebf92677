"""
What a run does and writes, and what ends it.

    pytest tests/test_run.py
"""

import json
import os
import re
import signal
import subprocess
import time

import pytest
import torch
from conftest import digest, wait_for
from prove import ROOT, command_of, launch, lines, processes_of
from safetensors import safe_open


def test_the_run_learns_and_no_logprob_differs(two_ranks):
    folder, _ = two_ranks
    steps = lines(folder, "metrics.jsonl", "rl")
    assert len(steps) == 24
    assert all(s["logprob_mismatch_tokens"] == 0 and s["logprob_mismatch_max"] == 0 for s in steps)
    # and there was something to learn from in every step: unequal rewards, a gradient, other weights
    assert all(s["zero_std_groups"] < 8 and s["grad_norm"] > 1e-3 and 0 < s["reward_std"] for s in steps)
    ledger = lines(folder, "ledger.jsonl", "rl")
    for stage in ("gradients", "weights", "optimizer"):
        for a, b in zip(ledger, ledger[1:]):
            assert all(a[stage][name] != b[stage][name] for name in a[stage]), (a["step"], stage)
    assert len({line["tokens"] for line in ledger}) == 24


def test_the_mismatch_counter_counts_what_is_in_the_files(two_ranks):
    """Recomputed outside of the run: the trainer's log-probs of the last step's files, from the same weights."""
    folder, _ = two_ranks
    files = sorted((folder / "queue" / "rl_000023").glob("group_*.safetensors"))
    assert len(files) == 8
    for path in files:
        with safe_open(path, "pt") as f:
            assert set(f.get_tensor("weight_version").tolist()) == {23}
            assert len(set(f.get_tensor("seeds").tolist())) == 8  # a seed for every sample


def test_two_runs_one_curve_whether_in_one_process_or_two(two_ranks, one_process):
    (a, output_a), (b, output_b) = two_ranks, one_process
    assert digest(output_a) == digest(output_b)
    assert (a / "ledger.jsonl").read_bytes() == (b / "ledger.jsonl").read_bytes()
    for x, y in zip(lines(a, "metrics.jsonl"), lines(b, "metrics.jsonl")):
        timeless = [k for k in x if not k.endswith(("_seconds", "_per_second"))]
        assert [x[k] for k in timeless] == [y[k] for k in timeless]


def test_another_seed_is_another_curve(two_ranks, tmp_path):
    status, output = launch(tmp_path / "run", "--seed=2", "--max_steps=1", "--eval_size=0")
    assert status == 0
    ours, other = lines(two_ranks[0], "ledger.jsonl"), lines(tmp_path / "run", "ledger.jsonl")
    assert all(x[k] != y[k] for x, y in zip(ours, other) for k in ("tokens", "gradients", "weights", "chain"))


def test_without_our_operators_the_check_stops_the_run(tmp_path):
    status, output = launch(tmp_path / "run", "--batch_invariant=False", "--max_steps=1", "--eval_size=0")
    assert status == 2 and "Traceback" not in output
    (line,) = [x for x in output.splitlines() if x.startswith("error:")]
    where = r"step 0, prompt \d+, sample \d, token \d+"
    assert re.search(where + r": engine .*0x.* trainer .*0x.* of \d+ log-probs differ", line)
    assert not lines(tmp_path / "run", "ledger.jsonl", "rl")


def test_a_sample_ends_with_one_eos_that_is_trained_on_or_is_marked_as_truncated(two_ranks):
    folder, _ = two_ranks
    ended = cut_off = 0
    for path in sorted((folder / "queue").glob("*/group_*.safetensors")):
        with safe_open(path, "pt") as f:
            t = {k: f.get_tensor(k) for k in f.keys()}
        sizes = t["lengths"].tolist()
        for tokens, mask, truncated in zip(t["tokens"].split(sizes), t["loss_mask"].split(sizes), t["truncated"]):
            assert mask.all() and (tokens[:-1] != 1).all()
            assert (tokens[-1] == 1) != bool(truncated) and (len(tokens) == 6 or not truncated)
            ended, cut_off = ended + (tokens[-1] == 1), cut_off + truncated
    assert ended > 1000


def test_the_samples_of_a_group_differ(two_ranks):
    folder, _ = two_ranks
    texts = []
    for path in sorted((folder / "queue" / "rl_000000").glob("group_*.safetensors")):
        with safe_open(path, "pt") as f:
            texts.append(json.loads(f.metadata()["meta"])["responses"])
    assert sum(len(set(group)) > 1 for group in texts) >= 6


def test_the_run_folder_has_what_a_reader_needs(two_ranks):
    folder, output = two_ranks
    names = {p.name for p in folder.iterdir()}
    assert {"config.py", "metrics.jsonl", "ledger.jsonl", "samples.md", "queue", "model", "engine_0.log"} <= names
    always = """step reward_mean reward_std zero_std_groups loss grad_norm entropy clip_fraction logprob_mismatch_tokens
    logprob_mismatch_max response_length_mean truncated_fraction weight_version lr rollout_seconds train_seconds
    sync_seconds wait_seconds tokens_per_second"""
    assert set(always.split()) <= set(lines(folder, "metrics.jsonl", "rl")[0])
    assert [e["step"] for e in lines(folder, "metrics.jsonl", "eval")] == [0, 24]
    assert "max_steps = 24" in (folder / "config.py").read_text()
    assert "## step 20" in (folder / "samples.md").read_text()
    assert output.count("held out after") == 2 and output.count("starting SGLang") == 1


def test_a_run_leaves_no_process(two_ranks, one_process):
    """Nor anything in shared memory, as the fixtures assert."""
    assert not processes_of(two_ranks[0]) and not processes_of(one_process[0])


# ---- what is refused before anything starts; test_train.py has more

BAD = [
    (["--learing_rate=1"], "error: --learing_rate: no such key; did you mean learning_rate?"),
    (["--init_from=no/such/folder"], "error: init_from='no/such/folder': neither a model folder"),
    (["--max_prompt_tokens=2"], "error: max_prompt_tokens=2: all 80 training prompts are longer"),
    (["--reward=numerc"], "error: reward='numerc': no such reward"),
]
if not torch.cuda.is_available():
    BAD.append((["--device=cuda"], "error: device='cuda': this machine has no CUDA device"))


@pytest.mark.parametrize("flags,message", BAD)
def test_bad_input_gets_one_line_and_status_2(tmp_path, flags, message):
    status, output = launch(tmp_path / "run", *flags, timeout=90)
    errors = [line for line in output.splitlines() if "error" in line.lower()]
    assert status == 2 and "Traceback" not in output, output
    assert len(errors) == 1 and errors[0].startswith(message), output
    assert not processes_of(tmp_path / "run")


def test_under_torchrun_one_rank_prints_the_line(tmp_path):
    status, output = launch(tmp_path / "run", "--lanes=3", ranks=2, timeout=90)
    assert status != 0 and output.count("error: lanes=3: not a power of two") == 1
    assert 'File "' not in output.split("error: lanes=3")[0] and "exitcode  : 2" in output
    assert not processes_of(tmp_path / "run")


# ---- what goes wrong in the middle of a run


def test_a_second_run_in_the_same_folder_is_refused_and_changes_nothing(two_ranks):
    folder, _ = two_ranks
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    status, output = launch(folder, timeout=60)
    assert status == 2 and "holds a run already" in output and "Traceback" not in output
    assert before == {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def test_a_reward_that_raises_ends_the_run_and_names_the_sample(tmp_path):
    (tmp_path / "mine.py").write_text("def late(prompt, response, answer):\n    return 1 / (len(answer) - 2)\n")
    reward = f"--reward={tmp_path}/mine.py:late"
    status, output = launch(tmp_path / "run", reward, "--warmup_sft_steps=0", "--eval_size=0")
    assert status == 2 and "Traceback" not in output, output[-3000:]
    (line,) = [x for x in output.splitlines() if x.startswith("error:")]
    assert re.search(r"rl step 0, prompt \d, sample 0: ZeroDivisionError.*mine.py:2", line)
    assert not processes_of(tmp_path / "run")


@pytest.mark.parametrize("how", ["dies", "goes silent"])
def test_an_engine_that_dies_or_goes_silent_ends_the_run_in_time(tmp_path, how):
    folder = tmp_path / "run"
    flags = ("--engine_timeout=5", "--max_steps=100000", "--warmup_sft_steps=0", "--eval_size=0")
    with open(tmp_path / "output", "w") as output:
        run = subprocess.Popen(command_of(folder, *flags, ranks=2), cwd=ROOT, stdout=output, stderr=output)
    try:
        metrics = folder / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and lines(folder, "metrics.jsonl") or run.poll() is not None, 120)
        time.sleep(1)
        (scheduler,) = [pid for pid, command in processes_of(folder).items() if "sglang::scheduler" in command]
        os.kill(scheduler, signal.SIGKILL if how == "dies" else signal.SIGSTOP)
        run.wait(timeout=5 + 30)
    finally:
        for pid in {**processes_of(folder), run.pid: ""} if run.poll() is None else ():
            os.kill(pid, signal.SIGKILL)
    text = (tmp_path / "output").read_text()
    assert run.returncode != 0
    wanted = "error: engine 0: the SGLang process died" if how == "dies" else "error: engine 0: silent for 5 s"
    assert wanted in text, text[-3000:]
    wait_for(lambda: not processes_of(folder), 10)
    for path in folder.glob("queue/*/group_*.safetensors"):
        with safe_open(path, "pt") as f:
            assert f.keys()
    assert lines(folder, "metrics.jsonl") and lines(folder, "ledger.jsonl")


def test_a_foreign_queue_file_ends_the_run(two_ranks, tmp_path):
    """test_sync.py has torn ones."""
    flags = ("--mode=replay", f"--queue_dir={two_ranks[0] / 'queue'}", "--seed=3", "--warmup_sft_steps=1")
    status, output = launch(tmp_path / "run", *flags)
    assert status == 1 and "Traceback" not in output
    (line,) = [x for x in output.splitlines() if x.startswith("error:")]
    assert re.search("group_0000.*: has run '.*', expected '.*': not a file of this run and step", line)
    assert not lines(tmp_path / "run", "ledger.jsonl", "rl")
