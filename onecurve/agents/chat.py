"""
What an agent talks to. An agent is a function

    async def solve(chat, row) -> float

that queries the model, calls tools and returns a reward; row is a row of the data. See examples/calculator.py.

    chat.system(text), chat.user(text)     messages to the model
    await chat.generate(tools=..)          the model's turn: a Reply
    await chat.call(reply.tool_calls)      runs tools side by side; their results are added in the order of the calls
    await chat.do(function, *arguments)    any other request to the outside: a page, a judge, a sandbox
    chat.reward(number)                    a reward for the latest turn, beside the one that is returned
    chat.fork()                            another dialogue of the same sample: a sub-agent, a compacted history
    chat.random                            random numbers that are the same in every run
    async with chat.openai() as client     OpenAI's client, whose requests are turns (onecurve/agents/endpoint.py)

A program in any language, with OpenAI's client, is an agent, too: onecurve/agents/endpoint.py.

Two runs give the same bits although tools are slow, engines die and requests come in another order, because

1. token ids are only ever appended: what was sampled is never encoded again, and what the environment says is encoded
   once, as the chat template's continuation of the dialogue. A turn that is cut by length ends the dialogue.
2. a turn's noise follows from its own tokens and its place in the sample, not from the time of its request.
3. limits are counts. A clock only decides whether a run hangs; then the run ends, and a resume continues it.
4. results from outside are in a journal, on the disk, before they are used: a resume reads them and repeats no request.
5. results come in the order of the calls.
6. what differs between runs by itself is replaced: call ids, addresses of objects, the wording of errors.
7. after the first step every agent runs again, in another process, on the same turns and results: it must do the same.
"""

import asyncio
import functools
import inspect
import json
import os
import random
import re
import threading
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from configurator import require
from onecurve.graders.sandbox import SandboxError
from onecurve.keys.seeds import noise_seed
from onecurve.run.own import describe, run_of
from rewards import finite

ADDRESS = re.compile(r"\b0x[0-9a-f]{6,16}\b")
AFTER_THE_END = 100  # an agent that requests more turns than this of an ended dialogue counts as one that never ends
# Limits are counts, the same in every run.
MOST_CALLS = 32  # tool calls of a dialogue; each further call gets an error as its result
MOST_FORKS = 16  # of a sample
MOST_RESULT = 8192  # characters of a tool's result; the rest is cut off
MARK = "\u2042"  # no template has this character
NO_TOOLS = "it does not show the tools; docs/agents.md has a chat_template.jinja that does"
MOST_PER_TOKEN = 16  # characters: a prompt with more is too long, which needs no tokenizer to know
HEAVY = 2**16  # characters of messages that a thread renders and encodes, so that others do not wait for it
KNOWN = 2**14  # most characters of messages whose ids are remembered: 2,048 times these and their ids are 160 MiB
ENCODER = ThreadPoolExecutor(1, "encode")
WORKERS = ThreadPoolExecutor(512, "tool")  # what tools and journals wait in; its threads are made as they are needed


class AgentError(RuntimeError):
    """An error of an agent or a tool that ends the run. The message is one line that says where."""


class TooLong(AgentError):
    """A prompt that is too long for the model. limit: tokens of prompt and answer; size: the prompt's."""

    def __init__(self, message, limit, size):
        super().__init__(message)
        self.limit = limit
        self.size = size


class ToolCall(NamedTuple):
    id: str  # call_<turn>_<i>
    name: str
    arguments: dict


class Reply(NamedTuple):
    text: str  # without the tool calls
    tool_calls: list  # of ToolCall
    tokens: list  # ids as sampled
    truncated: bool  # cut by length, or not even begun: nothing can follow


class Turn(NamedTuple):
    """A turn of the model in a dialogue: its tokens are ids[start:end]."""

    start: int
    end: int
    truncated: bool  # cut by length
    text: str
    tool_calls: list
    rewards: list  # given by chat.reward
    message: int  # its index among the dialogue's messages, which may have texts of the assistant that are no turn


# ------------------------------------------------------------------------------------------------------------------
# the chat template


