"""
The Triton operators in Triton's interpreter, on a CPU: indexing, masks, paging, gradients and the order of addition.

    TRITON_INTERPRET=1 pytest tests/triton_interpreted.py

Run by test_triton.py in a process of its own, since the switch is read when the kernels are defined. The interpreter's
own `tl.dot` adds by numpy, in an order that depends on the shape; pretend/interpreter.py models the tensor core's.
"""

import functools
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pretend.interpreter import install
from test_kernels import (
    ENDS,
    Sequences,
    among_ranks,
    attend_with_shared_rows,
    cuts_are_right,
    ends,
    plain_draw,
    qkv,
    reference,
    same,
    textbook_mixture,
    ties,
)
from test_triton import REVERSED_K, SPLIT_K, mutant

import kernels
from onecurve.cpu import host

assert kernels.INTERPRET, "TRITON_INTERPRET=1 is needed"


install()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def close(a, b, atol=1e-5):
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), atol=atol, rtol=1e-5)


# ---- matmul


@pytest.mark.parametrize(
    "M,N,K", [(1, 1, 1), (1, 70, 40), (5, 130, 16), (70, 33, 100), (65, 66, 64), (3, 0, 5), (7, 9, 0)]
)
@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_matmul_is_right_in_every_layout(M, N, K, layout):
    a = torch.randn(M, K) if layout[0] == "N" else torch.randn(K, M).t()
    b = torch.randn(K, N) if layout[1] == "N" else torch.randn(N, K).t()
    assert close(kernels.matmul(a, b), a.double() @ b.double(), 1e-4)


def test_matmul_takes_odd_strides_and_a_chain_to_go_on_from():
    x, y = torch.randn(40, 99)[::2, 1::3], torch.randn(66, 50)[::2]
    assert close(kernels.matmul(x, y), x.double() @ y.double(), 1e-4)
    for M, N in ((70, 80), (5, 80)):
        x, y = torch.randn(M, 64), torch.randn(64, N)
        halves = kernels.matmul(x[:, :32].contiguous(), y[:32])
        kernels.matmul(x[:, 32:].contiguous(), y[32:], out=halves)
        assert same(halves, kernels.matmul(x, y))
    bias, x, y = torch.randn(50), torch.randn(5, 33), torch.randn(33, 50)
    out = kernels.addmm(bias, x, y, beta=2, alpha=0.5)
    assert close(out, 2 * bias.double() + 0.5 * (x.double() @ y.double()), 1e-4)


def matmul_configs():
    """The bits of one product under every tile shape, by pointers and by the copy engine, swapped and not."""
    x, w = torch.randn(70, 128), torch.randn(96, 128)
    whole, rows = kernels.matmul(x, w.t()), []
    chosen, for_tma, card = kernels._matmul_config, kernels._for_tma, kernels.card
    one_sm = kernels.CARDS[9, 0]._replace(sms=1)  # a program takes many tiles
    try:
        for config in ((64, 16, 128, 4, 3), (64, 64, 16, 4, 3), (128, 32, 64, 4, 3), (16, 128, 32, 4, 3)):
            for path in (for_tma, lambda _: None):
                kernels._matmul_config, kernels._for_tma, kernels.card = lambda *_: config, path, lambda _: one_sm
                rows += [
                    same(kernels.matmul(x[i : i + M], w.t()), whole[i : i + M]) for i, M in ((0, 70), (9, 1), (20, 33))
                ]
    finally:
        kernels._matmul_config, kernels._for_tma, kernels.card = chosen, for_tma, card
    return rows


def test_a_row_of_matmul_sees_neither_its_batch_nor_the_tiles_nor_the_path():
    assert all(matmul_configs())
    x, w = torch.randn(90, 50), torch.randn(70, 50)  # K of no whole step, and no copy engine: 200 bytes to a row
    whole = kernels.matmul(x, w.t())
    assert all(
        same(kernels.matmul(x[i : i + M], w.t()), whole[i : i + M]) for i, M in ((0, 1), (5, 16), (60, 17), (3, 65))
    )
    assert not same(whole, (x.double() @ w.double().t()).float())  # the comparison can fail
    for M in (1, 33, 90):  # K's last step is filled with zeros, not with what lies behind
        wide, high = torch.full((M, 60), float("nan")), torch.full((71, 60), float("inf"))
        wide[-1, :50], high[:70, :50] = x[-1], w
        assert same(kernels.matmul(wide[:, :50], high[:70, :50].t())[-1:], whole[-1:])


def test_split_k_and_a_reversed_k_are_caught(tmp_path, monkeypatch):
    for changes, kernel in ((SPLIT_K, "triton_matmul"), (REVERSED_K, "triton_matmul_tma")):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, kernel, getattr(mutant(tmp_path, *changes), kernel))
            assert not all(matmul_configs())


@pytest.mark.parametrize("N,K,R", [(1, 1, 1), (70, 40, 4), (65, 130, 17), (0, 5, 2)])
def test_a_merge_is_right_and_a_row_is_alone(N, K, R):
    weight, A, B = torch.randn(N, K), torch.randn(R, K), torch.randn(N, R)
    whole = kernels.merge(weight, A, B, 1.5)
    assert close(whole, weight.double() + 1.5 * (B.double() @ A.double()), 1e-4)
    for i, n in ((0, 1), (5, 17), (60, 10)):
        assert same(kernels.merge(weight[i : i + n], A, B[i : i + n], 1.5), whole[i : i + n])
    assert same(kernels.merge(weight, A, torch.zeros(N, R), 1.5), weight)
    assert N == 0 or not same(kernels.merge(weight, A, B, 1.25), whole)


def test_a_linear_with_adapters_has_the_gradients_of_its_merged_weight():
    x, weight, bias = torch.randn(37, 40, requires_grad=True), torch.randn(70, 40), torch.randn(70)
    A, B, grad = torch.randn(4, 40, requires_grad=True), torch.randn(70, 4, requires_grad=True), torch.randn(37, 70)
    for b in (None, bias):
        ours = kernels.LoRALinear.apply(x, weight, b, A, B, 0.5)
        right = x.double() @ (weight.double() + 0.5 * B.double() @ A.double()).t() + (0 if b is None else b.double())
        assert close(ours, right, 1e-3)
        found, wanted = (torch.autograd.grad(y, (x, A, B), grad.to(y)) for y in (ours, right))
        assert all(close(a, b, 1e-3) for a, b in zip(found, wanted))


# ---- norms and elementwise


