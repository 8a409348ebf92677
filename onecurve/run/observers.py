"""
Observers of a step: what some runs record beside the loss. A trainer has a list of them, which is empty in a plain run.
Others are a mixture's Routers (onecurve/models/moe.py) and the Dial (onecurve/run/dial.py).
"""

import torch

from onecurve.run.past import max_staleness


class Observer:
    """Sees each pass over a step's leaves, and adds to the figures of its loss tokens and to the metrics."""

    def before(self, samples, phase, check):
        """Called before the passes of an update. phase: the objective's; check: log-probs are compared in them."""

    def note(self, loss, chosen, leaf, output, figures):
        """Adds to a leaf's figures {metric: (M,)}; returns its loss. chosen: indices of the leaf's samples."""
        return loss

    def metrics(self, metrics):
        """{metric: value} to add to those of the update. Collective over the trainers."""
        return {}

    def write(self, folder):
        """Writes the step's record into its rollout folder. Called on the first rank."""


class OffPolicy(Observer):
    """How far the policy is from the weights that sampled: with a lag, partial rollouts or the dial."""

    def before(self, samples, phase, check):
        self.phase = phase

    def note(self, loss, chosen, leaf, output, figures):
        if self.phase == "rl":
            moved = output.logprobs.detach() - leaf.logprobs
            ratio = torch.exp(moved)
            figures |= dict(
                logprob_distance=moved.abs(),
                staleness=leaf.staleness,
                ratio_mean=ratio,
                ratio_square=ratio.square(),
                kl_behaviour=ratio - 1 - moved,  # Schulman's k3 of KL(behaviour || policy)
            )
        return loss

    def metrics(self, metrics):
        if self.phase != "rl":
            return {}
        square = metrics.pop("ratio_square")
        mean_square = metrics["ratio_mean"] ** 2
        return dict(ratio_variance=square - mean_square, effective_sample_size=mean_square / square)


def off_policy_of(c):
    """[OffPolicy()] where a token may be of other weights than those that are trained; else []."""
    return [OffPolicy()] if max_staleness(c) or c.engine_bits != "fp32" else []
