"""
OpenAI's protocol over HTTP: for agents that are programs, and to serve a model.

    python train_grpo.py --agent="python examples/client.py" ..                   # a process per sample
    python episodes/serve.py --init_from=out/run/ckpt/step_000100      # until Ctrl-C

A program finds in its environment OPENAI_BASE_URL (a session of its own), OPENAI_API_KEY and ROW, its row as JSON, and
otherwise only the variables in INHERITED; give it more by agent="env KEY=value python x.py". Its last line of output
is the sample's reward, unless it has sent one to POST /reward. A program that fails, or gives no number, ends the run.
What a program asks the world by itself is in no journal.

In a session (/s/<name>/v1) tokens are only ever appended: a request whose messages begin with those of a dialogue, up
to a turn of the model, goes on from the sampled tokens themselves. Any other history begins a dialogue of its own, a
row that the metric `forks` counts. A dialogue's name is the hash of what it begins with and how often the sample has
begun so; its noise follows from the name, and the rows are in the names' order. So programs may ask side by side, but
not go on from one turn twice at a time. A retry that says so (x-stainless-retry-count) gets the recorded answer, which
is always completed, even if nobody waits for it.

Where a model is served, a request's noise follows from its seed (else the config's), its content and the number of the
choice: the same request always gets the same answer, bit for bit, whatever else is asked meanwhile, and as a stream,
too. A request whose client is gone leaves the engine. Sessions exist there, too; they begin with their first request,
whose seed and temperature they keep, and end with DELETE /s/<name>.
In a run the temperature is the run's, and other settings of a request are ignored; a served model honours the
temperature (0: as good as greedy) and refuses what it cannot draw exactly. No answer has a clock in it: `created` is 0.

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
from typing import NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from configurator import require
from episodes.chat import AgentError, Chat, ToolCall, told_calls
from rewards import describe, finite

INHERITED = "PATH HOME USER LANG LC_ALL TZ TMPDIR PYTHONPATH PYTHONHASHSEED LD_LIBRARY_PATH VIRTUAL_ENV".split()
MOST_BYTES = 4 * 2**20  # of a request
MOST_OPEN = 4096  # sessions, and requests outside of one
MOST_CHOICES = 128
TAIL = 2**16  # bytes of a program's output that are kept: its end
MOST_PROGRAMS = 32  # at a time, of an engine: each is a process with its libraries
# The temperature that stands for 0: it draws the likeliest token, unless logits are nearly equal. A greedy request
# would make SGLang draw the others of its batch in another way, with other bits.
COLDEST = 1e-5
HALF, WINDOW = "\ufffd", 64  # what half a character is decoded to; most tokens of a stream that are decoded again
POLICY = "policy"  # the model's name in a run; a served model has its folder's, too
# What we draw from: the whole softmax. With a value other than these a request is refused.
EXACT = dict(
    top_p=1, top_k=-1, min_p=0, presence_penalty=0, frequency_penalty=0, repetition_penalty=1, top_logprobs=0,
    logit_bias={}, best_of=1, echo=False, suffix="",
)  # fmt: skip

# Ends the programs of a rank that has died. It reads a line "+id" for each process group that begins, "-id" when ended.
GUARD = """
import os, signal, sys
left = set()
for line in sys.stdin:
    (left.add if line[0] == "+" else left.discard)(int(line[1:]))
for group in left:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


class Refusal(Exception):
    """A request that is answered with an error. status: HTTP's."""

    def __init__(self, status, message, code=None):
        super().__init__(message)
        self.status, self.code = status, code

    def content(self):
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": dict(message=str(self), type=kind, code=self.code)}


def refusal_of(error):
    """The Refusal that tells a client of an exception."""
    if isinstance(error, HTTPException):
        return Refusal(error.status_code, f"no such route: {error.detail}")
    return error if isinstance(error, Refusal) else Refusal(500, describe(error))


# ------------------------------------------------------------------------------------------------------------------
# requests and answers


class Asked(NamedTuple):
    """What a request asks for."""

    messages: list  # as a Chat has them; a prompt to complete is one message, of a text or ids
    tools: list  # JSON schemas, in OpenAI's form
    stop: list
    most: int  # tokens; 0: what is left
    temperature: float
    seed: int | None
    n: int
    logprobs: bool
    stream: bool
    usage: bool  # at a stream's end


