"""
The rollout side: a real SGLang engine started inside a torchrun rank; prompts in, scored groups of samples out.

    the scheduler   SGLang's child process, in which a model runs
    RolloutEngine   starts that process, notices its death, lends its memory, supplies it with the trainers' weights
    Sampler         makes samples with it
    sample_step     has a step's samples made: whole ones, or a segment of each that is in flight

The life of one prompt:

    plan       which prompts a step has follows from (seed, step) alone, so all ranks make the same Job by themselves
    share      an engine that has room takes the next prompt, by a counter in torchrun's store: this decides who does
               the work, not what comes out of it
    generate   SGLang draws G samples side by side, the noise of each from a seed of its own
    score      the reward function sees the texts while other prompts are generated; user code, one text at a time
    write      group_0003.safetensors appears whole: tokens, log-probs, rewards and weight version under one checksum
    take       all ranks wait until every engine has said that its files are there, and read them in the order of the
               prompts (sync.Queue)

A group whose file exists is never made again.

`install_operators` (onecurve/models/dense.py) hooks kernels.py into SGLang's classes in the scheduler's process;
`kernels.draw` takes the place of its draw. On a CPU SGLang needs four replacements more (in `adapt_to_cpu`; 0.5.17 has
no switch for them): a flag that keeps RoPE from importing vLLM, its batch-invariant mode (Triton kernels), process
groups that ask for no CUDA device. Its sampler is `sample_tokens`. Nothing here imports sglang before an engine is
wanted: that takes seconds.
"""

import asyncio
import functools
import hashlib
import importlib
import itertools
import math
import multiprocessing
import os
import pkgutil
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import kernels
from configurator import close_bars, error_line, named_arguments, noise_seed
from onecurve.cpu import host
from onecurve.models import moe
from onecurve.models.dense import MODEL_TYPES, hugging_face_parameters, install_operators, rope_frequencies
from onecurve.models.start import allow_deterministic_backend, early, import_engine, output_to, start_schedulers
from rewards import MODELS, RewardError, draw_rows, score_all
from sync import (
    FOREVER,
    RunError,
    content_hash,
    from_all_ranks,
    group_path,
    hidden_torchrun,
    listening_store,
    rank_is_lost,
    rounded_to,
    tensor_hashes,
    write_group,
)

ATTENTION_BACKEND = {"cpu": "torch_native", "cuda": "triton"}  # SGLang's names; ours takes their place
HEARTBEAT_TOKENS = 50  # tokens of a sample after which SGLang sends what it has of it; SGLang's own number
LENT = ["kv_cache", "weights"]  # SGLang's names of the memory that sleeps

# ------------------------------------------------------------------------------------------------------------------
# in the scheduler's process


def check_weights(scheduler, expected):
    """
    Raises ValueError, with names, unless the parameters of the model that the engine's schedulers run together are
    those of `expected`, {Hugging Face's name: hash}, and have these hashes. {} is not compared.
    """
    found = list(hugging_face_parameters(scheduler.tp_worker.model_runner.model)) if expected else []
    hashes = {}
    group = scheduler.tp_group
    for cut, among in ((False, None), (True, group.device_group)):
        if shards := [shard for shard, is_cut in found if is_cut == cut]:
            hashes |= tensor_hashes([s.data for s in shards], shards, among)
    wrong = [name for name in expected if hashes.get(name) != expected[name]]
    wrong += [f"{shard.name} (nobody sends it)" for shard, _ in found if shard.name not in expected]
    wrong = [*dict.fromkeys(itertools.chain(*from_all_ranks(wrong, group.cpu_group)))]
    if wrong:
        raise ValueError(", ".join(wrong[:3]) + ", .." * (len(wrong) > 3))


def receive_rows(self, names, dtypes, shapes, *_):
    """
    In place of SGLang's WeightUpdater.update_weights_from_distributed, which takes whole tensors from one sender: each
    trainer sends its rows of all tensors in one piece, in the group that it has with all workers. Returns (whether it
    worked, why not).
    """
    groups = self._model_update_group.values()  # in the order of the trainers: in every worker the same, as NCCL wants
    try:
        dtype = getattr(torch, dtypes[0])
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape in shapes]
        cut = [x.chunk(len(groups)) for x in tensors]  # as FSDP2 cuts them: the last trainers may have no rows
        for r, group in enumerate(groups):
            rows = [parts[r] for parts in cut if r < len(parts)]
            sizes = [x.numel() for x in rows]
            piece = torch.empty(sum(sizes), dtype=dtype, device=self.device)
            dist.broadcast(piece.view(torch.uint8), src=0, group=group)
            for x, part in zip(rows, piece.split(sizes)):
                x.copy_(part.view(x.shape))
        self.get_model().load_weights([*zip(names, tensors)])
    except Exception as e:
        return False, str(e)
    return True, ""