class Template:
    """
    A tokenizer's chat template, used so that tokens are only appended. arguments: of the template, such as
    dict(enable_thinking=False); stop_tokens: ids that end the model's turns.
    """

    def __init__(self, tokenizer, stop_tokens, arguments):
        self.tokenizer = tokenizer
        self.arguments = arguments
        self.stop_tokens = stop_tokens
        self.stops = [tokenizer.decode([i]) for i in stop_tokens]
        self.checked = set()  # sets of tools
        self.known = functools.lru_cache(2048)(self._ids)  # samples of a prompt have the same messages
        self.call_marks = [*"<[{"]  # what a call of a tool may begin with, in any model's format

    def render(self, messages, tools, generate=True):
        return self.tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=generate, tokenize=False, **self.arguments
        )

    def encode(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids, special=False):
        return self.tokenizer.decode(ids, skip_special_tokens=not special)

    def suffix(self, messages, tools, calls=(), past=()):
        """
        (the stop text of a turn of the model with these calls, the text between it and the next turn if these messages
        come between). past: messages before the turn, on which the result must not depend.
        """
        text = self.render([*past, told_user(MARK), told_turn(MARK, calls), *messages], tools)
        at = text.find(MARK)
        # Each word is looked for behind the one before, as the messages may have the same words. Some templates leave
        # out the text of a turn that has calls.
        for word in (MARK, *(call.name for call in calls)):
            found = text.find(word, at + 1)
            at = max(at, found) if calls else found
        ends = [(text.find(stop, at), stop) for stop in self.stops if stop in text[at:]]
        if at < 0 or not ends:
            raise ValueError(f"no stop token {self.stops} after a turn of the model: {text!r}")
        end, stop = min(ends)
        return stop, text[end + len(stop) :]

    def turn(self, reply):
        """The ids of a turn of the model: a text, or its calls [(name, arguments)]."""
        if isinstance(reply, str):
            return [*self.encode(reply), self.stop_tokens[0]]
        before = [told_user(".")]
        told = [*before, told_turn("", numbered(0, reply))]
        text = self.render(told, None, False).removeprefix(self.render(before, None))
        return self.encode(text[: min(i for i in map(text.rfind, self.stops) if i >= 0)]) + self.stop_tokens[:1]

    def first(self, messages, tools):
        """The ids with which a dialogue begins, up to the model's first turn."""
        return self._remembered(messages, tools)

    def _remembered(self, *told):
        told = json.dumps(told)
        return (self.known if len(told) <= KNOWN else self._ids)(told).tolist()

    def _ids(self, told):
        messages, tools, *last = json.loads(told)
        if last:
            calls = []
            if tools and messages[0]["role"] == "tool":
                calls = [ToolCall(m["tool_call_id"], m["name"], {}) for m in messages if m["role"] == "tool"]
            stop, text = self.suffix(messages, tools, calls)
            text = text if last[0] in self.stop_tokens else stop + text
        else:
            text = self.render(messages, tools)
        return array("i", self.encode(text))

    def next(self, messages, tools, last):
        """The ids of these messages between two turns of the model, of which the first ended with the token `last`."""
        return self._remembered(messages, tools, last)

    def check(self, name):
        """
        Refuses a template that cannot be continued, in one line; prints what it does to the thinking of earlier turns.
        name: the model's, for the line.
        """
        require(self.tokenizer.chat_template, f"{name}: its tokenizer has no chat template, which an agent needs")
        user = told_user("a")
        thought = told_turn("<think>thought</think>b")
        try:
            self.check_continuation(None)
            drops = "thought" not in self.render([user, thought, user], None)
        except Exception as error:  # a template may raise anything
            require(False, f"{name}: its chat template cannot be used: {' '.join(str(error).split())}")
        if drops and os.environ.get("RANK", "0") == "0":
            print("chat template: drops the thinking of earlier turns; here they stay as they were sampled", flush=True)

    def check_continuation(self, tools):
        """Raises ValueError, with two renderings, unless a dialogue's rendering with these tools grows at its end."""

        def check(fits, why, *renderings):
            if not fits:
                raise ValueError(f"{why}: {' | '.join(map(repr, renderings))}")

        user = told_user("a")
        turn = told_turn("b")
        new = [told_user("c")]
        pasts = ([], [user, turn])
        for past in pasts:
            begun = self.render([*past, user], tools, False)
            whole = self.render([*past, user, turn, *new], tools)
            check(whole.startswith(begun), "a rendering does not go on from the one before", begun, whole)
        suffixes = [self.suffix(new, tools, past=past)[1] for past in pasts]
        check(suffixes[0] == suffixes[1], "what follows a turn depends on what was before it", *suffixes)
        ids = self.next(new, tools, self.stop_tokens[0])
        check(self.encode(whole)[-len(ids) :] == ids, "its parts are encoded in another way than the whole", whole)
        if tools:
            calls = numbered(0, [(tools[0]["function"]["name"], {})] * 2)
            text = self.suffix([told_result(call, "result") for call in calls], tools, calls)[1]
            check(text.count("result") == 2, "it does not show the results of tools", text)
            # a template's own words may have a tool's name in them
            shown, own = (self.render(new, given).count(calls[0].name) for given in (tools, None))
            if shown <= own:
                raise ValueError(NO_TOOLS)


