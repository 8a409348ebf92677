"""
All laws, proven with whole runs of the real engine: what was varied, whether all bits are equal, and whether the
negative control, a run with one thing wrong, was caught.

    python tools/prove.py                  # some 50 runs of half a minute on two CPU cores; with GPUs, on them
    python tools/prove.py L3 L6 --kills=20

Every run is compared by its ledger: a hash per step of prompts, tokens, log-probs, rewards, advantages, and of each
parameter's gradient, value and optimizer state. Exit status 0: all laws hold and all controls were caught.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import runs
import torch
from runs import ROOT, lines
from safetensors.torch import load_file, save_file

import sync

# ---- what no flag offers: ways to break a promise, and trials that it must survive


def sums_as_they_come():
    class RunningSum(sync.LeafSum):
        def add(self, grads):
            self.total = [a + b for a, b in zip(self.total, grads)] if self.total else grads

    sync.LeafSum = RunningSum


def seeds_by_engine():
    import rollout_server

    seed = rollout_server.sampling_seed
    rollout_server.sampling_seed = lambda *key: seed(*key, os.environ.get("RANK", "0"))


def a_flipped_bit():
    """In one parameter, on its way to the engines."""
    right = sync.whole

    def wrong(shard, mesh):
        sent = right(shard, mesh)
        if shard.name == "model.layers.1.mlp.up_proj.weight":
            sent.view(torch.uint8).view(-1)[1000] ^= 1
        return sent

    sync.whole = wrong


def weights_as_they_come():
    """Every third time the engines go on with the weights they have, since the next ones are late."""
    publish, sent = sync.WeightSync.publish, {}

    def late(self, version, hashes=None, shards=None):
        sent[version] = shards
        publish(self, version, None, sent[version - 1] if version % 3 == 2 else shards)

    sync.WeightSync.publish = late


def adapters_apart():
    """The trainer adds what the adapters make of x to what the base makes of it, as is usual; an engine has the sum."""
    import kernels

    def apart(ctx, x, weight, bias, A, B, scale, split):
        ctx.save_for_backward(x, weight, A, B)
        ctx.scale = scale
        return x @ weight.t() + scale * (x @ A.t() @ B.t())

    kernels.LoRALinear.forward = staticmethod(apart)


def plain_all_reduce():
    """Each rank of an engine multiplies all it has at once, and the products are added, as is usual."""
    from rollout_server import RolloutEngine

    start = RolloutEngine._start

    def usual(self, *args):
        self.config = self.config | dict(tp_split=self.config["rollout_tp"])
        return start(self, *args)

    RolloutEngine._start = usual


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
    import agents.sampler

    count, seed = itertools.count(), agents.sampler.sampling_seed
    agents.sampler.sampling_seed = lambda *key: seed(next(count))


def killed_in_step_13():
    """The first rank dies in its 13th supervised step; once, as a file beside the logs says."""
    record = sync.Record.supervised

    def dies(self, phase, step, *others):
        record(self, phase, step, *others)
        if step == 12 and not (died := self.folder / "died").exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    sync.Record.supervised = dies


def killed_sandbox():
    """The sandbox of the 100th program is killed as soon as it has begun."""
    from agents import sandbox

    count, wait = itertools.count(1), sandbox._wait

    def killed(pid, seconds):
        if next(count) == 100:
            os.kill(pid, signal.SIGKILL)
        return wait(pid, seconds)

    sandbox._wait = killed


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
    script = ["tools/prove.py", "--broken", broken.__name__] if broken else ["train_grpo.py"]
    args = "config/small.py", f"--out_dir={folder}", *flags
    return runs.command(*args, ranks=ranks, restarts=restarts, script=script)


def launch(folder, *flags, timeout=600, env=None, **options):
    """Runs the command of `command_of` to its end: (status, output)."""
    return runs.launch(command_of(folder, *flags, **options), env, ROOT, timeout)


# Samples made ahead of the updates: whole ones, and token by token, with the weights of each step
LAG = ("--lag=2",)
SPLIT = ("--tp_split=4", "--lag=1")
SEGMENTS = ("--lag=1", "--segment_tokens=1", "--groups_in_flight=16", "--prompts_per_step=4")

# Adapters of a model that was trained before, which --init_from names
LORA = ("--lora_rank=8", "--lora_alpha=16", "--learning_rate=2e-3", "--warmup_sft_steps=0")

# An agent with a tool that takes its time, and the supervised steps on its dialogues from which its model comes
AGENT = """--agent=tests/slow_agent.py:solve --tool_call_parser=pythonic --max_prompt_tokens=24 --max_new_tokens=40
    --leaf_tokens=512 --warmup_sft_steps=0""".split()
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


def processes_of(folder):
    """{id: command line} of living processes that name the folder or have a file in it open, as the engine its log."""
    living = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            files = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        if any(str(folder) in x for x in (command, *files)):
            living[int(pid)] = command
    return living


# ---- what happens to a run


def is_rank(command):
    return ("train_grpo.py" in command or "--broken" in command) and "torch.distributed.run" not in command


def run_with_kills(folder, kills, rng, *flags, say=lambda _: None, **options):
    """
    A run under torchrun --max-restarts, whose processes (ranks and SGLang schedulers) get up to `kills` SIGKILLs at
    moments drawn from `rng`, half of them while it starts, half in its steps: (status, output, [what was killed]).
    """
    command, victims = command_of(folder, *flags, **({"ranks": 2} | options), restarts=kills), []
    metrics = folder / "metrics.jsonl"
    with open(folder.parent / f"{folder.name}.output", "w+") as output:
        run = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)

        def schedulers():
            return [pid for pid, command in processes_of(folder).items() if "sglang::scheduler" in command]

        def sleep_until(condition, seconds):
            end = time.monotonic() + seconds
            while run.poll() is None and not condition() and time.monotonic() < end:
                time.sleep(0.05)

        try:
            while len(victims) < kills and run.poll() is None:
                if rng.random() < 0.5:
                    sleep_until(lambda: False, rng.uniform(0, 20))
                else:
                    sleep_until(lambda: schedulers() and time.time() - metrics.stat().st_mtime < 0.3, 120)
                    sleep_until(lambda: False, rng.uniform(0, 3))
                ranks = [pid for pid, command in processes_of(folder).items() if is_rank(command)]
                kinds = {k: pids for k, pids in (("rank", ranks), ("scheduler", schedulers())) if pids}
                if kinds and run.poll() is None:
                    kind = rng.choice(sorted(kinds))
                    os.kill(rng.choice(kinds[kind]), signal.SIGKILL)
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
    """A copy of a finished run, cut to what a kill after its 22nd step leaves; its last checkpoint is of step 16."""
    shutil.copytree(finished, folder)
    shutil.rmtree(folder / "ckpt" / "step_000024")
    for step in (22, 23):
        shutil.rmtree(folder / "queue" / f"rl_{step:06d}")
    for file in ("ledger.jsonl", "metrics.jsonl"):
        entries = [(x, json.loads(x)) for x in (folder / file).read_text().splitlines(True)]
        kept = "".join(x for x, entry in entries if entry["phase"] == "sft" or entry["step"] < 22)
        (folder / file).write_text(kept + '{"phase": "rl", "st')  # torn, as by the kill
    return folder


def forget_optimizer(folder):
    """Puts zeros for AdamW's moments into the last checkpoint, and valid checksums."""
    checkpoint = sync.checkpoints(folder / "ckpt")[-1]
    for path in (checkpoint / "optimizer").glob("*.safetensors"):
        save_file({name: torch.zeros_like(t) for name, t in load_file(path).items()}, path)
    record = json.loads((checkpoint / "checkpoint.json").read_text())
    (checkpoint / "checkpoint.json").unlink()
    kept = {key: value for key, value in record.items() if key not in ("files", "sha256")}
    checkpoint.rename(partial := checkpoint.with_name(".partial"))
    sync.seal_checkpoint(partial, checkpoint, **kept)


