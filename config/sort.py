"""
Sorting four letters, which SmolLM2 cannot do: a short supervised start shows it how, then it learns by itself. The
reward is the length of the longest common subsequence with the right answer, as a share of both.

    python train_grpo.py config/smollm2.py config/sort.py

Of 30 held-out rows, 4 samples each, before and after 24 steps of RL, seeds 1, 2, 3: the reward is 0.71, 0.74, 0.72 and
0.81, 0.83, 0.78; 0.19, 0.19, 0.15 and 0.34, 0.42, 0.32 of the samples are right (+- 0.08 to 0.14). Digests 3def62b0,
5dd9cc34, ead9a24e; 470 to 488 s on two cores of an AMD EPYC, 2026-11-28. No log-prob differed.
"""

import random

out_dir = "out/sort"
dataset = "config/sort.py:rows"
prompt_template = ""
system_prompt = "You sort letters."
max_new_tokens = 12
reward = "config/sort.py:common"
warmup_sft_steps = 20
sft_batch = 8
sft_learning_rate = 5e-5

_LETTERS = 4


def common(prompt, response, answer):
    """Twice the length of the longest common subsequence of response and answer, over the sum of their lengths."""
    a = response.split()
    b = answer.split()
    lengths = [0] * (len(b) + 1)  # of the subsequences common to the words so far and the first i of the answer
    for word in a:
        before = 0
        for i, right in enumerate(b):
            now = lengths[i + 1]
            lengths[i + 1] = before + 1 if word == right else max(now, lengths[i])
            before = now
    return 2 * lengths[-1] / (len(a) + len(b)) if a else 0.0


def rows(size=1000):
    """Rows such as {"prompt": "Sort the letters: d b c a", "answer": "a b c d"}, drawn from a seed."""
    chance = random.Random(1)
    drawn = (chance.sample("abcdefghijklmnopqrstuvwxyz", _LETTERS) for _ in range(size))
    return [dict(prompt=f"Sort the letters: {' '.join(x)}", answer=" ".join(sorted(x))) for x in drawn]
