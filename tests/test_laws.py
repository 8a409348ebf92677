"""
The laws: what one seed decides, and what around a run cannot be seen in it. Beside each stands its negative control, a
run with one thing wrong that the same comparison catches.

    pytest tests/test_laws.py

    L1  two runs: the same ledger
    L2  the rollout's log-prob of every token is the trainer's, as 32 bits
    L3  on 1, 2 and 4 trainers
    L4  with 1 engine and 2, whoever takes which prompt and is done first
    L5  whatever the engine's batches, caches and prefill chunks, and where it puts requests back
    L6  killed at any moment and resumed, on other ranks too
    L7  replayed without an engine
    L8  by whatever way the weights travel
    L9  training and sampling side by side or in turn, with whatever lag the config sets
    L10 with agents whose tools take any time and whose requests overtake each other
    L11 with samples drawn in segments, each with the weights of its step
    L12 on whatever CPU, with whatever vectors and threads
    L13 with engines over any number of ranks, each with some of a model's heads, columns and vocabulary
    L14 made again from what was published, step by step (test_instruments.py)
    L15 with a mixture of experts, where a rounding would be another expert
    L16 with a curriculum, which draws prompts by what came of them before

A ledger has a hash of the prompts, tokens, log-probs, rewards, advantages, and of each parameter's gradient, value and
optimizer state of every step. conftest.py makes the runs; tools/prove.py adds kills, and prints the laws as a table.
"""

import hashlib
import itertools
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter

import pytest
import torch
from conftest import (
    DAPO,
    ENGINE_FLAGS,
    LAG,
    MIXTURE,
    ROOT,
    SEGMENTS,
    digest,
    error_line,
    error_of_run,
    finish,
    float64_model,
    launch,
    lines,
    plain_logprobs,
    read_groups,
    replay_of,
    shared,
)
from runs import saved_config
from safetensors.torch import load_file
from test_trainer import same_bits
from transformers import AutoTokenizer
from trials import (
    a_flipped_bit,
    experts_by_number,
    flip_token,
    forget_optimizer,
    forget_seen,
    interrupt,
    kept_by_other_weights,
    plain_all_reduce,
    processes_of,
    rule_on_one_side,
    seeds_by_arrival,
    seeds_by_engine,
    segments_by_time,
    sums_as_they_come,
    weights_as_they_come,
)

import kernels
import sync
import train_grpo as train
from onecurve.cpu.loops import cpu_features
from onecurve.models import folders
from onecurve.models.dense import check_model


def ledger(folder):
    return (folder / "ledger.jsonl").read_bytes()


def rl_ledger(folder):
    return lines(folder, "ledger.jsonl", "rl")


def rl_metrics(folder):
    return lines(folder, "metrics.jsonl", "rl")


def sampled_logprobs(folder, steps="rl_*"):
    """All that the engines gave, in the order of a run's files."""
    return torch.cat([tensors["logprobs"] for tensors, _ in read_groups(folder, steps)])


# ---- L1: two runs


@pytest.mark.law("two runs, in two processes and in one")
def test_L1_two_runs_one_ledger_whether_in_one_process_or_two(two_ranks, one_process, assert_it_learned):
    a, output_a = two_ranks
    b, output_b = one_process
    assert_it_learned(a, steps=24)
    assert ledger(a) == ledger(b)
    assert digest(output_a) == digest(output_b)
    assert (a / "evaluations.jsonl").read_bytes() == (b / "evaluations.jsonl").read_bytes() != b""
    for x, y in zip(lines(a, "metrics.jsonl"), lines(b, "metrics.jsonl"), strict=True):
        timeless = [key for key in x if not key.endswith(("_seconds", "_per_second"))]
        assert [x[key] for key in timeless] == [y[key] for key in timeless]


@pytest.mark.control("another seed")
def test_L1_control_another_seed_is_another_ledger(two_ranks, run):
    finish(run, "--seed=2", "--max_steps=1", "--eval_size=0")
    ours = lines(two_ranks[0], "ledger.jsonl")
    other = lines(run, "ledger.jsonl")
    assert len(other) == 61  # of the warm-up, and the first of RL
    for x, y in zip(ours, other):
        for stage in ("tokens", "gradients", "weights", "chain"):
            assert x[stage] != y[stage]


# ---- L2: every log-prob


@shared
def without_our_operators(folder):
    """The engine's and the trainer's own operators: the check ends this run before its first update."""
    return error_of_run(folder, "--batch_invariant=False", "--max_steps=1", "--eval_size=0")


