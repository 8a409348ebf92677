"""
How things travel, and the proof that they arrived the same.

    ranks        who trains, who hosts an engine, and the process groups between them
    gradients    added over micro-batches ("leaves") in one fixed order, whatever the number of ranks
    weights      from the trainers to the engines, by broadcast into SGLang's own weight-update group
    rollouts     from the engines to the trainers, through a folder of safetensors files
    run folder   opened by one process, with the logs that grow line by line
    checkpoints  folders that appear whole or not at all, in Hugging Face's format, for any number of trainers
    ledger       one line of hashes per step, each chained to the line before
"""

import atexit
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from ipaddress import ip_address
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean
from typing import NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from safetensors.torch import save_file
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from tqdm import tqdm

import kernels
from configurator import (
    FREE_KEYS,
    HEALTHY,
    ORIGINS,
    close_bars,
    config_source,
    error_line,
    fail,
    provenance,
    require,
    roles,
)
from kernels import tree_sum
from onecurve.cpu import host
from onecurve.models.moe import per_expert

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
    """Whether what an exception or a library says comes from another rank's end; that one gets time to say why."""
    lost = isinstance(error, dist.DistError) or re.search("gloo|NCCL", str(error))
    if lost:
        time.sleep(5)
    return lost


def report_error(kind, error, trace, kept="nothing written is lost", cure="go on with --init_from=resume"):
    """A sys.excepthook: Ctrl-C, a lost rank and what a file system refuses are one line, all else is a traceback."""
    close_bars()
    if kind is KeyboardInterrupt:
        line = "interrupted"
    elif isinstance(error, RuntimeError) and rank_is_lost(error):  # such is a dist.DistError
        gone = "torchrun's store is gone, with the node that had it"
        line = gone if isinstance(error, dist.DistNetworkError) else "another rank is lost"
    elif errno.errorcode.get(getattr(error, "errno", None)) in "ENOSPC EDQUOT EROFS EACCES EPERM EFBIG EIO".split():
        line = f"{error.filename or 'writing to out_dir'}: {error.strerror}"
        cure = f"when that is mended, {cure}"
    else:
        return sys.__excepthook__(kind, error, trace)
    print(error_line(f"{line}; {kept}; {cure}"), file=sys.stderr, flush=True)


def end_with_a_line(rank):
    """
    Has a SIGTERM end this process as it does by itself, but with a line of the first rank's; and has torchrun's folder
    in /tmp, if nothing is in it, gone when the process ends.
    """
    owner = os.getpid()
    stderr = os.dup(2)  # which may lead to an engine's log when the signal comes
    error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "."))  # of an attempt of this run, for this rank

    def clean():
        folders = error_file.parents[:4]
        if os.getpid() == owner and folders and folders[-1].name.startswith("torchelastic_"):
            with suppress(OSError):  # other ranks are there still
                for folder in folders:
                    folder.rmdir()

    def ended(number, _):
        if os.getpid() == owner and rank == 0:
            line = "ended by SIGTERM; nothing written is lost; go on with --init_from=resume"
            os.write(stderr, f"\nerror: {line}\n".encode())  # maybe behind a bar
        clean()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    atexit.register(clean)
    signal.signal(signal.SIGTERM, ended)


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


def take_gpu(config, world, gpu):
    """Makes GPU number `gpu` this rank's; returns its name. Ends the run with one line if it is none we can use."""
    trainers, engines = roles(config, world)
    lends = trainers == engines == world
    if int(os.environ.get("RANK", 0)) < trainers < world:
        # In such segments one of FSDP2's streams can use what another has freed. Memory that an engine shares with its
        # trainer cannot be of this kind.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    for key in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):  # torch has a new name, SGLang looks at the old one
        value = os.environ.get(key, "")
        why = "a card that trains and samples cannot lend such memory; take expandable_segments:True out of it"
        require(not (lends and "expandable_segments:True" in value), f"{key}={value!r}: {why}")
    require(torch.cuda.is_available(), f"device='cuda': {why_no_card()}")
    count = torch.cuda.device_count()
    require(gpu < count, f"device='cuda': {count} CUDA devices for more ranks; lower --nproc_per_node")
    chip = torch.cuda.get_device_capability(gpu)
    cure = f"kernels.py is for {kernels.CAPABILITIES}; use --device=cpu"
    require(chip in kernels.CARDS, f"device='cuda': compute capability {chip[0]}.{chip[1]}; {cure}")
    apart = config["weight_sync"] != "broadcast" or not lends
    require(apart, "weight_sync='broadcast': NCCL refuses both ends on one GPU; use ipc")
    check_compilers()
    torch.cuda.set_device(gpu)
    return torch.cuda.get_device_name()


