"""
OpenAI's protocol, asked by OpenAI's client: a model that is served, and a run whose agents are programs.

    pytest tests/test_endpoint.py
"""

import asyncio
import functools
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import types
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import httpx
import openai
import pytest
from conftest import error_of_run, finish, orphans, read_groups, wait_for
from test_chat import in_memory
from test_train import DEFAULTS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trials import ROOT, command_of, lines, processes_of, replay_of

import sync
from examples import client as example
from onecurve.agents import again, chat, endpoint
from onecurve.agents.chat import told_user as user
from onecurve.agents.sampler import Agent, AgentSampler
from onecurve.models import folders

SIZES = """--tool_call_parser=pythonic --dataset=arithmetic:20:40 --max_prompt_tokens=32 --max_new_tokens=40
    --leaf_tokens=1024 --eval_size=0""".split()
TOOLS = [{"type": "function", "function": example.ADD}]
KEY = "a key of the tests"
KEYED = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that calls its tool right about half of the time."""
    folder = tmp_path_factory.mktemp("endpoint") / "taught"
    taught = "--mode=sft --agent=examples/calculator.py:solve --max_steps=100 --learning_rate=2e-3".split()
    finish(folder, *SIZES, *taught)
    return folder / "ckpt/step_000100"


@contextmanager
def serving(model, *flags):
    """The address of a process that serves the model until it gets a SIGTERM, and leaves nothing behind."""
    command = "tools/serve.py --tool_call_parser=pythonic --threads=1 --context=200 --port=0".split()
    before = orphans()
    process = subprocess.Popen(
        [sys.executable, *command, f"--init_from={model}", *flags],
        cwd=ROOT,
        env=os.environ | dict(ONECURVE_API_KEY=KEY),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said = ""
        while not (address := re.search(r"serving \S+ at (\S+),", said)):
            line = process.stdout.readline()
            assert line, said
            said += line
        yield address[1]
    finally:
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, "")
    folder = re.search(r"goes to (\S+)/engine_0.log", said)[1]
    assert not os.path.exists(folder)
    wait_for(lambda: orphans() <= before, 5)


@pytest.fixture(scope="module")
def address(model):
    with serving(model) as address:
        yield address


def ids_of(texts):
    """The ids of a scratch model's tokens: a character each, and 1 for the others."""
    return [ord(text) - 29 if len(text) == 1 else 1 for text in texts]


def client_of(address, kind=openai.OpenAI):
    return kind(base_url=address, api_key=KEY, max_retries=0, timeout=300)


@pytest.fixture
def client(address):
    return client_of(address)


@pytest.fixture
def ask(client):
    """ask(text, **settings): the answer of the served model."""

    def ask(text, **settings):
        return client.chat.completions.create(**dict(model="policy", messages=[user(text)]) | settings)

    return ask


def at_once(address, requests):
    """The results of the coroutines of `requests(client)`, all at once."""

    async def run():
        async with client_of(address, openai.AsyncOpenAI) as client:
            return await asyncio.gather(*requests(client))

    return asyncio.run(run())


def test_greedy_answers_follow_no_seed(ask):
    asked = dict(temperature=0, tools=TOOLS, logprobs=True)
    one, *others = (ask("21+22=", **asked, seed=seed).choices for seed in range(3))
    assert others == [one] * 2


def test_choices_and_repeats_without_a_seed_are_the_same_set_in_any_order(address, client, ask):
    def choices(**settings):
        return ask("28+29=", temperature=2.0, max_tokens=6, **settings).choices

    assert choices(seed=1) == choices(seed=1) == choices(seed=1, n=2)[:1]
    six = choices(n=6)
    assert [choice.index for choice in six] == [*range(6)]
    repeated = [choices()[0].message.content for _ in range(6)]
    assert repeated == [choice.message.content for choice in six]
    assert len(set(repeated)) > 3
    assert [choice.message.content for choice in choices(n=6)] != repeated

    asked = dict(model="policy", temperature=2.0, max_tokens=6)
    prompts = ["2+2=", "2+3="]

    def ask_for_both(client):
        return [client.completions.create(**asked, prompt=prompts) for _ in range(6)]

    crowd = at_once(address, ask_for_both)
    for prompt, answers in zip(prompts, zip(*(one.choices for one in crowd))):
        both = client.completions.create(**asked, prompt=prompt, n=6)
        assert sorted(x.text for x in answers) == sorted(x.text for x in both.choices)
        assert both.usage.prompt_tokens * 2 == crowd[0].usage.prompt_tokens
        assert both.usage.completion_tokens > 6


SMALL = {
    "type": "object",
    "properties": {"n": {"type": "boolean"}},
    "required": ["n"],
    "additionalProperties": False,
}
SMALL_VALUES = [{"n": False}, {"n": True}]
FORM = {"type": "json_schema", "json_schema": {"name": "small", "schema": SMALL}}
FLIP = [{"type": "function", "function": {"name": "flip", "description": None, "parameters": SMALL}}]


def kinds_of_requests(number):
    """(for the chat route? what to ask) of requests of every kind."""
    chat = dict(
        messages=[user(f"{20 + number}+21=")],
        logprobs=True,
        top_logprobs=number % 4,
    )
    yield True, chat | dict(tools=TOOLS, n=2)
    yield True, chat | dict(tools=FLIP, tool_choice="required", parallel_tool_calls=False, max_tokens=60)
    yield True, chat | dict(tools=FLIP * (number % 2), response_format=FORM, max_tokens=60)
    echo = dict(
        prompt=[f"{number}+1=", "1+1="],
        echo=True,
        logprobs=number % 4,
        max_tokens=number % 3,
    )
    yield False, echo
    yield False, dict(prompt=ids_of(f"2+{number}="), logprobs=2)


