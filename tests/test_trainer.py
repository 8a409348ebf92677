"""
A batch cut into leaves, and what the trainer makes of them: the same sums on any number of ranks, in bounded memory.

    pytest tests/test_trainer.py
"""

import gc
import math
import random
import types

import pytest
import torch
from conftest import float64_model
from pytest import approx
from test_train import side_by_side

import kernels
import train_grpo as train
from onecurve.algorithms.supervised import ANSWERS, supervised_samples
from onecurve.models.dense import check_model
from onecurve.models.folders import make_scratch_model
from onecurve.run.machine import least_memory
from onecurve.run.save import save_trainer
from rollout_server import Flight
from sync import LeafSum, Ranks

DEFAULTS = train.DEFAULTS | dict(
    scratch_args="num_hidden_layers=1, hidden_size=64, intermediate_size=128", lanes=4, leaf_tokens=40
)


@pytest.fixture
def ranks(mesh):
    """A world of one trainer, whose matmuls are ours."""
    kernels.enable_batch_invariant()
    yield Ranks(0, 1, 1, 0, mesh, None)
    kernels.disable_batch_invariant()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_scratch_model(folder, DEFAULTS)
    return folder


def make_trainer(ranks, folder, **change):
    c = types.SimpleNamespace(**DEFAULTS | change)
    return train.Trainer(c, ranks, check_model(folder, vars(c)), folder, "cpu")


def with_advantage(sample, advantage):
    return sample._replace(advantages=torch.full(sample.logprobs.shape, advantage))


def make_samples(n):
    """n samples of random tokens, 3 to 30 each, every third cut off; their log-probs and advantages are random too."""
    rng = random.Random(0)
    samples = []
    for i in range(n):
        prompt = rng.randrange(1, 15)
        response = rng.randrange(2, 16)
        tokens = torch.tensor([rng.randrange(98) for _ in range(prompt + response)])
        old = torch.tensor([rng.gauss(-4, 1) for _ in range(response)])
        mask = torch.arange(response) >= response // 3
        known = dict(name=f"prompt {i}, sample 0", truncated=i % 3 == 0, of=i)
        s = train.make_sample(tokens[:prompt], tokens[prompt:], mask, old, **known)
        samples.append(with_advantage(s, rng.gauss(0, 1)))
    return samples


def make_pairs(n):
    """2n samples of random tokens, a pair's with one prompt; 3 to 30 tokens each."""
    rng = random.Random(0)

    def tokens(least, most):
        return [rng.randrange(2, 98) for _ in range(rng.randrange(least, most))]

    rows = []
    for _ in range(n):
        row = dict(
            prompt_tokens=tokens(1, 15),
            chosen_tokens=tokens(2, 16),
            rejected_tokens=tokens(2, 16),
        )
        rows.append(row)
    return supervised_samples(rows, types.SimpleNamespace(mode="dpo"), train.make_sample)


def with_own_logprobs(trainer, samples):
    """The samples as an engine that agrees would have made them."""
    c = trainer.c
    trainer.c = types.SimpleNamespace(**vars(c) | dict(importance="mask"))
    samples = trainer.forward_only(samples)
    trainer.c = c
    return [s._replace(logprobs=s.old_logprobs) for s in samples]


def weights_of(trainer):
    return [s.data.clone() for s in trainer.shards]


def first_index(sample):
    """The index of a sample's first loss token in its response."""
    return int(sample.loss_at[0]) - sample.prompt_tokens


def assert_gradients_are(plain, trainer, grads):
    """Those that a model of transformers has in float64."""
    for shard, grad in zip(trainer.shards, grads, strict=True):
        expected = plain.get_parameter(shard.name).grad
        assert expected.abs().max() > 1e-4
        assert torch.allclose(grad.double(), expected, atol=1e-6, rtol=1e-3), shard.name


def tokens_of(samples):
    """The number of their loss tokens."""
    return sum(len(s.loss_at) for s in samples)


