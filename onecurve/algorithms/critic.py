"""
PPO's critic: a value head on the policy's trunk, which says what each state is worth (--advantage=gae).

`token_rewards` says where a sample's reward is paid, `gae` and `advantages` compare it with what the critic expected,
`value_loss` teaches the critic.
"""

from itertools import pairwise

import torch


def gae(rewards, values, gamma, lam):
    """
    Generalised advantages (.., T) of rewards (.., T) and values (.., T + 1) of the states before each token and after
    the last token. That last value is 0 if the episode is over, the critic's estimate if it was only cut off.
    A_t = sum_k (gamma lam)^k delta_t+k, delta_t = r_t + gamma V_t+1 - V_t: Schulman et al. 2015 (arXiv:1506.02438),
    equation 16.
    """
    advantages = rewards + gamma * values[..., 1:] - values[..., :-1]  # the deltas, to which the later ones come
    for t in reversed(range(rewards.shape[-1] - 1)):
        advantages[..., t] += gamma * lam * advantages[..., t + 1]
    return advantages


def value_loss(values, old_values, returns, clip):
    """
    (V - return)^2 / 2 per token (M,); with a clip, the larger of this and the same of V clamped to old V +- clip: PPO's
    own code (github.com/openai/baselines, ppo2), which Huang et al. 2022 describe ("The 37 implementation details", 9).
    """
    plain = (values - returns).square()
    if clip:
        bounded = old_values + (values - old_values).clamp(-clip, clip)
        plain = torch.maximum(plain, (bounded - returns).square())
    return plain / 2


def token_rewards(sample, reward, credit):
    """
    Rewards of a sample's loss tokens (M,): all at the last one, or each turn's at the turn's last one, with those of
    turns behind it that have none.
    """
    turn = sample.turn
    gains = torch.zeros(len(turn))
    if credit == "turn":
        last = turn.diff(append=turn[-1:] + 1) != 0
        bounds = pairwise([*turn[last].tolist(), None])
        gains[last] = torch.tensor([sample.turn_rewards[i:end].sum() for i, end in bounds])
    else:
        gains[-1:] = reward
    return gains


def with_values(samples, outputs):
    """The samples with the critic's values, of a Trainer's `outputs`."""
    # After a sample that ended by itself nothing can be gained: its last value is 0.
    return [
        s._replace(values=values, bootstrap=last if s.truncated else 0.0)
        for s, (*_, values, last) in zip(samples, outputs)
    ]


def advantages(samples, gains, gamma, lam):
    """
    The samples with the advantages of `gae`, normalised over the batch (Huang et al. 2022, detail 7), and returns.
    gains: per sample (M,), what `token_rewards` returns minus each token's KL cost: a reward of 1 and costs
    of .1 .1 .2 make -.1 -.1 .8.
    """
    states = [torch.cat([s.values, torch.tensor([s.bootstrap])]) for s in samples]
    # The recursion starts at the end, so samples are aligned there and it reaches the padding last.
    padded = (torch.nn.utils.rnn.pad_sequence(x, batch_first=True, padding_side="left") for x in (gains, states))
    advantages = [row[len(row) - len(g) :] for row, g in zip(gae(*padded, gamma, lam), gains)]
    every = torch.cat(advantages)
    mean = every.mean()
    std = every.std()
    return [
        s._replace(
            advantages=(a - mean) / (std + 1e-6),
            returns=a + s.values,
        )
        for s, a in zip(samples, advantages)
    ]
