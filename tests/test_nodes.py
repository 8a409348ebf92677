"""
A run on two nodes (tests/two_nodes.py makes them): the ledger of one, also when a rank dies.

    pytest -n0 tests/test_nodes.py
"""

import os
import signal
import subprocess

import pytest
from conftest import orphans, shared_memory, wait_for
from trials import LAG, is_rank, lines, processes_of
from two_nodes import enter, finish, start, two_nodes


@pytest.fixture
def nodes():
    try:
        with two_nodes() as nodes:
            yield nodes
    except OSError as e:  # where networks of one's own are not allowed, two nodes cannot be had on one machine
        pytest.skip(str(e))


def ranks_of(folder):
    """{rank: (process, its network)} of a run."""
    found = {}
    for pid, command in processes_of(folder).items():
        if is_rank(command):
            environment = open(f"/proc/{pid}/environ").read().split("\0")
            rank = next(x for x in environment if x.startswith("RANK="))
            found[int(rank[5:])] = pid, os.readlink(f"/proc/{pid}/ns/net")
    return found


def steps(folder):
    return len(lines(folder, "metrics.jsonl", "rl")) if (folder / "metrics.jsonl").exists() else 0


@pytest.mark.in_turn
def test_two_nodes_without_names_and_a_dead_rank_keep_the_ledger(nodes, lagged, warmed, tmp_path):
    """
    Two trainers, one on each, and an engine, side by side; weights by broadcast. The engine's rank dies: node-a's ranks
    see nothing of it, its torchrun does not count the restart, and both nodes begin again.
    """
    folder = tmp_path / "run"
    resolve = "python3", "-c", "import socket; print(socket.gethostname(), socket.gethostbyname(socket.gethostname()))"
    names = [subprocess.run([*enter(node), *resolve], capture_output=True, text=True) for node in nodes]
    assert names[0].stdout == "node-a 127.0.1.1\n" and names[1].returncode and "gaierror" in names[1].stderr
    flags = *LAG, *warmed, "--max_steps=6", "--checkpoint_every=2", "--weight_sync=broadcast"
    with shared_memory():
        before = orphans()
        agents = start(nodes, folder, *flags, restarts=1)
        try:
            wait_for(lambda: steps(folder) > 2 or None not in [agent.poll() for agent in agents], 240)
            ranks = ranks_of(folder)
            networks = [network for _, (_, network) in sorted(ranks.items())]
            assert networks[0] != networks[1] == networks[2] and os.readlink("/proc/self/ns/net") not in networks
            os.kill(ranks[2][0], signal.SIGKILL)
        finally:
            ended = finish(agents, folder)
        for name in orphans() - before:
            os.unlink(f"/dev/shm/{name}")
    assert [status for status, _ in ended] == [0, 0], ended
    assert "resuming at step" in ended[0][1] and ended[1][1].count("starting SGLang") == 2 and "digest" in ended[0][1]
    mine, others = ((x / "ledger.jsonl").read_text().splitlines() for x in (folder, lagged[0]))
    assert steps(folder) == 6 and mine == others[: len(mine)]


def test_an_out_dir_that_the_nodes_do_not_share_is_named_at_the_start(nodes, tmp_path):
    folder, other = tmp_path / "run", tmp_path / "other"
    folder.mkdir(), other.mkdir()
    subprocess.run([*enter(nodes[1]), "mount", "--bind", other, folder], check=True)
    ended = finish(start(nodes, folder), folder, 120)
    cure = "not the same folder on node-b; choose one on a file system that all nodes share"
    line = f"error: out_dir={str(folder)!r}: {cure}"
    assert [x for x in ended[0][1].splitlines() if x.startswith("error: ")] == [line], ended
    assert "exitcode  : 2" in ended[0][1] and ended[1][0] > 0  # node-b's torchrun may only find that the other is gone
    assert not processes_of(folder) and not (folder / "queue").exists()
