"""Different rewards for different texts, so that something is learned."""

import hashlib


def score(prompt, response, answer):
    return hashlib.sha256(response.encode()).digest()[0] / 255
