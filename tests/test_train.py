"""
The formulas against loops in float64, packing, the model, and the presets up to the model's weights.

    pytest tests/test_train.py
"""

import collections
import math
import random
import types
from itertools import combinations
from pathlib import Path

import pytest
import torch
from conftest import error_line

import rewards
import train_grpo as train
from configurator import CHOICES, MODES, check_config, configure
from onecurve.algorithms import critic
from onecurve.algorithms.supervised import supervised_samples
from onecurve.keys.reference import ESTIMATORS
from onecurve.models.dense import Output, check_model
from onecurve.run.observers import off_policy_of
from onecurve.run.past import max_staleness, of_age
from onecurve.run.scores import pass_at_k
from rollout_server import Flight
from sync import Group

ROOT = Path(train.__file__).parent
DEFAULTS = train.DEFAULTS


# ---- formulas


REWARDS = [[1.0, 0.0, 0.5, 0.25], [0.1, 0.1, 0.1, 0.1], [0.0, 0.0, 0.0, 1.0]]


def mean(x):
    return sum(x) / len(x)


def std(x):
    return math.sqrt(sum((r - mean(x)) ** 2 for r in x) / (len(x) - 1))


BATCH = sum(REWARDS, [])
ADVANTAGES = {  # of sample i of a group of rewards x, in float64
    "grpo": lambda x, i: (x[i] - mean(x)) / (std(x) + 1e-6),
    "dr_grpo": lambda x, i: x[i] - mean(x),
    "rloo": lambda x, i: x[i] - mean(x[:i] + x[i + 1 :]),
    "reinforce++": lambda x, i: (x[i] - mean(BATCH)) / (std(BATCH) + 1e-6),
    "reinforce++_baseline": lambda x, i: (x[i] - mean(x)) / (std([r - mean(g) for g in REWARDS for r in g]) + 1e-6),
}


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_advantages_are_those_of_a_loop(kind):
    ours = train.advantages_of(torch.tensor(REWARDS), kind)
    for group, row in zip(REWARDS, ours.tolist()):
        assert row == pytest.approx([ADVANTAGES[kind](group, i) for i in range(4)], rel=1e-5, abs=1e-6)
    if kind != "reinforce++":
        assert ours[1].tolist() == [0.0] * 4  # not the rounding error of the mean over 1e-6


def random_tokens(counts, seed=0):
    rng = random.Random(seed)
    return [[rng.gauss(-1, 0.4) for _ in range(sum(counts))] for _ in range(3)]


def loop_loss(kind, new, old, advantages, counts, low, high, dual):
    """Losses and clipped tokens of the formulas, sample by sample, token by token."""
    out, start = [], 0
    for n in counts:
        at = range(start, start + n)
        sequence = math.exp(sum(new[t] - old[t] for t in at) / n) if n else 1.0
        for t in at:
            r, A = sequence if kind == "gspo" else math.exp(new[t] - old[t]), advantages[t]
            kept = min(max(r, 1 - low), 1 + high)
            if kind == "pg":
                out.append((-A * new[t], False))
            elif kind == "cispo":
                out.append((-kept * A * new[t], kept != r))
            else:
                objective = min(r * A, kept * A)
                out.append((-max(objective, dual * A) if dual and A < 0 else -objective, kept * A < r * A))
        start += n
    return out


@pytest.mark.parametrize("dual", [0.0, 1.5])
@pytest.mark.parametrize("kind", CHOICES["loss"].split())
def test_losses_are_those_of_a_loop(kind, dual):
    counts = [7, 1, 0, 30, 12]
    new, old, advantages = random_tokens(counts)
    shifts = sum(([shift] * n for shift, n in zip((0.6, -0.5, 0, 0.6, -0.5), counts)), [])
    new, advantages = [x + shift for x, shift in zip(new, shifts)], [a + 1 for a in advantages]  # of both signs
    loss, clipped = train.policy_loss(kind, *map(torch.tensor, (new, old, advantages)), counts, 0.2, 0.28, dual)
    expected = loop_loss(kind, new, old, advantages, counts, 0.2, 0.28, dual)
    assert loss.tolist() == pytest.approx([x for x, _ in expected], rel=1e-4, abs=1e-6)
    assert clipped.tolist() == [x for _, x in expected]
    assert 5 < clipped.sum() < 45 or kind == "pg"
    if dual and kind in ("ppo", "gspo"):
        assert not torch.equal(
            loss, train.policy_loss(kind, *map(torch.tensor, (new, old, advantages)), counts, 0.2, 0.28)[0]
        )


def test_the_clipped_loss_of_the_worked_example():
    example, _ = train.policy_loss("ppo", *map(torch.tensor, ([-1.5], [-2.0], [0.8])), [1], 0.2, 0.2)
    assert example.item() == pytest.approx(-0.96)  # ratio 1.6487, clipped to 1.2