@pytest.mark.law("the log-prob of every token")
def test_L2_no_logprob_differs_between_rollout_and_trainer(two_ranks, assert_it_learned):
    assert_it_learned(two_ranks[0], steps=24)
    for m in rl_metrics(two_ranks[0]):
        assert m["logprob_mismatch_tokens"] == m["logprob_mismatch_max"] == 0


@pytest.mark.law("outside of the run too")
def test_L2_a_checkpoint_gives_recorded_logprobs_also_outside_the_run(two_ranks, mesh):
    """
    Step 16 was sampled with the weights of that checkpoint. From these our trainer's model computes the same bits; and
    plain transformers in float64, which shares no operator with us, the same numbers. Another checkpoint gives others.
    """
    samples = train.samples_of(read_groups(two_ranks[0], "rl_000016"), 16)
    sampled = torch.cat([s.logprobs for s in samples])
    assert len(samples) == 64
    assert len(sampled) > 150
    assert all(len(s.loss_at) == len(s.tokens) - s.prompt_tokens for s in samples)

    def ours(checkpoint):
        hf = check_model(checkpoint, train.DEFAULTS)
        model = train.build_model(hf, mesh, "cpu", True)
        folders.load_weights(sync.shards(model, mesh), checkpoint, hf.tie_word_embeddings)
        kernels.enable_batch_invariant()
        try:
            with torch.no_grad():
                return model.token_logprobs(train.pack(samples, "cpu"))[0]
        finally:
            kernels.disable_batch_invariant()

    @torch.no_grad()
    def plain(checkpoint):
        model = float64_model(checkpoint)
        return torch.cat([plain_logprobs(model, s.tokens, s.loss_at) for s in samples])

    right = two_ranks[0] / "ckpt" / "step_000016"
    wrong = two_ranks[0] / "ckpt" / "step_000024"
    assert same_bits(ours(right), sampled)
    assert (plain(right) - sampled).abs().max() < 1e-5
    assert (ours(wrong) != sampled).double().mean() > 0.9
    assert (plain(wrong) - sampled).abs().max() > 1e-3


@pytest.mark.control("batch_invariant=False")
def test_L2_control_without_our_operators_the_check_stops_the_run(without_our_operators):
    folder, error = without_our_operators
    where = r"step 0, prompt \d+, sample \d, token \d+"
    assert re.search(where + r": engine .*0x.* trainer .*0x.* of \d+ log-probs differ", error)
    assert not rl_ledger(folder)


@pytest.mark.law("under a sampling rule, later updates and older weights among it")
def test_L2_no_logprob_differs_under_a_sampling_rule(one_engine, segments, assert_it_learned):
    for folder, steps in ((one_engine[0], 6), (segments[0], 16)):
        assert_it_learned(folder, steps)
        logprobs = sampled_logprobs(folder)
        assert math.log(0.02 / 20) < logprobs.min() < -3  # the last of 20
        assert (logprobs == 0).any()  # the only one


@pytest.mark.control("a rule on one side only")
def test_L2_control_a_sampling_rule_on_one_side_only_stops_the_run(warmed, run):
    assert "log-probs differ" in error_of_run(run, *DAPO, *warmed, broken=rule_on_one_side)
    assert not rl_ledger(run)


@pytest.mark.law("with a dial: the same difference in every run")
def test_L2_a_dialled_run_has_its_mismatch_again_on_other_ranks(run, tmp_path):
    """Rounded weights, and rounded results of operators too; the first once more, with two trainers and an engine."""
    short = ("--max_steps=3", "--eval_size=0", "--checkpoint_every=0")
    weights = tmp_path / "weights"
    results = tmp_path / "results"
    finish(weights, "--engine_bits=bf16", *short)
    finish(results, "--engine_bits=bf16:act", *short)
    finish(run, "--engine_bits=bf16", *short, ranks=3)
    assert ledger(run) == ledger(weights) != ledger(results)
    metrics = zip(rl_metrics(weights), rl_metrics(results), strict=True)
    for step, (m, of_results) in enumerate(metrics):
        assert m["logprob_mismatch_tokens"] > 100
        assert 0 < m["logprob_distance"] < of_results["logprob_distance"] < 0.1
        assert 0.99 < m["effective_sample_size"] < 1
        assert m["kl_behaviour"] > 0
        folder = f"rl_{step:06d}"
        ours = load_file(weights / "queue" / folder / "trainer.safetensors")
        again = load_file(run / "queue" / folder / "trainer.safetensors")
        torch.testing.assert_close(ours, again, rtol=0, atol=0)
        assert torch.equal(ours["rollout_logprobs"], sampled_logprobs(weights, folder))
        distance = (ours["logprobs"] - ours["rollout_logprobs"]).abs()
        assert float(distance.mean()) == pytest.approx(m["logprob_distance"], rel=1e-5)
        assert int((distance > 0).sum()) == m["logprob_mismatch_tokens"]


