"""
How an SGLang engine starts in a rank of torchrun's, and leaves nothing behind that a kill would not remove: no port for
other machines, no sockets, no names in /dev/shm.

    start_engine       starts it, with the scheduler of onecurve/sglang/patches.py
    engine_arguments   its arguments
"""

import functools
import os
import re
import shutil
import tempfile
import types
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from configurator import named_arguments
from onecurve.cpu import host
from onecurve.keys.engine import SPARE
from onecurve.sglang.patches import ATTENTION_BACKEND, run_scheduler
from onecurve.sglang.start import started_early
from sync import content_hash, listening_store


def start_engine(config, model_path, device, dtype, gpu, lends, cores, inv_freq, patches, sockets, died):
    """
    SGLang's Engine in this process, as RolloutEngine has it. inv_freq: of RoPE; None: with the libraries' operators.
    sockets: a folder for them. died: is called when one of SGLang's processes has died.
    """
    os.environ["SGLANG_PLUGINS"] = "none"  # other installed packages may not change what an engine computes
    threads = max(host.threads, torch.get_num_threads())
    tp = config["rollout_tp"]
    run = functools.partial(run_scheduler, config, threads, cores, inv_freq, lends, patches)
    if device == "cpu":
        if tp > 1:  # SGLang would want a NUMA node for each
            os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(tp * [f"0-{os.cpu_count() - 1}"])
    else:
        torch.cuda.empty_cache()  # SGLang measures what is free
    if lends and device == "cuda":
        # torch_memory_saver is LD_PRELOADed into the scheduler; ld.so drops it unless CUDA's folders are on
        # LD_LIBRARY_PATH
        loaded = re.findall(r"(/\S+)/libcuda(?:rt)?\.so", Path("/proc/self/maps").read_text())
        folders = dict.fromkeys([*loaded, *os.environ.get("LD_LIBRARY_PATH", "").split(":")])
        os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, folders))
    with started_early(run, tp) if device == "cpu" else nullcontext():
        from sglang.srt import server_args
        from sglang.srt.entrypoints.engine import Engine

        named = functools.partial(tempfile.NamedTemporaryFile, dir=sockets)
        server_args.tempfile = types.SimpleNamespace(NamedTemporaryFile=named)

        class EngineInRank(Engine):
            run_scheduler_process_func = run
            # tokens in, tokens out: the detokenizer's process would only import SGLang once more and wait
            _launch_detokenizer_subprocesses = staticmethod(lambda *_, **__: ([], []))

        arguments = engine_arguments(config, model_path, device, dtype, gpu, lends, died)
        # SGLang would choose a port now and listen later, when another process may have it
        store = listening_store("127.0.0.1")
        sglang = EngineInRank(**arguments | dict(nccl_port=store.port))
        sglang.store = store  # lives as long
    unlink_shared_memory(sglang.get_all_child_pids())
    return sglang


def engine_arguments(config, model_path, device, dtype, gpu, lends, died):
    """SGLang's arguments, as its ServerArgs name them."""
    tokens = config["max_prompt_tokens"] + config["max_new_tokens"]
    samples = max(config["prompts_per_step"], config["groups_in_flight"]) * config["group_size"]
    args = dict(
        model_path=str(model_path),
        served_model_name="policy",  # else the path is the name, in which SGLang takes no colon
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        log_level="error",
        skip_tokenizer_init=True,
        enable_deterministic_inference=True,
        sampling_backend="pytorch",
        context_length=tokens + SPARE,
        random_seed=config["seed"] % 2**31,
        base_gpu_id=gpu,
        tp_size=config["rollout_tp"],
        ep_size=config["rollout_tp"],  # of a mixture each rank has whole experts
        attention_backend=ATTENTION_BACKEND[device],
        weight_version="0",
        custom_sigquit_handler=died,
        watchdog_timeout=2 * config["engine_timeout"],  # ours comes first
        json_model_override_args='{"auto_map": {}}',  # SGLang would import what a model folder names there
        constrained_json_disable_any_whitespace=True,  # a model could write it for ever
        sleep_on_idle=True,  # else it polls, and takes a core from whoever trains meanwhile
    )
    if device == "cpu":
        args |= dict(
            max_total_tokens=max(samples * (tokens + 1), tokens + SPARE),
            max_running_requests=samples,
            disable_cuda_graph=True,
            disable_overlap_schedule=True,
        )
    else:
        args |= dict(
            cuda_graph_max_bs_decode=min(512, max(samples, config["eval_size"] * config["eval_samples"])),
            disable_prefill_cuda_graph=True,  # of decode steps only: a prefill has work enough to hide its launches
            bf16_gemm_backend="torch",  # F.linear, whose aten operators are ours
            moe_runner_backend="triton",  # on Blackwell another permutes the rows of the experts' weights
            mem_fraction_static=config["engine_memory"],
            enable_memory_saver=lends,
        )
    return args | named_arguments(config["engine_args"])


@contextmanager
def folder_for_sockets(log):
    """
    A folder for the sockets of the engine with this log, which is deleted at the end: nobody needs their names once
    both ends have found each other. It has one name at each start, so the next one deletes what a kill has left in it.
    A socket's name has at most 107 bytes, which a long TMPDIR leaves no room for: then this process takes /tmp, for
    the sockets of multiprocessing, too.
    """
    if len(tempfile.gettempdir()) > 63:
        tempfile.tempdir = "/tmp"
    folder = Path(tempfile.gettempdir(), f"onecurve_{content_hash(str(log.resolve()))}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(0o700)  # raises if it is still there, and so another user's
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def unlink_shared_memory(pids):
    """
    Takes from /dev/shm the names of what these processes have there: the queue between an engine's ranks. SGLang's
    processes are ended by SIGKILL and would leave them behind; nobody opens them by name again, and without the names
    the memory goes when the processes go, however that happens.
    """
    for pid in pids:
        inodes = {*map(int, re.findall(r"(\d+) +/dev/shm/", Path(f"/proc/{pid}/maps").read_text()))}
        for entry in os.scandir("/dev/shm"):  # its inode came with the name: the file itself may just have gone
            if entry.inode() in inodes and not entry.name.startswith(("cuda", "nccl")):
                Path(entry).unlink(missing_ok=True)
