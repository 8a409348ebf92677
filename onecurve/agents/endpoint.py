"""
OpenAI's protocol over HTTP: for agents that use its clients, and to serve a model (tools/serve.py).

    python train_grpo.py --agent="python examples/client.py" ..      # a process per sample
    async with chat.openai() as client: ..                           # or a client inside the process

A program finds in its environment OPENAI_BASE_URL (its own session), OPENAI_API_KEY and ROW, its row as JSON, and
otherwise only the variables in INHERITED; give it more by a script that reads them from a file. Its last line of output
is the sample's reward, unless it has sent one to POST /reward, with the key in REWARD_KEY. A program that fails, or
gives no number, ends the run. A program's own requests to the outside are in no journal. Each session has its own keys:
no program can send requests or a reward in another's name.

In a session (/s/<name>/v1) tokens are only ever appended: a request whose messages begin with those of a dialogue, up
to a turn of the model, continues from the sampled tokens themselves. Any other history begins a new dialogue, a row
that the metric `forks_mean` counts. A dialogue's name is the hash of its beginning and of how often the sample has
begun so; its noise follows from the name, and the rows are in the names' order. So programs may send requests side by
side, but not two at a time that continue the same turn. A retry that says so (x-stainless-retry-count) gets the
recorded answer, which is always completed, even if nobody waits for it.

Where a model is served, a request's noise follows from its seed, its content and the number of the choice: the same
request always gets the same answer, bit for bit, whatever other requests there are, and as a stream, too. Without a
seed the k-th of equal requests continues with the choices after those of the one before: repeats differ, but together
they are the same in any order. A request whose client is gone leaves the engine. Sessions exist there, too; they begin
with their first request, whose seed and sampling rule they keep, and end with DELETE /s/<name>.

A grammar enforces tool_choice and response_format. In a run the tokens of such a turn have no loss, as they are of
another distribution than the policy's; the sampling rule is the run's, and other settings of a request are
ignored. A served model honours temperature (0: greedy), top_p, top_k and min_p, and refuses what it cannot draw
exactly. Log-probs are those of the distribution that a token was drawn from; those of a prompt (`echo`) are of
temperature 1 and of all tokens. No answer has a clock in it: `created` is 0.

Routes: POST /v1/chat/completions, /v1/completions (not in sessions), /v1/reward (sessions); GET /v1/models, /health.
"""

import asyncio
import contextlib
import functools
import hashlib
import hmac
import itertools
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

import h11
import pydantic
import pydantic_core
import uvicorn
from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from configurator import require
from kernels import Sampling
from onecurve.agents.chat import AgentError, Chat, TooLong, numbered, told_calls, told_result, told_turn, told_user
from onecurve.run.own import describe
from rewards import finite

INHERITED = "PATH HOME USER LANG LC_ALL TZ TMPDIR PYTHONPATH PYTHONHASHSEED LD_LIBRARY_PATH VIRTUAL_ENV".split()
# Bounds of a request, checked before anything is done for it.
MOST_BYTES = 4 * 2**20
MOST_ANSWERED = 2**25  # bytes times choices
MOST_MESSAGES = 4096  # and calls in them
MOST_TOOLS = 128
MOST_STOPS = 16
MOST_STOP = 256  # characters of each
MOST_SCHEMA = 2**16  # characters of a grammar's
MOST_CHOICES = 1024  # of all its prompts
MOST_TOP = 20  # likeliest tokens
MOST_ECHOED = 2**18  # log-probs of prompts
MOST_OPEN = 4096  # sessions, and requests outside of one
MOST_COUNTED = 2**17  # requests without a seed that the server counts
IDLE = 600.0  # seconds after which a session ends, if others need its place
HALF_REQUEST = 30.0  # seconds after which half a request is given up
TAIL = 2**16  # bytes of a program's output that are kept: its end
MOST_PROGRAMS = 32  # at a time, of an engine: each is a process with its libraries
IMPOSSIBLE = -1e30  # a log-prob below that: a grammar forbids the token
OBJECT = {"type": "object"}  # the JSON schema of any
HALF = "\ufffd"  # what half a character is decoded to
WINDOW = 64  # most tokens of a stream that are decoded again
POLICY = "policy"  # the model's name in a run; a served model has its folder's, too
# A served model refuses a request with other values than these.
EXACT = dict(
    presence_penalty=0, frequency_penalty=0, repetition_penalty=1, logit_bias={}, best_of=1, suffix="", functions=[],
    min_tokens=0, ignore_eos=False, stop_token_ids=[], chat_template_kwargs={},
)  # fmt: skip

# Ends the programs of a rank that has died, and what they have started: its id is in their environment. A program that
# does not have it yet, between fork and exec, still holds the pipe's other end.
GUARD = """
import os, signal, sys
sys.stdin.read()
mark = b"ONECURVE_GUARD=%d\\0" % os.getpid()
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if mark in open(f"/proc/{pid}/environ", "rb").read():
            os.killpg(os.getpgid(int(pid)), signal.SIGKILL)
    except OSError:
        pass
"""


