"""Tasks of Reasoning Gym: the same rows every time, their own verifiers, and nothing that a text can do there."""

import json
import re

import pytest
from conftest import finish, launch_warm
from prove import ROOT, lines

pytest.importorskip("reasoning_gym", reason="no Reasoning Gym: uv sync --group gym")
from graders import gym  # noqa: E402
from graders.workers import Workers  # noqa: E402
from rewards import check_answers, load_reward, load_rows  # noqa: E402
from train_grpo import DEFAULTS  # noqa: E402


def data(task, arguments="size=8, seed=3", **others):
    return load_rows(DEFAULTS | dict(dataset=f"reasoning_gym:{task}", dataset_config=arguments, eval_size=2, **others))


@pytest.mark.parametrize("task", ["countdown", "maze", "simple_equations", "spiral_matrix", "word_sorting"])
def test_rows_are_the_same_every_time_and_the_tasks_verifier_judges_them(task):
    training, held_out = data(task)
    assert (training, held_out) == data(task) != data(task, "size=8, seed=4") and len(training) == 6
    reward = load_reward("reasoning_gym", DEFAULTS)
    check_answers({"": reward}, training, DEFAULTS)
    answers = [json.loads(row["answer"])["entry"]["answer"] for row in training]
    for row, right, wrong in zip(training, answers, answers[1:] + answers[:1]):
        for response in (f" {right}\n", f"so <answer>1</answer>, no: <answer>{right}</answer>."):
            assert reward(row["prompt"], response, row["answer"])[0] == 1
        if right != wrong:
            assert reward(row["prompt"], f"{right} <answer>{wrong}</answer>", row["answer"])[0] < 0.5


def test_a_text_that_is_evaluated_writes_nothing_prints_nothing_and_gives_no_other_verdict(tmp_path):
    """Spiral matrices evaluate the answer. One that fails, prints, ends its process or takes for ever is no error."""
    load_reward("reasoning_gym", DEFAULTS)  # sets the sandbox
    row = data("spiral_matrix")[0][0]
    right = json.loads(row["answer"])["entry"]["answer"]
    there = tmp_path / "there"
    acts = [
        f"__import__('pathlib').Path({str(there)!r}).write_text('x')",
        "print('[0, 0.0, \"1.0\"]')",
        "__import__('os')._exit(0)",
        "1/0",
        "__import__('socket').create_connection(('127.0.0.1', 1))",
    ]
    for act in acts:
        value, notes = gym.reasoning_gym("", f"[{act}]", row["answer"])
        assert value < 1, act
        assert gym.reasoning_gym("", right, row["answer"])[0] == 1
    assert not there.exists()
    assert gym.reasoning_gym("", "[" + "9" * 9 + "**" + "9" * 9 + "]", row["answer"]) == (
        0,
        dict(verdict="limit", near_limit=True),
    )


def test_without_bubblewrap_a_text_could_write(tmp_path, monkeypatch):
    """The control: what the sandbox keeps it from."""
    row = data("spiral_matrix")[0][0]
    monkeypatch.setattr(gym, "WORKERS", Workers(gym.gym_worker, ""))
    there = tmp_path / "there"
    gym.reasoning_gym("", f"[__import__('pathlib').Path({str(there)!r}).write_text('x')]", row["answer"])
    assert there.exists()


@pytest.mark.parametrize(
    "task,arguments,message",
    [
        ("chess960", "", "dataset='reasoning_gym:chess960', dataset_config='': Dataset 'chess960' not reg"),
        ("maze", "sise=3", "dataset='reasoning_gym:maze', dataset_config='sise=3': .* 'sise'"),
        ("maze", "3", "dataset='reasoning_gym:maze', dataset_config='3': no name=value"),
    ],
)
def test_a_task_that_is_not_there_is_refused_in_one_line(task, arguments, message, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        data(task, arguments)
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and re.match(f"error: {message}", err)


def test_another_reward_than_the_tasks_is_refused_at_the_first_row(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        check_answers({"": load_reward("reasoning_gym", DEFAULTS)}, [dict(prompt="1+1=", answer="2")], DEFAULTS)
    assert "answer_column='answer': for prompt '1+1=': is no entry of dataset='reasoning_gym" in capsys.readouterr().err


def test_the_version_is_that_of_pyproject():
    assert f'"reasoning-gym=={gym.VERSION}"' in (ROOT / "pyproject.toml").read_text()


def test_a_run_on_a_task_is_a_run_like_any_other(tmp_path):
    flags = """--dataset=reasoning_gym:coin_flip --reward=reasoning_gym --max_prompt_tokens=256 --leaf_tokens=2048
        --warmup_sft_steps=0 --max_steps=2 --eval_size=4 --checkpoint_every=0""".split()
    for name in ("a", "b"):
        finish(tmp_path / name, *flags, "--dataset_config=size=40, seed=3", launch=launch_warm)
    a, b = (lines(tmp_path / name, "ledger.jsonl") for name in ("a", "b"))
    assert a == b and len(a) == 2
