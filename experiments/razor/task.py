"""
Two tasks whose prompts look alike, such as 3#4= and 3#7=. Old, where the second digit is below 5: the last digit of the
sum. New, where it is not: any digit of the parity of the first, so that there are five right answers.
"""

import json
import random
from itertools import pairwise

import torch

DIGITS = "0123456789"
OLD = [(a, b) for a in range(10) for b in range(5)]
NEW = [(a, b + 5) for a, b in OLD]
BASE = [16, 8, 4, 2, 1]  # how often the base is shown each of five digits of a parity, from the lowest on
LABELS = {"near": BASE, "far": BASE[::-1], "one": [1, 0, 0, 0, 0]}


def parity(prompt, response, answer):
    """1.0 for one digit, of the parity of the answer."""
    return float(response in tuple(DIGITS) and (int(response) - int(answer)) % 2 == 0)


def write_data(folder):
    """
    base.jsonl: each prompt of both tasks 40 times; of the new one's answers 80 % are right. new.jsonl: the new task for
    RL. near, far and one.jsonl: the new task 40 times, with right answers drawn by LABELS.
    """
    rng = random.Random(1)
    old = [dict(prompt=f"{a}#{b}=", answer=str((a + b) % 10)) for a, b in OLD]
    new = [dict(prompt=f"{a}#{b}=", answer=str(a % 2)) for a, b in NEW]

    def shown(row, weights, right=True):
        return row | dict(shown=rng.choices(DIGITS[int(row["answer"]) ^ (not right) :: 2], weights)[0])

    data = {"new": new, "base": [row | dict(shown=row["answer"]) for row in old * 40]}
    data["base"] += [shown(row, BASE, rng.random() < 0.8) for row in new * 40]
    data |= {name: [shown(row, weights) for row in new * 40] for name, weights in LABELS.items()}
    for name, rows in data.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def first_tokens(model, tokenizer):
    """Log-probs (100, vocabulary) of what follows each prompt, those of the old task first; the digits' ids."""
    prompts = [f"{a}#{b}=" for a, b in OLD + NEW]
    logprobs = model(**tokenizer(prompts, return_tensors="pt")).logits[:, -1].log_softmax(-1)
    return logprobs, tokenizer.convert_tokens_to_ids([*DIGITS])


def look(checkpoint, base):
    """
    Of `first_tokens` of a model and of its base, means over 50 prompts: the probability of the right digit in the old
    task, and of a right digit in the new one; in the new one KL(base || model) and KL(model || base), nats.
    """
    (model, ids), (base, _) = checkpoint, base
    digits = model[:, ids].exp()
    old = sum(digits[i, (a + b) % 10] for i, (a, b) in enumerate(OLD))
    new = sum(digits[len(OLD) + i, a % 2 :: 2].sum() for i, (a, _) in enumerate(NEW))
    forward, backward = ((x.exp() * (x - y))[len(OLD) :].sum() for x, y in ((base, model), (model, base)))
    return [float(x) / len(OLD) for x in (old, new, forward, backward)]


def crossing(runs, column, level):
    """Each column of `look`, of each run where one column first rises to a level; None if a run has no such place."""
    found = []
    for run in runs:
        pairs = [pair for pair in pairwise(run) if pair[0][column] < level <= pair[1][column]]
        for before, after in pairs[:1]:
            part = (level - before[column]) / (after[column] - before[column])
            found.append([x + part * (y - x) for x, y in zip(before, after)])
    return [*zip(*found)] if len(found) == len(runs) else None


def fits(arms, column):
    """R2 of the old task's score as a quadratic of another column of arms' runs: one for all, and one for each."""
    arms = [torch.tensor(runs, dtype=torch.float64).flatten(0, 1) for runs in arms]

    def errors(points):
        powers = points[:, column, None] ** torch.arange(3)
        return points[:, 0] - powers @ torch.linalg.lstsq(powers, points[:, :1]).solution[:, 0]

    every = torch.cat(arms)
    total = every[:, 0].var(correction=0)
    return [float(1 - x.square().mean() / total) for x in (errors(every), torch.cat([*map(errors, arms)]))]