class Choice(NamedTuple):
    text: str
    calls: list  # of ToolCall
    finish: str
    tokens: list
    logprobs: list
    told: int  # number of tokens before them


def read(body, chat=True, exact=False):
    """
    The Asked of a request's JSON, to /chat/completions or (chat=False) to /completions. exact: refuse settings with
    which we do not draw. Raises Refusal.
    """

    def get(key, default, kind, fits=lambda x: True, at=body):
        value = at.get(key)
        value = default if value is None else value
        if not (isinstance(value, kind) and isinstance(value, bool) <= (kind is bool) and fits(value)):
            raise Refusal(400, f"{key}={json.dumps(value)[:80]}: not a value that {key} can have")
        return value

    for key, only in EXACT.items() if exact else ():
        if body.get(key) not in (None, only):
            why = "we draw from the whole softmax, where equal requests get equal bits"
            raise Refusal(400, f"{key}={json.dumps(body[key])[:80]}: must be {json.dumps(only)}; {why}")
    if get("response_format", {}, dict).get("type", "text") != "text":
        raise Refusal(400, "response_format: only text")
    choice = get("tool_choice", "auto", (str, dict))
    if choice not in ("auto", "none"):
        raise Refusal(400, f"tool_choice={json.dumps(choice)[:80]}: a model cannot be made to call; use auto or none")
    tools = [] if choice == "none" else get("tools", [], list)
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        wanted = isinstance(function, dict) and dict(name=str, parameters=dict, description=str)
        if not wanted or not all(isinstance(function.get(key, kind()), kind) for key, kind in wanted.items()):
            raise Refusal(400, 'tools: each {"type": "function", "function": {"name": .., "parameters": {..}}}')
    if chat:
        messages = messages_of(get("messages", [], list))
    else:
        fits = lambda x: x and (isinstance(x, str) or all(type(i) is int and i >= 0 for i in x))  # noqa: E731
        prompt = get("prompt", "", (str, list), fits)
        messages = [{"role": "user", "content": prompt}]
    stop = get("stop", [], (str, list), lambda x: x != "" and all(isinstance(s, str) and s for s in x))
    length = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    return Asked(
        messages,
        tools,
        stop=[stop] if isinstance(stop, str) else stop,
        most=get(length, 0, int, lambda x: x > 0 or body.get(length) is None),
        temperature=get("temperature", 1.0, (int, float), lambda x: x == 0 or 1e-3 <= x <= 1e3),
        seed=get("seed", None, (int, type(None))),
        n=get("n", 1, int, lambda x: 0 < x <= MOST_CHOICES),
        logprobs=get("logprobs", False, bool) if chat else body.get("logprobs") is not None,
        stream=get("stream", False, bool),
        usage=get("include_usage", False, bool, at=get("stream_options", {}, dict)),
    )


def messages_of(messages):
    """
    A request's messages as a Chat has them: contents are texts, arguments are parsed, the i-th call of the k-th turn is
    call_<k>_<i>, whatever the client made of it. Raises Refusal.
    """
    out, calls_by_id, turns = [], {}, 0
    for message in messages:
        try:
            role, content = message["role"], message.get("content") or ""
            if isinstance(content, list):
                content = "".join(part["text"] for part in content)
            if role not in ("system", "developer", "user", "assistant", "tool") or not isinstance(content, str):
                raise KeyError("role or content")
            new = {"role": "system" if role == "developer" else role, "content": content}
            if role == "tool":
                call = calls_by_id[message["tool_call_id"]]
                new = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}
            elif role == "assistant":
                calls = []
                for i, call in enumerate(message.get("tool_calls") or ()):
                    name, arguments = call["function"]["name"], dict(json.loads(call["function"]["arguments"]))
                    calls.append(ToolCall(f"call_{turns}_{i}", name, arguments))
                    calls_by_id[call["id"]] = calls[-1]
                new, turns = new | ({"tool_calls": told_calls(calls)} if calls else {}), turns + 1
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            wanted = "neither a text, nor calls, nor the result of a call"
            raise Refusal(400, f"messages[{len(out)}]: {wanted} ({type(error).__name__}: {error})") from error
        out.append(new)
    if not out or out[-1]["role"] == "assistant":
        raise Refusal(400, "messages: must end with what the model is told")
    return out