def test_50_requests_of_all_kinds_have_the_same_bits_alone_and_in_a_crowd(address):
    requests = [kind for number in range(10) for kind in kinds_of_requests(number)]

    def answers(order, at_a_time, first_seed=0):
        places = asyncio.Semaphore(at_a_time)

        async def ask(client, i):
            in_chat, asked = requests[i]
            routes = client.chat.completions if in_chat else client.completions
            settings = dict(
                model="policy",
                seed=first_seed + i,
                temperature=(0, 0.7, 1.3)[i % 3],
                max_tokens=24,
            )
            settings |= asked
            if i % 2:
                settings |= dict(top_p=0.9, extra_body=dict(top_k=20, min_p=0.02))
            async with places:
                return i, (await routes.create(**settings)).model_dump_json()

        return dict(at_once(address, lambda client: [ask(client, i) for i in order]))

    alone = answers(range(50), 1)
    order = random.Random(0).sample(range(50), 50)
    assert answers(order, 50) == answers(order, 13) == alone
    free = (5, 10, 20, 25, 35, 40)  # of those with a temperature and no grammar
    other = answers(free, 6, first_seed=1)
    assert all(json.loads(other[i])["choices"] != json.loads(alone[i])["choices"] for i in free)
    for i, (in_chat, asked) in enumerate(requests):
        for choice in json.loads(alone[i])["choices"] if in_chat else ():
            message = choice["message"]
            if "tool_choice" in asked:
                (call,) = message["tool_calls"]
                assert call["function"]["name"] == "flip"
                assert json.loads(call["function"]["arguments"]) in SMALL_VALUES
            if "response_format" in asked and not message["tool_calls"] and choice["finish_reason"] == "stop":
                assert json.loads(message["content"]) in SMALL_VALUES
            counts = {len(token["top_logprobs"]) for token in choice["logprobs"]["content"]}
            assert max(counts) <= asked["top_logprobs"]
            if i % 10 == 0:  # neither a grammar nor a sampling rule drops tokens
                assert counts == {asked["top_logprobs"]}


def test_log_probs_of_a_prompt_are_those_with_which_its_tokens_were_drawn(client):
    create = functools.partial(client.completions.create, model="policy", seed=3)
    prompt = ids_of("12+34=")
    (choice,) = create(prompt=prompt, max_tokens=20, logprobs=3).choices
    drawn = choice.logprobs
    ids = prompt + ids_of(drawn.tokens)
    others = [ids_of("9" * n) for n in range(1, 30)]
    for prompts in ([ids], [*others, ids]):
        echo = create(prompt=prompts, max_tokens=0, echo=True, logprobs=3).choices[-1]
        assert echo.text.startswith("12+34=" + choice.text)
        assert echo.finish_reason == "length"
        assert echo.logprobs.token_logprobs[6:] == drawn.token_logprobs
        assert echo.logprobs.top_logprobs[6:] == drawn.top_logprobs
        assert echo.logprobs.token_logprobs[0] is None and len(echo.logprobs.tokens) == len(ids)
        assert echo.logprobs.text_offset[:3] == [0, 1, 2]
    likeliest = max(drawn.top_logprobs[0], key=drawn.top_logprobs[0].get)  # as lm-eval finds greedy tokens
    (greedy,) = create(prompt=prompt, max_tokens=1, temperature=0, logprobs=1).choices
    assert greedy.logprobs.tokens == [likeliest]


def test_an_answer_says_which_request_and_which_weights_it_is_of(ask):
    one, other = (ask("25+26=", seed=1, temperature=x) for x in (1.0, 1.5))
    assert ask("25+26=", seed=1).id == one.id != other.id
    assert one.system_fingerprint == other.system_fingerprint and one.system_fingerprint.startswith("fp_")


def test_a_turn_ends_at_a_string_at_a_length_or_by_itself(ask):
    def turn(seed, **settings):
        (choice,) = ask("25+26=", temperature=2.0, seed=seed, logprobs=True, **settings).choices
        return choice.message.content, choice.finish_reason, len(choice.logprobs.content)

    for seed in range(50):  # until it ends by itself, and writes no special tokens, which are in no text
        text, finish, n = turn(seed)
        if finish == "stop" and n == len(text) + 1 > 4:
            break
    assert finish == "stop"
    cut = (text[:3], "length", 3)
    assert turn(seed, max_tokens=3) == turn(seed, max_completion_tokens=3) == cut
    end = text.index(text[2])
    stopped = (text[:end], "stop", end + 1)
    assert turn(seed, stop=text[2]) == turn(seed, stop=["no such text", text[2]]) == stopped


def test_a_completion_goes_on_from_a_text_or_from_ids(client):
    asked = dict(model="policy", max_tokens=6, n=2, logprobs=0, temperature=0)
    prompts = ("2+2=", ids_of("2+2="), "2+3=")
    text, ids, other = (client.completions.create(prompt=prompt, **asked) for prompt in prompts)
    assert text.choices == ids.choices != other.choices
    assert text.usage == ids.usage and text.usage.prompt_tokens == 4
    assert text.choices[0].logprobs.tokens


def schema(content):
    return dict(response_format={"type": "json_schema", "json_schema": {"schema": content}})


