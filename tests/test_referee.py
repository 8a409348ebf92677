"""
tools/referee.py: formats, mistakes that it must name, and healthy systems that it must not accuse, with a tiny model.

    pytest tests/test_referee.py

tests/referee_others.py does the same with TRL, SGLang and transformers; CI does not run that.
"""

import json
import math
import shutil
import sys
from types import SimpleNamespace

import pytest
import referee
import torch
from referee_formats import read
from referee_hypotheses import Reference
from referee_others import generate, write_rows
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import kernels
import train_grpo
from onecurve.models.folders import make_scratch_model

EOS = 1


@pytest.fixture(scope="module", autouse=True)
def operators():
    kernels.enable_batch_invariant(1)
    yield
    kernels.disable_batch_invariant()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a model that is sharp enough for mistakes to show."""
    folder = tmp_path_factory.mktemp("model")
    sizes = dict(scratch_args="num_hidden_layers=2, hidden_size=64, intermediate_size=128")
    make_scratch_model(folder, train_grpo.DEFAULTS | sizes)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for p in model.parameters():
        if p.dim() > 1:
            p.data *= 4
    model.save_pretrained(folder)
    return folder


def draw(folder, **rule):
    """Rows that transformers samples, with log-probs before temperature and rule."""
    torch.manual_seed(3)
    prompts = torch.randint(3, 90, (24, 6)).tolist()
    return generate(folder, prompts, raw=True, new=24, **rule)


@pytest.fixture(scope="module")
def healthy(model):
    return draw(model)


@pytest.fixture
def judge(model, tmp_path):
    """judge(rows, folder, flags): (words, findings) about rows of an engine, of this model or another folder's."""

    def call(rows, folder=model, **flags):
        path = tmp_path / "rows.jsonl"
        write_rows(path, rows)
        args = SimpleNamespace(**referee.FLAGS | flags, paths=[folder, path])
        words, found, tables, pictures = referee.rollouts(args)
        assert len([*pictures]) == 3
        for table in tables:
            assert len({*map(len, table)}) == 1
        return words, found

    return call


