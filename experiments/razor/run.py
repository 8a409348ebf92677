"""
RL's razor: does the KL by which a model moves on a new task tell what it forgets of an old one; does RL forget least?

    uv run experiments/razor/run.py
"""

import sys
from itertools import product
from pathlib import Path

import task

sys.path.insert(0, str(Path(__file__).parent.parent))
from study import Study, checkpoints, in_float64, label_ends, mean_of, paired, panels, plot  # noqa: E402

study = Study(__file__)
seeds, before, steps, labels = (1, 40, 5, ["far"]) if study.quick else (3, 500, 40, [*task.LABELS])
flags = "config/small.py experiments/sums.py --leaf_tokens=2048 --eval_size=0 --max_new_tokens=2".split()
flags += ["--warmup_sft_steps=0", "--warmup_steps=20"]
sft = "--mode=sft --sft_column=shown".split()
task.write_data(study.out)
learn = [f"--dataset={study.out}/base.jsonl", "--sft_batch=64", "--learning_rate=2e-3", f"--max_steps={before}"]
start = study.start(*flags, *sft, *learn, name="base")
flags += "--learning_rate=3e-4 --checkpoint_every=5 --keep_checkpoints=20".split()
flags += [f"--init_from={start}", f"--max_steps={steps}"]
arms = {"RL": [f"--dataset={study.out}/new.jsonl", "--reward=experiments/razor/task.py:parity"]}
arms |= {f"SFT {name}": [*sft, f"--dataset={study.out}/{name}.jsonl", "--sft_batch=128"] for name in labels}
runs = [*product(arms, range(1, seeds + 1))]
made = study.make({f"{arm} {seed}": [*flags, *arms[arm], f"--seed={seed}"] for arm, seed in runs})
base = task.first_tokens(*in_float64(start))
looks = {arm: [] for arm in arms}  # of each seed's checkpoints: (old, new, KL, KL the other way)
for (arm, _), run in zip(runs, made.values()):
    looks[arm].append([task.look(task.first_tokens(*in_float64(c)), base) for c in checkpoints(run / "ckpt")])

rows = []
for arm in arms:
    row = [arm]
    for column, level in ((1, 0.92), (2, 0.4)):
        found, of_rl = (task.crossing(looks[x], column, level) for x in (arm, "RL"))
        shown = [found[column ^ 3], found[0]] if found else []
        row += ["{:.3f} +- {:.3f}".format(*mean_of(x)) for x in shown] or ["-", "-"]
        row.append(paired(found[0], of_rl[0]) if arm != "RL" and found and of_rl else "")
    rows.append(row)
head = "arm; KL at new 0.92; old there; minus RL's; new at KL 0.4; old there; minus RL's"
study.table(head.split("; "), rows)
laws = []
for name, column in (("KL(base, model)", 2), ("KL(model, base)", 3), ("the new task's score", 1)):
    laws.append([name, *(f"{x:.2f}" for x in task.fits(looks.values(), column))])
study.table(["R2 of the old task's score by", "one curve for all arms", "a curve for each arm"], laws)
figure, axes = panels("Old task against KL on the new task", "Old task against new task")
ends = {}
for (arm, each), color in zip(looks.items(), ["#222222", *plot.COLORS]):
    means = [[mean_of(x)[0] for x in zip(*same)] for same in zip(*each)]
    for axis, column in zip(axes, (2, 1)):
        axis.plot([x[column] for x in means], [x[0] for x in means], color=color, linewidth=1.5)
        for run in each:
            axis.plot([x[column] for x in run], [x[0] for x in run], ".", color=color, alpha=0.5, markersize=5)
    ends[arm] = means[-1][0], color
    axes[0].annotate(arm, means[-1][2::-2], xytext=(7, 8), textcoords="offset points", color=color)
axes[0].set(xlabel="KL(base || model), nats, new task", ylabel="probability of the right digit, old task")
axes[0].margins(x=0.15)
axes[1].set(xlabel="probability of a right digit, new task")
label_ends(axes[1], ends)
study.end(figure)
