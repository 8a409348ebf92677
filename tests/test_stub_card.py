"""
The start of an engine on CUDA, where there is no card: with a stub of the driver, up to the main loop of SGLang's
scheduler. An SGLang that calls a setting or a replaced function otherwise fails here.

    pytest tests/test_stub_card.py
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
from pretend.driver import stub_driver
from transformers import Qwen3Config

from onecurve.models import dense
from onecurve.sglang import patches
from train_grpo import DEFAULTS

ROOT = Path(__file__).parent.parent
# what every preset's engine is to be, by SGLang's own word
ARGUMENTS = dict(
    device="cuda", dtype="bfloat16", attention_backend="triton", sampling_backend="pytorch", bf16_gemm_backend="torch",
    moe_runner_backend="triton",
    enable_deterministic_inference=True, page_size=1, disable_radix_cache=False, disable_overlap_schedule=False,
    disable_cuda_graph=False, prefill_graphs="disabled", skip_tokenizer_init=True,
    max_total_tokens=None, max_running_requests=None, weight_version="0", sleep_on_idle=True, base_gpu_id=0,
)  # fmt: skip
# and what differs: graphs up to so many requests, tokens that a prefill computes at a time (by the card's memory), the
# share of what is free, whether that is lent, cards of an engine
DIFFERENT = "decode_graphs chunked_prefill_size mem_fraction_static enable_memory_saver tp_size".split()
PRESETS = dict(
    one_gpu=(512, 8192, 0.3, True, 1),
    qwen3_0p6b=(256, 8192, 0.45, True, 1),
    qwen3_8b=(256, 8192, 0.85, False, 1),
    qwen3_8b_lag=(256, 8192, 0.85, False, 1),
    qwen3_8b_colocated=(256, 8192, 0.7, True, 1),
    qwen3_8b_lora=(256, 8192, 0.7, True, 1),
    qwen3_1p7b_lora=(256, 2048, 0.65, True, 1),
    qwen3_30b_a3b=(256, 8192, 0.75, True, 1),
    qwen3_32b=(256, 8192, 0.85, False, 2),
    llama_70b_lora=(256, 8192, 0.85, False, 4),
)
OPERATORS = ["mm", "addmm", "_log_softmax", "_softmax", "embedding_dense_backward"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What tests/pretend/card.py has found, some ten seconds after SGLang is imported."""
    if not shutil.which("gcc"):
        pytest.skip("the stub of the driver is built by gcc")
    folder = tmp_path_factory.mktemp("card")
    env = os.environ | dict(LD_LIBRARY_PATH=str(stub_driver(folder)), TRITON_CACHE_DIR=str(folder / "triton"))
    command = [sys.executable, "tests/pretend/card.py", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert (folder / "found.json").exists(), done.stdout[-4000:]
    return json.loads((folder / "found.json").read_text()) | dict(output=done.stdout)


def test_every_preset_for_gpus_asks_for_one_and_is_started_here(found):
    """Without `device` a machine whose driver is too old for torch would begin an 8B model on its CPUs."""
    only_data = {ROOT / "config" / name for name in ("gsm8k.py", "math.py", "dapo_17k.py")}
    presets = set(ROOT.glob("config/*.py")) - only_data
    asks = {path.stem for path in presets if runpy.run_path(path).get("device") == "cuda"}
    names = {path.stem for path in presets if re.search(r"\b(GPU|GB)", path.read_text())}
    assert asks == names == set(found["arguments"]) == set(PRESETS)


def test_whoever_waits_for_the_first_start_is_told_what_it_does(found):
    """For minutes there was no line."""
    assert found["output"].count("engine 0: compiling kernels: takes a minute at a first start\n") == len(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_sglang_makes_of_a_presets_arguments_what_it_shall(found, preset):
    got = found["arguments"][preset]
    assert {key: got[key] for key in ARGUMENTS} == ARGUMENTS
    graphs, *others = PRESETS[preset]
    assert [got[key] for key in DIFFERENT] == [["full", graphs], *others]
    # SGLang's own all-reduce is of no use to one card, and over several ours takes the place of the sum
    assert got["tp_size"] == 1 or got["disable_custom_all_reduce"]


def test_each_hook_takes_the_place_of_what_sglang_calls(found):
    assert found["hooks"]
    for hook, state in found["hooks"].items():
        assert state == dict(there=True, ours=True, called=True), hook


def test_attention_is_ours_and_overrides_what_sglang_calls(found):
    assert found["attention"] == dict(ours="onecurve.models.dense", strange=[])


def test_what_sglang_reads_from_the_environment_and_the_models_it_knows(found):
    assert found["environment"] == dict(barrier=True, align=1)
    assert found["models"] == [f"sglang.srt.models.{kind}" for kind in sorted(dense.MODEL_TYPES)]


def test_the_switch_that_sglang_throws_puts_our_operators_under_cudas_key(found):
    assert [*found["operators"]] == OPERATORS
    for name, (line,) in found["operators"].items():
        assert "/kernels.py:" in line, name


# ---- a card that is too small

QWEN3_8B = dict(
    vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, architectures=["Qwen3ForCausalLM"],
)  # fmt: skip
SMALLER = "or a smaller model than init_from"


@pytest.mark.parametrize(
    "gb,world,change,line",
    [
        # 8.19 G parameters: 131 GB of weights, moments and one gradient
        (80, 1, dict(lanes=1), f"lanes=1: use more trainers, fewer lanes, --lora_rank=32, {SMALLER}: to train a card"),
        (132, 1, dict(lanes=2), ""),  # two leaves' gradients are added in one
        (132, 1, dict(lanes=4), "to train a card needs 163.8 GB and more, this one has 132.0"),
        (34, 8, dict(rollout_ranks=4, lanes=4), ""),
        (30, 8, dict(rollout_ranks=4, lanes=4), "to train a card needs 32.8 GB and more, this one has 30.0"),
        # the engine's weights alone, 16.4 GB of its share; two cards of an engine have half of them each
        (24, 2, dict(mode="eval"), f"engine_memory=0.6: use a larger share, --rollout_tp=2, {SMALLER}"),
        (24, 2, dict(mode="eval", engine_memory=0.9), ""),
        (24, 2, dict(mode="eval", rollout_tp=2, tp_split=2), ""),
        # a card that trains adapters and samples, and one that has a reward model of the same size, too
        (50, 1, dict(lora_rank=32), ""),
        (44, 1, dict(lora_rank=32), "to sample a card needs 44.7 GB and more, this one has 44.0"),
        (50, 1, dict(lora_rank=32, reward="model"), "to sample a card needs 59.9 GB and more, this one has 50.0"),
    ],
)
def test_a_card_that_cannot_hold_the_model_is_refused_first(gb, world, change, line, tmp_path, monkeypatch, refusal):
    hf = Qwen3Config(**QWEN3_8B)
    hf.save_pretrained(tmp_path)
    assert dense.parameter_counts(hf) == (8_190_735_360, 8_190_735_360)
    card = types.SimpleNamespace(total_memory=gb * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setenv("WORLD_SIZE", str(world))
    judges = []
    if "reward" in change:
        judges = [Qwen3Config(**QWEN3_8B | dict(architectures=["Qwen3ForSequenceClassification"], num_labels=1))]

    def check():
        hf = dense.check_model(tmp_path, DEFAULTS | change)
        dense.check_memory(hf, DEFAULTS | change, "cuda", judges)

    assert line in refusal(check) if line else not check()


@pytest.mark.parametrize(
    "free,most,gets", [(70, None, 38), (38, None, 38), (30, 8192, 30), (30, None, 0), (0, 8192, 0)]
)
def test_an_engine_beside_others_gets_its_share_of_a_card_or_says_what_is_left(monkeypatch, free, most, gets):
    """SGLang charged its cache with the weights that others loaded meanwhile: "no memory left for its cache"."""
    sglang = mock.Mock()
    sglang.get_schedule.return_value = types.SimpleNamespace(mem_fraction_static=0.5, max_total_tokens=most)
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.kv_cache_configurator", sglang)
    monkeypatch.setattr(patches, "from_all_ranks", lambda x, group: [x])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free << 30, 80 << 30))
    if gets:
        assert patches.bytes_for_cache(None, 80.0) == gets << 30
        return
    found = f"the cache would get 38.00 of 80.00 GiB that were free, and {free:.2f} are left; use another share"
    with pytest.raises(ValueError, match=f"^engine_memory=0.5: {found}"):
        patches.bytes_for_cache(None, 80.0)


@pytest.mark.parametrize(
    "gb,world,change,line",
    [
        # 4 bytes for each of 8.19 G weights, two moments and one gradient, and the engine's 4, in turn twice
        (
            163,
            1,
            dict(lanes=1),
            "lanes=1: use fewer lanes, --lora_rank=32, or a smaller model than init_from: to run a",
        ),
        (164, 1, dict(lanes=2), ""),
        (197, 2, dict(lanes=1), ""),
        (196, 1, dict(lanes=4), "machine needs 196.6 GB and more, this one has 196.0"),
        (66, 1, dict(mode="eval"), ""),
        (65, 1, dict(mode="eval"), "machine needs 65.5 GB and more, this one has 65.0"),
    ],
)
def test_on_cpus_all_ranks_share_the_machines_memory(gb, world, change, line, monkeypatch, capsys):
    monkeypatch.setattr(dense, "machine_memory", lambda: gb * 10**9)
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(SystemExit) as e:
        dense.check_memory(Qwen3Config(**QWEN3_8B), DEFAULTS | change, "cpu")
        sys.exit(0)
    out, err = capsys.readouterr()
    assert re.fullmatch(rf"memory: to run a machine needs [\d.]+ GB and more, this one has {gb}.0\n", out)
    assert e.value.code == (2 if line else 0) and line in err, err
