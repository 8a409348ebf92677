"""
Dialogues of an agent without an engine: messages, tools, the journal, and the second run (onecurve/agents/chat.py).
The model's part is a script; templates and tokenizers are real ones. test_laws.py has the runs (L10).
"""

import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import threading
import time
import types
import weakref
from functools import partial

import pytest
import torch
from conftest import ROOT, SMALLEST
from transformers import AutoTokenizer

import rollout_server
import sync
import train_grpo as train
from configurator import named_arguments
from examples.calculator import add
from onecurve.agents import again, chat, endpoint
from onecurve.agents.sampler import Agent, AgentSampler, counts_of, tensors_of
from onecurve.algorithms import critic, turns
from onecurve.graders import sandbox
from onecurve.models import folders

CONFIG = train.DEFAULTS | dict(agent="x", max_prompt_tokens=400, max_new_tokens=600)

# As Qwen3's does: the thought of a turn that is not the last one is dropped, results of tools are a user's message
THINKING = """
{%- if tools %}<|im_start|>system\nTools:{% for t in tools %} {{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}
{%- else %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- set past = m.role == 'assistant' and not loop.last %}
{{- m.content.split('</think>')[-1] if past else m.content }}
{%- for c in m.tool_calls or [] %}{{ '\n<tool_call>\n' + (c.function | tojson) + '\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The scratch model's, with its chat template."""
    folder = tmp_path_factory.mktemp("scratch")
    folders.make_scratch_model(folder, CONFIG | SMALLEST)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def template(tokenizer):
    return chat.Template(tokenizer, [tokenizer.eos_token_id], {})