@pytest.mark.parametrize(
    "why, settings",
    {
        "top_p=1.5: Input should be less than or equal to 1": dict(top_p=1.5),
        "presence_penalty=0.5: must be 0": dict(presence_penalty=0.5),
        "logit_bias": dict(logit_bias={"5": 1}),
        "temperature=-1: Input should be greater": dict(temperature=-1),
        "at least 0.001": dict(temperature=1e-5),
        "max_tokens=0: Input should be greater than 0": dict(max_tokens=0),
        'stop.0="": String should have at least 1 character': dict(stop=""),
        "n=true: Input should be a valid integer": dict(n=True),
        "tool_choice=": dict(tool_choice="required"),
        "one of the tools": dict(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "sub"}}),
        "response_format.type=": dict(response_format={"type": "grammar"}),
        "Unsupported": schema({"type": "x"}),
        "wants an object": schema({"$defs": 5}),
        "tools.0.function.name=": dict(tools=[{"type": "function", "function": {"description": "x"}}]),
        "tools=": dict(tools=TOOLS * 129),
        "tools.0.type=": dict(tools=[TOOLS[0] | {"type": "web_search"}]),
        "functions=": dict(functions=[{"name": "add"}]),
        "the most are 33554432 together": dict(messages=[user("9" * 600_000)], n=64),
        "stop=": dict(stop=["x"] * 17),
        "messages=": dict(messages=[user("1")] * 4097),
        "must end with what the model is told": dict(messages=[]),
        '0.type="image_url": Input should be': dict(messages=[user([{"type": "image_url"}])]),
        "message 0 is the result of no call": dict(messages=[dict(role="tool", tool_call_id="x", content="1")]),
        "length is 200 tokens, and the request has 303": dict(messages=[user("9" * 300)]),
        "the request has more than 199": dict(messages=[user("9" * 300_000)]),
    }.items(),
)
def test_what_cannot_be_answered_is_refused_in_one_line(ask, settings, why):
    with pytest.raises(openai.BadRequestError) as refused:
        ask("1+1=", **settings)
    error = refused.value
    assert why in error.body["message"] and error.param in (None, *settings)
    assert error.body.keys() == {"message", "type", "code", "param"}
    assert (error.code == "context_length_exceeded") == ("maximum context length" in str(error))


def test_routes_and_bodies_are_checked(address):
    with httpx.Client(base_url=address, headers=KEYED) as http:

        def status(method, path, **options):
            answer = http.request(method, path, **options)
            assert answer.is_success or answer.json()["error"].keys() == {"message", "type", "code", "param"}
            return answer.status_code

        name = "taught/step_000100"
        assert [model["id"] for model in http.get("/models").json()["data"]] == [name, "policy"]
        assert http.get(f"/models/{name}").json()["id"] == name
        assert status("GET", "/models/gpt") == 404
        assert status("POST", "/chat/completions", json=dict(model="gpt", messages=[user("1")])) == 404
        assert status("GET", address.replace("/v1", "/health"), headers={"Authorization": ""}) == 200
        assert status("POST", "/no_such_route") == 404
        assert status("GET", "/chat/completions") == 405
        assert status("POST", "/chat/completions", content=b"[") == 400
        assert status("POST", "/completions", content=b"[]") == 400
        assert status("POST", "/completions", content=rb'{"prompt": "a", "stop": "\ud800"}') == 400  # half a character
        # an id that does not exist would end the engine
        for prompt in ("", [], [10**6], [-1], [[]], ["a", 1], [""], None):
            assert status("POST", "/completions", json=dict(prompt=prompt, max_tokens=1)) == 400
        said = http.post("/completions", json=dict(prompt=[10**6], max_tokens=1)).json()["error"]["message"]
        assert "the prompt cannot be made into tokens: ValueError: there is no token 1000000" in said
        assert status("POST", "/completions", json=dict(prompt=[1], max_tokens=1)) == 200
        assert status("POST", "/reward", json={"reward": 1}) == 404  # of which session?
        assert status("DELETE", address.replace("/v1", "/s/no_such_session")) == 404


# ---- streams, and clients that are gone


@pytest.fixture(scope="module")
def one_at_a_time(model):
    """A client of a server that answers one request after the other, each with as many tokens as it may have."""
    with serving(model, "--context=1532", "--ignore_eos", "--engine_args=max_running_requests=1") as address:
        yield client_of(address)


LONG = dict(model="policy", max_tokens=600, temperature=1.5, seed=3)
LONG_CHAT = LONG | dict(messages=[user("20+20=")], logprobs=True)


def chat_parts(choice):
    """(text, log-probs) of an answer's choice, or of what a chunk of a stream brings of one."""
    text = getattr(choice, "message", None) or choice.delta
    return text.content or "", choice.logprobs.content if choice.logprobs else []


def completion_parts(choice):
    return choice.text, choice.logprobs.token_logprobs if choice.logprobs else []


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_stream_brings_the_answer_as_it_is_written(one_at_a_time, kind):
    if kind == "chat":
        create = functools.partial(one_at_a_time.chat.completions.create, **LONG_CHAT)
        parts = chat_parts
    else:
        create = functools.partial(one_at_a_time.completions.create, **LONG, prompt="20+20=", logprobs=0)
        parts = completion_parts
    whole = create()
    began = time.monotonic()
    came = []
    text = ""
    drawn = []
    for chunk in create(stream=True, stream_options=dict(include_usage=True)):
        assert chunk.id == whole.id
        for choice in chunk.choices:
            new, tokens = parts(choice)
            if new:
                came.append(time.monotonic() - began)
            text += new
            drawn += tokens
    assert (text, drawn) == parts(whole.choices[0]) and len(drawn) == 600
    assert choice.finish_reason == whole.choices[0].finish_reason == "length" and chunk.usage == whole.usage
    assert len(came) > 300 and came[0] < came[-1] / 4