@pytest.mark.parametrize("kind", CHOICES["loss"].split())
def test_on_policy_every_gradient_is_the_policy_gradient(kind):
    """Where new and old log-probs are equal; for gspo the samples' means are, and it spreads them over the tokens."""
    logprobs = torch.randn(10, requires_grad=True)
    advantages = torch.randn(2).repeat_interleave(5)
    loss, clipped = train.policy_loss(kind, logprobs, logprobs.detach(), advantages, [5, 5], 0.2, 0.2)
    loss.sum().backward()
    assert torch.allclose(logprobs.grad, -advantages) and not clipped.any()


def test_the_gradient_of_gspo_is_that_of_its_sequence_objective():
    counts = [4, 9, 2]
    new, old, _ = (torch.tensor(x, dtype=torch.float64) for x in random_tokens(counts))
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    ours, theirs = (new.clone().requires_grad_() for _ in range(2))
    spread = advantages.repeat_interleave(torch.tensor(counts))
    losses, _ = train.policy_loss("gspo", ours, old, spread, counts, 0.1, 0.1)
    train.aggregate(losses, counts, "sequence", 3, 15, 9).backward()
    terms = []
    for part, before, A in zip(theirs.split(counts), old.split(counts), advantages):
        s = torch.exp((part - before).mean())
        terms.append(torch.minimum(s * A, s.clamp(0.9, 1.1) * A))
    (-torch.stack(terms).mean()).backward()
    assert ours.grad.abs().max() > 0.01 and torch.allclose(ours.grad, theirs.grad)


def test_kl_estimates_are_those_of_a_loop_and_average_to_the_kl():
    new, reference, _ = random_tokens([50])
    expected = dict(k1=lambda d: d, k2=lambda d: d * d / 2, k3=lambda d: math.exp(-d) - 1 + d)
    for kind in ESTIMATORS.split():
        ours = train.kl(torch.tensor(new), torch.tensor(reference), kind).tolist()
        assert ours == pytest.approx([expected[kind](a - b) for a, b in zip(new, reference)], rel=1e-3, abs=1e-6)
    p, q = (torch.log_softmax(torch.randn(5, dtype=torch.float64), 0) for _ in range(2))
    exact = (p.exp() * (p - q)).sum()
    for kind in ("k1", "k3"):  # without bias; k2 has some
        assert torch.allclose((p.exp() * train.kl(p, q, kind)).sum(), exact)


def loop_gae(rewards, values, gamma, lam):
    """Equation 16 as it stands: a sum over all later deltas."""
    deltas = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
    return [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]


def test_gae_of_the_worked_example_and_of_a_loop():
    ours = critic.gae(torch.tensor([0.0, 0, 0, 1]), torch.tensor([0.5, 0.6, 0.7, 0.8, 0.0]), 0.99, 0.95)
    assert ours.tolist() == pytest.approx([0.4292, 0.3564, 0.2801, 0.2000], abs=5e-5)
    rewards, values = torch.randn(3, 9, dtype=torch.float64), torch.randn(3, 10, dtype=torch.float64)
    assert critic.gae(torch.zeros(3, 0), torch.zeros(3, 1), 0.9, 0.9).shape == (3, 0)  # every token filtered out
    for r, v, row in zip(rewards.tolist(), values.tolist(), critic.gae(rewards, values, 0.97, 0.8).tolist()):
        assert row == pytest.approx(loop_gae(r, v, 0.97, 0.8))


def test_a_critics_advantages_are_those_of_a_loop_over_samples_of_any_length():
    """Rewards come with the last loss token, costs with each; a sample cut off is worth what the critic says."""
    rng, samples, expected = random.Random(1), [], []
    rewards = [1.0, 0.0, 0.5]
    costs = [[rng.gauss(0, 0.1) for _ in range(n)] for n in (4, 1, 7)]
    for r, cost, end in zip(rewards, costs, (0.0, 0.7, 0.0)):
        n = len(cost)
        mask, values = torch.tensor([False, *[True] * n, False]), torch.randn(n + 2)
        sample = train.make_sample(torch.zeros(3), torch.zeros(n + 2), mask, torch.zeros(n + 2), truncated=bool(end))
        samples.append(sample._replace(values=values[1:-1], bootstrap=end))
        gains = [-c for c in cost]
        gains[-1] += r
        expected.append(loop_gae(gains, values[1:-1].tolist() + [end], 0.9, 0.8))
    whole = sum(expected, [])
    gains = [critic.token_rewards(s, r, "sample") - torch.tensor(c) for s, r, c in zip(samples, rewards, costs)]
    done = critic.advantages(samples, gains, 0.9, 0.8)
    for s, before, raw in zip(done, samples, expected):
        normal = [(a - mean(whole)) / (std(whole) + 1e-6) for a in raw]
        assert s.advantages.tolist() == pytest.approx(normal, abs=1e-5)
        returns = [a + v for a, v in zip(raw, before.values.tolist())]
        assert s.returns.tolist() == pytest.approx(returns, abs=1e-5)