def least_memory(parameters, learned, config, world, reward=0, place="cuda"):
    """
    {what a card is for: bytes that it needs at the very least}, for a model of so many parameters of which so many are
    learned; on place='cpu' {'run': bytes that all ranks need together}. reward: bytes of reward models, which an
    engine's rank has. Training: weights, AdamW's moments, and the gradients of a row of leaves, of which two are added
    in one. Sampling: the engine gets a share of what the rest leaves of a card; on a CPU it has its weights twice, as
    sent and as its loops read them, and only the second sleep.
    """
    trainers, engines = roles(config, world)
    compute = 4 if place == "cpu" else 2  # bytes of a number in the compute dtype
    weights = compute * parameters / config["rollout_tp"]
    reward *= engines > 0
    needs = {}
    held = 0
    if trainers:
        frozen = compute * parameters * (learned < parameters)
        held = (frozen + 3 * 4 * learned) / trainers
        gradients = max(1, math.log2(config["lanes"] / trainers))
        needs["train"] = held + 4 * learned / trainers * gradients + reward * (trainers == world)
    if engines:
        needs["sample"] = held * (trainers == world) + reward + weights / config["engine_memory"]
    if place == "cpu":
        weights *= config["rollout_tp"] * engines
        trains = trainers * needs.get("train", 0)
        most = max(trains, trainers * held + weights) if trainers == world else trains + weights
        return dict(run=most + weights + engines * reward * (trainers < world))
    return needs


def machine_memory():
    """Bytes of memory that this machine, or this container, has."""
    limit = Path("/sys/fs/cgroup/memory.max")
    bound = limit.read_text().strip() if limit.is_file() else "max"
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return has if bound == "max" else min(has, int(bound))


DRIVER = Path("/proc/driver/nvidia/version")
LEAST_DRIVER = 580  # of CUDA 13, for which torch is built
TOOLKIT = Path("/usr/local/cuda")


def why_no_card():
    """What to do where torch finds no CUDA device. It says no more than that, to a driver that is too old as well."""
    version = re.search(r"Module.*?\s((\d{3,})[.\d]*)", DRIVER.read_text()) if DRIVER.is_file() else None
    if not version:
        return "this machine has no CUDA device; use --device=cpu"
    if int(version[2]) < LEAST_DRIVER:
        return f"NVIDIA's driver is {version[1]}, torch {torch.__version__} wants {LEAST_DRIVER}; install that"
    return "a driver is there, and no device; is this a container without --gpus=all, or CUDA_VISIBLE_DEVICES empty?"


def check_compilers():
    """Ends the run with one line unless Triton can build its launchers, and SGLang finds a CUDA toolkit."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    require(compiler, "device='cuda': Triton builds its launchers with a C compiler, and there is none; install gcc")
    # env fails where there is no such compiler, like a compiler where there are no headers
    command = ["env", compiler, "-fsyntax-only", "-xc", f"-I{sysconfig.get_paths()['include']}", "-"]
    done = subprocess.run(command, input="#include <Python.h>\n", capture_output=True, text=True)
    cure = f"install Python's headers (python3-dev), or set CC, now {compiler!r}"
    require(not done.returncode, f"device='cuda': Triton cannot build its launchers: {reason(done.stderr)}; {cure}")
    # Without a toolkit deep_gemm, which SGLang imports on a Hopper, ends in an assertion.
    if not (os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or shutil.which("nvcc") or TOOLKIT.exists()):
        wheel = Path(torch.__file__).parents[1] / f"nvidia/cu{torch.version.cuda.partition('.')[0]}"
        cure = "install one and set CUDA_HOME, or the wheel nvidia-cuda-nvcc"
        require((wheel / "bin/nvcc").is_file(), f"CUDA_HOME='': no CUDA toolkit is found; {cure}")
        os.environ["CUDA_HOME"] = str(wheel)


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


def listening_store(host, port=0):
    """A TCPStore that listens at this address alone; torch's listens at all of them, without a key. 0: a free port."""
    listener = socket.create_server((host, port))
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


