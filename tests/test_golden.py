"""
Golden log-probs: the file's rows come out again to the byte, and golden.py names what is wrong with a server.

    pytest tests/test_golden.py
"""

import json
import math
import sys
import time
from contextlib import ExitStack

import pytest
import torch
from conftest import answering
from trials import ROOT

import kernels

FOLDER = ROOT / "tools" / "golden"
sys.path.insert(0, str(FOLDER))
import golden  # noqa: E402
import make  # noqa: E402

ROWS = golden.read(FOLDER / "dense.jsonl")
RULED = [row for row in ROWS if row["top_p"] < 1]
ENGINES = {  # what an engine says of a row; what golden.py says of the engine
    "ours": (lambda row: row["logprobs"], "float32's rounding"),
    "bfloat16": (lambda row: row["bfloat16"], "bfloat16's rounding"),
    "four times bfloat16": (
        lambda row: [5 * x - 4 * y for x, y in zip(row["bfloat16"], row["logprobs"])],
        "unexplained",
    ),
    "bfloat16, whose rule cuts a token": (
        lambda row: [-math.inf if row is RULED[0] else row["bfloat16"][0], *row["bfloat16"][1:]],
        "bfloat16's rounding",
    ),
    "another rule": (
        lambda row: [-math.inf if row in RULED else row["bfloat16"][0], *row["bfloat16"][1:]],
        "unexplained; more than bfloat16 costs in: top-p",
    ),
    "rope": (lambda row: row["RoPE in bfloat16"], "RoPE in bfloat16: explains 100"),
    "shifted": (lambda row: [-1.0, *row["logprobs"][:-1]], "log-probs one token too late: explains 100"),
    "no rule": (
        lambda row: row.get("no temperature, no top-p", row["logprobs"]),
        "no temperature, no top-p: explains 100",
    ),
}


@pytest.fixture
def operators():
    yield
    kernels.disable_batch_invariant()  # make.py installs them


@pytest.mark.parametrize("name", make.MODELS)
def test_ten_rows_of_each_file_come_out_again_to_the_byte(name, operators, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["make.py", name, "--every=20"])
    assert not make.main(), capsys.readouterr().out
    if name == "dense":  # the control: one of them is another in its last digit
        lines = (FOLDER / "dense.jsonl").read_text().splitlines()
        row = json.loads(lines[20])
        row["logprobs"][0] = float(f"{row['logprobs'][0] * (1 + 1e-7):.9g}")
        (tmp_path / "dense.jsonl").write_text("\n".join([*lines[:20], json.dumps(row), *lines[21:]]))
        monkeypatch.setattr(make, "__file__", str(tmp_path / "make.py"))
        assert make.main() and "changed: [20]" in capsys.readouterr().out
    assert torch.is_grad_enabled()  # other tests of this process want gradients


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engines_mistake_is_named_and_a_healthy_one_is_not_accused(engine, tmp_path, capsys):
    says, verdict = ENGINES[engine]
    theirs = tmp_path / "theirs.jsonl"
    theirs.write_text("".join(json.dumps(dict(logprobs=says(row))) + "\n" for row in ROWS))
    found = golden.main(str(theirs), str(FOLDER / "dense.jsonl"))
    assert capsys.readouterr().out.splitlines()[-1].startswith(verdict)
    assert found == ("rounding" not in verdict)


@pytest.mark.parametrize("line", ["", '{"logprobs": [-1]}', '{"logprobs": [NaN]}', "[]", "{", '{"logprobs": null}'])
def test_a_file_of_anything_ends_in_one_line(line, tmp_path, refusal):
    theirs = tmp_path / "theirs.jsonl"
    theirs.write_text(f"{line}\n" * (len(ROWS) - 1))
    assert str(theirs) in refusal(golden.main, str(theirs), str(FOLDER / "dense.jsonl"))


# ---- servers


@pytest.fixture
def served():
    """served(mistake): the address of a server whose answers are a function of the request, but for its mistake."""
    with ExitStack() as stack:

        def serve(mistake):
            running = []
            seen = set()

            def respond(body):
                if mistake == "nonsense":
                    return 200, b"<html>"
                if "prompt" not in body:  # to flush the cache
                    seen.clear()
                    return 200, b"{}"
                running.append(body)
                if mistake == "batch":
                    time.sleep(0.05)
                ids = body["prompt"]
                if body.get("echo"):
                    row = next(row for row in ROWS if row["prompt_ids"] + row["response_ids"] == ids)
                    numbers = [None] * len(row["prompt_ids"]) + ENGINES[mistake or "ours"][0](row) + [-1.0]
                else:
                    far = 1e-6 * (mistake == "batch" and len(running) > 1)
                    far += 1e-6 * (mistake == "cache" and str(ids) in seen)
                    numbers = [-0.5 + far]
                    seen.add(str(ids))
                running.pop()
                choice = dict(text=str(ids[-5:]), logprobs=dict(token_logprobs=numbers))
                return 200, json.dumps(dict(choices=[choice] * body.get("n", 1))).encode()

            url, _ = stack.enter_context(answering(respond))
            return url.removesuffix("/v1")

        yield serve


@pytest.mark.parametrize(
    "mistake, where", [("", None), ("batch", "in a crowd of 64"), ("cache", "alone, with a warm cache")]
)
def test_what_changes_a_servers_answers_is_named(mistake, where, served, capsys):
    found = golden.main(served(mistake))
    changed = [line for line in capsys.readouterr().out.splitlines() if "1e-06" in line]
    assert found == bool(mistake) == any(line.startswith(where or " ") for line in changed)
    assert not any(line.startswith("alone, flushed") for line in changed)
    assert mistake != "batch" or not any(line.startswith("alone") for line in changed)


@pytest.mark.parametrize("mistake", ["", "shifted"])
def test_a_server_is_asked_for_the_log_probs_of_prompts(mistake, served, capsys):
    assert golden.main(served(mistake), str(FOLDER / "dense.jsonl")) == bool(mistake)
    said = capsys.readouterr().out
    assert ENGINES[mistake or "ours"][1] in said and "6980" in said


def test_a_server_that_is_none_is_one_line(served, refusal):
    for place in (served("nonsense"), "http://127.0.0.1:9"):
        assert place in refusal(golden.main, place)