class Refusal(Exception):
    """A request that is answered with an error. status: HTTP's; code, param: OpenAI's."""

    def __init__(self, status, message, code=None, param=None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def content(self):
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": dict(message=str(self), type=kind, code=self.code, param=self.param)}


def refused(key, value, why):
    """The Refusal of a request's value. key: 'tools.0.function.name', for example."""
    return Refusal(400, f"{key}={json.dumps(value)[:80]}: {why}", "invalid_value", key.partition(".")[0])


def refusal_of(error):
    """The Refusal that tells a client of an exception."""
    if isinstance(error, HTTPException):
        return Refusal(error.status_code, f"no such route: {error.detail}")
    return error if isinstance(error, Refusal) else Refusal(500, describe(error))


# ------------------------------------------------------------------------------------------------------------------
# requests


FAST = Field(fail_fast=True)  # one error of a long list is enough
Stop = Annotated[str, Field(min_length=1, max_length=MOST_STOP)]
Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[pydantic.NonNegativeInt], Field(min_length=1, fail_fast=True)]


class Body(pydantic.BaseModel, strict=True):
    """JSON of a request. null is as if absent, and what no field names is ignored."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def without_nulls(cls, body):
        return {key: x for key, x in body.items() if x is not None} if isinstance(body, dict) else body


class Function(Body, extra="allow"):
    name: str
    description: str = ""
    parameters: dict = {}


class Tool(Body, extra="allow"):
    type: Literal["function"] = "function"
    function: Function


class Schema(Body):
    content: dict = Field(OBJECT, alias="schema")


class Format(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: Schema = Schema()


class Options(Body):
    include_usage: bool = False  # at a stream's end


class Part(Body):
    type: Literal["text", "refusal"] = "text"
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


class CalledFunction(Body):
    name: str
    arguments: Annotated[pydantic.Json[dict], BeforeValidator(lambda text: text or "{}")] = {}


class Call(Body):
    id: str
    function: CalledFunction


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], FAST] = ""
    tool_calls: Annotated[list[Call], FAST] = []
    tool_call_id: str = ""


def schemas_of(tools):
    """A request's Tools for a Chat: JSON schemas, as they were sent."""
    return [tool.model_dump(exclude_unset=True) for tool in tools]


def messages_of(messages):
    """
    A request's Messages as a Chat has them: contents are texts, and the i-th call of the k-th turn is call_<k>_<i>,
    whatever the client made of it. Raises ValueError.
    """
    out = []
    calls_by_id = {}
    turns = 0
    if sum(len(m.tool_calls) for m in messages) > MOST_MESSAGES:
        raise ValueError(f"more than {MOST_MESSAGES} calls")
    for m in messages:
        content = m.content if isinstance(m.content, str) else "".join(part.text for part in m.content)
        new = {"role": "system" if m.role == "developer" else m.role, "content": content}
        if m.role == "tool":
            if m.tool_call_id not in calls_by_id:
                raise ValueError(f"message {len(out)} is the result of no call before it")
            new = told_result(calls_by_id[m.tool_call_id], content)
        elif m.role == "assistant":
            calls = numbered(turns, [(call.function.name, call.function.arguments) for call in m.tool_calls])
            calls_by_id |= {told.id: call for told, call in zip(m.tool_calls, calls)}
            new = told_turn(content, calls)
            turns += 1
        out.append(new)
    if not out or out[-1]["role"] == "assistant":
        raise ValueError("must end with what the model is told")
    return out


def listed(x):
    """Strings, or prompts, of which there may be one that is in no list."""
    return x if isinstance(x, list) and all(isinstance(i, (str, list)) for i in x) else [x]


class Asked(Body):
    """A request, for one of its prompts. messages, tools: as a Chat has them."""

    model: str = ""
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS), AfterValidator(schemas_of)] = []
    tool_choice: Literal["auto", "none", "required"] | Tool = "auto"
    parallel_tool_calls: bool = True
    response_format: Format = Format()
    stop: Annotated[list[Stop], Field(max_length=MOST_STOPS), BeforeValidator(listed)] = []
    temperature: float = Field(1.0, ge=0, le=1e3)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = None
    n: int = Field(1, gt=0, le=MOST_CHOICES)
    stream: bool = False
    stream_options: Options = Options()

    @property
    def sampling(self):
        return Sampling(self.temperature, self.top_p, self.top_k, self.min_p)

    @property
    def content(self):
        """The fields that determine the answer, however it is sent."""
        return self.messages, self.tools, self.schema, self.stop, self.most, self.sampling, self.seed, self.n

    @functools.cached_property
    def schema(self):
        """
        The JSON schema of what tool_choice and response_format let the model write, as a text; "": any text. Calls are
        then [{"name": .., "parameters": {..}}], whatever the model's own format of calls is. Raises Refusal.
        """
        shared = {}

        def hoisted(schema):  # its definitions are found from the root
            definitions = schema.get("$defs") or {}
            if not isinstance(definitions, dict):
                raise Refusal(400, "$defs: wants an object", "invalid_value")
            for name, definition in definitions.items():
                if shared.setdefault(name, definition) != definition:
                    raise Refusal(400, f"$defs: two schemas of the name {name!r}", "invalid_value")
            return {key: value for key, value in schema.items() if key != "$defs"}

        form = self.response_format
        named = self.tool_choice.function.name if isinstance(self.tool_choice, Tool) else None
        functions = [tool["function"] for tool in self.tools if named in (None, tool["function"]["name"])]
        forced = named is not None or self.tool_choice == "required"
        if forced and not functions:
            raise refused("tool_choice", named or self.tool_choice, "wants auto, none, required or one of the tools")
        if form.type == "text" and not forced:
            return ""
        calls = [{"name": {"enum": [f["name"]]}, "parameters": hoisted(f.get("parameters", OBJECT))} for f in functions]
        calls = [dict(type="object", properties=p, required=[*p], additionalProperties=False) for p in calls]
        array = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
        if named is not None or not self.parallel_tool_calls:
            array["maxItems"] = 1
        answer = form.json_schema.content if form.type == "json_schema" else OBJECT
        ways = [array] * bool(calls) + [hoisted(answer)] * (not forced)
        return json.dumps((ways[0] if len(ways) == 1 else {"anyOf": ways}) | ({"$defs": shared} if shared else {}))


