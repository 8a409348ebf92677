"""
The formulas against loops in float64, packing, the model, and the presets up to the model's weights.

    pytest tests/test_train.py
"""

import math
import random
import types
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import group_tensors
from pytest import approx
from torch import tensor

import train_grpo as train
from configurator import CHOICES, MODES, check_config, configure
from onecurve.algorithms import critic
from onecurve.algorithms.supervised import supervised_samples
from onecurve.keys.reference import ESTIMATORS
from onecurve.models.dense import Output, check_model
from onecurve.run.observers import off_policy_of
from onecurve.run.past import max_staleness, of_age
from rewards import draw_rows, rows_of_step
from rollout_server import Flight
from sync import Group

ROOT = Path(train.__file__).parent
DEFAULTS = train.DEFAULTS


# ---- formulas


REWARDS = [[1.0, 0.0, 0.5, 0.25], [0.1, 0.1, 0.1, 0.1], [0.0, 0.0, 0.0, 1.0]]
COUNTS = [7, 1, 0, 30, 12]  # loss tokens of five samples
LOSSES = CHOICES["loss"].split()


def mean(x):
    return sum(x) / len(x)


def std(x):
    return math.sqrt(sum((r - mean(x)) ** 2 for r in x) / (len(x) - 1))


def standard(r, x):
    return (r - mean(x)) / (std(x) + 1e-6)


def clamp(x, low, high):
    return min(max(x, low), high)


def for_tokens(values, counts=COUNTS):
    """The value of each sample, once for each of its tokens."""
    return [value for value, n in zip(values, counts) for _ in range(n)]


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def side_by_side(*columns):
    """The rows of columns of tokens, as floats."""
    return zip(*(x.tolist() for x in columns), strict=True)


BATCH = sum(REWARDS, [])
CENTRED = [r - mean(x) for x in REWARDS for r in x]
ADVANTAGES = {  # of sample i of a group of rewards x, in float64
    "grpo": lambda x, i: standard(x[i], x),
    "dr_grpo": lambda x, i: x[i] - mean(x),
    "rloo": lambda x, i: x[i] - mean(x[:i] + x[i + 1 :]),
    "reinforce++": lambda x, i: standard(x[i], BATCH),
    "reinforce++_baseline": lambda x, i: (x[i] - mean(x)) / (std(CENTRED) + 1e-6),
}


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_advantages_are_those_of_a_loop(kind):
    ours = train.advantages_of(tensor(REWARDS), kind)
    for group, row in zip(REWARDS, ours.tolist()):
        expected = [ADVANTAGES[kind](group, i) for i in range(4)]
        assert row == approx(expected, rel=1e-5, abs=1e-6)
    if kind != "reinforce++":
        assert ours[1].tolist() == [0.0] * 4  # not the rounding error of the mean over 1e-6


def random_tokens(n):
    """Three columns of numbers for n tokens."""
    rng = random.Random(0)
    drawn = [rng.gauss(-1, 0.4) for _ in range(3 * n)]
    return drawn[:n], drawn[n : 2 * n], drawn[2 * n :]


def loop_loss(kind, new, old, advantages, counts, low, high, dual):
    """Losses and clipped tokens of the formulas, sample by sample, token by token."""
    losses = []
    clipped = []
    start = 0
    for n in counts:
        at = range(start, start + n)
        start += n
        changes = [new[t] - old[t] for t in at]
        for t, change in zip(at, changes):
            r = math.exp(mean(changes) if kind == "gspo" else change)
            A = advantages[t]
            kept = clamp(r, 1 - low, 1 + high)
            if kind == "pg":
                loss = -A * new[t]
                cut = False
            elif kind == "cispo":
                loss = -kept * A * new[t]
                cut = kept != r
            else:
                objective = min(r * A, kept * A)
                if dual and A < 0:
                    objective = max(objective, dual * A)
                loss = -objective
                cut = kept * A < r * A
            losses.append(loss)
            clipped.append(cut)
    return losses, clipped


def our_loss(kind, new, old, advantages, counts, *bounds):
    """The trainer's losses and clipped tokens, of lists."""
    columns = map(tensor, (new, old, advantages))
    return train.policy_loss(kind, *columns, counts, *bounds)


