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
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import httpx
import openai
import pytest
from conftest import error_line, finish, launch_warm, orphans, read_groups, wait_for
from test_train import DEFAULTS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trials import ROOT, command_of, lines, processes_of, replay_of

import sync
from examples import client as example
from onecurve.agents import again, chat, endpoint
from onecurve.agents.sampler import Agent, AgentSampler
from onecurve.models import folders

SIZES = "--tool_call_parser=pythonic --dataset=arithmetic:20:40 --max_prompt_tokens=32".split()
SIZES += "--max_new_tokens=40 --leaf_tokens=1024 --eval_size=0".split()
TOOLS = [{"type": "function", "function": example.ADD}]
KEY = "a key of the tests"
BY_TEXT = {chr(c): c - 29 for c in range(32, 127)}  # the ids of a scratch model's characters


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that calls its tool right about half of the time."""
    folder = tmp_path_factory.mktemp("endpoint") / "taught"
    taught = "--mode=sft --agent=examples/calculator.py:solve --max_steps=100 --learning_rate=2e-3".split()
    finish(folder, *SIZES, *taught, launch=launch_warm)
    return folder / "ckpt/step_000100"


@contextmanager
def serving(model, *flags):
    """The address of a process that serves the model until it gets a SIGTERM, and leaves nothing behind."""
    command = [
        sys.executable,
        "tools/serve.py",
        f"--init_from={model}",
        "--tool_call_parser=pythonic",
        "--threads=1",
        "--context=200",
        *flags,
    ]
    before = orphans()
    process = subprocess.Popen(
        [*command, "--port=0"],
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


@pytest.fixture
def ask(address):
    """ask(text or messages, **settings): the answer of the served model."""
    client = openai.OpenAI(base_url=address, api_key=KEY, max_retries=0)

    def ask(told, **settings):
        messages = [{"role": "user", "content": told}] if isinstance(told, str) else told
        return client.chat.completions.create(**dict(model="policy", messages=messages) | settings)

    return ask


async def dialogue(client, number, stream, seed=1, turns=3):
    """[(text, calls, tokens, log-probs)] of the turns of a dialogue with the served model."""
    messages, out = [{"role": "user", "content": f"{20 + number % 20}+{20 + number // 20}="}], []
    for turn in range(turns):
        asked = dict(model="policy", messages=messages, tools=TOOLS, logprobs=True, seed=seed, temperature=1.2)
        if stream:
            text, calls, tokens = "", [], []
            async for chunk in await client.chat.completions.create(**asked, stream=True):
                (choice,) = chunk.choices
                text += choice.delta.content or ""
                calls += choice.delta.tool_calls or []
                tokens += choice.logprobs.content if choice.logprobs else []
        else:
            (choice,) = (await client.chat.completions.create(**asked)).choices
            text, calls = choice.message.content or "", choice.message.tool_calls or []
            tokens = choice.logprobs.content
        calls = [dict(id=c.id, type="function", function=c.function.model_dump()) for c in calls]
        out.append((text, calls, [(token.token, token.logprob) for token in tokens]))
        messages.append(dict(role="assistant", content=text or None) | (dict(tool_calls=calls) if calls else {}))
        messages += [dict(role="tool", tool_call_id=call["id"], content="55") for call in calls]
        if not calls:
            messages.append(dict(role="user", content="and 1+1="))
        if choice.finish_reason == "length":
            break
    return out


def side_by_side(address, dialogues, **options):
    """What `dialogue` gives for each (number, stream), all at once."""

    async def run():
        async with openai.AsyncOpenAI(base_url=address, api_key=KEY, max_retries=0, timeout=300) as client:
            return await asyncio.gather(*[dialogue(client, *which, **options) for which in dialogues])

    return asyncio.run(run())


def test_answers_have_the_same_bits_alone_and_among_32_dialogues(address):
    crowd = side_by_side(address, [(i, i % 2 == 0) for i in range(32)])
    assert sum(len(turns) for turns in crowd) > 64 and any(calls for turns in crowd for _, calls, _ in turns)
    for number in (0, 1, 17, 30):  # each streamed if it was not, and the other way round
        assert side_by_side(address, [(number, number % 2 == 1)]) == [crowd[number]]
    other = side_by_side(address, [(i, False) for i in range(8)], seed=2)
    assert all(mine[0][2] != its[0][2] for mine, its in zip(crowd, other))


def test_greedy_answers_change_no_bit_of_others_and_follow_no_seed(address):
    async def run(greedy, dialogues):
        async with openai.AsyncOpenAI(base_url=address, api_key=KEY, max_retries=0) as client:
            asked = dict(model="policy", messages=[{"role": "user", "content": "21+22="}], temperature=0, tools=TOOLS)
            many = [client.chat.completions.create(**asked, logprobs=True, seed=i) for i in range(greedy)]
            return await asyncio.gather(*many, *[dialogue(client, i, False) for i in range(dialogues)])

    (alone,), drawn, mixed = asyncio.run(run(1, 0)), asyncio.run(run(0, 4)), asyncio.run(run(8, 4))
    assert [answer.choices for answer in mixed[:8]] == [alone.choices] * 8
    assert mixed[8:] == drawn


def test_n_choices_differ_and_the_first_is_that_of_one(ask):
    one, four = (ask("25+26=", temperature=2.0, seed=1, n=n) for n in (1, 4))
    texts = [choice.message.content for choice in four.choices]
    assert [choice.index for choice in four.choices] == [0, 1, 2, 3] and len(set(texts)) > 1
    assert texts[0] == one.choices[0].message.content and one.usage.prompt_tokens == four.usage.prompt_tokens
    assert four.usage.completion_tokens > one.usage.completion_tokens


def test_repeats_without_a_seed_differ_and_are_the_same_set_in_any_order(address, ask):
    def texts(*numbers, **settings):
        return [ask("28+29=", temperature=2.0, n=n, max_tokens=6, **settings).choices for n in numbers]

    seeded = texts(1, 1, seed=1)
    assert seeded[0] == seeded[1] == texts(2, seed=1)[0][:1]
    (six,) = texts(6)
    repeated = [choice.message.content for (choice,) in texts(*[1] * 6)]
    assert repeated == [choice.message.content for choice in six] and len(set(repeated)) > 3
    assert [choice.message.content for choice in texts(6)[0]] != repeated

    async def run():
        async with openai.AsyncOpenAI(base_url=address, api_key=KEY, max_retries=0) as client:
            asked = dict(model="policy", prompt=["2+2=", "2+3="], temperature=2.0, max_tokens=6)
            return await asyncio.gather(*[client.completions.create(**asked) for _ in range(6)])

    crowd = [tuple(choice.text for choice in answer.choices) for answer in asyncio.run(run())]
    client = openai.OpenAI(base_url=address, api_key=KEY, max_retries=0)
    both = [
        client.completions.create(model="policy", prompt=p, temperature=2.0, max_tokens=6, n=6)
        for p in ("2+2=", "2+3=")
    ]
    assert all(sorted(x) == sorted(c.text for c in one.choices) for x, one in zip(zip(*crowd), both))


SMALL = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "small", "schema": SMALL}}
FLIP = [{"type": "function", "function": {"name": "flip", "description": None, "parameters": SMALL}}]


def kinds_of_requests(number):
    """(route, what to ask) of requests of every kind."""
    told = dict(messages=[{"role": "user", "content": f"{20 + number}+21="}], logprobs=True, top_logprobs=number % 4)
    yield "chat", told | dict(tools=TOOLS, n=2)
    yield "chat", told | dict(tools=FLIP, tool_choice="required", parallel_tool_calls=False, max_tokens=60)
    yield "chat", told | dict(response_format=FORM, max_tokens=60) | (dict(tools=FLIP) if number % 2 else {})
    yield "", dict(prompt=[f"{number}+1=", "1+1="], echo=True, logprobs=number % 4, max_tokens=number % 3)
    yield "", dict(prompt=[BY_TEXT[c] for c in f"2+{number}="], logprobs=2)


def test_50_requests_of_all_kinds_have_the_same_bits_alone_and_in_a_crowd(address):
    requests = [kind for number in range(10) for kind in kinds_of_requests(number)]

    async def run(order, at_a_time):
        places, out = asyncio.Semaphore(at_a_time), {}
        async with openai.AsyncOpenAI(base_url=address, api_key=KEY, max_retries=0, timeout=300) as client:
            routes = {"chat": client.chat.completions, "": client.completions}

            async def ask(i):
                route, asked = requests[i]
                async with places:
                    settings = dict(model="policy", seed=i, temperature=[0, 0.7, 1.3][i % 3], max_tokens=24) | asked
                    settings |= dict(top_p=0.9, extra_body=dict(top_k=20, min_p=0.02)) if i % 2 else {}
                    out[i] = (await routes[route].create(**settings)).model_dump_json()

            await asyncio.gather(*map(ask, order))
        return out

    alone, order = asyncio.run(run(range(50), 1)), random.Random(0).sample(range(50), 50)
    assert asyncio.run(run(order, 50)) == asyncio.run(run(order, 13)) == alone
    for i, (_, asked) in enumerate(requests):
        for choice in json.loads(alone[i])["choices"]:
            if asked.get("tool_choice"):
                (call,) = choice["message"]["tool_calls"]
                assert (
                    call["function"]["name"] == "flip" and type(json.loads(call["function"]["arguments"])["n"]) is bool
                )
            if (
                asked.get("response_format")
                and not choice["message"]["tool_calls"]
                and choice["finish_reason"] == "stop"
            ):
                assert json.loads(choice["message"]["content"]) in ({"n": False}, {"n": True})
            tokens = choice["logprobs"]["content"] if "message" in choice else []
            assert all(len(token["top_logprobs"]) <= asked["top_logprobs"] for token in tokens)
            assert i % 5 or i % 2 or all(len(token["top_logprobs"]) == asked["top_logprobs"] for token in tokens)


def test_log_probs_of_a_prompt_are_those_with_which_its_tokens_were_drawn(address):
    client = openai.OpenAI(base_url=address, api_key=KEY, max_retries=0)
    prompt, create = (
        [BY_TEXT[c] for c in "12+34="],
        functools.partial(client.completions.create, model="policy", seed=3),
    )
    (drawn,) = create(prompt=prompt, max_tokens=20, logprobs=3).choices
    ids = prompt + [BY_TEXT.get(text, 1) for text in drawn.logprobs.tokens]
    others = [[BY_TEXT[c] for c in "9" * n] for n in range(1, 30)]
    for prompts in ([ids], [*others, ids]):
        told = create(prompt=prompts, max_tokens=0, echo=True, logprobs=3).choices[-1]
        assert told.logprobs.token_logprobs[6:] == drawn.logprobs.token_logprobs and told.finish_reason == "length"
        assert told.logprobs.top_logprobs[6:] == drawn.logprobs.top_logprobs
        assert told.logprobs.token_logprobs[0] is None and len(told.logprobs.tokens) == len(ids)
        assert told.text.startswith("12+34=" + drawn.text) and told.logprobs.text_offset[:3] == [0, 1, 2]
    likeliest = [max(top, key=top.get) for top in drawn.logprobs.top_logprobs]  # as lm-eval finds greedy tokens
    (greedy,) = create(prompt=prompt, max_tokens=1, temperature=0, logprobs=1).choices
    assert greedy.logprobs.tokens == likeliest[:1]


def test_an_answer_says_which_request_and_which_weights_it_is_of(ask):
    one, other = (ask("25+26=", seed=1, temperature=x) for x in (1.0, 1.5))
    assert one.id != other.id and one.id == ask("25+26=", seed=1).id
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
    assert turn(seed, max_tokens=3) == turn(seed, max_completion_tokens=3) == (text[:3], "length", 3)
    end = text.index(text[2])
    assert turn(seed, stop=text[2]) == turn(seed, stop=["no such text", text[2]]) == (text[:end], "stop", end + 1)


def test_a_completion_goes_on_from_a_text_or_from_ids(address):
    client = openai.OpenAI(base_url=address, api_key=KEY, max_retries=0)
    asked = dict(model="policy", max_tokens=6, n=2, logprobs=0, temperature=2.0, seed=1)
    prompts = dict(text="2+2=", ids=[BY_TEXT[c] for c in "2+2="], other="2+3=")
    drawn = {name: client.completions.create(prompt=prompt, **asked) for name, prompt in prompts.items()}
    again = client.completions.create(prompt="2+2=", **asked)
    assert again == drawn["text"] and again.choices != drawn["other"].choices
    greedy = [client.completions.create(prompt=prompts[x], **asked | dict(temperature=0)) for x in ("text", "ids")]
    assert greedy[0].choices == greedy[1].choices and greedy[0].usage == greedy[1].usage
    assert greedy[0].usage.prompt_tokens == 4 and len(greedy[0].choices[0].logprobs.tokens) > 0


@pytest.mark.parametrize(
    ["settings", "status", "why"],
    [
        (dict(top_p=1.5), 400, "top_p=1.5: Input should be less than or equal to 1"),
        (dict(presence_penalty=0.5), 400, "presence_penalty=0.5: must be 0"),
        (dict(logit_bias={"5": 1}), 400, "logit_bias"),
        (dict(temperature=-1), 400, "temperature=-1: Input should be greater"),
        (dict(temperature=1e-5), 400, "at least 0.001"),
        (dict(max_tokens=0), 400, "max_tokens=0: Input should be greater than 0"),
        (dict(stop=""), 400, 'stop.0="": String should have at least 1 character'),
        (dict(n=True), 400, "n=true: Input should be a valid integer"),
        (dict(tool_choice="required"), 400, "tool_choice="),
        (dict(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "sub"}}), 400, "one of the tools"),
        (dict(response_format={"type": "grammar"}), 400, "response_format.type="),
        (dict(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}), 400, "Unsupported"),
        (dict(tools=[{"type": "function", "function": {"description": "x"}}]), 400, "tools.0.function.name="),
        (dict(tools=TOOLS * 129), 400, "tools="),
        (dict(tools=[TOOLS[0] | {"type": "web_search"}]), 400, "tools.0.type="),
        (dict(functions=[{"name": "add"}]), 400, "functions="),
        (
            dict(response_format={"type": "json_schema", "json_schema": {"schema": {"$defs": 5}}}),
            400,
            "wants an object",
        ),
        (dict(messages=[{"role": "user", "content": "9" * 600_000}], n=64), 400, "the most are 33554432 together"),
        (dict(stop=["x"] * 17), 400, "stop="),
        (dict(messages=[{"role": "user", "content": "1"}] * 4097), 400, "messages="),
        (dict(messages=[]), 400, "must end with what the model is told"),
        (
            dict(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
            400,
            '0.type="image_url": Input should be',
        ),
        (
            dict(messages=[{"role": "tool", "tool_call_id": "x", "content": "1"}]),
            400,
            "message 0 is the result of no call",
        ),
        (dict(messages=[{"role": "user", "content": "9" * 300}]), 400, "length is 200 tokens, and the request has 303"),
        (dict(messages=[{"role": "user", "content": "9" * 300_000}]), 400, "the request has more than 199"),
        (dict(messages=[{"role": "user", "content": "9" * 5_000_000}]), 413, "the most are 4194304"),
        (dict(model="gpt"), 404, "no such model as 'gpt'"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_line(ask, settings, status, why):
    with pytest.raises(openai.APIStatusError) as refused:
        ask("1+1=", **settings)
    assert refused.value.status_code == status and why in refused.value.body["message"]
    assert refused.value.body.keys() == {"message", "type", "code", "param"}
    assert refused.value.param in (None, *settings)
    assert (refused.value.code == "context_length_exceeded") == ("maximum context length" in str(refused.value))


def test_keys_routes_and_bodies_are_checked(address):
    with httpx.Client(base_url=address, headers={"Authorization": f"Bearer {KEY}"}) as http:

        def status(method, path, **options):
            answer = http.request(method, path, **options)
            assert answer.is_success or answer.json()["error"].keys() == {"message", "type", "code", "param"}
            return answer.status_code

        assert [model["id"] for model in http.get("/models").json()["data"]] == ["taught/step_000100", "policy"]
        assert http.get("/models/taught/step_000100").json()["id"] == "taught/step_000100"
        assert status("GET", "/models/gpt") == 404
        for key in ("", "Bearer", f"Bearer {KEY}x", KEY.upper()):
            assert status("GET", "/models", headers={"Authorization": key}) == 401
            assert status("POST", "/chat/completions", headers={"Authorization": key}, content=b"{}") == 401
        assert status("GET", address.replace("/v1", "/health"), headers={"Authorization": ""}) == 200
        assert status("POST", "/no_such_route") == 404 and status("GET", "/chat/completions") == 405
        assert status("POST", "/chat/completions", content=b"[") == status("POST", "/completions", content=b"[]") == 400
        assert status("POST", "/completions", content=rb'{"prompt": "a", "stop": "\ud800"}') == 400  # half a character
        for prompt in (
            "",
            [],
            [10**6],
            [-1],
            [[]],
            ["a", 1],
            [""],
            None,
        ):  # an id that does not exist would end the engine
            assert status("POST", "/completions", json=dict(prompt=prompt, max_tokens=1)) == 400
        assert status("POST", "/completions", json=dict(prompt=[1], max_tokens=1)) == 200
        assert status("POST", "/reward", json={"reward": 1}) == 404  # of which session?
        assert status("DELETE", address.replace("/v1", "/s/no_such_session")) == 404


# ---- streams, and clients that are gone


@pytest.fixture(scope="module")
def one_at_a_time(model):
    """A client of a server that answers one request after the other, each with as many tokens as it may have."""
    with serving(model, "--context=1532", "--ignore_eos", "--engine_args=max_running_requests=1") as address:
        yield openai.OpenAI(base_url=address, api_key=KEY, max_retries=0)


LONG = dict(model="policy", max_tokens=1500, temperature=1.5, seed=3)
KINDS = dict(chat=dict(messages=[{"role": "user", "content": "20+20="}], logprobs=True))
KINDS["completion"] = dict(prompt="20+20=", logprobs=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_brings_the_answer_as_it_is_written(one_at_a_time, kind):
    chat = kind == "chat"
    routes = one_at_a_time.chat.completions if chat else one_at_a_time.completions
    create = functools.partial(routes.create, **LONG, **KINDS[kind])
    whole = create()
    began, came, text, drawn = time.monotonic(), [], "", []
    for chunk in create(stream=True, stream_options=dict(include_usage=True)):
        assert chunk.id == whole.id
        if chunk.choices:
            (choice,) = chunk.choices
            new = (choice.delta.content if chat else choice.text) or ""
            came, text = came + [time.monotonic() - began] * bool(new), text + new
            drawn += (choice.logprobs.content if chat else choice.logprobs.token_logprobs) if choice.logprobs else []
    (said,) = whole.choices
    assert text == (said.message.content if chat else said.text)
    assert drawn == (said.logprobs.content if chat else said.logprobs.token_logprobs) and len(drawn) == 1500
    assert choice.finish_reason == said.finish_reason == "length" and chunk.usage == whole.usage
    assert len(came) > 750 and came[0] < came[-1] / 4


def test_a_request_whose_client_is_gone_leaves_the_engine(one_at_a_time):
    create = functools.partial(one_at_a_time.chat.completions.create, **LONG, **KINDS["chat"])

    def seconds(**settings):
        began = time.monotonic()
        create(**settings)
        return time.monotonic() - began

    def leave(client):
        with client.chat.completions.create(**LONG, **KINDS["chat"], stream=True) as stream:
            next(stream)

    leave(one_at_a_time)
    waits = [seconds(max_tokens=1)]
    with pytest.raises(openai.APITimeoutError):
        create(timeout=0.2)
    waits.append(seconds(max_tokens=1))
    host = str(one_at_a_time.base_url).removesuffix("/v1/")
    leave(one_at_a_time.copy(base_url=f"{host}/s/b/v1"))
    assert httpx.delete(f"{host}/s/b", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
    waits.append(seconds(max_tokens=1))
    leave(one_at_a_time.copy(base_url=f"{host}/s/a/v1"))  # in a session a retry would get the answer
    assert max(waits) < seconds(max_tokens=1) / 3


# What a model may write whose end does not say yet what it is; CALLS in the form of each parser.
PARTS = ["é", "😀", "words, " * 9, " ", "\n", "<", "<think>", "<tool", "<tool_call>\n", "[", "{", "st", "stop"]
CALLS = dict(qwen25='<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', pythonic="[add(a=1)]")
CALLS["llama3"] = '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'


@pytest.fixture(scope="module")
def by_bytes():
    """A template whose tokens are bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False, use_regex=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    template = chat.Template(tokenizer, [tokenizer.eos_token_id], {})
    template.first = lambda messages, tools: [0]
    template.checked.add(("add",))
    return template


