"""
Rewards that need more than a pure function: math-verify in separate processes (`math`), a model behind an
OpenAI-compatible endpoint (`judge`), a reward model in this process (`model:folder`).
"""

import asyncio
import json
import os
import re
import threading
import time
import types
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from queue import SimpleQueue

import httpx
import torch

import kernels
from configurator import ORIGINS, require
from onecurve.algorithms.answers import answer_ids
from onecurve.graders.workers import Workers, needs
from onecurve.models import folders
from onecurve.models.dense import build_model, check_model
from onecurve.run.own import CONFIG
from rewards import NUMBER, Reward, exact_value, prompt_ids
from sync import Shard, reason

# ------------------------------------------------------------------------------------------------------------------
# math: whether two expressions are equal, by math-verify (github.com/huggingface/Math-Verify) in other processes

MATH_VERIFY = "0.9.0"  # pyproject.toml's; another version may judge otherwise


def math_worker():
    """
    The grader of Workers: whether a response equals an answer, or -1 if that is no expression. SymPy keeps results and
    draws random numbers, so it wants the forks. math-verify's own limits are of wall time, so that a busy machine
    decides, and need a main thread.
    """
    import sympy
    from math_verify import parse, verify

    def compare(response, answer):
        expected = parse(answer, parsing_timeout=None)
        if not any(hasattr(x, "has") and not x.has(sympy.zoo, sympy.nan) for x in expected):  # it takes 11:00 for 11/0
            return -1
        return verify(expected, parse(response, parsing_timeout=None), timeout_seconds=None)

    sympy.core.random.seed(0)
    for pair in (("$(x+1)^2$", "$x^2+2x+1$"), ("0.5", "$1/2$"), (r"$\{1, 2\}$", r"$\{2, 1\}$"), ("$x<3$", "$x>3$")):
        compare(*pair)  # imports and tables that the forks then have
    return lambda: compare


MATH = Workers(math_worker, "math-verify")


def math(prompt, response, answer):
    """
    1.0 if math-verify finds the response equal to the answer. Of the response it takes \\boxed{..} (several are
    a set), else the last expression; the answer is an expression in LaTeX or plain, alone or behind `####`, or a text
    with \\boxed{..} or $..$. 1/2, 0.5 and \\frac12 are equal, so are {1, 2} and {2, 1}; decimals count to 6 places. A
    comparison that reaches a limit of onecurve/graders/workers.py gives no reward, and the verdict 'limit'.
    """
    text = expression(answer)
    status, score, notes = MATH.ask((), response, text)
    if notes["verdict"] == "fail" or score < 0:
        why = "is no expression that math-verify can read" if score < 0 else f"was not compared: status {status}"
        raise ValueError(f"answer {text[-40:]!r} {why}")
    if not (status or score):
        notes["verdict"] = "fail"
    return score, notes


def expression(answer):
    """A data set's answer as math-verify is to read it. Raises ValueError for words."""
    text = answer.rpartition("####")[2].strip()
    if re.fullmatch(r"[A-Za-z\s]{4,}", text):  # to SymPy a product of letters: Paris = pairs
        raise ValueError(f"answer {text[-40:]!r} is words; --reward=exact, or write them as \\text{{..}}")
    return text if "\\boxed" in text or text.count("$") > 1 else f"\\boxed{{{text}}}"


def make_math(config):
    """The Reward 'math'. Raises ValueError, with a cure, if math-verify is missing."""
    needs("math-verify", MATH_VERIFY, "math")
    return Reward(math, reads=expression, waits=True)


# ------------------------------------------------------------------------------------------------------------------
# judge: a model behind an OpenAI-compatible endpoint

JUDGE_SECONDS = 120  # longest time of one try, from the connection to the last byte
JUDGE_BYTES = 2**22  # of an answer
JUDGE_WAIT = 1.0  # seconds before the second try; twice as many before each next one
JUDGE_TOKENS = 1024  # of a verdict with its reasons
TLS = lru_cache(httpx.create_ssl_context)


