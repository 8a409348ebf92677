"""
Whole runs with --device=cuda on a machine without a card (tests/pretend/): trainer, FSDP2, SGLang's scheduler, bfloat16
throughout, and what a card or NCCL would refuse, seen by spies.
"""

import json
from collections import defaultdict
from pathlib import Path

import pytest
from conftest import digest, finish
from pretend.driver import stub_driver

SITE = Path(__file__).parent / "pretend" / "site"
SHAPE = dict(layers=1, hidden=64, heads=2, kv_heads=1, head_dim=64, mlp=64)
FLAGS = """--device=cuda --prompts_per_step=1 --group_size=3 --max_new_tokens=4 --lanes=1 --leaf_tokens=64
    --engine_kv_tokens=512 --engine_max_running=8 --max_steps=2 --eval_size=0 --threads=1 --learning_rate=1e-3
    --warmup_sft_steps=0 --checkpoint_every=1 --keep_checkpoints=9 --reward=tests/pretend/reward.py:score""".split()
FLAGS += [f"--scratch_{name}={n}" for name, n in SHAPE.items()]
QUIET = dict(
    TRITON_INTERPRET="1",
    TORCHDYNAMO_DISABLE="1",
    SGLANG_DEEPGEMM_PDL="0",  # it would start cuBLASLt
    OMP_NUM_THREADS="1",
)


def pretend(folder, *flags, ranks=0):
    """The output of a run, after all that its processes noted in the folder `<folder>.log` has been cleared."""
    log = folder.with_suffix(".log")
    log.mkdir()
    env = dict(QUIET, PYTHONPATH=str(SITE), PRETEND_LOG=str(log), LD_LIBRARY_PATH=str(stub_driver(log)))
    return finish(folder, *FLAGS, *flags, ranks=ranks, env=env)


def noted(folder, *events):
    """What the processes of a run noted, in the order of time: dicts, with the process's number as 'process'."""
    found = [
        json.loads(line) | dict(process=path.stem)
        for path in folder.with_suffix(".log").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    return sorted((x for x in found if x["event"] in events), key=lambda x: x["time"])


@pytest.fixture(scope="session")
def overlapped(once):
    """Two trainers and an engine, side by side."""
    flags = "--lag=1 --lanes=2 --max_steps=3".split()
    return once("pretend_overlapped", lambda folder: pretend(folder, *flags, ranks=3))


def test_every_group_is_destroyed_by_all_its_members_after_the_digest(overlapped):
    folder, output = overlapped
    digest(output)
    members, destroyed = defaultdict(set), defaultdict(set)
    sizes = {}
    for x in noted(folder, "group"):
        if "nccl" in x["backend"] and x["size"] > 1:
            members[x["name"]].add(x["process"])
            sizes[x["name"]] = x["size"]
    (printed,) = (x["time"] for x in noted(folder, "digest"))
    for x in noted(folder, "destroy begins"):
        assert x["time"] > printed
        for name in x["names"]:
            destroyed[name].add(x["process"])
    assert len(members) == 3 and {"weights 0", "weights 1"} <= members.keys()  # and the trainers' own
    for name, processes in members.items():
        assert len(processes) == sizes[name] and processes == destroyed[name], name


def test_no_two_threads_talk_among_the_same_trainers(overlapped):
    threads = defaultdict(set)  # NCCL may deadlock where ranks have two communicators at work in another order
    for x in noted(overlapped[0], "collective"):
        if len(x["ranks"]) > 1:
            threads[(x["process"], *x["ranks"])].add(x["thread"])
    assert len(threads) == 2 and all(len(names) == 1 for names in threads.values()), threads
