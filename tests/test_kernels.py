"""
The CPU's operators bit for bit: what a row's neighbours are, and how the work was cut, must not be seen in its result.
Beside it that they are right, in which order they add, what they refuse, and mutants of the loops, which are caught.

    pytest tests/test_kernels.py

Law L12 in test_laws.py has the same bits on other CPUs.
"""

import functools
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
import types
from decimal import Decimal, localcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import kernels
from onecurve.cpu import host, loops

SHAPES = [(128, 384), (384, 128), (128, 98), (33, 70), (1024, 256), (2560, 48)]  # K, N


def bits(x):
    return x.contiguous().view(torch.int32)


def same(a, b):
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    host.threads = 1
    kernels.disable_batch_invariant()


def exact(*shape):
    """Random float32 of 21 bits: their products, of which float32 rounds some, and few sums are exact in float64."""
    return torch.randint(-(2**20), 2**20, shape).float() / 2**20


@pytest.mark.parametrize("K,N", SHAPES)
def test_a_row_of_mm_does_not_see_its_batch_nor_the_threads(K, N, monkeypatch):
    monkeypatch.setattr(host, "WORTH_THREADS", 0)
    x, w = torch.randn(300, K), torch.randn(N, K)
    whole = kernels.mm(x, w.t())
    assert torch.allclose(whole, (x.double() @ w.double().t()).float(), atol=1e-3)
    for threads in (1, 2, 3):
        host.threads = threads
        for M in (*range(1, 34), 63, 64, 65, 100, 255):
            for first in (0, 41):
                assert same(kernels.mm(x[first : first + M], w.t()), whole[first : first + M]), (threads, M, first)


