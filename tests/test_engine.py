"""
The real SGLang engine in this process, against the trainer's model: the same 32 bits for every token.

    pytest tests/test_engine.py
"""

import asyncio
import functools
import mmap
import multiprocessing
import os
import re
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from test_dispatch import Record
from torch.utils._python_dispatch import _disable_current_modes

import kernels
import sync
import train_grpo as train
from kernels import Sampling
from onecurve.agents.sampler import AgentSampler
from onecurve.cpu import host
from onecurve.cpu.loops import murmur_hash32
from onecurve.models import dense, folders
from onecurve.sglang.engine import folder_for_sockets, unlink_shared_memory
from onecurve.sglang.patches import Around, load_all, run_scheduler
from rewards import load_reward
from rollout_server import Job, RolloutEngine, Sampler, sampling_seed

DEFAULTS = train.DEFAULTS
# so small a cache that the engine has to retract requests, and takes them up again later
CONFIG = DEFAULTS | dict(
    max_prompt_tokens=150,
    max_new_tokens=40,
    prompts_per_step=8,
    group_size=4,
    engine_args="max_total_tokens=600",
)


OPERATORS = ("rms_norm", "rms_norm, residual", "norm_rope", "rope_table", "swiglu", "head_logits", "attention", "mm")
REPLACED = {"mm", "addmm", "_log_softmax", "_softmax"}  # by enable_batch_invariant, on CUDA all of them
OTHERS = set(  # element by element, moved, made, read, of whole numbers, and a largest number, which has no order
    """
    _local_scalar_dense _to_copy add add_ any arange argmax bitwise_and bitwise_not cat clamp_ clone constant_pad_nd
    copy_ cumsum detach div div_ embedding empty eq full_like gather ge index index_put_ lift_fresh log log_ lt max
    mul neg_ new_empty new_ones nextafter nonzero ones_like scalar_tensor select slice split split_with_sizes stack sub
    t transpose unbind unsqueeze view where zero_ zeros zeros_like
    """.split()
)


def hashes(seeds, positions, columns):
    """What SGLang's Triton kernel gives, (B, V) int64."""
    pairs = zip(seeds.view(torch.int64).tolist(), positions.tolist())
    return torch.tensor([[murmur_hash32(seed, position, c) for c in columns.tolist()] for seed, position in pairs])


def watched_scheduler(*args, **kwargs):
    """
    `run_scheduler`, with four RPCs: one makes one operator of OPERATORS wrong by a rounding, '' none of them; one puts
    SGLang's draws in the place of ours, and back; one writes down what forward passes and sampling have reached beside
    our operators; one, at how many tokens since its last call SGLang has looked.
    """
    from sglang.srt.layers import sampler
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner

    faulty = [""]
    reached = set()
    other = [sampler.multinomial_with_seed]
    sampler.murmur_hash32 = hashes

    def recorded(f):
        def run(*args, **kwargs):
            with Record() as record:
                out = f(*args, **kwargs)
            reached.update(record.seen)
            return out

        return run

    def watched(name, f):
        def operator(*args, **kwargs):
            what = name
            if name == "rms_norm":  # in each of the forms that SGLang calls it in
                what += ", residual" if args[3] is not None else ""
            with _disable_current_modes():
                out = f(*args, **kwargs)
            if what != faulty[0]:
                return out
            first, *others = out if isinstance(out, tuple) else (out,)
            first = torch.nextafter(first, torch.full_like(first, float("inf")))
            return (first, *others) if others else first

        return operator

    for name in {what.split()[0].strip(",") for what in OPERATORS}:
        setattr(kernels, name, watched(name, getattr(kernels, name)))
    ModelRunner.forward = recorded(ModelRunner.forward)
    ModelRunner.sample = recorded(ModelRunner.sample)

    def swap_draw(self):
        kernels.draw, other[0] = other[0], kernels.draw

    Scheduler.swap_draw = swap_draw

    def make_faulty(self, operator):
        host.panel_cache = None if operator else {}  # in one call they cannot be told apart
        faulty[0] = operator

    Scheduler.make_faulty = make_faulty
    looks = []
    Req.update_finish_state = Around(lambda own, *args: looks.append(own(*args))).of(Req.update_finish_state)

    def write_looks(self, path):
        Path(path).write_text(str(len(looks)))
        looks.clear()

    Scheduler.write_looks = write_looks
    Scheduler.write_reached = lambda self, path: Path(path).write_text(" ".join(sorted(reached)))
    run_scheduler(*args, **kwargs)


