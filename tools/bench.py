"""
Sampled tokens per second in steady state, of rollout and training together.

    python tools/bench.py                                    # 64 samples of 32 tokens, 0.8 M parameters, one process;
                                                             # on a GPU 256 of 256 tokens, 250 M parameters
    python tools/bench.py --ranks=2 --new_tokens=128
    python tools/bench.py --onoff                            # with and without our operators, twice each
    python tools/bench.py --beside=--lora_rank=16            # with these flags and without, twice each
    python tools/bench.py --agent                            # a turn of an agent and a plain sample; and
                                                             # 64 dialogues whose tools sleep
    python tools/bench.py --sandbox                          # 1,000 programs, and in bare Python
    python tools/bench.py --experts                          # a mixture's products beside a dense layer's

Runs train_grpo.py for some steps with samples of a fixed length and takes the median over the steps after the first
four, which warm up. On a card beside them the roof: the work that tools/plan.py counts, at the rates of the data sheet.
tools/peer.py compares them with TRL's; tools/bench_operators.py times each operator on a GPU.
"""

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runs import ROOT, require, run

sys.path.insert(0, str(ROOT / "tests"))  # where gpu_bits.py is, for its shapes and how it compares
# of the end-to-end runs on a GPU: config/one_gpu.py's model, whose head dim the kernels know
GPU_SIZE = [
    "--scratch_args=num_hidden_layers=16, hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, "
    "head_dim=128, intermediate_size=3072",
    "--prompts_per_step=32",
    "--engine_memory=0.3",
]


# ---- end to end


def flags_of(args):
    import torch

    on_gpu = torch.cuda.is_available()
    args.new_tokens = args.new_tokens or (256 if on_gpu else 32)
    size = GPU_SIZE if on_gpu else ["--prompts_per_step=8"]
    return [
        f"--max_steps={args.steps}", f"--max_new_tokens={args.new_tokens}", "--max_prompt_tokens=16", "--eval_size=0",
        "--group_size=8", f"--lanes={4 if args.ranks > 1 else 1}", "--ignore_eos", f"--threads={args.threads}",
        "--share_prefixes", "--checkpoint_every=0", *size, *args.flags,
    ]  # fmt: skip


def measure(args, *more, warm_up=4):
    """The metrics of a run's steps after the first ones, which warm up."""
    folder = Path(tempfile.mkdtemp(prefix="bench"))
    # rewards that differ, so that no gradient is zero and nothing is skipped
    (folder / "reward.py").write_text("def length(prompt, response, answer):\n    return float(len(set(response)))\n")
    reward = f"--reward={folder / 'reward.py'}:length"
    try:
        made = run(folder / "run", reward, *flags_of(args), *more, ranks=args.ranks)
        steps = [line for line in made if line["phase"] == "rl"][warm_up:]
        require(steps, f"no RL steps after the first {warm_up}, which warm up; use --steps=5 or more, and mode='grpo'")
        return steps
    finally:
        shutil.rmtree(folder)


def roof(args):
    """{metric: seconds} of a step at the data sheet's rates, where all ranks are one card that tools/plan.py knows."""
    import plan
    import torch

    if args.ranks > 1 or not torch.cuda.is_available():
        return {}
    name = torch.cuda.get_device_name().replace(" ", "")
    known = [card for card in plan.CARDS if card in name]
    return dict(zip(("rollout_seconds", "train_seconds"), plan.roof(flags_of(args), *known))) if known else {}


def end_to_end(args):
    steps = measure(args)

    def median(key):
        return statistics.median(step[key] for step in steps)

    tokens = statistics.median(step["tokens_per_second"] * step["step_seconds"] for step in steps)
    print(f"{platform.machine()}, {platform.python_version()}, {len(steps)} steps, median of {tokens:.0f} tokens each")
    least = roof(args)
    for key in ("wait_seconds", "rollout_seconds", "train_seconds", "sync_seconds", "step_seconds"):
        print(f"  {key:16s} {median(key):.3f}" + (f", the card's roof {least[key]:.3f}" if key in least else ""))
    print(f"  tokens_per_second {median('tokens_per_second'):.0f} (of rollout and training together)")


def alternately(args, kinds):
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
    """Plain samples and the same through a Chat, in turn, three times each; then, twice, the cost of sleeping tools."""
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
        measure(args, f"--agent={path}:naps", "--max_new_tokens=400", "--ignore_eos=False")
        lines = [line.split(", ") for line in Path(os.environ["TIMES"]).read_text().splitlines()]
        found = []
        for step in range(4, args.steps):
            mine = [(float(a), float(b), int(n)) for where, a, b, n in lines if where == f"rl step {step}"]
            asked, whole = spans([(a, b) for a, b, _ in mine])
            found.append((whole, asked, whole - asked, sum(n for *_, n in mine) / asked))
        whole, asked, idle, rate = map(statistics.median, zip(*found))
        print(f"| {1000 * nap:.0f} ms | {whole:.2f} | {asked:.2f} | {idle:.3f} | {rate:.0f} |")
    shutil.rmtree(folder)


# ---- programs


