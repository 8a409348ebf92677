"""Tasks of Reasoning Gym: the same rows every time, their own verifiers, and nothing that a text can do there."""

import json
import re
import socket

import pytest
from conftest import finish
from trials import ROOT, lines

pytest.importorskip("reasoning_gym", reason="no Reasoning Gym: uv sync --group gym")
from onecurve.graders import gym  # noqa: E402
from onecurve.graders.checks import check_answers  # noqa: E402
from onecurve.graders.workers import Workers  # noqa: E402
from rewards import load_reward, load_rows  # noqa: E402
from train_grpo import DEFAULTS  # noqa: E402


def data(task, arguments="size=8, seed=3", **others):
    return load_rows(DEFAULTS | dict(dataset=f"reasoning_gym:{task}", dataset_config=arguments, eval_size=2, **others))


@pytest.mark.parametrize("task", ["countdown", "maze", "simple_equations", "spiral_matrix", "word_sorting"])
def test_rows_are_the_same_every_time_and_the_tasks_verifier_judges_them(task):
    training, held_out = data(task)
    assert (training, held_out) == data(task) != data(task, "size=8, seed=4") and len(training) == 6
    reward = load_reward("reasoning_gym", DEFAULTS)
    check_answers({"": reward}, training, DEFAULTS)
    answers = [json.loads(row["answer"])["entry"]["answer"] for row in training]
    for row, right, wrong in zip(training, answers, answers[1:] + answers[:1]):
        for response in (f" {right}\n", f"so <answer>1</answer>, no: <answer>{right}</answer>."):
            assert reward(row["prompt"], response, row["answer"])[0] == 1
        if right != wrong:
            assert reward(row["prompt"], f"{right} <answer>{wrong}</answer>", row["answer"])[0] < 0.5


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """{name: what an answer may try, which is true where it gets out}; and a listener on a socket that is a file."""
    monkeypatch.setenv("SECRET", "key")
    (key := tmp_path / "id_ed25519").write_text("key")
    tell = f"(lambda s: s.connect({str(tmp_path / 'socket')!r}) or s.send(b'key'))(__import__('socket').socket(1))"
    acts = dict(
        home=f"len(open({str(key)!r}).read()) > 0",
        environment="'SECRET' in __import__('os').environ",
        socket=f"{tell} > 0",
        children="(lambda os: os.waitpid(os.fork() or os._exit(0), 0))(__import__('os'))[0] > 0",
        parent="len(__import__('os').listdir('/proc/%d/fd' % __import__('os').getppid())) > 0",
        folder="len(__import__('tempfile').gettempdir()) > 0",
    )
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        listener.setblocking(False)
        yield acts, listener


EVALUATED = "string_insertion spiral_matrix binary_matrix n_queens countdown puzzle24 simple_integration"
EVALUATED += " intermediate_integration polynomial_multiplication"


@pytest.mark.parametrize("task", EVALUATED.split())
def test_an_answer_that_would_be_evaluated_is_data(task, outside):
    """These verifiers call eval. Five answers got out or got a reward: a socket, children, a kill, a score, /tmp."""
    acts, listener = outside
    row = data(task, "size=3, seed=3")[0][0]
    reward = load_reward("reasoning_gym", DEFAULTS)
    right = json.loads(row["answer"])["entry"]["answer"]
    leaves = "__import__('pathlib').Path('/tmp/left').write_text('x')"
    hostile = [
        acts["socket"],
        acts["children"],
        "__import__('os').kill(__import__('os').getppid(), 9)",
        "[__import__('os').write(4, b'1e9'), __import__('os')._exit(0)]",
        leaves,
        f"__import__('pathlib').Path('/tmp/left').exists() and {right!r}",
        "exec(chr(49)) or 24",
        "sympify(chr(49))",
    ]
    for text in hostile:
        assert reward("", text, row["answer"])[0] < 0.1
        assert reward("", str(right), row["answer"])[0] == 1
    with pytest.raises(BlockingIOError):
        listener.accept()


def obeys():
    """A grader that does what an answer says."""
    return lambda task, arguments: lambda text, entry: eval(text)


def test_a_verifier_that_obeyed_an_answer_could_do_nothing(outside, monkeypatch):
    """Each act beside its control: without bubblewrap it succeeds."""
    row = json.dumps(dict(task="", arguments={}, entry={}))
    for name, act in outside[0].items():
        monkeypatch.setattr(gym, "gym_worker", obeys)
        for kind, gained in (("none", 1), ("bwrap", 0)):
            gym.workers_in.cache_clear()
            assert gym.reasoning_gym("", act, row, DEFAULTS | dict(sandbox=kind))[0] == gained, name
        gym.workers_in.cache_clear()


def test_what_an_answer_does_to_its_worker_is_its_own_verdict(monkeypatch):
    """One that takes more than it may, kills the worker or itself, or gives itself more than there is to get."""
    monkeypatch.setattr("onecurve.graders.workers.SECONDS", 1)
    workers = Workers(obeys, "")
    monkeypatch.setattr(gym, "workers_in", lambda sandbox: workers)
    row = json.dumps(dict(task="", arguments={}, entry={}))
    limit = 0, dict(verdict="limit", near_limit=True)
    for text in ("bytearray(2**32)", "9**9**9", "os.kill(os.getppid(), 9)", "os.kill(os.getpid(), 9)"):
        assert gym.reasoning_gym("", text, row, DEFAULTS) == limit, text
        assert gym.reasoning_gym("", "1", row, DEFAULTS)[0] == 1
    for text in ("1e9", "-1", "float('nan')", "1/0", "print(1)", "os._exit(0)"):
        assert gym.reasoning_gym("", text, row, DEFAULTS)[0] == 0, text


@pytest.mark.parametrize(
    "task,arguments,message",
    [
        ("chess960", "", "dataset='reasoning_gym:chess960', dataset_config='': Dataset 'chess960' not reg"),
        ("maze", "sise=3", "dataset='reasoning_gym:maze', dataset_config='sise=3': .* 'sise'"),
        ("maze", "3", "dataset='reasoning_gym:maze', dataset_config='3': no name=value"),
    ],
)
def test_a_task_that_is_not_there_is_refused_in_one_line(task, arguments, message, refusal):
    assert re.match(f"error: {message}", refusal(data, task, arguments))


def test_another_reward_than_the_tasks_is_refused_at_the_first_row(refusal):
    loaded = {"": load_reward("reasoning_gym", DEFAULTS)}
    line = refusal(check_answers, loaded, [dict(prompt="1+1=", answer="2")], DEFAULTS)
    assert "answer_column='answer': for prompt '1+1=': is no entry of dataset='reasoning_gym" in line


def test_the_version_is_that_of_pyproject():
    assert f'"reasoning-gym=={gym.VERSION}"' in (ROOT / "pyproject.toml").read_text()


def test_a_run_on_a_task_is_a_run_like_any_other(tmp_path):
    flags = """--dataset=reasoning_gym:coin_flip --reward=reasoning_gym --max_prompt_tokens=256 --leaf_tokens=2048
        --warmup_sft_steps=0 --max_steps=2 --eval_size=4 --checkpoint_every=0""".split()
    for name in ("a", "b"):
        finish(tmp_path / name, *flags, "--dataset_config=size=40, seed=3")
    a, b = (lines(tmp_path / name, "ledger.jsonl") for name in ("a", "b"))
    assert a == b and len(a) == 2