def test_value_loss_overlong_penalty_and_importance_weights_are_those_of_loops():
    new, old, returns = random_tokens([40])
    for clip in (0.0, 0.2):
        expected = []
        for v, o, r in zip(new, old, returns):
            kept = o + min(max(v - o, -clip), clip) if clip else v
            expected.append(max((v - r) ** 2, (kept - r) ** 2) / 2)
        ours = critic.value_loss(*map(torch.tensor, (new, old, returns)), clip)
        assert ours.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert clip == 0 or expected != [(v - r) ** 2 / 2 for v, r in zip(new, returns)]
    lengths = torch.arange(1, 101).view(4, 25)
    penalty = [0.0 if n + 20 <= 90 else max((90 - 20 - n) / 20, -1.0) for n in range(1, 101)]
    assert train.overlong_penalty(lengths, 90, 20).flatten().tolist() == pytest.approx(penalty)
    ratios = [math.exp(a - b) for a, b in zip(new, old)]
    expected = dict(
        truncate=[min(max(w, 0.6), 1.5) for w in ratios],
        mask=[w if 0.6 <= w <= 1.5 else 0.0 for w in ratios],
    )
    for kind, weights in expected.items():
        ours = train.importance_weights(torch.tensor(new), torch.tensor(old), kind, 0.6, 1.5)
        assert ours.tolist() == pytest.approx(weights, rel=1e-5) and weights != ratios
        exact = train.importance_weights(torch.tensor(new), torch.tensor(new), kind, 0.6, 1.5)
        assert exact.tolist() == [1.0] * 40  # equal bits in, exactly 1 out


def test_pass_at_k_is_the_chance_of_drawing_a_right_sample():
    for n, right in ((1, 0), (1, 1), (5, 2), (6, 0), (6, 6), (7, 3)):
        for k in range(1, n + 1):
            draws = list(combinations([True] * right + [False] * (n - right), k))
            assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize("cut", [[5], [2, 3], [1, 1, 1, 1, 1]])
def test_aggregated_leaves_add_up_to_the_mean_over_the_step(cut):
    counts = [7, 1, 0, 30, 12]
    losses = torch.randn(50, dtype=torch.float64)
    samples = losses.split(counts)
    expected = dict(
        token=losses.sum() / 50,
        sequence=sum(x.mean() for x in samples if len(x)) / 5,
        constant=losses.sum() / (5 * 32),
    )
    for kind in CHOICES["loss_aggregation"].split():
        total, first = 0.0, 0
        for n in cut:
            mine = counts[first : first + n]
            total += train.aggregate(torch.cat(samples[first : first + n]), mine, kind, 5, 50, 32)
            first += n
        assert torch.allclose(total, expected[kind])


