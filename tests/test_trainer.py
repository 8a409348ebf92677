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

import kernels
import train_grpo as train
from onecurve.algorithms.supervised import ANSWERS
from onecurve.models.dense import check_model
from onecurve.models.folders import make_scratch_model
from onecurve.run.machine import least_memory
from onecurve.run.save import save_trainer
from rollout_server import Flight
from sync import LeafSum, Ranks, tree_sum

DEFAULTS = train.DEFAULTS | dict(
    scratch_args="num_hidden_layers=1, hidden_size=64, intermediate_size=128", lanes=4, leaf_tokens=40
)


@pytest.fixture
def ranks(mesh):
    """A world of one trainer, whose matmuls are ours."""
    train.kernels.enable_batch_invariant()
    yield Ranks(0, 1, 1, 0, mesh, None)
    train.kernels.disable_batch_invariant()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_scratch_model(folder, DEFAULTS)
    return folder


def make_trainer(ranks, folder, **change):
    c = types.SimpleNamespace(**DEFAULTS | change)
    return train.Trainer(c, ranks, check_model(folder, vars(c)), folder, "cpu")


def make_samples(n, seed=0):
    """n samples of random tokens, 3 to 30 each, every third cut off; their log-probs and advantages are random too."""
    rng, out = random.Random(seed), []
    for i in range(n):
        prompt, response = rng.randrange(1, 15), rng.randrange(2, 16)
        tokens = torch.tensor([rng.randrange(98) for _ in range(prompt + response)])
        mask, old = torch.ones(response, dtype=torch.bool), torch.tensor([rng.gauss(-4, 1) for _ in range(response)])
        mask[: response // 3] = False
        known = dict(name=f"prompt {i}, sample 0", truncated=i % 3 == 0, of=i)
        s = train.make_sample(tokens[:prompt], tokens[prompt:], mask, old, **known)
        out.append(s._replace(advantages=torch.full(s.logprobs.shape, rng.gauss(0, 1))))
    return out


def with_own_logprobs(trainer, samples):
    """The samples as an engine that agrees would have made them."""
    c, trainer.c = trainer.c, types.SimpleNamespace(**vars(trainer.c) | dict(importance="mask"))
    samples = [s._replace(logprobs=s.old_logprobs) for s in trainer.forward_only(samples)]
    trainer.c = c
    return samples


# ---- leaves


def test_leaves_hold_every_sample_once_within_their_bound_and_are_even():
    rng = random.Random(0)
    for _ in range(100):
        lengths = [rng.randrange(1, rng.choice((20, 200, 2000))) for _ in range(rng.randrange(1, 120))]
        bound, lanes = rng.choice((30, 256, 4096)), rng.choice((1, 2, 4, 8))
        leaves = train.plan_leaves(lengths, bound, lanes)
        assert sorted(i for leaf in leaves for i in leaf) == list(range(len(lengths)))
        loads = [sum(lengths[i] for i in leaf) for leaf in leaves]
        assert all(load <= bound or len(leaf) == 1 for load, leaf in zip(loads, leaves))
        rows = [loads[i : i + lanes] for i in range(0, len(loads), lanes)]
        assert all(len(row) == lanes and max(row) - min(row) <= max(lengths) for row in rows)
        # not many more rows than any cut would need, of which none is empty
        fits = sum(lengths) / bound + sum(length * 2 > bound for length in lengths)
        assert len(rows) <= 2 * math.ceil(fits / lanes) + 1 and all(max(row) > 0 for row in rows)


def test_leaves_follow_from_the_lengths_and_not_from_their_order():
    lengths = [random.Random(1).randrange(1, 50) for _ in range(60)]
    leaves = train.plan_leaves(lengths, 100, 4)
    assert train.plan_leaves(lengths, 100, 4) == leaves and all(leaf == sorted(leaf) for leaf in leaves)
    shuffled = random.Random(2).sample(lengths, len(lengths))
    cut = [[sorted(x[i] for i in leaf) for leaf in train.plan_leaves(x, 100, 4)] for x in (lengths, shuffled)]
    assert cut[0] == cut[1] != [[sorted(lengths[i] for i in leaf) for leaf in train.plan_leaves(lengths, 100, 8)]]
    assert [0] in train.plan_leaves([500, 3, 4], 100, 4)  # longer than a leaf: alone
    assert train.plan_leaves([5, 5], 100, 4) == [[0], [1], [], []]


def test_a_packed_leaf_picks_the_masked_tokens_and_their_predecessors():
    samples = make_samples(5)
    leaf = train.pack(samples, "cpu")
    expected, start = [], 0
    for s in samples:
        for at, logprob in zip(s.loss_at.tolist(), s.logprobs.tolist(), strict=True):
            expected.append((start + at - 1, int(s.tokens[at]), logprob))
        start += len(s.tokens)
    got = zip(*(x.tolist() for x in (leaf.predictors, leaf.targets, leaf.logprobs)))
    assert list(got) == expected and leaf.ids.tolist() == sum((s.tokens.tolist() for s in samples), [])
    assert leaf.positions.tolist() == sum((list(range(len(s.tokens))) for s in samples), [])


def groups_of_samples():
    """Four prompts, some of which begin alike, with 6 samples each of few tokens, and one that is there twice."""
    rng, out = random.Random(3), []
    for g, n in enumerate((3, 7, 7, 20)):
        prompt = [5, 6, g // 2, *range(n)]
        for i in range(6):
            response = [rng.randrange(3) for _ in range(1 + i)]
            s = train.make_sample(
                *map(torch.tensor, (prompt, response)), torch.ones(1 + i).bool(), torch.randn(1 + i), of=len(out)
            )
            out.append(s._replace(advantages=torch.full(s.logprobs.shape, rng.gauss(0, 1))))
    return out + out[-1:]


@pytest.mark.parametrize("more", ["", ", num_experts=4"])
def test_what_samples_begin_with_alike_is_computed_once_to_the_same_logprobs(ranks, tmp_path, monkeypatch, more):
    torch.manual_seed(0)
    model = {"scratch_args": DEFAULTS["scratch_args"] + more}
    make_scratch_model(tmp_path, DEFAULTS | model)
    samples = groups_of_samples()
    sizes = dict(model, lanes=1, leaf_tokens=4096, router_aux_loss_coef=0.1 * bool(more))
    plain, shared_trainer = (make_trainer(ranks, tmp_path, **sizes, share_prefixes=on) for on in (False, True))

    @torch.no_grad()
    def computed(leaf, shared):
        return shared_trainer.model.token_logprobs(leaf, shared=shared)[0]

    leaf = train.pack(samples, "cpu")
    plan = kernels.packed_plan(leaf.lengths, ids=leaf.ids)
    prefixes = [tuple(s.tokens[: i + 1].tolist()) for s in samples for i in range(len(s.tokens))]
    assert len(plan.first) == len({*prefixes}) < len(prefixes) / 2
    assert [prefixes[i] for i in plan.first[plan.row]] == prefixes
    whole = computed(leaf, False)
    assert torch.equal(computed(leaf, True).view(torch.int32), whole.view(torch.int32))
    (before, figures), (grads, again) = (trainer.gradients(samples) for trainer in (plain, shared_trainer))
    for a, b in zip(grads, before, strict=True):
        assert (a - b).abs().max() < 2e-5 * b.abs().max() and b.any()
    assert any(not torch.equal(a, b) for a, b in zip(grads, before))  # in another order
    assert figures == pytest.approx(again, rel=1e-5)
    # control: another response's row
    plan.row[-2] = plan.row[-4]
    monkeypatch.setattr(kernels, "packed_plan", lambda *_, **__: plan)
    assert not torch.equal(computed(leaf, True), whole)


def test_samples_of_a_prompt_are_in_one_leaf_while_leaves_are_even(ranks, scratch):
    samples = [s for s in groups_of_samples()[:-1] for _ in range(2)]  # four prompts, 12 samples each
    for lanes, most in ((1, 12), (2, 12), (8, 3)):
        trainer = make_trainer(ranks, scratch, lanes=lanes, leaf_tokens=4096, share_prefixes=True, group_size=12)
        leaves = [chosen for chosen, *_ in trainer.passes(samples, trainer.model)]
        assert sorted(i for leaf in leaves for i in leaf) == list(range(48)) and len(leaves) == lanes
        parts = [leaf[i : i + most] for leaf in leaves for i in range(0, len(leaf), most)]
        assert all(part == [*range(part[0], part[0] + most)] for part in parts)
    small = make_trainer(ranks, scratch, lanes=2, leaf_tokens=60, share_prefixes=True, group_size=12)
    loads = [len(leaf.ids) for _, leaf, _ in small.passes(samples, small.model)]
    assert max(loads) <= 60 and sum(loads) == sum(len(s.tokens) for s in samples)


def test_leaves_add_to_the_same_bits_on_1_2_4_and_8_ranks_and_a_plain_loop_does_not():
    torch.manual_seed(0)
    leaves = torch.randn(24, 1000)  # three rows of 8 lanes

    def total(ranks, plain=False):
        counter = LeafSum(8 // ranks)
        for i in range(0, 24, ranks):  # what TreeReduceScatter does across ranks, then what each rank does over time
            some = leaves[i : i + ranks].clone()  # the counter adds in place
            counter.add([sum(some) if plain else tree_sum(some)])
        return counter.total()[0]

    assert all(torch.equal(total(ranks).view(torch.int32), total(1).view(torch.int32)) for ranks in (2, 4, 8))
    assert torch.allclose(total(1), leaves.double().sum(0).float(), atol=1e-5)
    assert not torch.equal(total(8, plain=True).view(torch.int32), total(1).view(torch.int32))


@pytest.mark.parametrize("lanes", [1, 8])
def test_the_memory_of_an_update_does_not_grow_with_the_batch(ranks, scratch, lanes, monkeypatch):
    """
    Bytes of all tensors that are alive when leaves join the sum, over what was there before the step: at most the
    accumulator and log2(lanes) gradients, since autograd adds two leaves.
    """
    trainer = make_trainer(ranks, scratch, lanes=lanes)
    gradient, add, seen = sum(4 * s.data.numel() for s in trainer.shards), LeafSum.add, []

    def alive():
        tensors = (x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter))  # no DTensor
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())

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
    assert held - 0.5 < most[1] < held + 1.5 and held + 0.5 < most[6] < held + 1.5  # and some activations
    size = gradient / 4
    refused = least_memory(size, size, vars(trainer.c), 1)["train"] / gradient - 3  # beside weights and two moments
    assert abs(max(1, most[1]) - refused) < 0.5


# ---- the model and its update


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_logprobs_and_gradients_are_those_of_plain_transformers(mesh, scratch, batch_invariant):
    """Right, and not only equal to the engine's: against float64, through leaves, the sum and our operators."""
    from transformers import AutoModelForCausalLM

    if batch_invariant:
        train.kernels.enable_batch_invariant()
    try:
        change = dict(temperature=0.7, batch_invariant=batch_invariant, importance="mask", loss="pg")
        trainer = make_trainer(Ranks(0, 1, 1, 0, mesh, None), scratch, **change)
        samples = make_samples(9)
        ours = [s.old_logprobs for s in trainer.forward_only(samples)]
        trainer.c.importance = ""
        grads, metrics = trainer.gradients(samples)
    finally:
        train.kernels.disable_batch_invariant()
    plain = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float64)
    objective, entropy, tokens = 0.0, 0.0, sum(len(s.loss_at) for s in samples)
    for s, x in zip(samples, ours):
        every = torch.log_softmax(plain(s.tokens[None]).logits[0] / 0.7, -1)[s.loss_at - 1]
        logp = every.gather(1, s.tokens[s.loss_at, None])[:, 0]
        entropy -= float((every.exp() * every).sum().detach())
        assert torch.allclose(x.double(), logp, atol=1e-5, rtol=0)
        objective = objective + (logp * s.advantages).sum()
    (-objective / tokens).backward()
    assert metrics["loss"] == pytest.approx(-float(objective.detach()) / tokens, abs=1e-5)
    assert metrics["entropy"] == pytest.approx(entropy / tokens, rel=1e-5)
    for shard, grad in zip(trainer.shards, grads):
        expected = plain.get_parameter(shard.name).grad
        assert expected.abs().max() > 1e-4 and torch.allclose(grad.double(), expected, atol=1e-6, rtol=1e-3), shard.name