# ------------------------------------------------------------------------------------------------------------------
# gradients: lane i of a row of leaves belongs to rank i % ranks, and is that rank's (i // ranks)-th. The low bits of i
# are added across ranks by the reduce-scatter, the high bits over a rank's own leaves by the counter: always the same
# binary tree, whose sums are then added row after row.


class TreeReduceScatter(DefaultReduceScatter):
    """
    FSDP2's reduce-scatter as an all-to-all and a pairwise sum in rank order. The backend's own adds in ring order,
    which depends on the number of ranks. Sends as many bytes. It adds even where `op` asks for FSDP's average: the
    loss has been divided already.
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
        Adds the gradients of a leaf's loss. Autograd adds the second leaf of each pair in place, and every leaf of a
        rank that has one in each row: so the gradients of a leaf take no room of their own.
        """
        loss.backward()  # FSDP2 adds the ranks' gradients here, by TreeReduceScatter
        self.waiting += 1
        if self.waiting == 2 <= self.per_rank:
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
        """Adds the tensors [(rows here, ..)] of so many leaves, and keeps and overwrites them."""
        while left := self.subtrees.pop(leaves, None):
            torch._foreach_add_(left, grads)
            grads = left
            leaves = min(2 * leaves, self.per_rank)
        self.subtrees[leaves] = grads

    def total(self):
        """The tensors' sum over all leaves; None without any."""
        if self.waiting:
            self._take()
        return self.subtrees.get(self.per_rank)


class Shard(NamedTuple):
    """This rank's rows of one parameter, or some of their columns."""

    name: str
    shape: tuple  # of the whole parameter
    first: int  # first row of the whole that is here
    data: torch.Tensor  # rows here, maybe none
    column: int = 0  # first column of the whole that is here


def local(x):
    """What this rank has of a parameter or its gradient: FSDP2's are DTensors."""
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
    """The whole tensor, on every rank, of the rows that each has. Collective over the trainers."""
    if mesh.size() == 1:  # a DTensor would come to the same, more slowly
        return shard.data
    stride = torch.empty(shard.shape, device="meta").stride()
    rows = [dist.tensor.Shard(0)]
    return dist.tensor.DTensor.from_local(shard.data, mesh, rows, shape=shard.shape, stride=stride).full_tensor()