class AskedChat(Asked):
    messages: Annotated[list[Message], Field(max_length=MOST_MESSAGES), AfterValidator(messages_of)]
    logprobs: bool = False
    top: int = Field(0, ge=0, le=MOST_TOP, alias="top_logprobs")  # likeliest tokens, for each token
    most: int | None = Field(None, gt=0, validation_alias=AliasChoices("max_completion_tokens", "max_tokens"))
    echo: ClassVar = False


class AskedCompletion(Asked):
    prompt: Annotated[
        list[Text | Ids], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True), BeforeValidator(listed)
    ]
    top: int | None = Field(None, ge=0, le=MOST_TOP, alias="logprobs")
    most: int | None = Field(None, ge=0, alias="max_tokens")
    echo: bool = False  # the prompt, too

    @property
    def logprobs(self):
        return self.top is not None


def read(body, chat=True, exact=False):
    """
    Parses the JSON of a request to /chat/completions or (chat=False) to /completions: an Asked for each of its prompts.
    exact: for a served model, which refuses settings that it does not draw with. Raises Refusal.
    """
    for key, only in EXACT.items() if exact else ():
        if body.get(key) not in (None, only):
            raise refused(key, body[key], f"must be {json.dumps(only)}; we draw by no other")
    try:
        asked = (AskedChat if chat else AskedCompletion).model_validate(body)
    except pydantic.ValidationError as error:
        told = max(error.errors(), key=lambda told: len(told["loc"]))  # of a union's kinds the one that fits longest
        raise refused(".".join(map(str, told["loc"])), told["input"], told["msg"]) from None
    if asked.tool_choice == "none" or not chat:
        asked.tools = []
    if 0 < asked.temperature < 1e-3:
        raise refused("temperature", asked.temperature, "0, for the likeliest token, or at least 0.001")
    if asked.echo and asked.stream:
        raise refused("echo", True, "not as a stream")
    if len(asked.schema) > MOST_SCHEMA:
        raise Refusal(400, f"a schema of {len(asked.schema)} characters; the most are {MOST_SCHEMA}", "invalid_value")
    prompts = [asked.messages] if chat else [[told_user(prompt)] for prompt in asked.prompt]
    if len(prompts) * asked.n > MOST_CHOICES:
        raise refused("n", asked.n, f"with {len(prompts)} prompts; the most are {MOST_CHOICES} choices")
    if asked.echo and (size := sum(map(len, asked.prompt))) * asked.n * (1 + (asked.top or 0)) > MOST_ECHOED:
        why = f"{size} characters or ids, times n, times 1 + logprobs; the most are {MOST_ECHOED}: send fewer prompts"
        raise refused("echo", True, why)
    return [asked.model_copy(update=dict(messages=messages)) for messages in prompts]


def content_of(message):
    """The fields by which two messages are compared."""
    return message["role"], message["content"], [call["function"] for call in message.get("tool_calls", ())]


# ------------------------------------------------------------------------------------------------------------------
# answers


class Token(NamedTuple):
    id: int
    logprob: float | None  # None: a prompt's first
    top: list  # [(id, log-prob)] of the likeliest, if requested


class Choice(NamedTuple):
    text: str
    calls: list  # of ToolCall
    finish: str
    tokens: list  # of Token
    told: list  # the Tokens before them; log-probs are known with `echo` only


def tokens_of(meta, kind, begin=0):
    """The Tokens that SGLang's `meta_info` has, from the one at `begin`: kind 'output', or 'input' for the prompt's."""
    pairs = meta[f"{kind}_token_logprobs"][begin:]
    tops = (meta.get(f"{kind}_top_logprobs") or ())[begin:] or [None] * len(pairs)
    known = [[(i, x) for x, i, _ in top or () if x > IMPOSSIBLE] for top in tops]
    return [Token(i, x, top) for (x, i, _), top in zip(pairs, known)]


def calls_of(choice):
    """The calls as OpenAI has them."""
    return told_calls([call._replace(arguments=json.dumps(call.arguments)) for call in choice.calls])


