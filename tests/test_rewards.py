"""
Rewards: which number a response ends up with, weighted sums, the user's own functions, and how they fail.

    pytest tests/test_rewards.py
"""

import json
import math
import re
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import torch

import rewards
from configurator import check_config, configure
from onecurve.graders import judges
from onecurve.graders.checks import check_answers, try_own
from onecurve.keys.prompts import sources_of
from onecurve.run.scores import by_source, pass_rates, reward_metrics
from rewards import (
    Reward,
    RewardError,
    arithmetic,
    encode_prompts,
    exact,
    final_number,
    load_reward,
    load_rows,
    load_sources,
    numeric,
    rows_of_step,
    score,
)
from sync import Group
from train_grpo import DEFAULTS

GSM8K = "He sells 48/2=<<48/2=24>>24 clips.\nAltogether 48+24=<<48+24=72>>72.\n#### 72"  # a solution in GSM8K's form
ARABIC_42 = "\u0664\u0662"  # 42 in Arabic-Indic digits


@pytest.fixture
def write(tmp_path):
    def run(source, name="my_file.py"):
        (tmp_path / name).write_text(source, encoding="utf-8")
        return str(tmp_path / name)

    return run


def json_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def refuse(refusal):
    """refuse(spec): why load_reward refuses a spec."""

    def why(spec):
        name, line = refusal(load_reward, spec).split(f"reward={spec!r}: ")
        assert name == "error: "
        return line

    return why


def failure(reward, response="abcd", answer="1"):
    """The one line with which score reports a reward that failed."""
    with pytest.raises(RewardError) as error:
        score(reward, "prompt", response, answer, "step 3, prompt 5, sample 1")
    line = str(error.value)
    assert "\n" not in line
    return line


# ------------------------------------------------------------------------------------------------------------------
# numeric


@pytest.mark.parametrize(
    "response, number",
    [
        # the last number, when nothing is marked
        ("First 3 apples, then 4, so 7.", 7),
        ("", None),
        # marks: the last one decides, whatever comes behind it
        ("#### 42\nLet me check: 6 * 7 is 42 in 1 step", 42),
        ("#### 41 #### 42", 42),
        ("####\n42", 42),
        ("42 it is. #### I do not know", None),
        (r"so \boxed{42} because of 7", 42),
        (r"\boxed {42} of 7", 42),
        (r"\boxed{\text{\$}42} in 7 days", 42),
        (r"\boxed{\frac{3}{4}}", Fraction(3, 4)),
        (r"\boxed{-\dfrac{3}{4}}", Fraction(-3, 4)),
        (r"\boxed{1{,}234}", 1234),
        (r"42 and \boxed{}", None),
        (r"\boxed{41} or rather #### 42", 42),
        (r"#### Step 3: \boxed{42}", 3),  # a mark is a line's, not a heading: the honest doubt of this convention
        ("#### 41\n" + r"\boxed{42}", 42),
        ("The answer is 42. I used 3 steps.", 42),
        ("The answer is 41. No: the ANSWER IS\n\n**42**.", 42),
        ("The answer is 7. #### 42", 42),
        ("So 7 is what the answer is", None),
        # how numbers are written
        ("$1,234,567.50", Fraction("1234567.5")),
        ("1,2345", 2345),
        ("12,34", 34),
        ("42.0", 42),
        ("It is 42.", 42),
        ("0042", 42),
        (".5", Fraction(1, 2)),
        ("-.5", Fraction(-1, 2)),
        ("Rs.500", 500),
        ("3 / 4", Fraction(3, 4)),
        ("6/8 of it", Fraction(3, 4)),
        ("1,000/2.5", 400),
        ("3/0", None),
        # signs, and minus as an operation
        ("-42", -42),
        ("+42", 42),
        ("it is \u221242", -42),
        ("-$42", -42),
        ("$-42$", -42),
        (r"-\$42", -42),
        ("50-8", 8),
        ("(50)-8", 8),
        ("- 42", 42),
        # scripts and lengths that int() treats in its own way
        ("7 or \u00b2 or \u2167 or \U0001d7dc", 7),
        ("9" * 100_000, None),
        ("0." + "3" * 100_000, None),
    ],
)
def test_the_final_number_of_a_response(response, number):
    assert final_number(response) == number


def test_numeric_compares_exactly():
    assert numeric("", "0.1", "0.1") == 1.0
    assert numeric("", "0.3", "0.30000000000000001") == 0.0  # equal as floats
    assert numeric("", "9007199254740993", "9007199254740992") == 0.0  # 2**53 + 1, equal as floats too
    assert numeric("", "2/6", "1/3") == 1.0 and numeric("", "0.333", "1/3") == 0.0


