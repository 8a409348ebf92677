"""
Algorithms and modes in whole runs with the real engine: each learns something of its own, with no log-prob differing,
and is the same on one trainer and two, and with one engine and two.

    pytest tests/test_algorithms.py

test_train.py has the formulas; experiments/sanity_set/run.py runs five algorithms over seeds.
"""

import json
import subprocess
import sys

import pytest
import torch
from conftest import digest, finish, read_groups
from referee_others import write_rows
from safetensors.torch import load_file
from trials import ROOT, lines, replay_of

from rewards import arithmetic, numeric


def replay(recorded, flags, folder, ranks=0):
    """The ledger of a run with the same flags, from the rollout files of the run in `recorded`."""
    finish(folder, *flags, *replay_of(recorded), ranks=ranks)
    return lines(folder, "ledger.jsonl")


def test_several_updates_of_a_sequence_ratio_with_kl_and_entropy(two_ranks, warmed, run, tmp_path):
    flags = f"""--advantage=rloo --loss=gspo --loss_aggregation=sequence --clip_low=0.01 --clip_high=0.01 --dual_clip=3
        --updates_per_batch=2 --entropy_coef=0.01 --kl_coef=0.1 --reference={two_ranks[0]}/ckpt/step_000024
        --max_steps=4 --eval_size=0""".split()
    flags += warmed
    finish(run, *flags)
    steps = lines(run, "metrics.jsonl", "rl")
    assert any(s["clip_fraction"] > 0 for s in steps)
    assert all(s["kl_reference"] > 0 for s in steps)
    ours = lines(run, "ledger.jsonl")
    assert ours == replay(run, flags, tmp_path / "again", ranks=2) and len(ours) == 4


def test_a_critic_is_resumed_and_replayed_on_two_trainers(warmed, run, tmp_path):
    """With the KL in the rewards, and importance weights that are exactly 1."""
    flags = """--advantage=gae --kl_coef=0.05 --kl_in_reward --importance=truncate --learning_rate=1e-3 --max_steps=10
        --eval_size=0 --checkpoint_every=5""".split()
    flags += warmed
    finish(run, *flags)
    steps = lines(run, "metrics.jsonl", "rl")
    assert all(s["importance_not_one"] == 0 for s in steps)
    assert all(s["value_loss"] > 0 for s in steps)  # test_train.py has that it falls
    (optimizer,) = run.glob("ckpt/step_000010/optimizer/*.safetensors")
    assert load_file(optimizer)["value_head"].abs().max() > 1e-3
    replay(run, [*flags, "--max_steps=5"], tmp_path / "again", ranks=2)
    resumed = replay(run, [*flags, "--init_from=resume"], tmp_path / "again")
    assert resumed == lines(run, "ledger.jsonl")


