"""
From an agent's episodes to the run's group files: a Sampler (rollout_server.py) whose samples are dialogues.

Such a file has a row per dialogue: one per sample, and one more per fork. Its prompt is the common beginning of all
rows; the rest of a row is what the model wrote and, masked, what others wrote.
"""

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import math
import os
import time
import types

import torch

from configurator import MODES, fail, named_arguments, require
from onecurve.agents import again, chat, scheduler
from onecurve.keys.seeds import noise_seed
from onecurve.run.own import describe
from rollout_server import Sampler, sampling_seed
from sync import group_path


class Agent:
    """
    The agent of a run, and how its dialogues are written with the tokenizer of the model in `model`. Ends the run with
    one line if there is no such agent, or if the chat template cannot be used.
    """

    def __init__(self, config, model, tokenizer, stop_tokens):
        self.config = config
        self.model = model
        self.patches = scheduler.PATCHES
        self.solve, self.replies = again.load_agent(config["agent"])
        self.template = chat.Template(tokenizer, stop_tokens, named_arguments(config["chat_template_args"]))
        self.template.check(f"init_from={str(model)!r}")
        taught = MODES[config["mode"]].steps == "supervised" or config["warmup_sft_steps"]
        missing = f"agent={config['agent']!r}: its file has no function replies(row) for the supervised steps"
        require(self.replies or not taught, missing)

    def check_tools(self, row):
        """
        Ends the run with one line if the agent's first turn has tools and the chat template shows none. If the template
        never mentions tools, the agent is tried with a row, up to its first request to the model or to the outside.
        """
        is_program = " " in self.config["agent"].strip()  # its first request will show it
        if is_program or "tools" in str(self.template.tokenizer.chat_template):
            return

        async def ask(*_):
            raise asyncio.CancelledError  # which an agent does not take for its own error

        empty = types.SimpleNamespace(entries={})
        tried = chat.Episode(self.config, self.template, "tried", 0, ["sft", 0], ask, None, empty, again=True)
        with contextlib.suppress(chat.AgentError, asyncio.CancelledError):
            asyncio.run(tried.play(self.solve, row))
        why = f"init_from={str(self.model)!r}: its chat template cannot be used: {chat.NO_TOOLS}"
        require(not any(c.schemas for c in tried.chats), why)

    def demonstrate(self, rows):
        """
        (ids of the prompt, ids after it, loss mask) of the dialogues in which `replies` speaks for the model. Ends the
        run with one line if there is no such dialogue.
        """
        try:
            return asyncio.run(self._demonstrate(rows))
        except chat.AgentError as error:
            fail(f"agent={self.config['agent']!r}: {error}")

    async def _demonstrate(self, rows):
        known = []
        rows = [row["columns"] for row in rows]
        for i, row in enumerate(rows):
            where = f"replies({str(row)[:300]})"
            try:
                script = again.scripted(self.replies(row), self.template)
            except Exception as error:
                raise chat.AgentError(f"{where}: {describe(error)}") from error
            journal = types.SimpleNamespace(entries={}, write=lambda entry: None)
            known.append(chat.Episode(self.config, self.template, where, i, ["sft", i], *script, journal))
        await asyncio.gather(*[e.play(self.solve, row) for e, row in zip(known, rows)])
        parts = [(c.ids, c.turns[0].start, c.mask) for e in known for c in e.chats]
        return [(ids[:start], ids[start:], mask[start:]) for ids, start, mask in parts]

    def sampler(self, *args):
        return AgentSampler(self, *args)

    def metrics(self, groups):
        """{metric: value} of all groups (tensors, meta) that were sampled for a step."""
        total = {name: sum(meta["counts"][name] for _, meta in groups) for name in groups[0][1]["counts"]}
        if not total["written_tokens"] and MODES[self.config["mode"]].trains:
            why = "all turns of a step were drawn under a grammar, and none of them has a loss; let some be free"
            fail(f"agent={self.config['agent']!r}: {why} (tool_choice=auto)")
        means = {f"{name}_mean": total[name] / total["episodes"] for name in ("turns", "calls", "forks")}
        gained = torch.cat([tensors["turn_rewards"] for tensors, _ in groups]).tolist()
        return means | dict(
            turn_reward_mean=math.fsum(gained) / len(gained),
            tool_errors=total["tool_errors"], truncated_episodes=total["truncated"],
            masked_fraction=total["told_tokens"] / (total["told_tokens"] + total["written_tokens"]),
            prefix_hit_rate=total["cached_tokens"] / total["prompt_tokens"],
        )  # fmt: skip

    def transcript(self, dialogues):
        """Lines for samples.md: an episode's dialogues, turn by turn."""
        for dialogue in dialogues:
            fork = f"fork {dialogue['path']} " * (len(dialogues) > 1)
            turns = {turn["message"]: turn for turn in dialogue["turns"]}
            for i, m in enumerate(dialogue["messages"]):
                turn = turns.get(i, dict(tool_calls=[], rewards=[], truncated=False))
                said = "".join(f", calls {call['name']} {call['arguments']}" for call in turn["tool_calls"])
                said += "".join(f", reward {x:g}" for x in turn["rewards"])
                said += ", cut off" * turn["truncated"]
                yield f"    - {fork}{m['role']}: `{m['content']!r}`{said}\n"


