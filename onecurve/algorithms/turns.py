"""Credit by turn: each turn of an agent's dialogue is compared with those of the same number (--credit=turn)."""

import torch

from onecurve.algorithms.critic import gae


def advantages(samples, of_group, group_size, gamma):
    """
    The samples with an advantage per turn. A turn's return is its reward plus those of later turns, discounted by gamma
    per turn; it is compared with the returns of the turns of the same number in the group's other dialogues. A turn
    that has none to compare with gets 0. of_group: the advantages (1, n) of returns (1, n).
    """
    returns = [gae(s.turn_rewards, torch.zeros(len(s.turn_rewards) + 1), gamma, 1.0) for s in samples]
    peers = {}  # {(group, number of a turn): the returns of these turns, which their advantages then replace}
    for s, gains in zip(samples, returns):
        for k, gain in enumerate(gains):
            peers.setdefault((s.of // group_size, k), []).append(gain)
    for turns in peers.values():
        each = of_group(torch.stack(turns)[None])[0] if len(turns) > 1 else [0]
        for turn, a in zip(turns, each):
            turn.fill_(a)
    return [s._replace(advantages=a[s.turn]) for s, a in zip(samples, returns)]
