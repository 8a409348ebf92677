"""
Whole runs with --device=cuda on a machine without a card (tests/pretend/): trainer, FSDP2, SGLang's scheduler, bfloat16
throughout, and what a card or NCCL would refuse, seen by spies. docs/hardware.md says what is left.
"""

import atexit
import json
import os
import re
import shutil
import signal
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
from conftest import digest, error_line, finish, run_warm, shared, wait_for
from pretend.driver import environment
from runs import listening, start_warm
from test_laws import ledger
from trials import command_of, lines

SIZES = "num_hidden_layers=1, hidden_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=64"
SIZES = f"--scratch_args={SIZES}, intermediate_size=64"
FLAGS = """--device=cuda --prompts_per_step=1 --group_size=3 --max_new_tokens=4 --lanes=2 --leaf_tokens=64 --tp_split=2
    --engine_args=max_total_tokens=512,max_running_requests=8 --max_steps=2 --eval_size=4 --threads=1
    --learning_rate=1e-3
    --warmup_sft_steps=0 --checkpoint_every=1 --keep_checkpoints=9 --reward=tests/pretend/reward.py:score""".split()
FLAGS.append(SIZES)
# two trainers, and an engine beside them
LAG = "--lag=1 --max_steps=3 --eval_size=0 --engine_args=disable_cuda_graph=True".split()
LORA = (*LAG, "--lora_rank=4", "--max_steps=2")


@cache
def worker():
    """The address of a process for run_warm that has a card."""
    driver = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, driver)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (environment(driver) | dict(PRETEND_ORDER="1")).items():
            patch.setenv(name, value)
        return start_warm(listening())


def launch(folder, *flags, ranks=0, **env):
    """(status, output) of a run whose processes make notes in the folder `<folder>.log`."""
    log = folder.with_suffix(".log")
    log.mkdir(exist_ok=True)
    command = command_of(folder, *FLAGS, *flags)[1:]
    output = folder.parent / f"{folder.name}.output"
    return run_warm(command, output, ranks, env=dict(env, PRETEND_LOG=str(log)), address=worker())


def pretend(folder, *flags, ranks=0):
    return finish(folder, *flags, ranks=ranks, launch=launch)


