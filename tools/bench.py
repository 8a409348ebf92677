"""
Sampled tokens per second in steady state, of rollout and training together.

    python tools/bench.py                                    # 64 samples of 32 tokens, 0.8 M parameters, one process;
                                                             # on a GPU 256 of 256 tokens, 250 M parameters
    python tools/bench.py --ranks=2 --new_tokens=128
    python tools/bench.py --onoff                            # with and without our operators, twice each
    python tools/bench.py --beside=--lora_rank=16            # with these flags and without, twice each
    python tools/bench.py --operators                        # on a GPU: each operator against the library's
    python tools/bench.py --peer                             # on a CPU: beside TRL; --peer=all: at more settings
    python tools/bench.py --peer --ranks=2 --lag=1 --lanes=1 # training and sampling side by side
    python tools/bench.py --agent                            # a turn through agents/chat.py beside a plain sample; and
                                                             # 64 dialogues whose tools sleep
    python tools/bench.py --sandbox                          # 1,000 programs, beside bare Python

Runs train_grpo.py for some steps with samples of a fixed length and takes the median over the steps after the first
four, which warm up. `--operators` times one operator after the other at the shapes of Qwen3 instead: random numbers,
several sets of inputs where one would fit the cache, CUDA graphs, ours and the library's in turn, medians. Beside each
time is the roof, the larger of bytes / copy rate and operations / matmul rate, both rates measured in the same run.

`--peer` runs our trainer and TRL's GRPOTrainer in turn, twice each: the same model folder, prompts, reward, threads,
and samples per optimizer step. uv makes TRL an environment of its own, with the torch and the transformers that we run
on, and needs a registry the first time. TRL is set to what is fast on a CPU and does our work (`trl_side`): one batch
of all samples, float32, no gradient checkpointing, SDPA, generation by transformers with its KV cache, min_new_tokens =
max_new_tokens where we ignore the EOS, one update per batch, no KL, fused AdamW with our betas and rate, no saving, no
logging. TRL's step is the time between two calls of on_step_end, its rollout the part before the reward is called. The
roof is of arithmetic alone, at the rate of a float32 torch.mm: 2 operations per matrix element for each sampled token,
6 for each trained token, a prompt's among them, and the causal attention of both.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # where gpu_bits.py is, for its shapes and how it compares
# shapes of --operators
TOKENS = 8192  # of a training leaf
HEAD_TOKENS = 4096  # of a leaf for the head, whose library alternative holds the logits several times
DECODE = 16, 64, 512  # rows of a decode step's matmuls
PACKS = (8, 1024), (2, 4096)  # sequences, tokens each
CACHES = (16, 2048), (128, 2048)  # decoded sequences, keys each
# of the end-to-end runs on a GPU: config/one_gpu.py's model, whose head dim the kernels know
GPU_SIZE = [
    "--scratch_layers=16", "--scratch_hidden=1024", "--scratch_heads=16", "--scratch_kv_heads=8",
    "--scratch_head_dim=128", "--scratch_mlp=3072", "--prompts_per_step=32", "--engine_memory=0.3",
]  # fmt: skip
# of --peer
TRL = "trl==1.16.0"
PROMPTS, GROUP = 8, 8  # measure()'s own
PEER_MODELS = {  # as make_scratch_model wants them; the first has the default sizes
    "0.8 M": dict(layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, mlp=384),
    "8 M": dict(layers=8, hidden=256, heads=8, kv_heads=4, head_dim=32, mlp=1024),
}
PEER_SETTINGS = {"default": [("0.8 M", 32), ("0.8 M", 128)]}  # model, sampled tokens
PEER_SETTINGS["all"] = PEER_SETTINGS["default"] + [("0.8 M", 512), ("8 M", 128)]


# ---- end to end


def measure(args, *more):
    """The metrics of a run's steps after the first four."""
    import torch

    on_gpu = torch.cuda.is_available()
    args.new_tokens = args.new_tokens or (256 if on_gpu else 32)
    size = GPU_SIZE if on_gpu else ["--prompts_per_step=8"]
    folder = Path(tempfile.mkdtemp(prefix="bench"))
    torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={args.ranks}", "--standalone"]
    command = [
        sys.executable, *(torchrun if args.ranks > 1 else []), "train_grpo.py", f"--out_dir={folder / 'run'}",
        f"--max_steps={args.steps}", f"--max_new_tokens={args.new_tokens}", "--max_prompt_tokens=16", "--eval_size=0",
        "--group_size=8", f"--lanes={4 if args.ranks > 1 else 1}", "--ignore_eos", f"--threads={args.threads}",
        *size, *args.flags, *more,
    ]  # fmt: skip
    # rewards that differ, so that no gradient is zero and nothing is skipped
    (folder / "reward.py").write_text("def length(prompt, response, answer):\n    return float(len(set(response)))\n")
    command.append(f"--reward={folder / 'reward.py'}:length")
    try:
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()][4:]
    finally:
        shutil.rmtree(folder)