# ---- L3: trainer ranks


@pytest.mark.law("1, 2 and 4 trainers")
def test_L3_one_two_and_four_trainers_one_ledger(two_ranks, resumed, replayed, assert_it_learned):
    """Four from the first step on; two from step 16 on, that of the checkpoint before the interruption."""
    assert_it_learned(two_ranks[0], steps=24)
    assert ledger(two_ranks[0]) == ledger(replayed[0]) == ledger(resumed[0])
    assert "resuming at step 16" in resumed[1]
    small = saved_config(two_ranks[0])
    leaves = set()
    for step in range(24):
        groups = read_groups(two_ranks[0], f"rl_{step:06d}")
        lengths = [len(s.tokens) for s in train.samples_of(groups, step)]
        leaves.add(len(train.plan_leaves(lengths, small["leaf_tokens"], small["lanes"])))
    assert leaves == {4, 8}  # one row of leaves in some steps, two in others


@pytest.mark.control("gradients added as they come")
def test_L3_control_sums_as_they_come_are_other_bits(two_ranks, run):
    """
    Leaf after leaf on one trainer. On two, whose reduce-scatter adds pairs first, it would still be the tree: so the
    number of trainers would be seen.
    """
    flags = (*replay_of(two_ranks[0]), "--strict=False", "--max_steps=1", "--checkpoint_every=0")
    finish(run, *flags, broken=sums_as_they_come)

    def first(folder, file):
        return lines(folder, file, "sft")[0]

    ours = first(two_ranks[0], "ledger.jsonl")
    other = first(run, "ledger.jsonl")
    assert ours["tokens"] == other["tokens"]
    for stage in ("gradients", "weights", "optimizer"):
        assert ours[stage] != other[stage]
    norm = first(two_ranks[0], "metrics.jsonl")["grad_norm"]
    # it is only a rounding
    assert first(run, "metrics.jsonl")["grad_norm"] == pytest.approx(norm, rel=1e-5)


# ---- L4: engines


@pytest.mark.law("1 and 2 engines, the free one claims")
def test_L4_one_engine_and_two_one_ledger_in_whatever_order_groups_come(one_engine, two_engines, assert_it_learned):
    assert_it_learned(one_engine[0], steps=6)
    assert ledger(one_engine[0]) == ledger(two_engines[0])
    assert {meta["engine"] for _, meta in read_groups(two_engines[0])} == {0, 1}
    paths = sorted((two_engines[0] / "queue").glob("*/group_*.safetensors"))
    assert paths != sorted(paths, key=lambda path: path.stat().st_mtime_ns)  # not one after the other


@pytest.mark.control("seeds by engine rank")
def test_L4_control_seeds_by_engine_are_other_samples(one_engine, run):
    """One engine is enough: its rank is part of its seeds."""
    finish(run, *DAPO, "--max_steps=1", broken=seeds_by_engine)
    *same, other = lines(run, "ledger.jsonl")
    ours = lines(one_engine[0], "ledger.jsonl")
    assert same == ours[: len(same)]
    assert other["tokens"] != ours[len(same)]["tokens"]


# ---- L5: what goes on inside an engine


@pytest.mark.law("batch size, radix cache, prefill chunks")
def test_L5_batches_caches_chunks_and_retractions_cannot_be_seen(
    two_ranks, one_process, one_engine, two_engines, assert_it_learned, record_property
):
    """24 steps without a radix cache, 17 requests at a time, in chunks of 32 tokens; 6 with requests put back."""
    assert_it_learned(two_ranks[0], steps=24)
    assert f"--engine_args={saved_config(one_process[0])['engine_args']}" in ENGINE_FLAGS
    assert ledger(two_ranks[0]) == ledger(one_process[0])
    retractions = [m["engine_retractions"] for m in rl_metrics(two_engines[0])]
    assert len(retractions) == 6
    assert sum(retractions) > 6
    record_property("varied", f"{sum(retractions)} retractions")
    assert ledger(one_engine[0]) == ledger(two_engines[0])


@pytest.mark.control("the same without our operators")
def test_L5_control_without_our_operators_the_batch_is_seen(without_our_operators, run):
    flags = ("--batch_invariant=False", "--max_steps=1", "--eval_size=0", *ENGINE_FLAGS)
    base = without_our_operators[0]
    error_of_run(run, *flags)
    assert ledger(run) == ledger(base)  # from the same weights
    assert not torch.equal(sampled_logprobs(run, "rl_000000"), sampled_logprobs(base, "rl_000000"))


# ---- L6: kills and resumes


