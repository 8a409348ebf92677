"""
Whole runs with the real engine: test_laws.py, test_run.py, test_resume.py and test_algorithms.py read them.

An engine takes 10 to 30 s to start, so the runs are few and many tests share each, whichever worker they are in. Those
under torchrun are launched as a user launches them; `launch_warm` saves the others' imports.
"""

import fcntl
import inspect
import json
import os
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from xdist.scheduler import LoadScopeScheduling

import sync

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
from runs import ROOT, listening, run_warm, start_warm  # noqa: E402, F401
from trials import (  # noqa: E402
    AGENT,
    DIALOGUES,
    LAG,
    MIXTURE,
    RULE,
    SEGMENTS,
    SPLIT,
    command_of,
    interrupt,
    kill_one,
    launch,
    lines,
    of_this_commit,
    replay_of,
    run_with_kills,
    schedulers_of,
    slow_engines,
    steps_that_taught_nothing,
    taught_by,
)

SMALLEST = {  # a scratch model
    "scratch_args": "num_hidden_layers=1, hidden_size=32, num_attention_heads=1, num_key_value_heads=1, "
    "intermediate_size=32"
}

torch.set_num_threads(1)  # two workers share the machine

# Flags of runs that are compared: what must not matter for an engine, and dynamic sampling with what goes with it
ENGINE_FLAGS = ("--engine_args=disable_radix_cache=True, max_running_requests=17, chunked_prefill_size=32",)
DAPO = "--dynamic_sampling=2 --overlong_cache=2 --overlong_filter --clip_high=0.28 --max_steps=6 --eval_size=0".split()
DAPO += RULE

# Long tests first, so that all workers end at the same time; of the first three test_engine alone wants the loops, and
# compiles them for all. Those of WHOLE_RUNS are handed out one by one; any other file's tests share a model, a process
# group or an engine and stay together.
WHOLE_RUNS = ("test_laws", "test_nodes", "test_algorithms", "test_resume", "test_run")
LONG = """test_pretend_cuda test_engine test_triton test_endpoint test_lora test_reward_model test_judges test_watch
    test_exercises test_experiments test_lessons test_publish test_instruments""".split()
LONG += WHOLE_RUNS
TURNS = 3  # `pytest` has a third of the tests marked `in_turn`; `pytest tests`, or with named files, all of them


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=1, help="SIGKILLs of the runs that are killed at random moments")


def pytest_configure(config):
    if config.args_source == config.ArgsSource.TESTPATHS:  # for workers, and the interpreter's process, too
        # by thousands: so another choice of one in three, by the same hash, does not go with it
        os.environ["ONECURVE_TURN"] = str(of_this_commit(range(1000 * TURNS)) // 1000)
    config.addinivalue_line("markers", "in_turn: takes long; a commit's hash says whether it is in a run of all tests")
    config.addinivalue_line("markers", "law(varied): what a test of a law varies, for the table of tools/prove.py")
    config.addinivalue_line("markers", "control(wrong): what is wrong in a negative control, for the same table")
    if config.getoption("numprocesses"):  # the process of `launch_warm` starts when the first worker wants it, for all
        server = listening()
        os.environ["ONECURVE_WARM"] = server.getsockname()
        threading.Thread(target=start_when_wanted, args=[server], daemon=True).start()


def start_when_wanted(server):
    select.select([server], [], [])
    start_warm(server)


def pytest_collection_modifyitems(config, items):
    if turn := os.environ.get("ONECURVE_TURN"):
        long = [item for item in items if item.get_closest_marker("in_turn")]
        left_out = {*long} - {*long[int(turn) :: TURNS]}
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
    for item in items:
        item.user_properties += [("varied", mark.args[0]) for mark in item.iter_markers("law")]
        item.user_properties += [("control", mark.args[0]) for mark in item.iter_markers("control")]


class ByFile(LoadScopeScheduling):
    def _split_scope(self, nodeid):
        file = nodeid.partition("::")[0]
        return nodeid if Path(file).stem in WHOLE_RUNS else file


def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)


# ---- runs


def launch_warm(folder, *flags, broken=None, **options):
    """`launch` of a run by forks of a process that has imported the libraries: (status, output)."""
    output = folder.parent / f"{folder.name}.output"
    return run_warm(command_of(folder, *flags, broken=broken)[1:], output, **options)