def logprobs_of(asked, tokens, decode, chat, before=0):
    """before: number of characters before these tokens."""
    if not asked.logprobs:
        return None
    text = functools.lru_cache(lambda i: decode([i]))
    if chat:
        of = lambda i, x: dict(token=text(i), logprob=x, bytes=[*text(i).encode()])  # noqa: E731
        return dict(content=[of(t.id, t.logprob) | dict(top_logprobs=[of(*pair) for pair in t.top]) for t in tokens])
    texts = [text(t.id) for t in tokens]
    tops = [None if t.logprob is None else {text(i): x for i, x in [(t.id, t.logprob), *t.top[::-1]]} for t in tokens]
    return dict(
        tokens=texts,
        token_logprobs=[t.logprob for t in tokens],
        top_logprobs=tops if asked.top else None,
        text_offset=[*itertools.accumulate(map(len, texts[:-1]), initial=before)] if texts else [],
    )


def usage_of(choices, n):
    told = sum(len(choice.told) for choice in choices[::n])
    written = sum(len(choice.tokens) for choice in choices)
    return dict(prompt_tokens=told, completion_tokens=written, total_tokens=told + written)


def whole(asks, choices, head, decode, chat):
    """The JSON of these Choices, n for each Asked."""
    n = asks[0].n
    out = []
    for i, choice in enumerate(choices):
        asked = asks[i // n]
        logprobs = logprobs_of(asked, choice.told * asked.echo + choice.tokens, decode, chat)
        answer = dict(index=i, logprobs=logprobs, finish_reason=choice.finish)
        if chat:
            answer["message"] = dict(role="assistant", content=choice.text)
            if choice.calls:
                answer["message"] |= dict(content=choice.text or None, tool_calls=calls_of(choice))
        else:
            prompt = asked.messages[0]["content"]
            begin = prompt if isinstance(prompt, str) else decode(prompt)
            answer["text"] = begin * asked.echo + choice.text
        out.append(answer)
    return head | dict(choices=out, usage=usage_of(choices, n))


async def events(asks, answers, head, decode, chat):
    """The content of `whole` as a stream: server-sent events with the Answers' pieces, then calls and usage."""
    event = lambda content: f"data: {json.dumps(content)}\n\n"  # noqa: E731
    asked = asks[0]
    left = [*range(len(answers))]
    read = [pieces(answer, asked) for answer in answers]
    written = [0] * len(answers)  # characters

    def chunk(i, finish=None, logprobs=None, **delta):
        said = dict(delta=delta) if chat else dict(text=delta.get("content", ""))
        return event(head | dict(choices=[dict(index=i, logprobs=logprobs, finish_reason=finish) | said]))

    try:
        for i in left if chat else ():
            yield chunk(i, role="assistant", content="")
        while left:
            news = [answers[i].news for i in left]
            ended = [i for i in left if answers[i].task.done()]
            for i in left:
                text, tokens = next(read[i])
                if text or asked.logprobs and tokens:
                    logprobs = logprobs_of(asked, tokens, decode, chat, written[i])
                    if asked.logprobs and not chat:
                        written[i] += sum(len(decode([t.id])) for t in tokens)
                    yield chunk(i, logprobs=logprobs, content=text)
            for i in ended:
                choice = answers[i].task.result()
                for k, call in enumerate(calls_of(choice)):
                    yield chunk(i, tool_calls=[dict(index=k) | call])
                yield chunk(i, choice.finish)
            left = [i for i in left if i not in ended]
            if left:
                await asyncio.wait(news, return_when=asyncio.FIRST_COMPLETED)
        if asked.stream_options.include_usage:
            usage = usage_of([answer.task.result() for answer in answers], asked.n)
            yield event(head | dict(choices=[], usage=usage))
        yield "data: [DONE]\n\n"
    except Exception as error:  # the status is sent
        yield event(refusal_of(error).content())


def pieces(answer, asked):
    """
    Each next() gives the (text, Tokens) of an Answer that are new. The texts end to end must be the text of its Choice,
    so text that may still change waits: half a character, the beginning of a stop string and, where there are tools,
    the beginning of a call and white space, which parsers strip.
    """
    sent = ""
    number = 0
    text = ""  # of the first `end` tokens
    known = ""  # text of the tokens begin .. end alone
    begin = 0
    end = 0
    while True:
        tokens = answer.tokens
        certain = ""
        if answer.task.done():
            choice = answer.task.result()
            certain = choice.text
            tokens = choice.tokens
            if not certain.startswith(sent):
                raise Refusal(500, "what was streamed is not how the text begins; ask without stream")
        elif tokens:
            tools = answer.chat.tools
            template = answer.chat.episode.template
            decode = lambda begin: template.decode([t.id for t in tokens[begin:]], bool(tools))  # noqa: B023, E731
            certain = text + decode(begin)[len(known) :]
            if len(tokens) - end > WINDOW and certain[-1:] != HALF:
                text = certain
                known = decode(end)
                begin = end
                end = len(tokens)
            marks = "[" if asked.schema else template.call_marks  # a grammar's calls are JSON
            certain = certain.rstrip(HALF)
            words = [*asked.stop, *(marks if tools else ())]
            begins = lambda i: any(word.startswith(certain[i : i + len(word)]) for word in words)  # noqa: E731
            certain = certain[: next(filter(begins, range(len(sent), len(certain))), None)]
            if tools:
                certain = "" if certain[:1].isspace() else certain.rstrip()
        new = certain[len(sent) :], tokens[number:]
        sent = certain
        number = len(tokens)
        yield new


def hash_of(*content):
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]


