"""
A sum that is answered twice: the model looks at its own answer and gives another. Each answer is rewarded, the second
twice as much. The demonstrations begin with a wrong answer in every other case, so that a second look is worth it.
"""

import random

from rewards import numeric


async def solve(chat, row):
    chat.user(row["prompt"])
    first = await chat.generate(max_new_tokens=4)
    chat.reward(numeric(row["prompt"], first.text, row["answer"]) / 2)
    chat.user("Check.")
    second = await chat.generate(max_new_tokens=4)
    return numeric(row["prompt"], second.text, row["answer"])


def replies(row):
    """A first answer that is right or near, and a second that is right."""
    dice = random.Random(row["prompt"])  # falls the same way whenever this row comes
    wrong = int(row["answer"]) + dice.choice([-10, -2, -1, 1, 2, 10])
    return [dice.choice([row["answer"], str(wrong)]), row["answer"]]