def numbered(turn, calls):
    """The ToolCalls of a turn's calls [(name, arguments)]."""
    return [ToolCall(f"call_{turn}_{i}", name, arguments) for i, (name, arguments) in enumerate(calls)]


def told_calls(calls):
    """Calls as a template wants them."""
    return [
        dict(id=call.id, type="function", function=dict(name=call.name, arguments=call.arguments)) for call in calls
    ]


def told_user(text):
    """A text for the model as a message."""
    return {"role": "user", "content": text}


def told_turn(text, calls=()):
    """A turn of the model as a message."""
    return {"role": "assistant", "content": text} | ({"tool_calls": told_calls(calls)} if calls else {})


def told_result(call, text):
    """A call's result as a message."""
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}


# ------------------------------------------------------------------------------------------------------------------
# tools


def impure(function):
    """Marks a tool whose result is not a function of its arguments, such as a search: rule 7 does not call it again."""
    function.impure = True
    return function


def tools_of(tools):
    """
    {name: function} of a list of functions, or of an object whose public methods are the tools. A function may be a
    schema, of a tool that only the agent can run.
    """
    if not isinstance(tools, (list, tuple)):
        public = (name for name in dir(type(tools)) if name[0] != "_" and name not in ("reset", "get_reward"))
        tools = [getattr(tools, name) for name in public if callable(getattr(tools, name))]
    return {f["function"]["name"] if isinstance(f, dict) else f.__name__: f for f in tools}


schemas = WeakKeyDictionary()  # {function: schema}; an agent may make functions for each episode


def schema_of(function):
    """A tool's JSON schema, from its types and its docstring."""
    from transformers.utils import get_json_schema

    key = getattr(function, "__func__", function)  # not the method of one episode's object, which would be kept
    if key not in schemas:
        schemas[key] = get_json_schema(function)
    return schemas[key]


def environment(kind):
    """An agent of an environment class, as in TRL: reset(**row) may return a first text, get_reward() is the reward."""

    async def solve(chat, row):
        env = kind()
        chat.user("\n".join(filter(None, (row["prompt"], env.reset(**row)))))
        while calls := (await chat.generate(tools=env)).tool_calls:
            await chat.call(calls)
        return env.get_reward()

    return solve


class Journal:
    """
    The results from outside for the samples of a prompt, a line of JSON each, on the disk before they are used.
    entries: {(sample, at): entry}. Raises AgentError for the journal of another run.
    """

    def __init__(self, path, run):
        self.path = path
        self.run = run
        self.lock = threading.Lock()
        self.file = None
        self.entries = {}
        if not path.exists():
            return
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]  # a kill can leave half a line, of a result that nobody has used
        os.truncate(path, len(whole))
        for entry in map(json.loads, whole.splitlines()):
            if entry["run"] != run:
                raise AgentError(f"{path}: a journal of run {entry['run']}, expected {run}; delete it")
            self.entries[entry["sample"], entry["at"]] = entry

    def write(self, entry):
        with self.lock:
            self.file = self.file or open(self.path, "ab", buffering=0)  # most agents have nothing to note
            self.file.write(json.dumps(entry | dict(run=self.run)).encode() + b"\n")
            os.fsync(self.file.fileno())

    def close(self):
        if self.file:
            self.file.close()

    def of(self, sample):
        """The entries of a sample, in an order and with the fields that two runs share."""
        keys = ("sample", "at", "name", "arguments", "result")
        return [{key: entry[key] for key in keys} for (g, _), entry in sorted(self.entries.items()) if g == sample]