def content_of(message):
    """What decides whether two messages are the same."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["role"], message["content"], calls


def calls_of(choice):
    """The calls as OpenAI has them."""
    function = lambda call: dict(name=call.name, arguments=json.dumps(call.arguments))  # noqa: E731
    return [dict(id=call.id, type="function", function=function(call)) for call in choice.calls]


def logprobs_of(asked, tokens, logprobs, decode, chat):
    if not asked.logprobs:
        return None
    texts = [decode([token]) for token in tokens]
    if not chat:
        return dict(tokens=texts, token_logprobs=logprobs, top_logprobs=None, text_offset=None)
    of = lambda text, x: dict(token=text, logprob=x, bytes=[*text.encode()], top_logprobs=[])  # noqa: E731
    return dict(content=[*map(of, texts, logprobs)])


def usage_of(choices):
    told, written = choices[0].told, sum(len(choice.tokens) for choice in choices)
    return dict(prompt_tokens=told, completion_tokens=written, total_tokens=told + written)


def whole(asked, choices, head, decode, chat):
    """The JSON of these Choices."""

    def said(choice):
        if not chat:
            return dict(text=choice.text)
        message = dict(role="assistant", content=(choice.text or None) if choice.calls else choice.text)
        return dict(message=message | (dict(tool_calls=calls_of(choice)) if choice.calls else {}))

    def end(i, choice):
        logprobs = logprobs_of(asked, choice.tokens, choice.logprobs, decode, chat)
        return dict(index=i, logprobs=logprobs, finish_reason=choice.finish) | said(choice)

    return head | dict(choices=[*itertools.starmap(end, enumerate(choices))], usage=usage_of(choices))


async def events(asked, answers, head, decode, chat):
    """What `whole` has, as a stream: server-sent events with the Answers' pieces, then calls and usage."""
    event = lambda content: f"data: {json.dumps(content)}\n\n"  # noqa: E731
    read, left = [pieces(answer, asked.stop) for answer in answers], [*range(len(answers))]

    def chunk(i, finish=None, logprobs=None, **delta):
        said = dict(delta=delta) if chat else dict(text=delta.get("content", ""))
        return event(head | dict(choices=[dict(index=i, logprobs=logprobs, finish_reason=finish) | said]))

    try:
        for i in left if chat else ():
            yield chunk(i, role="assistant", content="")
        while left:
            news, ended = [answers[i].news for i in left], [i for i in left if answers[i].task.done()]
            for i in left:
                text, *drawn = next(read[i])
                if text or asked.logprobs and drawn[0]:
                    yield chunk(i, logprobs=logprobs_of(asked, *drawn, decode, chat), content=text)
            for i in ended:
                choice = answers[i].task.result()
                for k, call in enumerate(calls_of(choice)):
                    yield chunk(i, tool_calls=[dict(index=k) | call])
                yield chunk(i, choice.finish)
            left = [i for i in left if i not in ended]
            if left:
                await asyncio.wait(news, return_when=asyncio.FIRST_COMPLETED)
        if asked.usage:
            yield event(head | dict(choices=[], usage=usage_of([answer.task.result() for answer in answers])))
        yield "data: [DONE]\n\n"
    except Exception as error:  # the status is sent
        yield event(refusal_of(error).content())


def pieces(answer, stop):
    """
    Each next() gives the (text, tokens, log-probs) of an Answer that are new. The texts end to end must be the text of
    its Choice, so text that may still change waits: half a character, the beginning of a stop string and, where there
    are tools, the beginning of a call and white space, which parsers strip.
    """
    sent, number = "", 0
    text, known, begin, end = "", "", 0, 0  # text of the first `end` tokens; text of the tokens begin .. end alone
    while True:
        tokens, logprobs = answer.tokens, answer.logprobs
        if answer.task.done():
            certain, _, _, tokens, logprobs, _ = answer.task.result()
            if not certain.startswith(sent):
                raise Refusal(500, "what was streamed is not how the text begins; ask without stream")
        elif tokens:
            tools, template = answer.chat.tools, answer.chat.episode.template
            certain = text + template.decode(tokens[begin:], bool(tools))[len(known) :]
            if len(tokens) - end > WINDOW and certain[-1:] != HALF:
                text, known, begin, end = certain, template.decode(tokens[end:], bool(tools)), end, len(tokens)
            certain, words = certain.rstrip(HALF), [*stop, *(template.call_marks if tools else ())]
            begins = lambda i: any(word.startswith(certain[i : i + len(word)]) for word in words)  # noqa: E731
            certain = certain[: next(filter(begins, range(len(sent), len(certain))), None)]
            if tools:
                certain = "" if certain[:1].isspace() else certain.rstrip()
        else:
            certain = ""
        new = certain[len(sent) :], tokens[number:], logprobs[number:]
        sent, number = certain, len(tokens)
        yield new


