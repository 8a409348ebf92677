"""Checks of rewards, before a run computes anything: each ends it with one line."""

from itertools import chain

from configurator import require
from onecurve.keys.prompts import sources_of
from rewards import RewardError, WeightedSum, score_all


def models_of(rewards):
    """{term: its reward model} of {source: WeightedSum}."""
    terms = chain(*(reward.terms for reward in rewards.values()))
    return {name: reward.model for _, name, reward in terms if reward.model}


def check_answers(rewards, rows, config):
    """Ends the run with one line at the first row whose answer its source's reward, a built-in one, cannot read."""
    for row in rows:
        source = row.get("source", "")
        try:
            for _, _, reward in rewards[source].terms:
                reward.reads(row["answer"])
        except ValueError as error:
            column = sources_of(config)[source]["answer_column"]
            where = f"for prompt {row['prompt']!r:.60}"
            require(False, f"answer_column={column!r}: {where}: {error}; use another column or reward")


def try_own(rewards, rows):
    """
    Ends the run with one line if a reward of the user's fails on the first row of its source, taken as answered. A line
    says if it gives two rewards for it.
    """
    first = {}
    for row in rows:
        first.setdefault(row.get("source", ""), row)
    for source, row in first.items():
        try:
            own = [(weight, name, reward) for weight, name, reward in rewards[source].terms if reward.own]
            sample = row["answer"], "the first row, with its answer as the response"
            (one, _), (other, _) = (score_all(WeightedSum(own), row, [sample])[0] for _ in range(2))
        except RewardError as error:
            require(False, str(error))
        if one != other:
            why = "it is no function of its arguments, and no repeat of this run will have its digest"
            print(f"reward: gives {one}, and then {other}, for one sample: {why}")


def check_vocabulary(rewards, tokenizer):
    """Ends the run with one line if a reward model has another vocabulary than the policy."""
    for name, model in models_of(rewards).items():
        why = "of another vocabulary than the policy; use one that --mode=rm made of the same model"
        require(model.tokenizer.get_vocab() == tokenizer.get_vocab(), f"reward={name!r}: {why}")
