"""
The watch for reward hacking: its signals on made figures, and a run that it ends.

    pytest tests/test_watch.py
"""

import re
import shutil
import sys
import types

import pytest
import rollback
import torch
from conftest import finish, launch_warm, run_warm, shared_memory
from test_laws import ledger
from trials import command_of, lines, replay_of

from onecurve.graders.watch import hacking, nothing_to_learn, text_metrics
from sync import Group


def steps_of(n, **metrics):
    """n steps of a run that learns honestly, with these metrics changed: numbers, or functions of the step."""
    honest = dict(
        reward_mean=lambda i: 0.3 + i / 200,
        unique_answers=lambda i: 3 - i / 40,
        distinct_2=lambda i: 0.5 - i / 400,
        repetition=0.1,
        symbols=0.05,
        truncated_fraction=lambda i: 0.2 - i / 400,
        response_length_mean=lambda i: 40 + i,
        kl_reference=lambda i: 0.001 * i,
        reward_numeric=lambda i: 0.2 + i / 200,
    )
    steps = [{name: x(i) if callable(x) else x for name, x in (honest | metrics).items()} for i in range(n)]
    return steps


def then(before, after):
    """A metric that is one number for 50 steps, and then another."""
    return lambda i: before if i < 50 else after


@pytest.mark.parametrize(
    "metric,hacked,harmless",
    [
        ("kl_reference", lambda i: 0.001 * i + (i > 50) * 0.5, lambda i: 0.01 * i),
        ("unique_answers", then(3, 0.02), then(3, 0.9)),
        ("distinct_2", then(0.5, 0.01), then(0.5, 0.1)),
        ("repetition", then(0.1, 0.9), then(0.1, 0.4)),
        ("symbols", then(0.1, 0.9), then(0.1, 0.3)),
        ("truncated_fraction", then(0.0, 1.0), 0.3),
        ("response_length_mean", then(40, 400), lambda i: 40 + 1.5 * i),
        ("reward_numeric", lambda i: 0.2 + i / 200 - (i > 50) * 0.4, lambda i: 0.2 + i / 250),
    ],
)
def test_each_signal_speaks_where_it_should_and_nowhere_else(metric, hacked, harmless):
    reward = "format + 0*numeric"
    assert not hacking(steps_of(100), reward)
    assert not hacking(steps_of(100, **{metric: harmless}), reward)
    steps = steps_of(100, **{metric: hacked})
    signals = [hacking(steps[:n], reward) for n in range(100)]
    assert not any(signals[:51])
    said = next(filter(None, signals[51:61]))
    assert said.startswith(f"reward_mean - {metric}" if "reward_" in metric else metric)


def test_a_kl_that_grows_is_no_signal_while_the_reward_does_not():
    grows = dict(kl_reference=lambda i: 0.001 * i + (i > 50) * 0.5)
    assert hacking(steps_of(60, **grows))
    assert not hacking(steps_of(60, **grows, reward_mean=0.3))
    assert not hacking(steps_of(60, reward_numeric=-5.0))  # nobody said that it is the truth
    without = steps_of(60)
    for step in without:
        del step["kl_reference"]
    assert not hacking(without)
    assert not hacking(without[:45] + steps_of(60)[45:])  # as after a rollback
    unwatched = [{k: x for k, x in step.items() if k != "unique_answers"} for step in steps_of(60)]
    assert not hacking(unwatched + steps_of(29, **grows)) and hacking(unwatched + steps_of(60, **grows))


def test_shrinking_to_one_text_is_a_signal_but_short_sure_answers_are_not():
    """
    A chat model that was rewarded for a word with a given first letter wrote the letter alone, eight times: 7.6
    different responses per prompt fell to 1.2, far above a tenth, as prompts with answers of their own have one each.
    """

    def falls(first, last):
        return lambda i: last + (first - last) * max(0, 1 - i / 20)

    collapse = dict(
        unique_answers=falls(7.6, 1.2),
        distinct_2=falls(0.91, 0.18),
        reward_mean=lambda i: 1.5 - 1.3 / (i + 1),
    )
    shrinks = dict(response_length_mean=falls(12, 2))
    assert hacking(steps_of(30, **collapse, **shrinks)).startswith("response_length_mean 2 < 2.925")
    # The controls: sums that are learned, words that replace sentences, and sentences that become brief.
    assert not hacking(steps_of(30, **collapse, response_length_mean=3))
    assert not hacking(steps_of(30, **collapse, response_length_mean=falls(12, 4)))
    assert not hacking(steps_of(30, **shrinks, unique_answers=falls(7.6, 3)))


def test_the_figures_of_texts_are_those_of_a_count_by_hand():
    t = dict(
        tokens=torch.tensor([1, 2, 1, 2, 9, 5, 5, 5, 7]),
        lengths=torch.tensor([5, 4]),
        loss_mask=torch.tensor([1, 1, 1, 1, 0, 1, 1, 1, 1]).bool(),
    )
    groups = [Group(t, dict(responses=["ab!!", last])) for last in ("a b", "ab!!")]
    # 1 2, 2 1, 1 2 | 5 5, 5 5, 5 7, twice; four different pairs of twelve
    expected = dict(unique_answers=1, distinct_2=4 / 12, repetition=1 / 3, symbols=6 / 15)
    assert text_metrics(groups) == pytest.approx(expected)


HACKED = """
def longer(prompt, response, answer):
    return len(response) / 6
"""


@pytest.fixture
def gamed(warmed, tmp_path):
    """Flags of a run whose reward is of length, beside the truth."""
    (tmp_path / "mine.py").write_text(HACKED)
    flags = "--eval_size=0 --checkpoint_every=8 --keep_checkpoints=9".split()
    return (f"--reward={tmp_path}/mine.py:longer + 0*numeric", *warmed, *flags)


