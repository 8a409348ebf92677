"""
The same ledger whatever happens in between: kills, resumes on other ranks, replays; and what a resume refuses.

    pytest tests/test_resume.py

The runs are those of tools/prove.py, which proves more with more of them.
"""

import fcntl
import os
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from conftest import digest, orphans, shared_memory, wait_for
from prove import ROOT, command_of, flip_token, forget_optimizer, interrupt, launch, lines, processes_of, run_with_kills
from safetensors.torch import load_file

import sync


def error_line(output):
    (line,) = [x for x in output.splitlines() if x.startswith("error:")]
    assert "Traceback" not in output
    return line


def test_a_resume_on_other_ranks_ends_in_the_ledger_of_the_undisturbed_run(two_ranks, tmp_path):
    base, folder = two_ranks[0], interrupt(two_ranks[0], tmp_path / "run")
    torn = sync.group_path(folder / "queue" / "rl_000020", 3)
    torn.write_bytes(torn.read_bytes()[:-7])
    reused = sync.group_path(folder / "queue" / "rl_000021", 3)
    written = reused.stat().st_mtime_ns
    sync.claim(folder / "queue" / "rl_000023", 0)  # by an engine that is no more
    status, output = launch(folder, "--init_from=resume", ranks=3)
    assert status == 0, output[-4000:]
    assert "resuming at step 16; 1 torn rollout files deleted" in output
    assert digest(output) == digest(two_ranks[1])
    assert (folder / "ledger.jsonl").read_bytes() == (base / "ledger.jsonl").read_bytes()
    assert reused.stat().st_mtime_ns == written
    assert [x["step"] for x in lines(folder, "metrics.jsonl", "rl")] == list(range(24))
    for path in (base / "ckpt" / "step_000024").rglob("*.safetensors"):
        ours = load_file(folder / path.relative_to(base))
        assert ours and all(torch.equal(ours[name], t) for name, t in load_file(path).items())
    first, last = [x for x in (folder / "config.py").read_text().splitlines() if x.startswith("# train_grpo.py")]
    assert "resume" not in first and "resume" in last  # both commands are on record


def test_a_resume_that_lost_the_optimizer_is_caught(two_ranks, tmp_path):
    folder = interrupt(two_ranks[0], tmp_path / "run")
    forget_optimizer(folder)
    replay = ("--mode=replay", f"--queue_dir={two_ranks[0] / 'queue'}")  # an engine would find the same, later
    status, output = launch(folder, "--init_from=resume", *replay)
    assert status == 1 and "rl step 16 came out otherwise than before the interruption" in error_line(output)


def test_a_sigkill_at_a_random_moment_and_torchruns_restart_end_in_the_undisturbed_ledger(two_ranks, tmp_path):
    """tools/prove.py does the same with more kills."""
    folder = tmp_path / "run"
    with shared_memory():
        status, output, victims = run_with_kills(folder, 1, random.Random(os.urandom(8)), "--checkpoint_every=2")
        for name in orphans():
            if name.startswith("sglang_loads_"):  # a kill while SGLang starts can leave its statistics behind
                Path("/dev/shm", name).unlink(missing_ok=True)
    assert status == 0, output[-4000:]
    assert victims and (folder / "ledger.jsonl").read_bytes() == (two_ranks[0] / "ledger.jsonl").read_bytes()
    wait_for(lambda: not processes_of(folder), 10)


def test_a_checkpoint_is_a_hugging_face_model(two_ranks):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = two_ranks[0] / "ckpt" / "step_000024"
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32 and model.generation_config.eos_token_id == 1
    prompt = AutoTokenizer.from_pretrained(folder)("3+4=", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=2, do_sample=False).shape[1] > 4


# ---- replay


def test_a_replay_without_an_engine_makes_the_same_ledger(two_ranks, tmp_path):
    queue = f"--queue_dir={two_ranks[0] / 'queue'}"
    status, output = launch(tmp_path / "run", "--mode=replay", queue, ranks=2)
    assert status == 0 and "SGLang" not in output, output[-4000:]
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == (two_ranks[0] / "ledger.jsonl").read_bytes()


def test_a_replay_of_one_changed_token_is_caught(two_ranks, tmp_path):
    shutil.copytree(two_ranks[0] / "queue", tmp_path / "queue")
    flip_token(tmp_path / "queue")
    status, output = launch(tmp_path / "run", "--mode=replay", f"--queue_dir={tmp_path / 'queue'}")
    assert status == 2 and error_line(output).startswith("error: step 3, prompt 0, sample 0, token")


# ---- what is refused, and what ends in one line


def test_a_resume_with_another_config_is_refused_by_key_and_changes_nothing(two_ranks, tmp_path):
    folder = interrupt(two_ranks[0], tmp_path / "run")
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    status, output = launch(folder, "--init_from=resume", "--learning_rate=3e-4", "--lanes=8", timeout=60)
    line = error_line(output)
    assert status == 2 and "learning_rate=0.0003 (the run has 0.0002)" in line and "lanes=8 (the run has 4)" in line
    assert ": cannot change on resume; what can: " in line
    assert before == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_resume_of_nothing_is_refused(tmp_path):
    status, output = launch(tmp_path / "run", "--init_from=resume", timeout=60)
    assert status == 2 and "holds no run" in error_line(output)


def test_a_damaged_checkpoint_is_refused_by_name_and_without_it_the_one_before_is_used(two_ranks, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(two_ranks[0], folder)
    path = folder / "ckpt" / "step_000024" / "model-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    status, output = launch(folder, "--init_from=resume", timeout=60)
    assert status == 1 and f"{path}: missing or damaged; delete {path.parent}" in error_line(output)


def test_a_second_run_at_the_same_time_is_refused(two_ranks, tmp_path):
    folder = interrupt(two_ranks[0], tmp_path / "run")
    held = open(folder / "lock", "a")
    fcntl.flock(held, fcntl.LOCK_EX)
    status, output = launch(folder, "--init_from=resume", timeout=60)
    assert status == 2 and "another run is writing there" in error_line(output)
    held.close()


def test_an_out_dir_that_cannot_be_written_is_one_line(tmp_path):
    command = command_of(tmp_path / "run", "--out_dir=/proc/run")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and error_line(done.stderr).startswith("error: out_dir='/proc/run': ")


def test_a_full_disk_ends_in_one_line_and_the_checkpoint_before_stays_whole(two_ranks, tmp_path):
    """A file may not grow over 500 kB: the model's is smaller, the optimizer's is not."""
    folder = interrupt(two_ranks[0], tmp_path / "run")
    limit = (500_000, 500_000)
    command = command_of(folder, "--init_from=resume", "--mode=replay", f"--queue_dir={two_ranks[0] / 'queue'}")
    options = dict(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit), cwd=ROOT, timeout=120)
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 1 and "optimizer-00001-of-00001.safetensors: " in error_line(done.stderr), done.stderr
    assert [p.name for p in sync.checkpoints(folder / "ckpt")] == ["step_000008", "step_000016"][-1:]
    assert sync.read_checkpoint(folder / "ckpt" / "step_000016", 0, 1)["step"] == 16
    assert len(lines(folder, "ledger.jsonl", "rl")) == 24  # all that was done is on record


def test_what_the_disk_refuses_is_one_line():
    code = (
        "import sys, sync; sys.excepthook = sync.report_disk_error; print(1, file=open('/dev/full', 'w'), flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "No space left on device" in error_line(done.stderr)
    code = code.replace("print(1, file=open('/dev/full', 'w'), flush=True)", "1 / 0")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "ZeroDivisionError" in done.stderr and "Traceback" in done.stderr
