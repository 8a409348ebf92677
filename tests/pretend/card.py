"""
The start of an engine on a card that is not there: every preset for GPUs is started as a run starts it, up to the main
loop of SGLang's scheduler. In a process of its own, for it changes torch.cuda and SGLang in place:

    LD_LIBRARY_PATH=folder_of_the_stub_driver python tests/pretend/card.py folder    # writes folder/found.json
"""

import functools
import inspect
import json
import os
import sys
import types
from pathlib import Path
from pkgutil import resolve_name

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import torch  # noqa: E402

PRESETS = dict(
    one_gpu=1, qwen3_0p6b=1, qwen3_8b=8, qwen3_8b_lag=8, qwen3_8b_colocated=8, qwen3_8b_lora=1, qwen3_1p7b_lora=1,
    qwen3_30b_a3b=8, qwen3_32b=16, llama_70b_lora=8,
)  # ranks # fmt: skip
MEMORY = dict(qwen3_30b_a3b=141 << 30, qwen3_32b=141 << 30, qwen3_1p7b_lora=24 << 30)  # bytes of a preset's cards
# what onecurve/sglang/patches.py replaces in SGLang, and the function of SGLang's that has to call it by this name
SRT = "sglang.srt."
HOOKS = {
    "batch_invariant_ops:enable_batch_invariant_mode":
        "model_executor.model_runner:ModelRunner.maybe_enable_batch_invariant_mode",
    "model_executor.forward_batch_info:clamp_position": "model_executor.forward_batch_info:ForwardBatch.init_new",
    "model_executor.model_runner_components.attention_backend_setup:init_cublas":
        "model_executor.model_runner_components.attention_backend_setup:build_attention_backends",
    "mem_cache.memory_pool:can_use_store_cache": "mem_cache.memory_pool:_set_kv_buffer_impl",
    "mem_cache.kv_cache_configurator:KVCacheConfigurator._profile_available_bytes":
        "mem_cache.kv_cache_configurator:KVCacheConfigurator._resolve_memory_pool_config",
    "layers.logits_processor:LogitsProcessor._compute_lm_head": "layers.logits_processor:LogitsProcessor._get_logits",
    "distributed.parallel_state:GroupCoordinator.all_reduce":
        "distributed.communication_op:tensor_model_parallel_all_reduce",
    # called by torch
    "layers.sampler:Sampler.forward": "",
    "layers.layernorm:RMSNorm.forward": "",
    "models.llama:LlamaDecoderLayer.forward": "",
    "models.qwen2:Qwen2DecoderLayer.forward": "",
    "models.qwen3:Qwen3DecoderLayer.forward": "",
}  # fmt: skip


def pretend(memory, chip=(9, 0), cards=8):
    """Makes torch.cuda say that this machine has so many cards of this compute capability and memory, all empty."""
    card = types.SimpleNamespace(
        name="stub", major=chip[0], minor=chip[1], total_memory=memory, multi_processor_count=132
    )
    answers = dict(
        is_available=True, device_count=cards, current_device=0, get_device_capability=chip, get_device_name="stub",
        get_device_properties=card, mem_get_info=(memory, memory), set_device=None,
    )  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)


class Reached(BaseException):
    """SGLang has come as far as it shall. Not an Exception: that would be an engine that did not start."""