def streamed(template, ids, tools, parser):
    """(Does a stream bring a turn with the tokens `ids`? The message; the texts that were streamed; errors.)"""
    asks = endpoint.read(dict(messages=[{"role": "user", "content": "a"}], stream=True, stop="stop", tools=tools))

    async def draw(of, stop, most):
        for n in range(1, len(ids)):
            of.hear(dict(output_token_logprobs=[(-1.0, token, None) for token in ids[:n]]))
            await asyncio.sleep(0)
        return ids, [-1.0] * len(ids)

    async def run():
        episode, sampler = episode_of(template, None), types.SimpleNamespace(parser=parser)
        episode.source, episode.parse = draw, functools.partial(AgentSampler._calls, sampler)
        answer = endpoint.Session(chat.Chat(episode, ())).answer(asks[0], b"", False)
        lines = [line async for line in endpoint.events(asks, [answer], {}, template.decode, True)]
        events = [json.loads(line.removeprefix("data: ")) for line in lines if "[DONE]" not in line]
        whole = endpoint.whole(asks, [await answer.task], {}, template.decode, True)["choices"][0]["message"]
        deltas = [event["choices"][0]["delta"] for event in events if "choices" in event]
        texts = [delta["content"] for delta in deltas[1:] if "content" in delta]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert [call.pop("index") for call in calls] == [*range(len(calls))]
        same = (whole["content"] or "", whole.get("tool_calls", [])) == ("".join(texts), calls)
        return same, whole, texts, [event["error"]["message"] for event in events if "error" in event]

    return asyncio.run(run())


