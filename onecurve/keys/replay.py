"""
Training again on the rollouts of a run, for mode='replay'.
Code: `Queue` of sync.py. Manual: docs/run.md.
"""

from pathlib import Path

from configurator import free_keys, saved_config, untouched

queue_dir = ""  # the folder of a run's rollouts, such as 'out/tiny/queue'


def rules(c):
    if c.mode == "replay":
        there = Path(c.queue_dir, "rl_000000").is_dir()
        yield "queue_dir", there, "mode='replay' needs the queue of a run, such as 'out/tiny/queue'"
        config = Path(c.queue_dir).parent / "config.py"
        for key, x in saved_config(config).items() if config.is_file() else ():
            fits = key in free_keys(vars(c)) or vars(c).get(key, x) == x
            yield key, fits, f"the run in queue_dir has {x!r}; use all keys of its config, {config}"
    else:
        yield from untouched(c, "queue_dir", "is for --mode=replay")
