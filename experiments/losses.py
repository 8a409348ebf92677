"""
Losses and advantages of 2025 and 2026, taken by their path; a file of yours is taken the same way. None of them is
known to train_grpo.py, which has the classics.

    python train_grpo.py config/tiny.py --loss=experiments/losses.py:dppo --updates_per_batch=4
    python train_grpo.py config/tiny.py --advantage=experiments/losses.py:maxrl

How to write one. Both kinds get named arguments, of which they name what they need and end with `**_`.

    def mine(logprobs, old_logprobs, advantages, **_):    # a loss
        return -advantages * torch.exp(logprobs - old_logprobs), torch.zeros(len(logprobs)).bool()

A loss returns, for each of a micro-batch's M loss tokens, its part of the loss and whether it counts as clipped (the
metric clip_fraction): (M,) each. It gets, (M,) each, of the token that was sampled:

    logprobs            now, the only one with a gradient beside entropy
    old_logprobs        before the batch's first update: the engine's, or with `importance` the trainer's own
    rollout_logprobs    the engine's
    reference           the frozen reference's, with kl_coef > 0
    advantages
    entropy             of the whole distribution at this token, nats
    staleness           by how many steps the weights that sampled it are older than those that are trained
    mark                what `before` has noted, see below; else 0

and `counts`, a list of how many of the M tokens each sample has: x.split(counts) gives each sample's. There is no
padding, and so no mask. It also gets every key of the config (clip_low, clip_high, ..). A mean over a sample's tokens
wants --loss_aggregation=sequence.

An advantage gets `rewards` (P, G), of G samples for each of P prompts, `groups`, a list of P rollout Groups (sync.py),
which have all that is known of the samples, and every key; it returns (P, G).

What a leaf cannot see: a loss may have an attribute `before`, a function that gets the trainer and all samples of the
step (`Sample` in train_grpo.py) once, before the first update, and returns them with other advantages or with a `mark`
per token. It sees the same batch on every rank and for every size of leaves, which a choice within a micro-batch would
not; all ranks must come to the same answer.

All are functions of their arguments alone: no clock, no random number. On CPUs torch's exp, log, sum, mean and std are
replaced by ours, with equal bits on every CPU; others, such as torch.sigmoid, have the bits of the CPU at hand.
"""

import torch

from rewards import terms_of
from train_grpo import advantages_of, policy_loss

# ---- advantages


def maxrl(rewards, **_):
    """
    (r - mean) / mean of the group, 0 where nothing was right: for rewards of 0 and 1. Prompts that are rarely solved
    count more; unbiased for the first G terms of maximum likelihood's gradient. MaxRL, arXiv:2602.02710.
    """
    mean = rewards.mean(1, keepdim=True)
    return torch.where(mean > 0, advantages_of(rewards, "dr_grpo") / mean, 0.0)


def opo(rewards, groups, **_):
    """
    r - baseline, the mean reward of the group weighted by length, sum(length r) / sum(length): the baseline of least
    variance where a sample's gradient grows with its length. Hao et al. 2025 (arXiv:2505.23585).
    """
    centred = advantages_of(rewards, "dr_grpo")  # of equal rewards exact zeros
    lengths = torch.stack([group.response_lengths() for group in groups]).float()
    return centred - (lengths * centred).sum(1, keepdim=True) / lengths.sum(1, keepdim=True)


def gdpo(reward, groups, **_):
    """
    Each term of a reward such as numeric+0.2*format normalised in its group by itself, (r - mean) / std; then their
    weighted sum, normalised over the batch: so that no term vanishes beside another one's spread. Liu et al. 2026
    (arXiv:2601.05242). Penalties and a KL in the reward have no part in it.
    """
    total = 0.0
    for weight, name in terms_of(reward):
        scores = torch.tensor([[terms[name]["reward"] for terms in group.meta["noted"]] for group in groups])
        total = total + weight * advantages_of(scores, "grpo")
    return advantages_of(total, "reinforce++")


# ---- losses


MOST = 20.0  # bound of dppo's ratio
SAPO = 1.0, 1.05  # temperatures for A > 0, and else
GMPO = 0.4  # bound of a log-ratio
OFF_POLICY = 0.1  # nats per token


def dppo(logprobs, rollout_logprobs, advantages, clip_low, clip_high, **_):
    """
    -min(r, 20) A logprob without a gradient through r = pi / rollout, only where pi - rollout <= clip_high (A > 0) or
    >= -clip_low (else): bounds of probabilities, not of their ratio, which is noisy where both are small. DPPO-TV,
    arXiv:2602.04879.
    """
    now = logprobs.detach()
    moved = torch.exp(now) - torch.exp(rollout_logprobs)
    held = torch.where(advantages > 0, moved > clip_high, moved < -clip_low)
    ratio = torch.exp(now - rollout_logprobs).clamp(max=MOST)
    return torch.where(held, 0.0, -ratio * advantages * logprobs), held


def sapo(logprobs, old_logprobs, advantages, **_):
    """
    -A 4/t sigmoid(t (r - 1)): in place of the clip a gate that closes slowly, with slope 1 at r = 1, and a larger t
    where A < 0. SAPO, arXiv:2511.20347.
    """
    t = torch.where(advantages > 0, *SAPO)
    gate = 1 / (1 + torch.exp(-t * (torch.exp(logprobs - old_logprobs) - 1)))
    return -advantages * 4 / t * gate, torch.zeros_like(gate).bool()


