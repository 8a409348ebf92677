"""
The sanity set: prompts that the base solves 20 to 80 % of the time. Which algorithm does not learn to solve them all?

    uv run experiments/sanity_set/run.py
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from study import Study, label_ends, lines, mean_of, panels, plot, read_group  # noqa: E402

OWN = "experiments/losses.py:"
ALGORITHMS = {
    "GRPO": "",
    "GSPO": "--loss=gspo --loss_aggregation=sequence --clip_low=3e-4 --clip_high=4e-4",
    "CISPO": "--loss=cispo --clip_low=1.0 --clip_high=2.0",
    "GRPO, KL in the loss": "--kl_coef=0.02",
    "DPPO": f"--loss={OWN}dppo",
    "MaxRL": f"--advantage={OWN}maxrl",
}
study = Study(__file__)
seeds, steps = (1, 4) if study.quick else (3, 48)
names = [*ALGORITHMS][:: 3 if study.quick else 1]
task = ["config/tiny.py", "experiments/sums.py", "--warmup_sft_steps=0", f"--init_from={study.start()}"]
base = study.make({"base": [*task, "--mode=eval", "--eval_samples=32"]})["base"]
groups = [read_group(path) for path in sorted(base.glob("queue/eval_*/group_*"))]
half = [meta for tensors, meta in groups if 0.2 <= tensors["rewards"].mean() <= 0.8][:16]
data = study.out / f"set_{base.name}.jsonl"
data.write_text("".join(json.dumps(dict(prompt=x["prompt_text"], answer=x["answer"])) + "\n" for x in half))
task += [f"--dataset={data}", f"--eval_split={data}", f"--max_steps={steps}", f"--eval_every={steps // 4}"]
task += f"--lr_decay_steps={steps} --eval_samples=32 --updates_per_batch=4 --checkpoint_every=0".split()
wanted = {}
for name in names:
    for seed in range(1, seeds + 1):
        wanted[f"{name} {seed}"] = [*task, f"--seed={seed}", *ALGORITHMS[name].split()]
made = study.make(wanted)

figure, (left, right) = panels("pass@1 on the set, mean; named if below 0.95", "After the last step, each seed")
rows, ends = [], {}
for i, name in enumerate(names):
    found = [lines(made[f"{name} {k}"], phase="eval") for k in range(1, seeds + 1)]
    curve = [mean_of([x["pass@1"] for x in same])[0] for same in zip(*found)]
    final = [x[-1]["pass@1"] for x in found]
    color = plot.COLORS[len(ends) % len(plot.COLORS)] if curve[-1] < 0.95 else "#BBBBBB"
    ends |= {name: (curve[-1], color)} if curve[-1] < 0.95 else {}
    left.plot([x["step"] for x in found[0]], curve, color=color, linewidth=1.5)
    right.plot(final, [i] * seeds, "o", color=color)
    each = ", ".join(f"{x:.3f}" for x in final)
    rows.append([name, f"`{ALGORITHMS[name]}`", each, "{:.3f} +- {:.3f}".format(*mean_of(final))])
study.table(["algorithm", "flags", "pass@1 on the set, each seed", "mean, with 95 % interval"], rows)
right.axvline(0.95, color="#444444", linewidth=0.7)
right.set_yticks(range(len(names)), names)
left.set_xlabel("RL steps done")
label_ends(left, ends)
study.end(figure)
