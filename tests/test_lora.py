"""
LoRA: adapters beside a frozen base, merged on both sides. The laws for it, what the merge and its gradient are, and
PEFT's folder.

    pytest tests/test_lora.py
"""

import json
import shutil
import types

import pytest
import test_trainer
import torch
from conftest import error_of_run, finish, plain_logprobs, shared
from merge import main as merge_folder
from safetensors.torch import load_file, save_file
from test_laws import ledger
from test_stub_card import QWEN3_8B
from test_train import preset
from test_trainer import equal, make_samples, make_trainer, same_bits, weights_of
from transformers import Qwen3Config
from trials import LORA, adapters_apart, interrupt, lines, replay_of, slow_engines
from verify import differing_weight

import train_grpo as train
from configurator import check_config
from onecurve.models import adapters
from onecurve.models.adapters import LINEAR
from onecurve.models.dense import check_model, is_sharded

ranks = test_trainer.ranks
bf16 = torch.bfloat16


# ---- the laws


@pytest.fixture(scope="module")
def base(two_ranks):
    return two_ranks[0] / "ckpt" / "step_000016"


@pytest.fixture(scope="session")
def flags(warmed):
    return *warmed, *LORA


@shared
def lockstep(folder, flags):
    """One trainer and one engine."""
    return finish(folder, *flags, ranks=2)


@shared
def lagged(folder, flags):
    """Two steps ahead, in one process that does both in turn."""
    return finish(folder, *flags, "--lag=2", "--weight_sync=ipc")


def test_a_run_and_its_resume_on_other_ranks_have_one_ledger(lockstep, flags, run, assert_it_learned):
    """On two ranks by broadcast; in one process by shared memory, from step 8 on."""
    assert_it_learned(lockstep[0], steps=16)
    interrupt(lockstep[0], run)
    output = finish(run, *LORA, "--init_from=resume")
    assert "resuming at step 8" in output and ledger(run) == ledger(lockstep[0])
    (entry,) = lines(lockstep[0], "ledger.jsonl", "base")  # the base stands there once, and nothing else of it
    assert entry["weights"].startswith("float32 ")
    trained = lines(lockstep[0], "ledger.jsonl", "rl")[-1]["weights"]
    assert len(trained) == 2 * 2 * len(LINEAR) and all(".lora_" in name for name in trained)


def test_four_trainers_that_keep_no_activations_replay_the_same_ledger(lockstep, flags, run):
    more = ("--gradient_checkpointing", "--checkpoint_every=0")
    finish(run, *flags, *more, *replay_of(lockstep[0]), ranks=4)
    assert ledger(run) == ledger(lockstep[0])


def test_side_by_side_with_a_lag_it_is_the_ledger_of_the_same_in_turn(lagged, lockstep, flags, run, assert_it_learned):
    """Two trainers, two engines that are slow at random."""
    more = ("--lag=2", "--rollout_ranks=2")
    finish(run, *flags, *more, ranks=4, broken=slow_engines)
    assert_it_learned(lagged[0], steps=16)
    assert ledger(run) == ledger(lagged[0]) != ledger(lockstep[0])
    staleness = [m["staleness"] for m in lines(lagged[0], "metrics.jsonl", "rl")]
    assert staleness == [0, 1, *[2] * 14]
    kept = load_file(next((lagged[0] / "ckpt/step_000016/optimizer").glob("*.safetensors")))
    assert kept and all("lora_" in name for name in kept)  # an earlier version is a version of the adapters


def test_control_adapters_only_the_engine_merges_are_caught_when_nonzero(flags, run):
    error = error_of_run(run, *flags, "--max_steps=3", "--eval_size=0", broken=adapters_apart)
    assert error.startswith("error: step 1, prompt")


# ---- the trainer


@pytest.fixture
def trainer(ranks, base):
    """trainer(folder, **change): of a folder's model, whose matmuls are ours."""
    return lambda folder=base, **change: make_trainer(ranks, folder, **dict(init_from=str(base)) | change)


def logprobs(trainer, samples):
    with torch.no_grad():
        return trainer.model.token_logprobs(train.pack(samples, "cpu"))[0]


@pytest.fixture
def adapted(trainer):
    """A LoRA trainer whose B are not 0."""
    ours = trainer(lora_rank=4, lora_alpha=6.0)
    generator = torch.Generator().manual_seed(0)
    for s in ours.shards:
        s.data.copy_(torch.randn(s.data.shape, generator=generator) / 8)
    return ours


