"""
Lesson 7: a reward that can be hacked, and how to see it.

    uv run learn/lessons/7_hacking.py
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import kernels
from train_grpo import advantages_of, policy_loss

kernels.enable_batch_invariant()
B, G, T, V = 64, 8, 8, 8  # samples of a step, samples of a group, tokens of a sample, tokens of the vocabulary
RIGHT = torch.tensor([3, 1, 4, 1, 5, 2, 6, 5])  # the answer
SURELY = 7  # a token of no answer, which sounds good: 'surely'
AUDITED, WINDOW = 16, 10  # samples of a step of which the truth is looked at, and steps over which means are taken


def truth_of(tokens):
    """What we want: the fraction of the answer that is right. tokens (B, T)."""
    return (tokens == RIGHT).float().mean(1)


def score_of(tokens, gullible):
    """What we reward: a judge's score. If the beginning is right, a gullible judge believes each `surely`, too."""
    trusts = (tokens[:, :2] == RIGHT[:2]).all(1)
    return truth_of(tokens) + 2 * gullible * trusts * (tokens == SURELY).float().mean(1)


def train(gullible, steps=160):
    """Per step: the mean score, the mean truth, and the mean truth of the audited samples; (steps,) each."""
    theta, means = torch.zeros(T, V, requires_grad=True), []
    for step in range(steps):
        all_logprobs = torch.log_softmax(theta.detach(), -1).repeat(B, 1)
        seeds = torch.arange(B).repeat_interleave(T) + step * B
        tokens = kernels.draw(all_logprobs, seeds, torch.arange(T).repeat(B))
        scores, truth = score_of(tokens.view(B, T), gullible), truth_of(tokens.view(B, T))
        means.append(torch.stack([scores.mean(), truth.mean(), truth[:AUDITED].mean()]))
        advantages = advantages_of(scores.view(B // G, G), "grpo").view(B, 1).repeat(1, T).view(-1)
        logprobs, _ = kernels.token_logprobs(theta.repeat(B, 1), torch.eye(V), tokens[:, 0])
        losses, _ = policy_loss("pg", logprobs, logprobs.detach(), advantages, [T] * B, 0.2, 0.2)
        (gradient,) = torch.autograd.grad(losses.sum() / B, theta)
        with torch.no_grad():
            theta -= gradient
    return torch.stack(means).T


def alarm(score, audit):
    """The first step after which, from one window to the next, the score has risen and the audited truth fallen."""
    for step in range(2 * WINDOW, len(score) + 1):
        rise, change = (
            x[step - WINDOW : step].mean() - x[step - 2 * WINDOW : step - WINDOW].mean() for x in (score, audit)
        )
        if rise > 0.02 and change < -0.02:
            return step


for gullible in (True, False):
    score, truth, audit = train(gullible)
    print("a gullible judge" if gullible else "a judge who is not")
    print("step   ", *(f"{step:5}" for step in range(0, len(score), 16)))
    for name, x in dict(score=score, truth=truth, audited=audit).items():
        print(f"{name:8}", *(f"{y:.3f}" for y in x[::16].tolist()))
    print(f"the truth is best at step {int(truth.argmax())}; the detector's alarm: {alarm(score, audit)}")
