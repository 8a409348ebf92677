"""
The start of an engine on CUDA, where there is no card: with a stub of the driver, up to the main loop of SGLang's
scheduler. An SGLang that calls a setting or a replaced function otherwise fails here.

    pytest tests/test_stub_card.py
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pretend.driver import stub_driver

ROOT = Path(__file__).parent.parent
# what every preset's engine is to be, by SGLang's own word
ARGUMENTS = dict(
    device="cuda", dtype="bfloat16", attention_backend="triton", sampling_backend="pytorch", bf16_gemm_backend="torch",
    enable_deterministic_inference=True, page_size=1, disable_radix_cache=False, disable_overlap_schedule=False,
    chunked_prefill_size=8192, disable_cuda_graph=False, prefill_graphs="disabled", skip_tokenizer_init=True,
    max_total_tokens=None, max_running_requests=None, weight_version="0", sleep_on_idle=True, base_gpu_id=0,
)  # fmt: skip
# and what differs: graphs up to so many requests, share of the free memory, whether that is lent, cards of an engine
DIFFERENT = "decode_graphs mem_fraction_static enable_memory_saver tp_size".split()
PRESETS = dict(
    one_gpu=(512, 0.3, True, 1),
    qwen3_0p6b=(256, 0.45, True, 1),
    qwen3_8b=(256, 0.85, False, 1),
    qwen3_8b_lag=(256, 0.85, False, 1),
    qwen3_8b_colocated=(256, 0.7, True, 1),
    qwen3_8b_lora=(256, 0.45, True, 1),
    qwen3_32b=(256, 0.85, False, 2),
    llama_70b_lora=(256, 0.85, False, 4),
)
OPERATORS = ["mm", "addmm", "_log_softmax", "_softmax", "embedding_dense_backward"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What tests/pretend/card.py has found, some ten seconds after SGLang is imported."""
    folder = tmp_path_factory.mktemp("card")
    env = os.environ | dict(LD_LIBRARY_PATH=str(stub_driver(folder)), TRITON_CACHE_DIR=str(folder / "triton"))
    command = [sys.executable, "tests/pretend/card.py", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert (folder / "found.json").exists(), done.stdout[-4000:]
    return json.loads((folder / "found.json").read_text())


def test_every_preset_for_gpus_asks_for_one_and_is_started_here(found):
    """Without `device` a machine whose driver is too old for torch would begin an 8B model on its CPUs."""
    asks = {path.stem for path in ROOT.glob("config/*.py") if '\ndevice = "cuda"\n' in path.read_text()}
    names = {path.stem for path in ROOT.glob("config/*.py") if re.search(r"\b(GPU|GB)", path.read_text())}
    assert asks == names == set(found["arguments"]) == set(PRESETS)


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
    assert found["attention"] == dict(ours="rollout_server", strange=["attend"])


def test_what_sglang_reads_from_the_environment_and_the_models_it_knows(found):
    assert found["environment"] == dict(barrier=True, align=1)
    assert found["models"] == [f"sglang.srt.models.{kind}" for kind in ("llama", "qwen2", "qwen3")]


def test_the_switch_that_sglang_throws_puts_our_operators_under_cudas_key(found):
    assert [*found["operators"]] == OPERATORS
    for name, (line,) in found["operators"].items():
        assert "/kernels.py:" in line, name