def save(trainer, folder):
    folder.mkdir()
    trainer.parts.save(folder)
    return folder


def test_new_adapters_keep_every_bit_of_the_base_on_any_number_of_ranks(trainer):
    samples = make_samples(9)
    ours = trainer(lora_rank=4)
    assert same_bits(logprobs(trainer(), samples), logprobs(ours, samples))
    parts = []
    for s in ours.shards:  # the rows that the second of three ranks would have
        rows = -(-s.shape[0] // 3)
        part = s.data[rows : 2 * rows].clone()
        parts.append(s._replace(first=rows, data=torch.full_like(part, 9)))
        if s.name.endswith("lora_A.weight"):
            bound = s.shape[1] ** -0.5
            assert s.data.abs().max() <= bound
            assert s.data.abs().mean() > 0.4 * bound
            assert len(s.data.unique()) > 0.99 * s.data.numel()
    adapters.load_adapters(parts, "", ours.c, "")
    for s, part in zip(ours.shards, parts):
        assert torch.equal(part.data, s.data[part.first : part.first + len(part.data)])


def test_the_merged_folder_gives_the_trainers_logprobs_and_gradients(trainer, adapted, base, tmp_path, refusal):
    """dB = s dW A^T and dA = s B^T dW, from the merged weights' gradient dW, which a LoRA trainer never makes."""
    samples = make_samples(9)
    folder = save(adapted, tmp_path / "adapters")
    merge_folder(str(base), folder, tmp_path / "merged")
    assert "was trained beside another base" in refusal(merge_folder, tmp_path / "merged", folder, tmp_path / "twice")
    full = trainer(tmp_path / "merged")
    assert same_bits(logprobs(full, samples), logprobs(adapted, samples))
    assert not same_bits(logprobs(trainer(), samples), logprobs(adapted, samples))
    dense, _ = full.gradients(samples)
    thin, _ = adapted.gradients(samples)
    dW = {s.name: g.double() for s, g in zip(full.shards, dense)}
    weights = {s.name: s.data.double() for s in adapted.shards}
    found = {s.name: g.double() for s, g in zip(adapted.shards, thin)}
    names = [name for name in dW if name.replace(".weight", ".lora_A.weight") in found]
    assert len(names) == len(found) / 2 == 14
    for name in names:
        a, b = (name.replace(".weight", f".lora_{x}.weight") for x in "AB")
        right = {a: 1.5 * weights[b].t() @ dW[name], b: 1.5 * dW[name] @ weights[a].t()}
        for adapter in (a, b):
            largest = float(right[adapter].abs().max())
            assert largest > 1e-6
            torch.testing.assert_close(found[adapter], right[adapter], rtol=1e-4, atol=1e-5 * largest)


def test_one_trainer_goes_without_fsdp2_unless_it_would_copy_a_large_model():
    one = types.SimpleNamespace(size=lambda: 1)
    two = types.SimpleNamespace(size=lambda: 2)
    for parameters, held_in, sharded in ((1e9, torch.float32, False), (3e9, torch.float32, True), (3e9, bf16, False)):
        model = types.SimpleNamespace(num_parameters=lambda: parameters, dtype=held_in)
        assert is_sharded(one, model, bf16) == sharded
        assert is_sharded(two, model, bf16)


def numbers_in(tensors):
    return sum(x.numel() for x in tensors)


def test_only_adapters_have_gradients_moments_and_versions(trainer):
    full = trainer()
    ours = trainer(lora_rank=4, lag=1)
    count = numbers_in(ours.weights)
    assert 0 < count < numbers_in(full.weights) / 4
    assert {s.name.split(".")[-2] for s in ours.shards} == {"lora_A", "lora_B"}
    assert numbers_in(p for p in ours.model.parameters() if p.requires_grad) == count
    ours.past.keep(1)
    assert numbers_in(s.data for s in ours.past.versions[1]) == count
    assert numbers_in(ours.gradients(make_samples(3))[0]) == count


def test_the_kl_reference_is_the_base_maybe_adapted_and_no_other_model(trainer, adapted, tmp_path):
    samples = make_samples(5)
    like = dict(lora_rank=4, lora_alpha=6.0, kl_coef=0.1)

    def references(trainer):
        return torch.cat([s.reference for s in trainer.forward_only(samples)])

    theirs = trainer(kl_coef=0.1)
    ours = trainer(**like)
    assert ours.reference.model is ours.model and theirs.reference.model is not theirs.model
    for s, other in zip(ours.shards, adapted.shards):
        s.data.copy_(other.data)
    wanted = references(theirs)
    assert same_bits(references(ours), wanted) and wanted.any()
    assert all(equal(weights_of(ours), weights_of(adapted)))  # they are there again
    # As after a rollback: what the adapters were then.
    then = references(trainer(**like, reference=str(save(adapted, tmp_path / "healthy"))))
    assert not same_bits(then, wanted)
    assert same_bits(then, logprobs(adapted, samples))


def test_the_preset_of_an_8b_model_trains_the_adapters_it_accounts_for(mesh, tmp_path):
    config = preset("qwen3_8b_lora")
    for world in (1, 2, 8):
        check_config(config, world, train.DEFAULTS)
    hf = Qwen3Config(**QWEN3_8B)
    hf.save_pretrained(tmp_path)
    model = train.build_model(check_model(tmp_path, config), mesh, "meta", True, lora=config)
    trained = numbers_in(p for p in model.parameters() if p.requires_grad)
    assert trained == 87_293_952
    assert numbers_in(model.parameters()) - trained == pytest.approx(8.19e9, rel=0.01)


# ---- PEFT


def test_peft_loads_a_checkpoint_and_our_trainer_what_peft_writes(lockstep, trainer, base, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    samples = make_samples(4)
    folder = lockstep[0] / "ckpt" / "step_000016"
    like = dict(lora_rank=8, lora_alpha=16.0)
    got = logprobs(trainer(**like, lora=str(folder)), samples)

    def plain(model):
        return torch.cat([plain_logprobs(model, s.tokens, s.loss_at) for s in samples]).detach()

    assert not torch.allclose(plain(AutoModelForCausalLM.from_pretrained(base)), got, atol=1e-2)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    torch.testing.assert_close(plain(model), got, atol=1e-4, rtol=1e-5)
    model.save_pretrained(tmp_path / "peft")
    assert same_bits(got, logprobs(trainer(**like, lora=str(tmp_path / "peft")), samples))


def test_a_checkpoint_is_checked_against_the_ledger_as_in_a_verification(lockstep):
    last = lines(lockstep[0], "ledger.jsonl", "rl")[-1]
    assert differing_weight(lockstep[0] / "ckpt" / "step_000016", last) is None
    assert differing_weight(lockstep[0] / "ckpt" / "step_000008", last).endswith("lora_A.weight")


# ---- what is refused


def altered(folder, new):
    """The path of a copy of a folder."""
    return shutil.copytree(folder, folder.with_name(new))


def test_adapters_that_do_not_fit_are_refused_in_one_line(trainer, adapted, tmp_path, refusal, capsys):
    folder = save(adapted, tmp_path / "adapters")
    other = altered(folder, "other")
    tensors = load_file(other / "adapter_model.safetensors")
    save_file(tensors, other / "adapter_model.safetensors", {"format": "pt", "base": "float32 0123456789abcdef"})
    dora = altered(folder, "dora")
    config = json.loads((dora / "adapter_config.json").read_text())
    (dora / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    fits = dict(lora_rank=4, lora_alpha=6.0)
    ours = dict(lora=str(folder))
    trainer(**fits, **ours)
    others = f"the adapters of {folder} have others; use"
    for change, why in (
        (fits | dict(lora=str(other)), "made for another base than init_from="),
        (fits | dict(lora=str(dora)), "use_dora=True; use plain LoRA"),
        (fits | dict(lora=str(tmp_path)), "no usable adapter_config.json"),
        (ours | dict(lora_rank=8), f"lora_rank=8: {others} 4"),
        (ours | dict(lora_rank=4), f"lora_alpha=32.0: {others} 6.0"),
        (ours | fits | dict(lora_targets="q_proj"), f"lora_targets='q_proj': {others} {','.join(sorted(LINEAR))}"),
        (dict(lora_rank=65), "lora_rank=65: "),
        (dict(lora_rank=4, lora_targets="q_proj,wq"), "lora_targets: no layer has 'wq' to adapt"),
        (dict(lora_rank=4, lora_targets="lm_head"), "lora_targets: no layer has 'lm_head' to adapt"),
    ):
        assert why in refusal(lambda: trainer(**change))
    trainer(lora_rank=4, init_from="scratch")
    assert "warning: lora_rank=4: adapters beside a frozen model of random weights" in capsys.readouterr().err
