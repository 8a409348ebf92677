"""
What a real chat model of 135 M parameters learns on two CPU cores: to add, to keep rules, to sort.

    uv run experiments/real_model/run.py --jobs=1
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from study import Study, label_ends, lines, mean_of, panels, plot  # noqa: E402

TASKS = {
    "sums": ("Sums of two numbers below 20", []),
    "rules": ("Two rules at once, in pairs not trained on", ["config/rules.py"]),
    "sort": ("Four letters in order, after 20 supervised steps", ["config/sort.py"]),
}
study = Study(__file__)
seeds = range(1, 2 if study.quick else 4)
short = (
    "--max_steps=1 --prompts_per_step=2 --group_size=2 --max_new_tokens=4 --eval_size=2 --warmup_sft_steps=0".split()
)
wanted = {
    f"{task} {seed}": ["config/smollm2.py", *files, f"--seed={seed}", "--checkpoint_every=0", *short * study.quick]
    for task, (_, files) in TASKS.items()
    for seed in seeds
}
made = study.make(wanted)


def curve(run, metric="pass@1"):
    """{step: value} of the held-out prompts."""
    return {x["step"]: x[metric] for x in lines(run, phase="eval")}


figure, axes = panels(*(f"{title}: pass@1" for title, _ in TASKS.values()))
rows = []
for axis, task in zip(axes, TASKS):
    runs = [made[f"{task} {seed}"] for seed in seeds]
    ends = {}
    for color, seed, run in zip(plot.COLORS, seeds, runs):
        points = curve(run)
        axis.plot([*points], [*points.values()], "o-", color=color, linewidth=1.5)
        ends[f"seed {seed}"] = ([*points.values()][-1], color)
    axis.set(xlabel="RL step", ylim=(0, 1))
    label_ends(axis, ends)
    every = [lines(run, phase="rl") for run in runs]
    steps = [min(curve(runs[0])), max(curve(runs[0]))]
    before, after = (", ".join(f"{curve(run)[step]:.2f}" for run in runs) for step in steps)
    reward = ["{:.2f} -> {:.2f}".format(*(curve(run, "eval_reward_mean")[step] for step in steps)) for run in runs]
    sampled = mean_of([sum(x["response_length_mean"] * 64 for x in run) for run in every])[0]
    differ = sum(x["logprob_mismatch_tokens"] for run in every for x in run)
    strict = "-"
    if task == "sums":
        strict = ", ".join(f"{curve(run, 'reward_exact')[steps[1]]:.2f}" for run in runs)
    rows.append([task, before, after, strict, ", ".join(reward), f"{sampled:,.0f}", differ])
head = ["task", "right before", "right after", "of these nothing but the number", "reward", "tokens sampled", "differ"]
study.table(head, rows)
study.end(figure)
