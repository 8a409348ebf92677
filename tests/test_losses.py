"""
Losses and advantages that a run takes from a file: those of experiments/losses.py against loops in float64, what is
chosen over the whole batch, DPO, and a user's mistakes.

    pytest tests/test_losses.py
"""

import math
import random
from typing import NamedTuple

import pytest
import test_trainer
import torch
from conftest import float64_model, group_tensors, plain_logprobs
from pytest import approx
from test_train import COUNTS, clamp, for_tokens, mean, standard
from test_trainer import assert_gradients_are, make_pairs, make_trainer, with_advantage

import train_grpo as train
from configurator import check_config
from experiments import losses
from onecurve.algorithms.supervised import PAIRS
from onecurve.run import own
from sync import Group

DEFAULTS = train.DEFAULTS

ranks = test_trainer.ranks
scratch = test_trainer.scratch


class Token(NamedTuple):
    logprobs: float  # now
    old_logprobs: float  # before the update
    rollout_logprobs: float  # the engine's
    advantages: float  # of both signs
    mark: float
    entropy: float

    @property
    def change(self):
        return self.logprobs - self.old_logprobs


def make_tokens():
    rng = random.Random(0)
    shifts = for_tokens((-0.6, -0.7, 0, 0.6, -0.7))
    old = [-abs(rng.gauss(0, 0.5)) - 0.8 for _ in shifts]
    logprobs = [x + shift + rng.gauss(0, 0.2) for x, shift in zip(old, shifts)]
    rollout = [x + rng.gauss(0, 0.1) for x in old]
    advantages = for_tokens((1.5, -1.0, 0.0, 0.7, -2.0))
    mark = [float(i % 5 == 0) for i in range(len(old))]
    entropy = [rng.uniform(0, 2) for _ in old]
    columns = logprobs, old, rollout, advantages, mark, entropy
    return [Token(*row) for row in zip(*columns, strict=True)]


# ---- losses, token by token: (loss, clipped) of a Token; `sample`: those of its sample


def ppo(token, sample):
    r = math.exp(token.change)
    A = token.advantages
    kept = clamp(r, 0.8, 1.28)
    return -min(r * A, kept * A), kept * A < r * A


def dppo(token, sample):
    now = math.exp(token.logprobs)
    rollout = math.exp(token.rollout_logprobs)
    A = token.advantages
    held = now - rollout > 0.28 if A > 0 else now - rollout < -0.2
    if held:
        return 0.0, True
    return -min(now / rollout, 20) * A * token.logprobs, False


def sapo(token, sample):
    A = token.advantages
    temperature = 1.0 if A > 0 else 1.05
    r = math.exp(token.change)
    gate = 1 / (1 + math.exp(-temperature * (r - 1)))
    return -A * 4 / temperature * gate, False


def gmpo(token, sample):
    def bounded(token):
        if token.advantages > 0:
            return min(token.change, 0.4)
        return max(token.change, -0.4)

    r = math.exp(mean([*map(bounded, sample)]))
    return -token.advantages * r, bounded(token) != token.change


def off_policy_mask(token, sample):
    loss, clipped = ppo(token, sample)
    left = mean([x.rollout_logprobs - x.logprobs for x in sample])
    if token.advantages < 0 and left > 0.1:
        return 0.0, True
    return loss, clipped


def kl_cov(token, sample):
    loss = -math.exp(token.change) * token.advantages
    return loss + token.mark * abs(token.change), token.mark > 0


def adaptive_entropy(token, sample):
    loss, clipped = ppo(token, sample)
    return loss - token.mark * token.entropy, clipped


LOSSES = [dppo, sapo, gmpo, off_policy_mask, kl_cov, adaptive_entropy]
each_loss = pytest.mark.parametrize("loop", LOSSES, ids=lambda loop: loop.__name__)


def loss_of_file(loop, columns, counts):
    """(losses, clipped) of the file's function of the same name."""
    function = getattr(losses, loop.__name__)
    return function(**columns, counts=counts, clip_low=0.2, clip_high=0.28, every_other_key=0)