def end_to_end(args):
    steps = measure(args)

    def median(key):
        return statistics.median(step[key] for step in steps)

    tokens = statistics.median(step["tokens_per_second"] * step["step_seconds"] for step in steps)
    print(f"{platform.machine()}, {platform.python_version()}, {len(steps)} steps, median of {tokens:.0f} tokens each")
    for key in ("wait_seconds", "rollout_seconds", "train_seconds", "sync_seconds", "step_seconds"):
        print(f"  {key:16s} {median(key):.3f}")
    print(f"  tokens_per_second {median('tokens_per_second'):.0f} (of rollout and training together)")


def in_turn(args, kinds):
    """Runs of two kinds {name: flags}, each twice: the difference of two runs of one kind is noise."""
    from gpu_bits import machine

    components = dict(rollout="rollout_seconds", trainer="train_seconds", weights="sync_seconds", step="step_seconds")
    rates = {name: {kind: [] for kind in kinds} for name in components}  # tokens per second of each run
    for kind in [*kinds] * 2:
        steps = measure(args, *kinds[kind])
        for name, key in components.items():
            seconds = [(x["tokens_per_second"] * x["step_seconds"], x[key]) for x in steps]
            rates[name][kind].append(statistics.median(tokens / max(s, 1e-9) for tokens, s in seconds))
    first, second = kinds
    print(f"| tokens per second of | {first}, each run | {second}, each run | {first} / {second} |\n|---|---|---|---|")
    for name, runs in rates.items():
        each = (", ".join(f"{x:.0f}" for x in runs[kind]) for kind in kinds)
        ratio = statistics.median(runs[first]) / statistics.median(runs[second])
        print(f"| {name} | {' | '.join(each)} | {ratio:.3f} |")
    print(f"\n{platform.machine()}, {args.steps - 4} steps a run, {machine()}")


# ---- agents

# An agent of one turn, as a plain sample has, and one of four turns between which a tool sleeps.
AGENTS = """
import os, time

async def one_turn(chat, row):
    chat.user(row["prompt"])
    return float(len(set((await chat.generate()).text)))

async def asks(chat, row, begun):
    reply = await chat.generate(stop=list("abcd"))
    with open(os.environ["TIMES"], "a") as file:
        file.write(f"{chat.episode.where.split(',')[0]}, {begun}, {time.time()}, {len(reply.tokens)}\\n")
    return reply

async def naps(chat, row):
    for _ in range(4):
        chat.user("?")
        if (await asks(chat, row, time.time())).truncated:
            break
        await chat.do(time.sleep, chat.random.random() * float(os.environ["NAP"]))
    return float(len(chat.ids))
"""


def spans(intervals):
    """(the time that lies in at least one of the intervals, the time from the first begin to the last end)."""
    inside, end = 0.0, 0.0
    for a, b in sorted(intervals):
        inside, end = inside + max(0.0, b - max(a, end)), max(end, b)
    return inside, end - min(a for a, _ in intervals)


def agents(args):
    """Plain samples and the same through a Chat, in turn, three times each; then, twice, what sleeping tools cost."""
    folder = Path(tempfile.mkdtemp(prefix="bench"))
    (folder / "agents.py").write_text(AGENTS)
    path, rates = folder / "agents.py", {"a plain sample": [], "through a Chat": []}
    for name in (*rates, *rates, *rates):
        chat = (f"--agent={path}:one_turn",) if name == "through a Chat" else ("--prompt_template={prompt}   ",)
        steps = measure(args, *chat)  # the blanks: as many tokens as the roles of the dialogue have
        rates[name].append([statistics.median(x[key] for x in steps) for key in ("rollout_seconds", "step_seconds")])
    print("| one turn | rollout, ms, each run | step, ms, each run |\n|---|---|---|")
    for name, runs in rates.items():
        print(f"| {name} | {' | '.join(', '.join(f'{1000 * x:.0f}' for x in column) for column in zip(*runs))} |")
    print("\n| naps up to | rollout, s | somebody asks, s | all nap, s | tokens/s while asked |\n|---|---|---|---|---|")
    for nap in (0, 0.2, 0, 0.2):
        os.environ |= dict(TIMES=str(folder / f"times{time.time()}"), NAP=str(nap))
        measure(args, f"--agent={path}:naps", "--max_new_tokens=400", "--ignore_eos=False", "--checkpoint_every=0")
        lines = [line.split(", ") for line in Path(os.environ["TIMES"]).read_text().splitlines()]
        found = []
        for step in range(4, args.steps):
            mine = [(float(a), float(b), int(n)) for where, a, b, n in lines if where == f"rl step {step}"]
            asked, whole = spans([(a, b) for a, b, _ in mine])
            found.append((whole, asked, whole - asked, sum(n for *_, n in mine) / asked))
        whole, asked, idle, rate = map(statistics.median, zip(*found))
        print(f"| {1000 * nap:.0f} ms | {whole:.2f} | {asked:.2f} | {idle:.3f} | {rate:.0f} |")
    shutil.rmtree(folder)


