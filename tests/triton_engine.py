"""
The real SGLang engine and the trainer on the Triton kernels, all of them in Triton's interpreter: the hooks, the paged
cache and the kernels together, in bfloat16, as a GPU would run them. Some tokens of a tiny model, for an interpreter is
slow.

    TRITON_INTERPRET=1 pytest tests/triton_engine.py

Run by test_triton.py in a process of its own. Both sides round to bfloat16 in the same places; where the engine does so
in another one, the tokens' log-probs differ and the operator is named.
"""

import test_engine
import torch
import torch.distributed.fsdp as fsdp
from safetensors.torch import load_file, save_file
from test_engine import CONFIG, differing, prompts, roll_out
from triton_interpreted import kernels

import rollout_server
import sync
from models import dense, folders

bf16, f32 = torch.bfloat16, torch.float32
plain = kernels.rms_norm, kernels.norm_rope, kernels.swiglu


def sum_not_rounded(x, weight, eps, residual=None):
    """The norm of a sum that is rounded only where it goes on."""
    norm, _, _ = plain
    if residual is None:
        return norm(x, weight, eps)
    s = x.to(f32) + residual.to(f32)
    return norm(s, weight.to(f32), eps).to(bf16), s.to(bf16)


def rounded_between(q, k, cos, sin, q_weight, k_weight, eps):
    """The norms of the heads as operators of their own."""
    norm, turn, _ = plain
    return turn(norm(q, q_weight, eps), norm(k, k_weight, eps), cos, sin)


def silu_rounded(gate, up):
    return torch.nn.functional.silu(gate) * up


ELSEWHERE = dict(rms_norm=sum_not_rounded, norm_rope=rounded_between, swiglu=silu_rounded)
OPERATORS = "rms_norm", "norm_rope", "attention", "swiglu"  # which the two sides call in one order


def watch(results, elsewhere):
    """Appends (operator, its result (tokens, ..)) to `results`. elsewhere: [operator that rounds in another place]."""

    def watched(name, own):
        def operator(*args):
            out = (ELSEWHERE[name] if name in elsewhere else own)(*args)
            first = (out[0] if isinstance(out, tuple) else out).detach()
            results.append((name, first if name in ("norm_rope", "attention") else first.flatten(0, -2)))
            return out

        return operator

    for name in OPERATORS:
        setattr(kernels, name, watched(name, getattr(kernels, name)))


def watched_scheduler(*args, **kwargs):
    """
    `run_scheduler`, in a process that has imported this file and with it the interpreter's `tl.dot`, with two RPCs: one
    makes an operator round elsewhere, '' none; one writes down the results since then.
    """
    from sglang.srt.managers.scheduler import Scheduler

    results, elsewhere = [], []
    watch(results, elsewhere)

    def round_elsewhere(self, operator):
        elsewhere[:] = [operator]
        results.clear()

    Scheduler.round_elsewhere = round_elsewhere
    Scheduler.write_results = lambda self, path: torch.save(results, path)
    rollout_server.run_scheduler(*args, **kwargs)


def first_difference(engine, model, results, operator, path):
    """
    The first operator of a prefill whose results differ from those of the trainer's forward pass, 'none' if there is
    none, and how many tokens of a sample have other log-probs.
    """
    engine.flush()
    engine.sglang.collective_rpc("round_elsewhere", operator=operator)
    rows = prompts(1, seed=2)
    groups = roll_out(engine, path, rows)
    engine.sglang.collective_rpc("write_results", path=str(path / "results"))
    results.clear()
    different, _ = differing(model, groups)
    theirs = torch.load(path / "results")[: len(results)]
    assert [name for name, _ in theirs] == [name for name, _ in results] and len(results) == 6
    n = min(len(rows[0]), len(theirs[0][1]))  # of the prompt's first chunk
    wrong = [name for (name, a), (_, b) in zip(theirs, results) if not torch.equal(a[:n], b[:n])]
    return (wrong or ["none"])[0], different


def test_engine_and_trainer_round_to_bfloat16_in_the_same_places(tmp_path, monkeypatch):
    small = dict(scratch_layers=1, scratch_hidden=64, scratch_heads=2, scratch_kv_heads=1, scratch_head_dim=64)
    config = CONFIG | small | dict(scratch_mlp=64, max_new_tokens=5, engine_args="chunked_prefill_size=48")
    monkeypatch.setattr(test_engine, "CONFIG", config)  # roll_out's
    folders.make_scratch_model(tmp_path, config)
    (path,) = tmp_path.glob("*.safetensors")
    weights = {name: w + 0.3 * torch.randn(w.shape) * (w.dim() == 1) for name, w in load_file(path).items()}
    save_file(weights, path, dict(format="pt"))  # norms away from 1, where to multiply by them rounds nothing
    monkeypatch.setattr(rollout_server, "run_scheduler", watched_scheduler)
    ranks = sync.start_process_groups(1, 1, "cpu")
    kernels.enable_batch_invariant()
    hf = dense.check_model(tmp_path, config)
    policy = fsdp.MixedPrecisionPolicy
    with monkeypatch.context() as patch:  # as on CUDA
        patch.setattr(fsdp, "MixedPrecisionPolicy", lambda **options: policy(**options | dict(param_dtype=bf16)))
        patch.setattr(dense, "is_sharded", lambda *_: True)
        model = dense.build_model(hf, ranks.mesh, "cpu", True)
    folders.load_weights(sync.shards(model, ranks.mesh), tmp_path, hf.tie_word_embeddings)
    engine = rollout_server.RolloutEngine(0, tmp_path, hf, config, "cpu", bf16, tmp_path / "engine.log")
    results = []
    try:
        groups = roll_out(engine, tmp_path / "queue", prompts(3, seed=1, shared=20))
        with monkeypatch.context() as patch:
            for name in OPERATORS:
                patch.setattr(kernels, name, getattr(kernels, name))
            watch(results, [])
            different, tokens = differing(model, groups)
            assert tokens > 20 and different == 0
            assert {x.dtype for _, x in results} == {bf16}
            assert differing(model, groups, kernels.Sampling(1.001))[0] > tokens / 2  # the comparison can fail
            for operator in ("", *ELSEWHERE):
                name, different = first_difference(engine, model, results, operator, tmp_path / f"{operator}.")
                assert (name, different > 0) == (operator or "none", bool(operator))
    finally:
        engine.close()
