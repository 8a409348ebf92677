"""
Losses and advantages that a run takes from a file: those of experiments/losses.py against loops in float64, what is
chosen over the whole batch, DPO, and a user's mistakes.

    pytest tests/test_losses.py
"""

import math
import random
import types

import pytest
import torch

import train_grpo as train
from configurator import check_config
from experiments import losses
from onecurve.algorithms.supervised import PAIRS, supervised_samples
from onecurve.models.dense import check_model
from onecurve.models.folders import make_scratch_model
from onecurve.run import own
from sync import Group, Ranks

DEFAULTS = train.DEFAULTS
COUNTS = [7, 1, 0, 30, 12]  # loss tokens of five samples


@pytest.fixture
def our_operators():
    train.kernels.enable_batch_invariant()
    yield
    train.kernels.disable_batch_invariant()


def make_inputs():
    """Lists of floats: log-probs now, before the update, of the engine, advantages of both signs, marks, entropies."""
    rng = random.Random(0)
    shifts = sum(([shift] * n for shift, n in zip((-0.6, -0.7, 0, 0.6, -0.7), COUNTS)), [])
    old = [-abs(rng.gauss(0, 0.5)) - 0.8 for _ in shifts]
    logprobs = [x + shift + rng.gauss(0, 0.2) for x, shift in zip(old, shifts)]
    rollout = [x + rng.gauss(0, 0.1) for x in old]
    advantages = sum(([a] * n for n, a in zip(COUNTS, (1.5, -1.0, 0.0, 0.7, -2.0))), [])
    mark = [float(i % 5 == 0) for i in range(len(old))]
    return dict(
        logprobs=logprobs, old_logprobs=old, rollout_logprobs=rollout, advantages=advantages, mark=mark,
        entropy=[rng.uniform(0, 2) for _ in old],
    )  # fmt: skip


# ---- losses, token by token: (loss, clipped) of token t; `at` are the tokens of its sample


def ppo(x, t, at):
    r, A = math.exp(x["logprobs"][t] - x["old_logprobs"][t]), x["advantages"][t]
    kept = min(max(r, 0.8), 1.28)
    return -min(r * A, kept * A), kept * A < r * A


def dppo(x, t, at):
    now, rollout, A = math.exp(x["logprobs"][t]), math.exp(x["rollout_logprobs"][t]), x["advantages"][t]
    held = now - rollout > 0.28 if A > 0 else now - rollout < -0.2
    return (0.0 if held else -min(now / rollout, 20) * A * x["logprobs"][t]), held


def sapo(x, t, at):
    r, A = math.exp(x["logprobs"][t] - x["old_logprobs"][t]), x["advantages"][t]
    temperature = 1.0 if A > 0 else 1.05
    gate = 1 / (1 + math.exp(-temperature * (r - 1)))
    return -A * 4 / temperature * gate, False


def gmpo(x, t, at):
    def bounded(i):
        d = x["logprobs"][i] - x["old_logprobs"][i]
        return min(d, 0.4) if x["advantages"][i] > 0 else max(d, -0.4)

    A = x["advantages"][t]
    mean = sum(bounded(i) for i in at) / len(at)
    return -A * math.exp(mean), bounded(t) != x["logprobs"][t] - x["old_logprobs"][t]


def off_policy_mask(x, t, at):
    loss, clipped = ppo(x, t, at)
    left = sum(x["rollout_logprobs"][i] - x["logprobs"][i] for i in at) / len(at)
    dropped = x["advantages"][t] < 0 and left > 0.1
    return (0.0 if dropped else loss), clipped or dropped


def kl_cov(x, t, at):
    d = x["logprobs"][t] - x["old_logprobs"][t]
    return -math.exp(d) * x["advantages"][t] + x["mark"][t] * abs(d), x["mark"][t] > 0


def adaptive_entropy(x, t, at):
    loss, clipped = ppo(x, t, at)
    return loss - x["mark"][t] * x["entropy"][t], clipped


LOSSES = [dppo, sapo, gmpo, off_policy_mask, kl_cov, adaptive_entropy]
BOUNDS = dict(clip_low=0.2, clip_high=0.28)


