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
from conftest import digest, launch_warm, read_groups
from safetensors.torch import load_file
from trials import ROOT, lines, replay_of

from rewards import numeric


def run(folder, *flags, ranks=0):
    """A run that has to succeed: (folder, output)."""
    status, output = launch_warm(folder, *flags, ranks=ranks)
    assert status == 0, output[-4000:]
    return folder, output


def replay(recorded, flags, folder, ranks=0):
    """The ledger of a run with the same flags, from the rollout files of the run in `recorded`."""
    return lines(run(folder, *flags, *replay_of(recorded), ranks=ranks)[0], "ledger.jsonl")


def test_several_updates_of_a_sequence_ratio_with_kl_and_entropy(two_ranks, warmed, tmp_path):
    flags = "--advantage=rloo --loss=gspo --loss_aggregation=sequence --clip_low=0.01 --clip_high=0.01 --dual_clip=3"
    reference = f"--reference={two_ranks[0] / 'ckpt' / 'step_000024'}"
    flags = [*flags.split(), *warmed, "--updates_per_batch=2", "--entropy_coef=0.01", "--kl_coef=0.1", reference]
    flags += ["--max_steps=4", "--eval_size=0"]
    folder, _ = run(tmp_path / "run", *flags)
    steps = lines(folder, "metrics.jsonl", "rl")
    assert all(s["logprob_mismatch_tokens"] == 0 for s in steps) and any(s["clip_fraction"] > 0 for s in steps)
    assert all(s["kl_reference"] > 0 for s in steps)
    ours, default = (lines(x, "ledger.jsonl", "rl") for x in (folder, two_ranks[0]))
    assert ours == replay(folder, flags, tmp_path / "again", ranks=2) and len(ours) == 4
    assert ours[0]["tokens"] != default[0]["tokens"] or ours[0]["weights"] != default[0]["weights"]


def test_a_critic_is_resumed_and_replayed_on_two_trainers(warmed, tmp_path):
    """With the KL in the rewards, and importance weights that are exactly 1."""
    flags = [*"--advantage=gae --kl_coef=0.05 --kl_in_reward --importance=truncate".split(), *warmed]
    flags += ["--learning_rate=1e-3", "--max_steps=10", "--eval_size=0"]
    folder, _ = run(tmp_path / "run", *flags, "--checkpoint_every=5")
    steps = lines(folder, "metrics.jsonl", "rl")
    assert all(s["logprob_mismatch_tokens"] == s["importance_not_one"] == 0 for s in steps)
    assert all(s["value_loss"] > 0 for s in steps)  # test_train.py has that it falls
    head = load_file(next((folder / "ckpt" / "step_000010" / "optimizer").glob("*.safetensors")))["value_head"]
    assert head.abs().max() > 1e-3
    half = (*flags, "--checkpoint_every=5")
    replay(folder, [*half, "--max_steps=5"], tmp_path / "again", ranks=2)
    assert replay(folder, [*half, "--init_from=resume"], tmp_path / "again") == lines(folder, "ledger.jsonl")