@pytest.mark.parametrize("shape", [(5, 64), (3, 4, 64), (1, 100), (70, 33), (0, 64), (130, 16), (2, 3000)])
def test_rms_norm_is_right_forward_and_backward_with_and_without_residual(shape):
    x, residual, w = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    grad, s_grad = torch.randn(shape), torch.randn(shape)

    def run(f, x, w, residual):
        x, w, residual = (t.clone().requires_grad_() for t in (x, w, residual))
        y = f(x, w, 1e-6)
        z, s = f(x, w, 1e-6, residual)
        out = (y * grad).sum() + (z * grad).sum() + (s * s_grad).sum()
        return (y, z, s, *torch.autograd.grad(out, (x, w, residual)))

    def expected(x, w, eps, residual=None):
        s = x if residual is None else x + residual
        y = s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + eps) * w
        return y if residual is None else (y, s)

    ours, theirs = run(kernels.rms_norm, x, w, residual), run(expected, x.double(), w.double(), residual.double())
    for a, b in zip(ours, theirs):
        assert close(a, b, 1e-4)
    if len(x):
        assert same(kernels.rms_norm(x[-1:], w, 1e-6), ours[0][-1:].detach())


def test_rms_norm_reads_strided_rows_and_poisoned_neighbours_do_not_matter():
    fused, w = torch.randn(6, 192), torch.randn(64)
    x, whole = fused[:, 64:128], kernels.rms_norm(fused[:, 64:128].contiguous(), w, 1e-6)
    fused[:, :64], fused[:, 128:] = float("nan"), float("inf")
    assert same(kernels.rms_norm(x, w, 1e-6), whole)
    rows = torch.randn(40, 64)
    alone = kernels.rms_norm(rows[7:8].clone(), w, 1e-6)
    rows[:7], rows[8:] = float("nan"), float("inf")
    assert same(kernels.rms_norm(rows, w, 1e-6)[7:8], alone)


def test_the_weight_gradient_of_a_norm_is_right_over_several_blocks_whose_size_decides_its_bits(monkeypatch):
    x, w, grad = torch.randn(70, 1500), torch.randn(1500, requires_grad=True), torch.randn(70, 1500)
    unit = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6)
    found = []
    for rows in (64, 3, 64):
        monkeypatch.setattr(kernels, "SUM_ROWS", rows)
        found += torch.autograd.grad(kernels.rms_norm(x, w, 1e-6), w, grad)
        assert close(found[-1], (grad.double() * unit).sum(0), 1e-4)
    assert same(found[0], found[2]) and not same(found[0], found[1])


@pytest.mark.parametrize(
    "N,heads,kv_heads,D", [(7, 4, 2, 64), (70, 5, 1, 128), (7, 1, 1, 8), (1, 2, 2, 16), (0, 4, 2, 64)]
)
@pytest.mark.parametrize("normed", [True, False])
def test_norm_rope_is_right_forward_and_backward_and_a_head_is_alone(normed, N, heads, kv_heads, D):
    q, k, *weights = (torch.randn(*shape, D) for shape in ((N, heads), (N, kv_heads), (), ()))
    cos, sin = kernels.rope_table(1.0 / 10000 ** (torch.arange(0, D, 2) / D), torch.arange(3, 3 + N))
    grads = torch.randn(N, heads, D), torch.randn(N, kv_heads, D)

    def expected(q, k, cos, sin, q_weight=None, k_weight=None, eps=None):
        def turn(x, w):
            x = x if w is None else x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w
            (x1, x2), c, s = x.chunk(2, -1), cos[:, None], sin[:, None]
            return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1)

        return turn(q, q_weight), turn(k, k_weight)

    def run(f, *inputs):
        inputs = [x.clone().requires_grad_() for x in inputs]
        out = f(*inputs[:2], cos, sin, *((*inputs[2:], 1e-6) if normed else ()))
        return *out, *torch.autograd.grad(out, inputs[: 4 if normed else 2], [g.to(out[0].dtype) for g in grads])

    ours, exact = run(kernels.norm_rope, q, k, *weights), run(expected, *(x.double() for x in (q, k, *weights)))
    kernels.INTERPRET = False
    try:
        theirs = run(kernels.norm_rope, q, k, *weights)
    finally:
        kernels.INTERPRET = True
    assert all(close(a, b, 1e-4) and close(c, b, 1e-4) for a, b, c in zip(ours, exact, theirs))
    assert normed or all(same(a, b) for a, b in zip(ours[:2], theirs))  # then there is no sum
    fused = torch.cat((torch.full((N, 1, D), torch.nan), q, k, torch.full((N, 2, D), torch.inf)), 1)
    views = fused[:, 1 : 1 + heads], fused[:, 1 + heads : -2]
    norms = (*weights, 1e-6) if normed else ()
    assert all(same(a, b) for a, b in zip(kernels.norm_rope(*views, cos, sin, *norms), ours))
    last = kernels.norm_rope(q[-1:], k[-1:], cos[-1:], sin[-1:], *norms)
    assert all(same(a, b[-1:]) for a, b in zip(last, ours))


@pytest.mark.parametrize("shape", [(1, 1), (3, 1500), (2, 3, 64), (0, 8)])
def test_swiglu_is_right_forward_and_backward_on_halves_of_one_tensor(shape):
    both = torch.randn(*shape[:-1], 2 * shape[-1]) * 5
    gate, up = (x.requires_grad_() for x in both.chunk(2, -1))
    grad = torch.randn(shape)
    out = kernels.swiglu(gate, up)
    x, y = gate.detach().double().requires_grad_(), up.detach().double().requires_grad_()
    expected = F.silu(x) * y
    assert close(out, expected)
    ours, theirs = torch.autograd.grad(out, (gate, up), grad), torch.autograd.grad(expected, (x, y), grad.double())
    assert all(close(a, b, 1e-4) for a, b in zip(ours, theirs))


def test_row_sums_are_right_and_a_row_is_alone():
    for R, C in ((1, 1), (3, 70), (2, 5000), (0, 4)):
        x = torch.randn(R, C, dtype=torch.float64)
        out = kernels.row_sums(x)
        assert out.dtype == torch.float64 and close(out, x.sum(1), 1e-9)
        assert all(torch.equal(kernels.row_sums(x[i : i + 1]), out[i : i + 1]) for i in range(R))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_a_bit_sum_is_the_sum_of_int64_products_and_sees_every_bit(dtype):
    for R, C in ((1, 1), (5000, 1), (7, 1500), (0, 4)):
        x = torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max, (R, C), dtype=dtype)
        rows, columns = (torch.randint(-(2**62), 2**62, (n,)) | 1 for n in x.shape)
        found = kernels.bit_sum(x, rows, columns)
        assert found == ((x * columns).sum(1) * rows).sum()
        assert R == 0 or kernels.bit_sum(x ^ 1, rows, columns) != found