@each_loss
def test_losses_are_those_of_a_loop(loop):
    tokens = make_tokens()
    columns = Token(*map(torch.tensor, zip(*tokens)))._asdict()
    loss, clipped = loss_of_file(loop, columns, COUNTS)
    expected = []
    first = 0
    for n in COUNTS:
        sample = tokens[first : first + n]
        expected += [loop(token, sample) for token in sample]
        first += n
    assert loss.tolist() == approx([x for x, _ in expected], rel=1e-4, abs=1e-6)
    assert clipped.tolist() == [x for _, x in expected]
    assert 5 < sum(clipped) < 45 or loop is sapo
    plain = [ppo(token, ())[0] for token in tokens]
    assert loss.tolist() != approx(plain, rel=1e-2)


@each_loss
def test_on_policy_every_gradient_is_the_policy_gradient(loop):
    """Where all log-probs are equal and nothing is marked; of gmpo summed over a sample: its tokens share a ratio."""
    logprobs = torch.randn(10, requires_grad=True)
    now = logprobs.detach()
    advantages = torch.tensor([1.5, -0.5]).repeat_interleave(5)
    columns = Token(logprobs, now, now, advantages, mark=torch.zeros(10), entropy=torch.ones(10))
    loss, _ = loss_of_file(loop, columns._asdict(), [5, 5])
    loss.sum().backward()
    assert torch.allclose(logprobs.grad, -advantages)


# ---- advantages


GROUPS = [  # of four samples: two reward terms and lengths; the rewards of the second are equal
    ([1.0, 0.0, 0.0, 1.0], [0.1, 0.5, 0.2, 0.2], [1, 2, 3, 5]),
    ([1.0] * 4, [0.3] * 4, [4, 4, 2, 1]),
    ([0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0], [3, 1, 1, 6]),
]


def make_group(numeric, format_, lengths):
    noted = [{"numeric": {"reward": x}, "format": {"reward": y}} for x, y in zip(numeric, format_)]
    return Group(group_tensors(lengths), dict(noted=noted))


def test_advantages_are_those_of_a_loop():
    inputs = dict(
        rewards=torch.tensor([numeric for numeric, *_ in GROUPS]),
        groups=[make_group(*columns) for columns in GROUPS],
        reward="numeric + 0.5*format",
        every_other_key=0,
    )
    maxrl = losses.maxrl(**inputs).tolist()
    opo = losses.opo(**inputs).tolist()
    gdpo = losses.gdpo(**inputs).tolist()
    summed = []
    for k, (a, b, n) in enumerate(GROUPS):
        assert maxrl[k] == approx([(x - mean(a)) / mean(a) for x in a], rel=1e-5)
        baseline = sum(x * y for x, y in zip(a, n)) / sum(n)
        assert opo[k] == approx([x - baseline for x in a], rel=1e-5)
        summed += [standard(x, a) + 0.5 * standard(y, b) for x, y in zip(a, b)]
    expected = [standard(x, summed) for x in summed]
    assert sum(gdpo, []) == approx(expected, rel=1e-5, abs=1e-6)
    assert maxrl[1] == opo[1] == [0.0] * 4
    assert losses.maxrl(torch.zeros(1, 4)).tolist() == [[0.0] * 4]  # nothing was right


# ---- what is chosen over the whole batch


def random_ids(rng, n):
    return [rng.randrange(2, 98) for _ in range(n)]


def make_samples(n):
    """n samples of random tokens, three of a prompt; one of each prompt's is right, and so has a positive advantage."""
    rng = random.Random(0)
    samples = []
    for i in range(n):
        if i % 3 == 0:
            prompt = random_ids(rng, 5)
        response = random_ids(rng, rng.randrange(2, 9))
        logprobs = torch.tensor([rng.gauss(-1, 1) for _ in response])
        everywhere = torch.ones(len(response)).bool()
        s = train.make_sample(torch.tensor(prompt), torch.tensor(response), everywhere, logprobs, of=i)
        right = 2.0 if i % 3 == 1 else -1.0
        samples.append(with_advantage(s, right + i / 100))
    return samples


def marks(function, samples):
    """What a loss's `before` notes for the loss tokens of all samples."""
    return torch.cat([s.mark for s in function.before(None, samples)])