def test_dynamic_sampling_replaces_groups_of_equal_rewards(one_engine):
    """With one engine and two the same groups: law L4 in test_laws.py."""
    rounds = {meta["prompt"] // 8 for _, meta in read_groups(one_engine[0])}  # each has 8 prompts of its own
    steps = lines(one_engine[0], "metrics.jsonl", "rl")
    assert {0, 1} <= rounds and sum(s["groups"] > 8 for s in steps) >= 3
    for s in steps:
        assert s["groups"] % 8 == 0 and s["zero_std_groups"] == s["logprob_mismatch_tokens"] == 0
        assert (0 < s["easy_groups"] + s["hard_groups"] < s["groups"]) == (s["groups"] > 8)


def test_distillation_moves_the_student_towards_its_teacher(two_ranks, tmp_path):
    teacher = f"--reference={two_ranks[0] / 'ckpt' / 'step_000024'}"
    flags = "--advantage=distill --loss=pg --kl_estimator=k1 --max_steps=12 --warmup_sft_steps=20 --eval_size=0"
    folder, _ = run(tmp_path / "run", *flags.split(), teacher, "--learning_rate=4e-3")
    steps = lines(folder, "metrics.jsonl", "rl")
    assert all(s["logprob_mismatch_tokens"] == 0 for s in steps)
    distances = [s["kl_reference"] for s in steps]
    assert 0 < sum(distances[-3:]) < 0.7 * sum(distances[:3])


def test_a_loss_and_an_advantage_of_a_file_are_the_same_on_two_trainers(warmed, tmp_path):
    """With a lag, and a loss that looks at the whole batch, and asks the model, before the first of two updates."""
    own = "experiments/losses.py"
    flags = [f"--loss={own}:sdpo", f"--advantage={own}:opo", "--lag=1", "--updates_per_batch=2"]
    flags += [*warmed, "--max_steps=4", "--eval_size=0"]
    folder, _ = run(tmp_path / "run", *flags)
    steps = lines(folder, "metrics.jsonl", "rl")
    assert all(s["logprob_mismatch_tokens"] == 0 and s["grad_norm"] > 0 for s in steps)
    ours = lines(folder, "ledger.jsonl", "rl")
    assert ours == replay(folder, flags, tmp_path / "again", ranks=2) and len({s["advantages"] for s in ours}) == 4


# ---- modes


def test_supervised_learning_from_a_file_on_one_rank_and_two_and_resumed(tmp_path):
    rows = [{"q": f"{a}+{b}=", "a": str(a + b)} for a in range(10) for b in range(10)]
    rows.append({"q": "1+1=", "a": "a long answer"})
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    flags = f"--mode=sft --dataset={tmp_path}/sums.jsonl --prompt_column=q --answer_column=a --eval_size=0".split()
    flags += ["--learning_rate=2e-3", "--max_steps=24"]
    one, output = run(tmp_path / "one", *flags)
    assert "dropped 1 of 101 answer texts: 1 over max_new_tokens=6" in output and "SGLang" not in output
    losses = [s["loss"] for s in lines(one, "metrics.jsonl", "sft")]
    assert len(losses) == 24 and losses[-1] < 0.7 * losses[0]
    run(tmp_path / "two", *flags, "--max_steps=16", ranks=2)
    _, output_of_two = run(tmp_path / "two", *flags, "--init_from=resume")
    assert digest(output) == digest(output_of_two) and "nothing to do" not in output_of_two
    _, done = run(tmp_path / "two", *flags, "--init_from=resume")
    assert digest(done) == digest(output) and "nothing to do: all of max_steps=24 are done" in done


def test_rollout_mode_samples_as_the_run_and_its_best_become_data(two_ranks, tmp_path):
    """Of the weights of version 16: the prompts, seeds and so the samples of step 16."""
    start = f"--init_from={two_ranks[0] / 'ckpt' / 'step_000016'}"
    folder, _ = run(tmp_path / "best", "--mode=rollout", start, "--max_steps=17")
    theirs, ours = (lines(x, "ledger.jsonl", "rl")[16] for x in (two_ranks[0], folder))
    for stage in ("prompts", "tokens", "logprobs", "rewards"):
        assert ours[stage] == theirs[stage]
    assert "weights" not in ours and ours["tokens"] != lines(folder, "ledger.jsonl", "rl")[15]["tokens"]
    subprocess.run([sys.executable, ROOT / "tools" / "best.py", folder, "--count=2"], check=True)
    rows = [json.loads(line) for line in (folder / "best.jsonl").read_text().splitlines()]
    assert 17 < len(rows) <= 2 * 8 * 17
    assert all(numeric("", row["answer"], str(eval(row["prompt"][:-1]))) == 1 for row in rows)  # they are right
    data = (f"--dataset={folder / 'best.jsonl'}", "--eval_size=0", start, "--learning_rate=1e-3", "--max_steps=8")
    tuned, _ = run(tmp_path / "tuned", "--mode=sft", *data)
    losses = [s["loss"] for s in lines(tuned, "metrics.jsonl", "sft")]
    assert losses[-1] < losses[0]


def test_eval_alone_gives_pass_at_k_with_intervals(two_ranks, tmp_path):
    """The held-out prompts, four samples each, against a count over the rollout files."""
    start = f"--init_from={two_ranks[0] / 'ckpt' / 'step_000024'}"
    folder, output = run(tmp_path / "eval", "--mode=eval", start, "--eval_samples=4")
    (scores,) = lines(folder, "metrics.jsonl")
    assert scores["pass@1"] < scores["pass@2"] < scores["pass@4"] and "pass@8" not in scores
    assert f"pass@4 {scores['pass@4']:.4f} +- {scores['pass@4_ci95']:.4f}" in output
    right = torch.stack([(tensors["rewards"] >= 1).double() for tensors, _ in read_groups(folder, "eval_000000")])
    assert right.shape == (20, 4) and scores["pass@1"] == pytest.approx(float(right.mean()))
    assert scores["pass@4"] == pytest.approx(float(right.any(1).double().mean()))
