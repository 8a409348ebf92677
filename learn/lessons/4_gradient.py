"""
Lesson 4: a gradient that does not know how many GPUs there are.

    uv run learn/lessons/4_gradient.py
"""

import hashlib
import sys
from functools import reduce
from operator import add
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import kernels
from sync import LeafSum, tree_sum

kernels.enable_batch_invariant()
LEAVES, V, D = 8, 32, 64  # micro-batches of a step, tokens of the vocabulary, width
COUNTS = [3, 50, 7, 21, 5, 40, 2, 64]  # loss tokens of each leaf
TOKENS = sum(COUNTS)


def numbers(rng, *shape):
    """Random numbers between -1 and 1 out of whole numbers, which every machine draws alike."""
    return torch.from_numpy(rng.integers(-(2**20), 2**20, shape)).float() / 2**20


def gradients():
    """The sum of the tokens' losses of each leaf, and its gradient in the head's weight (V, D), over TOKENS."""
    rng, leaves = np.random.default_rng(0), []
    weight = numbers(rng, V, D).requires_grad_()
    for count in COUNTS:
        hidden, targets = numbers(rng, count, D), torch.from_numpy(rng.integers(0, V, count))
        loss = -kernels.token_logprobs(hidden, weight, targets)[0].sum()
        leaves.append((loss.item(), torch.autograd.grad(loss / TOKENS, weight)[0]))
    return zip(*leaves)


def as_they_come(grads, gpus):
    """Each GPU adds its own leaves one after the other, then the GPUs' sums are added one after the other."""
    return reduce(add, (reduce(add, grads[rank::gpus]) for rank in range(gpus)))


def as_one_tree(grads, gpus):
    """What the trainer does: leaf i is on GPU i % gpus; one tree adds across GPUs, then over each one's leaves."""
    total = LeafSum(LEAVES // gpus)
    for i in range(0, LEAVES, gpus):
        total.add([tree_sum(torch.stack(grads[i : i + gpus]))])
    return total.total()[0]


losses, grads = gradients()
for how in (as_they_come, as_one_tree):
    print(how.__name__)
    alone = how(grads, 1)
    for gpus in (1, 2, 4, 8):
        g = how(grads, gpus)
        differ = int((g.view(torch.int32) != alone.view(torch.int32)).sum())
        print(
            f"  GPUs: {gpus}   {hashlib.sha256(g.numpy()).hexdigest()[:16]}   {differ:4} of {g.numel()} numbers differ"
        )

print("the loss, if each GPU takes the mean over its own tokens, and then the mean of these is taken")
for gpus in (1, 2, 4, 8):
    means = [sum(losses[rank::gpus]) / sum(COUNTS[rank::gpus]) for rank in range(gpus)]
    print(f"  GPUs: {gpus}   {sum(means) / gpus:.4f}")
