"""
The studies: a part of two of them, whose digests are those of their pages, and what their frame does and refuses.

    pytest tests/test_experiments.py
"""

import contextlib
import re
import runpy
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import error_line
from test_readme import size_of
from trials import ROOT, of_this_commit

pytest.importorskip("matplotlib", reason="no matplotlib: uv sync --group plot")

EXPERIMENTS = ROOT / "experiments"
STUDIES = sorted(path.parent for path in EXPERIMENTS.glob("*/run.py"))
sys.path.insert(0, str(EXPERIMENTS))
import study as frame  # noqa: E402


@pytest.mark.in_turn
@pytest.mark.parametrize("home", [of_this_commit(STUDIES)], ids=lambda home: home.name)
def test_a_part_of_a_study_has_the_digests_of_its_page(home, tmp_path):
    command = [sys.executable, home / "run.py", "--quick", "--jobs=1", f"--out={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " runs, 0 differences from the page" in done.stdout


@pytest.mark.parametrize("home", STUDIES, ids=lambda home: home.name)
def test_a_study_is_a_page_a_picture_digests_and_at_most_60_lines_of_code(home):
    page = (home / "README.md").read_text()
    assert size_of(home / "run.py")[0] <= 60
    assert f"    uv run experiments/{home.name}/run.py\n" in page and f"({home.name}.png)" in page
    assert re.fullmatch(r"(\S+ [0-9a-f]{64} \S+\n)+", (home / "digests.txt").read_text())
    assert f"({home.name}/README.md)" in (EXPERIMENTS / "README.md").read_text()


@pytest.mark.parametrize("home", STUDIES, ids=lambda home: home.name)
def test_the_runs_of_a_study_are_those_of_its_page(home, monkeypatch, tmp_path):
    """Their names end in a hash of their flags. A study goes on until it reads what none of them has written here."""
    names = []

    def make(self, wanted):
        folders = {name: self.folder(name, flags) for name, flags in wanted.items()}
        names.extend(folder.name for folder in folders.values())
        self.folders += folders.values()
        return folders

    monkeypatch.setattr(frame.Study, "make", make)
    monkeypatch.setattr(sys, "argv", ["run.py", f"--out={tmp_path}"])
    monkeypatch.syspath_prepend(home)
    monkeypatch.delitem(sys.modules, "task", raising=False)  # another study's
    with contextlib.suppress(Exception, SystemExit):
        runpy.run_path(str(home / "run.py"), run_name="__main__")
    known = [line.split()[0] for line in (home / "digests.txt").read_text().splitlines()]
    assert names and {*names} <= {*known}


# ---- the frame, with runs that only say that they ran


@pytest.fixture
def study(tmp_path, monkeypatch):
    """study(): a Study of a folder, whose runs note their commands in study.commands and have the digest study.ends."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "README.md").write_text("| a |\n| --- |\n| 1 |\n")
    said = types.SimpleNamespace(commands=[], outputs=set(), ends=f"digest {'a' * 64}", status=0)

    def run(command, output, timeout):
        said.commands.append(command[2:-1])
        said.outputs.add(output)
        folder = Path(command[-1].removeprefix("--out_dir="))
        folder.mkdir(exist_ok=True)
        (folder / "config.py").touch()
        (folder / "metrics.jsonl").write_text('{"phase": "eval", "step": 1, "pass@1": 0.5}\n')
        return said.status, said.ends

    def make(*flags):
        monkeypatch.setattr(sys, "argv", ["run.py", f"--out={tmp_path / 'out'}", *flags])
        made = frame.Study(tmp_path / "home" / "run.py")
        made.said = said
        return made

    monkeypatch.setattr(frame.runs, "run_warm", run)
    return make


def end_of(study, capsys):
    """(exit status, what was printed) of a study's end."""
    with pytest.raises(SystemExit) as ended:
        study.end()
    return ended.value.code, capsys.readouterr().out


def test_finished_runs_are_not_made_again_and_stopped_ones_are_resumed(study):
    first = study()
    folders = first.make({"a 1": ["--seed=1"], "b": []})
    assert sorted(first.said.commands) == [[], ["--seed=1"]] and folders["a 1"].name.startswith("a_1_")
    (folders["b"] / "finished").unlink()
    again = study()
    assert again.make({"a 1": ["--seed=1"], "b": []}) == folders
    assert again.said.commands[2:] == [["--init_from=resume"]]
    assert study().make({"a 1": ["--seed=2"]})["a 1"] != folders["a 1"]


def test_each_run_has_an_output_of_its_own(study):
    made = study()
    made.make({"share 0.1": ["--seed=1"], "share 0.2": ["--seed=2"]})
    assert len(made.said.outputs) == 2


def error_of(study, capsys):
    """The line with which a study of two runs ends."""
    with pytest.raises(SystemExit) as ended:
        study.make({"a": [], "b": []})
    assert ended.value.code == 2
    return error_line(capsys.readouterr().err)


def test_a_run_that_fails_ends_the_study_with_its_line(study, capsys):
    failing = study("--jobs=1")
    failing.said.status = 2
    failing.said.ends = "much\nerror: lanes=3: not a power of two"
    assert "lanes=3: not a power of two" in error_of(failing, capsys)


def test_an_interrupted_study_ends_with_one_line(study, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    stopped = study("--jobs=1")
    monkeypatch.setattr(frame.runs, "run_warm", interrupted)
    assert "interrupted" in error_of(stopped, capsys)


def test_a_process_that_ends_without_a_status_leaves_no_timer(tmp_path):
    """It kept an interrupted study alive, and in the end would have killed whoever had the process's number then."""

    def begins_and_is_gone():
        connection, _ = server.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"%d\n" % (2**22 + 1))

    with frame.runs.listening() as server, ThreadPoolExecutor(1) as pool:
        pool.submit(begins_and_is_gone)
        with pytest.raises(ValueError):
            frame.runs.run_warm([], tmp_path / "output", timeout=5, address=server.getsockname())
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers)


def test_digests_and_figures_are_compared_with_the_page(study, capsys):
    written = study("--write")
    written.make({"a": []})
    written.table(["a"], [[1]])
    assert end_of(written, capsys)[0] == 0
    same = study()
    same.make({"a": []})
    assert end_of(same, capsys)[0] == 0
    same.table(["a"], [[2]])
    status, said = end_of(same, capsys)
    assert status == 1 and "not on the page: | 2 |" in said
    other = study()
    (folder,) = other.make({"a": []}).values()
    (folder / "finished").write_text("b" * 64)
    status, said = end_of(other, capsys)
    assert status == 1 and f"not as in digests.txt: {folder.name}" in said
    assert end_of(study("--lanes=2"), capsys)[0] == 0  # with flags of one's own nothing is compared


def test_the_spread_and_the_mean_have_the_intervals_of_the_textbook():
    """Of 1, 2, 3: s = 1, t(0.975, 2) = 4.3027; chi-squared with 2 degrees has quantiles -2 ln(1 - p)."""
    mean, half = frame.mean_of([1.0, 2.0, 3.0])
    assert mean == 2 and abs(half - 4.3027 / 3**0.5) < 1e-4
    deviation, low, high = frame.spread_of([1.0, 2.0, 3.0])
    assert deviation == 1 and abs(low - 0.52066) < 1e-4 and abs(high - 6.28476) < 1e-4
