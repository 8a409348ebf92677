"""
The formulas against loops in float64, the data order, packing, and the presets up to the model's weights.

    pytest tests/test_train.py
"""

import functools
import json
import math
import random
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import train_grpo as train
from configurator import CHOICES, check_config, configure
from rewards import pass_at_k
from rollout_server import MODEL_TYPES

ROOT = Path(train.__file__).parent
DEFAULTS = train.DEFAULTS


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield DeviceMesh.from_group(dist.group.WORLD, "cpu")
    dist.destroy_process_group()


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
@pytest.mark.parametrize("kind", CHOICES["loss"])
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


@pytest.mark.parametrize("kind", CHOICES["loss"])
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
    for kind in CHOICES["kl_estimator"]:
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
    ours = train.gae(torch.tensor([0.0, 0, 0, 1]), torch.tensor([0.5, 0.6, 0.7, 0.8, 0.0]), 0.99, 0.95)
    assert ours.tolist() == pytest.approx([0.4292, 0.3564, 0.2801, 0.2000], abs=5e-5)
    rewards, values = torch.randn(3, 9, dtype=torch.float64), torch.randn(3, 10, dtype=torch.float64)
    assert train.gae(torch.zeros(3, 0), torch.zeros(3, 1), 0.9, 0.9).shape == (3, 0)  # every token filtered out
    for r, v, row in zip(rewards.tolist(), values.tolist(), train.gae(rewards, values, 0.97, 0.8).tolist()):
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
        samples.append(sample._replace(values=values, bootstrap=end))
        gains = [-c for c in cost]
        gains[-1] += r
        expected.append(loop_gae(gains, values[1:-1].tolist() + [end], 0.9, 0.8))
    whole = sum(expected, [])
    done = train.critic_advantages(samples, torch.tensor(rewards), [torch.tensor(c) for c in costs], 0.9, 0.8)
    for s, before, raw in zip(done, samples, expected):
        normal = [0.0, *((a - mean(whole)) / (std(whole) + 1e-6) for a in raw), 0.0]
        assert s.advantages.tolist() == pytest.approx(normal, abs=1e-5)
        returns = [a + v for a, v in zip(raw, before.values[1:-1].tolist())]
        assert s.returns.tolist() == pytest.approx([0.0, *returns, 0.0], abs=1e-5)


def test_value_loss_overlong_penalty_and_importance_weights_are_those_of_loops():
    new, old, returns = random_tokens([40])
    for clip in (0.0, 0.2):
        expected = []
        for v, o, r in zip(new, old, returns):
            kept = o + min(max(v - o, -clip), clip) if clip else v
            expected.append(max((v - r) ** 2, (kept - r) ** 2) / 2)
        ours = train.value_loss(*map(torch.tensor, (new, old, returns)), clip)
        assert ours.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert clip == 0 or expected != [(v - r) ** 2 / 2 for v, r in zip(new, returns)]
    lengths = torch.arange(1, 101).view(4, 25)
    penalty = [0.0 if n + 20 <= 90 else max((90 - 20 - n) / 20, -1.0) for n in range(1, 101)]
    assert train.overlong_penalty(lengths, 90, 20).flatten().tolist() == pytest.approx(penalty)
    assert not train.overlong_penalty(lengths, 90, 0).any()
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
    for kind in CHOICES["loss_aggregation"]:
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


# ---- data


def test_rows_of_a_step_depend_on_seed_and_step_alone_and_cover_each_epoch_once():
    steps = [train.rows_of_step(10, 4, s, 1, "rl") for s in range(5)]
    assert train.rows_of_step(10, 4, 3, 1, "rl") == steps[3]
    flat = sum(steps, [])
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10)) and flat[:10] != flat[10:]
    assert train.rows_of_step(10, 4, 0, 2, "rl") != steps[0]


