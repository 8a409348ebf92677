"""
NCCL between ranks of one card: what trainers and weights ask of it, whether it is right, and how long it takes.

    torchrun --nproc_per_node=4 tests/nccl_on_one_card.py     # with what tests/one_card.py puts into the environment
"""

import os
import threading
import time

import torch
import torch.distributed as dist

N = 1 << 20  # numbers of a rank

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
everyone = dist.new_group(range(world), backend="nccl")
again = dist.new_group(range(world), backend="nccl")
ranks = torch.arange(world, device="cuda").float()
mine = torch.full((N,), float(rank), device="cuda")
gathered = mine.new_empty(world * N)
sent = ranks.repeat_interleave(N // world)
received = torch.empty_like(sent)
total = torch.zeros(world, dtype=torch.long, device="cuda")
piece = torch.full((N,), 7 * (rank == 0), dtype=torch.uint8, device="cuda")


def timed(name, work, right):
    work()  # the first connects
    torch.cuda.synchronize()
    dist.barrier()
    began = time.monotonic()
    for _ in range(10):
        work()
    torch.cuda.synchronize()
    seconds = time.monotonic() - began
    assert right(), (rank, name)
    if rank == 0:
        print(f"{world} ranks: {name} {100 * seconds:.1f} ms")


def exchange():
    dist.all_to_all_single(received, sent, group=everyone)


def add():
    total.zero_()
    total[rank].fill_(-1 - rank)
    dist.all_reduce(total, group=everyone)


def gather():
    dist.all_gather_into_tensor(gathered, mine, group=everyone)


def gathered_is(expected):
    return torch.equal(gathered.view(world, N)[:, 7], expected)


def send():
    """As weights travel: another communicator, in a thread with a stream of its own."""
    with torch.cuda.stream(torch.cuda.Stream()):
        dist.broadcast(piece, src=0, group=again)
        torch.cuda.current_stream().synchronize()


timed("all_to_all", exchange, lambda: bool((received == rank).all()))
timed("all_reduce", add, lambda: torch.equal(total, -1 - ranks.long()))
torch.cuda.synchronize()
send()  # connects
thread = threading.Thread(target=send)
thread.start()
timed("all_gather beside a broadcast", gather, lambda: gathered_is(ranks))
thread.join()
assert bool((piece == 7).all()), rank
graph = torch.cuda.CUDAGraph()  # as an engine over several ranks has it
with torch.cuda.graph(graph, capture_error_mode="thread_local"):
    gather()
mine.add_(10)
timed("all_gather in a graph", graph.replay, lambda: gathered_is(ranks + 10))
torch.cuda.synchronize()
graph.reset()  # NCCL waits for every graph that has a collective
dist.destroy_process_group()
print(f"rank {rank}: left")
