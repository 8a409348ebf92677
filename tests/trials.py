"""
What no flag of a run offers: ways to break a promise, and what happens to the runs of the tests.

    python tests/trials.py --broken sums_as_they_come config/small.py    # a run with one thing wrong on purpose
"""

import asyncio
import itertools
import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import runs  # noqa: E402
from runs import ROOT, lines  # noqa: E402

import sync  # noqa: E402
from onecurve.run.checkpoint import checkpoints, seal_checkpoint  # noqa: E402
from onecurve.run.record import Record  # noqa: E402
from onecurve.run.versions import commit  # noqa: E402


def of_this_commit(items):
    """One of them, by the commit's hash: so what takes long is tested in turn."""
    number = re.match("[0-9a-f]*", commit())[0]
    return items[int(number or "0", 16) % len(items)]


# ---- ways to break a promise, and trials that it must survive


def sums_as_they_come():
    class RunningSum(sync.LeafSum):
        def __init__(self, per_rank, model=None):
            super().__init__(1, model)

    sync.LeafSum = RunningSum


def seeds_by_engine():
    import rollout_server

    seed = rollout_server.sampling_seed
    rollout_server.sampling_seed = lambda *key: seed(*key, os.environ.get("RANK", "0"))


def a_flipped_bit():
    """In one parameter, on its way to the engines."""

    def flipped(shard):
        if shard.name != "model.layers.1.mlp.up_proj.weight":
            return shard
        data = shard.data.clone()  # the trainer keeps the right one
        data.view(torch.uint8).view(-1)[1000] ^= 1
        return shard._replace(data=data)

    def flip_in(send):
        return lambda self, bucket, shards, *others: send(self, bucket, map(flipped, shards), *others)

    sync.WeightSync._broadcast = flip_in(sync.WeightSync._broadcast)
    sync.WeightSync._ipc = flip_in(sync.WeightSync._ipc)


def weights_as_they_come():
    """Every third time the engines go on with the weights they have, since the next ones are late."""
    publish = sync.WeightSync.publish
    sent = {}

    def late(self, version, hashes=None, shards=None):
        sent[version] = shards
        publish(self, version, {}, sent[version - 1] if version % 3 == 2 else shards)

    sync.WeightSync.publish = late


def rule_on_one_side():
    """The trainer's log-probs are those of all tokens, the engine's of those that a sampling rule keeps."""
    from onecurve.models import dense

    own = dense.token_logprobs
    every = dict(top_p=1.0, top_k=0, min_p=0.0)
    dense.token_logprobs = lambda model, leaf, sampling, *more: own(model, leaf, sampling._replace(**every), *more)


def kept_by_other_weights():
    """What a rule keeps is found anew with the weights that are trained, not held from those that sampled."""
    from onecurve.models import dense

    own = dense.token_logprobs
    dense.token_logprobs = lambda model, leaf, *more: own(model, leaf._replace(kept=leaf.kept[:, :0]), *more)


def adapters_apart():
    """The trainer adds what the adapters make of x to what the base makes of it, as is usual; an engine has the sum."""
    import kernels

    def apart(ctx, x, weight, bias, A, B, scale, split):
        ctx.save_for_backward(x, weight, A, B)
        ctx.scale = scale
        return x @ weight.t() + scale * (x @ A.t() @ B.t())

    kernels.LoRALinear.forward = staticmethod(apart)


def experts_by_number():
    """The trainer adds a token's experts in the order of their numbers, as is usual; the engine the likeliest first."""
    import kernels

    choose = kernels.Choose.forward

    def by_number(ctx, z, k):
        w, experts = choose(ctx, z, k)
        experts, order = experts.sort(1)
        w = w.gather(1, order)
        ctx.save_for_backward(w, experts)
        ctx.mark_non_differentiable(experts)
        return w, experts

    kernels.Choose.forward = staticmethod(by_number)


def plain_all_reduce():
    """Each rank of an engine multiplies all it has at once, and the products are added, as is usual."""
    import rollout_server

    start = rollout_server.start_engine

    def usual(config, *args):
        return start(config | dict(tp_split=config["rollout_tp"]), *args)

    rollout_server.start_engine = usual