def load_all(own, model, weights, device):
    """SGLang's loading of a model folder, `own`. Raises ValueError, with names, if it leaves parameters out."""
    for p in model.parameters():
        p.data.fill_(math.nan)
    own(model, weights, device)
    if left := [name for name, p in model.named_parameters() if p.isnan().any()]:
        raise ValueError(f"weights that are in no file, or not a number: {', '.join(left[:3])}")


def leave_nothing_open():
    """
    No port for other machines: torch's store would listen at all addresses, and give what it has to whoever asks; here
    all ranks ask the one that `RolloutEngine` made. No names in /dev/shm, which a kill would leave there: of tqdm's
    lock, and of statistics for a router.
    """
    from sglang.srt.managers import scheduler
    from tqdm import tqdm

    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # torch.distributed has a function so called
    rendezvous._create_c10d_store = lambda host, port, *_: dist.TCPStore(host, port, timeout=FOREVER)
    tqdm.set_lock(threading.RLock())
    scheduler.create_load_snapshot_writer = lambda *_, **__: None


def sample_tokens(self, output, info, _, likeliest, chosen, positions):
    """
    SGLang's sampler: a draw from the log-softmax whose log-probs it returns, of the tokens that each request's rule
    keeps. Greedy requests, to SGLang of temperature 1 and top_k=1, have the log-probs of all tokens. Its own sampler
    draws from the log of a softmax, and returns what was before a rule.
    """
    logits = (output.next_token_logits / info.temperatures).contiguous()
    by_rule = info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling
    if by_rule:
        greedy = info.top_ks[:, None] == 1
        rules = torch.stack([info.top_ps, info.top_ks.float(), info.min_ps], 1)
        kernels.cut(logits, rules.where(~greedy, rules.new_tensor([1.0, 0.0, 0.0])))
    logprobs = kernels.log_softmax(logits, -1, False)
    tokens = kernels.draw(logprobs, info.sampling_seed, positions)
    if by_rule:
        tokens = logits.argmax(-1, keepdim=True).where(greedy, tokens)
    if any(likeliest or ()):
        found = self.output_logprob_processor.compute_logprobs(logprobs, likeliest, chosen, tokens[:, 0])
        found.write_output_to(output)
    else:
        output.next_token_logprobs = logprobs.gather(1, tokens)[:, 0]
    return tokens[:, 0].int()


def round_operators(bits):
    """Makes what kernels.py's operators give in this process `rounded_to` these bits."""

    def rounded(operator):
        def call(*args, **kwargs):
            out = operator(*args, **kwargs)
            if isinstance(out, tuple):
                return tuple(rounded_to(x, bits) for x in out)
            return rounded_to(out, bits)

        return call

    for name in ("linear", "rms_norm", "norm_rope", "swiglu", "moe", "attention"):
        setattr(kernels, name, rounded(getattr(kernels, name)))


def adapt_to_cpu(threads):
    """What SGLang's scheduler needs on a CPU besides our operators."""
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers.rotary_embedding import base as rotary_embedding

    torch.set_num_threads(threads)
    allow_deterministic_backend()
    rotary_embedding._is_cpu = True
    host.panel_cache = {}
    os.environ["SGLANG_EAGER_INPUT_NO_COPY"] = "1"  # no copy into buffers that only a graph would need

    def group_on_cpu(self, own=GroupCoordinator.__init__, **options):
        own(self, **options | dict(use_pynccl=False, use_custom_allreduce=False))

    GroupCoordinator.__init__ = group_on_cpu  # it would ask for a CUDA device


