"""
Every algorithm on the tiny task, from one start, over some seeds: what it learns, and whether its bits hold.

    python tools/algorithms.py                                  # all, 3 seeds: about half an hour on two cores
    python tools/algorithms.py grpo ppo --seeds=1 --steps=20 --threads=1

Supervised learning on config/tiny.py makes the start (and, going on, the teacher); from there each algorithm does the
same number of RL steps. A quarter of its first seed is run a second time, and replayed on two trainers: both must give
the same ledger. Prints a Markdown table; exit status 1 if a log-prob differed, a ledger differed or nothing was
learned. Flags it does not know go to train_grpo.py.

    python tools/algorithms.py --moved            # what differs once the policy has moved: some 40 minutes

With one update on fresh samples many losses have one gradient. So here each is run with four updates per batch, and
with samples of weights two steps old; beside what it learns stands the first step after which its weights differ from
those of grpo with the same rewards, on equal noise. A model of 0.1 M parameters, sums of numbers below 20; the start
has also seen each sum behind itself, solved: such are the hints of sdpo.
"""

import argparse
import json
import os
import platform
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import runs
import torch

import rewards
import train_grpo

SFT = "--mode=sft --learning_rate=1e-3 --warmup_steps=20 --lr_decay_steps=0".split()
START = 257  # supervised steps, as in the warm-up of config/tiny.py; the teacher has three times as many
FLAGS = {
    "grpo": "",
    "dr_grpo": "--advantage=dr_grpo --loss_aggregation=constant",
    "rloo": "--advantage=rloo",
    "reinforce++": "--advantage=reinforce++",
    "reinforce++_baseline": "--advantage=reinforce++_baseline",
    "ppo": "--advantage=gae",
    "dapo": "--clip_high=0.28 --dynamic_sampling=2 --overlong_cache=1",
    "gspo": "--loss=gspo --loss_aggregation=sequence --clip_low=3e-4 --clip_high=4e-4",
    "cispo": "--loss=cispo --clip_low=1.0 --clip_high=2.0",
    "pg": "--loss=pg --advantage=dr_grpo",
    "grpo, 2 updates": "--updates_per_batch=2 --dual_clip=3.0 --importance=truncate",
    "grpo, KL in the loss": "--kl_coef=0.02",
    "rloo, KL in the reward": "--advantage=rloo --kl_coef=0.02 --kl_in_reward --kl_estimator=k1",
    "distillation": "--advantage=distill --loss=pg --reference={teacher}",
}

EXTRA = "experiments/losses.py:"
TERMS = "--reward=numeric+0.2*config/hacked.py:mentions"  # the second one is won by writing digits
MOVED = {  # name: (the row that it is compared with, flags)
    "grpo": ("", ""),
    "dppo": ("grpo", f"--loss={EXTRA}dppo"),
    "sapo": ("grpo", f"--loss={EXTRA}sapo"),
    "gmpo": ("grpo", f"--loss={EXTRA}gmpo --loss_aggregation=sequence"),
    "off-policy mask": ("grpo", f"--loss={EXTRA}off_policy_mask"),
    "kl-cov": ("grpo", f"--loss={EXTRA}kl_cov"),
    "adaptive entropy": ("grpo", f"--loss={EXTRA}adaptive_entropy"),
    "maxrl": ("grpo", f"--advantage={EXTRA}maxrl"),
    "opo": ("grpo", f"--advantage={EXTRA}opo"),
    "sdpo": ("grpo", f"--loss={EXTRA}sdpo"),
    "grpo, two rewards": ("", TERMS),
    "gdpo, two rewards": ("grpo, two rewards", f"{TERMS} --advantage={EXTRA}gdpo"),
}
SETTINGS = {"4 updates": "--updates_per_batch=4 --learning_rate=1e-4", "lag 2": "--lag=2 --learning_rate=2e-4"}
FRESH = "--learning_rate=2e-4 --max_steps=4 --eval_samples=1"  # one update on fresh samples, of the first seed alone
SMALL = "config/small.py --arithmetic_size=20 --max_new_tokens=4 --eval_size=100 --max_prompt_tokens=16".split()


def run(folder, *flags, ranks=1):
    """The metrics of a run of config/tiny.py with these flags."""
    return runs.run(folder, "config/tiny.py", *flags, ranks=ranks)


def small(folder, *flags):
    """The metrics of a run with the model and the sums of --moved."""
    command = [str(runs.ROOT / "train_grpo.py"), *SMALL, *flags, f"--out_dir={folder}"]
    status, output = runs.run_warm(command, folder.with_suffix(".output"))
    runs.require(not status, f"{folder}: {runs.problem(output)}")
    return runs.lines(folder)


def hints(folder):
    """A file of the sums that --moved trains on, each once plain and once behind itself, solved."""
    config = runs.configurator.configure(train_grpo.DEFAULTS | {"__file__": train_grpo.__file__}, SMALL)
    rows = rewards.load_rows(config)[0]
    with open(folder / "sums.jsonl", "w") as file:
        for row in rows:
            for prompt in (row["prompt"], f"{row['prompt']}{row['answer']}<eos>{row['prompt']}"):
                file.write(json.dumps(row | dict(prompt=prompt)) + "\n")
    return folder / "sums.jsonl"


def apart(ours, theirs):
    """The first step after which the weights of two runs differ, or 'never'."""
    steps = zip(runs.lines(ours, "ledger.jsonl", "rl"), runs.lines(theirs, "ledger.jsonl", "rl"), strict=True)
    return next((x["step"] for x, y in steps if x["weights"] != y["weights"]), "never")