@pytest.mark.parametrize("dual", [0.0, 1.5])
@pytest.mark.parametrize("kind", LOSSES)
def test_losses_are_those_of_a_loop(kind, dual):
    new, old, advantages = random_tokens(sum(COUNTS))
    shifts = for_tokens((0.6, -0.5, 0, 0.6, -0.5))
    new = [x + shift for x, shift in zip(new, shifts)]
    advantages = [a + 1 for a in advantages]  # of both signs
    inputs = kind, new, old, advantages, COUNTS, 0.2, 0.28
    loss, clipped = our_loss(*inputs, dual)
    expected, cut = loop_loss(*inputs, dual)
    assert loss.tolist() == approx(expected, rel=1e-4, abs=1e-6)
    assert clipped.tolist() == cut
    assert 5 < clipped.sum() < 45 or kind == "pg"
    if dual and kind in ("ppo", "gspo"):
        without, _ = our_loss(*inputs)
        assert not torch.equal(loss, without)


@pytest.mark.parametrize("kind", LOSSES)
def test_on_policy_every_gradient_is_the_policy_gradient(kind):
    """Where new and old log-probs are equal; for gspo the samples' means are, and it spreads them over the tokens."""
    logprobs = torch.randn(10, requires_grad=True)
    advantages = torch.randn(2).repeat_interleave(5)
    old = logprobs.detach()
    loss, clipped = train.policy_loss(kind, logprobs, old, advantages, [5, 5], 0.2, 0.2)
    loss.sum().backward()
    assert torch.allclose(logprobs.grad, -advantages)
    assert not clipped.any()


def test_the_gradient_of_gspo_is_that_of_its_sequence_objective():
    counts = [4, 9, 2]
    new, old, _ = tensor(random_tokens(15), dtype=torch.float64)
    advantages = tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    ours = new.clone().requires_grad_()
    theirs = new.clone().requires_grad_()
    spread = advantages.repeat_interleave(tensor(counts))
    losses, _ = train.policy_loss("gspo", ours, old, spread, counts, 0.1, 0.1)
    train.aggregate(losses, counts, "sequence", 3, 15, 9).backward()
    terms = []
    parts = zip(theirs.split(counts), old.split(counts), advantages)
    for part, before, A in parts:
        s = torch.exp((part - before).mean())
        terms.append(torch.minimum(s * A, s.clamp(0.9, 1.1) * A))
    objective = torch.stack(terms).mean()
    (-objective).backward()
    assert ours.grad.abs().max() > 0.01
    assert torch.allclose(ours.grad, theirs.grad)


KLS = dict(
    k1=lambda d: d,
    k2=lambda d: d * d / 2,
    k3=lambda d: math.exp(-d) - 1 + d,
)


def test_kl_estimates_are_those_of_a_loop():
    new, reference, _ = random_tokens(50)
    for kind in ESTIMATORS.split():
        ours = train.kl(tensor(new), tensor(reference), kind)
        expected = [KLS[kind](a - b) for a, b in zip(new, reference)]
        assert ours.tolist() == approx(expected, rel=1e-3, abs=1e-6)


def loop_gae(rewards, values, gamma, lam):
    """Equation 16 as it stands: a sum over all later deltas."""
    deltas = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
    sums = []
    for t in range(len(deltas)):
        later = enumerate(deltas[t:])
        sums.append(sum((gamma * lam) ** k * d for k, d in later))
    return sums


def test_a_critics_advantages_are_those_of_a_loop_over_samples():
    """
    Of any length. Rewards come with the last loss token, costs with each; a sample cut off is worth what the critic
    says.
    """
    rng = random.Random(1)
    samples = []
    gains = []
    expected = []
    cases = (4, 1.0, 0.0), (1, 0.0, 0.7), (7, 0.5, 0.0)
    for n, reward, end in cases:
        costs = [rng.gauss(0, 0.1) for _ in range(n)]
        mask = tensor([False, *[True] * n, False])
        zeros = torch.zeros(n + 2)
        values = torch.randn(n)
        sample = train.make_sample(zeros, zeros, mask, zeros, truncated=bool(end))
        sample = sample._replace(values=values, bootstrap=end)
        samples.append(sample)
        gains.append(critic.token_rewards(sample, reward, "sample") - tensor(costs))
        of_tokens = [-cost for cost in costs]
        of_tokens[-1] += reward
        expected.append(loop_gae(of_tokens, [*values.tolist(), end], 0.9, 0.8))
    none = torch.zeros(3, 0)  # every token filtered out
    assert critic.gae(none, torch.zeros(3, 1), 0.9, 0.9).shape == none.shape
    whole = sum(expected, [])
    done = critic.advantages(samples, gains, 0.9, 0.8)
    for s, before, raw in zip(done, samples, expected):
        normalized = [standard(a, whole) for a in raw]
        assert s.advantages.tolist() == approx(normalized, abs=1e-5)
        returns = [a + v for a, v in zip(raw, before.values.tolist())]
        assert s.returns.tolist() == approx(returns, abs=1e-5)


