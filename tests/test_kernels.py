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


def test_the_switch_reaches_every_linear_forward_and_backward_and_back(monkeypatch):
    x, layer, calls, own = torch.randn(40, 1024).requires_grad_(), torch.nn.Linear(1024, 512), [], kernels.mm
    monkeypatch.setattr(kernels, "mm", lambda a, b: calls.append(tuple(a.shape)) or own(a, b))
    kernels.enable_batch_invariant()
    kernels.enable_batch_invariant()  # twice is once
    layer(x).sum().backward()
    assert calls == [(40, 1024), (40, 512), (512, 40)]  # forward, and the gradients of x and of the weight
    kernels.disable_batch_invariant()
    layer(x).sum().backward()
    assert len(calls) == 3


def test_silu_does_not_see_the_position_in_the_tensor_and_torchs_own_does():
    x = torch.randn(4099) * 4
    whole, theirs = kernels.silu(x), F.silu(x)
    assert torch.allclose(whole, theirs, atol=1e-6)
    assert all(same(kernels.silu(x[i:].clone()), whole[i:]) for i in range(1, 40))
    assert any(not same(F.silu(x[i:].clone()), theirs[i:]) for i in range(1, 40))
    y = x.double().requires_grad_()
    (expected,) = torch.autograd.grad(F.silu(y).sum(), y)
    assert torch.allclose(kernels.silu_backward(torch.ones_like(y), y.detach()), expected)


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


@pytest.mark.parametrize("heads,kv_heads,dim", [(4, 2, 32), (8, 1, 64)])
def test_packed_training_equals_prefill_equals_any_chunking_equals_decode(heads, kv_heads, dim):
    """Over a paged cache with shuffled pages whose unused slots hold NaN, in batches of every make-up."""
    lengths, scale = [150, 3, 64, 65, 1], 0.2
    q, k, v = qkv(sum(lengths), heads, kv_heads, dim)
    packed = kernels.attention(q, k, v, kernels.packed_plan(lengths), scale)
    start = [sum(lengths[:i]) for i in range(len(lengths))]

    slots = torch.randperm(400)[: sum(lengths)]
    keys, values = torch.full((400, kv_heads, dim), float("nan")), torch.full((400, kv_heads, dim), float("nan"))
    keys[slots], values[slots] = k, v
    table = torch.full((9, 200), 7)  # entries past a sequence's end point at some slot, often a NaN one
    request = [4, 0, 8, 2, 5]
    for r, s, n in zip(request, start, lengths):
        table[r, :n] = slots[s : s + n]

    def forward(chunks):  # [(sequence, first, last)]: one engine step
        rows = torch.cat([torch.arange(start[i] + a, start[i] + b) for i, a, b in chunks])
        q_lens, kv_lens = torch.tensor([b - a for _, a, b in chunks]), torch.tensor([b for _, _, b in chunks])
        plan = kernels.paged_plan(q_lens, kv_lens, table, torch.tensor([request[i] for i, _, _ in chunks]))
        return same(kernels.attention(q[rows], keys, values, plan, scale), packed[rows])

    assert forward([(i, 0, n) for i, n in enumerate(lengths)])  # prefill of all
    assert all(forward([(i, 0, n)]) for i, n in enumerate(lengths))  # of each alone
    assert all(forward([(0, a, min(a + c, 150))]) for c in (1, 7, 64, 100) for a in range(0, 150, c))  # chunks
    assert forward([(0, 149, 150), (3, 64, 65), (4, 0, 1)]) and forward([(3, 10, 11), (0, 63, 64)])  # decode steps
    assert forward([(2, 0, 64), (0, 100, 101), (3, 20, 60)])  # all kinds in one


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