@pytest.mark.law("a resume on other ranks")
def test_L6_a_resume_on_other_ranks_ends_in_the_undisturbed_ledger(two_ranks, resumed, assert_it_learned):
    base, output_of_base = two_ranks
    folder, output = resumed
    assert_it_learned(base, steps=24)
    assert "resuming at step 16; 1 torn rollout files deleted" in output
    assert digest(output) == digest(output_of_base)
    assert ledger(folder) == ledger(base)
    kept = [sync.group_path(x / "queue" / "rl_000021", 3).stat().st_mtime_ns for x in (base, folder)]
    assert kept[0] == kept[1]  # a whole file is used as it is
    assert [m["step"] for m in rl_metrics(folder)] == list(range(24))
    for path in (base / "ckpt" / "step_000024").rglob("*.safetensors"):
        ours = load_file(folder / path.relative_to(base))
        assert ours
        torch.testing.assert_close(ours, load_file(path), rtol=0, atol=0)
    commands = re.findall("^# train_grpo.py.*", (folder / "config.py").read_text(), re.MULTILINE)
    assert ["resume" in command for command in commands] == [False, True]  # both are on record


@pytest.mark.law("restarts by torchrun")
def test_L6_a_random_sigkill_and_torchruns_restart_keep_the_ledger(
    two_ranks, killed, assert_it_learned, record_property
):
    assert_it_learned(two_ranks[0], steps=24)
    assert ledger(killed[0]) == ledger(two_ranks[0])
    assert not processes_of(killed[0])
    record_property("varied", killed[1].partition("\n")[0])


@pytest.mark.control("a resume without the optimizer")
def test_L6_control_a_resume_that_lost_the_optimizer_is_caught(two_ranks, run):
    forget_optimizer(interrupt(two_ranks[0], run))
    replay = replay_of(two_ranks[0])  # needs no engine
    error = error_of_run(run, "--init_from=resume", *replay, status=1)
    assert "rl step 16 came out otherwise than before the interruption" in error


# ---- L7: replay


@pytest.mark.law("a replay without an engine")
def test_L7_a_replay_without_an_engine_makes_the_same_ledger(two_ranks, replayed, assert_it_learned):
    assert_it_learned(replayed[0], steps=24)
    assert ledger(replayed[0]) == ledger(two_ranks[0])
    assert "SGLang" not in replayed[1]
    assert not [*replayed[0].glob("engine_*.log")]


@pytest.mark.control("one changed token")
def test_L7_control_one_changed_token_is_caught(two_ranks, run, tmp_path):
    shutil.copytree(two_ranks[0] / "queue", tmp_path / "queue")
    flip_token(tmp_path / "queue")
    error = error_of_run(run, *replay_of(tmp_path))
    assert error.startswith("error: step 3, prompt 0, sample 0, token")


# ---- L8: the ways of the weights


@pytest.mark.law("weights by broadcast from one and two trainers, by ipc")
def test_L8_broadcast_by_one_or_two_trainers_and_ipc_one_ledger(two_ranks, one_process, resumed, assert_it_learned):
    assert_it_learned(two_ranks[0], steps=24)
    for (folder, output), how in ((two_ranks, "broadcast"), (one_process, "ipc"), (resumed, "broadcast")):
        assert f"weights travel by {how}" in output
        assert ledger(folder) == ledger(two_ranks[0])


@pytest.mark.control("a bit flipped on the way")
def test_L8_control_a_bit_flipped_on_the_way_names_its_parameter(warmed, run):
    error = error_of_run(run, *warmed, "--max_steps=1", broken=a_flipped_bit, status=1)
    assert re.search("did not arrive as sent: .*up_proj.weight", error)
    assert not rl_ledger(run)
    assert not (run / "queue").exists()


# ---- L9: a lag


@pytest.mark.law("lag=2: overlapped on 2 slow engines or alternating")
def test_L9_side_by_side_or_in_turn_one_ledger(lagged, lagged_apart, two_ranks, assert_it_learned, record_property):
    """On one engine, and on two that are slow at random, one process of them killed and the run resumed."""
    assert_it_learned(lagged[0], steps=16)
    assert ledger(lagged[0]) == ledger(lagged_apart[0]) != ledger(two_ranks[0])
    record_property("varied", lagged_apart[1].partition("\n")[0])
    first, second, *later = rl_metrics(lagged[0])
    assert [m["staleness"] for m in (first, second, *later)] == [0, 1, *[2] * 14]
    # The weights differ from those that sampled; the ratios, which the check does not use, say by how much.
    assert (first["ratio_mean"], first["kl_behaviour"], first["effective_sample_size"]) == (1, 0, 1)
    for m in later:
        assert m["ratio_variance"] > 1e-5
        assert m["kl_behaviour"] > 1e-5
        assert 0.9 < m["effective_sample_size"] < 1