# ---- beside TRL, on a CPU


def sandbox():
    """1,000 programs in the sandbox and with bare Python, from 64 threads, one program per core at a time."""
    sys.path.insert(0, str(ROOT))
    from gpu_bits import machine

    from agents.sandbox import RUNNING, interpreter, run_program
    from rewards import load_reward
    from train_grpo import DEFAULTS

    load_reward("code", DEFAULTS)
    python = interpreter("bwrap")
    begun = time.process_time()
    exec("for i in range(1000000): pass", {})  # a loop of the size that takes 10 ms here
    loop = f"for i in range({int(1e6 * 0.01 / (time.process_time() - begun))}): pass\nprint(1)"

    def plain(program, *options):
        with RUNNING:
            assert subprocess.run([python, *options, "-c", program], capture_output=True, env={}).stdout == b"1\n"

    def lean(program):
        plain(program, "-I", "-S")  # as in the sandbox

    def boxed(program):
        assert run_program(program).output == "1\n"

    for work, program in {"nothing": "print(1)", "10 ms": loop}.items():
        seconds = {plain: 0, lean: 0, boxed: 0}
        for run in [*seconds] * 5:  # in turn, as the machine's speed drifts
            with ThreadPoolExecutor(64) as pool:
                began = time.perf_counter()
                list(pool.map(run, [program] * 200))
                seconds[run] += time.perf_counter() - began
        bare, own, other = seconds.values()  # of 1,000 programs, and so ms of one
        print(
            f"{work}: python3 {bare:.1f} ms, python3 -I -S {own:.1f} ms, in the sandbox {other:.1f} ms a program: ",
            end="",
        )
        print(f"{other / bare:.2f} and {other / own:.2f} times as long; {machine()}")


def trl_side(folder):
    """In TRL's environment: trains as task.json says; times.json gets each step's seconds of (rollout, training)."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    task = json.loads((folder / "task.json").read_text())
    torch.set_num_threads(task["threads"])
    ends, scored = [], []  # when the run began and each step ended; when each step's samples were there

    def different_characters(completions, completion_ids, **_):
        scored.append(time.monotonic())
        lengths = {len(ids) for ids in completion_ids}
        assert lengths == {task["new_tokens"]}, f"samples of {lengths} tokens"  # or the rate would be of fewer tokens
        return [float(len(set(text))) for text in completions]

    class Clock(TrainerCallback):
        def on_train_begin(self, *_, **__):
            ends.append(time.monotonic())

        def on_step_end(self, *_, **__):
            ends.append(time.monotonic())

    config = GRPOConfig(
        output_dir=str(folder / "trl"), max_steps=task["steps"], use_cpu=True, bf16=False, seed=1,
        model_init_kwargs=dict(dtype="float32", attn_implementation="sdpa"),
        per_device_train_batch_size=PROMPTS * GROUP, gradient_accumulation_steps=1, num_generations=GROUP,
        gradient_checkpointing=False, dataloader_pin_memory=False, temperature=1.0,
        max_completion_length=task["new_tokens"],
        generation_kwargs=dict(min_new_tokens=task["new_tokens"], use_cache=True),
        beta=0.0, num_iterations=1,  # so neither a reference's log-probs nor the old ones are computed
        optim="adamw_torch_fused", adam_beta1=0.9, adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0,
        learning_rate=1e-6, lr_scheduler_type="constant",
        save_strategy="no", eval_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": prompt} for prompt in task["prompts"]])
    GRPOTrainer(str(folder / "model"), different_characters, config, data, callbacks=[Clock()]).train()
    times = [(middle - begin, end - middle) for begin, middle, end in zip(ends, scored, ends[1:])]
    (folder / "times.json").write_text(json.dumps(times))


def trl_python():
    """The command that is Python in TRL's environment. Ends the run in one line if there can be none."""
    from configurator import library_versions

    if not shutil.which("uv"):
        refuse("no uv, which makes TRL's environment: pip install uv")
    # The libraries below TRL are ours: what differs is then the trainers.
    packages = [TRL, *(f"{name}=={library_versions()[name]}" for name in ("torch", "transformers"))]
    command = ["uv", "run", "--isolated", "--no-project", f"--python={sys.executable}"]
    command += [*(f"--with={package}" for package in packages), "python"]
    # away from here, where our project's settings for uv are
    tried = subprocess.run([*command, "-c", "import trl"], capture_output=True, text=True, cwd=tempfile.gettempdir())
    if tried.returncode:
        refuse(f"no {' '.join(packages)}: {' '.join(tried.stderr.split())[-300:]}")
    return command


