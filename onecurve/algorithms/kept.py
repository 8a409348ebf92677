"""
What a sampling rule (top_p, top_k, min_p) kept at each token, as pairs (2, K) of a loss token and an id. It is recorded
where log-probs are computed again with other weights, with which the rule would keep other tokens.
"""

import torch


def pack_kept(parts, counts):
    """The pairs of samples, with `counts` (samples,) loss tokens each, as those of their leaf."""
    kept = torch.cat(parts, 1)
    pairs = torch.tensor([x.shape[1] for x in parts])
    kept[0] += (counts.cumsum(0) - counts).repeat_interleave(pairs)
    return kept


def split_kept(kept, counts):
    """The pairs of a leaf, sorted, apart for its samples. counts: a Leaf's."""
    kept = kept.cpu()
    ends = torch.tensor(counts).cumsum(0)
    parts = kept.tensor_split(torch.searchsorted(kept[0], ends)[:-1], 1)
    return [torch.stack([rows - start, ids]) for (rows, ids), start in zip(parts, [0, *ends.tolist()])]
