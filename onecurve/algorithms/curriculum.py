"""A curriculum: prompts are drawn by how much can be learned from them (the key `curriculum`)."""

import torch


def learnable_rows(right, curriculum, samples, per_step, source):
    """
    Indices of a step's rows, each drawn once, by the weights 1 + curriculum * 4 p (1 - p): p is the share of samples
    that were right when the row was last seen (Foster et al. 2025, arXiv:2502.12272: its learnability). right:
    for each row the number of its `samples` that were; None before any: as if half were. Whole numbers: no rounding.
    source: a generator of random numbers.
    """
    spread = [4 * m * (samples - m) if m is not None else samples**2 for m in right]
    weights = torch.tensor([samples**2 + curriculum * x for x in spread])
    left = weights.clone()
    rows = []
    for _ in range(per_step):
        if not left.any():  # more than there are: each once more
            left = weights.clone()
        ends = left.cumsum(0)
        drawn = torch.randint(int(ends[-1]), (1,), generator=source)
        rows.append(int(torch.searchsorted(ends, drawn, right=True)))
        left[rows[-1]] = 0
    return rows
