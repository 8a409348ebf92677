"""
How things travel, and the proof that they arrived the same.

    ranks      who trains, who hosts an engine, and the process groups between them
    gradients  added over micro-batches ("leaves") in one fixed order, whatever the number of ranks
    weights    from the trainers to the engines, by broadcast into SGLang's own weight-update group
    rollouts   from the engines to the trainers, through a folder of safetensors files
    ledger     one line of hashes per step, each chained to the line before
"""

import hashlib
import json
import math
import os
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from ipaddress import ip_address
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

import kernels
from configurator import close_bars, error_line, free_keys, last_word, require
from kernels import tree_sum
from onecurve.cpu.host import lend_cores

FOREVER = timedelta(days=30)  # a collective may wait for a whole rollout; torchrun and the watchdogs end a dead run


class RunError(SystemExit):
    """
    The run cannot go on: one line that says what and where, and exit status 1. A SystemExit, so that Python prints
    that line instead of a traceback, and still ends the engine on its way out.
    """

    def __init__(self, message):
        close_bars()
        super().__init__(error_line(message))


def rank_is_lost(error):
    """Whether an error means that another rank has ended; if so, waits, so that rank can print its reason."""
    lost = isinstance(error, dist.DistError) or re.search("gloo|NCCL", str(error))
    if lost:
        time.sleep(5)
    return lost


def reason(error):
    """The first line of what an exception says, or its name where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# ------------------------------------------------------------------------------------------------------------------
# ranks


class Ranks(NamedTuple):
    """
    Trainers are ranks 0 .. trainers-1. The last ranks sample: each `tp` of them share an engine, which the first one
    hosts while the others only lend their GPUs. One rank may be trainer and engine.
    """

    rank: int
    world: int
    trainers: int
    engines: int
    mesh: dist.DeviceMesh | None  # over the trainers; None on a rank that does not train
    engine: int | None  # index of this rank's engine; None on a rank without one
    tp: int = 1  # GPUs of an engine
    store: dist.Store = None  # of this start, for all ranks
    control: dist.ProcessGroup | None = None  # gloo's, of the trainers: nothing of it runs on a GPU


@contextmanager
def hidden_torchrun():
    """
    Hides torchrun's variables from what starts inside: SGLang would take this rank's number for one of its own, and
    TORCHELASTIC_USE_AGENT_STORE makes a rendezvous at another address wait for ever.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "TORCHELASTIC_")
    hidden = {name: os.environ.pop(name) for name in [*os.environ] if name.startswith(names)}
    try:
        yield
    finally:
        os.environ.update(hidden)


def start_process_groups(trainers, engines, device, tp=1):
    """
    Joins torchrun's ranks (or makes a world of one) and splits them. gloo over all ranks for control, and a group of
    the trainers.
    """
    if device == "cuda":  # what SGLang sets in its own processes: the ends of a weight group must agree on it
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    store = dist.HashStore()
    rank = 0
    world = 1
    if "RANK" in os.environ:
        store, rank, world = next(dist.rendezvous("env://", timeout=FOREVER))
        _, interface = own_address(world)
        # left alone, gloo takes the address of the host's name, often 127.0.1.1, and NCCL any that others can reach
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if interface != "lo":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        store = dist.PrefixStore(name_start(store, rank, world), store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=FOREVER)
    mesh = control = None
    if trainers:  # a group is made by all ranks
        control = dist.new_group(range(trainers), backend="gloo", timeout=FOREVER)
        group = dist.new_group(range(trainers), backend="nccl", timeout=FOREVER) if device == "cuda" else control
        if rank < trainers:
            mesh = dist.DeviceMesh.from_group(group, device, mesh_dim_names=("trainers",))
    engine, other = divmod(rank - (world - engines * tp), tp)
    return Ranks(rank, world, trainers, engines, mesh, None if engine < 0 or other else engine, tp, store, control)


