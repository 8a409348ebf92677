"""
The exercises: a right answer gives the project's digest, wrong ones a sentence that helps.

    pytest tests/test_exercises.py
"""

import inspect
import shutil
import sys

import pytest
from conftest import ROOT, lines, run_warm

sys.path.insert(0, str(ROOT / "learn" / "exercises"))
import check  # noqa: E402
from cases import CRITIC, EXERCISES, PLAIN  # noqa: E402

FILES = sorted((ROOT / "learn" / "exercises").glob("[1-9]_*.py"))
HEADER = (
    "import re\nimport torch\nimport numpy as np\nfrom onecurve.cpu.loops import fma, loop\n"
    "from rewards import permutation\n"
)

# {function: [(its body, some words of what it must be told)]}: wrong answers, as students write them.
BODIES = {
    "advantages_of(rewards, kind, eps=1e-6)": [
        ("""
            mean = rewards.mean(1, keepdim=True)
            std = ((rewards - mean) ** 2).mean(1, keepdim=True).sqrt()
            if kind == "grpo":
                return (rewards - mean) / (std + eps)
            return (rewards - mean) * (rewards.shape[1] / (rewards.shape[1] - 1) if kind == "rloo" else 1)
         """, "divides by G - 1"),
        ("""
            centred = rewards - rewards.mean()
            if kind == "grpo":
                return centred / (rewards.std() + eps)
            return centred * (rewards.shape[1] / (rewards.shape[1] - 1) if kind == "rloo" else 1)
         """, "of the whole batch"),
        ("""
            centred = rewards - rewards.mean(1, keepdim=True)
            others = (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
            choice = dict(grpo=centred / rewards.std(1, keepdim=True), dr_grpo=centred, rloo=rewards - others)
            return choice[kind]
         """, "0 / 0"),
        ("""
            centred = rewards - rewards.mean(1, keepdim=True)
            return centred / (rewards.std(1, keepdim=True) + eps) if kind == "grpo" else centred
         """, "yours has the sample itself in it"),
        ("return (rewards - rewards.mean(0)) / (rewards.std(0) + eps)", "yours  "),
    ],
    "gae(rewards, values, gamma, lam)": [
        ("""
            advantages = torch.zeros_like(rewards)
            later = 0
            for t in range(rewards.shape[-1]):
                delta = rewards[..., t] + gamma * values[..., t + 1] - values[..., t]
                later = delta + gamma * lam * later
                advantages[..., t] = later
            return advantages
         """, "begin at the end"),
        ("""
            T = rewards.shape[-1]
            advantages = torch.zeros_like(rewards)
            later = 0
            for t in reversed(range(T)):
                after = values[..., t + 1] if t < T - 1 else 0
                later = rewards[..., t] + gamma * after - values[..., t] + gamma * lam * later
                advantages[..., t] = later
            return advantages
         """, "critic's estimate of what was to come"),
        ("""
            out, later = [], 0
            for r, v, after in zip(*(x.unbind(-1)[::-1] for x in (rewards, values[..., :-1], values[..., 1:]))):
                later = r + gamma * after - v + gamma * later
                out.insert(0, later)
            return torch.stack(out, -1)
         """, "Lambda is missing"),
        ("""
            out, later = [], 0
            for r, v, after in zip(*(x.unbind(-1)[::-1] for x in (rewards, values[..., :-1], values[..., 1:]))):
                later = r + gamma * after - v + gamma * lam * later
                out.insert(0, later + v)
            return torch.stack(out, -1)
         """, "These are the returns"),
    ],
    "clipped_loss(logprobs, old_logprobs, advantages, clip_low, clip_high)": [
        ("""
            ratio = torch.exp(logprobs - old_logprobs)
            bounded = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
            return torch.min(ratio * advantages, bounded * advantages), bounded * advantages < ratio * advantages
         """, "The sign"),
        ("""
            ratio = torch.exp(logprobs - old_logprobs)
            bounded = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
            return -bounded * advantages, bounded * advantages < ratio * advantages
         """, "can never bring it back"),
        ("""
            ratio = logprobs / old_logprobs
            bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
            return -torch.min(ratio * advantages, bounded * advantages), bounded * advantages < ratio * advantages
         """, "yours  "),
        ("""
            ratio = torch.exp(logprobs - old_logprobs)
            bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
            return -torch.min(ratio * advantages, bounded * advantages), bounded != ratio
         """, "whose loss is constant"),
        ("""
            ratio = torch.exp(logprobs - old_logprobs).detach()
            bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
            return -torch.min(ratio * advantages, bounded * advantages), bounded * advantages < ratio * advantages
         """, "something was detached"),
    ],
    "kl(logprobs, reference_logprobs, kind)": [
        ("""
            d = reference_logprobs - logprobs
            return d if kind == "k1" else d ** 2 / 2 if kind == "k2" else torch.exp(-d) - 1 + d
         """, "The direction"),
        ("""
            d = logprobs - reference_logprobs
            return d if kind == "k1" else d ** 2 / 2 if kind == "k2" else torch.exp(d) - 1 - d
         """, "reference / policy"),
        ("""
            d = logprobs - reference_logprobs
            return d if kind == "k1" else d ** 2 if kind == "k2" else torch.exp(-d) - 1 + d
         """, "half of the square"),
        ("""
            d = logprobs - reference_logprobs
            return d.abs() if kind == "k1" else d ** 2 / 2 if kind == "k2" else torch.exp(-d) - 1 + d
         """, "may be negative"),
    ],
    "aggregate(losses, counts, kind, samples, tokens, longest)": [
        ("""
            means = [part.sum() / max(1, len(part)) for part in losses.split(counts)]
            if kind == "token":
                return losses.mean()
            return sum(means) / samples if kind == "sequence" else losses.sum() / (samples * longest)
         """, "weighs more in a small micro-batch"),
        ("""
            if kind == "token":
                return losses.sum() / tokens
            if kind == "constant":
                return losses.sum() / (samples * longest)
            return sum(part.mean() for part in losses.split(counts)) / samples
         """, "it counts as 0"),
        ("""
            if kind == "token":
                return losses.sum() / tokens
            if kind == "constant":
                return losses.sum() / (samples * max(counts))
            return sum(part.sum() / max(1, len(part)) for part in losses.split(counts)) / samples
         """, "so that no length is preferred"),
    ],
    "tree_sum(parts)": [
        ("""
            total = torch.zeros_like(parts[0])
            for part in parts:
                total += part
            return total
         """, "Left to right"),
        ("""
            if len(parts) == 1:
                return parts[0]
            middle = len(parts) // 2
            return tree_sum(parts[:middle]) + tree_sum(parts[middle:])
         """, "Cut into halves"),
        ("""
            parts = list(parts)
            while len(parts) > 1:
                parts = [a + b for a, b in zip(parts[::2], parts[1::2])]
            return parts[0]
         """, "odd last part is lost"),
        ("return parts.sum(dim=0)", "Write the additions"),
    ],
    "rows_of_step(n, per_step, step, *key)": [
        ("""
            order = permutation(n, *key, 0)
            return [order[(step * per_step + i) % n] for i in range(per_step)]
         """, "Every epoch has the same order"),
        ("""
            steps = max(1, n // per_step)
            order = permutation(n, *key, step // steps)
            first = step % steps * per_step
            return order[first : first + per_step]
         """, "left over at an epoch's end"),
        ("return [(step * per_step + i) % n for i in range(per_step)]", "as they lie in the file"),
        ("""
            import random
            return random.sample(range(n), min(n, per_step))
         """, "follow from its number"),
        ("""
            places = [step * per_step + i for i in range(per_step)]
            return [permutation(n, place // n)[place % n] for place in places]
         """, "The key is missing"),
    ],
    "reward(prompt, response, answer)": [
        ("return 1.0 if answer in response else 0.0", "'in' finds 7 in 17"),
        ("""
            numbers = re.findall(r"[-]?[0-9]+", response)
            return 1.0 if answer in numbers else 0.0
         """, "Any number counts"),
        ("return float(response.strip() == answer)", "compare numbers, not texts"),
        ("""
            try:
                return float(eval(response) == float(answer))
            except Exception:
                return 0.0
         """, "You execute what a model wrote"),
        ("return float(int(response) == int(answer))", "ValueError: invalid literal for int()"),
    ],
    "multiply(a, b, c)": [
        ("c += a @ b", "bits differ"),
        ("""
            for k in range(a.shape[1]):
                c += a[:, k, None] * b[k]
         """, "rounded twice"),
        ("""
            c[:] = c + a.astype(np.float64) @ b.astype(np.float64)
         """, "in float64"),
        ("""
            for k in range(a.shape[1]):  # what a library does: another order for many rows
                step = k if len(a) < 4 else a.shape[1] - 1 - k
                c += a[:, step, None] * b[step]
         """, "depends on the batch"),
    ],
}  # fmt: skip
# All nine, and where that can be not the project's own line for line.
RIGHT = """
from onecurve.algorithms.critic import gae
from train_grpo import advantages_of, aggregate, kl
from kernels import tree_sum

def clipped_loss(logprobs, old_logprobs, advantages, clip_low, clip_high):
    ratio = torch.exp(logprobs - old_logprobs)
    plain = ratio * advantages
    bounded = torch.clamp(ratio, 1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(plain, bounded), bounded < plain

def rows_of_step(n, per_step, step, *key):
    rows = []
    for place in range(step * per_step, (step + 1) * per_step):
        rows.append(permutation(n, *key, place // n)[place % n])
    return rows

def reward(prompt, response, answer):
    numbers = re.findall(r"-?[0-9]+(?:[.][0-9]+)?", response)
    return float(bool(numbers) and float(numbers[-1]) == float(answer))

@loop
def multiply(a, b, c):
    for m in range(a.shape[0]):
        for k in range(a.shape[1]):
            for n in range(b.shape[1]):
                c[m, n] = fma(a[m, k], b[k, n], c[m, n])
"""


