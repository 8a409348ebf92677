"""R = -a exp(H) + b of a run's entropy H and reward R: its points, its fit."""

import math
import statistics

from study import lines, require

WINDOW = 10  # steps of a point


def points(run):
    """(entropies, rewards) of a run in training: a point is the mean of WINDOW steps."""
    steps = lines(run, phase="rl")
    windows = [steps[i : i + WINDOW] for i in range(0, len(steps), WINDOW)]
    return [[statistics.fmean(x[key] for x in window) for window in windows] for key in ("entropy", "reward_mean")]


def mean_points(runs):
    """The same, means of the runs."""
    return [[*map(statistics.fmean, zip(*same))] for same in zip(*map(points, runs))]


def fit(entropies, rewards):
    """(the law as a function of H, R2): by least squares."""
    require(len(entropies) > 1, f"a fit wants two points of {WINDOW} steps; use --max_steps={2 * WINDOW} or more")
    exps = [math.exp(h) for h in entropies]
    line = statistics.linear_regression(exps, rewards)
    return lambda h: line.intercept + line.slope * math.exp(h), statistics.correlation(exps, rewards) ** 2
