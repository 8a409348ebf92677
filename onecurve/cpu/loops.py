"""
The operators of kernels.py on a CPU, in float32: loops that Numba compiles. The loop `cpu_swiglu` is the kernel
`triton_swiglu`; equations, shapes and public functions are in kernels.py. An engine's layers in one call and some aten
operators are here alone.

What torch 2.11 does on a CPU by itself, and what these loops do about it:

    matmul        rows differ unless their number is a multiple of 16, columns and long sums between thread counts: here
                  each element is one chain of fused multiply-adds in the order of K, wherever its tile lies.
    row sums      follow the width of the machine's vectors, as do `exp`, `log` and their kin, silu, AdamW and the
                  random numbers of weights: here a sum is VECTOR sums side by side and then pairwise, whatever the
                  width, and the functions are polynomials in operations that every CPU rounds alike. So all CPUs have
                  one digest.
    attention     SDPA adds a decode step in another order than a prefill: here a score is a chain over the head's
                  numbers and an output one over the keys from position 0, in packed training, prefill and decode alike.

The language of the loops, tiles and functions such as `exp`, is at the end. All of it is one file, since Numba keeps
what it has compiled until this file changes, and does not see a change in another one. The threads that share a loop
are in onecurve/cpu/host.py.
"""

import functools
import math
import sys
from decimal import Decimal

import llvmlite.binding
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils, event
from numba.extending import intrinsic, models, register_model

from onecurve.cpu import host
from onecurve.cpu.host import NOTHING

# Part of the order of addition, as those of kernels.py:
VECTOR = 16  # a row's sum is this number of sums side by side, whatever the width of the machine's vectors
SUM_TOKENS = 64  # tokens that a norm's weight gradient adds before `row_sums` takes over

# Speed only, never seen in the bits:
BLOCK_ROWS = 64  # rows of a unit of work,
DEPTH = 256  # .. and how many of K are packed and then multiplied at a time: both stay in the caches
QUERIES = 64  # query rows of a tile
# TILE_ROWS and TILE_VECTORS, the tile that the registers hold, and PANEL, its columns, are at the end of the file


@functools.cache
def _say(text):
    """Prints a line, once in a process."""
    print(f"onecurve/cpu/loops.py: {text}", file=sys.stderr, flush=True)


def loop(function, **options):
    """Compiled at its first call, as it stands; the result is kept beside this file, or where NUMBA_CACHE_DIR says."""
    options |= dict(nogil=True, error_model="numpy")
    try:
        return numba.njit(function, cache=True, **options)
    except (RuntimeError, OSError):
        _say("no folder for compiled loops can be written (NUMBA_CACHE_DIR): they are compiled at each start")
        return numba.njit(function, **options)


# ------------------------------------------------------------------------------------------------------------------
# matmul


@loop
def panels(columns):
    return (columns + PANEL - 1) // PANEL


@loop
def padded(rows):
    """A number of rows rounded up to whole vectors; what is packed beyond `rows` is in no result."""
    return (rows + VECTOR - 1) // VECTOR * VECTOR


@loop
def cpu_pack(first, last, b, b_k, b_n, K, N, packed):
    """
    Panels first .. last of b (K, N), PANEL columns each, as `cpu_multiply` reads them: (panels, K, PANEL), 0 beyond N.
    b_k or b_n is 1. Beyond its panels are those of the next matrix.
    """
    width = panels(N) * PANEL
    for column in range(first * PANEL, last * PANEL, VECTOR):
        to = column // PANEL * PANEL * K + column % PANEL
        n = column % width
        at = column // width * K * N
        whole = K // VECTOR * VECTOR if b_n != 1 and n + VECTOR <= N else 0
        for k in range(0, whole, VECTOR):
            square = load(VECTOR, 1, b, at + n * b_n + k, b_n, VECTOR)
            store(transpose(square), packed, to + k * PANEL, PANEL, VECTOR)
        for k in range(whole, K):
            if b_n == 1:
                store(vector(b, at + k * b_k + n, N - n), packed, to + k * PANEL, 0, VECTOR)
            else:
                for i in range(VECTOR):
                    packed[to + k * PANEL + i] = b[at + (n + i) * b_n + k] if n + i < N else ZERO


@loop
def _packed(b, b_k, b_n, K, N):
    """All panels of b (K, N)."""
    packed = floats(panels(N) * PANEL * K)
    cpu_pack(0, panels(N), b, b_k, b_n, K, N, packed)
    return packed


@loop
def cpu_multiply(a, at, a_m, a_k, M, K, packed, start, depth, c, to, N, add, first=0, last=1 << 30):
    """
    c[to + m N + n] = sum_k a[at + m a_m + k a_k] b[k, n], added to what is there if `add`: one chain of `fma` in the
    order of K. b: the rows from `start` on of `packed` (panels, depth, PANEL). first, last: of the panels; else all.
    """
    for panel in range(first, min(last, panels(N))):
        b = (panel * depth + start) * PANEL
        n = panel * PANEL
        whole = M // TILE_ROWS * TILE_ROWS
        read = N - n if add else 0
        for m in range(0, whole, TILE_ROWS):
            tile = load(TILE_ROWS, TILE_VECTORS, c, to + m * N + n, N, read)
            for k in range(K):
                tile = add_outer(tile, a, at + m * a_m + k * a_k, a_m, packed, b + k * PANEL)
            store(tile, c, to + m * N + n, N, N - n)
        for m in range(whole, M):
            row = load(1, TILE_VECTORS, c, to + m * N + n, N, read)
            for k in range(K):
                row = add_outer(row, a, at + m * a_m + k * a_k, a_m, packed, b + k * PANEL)
            store(row, c, to + m * N + n, N, N - n)


@loop
def cpu_matmul_blocks(first, last, a, a_m, a_k, b, b_k, b_n, packed, c, M, N, K, add):
    """
    Units are blocks of rows if there are more rows than columns, else panels. packed: b's panels; if it is empty, each
    thread packs those that it needs, DEPTH of K at a time.
    """
    begin, end = (0, panels(N)) if M > N else (first, last)
    top, bottom = (first * BLOCK_ROWS, min(M, last * BLOCK_ROWS)) if M > N else (0, M)
    kept = len(packed) > 0
    most = K or 1 if kept else DEPTH
    there = packed if kept else floats(end * PANEL * DEPTH)
    for k in range(0, K or 1, most):
        depth = min(most, K - k)
        if not kept:
            cpu_pack(begin, end, b[k * b_k :], b_k, b_n, depth, N, there)
        for m in range(top, bottom, BLOCK_ROWS):
            rows = min(BLOCK_ROWS, bottom - m)
            at = m * a_m + k * a_k
            cpu_multiply(a, at, a_m, a_k, rows, depth, there, 0, depth, c, m * N, N, add or k > 0, begin, end)