def make_model(family, folder):
    """A tiny random model of the family, its norms and biases away from 1 and 0 so that they count."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    size = dict(
        vocab_size=98,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    kind = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig}[family]
    extra = dict(head_dim=32) if family == "qwen3" else {}
    if family == "llama":
        extra["attention_bias"] = True
        extra["rope_parameters"] = dict(
            rope_type="llama3",
            rope_theta=10000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**size, **extra, tie_word_embeddings=family != "llama"))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * (0.3 if p.dim() == 1 else 0.1))
    model.save_pretrained(folder)


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "llama"])
def pair(request, tmp_path_factory):
    """(engine, trainer's model, {how: WeightSync})."""
    folder = tmp_path_factory.mktemp(request.param)
    make_model(request.param, folder)
    ranks = sync.start_process_groups(1, 1, "cpu")
    kernels.enable_batch_invariant()
    hf = dense.check_model(folder, CONFIG)
    model = dense.build_model(hf, ranks.mesh, "cpu", True)
    shards = sync.shards(model, ranks.mesh)
    folders.load_weights(shards, folder, hf.tie_word_embeddings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onecurve.sglang.engine.run_scheduler", watched_scheduler)
        engine = RolloutEngine(0, folder, hf, CONFIG, "cpu", torch.float32, folder / "engine.log")
    send = {}
    transports = []
    for how in ("broadcast", "ipc"):
        transport = sync.WeightSync(how, ranks, shards, engine, "cpu", torch.float32)
        transport.plan = sync.buckets([(s.name, s.shape) for s in shards], torch.float32, 100_000)
        assert len(transport.plan) > 1
        transports.append(transport)
        send[how] = functools.partial(transport.publish, hashes={}, shards=shards)

    send["broadcast"](0)
    yield engine, model, send
    transports[0].close()
    engine.close()
    kernels.disable_batch_invariant()
    dist.destroy_process_group()


def prompts(n, seed, shared=0):
    """n prompts of 1 to 150 random tokens, the first `shared` of them the same in all."""
    draw = torch.Generator().manual_seed(seed)
    start = torch.randint(2, 98, (shared,), generator=draw).tolist()
    sizes = torch.randint(1, 150 - shared, (n,), generator=draw).tolist()
    return [start + torch.randint(2, 98, (size,), generator=draw).tolist() for size in sizes]


CUT = Sampling(0.5, 0.9, 20, 0.02)


def roll_out(engine, folder, rows, sampling=Sampling()):
    """The group files' tensors of 4 samples of each row of tokens."""
    rows = {i: dict(prompt="", answer="", prompt_tokens=tokens) for i, tokens in enumerate(rows)}
    folder.mkdir(exist_ok=True)
    rewards = {"": load_reward("exact")}
    sampler = Sampler(engine, CONFIG, "test", engines=1, rewards=rewards, decode=str, stop_tokens=[1])
    sampler.sample(folder, Job("rl", 0, engine.version, rows, 4, sampling), iter(rows))
    return [sync.read_group(sync.group_path(folder, i))[0] for i in range(len(rows))]


def differing(model, groups, sampling=Sampling()):
    """(tokens whose two log-probs differ, tokens)."""
    samples = []
    for t in groups:
        sizes = t["lengths"].tolist()
        for tokens, logprobs in zip(t["tokens"].split(sizes), t["logprobs"].split(sizes)):
            everywhere = torch.ones(len(tokens)).bool()
            samples.append(train.make_sample(t["prompt_tokens"], tokens, everywhere, logprobs))
    leaf = train.pack(samples, "cpu")
    with torch.no_grad():
        logprobs, *_ = model.token_logprobs(leaf, sampling)
    return int((logprobs.view(torch.int32) != leaf.logprobs.view(torch.int32)).sum()), len(logprobs)


# What does not depend on the model's family is tested with the first
one_family = pytest.mark.parametrize("pair", ["qwen3"], indirect=True)


@one_family
def test_signals_end_the_run_and_do_not_wait_for_requests(pair, tmp_path):
    """SGLang drains its requests first at a SIGTERM: a run went on for seconds, and was then ended by SIGKILL."""
    roll_out(pair[0], tmp_path, prompts(1, seed=1))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGQUIT) == pair[0]._died


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7), CUT], ids=str)
def test_engine_and_trainer_compute_the_same_logprobs(pair, tmp_path, sampling):
    engine, model, _ = pair
    groups = roll_out(engine, tmp_path, prompts(8, seed=1, shared=20), sampling)
    different, tokens = differing(model, groups, sampling)
    assert tokens > 300
    assert different == 0
    # the comparison can fail
    assert differing(model, groups, sampling._replace(temperature=sampling.temperature * 1.001))[0] > tokens / 2
    assert sampling != CUT or differing(model, groups, Sampling(0.5))[0] > tokens / 2