def test_rows_come_from_jsonl_and_parquet_with_named_columns_and_a_template(tmp_path):
    import datasets

    rows = [{"q": f"is {i} even?", "a": i % 2 == 0, "hint": "think"} for i in range(9)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "x.parquet")
    for name in ("x.jsonl", "x.parquet"):
        config = DEFAULTS | dict(dataset=str(tmp_path / name), prompt_column="q", answer_column="a", eval_size=2)
        data, held_out = train.load_rows(config | dict(prompt_template="{hint}: {q}"))
        assert len(data) == 7 and len(held_out) == 2
        assert {r["prompt"] for r in data + held_out} == {f"think: is {i} even?" for i in range(9)}
        assert all(r["answer"] == str(int(r["prompt"].split()[2]) % 2 == 0) for r in data)


def test_held_out_rows_are_the_same_for_every_seed_and_never_trained_on():
    data, held_out = train.load_rows(DEFAULTS)
    again = train.load_rows(DEFAULTS | dict(seed=2))
    assert (data, held_out) == again and len(held_out) == DEFAULTS["eval_size"]
    assert not {r["prompt"] for r in data} & {r["prompt"] for r in held_out}


def test_long_prompts_are_dropped_in_one_line_that_counts_them(capsys):
    def tokenizer(text, add_special_tokens):
        return {"input_ids": list(text.encode())}

    rows = [{"prompt": "x" * n, "answer": ""} for n in (3, 300, 5, 400)]
    kept = train.encode_prompts(rows, tokenizer, DEFAULTS, "training")
    assert [len(r["prompt_tokens"]) for r in kept] == [3, 5]
    assert capsys.readouterr().out == "dropped 2 of 4 training prompts: over max_prompt_tokens=256\n"


# ---- the model


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    train.sync.make_scratch_model(folder, DEFAULTS)
    return folder


def test_a_scratch_model_is_an_ordinary_folder_with_an_exact_tokenizer(scratch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(scratch), AutoModelForCausalLM.from_pretrained(scratch)
    text = "17+25=\n 42 ~!"
    tokens = tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokens) == text and len(tokens) == len(text)
    assert tokenizer.eos_token_id == 1 != tokenizer.pad_token_id == 0 and len(tokenizer) == model.config.vocab_size
    assert 700_000 < model.num_parameters() < 900_000


def make_samples():
    rng = random.Random(0)
    out = []
    for prompt, response in ((5, 4), (3, 1), (70, 9)):
        tokens = torch.tensor([rng.randrange(98) for _ in range(prompt + response)])
        mask = torch.ones(response, dtype=torch.bool)
        mask[: response // 3] = False
        out.append(train.make_sample(tokens[:prompt], tokens[prompt:], mask, torch.randn(response)))
    return out


def test_a_packed_leaf_picks_the_masked_tokens_and_their_predecessors():
    samples = make_samples()
    leaf = train.pack(samples, "cpu")
    expected, start = [], 0
    for i, s in enumerate(samples):
        for j, used in enumerate(s.loss_mask.tolist()):
            if used:
                at = s.prompt_tokens + j
                expected.append((start + at - 1, int(s.tokens[at]), float(s.logprobs[j]), i, j))
        start += len(s.tokens)
    got = zip(*(x.tolist() for x in (leaf.predictors, leaf.targets, leaf.logprobs, leaf.sample, leaf.response_index)))
    assert list(got) == expected and leaf.ids.tolist() == sum((s.tokens.tolist() for s in samples), [])
    assert leaf.positions.tolist() == sum((list(range(len(s.tokens))) for s in samples), [])


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_trainer_logprobs_and_gradients_are_those_of_plain_transformers(scratch, mesh, batch_invariant):
    """Right, and not only equal to the engine: against float64, through FSDP2, packing and our operators."""
    from transformers import AutoModelForCausalLM

    model = train.build_model(train.check_model(scratch, DEFAULTS), mesh, "cpu", batch_invariant)
    shards = train.sync.shards(model, mesh)
    train.sync.load_weights(shards, scratch, tied=True)
    samples = make_samples()
    leaf = train.pack(samples, "cpu")
    if batch_invariant:
        train.kernels.enable_batch_invariant()
    try:
        logprobs, *_ = model.token_logprobs(leaf, 0.7)
        logprobs.sum().backward()
    finally:
        train.kernels.disable_batch_invariant()
    plain = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float64)
    expected = []
    for s in samples:
        logp = torch.log_softmax(plain(s.tokens[None]).logits[0, :-1] / 0.7, -1).gather(1, s.tokens[1:, None])[:, 0]
        expected.append(logp[s.prompt_tokens - 1 :][s.loss_mask])
    expected = torch.cat(expected)
    assert torch.allclose(logprobs.double(), expected, atol=1e-5, rtol=0)
    expected.sum().backward()
    grads = {n: p.grad for n, p in plain.named_parameters()}
    for s, p in zip(shards, model.parameters()):
        assert torch.allclose(p.grad.to_local().double(), grads[s.name], atol=1e-4), s.name


