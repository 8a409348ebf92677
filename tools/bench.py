"""
Sampled tokens per second in steady state, of rollout and training together.

    python tools/bench.py                                    # 64 samples of 32 tokens, 0.8 M parameters, one process
    python tools/bench.py --ranks=2 --new_tokens=128

Runs train_grpo.py for some steps with samples of a fixed length and takes the median over the steps after the first
four, which warm up.
"""

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="1: one process in turn; more: torchrun")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--new_tokens", type=int, default=32)
    args, flags = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(prefix="bench"))
    torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={args.ranks}", "--standalone"]
    command = [
        sys.executable, *(torchrun if args.ranks > 1 else []), "train_grpo.py", f"--out_dir={folder / 'run'}",
        f"--max_steps={args.steps}", f"--max_new_tokens={args.new_tokens}", "--max_prompt_tokens=16", "--eval_size=0",
        "--prompts_per_step=8", "--group_size=8", "--leaves=4", "--ignore_eos", *flags,
    ]  # fmt: skip
    # rewards that differ, so that no gradient is zero and nothing is skipped
    (folder / "reward.py").write_text("def length(prompt, response, answer):\n    return float(len(set(response)))\n")
    command.append(f"--reward={folder / 'reward.py'}:length")
    try:
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()][4:]
    finally:
        shutil.rmtree(folder)

    def median(key):
        return statistics.median(step[key] for step in steps)

    tokens = statistics.median(step["tokens_per_second"] * step["step_seconds"] for step in steps)
    print(f"{platform.machine()}, {platform.python_version()}, {len(steps)} steps, median of {tokens:.0f} tokens each")
    for key in ("wait_seconds", "rollout_seconds", "train_seconds", "sync_seconds", "step_seconds"):
        print(f"  {key:16s} {median(key):.3f}")
    print(f"  tokens_per_second {median('tokens_per_second'):.0f} (of rollout and training together)")


if __name__ == "__main__":
    main()