# ------------------------------------------------------------------------------------------------------------------
# a sample


@dataclass(eq=False)
class Episode:
    """
    A sample: the dialogues of an agent with the model, one as a rule.

    where: 'rl step 3, prompt 2, sample 5', for errors. sample: its number in the group. key: what its noise follows
    from. source(chat, stop, most): draws the next tokens of a dialogue, at most `most`: (tokens, log-probs).
    parse(chat, text): (text, [(name, arguments)]). journal: a Journal. again: tools are called although the
    journal has their results, and must return the same. most_tokens: of a dialogue with its prompt.
    """

    config: dict
    template: Template
    where: str
    sample: int
    key: list
    source: Callable
    parse: Callable
    journal: Journal
    again: bool = False
    most_tokens: int = 2**62
    most_forks: int = MOST_FORKS

    def __post_init__(self):
        self.chats = []
        self.errors = 0
        self.in_order = asyncio.Lock()  # of the methods of an object, which may change it
        # for the watchdog
        self.moved = time.monotonic()
        self.doing = "its start"
        self.asking = 0

    async def play(self, solve, row):
        """The sample's reward: what `solve` returns and what it gave its turns."""
        chat = Chat(self)
        self.moved = time.monotonic()
        try:
            with run_of(self.config):
                value = finite(await solve(chat, dict(row)), "it")
        except AgentError:
            raise
        except (Exception, SystemExit) as error:
            raise AgentError(f"agent failed on {self.where}, {chat.now()}: {describe(error)}") from error
        self.chats = sorted((chat for chat in self.chats if chat.turns), key=lambda chat: chat.path)
        if not self.chats:
            raise AgentError(f"agent failed on {self.where}: it returned without a turn of the model")
        return value

    async def once(self, at, name, arguments, act, known=True):
        """The journal's result of this request to the outside, if `known`; else that of act(), once it is journaled."""
        entry = self.journal.entries.get((self.sample, at))
        asked = json.loads(json.dumps(arguments))
        if entry and (entry["name"], entry["arguments"]) != (name, asked):
            was = f"{entry['name']}({entry['arguments']})"
            raise AgentError(f"{self.where}, {at}: the agent asks for {name}({asked}), the journal has {was}")
        if entry and known:
            return entry["result"]
        if self.again and not entry:
            raise AgentError(f"{self.where}, {at}: run again, the agent asks for {name}({asked}), as it did not before")
        self.doing = f"{at} ({name})"
        started = self.moved = time.monotonic()
        result = await act()
        self.moved = time.monotonic()
        if entry and entry["result"] != result:
            why = "what is not a function of its arguments is for chat.do, or marked @impure"
            raise AgentError(f"{self.where}, {at}: {name} gave {entry['result']!r} and now {result!r}; {why}")
        if not entry:
            entry = dict(sample=self.sample, at=at, name=name, arguments=asked, result=result)
            self.journal.entries[self.sample, at] = entry
            await beside(self.journal.write, entry | dict(seconds=self.moved - started))
        return result


@contextmanager
def watched(episodes, seconds, end):
    """Inside, calls end(line) if an episode makes no progress for `seconds`, in a tool or in a loop."""
    over = threading.Event()

    def watch():
        while not over.wait(min(1, seconds / 4)):
            for e in list(episodes):
                if not e.asking and time.monotonic() - e.moved > seconds:
                    end(f"{e.where}, {e.doing}: no progress for agent_timeout={seconds:g} s")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


async def beside(function, *args, **kwargs):
    """function(*args, **kwargs), beside all else: awaited, or in a thread."""
    call = functools.partial(function, *args, **kwargs)
    if inspect.iscoroutinefunction(function):
        return await call()
    return await asyncio.get_running_loop().run_in_executor(WORKERS, copy_context().run, call)


