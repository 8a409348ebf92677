"""
Length grows by itself: from a model that answers at once more often than step by step, more supervised steps, or RL?

    uv run experiments/length/run.py
"""

import json
import sys
from pathlib import Path

import task

sys.path.insert(0, str(Path(__file__).parent.parent))
from study import Study, checkpoints, in_float64, label_ends, lines, mean_of, panels  # noqa: E402

ARMS = {"SFT": ("o:", "--mode=sft"), "RL": ("-", "")}
COLORS = {"SFT 0.25": "#0072B2", "SFT 0.5": "#009E73", "RL 0.25": "#D55E00", "RL 0.5": "#CC79A7"}
study = Study(__file__)
seeds, shares, before, steps = (1, [0.5], 60, 4) if study.quick else (3, [0.25, 0.5], 400, 40)
flags = "experiments/sums.py --sft_column=response --max_prompt_tokens=16 --max_new_tokens=16 --leaf_tokens=2048"
flags = [*flags.split(), "--lanes=4", "--eval_size=0", "--reward=experiments/length/task.py:last_digit"]
starts, wanted = {}, {}
for share in shares:
    data = study.out / f"{share}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in task.rows(share, 20000)))
    learn = f"--mode=sft --learning_rate=2e-3 --warmup_steps=20 --max_steps={before}"
    starts[f"start {share}"] = [*flags, f"--dataset={data}", *learn.split()]
for name, folder in study.make(starts).items():
    share = name.split()[1]
    own = [*flags, f"--dataset={study.out / f'{share}.jsonl'}", f"--init_from={checkpoints(folder / 'ckpt')[-1]}"]
    own += [f"--max_steps={steps}", f"--checkpoint_every={steps // 4}", "--keep_checkpoints=9"]
    for arm, (_, kind) in ARMS.items():
        for seed in range(1, seeds + 1):
            wanted[f"{arm} {share} {seed}"] = [*own, *kind.split(), f"--seed={seed}"]
made = study.make(wanted)
held_out = [task.row(number, False) for number in task.HELD_OUT]


def greedy(checkpoint):
    """Of the greedy answers to the held-out prompts: share that is correct, mean digits, how many different ones."""
    model, tokenizer = in_float64(checkpoint)
    prompts = tokenizer([row["prompt"] for row in held_out], return_tensors="pt")
    ids = model.generate(**prompts, do_sample=False, max_new_tokens=16)
    said = tokenizer.batch_decode(ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [task.last_digit("", text, row["answer"]) for text, row in zip(said, held_out)]
    return sum(right) / len(right), sum(map(len, said)) / len(said), len(set(said))


figure, axes = panels("Greedy answers to held-out prompts: correct", "Their length")
rows, ends = [], ({}, {})
for (arm, (dashes, _)), share in ((arm, share) for arm in ARMS.items() for share in shares):
    runs = [made[f"{arm} {share} {seed}"] for seed in range(1, seeds + 1)]
    found = [[greedy(checkpoint) for checkpoint in checkpoints(run / "ckpt")] for run in runs]
    done = [int(checkpoint.name[5:]) for checkpoint in checkpoints(runs[0] / "ckpt")]
    for axis, end, curves in zip(axes, ends, zip(*[zip(*each) for each in found])):
        mean = [mean_of(same)[0] for same in zip(*curves)]
        color = COLORS[f"{arm} {share}"]
        axis.plot(done, mean, dashes, color=color, linewidth=1.8, zorder=2 + (arm == "SFT"), fillstyle="none")
        end[f"{arm}, {share:.0%} long"] = mean[-1], color
    first, last = found[0][0], list(zip(*[each[-1] for each in found]))
    cells = [", ".join(f"{x:.2f}" for x in values) for values in last[:2]] + [", ".join(map(str, last[2]))]
    rows.append([f"{share:.0%}", arm, f"{first[0]:.2f}", f"{first[1]:.2f}", *cells])
head = "long in the data; then; correct before; digits before; correct, each seed; digits; different answers"
study.table(head.split("; "), rows)
for share in shares:
    steps_of = [lines(made[f"RL {share} {seed}"], phase="rl") for seed in range(1, seeds + 1)]
    sampled = [mean_of([x[i]["response_length_mean"] for x in steps_of])[0] for i in (0, -1)]
    study.expect(f"{sampled[0]:.1f} tokens to {sampled[1]:.1f}")
    print(f"{share:.0%} long: RL's samples go from {sampled[0]:.1f} tokens to {sampled[1]:.1f}")
for axis, end, name in zip(axes, ends, ("share correct", "digits")):
    axis.set(xlabel="updates after the common start", ylabel=name)
    label_ends(axis, end)
study.end(figure)
