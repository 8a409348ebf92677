"""
LoRA: adapters beside a frozen base, merged on both sides. The laws for it, what the merge and its gradient are, and
PEFT's folder.

    pytest tests/test_lora.py
"""

import itertools
import json
import shutil
import types

import pytest
import torch
from conftest import error_line, finish, launch_warm
from merge import main as merge_folder
from safetensors.torch import load_file, save_file
from test_laws import ledger
from test_trainer import DEFAULTS, make_samples
from trials import LORA, ROOT, adapters_apart, interrupt, lines, replay_of, slow_engines
from verify import differing_weight

import kernels
import sync
import train_grpo as train
from configurator import check_config, configure
from onecurve.models import adapters
from onecurve.models.adapters import LINEAR
from onecurve.models.dense import check_model, is_sharded


def same(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


# ---- the laws


@pytest.fixture(scope="module")
def base(two_ranks):
    return two_ranks[0] / "ckpt" / "step_000016"


@pytest.fixture(scope="module")
def flags(warmed):
    return *warmed, *LORA


@pytest.fixture(scope="module")
def lockstep(once, flags):
    """One trainer and one engine."""
    return once("lora", lambda folder: finish(folder, *flags, ranks=2, launch=launch_warm))


@pytest.fixture(scope="module")
def lagged(once, flags):
    """Two steps ahead, in one process that does both in turn."""
    more = ("--lag=2", "--weight_sync=ipc")
    return once("lora_lagged", lambda folder: finish(folder, *flags, *more, launch=launch_warm))


def test_a_run_and_its_resume_on_other_ranks_have_one_ledger(lockstep, flags, tmp_path, assert_it_learned):
    """On two ranks by broadcast; in one process by shared memory, from step 16 on."""
    assert_it_learned(lockstep[0], steps=24)
    folder = interrupt(lockstep[0], tmp_path / "run")
    output = finish(folder, *LORA, "--init_from=resume", launch=launch_warm)
    assert "resuming at step 16" in output and ledger(folder) == ledger(lockstep[0])
    steps = lines(lockstep[0], "metrics.jsonl", "rl")
    assert all(m["logprob_mismatch_tokens"] == 0 for m in steps)
    (entry,) = lines(lockstep[0], "ledger.jsonl", "base")  # the base stands there once, and nothing else of it
    assert entry["weights"].startswith("float32 ")
    trained = lines(lockstep[0], "ledger.jsonl", "rl")[-1]["weights"]
    assert len(trained) == 2 * 2 * len(LINEAR) and all(".lora_" in name for name in trained)


def test_four_trainers_that_keep_no_activations_replay_the_same_ledger(lockstep, flags, tmp_path):
    more = ("--gradient_checkpointing", "--checkpoint_every=0")
    finish(tmp_path / "run", *flags, *more, *replay_of(lockstep[0]), ranks=4, launch=launch_warm)
    assert ledger(tmp_path / "run") == ledger(lockstep[0])


def test_side_by_side_with_a_lag_it_is_the_ledger_of_the_same_in_turn(
    lagged, lockstep, flags, tmp_path, assert_it_learned
):
    """Two trainers, two engines that are slow at random."""
    more = ("--lag=2", "--rollout_ranks=2")
    finish(tmp_path / "run", *flags, *more, ranks=4, broken=slow_engines, launch=launch_warm)
    assert_it_learned(lagged[0], steps=24)
    assert ledger(tmp_path / "run") == ledger(lagged[0]) != ledger(lockstep[0])
    assert [m["staleness"] for m in lines(lagged[0], "metrics.jsonl", "rl")] == [0, 1, *[2] * 22]
    kept = load_file(next((lagged[0] / "ckpt/step_000024/optimizer").glob("*.safetensors")))
    assert kept and all("lora_" in name for name in kept)  # an earlier version is a version of the adapters


def test_control_adapters_only_the_engine_merges_are_caught_when_nonzero(flags, tmp_path):
    status, output = launch_warm(tmp_path / "run", *flags, "--max_steps=3", "--eval_size=0", broken=adapters_apart)
    assert status == 2 and error_line(output).startswith("error: step 1, prompt"), output[-3000:]


# ---- the trainer


@pytest.fixture
def trainer(mesh, base):
    """trainer(folder, **change): of a folder's model, whose matmuls are ours."""
    kernels.enable_batch_invariant()

    def make(folder=base, **change):
        c = types.SimpleNamespace(**DEFAULTS | dict(init_from=str(base)) | change)
        return train.Trainer(c, sync.Ranks(0, 1, 1, 0, mesh, None), check_model(folder, vars(c)), folder, "cpu")

    yield make
    kernels.disable_batch_invariant()


def logprobs(trainer, samples):
    with torch.no_grad():
        return trainer.model.token_logprobs(train.pack(samples, "cpu"))[0]


@pytest.fixture
def adapted(trainer):
    """A LoRA trainer whose B are not 0."""
    ours, generator = trainer(lora_rank=4, lora_alpha=6.0), torch.Generator().manual_seed(0)
    for s in ours.shards:
        s.data.copy_(torch.randn(s.data.shape, generator=generator) / 8)
    return ours


def save(trainer, folder):
    folder.mkdir()
    trainer.parts.save(folder)
    return folder


def test_new_adapters_keep_every_bit_of_the_base_on_any_number_of_ranks(trainer):
    samples, full, ours = make_samples(9), trainer(), trainer(lora_rank=4)
    assert same(logprobs(full, samples), logprobs(ours, samples))
    others = {s.name: s.data.clone() for s in ours.shards}
    for s in ours.shards:  # the rows that the second of three ranks would have
        rows = -(-s.shape[0] // 3)
        part = s._replace(first=rows, data=s.data[rows : 2 * rows].clone().fill_(9))
        if s.name.endswith("lora_A.weight"):
            bound = s.shape[1] ** -0.5
            assert s.data.abs().max() <= bound and s.data.abs().mean() > 0.4 * bound
            assert len({float(x) for x in s.data.flatten()}) > 0.99 * s.data.numel()
        others[s.name] = part
    adapters.load_adapters(list(others.values()), "", ours.c, "")
    for s in ours.shards:
        part = others[s.name]
        assert torch.equal(part.data, s.data[part.first : part.first + len(part.data)])


def test_the_merged_folder_gives_the_trainers_logprobs_and_gradients(trainer, adapted, base, tmp_path):
    """dB = s dW A^T and dA = s B^T dW, from the merged weights' gradient dW, which a LoRA trainer never makes."""
    samples = make_samples(9)
    merge_folder(str(base), save(adapted, tmp_path / "adapters"), tmp_path / "merged")
    full = trainer(tmp_path / "merged")
    assert same(logprobs(full, samples), logprobs(adapted, samples))
    assert not same(logprobs(trainer(), samples), logprobs(adapted, samples))
    (dense, _), (thin, _) = full.gradients(samples), adapted.gradients(samples)
    dW = {s.name: g.double() for s, g in zip(full.shards, dense)}
    found = {s.name: (s.data.double(), g.double()) for s, g in zip(adapted.shards, thin)}
    assert len(found) == 28
    for name in (name for name in found if name.endswith("lora_A.weight")):
        (A, dA), (B, dB), of = found[name], found[name.replace("_A", "_B")], dW[name.replace("lora_A.", "")]
        for ours, right in ((dA, 1.5 * B.t() @ of), (dB, 1.5 * of @ A.t())):
            largest = float(right.abs().max())
            assert largest > 1e-6 and torch.allclose(ours, right, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_one_trainer_that_casts_nothing_goes_without_fsdp2(ranks):
    mesh, kinds = types.SimpleNamespace(size=lambda: ranks), itertools.product(("cpu", "cuda"), (None, DEFAULTS))
    plain = {(device, bool(lora)) for device, lora in kinds if not is_sharded(mesh, device, lora)}
    assert plain == ({("cpu", False), ("cpu", True), ("cuda", True)} if ranks == 1 else set())


def test_only_adapters_have_gradients_moments_and_versions(trainer):
    full, ours = trainer(), trainer(lora_rank=4, lag=1)
    count = {t: sum(w.numel() for w in t.weights) for t in (full, ours)}
    assert 0 < count[ours] < count[full] / 4 and {s.name.split(".")[-2] for s in ours.shards} == {"lora_A", "lora_B"}
    assert sum(p.numel() for p in ours.model.parameters() if p.requires_grad) == count[ours]
    ours.past.keep(1)
    assert sum(s.data.numel() for s in ours.past.versions[1]) == count[ours]
    assert sum(g.numel() for g in ours.gradients(make_samples(3))[0]) == count[ours]


def test_the_kl_reference_is_the_base_maybe_adapted_and_no_other_model(trainer, adapted, tmp_path):
    samples, like = make_samples(5), dict(lora_rank=4, lora_alpha=6.0, kl_coef=0.1)
    theirs, ours = trainer(kl_coef=0.1), trainer(**like)
    assert ours.reference.model is ours.model and theirs.reference.model is not theirs.model
    for s, other in zip(ours.shards, adapted.shards):
        s.data.copy_(other.data)
    found, wanted = ours.forward_only(samples), theirs.forward_only(samples)
    assert all(same(a.reference, b.reference) and a.reference.any() for a, b in zip(found, wanted))
    assert all(same(s.data, other.data) for s, other in zip(ours.shards, adapted.shards))  # they are there again
    # As after a rollback: what the adapters were then.
    then = trainer(**like, reference=str(save(adapted, tmp_path / "healthy"))).forward_only(samples)
    assert all(not same(a.reference, b.reference) for a, b in zip(then, wanted))
    assert same(torch.cat([s.reference for s in then]), logprobs(adapted, samples))


def test_the_preset_of_an_8b_model_trains_the_adapters_it_accounts_for(mesh, tmp_path):
    from transformers import Qwen3Config

    name = "config/qwen3_8b_lora.py"
    config = configure(dict(train.DEFAULTS, __file__=str(ROOT / "train_grpo.py")), [str(ROOT / name)])
    for world in (1, 2, 8):
        check_config(config, world, train.DEFAULTS)
    hf = Qwen3Config(
        vocab_size=151936, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, hidden_size=4096,
        intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, tie_word_embeddings=False,
    )  # fmt: skip
    hf.save_pretrained(tmp_path)
    model = train.build_model(check_model(tmp_path, config), mesh, "meta", True, lora=config)
    counts = [sum(p.numel() for p in model.parameters() if p.requires_grad == learns) for learns in (True, False)]
    assert counts[0] == 87_293_952 and counts[1] == pytest.approx(8.19e9, rel=0.01)


# ---- PEFT


def test_peft_loads_a_checkpoint_and_our_trainer_what_peft_writes(lockstep, trainer, base, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, samples = lockstep[0] / "ckpt" / "step_000024", make_samples(4)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    ours = trainer(lora_rank=8, lora_alpha=16.0, lora=str(folder))
    got = logprobs(ours, samples)

    def plain(model):
        every = [torch.log_softmax(model(s.tokens[None]).logits[0, :-1], -1) for s in samples]
        each = [x[s.loss_at - 1].gather(1, s.tokens[s.loss_at, None])[:, 0] for x, s in zip(every, samples)]
        return torch.cat(each).detach()

    assert torch.allclose(plain(model), got, atol=1e-4)
    assert not torch.allclose(plain(AutoModelForCausalLM.from_pretrained(base)), got, atol=1e-2)
    model.save_pretrained(tmp_path / "peft")
    assert same(got, logprobs(trainer(lora_rank=8, lora_alpha=16.0, lora=str(tmp_path / "peft")), samples))


def test_a_checkpoint_is_checked_against_the_ledger_as_in_a_verification(lockstep):
    last = lines(lockstep[0], "ledger.jsonl", "rl")[-1]
    assert differing_weight(lockstep[0] / "ckpt" / "step_000024", last) is None
    assert differing_weight(lockstep[0] / "ckpt" / "step_000016", last).endswith("lora_A.weight")


# ---- what is refused


def test_adapters_that_do_not_fit_are_refused_in_one_line(trainer, adapted, tmp_path, capsys):
    folder = save(adapted, tmp_path / "adapters")
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tensors = load_file(other / "adapter_model.safetensors")
    save_file(tensors, other / "adapter_model.safetensors", {"format": "pt", "base": "float32 0123456789abcdef"})
    dora = tmp_path / "dora"
    shutil.copytree(folder, dora)
    config = json.loads((dora / "adapter_config.json").read_text())
    (dora / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    fits = dict(lora_rank=4, lora_alpha=6.0)
    trainer(**fits, lora=str(folder))
    cases = [
        (fits | dict(lora=str(other)), "made for another base than init_from="),
        (fits | dict(lora=str(dora)), "use_dora=True; use plain LoRA"),
        (fits | dict(lora=str(tmp_path)), "no usable adapter_config.json"),
        (dict(lora_rank=8, lora=str(folder)), f"lora_rank=8: the adapters of {folder} have others; use 4"),
        (dict(lora_rank=4, lora=str(folder)), f"lora_alpha=32.0: the adapters of {folder} have others; use 6.0"),
        (
            fits | dict(lora_targets="q_proj,v_proj", lora=str(folder)),
            f"lora_targets='q_proj,v_proj': the adapters of {folder} have others; use {','.join(sorted(LINEAR))}",
        ),
        (dict(lora_rank=65), "lora_rank=65: "),
        (dict(lora_rank=4, lora_targets="q_proj,wq"), "lora_targets: no layer has 'wq' to adapt"),
        (dict(lora_rank=4, lora_targets="lm_head"), "lora_targets: no layer has 'lm_head' to adapt"),
    ]
    for change, line in cases:
        with pytest.raises(SystemExit) as stopped:
            trainer(**change)
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert stopped.value.code == 2 and said.startswith("error: ") and line in said, said
    trainer(lora_rank=4, init_from="scratch")
    assert "warning: lora_rank=4: adapters beside a frozen model of random weights" in capsys.readouterr().err


def test_a_resume_with_other_lora_keys_is_refused(lockstep, tmp_path):
    folder = interrupt(lockstep[0], tmp_path / "run")
    status, output = launch_warm(folder, *LORA, "--init_from=resume", "--lora_rank=4", timeout=60)
    assert status == 2 and "lora_rank=4 (the run has 8)" in error_line(output)