def test_sums_and_means_in_plain_torch_have_one_order_too_such_as_a_biass_gradient():
    """Torch's own kernels cut them for the number of SMs, and by how many there are."""
    x, w, bias, grad = (torch.randn(*shape).to(bf16) for shape in ((300, 40), (70, 40), (70,), (300, 70)))
    many, one = torch.randn(3000, 40, dtype=torch.float64), torch.randn(1000)
    theirs = many.sum(0)
    kernels.enable_batch_invariant()
    try:
        _, (*_, d_bias) = run_in(F.linear, (x, w, bias), [grad])
        _, (*_, d_cut) = run_in(lambda *args: kernels.SplitLinear.apply(*args, 2), (x, w, bias), [grad])
        whole, mean = many.sum(0), one.mean()
        assert all(torch.equal(many[:, i : i + n].sum(0), whole[i : i + n]) for i, n in ((0, 1), (7, 20)))
    finally:
        kernels.disable_batch_invariant()
    assert torch.equal(d_bias, d_cut) and rounded_once(d_bias, grad.double().sum(0))
    assert same(mean, (kernels.row_sums(one.double()[None]) / 1000).float()[0])
    assert torch.equal(whole, kernels.row_sums(many.t())) and not torch.equal(whole, theirs)


# ---- attention


@pytest.mark.parametrize("heads,kv_heads,D", [(2, 2, 64), (6, 2, 64), (8, 1, 128)])
def test_attention_is_right_forward_and_backward(heads, kv_heads, D):
    lengths = [5, 0, 64, 1, 70]
    q, k, v = (x.requires_grad_() for x in qkv(sum(lengths), heads, kv_heads, D))
    grad = torch.randn(q.shape)
    out = kernels.attention(q, k, v, kernels.packed_plan(lengths), 0.2)
    expected = reference(q, k, v, lengths, 0.2)
    assert close(out, expected)
    ours, theirs = (torch.autograd.grad(x, (q, k, v), grad.to(x.dtype)) for x in (out, expected))
    assert all(close(a, b, 1e-4) for a, b in zip(ours, theirs))


def test_attention_sees_no_tile_of_rows_and_takes_packs_without_tokens(monkeypatch):
    q, k, v = (x.requires_grad_() for x in qkv(75, 3, 1, 64))

    def run(lengths=(5, 70)):
        out = kernels.attention(q, k, v, kernels.packed_plan(lengths), 0.2)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), out.detach())

    whole = run()
    assert all(same(a, b) for a, b in zip(run(torch.tensor([[5, 9], [70, 9]])[:, 0]), whole))
    monkeypatch.setattr(kernels, "_attention_config", lambda *_: dict(ROWS=64, KEYS=16))  # in place of 16
    assert all(same(a, b) for a, b in zip(run(), whole))
    for lengths in ([0], [0, 0]):
        q, k, v = (x.requires_grad_() for x in qkv(0, 3, 1, 64))
        out = kernels.attention(q, k, v, kernels.packed_plan(lengths), 0.2)
        assert [g.shape[0] for g in torch.autograd.grad(out.sum(), (q, k, v))] == [0, 0, 0]


def test_tokens_with_one_prefix_have_one_row():
    attend_with_shared_rows((2, 1, 64))


def test_attention_takes_what_the_copy_engine_does_not():
    inputs = qkv(33, 2, 1, 64)
    out = kernels.attention(*inputs, kernels.packed_plan([33]), 0.2)
    odd = [F.pad(x.flatten(1), (1, 2))[:, 1:-2].unflatten(1, x.shape[1:]) for x in inputs]  # rows, and where they begin
    one = [x[:1] for x in odd]  # a row, whose stride says nothing
    assert same(kernels.attention(*odd, kernels.packed_plan([33]), 0.2), out)
    assert same(kernels.attention(*one, kernels.packed_plan([1]), 0.2), out[:1])


