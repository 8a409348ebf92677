"""
The operators of kernels.py that add, on a card in float32, in the order of the CPU's loops (onecurve/cpu/loops.py), so
that a run there ends in the CPU's digest. What is here takes the place of what has the same name in kernels.py, with
the same arguments. Equations, public functions, and what computes number by number are in kernels.py.

Why a card can follow a CPU: without tensor cores each number is computed by itself, and IEEE 754 leaves no choice in
+, -, *, /, a square root and a fused multiply-add, denormal numbers included. What is left is their order, and that is
written down in the loops:

    products      `tl.dot` in float32 is one chain of fused multiply-adds in the order of K, whatever the tile
    row sums      VECTOR sums side by side, then halves (`_total`)
    contraction   a product and a sum are one rounding where it says `tl.fma`, and two elsewhere (EXACT)
"""

import torch
import triton
import triton.language as tl
from triton.language import constexpr

import kernels
from kernels import (
    EXACT,
    LEAST,
    VECTOR,
    _before,
    _exp,
    _find,
    _launch,
    _log,
    _log_prob,
    _row_tile,
    _total,
    _turn,
)
from onecurve.cpu import loops

SUM_TOKENS = loops.SUM_TOKENS  # as on a CPU part of the order

# Speed only, never seen in the bits; guesses until measured:
SUM_ROWS = 32  # rows of a program of `row_sums`
NORM_COLUMNS = 64  # columns of a program that adds a norm's weight gradient, and ..
NORM_ROWS = 16  # .. the rows that it adds at a time
ROWS = 16  # query rows of a tile of attention
KEYS = 32  # .. and its keys


# ------------------------------------------------------------------------------------------------------------------
# sums


@triton.jit
def _dots(x, y, inside, D: constexpr):
    """The products of rows of D at the pointers x and y (rows, 1), of those that are inside (rows, 1)."""
    lane = tl.arange(0, VECTOR)[None, :]
    acc = tl.zeros([inside.shape[0], VECTOR], tl.float32)
    for first in range(0, D, VECTOR):
        here = inside & (first + lane < D)
        u = tl.load(x + first + lane, mask=here, other=0.0)
        v = tl.load(y + first + lane, mask=here, other=0.0)
        acc = tl.fma(u, v, acc)
    return _total(acc, True)


# ------------------------------------------------------------------------------------------------------------------
# row_sums, norms