def digest(output):
    last = [line for line in output.splitlines() if line.strip()][-1]
    assert re.fullmatch(r"digest [0-9a-f]{64}", last), output[-2000:]
    return last


def error_line(output):
    """The one line with which a run ended."""
    assert "Traceback" not in output, output
    (line,) = [x for x in output.splitlines() if x.startswith("error:")]
    return line


def error_of_run(folder, *flags, status=2, **options):
    """The one line with which a run ends that has to fail."""
    ended, output = launch_warm(folder, *flags, **options)
    assert ended == status, output[-4000:]
    return error_line(output)


@pytest.fixture
def refusal(capsys, monkeypatch):
    """refusal(f, ..): the one line that f(..) prints as it ends this process."""
    monkeypatch.delenv("RANK", raising=False)

    def line_of(f, *args, **options):
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            f(*args, **options)
        assert end.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return line_of


def read_groups(folder, steps="rl_*"):
    """[(tensors, meta)] of a run's rollout files, in the order of steps and prompts; steps: folders of its queue."""
    return [*map(sync.read_group, sorted((folder / "queue").glob(f"{steps}/group_*.safetensors")))]


def group_tensors(lengths, **others):
    """A group's tensors as its file has them, of samples of so many tokens, with others in the place of some."""
    n = sum(lengths)
    G = len(lengths)
    plain = dict(
        prompt_tokens=torch.tensor([1]),
        tokens=torch.arange(n),
        lengths=torch.tensor(lengths),
        logprobs=torch.zeros(n),
        loss_mask=torch.ones(n).bool(),
        weight_version=torch.zeros(n).long(),
        truncated=torch.zeros(G).bool(),
        rewards=torch.zeros(G),
        sample=torch.arange(G),
        turns=torch.ones(G).long(),
        turn=torch.zeros(n).long(),
    )
    return plain | others


def flipped(data, i):
    """These bytes with another bit in byte i."""
    return data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :]


def write_ledger(path, entries):
    """Makes a file the ledger of these lines, with a chain that fits; its digest."""
    path.unlink(missing_ok=True)
    ledger = sync.Ledger(path)
    for entry in entries:
        ledger.append(**{key: value for key, value in entry.items() if key != "chain"})
    return ledger.digest


def finish(folder, *flags, launch=launch_warm, **options):
    """The output of a run that has to succeed and to leave nothing in shared memory."""
    before = orphans()
    status, output = launch(folder, *flags, **options)
    assert status == 0, output[-4000:]
    if orphans() - before:  # of this run, or of other workers', whose engines come and go and are killed
        with shared_memory():
            wait_for(lambda: orphans() <= before, 5)
    return output


@contextmanager
def locked(path):
    """One worker at a time."""
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def shared_memory():
    """One worker at a time: a test that kills engines while they start leaves names behind, and removes them inside."""
    return locked(Path(tempfile.gettempdir(), "onecurve_tests.lock"))


def orphans():
    """Names in /dev/shm that no process has mapped."""
    there, mapped = {x.inode(): x.name for x in os.scandir("/dev/shm")}, set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped |= set(map(int, re.findall(r"(\d+) +/dev/shm/", path.read_text())))
        except OSError:
            pass  # it ended
    return {name for inode, name in there.items() if inode not in mapped}


@contextmanager
def answering(respond):
    """
    The address of a server that answers POST with respond(body): (status, bytes), or None, which hangs up; and what it
    was asked: (headers, body).
    """
    asked = []
    sockets = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self):
            super().setup()
            sockets.append(self.connection)

        def send(self, status, content):
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", len(content))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self):
            self.send(200, json.dumps(dict(object="list", data=[dict(id="first"), dict(id="policy")])).encode())

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append((self.headers, body))
            if answer := respond(body):
                self.send(*answer)
            else:
                self.close_connection = True

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 256

        def handle_error(self, *_):
            pass

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown(), server.socket.close()
        for connection in sockets:
            connection.close()
        thread.join()


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)


def float64_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def plain_logprobs(model, ids, at):
    """Log-probs of the tokens at these places, each after those before it."""
    scores = torch.log_softmax(model(ids[None]).logits[0], -1)
    return scores[at - 1, ids[at]]


@pytest.fixture
def run(tmp_path):
    """The folder of a test's own run."""
    return tmp_path / "run"


# ---- runs that tests share


