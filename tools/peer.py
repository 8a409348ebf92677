"""
Sampled tokens per second, compared with TRL's GRPOTrainer on a CPU.

    python tools/peer.py                                # the 0.8 M model, 64 samples of 32 and of 128 tokens
    python tools/peer.py all                            # longer samples and a larger model, too
    python tools/peer.py --ranks=2 --lag=1 --lanes=1    # training and sampling concurrently

Our trainer and TRL's run alternately, twice each: the same model folder, prompts, reward, threads, and samples per
optimizer step. uv makes TRL an environment of its own, with the torch and the transformers that we run on, and needs a
registry the first time. TRL is set to what is fast on a CPU and does our work (`trl_side`): one batch of all samples,
float32, no gradient checkpointing, SDPA, generation by transformers with its KV cache, min_new_tokens = max_new_tokens
where we ignore the EOS, one update per batch, no KL, fused AdamW with our betas and rate, no saving, no logging. TRL's
step is the time between two calls of on_step_end, its rollout the part before the reward is called. The roof is of
arithmetic alone, at the rate of a float32 torch.mm: 2 operations per matrix element for each sampled token, 6 for each
trained token, a prompt's among them, and the causal attention of both. A prompt counts for each of its samples, though
ours goes through it once (share_prefixes).
"""

import argparse
import contextlib
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
PROMPTS, GROUP = 8, 8  # bench.measure's own
SAMPLES = PROMPTS * GROUP
MODELS = {  # --scratch_args
    "0.8 M": "",
    "8 M": "num_hidden_layers=8, hidden_size=256, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1024",
}
SETTINGS = {"default": [("0.8 M", 32), ("0.8 M", 128)]}  # model, sampled tokens
SETTINGS["all"] = SETTINGS["default"] + [("0.8 M", 512), ("8 M", 128)]


def refuse(reason):
    print(f"error: {reason}", file=sys.stderr)
    sys.exit(2)


# ---- TRL's side, in its environment


def trl_side(folder):
    """Trains as task.json says; times.json gets each step's seconds of (rollout, training)."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    task = json.loads((folder / "task.json").read_text())
    torch.set_num_threads(task["threads"])
    ends = []  # when the run began, and when each step ended
    scored = []  # when each step's samples were there

    def different_characters(completions, completion_ids, **_):
        scored.append(time.monotonic())
        lengths = {len(ids) for ids in completion_ids}
        assert lengths == {task["new_tokens"]}, f"samples of {lengths} tokens"  # or the rate would be of fewer tokens
        return [float(len(set(text))) for text in completions]

    class Clock(TrainerCallback):
        def on_train_begin(self, *_, **__):
            ends.append(time.monotonic())

        def on_step_end(self, *_, **__):
            ends.append(time.monotonic())

    config = GRPOConfig(
        output_dir=str(folder / "trl"), max_steps=task["steps"], use_cpu=True, bf16=False, seed=1,
        model_init_kwargs=dict(dtype="float32", attn_implementation="sdpa"),
        per_device_train_batch_size=SAMPLES, gradient_accumulation_steps=1, num_generations=GROUP,
        gradient_checkpointing=False, dataloader_pin_memory=False, temperature=1.0,
        max_completion_length=task["new_tokens"],
        generation_kwargs=dict(min_new_tokens=task["new_tokens"], use_cache=True),
        beta=0.0, num_iterations=1,  # so neither a reference's log-probs nor the old ones are computed
        optim="adamw_torch_fused", adam_beta1=0.9, adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0,
        learning_rate=1e-6, lr_scheduler_type="constant",
        save_strategy="no", eval_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": prompt} for prompt in task["prompts"]])
    GRPOTrainer(str(folder / "model"), different_characters, config, data, callbacks=[Clock()]).train()
    times = [(middle - begin, end - middle) for begin, middle, end in zip(ends, scored, ends[1:])]
    (folder / "times.json").write_text(json.dumps(times))


def trl_python():
    """The command that is Python in TRL's environment. Ends the run in one line if there can be none."""
    from configurator import library_versions

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
    """Float32 operations per second of torch.mm; the best of many, since what else runs on the machine slows it."""
    import torch

    torch.set_num_threads(threads)
    a = torch.randn(1024, 1024)
    b = torch.randn(1024, 1024)
    times = []
    for _ in range(50):
        begin = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - begin)
    return 2 * 1024**3 / min(times)


def operations_of_step(sizes, vocabulary, prompt, new_tokens):
    """Operations to sample and train all samples of a step, whose prompts have `prompt` tokens on average."""
    from configurator import scratch_sizes

    layers, hidden, heads, kv_heads, head_dim, mlp, *_ = scratch_sizes({"scratch_args": sizes}).values()
    layer = hidden * head_dim * 2 * (heads + kv_heads) + 3 * hidden * mlp
    matrices = layers * layer + vocabulary * hidden  # the last is the head; the embedding only looks up
    length = prompt + new_tokens
    # Scores and sums take 4 operations per head, dim and earlier token, of which there are length / 2 on average.
    attention = layers * 2 * length**2 * heads * head_dim
    return SAMPLES * (matrices * (2 * new_tokens + 6 * length) + (1 + 3) * attention)