def grad_norm(grads, shards, group):
    """
    l2 norm over all ranks (a float64 scalar): squares are added along each row, and the rows of all parameters, put
    in their places by adding zeros, pairwise in order. So it is the same number on any number of ranks.
    """
    sizes = [s.shape[0] for s in shards]
    rows = torch.zeros(sum(sizes), dtype=torch.float64, device=grads[0].device)
    for part, g, s in zip(rows.split(sizes), grads, shards):
        part = part[s.first : s.first + len(g)]
        some = max(1, (1 << 26) // math.prod(s.shape[1:]))  # rows at a time: as float64 all would take twice their room
        for out, x in zip(part.split(some), g[:, None].flatten(1).split(some)):  # (rows, columns), maybe no rows
            out.copy_(kernels.row_sums(x.double().square_()))
    dist.all_reduce(rows, group=group)
    return tree_sum(rows).sqrt()


def share_cores():
    """
    The path of a byte for each rank of this machine, in which it says whether it works (`lend_cores`). Collective over
    all ranks.
    """
    fd = os.memfd_create("working")  # there as long as this process
    os.ftruncate(fd, int(os.environ["LOCAL_WORLD_SIZE"]))
    node = os.environ.get("GROUP_RANK")
    everyone = from_all_ranks((node, f"/proc/{os.getpid()}/fd/{fd}"))
    return dict(reversed(everyone))[node]  # its first rank's


def lend_cores(waits):
    """Says that this rank waits, and the others of its machine have its cores; or that it works again."""
    if host.working:
        host.working[int(os.environ["LOCAL_RANK"])] = not waits


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
    if len(everyone) > 1:  # to ask nobody takes a millisecond
        meet(group)
        dist.all_gather_object(everyone, x, group=group)
    return everyone


def rounded_to(x, bits):
    """
    x (.., C) float32 rounded as an engine of these bits would have it. bf16, fp16: to the nearest. fp8 (e4m3), int8:
    each row by a scale of its own, its largest number over the type's; vectors, such as norms, then are bf16.
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

    broadcast   each trainer sends its rows to all engines' workers, in a group of its own with them: so nobody waits
                for another trainer, and no card holds more than its rows (rollout_server.receive_rows)
    ipc         a rank that has both hands its engine the memory itself (CUDA's handles; shared memory on a CPU)

    how: one of these; '' is ipc where every rank has a GPU, a trainer and an engine, else broadcast. dtype: of what is
    sent; bits: see `rounded_to`. overlap: on a rank without an engine a thread sends, as soon as the engines are ready,
    and the rank goes on.
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
            for name in self.groups if self.engine else ():
                getattr(self.engine, theirs)(name, *args)
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
            # one after the other: together they may not fit
            hashes = tensor_hashes((self._as_sent(s).data for s in shards), shards, self.ranks.mesh.get_group())
        expected = {s.name: hashes[s.name] for s in shards}
        if self.deliveries:
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
        """The thread that sends. An error of its own ends this process, and so the run."""
        try:
            with torch.cuda.stream(stream):
                while delivery := self.deliveries.get():
                    self._deliver(*delivery)
                    del delivery  # or a version that nobody needs would stay until the next one comes
        except BaseException as e:
            rank_is_lost(e)
            line = e if isinstance(e, RunError) else error_line(f"sending weights: {reason(e)}")
            print(line, file=sys.stderr, flush=True)
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
        """Sends this trainer's rows, in one piece, first in a group that it has with all engines: `src=0` is itself."""
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
# rollouts: queue/rl_000012/group_0003.safetensors, written once and whole. Engines say over torchrun's store which of
# them makes which file, and when all are written. So no node asks for a file too early: a network file system might
# then go on for a minute to say that it does not exist.


def _sync(path):
    """Returns when a file or folder is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def write_atomic(path, data):
    """Bytes appear under `path` whole or not at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    _sync(temporary)
    temporary.replace(path)


def _digest(meta, tensors={}):
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

    tensors, all on the CPU: prompt_tokens; of each row: lengths (tokens), sample (0 .. G-1), turns (how many),
    truncated; of each token, the rows end to end: tokens, logprobs, loss_mask, weight_version, turn (its index in the
    row; -1: the model did not write it); of each turn: turn_rewards; of each sample: rewards, without an agent seeds.
    meta: what was asked and said in words, by whom and when: str, int and list values.
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
    write_atomic(path, save(arrays, {"meta": json.dumps(meta), "sha256": _digest(meta, tensors)}))


def read_group(path, vocabulary=0, **expected):
    """
    The Group of a file. Raises RunError for a torn or altered file, and where meta differs from `expected` (run, step,
    prompt, version): a file of another run must not be trained on. vocabulary: number of tokens that there are; then
    also where the tensors do not fit together, as an operator would read beside them.
    """
    try:
        with safe_open(path, "np") as f:  # three times as fast as "pt"
            header = f.metadata()
            meta = json.loads(header["meta"])
            group = Group({name: torch.from_numpy(f.get_tensor(name)) for name in f.keys()}, meta)
        if header["sha256"] != _digest(meta, group.tensors):
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
    """Whether a file that another node may have written can be seen here within so many seconds."""
    end = time.monotonic() + seconds
    while not (there := path.exists()) and time.monotonic() < end:
        time.sleep(0.01)
        list(path.parent.glob("*"))  # makes a network file system look again
    return there


class Queue(NamedTuple):
    """The groups of a run. Each rank has its own engine sample, and reads what all engines have made."""

    folder: Path
    sampler: object  # of this rank's engine; None without one
    run: str  # the run's id
    timeout: float = 0  # seconds without a heartbeat after which the run ends
    heartbeats: tuple = ()  # a path for each engine, which it touches while it lives
    store: dist.Store = None  # where the engines' ranks say what they do
    vocabulary: int = 0  # as for `read_group`

    def sample(self, job):
        """Samples the job's prompts: their Groups in prompt order, on every rank, when all exist."""
        folder = self.folder / f"{job.stream}_{job.step:06d}"
        key = f"{folder.name} from {next(iter(job.rows))}"
        if self.sampler:
            folder.mkdir(parents=True, exist_ok=True)
            self.sampler.sample(folder, job, self._share(key, list(job.rows)))
            self.store.set(f"{key} engine {self.sampler.engine.index}", "done")
        self._wait(folder, [f"{key} engine {i}" for i in range(len(self.heartbeats))])
        expected = dict(run=self.run, stream=job.stream, step=job.step, version=job.version)
        groups = []
        for i in job.rows:
            path = group_path(folder, i)
            if not appears(path, 60 if self.heartbeats else 0):
                raise RunError(f"{path}: not found on {socket.gethostname()}; use an out_dir that all nodes share")
            groups.append(read_group(path, self.vocabulary, prompt=i, **expected))
        return groups

    def _share(self, key, prompts):
        """This rank's share of a job's prompts: each goes to the engine that asks next. It changes who, not what."""
        while (n := self.store.add(key, 1)) <= len(prompts):
            yield prompts[n - 1]

    def _wait(self, folder, keys):
        """Returns when all engines have said that what they took is written."""
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
# the run folder

LOGS = ("ledger.jsonl", "evaluations.jsonl", "metrics.jsonl", "samples.md")  # what a step adds lines to


def open_run(folder, config, resumed, restarted, gpu):
    """
    Locks the folder until this process ends, however it ends, and prints and saves the config. Ends the run with one
    line if another process has it, or if a run has computed something in it that is not to go on now. Keep what it
    returns: the lock's file.

    resumed: the saved config of the run that is to go on, or {}; restarted: torchrun resumes it, not the user.
    """
    lock = folder / "lock"
    owner = f"torchrun {os.getppid()}"
    problem = ""
    cure = "choose another"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(lock, "a")
        problem = "its file system has no flock: "  # and two runs could write there
        cure = "mount it with locks (Lustre: -o flock; NFS: with lockd), or choose another"
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"out_dir={str(folder)!r}: another run is writing there; choose another")
    except OSError as e:
        fail(f"out_dir={str(folder)!r}: {problem}{e.strerror}; {cure}")
    computed = ("queue/*/group_*", "ckpt/step_*[1-9]*/checkpoint.json", *LOGS)
    begun = any(path.stat().st_size for pattern in computed for path in folder.glob(pattern))
    # torchrun starts a rank again that was refused: such a restart may only go on with torchrun's own run.
    if begun and not resumed or restarted and lock.read_text() != owner:
        fail(f"out_dir={str(folder)!r}: holds a run already; choose another, or go on with --init_from=resume")
    lock.write_text(owner)
    changed = {key: config[key] for key in ORIGINS if key in config}
    print(f"{config_source(changed)}# all keys: {folder / 'config.py'}", flush=True)
    path = folder / "config.py"
    earlier = "".join(x for x in path.read_text().splitlines(True) if x[0] == "#") if resumed else ""
    # A resume in another mode leaves the run's own mode in its config.
    kept = {key: resumed[key] for key in ("mode", "queue_dir") if resumed}
    write_atomic(path, (earlier + provenance(gpu) + config_source(config | kept)).encode())
    return file