@pytest.fixture
def assert_it_learned(record_property):
    """
    assert_it_learned(folder, steps): in every step there was something to learn from: unequal rewards, a gradient,
    other weights than before; and no log-prob was another in the engine than in the trainer.
    """

    def check(folder, steps):
        assert len({entry["tokens"] for entry in lines(folder, "ledger.jsonl", "rl")}) == steps
        assert not steps_that_taught_nothing(folder)
        assert not any(m["logprob_mismatch_tokens"] for m in lines(folder, "metrics.jsonl", "rl"))
        record_property("steps", steps)

    return check


def shared(make):
    """A fixture: (folder, output) of what make(folder, other fixtures ..) ran, by the first worker that wants it."""
    _, *fixtures = inspect.signature(make).parameters
    name = f"{make.__module__}_{make.__name__}".removeprefix("conftest_")

    @pytest.fixture(scope="session", name=make.__name__)
    def find(request, tmp_path_factory):
        others = [request.getfixturevalue(fixture) for fixture in fixtures]
        base = tmp_path_factory.getbasetemp()
        runs = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
        runs.mkdir(exist_ok=True)
        output = runs / f"output_of_{name}"
        with locked(runs / f"lock_of_{name}"):
            if not output.exists():
                output.write_text(make(runs / name, *others))
        return runs / name, output.read_text()

    return find


@shared
def two_ranks(folder):
    """One trainer and one engine under torchrun."""
    return finish(folder, ranks=2, launch=launch)


@pytest.fixture(scope="session")
def warmed(two_ranks):
    """Flags of a run that begins with the model that two_ranks had after 16 steps, and so needs no warm-up."""
    return f"--init_from={two_ranks[0] / 'ckpt' / 'step_000016'}", "--warmup_sft_steps=0"


@shared
def one_process(folder):
    """The same run in one process that does both, and with all that must not matter changed."""
    flags = "--threads=2 --gradient_checkpointing --weight_sync=ipc --checkpoint_every=0".split()
    temporary = folder.with_name("temporary" * 12)  # too long for the names of sockets
    temporary.mkdir()
    return finish(folder, *ENGINE_FLAGS, *flags, env=dict(TMPDIR=str(temporary)))


@shared
def one_engine(folder):
    """DAPO's dynamic sampling in one process."""
    return finish(folder, *DAPO)


@shared
def two_engines(folder):
    """The same with two engines that share the work; small caches, so that they put requests back all the time."""
    flags = "--rollout_ranks=2 --engine_args=max_total_tokens=150".split()
    return finish(folder, *DAPO, *flags, ranks=3, env={"SGLANG_TEST_RETRACT": "1"})


@shared
def replayed(folder, two_ranks):
    """The run of two_ranks again, from its rollout files, on four trainers."""
    return finish(folder, *replay_of(two_ranks[0]), ranks=4)


@shared
def resumed(folder, two_ranks):
    """The run of two_ranks, interrupted after step 22 and resumed at step 16, now on two trainers and an engine."""
    queue = interrupt(two_ranks[0], folder) / "queue"
    torn = sync.group_path(queue / "rl_000020", 3)
    torn.write_bytes(torn.read_bytes()[:-7])
    return finish(folder, "--init_from=resume", ranks=3)


@pytest.fixture(scope="session")
def kills(request):
    return request.config.getoption("kills")


@shared
def killed(folder, kills):
    """The run of two_ranks with SIGKILLs at random moments, restarted by torchrun."""
    return survive(folder, kills)


