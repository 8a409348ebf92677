"""
A run that goes back to where it was healthy whenever its reward looks gamed.

    python tools/rollback.py config/hacked.py --out_dir=out/turned

Runs train_grpo.py with these arguments and --watch=stop. A run that the watch stops is branched from its last healthy
checkpoint into out/turned_1 (then _2 and _3, and no further): with prompts and noise in another order, by another seed,
and a KL of --healthy_kl_coef to the policy of that checkpoint. The same command continues an interrupted run.

Exit status: that of the last run; 3 if the watch has stopped it.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from branch import branch
from runs import command, end_with_tool, lines, saved_config

from configurator import require
from onecurve.graders.watch import hacking
from onecurve.run.checkpoint import healthy_checkpoint

TURNS = 3


def signal(folder):
    """The watch's alarm for a run as far as it is recorded, in words; '' without one."""
    if not (folder / "metrics.jsonl").exists():
        return ""
    return hacking(lines(folder, phase="rl"), saved_config(folder)["reward"])


def run(folder, args, nproc):
    """Starts or continues the run in this folder, its output to be seen; its exit status."""
    if (folder / "config.py").exists():
        args = ["--init_from=resume"]
    return subprocess.call(command(*args, f"--out_dir={folder}", "--watch=stop", ranks=nproc), preexec_fn=end_with_tool)


def turn_back(folder, after, kl_coef):
    """Makes `after` the run in `folder` as it was at its last healthy checkpoint, with another future."""
    done = lines(folder, phase="rl")[-1]["step"] + 1
    healthy = healthy_checkpoint(folder, done)
    require(
        healthy,
        f"{folder}: no checkpoint is healthy; --keep_checkpoints=9 keeps more, --checkpoint_every=10 more often",
    )
    config = saved_config(folder)
    changed = dict(out_dir=str(after), seed=config["seed"] + 1_000_003, kl_coef=kl_coef, reference=str(healthy))
    print(
        f"{folder}: {signal(folder)} after step {done}; {after} continues from step {int(healthy.name[5:])}", flush=True
    )
    shutil.rmtree(after, ignore_errors=True)  # of an interrupted turn
    branch(folder, healthy, after, config | changed)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out_dir", type=Path, required=True)
    parser.add_argument("--healthy_kl_coef", type=float, default=0.1, help="weight of the KL to the healthy policy")
    parser.add_argument("--nproc", type=int, default=1, help="processes; more than one are torchrun's")
    args, flags = parser.parse_known_args()
    require(args.nproc > 0, f"--nproc={args.nproc}: must be more than 0")
    folder = args.out_dir
    for n in range(TURNS + 1):
        after = Path(f"{args.out_dir}_{n + 1}")
        if not (after / "config.py").exists():
            status = 0 if signal(folder) else run(folder, flags, args.nproc)
            alarm = signal(folder)  # torchrun's own status is 1
            if not alarm or n == TURNS:
                sys.exit(3 if alarm else status)
            turn_back(folder, after, args.healthy_kl_coef)
        folder = after


if __name__ == "__main__":
    main()