@pytest.mark.parametrize("parser", CALLS)
def test_a_stream_gives_the_text_and_cuts_no_character_stop_or_call(by_bytes, parser, monkeypatch):
    rng, halves = random.Random(0), [by_bytes.encode("€")[:2], by_bytes.encode("€")[2:]]
    parts = [*map(by_bytes.encode, [*PARTS, CALLS[parser]]), *halves]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    marks = ["<tool_call>"] if parser == "qwen25" else by_bytes.call_marks
    calls, wrong, chunks, tokens = 0, 0, 0, 0
    for _ in range(150):
        ids = [*itertools.chain(*rng.choices(parts, k=rng.randint(1, 12)))]
        stops = (n for n in range(len(ids)) if "stop" in by_bytes.decode(ids[:n]))
        ids = ids[: next(stops, None)] + [by_bytes.stop_tokens[0]] * rng.randint(0, 1)
        asks = tools * (rng.random() < 0.7)
        monkeypatch.setattr(by_bytes, "call_marks", marks)
        same, whole, texts, errors = streamed(by_bytes, ids, asks, parser)
        assert same and not errors, (whole, texts, errors)
        calls, chunks, tokens = calls + ("tool_calls" in whole), chunks + len(texts), tokens + len(ids)
        monkeypatch.setattr(by_bytes, "call_marks", [])
        wrong += bool(streamed(by_bytes, ids, asks, parser)[3])
    assert calls > 10 and chunks > tokens / 10
    assert wrong > 5  # what was sent too early is an error


