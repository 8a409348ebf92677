"""
The watch for reward hacking: its signals on made figures, and a run that it ends.

    pytest tests/test_watch.py
"""

import os
import random
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import error_line, finish, launch_warm, shared_memory

from rewards import hacking, text_metrics

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
from prove import lines, replay_of, run_with_kills  # noqa: E402
from test_laws import ledger  # noqa: E402


def steps_of(n, **metrics):
    """n steps of a run that learns honestly, with these metrics changed: numbers, or functions of the step."""
    honest = dict(
        reward_mean=lambda i: 0.3 + i / 200, unique_answers=lambda i: 3 - i / 40, distinct_2=lambda i: 0.5 - i / 400,
        repetition=0.1, symbols=0.05, truncated_fraction=lambda i: 0.2 - i / 400, response_length_mean=lambda i: 40 + i,
        kl_reference=lambda i: 0.001 * i, reward_numeric=lambda i: 0.2 + i / 200,
    )  # fmt: skip
    return [{name: x(i) if callable(x) else x for name, x in (honest | metrics).items()} for i in range(n)]


@pytest.mark.parametrize(
    "metric,hacked,harmless",
    [
        ("kl_reference", lambda i: 0.001 * i + (i > 50) * 0.5, lambda i: 0.01 * i),
        ("unique_answers", lambda i: 3 if i < 50 else 0.02, lambda i: 3 if i < 50 else 0.9),
        ("distinct_2", lambda i: 0.5 if i < 50 else 0.01, lambda i: 0.5 if i < 50 else 0.1),
        ("repetition", lambda i: 0.1 if i < 50 else 0.9, lambda i: 0.1 if i < 50 else 0.4),
        ("symbols", lambda i: 0.1 if i < 50 else 0.9, lambda i: 0.1 if i < 50 else 0.3),
        ("truncated_fraction", lambda i: float(i > 50), lambda i: 0.3),
        ("response_length_mean", lambda i: 40 if i < 50 else 400, lambda i: 40 + 1.5 * i),
        ("reward_numeric", lambda i: 0.2 + i / 200 - (i > 50) * 0.4, lambda i: 0.2 + i / 250),
    ],
)
def test_each_signal_speaks_where_it_should_and_nowhere_else(metric, hacked, harmless):
    assert hacking(steps_of(100), "numeric") == "" == hacking(steps_of(100, **{metric: harmless}), "numeric")
    signals = [hacking(steps_of(n, **{metric: hacked}), "numeric") for n in range(100)]
    spoke = [n for n, signal in enumerate(signals) if signal]
    assert 50 < spoke[0] <= 60 and signals[spoke[0]].startswith("reward_mean - " * ("reward_" in metric) + metric)


def test_a_kl_that_grows_is_no_signal_while_the_reward_does_not():
    grows = dict(kl_reference=lambda i: 0.001 * i + (i > 50) * 0.5)
    assert hacking(steps_of(60, **grows)) and not hacking(steps_of(60, **grows, reward_mean=0.3))
    assert not hacking(steps_of(60, reward_numeric=-5.0))  # nobody said that it is the truth
    without = [{k: x for k, x in step.items() if k != "kl_reference"} for step in steps_of(60)]
    assert hacking(without) == "" == hacking(without[:45] + steps_of(60)[45:])  # as after a rollback


def test_the_figures_of_texts_are_those_of_a_count_by_hand():
    t = dict(
        tokens=torch.tensor([1, 2, 1, 2, 9, 5, 5, 5, 7]), lengths=torch.tensor([5, 4]),
        loss_mask=torch.tensor([1, 1, 1, 1, 0, 1, 1, 1, 1]).bool(),
    )  # fmt: skip
    groups = [(t, dict(responses=["ab!!", "a b"])), (t, dict(responses=["ab!!", "ab!!"]))]
    # 1 2, 2 1, 1 2 | 5 5, 5 5, 5 7, twice; four different pairs of twelve
    assert text_metrics(groups) == dict(
        unique_answers=1.0, distinct_2=pytest.approx(4 / 12), repetition=pytest.approx(1 / 3), symbols=6 / 15
    )


HACKED = """
def longer(prompt, response, answer):
    return len(response) / 6
"""