def test_numeric_reads_plain_answers_and_gsm8k_solutions():
    for answer in ("72", " 72 ", "72.0", "$72", "+72", "72%", GSM8K):
        assert numeric("", "That makes 72 clips.", answer) == 1.0
        assert numeric("", "That makes 48 clips.", answer) == 0.0
    assert numeric("", "1234", "so\n#### 1,234") == 1.0
    assert numeric("", "-5", "\u22125") == 1.0


def test_numeric_refuses_an_answer_that_is_no_number():
    """A data set of another kind must not score 0 for a whole run; nor 1, for the last digit of `(2, 3)`."""
    for answer in ("", "Paris", "(2, 3)", "2x+3", "1/0", "9" * 5000, ARABIC_42, "#### none"):
        with pytest.raises(ValueError, match="is neither a number nor ends in '#### 42'"):
            numeric("", "3", answer)


PIECES = ["1", "1,", "111,", "1 / ", "-", ".", "#", "####\n", "answer is", r"\boxed{", r"\boxed{{", "{a}", r"\frac{1"]


@pytest.mark.parametrize("piece", PIECES)
def test_no_text_takes_more_than_linear_time(piece):
    started = time.perf_counter()
    for text in (piece * 30_000, r"\boxed{" + piece * 30_000, piece * 30_000 + "1111"):
        final_number(text)
    assert time.perf_counter() - started < 5  # about 0.05 s here; quadratic would be minutes


# ------------------------------------------------------------------------------------------------------------------
# exact and format


def test_exact_ignores_only_the_white_space_around():
    assert exact("", " 42\n", "42") == 1.0
    assert exact("", "42.0", "42") == exact("", "4 2", "42") == exact("", "", "42") == 0.0


@pytest.mark.parametrize(
    "response, value",
    [
        ("<think>6 * 7</think>42", 1.0),
        ("\n<think>\n6 * 7\n</think>\n\n42\n", 1.0),
        ("<think></think>42", 1.0),
        ("<think>6 * 7</think> \n", 0.0),
        ("<think>6 * 7 42", 0.0),
        ("6 * 7</think>42", 0.0),
        ("</think>6 * 7<think>42", 0.0),
        ("So: <think>6 * 7</think>42", 0.0),
        ("<think><think>6 * 7</think>42", 0.0),
        ("<think>6 * 7</think></think>42", 0.0),
        ("<THINK>6 * 7</THINK>42", 0.0),
    ],
)
def test_format_wants_one_thought_and_then_an_answer(response, value):
    assert rewards.format("6 * 7?", response, "42") == value


def test_format_counts_the_tag_that_a_chat_template_has_opened():
    assert rewards.format("6 * 7?<think>\n", "6 * 7</think>42", "42") == 1.0
    assert rewards.format("6 * 7?<think>\n", "<think>6 * 7</think>42", "42") == 0.0


# ------------------------------------------------------------------------------------------------------------------
# load_reward


def test_a_spec_is_a_weighted_sum():
    response = "<think>6 * 7</think>42"
    assert load_reward("numeric+0.2*format")("", response, "42")[0] == 1.2
    assert load_reward(" numeric + 0.2 * format ")("", response, "41")[0] == 0.2
    assert load_reward("2*numeric + -.5*format+exact")("", response, "42")[0] == 1.5
    assert load_reward("1e-2*numeric")("", response, "42")[0] == 0.01


def test_a_sum_is_rounded_once(write):
    """The sum() of Python 3.12 compensates and that of 3.11 does not: the same run would have other rewards."""
    assert 0.1 + 0.1 + 0.1 != 0.3
    file = write("def one(prompt, response, answer): return 1")
    assert load_reward("+".join([f"0.1*{file}:one"] * 10))("", "", "")[0] == 1.0


def test_a_function_of_the_users_file_gets_all_three_texts(write):
    file = write("def joined(prompt, response, answer): return prompt + response + answer == 'pra'\n")
    reward = load_reward(f"numeric + 0.5*{file}:joined")
    assert reward("p", "r", "1") == (0.0, {"numeric": {"reward": 0.0}, f"{file}:joined": {"reward": 0.0}})
    assert load_reward(f"{file}:joined")("p", "r", "a")[0] == 1.0


def test_a_parameter_row_gets_all_columns_and_other_rows_keep_none(write):
    data = write(json_lines(dict(prompt=f"{i}", answer="2", level=[i]) for i in range(3)), "x.jsonl")
    own = write("def f(prompt, response, answer, row): return row['level'][0]\ndef g(p, r, a): return 1\n")
    config = DEFAULTS | dict(dataset=data, eval_size=1, prompt_template="Q{prompt}")
    for spec, keeps in ((f"{own}:f + 10*{own}:g + exact", True), (f"{own}:g", False)):
        reward = load_reward(spec)
        training, held_out = load_sources(config, {"": reward})
        for row in training[""] + held_out:
            assert ("columns" in row) == keeps
            if keeps:
                i = int(row["prompt"][1:])
                assert row["columns"] == dict(prompt=str(i), answer="2", level=[i])
                assert reward(row["prompt"], "", row["answer"], row=row["columns"])[0] == 10 + i


