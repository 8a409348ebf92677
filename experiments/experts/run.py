"""
The choice of experts: a mixture whose engine has fewer bits than its trainer, GRPO's ratio of tokens against GSPO's.

    uv run experiments/experts/run.py
"""

import math
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent.parent))
from study import Study, forest, label_ends, lines, mean_of, paired, panels, plot  # noqa: E402

LOSSES = {"GRPO": "--loss=ppo", "GSPO": "--loss=gspo"}
COLUMNS = "logprobs", "rollout_logprobs", "entropy", "choice_changed"
EDGES = torch.tensor([0.05, 0.2, 0.4, 0.6, 0.8, 1.0])  # of entropy, nats
study = Study(__file__)
seeds, steps, dials = (1, 4, ["bf16"]) if study.quick else (3, 40, ["fp32", "bf16", "fp8"])
task = ["config/tiny.py", "experiments/sums.py", "--scratch_args=intermediate_size=192, num_experts=8"]
warm = 60 if study.quick else 257
start = study.start(*task, "--mode=sft", "--learning_rate=1e-3", "--warmup_steps=20", f"--max_steps={warm}")
task += ["--warmup_sft_steps=0", f"--init_from={start}", f"--max_steps={steps}"]
task += ["--checkpoint_every=0", "--eval_samples=8", "--updates_per_batch=2", "--loss_aggregation=sequence"]
arms = [(bits, name) for bits in dials for name in LOSSES]
wanted = {}
for seed in range(1, seeds + 1):
    for bits, name in arms:
        flags = [f"--seed={seed}", f"--engine_bits={bits}", *LOSSES[name].split()]
        wanted[f"{bits} {name} {seed}"] = [*task, *flags]
made = study.make(wanted)


def apart(run):
    """
    Of tokens whose experts rounded weights would change: their share; the mean distance of the two log-probs of the
    other tokens and of theirs, and its logarithm over that of the others at their entropies; shares past 1.2.
    """
    tables = [load_file(run / f"queue/rl_{i:06d}/trainer.safetensors") for i in range(steps)]
    ours, theirs, entropy, changed = (torch.cat([t[name] for t in tables]) for name in COLUMNS)
    distance = (ours - theirs).double().abs()
    place = torch.bucketize(entropy, EDGES)
    counts, sums = (torch.bincount(place[~changed], x, len(EDGES) + 1) for x in (None, distance[~changed]))
    excess = (distance[changed].mean() / (sums / counts)[place[changed]].nanmean()).log()
    means = [x[which].double().mean() for x in (distance, distance > math.log(1.2)) for which in (~changed, changed)]
    return [float(x) for x in (changed.double().mean(), *means, excess)]


rows, sizes, differences, fresh, ends = [], [], {}, {}, {}
figure, (left, right) = panels(
    "Pass@1 minus that of an fp32 engine, paired", "Tokens for which another expert is chosen"
)
for (bits, name), color in zip(arms, plot.COLORS):
    runs = [made[f"{bits} {name} {seed}"] for seed in range(1, seeds + 1)]
    before, after = zip(*([x["pass@1"] for x in lines(run, phase="eval")] for run in runs))
    fresh.setdefault(name, after)
    clipped = mean_of([mean_of([x["clip_fraction"] for x in lines(run, phase="rl")])[0] for run in runs])[0]
    means = f"{mean_of(before)[0]:.3f}", f"{mean_of(after)[0]:.3f}"
    rows.append([bits, name, *means, paired(after, fresh[name]), f"{clipped:.3f}"])
    if bits != "fp32":
        differences[f"{bits}, {name}"] = [x - y for x, y in zip(after, fresh[name])]
        *means, (excess, half) = map(mean_of, zip(*map(apart, runs)))
        times = "{:.0f} ({:.0f} .. {:.0f})".format(*map(math.exp, (excess, excess - half, excess + half)))
        sizes.append([bits, name, *(f"{mean:.2g}" for mean, _ in means), times])
        curve = [mean_of(x)[0] for x in zip(*([x["choice_changed"] for x in lines(run, phase="rl")] for run in runs))]
        right.plot(curve, color=color, linewidth=1.5)
        ends[f"{bits}, {name}"] = curve[-1], color
study.table("engine, ratio, pass@1 before, after, minus fp32, clipped".split(", "), rows)
head = "engine, ratio, tokens with other experts, distance: same, other, over 1.2: same, other, other over same"
study.table(head.split(", "), sizes)
forest(left, differences, plot.COLORS[2:])
left.set(xlabel="difference of held-out pass@1")
right.set(xlabel="step", ylabel="share of tokens", ylim=(0, None))
label_ends(right, ends)
study.end(figure)