def ask_judge(url, seconds, body=None):
    """
    The JSON that the judge answers to a GET of this address, or to a POST of `body`. Raises if it takes longer, if it
    answers more than JUDGE_BYTES, or with another status than 200, a redirect among them.

    OPENAI_API_KEY goes only where the command line says; a config may be somebody else's.
    """
    key = os.environ.get("JUDGE_API_KEY")
    if not key and ORIGINS.get("judge") == "command line":
        key = os.environ.get("OPENAI_API_KEY")
    headers = {"authorization": f"Bearer {key or 'none'}", "accept-encoding": "identity"}
    request = dict(url=url, json=body, headers=headers)

    async def ask():
        text = b""
        async with httpx.AsyncClient(verify=TLS(), timeout=None) as client:
            async with client.stream("POST" if body else "GET", **request) as answer:
                async for part in answer.aiter_raw():
                    text += part
                    if len(text) > JUDGE_BYTES:
                        raise ValueError(f"an answer of more than {JUDGE_BYTES} bytes")
        if answer.status_code != 200:
            raise ValueError(f"status {answer.status_code}: {text[:100].decode(errors='replace')}")
        return json.loads(text)

    try:
        return asyncio.run(asyncio.wait_for(ask(), seconds))
    except TimeoutError:
        raise ValueError(f"no whole answer in {seconds} s") from None


@lru_cache
def judge_and_prompt(url, model, path):
    """(model, the prompt file's text) of these values of the config. Raises ValueError with a cure."""
    text = Path(path).read_text(encoding="utf-8") if Path(path).is_file() else ""
    if "{response}" not in text:
        raise ValueError(f"judge_prompt={path!r}: no text file with {{response}} in it, where the judge is to see it")
    try:
        known = [its["id"] for its in ask_judge(url.rstrip("/") + "/models", 10)["data"]]
    except Exception as error:  # the server there may be anything
        cure = "an OpenAI-compatible endpoint such as http://127.0.0.1:8000/v1 (its key: JUDGE_API_KEY)"
        raise ValueError(f"judge={url!r}: {reason(error)[:100]}; use {cure}") from error
    if not known or model not in ("", *known):
        raise ValueError(f"judge_model={model!r}: the judge has {', '.join(map(str, known)) or 'none'}")
    return model or known[0], text


def judge(prompt, response, answer, config=None):
    """
    The number from 0 to 1 behind the last 'score:' of a model's answer to the judge_prompt, in which {prompt},
    {response} and {answer} are filled in; its answer is noted. After judge_tries failures it raises, and the run stops:
    a failure is no 0. A verdict that cannot be read is a failure, too.

    The verdict is in the group file before anything uses it, and resumes and replays read it there. If the run is
    killed before that file is written, a resume requests it again, and nothing was computed from the lost one. Two
    fresh runs agree if the judge gives equal answers to equal requests, as our own endpoint does (tools/serve.py).
    In an agent: score, notes = await chat.do(judge, prompt, response, answer). config: by default that of the run that
    calls the user's function.
    """
    config = config or CONFIG.get()
    url = config["judge"]
    texts = dict(prompt=prompt, response=response, answer=answer)
    for i in range(config["judge_tries"]):
        time.sleep(JUDGE_WAIT * 2 ** (i - 1) if i else 0)
        try:
            model, template = judge_and_prompt(url, config["judge_model"], config["judge_prompt"])
            # In one pass: a response may have an {answer} in it.
            asked = re.sub(r"\{(prompt|response|answer)\}", lambda place: texts[place[1]], template)
            body = dict(
                model=model,
                messages=[{"role": "user", "content": asked}],
                max_tokens=JUDGE_TOKENS,
                temperature=0,
                seed=0,
            )
            choice = ask_judge(url.rstrip("/") + "/chat/completions", JUDGE_SECONDS, body)["choices"][0]
            said = choice["message"]["content"]
            return score_of(said, choice["finish_reason"]), {"judge": said}
        except Exception as error:  # what is no JSON, or JSON of another kind, fails in many ways
            failure = error
    raise RuntimeError(f"judge={url!r} failed {i + 1} times: {reason(failure)[:140]}") from failure


def score_of(verdict, finish_reason):
    """The number, 0 to 1, that is alone behind the last 'score:' in its line; 7/10 is one. Raises ValueError."""
    *before, said = re.split("score:", verdict, flags=re.IGNORECASE)
    number = NUMBER.fullmatch(said.strip("* \n").partition("\n")[0].rstrip("*. "))
    value = exact_value(number) if number and before else None
    if finish_reason == "length" or value is None or not 0 <= value <= 1:
        raise ValueError(f"no line ends in 'score: ' and a number from 0 to 1: {verdict[-60:]!r} ({finish_reason})")
    return float(value)