@pytest.mark.parametrize(
    "source, complaint",
    [
        ("def f(p, r): return 1", "TypeError: f() takes 2 positional arguments but 3 were given"),
        ("def f(p, r, a): pass", "my_file.py:f returned None, not a finite number"),
        ("def f(p, r, a): return a['x']", "TypeError: string indices must be integers, not 'str' (my_file.py:1)"),
        ("def f(p, r, a, row): return row['missing']", "KeyError: 'missing' (my_file.py:1)"),
        ("def f(p, r, a): return 1, dict(x={1})", "TypeError: Object of type set is not JSON serializable"),
        ("def f(p, r, a): return 1, 2", "my_file.py:f returned (1, 2), not a finite number"),
        ("import os\ndef f(p, r, a): return os.chdir('/') or 1", "ValueError: it changes the working directory, or"),
    ],
)
def test_a_reward_that_cannot_work_is_refused_before_anything_is_built(
    write, source, complaint, refusal, monkeypatch, capsys
):
    monkeypatch.chdir(".")  # which is undone at the end
    waits = Reward(lambda *_: pytest.fail("a built-in reward may wait for a machine"))
    monkeypatch.setitem(rewards.BUILT_IN, "exact", waits)
    rows = [dict(prompt="1+1=", answer="2", columns={"level": 1}), dict(prompt="", answer="")]
    try_own({"": load_reward("exact")}, rows)
    assert not capsys.readouterr().out
    line = refusal(try_own, {"": load_reward(f"exact + 0*{write(source)}:f")}, rows)
    assert line.startswith("error: reward failed on the first row, with its answer as the response: ")
    assert complaint in line and line.endswith("; response '2'")
    clock = write("n = []\ndef f(p, r, a): return n.append(1) or len(n)", "clock.py")
    try_own({"": load_reward(f"{clock}:f")}, rows)
    assert "reward: gives 1.0, and then 2.0, for one sample: it is no function" in capsys.readouterr().out


def test_what_a_function_says_beside_its_number_is_noted_and_counted(write):
    file = write("def f(p, r, g): return len(r), dict(verdict=r, near_limit=r != 'pass')\n")
    reward = load_reward(f"exact + 0*{file}:f")
    noted = [score(reward, "", response, "pass", "here") for response in ("pass", "limit", "limit", "failed")]
    assert [number for number, _ in noted] == [1, 0, 0, 0]
    group = ({}, {"noted": [terms for _, terms in noted]})
    metrics = reward_metrics([group, ({}, {"noted": [{}, {}]}), ({}, {})])  # unfinished samples; an agent's
    assert metrics.pop("reward_exact") == 0.25 and metrics.pop("limits") == 2 and metrics.pop("near_limit") == 3
    assert list(metrics.values()) == [5.0] and next(iter(metrics)).endswith(":f")
    alone = ({}, {"noted": [score(load_reward("exact"), "", "a", "b", "here")[1]]})
    assert reward_metrics([alone]) == reward_metrics([]) == {}


def test_notes_may_have_any_names_and_are_what_a_rollout_file_keeps(write):
    file = write("def f(p, r, g): return 1, dict(verdict='good', reward='high') | {1: (2, 3)}\n")
    _, noted = score(load_reward(f"exact + {file}:f"), "", "", "b", "here")
    assert noted[f"{file}:f"] == {"verdict": "good", "reward": 1.0, "1": [2, 3]}
    assert reward_metrics([({}, {"noted": [noted]})]) == {"reward_exact": 0.0, f"reward_{file}:f": 1.0}


def test_functions_of_the_user_run_one_at_a_time(write):
    """They are called from several threads, and need not be thread-safe."""
    lines = "inside.append(1)", "time.sleep(0.01)", "return inside.pop() + len(inside)"
    file = write("import time\ninside = []\ndef f(p, r, g):\n    " + "\n    ".join(lines))
    reward = load_reward(f"{file}:f")
    with ThreadPoolExecutor(8) as pool:
        assert {number for number, _ in pool.map(lambda _: reward("", "", ""), range(16))} == {1}


def test_a_file_is_run_once(write):
    file = write("runs = []\nruns.append(1)\ndef a(p, r, g): return len(runs)\ndef b(p, r, g): return len(runs)\n")
    assert load_reward(f"{file}:a+{file}:b")("", "", "")[0] == load_reward(f"{file}:a + {file}:b")("", "", "")[0] == 2.0


