"""
The price of staleness: samples whose weights are 1 to 8 steps old, with five ways to train on them.

    uv run experiments/staleness/run.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from study import Study, forest, lines, mean_of, paired, panels, plot, score  # noqa: E402

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
figure, (left, right) = panels("Minus lag 0, paired, each seed and the mean", "The means, by the effective samples")
rows = [["any", 0, f"{mean_of(fresh)[0]:.3f}", "0", "0", "1"]]
changes = {}
for lag, fill in zip(lags, ("none", "full")):
    for i, (loss, color) in enumerate(zip(LOSSES, plot.COLORS)):
        found = scores(f"{loss} {lag}")
        changes[f"{loss}, lag {lag}"] = [x - y for x, y in zip(found, fresh)]
        kl, share = (late(f"{loss} {lag}", metric) for metric in ("kl_behaviour", "effective_sample_size"))
        rows.append([loss, lag, f"{mean_of(found)[0]:.3f}", paired(found, fresh), f"{kl:.2g}", f"{share:.2g}"])
        place = share, mean_of(changes[f"{loss}, lag {lag}"])[0]
        right.plot(*place, "o", color=color, fillstyle=fill)
        if lag == lags[-1]:
            side = dict(xytext=(6, -4), ha="left") if i % 2 else dict(xytext=(-6, 4), ha="right")
            right.annotate(loss, place, textcoords="offset points", color=color, **side)
study.table(["loss", "lag", "pass@1", "minus lag 0, paired", "KL to behaviour", "effective samples"], rows)
rows = []
for loss in [*LOSSES][1:]:
    rows.append([f"{loss} minus PPO", paired(scores(f"{loss} {lags[-1]}"), scores(f"PPO {lags[-1]}"))])
study.table([f"lag of {lags[-1]}", "pass@1, paired"], rows)
forest(left, changes, [*plot.COLORS[:5]] * 2)
left.set(xlabel="change of held-out pass@1")
right.set(xlim=(0.4, 1.02), xlabel="effective samples, share of the drawn", ylabel="change of held-out pass@1")
right.axhline(0, color="#444444", linewidth=0.7)
study.end(figure)