@pytest.mark.parametrize("version,how", [(5, "broadcast"), (6, "ipc")])
def test_an_updated_engine_has_the_trainers_weights_and_no_stale_keys(pair, tmp_path, version, how):
    engine, model, send = pair
    rows = prompts(8, seed=2)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.01)
    before = roll_out(engine, tmp_path / "before", rows)
    assert differing(model, before)[0] > 0  # the engine does not have them yet
    send[how](version)
    after = roll_out(engine, tmp_path / "after", rows)  # the same prompts: their old keys must be gone
    assert differing(model, after)[0] == 0
    assert all(set(t["weight_version"].tolist()) == {version} for t in after)


def test_a_parameter_that_arrives_changed_ends_the_run_and_is_named(pair):
    engine, model, send = pair
    shards = send["broadcast"].keywords["shards"]
    hashes = sync.tensor_hashes([s.data for s in shards], shards, None)
    send["broadcast"](8)
    engine.check_weights(hashes)
    for name in hashes:
        with pytest.raises(sync.RunError, match=f"did not arrive as sent: {name}"):
            engine.check_weights(hashes | {name: "0" * 16})
    with pytest.raises(sync.RunError, match=rf"did not arrive as sent: {re.escape(name)} \(nobody sends it\)"):
        engine.check_weights({other: h for other, h in hashes.items() if other != name})


@one_family
def test_an_engine_that_does_not_answer_is_not_said_to_hold_other_weights(pair, monkeypatch):
    from sglang.srt.managers.io_struct import sock_recv

    engine, _, _ = pair
    monkeypatch.setitem(engine.config, "engine_timeout", 0.5)
    (scheduler,) = multiprocessing.active_children()
    os.kill(scheduler.pid, signal.SIGSTOP)
    try:
        with pytest.raises(sync.RunError, match="silent for 0.5 s while its weights were checked"):
            engine.check_weights({"other": ""})
    finally:
        os.kill(scheduler.pid, signal.SIGCONT)
    engine.sglang.send_to_rpc.rcvtimeo = 60_000
    assert not sock_recv(engine.sglang.send_to_rpc).success  # its late answer: it has no weights of that name


def test_a_parameter_that_sglang_does_not_load_is_named():
    """It would compute with what it finds in memory."""
    model = torch.nn.Linear(3, 2)

    def load(model, weights, _):
        for name, tensor in weights:
            getattr(model, name).data.copy_(tensor)

    whole = dict(weight=torch.ones(2, 3), bias=torch.ones(2))
    load_all(load, model, whole.items(), "cpu")
    assert torch.equal(model.weight, whole["weight"])
    for name in whole:
        with pytest.raises(ValueError, match=f"in no file, or not a number: {name}$"):
            load_all(load, model, [(k, x) for k, x in whole.items() if k != name], "cpu")


@one_family
def test_a_sample_gives_signs_of_life_and_keeps_every_token(pair):
    """Between its first token and its last."""
    engine, model, _ = pair
    length = 2 * 50 + 20
    seen = set()
    params = dict(temperature=1.0, max_new_tokens=length, ignore_eos=True, sampling_seed=1)

    async def watch(sample):
        while not sample.done():
            seen.add(engine.manager.last_receive_tstamp)
            await asyncio.sleep(0.001)
        seen.add(engine.manager.last_receive_tstamp)

    async def sample():
        row = dict(input_ids=[20, 11, 50], sampling_params=params, return_logprob=True)
        task = asyncio.ensure_future(engine.sglang.async_generate(**row))
        await watch(task)
        return task.result()

    (out,) = engine.run([sample()], "in a test")
    assert len(seen) == 1 + 3  # as it was before, after 50 and 100 tokens, at the end
    logprobs, tokens, _ = zip(*out["meta_info"]["output_token_logprobs"])
    assert [*tokens] == out["output_ids"]
    found = dict(prompt_tokens=[20, 11, 50], lengths=[length], tokens=tokens, logprobs=logprobs)
    assert differing(model, [{name: torch.tensor(x) for name, x in found.items()}]) == (0, length)