# ---- sessions


def test_a_session_continues_its_own_tokens_and_answers_a_retry_as_before(address):
    with httpx.Client(base_url=address.removesuffix("/v1"), headers={"Authorization": f"Bearer {KEY}"}) as http:

        def turn(session, messages, retry=0):
            asked = dict(messages=messages, logprobs=True, temperature=1.5, seed=session)
            where, header = f"/s/{session}/v1/chat/completions", {"x-stainless-retry-count": str(retry)}
            answer = http.post(where, json=asked, headers=header).json()
            return answer["choices"][0], answer["usage"]["prompt_tokens"]

        told = [{"role": "user", "content": "20+20="}]
        for session in range(50):  # until one ends its turn by itself, after a while
            first, begin = turn(session, told)
            written = len(first["logprobs"]["content"])
            if first["finish_reason"] == "stop" and written > 4:
                break
        assert first["finish_reason"] == "stop"
        assert turn(session, told, retry=1) == turn(session, told, retry=2) == (first, begin)
        fork, _ = turn(session, told)  # not marked as a retry: it begins another dialogue, whose noise is another
        assert fork["logprobs"] != first["logprobs"]
        more = [*told, first["message"], {"role": "user", "content": "ok"}]
        between = len(["<user>", "o", "k", "<eos>", "<assistant>"])
        assert turn(session, more)[1] == begin + written + between
        where = f"/s/{session}/v1/reward"
        assert http.post(where, json={"reward": 0.5}).json() == {"reward": 0.5}
        assert http.post(where, json={"reward": "1"}).status_code == 400
        assert [http.delete(f"/s/{session}").status_code for _ in range(2)] == [200, 404]


