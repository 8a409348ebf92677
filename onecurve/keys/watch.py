"""
Ends a run whose reward looks gamed.
Code: onecurve/graders/watch.py. Manual: docs/watch.md.
"""

from configurator import MODES, choice, untouched

watch = ""  # 'stop': ends the run, with status 3, when the reward looks gamed


def rules(c):
    yield from choice(c, "watch", "stop")
    if MODES[c.mode].steps != "rl":
        yield from untouched(c, "watch", "is not for --mode=sft, rm, dpo or eval")