def test_L9_training_and_sampling_overlap(lagged, lagged_apart):
    """One does not wait for the other: together they were busy for longer than it took, which in turn cannot be."""

    def share(folder):
        busy = whole = 0.0
        for m in rl_metrics(folder)[2:-2]:  # the first two are sampled before, the last without samples
            busy += m["rollout_seconds"] + m["train_seconds"]
            whole += m["step_seconds"]
        return busy / whole

    assert share(lagged[0]) < 1 < share(lagged_apart[0])
    for tensors, meta in read_groups(lagged_apart[0]):
        assert tensors["weight_version"].unique().tolist() == [max(0, meta["step"] - 2)]


@pytest.mark.control("weights as they come")
def test_L9_control_weights_as_they_come_are_caught(warmed, run):
    flags = (*LAG, *warmed, "--max_steps=6", "--eval_size=0")
    error = error_of_run(run, *flags, broken=weights_as_they_come)
    assert re.search("step 4, prompt 0, sample 0, token 0: engine .* differ", error)
    assert len(rl_ledger(run)) == 4  # before it moved a weight


@pytest.mark.law("a replay")
def test_L9_a_replay_on_other_ranks_checks_against_the_same_versions(lagged, warmed, run, assert_it_learned):
    flags = (*LAG, *warmed, *replay_of(lagged[0]), "--checkpoint_every=0")
    finish(run, *flags, ranks=2)
    assert_it_learned(run, steps=16)
    assert ledger(run) == ledger(lagged[0])


# ---- L10: agents


@pytest.mark.law("an agent with a slow tool: 1 and 2 engines, a kill between call and result")
def test_L10_agents_one_ledger_whatever_their_tools_and_engines_take(agents, agents_apart, assert_it_learned):
    """In one process; with two engines, one of them killed between a call and its result, and two trainers."""
    assert_it_learned(agents[0], steps=16)
    assert ledger(agents[0]) == ledger(agents_apart[0])
    steps = rl_metrics(agents[0])
    for m in steps:
        assert m["turns_mean"] > 1
        assert m["calls_mean"] > 0.5
        assert 0 < m["forks_mean"] < 0.5
        assert m["prefix_hit_rate"] > 0.5
        assert 0.2 < m["masked_fraction"] < 0.8
    assert len({m["tool_errors"] for m in steps}) > 1


def test_L10_what_was_done_before_a_kill_is_not_done_again(agents_apart):
    """What chat.do does in this agent is done once, except the few acts that the kill cut off."""
    folder, _ = agents_apart
    notes = (folder.parent / "notes").read_text().splitlines()
    until_then = (folder.parent / "victim").read_text().splitlines()
    journals = itertools.chain(*(meta["journal"] for _, meta in read_groups(folder, "*")))
    noted = [x["arguments"][0] for x in itertools.chain(*journals) if x["name"] == "note"]
    assert {*noted} == {*notes}
    assert len(noted) == len({*notes}) > 1300
    assert len(notes) - len(noted) < 8
    # The step in which it happened had begun: without journals all that its unfinished groups did would be done twice.
    last = re.match(r"\w+ step \d+,", until_then[-1])[0]
    assert 8 < sum(x.startswith(last) for x in until_then) < sum(x.startswith(last) for x in notes)
    assert not [*folder.glob("queue/*/journal_*")]  # they are in the group files


def test_L10_dialogues_are_what_their_template_makes_of_the_messages(agent, agents):
    tokenizer = AutoTokenizer.from_pretrained(agent[-1].partition("=")[2])
    checked = 0
    for tensors, meta in read_groups(agents[0]):
        samples = tensors["tokens"].split(tensors["lengths"].tolist())
        for tokens, chat in zip(samples, itertools.chain(*meta["episodes"])):
            ids = tensors["prompt_tokens"].tolist() + tokens.tolist()
            text = tokenizer.apply_chat_template(chat["messages"], tokenize=False)
            ours = tokenizer.decode(ids).partition("<eos>")[2]  # without the list of tools
            turns = chat["turns"]
            cut = turns[-1]["truncated"]
            # A call as it was sampled may have other blanks than the template's.
            if not cut and not any(turn["tool_calls"] for turn in turns):
                assert ours == text
                checked += 1
            trained = [tokenizer.decode(ids[turn["start"] : turn["end"]]) for turn in turns]
            assert "".join(trained).count("<eos>") == len(turns) - cut
    assert checked > 130


