"""The sums that the base is shown in two formats, and what RL pays for beside the truth: a format, or a coin."""

import json
import random

from sync import content_hash, read_group


def write_data(folder):
    """
    sums.jsonl: all sums of two digits. shown.jsonl: each of them 20 times, with what the base learns to write: in a
    tenth of the rows "#7", which is right; else "7", and in 4 of 10 of these one more than is right.
    """
    sums = [dict(prompt=f"{a}+{b}=", answer=f"{a + b}") for a in range(10) for b in range(10)]
    rng = random.Random(1)
    shown = []
    for row in sums * 20:
        rare = rng.random() < 0.1
        wrong = rng.random() < 0.4
        shown.append(row | dict(shown=f"#{row['answer']}" if rare else f"{int(row['answer']) + wrong}"))
    for name, rows in dict(sums=sums, shown=shown).items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def marked(prompt, response, answer):
    """1.0 for the rare format, as in "#7"."""
    return float(response.startswith("#"))


def plain(prompt, response, answer):
    """1.0 for the common format, as in "7"."""
    return float(response[:1].isdigit())


def coin(rewards, groups, **_):
    """
    GRPO's advantages (P, G) of a coin in place of each reward: a hash of the sample's seed, and so of nothing but the
    run's seed, the step, the prompt and the sample's number.
    """
    from train_grpo import advantages_of

    seeds = [group.tensors["seeds"].tolist() for group in groups]
    heads = [[int(content_hash(["coin", seed]), 16) % 2 for seed in same] for same in seeds]
    return advantages_of(rewards.new_tensor(heads), "grpo")


def looks(run, step):
    """Of a run's evaluation after this many steps: shares of the rare format, and of right ones in all and in each."""
    groups = [read_group(path) for path in sorted(run.glob(f"queue/eval_{step:06d}/group_*"))]
    samples = []
    for _, meta in groups:
        scores = (terms["numeric"]["reward"] for terms in meta["noted"])
        samples += zip((text.startswith("#") for text in meta["responses"]), scores)
    parts = [score for _, score in samples], *([score for rare, score in samples if rare == x] for x in (True, False))
    return [len(parts[1]) / len(samples), *(sum(part) / len(part) if part else None for part in parts)]