def hash_of(*content):
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]


# ------------------------------------------------------------------------------------------------------------------
# sessions


class Answer:
    """
    What is being written for a request in a session: `task` gives the Choice. chat: the dialogue; id: of the response;
    tokens, logprobs: those so far, if they are streamed; news: a future that is done when there are more.
    """

    def __init__(self, session, asked):
        loop = asyncio.get_running_loop()
        self.chat, self.id, self.tokens, self.logprobs, self.news = None, "", [], [], loop.create_future()
        self.task = asyncio.ensure_future(session.turn(asked, self))
        self.task.add_done_callback(lambda _: self.news.set_result(None))

    def hear(self, drawn):
        for logprob, token, _ in drawn[len(self.tokens) :]:
            self.tokens.append(token)
            self.logprobs.append(logprob)
        self.news.set_result(None)
        self.news = self.news.get_loop().create_future()


async def end_all(answers):
    """Ends the answers that are still being written, and the engine's work on them."""
    while tasks := [answer.task for answer in answers if not answer.task.done()]:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=0.1)  # Python 3.11's wait_for, in SGLang, loses one that comes with a token


class Session:
    """A sample whose agent asks over HTTP. root: the Chat with which it begins."""

    def __init__(self, root):
        self.root, self.dialogues, self.busy = root, [], set()
        self.begun = {}  # {hash of what a dialogue begins with: number of them}
        self.answers = []  # (hash of the request, Answer), in the order of arrival
        self.reward, self.failed = None, asyncio.get_running_loop().create_future()

    def answer(self, asked, request, is_retry):
        """The Answer to what is asked. request: the hash of its bytes."""
        known = [answer for of, answer in self.answers if is_retry and of == request]
        if not known:
            known = [Answer(self, asked)]
            self.answers.append((request, known[0]))
        return known[-1]

    async def turn(self, asked, answer):
        """The Choice for an Answer."""
        try:
            chat = answer.chat = self._dialogue(asked)
            answer.id, chat.hear = hash_of(chat.episode.key, chat.path, chat.ids), answer.hear if asked.stream else None
            self.busy.add(chat)
            try:
                reply = await chat.generate(asked.tools, asked.most, asked.stop)
            finally:
                self.busy.remove(chat)
                del chat.messages[chat.said :]  # messages to a dialogue that had ended
        except AgentError as error:
            if not self.failed.done():
                self.failed.set_result(error)
            raise Refusal(400, str(error)) from error
        told = len(chat.ids) - len(reply.tokens)
        finish = "length" if reply.truncated else "tool_calls" if reply.tool_calls else "stop"
        return Choice(reply.text, reply.tool_calls, finish, reply.tokens, chat.logprobs[told:], told)

    def _dialogue(self, asked):
        """The Chat that the request continues, or a new one, told the request's new messages. Raises AgentError."""
        asks = [content_of(message) for message in asked.messages]
        tips = [chat for chat in self.dialogues if chat.turns and asked.tools in ([], chat.schemas)]
        tips = [chat for chat in tips if [*map(content_of, chat.messages[: chat.said])] == asks[: chat.said]]
        free = [chat for chat in tips if chat not in self.busy]
        if tips and not free:  # which of the two goes on would be a matter of time
            where = self.root.episode.where
            second = f"{asks[-1][1]!r:.80} is the second; ask for one after the other"
            raise AgentError(f"{where}: two requests at a time go on from one turn: {second}")
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