def test_the_engine_computes_with_each_of_our_operators(pair):
    """A rounding error in any of them, made in the scheduler's process, is seen in the log-probs it returns."""
    engine, model, _ = pair
    rows = prompts(4, seed=5)

    def logprobs(faulty):
        engine.flush()
        engine.sglang.collective_rpc("make_faulty", operator=faulty)
        params = [dict(temperature=1.0, max_new_tokens=8, ignore_eos=True, sampling_seed=i) for i in range(len(rows))]
        out = engine.sglang.generate(input_ids=rows, sampling_params=params, return_logprob=True)
        return [o["meta_info"]["output_token_logprobs"] for o in out]

    right = logprobs("")
    assert logprobs("none, but each by itself") == right
    assert not any(logprobs(what) == right for what in OPERATORS)
    assert logprobs("") == right


@one_family
def test_the_engine_takes_no_token_whatever_its_probability(pair):
    """This seed, position (of the prompt's last token) and column have the hash of which SGLang's noise is +inf."""
    engine, _, _ = pair
    seed, position, column = 4613600, 35, 48
    prompt = list(range(position + 2, 1, -1))
    params = dict(temperature=1e-4, max_new_tokens=1, sampling_seed=seed)

    def token_and_logprob():
        out = engine.sglang.generate(input_ids=prompt, sampling_params=dict(params), return_logprob=True)
        return out["output_ids"][0], out["meta_info"]["output_token_logprobs"][0][0]

    token, logprob = token_and_logprob()
    assert token != column
    assert logprob > -30
    engine.sglang.collective_rpc("swap_draw")
    token, logprob = token_and_logprob()
    engine.sglang.collective_rpc("swap_draw")
    assert token == column
    assert logprob < -60


@one_family
def test_the_engine_samples_as_often_as_softmax_says(pair):
    """Chi-square of the first tokens of a prompt's 2,000 samples, against the trainer's probabilities."""
    engine, model, _ = pair
    prompt = torch.tensor([20, 11, 50])
    drawn = torch.ones(1).bool()
    every = [train.make_sample(prompt, torch.tensor([i]), drawn, torch.zeros(1)) for i in range(98)]
    leaf = train.pack(every, "cpu")

    def p_value(sampling, counts):
        with torch.no_grad():
            logprobs, *_ = model.token_logprobs(leaf, sampling)
        expected = logprobs.double().exp() * counts.sum()
        rare = expected < 5  # together one class: the test is for classes that are not nearly empty
        classes = torch.where(rare, 98, torch.arange(98))
        wanted = torch.zeros(99).double().index_add(0, classes, expected)
        got = torch.zeros(99).double().index_add(0, classes, counts.double())
        there = wanted > 0
        chi_square = ((got - wanted) ** 2 / wanted)[there].sum()
        return float(torch.special.gammaincc((there.sum() - 1) / 2, chi_square / 2))

    params = [dict(temperature=0.5, max_new_tokens=1, sampling_seed=sampling_seed(7, i)) for i in range(2000)]
    out = engine.sglang.generate(input_ids=[prompt.tolist()] * 2000, sampling_params=params)
    counts = torch.bincount(torch.tensor([o["output_ids"][0] for o in out]), minlength=98)
    assert p_value(Sampling(0.5), counts) > 1e-3
    assert p_value(Sampling(0.7), counts) < 1e-6  # the comparison can fail


def test_the_engine_reaches_no_operator_whose_order_of_sums_is_not_ours(pair, tmp_path):
    """Prefill, decode and sampling in all that the tests above had it do, on a CPU."""
    engine, _, _ = pair
    engine.sglang.collective_rpc("write_reached", path=str(tmp_path / "reached"))
    reached = set((tmp_path / "reached").read_text().split())
    assert {"embedding", "div"} <= reached <= REPLACED | OTHERS


