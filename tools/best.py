"""
The best samples of a run as data for supervised steps: rejection sampling, or expert iteration.

    python train_grpo.py config/tiny.py --mode=rollout --out_dir=out/best --max_steps=9 --init_from=out/tiny/ckpt/..
    python tools/best.py out/best --count=2    # writes out/best/best.jsonl
    python train_grpo.py config/tiny.py --mode=sft --out_dir=out/tuned --dataset=out/best/best.jsonl --eval_size=0 \\
        --init_from=out/tiny/ckpt/..

Takes of each group in the run's queue the samples with the highest rewards, those of at least the run's `pass_reward`.
The prompt is what the model saw.
"""

import argparse
import json
from pathlib import Path

from runs import saved_config

import sync
from configurator import require


def best_of(tensors, meta, count, least):
    """Rows of data: the `count` samples of a group with the highest rewards, the first of equal ones, and >= least."""
    rewards = tensors["rewards"]
    order = sorted(range(len(rewards)), key=lambda g: (-rewards[g], g))
    return [dict(prompt=meta["prompt_text"], answer=meta["responses"][g]) for g in order[:count] if rewards[g] >= least]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="its folder")
    parser.add_argument("--count", type=int, default=1, help="samples of a group, at most")
    args = parser.parse_args()
    require(args.count > 0, f"--count={args.count}: must be more than 0")
    config = saved_config(args.run)
    paths = sorted(args.run.glob("queue/rl_*/group_*.safetensors"))
    require(paths, f"{args.run}: no rollout files in its queue")
    require(not config["agent"], f"{args.run}: its samples are an agent's; best.py takes those of one turn")
    groups = map(sync.read_group, paths)
    finished = [group for group in groups if group[1]["finished"]]  # of segments, the last one's file has the samples
    rows = [row for group in finished for row in best_of(*group, args.count, config["pass_reward"])]
    (args.run / "best.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{args.run / 'best.jsonl'}: {len(rows)} samples of {len(finished)} groups")


if __name__ == "__main__":
    main()