def test_a_critic_learns_the_returns_and_starts_at_zero(scratch, mesh):
    torch.manual_seed(0)
    model = train.build_model(train.check_model(scratch, DEFAULTS), mesh, "cpu", True, critic=True)
    policy = [s for s in train.sync.shards(model, mesh) if s.name != "value_head"]
    train.sync.load_weights(policy, scratch, tied=True)
    model.value_head.to_local().detach().zero_()
    leaf = train.pack([s._replace(returns=s.logprobs) for s in make_samples()], "cpu")
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(40):
        *_, values, ends = model.token_logprobs(leaf, 1.0)
        assert ends.shape == (3,) and (values.any() or not losses)
        loss = train.value_loss(values, leaf.values, leaf.returns, 0.0).sum()
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] == pytest.approx(float(leaf.returns.square().sum() / 2)) and losses[-1] < 0.3 * losses[0]


# ---- what a trainer's step may reach on CUDA beside our operators

SEALED = ("rms_norm", "norm_rope", "rope_table", "swiglu", "attention", "token_logprobs", "row_sums")
ALLOWED = {  # why: operators. A leaf has the same rows on any number of ranks, so sums over it need a fixed order only
    "replaced by enable_batch_invariant": "mm addmm embedding_dense_backward",
    "element by element": """
        add clamp div eq exp ge gt le logical_and_ lt masked_fill_ minimum mul neg pow sqrt sub where _foreach_add_
        _foreach_addcdiv_ _foreach_addcmul_ _foreach_div_ _foreach_lerp_ _foreach_mul_ _foreach_sqrt""",
    "moves, makes or reads": """
        _local_scalar_dense _to_copy _unsafe_view arange as_strided cat clone copy_ detach embedding empty expand index
        lift_fresh new_zeros ones_like scalar_tensor select select_backward slice squeeze t transpose unsqueeze view
        zeros zeros_like fsdp.chunk_cat profiler._record_function_enter_new profiler._record_function_exit""",
    "whole numbers": "cumsum max nonzero",
    "of all losses of a leaf": "sum()",
    "over the rows of a leaf, a bias' gradient": "sum(0)",
    "backward of a choice of rows, none of them twice": "index_put",
    "adds zeros to one number": "c10d.allreduce_",
}


class Sealed(torch.autograd.Function):
    """f(*args), forward and backward hidden from a TorchDispatchMode as one Triton kernel would be."""

    @staticmethod
    def forward(ctx, f, *args):
        ctx.args = [a.detach().requires_grad_(a.requires_grad) if torch.is_tensor(a) else a for a in args]
        with _disable_current_modes(), torch.enable_grad():
            ctx.out = f(*ctx.args)
            return tuple(x.detach() for x in ctx.out) if isinstance(ctx.out, tuple) else ctx.out.detach()

    @staticmethod
    def backward(ctx, *grads):
        needed = [torch.is_tensor(a) and a.requires_grad for a in ctx.args]
        with _disable_current_modes():
            got = iter(torch.autograd.grad(ctx.out, [a for a, x in zip(ctx.args, needed) if x], grads))
        return None, *(next(got) if x else None for x in needed)


