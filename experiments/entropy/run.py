"""
Entropy: reward against the policy's entropy over a run, one trajectory for each knob that moves the entropy.

    uv run experiments/entropy/run.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from study import Study, forest, label_ends, paired, panels, plot  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
from law import fit, mean_points, points  # noqa: E402

KNOBS = {
    "GRPO": "",
    "clip_low 0.05": "--clip_low=0.05",
    "no lower clip": "--clip_low=1.0",
    "clip_high 0.5": "--clip_high=0.5",
    "entropy bonus": "--entropy_coef=0.02",
    "KL-Cov": "--loss=experiments/losses.py:kl_cov",
    "temperature 1.3": "--temperature=1.3",
}
study = Study(__file__)
seeds, names, steps = (1, ["GRPO"], 20) if study.quick else (3, [*KNOBS], 60)
task = "config/small.py experiments/sums.py --dataset=arithmetic:0:20 --eval_size=64 --leaf_tokens=2048".split()
sft = "--mode=sft --learning_rate=2e-3 --warmup_steps=20 --max_steps=400".split()
start = study.start(*task, *sft)
task += ["--warmup_sft_steps=0", f"--init_from={start}", "--checkpoint_every=0"]
task += [f"--max_steps={steps}", "--updates_per_batch=4", "--eval_samples=8"]
wanted = {}
for name in names:
    wanted |= {f"{name} {seed}": [*task, f"--seed={seed}", *KNOBS[name].split()] for seed in range(1, seeds + 1)}
made = study.make(wanted)


def runs_of(name):
    return [made[f"{name} {seed}"] for seed in range(1, seeds + 1)]


def ends_of(name):
    """(entropies, rewards, rewards minus GRPO's law) of each seed's last point."""
    entropies, rewards = zip(*([x[-1] for x in points(run)] for run in runs_of(name)))
    return entropies, rewards, [r - of_grpo(h) for h, r in zip(entropies, rewards)]


figure, (left, right) = panels("Each point 10 steps; dashed: GRPO's law", "Last ten steps, minus GRPO, paired")
inset = left.inset_axes([0.13, 0.7, 0.4, 0.22])
colors = ["#222222", *plot.COLORS[:4], "#E69F00", "#999999"]
rows, ends, differences = [], {}, {}
of_grpo, _ = fit(*mean_points(runs_of("GRPO")))
for name, color in zip(names, colors):
    entropies, rewards = mean_points(runs_of(name))
    half = max(2, len(rewards) // 2)
    early, _ = fit(entropies[:half], rewards[:half])
    axis = inset if "temperature" in name else left
    axis.plot(entropies, rewards, "o-", color=color, linewidth=1.5, markersize=3)
    ends |= {name: (rewards[-1], color)} if axis is left else {}
    row = [name, *(f"{x[0]:.2f} to {x[-1]:.2f}" for x in (entropies, rewards)), f"{fit(entropies, rewards)[1]:.2f}"]
    row += [f"{rewards[-1] - x:+.2f}" for x in (early(entropies[-1]), rewards[half - 1])]
    pairs = [*zip(ends_of(name), ends_of("GRPO"))]  # entropies, rewards, rewards minus the law
    rows.append([*row, *("" if name == "GRPO" else paired(*pair) for pair in pairs)])
    differences[name] = [x - y for x, y in zip(*pairs[1])]
left.plot([0.33, 0.4], [of_grpo(0.33), of_grpo(0.4)], "--", color="#888888", linewidth=1)
left.set(xlabel="entropy, nats per token", ylabel="reward in training", xlim=(0.404, 0.33), ylim=(0.5, 0.7))
inset.invert_xaxis()
inset.tick_params(labelsize=7)
inset.set_title("temperature 1.3", fontsize=8, color="#777777")
label_ends(left, ends)
forest(right, {name: x for name, x in differences.items() if name != "GRPO"}, colors[1:])
right.set(xlabel="difference of reward")
head = "knob, entropy, reward, R2, minus its early law, minus half-way, entropy minus GRPO's, reward minus GRPO's"
study.table([*head.split(", "), "at equal entropy"], rows)
study.end(figure)
