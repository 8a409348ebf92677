"""Pairs of a chosen and a rejected response: the loss of reward models (mode=rm) and of DPO (mode=dpo)."""

import torch

import rewards
import sync


def preference_loss(scores):
    """
    (-log sigmoid(margin), margin) of each pair (pairs,) each: margin is the chosen response's score minus the rejected
    one's. scores (2 * pairs,) has each pair's chosen score and then its rejected one. Bradley and Terry 1952; Ouyang et
    al. 2022 (arXiv:2203.02155), equation 1.
    """
    margin = scores[:-1:2] - scores[1::2]  # empty for a FILLER, whose one score is no pair
    largest = (-margin).clamp(min=0).detach()  # keeps exp from overflowing; cancels out, in the gradient, too
    return largest + torch.log(torch.exp(-largest) + torch.exp(-margin - largest)), margin


def pair_loss(output, leaf, c, samples, tokens):
    """
    The loss of a reward model, or of a policy whose scores are kl_coef * log(pi / reference) of each response: DPO,
    Rafailov et al. 2023 (arXiv:2305.18290), equation 7. Here `tokens` is the number of the step's pairs.
    """
    scores = output.scores
    if scores is None:
        gains = (output.logprobs - leaf.reference).split(leaf.counts.tolist())
        scores = c.kl_coef * torch.stack([part.sum() for part in gains])
    losses, margin = preference_loss(scores)
    return losses.sum() / tokens, dict(accuracy=margin > 0, margin=margin)


@torch.no_grad()
def evaluate_pairs(trainer, objective, step, pairs, record):
    """Records how often, and by how much, held-out pairs (samples) are in the right order. Collective over trainers."""
    _, figures = trainer.gradients(pairs, objective)
    if record:
        n = len(pairs) // 2
        tokens = sync.content_hash(*(s.tokens for s in pairs))
        record.evaluation(step, rewards.pair_rates(figures, n), n, dict(tokens=tokens))