def refuse(reason):
    print(f"--peer: {reason}", file=sys.stderr)
    sys.exit(2)


def matmul_rate(threads):
    """Float32 operations per second of torch.mm; the best of many, since what else runs on the machine slows it."""
    import torch

    torch.set_num_threads(threads)
    a, b, times = torch.randn(1024, 1024), torch.randn(1024, 1024), []
    for _ in range(50):
        begin = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - begin)
    return 2 * 1024**3 / min(times)


def operations_of_step(size, vocabulary, prompt, new_tokens):
    """Operations to sample and train all samples of a step, whose prompts have `prompt` tokens in the mean."""
    m = argparse.Namespace(**size)
    layer = m.hidden * m.head_dim * 2 * (m.heads + m.kv_heads) + 3 * m.hidden * m.mlp
    matrices = m.layers * layer + vocabulary * m.hidden  # the last is the head; the embedding only looks up
    length = prompt + new_tokens
    # Scores and sums take 4 operations per head, dim and earlier token, of which there are length / 2 in the mean.
    attention = m.layers * 2 * length**2 * m.heads * m.head_dim
    return PROMPTS * GROUP * (matrices * (2 * new_tokens + 6 * length) + (1 + 3) * attention)


def peer(args):
    import torch

    if torch.cuda.is_available():
        refuse("it compares on a CPU: hide the GPUs with CUDA_VISIBLE_DEVICES=")
    sys.path.insert(0, str(ROOT))
    from configurator import commit, library_versions
    from models import folders
    from rewards import arithmetic

    threads = args.threads or os.cpu_count()
    python, rate = trl_python(), matmul_rate(threads)
    prompts, samples = [row["prompt"] for row in arithmetic()], PROMPTS * GROUP
    print("| model | samples x tokens | ours, runs | TRL, runs | ours / TRL | fastest steps | roof | ours | TRL |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    splits = []
    for name, new_tokens in PEER_SETTINGS[args.peer]:
        args.new_tokens, size = new_tokens, PEER_MODELS[name]
        folder = Path(tempfile.mkdtemp(prefix="bench"))
        try:
            scratch = dict(seed=1, agent="") | {f"scratch_{key}": x for key, x in size.items()}
            folders.make_scratch_model(folder / "model", scratch)
            task = dict(prompts=prompts, new_tokens=new_tokens, steps=args.steps, threads=threads)
            (folder / "task.json").write_text(json.dumps(task))
            ours, theirs = [], []  # per run the seconds of each step, by what they went into
            for _ in range(2):
                steps = measure(args, f"--init_from={folder / 'model'}")
                ours.append([phases(step) for step in steps])
                command = [*python, str(Path(__file__).resolve()), f"--trl_side={folder}"]
                offline = os.environ | {"HF_HUB_OFFLINE": "1"}  # all it needs is in the folder
                subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=offline)
                times = json.loads((folder / "times.json").read_text())[4:]
                theirs.append([{"rollout": rollout, "training": training} for rollout, training in times])
            vocabulary = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
        finally:
            shutil.rmtree(folder)
        rates, fastest = [], []
        for side, runs in (("ours", ours), ("TRL", theirs)):
            rates.append([samples * new_tokens / statistics.median(sum(x.values()) for x in run) for run in runs])
            steps = [x for run in runs for x in run]
            fastest.append(min(sum(x.values()) for x in steps))
            parts = ", ".join(f"{key} {statistics.median(x[key] for x in steps):.3f}" for key in steps[0])
            splits.append(f"{name}, {samples} x {new_tokens}, {side}: {parts}")
        prompt = sum(map(len, prompts)) / len(prompts)  # a token is a character
        roof = samples * new_tokens * rate / operations_of_step(size, vocabulary, prompt, new_tokens)
        mine, other = (statistics.median(x) for x in rates)
        each = (", ".join(f"{x:.0f}" for x in x) for x in rates)
        ratios = f"{mine / other:.2f} | {fastest[1] / fastest[0]:.2f}"
        shares = f"{roof:.0f} | {mine / roof:.0%} | {other / roof:.0%}"
        print(f"| {name} | {samples} x {new_tokens} | {' | '.join(each)} | {ratios} | {shares} |", flush=True)
    print("\nSampled tokens per second of rollout and training together: medians, their ratio and that of the fastest")
    print("steps, which other load on the machine changes less, the roof and the shares of it.")
    print("Seconds of a step, medians:\n")
    print("\n".join(f"- {line}" for line in splits))
    cpu = "a CPU"
    with contextlib.suppress(OSError, StopIteration):  # not on Linux
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    numbers = ", ".join(f"{name} {number}" for name, number in library_versions().items())
    print(f"\n{cpu}, {os.cpu_count()} cores, {threads} threads, float32 torch.mm of 1024^3 {rate / 1e9:.0f} GFLOP/s")
    print(f"{args.steps - 4} steps a run, {TRL.replace('==', ' ')}, {numbers}, Python {platform.python_version()}")
    print(f"{time.strftime('%Y-%m-%d')}, commit {commit()}: python {shlex.join(sys.argv)}")


