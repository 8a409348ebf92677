"""
Entropy: reward against the policy's entropy over a run, one trajectory for each knob that moves the entropy.

    uv run experiments/entropy/run.py
"""

import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from study import Study, label_ends, lines, panels, plot  # noqa: E402

KNOBS = {
    "GRPO": "",
    "clip_low 0.05": "--clip_low=0.05",
    "no lower clip": "--clip_low=1.0",
    "clip_high 0.5": "--clip_high=0.5",
    "entropy bonus": "--entropy_coef=0.02",
    "KL-Cov": "--loss=experiments/losses.py:kl_cov",
    "temperature 1.3": "--temperature=1.3",
}
WINDOW = 10  # steps of a point
study = Study(__file__)
seeds, names, steps = (1, ["GRPO"], 20) if study.quick else (3, [*KNOBS], 60)
task = "config/small.py experiments/sums.py --arithmetic_size=20 --eval_size=64 --leaf_tokens=2048".split()
sft = "--mode=sft --learning_rate=2e-3 --warmup_steps=20 --max_steps=400".split()
start = study.make({"start": [*task, *sft]})["start"] / "ckpt" / "step_000400"
task += ["--warmup_sft_steps=0", f"--init_from={start}", "--checkpoint_every=0"]
task += [f"--max_steps={steps}", "--updates_per_batch=4", "--eval_samples=8"]
wanted = {}
for name in names:
    wanted |= {f"{name} {seed}": [*task, f"--seed={seed}", *KNOBS[name].split()] for seed in range(1, seeds + 1)}
made = study.make(wanted)


def trajectory(name):
    """(entropies, rewards) of a knob: a point is the mean of all seeds and of WINDOW steps."""
    runs = [lines(made[f"{name} {seed}"], phase="rl") for seed in range(1, seeds + 1)]
    points = [[x for run in runs for x in run[i : i + WINDOW]] for i in range(0, steps, WINDOW)]
    return [[statistics.fmean(x[key] for x in point) for point in points] for key in ("entropy", "reward_mean")]


def law(entropies, rewards):
    """(a, b) of the least squares of R = -a exp(H) + b."""
    fit = statistics.linear_regression([math.exp(h) for h in entropies], rewards)
    return -fit.slope, fit.intercept


figure, (left, right) = panels("Reward against entropy, each point 10 steps; dashed: GRPO's law", "Entropy, nats")
rows, ends, labels = [], {}, {}
grpo = law(*trajectory("GRPO"))
for name, color in zip(names, [*plot.COLORS, "#999999"]):
    entropies, rewards = trajectory(name)
    half = max(2, len(rewards) // 2)
    left.plot(entropies, rewards, "o-", color=color, linewidth=1.5, markersize=3)
    right.plot([WINDOW * (k + 0.5) for k in range(len(entropies))], entropies, color=color, linewidth=1.5)
    ends[name] = rewards[-1], color
    labels[name] = entropies[-1], color
    last = math.exp(entropies[-1])
    off = (rewards[-1] - (b - a * last) for a, b in (law(entropies[:half], rewards[:half]), grpo))
    figures = *law(entropies, rewards), statistics.correlation([*map(math.exp, entropies)], rewards) ** 2
    row = [name, *(f"{x[0]:.2f} to {x[-1]:.2f}" for x in (entropies, rewards)), *(f"{x:.2f}" for x in figures)]
    rows.append([*row, *(f"{x:+.2f}" for x in off)])
line = [k / 100 for k in range(33, 57)]
left.plot(line, [grpo[1] - grpo[0] * math.exp(h) for h in line], "--", color="#888888", linewidth=1)
left.set(xlabel="entropy of the policy, nats per token")
right.set(xlabel="RL steps done")
label_ends(left, ends)
label_ends(right, labels)
head = "knob, entropy, reward, a, b, R2, last reward off its early law, off GRPO's law"
study.table(head.split(", "), rows)
study.end(figure)