class Record(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        name = str(f.overloadpacket).removeprefix("aten.")
        if name == "sum":  # it depends on what is added
            name += f"({', '.join(str(dim) for dim in args[1]) if len(args) > 1 else ''})"
        self.seen.add(name)
        return f(*args, **(kwargs or {}))


def operators_of_a_step(family, mesh, batch_invariant, checkpointing, monkeypatch):
    """What forward, backward, gradient norm and optimizer reach in the step of a tiny model."""
    from transformers import AutoConfig

    for name in SEALED:
        f = getattr(train.kernels, name)
        monkeypatch.setattr(train.kernels, name, functools.partial(Sealed.apply, f))
    hf = AutoConfig.for_model(
        family, vocab_size=98, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    model = train.build_model(hf, mesh, "cpu", batch_invariant)
    shards = train.sync.shards(model, mesh)
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    leaf = train.pack([s._replace(advantages=s.logprobs) for s in make_samples()], "cpu")
    counts = leaf.counts.tolist()
    weights = [torch.nn.Parameter(s.data.normal_(std=0.1)) for s in shards]
    optimizer = torch.optim.AdamW(weights, foreach=True)  # as it is on CUDA
    with Record() as record:
        logprobs, entropy, *_ = model.token_logprobs(leaf, 0.7)
        losses, _ = train.policy_loss("ppo", logprobs, leaf.logprobs, leaf.advantages, counts, 0.2, 0.2)
        train.aggregate(losses - 0.01 * entropy, counts, "token", 3, len(losses), 9).backward()
        grads = [p.grad.to_local() for p in model.parameters()]
        train.sync.grad_norm(grads, shards, mesh.get_group())
        for w, g in zip(weights, grads):
            w.grad = g
        optimizer.step()
    assert all(g.any() for g in grads)
    return record.seen


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", MODEL_TYPES)
def test_a_step_reaches_no_operator_whose_order_of_sums_is_not_ours(mesh, family, checkpointing, monkeypatch):
    allowed = {name for names in ALLOWED.values() for name in names.split()}
    assert operators_of_a_step(family, mesh, True, checkpointing, monkeypatch) <= allowed
    monkeypatch.undo()
    caught = operators_of_a_step(family, mesh, False, checkpointing, monkeypatch) - allowed
    assert "mean" in caught and any("scaled_dot_product" in name for name in caught)  # the libraries' own are


# ---- presets

SIZES = {  # the published config.json of the models, without their weights
    "qwen3_0p6b": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16),
    "qwen3_8b": dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32),
}


@pytest.mark.parametrize("name,world,parameters", [("qwen3_0p6b", 1, 0.596e9), ("qwen3_8b", 8, 8.19e9)])
def test_a_preset_builds_up_to_the_weights(tmp_path, mesh, name, world, parameters):
    from transformers import Qwen3Config

    config = configure(dict(DEFAULTS, __file__=str(ROOT / "train_grpo.py")), [str(ROOT / f"config/{name}.py")])
    check_config(config, world, DEFAULTS)
    hf = Qwen3Config(
        vocab_size=151936, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
        tie_word_embeddings=name == "qwen3_0p6b", **SIZES[name],
    )  # fmt: skip
    hf.save_pretrained(tmp_path)
    hf = train.check_model(tmp_path, config)
    model = train.build_model(hf, mesh, "meta", True)
    shapes = [(s.name, s.shape) for s in train.sync.shards(model, mesh)]
    assert sum(math.prod(s) for _, s in shapes) == pytest.approx(parameters, rel=0.01)
    buckets = train.sync.buckets(shapes, torch.bfloat16)
    assert [n for b in buckets for n, _ in b] == [n for n, _ in model.named_parameters()]
    sizes = [sum(math.prod(s) * 2 for _, s in b) for b in buckets]
    assert all(size <= 256 << 20 or len(b) == 1 for size, b in zip(sizes, buckets))


@pytest.mark.parametrize("name", ["tiny", "one_gpu"])
def test_a_scratch_preset_is_valid(name):
    config = configure(dict(DEFAULTS, __file__=str(ROOT / "train_grpo.py")), [str(ROOT / f"config/{name}.py")])
    for world in (1, 2, 3):
        check_config(config, world, DEFAULTS)


# ---- refusals that need no run

