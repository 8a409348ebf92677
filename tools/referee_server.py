"""
What a server must hold fixed, for tools/referee.py: the same requests alone, again, together and with an empty cache.
No tool by itself.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from urllib.request import Request, urlopen

from referee_formats import numbers

from configurator import fail

REQUESTS = 100  # half of them greedy, half with a seed
PREFIX = "A list of sums, each in a line of its own, and every one of them is right. " * 4  # what a cache would keep
FLUSH = ("flush_cache", "reset_prefix_cache")  # SGLang's and vLLM's


def post(url, body=None):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY')}"}
    with urlopen(Request(url, body and json.dumps(body).encode(), headers), timeout=600) as response:
        return json.loads(response.read() or "{}")


def request(i, model, chat):
    text = f"{PREFIX}{i} + {i * 7 % 50} ="
    asked = dict(messages=[dict(role="user", content=text)], logprobs=True) if chat else dict(prompt=text, logprobs=1)
    return dict(model=model, max_tokens=24, temperature=i % 2, seed=i) | asked


def server(args):
    """(words, findings, tables, pictures) of an endpoint with OpenAI's protocol."""
    url = args.server.rstrip("/").removesuffix("/v1")
    address = f"{url}/v1/chat/completions" if args.chat else f"{url}/v1/completions"

    def answer(body):
        choice = post(address, body)["choices"][0]
        return choice.get("text") or choice.get("message"), numbers(choice.get("logprobs") or ())

    def ask(threads, flush=False):
        for path in FLUSH if flush else ():
            with suppress(OSError, ValueError):
                post(f"{url}/{path}", {"flush": True})
        with ThreadPoolExecutor(threads) as pool:
            return [*pool.map(answer, bodies)]

    try:
        model = post(f"{url}/v1/models")["data"][0]["id"]
        bodies = [request(i, model, args.chat) for i in range(REQUESTS)]
        first = ask(1, flush=True)
        passes = {"alone, warm": ask(1), "together, warm": ask(REQUESTS), "together, again": ask(REQUESTS)}
        passes |= {"together, flushed": ask(REQUESTS, flush=True), "alone, flushed": ask(1, flush=True)}
    except (OSError, ValueError, LookupError, TypeError) as e:
        fail(f"--server={args.server}: it does not answer as OpenAI's protocol says: {e}")
    rows = [["beside alone, cold", "requests", "answers changed", "log-probs changed", "largest"]]
    found = []
    for name, those in passes.items():
        for start, kind in enumerate(("greedy", "seeded")):
            pairs = [*zip(first, those)][start::2]
            changed = sum(a[0] != b[0] for a, b in pairs)
            far = [abs(x - y) for a, b in pairs for x, y in zip(a[1], b[1]) if a[0] == b[0]]
            moved = sum(x > 0 for x in far)
            rows.append([f"{name}, {kind}", len(pairs), changed, f"{moved} of {len(far)}", max(far, default=None)])
            if changed or moved:
                found.append(
                    f"{name}, {kind}: {changed} of {len(pairs)} answers and {moved} of {len(far)} log-probs change"
                )
    return found or [f"{REQUESTS} requests: nothing changes an answer or a log-prob"], found, [rows], []
