"""
What stands around a run's steps: who this rank is, the data, the folder, where an interrupted run resumes, the end.
"""

import os
import sys
import threading
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

import kernels
import rewards
import sync
from configurator import MODES, OWN, roles
from onecurve.cpu.host import share_cores
from onecurve.graders import checks
from onecurve.keys.prompts import sources_of
from onecurve.models import folders
from onecurve.models.dense import check_memory, check_model
from onecurve.run.checkpoint import checkpoints, clean_queue, read_checkpoint
from onecurve.run.machine import end_with_a_line, one_device, report_error, take_gpu, watch_ranks
from onecurve.run.own import own_function
from onecurve.run.record import Record, check_shared, open_run
from onecurve.run.save import save_trainer
from onecurve.run.versions import library_versions
from rollout_server import Flight


def due(steps, every, last):
    """True at 0, at `last`, and every `every` steps between them (0: not between them)."""
    return steps in (0, last) or every > 0 and steps % every == 0


def prepare_process():
    """Decides how this process ends: with one line, and without a semaphore left behind."""
    # joblib (through transformers) and tqdm leave semaphores in /dev/shm: the engine's exit kills the process that
    # would remove them. So neither may make one.
    os.environ["JOBLIB_MULTIPROCESSING"] = "0"
    tqdm.set_lock(threading.RLock())
    sys.stdout.reconfigure(line_buffering=True)  # else tqdm.write's lines wait where it is a file or a pipe
    sys.excepthook = partial(report_error, kept="nothing was written", cure="start again")
    end_with_a_line(int(os.environ.get("RANK", 0)))


class Task:
    """
    The task of a run: its rewards, or its agent, and its data. Made before the run has a folder; if one of them cannot
    be loaded, the run ends with one line.
    """

    def __init__(self, c):
        self.c = c
        for key in OWN:
            own_function(key, vars(c)[key])
        # Without samples, a reward's judge or sandbox may be missing.
        named = sources_of(vars(c)).items() if MODES[c.mode].samples else ()
        self.scored_by = {name: rewards.load_reward(own["reward"], vars(c)) for name, own in named}
        self.reward_models = checks.models_of(self.scored_by).values()
        self.agent = None  # an Agent, whose episodes take the place of samples of one turn
        self.template_skipped = False

    def read(self, model_path, tokenizer, stop_tokens, first):
        """Reads the data: train_rows {source: rows} and eval_rows. first: this rank is the one that prints."""
        c = self.c
        config = vars(c)
        checks.check_vocabulary(self.scored_by, tokenizer)
        self.template_skipped = tokenizer.chat_template and not (c.chat_template or c.prompt_template or c.agent)
        if first:
            folders.say_ends(tokenizer, stop_tokens, c.chat_template or c.agent, c.system_prompt)
        if c.agent:
            from onecurve.agents.sampler import Agent

            self.agent = Agent(config, model_path, tokenizer, stop_tokens)
        self.train_rows, eval_rows = rewards.load_sources(config, self.scored_by)
        if self.agent:
            self.agent.check_tools(next(chain(*self.train_rows.values(), eval_rows))["columns"])
        elif self.scored_by:
            checks.check_answers(self.scored_by, chain(*self.train_rows.values(), eval_rows), config)
        for name, rows in self.train_rows.items():
            self.train_rows[name] = rewards.encode_prompts(rows, f"training {name}".strip(), tokenizer, config)
        self.eval_rows = rewards.encode_prompts(eval_rows, "held-out", tokenizer, config)
        if self.scored_by and not self.agent and first:
            checks.try_own(self.scored_by, chain(*self.train_rows.values(), self.eval_rows))