def test_a_thousand_sessions_are_open_at_once(address):
    async def run():
        # httpx takes 25 ms of this client's time for a request, our side 3 ms
        pool, headers = aiohttp.TCPConnector(limit=0), {"Authorization": f"Bearer {KEY}"}
        async with aiohttp.ClientSession(connector=pool, headers=headers) as http:

            async def turn(where, messages):
                asked = dict(messages=messages, logprobs=True, max_tokens=6, tools=TOOLS)
                async with http.post(f"{where}/v1/chat/completions", json=asked) as answer:
                    assert answer.status == 200, await answer.text()
                    return (await answer.json())["choices"][0]

            async def end(where):
                async with http.delete(where) as answer:
                    return answer.status

            host = address.removesuffix("/v1")
            told = [[{"role": "user", "content": f"{i}="}] for i in range(1000)]
            sessions = [f"{host}/s/of_{i}" for i in range(1000)]
            first = await asyncio.gather(*map(turn, sessions, told))
            # Now all are open, and some go on; what they say is what they say when nobody else asks.
            ended = [i for i in range(1000) if first[i]["finish_reason"] == "stop"][:16]
            more = [[*told[i], first[i]["message"], {"role": "user", "content": "1+1="}] for i in ended]
            second = await asyncio.gather(*[turn(sessions[i], messages) for i, messages in zip(ended, more)])
            assert [await turn(host, told[i]) for i in range(0, 1000, 100)] == first[::100]
            for i, messages, answer in zip(ended, more, second):
                again = f"{host}/s/again_{i}"
                assert (await turn(again, told[i]), await turn(again, messages)) == (first[i], answer)
            assert len(ended) == 16 and len({answer["logprobs"]["content"][0]["logprob"] for answer in first}) > 500
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

    journal = types.SimpleNamespace(entries={}, write=lambda entry: None)
    return chat.Episode(
        DEFAULTS, template, f"sample {sample}", sample, ["rl", sample], draw, lambda _, x: (x, []), journal
    )


def asked_of_a_script(template, source, requests):
    """The results of `requests(post, session)`, where post(text or messages, retry=0) asks in a session of its own."""

    async def run():
        session = endpoint.Session(chat.Chat(episode_of(template, source), ()))
        server = endpoint.Endpoint(endpoint.listen("127.0.0.1", 0), KEY, ["policy"], template.decode)
        server.sessions["x"] = session
        async with httpx.AsyncClient(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}) as http:

            async def post(told, retry=0, status=200):
                messages = [{"role": "user", "content": told}] if isinstance(told, str) else told
                headers = {"x-stainless-retry-count": str(retry)}
                answer = await http.post("/s/x/v1/chat/completions", json=dict(messages=messages), headers=headers)
                assert answer.status_code == status, answer.text
                return answer.json()["choices"][0]["message"] if status == 200 else answer.json()["error"]["message"]

            out = await requests(post, session)
        await server.close()
        return out

    return asyncio.run(run())


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
    assert [answer["content"] for answer in answers] == ["answer 1"] * 2 and len(drawn) == 1


