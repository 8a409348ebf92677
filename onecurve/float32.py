"""
The operators of kernels.py on a card in float32, in the order of the CPU's loops (onecurve/cpu/loops.py), so that a run
there ends in the CPU's digest. What is here takes the place of what has the same name in kernels.py, with the same
arguments; `kernels.enable_batch_invariant` switches it on. Equations and public functions are in kernels.py.

Why a card can follow a CPU: without tensor cores each number is computed by itself, and IEEE 754 leaves no choice in
+, -, *, /, a square root and a fused multiply-add, denormal numbers included. What is left is their order, and that is
written down in the loops:

    products      `tl.dot` in float32 is one chain of fused multiply-adds in the order of K, whatever the tile
    row sums      VECTOR sums side by side, then halves (`_total`): sums of two numbers, which no layout can reorder
    exp, log, ..  the loops' polynomials, step by step, as the card's own functions are approximate
    contraction   a product and a sum are one rounding where it says `tl.fma`, and two elsewhere (EXACT)

No float is added by `tl.sum`. Triton's `/`, `tl.sqrt`, `tl.rsqrt`, `tl.exp` and `tl.log` of float32 are approximate:
`tl.div_rn`, `tl.sqrt_rn`, `_exp` and `_log` are not. Its unary minus is 0 - x, which makes +0.0 of +0.0: `x * -1.0`.
"""

import math

import torch
import triton
import triton.language as tl
from triton.language import constexpr

import kernels
from kernels import (
    ELEMENT_WARPS,
    ELEMENTS,
    EXACT,
    _before,
    _find,
    _launch,
    _murmur_hash_uint32,
    _rank_int64,
    _row_tile,
    _turn,
)
from onecurve.cpu import loops

VECTOR = constexpr(loops.VECTOR)
HALVINGS = constexpr(loops.VECTOR.bit_length() - 1)
SUM_TOKENS = loops.SUM_TOKENS  # as on a CPU part of the order

# Speed only, never seen in the bits; guesses until measured:
SUM_ROWS = 32  # rows of a program of `row_sums`
NORM_COLUMNS = 64  # columns of a program that adds a norm's weight gradient, and ..
NORM_ROWS = 16  # .. the rows that it adds at a time
ROWS = 16  # query rows of a tile of attention
KEYS = 32  # .. and its keys


# ------------------------------------------------------------------------------------------------------------------
# the loops' functions, operation by operation. A number beside float64 is made one first: Triton would round it to
# float32.

LEAST = constexpr(float(loops.LEAST))
EXP_FIRST, EXP_LAST = (constexpr(float(x)) for x in loops.EXP_ENDS)
LOG2_E = constexpr(float(loops.LOG2_E32))
WHOLE32 = constexpr(float(loops.WHOLE32))
LN2_32_HIGH, LN2_32_LOW = (constexpr(float(x)) for x in loops.LN2_32)
EXP = constexpr(tuple(map(float, loops.EXP)))
WHOLE64 = constexpr(loops.WHOLE64)
LN2_64_HIGH, LN2_64_LOW = map(constexpr, loops.LN2_64)
LOG_SHIFT = constexpr(loops.LOG_SHIFT)
LOG_BASE = constexpr((0x3FF << 52) - loops.LOG_SHIFT)
LOG = constexpr(loops.LOG)
TWO_OVER_PI = constexpr(2.0 / math.pi)
HALF_PI_HIGH, HALF_PI_LOW = map(constexpr, loops.HALF_PI)
COS = constexpr(loops.COS)
SIN = constexpr(loops.SIN)


@triton.jit
def _polynomial(x, C: constexpr, N: constexpr):
    y = tl.full(x.shape, C[0], x.dtype)
    for i in tl.static_range(1, N):
        y = tl.fma(y, x, tl.full(x.shape, C[i], x.dtype))
    return y


