"""
The real SGLang engine and the trainer on the Triton kernels, all of them in Triton's interpreter: the hooks, the paged
cache and the kernels together, which a GPU would run. Some tokens of a tiny model, for an interpreter is slow.

    TRITON_INTERPRET=1 pytest tests/triton_engine.py

Run by test_triton.py in a process of its own. float32; `tl.dot` is that of triton_interpreted.py on both sides.
"""

import torch
from test_engine import CONFIG, differing, prompts, roll_out
from triton_interpreted import kernels

import rollout_server
import sync
from models import dense, folders


def interpreted_scheduler(*args, **kwargs):
    """`run_scheduler`, in a process that has imported this file and with it the interpreter's `tl.dot`."""
    rollout_server.run_scheduler(*args, **kwargs)


def test_engine_and_trainer_compute_the_same_logprobs_on_triton(tmp_path, monkeypatch):
    small = dict(scratch_layers=1, scratch_hidden=64, scratch_heads=2, scratch_kv_heads=1, scratch_head_dim=64)
    config = CONFIG | small | dict(scratch_mlp=64, max_new_tokens=5, engine_prefill_chunk=48, engine_kv_tokens=0)
    folders.make_scratch_model(tmp_path, config)
    monkeypatch.setattr(rollout_server, "run_scheduler", interpreted_scheduler)
    ranks = sync.start_process_groups(1, 1, "cpu")
    kernels.enable_batch_invariant()
    hf = dense.check_model(tmp_path, config)
    model = dense.build_model(hf, ranks.mesh, "cpu", True)
    folders.load_weights(sync.shards(model, ranks.mesh), tmp_path, hf.tie_word_embeddings)
    engine = rollout_server.RolloutEngine(0, tmp_path, hf, config, "cpu", torch.float32, tmp_path / "engine.log")
    try:
        groups = roll_out(engine, tmp_path / "queue", prompts(3, seed=1, shared=20), 1.0)
        different, tokens = differing(model, groups, 1.0)
        assert tokens > 20 and different == 0
        assert differing(model, groups, 1.001)[0] > tokens / 2  # the comparison can fail
    finally:
        engine.close()