def write(path, signature, body):
    indented = "\n".join(f"    {line}" for line in inspect.cleandoc(body).splitlines())
    path.write_text(f"{HEADER}\ndef {signature}:\n{indented}\n")
    return path


def checked(path):
    """What check.py says of the values that the file's one answer gives."""
    ((name, answer),) = check.answers_in(path).items()
    return check.check_values(name, answer, path)


WRONG = [(signature, body, words) for signature, answers in BODIES.items() for body, words in answers]


@pytest.mark.parametrize("signature, body, words", WRONG, ids=[f"{s.partition('(')[0]}: {w}" for s, _, w in WRONG])
def test_a_wrong_answer_gets_a_sentence_that_helps(tmp_path, signature, body, words):
    with pytest.raises(check.Wrong) as wrong:
        checked(write(tmp_path / "mine.py", signature, body))
    assert words in str(wrong.value) and len(str(wrong.value)) < 2000


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_exercise_is_a_page_and_a_file_with_a_hole_which_is_said(path):
    (name,) = check.answers_in(path)
    with pytest.raises(check.Wrong, match="the hole is still there"):
        checked(path)
    page = path.with_suffix(".md").read_text()
    mine = f"mine_{path.stem[0]}.py"  # of its own, so that no page overwrites the solution before it
    assert f"    cp -n learn/exercises/{path.name} {mine}\n    uv run learn/exercises/check.py {mine}\n" in page
    assert f"({path.stem}.md) | `{name}` |" in (ROOT / "learn" / "exercises" / "README.md").read_text()
    answers = next(answers for signature, answers in BODIES.items() if signature.startswith(f"{name}("))
    assert len(answers) >= 3 and len(FILES) == len(EXERCISES) == len(BODIES)


