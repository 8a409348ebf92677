"""
The run folder: one process opens it, all nodes see it, and the first rank's `Record` adds lines to its logs.
"""

import fcntl
import json
import os
import shutil
import socket
import sys
import time
from statistics import fmean
from uuid import uuid4

import torch
from tqdm import tqdm

from configurator import ORIGINS, config_source, fail, require
from onecurve.algorithms.pairs import sides
from onecurve.graders.watch import nothing_to_learn, text_metrics
from onecurve.run.checkpoint import healthy_checkpoint
from onecurve.run.scores import reward_metrics
from onecurve.run.versions import provenance
from sync import (
    FIRST_EVALUATION,
    Ledger,
    RunError,
    appears,
    content_hash,
    cut_back,
    from_all_ranks,
    fsync,
    write_atomic,
)

LOGS = ("ledger.jsonl", "evaluations.jsonl", "metrics.jsonl", "samples.md")  # what a step adds lines to


def open_run(folder, config, resumed, restarted, gpu):
    """
    Locks the folder until this process ends, however it ends, and prints and saves the config. Ends the run with one
    line if another process has it, or if it has results of a run that is not to be resumed. Keep the lock's file, which
    it returns.

    resumed: the saved config of the run to resume, or {}; restarted: torchrun resumes it, not the user.
    """
    lock = folder / "lock"
    owner = f"torchrun {os.getppid()}"
    problem = ""
    cure = "choose another"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(lock, "a")
        problem = "its file system has no flock: "  # and two runs could write there
        cure = "mount it with locks (Lustre: -o flock; NFS: with lockd), or choose another"
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"out_dir={str(folder)!r}: another run is writing there; choose another")
    except OSError as e:
        fail(f"out_dir={str(folder)!r}: {problem}{e.strerror}; {cure}")
    computed = ("queue/*/group_*", "ckpt/step_*[1-9]*/checkpoint.json", *LOGS)
    begun = any(path.stat().st_size for pattern in computed for path in folder.glob(pattern))
    # torchrun starts a rank again that was refused: such a restart may only resume torchrun's own run.
    if begun and not resumed or restarted and lock.read_text() != owner:
        fail(f"out_dir={str(folder)!r}: holds a run already; choose another, or resume with --init_from=resume")
    lock.write_text(owner)
    changed = {key: config[key] for key in ORIGINS if key in config}
    print(f"{config_source(changed)}# all keys: {folder / 'config.py'}", flush=True)
    path = folder / "config.py"
    earlier = "".join(x for x in path.read_text().splitlines(True) if x[0] == "#") if resumed else ""
    # A resume in another mode leaves the run's own mode in its config.
    kept = {key: resumed[key] for key in ("mode", "queue_dir") if resumed}
    write_atomic(path, (earlier + provenance(gpu) + config_source(config | kept)).encode())
    return file


def check_shared(folder, rank):
    """Ends the run, on every rank, if some node's `folder` is not the folder of rank 0. Collective over all ranks."""
    path = folder / f"shared_{uuid4().hex}"
    if rank == 0:
        path.touch()
    path = from_all_ranks(path)[0]
    others = {*from_all_ranks("" if appears(path, 20) else socket.gethostname())} - {""}
    if rank == 0:
        path.unlink()
    cure = "choose one on a file system that all nodes share"
    require(not others, f"out_dir={str(folder)!r}: not the same folder on {', '.join(sorted(others))}; {cure}")