def test_learning_rate_warms_up_then_falls_to_its_minimum():
    rates = [train.learning_rate_at(s, 1.0, 10, 100, 0.1) for s in range(120)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and rates[10] == 1.0 and rates[55] == pytest.approx(0.55)
    assert rates[100] == rates[119] == pytest.approx(0.1)
    assert train.learning_rate_at(10**6, 1.0, 0, 0, 0.0) == 1.0


# ---- samples, leaves and steps


FIELDS = ("logprobs", "old_logprobs", "advantages", "reference", "values", "returns")


def random_samples(n, seed=0):
    """n samples with other numbers in every field and gaps in the loss mask."""
    rng, out = random.Random(seed), []
    for i in range(n):
        R = rng.randrange(3, 9)
        response = torch.arange(R)
        s = train.make_sample(torch.zeros(2).long(), response, response % 3 != 1, torch.zeros(R), name=f"{i}")
        M = len(s.loss_at)
        fields = {k: torch.tensor([rng.gauss(0, 0.4) for _ in range(M)], dtype=torch.float64) for k in FIELDS}
        out.append(s._replace(**fields))
    return out


def config_of(**change):
    return types.SimpleNamespace(branch="", **DEFAULTS | dict(importance="", entropy_coef=0.0, kl_coef=0.0) | change)


@pytest.mark.parametrize("kl_in_reward", [False, True])
def test_the_loss_of_a_leaf_is_that_of_a_loop_over_its_terms(kl_in_reward):
    c = config_of(
        importance="truncate", importance_floor=0.7, importance_cap=1.3, entropy_coef=0.3, kl_coef=0.2,
        kl_in_reward=kl_in_reward, value_coef=0.7, value_clip=0.1, clip_low=0.1, clip_high=0.3,
        loss_aggregation="constant", max_new_tokens=50,
    )  # fmt: skip
    torch.manual_seed(0)
    leaf, expected = train.pack(random_samples(6), "cpu"), 0.0
    new, entropy, values = (torch.randn(len(leaf.targets), dtype=torch.float64) * 0.3 for _ in range(3))
    loss, figures = train.policy_step_loss(Output(new, entropy, values=values), leaf, c, 9, 100)
    kls, fields = [], (leaf.logprobs, leaf.old_logprobs, leaf.advantages, leaf.reference, leaf.values, leaf.returns)
    for n, h, v, engine, old, A, reference, old_v, target in zip(
        *(x.tolist() for x in (new, entropy, values, *fields))
    ):
        r = math.exp(n - old)
        weight = min(max(math.exp(old - engine), 0.7), 1.3)
        kls.append(math.exp(reference - n) - 1 + n - reference)
        kept = old_v + min(max(v - old_v, -0.1), 0.1)
        expected += -weight * min(r * A, min(max(r, 0.9), 1.3) * A) - 0.3 * h
        expected += 0.2 * kls[-1] * (not kl_in_reward) + 0.7 * max((v - target) ** 2, (kept - target) ** 2) / 2
    assert float(loss) == pytest.approx(expected / (9 * 50)) and figures["kl_reference"].tolist() == pytest.approx(kls)


def test_costs_are_taken_from_the_reward_of_a_sample_and_a_teacher_is_followed():
    samples, rewards = random_samples(6), torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.0]])
    samples = [s._replace(of=i) for i, s in enumerate(samples)]
    c = config_of(advantage="dr_grpo", kl_coef=0.2, kl_in_reward=True, kl_estimator="k1")
    costs = []
    for s in samples:
        costs.append(0.2 * sum(a - b for a, b in zip(s.logprobs.tolist(), s.reference.tolist())))
    net = [r - cost for r, cost in zip(rewards.flatten().tolist(), costs)]
    expected = [r - mean(net[i // 3 * 3 :][:3]) for i, r in enumerate(net)]
    done = train.with_advantages(samples, rewards, c)
    assert [s.advantages.tolist() for s in done] == [
        pytest.approx([a] * len(s.loss_at), rel=1e-5) for s, a in zip(samples, expected)
    ]
    for s in train.with_advantages(samples, rewards, config_of(advantage="distill")):
        assert s.advantages.tolist() == [a - b for a, b in zip(s.reference.tolist(), s.logprobs.tolist())]


def make_group(prompt, rewards, lengths=(2, 3), truncated=(False, True)):
    """A rollout group of two samples as the files have it."""
    tokens = torch.arange(sum(lengths)) + 10 * prompt
    mask = tokens % 5 != 0
    tensors = dict(
        tokens=tokens, loss_mask=mask, logprobs=-tokens.float(), lengths=torch.tensor(lengths),
        truncated=torch.tensor(truncated), prompt_tokens=torch.tensor([prompt]), rewards=torch.tensor(rewards),
        weight_version=torch.arange(sum(lengths)) // 2, sample=torch.arange(2), turns=torch.ones(2).long(),
        turn=torch.zeros_like(tokens), turn_rewards=torch.tensor(rewards),
    )  # fmt: skip
    return Group(tensors, dict(prompt=prompt, step=5))


@pytest.mark.parametrize("overlong_filter", [False, True])
def test_only_samples_that_were_cut_off_are_filtered(overlong_filter):
    groups = [make_group(3, [0.0, 1.0]), make_group(4, [0.0, 1.0])]
    samples = train.samples_of(groups, 5, overlong_filter)
    assert [s.name for s in samples] == [f"prompt {p}, sample {g}" for p in (3, 4) for g in (0, 1)]
    assert [s.tokens.tolist() for s in samples[:2]] == [[3, 30, 31], [3, 32, 33, 34]]
    assert [s.truncated for s in samples] == [False, True] * 2 and [s.prompt_tokens for s in samples] == [1] * 4
    cut_off = [] if overlong_filter else [1, 2, 3]
    assert [s.loss_at.tolist() for s in samples] == [[2], cut_off, [2], cut_off]
    known = [] if overlong_filter else [-32.0, -33.0, -34.0]
    assert samples[1].logprobs.tolist() == samples[1].old_logprobs.tolist() == known


class Rollouts:
    """In a queue's place: groups of rewards 0 and 1, equal ones for the rows in `equal`. It keeps the jobs."""

    def __init__(self, equal=()):
        self.equal, self.jobs = equal, []

    def sample(self, job):
        self.jobs.append(job)
        return [make_group(i, [0.0, 0.0, float(row not in self.equal)]) for i, row in job.rows.items()]


def test_groups_of_equal_rewards_give_way_to_the_next_rounds_in_the_order_of_prompts():
    c, rows = config_of(dynamic_sampling=2, prompts_per_step=4, group_size=2, temperature=0.7), {"": list(range(24))}
    # an epoch: three rounds for each step
    order = [rewards.rows_of_step(24, 4, k, c.seed, "rl") for k in range(6)]
    equal = {order[3][0], order[3][2], order[4][1], order[4][2], *order[5]}
    queue = Rollouts(equal)
    flight = Flight(3)
    groups, made, after = train.sample_step(queue.sample, 1, rows, c, 7, flight)
    assert after == flight
    numbers = [meta["prompt"] for _, meta in made]
    assert [[*job.rows.values()] for job in queue.jobs] == order[3:5]  # the second round was enough
    assert [[*job.rows] for job in queue.jobs] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert all(job[:3] == ("rl", 1, 7) and job[4:] == (2, (0.7, 1.0, 0, 0.0), 0, {}) for job in queue.jobs)
    assert numbers == [1, 3, 4, 7, 0, 2, 5, 6] and [meta["prompt"] for _, meta in groups] == [1, 3, 4, 7]
    queue = Rollouts(equal | {order[4][0]})
    groups, made, _ = train.sample_step(
        queue.sample, 1, rows, c, 7, flight
    )  # three rounds were not: the first of the others fill up
    assert len(queue.jobs) == 3 and len(made) == 12 and [meta["prompt"] for _, meta in groups] == [1, 3, 7, 0]
    queue = Rollouts(equal)
    groups, made, _ = train.sample_step(queue.sample, 3, rows, config_of(prompts_per_step=4), 7, flight)
    assert [meta["prompt"] for _, meta in groups] == [meta["prompt"] for _, meta in made] == [0, 1, 2, 3]
    assert [[*job.rows.values()] for job in queue.jobs] == [order[3]]  # with one round a step


def test_a_curriculum_draws_most_often_what_was_last_seen_half_right():
    """Rows 0 to 7 are never right, 8 to 15 always, 16 to 23 half of the time; what a step draws tells the next ones."""
    c = config_of(curriculum=15, prompts_per_step=4, group_size=4)
    queue, flight, steps = Rollouts({}), Flight(), 300
    queue.sample = lambda job: [
        make_group(i, [[0.0] * 4, [1.0] * 4, [0.0, 1.0] * 2][row // 8]) for i, row in job.rows.items()
    ]
    drawn = []
    for step in range(steps):
        flight = train.sample_step(queue.sample, step, {"": (rows := list(range(24)))}, c, 7, flight).flight
        drawn.append([place for _, place in rewards.draw_rows({"": rows}, 4, step, c, "rl", flight.seen)])
    assert {row: right for (_, row), right in flight.seen.items()} == {row: [0, 4, 2][row // 8] for row in rows}
    assert all(len({*step}) == 4 for step in drawn)
    counts = collections.Counter(row // 8 for step in drawn[30:] for row in step)
    assert counts[2] > 8 * counts[0] > 0 and counts[2] > 8 * counts[1] > 0  # 16 to 1, but no row twice in a step
    even = config_of(curriculum=0, prompts_per_step=4, group_size=4)
    assert train.sample_step(queue.sample, 0, {"": rows}, even, 7, Flight()).flight.seen == {}


def test_sources_have_their_quota_of_every_step_each_in_its_own_order():
    c = config_of(sources="a={'weight': 3}, b={}, c={'weight': 0}")
    rows = {"a": list(range(10)), "b": list(range(5))}
    steps = [rewards.draw_rows(rows, 8, step, c, "rl") for step in range(10)]
    assert all([name for name, _ in step] == ["a"] * 6 + ["b"] * 2 for step in steps)
    for name, n in (("a", 10), ("b", 5)):
        order = [row for step in steps for source, row in step if source == name]
        assert all(sorted(order[i : i + n]) == list(range(n)) for i in range(0, len(order), n))
    one = config_of()
    alone = [row for _, row in rewards.draw_rows({"": list(range(10))}, 8, 0, one, "rl")]
    assert alone == rewards.rows_of_step(10, 8, 0, one.seed, "rl")


def test_held_out_prompts_have_samples_and_a_temperature_of_their_own():
    c = config_of(eval_samples=2, eval_temperature=0.3, group_size=5, temperature=0.9, pass_reward=1.0)
    queue, seen = Rollouts({8}), []
    record = types.SimpleNamespace(
        hashes=lambda groups: len(groups),
        evaluation=lambda step, scores, n, hashes: seen.append((step, scores["pass@1"], n, hashes)),
    )
    train.evaluate(queue.sample, 6, [7, 8], c, 5, record)
    assert queue.jobs == [("eval", 6, 5, {0: 7, 1: 8}, 2, (0.3, 1.0, 0, 0.0), 0, {})]
    assert seen == [(6, pytest.approx(1 / 6), 2, 2)]


def test_the_order_of_the_data_and_the_first_weights_have_seeds_of_their_own(tmp_path):
    def prompts(**change):
        queue = Rollouts({})
        train.sample_step(queue.sample, 1, {"": list(range(24))}, config_of(prompts_per_step=4, **change), 7, Flight(3))
        return list(queue.jobs[0].rows.values())

    def weights(name, **change):
        train.folders.make_scratch_model(tmp_path / name, train.DEFAULTS | change)
        (path,) = (tmp_path / name).glob("*.safetensors")
        return path.read_bytes()

    assert prompts() == prompts(seeds="noise=7, init=2, eval=3") == prompts(seed=9, seeds="data=1")
    assert prompts() != prompts(seeds="data=2") == prompts(seed=2)
    assert weights("a") == weights("b", seeds="data=2, noise=7, eval=3") == weights("c", seed=9, seeds="init=1")
    assert weights("d", seeds="init=2") == weights("e", seed=2) != (tmp_path / "a" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("sizes", [f"num_hidden_layers={10**12}", f"head_dim={'9' * 4000}, num_hidden_layers=1"])
def test_a_scratch_model_that_no_memory_holds_is_refused_before_anything_is_made(sizes, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        train.folders.make_scratch_model(tmp_path, train.DEFAULTS | dict(scratch_args=sizes))
    line = error_line(capsys.readouterr().err)
    assert end.value.code == 2 and "scratch_args=" in line and "its weights do not fit into this machine" in line
    assert not [*tmp_path.iterdir()]


class Segments:
    """In a queue's place: group n, in the order of the data, takes `draws(n)` segments until it is finished."""

    def __init__(self, draws, per_step):
        self.draws, self.per_step, self.jobs, self.made = draws, per_step, [], []

    def sample(self, job):
        self.jobs.append(job)
        for i in job.rows:
            (step, place), group = job.begun[i]
            n, versions = step * self.per_step + place, [*(group[0]["versions"] if group else ()), job.version]
            meta = dict(born=[step, place], prompt=i, number=n, finished=len(versions) == self.draws(n))
            self.made.append(Group(dict(versions=versions), meta))
        return self.made[-len(job.rows) :]


def test_partial_rollouts_carry_groups_on_in_their_order_and_train_on_the_first_that_are_finished():
    c = config_of(segment_tokens=2, groups_in_flight=5, prompts_per_step=3, group_size=2, max_new_tokens=8)
    rows = [f"row {i}" for i in range(30)]
    # as whole samples are
    order = [rows[i] for s in range(10) for i in rewards.rows_of_step(30, 3, s, c.seed, "rl")]
    queue, flight, trained = Segments(lambda n: [1, 4, 1, 2, 3, 1, 1][n % 7], 3), Flight(), []
    for step in range(6):
        first = len(queue.jobs)
        groups, made, flight = train.sample_step(queue.sample, step, {"": rows}, c, 10 + step, flight)
        jobs = queue.jobs[first:]
        assert len(groups) == 3 and flight.begun == 5 + 3 * step and len(flight.groups) == 2
        assert made == [group for group in queue.made if group[0]["versions"][-1] == 10 + step]
        assert [i // 5 for job in jobs for i in job.rows] == [k for k, job in enumerate(jobs) for _ in job.rows]
        assert all(job.rows[i] == order[3 * s + p] for job in jobs for i, ((s, p), _) in job.begun.items())
        assert all((job.step, job.version, job.tokens) == (step, 10 + step, 2) for job in jobs)
        trained.append([meta["number"] for _, meta in groups])
    # 3 is finished by a second round of step 0; 1 goes on while those behind it are trained on
    assert trained[:3] == [[0, 2, 3], [4, 5, 6], [1, 7, 9]]
    assert [t["versions"] for t, m in queue.made if m["number"] == 1][-1] == [10, 10, 11, 12]
    left = [meta["number"] for _, meta in flight.groups]
    assert sorted(sum(trained, left)) == list(range(20))  # each is begun once, and none is dropped


@pytest.mark.parametrize("most,segment,places,P", [(8, 2, 5, 3), (6, 2, 9, 4), (9, 4, 6, 2), (6, 6, 9, 2)])
def test_no_token_is_older_than_the_versions_that_are_kept_and_the_oldest_is_needed(most, segment, places, P):
    """For any lengths. The worst: the first P groups are short, the others in flight long, all later ones short."""
    sizes = dict(segment_tokens=segment, groups_in_flight=places, prompts_per_step=P, max_new_tokens=most, lag=2)
    c, longest = config_of(**sizes), -(-most // segment)
    assert max_staleness(config_of(lag=3)) == 3 and max_staleness(config_of()) == 0

    def oldest(draws):
        queue, flight, ages = Segments(lambda n: draws[n], P), Flight(), []
        for step in range(20):
            groups, _, flight = train.sample_step(queue.sample, step, {"": ["row"] * 7}, c, step - 2, flight)
            ages += [step - t["versions"][0] for t, _ in groups]
        return max(ages)

    assert oldest([1] * P + [longest] * (places - P) + [1] * 40 * P) == max_staleness(c)
    for seed in range(50):
        rng = random.Random(seed)
        assert oldest([rng.randrange(1, longest + 1) for _ in range(40 * P)]) <= max_staleness(c)


def test_a_sample_is_checked_version_by_version_up_to_its_last_token_of_that_version():
    sample = train.samples_of([make_group(3, [0.0, 1.0], lengths=(2, 7))], step=5)[1]
    assert sample.name == "prompt 3, sample 1" and sample.staleness.tolist() == [4, 4, 3, 2, 2, 1]
    assert train.samples_of([make_group(3, [0.0, 1.0])], step=6)[0].name == "prompt 3 of step 5, sample 0"
    assert sample.tokens.tolist() == [3, 32, 33, 34, 35, 36, 37, 38]
    assert sample.loss_at.tolist() == [1, 2, 3, 5, 6, 7]
    cut = of_age(sample, 3)
    assert cut.tokens.tolist() == [3, 32, 33, 34] and cut.loss_at.tolist() == [3]
    assert cut.logprobs.tolist() == [-34] and cut.prompt_tokens == 1 and len(cut.returns) == len(cut.turn) == 1
    assert of_age(sample, 1).loss_at.tolist() == [7]
    assert of_age(sample, 5) is None


def test_decoupled_ppo_weighs_by_the_last_version_over_the_behaviour_and_clips_against_the_last_version():
    leaf = train.pack(random_samples(6), "cpu")
    leaf = leaf._replace(staleness=torch.arange(len(leaf.targets)) % 3)
    new = leaf.old_logprobs + 0.3 * torch.randn(len(leaf.targets), dtype=torch.float64)
    c = config_of(importance="full", loss_aggregation="token", clip_low=0.1, clip_high=0.2, lag=2)
    loss, figures = train.policy_step_loss(Output(new, new * 0), leaf, c, 6, 50)
    expected, ratios = 0.0, []
    fields = (new, leaf.logprobs, leaf.old_logprobs, leaf.advantages)
    for n, engine, old, A in zip(*(x.tolist() for x in fields)):
        ratio = math.exp(n - old)
        expected -= math.exp(old - engine) * min(ratio * A, min(max(ratio, 0.9), 1.2) * A)
        ratios.append(math.exp(n - engine))
    assert float(loss) == pytest.approx(expected / 50)
    (observer,) = off_policy_of(c)
    observer.before([], "rl", check=True)
    assert observer.note(loss, [0], leaf, Output(new, new * 0), figures) is loss
    assert figures["ratio_mean"].tolist() == pytest.approx(ratios)
    assert figures["ratio_square"].tolist() == pytest.approx([r * r for r in ratios])
    assert figures["kl_behaviour"].tolist() == pytest.approx([r - 1 - math.log(r) for r in ratios])
    assert figures["staleness"] is leaf.staleness
    same = leaf._replace(old_logprobs=leaf.logprobs)
    output = Output(new, new * 0)
    losses = [train.policy_step_loss(output, same, config_of(importance=x), 6, 50)[0] for x in ("", "full")]
    assert torch.equal(*losses)  # without a lag it is PPO


def test_supervised_samples_learn_the_whole_answer_and_nothing_of_the_prompt():
    c, rows = config_of(sft_batch=4), [dict(prompt_tokens=[i, i], answer_tokens=[50, i, 1]) for i in range(20)]
    chosen = rewards.rows_of_step(20, 4, 2, c.seed, "sft")
    samples = supervised_samples([rows[i] for i in chosen], c, train.make_sample)
    assert [int(s.tokens[0]) for s in samples] == chosen
    for s in samples:
        i = int(s.tokens[0])
        assert s.tokens.tolist() == [i, i, 50, i, 1] and s.prompt_tokens == 2 and s.loss_at.tolist() == [2, 3, 4]


def test_what_comes_every_so_many_steps_comes_after_the_last_one_too():
    assert [s for s in range(1, 11) if train.due(s, 4, 10)] == [4, 8, 10]
    assert [s for s in range(1, 11) if train.due(s, 0, 10)] == [10]


# ---- presets

SIZES = {  # the published config.json of the models, without their weights
    "qwen3_0p6b": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16),
    "qwen3_8b": dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32),
}
SIZES |= dict.fromkeys(("qwen3_8b_lag", "qwen3_8b_colocated"), SIZES["qwen3_8b"])
SIZES["qwen3_32b"] = dict(hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64)
SIZES["qwen3_30b_a3b"] = dict(
    hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, num_experts=128,
    num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
)  # fmt: skip
SIZES["llama_70b_lora"] = dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64)


@pytest.mark.parametrize(
    "name,world,parameters",
    [
        ("qwen3_0p6b", 1, 0.596e9),
        ("qwen3_8b", 8, 8.19e9),
        ("qwen3_8b_lag", 8, 8.19e9),
        ("qwen3_8b_colocated", 8, 8.19e9),
        ("qwen3_32b", 16, 32.76e9),
        ("qwen3_30b_a3b", 8, 30.53e9),
        ("llama_70b_lora", 8, 70.55e9),
    ],
)
def test_a_preset_builds_up_to_the_weights(tmp_path, mesh, name, world, parameters):
    from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

    config = configure(dict(DEFAULTS, __file__=str(ROOT / "train_grpo.py")), [str(ROOT / f"config/{name}.py")])
    check_config(config, world, DEFAULTS)
    kinds = dict(llama_70b_lora=LlamaConfig, qwen3_30b_a3b=Qwen3MoeConfig)
    shape = dict(
        vocab_size=128256 if name == "llama_70b_lora" else 151936, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=40960, tie_word_embeddings=name == "qwen3_0p6b",
    )  # fmt: skip
    hf = kinds.get(name, Qwen3Config)(**shape | SIZES[name])
    hf.save_pretrained(tmp_path)
    hf = check_model(tmp_path, config)
    model = train.build_model(hf, mesh, "meta", True)
    shapes = [(s.name, s.shape) for s in train.sync.shards(model, mesh)]
    assert sum(math.prod(s) for _, s in shapes) == pytest.approx(parameters, rel=0.01)
    buckets = train.sync.buckets(shapes, torch.bfloat16)
    assert [n for b in buckets for n, _ in b] == [n for n, _ in model.named_parameters()]
    sizes = [sum(math.prod(s) * 2 for _, s in b) for b in buckets]
    assert all(size <= 1 << 30 or len(b) == 1 for size, b in zip(sizes, buckets))


@pytest.mark.parametrize("name", "tiny tiny_lora small one_gpu stage_sft stage_rm stage_dpo stage_ppo".split())
def test_a_small_preset_is_valid(name):
    config = configure(dict(DEFAULTS, __file__=str(ROOT / "train_grpo.py")), [str(ROOT / f"config/{name}.py")])
    for world in (1, 2, 3)[: 2 + MODES[config["mode"]].samples]:  # three trainers cannot share four lanes
        check_config(config, world, DEFAULTS)


# ---- what is refused


def test_models_we_cannot_train_and_serve_alike_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    from transformers import GPT2Config, Qwen2Config

    def refusal(hf, **change):
        if hf:
            hf.save_pretrained(tmp_path)
        with pytest.raises(SystemExit) as e:
            check_model(tmp_path, DEFAULTS | change)
        assert e.value.code == 2
        return capsys.readouterr().err

    (tmp_path / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}')
    line = (
        f"init_from={str(tmp_path)!r}: adapters of BASE; make one model of both (tools/merge.py BASE {tmp_path} out/mer"
    )
    assert line in (said := refusal(None)) and f" --init_from=BASE --lora_rank=8 --lora={tmp_path}\n" in said
    assert "a gpt2 model; known are qwen3, qwen2, llama" in refusal(GPT2Config())
    assert "sliding-window" in refusal(Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=1))
    assert "the model has 64 positions" in refusal(Qwen2Config(max_position_embeddings=64))
    heads = dict(hidden_size=96, num_attention_heads=6, num_key_value_heads=3, intermediate_size=40)
    for change, message in (
        (dict(tp_split=64), "tp_split=64: does not divide attention's width, 96, of init_from="),
        (dict(tp_split=16), "tp_split=16: does not divide the MLP's width, 40, of init_from="),
        (dict(tp_split=4, rollout_tp=4), "rollout_tp=4: does not divide its number of heads, 6, of init_from="),
        (dict(tp_split=2, rollout_tp=2), "rollout_tp=2: does not divide its number of key heads, 3, of init_from="),
    ):
        assert message in refusal(Qwen2Config(**heads), **change)


def test_a_model_without_a_tokenizer_or_with_a_broken_one_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    from transformers import LlamaConfig, Qwen2Config

    for hf, content in ((LlamaConfig(), ""), (Qwen2Config(), ""), (Qwen2Config(), "{"), (LlamaConfig(), "[]")):
        hf.save_pretrained(tmp_path)
        if content:
            (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(SystemExit) as e:
            train.folders.load_tokenizer(tmp_path)
        line = capsys.readouterr().err.splitlines()[-1]
        assert e.value.code == 2 and line.startswith(f"error: init_from={str(tmp_path)!r}: no usable tokenizer: ")