@one_family
def test_sglang_looks_only_at_tokens_that_end_or_report_and_none_is_another(pair, tmp_path):
    """Requests of other kinds it leads its own way, on which each token costs ten calls."""
    engine, _, _ = pair
    rows = prompts(3, seed=9)

    def generate(stop=None, **options):
        params = dict(temperature=1.0, max_new_tokens=60, ignore_eos=stop is None, stop_token_ids=[stop or 0])
        params = [params | dict(sampling_seed=sampling_seed(i)) for i in range(len(rows))]
        out = engine.sglang.generate(input_ids=rows, sampling_params=params, return_logprob=True, **options)
        engine.sglang.collective_rpc("write_looks", path=str(tmp_path / "looks"))
        kinds = "output_token_logprobs", "finish_reason"
        found = [(o["output_ids"], *(o["meta_info"][kind] for kind in kinds)) for o in out]
        return found, int((tmp_path / "looks").read_text())

    generate()  # what came before is counted, too
    found, looks = generate()
    assert looks == 3 * 3  # at the first token, a prefill's, at the 50th and at the last
    assert generate(top_logprobs_num=1) == (found, 3 * 60)
    tokens = found[0][0]
    at = next(i for i in range(9, 49) if tokens[i] not in tokens[:i])
    ended, looks = generate(tokens[at])
    assert ended[0][0] == tokens[: at + 1]
    assert looks < 3 * 4
    assert generate(tokens[at], top_logprobs_num=1)[0] == ended


@one_family
@pytest.mark.parametrize("loaded", [True, False])
def test_memory_is_lent_from_a_steps_last_sample_to_its_first_weights(pair, tmp_path, loaded, capfd, monkeypatch):
    """
    As on CUDA where a rank trains, too. SGLang can lend a GPU's memory only, so here the real engine has a stand-in
    that knows what is lent: nothing is lent while it is in use, and nothing is sampled or loaded while it is lent.
    """
    engine, model, send = pair
    sglang = engine.manager
    lent = []

    async def release(request):
        assert (await sglang.flush_cache()).success, "SGLang is not idle"
        lent.extend(request.tags)

    async def resume(request):
        for tag in request.tags:
            lent.remove(tag)

    def only_awake(method):
        def call(*args, **kwargs):
            assert not lent, f"{method.__name__} while the memory is lent"
            return method(*args, **kwargs)

        return call

    monkeypatch.setattr(engine, "can_lend", loaded)
    monkeypatch.setattr(sglang, "release_memory_occupation", release)
    monkeypatch.setattr(sglang, "resume_memory_occupation", resume)
    for name in ("generate_request", "update_weights_from_tensor"):
        monkeypatch.setattr(sglang, name, only_awake(getattr(sglang, name)))

    rows = prompts(2, seed=6)
    version = engine.version
    engine.sleep()
    assert not lent
    assert engine.version == version  # an engine that does not lend keeps its weights
    monkeypatch.setattr(engine, "lends", True)
    monkeypatch.setattr(engine, "device", "cuda")
    roll_out(engine, tmp_path / "before", rows)
    engine.sleep()
    assert lent == (["kv_cache", "weights"] if loaded else [])
    assert engine.lends == loaded == ("engine 0: SGLang lends no memory" not in capfd.readouterr().out)
    send["ipc"](9)
    assert not lent
    assert engine.version == 9
    roll_out(engine, tmp_path / "after", rows)


# ---- the pieces


@pytest.mark.parametrize(
    "given,message",
    [("no_such=1", "unexpected keyword argument 'no_such'"), ("model_path='/nowhere'", "/nowhere")],
)
def test_an_engine_that_sglang_refuses_to_start_leaves_no_process(tmp_path, given, message):
    """Its process has started before SGLang sees the arguments."""
    from transformers import Qwen3Config

    before = set(multiprocessing.active_children())
    config = CONFIG | dict(engine_args=given)
    with pytest.raises(sync.RunError, match=message):
        RolloutEngine(0, tmp_path, Qwen3Config(), config, "cpu", torch.float32, tmp_path / "engine.log")
    for process in set(multiprocessing.active_children()) - before:
        process.join(60)
        assert process.exitcode is not None


def test_a_dead_engines_line_repeats_the_last_error_of_this_start_only(tmp_path):
    engine = RolloutEngine.__new__(RolloutEngine)
    said = []
    engine.name = "engine 0"
    engine.log = tmp_path / "engine.log"
    engine.end = said.append
    for text in ("ValueError: the first\nKeyError: 'the second'\nkilled\n", "Loading: Error\n"):
        engine.logged = engine.log.stat().st_size if engine.log.exists() else 0
        with open(engine.log, "a") as log:
            log.write(text)
        engine._died()
    died = "engine 0: the SGLang process died"
    assert said == [f"{died}: 'the second'; see {engine.log}", f"{died}; see {engine.log}"]