class Chat:
    """A dialogue with the model. ids: all its tokens; mask: whether the policy drew it, token by token."""

    def __init__(self, episode, path=()):
        self.episode = episode
        self.path = path
        self.ids = []
        self.mask = []
        self.logprobs = []
        self.messages = []
        self.said = 0  # number of messages, turns among them, already in ids
        self.turns = []
        self.tools = None
        self.schemas = []
        self.ended = False
        self.asked_after = 0
        self.forks = 0
        self.acts = 0
        self.calls = 0
        # For an endpoint: more parameters and options of the engine for a turn, a listener to its tokens, and the
        # engine's report of the latest one (RolloutEngine.generate).
        self.params = {}
        self.options = {}
        self.hear = None
        self.meta = {}
        seed = noise_seed(episode.config, episode.key[0])
        self.random = random.Random(repr((seed, episode.key, path)))
        episode.chats.append(self)

    def now(self):
        """'fork 0.1, turn 2': where the dialogue is."""
        fork = f"fork {'.'.join(map(str, self.path))}, " if self.path else ""
        return f"{fork}turn {max(0, len(self.turns) - 1)}"

    def error(self, why):
        """The AgentError that says where it happened."""
        return AgentError(f"{self.episode.where}, {self.now()}: {why}")

    def _too_long(self, size):
        longest = self.episode.config["max_prompt_tokens"]
        line = f"the prompt has {size} tokens, over max_prompt_tokens={longest}"
        return TooLong(str(self.error(line)), min(longest + 1, self.episode.most_tokens), size)

    def system(self, text):
        self.messages.append({"role": "system", "content": text})

    def user(self, text):
        self.messages.append(told_user(text))

    def reward(self, value):
        """A reward for the latest turn."""
        if not self.turns:
            raise self.error("a reward before the model's first turn; return it, or call generate() first")
        self.turns[-1].rewards.append(finite(value, "the turn's reward"))

    def fork(self):
        """A new dialogue, empty, of the same sample: its turns are trained on with the sample's reward, too."""
        episode = self.episode
        self.forks += 1
        if len(episode.chats) > episode.most_forks:
            raise self.error(f"more than {episode.most_forks} forks (MOST_FORKS)")
        return Chat(episode, (*self.path, self.forks - 1))

    async def generate(self, tools=None, max_new_tokens=0, stop=()):
        """
        The model's next turn, of at most max_new_tokens (0: what is left), up to the first of the strings in `stop`.
        tools: functions with types and a docstring, or an object whose public methods are the tools; a dialogue keeps
        the tools of its first turn. After the end of a dialogue, by length or by max_turns, Replies are empty.
        """
        episode = self.episode
        stop = [stop] if isinstance(stop, str) else [*stop]
        longest = episode.config["max_prompt_tokens"]
        self._take(tools)
        fresh = self.messages[self.said :]
        if not fresh:
            raise self.error("generate() with nothing new to tell the model; use chat.user or chat.call first")
        size = len(json.dumps(fresh)) + (0 if self.turns else len(json.dumps(self.schemas)))  # characters
        if not self.turns and size > MOST_PER_TOKEN * (longest + 1024):
            raise self._too_long(f"more than {longest}")
        if self.ended:
            ids = []
        elif size < HEAVY:
            ids = self._encode(fresh)
        else:
            ids = await asyncio.get_running_loop().run_in_executor(ENCODER, self._encode, fresh)
        if not self.turns and len(ids) > longest:
            raise self._too_long(len(ids))
        prompt = self.turns[0].start if self.turns else len(ids)
        most = min(prompt + episode.config["max_new_tokens"], episode.most_tokens)
        room = most - len(self.ids) - len(ids)
        if self.ended or room <= 0 or len(self.turns) == episode.config["max_turns"]:
            self.ended = True
            self.asked_after += 1
            if self.asked_after > AFTER_THE_END:
                raise self.error(f"asked {AFTER_THE_END} times for a turn after the dialogue's end (Reply.truncated)")
            return Reply("", [], [], True)
        self._append(ids, False, [0.0] * len(ids))
        episode.asking += 1
        tokens, logprobs = await episode.source(self, stop, min(room, max_new_tokens or room))
        episode.asking -= 1
        episode.moved = time.monotonic()
        # Under a grammar they are of another distribution than the policy's, whose log-probs the trainer has.
        self._append(tokens, not self.params, logprobs)
        return self._reply(tokens, stop)

    def _append(self, ids, drawn, logprobs):
        self.ids += ids
        self.mask += [drawn] * len(ids)
        self.logprobs += logprobs

    def _take(self, tools):
        taken = tools_of(tools or ())
        if self.tools is None:
            try:
                self.schemas = [f if isinstance(f, dict) else schema_of(f) for f in taken.values()]
            except Exception as error:
                raise self.error(f"a tool needs types and a docstring: {describe(error)}") from error
        elif tools and taken.keys() != self.tools.keys():
            raise self.error(f"tools {', '.join(taken)}: must be those of the first turn; fork() for others")
        self.tools = taken or self.tools or {}

    def _encode(self, fresh):
        template = self.episode.template
        try:
            if not self.turns:
                if self.schemas and (names := tuple(self.tools)) not in template.checked:
                    template.check_continuation(self.schemas)
                    if len(template.checked) > 1000:  # anybody may send tools of any names
                        template.checked.clear()
                    template.checked.add(names)
                return template.first(fresh, self.schemas)
            return template.next(fresh, self.schemas, self.ids[-1])
        except Exception as error:  # a template may raise anything
            raise self.error(f"the prompt cannot be made into tokens: {describe(error)}") from error

    def _reply(self, tokens, stop):
        template = self.episode.template
        ended = tokens[-1] in template.stop_tokens
        # The marks of a tool call may be special tokens.
        text = template.decode(tokens[:-1] if ended else tokens, bool(self.tools))
        stops = [i for i in map(text.find, stop) if i >= 0]
        text = text[: min(stops, default=None)]
        self.ended = not (ended or stops)
        calls = []
        if self.tools and not self.ended:
            text, calls = self.episode.parse(self, text)
            calls = numbered(len(self.turns), calls)
        end = len(self.ids)
        self.turns.append(Turn(end - len(tokens), end, self.ended, text, calls, [], len(self.messages)))
        self.messages.append(told_turn(text, calls))
        self.said = len(self.messages)
        return Reply(text, calls, tokens, self.ended)

    async def call(self, tool_calls):
        """
        The results (texts) of these calls, which become messages in this order. Functions run side by side, the methods
        of an object one after the other. What a tool raises is a result, too: 'Error: KeyError: 3'.
        """
        first = self.calls
        self.calls += len(tool_calls)
        results = await asyncio.gather(*[self._call(call, first + i) for i, call in enumerate(tool_calls)])
        self.episode.errors += sum(result.startswith("Error: ") for result in results)
        self.messages += map(told_result, tool_calls, results)
        return results

    async def _call(self, call, number):
        episode = self.episode
        f = self.tools.get(call.name)
        at = f"{self.now()}, call {number}"
        if f is None:
            return f"Error: no tool {call.name!r}"
        if number >= MOST_CALLS:
            return f"Error: no more than {MOST_CALLS} calls"
        method = hasattr(f, "__self__")
        # The calls of its methods bring an object to its state, so a resume makes them again.
        known = not method and (not episode.again or getattr(f, "impure", False))
        act = functools.partial(self._run, f, call.arguments, at)
        async with episode.in_order if method else nullcontext():
            return await episode.once(at, call.name, call.arguments, act, known)

    async def _run(self, f, arguments, at):
        """The text of a tool's result or error."""
        try:
            value = await beside(f, **arguments)
        except SandboxError as error:  # no result: the sandbox failed, not the program in it
            raise AgentError(f"{self.episode.where}, {at}: {f.__name__}: {error}") from error
        except (Exception, SystemExit) as error:
            value = f"Error: {type(error).__name__}: {error}"
        text = ADDRESS.sub("0x0", value if isinstance(value, str) else self._json(value, at))
        text = text.encode(errors="replace").decode()  # half of a character, JSON's "\ud83d", has no tokens
        return text if len(text) <= MOST_RESULT else f"{text[:MOST_RESULT]} .. ({len(text)} characters, cut)"

    def _json(self, value, at):
        try:
            return json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise AgentError(f"{self.episode.where}, {at}: returned what JSON cannot hold: {error}") from error

    async def do(self, function, *arguments):
        """
        function(*arguments), whose result is journaled: for requests to the outside. Arguments and result must be JSON.
        An exception ends the run, as a failure is no result; a resume tries again.
        """
        at = f"{self.now()}, do {self.acts}"
        self.acts += 1
        name = getattr(function, "__name__", repr(function))

        async def act():
            try:
                return json.loads(self._json(await beside(function, *arguments), at))
            except AgentError:
                raise
            except (Exception, SystemExit) as error:
                raise AgentError(f"{self.episode.where}, {at}: {name}: {describe(error)}") from error

        return await self.episode.once(at, name, [*arguments], act)