def test_two_files_of_one_name_are_two_modules(write, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write(f"def f(p, r, g): return {ord(folder)}", f"{folder}/same.py")
    assert load_reward(f"{tmp_path}/a/same.py:f")("", "", "")[0] == ord("a")
    assert load_reward(f"{tmp_path}/b/same.py:f")("", "", "")[0] == ord("b")


def test_a_file_is_sought_in_the_working_folder_then_beside_rewards_py(write, tmp_path, monkeypatch):
    write("def f(p, r, g): return 1", "near.py")
    monkeypatch.chdir(tmp_path)
    assert load_reward("near.py:f")("", "", "")[0] == 1.0
    assert load_reward("rewards.py:exact")("", "a", "a")[0] == 1.0


def test_a_file_may_hold_dataclasses(write):
    """Those look up their module in sys.modules, where a module loaded by hand is not unless one puts it there."""
    imports = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    file = write(imports + "@dataclass\nclass A:\n    x: int = 3\ndef f(p, r, g): return A().x\n")
    assert load_reward(f"{file}:f")("", "", "")[0] == 3.0


KNOWN = f"Use {', '.join(rewards.BUILT_IN)} or"


@pytest.mark.parametrize(
    "spec, complaint",
    [
        ("numerc", f"no such reward as 'numerc'; did you mean numeric? {KNOWN} 'my_fi"),
        ("exact+fromat", "no such reward as 'fromat'; did you mean format?"),
        ("zzz", "no such reward as 'zzz'. Use exact"),
        ("", "no such reward as ''. Use exact"),
        ("numeric+", "no such reward as ''. Use exact"),
        ("my_file.py", f"no such reward as 'my_file.py'. {KNOWN} 'my_file.py:my_function'"),
        ("a+b/my.py:f", f"no such reward as 'a'. {KNOWN} 'my_file.py:my_function' (no + "),
        ("a*b/my_file.py:f", "weight 'a' is not a number, as in 0.2*format (and a path cannot contain *)"),
        ("*numeric", "weight '' is not a number"),
        ("nan*numeric", "weight 'nan' is not a number"),
        ("1e999*numeric", "weight '1e999' is not a number"),
        ("2*3*numeric", "weight '2*3' is not a number"),
        ("numeric-0.5*exact", "weight 'numeric-0.5' is not a number"),
        ("0.2*", "no such reward as ''"),
        ("no/such/file.py:f", f"no file no/such/file.py in {Path(rewards.__file__).parent}"),  # from there only once
    ],
)
def test_a_wrong_spec_is_refused_in_one_line(refuse, spec, complaint):
    assert refuse(spec).startswith(complaint)


def test_a_function_that_is_missing_or_none_is_refused(write, refuse):
    file = write("LIMIT = 3\ndef brevity(p, r, g): return 1\n")
    assert refuse(f"{file}:brevty") == f"{file} has no function 'brevty'; did you mean brevity?"
    assert refuse(f"{file}:LIMIT") == f"{file} has no function 'LIMIT'"
    assert refuse(f"{file}:") == f"{file} has no function ''"


def test_a_file_that_fails_to_load_is_refused_and_may_be_mended(write, refuse, monkeypatch):
    monkeypatch.chdir(".")  # which is undone at the end
    for source, why in (
        ("x = 1\ny = = 2\n", "SyntaxError: invalid syntax (my_file.py, line 2)"),
        ("raise SystemExit('bye')", "SystemExit: bye (my_file.py:1)"),
        ("raise ValueError('two\\nlines')", "ValueError: two"),
        ("import json\nx = 1 / 0\n", "ZeroDivisionError: division by zero (my_file.py:2)"),
        ("import os\nos.chdir('/')", "ValueError: it changes the working directory, or torch's dtype"),
    ):
        file = write(source)
        assert f"{file} does not load: {why}" in refuse(f"{file}:f")
        assert file not in sys.modules
    write("def f(p, r, g): return 12345678")  # a longer file, so that no cached bytecode is taken for it
    assert load_reward(f"{file}:f")("", "", "")[0] == 12345678.0


# ------------------------------------------------------------------------------------------------------------------
# score


@pytest.mark.parametrize("value", [1, 0.5, True, Fraction(1, 2), Decimal("0.5")])
def test_any_finite_real_number_is_a_score(value):
    result, notes = score(lambda p, r, g: value, "", "", "", "here")
    assert result == float(value) and type(result) is float and notes == {}


def test_scalars_of_numpy_and_torch_are_scores():
    numpy = pytest.importorskip("numpy")
    for value in (numpy.float32(0.5), numpy.bool_(True), numpy.array(0.5), torch.tensor(0.5), torch.tensor([0.5])):
        assert score(lambda p, r, g: value, "", "", "", "here") == (float(value), {})
    for value in (numpy.zeros(2), torch.zeros(2), torch.tensor(float("nan"))):
        assert "not a finite number" in failure(lambda p, r, g: value)


@pytest.mark.parametrize("value", [None, "1.0", b"1", float("nan"), float("inf"), 1e39, 10**400, 1j, [1]])
def test_anything_else_is_an_error_and_not_a_zero(value):
    assert f"returned {value!r}"[:60] in failure(lambda p, r, g: value)
    assert "reward failed on step 3, prompt 5, sample 1: TypeError: " in failure(lambda p, r, g: value)


@pytest.mark.parametrize(
    "source, answer, why",
    [
        # not the line in json/decoder.py
        ("import json\ndef g(r):\n  return json.loads(r)\ndef f(p, r, a):\n  return g(r)", "", "JSONDecodeError: .*:3"),
        ("def f(p, r, a):\n  return 1 / len(a)", "", "ZeroDivisionError: division by zero .*:2"),
        # it would end the engine's process with status 0, as if the run were complete
        ("import sys\ndef f(p, r, a): sys.exit(0)", "", "SystemExit: 0 .*:2"),
    ],
)
def test_a_function_that_raises_is_reported_with_its_line(write, source, answer, why):
    line = failure(load_reward(write(source) + ":f"), answer=answer)
    where = "reward failed on step 3, prompt 5, sample 1"
    assert re.fullmatch(rf"{where}: {why}\); response 'abcd'", line), line


def test_a_report_is_one_short_line_whatever_the_texts(write):
    reward = load_reward(write("def f(p, r, g):\n    raise ValueError(r * 2)\n") + ":f")
    line = failure(reward, response="two\nlines " * 1000)
    assert len(line) < 500 and "response 'two\\nlines two" in line


@pytest.mark.parametrize(
    "spec,good,bad",
    [
        ("0.5*numeric + format", "so #### 42", "Paris"),
        ("math", r"\frac{1}{2}", "Paris"),
        ("code", "assert f(1) == 2", "assert f(1)"),
    ],
)
def test_an_answer_that_a_reward_cannot_read_is_refused_first(spec, good, bad, refusal):
    read = dict(prompt="How many?", answer=good)
    unread = dict(prompt="Where?", answer=bad)
    rewards = {"": load_reward(spec, DEFAULTS)}
    check_answers(rewards, [read], DEFAULTS)
    line = refusal(check_answers, rewards, [read, unread], DEFAULTS)
    assert "answer_column='answer': for prompt 'Where?'" in line
    check_answers({"": load_reward("exact", DEFAULTS)}, [unread], DEFAULTS)


def test_ctrl_c_is_not_caught():
    def interrupted(prompt, response, answer):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(interrupted, "", "", "", "here")


# ------------------------------------------------------------------------------------------------------------------
# arithmetic


def test_arithmetic_has_every_pair_in_a_fixed_order():
    rows = arithmetic()
    assert len(rows) == 10_000 and rows[0] == dict(prompt="0+0=", answer="0", a=0, b=0)
    assert rows[1725] == dict(prompt="17+25=", answer="42", a=17, b=25)
    assert [row["prompt"] for row in arithmetic(high=2)] == ["0+0=", "0+1=", "1+0=", "1+1="]
    assert all(numeric(row["prompt"], row["answer"], row["answer"]) == 1.0 for row in rows[::97])


def test_rows_depend_on_seed_and_step_and_cover_each_epoch_once():
    steps = [rows_of_step(10, 4, s, 1, "rl") for s in range(5)]
    assert rows_of_step(10, 4, 3, 1, "rl") == steps[3]
    flat = sum(steps, [])
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10)) and flat[:10] != flat[10:]
    assert rows_of_step(10, 4, 0, 2, "rl") != steps[0]