# ------------------------------------------------------------------------------------------------------------------
# sessions


class Answer:
    """
    The answer in progress to a request in a session: `task` gives the Choice. request: the hash of its bytes; chat: the
    dialogue; id: of the response; tokens: those so far, if they are streamed; news: a future that is done when there
    are more.
    """

    def __init__(self, session, asked, request):
        self.request = request
        self.chat = None
        self.id = ""
        self.tokens = []
        self.news = asyncio.get_running_loop().create_future()
        self.task = asyncio.ensure_future(session.turn(asked, self))
        self.task.add_done_callback(lambda _: self.news.set_result(None))

    def hear(self, meta):
        self.tokens += tokens_of(meta, "output", len(self.tokens))
        self.news.set_result(None)
        self.news = self.news.get_loop().create_future()


async def end_all(answers):
    """Ends the answers in progress, and the engine's work on them."""
    while tasks := [answer.task for answer in answers if not answer.task.done()]:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=0.1)  # Python 3.11's wait_for, in SGLang, loses one that comes with a token


class Session:
    """A sample whose agent uses HTTP. root: the Chat with which it begins."""

    def __init__(self, root):
        self.root = root
        self.dialogues = []
        self.busy = set()
        self.begun = {}  # {hash of what a dialogue begins with: number of them}
        self.answers = []  # in the order of arrival
        self.reward = None
        self.failed = asyncio.get_running_loop().create_future()
        self.used = time.monotonic()

    def answer(self, asked, request, is_retry):
        """The Answer to a request. request: the hash of its bytes."""
        self.used = time.monotonic()
        known = [answer for answer in self.answers if is_retry and answer.request == request]
        if not known:
            known = [Answer(self, asked, request)]
            self.answers += known
        return known[-1]

    async def turn(self, asked, answer):
        """The Choice for an Answer."""
        try:
            chat = answer.chat = self._dialogue(asked)
            answer.id = hash_of(chat.episode.key, chat.path, chat.ids, asked.content)
            chat.hear = answer.hear if asked.stream else None
            chat.params = {"json_schema": asked.schema} if asked.schema else {}
            chat.options = {}
            if asked.top or asked.echo:
                chat.options = dict(top_logprobs_num=asked.top or 0, logprob_start_len=0 if asked.echo else -1)
            self.busy.add(chat)
            try:
                # A turn has a token at least: where none is wanted it is left out below.
                reply = await chat.generate(asked.tools, 1 if asked.most == 0 else asked.most or 0, asked.stop)
            finally:
                self.busy.remove(chat)
                self.used = time.monotonic()
                del chat.messages[chat.said :]  # messages to a dialogue that had ended
        except AgentError as error:
            self.fail(error)
            if isinstance(error, TooLong):
                # as clients know it
                why = f"This model's maximum context length is {error.limit} tokens, and the request has {error.size}"
                raise Refusal(400, why, "context_length_exceeded", "messages") from error
            raise Refusal(400, str(error)) from error
        except ValueError as error:  # SGLang's, of a grammar
            self.fail(AgentError(f"{self.root.episode.where}: a request was refused: {describe(error)}"))
            raise Refusal(400, describe(error), "invalid_value") from error
        return choice_of(asked, chat, reply)

    def fail(self, error):
        if not self.failed.done():
            self.failed.set_result(error)

    def _dialogue(self, asked):
        """The Chat that the request continues, or a new one, with the request's new messages. Raises AgentError."""
        asks = [content_of(message) for message in asked.messages]
        tips = [
            chat
            for chat in self.dialogues
            if chat.turns
            and asked.tools in ([], chat.schemas)
            and [*map(content_of, chat.messages[: chat.said])] == asks[: chat.said]
        ]
        free = [chat for chat in tips if chat not in self.busy]
        if tips and not free:  # the clock would decide which of the two continues
            second = f"{asks[-1][1]!r:.80} is the second; ask for one after the other"
            raise AgentError(f"{self.root.episode.where}: two requests at a time go on from one turn: {second}")
        chat = min(free, key=lambda chat: chat.path) if free else self._begun(asked)
        new = asked.messages[chat.said :]
        chat.messages += new
        chat.calls += sum(message["role"] == "tool" for message in new)
        return chat

    def _begun(self, asked):
        name = hash_of(asked.messages, asked.tools)
        self.begun[name] = self.begun.get(name, -1) + 1
        chat = self.root.fork() if self.dialogues else self.root
        chat.path = (name, self.begun[name])
        self.dialogues.append(chat)
        return chat


