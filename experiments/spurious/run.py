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
start = study.start(*task, *sft, name="base")
task += [f"--dataset={study.out / 'sums.jsonl'}", f"--init_from={start}"]
task += f"--warmup_sft_steps=0 --checkpoint_every=0 --max_steps={steps} --updates_per_batch=4".split()
wanted = {}
for reward, clip, seed in product(rewards, clips, range(1, seeds + 1)):
    wanted[f"{reward} {clip} {seed}"] = [*task, f"--seed={seed}", *REWARDS[reward].split(), *CLIPS[clip].split()]
made = study.make(wanted)


def runs_of(reward, clip):
    return [made[f"{reward} {clip} {seed}"] for seed in range(1, seeds + 1)]


def row(reward, clip, step):
    """What the evaluations after this many steps saw, of each seed."""
    columns = zip(*(looks(run, step) for run in runs_of(reward, clip)))
    return [", ".join("-" if x is None else f"{x:.2f}" for x in column) for column in columns]


figure, axes = panels("Share of the rare format; dotted: no clip", "Share that is correct; dotted: no clip")
rows = [["none yet", "", *row(rewards[0], clips[0], 0), "", ""]]
for axis, metric, label in zip(axes, (MARKED, "reward_numeric"), ("in the rare format", "correct")):
    ends = {}
    for reward, color in zip(rewards, [*plot.COLORS[:4], "#444444"]):
        for clip, dashes in zip(clips, ("-", ":")):
            curves = [[x[metric] for x in lines(run, phase="rl")] for run in runs_of(reward, clip)]
            means = [mean_of(same)[0] for same in zip(*curves)]
            axis.plot(means, dashes, color=color, linewidth=1.5)
            if clip == clips[0]:
                ends[reward] = means[-1], color
                axis.plot([*zip(*curves)], color=color, linewidth=0.6, alpha=0.35)
    axis.set(xlabel="RL steps done", ylabel=f"samples in training, share {label}", ylim=(-0.02, 1.02))
    label_ends(axis, ends)
for clip, reward in product(clips, rewards):
    steps_of = [lines(run, phase="rl") for run in runs_of(reward, clip)]
    clipped = mean_of([x["clip_fraction"] for run in steps_of for x in run])[0]
    entropy = mean_of([run[-1]["entropy"] for run in steps_of])[0]
    rows.append([reward, clip, *row(reward, clip, steps), f"{clipped:.3f}", f"{entropy:.2f}"])
head = "reward, ratio, rare format, correct, correct in the rare, in the common, tokens clipped, last entropy"
study.table(head.split(", "), rows)
study.end(figure)