def test_the_names_of_dialogues_do_not_follow_the_order_of_arrival(template):
    async def source(of):
        return of.messages[-1]["content"].upper()

    def paths(order):
        async def requests(post, session):
            for told in order:
                await post(told)
            return {(chat.messages[0]["content"], chat.path) for chat in session.dialogues}

        return asked_of_a_script(template, source, requests)

    found = [paths(order) for order in itertools.permutations(["a", "a", "b"])]
    assert len(found[0]) == 3 and all(one == found[0] for one in found)
    assert [n for _, (_, n) in sorted(found[0])] == [0, 1, 0] and found[0] != paths(["a", "a", "c"])


def test_a_history_goes_on_or_forks_and_nothing_sampled_is_encoded_again(template):
    async def source(of):
        return "  Spaces"  # a client that tidies up changes the history

    async def requests(post, session):
        told = [{"role": "user", "content": "a"}]
        told += [await post(told), {"role": "user", "content": "b"}]
        await post(told)
        (one,) = session.dialogues
        assert len(one.turns) == 2 and one.ids[: one.turns[0].end] == [
            *template.first(told[:1], []),
            *template.turn("  Spaces"),
        ]
        assert one.ids[one.turns[0].end : one.turns[1].start] == template.next(
            told[2:], [], one.ids[one.turns[0].end - 1]
        )
        assert [one.ids[i] for i, mine in enumerate(one.mask) if mine] == 2 * template.turn("  Spaces")
        told[1] = told[1] | dict(content="Spaces")
        await post(told)
        one, fork = session.dialogues
        assert len(one.turns) == 2 and fork.ids[: fork.turns[0].start] == template.first(told, [])
        assert fork.mask.count(True) == len(template.turn("  Spaces"))

    asked_of_a_script(template, source, requests)


def test_two_ways_on_from_one_turn_at_a_time_are_an_error(template):
    gate = []

    async def source(of):
        if len(of.turns):
            await gate[0].wait()
        return "x"

    async def requests(post, session):
        gate.append(asyncio.Event())
        told = [{"role": "user", "content": "a"}]
        told.append(await post(told))
        first = asyncio.ensure_future(post([*told, {"role": "user", "content": "b"}]))
        while not session.busy:
            await asyncio.sleep(0.01)
        error = await post([*told, {"role": "user", "content": "c"}], status=400)
        gate[0].set()
        await first
        await post([*told, {"role": "user", "content": "c"}])  # one after the other they may
        return error, str(session.failed.result()), len(session.dialogues)

    error, failed, dialogues = asked_of_a_script(template, source, requests)
    why = "two requests at a time go on from one turn: 'c' is the second; ask for one after the other"
    assert error == failed == f"sample 0: {why}"
    assert dialogues == 2


def served_by_a_script(template, requests):
    """The result of `requests(http, server)`, with a client of a server whose model says "x"."""

    async def source(of):
        return "x"

    async def run():
        serves = lambda asked, i, of_chat: episode_of(template, source)  # noqa: E731
        server = endpoint.Endpoint(endpoint.listen("127.0.0.1", 0), KEY, ["policy"], template.decode, serves)
        async with httpx.AsyncClient(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}) as http:
            out = await requests(http, server)
        await server.close()
        return out

    return asyncio.run(run())


ASKED = dict(json=dict(messages=[{"role": "user", "content": "a"}]))


def test_a_sessions_key_is_good_for_itself_alone_and_not_for_its_reward(template):
    async def requests(http, server):
        await http.post("/s/b/v1/chat/completions", **ASKED)
        out = []
        for key in (server.key_of("a"), server.key_of("a", "reward")):
            header = {"Authorization": f"Bearer {key}"}
            for path in ("/s/a/v1/chat/completions", "/s/b/v1/chat/completions", "/v1/chat/completions"):
                out.append((await http.post(path, headers=header, **ASKED)).status_code)
            for path in ("/s/a/v1/reward", "/s/b/v1/reward"):
                out.append((await http.post(path, headers=header, json=dict(reward=1))).status_code)
        return out

    asked, rewarded = [200, 401, 401, 401, 401], [401, 401, 401, 200, 401]
    assert served_by_a_script(template, requests) == asked + rewarded


def test_half_a_request_is_given_up_and_a_whole_one_is_not(template, monkeypatch):
    monkeypatch.setattr(endpoint, "HALF_REQUEST", 0.3)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n"

    async def requests(http, server):
        streams = [await asyncio.open_connection(*server.url[7:].split(":")) for _ in range(4)]
        whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        for (_, writer), part in zip(streams, (b"", head[:9], head + b"\r\n{", whole)):
            writer.write(part)
        reads = [asyncio.ensure_future(reader.read()) for reader, _ in streams]  # to the connection's end
        await asyncio.sleep(0.6)
        closed = [read.done() for read in reads]
        for _, writer in streams:
            writer.close()
        return closed

    assert served_by_a_script(template, requests) == [True, True, True, False]


