"""
The dial (--engine_bits): the engine's weights are rounded, the trainer's are not. The figures of both are kept.
"""

import torch

from onecurve.run.checkpoint import write_file
from onecurve.run.observers import Observer


class Dial(Observer):
    """The figures of each token of a dialled run (--engine_bits), in which engine and trainer differ."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.table = {}

    def before(self, samples, phase, check):
        self.samples = samples
        self.check = check
        self.figures = {}  # {index of a sample here: {name: (M,)}}

    def note(self, loss, chosen, leaf, output, figures):
        if self.check:
            noted = dict(logprobs=output.logprobs) | figures
            columns = [x.detach().cpu().split(leaf.counts) for x in noted.values()]
            self.figures |= {i: dict(zip(noted, own)) for i, own in zip(chosen, zip(*columns))}
        return loss

    def metrics(self, metrics):
        if self.check:
            self.table = token_table(self.samples, self.trainer.in_order(self.figures))
        return {}

    def write(self, folder):
        folder.mkdir(parents=True, exist_ok=True)  # a replay's rollouts are elsewhere
        write_file(folder / "trainer.safetensors", self.table)


def token_table(samples, figures):
    """
    {name: (M,)} of a batch's loss tokens, in the order of the samples: what engine and trainer say of each. figures: of
    each sample {name: (M,)}, the trainer's.
    """
    rows = [
        dict(
            rollout_logprobs=s.logprobs,
            position=s.loss_at - s.prompt_tokens,
            sample=torch.full_like(s.loss_at, s.of),
            **own,
        )
        for s, own in zip(samples, figures)
    ]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def dial_of(trainer):
    """[the Dial of a trainer]; [] where the engine computes with the trainer's weights."""
    return [Dial(trainer)] if trainer.c.engine_bits != "fp32" else []
