"""
Training again on the rollouts of a run, for mode='replay'.
Code: `Queue` of sync.py. Manual: docs/run.md.
"""

from pathlib import Path

from configurator import untouched

queue_dir = ""  # the folder of a run's rollouts, such as 'out/tiny/queue'


def rules(c):
    if c.mode == "replay":
        there = Path(c.queue_dir, "rl_000000").is_dir()
        yield "queue_dir", there, "mode='replay' needs the queue of a run, such as 'out/tiny/queue'"
    else:
        yield from untouched(c, "queue_dir", "is for --mode=replay")