@pytest.mark.parametrize("K,N", SHAPES)
def test_a_column_of_mm_does_not_see_the_other_columns(K, N):
    """The engine multiplies by q, k and v weights in one matrix, the trainer by each alone."""
    x, w = torch.randn(40, K), torch.randn(N, K)
    whole = kernels.mm(x, w.t())
    for first, last in ((0, N // 2), (N // 2, N), (5, N - 1)):
        assert same(kernels.mm(x, w[first:last].t()), whole[:, first:last])


def test_torch_alone_is_not_row_invariant():
    """The negative control: torch's own matmul does not pass the test above."""
    x, w = torch.randn(64, 1024), torch.randn(512, 1024)
    distance = max(float(((x[:M] @ w.t()) - (x @ w.t())[:M]).abs().max()) for M in (1, 2, 3))
    assert 0 < distance < 1e-3


def test_the_switch_makes_the_rows_of_every_linear_invariant_forward_and_backward_and_gives_torchs_own_back():
    layer, x, grad = torch.nn.Linear(1024, 512), torch.randn(40, 1024), torch.randn(40, 512)

    def run(M):
        """The output of the first M rows, their gradient, and the weight's as if the others had none."""
        rows, g = x[:M].clone().requires_grad_(), grad[:M]
        out = layer(rows)
        return out.detach(), *torch.autograd.grad(out, (rows, layer.weight), g)

    theirs = run(40)
    kernels.enable_batch_invariant()
    kernels.enable_batch_invariant()  # twice is once
    ours = run(40)
    assert same(ours[1], kernels.mm(grad, layer.weight.detach())) and same(ours[2], kernels.mm(grad.t(), x))
    assert all(same(a, b[:M]) for M in (1, 2, 3, 17) for a, b in zip(run(M)[:2], ours))
    assert not same(ours[0], theirs[0])  # which starts its sums with the bias
    kernels.disable_batch_invariant()
    assert all(same(a, b) for a, b in zip(run(40), theirs))


def test_a_merge_is_right_and_rounded_once_and_a_row_is_alone():
    weight, A, B = exact(130, 70), exact(8, 70), exact(130, 8)
    whole, right = kernels.merge(weight, A, B, 0.5), weight.double() + 0.5 * (B.double() @ A.double())
    assert (whole - right).abs().max() < 1e-6
    for i, n in ((0, 1), (5, 17), (60, 70)):
        assert same(kernels.merge(weight[i : i + n], A, B[i : i + n], 0.5), whole[i : i + n])
    assert same(kernels.merge(weight, A, torch.zeros(130, 8), 0.5), weight)
    assert not same(kernels.merge(weight.flip(0), A, B, 0.5), whole)
    half = kernels.merge(weight.bfloat16(), A, B, 0.5)  # as a GPU has it
    right = (weight.bfloat16().float() + 0.5 * kernels.mm(B, A)).bfloat16()
    assert half.dtype == torch.bfloat16 and torch.equal(half, right)


def test_a_split_product_is_a_tree_of_chains_whoever_computes_which_parts():
    """The parts of 1, 2 and 4 ranks, of which each adds its own before it tells them the others."""
    x, weight, bias = exact(37, 96), exact(70, 96), exact(70)
    parts = [kernels.mm(a, b.t()) for a, b in zip(x.chunk(4, 1), weight.chunk(4, 1))]
    right = (parts[0] + parts[1]) + (parts[2] + parts[3])
    assert (right - x.double() @ weight.double().t()).abs().max() < 1e-5

    def gather(mine, split, ranks):
        shares = zip(x.chunk(ranks, 1), weight.chunk(ranks, 1))
        sums = torch.stack([kernels.split_matmul(a, b.t(), split) for a, b in shares])
        assert any(same(mine, y) for y in sums)
        return sums

    for ranks in (1, 2, 4):
        last = x.chunk(ranks, 1)[-1], weight.chunk(ranks, 1)[-1]
        among = functools.partial(gather, split=4 // ranks, ranks=ranks) if ranks > 1 else None
        assert same(kernels.linear(*last, None, 4 // ranks, among), right)
        assert same(kernels.linear(*last, bias, 4 // ranks, among), right + bias)
    assert not same(kernels.linear(x, weight, None), right)
    assert not same(((parts[0] + parts[1]) + parts[2]) + parts[3], right)
    plain = [kernels.mm(a, b.t()) for a, b in zip(x.chunk(2, 1), weight.chunk(2, 1))]
    assert not same(plain[0] + plain[1], right)


def test_a_split_linear_has_the_gradients_of_a_linear():
    kernels.enable_batch_invariant()
    x, weight, bias = (exact(*shape).requires_grad_() for shape in ((37, 40), (70, 40), (70,)))
    grad, A, B = exact(37, 70), exact(4, 40), exact(70, 4)
    for b in (None, bias):
        leaves = [y for y in (x, weight, b) if y is not None]
        ours, plain = kernels.SplitLinear.apply(x, weight, b, 4), torch.nn.functional.linear(x, weight, b)
        assert same(ours, kernels.linear(x, weight, b, 4)) and not same(ours, plain)
        assert all(map(same, *(torch.autograd.grad(y, leaves, grad) for y in (ours, plain))))
        merged = kernels.merge(weight, A, B, 0.5)
        assert same(kernels.LoRALinear.apply(x, weight, b, A, B, 0.5, 4), kernels.linear(x, merged, b, 4))


def test_a_linear_with_adapters_has_the_gradients_of_its_merged_weight():
    kernels.enable_batch_invariant()
    x, weight, bias = torch.randn(37, 40, requires_grad=True), torch.randn(70, 40), torch.randn(70)
    A, B, grad = torch.randn(4, 40, requires_grad=True), torch.randn(70, 4, requires_grad=True), torch.randn(37, 70)
    merged = kernels.merge(weight, A, B, 0.5).detach()
    for b in (None, bias):
        ours = kernels.LoRALinear.apply(x, weight, b, A, B, 0.5)
        assert same(ours, kernels.mm(x, merged.t()) if b is None else kernels.addmm(b, x, merged.t()))
        right = x.double() @ (weight.double() + 0.5 * B.double() @ A.double()).t() + (0 if b is None else b.double())
        found, wanted = (torch.autograd.grad(y, (x, A, B), grad.to(y)) for y in (ours, right))
        assert all(torch.allclose(a, b, atol=1e-4) and b.abs().max() > 1 for a, b in zip(found, wanted))
    plain = torch.nn.functional.linear(x, weight) + 0.5 * x @ A.t() @ B.t()  # what others compute is not the engine's
    assert not same(plain, kernels.mm(x, merged.t()))


def test_swiglu_does_not_see_the_position_in_the_tensor_and_torchs_own_silu_does():
    x, one = torch.randn(4099) * 4, torch.ones(4099)
    whole, theirs = kernels.swiglu(x, one), F.silu(x)
    assert torch.allclose(whole, theirs, atol=1e-6)
    assert all(same(kernels.swiglu(x[:i].clone(), one[:i]), whole[:i]) for i in range(1, 400))
    assert any(not same(F.silu(x[:i].clone()), theirs[:i]) for i in range(1, 400))  # the last are no whole vector


def test_the_gradient_of_swiglu_is_right_and_none_is_nan():
    gate, up = (torch.randn(40, 33).mul(4).requires_grad_() for _ in range(2))
    grad = torch.randn(40, 33)
    ours = torch.autograd.grad((kernels.swiglu(gate, up) * grad).sum(), (gate, up))
    theirs = torch.autograd.grad((F.silu(gate.double()) * up.double() * grad).sum(), (gate, up))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs))
    ends = torch.tensor([-1e4, -100.0, 100.0, 1e4], requires_grad=True)  # where exp(-gate) has no float32
    out = kernels.swiglu(ends, torch.ones(4))
    assert out.tolist() == [0.0, 0.0, 100.0, 1e4]
    assert torch.autograd.grad(out.sum(), ends)[0].tolist() == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("C", [0, 1, 2, 7, 98, 128, 1000])
def test_the_sum_of_a_row_is_right_and_sees_neither_other_rows_nor_zeros_behind_it(C):
    x = torch.randn(50, C, dtype=torch.float64)
    whole = kernels.row_sums(x)
    assert torch.allclose(whole, x.sum(1), atol=1e-12)
    for M in (1, 2, 3, 17):
        assert torch.equal(kernels.row_sums(x[5 : 5 + M].clone()), whole[5 : 5 + M])
    width = 1 << max(0, C - 1).bit_length()
    assert torch.equal(kernels.row_sums(F.pad(x, (0, width - C))), whole)


@pytest.mark.parametrize("op", ["rms_norm", "log_softmax", "softmax"])
def test_a_row_of_a_norm_and_of_a_softmax_does_not_see_the_others(op):
    def f(x):
        return kernels.rms_norm(x, weight, 1e-6) if op == "rms_norm" else getattr(torch, op)(x, -1)

    kernels.enable_batch_invariant()
    for width in (1, 16, 98, 128, 1000, 4096):
        x, weight = torch.randn(200, width), torch.randn(width)
        whole, y = f(x), x.double()
        right = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * weight if op == "rms_norm" else f(y)
        assert torch.allclose(whole.double(), right, atol=1e-5)
        for M in (1, 2, 3, 5, 17, 100):
            assert same(f(x[7 : 7 + M].clone()), whole[7 : 7 + M]), (width, M)


# ---- mixtures of experts


def mixture(N, C, E, F):
    """x, router, gate_up, down of a mixture; gradients are wanted."""
    return [exact(*shape).requires_grad_() for shape in ((N, C), (E, C), (E, 2 * F, C), (E, C, F))]


def textbook_mixture(x, router, gate_up, down, k):
    """The same in float64, token by token; of equal logits the first."""
    out = []
    for token in x:
        z = router @ token
        experts = sorted(range(len(z)), key=lambda e: (-z[e].item(), e))[:k]
        w = z[experts].softmax(0)
        parts = [(gate_up[e] @ token).chunk(2) for e in experts]
        out.append(sum(wj * (down[e] @ (F.silu(g) * u)) for wj, e, (g, u) in zip(w, experts, parts)))
    return torch.stack(out)


@pytest.mark.parametrize(
    "N,C,E,k,width", [(1, 16, 2, 1, 8), (37, 40, 8, 2, 24), (9, 33, 40, 5, 17), (300, 8, 3, 3, 50)]
)
def test_a_mixture_is_right_forward_and_backward(N, C, E, k, width):
    operands, grad = mixture(N, C, E, width), exact(N, C)
    out, right = kernels.moe(*operands, k), textbook_mixture(*(y.double() for y in operands), k)
    assert torch.allclose(out.double(), right, atol=1e-5)
    for a, b in zip(torch.autograd.grad(out, operands, grad), torch.autograd.grad(right, operands, grad.double())):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


def test_of_equal_logits_the_first_experts_take_all_and_those_without_tokens_get_exact_zeros():
    x, router, gate_up, down = mixture(150, 24, 7, 20)
    router = router[:1].detach().expand(7, 24).contiguous().requires_grad_()
    operands = x, router, gate_up, down
    out, right = kernels.moe(*operands, 2), textbook_mixture(*(y.double() for y in operands), 2)
    assert torch.allclose(out.double(), right, atol=1e-5)
    _, d_router, *d = torch.autograd.grad(out.sum(), operands)
    assert all((bits(g[2:]) == 0).all() and (g[:2] != 0).any() for g in (d_router, *d))
    for g in torch.autograd.grad(kernels.moe(x[:0], *operands[1:], 2).sum(), operands[1:]):  # a leaf without rows
        assert (bits(g) == 0).all()


def test_a_row_of_a_mixture_does_not_see_the_others_nor_an_expert_those_of_other_experts():
    x, *weights = mixture(300, 32, 6, 24)
    grad = exact(300, 32)
    whole = kernels.moe(x, *weights, 2)
    d_whole = torch.autograd.grad(whole, x, grad)[0]
    order = torch.randperm(300)
    for rows in (order, order[:1], order[:7], torch.arange(100, 229)):
        some = x.detach()[rows].requires_grad_()
        out = kernels.moe(some, *weights, 2)
        assert same(out, whole[rows]) and same(torch.autograd.grad(out, some, grad[rows])[0], d_whole[rows])
    beside = x.detach().index_fill(0, torch.tensor([0, 299]), torch.nan)
    assert same(kernels.moe(beside, *weights, 2)[1:-1], whole[1:-1])
    z = x.detach() @ weights[0].detach().t()
    mine = (z.topk(2, 1).indices == 3).any(1)  # the tokens of one expert: alone they give it the same gradient
    both = [torch.autograd.grad(kernels.moe(x[r], *weights, 2), weights, grad[r]) for r in (mine, slice(None))]
    assert 20 < mine.sum() < 280 and all(same(a[3], b[3]) for a, b in zip(*(d[1:] for d in both)))


def among_ranks(module, operands, k, ranks):
    """A mixture whose experts lie with so many ranks, as each of them has it."""
    x, router, gate_up, down = (y.detach() for y in operands)
    E, parts = len(router) // ranks, []

    def mine(r, add):
        own = slice(r * E, r * E + E)
        return module.moe(x, router, gate_up[own], down[own], k, first=r * E, add=add)

    for r in range(ranks):
        mine(r, lambda y: parts.append(y.clone()) or y)
    return [mine(r, lambda y: sum(parts)) for r in range(ranks)], parts


def test_experts_may_lie_with_several_ranks():
    for N in (1, 37):
        operands = mixture(N, 40, 8, 24)
        whole = kernels.moe(*operands, 2)
        for ranks in (1, 2, 8):
            each, parts = among_ranks(kernels, operands, 2, ranks)
            assert len(parts) == ranks and all(same(y, whole) for y in each)
            assert (torch.stack(parts).any(2).sum(0) == 1).all()  # a row has one rank's figures, and zeros


# ---- attention


def reference(q, k, v, lengths, scale):
    """Textbook attention in float64, sequence by sequence."""
    out, start, groups = [], 0, q.shape[1] // k.shape[1]
    for n in lengths:
        x, y, z = (t[start : start + n].double().transpose(0, 1) for t in (q, k, v))
        scores = x @ y.repeat_interleave(groups, 0).transpose(1, 2) * scale
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        out.append((scores.softmax(-1) @ z.repeat_interleave(groups, 0)).transpose(0, 1))
        start += n
    return torch.cat(out)


def qkv(tokens, heads, kv_heads, dim):
    return torch.randn(tokens, heads, dim), torch.randn(tokens, kv_heads, dim), torch.randn(tokens, kv_heads, dim)


@pytest.mark.parametrize("heads,kv_heads,dim", [(4, 2, 32), (4, 4, 16), (8, 1, 64), (6, 2, 128)])
def test_attention_is_right_forward_and_backward(heads, kv_heads, dim):
    lengths = [5, 64, 1, 130]
    q, k, v = (x.requires_grad_() for x in qkv(sum(lengths), heads, kv_heads, dim))
    grad = torch.randn(sum(lengths), heads, dim)
    out = kernels.attention(q, k, v, kernels.packed_plan(lengths), 0.3)
    expected = reference(q, k, v, lengths, 0.3)
    assert torch.allclose(out.double(), expected, atol=1e-5)
    ours = torch.autograd.grad((out * grad).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * grad).sum(), (q, k, v))
    for a, b in zip(ours, theirs):
        assert torch.allclose(a, b, atol=2e-4)


def attend_with_shared_rows(size, device="cpu"):
    """Three sequences, of which the second begins like the first and the third is the first: rows of q, k, v alike."""
    ids = torch.tensor([*range(5), *range(3), *range(10, 28), *range(5)], device=device)
    plan = kernels.packed_plan([5, 21, 5], device, ids)
    assert plan.row.tolist() == [*range(5), *range(3), *range(5, 23), *range(5)]
    assert plan.first.tolist() == [*range(5), *range(8, 26)] and plan.q_lens.tolist() == [5, 18, 0]
    q, k, v = (x.to(device).requires_grad_() for x in qkv(23, *size))
    grad = torch.randn_like(q)
    out = kernels.attention(q, k, v, plan, 0.2)
    spread = (x[plan.row] for x in (q, k, v))
    whole = kernels.attention(*spread, kernels.packed_plan([5, 21, 5], device), 0.2)[plan.first]
    assert same(out, whole)
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v), grad) for x in (out, whole))):
        assert (a - b).abs().max() < 1e-5 < b.abs().max() and a[:3].any()


