"""
Spurious rewards: a base that knows two formats is paid for truth, for a format, for errors, or by a coin.

    uv run experiments/spurious/run.py
"""

import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from study import Study, label_ends, lines, mean_of, panels, plot  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
from task import looks, write_data  # noqa: E402

TASK = "experiments/spurious/task.py"
MARKED = f"reward_{TASK}:marked"
REWARDS = {
    "true": f"--reward=numeric+0*{TASK}:marked",
    "random": f"--reward=numeric+0*{TASK}:marked --advantage={TASK}:coin",
    "rare format": f"--reward={TASK}:marked+0*numeric",
    "common format": f"--reward={TASK}:plain+0*numeric+0*{TASK}:marked",
    "inverted": f"--reward=-1*numeric+0*{TASK}:marked",
}
CLIPS = {"clip": "", "no clip": "--clip_low=1.0 --clip_high=1000.0"}
study = Study(__file__)
seeds, steps = (1, 4) if study.quick else (3, 40)
rewards, clips = (["random"], ["clip"]) if study.quick else ([*REWARDS], [*CLIPS])
write_data(study.out)
task = ["config/small.py", "experiments/sums.py", "--leaf_tokens=2048", "--eval_size=100"]
task.append(f"--eval_split={study.out / 'sums.jsonl'}")
sft = "--mode=sft --sft_column=shown --eval_size=0 --learning_rate=2e-3 --warmup_steps=20".split()
sft += [f"--max_steps={60 if study.quick else 800}", f"--dataset={study.out / 'shown.jsonl'}"]
base = study.make({"base": [*task, *sft]})["base"]
task += [f"--dataset={study.out / 'sums.jsonl'}", f"--init_from={max(base.glob('ckpt/step_*'))}"]
task += f"--warmup_sft_steps=0 --checkpoint_every=0 --max_steps={steps} --updates_per_batch=4".split()
wanted = {}
for reward, clip, seed in product(rewards, clips, range(1, seeds + 1)):
    wanted[f"{reward} {clip} {seed}"] = [*task, f"--seed={seed}", *REWARDS[reward].split(), *CLIPS[clip].split()]
made = study.make(wanted)


def row(name, clip, step):
    """What the evaluations after this many steps saw: means of the seeds."""
    columns = zip(*(looks(made[f"{name} {clip} {seed}"], step) for seed in range(1, seeds + 1)))
    known = [[x for x in column if x is not None] for column in columns]
    return ["{:.3f} +- {:.3f}".format(*mean_of(x)) if len(x) == seeds else "too few" for x in known]


figure, axes = panels(*(f"Share of the rare format in training: {clip}" for clip in clips))
rows = [["none yet", "", *row(rewards[0], clips[0], 0), "", ""]]
for axis, clip in zip(axes, clips):
    ends = {}
    for reward, color in zip(rewards, plot.COLORS):
        every = [lines(made[f"{reward} {clip} {seed}"], phase="rl") for seed in range(1, seeds + 1)]
        curves = [[x[MARKED] for x in run] for run in every]
        means = [mean_of(same)[0] for same in zip(*curves)]
        for curve in curves:
            axis.plot(curve, color=color, linewidth=0.7, alpha=0.4)
        axis.plot(means, color=color, linewidth=1.5)
        ends[reward] = means[-1], color
        clipped = mean_of([x["clip_fraction"] for run in every for x in run])[0]
        entropy = mean_of([run[-1]["entropy"] for run in every])[0]
        rows.append([reward, clip, *row(reward, clip, steps), f"{clipped:.3f}", f"{entropy:.2f}"])
    axis.set(xlabel="RL steps done", ylim=(-0.02, 1.02))
    label_ends(axis, ends)
head = "reward, ratio, rare format, right, right in the rare, in the common, tokens clipped, last entropy".split(", ")
study.table(head, rows)
study.end(figure)
