"""
Lesson 5: what happens when the engine is not the trainer.

    uv run learn/lessons/5_mismatch.py
"""

import hashlib
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import kernels
from train_grpo import advantages_of, importance_weights, policy_loss

kernels.enable_batch_invariant()
B, G, T, V = 32, 8, 8, 8  # samples of a step, samples of a group, tokens of a sample, tokens of the vocabulary
RIGHT = torch.tensor([3, 1, 4, 1, 5, 2, 6, 5])  # the answer; a sample's reward is the fraction of it that is right


def train(mismatch, treatment, steps=80, seed=1):
    """The figures of a run whose engine's weights are off by up to `mismatch` from the trainer's."""
    rng, theta = random.Random(seed), torch.zeros(T, V, requires_grad=True)  # the policy: a logit per place and token
    error = torch.tensor([[mismatch * (2 * rng.random() - 1) for _ in range(V)] for _ in range(T)])
    low, high, clipped_tokens = 1.0, 1.0, 0
    for step in range(steps):
        with torch.no_grad():  # the engine
            all_logprobs = torch.log_softmax(theta + error, -1).repeat(B, 1)
            seeds = torch.arange(B).repeat_interleave(T) + (seed * steps + step) * B
            tokens = kernels.draw(all_logprobs, seeds, torch.arange(T).repeat(B))
            sampled = all_logprobs.gather(1, tokens)[:, 0]
            rewards = (tokens.view(B, T) == RIGHT).float().mean(1).view(B // G, G)
            advantages = advantages_of(rewards, "grpo").view(B, 1).repeat(1, T).view(-1)
        logprobs, _ = kernels.token_logprobs(theta.repeat(B, 1), torch.eye(V), tokens[:, 0])  # the trainer
        old = sampled if treatment == "clip" else logprobs.detach()
        losses, clipped = policy_loss("ppo", logprobs, old, advantages, [T] * B, 0.2, 0.2)
        if treatment == "weigh":
            losses = losses * importance_weights(old, sampled, "truncate", 0.0, 2.0)
        (gradient,) = torch.autograd.grad(losses.sum() / B, theta)
        with torch.no_grad():
            theta -= gradient
            ratio = torch.exp(logprobs - sampled)
        low, high = min(low, float(ratio.min())), max(high, float(ratio.max()))
        clipped_tokens += int(clipped.sum())
    trainer, engine = (
        torch.softmax(x, -1)[torch.arange(T), RIGHT].mean() for x in (theta.detach(), theta.detach() + error)
    )
    digest = hashlib.sha256(theta.detach().numpy()).hexdigest()[:8]
    return float(trainer), float(engine), low, high, clipped_tokens / (steps * B * T), digest


for treatment in ("clip", "ignore", "weigh"):
    print(f"{treatment}\nmismatch  trainer  engine  least ratio  largest  clipped  weights")
    for mismatch in (0.0, 0.1, 0.5, 2.0, 5.0):
        trainer, engine, low, high, clipped, digest = train(mismatch, treatment)
        print(f"{mismatch:8} {trainer:8.3f} {engine:7.3f} {low:12.3f} {high:8.3f} {clipped:8.3f}  {digest}")