def test_calls_are_counted_before_anything_is_done_for_them(monkeypatch):
    """Not by their ids, of which all may have one."""
    monkeypatch.setattr(endpoint, "numbered", None)  # would be a TypeError
    calls = [dict(id="a", function=dict(name="f"))] * (endpoint.MOST_MESSAGES + 1)
    with pytest.raises(endpoint.Refusal, match="more than 4096 calls"):
        endpoint.read(dict(messages=[dict(role="assistant", tool_calls=calls), dict(role="user", content="a")]))


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
    two = b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    one = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"

    async def run():
        server = endpoint.Endpoint(endpoint.listen("127.0.0.1", 0), KEY, ["policy"], str)
        reader, writer = await asyncio.open_connection(*server.url[7:].split(":"))
        writer.write(two + one)
        said = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        async with httpx.AsyncClient(base_url=server.url) as http:
            keys = (KEY, f"Basic {KEY}", f"Bearer {KEY}")
            answers = [await http.get("/v1/models", headers={"Authorization": key}) for key in keys]
        await server.close()
        return said, answers

    said, answers = asyncio.run(run())
    assert said.count(b"HTTP/1.1 ") == 1 and said.startswith(b"HTTP/1.1 400") and b"a request has one of them" in said
    assert [answer.status_code for answer in answers] == [401, 401, 200]
    assert "must be 'Authorization: Bearer <OPENAI_API_KEY>'" in answers[0].json()["error"]["message"]


def test_what_is_too_long_is_refused_before_it_is_rendered(template, monkeypatch):
    monkeypatch.setattr(template, "first", None)  # would be a TypeError

    async def requests(http, server):
        asked = dict(json=dict(messages=[{"role": "user", "content": "a" * 100_000}]))
        answer = await http.post("/v1/chat/completions", **asked)
        return answer.status_code, answer.json()["error"]["code"]

    assert served_by_a_script(template, requests) == (400, "context_length_exceeded")


def test_a_refused_request_ends_the_run_unless_it_lacks_the_key():
    """Else a framework could swallow the refusal, and make it a reward of 0."""
    told = '{"messages": [{"role": "user", "content": "%s"}]}'
    bodies = {"\\ud83d": 400, "a" * 2**22: 413, 'a"}], "tool_choice": "required", "x": [{"y": "': 400}

    async def run():
        server, failed = endpoint.Endpoint(endpoint.listen("127.0.0.1", 0), KEY, ["policy"], str), []
        root = types.SimpleNamespace(episode=types.SimpleNamespace(where="here"))
        server.sessions["s"] = types.SimpleNamespace(fail=failed.append, root=root)
        async with httpx.AsyncClient(base_url=server.url) as http:
            for key, bad in itertools.product((KEY, "another"), [*map(told.__mod__, bodies), '{"messages": []}', "["]):
                headers = {"Authorization": f"Bearer {key}"}
                answer = await http.post("/s/s/v1/chat/completions", content=bad, headers=headers)
                yield key == KEY, answer.status_code, bool(failed)
                failed.clear()
        await server.close()

    async def results():
        return [result async for result in run()]

    found = asyncio.run(results())
    assert found[:5] == [(True, status, True) for status in (400, 413, 400, 400, 400)]
    assert found[5:] == [(False, 401, False)] * 5


def test_nulls_and_empty_arguments_are_as_if_absent():
    function = {"name": "add", "description": None, "parameters": None, "strict": None}
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": ""}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
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
        names = ["/s/a", "/s/b", "/s/c", "/s/a"]
        codes = [(await http.post(f"{name}/v1/chat/completions", **ASKED)).status_code for name in names]
        codes.append((await http.delete("/s/b")).status_code)
        codes.append((await http.post("/s/c/v1/chat/completions", **ASKED)).status_code)
        monkeypatch.setattr(endpoint, "IDLE", 0)  # now a session that nobody uses makes room
        codes.append((await http.post("/s/d/v1/chat/completions", **ASKED)).status_code)
        return codes, sorted(server.sessions)

    assert served_by_a_script(template, requests) == ([200, 200, 429, 200, 200, 200, 200], ["c", "d"])


def test_a_history_may_have_turns_that_are_not_the_models(template):
    async def source(of):
        return "again"

    async def requests(post, session):
        told = [dict(role=role, content=role[0]) for role in ("user", "assistant", "user")]
        told += [await post(told), dict(role="user", content="u")]
        await post(told)
        (dialogue,) = session.dialogues
        return [again.record_of(dialogue)]

    lines = [*Agent.transcript(None, asked_of_a_script(template, source, requests))]
    assert [line.split(":")[0].split()[-1] for line in lines] == ["user", "assistant"] * 2 + ["user", "assistant"]
    assert sum("'again'" in line for line in lines) == 2


# ---- clients inside the process


@pytest.mark.parametrize("wrong", [{}, dict(messages=[]), dict(messages=[{"role": "user", "content": "9" * 9999}])])
def test_an_agent_uses_openais_client_and_a_wrong_request_is_no_zero(template, wrong):
    async def source(of):
        return of.messages[-1]["content"].upper()

    async def solve(chat, row):
        async with chat.openai() as client:
            asked = dict(model="policy", messages=[{"role": "user", "content": "a"}])
            first = await client.chat.completions.create(**asked)
            try:
                await client.chat.completions.create(**asked | wrong)
            except openai.APIStatusError:
                pass  # as a framework might
            return float(first.choices[0].message.content == "A")

    episode = episode_of(template, source)
    if not wrong:
        assert asyncio.run(episode.play(solve, {})) == 1 and [len(c.turns) for c in episode.chats] == [1, 1]
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
    ["code", "what"],
    [
        (ASK + "print('so')\nprint(0.25)", 0.25),
        (ASK + "reward(2)\nprint('no number')", 2.0),
        (ASK + "print(json.loads(os.environ['ROW'])['n'] + ('RANK' in os.environ))", 7.0),
        (ASK + "print('half')", "its last line of output must be the reward, and is 'half'"),
        (ASK + "print('nan')", "its last line of output must be the reward, and is 'nan'"),
        (ASK + "raise KeyError('why')", "ended with status 1: KeyError: 'why'"),
        (ASK + "print(ask('9' * 999))", "the prompt has"),
        ("print(1)", "returned without a turn of the model"),
    ],
)
def test_a_program_gives_a_reward_or_ends_the_run_in_one_line(template, monkeypatch, tmp_path, code, what):
    monkeypatch.setenv("RANK", "0")

    async def source(of):
        return "x"

    def play():
        Path(tmp_path, "agent.py").write_text(code)
        solve, _ = again.load_agent(f"python {tmp_path}/agent.py")
        return asyncio.run(episode_of(template, source, sample=3).play(solve, dict(n=7)))

    if isinstance(what, float):
        assert play() == what
        return
    with pytest.raises(chat.AgentError, match="sample 3") as ended:
        play()
    assert what in str(ended.value) and "\n" not in str(ended.value)


