"""
What a server must hold fixed, for tools/referee.py: the same requests alone, again, together and with an empty cache,
of any endpoint with OpenAI's protocol. No tool by itself.
"""

import json
import os
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from referee_formats import values

from configurator import fail

REQUESTS = 100  # half of them greedy, half with a seed
PREFIX = "A list of sums, each in a line of its own, and every one of them is right. " * 4  # what a cache would keep
FLUSH = ("flush_cache", "reset_prefix_cache")  # SGLang's and vLLM's


def post(url, body):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '')}"}
    request = urllib.request.Request(url, json.dumps(body).encode() if body is not None else None, headers)
    with urllib.request.urlopen(request, timeout=600) as response:
        return response.read()


def answer(url, body):
    """(text, log-probs) of a request."""
    choice = json.loads(post(url, body))["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text, values(choice.get("logprobs")) or []


def endpoint(url):
    """(address, body of the request i) of what the server has: completions, else chat."""
    url = url.rstrip("/").removesuffix("/v1")
    try:
        model = json.loads(post(f"{url}/v1/models", None))["data"][0]["id"]
    except (OSError, ValueError, LookupError) as e:
        fail(f"--server={url}: no endpoint with OpenAI's protocol: {e}")

    def body(i, chat):
        text = f"{PREFIX}{i} + {i * 7 % 50} ="
        asked = (
            dict(messages=[dict(role="user", content=text)], logprobs=True) if chat else dict(prompt=text, logprobs=1)
        )
        draw = dict(temperature=1.0, seed=i) if i % 2 else dict(temperature=0.0)
        return dict(model=model, max_tokens=24) | asked | draw

    said = ""
    for path, chat in (("completions", False), ("chat/completions", True)):
        try:
            answer(f"{url}/v1/{path}", body(10**6, chat))
            return url, f"{url}/v1/{path}", [body(i, chat) for i in range(REQUESTS)]
        except urllib.error.HTTPError as e:
            said = f"{e}: {e.read()[:200]!r}"
        except (OSError, ValueError, LookupError) as e:
            said = str(e)
    fail(f"--server={url}: {said}")


def server(args):
    """(words, findings, tables) of a server."""
    url, address, bodies = endpoint(args.server)

    def ask(together):
        try:
            with ThreadPoolExecutor(REQUESTS if together else 1) as pool:
                return [*pool.map(lambda body: answer(address, body), bodies)]
        except (OSError, ValueError, LookupError) as e:
            fail(f"--server={args.server}: a request failed: {e}")

    def flush():
        for path in FLUSH:
            try:
                post(f"{url}/{path}", {})
                return True
            except OSError:
                continue

    flush()
    passes = {"alone, cold": ask(False), "alone, warm": ask(False), "together, warm": ask(True)}
    passes["together, again"] = ask(True)
    if flush():
        passes["together, cold"] = ask(True)
        flush()
        passes["alone, cold, again"] = ask(False)
    first = passes.pop("alone, cold")
    rows = [["beside alone, cold", "requests", "answers changed", "log-probs changed", "largest"]]
    found = []
    for name, those in passes.items():
        for kind, start in (("greedy", 0), ("seeded", 1)):
            pairs = [*zip(first, those)][start::2]
            texts = sum(a[0] != b[0] for a, b in pairs)
            far = [abs(x - y) for a, b in pairs if a[0] == b[0] for x, y in zip(a[1], b[1])]
            moved = sum(x > 0 for x in far)
            rows.append([f"{name}, {kind}", len(pairs), texts, f"{moved} of {len(far)}", f"{max(far, default=0):.2g}"])
            if texts or moved:
                found.append(f"{name}: {texts} of {len(pairs)} {kind} answers change, {moved} of {len(far)} log-probs")
    words = found or [f"{REQUESTS} requests: nothing changes an answer or a log-prob"]
    if not any(x[1] for x in first):
        words = [*words, "it gives no log-probs: only answers are compared"]
    return words, found, {"requests": rows}, []
