"""
The lessons: what each prints is what its page shows, on this CPU and on others.

    pytest tests/test_lessons.py
"""

import json
import os
import platform
import re
import runpy
import string
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import shared_memory
from test_readme import size_of
from trials import ROOT

import train_grpo
from configurator import configure

SCRIPTS = sorted((ROOT / "learn" / "lessons").glob("[0-9]*.py"), key=lambda script: int(script.stem.partition("_")[0]))
*WITHOUT_ENGINE, RESUME, LETTERS, MACHINES = SCRIPTS  # the last but one takes minutes and a model of another package
# As in test_laws.py, which has the loops compiled for it: the other instruction set.
SSE2 = dict(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="", ATEN_CPU_CAPABILITY="default")

# Imports what the lessons import, once, and runs each in a fork, from which on it is as if it had been typed. What is
# printed goes into a folder, the first argument; a script after the argument 'plain' has torch's own operators.
RUN = """
import os, runpy, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
import kernels, train_grpo, transformers.models.qwen3.modeling_qwen3
folder, *scripts = sys.argv[1:]
for script in scripts:
    if script == "plain":
        kernels.enable_batch_invariant = lambda: None
    elif not os.fork():
        os.dup2(os.open(Path(folder, Path(script).stem), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        runpy.run_path(script, run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    else:
        assert os.wait()[1] == 0, script
"""


def on_the_page(script):
    """The output that a lesson's page promises: its only block of this kind."""
    (block,) = re.findall(r"```text\n(.*?)```", script.with_suffix(".md").read_text(), re.DOTALL)
    return block


def printed(folder, scripts, env=None):
    """{script: what it printed}."""
    command = [sys.executable, "-c", RUN, folder, *scripts]
    subprocess.run(command, cwd=ROOT, env=os.environ | (env or {}), check=True, timeout=120 * len(scripts))
    return {script: (folder / script.stem).read_text() for script in scripts if script != "plain"}


def typed(script, timeout):
    """What a lesson prints that is run as its page says."""
    command = [sys.executable, str(script.relative_to(ROOT))]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=timeout).stdout


def test_seven_lessons_print_what_their_pages_show(tmp_path):
    assert len(WITHOUT_ENGINE) == 7
    for script, output in printed(tmp_path, WITHOUT_ENGINE).items():
        assert output == on_the_page(script), script.name


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the other setting is that of an x86 CPU")
def test_another_cpu_prints_the_same_and_torchs_operators_other_bits(tmp_path):
    """The last is the control: that a page has bits that can be wrong."""
    by_hand, gradient, mismatch, hacking = (SCRIPTS[i - 1] for i in (3, 4, 5, 7))
    outputs = printed(tmp_path, [by_hand, gradient, hacking, "plain", mismatch], env=SSE2)
    theirs, ours = outputs.pop(mismatch).splitlines(), on_the_page(mismatch).splitlines()
    assert len(theirs) == len(ours) and theirs != ours  # in the digests of the weights at least
    for script, output in outputs.items():
        assert output == on_the_page(script), script.name


@pytest.mark.in_turn
@pytest.mark.parametrize("script", [SCRIPTS[0], SCRIPTS[2], MACHINES], ids=lambda s: s.stem)
def test_a_lesson_runs_as_its_page_says(script):
    assert typed(script, timeout=300) == on_the_page(script)


@pytest.mark.in_turn
def test_the_lesson_with_a_kill_prints_what_its_page_shows():
    """Three engines beside other workers' take longer than on a machine that has nothing else to do."""
    with shared_memory():
        assert typed(RESUME, timeout=400) == on_the_page(RESUME)


def test_the_real_model_lesson_has_its_questions_and_pays_for_the_letter():
    lesson = runpy.run_path(str(LETTERS))
    rows = lesson["rows"]()
    assert len({row["prompt"] for row in rows}) == 104 and {row["answer"] for row in rows} == {*string.ascii_lowercase}
    said = {" P ": 1.5, "Pengu": 1.1, "Cat": 0.0, "The penguin": 0.0, " ": 0.0, "": 0.0}
    assert {text: lesson["letters"]("", text, "p") for text in said} == said
    config = configure(train_grpo.DEFAULTS | {"__file__": train_grpo.__file__}, lesson["FLAGS"].split())
    assert config["reward"] == "learn/lessons/9_letters.py:letters" and config["eval_size"] == 16


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.stem)
def test_a_lesson_is_a_page_and_at_most_60_lines_of_code(script):
    page = script.with_suffix(".md").read_text()
    assert 0 < size_of(script)[0] <= 60
    assert f"    uv run learn/lessons/{script.name}\n" in page and page.count("<summary>Answer</summary>") == 3
    assert f"({script.stem}.md)" in (Path(script).parent / "README.md").read_text()


def test_the_notebook_says_what_to_write_where_there_is_no_repository(tmp_path):
    """tests/notebook.py executes all of it."""
    cells = json.loads((ROOT / "learn" / "notebook.ipynb").read_text())["cells"]
    first = next("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    done = subprocess.run([sys.executable, "-c", first], cwd=tmp_path, capture_output=True, text=True)
    assert "AssertionError: write the address of your copy of onecurve above" in done.stderr and not any(
        tmp_path.iterdir()
    )