def test_pass_rates_are_means_over_prompts_with_their_interval():
    rewards = torch.tensor([[1.0, 0.0, 0.4, 0.5], [0.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5]])
    rates = pass_rates(rewards, 0.5)  # 2, 0 and 4 of 4 are right
    assert list(rates) == ["eval_reward_mean", *(f"pass@{k}{x}" for k in (1, 2, 4) for x in ("", "_ci95"))]
    assert rates["eval_reward_mean"] == pytest.approx(3.9 / 12)
    for k, chances in ((1, [1 / 2, 0, 1]), (2, [5 / 6, 0, 1]), (4, [1, 0, 1])):
        mean = sum(chances) / 3
        spread = math.sqrt(sum((x - mean) ** 2 for x in chances) / 2)
        assert rates[f"pass@{k}"] == pytest.approx(mean)
        assert rates[f"pass@{k}_ci95"] == pytest.approx(1.96 * spread / math.sqrt(3))
    assert pass_rates(rewards[:1], 0.5)["pass@1_ci95"] == 1  # and not NaN, which JSON has not


def test_jsonl_and_parquet_give_rows_by_named_columns_and_a_template(write, tmp_path):
    import datasets

    rows = [{"q": f"is {i} even?", "a": i % 2 == 0, "hint": "think"} for i in range(9)]
    write(json_lines(rows), "x.jsonl")
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "x.parquet")
    for name in ("x.jsonl", "x.parquet"):
        config = DEFAULTS | dict(dataset=str(tmp_path / name), prompt_column="q", answer_column="a", eval_size=2)
        data, held_out = load_rows(config | dict(prompt_template="{hint}: {q}"))
        assert len(data) == 7 and len(held_out) == 2
        assert {r["prompt"] for r in data + held_out} == {f"think: is {i} even?" for i in range(9)}
        assert all(r["answer"] == str(int(r["prompt"].split()[2]) % 2 == 0) for r in data)


