"""
Lesson 6: staleness, or how old the weights are that sampled.

    uv run learn/lessons/6_staleness.py
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import kernels
from train_grpo import advantages_of, importance_weights, policy_loss

kernels.enable_batch_invariant()
B, G, V = 64, 8, 32  # samples of a step, samples of a group, tokens of the vocabulary: the numbers 0 to 31
NUMBERS = torch.arange(V).float()
BEST = 20  # the number with the highest reward, 1; the others lose 0.05 for each step away from it
HEAD = torch.stack([NUMBERS / 4, -NUMBERS * NUMBERS / 8], 1)  # (V, 2): hidden @ HEAD.t() = -(number - w)^2 / 8 + ...


def hidden(w):
    """(B, 2) for the head to multiply: the policy has one weight w (1,), and says numbers near it."""
    return torch.cat([w, torch.ones(1)]).repeat(B, 1)


def train(lag, treatment, rate=2.0, steps=120):
    """A run whose samples of step s are made with the weight of step s - lag: (its weights, its rewards, ratios)."""
    w, versions, rewards, ratios = torch.tensor([4.0], requires_grad=True), [], [], []
    for step in range(steps):
        versions.append(w.detach().clone())
        # the engine
        all_logprobs = torch.log_softmax(torch.mm(hidden(versions[max(0, step - lag)]), HEAD.t()), -1)
        tokens = kernels.draw(all_logprobs, torch.arange(B) + step * B, torch.zeros(B))
        sampled = all_logprobs.gather(1, tokens)[:, 0]
        rewards.append((1 - (tokens - BEST).abs() / 20).view(B // G, G))
        # the trainer
        advantages = advantages_of(rewards[-1], "grpo").view(-1)
        logprobs, _ = kernels.token_logprobs(hidden(w), HEAD, tokens[:, 0])
        losses, _ = policy_loss(
            "ppo" if treatment == "clip" else "pg", logprobs, sampled, advantages, [1] * B, 0.2, 0.2
        )
        if treatment == "weigh":
            losses = losses * importance_weights(logprobs.detach(), sampled, "truncate", 0.0, 2.0)
        (gradient,) = torch.autograd.grad(losses.sum() / B, w)
        with torch.no_grad():
            w -= rate * gradient
            ratios.append(torch.exp(logprobs - sampled))
    return torch.cat(versions), torch.stack(rewards), torch.cat(ratios)


for treatment in ("nothing", "clip", "weigh"):
    print(f"{treatment}\n lag  reward  effective  the weight after 0, 15, 30, .. steps")
    for lag in (0, 2, 4, 8, 16):
        weights, rewards, ratios = train(lag, treatment)
        effective = ratios.mean() ** 2 / ratios.square().mean()
        print(f"{lag:4} {rewards[-40:].mean():7.3f} {effective:10.3f}", *(f"{x:5.1f}" for x in weights[::15].tolist()))