def starts(preset, ranks, folder, engine):
    """SGLang's ServerArgs of the first engine of a preset on so many ranks, {name: value}."""
    s, c, _ = plan.read([f"config/{preset}.py", f"--gpus={ranks}"])
    config = {key: vars(c)[key] for key in plan.train_grpo.DEFAULTS}
    shape = dict(
        hidden_size=s.hidden, intermediate_size=s.mlp, num_hidden_layers=s.layers, num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads, head_dim=s.head_dim, vocab_size=s.vocab, tie_word_embeddings=s.tied,
        max_position_embeddings=s.positions, architectures=[f"{class_name(s.kind)}ForCausalLM"],
    )  # fmt: skip
    if s.experts:
        shape |= dict(num_experts=s.experts, num_experts_per_tok=s.active, moe_intermediate_size=s.mlp)
        shape["norm_topk_prob"] = True
    AutoConfig.for_model(s.kind, **shape).save_pretrained(folder / preset)
    pretend(MEMORY.get(preset, 80 << 30))
    os.environ["WORLD_SIZE"] = str(ranks)
    hf = check_model(folder / preset, config)
    trainers, _ = roles(config, ranks)
    log, lends = folder / f"{preset}.log", trainers == ranks
    try:
        rollout_server.RolloutEngine(0, folder / preset, hf, config, "cuda", torch.bfloat16, log, 0, lends)
    except Reached:
        args = vars(engine.mp.args)
    graphs = args["cuda_graph_config"]
    phases = dict(decode_graphs=[graphs.decode.backend, graphs.decode.max_bs], prefill_graphs=graphs.prefill.backend)
    return {k: x for k, x in args.items() if isinstance(x, (int, float, str, type(None)))} | phases


class InProcess:
    """multiprocessing as SGLang's engine sees it: what it wants in a process runs here and now."""

    def __init__(self, target, args):
        self.target, self.args = target, args

    def start(self):
        engine.mp.args = self.args[0]
        self.target(*self.args)


def main_loop(own, *args, **kwargs):
    inspect.signature(own).bind(*args, **kwargs)
    raise Reached


def known(hook):
    """What the hook's name stands for now, None if there is no such name."""
    try:
        return resolve_name(SRT + hook)
    except (ImportError, AttributeError):
        return None


def calls(user, hook):
    name = hook.rpartition(":")[2].rpartition(".")[2]
    return not user or name in inspect.unwrap(resolve_name(SRT + user)).__code__.co_names


folder = Path(sys.argv[1])
pretend(80 << 30)
import plan  # noqa: E402
from sglang.srt.entrypoints import engine  # noqa: E402
from sglang.srt.managers import scheduler  # noqa: E402
from transformers import AutoConfig  # noqa: E402

import rollout_server  # noqa: E402
from configurator import roles  # noqa: E402
from onecurve.models.dense import check_model, class_name  # noqa: E402

scheduler.run_scheduler_process = functools.partial(main_loop, scheduler.run_scheduler_process)
nothing = lambda *_, **__: None  # noqa: E731
engine.mp = types.SimpleNamespace(Process=InProcess, Pipe=lambda **_: (None, None), set_start_method=nothing)
before = {hook: known(hook) for hook in HOOKS}
found = dict(arguments={preset: starts(preset, ranks, folder, engine) for preset, ranks in PRESETS.items()})
found["hooks"] = {
    hook: dict(there=before[hook] is not None, ours=known(hook) is not before[hook], called=calls(user, hook))
    for hook, user in HOOKS.items()
}

from sglang.srt.environ import envs  # noqa: E402
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.models.registry import ModelRegistry  # noqa: E402

attention = ATTENTION_BACKENDS["triton"]
found["attention"] = dict(
    ours=attention.__module__, strange=[x for x in vars(attention) if not hasattr(attention.__base__, x)]
)
found["environment"] = dict(
    barrier=envs.SGLANG_FORCE_COARSE_WAR_BARRIER.get(), align=envs.SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE.get()
)
found["models"] = sorted({model.__module__ for model in ModelRegistry.models.values()})
resolve_name("sglang.srt.batch_invariant_ops:enable_batch_invariant_mode")()  # as SGLang does once it has a model
found["operators"] = {
    name: [line for line in torch._C._dispatch_dump(f"aten::{name}").splitlines() if line.startswith("CUDA:")]
    for name in ("mm", "addmm", "_log_softmax", "_softmax", "embedding_dense_backward")
}
(folder / "found.json").write_text(json.dumps(found))
os._exit(0)  # nothing was started, and SGLang would shut it down