def panels_of(b):
    """The panels of b (K, N), or of each of a mixture's b (E, K, N)."""
    where = b.data_ptr(), b.shape, b.stride()
    if host.panel_cache and where in host.panel_cache:
        return host.panel_cache[where][1]
    *E, K, N = b.shape
    units = math.prod(E) * -(-N // PANEL)
    packed = np.empty(units * K * PANEL, np.float32)
    host.share(cpu_pack, units, b.numel(), b, *b.stride()[-2:], K, N, packed)
    if host.panel_cache is not None:
        host.panel_cache[where] = b, packed
    return packed


def cpu_matmul(a, b, out=None):
    """a (M, K) @ b (K, N) -> (M, N), any strides. out: a contiguous result to which the product is added."""
    M, K = a.shape
    N = b.shape[1]
    add = out is not None
    c = out if add else a.new_empty(M, N)
    if 1 not in b.stride():
        b = b.contiguous()
    packed = NOTHING if host.panel_cache is None else panels_of(b)
    units = -(-M // BLOCK_ROWS) if M > N else -(-N // PANEL)
    host.share(cpu_matmul_blocks, units, 2 * M * N * K, a, *a.stride(), b, *b.stride(), packed, c, M, N, K, add)
    return c


# ------------------------------------------------------------------------------------------------------------------
# row_sums, norm_rope and swiglu


@loop
def cpu_row_sums(first, last, x, out, C):
    for row in range(first, last):
        y = 0.0
        for i in range(row * C, (row + 1) * C):
            y += x[i]
        out[row] = y


@loop
def cpu_rope_table(first, last, angle, cos, sin):
    for i in range(first, last):
        cos[i], sin[i] = cos_sin(np.float64(angle[i]))


@loop
def _rms(x, at, D, eps):
    return ONE / np.sqrt(dot(x, at, x, at, D) / np.float32(D) + eps)


@loop
def _turn_row(y, cos, sin, token, D, sign):
    half = D // 2
    other = y[half:]
    c = cos[token * half :]
    s = sin[token * half :]
    for i in range(half):
        a = y[i]
        b = other[i]
        turned = sign * s[i]
        y[i] = a * c[i] - b * turned
        other[i] = b * c[i] + a * turned


@loop
def cpu_norm_rope(first, last, x, weight, cos, sin, y, eps, x_n, R, H, D):
    """Tokens first .. last of x, H rows of D each, x_n apart. An empty weight skips the norm, an empty cos the turn."""
    for row in range(first * H, last * H):
        at = row // H * x_n + row % H * D
        x_row = x[at:]
        y_row = y[row * D :]
        r = _rms(x, at, D, eps) if len(weight) else ONE
        for i in range(D):
            y_row[i] = x_row[i] * r * weight[i] if len(weight) else x_row[i]
        if len(cos):
            _turn_row(y_row, cos, sin, row // H, D, ONE)


@loop
def cpu_norm_rope_backward(first, last, grad, x, weight, cos, sin, dx, dw, eps, x_n, R, H, D):
    """
    dw (blocks, D), unless the weight is frozen, gets the sum over each block's rows in order; first .. last are blocks
    of SUM_TOKENS tokens.
    """
    for row in range(first * SUM_TOKENS * H, min(last * SUM_TOKENS * H, R)):
        at = row // H * x_n + row % H * D
        x_row = x[at:]
        g = dx[row * D :]
        for i in range(D):
            g[i] = grad[row * D + i]
        if len(cos):
            _turn_row(g, cos, sin, row // H, D, -ONE)
        if len(weight):
            r = _rms(x, at, D, eps)
            if len(dw):
                block = dw[row // H // SUM_TOKENS * D :]
                for i in range(D):
                    block[i] += g[i] * (x_row[i] * r)
            for i in range(D):
                g[i] *= weight[i]
            mean = dot(dx, row * D, x, at, D) * r / np.float32(D)
            for i in range(D):
                g[i] = r * (g[i] - x_row[i] * r * mean)


@loop
def cpu_swiglu(first, last, gate, up, y, gate_r, up_r, C):
    for row in range(first, last):
        g = gate[row * gate_r :]
        u = up[row * up_r :]
        y_row = y[row * C :]
        for c in range(C):
            silu = g[c] / (ONE + exp(-g[c]))
            y_row[c] = silu * u[c]


@loop
def cpu_swiglu_backward(first, last, grad, gate, up, d_gate, d_up, gate_r, up_r, C):
    for row in range(first, last):
        d = grad[row * C :]
        g = gate[row * gate_r :]
        u = up[row * up_r :]
        dg = d_gate[row * C :]
        du = d_up[row * C :]
        for c in range(C):
            e = ONE + exp(-g[c])  # infinite for a g below -88, and the gradient then 0: g times exp(-g) would be NaN
            s = ONE / e
            d_silu = s * (ONE + g[c] * (ONE - s))
            dg[c] = d[c] * u[c] * d_silu
            du[c] = d[c] * (g[c] / e)


# ------------------------------------------------------------------------------------------------------------------
# mixture of experts


@loop
def cpu_choose(first, last, z, experts, w, E, k):
    """Of each row of z (N, E) the k experts and their w, (N, k) each, the likeliest first."""
    keys = np.empty(k + 1, np.int64)  # the last is of an expert that is not chosen
    for row in range(first, last):
        keys[:] = -(1 << 62)
        for e in range(E):
            key = (_rank(z[row * E + e]) << 24) - e
            j = k
            while j > 0 and keys[j - 1] < key:
                keys[j] = keys[j - 1]
                j -= 1
            keys[j] = key
        for j in range(row * k, (row + 1) * k):
            experts[j] = -keys[j - row * k] & 0xFFFFFF
            w[j] = exp(z[row * E + experts[j]] - z[row * E + experts[row * k]])
        weights = sum_of(w, row * k, k)
        for j in range(row * k, (row + 1) * k):
            w[j] /= weights


@loop
def cpu_by_expert(_first, _last, experts, starts, places, _pairs):
    """Sorts pairs (N * k,) by expert: the place of each, and where each expert's begin, in `starts` (E + 2,), of 0."""
    for e in experts:
        starts[e + 2] += 1
    for e in range(2, len(starts)):
        starts[e] += starts[e - 1]
    for i, e in enumerate(experts):
        places[i] = starts[e + 1]
        starts[e + 1] += 1


@loop
def cpu_to_pairs(first, last, x, y, places, w, out, dots, k, C):
    """
    Each row of x (N, C), times its w (N, k) if there are any, at the places of its k pairs in out (N * k, C). dots
    (N, k): the products of x with the pairs y (N * k, C), if there are any.
    """
    for i in range(first * k, last * k):
        at = i // k * C
        to = places[i] * C
        weight = w[i] if len(w) else ONE
        for j in range(C):
            out[to + j] = weight * x[at + j]
        if len(y):
            dots[i] = dot(x, at, y, to, C)


@loop
def cpu_expert_matmul(first, last, a, packed, starts, c, K, N):
    """c (N * k, N) = a b of each expert's rows of a (N * k, K) and its b (K, N); units are (expert, panel)."""
    across = panels(N)
    for unit in range(first, last):
        e = unit // across
        panel = unit % across
        b = packed[e * across * PANEL * K :]
        m = starts[e]
        cpu_multiply(a, m * K, K, 1, starts[e + 1] - m, K, b, 0, K, c, m * N, N, False, panel, panel + 1)


@loop
def cpu_expert_gradients(first, last, a, b, c, starts, M, N, *_):
    """c (E, M, N) = a^T b over each expert's rows of a (N * k, M) and b (N * k, N); units are experts."""
    for e in range(first, last):
        K = starts[e + 1] - starts[e]
        packed = _packed(b[starts[e] * N :], N, 1, K, N)
        cpu_multiply(a, starts[e] * M, 1, M, M, K, packed, 0, K, c, e * M * N, N, False)


@loop
def cpu_combine(first, last, y, places, w, out, k, C):
    """Each row of out (N, C) is the sum of its pairs in y (N * k, C), each times its w, slot by slot."""
    for row in range(first, last):
        out_row = out[row * C : (row + 1) * C]
        out_row[:] = ZERO
        for i in range(row * k, (row + 1) * k):
            pair = y[places[i] * C :]
            for c in range(C):
                out_row[c] = fma(w[i], pair[c], out_row[c])


@loop
def cpu_moe(x, N, C, gate_up, down, F, out, mixture):
    """`moe` of rows x (N, C); weights are panels. mixture: (router, E, k)."""
    router, E, k = mixture
    z = _linear(x, N, C, router, NOTHING, E)
    experts = np.empty(N * k, np.int64)
    places = np.empty(N * k, np.int64)
    starts = np.zeros(E + 2, np.int64)
    w = floats(N * k)
    rows = floats(N * k * C)
    y = floats(N * k * 2 * F)
    hidden = floats(N * k * F)
    cpu_choose(0, N, z, experts, w, E, k)
    cpu_by_expert(0, 1, experts, starts, places, N * k)
    cpu_to_pairs(0, N, x, NOTHING, places, NOTHING, rows, w, k, C)
    cpu_expert_matmul(0, E * panels(2 * F), rows, gate_up, starts, y, C, 2 * F)
    cpu_swiglu(0, N * k, y, y[F:], hidden, 2 * F, 2 * F, F)
    cpu_expert_matmul(0, E * panels(C), hidden, down, starts, rows, F, C)
    cpu_combine(0, N, rows, places, w, out, k, C)


# ------------------------------------------------------------------------------------------------------------------
# attention


@loop
def _copy(x, at, out, to, n):
    for j in range(0, n, VECTOR):
        store(vector(x, at + j, n - j), out, to + j, 0, n - j)


@loop
def _gather(x, rows, first, n, parts, part, width, out=None):
    """This part of n rows of x (any, parts, width), from rows[first] on, in `out` or what is made: (n, width)."""
    to = floats(padded(n) * width) if out is None else out
    for i in range(n):
        _copy(x, (np.int64(rows[first + i]) * parts + part) * width, to, i * width, width)
    return to


@loop
def _scatter(x, x_n, rows, first, n, parts, part, width, out):
    """Copies n rows of x, x_n apart, to where `_gather` would read them in `out` (any, parts, width)."""
    for i in range(n):
        _copy(x, i * x_n, out, (np.int64(rows[first + i]) * parts + part) * width, width)


@loop
def _scores_to_probabilities(s, at, keys, width, scale, m):
    """A row of `width` scores becomes exp(score * scale - m), and 0 beyond the first `keys`, which are all it sees."""
    row = s[at : at + width]
    for i in range(keys):
        row[i] = exp(row[i] * scale - m)
    row[keys:] = ZERO


@loop
def _query_row(start, i, head, H, G):
    """Row i of a unit's queries as a row of (N H, ..); the sequence has the tokens from `start` on."""
    return (start + i // G) * H + head * G + i % G


@loop
def cpu_attention(first, last, all_q, all_k, all_v, all_out, stats, indices, H, HK, D, scale):
    """
    Units are (sequence, key head) pairs. A unit's queries, token by token and within one head by head, are multiplied
    QUERIES rows at a time with its keys and values, which lie together for all of them. stats (N, H, 2): of each row
    the largest score and the sum.
    """
    tokens, rows, q_starts, q_lens, kv_starts, kv_lens = indices
    G = H // HK
    longest = kv_lens.max()
    size = (longest * G + PANEL) * (D + PANEL)  # room for each of these
    q = floats(size)
    k = floats(size)  # and then v
    k_T = floats(size)
    v_panels = floats(size)
    p = floats(QUERIES * longest)
    out = floats(QUERIES * D)
    for unit in range(first, last):
        b = unit // HK
        head = unit % HK
        T = q_lens[b]
        L = kv_lens[b]
        _gather(all_q, tokens, q_starts[b], T, HK, head, G * D, q)
        _gather(all_k, rows, kv_starts[b], L, HK, head, D, k)
        cpu_pack(0, panels(L), k, 1, D, D, padded(L), k_T)
        _gather(all_v, rows, kv_starts[b], L, HK, head, D, k)
        cpu_pack(0, panels(D), k, D, 1, L, D, v_panels)
        for r in range(0, T * G, QUERIES):
            R = min(QUERIES, T * G - r)
            seen = L - T + (r + R - 1) // G + 1  # keys that some row of the block sees
            cpu_multiply(q, r * D, D, 1, R, D, k_T, 0, D, p, 0, seen, False)
            for i in range(R):
                mine = L - T + (r + i) // G + 1
                row = _query_row(q_starts[b], r + i, head, H, G)
                stats[2 * row] = largest(p, i * seen, mine) * scale
                _scores_to_probabilities(p, i * seen, mine, seen, scale, stats[2 * row])
                stats[2 * row + 1] = sum_of(p, i * seen, mine)
            cpu_multiply(p, 0, seen, 1, R, seen, v_panels, 0, L, out, 0, D, False)
            for i in range(R):
                row = _query_row(q_starts[b], r + i, head, H, G)
                mean = out[i * D :]
                out_row = all_out[row * D :]
                for j in range(D):
                    out_row[j] = mean[j] / stats[2 * row + 1]


@loop
def cpu_attention_backward(
    first, last, all_do, all_q, all_k, all_v, all_out, stats, all_dq, all_dk, all_dv, indices, H, HK, D, scale
):
    """The units and blocks of `cpu_attention`. dk and dv are chains over the query rows in order, dq over the keys."""
    tokens, rows, q_starts, q_lens, kv_starts, kv_lens = indices
    G = H // HK
    longest = kv_lens.max()
    p = floats(QUERIES * longest)
    ds = floats(QUERIES * longest)
    for unit in range(first, last):
        b = unit // HK
        head = unit % HK
        T = q_lens[b]
        L = kv_lens[b]
        q = _gather(all_q, tokens, q_starts[b], T, HK, head, G * D)
        do = _gather(all_do, tokens, q_starts[b], T, HK, head, G * D)
        k = _gather(all_k, rows, kv_starts[b], L, HK, head, D)
        v = _gather(all_v, rows, kv_starts[b], L, HK, head, D)
        k_T = _packed(k, 1, D, D, padded(L))
        v_T = _packed(v, 1, D, D, padded(L))
        k_panels = _packed(k, D, 1, L, D)
        q_panels = _packed(q, D, 1, T * G, D)
        do_panels = _packed(do, D, 1, T * G, D)
        dq = floats(T * G * D)
        dk = np.zeros(L * D, np.float32)
        dv = np.zeros(L * D, np.float32)
        for r in range(0, T * G, QUERIES):
            R = min(QUERIES, T * G - r)
            seen = L - T + (r + R - 1) // G + 1
            cpu_multiply(q, r * D, D, 1, R, D, k_T, 0, D, p, 0, seen, False)
            cpu_multiply(do, r * D, D, 1, R, D, v_T, 0, D, ds, 0, seen, False)
            for i in range(R):
                row = _query_row(q_starts[b], r + i, head, H, G)
                mine = L - T + (r + i) // G + 1
                _scores_to_probabilities(p, i * seen, mine, seen, scale, stats[2 * row])
                delta = dot(do, (r + i) * D, all_out, row * D, D)
                p_row = p[i * seen :]
                ds_row = ds[i * seen :]
                for j in range(seen):
                    p_row[j] /= stats[2 * row + 1]
                    ds_row[j] = p_row[j] * (ds_row[j] - delta) * scale
            cpu_multiply(p, 0, 1, seen, seen, R, do_panels, r, T * G, dv, 0, D, True)
            cpu_multiply(ds, 0, 1, seen, seen, R, q_panels, r, T * G, dk, 0, D, True)
            cpu_multiply(ds, 0, seen, 1, R, seen, k_panels, 0, L, dq, r * D, D, False)
        _scatter(dq, G * D, tokens, q_starts[b], T, HK, head, G * D, all_dq)
        _scatter(dk, D, rows, kv_starts[b], L, HK, head, D, all_dk)
        _scatter(dv, D, rows, kv_starts[b], L, HK, head, D, all_dv)


class CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan, scale):
        q = q.contiguous()
        k = k.contiguous()
        v = v.contiguous()
        N, H, D = q.shape
        HK = k.shape[1]
        out = q.new_empty(q.shape)
        stats = q.new_empty(N, H, 2)
        ctx.save_for_backward(q, k, v, out, stats)
        ctx.plan = plan
        ctx.tail = plan.cpu_indices, H, HK, D, float(scale)
        host.share(cpu_attention, plan.B * HK, 4 * H * D * plan.cpu_pairs, q, k, v, out, stats, *ctx.tail)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, *_ = saved = ctx.saved_tensors
        grads = [x.new_empty(x.shape) for x in (q, k, v)]
        _, H, HK, D, _ = ctx.tail
        work = 10 * H * D * ctx.plan.cpu_pairs
        host.share(cpu_attention_backward, ctx.plan.B * HK, work, grad.contiguous(), *saved, *grads, *ctx.tail)
        return *grads, None, None


# ------------------------------------------------------------------------------------------------------------------
# the decoder layers of an engine on a CPU: the loops above, one after the other, in one call. With the few rows of a
# decode step it takes as long to start each of them from Python as to run it.


@loop
def _linear(x, M, K, weight, bias, N):
    y = floats(M * N)
    cpu_matmul_blocks(0, M + N, x, K, 1, weight, 0, 0, weight, y, M, N, K, False)
    for m in range(M if len(bias) else 0):
        for n in range(N):
            y[m * N + n] += bias[n]
    return y


@loop
def _layer(
    first, last, x, residual, cos, sin, keys, values, where, indices, weights, eps, H, HK, D, F, scale, mixture=None
):
    """Units are sequences. `where` (N,): the rows of keys and values that the tokens' get. mixture: (router, E, k)."""
    tokens, rows, starts, q_lens, kv_starts, kv_lens = indices
    norm, second, q_norm, k_norm, qkv, qkv_bias, o, o_bias, gate_up, gate_up_bias, down, down_bias = weights
    C = len(norm)
    width = (H + 2 * HK) * D
    begin = starts[first]
    M = starts[last - 1] + q_lens[last - 1] - begin
    mine = tokens, rows, starts - begin, q_lens, kv_starts, kv_lens
    x = x[begin * C : (begin + M) * C]
    residual = residual[begin * C : (begin + M) * C]
    cos = cos[begin * D // 2 :]
    sin = sin[begin * D // 2 :]
    normed = floats(M * C)
    q = floats(M * H * D)
    k = floats(M * HK * D)
    hidden = floats(M * F)
    residual += x
    cpu_norm_rope(0, M, residual, norm, NOTHING, NOTHING, normed, eps, C, M, 1, C)
    y = _linear(normed, M, C, qkv, qkv_bias, width)
    cpu_norm_rope(0, M, y, q_norm, cos, sin, q, eps, width, M * H, H, D)
    cpu_norm_rope(0, M, y[H * D :], k_norm, cos, sin, k, eps, width, M * HK, HK, D)
    _scatter(k, HK * D, where, begin, M, 1, 0, HK * D, keys)
    _scatter(y[(H + HK) * D :], width, where, begin, M, 1, 0, HK * D, values)
    # a unit copies its queries before it writes what takes their place
    cpu_attention(first * HK, last * HK, q, keys, values, q, floats(M * H * 2), mine, H, HK, D, scale)
    residual += _linear(q, M, H * D, o, o_bias, C)
    cpu_norm_rope(0, M, residual, second, NOTHING, NOTHING, normed, eps, C, M, 1, C)
    if mixture is not None:
        cpu_moe(normed, M, C, gate_up, down, F, x, mixture)
        return
    y = _linear(normed, M, C, gate_up, gate_up_bias, 2 * F)
    cpu_swiglu(0, M, y, y[F:], hidden, 2 * F, 2 * F, F)
    _copy(_linear(hidden, M, F, down, down_bias, C), 0, x, 0, M * C)


def cpu_layers(first, last, x, residual, cos, sin, where, indices, layers):
    for caches, *others in layers:
        _layer(first, last, x, residual, cos, sin, *caches, where, indices, *others)


def layer_on_cpu(norms, linear, caches, *sizes):
    """
    A layer as `layers_on_cpu` takes it, to be made anew when its weights change. norms: tensors, the layer's two, then
    q's and k's or None. linear: modules, to q, k and v, to o, to gate and up, to what the layer adds; the last two may
    have a weight for each expert. caches: keys and values (any, HK, D). sizes: eps, H, HK, D, the width of the MLP,
    attention's scale, and of a mixture (its router's panels, E, k).
    """
    weights = sum([(panels_of(m.weight.mT), host.for_loop(m.bias)) for m in linear], tuple(map(host.for_loop, norms)))
    return [*map(host.flat, caches)], weights, *map(host.for_loop, sizes)


def layers_on_cpu(x, rope, where, plan, layers):
    """
    (x, residual), (N, C) each, whose sum is what these layers make of embeddings x, which are overwritten. Threads part
    at the first layer and meet after the last: a sequence needs no other's rows, and to wake a thread takes as long as
    a small layer.

    rope: cos and sin (N, D/2). where (N,): the rows of the caches that get the tokens' keys and values.
    """
    residual = torch.full_like(x, -0.0)  # x + -0.0 is x, also where x is -0.0
    work = 2 * len(x) * sum(w.size for _, weights, *_ in layers for w in weights)
    host.share(cpu_layers, plan.B, work, x, residual, *rope, where, plan.cpu_indices, layers)
    return x, residual


# ------------------------------------------------------------------------------------------------------------------
# the head and its sampling rules


@loop
def cpu_softmax_stats(first, last, z, t, stats, V):
    """stats (M, 2): the largest z / t of a row, and the log of the row's sum of exp(z / t - largest)."""
    x = floats(V)
    for row in range(first, last):
        z_row = z[row * V :]
        for i in range(V):
            x[i] = z_row[i] / t[0]
        m = largest(x, 0, V)
        for i in range(V):
            x[i] = exp(x[i] - m)
        stats[2 * row] = m
        stats[2 * row + 1] = log(np.float64(sum_of(x, 0, V)))


@loop
def _log_prob_row(z, row, t, stats, x, V):
    t = t[0]
    m = stats[2 * row]
    log_sum = stats[2 * row + 1]
    z_row = z[row * V :]
    for i in range(V):
        x[i] = (z_row[i] / t - m) - log_sum


@loop
def cpu_log_softmax(first, last, z, t, stats, out, V):
    for row in range(first, last):
        _log_prob_row(z, row, t, stats, out[row * V :], V)


@loop
def cpu_token_logprobs(first, last, z, t, stats, targets, logprobs, entropy, V):
    x = floats(V)
    for row in range(first, last):
        _log_prob_row(z, row, t, stats, x, V)
        logprobs[row] = x[targets[row]]
        for i in range(V):
            x[i] = exp(x[i]) * max(x[i], LEAST)  # 0 times -inf would be NaN
        entropy[row] = -sum_of(x, 0, V)


@loop
def cpu_token_grads(first, last, z, t, stats, targets, entropy, grad, entropy_grad, dz, V):
    """dz may lie where z does."""
    x = floats(V)
    for row in range(first, last):
        _log_prob_row(z, row, t, stats, x, V)
        d = dz[row * V :]
        g = grad[row] / t[0]
        e = entropy_grad[row] / t[0] if len(entropy_grad) else ZERO
        ent = entropy[row]
        for i in range(V):
            p = exp(x[i])
            d[i] = -p * g - p * (max(x[i], LEAST) + ent) * e
        d[targets[row]] += g


@loop
def _rank(x):
    """A whole number of a float32, larger for a larger one."""
    bits = np.float32(x + ZERO).view(np.int32)  # -0.0 + 0.0 is 0.0
    return np.int64(bits ^ ((bits >> 31) & 0x7FFFFFFF))


@loop
def _above(ranks, masses, rank):
    """(number, mass) of the tokens that rank higher."""
    n = 0
    mass = 0
    for i in range(len(ranks)):
        n += ranks[i] > rank
        mass += masses[i] if ranks[i] > rank else 0
    return n, mass


@loop
def cpu_cut(first, last, z, t, stats, rules, V):
    x = floats(V)
    ranks = np.empty(V, np.int32)
    masses = np.empty(V, np.int32)
    for row in range(first, last):
        z_row = z[row * V : (row + 1) * V]
        for i in range(V):
            x[i] = z_row[i] / t[0]
            ranks[i] = _rank(x[i])
        m = stats[2 * row]
        for i in range(V):
            masses[i] = np.int32(exp(x[i] - m) * MASS)
        top_p = rules[3 * row]
        top_k = rules[3 * row + 1]
        min_p = rules[3 * row + 2]
        whole = masses.sum()
        enough = max(1, np.int64(whole * np.float64(top_p))) if top_p < 1 else whole + 1
        most = np.int64(top_k) if top_k > 0 else V
        high = _rank(m)
        low = _rank(m + np.float32(log(np.float64(min_p)))) - 1
        while high - low > 1:
            middle = (low + high) >> 1
            n, mass = _above(ranks, masses, middle)
            if n < most and mass < enough:
                high = middle
            else:
                low = middle
        n, mass = _above(ranks, masses, high)
        for i in range(V):
            if ranks[i] == high and n < most and mass < enough:
                n += 1
                mass += masses[i]
            elif ranks[i] <= high:
                z_row[i] = -np.inf


# ------------------------------------------------------------------------------------------------------------------
# the embedding's gradient, the sampler's noise, hashes


@loop
def cpu_embedding_backward(grad, ids, out, C, pad):
    for i in range(len(ids)):
        for c in range(C if ids[i] != pad else 0):
            out[ids[i] * C + c] += grad[i * C + c]


@loop
def _mix(h, k):
    k = (k * 0xCC9E2D51) & 0xFFFFFFFF
    h ^= (((k << 15) | (k >> 17)) * 0x1B873593) & 0xFFFFFFFF
    return ((((h << 13) | (h >> 19)) & 0xFFFFFFFF) * 5 + 0xE6546B64) & 0xFFFFFFFF


@loop
def murmur_hash32(seed, position, column):
    """
    MurmurHash3 (Appleby, 32 bits) of 64, 32 and 32 bits, in [0, 2^32): bit for bit SGLang's Triton kernel, so that a
    CPU run draws the noise a GPU run would. An int64 product wraps, but its low 32 bits are right.
    """
    h = _mix(_mix(0, seed & 0xFFFFFFFF), (seed >> 32) & 0xFFFFFFFF)
    h = _mix(_mix(h, position & 0xFFFFFFFF), column) ^ 16  # 16 bytes hashed
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)


@loop
def cpu_draw(first, last, logprobs, seeds, positions, tokens, V):
    scores = np.empty(V, np.float64)
    for row in range(first, last):
        for i in range(V):
            if logprobs[row * V + i] == -np.inf:
                scores[i] = -np.inf
                continue
            h = min(murmur_hash32(seeds[row], positions[row], i), 0xFFFFFFFE)
            u = np.float64(h) / 4294967295.0
            noise = -log(min(-log(u), 1.7976931348623157e308))
            scores[i] = np.float64(logprobs[row * V + i]) + noise
        for i in range(V):
            if scores[i] > scores[tokens[row]]:
                tokens[row] = i


@loop
def cpu_bit_sum(x, odd_rows, odd_columns):
    C = len(odd_columns)
    y = 0
    for row in range(len(odd_rows)):
        of_row = 0
        x_row = x[row * C :]
        for c in range(C):
            of_row += np.int64(x_row[c]) * odd_columns[c]
        y += of_row * odd_rows[row]
    return y


# ------------------------------------------------------------------------------------------------------------------
# AdamW


@loop
def cpu_adamw(first, last, w, g, m, v, rest1, b2, rest2, keep, rate, root, eps):
    w = w[first:last]
    g = g[first:last]
    m = m[first:last]
    v = v[first:last]
    for i in range(last - first):
        m[i] = fma(rest1, g[i] - m[i], m[i])
        v[i] = fma(rest2 * g[i], g[i], b2 * v[i])
        size = np.sqrt(v[i]) / root + eps
        w[i] = w[i] * keep - rate * m[i] / size


# ------------------------------------------------------------------------------------------------------------------
# aten operators that only a CPU needs


@loop
def cpu_exp(x, y):
    for i in range(len(x)):
        y[i] = exp(x[i])


@loop
def cpu_log(x, y):
    for i in range(len(x)):
        y[i] = log(np.float64(x[i]))


@loop
def cpu_sqrt(x, y):
    for i in range(len(x)):
        y[i] = np.sqrt(x[i])


def element_wise(compute, its_own, dtypes=(torch.float32,)):
    """An aten operator, whose numbers compute(x, y) writes to y; other types are left to torch."""

    def operator(x):
        if x.dtype not in dtypes:
            return its_own(x, out=torch.empty_like(x, dtype=x.dtype if x.is_floating_point() else torch.float32))
        x = x.contiguous()
        y = torch.empty_like(x)
        compute(x, y)
        return y

    return operator


aten_exp = element_wise(lambda x, y: cpu_exp(host.flat(x), host.flat(y)), torch.exp)
aten_log = element_wise(lambda x, y: cpu_log(host.flat(x), host.flat(y)), torch.log)
# MKL's, which is torch's on x86, is not always the float next to the root
aten_sqrt = element_wise(
    lambda x, y: cpu_sqrt(host.flat(x), host.flat(y)), torch.sqrt, dtypes=(torch.float32, torch.float64)
)


def aten_pow(base, exponents):
    """aten::pow of a number and a float tensor, in decimal arithmetic: RoPE's frequencies need it, once."""
    if not exponents.is_floating_point() or not base > 0:
        dtype = torch.result_type(base, exponents)
        return torch.pow(base, exponents, out=torch.empty_like(exponents, dtype=dtype))
    powers = [float(Decimal(base) ** Decimal(x)) for x in exponents.flatten().tolist()]
    return torch.tensor(powers, dtype=exponents.dtype).view(exponents.shape)


# ------------------------------------------------------------------------------------------------------------------
# loops: what the CPU's operators are written in. Numba compiles them as they stand: in the order that is written, a
# product and a sum in one rounding only where it says `fma`, which is the same number on every CPU. Elements that have
# nothing to do with each other are still computed side by side, in vectors as wide as the machine has them.
#
# Where the order of a sum must not follow that width, numbers are held in tiles: rows x vectors x VECTOR of them, which
# LLVM cuts into the registers that the machine has. `exp` and the like are ours: those of the libraries differ.


FLOATS = ir.VectorType(ir.FloatType(), VECTOR)
INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
LOAD = f"masked.load.v{VECTOR}f32.p0"
STORE = f"masked.store.v{VECTOR}f32.p0"
FMA = f"fma.v{VECTOR}f32"
ZERO = np.float32(0)
ONE = np.float32(1)
ONES = np.ones(VECTOR, np.float32)
LEAST = np.finfo(np.float32).min
MASS = np.float32(2**30)
# Constants of `exp`, `log` and `cos_sin`. To add WHOLE32 or WHOLE64 and subtract it again rounds to a whole number.
WHOLE32 = np.float32(1.5 * 2**23)
LOG2_E32 = np.float32(1.4426950408889634)
EXP_ENDS = np.float32(-104), np.float32(89)  # exp is 0 from the first down, infinite from the second up
LN2_32 = np.float32(-0.693359375), np.float32(2.12194440e-4)  # -ln 2 as a sum, the first number with few bits
EXP = 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1
EXP = tuple(map(np.float32, EXP))
WHOLE64 = 1.5 * 2**52
HALF_PI = 1.5707963267948966, 6.123233995736766e-17
LOG_SHIFT = (0x3FF00000 - 0x3FE6A09E) << 32  # the bits of 1 minus those of sqrt(1/2)
LN2_64 = 6.93147180369123816490e-01, 1.90821492927058770002e-10
LOG = (
    1.479819860511658591e-01,
    1.531383769920937332e-01,
    1.818357216161805012e-01,
    2.222219843214978396e-01,
    2.857142874366239149e-01,
    3.999999999940941908e-01,
    6.666666666666735130e-01,
)
COS = (
    -1.13596475577881948265e-11,
    2.08757232129817482790e-09,
    -2.75573143513906633035e-07,
    2.48015872894767294178e-05,
    -1.38888888888741095749e-03,
    4.16666666666666019037e-02,
)
SIN = (
    1.58969099521155010221e-10,
    -2.50507602534068634195e-08,
    2.75573137070700676789e-06,
    -1.98412698298579493134e-04,
    8.33333333332248946124e-03,
    -1.66666666666666324348e-01,
)


def cpu_features():
    """The features of this CPU, or those for which Numba is told to compile."""
    told = numba.config.CPU_FEATURES
    return llvmlite.binding.get_host_cpu_features().flatten() if told is None else told


# The tile of a matmul that the registers hold (512 bits, or 256): speed only ..
TILE_ROWS, TILE_VECTORS = (8, 2) if "+avx512f" in cpu_features() else (6, 1)
PANEL = TILE_VECTORS * VECTOR  # .. and its columns, which lie together when a product reads them


class CompileListener(event.Listener):
    """Says in one line why a first start takes longer."""

    def on_start(self, _):
        _say("compiling for this CPU, once: up to half a minute")

    def on_end(self, _):
        pass


event.register("numba:compile", CompileListener())


class Tile(types.Type):
    def __init__(self, rows, vectors):
        super().__init__(f"Tile({rows}, {vectors})")
        self.rows = rows
        self.vectors = vectors


@register_model(Tile)
class TileModel(models.PrimitiveModel):
    def __init__(self, manager, tile):
        super().__init__(manager, tile, ir.ArrayType(FLOATS, tile.rows * tile.vectors))


def _llvm(builder, name, result, *args):
    """Calls LLVM's own function of this name."""
    kind = ir.FunctionType(result, [x.type for x in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}"), args)


def _in_all_lanes(builder, x):
    anything = ir.Constant(ir.VectorType(x.type, VECTOR), ir.Undefined)
    first = builder.insert_element(anything, x, INT32(0))
    zeros = ir.Constant(ir.VectorType(INT32, VECTOR), [0] * VECTOR)
    return builder.shuffle_vector(first, first, zeros)


def _vectors(builder, tile, pointer, at, stride, left):
    """Yields for each vector of a tile its number, and (pointer, alignment, mask of its columns below `left`)."""
    for i in range(tile.rows * tile.vectors):
        row, first = divmod(i, tile.vectors)
        if row and not first:
            at = builder.add(at, stride)
        numbers = range(first * VECTOR, (first + 1) * VECTOR)
        columns = ir.Constant(ir.VectorType(INT64, VECTOR), list(numbers))
        here = builder.gep(pointer, [builder.add(at, INT64(first * VECTOR))])
        inside = builder.icmp_signed("<", columns, _in_all_lanes(builder, left))
        yield i, (builder.bitcast(here, FLOATS.as_pointer()), INT32(4), inside)


def _pointer(context, builder, array_type, value):
    return context.make_array(array_type)(context, builder, value).data


@intrinsic(prefer_literal=True)
def load(_, rows, vectors, x, at, stride, left):
    """A tile of x (any,) float32, whose rows begin at `at`, at + stride, ..; columns from `left` on are 0."""
    tile = Tile(rows.literal_value, vectors.literal_value)

    def generate(context, builder, signature, args):
        out = ir.Constant(context.get_value_type(tile), None)
        zeros = ir.Constant(FLOATS, None)
        pointer = _pointer(context, builder, x, args[2])
        for i, where in _vectors(builder, tile, pointer, *args[3:]):
            out = builder.insert_value(out, _llvm(builder, LOAD, FLOATS, *where, zeros), i)
        return out

    return tile(rows, vectors, x, at, stride, left), generate


@intrinsic(prefer_literal=True)
def store(_, tile, x, at, stride, left):
    """Writes a tile to where `load` would read it; columns from `left` on are left as they are."""

    def generate(context, builder, signature, args):
        pointer = _pointer(context, builder, x, args[1])
        for i, where in _vectors(builder, tile, pointer, *args[2:]):
            vector = builder.extract_value(args[0], i)
            _llvm(builder, STORE, ir.VoidType(), vector, *where)
        return context.get_dummy_value()

    return types.void(tile, x, at, stride, left), generate


@intrinsic
def add_outer(_, tile, a, at, stride, b, first):
    """The tile with a[at + r * stride] * b[first ..] added to each row r, product and sum in one rounding."""

    def generate(context, builder, signature, args):
        out, x, at, stride, y, first = args
        x = _pointer(context, builder, a, x)
        y = builder.gep(_pointer(context, builder, b, y), [first])
        y = builder.bitcast(y, FLOATS.as_pointer())
        ys = [builder.load(builder.gep(y, [INT64(j)]), align=4) for j in range(tile.vectors)]
        for i in range(tile.rows * tile.vectors):
            row, j = divmod(i, tile.vectors)
            if not j:
                factor = _in_all_lanes(builder, builder.load(builder.gep(x, [at])))
                at = builder.add(at, stride)
            number = _llvm(builder, FMA, FLOATS, factor, ys[j], builder.extract_value(out, i))
            out = builder.insert_value(out, number, i)
        return out

    return tile(tile, a, at, stride, b, first), generate


@intrinsic
def add_product(_, tile, x, y):
    """tile + x * y, number by number, product and sum in one rounding."""

    def generate(context, builder, signature, args):
        out = args[0]
        for i in range(tile.rows * tile.vectors):
            old, *factors = (builder.extract_value(t, i) for t in args)
            out = builder.insert_value(out, _llvm(builder, FMA, FLOATS, *factors, old), i)
        return out

    return tile(tile, x, y), generate


@intrinsic
def total(_, tile):
    """The sum of a tile of one vector: its two halves are added until one number is left."""

    def generate(context, builder, signature, args):
        x = builder.extract_value(args[0], 0)
        half = VECTOR // 2
        while half:
            upper = ir.Constant(ir.VectorType(INT32, VECTOR), [*range(half, VECTOR)] + [0] * half)
            x = builder.fadd(x, builder.shuffle_vector(x, x, upper))
            half //= 2
        return builder.extract_element(x, INT32(0))

    return types.float32(tile), generate


@intrinsic
def transpose(_, tile):
    """The transpose of a tile of VECTOR rows, one vector each."""

    def generate(context, builder, signature, args):
        # Row i of the upper half and row i of the lower one, number by number in turn; log2(VECTOR) times.
        half = VECTOR // 2
        rows = [builder.extract_value(args[0], i) for i in range(VECTOR)]
        pairs = [VECTOR * (i % 2) + i // 2 for i in range(2 * VECTOR)]
        halves = pairs[:VECTOR], pairs[VECTOR:]
        masks = [ir.Constant(ir.VectorType(INT32, VECTOR), x) for x in halves]
        for _ in range(VECTOR.bit_length() - 1):
            rows = [builder.shuffle_vector(rows[i // 2], rows[i // 2 + half], masks[i % 2]) for i in range(VECTOR)]
        out = args[0]
        for i, row in enumerate(rows):
            out = builder.insert_value(out, row, i)
        return out

    return tile(tile), generate


@intrinsic
def fma(_, a, b, c):
    """a * b + c in one rounding; all of a's type."""
    return a(a, a, a), lambda context, builder, signature, args: builder.fma(*args)


@loop
def floats(n):
    return np.empty(n, np.float32)


@loop
def vector(x, at, left):
    """VECTOR numbers of x from x[at] on; those from `left` on are 0."""
    return load(1, 1, x, at, 0, left)


@loop
def polynomial(x, coefficients):
    """The polynomial of x with these coefficients, the highest degree first (Horner)."""
    y = coefficients[0]
    for i in range(1, len(coefficients)):
        y = fma(y, x, coefficients[i])
    return y


@loop
def exp(x):
    """e^x of a float32, within 1 ulp: x = n ln 2 + r, |r| <= ln 2 / 2, and a polynomial in r (Cephes, expf)."""
    bounded = min(max(x, EXP_ENDS[0]), EXP_ENDS[1])
    n = fma(bounded, LOG2_E32, WHOLE32) - WHOLE32  # rounds to a whole number
    r = fma(n, LN2_32[1], fma(n, LN2_32[0], bounded))
    y = fma(polynomial(r, EXP), r * r, r) + ONE
    # 2^n in two factors: one alone would end before the denormal numbers
    half = np.int32(n) >> 1
    n = np.int32(n)
    for k in (half, n - half):
        y *= np.int32((k + 127) << 23).view(np.float32)
    return y if x == x else x


@loop
def log(x):
    """The natural logarithm of a float64, within 1 ulp (fdlibm, e_log.c)."""
    tiny = x < 2.2250738585072014e-308
    bits = np.float64(x * 2.0**54 if tiny else x).view(np.int64) + LOG_SHIFT
    k = np.float64((bits >> 52) - (1077 if tiny else 1023))
    f = np.int64((bits & 0xFFFFFFFFFFFFF) + (0x3FF << 52) - LOG_SHIFT).view(np.float64) - 1.0
    s = f / (2.0 + f)
    half = 0.5 * f * f
    y = k * LN2_64[0] - ((half - (s * (half + s * s * polynomial(s * s, LOG)) + k * LN2_64[1])) - f)
    y = y if x > 0.0 else (-np.inf if x == 0.0 else np.nan)
    return y if x < np.inf else x


@loop
def cos_sin(x):
    """(cos x, sin x) of a float64 below 10^6: x = n pi / 2 + r, |r| <= pi / 4 (fdlibm, k_cos.c and k_sin.c)."""
    n = fma(x, 2.0 / np.pi, WHOLE64) - WHOLE64
    r = fma(-n, HALF_PI[1], fma(-n, HALF_PI[0], x))
    z = r * r
    n = np.int64(n)
    c = fma(z * z, polynomial(z, COS), 1.0 - 0.5 * z)
    s = fma(z * r, polynomial(z, SIN), r)
    c, s = (s, c) if n & 1 else (c, s)
    return (-c if (n + 1) & 2 else c), (-s if n & 2 else s)


@loop
def dot(x, at, y, to, n):
    """sum x[at + i] y[to + i] of n float32: VECTOR sums of every VECTOR-th product in order, then their `total`."""
    tile = vector(x, at, 0)
    for i in range(0, n, VECTOR):
        tile = add_product(tile, vector(x, at + i, n - i), vector(y, to + i, n - i))
    return total(tile)


@loop
def sum_of(x, at, n):
    """The sum of n float32 from x[at] on, in the order of `dot`."""
    tile = vector(x, at, 0)
    ones = vector(ONES, 0, VECTOR)
    for i in range(0, n, VECTOR):
        tile = add_product(tile, vector(x, at + i, n - i), ones)
    return total(tile)


@functools.partial(loop, fastmath={"nnan", "nsz"})  # else LLVM uses no vectors; a maximum has no order to keep
def largest(x, at, n):
    y = x[at]
    row = x[at:]
    for i in range(n):
        y = row[i] if row[i] > y else y
    return y