def check_shared(folder, rank):
    """Ends the run, on every rank, if some node's `folder` is not the folder of rank 0. Collective over all ranks."""
    path = folder / f"shared_{uuid4().hex}"
    if rank == 0:
        path.touch()
    path = from_all_ranks(path)[0]
    others = {*from_all_ranks("" if appears(path, 20) else socket.gethostname())} - {""}
    if rank == 0:
        path.unlink()
    cure = "choose one on a file system that all nodes share"
    require(not others, f"out_dir={str(folder)!r}: not the same folder on {', '.join(sorted(others))}; {cure}")


def one_device(device):
    """`kernels.device_kind` of all ranks. Ends the run if they have several: their bits differ. Collective."""
    kinds = sorted({*from_all_ranks(kernels.device_kind(device))})
    require(len(kinds) == 1, f"device={device!r}: ranks have {', '.join(kinds)}, whose bits differ; use one kind")
    return kinds[0]


def healthy_checkpoint(folder, done):
    """The last checkpoint of a run that counts as healthy where the watch speaks after `done` steps; None: none is."""
    before = (path for path in checkpoints(folder / "ckpt") if int(path.name[5:]) <= done - HEALTHY)
    return max(before, default=None)


def step_figures(batch, pass_reward, times):
    """
    The metrics of an RL step's samples, of those it trains on, and of its time; how many of all groups are easy or
    hard. times: as in `Record.step`.
    """
    rewards = torch.stack([t["rewards"] for t, _ in batch.groups])  # (P, G)
    lengths = torch.stack([group.response_lengths() for group in batch.groups]).double()  # (P, G)
    cut = torch.cat([t["truncated"] for t, _ in batch.groups])
    right = [float((t["rewards"] >= pass_reward).double().mean()) for t, m in batch.sampled if m["finished"]]
    meta = sorted((m for _, m in batch.sampled), key=lambda m: m["elapsed"])
    idle = {m["engine"]: m["idle"] for m in meta}  # of each engine up to its last group
    began, sampled, learned, published = times
    seconds = time.monotonic() - began
    return dict(
        reward_mean=fmean(rewards.flatten().tolist()),
        reward_std=float(rewards.double().std()),
        zero_std_groups=int((rewards == rewards[:, :1]).all(1).sum()),
        groups=len(batch.sampled),
        easy_groups=right.count(1),
        hard_groups=right.count(0),
        response_length_mean=float(lengths.mean()),
        response_length_max=int(lengths.max()),
        truncated_fraction=float(cut.double().mean()),
        weight_version=batch.groups[0].meta["version"],
        engine_retractions=sum(m["retractions"] for m in meta),
        wait_seconds=sampled - began,
        train_seconds=learned - sampled,
        rollout_seconds=max(m["began"] + m["seconds"] for m in meta) - min(m["began"] for m in meta),
        idle_seconds=fmean(idle.values()),
        sync_seconds=published - learned,
        step_seconds=seconds,
        tokens_per_second=float(lengths.sum()) / seconds,
    )


