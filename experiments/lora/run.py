"""
LoRA in RL: rank 1, 4, 16 and full training, each at the better of two learning rates.

    uv run experiments/lora/run.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from study import Study, label_ends, mean_of, panels, plot, score  # noqa: E402

FULL = ["2e-4", "5e-4"]  # learning rates
ADAPTERS = ["1.5e-3", "5e-3"]
study = Study(__file__)
ranks, seeds = ([0, 1], 1) if study.quick else ([0, 1, 4, 16], 3)
task = ["config/tiny.py", "experiments/sums.py", "--warmup_sft_steps=0", f"--init_from={study.start()}"]
task += ["--checkpoint_every=0", "--eval_samples=8", f"--max_steps={4 if study.quick else 40}"]
rates = {rank: (ADAPTERS if rank else FULL)[: 1 if study.quick else 2] for rank in ranks}
wanted = {}
for rank in ranks:
    for rate in rates[rank]:
        for seed in range(1, seeds + 1):
            flags = [f"--seed={seed}", f"--lora_rank={rank}", f"--learning_rate={rate}"]
            wanted[f"{rank} {rate} {seed}"] = [*task, *flags]
made = study.make(wanted)


def scores(rank, rate):
    return [score(made[f"{rank} {rate} {seed}"]) for seed in range(1, seeds + 1)]


best = {rank: max(rates[rank], key=lambda rate: mean_of(scores(rank, rate))[0]) for rank in ranks}
full = scores(0, best[0])
figure, (left, right) = panels(
    "Held-out pass@1 by learning rate, mean", "At the better rate, minus full training, paired"
)
rows, ends = [], {}
for i, (rank, color) in enumerate(zip(ranks, plot.COLORS)):
    name = f"rank {rank}" if rank else "full"
    means = [mean_of(scores(rank, rate))[0] for rate in rates[rank]]
    left.plot([float(rate) for rate in rates[rank]], means, "o-", color=color, linewidth=1.5)
    ends[name] = means[-1], color
    for rate in rates[rank]:
        found = scores(rank, rate)
        less = [x - y for x, y in zip(found, full)]
        mean, half = mean_of(less)
        rows.append([name, rate, ", ".join(f"{x:.3f}" for x in found), f"{mean_of(found)[0]:.3f}"])
        rows[-1].append(f"{mean:+.3f} +- {half:.3f}" if (rank, rate) != (0, best[0]) else "")
        if rate == best[rank]:
            rows[-1][1] += ", its better"
            right.plot([i] * seeds, less, "o", color=color, alpha=0.6)
            right.errorbar([i + 0.15], [mean], [half], color=color, capsize=3)
right.set_xticks(range(len(ranks)), [f"rank {rank}" if rank else "full" for rank in ranks])
left.set(xscale="log", xlabel="learning rate")
left.set_xticks([float(rate) for rate in FULL + ADAPTERS], FULL + ADAPTERS)
left.set_xticks([], minor=True)
label_ends(left, ends)
study.table(["trained", "learning rate", "pass@1, each seed", "mean", "minus full at its better, paired"], rows)
study.end(figure)