class Run:
    """
    A run as this rank sees it. Everything else that a step needs follows from the config and the step's number: that
    is why so little has to be saved.

    c: the config as a namespace. resumed: the saved config of the run to resume, or {}; restarted: torchrun resumes
    it, not the user. again(): configurator.resolve's result, once more.
    """

    def __init__(self, c, task, resumed, restarted, again):
        config = vars(c)
        self.c = c
        self.does = MODES[c.mode]
        self.supervised = self.does.steps == "supervised"
        self.publishes = self.does.trains and self.does.samples
        self.steps = c.max_steps if self.does.steps == "rl" else 0
        self.join_ranks(config)
        if not resumed:  # only now is it known whether torchrun has restarted us because a rank of another node died
            _, resumed, restarted = again()  # torchrun restarts the same command: the config is this one
        first = self.ranks.rank == 0
        self.folder = Path(c.out_dir)
        model = self.folder / "model" if c.init_from == "scratch" else c.init_from
        if first:
            # Until here the folder is nobody's, and a corrected command may have it. Keep the lock: it lasts as long as
            # this file is open.
            self.lock = open_run(self.folder, config, resumed, restarted, self.chip)
            if c.init_from == "scratch":
                folders.make_scratch_model(model, config)
            folders.fetch_model(model)  # the others then find it on this disk
        check_shared(self.folder, self.ranks.rank)
        sys.excepthook = report_error  # from now on there is something to resume
        self.model_path = folders.fetch_model(model)
        self.hf = check_model(self.model_path, config)
        self.large = self.device == "cuda" or folders.large(self.model_path)
        if self.large:
            check_memory(self.hf, config, self.device, [judge.hf for judge in task.reward_models])
        self.tokenizer, self.stop_tokens = folders.load_tokenizer(self.model_path)
        task.read(self.model_path, self.tokenizer, self.stop_tokens, first)
        self.evaluates = task.eval_rows and (self.publishes or not self.does.steps)
        if c.batch_invariant:
            kernels.enable_batch_invariant(torch.get_num_threads(), self.cores)
        self.resume(resumed, task)

    def join_ranks(self, config):
        """Takes this rank's place among the others, its device and its threads."""
        c = self.c
        world = int(os.environ.get("WORLD_SIZE", 1))
        self.gpu = int(os.environ.get("LOCAL_RANK", 0))
        self.device = c.device or ("cuda" if torch.cuda.is_available() else "cpu")
        kernels.choose_dtype(self.device, c.dtype)
        self.dtype = kernels.compute_dtype(self.device)  # of the model in an engine
        self.chip = take_gpu(config, world, self.gpu) if self.device == "cuda" else ""
        self.ranks = ranks = sync.start_process_groups(*roles(config, world), self.device, c.rollout_tp)
        self.watch = watch_ranks(ranks, c.engine_timeout) if world > 1 and self.device == "cuda" else threading.Event()
        # Do trainers and engines work side by side, or in turn?
        self.overlaps = self.publishes and c.lag > 0 and ranks.trainers < world
        trains = ranks.mesh is not None
        concurrent = world if self.overlaps else ranks.trainers if trains else ranks.engines * c.rollout_tp
        # More threads than cores wait for each other by spinning; no bit depends on their number.
        torch.set_num_threads(c.threads or max(1, os.cpu_count() // concurrent))
        lends = self.overlaps and self.device == "cpu" and c.rollout_tp == 1 and not c.threads
        self.cores = share_cores(sync.from_all_ranks) if lends else ""

    def resume(self, resumed, task):
        """Finds where the run begins, or resumes: at its latest checkpoint."""
        c = self.c
        rank = self.ranks.rank
        self.id = sync.run_id(vars(c))
        self.origin = dict(run=self.id, versions=library_versions(), device=one_device(self.device))
        self.start = 0  # steps done: RL steps, or supervised ones where the mode has no others
        self.flight = Flight()
        self.saved = {}  # the checkpoint's record
        self.checkpoint = max(checkpoints(self.folder / "ckpt"), default=None) if resumed else None
        if latest := self.checkpoint:
            self.saved = saved = read_checkpoint(latest, rank, self.ranks.world, **self.origin)
            self.start = saved["step"]
            paths = sorted((latest / "flight").glob("*"))
            groups = tuple(sync.read_group(path, self.hf.vocab_size) for path in paths)
            self.flight = Flight(saved["begun"], groups, {tuple(place): right for *place, right in saved["seen"]})
            if not c.lora_rank:  # an engine, too, starts from the checkpoint; adapters are no model
                self.model_path = latest
        self.supervised_left = self.supervised or c.warmup_sft_steps and not self.saved
        sync.meet()  # every rank has checked its share before the first cuts the logs back
        self.record = Record(self.folder, self.saved, c, self.origin, task) if rank == 0 else None
        self.queue_path = Path(c.queue_dir or self.folder / "queue")
        if self.record:
            torn = 0 if c.queue_dir else clean_queue(self.queue_path, self.start)
            if resumed:
                print(f"resuming at step {self.start}; {torn} torn rollout files deleted", flush=True)
                if latest and self.start >= c.max_steps:
                    print(f"nothing to do: all of max_steps={c.max_steps} are done", flush=True)
        sync.meet()

    def begin(self, trainer):
        """Records what the first step begins with."""
        if not self.record:
            return
        if trainer:
            self.record.observers = trainer.observers
            line = f"model: {trainer.model.num_parameters():,} parameters"
            if trainer.parts.frozen:
                line += f", of which {trainer.model.num_parameters(only_trainable=True):,} are trained"
            print(line, flush=True)
        if not self.saved:
            if self.origin["device"] != "cpu":  # float32 has one digest, bfloat16 one on cards of one capability
                self.record.ledger.append(phase="device", step=0, device=self.origin["device"])
            if self.c.lora_rank:
                self.record.ledger.append(phase="base", step=0, weights=trainer.parts.base)

    def save(self, trainer, steps, flight=None):
        """Makes the checkpoint after this many steps. Collective over the trainers."""
        if trainer and self.c.checkpoint_every:
            ends = self.tokenizer, self.stop_tokens
            save_trainer(trainer, self.folder / "ckpt", *ends, self.record, steps, flight or self.flight)

    def version_for(self, step):
        """The version of the weights with which the samples of a step are made."""
        return max(0, step - self.c.lag) if self.ranks.trainers else 0

    def queue(self):
        """The Queue between engines and trainers."""
        heartbeats = [self.folder / f"engine_{i}.alive" for i in range(self.ranks.engines)]
        timeout = self.c.engine_timeout + 15
        return sync.Queue(self.queue_path, self.id, timeout, heartbeats, self.ranks.store, self.hf.vocab_size)

    def weight_sync(self, trainer, sampler):
        """The WeightSync from the trainers to the engines. Collective over all ranks."""
        sent = trainer.parts.sent if trainer else ()
        engine = sampler and sampler.engine
        return sync.WeightSync(
            self.c.weight_sync,
            self.ranks,
            sent,
            engine,
            self.device,
            self.dtype,
            self.overlaps,
            self.c.engine_bits,
        )

    def end(self, sampler, weights, alarm):
        """Ends the run on every rank, with its digest and status 0; with status 3 after the watch's alarm."""
        if self.record:
            self.record.bar.close()
        if weights:
            weights.finish()
        if self.record and alarm:
            print(self.record.alarm(alarm), file=sys.stderr)
        sync.meet()
        if self.record:  # before the libraries shut down, which may fail
            ledger = self.record.ledger if self.does.steps else self.record.evaluations
            print(f"digest {ledger.digest}", flush=True)
        sync.meet()
        self.watch.set()
        if weights:
            weights.close()
        dist.destroy_process_group()
        if sampler:
            sampler.engine.close()
        if alarm:
            sys.exit(3)