@triton.jit
def _exp(x):
    """Of float32."""
    bounded = tl.minimum(tl.maximum(x, EXP_FIRST), EXP_LAST)
    n = tl.fma(bounded, LOG2_E, WHOLE32) - WHOLE32
    r = tl.fma(n, LN2_32_LOW, tl.fma(n, LN2_32_HIGH, bounded))
    y = tl.fma(_polynomial(r, EXP, 6), r * r, r) + 1.0
    n = n.to(tl.int32)
    half = n >> 1
    y *= ((half + 127) << 23).to(tl.float32, bitcast=True)
    y *= ((n - half + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x == x, y, x)


@triton.jit
def _log(x):
    """Of float64."""
    tiny = x < 2.2250738585072014e-308
    bits = tl.where(tiny, x * 2.0**54, x).to(tl.int64, bitcast=True) + LOG_SHIFT
    k = ((bits >> 52) - tl.where(tiny, 1077, 1023)).to(tl.float64)
    f = ((bits & 0xFFFFFFFFFFFFF) + LOG_BASE).to(tl.float64, bitcast=True) - 1.0
    s = f / (2.0 + f)
    half = 0.5 * f * f
    y = k * LN2_64_HIGH - ((half - (s * (half + s * s * _polynomial(s * s, LOG, 7)) + k * LN2_64_LOW)) - f)
    y = tl.where(x > 0.0, y, tl.where(x == 0.0, float("-inf"), float("nan")))
    return tl.where(x < float("inf"), y, x)


@triton.jit
def _cos_sin(x):
    """Of float64."""
    one = tl.full(x.shape, 1.0, tl.float64)
    n = tl.fma(x, one * TWO_OVER_PI, one * WHOLE64) - WHOLE64
    r = tl.fma(-n, one * HALF_PI_LOW, tl.fma(-n, one * HALF_PI_HIGH, x))
    z = r * r
    n = n.to(tl.int64)
    c = tl.fma(z * z, _polynomial(z, COS, 6), 1.0 - 0.5 * z)
    s = tl.fma(z * r, _polynomial(z, SIN, 6), r)
    odd = (n & 1) != 0
    cos = tl.where(odd, s, c)
    sin = tl.where(odd, c, s)
    cos = tl.where(((n + 1) & 2) != 0, cos * -1.0, cos)
    sin = tl.where((n & 2) != 0, sin * -1.0, sin)
    return cos, sin


@triton.jit
def _total(x):
    """The sum of each row of x (rows, VECTOR): its two halves are added until one number is left."""
    for _ in tl.static_range(HALVINGS):
        low, high = tl.split(x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1))
        x = low + high
    return x.reshape(x.shape[0])


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
    return _total(acc)