def test_kl_cov_marks_the_tokens_of_largest_covariance_in_the_batch(monkeypatch):
    monkeypatch.setattr(losses, "KL_COV", (0.1, 1.0))
    samples = make_samples(12)
    advantages = torch.cat([s.advantages for s in samples]).tolist()
    logprobs = torch.cat([s.old_logprobs for s in samples]).tolist()
    covariance = [(a - mean(advantages)) * (p - mean(logprobs)) for a, p in zip(advantages, logprobs)]
    n = len(covariance)
    chosen = sorted(range(n), key=lambda t: -covariance[t])[: n // 10]
    assert marks(losses.kl_cov, samples).nonzero()[:, 0].tolist() == sorted(chosen)
    assert len(chosen) > 4


def test_the_entropy_bonus_grows_below_its_target_and_is_0_above():
    samples = make_samples(6)
    certain = [s._replace(logprobs=s.logprobs * 0 - 0.1) for s in samples]
    bonus = marks(losses.adaptive_entropy, certain)
    assert bonus.tolist() == approx([(1 - 0.1 / 0.3) * 0.02] * len(bonus))
    unsure = [s._replace(logprobs=s.logprobs * 0 - 0.5) for s in samples]
    assert not marks(losses.adaptive_entropy, unsure).any()


def test_the_teacher_of_sdpo_is_the_policy_that_has_seen_a_right_sibling(ranks, scratch):
    samples = make_samples(9)
    samples[7] = with_advantage(samples[7], 0.0)  # of the last prompt none is right
    ours = losses.sdpo.before(make_trainer(ranks, scratch, group_size=3), samples)
    plain = float64_model(scratch)
    for i, (s, learned) in enumerate(zip(samples, ours)):
        if i % 3 == 1 or i > 5:  # the right one itself, and those without one
            assert not learned.advantages.any()
            continue
        shown = samples[i - i % 3 + 1].tokens
        ids = torch.cat([shown, s.tokens])
        with torch.no_grad():
            teacher = plain_logprobs(plain, ids, s.loss_at + len(shown))
        assert torch.allclose(learned.advantages.double(), teacher - s.logprobs, atol=1e-4)


# ---- DPO


DPO = dict(mode="dpo", kl_coef=0.3, group_size=3, temperature=0.5, top_k=3)  # no text was drawn by this rule


def test_dpo_is_that_of_a_loop_over_plain_transformers(ranks, scratch):
    """Loss, margins and gradients, after a step away from the reference: at it, the loss is log 2 whatever beta is."""
    trainer = make_trainer(ranks, scratch, **DPO, init_from=str(scratch))
    samples = trainer.forward_only(make_pairs(9))
    _, metrics = trainer.gradients(samples, PAIRS)
    assert metrics["loss"] == approx(math.log(2))
    trainer.update(samples, 0, 1e-2, PAIRS)
    grads, metrics = trainer.gradients(samples, PAIRS)
    plain = float64_model(scratch)
    reference = float64_model(scratch)
    for shard in trainer.shards:
        plain.get_parameter(shard.name).data.copy_(shard.data)

    def gain(s):
        ours, before = (plain_logprobs(model, s.tokens, s.loss_at).sum() for model in (plain, reference))
        return ours - before.detach()

    margins = [0.3 * (gain(chosen) - gain(rejected)) for chosen, rejected in zip(samples[::2], samples[1::2])]
    margins = torch.stack(margins)
    loss = -torch.nn.functional.logsigmoid(margins).mean()
    loss.backward()
    assert metrics["loss"] == approx(loss.item(), abs=1e-5)
    assert metrics["loss"] < 0.6
    assert metrics["margin"] == approx(margins.mean().item(), abs=1e-4)
    assert metrics["accuracy"] == mean((margins > 0).tolist())
    assert_gradients_are(plain, trainer, grads)


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
"""
MISTAKES = [
    ("loss", "none.py:f", "no file none.py in"),
    ("loss", "mine.py:scaler", "mine.py has no function 'scaler'; did you mean scalar?"),
    ("loss", "mine.py:scalar", "stack expects each tensor to be equal size, but got [3] at entry 0 and [] at entry 1"),
    ("loss", "mine.py:alone", "stack expects each tensor to be equal size"),
    ("loss", "mine.py:raises", "NameError: name 'undefined' is not defined (mine.py:11)"),
    ("advantage", "mine.py:ends", "stack expects each tensor to be equal size, but got [2, 4] at entry 0 and [4]"),
]


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    own.own_function.cache_clear()


@pytest.mark.parametrize("key,name,message", MISTAKES)
def test_a_mistake_in_a_file_is_one_line(key, name, message, file, refusal):
    check_config(DEFAULTS | {key: name}, 1, DEFAULTS)

    def use():
        function = own.own_function(key, name)
        function(logprobs=torch.zeros(3), rewards=torch.zeros(2, 4), groups=())

    line = refusal(use)
    assert line.startswith(f"error: {key}='{name}': ")
    assert message in line