class Record:
    """
    What the first rank writes down of a run: the ledger, a second one of its evaluations, metrics.jsonl, and samples.md
    to read. The logs are cut back to their sizes in the checkpoint's record `saved`; without one they begin empty. c:
    the config as a namespace; origin: what a checkpoint must say to be this run's; agent: the Agent of the samples.
    """

    def __init__(self, folder, saved, c, origin, agent=None):
        self.folder = folder
        self.c = c
        self.origin = origin
        self.agent = agent
        sizes = dict.fromkeys(LOGS, 0) | saved.get("bytes", {})
        self.ledger = Ledger(folder / "ledger.jsonl", sizes["ledger.jsonl"], c.strict)
        if saved and self.ledger.digest != saved["digest"]:
            raise RunError(f"{self.ledger.path}: does not lead to step {saved['step']}'s checkpoint; was it edited?")
        # Not compared with what comes out after a resume: eval_samples may be another then.
        path = folder / "evaluations.jsonl"
        self.evaluations = Ledger(path, sizes[path.name], strict=False, first=FIRST_EVALUATION)
        for name in ("metrics.jsonl", "samples.md"):
            (folder / name).touch()
            os.truncate(folder / name, sizes[name])
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        self.steps = [line for line in lines if line["phase"] == "rl"]

    def state(self):
        """What a checkpoint must say of the run and of its logs."""
        sizes = {name: (self.folder / name).stat().st_size for name in LOGS}
        return self.origin | dict(digest=self.ledger.digest, bytes=sizes)

    def metrics(self, **line):
        with open(self.folder / "metrics.jsonl", "a") as f:
            f.write(json.dumps(line) + "\n")

    def supervised(self, phase, step, samples, metrics, hashes):
        """A step on known answers ('sft') or pairs ('rm', 'dpo')."""
        self.metrics(phase=phase, step=step, **metrics)
        tokens = content_hash(*(s.tokens for s in samples))
        self.ledger.append(phase=phase, step=step, tokens=tokens, **hashes)
        if (step + 1) % 50 == 0:
            tqdm.write(f"supervised step {step + 1}: loss {metrics['loss']:.4f}")

    def evaluation(self, step, scores, prompts, hashes):
        """
        Records scores {metric: value} of an evaluation, and hashes {stage: hash} of what they are of. prompts: number
        of held-out prompts or pairs.
        """
        c = self.c
        self.metrics(phase="eval", step=step, **scores)
        self.evaluations.append(phase="eval", step=step, **hashes, scores=scores)
        rates = (f"{k} {v:.4f} +- {scores[f'{k}_ci95']:.4f}" for k, v in scores.items() if f"{k}_ci95" in scores)
        scored = f"agent {c.agent!r}" if c.agent else f"reward {c.reward!r}"
        what = f"{prompts} prompts, {c.eval_samples} samples each, {scored}, temperature {c.eval_temperature}"
        if "eval_margin" in scores:  # of pairs
            what = f"{prompts} pairs, loss {scores['eval_loss']:.4f}, margin {scores['eval_margin']:.4f}"
        tqdm.write(f"held out after {step} steps: {', '.join(rates)} ({what})")

    def hashes(self, groups):
        """{stage: hash} of what Groups have."""
        tensors, meta = zip(*groups)
        named = ["tokens", "logprobs", "rewards"]
        if self.c.lag or self.c.segment_tokens:
            named.append("weight_version")
        if self.agent:
            named += ["loss_mask", "turn_rewards"]
        stages = {k: content_hash(*(t[k] for t in tensors)) for k in named}
        if self.agent:
            stages["journal"] = content_hash([m["journal"] for m in meta])
        prompts = content_hash([m["prompt_text"] for m in meta], *(t["prompt_tokens"] for t in tensors))
        return dict(prompts=prompts) | stages

    def step(self, step, batch, metrics, hashes, times):
        """
        Records an RL step; returns its line of metrics.jsonl. metrics, hashes: the trainer's, {} where nobody trains.
        times: when the step began, had its samples, had learned, had published.
        """
        c = self.c
        self.ledger.append(phase="rl", step=step, **self.hashes(batch.groups), **hashes)
        line = dict(phase="rl", step=step) | step_figures(batch, c.pass_reward, times) | metrics
        if self.agent:
            line |= self.agent.metrics(batch.sampled)
        self.metrics(**line)
        self.steps.append(line)
        if c.sample_every and step % c.sample_every == 0:
            self.samples(step, *batch.groups[0])
        if c.keep_rollouts:  # an engine that is late may still read the files of later steps
            shutil.rmtree(self.folder / f"queue/rl_{step - c.keep_rollouts - c.lag:06d}", ignore_errors=True)
        return line

    def samples(self, step, tensors, meta):
        """An entry of samples.md: a group's samples and rewards."""
        with open(self.folder / "samples.md", "a") as f:
            f.write(f"\n## step {step}\n\nprompt `{meta['prompt_text']!r}`, answer `{meta['answer']!r}`\n\n")
            for g, reward in enumerate(tensors["rewards"].tolist()):
                cut = ", cut off" * bool(tensors["truncated"][g])
                said = [f" `{meta['responses'][g]!r}`{cut}\n"]
                if self.agent:  # whose response is the last of its turns
                    said = ["\n", *self.agent.transcript(meta["episodes"][g])]
                f.writelines([f"- reward {reward:g}:", *said])

    def alarm(self, alarm):
        """A line for a run that its watch ends: why, and how to go on from where it was healthy."""
        done = self.steps[-1]["step"] + 1
        cure = "none is kept (--keep_checkpoints)"
        if healthy := healthy_checkpoint(self.folder, done):
            go_on = f"tools/branch.py {self.folder} --step={int(healthy.name[5:])}"
            cure = f"{healthy}, from which {go_on} goes on with other flags"
        return f"watch: {alarm} after step {done}; the last healthy checkpoint: {cure}"


