"""
All laws, proven with whole runs of the real engine: what was varied, whether all bits are equal, and whether the
negative control, a run with one thing wrong, was caught.

    python tools/prove.py                  # about 10 minutes on two CPU cores; on a machine with GPUs, on them
    python tools/prove.py L3 L6 --kills=20

Every run is compared by its ledger: a hash per step of prompts, tokens, log-probs, rewards, advantages, and of each
parameter's gradient, value and optimizer state. Exit status 0: all laws hold and all controls were caught.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import sync  # noqa: E402

# small, and yet it learns: a warm-up that leaves about half of the samples wrong, then 24 steps of RL
SMALL = """
arithmetic_size = 10
max_prompt_tokens = 8
max_new_tokens = 6
eval_size = 20
threads = 1
warmup_sft_steps = 60
sft_learning_rate = 2e-3
sft_batch = 32
prompts_per_step = 8
group_size = 8
leaf_tokens = 128
lanes = 4
max_steps = 24
learning_rate = 2e-4
checkpoint_every = 8
scratch_layers = 2
scratch_hidden = 64
scratch_mlp = 128
"""
# the three ways to break a promise that no flag offers: run in place of train_grpo.py
BREAK = {
    "sums as they come": """
        class RunningSum(sync.LeafSum):
            def add(self, grads):
                self.total = [a + b for a, b in zip(self.total, grads)] if self.total else grads
        sync.LeafSum = RunningSum""",
    "seeds by engine": """
        seed = rollout_server.sampling_seed
        rollout_server.sampling_seed = lambda *key: seed(*key, os.environ["RANK"])""",
    "a bit flipped on the way": """
        cut = sync.whole
        def whole(shard, mesh):
            out = cut(shard, mesh)
            if shard.name == "model.layers.1.mlp.up_proj.weight":
                out.view(torch.uint8).view(-1)[1000] ^= 1
            return out
        sync.whole = whole""",
}


# ---- runs


def command_of(folder, *flags, ranks=0, broken="", restarts=0):
    """The command of a run of the small config with out_dir=folder, under torchrun if ranks."""
    config, script = folder.parent / f"{folder.name}.py", "train_grpo.py"
    config.write_text(SMALL)
    if broken:
        script = folder.parent / f"{folder.name}_broken.py"
        lines = ["import os, runpy, sys, torch", f"sys.path.insert(0, {str(ROOT)!r})", "import rollout_server, sync"]
        lines += [x[8:] for x in BREAK[broken].splitlines()[1:]]
        script.write_text("\n".join([*lines, f"runpy.run_path({str(ROOT / 'train_grpo.py')!r}, run_name='__main__')"]))
    torchrun = [
        "-m",
        "torch.distributed.run",
        f"--nproc_per_node={ranks}",
        f"--max-restarts={restarts}",
        "--standalone",
    ]
    return [sys.executable, *(torchrun if ranks else []), str(script), str(config), f"--out_dir={folder}", *flags]


def launch(folder, *flags, timeout=240, env=None, **options):
    """Runs it to its end: (status, output)."""
    both = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | (env or {}))
    done = subprocess.run(command_of(folder, *flags, **options), cwd=ROOT, timeout=timeout, **both)
    return done.returncode, done.stdout


def lines(folder, file, phase=None):
    out = [json.loads(line) for line in (folder / file).read_text().splitlines()]
    return [line for line in out if phase in (None, line["phase"])]


def processes_of(folder):
    """{id: command line} of living processes that name the folder or have a file in it open, as the engine its log."""
    out = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            files = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        if any(str(folder) in x for x in (command, *files)):
            out[int(pid)] = command
    return out


# ---- what happens to a run


def is_rank(command):
    return "train_grpo.py" in command and "torch.distributed.run" not in command


def run_with_kills(folder, kills, rng, *flags, say=lambda _: None, **options):
    """
    A run under torchrun --max-restarts, whose processes (ranks and SGLang schedulers) get up to `kills` SIGKILLs at
    moments drawn from `rng`, half of them while it starts, half in its steps: (status, output, [what was killed]).
    """
    command, victims = command_of(folder, *flags, **({"ranks": 2} | options), restarts=kills), []
    done = folder / "metrics.jsonl"
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
                    sleep_until(lambda: schedulers() and time.time() - done.stat().st_mtime < 0.3, 120)
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


def interrupt(run, folder):
    """A copy of a finished run as it would be had it been killed after its 22nd step: its last checkpoint is 16."""
    shutil.copytree(run, folder)
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

    def row(self, varied, folders, control, caught):
        base, equal = self.ledger(self.base), True
        for folder in folders:
            mine = self.ledger(folder)
            equal &= mine == base[: len(mine)]
        steps = min(len(lines(f, "ledger.jsonl", "rl")) for f in folders)
        return varied, steps, equal, control, bool(caught)

    def differs(self, a, b):
        a, b = self.ledger(a), self.ledger(b)
        return any(x != y for x, y in zip(a, b))

    def queue(self):
        return "--mode=replay", f"--queue_dir={self.base / 'queue'}"

    def L1(self):
        again, other = self.run("a second run"), self.run("another seed", "--seed=2", "--max_steps=2")
        yield self.row("two runs", [again], "another seed", self.differs(self.base, other))

    def L2(self):
        steps = lines(self.base, "metrics.jsonl", "rl")
        learned = all(s["grad_norm"] > 1e-3 and s["reward_std"] > 0 for s in steps)
        equal = learned and all(s["logprob_mismatch_tokens"] == 0 for s in steps)
        caught = self.run("the libraries' own operators", "--batch_invariant=False", "--max_steps=3", fails=True)
        yield (
            "log-prob of every token",
            len(steps),
            equal,
            "batch_invariant=False",
            caught and "log-probs differ" in caught,
        )

    def L3(self):
        counts = [n for n in (1, 2, 4) if n <= self.most]
        runs = [self.run(f"{n} trainers", *self.queue(), ranks=n) for n in counts]
        broken = dict(broken="sums as they come")
        flags = (*self.queue(), "--strict=False", "--max_steps=4")
        plain = [self.run(f"sums as they come, {n} trainers", *flags, ranks=n, **broken) for n in counts[:2]]
        caught = self.differs(*plain) if len(plain) == 2 else None
        yield self.row(f"{counts} trainers", runs, "gradients added as they come", caught)

    def L4(self):
        if self.most < 3:
            return
        flags = ("--rollout_ranks=2", "--max_steps=8")
        two = self.run("two engines", *flags, ranks=3)
        seeded = self.run("seeds by engine", *flags, ranks=3, broken="seeds by engine")
        yield self.row(
            "2 engines, claims by who is free", [two], "seeds by engine rank", self.differs(self.base, seeded)
        )

    def L5(self):
        free = (
            "--radix_cache=False --engine_max_running=17 --engine_prefill_chunk=32 --gradient_checkpointing --threads=1"
        )
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
            options = dict(ranks=self.ranks, say=self.say)
            while len(killed) < self.kills:  # a run may be done before it was killed often enough
                runs.append(self.folder / f"killed{len(runs)}")
                left = self.kills - len(killed)
                status, output, victims = run_with_kills(runs[-1], left, rng, "--checkpoint_every=2", **options)
                if status:
                    sys.exit(f"after {len(victims)} kills: status {status}\n{output[-3000:]}")
                killed += victims
            counts = " and ".join(f"{killed.count(v)} of a {v}" for v in sorted(set(killed)))
            varied += f"; {len(killed)} SIGKILLs ({counts}) in {len(runs) - 1} runs"
        yield self.row(varied, runs, "a resume without the optimizer", caught)

    def L7(self):
        replay = self.run("a replay", *self.queue(), ranks=0)
        shutil.copytree(self.base / "queue", self.folder / "flipped")
        flip_token(self.folder / "flipped")
        flags = ("--mode=replay", f"--queue_dir={self.folder / 'flipped'}")
        caught = self.run("a replay of a changed token", *flags, ranks=0, fails=True)
        yield self.row("replay without an engine", [replay], "one changed token", caught and "step 3," in caught)

    def L8(self):
        runs = [
            self.run("weights by disk", "--weight_sync=disk", "--max_steps=8"),
            self.run("weights by ipc", "--weight_sync=ipc", "--max_steps=8", ranks=0),
        ]
        broken = dict(broken="a bit flipped on the way")
        caught = self.run("a bit flipped on the way", "--max_steps=1", fails=True, **broken)
        caught = caught and "up_proj.weight" in caught
        yield self.row("weights by broadcast, disk, ipc", runs, "a bit flipped on the way", caught)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    laws = [name for name in vars(Proof) if name[0] == "L"]
    parser.add_argument("laws", nargs="*", choices=[[], *laws], default=[], metavar="L1 .. L8")
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
    main()