def choice_of(asked, chat, reply):
    """The Choice with this Reply, the latest turn of a dialogue."""
    begin = len(chat.ids) - len(reply.tokens)
    if "output_token_logprobs" in chat.meta:
        tokens = tokens_of(chat.meta, "output")[: len(reply.tokens)]
    else:
        tokens = [Token(i, x, []) for i, x in zip(reply.tokens, chat.logprobs[begin:])]
    told = tokens_of(chat.meta, "input") if asked.echo else [Token(i, None, []) for i in chat.ids[:begin]]
    chat.meta = {}
    if asked.most == 0:
        return Choice("", [], "length", [], told)
    finish = "length" if reply.truncated else "tool_calls" if reply.tool_calls else "stop"
    return Choice(reply.text, reply.tool_calls, finish, tokens, told)


class Connection(H11Protocol):
    """A connection that is closed if only half a request has come after HALF_REQUEST seconds."""

    timer = None

    def connection_made(self, transport):
        super().connection_made(transport)
        self._watch()

    def handle_events(self):
        super().handle_events()
        self._watch()

    def _watch(self):
        state = self.conn.their_state
        begun = self.cycle is None or self.conn.trailing_data[0]  # else it is idle between two requests
        half = state is h11.SEND_BODY or state is h11.IDLE and begun
        if half and not self.timer:
            self.timer = self.loop.call_later(HALF_REQUEST, self.transport.close)
        elif not half and self.timer:
            self.timer.cancel()
            self.timer = None


