"""
Where programs run, for reward='code' and the tool `python`.
Code: onecurve/graders/sandbox.py. Manual: docs/rewards.md.
"""

from configurator import choice, positive

sandbox = "bwrap"  # what runs programs; 'none': they run as you, unprotected
sandbox_seconds = 2.0  # seconds of CPU time that a program may take


def rules(c):
    yield from choice(c, "sandbox", "bwrap none")
    yield from positive(c, "sandbox_seconds")
