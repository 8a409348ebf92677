"""
The mismatch dial: an engine of fewer bits than the trainer, five ways to train on its samples, and which tokens differ.

    uv run experiments/mismatch/run.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from study import Study, forest, label_ends, lines, mean_of, paired, panels, plot  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
from tokens import BINS, changes, draw, late_over_early, sizes  # noqa: E402

TREATMENTS = {
    "none": "--loss=pg",
    "clip": "",
    "truncate": "--loss=pg --importance=truncate",
    "mask": "--loss=pg --importance=mask --importance_floor=0.5",
    "sequence mask": "--loss=experiments/losses.py:off_policy_mask",
}
TOKENS = {"bf16 fixed": "bf16, fixed", "bf16 none": "bf16, learning"}
TOKENS |= {"fp8:act fixed": "fp8:act, fixed", "fp8:act none": "fp8:act, learning"}
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
    for bits in ("bf16", "fp8:act"):
        wanted[f"{bits} fixed {seed}"] = [*task, f"--seed={seed}", f"--engine_bits={bits}", "--learning_rate=0.0"]
made = study.make(wanted)


def runs_of(arm):
    return [made[f"{arm} {seed}"] for seed in range(1, seeds + 1)]


rows, differences, fresh = [], {}, []
for bits, name in arms:
    runs = runs_of(f"{bits} {name}")
    rewards = [mean_of([x["reward_mean"] for x in lines(run, phase="rl")])[0] for run in runs]
    before, after = zip(*([x["pass@1"] for x in lines(run, phase="eval")] for run in runs))
    fresh = fresh or [after, rewards]  # of the first, fp32
    cells = [f"{mean_of(before)[0]:.3f}", f"{mean_of(after)[0]:.3f}", *map(paired, (after, rewards), fresh)]
    rows.append([bits, name, *cells, *(["0"] * 4 if bits == "fp32" else sizes(runs, steps))])
    differences[f"{bits} {name}"] = [x - y for x, y in zip(after, fresh[0])]
head = "engine, treatment, pass@1 before, after, minus fp32, reward minus fp32, distance, largest, over 1.2, over 2"
study.table(head.split(", "), rows)
titles = "Pass@1 minus fp32's, paired", "How far engine and trainer are apart at a token", "Late steps over early ones"
figure, (left, middle, right) = panels(*titles)
differences.pop("fp32 none", None)
forest(left, differences, [*plot.COLORS, "#999999"])
rows, bins, ends = [], [], {}
for i, ((arm, name), color) in enumerate(zip(TOKENS.items(), plot.COLORS)):
    rows.append([*name.split(", "), *changes(runs_of(arm), steps)])
    bins.append([name, *late_over_early(right, runs_of(arm), steps, color, i)])
    ends[name] = draw(middle, runs_of(arm), steps, color), color
head = "engine; weights; entropy early; late minus early; distance early; late minus early; expected"
study.table(head.split("; "), rows)
study.table(["late / early, at entropy", *BINS], bins)
left.set(xlabel="difference of held-out pass@1")
middle.set(yscale="log", xlabel="entropy of the policy there, nats", ylabel="mean |log-prob difference|, nats")
label_ends(middle, ends)
study.end(figure)
