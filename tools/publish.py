"""
A run as a repository of the Hugging Face hub, which others load as a model, read, and verify by its name.

    uv sync --group plot
    python tools/publish.py out/tiny user/tiny --dry    # writes out/tiny/publish, to look at
    python tools/publish.py out/tiny user/tiny          # and uploads it: hf auth login, or HF_TOKEN
    python tools/verify.py user/tiny                    # what anybody can do then

    README.md           the model card: the claim, the digest, how it was made, how to verify it
    *.safetensors, ..   the last checkpoint in bfloat16, without the optimizer's state: what from_pretrained loads
    samples.parquet     every sample: step, prompt, text, tokens, log-probs, reward, advantage where its group gives it
    run/                what verify reads: config.py, the ledgers, metrics, rollout files, and the last --checkpoints
                        checkpoints in float32, with the optimizer's state; and the Python files of config.py's
                        reward, loss, advantage and agent. Other files in the run's folder are left out

config.py has the run's command, its folders and its judge's address. What looks like a key in there, such as a text
after API_KEY= or a password in an address, is refused unless --public=API_KEY says that it may go out. Exit status 2:
that, nothing to publish, or the hub refuses it.
"""

import argparse
import hashlib
import json
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import plot
import pyarrow
import pyarrow.parquet
import torch
from runs import ROOT, check_links, evaluations, lines, saved_config
from safetensors.torch import load_file
from verify import branched, checked_digest

import sync
from configurator import OWN, fail, require
from onecurve.models.folders import load_tokenizer
from onecurve.run.checkpoint import checkpoints, read_checkpoint, write_file
from onecurve.run.record import LOGS
from rewards import FILES

SAMPLE = pyarrow.schema(
    dict(
        step=pyarrow.int64(), prompt=pyarrow.int64(), sample=pyarrow.int64(), prompt_text=pyarrow.string(),
        text=pyarrow.string(), tokens=pyarrow.list_(pyarrow.int64()), logprobs=pyarrow.list_(pyarrow.float32()),
        sampled=pyarrow.list_(pyarrow.bool_()), reward=pyarrow.float32(), advantage=pyarrow.float32(),
    )
)  # fmt: skip
NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
MOST_CODE = 2**18  # bytes of a Python file that is copied
# a name of what looks like a key; sizes such as max_new_tokens=64 do not
SECRET = re.compile(r"(\w*(?:key|token|secret|password)\w*)=(?!\d+\b)\S|(://[^/\s:@]+):[^/\s@]+@", re.IGNORECASE)
CARD = """---
library_name: {library}
pipeline_tag: text-generation
tags: [onecurve, grpo, reinforcement-learning, reproducible]
{front}---

# {name}

A model trained by onecurve, in which one seed gives one curve, bit for bit. {trained}. The whole run has one digest:

    {digest}

Whoever repeats the run on the same kind of device gets it, or has found where something is wrong. {mismatch}

## Verify it

In a checkout of onecurve ({commit}), this fetches the run, makes {updates} again, and the samples of the
evaluations and of steps that it draws. Nothing of this repository is executed.

    uv run tools/verify.py {name}{trust}

## How it was made

| | |
|---|---|
| base model | {base} |
| data | {data} |
| reward | {reward} |
| code of its own | {code} |
| made with | {machine} |
| command | `{command}` |
| config | [run/config.py](run/config.py); {rerun} |

{evaluation}

![Training reward]({picture})

## What is here

| file | what |
|---|---|
| `*.safetensors` | the last checkpoint in bfloat16, for `from_pretrained` |
| `samples.parquet` | every sample, for `datasets.load_dataset` |
| `run/` | the run's own folder: config, ledger, metrics, rollout files, checkpoints with the optimizer's state |
"""


def check_secrets(run, public):
    """Ends this process with one line if a run's config.py has what looks like a key, and `public` does not name it."""
    path = run / "config.py"
    names = [name or address for name, address in SECRET.findall(path.read_text())]
    name = next((name for name in names if name not in public), None)
    why = f"what follows {name} looks like a key, and everybody could read it"
    require(not name, f"{path}: {why}; have a program read it from a file, or say --public={name}")


def copy_sealed(checkpoint, out):
    """Copies a checkpoint: its record, and the files that this names."""
    for name in ("checkpoint.json", *read_checkpoint(checkpoint, 0, 1)["files"]):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(checkpoint / name, out / name)


