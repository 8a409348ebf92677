"""
The rollout side: a real SGLang engine started inside a torchrun rank; prompts in, scored groups of samples out.

    sample_step     makes a step's samples: whole ones, or a segment of each one in flight
    Sampler         makes samples with an engine
    RolloutEngine   starts SGLang, notices its death, lends its memory, supplies it with the trainers' weights

The life of one prompt:

    plan       a step's prompts follow from (seed, step) alone, so all ranks make the same Job by themselves
    share      an engine that has room takes the next prompt, by a counter in torchrun's store: this decides who does
               the work, not what comes out of it
    generate   SGLang draws G samples side by side, each with noise from its own seed
    score      the reward function sees the texts while other prompts are generated; user code, one text at a time
    write      group_0003.safetensors appears whole: tokens, log-probs, rewards and weight version under one checksum
    take       all ranks wait until every engine has reported its files, and read them in the order of the prompts

A group whose file exists is never made again.

SGLang runs the model in a separate process, the scheduler, with the operators and the draw of kernels.py. The table in
onecurve/sglang/patches.py lists what is replaced there; onecurve/sglang/engine.py starts the process. sglang is only
imported when an engine is started: that takes seconds.
"""

import asyncio
import functools
import hashlib
import itertools
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

import kernels
from configurator import close_bars, error_line, last_word
from onecurve.cpu import host
from onecurve.keys.seeds import noise_seed
from onecurve.models.dense import rope_frequencies
from onecurve.run.start import output_to
from onecurve.sglang.engine import folder_for_sockets, start_engine
from rewards import RewardError, draw_rows, score_all, text_of
from sync import RunError, group_path, hidden_torchrun, rank_is_lost, write_group

# ------------------------------------------------------------------------------------------------------------------
# what a step trains on


class Job(NamedTuple):
    """Prompts that the engines are to sample together: a step's, or the held-out ones."""

    stream: str  # 'rl' or 'eval'; samples of two streams never share a seed
    step: int  # RL steps done before it
    version: int  # of the weights to sample with
    rows: dict  # {prompt's index in the step: dict(prompt text, answer text, prompt_tokens list)}
    samples: int  # G, per prompt
    sampling: kernels.Sampling  # temperature 0: greedy
    tokens: int = 0  # most new tokens of a sample in this job; 0: up to max_new_tokens
    begun: dict = {}  # {prompt's index: ((step, index) with which its group was begun, the group so far or None)}


class Flight(NamedTuple):
    """Groups that were begun and not trained on yet: the only state that sampling passes from one step to the next."""

    begun: int = 0  # number of prompts begun so far, in the order of the data
    groups: tuple = ()  # in that order
    seen: dict = {}  # for a curriculum: {(source, row): number of right samples when it was last seen}


class Batch(NamedTuple):
    groups: list  # the P Groups to train on
    sampled: list  # of all that were sampled for the step
    flight: Flight  # what is in flight after it


def sampling_of(c):
    return kernels.Sampling(c.temperature, c.top_p, c.top_k, c.min_p)


def groups_of(queue, sampler, job):
    """
    The job's Groups in prompt order, on every rank: each engine makes its share, all ranks wait, all read. sampler: of
    this rank's engine; None without one.
    """
    if sampler:
        sampler.sample(queue.open(job), job, queue.share(job))
        queue.done(job, sampler.engine.index)
    return queue.take(job)


def sample_step(sample, step, rows, c, version, flight):
    """
    Makes samples with the engines (`groups_of`, Sampler.sample, SGLang's async_generate); returns the Batch of RL step
    `step`, the same on every rank. sample: Job -> its Groups. With dynamic sampling (DAPO, equation 11) groups of equal
    rewards are replaced by the next round's; if groups are missing after the last round, the first of those dropped
    fill up the batch. Each round has its own prompts, so the number of rounds changes no other step's prompts.
    """
    if c.segment_tokens:
        return sample_segments(sample, step, rows, c, version, flight)
    kept = []
    dropped = []
    rounds = 1 + c.dynamic_sampling
    P = c.prompts_per_step
    seen = dict(flight.seen)
    for k in range(rounds):
        places = draw_rows(rows, P, step * rounds + k, c, "rl", flight.seen)
        # The numbers of a round's prompts continue those of the round before: they are part of a sample's seed.
        prompts = {i: rows[source][row] for i, (source, row) in enumerate(places, k * P)}
        groups = sample(Job("rl", step, version, prompts, c.group_size, sampling_of(c)))
        for place, group in zip(places, groups):
            rewards = group.tensors["rewards"]
            equal = c.dynamic_sampling and len(rewards.unique()) == 1
            (dropped if equal else kept).append(group)
            if c.curriculum:
                seen[place] = int((rewards >= c.pass_reward).sum())
        if len(kept) >= P:
            break
    sampled = kept + dropped
    return Batch(sampled[:P], sampled, flight._replace(seen=seen))


