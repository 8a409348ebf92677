"""
Instructions that a program can check: a sentence about a topic, by two rules. The reward is the share of the rules that
a response keeps, and 1 less where it goes round in circles, since that is how a model gets round rules that count.
Held out are pairs of rules that are never trained on together.

    python train_grpo.py config/smollm2.py config/rules.py

Of 30 held-out pairs (4 samples each): the reward, which is the share of rules that are kept, and in brackets how many
samples keep both.

| seed | before | after 6 steps | 12 | 18 | 24 | digest |
|---|---|---|---|---|---|---|
| 1 | 0.02 (0.000) | 0.13 (0.000) | 0.31 (0.050) | 0.35 (0.025) | 0.52 (0.225) | 11805244 |
| 2 | 0.03 (0.008) | 0.13 (0.033) | 0.24 (0.017) | 0.39 (0.075) | 0.48 (0.183) | fe233f89 |
| 3 | 0.02 (0.000) | 0.12 (0.017) | 0.25 (0.058) | 0.37 (0.100) | 0.45 (0.158) | 3b63238a |

So rules that were learned in other pairs are kept together, to a part; the shares are +- 0.09. No log-prob differed.
Answers become short, 14 tokens before and 3 to 6 after. 13 to 19 minutes each, with other work on the same two cores of
an AMD EPYC; 2026-11-28.
"""

import random
from itertools import combinations

out_dir = "out/rules"
dataset = "config/rules.py:rows"
eval_split = "config/rules.py:held_out"
prompt_template = ""
system_prompt = "You follow instructions."
max_new_tokens = 16
reward = "config/rules.py:kept"

_TOPICS = "rain bread trees music winter cats the_sea_a_train school the_moon coffee friends birds a_garden books sleep"
_TOPICS = _TOPICS.split()  # one of them is two by accident; the runs above had it
_RULES = {
    "lower": "Use only lower case letters.",
    "upper": "Use only capital letters.",
    "one": "Use one word only.",
    "three": "Use exactly three words.",
    "bang": "End with an exclamation mark.",
    "quotes": "Put it in quotation marks.",
    "yes": "Begin with the word yes.",
    "no_e": "Do not use the letter e.",
}
_CLASH = ({"lower", "upper"}, {"one", "three"}, {"yes", "no_e"}, {"yes", "one"})


def _keeps(text, rule):
    """Whether a response keeps a rule."""
    words = text.split()
    plain = text.strip(" \n\"'").lower()
    return {
        "lower": text == text.lower(),
        "upper": text == text.upper(),
        "one": len(words) == 1,
        "three": len(words) == 3,
        "bang": text.rstrip(" \n\"'").endswith("!"),
        "quotes": len(text.strip()) > 2 and text.strip()[0] in "\"'" and text.strip()[-1] in "\"'",
        "yes": plain.startswith("yes"),
        "no_e": "e" not in plain,
    }[rule]


def kept(prompt, response, answer):
    """The share of the rules in `answer` that a response keeps, minus 1 if a word comes three times in a row."""
    if not any(character.isalpha() for character in response):
        return 0.0
    words = response.lower().split()
    circles = any(a == b == c for a, b, c in zip(words, words[1:], words[2:]))
    rules = answer.split()
    return sum(_keeps(response, rule) for rule in rules) / len(rules) - circles


def _pairs(held_out):
    """Pairs of rules that do not contradict each other: one in four is held out."""
    pairs = [pair for pair in combinations(_RULES, 2) if {*pair} not in _CLASH]
    random.Random(1).shuffle(pairs)
    few = len(pairs) // 4
    return pairs[:few] if held_out else pairs[few:]


def rows(held_out=False):
    """A row for each pair of rules and topic, in an order of chance."""
    every = [
        dict(
            prompt=f"Write about {topic.replace('_', ' ')}. {_RULES[first]} {_RULES[second]}",
            answer=f"{first} {second}",
        )
        for first, second in _pairs(held_out)
        for topic in _TOPICS
    ]
    random.Random(2).shuffle(every)
    return every


def held_out():
    return rows(held_out=True)
