"""
The price of staleness: samples whose weights are 1 to 8 steps old, with five ways to train on them.

    uv run experiments/staleness/run.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from study import Study, label_ends, lines, mean_of, panels, plot, score  # noqa: E402

LOSSES = {
    "PPO": "",
    "truncated": "--importance=truncate",
    "decoupled": "--importance=full",
    "DPPO": "--loss=experiments/losses.py:dppo",
    "off-policy mask": "--loss=experiments/losses.py:off_policy_mask",
}
study = Study(__file__)
seeds, lags = (1, [2]) if study.quick else (3, [1, 8])
task = ["config/tiny.py", "experiments/sums.py", "--warmup_sft_steps=0", f"--init_from={study.start()}"]
task += ["--checkpoint_every=0"] + ["--max_steps=4"] * study.quick
wanted = {f"fresh {seed}": [*task, f"--seed={seed}"] for seed in range(1, seeds + 1)}
for loss, flags in LOSSES.items():
    for lag in lags:
        for seed in range(1, seeds + 1):
            wanted[f"{loss} {lag} {seed}"] = [*task, f"--seed={seed}", f"--lag={lag}", *flags.split()]
made = study.make(wanted)


def scores(setting):
    return [score(made[f"{setting} {seed}"]) for seed in range(1, seeds + 1)]


def late(setting, metric):
    """The metric's mean over the steps whose samples are older than their weights."""
    every = [x for seed in range(1, seeds + 1) for x in lines(made[f"{setting} {seed}"], phase="rl")]
    return mean_of([x[metric] for x in every if x["staleness"] > 0])[0]


fresh = scores("fresh")
figure, (left, right) = panels(
    "Held-out pass@1, minus that of lag 0", "The same, by the share of samples that is effective"
)
rows = [["any", 0, f"{mean_of(fresh)[0]:.3f}", "0", "0", "1"]]
ends = {}
for loss, color in zip(LOSSES, plot.COLORS):
    changes = [[b - a for a, b in zip(fresh, scores(f"{loss} {lag}"))] for lag in lags]
    means, halves = zip(*map(mean_of, changes))
    samples = [late(f"{loss} {lag}", "effective_sample_size") for lag in lags]
    left.plot([0, *lags], [0, *means], color=color, linewidth=1.5)
    left.plot(lags, changes, ".", color=color, alpha=0.6)
    right.plot([1, *samples], [0, *means], "o-", color=color, linewidth=1.5)
    ends[loss] = means[-1], color
    for lag, mean, half, share in zip(lags, means, halves, samples):
        after = mean_of(scores(f"{loss} {lag}"))[0]
        kl = late(f"{loss} {lag}", "kl_behaviour")
        rows.append([loss, lag, f"{after:.3f}", f"{mean:+.3f} +- {half:.3f}", f"{kl:.2g}", f"{share:.2g}"])
study.table(["loss", "lag", "pass@1", "minus lag 0, paired", "KL to behaviour", "effective samples"], rows)
left.set(xlabel="lag, steps")
right.set(xlabel="effective sample size, over the samples")
right.invert_xaxis()
label_ends(left, ends)
study.end(figure)