def test_another_order_differs_by_rounding_and_is_left_to_the_digest(tmp_path):
    body = """
        others = (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
        centred = rewards - rewards.mean(1, keepdim=True)
        return dict(grpo=centred / (rewards.std(1, keepdim=True) + eps), dr_grpo=centred, rloo=rewards - others)[kind]
    """
    everywhere = body.replace("centred /", "3 * centred / 3 /")
    for text, end in ((body, "'rloo'): the 24 steps use 'grpo' alone"), (everywhere, "the digest decides")):
        line = checked(write(tmp_path / "mine.py", "advantages_of(rewards, kind, eps=1e-6)", text))
        assert line.startswith("right but for rounding") and line.endswith(end)


def test_a_function_without_an_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "PATIENCE", 1)
    path = write(tmp_path / "mine.py", "tree_sum(parts)", "while True: pass")
    with pytest.raises(check.Wrong, match="^line 8: TimeoutError: no end after 1 s\n"):
        checked(path)


@pytest.mark.parametrize("text, line", {
    "def gae(:": "SyntaxError", "x = 1": "defines none of advantages_of", "1 / 0": "line 1: ZeroDivisionError",
    "raise SystemExit(0)": "line 1: SystemExit: 0",
}.items())  # fmt: skip
def test_a_file_that_answers_nothing_is_refused_in_one_line(tmp_path, refusal, text, line):
    (tmp_path / "mine.py").write_text(text)
    error = refusal(check.answers_in, tmp_path / "mine.py")
    assert error.startswith("error: ") and line in error


# ---- 24 steps


@pytest.fixture(scope="module")
def graded(tmp_path_factory, two_ranks):
    """graded(name, text, flags): what check.py says of the 24 steps of a file, and the run's folder."""
    folder = tmp_path_factory.mktemp("exercises")

    def launch(command, timeout):
        if command[-1].endswith("/own"):  # the project's own run is there already
            shutil.copytree(two_ranks[0], folder / "own")
            return 0, two_ranks[1]
        return run_warm(command[1:], folder / "output", timeout=timeout)

    def run(name, text, flags):
        path = folder / f"{name}.py"
        path.write_text(HEADER + text)
        names = check.answers_in(path)
        values = [check.check_values(each, answer, path) for each, answer in names.items()]
        assert all(line.startswith("right at") for line in values)
        return check.check_digest(path, folder / name, flags, launch), folder / name

    return run


@pytest.mark.in_turn
def test_right_answers_give_the_projects_own_digests(graded):
    assert check.DIGESTS[PLAIN] in (ROOT / "README.md").read_text()
    said, _ = graded("right", RIGHT, PLAIN)
    assert said == f"24 steps: digest {check.DIGESTS[PLAIN]}, the project's own"
    said, folder = graded("critic", RIGHT, CRITIC)
    assert said.endswith("the project's own")
    steps = lines(folder, "metrics.jsonl", "rl")  # what the second set of flags is for
    assert sum(step["clip_fraction"] > 0 for step in steps) > 9 and all(step["kl_reference"] > 0 for step in steps)


def test_an_answer_right_only_where_checked_is_told_where_digests_part(graded):
    text = """
import train_grpo
def advantages_of(rewards, kind, eps=1e-6):
    return train_grpo.advantages_of(rewards, kind, eps) * (2 if len(rewards) == 8 else 1)
"""
    with pytest.raises(check.Wrong, match="^first difference: rl step 0, advantages$"):
        graded("cheats", text, PLAIN)
