"""
Sums that do not depend on who adds, files that are whole or refused, and a ledger that notices.

    pytest tests/test_sync.py
"""

import errno
import functools
import gc
import json
import mmap
import os
import re
import runpy
import shutil
import socket
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import flipped, group_tensors, wait_for, write_ledger
from psutil import net_if_addrs
from safetensors.torch import save

import sync
from configurator import saved_config
from kernels import CAPABILITIES, Sampling
from onecurve.agents.sampler import Agent
from onecurve.cpu import host
from onecurve.cpu.host import lend_cores, share_cores
from onecurve.models import folders
from onecurve.run.checkpoint import (
    checkpoints,
    clean_queue,
    delete_checkpoints,
    read_checkpoint,
    seal_checkpoint,
    write_file,
)
from onecurve.run.machine import take_gpu
from onecurve.run.record import Record, open_run
from rollout_server import Batch, Job, groups_of
from sync import RunError
from train_grpo import DEFAULTS

# ---- a machine that lacks something


@pytest.fixture
def machine(monkeypatch, tmp_path, capsys):
    """machine(): take_gpu's one line on a machine with a Hopper; '' if the card is taken."""
    names = "PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF CUDA_HOME CUDA_PATH CC RANK".split()
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is as before in the end
        monkeypatch.delenv(name)
    answers = dict(
        is_available=True, device_count=1, get_device_capability=(9, 0), set_device=None, get_device_name="a Hopper"
    )
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr("onecurve.run.machine.DRIVER", tmp_path / "version")
    monkeypatch.setattr("onecurve.run.machine.TOOLKIT", tmp_path)

    def take(ranks=1, **change):
        try:
            assert take_gpu(DEFAULTS | change, ranks, ranks - 1) == "a Hopper"
        except SystemExit as e:
            assert e.code == 2
        err = capsys.readouterr().err
        assert err.count("\n") == bool(err)
        return err.removeprefix("error: ").rstrip()

    return take


ON_ONE_CARD = ", or try several ranks on one card, as tests/one_card.py does"


@pytest.mark.parametrize(
    "gpus,chip,change,message",
    [
        (1, (9, 0), {}, f"device='cuda': 1 CUDA devices for more ranks; lower --nproc_per_node{ON_ONE_CARD}"),
        (2, (7, 5), {}, f"device='cuda': compute capability 7.5; kernels.py is for {CAPABILITIES}; use --device=cpu"),
        (2, (8, 6), dict(colocate=True), "weight_sync='broadcast': NCCL refuses both ends on one GPU; use ipc"),
    ],
)
def test_gpus_that_cannot_do_it_are_refused_in_one_line(machine, monkeypatch, gpus, chip, change, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: chip)
    assert machine(ranks=2, weight_sync="broadcast", **change) == message


def test_a_rank_takes_its_own_gpu_and_only_a_trainers_memory_grows(machine, monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("RANK", "1")
    assert machine(ranks=2) == ""  # the engine's
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
    monkeypatch.setenv("RANK", "0")
    assert machine(ranks=2) == ""
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert taken == [1, 1]


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U16)\nGCC version:"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Mar  5 22:23:56 UTC 2024\nGCC version:  gcc 12"


def test_without_a_card_the_line_tells_an_old_driver_from_none(machine, monkeypatch, tmp_path):
    """Such a machine began the 8B model on its CPUs."""
    assert machine() == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine() == "device='cuda': this machine has no CUDA device; use --device=cpu"
    for text, version in ((OPEN, "570.124.06"), (CLOSED, "550.54.15")):
        (tmp_path / "version").write_text(text.format(version))
        wanted = f"NVIDIA's driver is {version}, torch {torch.__version__} wants 580; install that"
        assert machine() == f"device='cuda': {wanted}"
    (tmp_path / "version").write_text(OPEN.format("580.65.06"))
    assert "a driver is there, and no device; is this a container without --gpus=all" in machine()


