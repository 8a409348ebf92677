# /// script
# requires-python = ">=3.11"
# ///
"""
Golden log-probs: says how far an engine is from float32, at which kind of sequence, and which mistake explains it; and
whether a server's answers depend on what else it does. Needs nothing but Python.

    uv run golden.py http://127.0.0.1:8000 smollm2.jsonl   # a server of that model, with OpenAI's protocol
    uv run golden.py theirs.jsonl smollm2.jsonl            # or {"logprobs": [..]} of each of its rows
    uv run golden.py http://127.0.0.1:8000                 # any model: the answers alone only

The server is asked for the log-probs of prompts by token ids (`echo`). With a path, as in http://..:8000/v1/chat/completions,
it is asked for answers there. The key is in OPENAI_API_KEY. Exit status 0: nothing found, 1: a mistake named, or a
difference that bfloat16 does not explain, 2: nothing that can be judged.
"""

import json
import math
import os
import struct
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean as mean

FLOAT32 = 0.004  # times what bfloat16 costs: a difference up to that is float32's rounding
BFLOAT16 = 2.0  # times what it costs: a mean distance above is more than that
FAR = 8  # times the root of its mean square, among tokens as likely as this one: beyond bfloat16
BEYOND = 0.02  # share of such tokens
EDGES = (-10, -5, -2, -1, -0.1, -0.01)  # of log-probs
REQUESTS = 16  # whose answers are compared
CROWD = 64
TOKENS = 24  # of an answer
EXPLAINS = 0.5  # share of a distance
KEYS = ("trap", "prompt_ids", "response_ids", "temperature", "top_p")  # of a row; its other keys are mistakes
UNREADABLE = OSError, ValueError, LookupError, TypeError, AttributeError  # whatever a stranger's server may lead to
FLUSH = ("flush_cache", "reset_prefix_cache")  # SGLang's and vLLM's