def test_held_out_rows_are_the_same_for_every_seed_and_never_trained_on():
    data, held_out = load_rows(DEFAULTS)
    again = load_rows(DEFAULTS | dict(seed=2))
    assert (data, held_out) == again and len(held_out) == DEFAULTS["eval_size"]
    assert held_out != rewards.arithmetic()[: len(held_out)]  # a fair sample, not the first ones
    assert not {r["prompt"] for r in data} & {r["prompt"] for r in held_out}


def test_a_split_of_its_own_is_held_out_up_to_eval_size(write, tmp_path, refusal):
    for split in ("train", "test"):
        write(json_lines(dict(prompt=f"{split} {i}", answer="") for i in range(5)), f"{split}.jsonl")
    data, held_out = load_rows(DEFAULTS | dict(dataset=str(tmp_path), eval_split="test", eval_size=3))
    assert [r["prompt"] for r in data] == [f"train {i}" for i in range(5)]
    assert [r["prompt"] for r in held_out] == [f"test {i}" for i in range(3)]
    files = dict(dataset=str(tmp_path / "train.jsonl"), eval_split=str(tmp_path / "test.jsonl"), eval_size=3)
    assert load_rows(DEFAULTS | files) == (data, held_out)
    sums, others = load_rows(DEFAULTS | files | dict(dataset="arithmetic"))
    assert (len(sums), others) == (10_000, held_out)
    (tmp_path / "test.jsonl").write_text('{"prompt": "1+1="}\n')
    assert load_rows(DEFAULTS | files | dict(eval_size=0)) == (data, [])
    line = refusal(load_rows, DEFAULTS | files)
    assert "answer_column='answer': the held-out set has the columns prompt" in line


def test_sources_have_keys_rewards_and_held_out_rows_of_their_own(write):
    file = write(json_lines(dict(q=str(i), a="yes") for i in range(9)), "x[1].jsonl")  # no pattern
    words = dict(dataset=file, prompt_column="q", answer_column="a", eval_size=2, reward="exact")
    only_seen = dict(dataset="arithmetic:0:3", eval_size=9, weight=0)
    config = DEFAULTS | dict(sources=f"words={words}, sums={dict(weight=3)}, small={only_seen}")
    training, held_out = load_sources(config)
    assert {name: len(rows) for name, rows in training.items()} == dict(words=7, sums=10_000 - 256)
    assert [row["source"] for row in held_out] == ["words"] * 2 + ["sums"] * 256 + ["small"] * 9
    assert all(row["source"] == name for name, rows in training.items() for row in rows)
    rewards = {name: own["reward"] for name, own in sources_of(config).items()}
    assert rewards == dict(words="exact", sums="numeric", small="numeric")
    plain, others = load_rows(DEFAULTS)
    assert load_sources(DEFAULTS) == ({"": plain}, others)
    groups = [Group({"rewards": torch.tensor([x, 1.0])}, dict(source=name)) for name, x in (("a", 0.0), ("b", 1.0))]
    assert reward_metrics(groups) == {"a/reward_mean": 0.5, "b/reward_mean": 1.0}
    assert by_source([Group({}, {})]) == by_source([Group({}, dict(source=""))]) == {}


def test_the_presets_for_math_read_their_sources_columns(monkeypatch):
    columns = {
        "openai/gsm8k": dict(question="1+1", answer="2 is it\n#### 2"),
        "DigitalLearningGmbH/MATH-lighteval": dict(problem="1+1", solution="It is $\\boxed{2}$.", level="Level 1"),
        "HuggingFaceH4/MATH-500": dict(problem="1+1", solution="It is $\\boxed{2}$.", answer="2", subject="Algebra"),
        "open-r1/DAPO-Math-17k-Processed": dict(prompt="1+1", solution="2", data_source="math_dapo"),
        "HuggingFaceH4/aime_2024": dict(id=60, problem="1+1", solution="It is..", answer="2", year="2024"),
    }
    monkeypatch.setattr(rewards, "load_split", lambda name, configuration, split: [columns[name]] * 600)
    presets = dict(math=("math500", 500), dapo_17k=("aime24", 30))
    for preset, (held_out, size) in presets.items():
        config = configure(dict(DEFAULTS), [f"config/{x}.py" for x in ("qwen3_8b", preset)])
        check_config(config, 8, DEFAULTS)
        training, others = load_sources(config)
        assert [(name, len(rows)) for name, rows in training.items()] == [("train", 600)]
        assert [row["source"] for row in others] == [held_out] * size
        for row in training["train"] + others:
            assert row["prompt"].startswith("1+1\nPlease") and row["prompt"].endswith("within \\boxed{}.")
            assert judges.expression(row["answer"]) in ("It is $\\boxed{2}$.", "\\boxed{2}")