def test_overlong_penalty_and_masked_weights_are_those_of_loops():
    lengths = range(1, 101)
    ours = train.overlong_penalty(tensor(lengths).view(4, 25), 90, 20)
    penalty = [clamp((90 - 20 - n) / 20, -1.0, 0.0) for n in lengths]
    assert ours.flatten().tolist() == approx(penalty)
    new, old, _ = random_tokens(40)
    ratios = [math.exp(a - b) for a, b in zip(new, old)]
    expected = [w if 0.6 <= w <= 1.5 else 0.0 for w in ratios]
    ours = train.importance_weights(tensor(new), tensor(old), "mask", 0.6, 1.5)
    assert ours.tolist() == approx(expected, rel=1e-5)
    assert expected != ratios
    for kind in ("truncate", "mask"):
        exact = train.importance_weights(tensor(new), tensor(new), kind, 0.6, 1.5)
        assert exact.tolist() == [1.0] * 40  # equal bits in, exactly 1 out


@pytest.mark.parametrize("cut", [[5], [2, 3], [1] * 5])
def test_aggregated_leaves_add_up_to_the_mean_over_the_step(cut):
    losses = normal(50)
    samples = losses.split(COUNTS)
    expected = dict(
        token=losses.sum() / 50,
        sequence=sum(x.mean() for x in samples if len(x)) / 5,
        constant=losses.sum() / (5 * 32),
    )
    for kind in CHOICES["loss_aggregation"].split():
        total = 0.0
        first = 0
        for n in cut:
            leaf = slice(first, first + n)
            first += n
            mine = torch.cat(samples[leaf])
            total += train.aggregate(mine, COUNTS[leaf], kind, 5, 50, 32)
        assert torch.allclose(total, expected[kind])


def test_learning_rate_warms_up_then_falls_to_its_minimum():
    rates = [train.learning_rate_at(s, 1.0, 10, 100, 0.1) for s in range(120)]
    assert rates[0] == 0.1
    assert rates[9] == rates[10] == 1.0
    assert rates[55] == approx(0.55)
    assert rates[100] == rates[119] == approx(0.1)
    assert train.learning_rate_at(10**6, 1.0, 0, 0, 0.0) == 1.0


# ---- samples, leaves and steps


FIELDS = ("logprobs", "old_logprobs", "advantages", "reference", "values", "returns")


def random_samples(n):
    """n samples with other numbers in every field and gaps in the loss mask."""
    rng = random.Random(0)
    samples = []
    for i in range(n):
        R = rng.randrange(3, 9)
        response = torch.arange(R)
        mask = response % 3 != 1
        s = train.make_sample(response[:2], response, mask, torch.zeros(R), name=f"{i}")
        fields = {}
        for name in FIELDS:
            drawn = [rng.gauss(0, 0.4) for _ in s.loss_at]
            fields[name] = tensor(drawn, dtype=torch.float64)
        samples.append(s._replace(**fields))
    return samples


def config_of(**change):
    plain = dict(importance="", entropy_coef=0.0, kl_coef=0.0)
    return types.SimpleNamespace(branch="", **DEFAULTS | plain | change)


@pytest.mark.parametrize("kl_in_reward", [False, True])
def test_the_loss_of_a_leaf_is_that_of_a_loop_over_its_terms(kl_in_reward):
    c = config_of(
        importance="truncate",
        importance_floor=0.7,
        importance_cap=1.3,
        entropy_coef=0.3,
        kl_coef=0.2,
        kl_in_reward=kl_in_reward,
        value_coef=0.7,
        value_clip=0.1,
        clip_low=0.1,
        clip_high=0.3,
        loss_aggregation="constant",
        max_new_tokens=50,
    )
    torch.manual_seed(0)
    leaf = train.pack(random_samples(6), "cpu")
    new, entropy, values = normal(3, len(leaf.targets)) * 0.3
    output = Output(new, entropy, values=values)
    loss, figures = train.policy_step_loss(output, leaf, c, 9, 100)
    expected = 0.0
    kls = []
    fields = [getattr(leaf, name) for name in FIELDS]
    rows = side_by_side(new, entropy, values, *fields)
    for n, h, v, engine, old, A, reference, old_v, target in rows:
        r = math.exp(n - old)
        weight = clamp(math.exp(old - engine), 0.7, 1.3)
        kept = old_v + clamp(v - old_v, -0.1, 0.1)
        kls.append(KLS["k3"](n - reference))
        objective = min(r * A, clamp(r, 0.9, 1.3) * A)
        expected -= weight * objective + 0.3 * h
        expected += 0.7 * max((v - target) ** 2, (kept - target) ** 2) / 2
        if not kl_in_reward:
            expected += 0.2 * kls[-1]
    assert float(loss) == approx(expected / (9 * 50))
    assert figures["kl_reference"].tolist() == approx(kls)


