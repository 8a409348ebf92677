"""
Loads an agent, and runs it again on its journal: rule 7 of chat.py. A stand-in for the model repeats what was sampled
(`recorded`), or follows a script (`scripted`).
"""

import asyncio
import inspect
import json
import os
import subprocess
import sys
import types

import sync
from configurator import fail, named_arguments, require
from onecurve.agents.chat import AgentError, Episode, Template, environment
from onecurve.agents.endpoint import program
from onecurve.models import folders
from onecurve.run.own import find_function


def load_agent(spec):
    """(solve, replies or None) of agent=`spec`. Ends the run with one line if there is no such function or program."""
    if " " in spec.strip():
        return program(spec), None
    try:
        found = find_function(spec, "agent")
    except ValueError as error:
        require(False, f"agent={spec!r}: {error}")
    replies = getattr(sys.modules[found.__module__], "replies", None)
    if inspect.isclass(found):
        missing = [name for name in ("reset", "get_reward") if not hasattr(found, name)]
        require(not missing, f"agent={spec!r}: a class without {' and '.join(missing)}; use an async function")
        return environment(found), replies
    require(inspect.iscoroutinefunction(found), f"agent={spec!r}: no async def function(chat, row)")
    return found, replies


def record_of(chat):
    """The record of a dialogue beside its tokens: JSON."""
    turns = [turn._replace(tool_calls=[call._asdict() for call in turn.tool_calls])._asdict() for turn in chat.turns]
    return dict(path=chat.path, turns=turns, messages=chat.messages[: chat.said])


def recorded(rows, ids, template):
    """(source, parse) of an Episode that repeats what was sampled. rows: of `record_of`; ids: the tokens of each."""
    known = {tuple(row["path"]): (row["turns"], tokens) for row, tokens in zip(rows, ids)}

    async def source(chat, stop, most):
        turns, tokens = known.get(chat.path, ([], []))
        k = len(chat.turns)
        start, end = (turns[k]["start"], turns[k]["end"]) if k < len(turns) else (0, 0)  # a turn after the last one
        if chat.ids != tokens[:start]:
            told = [tokens[:start], chat.ids]
            same = len(os.path.commonprefix(told))
            was, now = (template.decode(x[max(0, same - 20) :])[:80] for x in told)
            why = "not a function of what it is told: a clock, random numbers, a global, the order of a set?"
            raise chat.error(f"run again, the agent says {now!r} and not {was!r}; {why}")
        await asyncio.sleep(0)
        return tokens[start:end], [0.0] * (end - start)

    def parse(chat, text):
        turn = known[chat.path][0][len(chat.turns)]
        return turn["text"], [(call["name"], call["arguments"]) for call in turn["tool_calls"]]

    return source, parse


def scripted(replies, template):
    """
    (source, parse) of an Episode in which the model says these replies: each a text, or [(name, arguments)], a turn's
    calls. Raises AgentError if the agent requests more.
    """

    def parse(chat, text):
        reply = replies[len(chat.turns)]
        return (text, []) if isinstance(reply, str) else ("", reply)

    async def source(chat, stop, most):
        if len(chat.turns) == len(replies):
            raise AgentError(f"{chat.episode.where}: {len(replies)} replies, and the agent asks for one more")
        ids = template.turn(replies[len(chat.turns)])[:most]
        return ids, [0.0] * len(ids)

    return source, parse


def run_again(job):
    """
    Runs the agents of rollout files again on their samples and journals; ends the process with one line if one of them
    then says or returns anything else. job: dict(config, model folder, paths).
    """
    config = job["config"]
    solve, _ = load_agent(config["agent"])
    template = Template(*folders.load_tokenizer(job["model"]), named_arguments(config["chat_template_args"]))

    async def play(path):
        tensors, meta = sync.read_group(path)
        prompt = tensors["prompt_tokens"].tolist()
        rows = iter(tensors["tokens"].split(tensors["lengths"].tolist()))
        for g, (chats, journal, returned) in enumerate(zip(meta["episodes"], meta["journal"], meta["returned"])):
            ids = [prompt + next(rows).tolist() for _ in chats]
            where = f"{meta['stream']} step {meta['step']}, prompt {meta['prompt']}, sample {g}"
            entries = types.SimpleNamespace(entries={(g, entry["at"]): entry for entry in journal})
            key = [meta["stream"], meta["step"], meta["prompt"], g]
            episode = Episode(config, template, where, g, key, *recorded(chats, ids, template), entries, again=True)
            reward = await episode.play(solve, meta["row"])
            if reward != returned:
                raise AgentError(f"{where}: run again, the agent returns {reward!r} and not {returned!r}")

    async def play_all():
        await asyncio.gather(*map(play, job["paths"]))

    try:
        asyncio.run(play_all())
    except AgentError as error:
        fail(str(error))


def check_again(job):
    """`run_again` in another process, in which strings have other hashes, and so sets another order."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    env = os.environ | dict(PYTHONHASHSEED=seed, CUDA_VISIBLE_DEVICES="")
    # Not by PYTHONPATH, which programs inherit: one may have a Python of its own, with other packages.
    code = """
import json, sys
job = json.load(sys.stdin)
sys.path[:] = job["path"]
from onecurve.run.start import lean_imports
with lean_imports():
    import transformers.models.auto.tokenization_auto
    from onecurve.agents.again import run_again
run_again(job)
"""
    job = job | dict(path=sys.path)
    done = subprocess.run([sys.executable, "-c", code], input=json.dumps(job), env=env, text=True, capture_output=True)
    if done.returncode:
        said = done.stderr.strip() or f"the process that runs agents again ended with status {done.returncode}"
        raise AgentError(said.splitlines()[-1].removeprefix("error: "))