class Endpoint:
    """
    The server, in the event loop that runs when it is made. names: of the model; decode(ids) -> text;
    serves(asked, number of the choice, whether it is a chat) -> Episode, or None in a run; fingerprint: OpenAI's
    system_fingerprint.
    """

    def __init__(self, sock, key, names, decode, serves=None, fingerprint=None):
        self.key = key
        self.names = names
        self.decode = decode
        self.serves = serves
        self.fingerprint = fingerprint
        self.url = "http://{}:{}".format(*sock.getsockname()[:2])
        self.sessions = {}
        self.open = set()  # a task for each request outside of sessions
        self.times = {}  # {hash of a request without a seed: how often it came}
        routes = [
            Route("/health", self.health),
            Route("/s/{session}", self.delete, methods=["DELETE"]),
            Route("/v1/completions", functools.partial(self.complete, chat=False), methods=["POST"]),
        ]
        for session in ("", "/s/{session}"):
            routes += [
                Route(session + "/v1/chat/completions", self.complete, methods=["POST"]),
                Route(session + "/v1/models", self.models),
                Route(session + "/v1/models/{model:path}", self.model),
                Route(session + "/v1/reward", self.rewarded, methods=["POST"]),
            ]

        def refused(_, error):
            refusal = refusal_of(error)
            return JSONResponse(refusal.content(), refusal.status)

        routed = Starlette(
            routes=routes, exception_handlers=dict.fromkeys((Refusal, HTTPException, Exception), refused)
        )

        async def app(scope, *channels):
            if {b"content-length", b"transfer-encoding"} <= {*dict(scope["headers"])}:
                # a proxy before us may go by the other length, and not see what we would take for a second request
                refusal = Refusal(400, "Content-Length and Transfer-Encoding: a request has one of them")
                await JSONResponse(refusal.content(), 400, {"Connection": "close"})(scope, *channels)
            else:
                await routed(scope, *channels)

        config = uvicorn.Config(
            app, log_config=None, log_level="critical", access_log=False, lifespan="off", backlog=MOST_OPEN,
            http=Connection, timeout_keep_alive=60, timeout_graceful_shutdown=1,
        )  # fmt: skip
        self.server = uvicorn.Server(config)
        self.server.capture_signals = contextlib.nullcontext  # signals are the run's to handle
        self.task = asyncio.ensure_future(self.server.serve([sock]))

    # ---- routes

    def key_of(self, session, use="ask"):
        """The key of a session, for its requests or (use='reward') for its reward."""
        return hmac.new(self.key.encode(), f"{use} {session}".encode(), hashlib.sha256).hexdigest()

    def _check_key(self, request, use="ask"):
        given = request.headers.get("authorization", "").encode()
        session = request.path_params.get("session")
        keys = [self.key] if session is None else [self.key, self.key_of(session, use)]
        if not any([hmac.compare_digest(given, f"Bearer {key}".encode()) for key in keys]):
            wanted = f"Authorization: Bearer <{'REWARD_KEY' if use == 'reward' else 'OPENAI_API_KEY'}>"
            raise Refusal(401, f"wrong key: the header must be '{wanted}'", "invalid_api_key")

    async def _body(self, request, use="ask"):
        """(the bytes of a request, its JSON)."""
        self._check_key(request, use)
        size = 0
        raw = bytearray()
        async for part in request.stream():  # to its end: a client does not read before it has sent all
            size += len(part)
            raw += part if size <= MOST_BYTES else b""
        if size > MOST_BYTES:
            raise Refusal(413, f"a request of {size} bytes; the most are {MOST_BYTES}")
        try:
            body = pydantic_core.from_json(raw)
        except ValueError as error:
            raise Refusal(400, f"no JSON: {error}") from error
        if not isinstance(body, dict):
            raise Refusal(400, "no JSON object")
        return raw, body

    async def health(self, request):
        return JSONResponse({"status": "ok"})

    async def models(self, request):
        self._check_key(request)
        return JSONResponse({"object": "list", "data": [*map(model_card, self.names)]})

    async def model(self, request):
        self._check_key(request)
        return JSONResponse(model_card(self._named(request.path_params["model"])))

    def _named(self, name):
        if name not in self.names:
            raise Refusal(404, f"no such model as {name!r}; use {self.names[0]}", "model_not_found", "model")
        return name

    async def rewarded(self, request):
        _, body = await self._body(request, "reward")
        session = self._session(request)
        try:
            session.reward = finite(body.get("reward"), "POST /reward")
        except TypeError as error:
            raise Refusal(400, str(error)) from error
        return JSONResponse({"reward": session.reward})

    async def delete(self, request):
        self._check_key(request)
        self._session(request)
        if not self.serves:
            raise Refusal(404, "a run's sessions end with their programs")
        await self._end(request.path_params["session"])
        return JSONResponse({"deleted": True})

    def _end(self, session):
        return end_all(self.sessions.pop(session).answers)

    def _session(self, request, asked=None):
        """The session of a request's path; where a model is served, one begins with its first request."""
        name = request.path_params.get("session")
        if name and name not in self.sessions and self.serves and asked:
            self._take_place()
            self.sessions[name] = Session(Chat(self.serves(asked, 0, True)))
        if name not in self.sessions:
            raise Refusal(404, "no such session" if name else "only in a session: /s/<session>/v1")
        return self.sessions[name]

    def _take_place(self):
        """Raises a Refusal if all places are taken, and none by a session that nobody uses: such a session ends."""
        if len(self.sessions) + len(self.open) < MOST_OPEN:
            return
        idle = min(self.sessions, key=lambda name: self.sessions[name].used, default=None)
        if idle is None or self.sessions[idle].busy or time.monotonic() - self.sessions[idle].used < IDLE:
            raise Refusal(429, f"more than {MOST_OPEN} open sessions or requests; try again when some have ended")
        asyncio.ensure_future(self._end(idle))

    def _choice(self, asked):
        """The number of a request's first choice: 0, or without a seed that after those of equal requests."""
        if asked.seed is not None:
            return 0
        name = hash_of(asked.content)
        times = self.times.pop(name, 0)
        self.times[name] = times + 1
        if len(self.times) > MOST_COUNTED:
            del self.times[next(iter(self.times))]
        return times * asked.n

    async def complete(self, request, chat=True):
        """Answers with a turn of the model, in a session or not, or with the completions of prompts."""
        in_session = "session" in request.path_params or not self.serves
        try:
            raw, body = await self._body(request)
            asks = read(body, chat, exact=bool(self.serves))
            name = self._named(asks[0].model or self.names[0])
            if in_session and asks[0].n != 1:
                raise refused("n", asks[0].n, "a session has one history; use 1")
            if len(raw) * asks[0].n > MOST_ANSWERED:
                raise refused(
                    "n", asks[0].n, f"of a request of {len(raw)} bytes; the most are {MOST_ANSWERED} together"
                )
        except Refusal as refusal:
            # Else a framework could swallow it, and make it a reward of 0.
            if not self.serves and refusal.status != 401:
                session = self._session(request)
                session.fail(AgentError(f"{session.root.episode.where}: a request was refused: {refusal}"))
            raise
        if in_session:
            session = self._session(request, asks[0])
            retry = request.headers.get("x-stainless-retry-count", "0") != "0"
            # The answer is completed without its client: a retry gets it, and a disconnection changes no training data.
            answers = [session.answer(asks[0], hashlib.sha256(raw).digest(), retry)]
        else:
            self._take_place()
            answers = []
            for asked in asks:
                first = self._choice(asked)
                for i in range(first, first + asked.n):
                    session = Session(Chat(self.serves(asked, i, chat)))
                    answers.append(session.answer(asked, b"", False))
            self._end_with(request, answers)
        # An error has a status of its own as long as nothing is sent.
        await asyncio.wait([answer.news for answer in answers], return_when=asyncio.FIRST_COMPLETED)
        if not asks[0].stream:
            await asyncio.wait([answer.task for answer in answers])
        done = [answer.task for answer in answers if answer.task.done()]
        if any(task.cancelled() for task in done):
            raise Refusal(499, "ended: its client is gone, or its session")
        choices = [task.result() for task in done]
        kind = "chat.completion" if chat else "text_completion"
        head = dict(id=f"{'chatcmpl' if chat else 'cmpl'}-{answers[0].id}", object=kind, created=0, model=name)
        head["system_fingerprint"] = self.fingerprint
        if not asks[0].stream:
            return JSONResponse(whole(asks, choices, head, self.decode, chat))
        head["object"] += ".chunk" if chat else ""
        return StreamingResponse(events(asks, answers, head, self.decode, chat), media_type="text/event-stream")

    def _end_with(self, request, answers):
        """Ends these Answers when the client is gone or has received them."""

        async def end():
            while (await request.receive())["type"] != "http.disconnect":
                pass
            await end_all(answers)

        task = asyncio.ensure_future(end())
        self.open.add(task)
        task.add_done_callback(self.open.discard)

    async def close(self):
        self.server.should_exit = True
        await self.task