@pytest.mark.parametrize("key", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_unlendable_memory_is_refused_only_if_a_card_trains_and_samples(machine, monkeypatch, key):
    """SGLang's process died of it, with a traceback in the engine's log."""
    value = "max_split_size_mb:64,expandable_segments:True"
    monkeypatch.setenv(key, value)
    cure = "a card that trains and samples cannot lend such memory; take expandable_segments:True out of it"
    assert machine() == f"{key}={value!r}: {cure}"
    assert machine(mode="sft") == machine(mode="eval") == ""
    monkeypatch.setenv(key, "max_split_size_mb:64")
    assert machine() == ""


def test_a_machine_without_a_compiler_or_pythons_headers_is_refused(machine, monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_paths", lambda: dict(include="/nowhere"))
    monkeypatch.setenv("CC", "gcc")
    line = machine()
    assert "Python.h: No such file" in line
    assert "install Python's headers (python3-dev), or set CC" in line
    monkeypatch.setenv("CC", "/nowhere/gcc")
    assert re.search(r"launchers: env: .*/nowhere/gcc.*: No such file .*, now '/nowhere/gcc'$", machine())
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine().endswith("builds its launchers with a C compiler, and there is none; install gcc")


def test_the_wheels_toolkit_replaces_a_missing_one_else_a_line_says_so(machine, monkeypatch, tmp_path):
    """The import of deep_gemm, which SGLang makes on a Hopper, ended in an AssertionError."""
    (folder,) = find_spec("deep_gemm").submodule_search_locations
    find_cuda_home = runpy.run_path(f"{folder}/cuda_helpers.py")["find_cuda_home"]
    compiler = shutil.which("gcc")
    monkeypatch.setattr("onecurve.run.machine.TOOLKIT", tmp_path / "nothing")
    monkeypatch.setattr("shutil.which", lambda name: compiler if name == "gcc" else None)
    monkeypatch.setenv("CUDA_PATH", "/opt/cuda")
    assert machine() == ""
    assert "CUDA_HOME" not in os.environ
    monkeypatch.delenv("CUDA_PATH")
    monkeypatch.setattr("os.path.exists", lambda path, own=os.path.exists: path != "/usr/local/cuda" and own(path))
    with pytest.raises(AssertionError):
        find_cuda_home()
    assert machine() == ""
    home = os.environ["CUDA_HOME"]
    assert home.endswith("nvidia/cu13")
    assert os.access(f"{home}/bin/nvcc", os.X_OK)
    assert find_cuda_home() == home
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    cure = "no CUDA toolkit is found; install one and set CUDA_HOME, or the wheel nvidia-cuda-nvcc"
    assert machine() == f"CUDA_HOME='': {cure}"


def test_ranks_agree_on_a_name_for_each_start_and_never_reuse_one(monkeypatch):
    """Each rank begins when it likes, the first one last; torchrun has counted a restart for one of them alone."""
    store = dist.HashStore()
    names = []
    for count in ("0", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        with ThreadPoolExecutor(3) as pool:
            others = [pool.submit(sync.name_start, store, rank, 3) for rank in (1, 2)]
            time.sleep(0.2)
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
            name = pool.submit(sync.name_start, store, 0, 3).result(5)
            assert [other.result(5) for other in others] == [name, name]
        assert os.environ["TORCHELASTIC_RESTART_COUNT"] == count
        names.append(name)
    assert names[0] != names[1]


def test_a_nodes_address_leads_to_the_master_and_is_never_its_loopback(monkeypatch, refusal):
    """tests/test_nodes.py has two nodes whose host names lead nowhere."""
    assert sync.own_address(1) == ("127.0.0.1", "lo")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    for name, every in net_if_addrs().items():
        for address in (each.address for each in every if each.family == socket.AF_INET):
            monkeypatch.setenv("MASTER_ADDR", address)
            if not address.startswith("127."):
                assert sync.own_address(2) == (address, name)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    line = refusal(sync.own_address, 2)
    assert line.startswith("error: MASTER_ADDR='localhost': no address for other nodes; name one")


# ---- sums


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 8, 100])
def test_tree_sum_takes_any_number_of_parts(n):
    parts = torch.randn(n, 3, dtype=torch.float64)
    plain = parts.sum(0)
    torch.testing.assert_close(sync.tree_sum(parts), plain)


def shards_of(tensors, rank=0, ranks=1):
    """A rank's shards, as FSDP2 cuts them."""
    shards = []
    for name, x in tensors.items():
        size = -(-len(x) // ranks)
        first = rank * size
        shards.append(sync.Shard(name, tuple(x.shape), first, x[first : first + size]))
    return shards


def weights_of():
    return {"a": torch.randn(10, 7), "b": torch.randn(5), "c": torch.randn(3, 4)}


def test_a_hash_sees_the_smallest_change_and_where_elements_are():
    """That those of ranks add up to that of the whole is in laws L3 and L13."""
    weights = weights_of()

    def hashes_of(weights):
        return sync.tensor_hashes([*weights.values()], shards_of(weights), None)

    def changed_by(name, x):
        before = hashes_of(weights)
        after = hashes_of(weights | {name: x})
        return [name for name in before if after[name] != before[name]]

    for name, i in (("a", (9, 6)), ("a", (0, 0)), ("b", (4,))):
        x = weights[name].clone()
        x[i] = torch.nextafter(x[i], torch.tensor(9.0))
        assert changed_by(name, x) == [name]
    # swapped: elements, in a column, in a row, and across: rows and columns have factors of their own
    swaps = ("b", (0,), (1,)), ("a", (0, 3), (1, 3)), ("a", (2, 0), (2, 1)), ("a", (2, 3), (3, 2))
    for name, i, j in swaps:
        x = weights[name].clone()
        x[i] = weights[name][j]
        x[j] = weights[name][i]
        assert changed_by(name, x) == [name]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_norm_adds_each_row_in_its_place_whatever_rank_has_it(alone, ranks, monkeypatch):
    """What the ranks bring to their sum adds up to the rows of one rank, bit for bit."""
    grads = weights_of()
    seen = []

    def norm(*rank):
        shards = shards_of(grads, *rank)
        return sync.grad_norm([s.data for s in shards], shards, alone)

    every = torch.cat([g.flatten() for g in grads.values()])
    assert norm() == pytest.approx(every.double().norm().item(), rel=1e-12)
    monkeypatch.setattr(sync.dist, "all_reduce", lambda rows, group: seen.append(rows.clone()))
    norm()
    (whole,) = seen
    for r in range(ranks):
        norm(r, ranks)
    assert len(whole) == 18
    assert torch.equal(sum(seen[1:]), whole)


# ---- models


def test_a_scratch_model_is_an_ordinary_folder_with_an_exact_tokenizer(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tmp_path.chmod(0o755)
    folders.make_scratch_model(tmp_path, DEFAULTS)
    write_file(tmp_path / "more.safetensors", {"x": torch.ones(1)})
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in tmp_path.iterdir())
    assert '"PreTrainedTokenizerFast"' in (tmp_path / "tokenizer_config.json").read_text()  # transformers 4 knows it
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    text = "17+25=\n 42 ~!"
    tokens = tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokens) == text
    assert len(tokens) == len(text)
    assert tokenizer.eos_token_id == 1
    assert tokenizer.pad_token_id == 0
    assert len(tokenizer) == model.config.vocab_size
    assert 700_000 < model.num_parameters() < 900_000
    folders.save_tokenizer(tmp_path, tokenizer, [1])
    assert json.loads((tmp_path / "generation_config.json").read_text())["pad_token_id"] == 0  # else generate() warns


# ---- files

TENSORS = dict(tokens=torch.arange(20), rewards=torch.tensor([0.5, 1.0]))
META = dict(run="abc", stream="rl", step=3, prompt=7, version=3, responses=["a", "ä\n"])


@pytest.fixture
def file(tmp_path):
    """A group's file, which is whole."""
    path = sync.group_path(tmp_path, 7)
    sync.write_group(path, TENSORS, META)
    return path


def assert_read_as_written(group):
    assert group.meta == META
    torch.testing.assert_close(group.tensors, TENSORS, rtol=0, atol=0)


def test_a_group_file_torn_at_any_byte_or_with_a_flipped_bit_is_refused(file):
    assert_read_as_written(sync.read_group(file, run="abc", step=3))
    assert [*file.parent.iterdir()] == [file]
    data = file.read_bytes()
    refused = 0
    for i in range(len(data)):
        file.write_bytes(data[:i])
        with pytest.raises(RunError, match=file.name):
            sync.read_group(file)
        file.write_bytes(flipped(data, i))
        try:
            # a flip in the header's padding or in the order of its keys changes nothing that is read
            assert_read_as_written(sync.read_group(file))
        except RunError:
            refused += 1
    assert refused > len(data) / 2


WHOLE = group_tensors([1, 2], prompt_tokens=torch.tensor([1, 2]), tokens=torch.tensor([3, 0, 5]))


@pytest.mark.parametrize(
    "change",
    [
        dict(tokens=[3, -1, 5]),
        dict(tokens=[3, 6, 5]),
        dict(tokens=[3.0, 0.5, 5.0]),
        dict(prompt_tokens=[6]),
        dict(lengths=[1, 3]),
        dict(lengths=[4, -1]),
        dict(lengths=[1, 1, 1]),
        dict(logprobs=[0.0]),
        dict(rewards=[0.0]),
        dict(sample=[0, 2]),
        dict(sample=[0]),
        dict(turn=[0, 0]),
        dict(tokens=[], lengths=[]),
        dict(truncated=[[True]]),
    ],
)
def test_a_group_file_with_misfit_tensors_is_refused_despite_its_checksum(file, change):
    sync.write_group(file, WHOLE, META)
    sync.read_group(file, 6)
    changed = {name: torch.tensor(x) for name, x in change.items()}
    sync.write_group(file, WHOLE | changed, META)
    with pytest.raises(RunError, match="group_0007.safetensors: .*; delete it to have it made again") as error:
        sync.read_group(file, 6)
    assert "\n" not in str(error.value)


def test_a_group_file_with_bottomless_json_is_refused(file):
    file.write_bytes(save(WHOLE, {"meta": "[" * 99999 + "]" * 99999}))
    with pytest.raises(RunError, match="torn or not a rollout file"):
        sync.read_group(file)


def test_what_others_wrote_reaches_a_terminal_as_text():
    assert str(RunError("a\x1b[2J\nb\u202e")) == "error: a\\x1b[2J b\\x202e"


def test_a_store_listens_at_its_own_address_alone():
    store = sync.listening_store("127.0.0.1")
    port = f":{store.port:04X}"
    tables = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    rows = [line.split() for line in tables.splitlines()]
    addresses = [address for _, address, _, state, *_ in rows if state == "0A" and address.endswith(port)]
    assert addresses == [f"0100007F{port}"]


JOB = Job("rl", 3, 3, dict.fromkeys(range(4, 44)), 2, Sampling())


class Writer:
    """An engine's sampler, as the queue knows it."""

    def __init__(self, index, pause=0):
        self.engine = types.SimpleNamespace(index=index)
        self.pause = pause
        self.wrote = []

    def sample(self, folder, job, prompts):
        for i in prompts:
            sync.write_group(sync.group_path(folder, i), TENSORS, META | dict(prompt=i))
            self.wrote.append(i)
            time.sleep(self.pause)


def test_a_step_takes_its_own_files_in_the_order_of_its_prompts(tmp_path):
    queue = sync.Queue(tmp_path, "abc", 0)
    folder = tmp_path / "rl_000003"
    folder.mkdir()
    earlier = range(4)  # of an earlier round
    Writer(0).sample(folder, None, (7, 4, 5, 6, *earlier))
    job = JOB._replace(rows=dict.fromkeys((4, 5, 6, 7)))
    assert [meta["prompt"] for _, meta in queue.take(job)] == [4, 5, 6, 7]
    with pytest.raises(RunError, match="has version 3, expected 4"):
        queue.take(job._replace(version=4))
    with pytest.raises(RunError, match=f"has 2 samples of a prompt, expected 3; delete {folder}"):
        queue.take(job._replace(samples=3))
    sync.group_path(folder, 6).write_bytes(sync.group_path(folder, 5).read_bytes())
    with pytest.raises(RunError, match="has prompt 5, expected 6"):
        queue.take(job)


def test_a_dial_rounds_each_row_by_itself_to_numbers_of_its_type():
    x = torch.randn(6, 64) * torch.logspace(-3, 3, 6)[:, None]
    x[2] = 0
    vector = torch.randn(7)
    assert sync.rounded_to(x, "fp32") is x
    assert torch.equal(sync.rounded_to(vector, "int8"), vector.bfloat16().float())
    assert torch.equal(sync.rounded_to(x, "bf16"), x.bfloat16().float())
    assert torch.equal(sync.rounded_to(x, "fp16:act"), x.half().float())
    for bits, worst in (("int8", 1 / 254), ("fp8", 1 / 28)):
        y = sync.rounded_to(x, bits)
        largest = x.abs().amax(1, keepdim=True)
        assert ((y - x).abs() <= worst * 1.01 * largest).all()
        assert not torch.equal(x, y)
        alone = [sync.rounded_to(row[None], bits) for row in x]
        assert torch.equal(torch.cat(alone), y)
        assert max(len(row.unique()) for row in y) > 30


def test_engines_share_a_job_and_every_rank_reads_it_when_all_are_done(tmp_path):
    signs = [tmp_path / "a", tmp_path / "b"]
    queue = sync.Queue(tmp_path, "abc", 5, signs, dist.HashStore())
    fast = Writer(0, 0.001)
    slow = Writer(1, 0.01)

    def read(writer):
        return [meta["prompt"] for _, meta in groups_of(queue, writer, JOB)]

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(read, (fast, slow, None))] == [[*JOB.rows]] * 3
    assert sorted(fast.wrote + slow.wrote) == [*JOB.rows]  # each prompt once
    assert len(fast.wrote) > len(slow.wrote) > 0  # who is done first takes what is left


