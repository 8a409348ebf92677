"""
What a trainer's step may reach on CUDA beside our operators: nothing whose order of sums is not ours.

    pytest tests/test_dispatch.py

Every aten operator of a step is written down, on a CPU, where all but our own operators are the same as on CUDA.
"""

import functools
import types

import pytest
import torch
from test_trainer import make_samples
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import train_grpo as train
from onecurve.models import dense
from onecurve.models.dense import MODEL_TYPES
from onecurve.models.moe import KIND
from sync import Ranks

# our operators, whose order of sums tests/test_kernels.py and tests/test_triton.py prove
SEALED = ("rms_norm", "norm_rope", "rope_table", "swiglu", "moe", "attention", "token_logprobs", "row_sums")
ALLOWED = {  # why: operators. A leaf has the same rows on any number of ranks, so sums over it need a fixed order only
    "replaced by enable_batch_invariant": "mm addmm embedding_dense_backward",
    "element by element": """
        abs add add_ clamp div eq exp ge gt le log logical_and_ lt masked_fill_ minimum mul mul_ ne neg pow pow_
        reciprocal sqrt sub where _foreach_add_ _foreach_mul_""",
    "moves, makes or reads": """
        _local_scalar_dense _to_copy _unsafe_view alias arange as_strided cat clone constant_pad_nd copy_ detach
        embedding empty empty_like expand full index index_select lift_fresh new_zeros ones_like repeat_interleave
        scalar_tensor
        select select_backward slice split split_with_sizes squeeze stack t transpose unbind unsqueeze view zeros
        zeros_like fsdp.chunk_cat profiler._record_function_enter_new profiler._record_function_exit""",
    "whole numbers; the largest": """
        __rshift__ amax any bincount bitwise_and bitwise_or bitwise_xor cumsum max mean(1) nonzero sort whole_sum()
        whole_sum(1) _unique2 searchsorted""",
    "of all losses of a leaf": "sum()",
    "over the rows of a leaf, a bias' gradient": "sum(0)",
    "what a leaf's routers do, by the sums that enable_batch_invariant puts in": "sum(-1) mean(0)",
    "backward of a choice of rows, none of them twice": "index_put",
    "adds zeros to one number": "c10d.allreduce_",
    "brings together, as objects, what the ranks have found": "c10d.barrier c10d.allgather_ resize_ set_",
}


EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)


class Sealed(torch.autograd.Function):
    """f(*args), forward and backward hidden from a TorchDispatchMode as one Triton kernel would be."""

    @staticmethod
    def forward(ctx, f, *args):
        ctx.args = [a.detach().requires_grad_(a.requires_grad) if torch.is_tensor(a) else a for a in args]
        with _disable_current_modes(), torch.enable_grad():
            ctx.out = f(*ctx.args)
            return tuple(x.detach() for x in ctx.out) if isinstance(ctx.out, tuple) else ctx.out.detach()

    @staticmethod
    def backward(ctx, *grads):
        needed = [torch.is_tensor(a) and a.requires_grad for a in ctx.args]
        with _disable_current_modes():
            got = iter(torch.autograd.grad(ctx.out, [a for a, x in zip(ctx.args, needed) if x], grads))
        return None, *(next(got) if x else None for x in needed)


class Record(TorchDispatchMode):
    """Writes down the operators that are reached; test_engine.py has the scheduler's process do it, too."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        name = str(f.overloadpacket).removeprefix("aten.")
        if name in ("sum", "mean"):  # it depends on what is added
            whole = "" if args[0].is_floating_point() else "whole_"
            name = f"{whole}{name}({', '.join(str(dim) for dim in args[1]) if len(args) > 1 else ''})"
        self.seen.add(name)
        return f(*args, **(kwargs or {}))


def operators_of_an_update(family, folder, mesh, change, monkeypatch):
    """What `Trainer.update` reaches with a tiny model: forward, backward, check, gradient norm, optimizer, hashes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for name in SEALED:
        f = getattr(train.kernels, name)
        monkeypatch.setattr(train.kernels, name, functools.partial(Sealed.apply, f))
    monkeypatch.setattr(dense, "is_sharded", lambda *_: True)
    hf = AutoConfig.for_model(
        family, vocab_size=98, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=family != KIND, **EXPERTS if family == KIND else {},
    )  # fmt: skip
    AutoModelForCausalLM.from_config(hf).save_pretrained(folder)
    small = dict(lanes=2, leaf_tokens=60, entropy_coef=0.01, temperature=0.7, strict=False, grad_clip=0.1)
    c = types.SimpleNamespace(**train.DEFAULTS | small | change)
    trainer = train.Trainer(c, Ranks(0, 1, 1, 0, mesh, None), hf, folder, "cpu")
    samples = [s._replace(advantages=s.logprobs) for s in make_samples(5) + make_samples(2)]
    before = [s.data.clone() for s in trainer.shards]
    with Record() as record:
        trainer.update(samples, step=0, lr=0.1, check=True)
    assert not any(torch.equal(s.data, w) for s, w in zip(trainer.shards, before))
    return record.seen


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", MODEL_TYPES)
def test_an_update_reaches_no_operator_whose_order_of_sums_is_not_ours(
    mesh, family, checkpointing, monkeypatch, tmp_path
):
    allowed = {name for names in ALLOWED.values() for name in names.split()}
    change = dict(gradient_checkpointing=checkpointing, share_prefixes=True)
    assert operators_of_an_update(family, tmp_path, mesh, change, monkeypatch) <= allowed
    monkeypatch.undo()
    change |= dict(batch_invariant=False)
    caught = operators_of_an_update(family, tmp_path, mesh, change, monkeypatch) - allowed
    assert "mean(-1)" in caught and any("scaled_dot_product" in name for name in caught)  # the libraries' own are