def export(checkpoint, out):
    """The weights of a checkpoint in bfloat16, and its other files for other programs."""
    for path in (checkpoint / name for name in read_checkpoint(checkpoint, 0, 1)["files"]):
        if path.parent != checkpoint:
            continue
        if path.suffix == ".safetensors":
            tensors = {name: x.to(torch.bfloat16) for name, x in load_file(path).items()}
            write_file(out / path.name, tensors)
        elif path.name != "config.json":
            shutil.copy(path, out)
    if (checkpoint / "config.json").is_file():
        hf = json.loads((checkpoint / "config.json").read_text())
        (out / "config.json").write_text(json.dumps(hf | dict(dtype="bfloat16"), indent=1))
    if (checkpoint / "adapter_config.json").is_file():
        peft = json.loads((checkpoint / "adapter_config.json").read_text())
        base = peft["base_model_name_or_path"]
        base = base if of_hub(base) else Path(base).name
        (out / "adapter_config.json").write_text(json.dumps(peft | dict(base_model_name_or_path=base), indent=1))


def of_hub(name):
    """Whether a model or a data set is the hub's, and not a file, a folder or something made here."""
    here = Path(name).exists() or Path(name).suffix in (*FILES, ".gguf")
    return bool(NAME.fullmatch(name)) and not here


def named(name):
    """A model or a data set for the card: what is a file or a folder here is its last name, and a hash."""
    path = Path(name)
    own = path.exists()
    if path.suffix == ".gguf":
        from onecurve.models import gguf

        path = gguf.find(name, "init_from")  # of a package, it may be
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        return path.name if path.is_absolute() else name
    total = hashlib.sha256()
    for file in files:
        with open(file, "rb") as f:
            hashlib.file_digest(f, lambda: total)  # of one file the hash that sha256sum gives
    return f"{path.name if own else name}, not in this repository; a repeat needs it: sha256 {total.hexdigest()}"


def code_of(config):
    """The Python files of a config's reward, loss, advantage and agent."""
    values = " ".join(str(config.get(key, "")) for key in (*OWN, "reward", "agent"))
    files = sorted({*re.findall(r"([^+*\s]+\.py):", values)})
    there = [next(filter(Path.is_file, (Path(file), ROOT / file)), None) for file in files]
    return [path for path in there if path and path.stat().st_size <= MOST_CODE]


def sample_rows(step, t, meta, config, tokenizer):
    """Rows of SAMPLE of a rollout group; an agent's sample has a row for each of its dialogues."""
    advantages = plot.advantages_of_group(t, meta, config)
    sizes = t["lengths"].tolist()
    columns = [t[key].split(sizes) for key in ("tokens", "logprobs", "loss_mask")]
    of = t["sample"].tolist() if "sample" in t else range(len(sizes))
    for g, tokens, logprobs, sampled in zip(of, *columns):
        yield dict(
            step=step, prompt=meta["prompt"], sample=g, prompt_text=meta.get("prompt_text"),
            text=tokenizer.decode(tokens.tolist()), tokens=tokens.tolist(), logprobs=logprobs.tolist(),
            sampled=sampled.tolist(), reward=float(t["rewards"][g]),
            advantage=None if advantages is None else float(advantages[g]),
        )  # fmt: skip


def write_samples(run, config, tokenizer, path):
    """samples.parquet; the groups that were sampled, but not finished in a step, are left out."""
    with pyarrow.parquet.ParquetWriter(path, SAMPLE) as file:
        for folder in sorted(run.glob("queue/rl_*")):
            groups = map(sync.read_group, sorted(folder.glob("group_*")))
            finished = [group for group in groups if group[1].get("finished", True)]
            rows = [row for group in finished for row in sample_rows(int(folder.name[3:]), *group, config, tokenizer)]
            file.write_table(pyarrow.Table.from_pylist(rows, SAMPLE))


def card(run, name, first=0):
    """The text of README.md. run: plot.py's Run; first: of a branch the step of its first checkpoint that is there."""
    config = run.config
    steps = [line for line in run.lines if line["phase"] == "rl"]
    different = sum(line.get("logprob_mismatch_tokens", 0) for line in steps)
    passes = [line["scores"] | line for line in evaluations(run.folder) if "pass@1" in line["scores"]]
    notes = re.findall("^# (.*)$", (run.folder / "config.py").read_text(), re.MULTILINE)  # as versions.provenance
    notes = [re.sub(r"(?<![^= ])/\S*/", "", note) for note in notes]  # folders of this machine say nothing elsewhere
    origin = "" if branched(run.folder) is None else notes.pop(0)
    command, commit, machine = [*notes, *["unknown"] * 3][:3]
    scratch = config["init_from"] == "scratch"
    hub = {"base_model": config["init_from"], "datasets": config["dataset"]}
    front = "".join(f"{key}: {value}\n" for key, value in hub.items() if of_hub(value))
    code = ", ".join(f"[run/{path.name}](run/{path.name})" for path in code_of(config))
    evaluation = ""
    if passes:
        ends = (f"{x['pass@1']:.4f} +- {x['pass@1_ci95']:.4f} after {x['step']}" for x in (passes[0], passes[-1]))
        evaluation = f"Held out, pass@1: {', '.join(ends)} RL steps; the evaluations' digest is {passes[-1]['chain']}."
    said = (
        f"Of all sampled tokens {different} had another log-prob in the trainer than in the engine, compared as bits."
    )
    return CARD.format(
        name=name, front=front, digest=plot.digest_of(run), trained=plot.steps_of(run), mismatch=said * bool(steps),
        commit=commit, machine=machine, command=command, base="none: from random weights" if scratch
        else named(config["init_from"]), data=named(config["dataset"]), reward=config["reward"], code=code or "none",
        updates=f"its updates from step {first} on" if first else "all its updates",
        trust=f" --trust={first}" * bool(first),
        rerun=f"of the later steps: {origin}" if origin else "running it again reruns the run",
        library="peft" if config.get("lora_rank") else "transformers", evaluation=evaluation, picture="reward.png",
    )  # fmt: skip


