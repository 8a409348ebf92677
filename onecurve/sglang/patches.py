"""
Our replacements in SGLang 0.5.17, in the process of its scheduler, which runs the model. SGLang has no switch for them.

    patches         the table: what is replaced, by what, and why
    install         replaces it
    run_scheduler   does so, and then what SGLang's process does

The replacements are below the table, and for a model's layers in onecurve/models/. An agent's are in a table of the
same form (onecurve/agents/scheduler.py).
"""

import copy
import functools
import importlib
import itertools
import math
import os
import pkgutil
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

import kernels
from onecurve.cpu import host
from onecurve.models import dense, moe
from onecurve.sglang.start import allow_deterministic_backend
from sync import FOREVER, from_all_ranks, rounded_to, tensor_hashes

ATTENTION_BACKEND = {"cpu": "torch_native", "cuda": "triton"}  # SGLang's names; ours takes their place


class Around(NamedTuple):
    """Takes the place of a function of SGLang's, `own`, which `call` gets before the arguments."""

    call: Callable

    def of(self, own):
        return lambda *args, **kwargs: self.call(own, *args, **kwargs)


def patches(config, device, enable, inv_freq, lends):
    """
    Yields (what in sglang.srt is replaced, by what); a comment above each row says why. The modules are imported in
    this order. Arguments as in `run_scheduler`; enable: kernels.enable_batch_invariant.
    """
    # deterministic mode switches its Triton kernels on
    yield "batch_invariant_ops:enable_batch_invariant_mode", enable if inv_freq else lambda: None
    # it draws from the log of a softmax, and returns the log-probs from before a sampling rule
    yield "layers.sampler:Sampler.forward", sample_tokens
    if device == "cpu":
        # its RoPE imports vLLM
        yield "layers.rotary_embedding.base:_is_cpu", True
        # it makes groups for a CUDA device
        yield "distributed.parallel_state:GroupCoordinator.__init__", Around(group_on_cpu)
        # on ARM it calls a library that it does not bring
        yield "distributed.bootstrap:_is_cpu_arm64", False
        yield "distributed.parallel_state:is_shm_available", lambda *_: False
    else:
        # SGLang has nvcc compile these at the first steps; the first is for its own layers, with batch_invariant=False
        yield "mem_cache.memory_pool:can_use_store_cache", lambda *_: False
        from sglang.srt.model_executor import forward_batch_info

        yield "model_executor.forward_batch_info:clamp_position", forward_batch_info._clamp_position_native
        # it gives memory back at once
        yield "utils.torch_memory_saver_adapter:_TorchMemorySaverAdapterReal.pause", Around(pause)
        # it charges its cache with what anybody else on the card has taken meanwhile
        yield "mem_cache.kv_cache_configurator:KVCacheConfigurator._profile_available_bytes", bytes_for_cache
    parts = "model_executor.model_runner_components"
    if inv_freq:
        # it multiplies float16, which kernels.py refuses
        yield f"{parts}.attention_backend_setup:init_cublas", lambda: None
    # it receives whole tensors from one sender
    yield f"{parts}.weight_updater:WeightUpdater.update_weights_from_distributed", receive_rows
    # it is silent where a folder lacks weights
    yield "model_loader.loader:DefaultModelLoader.load_weights_and_postprocess", Around(load_all)
    if inv_freq:
        # it computes with other operators; these names are above its choice of a platform's kernel
        yield "distributed.parallel_state:GroupCoordinator.all_reduce", dense.add_rows
        yield "layers.layernorm:RMSNorm.forward", dense.norm_in_engine
        yield "layers.logits_processor:LogitsProcessor._compute_lm_head", dense.head_in_engine
        each = config["engine_bits"].endswith(":act")
        in_one_call = device == "cpu" and config["tp_split"] == 1 and not each and not kernels.INTERPRET
        layer = dense.layer_in_engine(config["tp_split"], in_one_call)
        for kind in dense.MODEL_TYPES:
            yield f"models.{kind}:{dense.class_name(kind)}DecoderLayer.forward", layer
    # it makes some ten calls for each token
    name = "scheduler_components.batch_result_processor:SchedulerBatchResultProcessor.process_batch_result_decode"
    yield f"managers.{name}", Around(keep_tokens)
    # it wants a parameter for each expert; its blocks do not show the experts' as a dense MLP does
    yield "models.qwen3_moe:Qwen3MoeForCausalLM.load_weights", Around(moe.load_weights)
    for theirs, ours in moe.OF_SGLANG.items():
        yield f"models.qwen3_moe:Qwen3MoeSparseMoeBlock.{ours}", moe.shown_as(theirs)
    # it keeps what our operators have of the old weights
    yield "managers.scheduler:Scheduler.flush_cache", Around(functools.partial(flush_cache, lends and device == "cpu"))
    # there is no such method; Engine.collective_rpc calls it
    yield "managers.scheduler:Scheduler.check_weights", check_weights
    # it leaves a name in /dev/shm, of statistics for a router
    yield "managers.scheduler:create_load_snapshot_writer", lambda *_, **__: None


