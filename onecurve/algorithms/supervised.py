"""
Supervised steps, by the same Trainer: the warm-up before RL (--warmup_sft_steps), and all that mode=sft, rm and dpo do.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

import rewards
from onecurve.algorithms.answers import encode_answers
from onecurve.algorithms.pairs import evaluate_pairs, number_of_pairs, pair_loss, sides
from onecurve.run.setup import due


def loss_tokens(samples):
    """The number of tokens of the samples that have a loss."""
    return sum(len(s.loss_at) for s in samples)


class Objective(NamedTuple):
    """The objective of an update of a Trainer."""

    phase: str  # its name in the ledger and in metrics.jsonl
    loss: Callable  # such as train_grpo.policy_step_loss
    unit: int = 1  # samples that must be in one leaf
    count: Callable = loss_tokens  # samples -> the number of which loss and figures are means
    sampled: bool = True  # by the run's sampling rule, under which log-probs are then computed


def answer_loss(output, leaf, c, samples, tokens):
    """The negative log-likelihood of answers, the mean over all tokens."""
    return (-output.logprobs).sum() / tokens, dict(entropy=output.entropy)


ANSWERS = Objective("sft", answer_loss, sampled=False)
PAIRS = Objective("rm", pair_loss, 2, number_of_pairs)


def supervised_samples(rows, c, make_sample, demonstrate=None):
    """
    Samples of rows that have answers, or pairs (two samples each); their log-probs are 0. demonstrate(rows): an agent's
    dialogues for the rows, (prompt, tokens after it, loss mask) each. make_sample: train_grpo's.
    """
    if demonstrate:
        known = demonstrate(rows)
    else:
        keys = [f"{side}_tokens" for side in sides(c.mode)]
        known = [(row["prompt_tokens"], row[key], [True] * len(row[key])) for row in rows for key in keys]
    tensors = (map(torch.tensor, dialogue) for dialogue in known)
    return [make_sample(prompt, response, mask, torch.zeros(len(response))) for prompt, response, mask in tensors]


def teach(trainer, run, task, make_sample, learning_rate_at):
    """
    The supervised steps that are left. run, task: the Run and its Task. make_sample, learning_rate_at: train_grpo.py's,
    which cannot be imported from there: it is the running program. Collective over the trainers.
    """
    c = trainer.c
    alone = run.supervised  # else it is the warm-up before RL
    steps = c.max_steps if alone else c.warmup_sft_steps
    schedule = c.sft_learning_rate, 20, 0, 0.0  # peak, warm-up, decay, minimum
    if alone:
        schedule = c.learning_rate, c.warmup_steps, c.lr_decay_steps, c.min_lr
    encode = partial(encode_answers, tokenizer=run.tokenizer, stop_tokens=run.stop_tokens, config=vars(c))
    agent = task.agent
    answered = task.train_rows if agent else {name: encode(rows) for name, rows in task.train_rows.items()}
    objective = PAIRS._replace(phase=c.mode) if run.does.pairs else ANSWERS

    def samples_of(rows):
        samples = supervised_samples(rows, c, make_sample, agent and agent.demonstrate)  # no agent learns from pairs
        return trainer.forward_only(samples) if c.mode == "dpo" else samples  # with the reference's log-probs

    held_out = samples_of(encode(task.eval_rows)) if run.does.pairs and task.eval_rows else []
    for i in range(run.start, steps + 1):  # i steps are done
        if i > run.start or not run.saved:
            if held_out and due(i, c.eval_every, steps):
                evaluate_pairs(trainer, PAIRS, i, held_out, run.record)
            if alone and due(i, c.checkpoint_every, steps):
                run.save(trainer, i)
        if i < steps:
            chosen = [answered[name][k] for name, k in rewards.draw_rows(answered, c.sft_batch, i, c, "sft")]
            samples = samples_of(chosen)
            metrics, hashes = trainer.update(samples, i, learning_rate_at(i, *schedule), objective)
            if run.record:
                run.record.supervised(objective.phase, i, samples, metrics, hashes)
