"""
Exercise 8: a reward that cannot be gamed. The page beside this file says more.
"""

import re


def reward(prompt, response, answer):
    """1.0 if the last number in the response is the answer (a text such as '7'), else 0.0."""
    raise NotImplementedError