def test_nothing_is_fetched_that_a_models_folder_names(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | dict(attn_implementation="nobody/nothing")
    (folder / "config.json").write_text(json.dumps(config))
    adapters = dict(peft_type="LORA", base_model_name_or_path="nobody/nothing")
    (folder / "adapter_config.json").write_text(json.dumps(adapters))
    found = Reference(folder, "model")
    assert torch.equal(found.rounded.lm_head.weight, found.model.lm_head.weight.bfloat16())


def response_logprobs(model, prompt, response):
    """As the model computes them, in its own numbers."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1)[range(len(response)), response]


def test_a_healthy_engine_is_not_accused_and_bfloat16_is_named_as_such(judge, healthy, model):
    words, found = judge(healthy)
    assert not found
    assert "float32's rounding" in words[0]
    exact = AutoModelForCausalLM.from_pretrained(model)
    rounded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    rows = []
    with torch.no_grad():
        for row in healthy:
            text = row["prompt_ids"], row["response_ids"]
            coarse = response_logprobs(rounded, *text)
            own = response_logprobs(exact, *text)
            rows.append(row | dict(logprobs=coarse.tolist(), trainer_logprobs=own.tolist()))
    words, found = judge(rows)
    assert not found
    assert "bfloat16 throughout" in words[0]
    assert "the engine is" in words[2]


def test_a_llama_whose_layers_call_their_parts_by_name_is_judged(judge, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "llama")
    hf = AutoConfig.from_pretrained(model)
    names = "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim eos_token_id"
    sizes = {name: getattr(hf, name) for name in names.split()}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)).save_pretrained(folder)
    words, found = judge(draw(folder), folder)
    assert not found
    assert "float32's rounding" in words[0]


def test_mistakes_of_log_probs_are_named(judge, healthy):
    mistakes = {
        "log-probs shifted by +1: explains 100": lambda x: [0.0, *x[:-1]],
        "bits: explains 100": lambda x: [y / math.log(2) for y in x],
        "weights changed in flight?": lambda x: [y + (i > 8) * (i % 5) for i, y in enumerate(x)],
    }
    for named, change in mistakes.items():
        _, found = judge([row | dict(logprobs=change(row["logprobs"])) for row in healthy])
        assert named in found[0]
    assert "unexplained" in found[0]
    assert "temperature 1: explains" in judge(healthy, temperature=0.6)[1][0]


def test_the_head_and_prompts_are_named(judge, healthy, model):
    engine = AutoModelForCausalLM.from_pretrained(model)

    @torch.no_grad()
    def said(*before):
        """Of rows with the engine's log-probs of prompts that have these tokens before them."""
        rows = []
        for row in healthy:
            logprobs = response_logprobs(engine, [*before, *row["prompt_ids"]], row["response_ids"])
            rows.append(row | dict(logprobs=logprobs.tolist()))
        _, found = judge(rows)
        return found[0]

    assert "<eos> before the prompts: explains 100" in said(EOS)
    weight = engine.lm_head.weight.bfloat16()
    engine.lm_head.forward = lambda x: torch.nn.functional.linear(x.bfloat16(), weight)
    assert "the head in bfloat16: explains" in said()


def test_how_samples_were_drawn_is_named_where_log_probs_are_right(judge, model):
    (line,) = judge(draw(model, top_p=0.8))[1]
    assert "as if drawn by top-p 0.8" in line
    line, *_ = judge(draw(model, temperature=0.7))[1]
    assert "as if drawn by temperature 0.7" in line or "temperature 0.65" in line


def test_an_eos_that_was_dropped_or_masked_is_named(healthy, model):
    reference = Reference(model, "MODEL")
    reference.stop = [*range(60, 98)]  # a model this small seldom ends by itself: so many tokens end a response
    rows = []
    for row in healthy:
        response = row["response_ids"]
        ends = [i for i, token in enumerate(response, 1) if token in reference.stop and i > 1]
        if ends:
            rows.append((row["prompt_ids"], response[: ends[0]]))
    assert len(rows) > 10

    def said(kept=None, trained=1):
        """Of rows without the tokens behind `kept`, and with this mask of the last one."""
        samples = []
        for prompt, response in rows:
            mask = [1] * (len(response) - 1) + [trained]
            samples.append(SimpleNamespace(prompt=prompt, response=response[:kept], mask=mask))
        return [*referee.endings(reference, samples)]

    assert not said()
    assert "EOS dropped" in said(kept=-1)[0]
    assert "leaves out the EOS" in said(trained=0)[0]


# ---- formats

TOKENS = dict(tokens=[5, 6, 7, 8, 9], rollout_log_probs=[-1.0, -2.0])
SLIME = dict(TOKENS, response_length=2, prompt="a", response="b")
TRAINED = dict(TOKENS, response_lengths=2, loss_masks=[1, 1])
VLLM = dict(
    token_ids=[8, 9],
    logprobs=[
        {"8": dict(logprob=-1.0), "3": dict(logprob=-0.5)},
        {"9": dict(logprob=-2.0)},
    ],
)
CHAT = dict(
    token_ids=[8, 9],
    logprobs=dict(content=[dict(logprob=-1.0), dict(logprob=-2.0)]),
)
TEXT = dict(
    token_ids=[8, 9],
    logprobs=dict(token_logprobs=[-1.0, -2.0]),
    prompt_token_ids=[5, 6, 7],
)
FORMATS = {
    "own": dict(
        prompt_ids=[5, 6, 7],
        response_ids=[8, 9],
        logprobs=[-1.0, -2.0],
    ),
    "TRL's rollout_func": dict(
        prompt_ids=[[5, 6, 7]],
        completion_ids=[[8, 9]],
        logprobs=[[[-1.0], [-2.0]]],
    ),
    "slime's rollouts": dict(rollout_id=0, samples=[SLIME]),
    "slime's training data": dict(format_version=2, samples=[TRAINED], dp_shards=[]),
    "prime-rl": dict(
        token_ids=[5, 6, 7, 8, 9],
        loss_mask=[False, False, False, True, True],
        inference_logprobs=[0, 0, 0, -1.0, -2.0],
        trainer_logprobs=[None, 0, 0, -1.5, -2.5],
        advantages=[None, None, None, 0.5, 0.5],
        rewards=[0.0] * 5,
    ),
    "verl": dict(
        prompts=[[0, 5, 6, 7]],
        responses=[[8, 9, 0]],
        attention_mask=[[0, 1, 1, 1, 1, 1, 0]],
        rollout_log_probs=[[-1.0, -2.0, 0.0]],
        response_mask=[[1, 1, 0]],
        advantages=[[0.5, 0.5, 0.0]],
    ),
    "vLLM": dict(
        prompt="a",
        prompt_token_ids=[5, 6, 7],
        outputs=[VLLM],
    ),
    "chat completions": dict(
        prompt_token_ids=[5, 6, 7],
        choices=[CHAT],
    ),
    "completions": dict(choices=[TEXT]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_sample(name, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(FORMATS[name]))
    (sample,) = read(tmp_path)
    assert sample.prompt == [5, 6, 7]
    assert sample.response == [8, 9]
    assert sample.logprobs == [-1.0, -2.0]
    assert sample.advantage in (None, [0.5, 0.5])


def test_trl_s_batch_is_read_without_its_padding(tmp_path):
    batch = dict(
        prompt_ids=[[0, 5, 6]],
        prompt_mask=[[0, 1, 1]],
        completion_ids=[[8, 9, 0]],
        completion_mask=[[1, 1, 0]],
        advantages=[0.5],
        old_per_token_logps=[[-1.0, -2.0, -9.0]],
    )
    path = tmp_path / "batch.safetensors"
    save_file({name: torch.tensor(x) for name, x in batch.items()}, path)
    (sample,) = read(path)
    assert sample.prompt == [5, 6]
    assert sample.response == [8, 9]
    assert sample.advantage == 0.5
    assert sample.trainer_logprobs == [-1.0, -2.0]


@pytest.mark.parametrize(
    "text, name",
    {
        "{": "a.jsonl",
        "[1]": "a.jsonl",
        '{"text": "x"}': "a.jsonl",
        '{"prompt_ids": [1], "response_ids": [2, 3], "logprobs": [-1.0]}': "a.jsonl",
        '{"prompt_ids": [1], "response_ids": 3}': "a.jsonl",
        '{"prompt_ids": [1], "response_ids": [-2], "logprobs": [-1.0]}': "a.jsonl",
        '{"prompt_ids": [1.0], "response_ids": [2], "logprobs": [-1.0]}': "a.jsonl",
        '{"prompt_ids": "ab", "response_ids": "c", "logprobs": [-1.0]}': "a.jsonl",
        '{"prompt_ids": [1], "response_ids": [2], "logprobs": ["x"]}': "a.jsonl",
        "": "a.jsonl",
        "x": "a.safetensors",
        "\x80": "a.pt",
    }.items(),
)
def test_a_bad_file_is_one_line(name, text, tmp_path, refusal):
    (tmp_path / name).write_text(text)
    for path in (tmp_path / name, tmp_path):
        line = refusal(read, path)
        assert line.startswith(f"error: {path}: ") and "wants JSON lines or safetensors, with prompt_ids" in line


# ---- steps


def a_step(folder, rows, out, half=1.0, frozen=False, norms_decay=0.0, by="token", rate=1e-3):
    """A trainer's update, in plain transformers and torch: AdamW, decay 0.1 of matrices."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    total = sum(len(row["response_ids"]) for row in rows)
    for row in rows:
        response = row["response_ids"]
        logprobs = response_logprobs(model, row["prompt_ids"], response)
        count = total if by == "token" else len(response) * len(rows)
        loss = -half * row["advantage"] * logprobs.sum() / count
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if frozen:
        model.get_input_embeddings().weight.grad = None
    groups = [dict(params=[p], weight_decay=0.1 if p.dim() > 1 else norms_decay) for p in model.parameters()]
    torch.optim.AdamW(groups, lr=rate).step()
    model.save_pretrained(out)


STEPS = [
    ("all gradients half", dict(half=0.5)),
    ("did not move: model.embed_tokens.weight (tied weights?)", dict(frozen=True)),
    ("weight decay on norms and biases, too", dict(norms_decay=0.1)),
    ("loss aggregated by sequence", dict(by="sequence")),
    ("the update times 2", dict(rate=2e-3)),
]


def test_an_update_is_as_the_formula_says_or_its_mistake_is_named(model, healthy, tmp_path, capsys, monkeypatch):
    rows = [row | dict(reward=float(i % 3 == 0)) for i, row in enumerate(healthy[:16])]
    rewards = torch.tensor([row["reward"] for row in rows]).view(4, 4)
    advantages = train_grpo.advantages_of(rewards, "grpo").flatten().tolist()
    for row in rows:
        n = 4 + int(20 * row["reward"])
        row["response_ids"] = row["response_ids"][:n]
        row["logprobs"] = row["logprobs"][:n]
    batch = tmp_path / "batch.jsonl"
    after = tmp_path / "after"

    def said(*more):
        flags = "--learning_rate=1e-3", "--weight_decay=0.1", f"--out={tmp_path}/page.html"
        monkeypatch.setattr(sys, "argv", ["", "--step", *map(str, (model, batch, after)), *flags, *more])
        status = referee.main()
        return status, capsys.readouterr().out

    write_rows(batch, rows)
    a_step(model, [row | dict(advantage=a) for row, a in zip(rows, advantages)], after)
    status, output = said("--group_size=4")
    assert not status
    assert "float32's rounding\n" in output
    assert "<pre>explains" in (tmp_path / "page.html").read_text()
    theirs = [row | dict(advantage=a * 0.01) for row, a in zip(rows, advantages)]
    write_rows(batch, theirs)
    for wanted, mistake in STEPS:
        a_step(model, theirs, after, **mistake)
        status, output = said()
        assert status
        assert wanted in output.splitlines()[0]


def test_a_step_without_advantages_and_a_wrong_checkpoint_are_one_line(model, healthy, tmp_path, refusal, monkeypatch):
    batch = tmp_path / "batch.jsonl"
    for row, after in ((healthy[0], model), (healthy[0] | dict(advantage=1.0), tmp_path)):
        write_rows(batch, [row])
        monkeypatch.setattr(sys, "argv", ["", "--step", str(model), str(batch), str(after)])
        assert refusal(referee.main).startswith("error: ")
    monkeypatch.setattr(sys, "argv", ["", "a..b", str(batch)])
    assert "MODEL='a..b': neither a model folder nor a model that the hub" in refusal(referee.main)
