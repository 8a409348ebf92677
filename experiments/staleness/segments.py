"""
Whole samples and segments (partial rollouts) on lengths with a long tail: seconds, and how full the engine is.

    uv run experiments/staleness/segments.py

The task: answers whose lengths follow a power law, most a few tokens and some of them 240, are learned first; then RL
rewards an even length. One trainer and one engine side by side, a step apart. A step with whole samples lasts as long
as its longest; with segments the long ones go on in the next step. Slots: the share of (samples drawn x tokens of the
longest of them in a round) that were tokens, which is how full an engine's batch is. Seconds differ each time. Flags
are train_grpo.py's.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from study import read_group, runs  # noqa: E402

LONGEST, SEGMENT = 240, 32
SFT = "--mode=sft --learning_rate=1e-3 --warmup_steps=20 --max_steps=150 --checkpoint_every=150".split()
RL = "--warmup_sft_steps=0 --learning_rate=1e-4 --max_steps=16 --lag=1 --checkpoint_every=0 --sample_every=0".split()
KINDS = {"whole samples": [], f"segments of {SEGMENT}": [f"--segment_tokens={SEGMENT}", "--groups_in_flight=24"]}


def write_data(folder):
    rng = random.Random(1)
    with open(folder / "tail.jsonl", "w") as file:
        for i in range(2000):
            length = min(LONGEST, int(5 / (1 - rng.random())))
            file.write(json.dumps(dict(prompt=f"{i}=", answer="x" * length)) + "\n")
    (folder / "even.py").write_text("def even(prompt, response, answer):\n    return float(len(response) % 2 == 0)\n")


def slots(folder, most):
    """(tokens drawn, slots that were there for them, mean of the longest draws) in all rounds of a run's queue."""
    used, there, longest = 0, 0, []
    for step in sorted(folder.glob("queue/rl_*"))[4:]:
        drawn = {}  # per round the tokens of each sample
        for path in step.glob("group_*"):
            tensors, meta = read_group(path)
            versions = tensors["weight_version"].split(tensors["lengths"].tolist())
            fresh = [min(most, int((x == meta["version"]).sum())) for x in versions]
            drawn.setdefault(int(path.stem[6:]) // 24, []).extend(n for n in fresh if n)
        for tokens in drawn.values():
            used += sum(tokens)
            there += len(tokens) * max(tokens)
            longest.append(max(tokens))
    runs.require(longest, "no step after the first four, which are not counted; use --max_steps=5 or more")
    return used, there, statistics.fmean(longest)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
_, more = parser.parse_known_args()
folder = Path(tempfile.mkdtemp(prefix="segments"))
try:
    write_data(folder)
    task = ["config/tiny.py", f"--dataset={folder / 'tail.jsonl'}", f"--reward={folder / 'even.py'}:even"]
    task += ["--eval_size=0", f"--max_new_tokens={LONGEST + 8}", "--prompts_per_step=8", "--lanes=1"]
    task += ["--share_prefixes=False"]  # as when its table was written
    runs.run(folder / "sft", *task, *SFT)
    task += [f"--init_from={folder}/sft/ckpt/step_000150", *RL, *more]
    print("| | seconds per step | longest draw, tokens | slots | staleness | reward |\n|---|---|---|---|---|---|")
    for name, flags in [*KINDS.items()] * 2:
        steps = [x for x in runs.run(folder / "run", *task, *flags, ranks=2) if x["phase"] == "rl"][4:]
        used, there, longest = slots(folder / "run", SEGMENT if flags else LONGEST + 8)
        mean = {key: statistics.fmean(x[key] for x in steps) for key in ("step_seconds", "staleness", "reward_mean")}
        row = [f"{mean['step_seconds']:.2f}", f"{longest:.0f}", f"{used / there:.0%}", f"{mean['staleness']:.1f}"]
        print(f"| {name} |", " | ".join([*row, f"{mean['reward_mean']:.2f}"]), "|", flush=True)
        shutil.rmtree(folder / "run")
finally:
    shutil.rmtree(folder)