def sample_segments(sample, step, rows, c, version, flight):
    """
    The same with partial rollouts (Kimi k1.5, arXiv:2501.12599, 3.2; APRIL, arXiv:2509.18521), cut by counts alone.
    In each step every unfinished sample in flight continues by up to `segment_tokens` tokens, and fresh prompts fill
    the flight up. The step trains on the first P finished groups in the order in which they were begun; while fewer are
    finished, all continue under the same weights.
    """
    P = c.prompts_per_step
    places = c.groups_in_flight
    sampled = []
    begun = flight.begun + places - len(flight.groups)
    born = [tuple(group.meta["born"]) for group in flight.groups]
    born += [divmod(n, P) for n in range(flight.begun, begun)]
    drawn = {s: draw_rows(rows, P, s, c, "rl") for s in dict(born)}
    prompts = [rows[source][row] for source, row in (drawn[s][i] for s, i in born)]
    groups = [*flight.groups, *[None] * (begun - flight.begun)]
    for first in itertools.count(0, places):  # a file's number says in which round it was made, and for which place
        todo = [i for i, group in enumerate(groups) if not (group and group.meta["finished"])]
        asked = {first + i: prompts[i] for i in todo}
        before = {first + i: (born[i], groups[i]) for i in todo}
        grown = sample(Job("rl", step, version, asked, c.group_size, sampling_of(c), c.segment_tokens, before))
        sampled += grown
        for i, group in zip(todo, grown):
            groups[i] = group
        finished = [i for i, group in enumerate(groups) if group.meta["finished"]]
        if len(finished) >= P:
            break
    chosen = finished[:P]
    rest = tuple(group for i, group in enumerate(groups) if i not in chosen)
    return Batch([groups[i] for i in chosen], sampled, Flight(begun, rest))


# ------------------------------------------------------------------------------------------------------------------
# samples

SCORERS = ThreadPoolExecutor(64, "reward")  # rewards are computed beside the engine, which does not wait for them


def sampling_seed(*key):
    """
    64 bits, signed, of (seed, stream, step, prompt, sample, turn): each sample its own, whoever draws it. seed: the
    config's for noise; step, prompt: those with which the sample was begun.
    """
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little", signed=True)


class Drawn(NamedTuple):
    """A sample as far as it is drawn, token by token."""

    tokens: list
    logprobs: list
    versions: list  # of the weights