def run_scheduler(config, threads, cores, inv_freq, lends, server_args, *args):
    """
    SGLang's scheduler process, with our operators unless inv_freq is None; its `run_scheduler_process_func`. cores,
    lends: as in RolloutEngine.
    """
    from sglang.srt import batch_invariant_ops, models
    from sglang.srt.layers import sampler
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.model_executor import forward_batch_info
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup, weight_updater
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.utils import torch_memory_saver_adapter

    device = server_args.device
    enable = functools.partial(kernels.enable_batch_invariant, threads, cores)
    # what deterministic mode switches on; SGLang's own would put its Triton kernels in
    batch_invariant_ops.enable_batch_invariant_mode = enable if inv_freq else lambda: None
    sampler.Sampler.forward = sample_tokens
    weight_updater.WeightUpdater.update_weights_from_distributed = receive_rows
    if device == "cpu":
        adapt_to_cpu(threads)
    else:
        # SGLang would have nvcc compile these at the first steps. Keys and values are then written by two index_put of
        # torch's a layer instead of one kernel, inside the graph of a decode step; both copy rows.
        forward_batch_info.clamp_position = forward_batch_info._clamp_position_native
        memory_pool.can_use_store_cache = lambda *_: False
        unmap = torch_memory_saver_adapter._TorchMemorySaverAdapterReal.pause

        def pause(self, tag):
            torch.cuda.synchronize()  # kernels after the last sample may still read what then has no memory
            unmap(self, tag)

        torch_memory_saver_adapter._TorchMemorySaverAdapterReal.pause = pause
    if inv_freq:
        each = config["engine_bits"].endswith(":act")
        in_one_call = device == "cpu" and config["tp_split"] == 1 and not each and not kernels.INTERPRET
        install_operators(ATTENTION_BACKEND[device], inv_freq, config["tp_split"], in_one_call)
        if each:
            round_operators(config["engine_bits"])
        attention_backend_setup.init_cublas = lambda: None  # a product of float16, which kernels.py refuses
        # the next batch may write the page table once this one has read it: SGLang's own backend copies it before a
        # graph's replay, PagedAttention reads it until the end
        os.environ["SGLANG_FORCE_COARSE_WAR_BARRIER"] = "1"
        # for its own backend's sake SGLang would cut prefills at multiples of 4096, and wait for ever for larger chunks
        os.environ["SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE"] = "1"
    moe.install_in_engine()
    load = DefaultModelLoader.load_weights_and_postprocess
    DefaultModelLoader.load_weights_and_postprocess = functools.partial(load_all, load)
    # SGLang would import all its two hundred models before it picks one: seconds
    others = {module.name for module in pkgutil.iter_modules(models.__path__)} - set(MODEL_TYPES)
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(others)
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process

    def flush_cache(self, *args, own=Scheduler.flush_cache, **kwargs):
        if host.panel_cache:
            host.panel_cache.clear()
        if lends and device == "cpu":
            host.give_memory_back()
        self.tree_cache.disable_finished_insert = not config["agent"]  # nobody goes on from the end of other samples
        return own(self, *args, **kwargs)

    Scheduler.flush_cache = flush_cache  # as with every change of the weights
    if config["agent"]:  # turns may end at strings
        from onecurve.agents.scheduler import install_tokenizer

        install_tokenizer(server_args.model_path)
    Scheduler.check_weights = check_weights  # for Engine.collective_rpc
    leave_nothing_open()
    run_scheduler_process(server_args, *args)


@contextmanager
def started_early(run, count):
    """
    Inside, SGLang's engine gets the processes of `start_schedulers` when it wants its `count`, and they do what it has
    them do: `run`.
    """
    if not early:
        start_schedulers(count, "spawn")
    started = [early.pop() for _ in range(count)]
    import_engine()
    from sglang.srt.entrypoints import engine

    processes = iter(started)
    readers = (reader for _, _, reader in started)

    def stand_in(target, args):  # its last argument is the writer, which the process has
        process, commands, _ = next(processes)
        log = os.readlink("/proc/self/fd/1")
        process.start = lambda: commands.send((log, dict(os.environ), run, args[:-1]))
        return process

    engine.mp = types.SimpleNamespace(
        Process=stand_in,
        Pipe=lambda duplex: (next(readers), None),
        set_start_method=lambda *_, **__: None,
    )
    allow_deterministic_backend()
    try:
        yield
    finally:
        for process, *_ in processes:  # of arguments that SGLang has refused
            process.kill()


# ------------------------------------------------------------------------------------------------------------------
# the engine, in its rank


@contextmanager
def folder_for_sockets(log):
    """
    A folder for the sockets of the engine with this log, which is deleted at the end: nobody needs their names once
    both ends have found each other. It has one name at each start, so what a kill has left in it goes at the next one.
    A socket's name has at most 107 bytes, which a long TMPDIR leaves no room for.
    """
    parent = tempfile.gettempdir() if len(tempfile.gettempdir()) < 64 else "/tmp"
    folder = Path(parent, f"onecurve_{content_hash(str(log.resolve()))}")
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


