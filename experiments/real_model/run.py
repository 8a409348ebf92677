"""
The mismatch dial on a real chat model: an engine of fewer bits than the trainer, with and without importance weights.

    uv run experiments/real_model/run.py
"""

import sys
from itertools import accumulate
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from study import Study, label_ends, lines, mean_of, paired, panels, plot  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent.parent / "mismatch"))
from tokens import sizes  # noqa: E402

study = Study(__file__)
seeds, steps = (1, 1) if study.quick else (3, 24)
task = ["config/smollm2.py", "--loss=pg", "--prompts_per_step=4", "--checkpoint_every=0", f"--max_steps={steps}"]
task += ["--eval_every=12", "--sample_every=0"]
task += "--group_size=2 --max_new_tokens=4 --eval_size=2".split() * study.quick
arms = {
    "fp32": [],
    "bf16": ["--engine_bits=bf16"],
    "fp8:act": ["--engine_bits=fp8:act"],
    "fp8:act truncate": ["--engine_bits=fp8:act", "--importance=truncate"],
}
arms = {"bf16": arms["bf16"]} if study.quick else arms
wanted = {f"{arm} {seed}": [*task, *own, f"--seed={seed}"] for seed in range(1, seeds + 1) for arm, own in arms.items()}
made = study.make(wanted)
# What the weights are worth without the engine's rounding: made again from the samples, evaluated by an exact engine
dialled = [] if study.quick else [name for name in wanted if "fp32" not in name]
again = {f"{x} again": [*wanted[x], "--mode=replay", f"--queue_dir={made[x]}/queue"] for x in dialled}
again = study.make({name: [*flags, f"--checkpoint_every={steps}"] for name, flags in again.items()})
weights = {x: again[f"{x} again"] / "ckpt" / f"step_{steps:06d}" for x in dialled}
plain = {f"{x} exact": [*task, "--mode=eval", f"--init_from={weights[x]}", f"--seed={x[-1]}"] for x in dialled}
made |= study.make(plain)

rows, curves, ends, first = [], {}, {}, []
for arm in arms:
    names = [f"{arm} {seed}" for seed in range(1, seeds + 1)]
    runs = [made[x] for x in names]
    rewards = [[x["reward_mean"] for x in lines(run, phase="rl")] for run in runs]
    held_out = [[x["pass@1"] for x in lines(run, phase="eval")] for run in runs]
    whole = [mean_of(x)[0] for x in rewards]
    exact = [lines(made.get(f"{x} exact", made[x]), phase="eval")[-1]["pass@1"] for x in names]
    first = first or [exact, whole]  # of fp32
    cells = [" ".join(f"{mean_of(x)[0]:.2f}" for x in zip(*held_out)), f"{mean_of(exact)[0]:.2f}"]
    cells += map(paired, (exact, whole), first)
    rows.append([arm, *cells, *(["0"] * 4 if arm == "fp32" else sizes(runs, steps))])
    curves[arm] = [mean_of(x)[0] for x in zip(*rewards)]
head = "engine, held out, by an exact engine, minus fp32, reward minus fp32, distance, largest, over 1.2, over 2"
study.table(head.split(", "), rows)
figure, (left, right) = panels("Training reward, mean of the seeds", "The same, minus fp32's, summed over the steps")
for (arm, curve), color in zip(curves.items(), plot.COLORS):
    left.plot(curve, color=color, linewidth=1.5)
    ahead = [*accumulate(x - y for x, y in zip(curve, curves[next(iter(arms))]))]
    right.plot(ahead, color=color, linewidth=1.5)
    ends[arm] = ahead[-1], color
left.set(xlabel="RL step", ylim=(0, 1))
right.set(xlabel="RL step")
label_ends(right, ends)
study.end(figure)