@triton.jit(do_not_specialize=["R", "C"])
def triton_row_sums(x, out, R, C, ROWS: constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < R
    x += row.to(tl.int64) * C
    acc = tl.zeros([ROWS], tl.float64)
    for i in range(C):
        acc += tl.load(x + i, mask=inside, other=0.0)
    tl.store(out + row, acc, mask=inside)


def row_sums(x):
    """Of x (R, C) float64, contiguous."""
    R, C = x.shape
    out = x.new_empty(R)
    _launch(triton_row_sums, (-(-R // SUM_ROWS),), x, out, R, C, ROWS=SUM_ROWS, num_warps=1, **EXACT)
    return out


@triton.jit
def _rms(x, inside, eps, D: constexpr):
    """1 / rms (rows, 1) of the rows at the pointers x."""
    mean_square = tl.div_rn(_dots(x, x, inside, D), D * 1.0)
    return tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))[:, None]


@triton.jit(do_not_specialize=["R"])
def triton_norm_rope(
    x, weight, cos, sin, y, eps, x_n, R, H: constexpr, D: constexpr, ROWS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)[None, :]
    some = (row < R)[:, None]
    inside = some & (i < D)
    at = (row // H).to(tl.int64) * x_n + row % H * D
    x += at[:, None]
    v = tl.load(x + i, mask=inside, other=0.0)
    if weight is not None:
        r = _rms(x, some, eps, D)
        v *= r
        v *= tl.load(weight + i, mask=i < D, other=0.0)
    if cos is not None:
        other, c, s = _turn(cos, sin, row, i, inside, -1.0, H, D)
        u = tl.load(x + other, mask=inside, other=0.0)
        if weight is not None:
            u *= r
            u *= tl.load(weight + other, mask=i < D, other=0.0)
        v = v * c + u * s
    y += row.to(tl.int64)[:, None] * D
    tl.store(y + i, v, mask=inside)


@triton.jit
def _turned_back(grad, cos, sin, row, i, inside, H: constexpr, D: constexpr):
    """Columns i of a gradient's rows."""
    grad += row.to(tl.int64)[:, None] * D
    g = tl.load(grad + i, mask=inside, other=0.0)
    if cos is not None:
        other, c, s = _turn(cos, sin, row, i, inside, 1.0, H, D)
        u = tl.load(grad + other, mask=inside, other=0.0)
        g = g * c + u * s
    return g


@triton.jit(do_not_specialize=["R"])
def triton_norm_rope_backward(
    grad, x, weight, cos, sin, dx, rms, eps, x_n, R, H: constexpr, D: constexpr, ROWS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """dx of ROWS rows, and 1 / rms (R,)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)[None, :]
    some = (row < R)[:, None]
    inside = some & (i < D)
    x_at = (row // H).to(tl.int64) * x_n + row % H * D
    x += x_at[:, None]
    g = _turned_back(grad, cos, sin, row, i, inside, H, D)
    if weight is not None:
        r = _rms(x, some, eps, D)
        tl.store(rms + row, r.reshape(ROWS), mask=row < R)
        lane = tl.arange(0, VECTOR)[None, :]
        acc = tl.zeros([ROWS, VECTOR], tl.float32)
        for first in range(0, D, VECTOR):
            c = first + lane
            here = some & (c < D)
            h = _turned_back(grad, cos, sin, row, c, here, H, D)
            h *= tl.load(weight + c, mask=c < D, other=0.0)
            acc = tl.fma(h, tl.load(x + c, mask=here, other=0.0), acc)
        mean = tl.div_rn(_total(acc, True)[:, None] * r, D * 1.0)
        g *= tl.load(weight + i, mask=i < D, other=0.0)
        n = tl.load(x + i, mask=inside, other=0.0) * r
        g = r * (g - n * mean)
    dx += row.to(tl.int64)[:, None] * D
    tl.store(dx + i, g, mask=inside)


@triton.jit(do_not_specialize=["R"])
def triton_norm_weight(
    grad, x, cos, sin, rms, dw, x_n, R, H: constexpr, D: constexpr, BLOCK: constexpr, STEP: constexpr, C: constexpr,
):  # fmt: skip
    """dw (D, blocks) of BLOCK rows each, in their order: a product with ones is a chain of sums."""
    block = tl.program_id(0)
    i = tl.program_id(1) * C + tl.arange(0, C)[None, :]
    ones = tl.full([16, STEP], 1.0, tl.float32)
    acc = tl.zeros([16, C], tl.float32)
    for first in range(block * BLOCK, min((block + 1) * BLOCK, R), STEP):
        row = first + tl.arange(0, STEP)
        inside = (row < R)[:, None] & (i < D)
        g = _turned_back(grad, cos, sin, row, i, inside, H, D)
        x_at = (row // H).to(tl.int64) * x_n + row % H * D
        n = tl.load(x + x_at[:, None] + i, mask=inside, other=0.0)
        n *= tl.load(rms + row, mask=row < R, other=0.0)[:, None]
        acc = tl.dot(ones, g * n, acc, input_precision="ieee")
    dw += i.to(tl.int64) * tl.num_programs(0)
    share = tl.max(acc, 0)[None, :]  # all 16 are equal
    tl.store(dw + block, share.to(tl.float64), mask=i < D)


def norm_rope_backward(grad, x, weight, cos, sin, dx, dw, eps, x_n, R, H, D):
    sizes = kernels._norm_config(D)
    rms = x.new_empty(R)
    args = grad, x, weight, cos, sin, dx, rms, eps, x_n, R, H, D
    _launch(triton_norm_rope_backward, (-(-R // sizes["ROWS"]),), *args, **sizes)
    if dw is not None:
        args = grad, x, cos, sin, rms, dw, x_n, R, H, D
        block = SUM_TOKENS * H
        grid = dw.shape[1], -(-D // NORM_COLUMNS)
        _launch(triton_norm_weight, grid, *args, block, NORM_ROWS, NORM_COLUMNS, num_warps=4, **EXACT)


# ------------------------------------------------------------------------------------------------------------------
# mixture of experts


@triton.jit
def triton_to_pairs(x, y, places, w, out, dots, k, C: constexpr, BLOCK: constexpr):
    pair = tl.program_id(0).to(tl.int64)
    x += pair // k * C
    to = tl.load(places + pair) * C
    for first in range(0, C, BLOCK):
        c = first + tl.arange(0, BLOCK)
        inside = c < C
        v = tl.load(x + c, mask=inside, other=0.0)
        if y is not None:
            v *= tl.load(w + pair)
        tl.store(out + to + c, v, mask=inside)
    if y is not None:
        one = tl.arange(0, 1)
        zero = one[:, None]
        product = _dots(x + zero, y + to + zero, zero == 0, C)
        tl.store(dots + pair + one, product)


# ------------------------------------------------------------------------------------------------------------------
# attention: of each row first the largest score, which has no order, then one chain over all keys from position 0 on,
# and so without splits. Backward: dq is a chain over the keys, dk and dv are chains over the rows.


@triton.jit
def _keys(x, start, first, length, row_size, pages, D: constexpr, KEYS: constexpr, PAGED: constexpr):
    """(KEYS, D) of a sequence's keys or values from `first` on; 0 past its end, where anything may lie."""
    at = first + tl.arange(0, KEYS)
    here = at < length
    row = start + at
    if PAGED:
        row = tl.load(pages + at, mask=here, other=0)
    x += row.to(tl.int64)[:, None] * row_size
    return tl.load(x + tl.arange(0, D)[None, :], mask=here[:, None], other=0.0)


@triton.jit
def _probabilities(s, seen, top, scale):
    return tl.where(seen, _exp(s * scale - top), 0.0)


@triton.jit(do_not_specialize=["B"])
def triton_attention(
    q, k, v, out, stats, q_ends, tile_ends, kv_lens, pages, requests, pages_r, scale, B,
    HEADS: constexpr, GROUPS: constexpr, D: constexpr, ROWS: constexpr, KEYS: constexpr, PAGED: constexpr,
):  # fmt: skip
    """A tile of rows, (query, head of the group) pairs. stats (N, H, 3): the largest score and the sum of each."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    b = _find(tile_ends, B, tile)
    if b == B:
        return
    start, length, query, group, token, valid = _row_tile(tile, q_ends, tile_ends, b, GROUPS, ROWS)
    kv_len = tl.load(kv_lens + b).to(tl.int32)
    position = kv_len - length + query
    last = tl.max(tl.where(valid, position, -1), 0) + 1  # keys that some row sees
    if PAGED:
        pages += tl.load(requests + b).to(tl.int64) * pages_r
    k += head * D
    v += head * D
    W: constexpr = HEADS * D
    row = token * (HEADS * GROUPS) + head * GROUPS + group
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    inside = valid[:, None]
    x = tl.load(q + at, mask=inside, other=0.0)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    for first in range(0, last, KEYS):
        kt = _keys(k, start, first, kv_len, W, pages, D, KEYS, PAGED)
        s = tl.dot(x, kt.T, input_precision="ieee")
        seen = first + tl.arange(0, KEYS)[None, :] <= position[:, None]
        m = tl.maximum(m, tl.max(tl.where(seen, s, float("-inf")), 1))
    m *= scale
    lane = tl.arange(0, KEYS)[:, None] % VECTOR
    comb = tl.where(lane == tl.arange(0, VECTOR)[None, :], 1.0, 0.0)
    sums = tl.zeros([ROWS, VECTOR], tl.float32)
    o = tl.zeros([ROWS, D], tl.float32)
    for first in range(0, last, KEYS):
        kt = _keys(k, start, first, kv_len, W, pages, D, KEYS, PAGED)
        vt = _keys(v, start, first, kv_len, W, pages, D, KEYS, PAGED)
        s = tl.dot(x, kt.T, input_precision="ieee")
        seen = first + tl.arange(0, KEYS)[None, :] <= position[:, None]
        p = _probabilities(s, seen, m[:, None], scale)
        sums = tl.dot(p, comb, sums, input_precision="ieee")
        o = tl.dot(p, vt, o, input_precision="ieee")
    den = _total(sums, True)
    tl.store(out + at, tl.div_rn(o, den[:, None]), mask=inside)
    tl.store(stats + row * 3, m, mask=valid)
    tl.store(stats + row * 3 + 1, den, mask=valid)


@triton.jit(do_not_specialize=["B"])
def triton_attention_dq(
    q, k, v, grad, out, stats, dq, q_ends, tile_ends, scale, B,
    HEADS: constexpr, GROUPS: constexpr, D: constexpr, ROWS: constexpr, KEYS: constexpr,
):  # fmt: skip
    """And the third of stats: rowsum(do * o)."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    b = _find(tile_ends, B, tile)
    if b == B:
        return
    start, length, query, group, token, valid = _row_tile(tile, q_ends, tile_ends, b, GROUPS, ROWS)
    k += head * D
    v += head * D
    W: constexpr = HEADS * D
    row = token * (HEADS * GROUPS) + head * GROUPS + group
    inside = valid[:, None]
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    x = tl.load(q + at, mask=inside, other=0.0)
    g = tl.load(grad + at, mask=inside, other=0.0)
    delta = _dots(grad + row[:, None] * D, out + row[:, None] * D, inside, D)
    tl.store(stats + row * 3 + 2, delta, mask=valid)
    top = tl.load(stats + row * 3, mask=valid, other=0.0)[:, None]
    den = tl.load(stats + row * 3 + 1, mask=valid, other=1.0)[:, None]
    acc = tl.zeros([ROWS, D], tl.float32)
    for first in range(0, tl.max(tl.where(valid, query, -1), 0) + 1, KEYS):
        kt = _keys(k, start, first, length, W, k, D, KEYS, False)
        vt = _keys(v, start, first, length, W, k, D, KEYS, False)
        s = tl.dot(x, kt.T, input_precision="ieee")
        seen = first + tl.arange(0, KEYS)[None, :] <= query[:, None]
        p = tl.div_rn(_probabilities(s, seen & inside, top, scale), den)
        dp = tl.dot(g, vt.T, input_precision="ieee")
        acc = tl.dot(p * (dp - delta[:, None]) * scale, kt, acc, input_precision="ieee")
    tl.store(dq + at, acc, mask=inside)


@triton.jit(do_not_specialize=["B"])
def triton_attention_dkv(
    q, k, v, grad, stats, dk, dv, q_ends, key_ends, scale, B,
    HEADS: constexpr, GROUPS: constexpr, D: constexpr, ROWS: constexpr, KEYS: constexpr,
):  # fmt: skip
    """Of a tile of keys, over the sequence's rows, query by query and within one head by head."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    b = _find(key_ends, B, tile)
    if b == B:
        return
    start = _before(q_ends, b)
    length = _before(q_ends, b + 1) - start
    first_key = (tile - _before(key_ends, b)) * KEYS
    key = first_key + tl.arange(0, KEYS)
    d = tl.arange(0, D)[None, :]
    W: constexpr = HEADS * D
    kt = _keys(k + head * D, start, first_key, length, W, k, D, KEYS, False)
    vt = _keys(v + head * D, start, first_key, length, W, k, D, KEYS, False)
    dk_acc = tl.zeros([KEYS, D], tl.float32)
    dv_acc = tl.zeros([KEYS, D], tl.float32)
    rows = length * GROUPS
    for first in range(first_key * GROUPS // ROWS * ROWS, rows, ROWS):
        r = first + tl.arange(0, ROWS)
        inside = r < rows
        token = (start + r // GROUPS).to(tl.int64)
        row = token * (HEADS * GROUPS) + head * GROUPS + r % GROUPS
        at = row[:, None] * D + d
        x = tl.load(q + at, mask=inside[:, None], other=0.0)
        g = tl.load(grad + at, mask=inside[:, None], other=0.0)
        top = tl.load(stats + row * 3, mask=inside, other=0.0)[None, :]
        den = tl.load(stats + row * 3 + 1, mask=inside, other=1.0)[None, :]
        delta = tl.load(stats + row * 3 + 2, mask=inside, other=0.0)[None, :]
        s = tl.dot(kt, x.T, input_precision="ieee")
        seen = (key[:, None] * GROUPS <= r[None, :]) & inside[None, :]
        p = tl.div_rn(_probabilities(s, seen, top, scale), den)
        dv_acc = tl.dot(p, g, dv_acc, input_precision="ieee")
        dp = tl.dot(vt, g.T, input_precision="ieee")
        dk_acc = tl.dot(p * (dp - delta) * scale, x, dk_acc, input_precision="ieee")
    to = ((start + key).to(tl.int64) * HEADS + head)[:, None] * D + d
    here = (key < length)[:, None]
    tl.store(dk + to, dk_acc, mask=here)
    tl.store(dv + to, dv_acc, mask=here)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan, scale):
        q = q.contiguous()
        k = k.contiguous()
        v = v.contiguous()
        N, H, D = q.shape
        heads = k.shape[1]
        groups = H // heads
        sizes = dict(HEADS=heads, GROUPS=groups, D=D, ROWS=ROWS, KEYS=KEYS, num_warps=4, num_stages=1, **EXACT)
        out = torch.empty_like(q)
        stats = q.new_empty(N, H, 3)
        paged = plan.page_table is not None
        pages = plan.page_table if paged else plan.q_ends
        requests = plan.requests if paged else plan.q_ends
        grid = N * groups // ROWS + min(N, plan.B), heads
        args = q, k, v, out, stats, plan.q_ends, plan.ends(groups, ROWS), plan.kv_lens, pages, requests
        _launch(triton_attention, grid, *args, pages.stride(0), scale, plan.B, PAGED=paged, **sizes)
        ctx.save_for_backward(q, k, v, out, stats)
        ctx.tail = plan, scale, sizes
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, stats = ctx.saved_tensors
        plan, scale, sizes = ctx.tail
        N, H, _ = q.shape
        heads = sizes["HEADS"]
        groups = sizes["GROUPS"]
        kernels.check(plan.page_table is None, "attention over a paged_plan has no gradient: train on a packed_plan")
        grad = grad.contiguous()
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        sequences = min(N, plan.B)
        grid = N * groups // ROWS + sequences, heads
        args = q, k, v, grad, out, stats, dq, plan.q_ends, plan.ends(groups, ROWS), scale, plan.B
        _launch(triton_attention_dq, grid, *args, **sizes)
        grid = N // KEYS + sequences, heads
        args = q, k, v, grad, stats, dk, dv, plan.q_ends, plan.ends(1, KEYS), scale, plan.B
        _launch(triton_attention_dkv, grid, *args, **sizes)
        return dq, dk, dv, None, None


# ------------------------------------------------------------------------------------------------------------------
# the head


@triton.jit
def triton_softmax_stats(z, t, stats, V: constexpr, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    z += row * V
    t = tl.load(t)
    m = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, V, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(z + i, mask=i < V, other=float("-inf"))
        m = tl.maximum(m, tl.div_rn(x, t))
    m = tl.max(m, 0)
    sums = tl.zeros([1, VECTOR], tl.float32)
    for first in range(0, V, VECTOR):
        i = first + tl.arange(0, VECTOR)[None, :]
        x = tl.load(z + i, mask=i < V, other=float("-inf"))
        sums += _exp(tl.div_rn(x, t) - m)
    stats += row * 2
    tl.store(stats, m)
    log_sum = _log(_total(sums, True).to(tl.float64))
    tl.store(stats + 1 + tl.arange(0, 1), log_sum.to(tl.float32))


@triton.jit
def triton_token_logprobs(z, t, stats, targets, logprobs, entropy, V: constexpr, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(t)
    z += row * V
    stats += row * 2
    sums = tl.zeros([1, VECTOR], tl.float32)
    for first in range(0, V, VECTOR):
        i = first + tl.arange(0, VECTOR)[None, :]
        logits = tl.load(z + i, mask=i < V, other=float("-inf"))
        x = _log_prob(logits, t, stats)
        sums += _exp(x) * tl.maximum(x, LEAST)
    one = tl.arange(0, 1)
    tl.store(entropy + row + one, _total(sums, True) * -1.0)
    logit = tl.load(z + tl.load(targets + row) + one)
    tl.store(logprobs + row + one, _log_prob(logit, t, stats))