def fail(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


# ---- a server


def post(url, **body):
    """The answer of a server to a request, from JSON."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY')}"}
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None, headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.loads(answer.read() or "null")


class Server:
    """A server with OpenAI's protocol. url: with or without the path of its completions."""

    def __init__(self, url):
        self.root, _, path = url.rstrip("/").partition("/v1")
        self.chat = "chat" in path
        self.url = f"{self.root}/v1/{'chat/' * self.chat}completions"
        self.model = post(f"{self.root}/v1/models")["data"][0]["id"]

    def ask(self, ids, tokens, **more):
        """The choices of an answer to token ids; of a chat, to their numbers as text."""
        asked = dict(prompt=ids, logprobs=1)
        if self.chat:
            asked = dict(messages=[dict(role="user", content=str(ids))], logprobs=True)
        return post(self.url, model=self.model, max_tokens=tokens, **asked, **more)["choices"]

    def of_response(self, row):
        """The log-probs of a row's response, as tokens of a prompt."""
        (choice,) = self.ask(row["prompt_ids"] + row["response_ids"], 1, echo=True, temperature=0)
        given = (choice.get("logprobs") or {}).get("token_logprobs") or ()
        first = len(row["prompt_ids"])
        return given[first : first + len(row["response_ids"])]

    def flush(self):
        for path in FLUSH:
            try:
                post(f"{self.root}/{path}", flush=True)
            except OSError:
                pass  # it has another way, or none


def answer(choice):
    """(text, log-probs) of a choice, in either protocol."""
    given = choice["logprobs"] or {}
    numbers = given.get("token_logprobs") or [x["logprob"] for x in given.get("content") or ()]
    return choice["text"] if "text" in choice else choice["message"]["content"], numbers


def passes(server):
    """Pairs of a name and the answers [(text, log-probs)] to the same requests, half greedy, half with a seed."""
    prefix = [5 + i * 7 % 60 for i in range(300)]  # what a cache would keep

    def ask(i, **more):
        ids = [*prefix, *(5 + (i + j * j) % 60 for j in range(8))]
        return [answer(x) for x in server.ask(ids, TOKENS, temperature=i % 2, seed=i, **more)]

    def in_a_crowd():
        with ThreadPoolExecutor(CROWD) as pool:
            return [x[0] for x in pool.map(ask, range(CROWD))][:REQUESTS]

    def beside(tokens):
        """Each beside prompts of so many tokens, which come while it is answered."""
        with ThreadPoolExecutor(2) as pool:
            for i in range(REQUESTS):
                asked = pool.submit(ask, i)
                while not asked.done():
                    server.ask([5 + (i * j) % 60 for j in range(tokens)], 1, temperature=0)
                yield asked.result()[0]

    def alone():
        return [ask(i)[0] for i in range(REQUESTS)]

    yield "alone", (server.flush(), alone())[1]
    yield "alone, flushed again", (server.flush(), alone())[1]
    yield "alone, with a warm cache", alone()
    yield f"in a crowd of {CROWD}", in_a_crowd()
    yield f"in a crowd of {CROWD}, flushed", (server.flush(), in_a_crowd())[1]
    for tokens in (9, 10, 2000):
        yield f"beside prefills of {tokens:,} tokens", [*beside(tokens)]
    yield "the last of n=4, greedy", [ask(i, n=4)[-1] if i % 2 == 0 else None for i in range(REQUESTS)]


def neighbours(server):
    """Prints what changes a server's answers; whether anything does."""
    (_, first), *others = passes(server)
    print(f"\n{'answers beside those of each request alone':<44}{'answers':>10}{'log-probs':>14}{'largest':>10}")
    found = 0
    for name, answers in others:
        pairs = [(x, y) for x, y in zip(first, answers) if y]
        changed = sum(x[0] != y[0] for x, y in pairs)
        far = [abs(a - b) for x, y in pairs for a, b in zip(x[1], y[1]) if x[0] == y[0]]
        moved = sum(x > 0 for x in far)
        found += changed + moved
        print(f"{name:<44}{f'{changed}/{len(pairs)}':>10}{f'{moved}/{len(far)}':>14}{max(far, default=0):>10.2g}")
    print("its answers depend on its other work" if found else "its answers do not depend on its other work")
    return found


# ---- log-probs


def bin_of(x):
    return sum(x > edge for edge in EDGES)


def mistakes(row):
    """Pairs of a mistake and the log-probs that it gives, nan where it says nothing."""
    for name in row.keys() - {"logprobs", "bfloat16", *KEYS}:
        yield name, row[name]
    own = row["logprobs"]
    yield "log-probs one token too early", [*own[1:], math.nan]
    yield "log-probs one token too late", [math.nan, *own[:-1]]


def explained(rows, theirs):
    """{mistake: the share of the distance that it explains, of the tokens of which it says anything}."""
    apart = {}
    for row, given in zip(rows, theirs):
        for name, predicted in mistakes(row):
            for own, rounded, other, x in zip(row["logprobs"], row["bfloat16"], predicted, given):
                if other == other and x > -math.inf:
                    apart.setdefault(name, []).append((abs(x - own), abs(x - other), abs(rounded - own)))
    sums = {name: [*map(sum, zip(*found))] for name, found in apart.items()}
    return {name: 1 - left / far for name, (far, left, cost) in sums.items() if far > FLOAT32 * cost}


def judge(rows, theirs):
    """Prints a table by trap, and a verdict; whether it is a finding. theirs: log-probs of each row's response."""
    squares = {}
    for row in rows:
        for x, y in zip(row["logprobs"], row["bfloat16"]):
            squares.setdefault(bin_of(x), []).append((x - y) ** 2)
    limits = {b: FAR * mean(of) ** 0.5 for b, of in squares.items()}
    print(f"{'log-probs of':<32}{'tokens':>8}{'equal':>8}{'mean':>10}{'max':>10}{'k3':>10}{'of bf16':>9}{'beyond':>8}")
    beyond = []
    for trap in (*dict.fromkeys(row["trap"] for row in rows), "all"):
        every = [
            (x, y - x, rounded - x, struct.pack("f", x) == struct.pack("f", y))
            for row, given in zip(rows, theirs)
            if trap in (row["trap"], "all")
            for x, y, rounded in zip(row["logprobs"], given, row["bfloat16"])
        ]
        tokens = [x for x in every if x[1] > -math.inf]
        own, d, rounding, same = zip(*tokens)
        far = [*map(abs, d)]
        cost = mean(far) / mean(map(abs, rounding))
        outside = sum(distance > limits[bin_of(x)] for x, distance in zip(own, far))
        outside += len(every) - len(tokens)  # which its rule cuts off
        k3 = mean(math.exp(min(-x, 700)) - 1 + x for x in d)
        numbers = "".join(f"{x:>10.2g}" for x in (mean(far), max(far), k3))
        print(f"{trap:<32}{len(d):>8}{sum(same):>8}{numbers}{cost:>9.2g}{outside:>8}")
        beyond += [trap] * (cost > BFLOAT16 or outside > BEYOND * len(d))
    verdict = "float32's rounding" if cost <= FLOAT32 else "bfloat16's rounding"
    if beyond:
        verdict = f"unexplained; more than bfloat16 costs in: {', '.join(beyond)}"
    likely = [(share, name) for name, share in explained(rows, theirs).items() if share > EXPLAINS]
    if likely:
        share, name = max(likely)
        verdict = f"{name}: explains {share:.1%} of the distance"
    print(verdict)
    return bool(likely or beyond)


def read(path):
    """The rows of a JSONL file."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def from_file(rows, path):
    """Another engine's log-probs of each row."""
    theirs = [line["logprobs"] for line in read(path)]
    if [*map(len, theirs)] != [len(row["response_ids"]) for row in rows]:
        fail(f"{path}: not a line of as many log-probs for each response of the golden file")
    if not all(x < math.inf for numbers in theirs for x in numbers):
        fail(f"{path}: a log-prob that is no number")
    return rows, theirs


def from_server(rows, server):
    """The rows that a server gives the log-probs of, and these. It gives those of prompts, to which no rule applies."""
    rows = [row for row in rows if row["temperature"] == row["top_p"] == 1]
    with ThreadPoolExecutor(4) as pool:
        theirs = [*pool.map(server.of_response, rows)]
    found = [(row, x) for row, x in zip(rows, theirs) if len(x) == len(row["response_ids"])]
    if not found:
        fail("it gives no log-probs of prompts (echo); write a file of an engine's log-probs")
    return zip(*found)


def main(source, golden=os.devnull):
    try:
        rows = read(golden)
        if not source.startswith("http"):
            return judge(*from_file(rows, source))
        server = Server(source)
        found = rows and judge(*from_server(rows, server))
        return bool(neighbours(server) or found)
    except UNREADABLE as e:
        fail(f"{source}: {type(e).__name__}: {e}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
