"""
Rewards that ask another process or machine: expressions compared by math-verify, and a model as the judge.

    pytest tests/test_judges.py
"""

import gzip
import itertools
import json
import random
import re
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from conftest import answering, error_of_run, finish, read_groups, wait_for
from referee_others import write_rows
from test_endpoint import KEY, serving
from trials import ROOT, lines, processes_of, replay_of

from onecurve.graders import judges
from onecurve.graders import workers as workers_of
from onecurve.graders.judges import score_of
from onecurve.graders.workers import Workers
from rewards import RewardError, load_reward, score

# ------------------------------------------------------------------------------------------------------------------
# math


@pytest.mark.parametrize(
    "answer, response, value",
    [
        ("1/2", "0.5", 1),
        ("1/2", r"so $\frac12$", 1),
        (r"\frac{1}{2}", "#### 1/2", 1),
        ("1/2", r"\boxed{\frac13}", 0),
        ("1/3", "0.333333", 1),  # six decimals
        ("1/3", "0.333", 0),
        (r"\{1, 2, 3\}", r"$\{3, 1, 2\}$", 1),
        (r"\{1, 2, 3\}", r"$\{3, 1, 4\}$", 0),
        ("(1, 2)", r"\boxed{(2,1)}", 0),
        ("x^2+2x+1", "$(x+1)^2$", 1),
        ("x=3", "it is 3", 1),
        ("50%", "0.5", 1),
        ("1,234", "1234", 1),
        ("$18", "that is $18 a day", 1),
        (r"\text{east}", r"\boxed{\text{East}}", 1),
        (r"\text{east}", r"\boxed{\text{seat}}", 0),
        ("He sells 48/2=<<48/2=24>>24 clips.\n#### 72", "72 clips", 1),
        ("He sells 48/2=<<48/2=24>>24 clips.\n#### 72", "24 clips", 0),
        (r"It follows that $x=3$, so $\boxed{7}$", "7", 1),
        (r"It follows that $x=3$, so $\boxed{7}$", "3", 0),
        ("the sum is $7$", r"\boxed{7}", 1),
        ("42", r"\boxed{41} or rather \boxed{42}", 0),  # a set of two
        ("42", "", 0),
        ("42", "no idea", 0),
        ("42", r"\boxed{\frac{}", 0),
        ("42", "1+" * 9999 + "\x00\ud800\n\\boxed{42}", 1),
    ],
)
def test_expressions_are_compared_by_their_value(answer, response, value):
    verdict = "pass" if value else "fail"
    assert judges.math("", response, answer) == (value, dict(verdict=verdict, near_limit=False))


@pytest.mark.parametrize("answer", ["", "Paris", "no idea at all", r"\frac{", "}{", "11:00", "so\n#### "])
def test_an_answer_that_is_no_expression_is_an_error(answer):
    """Paris would be the product of five letters, and equal to Pairs; 11:00 would be 11/0, and equal to 12:00."""
    with pytest.raises(ValueError, match="is no expression that math-verify can read|is words"):
        judges.math("", "3", answer)


@pytest.fixture
def workers(monkeypatch):
    """workers(seconds): as if none had been started yet, with that limit."""

    def fresh(seconds):
        monkeypatch.setattr(workers_of, "SECONDS", seconds)
        monkeypatch.setattr(judges, "MATH", Workers(judges.math_worker, "math-verify"))

    return fresh


def test_an_endless_expression_is_limited_and_changes_no_verdict(workers):
    workers(1)
    endless = r"$9^{9^{9^9}}$", r"$(10^9)!$", r"$\sum_{n=1}^{10^9} \sin n$", "$" + "{" * 3000 + "1" + "}" * 3000 + "$"
    pairs = [(str(i % 7), "3") for i in range(40)] + [("x^2+x", "$x(x+1)$"), (r"\{1,2\}", "$x^2=1$")]
    alone = [judges.math("", response, answer) for answer, response in pairs]
    assert sum(value for value, _ in alone) == 7
    with ThreadPoolExecutor(64) as pool:
        slow = [pool.submit(judges.math, "", text, "1") for text in endless]
        among = list(pool.map(lambda pair: judges.math("", pair[1], pair[0]), pairs))
        started = time.monotonic()
        assert [call.result() for call in slow] == 4 * [(0, dict(verdict="limit", near_limit=True))]
    assert among == alone
    assert time.monotonic() - started < 60  # 4 s of CPU time for two workers


