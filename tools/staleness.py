"""
The price of asynchrony: the tiny task with samples whose weights are 0, 1, 2, 4 and 8 steps old, trained on as they are
(PPO's clip against the weights that sampled), with truncated importance weights, and with decoupled PPO.

    python tools/staleness.py                            # 3 seeds, 39 runs: about half an hour on two cores
    python tools/staleness.py --lags 0 8 --losses ppo --seeds=1 --steps=20
    python tools/staleness.py --tail                     # lengths with a long tail: whole samples beside segments
    uv run --with matplotlib tools/staleness.py --picture=out/staleness.svg

All runs go on from one supervised start, with one trainer and one engine side by side; of one seed they see the same
prompts and the same noise, so two lags differ by the lag alone. Each has the same digest whenever it is run. Idle: the
share of the steps' time in which the trainer waited for samples, or the engine drew none. Prints Markdown tables, line
by line. Flags it does not know go to train_grpo.py.

`--tail` learns answers whose lengths follow a power law, most a few tokens and some of them 240, and then trains on
whether a sample's length is even. A step with whole samples lasts as long as its longest; with segments the long ones
go on in the next step. Slots: the share of (samples drawn x tokens of the longest of them in a round) that were tokens,
which is how full an engine's batch is.
"""

import argparse
import json
import platform
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from algorithms import SFT, START, run

FLAGS = {"ppo": "", "truncated": "--importance=truncate", "decoupled": "--importance=full"}
COMMON = "--learning_rate=2e-4 --warmup_sft_steps=0 --checkpoint_every=0 --sample_every=0"
LONGEST, SEGMENT = 240, 32


def mean(steps, key):
    return statistics.fmean(step[key] for step in steps)


def idle(steps):
    """(trainer's, engine's) share of the steps' time; the last steps of a lag draw no samples."""
    steps = steps[:-8] if len(steps) > 16 else steps
    whole, waited, drew = (sum(x[f"{k}_seconds"] for x in steps) for k in ("step", "wait", "rollout"))
    return waited / whole, max(0.0, 1 - drew / whole)