def model_card(name):
    return dict(id=name, object="model", created=0, owned_by="onecurve")


def listen(host, port):
    """A socket to serve on. Ends the run with one line if nothing can listen there."""
    try:
        return socket.create_server((host, port), backlog=MOST_OPEN)
    except (OSError, OverflowError) as error:
        require(False, f"port={port}: nothing can listen there on host={host!r}: {error}; choose another")


# ------------------------------------------------------------------------------------------------------------------
# agents over HTTP: a program, or a client inside the process

endpoints = {}  # of the event loops of this process


@contextlib.asynccontextmanager
async def session_of(chat):
    """Inside, this sample's agent may send requests: (its Session, {environment variable: value} for a client)."""
    loop = asyncio.get_running_loop()
    episode = chat.episode
    if chat.messages or chat.turns:
        raise chat.error("a client needs the whole sample; open one, and first of all")
    if loop not in endpoints:
        decode = functools.partial(episode.template.decode, special=True)
        endpoints[loop] = Endpoint(listen("127.0.0.1", 0), secrets.token_urlsafe(), [POLICY], decode)
    endpoint = endpoints[loop]
    name = "-".join(map(str, episode.key))
    session = endpoint.sessions[name] = Session(chat)
    where = dict(
        OPENAI_BASE_URL=f"{endpoint.url}/s/{name}/v1", OPENAI_API_KEY=endpoint.key_of(name),
        REWARD_KEY=endpoint.key_of(name, "reward"),
    )  # fmt: skip
    try:
        yield session, where
        # Answers that the agent requested and did not wait for are trained on, too, however long they take.
        await asyncio.gather(*[answer.task for answer in session.answers], return_exceptions=True)
    finally:
        del endpoint.sessions[name]
        if session.failed.done():  # whatever came of it, and also where a framework has swallowed it
            raise session.failed.result()


@contextlib.asynccontextmanager
async def openai(chat):
    """
    OpenAI's asynchronous client, whose requests are this sample's turns: for frameworks that can be given a client.
    An invalid request ends the run at the block's end, even if the framework continues.
    """
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    async with session_of(chat) as (_, where):
        url, key = where["OPENAI_BASE_URL"], where["OPENAI_API_KEY"]
        direct = DefaultAsyncHttpxClient(trust_env=False)  # by no proxy: we are on this machine
        # no clock: agent_timeout and engine_timeout say when something hangs
        async with AsyncOpenAI(base_url=url, api_key=key, timeout=None, max_retries=0, http_client=direct) as client:
            yield client


Chat.openai = openai  # chat.py knows no HTTP


def program(command):
    """`solve(chat, row)`, which runs `command` as the agent. Ends the run with one line if there is no such program."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        require(False, f"agent={command!r}: {error}")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    require(shutil.which(words[0], path=path), f"agent={command!r}: no program {words[0]!r} in the PATH")
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ} | dict(PATH=path)
    guards = {}  # (a place for each program, their guard) of each event loop

    async def solve(chat, row):
        loop = asyncio.get_running_loop()
        episode = chat.episode
        if loop not in guards:
            guard = subprocess.Popen(
                [sys.executable, "-S", "-c", GUARD], stdin=subprocess.PIPE, text=True, start_new_session=True
            )
            guards[loop] = asyncio.Semaphore(MOST_PROGRAMS), guard
        places, guard = guards[loop]
        episode.asking += 1  # it waits for a place, which is not its fault
        async with places:
            episode.asking -= 1
            episode.moved = time.monotonic()
            async with session_of(chat) as (session, where):
                own = dict(ROW=json.dumps(row), ONECURVE_GUARD=str(guard.pid))
                return await reward_of(session, inherited | where | own)

    async def reward_of(session, env):
        episode = session.root.episode
        episode.doing = "its program"
        running = asyncio.ensure_future(run_program(words, env))
        try:
            await asyncio.wait([running, session.failed], return_when=asyncio.FIRST_COMPLETED)
            if session.failed.done():
                raise session.failed.result()
            status, output, errors = await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        told = f"{episode.where}: {command!r}"
        if status:
            raise AgentError(f"{told} ended with status {status}: {errors[:500]}")
        if session.reward is not None:
            return session.reward
        try:
            return finite(float(output), command)
        except (ValueError, TypeError):
            raise AgentError(f"{told}: its last line of output must be the reward, and is {output[:80]!r}")

    return solve


async def run_program(words, env):
    """(exit status, last line of its output, and of its errors) of a program; its children end with it, it with us."""
    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *words, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
    )

    async def last_line(stream):
        kept = b""
        while part := await stream.read(TAIL):
            kept = (kept + part)[-TAIL:]
        return kept.decode(errors="replace").strip().rpartition("\n")[2]

    try:
        output, errors = await asyncio.gather(last_line(process.stdout), last_line(process.stderr))
        return await process.wait(), output, errors
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has left behind
        await process.wait()