@pytest.fixture
def thinking(tokenizer):
    """The same characters under THINKING."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    ends = ["<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": ends})
    tokenizer.chat_template = THINKING
    return chat.Template(tokenizer, [tokenizer.convert_tokens_to_ids(ends[1])], {})


def in_memory():
    return types.SimpleNamespace(entries={}, write=lambda entry: None)


ROW = dict(prompt="3+4=", answer="7")


def episode_of(replies, template, journal=None, config=CONFIG):
    """An Episode in which the model says `replies`."""
    source, parse = again.scripted(replies, template)
    where = "rl step 3, prompt 2, sample 0"
    return chat.Episode(config, template, where, 0, ["rl", 3, 2, 0], source, parse, journal or in_memory())


def play(solve, replies, template, journal=None, config=CONFIG, row=ROW):
    """(the episode, its reward) of a dialogue in which the model says `replies`."""
    episode = episode_of(replies, template, journal, config)
    return episode, asyncio.run(episode.play(solve, row))


def error_of(solve, replies, template, **options):
    with pytest.raises(chat.AgentError) as error:
        play(solve, replies, template, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


async def calculate(chat, row):
    chat.user(row["prompt"])
    reply = await chat.generate(tools=[add])
    while reply.tool_calls:
        await chat.call(reply.tool_calls)
        reply = await chat.generate()
    return float(reply.text == row["answer"])


async def ask_twice(chat, row):
    for _ in range(2):
        chat.user("again?")
        await chat.generate()
    return 0.0


def calling(tool, results=None):
    """An agent that asks once, and runs the calls of this tool; their results are added to a list."""

    async def solve(chat, row):
        chat.user("go")
        reply = await chat.generate(tools=[tool])
        found = await chat.call(reply.tool_calls)
        if results is not None:
            results.extend(found)
        return 0.0

    return solve


CALLS = [[("add", dict(a=1, b=2)), ("add", dict(a=3, b=4))], [("add", dict(a=3, b=4))], "7"]


# ---- rule 1: ids are appended


@pytest.mark.parametrize("which", ["template", "thinking"])
def test_a_dialogue_has_its_renderings_tokens_and_masks_the_models_own(which, request):
    template = request.getfixturevalue(which)
    template.check("init_from='here'")
    episode, reward = play(calculate, CALLS, template)
    (c,) = episode.chats
    assert reward == 1 and [len(t.tool_calls) for t in c.turns] == [2, 1, 0]
    whole = template.render(c.messages, c.schemas, False)
    assert template.tokenizer.decode(c.ids) == whole.removesuffix("\n")  # the newline would come with the next message
    assert c.ids == template.encode(whole.removesuffix("\n"))
    written = "".join(template.tokenizer.decode(c.ids[t.start : t.end]) for t in c.turns)
    masked = [i for i, mine in zip(c.ids, c.mask) if mine]
    assert template.tokenizer.decode(masked) == written and written.count(template.stops[0]) == 3
    roles = [m["role"] for m in c.messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert [m["content"] for m in c.messages if m["role"] == "tool"] == ["3", "7", "7"]


def test_a_special_tokens_text_becomes_that_token_as_in_transformers(template):
    told = [chat.told_user("a<eos>b")]
    whole = template.tokenizer.apply_chat_template(told, add_generation_prompt=True)["input_ids"]
    assert template.first(told, []) == whole and whole.count(template.stop_tokens[0]) == 2


def test_a_sampled_thought_stays_although_the_template_drops_it(thinking, capsys, template):
    template.check("init_from='here'")
    assert capsys.readouterr().out == ""
    thinking.check("init_from='here'")
    assert "drops the thinking of earlier turns; here they stay" in capsys.readouterr().out

    replies = ["<think>hm</think>no", "<think>well</think>yes"]
    (c,) = play(ask_twice, replies, thinking)[0].chats
    theirs = thinking.decode(thinking.encode(thinking.render(c.messages, None, False)))
    ours = theirs.replace("assistant\nno", "assistant\n<think>hm</think>no").removesuffix("\n")
    assert thinking.decode(c.ids) == ours != theirs
    for turn, text in zip(c.turns, replies):
        assert c.ids[turn.start : turn.end] == thinking.turn(text)


def test_the_templates_arguments_reach_it(thinking):
    quick = chat.Template(thinking.tokenizer, thinking.stop_tokens, named_arguments("enable_thinking=False"))
    quick.check("init_from='here'")

    one, other = (t.decode(play(ask_twice, ["a", "b"], t)[0].chats[0].ids) for t in (quick, thinking))
    assert one == other.replace("assistant\n", "assistant\n<think>\n\n</think>\n\n") != other
    with pytest.raises(ValueError):
        named_arguments("enable_thinking")


@pytest.mark.parametrize(
    "text, why",
    {
        "{% for m in messages %}{{ loop.length }}{{ m.content }}<eos>{% endfor %}": "does not go on",
        "{% for m in messages %}{{ m.content }}<eos>{{ loop.index }}{% endfor %}": "depends on what was before",
        "{% for m in messages %}{{ m.content }}{% endfor %}": "no stop token",
        "": "no chat template",
    }.items(),
)
def test_a_template_that_cannot_continue_is_refused_with_renderings(template, monkeypatch, text, why, refusal):
    monkeypatch.setattr(template.tokenizer, "chat_template", text)
    line = refusal(template.check, "init_from='here'")
    assert line.startswith("error: init_from='here'") and why in line and (not text or line.count("'") >= 4)


NO_TOOLS = """{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system
You are helpful<|im_end|>
{% endif %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ASKERS = """
from examples.calculator import add

async def with_tool(chat, row):
    chat.user(row["prompt"])
    await chat.generate(tools=[add])

async def without(chat, row):
    chat.user(row["prompt"])
    await chat.generate()

async def world_first(chat, row):
    await chat.do(print, "the world is asked")
    await chat.generate(tools=[add])
"""


def schema(name):
    """A tool of this name, without arguments."""
    return dict(type="function", function=dict(name=name, description="", parameters=dict(type="object")))


async def refusal_of_tool(name, template):
    """(status, line) with which a served model's client is refused that has such a tool."""
    body = dict(messages=[chat.told_user("a")], tools=[schema(name)])
    with pytest.raises(endpoint.Refusal) as refused:
        await endpoint.Session(chat.Chat(episode_of(["x"], template))).answer(*endpoint.read(body), b"", False).task
    return refused.value.status, str(refused.value)


def test_a_tool_that_is_made_for_an_episode_goes_with_it(template):
    made = []

    async def solve(chat, row):
        def look_up(x: int) -> str:
            """Looks x up in the row.

            Args:
                x: a place
            """
            return row["prompt"][x]

        made.append(weakref.ref(look_up))
        chat.user("go")
        await chat.generate(tools=[look_up])
        return 0.0

    play(solve, ["x"], template)
    gc.collect()
    assert [tool() for tool in made] == [None]


def test_a_template_without_tools_is_refused_early_but_not_the_docs_one(thinking, tmp_path, capsys, refusal):
    """SmolLM2's is such a one. A tool called `help` was served all the same: its name is in the system prompt."""
    thinking.tokenizer.chat_template = NO_TOOLS
    (tmp_path / "askers.py").write_text(ASKERS)

    def tried(name):
        config = CONFIG | dict(agent=f"{tmp_path}/askers.py:{name}")
        Agent(config, "here", thinking.tokenizer, thinking.stop_tokens).check_tools(dict(prompt="3+4="))

    tried("without")
    tried("world_first")
    assert capsys.readouterr() == ("", "")
    why = "it does not show the tools; docs/agents.md has a chat_template.jinja that does"
    line = refusal(tried, "with_tool")
    assert line.startswith("error: init_from='here': ") and line.endswith(why)
    for name in ("add", "help"):
        with pytest.raises(ValueError, match=why):
            thinking.check_continuation([schema(name)])
    status, line = asyncio.run(refusal_of_tool("help", thinking))
    assert status == 400 and line.endswith(why)

    page = (ROOT / "docs/agents.md").read_text()
    thinking.tokenizer.chat_template = page.split("```jinja\n")[1].split("```")[0]
    thinking.check("init_from='here'")
    thinking.check_continuation([schema("help")])
    tried("with_tool")
    (c,) = play(calculate, CALLS, thinking, config=CONFIG | dict(max_prompt_tokens=600))[0].chats
    whole = thinking.render(c.messages, c.schemas, False)
    assert thinking.decode(c.ids, special=True) == whole.removesuffix("\n")
    assert whole.startswith("<|im_start|>system\nTools, ")
    assert '{"type": "function", "function": {"name": "add"' in whole
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>' in whole


def test_a_cut_turn_ends_the_dialogue_and_asking_again_ends_the_run(template):
    seen = []

    async def solve(chat, row, often=3):
        chat.user("abc")
        for _ in range(often):
            seen.append(await chat.generate(max_new_tokens=4))
            chat.user("go on")
        return 0.5

    episode, reward = play(solve, ["0123456", "never"], template)
    (c,) = episode.chats
    (turn,) = c.turns
    assert reward == 0.5 and [(r.text, r.truncated) for r in seen] == [("0123", True), ("", True), ("", True)]
    assert turn.truncated and template.decode(c.ids).endswith("0123")
    assert counts_of([episode])["truncated"] == 1
    line = error_of(lambda chat, row: solve(chat, row, 200), ["0123456"], template)
    assert line.startswith("rl step 3, prompt 2, sample 0, turn 0: asked 100 times")


def test_limits_are_counts_of_turns_of_calls_of_tokens_and_of_forks(template, monkeypatch):
    async def ask(chat, row):
        for n in range(20):
            chat.user(str(n))
            reply = await chat.generate()
            if reply.truncated:
                return float(n)

    assert play(ask, ["x"] * 20, template)[1] == CONFIG["max_turns"]
    assert play(ask, ["x"] * 20, template, config=CONFIG | dict(max_prompt_tokens=10, max_new_tokens=9))[1] == 2
    three = [("add", dict(a=i, b=1)) for i in range(3)]
    monkeypatch.setattr(chat, "MOST_CALLS", 4)
    (c,) = play(calculate, [three, three, "7"], template)[0].chats
    results = [m["content"] for m in c.messages if m["role"] == "tool"]
    assert results == ["1", "2", "3", "1", *["Error: no more than 4 calls"] * 2]
    line = error_of(ask, ["x"], template, config=CONFIG | dict(max_prompt_tokens=2))
    assert line == "rl step 3, prompt 2, sample 0, turn 0: the prompt has 4 tokens, over max_prompt_tokens=2"

    async def split(chat, row):
        while True:
            chat.fork()

    assert "more than 16 forks (MOST_FORKS)" in error_of(split, [], template)


# ---- rules 5 and 6: tools


def test_functions_run_side_by_side_and_results_keep_the_order_of_calls(template):
    gate = threading.Barrier(3, timeout=20)
    results = []

    def wait(i: int) -> int:
        """Waits for the others, and the longer the earlier it was called.

        Args:
            i: number of the call
        """
        gate.wait()
        time.sleep(0.02 * (3 - i))
        return i

    play(calling(wait, results), [[("wait", dict(i=i)) for i in range(3)]], template)
    assert results == ["0", "1", "2"]


class Counter:
    def __init__(self):
        self.n = 0

    def reset(self, **row):
        return "count to " + row["answer"]

    def up(self, by: int) -> str:
        """Counts up.

        Args:
            by: this much
        """
        before = self.n
        time.sleep(random.random() / 50)
        self.n = before + by
        return f"{before} -> {self.n}"

    def get_reward(self):
        return float(self.n)


def test_an_environment_class_is_an_agent_with_its_methods_called_in_turn(template):
    replies = [[("up", dict(by=i)) for i in (1, 2, 4)], "done"]
    episode, reward = play(chat.environment(Counter), replies, template)
    (c,) = episode.chats
    assert reward == 7 and [m["content"] for m in c.messages][0] == "3+4=\ncount to 7"
    assert chat.schema_of(Counter().up) is chat.schema_of(Counter().up)  # and so no episode's object is kept
    assert [m["content"] for m in c.messages if m["role"] == "tool"] == ["0 -> 1", "1 -> 3", "3 -> 7"]


def test_the_model_reads_what_a_tool_raises_or_returns_in_a_stable_form(template):
    def look(what: str) -> str:
        """Looks.

        Args:
            what: at
        """
        if what == "exit":
            sys.exit(3)
        return {"object": str(object()), "long": "x" * 9000, "list": [1, {"a": None}]}[what]

    calls = [("look", dict(what=w)) for w in ("object", "long", "list", "exit", "nothing")]
    calls += [("sing", {}), ("look", dict(where=1))]
    seen = []
    play(calling(look, seen), [calls], template)
    wrong = seen.pop()
    assert seen == [
        "<object object at 0x0>",
        "x" * 8192 + " .. (9000 characters, cut)",
        '[1, {"a": null}]',
        "Error: SystemExit: 3",
        "Error: KeyError: 'nothing'",
        "Error: no tool 'sing'",
    ]
    assert wrong.startswith("Error: TypeError:") and "unexpected keyword argument 'where'" in wrong


def no_types(a):
    """Has a docstring.

    Args:
        a: something
    """


def no_docstring(a: int):
    pass


def returns_a_set(a: int) -> set:
    """Gives what JSON has no form for.

    Args:
        a: something
    """
    return {a}


def returns_nan(a: int) -> float:
    """Gives what JSON has no form for.

    Args:
        a: something
    """
    return float("nan")


@pytest.mark.parametrize("tool", [no_types, no_docstring, returns_a_set, returns_nan])
def test_a_tool_that_cannot_be_one_ends_the_run_with_one_line(tool, template):
    line = error_of(calling(tool), [[(tool.__name__, dict(a=1))]], template)
    if tool in (no_types, no_docstring):
        assert line.startswith("rl step 3, prompt 2, sample 0, turn 0") and "a tool needs types and a docstring" in line
    else:
        assert line.startswith("rl step 3, prompt 2, sample 0, turn 0, call 0")
        assert "returned what JSON cannot hold" in line


@pytest.mark.parametrize(
    "expected, wrong",
    {
        "ZeroDivisionError: division by zero (test_chat.py:": lambda: 1 / 0,
        "it returned None, not a finite number": lambda: None,
        "it returned '1.0', not a finite": lambda: "1.0",
        "SystemExit": sys.exit,
    }.items(),
)
def test_an_agent_that_fails_or_returns_no_number_ends_the_run_in_a_line(wrong, expected, template):
    async def solve(chat, row):
        chat.user("go")
        await chat.generate()
        return wrong()

    line = error_of(solve, ["x"], template)
    assert line.startswith("agent failed on rl step 3, prompt 2, sample 0, turn 0: ") and expected in line


def test_an_agent_that_says_nothing_new_ends_the_run(template):
    async def twice(chat, row):
        chat.user("a")
        await chat.generate()
        await chat.generate()

    assert "nothing new to tell the model" in error_of(twice, ["x", "y"], template)


@pytest.mark.parametrize("hang", ["tool", "await", "loop"])
def test_what_never_ends_is_named_by_the_watchdog_whatever_it_hangs_in(hang, template):
    said = []
    over = threading.Event()

    def forever(a: int) -> int:
        """Waits.

        Args:
            a: nothing
        """
        over.wait(20)
        return 0

    async def solve(chat, row):
        chat.user("go")
        reply = await chat.generate(tools=[forever])
        if hang == "tool":
            await chat.call(reply.tool_calls)
        while hang == "loop" and not over.is_set():
            pass
        while not over.is_set():
            await asyncio.sleep(0.01)
        return 0.0

    def end(line):
        said.append(line)
        over.set()

    episode = episode_of([[("forever", dict(a=1))]], template)
    began = time.monotonic()
    with chat.watched({episode}, 0.5, end):
        asyncio.run(episode.play(solve, {}))
    assert 0.5 < time.monotonic() - began < 10
    place = {"tool": "turn 0, call 0 (forever)"}.get(hang, "its start")
    assert said[0] == f"rl step 3, prompt 2, sample 0, {place}: no progress for agent_timeout=0.5 s"


# ---- rule 4: the journal


class Crash(BaseException):
    """Stands for a SIGKILL between a call and its result."""


def test_a_resume_reads_what_was_done_and_asks_only_for_the_rest(template, tmp_path):
    path = tmp_path / "journal_0002.jsonl"
    asked = []
    crashes = ["b"]
    results = []

    def search(what: str) -> str:
        """Searches.

        Args:
            what: for
        """
        asked.append(what)
        if what in crashes:
            raise Crash
        return f"{what} {random.random()}"

    async def solve(chat, row, first="dice"):
        chat.user("go")
        seen = [await chat.do(search, first)]
        reply = await chat.generate(tools=[search])
        while reply.tool_calls:
            seen += await chat.call(reply.tool_calls)
            reply = await chat.generate()
        results.append(seen)
        return 0.0

    def attempt(run="run", solve=solve):
        asked.clear()
        journal = chat.Journal(path, run)
        play(solve, [[("search", dict(what=x))] for x in "ab"] + ["x"], template, journal)

    with pytest.raises(Crash):
        attempt()
    assert asked == ["dice", "a", "b"]
    with open(path, "ab") as file:
        file.write(b'{"sample": 0, "at": "turn 1, ca')  # half a line, as a kill can leave it
    crashes.clear()
    attempt()
    assert asked == ["b"]  # what was cut off is asked for again, and nothing else
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [e["result"] for e in entries] == results[0] and len({e["at"] for e in entries}) == 3
    attempt()
    assert asked == [] and results[1] == results[0]
    with pytest.raises(chat.AgentError, match="a journal of run run, expected other; delete it"):
        attempt("other")
    line = "prompt 2, sample 0, turn 0, do 0: the agent asks for search.*other.*, the journal has search.*dice"
    with pytest.raises(chat.AgentError, match=line):
        attempt(solve=lambda chat, row: solve(chat, row, "other"))


def test_a_resume_repeats_an_objects_calls_and_they_must_do_the_same(template, tmp_path):
    replies = [[("up", dict(by=1))], [("up", dict(by=2))], "done"]
    journal = chat.Journal(tmp_path / "journal", "run")
    assert play(chat.environment(Counter), replies, template, journal)[1] == 3
    assert play(chat.environment(Counter), replies, template, journal)[1] == 3  # its state is that of its calls
    with pytest.raises(chat.AgentError, match=r"turn 0, call 0: up gave '0 -> 1' and now '7 -> 8'"):

        class Other(Counter):
            def __init__(self):
                self.n = 7

        play(chat.environment(Other), replies, template, journal)


def test_a_result_is_on_the_disk_before_the_agent_has_it(template, tmp_path):
    path = tmp_path / "journal"

    async def solve(chat, row):
        chat.user("go")
        await chat.generate()
        value = await chat.do(lambda: [1, ("x", None)])
        assert value == [1, ["x", None]]  # as JSON has it, in a first run, too
        assert json.loads(path.read_text().splitlines()[-1])["result"] == value
        return 1.0

    assert play(solve, ["x"], template, chat.Journal(path, "run"))[1] == 1


def test_what_fails_outside_is_no_result_and_is_tried_again(template, tmp_path):
    tries = []
    journal = chat.Journal(tmp_path / "journal", "run")

    def judge(text):
        tries.append(text)
        if len(tries) == 1:
            raise ConnectionError("no route")
        return 1.0

    async def solve(chat, row):
        chat.user("go")
        return await chat.do(judge, (await chat.generate()).text)

    line = error_of(solve, ["x"], template, journal=journal)
    why = "judge: ConnectionError: no route (test_chat.py:"
    assert line.startswith(f"rl step 3, prompt 2, sample 0, turn 0, do 0: {why}")
    assert play(solve, ["x"], template, journal)[1] == 1 and tries == ["x", "x"]


def test_a_tool_whose_sandbox_was_killed_is_no_result_either(template, monkeypatch):
    def killed(source):
        raise sandbox.SandboxError("the sandbox itself ended with status -9: killed")

    monkeypatch.setattr(sandbox, "run_program", killed)
    line = error_of(calling(sandbox.python), [[("python", dict(code="1"))]], template)
    why = "python: the sandbox itself ended with status -9: killed"
    assert line == f"rl step 3, prompt 2, sample 0, turn 0, call 0: {why}"


def test_the_journals_of_later_rounds_are_deleted_too(tmp_path, monkeypatch):
    """The prompts of dynamic sampling's second round have the numbers behind those of the first."""
    monkeypatch.setattr(rollout_server.Sampler, "sample", lambda *_: None)
    sampler = object.__new__(AgentSampler)
    sampler.running = set()
    sampler.config = CONFIG
    sampler.engine = types.SimpleNamespace(end=None)
    for index in (2, 3):
        sampler._journal_path(tmp_path, index).touch()
    sync.group_path(tmp_path, 3).touch()
    sampler.sample(tmp_path, rollout_server.Job("rl", 1, 1, {2: ROW, 3: ROW}, 2, None), ())
    assert [path.name for path in tmp_path.glob("journal_*")] == ["journal_0002.jsonl"]


# ---- rule 7: the second run


async def two_turns(chat, row, say):
    for _ in range(2):
        chat.user(say())
        reply = await chat.generate(tools=[add])
        if reply.tool_calls:
            await chat.call(reply.tool_calls)
    return 0.5


def play_again(solve, replies, template):
    """Runs an agent, and then again on what the first run has noted."""
    journal = in_memory()
    episode, reward = play(solve, replies, template, journal)
    noted = json.loads(json.dumps([again.record_of(c) for c in episode.chats]))
    source, parse = again.recorded(noted, [c.ids for c in episode.chats], template)
    where = "rl step 0, prompt 2, sample 0"
    second = chat.Episode(CONFIG, template, where, 0, episode.key, source, parse, journal, True)
    assert asyncio.run(second.play(solve, ROW)) == reward
    assert [c.ids for c in second.chats] == [c.ids for c in episode.chats]


REPLIES = [[("add", dict(a=1, b=2))], "x"]


def test_a_clock_a_global_and_random_numbers_are_named_by_the_second_run(template):
    count = []

    def number():
        count.append(1)
        return len(count)

    for impure in (time.time_ns, random.random, number):
        with pytest.raises(chat.AgentError, match="rl step 0, prompt 2, sample 0, turn 0: run again, the agent says"):
            play_again(partial(two_turns, say=lambda: str(impure())), REPLIES, template)


def test_the_random_numbers_that_an_agent_is_given_are_the_same_in_its_second_run(template):
    play_again(lambda chat, row: two_turns(chat, row, lambda: str(chat.random.random())), REPLIES, template)


def test_a_tool_with_a_clock_is_named_unless_it_is_marked(template):
    def now() -> int:
        """Says the time."""
        return time.time_ns()

    with pytest.raises(chat.AgentError, match=r"turn 0, call 0: now gave '\d+' and now '\d+'; .* @impure"):
        play_again(calling(now), [[("now", {})]], template)
    chat.impure(now)
    play_again(calling(now), [[("now", {})]], template)


async def a_set(chat, row):
    """The order of a set of strings changes from process to process."""
    return await two_turns(chat, row, lambda: "".join({"a", "b", "c", "d", "e", "f", "g", "h"}))


async def its_path(chat, row):
    """As a program with another Python than ours would notice."""
    return await two_turns(chat, row, lambda: "." + os.environ.get("PYTHONPATH", ""))


def test_the_second_run_is_in_a_process_where_sets_have_another_order(template, tmp_path):
    """With rollout files of an agent that says the same there, and of one that does not."""
    jobs = {}
    for index, solve in enumerate((its_path, a_set)):
        episodes, returned = zip(*[play(solve, REPLIES, template) for _ in range(2)])
        meta = dict(
            stream="rl",
            step=3,
            prompt=2,
            returned=returned,
            row=ROW,
            episodes=[[again.record_of(c) for c in e.chats] for e in episodes],
            journal=[[*e.journal.entries.values()] for e in episodes],
        )
        path = sync.group_path(tmp_path, index)
        sync.write_group(path, tensors_of(episodes, returned, 0), meta)
        config = CONFIG | dict(agent=f"{__file__}:{solve.__name__}")
        jobs[solve] = dict(config=config, model=template.tokenizer.name_or_path, paths=[str(path)])
    again.check_again(jobs[its_path])
    with pytest.raises(chat.AgentError, match="^rl step 3, prompt 2, sample 0, turn 0: run again, the agent says"):
        again.check_again(jobs[a_set])


def test_a_second_run_that_is_killed_is_told_in_one_line(monkeypatch):
    killed = subprocess.CompletedProcess("", -9, "", "")  # by a system that is short of memory, without a word
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: killed)
    with pytest.raises(chat.AgentError, match="^the process that runs agents again ended with status -9$"):
        again.check_again({})


# ---- forks, rewards of turns, and what the trainer gets


async def with_forks(chat, row):
    chat.user("abc")
    await chat.generate()
    chat.reward(0.25)
    for text in "xy":
        other = chat.fork()
        other.user(text + str(chat.random.random()))
        await other.generate()
        other.reward(0.5)
    chat.user("go on")
    await chat.generate()
    return 1.0


def test_forks_are_rows_of_a_sample_and_the_prompt_is_their_common_start(template):
    replies = {(): ["1", "2"], (0,): ["3"], (1,): ["4"]}
    episodes = []
    returned = []
    for g in range(2):
        scripts = {path: again.scripted(said, template)[0] for path, said in replies.items()}
        source = lambda c, *args, of=scripts: of[c.path](c, *args)  # noqa: E731
        episode = chat.Episode(CONFIG, template, "", g, ["rl", 0, 0, g], source, None, in_memory())
        returned.append(asyncio.run(episode.play(with_forks, {})))
        episodes.append(episode)
    t = tensors_of(episodes, returned, 7)
    assert t["sample"].tolist() == [0, 0, 0, 1, 1, 1] and t["turns"].tolist() == [2, 1, 1] * 2
    assert t["turn_rewards"].tolist() == [0.25, 1, 1.5, 1.5] * 2 and t["rewards"].tolist() == [2.25] * 2
    assert template.tokenizer.decode(t["prompt_tokens"]) == "<user>"
    assert set(t["weight_version"].tolist()) == {7}
    rows = [t["prompt_tokens"].tolist() + row.tolist() for row in t["tokens"].split(t["lengths"].tolist())]
    assert rows == [c.ids for e in episodes for c in e.chats]
    first = template.tokenizer.decode(rows[0])
    assert first == "<user>abc<eos><assistant>1<eos><user>go on<eos><assistant>2<eos>"
    assert sync.Group(t, {}).response_lengths().tolist() == [8, 8]
    counts = counts_of(episodes)
    assert (counts["forks"], counts["turns"], counts["written_tokens"]) == (4, 8, 16)
    made = dict(counts=counts | dict(cached_tokens=0, prompt_tokens=1))
    assert Agent.metrics(None, [(t, made)] * 2)["turn_reward_mean"] == (0.25 + 1 + 1.5 + 1.5) / 4
    meta = dict(prompt=3, step=0)
    samples = train.samples_of([sync.Group(t, meta)] * 2, 0)
    assert [s.of for s in samples] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [s.name for s in samples[:4]] == ["prompt 3, sample 0"] * 3 + ["prompt 3, sample 1"]
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    c = types.SimpleNamespace(**CONFIG | dict(advantage="dr_grpo"))
    shared = train.with_advantages(samples, rewards, c)
    assert [s.advantages.unique().tolist() for s in shared] == [[0.5]] * 3 + [[-0.5]] * 3 + [[0]] * 6
    for kind, ours in (("sample", [0, 0, 0, 5]), ("turn", [0, 0.25, 0, 1])):
        assert critic.token_rewards(samples[0], 5.0, kind).tolist() == ours
    first = samples[0]._replace(turn=samples[0].turn[:2])  # its second turn has no loss
    assert critic.token_rewards(first, 5.0, "turn").tolist() == [0, 1.25]
    made["counts"]["written_tokens"] = 0
    with pytest.raises(SystemExit):
        Agent.metrics(types.SimpleNamespace(config=CONFIG), [(t, made)])


def test_a_turns_advantage_is_from_its_return_among_turns_of_its_number():
    def sample(of, rewards):
        turn = torch.tensor([k for k in range(len(rewards)) for _ in range(2)] + [-1])
        zeros = torch.zeros(len(turn))
        known = dict(of=of, turn_rewards=torch.tensor(rewards))
        return train.make_sample(torch.zeros(1), zeros, turn >= 0, zeros, turn, **known)

    samples = [sample(0, [0.0, 1.0]), sample(1, [1.0, 0.0, 4.0]), sample(2, [3.0]), sample(3, [3.0])]

    def by_turn(kind, gamma):
        return turns.advantages(samples, partial(train.advantages_of, kind=kind), 2, gamma)

    done = by_turn("dr_grpo", 0.5)
    # returns: 0 + .5, 1 | 1 + 0 + 1, 0 + 2, 4; the third turn of the second has no peer
    assert [s.advantages.tolist() for s in done[:2]] == [
        [-0.75, -0.75, -0.5, -0.5],
        [0.75, 0.75, 0.5, 0.5, 0.0, 0.0],
    ]
    assert all(s.advantages.unique().tolist() == [0] for s in done[2:])
    for gamma in (1.0, 0.5):
        assert float(by_turn("grpo", gamma)[0].advantages[0]) == pytest.approx(-(2**-0.5), abs=1e-3)


# ---- what agent= may be


def stand_in(monkeypatch, **modules):
    """Puts objects in the place of packages that are not installed here; tests/clients.py has the real ones."""
    for name, content in modules.items():
        monkeypatch.setitem(sys.modules, name.replace("__", "."), types.SimpleNamespace(**content))


def test_an_environment_behind_openenvs_contract_is_an_agent(template, monkeypatch):
    seeds = []

    class Remote:
        def __init__(self, base_url):
            self.left = 2

        async def __aenter__(self):
            return self

        async def __aexit__(self, *error):
            pass

        async def reset(self, seed):
            seeds.append(seed)
            return types.SimpleNamespace(observation={"text": "go"}, reward=None, done=False)

        async def step(self, action):
            self.left -= 1
            seen = {"text": f"not {action['message']}"}
            return types.SimpleNamespace(observation=seen, reward=float(self.left == 0), done=self.left == 0)

    stand_in(monkeypatch, openenv={}, openenv__core={}, openenv__core__generic_client=dict(GenericEnvClient=Remote))
    monkeypatch.setenv("OPENENV_URL", "http://there")
    solve, _ = again.load_agent("examples/openenv_env.py:solve")
    for seed in (1, 2):  # other noise, as another sample of the group has it, and the same episode
        episode, reward = play(solve, ["a", "b"], template, config=CONFIG | dict(seed=seed))
    (c,) = episode.chats
    assert reward == 0 and [turn.rewards for turn in c.turns] == [[0.0], [1.0]]
    assert [m["content"] for m in c.messages] == ["go", "a", "not a", "b"] and seeds[0] == seeds[1]


def test_what_a_reward_of_verifiers_raises_is_no_zero_and_an_empty_reply_is_one(template, monkeypatch):
    def reward(completion, **others):
        return len(completion) / others["divide_by"]

    class Environment:
        system_prompt, rubric = "", types.SimpleNamespace(funcs=[reward])

        async def run_rollout(self, task, client, model, sampling):
            answer = await client.chat.completions.create(model=model, messages=task["prompt"])
            text = answer.choices[0].message.content
            error = None if text else dict(error="EmptyModelResponseError")  # as verifiers has it
            try:
                value = await self.rubric.funcs[0](completion=text, divide_by=task["answer"])
            except ZeroDivisionError:  # as verifiers does
                value = 0.0
            return dict(reward=value, error=error)

    stand_in(monkeypatch, verifiers=dict(load_environment=lambda name: Environment()))
    monkeypatch.setenv("ENVIRONMENT", "mine")
    solve, _ = again.load_agent("examples/verifiers_env.py:solve")
    assert play(solve, ["four"], template, row=dict(prompt="a", answer=4))[1] == 1
    assert play(solve, [""], template, row=dict(prompt="a", answer=0))[1] == 0
    assert "ZeroDivisionError" in error_of(solve, ["four"], template, row=dict(prompt="a", answer=0))


@pytest.mark.parametrize(
    "replies, longest, why",
    [
        ("row['answers']", 99, "KeyError: 'answers' (mine.py:4)"),
        ("[]", 99, "0 replies, and the agent asks for one more"),
        ("['7']", 3, "tokens, over max_prompt_tokens=3"),
    ],
)
def test_demonstrations_that_cannot_be_made_end_the_run_in_one_line(replies, longest, why, template, tmp_path, refusal):
    solve = "async def solve(chat, row):\n    chat.user(row['prompt']), await chat.generate()\n"
    (tmp_path / "mine.py").write_text(f"{solve}def replies(row):\n    return {replies}\n")
    config = CONFIG | dict(agent=f"{tmp_path}/mine.py:solve", warmup_sft_steps=1, max_prompt_tokens=longest)
    agent = Agent(config, "here", template.tokenizer, template.stop_tokens)
    line = refusal(agent.demonstrate, [dict(columns=ROW)])
    assert line.startswith(f"error: agent='{tmp_path}/mine.py:solve': replies({ROW})") and why in line


@pytest.mark.parametrize(
    "source, spec, why",
    [
        ("", "nowhere.py:solve", "no file nowhere.py"),
        ("x = 1", "{}:solve", "has no function 'solve'"),
        ("def solve(chat, row): pass", "{}:solve", "no async def function"),
        ("class Game:\n    def reset(self): pass", "{}:Game", "a class without get_reward"),
        ("import nothing_of_this_name", "{}:solve", "does not load: ModuleNotFoundError"),
    ],
)
def test_an_agent_that_is_not_there_is_refused_with_one_line(source, spec, why, tmp_path, refusal):
    (tmp_path / "mine.py").write_text(source)
    line = refusal(again.load_agent, spec.format(tmp_path / "mine.py"))
    assert line.startswith("error: agent=") and why in line