class Endpoint:
    """
    The server, in the event loop that runs when it is made. names: of the model; decode(ids) -> text;
    serves(asked, number of the choice, whether it is a chat) -> Episode, or None in a run.
    """

    def __init__(self, sock, key, names, decode, serves=None):
        self.key, self.names, self.decode, self.serves = key, names, decode, serves
        self.url = "http://{}:{}".format(*sock.getsockname()[:2])
        self.sessions, self.open = {}, set()  # open: a task for each request outside of sessions
        routes = [
            Route("/health", self.health),
            Route("/s/{session}", self.delete, methods=["DELETE"]),
            Route("/v1/completions", functools.partial(self.complete, chat=False), methods=["POST"]),
        ]
        for session in ("", "/s/{session}"):
            routes += [
                Route(session + "/v1/chat/completions", self.complete, methods=["POST"]),
                Route(session + "/v1/models", self.models),
                Route(session + "/v1/reward", self.rewarded, methods=["POST"]),
            ]

        def refused(_, error):
            refusal = refusal_of(error)
            return JSONResponse(refusal.content(), refusal.status)

        app = Starlette(routes=routes, exception_handlers=dict.fromkeys((Refusal, HTTPException, Exception), refused))
        config = uvicorn.Config(
            app, log_config=None, log_level="critical", access_log=False, lifespan="off", backlog=MOST_OPEN,
            timeout_keep_alive=60, timeout_graceful_shutdown=1,
        )  # fmt: skip
        self.server = uvicorn.Server(config)
        self.server.capture_signals = contextlib.nullcontext  # signals are the run's to handle
        self.task = asyncio.ensure_future(self.server.serve([sock]))

    # ---- routes

    def _check_key(self, request):
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.key.encode()):
            wanted = "Authorization: Bearer <OPENAI_API_KEY>"
            raise Refusal(401, f"wrong key: the header must be '{wanted}'", "invalid_api_key")

    async def _body(self, request):
        """(the bytes of a request, its JSON)."""
        self._check_key(request)
        size, raw = 0, bytearray()
        async for part in request.stream():  # to its end: a client does not read before it has sent all
            size += len(part)
            raw += part if size <= MOST_BYTES else b""
        if size > MOST_BYTES:
            raise Refusal(413, f"a request of {size} bytes; the most are {MOST_BYTES}")
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"no JSON: {error}") from error
        if not isinstance(body, dict):
            raise Refusal(400, "no JSON object")
        return raw, body

    async def health(self, request):
        return JSONResponse({"status": "ok"})

    async def models(self, request):
        self._check_key(request)
        data = [dict(id=name, object="model", created=0, owned_by="onecurve") for name in self.names]
        return JSONResponse({"object": "list", "data": data})

    async def rewarded(self, request):
        _, body = await self._body(request)
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
        await end_all([answer for _, answer in self.sessions.pop(request.path_params["session"]).answers])
        return JSONResponse({"deleted": True})

    def _session(self, request, asked=None):
        """The session of a request's path; where a model is served, one begins with what is first asked there."""
        name = request.path_params.get("session")
        if name is not None and name not in self.sessions and self.serves and asked:
            self._take_place()
            self.sessions[name] = Session(Chat(self.serves(asked, 0, True), ()))
        if name not in self.sessions:
            raise Refusal(404, "no such session" if name else "only in a session: /s/<session>/v1")
        return self.sessions[name]

    def _take_place(self):
        if len(self.sessions) + len(self.open) >= MOST_OPEN:
            raise Refusal(429, f"more than {MOST_OPEN} open sessions or requests; try again when some have ended")

    async def complete(self, request, chat=True):
        """Answers with a turn of the model, in a session or not, or with the completion of a prompt."""
        raw, body = await self._body(request)
        asked = read(body, chat, exact=bool(self.serves))
        if body.get("model", self.names[0]) not in self.names:
            raise Refusal(404, f"no such model as {body['model']!r}; use {self.names[0]}", "model_not_found")
        if request.path_params or not self.serves:
            session = self._session(request, asked)
            if asked.n != 1:
                raise Refusal(400, f"n={asked.n}: a session has one history; use 1")
            retry = request.headers.get("x-stainless-retry-count", "0") != "0"
            # The answer goes on without its client: a retry gets it, and a disconnection changes no training data.
            answers = [session.answer(asked, hashlib.sha256(raw).digest(), retry)]
        else:
            self._take_place()
            sessions = [Session(Chat(self.serves(asked, i, chat), ())) for i in range(asked.n)]
            answers = [session.answer(asked, b"", False) for session in sessions]
            self._end_with(request, answers)
        # An error has a status of its own as long as nothing is sent.
        await asyncio.wait([answer.news for answer in answers], return_when=asyncio.FIRST_COMPLETED)
        if not asked.stream:
            await asyncio.wait([answer.task for answer in answers])
        done = [answer.task for answer in answers if answer.task.done()]
        if any(task.cancelled() for task in done):
            raise Refusal(499, "ended: its client is gone, or its session")
        choices = [task.result() for task in done]
        kind = "chat.completion" if chat else "text_completion"
        name = f"{'chatcmpl' if chat else 'cmpl'}-{answers[0].id}"
        head = dict(id=name, object=kind, created=0, model=body.get("model", self.names[0]))
        if not asked.stream:
            return JSONResponse(whole(asked, choices, head, self.decode, chat))
        head["object"] += ".chunk" if chat else ""
        return StreamingResponse(events(asked, answers, head, self.decode, chat), media_type="text/event-stream")

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