def flip_token(queue):
    """Changes one token of step 3 into another, under a valid checksum."""
    folder = queue / "rl_000003"
    tensors, meta = sync.read_group(folder, 0, {})
    tensors["tokens"][1] += 1 if tensors["tokens"][1] < 90 else -1
    sync.write_group(folder, 0, tensors, meta)


# ---- the laws


class Proof:
    """Runs, compared with the first one; each law returns rows (what was varied, steps, equal, control, caught)."""

    def __init__(self, folder, kills):
        self.folder, self.kills, self.count = folder, kills, 0
        gpus = torch.cuda.device_count()
        self.most = gpus if gpus else 8  # ranks at a time
        self.ranks = 2 if self.most > 1 else 0
        self.base = self.run("the first run")

    def say(self, text):
        print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)

    def run(self, what, *flags, folder=None, fails=False, **options):
        """The folder of a finished run, or, if it fails, its error line (None where it should have failed)."""
        self.count += 1
        self.say(what)
        folder = folder or self.folder / f"run{self.count}"
        status, output = launch(folder, *flags, **({"ranks": self.ranks} | options))
        errors = [x[x.index("error: ") :] for x in output.splitlines() if "error: " in x]  # maybe behind a bar
        if fails:
            return errors[0] if status and errors else None
        if status:
            sys.exit(f"{what}: status {status}\n{output[-3000:]}")
        return folder

    def ledger(self, folder):
        return (folder / "ledger.jsonl").read_text().splitlines()

    def survive(self, folder, kills, rng, *flags, **options):
        """Runs to the end through kills, or ends this proof; returns what was killed."""
        status, output, victims = run_with_kills(folder, kills, rng, *flags, say=self.say, **options)
        if status:
            sys.exit(f"after {len(victims)} kills: status {status}\n{output[-3000:]}")
        return victims

    def row(self, varied, folders, control, caught, base=None):
        first, equal = self.ledger(base or self.base), True
        for folder in folders:
            mine = self.ledger(folder)
            equal &= mine == first[: len(mine)] and not steps_that_taught_nothing(folder)
        steps = min(len(lines(folder, "ledger.jsonl", "rl")) for folder in folders)
        return varied, steps, equal, control, bool(caught)

    def differs(self, a, b):
        return any(x != y for x, y in zip(self.ledger(a), self.ledger(b)))

    def L1(self):
        again, other = self.run("a second run"), self.run("another seed", "--seed=2", "--max_steps=2")
        yield self.row("two runs", [again], "another seed", self.differs(self.base, other))

    def L2(self):
        steps = lines(self.base, "metrics.jsonl", "rl")
        equal = not steps_that_taught_nothing(self.base) and not any(s["logprob_mismatch_tokens"] for s in steps)
        caught = self.run("the libraries' own operators", "--batch_invariant=False", "--max_steps=3", fails=True)
        caught = bool(caught and "log-probs differ" in caught)
        yield "log-prob of every token", len(steps), equal, "batch_invariant=False", caught

    def L3(self):
        counts = [n for n in (1, 2, 4) if n <= self.most]
        runs = [self.run(f"{n} trainers", *replay_of(self.base), ranks=n) for n in counts]
        broken = dict(broken=sums_as_they_come)
        flags = (*replay_of(self.base), "--strict=False", "--max_steps=4")
        plain = [self.run(f"sums as they come, {n} trainers", *flags, ranks=n, **broken) for n in counts[:2]]
        caught = self.differs(*plain) if len(plain) == 2 else None
        yield self.row(f"{counts} trainers", runs, "gradients added as they come", caught)

    def L4(self):
        if self.most < 3:
            return
        flags = ("--rollout_ranks=2", "--max_steps=8")
        two = self.run("two engines", *flags, ranks=3)
        seeded = self.run("seeds by engine", *flags, ranks=3, broken=seeds_by_engine)
        caught = self.differs(self.base, seeded)
        yield self.row("2 engines, claims by who is free", [two], "seeds by engine rank", caught)

    def L5(self):
        free = "--radix_cache=False --engine_max_running=17 --engine_prefill_chunk=32 --gradient_checkpointing"
        tight, every_third = ("--engine_kv_tokens=150", "--max_steps=8"), {"SGLANG_TEST_RETRACT": "1"}
        runs = [
            self.run("other engine settings", *free.split(), ranks=0),
            self.run("a small cache, requests put back", *tight, env=every_third),
        ]
        retracted = sum(s["engine_retractions"] for s in lines(runs[1], "metrics.jsonl", "rl"))
        theirs = ("--batch_invariant=False", "--strict=False", "--max_steps=4")
        a = self.run("the libraries' own operators", *theirs)
        b = self.run("the same, 17 requests at a time", *theirs, "--engine_max_running=17")
        varied = f"batch size, radix cache, prefill chunks, {retracted} retractions, one process"
        yield self.row(varied, runs, "the same without our operators", self.differs(a, b))

    def L6(self):
        moved = self.run(
            "a resume on other ranks", "--init_from=resume", folder=interrupt(self.base, self.folder / "moved"),
            ranks=3 if self.most > 2 else self.ranks,
        )  # fmt: skip
        lost = interrupt(self.base, self.folder / "lost")
        forget_optimizer(lost)
        caught = self.run("a resume without the optimizer", "--init_from=resume", folder=lost, fails=True)
        caught = caught and "came out otherwise" in caught
        runs, varied = [moved], "resume on other ranks"
        if self.kills and self.ranks:
            killed, rng = [], random.Random(time.time_ns())
            options = dict(ranks=self.ranks)
            while len(killed) < self.kills:  # a run may be done before it was killed often enough
                runs.append(self.folder / f"killed{len(runs)}")
                left = self.kills - len(killed)
                killed += self.survive(runs[-1], left, rng, "--checkpoint_every=2", **options)
            counts = " and ".join(f"{killed.count(v)} of a {v}" for v in sorted(set(killed)))
            varied += f"; {len(killed)} SIGKILLs ({counts}) in {len(runs) - 1} runs"
        yield self.row(varied, runs, "a resume without the optimizer", caught)

    def L7(self):
        replay = self.run("a replay", *replay_of(self.base), ranks=0)
        shutil.copytree(self.base / "queue", self.folder / "queue")
        flip_token(self.folder / "queue")
        caught = self.run("a replay of a changed token", *replay_of(self.folder), ranks=0, fails=True)
        yield self.row("replay without an engine", [replay], "one changed token", caught and "step 3," in caught)

    def L8(self):
        runs = [
            self.run("weights from two trainers", "--max_steps=8", ranks=3),
            self.run("weights by ipc", "--weight_sync=ipc", "--max_steps=8", ranks=0),
        ]
        caught = self.run("a bit flipped on the way", "--max_steps=1", fails=True, broken=a_flipped_bit)
        caught = caught and "up_proj.weight" in caught
        yield self.row("weights by broadcast from one and two trainers, ipc", runs, "a bit flipped on the way", caught)

    def apart(self, flags):
        """A run in turn, and the same run side by side with slow engines, killed, and from its rollout files."""
        in_turn, runs, kills = self.run("samples ahead, in turn", *flags, ranks=0), [], -(-self.kills // 3)
        for engines in (n for n in (1, 2) if n < self.most):
            options = dict(ranks=1 + engines, broken=slow_engines)
            more = (*flags, f"--rollout_ranks={engines}", "--checkpoint_every=2")
            runs.append(self.run(f"side by side, {engines} slow engines", *more, **options))
            folder = self.folder / f"killed_{self.count}"
            self.survive(folder, kills, random.Random(time.time_ns()), *more, **options)
            runs.append(folder)
        return in_turn, [*runs, self.run("a replay", *flags, *replay_of(in_turn))]

    def L9(self):
        base, runs = self.apart(LAG)
        late = self.run("weights as they come", *LAG, "--max_steps=6", ranks=0, fails=True, broken=weights_as_they_come)
        varied = "lag=2: overlapped or in turn, 1 and 2 slow engines, kills, replay"
        yield self.row(varied, runs, "weights as they come", late and "log-probs differ" in late, base)

    def L10(self):
        agent = taught_by(self.run("supervised steps on dialogues", *AGENT, *DIALOGUES, ranks=0))
        base, runs = self.apart(agent)
        arrival = self.run("seeds by arrival", *agent, "--max_steps=2", ranks=0, broken=seeds_by_arrival)
        clock = (*agent, "--agent=tests/slow_agent.py:ask_the_clock")
        named = self.run("a tool with a clock", *clock, ranks=0, fails=True)
        caught = self.differs(base, arrival) and named and "add gave" in named
        varied = "an agent with a slow tool: 1 and 2 engines, kills, replay"
        yield self.row(varied, runs, "seeds by arrival; a tool with a clock", caught, base)

    def L11(self):
        base, runs = self.apart(SEGMENTS)
        cut = self.run("segments cut by time", *SEGMENTS, "--max_steps=4", ranks=0, broken=segments_by_time)
        varied = "segments with lag=1: overlapped or in turn, 1 and 2 slow engines, kills, replay"
        yield self.row(varied, runs, "segments cut by time", self.differs(base, cut), base)

    def L12(self):
        if torch.cuda.is_available():
            return
        generic = dict(ATEN_CPU_CAPABILITY="default", NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")
        old = self.run("on any x86-64 CPU's instructions", env=generic)
        theirs = ("--batch_invariant=False", "--strict=False", "--max_steps=2")
        a, b = (self.run("the libraries' own operators", *theirs, env=env) for env in ({}, generic))
        varied = "instructions of this CPU and of any x86-64"
        yield self.row(varied, [old], "the libraries' own operators", self.differs(a, b))

    def L13(self):
        if self.most < 3:
            return
        base, over = self.run("sums of four parts", *SPLIT, ranks=0), (*SPLIT, "--rollout_tp=2", "--rollout_ranks=2")
        runs = [self.run("an engine over two ranks", *over, ranks=3)]
        if self.most > 4:
            runs.append(self.run("two of them", *over, "--rollout_ranks=4", ranks=5))
        usual = self.run("a plain all-reduce", *over, "--max_steps=2", ranks=3, fails=True, broken=plain_all_reduce)
        caught = usual and "log-probs differ" in usual
        yield self.row(f"an engine over 2 ranks, {len(runs)} of them", runs, "a plain all-reduce", caught, base)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    laws = [name for name in vars(Proof) if name[0] == "L"]
    parser.add_argument("laws", nargs="*", choices=[[], *laws], default=[], metavar="L1 .. L13")
    parser.add_argument("--kills", type=int, default=6)
    args = parser.parse_args()
    folder, started = Path(tempfile.mkdtemp(prefix="prove")), time.monotonic()
    rows = []
    try:
        proof = Proof(folder, args.kills)
        for law in args.laws or laws:
            rows += [(law, *row) for row in getattr(proof, law)()]
    finally:
        shutil.rmtree(folder)
    heads = ("law", "varied", "steps", "bits equal", "negative control", "caught")
    text = [heads] + [tuple({True: "yes", False: "NO"}.get(x, str(x)) for x in row) for row in rows]
    widths = [max(len(row[i]) for row in text) for i in range(len(heads))]
    for i, row in enumerate(text):
        print("| " + " | ".join(x.ljust(w) for x, w in zip(row, widths)) + " |")
        if i == 0:
            print("|" + "|".join("-" * (w + 2) for w in widths) + "|")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    print(f"{device}, torch {torch.__version__}, {proof.count} runs, {time.monotonic() - started:.0f} s")
    sys.exit(not all(equal and caught for _, _, _, equal, _, caught in rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--broken"]:
        globals()[sys.argv[2]]()
        sys.argv = ["train_grpo.py", *sys.argv[3:]]
        runpy.run_path("train_grpo.py", run_name="__main__")
    else:
        main()
