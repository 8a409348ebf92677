"""
Every algorithm on the tiny task, from one start, over some seeds: what it learns, and whether its bits hold.

    python tools/algorithms.py                                  # all, 3 seeds: about half an hour on two cores
    python tools/algorithms.py grpo ppo --seeds=1 --steps=20 --threads=1

Supervised learning on config/tiny.py makes the start (and, going on, the teacher); from there each algorithm does the
same number of RL steps. A quarter of its first seed is run a second time, and replayed on two trainers: both must give
the same ledger. Prints a Markdown table; exit status 1 if a log-prob differed, a ledger differed or nothing was
learned. Flags it does not know go to train_grpo.py.
"""

import argparse
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import runs
import torch

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


def run(folder, *flags, ranks=1):
    """The metrics of a run of config/tiny.py with these flags."""
    return runs.run(folder, "config/tiny.py", *flags, ranks=ranks)


def ledger(folder):
    return (folder / "ledger.jsonl").read_text()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="*", metavar="algorithm", help=f"of {', '.join(FLAGS)}; none: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    args, more = parser.parse_known_args()
    chosen = args.algorithms or list(FLAGS)
    if unknown := [name for name in chosen if name not in FLAGS]:
        parser.error(f"no such algorithm as {unknown[0]!r}; known are {', '.join(FLAGS)}")
    folder, started, good = Path(tempfile.mkdtemp(prefix="algorithms")), time.monotonic(), True
    print("| algorithm | flags | held-out pass@1 | over seeds | differing log-probs | twice, and on 2 trainers |")
    print("|---|---|---|---|---|---|")
    try:
        run(
            folder / "sft",
            *SFT,
            f"--max_steps={3 * START}",
            f"--checkpoint_every={START}",
            "--keep_checkpoints=4",
            *more,
            "--watch=",  # which is of RL steps
        )
        start, teacher = (folder / f"sft/ckpt/step_{n * START:06d}" for n in (1, 3))
        common = f"--init_from={start} --warmup_sft_steps=0 --prompts_per_step=32 --eval_samples=4 --checkpoint_every=0"
        common += " --learning_rate=2e-4"
        for name in chosen:
            flags = [*common.split(), *more, f"--max_steps={args.steps}", f"--lr_decay_steps={args.steps}"]
            flags += FLAGS[name].format(teacher=teacher).split()
            before, after, different = [], [], 0
            for seed in range(1, args.seeds + 1):
                steps = run(folder / f"{name}{seed}", *flags, f"--seed={seed}")
                scores = [x["pass@1"] for x in steps if x["phase"] == "eval"]
                before, after = before + scores[:1], after + scores[1:]
                different += sum(x["logprob_mismatch_tokens"] for x in steps if x["phase"] == "rl")
            first = folder / f"{name}1"
            short = [*flags, "--seed=1", "--eval_samples=1", f"--max_steps={max(1, args.steps // 4)}"]
            run(folder / "again", *short)
            run(folder / "trainers", *short, "--mode=replay", f"--queue_dir={first / 'queue'}", ranks=2)
            again = ledger(folder / "again")
            same = ledger(first).startswith(again) and again == ledger(folder / "trainers")
            spread = f" +- {statistics.stdev(after):.3f}" if len(after) > 1 else ""
            mean = [statistics.mean(x) for x in (before, after)]
            good &= same and not different and mean[1] > mean[0]
            each = ", ".join(f"{x:.3f}" for x in after)
            row = [name, f"`{FLAGS[name]}`", f"{mean[0]:.3f} -> {mean[1]:.3f}{spread}", each, str(different)]
            print("|", " | ".join([*row, "equal" if same else "NOT EQUAL"]), "|", flush=True)
            for used in folder.glob("[!s]*"):
                shutil.rmtree(used)
    finally:
        shutil.rmtree(folder)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    what = f"{args.steps} steps of 32 x 8 samples, seeds 1 to {args.seeds}"
    print(f"{what}; {device}, torch {torch.__version__}, {time.monotonic() - started:.0f} s")
    sys.exit(not good)


if __name__ == "__main__":
    main()