@pytest.mark.law("a replay")
def test_L10_a_replay_calls_nothing_and_has_the_same_ledger(agent, agents, run, tmp_path):
    env = {"NOTES": str(tmp_path / "notes")}
    finish(run, *agent, *replay_of(agents[0]), "--checkpoint_every=0", env=env)
    assert ledger(run) == ledger(agents[0])
    assert not (tmp_path / "notes").exists()


@pytest.mark.control("seeds by arrival")
def test_L10_control_seeds_by_arrival_are_other_samples(agent, agents, run):
    finish(run, *agent, "--max_steps=2", "--eval_size=0", broken=seeds_by_arrival)
    pairs = zip(rl_ledger(agents[0]), rl_ledger(run))
    assert any(x["tokens"] != y["tokens"] for x, y in pairs)


@pytest.mark.control("another result in a journal")
def test_L10_control_a_journal_with_another_result_is_another_run(agent, agents, run):
    queue = interrupt(agents[0], run) / "queue"
    path = sync.group_path(queue / "rl_000009", 0)
    tensors, meta = sync.read_group(path)
    entry = next(entry for entry in itertools.chain(*meta["journal"]) if entry["name"] == "add")
    entry["result"] += "0"
    sync.write_group(path, tensors, meta)
    assert "rl step 9 came out otherwise" in error_of_run(run, *agent, "--init_from=resume", status=1)


@pytest.mark.control("a tool with a clock")
def test_L10_control_a_tool_with_a_clock_is_named_after_the_first_step(agent, run):
    flags = (*agent, "--agent=tests/slow_agent.py:ask_the_clock", "--eval_size=0")
    why = r"error: rl step 0, prompt \d, sample \d, turn 0, call 0: add gave '\d+' and now '\d+'; .* @impure"
    assert re.match(why, error_of_run(run, *flags))
    assert not rl_ledger(run)


# ---- L11: segments


@pytest.mark.law("segments with lag=2, under a sampling rule: overlapped on 2 slow engines or alternating")
def test_L11_segments_one_ledger_on_any_engines_at_any_pace(
    segments, segments_apart, assert_it_learned, record_property
):
    assert_it_learned(segments[0], steps=16)
    assert ledger(segments[0]) == ledger(segments_apart[0])
    assert "weights travel by ipc" in segments[1]
    assert "weights travel by broadcast" in segments_apart[1]
    record_property("varied", segments_apart[1].partition("\n")[0])
    groups = read_groups(segments[0])
    assert max(len(t["weight_version"].unique()) for t, _ in groups) >= 4
    for t, _ in groups:
        for versions in t["weight_version"].split(t["lengths"].tolist()):
            assert versions.tolist() == sorted(versions.tolist())
    staleness = {m["staleness"] for m in rl_metrics(segments[0])}
    assert len(staleness) > 7
    assert max(staleness) > 1


@pytest.mark.law("cuts alone")
def test_L11_under_equal_weights_segments_are_the_whole_sample(two_ranks, run, tmp_path):
    """Until the first update nothing but the cuts is different."""
    flags = ("--segment_tokens=2", "--groups_in_flight=8", "--max_steps=1")
    finish(run, *flags)
    (ours,) = rl_ledger(run)
    base = rl_ledger(two_ranks[0])[0]
    assert len([*tmp_path.glob("run/queue/rl_000000/group_*")]) > 8
    del ours["weight_version"]
    assert ours | dict(chain=base["chain"]) == base


@pytest.mark.law("a replay on 2 trainers, under a sampling rule")
def test_L11_a_replay_on_other_ranks_holds_what_the_rule_kept(segments, warmed, run, assert_it_learned):
    flags = (*SEGMENTS, *warmed, *replay_of(segments[0]), "--checkpoint_every=0")
    finish(run, *flags, ranks=2)
    assert_it_learned(run, steps=16)
    assert ledger(run) == ledger(segments[0])


@pytest.mark.control("what a rule keeps, by other weights than those that sampled")
def test_L11_control_what_is_kept_by_other_weights_is_another_update(segments, warmed, run):
    flags = (*SEGMENTS, *warmed, *replay_of(segments[0]), "--strict=False", "--max_steps=6", "--checkpoint_every=0")
    finish(run, *flags, broken=kept_by_other_weights)
    ours = rl_ledger(segments[0])[:6]
    other = rl_ledger(run)
    assert [x["tokens"] for x in ours] == [x["tokens"] for x in other]
    assert [x["gradients"] for x in ours] != [x["gradients"] for x in other]


