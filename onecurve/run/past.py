"""
Older weights. With a lag or partial rollouts the weights that sampled a token may be some steps old: so a copy of each
version is kept as long as a token of it is still to be trained on, and such tokens are checked with it.
"""

import torch

from configurator import require


def max_staleness(c):
    """The largest staleness of a token, in steps; it is also how many older versions of the weights must be kept."""
    if not c.segment_tokens:
        return c.lag
    # A group is sampled in at most `drawn` steps. Then it waits for the groups begun before it, and each step trains on
    # P of these; if it was the last in flight, the step in which it was begun has already trained on P of them.
    drawn = -(-c.max_new_tokens // c.segment_tokens)
    return c.lag + max(0, drawn - 2) + (c.groups_in_flight - 1) // c.prompts_per_step


def of_age(sample, age):
    """The sample with no loss but on its tokens of this staleness; None without any."""
    chosen = sample.staleness == age
    return sample.only(chosen) if chosen.any() else None


class PastWeights:
    """
    Copies of a trainer's policy, as the engines got it, by version: none where all tokens are of the newest weights.
    versions: those to make room for, which a checkpoint fills.
    """

    def __init__(self, trainer, versions=()):
        self.trainer = trainer
        self.most = max_staleness(trainer.c)
        self.versions = {version: self.snapshot() for version in versions}  # {version: shards}

    def snapshot(self):
        """A copy of the policy's shards in the engines' dtype; adapters stay float32."""
        dtype = self.trainer.parts.dtype
        return [s._replace(data=s.data.to(dtype, copy=True)) for s in self.trainer.policy]

    def keep(self, version):
        """Keeps a copy of the weights as `version`, and drops versions too old for any token still to be trained on."""
        if not self.most:
            return
        self.versions = {v: kept for v, kept in self.versions.items() if v >= version - self.most}
        # The newest is still to be sent; older ones wait in CPU memory, where there is room. Copied like this it is
        # pinned, and torch gives what the dropped ones had.
        older = {
            v: [s._replace(data=s.data.to("cpu", non_blocking=True)) for s in kept] for v, kept in self.versions.items()
        }
        self.versions = older | {version: self.snapshot()}

    @torch.no_grad()
    def check(self, samples, step):
        """
        Compares the log-probs of tokens sampled with older weights than those of `step`, in a pass for each version.
        Ends the run with one line if a version is not kept. Returns the samples, with what a sampling rule kept for
        these tokens: under other weights it would keep others. Collective over the trainers.
        """
        checked = list(samples)
        ages = torch.cat([s.staleness for s in samples]).unique()
        for age in ages[ages > 0].tolist():
            cut = {i: part for i, s in enumerate(samples) if (part := of_age(s, age))}
            parts = [*cut.values()]
            token = f"{parts[0].name}, token {int(parts[0].loss_at[0]) - parts[0].prompt_tokens}"
            why = f"sampled with weights {step - age}; the oldest that are kept are {min(self.versions, default=step)}"
            require(step - age in self.versions, f"step {step}, {token}: {why}")
            outputs = self.trainer.outputs(parts, self.trainer.model, self.versions[step - age])
            for i, (logprobs, (rows, ids), *_) in zip(cut, outputs):
                if self.trainer.rank == 0:  # all ranks have them all
                    self.trainer.compare(cut[i], [cut[i]], logprobs, age)
                kept = torch.stack([(samples[i].staleness == age).nonzero()[rows, 0], ids])
                checked[i] = checked[i]._replace(kept=torch.cat([checked[i].kept, kept], 1))
        return checked