def lags(args, start, folder, more):
    print("| loss | lag | held-out pass@1 | over seeds | mean reward | ratio's variance | KL to behaviour ", end="")
    print("| effective samples | idle: trainer, engine | pass@1 gained per minute |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    curves = {}
    for loss in args.losses:
        for lag in args.lags:
            if lag == 0 and loss != args.losses[0]:
                continue  # all weights are 1 then: the three are one
            flags = [*COMMON.split(), *FLAGS[loss].split(), f"--lag={lag}", f"--max_steps={args.steps}"]
            flags += [f"--init_from={start}", "--prompts_per_step=32", "--eval_samples=2", *more]
            flags += [f"--lr_decay_steps={args.steps}"]
            before, after, runs = [], [], []
            for seed in range(1, args.seeds + 1):
                metrics = run(folder / f"{loss}{lag}_{seed}", *flags, f"--seed={seed}", ranks=2)
                first, last = (x["pass@1"] for x in metrics if x["phase"] == "eval")
                before, after = [*before, first], [*after, last]
                runs.append([x for x in metrics if x["phase"] == "rl"])
            steps = [step for one in runs for step in one]
            curves[loss, lag] = [statistics.fmean(x["reward_mean"] for x in same) for same in zip(*runs)]
            spread = f" +- {statistics.stdev(after):.3f}" if len(after) > 1 else ""
            late = [step for step in steps if step.get("staleness")] or [{}]
            figures = (
                late[0].get(k) and mean(late, k) for k in ("ratio_variance", "kl_behaviour", "effective_sample_size")
            )
            gained = (statistics.fmean(after) - statistics.fmean(before)) / sum(x["step_seconds"] for x in runs[0]) * 60
            row = [
                loss if lag else "any",
                lag,
                f"{statistics.fmean(after):.3f}{spread}",
                ", ".join(f"{x:.3f}" for x in after),
            ]
            row += [f"{mean(steps, 'reward_mean'):.3f}", *("" if x is None else f"{x:.2g}" for x in figures)]
            row += [", ".join(f"{x:.0%}" for x in idle(runs[0])), f"{gained:.2f}"]
            print("|", " | ".join(map(str, row)), "|", flush=True)
    print(f"\nFrom {statistics.fmean(before):.3f}; {args.steps} steps of 32 x 8 samples, seeds 1 to {args.seeds}.")
    return curves


def draw(curves, path):
    from matplotlib import pyplot

    losses = list(dict.fromkeys(loss for loss, _ in curves))
    figure, axes = pyplot.subplots(1, len(losses), figsize=(4.2 * len(losses), 3.4), sharey=True, squeeze=False)
    for axis, loss in zip(axes[0], losses):
        for (its, lag), rewards in curves.items():
            if its == loss or lag == 0:
                smooth = [statistics.fmean(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]
                axis.plot(smooth, label=f"lag {lag}", linewidth=1.3)
        axis.set(title=loss, xlabel="step")
    axes[0][0].set_ylabel("reward, mean of 5 steps and of the seeds")
    axes[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def tail(args, folder, more):
    rng = random.Random(1)
    with open(folder / "tail.jsonl", "w") as file:
        for i in range(2000):
            length = min(LONGEST, int(5 / (1 - rng.random())))
            file.write(json.dumps(dict(prompt=f"{i}=", answer="x" * length)) + "\n")
    (folder / "even.py").write_text("def even(prompt, response, answer):\n    return float(len(response) % 2 == 0)\n")
    task = [f"--dataset={folder / 'tail.jsonl'}", f"--reward={folder / 'even.py'}:even", "--eval_size=0"]
    task += [f"--max_new_tokens={LONGEST + 8}", "--prompts_per_step=8", "--lanes=1", *more]
    start = folder / "sft"
    run(start, *SFT, *task, "--max_steps=150", "--checkpoint_every=150")
    task += [
        *COMMON.split(),
        "--learning_rate=1e-4",
        f"--init_from={start / 'ckpt' / 'step_000150'}",
        f"--max_steps={args.steps}",
        "--lag=1",
    ]
    print(
        "| | seconds per step | tokens/s | longest draw, tokens | slots | idle: trainer, engine | staleness | reward |"
    )
    print("|---|---|---|---|---|---|---|---|")
    kinds = {"whole samples": [], f"segments of {SEGMENT}": [f"--segment_tokens={SEGMENT}", "--groups_in_flight=24"]}
    for name, flags in [*kinds.items()] * 2:
        out = folder / "run"
        steps = [x for x in run(out, *task, *flags, ranks=2) if x["phase"] == "rl"][4:]
        used, there, longest = slots(out / "queue", SEGMENT if flags else LONGEST + 8)
        tokens = sum(x["tokens_per_second"] * x["step_seconds"] for x in steps)
        seconds = statistics.fmean(x["step_seconds"] for x in steps)
        row = [f"{seconds:.2f}", f"{tokens / len(steps) / seconds:.0f}", f"{longest:.0f}", f"{used / there:.0%}"]
        row += [", ".join(f"{x:.0%}" for x in idle(steps)), f"{mean(steps, 'staleness'):.1f}"]
        print(f"| {name} |", " | ".join([*row, f"{mean(steps, 'reward_mean'):.2f}"]), "|", flush=True)
        shutil.rmtree(out)


def slots(queue, most):
    """(tokens drawn, slots that were there for them, mean of the longest draws) in all rounds of a run's queue."""
    from safetensors import safe_open

    used, there, longest = 0, 0, []
    for folder in sorted(queue.glob("rl_*"))[4:]:
        drawn = {}  # per round the tokens of each sample
        for path in folder.glob("group_*"):
            with safe_open(path, "pt") as file:
                version = json.loads(file.metadata()["meta"])["version"]
                lengths, versions = file.get_tensor("lengths").tolist(), file.get_tensor("weight_version")
            fresh = [min(most, int((x == version).sum())) for x in versions.split(lengths)]
            drawn.setdefault(int(path.stem[6:]) // 24, []).extend(n for n in fresh if n)
        for tokens in drawn.values():
            used, there, longest = used + sum(tokens), there + len(tokens) * max(tokens), [*longest, max(tokens)]
    return used, there, statistics.fmean(longest)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--losses", nargs="+", choices=FLAGS, default=list(FLAGS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--tail", action="store_true", help="whole samples beside segments, on lengths with a long tail"
    )
    parser.add_argument("--picture", type=Path, help="of the rewards, to this file; needs matplotlib")
    args, more = parser.parse_known_args()
    if args.picture:
        import matplotlib

        matplotlib.use("Agg")
    folder, started = Path(tempfile.mkdtemp(prefix="staleness")), time.monotonic()
    try:
        if args.tail:
            tail(args, folder, more)
        else:
            run(folder / "sft", *SFT, f"--max_steps={START}", f"--checkpoint_every={START}")
            curves = lags(args, folder / "sft" / "ckpt" / f"step_{START:06d}", folder, more)
            if args.picture:
                draw(curves, args.picture)
    finally:
        shutil.rmtree(folder)
    print(f"{platform.machine()} CPU, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