def install(rows):
    """Makes the replacements of a table like `patches`."""
    for path, ours in rows:
        owner, name = re.fullmatch("(.+)[.:](.+)", path).groups()
        owner = pkgutil.resolve_name(f"sglang.srt.{owner}")
        if isinstance(ours, Around):
            ours = ours.of(getattr(owner, name))
        if isinstance(vars(owner).get(name), staticmethod):
            ours = staticmethod(ours)
        setattr(owner, name, ours)


def run_scheduler(config, threads, cores, inv_freq, lends, more, server_args, *args):
    """
    SGLang's scheduler process, with our operators unless inv_freq is None; its `run_scheduler_process_func`. cores,
    lends, more (patches): as in RolloutEngine.
    """
    from sglang.srt import models

    # SGLang would import all its two hundred models before it picks one: seconds
    others = {module.name for module in pkgutil.iter_modules(models.__path__)} - set(dense.MODEL_TYPES)
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(others)
    device = server_args.device
    kernels.choose_dtype(device, config["dtype"])
    enable = functools.partial(kernels.enable_batch_invariant, threads, cores)
    install(patches(config, device, enable, inv_freq, lends))
    install(more)
    if device == "cpu":
        torch.set_num_threads(threads)
        allow_deterministic_backend()
        host.panel_cache = {}
        os.environ["SGLANG_EAGER_INPUT_NO_COPY"] = "1"  # no copy into buffers that only a graph would need
    if inv_freq:
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        register_attention_backend(ATTENTION_BACKEND[device])(dense.paged_attention(inv_freq))
        if config["engine_bits"].endswith(":act"):
            round_operators(config["engine_bits"])
        # the next batch may write the page table once this one has read it: SGLang's own backend copies it before a
        # graph's replay, PagedAttention reads it until the end
        os.environ["SGLANG_FORCE_COARSE_WAR_BARRIER"] = "1"
        # for its own backend's sake SGLang would cut prefills at multiples of 4096, and wait for ever for larger chunks
        os.environ["SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE"] = "1"
    leave_nothing_open()
    from sglang.srt.managers.scheduler import run_scheduler_process

    run_scheduler_process(server_args, *args)