def test_costs_are_taken_from_a_samples_reward_and_a_teacher_is_followed():
    rewards = tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.0]])
    samples = [s._replace(of=i) for i, s in enumerate(random_samples(6))]
    away = [[a - b for a, b in side_by_side(s.logprobs, s.reference)] for s in samples]
    net = [r - 0.2 * sum(costs) for r, costs in zip(rewards.flatten().tolist(), away)]
    c = config_of(advantage="dr_grpo", kl_coef=0.2, kl_in_reward=True, kl_estimator="k1")
    done = train.with_advantages(samples, rewards, c)
    assert len(done) == 6
    for i, s in enumerate(done):
        first = i // 3 * 3
        expected = net[i] - mean(net[first : first + 3])
        assert s.advantages.tolist() == approx([expected] * len(s.loss_at), rel=1e-5)
    followed = train.with_advantages(samples, rewards, config_of(advantage="distill"))
    for s, costs in zip(followed, away, strict=True):
        assert s.advantages.tolist() == [-x for x in costs]


def make_group(prompt, rewards, lengths=(2, 3)):
    """A rollout group of two samples, of which the second is cut off, as the files have it."""
    n = sum(lengths)
    tokens = torch.arange(n) + 10 * prompt
    tensors = group_tensors(
        lengths,
        tokens=tokens,
        loss_mask=tokens % 5 != 0,
        logprobs=-tokens.float(),
        truncated=tensor([False, True]),
        prompt_tokens=tensor([prompt]),
        rewards=tensor(rewards),
        weight_version=torch.arange(n) // 2,
        turn_rewards=tensor(rewards),
    )
    return Group(tensors, dict(prompt=prompt, step=5))


def noted(groups, key="prompt"):
    """What the groups' files note under a key."""
    return [meta[key] for _, meta in groups]


@pytest.mark.parametrize("overlong_filter", [False, True])
def test_only_samples_that_were_cut_off_are_filtered(overlong_filter):
    groups = [make_group(prompt, [0.0, 1.0]) for prompt in (3, 4)]
    samples = train.samples_of(groups, 5, overlong_filter)
    names = [f"prompt {p}, sample {g}" for p in (3, 4) for g in (0, 1)]
    assert [s.name for s in samples] == names
    assert samples[0].tokens.tolist() == [3, 30, 31]
    assert samples[1].tokens.tolist() == [3, 32, 33, 34]
    assert [s.truncated for s in samples] == [False, True] * 2
    assert [s.prompt_tokens for s in samples] == [1] * 4
    cut_off = [] if overlong_filter else [1, 2, 3]
    assert [s.loss_at.tolist() for s in samples] == [[2], cut_off] * 2
    known = [] if overlong_filter else [-32.0, -33.0, -34.0]
    assert samples[1].logprobs.tolist() == samples[1].old_logprobs.tolist() == known


class Rollouts:
    """In a queue's place: groups of rewards 0 and 1, equal ones for the rows in `equal`. It keeps the jobs."""

    def __init__(self, equal=()):
        self.equal = equal
        self.jobs = []

    def rewards_of(self, row):
        return [0.0, 0.0, float(row not in self.equal)]

    def sample(self, job):
        self.jobs.append(job)
        groups = [make_group(i, self.rewards_of(row)) for i, row in job.rows.items()]
        return groups

    def drawn(self):
        return [[*job.rows.values()] for job in self.jobs]


def sample_step(queue, step, rows, c, flight=Flight(), version=7):
    return train.sample_step(queue.sample, step, {"": rows}, c, version, flight)