def test_a_request_whose_client_is_gone_leaves_the_engine(one_at_a_time):
    longest = LONG_CHAT | dict(max_tokens=1500)  # so long that a pause of the machine is short beside it

    def seconds():
        """What a request of one token takes, behind those that are in the engine."""
        began = time.monotonic()
        one_at_a_time.chat.completions.create(**LONG_CHAT | dict(max_tokens=1))
        return time.monotonic() - began

    def leave(client):
        with client.chat.completions.create(**longest, stream=True) as stream:
            next(stream)

    leave(one_at_a_time)
    waits = [seconds()]
    with pytest.raises(openai.APITimeoutError):
        one_at_a_time.chat.completions.create(**longest, timeout=0.2)
    waits.append(seconds())
    host = str(one_at_a_time.base_url).removesuffix("/v1/")
    leave(one_at_a_time.copy(base_url=f"{host}/s/b/v1"))
    assert httpx.delete(f"{host}/s/b", headers=KEYED).status_code == 200
    waits.append(seconds())
    leave(one_at_a_time.copy(base_url=f"{host}/s/a/v1"))  # in a session a retry would get the answer
    assert max(waits) < seconds() / 3


# What a model may write whose end does not say yet what it is; CALLS in the form of each parser.
PARTS = ["é", "😀", "words, " * 9, " ", "\n", "<", "<think>", "<tool", "<tool_call>\n", "[", "{", "st", "stop"]
CALLS = dict(qwen25='<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', pythonic="[add(a=1)]")
CALLS["llama3"] = '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'


