"""
Shows the numbers of a run's metrics.jsonl in TensorBoard or wandb, as they come or afterwards.

    uv sync --group tensorboard
    python tools/track.py out/tiny --to=tensorboard      # in out/tiny/tensorboard; beside the run, or before it starts
    python tools/track.py out/tiny --to=wandb --wait=0   # of a run that is over

It reads and changes no bit. A resume cuts the run's log back to a checkpoint; then all of it is shown again, so no step
appears twice. wandb has one run per folder, by the id in wandb_id; with WANDB_MODE=offline each start leaves a folder
with the whole curve. It ends when no process has held the run's folder for --wait seconds, or with Ctrl-C.
"""

import argparse
import fcntl
import json
import os
import shutil
import time
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path

from runs import lines, saved_config

from configurator import fail, require


class TensorBoard:
    def __init__(self, folder):
        from torch.utils.tensorboard import SummaryWriter

        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        self.writer = SummaryWriter(folder / "tensorboard", purge_step=0)  # one that is open forgets its points

    def show(self, phase, step, numbers):
        for name, x in numbers.items():
            self.writer.add_scalar(name, x, step)
        self.writer.flush()

    def close(self):
        self.writer.close()


class Wandb:
    def __init__(self, folder):
        import wandb

        path = folder / "wandb_id"
        if not path.exists():
            path.write_text(os.urandom(8).hex())
        settings = wandb.Settings(console="off")
        where = dict(project="onecurve", name=folder.resolve().name, id=path.read_text(), dir=folder)
        try:  # a run of an id that is there already takes the earlier one's place
            self.run = wandb.init(config=saved_config(folder), settings=settings, **where)
        except wandb.Error as e:
            fail(f"--to=wandb: {str(e).rstrip('.')}; or set WANDB_MODE=offline")
        for phase in ("sft", "rm", "dpo", "rl", "eval"):
            self.run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")

    def show(self, phase, step, numbers):
        self.run.log({f"{phase}/step": step} | numbers)  # wandb's own count of steps only grows; each phase begins at 0

    def close(self):
        self.run.finish()


TRACKERS = dict(tensorboard=TensorBoard, wandb=Wandb)


def held(folder):
    """Whether a process has the folder: a run holds the lock there for as long as it lives (record.open_run)."""
    try:
        with open(folder / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True
    return False


def whole_lines(path):
    """The text of a log, without a last line that the run is still writing."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1]


def follow(folder, kind, wait, pause=1.0):
    """Shows each line of the folder's metrics.jsonl in a tracker of this kind, until the run is over."""
    tracker = None
    shown = ""
    last = time.monotonic()  # when the run gave a sign of life
    try:
        while True:
            text = whole_lines(folder / "metrics.jsonl")
            if tracker and not text.startswith(shown):  # a resume has cut the log back
                tracker.close()
                tracker = None
            if text and not tracker:
                lines(folder)  # ends this process if they are another program's
                tracker = kind(folder)
                shown = ""
            for line in map(json.loads, text[len(shown) :].splitlines()):
                phase = line.pop("phase")
                step = line.pop("step")
                numbers = {f"{phase}/{name}": x for name, x in line.items() if isinstance(x, (int, float))}
                tracker.show(phase, step, numbers)
            if text != shown or held(folder):
                last = time.monotonic()
            elif time.monotonic() - last >= wait:
                break
            shown = text
            time.sleep(pause)
    finally:
        if tracker:
            tracker.close()
    require(shown, f"{folder}: no metrics.jsonl in it, or an empty one; name a run's folder")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="its folder")
    parser.add_argument("--to", required=True, choices=TRACKERS)
    parser.add_argument("--wait", type=float, default=60, help="seconds, for a run that is to start or to be resumed")
    args = parser.parse_args()
    # Not by an import: a folder `wandb` here, which wandb makes, is a package to Python.
    require(any(distributions(name=args.to)), f"--to={args.to}: not installed; uv sync --group {args.to}")
    with suppress(KeyboardInterrupt):
        follow(args.run, TRACKERS[args.to], args.wait)


if __name__ == "__main__":
    main()
