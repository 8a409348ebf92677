"""
How things travel, and the proof that they arrived the same.

    ranks        who trains, who hosts an engine, and the process groups between them
    gradients    added over micro-batches ("leaves") by one fixed binary tree, whatever the number of ranks
    weights      from the trainers to the engines, by broadcast into SGLang's own weight-update group
    rollouts     from the engines to the trainers, through a folder of safetensors files
    ledger       one line of hashes per step, each chained to the line before
"""

import hashlib
import json
import math
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from configurator import close_bars

FOREVER = timedelta(days=30)  # a collective may wait for a whole rollout; torchrun and the watchdogs end a dead run


class RunError(SystemExit):
    """
    The run cannot go on: one line that says what and where, and exit status 1. A SystemExit, so that Python prints
    that line instead of a traceback, and still ends the engine on its way out.
    """

    def __init__(self, message):
        close_bars()
        super().__init__(f"error: {message}")


# ------------------------------------------------------------------------------------------------------------------
# ranks


class Ranks(NamedTuple):
    """Roles: trainers are ranks 0 .. trainers-1, the last `engines` ranks host an engine each; both may be one rank."""

    rank: int
    world: int
    trainers: int
    engines: int
    mesh: DeviceMesh | None  # over the trainers; None on a rank that does not train

    @property
    def is_trainer(self):
        return self.rank < self.trainers

    @property
    def engine(self):
        """Index of this rank's engine, or None."""
        return self.rank - (self.world - self.engines) if self.rank >= self.world - self.engines else None


@contextmanager
def hidden_torchrun():
    """
    Hides torchrun's variables from what starts inside: SGLang would take this rank's number for one of its own, and
    TORCHELASTIC_USE_AGENT_STORE makes a rendezvous at another address wait for ever.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    hidden = {k: v for k, v in os.environ.items() if k in names or k.startswith(("LOCAL_", "GROUP_", "TORCHELASTIC_"))}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def start_process_groups(rollout_ranks, colocate, device):
    """
    Joins torchrun's ranks (or makes a world of one) and splits them. gloo over all ranks for control; NCCL on
    CUDA, gloo on a CPU, over the trainers.
    """
    alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
    dist.init_process_group("gloo", timeout=FOREVER, **alone)
    rank, world = dist.get_rank(), dist.get_world_size()
    trainers, engines = (world, world) if colocate or world == 1 else (world - rollout_ranks, rollout_ranks)
    group = dist.new_group(range(trainers), backend="nccl" if device == "cuda" else "gloo", timeout=FOREVER)
    mesh = DeviceMesh.from_group(group, device, mesh_dim_names=("trainers",)) if rank < trainers else None
    return Ranks(rank, world, trainers, engines, mesh)


# ------------------------------------------------------------------------------------------------------------------
# gradients: leaf i belongs to rank i % ranks, and is that rank's (i // ranks)-th. The low bits of i are added across
# ranks by the reduce-scatter, the high bits over a rank's own leaves by the counter: always the same binary tree.


def tree_sum(parts):
    """Pairwise sum over the first dim: ((p0 + p1) + (p2 + p3)) + ...; an odd last part goes up alone."""
    while len(parts) > 1:
        even = len(parts) // 2 * 2
        pairs = parts[0:even:2] + parts[1:even:2]
        parts = torch.cat([pairs, parts[even:]]) if even < len(parts) else pairs
    return parts[0]


class TreeReduceScatter(ReduceScatter):
    """
    FSDP2's reduce-scatter as an all-to-all and a pairwise sum in rank order. The backend's own adds in ring order,
    which depends on the number of ranks. Sends the same bytes; sums, whatever `op` says: FSDP's average is not ours.
    """

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(tree_sum(received.view(group.size(), -1)))


class LeafSum:
    """Adds the gradients of a rank's leaves like a binary counter adds ones: equal-sized subtrees merge."""

    def __init__(self):
        self.stack = []  # (number of leaves, [tensors]), sizes strictly falling

    def add(self, grads):
        leaves = 1
        while self.stack and self.stack[-1][0] == leaves:
            _, left = self.stack.pop()
            grads = [a + b for a, b in zip(left, grads)]
            leaves *= 2
        self.stack.append((leaves, grads))

    def total(self):
        ((_, grads),) = self.stack  # one entry: the number of leaves is a power of two
        return grads


class Shard(NamedTuple):
    """This rank's rows of one parameter."""

    name: str
    shape: tuple  # of the whole parameter
    first: int  # first row of the whole that is here
    data: torch.Tensor  # rows here, maybe none