@pytest.mark.parametrize("loop", LOSSES, ids=lambda loop: loop.__name__)
def test_losses_are_those_of_a_loop(loop):
    x = make_inputs()
    tensors = {name: torch.tensor(column) for name, column in x.items()}
    loss, clipped = getattr(losses, loop.__name__)(**tensors, **BOUNDS, counts=COUNTS, every_other_key=0)
    expected = []
    for k, n in enumerate(COUNTS):
        at = range(sum(COUNTS[:k]), sum(COUNTS[:k]) + n)
        expected += [loop(x, t, at) for t in at]
    assert loss.tolist() == pytest.approx([x for x, _ in expected], rel=1e-4, abs=1e-6)
    assert clipped.tolist() == [x for _, x in expected] and (5 < sum(clipped) < 45 or loop is sapo)
    plain = [ppo(x, t, ())[0] for t in range(len(loss))]
    assert loss.tolist() != pytest.approx(plain, rel=1e-2)


@pytest.mark.parametrize("loop", LOSSES, ids=lambda loop: loop.__name__)
def test_on_policy_every_gradient_is_the_policy_gradient(loop):
    """Where all log-probs are equal and nothing is marked; of gmpo summed over a sample: its tokens share a ratio."""
    logprobs = torch.randn(10, requires_grad=True)
    now = logprobs.detach()
    columns = dict(old_logprobs=now, rollout_logprobs=now, mark=torch.zeros(10), entropy=torch.ones(10))
    advantages = torch.tensor([1.5, -0.5]).repeat_interleave(5)
    function = getattr(losses, loop.__name__)
    loss, _ = function(logprobs=logprobs, advantages=advantages, counts=[5, 5], **columns, **BOUNDS)
    loss.sum().backward()
    assert torch.allclose(logprobs.grad, -advantages)


# ---- advantages


def make_groups():
    """Three groups of four samples with two reward terms and lengths, the second of equal rewards."""
    numeric, format_ = [[1.0, 0, 0, 1], [1.0] * 4, [0, 0, 0, 1.0]], [[0.1, 0.5, 0.2, 0.2], [0.3] * 4, [1.0, 0, 0, 0]]
    lengths = [[1, 2, 3, 5], [4, 4, 2, 1], [3, 1, 1, 6]]
    groups = []
    for a, b, n in zip(numeric, format_, lengths):
        noted = [{"numeric": {"reward": x}, "format": {"reward": y}} for x, y in zip(a, b)]
        tensors = dict(
            sample=torch.arange(4), lengths=torch.tensor(n), loss_mask=torch.ones(sum(n)).bool(), rewards=torch.zeros(4)
        )
        groups.append(Group(tensors, dict(noted=noted)))
    return numeric, format_, lengths, groups


def mean(x):
    return sum(x) / len(x)


def std(x):
    return math.sqrt(sum((r - mean(x)) ** 2 for r in x) / (len(x) - 1))


def test_advantages_are_those_of_a_loop():
    numeric, format_, lengths, groups = make_groups()
    inputs = dict(rewards=torch.tensor(numeric).float(), groups=groups, reward="numeric + 0.5*format + 0*exact")
    inputs["reward"] = "numeric + 0.5*format"
    ours = {name: getattr(losses, name)(**inputs, every_other_key=0).tolist() for name in ("maxrl", "opo", "gdpo")}
    summed = []
    for k, (a, b, n) in enumerate(zip(numeric, format_, lengths)):
        baseline = sum(x * y for x, y in zip(a, n)) / sum(n)
        assert ours["maxrl"][k] == pytest.approx([(x - mean(a)) / mean(a) for x in a], rel=1e-5)
        assert ours["opo"][k] == pytest.approx([x - baseline for x in a], rel=1e-5)
        normal = [[(x - mean(term)) / (std(term) + 1e-6) for x in term] for term in (a, b)]
        summed += [x + 0.5 * y for x, y in zip(*normal)]
    flat = [(x - mean(summed)) / (std(summed) + 1e-6) for x in summed]
    assert sum(ours["gdpo"], []) == pytest.approx(flat, rel=1e-5, abs=1e-6)
    assert ours["maxrl"][1] == ours["opo"][1] == [0.0] * 4
    assert losses.maxrl(torch.zeros(1, 4)).tolist() == [[0.0] * 4]  # nothing was right


# ---- what is chosen over the whole batch


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_scratch_model(
        folder, DEFAULTS | dict(scratch_args="num_hidden_layers=1, hidden_size=64, intermediate_size=128")
    )
    return folder