BAD = [
    (dict(group_size=1), 1, "group_size=1"),
    (dict(lanes=6), 1, "lanes=6: not a power of two"),
    (dict(rollout_ranks=2), 2, "rollout_ranks=2: of 2 ranks"),
    (dict(rollout_ranks=0), 2, "rollout_ranks=0: of 2 ranks"),
    (dict(), 4, "lanes=8: 3 trainer ranks cannot share"),
    (dict(leaf_tokens=0), 1, "leaf_tokens=0: must be more than 0"),
    (dict(temperature=0.0), 1, "temperature=0.0"),
    (dict(device="tpu"), 1, "device='tpu'"),
    (dict(max_new_tokens=0), 1, "max_new_tokens=0"),
    (dict(engine_kv_tokens=512), 1, "engine_kv_tokens=512: one sample may take 513"),
    (dict(weight_sync="ipc"), 2, "weight_sync='ipc': engine and trainer must be one process"),
    (dict(weight_sync="carrier pigeon"), 1, "weight_sync='carrier pigeon'"),
    (dict(mode="replay", queue_dir="no/queue"), 1, "queue_dir='no/queue': mode='replay' needs"),
    (dict(queue_dir="out/x"), 1, "queue_dir='out/x': is for --mode=replay"),
    (dict(mode="serve"), 1, "mode='serve': use grpo, replay, sft"),
    (dict(loss="gspo"), 1, "loss='gspo': its ratio is a sequence's, not a token's; --loss_aggregation"),
    (dict(loss="pg", updates_per_batch=2), 1, "updates_per_batch=2: loss='pg' has no ratio"),
    (dict(updates_per_batch=0), 1, "updates_per_batch=0: must be more than 0"),
    (dict(advantage="ppo"), 1, "advantage='ppo': use grpo, dr_grpo"),
    (dict(advantage="distill"), 1, "advantage='distill': from whom?"),
    (dict(advantage="distill", teacher="x", kl_coef=0.1, reference="x"), 1, "kl_coef=0.1: advantage='distill' is"),
    (dict(advantage="gae", dynamic_sampling=2), 1, "dynamic_sampling=2: advantage='gae' learns from"),
    (dict(value_clip=0.0), 1, "value_clip=0.0: is for --advantage=gae"),
    (dict(teacher="x"), 1, "teacher='x': is for --advantage=distill"),
    (dict(kl_in_reward=True), 1, "kl_in_reward=True: is for kl_coef"),
    (dict(importance="mask", importance_floor=1.5), 1, "importance_floor=1.5: the weight of equal log-probs"),
    (dict(overlong_cache=256), 1, "overlong_cache=256: not within max_new_tokens=256"),
    (dict(eval_samples=0), 1, "eval_samples=0"),
    (dict(dual_clip=0.5), 1, "dual_clip=0.5"),
    (dict(kl_coef=0.1), 1, "kl_coef=0.1: to what? a scratch model is random"),
    (dict(reference="x"), 1, "reference='x': is for kl_coef"),
    (dict(keep_checkpoints=0), 1, "keep_checkpoints=0"),
]


@pytest.mark.parametrize("change,world,message", BAD)
def test_values_that_make_no_sense_are_refused_in_one_line(change, world, message, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as e:
        check_config(DEFAULTS | change, world, DEFAULTS)
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(dataset="nowhere.jsonl"), "dataset='nowhere.jsonl': no such file"),
        (dict(prompt_column="question"), "prompt_column='question': the data set has the columns answer, prompt"),
        (dict(answer_column="label"), "answer_column='label'"),
        (dict(prompt_template="{question}"), "prompt_template='{question}': KeyError"),
        (dict(eval_size=10000), "eval_size=10000: dataset='arithmetic' has 10000 rows"),
    ],
)
def test_data_that_is_not_there_is_refused_in_one_line(change, message, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as e:
        train.load_rows(DEFAULTS | change)
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and message in err


def test_models_we_cannot_train_and_serve_alike_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    from transformers import GPT2Config, Qwen2Config

    def refusal(hf, **change):
        hf.save_pretrained(tmp_path)
        with pytest.raises(SystemExit) as e:
            train.check_model(tmp_path, DEFAULTS | change)
        assert e.value.code == 2
        return capsys.readouterr().err

    assert "a gpt2 model; known are qwen3, qwen2, llama" in refusal(GPT2Config())
    assert "sliding-window" in refusal(Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=1))
    assert "the model has 64 positions" in refusal(Qwen2Config(max_position_embeddings=64))