def same_bits(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def equal(some, others):
    """Which tensors are equal, pair by pair."""
    pairs = zip(some, others, strict=True)
    return [torch.equal(a, b) for a, b in pairs]


def close(some, others):
    """Which gradients are equal up to the order of their sums."""
    pairs = zip(some, others, strict=True)
    return [torch.allclose(a, b, atol=1e-6, rtol=1e-3) for a, b in pairs]


# ---- leaves


def test_leaves_hold_every_sample_once_within_their_bound_and_are_even():
    rng = random.Random(0)
    for _ in range(100):
        lengths = []
        for _ in range(rng.randrange(1, 120)):
            longest = rng.choice((20, 200, 2000))
            lengths.append(rng.randrange(1, longest))
        bound = rng.choice((30, 256, 4096))
        lanes = rng.choice((1, 2, 4, 8))
        leaves = train.plan_leaves(lengths, bound, lanes)
        assert sorted(sum(leaves, [])) == list(range(len(lengths)))
        loads = [sum(lengths[i] for i in leaf) for leaf in leaves]
        for load, leaf in zip(loads, leaves):
            assert load <= bound or len(leaf) == 1
        rows = [loads[i : i + lanes] for i in range(0, len(loads), lanes)]
        for row in rows:
            assert len(row) == lanes
            assert 0 < max(row) <= min(row) + max(lengths)
        # not many more rows than any cut would need
        alone = sum(length * 2 > bound for length in lengths)
        fits = sum(lengths) / bound + alone
        assert len(rows) <= 2 * math.ceil(fits / lanes) + 1


def test_leaves_follow_from_the_lengths_and_not_from_their_order():
    def cut(lengths, lanes=4):
        leaves = train.plan_leaves(lengths, 100, lanes)
        return [sorted(lengths[i] for i in leaf) for leaf in leaves]

    rng = random.Random(1)
    lengths = [rng.randrange(1, 50) for _ in range(60)]
    leaves = train.plan_leaves(lengths, 100, 4)
    assert train.plan_leaves(lengths, 100, 4) == leaves
    for leaf in leaves:
        assert leaf == sorted(leaf)
    shuffled = rng.sample(lengths, len(lengths))
    assert cut(lengths) == cut(shuffled) != cut(lengths, lanes=32)
    assert [0] in train.plan_leaves([500, 3, 4], 100, 4)  # longer than a leaf: alone
    assert train.plan_leaves([5, 5], 100, 4) == [[0], [1], [], []]


def test_a_packed_leaf_picks_the_masked_tokens_and_their_predecessors():
    samples = make_samples(5)
    leaf = train.pack(samples, "cpu")
    picked = []
    ids = []
    positions = []
    for s in samples:
        for at, logprob in side_by_side(s.loss_at, s.logprobs):
            picked.append((len(ids) + at - 1, int(s.tokens[at]), logprob))
        ids += s.tokens.tolist()
        positions += range(len(s.tokens))
    assert list(side_by_side(leaf.predictors, leaf.targets, leaf.logprobs)) == picked
    assert leaf.ids.tolist() == ids
    assert leaf.positions.tolist() == positions


def groups_of_samples():
    """Four prompts, some of which begin alike, with 6 samples each of few tokens, and one that is there twice."""
    rng = random.Random(3)
    samples = []
    for g, n in enumerate((3, 7, 7, 20)):
        prompt = torch.tensor([5, 6, g // 2, *range(n)])
        for i in range(6):
            response = torch.tensor([rng.randrange(3) for _ in range(1 + i)])
            everywhere = torch.ones(1 + i).bool()
            s = train.make_sample(prompt, response, everywhere, torch.randn(1 + i), of=len(samples))
            samples.append(with_advantage(s, rng.gauss(0, 1)))
    return samples + samples[-1:]


@pytest.mark.parametrize("more", ["", ", num_experts=4"])
def test_a_beginning_alike_is_computed_once_to_the_same_logprobs(ranks, tmp_path, more):
    torch.manual_seed(0)
    model = {"scratch_args": DEFAULTS["scratch_args"] + more}
    make_scratch_model(tmp_path, DEFAULTS | model)
    samples = groups_of_samples()
    sizes = dict(model, lanes=1, leaf_tokens=4096, router_aux_loss_coef=0.1 * bool(more))
    plain = make_trainer(ranks, tmp_path, **sizes, share_prefixes=False)
    sharing = make_trainer(ranks, tmp_path, **sizes, share_prefixes=True)
    assert not [*sharing.passes([], sharing.model)]  # as a loss's own passes may be, in a step without a right sample

    @torch.no_grad()
    def computed(leaf):
        return sharing.model.token_logprobs(leaf)[0]

    leaf = train.pack(samples, "cpu", shared=True)
    plan = leaf.plan
    prefixes = []
    for s in samples:
        tokens = s.tokens.tolist()
        prefixes += [tuple(tokens[: i + 1]) for i in range(len(tokens))]
    assert len(plan.first) == len({*prefixes}) < len(prefixes) / 2
    assert [prefixes[i] for i in plan.first[plan.row]] == prefixes
    whole = computed(train.pack(samples, "cpu"))
    assert same_bits(computed(leaf), whole)
    before, figures = plain.gradients(samples)
    grads, again = sharing.gradients(samples)
    for a, b in zip(grads, before, strict=True):
        assert (a - b).abs().max() < 2e-5 * b.abs().max()
        assert b.any()
    assert not all(equal(grads, before))  # in another order
    assert figures == approx(again, rel=1e-5)
    # control: another response's row
    plan.row[-2] = plan.row[-4]
    assert not torch.equal(computed(leaf), whole)


def test_samples_of_a_prompt_are_in_one_leaf_while_leaves_are_even(ranks, scratch):
    samples = [s for s in groups_of_samples()[:-1] for _ in range(2)]  # four prompts, 12 samples each

    def passes(**sizes):
        trainer = make_trainer(ranks, scratch, share_prefixes=True, group_size=12, **sizes)
        return [*trainer.passes(samples, trainer.model)]

    for lanes, most in ((1, 12), (2, 12), (8, 3)):
        leaves = [chosen for chosen, *_ in passes(lanes=lanes, leaf_tokens=4096)]
        assert sorted(sum(leaves, [])) == list(range(48))
        assert len(leaves) == lanes
        for leaf in leaves:
            for i in range(0, len(leaf), most):
                first = leaf[i]
                assert leaf[i : i + most] == [*range(first, first + most)]
    small = passes(lanes=2, leaf_tokens=60)
    loads = [len(leaf.ids) for _, leaf, _ in small]
    assert max(loads) <= 60
    assert sum(loads) == sum(len(s.tokens) for s in samples)


def test_all_leaves_without_gradients_are_begun_before_the_host_waits_for_one(ranks, scratch, monkeypatch):
    trainer = make_trainer(ranks, scratch, lanes=4)
    order = []

    def noted(name, function):
        return lambda *args: order.append(name) or function(*args)

    monkeypatch.setattr(train, "split_kept", noted("read", train.split_kept))
    model = types.SimpleNamespace(token_logprobs=noted("begun", trainer.model.token_logprobs))
    assert len(trainer.outputs(groups_of_samples(), model)) == 25
    leaves = len(order) // 2
    assert leaves >= 4 and order == ["begun"] * leaves + ["read"] * leaves


@pytest.mark.parametrize("lanes", [1, 8])
def test_the_memory_of_an_update_does_not_grow_with_the_batch(ranks, scratch, lanes, monkeypatch):
    """
    Bytes of all tensors that are alive when leaves join the sum, over what was there before the step: at most the
    accumulator and log2(lanes) gradients, since autograd adds two leaves.
    """
    trainer = make_trainer(ranks, scratch, lanes=lanes)
    gradient = sum(4 * s.data.numel() for s in trainer.shards)
    add = LeafSum.add
    seen = []

    def alive():
        sizes = {}
        for x in gc.get_objects():
            if type(x) in (torch.Tensor, torch.nn.Parameter):  # no DTensor
                storage = x.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
        return sum(sizes.values())

    def counted(self, grads, leaves):
        seen.append(alive())
        add(self, grads, leaves)

    monkeypatch.setattr(LeafSum, "add", counted)
    most = {}
    for rows in (1, 6):
        trainer.gradients(make_samples(2))  # FSDP makes its buffers in the first pass
        gc.collect()
        before = alive()
        seen.clear()
        trainer.gradients(make_samples(2 * rows * lanes))
        assert len(seen) == 1 if lanes == 1 else len(seen) > 2 * rows
        most[rows] = (max(seen) - before) / gradient
    held = math.log2(lanes)
    assert held - 0.5 < most[1] < held + 1.5
    assert held + 0.5 < most[6] < held + 1.5  # and some activations
    size = gradient / 4
    monkeypatch.setattr(kernels, "compute_dtype", lambda _: torch.float32)  # else with copies in bfloat16
    refused = least_memory(size, size, vars(trainer.c), 1)["train"] / gradient
    assert abs(max(1, most[1]) - (refused - 3)) < 0.5  # beside weights and two moments


# ---- the model and its update


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_logprobs_and_gradients_are_those_of_plain_transformers(mesh, scratch, batch_invariant):
    """Right, and not only equal to the engine's: against float64, through leaves, the sum and our operators."""
    if batch_invariant:
        kernels.enable_batch_invariant()
    try:
        change = dict(temperature=0.7, batch_invariant=batch_invariant, importance="mask", loss="pg")
        trainer = make_trainer(Ranks(0, 1, 1, 0, mesh, None), scratch, **change)
        samples = make_samples(9)
        ours = [s.old_logprobs for s in trainer.forward_only(samples)]
        trainer.c.importance = ""
        grads, metrics = trainer.gradients(samples)
    finally:
        kernels.disable_batch_invariant()
    plain = float64_model(scratch)
    objective = entropy = 0.0
    tokens = tokens_of(samples)
    for s, x in zip(samples, ours):
        logits = plain(s.tokens[None]).logits[0] / 0.7
        every = torch.log_softmax(logits, -1)[s.loss_at - 1]
        logp = every.gather(1, s.tokens[s.loss_at, None])[:, 0]
        assert torch.allclose(x.double(), logp, atol=1e-5, rtol=0)
        entropy -= float((every.exp() * every).sum().detach())
        objective = objective + (logp * s.advantages).sum()
    loss = -objective / tokens
    loss.backward()
    assert metrics["loss"] == approx(float(loss.detach()), abs=1e-5)
    assert metrics["entropy"] == approx(entropy / tokens, rel=1e-5)
    assert_gradients_are(plain, trainer, grads)


def test_a_critic_learns_the_returns_and_starts_at_zero(ranks, scratch):
    change = dict(advantage="gae", value_coef=1.0, value_clip=0.0, grad_clip=0.0, loss="pg")
    trainer = make_trainer(ranks, scratch, **change)
    samples = [with_advantage(s, 0.0)._replace(returns=s.logprobs) for s in make_samples(6)]
    losses = []
    for step in range(40):
        metrics, _ = trainer.update(samples, step, 1e-2)
        losses.append(metrics["value_loss"])
    returns = torch.cat([s.returns for s in samples])
    assert losses[0] == approx(float(returns.square().mean() / 2))
    assert losses[-1] < 0.3 * losses[0]


def test_neighbours_in_a_leaf_and_the_cut_into_leaves_change_no_logprob(ranks, scratch):
    """Log-probs bit for bit; the gradient up to the order of its sums, which the cut is there to set."""
    trainer = make_trainer(ranks, scratch)
    samples = with_own_logprobs(trainer, make_samples(20))
    for s in samples:
        assert s.logprobs.any()
        assert s.logprobs.min() < -1

    def run(**change):
        trainer.c = types.SimpleNamespace(**DEFAULTS | change)
        grads, metrics = trainer.gradients(samples, check=True)
        assert trainer.mismatches() == []
        return [g.clone() for g in grads], metrics

    cuts = dict(leaf_tokens=1), dict(leaf_tokens=10_000), dict(leaf_tokens=100, lanes=1)
    for kind in ("token", "sequence", "constant"):
        grads, metrics = run(loss_aggregation=kind)
        assert max(g.abs().max() for g in grads) > 1e-3
        assert metrics["entropy"] > 1
        for cut in cuts:
            others, again = run(loss_aggregation=kind, **cut)
            assert all(close(others, grads))
            assert not all(equal(others, grads))  # it is another cut
            assert again["loss"] == approx(metrics["loss"])
    other, _ = run(loss_aggregation="token")
    assert not all(close(other, grads))


def test_the_first_logprob_that_differs_is_named_and_stops_a_strict_run(ranks, scratch, refusal):
    trainer = make_trainer(ranks, scratch)
    samples = with_own_logprobs(trainer, make_samples(20))
    for i in range(9, 20):  # whatever leaves they are in
        logprobs = samples[i].logprobs.clone()
        where = [0, -1] if i == 9 else [-1]
        logprobs[where] = torch.nextafter(logprobs[where], torch.tensor(0.0))
        samples[i] = samples[i]._replace(logprobs=logprobs, name=f"prompt {90 - i}, sample 2")
    before = weights_of(trainer)
    step = dict(step=5, lr=0.1, check=True)
    line = refusal(trainer.update, samples, **step)
    assert line.startswith(f"error: step 5, prompt 81, sample 2, token {first_index(samples[9])}: engine ")
    assert line.count("0x") == 2
    assert line.endswith(f"; 12 of {tokens_of(samples)} log-probs differ; --strict=False goes on")
    assert all(equal(weights_of(trainer), before))
    trainer.c.strict = False
    # the largest distance, of either sign, is no sum over a leaf nor over leaves
    shifts = (9, 0, 0.5), (9, -1, -0.25), (17, -1, 0.375)
    for i, where, shift in shifts:
        logprobs = samples[i].logprobs.clone()
        logprobs[where] += shift
        samples[i] = samples[i]._replace(logprobs=logprobs)
    metrics, _ = trainer.update(samples, **step)
    assert metrics["logprob_mismatch_tokens"] == 12
    assert metrics["logprob_mismatch_max"] == approx(0.5, rel=1e-5)
    assert not any(equal(weights_of(trainer), before))


def test_tokens_of_older_weights_are_checked_against_these_and_named(ranks, scratch, refusal):
    """
    Each of three versions has sampled a third of every sample's tokens. What is named: tokens that differ, and those
    whose weights are not kept.
    """
    trainer = make_trainer(ranks, scratch, lag=2)
    samples = make_samples(9)
    logprobs = []
    for version in range(3):
        trainer.past.keep(version)
        logprobs.append([s.logprobs for s in with_own_logprobs(trainer, samples)])
        if version < 2:
            trainer.update(samples, version, 1e-2)
    weights = [w.clone() for w in trainer.weights]
    mixed = []
    for s, *known in zip(samples, *logprobs, strict=True):
        n = len(s.loss_at)
        versions = torch.arange(n) * 3 // n
        drawn = torch.stack(known)[versions, torch.arange(n)]
        assert not any(equal(known[:2], known[1:]))
        mixed.append(s._replace(logprobs=drawn, staleness=2 - versions))
    trainer.past.check(mixed, step=2)
    assert trainer.mismatches() == []
    assert all(equal(weights, trainer.weights))
    metrics, _ = trainer.update(mixed, step=2, lr=0.0, check=True)
    assert metrics["logprob_mismatch_tokens"] == 0
    assert metrics["ratio_variance"] > 1e-6
    assert metrics["staleness"] > 0
    # as weights that came too early: the tokens of the first version are said to be of the second
    early = [s._replace(staleness=s.staleness.clamp(max=1)) for s in mixed]
    trainer.past.check(early, step=2)
    line = refusal(trainer.update, early, step=2, lr=0.1, check=True)
    first = f"prompt 0, sample 0, token {first_index(mixed[0])}"
    assert line.startswith(f"error: step 2, {first}: engine ")
    assert f" of {tokens_of(samples)} log-probs" in line
    trainer.past.keep(3)
    lost = [s._replace(staleness=s.staleness + 1) for s in mixed]
    why = "sampled with weights 0; the oldest that are kept are 1"
    assert refusal(trainer.past.check, lost, step=3) == f"error: step 3, {first}: {why}"


def test_a_loss_or_a_norm_that_is_not_finite_changes_no_weight(ranks, scratch, refusal):
    trainer = make_trainer(ranks, scratch)
    before = weights_of(trainer)
    where = "error: rl step 3: the loss is"
    kept = "the weights are as they were"
    samples = [s._replace(advantages=s.advantages * math.inf) for s in make_samples(4)]
    line = refusal(trainer.update, samples, step=3, lr=0.1)
    assert line == f"{where} inf, the gradient norm nan; {kept}"
    infinite = [torch.full_like(w, math.inf) for w in before]
    line = refusal(trainer.apply, infinite, 0.1, "rl step 3")
    assert line == f"{where} 0.0, the gradient norm inf; {kept}"
    assert all(equal(weights_of(trainer), before))


def test_only_what_comes_after_a_sample_cut_off_is_worth_something(ranks, scratch):
    trainer = make_trainer(ranks, scratch, advantage="gae")
    seeded = torch.Generator().manual_seed(0)
    trainer.model.value_head.detach().normal_(generator=seeded)
    samples = trainer.forward_only(make_samples(12))
    for i, s in enumerate(samples):
        assert s.truncated == (i % 3 == 0) == (s.bootstrap != 0)
        assert s.values.all()
        assert len(s.values) == len(s.loss_at)
        assert torch.equal(s.old_logprobs, s.logprobs)  # the engine's, unless importance weights want the trainer's
    (cut,) = trainer.forward_only([samples[0]])
    assert cut.bootstrap == samples[0].bootstrap  # alone as in the batch


def test_a_row_with_empty_leaves_is_the_same_update(ranks, scratch):
    """One sample fills one lane of four, and one of one."""
    four, _ = make_trainer(ranks, scratch, lanes=4).gradients(make_samples(1))
    one, _ = make_trainer(ranks, scratch, lanes=1).gradients(make_samples(1))
    assert max(g.abs().max() for g in four) > 1e-3
    assert all(equal(four, one))


def test_the_reference_is_another_model_at_the_same_temperature(ranks, scratch, tmp_path):
    """Its log-probs are, bit for bit, those of a trainer that has it as its own model."""
    make_scratch_model(tmp_path, DEFAULTS | dict(seed=2))
    change = dict(temperature=0.7, importance="mask")
    samples = make_samples(6)
    trainer = make_trainer(ranks, scratch, kl_coef=0.1, reference=str(tmp_path), **change)
    ours = trainer.forward_only(samples)
    theirs = make_trainer(ranks, tmp_path, **change).forward_only(samples)
    references = [s.reference for s in ours]
    assert all(equal(references, [s.old_logprobs for s in theirs]))
    assert not any(equal(references, [s.old_logprobs for s in ours]))


def test_a_supervised_step_has_no_temperature_and_tokens_count_alike(ranks, scratch):
    trainer = make_trainer(ranks, scratch, importance="mask", temperature=1.0)
    samples = trainer.forward_only(make_samples(8))
    plain, metrics = trainer.gradients(samples, ANSWERS)
    logprobs = torch.cat([s.old_logprobs for s in samples]).double()
    assert metrics["loss"] == approx(-float(logprobs.mean()), rel=1e-6)
    trainer.sampling = kernels.Sampling(0.7)
    again, _ = trainer.gradients(samples, ANSWERS)
    assert all(equal(again, plain))


@pytest.mark.parametrize("grad_clip", [0.0, 0.5, 1e9])
def test_an_update_is_adamws_with_the_clipped_gradient_and_is_hashed(ranks, scratch, grad_clip):
    """Against float64. Two steps, since the first does not depend on the betas; norms' weights do not decay."""
    change = dict(grad_clip=grad_clip, weight_decay=0.1, beta1=0.8, beta2=0.95, learning_rate=1.0)
    trainer = make_trainer(ranks, scratch, **change)
    draws = torch.Generator().manual_seed(0)
    w = [s.data.double() for s in trainer.shards]
    m = [torch.zeros_like(x) for x in w]
    v = [torch.zeros_like(x) for x in w]
    for t, lr in ((1, 1e-3), (2, 2e-3)):
        grads = [torch.randn(x.shape, generator=draws) * 0.1 for x in w]
        g = [x.double() for x in grads]
        exact = math.sqrt(sum(float(x.square().sum()) for x in g))
        norm, hashes = trainer.apply(grads, lr, "here")
        assert norm == approx(exact, rel=1e-9)
        assert 1 < norm < 1e9
        for i, shard in enumerate(trainer.shards):
            x = g[i] * (0.5 / exact) if grad_clip == 0.5 else g[i]
            m[i] = 0.8 * m[i] + 0.2 * x
            v[i] = 0.95 * v[i] + 0.05 * x * x
            mean = m[i] / (1 - 0.8**t)
            square = v[i] / (1 - 0.95**t)
            if x.dim() > 1:
                w[i] = w[i] * (1 - lr * 0.1)
            w[i] = w[i] - lr * mean / (square.sqrt() + 1e-8)
            assert torch.allclose(grads[i].double(), x, rtol=1e-6, atol=1e-12)
            assert torch.allclose(shard.data.double(), w[i], rtol=1e-6, atol=1e-7), shard.name
        states = [trainer.optimizer.state[p] for p in trainer.weights]
        moments = [[state[k] for state in states] for k in train.MOMENTS]
        used = {"gradients": [grads], "weights": [trainer.weights], "optimizer": moments}
        for stage, columns in used.items():
            each = [train.sync.tensor_hashes(tensors, trainer.shards, None) for tensors in columns]
            joined = {name: "".join(h[name] for h in each) for name in each[0]}
            assert hashes[stage] == joined


def test_an_optimizer_whose_state_no_checkpoint_has_ends_in_one_line(ranks, scratch, tmp_path, monkeypatch, refusal):
    """SGD's momentum was in no checkpoint, and a resume parted without a word."""

    def sgd(groups, betas):
        return torch.optim.SGD(groups, momentum=betas[0])

    monkeypatch.setattr(kernels, "AdamW", sgd)
    trainer = make_trainer(ranks, scratch)
    for w in trainer.weights:
        w.grad = torch.ones_like(w)
    trainer.optimizer.step()
    said = refusal(save_trainer, trainer, tmp_path, None, [], None, 1, Flight())
    assert "the optimizer has exp_avg, exp_avg_sq, momentum_buffer; name in MOMENTS" in said
    assert not [*tmp_path.iterdir()]


def test_the_advantages_of_all_samples_are_hashed(ranks, scratch):
    trainer = make_trainer(ranks, scratch)

    def hash_of(samples):
        _, hashes = trainer.update(samples, 0, 0.0)
        return hashes["advantages"]

    samples = make_samples(3)
    seen = {hash_of(samples)}
    for i, s in enumerate(samples):
        changed = list(samples)
        advantages = s.advantages.clone()
        advantages[-1] += 1
        changed[i] = s._replace(advantages=advantages)
        seen.add(hash_of(changed))
    assert len(seen) == 4