def test_what_took_more_than_half_of_the_limit_is_near_it(workers, monkeypatch):
    workers(60)
    assert not judges.math("", "3", "3")[1]["near_limit"]
    monkeypatch.setattr(workers_of, "SECONDS", 0)
    assert judges.math("", "3", "3")[1]["near_limit"]


def test_a_killed_worker_is_an_error_and_not_a_zero(workers):
    workers(5)
    judges.MATH.idle.get()  # one will do
    judges.math("", "3", "3")
    worker = judges.MATH.idle.get()
    judges.MATH.idle.put(worker)
    worker.kill()
    with pytest.raises(RewardError, match="here: RuntimeError: a process of math-verify ended with status -9; res"):
        score(load_reward("math"), "", "3", "3", "here")
    assert judges.math("", "3", "3")[0] == 1


def test_a_worker_ends_with_its_run_whatever_ends_that():
    parent = "import os, time; from onecurve.graders import judges\n"
    parent += "while judges.MATH.idle.qsize() > 1: judges.MATH.idle.get()\n"
    parent += "judges.math('', '3', '3')\nprint(judges.MATH.idle.get().pid, flush=True)\ntime.sleep(600)"
    run = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    worker = Path("/proc", run.stdout.readline().strip())
    assert b"PYTHONHASHSEED=0" in (worker / "environ").read_bytes().split(b"\0")
    run.kill()
    run.wait()
    wait_for(lambda: not worker.exists(), 5)


def test_without_math_verify_a_line_says_how_to_install_it(monkeypatch, refusal):
    monkeypatch.setattr(workers_of, "distributions", lambda name: [])
    why = "needs math-verify 0.9.0, and there is none; install it by `uv sync --group math`"
    assert refusal(load_reward, "math") == f"error: reward='math': {why}"


def test_the_version_is_that_of_pyproject():
    assert f'"math-verify=={judges.MATH_VERIFY}"' in (ROOT / "pyproject.toml").read_text()


# ------------------------------------------------------------------------------------------------------------------
# judge: what an endpoint may do

SETTINGS = dict(judge_model="", judge_tries=3)


def says(text, finish_reason="stop"):
    message = dict(role="assistant", content=text)
    return 200, json.dumps(dict(id="", choices=[dict(index=0, message=message, finish_reason=finish_reason)])).encode()


@pytest.fixture
def settings(monkeypatch, tmp_path):
    """settings(**keys): the run's config, with a prompt file of its own."""
    path = tmp_path / "judge.txt"
    path.write_text("{prompt} {response} {answer} {other}")
    monkeypatch.setattr(judges, "JUDGE_WAIT", 0.001)
    return lambda **keys: SETTINGS | dict(judge_prompt=str(path)) | keys


@pytest.mark.parametrize(
    "verdict, value",
    [
        ("score: 1", 1),
        ("Right, because 6 * 7 = 42.\n**Score:** 0.75.\n", 0.75),
        ("SCORE:\n.5", 0.5),
        ("score: 0", 0),
        ("score: 7/10", 0.7),
        ("score: 0\nNo: score: 1", 1),
        ("score: 1\nThat is all.", 1),
        ("1", None),
        (None, None),
        ("score: ", None),
        ("score: 1\nmy last score: none", None),
        ("score: 7", None),
        ("score: -1", None),
        ("score: 50%", None),
        ("score: 1e-3", None),
        ("score: 1 of 10", None),
        ("score: 1/0", None),
        ("score: nan", None),
    ],
)
def test_a_verdict_is_the_number_behind_the_last_score(verdict, value):
    if value is not None:
        assert score_of(verdict, "stop") == value
        with pytest.raises(ValueError, match="length"):  # 0.75 may have been cut to 0.7
            score_of(verdict, "length")
    else:
        with pytest.raises((ValueError, TypeError)):
            score_of(verdict, "stop")


