"""Rewards as a run records them: means by term and by source, and pass@k of held-out prompts."""

import math
from itertools import chain
from statistics import fmean

import torch


def reward_metrics(groups):
    """
    {metric: value} of the notes with the rewards of groups [(tensors, meta)]: the mean of each of several terms, the
    number of verdicts that were a limit of time or space, and of those so near to one that another run may differ.
    """
    noted = [terms for _, meta in groups for terms in meta.get("noted", ())]
    names = dict.fromkeys(chain(*noted))
    metrics = {}
    for name in names if len(names) > 1 else ():
        metrics[f"reward_{name}"] = fmean(terms[name]["reward"] for terms in noted if name in terms)
    limited = [notes for terms in noted for notes in terms.values() if "verdict" in notes]
    if limited:
        metrics["limits"] = sum(notes["verdict"] == "limit" for notes in limited)
        metrics["near_limit"] = sum(notes.get("near_limit", False) for notes in limited)
    for source, own in by_source(groups).items():
        metrics[f"{source}/reward_mean"] = fmean(group.tensors["rewards"].mean().item() for group in own)
    return metrics


def by_source(groups):
    """{name of a source: its Groups}; {} where the data has no names."""
    sources = {}
    for group in groups:
        if name := group[1].get("source"):
            sources.setdefault(name, []).append(group)
    return sources


def pass_at_k(n, right, k):
    """Unbiased chance that any of k samples is right, if `right` of n were: Chen et al. 2021, equation 1."""
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def pass_rates(rewards, pass_reward):
    """{metric: value} of rewards (P, n): the mean, and pass@k for k = 1, 2, 4 .. n with 95 % intervals over prompts."""
    n = rewards.shape[1]
    right = (rewards >= pass_reward).sum(1).tolist()
    scores = {"eval_reward_mean": float(rewards.double().mean())}
    for i in range(n.bit_length()):
        k = 2**i
        chances = torch.tensor([pass_at_k(n, m, k) for m in right], dtype=torch.float64)
        scores[f"pass@{k}"] = float(chances.mean())
        # 95 % of the normal distribution of a mean over prompts: Miller 2024 (arXiv:2411.00640), section 2
        scores[f"pass@{k}_ci95"] = 1.96 * float(chances.std()) / math.sqrt(len(right))
    return scores