def test_a_turn_is_trained_on_although_its_program_did_not_wait_for_it(template, tmp_path):
    code = ASK.replace("headers=headers)", "headers=headers, timeout=0.2)").replace('\nask("a")', "")
    code += "try:\n    ask('a')\nexcept httpx.ReadTimeout:\n    print(1)"
    Path(tmp_path, "agent.py").write_text(code)

    async def source(of):
        await asyncio.sleep(2)
        return "x"

    episode, (solve, _) = episode_of(template, source), again.load_agent(f"python {tmp_path}/agent.py")
    assert asyncio.run(episode.play(solve, {})) == 1
    assert [turn.text for dialogue in episode.chats for turn in dialogue.turns] == ["x"]


def test_a_program_that_is_not_there_is_named(capsys):
    for command, why in (("no_such_program x", "no program 'no_such_program'"), ("python 'x", "No closing quotation")):
        with pytest.raises(SystemExit):
            again.load_agent(command)
        assert why in capsys.readouterr().err


def test_programs_and_their_children_end_with_a_killed_rank(model, tmp_path):
    sleeps = "import time; time.sleep(1000)"
    code = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {sleeps!r}, {str(tmp_path)!r}])\n"
    Path(tmp_path, "agent.py").write_text(code + "time.sleep(1000)")
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


def test_a_run_of_programs_learns_and_streams_do_not_change_its_ledger(model, template, tmp_path):
    """What they draw under a grammar has no loss; a replay in which it has is the control: its log-probs differ."""
    code = Path(example.__file__).read_text()
    streams = code.replace("completions.create(", "completions.stream(")
    streams = streams.replace(").choices", ").__enter__().get_final_completion().choices")
    for name, text in dict(a=code, b=streams).items():
        Path(tmp_path, f"{name}.py").write_text(text.replace("\n    print(float(", OBJECT))
    flags = [f"--init_from={model}", "--warmup_sft_steps=0", "--checkpoint_every=0"]
    flags += "--prompts_per_step=2 --group_size=3 --max_steps=2 --learning_rate=1e-3".split()
    flags += [f"--agent=python {tmp_path}/a.py"]
    for name, steps in dict(a=2, b=1).items():
        own = f"--agent=python {tmp_path}/{name}.py", f"--max_steps={steps}"
        finish(tmp_path / name, *SIZES, *flags, *own, launch=launch_warm)
    ledgers = [lines(tmp_path / name, "ledger.jsonl") for name in "ab"]
    assert len(ledgers[0]) == 2 and ledgers[1] == ledgers[0][:1]
    metrics = lines(tmp_path / "a", "metrics.jsonl", "rl")
    assert any(m["reward_std"] > 0 and m["grad_norm"] > 1e-3 for m in metrics) and len(metrics) == 2
    assert any(m["turns_mean"] > 1 and m["calls_mean"] > 0 for m in metrics)
    assert all(m["turn_reward_mean"] == m["reward_mean"] / m["turns_mean"] for m in metrics)
    assert all(m["logprob_mismatch_tokens"] == m["forks_mean"] == 0 for m in metrics)
    drawn = []  # under a grammar
    for tensors, meta in read_groups(tmp_path / "a"):
        row = tensors["prompt_tokens"].tolist()
        lengths = tensors["lengths"].tolist()
        rows = zip(*(tensors[name].split(lengths) for name in ("tokens", "loss_mask")))
        for (tokens, mask), (dialogue,) in zip(rows, meta["episodes"]):
            ids = template.first([{"role": "user", "content": meta["row"]["prompt"]}], TOOLS)
            assert row == ids[: len(row)]
            ids = row + tokens.tolist()
            mine = [False] * len(row) + mask.tolist()
            messages, free = dialogue["messages"], 0
            for turn in dialogue["turns"]:
                written = mine[turn["start"] : turn["end"]]
                bound = messages[turn["message"] - 1]["content"] == "1+1="
                drawn += [turn] * bound
                free += len(written) * (not bound)
                assert not any(written) if bound else all(written)
            assert sum(mine) == free
            for before, after in zip(dialogue["turns"], dialogue["turns"][1:]):
                told = messages[before["message"] + 1 : after["message"]]
                assert ids[before["end"] : after["start"]] == template.next(told, TOOLS, ids[before["end"] - 1])
    objects = [json.loads(turn["text"]) for turn in drawn if not turn["truncated"]]
    assert len(objects) > 4 and all(x in ({"n": False}, {"n": True}) for x in objects)
    for path in tmp_path.glob("a/queue/rl_*/group_*"):
        tensors, meta = sync.read_group(path)
        sync.write_group(path, tensors | dict(loss_mask=tensors["turn"] >= 0), meta)
    status, output = launch_warm(tmp_path / "c", *SIZES, *flags, *replay_of(tmp_path / "a"))
    assert status == 2 and "log-probs differ; --strict=False goes on" in error_line(output)
