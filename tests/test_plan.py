"""
tools/plan.py: what it counts is what the code has, and what the presets say of themselves. No engine; its seconds are
beside those of real runs in `tools/plan.py --check`.

    pytest tests/test_plan.py
"""

import argparse
import math
import re
import subprocess
import sys
import types

import bench
import plan
import pytest
import torch
from conftest import ROOT
from pytest import approx
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from configurator import config_source, configure
from onecurve.models import folders
from onecurve.models.dense import MODEL_TYPES
from train_grpo import DEFAULTS

SMALL = dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)


def account(preset, gpus, *flags):
    """(text of a preset, its plan)."""
    path = f"config/{preset}.py"
    text = (ROOT / path).read_text()
    return " ".join(text.split()), plan.plan(*plan.read([path, f"--gpus={gpus}", *flags]))


def said(text, pattern):
    """The number that a docstring has where `pattern` has a group."""
    return float(re.search(pattern, text)[1].replace(",", ""))


def agree(text, pattern, ours):
    """Within a rounding of the number that is said, or a hundredth."""
    decimals = len(re.search(pattern, text)[1].partition(".")[2])
    assert ours == approx(said(text, pattern), rel=0.01, abs=0.75 / 10**decimals), pattern


# ---- presets


def test_a_preset_is_the_same_alone_after_its_shared_block_and_saved(tmp_path):
    def read(*paths):
        return configure(dict(DEFAULTS), [*map(str, paths)])

    folder = ROOT / "config"
    presets = [path for path in folder.glob("*.py") if "from config.gsm8k import" in path.read_text()]
    assert len(presets) > 6
    for path in presets:
        alone = read(path)
        saved = tmp_path / path.name
        saved.write_text(config_source(alone))
        assert alone == read(folder / "gsm8k.py", path) == read(saved)
        assert alone["dataset"] == "openai/gsm8k"


# ---- what is counted


def size_of(model):
    return sum(p.numel() for p in model.parameters())


def on_meta(kind, hf):
    with torch.device("meta"):
        return kind.from_config(hf)