def test_nobody_asks_for_a_file_before_its_engine_has_announced_it(tmp_path, monkeypatch):
    """A network file system would go on to say that there is none."""
    asked = []
    exists = sync.Path.exists
    monkeypatch.setattr(sync.Path, "exists", lambda path: asked.append(path) or exists(path))
    reader = sync.Queue(tmp_path, "abc", 5, [tmp_path / "engine_0.alive"], dist.HashStore())
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(reader.take, JOB)
        wait_for(lambda: len(asked) > 5, 5)
        assert {path.name for path in asked} == {"engine_0.alive"}
        assert not reading.done()
        groups_of(reader, Writer(0), JOB)
        assert len(reading.result()) == 40


def test_a_rank_that_waits_lends_its_cores_until_it_has_what_it_waits_for(alone, tmp_path, monkeypatch):
    """Two ranks of a machine with four cores. This is the second; it waits for samples."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with open(share_cores(sync.from_all_ranks), "r+b") as file:
        monkeypatch.setattr(host, "working", mmap.mmap(file.fileno(), 0))
    host.working[0] = 1  # as the first rank says of itself
    lend_cores(False)

    def shares_of_a_loop():
        shares = []
        host.share(lambda first, last: shares.append(last - first), 8, host.WORTH_THREADS)
        return shares

    queue = sync.Queue(tmp_path, "abc", 5, [tmp_path / "engine_0.alive"], dist.HashStore())
    assert shares_of_a_loop() == [4, 4]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(queue._wait, tmp_path, ["samples"])
        wait_for(lambda: not host.working[1], 5)
        assert shares_of_a_loop() == [2, 2, 2, 2]
        queue.store.set("samples", "done")
        waiting.result()
    assert shares_of_a_loop() == [4, 4]


def test_a_reader_waits_for_a_hidden_file_and_names_a_missing_one(tmp_path):
    path = tmp_path / "late"
    later = threading.Timer(0.3, path.touch)
    later.start()
    assert sync.appears(path, 5)
    assert not sync.appears(tmp_path / "never", 0.1)
    with pytest.raises(RunError, match=f"group_0004.safetensors: not found on {socket.gethostname()}; a replay"):
        sync.Queue(tmp_path, "abc").take(JOB)


def test_an_engine_that_cannot_join_ends_the_run_although_our_end_waits_for_it():
    class Refusing:
        def join(self, name):
            raise RunError(f"engine 0: cannot join {name}")

        def end(self, line):
            lines.append(line)
            entered.set()

    lines = []
    entered = threading.Event()
    weights = object.__new__(sync.WeightSync)
    weights.ranks = types.SimpleNamespace(mesh=0)
    weights.groups = ["weights 0"]
    weights.engine = Refusing()
    assert weights._at_both_ends(lambda: entered.wait(5), "join")
    assert lines == ["engine 0: cannot join weights 0"]


def test_engines_are_waited_for_as_long_as_one_shows_that_it_lives(tmp_path):
    """Its work takes three times the timeout; after that nobody touches a sign, and the wait ends."""
    signs = [tmp_path / "engine_0.alive", tmp_path / "engine_1.alive"]
    started = time.monotonic()
    queue = sync.Queue(tmp_path, "abc", 0.8, signs, dist.HashStore())

    def engine():
        for _ in range(48):
            signs[1].touch()
            time.sleep(0.05)
        queue.store.set("mine", "done")

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(engine)
        queue._wait(tmp_path, ["mine"])
        assert time.monotonic() - started > 2.3
        working.result()
    with pytest.raises(RunError, match="rl_000003: no rollout came for 1 s"):
        queue.take(JOB)
    assert time.monotonic() - started < 10


# ---- the ledger


def test_the_digest_depends_on_every_line_and_nothing_else(tmp_path):
    def digest(*lines):
        return write_ledger(tmp_path / "ledger", lines)

    a, b, c = (dict(step=i, tokens=f"{i:016x}") for i in range(3))
    whole = digest(a, b, c)
    assert digest(a, b, c) == whole
    assert json.loads((tmp_path / "ledger").read_text().splitlines()[-1])["chain"] == whole
    other = dict(tokens="0")
    others = {digest(a, b), digest(c, b, a), digest(a | other, b, c), digest(a, b | other, c), digest(a, b, c | other)}
    assert len(others | {whole}) == 6
    sync.Ledger(tmp_path / "ledger")
    assert (tmp_path / "ledger").read_bytes() == b""


def test_content_hash_sees_bits_order_and_where_parts_end():
    a = torch.tensor([0.0, 1.0])
    b = torch.tensor([-0.0, 1.0])
    assert sync.content_hash(a) == sync.content_hash(a.clone())
    cuts = [torch.arange(1, 7).split(sizes) for sizes in ([6], [1, 5], [5, 1], [2, 2, 2])]
    different = [[a], [b], [[0.0, 1.0]], [a, b], [b, a], *cuts]
    assert len({sync.content_hash(*parts) for parts in different}) == len(different)


def test_a_ledger_goes_on_from_a_byte_and_later_lines_must_recur(tmp_path):
    lines = [dict(phase="rl", step=i, tokens=f"{i:016x}") for i in range(4)]
    path = tmp_path / "ledger"
    write_ledger(path, lines)
    whole = path.read_bytes()
    first, second, *_ = whole.splitlines(keepends=True)
    size = len(first + second)

    def go_on(lines=(), strict=True, content=whole):
        path.write_bytes(content)
        ledger = sync.Ledger(path, size, strict)
        for line in lines:
            ledger.append(**line)
        return path.read_bytes()

    assert go_on(lines[2:]) == whole
    assert go_on(lines[2:], content=whole[:-5]) == whole
    other = [lines[2], dict(lines[3], tokens="0")]
    with pytest.raises(RunError, match="rl step 3 came out otherwise"):
        go_on(other)
    assert go_on(other, strict=False) != whole
    for i in range(size):
        with pytest.raises(RunError, match="line [12] is altered or torn"):
            go_on(content=flipped(whole, i))
    with pytest.raises(RunError, match="shorter than its run's checkpoint says"):
        go_on(content=first)
    assert path.read_bytes() == first


# ---- the record


@pytest.fixture
def record_of(tmp_path):
    """record_of(saved, answer): the Record of a run, or of its resume; the data is a row with this answer."""
    c = types.SimpleNamespace(branch="", **DEFAULTS | dict(group_size=3, pass_reward=0.5))

    def make(saved={}, answer="2"):
        rows = {"": [dict(prompt="1+1=", answer=answer)]}
        task = types.SimpleNamespace(agent=None, template_skipped=False, train_rows=rows)
        return Record(tmp_path, saved, c, {}, task)

    return make


def test_a_resume_with_other_rows_says_so(record_of, capsys):
    saved = record_of().state()
    record_of(saved)
    assert capsys.readouterr().err == ""
    record_of(saved, "3")
    assert capsys.readouterr().err.startswith("warning: the data has other rows")


def test_evaluations_are_a_chain_of_their_own_that_a_resume_cuts_back(record_of, tmp_path):
    def evaluate(record, step, tokens):
        record.evaluation(step, {"pass@1": 0.5}, 2, dict(tokens=tokens))

    record = record_of()
    ledger = record.ledger.digest
    empty = record.evaluations.digest
    evaluate(record, 0, "a")
    whole = record.evaluations.digest
    assert record.ledger.digest == ledger
    assert len({ledger, empty, whole}) == 3
    saved = record.state() | dict(step=0)
    evaluate(record, 3, "b")
    again = record_of(saved)
    path = tmp_path / "evaluations.jsonl"
    assert again.evaluations.digest == whole
    assert path.read_text().count("\n") == 1
    evaluate(again, 3, "c")  # with other eval_samples, say
    del saved["bytes"][path.name]
    path.unlink()  # of a run that was begun before there was one
    assert record_of(saved).evaluations.digest == empty


def test_the_logs_are_on_the_disk_before_a_checkpoint_says_how_long_they_are(record_of, monkeypatch):
    """After a power cut a log may lack its end, and a resume refuses one that is shorter than its checkpoint says."""
    synced = []
    monkeypatch.setattr("onecurve.run.record.fsync", synced.append)
    sizes = record_of().state()["bytes"]
    assert {path.name for path in synced} == sizes.keys()


def made_group(i, rewards):
    """Group i of a step, of three samples; those of group 0 are cut off."""
    tensors = group_tensors(
        [1, 2, 3],
        tokens=torch.arange(6) + i,
        rewards=torch.tensor(rewards),
        prompt_tokens=torch.tensor([i]),
        truncated=torch.tensor([i == 0] * 3),
    )
    meta = dict(
        prompt_text=f"p{i}",
        answer="",
        responses=list("abc"),
        version=3,
        retractions=1,
        began=i,
        seconds=i,
        finished=True,
        engine=i % 2,
        elapsed=4.0 + i,
        idle=1.0 + i % 2,
    )
    return sync.Group(tensors, meta)


REWARDS = [1.0, 1.0, 1.0], [0.0, 0.0, 0.6], [0.1, 0.1, 0.0], [0.0, 0.0, 0.0]


def test_the_figures_of_a_step_are_those_of_its_groups(record_of, tmp_path):
    record = record_of()
    made = [made_group(i, rewards) for i, rewards in enumerate(REWARDS)]
    trained = made[:3]
    record.open_bar(0, 1)
    record.step(0, Batch(trained, made, None), dict(loss=0.25), {}, [0.0, 1.0, 3.0, 7.0])
    assert record.bar.n == 1
    rewards = torch.tensor(REWARDS[:3]).double()
    expected = dict(
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        groups=4,
        zero_std_groups=1,
        easy_groups=1,
        hard_groups=2,
        response_length_mean=2.0,
        response_length_max=3,
        loss=0.25,
        truncated_fraction=pytest.approx(1 / 3),
        engine_retractions=4,
        wait_seconds=1.0,
        train_seconds=2.0,
        sync_seconds=4.0,
        rollout_seconds=6,  # from when the first was begun, 0, to when the last was done
        idle_seconds=(1 + 2) / 2,  # of each engine up to its last group
    )
    (line,) = record.steps
    assert {key: line[key] for key in expected} == expected
    written = json.loads((tmp_path / "ledger.jsonl").read_text())
    for stage in ("tokens", "logprobs", "rewards"):
        assert written[stage] == sync.content_hash(*(group.tensors[stage] for group in trained))


def test_samples_md_has_each_response_and_what_was_cut_off(record_of, tmp_path):
    """An agent's last answer came twice there, and one that was cut off looked whole."""
    record = record_of()
    cut, _, whole, nothing = (made_group(i, rewards) for i, rewards in enumerate(REWARDS))
    record.samples(0, *cut)
    record.samples(1, *whole)
    turns = [dict(message=i, tool_calls=[], rewards=[], truncated=i == 1) for i in range(2)]
    messages = [dict(role="assistant", content=text) for text in "ab"]
    record.agent = types.SimpleNamespace(transcript=functools.partial(Agent.transcript, None))
    episode = [dict(path=[], messages=messages, turns=turns)]
    record.samples(2, nothing.tensors, nothing.meta | dict(episodes=[episode] * 3))
    text = (tmp_path / "samples.md").read_text()
    assert "- reward 1: `'a'`, cut off\n" in text
    assert "- reward 0.1: `'a'`\n- reward 0.1: `'b'`\n" in text
    assert text.endswith("- reward 0:\n    - assistant: `'a'`\n    - assistant: `'b'`, cut off\n")