def make_trainer(mesh, folder, **change):
    c = types.SimpleNamespace(**DEFAULTS | dict(lanes=4, leaf_tokens=40, group_size=3) | change)
    return train.Trainer(c, Ranks(0, 1, 1, 0, mesh, None), check_model(folder, vars(c)), folder, "cpu")


def make_samples(n):
    """n samples of random tokens, three of a prompt; one of each prompt's is right, and so has a positive advantage."""
    rng = random.Random(0)
    samples = []
    for i in range(n):
        if i % 3 == 0:
            prompt = [rng.randrange(2, 98) for _ in range(5)]
        response = torch.tensor([rng.randrange(2, 98) for _ in range(rng.randrange(2, 9))])
        logprobs = torch.tensor([rng.gauss(-1, 1) for _ in response])
        s = train.make_sample(torch.tensor(prompt), response, torch.ones(len(response)).bool(), logprobs, of=i)
        right = 2.0 if i % 3 == 1 else -1.0
        samples.append(s._replace(advantages=torch.full(s.logprobs.shape, right + i / 100)))
    return samples


def test_kl_cov_marks_the_tokens_of_largest_covariance_in_the_batch(monkeypatch):
    monkeypatch.setattr(losses, "KL_COV", (0.1, 1.0))
    samples = make_samples(12)
    tokens = [(float(a), float(p)) for s in samples for a, p in zip(s.advantages, s.old_logprobs)]
    means = [mean(column) for column in zip(*tokens)]
    covariance = [(a - means[0]) * (p - means[1]) for a, p in tokens]
    chosen = sorted(range(len(tokens)), key=lambda t: -covariance[t])[: len(tokens) // 10]
    marks = torch.cat([s.mark for s in losses.kl_cov.before(None, samples)])
    assert marks.nonzero()[:, 0].tolist() == sorted(chosen) and len(chosen) > 4


def test_the_entropy_bonus_grows_below_its_target_and_is_0_above():
    samples = make_samples(6)
    certain = [s._replace(logprobs=s.logprobs * 0 - 0.1) for s in samples]
    marks = torch.cat([s.mark for s in losses.adaptive_entropy.before(None, certain)])
    assert marks.tolist() == pytest.approx([(1 - 0.1 / 0.3) * 0.02] * len(marks))
    unsure = [s._replace(logprobs=s.logprobs * 0 - 0.5) for s in samples]
    assert not any(s.mark.any() for s in losses.adaptive_entropy.before(None, unsure))


def test_the_teacher_of_sdpo_is_the_policy_that_has_seen_a_right_sibling(mesh, scratch, our_operators):
    from transformers import AutoModelForCausalLM

    trainer, samples = make_trainer(mesh, scratch), make_samples(9)
    samples[7] = samples[7]._replace(advantages=samples[7].advantages * 0)  # of the last prompt none is right
    ours = losses.sdpo.before(trainer, samples)
    plain = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float64)
    for i, (s, learned) in enumerate(zip(samples, ours)):
        if i % 3 == 1 or i > 5:  # the right one itself, and those without one
            assert not learned.advantages.any()
            continue
        shown = samples[i - i % 3 + 1].tokens
        ids = torch.cat([shown, s.tokens])
        with torch.no_grad():
            scores = torch.log_softmax(plain(ids[None]).logits[0], -1)
        at = s.loss_at + len(shown)
        teacher = scores[at - 1, ids[at]]
        assert torch.allclose(learned.advantages.double(), teacher - s.logprobs, atol=1e-4)


# ---- DPO


def make_pairs(n):
    """2n samples of random tokens, a pair's with one prompt; 3 to 30 tokens each."""
    rng, rows = random.Random(0), []
    for _ in range(n):
        sizes = rng.randrange(1, 15), rng.randrange(2, 16), rng.randrange(2, 16)
        prompt, chosen, rejected = ([rng.randrange(2, 98) for _ in range(size)] for size in sizes)
        rows.append(dict(prompt_tokens=prompt, chosen_tokens=chosen, rejected_tokens=rejected))
    return supervised_samples(rows, types.SimpleNamespace(mode="dpo"), train.make_sample)