@pytest.fixture
def gamed(tmp_path):
    """Flags of a run whose reward is of length, beside the truth."""
    (tmp_path / "mine.py").write_text(HACKED)
    flags = f"--reward={tmp_path}/mine.py:longer --truth_reward=numeric --eval_size=0 --checkpoint_every=8"
    return (*flags.split(), "--keep_checkpoints=9")


def test_a_run_ends_where_its_reward_is_gamed_and_a_replay_does_too(tmp_path, gamed):
    """Without the watch the run goes on: the control."""
    flags = (*gamed, "--max_steps=48", "--learning_rate=4e-4")
    status, output = launch_warm(tmp_path / "a", *flags, "--watch=stop")
    (said,) = [line for line in output.splitlines() if line.startswith("watch: ")]
    steps = lines(tmp_path / "a", "metrics.jsonl", "rl")
    assert status == 3 and 30 <= len(steps) < 48 and f" after step {len(steps)}; " in said
    assert re.match("watch: (reward_mean - reward_numeric|response_length_mean|truncated_fraction) [0-9.]+ > ", said)
    healthy = int(re.search(r"ckpt/step_(\d+), from which tools/branch.py \S+ --step=\d+ goes on", said)[1])
    assert healthy % 8 == 0 and len(steps) - 28 < healthy <= len(steps) - 20
    assert steps[-1]["reward_mean"] > steps[0]["reward_mean"] + 0.2 and steps[-1]["reward_numeric"] < 0.3

    status, output = launch_warm(tmp_path / "b", *flags, "--watch=stop", *replay_of(tmp_path / "a"))
    assert status == 3 and said.replace("/a", "/b") in output
    assert lines(tmp_path / "b", "ledger.jsonl") == lines(tmp_path / "a", "ledger.jsonl")
    # It stopped with a checkpoint; with the watch it stops again, without it it goes on.
    assert (tmp_path / "a" / "ckpt" / f"step_{len(steps):06d}").is_dir()
    finish(tmp_path / "a", *flags, "--init_from=resume", "--watch=", launch=launch_warm)
    assert len(lines(tmp_path / "a", "metrics.jsonl", "rl")) == 48


def test_a_run_that_turns_back_has_one_ledger_killed_and_replayed(tmp_path, gamed):
    """On two ranks, one of which gets a SIGKILL; and in one process from its files, without an engine."""
    flags = (*gamed, "--max_steps=40", "--learning_rate=2e-4", "--watch=rollback", "--watch_kl_coef=2")
    with shared_memory():
        rng = random.Random(os.urandom(8))
        status, output, victims = run_with_kills(tmp_path / "a", 1, rng, *flags, ranks=2)
    assert status == 0 and len(victims) == 1, output[-4000:]
    (said,) = {line for line in output.splitlines() if line.startswith("watch: ")}  # after a kill it may turn again
    (turn,) = lines(tmp_path / "a", "ledger.jsonl", "rollback")
    assert said == f"watch: {turn['signal']} after step {turn['step']}; back to the checkpoint of step {turn['to']}"
    assert turn["to"] == (turn["step"] - 20) // 8 * 8 and f"resuming at step {turn['to']}" in output
    entries, n = lines(tmp_path / "a", "ledger.jsonl", "rl"), turn["step"]
    before, after = entries[:n], entries[n:]
    assert [x["step"] for x in after] == list(range(turn["to"], 40))
    assert all(x["prompts"] != y["prompts"] for x, y in zip(before[turn["to"] :], after))  # a new order of the data
    steps, hacked = lines(tmp_path / "a", "metrics.jsonl", "rl"), lines(tmp_path / "a", "metrics_0.jsonl", "rl")
    assert [x["step"] for x in steps] == list(range(40)) and steps[: turn["to"]] == hacked[: turn["to"]]
    assert steps[turn["to"]]["kl_reference"] == 0 < min(x["kl_reference"] for x in steps[turn["to"] + 1 :])
    # What would be the end of it without the turn, and with it: the control.
    assert hacked[-1]["reward_mean"] > 0.8 and max(x["reward_mean"] for x in steps) < 0.6

    replayed = finish(tmp_path / "b", *flags, *replay_of(tmp_path / "a"), launch=launch_warm)
    assert ledger(tmp_path / "b") == ledger(tmp_path / "a") and said in replayed
    status, output = launch_warm(tmp_path / "a", *flags, "--init_from=resume", "--checkpoint_every=4", timeout=60)
    assert status == 2 and "checkpoint_every=4 (the run has 8)" in error_line(output)