# ---- checkpoints


def make_checkpoint(folder, step, fill):
    partial = folder / f".step_{step:06d}"
    (partial / "optimizer").mkdir(parents=True)
    for name in ("config.json", "optimizer/optimizer.safetensors"):
        (partial / name).write_bytes(bytes([fill]) * 50)
    seal_checkpoint(partial, folder / f"step_{step:06d}", step=step, run="abc")
    return folder / f"step_{step:06d}"


def test_a_checkpoint_is_read_by_its_run_only(tmp_path):
    folder = make_checkpoint(tmp_path, 3, 7)
    assert read_checkpoint(folder, 0, 1, run="abc")["step"] == 3
    with pytest.raises(RunError, match="has run 'abc', expected 'abd': not a file of this run"):
        read_checkpoint(folder, 0, 1, run="abd")


def test_a_truncated_flipped_or_missing_checkpoint_file_is_named(tmp_path):
    folder = make_checkpoint(tmp_path, 3, 7)
    for path in [p for p in folder.rglob("*") if p.is_file()]:
        data = path.read_bytes()
        damaged = [data[:-1], data[: len(data) // 2], b"", None]
        damaged += [flipped(data, i) for i in range(len(data))]
        for content in damaged:
            path.unlink() if content is None else path.write_bytes(content)
            if content is not None and path.name == "checkpoint.json":
                try:
                    if json.loads(content) == json.loads(data):
                        continue  # white space
                except ValueError:
                    pass
            with pytest.raises(RunError, match=path.name):
                read_checkpoint(folder, 0, 1, run="abc")
        path.write_bytes(data)
    assert read_checkpoint(folder, 0, 1)


def test_ranks_share_the_check_of_a_checkpoints_files(tmp_path):
    folder = make_checkpoint(tmp_path, 3, 7)
    for name in ("config.json", "optimizer/optimizer.safetensors"):
        whole, refused = (folder / name).read_bytes(), []
        (folder / name).write_bytes(b"")
        for rank in range(2):
            try:
                read_checkpoint(folder, rank, 2)
            except RunError:
                refused.append(rank)
        (folder / name).write_bytes(whole)
        assert len(refused) == 1, name


def test_an_unfinished_checkpoint_is_none_and_the_last_ones_are_kept(tmp_path):
    for step in (1, 2, 3):
        make_checkpoint(tmp_path, step, step)
    (tmp_path / ".step_000004").mkdir()
    assert [p.name for p in checkpoints(tmp_path)] == ["step_000001", "step_000002", "step_000003"]
    delete_checkpoints(tmp_path, checkpoints(tmp_path)[:-2])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000002", "step_000003"]
    again = make_checkpoint(tmp_path, 3, 9)  # over one that is there
    assert (again / "config.json").read_bytes() == b"\t" * 50


def test_after_a_crash_whole_rollouts_stay_and_torn_ones_go(tmp_path):
    paths = [tmp_path / f"rl_{step:06d}" / f"group_{i:04d}.safetensors" for step in (1, 2) for i in (0, 1)]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        sync.write_group(path, TENSORS, META)
    *whole, torn = paths
    torn.write_bytes(torn.read_bytes()[:-1])
    torn.with_name(".group_0002.safetensors.77").write_bytes(b"half")
    assert clean_queue(tmp_path, 2) == 1
    assert sorted(tmp_path.rglob("*.*")) == whole


def test_a_folder_belongs_to_one_process_and_one_run(tmp_path, refusal):
    config = dict(seed=1, mode="grpo", queue_dir="")

    def begin(resumed=None, restarted=False):
        return open_run(tmp_path, config, resumed or {}, restarted, "")

    def refused(**options):
        line = refusal(begin, **options)
        gc.collect()  # the traceback would hold the lock's file
        return line

    first = begin()
    assert "another run is writing there" in refused(resumed=config)
    first.close()
    begin().close()  # nothing was computed: it is nobody's, and another command may have it
    assert (tmp_path / "config.py").read_text().count("seed = 1") == 1
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert "holds a run already" in refused()
    begin(config).close()
    begin(config, restarted=True).close()  # by the torchrun whose process began it
    (tmp_path / "lock").write_text("torchrun 1")
    assert "holds a run already" in refused(resumed=config, restarted=True)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_with_the_cure(tmp_path, monkeypatch, refusal, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    line = refusal(open_run, tmp_path, dict(seed=1), {}, False, "")
    assert line.startswith(f"error: out_dir={str(tmp_path)!r}: its file system has no flock")
    assert "mount it with locks" in line
    assert "or choose another" in line


def test_a_resume_without_an_engine_does_not_make_the_run_one(tmp_path, capsys):
    config = dict(seed=1, mode="grpo", queue_dir="")
    open_run(tmp_path, config, {}, False, "").close()
    replay = dict(mode="replay", queue_dir="elsewhere", seed=2)
    open_run(tmp_path, config | replay, config, False, "").close()
    assert saved_config(tmp_path / "config.py") == config | dict(seed=2)