def test_a_run_ends_where_its_reward_is_gamed_and_a_replay_does_too(tmp_path, gamed):
    """Without the watch the run goes on: the control."""
    flags = (*gamed, "--max_steps=48", "--learning_rate=4e-4")
    a = tmp_path / "a"
    b = tmp_path / "b"
    status, output = launch_warm(a, *flags, "--watch=stop")
    assert status == 3
    (said,) = [line for line in output.splitlines() if line.startswith("watch: ")]
    first, *_, last = lines(a, "metrics.jsonl", "rl")
    done = last["step"] + 1
    assert 30 <= done < 48
    assert f" after step {done}; " in said
    assert re.match("watch: (reward_mean - reward_numeric|response_length_mean|truncated_fraction) [0-9.]+ > ", said)
    healthy = int(re.search(r"ckpt/step_(\d+), from which tools/branch.py \S+ --step=\d+ goes on", said)[1])
    assert healthy == (done - 20) // 8 * 8
    assert last["reward_mean"] > first["reward_mean"] + 0.2
    assert last["reward_numeric"] < 0.3

    status, output = launch_warm(b, *flags, "--watch=stop", *replay_of(a))
    assert status == 3
    assert said.replace("/a", "/b") in output
    assert ledger(a) == ledger(b)
    # It stopped with a checkpoint; with the watch it stops again, without it it goes on.
    assert (a / "ckpt" / f"step_{done:06d}").is_dir()
    finish(a, *flags, "--init_from=resume", "--watch=")
    assert len(lines(a, "metrics.jsonl", "rl")) == 48


@pytest.mark.in_turn
def test_a_run_turns_back_to_its_healthy_step_and_repeats_the_ledger(tmp_path, gamed, monkeypatch, capsys):
    """Again: from a copy of the run that was stopped, and of a turn that was interrupted."""
    flags = (*gamed, "--max_steps=40", "--learning_rate=2e-4", "--healthy_kl_coef=2", "--threads=1")
    a = tmp_path / "a"
    b = tmp_path / "b"
    a_1 = tmp_path / "a_1"
    b_1 = tmp_path / "b_1"

    def turned(folder):
        monkeypatch.setattr(sys, "argv", ["rollback.py", *command_of(folder, *flags)[2:]])
        with shared_memory(), pytest.raises(SystemExit) as end:
            rollback.main()
        assert end.value.code == 0
        return capsys.readouterr().out

    def run(command, **_):
        status, _ = run_warm(command[1:], tmp_path / "output")
        return int(status != 0)  # as torchrun's

    monkeypatch.setattr(rollback, "subprocess", types.SimpleNamespace(call=run))

    said = turned(a)
    hacked = lines(a, "metrics.jsonl", "rl")
    healed = lines(a_1, "metrics.jsonl", "rl")
    to = int(re.search(r"after step \d+; \S+/a_1 continues from step (\d+)", said)[1])
    assert to == (len(hacked) - 20) // 8 * 8
    assert not (tmp_path / "a_2").exists()
    assert [x["step"] for x in healed] == list(range(40))
    assert healed[:to] == hacked[:to]
    pairs = zip(lines(a, "ledger.jsonl", "rl"), lines(a_1, "ledger.jsonl", "rl"))
    for before, after in [*pairs][to:]:
        assert before["prompts"] != after["prompts"]  # a new order of the data
    assert healed[to]["kl_reference"] == 0 < min(x["kl_reference"] for x in healed[to + 1 :])
    # What would be the end of it without the turn, and with it: the control.
    assert hacked[-1]["reward_mean"] > 0.8
    assert max(x["reward_mean"] for x in healed) < 0.6

    shutil.copytree(a, b)
    (b_1 / "ckpt").mkdir(parents=True)
    turned(b)
    assert ledger(b_1) == ledger(a_1)


def test_a_run_that_cannot_learn_hears_the_likeliest_cause_now_and_then():
    config = dict(prompts_per_step=8, advantage="grpo", kl_in_reward=False, overlong_cache=0, credit="sample")

    def told(n=10, skipped=False, keys={}, **change):
        step = dict(zero_std_groups=8, groups=16, reward_std=0.0, reward_mean=0.0, truncated_fraction=0.1)
        return nothing_to_learn([step | change] * n, types.SimpleNamespace(**config | keys), skipped)

    assert told().endswith("all are 0; is the reward made for these answers?")
    assert "are 1;" in told(reward_mean=1.0)
    assert "chat_template=True" in told(skipped=True)
    assert "chat_template" not in told(skipped=True, reward_std=0.5)
    assert "too easy or too hard" in told(reward_std=0.5)
    assert "cut off" in told(truncated_fraction=1.0)
    assert [n for n in range(31) if told(n)] == [10, 20, 30]
    assert not told(zero_std_groups=7)
    # equal rewards in a group say nothing of a batch's, a critic's or a teacher's; weights that stay say all
    moving = dict(lr=1e-3, grad_norm=0.5)
    assert told(**moving)
    others = dict(kl_in_reward=True), dict(overlong_cache=2), dict(credit="turn")
    for keys in (dict(advantage="distill"), dict(advantage="mine.py:f"), *others):
        assert not told(keys=keys, **moving)
    assert told(keys=dict(advantage="gae"), lr=1e-3, grad_norm=0.0)
    unequal = moving | dict(zero_std_groups=7)
    assert not told(**unequal)
    assert "no weight moved: learning_rate is 0" in told(**unequal | dict(lr=0.0))
    assert "no weight moved: the loss leaves every token out" in told(**unequal | dict(grad_norm=0.0))