@pytest.fixture(scope="session")
def some_kills(kills):
    """A third of --kills, for laws that are not about kills."""
    return -(-kills // 3)


def resume_with_kills(folder, kills, rng, *flags, **options):
    """`run_with_kills` of a run by `launch_warm`, which is resumed as by its user and not by torchrun."""
    victims = []
    with ThreadPoolExecutor(1) as pool:
        while True:
            resume = ["--init_from=resume"] * (folder / "config.py").exists()
            run = pool.submit(launch_warm, folder, *flags, *resume, **options)
            kind = kill_one(folder, rng, lambda: not run.done(), 5.0) if len(victims) < kills else ""
            victims += [kind] * bool(kind)
            status, output = run.result()
            if not (status and kind):
                return status, output, victims


def survive_apart(folder, kills, *flags):
    """`survive` of a run with two engines that are slow at random."""
    options = dict(ranks=3, broken=slow_engines, run=resume_with_kills)
    return survive(folder, kills, *flags, "--rollout_ranks=2", **options)


def survive(folder, kills, *flags, run=run_with_kills, **options):
    """
    A line about what was killed, and the output of a run that gets so many SIGKILLs at random moments and continues. If
    it is done before it was killed so often, it is made again, and must come out the same.
    """
    killed, ledgers, rng = [], set(), random.Random(os.urandom(8))
    while len(killed) < kills:
        shutil.rmtree(folder, ignore_errors=True)
        with shared_memory():
            left = kills - len(killed)
            status, output, victims = run(folder, left, rng, "--checkpoint_every=2", *flags, **options)
        assert status == 0, output[-4000:]
        killed += victims
        ledgers.add((folder / "ledger.jsonl").read_bytes())
    assert len(ledgers) == 1
    counts = " and ".join(f"{killed.count(kind)} of a {kind}" for kind in sorted(set(killed)))
    return f"SIGKILLs: {counts}\n{output}"


@shared
def lagged(folder, warmed):
    """Samples two steps ahead of the updates, in one process that does both in turn."""
    return finish(folder, *LAG, *warmed, "--weight_sync=ipc")


@shared
def lagged_apart(folder, warmed, some_kills):
    """
    The same side by side, on two engines that are slow at random, with SIGKILLs at random moments; ranks that wait lend
    their cores.
    """
    return survive_apart(folder, some_kills, *LAG, *warmed, "--threads=0")


@shared
def segments(folder, warmed):
    """Partial rollouts, each segment with the weights of its step, in one process; no prefix is found again."""
    engine = "--engine_args=disable_radix_cache=True, max_running_requests=17"
    return finish(folder, *SEGMENTS, *warmed, engine, "--weight_sync=ipc")


@shared
def segments_apart(folder, warmed, some_kills):
    """The same side by side on two slow engines, with SIGKILLs at random moments."""
    return survive_apart(folder, some_kills, *SEGMENTS, *warmed)


@shared
def split(folder, warmed):
    """Sums of four parts and samples a step ahead, in one process."""
    return finish(folder, *SPLIT, *warmed)


@shared
def split_apart(folder, warmed):
    """
    The same on two engines of two ranks each, until one of their four schedulers is killed; resumed with one engine.
    Its first output is in the file `lost` beside its folder.
    """
    flags = (*SPLIT, *warmed, "--rollout_tp=2")

    def kill_one():
        wait_for((folder / "ckpt" / "step_000008").exists, 300)
        found = schedulers_of(folder)
        assert len(found) == 4
        os.kill(random.SystemRandom().choice(found), signal.SIGKILL)

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill_one)
        status, output = launch_warm(folder, *flags, "--rollout_ranks=4", ranks=5)
        killed.result()
    assert status, output[-4000:]
    (folder.parent / "lost").write_text(output)
    return finish(folder, *flags, "--rollout_ranks=2", "--init_from=resume", ranks=3)


@shared
def mixture(folder):
    """A mixture of experts, with one trainer and one engine."""
    return finish(folder, *MIXTURE, ranks=2)


@shared
def mixture_resumed(folder, mixture):
    """The same, interrupted after step 14 and resumed at step 8, on two trainers and an engine."""
    interrupt(mixture[0], folder)
    return finish(folder, *MIXTURE, "--init_from=resume", ranks=3)


@shared
def taught(folder):
    return finish(folder, *AGENT, *DIALOGUES)


@pytest.fixture(scope="session")
def agent(taught):
    """Flags of the runs of an agent whose tool takes its time, after supervised steps on its dialogues."""
    return taught_by(taught[0])


@shared
def agents(folder, agent):
    """Such a run in one process."""
    return finish(folder, *agent)


@shared
def agents_apart(folder, agent):
    """
    The same with two trainers and two engines, ended by SIGKILL between a call and its result, and resumed. The files
    `notes` and `victim` are beside its folder.
    """
    env = dict(NOTES=str(folder.parent / "notes"), VICTIM=str(folder.parent / "victim"))
    flags = (*agent, "--rollout_ranks=2")
    with shared_memory():
        status, output = launch_warm(folder, *flags, ranks=4, env=env)
    assert status == -signal.SIGKILL, output[-4000:]
    assert Path(env["VICTIM"]).exists()
    return finish(folder, *flags, "--init_from=resume", ranks=4, env=env)


# ---- a process group of one, in the process of the tests


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def mesh(alone):
    return DeviceMesh.from_group(alone, "cpu")