def engine_arguments(config, model_path, device, dtype, gpu, lends, died):
    """What SGLang is started with, as its ServerArgs name it."""
    tokens = config["max_prompt_tokens"] + config["max_new_tokens"]
    samples = max(config["prompts_per_step"], config["groups_in_flight"]) * config["group_size"]
    args = dict(
        model_path=str(model_path),
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        log_level="error",
        skip_tokenizer_init=True,
        enable_deterministic_inference=True,
        sampling_backend="pytorch",
        context_length=tokens + 8,
        random_seed=config["seed"] % 2**31,
        base_gpu_id=gpu,
        tp_size=config["rollout_tp"],
        ep_size=config["rollout_tp"],  # of a mixture each rank has whole experts
        attention_backend=ATTENTION_BACKEND[device],
        weight_version="0",
        custom_sigquit_handler=died,
        json_model_override_args='{"auto_map": {}}',  # SGLang would import what a model folder names there
        constrained_json_disable_any_whitespace=True,  # a model could write it for ever
        sleep_on_idle=True,  # else it polls, and takes a core from whoever trains meanwhile
    )
    if device == "cpu":
        args |= dict(
            max_total_tokens=samples * (tokens + 1),
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


class Drawn(NamedTuple):
    """A sample as far as it is drawn, token by token."""

    tokens: list
    logprobs: list
    versions: list  # of the weights


class RolloutEngine:
    """
    One SGLang engine, kept alive and supplied with weights. Raises RunError when it dies while it is asked for
    something, or says nothing for `engine_timeout` seconds; a death at another moment ends the process with one line.

    hf: the model's Hugging Face config. config: the keys of train_grpo.py's block. log: the file that takes SGLang's
    output. lends: `sleep` gives the memory of weights and cache to this rank's trainer. cores: as in
    `kernels.enable_batch_invariant`.
    """

    def __init__(self, index, model_path, hf, config, device, dtype, log, gpu=0, lends=False, cores=""):
        self.index = index
        self.config = config
        self.log = log
        self.logged = log.stat().st_size if log.exists() else 0  # bytes of earlier starts
        self.version = 0  # of the weights as loaded, then of those that came last
        self.heartbeat = log.with_suffix(".alive")  # touched while SGLang lives and works (sync.Queue)
        self.name = f"engine {index}"
        self.stderr = os.dup(2)  # while it starts, 2 is the log
        self.inv_freq = rope_frequencies(hf, device).tolist() if config["batch_invariant"] else None
        self.device = device
        self.lends = lends
        self.cores = cores
        self.asleep = False
        self.model_type = hf.model_type
        self.asked = 0  # open requests
        self.since = 0.0  # when there was one
        self.busy = 0.0  # seconds with any before that
        on_sigterm = signal.getsignal(signal.SIGTERM)
        started = time.monotonic()
        print(f"{self.name}: starting SGLang, its output goes to {log}", flush=True)
        if device == "cuda":
            print(f"{self.name}: compiling kernels: takes a minute at a first start", flush=True)
        for model in MODELS.values():  # SGLang takes its share of what these leave of a card
            model.load()
        try:
            with folder_for_sockets(log) as folder:
                with hidden_torchrun(), output_to(log):
                    self.sglang = self._start(model_path, device, dtype, gpu, folder)
                from sglang.srt.managers import io_struct

                self.loop = self.sglang.loop
                self.manager = self.sglang.tokenizer_manager
                self.io_struct = io_struct
                self.loop.run_until_complete(self._take_signals_back(on_sigterm))
                self.flush()  # by each of its sockets a first message
                self.check_weights({})
        except Exception as e:
            raise RunError(f"{self.name}: SGLang did not start: {e} (see {log})")
        print(f"{self.name}: ready after {time.monotonic() - started:.0f} s", flush=True)

    def _start(self, model_path, device, dtype, gpu, sockets):
        os.environ["SGLANG_PLUGINS"] = "none"  # what else is installed may not change what an engine computes
        threads = max(host.threads, torch.get_num_threads())
        tp = self.config["rollout_tp"]
        run = functools.partial(run_scheduler, self.config, threads, self.cores, self.inv_freq, self.lends)
        if device == "cpu":
            if tp > 1:  # SGLang would want a NUMA node for each
                os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(tp * [f"0-{os.cpu_count() - 1}"])
        else:
            torch.cuda.empty_cache()  # SGLang measures what is free
        if self.lends and device == "cuda":
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

            arguments = engine_arguments(self.config, model_path, device, dtype, gpu, self.lends, self._died)
            # SGLang would choose a port now and listen later, when another process may have it
            store = listening_store("127.0.0.1")
            sglang = EngineInRank(**arguments | dict(nccl_port=store.port))
            sglang.store = store  # lives as long
        unlink_shared_memory(sglang.get_all_child_pids())
        if device == "cpu":  # the first tokens wait for the loops to compile: before anybody counts seconds of silence
            params = dict(max_new_tokens=2, sampling_seed=0, ignore_eos=True)
            sglang.generate(input_ids=[0], sampling_params=params, return_logprob=True)
        return sglang

    async def _take_signals_back(self, on_sigterm):
        """
        Takes SIGTERM and SIGQUIT back from SGLang, which would drain its requests first. A SIGTERM, torchrun's too,
        ends this process (the kernel then ends the scheduler), and a dead scheduler is reported in one line.
        """
        self.manager.auto_create_handle_loop()  # SGLang takes the signals here, if no request has made it do so yet
        for s in (signal.SIGTERM, signal.SIGQUIT):
            self.loop.remove_signal_handler(s)  # outside of the loop uvloop would not
        signal.signal(signal.SIGTERM, on_sigterm)
        signal.signal(signal.SIGQUIT, self._died)

    def _died(self, *_):
        """SGLang's watchdog and its failing children send SIGQUIT."""
        log = self.log.read_bytes()[self.logged :].decode(errors="replace")
        errors = re.findall(r"^\w*(?:Error|Exception)(: .+)", log, re.M)
        self.end(f"{self.name}: the SGLang process died{''.join(errors[-1:])}; see {self.log}")

    def fail(self, line):
        """
        Ends the run at once, with status 2, for a mistake of the user's code. An exception would first wait for the
        rewards and tools that are still at work, and one of them may wait for a judge.
        """
        close_bars()
        sys.stdout.flush()
        self.end(line, 2)

    def end(self, line, status=1):
        """Ends the process, whatever its threads wait for."""
        os.write(self.stderr, f"\n{error_line(line)}\n".encode())  # maybe behind the first rank's bar
        for process in multiprocessing.active_children():
            process.kill()
        os._exit(status)

    def close(self):
        with output_to(self.log):
            self.sglang.shutdown()

    def run(self, coroutines, when):
        """The results of coroutines, run side by side. Raises RunError where SGLang falls silent while it is asked."""
        return self.loop.run_until_complete(self._watched(coroutines, when))

    async def ask(self, request):
        """The result of one of SGLang's coroutines."""
        self.since = self.since if self.asked else time.time()
        self.asked += 1
        try:
            return await request
        finally:
            self.asked -= 1
            self.busy += 0 if self.asked else time.time() - self.since

    def worked(self):
        """Seconds so far in which SGLang was asked for something."""
        return self.busy + (time.time() - self.since if self.asked else 0)

    def generate(self, ids, params, **options):
        """
        A coroutine of SGLang's output for these token ids, or for each list of them. options: more of async_generate's
        arguments.
        """
        options |= dict(input_ids=ids, sampling_params=params, return_logprob=True)
        return self.ask(self.sglang.async_generate(**options))

    def drawn(self, output, version):
        """The Drawn of an output of `generate`. Raises RunError if other weights than `version` drew it."""
        meta = output["meta_info"]
        if int(meta["weight_version"]) != version:
            raise RunError(f"{self.name}: a sample of weights {meta['weight_version']}, expected {version}")
        logprobs = [x for x, _, _ in meta["output_token_logprobs"]]
        return Drawn(output["output_ids"], logprobs, [version] * len(logprobs))

    async def _watched(self, coroutines, when):
        tasks = [asyncio.ensure_future(c) for c in coroutines]
        results = asyncio.gather(*tasks)  # done when all are, or at the first error
        timeout = self.config["engine_timeout"]
        try:
            while not (await asyncio.wait([results], timeout=min(1, timeout / 4)))[0]:
                # SGLang sends a heartbeat every HEARTBEAT_TOKENS tokens of the slowest sample
                if self.asked and time.time() - max(self.since, self.manager.last_receive_tstamp) > timeout:
                    raise self.silent(when)
                self.heartbeat.touch()
            return results.result()
        except Exception:  # the first error is the one to report (a RunError is a SystemExit and ends us as it is)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    def silent(self, when):
        """The error of an engine that answers no more."""
        return RunError(f"{self.name}: silent for {self.config['engine_timeout']:g} s {when}; see {self.log}")

    def request(self, name, doing, **fields):
        """Has SGLang's manager do what its method of this name does. Raises RunError where it refuses."""
        kind = getattr(self.io_struct, name.title().replace("_", "") + "ReqInput")
        answer = self.run([self.ask(getattr(self.manager, name)(kind(**fields)))], f"while {doing}")[0]
        if answer and not answer[0]:  # (whether it worked, why not, ..), or None
            rank_is_lost(answer[1])
            raise RunError(f"{self.name}: {doing} failed: {answer[1]}")

    # ---- weights

    def join_weight_group(self, name, host, port, rank, size, backend):
        """Enters the group in which one trainer broadcasts, as its member `rank`; returns when all are in it."""
        self.request(
            "init_weights_update_group",
            "joining the weight group",
            master_address=host,
            master_port=port,
            rank_offset=rank,
            world_size=size,
            group_name=name,
            backend=backend,
        )

    def leave_weight_group(self, name):
        """Leaves it again; returns when all have left."""
        self.request("destroy_weights_update_group", "leaving the weight group", group_name=name)

    def flush(self):
        """Empties the prefix cache. Asks until it is done: just after its last token the scheduler is still busy."""
        end = time.monotonic() + self.config["engine_timeout"]
        while not self.run([self.ask(self.manager.flush_cache())], "while flushing its cache")[0].success:
            if time.monotonic() > end:
                raise RunError(f"{self.name}: did not flush its cache; see {self.log}")
            time.sleep(0.002)

    def sleep(self):
        """If it lends: gives up the memory of weights and cache until the next weights come."""
        if self.lends and self.device == "cuda" and not self.can_lend:
            print(f"{self.name}: SGLang lends no memory, its torch_memory_saver is not loaded; see {self.log}")
            self.lends = False  # all else goes on as if it did
        if self.lends:
            self.flush()  # waits until it is idle; on a CPU what it lends are the weights' panels
            self.asleep = True
            if self.device == "cuda":
                self.request("release_memory_occupation", "giving its memory back", tags=LENT)

    @functools.cached_property
    def can_lend(self):
        """Whether SGLang's processes have the library that does it: ld.so leaves one out that it does not find."""
        maps = (Path(f"/proc/{pid}/maps").read_text() for pid in self.sglang.get_all_child_pids())
        return any("torch_memory_saver" in text for text in maps)

    def wake(self):
        """Takes the memory again; what was in it is lost."""
        if self.asleep:
            self.asleep = False
            host.give_memory_back()  # what this rank's trainer holds and does not use now
            if self.device == "cuda":
                self.request("resume_memory_occupation", "taking its memory again", tags=LENT)

    def _load(self, name, version, last, **weights):
        """Has SGLang take some of the weights of `version`; with the last of them the engine holds it."""
        self.wake()
        self.version = version
        if last:  # SGLang flushes too and asserts that it worked: old keys under new weights would spoil every sample
            self.flush()
            weights["weight_version"] = str(version)
        self.request(name, f"loading weights {version}", flush_cache=last, **weights)

    def receive_weights(self, bucket, dtype, version, last):
        """One bucket [(name, shape)], of which each trainer broadcasts its rows (receive_rows)."""
        names, shapes = zip(*bucket)
        self._load(
            "update_weights_from_distributed",
            version,
            last,
            names=[*names],
            dtypes=[str(dtype).removeprefix("torch.")] * len(bucket),
            shapes=[*map(list, shapes)],
        )

    def take_weights(self, tensors, version, last):
        """One bucket [(name, tensor)] out of this process's own memory."""
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        flat = FlattenedTensorBucket(named_tensors=tensors)
        content = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        self._load(
            "update_weights_from_tensor",
            version,
            last,
            load_format="flattened_bucket",
            serialized_named_tensors=[MultiprocessingSerializer.serialize(content)],
        )

    def check_weights(self, expected):
        """Raises RunError unless the parameters the engine computes with have these hashes, {name: hash}."""
        import zmq

        self.sglang.send_to_rpc.rcvtimeo = int(1000 * self.config["engine_timeout"])
        try:
            self.sglang.collective_rpc("check_weights", expected=expected)
        except zmq.Again:
            raise self.silent("while its weights were checked")
        except Exception as e:
            raise RunError(f"{self.name}: weights {self.version} did not arrive as sent: {e}")


# ------------------------------------------------------------------------------------------------------------------
# samples


SCORERS = ThreadPoolExecutor(64, "reward")  # rewards are worked out beside the engine, which does not wait for them


def sampling_seed(*key):
    """
    64 bits, signed, of (seed, stream, step, prompt, sample, turn): each sample its own, whoever draws it. seed: the
    config's for noise; step, prompt: those with which the sample was begun.
    """
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little", signed=True)


def sampling_of(c):
    return kernels.Sampling(c.temperature, c.top_p, c.top_k, c.min_p)


class Job(NamedTuple):
    """Prompts that the engines are to sample together: a step's, or the held-out ones."""

    stream: str  # 'rl' or 'eval'; samples of two streams never share a seed
    step: int  # RL steps done before it
    version: int  # of the weights to sample with
    rows: dict  # {prompt's index in the step: dict(prompt text, answer text, prompt_tokens list)}
    samples: int  # G, per prompt
    sampling: kernels.Sampling  # temperature 0: greedy
    tokens: int = 0  # most tokens that each sample gets in this job; 0: as many as max_new_tokens leaves it
    begun: dict = {}  # {prompt's index: ((step, index) with which its group was begun, the group so far or None)}


@dataclass
class Sampler:
    """Makes samples with one engine: prompts in, group files out."""

    engine: RolloutEngine
    config: dict  # the keys of train_grpo.py's block
    run: str  # the run's id
    engines: int  # of the run
    rewards: dict  # {source of the data: load_reward's function}
    decode: Callable  # tokens -> text
    stop_tokens: list  # a sample ends with the first of them

    def params(self, job, seed, **others):
        """What SGLang is told of a request."""
        return job.sampling._asdict() | dict(
            top_k=job.sampling.top_k or -1,
            sampling_seed=seed,
            ignore_eos=self.config["ignore_eos"],
            stop_token_ids=self.stop_tokens,
            **others,
        )

    def sample(self, folder, job, prompts):
        """
        Samples prompts of this job and writes their group files into `folder`, which exists. prompts: an iterator of
        their indices, which the engines share: each engine has an even share in flight, and takes the next prompt when
        one is done.
        """
        share = -(-len(job.rows) // self.engines)
        self.seed = noise_seed(self.config, job.stream)
        self.job_began = time.time()
        self.worked_before = self.engine.worked()
        try:
            self.engine.run([self._work(prompts, folder, job) for _ in range(share)], f"in step {job.step}")
        except RewardError as e:
            self.engine.fail(str(e))

    async def _work(self, prompts, folder, job):
        """Prompts one after the other, from the counter to the file."""
        for index in prompts:
            if group_path(folder, index).exists():
                continue
            row = job.rows[index]
            began = time.time()
            tensors, meta = await self._group(folder, index, job)
            elapsed = time.time() - self.job_began
            meta |= dict(
                run=self.run,
                stream=job.stream,
                step=job.step,
                prompt=index,
                version=job.version,
                prompt_text=row["prompt"],
                answer=row["answer"],
                source=row.get("source", ""),
                engine=self.engine.index,
                time=time.strftime("%Y-%m-%dT%H:%M:%S"),
                began=began,
                elapsed=elapsed,
                idle=elapsed - (self.engine.worked() - self.worked_before),
            )
            await asyncio.to_thread(write_group, group_path(folder, index), tensors, meta)  # it waits for the disk

    async def _group(self, folder, index, job):
        """A prompt's samples of one turn: (tensors, meta) of the group file."""
        row = job.rows[index]
        began = time.time()
        # a fresh prompt, which nothing is drawn of, or a partial rollout, begun at an earlier step
        born, group = job.begun.get(index, ((job.step, index), None))
        seeds = [sampling_seed(self.seed, job.stream, *born, g, 0) for g in range(job.samples)]
        samples = [Drawn([], [], []) for _ in seeds]
        if group:  # as far as its file has them
            rows = group.rows("tokens", "logprobs", "weight_version")
            samples = [Drawn(*(part.tolist() for part in row)) for row in rows]
        retractions = await self._draw(samples, row["prompt_tokens"], seeds, job)
        seconds = time.time() - began
        texts = [self.decode(sample.tokens) for sample in samples]
        finished = all(map(self._is_finished, samples))
        scored = [(0.0, {})] * len(samples)
        if finished:
            where = f"{job.stream} step {job.step}, prompt {index}, sample "
            reward = self.rewards[row.get("source", "")]
            call = functools.partial(reward, row=row["columns"]) if "columns" in row else reward
            calls = [(call, row["prompt"], x, row["answer"], f"{where}{g}") for g, x in enumerate(texts)]
            # Those that wait for a process or an answer do so side by side; others would only wake each other.
            parts = [[call] for call in calls] if reward.waits else [calls]
            run = functools.partial(asyncio.get_running_loop().run_in_executor, SCORERS, score_all)
            scored = [*itertools.chain(*await asyncio.gather(*map(run, parts)))]
        rewards, noted = zip(*scored)
        meta = dict(
            born=list(born), finished=finished, responses=texts, noted=noted, seconds=seconds, retractions=retractions
        )
        return self._tensors(row, samples, seeds, rewards), meta

    def _is_finished(self, sample):
        ended = not self.config["ignore_eos"] and {*sample.tokens[-1:]} & {*self.stop_tokens}
        return ended or len(sample.tokens) == self.config["max_new_tokens"]

    async def _draw(self, samples, prompt, seeds, job):
        """Draws the job's tokens for the unfinished samples of a prompt; returns SGLang's number of retractions."""
        unfinished = [(sample, seed) for sample, seed in zip(samples, seeds) if not self._is_finished(sample)]
        params = []
        for sample, seed in unfinished:
            left = self.config["max_new_tokens"] - len(sample.tokens)
            params.append(self.params(job, seed, max_new_tokens=min(left, job.tokens or left)))
        outputs = await self.engine.generate([prompt + sample.tokens for sample, _ in unfinished], params)
        for (sample, _), output in zip(unfinished, outputs):
            for field, more in zip(sample, self.engine.drawn(output, job.version)):  # tokens, log-probs, versions
                field.extend(more)
        return sum(output["meta_info"]["num_retractions"] for output in outputs)

    def _tensors(self, row, samples, seeds, rewards):
        """The tensors of a group file: the samples' tokens end to end, T in all, which `lengths` cuts apart again."""
        tokens, logprobs, versions = (torch.tensor([*itertools.chain(*field)]) for field in zip(*samples))
        return dict(
            prompt_tokens=torch.tensor(row["prompt_tokens"]),
            lengths=torch.tensor([len(s.tokens) for s in samples]),  # (G,)
            tokens=tokens,  # (T,)
            logprobs=logprobs,  # (T,)
            loss_mask=torch.ones(len(tokens)).bool(),  # one turn: every token is the model's own, EOS too
            weight_version=versions,  # (T,)
            truncated=torch.tensor([s.tokens[-1] not in self.stop_tokens for s in samples]),  # (G,)
            seeds=torch.tensor(seeds),  # (G,)
            rewards=torch.tensor(rewards),  # (G,)
            sample=torch.arange(len(samples)),  # (G,) as the next two: a row each, of one turn
            turns=torch.ones(len(samples)).long(),
            turn_rewards=torch.tensor(rewards),
            turn=torch.zeros_like(tokens),  # (T,)
        )


# ------------------------------------------------------------------------------------------------------------------
# what a step trains on


class Flight(NamedTuple):
    """Groups that were begun and that no step has trained on yet: all that one step's samples pass on to the next's."""

    begun: int = 0  # number of prompts begun so far, in the order of the data
    groups: tuple = ()  # in that order
    seen: dict = {}  # for a curriculum: {(source, row): number of right samples when it was last seen}


class Batch(NamedTuple):
    groups: list  # the P Groups to train on
    sampled: list  # of all that were sampled for the step
    flight: Flight  # what is in flight after it


def sample_step(queue, step, rows, c, version, flight):
    """
    Has the engines make samples (Queue.sample, Sampler.sample, SGLang's async_generate); returns the Batch of RL step
    `step` on every rank, in the order of the prompts. With dynamic sampling (DAPO, equation 11) groups of equal rewards
    are replaced by the next round's; if groups are missing after the last round, the first of those dropped fill up the
    batch. Each round has its own prompts, so the number of rounds in a step changes no other step's prompts.
    """
    if c.segment_tokens:
        return sample_segments(queue, step, rows, c, version, flight)
    kept = []
    dropped = []
    rounds = 1 + c.dynamic_sampling
    P = c.prompts_per_step
    seen = dict(flight.seen)
    for k in range(rounds):
        places = draw_rows(rows, P, step * rounds + k, c, "rl", flight.seen)
        # The numbers of a round's prompts go on from the round before: they are part of a sample's seed.
        prompts = {i: rows[source][row] for i, (source, row) in enumerate(places, k * P)}
        groups = queue.sample(Job("rl", step, version, prompts, c.group_size, sampling_of(c)))
        for place, group in zip(places, groups):
            rewards = group.tensors["rewards"]
            equal = c.dynamic_sampling and len(rewards.unique()) == 1
            (dropped if equal else kept).append(group)
            if c.curriculum:
                seen[place] = int((rewards >= c.pass_reward).sum())
        if len(kept) >= P:
            break
    sampled = kept + dropped
    return Batch(sampled[:P], sampled, flight._replace(seen=seen))


def sample_segments(queue, step, rows, c, version, flight):
    """
    The same with partial rollouts (Kimi k1.5, arXiv:2501.12599, 3.2; APRIL, arXiv:2509.18521), cut by counts alone.
    Each step every unfinished sample in flight gets up to `segment_tokens` more, and goes on from its own tokens; fresh
    prompts fill the flight up. The step trains on the first P finished groups in the order in which they were begun;
    where fewer are finished, all go on under the same weights.
    """
    P = c.prompts_per_step
    places = c.groups_in_flight
    sampled = []
    begun = flight.begun + places - len(flight.groups)
    born = [tuple(group.meta["born"]) for group in flight.groups]
    born += [divmod(n, P) for n in range(flight.begun, begun)]
    drawn = {s: draw_rows(rows, P, s, c, "rl") for s in dict(born)}
    prompts = [rows[source][row] for source, row in (drawn[s][i] for s, i in born)]
    groups = [*flight.groups, *[None] * (begun - flight.begun)]
    for first in itertools.count(0, places):  # a file's number says in which round it was made, and for which place
        todo = [i for i, group in enumerate(groups) if not (group and group.meta["finished"])]
        asked = {first + i: prompts[i] for i in todo}
        before = {first + i: (born[i], groups[i]) for i in todo}
        grown = queue.sample(Job("rl", step, version, asked, c.group_size, sampling_of(c), c.segment_tokens, before))
        sampled += grown
        for i, group in zip(todo, grown):
            groups[i] = group
        finished = [i for i, group in enumerate(groups) if group.meta["finished"]]
        if len(finished) >= P:
            break
    chosen = finished[:P]
    rest = tuple(group for i, group in enumerate(groups) if i not in chosen)
    return Batch([groups[i] for i in chosen], sampled, Flight(begun, rest))
