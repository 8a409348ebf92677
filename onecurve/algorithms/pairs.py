"""Pairs of a chosen and a rejected response: the loss of reward models (mode=rm) and of DPO (mode=dpo)."""

import math

import torch

import sync
from configurator import MODES


def sides(mode):
    """The names of a row's responses: ("chosen", "rejected") where a mode learns from pairs, else ("answer",)."""
    return ("chosen", "rejected") if MODES[mode].pairs else ("answer",)


def with_wrong_sum(row):
    """A pair from a sum's row: its answer, and the answer with digits changed as a hash of the prompt says."""
    right = row["answer"]
    h = int(sync.content_hash(row["prompt"]), 16)
    h, changed = divmod(h, 2 ** len(right) - 1)  # a bit for each digit; 0 stands for all of them
    wrong = ""
    for i, digit in enumerate(right):
        h, by = divmod(h, 9)
        is_changed = changed == 0 or changed >> i & 1
        wrong += str((int(digit) + (1 + by) * is_changed) % 10)
    return dict(prompt=row["prompt"], chosen=right, rejected=wrong)


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
        gains = (output.logprobs - leaf.reference).split(leaf.counts)
        scores = c.kl_coef * torch.stack([part.sum() for part in gains])
    losses, margin = preference_loss(scores)
    return losses.sum() / tokens, dict(accuracy=margin > 0, margin=margin)


def number_of_pairs(samples):
    return len(samples) // 2


def pair_rates(figures, n):
    """{metric: value} of the figures of n held-out pairs, with a 95 % interval of the share in the right order."""
    share = figures["accuracy"]
    ci95 = 1.96 * math.sqrt(share * (1 - share) / max(1, n - 1))
    return {f"eval_{name}": x for name, x in figures.items()} | {"eval_accuracy_ci95": ci95}


@torch.no_grad()
def evaluate_pairs(trainer, objective, step, pairs, record):
    """Records how often, and by how much, held-out pairs (samples) are in the right order. Collective over trainers."""
    _, figures = trainer.gradients(pairs, objective)
    if record:
        n = number_of_pairs(pairs)
        tokens = sync.content_hash(*(s.tokens for s in pairs))
        record.evaluation(step, pair_rates(figures, n), n, dict(tokens=tokens))