@pytest.mark.parametrize("kind", MODEL_TYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_parameters_of_a_folder_are_those_of_its_model(tmp_path, monkeypatch, kind, tied):
    mixture = kind == "qwen3_moe"  # whose head nobody ties
    options = dict(norm_topk_prob=True, num_experts=16, moe_intermediate_size=40) if mixture else {}
    hf = AutoConfig.for_model(kind, tie_word_embeddings=tied and not mixture, **SMALL, **options)
    hf.save_pretrained(tmp_path)
    model = on_meta(AutoModelForCausalLM, hf)
    # on a machine whose own card holds nothing
    nothing = types.SimpleNamespace(total_memory=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: nothing)
    s, _, _ = plan.read([f"--init_from={tmp_path}", "--gpus=1"])
    assert plan.parameters(s) == size_of(model)


@pytest.mark.parametrize("preset", ["small", "tiny", "tiny_moe", "calculator"])
def test_a_scratch_model_has_as_many_parameters_as_the_one_that_is_made(tmp_path, preset):
    s, c, _ = plan.read([f"config/{preset}.py", "--gpus=1", "--init_from=scratch"])
    folders.make_scratch_model(tmp_path, vars(c))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plan.parameters(s) == size_of(model)


def test_the_published_models_have_their_published_sizes():
    sizes = 0.596e9, 1.72e9, 8.19e9, 32.8e9, 30.5e9, 70.6e9  # the models' cards
    for (name, s), size in zip(plan.MODELS.items(), sizes, strict=True):
        assert plan.parameters(s) == approx(size, rel=2e-3), name


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_operations_are_those_that_torch_counts(tmp_path, kind):
    hf = AutoConfig.for_model(kind, tie_word_embeddings=False, attn_implementation="eager", **SMALL)
    hf.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(hf)
    tokens = 50
    flags = "--gpus=1 --lanes=1 --prompts_per_step=1 --group_size=2 --max_prompt_tokens=64 --max_new_tokens=64"
    s, c, _ = plan.read([f"--init_from={tmp_path}", *flags.split()])
    ids = torch.zeros(2, tokens, dtype=torch.long)
    with FlopCounterMode(display=False) as forward:
        loss = model(ids, use_cache=False).logits.sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    rotary = 2 * tokens * s.head_dim // 2  # positions times frequencies are a product to Hugging Face
    # Eager attention computes the half above the diagonal, too.
    products, head, attention = plan.operations(s, 2 * tokens, 2 * tokens, 2 * tokens**2, causal=1)
    assert forward.get_total_flops() == approx(products + head + attention, abs=2 * rotary)
    c.samples = 2
    c.prompt = 0
    c.response = tokens
    c.tokens = 2 * tokens
    seconds = plan.training_seconds(s, c, 1, plan.cpu_rates(1.0, 0.0))
    assert seconds["forward"] == products + head
    again = head  # our logits are not kept for the backward pass
    assert seconds["backward"] - again == backward.get_total_flops() - 2 * attention


def test_lengths_have_the_mean_and_the_square_that_decoding_counts():
    s, c, _ = plan.read("--gpus=1 --max_new_tokens=1000 --response_tokens=300 --prompt_tokens=100".split())
    n = 20_000
    lengths = [1000 * (1 - ((i + 0.5) / n) ** (1 / c.tail)) for i in range(n)]
    assert sum(lengths) / n == approx(300, rel=1e-3)
    square = sum((100 + x) ** 2 for x in lengths) / n
    assert c.squares / c.samples == approx(square, rel=1e-3)
    # Decoding reads, at each token, the keys and values of all before it.
    rates = plan.cpu_rates(math.inf, 0.0)._replace(cache=1.0)
    before = sum(100 * x + x**2 / 2 for x in lengths) / n
    read = before * c.samples * plan.cache_bytes(s)
    seconds = plan.rollout_seconds(s, c, 1, rates)
    assert seconds["decode: cache"] == approx(read, rel=1e-3)


def test_seconds_are_linear_in_those_of_an_operation_and_of_a_step():
    s, c, _ = plan.read(["--gpus=1"])

    def seconds(*speeds):
        rates = plan.cpu_rates(*speeds)
        return plan.seconds(s, c, rates, rates)

    parts = zip(seconds(2e9, 3e-3), seconds(1.0, 0.0), seconds(math.inf, 1.0))
    for both, operation, step in parts:
        assert both == approx(operation / 2e9 + 3e-3 * step)
        assert operation
        assert step


def test_a_benchs_roof_is_the_work_at_the_data_sheets_rates_of_a_known_card(monkeypatch):
    """256 samples of 256 tokens by Qwen3-0.6B, on an H200."""
    args = argparse.Namespace(steps=6, new_tokens=256, ranks=1, threads=0, flags=["--init_from=Qwen/Qwen3-0.6B"])
    assert bench.roof(args) == {}  # no card
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    least = bench.roof(args)
    tokens = 256 * 256
    read = tokens * (8 + 256 / 2) * 28 * 2 * 8 * 128 * 2 + tokens * plan.SAMPLER_PASSES * 4 * 151936
    assert least["rollout_seconds"] == approx(2 * 0.596e9 * tokens / 989e12 + read / 4.8e12, rel=0.01)
    assert least["train_seconds"] > 6 * 0.596e9 * tokens / 989e12
    args.ranks = 2
    assert bench.roof(args) == {}
    args.ranks = 1
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 3060")
    assert bench.roof(args) == {}


# ---- the presets' accounts


ADAPTERS = r"is ([\d.]+) M adapters"
STEP = r"a step of ([\d.]+) s"
ROOM = r"(?:the cache,|a token) ([\d,]+) tokens"
CACHE = r"leaves (\d+) GB of cache"
TRAINS = r"(?:received, 11 GB:|together|at the most:|twice:) (\d+) GB"
OF_SEVERAL = {
    r"(\d+) GB\. (?:With|Memory of an engine)": "trains",
    r"weights ([\d.]+) GB; 85 %": "weights",
    CACHE: "cache",
    STEP: "step",
}
PRESETS = [  # and what its docstring says of its plan
    ("qwen3_8b", 8, "H100", {TRAINS: "trains", CACHE: "cache"}),
    ("qwen3_8b_lag", 8, "H100", {TRAINS: "trains", STEP: "step"}),
    ("qwen3_8b_colocated", 8, "H100", {TRAINS: "trains", r"47 GB: (\d+) GB": "gpu", ROOM: "room", STEP: "step"}),
    ("llama_70b_lora", 8, "H100", OF_SEVERAL),
    ("one_gpu", 1, "H100", {}),
    ("qwen3_0p6b", 1, "H100", {}),
    ("qwen3_8b_lora", 1, "H100", {ADAPTERS: "learned", TRAINS: "trains", r"43 GB: (\d+) GB": "gpu", ROOM: "room"}),
    ("qwen3_30b_a3b", 8, "H200", {TRAINS: "trains", r"71 GB: (\d+) GB": "gpu", ROOM: "room", STEP: "step"}),
    ("qwen3_32b", 16, "H200", OF_SEVERAL),
    (
        "qwen3_1p7b_lora",
        1,
        "RTX4090",
        {
            ADAPTERS: "learned",
            TRAINS: "trains",
            r"weights and ([\d.]+) GB the cache": "cache",
            ROOM: "room",
            r"([\d.]+) GB with all that is held": "gpu",
        },
    ),
]
UNITS = dict(trains=1e9, weights=1e9, cache=1e9, gpu=1e9, learned=1e6)


@pytest.mark.parametrize("preset,gpus,card,figures", PRESETS)
def test_a_preset_fits_its_card_where_its_start_is_not_refused_and_needs_what_it_says(preset, gpus, card, figures):
    text, made = account(preset, gpus, f"--card={card}")
    assert made.least < made.card.memory
    assert max(made.gpu, plan.CONTEXT + made.weights + made.cache) < 0.92 * made.card.memory
    for pattern, name in figures.items():
        agree(text, pattern, getattr(made, name) / UNITS.get(name, 1))


def test_presets_need_in_each_phase_and_otherwise_run_what_they_say():
    text, made = account("qwen3_8b", 8)
    assert plan.cache_bytes(made.s) / 1024 == said(text, r"cache at (\d+) KiB")
    _, lagged = account("qwen3_8b", 8, "--lag=1")
    agree(text, r"for (\d+) GB more", (lagged.trains - made.trains) / 1e9)
    text, made = account("qwen3_30b_a3b", 8, "--card=H200")
    leaf = plan.trainer_memory(made.s, made.c, 8)["leaf"]
    agree(text, r"2 bytes = ([\d.]+) GB", leaf["activations"] / 1e9)
    agree(text, r"layer's inner ones ([\d.]+) GB", leaf["a layer's inner activations, made again"] / 1e9)
    text, made = account("qwen3_0p6b", 1)
    phases = plan.trainer_memory(made.s, made.c, 1)
    state = sum(phases["held"].values()) + next(iter(phases["train"].values()))
    agree(text, r"= ([\d.]+) GB; one activation", state / 1e9)
    agree(text, r"2 bytes = ([\d.]+) GB, a layer", phases["leaf"]["activations"] / 1e9)
    text, _ = account("qwen3_1p7b_lora", 1, "--card=RTX4090")
    flags = re.search(r"with (--init_from=.*?): \d", text)[1].split()
    _, full = account("qwen3_1p7b_lora", 1, "--card=RTX4090", *flags)
    agree(text, r": (\d+) GB while it trains", full.trains / 1e9)
    agree(text, r"(\d+) GB while weights", full.gpu / 1e9)


def test_a_decode_step_reads_the_experts_that_some_sample_has():
    s = plan.MODELS["Qwen/Qwen3-30B-A3B"]
    one, few, all_of_them = (plan.read_bytes(s, n) for n in (1, 4, 1e6))
    assert one / 2 == approx(3.0e9, rel=0.02)  # active ones, without the embedding
    assert one < few < all_of_them
    assert all_of_them == 2 * (plan.parameters(s) - s.vocab * s.hidden)


def test_an_engines_share_is_one_of_what_others_leave_of_its_card(tmp_path):
    """Not of the card: the colocated presets said 40 GB of cache and would have had 30."""
    _, made = account("qwen3_8b_lora", 1)
    share = made.c.engine_memory
    free = made.card.memory - plan.CONTEXT - 2 * plan.parameters(made.s) - 12 * made.learned
    assert made.weights + made.cache == approx(share * free)
    # what a reward model of 1.5 GB takes, of the share and of the card
    hf = AutoConfig.for_model("qwen3", **SMALL | dict(vocab_size=150_000, hidden_size=5_000))
    hf.architectures = ["Qwen3ForSequenceClassification"]
    hf.num_labels = 1
    hf.max_position_embeddings = 2048
    hf.save_pretrained(tmp_path)
    _, judged = account("qwen3_8b_lora", 1, f"--reward=numeric+0.5*model:{tmp_path}")
    model = on_meta(AutoModelForSequenceClassification, hf)
    size = 2 * (size_of(model) - 5_000)
    assert made.cache - judged.cache == approx(share * size)
    assert judged.gpu - made.gpu == approx((1 - share) * size)


def test_what_is_refused_at_the_start_is_less_than_what_the_account_needs():
    s, c, _ = plan.read(["config/qwen3_8b.py"])
    phases = plan.trainer_memory(s, c, 4)
    sums = sum(phases["held"].values()) + 4 * plan.parameters(s) / 4  # of a row of one leaf a trainer
    needs = plan.least_memory(plan.parameters(s), plan.parameters(s), vars(c), 8)
    assert needs == dict(train=sums, sample=2 * plan.parameters(s) / 0.85)
    s, c, _ = plan.read(["config/qwen3_8b_lora.py", "--gpus=1"])
    held = sum(plan.trainer_memory(s, c, 1)["held"].values())
    needs = plan.least_memory(plan.parameters(s), plan.learned_parameters(s, c), vars(c), 1)
    assert needs["sample"] == approx(held + 2 * plan.parameters(s) / 0.7)


def test_older_weights_move_over_the_bus_once_each_way_in_bfloat16():
    """In half the bytes of float32."""
    made = plan.plan(*plan.read(["config/qwen3_8b_lag.py"]))
    moved = 2 * 2 * plan.parameters(made.s) / made.trainers
    assert made.training["older weights over the bus"] == approx(moved / (plan.LINK * made.card.bus))
    plain = plan.plan(*plan.read(["config/qwen3_8b.py"]))
    assert plain.training["older weights over the bus"] == 0


# ---- what is printed, and refused


def test_the_report_of_a_preset_adds_up(capsys):
    read = plan.read(["config/qwen3_8b.py"])
    made = plan.plan(*read)
    plan.report(*read)
    out = capsys.readouterr().out
    times = {}
    for line in out.splitlines():
        if line.startswith("| "):
            name, time, *_ = line.strip("| ").split(" | ")
            if time[0] in "0123456789*" and "%" not in time:
                times[name] = float(time.strip("*"))
    parts = [x for name, x in times.items() if ":" in name or name == "files, ledger"]
    assert sum(parts) == approx(times["**step**"], abs=0.1)
    assert len(parts) == 19
    assert times["**step**"] == approx(made.step, abs=0.05)
    for text in ("ESTIMATES", "50.7", "32.8", "Where it stops\n- trainers: lanes=4"):
        assert text in out


def test_side_by_side_a_step_is_the_longer_side_and_in_turn_both():
    in_turn, lagged, colocated = plan.ways(*plan.read(["config/qwen3_8b.py"])).values()
    assert max(in_turn.roll, in_turn.train) < lagged.step < in_turn.step
    assert colocated.trainers == colocated.cards == 8
    assert colocated.train < in_turn.train
    assert 0 < lagged.idle < in_turn.idle < 1


@pytest.mark.parametrize(
    "flags, line",
    {
        "--card=A100": "card='A100': use H100 or H200 or RTX4090",
        "--gpus=0": "gpus=0: must be more than 0",
        "--gpus=7": "lanes=4: 3 trainer ranks cannot share them; use 1, 2, 4",
        "--mode=eval": "mode='eval': a plan is of RL steps; use 'grpo'",
        "--dtype=float32": "dtype='float32': a plan is of bfloat16; leave it out",
        "--response_tokens=2000": "response_tokens=2000.0: the longest has 1024; use 0 .. 1024",
        "--init_from=nobody/nothing": "init_from='nobody/nothing': use a folder with a config.json, a GGUF file",
        "--gpu=8": "--gpu: no such key; did you mean gpus?",
    }.items(),
)
def test_what_makes_no_plan_is_refused_in_a_line(refusal, flags, line):
    assert refusal(plan.read, ["config/qwen3_8b.py", *flags.split()]).startswith(f"error: {line}")


def test_it_is_a_command():
    command = [sys.executable, "tools/plan.py", "config/qwen3_8b_lora.py", "--gpus=1", "--card=H200"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 H200 of 141 GB, colocated" in done.stdout
    assert not done.stderr