class AgentSampler(Sampler):
    """
    A Sampler of this Agent's episodes. Their results from outside are in journals beside the group files until those
    are written, and then in them.
    """

    def __init__(self, agent, *args):
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        super().__init__(*args)
        self.agent = agent
        self.running = set()  # episodes that the watchdog looks after
        self.engine.manager.tokenizer = agent.template.tokenizer  # SGLang stops at no string without one
        self.parser = self.config["tool_call_parser"] or {"llama": "llama3"}.get(self.engine.model_type, "qwen25")
        known = FunctionCallParser.ToolCallParserEnum
        require(self.parser in known, f"tool_call_parser={self.parser!r}: SGLang has no such; use {', '.join(known)}")
        if self.parser == "qwen25":  # a "<" may begin a thought
            agent.template.call_marks = ["<tool_call>"]

    def sample(self, folder, job, prompts):
        self.made = []  # prompts that this engine did
        try:
            with chat.watched(self.running, self.config["agent_timeout"], self.engine.end):
                super().sample(folder, job, prompts)
            if self.made and (job.stream, job.step) == ("rl", 0):
                paths = [str(group_path(folder, index)) for index in self.made]
                again.check_again(dict(config=self.config, model=str(self.agent.model), paths=paths))
        except chat.AgentError as error:
            self.engine.fail(str(error))
        there = os.listdir(folder)  # not `exists`, which a network file system would remember (sync.Queue)
        for index in job.rows:  # a process that was killed may have left one beside its group file
            if group_path(folder, index).name in there:
                self._journal_path(folder, index).unlink(missing_ok=True)

    def _journal_path(self, folder, index):
        return folder / f"journal_{index:04d}.jsonl"

    async def _group(self, folder, index, job):
        began = time.time()
        journal = chat.Journal(self._journal_path(folder, index), self.run)
        row = job.rows[index]["columns"]
        used = dict(num_retractions=0, cached_tokens=0, prompt_tokens=0)  # as SGLang counts, over all turns
        episodes = []
        for g in range(job.samples):
            where = f"{job.stream} step {job.step}, prompt {index}, sample {g}"
            key = [job.stream, job.step, index, g]
            source = functools.partial(self._turn, job, used)
            episodes.append(chat.Episode(self.config, self.agent.template, where, g, key, source, self._calls, journal))
        self.running.update(episodes)
        returned = await asyncio.gather(*[episode.play(self.agent.solve, row) for episode in episodes])
        self.running.difference_update(episodes)
        journal.close()
        self.made.append(index)
        meta = dict(
            born=[job.step, index], finished=True, responses=[e.chats[0].turns[-1].text for e in episodes],
            retractions=used.pop("num_retractions"), seconds=time.time() - began, row=row, returned=returned,
            episodes=[[again.record_of(c) for c in e.chats] for e in episodes],
            journal=[journal.of(e.sample) for e in episodes],
            counts=used | counts_of(episodes),
        )  # fmt: skip
        return tensors_of(episodes, returned, job.version), meta

    async def _turn(self, job, used, of, stop, most):
        """A turn of the dialogue `of`. Its noise follows from the tokens before it, and from no time."""
        told = hashlib.sha256(json.dumps(of.ids).encode()).hexdigest()
        seed = sampling_seed(noise_seed(self.config, job.stream), *of.episode.key, of.path, told)
        params = self.params(job, seed, max_new_tokens=most) | of.params | (dict(stop=stop) if stop else {})
        if of.hear:
            output = await self.engine.ask(self._heard(of, params))
        else:
            output = await self.engine.generate(of.ids, params, **of.options)
        drawn = self.engine.drawn(output, job.version)
        meta = output["meta_info"]
        of.meta = meta if of.options else {}
        for name in used:
            used[name] += meta[name]
        return drawn.tokens, drawn.logprobs

    async def _heard(self, of, params):
        """The same output, with `of.hear` called after each token but the last with SGLang's meta_info so far."""
        asked = dict(input_ids=of.ids, sampling_params=params, return_logprob=True, stream=True)
        async for output in await self.engine.sglang.async_generate(**asked, **of.options):
            if not output["meta_info"]["finish_reason"]:
                of.hear(output["meta_info"])
        return output

    def _calls(self, of, text):
        """
        (the rest of the text, [(name, arguments)]) of a turn, by SGLang's parser for the model's format of calls; the
        whole text and no calls if one of them is not a name with arguments. Calls drawn by a grammar are a JSON array.
        """
        if of.params:
            try:
                calls = [(call["name"], call["parameters"]) for call in json.loads(text)]
            except (ValueError, TypeError, KeyError):  # an answer, or cut by a stop string
                calls = []
            return ("", calls) if calls else (text, [])
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.environ import envs
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)  # a model may write anything
        envs.SGLANG_FORWARD_UNKNOWN_TOOLS.set(True)  # such a call gets an error as its result; else it would vanish
        try:
            rest, calls = FunctionCallParser([Tool(**s) for s in of.schemas], self.parser).parse_non_stream(text)
            calls = [(call.name, json.loads(call.parameters)) for call in calls]
            json.dumps(calls, allow_nan=False)  # the journal compares arguments, and no nan is equal to itself
        except Exception:  # <tool_call>1</tool_call> is an AttributeError to SGLang, other calls are other errors
            return text, []
        named = all(isinstance(name, str) and isinstance(arguments, dict) for name, arguments in calls)
        return (rest, calls) if calls and named else (text, [])