def by_bytes(texts, add_special_tokens):
    """A tokenizer."""
    return {"input_ids": [list(text.encode()) for text in texts]}


def test_long_prompts_are_dropped_in_one_line_that_counts_them(capsys):
    rows = [{"prompt": "x" * n, "answer": ""} for n in (3, 300, 0, 5, 400)]
    kept = encode_prompts(rows, "training", by_bytes, DEFAULTS)
    assert [len(r["prompt_tokens"]) for r in kept] == [3, 5]
    assert capsys.readouterr().out == "dropped 3 of 5 training prompts: 1 empty, 2 over max_prompt_tokens=256\n"


def test_a_prompt_may_be_messages_which_the_chat_template_writes(write):
    tokenizer = partial(by_bytes)
    tokenizer.chat_template = "its own"
    tokenizer.apply_chat_template = lambda messages, **_: "".join(f"<{m['role']}>{m['content']}" for m in messages)
    system = dict(role="system", content="Be brief.")
    user = dict(role="user", content="1+1?")
    prompts = [[user], [system, user], "2+2?"]
    rows = [dict(prompt=prompt, reward_model=dict(style="rule", ground_truth="4")) for prompt in prompts]
    config = DEFAULTS | dict(
        dataset=write(json_lines(rows[:2]), "x.jsonl"),
        answer_column="reward_model.ground_truth",
        eval_size=0,
        chat_template=True,
        system_prompt="Think.",
    )
    read, _ = load_rows(config)
    assert [row["answer"] for row in read] == ["4", "4"]
    nested = rewards.row_of(dict(asked=dict(text="1+1=")) | rows[0], config | dict(prompt_column="asked.text"))
    assert nested["prompt"] == "1+1="
    read.append(rewards.row_of(rows[2], config))
    encoded = encode_prompts(read, "training", tokenizer, config)
    written = ["<system>Think.<user>1+1?", "<system>Be brief.<user>1+1?", "<system>Think.<user>2+2?"]
    assert [rewards.text_of(row) for row in encoded] == written
    assert [row["prompt"] for row in encoded] == prompts
    # a function of the user's gets what is in the data, and the other if it wants it; what is built in gets the other
    name = write("def f(prompt, r, a, prompt_text): return prompt != prompt_text == r\n") + ":f"
    row = encoded[0]
    call = partial(load_reward(f"{name} + format"), written=row["prompt"])
    for response, value in ((row["prompt_text"], 1), ("4", 0)):
        assert score(call, row["prompt_text"], response, "4", "here")[1][name]["reward"] == value
    try_own({"": load_reward(name)}, encoded)


@pytest.mark.parametrize(
    "row,change,problem",
    [
        (dict(prompt=[dict(role="user", content="Hi")]), {}, "; use --chat_template, for a list of messages"),
        (
            dict(prompt=["Hi"]),
            dict(chat_template=True),
            "prompt_column='prompt': no text: ['Hi']; use a column of texts",
        ),
        (
            dict(at=date(2026, 1, 1)),
            dict(agent="x.py:f"),
            "agent='x.py:f': a column for prompt '1+1=': Object of type date is not JSON serializable; leave it out",
        ),
        (dict(answer=None), {}, "answer_column='answer': for prompt '1+1=' it is no text but None; use a column of "),
        (dict(q=dict(text="")), dict(prompt_column="q.other"), "prompt_column='q.other': no text: None; use a column"),
        (dict(answer=dict(ground_truth="2")), {}, "for prompt '1+1=' it is no text but {'ground_truth': '2'}; use"),
    ],
)
def test_what_is_no_text_is_not_trained_on(row, change, problem, refusal):
    assert problem in refusal(rewards.row_of, dict(prompt="1+1=", answer="2") | row, DEFAULTS | change)