def test_dpo_is_that_of_a_loop_over_plain_transformers(mesh, scratch, our_operators):
    """Loss, margins and gradients, after a step away from the reference: at it, the loss is log 2 whatever beta is."""
    from transformers import AutoModelForCausalLM

    trainer = make_trainer(mesh, scratch, mode="dpo", kl_coef=0.3, init_from=str(scratch))
    samples = trainer.forward_only(make_pairs(9))
    assert trainer.gradients(samples, PAIRS)[1]["loss"] == pytest.approx(math.log(2))
    trainer.update(samples, 0, 1e-2, PAIRS)
    grads, metrics = trainer.gradients(samples, PAIRS)
    plain, reference = (AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float64) for _ in range(2))
    for shard in trainer.shards:
        plain.get_parameter(shard.name).data.copy_(shard.data)

    def logprob(model, s):
        scores = torch.log_softmax(model(s.tokens[None]).logits[0], -1)
        return sum(scores[t - 1, s.tokens[t]] for t in s.loss_at.tolist())

    margins = []
    for chosen, rejected in zip(samples[::2], samples[1::2]):
        gains = [logprob(plain, s) - logprob(reference, s).detach() for s in (chosen, rejected)]
        margins.append(0.3 * (gains[0] - gains[1]))
    loss = -torch.nn.functional.logsigmoid(torch.stack(margins)).mean()
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5) and metrics["loss"] < 0.6
    assert metrics["margin"] == pytest.approx(mean([m.item() for m in margins]), abs=1e-4)
    assert metrics["accuracy"] == mean([m.item() > 0 for m in margins])
    for shard, grad in zip(trainer.shards, grads, strict=True):
        expected = plain.get_parameter(shard.name).grad
        assert expected.abs().max() > 1e-4 and torch.allclose(grad.double(), expected, atol=1e-6, rtol=1e-3), shard.name


def test_the_reference_of_adapters_is_the_model_without_them(mesh, scratch, our_operators):
    trainer = make_trainer(mesh, scratch, mode="dpo", kl_coef=0.3, lora_rank=4, init_from=str(scratch))
    samples = trainer.forward_only(make_pairs(9))
    first, *_, last = [trainer.update(samples, i, 1e-2, PAIRS)[0] for i in range(3)]
    assert first["loss"] == pytest.approx(math.log(2)) and last["loss"] < 0.6 and last["margin"] > 0


# ---- a user's mistakes


FILE = """
import torch

def scalar(logprobs, **_):
    return -logprobs.mean(), torch.zeros(3)

def alone(logprobs, **_):
    return -logprobs

def raises(logprobs, **_):
    return -logprobs * undefined

def ends(rewards, **_):
    return rewards[0]

def twice(rewards, **_):
    return 2 * rewards
"""
MISTAKES = [
    ("loss", "none.py:f", "no file none.py in"),
    ("loss", "mine.py:scaler", "mine.py has no function 'scaler'; did you mean scalar?"),
    ("loss", "mine.py:scalar", "stack expects each tensor to be equal size, but got [3] at entry 0 and [] at entry 1"),
    ("loss", "mine.py:alone", "stack expects each tensor to be equal size"),
    ("loss", "mine.py:raises", "NameError: name 'undefined' is not defined (mine.py:11)"),
    ("advantage", "mine.py:ends", "stack expects each tensor to be equal size, but got [2, 4] at entry 0 and [4]"),
]


@pytest.mark.parametrize("key,name,message", MISTAKES)
def test_a_mistake_in_a_file_is_one_line(key, name, message, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    own.own_function.cache_clear()
    check_config(DEFAULTS | {key: name}, 1, DEFAULTS)
    with pytest.raises(SystemExit) as e:
        own.own_function(key, name)(logprobs=torch.zeros(3), rewards=torch.zeros(2, 4), groups=())
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and err.startswith(f"error: {key}='{name}': ") and message in err


def test_an_advantage_of_a_file_gets_rewards_after_the_costs_of_the_kl(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    own.own_function.cache_clear()
    c = types.SimpleNamespace(**DEFAULTS | dict(advantage="mine.py:twice", kl_in_reward=True, kl_coef=0.1))
    samples = make_samples(3)
    scores = torch.tensor([[1.0, 0.0, 0.5]])
    costs = [0.1 * sum(train.kl(s.logprobs, s.reference, c.kl_estimator).tolist()) for s in samples]
    ours = [s.advantages for s in train.with_advantages(samples, scores, c)]
    assert [float(a[0]) for a in ours] == pytest.approx([2 * (r - x) for r, x in zip(scores[0].tolist(), costs)])