# ------------------------------------------------------------------------------------------------------------------
# checkpoints: ckpt/step_000100/ is a Hugging Face model folder; optimizer/ and checkpoint.json in it are ours


def write_file(path, tensors, **metadata):
    """Writes a safetensors file."""
    try:
        save_file(tensors, path, {"format": "pt"} | metadata)
    except SafetensorError as e:  # a full disk
        raise RunError(f"{path}: {e}; the checkpoints before it are whole: --init_from=resume")
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors makes files that only their owner may read


def write_tensors(folder, prefix, shards, mesh):
    """
    Writes whole tensors, of which each rank has rows, into `folder` as <prefix>-00001-of-00003.safetensors and so on,
    with Hugging Face's index. The trainers take turns with the files. Collective over the trainers.
    """
    plan = buckets(shards, shards[0].data.dtype, 4 << 30)
    where = {}  # {name: file}
    for i, bucket in enumerate(plan):
        path = folder / f"{prefix}-{i + 1:05d}-of-{len(plan):05d}.safetensors"
        mine = i % mesh.size() == mesh.get_local_rank()
        content = {}
        for s in bucket:
            for part in per_expert(s._replace(first=0, data=whole(s, mesh))):
                where[part.name] = path.name
                if mine:
                    content[part.name] = part.data.to("cpu", copy=True)
        if mine:
            write_file(path, content)
    if mesh.get_local_rank() == 0:
        index = {"metadata": {}, "weight_map": where}
        (folder / f"{prefix}.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _file_hash(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def seal_checkpoint(partial, final, **record):
    """
    Makes the folder `partial` the checkpoint `final`: checkpoint.json in it holds `record` and a SHA-256 of every file,
    and all is on the disk before the name appears.
    """
    paths = sorted(p for p in partial.rglob("*") if p.is_file())
    with ThreadPoolExecutor() as pool:
        list(pool.map(_sync, paths))
        record["files"] = dict(zip((str(p.relative_to(partial)) for p in paths), pool.map(_file_hash, paths)))
    record["sha256"] = _digest(record)
    write_atomic(partial / "checkpoint.json", json.dumps(record, indent=1).encode())
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    _sync(final.parent)


def read_checkpoint(folder, rank, ranks, **expected):
    """
    The record of a checkpoint. Each of `ranks` checks its share of the files. Raises RunError for a damaged file, and
    where the record differs from `expected`.
    """
    path = folder / "checkpoint.json"
    try:
        record = json.loads(path.read_text())
        if record.pop("sha256") != _digest(record):
            raise ValueError
        check_fields(path, record, expected)
        there = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
        for name, digest in [*record["files"].items()][rank::ranks]:
            path = folder / name
            if name not in there:  # or a path that leads elsewhere, to what has no end
                raise ValueError
            if _file_hash(path) != digest:
                raise ValueError
    except (OSError, ValueError, KeyError, AttributeError):
        raise RunError(f"{path}: missing or damaged; delete {folder} to go on from the checkpoint before it")
    return record


def checkpoints(folder):
    """Sealed checkpoints, the latest last."""
    return sorted(folder.glob("step_*"))


def delete_checkpoints(folder, unwanted):
    """Deletes these folders; each gets another name first, so that half of one never looks like a checkpoint."""
    for path in unwanted:
        path.rename(folder / f".{path.name}")
    for unfinished in folder.glob(".step_*"):
        shutil.rmtree(unfinished)


def clean_queue(queue, first_step):
    """
    After a crash: deletes what was half written, and torn files of steps still to be done. Whole files stay: they hold
    what would be made again. Returns the number of files deleted as torn.
    """
    for leftover in queue.glob("*/.group_*"):
        leftover.unlink()
    torn = 0
    for path in queue.glob("*/group_*.safetensors"):
        if int(path.parent.name.rpartition("_")[2]) >= first_step:
            try:
                read_group(path)
            except RunError:
                path.unlink()
                torn += 1
    return torn


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
    sums = []
    for t, s in zip(tensors, shards):
        rows = t[:, None].flatten(1).view({2: torch.int16, 4: torch.int32}[t.itemsize])
        of_rows = _odd(s.first + (1 << 40), len(t), t.device)
        sums.append(kernels.bit_sum(rows, of_rows, _odd(s.column, rows.shape[1], t.device)))
    sums = torch.stack(sums)
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
    return content_hash({key: value for key, value in config.items() if key not in FREE_KEYS})


FIRST_STEP = "onecurve 1"  # what the first link of a chain is the hash of: a format's name and version
FIRST_EVALUATION = "onecurve evaluations 1"


class Ledger:
    """
    ledger.jsonl: per step a hash of each stage (prompts, tokens, logprobs, rewards, advantages, gradients, weights,
    optimizer) and `chain`, a SHA-256 over the line and the chain before it. Two runs with the same last link did the
    same; the first differing line and stage say where two runs parted. `digest` is the last link.

    size: bytes of an existing file to go on from. What a killed run wrote after them is cut off, and compared with
    what comes out now. first: one of the two above. Raises RunError if the chain is broken, and, if `strict`, where the
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
        os.truncate(path, size)

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
