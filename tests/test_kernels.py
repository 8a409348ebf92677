"""
The CPU's operators bit for bit: what a row's neighbours are, and how the work was cut, must not be seen in its result.
Beside it that they are right, in which order they add, what they refuse, and mutants of the loops, which are caught.

    pytest tests/test_kernels.py

Law L12 in test_laws.py has the same bits on other CPUs.
"""

import ast
import contextlib
import importlib.util
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
from decimal import Decimal, localcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import one_digest
import pytest
import torch
import torch.nn.functional as F

import kernels
from onecurve.cpu import host, loops

SHAPES = [  # K, N
    (128, 384),
    (384, 128),
    (128, 98),
    (33, 70),
    (1024, 256),
    (2560, 48),
]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    host.threads = 1
    kernels.disable_batch_invariant()


# ---- random tensors, and what is said of two results; triton_interpreted.py and test_triton.py take them from here


def exact(*shape):
    """Random float32 of 21 bits: their products, of which float32 rounds some, and few sums are exact in float64."""
    return torch.randint(-(2**20), 2**20, shape).float() / 2**20


def normal(*shapes, dtype=torch.float32):
    """Random tensors of these shapes."""
    return [torch.randn(shape).to(dtype) for shape in shapes]


def doubles(tensors):
    return [x.double() for x in tensors]


def leaves(tensors):
    """The same tensors as inputs whose gradients are wanted."""
    return [x.detach().requires_grad_() for x in tensors]


def rope(k, dim, positions):
    """(cos, sin) of a head of this size at these positions."""
    return k.rope_table(1e4 ** (-torch.arange(0, dim, 2) / dim), positions)


def bits(x):
    return x.flatten().view(torch.uint8)


def same(a, b):
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


def close(a, b, atol=1e-5, rtol=1e-5):
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), atol=atol, rtol=rtol)


def all_same(ours, theirs):
    return all(same(a, b) for a, b in zip(ours, theirs, strict=True))


def all_close(ours, theirs, atol=1e-5, rtol=1e-5):
    return all(close(a, b, atol, rtol) for a, b in zip(ours, theirs, strict=True))


def differing(f, whole, *places):
    """The places (first row, how many) where f of these rows alone is not what `whole` has there, to the bit."""
    found = []
    for first, count in places:
        rows = slice(first, first + count)
        if not same(f(rows), whole[rows]):
            found.append((first, count))
    return found


def gradients(out, inputs, grad):
    """Of the inputs, for those of the outputs, whose types these take; more may be asked for afterwards."""
    if isinstance(out, torch.Tensor):
        return gradients([out], inputs, [grad])
    grad = [g.to(y.dtype) for g, y in zip(grad, out, strict=True)]
    return torch.autograd.grad(out, inputs, grad, retain_graph=True)


def both_ways(f, inputs, *grads):
    """The outputs of f, and the gradients of its inputs."""
    inputs = leaves(inputs)
    out = f(*inputs)
    if isinstance(out, torch.Tensor):
        out = [out]
    found = gradients(out, inputs, grads)
    return [*(y.detach() for y in out), *found]


# ---- the same in float64, as a textbook has it


def matmul64(a, b):
    return a.double() @ b.double()


def textbook_norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def textbook_rope(x, cos, sin):
    x1, x2 = x.chunk(2, -1)
    c = cos[:, None]
    s = sin[:, None]
    return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1)


def textbook_swiglu(gate, up):
    return F.silu(gate) * up


def textbook_logprobs(hidden, weight, targets, temperature, kept):
    """(log-probs of the targets, entropies) over the columns of each row that are kept."""
    z = matmul64(hidden, weight.t()) / temperature
    logp = torch.log_softmax(z.masked_fill(~kept, -torch.inf), -1)
    entropy = -(logp.exp() * logp.masked_fill(~kept, 0)).sum(1)
    return logp.gather(1, targets[:, None])[:, 0], entropy


def textbook_mixture(x, router, gate_up, down, k):
    """Token by token; of equal logits the first."""
    out = []
    for token in x:
        z = router @ token
        experts = sorted(range(len(z)), key=lambda e: (-z[e].item(), e))[:k]
        w = z[experts].softmax(0)
        total = 0
        for wj, e in zip(w, experts):
            hidden = textbook_swiglu(*(gate_up[e] @ token).chunk(2))
            total = total + wj * (down[e] @ hidden)
        out.append(total)
    return torch.stack(out)


def reference(q, k, v, lengths, scale):
    """Attention, sequence by sequence."""
    groups = q.shape[1] // k.shape[1]
    out = []
    for own in zip(*(x.double().split(lengths) for x in (q, k, v))):
        x, y, z = (t.transpose(0, 1) for t in own)
        y = y.repeat_interleave(groups, 0)
        z = z.repeat_interleave(groups, 0)
        n = x.shape[1]
        later = torch.ones(n, n).triu(1).bool()
        scores = (x @ y.transpose(1, 2) * scale).masked_fill(later, -torch.inf)
        out.append((scores.softmax(-1) @ z).transpose(0, 1))
    return torch.cat(out)


# ---- linears


