"""
What a run does and writes, and what ends it. That it learns, and always the same, is in test_laws.py.

    pytest tests/test_run.py
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import SMALLEST, error_line, error_of_run, finish, launch_warm, read_groups, wait_for
from runs import launch as plain_launch
from trials import ROOT, command_of, launch, lines, processes_of, replay_of, schedulers_of

from onecurve.models import folders
from train_grpo import DEFAULTS


def test_every_token_names_its_weights_and_every_sample_has_its_own_seed(two_ranks):
    groups = read_groups(two_ranks[0])
    assert len(groups) == 24 * 8
    assert all(set(t["weight_version"].tolist()) == {meta["step"]} for t, meta in groups)
    assert len({seed for t, _ in groups for seed in t["seeds"].tolist()}) == 24 * 8 * 8


def test_a_sample_ends_with_one_trained_eos_or_is_marked_as_truncated(two_ranks):
    ended = 0
    for t, _ in read_groups(two_ranks[0], "*"):
        sizes = t["lengths"].tolist()
        columns = t["tokens"].split(sizes), t["loss_mask"].split(sizes), t["truncated"]
        for tokens, mask, truncated in zip(*columns):
            assert mask.all()
            assert (tokens[:-1] != 1).all()
            assert (tokens[-1] == 1) != bool(truncated)
            assert len(tokens) == 6 or not truncated
            ended += tokens[-1] == 1
    assert ended > 1000


def test_the_run_folder_has_what_a_reader_needs(two_ranks):
    folder, output = two_ranks
    names = {p.name for p in folder.iterdir()}
    assert {"config.py", "metrics.jsonl", "ledger.jsonl", "samples.md", "queue", "model", "engine_0.log"} <= names
    always = """step reward_mean reward_std zero_std_groups loss grad_norm entropy clip_fraction logprob_mismatch_tokens
    logprob_mismatch_max response_length_mean truncated_fraction weight_version lr rollout_seconds train_seconds
    sync_seconds wait_seconds tokens_per_second"""
    assert set(always.split()) <= set(lines(folder, "metrics.jsonl", "rl")[0])
    assert [e["step"] for e in lines(folder, "metrics.jsonl", "eval")] == [0, 24]
    assert "max_steps = 24" in (folder / "config.py").read_text()
    assert "## step 20" in (folder / "samples.md").read_text()
    assert output.count("held out after") == 2
    assert output.count("starting SGLang") == 1


def test_a_run_leaves_no_process(two_ranks, one_process):
    """Nor anything in shared memory, as the fixtures assert."""
    for folder, _ in (two_ranks, one_process):  # other tests' runs begin with its checkpoints, or replay its rollouts
        assert [x for x in processes_of(folder).values() if f"{folder}/" not in x] == []


def test_a_vocabulary_of_151_936_goes_through_the_whole_loop(run, tmp_path, assert_it_learned):
    """As many tokens as Qwen3 has; the scratch model has 98. Each of the others is spelled <number>."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = tmp_path / "model"
    reward = tmp_path / "reward.py"
    folders.make_scratch_model(model, DEFAULTS | SMALLEST)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {f"<{i}>": i for i in range(98, 151_936)}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    large = AutoConfig.from_pretrained(model, vocab_size=151_936)
    AutoModelForCausalLM.from_config(large).save_pretrained(model)
    reward.write_text("def odd(prompt, response, answer):\n    return len(response) % 2\n")
    plain = "--max_steps=2 --warmup_sft_steps=0 --eval_size=0 --checkpoint_every=0".split()
    finish(run, f"--init_from={model}", f"--reward={reward}:odd", *plain)
    assert_it_learned(run, steps=2)
    tokens = [group.tensors["tokens"] for group in read_groups(run, "rl_000001")]
    assert torch.cat(tokens).max() > 140_000


# ---- what is refused before anything starts; test_configurator.py has more

BAD = [
    (["--init_from=no/such/folder"], "error: init_from='no/such/folder': no such folder; make it first"),
    (["--init_from=./no/such/folder"], "error: init_from='./no/such/folder': no such folder; make"),
    (["--max_prompt_tokens=2"], "error: max_prompt_tokens=2: all 80 training prompts are longer"),
]
if not torch.cuda.is_available():
    BAD.append((["--device=cuda"], "error: device='cuda': this machine has no CUDA device"))


@pytest.mark.parametrize("flags,message", BAD)
def test_bad_input_gets_one_line_and_status_2(run, flags, message):
    status, output = launch_warm(run, *flags, timeout=90)
    (line,) = [line for line in output.splitlines() if "error" in line.lower()]
    assert status == 2 and line.startswith(message), output
    assert not processes_of(run)


def test_under_torchrun_one_rank_prints_the_line_and_it_comes_last(run):
    status, output = launch(run, "--lanes=3", ranks=2, timeout=90)
    line = "error: lanes=3: not a power of two; use 1, 2, 4, .."
    assert status
    assert error_line(output.partition("Traceback")[0]) == line
    assert 'File "' not in output.split(line)[0]
    assert "exitcode  : 2" in output
    *_, last, _ = output.splitlines()
    assert last.split() == f"traceback : {line}".split()
    assert not processes_of(run)


# ---- what goes wrong in the middle of a run


def test_a_mistake_found_late_leaves_the_folder_to_the_corrected_command(run):
    """And what torchrun refused once it refuses again: it does not go on with a run that is not its own."""
    sft = ("--mode=sft", "--max_steps=1", "--checkpoint_every=0")
    for wrong in ("--dataset=nowhere.jsonl", "--max_prompt_tokens=2", "--init_from=nowhere"):
        error_of_run(run, wrong, timeout=60)
    assert (run / "config.py").exists()  # the run was opened
    finish(run, *sft)
    ledger = (run / "ledger.jsonl").read_bytes()
    status, output = launch(run, *sft, ranks=1, restarts=1)
    assert status
    assert len(re.findall("^error: .* holds a run already", output, re.M)) == 2
    assert ledger
    assert (run / "ledger.jsonl").read_bytes() == ledger