def step_figures(batch, pass_reward, times):
    """
    The metrics of an RL step's samples, of those it trains on, and of its time; the numbers of easy and hard groups
    among all. times: as in `Record.step`.
    """
    rewards = torch.stack([t["rewards"] for t, _ in batch.groups])  # (P, G)
    lengths = torch.stack([group.response_lengths() for group in batch.groups]).double()  # (P, G)
    cut = torch.cat([t["truncated"] for t, _ in batch.groups])
    right = [float((t["rewards"] >= pass_reward).double().mean()) for t, m in batch.sampled if m["finished"]]
    meta = sorted((m for _, m in batch.sampled), key=lambda m: m["elapsed"])
    idle = {m["engine"]: m["idle"] for m in meta}  # of each engine up to its last group
    began, sampled, learned, published = times
    seconds = time.monotonic() - began
    return dict(
        reward_mean=fmean(rewards.flatten().tolist()),
        reward_std=float(rewards.double().std()),
        zero_std_groups=int((rewards == rewards[:, :1]).all(1).sum()),
        groups=len(batch.sampled),
        easy_groups=right.count(1),
        hard_groups=right.count(0),
        response_length_mean=float(lengths.mean()),
        response_length_max=int(lengths.max()),
        truncated_fraction=float(cut.double().mean()),
        weight_version=batch.groups[0].meta["version"],
        engine_retractions=sum(m["retractions"] for m in meta),
        wait_seconds=sampled - began,
        train_seconds=learned - sampled,
        rollout_seconds=max(m["began"] + m["seconds"] for m in meta) - min(m["began"] for m in meta),
        idle_seconds=fmean(idle.values()),
        sync_seconds=published - learned,
        step_seconds=seconds,
        tokens_per_second=float(lengths.sum()) / seconds,
    )