def counts_of(episodes):
    """The metrics of a group's episodes; all of them are numbers to be added over groups."""
    chats = [c for e in episodes for c in e.chats]
    return dict(
        episodes=len(episodes), turns=sum(len(c.turns) for c in chats), calls=sum(c.calls for c in chats),
        tool_errors=sum(e.errors for e in episodes), truncated=sum(c.ended for c in chats),
        forks=len(chats) - len(episodes), written_tokens=sum(sum(c.mask) for c in chats),
        told_tokens=sum(c.mask.count(False) for c in chats),
    )  # fmt: skip


def tensors_of(episodes, returned, version):
    """The tensors of a group file, as in Sampler._tensors, but with a row per dialogue; T tokens in all rows."""
    chats = [c for e in episodes for c in e.chats]
    first = chats[0].ids[: min(c.turns[0].start for c in chats)]
    begins = len(os.path.commonprefix([first, *(c.ids for c in chats)]))
    number = [[-1] * len(c.ids) for c in chats]  # of the turn that wrote a token
    for numbers, c in zip(number, chats):
        for k, turn in enumerate(c.turns):
            numbers[turn.start : turn.end] = [k] * (turn.end - turn.start)
    flat = lambda rows: torch.tensor([x for row in rows for x in row[begins:]])  # noqa: E731
    tokens = flat(c.ids for c in chats)
    gained = []
    totals = []
    for r, e in zip(returned, episodes):
        totals.append(math.fsum([r, *(x for c in e.chats for turn in c.turns for x in turn.rewards)]))
        for c in e.chats:
            gained += [math.fsum(turn.rewards + [r] * (turn is c.turns[-1])) for turn in c.turns]
    return dict(
        prompt_tokens=torch.tensor(first[:begins], dtype=torch.int64),
        lengths=torch.tensor([len(c.ids) - begins for c in chats]),  # (rows,)
        tokens=tokens,  # (T,)
        logprobs=flat(c.logprobs for c in chats),  # (T,)
        loss_mask=flat(c.mask for c in chats),  # (T,)
        weight_version=torch.full_like(tokens, version),  # (T,)
        turn=flat(number),  # (T,) index of the turn in its row; -1: not the model's
        turns=torch.tensor([len(c.turns) for c in chats]),  # (rows,)
        turn_rewards=torch.tensor(gained, dtype=torch.float32),  # of all rows; the last turn's has the returned reward
        truncated=torch.tensor([c.turns[-1].truncated for c in chats]),  # (rows,)
        sample=torch.tensor([e.sample for e in episodes for _ in e.chats]),  # (rows,)
        rewards=torch.tensor(totals, dtype=torch.float32),  # (G,) what the agent returned plus its turns' rewards
    )