def write_folder(run, name, out, kept, public=()):
    """Makes `out` what the hub gets. public: names of what looks like a key and is none."""
    check_links(run)
    config = saved_config(run)
    check_secrets(run, public)
    sealed = checkpoints(run / "ckpt")
    require(sealed, f"{run}: no checkpoint in it, and so no model to publish (--checkpoint_every)")
    read = plot.read_run(run, name)
    ledger = lines(run, "ledger.jsonl")
    require(ledger, f"{run}: its ledger is empty, and so there is no digest to publish")
    began = branched(run) or 0
    first = next((x for x in sealed if int(x.name[5:]) >= began), sealed[-1])
    why = "a branch with no checkpoint but its last: no step could be made again; branch with more --keep_checkpoints"
    require(not began or int(first.name[5:]) <= ledger[-1]["step"], f"{run}: {why}")
    with TemporaryDirectory() as scratch:  # a kill may have torn a line; what the card says is under these digests
        checked_digest(run / "ledger.jsonl", scratch)
        if evaluations(run):
            checked_digest(run / "evaluations.jsonl", scratch, first=sync.FIRST_EVALUATION)
    shutil.rmtree(out, ignore_errors=True)
    (out / "run" / "ckpt").mkdir(parents=True)
    export(sealed[-1], out)
    write_samples(run, config, load_tokenizer(sealed[-1])[0], out / "samples.parquet")
    for file in ("config.py", *LOGS):
        if (run / file).is_file():
            shutil.copy(run / file, out / "run")
    for path in code_of(config):
        shutil.copy(path, out / "run")
    for checkpoint in {*sealed[len(sealed) - kept :], *[first] * bool(began)}:
        copy_sealed(checkpoint, out / "run" / "ckpt" / checkpoint.name)
    for path in [*run.glob("queue/*_[0-9]*/group_*.safetensors"), *run.glob("queue/*_[0-9]*/trainer.safetensors")]:
        copy = out / "run" / path.relative_to(run)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    figures = plot.draw([read], {})
    (figures.get("reward") or next(iter(figures.values()))).savefig(out / "reward.png", dpi=150)
    (out / "README.md").write_text(card(read, name, int(first.name[5:]) * bool(began)))


def upload(folder, name, private, message):
    """Puts the folder on the hub; returns the address."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        return api.upload_folder(repo_id=name, folder_path=folder, commit_message=message).commit_url
    except Exception as error:
        fail(f"{name}: the hub did not take it: {sync.reason(error)}; try `hf auth login`, or --dry")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="its folder")
    parser.add_argument("name", help="of the repository: user/name")
    parser.add_argument("--dry", action="store_true", help="upload nothing")
    parser.add_argument("--private", action="store_true", help="a new repository is not public")
    parser.add_argument("--public", action="append", default=[], help="a name after which no key stands")
    parser.add_argument("--checkpoints", type=int, default=1, help="how many, the last ones, others can go on from")
    args = parser.parse_args(argv)
    require(NAME.fullmatch(args.name), f"{args.name}: not the name of a repository; use user/name")
    require(args.checkpoints >= 0, f"--checkpoints={args.checkpoints}: use 0 or more")
    out = args.run / "publish"
    try:
        write_folder(args.run, args.name, out, args.checkpoints, args.public)
    except sync.RunError as error:
        fail(str(error).removeprefix("error: "))
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {size / 1e6:.1f} MB", flush=True)
    if not args.dry:
        digest = plot.digest_of(plot.read_run(args.run, args.name))
        print(upload(out, args.name, args.private, f"digest {digest}"))


if __name__ == "__main__":
    main()