def test_a_critic_learns_the_returns_and_starts_at_zero(ranks, scratch):
    change = dict(advantage="gae", value_coef=1.0, value_clip=0.0, grad_clip=0.0, loss="pg")
    trainer = make_trainer(ranks, scratch, **change)
    samples = [s._replace(returns=s.logprobs, advantages=s.advantages * 0) for s in make_samples(6)]
    losses = [trainer.update(samples, step, 1e-2)[0]["value_loss"] for step in range(40)]
    returns = torch.cat([s.returns for s in samples])
    assert losses[0] == pytest.approx(float(returns.square().mean() / 2)) and losses[-1] < 0.3 * losses[0]


def test_a_sample_does_not_see_what_it_is_packed_with_nor_the_gradient_the_cut_into_leaves(ranks, scratch):
    """Log-probs bit for bit; the gradient up to the order of its sums, which the cut is there to set."""
    trainer = make_trainer(ranks, scratch)
    samples = with_own_logprobs(trainer, make_samples(20))
    assert all(s.logprobs.any() and s.logprobs.min() < -1 for s in samples)

    def run(**change):
        trainer.c = types.SimpleNamespace(**DEFAULTS | change)
        grads, metrics = trainer.gradients(samples, check=True)
        assert trainer.mismatches == []
        return [g.clone() for g in grads], metrics

    for kind in ("token", "sequence", "constant"):
        grads, metrics = run(loss_aggregation=kind)
        assert max(g.abs().max() for g in grads) > 1e-3 and metrics["entropy"] > 1
        for cut in (dict(leaf_tokens=1), dict(leaf_tokens=10_000), dict(leaf_tokens=100, lanes=1)):
            close, again = run(loss_aggregation=kind, **cut)
            assert all(torch.allclose(a, b, atol=1e-6, rtol=1e-3) for a, b in zip(close, grads))
            assert not all(torch.equal(a, b) for a, b in zip(close, grads))  # it is another cut
            assert again["loss"] == pytest.approx(metrics["loss"])
    other, _ = run(loss_aggregation="token")
    assert not all(torch.allclose(a, b, atol=1e-6, rtol=1e-3) for a, b in zip(other, grads))