@pytest.fixture(scope="module")
def by_bytes():
    """A template whose tokens are bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    template = chat.Template(tokenizer, [tokenizer.eos_token_id], {})
    template.first = lambda messages, tools: [0]
    template.checked.add(("add",))
    return template


def streamed(template, ids, tools, parser):
    """(Does a stream bring a turn with the tokens `ids`? The message; the texts that were streamed; errors.)"""
    asked = dict(
        messages=[user("a")],
        stream=True,
        stop="stop",
        tools=tools,
    )
    asks = endpoint.read(asked)

    async def draw(of, stop, most):
        for n in range(1, len(ids)):
            of.hear(dict(output_token_logprobs=[(-1.0, token, None) for token in ids[:n]]))
            await asyncio.sleep(0)
        return ids, [-1.0] * len(ids)

    async def run():
        episode = episode_of(template, None)
        episode.source = draw
        episode.parse = functools.partial(AgentSampler._calls, types.SimpleNamespace(parser=parser))
        answer = endpoint.Session(chat.Chat(episode, ())).answer(asks[0], b"", False)
        lines = [line async for line in endpoint.events(asks, [answer], {}, template.decode, True)]
        events = [json.loads(line.removeprefix("data: ")) for line in lines if "[DONE]" not in line]
        whole = endpoint.whole(asks, [await answer.task], {}, template.decode, True)["choices"][0]["message"]
        deltas = [event["choices"][0]["delta"] for event in events if "choices" in event]
        texts = [delta["content"] for delta in deltas[1:] if "content" in delta]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert [call.pop("index") for call in calls] == [*range(len(calls))]
        errors = [event["error"]["message"] for event in events if "error" in event]
        same = (whole["content"] or "") == "".join(texts) and whole.get("tool_calls", []) == calls
        return same, whole, texts, errors

    return asyncio.run(run())


@pytest.mark.parametrize("parser", CALLS)
def test_a_stream_gives_the_text_and_cuts_no_character_stop_or_call(by_bytes, parser, monkeypatch):
    rng = random.Random(0)
    euro = by_bytes.encode("€")
    parts = [*map(by_bytes.encode, [*PARTS, CALLS[parser]]), euro[:2], euro[2:]]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    marks = ["<tool_call>"] if parser == "qwen25" else by_bytes.call_marks
    counts = Counter()
    for _ in range(150):
        ids = [*itertools.chain(*rng.choices(parts, k=rng.randint(1, 12)))]
        stops = (n for n in range(len(ids)) if "stop" in by_bytes.decode(ids[:n]))
        ids = ids[: next(stops, None)]
        ids += by_bytes.stop_tokens * rng.randint(0, 1)
        asks = tools * (rng.random() < 0.7)
        monkeypatch.setattr(by_bytes, "call_marks", marks)
        same, whole, texts, errors = streamed(by_bytes, ids, asks, parser)
        assert same and not errors, (whole, texts, errors)
        counts.update(calls="tool_calls" in whole, chunks=len(texts), tokens=len(ids))
        monkeypatch.setattr(by_bytes, "call_marks", [])
        counts["wrong"] += bool(streamed(by_bytes, ids, asks, parser)[3])
    assert counts["calls"] > 10 and counts["chunks"] > counts["tokens"] / 10
    assert counts["wrong"] > 5  # what was sent too early is an error


# ---- sessions


def test_a_session_continues_its_own_tokens_and_answers_a_retry_as_before(address):
    with httpx.Client(base_url=address.removesuffix("/v1"), headers=KEYED) as http:

        def turn(session, messages, retry=0):
            asked = dict(messages=messages, logprobs=True, temperature=1.5, seed=session)
            header = {"x-stainless-retry-count": str(retry)}
            answer = http.post(f"/s/{session}/v1/chat/completions", json=asked, headers=header).json()
            return answer["choices"][0], answer["usage"]["prompt_tokens"]

        told = [user("20+20=")]
        for session in range(50):  # until one ends its turn by itself, after a while
            first, begin = turn(session, told)
            written = len(first["logprobs"]["content"])
            if first["finish_reason"] == "stop" and written > 4:
                break
        assert first["finish_reason"] == "stop"
        assert turn(session, told, retry=1) == turn(session, told, retry=2) == (first, begin)
        fork, _ = turn(session, told)  # not marked as a retry: it begins another dialogue, whose noise is another
        assert fork["logprobs"] != first["logprobs"]
        more = [*told, first["message"], user("ok")]
        assert turn(session, more)[1] == begin + written + len(["<user>", "o", "k", "<eos>", "<assistant>"])
        where = f"/s/{session}/v1/reward"
        assert http.post(where, json={"reward": 0.5}).json() == {"reward": 0.5}
        assert http.post(where, json={"reward": "1"}).status_code == 400
        assert [http.delete(f"/s/{session}").status_code for _ in range(2)] == [200, 404]


def test_a_thousand_sessions_are_open_at_once(address):
    async def run():
        # httpx takes 25 ms of this client's time for a request, our side 3 ms
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=KEYED) as http:

            async def turn(where, *messages):
                asked = dict(messages=messages, logprobs=True, max_tokens=6, tools=TOOLS)
                async with http.post(f"{where}/v1/chat/completions", json=asked) as answer:
                    assert answer.status == 200, await answer.text()
                    return (await answer.json())["choices"][0]

            async def end(where):
                async with http.delete(where) as answer:
                    return answer.status

            host = address.removesuffix("/v1")
            told = [user(f"{i}=") for i in range(1000)]
            sessions = [f"{host}/s/of_{i}" for i in range(1000)]
            first = await asyncio.gather(*map(turn, sessions, told))
            assert len({answer["logprobs"]["content"][0]["logprob"] for answer in first}) > 500
            # Now all are open, and some go on; what they say is what they say when nobody else asks.
            ended = [i for i in range(1000) if first[i]["finish_reason"] == "stop"][:16]
            more = {i: [told[i], first[i]["message"], user("1+1=")] for i in ended}
            second = await asyncio.gather(*[turn(sessions[i], *more[i]) for i in ended])
            assert [await turn(host, told[i]) for i in range(0, 1000, 100)] == first[::100]
            for i, answer in zip(ended, second, strict=True):
                again = f"{host}/s/again_{i}"
                assert await turn(again, told[i]) == first[i]
                assert await turn(again, *more[i]) == answer
            assert len(ended) == 16
            assert await asyncio.gather(*map(end, sessions)) == [200] * 1000

    asyncio.run(run())


# ---- sessions whose model is a script


@pytest.fixture(scope="module")
def template(model):
    return chat.Template(*folders.load_tokenizer(model), {})


def episode_of(template, source, sample=0):
    """An Episode with the words of `source(chat)`."""

    async def draw(of, stop, most):
        ids = template.turn(await source(of))
        return ids, [0.0] * len(ids)

    where = f"sample {sample}"
    key = ["rl", sample]
    return chat.Episode(DEFAULTS, template, where, sample, key, draw, lambda _, x: (x, []), in_memory())


async def says_x(of):
    return "x"


async def repeats_in_capitals(of):
    return of.messages[-1]["content"].upper()


def with_server(requests, decode=str, serves=None):
    """The result of `requests(http, server)`, with a client of a server that ends with it."""

    async def run():
        server = endpoint.Endpoint(endpoint.listen("127.0.0.1", 0), KEY, ["policy"], decode, serves)
        async with httpx.AsyncClient(base_url=server.url, headers=KEYED) as http:
            out = await requests(http, server)
        await server.close()
        return out

    return asyncio.run(run())


def asked_of_a_script(template, source, requests):
    """The results of `requests(post, session)`, where post(text or messages, retry=0) asks in a session of its own."""

    async def in_session(http, server):
        session = server.sessions["x"] = endpoint.Session(chat.Chat(episode_of(template, source), ()))

        async def post(told, retry=0, status=200):
            messages = [user(told)] if isinstance(told, str) else told
            headers = {"x-stainless-retry-count": str(retry)}
            answer = await http.post("/s/x/v1/chat/completions", json=dict(messages=messages), headers=headers)
            assert answer.status_code == status, answer.text
            content = answer.json()
            return content["choices"][0]["message"] if status == 200 else content["error"]["message"]

        return await requests(post, session)

    return with_server(in_session, template.decode)


def test_a_retry_of_a_request_in_flight_is_not_sampled_again(template):
    drawn = []

    async def source(of):
        drawn.append(of.path)
        await asyncio.sleep(0.2)
        return f"answer {len(drawn)}"

    async def requests(post, session):
        with pytest.raises(TimeoutError):  # nor if its client is gone meanwhile
            await asyncio.wait_for(post("a"), 0.1)
        return await asyncio.gather(*[post("a", retry=i) for i in (1, 2)])

    answers = asked_of_a_script(template, source, requests)
    assert [answer["content"] for answer in answers] == ["answer 1"] * 2
    assert len(drawn) == 1


def test_the_names_of_dialogues_do_not_follow_the_order_of_arrival(template):
    def paths(order):
        async def requests(post, session):
            for told in order:
                await post(told)
            return {(chat.messages[0]["content"], chat.path) for chat in session.dialogues}

        return asked_of_a_script(template, repeats_in_capitals, requests)

    first, *others = (paths(order) for order in itertools.permutations(["a", "a", "b"]))
    assert others == [first] * 5
    assert [n for _, (_, n) in sorted(first)] == [0, 1, 0]
    assert first != paths(["a", "a", "c"])


def test_a_history_goes_on_or_forks_and_nothing_sampled_is_encoded_again(template):
    written = template.turn("  Spaces")

    async def source(of):
        return "  Spaces"  # a client that tidies up changes the history

    async def requests(post, session):
        told = [user("a")]
        told += [await post(told), user("b")]
        await post(told)
        (one,) = session.dialogues
        first, second = one.turns
        assert one.ids[: first.end] == [*template.first(told[:1], []), *written]
        between = template.next(told[2:], [], one.ids[first.end - 1])
        assert one.ids[first.end : second.start] == between
        assert [one.ids[i] for i, mine in enumerate(one.mask) if mine] == 2 * written
        told[1] = told[1] | dict(content="Spaces")
        await post(told)
        one, fork = session.dialogues
        assert len(one.turns) == 2
        assert fork.ids[: fork.turns[0].start] == template.first(told, [])
        assert fork.mask.count(True) == len(written)

    asked_of_a_script(template, source, requests)


def test_two_ways_on_from_one_turn_at_a_time_are_an_error(template):
    gate = []

    async def source(of):
        if len(of.turns):
            await gate[0].wait()
        return "x"

    async def requests(post, session):
        gate.append(asyncio.Event())
        told = [user("a")]
        told.append(await post(told))
        first = asyncio.ensure_future(post([*told, user("b")]))
        while not session.busy:
            await asyncio.sleep(0.01)
        error = await post([*told, user("c")], status=400)
        gate[0].set()
        await first
        await post([*told, user("c")])  # one after the other they may
        return error, str(session.failed.result()), len(session.dialogues)

    error, failed, dialogues = asked_of_a_script(template, source, requests)
    why = "two requests at a time go on from one turn: 'c' is the second; ask for one after the other"
    assert error == failed == f"sample 0: {why}"
    assert dialogues == 2


def served_by_a_script(template, requests):
    """`with_server` of a model that says "x"."""
    return with_server(requests, template.decode, lambda asked, i, of_chat: episode_of(template, says_x))


ASKED = dict(messages=[user("a")])


def test_a_sessions_key_is_good_for_itself_alone_and_not_for_its_reward(template):
    async def requests(http, server):
        async def status(key, path, body=ASKED):
            headers = {"Authorization": f"Bearer {key}"}
            return (await http.post(path, headers=headers, json=body)).status_code

        await status(KEY, "/s/b/v1/chat/completions")
        out = []
        for key in (server.key_of("a"), server.key_of("a", "reward")):
            for where in ("/s/a", "/s/b", ""):
                out.append(await status(key, f"{where}/v1/chat/completions"))
            for where in ("/s/a", "/s/b"):
                out.append(await status(key, f"{where}/v1/reward", dict(reward=1)))
        return out

    asked = [200, 401, 401, 401, 401]
    rewarded = [401, 401, 401, 200, 401]
    assert served_by_a_script(template, requests) == asked + rewarded


HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n"


def test_half_a_request_is_given_up_and_a_whole_one_is_not(template, monkeypatch):
    monkeypatch.setattr(endpoint, "HALF_REQUEST", 0.3)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n"

    async def requests(http, server):
        reads = []
        writers = []
        for part in (b"", head[:9], head + b"\r\n{", HEALTH + b"\r\n"):
            reader, writer = await asyncio.open_connection(*server.url[7:].split(":"))
            writer.write(part)
            reads.append(asyncio.ensure_future(reader.read()))  # to the connection's end
            writers.append(writer)
        await asyncio.sleep(0.6)
        closed = [read.done() for read in reads]
        for writer in writers:
            writer.close()
        return closed

    assert served_by_a_script(template, requests) == [True, True, True, False]


def test_calls_are_counted_before_anything_is_done_for_them(monkeypatch):
    """Not by their ids, of which all may have one."""
    monkeypatch.setattr(endpoint, "numbered", None)  # would be a TypeError
    calls = [dict(id="a", function=dict(name="f"))] * (endpoint.MOST_MESSAGES + 1)
    with pytest.raises(endpoint.Refusal, match="more than 4096 calls"):
        endpoint.read(dict(messages=[dict(role="assistant", tool_calls=calls), user("a")]))


def test_log_probs_of_prompts_are_counted_before_any_work_for_them():
    """Those of 128 prompts of 600 tokens were 40 MB, and made all others wait for 15 s."""
    asked = dict(prompt=[[1] * 600] * 128, echo=True)
    for more in (dict(logprobs=20), dict(logprobs=1, n=2)):
        with pytest.raises(endpoint.Refusal, match="echo=true: 76800 characters or ids, .* the most are 262144"):
            endpoint.read(asked | more, chat=False)
    for more in (dict(logprobs=1), dict(logprobs=20, echo=False), {}):
        assert len(endpoint.read(asked | more, chat=False)) == 128


def test_a_key_without_scheme_and_a_request_of_two_lengths_are_refused():
    """It was answered as two, of which a proxy before us may have seen one."""
    two = HEALTH + b"Content-Length: 50\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    one = HEALTH + b"\r\n"

    async def requests(http, server):
        reader, writer = await asyncio.open_connection(*server.url[7:].split(":"))
        writer.write(two + one)
        said = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        keys = (KEY, f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY}")
        return said, [await http.get("/v1/models", headers={"Authorization": key}) for key in keys]

    said, answers = with_server(requests)
    assert said.count(b"HTTP/1.1 ") == 1 and said.startswith(b"HTTP/1.1 400")
    assert b"a request has one of them" in said
    assert [answer.status_code for answer in answers] == [401, 401, 401, 200]
    assert "must be 'Authorization: Bearer <OPENAI_API_KEY>'" in answers[0].json()["error"]["message"]


def test_a_refused_request_ends_the_run_unless_it_lacks_the_key():
    """Else a framework could swallow the refusal, and make it a reward of 0."""
    told = '{"messages": [{"role": "user", "content": "%s"}]}'
    half = told % "\\ud83d"
    grammar = told % 'a"}], "tool_choice": "required", "x": [{"y": "'
    statuses = {
        half: 400,
        told % ("a" * 2**22): 413,
        grammar: 400,
        '{"messages": []}': 400,
        "[": 400,
    }
    failed = []

    async def requests(http, server):
        root = types.SimpleNamespace(episode=types.SimpleNamespace(where="here"))
        server.sessions["s"] = types.SimpleNamespace(fail=failed.append, root=root)
        for key, ends in ((KEY, True), ("another", False)):
            for bad, status in statuses.items():
                header = {"Authorization": f"Bearer {key}"}
                answer = await http.post("/s/s/v1/chat/completions", content=bad, headers=header)
                assert answer.status_code == (status if ends else 401) and bool(failed) == ends
                failed.clear()

    with_server(requests)


def test_nulls_and_empty_arguments_are_as_if_absent():
    function = {"name": "add", "description": None, "parameters": None, "strict": None}
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": ""}}
    messages = [user("a"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "x", "content": "1"})
    body = dict(messages=messages, tools=[{"type": "function", "function": function}], response_format=FORM)
    for choice in ("required", {"type": "function", "function": {"name": "add"}}, None):
        (asked,) = endpoint.read(body | dict(tool_choice=choice))
        assert asked.tools == [{"type": "function", "function": {"name": "add"}}] and asked.schema
        assert asked.messages[1]["tool_calls"][0]["function"]["arguments"] == {}
    assert endpoint.read(dict(messages=messages))[0].schema == ""


def test_sessions_are_bounded_where_a_model_is_served(template, monkeypatch):
    monkeypatch.setattr(endpoint, "MOST_OPEN", 2)

    async def requests(http, server):
        async def ask(name):
            return (await http.post(f"/s/{name}/v1/chat/completions", json=ASKED)).status_code

        assert [await ask(name) for name in "abca"] == [200, 200, 429, 200]
        assert (await http.delete("/s/b")).status_code == await ask("c") == 200
        monkeypatch.setattr(endpoint, "IDLE", 0)  # now a session that nobody uses makes room
        assert await ask("d") == 200
        assert sorted(server.sessions) == ["c", "d"]

    served_by_a_script(template, requests)


def test_a_history_may_have_turns_that_are_not_the_models(template):
    async def requests(post, session):
        told = [user("u"), dict(role="assistant", content="a"), user("u")]
        told += [await post(told), user("u")]
        await post(told)
        (dialogue,) = session.dialogues
        return [again.record_of(dialogue)]

    lines = [*Agent.transcript(None, asked_of_a_script(template, says_x, requests))]
    roles = [line.split(":")[0].split()[-1] for line in lines]
    assert roles == ["user", "assistant"] * 3
    assert sum("'x'" in line for line in lines) == 2


# ---- clients inside the process


@pytest.mark.parametrize("wrong", [{}, dict(messages=[]), dict(messages=[user("9" * 9999)])])
def test_an_agent_uses_openais_client_and_a_wrong_request_is_no_zero(template, wrong, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nobody listens

    async def solve(chat, row):
        async with chat.openai() as client:
            asked = dict(model="policy", messages=[user("a")])
            first = await client.chat.completions.create(**asked)
            try:
                await client.chat.completions.create(**asked | wrong)
            except openai.APIStatusError:
                pass  # as a framework might
            return float(first.choices[0].message.content == "A")

    episode = episode_of(template, repeats_in_capitals)
    if not wrong:
        assert asyncio.run(episode.play(solve, {})) == 1
        assert [len(c.turns) for c in episode.chats] == [1, 1]
        return
    with pytest.raises(chat.AgentError, match="the prompt has" if wrong["messages"] else "must end with"):
        asyncio.run(episode.play(solve, {}))


# ---- agents that are programs

# What the programs below begin with: they ask for a turn. post is theirs.
ASK = """
import httpx, json, os
headers = dict(authorization="Bearer " + os.environ["OPENAI_API_KEY"])
post = lambda path, **body: httpx.post(os.environ["OPENAI_BASE_URL"] + path, json=body, headers=headers).json()
reward = lambda x: headers.update(authorization="Bearer " + os.environ["REWARD_KEY"]) or post("/reward", reward=x)
ask = lambda text: post("/chat/completions", messages=[dict(role="user", content=text)])
ask("a")
"""


@pytest.mark.parametrize(
    "code, what",
    {
        ASK + "print('so')\nprint(0.25)": 0.25,
        ASK + "reward(2)\nprint('no number')": 2.0,
        ASK + "print(json.loads(os.environ['ROW'])['n'] + ('RANK' in os.environ))": 7.0,
        ASK + "print('half')": "its last line of output must be the reward, and is 'half'",
        ASK + "print('nan')": "its last line of output must be the reward, and is 'nan'",
        ASK + "raise KeyError('why')": "ended with status 1: KeyError: 'why'",
        ASK + "print(ask('9' * 999))": "the prompt has",
        "print(1)": "returned without a turn of the model",
    }.items(),
)
def test_a_program_gives_a_reward_or_ends_the_run_in_one_line(template, monkeypatch, tmp_path, code, what):
    monkeypatch.setenv("RANK", "0")
    Path(tmp_path, "agent.py").write_text(code)
    solve, _ = again.load_agent(f"python {tmp_path}/agent.py")
    playing = episode_of(template, says_x, sample=3).play(solve, dict(n=7))
    if isinstance(what, float):
        assert asyncio.run(playing) == what
        return
    with pytest.raises(chat.AgentError, match="sample 3") as ended:
        asyncio.run(playing)
    assert what in str(ended.value) and "\n" not in str(ended.value)


def test_a_turn_is_trained_on_although_its_program_did_not_wait_for_it(template, tmp_path):
    code = ASK.replace("headers=headers)", "headers=headers, timeout=0.2)").replace('\nask("a")', "")
    code += "try:\n    ask('a')\nexcept httpx.ReadTimeout:\n    print(1)"
    Path(tmp_path, "agent.py").write_text(code)

    async def source(of):
        await asyncio.sleep(2)
        return "x"

    episode = episode_of(template, source)
    solve, _ = again.load_agent(f"python {tmp_path}/agent.py")
    assert asyncio.run(episode.play(solve, {})) == 1
    assert [turn.text for dialogue in episode.chats for turn in dialogue.turns] == ["x"]


def test_a_program_that_is_not_there_is_named(refusal):
    for command, why in (("no_such_program x", "no program 'no_such_program'"), ("python 'x", "No closing quotation")):
        assert why in refusal(again.load_agent, command)


def test_programs_and_their_children_end_with_a_killed_rank(model, tmp_path):
    sleeps = "import time; time.sleep(1000)"
    starts = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {sleeps!r}, {str(tmp_path)!r}])\n"
    Path(tmp_path, "agent.py").write_text(starts + sleeps)
    flags = [f"--agent=python {tmp_path}/agent.py", f"--init_from={model}", "--warmup_sft_steps=0"]
    command = command_of(tmp_path / "run", *SIZES, *flags, "--prompts_per_step=1", "--group_size=2")
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)

    def started():  # the run itself has the program in its command line, too, but within a flag
        return [c for c in processes_of(tmp_path).values() if f"\0{tmp_path}/agent.py\0" in c or "time.sleep" in c]

    try:
        wait_for(lambda: len(started()) == 4, 120)
        run.kill()
        run.wait()
        wait_for(lambda: not processes_of(tmp_path), 10)
    finally:
        for pid in processes_of(tmp_path):
            os.kill(pid, signal.SIGKILL)


# A further turn, behind those of the example, that must be an object.
OBJECT = f"""
    more = [*messages, dict(role="user", content="1+1=")]
    client.chat.completions.create(model="policy", messages=more, response_format={FORM})
    print(float("""


@pytest.mark.in_turn
def test_a_run_of_programs_learns_and_streams_do_not_change_its_ledger(model, template, tmp_path):
    """What they draw under a grammar has no loss; a replay in which it has is the control: its log-probs differ."""
    code = Path(example.__file__).read_text()
    streams = code.replace("completions.create(", "completions.stream(")
    streams = streams.replace(").choices", ").__enter__().get_final_completion().choices")
    for name, text in dict(a=code, b=streams).items():
        Path(tmp_path, f"{name}.py").write_text(text.replace("\n    print(float(", OBJECT))
    flags = f"""--init_from={model} --warmup_sft_steps=0 --checkpoint_every=0 --prompts_per_step=2 --group_size=3
        --max_steps=2 --learning_rate=1e-3""".split()
    flags += [*SIZES, f"--agent=python {tmp_path}/a.py"]
    finish(tmp_path / "a", *flags)
    finish(tmp_path / "b", *flags, f"--agent=python {tmp_path}/b.py", "--max_steps=1")
    ours, other = (lines(tmp_path / name, "ledger.jsonl") for name in "ab")
    assert len(ours) == 2 and other == ours[:1]
    metrics = lines(tmp_path / "a", "metrics.jsonl", "rl")
    assert any(m["reward_std"] > 0 and m["grad_norm"] > 1e-3 for m in metrics)
    assert any(m["turns_mean"] > 1 and m["calls_mean"] > 0 for m in metrics)
    assert all(m["turn_reward_mean"] == m["reward_mean"] / m["turns_mean"] for m in metrics)
    assert all(m["logprob_mismatch_tokens"] == m["forks_mean"] == 0 for m in metrics)
    objects = []  # under a grammar
    for tensors, meta in read_groups(tmp_path / "a"):
        start = tensors["prompt_tokens"].tolist()
        assert start == template.first([user(meta["row"]["prompt"])], TOOLS)[: len(start)]
        masks = tensors["loss_mask"].split(tensors["lengths"].tolist())
        for mask, (dialogue,) in zip(masks, meta["episodes"]):
            mask = [False] * len(start) + mask.tolist()
            free = [False] * len(mask)
            for turn in dialogue["turns"]:
                if dialogue["messages"][turn["message"] - 1]["content"] != "1+1=":
                    free[turn["start"] : turn["end"]] = [True] * (turn["end"] - turn["start"])
                elif not turn["truncated"]:
                    objects.append(json.loads(turn["text"]))
            assert mask == free
    assert len(objects) > 4 and all(x in SMALL_VALUES for x in objects)
    for path in tmp_path.glob("a/queue/rl_*/group_*"):
        tensors, meta = sync.read_group(path)
        sync.write_group(path, tensors | dict(loss_mask=tensors["turn"] >= 0), meta)
    error = error_of_run(tmp_path / "c", *flags, *replay_of(tmp_path / "a"))
    assert "log-probs differ; --strict=False goes on" in error