def test_code_that_a_models_folder_names_is_not_run(two_ranks, run, tmp_path):
    """SGLang would import it for a class that it does not know, whatever trust_remote_code says."""
    model = shutil.copytree(two_ranks[0] / "ckpt" / "step_000024", tmp_path / "model")
    hf = json.loads((model / "config.json").read_text())
    hf |= dict(architectures=["TheirsForCausalLM"], auto_map={"AutoModel": "theirs.Theirs"})
    (model / "config.json").write_text(json.dumps(hf))
    (model / "theirs.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nclass Theirs: pass\n")
    flags = (f"--init_from={model}", "--warmup_sft_steps=0", "--eval_size=0")
    line = error_of_run(run, *flags, status=1)
    assert "'TheirsForCausalLM' is not a registered model" in line
    assert not (tmp_path / "mark").exists()


def test_a_reward_that_raises_ends_the_run_and_names_the_sample(run, tmp_path):
    (tmp_path / "mine.py").write_text("def late(prompt, response, answer):\n    return 1 / (response == answer)\n")
    reward = f"--reward={tmp_path}/mine.py:late"
    line = error_of_run(run, reward, "--warmup_sft_steps=0", "--eval_size=0")
    assert re.search(r"rl step 0, prompt \d, sample 0: ZeroDivisionError.*mine.py:2", line)
    wait_for(lambda: not processes_of(run), 10)


@pytest.mark.parametrize("how,ranks", [("dies", 2), ("goes silent", 0)])
def test_an_engine_that_dies_or_goes_silent_ends_the_run_in_time(tmp_path, how, ranks):
    folder = tmp_path / "run"
    flags = ("--engine_timeout=5", "--max_steps=100000", "--warmup_sft_steps=0", "--eval_size=0")
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(launch_warm, folder, *flags, ranks=ranks)
        try:
            metrics = folder / "metrics.jsonl"
            wait_for(lambda: metrics.exists() and lines(folder, "metrics.jsonl") or run.done(), 120)
            time.sleep(1)
            (scheduler,) = schedulers_of(folder)
            os.kill(scheduler, signal.SIGKILL if how == "dies" else signal.SIGSTOP)
            status, text = run.result(timeout=5 + 30)
        finally:
            for pid in processes_of(folder) if not run.done() else ():
                os.kill(pid, signal.SIGKILL)
    assert status != 0
    wanted = "error: engine 0: the SGLang process died" if how == "dies" else "error: engine 0: silent for 5 s"
    assert wanted in text, text[-3000:]
    wait_for(lambda: not processes_of(folder), 10)
    assert read_groups(folder)  # all that is there is whole
    assert lines(folder, "metrics.jsonl") and lines(folder, "ledger.jsonl")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sigterm_ends_a_run_with_one_line_and_leaves_nothing_in_tmp(tmp_path, ranks):
    folder = tmp_path / "run"
    flags = "--max_steps=100000 --warmup_sft_steps=0 --eval_size=0 --checkpoint_every=0 --colocate --weight_sync=ipc"
    command = command_of(folder, *flags.split(), ranks=ranks)
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)

    def made():
        return re.findall("pymp|torchelastic", " ".join(os.listdir(temporary)))

    with tempfile.TemporaryDirectory() as temporary:  # of a short name, which has room for that of a socket
        run = subprocess.Popen(command, env=os.environ | dict(TMPDIR=temporary), **options)
        metrics = folder / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.stat().st_size or run.poll(), 180)
        assert {*made()} == ({"pymp", "torchelastic"} if ranks > 1 else {"pymp"})
        run.terminate()
        output, _ = run.communicate(timeout=60)
        assert run.returncode, output[-3000:]
        assert output.count("\nerror: ended by SIGTERM; nothing written is lost; resume with --init_from=resume\n") == 1
        assert made() == []
    wait_for(lambda: not processes_of(folder), 10)


def test_a_run_ends_where_nobody_reads_why():
    """Its last line raised BrokenPipeError: a SIGTERM, or an engine's death, left it waiting for ever."""
    reads, writes = os.pipe()
    os.close(reads)
    for action, status in (
        ("machine.end_with_a_line(0); os.kill(os.getpid(), signal.SIGTERM); signal.pause()", -signal.SIGTERM),
        ("rollout_server.RolloutEngine.end(types.SimpleNamespace(stderr=2), 'line', 7)", 7),
    ):
        code = f"import os, rollout_server, signal, types; from onecurve.run import machine; {action}"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=writes, timeout=60)
        assert done.returncode == status
    os.close(writes)


def test_two_ranks_that_train_and_sample_have_one_digest_which_sees_the_order_of_sums(tmp_path):
    """By gloo, as two ranks on one card would by NCCL."""
    flags = f"--out={tmp_path}", "--device=cpu", "--only", "2_colocated", "sums_as_they_come"
    status, output = plain_launch([sys.executable, "tests/one_card.py", *flags], cwd=ROOT)
    assert status == 0 and output.count("as it must be") == 2, output


def test_a_replay_with_another_key_than_the_run_had_is_refused(two_ranks, run):
    """test_sync.py has files of another run, and torn ones."""
    line = error_of_run(run, *replay_of(two_ranks[0]), "--seed=3")
    assert line.startswith("error: seed=3: the run in queue_dir has 1; use all keys of its config, ")
    assert not (run).exists()
