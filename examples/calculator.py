"""
A sum that is too hard for the head, and a tool for it. The demonstrations use the tool in every other case only: that
it pays is for RL to find out.
"""

import random

from rewards import numeric


def add(a: int, b: int) -> int:
    """Adds two whole numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


async def solve(chat, row):
    chat.user(row["prompt"])
    reply = await chat.generate(tools=[add])
    if reply.tool_calls:
        await chat.call(reply.tool_calls)
        reply = await chat.generate()
    return numeric(row["prompt"], reply.text, row["answer"])


def replies(row):
    """What the model could say, for the supervised steps."""
    a, b = row["prompt"].rstrip("=").split("+")
    call = [("add", dict(a=int(a), b=int(b)))]
    # A coin that falls the same way whenever this row comes, and that the model cannot foresee.
    return [call, row["answer"]] if random.Random(row["prompt"]).random() < 0.5 else [row["answer"]]
