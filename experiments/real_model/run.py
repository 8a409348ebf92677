"""
A real chat model of 135 M parameters on two CPU cores: what it learns, and what of that is form.

    uv run experiments/real_model/run.py --jobs=1
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from study import Study, label_ends, lines, mean_of, panels, plot  # noqa: E402

study = Study(__file__)
seeds = range(1, 2 if study.quick else 4)
short = "--max_steps=1 --prompts_per_step=2 --group_size=2 --max_new_tokens=4 --eval_size=2".split() * study.quick
task = ["config/smollm2.py", "--checkpoint_every=0", *short]
made = study.make({f"seed {seed}": [*task, f"--seed={seed}"] for seed in seeds})
figure, (left, right) = panels("Held-out sums, share right", "Training, share right in a step")
rows = []
for color, (name, run) in zip(plot.COLORS, made.items()):
    steps = lines(run, phase="rl")
    held_out = {x["step"]: x for x in lines(run, phase="eval")}
    scores = [x["pass@1"] for x in held_out.values()]
    left.plot([*held_out], scores, "o-", color=color, linewidth=1.5)
    right.plot([x["step"] for x in steps], [x["reward_mean"] for x in steps], color=color, linewidth=1.5)
    strict = [x["reward_exact"] for x in held_out.values()]
    sampled = sum(x["response_length_mean"] for x in steps) * 128
    differ = sum(x["logprob_mismatch_tokens"] for x in steps)
    parts = [" ".join(f"{x:.2f}" for x in numbers) for numbers in (scores, strict)]
    rows.append([name, *parts, f"{steps[0]['entropy']:.2f} -> {steps[-1]['entropy']:.2f}", f"{sampled:,.0f}", differ])
study.table(["run", "right, every 5 steps", "the number alone", "entropy, nats", "tokens sampled", "differ"], rows)
ends = [[x["pass@1"] for x in lines(run, phase="eval")][-1] for run in made.values()]
study.expect("after 25 steps {:.2f} +- {:.2f}".format(*mean_of(ends)))
left.set(xlabel="RL step", ylim=(0, 1))
right.set(xlabel="RL step", ylim=(0, 1))
label_ends(left, {name: (end, color) for name, end, color in zip(made, ends, plot.COLORS)})
study.end(figure)
