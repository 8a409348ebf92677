"""
tools/track.py: what TensorBoard and wandb are shown is metrics.jsonl, each step once, also when a run goes on.

    pytest tests/test_track.py
"""

import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
from importlib.metadata import distributions

import pytest
import track
from conftest import error_line, finish, wait_for
from trials import lines

SFT = "--mode=sft --max_steps=6 --checkpoint_every=2".split()


@pytest.fixture(scope="module")
def supervised(tmp_path_factory):
    folder = tmp_path_factory.mktemp("supervised") / "run"
    finish(folder, *SFT)
    return folder


@pytest.fixture
def run(supervised, tmp_path):
    """The folder of a short run."""
    return shutil.copytree(supervised, tmp_path / "run")


def numbers(folder):
    """{phase/name: {step: number}} of a run's metrics.jsonl."""
    found = {}
    for line in lines(folder, "metrics.jsonl"):
        for name in line.keys() - {"phase", "step"}:
            found.setdefault(f"{line['phase']}/{name}", []).append((line["step"], line[name]))
    return found


def points(folder):
    """The same of what TensorBoard finds; its numbers are float32."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(x.step, x.value) for x in events.Scalars(name)] for name in events.Tags()["scalars"]}


def single(found):
    return {name: [(step, struct.unpack("f", struct.pack("f", x))[0]) for step, x in xs] for name, xs in found.items()}


def resume(folder):
    """As if the run had been killed after its last step and before the checkpoint of it."""
    shutil.rmtree(folder / "ckpt" / "step_000006")
    assert "resuming at step 4" in finish(folder, *SFT, "--init_from=resume")


def tool(folder, to, **env):
    """(status, output) of the tool on a run that is over."""
    command = [sys.executable, track.__file__, folder, f"--to={to}", "--wait=0"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | env)
    return done.returncode, done.stdout + done.stderr


class Tracker:
    """Keeps what it is shown; `all` has every tracker that was made."""

    all = []

    def __init__(self, folder):
        self.points = []
        self.closed = False
        Tracker.all.append(self)

    def show(self, phase, step, numbers):
        self.points.append((phase, step, numbers))

    def close(self):
        self.closed = True


def test_it_follows_a_run_from_before_its_start_past_a_resume_to_its_end(tmp_path, monkeypatch):
    """A process that holds the folder's lock and says nothing is alive; half a line is not shown yet."""
    monkeypatch.setattr(Tracker, "all", [])
    folder = tmp_path / "run"
    following = threading.Thread(target=track.follow, args=(folder, Tracker, 1.0, 0.01))
    following.start()
    folder.mkdir()
    line = '{{"phase": "rl", "step": {}, "reward_mean": {}, "note": "text"}}\n'.format

    def shown():
        return [step for _, step, _ in Tracker.all[-1].points] if Tracker.all else []

    with open(folder / "lock", "w") as lock, open(folder / "metrics.jsonl", "w") as log:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for text in (line(0, 0.5), line(1, 0.25), line(2, 1)[:20]):
            log.write(text)
            log.flush()
        wait_for(lambda: shown() == [0, 1], 10)
        following.join(1.5)
        assert following.is_alive() and len(Tracker.all) == 1
        log.truncate(len(line(0, 0.5)))  # as a resume does
        log.seek(0, os.SEEK_END)
        wait_for(lambda: len(Tracker.all) == 2 and shown() == [0], 10)
        log.write(line(1, 0.75))
    following.join(10)
    assert not following.is_alive() and all(tracker.closed for tracker in Tracker.all)
    assert Tracker.all[-1].points == [("rl", 0, {"rl/reward_mean": 0.5}), ("rl", 1, {"rl/reward_mean": 0.75})]


def test_a_run_can_start_though_its_folder_is_looked_at(tmp_path):
    """What asks whether the folder is held lets go of it at once."""
    (tmp_path / "lock").touch()
    assert not track.held(tmp_path) and not track.held(tmp_path / "nowhere")
    with open(tmp_path / "lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert track.held(tmp_path)


def test_tensorboard_has_all_numbers_of_a_run(one_process, tmp_path):
    for name in ("config.py", "metrics.jsonl", "lock"):
        shutil.copy(one_process[0] / name, tmp_path)
    assert tool(tmp_path, "tensorboard")[0] == 0
    assert points(tmp_path) == single(numbers(tmp_path))
    assert {"rl/reward_mean", "eval/pass@1", "sft/loss"} <= points(tmp_path).keys()


def test_a_run_that_goes_on_has_each_step_once_in_tensorboard(run):
    assert tool(run, "tensorboard")[0] == 0
    first = numbers(run)
    resume(run)
    assert tool(run, "tensorboard")[0] == 0
    assert points(run) == single(numbers(run)) == single(first) and len(first["sft/loss"]) == 6


def logged(path):
    """What a run of wandb wrote to its file, line by line; and the run's id."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    store = DataStore()
    found = []
    name = None
    store.open_for_scan(str(path))
    while data := store.scan_data():
        record = Record.FromString(data)
        name = record.run.run_id or name
        items = {item.nested_key[0] if item.nested_key else item.key: item.value_json for item in record.history.item}
        found.append({key: json.loads(x) for key, x in items.items() if not key.startswith("_")})
    return [line for line in found if line], name


needs_wandb = pytest.mark.skipif(not any(distributions(name="wandb")), reason="no wandb: uv sync --group wandb")


@needs_wandb
def test_wandb_without_a_network_has_each_step_of_a_run_that_goes_on_once(run):
    status, output = tool(run, "wandb", WANDB_MODE="offline")
    assert status == 0, output[-4000:]
    resume(run)
    assert tool(run, "wandb", WANDB_MODE="offline")[0] == 0
    wanted = [{f"sft/{k}": x for k, x in x.items() if k != "phase"} for x in lines(run, "metrics.jsonl")]
    first, second = (logged(path) for path in sorted(run.glob("wandb/offline-run-*/*.wandb")))
    assert first[1] == second[1] == (run / "wandb_id").read_text()
    assert second[0] == wanted and [x["sft/loss"] for x in first[0]] == [x["sft/loss"] for x in wanted]


@needs_wandb
def test_wandb_without_a_login_is_one_line(run, tmp_path):
    env = dict(
        WANDB_MODE="online",
        WANDB_API_KEY="",
        HOME=str(tmp_path),
        WANDB_BASE_URL="http://127.0.0.1:9",
    )
    status, output = tool(run, "wandb", **env)
    line = error_line(output)
    assert status == 2 and line.startswith("error: --to=wandb: ") and line.endswith("or set WANDB_MODE=offline")


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_what_is_not_installed_is_refused_with_the_cure(kind, monkeypatch, refusal):
    monkeypatch.setattr(track, "distributions", lambda name: iter(()))
    monkeypatch.setattr(sys, "argv", ["track.py", "out/run", f"--to={kind}"])
    assert refusal(track.main) == f"error: --to={kind}: not installed; uv sync --group {kind}"


def test_what_is_no_run_is_refused_in_one_line(tmp_path):
    why = "no metrics.jsonl in it, or an empty one; name a run's folder"
    assert tool(tmp_path, "tensorboard") == (2, f"error: {tmp_path}: {why}\n")
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"loss": 1.0}\n')  # another program's
    assert tool(tmp_path, "tensorboard") == (2, f"error: {log}: a line that has no phase and step\n")
