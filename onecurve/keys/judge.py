"""
A model behind an endpoint gives the score, for reward='judge'.
Code: onecurve/graders/judges.py. Manual: docs/rewards.md.
"""

from configurator import positive

judge = ""  # an OpenAI-compatible endpoint such as 'http://127.0.0.1:8000/v1'; its key is in JUDGE_API_KEY
judge_model = ""  # '': the first model that the endpoint lists
# a text file that requests a line 'score: <0 to 1>', with {response} and, if wanted, {prompt} and {answer} in it
judge_prompt = ""
judge_tries = 3  # requests for one verdict; the run ends if the last fails, too


def rules(c):
    yield from positive(c, "judge_tries")
