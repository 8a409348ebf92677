"""
A game of several turns: guess a number from 1 to 15; the environment says which way it lies. The demonstrations follow
these hints but choose without a plan; always halving what is left takes at most four guesses, 3.3 on average.
"""

import random

MOST = 6  # guesses


class Game:
    """The environment: an object that one episode makes for itself, so that nothing is shared."""

    def __init__(self, row):
        # Of the sums of two numbers below 30 each remainder is as frequent as any other.
        self.secret, self.guesses = int(row["answer"]) % 15 + 1, 0

    def answer(self, text):
        """'up', 'down' or 'yes' to a guess; a text that is no number is one, too, and lies below all."""
        self.guesses += 1
        number = int(text) if text.isdecimal() else 0
        return "yes" if number == self.secret else "up" if number < self.secret else "down"


async def solve(chat, row):
    game = Game(row)
    chat.user("1-15")
    while game.guesses < MOST:
        reply = await chat.generate(max_new_tokens=3)
        if reply.truncated:
            return 0.0
        said = game.answer(reply.text)
        if said == "yes":
            return 1 - (game.guesses - 1) / MOST
        chat.user(said)
    return 0.0


def replies(row):
    """Play without a plan: any number that is still possible."""
    game, low, high, said = Game(row), 1, 15, []
    dice = random.Random(row["prompt"])  # falls the same way whenever this row comes
    for _ in range(MOST):
        said.append(number := dice.randint(low, high))
        answer = game.answer(str(number))
        low, high = (number + 1, high) if answer == "up" else (low, number - 1)
        if answer == "yes":
            break
    return [str(number) for number in said]