def listen(host, port):
    """A socket to serve on. Ends the run with one line if nothing can listen there."""
    try:
        sock = socket.create_server((host, port), backlog=MOST_OPEN)
    except (OSError, OverflowError) as error:
        require(False, f"port={port}: nothing can listen there on host={host!r}: {error}; choose another")
    return sock


# ------------------------------------------------------------------------------------------------------------------
# agents that are programs


def program(command):
    """`solve(chat, row)`, which runs `command` as the agent. Ends the run with one line if there is no such program."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        require(False, f"agent={command!r}: {error}")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    require(shutil.which(words[0], path=path), f"agent={command!r}: no program {words[0]!r} in the PATH")
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ} | dict(PATH=path)
    endpoints = {}  # (the Endpoint, a place for each program, their guard) of each event loop

    async def solve(chat, row):
        loop, episode = asyncio.get_running_loop(), chat.episode
        if loop not in endpoints:
            decode = functools.partial(episode.template.decode, special=True)
            endpoint = Endpoint(listen("127.0.0.1", 0), secrets.token_urlsafe(), [POLICY], decode)
            options = dict(stdin=subprocess.PIPE, text=True, start_new_session=True)
            guard = subprocess.Popen([sys.executable, "-S", "-c", GUARD], **options)
            endpoints[loop] = endpoint, asyncio.Semaphore(MOST_PROGRAMS), guard
        endpoint, places, guard = endpoints[loop]
        episode.asking += 1  # it waits for a place, which is not its fault
        async with places:
            episode.asking, episode.moved = episode.asking - 1, time.monotonic()
            return await ask_for(chat, row, endpoint, guard)

    async def ask_for(chat, row, endpoint, guard):
        episode = chat.episode
        name = "-".join(map(str, episode.key))
        session = endpoint.sessions[name] = Session(chat)
        episode.doing = "its program"
        env = dict(OPENAI_BASE_URL=f"{endpoint.url}/s/{name}/v1", OPENAI_API_KEY=endpoint.key, ROW=json.dumps(row))
        running = asyncio.ensure_future(run_program(words, inherited | env, guard))
        try:
            await asyncio.wait([running, session.failed], return_when=asyncio.FIRST_COMPLETED)
            if session.failed.done():
                raise session.failed.result()
            status, output, errors = await running
            # Answers that the program asked for and did not wait for are trained on, too, however long they take.
            await asyncio.gather(*[answer.task for _, answer in session.answers], return_exceptions=True)
            if session.failed.done():
                raise session.failed.result()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            del endpoint.sessions[name]
        told = f"{episode.where}: {command!r}"
        if status:
            last = errors.rpartition("\n")[2]
            raise AgentError(f"{told} ended with status {status}: {last[:500]}")
        if session.reward is not None:
            return session.reward
        last = output.rpartition("\n")[2]
        try:
            return finite(float(last), command)
        except (ValueError, TypeError):
            raise AgentError(f"{told}: its last line of output must be the reward, and is {last[:80]!r}")

    return solve


async def run_program(words, env, guard):
    """(exit status, end of its output, end of its errors) of a program; its children end with it, it with us."""
    pipe = asyncio.subprocess.PIPE
    options = dict(stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True)
    process = await asyncio.create_subprocess_exec(*words, env=env, **options)
    guard.stdin.write(f"+{process.pid}\n")
    guard.stdin.flush()

    async def end_of(stream):
        kept = b""
        while part := await stream.read(TAIL):
            kept = (kept + part)[-TAIL:]
        return kept.decode(errors="replace").strip()

    try:
        output, errors = await asyncio.gather(end_of(process.stdout), end_of(process.stderr))
        return await process.wait(), output, errors
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has left behind
        await process.wait()
        guard.stdin.write(f"-{process.pid}\n")