# ------------------------------------------------------------------------------------------------------------------
# row_sums, norms, RoPE, SwiGLU


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
def triton_rope_table(angle, cos, sin, N, BLOCK: constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < N
    x = tl.load(angle + i, mask=inside, other=0.0)
    c, s = _cos_sin(x.to(tl.float64))
    tl.store(cos + i, c.to(tl.float32), mask=inside)
    tl.store(sin + i, s.to(tl.float32), mask=inside)


def rope_table(angle):
    cos = torch.empty_like(angle)
    sin = torch.empty_like(angle)
    on_all(triton_rope_table, angle.numel(), angle.contiguous(), cos, sin)
    return cos, sin


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
        mean = tl.div_rn(_total(acc)[:, None] * r, D * 1.0)
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


@triton.jit
def triton_swiglu(gate, up, y, gate_r, up_r, C, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    g = tl.load(gate + row * gate_r + c, mask=inside, other=0.0)
    u = tl.load(up + row * up_r + c, mask=inside, other=0.0)
    silu = tl.div_rn(g, 1 + _exp(g * -1.0))
    tl.store(y + row * C + c, silu * u, mask=inside)


@triton.jit
def triton_swiglu_backward(grad, gate, up, d_gate, d_up, gate_r, up_r, C, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    d = tl.load(grad + row * C + c, mask=inside, other=0.0)
    g = tl.load(gate + row * gate_r + c, mask=inside, other=0.0)
    u = tl.load(up + row * up_r + c, mask=inside, other=0.0)
    e = 1 + _exp(g * -1.0)
    s = tl.div_rn(1.0, e)
    d_silu = s * (1 + g * (1 - s))
    tl.store(d_gate + row * C + c, d * u * d_silu, mask=inside)
    tl.store(d_up + row * C + c, d * tl.div_rn(g, e), mask=inside)


# ------------------------------------------------------------------------------------------------------------------
# mixture of experts


@triton.jit
def triton_choose(z, experts, w, E, k, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    z += row * E
    inside = i < E
    x = tl.load(z + i, mask=inside, other=float("-inf"))
    m = tl.max(x, 0)
    TAKEN: constexpr = -(1 << 62)
    keys = (_rank_int64(x) << 24) - i
    keys = tl.where(inside, keys, TAKEN)
    p = tl.zeros([BLOCK], tl.float32)
    lane = tl.arange(0, VECTOR)[None, :]
    sums = tl.zeros([1, VECTOR], tl.float32)
    for j in range(k):
        e = -tl.max(keys, 0) & 0xFFFFFF
        tl.store(experts + row * k + j, e)
        keys = tl.where(i == e, TAKEN, keys)
        its = _exp(tl.load(z + e + tl.arange(0, 1)) - m)
        p = tl.where(i == j, its, p)
        sums += tl.where((j - lane) % VECTOR == 0, its[None, :], 0.0)
    inside = i < k
    w += row * k
    tl.store(w + i, tl.div_rn(p, _total(sums)), mask=inside)


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
    den = _total(sums)
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
# the head, sampling rules, the draw


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
    log_sum = _log(_total(sums).to(tl.float64))
    tl.store(stats + 1 + tl.arange(0, 1), log_sum.to(tl.float32))


@triton.jit
def _log_prob(z, t, stats):
    x = tl.div_rn(z, t)
    return (x - tl.load(stats)) - tl.load(stats + 1)


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
    tl.store(entropy + row + one, _total(sums) * -1.0)
    logit = tl.load(z + tl.load(targets + row) + one)
    tl.store(logprobs + row + one, _log_prob(logit, t, stats))


@triton.jit
def triton_token_grads(
    z, t, stats, targets, entropy, grad, entropy_grad, dz, V: constexpr, BLOCK: constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t = tl.load(t)
    inside = c < V
    logits = tl.load(z + row * V + c, mask=inside, other=0.0)
    x = _log_prob(logits, t, stats + row * 2)
    p = _exp(x)
    g = tl.div_rn(tl.load(grad + row), t)
    e = 0.0
    if entropy_grad is not None:
        e = tl.div_rn(tl.load(entropy_grad + row), t)
    d = p * -1.0 * g - p * (tl.maximum(x, LEAST) + tl.load(entropy + row)) * e
    target = tl.load(targets + row)
    tl.store(dz + row * V + c, tl.where(c == target, d + g, d), mask=inside)


@triton.jit
def _ranked(z, t, m, c, V: constexpr):
    """(rank, mass) of the tokens c of a row."""
    logits = tl.load(z + c, mask=c < V, other=float("-inf"))
    x = tl.div_rn(logits, t)
    mass = (_exp(x - m) * 2.0**30).to(tl.int64)
    return _rank_int64(x), mass


@triton.jit
def _all_above(z, t, m, rank, V: constexpr, BLOCK: constexpr):
    n = tl.zeros([BLOCK], tl.int64)
    mass = tl.zeros([BLOCK], tl.int64)
    for first in range(0, V, BLOCK):
        c = first + tl.arange(0, BLOCK)
        ranks, masses = _ranked(z, t, m, c, V)
        above = ranks > rank
        n += above.to(tl.int64)
        mass += tl.where(above, masses, 0)
    return tl.sum(n, 0), tl.sum(mass, 0)


@triton.jit
def triton_cut(z, t, stats, rules, V: constexpr, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    z += row * V
    rules += row * 3
    t = tl.load(t)
    m = tl.load(stats + row * 2)
    top_p = tl.load(rules)
    top_k = tl.load(rules + 1).to(tl.int64)
    _, whole = _all_above(z, t, m, -(1 << 32), V, BLOCK)
    enough = (whole.to(tl.float64) * top_p).to(tl.int64)
    enough = tl.maximum(enough, 1)
    enough = tl.where(top_p < 1, enough, whole + 1)
    most = tl.where(top_k > 0, top_k, V)
    high = _rank_int64(m)
    min_p = tl.load(rules + 2 + tl.arange(0, 1)).to(tl.float64)
    low = tl.max(_rank_int64(m + _log(min_p).to(tl.float32)), 0) - 1
    while high - low > 1:
        middle = (low + high) >> 1
        n, mass = _all_above(z, t, m, middle, V, BLOCK)
        fits = (n < most) & (mass < enough)
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle)
    n, mass = _all_above(z, t, m, high, V, BLOCK)
    for first in range(0, V, BLOCK):
        c = first + tl.arange(0, BLOCK)
        inside = c < V
        ranks, masses = _ranked(z, t, m, c, V)
        last = ((ranks == high) & inside).to(tl.int64)
        before = tl.cumsum(last, 0) - last
        fits = (n + before < most) & (mass + before * masses < enough)
        dropped = inside & (ranks <= high) & ((ranks < high) | ~fits)
        tl.store(z + c, float("-inf"), mask=dropped)
        n += tl.sum(last, 0)
        mass += tl.sum(last * masses, 0)


@triton.jit
def triton_draw(logprobs, seeds, positions, scores, columns, V: constexpr, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    h = tl.minimum(_murmur_hash_uint32(seed, position, c), 0xFFFFFFFE)
    u = h.to(tl.float64) / 4294967295.0
    inside = c < V
    logprobs += row * V
    score = tl.load(logprobs + c, mask=inside, other=float("-inf")).to(tl.float64)
    score -= _log(tl.minimum(_log(u) * -1.0, 1.7976931348623157e308))
    score = tl.where(score == score, score, float("inf"))
    top = tl.max(score, 0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(scores + at, top)
    tl.store(columns + at, tl.min(tl.where(score == top, c, V), 0))


# ------------------------------------------------------------------------------------------------------------------
# the optimizer's step, and what formulas in plain torch need


@triton.jit
def triton_adamw(w, g, m, v, rest1, b2, rest2, keep, rate, root, eps, N, BLOCK: constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < N
    grad = tl.load(g + i, mask=inside, other=0.0)
    first = tl.load(m + i, mask=inside, other=0.0)
    second = tl.load(v + i, mask=inside, other=0.0)
    weight = tl.load(w + i, mask=inside, other=0.0)
    first = tl.fma(rest1, grad - first, first)
    second = tl.fma(rest2 * grad, grad, b2 * second)
    size = tl.div_rn(tl.sqrt_rn(second), root) + eps
    weight = weight * keep - tl.div_rn(rate * first, size)
    tl.store(w + i, weight, mask=inside)
    tl.store(m + i, first, mask=inside)
    tl.store(v + i, second, mask=inside)


@triton.jit
def triton_exp(x, y, N, BLOCK: constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < N
    numbers = tl.load(x + i, mask=inside, other=0.0)
    tl.store(y + i, _exp(numbers), mask=inside)


@triton.jit
def triton_log(x, y, N, BLOCK: constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < N
    numbers = tl.load(x + i, mask=inside, other=1.0)
    tl.store(y + i, _log(numbers.to(tl.float64)).to(tl.float32), mask=inside)


def on_all(kernel, N, *args):
    """An elementwise kernel over N numbers that lie side by side."""
    _launch(kernel, (-(-N // ELEMENTS),), *args, N, BLOCK=ELEMENTS, num_warps=ELEMENT_WARPS, **EXACT)


class AdamW(loops.AdamW):
    def move(self, N, *args):
        on_all(triton_adamw, N, *args)


def exp(x, y):
    on_all(triton_exp, x.numel(), x, y)


def log(x, y):
    on_all(triton_log, x.numel(), x, y)


def divide(x, y):
    """
    aten::div.Tensor. By a number torch would multiply by its rounded reciprocal on a card; by a tensor that lies there
    it divides.
    """
    dtype = torch.result_type(x, y)
    if not isinstance(y, torch.Tensor) or y.is_cpu and y.dim() == 0:
        y = x.new_full((), float(y), dtype=dtype)
    if not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    return torch.div(x, y, out=x.new_empty(0, dtype=dtype))


FORMULAS = {
    "exp": loops.element_wise(exp, torch.exp),
    "log": loops.element_wise(log, torch.log),
    "div.Tensor": divide,
}