def test_a_restart_removes_the_sockets_of_an_engine_killed_at_its_start(tmp_path, monkeypatch):
    log = tmp_path / "logs" / "engine_0.log"
    other = tmp_path / "logs" / "engine_1.log"
    with tempfile.TemporaryDirectory() as name, monkeypatch.context() as patch:
        folder = Path(name)
        patch.setattr(tempfile, "tempdir", name)
        if not (child := os.fork()):
            with folder_for_sockets(log) as left:
                (left / "socket").touch()
                os._exit(0)  # nothing is done at the end, as after SIGKILL
        os.waitpid(child, 0)
        assert [path.name for path in folder.glob("*/*")] == ["socket"]
        with folder_for_sockets(log) as mine, folder_for_sockets(other):
            assert not [*folder.glob("*/*")] and mine.stat().st_mode & 0o77 == 0
        assert not [*folder.iterdir()]
        patch.setattr(tempfile, "tempdir", str(folder / ("long" * 20)))
        with folder_for_sockets(log) as mine:
            assert mine.parent == Path("/tmp")  # a socket's name would be too long


YARN = dict(rope_type="yarn", factor=4.0, rope_theta=1e4)


@pytest.mark.parametrize(
    "device,change,message",
    [
        ("cpu", dict(rope_parameters=YARN), "rope_type='yarn' in config.json; known: default, linear, llama3"),
        ("cpu", dict(hidden_act="gelu"), "hidden_act='gelu' in config.json; known: silu"),
        ("cuda", dict(head_dim=80), "head_dim=80; on CUDA it must be 64 or 128"),
        ("cuda", dict(num_attention_heads=18, num_key_value_heads=2), "9 query heads to a key head"),
    ],
)
def test_a_model_that_the_operators_cannot_compute_is_refused_in_one_line(device, change, message, refusal):
    from transformers import Qwen3Config

    config = Qwen3Config(**dict(num_key_value_heads=8) | change)
    assert refusal(dense.rope_frequencies, config, device).startswith(f"error: init_from: {message}")


def test_a_parser_that_sglang_does_not_have_is_refused(refusal):
    """Every call of a tool was then read as text, without a word."""
    agent = SimpleNamespace(template=SimpleNamespace(tokenizer=None))
    engine = SimpleNamespace(manager=SimpleNamespace(), model_type="qwen3")
    line = refusal(AgentSampler, agent, engine, CONFIG | dict(tool_call_parser="hermess"), "", 1, {}, None, [])
    assert line.startswith("error: tool_call_parser='hermess': SGLang has no such; use ") and " hermes," in line


def theirs(hash32, logprobs, seed, positions):
    """The tokens that SGLang's own function draws, (B, 1), with noise of this hash: its own is a Triton kernel."""
    from sglang.srt.layers import sampler

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "murmur_hash32", hash32)
        compiled = sampler.multinomial_with_seed  # unless an engine was started before
        plain = getattr(compiled, "_torchdynamo_orig_callable", compiled)
        return plain(logprobs, seed, positions)


def test_all_other_draws_are_sglangs_own():
    draws = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (64,), generator=draws)
    positions = torch.randint(0, 40_000, (64,), generator=draws)
    logprobs = torch.randn(64, 2_000, generator=draws).log_softmax(1)
    tokens = theirs(hashes, logprobs, seeds, positions)
    assert torch.equal(tokens, kernels.draw(logprobs, seeds, positions))
    assert len(tokens.unique()) > 50


def test_a_start_survives_a_name_that_another_engine_removes_meanwhile():
    """Two engines that started at a time raced: a name was listed in /dev/shm, and gone when it was looked at."""
    mine, gone = (Path(f"/dev/shm/onecurve_{what}_{os.getpid()}") for what in ("mine", "gone"))
    try:
        mine.write_bytes(b"lock")
        gone.symlink_to("/nowhere")  # a name that is listed, and nothing there when it is looked at
        with open(mine, "r+b") as file, mmap.mmap(file.fileno(), 4):
            unlink_shared_memory([os.getpid()])
        assert not mine.exists() and gone.is_symlink()
    finally:
        mine.unlink(missing_ok=True)
        gone.unlink()
