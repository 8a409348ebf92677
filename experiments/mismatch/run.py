"""
The mismatch dial: an engine of fewer bits than the trainer, five ways to train on its samples, and which tokens differ.

    uv run experiments/mismatch/run.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from study import Study, label_ends, lines, mean_of, panels, plot, score  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
from tokens import draw, early_and_late, sizes  # noqa: E402

TREATMENTS = {
    "none": "--loss=pg",
    "clip": "",
    "truncate": "--loss=pg --importance=truncate",
    "mask": "--loss=pg --importance=mask --importance_floor=0.5",
    "sequence mask": "--loss=experiments/losses.py:off_policy_mask",
}
TOKENS = {"fixed": "bf16, fixed", "bf16 none": "bf16, learning", "fp8:act none": "fp8:act, learning"}
study = Study(__file__)
seeds, steps = (1, 4) if study.quick else (3, 40)
arms = [(bits, "none") for bits in ("fp32", "fp16", "bf16")] + [("fp8:act", name) for name in TREATMENTS]
arms = [("bf16", "none"), ("fp8:act", "none")] if study.quick else arms
task = ["config/tiny.py", "experiments/sums.py", "--warmup_sft_steps=0", f"--init_from={study.start()}"]
task += ["--checkpoint_every=0", "--eval_samples=8", f"--max_steps={steps}"]
wanted = {}
for seed in range(1, seeds + 1):
    for bits, name in arms:
        flags = [f"--seed={seed}", f"--engine_bits={bits}", *TREATMENTS[name].split()]
        wanted[f"{bits} {name} {seed}"] = [*task, *flags]
    wanted[f"fixed {seed}"] = [*task, f"--seed={seed}", "--engine_bits=bf16", "--learning_rate=0.0"]
made = study.make(wanted)


def runs_of(arm):
    return [made[f"{arm} {seed}"] for seed in range(1, seeds + 1)]


figure, (left, right) = panels(
    "Reward in training, mean of seeds and 9 steps", "Mismatch of tokens; dotted: late steps"
)
rows, ends, fresh = [], {}, []
for (bits, name), color in zip(arms, ["#444444", *plot.COLORS, "#999999"]):
    runs = runs_of(f"{bits} {name}")
    rewards = [[x["reward_mean"] for x in lines(run, phase="rl")] for run in runs]
    means = [mean_of(same)[0] for same in zip(*rewards)]
    curve = [mean_of(means[max(0, k - 4) : k + 5])[0] for k in range(steps)]
    left.plot(curve, color=color, linewidth=1.5)
    ends[f"{bits} {name}".replace(" none", "")] = curve[-1], color
    held_out = zip(*([x["pass@1"] for x in lines(run, phase="eval")] for run in runs))
    found = [(mean_of(curve)[0], score(run)) for curve, run in zip(rewards, runs)]
    fresh = fresh or found  # of the first, fp32
    changes = [mean_of([x[i] - y[i] for x, y in zip(found, fresh)]) for i in (0, 1)]
    cells = [f"{mean_of(same)[0]:.3f}" for same in held_out]
    cells += ["{:+.3f} +- {:.3f}".format(*change) for change in reversed(changes)]
    rows.append([bits, name, *cells, *(["0"] * 4 if bits == "fp32" else sizes(runs, steps))])
head = "engine, treatment, pass@1 before, after, minus fp32, reward minus fp32, distance, largest, over 1.2, over 2"
study.table(head.split(", "), rows)
rows, labels = [], {}
for (arm, name), color in zip(TOKENS.items(), plot.COLORS):
    found = [mean_of(column) for column in zip(*(early_and_late(run, steps) for run in runs_of(arm)))]
    rows.append([*name.split(", "), *("{:.2g} +- {:.1g}".format(*x) for x in found)])
    labels[name] = draw(right, runs_of(arm), steps, color), color
study.table("engine; weights; entropy early; distance early; entropy late; late; late, expected".split("; "), rows)
left.set_xlabel("RL steps done")
right.set(yscale="log", xlabel="entropy of the policy there, nats", ylabel="nats")
label_ends(left, ends)
label_ends(right, labels)
study.end(figure)