def test_groups_of_equal_rewards_give_way_to_the_next_rounds_in_order():
    c = config_of(dynamic_sampling=2, prompts_per_step=4, group_size=2, temperature=0.7)
    rows = list(range(24))
    # an epoch: three rounds for each step
    first, second, third = (rows_of_step(24, 4, k, c.seed, "rl") for k in (3, 4, 5))
    equal = {first[0], first[2], second[1], second[2], *third}
    queue = Rollouts(equal)
    flight = Flight(3)
    groups, made, after = sample_step(queue, 1, rows, c, flight)
    assert after == flight
    assert queue.drawn() == [first, second]  # the second round was enough
    for k, job in enumerate(queue.jobs):
        assert [*job.rows] == list(range(4 * k, 4 * k + 4))
        assert job[:3] == ("rl", 1, 7)
        assert job[4:] == (2, (0.7, 1.0, 0, 0.0), 0, {})
    assert noted(made) == [1, 3, 4, 7, 0, 2, 5, 6]
    assert noted(groups) == [1, 3, 4, 7]
    queue = Rollouts(equal | {second[0]})
    groups, made, _ = sample_step(queue, 1, rows, c, flight)
    # three rounds were not: the first of the others fill up
    assert len(queue.jobs) == 3
    assert len(made) == 12
    assert noted(groups) == [1, 3, 7, 0]
    queue = Rollouts(equal)
    groups, made, _ = sample_step(queue, 3, rows, config_of(prompts_per_step=4), flight)
    assert noted(groups) == noted(made) == [0, 1, 2, 3]
    assert queue.drawn() == [first]  # with one round a step