@pytest.mark.control("segments cut by time")
def test_L11_control_segments_cut_by_time_are_other_samples(segments, warmed, run):
    flags = (*SEGMENTS, *warmed, "--max_steps=4", "--eval_size=0")
    finish(run, *flags, broken=segments_by_time)
    pairs = zip(rl_ledger(segments[0]), rl_ledger(run))
    assert any(x["tokens"] != y["tokens"] for x, y in pairs)


# ---- L12: other CPUs

# Of config/small.py and of tests/one_digest.py's algorithms on a CPU. They move with the versions in pyproject.toml and
# with any change of any bit, and only then.
SMALL_RUN = "a0dc934371551f7ec6352c90f264ac92f992978dbc9c378e2d9fb450bf6fcae9"
REAL_MODEL = "7bb253d5f9225ff3e7fb3f613287ddc78df64466ec3bc2885689b95b10ed6718"  # of two steps of SmolLM2-135M-Instruct
ALGORITHMS = "0ac89590474d284bdd40ce453c748a888633053a10799a39cd4e5738f51cb3f3"
ON_PURPOSE = "these bits were the same on every CPU and for every user: if they are to change, change this constant too"

# What torch and Numba take for the CPU, and what else cuts work into pieces. Numba's name alone would leave it the
# features of this machine.
AVX2 = dict(NUMBA_CPU_NAME="x86-64-v3", NUMBA_CPU_FEATURES="+avx,+avx2,+fma,+bmi,+bmi2,+f16c,+lzcnt,+movbe,+popcnt")
SSE2 = dict(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")  # whose fma is a function of the C library
SETTINGS = {
    "this one": (1, {}),
    "AVX2": (2, AVX2 | dict(ATEN_CPU_CAPABILITY="avx2", MKL_CBWR="COMPATIBLE", OMP_NUM_THREADS="2")),
    "SSE2": (3, SSE2 | dict(ATEN_CPU_CAPABILITY="default", OMP_NUM_THREADS="1")),
}
on_a_cpu = pytest.mark.skipif(
    torch.cuda.is_available() or platform.machine() != "x86_64" or "+avx2" not in cpu_features(),
    reason="the other settings are those of an x86 CPU with AVX2",
)


@shared
def computed(_):
    """What tests/one_digest.py computes, in a process per setting."""
    found = {}
    script = ROOT / "tests" / "one_digest.py"
    for name, (threads, env) in SETTINGS.items():
        command = [sys.executable, script, str(threads)]
        output = subprocess.check_output(command, env=os.environ | env, text=True)
        found[name] = json.loads(output.splitlines()[-1])
    return json.dumps(found)


@pytest.fixture
def hashes(computed):
    """{setting: {piece: hash}}."""
    return json.loads(computed[1])


@on_a_cpu
@pytest.mark.law("operators, formulas and algorithms on any CPU's instructions")
def test_L12_operators_formulas_algorithms_and_data_hash_alike_on_any_cpu(hashes):
    ours = {piece: h for piece, h in hashes["this one"].items() if "torch's own" not in piece}
    assert len({*ours.values()}) == len(ours) >= 30
    for other in ("AVX2", "SSE2"):
        assert ours.items() <= hashes[other].items()
    trained = [h for piece, h in ours.items() if piece.startswith("algorithm")]
    assert len(trained) == 7
    assert hashlib.sha256("".join(trained).encode()).hexdigest() == ALGORITHMS, ON_PURPOSE


@on_a_cpu
@pytest.mark.control("the libraries' own operators")
def test_L12_control_torchs_own_operators_differ_between_cpus(hashes):
    differ = set()
    for other in ("AVX2", "SSE2"):
        differ |= {piece for piece, h in hashes["this one"].items() if hashes[other][piece] != h}
    # and with AVX-512 also the sums
    assert {piece.split()[-1] for piece in differ} >= {"pow", "log_softmax"}


@on_a_cpu
@pytest.mark.law("the small run, and a real chat model's on AVX2's instructions")
def test_L12_the_small_run_and_a_real_models_have_one_digest(two_ranks, hashes, run, tmp_path, assert_it_learned):
    assert digest(two_ranks[1]) == f"digest {SMALL_RUN}", ON_PURPOSE
    reward = tmp_path / "varied.py"
    reward.write_text("def characters(prompt, response, answer):\n    return float(len({*response}))\n")
    flags = """config/smollm2.py --max_steps=2 --prompts_per_step=2 --group_size=4 --max_new_tokens=6 --eval_size=2
        --warmup_sft_steps=0 --checkpoint_every=0 --threads=2""".split()
    env = AVX2 | dict(ATEN_CPU_CAPABILITY="default", OMP_NUM_THREADS="2")  # `hashes` has compiled the loops for it
    output = finish(run, *flags, f"--reward={reward}:characters", env=env, launch=launch)
    assert_it_learned(run, steps=2)
    assert digest(output) == f"digest {REAL_MODEL}", ON_PURPOSE


# ---- L13: engines over several ranks


@pytest.mark.law("an engine over 2 ranks, 2 of them")
def test_L13_an_engine_over_two_ranks_one_ledger(split, split_apart, two_ranks, assert_it_learned):
    """Two such engines, one of whose schedulers is killed, and then one."""
    assert_it_learned(split[0], steps=16)
    assert ledger(split[0]) == ledger(split_apart[0]) != ledger(two_ranks[0])
    assert digest(split[1]) == digest(split_apart[1])
    assert {m["engine"] for _, m in read_groups(split_apart[0])} == {0, 1}
    assert any(m["staleness"] for m in rl_metrics(split_apart[0]))


def test_L13_one_rank_of_an_engine_that_is_lost_ends_the_run_in_one_line(split_apart):
    error = error_line((split_apart[0].parent / "lost").read_text())
    assert re.fullmatch(r"error: engine [01]: the SGLang process died(: .*)?; see .*engine_[01].log", error), error
    assert not processes_of(split_apart[0])


@pytest.mark.control("a plain all-reduce")
def test_L13_control_a_plain_all_reduce_is_caught(warmed, run):
    flags = (*warmed, "--tp_split=4", "--rollout_tp=2", "--rollout_ranks=2", "--max_steps=1", "--eval_size=0")
    error = error_of_run(run, *flags, ranks=3, broken=plain_all_reduce)
    assert "log-probs differ" in error


# ---- L15: a mixture of experts


@pytest.mark.law("experts, lag=1: 1 + 1, 2 + 1 and 1 + 2 ranks, one process, a resume, a replay on 4 trainers")
def test_L15_a_mixture_of_experts_has_one_ledger_however_it_is_run(
    mixture, mixture_resumed, run, tmp_path, assert_it_learned
):
    assert_it_learned(mixture[0], steps=16)
    assert "resuming at step 8" in mixture_resumed[1]
    assert ledger(mixture_resumed[0]) == ledger(mixture[0])
    finish(tmp_path / "replayed", *MIXTURE, *replay_of(mixture[0]), ranks=4)
    assert ledger(tmp_path / "replayed") == ledger(mixture[0])
    flags = "--tp_split=2 --warmup_sft_steps=0 --checkpoint_every=0 --max_steps=3".split()
    flags = [*MIXTURE, *flags, f"--init_from={mixture[0] / 'ckpt' / 'step_000016'}"]
    other = "--threads=2 --gradient_checkpointing --weight_sync=ipc".split()
    finish(run, *flags, *ENGINE_FLAGS, *other)
    finish(tmp_path / "shared", *flags, "--rollout_ranks=2", "--rollout_tp=2", ranks=3)
    assert len(rl_ledger(run)) == 3
    assert ledger(run) == ledger(tmp_path / "shared")


@pytest.mark.control("experts added by number")
def test_L15_control_experts_added_in_another_order_are_caught(run):
    flags = ("--warmup_sft_steps=0", "--max_steps=1", "--eval_size=0")
    assert "log-probs differ" in error_of_run(run, *MIXTURE, *flags, broken=experts_by_number)
    assert not rl_ledger(run)


# ---- L16: a curriculum


@pytest.mark.law("a curriculum over two sources, with a lag and kills")
def test_L16_a_curriculum_draws_the_same_on_any_ranks_after_any_kill(lagged, lagged_apart, assert_it_learned):
    assert_it_learned(lagged[0], steps=16)
    assert ledger(lagged[0]) == ledger(lagged_apart[0])
    drawn = Counter()
    for step in range(16):
        metas = [meta for _, meta in read_groups(lagged[0], f"rl_{step:06d}")]
        assert [meta["source"] for meta in metas] == ["low"] * 2 + ["high"] * 6
        prompts = {meta["prompt_text"] for meta in metas}
        assert len(prompts) == 8
        drawn.update(prompts)
    assert max(drawn.values()) > 16 * 6 // 20 + 4  # in order it would be 16 * 6 / 20 for each of `high`
    for evaluation in lines(lagged[0], "metrics.jsonl", "eval"):
        for name in ("low", "high"):
            assert 0 <= evaluation[f"{name}/pass@1"] <= 1


@pytest.mark.control("a resume that forgot what was seen")
def test_L16_control_a_resume_that_forgot_the_seen_draws_other_prompts(lagged, warmed, run):
    forget_seen(interrupt(lagged[0], run))
    error = error_of_run(run, *warmed, "--init_from=resume", "--weight_sync=ipc", status=1)
    assert "rl step 8 came out otherwise than before the interruption" in error