def phases(step):
    """Where the seconds of a step of ours went, from its metrics; they add up to the step's."""
    rollout, wait, train, sync = (step[f"{key}_seconds"] for key in ("rollout", "wait", "train", "sync"))
    sampling = {"rollout": rollout, "queue": wait - rollout}
    if wait < rollout:  # concurrently with the training, --lag=1 --ranks=2
        sampling = {"waiting": wait}
    parts = {**sampling, "training": train, "weight sync": sync}
    return parts | {"record": step["step_seconds"] - wait - train - sync}


def both_sides(args, python, sizes, task):
    """(our runs, TRL's runs, size of the vocabulary); of each run its steps' {phase: seconds}. task: TRL's."""
    from bench import measure

    from models import folders
    from train_grpo import DEFAULTS

    folder = Path(tempfile.mkdtemp(prefix="peer"))
    command = [*python, str(Path(__file__).resolve()), f"--trl_side={folder}"]
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}  # all it needs is in the folder
    ours = []
    theirs = []
    try:
        folders.make_scratch_model(folder / "model", DEFAULTS | {"scratch_args": sizes})
        (folder / "task.json").write_text(json.dumps(task))
        for _ in range(2):
            steps = measure(args, f"--init_from={folder / 'model'}")
            ours.append([phases(step) for step in steps])
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=offline)
            times = json.loads((folder / "times.json").read_text())[4:]
            theirs.append([{"rollout": rollout, "training": training} for rollout, training in times])
        return ours, theirs, json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
    finally:
        shutil.rmtree(folder)


def compare(args, python, rate, task, name, new_tokens):
    """Prints a row of the table; returns the lines about where the seconds went."""
    args.new_tokens = new_tokens
    ours, theirs, vocabulary = both_sides(args, python, MODELS[name], task | dict(new_tokens=new_tokens))
    rates, fastest, splits = [], [], []
    for side, runs in (("ours", ours), ("TRL", theirs)):
        rates.append([SAMPLES * new_tokens / statistics.median(sum(x.values()) for x in run) for run in runs])
        steps = [x for run in runs for x in run]
        fastest.append(min(sum(x.values()) for x in steps))
        parts = ", ".join(f"{key} {statistics.median(x[key] for x in steps):.3f}" for key in steps[0])
        splits.append(f"{name}, {SAMPLES} x {new_tokens}, {side}: {parts}")
    prompt = statistics.fmean(map(len, task["prompts"]))  # a token is a character
    roof = SAMPLES * new_tokens * rate / operations_of_step(MODELS[name], vocabulary, prompt, new_tokens)
    mine, other = (statistics.median(x) for x in rates)
    each = (", ".join(f"{x:.0f}" for x in x) for x in rates)
    ratios = f"{mine / other:.2f} | {fastest[1] / fastest[0]:.2f}"
    shares = f"{roof:.0f} | {mine / roof:.0%} | {other / roof:.0%}"
    print(f"| {name} | {SAMPLES} x {new_tokens} | {' | '.join(each)} | {ratios} | {shares} |", flush=True)
    return splits


def report(args):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import torch

    from configurator import commit, library_versions
    from rewards import arithmetic

    if torch.cuda.is_available():
        refuse("it compares on a CPU: hide the GPUs with CUDA_VISIBLE_DEVICES=")
    threads = args.threads or os.cpu_count()
    python = trl_python()
    rate = matmul_rate(threads)
    task = dict(prompts=[row["prompt"] for row in arithmetic()], steps=args.steps, threads=threads)
    print("| model | samples x tokens | ours, runs | TRL, runs | ours / TRL | fastest steps | roof | ours | TRL |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    splits = [compare(args, python, rate, task, *setting) for setting in SETTINGS[args.settings]]
    print("\nSampled tokens per second of rollout and training together: medians, their ratio and that of the fastest")
    print("steps, which other load on the machine changes less, the roof and the shares of it.")
    print("Seconds of a step, medians:\n")
    print("\n".join(f"- {line}" for lines in splits for line in lines))
    cpu = "a CPU"
    with contextlib.suppress(OSError, StopIteration):  # not on Linux
        known = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line for line in known if line.startswith("model name")).partition(":")[2].strip()
    numbers = ", ".join(f"{name} {number}" for name, number in library_versions().items())
    print(f"\n{cpu}, {os.cpu_count()} cores, {threads} threads, float32 torch.mm of 1024^3 {rate / 1e9:.0f} GFLOP/s")
    print(f"{args.steps - 4} steps a run, {TRL.replace('==', ' ')}, {numbers}, Python {platform.python_version()}")
    print(f"{time.strftime('%Y-%m-%d')}, commit {commit()}: python {shlex.join(sys.argv)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="?", default="default", choices=SETTINGS)
    parser.add_argument("--ranks", type=int, default=1, help="of our side; more than 1 are torchrun's")
    parser.add_argument("--steps", type=int, default=12, help="of a run; the first four warm up")
    parser.add_argument("--threads", type=int, default=0, help="of a process; 0: one per core")
    parser.add_argument("--trl_side", type=Path, help=argparse.SUPPRESS)  # where the other side's run is described
    args, args.flags = parser.parse_known_args()
    if args.trl_side:
        trl_side(args.trl_side)
    else:
        report(args)


if __name__ == "__main__":
    main()
