"""
What the loops for CPUs need of their process: arrays, threads, memory; and how ranks lend each other cores.
"""

import ctypes
import functools
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

WORTH_THREADS = 2e7  # operations that are worth waking another thread
M_TRIM_THRESHOLD = -1  # of glibc's malloc.h
M_MMAP_THRESHOLD = -3
NOTHING = np.zeros(0, np.float32)
LOOP_DTYPES = {torch.float32: "<f4", torch.float64: "<f8", torch.int16: "<i2", torch.int32: "<i4", torch.int64: "<i8"}

# An engine makes this a dict, {where b is: (b, its panels)}, and clears it when its weights change. Its b are weights
# only, and its a have often so few rows that to pack the panels takes as long as the product.
panel_cache = None


class _Memory:
    """An array interface for NumPy. Not Tensor.numpy(), after which FSDP2 cannot resize the tensor's storage."""

    def __init__(self, x, size, dtype):
        self.owner = x
        where = x.data_ptr(), False
        self.__array_interface__ = {"data": where, "shape": (size,), "typestr": dtype, "version": 3}


def flat(x):
    """
    The memory of a CPU tensor from its first element to its last, as a NumPy array that loops index by x's strides.
    Loops check nothing: their callers have compared the shapes.
    """
    dtype = LOOP_DTYPES.get(x.dtype)
    if dtype is None or not x.is_cpu:
        raise ValueError(f"{x.dtype} on {x.device}: the CPU operators know float32")
    size = x.numel()
    if size == 0:
        return NOTHING.view(dtype)
    if not x.is_contiguous():
        size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
    return np.asarray(_Memory(x, size, dtype))


def for_loop(x):
    """An operator's argument as a loop takes it."""
    if isinstance(x, torch.Tensor):
        return flat(x)
    if x is None:
        return NOTHING
    return np.float32(x) if isinstance(x, float) else x


threads = 1  # of a loop; torch itself gets one only (enable_batch_invariant)
working = None  # of each rank of this machine a byte, 1 while it works, in memory that they share
_pool = functools.cache(lambda process: ThreadPoolExecutor(os.cpu_count()))  # a fork has none of its parent's threads


def share(loop, units, work, *args):
    """
    loop(first, last, *args) over all units, by several threads if `work` is worth it: a number of operations, in those
    of a matmul that take as long.
    """
    args = [*map(for_loop, args)]
    most = threads if working is None else os.cpu_count() // max(1, sum(working[:]))
    shares = min(most, units)  # so that no share is empty: a loop may read its first unit
    if shares <= 1 or work < WORTH_THREADS:
        return loop(0, units, *args) if units else None
    ends = [units * i // shares for i in range(shares + 1)]
    pool = _pool(os.getpid())
    others = [pool.submit(loop, *part, *args) for part in zip(ends[1:], ends[2:])]
    loop(0, ends[1], *args)
    for other in others:
        other.result()


def prepare(cpu_threads, cores):
    """
    torch itself keeps one thread: several would wait for each other, and for our loops, by spinning. A step's memory
    stays with the process. cpu_threads, cores: as in `kernels.enable_batch_invariant`.
    """
    global threads, working
    threads = cpu_threads
    if cores:
        with open(cores, "r+b") as file:
            working = mmap.mmap(file.fileno(), 0)
    torch.set_num_threads(1)
    keep_memory = ctypes.CDLL(None).mallopt
    keep_memory(M_TRIM_THRESHOLD, 2**30)
    keep_memory(M_MMAP_THRESHOLD, 2**30)


def give_memory_back():
    """Gives memory that this process does not use back to the system."""
    torch.cuda.empty_cache()
    ctypes.CDLL(None).malloc_trim(0)


def share_cores(from_all_ranks):
    """
    The path of a byte for each rank of this machine, in which it says whether it works (`lend_cores`). Collective over
    all ranks, by sync.from_all_ranks.
    """
    fd = os.memfd_create("working")  # there as long as this process
    os.ftruncate(fd, int(os.environ["LOCAL_WORLD_SIZE"]))
    node = os.environ.get("GROUP_RANK")
    everyone = from_all_ranks((node, f"/proc/{os.getpid()}/fd/{fd}"))
    return dict(reversed(everyone))[node]  # its first rank's


def lend_cores(waits):
    """Says that this rank waits, and the others of its machine have its cores; or that it works again."""
    if working:
        working[int(os.environ["LOCAL_RANK"])] = not waits