def phases(step):
    """Where the seconds of a step of ours went, from its metrics; they add up to the step's."""
    rollout, wait, train, sync = (step[f"{key}_seconds"] for key in ("rollout", "wait", "train", "sync"))
    sampling = {"rollout": rollout, "queue": wait - rollout}
    if wait < rollout:  # side by side with the training, --lag=1 --ranks=2
        sampling = {"waiting": wait}
    parts = {**sampling, "training": train, "weight sync": sync}
    return parts | {"record": step["step_seconds"] - wait - train - sync}


# ---- one operator at a time, on a GPU


def library_attention(q, k, v, scale, causal):
    """{backend: SDPA} of those that take the shape; q, k, v (B, heads, n, D)."""
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    found = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):

        def call(backend=backend):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)

        try:
            call()
            found["SDPA " + backend.name.split("_")[0].lower()] = call
        except RuntimeError:  # this backend does not take it
            pass
    return found


def cases(model):
    """
    (operator, shape, bytes, operations, make, bits) of a model's operators. make() -> {name: call} on fresh inputs;
    bits() -> (ours of few rows, those rows of ours of many). Bytes: each input and output once. The functions are of
    use until the next one is asked for.
    """
    import torch
    import torch.nn.functional as F
    from gpu_bits import DEVICE, MODELS, VOCABULARY, linears, random

    import kernels

    hidden, heads, kv_heads, mlp = MODELS[model]
    D, R, some = 128, TOKENS, slice(3, 8)

    def backward(forward, inputs, name, alternative):
        """make() of a backward pass: the forward ran before, its graph is kept."""

        def call(f):
            xs = [x.detach().requires_grad_() for x in inputs]
            out = f(*xs)
            grads = [torch.randn_like(x) for x in (out if isinstance(out, tuple) else (out,))]
            return lambda: torch.autograd.grad(out, xs, grads, retain_graph=True)

        return {"ours": call(forward), name: call(alternative)}

    def both(name, shape, size, passes, f, library, alternative, inputs, operations=0):
        """Forward and backward of an operator on rows; passes: tensors of the shape read and written by each."""

        def make():
            xs = inputs()
            return {"ours": lambda: f(*xs), library: lambda: alternative(*xs)}

        def bits(back=False):
            # the rows' own inputs come first; the others, such as a norm's weight, have one dim
            def run(pick):
                torch.manual_seed(1)
                xs = [(x[pick] if x.dim() > 1 else x).detach().requires_grad_(back) for x in inputs()]
                out = f(*xs)
                out = out if isinstance(out, tuple) else (out,)
                if not back:
                    return out
                grads = [((i + 1.0) * x.detach() + 0.5) for i, x in enumerate(out)]
                return [g for g in torch.autograd.grad(out, xs, grads) if g.dim() > 1]

            few, many = run(some), run(slice(None))
            return few, [x[some] for x in many]

        yield name, shape, passes[0] * size * 2, operations, make, bits
        again = lambda: backward(f, inputs(), library, alternative)  # noqa: E731
        yield name + " backward", shape, passes[1] * size * 2, operations * 2, again, lambda: bits(True)

    shapes = linears(model) | {"head": (VOCABULARY, hidden)}
    for name, (N, K) in shapes.items():
        layouts = [("NT", M) for M in (*DECODE, R)] + [("NN", R), ("TN", R)]
        for layout, M in layouts[: len(DECODE) if name == "head" else None]:
            # y = x w^T, dx = dy w, dw = dy^T x: (rows, columns, sum over) of the product
            rows, columns, K_ = {"NT": (M, N, K), "NN": (M, K, N), "TN": (N, K, M)}[layout]
            dtype = torch.float32 if name == "head" else None  # None: that of the operands

            def operands():
                a = random(rows, K_) if layout[0] == "N" else random(K_, rows).t()
                return a, random(K_, columns) if layout[1] == "N" else random(columns, K_).t()

            def make():
                a, b = operands()
                call = lambda: kernels.matmul(a, b, out_dtype=dtype)  # noqa: E731
                return {"ours": call, "torch.mm": lambda: torch.mm(a, b).to(dtype or a.dtype)}

            def bits():
                a, b = operands()
                few, many = (kernels.matmul(x, b, out_dtype=torch.float32) for x in (a[some], a))
                return [few], [many[some]]

            size = 2 * (rows * K_ + K_ * columns) + (4 if dtype else 2) * rows * columns
            yield f"matmul {layout}", f"{name} {rows}x{columns}x{K_}", size, 2 * rows * columns * K_, make, bits
    weight = random(hidden)

    def norm(x, w):
        return F.rms_norm(x, w.shape, w, 1e-6)

    yield from both(
        "rms_norm", f"{R}x{hidden}", R * hidden, (2, 3), lambda x, w: kernels.rms_norm(x, w, 1e-6),
        "F.rms_norm", norm, lambda: (random(R, hidden), weight),
    )  # fmt: skip

    def sum_and_norm(x, residual, w):
        s = x + residual
        return norm(s, w), s

    yield from both(
        "rms_norm + residual", f"{R}x{hidden}", R * hidden, (4, 4), lambda x, r, w: kernels.rms_norm(x, w, 1e-6, r),
        "x + r, F.rms_norm", sum_and_norm, lambda: (random(R, hidden), random(R, hidden), weight),
    )  # fmt: skip
    yield from both(
        "swiglu", f"{R}x{mlp}", R * mlp, (3, 5), kernels.swiglu,
        "F.silu(g) * u", lambda g, u: F.silu(g) * u, lambda: (random(R, mlp), random(R, mlp)),
    )  # fmt: skip
    cos, sin = kernels.rope_table(1e6 ** -(torch.arange(0, D, 2, device=DEVICE) / D), torch.arange(R, device=DEVICE))

    def norm_rope(q, k, *weights):  # the same positions for few rows as for many
        at = some if len(q) == 5 else slice(None)
        return kernels.norm_rope(q, k, cos[at], sin[at], *weights, 1e-6)

    def norm_and_turn(q, k, *weights, c=cos.repeat(1, 2).bfloat16()[:, None], s=sin.repeat(1, 2).bfloat16()[:, None]):
        normed = (norm(x, w) for x, w in zip((q, k), weights))
        return tuple(x * c + torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1) * s for x in normed)

    size = R * (heads + kv_heads) * D
    shape = f"{R} x ({heads} + {kv_heads}) x {D}"
    inputs = lambda: (random(R, heads, D), random(R, kv_heads, D), random(D), random(D))  # noqa: E731
    yield from both("norm_rope", shape, size, (2, 3), norm_rope, "F.rms_norm, RoPE", norm_and_turn, inputs)

    M, w = HEAD_TOKENS, random(VOCABULARY, hidden) / hidden**0.5
    targets = torch.randint(VOCABULARY, (M,), device=DEVICE)

    def head(h, w):
        return kernels.token_logprobs(h, w, targets[some] if len(h) == 5 else targets)[0]

    def library_head(h, w):
        return torch.log_softmax((h @ w.t()).float(), -1).gather(1, targets[:, None])[:, 0]

    operations = 2 * M * VOCABULARY * hidden

    def make():
        h = random(M, hidden)
        return {"ours": lambda: head(h, w), "log_softmax(h w^T)": lambda: library_head(h, w)}

    def bits(back=False):
        h = random(M, hidden)
        found = []
        for x in (h[some], h):
            x = x.detach().requires_grad_(back)
            out = head(x, w)
            found.append(torch.autograd.grad(out, x, torch.ones_like(out))[0] if back else out)
        return [found[0]], [found[1][some]]

    def head_back():
        return backward(head, (random(M, hidden), w), "log_softmax(h w^T)", library_head)

    size = 2 * (M * hidden + VOCABULARY * hidden)
    yield "log-probs, eager", f"{M}x{VOCABULARY}x{hidden}", size, operations, make, bits
    shape = f"{M}x{VOCABULARY}x{hidden}"
    yield "log-probs backward, eager", shape, 2 * size, 2 * operations, head_back, lambda: bits(True)

    for B, n in PACKS:
        plan, alone = (kernels.packed_plan([n] * b, DEVICE) for b in (B, 1))

        def make(back=False):
            xs = [random(B * n, h, D) for h in (heads, kv_heads, kv_heads)]
            batched = [x.view(B, n, -1, D).transpose(1, 2).contiguous() for x in xs]
            if back:
                xs, batched = ([x.requires_grad_() for x in each] for each in (xs, batched))
            calls = {"ours": lambda: kernels.attention(*xs, plan, D**-0.5)}
            calls |= library_attention(*batched, D**-0.5, True)
            if not back:
                return calls

            def call(f, inputs):
                out = f()
                grad = torch.randn_like(out)
                return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)

            return {name: call(f, xs if name == "ours" else batched) for name, f in calls.items()}

        def bits(back=False):
            xs = [random(B * n, h, D) for h in (heads, kv_heads, kv_heads)]
            found = []
            for m, p in ((n, alone), (B * n, plan)):
                leaves = [x[-m:].detach().requires_grad_(back) for x in xs]
                out = kernels.attention(*leaves, p, D**-0.5)
                found.append(torch.autograd.grad(out, leaves, out.detach()) if back else [out])
            return found[0], [x[-n:] for x in found[1]]

        shape, operations = f"{B} x {n}, {heads}/{kv_heads} heads", 2 * B * n * n * heads * D  # half of 4 n^2, causal
        size = 2 * B * n * (2 * heads + 2 * kv_heads) * D
        yield "attention", shape, size, operations, make, bits
        yield "attention backward", shape, 2 * size, operations * 5 // 2, lambda: make(True), lambda: bits(True)
    for B, n in CACHES:
        table = torch.randperm(B * n, device=DEVICE).view(B, n).int()
        ones, requests = torch.ones(B, dtype=torch.long, device=DEVICE), torch.arange(B, device=DEVICE)
        plans = [kernels.paged_plan(ones[:b], ones[:b] * n, table, requests[-b:]) for b in (B, 5)]

        def make():
            q, k, v = random(B, heads, D), random(B * n, kv_heads, D), random(B * n, kv_heads, D)
            x, y, z = q[:, :, None], *(t.view(B, n, kv_heads, D).transpose(1, 2).contiguous() for t in (k, v))
            calls = {"ours": lambda: kernels.attention(q, k, v, plans[0], D**-0.5)}
            return calls | library_attention(x, y, z, D**-0.5, False)

        def bits():
            q, k, v = random(B, heads, D), random(B * n, kv_heads, D), random(B * n, kv_heads, D)
            few, many = (
                kernels.attention(q[-5:], k, v, plans[1], D**-0.5),
                kernels.attention(q, k, v, plans[0], D**-0.5),
            )
            return [few], [many[-5:]]

        size, operations = 4 * B * n * kv_heads * D, 4 * B * n * heads * D
        yield "attention decode", f"{B} x {n} keys, {heads}/{kv_heads} heads", size, operations, make, bits

    ids = torch.randint(VOCABULARY, (R,), device=DEVICE)

    def make():
        grad = random(R, hidden)
        args = ids, VOCABULARY, -1, False
        theirs = lambda: torch.ops.aten.embedding_dense_backward(grad, *args)  # noqa: E731
        return {"ours": lambda: kernels.embedding_backward(grad, *args), "torch": theirs}

    def bits():
        grad, low = random(R, hidden), ids < VOCABULARY // 2
        few, many = (kernels.embedding_backward(grad[x], ids[x], VOCABULARY, -1, False) for x in (low, low | ~low))
        return [few[: VOCABULARY // 2]], [many[: VOCABULARY // 2]]

    yield "embedding backward, eager", f"{R} of {VOCABULARY}x{hidden}", 2 * (R + VOCABULARY) * hidden, 0, make, bits
    n = hidden * mlp * 3  # an MLP's gradient, in rows of one fixed length

    def make():
        x = torch.randn(n // 65536, 65536, dtype=torch.float64, device=DEVICE)
        return {"ours": lambda: kernels.row_sums(x), "torch.sum": lambda: x.sum(1)}

    def bits():
        x = torch.randn(n // 65536, 65536, dtype=torch.float64, device=DEVICE)
        return [kernels.row_sums(x[some])], [kernels.row_sums(x)[some]]

    yield "row_sums", f"{n // 65536}x65536 float64", 8 * n, 0, make, bits


def medians(runs, budget=0.3):
    """Seconds of each run, taken in turn: [(median, distance of the quartiles / median)]."""
    import torch

    times, rounds = [[] for _ in runs], 5
    while len(times[0]) < rounds:
        for run, found in zip(runs, times):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
            begin.record()
            run()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        if len(times[0]) == 1:  # budget: seconds for all of them
            rounds = max(5, min(50, int(budget / sum(t[0] for t in times))))
    quartiles = [statistics.quantiles(t, n=4) for t in times]
    return [(q[1], (q[2] - q[0]) / q[1]) for q in quartiles]


def ceilings():
    """(bytes read and written per second by a copy, operations per second of a large bfloat16 torch.mm)."""
    import torch
    from gpu_bits import random

    source, x = random(1 << 30), random(8192, 8192)
    target = torch.empty_like(source)
    runs = [lambda: target.copy_(source), lambda: x @ x]
    medians(runs)  # warm
    (copy, _), (product, _) = medians(runs, 1.0)
    return 2 * source.nbytes / copy, 2 * 8192**3 / product


def operators():
    import torch

    if not torch.cuda.is_available():
        print("--operators needs a CUDA device", file=sys.stderr)
        sys.exit(2)
    from gpu_bits import MODELS, differing, machine

    stream = torch.cuda.Stream()  # the one that graphs are captured on: a backward pass runs where its forward ran

    def replay(calls):
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        return graph.replay

    good = True
    with torch.cuda.stream(stream):
        bandwidth, rate = ceilings()
        print(f"copy {bandwidth / 1e12:.2f} TB/s, torch.mm of 8192^3 in bfloat16 {rate / 1e12:.0f} TFLOP/s\n")
        print("| Qwen3 | operator | shape | us | spread | roof us | roof / us | library | us | library / ours | bits |")
        print("|---|---|---|---|---|---|---|---|---|---|---|")
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        for model in MODELS:
            for name, shape, size, operations, make, bits in cases(model):
                try:
                    few, many = bits()
                    different = sum(int(differing(a, b)) for a, b in zip(few, many, strict=True))
                    sets = [make() for _ in range(max(1, min(16, math.ceil(4 * cache / size))))]
                    names = list(sets[0])
                    # several calls to a graph, or its launch would be part of the time
                    calls = {n: [each[n] for each in sets] * math.ceil(16 / len(sets)) for n in names}
                    if size / bandwidth + operations / rate > 1e-4 or "eager" in name:
                        calls = {n: [each[n] for each in sets] for n in names}
                    if "eager" in name:  # what it copies from the host or allocates cannot be captured
                        runs = [lambda c=c: [f() for f in c] for c in calls.values()]
                    else:
                        runs = {"ours": replay(calls["ours"])}
                        for n in names[1:]:
                            with contextlib.suppress(RuntimeError):  # a library that cannot be captured
                                runs[n] = replay(calls[n])
                        names, runs = list(runs), list(runs.values())
                    medians(runs, 0.0)  # warm
                    found = {n: (t / len(calls[n]), spread) for n, (t, spread) in zip(names, medians(runs))}
                except Exception as e:  # the other operators still say something
                    print(f"| {model} | {name} | {shape} | FAILED: {type(e).__name__}: {str(e)[:120]!r} |", flush=True)
                    good = False
                    continue
                mine, spread = found.pop("ours")
                best = min(found, key=found.get, default=None)
                roof = max(size / bandwidth, operations / rate)
                theirs = f"{best} | {found[best][0] * 1e6:.1f} | {found[best][0] / mine:.2f}" if best else "none | |"
                verdict = f"{different} DIFFER" if different else "equal"
                times = f"{mine * 1e6:.1f} | {spread:.0%} | {roof * 1e6:.1f} | {roof / mine:.2f}"
                print(f"| {model} | {name} | {shape} | {times} | {theirs} | {verdict} |", flush=True)
                good &= not different
                del sets, calls, runs, few, many
    print(f"\n{machine()}")
    sys.exit(not good)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="1: one process in turn; more: torchrun")
    parser.add_argument("--steps", type=int, help="24; with --peer 12 a run")
    parser.add_argument("--new_tokens", type=int, help="32; on a GPU 256")
    parser.add_argument("--threads", type=int, default=0, help="of a process; 0: the cores shared evenly")
    parser.add_argument("--operators", action="store_true", help="each operator at Qwen3's shapes, on a GPU")
    parser.add_argument("--onoff", action="store_true", help="with and without the batch-invariant operators")
    parser.add_argument("--beside", help="runs with these flags beside runs without, such as '--lora_rank=16'")
    parser.add_argument("--peer", nargs="?", const="default", choices=PEER_SETTINGS, help="beside TRL, on a CPU")
    parser.add_argument("--agent", action="store_true", help="dialogues through agents/chat.py, on a CPU")
    parser.add_argument("--sandbox", action="store_true", help="programs in the sandbox beside bare Python")
    parser.add_argument("--trl_side", type=Path, help=argparse.SUPPRESS)  # --peer's own: the other side's run
    args, args.flags = parser.parse_known_args()
    args.steps = args.steps or (12 if args.peer else 24)
    if args.operators:
        operators()
    elif args.onoff:
        flags = ((f"--batch_invariant={on}", f"--strict={on}") for on in (True, False))
        in_turn(args, dict(zip(("batch-invariant", "off"), flags)))
    elif args.beside:
        in_turn(args, {args.beside: args.beside.split(), "without": []})
    elif args.sandbox:
        sandbox()
    elif args.trl_side:
        trl_side(args.trl_side)
    elif args.agent:
        agents(args)
    elif args.peer:
        peer(args)
    else:
        end_to_end(args)


if __name__ == "__main__":
    main()
