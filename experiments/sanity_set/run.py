"""
The sanity set: prompts that the base solves 20 to 80 % of the time. Which algorithm does not learn to solve them all?

    uv run experiments/sanity_set/run.py
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from study import Study, forest, label_ends, lines, mean_of, panels, plot, read_group  # noqa: E402

ALGORITHMS = {
    "GRPO": "",
    "GSPO": "--loss=gspo --loss_aggregation=sequence --clip_low=3e-4 --clip_high=4e-4",
    "CISPO": "--loss=cispo --clip_low=1.0 --clip_high=2.0",
    "GRPO, KL in the loss": "--kl_coef=0.02",
    "MaxRL": "--advantage=experiments/losses.py:maxrl",
}
SOLVED = 0.95
study = Study(__file__)
seeds, steps = (1, 4) if study.quick else (3, 96)
names = [*ALGORITHMS][:: 3 if study.quick else 1]
task = ["config/tiny.py", "experiments/sums.py", "--warmup_sft_steps=0", f"--init_from={study.start()}"]
base = study.make({"base": [*task, "--mode=eval", "--eval_samples=32"]})["base"]
groups = [read_group(path) for path in sorted(base.glob("queue/eval_*/group_*"))]
known = [meta for tensors, meta in groups if 0.2 <= tensors["rewards"].mean() <= 0.8][:8]
data = study.out / f"set_{base.name}.jsonl"
data.write_text("".join(json.dumps(dict(prompt=x["prompt_text"], answer=x["answer"])) + "\n" for x in known))
task += [f"--dataset={data}", f"--eval_split={data}", f"--max_steps={steps}", f"--eval_every={steps // 4}"]
task += "--eval_samples=64 --prompts_per_step=8 --group_size=16 --updates_per_batch=2 --checkpoint_every=0".split()
wanted = {}
for name in names:
    for seed in range(1, seeds + 1):
        wanted[f"{name} {seed}"] = [*task, f"--seed={seed}", *ALGORITHMS[name].split()]
made = study.make(wanted)

figure, (left, right) = panels("pass@1 on the set, mean; in colour if below 0.95", "After the last step")
rows, ends, finals, colors = [], {}, {}, []
for name, color in zip(names, plot.COLORS):
    found = [lines(made[f"{name} {k}"], phase="eval") for k in range(1, seeds + 1)]
    curve = [mean_of([x["pass@1"] for x in same])[0] for same in zip(*found)]
    finals[name] = [x[-1]["pass@1"] for x in found]
    colors.append(color if curve[-1] < SOLVED else "#999999")
    ends[name] = curve[-1], colors[-1]
    left.plot([x["step"] for x in found[0]], curve, "o-", color=colors[-1], linewidth=1.5, markersize=3)
    each = ", ".join(f"{x:.3f}" for x in finals[name])
    flags = f"`{ALGORITHMS[name]}`" if ALGORITHMS[name] else "none"
    rows.append([name, flags, each, "{:.3f} +- {:.3f}".format(*mean_of(finals[name]))])
study.table(["algorithm", "flags", "pass@1 on the set, each seed", "mean"], rows)
left.axhline(SOLVED, color="#444444", linewidth=0.7)
forest(right, finals, colors, SOLVED)
left.set(xlabel="steps", ylabel="pass@1")
right.set(xlabel="pass@1", xlim=(0.75, 1.05))
label_ends(left, ends)
study.end(figure)
