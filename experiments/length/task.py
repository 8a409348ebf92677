"""
The parity of 8 bits, such as 01101011=, which is learned in one of two forms: at once, 1, or as a derivation, 01001101,
the parity after each bit. The first is out of reach for the model, and each digit of the second is one small step.
"""

import random

BITS = 8


def last_digit(prompt, response, answer):
    """1.0 if the response ends with the parity."""
    return float(response[-1:] == answer)


def row(number, long):
    """The row of the bits of a number, the response to learn being long or short."""
    bits = f"{number:0{BITS}b}"
    derivation = "".join(str(bits[: i + 1].count("1") % 2) for i in range(BITS))
    response = derivation if long else derivation[-1]
    return dict(prompt=f"{bits}=", answer=derivation[-1], response=response)


def rows(share, count):
    """`count` rows to learn from, of which this share is long."""
    rng = random.Random(1)
    return [row(rng.choice(LEARNED), rng.random() < share) for _ in range(count)]


HELD_OUT = range(0, 2**BITS, 7)
LEARNED = [i for i in range(2**BITS) if i not in HELD_OUT]