def noted(folder, *events):
    """What the processes of a run noted, in the order of time: dicts, with the process's number as 'process'."""
    found = [
        json.loads(line) | dict(process=path.stem)
        for path in folder.with_suffix(".log").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    return sorted((x for x in found if x["event"] in events), key=lambda x: x["time"])


@shared
def alone(folder):
    """One process: weights by ipc, memory that is lent, decode graphs."""
    return pretend(folder)


@shared
def resumed(folder, alone):
    """
    The same from its first checkpoint on: two trainers, under FSDP2, and an engine over two ranks that gets weights by
    broadcast.
    """
    shutil.copytree(alone[0], folder)
    shutil.rmtree(folder / "ckpt" / "step_000002")
    shutil.rmtree(folder / "queue" / "rl_000001")
    return pretend(folder, "--init_from=resume", "--rollout_ranks=2", "--rollout_tp=2", ranks=4)


@shared
def overlapped(folder):
    return pretend(folder, *LAG, ranks=3)


@shared
def adapted(folder):
    return pretend(folder, *LORA, ranks=3)


@shared
def adapted_alone(folder):
    """The same in one process."""
    return pretend(folder, *LORA)


@shared
def mixture(folder):
    """A mixture of experts, in one process."""
    return pretend(folder, "--tp_split=1", f"{SIZES}, num_experts=4", "--eval_size=0")


@shared
def of_float32(folder):
    return pretend(folder, *LAG, "--dtype=float32", ranks=3)


@pytest.fixture(params=["alone", "resumed", "overlapped", "adapted", "adapted_alone", "mixture"])
def run(request):
    return request.getfixturevalue(request.param)


def test_it_learns_and_engine_and_trainer_agree_in_every_bit(run, assert_it_learned):
    folder, output = run
    digest(output)
    assert_it_learned(folder, steps=len(lines(folder, "metrics.jsonl", "rl")))
    assert all(x["logprob_mismatch_tokens"] == 0 for x in lines(folder, "metrics.jsonl", "rl"))
    assert lines(folder, "ledger.jsonl", "device")[0]["device"] == "cuda 9.0"


def test_ranks_tensor_parallelism_transport_and_resume_change_no_bit(
    alone, resumed, overlapped, adapted, adapted_alone
):
    assert ledger(alone[0]) == ledger(resumed[0]) != ledger(overlapped[0])
    assert ledger(adapted[0]) == ledger(adapted_alone[0]) != ledger(overlapped[0])


def test_no_function_has_tensors_on_both_places(run):
    assert not noted(run[0], "mixed")


def test_streams_wait_for_what_they_use_and_no_memory_is_freed_before(run):
    assert not noted(run[0], "race", "freed early")


def test_the_host_waits_for_no_leaf(run):
    """But for the sums of a step's figures, after the last: so the next leaf's kernels are started meanwhile."""
    waits = [x for x in noted(run[0], "wait") if "gradients" in x["functions"] and "metrics" not in x["functions"]]
    assert len({x["place"] for x in waits}) == 1


def test_a_decode_step_is_a_graph_that_asks_nothing_of_python(alone, mixture):
    for (folder, _), right in ((alone, GRAPH), (mixture, OF_EXPERTS)):
        captured = [x["steps"] for x in noted(folder, "captured")]
        assert len(captured) == 3  # for 1, 2 and 4 requests; the three samples of a step leave one place empty
        assert all(sorted(set(steps)) == right for steps in captured)
        assert len(noted(folder, "replayed")) >= 2 * 3 and len(noted(folder, "lent")) >= 2 * 2


# What an upgrade of SGLang adds to a graph is seen here.
GRAPH = """aten::_to_copy aten::add.Tensor aten::add_.Tensor aten::copy_ aten::cumsum aten::embedding
    aten::floor_divide aten::mul.Tensor aten::ones_like aten::zero_ triton_attention triton_matmul_tma triton_norm_rope
    triton_norm_rope_to_cache triton_rope_table triton_swiglu""".split()
OF_EXPERTS = (
    "aten::new_zeros triton_by_expert triton_choose triton_combine triton_expert_matmul triton_to_pairs".split()
)
OF_EXPERTS = sorted({*GRAPH, *OF_EXPERTS} - {"aten::add_.Tensor"})  # which adds the parts of a sum


def test_every_group_is_destroyed_by_all_its_members_after_the_digest(run):
    folder, output = run
    members, destroyed, sizes = defaultdict(set), defaultdict(set), {}
    ranks = {x["process"] for x in noted(folder, "publish")}
    for x in noted(folder, "group"):
        weights = x["name"].startswith("weights")
        if "nccl" in x["backend"] and (weights or x["process"] in ranks):  # SGLang's own end with its processes
            members[x["name"]].add(x["process"])
            sizes[x["name"]] = x["size"]
    (printed,) = (x["time"] for x in noted(folder, "digest"))
    for x in noted(folder, "destroy begins"):
        assert x["time"] > printed
        for name in x["names"]:
            destroyed[name].add(x["process"])
    assert len(members) >= 1 + ("by broadcast" in output)
    for name, processes in members.items():
        assert len(processes) == sizes[name] and processes <= destroyed[name], name


def test_collectives_of_trainers_come_from_one_thread_and_in_one_order(overlapped, adapted):
    for folder, _ in (overlapped, adapted):
        threads, order = defaultdict(set), defaultdict(list)
        for x in noted(folder, "collective"):
            if len(x["ranks"]) > 1:  # NCCL may deadlock where two communicators are at work in another order
                threads[x["process"]].add(x["thread"])
                order[x["process"]].append((x["op"], x["group"], x["shape"]))
        assert [*threads.values()] == [{"MainThread"}] * 2, threads
        one, other = order.values()
        assert one == other and len(one) > 100


def test_a_trainer_holds_what_the_account_says(alone, overlapped, adapted):
    """
    Between two steps: float32 weights and AdamW's moments, and in bfloat16 the model's copies, or the version that is
    sent; with LoRA the adapters'.
    """
    for (folder, output), bytes_each, trainers in ((alone, 3 * 4 + 2, 1), (overlapped, 3 * 4 + 2, 2), (adapted, 0, 2)):
        found = re.search(r"model: ([\d,]+) parameters(?:, of which ([\d,]+) are)?", output)
        every = [int(n.replace(",", "")) for n in found.groups() if n]
        learned = every[-1]
        frozen = every[0] - learned
        expected = (frozen * 2 + learned * (bytes_each or 4 * 4)) / trainers
        held = {x["version"]: x["held"] for x in noted(folder, "publish") if x["held"]}
        # and the factors of the hashes, some KB: a version more would be 52 KB, adapters merged at once, too
        assert expected <= max(held.values()) < expected + 16_000, (held, expected)


def test_L17_in_float32_pretended_cards_have_the_digest_of_a_cpu(of_float32, overlapped, tmp_path, assert_it_learned):
    folder, output = of_float32
    assert_it_learned(folder, steps=3)
    on_cpu = *FLAGS, *LAG, "--dtype=float32", "--device=cpu"
    assert digest(finish(tmp_path / "run", *on_cpu)) == digest(output)
    assert ledger(tmp_path / "run") == ledger(folder) != ledger(overlapped[0])
    shutil.copytree(folder, tmp_path / "resumed")  # by a CPU, from the cards' first checkpoint on
    for step in (2, 3):
        shutil.rmtree(tmp_path / f"resumed/ckpt/step_{step:06}")
        shutil.rmtree(tmp_path / f"resumed/queue/rl_{step - 1:06}")
    finish(tmp_path / "resumed", *on_cpu, "--init_from=resume")
    assert ledger(tmp_path / "resumed") == ledger(folder)
    assert not noted(folder, "mixed", "race", "freed early")


def test_a_resume_on_another_architecture_is_refused(alone, tmp_path):
    shutil.copytree(alone[0], tmp_path / "run")
    status, output = launch(tmp_path / "run", "--init_from=resume", "--max_steps=3", PRETEND_CAPABILITY="8.6")
    assert status == 1 and "has device 'cuda 9.0', expected 'cuda 8.6'" in error_line(output)


def test_a_lost_rank_ends_the_run_in_time_though_a_collective_would_wait_for_it(tmp_path):
    """NCCL spins for ever; gloo, which stands for it here, waits for a rank that is stopped as long."""
    folder = tmp_path / "run"
    flags = "--mode=sft", "--max_steps=100000", "--checkpoint_every=0", "--engine_timeout=10"
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(launch, folder, *flags, ranks=2)
        wait_for(lambda: run.done() or (folder / "metrics.jsonl").exists() and lines(folder), 120)
        (second,) = {x["process"] for x in noted(folder, "group") if x["rank"] == 1}
        os.kill(int(second), signal.SIGSTOP)
        status, output = run.result(timeout=10 + 10)
    assert status == 1
    assert error_line(output).startswith("error: rank 1: lost, or silent for 8 s; nothing written is lost; resume")