class Record:
    """
    The logs that the first rank writes: the ledger, a second one of the evaluations, metrics.jsonl, and samples.md to
    read. They are cut back to their sizes in the checkpoint's record `saved`; without one they begin empty. c: the
    config as a namespace; origin: what a checkpoint must say to be this run's; task: the run's Task.
    """

    def __init__(self, folder, saved, c, origin, task):
        self.folder = folder
        self.c = c
        self.origin = origin
        self.agent = task.agent
        self.template_skipped = task.template_skipped
        self.observers = ()  # the trainer's
        sizes = dict.fromkeys(LOGS, 0) | saved.get("bytes", {})
        self.ledger = Ledger(folder / "ledger.jsonl", sizes["ledger.jsonl"], c.strict)
        if saved and self.ledger.digest != saved["digest"]:
            raise RunError(f"{self.ledger.path}: does not lead to step {saved['step']}'s checkpoint; was it edited?")
        # Not compared with what comes out after a resume: eval_samples may be another then.
        path = folder / "evaluations.jsonl"
        self.evaluations = Ledger(path, sizes[path.name], strict=False, first=FIRST_EVALUATION)
        for name in ("metrics.jsonl", "samples.md"):
            cut_back(folder / name, sizes[name])
        texts = "prompt", *sides(c.mode)
        self.rows = content_hash([[row[x] for x in texts] for rows in task.train_rows.values() for row in rows])
        if self.rows != saved.get("rows", self.rows):
            print("warning: the data has other rows than before: from here on this is another curve", file=sys.stderr)
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        self.steps = [line for line in lines if line["phase"] == "rl"]

    def open_bar(self, start, steps):
        """Shows the number of RL steps that are done."""
        self.bar = tqdm(total=steps, initial=start, disable=not steps, unit="step", mininterval=0.5)

    def state(self):
        """A checkpoint's record of the run and of its logs, which are then on the disk as it has them."""
        for name in LOGS:
            fsync(self.folder / name)
        sizes = {name: (self.folder / name).stat().st_size for name in LOGS}
        return self.origin | dict(digest=self.ledger.digest, bytes=sizes, rows=self.rows)

    def metrics(self, **line):
        with open(self.folder / "metrics.jsonl", "a") as f:
            f.write(json.dumps(line) + "\n")

    def supervised(self, phase, step, samples, metrics, hashes):
        """A step on known answers ('sft') or pairs ('rm', 'dpo')."""
        self.metrics(phase=phase, step=step, **metrics)
        tokens = content_hash(*(s.tokens for s in samples))
        self.ledger.append(phase=phase, step=step, tokens=tokens, **hashes)
        if (step + 1) % 50 == 0:
            tqdm.write(f"supervised step {step + 1}: loss {metrics['loss']:.4f}")

    def evaluation(self, step, scores, prompts, hashes):
        """
        Records scores {metric: value} of an evaluation, and hashes {stage: hash} of its samples or pairs. prompts: the
        number of held-out prompts or pairs.
        """
        c = self.c
        self.metrics(phase="eval", step=step, **scores)
        self.evaluations.append(phase="eval", step=step, **hashes, scores=scores)
        rates = (f"{k} {v:.4f} +- {scores[f'{k}_ci95']:.4f}" for k, v in scores.items() if f"{k}_ci95" in scores)
        scored = f"agent {c.agent!r}" if c.agent else f"reward {c.reward!r}"
        what = f"{prompts} prompts, {c.eval_samples} samples each, {scored}, temperature {c.eval_temperature}"
        if "eval_margin" in scores:  # of pairs
            what = f"{prompts} pairs, loss {scores['eval_loss']:.4f}, margin {scores['eval_margin']:.4f}"
        tqdm.write(f"held out after {step} steps: {', '.join(rates)} ({what})")

    def hashes(self, groups):
        """{stage: hash} of Groups."""
        tensors, meta = zip(*groups)
        named = ["tokens", "logprobs", "rewards"]
        if self.c.lag or self.c.segment_tokens:
            named.append("weight_version")
        if self.agent:
            named += ["loss_mask", "turn_rewards"]
        stages = {k: content_hash(*(t[k] for t in tensors)) for k in named}
        if self.agent:
            stages["journal"] = content_hash([m["journal"] for m in meta])
        prompts = content_hash([m["prompt_text"] for m in meta], *(t["prompt_tokens"] for t in tensors))
        return dict(prompts=prompts) | stages

    def step(self, step, batch, metrics, hashes, times):
        """
        Records an RL step, and shows that it is done. metrics, hashes: the trainer's, {} where nobody trains.
        times: when the step began, had its samples, had learned, had published.
        """
        c = self.c
        self.ledger.append(phase="rl", step=step, **self.hashes(batch.groups), **hashes)
        line = dict(phase="rl", step=step) | step_figures(batch, c.pass_reward, times) | metrics
        line |= reward_metrics(batch.sampled)
        if c.watch:
            line |= text_metrics(batch.sampled)
        if self.agent:
            line |= self.agent.metrics(batch.sampled)
        self.metrics(**line)
        self.steps.append(line)
        for observer in self.observers:
            observer.write(self.folder / f"queue/rl_{step:06d}")
        self.bar.set_postfix(reward=f"{line['reward_mean']:.3f}", mismatch=line.get("logprob_mismatch_tokens", "-"))
        self.bar.update()
        if why := nothing_to_learn(self.steps, c, self.template_skipped):
            tqdm.write(f"warning: {why}", file=sys.stderr)
        if c.sample_every and step % c.sample_every == 0:
            self.samples(step, *batch.groups[0])
        if c.keep_rollouts:  # an engine that is late may still read the files of later steps
            shutil.rmtree(self.folder / f"queue/rl_{step - c.keep_rollouts - c.lag:06d}", ignore_errors=True)

    def samples(self, step, tensors, meta):
        """An entry of samples.md: a group's samples and rewards."""
        with open(self.folder / "samples.md", "a") as f:
            f.write(f"\n## step {step}\n\nprompt `{meta['prompt_text']!r}`, answer `{meta['answer']!r}`\n\n")
            for g, reward in enumerate(tensors["rewards"].tolist()):
                cut = ", cut off" * bool(tensors["truncated"][g])
                said = [f" `{meta['responses'][g]!r}`{cut}\n"]
                if self.agent:  # whose response is the last of its turns
                    said = ["\n", *self.agent.transcript(meta["episodes"][g])]
                f.writelines([f"- reward {reward:g}:", *said])

    def alarm(self, alarm):
        """A line for a run that its watch ends: why, and how to resume from where it was healthy."""
        done = self.steps[-1]["step"] + 1
        cure = "none is kept (--keep_checkpoints)"
        if healthy := healthy_checkpoint(self.folder, done):
            go_on = f"tools/branch.py {self.folder} --step={int(healthy.name[5:])}"
            cure = f"{healthy}, from which {go_on} goes on with other flags"
        return f"watch: {alarm} after step {done}; the last healthy checkpoint: {cure}"