def test_the_first_logprob_that_differs_is_named_and_stops_a_strict_run(ranks, scratch, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    trainer = make_trainer(ranks, scratch)
    samples = with_own_logprobs(trainer, make_samples(20))
    at = int(samples[9].loss_at[0]) - samples[9].prompt_tokens
    for i in range(9, 20):  # whatever leaves they are in
        logprobs, where = samples[i].logprobs.clone(), [0, -1] if i == 9 else [-1]
        logprobs[where] = torch.nextafter(logprobs[where], torch.tensor(0.0))
        samples[i] = samples[i]._replace(logprobs=logprobs, name=f"prompt {90 - i}, sample 2")
    before = [s.data.clone() for s in trainer.shards]
    with pytest.raises(SystemExit):
        trainer.update(samples, step=5, lr=0.1, check=True)
    tokens = sum(len(s.loss_at) for s in samples)
    line = capsys.readouterr().err
    assert line.startswith(f"error: step 5, prompt 81, sample 2, token {at}: engine ") and line.count("0x") == 2
    assert line.endswith(f"; 12 of {tokens} log-probs differ; --strict=False goes on\n")
    assert all(torch.equal(s.data, w) for s, w in zip(trainer.shards, before))
    trainer.c.strict = False
    # the largest distance, of either sign, is no sum over a leaf nor over leaves
    for i, where, shift in ((9, 0, 0.5), (9, -1, -0.25), (17, -1, 0.375)):
        logprobs = samples[i].logprobs.clone()
        logprobs[where] += shift
        samples[i] = samples[i]._replace(logprobs=logprobs)
    metrics, _ = trainer.update(samples, step=5, lr=0.1, check=True)
    assert metrics["logprob_mismatch_tokens"] == 12 and metrics["logprob_mismatch_max"] == pytest.approx(0.5, rel=1e-5)
    assert not any(torch.equal(s.data, w) for s, w in zip(trainer.shards, before))


def test_tokens_of_older_weights_are_checked_against_these_and_named_where_they_differ_or_are_not_kept(
    ranks, scratch, capsys, monkeypatch
):
    """Each of three versions has sampled a third of every sample's tokens."""
    monkeypatch.delenv("RANK", raising=False)
    trainer, samples, logprobs = make_trainer(ranks, scratch, lag=2), make_samples(9), []
    for version in range(3):
        trainer.past.keep(version)
        logprobs.append([s.logprobs for s in with_own_logprobs(trainer, samples)])
        if version < 2:
            trainer.update(samples, version, 1e-2)
    weights = [w.clone() for w in trainer.weights]
    mixed, tokens = [], 0
    for s, first, second, last in zip(samples, *logprobs, strict=True):
        versions = torch.arange(len(s.loss_at)) * 3 // len(s.loss_at)
        tokens += len(s.loss_at)
        drawn = torch.where(versions == 0, first, torch.where(versions == 1, second, last))
        assert not torch.equal(first, second) and not torch.equal(second, last)
        mixed.append(s._replace(logprobs=drawn, staleness=2 - versions))
    trainer.past.check(mixed, step=2)
    assert trainer.mismatches == [] and all(map(torch.equal, weights, trainer.weights))
    metrics, _ = trainer.update(mixed, step=2, lr=0.0, check=True)
    assert metrics["logprob_mismatch_tokens"] == 0 and metrics["ratio_variance"] > 1e-6 and metrics["staleness"] > 0
    # as weights that came too early: the tokens of the first version are said to be of the second
    early = [s._replace(staleness=s.staleness.clamp(max=1)) for s in mixed]
    trainer.past.check(early, step=2)
    with pytest.raises(SystemExit):
        trainer.update(early, step=2, lr=0.1, check=True)
    at = int(mixed[0].loss_at[0]) - mixed[0].prompt_tokens
    line = capsys.readouterr().err
    assert (
        line.startswith(f"error: step 2, prompt 0, sample 0, token {at}: engine ") and f" of {tokens} log-probs" in line
    )
    trainer.past.keep(3)
    with pytest.raises(SystemExit):
        trainer.past.check([s._replace(staleness=s.staleness + 1) for s in mixed], step=3)
    why = "sampled with weights 0; the oldest that are kept are 1"
    assert capsys.readouterr().err == f"error: step 3, prompt 0, sample 0, token {at}: {why}\n"


def test_a_loss_or_a_norm_that_is_not_finite_changes_no_weight(ranks, scratch, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    trainer = make_trainer(ranks, scratch)
    before, refused = [s.data.clone() for s in trainer.shards], "error: rl step 3: the loss is "
    samples = [s._replace(advantages=s.advantages * math.inf) for s in make_samples(4)]
    with pytest.raises(SystemExit):
        trainer.update(samples, step=3, lr=0.1)
    assert capsys.readouterr().err == f"{refused}inf, the gradient norm nan; the weights are as they were\n"
    with pytest.raises(SystemExit):
        trainer.apply([torch.full_like(w, math.inf) for w in before], 0.1, "rl step 3")
    assert capsys.readouterr().err == f"{refused}0.0, the gradient norm inf; the weights are as they were\n"
    assert all(torch.equal(s.data, w) for s, w in zip(trainer.shards, before))


def test_what_comes_after_a_sample_is_worth_something_only_where_it_was_cut_off(ranks, scratch):
    trainer = make_trainer(ranks, scratch, advantage="gae")
    trainer.model.value_head.detach().normal_(generator=torch.Generator().manual_seed(0))
    samples = trainer.forward_only(make_samples(12))
    for i, s in enumerate(samples):
        assert s.truncated == (i % 3 == 0) and (s.bootstrap != 0) == s.truncated
        assert s.values.all() and len(s.values) == len(s.loss_at)
        assert torch.equal(s.old_logprobs, s.logprobs)  # the engine's, unless importance weights want the trainer's
    (cut,) = trainer.forward_only([samples[0]])
    assert cut.bootstrap == samples[0].bootstrap  # alone as in the batch


def test_a_row_with_empty_leaves_is_the_same_update(ranks, scratch):
    """One sample fills one lane of four, and one of one."""
    grads = []
    for lanes in (4, 1):
        trainer = make_trainer(ranks, scratch, lanes=lanes)
        grads.append(trainer.gradients(make_samples(1))[0])
    assert max(g.abs().max() for g in grads[0]) > 1e-3
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_the_reference_is_another_model_at_the_same_temperature(ranks, scratch, tmp_path):
    """Its log-probs are, bit for bit, those of a trainer that has it as its own model."""
    make_scratch_model(tmp_path, DEFAULTS | dict(seed=2))
    change = dict(temperature=0.7, importance="mask")
    samples = make_samples(6)
    trainer = make_trainer(ranks, scratch, kl_coef=0.1, reference=str(tmp_path), **change)
    ours, theirs = trainer.forward_only(samples), make_trainer(ranks, tmp_path, **change).forward_only(samples)
    assert all(torch.equal(a.reference, b.old_logprobs) for a, b in zip(ours, theirs))
    assert not any(torch.equal(a.reference, a.old_logprobs) for a in ours)


def test_a_supervised_step_has_no_temperature_and_every_token_counts_alike(ranks, scratch):
    trainer = make_trainer(ranks, scratch, importance="mask", temperature=1.0)
    samples = trainer.forward_only(make_samples(8))
    plain, metrics = trainer.gradients(samples, ANSWERS)
    logprobs = torch.cat([s.old_logprobs for s in samples]).double()
    assert metrics["loss"] == pytest.approx(-float(logprobs.mean()), rel=1e-6)
    trainer.sampling = train.kernels.Sampling(0.7)
    assert all(torch.equal(a, b) for a, b in zip(trainer.gradients(samples, ANSWERS)[0], plain))


@pytest.mark.parametrize("grad_clip", [0.0, 0.5, 1e9])
def test_an_update_is_adamws_with_the_clipped_gradient_and_what_was_used_is_hashed(ranks, scratch, grad_clip):
    """Against float64. Two steps, since the first does not depend on the betas; norms' weights do not decay."""
    change = dict(grad_clip=grad_clip, weight_decay=0.1, beta1=0.8, beta2=0.95, learning_rate=1.0)
    trainer, draws = make_trainer(ranks, scratch, **change), torch.Generator().manual_seed(0)
    w = [s.data.double() for s in trainer.shards]
    m, v = ([torch.zeros_like(x) for x in w] for _ in range(2))
    for t, lr in ((1, 1e-3), (2, 2e-3)):
        grads = [torch.randn(x.shape, generator=draws) * 0.1 for x in w]
        g = [x.double() for x in grads]
        norm, hashes = trainer.apply(grads, lr, "here")
        exact = math.sqrt(sum(float(x.square().sum()) for x in g))
        assert norm == pytest.approx(exact, rel=1e-9) and 1 < norm < 1e9
        for i, x in enumerate(g):
            x = x * (0.5 / exact) if grad_clip == 0.5 else x
            m[i], v[i] = 0.8 * m[i] + 0.2 * x, 0.95 * v[i] + 0.05 * x * x
            decayed = w[i] * (1 - lr * 0.1) if x.dim() > 1 else w[i]
            w[i] = decayed - lr * (m[i] / (1 - 0.8**t)) / ((v[i] / (1 - 0.95**t)).sqrt() + 1e-8)
            assert torch.allclose(grads[i].double(), x, rtol=1e-6, atol=1e-12)
            assert torch.allclose(trainer.shards[i].data.double(), w[i], rtol=1e-6, atol=1e-7), trainer.shards[i].name
        states = [trainer.optimizer.state[p] for p in trainer.weights]
        first, second = ([s[k] for s in states] for k in train.MOMENTS)
        of = {"gradients": [grads], "weights": [trainer.weights], "optimizer": [first, second]}
        for stage, tensors in of.items():
            each = [train.sync.tensor_hashes(x, trainer.shards, None) for x in tensors]
            assert hashes[stage] == {name: "".join(h[name] for h in each) for name in each[0]}


def test_an_optimizer_whose_state_no_checkpoint_has_ends_in_one_line(ranks, scratch, tmp_path, monkeypatch, capsys):
    """SGD's momentum was in no checkpoint, and a resume parted without a word."""
    monkeypatch.setattr(train.kernels, "adamw", lambda groups, betas: torch.optim.SGD(groups, momentum=betas[0]))
    trainer = make_trainer(ranks, scratch)
    for w in trainer.weights:
        w.grad = torch.ones_like(w)
    trainer.optimizer.step()
    with pytest.raises(SystemExit) as end:
        save_trainer(trainer, tmp_path, None, [], None, 1, Flight())
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1 and not [*tmp_path.iterdir()]
    assert "the optimizer has exp_avg, exp_avg_sq, momentum_buffer; name in MOMENTS" in said


def test_the_advantages_of_all_samples_are_hashed(ranks, scratch):
    trainer, samples = make_trainer(ranks, scratch), make_samples(3)
    seen = {trainer.update(samples, 0, 0.0)[1]["advantages"]}
    for i, s in enumerate(samples):
        advantages = s.advantages.clone()
        advantages[-1] += 1
        changed = [*samples[:i], s._replace(advantages=advantages), *samples[i + 1 :]]
        seen.add(trainer.update(changed, 0, 0.0)[1]["advantages"])
    assert len(seen) == 4
