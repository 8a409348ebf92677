"""The responses in a data set as tokens: for supervised steps, pairs, and the texts of a reward model."""

from configurator import require
from onecurve.algorithms.pairs import sides
from rewards import with_ids


def answer_ids(texts, tokenizer, stop_tokens):
    """The ids of each whole response, with an EOS."""
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return [ids + stop_tokens[:1] for ids in encoded]


def encode_answers(rows, tokenizer, stop_tokens, config):
    """
    The rows with answer_tokens, or chosen_tokens and rejected_tokens, which end with an EOS; without those of more
    tokens than a sample may have. Ends the run with one line at a pair whose sides are the same tokens.
    """
    texts = sides(config["mode"])
    for side in texts:
        ids = answer_ids([row.get(f"shown_{side}", row[side]) for row in rows], tokenizer, stop_tokens)
        rows = with_ids(rows, f"{side}_tokens", ids, "max_new_tokens", f"{side} texts", config)
    for row in rows if len(texts) == 2 else ():
        where = f"a pair of prompt {row['prompt']!r:.60} has equal sides"
        differ = row["chosen_tokens"] != row["rejected_tokens"]
        require(differ, f"mode={config['mode']!r}: {where}, {row['rejected']!r:.60}; drop such pairs")
    return rows