def sample_tokens(self, output, info, _, likeliest, chosen, positions):
    """
    A draw from the log-softmax whose log-probs it returns, of the tokens that each request's rule keeps. Greedy
    requests, to SGLang of temperature 1 and top_k=1, have the log-probs of all tokens.
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


def ends_of(req):
    """The tokens that end a request; None where SGLang has more to do with each: strings that end it, a stream, .."""
    params = req.sampling_params
    if req.grammar or req.stream or params.stop_strs or params.stop_regex_strs or not req.return_logprob:
        return None
    if params.ignore_eos:
        return set()
    known = req.tokenizer and [req.tokenizer.eos_token_id, *(req.tokenizer.additional_stop_token_ids or ())]
    return {*(params.stop_token_ids or ()), *(req.eos_token_ids or ()), *(known or ())}


def keep_tokens(own, self, batch, result):
    """
    Takes in the tokens and log-probs of a decode step. SGLang's own way, `own`, is left to requests that end or report
    with this token.
    """
    from sglang.srt.managers.scheduler_components.output_streamer import DEFAULT_FORCE_STREAM_INTERVAL

    output = result.logits_output
    if not batch.return_logprob or output.next_token_top_logprobs_val or output.next_token_token_ids_logprobs_val:
        return own(self, batch, result)
    if result.copy_done:
        result.copy_done.synchronize()
    rest = []
    drawn = zip(batch.reqs, result.next_token_ids.tolist(), output.next_token_logprobs.tolist())
    for i, (req, token, logprob) in enumerate(drawn):
        if not hasattr(req, "ends"):
            req.ends = ends_of(req)
        n = len(req.output_ids) + 1
        last = req.ends is None or token in req.ends or n >= req.sampling_params.max_new_tokens
        if last or n % DEFAULT_FORCE_STREAM_INTERVAL == 0 or req.finished() or req.is_retracted or req.to_finish:
            rest.append(i)
        else:
            req.output_ids.append(token)
            req.logprob.output_token_logprobs_val.append(logprob)
            req.logprob.output_token_logprobs_idx.append(token)
    if rest:
        part = copy.copy(batch)
        part.reqs = [batch.reqs[i] for i in rest]
        output = replace(output, next_token_logprobs=output.next_token_logprobs[rest])
        own(self, part, replace(result, next_token_ids=result.next_token_ids[rest], logits_output=output))


def receive_rows(self, names, dtypes, shapes, *_):
    """
    Receives each trainer's rows of all tensors in one piece, in the group that it has with all workers. Returns
    (whether it worked, why not).
    """
    groups = self._model_update_group.values()  # in the order of the trainers: in every worker the same, as NCCL wants
    try:
        dtype = getattr(torch, dtypes[0])
        alone = len(groups) == 1  # then the piece is the tensors
        tensors = [torch.empty(shape, dtype=dtype, device="meta" if alone else self.device) for shape in shapes]
        cut = [x.chunk(len(groups)) for x in tensors]  # as FSDP2 cuts them: the last trainers may have no rows
        for r, group in enumerate(groups):
            rows = [parts[r] for parts in cut if r < len(parts)]
            sizes = [x.numel() for x in rows]
            piece = torch.empty(sum(sizes), dtype=dtype, device=self.device)
            dist.broadcast(piece.view(torch.uint8), src=0, group=group)
            parts = [part.view(x.shape) for x, part in zip(rows, piece.split(sizes))]
            if alone:
                tensors = parts
            else:
                for x, part in zip(rows, parts):
                    x.copy_(part)
        self.get_model().load_weights([*zip(names, tensors)])
    except Exception as e:
        return False, str(e)
    return True, ""


def group_on_cpu(own, group, **options):
    own(group, **options | dict(use_pynccl=False, use_custom_allreduce=False))


def bytes_for_cache(self, before):
    """
    The share `engine_memory` of the GiB that were free `before` this engine loaded its weights, less those. Raises
    ValueError where others have taken too much of it meanwhile, unless max_total_tokens says how much is needed.
    """
    from sglang.srt.mem_cache.kv_cache_configurator import get_schedule, get_world_group

    torch.cuda.empty_cache()  # what loading left is free
    share = get_schedule().mem_fraction_static
    wanted = share * before - torch.cuda.memory_reserved() / 2**30
    free = torch.cuda.mem_get_info()[0] / 2**30
    # all ranks of an engine get the same
    wanted, free = map(min, zip(*from_all_ranks((wanted, free), get_world_group().cpu_group)))
    if min(wanted, free) <= 0 or free < wanted and not get_schedule().max_total_tokens:
        found = f"the cache would get {wanted:.2f} of {before:.2f} GiB that were free, and {free:.2f} are left"
        cure = "use another share, or max_total_tokens in engine_args, or start when others have left the card"
        raise ValueError(f"engine_memory={share:g}: {found}; {cure}")
    return int(min(wanted, free) * 2**30)


def pause(own, self, tag):
    torch.cuda.synchronize()  # kernels after the last sample may still read memory that is then unmapped
    own(self, tag)


def load_all(own, model, weights, device):
    """SGLang's loading of a model folder, `own`. Raises ValueError, with names, if it leaves parameters out."""
    for p in model.parameters():
        p.data.fill_(math.nan)
    own(model, weights, device)
    if left := [name for name, p in model.named_parameters() if p.isnan().any()]:
        raise ValueError(f"weights that are in no file, or not a number: {', '.join(left[:3])}")


def flush_cache(gives_back, own, self, *args, **kwargs):
    """Comes with every change of the weights. gives_back: unused memory of this process goes back to the system."""
    if host.panel_cache:
        host.panel_cache.clear()
    if gives_back:
        host.give_memory_back()
    self.tree_cache.disable_finished_insert = True  # no sample continues another's end
    return own(self, *args, **kwargs)


def check_weights(scheduler, expected):
    """
    Raises ValueError, with names, unless the parameters of the model that the engine's schedulers run together are
    those of `expected`, {Hugging Face's name: hash}, and have these hashes. {} is not compared.
    """
    found = list(dense.hugging_face_parameters(scheduler.tp_worker.model_runner.model)) if expected else []
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


def round_operators(bits):
    """Rounds the results of kernels.py's operators in this process, by `rounded_to`, to these bits."""

    def rounded(operator):
        def call(*args, **kwargs):
            out = operator(*args, **kwargs)
            if isinstance(out, tuple):
                return tuple(rounded_to(x, bits) for x in out)
            return rounded_to(out, bits)

        return call

    for name in ("linear", "rms_norm", "norm_rope", "swiglu", "moe", "attention"):
        setattr(kernels, name, rounded(getattr(kernels, name)))
    kernels.norm_rope_to_cache = functools.partial(kernels.norm_rope_to_cache, in_one=False)


def leave_nothing_open():
    """
    No port for other machines: torch's store would accept connections from any host, without authentication; here all
    ranks use the one that `start_engine` made. No name in /dev/shm, which a kill would leave there, of tqdm's lock.
    """
    from tqdm import tqdm

    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # torch.distributed has a function so called
    rendezvous._create_c10d_store = lambda host, port, *_: dist.TCPStore(host, port, timeout=FOREVER)
    tqdm.set_lock(threading.RLock())