@dataclass
class Sampler:
    """Makes samples with one engine: prompts in, group files out."""

    engine: "RolloutEngine"
    config: dict  # the keys of train_grpo.py
    run: str  # the run's id
    engines: int  # of the run
    rewards: dict  # {source of the data: load_reward's WeightedSum}
    decode: Callable  # tokens -> text
    stop_tokens: list  # a sample ends with the first of them

    def params(self, job, seed, **others):
        """SGLang's sampling parameters for a request."""
        return job.sampling._asdict() | dict(
            top_k=job.sampling.top_k or -1,
            sampling_seed=seed,
            ignore_eos=self.config["ignore_eos"],
            stop_token_ids=self.stop_tokens,
            **others,
        )

    def sample(self, folder, job, prompts):
        """
        Samples prompts of this job and writes their group files into `folder`, which exists. prompts: an iterator of
        their indices, which the engines share: each engine has an even share in flight, and takes the next prompt when
        one is done.
        """
        share = -(-len(job.rows) // self.engines)
        self.seed = noise_seed(self.config, job.stream)
        self.job_began = time.time()
        self.worked_before = self.engine.worked()
        try:
            self.engine.run([self._work(prompts, folder, job) for _ in range(share)], f"in step {job.step}")
        except RewardError as e:
            self.engine.fail(str(e))

    async def _work(self, prompts, folder, job):
        """Prompts one after the other, from the counter to the file."""
        for index in prompts:
            if group_path(folder, index).exists():
                continue
            row = job.rows[index]
            began = time.time()
            tensors, meta = await self._group(folder, index, job)
            elapsed = time.time() - self.job_began
            meta |= dict(
                run=self.run,
                stream=job.stream,
                step=job.step,
                prompt=index,
                version=job.version,
                prompt_text=text_of(row),
                answer=row["answer"],
                source=row.get("source", ""),
                engine=self.engine.index,
                time=time.strftime("%Y-%m-%dT%H:%M:%S"),
                began=began,
                elapsed=elapsed,
                idle=elapsed - (self.engine.worked() - self.worked_before),
            )
            await asyncio.to_thread(write_group, group_path(folder, index), tensors, meta)  # it waits for the disk

    async def _group(self, folder, index, job):
        """A prompt's samples of one turn: (tensors, meta) of the group file."""
        row = job.rows[index]
        began = time.time()
        # a fresh prompt without tokens yet, or a partial rollout, begun at an earlier step
        born, group = job.begun.get(index, ((job.step, index), None))
        seeds = [sampling_seed(self.seed, job.stream, *born, g, 0) for g in range(job.samples)]
        samples = [Drawn([], [], []) for _ in seeds]
        if group:  # as far as its file has them
            rows = group.rows("tokens", "logprobs", "weight_version")
            samples = [Drawn(*(part.tolist() for part in row)) for row in rows]
        retractions = await self._draw(samples, row["prompt_tokens"], seeds, job)
        seconds = time.time() - began
        texts = [self.decode(sample.tokens) for sample in samples]
        finished = all(map(self._is_finished, samples))
        if not (finished or job.tokens):  # SGLang cuts what its cache has no room for, and says nothing
            why = f"a sample of prompt {index} ended too early; give its cache more: engine_memory, max_total_tokens"
            raise RunError(f"{self.engine.name}: {why}")
        scored = [(0.0, {})] * len(samples)
        if finished:
            where = f"{job.stream} step {job.step}, prompt {index}, sample "
            reward = self.rewards[row.get("source", "")]
            calls = [(text, f"{where}{g}") for g, text in enumerate(texts)]
            # Rewards that wait for a process or an answer run side by side; others would only wake each other.
            parts = [[call] for call in calls] if reward.waits else [calls]
            run = functools.partial(asyncio.get_running_loop().run_in_executor, SCORERS, score_all, reward, row)
            scored = [*itertools.chain(*await asyncio.gather(*map(run, parts)))]
        rewards, noted = zip(*scored)
        meta = dict(
            born=list(born), finished=finished, responses=texts, noted=noted, seconds=seconds, retractions=retractions
        )
        return self._tensors(row, samples, seeds, rewards), meta

    def _is_finished(self, sample):
        ended = not self.config["ignore_eos"] and {*sample.tokens[-1:]} & {*self.stop_tokens}
        return ended or len(sample.tokens) == self.config["max_new_tokens"]

    async def _draw(self, samples, prompt, seeds, job):
        """Draws the job's tokens for the unfinished samples of a prompt; returns SGLang's number of retractions."""
        unfinished = [(sample, seed) for sample, seed in zip(samples, seeds) if not self._is_finished(sample)]
        params = []
        for sample, seed in unfinished:
            left = self.config["max_new_tokens"] - len(sample.tokens)
            params.append(self.params(job, seed, max_new_tokens=min(left, job.tokens or left)))
        outputs = await self.engine.generate([prompt + sample.tokens for sample, _ in unfinished], params)
        for (sample, _), output in zip(unfinished, outputs):
            for field, more in zip(sample, self.engine.drawn(output, job.version)):  # tokens, log-probs, versions
                field.extend(more)
        return sum(output["meta_info"]["num_retractions"] for output in outputs)

    def _tensors(self, row, samples, seeds, rewards):
        """The tensors of a group file: the samples' tokens end to end, T in all, which `lengths` cuts apart again."""
        tokens, logprobs, versions = (torch.tensor([*itertools.chain(*field)]) for field in zip(*samples))
        return dict(
            prompt_tokens=torch.tensor(row["prompt_tokens"]),
            lengths=torch.tensor([len(s.tokens) for s in samples]),  # (G,)
            tokens=tokens,  # (T,)
            logprobs=logprobs,  # (T,)
            loss_mask=torch.ones(len(tokens)).bool(),  # one turn: every token is the model's own, EOS too
            weight_version=versions,  # (T,)
            truncated=torch.tensor([s.tokens[-1] not in self.stop_tokens for s in samples]),  # (G,)
            seeds=torch.tensor(seeds),  # (G,)
            rewards=torch.tensor(rewards),  # (G,)
            sample=torch.arange(len(samples)),  # (G,) as the next two: a row each, of one turn
            turns=torch.ones(len(samples)).long(),
            turn_rewards=torch.tensor(rewards),
            turn=torch.zeros_like(tokens),  # (T,)
        )


def start_sampler(run, task, lends):
    """
    Starts this rank's engine; returns the Sampler of a Run's Task, which makes episodes if there is an agent. lends:
    the engine gives its memory to this rank's trainer while that works.
    """
    c = run.c
    agent = task.agent
    index = run.ranks.engine
    engine = RolloutEngine(
        index,
        run.model_path,
        run.hf,
        vars(c),
        run.device,
        run.dtype,
        run.folder / f"engine_{index}.log",
        run.gpu,
        lends=lends and run.large,
        cores=run.cores,
        patches=agent.patches if agent else (),
        models=task.reward_models,
    )
    decode = functools.partial(run.tokenizer.decode, skip_special_tokens=True)
    make = agent.sampler if agent else Sampler
    return make(engine, vars(c), run.id, run.ranks.engines, task.scored_by, decode, run.stop_tokens)


# ------------------------------------------------------------------------------------------------------------------
# the engine, in its rank

LENT = ["kv_cache", "weights"]  # SGLang's names of the memory that sleeps


class RolloutEngine:
    """
    One SGLang engine, kept alive and supplied with weights. Raises RunError if it dies during a request or is silent
    for `engine_timeout` seconds; if it dies at another moment, the process ends with one line.

    hf: the model's Hugging Face config. config: the keys of train_grpo.py. log: the file that takes SGLang's
    output. lends: `sleep` gives the memory of weights and cache to this rank's trainer. cores: as in
    `kernels.enable_batch_invariant`. patches: rows for onecurve/sglang/patches.py's `install`, such as an agent's.
    models: reward models that this process is to load first.
    """

    def __init__(
        self, index, model_path, hf, config, device, dtype, log, gpu=0, lends=False, cores="", patches=(), models=()
    ):
        self.index = index
        self.config = config
        self.log = log
        self.logged = log.stat().st_size if log.exists() else 0  # bytes of earlier starts
        self.version = 0  # of the weights as loaded, then of those that came last
        self.heartbeat = log.with_suffix(".alive")  # touched while SGLang lives and works (sync.Queue)
        self.name = f"engine {index}"
        self.stderr = os.dup(2)  # while it starts, 2 is the log
        inv_freq = rope_frequencies(hf, device).tolist() if config["batch_invariant"] else None
        self.device = device
        self.lends = lends
        self.asleep = False
        self.model_type = hf.model_type
        self.asked = 0  # open requests
        self.since = 0.0  # when the first of them began
        self.busy = 0.0  # seconds with open requests before that
        on_sigterm = signal.getsignal(signal.SIGTERM)
        started = time.monotonic()
        print(f"{self.name}: starting SGLang, its output goes to {log}", flush=True)
        if device == "cuda":
            print(f"{self.name}: compiling kernels: takes a minute at a first start", flush=True)
        for model in models:  # SGLang takes its share of what these leave of a card
            model.load()
        try:
            with folder_for_sockets(log) as sockets:
                with hidden_torchrun(), output_to(log):
                    self.sglang = start_engine(
                        config, model_path, device, dtype, gpu, lends, cores, inv_freq, patches, sockets, self._died
                    )
                from sglang.srt.managers import io_struct

                self.loop = self.sglang.loop
                self.manager = self.sglang.tokenizer_manager
                self.io_struct = io_struct
                self.loop.run_until_complete(self._take_signals_back(on_sigterm))
                if device == "cpu":  # the first tokens wait for the loops to compile: before anybody counts silence
                    params = dict(max_new_tokens=2, sampling_seed=0, ignore_eos=True)
                    self.sglang.generate(input_ids=[0], sampling_params=params, return_logprob=True)
                self.flush()  # sends a first message over each of its sockets
                self.check_weights({})
        except Exception as e:
            raise RunError(f"{self.name}: SGLang did not start: {e} (see {log})")
        print(f"{self.name}: ready after {time.monotonic() - started:.0f} s", flush=True)

    async def _take_signals_back(self, on_sigterm):
        """
        Takes SIGTERM and SIGQUIT back from SGLang, which would drain its requests first. A SIGTERM, torchrun's too,
        ends this process (the kernel then ends the scheduler), and a dead scheduler is reported in one line.
        """
        self.manager.auto_create_handle_loop()  # SGLang takes the signals here, unless a request has made it do so
        for s in (signal.SIGTERM, signal.SIGQUIT):
            self.loop.remove_signal_handler(s)  # outside of the loop uvloop would not
        signal.signal(signal.SIGTERM, on_sigterm)
        signal.signal(signal.SIGQUIT, self._died)

    def _died(self, *_):
        """SGLang's watchdog and its failing children send SIGQUIT."""
        log = self.log.read_bytes()[self.logged :].decode(errors="replace")
        errors = re.findall(r"^\w*(?:Error|Exception)(: .+)", log, re.M)
        self.end(f"{self.name}: the SGLang process died{''.join(errors[-1:])}; see {self.log}")

    def fail(self, line, status=2):
        """
        Ends the run at once, for a mistake of the user's code or a Ctrl-C. An exception would first wait for the
        rewards and tools that are still at work, and one of them may wait for a judge.
        """
        close_bars()
        self.end(line, status)

    def end(self, line, status=1):
        """Ends the process, whatever its threads wait for."""
        last_word(error_line(line), self.stderr)
        for process in multiprocessing.active_children():
            process.kill()
        os._exit(status)

    def close(self):
        with output_to(self.log):
            self.sglang.shutdown()

    def run(self, coroutines, when):
        """The results of coroutines, run side by side. Raises RunError if SGLang falls silent meanwhile."""
        try:
            return self.loop.run_until_complete(self._watched(coroutines, when))
        except KeyboardInterrupt:
            self.fail("interrupted; nothing written is lost; resume with --init_from=resume", 1)

    async def ask(self, request):
        """The result of one of SGLang's coroutines."""
        self.since = self.since if self.asked else time.time()
        self.asked += 1
        try:
            return await request
        finally:
            self.asked -= 1
            self.busy += 0 if self.asked else time.time() - self.since

    def worked(self):
        """Seconds so far with an open request to SGLang."""
        return self.busy + (time.time() - self.since if self.asked else 0)

    def generate(self, ids, params, **options):
        """
        A coroutine of SGLang's output for these token ids, or for each list of them. options: more of async_generate's
        arguments.
        """
        options |= dict(input_ids=ids, sampling_params=params, return_logprob=True)
        return self.ask(self.sglang.async_generate(**options))

    def drawn(self, output, version):
        """The Drawn of an output of `generate`. Raises RunError if other weights than `version` drew it."""
        meta = output["meta_info"]
        if int(meta["weight_version"]) != version:
            raise RunError(f"{self.name}: a sample of weights {meta['weight_version']}, expected {version}")
        logprobs = [x for x, _, _ in meta["output_token_logprobs"]]
        return Drawn(output["output_ids"], logprobs, [version] * len(logprobs))

    async def _watched(self, coroutines, when):
        tasks = [asyncio.ensure_future(c) for c in coroutines]
        results = asyncio.gather(*tasks)  # done when all are, or at the first error
        timeout = self.config["engine_timeout"]
        try:
            while not (await asyncio.wait([results], timeout=min(1, timeout / 4)))[0]:
                # SGLang sends a heartbeat every 50 tokens of the slowest sample
                if self.asked and time.time() - max(self.since, self.manager.last_receive_tstamp) > timeout:
                    raise self.silent(when)
                self.heartbeat.touch()
            return results.result()
        except Exception:  # the first error is the one to report (a RunError is a SystemExit and ends us as it is)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    def silent(self, when):
        """The error of an engine that no longer answers."""
        return RunError(f"{self.name}: silent for {self.config['engine_timeout']:g} s {when}; see {self.log}")

    def request(self, coroutine, doing):
        """Runs one of the manager's coroutines. Raises RunError if SGLang refuses the request."""
        answer = self.run([self.ask(coroutine)], f"while {doing}")[0]
        if answer and not answer[0]:  # (whether it worked, why not, ..), or None
            rank_is_lost(answer[1])
            raise RunError(f"{self.name}: {doing} failed: {answer[1]}")

    # ---- weights

    def join_weight_group(self, name, host, port, rank, size, backend):
        """Enters the group in which one trainer broadcasts, as its member `rank`; returns when all are in it."""
        group = self.io_struct.InitWeightsUpdateGroupReqInput(
            master_address=host,
            master_port=port,
            rank_offset=rank,
            world_size=size,
            group_name=name,
            backend=backend,
        )
        self.request(self.manager.init_weights_update_group(group), "joining the weight group")

    def leave_weight_group(self, name):
        """Leaves it again; returns when all have left."""
        group = self.io_struct.DestroyWeightsUpdateGroupReqInput(group_name=name)
        self.request(self.manager.destroy_weights_update_group(group), "leaving the weight group")

    def flush(self):
        """Empties the prefix cache. Retries until it is done: just after its last token the scheduler is still busy."""
        end = time.monotonic() + self.config["engine_timeout"]
        while not self.run([self.ask(self.manager.flush_cache())], "while flushing its cache")[0].success:
            if time.monotonic() > end:
                raise RunError(f"{self.name}: did not flush its cache; see {self.log}")
            time.sleep(0.002)

    def sleep(self):
        """If it lends: gives up the memory of weights and cache until the next weights come."""
        if self.lends and self.device == "cuda" and not self.can_lend:
            print(f"{self.name}: SGLang lends no memory, its torch_memory_saver is not loaded; see {self.log}")
            self.lends = False  # all else works as if it did
        if self.lends:
            self.flush()  # waits until it is idle; on a CPU what it lends are the weights' panels
            self.asleep = True
            if self.device == "cuda":
                lent = self.io_struct.ReleaseMemoryOccupationReqInput(tags=LENT)
                self.request(self.manager.release_memory_occupation(lent), "giving its memory back")

    @functools.cached_property
    def can_lend(self):
        """Whether SGLang's processes have loaded the library that does it: ld.so skips one that it does not find."""
        maps = (Path(f"/proc/{pid}/maps").read_text() for pid in self.sglang.get_all_child_pids())
        return any("torch_memory_saver" in text for text in maps)

    def wake(self):
        """Takes the memory again; its contents are lost."""
        if self.asleep:
            self.asleep = False
            host.give_memory_back()  # memory that this rank's trainer does not use now
            if self.device == "cuda":
                lent = self.io_struct.ResumeMemoryOccupationReqInput(tags=LENT)
                self.request(self.manager.resume_memory_occupation(lent), "taking its memory again")

    def _load(self, update, kind, version, last, **weights):
        """Has SGLang take some of the weights of `version`; with the last of them the engine holds it."""
        self.wake()
        self.version = version
        if last:  # SGLang flushes too and asserts that it worked: old keys under new weights would spoil every sample
            self.flush()
            weights["weight_version"] = str(version)
        self.request(update(kind(flush_cache=last, **weights)), f"loading weights {version}")

    def receive_weights(self, bucket, dtype, version, last):
        """One bucket [(name, shape)], of which each trainer broadcasts its rows (receive_rows)."""
        names, shapes = zip(*bucket)
        self._load(
            self.manager.update_weights_from_distributed,
            self.io_struct.UpdateWeightsFromDistributedReqInput,
            version,
            last,
            names=[*names],
            dtypes=[str(dtype).removeprefix("torch.")] * len(bucket),
            shapes=[*map(list, shapes)],
        )

    def take_weights(self, tensors, version, last):
        """One bucket [(name, tensor)] out of this process's own memory."""
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        flat = FlattenedTensorBucket(named_tensors=tensors)
        content = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        self._load(
            self.manager.update_weights_from_tensor,
            self.io_struct.UpdateWeightsFromTensorReqInput,
            version,
            last,
            load_format="flattened_bucket",
            serialized_named_tensors=[MultiprocessingSerializer.serialize(content)],
        )

    def check_weights(self, expected):
        """Raises RunError unless the parameters the engine computes with have these hashes, {name: hash}."""
        import zmq

        self.sglang.send_to_rpc.rcvtimeo = int(1000 * self.config["engine_timeout"])
        try:
            self.sglang.collective_rpc("check_weights", expected=expected)
        except zmq.Again:
            raise self.silent("while its weights were checked")
        except Exception as e:
            raise RunError(f"{self.name}: weights {self.version} did not arrive as sent: {e}")