def test_a_judge_is_asked_once_with_the_texts_as_they_are(settings, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    with answering(lambda body: says("Well.\nscore: 0.5")) as (url, asked):
        reward = load_reward("2*judge+0*exact", settings(judge=url))
        value, noted = reward("{answer}?", "{prompt} {0} {", "42")
    assert value == 1 and noted["judge"] == dict(reward=0.5, judge="Well.\nscore: 0.5")
    ((headers, body),) = asked
    assert headers["authorization"] == "Bearer secret"
    assert body == dict(
        model="first", messages=[dict(role="user", content="{answer}? {prompt} {0} { 42 {other}")],
        max_tokens=judges.JUDGE_TOKENS, temperature=0, seed=0,
    )  # fmt: skip


FAILURES = {
    "an error": ((500, b'{"error": {"message": "out of \x1b[2Jmemory"}}'), "status 500: "),
    "garbage": ((200, b"<html>"), "Expecting value"),
    "another JSON": ((200, b"[]"), "list indices must be"),
    "no choice": ((200, b'{"choices": []}'), "list index"),
    "no content": (says(None), "expected string"),
    "hangs up": (None, "disconnected"),
    "no score": (says("It is right."), "no line ends in 'score: '"),
    "cut": (says("score: 0.", "length"), "length"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_is_tried_again_and_then_an_error_and_no_zero(settings, failure):
    answer, why = FAILURES[failure]
    answers = [answer, answer, says("score: 1")] + [answer] * 3
    with answering(lambda body: answers.pop(0)) as (url, asked):
        reward = load_reward("judge", settings(judge=url))
        assert score(reward, "", "", "", "here")[0] == 1 and len(asked) == 3
        with pytest.raises(RewardError) as error:
            score(reward, "", "", "", "here")
        assert len(asked) == 6
    line = str(error.value)
    assert line.startswith(f"reward failed on here: RuntimeError: judge='{url}' failed 3 times: ")
    assert why in line and line.isprintable()


def test_a_judge_that_is_too_slow_has_failed(settings, monkeypatch):
    monkeypatch.setattr(judges, "JUDGE_SECONDS", 0.2)
    over = threading.Event()
    with answering(lambda body: over.wait() and says("score: 1")) as (url, asked):
        with pytest.raises(RuntimeError, match="failed 2 times: no whole answer in 0.2 s"):
            load_reward("judge", settings(judge=url, judge_tries=2))("", "", "")
        over.set()
    assert len(asked) == 2


@contextmanager
def sending(*parts, pause=0.05):
    """The address of a server that answers with these bytes, one after the other, and then with the last for ever."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(65536)
            with suppress(OSError):
                for part in itertools.chain(parts, itertools.repeat(parts[-1])):
                    self.request.sendall(part)
                    time.sleep(pause)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()


OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


def test_a_try_has_a_bound_of_seconds_and_of_bytes_for_the_whole_answer(monkeypatch):
    monkeypatch.setattr(judges, "JUDGE_BYTES", 2**20)
    for parts, pause, why in (
        ((OK, b"x-a: 1\r\n"), 0.05, "no whole answer in 0.5 s"),  # each byte comes in time, the head never ends
        ((OK + b"\r\n", b" "), 0.05, "no whole answer in 0.5 s"),
        ((OK + b"\r\n", b" " * 2**16), 0, "an answer of more than 1048576 bytes"),
    ):
        with sending(*parts, pause=pause) as url:
            began = time.monotonic()
            with pytest.raises(ValueError, match=why):
                judges.ask_judge(f"{url}/models", 0.5 if pause else 60)
            assert time.monotonic() - began < 20
    packed = gzip.compress(b" " * 2**24 + b"[]")  # and what is small on its way stays so
    with sending(OK + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(packed) + packed) as url:
        with pytest.raises(ValueError):
            judges.ask_judge(f"{url}/models", 60)


def test_a_judge_cannot_send_us_elsewhere():
    with answering(lambda body: says("score: 1")) as (other, asked):
        with sending(f"HTTP/1.1 307 Moved\r\nlocation: {other}/chat\r\ncontent-length: 0\r\n\r\n".encode()) as url:
            with pytest.raises(ValueError, match="status 307"):
                judges.ask_judge(f"{url}/chat/completions", 10, {"n": 1})
        assert not asked
        assert judges.ask_judge(f"{other}/chat/completions", 10, {"n": 1}) and asked


def test_openais_key_goes_only_to_a_judge_that_the_command_line_names(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    with answering(lambda body: says("")) as (url, asked):
        for origin in "config/theirs.py", "command line":
            monkeypatch.setitem(judges.ORIGINS, "judge", origin)
            judges.ask_judge(f"{url}/chat/completions", 10, {"n": 1})
        monkeypatch.setenv("JUDGE_API_KEY", "judges")
        judges.ask_judge(f"{url}/chat/completions", 10, {"n": 1})
    assert [headers["authorization"][7:] for headers, _ in asked] == ["none", "mine", "judges"]


def test_what_a_judge_needs_is_asked_for_at_the_start(settings, refusal, tmp_path, monkeypatch):
    def why(**keys):
        return refusal(load_reward, "judge", settings(**keys))

    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    assert re.search("judge='': .*such as http://", why(judge=""))
    assert f"judge='{nobody}': All connection attempts failed; use an" in why(judge=nobody)
    assert "judge='127.0.0.1:1': " in why(judge="127.0.0.1:1")
    (tmp_path / "empty.txt").write_text("Is {answer} right?")
    for name in ("", str(tmp_path / "none.txt"), str(tmp_path / "empty.txt")):
        line = why(judge=nobody, judge_prompt=name)
        assert f"judge_prompt={name!r}: no text file with {{response}} in it" in line
    with answering(lambda body: says("")) as (url, asked):
        assert "judge_model='x': the judge has first, policy" in why(judge=url, judge_model="x")
        load_reward("judge", settings(judge=url, judge_model="policy"))
    assert not asked
    monkeypatch.setenv("RANK", "1")  # one rank's word is enough
    load_reward("judge", settings(judge=nobody))


# ------------------------------------------------------------------------------------------------------------------
# judge: whole runs, whose judge is a model of our own


def even(response):
    return bool(re.fullmatch(r".*[02468]", response, re.DOTALL))


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("judge") / "prompt.txt"
    path.write_text("{response}?")
    return path


SAYS = """
async def solve(chat, row):
    chat.user(row["prompt"])
    return len((await chat.generate()).text)

def replies(row):
    return [row["answer"]]
"""


@pytest.fixture(scope="module")
def judge_model(tmp_path_factory):
    """A model that was taught to answer 'score: 1' to a text with an even digit at its end, and else 'score: 0'."""
    folder = tmp_path_factory.mktemp("judges")
    dice = random.Random(1)
    letters = [chr(c) for c in range(32, 127)]
    texts = ["".join(dice.choices(letters, k=dice.randrange(5))) + dice.choice("0123456789 +=ax") for _ in range(2000)]
    texts += [str(i) for i in range(200)] * 10
    rows = [dict(prompt=f"{text}?", answer=f"score: {even(text):d}") for text in dice.sample(texts, len(texts))]
    write_rows(folder / "rows.jsonl", rows)
    (folder / "says.py").write_text(SAYS)
    flags = f"""--mode=sft --agent={folder}/says.py:solve --dataset={folder}/rows.jsonl --eval_size=0 --max_steps=80
        --learning_rate=3e-3 --max_prompt_tokens=24 --max_new_tokens=12 --leaf_tokens=1024"""
    finish(folder / "taught", *flags.split())
    return folder / "taught/ckpt/step_000080"


@pytest.fixture(scope="module")
def served(judge_model):
    with serving(judge_model) as url:
        yield url


@contextmanager
def gate(served, alive=2**62):
    """The address of the judge, slow at random, until it is gone after so many requests; and what it was asked."""

    def respond(body):
        if len(asked) > alive:
            return None
        time.sleep(random.SystemRandom().random() / 20)
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(f"{served}/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            return 200, answer.read()

    with answering(respond) as (url, asked):
        yield url, asked


@pytest.mark.in_turn
def test_runs_with_a_judge_that_is_killed_and_comes_back_have_one_ledger(served, prompt_file, warmed, tmp_path):
    """
    The judge of the second run is gone in the middle of a step, and back, at another address, for its resume by two
    trainers and an engine with other batches.
    """
    flags = "--reward=judge --judge_tries=2 --judge_model=policy --eval_size=0 --max_steps=4".split()
    flags += ["--prompts_per_step=4", "--checkpoint_every=1", f"--judge_prompt={prompt_file}", *warmed]
    with gate(served) as (url, asked):
        finish(tmp_path / "a", *flags, f"--judge={url}")
    metrics = lines(tmp_path / "a", "metrics.jsonl", "rl")
    assert len(metrics) == 4 and all(0 < m["reward_mean"] < 1 and m["grad_norm"] > 1e-3 for m in metrics)
    assert len(asked) == 4 * 32

    with gate(served, alive=2 * 32 + 20) as (url, asked):
        error = error_of_run(tmp_path / "b", *flags, f"--judge={url}")
    assert re.search(rf"rl step 2, prompt \d, sample \d: RuntimeError: judge='{url}' failed 2", error)
    wait_for(lambda: not processes_of(tmp_path / "b"), 10)
    made = {path: path.read_bytes() for path in (tmp_path / "b/queue/rl_000002").glob("group_*")}
    with gate(served) as (url, asked):
        others = "--init_from=resume", f"--judge={url}", "--engine_args=max_running_requests=5"
        finish(tmp_path / "b", *flags, *others, ranks=3)
    assert len(asked) == 2 * 32 - 8 * len(made)  # for what is in no group file, and for nothing else
    assert all(path.read_bytes() == content for path, content in made.items())
    nobody = "--judge=http://127.0.0.1:9/v1"  # a replay does not ask whether there is one
    finish(tmp_path / "c", *flags, nobody, *replay_of(tmp_path / "a"))
    one, *same = (lines(tmp_path / name, "ledger.jsonl") for name in "abc")
    assert same == [one] * 2 and len(one) == 4
    for _, meta in read_groups(tmp_path / "b"):
        assert all(score_of(noted["judge"]["judge"], "") == noted["judge"]["reward"] for noted in meta["noted"])


AGENT = """
from onecurve.graders.judges import judge

async def solve(chat, row):
    chat.user(row["prompt"])
    reply = await chat.generate()
    return (await chat.do(judge, row["prompt"], reply.text, row["answer"]))[0]
"""


@pytest.mark.parametrize("agent", [False, True])
def test_a_failure_ends_the_run_though_the_judge_owes_an_answer(agent, prompt_file, run, tmp_path):
    """At its end Python waits for threads that wait for a judge: 120 s in each try."""
    (tmp_path / "mine.py").write_text(AGENT)
    failed = []
    over = threading.Event()

    def respond(body):
        if len(asked) == 1:
            over.wait()
        failed.append(time.monotonic())
        return says("I cannot say.")

    flags = "--judge_tries=1 --warmup_sft_steps=0 --eval_size=0 --max_prompt_tokens=16".split()
    flags += [f"--agent={tmp_path}/mine.py:solve"] if agent else ["--reward=judge"]
    with answering(respond) as (url, asked):
        flags += [f"--judge={url}", f"--judge_prompt={prompt_file}"]
        error = error_of_run(run, *flags)
        ended = time.monotonic()
        over.set()
    assert "failed 1 times: no line ends in 'score: '" in error
    assert ended - failed[0] < 20
    wait_for(lambda: not processes_of(run), 10)
