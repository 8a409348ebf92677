"""
Lesson 3: GRPO on four samples, and GAE on one, by hand.

    uv run learn/lessons/3_by_hand.py
"""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import kernels
from onecurve.algorithms.critic import gae
from train_grpo import advantages_of, policy_loss

kernels.enable_batch_invariant()


def compare(what, by_hand, tensor):
    """Two lines: numbers of plain Python, and those of train_grpo.py."""
    print(what)
    print("  by hand      ", *(f"{x:8.4f}" for x in by_hand))
    print("  train_grpo.py", *(f"{x:8.4f}" for x in tensor.tolist()))


print("1. Four samples of one prompt: two are right.")
rewards = [1.0, 0.0, 0.0, 1.0]
mean = sum(rewards) / 4
std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 3)
advantages = [(r - mean) / (std + 1e-6) for r in rewards]
print(f"  mean {mean}, standard deviation {std:.4f}")
compare("advantages, grpo: (r - mean) / (std + 1e-6)", advantages, advantages_of(torch.tensor([rewards]), "grpo")[0])
others = [r - (sum(rewards) - r) / 3 for r in rewards]
compare("advantages, rloo: r - mean of the others", others, advantages_of(torch.tensor([rewards]), "rloo")[0])
compare("all four right: nothing to learn", [0.0] * 4, advantages_of(torch.ones(1, 4), "grpo")[0])

print("\n2. One token of each. Its probability was 0.4 when it was sampled, and then the policy has moved.")
before, now = 0.4, [0.44, 0.36, 0.24, 0.60]
ratios = [p / before for p in now]
bounded = [min(max(r, 0.8), 1.2) for r in ratios]
losses = [-min(r * a, b * a) for r, b, a in zip(ratios, bounded, advantages)]
# The loss is -r A, and d r / d logprob = r; where the clipped one is the smaller, nothing depends on the policy.
slopes = [-r * a if r * a <= b * a else 0.0 for r, b, a in zip(ratios, bounded, advantages)]
logprobs = torch.tensor([math.log(p) for p in now], requires_grad=True)
old = torch.full((4,), math.log(before))
loss, clipped = policy_loss("ppo", logprobs, old, torch.tensor(advantages), [1] * 4, 0.2, 0.2)
compare("ratio: new probability / old", ratios, torch.exp(logprobs.detach() - old))
compare("loss: -min(r A, clip(r, 0.8, 1.2) A)", losses, loss.detach())
compare("its slope in the log-prob", slopes, torch.autograd.grad(loss.sum(), logprobs)[0])
print("  clipped      ", *(f"{str(x):>8}" for x in clipped.tolist()))

print("\n3. GAE: one sample of three tokens, its reward with the last, and what a critic expected before each.")
rewards, values, gamma, lam = [0.0, 0.0, 1.0], [0.5, 0.6, 0.8, 0.0], 1.0, 0.95
deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, values[1:])]
third = deltas[2]
second = deltas[1] + gamma * lam * third
first = deltas[0] + gamma * lam * second
print("  surprises: r + gamma V' - V =", *(f"{d:.4f}" for d in deltas))
ours = gae(torch.tensor(rewards), torch.tensor(values), gamma, lam)
compare("advantages: each surprise and 0.95 of what comes after", [first, second, third], ours)