def gmpo(logprobs, old_logprobs, advantages, counts, **_):
    """
    -A exp(mean over the sample of d), d = log r but not above 0.4 (A > 0) or below -0.4 (else): the geometric mean of
    the ratios, which one token cannot move far. For --loss_aggregation=sequence. GMPO, arXiv:2507.20673.
    """
    d = logprobs - old_logprobs
    bounded = torch.where(advantages > 0, d.clamp(max=GMPO), d.clamp(min=-GMPO))
    mean = torch.cat([part.mean().expand(len(part)) for part in bounded.split(counts)])
    return -advantages * torch.exp(mean), bounded != d


def off_policy_mask(logprobs, rollout_logprobs, advantages, counts, **others):
    """
    PPO's loss without the samples of A < 0 that the policy has left: mean log(rollout / pi) over the sample above 0.1.
    Clipped are their tokens, too. DeepSeek-V3.2, arXiv:2512.02556, "off-policy sequence masking".
    """
    losses, clipped = policy_loss(
        "ppo", logprobs=logprobs, rollout_logprobs=rollout_logprobs, advantages=advantages, counts=counts, **others
    )
    left = rollout_logprobs - logprobs.detach()
    mean = torch.cat([part.mean().expand(len(part)) for part in left.split(counts)])
    dropped = (advantages < 0) & (mean > OFF_POLICY)
    return torch.where(dropped, 0.0, losses), clipped | dropped


# ---- losses that first look at the whole batch


KL_COV = 0.002, 1.0  # share of the batch's tokens, weight of their KL
ENTROPY = 0.3, 0.02  # target in nats per token, largest weight


def over_batch(samples, marks):
    """The samples with these marks (tokens of all samples,)."""
    return [s._replace(mark=mark) for s, mark in zip(samples, marks.split([len(s.mark) for s in samples]))]


def kl_cov(logprobs, old_logprobs, advantages, mark, **_):
    """
    -r A, and + |log r| for the marked tokens: those 0.2 % of the batch with the largest (A - mean A)(logprob - mean
    logprob), which lower the entropy most. KL-Cov, Cui et al. 2025 (arXiv:2505.22617), equation 13.
    """
    d = logprobs - old_logprobs
    return -advantages * torch.exp(d) + mark * KL_COV[1] * d.abs(), mark > 0


def mark_covariance(trainer, samples):
    advantages = torch.cat([s.advantages for s in samples])
    logprobs = torch.cat([s.old_logprobs for s in samples])
    covariance = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
    chosen = covariance.sort(descending=True, stable=True).indices[: max(1, int(KL_COV[0] * len(covariance)))]
    return over_batch(samples, torch.zeros(len(covariance)).index_fill(0, chosen, 1.0))


kl_cov.before = mark_covariance


def adaptive_entropy(entropy, mark, **others):
    """
    PPO's loss with an entropy bonus that grows as the entropy falls below a target: weight max(0, 1 - H / 0.3) * 0.02
    with H the mean of -logprob over all tokens of the step, an unbiased estimate of the entropy when they were sampled.
    After Skywork-OR1 (arXiv:2505.22312), 3.2, whose weight goes up or down by a constant a step: that would be a state
    to save, and this is a function of the step.
    """
    losses, clipped = policy_loss("ppo", **others)
    return losses - mark * entropy, clipped


def mark_entropy(trainer, samples):
    logprobs = torch.cat([s.logprobs for s in samples])
    target, most = ENTROPY
    weight = (1 + logprobs.mean() / target).clamp(min=0) * most
    return over_batch(samples, weight.expand(len(logprobs)))


adaptive_entropy.before = mark_entropy


def sdpo(**inputs):
    """
    PPO's loss with the advantage log pi(token | hint) - log pi(token): the policy is its own teacher, who has seen a
    right answer of the same group, prompt and all, before the prompt. Where no other sample was right the advantage is
    0; `advantage` only says which samples were. Self-distillation, arXiv:2601.20802 (SDPO) and 2601.19897 (SDFT), with
    the log-probs of the sampled tokens in place of whole distributions.
    """
    return policy_loss("ppo", **inputs)


@torch.no_grad()
def learn_from_siblings(trainer, samples):
    if trainer.sampling.cuts():
        raise ValueError("a teacher may rule out what the student wrote; use no top_p, top_k and min_p")
    right = {}  # {group: its samples with a positive advantage}
    for i, s in enumerate(samples):
        right.setdefault(s.of // trainer.c.group_size, []).extend([i] * bool((s.advantages > 0).any()))
    hinted = {}  # {sample: the same behind a sibling}
    for i, s in enumerate(samples):
        shown = [samples[j].tokens for j in right[s.of // trainer.c.group_size] if samples[j].of != s.of][:1]
        if shown and len(s.loss_at):
            hinted[i] = s._replace(tokens=torch.cat([*shown, s.tokens]), loss_at=s.loss_at + len(shown[0]))
    learned = [s._replace(advantages=torch.zeros_like(s.logprobs)) for s in samples]
    taught = trainer.outputs(list(hinted.values()), trainer.model)
    for i, (teacher, *_) in zip(hinted, taught):
        learned[i] = samples[i]._replace(advantages=teacher - samples[i].logprobs)
    return learned


sdpo.before = learn_from_siblings