def moved(args, more, folder):
    """Prints the table of --moved. Returns whether no log-prob differed."""
    start = "--warmup_sft_steps=0 --mode=sft --max_steps=400 --sft_batch=64 --learning_rate=2e-3 --eval_size=0".split()
    small(folder / "start", *start, f"--dataset={hints(folder)}", "--checkpoint_every=400")
    common = [f"--init_from={folder}/start/ckpt/step_000400", *"--warmup_sft_steps=0 --checkpoint_every=0".split()]
    common += [*"--prompts_per_step=16 --eval_samples=4 --leaf_tokens=512".split(), f"--max_steps={args.steps}", *more]
    heads = [f"{setting}: held-out pass@1 | over seeds | apart after step" for setting in SETTINGS]
    print(f"| algorithm | flags | fresh: apart after step | {' | '.join(heads)} |")
    print("|---" * (3 + 3 * len(heads)) + "|")
    bases = {MOVED[name][0] for name in args.algorithms}
    different = 0
    for name in [name for name in MOVED if not args.algorithms or name in bases | {*args.algorithms}]:
        base, own = MOVED[name]
        row = [name, f"`{own}`" if own else "the defaults"]
        for setting, extra in (("fresh", FRESH), *SETTINGS.items()):
            scores = []
            steps_apart = []
            for seed in range(1, args.seeds + 1 if setting in SETTINGS else 2):
                out = folder / f"{name} {setting} {seed}"
                steps = small(out, *common, *own.split(), *extra.split(), f"--seed={seed}")
                different += sum(x["logprob_mismatch_tokens"] for x in steps if x["phase"] == "rl")
                scores.append([x["pass@1"] for x in steps if x["phase"] == "eval"])
                steps_apart += [apart(out, folder / f"{base} {setting} {seed}")] if base else []
            if setting in SETTINGS:
                row += [learned(*zip(*scores)), ", ".join(f"{after:.3f}" for _, after in scores)]
            row.append(", ".join(map(str, dict.fromkeys(steps_apart))))
        print("|", " | ".join(row), "|", flush=True)
    return not different


def learned(before, after):
    """Scores (seeds,) before and after: their means, and the standard deviation of the second."""
    spread = f" +- {statistics.stdev(after):.3f}" if len(after) > 1 else ""
    return f"{statistics.mean(before):.3f} -> {statistics.mean(after):.3f}{spread}"


def ledger(folder):
    return (folder / "ledger.jsonl").read_text()


def every(args, more, folder):
    """Prints the table of all algorithms. Returns whether each learned something, and the same again."""
    print("| algorithm | flags | held-out pass@1 | over seeds | differing log-probs | twice, and on 2 trainers |")
    print("|---|---|---|---|---|---|")
    steps = [f"--max_steps={3 * START}", f"--checkpoint_every={START}", "--keep_checkpoints=4"]
    run(folder / "sft", *SFT, *steps, *more, "--watch=")  # which is of RL steps
    start, teacher = (folder / f"sft/ckpt/step_{n * START:06d}" for n in (1, 3))
    common = f"--init_from={start} --warmup_sft_steps=0 --prompts_per_step=32 --eval_samples=4 --checkpoint_every=0"
    common += " --learning_rate=2e-4"
    good = True
    for name in args.algorithms or FLAGS:
        flags = [*common.split(), *more, f"--max_steps={args.steps}", f"--lr_decay_steps={args.steps}"]
        flags += FLAGS[name].format(teacher=teacher).split()
        scores = []
        different = 0
        for seed in range(1, args.seeds + 1):
            steps = run(folder / f"{name}{seed}", *flags, f"--seed={seed}")
            scores.append([x["pass@1"] for x in steps if x["phase"] == "eval"])
            different += sum(x["logprob_mismatch_tokens"] for x in steps if x["phase"] == "rl")
        first = folder / f"{name}1"
        short = [*flags, "--seed=1", "--eval_samples=1", f"--max_steps={max(1, args.steps // 4)}"]
        run(folder / "again", *short)
        run(folder / "trainers", *short, "--mode=replay", f"--queue_dir={first / 'queue'}", ranks=2)
        again = ledger(folder / "again")
        same = ledger(first).startswith(again) and again == ledger(folder / "trainers")
        before, after = (statistics.mean(x) for x in zip(*scores))
        good &= same and not different and after > before
        each = ", ".join(f"{after:.3f}" for _, after in scores)
        row = [name, f"`{FLAGS[name]}`", learned(*zip(*scores)), each, str(different)]
        print("|", " | ".join([*row, "equal" if same else "NOT EQUAL"]), "|", flush=True)
        for used in folder.glob("[!s]*"):
            shutil.rmtree(used)
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="*", metavar="algorithm", help=f"of {', '.join(FLAGS)}; none: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="40, or with --moved 20")
    parser.add_argument("--moved", action="store_true", help="with updates per batch and a lag")
    args, more = parser.parse_known_args()
    table, known, size = (moved, MOVED, "16 x 8") if args.moved else (every, FLAGS, "32 x 8")
    args.steps = args.steps or (20 if args.moved else 40)
    if unknown := [name for name in args.algorithms if name not in known]:
        parser.error(f"no such algorithm as {unknown[0]!r}; known are {', '.join(known)}")
    folder = Path(tempfile.mkdtemp(prefix="algorithms"))
    started = time.monotonic()
    try:
        good = table(args, more, folder)
    finally:
        shutil.rmtree(folder)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    what = f"{args.steps} steps of {size} samples, seeds 1 to {args.seeds}"
    versions = ", ".join(f"{name} {number}" for name, number in runs.configurator.library_versions().items())
    print(f"{what}; {device}, {os.cpu_count()} cores, {versions}, commit {runs.configurator.commit()[:7]}, ", end="")
    print(f"{time.monotonic() - started:.0f} s: {shlex.join(['python', *sys.argv])}")
    sys.exit(not good)


if __name__ == "__main__":
    main()
