"""
tools/best.py: which samples of a run's queue become data. tests/test_algorithms.py trains on some.

    pytest tests/test_best.py
"""

import json
import sys

import best
import pytest
import torch

import configurator
import sync
from train_grpo import DEFAULTS


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """run(flags): (rows of best.jsonl, what was printed) of a run of four groups and one that is not finished."""

    def call(*flags, **changes):
        config = DEFAULTS | dict(pass_reward=0.6) | changes
        (tmp_path / "config.py").write_text(configurator.config_source(config))
        for i, rewards in enumerate(([1.0, 1.0, 1.0], [0.0, 0.0, 0.6], [0.1, 0.1, 0.0], [0.9, 0.0, 1.0], [2.0] * 3)):
            queue = tmp_path / "queue" / f"rl_{i // 2:06d}"
            queue.mkdir(parents=True, exist_ok=True)
            meta = dict(prompt_text=f"p{i}", responses=list("abc"), finished=i < 4)
            sync.write_group(sync.group_path(queue, i % 2), dict(rewards=torch.tensor(rewards)), meta)
        monkeypatch.setattr(sys, "argv", ["best.py", str(tmp_path), *flags])
        best.main()
        rows = map(json.loads, open(tmp_path / "best.jsonl"))
        return [row["prompt"] + row["answer"] for row in rows], capsys.readouterr().out

    return call


def test_the_first_of_the_highest_rewards_is_taken_if_it_is_right(run):
    """0.6 in float32 is a little more than 0.6, and right."""
    rows, output = run()
    assert rows == ["p0a", "p1c", "p3c"] and output.endswith("best.jsonl: 3 samples of 4 groups\n")


def test_several_of_a_group_are_taken_by_their_rewards(run):
    assert run("--count=2")[0] == ["p0a", "p0b", "p1c", "p3c", "p3a"]


def test_an_agents_samples_and_another_programs_folder_are_refused_in_one_line(run, tmp_path, monkeypatch, refusal):
    (tmp_path / "config.py").write_text("x = 1\n")
    monkeypatch.setattr(sys, "argv", ["best.py", str(tmp_path)])
    assert "no rollout files in its queue" in refusal(best.main)
    assert "best.py takes those of one turn" in refusal(run, agent="agents/calculator.py:solve")
    (tmp_path / "config.py").write_text("x = 1\n")
    assert f"{tmp_path}/config.py: has no agent: it was saved by another version" in refusal(best.main)