def test_a_curriculum_draws_most_often_what_was_last_seen_half_right():
    """Rows 0 to 7 are never right, 8 to 15 always, 16 to 23 half of the time; what a step draws tells the next ones."""
    sizes = dict(prompts_per_step=4, group_size=4)
    c = config_of(curriculum=15, **sizes)
    rows = list(range(24))
    rewards = [[0.0] * 4, [1.0] * 4, [0.0, 1.0] * 2]
    queue = Rollouts()
    queue.rewards_of = lambda row: rewards[row // 8]
    flight = Flight()
    drawn = []
    for step in range(300):
        flight = sample_step(queue, step, rows, c, flight).flight
        of_step = draw_rows({"": rows}, 4, step, c, "rl", flight.seen)
        drawn.append([row for _, row in of_step])
    seen = {row: right for (_, row), right in flight.seen.items()}
    assert seen == {row: [0, 4, 2][row // 8] for row in rows}
    assert all(len({*step}) == 4 for step in drawn)
    counts = Counter(row // 8 for step in drawn[30:] for row in step)
    for kind in (0, 1):
        assert counts[2] > 8 * counts[kind] > 0  # 16 to 1, but no row twice in a step
    even = config_of(curriculum=0, **sizes)
    assert sample_step(queue, 0, rows, even).flight.seen == {}


def test_sources_have_their_quota_of_every_step_each_in_its_own_order():
    c = config_of(sources="a={'weight': 3}, b={}, c={'weight': 0}")
    rows = {"a": list(range(10)), "b": list(range(5))}
    steps = [draw_rows(rows, 8, step, c, "rl") for step in range(10)]
    for step in steps:
        assert [name for name, _ in step] == ["a"] * 6 + ["b"] * 2
    for name, own in rows.items():
        order = [row for step in steps for source, row in step if source == name]
        n = len(own)
        for i in range(0, len(order), n):
            assert sorted(order[i : i + n]) == own
    one = config_of()
    alone = draw_rows({"": rows["a"]}, 8, 0, one, "rl")
    assert [row for _, row in alone] == rows_of_step(10, 8, 0, one.seed, "rl")


def test_held_out_prompts_have_samples_and_a_temperature_of_their_own():
    c = config_of(eval_samples=2, eval_temperature=0.3, group_size=5, temperature=0.9, pass_reward=1.0)
    queue = Rollouts({8})
    seen = []

    def evaluation(step, scores, n, hashes):
        seen.append((step, scores["pass@1"], n, hashes))

    record = types.SimpleNamespace(hashes=len, evaluation=evaluation)
    train.evaluate(queue.sample, 6, [7, 8], c, 5, record)
    assert queue.jobs == [("eval", 6, 5, {0: 7, 1: 8}, 2, (0.3, 1.0, 0, 0.0), 0, {})]
    assert seen == [(6, approx(1 / 6), 2, 2)]


def test_the_order_of_the_data_and_the_first_weights_have_own_seeds(tmp_path):
    def prompts(**change):
        queue = Rollouts()
        c = config_of(prompts_per_step=4, **change)
        sample_step(queue, 1, list(range(24)), c, Flight(3))
        return queue.drawn()[0]

    def weights(name, **change):
        folder = tmp_path / name
        train.folders.make_scratch_model(folder, DEFAULTS | change)
        (path,) = folder.glob("*.safetensors")
        return path.read_bytes()

    assert prompts() == prompts(seeds="noise=7, init=2, eval=3") == prompts(seed=9, seeds="data=1")
    assert prompts() != prompts(seeds="data=2") == prompts(seed=2)
    first = weights("a")
    assert first == weights("b", seeds="data=2, noise=7, eval=3") == weights("c", seed=9, seeds="init=1")
    assert first != weights("d", seeds="init=2") == weights("e", seed=2)


@pytest.mark.parametrize("sizes", [f"num_hidden_layers={10**12}", f"head_dim={'9' * 4000}, num_hidden_layers=1"])
def test_a_scratch_model_that_no_memory_holds_is_refused_at_once(sizes, tmp_path, refusal):
    line = refusal(train.folders.make_scratch_model, tmp_path, DEFAULTS | dict(scratch_args=sizes))
    assert "scratch_args=" in line
    assert "its weights do not fit into this machine" in line
    assert not [*tmp_path.iterdir()]


class Segments:
    """In a queue's place: group n, in the order of the data, takes `draws(n)` segments until it is finished."""

    def __init__(self, draws, per_step):
        self.draws = draws
        self.per_step = per_step
        self.jobs = []
        self.made = []

    def sample(self, job):
        self.jobs.append(job)
        for i in job.rows:
            (step, place), group = job.begun[i]
            n = step * self.per_step + place
            before = group[0]["versions"] if group else ()
            versions = [*before, job.version]
            finished = len(versions) == self.draws(n)
            meta = dict(born=[step, place], prompt=i, number=n, finished=finished)
            self.made.append(Group(dict(versions=versions), meta))
        return self.made[-len(job.rows) :]


def test_partial_rollouts_go_on_and_train_on_the_first_that_are_finished():
    c = config_of(segment_tokens=2, groups_in_flight=5, prompts_per_step=3, group_size=2, max_new_tokens=8)
    rows = [f"row {i}" for i in range(30)]
    # as whole samples are
    order = sum((rows_of_step(30, 3, s, c.seed, "rl") for s in range(10)), [])
    draws = [1, 4, 1, 2, 3, 1, 1]
    queue = Segments(lambda n: draws[n % 7], 3)
    flight = Flight()
    trained = []
    for step in range(6):
        first = len(queue.jobs)
        version = 10 + step
        groups, made, flight = sample_step(queue, step, rows, c, flight, version)
        assert len(groups) == 3
        assert flight.begun == 5 + 3 * step
        assert len(flight.groups) == 2
        of_step = [group for group in queue.made if group[0]["versions"][-1] == version]
        assert made == of_step
        for k, job in enumerate(queue.jobs[first:]):
            assert (job.step, job.version, job.tokens) == (step, version, 2)
            assert all(i // 5 == k for i in job.rows)
            for i, ((s, place), _) in job.begun.items():
                assert job.rows[i] == rows[order[3 * s + place]]
        trained.append(noted(groups, "number"))
    # 3 is finished by a second round of step 0; 1 goes on while those behind it are trained on
    assert trained[:3] == [[0, 2, 3], [4, 5, 6], [1, 7, 9]]
    of_1 = [t["versions"] for t, meta in queue.made if meta["number"] == 1]
    assert of_1[-1] == [10, 10, 11, 12]
    left = noted(flight.groups, "number")
    assert sorted(sum(trained, left)) == list(range(20))  # each is begun once, and none is dropped


IN_FLIGHT = [  # tokens of a sample and of a segment, groups in flight, prompts per step
    (8, 2, 5, 3),
    (6, 2, 9, 4),
    (9, 4, 6, 2),
    (6, 6, 9, 2),
]


@pytest.mark.parametrize("most,segment,places,P", IN_FLIGHT)
def test_no_token_is_older_than_the_oldest_kept_version_which_is_needed(most, segment, places, P):
    """For any lengths. The worst: the first P groups are short, the others in flight long, all later ones short."""
    c = config_of(segment_tokens=segment, groups_in_flight=places, prompts_per_step=P, max_new_tokens=most, lag=2)
    longest = -(-most // segment)
    assert max_staleness(config_of(lag=3)) == 3
    assert max_staleness(config_of()) == 0

    def oldest(draws):
        queue = Segments(lambda n: draws[n], P)
        flight = Flight()
        ages = []
        for step in range(20):
            groups, _, flight = sample_step(queue, step, ["row"] * 7, c, flight, step - 2)
            ages += [step - t["versions"][0] for t, _ in groups]
        return max(ages)

    worst = [1] * P + [longest] * (places - P) + [1] * 40 * P
    assert oldest(worst) == max_staleness(c)
    for seed in range(50):
        rng = random.Random(seed)
        draws = [rng.randrange(1, longest + 1) for _ in range(40 * P)]
        assert oldest(draws) <= max_staleness(c)


def test_a_sample_is_checked_by_version_up_to_the_last_token_of_each():
    groups = [make_group(3, [0.0, 1.0], lengths=(2, 7))]
    sample = train.samples_of(groups, step=5)[1]
    assert sample.name == "prompt 3, sample 1"
    assert sample.staleness.tolist() == [4, 4, 3, 2, 2, 1]
    later = train.samples_of([make_group(3, [0.0, 1.0])], step=6)
    assert later[0].name == "prompt 3 of step 5, sample 0"
    assert sample.tokens.tolist() == [3, 32, 33, 34, 35, 36, 37, 38]
    assert sample.loss_at.tolist() == [1, 2, 3, 5, 6, 7]
    cut = of_age(sample, 3)
    assert cut.tokens.tolist() == [3, 32, 33, 34]
    assert cut.loss_at.tolist() == [3]
    assert cut.logprobs.tolist() == [-34]
    assert cut.prompt_tokens == len(cut.returns) == len(cut.turn) == 1
    assert of_age(sample, 1).loss_at.tolist() == [7]
    assert of_age(sample, 5) is None


def test_decoupled_ppo_weighs_by_the_last_version_and_clips_against_it():
    """The weight is the last version over the behaviour."""
    leaf = train.pack(random_samples(6), "cpu")
    n = len(leaf.targets)
    leaf = leaf._replace(staleness=torch.arange(n) % 3)
    new = leaf.old_logprobs + 0.3 * normal(n)
    output = Output(new, new * 0)
    c = config_of(importance="full", loss_aggregation="token", clip_low=0.1, clip_high=0.2, lag=2)
    loss, figures = train.policy_step_loss(output, leaf, c, 6, 50)
    expected = 0.0
    ratios = []
    for now, engine, old, A in side_by_side(new, leaf.logprobs, leaf.old_logprobs, leaf.advantages):
        ratio = math.exp(now - old)
        objective = min(ratio * A, clamp(ratio, 0.9, 1.2) * A)
        expected -= math.exp(old - engine) * objective
        ratios.append(math.exp(now - engine))
    assert float(loss) == approx(expected / 50)
    (observer,) = off_policy_of(c)
    observer.before([], "rl", check=True)
    assert observer.note(loss, [0], leaf, output, figures) is loss
    assert figures["ratio_mean"].tolist() == approx(ratios)
    assert figures["ratio_square"].tolist() == approx([r * r for r in ratios])
    away = [r - 1 - math.log(r) for r in ratios]
    assert figures["kl_behaviour"].tolist() == approx(away)
    assert figures["staleness"] is leaf.staleness
    same = leaf._replace(old_logprobs=leaf.logprobs)
    plain, _ = train.policy_step_loss(output, same, config_of(), 6, 50)
    full, _ = train.policy_step_loss(output, same, config_of(importance="full"), 6, 50)
    assert torch.equal(plain, full)  # without a lag it is PPO


def test_supervised_samples_learn_the_whole_answer_and_no_prompt():
    c = config_of(sft_batch=4)
    rows = [dict(prompt_tokens=[i, i], answer_tokens=[50, i, 1]) for i in range(20)]
    chosen = rows_of_step(20, 4, 2, c.seed, "sft")
    samples = supervised_samples([rows[i] for i in chosen], c, train.make_sample)
    for i, s in zip(chosen, samples, strict=True):
        assert s.tokens.tolist() == [i, i, 50, i, 1]
        assert s.prompt_tokens == 2
        assert s.loss_at.tolist() == [2, 3, 4]


def test_what_comes_every_so_many_steps_comes_after_the_last_one_too():
    def steps(every):
        return [s for s in range(1, 11) if train.due(s, every, 10)]

    assert steps(4) == [4, 8, 10]
    assert steps(0) == [10]


# ---- presets


def shape(hidden, mlp, layers, heads):
    return dict(hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads)


MIXTURE = dict(
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
)
QWEN3_8B = shape(4096, 12288, 36, 32)
PRESETS = {  # ranks, parameters, and the published config.json of the models, without their weights
    "qwen3_0p6b": (1, 0.596e9, shape(1024, 3072, 28, 16)),
    "qwen3_8b": (8, 8.19e9, QWEN3_8B),
    "qwen3_8b_lag": (8, 8.19e9, QWEN3_8B),
    "qwen3_8b_colocated": (8, 8.19e9, QWEN3_8B),
    "qwen3_32b": (16, 32.76e9, shape(5120, 25600, 64, 64)),
    "qwen3_30b_a3b": (8, 30.53e9, MIXTURE),
    "llama_70b_lora": (8, 70.55e9, shape(8192, 28672, 80, 64)),
}


def preset(name):
    """Its config, as from the command line."""
    known = dict(DEFAULTS, __file__=str(ROOT / "train_grpo.py"))
    return configure(known, [str(ROOT / f"config/{name}.py")])


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_builds_up_to_the_weights(tmp_path, mesh, name):
    from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

    world, parameters, sizes = PRESETS[name]
    config = preset(name)
    check_config(config, world, DEFAULTS)
    kinds = dict(llama_70b_lora=LlamaConfig, qwen3_30b_a3b=Qwen3MoeConfig)
    plain = dict(
        vocab_size=128256 if name == "llama_70b_lora" else 151936,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=name == "qwen3_0p6b",
    )
    hf = kinds.get(name, Qwen3Config)(**plain | sizes)
    hf.save_pretrained(tmp_path)
    hf = check_model(tmp_path, config)
    model = train.build_model(hf, mesh, "meta", True)
    shapes = [(s.name, s.shape) for s in train.sync.shards(model, mesh)]
    assert sum(math.prod(s) for _, s in shapes) == approx(parameters, rel=0.01)
    buckets = train.sync.buckets(shapes, torch.bfloat16)
    names = [name for bucket in buckets for name, _ in bucket]
    assert names == [name for name, _ in model.named_parameters()]
    for bucket in buckets:
        size = sum(math.prod(s) * 2 for _, s in bucket)
        assert size <= 1 << 30 or len(bucket) == 1


SMALL = "tiny tiny_lora small one_gpu stage_sft stage_rm stage_dpo stage_ppo".split()


@pytest.mark.parametrize("name", SMALL)
def test_a_small_preset_is_valid(name):
    config = preset(name)
    most = 2 + MODES[config["mode"]].samples  # three trainers cannot share four lanes
    for world in range(1, most + 1):
        check_config(config, world, DEFAULTS)


# ---- what is refused


def test_models_we_cannot_train_and_serve_alike_are_refused(tmp_path, refusal):
    from transformers import GPT2Config, Qwen2Config

    (tmp_path / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}')
    said = refusal(check_model, tmp_path, DEFAULTS)
    merge = f"make one model of both (tools/merge.py BASE {tmp_path} out/mer"
    assert f"init_from={str(tmp_path)!r}: adapters of BASE; {merge}" in said
    assert f" --init_from=BASE --lora_rank=8 --lora={tmp_path}" in said
    (tmp_path / "run/ckpt/step_000004").mkdir(parents=True)
    line = f"the folder of a run; use a checkpoint in it, such as {tmp_path}/run/ckpt/step_000004"
    assert line in refusal(check_model, tmp_path / "run", DEFAULTS)

    def among(ranks):
        return dict(tp_split=ranks, rollout_tp=ranks)

    sliding = Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=1)
    heads = Qwen2Config(hidden_size=96, num_attention_heads=6, num_key_value_heads=3, intermediate_size=40)
    for hf, change, message in (
        (GPT2Config(), {}, "a gpt2 model; known are qwen3, qwen2, llama"),
        (sliding, {}, "sliding-window"),
        (Qwen2Config(max_position_embeddings=64), {}, "the model has 64 positions"),
        (heads, dict(tp_split=64), "tp_split=64: does not divide attention's width, 96, of init_from="),
        (heads, dict(tp_split=16), "tp_split=16: does not divide the MLP's width, 40, of init_from="),
        (heads, among(4), "rollout_tp=4: does not divide its number of heads, 6, of init_from="),
        (heads, among(2), "rollout_tp=2: does not divide its number of key heads, 3, of init_from="),
    ):
        hf.save_pretrained(tmp_path)
        assert message in refusal(check_model, tmp_path, DEFAULTS | change)


def test_a_model_without_a_tokenizer_or_with_a_broken_one_is_one_line(tmp_path, refusal):
    from transformers import LlamaConfig, Qwen2Config

    cases = (LlamaConfig, ""), (Qwen2Config, ""), (Qwen2Config, "{"), (LlamaConfig, "[]")
    for kind, content in cases:
        kind().save_pretrained(tmp_path)
        if content:
            (tmp_path / "tokenizer.json").write_text(content)
        line = refusal(train.folders.load_tokenizer, tmp_path)
        assert line.startswith(f"error: init_from={str(tmp_path)!r}: no usable tokenizer: ")
