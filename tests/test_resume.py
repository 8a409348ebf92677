"""
Checkpoints, and what a resume refuses or survives. That it ends in the same ledger is law L6 in test_laws.py.

    pytest tests/test_resume.py
"""

import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import digest, error_line, error_of_run, finish, wait_for
from safetensors import SafetensorError
from trials import ROOT, command_of, interrupt, is_rank, lines, of_this_commit, processes_of, replay_of

from onecurve.run.checkpoint import checkpoints, read_checkpoint
from onecurve.run.machine import report_error


def test_a_checkpoint_is_a_hugging_face_model(two_ranks):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = two_ranks[0] / "ckpt" / "step_000024"
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32 and model.generation_config.eos_token_id == 1
    prompt = AutoTokenizer.from_pretrained(folder)("3+4=", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=2, do_sample=False).shape[1] > 4


# ---- what is refused, and what ends in one line


def test_a_resume_with_another_config_names_the_keys_and_changes_nothing(two_ranks, run):
    interrupt(two_ranks[0], run)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    line = error_of_run(run, "--init_from=resume", "--learning_rate=3e-4", "--lanes=8", timeout=60)
    assert "learning_rate=0.0003 (the run has 0.0002)" in line and "lanes=8 (the run has 4)" in line
    assert ": cannot change on resume; what can: " in line
    assert before == {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}


def test_a_resume_of_nothing_is_refused(run):
    assert "holds no run" in error_of_run(run, "--init_from=resume", timeout=60)


def test_a_damaged_checkpoint_is_named_and_the_one_before_can_replace_it(two_ranks, run):
    shutil.copytree(two_ranks[0], run)
    path = run / "ckpt" / "step_000024" / "model-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    line = error_of_run(run, "--init_from=resume", timeout=60, status=1)
    assert f"{path}: missing or damaged; delete {path.parent}" in line


def test_an_out_dir_that_cannot_be_written_is_one_line(run):
    line = error_of_run(run, "--out_dir=/proc/run", timeout=60)
    assert line.startswith("error: out_dir='/proc/run': ")


STORE = """
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
input()
"""


def test_a_full_disk_ends_in_one_line_and_spares_the_checkpoint_before(two_ranks, run):
    """A file may not grow over 500 kB: the model's is smaller, the optimizer's is not."""
    interrupt(two_ranks[0], run)
    flags = ("--init_from=resume", *replay_of(two_ranks[0]))
    line = error_of_run(run, *flags, file_size=500_000, timeout=120, status=1)
    assert "optimizer-00001-of-00001.safetensors: " in line
    assert [p.name for p in checkpoints(run / "ckpt")] == ["step_000016"]
    assert read_checkpoint(run / "ckpt" / "step_000016", 0, 1)["step"] == 16
    assert len(lines(run, "ledger.jsonl", "rl")) == 24  # all that was done is on record


def test_disk_errors_lost_nodes_and_ctrl_c_are_a_line_others_a_traceback(capsys, monkeypatch):
    """As Python's last word on an exception, which report_error is in a run."""

    def last_word(action, **said):
        try:
            action()
        except BaseException as error:
            report_error(type(error), error, error.__traceback__, **said)
        return capsys.readouterr().err

    assert "No space left on device" in error_line(last_word(lambda: print(1, file=open("/dev/full", "w"), flush=True)))

    def in_rust():
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    assert "writing to out_dir: No space left on device; " in error_line(last_word(in_rust))
    ctrl_c = partial(signal.default_int_handler, 2, None)
    assert error_line(last_word(ctrl_c)).endswith("; nothing written is lost; resume with --init_from=resume")

    def unread():
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", sys.stdout)
    assert error_line(last_word(unread)).startswith("error: the output has no reader any more; nothing written is lost")
    assert not sys.stdout
    before = dict(kept="nothing was written", cure="start again")  # before a run has its folder
    assert error_line(last_word(ctrl_c, **before)) == "error: interrupted; nothing was written; start again"
    with subprocess.Popen([sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        store = dist.TCPStore("127.0.0.1", int(other.stdout.readline()))
        other.kill()
    line = error_line(last_word(lambda: store.check(["something"])))
    assert line.startswith("error: torchrun's store is gone, with the node that had it; nothing")
    assert "ZeroDivisionError" in (text := last_word(lambda: 1 / 0)) and "Traceback" in text


# ---- a launcher that is killed


@pytest.mark.in_turn
def test_ranks_end_with_a_killed_torchrun_and_resumes_keep_the_digest(two_ranks, run, tmp_path):
    """It is killed while they meet and sample; without an engine, while they train, save or take their leave."""
    output = tmp_path / "output"

    def written(pattern):
        return sum(path.stat().st_size for path in run.glob(pattern) if path.is_file())

    later = {
        "training": lambda before: written("metrics.jsonl") > before,
        "saving": lambda before: any(run.glob("ckpt/.step_*")),
        "end": lambda before: "digest" in output.read_text(),
    }
    moments = {
        "start": lambda before: any(is_rank(command) for command in processes_of(run).values()),
        "rollout": lambda before: written("queue/rl_*/group_*") > 0,
    }
    moments |= [of_this_commit([*later.items()])]
    for moment, come in moments.items():
        flags = ["--init_from=resume"] if written("*.jsonl") else []
        flags += replay_of(two_ranks[0]) if moment in later else []
        with open(output, "w") as said:
            torchrun = subprocess.Popen(command_of(run, *flags, ranks=2), cwd=ROOT, stdout=said, stderr=said)
        before, began = written("metrics.jsonl"), time.monotonic()
        while not come(before):
            assert torchrun.poll() is None and time.monotonic() < began + 300, (moment, output.read_text()[-4000:])
            time.sleep(0.005)
        torchrun.kill()
        torchrun.wait()
        wait_for(lambda: not processes_of(run), 10)
    last = finish(run, "--init_from=resume", *replay_of(two_ranks[0]))
    assert digest(last) == digest(two_ranks[1])
