"""
--track: what TensorBoard and wandb are shown is metrics.jsonl, each step once, also when a run goes on.

    pytest tests/test_track.py
"""

import json
import shutil
import struct
from importlib.metadata import distributions

import pytest
from conftest import error_line, launch_warm
from prove import launch, lines

import configurator
from configurator import check_config
from train_grpo import DEFAULTS

SFT = "--mode=sft --max_steps=6 --checkpoint_every=2".split()


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


def interrupt(folder):
    """As if the run had been killed after its last step and before the checkpoint of it."""
    shutil.rmtree(folder / "ckpt" / "step_000006")


def test_tensorboard_has_all_numbers_of_a_run(one_process):
    folder = one_process[0]
    assert points(folder) == single(numbers(folder))
    assert {"rl/reward_mean", "eval/pass@1", "sft/loss"} <= points(folder).keys()


def test_a_run_that_goes_on_has_each_step_once_in_tensorboard(tmp_path):
    folder, track = tmp_path / "run", "--track=tensorboard"
    assert launch_warm(folder, *SFT, track)[0] == 0
    first = numbers(folder)
    interrupt(folder)
    status, output = launch_warm(folder, *SFT, track, "--init_from=resume")
    assert status == 0 and "resuming at step 4" in output
    assert points(folder) == single(numbers(folder)) == single(first) and len(first["sft/loss"]) == 6


def test_a_run_can_be_tracked_from_where_it_goes_on_and_then_all_of_it_is_there(tmp_path):
    folder = tmp_path / "run"
    assert launch_warm(folder, *SFT)[0] == 0 and not (folder / "tensorboard").exists()
    interrupt(folder)
    assert launch_warm(folder, *SFT, "--track=tensorboard", "--init_from=resume")[0] == 0
    assert points(folder) == single(numbers(folder))


def logged(path):
    """What a run of wandb wrote to its file, line by line; and the run's id."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    store, found, name = DataStore(), [], None
    store.open_for_scan(str(path))
    while data := store.scan_data():
        record = Record.FromString(data)
        name = record.run.run_id or name
        items = {item.nested_key[0] if item.nested_key else item.key: item.value_json for item in record.history.item}
        found.append({key: json.loads(x) for key, x in items.items() if not key.startswith("_")})
    return [line for line in found if line], name


@pytest.mark.skipif(not any(distributions(name="wandb")), reason="no wandb: uv sync --group wandb")
def test_wandb_without_a_network_has_each_step_of_a_run_that_goes_on_once(tmp_path):
    folder, options = tmp_path / "run", dict(env={"WANDB_MODE": "offline"})
    status, output = launch(folder, *SFT, "--track=wandb", **options)
    assert status == 0 and output.splitlines()[-1].startswith("digest "), output[-4000:]
    interrupt(folder)
    status, again = launch(folder, *SFT, "--track=wandb", "--init_from=resume", **options)
    assert status == 0 and again.splitlines()[-1] == output.splitlines()[-1]
    wanted = [{f"sft/{k}": x for k, x in x.items() if k != "phase"} for x in lines(folder, "metrics.jsonl")]
    first, second = (logged(path) for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")))
    assert first == second == (wanted, (folder / "wandb_id").read_text())


@pytest.mark.skipif(not any(distributions(name="wandb")), reason="no wandb: uv sync --group wandb")
def test_wandb_without_a_login_ends_the_run_in_one_line(tmp_path):
    env = {"WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    status, output = launch(tmp_path / "run", *SFT, "--track=wandb", env=env)
    line = error_line(output)
    assert status == 2 and line.startswith("error: track='wandb': ") and line.endswith("or set WANDB_MODE=offline")


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_what_is_not_installed_is_refused_with_the_cure(kind, monkeypatch, capsys):
    monkeypatch.setattr(configurator, "distributions", lambda name: iter(()))
    with pytest.raises(SystemExit) as end:
        check_config(DEFAULTS | dict(track=kind), 1, DEFAULTS)
    assert end.value.code == 2
    assert error_line(capsys.readouterr().err) == f"error: track={kind!r}: not installed; uv sync --group {kind}"


def test_another_value_is_refused_with_those_there_are(capsys):
    with pytest.raises(SystemExit) as end:
        check_config(DEFAULTS | dict(track="mlflow"), 1, DEFAULTS)
    assert end.value.code == 2
    assert error_line(capsys.readouterr().err) == "error: track='mlflow': use tensorboard, wandb"


def test_it_may_change_on_a_resume_and_is_no_part_of_a_runs_id():
    assert "track" in configurator.FREE_KEYS