def segments_by_time():
    """A segment ends when a moment has passed, not after so many tokens."""
    from rollout_server import Sampler

    draw = Sampler._draw

    async def cut(self, samples, prompt, seeds, job):
        job = job._replace(tokens=job.tokens and 1 + time.time_ns() // 1000 % (2 * job.tokens))
        return await draw(self, samples, prompt, seeds, job)

    Sampler._draw = cut


def seeds_by_arrival():
    """A turn's noise is that of the number of turns before it, in whatever order they come."""
    import onecurve.agents.sampler

    count = itertools.count()
    seed = onecurve.agents.sampler.sampling_seed
    onecurve.agents.sampler.sampling_seed = lambda *key: seed(next(count))


def killed_in_step_13():
    """The first rank dies in its 13th supervised step; once, as a file beside the logs says."""
    record = Record.supervised

    def dies(self, phase, step, *others):
        record(self, phase, step, *others)
        if step == 12 and not (died := self.folder / "died").exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    Record.supervised = dies


def failing_sandbox():
    """The 50th program's sandbox is killed when it has begun, which breaks nothing; the 100th's does not start."""
    from onecurve.graders import sandbox

    begun = itertools.count(1)
    ended = itertools.count(1)
    wait = sandbox._wait
    command = sandbox.sandbox_command

    def killed(pid, seconds):
        if next(ended) == 50:
            os.kill(pid, signal.SIGKILL)
        return wait(pid, seconds)

    def lost(*args):
        return ["false"] if next(begun) == 100 else command(*args)

    sandbox._wait = killed
    sandbox.sandbox_command = lost


def slow_engines():
    """Breaks nothing: an engine waits up to a tenth of a second before it draws a prompt's samples."""
    from rollout_server import Sampler

    draw = Sampler._draw

    async def slow(self, *args):
        await asyncio.sleep(random.SystemRandom().random() / 10)
        return await draw(self, *args)

    Sampler._draw = slow


# ---- runs


def command_of(folder, *flags, ranks=0, broken=None, restarts=0):
    """
    The command of a run of config/small.py with out_dir=folder, under torchrun if ranks. broken: one of the functions
    above; then the command runs this file, which calls the function and then train_grpo.py.
    """
    script = ["tests/trials.py", "--broken", broken.__name__] if broken else ["train_grpo.py"]
    args = "config/small.py", f"--out_dir={folder}", *flags
    return runs.command(*args, ranks=ranks, restarts=restarts, script=script)


def launch(folder, *flags, timeout=600, env=None, **options):
    """Runs the command of `command_of` to its end: (status, output)."""
    return runs.launch(command_of(folder, *flags, **options), env, ROOT, timeout)


# Samples made ahead of the updates: whole ones, and token by token, with the weights of each step
TWO = "low={'dataset': 'arithmetic:0:5', 'eval_size': 5}, "
TWO += "high={'dataset': 'arithmetic:5:10', 'eval_size': 5, 'weight': 3}"
LAG = ("--lag=2", "--curriculum=15", f"--sources={TWO}", "--max_steps=16")
SPLIT = ("--tp_split=4", "--lag=1", "--share_prefixes", "--max_steps=16")
RULE = ("--top_p=0.9", "--top_k=20", "--min_p=0.02")
SEGMENTS = """--lag=2 --segment_tokens=1 --groups_in_flight=16 --prompts_per_step=4 --updates_per_batch=2
    --max_steps=16""".split()
SEGMENTS += RULE

# A mixture of experts, of which the last of four trainers has none; samples a step ahead
SIZES = "num_hidden_layers=2, hidden_size=64, intermediate_size=64, num_experts=6"
MIXTURE = (f"--scratch_args={SIZES}", "--router_aux_loss_coef=0.01", "--lag=1", "--share_prefixes", "--max_steps=16")

# Adapters of a model that was trained before, which --init_from names
LORA = ("--lora_rank=8", "--lora_alpha=16", "--learning_rate=2e-3", "--warmup_sft_steps=0", "--max_steps=16")

# An agent with a tool that takes its time, and the supervised steps on its dialogues from which its model comes
AGENT = """--agent=tests/slow_agent.py:solve --tool_call_parser=pythonic --max_prompt_tokens=24 --max_new_tokens=40
    --leaf_tokens=512 --warmup_sft_steps=0 --max_steps=16""".split()
DIALOGUES = "--mode=sft --max_steps=100 --learning_rate=2e-3 --warmup_steps=20 --checkpoint_every=100".split()


def taught_by(folder):
    """The flags of an agent's run that begins with what the run of supervised steps in `folder` has learned."""
    return *AGENT, f"--init_from={folder / 'ckpt' / 'step_000100'}"


def replay_of(folder):
    """The flags of a run that trains again from the rollout files of the run in `folder`."""
    return "--mode=replay", f"--queue_dir={folder / 'queue'}"


def steps_that_taught_nothing(folder):
    """
    The RL steps of config/small.py in which all groups had equal rewards, there was no gradient, or no weight moved:
    that their bits are equal proves nothing.
    """
    metrics, entries = (lines(folder, file, "rl") for file in ("metrics.jsonl", "ledger.jsonl"))
    taught = [m["zero_std_groups"] < 8 and m["reward_std"] > 0 and m["grad_norm"] > 1e-3 for m in metrics]
    for i, (before, after) in enumerate(zip(entries, entries[1:]), 1):
        for stage in ("gradients", "weights", "optimizer"):
            taught[i] &= all(before[stage][name] != after[stage][name] for name in after[stage])
    return [m["step"] for m, something in zip(metrics, taught) if not something]


def written_by(pid):
    """The files that a process has open for writing."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # it closes one meanwhile, and may still hold the others
            if fd.lstat().st_mode & 0o200:
                yield str(fd.resolve())


def processes_of(folder):
    """{id: command line} of living processes that name the folder or write a file in it, as the engine its log."""
    living = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            files = [*written_by(pid)]
        except OSError:
            continue
        if any(str(folder) in x for x in (command, *files)):
            living[int(pid)] = command
    return living


def schedulers_of(folder):
    """The ids of the processes in which a run's engines compute."""
    return [pid for pid, command in processes_of(folder).items() if "sglang::scheduler" in command]


# ---- what happens to a run


def is_rank(command):
    """Also of one that tests/warm.py has forked."""
    named = any(name in command for name in ("train_grpo.py", "--broken", "warm.py"))
    return named and "torch.distributed.run" not in command


def kill_one(folder, rng, goes_on, start=20.0):
    """
    Kills a process of a run (a rank or an SGLang scheduler) at a moment drawn from `rng`, half of the times while it
    starts, half in its steps: returns which, or '' if the run has ended before. goes_on(): whether it has not; start:
    seconds that count as its start.
    """

    def sleep_until(condition, seconds):
        end = time.monotonic() + seconds
        while goes_on() and not condition() and time.monotonic() < end:
            time.sleep(0.2)

    metrics = folder / "metrics.jsonl"
    if rng.random() < 0.5:
        sleep_until(lambda: False, rng.uniform(0, start))
    else:
        sleep_until(lambda: schedulers_of(folder) and time.time() - metrics.stat().st_mtime < 0.3, 120)
        sleep_until(lambda: False, rng.uniform(0, 3))
    ranks = [pid for pid, command in processes_of(folder).items() if is_rank(command)]
    kinds = dict(rank=ranks, scheduler=schedulers_of(folder))
    found = [kind for kind in kinds if kinds[kind]]
    if not found or not goes_on():
        return ""
    kind = rng.choice(found)
    os.kill(rng.choice(kinds[kind]), signal.SIGKILL)
    return kind


def run_with_kills(folder, kills, rng, *flags, say=lambda _: None, **options):
    """
    A run under torchrun --max-restarts, of which up to `kills` processes are killed as `kill_one` says: (status,
    output, [what was killed]).
    """
    command, victims = command_of(folder, *flags, **({"ranks": 2} | options), restarts=kills), []
    with open(folder.parent / f"{folder.name}.output", "w+") as output:
        run = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        try:
            while len(victims) < kills and run.poll() is None:
                if kind := kill_one(folder, rng, lambda: run.poll() is None):
                    victims.append(kind)
                    say(f"killed a {kind}")
            run.wait(timeout=300)
        finally:
            if run.poll() is None:
                run.terminate()
                run.wait(timeout=60)
        output.seek(0)
        return run.returncode, output.read(), victims


def interrupt(finished, folder):
    """A copy of a finished run, cut to what a kill two steps before its last checkpoint leaves."""
    shutil.copytree(finished, folder)
    last = checkpoints(folder / "ckpt")[-1]
    shutil.rmtree(last)
    done = int(last.name[5:]) - 2
    for step in (done, done + 1):
        shutil.rmtree(folder / "queue" / f"rl_{step:06d}")
    for file in ("ledger.jsonl", "metrics.jsonl"):
        entries = [(x, json.loads(x)) for x in (folder / file).read_text().splitlines(True)]
        kept = "".join(x for x, entry in entries if entry["phase"] == "sft" or entry["step"] < done)
        (folder / file).write_text(kept + '{"phase": "rl", "st')  # torn, as by the kill
    return folder


def forget_optimizer(folder):
    """Puts zeros for AdamW's moments into the last checkpoint, and valid checksums."""
    checkpoint = checkpoints(folder / "ckpt")[-1]
    for path in (checkpoint / "optimizer").glob("*.safetensors"):
        save_file({name: torch.zeros_like(t) for name, t in load_file(path).items()}, path)
    reseal(checkpoint)


def reseal(checkpoint, **changes):
    """Gives a changed checkpoint valid checksums, and its record these changes."""
    record = json.loads((checkpoint / "checkpoint.json").read_text())
    (checkpoint / "checkpoint.json").unlink()
    kept = {key: value for key, value in record.items() if key not in ("files", "sha256")}
    checkpoint.rename(partial := checkpoint.with_name(".partial"))
    seal_checkpoint(partial, checkpoint, **kept | changes)


def forget_seen(folder):
    """Takes what a curriculum has seen out of the last checkpoint, and the samples after it."""
    checkpoint = checkpoints(folder / "ckpt")[-1]
    reseal(checkpoint, seen=[])
    for step in folder.glob("queue/rl_*"):
        if int(step.name[3:]) >= int(checkpoint.name[5:]):
            shutil.rmtree(step)


def flip_token(queue):
    """Changes one token of step 3 into another, under a valid checksum."""
    path = sync.group_path(queue / "rl_000003", 0)
    tensors, meta = sync.read_group(path)
    tensors["tokens"][1] += 1 if tensors["tokens"][1] < 90 else -1
    sync.write_group(path, tensors, meta)


if __name__ == "__main__":
    globals()[sys.argv[2]]()
    sys.argv = ["train_grpo.py", *sys.argv[3:]]
    runpy.run_path("train_grpo.py", run_name="__main__")