def shards(model, mesh):
    """FSDP2 gives rank r the r-th chunk of ceil(rows / ranks) rows (torch.chunk). Plain views of the parameters."""
    out = []
    for name, p in model.named_parameters():
        local = p.to_local().detach()
        out.append(Shard(name, tuple(p.shape), -(-p.shape[0] // mesh.size()) * mesh.get_local_rank(), local))
    return out


def _by_row(tensor, shard):
    return tensor.reshape(len(tensor), math.prod(shard.shape[1:]))  # -1 would not do: there may be no rows here


def grad_norm(grads, shards, group):
    """
    l2 norm over all ranks (a float64 scalar): squares are added along each row, and the rows of all parameters, put
    in their places by adding zeros, pairwise in order. So it is the same number on any number of ranks.
    """
    rows = torch.zeros(sum(s.shape[0] for s in shards), dtype=torch.float64, device=grads[0].device)
    start = 0
    for g, s in zip(grads, shards):
        rows[start + s.first : start + s.first + len(g)] = _by_row(g, s).double().square().sum(1)
        start += s.shape[0]
    dist.all_reduce(rows, group=group)
    return tree_sum(rows).sqrt()


# ------------------------------------------------------------------------------------------------------------------
# weights


def weight_buckets(model, dtype, max_bytes=256 << 20):
    """[(name, shape)] lists of at most `max_bytes` each (a larger parameter is a bucket by itself)."""
    buckets, room = [[]], max_bytes
    for name, p in model.named_parameters():
        size = p.numel() * dtype.itemsize
        if buckets[-1] and size > room:
            buckets.append([])
            room = max_bytes
        buckets[-1].append((name, tuple(p.shape)))
        room -= size
    return buckets


def meet():
    """
    Waits until all ranks are here. By polling: a rank blocked inside a collective would not see its engine die.
    """
    work = dist.barrier(async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    work.wait()


def join_weight_groups(ranks, engine, backend):
    """
    One group per engine: trainer rank 0 (group rank 0) and the engine's worker. Collective over all ranks; returns
    rank 0's list of groups, [] elsewhere.
    """

    def enter(store, names):
        from sglang.srt.utils import init_custom_process_group

        return [
            init_custom_process_group(
                backend, store=dist.PrefixStore(name, store), timeout=FOREVER, world_size=2, rank=0, group_name=name
            )
            for name in names
        ]

    names = [f"weights{e}" for e in range(ranks.engines)]
    meeting = [None]
    if ranks.rank == 0:
        one_node = ranks.world == int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        host = "127.0.0.1" if one_node else socket.gethostbyname(socket.gethostname())
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=FOREVER)  # 0: any free port
        meeting = [(host, store.port)]
    meet()
    dist.broadcast_object_list(meeting, src=0)
    with hidden_torchrun(), ThreadPoolExecutor(1) as thread:  # rank 0 may have to enter both ends
        entering = thread.submit(enter, store, names) if ranks.rank == 0 else None
        if engine is not None:
            engine.join_weight_group(*meeting[0], names[ranks.engine], backend)
        return entering.result() if entering else []


def publish(ranks, model, engine, groups, buckets, version, dtype):
    """
    Sends the trainers' weights to every engine as `version`. Collective over all ranks; `model` is None on a rank
    without a trainer, `engine` on one without an engine. Raises RunError if an engine did not take them.
    """
    meet()
    params = dict(model.named_parameters()) if model is not None else None
    for i, bucket in enumerate(buckets):
        sending = []
        if params is not None:
            full = [params[name].detach().to(dtype).full_tensor() for name, _ in bucket]
            if ranks.rank == 0:
                # SGLang's "flattened_bucket": the bytes of all tensors in one
                flat = torch.cat([t.contiguous().view(torch.uint8).flatten() for t in full])
                sending = [dist.broadcast(flat, src=0, group=g, async_op=True) for g in groups]
        if engine is not None:
            engine.load(bucket, dtype, version, last=i == len(buckets) - 1)
        for work in sending:
            work.wait()


# ------------------------------------------------------------------------------------------------------------------
# rollouts: queue/step_000012/group_0003.safetensors, written once and whole; claim_0003 beside it says who does it


def write_atomic(path, data):
    """Bytes appear under `path` whole or not at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def claim(folder, index):
    """True for exactly one of the engines that ask for prompt `index` of this step. It changes who works, not what."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(folder / f"claim_{index:04d}", os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False


def _digest(tensors, meta):
    h = hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
    for name in sorted(tensors):
        t = tensors[name]
        h.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        h.update(t.numpy().tobytes())
    return h.hexdigest()


def group_path(folder, index):
    return folder / f"group_{index:04d}.safetensors"


def write_group(folder, index, tensors, meta):
    """One prompt's scored samples: CPU tensors, and `meta` of str, int and list values, under one checksum."""
    header = {"meta": json.dumps(meta), "sha256": _digest(tensors, meta)}
    write_atomic(group_path(folder, index), save(tensors, header))


def read_group(folder, index, expected):
    """
    (tensors, meta) of a group file. Raises RunError for a torn or altered file, and where meta differs from
    `expected` (run, step, prompt, version): a file of another run must not be trained on.
    """
    path = group_path(folder, index)
    try:
        with safe_open(path, "pt") as f:
            header = f.metadata() or {}
            meta = json.loads(header.get("meta", "{}"))
            tensors = {name: f.get_tensor(name) for name in f.keys()}
    except (SafetensorError, ValueError, OSError) as e:
        reason = str(e).splitlines()[0]
        raise RunError(f"{path}: torn or not a rollout file ({reason}); delete it to have it made again")
    if header.get("sha256") != _digest(tensors, meta):
        raise RunError(f"{path}: its checksum is wrong; delete it to have it made again")
    for key, value in expected.items():
        if meta.get(key) != value:
            raise RunError(f"{path}: has {key} {meta.get(key)!r}, expected {value!r}: not a file of this run and step")
    return tensors, meta


def wait_for_groups(folder, count, timeout):
    """Returns when all `count` group files are there; RunError if none comes for `timeout` seconds."""
    index, since = 0, time.monotonic()
    while index < count:
        if group_path(folder, index).exists():
            index, since = index + 1, time.monotonic()
        elif time.monotonic() - since > timeout:
            raise RunError(f"{group_path(folder, index)}: no rollout came for {timeout:.0f} s; see the engine logs")
        else:
            time.sleep(0.002)


# ------------------------------------------------------------------------------------------------------------------
# ledger


@cache
def _odd(first, count, device):
    """`count` fixed pseudo-random odd int64, numbers `first` on of splitmix64's stream (Steele et al. 2014)."""
    i = torch.arange(first, first + count, device=device)
    i = i * -7046029254386353131  # the golden ratio's 64 bits, 0x9e3779b97f4a7c15
    i = (i ^ (i >> 30)) * -4658895280553007687
    i = (i ^ (i >> 27)) * -7723592293110705685
    return (i ^ (i >> 31)) | 1


def tensor_hashes(tensors, shards, group):
    """
    A 64-bit hash per parameter of whole tensors of which each rank has some rows: sum over elements of
    bits * odd(row) * odd(column) mod 2^64. Integer sums have no order, so any sharding gives the same hash; an odd
    factor loses no bit, so any single changed element changes it.
    """
    sums = []
    for t, s in zip(tensors, shards):
        bits = _by_row(t, s).view(torch.int32)
        by_row = (bits * _odd(0, bits.shape[1], t.device)).sum(1)
        sums.append((by_row * _odd(s.first + (1 << 40), len(t), t.device)).sum())
    sums = torch.stack(sums)
    dist.all_reduce(sums, group=group)
    return {s.name: f"{h & 0xFFFFFFFFFFFFFFFF:016x}" for s, h in zip(shards, sums.tolist())}


def content_hash(*parts):
    """16 hex digits over tensors and plain values, in order."""
    h = hashlib.sha256()
    for part in parts:
        h.update(part.contiguous().numpy().tobytes() if torch.is_tensor(part) else json.dumps(part).encode())
        h.update(b"\0")
    return h.hexdigest()[:16]


class Ledger:
    """
    ledger.jsonl: per step a hash of each stage (prompts, tokens, logprobs, rewards, advantages, gradients, weights,
    optimizer) and `chain`, a SHA-256 over the line and the chain before it. Two runs with the same last link did the
    same; the first differing line and stage say where two runs parted. `digest` is the last link.
    """

    def __init__(self, path, start):
        self.path = path
        self.digest = hashlib.sha256(start.encode()).hexdigest()

    def append(self, **line):
        text = json.dumps(line)
        self.digest = hashlib.sha256((self.digest + text).encode()).hexdigest()
        with open(self.path, "a") as f:
            f.write(text[:-1] + f', "chain": "{self.digest}"}}\n')