def test_packed_training_equals_prefill_equals_any_chunking_equals_decode(monkeypatch):
    monkeypatch.setattr(kernels, "SPLIT", 128)  # so that short sequences have several
    # decode has smaller tiles than the rest, as on a GPU
    monkeypatch.setattr(kernels, "_attention_config", lambda dtype, rows, *_: dict(ROWS=rows // 4, KEYS=64))
    sequences = Sequences([150, 3, 64, 65, 1], 6, 2, 64)
    for how, steps in sequences.steps((19, 64, 100)).items():
        assert all(same(*sequences.step(step)) for step in steps), how
    assert same(*sequences.step([(2, 0, 64), (0, 100, 101), (1, 1, 1)]))  # a sequence without a new token
    assert same(*sequences.step([(1, 0, 2), (4, 1, 1)]))  # as many tokens as sequences, and yet no decode step
    monkeypatch.setattr(kernels, "DECODE_PROGRAMS", 1)  # decode of a large batch: a program takes all splits of a row
    assert same(*sequences.step([(0, 149, 150), (3, 64, 65), (4, 0, 1)]))


def test_decode_within_and_beyond_the_first_split_of_the_real_size_equals_prefill():
    sequences = Sequences([90, 3], 2, 1, 64)
    assert same(*sequences.step([(0, 89, 90), (1, 2, 3)]))  # a table of one split: nothing to merge
    sequences = Sequences([1090], 1, 1, 64)
    assert all(same(*sequences.step([(0, i, i + 1)])) for i in (1023, 1024, 1089))
    assert same(*sequences.step([(0, 1000, 1090)]))


def test_a_moved_split_boundary_is_caught(monkeypatch):
    """The negative control of the two tests above."""
    monkeypatch.setattr(kernels, "SPLIT", 128)
    sequences = Sequences([150, 80], 2, 1, 64)
    monkeypatch.setattr(kernels, "SPLIT", 64)
    assert not same(*sequences.step([(0, 149, 150)])) and not same(*sequences.step([(0, 0, 150)]))
    monkeypatch.setattr(kernels, "SPLIT", 128)
    monkeypatch.setattr(kernels, "_attention_config", lambda *_: dict(ROWS=16, KEYS=32))
    assert not same(*sequences.step([(0, 149, 150)]))


def test_a_gradient_sees_neither_the_other_sequences_nor_where_it_is_in_the_pack():
    lengths, first = [70, 33, 80], [0, 70, 103]
    q, k, v = (x.requires_grad_() for x in qkv(183, 3, 1, 64))
    grad = torch.randn(183, 3, 64)

    def grads(order):
        rows = torch.cat([torch.arange(first[i], first[i] + lengths[i]) for i in order])
        x, y, z = (t[rows].detach().requires_grad_() for t in (q, k, v))
        out = kernels.attention(x, y, z, kernels.packed_plan([lengths[i] for i in order]), 0.2)
        parts = [g.split([lengths[i] for i in order]) for g in torch.autograd.grad(out, (x, y, z), grad[rows])]
        return {i: [p[j] for p in parts] for j, i in enumerate(order)}

    together = grads([0, 1, 2])
    for order in ([2, 0, 1], [1], [2]):
        assert all(same(a, b) for i, parts in grads(order).items() for a, b in zip(parts, together[i]))


TILES = (16, 16), (16, 32), (32, 64), (64, 16)  # rows of a tile, and keys of one of dK and dV


def in_tiles(k, groups, rows, keys, others=1.0, dtype=torch.float32):
    """Output and gradients of a sequence of 70 tokens between two others, which are multiplied by `others`."""
    torch.manual_seed(groups)
    q, key, v, grad = (torch.randn(110, heads, 64).to(dtype) for heads in (groups, 1, 1, groups))
    for x in (q, key, v, grad):
        x[:20], x[90:] = x[:20] * others, x[90:] * others
    k._attention_config = lambda *args: dict(ROWS=rows, KEYS=keys if len(args) > 4 else 16)
    inputs = [x.requires_grad_() for x in (q, key, v)]
    out = k.attention(*inputs, k.packed_plan([20, 70, 20]), 0.2)
    return [x[20:90].detach() for x in (out, *torch.autograd.grad(out, inputs, grad))]


@functools.cache
def in_first_tiles(groups):
    return in_tiles(kernels, groups, *TILES[0])


def differing_tiles(k, groups, tiles):
    """Yields the tile sizes whose results are not those of kernels.py's first, and if rows beside it were NaN."""
    for size, others in itertools.product(tiles, (torch.nan, 1.0)):
        if not all(map(same, in_tiles(k, groups, *size, others), in_first_tiles(groups))):
            yield size, others


@pytest.mark.parametrize("groups", [1, 4, 5])
def test_a_gradient_sees_neither_the_size_of_the_tiles_nor_what_lies_beside_its_sequence(groups, monkeypatch):
    monkeypatch.setattr(kernels, "_attention_config", kernels._attention_config)
    assert [*differing_tiles(kernels, groups, TILES)] == []


MASKED = "if first + KEYS > seen:\n"
EDGES = (
    (MASKED + " " * 16 + "s", "if first > seen:\n" + " " * 16 + "s"),  # forward's mask begins a tile too late
    (MASKED + " " * 12 + "p", "if first > seen:\n" + " " * 12 + "p"),  # that of dq
    ("(first < (first_key + KEYS - 1) * GROUPS)", "(first < first_key * GROUPS)"),  # that of dk and dv ends too early
    (" | (first + ROWS > rows)", ""),  # and is not there at the end of a sequence
    ("range(first_key * GROUPS // ROWS * ROWS", "range((first_key * GROUPS // ROWS + 1) * ROWS"),  # no first tile
    ("_key_tile(v, start, kv_len,", "_key_tile(v, start, kv_len + 1,"),  # forward reads a value past the sequence
    ("_key_tile(v, start, kv_len,", "_key_tile(v, start, kv_len - 1,"),  # and does not read its last
    ("_key_tile(k, start, length,", "_key_tile(k, start, length + 1,"),  # dq reads a key past it
    ("_key_tile(k, start, length,", "_key_tile(k, start, length - 1,"),
)


@pytest.mark.parametrize("edge", EDGES)
def test_a_wrong_edge_of_the_tiles_is_caught(edge, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "_attention_config", kernels._attention_config)
    assert any(differing_tiles(mutant(tmp_path, edge), 4, TILES[1:3]))


def test_the_same_plan_replays_with_the_lengths_and_pages_its_tensors_then_hold():
    """As a captured graph does: the tensors are written in place, and no number was read when the plan was made."""
    q, k, v = qkv(100, 2, 1, 64)
    out = kernels.attention(q, k, v, kernels.packed_plan([100]), 0.2)
    kv_lens, table, requests = torch.tensor([10, 1]), torch.zeros(3, 100, dtype=torch.int32), torch.tensor([0, 0])
    plan = kernels.paged_plan(torch.tensor([1, 1]), kv_lens, table, requests)
    for at, request in ((4, 1), (99, 2)):
        kv_lens[:], table[request], requests[:] = torch.tensor([at + 1, 1]), torch.arange(100), request
        assert same(kernels.attention(q[[at, 0]], k, v, plan, 0.2), out[[at, 0]])


def test_what_attention_cannot_do_is_refused_by_name():
    plan = kernels.packed_plan([3])
    for heads, kv_heads, D, scale, word in (
        (2, 1, 32, 1, "head dims 32"),
        (9, 1, 64, 1, "9 query"),
        (2, 1, 64, 0, "scale=0"),
    ):
        with pytest.raises(ValueError, match=word):
            kernels.attention(*qkv(3, heads, kv_heads, D), plan, scale)
    with pytest.raises(ValueError, match="float16"):
        kernels.attention(*(x.half() for x in qkv(3, 2, 1, 64)), plan, 1)
    with pytest.raises(ValueError, match="torch.float64 on cpu beside torch.float32"):
        kernels.matmul(torch.randn(2, 2), torch.randn(2, 2).double())
    x, y, z = (t.requires_grad_() for t in qkv(1, 1, 1, 64))
    one = torch.ones(1, dtype=torch.long)
    out = kernels.attention(x, y, z, kernels.paged_plan(one, one, one[None], one * 0), 1)
    with pytest.raises(ValueError, match="paged_plan has no gradient"):
        out.sum().backward()


# ---- the sampler's noise


def draws():
    """Of each kind, (logprobs, seeds, positions) and the tokens."""
    for B, V in ((3, 1), (40, 98), (20, 2500), (1, 151_936), (0, 98)):
        logprobs = torch.log_softmax(torch.randn(B, V) * 3, -1)
        logprobs[:, 1::7] = float("-inf")
        args = logprobs, torch.randint(-(2**63), 2**63 - 1, (B,)), torch.randint(0, 2**31, (B,))
        yield args, plain_draw(*args)
    yield from (ties(), *map(ends, ENDS))


@pytest.fixture
def large_blocks(monkeypatch):
    """A draw sees no block: there is nothing to add. The interpreter takes its time for each."""
    monkeypatch.setattr(kernels, "ELEMENTS", 32_768)


def test_a_draw_is_that_of_the_plain_formula_and_of_the_cpus_loop(large_blocks, monkeypatch):
    for args, tokens in draws():
        assert torch.equal(kernels.draw(*args), tokens)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "INTERPRET", False)
            assert torch.equal(kernels.draw(*args), tokens)


def test_a_draw_is_the_same_in_blocks_of_any_size_and_for_a_row_alone(monkeypatch):
    for args, tokens in (ties(), *list(draws())[2:3]):
        for size in (16, 1024, 4096):
            monkeypatch.setattr(kernels, "ELEMENTS", size)
            rows = slice(5) if size > 16 else slice(1, 2)
            assert torch.equal(kernels.draw(*(x[rows] for x in args)), tokens[rows])


@pytest.mark.parametrize(
    "change",
    [
        ("0xFFFFFFFE)\n", "0xFFFFFFFF)\n"),
        ("tl.minimum(-tl.log(u), 1.7976931348623157e308)", "-tl.log(u)"),
        ("tl.min(tl.where(score == top, c, V), 0)", "tl.max(tl.where(score == top, c, 0), 0)"),
        ('tl.where(score == score, score, float("inf"))', "score"),
        ("seed >> 32", "seed >> 31"),
        ("c < V, other", "c < V - 1, other"),
    ],
)
def test_a_wrong_draw_is_caught(change, large_blocks, tmp_path):
    changed = mutant(tmp_path, change)
    changed.ELEMENTS = 32_768
    assert not all(torch.equal(changed.draw(*args), tokens) for args, tokens in draws())


# ---- sampling rules, and the head and the embedding


def test_a_rule_keeps_what_the_cpus_loop_keeps_whatever_the_block(monkeypatch):
    for lanes in (128, 4096):
        monkeypatch.setattr(kernels, "LANES", lanes)
        assert cuts_are_right(kernels)


@pytest.mark.parametrize(
    "change",
    [
        ("(n + before < most)", "(n + before <= most)"),
        ("(mass + before * masses < enough)", "(mass + before * masses <= enough)"),
        ("bits = (x + 0.0).to", "bits = x.to"),
        ("tl.cumsum(last, 0) - last", "tl.cumsum(last, 0, reverse=True) - last"),
        ("        n += tl.sum(last, 0)\n", ""),
        ("tl.load(rules + 2))) - 1", "tl.load(rules + 2)))"),
    ],
)
def test_a_wrong_rule_is_caught(change, tmp_path):
    changed = mutant(tmp_path, change)
    changed.LANES = 64
    assert not cuts_are_right(changed)


@pytest.mark.parametrize("rule", [(1.0,), (0.7,), (0.7, 0.9, 20, 0.02)], ids=str)
def test_token_logprobs_are_right_and_equal_the_samplers(rule, monkeypatch):
    N = 7 if rule[1:] else 20  # the interpreter takes a second for what a rule keeps of a row
    monkeypatch.setattr(kernels, "CHUNK", N // 2)  # several chunks, whose weight gradients are one chain
    temperature = rule[0]
    hidden, weight = torch.randn(N, 16, requires_grad=True), torch.randn(98, 16, requires_grad=True)
    targets, grad, bonus = torch.randint(98, (N,)), torch.randn(N), torch.randn(N)
    logits = kernels.head_logits(hidden.detach(), weight.detach()) / torch.tensor(temperature)
    if rule[1:]:
        kernels.cut(logits, torch.tensor([rule[1:]]).repeat(N, 1))
        targets = kernels.log_softmax(logits, -1, False).exp().multinomial(1)[:, 0]  # kept ones
    logprobs, entropy = kernels.token_logprobs(hidden, weight, targets, *rule)
    sampler = kernels.log_softmax(logits, -1, False)
    assert same(sampler.gather(1, targets[:, None])[:, 0], logprobs.detach())
    assert same(kernels.log_softmax(logits[5:6], 1, False), sampler[5:6])
    out = logits == -torch.inf
    logp = torch.log_softmax((hidden.double() @ weight.double().t() / temperature).masked_fill(out, -torch.inf), -1)
    expected = logp.gather(1, targets[:, None])[:, 0]
    expected_entropy = -(logp.exp() * logp.masked_fill(out, 0)).sum(-1)
    assert close(logprobs, expected) and close(entropy, expected_entropy)
    one, _ = kernels.token_logprobs(hidden[5:6], weight, targets[5:6], *rule)
    assert same(one.detach(), logprobs[5:6].detach())
    for ours, theirs in (
        ((logprobs * grad).sum(), (expected * grad).sum()),
        ((logprobs * grad + entropy * bonus).sum(), (expected * grad + expected_entropy * bonus).sum()),
    ):
        ours, theirs = (torch.autograd.grad(x, (hidden, weight), retain_graph=True) for x in (ours, theirs))
        assert all(close(a, b, 1e-4) for a, b in zip(ours, theirs))


def test_log_softmax_takes_masked_logits_and_other_shapes():
    x = torch.randn(2, 3, 40)
    x[0, 0, 5] = float("-inf")
    assert close(kernels.log_softmax(x, -1, False), torch.log_softmax(x, -1))
    with pytest.raises(ValueError, match="dim=0"):
        kernels.log_softmax(x, 0, False)


@pytest.mark.parametrize("N", [0, 1, 40])
def test_the_embeddings_gradient_adds_in_token_order(N):
    grad, ids = torch.randn(N, 33), torch.randint(5, (N,))
    expected = torch.zeros(7, 33)
    for i, g in zip(ids.tolist(), grad):
        if i != 3:
            expected[i] += g
    ours = kernels.embedding_backward(grad, ids, 7, 3, False)
    assert same(ours, expected)
    if N > 1:
        assert not same(kernels.embedding_backward(grad.flip(0), ids.flip(0), 7, 3, False), ours)


# ---- bfloat16, in which a GPU computes, on a card with TMA and on one without; and the optimizer


bf16 = torch.bfloat16


@pytest.fixture(params=[(9, 0), (8, 6)], ids=str)
def card(request, monkeypatch):
    """Its tiles, and how they are loaded."""
    monkeypatch.setattr(kernels, "card", lambda _: kernels.CARDS[request.param])
    return kernels.CARDS[request.param]


def rounded_once(ours, exact, slack=1e-6):
    """Whether `ours` is `exact` (float64) rounded to the nearest bfloat16; slack: of float32's sums, by the largest."""
    _, exponent = torch.frexp(exact)
    half = torch.ldexp(torch.ones_like(exact), exponent - 9)  # of the last of 8 bits
    bound = half + slack * exact.abs().amax() if len(exact) else half
    return ours.dtype == bf16 and ours.shape == exact.shape and bool(((ours.double() - exact).abs() <= bound).all())


def run_in(f, inputs, grads):
    """(outputs, gradients of the inputs)."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = f(*inputs)
    out = out if isinstance(out, tuple) else (out,)
    return [x.detach() for x in out], torch.autograd.grad(out, inputs, [g.to(out[0].dtype) for g in grads])


@pytest.mark.parametrize("M,N,K", [(5, 130, 16), (70, 33, 100), (130, 72, 64)])
@pytest.mark.parametrize("layout", ["NT", "TN"])
def test_a_matmul_of_bfloat16_is_rounded_once_and_its_rows_are_alone(card, M, N, K, layout):
    a = torch.randn(M, K).to(bf16) if layout[0] == "N" else torch.randn(K, M).to(bf16).t()
    b = torch.randn(K, N).to(bf16) if layout[1] == "N" else torch.randn(N, K).to(bf16).t()
    bias, exact, whole = torch.randn(N).to(bf16), a.double() @ b.double(), kernels.matmul(a, b)
    sums = kernels.matmul(a, b, out_dtype=torch.float32)
    assert rounded_once(whole, exact) and close(sums, exact, 1e-4) and torch.equal(whole, sums.to(bf16))
    assert all(torch.equal(kernels.matmul(a[i : i + n], b), whole[i : i + n]) for i, n in ((0, 1), (2, 3), (M - 1, 1)))
    assert rounded_once(kernels.addmm(bias, a, b), exact + bias.double())
    assert not rounded_once(whole + bias, exact + bias.double())  # twice
    assert not rounded_once((sums.view(torch.int32) & ~0xFFFF).view(torch.float32).to(bf16), exact)  # cut off


def test_every_tile_of_bfloat16_gives_the_same_bits_by_the_copy_engine_and_by_pointers(monkeypatch):
    x, w = torch.randn(70, 128).to(bf16), torch.randn(96, 128).to(bf16)
    whole = kernels.matmul(x, w.t(), out_dtype=torch.float32)
    for capability, config in itertools.product(((9, 0), (8, 6)), kernels.TILES):
        monkeypatch.setattr(kernels, "card", lambda _: kernels.CARDS[capability])
        monkeypatch.setattr(kernels, "_matmul_config", lambda *_: config)
        assert same(kernels.matmul(x[3:20], w.t(), out_dtype=torch.float32), whole[3:20])


def test_a_norm_of_bfloat16_is_rounded_once_after_its_residual_was():
    x, residual, w, grad = (torch.randn(*shape).to(bf16) for shape in ((70, 192), (70, 192), (192,), (70, 192)))

    def exact(s, w):
        return s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + 1e-6) * w

    y, s = kernels.rms_norm(x, w, 1e-6, residual)
    assert torch.equal(s, x + residual) and rounded_once(y, exact(s.double(), w.double()))
    assert not rounded_once(y, exact(x.double() + residual.double(), w.double()))
    (ours,), grads = run_in(lambda s, w: kernels.rms_norm(s, w, 1e-6), (s, w), [grad])
    (right,), right_grads = run_in(exact, (s.double(), w.double()), [grad])
    assert torch.equal(ours, y) and all(map(rounded_once, (ours, *grads), (right, *right_grads)))
    assert torch.equal(kernels.rms_norm(s[7:8], w, 1e-6), y[7:8])


@pytest.mark.parametrize("normed", [True, False])
def test_a_turn_of_bfloat16_is_rounded_once_with_its_norm(normed):
    q, k, *weights = (torch.randn(*shape, 64).to(bf16) for shape in ((70, 3), (70, 1), (), ()))
    cos, sin = kernels.rope_table(1.0 / 10000 ** (torch.arange(0, 64, 2) / 64), torch.arange(3, 73))
    inputs, grads = (q, k, *weights) if normed else (q, k), [torch.randn_like(q), torch.randn_like(k)]

    def norm(x, w):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w

    def turn(x):
        (x1, x2), c, s = x.double().chunk(2, -1), cos.double()[:, None], sin.double()[:, None]
        return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1)

    def exact(q, k, *weights):
        return tuple(turn(norm(x, *w) if w else x) for x, *w in zip((q, k), *([weights] if weights else [])))

    def ours(q, k, *weights):
        return kernels.norm_rope(q, k, cos, sin, *weights, *([1e-6] if weights else []))

    found, right = run_in(ours, inputs, grads), run_in(exact, [x.double() for x in inputs], grads)
    assert all(map(rounded_once, (*found[0], *found[1]), (*right[0], *right[1])))
    if normed:  # as if the norm were an operator of its own
        assert not rounded_once(turn(norm(q.double(), weights[0].double()).to(bf16)).to(bf16), right[0][0])


def test_swiglu_of_bfloat16_is_rounded_once():
    gate, up, grad = (torch.randn(33, 1100).mul(3).to(bf16) for _ in range(3))
    (ours,), grads = run_in(kernels.swiglu, (gate, up), [grad])
    (right,), right_grads = run_in(lambda g, u: F.silu(g) * u, (gate.double(), up.double()), [grad])
    assert all(map(rounded_once, (ours, *grads), (right, *right_grads)))
    assert not rounded_once(F.silu(gate) * up, right)  # torch's, which rounds the silu


def error(a, b):
    """|a - b| / |b|, of all numbers together."""
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("groups,D", [(3, 64), (4, 128)])
def test_attention_of_bfloat16_is_right_forward_and_backward(card, groups, D):
    lengths = [5, 0, 70, 1, 150]
    q, k, v = (x.to(bf16) for x in qkv(sum(lengths), 2 * groups, 2, D))
    grad = torch.randn(q.shape).to(bf16)
    plan, scale = kernels.packed_plan(lengths), D**-0.5
    (ours,), grads = run_in(lambda *x: kernels.attention(*x, plan, scale), (q, k, v), [grad])
    inputs = [x.double() for x in (q, k, v)]
    (right,), right_grads = run_in(lambda *x: reference(*x, lengths, scale), inputs, [grad])
    (other,), _ = run_in(lambda *x: reference(*x, lengths, scale * 1.05), inputs, [grad])
    bound = 4e-3  # probabilities and results are bfloat16, half of whose last bit is 2^-9 = 2e-3 on an average
    assert error(ours, right) < bound < error(other, right)
    assert all(error(a, b) < 2 * bound for a, b in zip(grads, right_grads))


def test_a_gradient_of_bfloat16_sees_neither_the_tiles_nor_the_card_nor_what_lies_beside_it(card, monkeypatch):
    monkeypatch.setattr(kernels, "_attention_config", kernels._attention_config)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "card", lambda _: kernels.CARDS[9, 0])
        first = in_tiles(kernels, 4, *TILES[0], dtype=bf16)
    for size in TILES[1:3]:
        assert all(map(torch.equal, in_tiles(kernels, 4, *size, torch.nan, bf16), first)), size


PAST_THE_END = (
    ("mask=(at < length)[:, None]", "mask=(at < length + 1)[:, None]"),
    ("mask=(at < length)[:, None]", "mask=(at < length - 1)[:, None]"),
    ("(start + at).to(tl.int64) * x_s", "(start + at + 1).to(tl.int64) * x_s"),
)


@pytest.mark.parametrize("edge", PAST_THE_END)
def test_a_wrong_edge_of_keys_read_by_pointers_is_caught(edge, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "_attention_config", kernels._attention_config)
    changed = mutant(tmp_path, edge)
    changed.card = lambda _: kernels.CARDS[8, 6]
    assert any(differing_tiles(changed, 4, TILES[:1]))


def test_packed_training_equals_prefill_equals_chunks_equals_decode_in_bfloat16(card, monkeypatch):
    monkeypatch.setattr(kernels, "SPLIT", 128)
    sequences = Sequences([150, 3, 70], 4, 2, 64, bf16)
    steps = sequences.steps((64,))
    for step in (*steps["prefill"][:1], *steps["chunks"], *steps["decode"][:4]):
        assert torch.equal(*sequences.step(step)), step
    monkeypatch.setattr(kernels, "SPLIT", 64)
    assert not torch.equal(*sequences.step([(0, 100, 150)]))  # the comparison can fail


def test_log_probs_of_bfloat16_are_the_samplers_and_right_with_their_gradients(monkeypatch):
    monkeypatch.setattr(kernels, "CHUNK", 8)
    hidden, weight = torch.randn(20, 64).to(bf16), (torch.randn(98, 64) / 8).to(bf16)
    targets, grad, t = torch.randint(98, (20,)), torch.randn(20), 0.7
    found = run_in(lambda h, w: kernels.token_logprobs(h, w, targets, t)[0], (hidden, weight), [grad])

    def exact(h, w):
        return torch.log_softmax(h @ w.t() / t, -1).gather(1, targets[:, None])[:, 0]

    (ours,), grads = found
    (right,), right_grads = run_in(exact, (hidden.double(), weight.double()), [grad])
    assert close(ours, right) and not close(exact(hidden, weight), right, 1e-3)  # with logits in bfloat16
    assert all(error(a, b) < 4e-3 for a, b in zip(grads, right_grads))
    logits = kernels.head_logits(hidden, weight) / torch.tensor(t)
    assert same(kernels.log_softmax(logits, -1, False).gather(1, targets[:, None])[:, 0], ours)
    (alone,), _ = run_in(
        lambda h, w: kernels.token_logprobs(h, w, targets[13:14], t)[0], (hidden[13:14], weight), [grad[:1]]
    )
    assert same(alone, ours[13:14])


def test_a_merge_and_an_embeddings_gradient_of_bfloat16_are_rounded_once():
    weight, A, B = torch.randn(70, 40).to(bf16), torch.randn(4, 40), torch.randn(70, 4)
    assert rounded_once(kernels.merge(weight, A, B, 1.5), weight.double() + 1.5 * (B.double() @ A.double()))
    grad, ids = torch.randn(60, 33).to(bf16), torch.arange(60) % 3
    sums = grad.view(20, 3, 33)  # ids by column
    assert rounded_once(kernels.embedding_backward(grad, ids, 3, -1, False), sums.double().sum(0))
    assert not rounded_once(functools.reduce(torch.add, sums), sums.double().sum(0))  # rounded at each token


@pytest.mark.parametrize("r", [4, 16])
def test_adapters_beside_bfloat16_have_the_gradients_of_float32(r):
    x, weight, grad = (torch.randn(*shape).to(bf16) for shape in ((150, 40), (70, 40), (150, 70)))
    A, B = (torch.randn(*shape).requires_grad_() for shape in ((r, 40), (70, r)))
    found = torch.autograd.grad(kernels.LoRALinear.apply(x, weight, None, A, B, 0.5), (A, B), grad)
    g = 0.5 * grad.double().t() @ x.double()
    right = B.double().t() @ g, g @ A.double().t()
    assert all(x.is_contiguous() and error(x, y) < 1e-6 for x, y in zip(found, right))
    assert all(error(x.to(bf16), y) > 1e-4 for x, y in zip(found, right))
    assert error(g @ A.to(bf16).double().t(), right[1]) > 1e-4  # with its first eight bits alone


# ---- mixtures of experts


def mixture(dtype, N=24, C=24, E=6, width=20):
    """Operands, of which the second expert's router is the first's and the last's is never chosen; a gradient."""
    torch.manual_seed(0)
    x, router, gate_up, down, grad = (
        torch.randn(*shape).mul(0.5) for shape in ((N, C), (E, C), (E, 2 * width, C), (E, C, width), (N, C))
    )
    x[:, 0] = 1
    router *= 0.2
    router[1], router[2, 0], router[-1, 0] = router[0], 1, -2  # the third takes all tokens
    return [t.to(dtype) for t in (x, router, gate_up, down, grad)]


def tiny_blocks(k, tile=(16, 16, 16, 4, 2)):
    """A module with many blocks, and several tiles of an expert's rows."""
    k.LANES = k.ELEMENTS = 16
    k._matmul_config = lambda *_: tile
    return k


def mixed(k, x, router, gate_up, down, grad):
    """Output and gradients, the router's last."""
    inputs = [t.detach().requires_grad_() for t in (x, gate_up, down, router)]
    out = k.moe(inputs[0], inputs[3], *inputs[1:3], 3)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


@functools.cache
def mixed_in_parts(dtype):
    """(output, gradients of gate_up and down) expert by expert and slot by slot, by the operators of a dense MLP."""
    x, router, gate_up, down, grad = mixture(dtype)
    z, experts = kernels.matmul(x, router.t(), torch.float32).sort(dim=1, stable=True, descending=True)
    p = torch.from_numpy(np.exp((z - z[:, :1])[:, :3].numpy()))
    w = p / (p[:, 0] + p[:, 1] + p[:, 2])[:, None]
    y, d_gate_up, d_down = torch.zeros(*p.shape, x.shape[1]), [], []
    for e in range(len(router)):
        t, j = torch.where(experts[:, :3] == e)
        both = [u.contiguous().requires_grad_() for u in kernels.mm(x[t], gate_up[e].t()).chunk(2, 1)]
        hidden = kernels.swiglu(*both)
        y[t, j] = kernels.mm(hidden.detach(), down[e].t()).float()
        dy = (w[t, j][:, None] * grad[t].float()).to(dtype)
        d_down.append(kernels.mm(dy.t(), hidden.detach()))
        d_both = torch.autograd.grad(hidden, both, kernels.mm(dy, down[e]))
        d_gate_up.append(kernels.mm(torch.cat(d_both, 1).t(), x[t]))
    out = functools.reduce(lambda out, j: w[:, j, None] * y[:, j] + out, range(3), torch.zeros(x.shape))
    return out.to(dtype), torch.stack(d_gate_up), torch.stack(d_down)


@functools.cache
def right_gradients(dtype):
    """(output, gradients) of a plain loop in float64, the router's last."""
    *operands, grad = mixture(dtype)
    inputs = [t.double().requires_grad_() for t in operands]
    out = textbook_mixture(*inputs, 3)
    d_x, d_router, *d = torch.autograd.grad(out, inputs, grad.double())
    return out.detach(), d_x, *d, d_router


def is_right(k, dtype=torch.float32):
    """To the bit, as far as there is no sum of which the interpreter does not say the order."""
    _, experts = k.Choose.apply(-torch.full((1, 6), torch.nan), 3)
    if experts.tolist() != [[0, 1, 2]]:  # a row may hold anything, but not an expert that is none
        return False
    found = out, _, d_gate_up, d_down, _ = mixed(k, *mixture(dtype))
    bound = 2e-6 if dtype == torch.float32 else 1e-2
    if (
        d_down[-1].any()
        or d_gate_up[-1].any()
        or not all(map(torch.equal, (out, d_gate_up, d_down), mixed_in_parts(dtype)))
    ):
        return False
    return all(error(a, b) < bound for a, b in zip(found, right_gradients(dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, bf16], ids=str)
def test_a_mixture_is_its_parts_to_the_bit_and_right_with_all_gradients(dtype, card, tmp_path):
    assert is_right(kernels, dtype)
    changed = mutant(tmp_path)
    changed.card = kernels.card
    for tile in ((16, 16, 16, 4, 2), (64, 32, 32, 4, 2)):
        assert is_right(tiny_blocks(changed, tile), dtype)


def test_a_row_of_a_mixture_sees_neither_its_batch_nor_rows_of_nan_and_a_leaf_may_have_none():
    x, *weights, grad = mixture(torch.float32)
    out, dx, *_ = mixed(kernels, x, *weights, grad)
    order = torch.randperm(len(x))
    for rows in (order, order[:1], order[:7]):
        some = mixed(kernels, x[rows], *weights, grad[rows])
        assert same(some[0], out[rows]) and same(some[1], dx[rows])
    beside, *_ = mixed(kernels, x.index_fill(0, torch.tensor([0, 9, 23]), torch.nan), *weights, grad)
    assert same(beside[10:23], out[10:23])
    assert all(same(y, out) for y in among_ranks(kernels, (x, *weights), 3, 2)[0])
    out, dx, *d = mixed(kernels, x[:0], *weights, grad[:0])
    assert out.shape == dx.shape == (0, 24) and not any(g.any() for g in d)


LAST = (  # of equal logits
    ("<< 24) - i, -(1 << 62))", "<< 24) - (E - 1 - i), -(1 << 62))"),
    ("e = -tl.max(keys, 0) & 0xFFFFFF", "e = E - 1 - (-tl.max(keys, 0) & 0xFFFFFF)"),
)
ROUNDED = (  # to bfloat16, as elsewhere: the router's logits, and each expert's part of a token
    ("matmul(x, router.t(), torch.float32)", "matmul(x, router.t()).float()"),
    ("acc = tl.fma(tl.load(w + i), v, acc)", "acc += (tl.load(w + i) * v).to(out.dtype.element_ty).to(tl.float32)"),
)


@pytest.mark.parametrize(
    "change",
    [
        *ROUNDED,
        LAST,
        ("tl.where(i < E, (_rank", "tl.where(i < E + 1, (_rank"),  # an expert that is none, beside NaN
        ("tl.where(i == e, -(1 << 62), keys)", "tl.where(i > e, -(1 << 62), keys)"),  # one expert three times
        ("at + tl.cumsum(mine, 0) - mine", "at + tl.cumsum(mine, 0, reverse=True) - mine"),  # from the last token
        ("        at += tl.sum(mine, 0)\n", ""),
        ("x += pair // k * C", "x += pair % k * C"),
        ("tl.store(dots + pair, tl.sum(acc, 0))", "tl.store(dots + pair, tl.max(acc, 0))"),
        ("    tile -= tl.sum(tl.where(i < e, tiles, 0), 0)\n", ""),
        ("end = tl.load(starts + e + 1)", "end = tl.load(starts + e + 1) - 1"),
        ("K = (tl.load(starts + part + 1) - first)", "K = (tl.load(starts + part + 1) - first - 1)"),
        (
            "for i in range(row * k, (row + 1) * k):\n        v =",
            "for j in range(k):\n        i = row * k + k - 1 - j\n        v =",
        ),
    ],
)
def test_a_wrong_mixture_is_caught(change, tmp_path):
    changed = tiny_blocks(mutant(tmp_path, *(change if change is LAST else [change])))
    assert not is_right(changed, bf16 if change in ROUNDED else torch.float32)


def test_adamw_by_torch_as_on_a_gpu_moves_weights_as_the_cpus_loop_does(monkeypatch):
    w, grads = torch.randn(30, 20), torch.randn(5, 30, 20)

    def moved(path, b2=0.95):
        monkeypatch.setattr(kernels, "INTERPRET", path == "torch")
        monkeypatch.setattr(host, "share", share if path == "loop" else None)
        p = torch.nn.Parameter(w.clone())
        options = dict(lr=1e-2, betas=(0.9, b2), weight_decay=0.1, foreach=True)  # CUDA's default
        optimizer = kernels.adamw([dict(params=[p])], **options)
        optimizer.state[p] = dict(step=torch.tensor(0.0), exp_avg=torch.zeros_like(w), exp_avg_sq=torch.zeros_like(w))
        for g in grads:
            p.grad = g.clone()
            optimizer.step()
        return p.detach(), *(optimizer.state[p][name] for name in ("step", "exp_avg", "exp_avg_sq"))

    share = host.share
    torchs, ours, other = moved("torch"), moved("loop"), moved("torch", b2=0.951)
    bound = 1e-6  # some roundings of numbers of about 1
    assert all(torch.allclose(a, b, atol=bound, rtol=bound) for a, b in zip(torchs, ours))
    assert (ours[0] - w).abs().mean() > 1e-2 and (other[0] - ours[0]).abs().max() > 10 * bound