def make_judge(config):
    """The Reward 'judge'. Raises ValueError, with a cure, if there is no such judge."""
    if os.environ.get("RANK", "0") == "0":  # one rank's word is enough
        judge_and_prompt(config["judge"], config["judge_model"], config["judge_prompt"])
    return Reward(partial(judge, config=config), waits=True)


# ------------------------------------------------------------------------------------------------------------------
# model: a reward model


class RewardModel:
    """
    The reward 'model:name': the score that a reward model, in a folder or on the hub, gives at the end of a response.
    Our operators compute it, so its bits do not depend on what is scored beside it. Ends the run with one line if it is
    no such model. config: the keys of train_grpo.py.

    A reward gets texts only: they are tokenized again, as in training with mode='rm', and each response gets an EOS,
    even one that was cut off.
    """

    def __init__(self, name, config):
        self.folder = folders.fetch_model(name, "reward")
        self.config = config
        self.device = config["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
        self.hf = check_model(self.folder, config, "reward")
        head = "score.weight" in folders.weight_files(self.folder, "reward")
        require(head, f"reward={str(self.folder)!r}: no score.weight in its safetensors files; --mode=rm trains one")
        self.tokenizer, stop_tokens = folders.load_tokenizer(self.folder)
        # A model whose EOS is its padding, too, was trained to be read before it, as Hugging Face's class does.
        self.stop_tokens = [] if self.hf.pad_token_id == stop_tokens[0] else stop_tokens
        self.model = None
        self.waiting = SimpleQueue()
        self.thread = ThreadPoolExecutor(1, "reward model")
        self.known = {}  # {(prompt, response): Future}
        self.lock = threading.Lock()

    def __call__(self, prompt, response, answer):
        return self.expect([(prompt, response)])[0].result()

    def expect(self, texts):
        """
        The Futures of the scores of (prompt, response) pairs; any thread may call it. Pairs that come while a pass is
        made are in the next pass, equal ones once.
        """
        with self.lock:
            if len(self.known) > 10_000:  # a bound of the memory for old scores
                self.known.clear()
            for text in texts:
                if text not in self.known:
                    self.known[text] = Future()
                    self.waiting.put((text, self.known[text]))
            self.thread.submit(self._score)
            return [self.known[text] for text in texts]

    def _score(self):
        """Sets the Futures of all waiting pairs: to their scores, or to the error that came instead."""
        batch = [self.waiting.get() for _ in range(self.waiting.qsize())]
        try:
            for (_, score), x in zip(batch, self._scores([texts for texts, _ in batch]) if batch else (), strict=True):
                score.set_result(x)
        except BaseException as error:  # else whoever waits for the Futures would wait for ever
            for _, score in batch:
                score.set_exception(error)

    def load(self):
        """Loads the model if it is not there yet: by a rank with an engine, before that takes its share of a card."""
        if self.model is None:
            self.model = build_model(self.hf, None, self.device, self.config["batch_invariant"])
            weights = [Shard(name, tuple(p.shape), 0, p.data) for name, p in self.model.named_parameters()]
            folders.load_weights(weights, self.folder, False, "reward")

    @torch.inference_mode()
    def _scores(self, texts):
        """The scores of (prompt, response) pairs, a list of floats."""
        if self.device == "cuda":  # a new thread would use the first GPU
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        self.load()
        prompts, responses = map(list, zip(*texts))
        prompts = prompt_ids(prompts, self.tokenizer, self.config)
        ids = [torch.tensor(x + y) for x, y in zip(prompts, answer_ids(responses, self.tokenizer, self.stop_tokens))]
        lengths = [len(x) for x in ids]
        packed = torch.cat(ids)
        positions = torch.cat([*map(torch.arange, lengths)])
        plan = kernels.packed_plan(lengths, self.device, packed if self.config["batch_invariant"] else None)
        leaf = types.SimpleNamespace(ids=packed.to(self.device), positions=positions.to(self.device), plan=plan)
        return self.model.token_logprobs(leaf).scores.tolist()


def make_model(name, config):
    """The Reward 'model:name'."""
    model = RewardModel(name, config)
    return Reward(model, model=model)