def test_a_data_set_may_be_a_function_of_a_file(write, refusal):
    file = write("""
def rows(count=3, held_out=False):
    return [dict(prompt=f"{i}?", answer=str(i)) for i in range(count + held_out)]

def wrong():
    return [][0]

def nothing():
    return None

def empty():
    return []

def texts():
    return ["1?"]

def one_by_one():
    yield from rows()
""")
    config = DEFAULTS | dict(dataset=f"{file}:rows", dataset_config="count=5", eval_size=2)
    training, held_out = load_rows(config)
    assert sorted(row["prompt"] for row in training + held_out) == [f"{i}?" for i in range(5)]
    training, held_out = load_rows(config | dict(eval_split=f"{file}:rows", dataset_config=""))
    assert (len(training), len(held_out)) == (3, 2)
    none = config | dict(eval_split=f"{file}:empty", dataset=f"{file}:rows", dataset_config="")
    assert f"error: eval_split='{file}:empty': has no rows" in refusal(load_rows, none)
    assert load_rows(none | dict(eval_size=0))[1] == []
    assert len(load_rows(config | dict(dataset=f"{file}:one_by_one", dataset_config=""))[0]) == 1
    assert len(load_rows(config | dict(dataset="x.jsonl", split=f"{file}:rows"))[0]) == 3
    for name, problem in (
        ("no", "has no function 'no'"),
        ("wrong", "IndexError: list index out of range (my_file.py:"),
        ("nothing", "TypeError: 'NoneType' object is not iterable"),
        ("texts", "wants rows that are dicts, such as"),
    ):
        line = refusal(load_rows, config | dict(dataset=f"{file}:{name}", dataset_config=""))
        assert line.startswith(f"error: dataset='{file}:{name}': ") and problem in line


def test_a_chat_template_that_cannot_be_used_is_refused(refusal):
    tokenizer = types.SimpleNamespace(chat_template=None)
    line = refusal(encode_prompts, [], "training", tokenizer, DEFAULTS | dict(chat_template=True))
    assert "chat_template=True: the model's tokenizer has none" in line
    tokenizer.chat_template = "its own"
    tokenizer.apply_chat_template = lambda *_, **__: {}["system"]
    line = refusal(encode_prompts, [dict(prompt="1+1?")], "training", tokenizer, DEFAULTS | dict(chat_template=True))
    assert "chat_template=True: for prompt '1+1?': 'system'" in line


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(dataset="nowhere.jsonl"), "dataset='nowhere.jsonl': no such file"),
        (dict(prompt_column="question"), "prompt_column='question': the data set has the columns a, answer, b, prompt"),
        (dict(answer_column="label"), "answer_column='label'"),
        (dict(prompt_template="{q}"), "prompt_template='{q}': KeyError: 'q'; the data set has the columns a"),
        (dict(prompt_template="{a.b}"), "'{a.b}': AttributeError: 'int' object has no attribute 'b'; the data set"),
        (dict(prompt_template="{answer[b]}"), "'{answer[b]}': TypeError: string indices must be integers"),
        (dict(dataset="pyproject.toml"), "dataset='pyproject.toml': a file, but not one of .jsonl, .json, .parquet"),
        (dict(dataset="arithmetic:5:5"), "dataset='arithmetic:5:5': has no rows; use another, or another split"),
        (dict(dataset="arithmetic:0:99999"), "dataset='arithmetic:0:99999': of 99999 numbers; use 2000 or less"),
        (dict(eval_size=10000), "eval_size=10000: dataset='arithmetic' has 10000 rows"),
        (dict(eval_split="test"), "eval_split='test': dataset='arithmetic' has no splits; use '', or a file or"),
        (dict(dataset="x.jsonl", eval_split="test"), "eval_split='test': dataset='x.jsonl' has no splits"),
        (dict(dataset_config="main"), "dataset_config='main': dataset='arithmetic' has none; use ''"),
        (dict(dataset="x.jsonl", dataset_config="main"), "dataset_config='main': dataset='x.jsonl' has none"),
        (dict(dataset="a.py:f", split="test"), "split='test': dataset='a.py:f' has no splits; use 'train', or"),
        (dict(split="a.jsonl"), "split='a.jsonl': dataset='arithmetic' has no splits; use 'train', or"),
    ],
)
def test_data_that_is_not_there_is_refused_in_one_line(change, message, refusal):
    assert message in refusal(load_rows, DEFAULTS | change)


def test_a_broken_line_of_a_file_is_named(write, refusal):
    name = write('{"prompt": "1", "answer": "1"}\n\n{"prompt": "2", "answer": "2}\n', "x.jsonl")
    line = refusal(load_rows, DEFAULTS | dict(dataset=name))
    assert line == f"error: dataset={name!r}: line 3: Unterminated string starting at"
    name = write('null\n{"prompt": "1", "answer": "1"}\n', "x.jsonl")  # a segmentation fault of pyarrow's
    assert refusal(load_rows, DEFAULTS | dict(dataset=name)) == f"error: dataset={name!r}: its first row is null"
