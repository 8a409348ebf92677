"""
The agents of law L10: one that learns while its tool takes its time, and one that breaks rule 7.

NOTES names a file that gets a line when a sample begins and one after its tool's result. After 300 calls of its tool a
process copies these notes to VICTIM, if that is not there yet, and dies.
"""

import os
import random
import signal
import threading
import time
from pathlib import Path

from rewards import numeric

calls = []  # of this process


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    time.sleep(random.SystemRandom().random() / 20)
    calls.append(a)
    victim = Path(os.environ.get("VICTIM", "/"))
    if len(calls) >= 300 and not victim.exists():
        notes = Path(os.environ["NOTES"]).read_text().rpartition("\n")[0]  # another process may be writing a line
        of_step = [line.partition(",")[0] for line in notes.splitlines()]
        if 12 < of_step.count(of_step[-1]) < 60:  # in the midst of a step, of which other samples have notes, too
            # Whole or not at all: other threads, and the other engine, may be at this line, too, and die in it.
            own = victim.with_name(f"victim_{threading.get_native_id()}")
            own.write_text(notes)
            own.rename(victim)
            os.kill(os.getpid(), signal.SIGKILL)
    return a + b


def clock(a: int, b: int) -> int:
    """Adds two numbers, more or less.

    Args:
        a: the first
        b: the second
    """
    return a + b + time.time_ns() % 7


clock.__name__ = "add"  # as the model has learned to call it


def note(line):
    if "NOTES" in os.environ:
        with open(os.environ["NOTES"], "a") as file:
            file.write(line + "\n")


async def ask(chat, row, tool):
    chat.user(row["prompt"])
    reply = await chat.generate(tools=[tool])
    if reply.tool_calls:
        await chat.call(reply.tool_calls)
        await chat.do(note, f"{chat.episode.where}, {chat.now()}")
        reply = await chat.generate()
    return numeric(row["prompt"], reply.text, row["answer"])


async def solve(chat, row, tool=add):
    """Now and then a second dialogue has its say, too."""
    await chat.do(note, f"{chat.episode.where}, begins")
    right = await ask(chat, row, tool)
    if chat.random.random() < 0.25:
        right = max(right, await ask(chat.fork(), row, tool))
    return right


async def ask_the_clock(chat, row):
    return await ask(chat, row, clock)


def replies(row):
    a, b = row["prompt"].rstrip("=").split("+")
    return [[("add", dict(a=int(a), b=int(b)))], row["answer"]] * 2
