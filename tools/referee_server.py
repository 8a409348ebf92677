"""
Tests of a server for tools/referee.py: the same requests alone, again, together and with an empty cache.
No tool by itself.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import httpx
from referee_formats import numbers

from configurator import fail

REQUESTS = 100  # half of them greedy, half with a seed
PREFIX = "A list of sums, each in a line of its own, and every one of them is right. " * 4  # what a cache would keep
FLUSH = ("flush_cache", "reset_prefix_cache")  # SGLang's and vLLM's
FIRST = "alone, flushed"  # with this pass the others are compared
PASSES = ("alone, warm", "together, warm", "together, again", "together, flushed", "alone, flushed again")


def server(args):
    """(words, findings, tables, pictures) of an endpoint with OpenAI's protocol."""
    url, _, endpoint = args.server.partition("/v1")
    chat = "chat/" * ("chat" in endpoint)
    key = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY')}"}

    def answer(i):
        """The server's answer to request i, and its log-probs."""
        text = f"{PREFIX}{i} + {i * 7 % 50} ="
        body = dict(model=model, max_tokens=24, temperature=i % 2, seed=i)
        if chat:
            body |= dict(messages=[dict(role="user", content=text)], logprobs=True)
        else:
            body |= dict(prompt=text, logprobs=1)
        choice = client.post(f"/v1/{chat}completions", json=body).json()["choices"][0]
        return choice.get("text") or choice.get("message"), numbers(choice.get("logprobs") or ())

    answers = {}
    try:
        client = httpx.Client(base_url=url, headers=key, timeout=600)
        model = client.get("/v1/models").json()["data"][0]["id"]
        for name in (FIRST, *PASSES):
            for path in FLUSH if "flushed" in name else ():
                client.post(path, json={})
            with ThreadPoolExecutor(REQUESTS if "together" in name else 1) as pool:
                answers[name] = [*pool.map(answer, range(REQUESTS))]
    except Exception as e:  # whatever a stranger's server may lead to
        fail(f"--server={args.server}: it does not answer as OpenAI's protocol says: {e}")
    rows = [[f"beside {FIRST}", "requests", "answers changed", "log-probs changed", "largest"]]
    found = []
    for name in PASSES:
        for start, kind in enumerate(("greedy", "seeded")):
            pairs = [*zip(answers[FIRST], answers[name])][start::2]
            changed = sum(a != b for (a, _), (b, _) in pairs)
            far = [abs(x - y) for (a, xs), (b, ys) in pairs for x, y in zip(xs, ys) if a == b]
            moved = sum(x > 0 for x in far)
            rows.append([f"{name}, {kind}", len(pairs), changed, f"{moved} of {len(far)}", max(far, default=0)])
            if changed or moved:
                words = f"{changed} of {len(pairs)} answers and {moved} of {len(far)} log-probs change"
                found.append(f"{name}, {kind}: {words}")
    return found or [f"{REQUESTS} requests: nothing changes an answer or a log-prob"], found, [rows], []
