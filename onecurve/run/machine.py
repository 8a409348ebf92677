"""
A run's requirements of its machine, checked before anything is computed; the last line of a process that ends early.

    card      take_gpu: a GPU with its driver and compilers; one_device: the same kind for all ranks
    memory    least_memory: of a run; machine_memory: of a machine
    ranks     watch_ranks: a lost one ends the run
    end       report_error: an exception in one line; end_with_a_line: SIGTERM in one line
"""

import atexit
import errno
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

import kernels
from configurator import close_bars, error_line, last_word, require, roles
from sync import from_all_ranks, rank_is_lost, reason

MOST_COPIED = 2e9  # parameters of which one trainer on a card holds a copy in bfloat16, and its gradients


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
    cure = "lower --nproc_per_node, or try several ranks on one card, as tests/one_card.py does"
    require(gpu < count, f"device='cuda': {count} CUDA devices for more ranks; {cure}")
    chip = torch.cuda.get_device_capability(gpu)
    cure = f"kernels.py is for {kernels.CAPABILITIES}; use --device=cpu"
    require(chip in kernels.CARDS, f"device='cuda': compute capability {chip[0]}.{chip[1]}; {cure}")
    apart = config["weight_sync"] != "broadcast" or not lends
    require(apart, "weight_sync='broadcast': NCCL refuses both ends on one GPU; use ipc")
    check_compilers()
    torch.cuda.set_device(gpu)
    return torch.cuda.get_device_name()


DRIVER = Path("/proc/driver/nvidia/version")
LEAST_DRIVER = 580  # of CUDA 13, for which torch is built
TOOLKIT = Path("/usr/local/cuda")


def why_no_card():
    """The cure where torch finds no CUDA device, which is all that it says even if the driver is too old."""
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


def one_device(device):
    """`kernels.device_kind` of all ranks. Ends the run if they have several: their bits differ. Collective."""
    kinds = sorted({*from_all_ranks(kernels.device_kind(device))})
    require(len(kinds) == 1, f"device={device!r}: ranks have {', '.join(kinds)}, whose bits differ; use one kind")
    return kinds[0]


def least_memory(parameters, learned, config, world, reward=0, place="cuda"):
    """
    {use of a card: the least bytes that it needs}, for a model with this number of parameters, of which `learned` are
    trained; on place='cpu' {'run': bytes that all ranks need together}. reward: bytes of reward models, which an
    engine's rank has. Training: weights, AdamW's moments, and the gradients of a row of leaves, of which two are added
    in one. Sampling: the engine gets a share of what the rest leaves of a card; on a CPU it has its weights twice, as
    sent and as its loops read them, and only the second sleep.
    """
    trainers, engines = roles(config, world)
    compute = kernels.compute_dtype(place).itemsize  # bytes of a number
    weights = compute * parameters / config["rollout_tp"]
    reward *= engines > 0
    needs = {}
    held = 0
    if trainers:
        alone = trainers == 1 and compute < 4 and parameters <= MOST_COPIED  # the model is a copy of what is trained
        held = (compute * parameters * (alone or learned < parameters) + 3 * 4 * learned) / trainers
        gradients = max(1, math.log2(config["lanes"] / trainers))
        gradients = 4 * learned / trainers * gradients + compute * learned * (alone and learned == parameters)
        needs["train"] = held + gradients + reward * (trainers == world)
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


def watch_ranks(ranks, timeout):
    """
    Ends this process, and so the run with one line, when another rank has been silent for almost `timeout` seconds: a
    collective on a card waits for a lost rank for ever. Returns the Event that ends the watch.
    """
    store = ranks.store.clone()  # a connection of its own: the other one may be waiting
    end = threading.Event()
    seen = {}  # {rank: (its number of beats, when that changed)}

    def silent_ranks():
        now = time.monotonic()
        for rank in range(ranks.world):
            beats = store.add(f"beats of rank {rank}", rank == ranks.rank)
            if seen.get(rank, (None,))[0] != beats:
                seen[rank] = beats, now
        return [rank for rank, (_, since) in seen.items() if now - since > 0.8 * timeout]

    def watch():
        while not end.wait(timeout / 10):
            try:
                silent = silent_ranks()
            except dist.DistError:  # the store is gone, with the first rank's node
                silent = [0]
            if not silent or end.is_set():
                continue
            if ranks.rank == min({*range(ranks.world)} - {*silent}):
                line = f"rank {silent[0]}: lost, or silent for {0.8 * timeout:g} s; nothing written is lost"
                last_word(error_line(f"{line}; resume with --init_from=resume"))
            else:
                time.sleep(5)
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return end


def report_error(kind, error, trace, kept="nothing written is lost", cure="resume with --init_from=resume"):
    """
    A sys.excepthook: Ctrl-C, a lost rank, an output that nobody reads and what a file system refuses are one line, all
    else is a traceback. kept: what of a run is; '' for a tool, whose output may be left unread, as after `| head`.
    """
    close_bars()
    in_rust = re.search(r"\(os error (\d+)\)", str(error))  # safetensors and tokenizers have no errno
    number = int(in_rust[1]) if in_rust else getattr(error, "errno", None)
    file = number and getattr(error, "filename", None)
    if kind is KeyboardInterrupt:
        line = "interrupted"
    elif kind is BrokenPipeError:
        sys.stdout = None  # Python's end would write there what is left
        if not kept:
            return
        line = "the output has no reader any more"
    elif isinstance(error, RuntimeError) and rank_is_lost(error):  # such is a dist.DistError
        gone = "torchrun's store is gone, with the node that had it"
        line = gone if isinstance(error, dist.DistNetworkError) else "another rank is lost"
    elif file or errno.errorcode.get(number) in "ENOSPC EDQUOT EROFS EACCES EPERM EFBIG EIO".split():
        line = f"{file or 'writing to out_dir'}: {os.strerror(number)}"
        cure = f"when that is mended, {cure}"
    else:
        return sys.__excepthook__(kind, error, trace)
    print(error_line("; ".join(filter(None, (line, kept, cure)))), file=sys.stderr, flush=True)


def end_with_a_line(rank):
    """
    Makes a SIGTERM end this process as usual, but with a line of the first rank's and without multiprocessing's folder
    in /tmp; and removes torchrun's folder there, if it is empty, when the process ends.
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
        if os.getpid() == owner:
            if rank == 0:
                line = "ended by SIGTERM; nothing written is lost; resume with --init_from=resume"
                last_word(f"error: {line}", stderr)
            if sockets := multiprocessing.current_process()._config.get("tempdir"):  # of weight_sync='ipc'
                shutil.rmtree(sockets, ignore_errors=True)
        clean()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    atexit.register(clean)
    signal.signal(signal.SIGTERM, ended)
