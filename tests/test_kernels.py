"""
The operators bit for bit: what a row's neighbours are, and how the work was cut, must not be seen in its result.

    pytest tests/test_kernels.py
"""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import kernels

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
    kernels.disable_batch_invariant()


@pytest.mark.parametrize("K,N", SHAPES)
def test_a_row_of_mm_does_not_see_its_batch_nor_the_threads(K, N):
    x, w = torch.randn(300, K), torch.randn(N, K)
    torch.set_num_threads(1)
    whole = kernels.mm(x, w.t())
    assert torch.allclose(whole, (x.double() @ w.double().t()).float(), atol=1e-3)
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
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
    """The negative control: without the padding, and MKL's switch, the test above would fail."""
    code = """if True:
        import torch
        torch.manual_seed(0)
        x, w = torch.randn(64, 1024), torch.randn(512, 1024)
        print(max(float(((x[:M] @ w.t()) - (x @ w.t())[:M]).abs().max()) for M in (1, 2, 3)))"""
    env = {k: v for k, v in os.environ.items() if k != "MKL_CBWR"}
    assert 0 < float(subprocess.check_output([sys.executable, "-c", code], env=env)) < 1e-3


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


def test_swiglu_does_not_see_the_position_in_the_tensor_and_torchs_own_silu_does():
    x, one = torch.randn(4099) * 4, torch.ones(4099)
    whole, theirs = kernels.swiglu(x, one), F.silu(x)
    assert torch.allclose(whole, theirs, atol=1e-6)
    assert all(same(kernels.swiglu(x[i:].clone(), one[i:]), whole[i:]) for i in range(1, 40))
    assert any(not same(F.silu(x[i:].clone()), theirs[i:]) for i in range(1, 40))


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


@pytest.mark.parametrize("op", ["rms_norm", "log_softmax", "softmax", "logsumexp"])
def test_row_operators_left_to_torch_are_row_invariant(op):
    def rms_norm(x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    f = rms_norm if op == "rms_norm" else lambda x: getattr(torch, op)(x, -1)
    for width in (16, 98, 128, 1000, 4096):
        x = torch.randn(200, width)
        whole = f(x)
        for M in (1, 2, 3, 5, 17, 100):
            assert same(f(x[7 : 7 + M].clone()), whole[7 : 7 + M]), (width, M)


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