@pytest.mark.parametrize("K,N", SHAPES)
def test_rows_and_columns_of_mm_see_no_others_nor_the_threads(K, N, monkeypatch):
    monkeypatch.setattr(host, "WORTH_THREADS", 0)
    x, w = normal((300, K), (N, K))
    whole = kernels.mm(x, w.t())
    assert close(whole, matmul64(x, w.t()), 1e-3)
    counts = (*range(1, 34), 63, 64, 65, 100, 255)
    places = [(first, M) for M in counts for first in (0, 41)]
    for threads in (1, 2, 3):
        host.threads = threads
        assert not differing(lambda rows: kernels.mm(x[rows], w.t()), whole, *places), threads
    # the engine multiplies by q, k and v weights in one matrix, the trainer by each alone
    for columns in (slice(N // 2), slice(N // 2, N), slice(5, N - 1)):
        assert same(kernels.mm(x[:40], w[columns].t()), whole[:40, columns])


def test_torch_alone_is_not_row_invariant():
    """The negative control: torch's own matmul does not pass the test above."""
    x, w = normal((64, 1024), (512, 1024))
    assert differing(lambda rows: x[rows] @ w.t(), x @ w.t(), (0, 1), (0, 2), (0, 3))


def test_the_switch_makes_rows_of_linears_invariant_and_gives_torchs_back():
    layer = torch.nn.Linear(1024, 512)
    x, grad = normal((40, 1024), (40, 512))

    def run(M):
        """The output of the first M rows, their gradient, and the weight's as if the others had none."""
        rows = x[:M].clone().requires_grad_()
        out = layer(rows)
        return out.detach(), *gradients(out, (rows, layer.weight), grad[:M])

    theirs = run(40)
    kernels.enable_batch_invariant()
    kernels.enable_batch_invariant()  # twice is once
    ours = run(40)
    assert same(ours[1], kernels.mm(grad, layer.weight.detach()))
    assert same(ours[2], kernels.mm(grad.t(), x))
    for M in (1, 2, 3, 17):
        out, d_rows, _ = run(M)
        assert same(out, ours[0][:M])
        assert same(d_rows, ours[1][:M])
    assert not same(ours[0], theirs[0])  # which starts its sums with the bias
    kernels.disable_batch_invariant()
    assert all_same(run(40), theirs)


def test_a_merge_adds_the_scaled_product_and_is_rounded_once():
    A = exact(8, 70)
    B = exact(130, 8)
    for dtype in (torch.float32, torch.bfloat16):  # as a GPU has it
        weight = exact(130, 70).to(dtype)
        merged = kernels.merge(weight, A, B, 0.5)
        assert same(merged, (weight.float() + 0.5 * kernels.mm(B, A)).to(dtype))


def test_a_split_product_is_a_tree_of_chains_whoever_computes_which_parts():
    """The parts of 1, 2 and 4 ranks, of which each adds its own before it tells them the others."""
    x = exact(37, 96)
    weight = exact(70, 96)
    bias = exact(70)

    def shares(n):
        return list(zip(x.chunk(n, 1), weight.chunk(n, 1)))

    first, second, third, last = (kernels.mm(a, b.t()) for a, b in shares(4))
    right = (first + second) + (third + last)
    assert (right - matmul64(x, weight.t())).abs().max() < 1e-5
    for ranks in (1, 2, 4):
        split = 4 // ranks

        def gather(mine):
            sums = [kernels.split_matmul(a, b.t(), split) for a, b in shares(ranks)]
            assert any(same(mine, y) for y in sums)
            return torch.stack(sums)

        among = gather if ranks > 1 else None
        own = shares(ranks)[-1]
        assert same(kernels.linear(*own, None, split, among), right)
        assert same(kernels.linear(*own, bias, split, among), right + bias)
    assert not same(kernels.linear(x, weight, None), right)
    assert not same(((first + second) + third) + last, right)
    left, rest = (kernels.mm(a, b.t()) for a, b in shares(2))
    assert not same(left + rest, right)


def test_a_split_linear_has_the_gradients_of_a_linear():
    kernels.enable_batch_invariant()
    x = exact(37, 40).requires_grad_()
    weight = exact(70, 40).requires_grad_()
    bias = exact(70).requires_grad_()
    grad = exact(37, 70)
    A = exact(4, 40)
    B = exact(70, 4)
    merged = kernels.merge(weight, A, B, 0.5)
    for b in (None, bias):
        inputs = [y for y in (x, weight, b) if y is not None]
        ours = kernels.SplitLinear.apply(x, weight, b, 4)
        plain = F.linear(x, weight, b)
        assert same(ours, kernels.linear(x, weight, b, 4))
        assert not same(ours, plain)
        assert all_same(gradients(ours, inputs, grad), gradients(plain, inputs, grad))
        adapted = kernels.LoRALinear.apply(x, weight, b, A, B, 0.5, 4)
        assert same(adapted, kernels.linear(x, merged, b, 4))
        assert same(kernels.LoRALinear.apply(x, weight, b, A, B, 0.5), F.linear(x, merged, b))


# ---- elementwise, sums and norms


def test_swiglu_does_not_see_the_place_in_the_tensor_as_torchs_silu_does():
    x = torch.randn(4099) * 4
    one = torch.ones(4099)
    whole = kernels.swiglu(x, one)
    theirs = F.silu(x)
    assert close(whole, theirs, 1e-6)
    beginnings = [(0, count) for count in range(1, 400)]
    assert not differing(lambda rows: kernels.swiglu(x[rows].clone(), one[rows]), whole, *beginnings)
    # the last are no whole vector
    assert differing(lambda rows: F.silu(x[rows].clone()), theirs, *beginnings)


def test_the_gradient_of_swiglu_is_right_and_none_is_nan():
    inputs = torch.randn(2, 40, 33) * 4
    grad = torch.randn(40, 33)
    ours = both_ways(kernels.swiglu, inputs, grad)
    theirs = both_ways(textbook_swiglu, inputs.double(), grad)
    assert all_close(ours, theirs)
    ends = torch.tensor([-1e4, -100.0, 100.0, 1e4], requires_grad=True)  # where exp(-gate) has no float32
    out = kernels.swiglu(ends, torch.ones(4))
    (d_ends,) = gradients(out, ends, torch.ones(4))
    assert out.tolist() == [0.0, 0.0, 100.0, 1e4]
    assert d_ends.tolist() == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("C", [0, 1, 2, 7, 98, 128, 1000, 100_000])
def test_the_sum_of_a_row_is_right_and_sees_no_other_rows_nor_zeros(C):
    x = torch.randn(50, C, dtype=torch.float64)
    whole = kernels.row_sums(x)
    assert close(whole, x.sum(1), 1e-12)
    places = [(5, count) for count in (1, 2, 3, 17)]
    assert not differing(lambda rows: kernels.row_sums(x[rows].clone()), whole, *places)
    width = 1 << max(0, C - 1).bit_length()
    padded = F.pad(x, (0, width - C))
    assert same(kernels.row_sums(padded), whole)


def norm_rope(cos, sin):
    """A function of q and k, and of weights if heads are normed; and what it should give."""

    def ours(q, k, *weights):
        norms = (*weights, 1e-6) if weights else ()
        return kernels.norm_rope(q, k, cos, sin, *norms)

    def right(q, k, *weights):
        heads = map(textbook_norm, (q, k), weights) if weights else (q, k)
        return tuple(textbook_rope(x, cos, sin) for x in heads)

    return ours, right


@pytest.mark.parametrize("normed", [True, False])
def test_norm_rope_is_right_forward_and_backward_and_a_row_is_alone(normed):
    q, k = normal((67, 4, 64), (67, 2, 64))
    weights = normal((64,), (64,)) if normed else []
    inputs = q, k, *weights
    grads = normal(q.shape, k.shape)
    cos, sin = rope(kernels, 64, torch.arange(67))
    ours, right = norm_rope(cos, sin)
    found = both_ways(ours, inputs, *grads)
    assert all_close(found, both_ways(right, doubles(inputs), *grads), 1e-4)
    frozen = both_ways(lambda q, k: ours(q, k, *weights), (q, k), *grads)
    assert all_same(frozen, found[:4])
    for rows in (slice(1), slice(3, 8), slice(50, 67)):
        of_some, _ = norm_rope(cos[rows], sin[rows])
        assert all_same(of_some(q[rows], k[rows], *weights), [y[rows] for y in found[:2]])


@pytest.mark.parametrize("op", ["rms_norm", "log_softmax", "softmax"])
def test_a_row_of_a_norm_and_of_a_softmax_does_not_see_the_others(op):
    def ours(x):
        if op == "rms_norm":
            return kernels.rms_norm(x, weight, 1e-6)
        return getattr(torch, op)(x, -1)

    kernels.enable_batch_invariant()
    for width in (1, 16, 98, 128, 1000, 4096):
        x, weight = normal((200, width), (width,))
        whole = ours(x)
        right = textbook_norm(x.double(), weight) if op == "rms_norm" else ours(x.double())
        assert close(whole, right)
        places = [(7, count) for count in (1, 2, 3, 5, 17, 100)]
        assert not differing(lambda rows: ours(x[rows].clone()), whole, *places), width


# ---- mixtures of experts


def mixture(N, C, E, width):
    """x, router, gate_up, down of a mixture; gradients are wanted."""
    shapes = (N, C), (E, C), (E, 2 * width, C), (E, C, width)
    return leaves(exact(*shape) for shape in shapes)


@pytest.mark.parametrize(
    "N,C,E,k,width",
    [
        (1, 16, 2, 1, 8),
        (37, 40, 8, 2, 24),
        (9, 33, 40, 5, 17),
        (300, 8, 3, 3, 50),
    ],
)
def test_a_mixture_is_right_forward_and_backward(N, C, E, k, width):
    operands = mixture(N, C, E, width)
    grad = exact(N, C)
    out = kernels.moe(*operands, k)
    right = textbook_mixture(*doubles(operands), k)
    assert close(out, right)
    ours = gradients(out, operands, grad)
    theirs = gradients(right, operands, grad)
    for a, b in zip(ours, theirs):
        assert close(a, b, 1e-5 * float(b.abs().max()))


def among_ranks(module, operands, k, ranks):
    """A mixture whose experts lie with so many ranks, as each of them has it."""
    x, router, gate_up, down = (y.detach() for y in operands)
    E = len(router) // ranks
    parts = []

    def result_of(rank, add):
        first = rank * E
        own = slice(first, first + E)
        return module.moe(x, router, gate_up[own], down[own], k, first=first, add=add)

    def keep(part):
        parts.append(part.clone())
        return part

    for rank in range(ranks):
        result_of(rank, keep)
    return [result_of(rank, lambda _: sum(parts)) for rank in range(ranks)]


def rows_of_a_mixture_are_alone(operands, grad, k):
    """
    Whatever a row's neighbours are, its output and gradient are the same, and an expert's gradient is of its own rows;
    on any number of ranks. A leaf may have no row.
    """
    x, *weights = (y.detach() for y in operands)
    N = len(x)

    def run(rows, x=x):
        """The output of some rows, and their gradient; then the weights'."""
        return both_ways(lambda *y: kernels.moe(*y, k), (x[rows], *weights), grad[rows])

    whole, d_whole, _, *d_experts = run(slice(None))
    order = torch.randperm(N)
    for rows in (order, order[:1], order[:7], torch.arange(N // 3, N - 3)):
        out, d_rows, *_ = run(rows)
        assert same(out, whole[rows])
        assert same(d_rows, d_whole[rows])
    poisoned = x.index_fill(0, torch.tensor([0, 9, N - 1]), torch.nan)
    beside, *_ = run(slice(None), poisoned)
    assert same(beside[10:-1], whole[10:-1])
    chosen = (x @ weights[0].t()).topk(k, 1).indices
    mine = (chosen == 3).any(1)  # the tokens of one expert: alone they give it the same gradient
    _, _, _, *d_mine = run(mine)
    assert 3 < mine.sum() < N
    assert all(same(a[3], b[3]) for a, b in zip(d_mine, d_experts))
    for some, ranks in ((x, 2), (x[:1], 6)):
        assert all(same(y, whole[: len(some)]) for y in among_ranks(kernels, (some, *weights), k, ranks))
    none, d_none, *d_weights = run(slice(0))
    assert none.shape == d_none.shape == x[:0].shape
    assert not any(g.any() for g in d_weights)


def test_a_row_of_a_mixture_sees_no_other_nor_an_expert_those_of_others():
    rows_of_a_mixture_are_alone(mixture(300, 32, 6, 24), exact(300, 32), 2)


# ---- attention


def qkv(tokens, heads, kv_heads, dim):
    return normal((tokens, heads, dim), (tokens, kv_heads, dim), (tokens, kv_heads, dim))


def attend(k, inputs, lengths, grad, scale=0.2):
    """The output of packed attention, and its gradients."""
    plan = k.packed_plan(lengths)
    return both_ways(lambda *x: k.attention(*x, plan, scale), inputs, grad)


def attend64(inputs, lengths, grad, scale):
    return both_ways(lambda *x: reference(*x, lengths, scale), doubles(inputs), grad)


@pytest.mark.parametrize(
    "heads,kv_heads,dim",
    [
        (4, 2, 32),
        (4, 4, 16),
        (8, 1, 64),
        (6, 2, 128),
    ],
)
def test_attention_is_right_forward_and_backward(heads, kv_heads, dim):
    lengths = [5, 64, 1, 130]
    inputs = qkv(200, heads, kv_heads, dim)
    grad = torch.randn_like(inputs[0])
    out, *ours = attend(kernels, inputs, lengths, grad, 0.3)
    right, *theirs = attend64(inputs, lengths, grad, 0.3)
    assert close(out, right)
    assert all_close(ours, theirs, 2e-4)


def attend_with_shared_rows(size, device="cpu"):
    """Three sequences, of which the second begins like the first and the third is the first: rows of q, k, v alike."""
    lengths = [5, 21, 5]
    ids = torch.tensor([*range(5), *range(3), *range(10, 28), *range(5)])
    plan = kernels.packed_plan(lengths, device, ids)
    assert plan.row.tolist() == [*range(5), *range(3), *range(5, 23), *range(5)]
    assert plan.first.tolist() == [*range(5), *range(8, 26)]
    assert plan.q_lens.tolist() == [5, 18, 0]
    inputs = leaves(x.to(device) for x in qkv(23, *size))
    grad = torch.randn_like(inputs[0])
    out = kernels.attention(*inputs, plan, 0.2)
    spread = [x[plan.row] for x in inputs]
    whole = kernels.attention(*spread, kernels.packed_plan(lengths, device), 0.2)[plan.first]
    assert same(out, whole)
    for a, b in zip(gradients(out, inputs, grad), gradients(whole, inputs, grad)):
        assert (a - b).abs().max() < 1e-5 < b.abs().max()
        assert a[:3].any()


def test_tokens_with_one_prefix_have_one_row():
    attend_with_shared_rows((6, 2, 16))


class Sequences:
    """
    Random sequences, packed, and the same keys in a paged cache whose other rows hold NaN and Inf: packed training,
    prefill, chunks and decode must be one. Here on a CPU; triton_interpreted.py and gpu_bits.py take it from here.
    """

    def __init__(self, lengths, heads, kv_heads, D, dtype=torch.float32, device="cpu"):
        self.lengths = lengths
        self.N = sum(lengths)
        self.scale = D**-0.5
        self.device = device
        self.start = [sum(lengths[:i]) for i in range(len(lengths))]
        shapes = [(self.N, h, D) for h in (heads, kv_heads, kv_heads)]
        self.q, self.k, self.v = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
        self.out = self.packed(self.q, self.k, self.v)
        self.turn_pages()

    def packed(self, q, k, v):
        plan = kernels.packed_plan(self.lengths, self.device)
        return kernels.attention(q, k, v, plan, self.scale)

    def turn_pages(self):
        """Put the keys, values and requests in other places."""
        size = self.N + 100
        requests = len(self.lengths) + 5
        slots, unused = torch.randperm(size, device=self.device).split([self.N, 100])
        self.keys = self.k.new_full((size, *self.k.shape[1:]), torch.nan)
        self.values = torch.full_like(self.keys, torch.inf)
        self.keys[slots] = self.k
        self.values[slots] = self.v
        self.requests = torch.randperm(requests, device=self.device)[: len(self.lengths)]
        width = max(self.lengths) + 30
        self.table = unused[0].int().repeat(requests, width)  # what is past a sequence is a poisoned row
        for request, own in zip(self.requests, slots.split(self.lengths)):
            self.table[request, : len(own)] = own

    def step(self, chunks):
        """(result, what it must be) of an engine step over chunks (sequence, first token, last + 1)."""
        which, first, last = torch.tensor(chunks, device=self.device).unbind(1)
        rows = [torch.arange(self.start[i] + a, self.start[i] + b) for i, a, b in chunks]
        rows = torch.cat(rows).to(self.device)
        plan = kernels.paged_plan(last - first, last.contiguous(), self.table, self.requests[which])
        found = kernels.attention(self.q[rows], self.keys, self.values, plan, self.scale)
        return found, self.out[rows]

    def steps(self, sizes):
        """{how an engine may cut the work: its steps, as in `step`}; sizes: tokens of a chunk."""
        every = list(enumerate(self.lengths))
        prefill = [[(i, 0, n)] for i, n in every]
        decode = [[(i, n - 1, n) for i, n in every]]
        n = self.lengths[0]
        positions = list(range(n))
        batches = 64, 3, 17, 1, 7, 256, 2
        while positions:  # each position of the first sequence, in batches of changing size: so with changing splits
            size = batches[len(decode) % len(batches)]
            decode.append([(0, t, t + 1) for t in positions[:size]])
            positions = positions[size:]
        chunks = []
        for size in sizes:
            chunks += [[(0, a, min(a + size, n))] for a in range(0, n, size)]
        mixed = [
            (1, 0, self.lengths[1]),
            (0, n // 2, n // 2 + 1),
            (2, 3, self.lengths[2] - 1),
            (0, 0, 70),
        ]
        # as many tokens as sequences, and yet no decode step: one of them has no new token
        chunks += [mixed, [(0, 0, 2), (2, 1, 1)]]
        return dict(prefill=[sum(prefill, []), *prefill], chunks=chunks, decode=decode)


@pytest.mark.parametrize("heads,kv_heads,dim", [(4, 2, 32), (8, 1, 64)])
def test_packed_training_equals_prefill_equals_any_chunking_equals_decode(heads, kv_heads, dim):
    sequences = Sequences([150, 3, 64, 65, 1], heads, kv_heads, dim)
    for how, steps in sequences.steps((1, 7, 64, 100)).items():
        for step in steps:
            assert same(*sequences.step(step)), how


def test_sdpa_decode_differs_from_its_prefill():
    """The negative control: torch's own attention does not pass the test above."""
    q, k, v = torch.randn(3, 1, 4, 100, 32)
    prefill = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    decode = F.scaled_dot_product_attention(q[:, :, 99:], k, v)
    assert not same(decode, prefill[:, :, 99:])


def test_a_gradient_does_not_see_the_other_sequences():
    inputs = qkv(150, 4, 2, 32)
    grad = torch.randn(150, 4, 32)

    def grads(first, *lengths):
        part = slice(first, first + sum(lengths))
        own = [x[part] for x in inputs]
        _, *found = attend(kernels, own, lengths, grad[part])
        return found

    together = grads(0, 70, 80)
    assert all_same([g[:70] for g in together], grads(0, 70))
    assert all_same([g[70:] for g in together], grads(70, 80))


# ---- the head


def gradients_agree(ours, theirs, inputs, atol):
    """Those of log-probs alone, and those of log-probs and entropies."""
    grads = torch.randn(2, len(ours[0]))
    for n in (1, 2):
        found, wanted = (gradients(x[:n], inputs, grads[:n]) for x in (ours, theirs))
        if not all_close(found, wanted, atol):
            return False
    return True


def test_token_logprobs_are_a_samplers_and_their_gradient_is_right():
    hidden, weight = leaves(normal((2500, 64), (98, 64)))
    targets = torch.randint(98, (2500,))
    ours = kernels.token_logprobs(hidden, weight, targets, 0.7)
    theirs = textbook_logprobs(hidden, weight, targets, 0.7, torch.ones(2500, 98).bool())
    assert all_close(ours, theirs, 1e-4)
    assert gradients_agree(ours, theirs, (hidden, weight), 1e-3)
    kernels.enable_batch_invariant()

    def logprobs(rows):
        return kernels.token_logprobs(hidden[rows], weight, targets[rows], 0.7)[0]

    assert not differing(logprobs, logprobs(slice(None)), (1700, 1))


def kept_by(z, top_p, top_k, min_p):
    """The columns of a row of logits (V,) that a rule keeps, from its definition."""
    p = torch.softmax(z.double(), 0)
    order = sorted(range(len(z)), key=lambda i: (-float(z[i]), i))
    kept = []
    mass = 0.0
    for i in order:
        full = top_k and len(kept) == top_k or top_p < 1 and mass >= top_p
        if kept and (full or p[i] < (min_p - 1e-8) * p[order[0]]):
            break
        kept.append(i)
        mass += float(p[i])
    return kept


RULES = (
    (0.9, 20, 0.02),
    (0.5, 0, 0.0),
    (1.0, 4, 0.0),
    (1.0, 0, 0.1),
    (1e-9, 0, 0.0),
    (0.3, 1, 0.5),
    (1.0, 0, 0.0),
)


def cuts():
    """Logits (M, V), a rule, and where it keeps them: some of them equal, zeros, none or at an edge."""
    draw = torch.Generator().manual_seed(7)
    size = torch.tensor([0.1, 1, 3, 30, 3, 3, 3, 3, 3, 3])
    z = torch.randn(10, 98, generator=draw) * size[:, None]
    z[4:7] = z[4:7].round()  # equal ones at the edge of the kept
    z[7] = torch.tensor([0.0, -0.0]).repeat(49)
    z[8, ::2] = -0.0
    z[9] = -torch.inf
    z[9, :2] = torch.tensor([0.0, math.log(torch.tensor(0.1))])
    for rule in RULES:
        right = torch.zeros(z.shape, dtype=torch.bool)
        for row, logits in zip(right, z):
            row[kept_by(logits, *rule)] = True
        yield z, rule, right & (z > -torch.inf)


def cuts_are_right(k):
    for z, rule, right in cuts():
        ours = z.clone()
        k.cut(ours, torch.tensor([rule]).repeat(len(z), 1))
        if not same(ours, z.masked_fill(~right, -torch.inf)):
            return False
    return True


def test_a_rule_keeps_the_first_of_the_ranking_and_equal_ones_by_column():
    assert cuts_are_right(kernels)
    sizes = torch.stack([right.sum(1) for _, _, right in cuts()])
    assert sizes.min() == 1
    assert len(sizes.unique()) > 10
    z, _, greedy = list(cuts())[5]
    assert torch.equal(greedy.int().argmax(1), z.argmax(1))
    assert (greedy.sum(1) == 1).all()


def test_token_logprobs_under_a_rule_and_their_gradient_are_of_the_kept(monkeypatch):
    monkeypatch.setattr(kernels, "CHUNK", 32)
    rule = 0.9, 20, 0.02
    hidden, weight = leaves(normal((70, 64), (98, 64)))
    with torch.no_grad():
        weight /= 3
        z = matmul64(hidden, weight.t()) / 0.7
        logits = kernels.head_logits(hidden, weight) / torch.tensor(0.7)
    targets = torch.distributions.Categorical(logits=z).sample()
    found = []
    ours = kernels.token_logprobs(hidden, weight, targets, 0.7, *rule, None, found)
    kept = torch.cat(found, 1)
    mask = torch.zeros(70, 98).bool()
    mask[*kept] = True
    for row, own, target in zip(mask, logits, targets):
        columns = {*kept_by(own, *rule), int(target)}  # what was drawn is kept in any case
        assert row.nonzero()[:, 0].tolist() == sorted(columns)
    assert 2 < mask.sum(1).double().mean() < 20
    theirs = textbook_logprobs(hidden, weight, targets, 0.7, mask)
    assert all_close(ours, theirs)
    assert gradients_agree(ours, theirs, (hidden, weight), 1e-4)
    # a row alone; and what is kept told, under another rule: the same bits
    logprobs, _ = ours
    one, _ = kernels.token_logprobs(hidden[41:42], weight, targets[41:42], 0.7, *rule)
    other = hidden, weight, targets, 0.7, 0.5, 2, 0.0
    told, _ = kernels.token_logprobs(*other, kept)
    assert same(one, logprobs[41:42])
    assert same(told, logprobs)
    assert not same(kernels.token_logprobs(*other)[0], logprobs)


# ---- exp, log, cos and sin: the CPU's own, since those of the libraries differ from CPU to CPU


def of(loop, x):
    """What the loop writes for the elements of the array x."""
    out = np.empty_like(x)
    loop(x, out)
    return out


def test_exp_is_within_one_ulp_over_all_of_float32_and_right_at_its_ends():
    every = np.arange(0, 2**32, 4001, dtype=np.uint32).view(np.float32)
    usual = np.linspace(-104.5, 89.5, 1_000_001, dtype=np.float32)
    x = np.concatenate([every[np.isfinite(every)], usual])
    y = of(loops.cpu_exp, x)
    with np.errstate(over="ignore"):
        right = np.exp(x.astype(np.float64))
    finite = right < np.finfo(np.float32).max
    assert np.isinf(y[~finite]).all()
    assert np.isfinite(y[finite]).all()
    ulp = np.spacing(right[finite].astype(np.float32)).astype(np.float64)
    error = np.abs(y[finite] - right[finite]) / ulp
    assert 0.5 < error.max() < 1
    assert (y[(x > -103.9) & (x < -88)] > 0).all()  # denormal, and not flushed to 0
    tiny = np.float32(1e-45)
    ends = np.array([-np.inf, -104, 0, -0.0, tiny, -tiny, 89, np.inf, np.nan], np.float32)
    assert str(of(loops.cpu_exp, ends).tolist()) == "[0.0, 0.0, 1.0, 1.0, 1.0, 1.0, inf, inf, nan]"


def test_log_is_within_one_ulp_of_float64_and_right_at_its_ends():
    rng = np.random.default_rng(0)
    usual = rng.random(2000)
    every = np.exp(rng.random(1000) * 1400 - 700)
    near_1 = 1 + (rng.random(500) - 0.5) * 1e-6
    smallest_and_largest = [5e-324, 1e-310, 2.2250738585072014e-308, 1.7976931348623157e308]
    x = np.concatenate([usual, every, near_1, smallest_and_largest])
    with localcontext() as context:
        context.prec = 40
        for ours, v in zip(of(loops.cpu_log, x), x):
            right = Decimal(float(v)).ln()
            ulp = Decimal(np.spacing(abs(float(right))))
            assert abs(Decimal(float(ours)) - right) < ulp, v
    ends = of(loops.cpu_log, np.array([0.0, -0.0, 1, np.inf, -1, -np.inf, np.nan]))
    assert str(ends.tolist()) == "[-inf, -inf, 0.0, inf, nan, nan, nan]"


def test_cos_and_sin_are_within_two_units_of_float64s_last_place_at_1():
    import mpmath  # which comes with torch

    rng = np.random.default_rng(0)
    far = rng.random(1000) * 1e6
    near = rng.random(1000) * 10
    quarters = np.arange(500) * (np.pi / 2)
    x = np.concatenate([far, near, quarters, [1e-300]])
    x = np.concatenate([x, -x])
    cos = np.empty_like(x)
    sin = np.empty_like(x)
    loops.cpu_rope_table(0, len(x), x, cos, sin)
    with mpmath.workprec(120):
        for v, c, s in zip(x, cos, sin):
            angle = mpmath.mpf(float(v))
            assert abs(mpmath.mpf(float(c)) - mpmath.cos(angle)) < 2**-52, v
            assert abs(mpmath.mpf(float(s)) - mpmath.sin(angle)) < 2**-52, v


# ---- the order of addition, in plain words: a loop of another order is another trainer


def naive_matmul(a, b):
    return torch.from_numpy(kernels.naive_matmul(a.numpy(), b.numpy()))


def matmul_is_in_order(module):
    a = exact(21, 37)
    b = exact(37, 50)
    c = exact(21, 50)
    more = module.matmul(torch.cat([torch.eye(21), a], 1), torch.cat([c, b]))  # as if c had been there before
    if not same(module.matmul(a, b, out=c.clone()), more):
        return False
    return same(module.matmul(a, b), naive_matmul(a, b))


def dot_is_in_order(module):
    x = exact(75).numpy()
    y = exact(75).numpy()
    return module.loops.dot(x, 0, y, 0, 75) == kernels.naive_dot(x, y)


def attention_is_in_order(module):
    """Of two sequences the first as a whole and in chunks, head by head; over the keys of a page table."""
    q = exact(40, 4, 32)
    k = exact(40, 2, 32)
    v = exact(40, 2, 32)
    heads = []
    for h in range(4):
        own = q[:30, h], k[:30, h // 2], v[:30, h // 2]
        heads.append(kernels.naive_attention(*(x.numpy() for x in own), np.float32(0.5)))
    naive = torch.from_numpy(np.stack(heads, 1))
    table = torch.arange(40, dtype=torch.int32)[None]
    for first, last in ((0, 7), (7, 30), (29, 30)):
        rows = slice(first, last)
        plan = module.paged_plan(torch.tensor([last - first]), torch.tensor([last]), table, torch.tensor([0]))
        if not same(module.attention(q[rows], k, v, plan, 0.5), naive[rows]):
            return False
    packed = module.attention(q, k, v, module.packed_plan([30, 10]), 0.5)
    return same(packed[:30], naive)


def mixture_in_parts(operands, grad):
    """
    (output, gradients of gate_up and down) of a mixture that takes the first three experts, expert by expert and slot
    by slot, by the operators of a dense MLP.
    """
    x, router, gate_up, down = (y.detach() for y in operands)
    dtype = x.dtype
    logits = kernels.matmul(x, router.t(), torch.float32)
    z, experts = logits.sort(dim=1, stable=True, descending=True)
    below_top = (z - z[:, :1])[:, :3]
    p = loops.aten_exp(below_top)
    first, second, third = p.unbind(1)
    w = p / ((first + third) + second)[:, None]  # as `naive_dot`
    y = torch.zeros(*p.shape, x.shape[1])
    d_gate_up = []
    d_down = []
    for e in range(len(router)):
        t, j = torch.where(experts[:, :3] == e)
        both = kernels.mm(x[t], gate_up[e].t())
        d_out = (w[t, j][:, None] * grad[t].float()).to(dtype)
        d_hidden = kernels.mm(d_out, down[e])
        hidden, *d_both = both_ways(kernels.swiglu, both.chunk(2, 1), d_hidden)
        y[t, j] = kernels.mm(hidden, down[e].t()).float()
        d_down.append(kernels.mm(d_out.t(), hidden))
        d_gate_up.append(kernels.mm(torch.cat(d_both, 1).t(), x[t]))
    out = torch.zeros(x.shape)
    for j in range(3):
        out = (w[:, j, None].double() * y[:, j] + out).float()  # in one rounding
    return out.to(dtype), torch.stack(d_gate_up), torch.stack(d_down)


def mixture_is_in_order(module):
    """Of the first three of six experts, of which always two are equal."""
    torch.manual_seed(0)
    operands = mixture(40, 24, 6, 20)
    _, router, *weights = operands
    router.data[1::2] = router.data[::2]  # three pairs of equal logits
    grad = exact(40, 24)
    out = module.moe(*operands, 3)
    found = gradients(out, weights, grad)
    right, *d_right = mixture_in_parts(operands, grad)
    apart = among_ranks(module, operands, 3, 2)
    return all_same(found, d_right) and all(same(y, right) for y in (out, *apart))


def test_matmuls_dots_attentions_and_mixtures_add_in_the_naive_order():
    assert matmul_is_in_order(kernels)
    assert dot_is_in_order(kernels)
    assert attention_is_in_order(kernels)
    assert mixture_is_in_order(kernels)
    x = exact(75).numpy()
    assert loops.sum_of(x, 0, 75) == kernels.naive_dot(x, np.ones(75, np.float32))


def changed(folder, *changes):
    """kernels.py and its loops with their text changed, as modules of their own."""
    modules = []
    for file in (kernels.__file__, loops.__file__):
        text = Path(file).read_text()
        for old, new in changes:
            text = text.replace(old, new)
        path = folder / f"changed_{os.urandom(4).hex()}.py"
        path.write_text(text)
        modules.append(imported(path))
    operators, own_loops = modules
    operators.loops = own_loops
    return operators


def imported(path):
    """The file as a module of its own."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MUTANTS = {
    "K from its end": (
        matmul_is_in_order,
        "for k in range(K):",
        "for k in range(K - 1, -1, -1):",
    ),
    "a product and a sum, each rounded": (
        matmul_is_in_order,
        "_llvm(builder, FMA, FLOATS, factor, ys[j], builder.extract_value(out, i))",
        "builder.fadd(builder.fmul(factor, ys[j]), builder.extract_value(out, i))",
    ),
    "neighbours added first": (
        dot_is_in_order,
        "[*range(half, VECTOR)] + [0] * half",
        "[i ^ (VECTOR // 2 // half) for i in range(VECTOR)]",
    ),
    "eight sums": (
        dot_is_in_order,
        "VECTOR = 16 ",
        "VECTOR = 8 ",
    ),
    "the one beyond top_p": (
        cuts_are_right,
        "n < most and mass < enough",
        "n < most and mass <= enough",
    ),
    "two zeros": (
        cuts_are_right,
        "np.float32(x + ZERO).view",
        "np.float32(x).view",
    ),
    "min_p without its edge": (
        cuts_are_right,
        "np.float64(min_p)))) - 1",
        "np.float64(min_p))))",
    ),
    "equal logits from the last expert": (
        mixture_is_in_order,
        "<< 24) - e\n",
        "<< 24) - (E - 1 - e)\n",
        "experts[j] = -keys[j - row * k] & 0xFFFFFF",
        "experts[j] = E - 1 - (-keys[j - row * k] & 0xFFFFFF)",
    ),
    "a softmax over what the block sees": (
        attention_is_in_order,
        "largest(p, i * seen, mine)",
        "largest(p, i * seen, seen)",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_loop_in_another_order_is_caught(tmp_path, name):
    comparison, *texts = MUTANTS[name]
    module = changed(tmp_path, *zip(texts[::2], texts[1::2]))
    assert not comparison(module)


# ---- threads and tiles: speed alone

HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16  # of a head
CHANNELS = 40  # of a token
WIDTH = 72  # of an MLP


def random_layer(norms_heads, E):
    """A decoder layer as an engine has it, with biases; with E experts in its MLP's place, if that is not 0."""
    to_gate_up = torch.nn.Linear(CHANNELS, 2 * WIDTH)
    to_down = torch.nn.Linear(WIDTH, CHANNELS)
    if E:
        to_gate_up = SimpleNamespace(weight=torch.randn(E, 2 * WIDTH, CHANNELS) / 8, bias=None)
        to_down = SimpleNamespace(weight=torch.randn(E, CHANNELS, WIDTH) / 8, bias=None)
    return SimpleNamespace(
        norms=normal((CHANNELS,), (CHANNELS,)),
        of_heads=normal((HEAD_DIM,), (HEAD_DIM,)) if norms_heads else [None, None],
        to_qkv=torch.nn.Linear(CHANNELS, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
        to_out=torch.nn.Linear(HEADS * HEAD_DIM, CHANNELS),
        to_gate_up=to_gate_up,
        to_down=to_down,
        router=torch.randn(E, CHANNELS),
        E=E,
    )


def layer_of_a_call(k, layer, cache):
    """What layers_on_cpu takes of a layer."""
    linears = [layer.to_qkv, layer.to_out, layer.to_gate_up, layer.to_down]
    mixture = [(k.loops.panels_of(layer.router.t()), layer.E, 2)] if layer.E else []
    norms = (*layer.norms, *layer.of_heads)
    return k.loops.layer_on_cpu(norms, linears, cache, 1e-6, HEADS, KV_HEADS, HEAD_DIM, WIDTH, 0.25, *mixture)


def decoder_layers(k):
    """
    (x, residual, caches ..) after two layers on 3 sequences, in one call as an engine has them; the first norms heads,
    the second is a mixture of experts. test_engine.py and law L15 have that they are the operators one by one.
    """
    torch.manual_seed(2)
    q_lens = torch.tensor([3, 1, 5])
    kv_lens = torch.tensor([7, 20, 5])
    x = torch.randn(9, CHANNELS)
    caches = torch.randn(4, 40, KV_HEADS, HEAD_DIM)
    table = torch.zeros(3, 20, dtype=torch.int32)
    where = []
    for row, q, own in zip(table, q_lens, torch.randperm(40).split([7, 20, 5, 8])):  # no sequence has another's
        row[: len(own)] = own
        where.append(own[-q:])
    where = torch.cat(where)
    plan = k.paged_plan(q_lens, kv_lens, table, torch.arange(3))
    angles = rope(k, HEAD_DIM, torch.arange(9))
    layers = [
        (random_layer(norms_heads=True, E=0), caches[:2]),
        (random_layer(norms_heads=False, E=5), caches[2:]),
    ]
    calls = [layer_of_a_call(k, layer, list(cache)) for layer, cache in layers]
    x, residual = k.loops.layers_on_cpu(x, angles, where, plan, calls)
    return x, residual, *caches


def adamw_state(mean, square):
    """What AdamW knows of a tensor before its first step."""
    return dict(step=torch.tensor(0.0), exp_avg=mean, exp_avg_sq=square)


def results(module):
    """Of every operator, forward and backward, and of decoder layers."""
    found = [x.detach() for _, *tensors in one_digest.operators(module) for x in tensors]
    with torch.no_grad():
        return [*found, *decoder_layers(module)]


def test_no_operator_forward_or_backward_sees_the_number_of_threads(monkeypatch):
    expected = results(kernels)
    assert len(expected) > 20
    assert all(x.double().abs().sum() > 0 for x in expected)
    shared = set()
    share = host.share

    def note(loop, *args):
        shared.add(loop.__name__)
        return share(loop, *args)

    monkeypatch.setattr(host, "WORTH_THREADS", 0)
    monkeypatch.setattr(host, "share", note)
    # 40 are more than a prefill of one request has units: none may get a share without any
    for threads in (2, 3, 40):
        host.threads = threads
        assert all_same(results(kernels), expected), threads
    text = Path(loops.__file__).read_text()
    written = re.findall(r"^def (cpu_\w+)\(\s*_?first, _?last,", text, re.M)
    assert shared == set(written)  # all of them


def test_no_operator_sees_the_tile_of_a_matmul_nor_the_blocks_of_rows(tmp_path):
    """Other tiles are what a CPU with other registers has."""
    other = changed(tmp_path)
    sizes = dict(TILE_ROWS=5, TILE_VECTORS=3, PANEL=48, BLOCK_ROWS=24, DEPTH=7, QUERIES=20)
    for name, size in sizes.items():  # before the loops are compiled
        assert getattr(loops, name) != size
        setattr(other.loops, name, size)
    assert all_same(results(other), results(kernels))


# ---- the rest of what a run computes


def plain_draw(logprobs, seeds, positions):
    """`kernels.draw` in torch: int64, of which the low 32 bits count, and float64."""
    most = 2**32 - 1

    def rotate(x, n):
        return (x << n | x >> (32 - n)) & most

    device = logprobs.device
    h = torch.zeros(logprobs.shape, dtype=torch.int64, device=device)
    columns = torch.arange(logprobs.shape[1], device=device)
    for k in (seeds[:, None] & most, seeds[:, None] >> 32 & most, positions[:, None], columns):
        h ^= rotate(k * 0xCC9E2D51 & most, 15) * 0x1B873593 & most
        h = rotate(h, 13) * 5 + 0xE6546B64 & most
    h ^= 16
    for multiplier, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        h = (h ^ h >> shift) * multiplier & most
    u = (h ^ h >> 16).clamp(max=most - 1).double() / most
    waiting = (-u.log()).clamp(max=1.7976931348623157e308)
    return (logprobs.double() - waiting.log()).argmax(1, keepdim=True)


def random_draws(logits):
    """(logprobs, seeds, positions) for these rows of logits."""
    B = len(logits)
    seeds = torch.randint(-(2**63), 2**63 - 1, (B,))
    positions = torch.randint(0, 2**31, (B,))
    return torch.log_softmax(logits, -1), seeds, positions


def ties():
    """(logprobs, seeds, positions) and the tokens: where log-probs leave nothing of the noise, the first column."""
    logprobs = torch.full((5, 2500), -1e30)
    logprobs[1, [700, 1500, 2499]] = -1e29
    logprobs[2, 2499] = -1e29
    logprobs[3] = -torch.inf
    logprobs[4] = torch.nan
    tokens = torch.tensor([0, 700, 2499, 0, 0])
    return (logprobs, torch.arange(5), torch.arange(5)), tokens[:, None]


# seed, position, column: where the hash is the largest and 0, and the noise of these
ENDS = {
    2**32 - 1: (1, 36_420, 317, 22.180709777801834),
    0: (11, 5_371, 860, -709.782712893384),
}


def ends(hash32):
    """(logprobs, seeds, positions) and the tokens: column 0, or that of this hash, is likelier by 1e-3."""
    seed, position, column, noise = ENDS[hash32]
    assert loops.murmur_hash32(seed, position, column) == hash32
    first = loops.murmur_hash32(seed, position, 0) / (2**32 - 1)
    noise_of_first = -math.log(-math.log(first))
    logprobs = torch.full((2, 1100), -torch.inf)
    logprobs[:, 0] = 0
    logprobs[:, column] = noise_of_first - noise + torch.tensor([-1e-3, 1e-3])
    twice = torch.ones(2, dtype=torch.long)
    return (logprobs, seed * twice, position * twice), torch.tensor([[0], [column]])


def draws():
    """Of each kind, (logprobs, seeds, positions) and the tokens."""
    for shape in ((3, 1), (40, 98), (20, 2500), (1, 151_936), (0, 98)):
        args = random_draws(torch.randn(shape) * 3)
        args[0][:, 1::7] = -torch.inf
        yield args, plain_draw(*args)
    yield ties()
    yield from map(ends, ENDS)


def test_a_draw_is_that_of_a_plain_formula_and_a_tie_is_the_first_column():
    for args, tokens in draws():
        assert torch.equal(kernels.draw(*args), tokens)


FORMULAS = {
    "exp": lambda x: torch.exp(x),
    "log": lambda x: torch.log(x.abs() + 0.1),
    "sqrt": lambda x: x.abs().sqrt(),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "sum": lambda x: x.sum(),
    "sum 0": lambda x: x.sum(0),
    "sum keepdim": lambda x: x.sum((0, -1), keepdim=True),
    "sum dtype": lambda x: x.sum(1, dtype=torch.float64),
    "mean": lambda x: x.mean(),
    "mean -1": lambda x: x.mean(-1, keepdim=True),
    "mean of two": lambda x: x.mean((1, 2)),
    "std": lambda x: x.std(),
    "std 1": lambda x: x.std(1),
    "std n": lambda x: x.std(0, correction=0, keepdim=True),
    "pow": lambda x: 1e4 ** (x / 9),
    "strided": lambda x: x.transpose(0, 2).exp().sum(1),
    "embedding": lambda x: F.embedding(torch.tensor([[1, 0, 1], [2, 2, 1]]), x[0], padding_idx=0),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_what_formulas_use_is_right_in_every_shape_and_has_its_gradient(name):
    f = FORMULAS[name]
    x = torch.randn(5, 7, 33)
    grad = torch.randn_like(f(x))
    right, d_right = both_ways(f, [x.double()], grad)
    kernels.enable_batch_invariant()
    out, d_out = both_ways(f, [x], grad)
    assert out.dtype == (torch.float64 if name == "sum dtype" else torch.float32)
    assert close(out, right, 1e-6, 1e-6)
    assert close(d_out, d_right, 1e-6)


OF_ANY_TYPE = FORMULAS | {
    "log of a sign": lambda x: x.log(),
    "sum of no dims": lambda x: x.sum([]),
    "sum to float32": lambda x: x.sum(1, dtype=torch.float32),
    "mean to float64": lambda x: x.mean(dtype=torch.float64),
    "powers of 2": lambda x: 2.0**x,
    "powers of -2": lambda x: (-2.0) ** x,
}


def test_a_root_is_the_float_next_to_it():
    for dtype in (torch.float32, torch.float64):
        x = torch.rand(3000, dtype=dtype)
        right = torch.from_numpy(np.sqrt(x.numpy()))
        kernels.enable_batch_invariant()
        assert torch.equal(x.sqrt(), right)
        assert float(x[0].sqrt()) == float(right[0])
        kernels.disable_batch_invariant()


def test_other_types_and_empty_tensors_are_as_torchs_own():
    whole = torch.arange(-6, 6).view(3, 4)
    double = torch.randn(3, 4, dtype=torch.float64)
    others = [whole, whole % 3 > 0, whole.int(), double, double.bfloat16(), torch.zeros(0, 4), torch.zeros(3, 0)]
    cases = []
    for x, (name, f) in itertools.product(others, OF_ANY_TYPE.items()):
        with contextlib.suppress(RuntimeError, IndexError):  # what torch does not compute
            if x.numel() or "std" not in name:
                cases.append((f, x, f(x)))
    for name in ("exp", "log", "sum", "mean", "pow"):
        f = OF_ANY_TYPE[name]
        x = torch.tensor(2.5)
        cases.append((f, x, f(x)))
    assert len(cases) > 100
    kernels.enable_batch_invariant()
    for f, x, theirs in cases:
        ours = f(x)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        rtol = 1e-2 if theirs.dtype == torch.bfloat16 else 1e-6
        assert torch.allclose(ours.double(), theirs.double(), rtol=rtol, equal_nan=True)
    for x in (whole, double):
        assert torch.allclose(x @ x.t(), (x[:, None] * x).sum(2))


# ---- what is refused: a loop checks nothing, and would read what is not there

REFUSED = {  # words that `operand` reads
    "shapes (2, 3) and (4, 5)": "matmul 2x3 4x5",
    "shapes (2, 3) and (3, 5) do": "matmul 2x3 3x5 out=3x5",
    "out torch.float64": "matmul 2x3 3x5 out=2x5:float64",
    "dtype=torch.float64": "matmul 2x3:float64 3x5:float64",
    "torch.float64 on cpu beside torch.float32": "matmul 2x3 3x5:float64",
    "dtype=torch.bfloat16": "rms_norm 2x4:bfloat16 4x:bfloat16 1e-6",
    "weight (5,)": "rms_norm 2x4 5x 1e-6",
    "residual does": "rms_norm 2x4 4x 1e-6 3x4",
    "sin (1, 2)": "norm_rope 2x2x4 2x1x4 2x2 1x2",
    "k (3, 1, 4)": "norm_rope 2x2x4 3x1x4 2x2 2x2",
    "k (2, 1, 6)": "norm_rope 2x2x4 2x1x6 2x2 2x2",
    "gate (2, 4) and up (2, 5)": "swiglu 2x4 2x5",
    "(2, 4), (3, 4), (3, 5, 4), (3, 4, 2)": "moe 2x4 3x4 3x5x4 3x4x2 1",
    "4 experts of 3": "moe 2x4 3x4 3x4x4 3x4x2 4",
    "(4, 2), (1, 3), (4, 1)": "merge 4x2 1x3 4x1 1.0",
    "on cpu beside torch.float64": "merge 4x2 1x2:float64 4x1 1.0",
    "beside torch.float32": "swiglu 2x4 2x4:float64",
    "(2, 4, 8), (2, 3, 8)": "attention 2x4x8 2x3x8 2x3x8 pack_of_2 1",
    "(2, 2, 8), (2, 2, 9)": "attention 2x4x8 2x2x8 2x2x9 pack_of_2 1",
    "plan is of 5 tokens": "attention 4x2x8 4x2x8 4x2x8 pack_of_2_and_3 1",
    "4 queries and 3 keys": "attention 4x2x8 3x2x8 3x2x8 pack_of_4 1",
    "hidden, weight, targets": "token_logprobs 3x4 9x5 3x:int64",
    "targets 9 to 9": "token_logprobs 3x4 9x4 nines",
    "targets -1 to -1": "token_logprobs 3x4 9x4 minus_ones",
    "dim=0 of 2": "log_softmax 3x4 0 False",
    "dtype=torch.float32: row_sums": "row_sums 3x4",
    "(2, 4), (3,), (2,)": "draw 2x4 3x:int64 2x:int64",
    "logits (2, 4), rules (2,)": "cut 2x4 2x",
    "x (2, 4) beside 3": "bit_sums with_too_few_rows",
    "grad (4, 4) of ids (3,)": "embedding_backward 4x4 3x:int64 9 -1 False",
    "scale_grad_by_freq": "embedding_backward 3x4 3x:int64 9 -1 True",
    "entries of a page_table": "paged_plan 3x:int64 3x:int64 table_by_columns 3x:int64",
    "the numbers and the": "paged_plan every_second 3x:int64 4x4:int32 3x:int64",
}

OPERANDS = dict(
    pack_of_2=kernels.packed_plan([2]),
    pack_of_4=kernels.packed_plan([4]),
    pack_of_2_and_3=kernels.packed_plan([2, 3]),
    nines=torch.full((3,), 9),
    minus_ones=torch.full((3,), -1),
    every_second=torch.arange(6)[::2],
    with_too_few_rows=[(torch.zeros(2, 4).int(), torch.arange(3), torch.arange(4))],
    table_by_columns=torch.zeros(4, 4, dtype=torch.int32).t(),
)


def operand(word):
    """2x3 is a tensor of zeros, 4x has one dimension, :int64 is its type; others are names of OPERANDS or numbers."""
    if word in OPERANDS:
        return OPERANDS[word]
    shape, _, dtype = word.partition(":")
    if "x" not in shape:
        return ast.literal_eval(word)
    sizes = [int(size) for size in shape.split("x") if size]
    return torch.zeros(sizes, dtype=getattr(torch, dtype or "float32"))


@pytest.mark.parametrize("message", REFUSED)
def test_operands_that_do_not_fit_are_refused_by_name(message):
    words, _, out = REFUSED[message].partition(" out=")
    name, *words = words.split()
    named = dict(out=operand(out)) if out else {}
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(kernels, name)(*map(operand, words), **named)


# ---- the compiled loops' cache

EXP_OF_ZERO = """
import torch
from onecurve.cpu import loops
x = torch.zeros(1).numpy()
loops.cpu_exp(x, x)
print(x)
"""


def in_a_new_process(folder, source=Path(kernels.__file__).parent, code=EXP_OF_ZERO, **env):
    """(what exp(0) gives, the lines on stderr) of a process that is to keep its compiled loops in this folder."""
    env = os.environ | dict(NUMBA_CACHE_DIR=str(folder)) | env
    run = subprocess.run([sys.executable, "-c", code], cwd=source, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip(), run.stderr.splitlines()


def test_the_first_start_says_in_one_line_that_it_compiles(tmp_path):
    """And the second does not."""
    out, said = in_a_new_process(tmp_path)
    assert out == "[1.]"
    assert said == ["onecurve/cpu/loops.py: compiling for this CPU, once: up to half a minute"]
    assert in_a_new_process(tmp_path) == ("[1.]", [])


def test_without_a_folder_loops_are_compiled_at_each_start_and_say_so(tmp_path):
    """Neither the one that is asked for, nor beside the file, nor the user's can be made: a file is in their place."""
    source = tmp_path / "source"
    folder = source / "onecurve/cpu"
    folder.mkdir(parents=True)
    for module in (host, loops):
        shutil.copy(module.__file__, folder)
    for name in ("file", "source/onecurve/cpu/__pycache__"):
        (tmp_path / name).write_text("")
    for _ in range(2):
        out, said = in_a_new_process(tmp_path / "file/a", source, XDG_CACHE_HOME=str(tmp_path / "file/b"))
        assert out == "[1.]"
        assert len(said) == 2
        assert sum("no folder for compiled loops" in x for x in said) == 1, said
        assert "compiling for this CPU" in said[1], said
