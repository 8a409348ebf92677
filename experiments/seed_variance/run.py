"""
Where seed variance comes from: one source of chance at a time, all else equal to the bit.

    uv run experiments/seed_variance/run.py
"""

import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from study import Study, change_one_bit, checkpoints, label_ends, lines, panels, plot, score, spread_of, weights_of  # noqa: E402

FIRST, INIT, EVAL = "one bit of the first weights", "initialisation", "evaluation noise"
study = Study(__file__)
count = 2 if study.quick else 5
task = ["config/tiny.py", "experiments/sums.py"] + ["--warmup_sft_steps=40", "--max_steps=2"] * study.quick
base = study.make({"base": task})["base"]
last = checkpoints(base / "ckpt")[-1]
wanted = {}
for k in range(2, count + 1):
    weight = f"model.norm.weight[{k}]"  # 1.0 in the beginning
    model = change_one_bit(base / "model", weight, study.out / f"model_{k}")
    wanted |= {f"{EVAL} {k}": [*task, "--mode=eval", f"--init_from={last}", f"--seeds=eval={k}"]}
    wanted |= study.branch(f"data order {k}", base, seeds=f"data={k}")
    wanted |= study.branch(f"sampling noise {k}", base, seeds=f"noise={k}")
    wanted |= study.branch(f"one bit before RL {k}", base, weight)
    wanted |= {f"{FIRST} {k}": [*task, f"--init_from={model}"], f"{INIT} {k}": [*task, f"--seeds=init={k}"]}
made = study.make(wanted)


def norms(run):
    """Of the gradient, at every step, supervised ones first."""
    return [x["grad_norm"] for x in lines(run) if "grad_norm" in x]


def apart(twins):
    """
    The relative difference of the twins' gradient norms to the base's: the median of twins and of the 9 steps around
    each; None where it is 0.
    """
    same_step = zip(norms(base), *map(norms, twins))
    each = [statistics.median(abs(x - norm) for x in others) / norm for norm, *others in same_step if norm]
    return [statistics.median(each[max(0, i - 4) : i + 5]) or None for i in range(len(each))]


figure, (left, *others) = panels("Pass@1, each run", "Gradient norms of twins, supervised updates", "The same, in RL")
print("base", *(f"{x['pass@1']:.3f}" for x in lines(base, phase="eval")))
left.axvline(score(base), color="#444444", linewidth=0.7)
warmup = len(norms(base)) - len(lines(base, phase="rl"))
parts = [(others[0], 0, warmup, {}), (others[1], warmup, None, {})]
rows, deviations = [], []
for color, source in zip(plot.COLORS, dict.fromkeys(name[:-2] for name in wanted)):
    twins = [made[f"{source} {k}"] for k in range(2, count + 1)]
    scores = [score(run) for run in (base, *twins)]
    left.plot(scores, [source] * count, "o", color=color, alpha=0.6)
    first = ", ".join(f"{lines(run, phase='eval')[0]['pass@1']:.3f}" for run in twins)
    before = {EVAL: "-", FIRST: first, INIT: first}.get(source, "the base's")
    row = [source, before, ", ".join(f"{x:.3f}" for x in scores[1:])]
    deviation, low, high = spread_of(scores)
    deviations.append(deviation)
    rows.append([*row, f"{deviation:.3f}", f"{low:.3f} .. {high:.3f}" if deviation else "none", "0"])
    if source != EVAL:  # whose weights are the base's
        rows[-1][-1] = f"{statistics.median(float((weights_of(run) - weights_of(base)).norm()) for run in twins):.2g}"
        curve = apart(twins)
        for axis, begin, end, ends in parts:
            part = [x or math.nan for x in curve[begin:end]]
            axis.plot(range(begin, begin + len(part)), part, color=color, linewidth=1.5)
            ends |= {source: (part[-1], color)} if part[-1] > 0 else {}
head = ["source", "twins before RL", "twins after RL", "standard deviation", "its 95 % interval", "distance of weights"]
study.table(head, rows)
noise = math.hypot(*deviations[:3])  # of evaluation, data order and sampling
study.expect(f"two single runs must differ by {1.96 * 2**0.5 * noise:.2f}")
for axis, begin, _, ends in parts:
    axis.set(yscale="log", xlabel="update", ylabel="relative difference to the base's", ylim=(1e-9, 3))
    label_ends(axis, ends)
left.set_xlabel("held-out pass@1 after RL; line: the base")
study.end(figure)
