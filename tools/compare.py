"""
Two settings compared over some seeds, on equal noise: the effect of the second one, and its uncertainty.

    python tools/compare.py '--advantage=grpo' '--advantage=rloo' config/tiny.py --seeds=5
    python tools/compare.py '' '--kl_coef=0.02' config/tiny.py --init_from=out/sft/ckpt/step_000257 --metric=reward_mean

All arguments after the first two are for both sides. Two runs with one seed have the same prompts, in the same order,
and the same noise in every sample, and so differ by the setting alone: their differences, seed by seed, vary less than
the runs do. Printed are the mean of these paired differences, its 95 % interval (Student's t), the interval that
unpaired runs would give (Welch 1947), and how many seeds it would take to be as sure without equal noise.

--metric is a name in metrics.jsonl: of evaluations (such as pass@1; the last one counts) or of steps (the mean over the
last quarter). Runs are kept in --out and made once, so that several comparisons share a side.
"""

import argparse
import math
import re
import shlex
import shutil
import statistics
from pathlib import Path

import runs
from scipy import stats  # SGLang's own dependency
from tqdm import tqdm

from configurator import fail
from onecurve.run.versions import commit
from sync import content_hash

FEW = 4  # with fewer seeds the spread, and so an interval, is itself hardly known


def run(folder, flags):
    """The lines of metrics.jsonl of the finished run with these flags in this folder, which is made if needed."""
    finished = folder / "finished"  # holds the commit of the code that finished the run
    if not finished.exists() or finished.read_text() != commit():
        shutil.rmtree(folder, ignore_errors=True)
        runs.run(folder, *flags)
        finished.write_text(commit())
    return runs.lines(folder)


def figure(lines, metric):
    """A run's figure: of its last evaluation, or the mean over the last quarter of its steps."""
    held_out = [x[metric] for x in lines if x["phase"] == "eval" and metric in x]
    steps = [x[metric] for x in lines if x["phase"] == "rl" and x.get(metric) is not None]
    if not held_out and not steps:
        known = sorted({name for x in lines if x["phase"] in ("eval", "rl") for name in x if name != "phase"})
        fail(f"--metric={metric}: the runs have {', '.join(known)}")
    return held_out[-1] if held_out else statistics.mean(steps[-max(1, len(steps) // 4) :])


def intervals(a, b):
    """
    {name: float} of figures a and b (lists, seed by seed): the mean of b - a, the half-widths of its 95 % intervals,
    `paired` and `unpaired`, and the number of `seeds` with which `unpaired` would be as narrow as `paired` is.
    """
    n, differences = len(a), [y - x for x, y in zip(a, b)]
    paired, apart = statistics.variance(differences) / n, (statistics.variance(a) + statistics.variance(b)) / n
    squares = sum((statistics.variance(x) / n) ** 2 for x in (a, b))
    freedom = apart**2 * (n - 1) / squares if squares else n - 1  # Welch and Satterthwaite's
    half = [stats.t.ppf(0.975, df) * math.sqrt(v) for df, v in ((n - 1, paired), (freedom, apart))]
    seeds = n * apart / paired if paired else math.inf if apart else n
    return dict(mean=statistics.mean(differences), paired=half[0], unpaired=half[1], seeds=seeds)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--metric", default="pass@1")
    parser.add_argument("--out", type=Path, default=Path("out/compare"))
    args, rest = parser.parse_known_args()
    if len(rest) < 2:
        fail("wants the flags of two sides, in quotes, as in '--advantage=grpo' '--advantage=rloo'")
    a, b, *both = rest
    if args.seeds < 2:
        fail("--seeds: an interval wants two seeds or more")
    sides, firsts = [[], []], []
    for seed in tqdm(range(1, args.seeds + 1), unit="seed"):
        ledgers = []
        for side, flags in zip(sides, (a, b)):
            flags = [*both, *shlex.split(flags)]
            name = re.sub(r"[^\w.=-]", "_", " ".join(flags))[-80:]
            folder = args.out / f"{name}_{content_hash(flags)[:8]}" / f"seed_{seed}"
            side.append(figure(run(folder, [*flags, f"--seed={seed}"]), args.metric))
            ledgers.append(runs.lines(folder, "ledger.jsonl"))
        firsts.append([next(x["tokens"] for x in lines if x["phase"] == lines[-1]["phase"]) for lines in ledgers])
        tqdm.write(f"seed {seed}: {sides[0][-1]:.4f} | {sides[1][-1]:.4f}")
    found = intervals(*sides)
    means = ", ".join(f"{side!r} {statistics.mean(x):.4f}" for side, x in zip((a, b), sides))
    between = f"{found['mean']:+.4f} +- {found['paired']:.4f} paired, +- {found['unpaired']:.4f} unpaired"
    worth = f"{args.seeds} seeds on equal noise are worth {found['seeds']:.1f} without"
    if args.seeds < FEW:
        worth = f"{args.seeds} seeds are too few to trust these intervals; {FEW} or more say something"
    print(f"{args.metric}: {means}; difference {between}: {worth}")
    print(f"the first step's samples are equal with {sum(x == y for x, y in firsts)} of {args.seeds} seeds")


if __name__ == "__main__":
    main()