def listening_store(host):
    """A TCPStore that listens at this address alone, at a free port; torch's listens at all of them, without a key."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, timeout=FOREVER, master_listen_fd=listener.detach())


def own_address(world):
    """
    (this node's address on the interface that leads to torchrun's MASTER_ADDR, the interface's name). On the only node
    of a world no other machine has to reach it.
    """
    from psutil import net_if_addrs

    if int(os.environ.get("LOCAL_WORLD_SIZE", world)) == world:
        return "127.0.0.1", "lo"
    master = os.environ["MASTER_ADDR"]
    family, kind, _, _, there = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as s:
        s.connect(there)  # of a datagram: nothing is sent
        here = s.getsockname()[0]
    cure = "name one to torchrun: --local_addr=10.0.0.1 (with --rdzv_backend=c10d) or --master_addr=10.0.0.1"
    require(not ip_address(here).is_loopback, f"MASTER_ADDR={master!r}: no address for other nodes; {cure}")
    return here, next(name for name, every in net_if_addrs().items() for each in every if each.address == here)


def name_start(store, rank, world):
    """
    A name for this start of all ranks: starts share torchrun's store, and a rank must not find the addresses of the
    dead. torchrun counts a restart only on the node where a rank died; here all ranks learn the highest count.
    """
    count = "TORCHELASTIC_RESTART_COUNT"
    present = []
    mine = f"{uuid4().hex} {os.environ.get(count, '0')}"
    if rank == 0:
        store.set("start", mine)
        present = [mine, *(store.get(f"{mine}, rank {r}").decode() for r in range(1, world))]
        store.set(f"{mine}, all", "\n".join(present))
    while mine not in present:  # a rank 0 that is dead has named others
        start = store.get("start").decode()
        store.set(f"{start}, rank {rank}", mine)
        time.sleep(0.02)
        if store.check([f"{start}, all"]):
            present = store.get(f"{start}, all").decode().splitlines()
    os.environ[count] = str(max(int(each.split()[1]) for each in present))
    return present[0]


def meet(group=None):
    """
    Waits until all ranks (of the group) are here. By polling: a rank blocked inside a collective would not see its
    engine die.
    """
    work = dist.barrier(group, async_op=True)
    pause = 1e-5  # seconds; the others are often here already
    while not work.is_completed():
        time.sleep(pause)
        pause = min(2 * pause, 0.001)
    work.wait()


def from_all_ranks(x, group=None):
    """[each rank's x], on every rank. group: one that no other thread uses meanwhile; None: the default, of all."""
    everyone = [x] * dist.get_world_size(group)
    if len(everyone) > 1:  # alone, a collective would still take a millisecond
        meet(group)
        dist.all_gather_object(everyone, x, group=group)
    return everyone


# ------------------------------------------------------------------------------------------------------------------
# gradients: lane i of a row of leaves belongs to rank i % ranks, and is that rank's (i // ranks)-th. The low bits of i
# are added across ranks by the reduce-scatter, the high bits over a rank's own leaves by the counter: always the same
# binary tree, whose sums are then added row after row.


class TreeReduceScatter(DefaultReduceScatter):
    """
    FSDP2's reduce-scatter as an all-to-all and a pairwise sum in rank order. The backend's own adds in ring order,
    which depends on the number of ranks. Both send the same number of bytes. It adds even where `op` is FSDP's
    average: the loss has been divided already.
    """

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(tree_sum(received.view(group.size(), -1)))


class LeafSum:
    """
    Adds this rank's part of the gradients, micro-batch by micro-batch, in place. The `per_rank` leaves that a row has
    on this rank (a power of two) add as a binary counter adds ones: equal-sized subtrees merge. The sum of each row is
    added to the `total`. So beside the total there are at most log2(per_rank) gradients at a time, however large the
    batch is. With four lanes:

        leaf                   0     1     2     3
        one rank               LeafSum: (0 + 1) + (2 + 3)
        two ranks (leaf % 2)   reduce-scatter: 0 + 1, then 2 + 3; LeafSum adds the two
        total                  that row, then + the row of leaves 4 to 7, then + ..

    model: whose gradients `backward` adds.
    """

    def __init__(self, per_rank, model=None):
        self.per_rank = per_rank
        self.model = model
        self.waiting = 0  # leaves whose gradients autograd has added in the model's parameters
        self.subtrees = {}  # {leaves: [tensors]}; of whole rows the sum

    def backward(self, loss):
        """
        Adds the gradients of a leaf's loss. Autograd adds the second leaf of each pair in place, and on a rank with one
        leaf per row every leaf: so a leaf's gradients need no extra memory. But in bfloat16 it would round such sums.
        """
        loss.backward()  # FSDP2 adds the ranks' gradients here, by TreeReduceScatter
        self.waiting += 1
        if self.waiting == 2 <= self.per_rank or self.model.dtype != torch.float32:
            self._take()

    @torch.no_grad()  # else `to_local` is a node of a graph: as slow as the sum
    def _take(self):
        # A parameter that took no part has no gradient, such as the critic's in supervised steps.
        learned = (p for p in self.model.parameters() if p.requires_grad)
        grads = [local(torch.zeros_like(p) if p.grad is None else p.grad) for p in learned]
        self.add(grads, min(self.waiting, self.per_rank))
        self.model.zero_grad()  # or the next leaf's would be added to them
        self.waiting = 0

    def add(self, grads, leaves=1):
        """Adds the tensors [(rows here, ..)] of this number of leaves, and keeps and overwrites float32 ones."""
        while left := self.subtrees.pop(leaves, None):
            for i in range(0, len(left), 32):  # some at a time: all in float32 would be a gradient more
                torch._foreach_add_(left[i : i + 32], as_float32(grads[i : i + 32]))
            grads = left
            leaves = min(2 * leaves, self.per_rank)
        self.subtrees[leaves] = as_float32(grads)

    def total(self):
        """The tensors' sum over all leaves; None without any."""
        if self.waiting:
            self._take()
        return self.subtrees.get(self.per_rank)


def as_float32(tensors):
    """These, or copies in float32 of others, which a card makes in one launch."""
    if tensors[0].dtype == torch.float32:
        return tensors
    copies = [torch.empty_like(x, dtype=torch.float32) for x in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


class Shard(NamedTuple):
    """This rank's rows of one parameter, or some of their columns."""

    name: str
    shape: tuple  # of the whole parameter
    first: int  # first row of the whole that is here
    data: torch.Tensor  # rows here, maybe none
    column: int = 0  # first column of the whole that is here


def local(x):
    """This rank's part of a parameter or its gradient: FSDP2's are DTensors."""
    return x.to_local() if isinstance(x, dist.tensor.DTensor) else x


def shards(model, mesh):
    """FSDP2 gives rank r the r-th chunk of ceil(rows / ranks) rows (torch.chunk). Plain views of the parameters."""
    rank = mesh.get_local_rank()
    return [
        Shard(
            name,
            shape=tuple(p.shape),
            first=-(-p.shape[0] // mesh.size()) * rank,
            data=local(p).detach(),
        )
        for name, p in model.named_parameters()
    ]


def whole(shard, mesh):
    """The whole tensor, on every rank, from each rank's rows. Collective over the trainers."""
    if mesh.size() == 1:  # a DTensor would come to the same, more slowly
        return shard.data
    stride = torch.empty(shard.shape, device="meta").stride()
    rows = [dist.tensor.Shard(0)]
    return dist.tensor.DTensor.from_local(shard.data, mesh, rows, shape=shard.shape, stride=stride).full_tensor()


def grad_norm(grads, shards, group):
    """
    l2 norm over all ranks, a number: squares are added along each row, then the rows of all parameters
    pairwise in order (adding zeros puts each in its place). So it is the same number on any number of ranks.
    """
    sizes = [s.shape[0] for s in shards]
    rows = torch.zeros(sum(sizes), dtype=torch.float64, device=grads[0].device)
    for part, g, s in zip(rows.split(sizes), grads, shards):
        part = part[s.first : s.first + len(g)]
        some = max(1, (1 << 26) // math.prod(s.shape[1:]))  # rows at a time: as float64 all would take twice their room
        for out, x in zip(part.split(some), g[:, None].flatten(1).split(some)):  # (rows, columns), maybe no rows
            kernels.row_sums(x, out, True)
    dist.all_reduce(rows, group=group)
    return math.sqrt(tree_sum(rows))


# ------------------------------------------------------------------------------------------------------------------
# weights


def buckets(shapes, dtype, max_bytes=1 << 30):
    """Cuts [(name, shape, ..)] into lists of at most `max_bytes` each (a larger tensor is a bucket by itself)."""
    out = []
    room = 0
    for each in shapes:
        size = math.prod(each[1]) * dtype.itemsize
        if size > room:
            out.append([])
            room = max_bytes
        room -= size
        out[-1].append(each)
    return out


def rounded_to(x, bits):
    """
    x (.., C) float32 rounded to the weights of an engine of these bits. bf16, fp16: to the nearest. fp8 (e4m3), int8:
    each row has its own scale, its largest number over the type's; vectors, such as norms, are then bf16.
    """
    bits = bits.removesuffix(":act")
    if bits == "fp32":
        return x
    if bits == "fp16" or bits == "bf16" or x.dim() < 2:
        return x.to(torch.float16 if bits == "fp16" else torch.bfloat16).to(x.dtype)
    largest = 448 if bits == "fp8" else 127
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / largest
    y = x / scale
    return scale * (y.to(torch.float8_e4m3fn).to(x.dtype) if bits == "fp8" else y.round())


class WeightSync:
    """
    Sends the trainers' weights to every engine, and compares a hash of each parameter that the engine then holds with
    the trainers'. Collective over all ranks; without a trainer `shards` is (), without an engine `engine` is None.

    broadcast   each trainer sends its rows to all engines' workers, in its own group with them: so no trainer waits
                for another, and no card holds more than its rows (onecurve/sglang/patches.py)
    ipc         a rank that has both hands its engine the memory itself (CUDA's handles; shared memory on a CPU)

    how: one of these; '' is ipc where every rank has a GPU, a trainer and an engine, else broadcast. dtype: of what is
    sent; bits: see `rounded_to`. overlap: on a rank without an engine a thread sends, as soon as the engines are ready,
    and the rank continues.
    """

    def __init__(self, how, ranks, shards, engine, device, dtype, overlap=False, bits="fp32"):
        self.ranks = ranks
        self.engine = engine
        self.device = device
        self.dtype = dtype
        self.bits = bits
        both = ranks.trainers == ranks.engines == ranks.world
        how = how or ("ipc" if device == "cuda" and both else "broadcast")
        if ranks.rank == 0:
            print(f"weights travel by {how}", flush=True)
        self.cast_rounds = shards and (shards[0].data.dtype != dtype or bits != "fp32")
        self.send = self._ipc if how == "ipc" else self._broadcast
        shapes = from_all_ranks([(s.name, s.shape) for s in shards])[0]
        self.plan = buckets(shapes, dtype)
        self.groups = [f"weights {r}" for r in range(ranks.trainers)] if how == "broadcast" else []
        self.group = self._join() if self.groups else None
        self.deliveries = SimpleQueue() if overlap and not engine else None  # what the thread is to send
        if self.deliveries:
            stream = torch.cuda.Stream() if shards and device == "cuda" else None  # and with it this rank's card
            self.thread = threading.Thread(target=self._send_on, args=[stream], daemon=True)
            self.thread.start()

    def _at_both_ends(self, ours, theirs, *args):
        """ours() in a trainer, and the engine's method `theirs` for each group: a rank may have to do both at once."""
        with ThreadPoolExecutor(1) as thread:
            entering = thread.submit(ours) if self.ranks.mesh is not None else None
            try:
                for name in self.groups if self.engine else ():
                    getattr(self.engine, theirs)(name, *args)
            except RunError as e:  # ours() waits for the engine, and Python's end would wait for ours()
                self.engine.end(str(e).removeprefix("error: "))
            return entering and entering.result()

    def _join(self):
        """This trainer's group with all engines' workers, of which it is rank 0; None on a rank without a trainer."""
        meeting = None
        if self.ranks.rank == 0:
            host, _ = own_address(self.ranks.world)
            self.store = listening_store(host)
            meeting = host, self.store.port
        host, port = from_all_ranks(meeting)[0]
        backend = "nccl" if self.device == "cuda" else "gloo"
        first = 1 + (self.ranks.engine or 0) * self.ranks.tp
        size = 1 + self.ranks.engines * self.ranks.tp

        def enter():
            from sglang.srt.utils import init_custom_process_group

            name = self.groups[self.ranks.rank]
            store = dist.PrefixStore(name, dist.TCPStore(host, port, timeout=FOREVER))
            return init_custom_process_group(
                backend, store=store, world_size=size, rank=0, group_name=name, timeout=FOREVER
            )

        return self._at_both_ends(enter, "join_weight_group", host, port, first, size, backend)

    def publish(self, version, hashes, shards):
        """
        Gives every engine the weights in `shards` as `version`. Returns when the engines hold them; where a thread
        sends, it returns at once, and the shards must not change. Raises RunError if an engine does not get them.
        hashes: {name: hash} of the weights as trained, or {}; they are those of what is sent unless a cast rounds.
        """
        if shards and (self.cast_rounds or shards[0].name not in hashes):
            hashes = {}
            rest = iter(shards)
            for bucket in self.plan:  # one after the other: together they may not fit
                sent = [*map(self._as_sent, islice(rest, len(bucket)))]
                hashes |= tensor_hashes([s.data for s in sent], sent, self.ranks.mesh.get_group())
        expected = {s.name: hashes[s.name] for s in shards}
        if self.deliveries:
            if shards and self.device == "cuda":
                torch.cuda.current_stream().synchronize()  # the thread has a stream of its own
            self.deliveries.put((version, shards, expected))
        else:
            self._deliver(version, shards, expected)

    def _as_sent(self, shard):
        return Shard(*shard[:3], rounded_to(shard.data.to(self.device), self.bits).to(self.dtype))

    def _deliver(self, version, shards, expected):
        if self.engine:  # else this may be the thread that sends
            lend_cores(True)
        meet()
        if self.engine:
            lend_cores(False)
        rest = iter(shards)
        for bucket in self.plan:
            sent = map(self._as_sent, islice(rest, len(bucket)))
            self.send(bucket, sent, version, bucket is self.plan[-1])
        expected = from_all_ranks(expected)[0]
        if self.engine:
            self.engine.check_weights(expected)

    def _send_on(self, stream):
        """The sending thread. Its errors end this process, and so the run."""
        try:
            with torch.cuda.stream(stream):
                while delivery := self.deliveries.get():
                    self._deliver(*delivery)
                    del delivery  # or a version that nobody needs would stay until the next one comes
        except BaseException as e:
            rank_is_lost(e)
            line = e if isinstance(e, RunError) else error_line(f"sending weights: {reason(e)}")
            last_word(line)
            os._exit(1)

    def finish(self):
        """Returns when all is sent."""
        if self.deliveries:
            self.deliveries.put(None)
            self.thread.join()

    def close(self):
        """Leaves the groups, at both ends at once: NCCL waits for all members. Collective."""
        if self.groups:
            self._at_both_ends(lambda: dist.destroy_process_group(self.group), "leave_weight_group")

    def _broadcast(self, bucket, shards, version, last):
        """Sends this trainer's rows, in one piece, in its group with all engines, where it is rank 0 (`src=0`)."""
        sending = None
        if self.group:
            piece = torch.cat([s.data.flatten() for s in shards])
            sending = dist.broadcast(piece.view(torch.uint8), src=0, group=self.group, async_op=True)
        if self.engine:
            self.engine.receive_weights(bucket, self.dtype, version, last)
        if sending:
            sending.wait()
        if self.device == "cuda":  # `wait` was the stream's: nothing of this bucket may be freed or changed before
            torch.cuda.current_stream().synchronize()

    def _ipc(self, bucket, shards, version, last):
        self.engine.take_weights([(s.name, whole(s, self.ranks.mesh)) for s in shards], version, last)


# ------------------------------------------------------------------------------------------------------------------
# rollouts: queue/rl_000012/group_0003.safetensors, written once and whole. Engines announce over torchrun's store which
# of them makes which file, and when all are written. So no node looks for a file too early: a network file system might
# then report it as missing for another minute.


def fsync(path):
    """Returns when a file or folder is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def write_atomic(path, data):
    """Bytes appear under `path` whole or not at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    fsync(temporary)
    temporary.replace(path)


def checksum(meta, tensors={}):
    """The checksum of a record, and of the tensors beside it."""
    h = hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
    for name, t in sorted(tensors.items()):
        h.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        h.update(t.numpy())
    return h.hexdigest()


def group_path(folder, index):
    return folder / f"group_{index:04d}.safetensors"


class Group(NamedTuple):
    """
    One prompt's G scored samples, as a group file has them. A row is a dialogue with its model; without an agent each
    sample is one row of one turn.

    tensors, all on the CPU: prompt_tokens; of each row: lengths (tokens), sample (0 .. G-1), turns (their number),
    truncated; of each token, the rows end to end: tokens, logprobs, loss_mask, weight_version, turn (its index in the
    row; -1: the model did not write it); of each turn: turn_rewards; of each sample: rewards, without an agent seeds.
    meta: the prompt and the responses as text, who made them and when: str, int and list values.
    """

    tensors: dict
    meta: dict

    def rows(self, *names):
        """For each row the tensors of its tokens under these names."""
        lengths = self.tensors["lengths"].tolist()
        return zip(*(self.tensors[name].split(lengths) for name in names))

    def response_lengths(self):
        """(G,) tokens that the model wrote in each sample."""
        of = self.tensors["sample"].repeat_interleave(self.tensors["lengths"])
        return torch.bincount(of[self.tensors["loss_mask"]], minlength=len(self.tensors["rewards"]))

    def fits(self, vocabulary):
        """Whether the tokens are of the vocabulary, and the tensors fit together; where they do not, it may raise."""
        t = self.tensors
        list(self.rows("tokens", "logprobs", "loss_mask", "weight_version", "turn"))
        by_row = {len(t[name]) for name in ("lengths", "sample", "turns", "truncated")}
        torch.nn.functional.one_hot(t["sample"], len(t["rewards"]))
        ids = torch.cat([t["prompt_tokens"], t["tokens"]])
        whole = ids.dtype == t["lengths"].dtype == torch.int64
        return whole and len(by_row) == 1 and 0 <= ids.min() <= ids.max() < vocabulary


def write_group(path, tensors, meta):
    """Writes the file of a Group, under one checksum."""
    arrays = {name: t.numpy() for name, t in tensors.items()}  # three times as fast as tensors
    write_atomic(path, save(arrays, {"meta": json.dumps(meta), "sha256": checksum(meta, tensors)}))


def read_group(path, vocabulary=0, **expected):
    """
    The Group of a file. Raises RunError for a torn or altered file, and where meta differs from `expected` (run, step,
    prompt, version): a file of another run must not be trained on. vocabulary: its size; with it, raises also where
    the tensors do not fit together, as an operator would read outside of them.
    """
    try:
        with safe_open(path, "np") as f:  # three times as fast as "pt"
            header = f.metadata()
            meta = json.loads(header["meta"])
            group = Group({name: torch.from_numpy(f.get_tensor(name)) for name in f.keys()}, meta)
        if header["sha256"] != checksum(meta, group.tensors):
            raise ValueError("its checksum is wrong")
        if vocabulary and not group.fits(vocabulary):
            raise ValueError("lengths or tokens that cannot be this model's")
    except (SafetensorError, ValueError, OSError, LookupError, TypeError, RuntimeError) as e:  # also of deep JSON
        raise RunError(f"{path}: torn or not a rollout file ({reason(e)}); delete it to have it made again")
    check_fields(path, meta, expected)
    return group


def check_fields(path, found, expected):
    """Raises RunError where the record of a file differs from `expected`."""
    for key, value in expected.items():
        if found.get(key) != value:
            raise RunError(f"{path}: has {key} {found.get(key)!r}, expected {value!r}: not a file of this run and step")


def appears(path, seconds):
    """Whether a file that another node may have written can be seen here within `seconds`."""
    end = time.monotonic() + seconds
    while not (there := path.exists()) and time.monotonic() < end:
        time.sleep(0.01)
        list(path.parent.glob("*"))  # makes a network file system look again
    return there


class Queue(NamedTuple):
    """The groups of a run: engines write them, all ranks read them."""

    folder: Path
    run: str  # the run's id
    timeout: float = 0  # seconds without a heartbeat after which the run ends
    heartbeats: tuple = ()  # a path for each engine, which it touches while it lives
    store: dist.Store = None  # where the engines' ranks announce their work
    vocabulary: int = 0  # as for `read_group`

    def _folder(self, job):
        return self.folder / f"{job.stream}_{job.step:06d}"

    def _key(self, job):
        """The job's name in the store; a step may have several."""
        return f"{self._folder(job).name} from {next(iter(job.rows))}"

    def open(self, job):
        """The folder for a job's files, which it makes."""
        folder = self._folder(job)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def share(self, job):
        """This engine's share of a job's prompts: each goes to the next free engine. It changes who, not what."""
        prompts = list(job.rows)
        while (n := self.store.add(self._key(job), 1)) <= len(prompts):
            yield prompts[n - 1]

    def done(self, job, engine):
        """Reports that this engine's share of a job is written."""
        self.store.set(f"{self._key(job)} engine {engine}", "done")

    def take(self, job):
        """The job's Groups in prompt order, when all exist."""
        folder = self._folder(job)
        self._wait(folder, [f"{self._key(job)} engine {i}" for i in range(len(self.heartbeats))])
        expected = dict(run=self.run, stream=job.stream, step=job.step, version=job.version)
        groups = []
        for i in job.rows:
            path = group_path(folder, i)
            if not appears(path, 60 if self.heartbeats else 0):
                cure = "use an out_dir that all nodes share" if self.heartbeats else "a replay needs fewer max_steps"
                raise RunError(f"{path}: not found on {socket.gethostname()}; {cure}")
            group = read_group(path, self.vocabulary, prompt=i, **expected)
            found = len(group.tensors["rewards"])
            if found != job.samples:
                raise RunError(f"{path}: has {found} samples of a prompt, expected {job.samples}; delete {folder}")
            groups.append(group)
        return groups

    def _wait(self, folder, keys):
        """Returns when all engines have reported their shares as written."""
        since = time.monotonic()
        before = None
        lend_cores(True)
        while keys and not self.store.check(keys):
            waited = time.monotonic() - since
            latest = max((path.stat().st_mtime_ns for path in self.heartbeats if path.exists()), default=0)
            if latest != before:
                since = time.monotonic()
                before = latest
            elif waited > self.timeout:
                raise RunError(f"{folder}: no rollout came for {self.timeout:.0f} s; see the engine logs")
            time.sleep(0.002 + min(0.02, waited / 100))
        lend_cores(False)


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
    factor loses no bit, so any single changed element changes it. group: None for tensors that are whole.
    """
    numbers = []
    for t, s in zip(tensors, shards):
        rows = t[:, None].flatten(1).contiguous().view({2: torch.int16, 4: torch.int32}[t.itemsize])
        of_rows = _odd(s.first + (1 << 40), len(t), t.device)
        numbers.append((rows, of_rows, _odd(s.column, rows.shape[1], t.device)))
    sums = kernels.bit_sums(numbers)
    if group:
        dist.all_reduce(sums, group=group)
    return {s.name: f"{h & 0xFFFFFFFFFFFFFFFF:016x}" for s, h in zip(shards, sums.tolist())}


def content_hash(*parts):
    """16 hex digits over tensors and plain values, in order."""
    h = hashlib.sha256()
    for part in parts:
        if torch.is_tensor(part):
            h.update(part.contiguous().numpy())
        else:
            h.update(json.dumps(part).encode())
        h.update(b"\0")
    return h.hexdigest()[:16]


def run_id(config):
    """The hash of the keys that say what is computed: a file made under other values is not this run's."""
    return content_hash({key: value for key, value in config.items() if key not in free_keys(config)})


FIRST_STEP = "onecurve 1"  # its hash is the first link of a chain: a format's name and version
FIRST_EVALUATION = "onecurve evaluations 1"


def cut_back(path, size):
    """Leaves the first `size` bytes of a log, which then exists. Raises RunError if it has fewer."""
    path.touch()
    if path.stat().st_size < size:
        raise RunError(f"{path}: shorter than its run's checkpoint says; was it deleted or edited?")
    os.truncate(path, size)


class Ledger:
    """
    ledger.jsonl: per step a hash of each stage (prompts, tokens, logprobs, rewards, advantages, gradients, weights,
    optimizer) and `chain`, a SHA-256 over the line and the chain before it. Two runs with the same last link did the
    same; the first differing line and stage say where two runs parted. `digest` is the last link.

    size: bytes of an existing file to continue from. Later lines, of a killed run, are cut off and compared with the
    new ones. first: one of the two above. Raises RunError if the chain is broken, and, if `strict`, where the
    comparison fails.
    """

    def __init__(self, path, size=0, strict=True, first=FIRST_STEP):
        self.path = path
        self.strict = strict
        self.digest = hashlib.sha256(first.encode()).hexdigest()
        path.touch()
        text = path.read_bytes().decode("latin-1")  # a character for each byte, even where the file is damaged
        for i, line in enumerate(text[:size].splitlines(True)):
            if line != self._chained(line.rpartition(', "chain"')[0] + "}"):
                raise RunError(f"{path}: line {i + 1} is altered or torn: its chain does not fit")
        self.before = iter(text[size:].splitlines(True))
        cut_back(path, size)

    def _chained(self, text):
        """A line with its link, which becomes the last one."""
        self.digest = hashlib.sha256((self.digest + text).encode()).hexdigest()
        return text[:-1] + f', "chain": "{self.digest}"}}\n'

    def append(self, **line):
        text = self._chained(json.dumps(line))
        old = next(self.before, "")
        if self.strict and old.endswith("\n") and old != text:
            problem = f"{line['phase']} step {line['step']} came out otherwise than before the interruption"
            raise RunError(f"{self.path}: {problem}; was the code changed? --strict=False goes on all the same")
        with open(self.path, "a") as f:
            f.write(text)
