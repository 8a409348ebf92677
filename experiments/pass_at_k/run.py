"""
pass@1 or pass@k: four advantages, and pass@k for k = 1 .. 64 before and after RL. Does RL only sharpen?

    uv run experiments/pass_at_k/run.py
"""

import sys
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from study import Study, checkpoints, label_ends, mean_of, paired, panels, plot, read_group  # noqa: E402

from onecurve.run.scores import pass_at_k  # noqa: E402

ADVANTAGES = {
    "GRPO": "",
    "Dr. GRPO": "--advantage=dr_grpo --loss_aggregation=constant",
    "MaxRL": "--advantage=experiments/losses.py:maxrl",
    "pass@4": "--advantage=experiments/pass_at_k/advantage.py:pass_at_4",
}
study = Study(__file__)
seeds, names, n = (1, ["pass@4"], 4) if study.quick else (3, [*ADVANTAGES], 64)
ks = [2**i for i in range(n.bit_length())]
task = ["config/tiny.py", "experiments/sums.py", f"--eval_size={32 if study.quick else 128}"]
sft = f"--mode=sft --learning_rate=1e-3 --warmup_steps=20 --max_steps={120 if study.quick else 200}"
start = study.start(*task, *sft.split())
task += ["--warmup_sft_steps=0"]
look = [*task, "--mode=eval", f"--eval_samples={n}"]
wanted = {f"base {k}": [*look, f"--init_from={start}", f"--seeds=eval={k}"] for k in (1, 2)}
task += [f"--init_from={start}", f"--max_steps={4 if study.quick else 60}"]
for name in names:
    wanted |= {f"{name} {k}": [*task, f"--seed={k}", *ADVANTAGES[name].split()] for k in range(1, seeds + 1)}
made = study.make(wanted)
ends = {x: f"--init_from={checkpoints(made[x] / 'ckpt')[-1]}" for x in wanted if "base" not in x}
made |= study.make({f"after {x}": [*look, end] for x, end in ends.items()})


@cache
def right(name):
    """How many of the n samples of each held-out prompt are right."""
    groups = (read_group(path) for path in sorted(made[name].glob("queue/eval_*/group_*")))
    return [int((group.tensors["rewards"] >= 1).sum()) for group in groups]


def curve(name, chosen):
    """pass@k of the chosen prompts for each k."""
    return [mean_of([pass_at_k(n, m, k) for m, c in zip(right(name), chosen) if c])[0] for k in ks]


# Which prompts are hard is seen in other samples than those that are counted: else the base would look worse on them.
hard = [m <= n / 16 for m in right("base 2")]
prompts = {"all prompts": [True] * len(hard), "hard for the base": hard, "the others": [not x for x in hard]}
figure, axes = panels(*(f"{which}: {sum(chosen)}" for which, chosen in prompts.items()))
rows, found = [], {}
for axis, (which, chosen) in zip(axes, prompts.items()):
    before, labels = curve("base 1", chosen), {}
    axis.plot(ks, before, color="#444444", linewidth=1.5, linestyle="--")
    labels["base"] = before[-1], "#444444"
    rows.append([which, "base", *(f"{x:.3f}" for x in before)])
    for i, (name, color) in enumerate(zip(names, plot.COLORS)):
        found[which, name] = [curve(f"after {name} {seed}", chosen) for seed in range(1, seeds + 1)]
        changes = [mean_of([x - at for x in same]) for same, at in zip(zip(*found[which, name]), before)]
        means = [at + change for at, (change, _) in zip(before, changes)]
        dodged = [k * 1.06 ** (i - 1.5) for k in ks]
        axis.errorbar(dodged, means, [half for _, half in changes], color=color, linewidth=1.5, elinewidth=0.6)
        labels[name] = means[-1], color
        rows.append([which, name, *(f"{mean:.3f} +- {half:.3f}" for mean, (_, half) in zip(means, changes))])
    axis.set_xscale("log", base=2)
    axis.set(xlabel="k", xticks=ks, xticklabels=ks, ylabel="pass@k", ylim=(0, 1.05))
    label_ends(axis, labels)
study.table(["prompts", "policy", *(f"pass@{k}" for k in ks)], rows)
rows = []
for name in names[1:]:
    pairs = zip(*(zip(*found["all prompts", x]) for x in (name, "GRPO")))
    rows.append([f"{name} minus GRPO", *(paired(*pair) for pair in pairs)])
study.table(["all prompts, paired", *(f"pass@{k}" for k in ks)], rows)
study.end(figure)
