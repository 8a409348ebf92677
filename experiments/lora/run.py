"""
LoRA in RL: rank 1, 4, 16 and full training, each at the better of two learning rates.

    uv run experiments/lora/run.py
"""

import sys
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from study import Study, forest, mean_of, paired, panels, plot, score  # noqa: E402

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


@cache
def scores(rank, rate):
    return [score(made[f"{rank} {rate} {seed}"]) for seed in range(1, seeds + 1)]


best = {rank: max(rates[rank], key=lambda rate: mean_of(scores(rank, rate))[0]) for rank in ranks}
full = scores(0, best[0])
rows, differences = [], {}
for rank in ranks:
    name = f"rank {rank}" if rank else "full"
    for rate in rates[rank]:
        found = scores(rank, rate)
        row = [name, rate, ", ".join(f"{x:.3f}" for x in found), f"{mean_of(found)[0]:.3f}", paired(found, full)]
        if rate == best[rank]:
            row[1] += ", its better"
            differences[name] = [x - y for x, y in zip(found, full)]
        rows.append(row if found is not full else [*row[:4], ""])
study.table(["trained", "learning rate", "pass@1, each seed", "mean", "minus full at its better, paired"], rows)
del differences["full"]
figure, (axis,) = panels("At its better rate, minus full training, paired")
forest(axis, differences, plot.COLORS)
axis.set_xlabel("difference of held-out pass@1")
study.end(figure)
