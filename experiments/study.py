"""
What the studies share: making their runs, comparing digests and figures with the page, a picture. No study by itself.

    uv run experiments/seed_variance/run.py              # the whole study
    uv run experiments/seed_variance/run.py --quick      # fewer and shorter runs: at most 3 minutes

Runs are kept in --out, in folders named after their flags: those that are finished are not made again, and one that was
stopped is resumed. Flags that a study does not know are train_grpo.py's, for all of its runs; then nothing is compared.
Exit status 1: a digest is not that of digests.txt, or a line of the table is not on the page.
"""

import argparse
import os
import shutil
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from scipy import stats  # SGLang's own dependency
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import branch  # noqa: E402
import plot  # noqa: E402
import runs  # noqa: E402
from runs import lines, require  # noqa: E402

from onecurve.run.checkpoint import checkpoints  # noqa: E402
from sync import content_hash, read_group  # noqa: E402, F401


class Study:
    def __init__(self, script):
        """script: the file of the study, in whose folder its page, its picture and its digests are."""
        self.home = Path(script).resolve().parent
        doc = sys.modules["__main__"].__doc__
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--quick", action="store_true", help="fewer and shorter runs, to see that it works")
        parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count()), help="runs at a time, a core each")
        parser.add_argument("--out", type=Path, default=ROOT / "out" / "experiments", help="where runs are kept")
        parser.add_argument("--write", action="store_true", help="write the digests and the picture beside the page")
        self.args, self.flags = parser.parse_known_args()
        self.changed = bool(self.flags)  # then the page does not say what comes out
        require(self.args.jobs > 0, f"--jobs={self.args.jobs}: must be more than 0")
        self.quick = self.args.quick
        self.out = self.args.out.resolve() / self.home.name
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            require(False, f"--out={self.args.out}: {e.strerror}; use a folder that can be made there")
        self.folders = []
        self.problems = []

    def folder(self, name, flags):
        """Where the run with these flags is kept."""
        flags = [flag.replace(str(self.out), "") for flag in [*flags, *self.flags]]
        return self.out / f"{name.replace(' ', '_')}_{content_hash(flags)[:8]}"

    def make(self, wanted):
        """Makes those of the runs {name: flags} that are not finished: {name: its folder}."""
        folders = {name: self.folder(name, flags) for name, flags in wanted.items()}
        self.folders += folders.values()
        left = [name for name, folder in folders.items() if not (folder / "finished").exists()]
        with ThreadPoolExecutor(self.args.jobs) as pool:
            running = [pool.submit(self._run, folders[name], wanted[name]) for name in left]
            done = len(wanted) - len(left)
            try:
                for run in tqdm(as_completed(running), self.home.name, len(wanted), initial=done, unit="run"):
                    require(not run.result(), run.result())
            except BaseException as e:
                pool.shutdown(wait=False, cancel_futures=True)
                require(not isinstance(e, KeyboardInterrupt), "interrupted; the same command goes on from here")
                raise
        return folders

    def start(self, *flags, name="start"):
        """The last checkpoint of a run that others begin with; without flags of a warm-up of experiments/sums.py."""
        if not flags:
            flags = "config/tiny.py experiments/sums.py --mode=sft --learning_rate=1e-3 --warmup_steps=20".split()
            flags.append(f"--max_steps={120 if self.quick else 257}")
        return checkpoints(self.make({name: [*flags]})[name] / "ckpt")[-1]

    def branch(self, name, run, weight="", **changes):
        """
        {name: flags} for `make`: the future of a finished run after its warm-up, with one bit of a weight or with keys
        changed, as tools/branch.py makes it.
        """
        flags = [f"--ulp={weight}" if weight else "", *(f"--{key}={value}" for key, value in changes.items()), run.name]
        folder = self.folder(name, flags)
        if not (folder / "config.py").exists():
            shutil.rmtree(folder, ignore_errors=True)
            start = run / "ckpt" / "step_000000"
            config = runs.saved_config(run) | {"out_dir": str(folder)} | changes
            branch.branch(run, start, folder, config, branch.nudge(start, weight) if weight else None)
        return {name: flags}

    def _run(self, folder, flags):
        """Makes or resumes a run in a fork of a process that has the libraries. Returns its problem, or None."""
        stopped = (folder / "config.py").exists()
        flags = ["--init_from=resume"] if stopped else [*flags, *self.flags]
        threads = max(1, os.cpu_count() // self.args.jobs)  # changes no bit
        command = [str(ROOT / "train_grpo.py"), f"--threads={threads}", *flags, f"--out_dir={folder}"]
        status, output = runs.run_warm(command, Path(f"{folder}.output"), timeout=3600)
        if status:
            return f"{folder}: {runs.problem(output)}"
        (folder / "finished").write_text(output.split()[-1])  # the digest

    def table(self, head, rows):
        """Prints a table in Markdown."""
        for cells in (head, ["---"] * len(head), *rows):
            line = f"| {' | '.join(map(str, cells))} |"
            print(line)
            self.expect(line)

    def expect(self, text):
        """The page of the whole study must have this text."""
        if not self.quick and not self.changed and text not in (self.home / "README.md").read_text():
            self.problems.append(f"not on the page: {text}")

    def end(self, figure=None):
        """Saves the picture, compares or writes the digests, and ends the process."""
        if figure:
            picture = self.home / f"{self.home.name}.png"
            drawn = self.out / picture.name
            figure.savefig(drawn, dpi=120)
            print(drawn)
            if self.args.write and not self.quick:
                shutil.copy(drawn, picture)
        file = self.home / "digests.txt"
        known = dict(line.split(" ", 1) for line in file.read_text().splitlines()) if file.exists() else {}
        made = {folder.name: f"{(folder / 'finished').read_text()} {score(folder)}" for folder in self.folders}
        if self.args.write:
            known |= made
            file.write_text("".join(f"{name} {text}\n" for name, text in sorted(known.items())))
        if not self.changed:
            self.problems += [f"not as in {file.name}: {name}" for name in made if known.get(name) != made[name]]
        print(f"{len(made)} runs, {len(self.problems)} differences from the page", *self.problems, sep="\n")
        sys.exit(bool(self.problems))


# ---- figures of runs


def weights_of(run):
    """All weights of a run's last checkpoint as one vector, float64."""
    files = sorted(checkpoints(run / "ckpt")[-1].glob("model*.safetensors"))
    return torch.cat([x.flatten().double() for file in files for _, x in sorted(load_file(file).items())])


def change_one_bit(model, weight, folder):
    """Makes `folder` a copy of a model's with one weight, 'name[i]', made the next larger float32."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    file, tensors = branch.nudge(model, weight)
    save_file(tensors, folder / file, {"format": "pt"})
    return folder


def in_float64(checkpoint):
    """(model, tokenizer) of a checkpoint, in float64: other CPUs change its figures in the last digits only."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    return model.requires_grad_(False), AutoTokenizer.from_pretrained(checkpoint)


def score(folder):
    """pass@1 of a run's last evaluation, or None."""
    return next((x["pass@1"] for x in reversed(lines(folder, phase="eval"))), None)


def mean_of(numbers):
    """(mean, half the width of its 95 % interval by Student's t; 0 of a single number)."""
    n = len(numbers)
    half = stats.t.ppf(0.975, n - 1) * statistics.stdev(numbers) / n**0.5 if n > 1 else 0.0
    return statistics.fmean(numbers), half


def paired(after, before):
    """In words: the mean difference of two settings' numbers, seed by seed, and its 95 % interval."""
    return "{:+.3f} +- {:.3f}".format(*mean_of([x - y for x, y in zip(after, before)]))


def spread_of(numbers):
    """(standard deviation, the two ends of its 95 % interval): by chi-squared, as if they were normal."""
    n = len(numbers)
    deviation = statistics.stdev(numbers)
    low, high = (deviation * ((n - 1) / stats.chi2.ppf(p, n - 1)) ** 0.5 for p in (0.975, 0.025))
    return deviation, low, high


# ---- the picture


def panels(*titles):
    """(figure, its axes), side by side, in the style of tools/plot.py."""
    figure = plot.Figure(figsize=(5.2 * len(titles), 3.6), layout="constrained")
    axes = figure.subplots(1, len(titles), squeeze=False)[0]
    for axis, title in zip(axes, titles):
        plot.style(axis, title)
    return figure, axes


def forest(axis, rows, colors, at=0.0):
    """A row for each name in {name: the seeds' numbers}: dots, under them the mean with its 95 % interval; a line."""
    axis.axvline(at, color="#444444", linewidth=0.7)
    for i, (numbers, color) in enumerate(zip(rows.values(), colors)):
        mean, half = mean_of(numbers)
        axis.plot(numbers, [i - 0.15] * len(numbers), ".", color=color, alpha=0.5)
        axis.errorbar([mean], [i + 0.15], xerr=[half], fmt="o", color=color, capsize=3, markersize=4)
    axis.set_yticks(range(len(rows)), [*rows])
    axis.invert_yaxis()


def label_ends(axis, ends):
    """Names lines at their right ends, {name: (y, color)}, a line of text apart, each tied to its line's end."""
    axis.set_ylim(axis.get_ylim())
    to_axes = axis.transData + axis.transAxes.inverted()
    height = {name: to_axes.transform((0, y))[1] for name, (y, _) in ends.items()}
    above = 1.06
    for i, name in enumerate(sorted(height, key=height.get, reverse=True)):
        room = 0.06 * (len(height) - 1 - i)  # for those below
        above = max(room, min(height[name], above - 0.06))
        place = dict(xycoords="axes fraction", va="center", annotation_clip=False)
        tie = dict(arrowstyle="-", color=ends[name][1], linewidth=0.5, relpos=(0, 0.5))
        axis.annotate(name, (0.97, height[name]), (1.05, above), color=ends[name][1], arrowprops=tie, **place)