def test_dynamic_sampling_replaces_groups_of_equal_rewards(one_engine):
    """With one engine and two the same groups: law L4 in test_laws.py."""
    rounds = {meta["prompt"] // 8 for _, meta in read_groups(one_engine[0])}  # each has 8 prompts of its own
    steps = lines(one_engine[0], "metrics.jsonl", "rl")
    assert {0, 1} <= rounds and sum(s["groups"] > 8 for s in steps) >= 3
    for s in steps:
        assert s["groups"] % 8 == 0 and s["zero_std_groups"] == 0
        replaced = s["easy_groups"] + s["hard_groups"]
        assert (0 < replaced < s["groups"]) == (s["groups"] > 8)


def test_distillation_moves_the_student_towards_its_teacher(two_ranks, run):
    flags = f"""--advantage=distill --loss=pg --kl_estimator=k1 --max_steps=12 --warmup_sft_steps=20 --eval_size=0
        --learning_rate=4e-3 --reference={two_ranks[0]}/ckpt/step_000024""".split()
    finish(run, *flags)
    distances = [s["kl_reference"] for s in lines(run, "metrics.jsonl", "rl")]
    assert 0 < sum(distances[-3:]) < 0.7 * sum(distances[:3])


def test_a_loss_and_an_advantage_of_a_file_are_the_same_on_two_trainers(warmed, run, tmp_path):
    """With a lag, and a loss that looks at the whole batch, and asks the model, before the first of two updates."""
    flags = """--loss=experiments/losses.py:sdpo --advantage=experiments/losses.py:opo --lag=1 --updates_per_batch=2
        --max_steps=4 --eval_size=0""".split()
    flags += warmed
    finish(run, *flags)
    assert all(s["grad_norm"] > 0 for s in lines(run, "metrics.jsonl", "rl"))
    ours = lines(run, "ledger.jsonl")
    assert ours == replay(run, flags, tmp_path / "again", ranks=2)
    assert len({s["advantages"] for s in ours}) == 4


# ---- modes


def losses(folder):
    return [s["loss"] for s in lines(folder, "metrics.jsonl", "sft")]


def test_supervised_learning_from_a_file_on_one_rank_and_two_and_resumed(tmp_path):
    rows = [dict(q=row["prompt"], a=row["answer"]) for row in arithmetic(0, 10)]
    rows.append(dict(q="1+1=", a="a long answer"))
    write_rows(tmp_path / "sums.jsonl", rows)
    flags = f"""--mode=sft --dataset={tmp_path}/sums.jsonl --prompt_column=q --answer_column=a --eval_size=0
        --learning_rate=2e-3 --max_steps=24""".split()
    output = finish(tmp_path / "one", *flags)
    assert "dropped 1 of 101 answer texts: 1 over max_new_tokens=6" in output and "SGLang" not in output
    first, *_, last = found = losses(tmp_path / "one")
    assert len(found) == 24 and last < 0.7 * first
    finish(tmp_path / "two", *flags, "--max_steps=16", ranks=2)
    output_of_two = finish(tmp_path / "two", *flags, "--init_from=resume")
    assert digest(output) == digest(output_of_two) and "nothing to do" not in output_of_two
    done = finish(tmp_path / "two", *flags, "--init_from=resume")
    assert digest(done) == digest(output) and "nothing to do: all of max_steps=24 are done" in done


def test_rollout_mode_samples_as_the_run_and_its_best_become_data(two_ranks, tmp_path):
    """Of the weights of version 16: the prompts, seeds and so the samples of step 16."""
    start = f"--init_from={two_ranks[0]}/ckpt/step_000016"
    folder = tmp_path / "best"
    assert "mismatch=-" in finish(folder, "--mode=rollout", start, "--max_steps=17")
    *_, before, ours = lines(folder, "ledger.jsonl", "rl")
    theirs = lines(two_ranks[0], "ledger.jsonl", "rl")[16]
    for stage in ("prompts", "tokens", "logprobs", "rewards"):
        assert ours[stage] == theirs[stage]
    assert "weights" not in ours and ours["tokens"] != before["tokens"]
    subprocess.run([sys.executable, ROOT / "tools" / "best.py", folder, "--count=2"], check=True)
    rows = [*map(json.loads, (folder / "best.jsonl").read_text().splitlines())]
    assert 17 < len(rows) <= 2 * 8 * 17
    for row in rows:  # they are right
        assert numeric("", row["answer"], str(eval(row["prompt"][:-1]))) == 1
    data = f"--mode=sft --dataset={folder}/best.jsonl --eval_size=0 --learning_rate=1e-3 --max_steps=8".split()
    finish(tmp_path / "tuned", start, *data)
    first, *_, last = losses(tmp_path / "tuned")
    assert last < first


def test_eval_alone_gives_pass_at_k_with_intervals(two_ranks, tmp_path):
    """The held-out prompts, four samples each, against a count over the rollout files. SGLang's names have no colon."""
    folder = tmp_path / "eval"
    (tmp_path / "fp8:act").symlink_to(two_ranks[0] / "ckpt")
    output = finish(folder, "--mode=eval", f"--init_from={tmp_path}/fp8:act/step_000024", "--eval_samples=4")
    (scores,) = lines(folder, "metrics.jsonl")
    assert scores["pass@1"] < scores["pass@2"] < scores["pass@4"] and "pass@8" not in scores
    assert f"pass@4 {scores['pass@4']:.4f} +- {scores['pass@4_ci95']:.4f}" in output
    rewards = torch.stack([tensors["rewards"] for tensors, _ in read_groups(folder, "eval_000000")])
    right = (rewards >= 1).double()
    assert right.shape == (20, 4)
    assert scores["pass@1"] == pytest.approx(right.mean().item())
    assert scores["pass@4"] == pytest.approx(right.amax(1).mean().item())