def test_tokens_with_one_prefix_have_one_row():
    attend_with_shared_rows((6, 2, 16))


class Sequences:
    """
    Random sequences, packed, and the same keys in a paged cache whose other rows hold NaN and Inf: packed training,
    prefill, chunks and decode must be one. Here on a CPU; triton_interpreted.py and gpu_bits.py take it from here.
    """

    def __init__(self, lengths, heads, kv_heads, D, dtype=torch.float32, device="cpu"):
        self.lengths, self.N, self.scale, self.device = lengths, sum(lengths), D**-0.5, device
        self.start = [sum(lengths[:i]) for i in range(len(lengths))]
        self.q, self.k, self.v = (
            torch.randn(self.N, h, D, device=device).to(dtype) for h in (heads, kv_heads, kv_heads)
        )
        self.out = self.packed(self.q, self.k, self.v)
        self.turn_pages()

    def packed(self, q, k, v):
        return kernels.attention(q, k, v, kernels.packed_plan(self.lengths, self.device), self.scale)

    def turn_pages(self):
        slots, B = torch.randperm(self.N + 100, device=self.device), len(self.lengths)
        slots, unused = slots[: self.N], slots[self.N :]
        self.keys, self.values = (self.k.new_full((self.N + 100, *self.k.shape[1:]), x) for x in (torch.nan, torch.inf))
        self.keys[slots], self.values[slots] = self.k, self.v
        self.requests = torch.randperm(B + 5, device=self.device)[:B]
        self.table = unused[0].int().repeat(B + 5, max(self.lengths) + 30)  # what is past a sequence is a poisoned row
        for r, s, n in zip(self.requests.tolist(), self.start, self.lengths):
            self.table[r, :n] = slots[s : s + n]

    def step(self, chunks):
        """(result, what it must be) of an engine step over chunks (sequence, first token, last + 1)."""
        rows = torch.cat([torch.arange(self.start[i] + a, self.start[i] + b) for i, a, b in chunks]).to(self.device)
        lens = (torch.tensor(x, device=self.device) for x in ([b - a for _, a, b in chunks], [b for _, _, b in chunks]))
        plan = kernels.paged_plan(*lens, self.table, self.requests[[i for i, _, _ in chunks]])
        return kernels.attention(self.q[rows], self.keys, self.values, plan, self.scale), self.out[rows]

    def steps(self, sizes):
        """{how an engine may cut the work: its steps, as in `step`}; sizes: tokens of a chunk."""
        every, n = list(enumerate(self.lengths)), self.lengths[0]
        positions, decode, batches = list(range(n)), [[(i, m - 1, m) for i, m in every]], (64, 3, 17, 1, 7, 256, 2)
        while positions:  # each position of the first sequence, in batches of changing size: so with changing splits
            size = batches[len(decode) % len(batches)]
            decode.append([(0, t, t + 1) for t in positions[:size]])
            positions = positions[size:]
        chunks = [[(0, a, min(a + size, n))] for size in sizes for a in range(0, n, size)]
        chunks.append([(1, 0, self.lengths[1]), (0, n // 2, n // 2 + 1), (2, 3, self.lengths[2] - 1), (0, 0, 70)])
        return dict(
            prefill=[[(i, 0, m) for i, m in every]] + [[(i, 0, m)] for i, m in every], chunks=chunks, decode=decode
        )


@pytest.mark.parametrize("heads,kv_heads,dim", [(4, 2, 32), (8, 1, 64)])
def test_packed_training_equals_prefill_equals_any_chunking_equals_decode(heads, kv_heads, dim):
    sequences = Sequences([150, 3, 64, 65, 1], heads, kv_heads, dim)
    for how, steps in sequences.steps((1, 7, 64, 100)).items():
        assert all(same(*sequences.step(step)) for step in steps), how


def test_sdpa_decode_differs_from_its_prefill():
    """The negative control: torch's own attention does not pass the test above."""
    q, k, v = (torch.randn(1, 4, 100, 32) for _ in range(3))
    prefill = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    steps = [F.scaled_dot_product_attention(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1]) for i in range(100)]
    assert not same(torch.cat(steps, 2), prefill)


def test_a_gradient_does_not_see_the_other_sequences():
    q, k, v = (x.requires_grad_() for x in qkv(150, 4, 2, 32))
    grad = torch.randn(150, 4, 32)

    def grads(first, lengths):
        part = slice(first, first + sum(lengths))
        out = kernels.attention(q[part], k[part], v[part], kernels.packed_plan(lengths), 0.2)
        return [g[part] for g in torch.autograd.grad((out * grad[part]).sum(), (q, k, v))]

    together = grads(0, [70, 80])
    assert all(same(a[:70], b) for a, b in zip(together, grads(0, [70])))
    assert all(same(a[70:], b) for a, b in zip(together, grads(70, [80])))


# ---- the head


def test_token_logprobs_are_those_of_a_sampler_and_their_gradient_is_right():
    hidden, weight = torch.randn(2500, 64, requires_grad=True), torch.randn(98, 64, requires_grad=True)
    targets, grad = torch.randint(98, (2500,)), torch.randn(2500)
    logprobs, entropy = kernels.token_logprobs(hidden, weight, targets, 0.7)
    z = (hidden.double() @ weight.double().t()) / 0.7
    logp = torch.log_softmax(z, -1)
    assert torch.allclose(logprobs.double(), logp.gather(1, targets[:, None])[:, 0], atol=1e-4)
    assert torch.allclose(entropy.double(), -(logp.exp() * logp).sum(-1), atol=1e-4)
    expected, bonus = logp.gather(1, targets[:, None])[:, 0], torch.randn(2500)
    for ours, theirs in (
        ((logprobs * grad).sum(), (expected * grad).sum()),
        ((logprobs * grad + entropy * bonus).sum(), (expected * grad - (logp.exp() * logp).sum(-1) * bonus).sum()),
    ):
        ours, theirs = (torch.autograd.grad(x, (hidden, weight), retain_graph=True) for x in (ours, theirs))
        for a, b in zip(ours, theirs):
            assert torch.allclose(a, b, atol=1e-3)
    kernels.enable_batch_invariant()
    whole, _ = kernels.token_logprobs(hidden, weight, targets, 0.7)
    one, _ = kernels.token_logprobs(hidden[1700:1701], weight, targets[1700:1701], 0.7)
    assert same(one, whole[1700:1701])


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


RULES = (0.9, 20, 0.02), (0.5, 0, 0.0), (1.0, 4, 0.0), (1.0, 0, 0.1), (1e-9, 0, 0.0), (0.3, 1, 0.5), (1.0, 0, 0.0)


def cuts():
    """Logits (M, V), a rule, and where it keeps them: some of them equal, zeros, none or at an edge."""
    draw = torch.Generator().manual_seed(7)
    z = torch.randn(10, 98, generator=draw) * torch.tensor([0.1, 1, 3, 30, 3, 3, 3, 3, 3, 3])[:, None]
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
    assert sizes.min() == 1 and len(sizes.unique()) > 10
    z, _, greedy = [*cuts()][5]
    assert torch.equal(greedy.int().argmax(1), z.argmax(1)) and torch.equal(greedy.sum(1), torch.ones(10).long())


def test_token_logprobs_under_a_rule_are_those_of_what_it_keeps_and_so_is_their_gradient(monkeypatch):
    monkeypatch.setattr(kernels, "CHUNK", 32)
    hidden = torch.randn(70, 64, requires_grad=True)
    weight = (torch.randn(98, 64) / 3).requires_grad_()
    rule = 0.7, 0.9, 20, 0.02
    z = hidden.double() @ weight.double().t() / 0.7
    targets = torch.distributions.Categorical(logits=z.detach()).sample()
    found = []
    logprobs, entropy = kernels.token_logprobs(hidden, weight, targets, *rule, None, found)
    kept = torch.cat(found, 1)
    mask = torch.zeros(70, 98).bool()
    mask[kept[0], kept[1]] = True
    for row, logits, target in zip(mask, kernels.head_logits(hidden.detach(), weight.detach()), targets):
        columns = {*kept_by(logits / torch.tensor(0.7), *rule[1:]), int(target)}  # what was drawn is kept in any case
        assert row.nonzero()[:, 0].tolist() == sorted(columns)
    assert 2 < mask.sum(1).double().mean() < 20
    logp = torch.log_softmax(z.masked_fill(~mask, -torch.inf), -1)
    expected = logp.gather(1, targets[:, None])[:, 0]
    expected_entropy = -(logp.exp() * logp.masked_fill(~mask, 0)).sum(1)
    assert torch.allclose(logprobs.double(), expected, atol=1e-5)
    assert torch.allclose(entropy.double(), expected_entropy, atol=1e-5)
    grad, bonus = torch.randn(2, 70)
    ours, theirs = (
        torch.autograd.grad((x * grad + y * bonus).sum(), (hidden, weight))
        for x, y in ((logprobs, entropy), (expected, expected_entropy))
    )
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(ours, theirs))
    # a row alone; and what is kept told, under another rule: the same bits
    one, _ = kernels.token_logprobs(hidden[41:42], weight, targets[41:42], *rule)
    told, _ = kernels.token_logprobs(hidden, weight, targets, 0.7, 0.5, 2, 0.0, kept)
    assert same(one, logprobs[41:42]) and same(told, logprobs)
    assert not same(kernels.token_logprobs(hidden, weight, targets, 0.7, 0.5, 2, 0.0)[0], logprobs)


# ---- exp, log, cos and sin: the CPU's own, since those of the libraries differ from CPU to CPU


def of(loop, x, results=1):
    """What the loop writes for the elements of the array x."""
    out = [np.empty_like(x) for _ in range(results)]
    loop(*((0, len(x)) if results > 1 else ()), x, *out)
    return out if results > 1 else out[0]


def test_exp_is_within_one_ulp_over_all_of_float32_and_right_at_its_ends():
    every = np.arange(0, 2**32, 4001, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = np.concatenate([every[np.isfinite(every)], np.linspace(-104.5, 89.5, 1_000_001, dtype=np.float32)])
    y = of(loops.cpu_exp, x)
    with np.errstate(over="ignore"):
        right = np.exp(x.astype(np.float64))
    finite = right < np.finfo(np.float32).max
    assert np.isinf(y[~finite]).all() and np.isfinite(y[finite]).all()
    ulp = np.spacing(right[finite].astype(np.float32)).astype(np.float64)
    error = np.abs(y[finite] - right[finite]) / ulp
    assert 0.5 < error.max() < 1 and (y[(x > -103.9) & (x < -88)] > 0).all()  # denormal, and not flushed to 0
    tiny = np.float32(1e-45)
    ends = np.array([-np.inf, -104, 0, -0.0, tiny, -tiny, 89, np.inf, np.nan], np.float32)
    assert str(of(loops.cpu_exp, ends).tolist()) == str([0.0, 0.0, 1.0, 1.0, 1.0, 1.0, np.inf, np.inf, np.nan])


def test_log_is_within_one_ulp_of_float64_and_right_at_its_ends():
    rng = np.random.default_rng(0)
    x = [rng.random(2000), np.exp(rng.random(1000) * 1400 - 700), 1 + (rng.random(500) - 0.5) * 1e-6]
    x = np.concatenate([*x, [5e-324, 1e-310, 2.2250738585072014e-308, 1.7976931348623157e308]])
    y = of(loops.cpu_log, x)
    with localcontext() as context:
        context.prec = 40
        right = [Decimal(float(v)).ln() for v in x]
        errors = [abs(Decimal(float(a)) - b) / Decimal(np.spacing(abs(float(b)))) for a, b in zip(y, right)]
    assert max(errors) < 1
    ends = of(loops.cpu_log, np.array([0.0, -0.0, 1, np.inf, -1, -np.inf, np.nan]))
    assert str(ends.tolist()) == str([-np.inf, -np.inf, 0.0, np.inf, np.nan, np.nan, np.nan])


def test_cos_and_sin_are_within_two_units_of_float64s_last_place_at_1():
    import mpmath  # which comes with torch

    rng = np.random.default_rng(0)
    x = np.concatenate([rng.random(1000) * 1e6, rng.random(1000) * 10, np.arange(500) * (np.pi / 2), [1e-300]])
    x = np.concatenate([x, -x])
    with mpmath.workprec(120):
        for ours, right in zip(of(loops.cpu_rope_table, x, 2), (mpmath.cos, mpmath.sin)):
            assert max(abs(mpmath.mpf(float(a)) - right(mpmath.mpf(float(b)))) for a, b in zip(ours, x)) < 2**-52


# ---- the order of addition, in plain words: a loop of another order is another trainer


def matmul_is_in_order(module):
    a, b, c = exact(21, 37), exact(37, 50), exact(21, 50)
    naive = torch.from_numpy(kernels.naive_matmul(a.numpy(), b.numpy()))
    more = module.matmul(torch.cat([torch.eye(21), a], 1), torch.cat([c, b]))  # as if c had been there before
    return same(module.matmul(a, b), naive) and same(module.matmul(a, b, out=c.clone()), more)


def dot_is_in_order(module):
    x, y = exact(75).numpy(), exact(75).numpy()
    return module._loops().dot(x, 0, y, 0, 75) == kernels.naive_dot(x, y)


def attention_is_in_order(module):
    """Of two sequences the first as a whole and in chunks, head by head; over the keys of a page table."""
    (q, k, v), scale = (exact(40, heads, 32) for heads in (4, 2, 2)), np.float32(0.5)
    naive = [
        kernels.naive_attention(q[:30, h].numpy(), k[:30, h // 2].numpy(), v[:30, h // 2].numpy(), scale)
        for h in range(4)
    ]
    naive = torch.from_numpy(np.stack(naive, 1))
    table, one = torch.arange(40, dtype=torch.int32)[None], torch.tensor
    for first, last in ((0, 7), (7, 30), (29, 30)):
        plan = module.paged_plan(one([last - first]), one([last]), table, one([0]))
        if not same(module.attention(q[first:last], k, v, plan, 0.5), naive[first:last]):
            return False
    return same(module.attention(q, k, v, module.packed_plan([30, 10]), 0.5)[:30], naive)


def mixture_is_in_order(module):
    """Of the first two of six equal experts, slot by slot; a gradient over an expert's tokens in their order."""
    torch.manual_seed(0)
    x, router, gate_up, down = mixture(40, 24, 6, 20)
    router.data[1::2] = router.data[::2]  # three pairs of equal logits
    grad, out = exact(40, 24), module.moe(x, router, gate_up, down, 3)
    d_ours = torch.autograd.grad(out, down, grad)[0]
    with torch.no_grad():
        z = torch.from_numpy(kernels.naive_matmul(x.numpy(), router.t().numpy()))
        ranked, experts = z.sort(stable=True, descending=True)
        p = torch.tensor([loops.exp(n) for n in (ranked - ranked[:, :1])[:, :3].flatten().numpy()]).view(40, 3)
        w = p / ((p[:, 0] + p[:, 2]) + p[:, 1])[:, None]  # `naive_dot` of p and ones
        right, d_down = torch.zeros(40, 24), []
        for t, j in np.ndindex(40, 3):
            e = experts[t, j]
            hidden = kernels.swiglu(*kernels.mm(x[t, None], gate_up[e].t()).chunk(2, 1))
            y = kernels.mm(hidden, down[e].t())[0].double()
            right[t] = (w[t, j].double() * y + right[t].double()).float()
        for e in range(6):
            t, j = torch.where(experts[:, :3] == e)
            hidden = kernels.swiglu(*kernels.mm(x[t], gate_up[e].t()).chunk(2, 1))
            d_down.append(kernels.mm((w[t, j][:, None] * grad[t]).t(), hidden))
    apart, _ = among_ranks(module, (x, router, gate_up, down), 3, 2)
    return all(same(y, right) for y in (out, *apart)) and same(d_ours, torch.stack(d_down))


def test_a_matmul_a_dot_an_attention_and_a_mixture_add_in_the_order_of_the_naive_ones():
    assert matmul_is_in_order(kernels) and dot_is_in_order(kernels) and attention_is_in_order(kernels)
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
        spec = importlib.util.spec_from_file_location(path.stem, path)
        modules.append(importlib.util.module_from_spec(spec))
        spec.loader.exec_module(modules[-1])
    modules[0]._loops = lambda: modules[1]
    return modules[0]


MUTANTS = {
    "K from its end": (matmul_is_in_order, "for k in range(K):", "for k in range(K - 1, -1, -1):"),
    "K in two chains": (
        matmul_is_in_order,
        "return _loops().cpu_matmul(a, b, out)",
        "return _loops().cpu_matmul(a[:, :9], b[:9], out) + _loops().cpu_matmul(a[:, 9:], b[9:])",
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
    "eight sums": (dot_is_in_order, "VECTOR = 16 ", "VECTOR = 8 "),
    "one more than top_k": (cuts_are_right, "n < most and mass < enough", "n <= most and mass < enough"),
    "the one beyond top_p": (cuts_are_right, "n < most and mass < enough", "n < most and mass <= enough"),
    "two zeros": (cuts_are_right, "np.float32(x + ZERO).view", "np.float32(x).view"),
    "numbers below zero as they stand": (cuts_are_right, "bits ^ ((bits >> 31) & 0x7FFFFFFF)", "bits"),
    "min_p without its edge": (cuts_are_right, "np.float64(min_p)))) - 1", "np.float64(min_p))))"),
    "equal ones from the last column": (
        cuts_are_right,
        "for i in range(V):\n            if ranks[i] == high",
        "for i in range(V - 1, -1, -1):\n            if ranks[i] == high",
    ),
    "equal logits from the last expert": (
        mixture_is_in_order,
        "<< 24) - e\n",
        "<< 24) - (E - 1 - e)\n",
        "experts[j] = -keys[j - row * k] & 0xFFFFFF",
        "experts[j] = E - 1 - (-keys[j - row * k] & 0xFFFFFF)",
    ),
    "the slots from the last": (
        mixture_is_in_order,
        "for i in range(row * k, (row + 1) * k):\n            pair",
        "for i in range(row * k + k - 1, row * k - 1, -1):\n            pair",
    ),
    "an expert's tokens from the last": (
        mixture_is_in_order,
        "for i, e in enumerate(experts):\n        places[i] = starts[e + 1]",
        "for i in range(len(experts) - 1, -1, -1):\n        e = experts[i]\n        places[i] = starts[e + 1]",
    ),
    "a softmax over what the block sees": (
        attention_is_in_order,
        "largest(p, i * seen, mine)",
        "largest(p, i * seen, seen)",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_loop_in_another_order_is_caught(tmp_path, name):
    comparison, *changes = MUTANTS[name]
    assert not comparison(changed(tmp_path, *zip(changes[::2], changes[1::2])))


# ---- threads and tiles: speed alone


def decoder_layers(k, in_one_call):
    """
    (x, residual, caches ..) after two layers on 3 sequences with biases, as an engine has them; the first norms heads,
    the second is a mixture of experts.
    """
    torch.manual_seed(2)
    H, HK, D, C, F = 4, 2, 16, 40, 72
    q_lens = torch.tensor([3, 1, 5])
    kv_lens = torch.tensor([7, 20, 5])
    x, *caches = (torch.randn(*s) for s in [(9, C)] + [(40, HK, D)] * 4)
    table = torch.zeros(3, 20, dtype=torch.int32)
    for row, slots in zip(table, torch.randperm(40).int().split([7, 20, 5, 8])):  # no sequence has another's
        row[: len(slots)] = slots
    where = torch.cat([table[b, n - q : n] for b, (q, n) in enumerate(zip(q_lens.tolist(), kv_lens.tolist()))]).long()
    plan = k.paged_plan(q_lens, kv_lens, table, torch.arange(3))
    rope = k.rope_table(1e4 ** (-torch.arange(D // 2) / D), torch.arange(9))
    residual = None
    layers = []
    for of_heads, kv, E in (([torch.randn(D), torch.randn(D)], caches[:2], 0), ([None] * 2, caches[2:], 5)):
        first, second = torch.randn(C), torch.randn(C)
        linear = [torch.nn.Linear(*shape) for shape in ((C, (H + 2 * HK) * D), (H * D, C), (C, 2 * F), (F, C))]
        router, mixture = torch.randn(E, C), []
        if E:
            weights = torch.randn(E, 2 * F, C) / 8, torch.randn(E, C, F) / 8
            linear[2:] = (types.SimpleNamespace(weight=weight, bias=None) for weight in weights)
            mixture = [(k._loops().panels_of(router.t()), E, 2)]
        if in_one_call:
            norms = first, second, *of_heads
            layers.append(k._loops().layer_on_cpu(norms, linear, kv, 1e-6, H, HK, D, F, 0.25, *mixture))
            continue
        to_qkv, to_out, to_gate_up, to_down = (
            functools.partial(k.linear, weight=m.weight, bias=m.bias) for m in linear
        )
        x, residual = (k.rms_norm(x, first, 1e-6), x) if residual is None else k.rms_norm(x, first, 1e-6, residual)
        q, *new = to_qkv(x).view(9, -1, D).split([H, HK, HK], 1)
        q, new[0] = k.norm_rope(q, new[0], *rope, *of_heads, 1e-6)
        kv[0][where], kv[1][where] = new
        x, residual = k.rms_norm(to_out(k.attention(q, *kv, plan, 0.25).flatten(1)), second, 1e-6, residual)
        if E:
            x = k.moe(x, router, linear[2].weight, linear[3].weight, 2)
        else:
            x = to_down(k.swiglu(*to_gate_up(x).chunk(2, -1)))
    if in_one_call:
        x, residual = k._loops().layers_on_cpu(x, rope, where, plan, layers)
    return x, residual, *caches


@torch.no_grad()
def test_decoder_layers_in_one_call_are_the_operators_one_by_one():
    both = decoder_layers(kernels, True), decoder_layers(kernels, False)
    assert all(same(a, b) for a, b in zip(*both, strict=True))


def operators(k):
    """The results and gradients of the operators that cut their work, of one input."""
    torch.manual_seed(1)
    x, w, v, up = (torch.randn(*shape, requires_grad=True) for shape in ((150, 70), (90, 70), (64,), (150, 70)))
    q, key, value = (y.requires_grad_() for y in qkv(150, 4, 2, 64))
    experts = [torch.randn(*shape, requires_grad=True) for shape in ((9, 70), (9, 48, 70), (9, 70, 24))]
    cos, sin = k.rope_table(1e4 ** (-torch.arange(32) / 32), torch.arange(150))
    targets, whole = torch.arange(150) % 90, torch.arange(150 * 70, dtype=torch.int32).view(150, 70) * 40503
    turned = k.norm_rope(q, key, cos, sin, v, v + 1, 1e-6)
    outs = [
        *turned, k.rms_norm(q, v, 1e-6), k.swiglu(x, up), *k.token_logprobs(x, w, targets, 0.7),
        *k.token_logprobs(x, w, targets, 0.7, 0.9, 20, 0.02),
        k.attention(q, key, value, k.packed_plan([100, 1, 49]), 0.2), k.moe(x, *experts, 3),
    ]  # fmt: skip
    grads = torch.autograd.grad(outs, (x, w, v, up, q, key, value, *experts), [torch.randn_like(y) for y in outs])
    table, one = torch.arange(150, dtype=torch.int32)[None], torch.tensor
    with torch.no_grad():
        outs.append(k.attention(q[:20], key, value, k.paged_plan(one([20]), one([120]), table, one([0])), 0.2))
        outs += decoder_layers(k, True)
    logits = k.log_softmax(torch.randn(150, 90), -1, False)
    outs += [logits, k.draw(logits, targets, targets), k.matmul(x.t(), up), k.matmul(x.detach(), w.detach().t())]
    outs += [k.bit_sum(whole, targets, torch.arange(70)), k.row_sums(x.detach().double())]
    moved = torch.nn.Parameter(x.detach().clone())
    optimizer = k._loops().AdamW([moved], lr=1e-2, weight_decay=0.1)
    optimizer.state[moved] = dict(step=one(0.0), exp_avg=up.detach() * 2, exp_avg_sq=up.detach() ** 2)
    moved.grad = up.detach().clone()
    optimizer.step()
    return [y.detach() for y in (*outs, *grads, moved, *optimizer.state[moved].values())]


def test_no_operator_forward_or_backward_sees_the_number_of_threads(monkeypatch):
    expected = operators(kernels)
    assert len(expected) > 20 and all(x.double().abs().sum() > 0 for x in expected)
    shared, share = [], host.share
    monkeypatch.setattr(host, "WORTH_THREADS", 0)
    monkeypatch.setattr(host, "share", lambda loop, *args: (shared.append(loop.__name__), share(loop, *args))[1])
    # 40 are more than a prefill of one request has units: none may get a share without any
    for threads in (2, 3, 40):
        host.threads = threads
        assert all(torch.equal(a, b) for a, b in zip(operators(kernels), expected, strict=True)), threads
    text = Path(loops.__file__).read_text()
    written = re.findall(r"^def (cpu_\w+)\(\s*_?first, _?last,", text, re.M)
    assert set(shared) == set(written)  # all of them


def test_no_operator_sees_the_tile_of_a_matmul_nor_the_blocks_of_rows(tmp_path):
    """Other tiles are what a CPU with other registers has."""
    other, sizes = changed(tmp_path), dict(TILE_ROWS=5, TILE_VECTORS=3, PANEL=48, BLOCK_ROWS=24, DEPTH=7, QUERIES=20)
    for name, size in sizes.items():  # before the loops are compiled
        assert getattr(loops, name) != size
        setattr(other._loops(), name, size)
    assert all(torch.equal(a, b) for a, b in zip(operators(other), operators(kernels), strict=True))


# ---- the rest of what a run computes


def test_adamw_is_torchs_up_to_rounding():
    w, grads = torch.randn(30, 20), torch.randn(5, 30, 20)
    ours, theirs = (torch.nn.Parameter(x.clone()) for x in (w, w.double()))
    options = dict(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    a, b = loops.AdamW([ours], **options), torch.optim.AdamW([theirs], **options)
    a.state[ours] = dict(step=torch.tensor(0.0), exp_avg=torch.zeros_like(w), exp_avg_sq=torch.zeros_like(w))
    for g in grads:
        ours.grad, theirs.grad = g.clone(), g.double()
        a.step()
        b.step()
    assert torch.allclose(ours.double(), theirs, atol=1e-6, rtol=1e-5) and (ours - w).abs().mean() > 1e-2
    for name in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.allclose(a.state[ours][name].double(), b.state[theirs][name].double(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_bit_sum_is_the_sum_of_int64_products_and_sees_every_bit(dtype):
    ends = torch.iinfo(dtype)
    x = torch.randint(ends.min, ends.max + 1, (33, 70), dtype=dtype)
    rows, columns = (torch.randint(-(2**62), 2**62, (n,)) | 1 for n in x.shape)
    found = kernels.bit_sum(x, rows, columns)
    modulus = 2**64
    expected = sum(v * r * c for line, r in zip(x.tolist(), rows.tolist()) for v, c in zip(line, columns.tolist()))
    assert int(found) % modulus == expected % modulus
    x[20, 60] ^= 1
    assert kernels.bit_sum(x, rows, columns) != found


def plain_draw(logprobs, seeds, positions):
    """`kernels.draw` in torch: int64, of which the low 32 bits count, and float64."""

    def rotate(x, n):
        return (x << n | x >> (32 - n)) & most

    most, h = 2**32 - 1, torch.zeros(logprobs.shape, dtype=torch.int64, device=logprobs.device)
    columns = torch.arange(logprobs.shape[1], device=logprobs.device)
    for k in (seeds[:, None] & most, seeds[:, None] >> 32 & most, positions[:, None], columns):
        h ^= rotate(k * 0xCC9E2D51 & most, 15) * 0x1B873593 & most
        h = rotate(h, 13) * 5 + 0xE6546B64 & most
    h ^= 16
    for multiplier, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        h = (h ^ h >> shift) * multiplier & most
    u = (h ^ h >> 16).clamp(max=most - 1).double() / most
    return (logprobs.double() - (-u.log()).clamp(max=1.7976931348623157e308).log()).argmax(1, keepdim=True)


def test_a_draw_is_the_largest_logprob_and_noise_of_a_plain_formula():
    logprobs = torch.log_softmax(torch.randn(300, 90), -1)
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (300,)), torch.randint(0, 2**31, (300,))
    tokens = kernels.draw(logprobs, seeds, positions)
    assert torch.equal(tokens, plain_draw(logprobs, seeds, positions))
    assert len(set(tokens[:, 0].tolist())) > 50  # not one and the same


def ties():
    """(logprobs, seeds, positions) and the tokens: where log-probs leave nothing of the noise, the first column."""
    logprobs = torch.full((5, 2500), -1e30)
    logprobs[1, [700, 1500, 2499]], logprobs[2, 2499] = -1e29, -1e29
    logprobs[3], logprobs[4] = -torch.inf, torch.nan
    return (logprobs, torch.arange(5), torch.arange(5)), torch.tensor([[0], [700], [2499], [0], [0]])


# seed, position, column: where the hash is the largest and 0, and the noise of these
ENDS = {2**32 - 1: (1, 36_420, 317, 22.180709777801834), 0: (11, 5_371, 860, -709.782712893384)}


def ends(hash32):
    """(logprobs, seeds, positions) and the tokens: column 0, or that of this hash, is likelier by 1e-3."""
    seed, position, column, noise = ENDS[hash32]
    assert loops.murmur_hash32(seed, position, column) == hash32
    other = -math.log(-math.log(loops.murmur_hash32(seed, position, 0) / (2**32 - 1)))
    logprobs = torch.full((2, 1100), -torch.inf)
    logprobs[:, 0], logprobs[:, column] = 0, other - noise + torch.tensor([-1e-3, 1e-3])
    return (logprobs, torch.tensor([seed] * 2), torch.tensor([position] * 2)), torch.tensor([[0], [column]])


def test_a_tie_is_the_first_column_and_both_ends_of_the_hash_have_finite_noise():
    for args, tokens in (ties(), *map(ends, ENDS)):
        assert torch.equal(kernels.draw(*args), tokens)


FORMULAS = {
    "exp": lambda x: torch.exp(x), "log": lambda x: torch.log(x.abs() + 0.1), "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1), "sum": lambda x: x.sum(), "sum 0": lambda x: x.sum(0),
    "sum keepdim": lambda x: x.sum((0, -1), keepdim=True), "sum dtype": lambda x: x.sum(1, dtype=torch.float64),
    "mean": lambda x: x.mean(), "mean -1": lambda x: x.mean(-1, keepdim=True), "mean of two": lambda x: x.mean((1, 2)),
    "std": lambda x: x.std(), "std 1": lambda x: x.std(1), "std n": lambda x: x.std(0, correction=0, keepdim=True),
    "pow": lambda x: 1e4 ** (x / 9), "strided": lambda x: x.transpose(0, 2).exp().sum(1),
    "embedding": lambda x: F.embedding(torch.tensor([[1, 0, 1], [2, 2, 1]]), x[0], padding_idx=0),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_what_formulas_use_is_right_in_every_shape_and_has_its_gradient(name):
    f, x = FORMULAS[name], torch.randn(5, 7, 33)
    with torch.enable_grad():
        ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
        right = f(theirs)
        grad = torch.randn(right.shape)
        d_right = torch.autograd.grad(right, theirs, grad.double())[0]
        kernels.enable_batch_invariant()
        out = f(ours)
        d_out = torch.autograd.grad(out, ours, grad.to(out.dtype))[0]
    assert out.shape == right.shape and out.dtype == (torch.float64 if name == "sum dtype" else torch.float32)
    assert torch.allclose(out.double(), right, rtol=1e-6, atol=1e-6)
    assert torch.allclose(d_out.double(), d_right, rtol=1e-5, atol=1e-6)


def test_other_types_and_empty_tensors_are_as_torchs_own():
    whole, truth = torch.arange(-6, 6).view(3, 4), torch.arange(12).view(3, 4) % 3 > 0
    double, half = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4).bfloat16()

    def run():
        for x in (whole, truth, whole.int(), double, half, torch.zeros(0, 4), torch.zeros(3, 0), torch.tensor(2.5)):
            yield x.sum()
            yield x.exp()
            yield x.abs().log() if x.dtype != torch.bool else x.log()
            if x.dim():
                yield from (x.sum(0), x.sum(-1, keepdim=True), x.sum([]), x.sum(1, dtype=torch.float32))
            if x.is_floating_point():
                yield x.mean()
                if x.dim():
                    yield from (x.mean(1), x.log_softmax(-1), x.softmax(-1))
                if x.numel() > 1:
                    yield from (x.std(), x.std(0))
            yield 2.0**x
        yield whole.float().mean(dtype=torch.float64)
        yield (-2.0) ** torch.tensor([0.5, 2.0])
        yield double @ double.t()
        yield whole @ whole.t()

    theirs = list(run())
    kernels.enable_batch_invariant()
    for i, (a, b) in enumerate(zip(run(), theirs, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), i
        close = 1e-2 if b.dtype == torch.bfloat16 else 1e-6
        assert torch.allclose(a.double(), b.double(), rtol=close, equal_nan=True), i


# ---- what is refused: a loop checks nothing, and would read what is not there


def plan_of(*lengths):
    return kernels.packed_plan(list(lengths))


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


def mixture_of(E, C, both, F):
    return zeros(E, C), zeros(E, both, C), zeros(E, C, F)


f64, ids = torch.float64, torch.zeros(3, dtype=torch.int64)
REFUSED = {
    "shapes (2, 3) and (4, 5)": lambda: kernels.matmul(zeros(2, 3), zeros(4, 5)),
    "shapes (2, 3) and (3, 5) do": lambda: kernels.matmul(zeros(2, 3), zeros(3, 5), out=zeros(3, 5)),
    "out torch.float64": lambda: kernels.matmul(zeros(2, 3), zeros(3, 5), out=zeros(2, 5, dtype=f64)),
    "dtype=torch.float64": lambda: kernels.matmul(zeros(2, 3, dtype=f64), zeros(3, 5, dtype=f64)),
    "torch.float64 on cpu beside torch.float32": lambda: kernels.matmul(zeros(2, 3), zeros(3, 5, dtype=f64)),
    "dtype=torch.bfloat16": lambda: kernels.rms_norm(zeros(2, 4).bfloat16(), zeros(4).bfloat16(), 1e-6),
    "weight (5,)": lambda: kernels.rms_norm(zeros(2, 4), zeros(5), 1e-6),
    "residual does": lambda: kernels.rms_norm(zeros(2, 4), zeros(4), 1e-6, zeros(3, 4)),
    "sin (1, 2)": lambda: kernels.norm_rope(zeros(2, 2, 4), zeros(2, 1, 4), zeros(2, 2), zeros(1, 2)),
    "k (3, 1, 4)": lambda: kernels.norm_rope(zeros(2, 2, 4), zeros(3, 1, 4), zeros(2, 2), zeros(2, 2)),
    "k (2, 1, 6)": lambda: kernels.norm_rope(zeros(2, 2, 4), zeros(2, 1, 6), zeros(2, 2), zeros(2, 2)),
    "gate (2, 4) and up (2, 5)": lambda: kernels.swiglu(zeros(2, 4), zeros(2, 5)),
    "(2, 4), (3, 4), (3, 5, 4), (3, 4, 2)": lambda: kernels.moe(zeros(2, 4), *mixture_of(3, 4, 5, 2), 1),
    "4 experts of 3": lambda: kernels.moe(zeros(2, 4), *mixture_of(3, 4, 4, 2), 4),
    "(4, 2), (1, 3), (4, 1)": lambda: kernels.merge(zeros(4, 2), zeros(1, 3), zeros(4, 1), 1.0),
    "on cpu beside torch.float64": lambda: kernels.merge(zeros(4, 2), zeros(1, 2, dtype=f64), zeros(4, 1), 1.0),
    "beside torch.float32": lambda: kernels.swiglu(zeros(2, 4), zeros(2, 4, dtype=f64)),
    "(2, 4, 8), (2, 3, 8)": lambda: kernels.attention(zeros(2, 4, 8), zeros(2, 3, 8), zeros(2, 3, 8), plan_of(2), 1),
    "(2, 2, 8), (2, 2, 9)": lambda: kernels.attention(zeros(2, 4, 8), zeros(2, 2, 8), zeros(2, 2, 9), plan_of(2), 1),
    "plan is of 5 tokens": lambda: kernels.attention(zeros(4, 2, 8), zeros(4, 2, 8), zeros(4, 2, 8), plan_of(2, 3), 1),
    "4 queries and 3 keys": lambda: kernels.attention(zeros(4, 2, 8), zeros(3, 2, 8), zeros(3, 2, 8), plan_of(4), 1),
    "hidden, weight, targets": lambda: kernels.token_logprobs(zeros(3, 4), zeros(9, 5), ids),
    "targets 9 to 9": lambda: kernels.token_logprobs(zeros(3, 4), zeros(9, 4), ids + 9),
    "targets -1 to -1": lambda: kernels.token_logprobs(zeros(3, 4), zeros(9, 4), ids - 1),
    "dim=0 of 2": lambda: kernels.log_softmax(zeros(3, 4), 0, False),
    "dtype=torch.float32: row_sums": lambda: kernels.row_sums(zeros(3, 4)),
    "(2, 4), (3,), (2,)": lambda: kernels.draw(zeros(2, 4), ids, ids[:2]),
    "logits (2, 4), rules (2,)": lambda: kernels.cut(zeros(2, 4), zeros(2)),
    "x (2, 4) beside 3": lambda: kernels.bit_sum(zeros(2, 4, dtype=torch.int32), ids, ids),
    "grad (4, 4) of ids (3,)": lambda: kernels.embedding_backward(zeros(4, 4), ids, 9, -1, False),
    "scale_grad_by_freq": lambda: kernels.embedding_backward(zeros(3, 4), ids, 9, -1, True),
    "entries of a page_table": lambda: kernels.paged_plan(ids, ids, zeros(4, 4, dtype=torch.int32).t(), ids),
    "the numbers and the": lambda: kernels.paged_plan(torch.arange(6)[::2], ids, zeros(4, 4, dtype=torch.int32), ids),
}


@pytest.mark.parametrize("message", REFUSED)
def test_operands_that_do_not_fit_are_refused_by_name(message):
    with pytest.raises(ValueError) as error:
        REFUSED[message]()
    assert message in str(error.value)


# ---- the compiled loops: when they are imported, and their cache

EXP_OF_ZERO = "import torch; from onecurve.cpu import loops; x = torch.zeros(1).numpy(); loops.cpu_exp(x, x); print(x)"


def in_a_new_process(folder, source=Path(kernels.__file__).parent, code=EXP_OF_ZERO, **env):
    """(what exp(0) gives, the lines on stderr) of a process that is to keep its compiled loops in this folder."""
    env = os.environ | dict(NUMBA_CACHE_DIR=str(folder)) | env
    run = subprocess.run([sys.executable, "-c", code], cwd=source, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip(), run.stderr.splitlines()


def test_numba_is_imported_when_the_first_tensor_on_a_cpu_comes(tmp_path):
    code = "import sys, torch, sync, kernels; kernels.enable_batch_invariant(); print('numba' in sys.modules); "
    code += "torch.ones(2).sum(); print('numba' in sys.modules)"
    assert in_a_new_process(tmp_path, code=code)[0].split() == ["False", "True"]


def test_the_first_start_says_in_one_line_that_it_compiles_and_the_second_does_not(tmp_path):
    out, said = in_a_new_process(tmp_path)
    assert out == "[1.]" and said == ["onecurve/cpu/loops.py: compiling for this CPU, once: up to half a minute"]
    assert in_a_new_process(tmp_path) == ("[1.]", [])


def test_without_a_folder_for_the_cache_the_loops_are_compiled_at_each_start_and_one_line_says_so(tmp_path):
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
        assert out == "[1.]" and len([x for x in said if "no folder for compiled loops" in x]) == 1, said
        assert len(said) == 2 and "compiling for this CPU" in said[1], said