def sandbox():
    """1,000 programs in the sandbox and with bare Python, from 64 threads, one program per core at a time."""
    from gpu_bits import machine

    from onecurve.graders.sandbox import RUNNING, interpreter, run_program
    from train_grpo import DEFAULTS

    python = interpreter("bwrap", DEFAULTS["sandbox_seconds"])
    begun = time.process_time()
    exec("for i in range(1000000): pass", {})  # a loop of the size that takes 10 ms here
    loop = f"for i in range({int(1e6 * 0.01 / (time.process_time() - begun))}): pass\nprint(1)"

    def plain(program, *options):
        with RUNNING:
            assert subprocess.run([python, *options, "-c", program], capture_output=True, env={}).stdout == b"1\n"

    def lean(program):
        plain(program, "-I", "-S")  # as in the sandbox

    def boxed(program):
        assert run_program(program, config=DEFAULTS).output == "1\n"

    for work, program in {"nothing": "print(1)", "10 ms": loop}.items():
        seconds = {plain: 0, lean: 0, boxed: 0}
        for start in [*seconds] * 5:  # alternately, as the machine's speed drifts
            with ThreadPoolExecutor(64) as pool:
                began = time.perf_counter()
                list(pool.map(start, [program] * 200))
                seconds[start] += time.perf_counter() - began
        bare, own, other = seconds.values()  # of 1,000 programs, and so ms of one
        print(
            f"{work}: python3 {bare:.1f} ms, python3 -I -S {own:.1f} ms, in the sandbox {other:.1f} ms a program: ",
            end="",
        )
        print(f"{other / bare:.2f} and {other / own:.2f} times as long; {machine()}")


def experts(C=256, F=512, E=8, k=2):
    """
    The first product of a layer's experts, and that of a dense MLP of equal work, in turn, on one core: of a trainer
    with its gradients, of an engine with weights that are packed. Eight layers of it have 8 M parameters for a token.
    """
    import torch
    from gpu_bits import machine

    import kernels
    from onecurve.cpu import host

    weight, dense_weight = torch.randn(E, 2 * F, C, requires_grad=True), torch.randn(k * 2 * F, C)
    for rows in (64, 256, 1024, 4096):
        counts = torch.rand(rows, E).topk(k).indices.flatten().bincount(minlength=E)
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        pairs, grad = torch.randn(rows * k, C, requires_grad=True), torch.randn(rows * k, 2 * F)
        x, dense_grad = torch.randn(rows, C), grad.view(rows, -1)

        def grouped():
            return kernels.ExpertMatmul.apply(pairs, weight, starts)

        def plain():
            return kernels.matmul(x, dense_weight.t())

        def grouped_in_trainer():
            torch.autograd.grad(grouped(), (pairs, weight), grad)

        def plain_in_trainer():
            plain(), kernels.matmul(dense_grad, dense_weight), kernels.matmul(dense_grad.t(), x)

        for cache, products, calls in ((None, 3, (grouped_in_trainer, plain_in_trainer)), ({}, 1, (grouped, plain))):
            host.panel_cache = cache
            seconds = [[], []]
            for _ in range(3 + max(10, 8192 // rows)):
                for call, found in zip(calls, seconds):
                    began = time.perf_counter()
                    call()
                    found.append(time.perf_counter() - began)
            rates = [products * 2 * rows * k * 2 * F * C / statistics.median(found[3:]) / 1e9 for found in seconds]
            place = "trainer" if cache is None else "engine"
            print(f"{place}, {rows} rows: {rates[0]:.1f} of {rates[1]:.1f} GFLOP/s, {rates[0] / rates[1]:.2f}")
    print(machine())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="1: one process alternates; more: torchrun")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--new_tokens", type=int, help="32; on a GPU 256")
    parser.add_argument("--threads", type=int, default=0, help="of a process; 0: the cores shared evenly")
    parser.add_argument("--onoff", action="store_true", help="with and without the batch-invariant operators")
    parser.add_argument("--beside", help="runs with these flags beside runs without, such as '--lora_rank=16'")
    parser.add_argument("--agent", action="store_true", help="dialogues through onecurve/agents/chat.py, on a CPU")
    parser.add_argument("--sandbox", action="store_true", help="programs in the sandbox beside bare Python")
    parser.add_argument("--experts", action="store_true", help="products of a mixture beside dense ones, on a CPU")
    args, args.flags = parser.parse_known_args()
    require(args.ranks > 0, f"--ranks={args.ranks}: must be more than 0")
    if args.sandbox or args.experts:
        require(not args.flags, f"{' '.join(args.flags)}: not for --sandbox or --experts, which make no run")
    if args.onoff:
        flags = ((f"--batch_invariant={on}", f"--strict={on}") for on in (True, False))
        alternately(args, dict(zip(("batch-invariant", "off"), flags)))
    elif args.beside:
        alternately(args, {args.beside: args.beside.split(), "without": []})
    elif args.sandbox:
        sandbox()
    elif args.experts:
        experts()
    elif args.agent:
        agents(args)
    else:
        end_to_end(args)


if __name__ == "__main__":
    main()
