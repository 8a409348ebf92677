"""
Batch-invariant operators: one definition, called by the rollout engine and by the trainer.

A library kernel picks its tile shapes from the number of rows it is given. So one and the same row a .. h is added in
one order when it is alone and in another when it has neighbours:

    in a batch of 1 most cores are idle:             in a batch of 64 each core has rows of its own:
    two of them take half of the row each            one core adds the row from left to right

        a   b   c   d     e   f   g   h                  a   b   c   d   e   f   g   h
        +---+   |   |     +---+   |   |                  +---+   |   |   |   |   |   |
            +---+   |         +---+   |                      +---+   |   |   |   |   |
                +---+             +---+                          +---+   |   |   |   |
                    +-----------------+                              +---+   |   |   |
                                      |                                  +---+   |   |
                                      |                                      +---+   |
                                      |                                          +---+
                                      |                                              |
    a = 1, the others 2^-24:      1.0000002                                         1.0

Neither is wrong: float32 has no 1 + 7 * 2^-24, and each order rounds in its own way. But an engine that samples one
token at a time and a trainer that sees a packed batch then disagree about every log-prob. One rule prevents that, and
every operator here keeps it:

    the order in which one row's numbers are added depends on that row's own length and on the constants of this
    file, never on how many rows there are, who the neighbours are, or how the work was cut.

Each operator is one public function, which checks its operands and picks by device: `cpu_*`, loops in float32 that
Numba compiles, or `triton_*`, kernels for an NVIDIA GPU of one of CARDS (bfloat16, or float32 without TF32). Both take
the same arguments. A section is always in this order: the equation, why its order is fixed, the loop, the kernel, the
autograd Function over both, the public function. What all of them use is at the end: how one of the two is chosen and
started, and the language of the loops. `naive_*`, on this page, is the order of addition in plain words.

What torch 2.11 does on a CPU by itself, and what our loops do about it:

    matmul        rows differ unless their number is a multiple of 16, columns and long sums between thread counts: here
                  each element is one chain of fused multiply-adds in the order of K, wherever its tile lies.
    row sums      follow the width of the machine's vectors, as do `exp`, `log` and their kin, silu, AdamW and the
                  random numbers of weights: here a sum is VECTOR sums side by side and then pairwise, whatever the
                  width, and the functions are polynomials in operations that every CPU rounds alike. So all CPUs have
                  one digest.
    attention     SDPA adds a decode step in another order than a prefill: here a score is a chain over the head's
                  numbers and an output one over the keys from position 0, in packed training, prefill and decode alike.

What the Triton kernels do about it:

    matmul        every sum of bfloat16 products is one chain of tensor-core steps of k16, in the order of K, in one
                  accumulator: no split-K. Within a step the tensor core adds 16 products and the accumulator by the
                  exponents alone (MMA-Sim, a public model of it), so tile shapes, warps, stages, TMA or pointers and
                  swapping A and B do not enter, and may follow the number of rows.
    row sums      `tl.sum` adds in an order that depends on the layout, which Triton takes from block shape, warps and
                  the alignment of the pointers: all three are made functions of the row's length alone.
    attention     key tiles of one size and splits of 1024 keys at absolute positions, one inner loop, one merge; the
                  softmax denominator is a product with ones, on the tensor core.
    contraction   the compiler may fuse a * b + c in one kernel and not in its twin: switched off in every kernel that
                  computes on rows or elements (EXACT) but the sampler's, whose twin is compiled by torch; where a fused
                  step pays it is written as `tl.fma`.
    gradients     no atomics: sums over rows go in row order, cut at constants of this file.

`tests/test_kernels.py` checks the CPU operators bit for bit, `tests/test_triton.py` what can be known of the others
without a GPU; and a run checks the sum of them at every token it trains on.

Letters: N tokens of a packed batch, B sequences, T queries and L keys of a sequence, H query heads, HK key heads, G =
H / HK, D head dim, C width, F width of the MLP, V vocabulary; E experts, k of them for a token; M, N, K of a matmul
(M, K) @ (K, N).
"""

import ctypes
import functools
import math
import mmap
import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import NamedTuple

import llvmlite.binding
import numba
import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from llvmlite import ir
from numba import types
from numba.core import cgutils, event
from numba.extending import intrinsic, models, register_model
from triton.language import constexpr
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged
from triton.tools.tensor_descriptor import TensorDescriptor

# Part of the order of addition: whoever tunes one of these changes the bits of engine and trainer alike, and with them
# every curve that was ever recorded. On both devices:
CHUNK = 1024  # rows of logits held at a time: the head's weight gradient is added chunk by chunk
SUM_ROWS = 64  # rows a weight gradient adds before `row_sums` takes over

# On a CPU:
VECTOR = 16  # a row's sum is this number of sums side by side, whatever the width of the machine's vectors

# On Triton, where block and warps are the layout in which `tl.sum` adds a row:
KEYS = 64  # keys per softmax tile, counted from position 0 of the sequence ..
KEYS_FLOAT32 = 16  # .. in float32 ..
KEYS_OF_WARPS = 32  # .. and on cards without TMA, where each warp multiplies for itself and has fewer registers free
SPLIT = 1024  # keys whose softmax is taken apart from the others', counted from position 0: decode's unit of work
MIN_BLOCK = 16  # a row's block is the power of two that holds it, and at least this
NORM_BLOCK = 2048  # numbers a norm's program holds: as many rows as fit, or one long row
NORM_WARPS = 4  # of a norm's program ..
LONG_NORM_WARPS = 8  # .. and of one with a row beyond NORM_BLOCK
LANES = 4096  # partial sums of a long row (log-probs, `row_sums`) ..
LANE_WARPS = 8  # .. and the warps that hold them
DELTA_ROWS = 16  # rows of a program of rowsum(do * o), in attention's backward ..
DELTA_WARPS = 4  # .. and its warps
EXACT = {"enable_fp_fusion": False}  # no a * b + c in one rounding, unless it is written as one


# ------------------------------------------------------------------------------------------------------------------
# the reference: the order in which the CPU's operators add, number by number. float64 holds the product of two float32,
# so that product + sum, stored as float32, is `fma`, but for one in 2^29 that is rounded twice.


def naive_matmul(a, b):
    """a (M, K) @ b (K, N): each number one chain of products in the order of K."""
    c = np.zeros((len(a), b.shape[1]), np.float32)
    for m, n in np.ndindex(c.shape):
        for k in range(len(b)):
            product = np.float64(a[m, k]) * b[k, n]
            c[m, n] = product + c[m, n]
    return c


def naive_dot(x, y):
    """sum x y: of VECTOR sums number i takes every VECTOR-th product from i on, and then halves are added."""
    sums = np.zeros(VECTOR, np.float32)
    for i in range(len(x)):
        product = np.float64(x[i]) * y[i]
        sums[i % VECTOR] = product + sums[i % VECTOR]
    while len(sums) > 1:
        half = len(sums) // 2
        sums = sums[:half] + sums[half:]
    return sums[0]


def naive_attention(q, k, v, scale):
    """Of one head: the last T tokens of a sequence, q (T, D), see the keys k and values v (L, D) up to their own."""
    out = np.zeros_like(q)
    for t, row in enumerate(q):
        seen = len(k) - len(q) + t + 1
        s = naive_matmul(row[None], k[:seen].T)[0]
        m = s.max() * scale
        p = np.array([exp(x * scale - m) for x in s])
        denominator = naive_dot(p, np.ones(seen))
        out[t] = naive_matmul(p[None], v[:seen])[0] / denominator
    return out


@functools.cache
def _say(text):
    """Prints a line, once in a process."""
    print(f"kernels.py: {text}", file=sys.stderr, flush=True)


def loop(function, **options):
    """Compiled at its first call, as it stands; the result is kept beside this file, or where NUMBA_CACHE_DIR says."""
    options |= dict(nogil=True, error_model="numpy")
    try:
        return numba.njit(function, cache=True, **options)
    except (RuntimeError, OSError):
        _say("no folder for compiled loops can be written (NUMBA_CACHE_DIR): they are compiled at each start")
        return numba.njit(function, **options)


# ------------------------------------------------------------------------------------------------------------------
# matmul: c[m, n] = sum_k a[m, k] b[k, n]. `mm` and `addmm` replace the aten kernels, so that any model reaches them,
# forward and backward.
#
# One accumulator takes what belongs to its element in the order of K, whatever tile the element is in: on a CPU product
# by product, on Triton by steps of k16, whose last one is filled with zeros, which add nothing. Other rows and columns
# never enter it.

# Speed only, never seen in the bits. The tiles for few rows, and attention's, were tried on an H200 with Qwen3-8B's
# shapes; what is elsewhere, and for other cards, are guesses until measured.
TILES = (  # BLOCK_M, BLOCK_N, BLOCK_K, warps, stages of a matmul's program; an SM has room for 8 warps of them
    (128, 256, 64, 8, 3),
    (128, 128, 64, 8, 5),
    (64, 128, 64, 4, 4),
    (64, 64, 128, 4, 3),
    (64, 32, 128, 4, 4),
    (32, 64, 128, 4, 4),
    (16, 64, 128, 4, 4),
    (64, 16, 128, 4, 4),
)
PRODUCTS_PER_LOAD = 100  # products of a matmul that take an SM as long as to load one of their numbers
BLOCK_ROWS = 64  # rows of a unit of work on a CPU,
DEPTH = 256  # .. and how many of K are packed and then multiplied at a time: both stay in its caches
# TILE_ROWS and TILE_VECTORS, the tile that a CPU's registers hold, and PANEL, its columns, are at the end of the file


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


# An engine makes this a dict, {where b is: (b, its panels)}, and clears it when its weights change. Its b are weights
# only, and its a have often so few rows that to pack the panels takes as long as the product.
panel_cache = None


def panels_of(b):
    """The panels of b (K, N), or of each of a mixture's b (E, K, N)."""
    where = b.data_ptr(), b.shape, b.stride()
    if panel_cache and where in panel_cache:
        return panel_cache[where][1]
    *E, K, N = b.shape
    units = math.prod(E) * -(-N // PANEL)
    packed = np.empty(units * K * PANEL, np.float32)
    _share(cpu_pack, units, b.numel(), b, *b.stride()[-2:], K, N, packed)
    if panel_cache is not None:
        panel_cache[where] = b, packed
    return packed


def cpu_matmul(a, b, out=None):
    """a (M, K) @ b (K, N) -> (M, N), any strides. out: a contiguous result to which the product is added."""
    M, K = a.shape
    N = b.shape[1]
    add = out is not None
    c = out if add else a.new_empty(M, N)
    if 1 not in b.stride():
        b = b.contiguous()
    packed = NOTHING if panel_cache is None else panels_of(b)
    units = -(-M // BLOCK_ROWS) if M > N else -(-N // PANEL)
    _share(cpu_matmul_blocks, units, 2 * M * N * K, a, *a.stride(), b, *b.stride(), packed, c, M, N, K, add)
    return c


@triton.jit
def _tile_at(tile, M, N, BLOCK_M: constexpr, BLOCK_N: constexpr, GROUP: constexpr):
    """Row and column of an output tile; GROUP rows of tiles go together, so that L2 serves b to all of them."""
    down = tl.cdiv(M, BLOCK_M)
    across = tl.cdiv(N, BLOCK_N)
    first = tile // (GROUP * across) * GROUP
    height = min(down - first, GROUP)
    tile = tile % (GROUP * across)
    return first + tile % height, tile // height


@triton.jit
def _part(c, m, n, M, N, c_m, c_n, ROWS: constexpr, COLUMNS: constexpr):
    """Pointers to the (ROWS, COLUMNS) of c from (m, n) on, and which of them lie inside."""
    rows = (m + tl.arange(0, ROWS))[:, None]
    cols = (n + tl.arange(0, COLUMNS))[None, :]
    return c + rows.to(tl.int64) * c_m + cols.to(tl.int64) * c_n, (rows < M) & (cols < N)


@triton.jit
def _multiply_tile(
    a, b, c, m, n, M, N, K, a_m, a_k, b_k, b_n, c_m, c_n, ADD: constexpr, BLOCK_K: constexpr,
):  # fmt: skip
    """The rows m below M and the columns n below N of c = a b. ADD: the chain goes on from what c holds."""
    k = tl.arange(0, BLOCK_K)
    inside_m = (m < M)[:, None]
    inside_n = (n < N)[None, :]
    m = m.to(tl.int64)[:, None]
    n = n.to(tl.int64)[None, :]
    a += m * a_m + k[None, :].to(tl.int64) * a_k
    b += n * b_n + k[:, None].to(tl.int64) * b_k
    c += m * c_m + n * c_n
    inside = inside_m & inside_n
    acc = tl.load(c, mask=inside, other=0.0) if ADD else tl.zeros(inside.shape, tl.float32)
    for left in range(K, 0, -BLOCK_K):
        x = tl.load(a, mask=inside_m & (k < left)[None, :], other=0.0)
        y = tl.load(b, mask=inside_n & (k < left)[:, None], other=0.0)
        acc = tl.dot(x, y, acc, input_precision="ieee")
        a += a_k * BLOCK_K
        b += b_k * BLOCK_K
    tl.store(c, acc.to(c.dtype.element_ty), mask=inside)


@triton.jit
def triton_matmul(
    a, b, c, starts, M, N, K, a_m, a_k, b_k, b_n, c_m, c_n,
    ADD: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr,
):  # fmt: skip
    """Any strides, any alignment. starts: of the parts of K, one for each of the matrices c; else there is one c."""
    if starts is not None:
        part = tl.program_id(1).to(tl.int64)
        first = tl.load(starts + part)
        K = (tl.load(starts + part + 1) - first).to(tl.int32)
        a += first * a_k
        b += first * b_k
        c += part * M * N
    row, col = _tile_at(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, 8)
    m = row * BLOCK_M + tl.arange(0, BLOCK_M)
    n = col * BLOCK_N + tl.arange(0, BLOCK_N)
    _multiply_tile(a, b, c, m, n, M, N, K, a_m, a_k, b_k, b_n, c_m, c_n, ADD, BLOCK_K)


@triton.jit(do_not_specialize=["K", "PROGRAMS"])  # as a constant, K = 1 would be laid out in too much shared memory
def triton_matmul_tma(
    c, a, b, M, N, K, c_m, c_n, PROGRAMS,
    A_MK: constexpr, B_NK: constexpr, ADD: constexpr,
    BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr,
):  # fmt: skip
    """
    The same chain, fed by the copy engine. A_MK, B_NK: the descriptor's matrix lies (M, K), (N, K), K contiguous.
    Flattened, the loops over tiles and K are one: a tile is stored while the next one's loads are under way. It goes in
    halves, since the stages leave no shared memory for a whole one. With ADD, whose accumulator is read from c, the
    flattened loads would be waited for one by one.
    """
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N), PROGRAMS, flatten=not ADD):
        row, col = _tile_at(tile, M, N, BLOCK_M, BLOCK_N, 8)
        m = row * BLOCK_M
        n = col * BLOCK_N
        if ADD:
            at, inside = _part(c, m, n, M, N, c_m, c_n, BLOCK_M, BLOCK_N)
            acc = tl.load(at, mask=inside, other=0.0)
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            x = a.load([m, k]) if A_MK else a.load([k, m]).T
            y = b.load([n, k]).T if B_NK else b.load([k, n])
            acc = tl.dot(x, y, acc, input_precision="ieee")
        halves = tl.split(acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1))
        for i in tl.static_range(2):
            at, inside = _part(c, m, n + i * (BLOCK_N // 2), M, N, c_m, c_n, BLOCK_M, BLOCK_N // 2)
            tl.store(at, halves[i].to(c.dtype.element_ty), mask=inside)


def _tiles(M, N, block_m, block_n):
    return -(-M // block_m) * -(-N // block_n)


def _tile_time(M, N, block_m, block_n, sms):
    """
    An estimate, in numbers loaded per k: what the SM with most of the tiles loads, beyond the matrix's end as well, and
    what it multiplies; or, if that takes longer, what all of them load, as a good half of the SMs keep memory busy.
    Fitted to an H200's times.
    """
    tiles = _tiles(M, N, block_m, block_n)
    loads = block_m + block_n
    work = loads + block_m * block_n / PRODUCTS_PER_LOAD
    return max(-(-tiles // sms) * work, 1.85 * tiles * loads / sms)


@functools.cache
def _matmul_config(M, N, dtype, wide, aligned, card):
    """
    (BLOCK_M, BLOCK_N, BLOCK_K, warps, stages): follows the shape for speed, and is never seen in the bits. Registers
    suffice for the largest tiles where loads are wide (as TMA's), and for the very largest where the result's rows are
    aligned too.
    """
    if dtype == torch.float32:
        return 64, 64, 16, 4, 2
    if not wide and min(M, N) > 64:
        return 128, 64, 32, 8, 3
    table = TILES[not (aligned and card.tma) :] if wide else TILES[3:]
    fastest = min(table, key=lambda tile: _tile_time(M, N, *tile[:2], card.sms))
    block_m, block_n, block_k, warps, stages = fastest
    while 16 * stages * (block_m + block_n) * block_k // warps > 1024 * card.shared:  # of the programs of an SM
        block_k //= 2
    if _tiles(M, N, block_m, block_n) <= card.sms:  # alone on its SM, whose shared memory is then for its stages
        if aligned and min(block_m, block_n) == 16:  # else registers do not suffice for longer steps
            block_k *= 2
        else:
            stages = stages * 8 // warps
    return block_m, block_n, block_k, warps, stages


def _lies_for_tma(x):
    """Whether the last dim is contiguous, and the others begin at multiples of 16 bytes: what TMA can read."""
    *strides, last = x.stride()
    places = x.data_ptr(), *(n * x.itemsize for n in strides)
    return last == 1 and not any(n % 16 for n in places)


def _for_tma(x):
    """(x or its transpose, whether K is the contiguous dim) of x (rows, K), or None where TMA cannot read x."""
    contiguous_k = x.stride(1) == 1
    y = x if contiguous_k else x.t()
    if not _lies_for_tma(y) or y.stride(0) < y.shape[1]:
        return None
    return y, contiguous_k


def matmul(a, b, out_dtype=None, out=None):
    """
    a (M, K) @ b (K, N) -> (M, N); any strides; accumulated in float32.

    out_dtype: of the result, a's unless given. out: a contiguous float32 result to which the product is added, in the
    same chain.
    """
    fits = a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0]
    add = out is not None
    fits = fits and (not add or out.shape == (len(a), b.shape[1]))
    check(fits, "shapes {} and {} do not multiply", a, b)
    check_operands(a, b)
    if add:
        fits = out.dtype == torch.float32 and out.device == a.device and out.is_contiguous()
        check(fits, "out {} on {}: contiguous float32 on a's device is needed", out.dtype, out.device)
    if not use_triton(a):
        return cpu_matmul(a, b, out)
    M, K = a.shape
    N = b.shape[1]
    result = c = out if add else a.new_empty(M, N, dtype=out_dtype or a.dtype)
    if 0 in c.shape:
        return result
    x = _for_tma(a)
    y = _for_tma(b.t())
    wide = bool(K and x and y)
    aligned = c.stride(0) % 16 == 0
    on = card(a)
    block_m, block_n, block_k, warps, stages = _matmul_config(M, N, a.dtype, wide, aligned, on)
    if block_m < 64:  # which wgmma needs, so the columns become the rows: c^T = b^T a^T
        a, b = b.t(), a.t()
        c = c.t()
        x, y = y, x
        M, N = N, M
        block_m, block_n = block_n, block_m
    tiles = _tiles(M, N, block_m, block_n)
    config = dict(
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
        num_stages=stages,
    )
    if wide and on.tma:
        programs = min(tiles, on.sms * 8 // warps)  # all that are under way at once, which take tile after tile
        descriptors = []
        for (operand, contiguous_k), block in ((x, block_m), (y, block_n)):
            tile = [block, block_k] if contiguous_k else [block_k, block]
            descriptors.append(TensorDescriptor.from_tensor(operand, tile))
        args = c, *descriptors, M, N, K, *c.stride(), programs, x[1], y[1], add
        _launch(triton_matmul_tma, (programs,), *args, **config)
    else:
        args = a, b, c, None, M, N, K, *a.stride(), *b.stride(), *c.stride(), add
        _launch(triton_matmul, (tiles,), *args, **config)
    return result


def mm(a, b):
    """aten::mm, a (M, K) @ b (K, N) -> (M, N). On a CPU other types than float32 are left to torch."""
    if use_triton(a) or a.dtype == b.dtype == torch.float32:
        return matmul(a, b)
    return torch.mm(a, b, out=a.new_empty(len(a), b.shape[1]))


def addmm(bias, a, b, *, beta=1, alpha=1):
    """aten::addmm, beta * bias + alpha * (a @ b), rounded once; torch's own starts the sum with the bias."""
    out = matmul(a, b, out_dtype=torch.float32) if use_triton(a) else mm(a, b)
    if alpha != 1:
        out = out * alpha
    return (out + (bias if beta == 1 else bias * beta)).to(a.dtype)


# ------------------------------------------------------------------------------------------------------------------
# split products: a b as the sum of products over equal parts of K, a chain of float32 each, added as a binary tree and
# rounded once. Where an engine runs on several GPUs (Shoeybi et al. 2019, arXiv:1909.08053), each has some of the parts
# of o_proj and down_proj, and the tree goes on across the GPUs: so its sum does not depend on who has which part. What
# else is cut there, heads, columns and the vocabulary, leaves every sum whole on one GPU.


class SplitLinear(torch.autograd.Function):
    """`linear` of a whole weight, differentiable; its gradients are not split, as they sum over other dims than K."""

    @staticmethod
    def forward(ctx, x, weight, bias, split):
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias, split)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        d_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return torch.mm(grad, weight), torch.mm(grad.t(), x), d_bias, None


def tree_sum(parts):
    """
    Pairwise sum over the first dim: ((p0 + p1) + (p2 + p3)) + ...; an odd last part goes up alone. It overwrites the
    parts, since they may be a model's gradients, of which there is no room for a copy.
    """
    while len(parts) > 1:
        even = len(parts) // 2 * 2
        parts[0:even:2].add_(parts[1:even:2])
        parts = parts[::2]
    return parts[0]


def split_matmul(a, b, split):
    """a (M, K) @ b (K, N) -> (M, N) float32, in `split` products (a power of two that divides K)."""
    if split == 1:
        return matmul(a, b, out_dtype=torch.float32)
    half = a.shape[1] // 2
    left = split_matmul(a[:, :half], b[:half], split // 2)
    right = split_matmul(a[:, half:], b[half:], split // 2)
    return left.add_(right)


def linear(x, weight, bias, split=1, gather=None):
    """
    x (M, K) @ weight (N, K)^T + bias (N,) or None -> (M, N), not differentiable. split: number of products into which K
    is cut here. gather: if other ranks have more parts of K, gather(the float32 sum here) -> (ranks, M, N), all sums.
    """
    if split == 1 and not gather:
        weight = weight.t()
        return mm(x, weight) if bias is None else addmm(bias, x, weight)
    y = split_matmul(x, weight.t(), split)
    y = tree_sum(gather(y)) if gather else y
    return (y if bias is None else y + bias).to(x.dtype)


# ------------------------------------------------------------------------------------------------------------------
# LoRA (Hu et al. 2021, arXiv:2106.09685): W' = W + scale B A, with the matrices A (r, K) and B (N, r) learned. The
# engine gets W', and the trainer multiplies by it, too: the adapters apart, x A^T B^T, would be other numbers. With g
# the gradient of W', dB = scale g A^T and dA = scale B^T g; g itself, which is grad^T x, is never made: r numbers of a
# token take its place on the way.
#
# An element's sum over r is one chain, whichever rows of W are merged with it: on a CPU that of `cpu_matmul`.

LORA_TILE = 64  # rows and columns of a program of `triton_lora`; speed only


@triton.jit(do_not_specialize=["N"])
def triton_lora(weight, A, B, out, scale, N, K, R, BLOCK: constexpr, BLOCK_R: constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, BLOCK_R)
    inside_n = (n < N)[:, None]
    inside_k = k < K
    n = n.to(tl.int64)[:, None]
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for first in range(0, R, BLOCK_R):
        x = tl.load(B + n * R + first + r, mask=inside_n & (first + r < R), other=0.0)
        inside_r = (first + r < R)[:, None]
        y = tl.load(A + (first + r)[:, None].to(tl.int64) * K + k, mask=inside_k & inside_r, other=0.0)
        acc = tl.dot(x, y, acc, input_precision="ieee")
    inside = inside_n & inside_k
    merged = tl.load(weight + n * K + k, mask=inside, other=0.0).to(tl.float32) + scale * acc
    tl.store(out + n * K + k, merged.to(out.dtype.element_ty), mask=inside)


class LoRALinear(torch.autograd.Function):
    """x (T, K) @ W'^T + bias (N,) or None."""

    @staticmethod
    def forward(ctx, x, weight, bias, A, B, scale, split=1):
        ctx.save_for_backward(x, weight, A, B)
        ctx.scale = scale
        merged = merge(weight, A, B, scale)
        if split > 1:
            return linear(x, merged, bias, split)
        return torch.nn.functional.linear(x, merged, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight, A, B = ctx.saved_tensors
        # W' is made again: kept, it would be a second model in memory.
        dx = torch.mm(grad, merge(weight, A, B, ctx.scale)) if ctx.needs_input_grad[0] else None
        g_B = _float32_mm(grad, B) * ctx.scale
        x_A = _float32_mm(x, A.t()) * ctx.scale
        return dx, None, None, _float32_mm(g_B.t(), x), _float32_mm(grad.t(), x_A), None, None


def _float32_mm(a, b):
    """
    a (M, K) @ b (K, N) -> (M, N) float32; one of them is float32. Beside bfloat16, on a GPU, it is the sum of three
    bfloat16 numbers, each with 8 of its 24 bits: tensor cores do not multiply float32.
    """
    if a.dtype == b.dtype or not use_triton(a):
        return torch.mm(a.float(), b.float())
    if a.dtype == torch.float32:
        return _float32_mm(b.t(), a.t()).t().contiguous()
    high = b.to(a.dtype)
    middle = (b - high).to(a.dtype)
    low = (b - high - middle).to(a.dtype)
    high, middle, low = matmul(a, torch.cat([high, middle, low], 1), torch.float32).chunk(3, 1)
    return high + (middle + low)


def merge(weight, A, B, scale):
    """weight (N, K) + scale * B (N, r) @ A (r, K), in float32, rounded once to weight's dtype. A and B are float32."""
    fits = B.shape[1] == len(A) and weight.shape == (len(B), A.shape[1])
    check(fits, "weight, A, B {}, {}, {}: (N, K), (r, K), (N, r) are needed", weight, A, B)
    check_operands(A, B, weight.new_empty(0, dtype=torch.float32))
    if not use_triton(weight):
        return cpu_matmul(B, A).mul_(scale).add_(weight).to(weight.dtype)
    weight, A, B = map(_aligned, (weight, A, B))
    N, K = weight.shape
    out = torch.empty_like(weight)
    grid = -(-N // LORA_TILE), -(-K // LORA_TILE)
    _launch(triton_lora, grid, weight, A, B, out, scale, N, K, len(A), BLOCK=LORA_TILE, BLOCK_R=16, **EXACT)
    return out


# ------------------------------------------------------------------------------------------------------------------
# row_sums: y_r = sum_c x_rc, for the gradient norm, a weight's gradient, and sums and means of plain torch
#
# On a CPU one number after the other. On Triton LANES partial sums, each in order, and then their sum, an order that
# follows from C.


@loop
def cpu_row_sums(first, last, x, out, C):
    for row in range(first, last):
        y = 0.0
        for i in range(row * C, (row + 1) * C):
            y += x[i]
        out[row] = y


@triton.jit(do_not_specialize=["C"])
def triton_row_sums(x, out, C, BLOCK: constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    x += row.to(tl.int64) * C
    acc = tl.zeros([BLOCK], tl.float64)
    for first in range(0, C, BLOCK):
        acc += tl.load(x + first + i, mask=first + i < C, other=0.0)
    tl.store(out + row, tl.sum(acc, 0))


@functools.cache
def _lanes(C):
    return dict(BLOCK=min(LANES, _block(C)), num_warps=LANE_WARPS, **EXACT)


def row_sums(x):
    """
    The sums of x (R, C) float64 along its rows -> (R,).

    A row is one program's work: cut a long tensor into rows of one fixed length first.
    """
    check(x.dtype == torch.float64, "dtype={}: row_sums adds float64", x.dtype)
    x = _aligned(x)
    R, C = x.shape
    out = x.new_empty(R)
    on_rows(cpu_row_sums, triton_row_sums, R, R * C, (x, out, C), (R,), _lanes(C))
    return out


# ------------------------------------------------------------------------------------------------------------------
# RMSNorm: y_i = w_i n_i, n = x r, r = (mean_j x_j^2 + eps)^-1/2 (Zhang and Sennrich 2019, eq. 4).
# RoPE: (y1 c - y2 s, y2 c + y1 s), y1 and y2 the halves of a head (Su et al. 2021, eq. 34, NeoX halves). Here the norm,
# the turn, or the turn of what was normed. Backward turns the other way, to g, and with h = g w: dx = r (h - n mean(h
# n)), dw = sum over rows of g n.
#
# A row is one head of one token, or a whole token. A program holds whole rows, and how many, in which block and by how
# many warps follows from the row's length, which is a constant of the compiled kernel: so `tl.sum` has one order per
# length. dw is the `row_sums` of blocks: of SUM_ROWS rows on Triton, of SUM_ROWS tokens on a CPU.


@loop
def cpu_rope_table(first, last, angle, cos, sin):
    for i in range(first, last):
        cos[i], sin[i] = cos_sin(np.float64(angle[i]))


def rope_table(inv_freq, positions):
    """cos and sin (N, D/2) float32 of position * inv_freq (Su et al. 2021, eq. 15); both sides take them from here."""
    angle = positions.float()[:, None] * inv_freq.float()
    if use_triton(angle):
        return angle.cos(), angle.sin()
    cos = torch.empty_like(angle)
    sin = torch.empty_like(angle)
    _share(cpu_rope_table, angle.numel(), 40 * angle.numel(), angle, cos, sin)
    return cos, sin


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
    """dw (blocks, D) gets the sum over each block's rows in order; first .. last are blocks of SUM_ROWS tokens."""
    for row in range(first * SUM_ROWS * H, min(last * SUM_ROWS * H, R)):
        at = row // H * x_n + row % H * D
        x_row = x[at:]
        g = dx[row * D :]
        for i in range(D):
            g[i] = grad[row * D + i]
        if len(cos):
            _turn_row(g, cos, sin, row // H, D, -ONE)
        if len(weight):
            r = _rms(x, at, D, eps)
            block = dw[row // H // SUM_ROWS * D :]
            for i in range(D):
                block[i] += g[i] * (x_row[i] * r)
                g[i] *= weight[i]
            mean = dot(dx, row * D, x, at, D) * r / np.float32(D)
            for i in range(D):
                g[i] = r * (g[i] - x_row[i] * r * mean)


@triton.jit
def _turn(cos, sin, row, i, inside, sign, H: constexpr, D: constexpr):
    """(i of a row's other half, cos, +-sin): y_i = x_i cos +- x_other sin, with `sign` in the first half."""
    at = (row // H).to(tl.int64)[:, None] * (D // 2) + i % (D // 2)
    s = tl.load(sin + at, mask=inside, other=0.0) * tl.where(i < D // 2, sign, -sign)
    return (i + D // 2) % D, tl.load(cos + at, mask=inside, other=0.0), s


@triton.jit(do_not_specialize=["R"])
def triton_norm_rope(
    x, weight, cos, sin, y, eps, x_n, R, H: constexpr, D: constexpr, ROWS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """ROWS of the R rows, which are H for a token. No weight: no norm; no cos: no turn."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)[None, :]
    inside = (row < R)[:, None] & (i < D)
    x += ((row // H).to(tl.int64) * x_n + row % H * D)[:, None]
    v = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        r = tl.rsqrt(tl.sum(v * v, 1) / D + eps)[:, None]
        v = v * r * tl.load(weight + i, mask=i < D, other=0.0).to(tl.float32)
    if cos is not None:
        other, c, s = _turn(cos, sin, row, i, inside, -1.0, H, D)
        u = tl.load(x + other, mask=inside, other=0.0).to(tl.float32)
        if weight is not None:
            u = u * r * tl.load(weight + other, mask=i < D, other=0.0).to(tl.float32)
        v = v * c + u * s
    tl.store(y + row.to(tl.int64)[:, None] * D + i, v.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["R"])
def triton_norm_rope_backward(
    grad, x, weight, cos, sin, dx, dw, eps, x_n, R, H: constexpr, D: constexpr,
    ROWS: constexpr, BLOCK: constexpr, STEPS: constexpr,
):  # fmt: skip
    """dx of STEPS * ROWS rows, a block, and their share of dw (blocks, D)."""
    block = tl.program_id(0)
    i = tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(STEPS):
        row = (block * STEPS + step) * ROWS + tl.arange(0, ROWS)
        inside = (row < R)[:, None] & (i < D)
        at = row.to(tl.int64)[:, None] * D
        g = tl.load(grad + at + i, mask=inside, other=0.0).to(tl.float32)
        if cos is not None:
            other, c, s = _turn(cos, sin, row, i, inside, 1.0, H, D)
            g = g * c + tl.load(grad + at + other, mask=inside, other=0.0).to(tl.float32) * s
        if weight is not None:
            x_row = x + ((row // H).to(tl.int64) * x_n + row % H * D)[:, None]
            n = tl.load(x_row + i, mask=inside, other=0.0).to(tl.float32)
            r = tl.rsqrt(tl.sum(n * n, 1) / D + eps)[:, None]
            n *= r
            acc += g * n
            g *= tl.load(weight + i, mask=i < D, other=0.0).to(tl.float32)
            g = r * (g - n * (tl.sum(g * n, 1) / D)[:, None])
        tl.store(dx + at + i, g.to(dx.dtype.element_ty), mask=inside)
    if weight is not None:
        share = tl.sum(acc, 0)[None, :]
        tl.store(dw + block.to(tl.int64) * D + i, share, mask=i < D)


@functools.cache
def _norm_config(D):
    block = _block(D)
    check(block <= 16384, "width={}: a norm's row must fit one program, at most 16384", D)
    warps = LONG_NORM_WARPS if block > NORM_BLOCK else NORM_WARPS
    return dict(ROWS=max(1, NORM_BLOCK // block), BLOCK=block, num_warps=warps, **EXACT)


class NormRope(torch.autograd.Function):
    """x (N, H, D), whose tokens may be strided: normed with a weight (D,), turned with cos and sin (N, D / 2)."""

    @staticmethod
    def forward(ctx, x, weight, cos, sin, eps):
        N, H, D = x.shape
        # as a new tensor would lie, as far as Triton's layout can see
        aligned = (x.data_ptr() | x.stride(0) | H * D) % 16 == 0  # each of the three
        lies = aligned and x.stride()[1:] == (D, 1)
        x = x if lies else _aligned(x)
        weight, cos, sin = map(_aligned, (weight, cos, sin))
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.tail = eps, x.stride(0) if lies else H * D, N * H, H, D
        y = _contiguous_like(x)
        config = _norm_config(D)
        grid = (-(-N * H // config["ROWS"]),)
        args = x, weight, cos, sin, y, *ctx.tail
        on_rows(cpu_norm_rope, triton_norm_rope, N, 100 * N * H * D, args, grid, config)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, weight, *_ = saved = ctx.saved_tensors
        N, H, D = x.shape
        config = _norm_config(D)
        steps = max(1, SUM_ROWS // config["ROWS"])
        rows = steps * config["ROWS"] if use_triton(x) else SUM_ROWS * H
        blocks = -(-N * H // rows)
        dx = _contiguous_like(x)
        dw = None if weight is None else x.new_zeros(blocks, D, dtype=torch.float32)
        args = _aligned(grad), *saved, dx, dw, *ctx.tail
        config = dict(config, STEPS=steps)
        on_rows(cpu_norm_rope_backward, triton_norm_rope_backward, blocks, 200 * N * H * D, args, (blocks,), config)
        if dw is not None:
            dw = row_sums(dw.t().double()).to(weight.dtype)
        return dx, dw, None, None, None


def rms_norm(x, weight, eps, residual=None):
    """
    x (..., C) * rsqrt(mean(x^2) + eps) * weight (C,), in float32, rounded once to x's dtype. Differentiable.

    With a residual: s = x + residual, rounded, takes x's place, and (y, s) is returned.
    """
    fits = weight.shape == x.shape[-1:] and (residual is None or residual.shape == x.shape)
    check(fits, "weight {} or residual does not fit x {}", weight, x)
    s = x if residual is None else x + residual  # not in the kernel: the engine passes residuals, the trainer none
    check_operands(x, weight, s)
    rows = s.reshape(-1, 1, s.shape[-1])
    y = _apply(NormRope, rows, weight, None, None, eps).view(s.shape)
    return y if residual is None else (y, s)


def norm_rope(q, k, cos, sin, q_weight=None, k_weight=None, eps=0.0):
    """
    Rotary positions of q (N, H, D) and k (N, HK, D), each head normed before where there are weights (D,); cos, sin
    (N, D/2) float32 as `rope_table` gives them. All in float32, rounded once; new tensors; differentiable in q, k and
    the weights.
    """
    fits = q.dim() == k.dim() == 3 and q.shape[2] % 2 == 0 and q.shape[::2] == k.shape[::2]
    check(fits, "q {} and k {}: (N, heads, D) with an even D are needed", q, k)
    N, _, D = q.shape
    fits = all(x.dtype == torch.float32 and x.shape == (N, D // 2) for x in (cos, sin))
    check(fits, "cos {} and sin {}: float32 ({}, {}) is needed", cos, sin, N, D // 2)
    weights = [w for w in (q_weight, k_weight) if w is not None]
    fits = len(weights) != 1 and all(w.shape == (D,) for w in weights)
    check(fits, "weights of {}: none, or two of q's head dim {}", [len(w) for w in weights], D)
    check_operands(q, k, *weights)
    q = _apply(NormRope, q, q_weight, cos, sin, eps)
    k = _apply(NormRope, k, k_weight, cos, sin, eps)
    return q, k


# ------------------------------------------------------------------------------------------------------------------
# SwiGLU: silu(g) u, silu(g) = g / (1 + exp(-g)) (Shazeer 2020, eq. 5); d silu / dg = s (1 + g (1 - s)), s = sigmoid(g).
#
# Element by element, so there is no order.


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


@triton.jit
def triton_swiglu(gate, up, y, gate_r, up_r, C, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + row * gate_r + c, mask=c < C, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_r + c, mask=c < C, other=0.0).to(tl.float32)
    v = g / (1 + tl.exp(-g)) * u
    tl.store(y + row * C + c, v.to(y.dtype.element_ty), mask=c < C)


@triton.jit
def triton_swiglu_backward(grad, gate, up, d_gate, d_up, gate_r, up_r, C, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.load(grad + row * C + c, mask=c < C, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_r + c, mask=c < C, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_r + c, mask=c < C, other=0.0).to(tl.float32)
    s = 1 / (1 + tl.exp(-g))
    dg = d * u * (s * (1 + g * (1 - s)))
    du = d * (g * s)
    tl.store(d_gate + row * C + c, dg.to(d_gate.dtype.element_ty), mask=c < C)
    tl.store(d_up + row * C + c, du.to(d_up.dtype.element_ty), mask=c < C)


class SwiGLU(torch.autograd.Function):
    """gate and up (R, C), whose rows may be strided."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        y = _contiguous_like(gate)
        on_elements(cpu_swiglu, triton_swiglu, y.shape, 100, gate, up, y, gate.stride(0), up.stride(0))
        return y

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        d_gate = _contiguous_like(gate)
        d_up = _contiguous_like(up)
        args = grad.contiguous(), gate, up, d_gate, d_up, gate.stride(0), up.stride(0)
        on_elements(cpu_swiglu_backward, triton_swiglu_backward, grad.shape, 100, *args)
        return d_gate, d_up


def swiglu(gate, up):
    """silu(gate) * up, (..., C) each, in float32, rounded once; the rows may be strided. Differentiable."""
    check(gate.shape == up.shape, "gate {} and up {} differ", gate, up)
    rows = [(x if x.stride(-1) == 1 else x.contiguous()).reshape(-1, x.shape[-1]) for x in (gate, up)]
    check_operands(*rows)
    return _apply(SwiGLU, *rows).view(gate.shape)


# ------------------------------------------------------------------------------------------------------------------
# mixture of experts (Qwen3-MoE): y = sum_j w_j down_e swiglu(gate_up_e x) over the k experts e = e_1 .. e_k of a token
# with the largest z_e = router_e x, which stay float32; w is the softmax of these k.
#
# Experts are ranked by (z_e, -e), which no two share, so whoever selects finds the same. A token and its expert in slot
# j are a pair. Pairs are sorted by expert, those of one in the order of the tokens, and their products are rows of
# matmuls, which do not see how many pairs an expert has. Sums over a token's pairs go slot by slot, and an expert's
# gradient is one chain over its pairs in order: exact zeros where there are none.
#
# On Triton nothing is asked of the host, so that a decode step can be a CUDA graph: an expert's program counts the
# pairs before its own, and a product's program finds its expert and rows from these counts. As many are started as so
# many pairs and experts can need at most. A tile is computed as `triton_matmul` does it, so no tile is seen in a row.


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


@triton.jit
def triton_choose(z, experts, w, E, k, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    z += row * E
    x = tl.load(z + i, mask=i < E, other=float("-inf"))
    m = tl.max(x, 0)
    keys = tl.where(i < E, (_rank_int64(x) << 24) - i, -(1 << 62))
    p = tl.zeros([BLOCK], tl.float32)
    total = 0.0
    for j in range(k):
        e = -tl.max(keys, 0) & 0xFFFFFF
        tl.store(experts + row * k + j, e)
        keys = tl.where(i == e, -(1 << 62), keys)
        its = tl.exp(tl.load(z + e) - m)
        p = tl.where(i == j, its, p)
        total += its
    tl.store(w + row * k + i, tl.div_rn(p, total), mask=i < k)


@triton.jit
def triton_by_expert(experts, starts, places, pairs, BLOCK: constexpr):
    """An expert's program counts the pairs of those before it, and then numbers its own."""
    e = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    at = 0
    for first in range(0, pairs, BLOCK):
        at += tl.sum((tl.load(experts + first + i, mask=first + i < pairs, other=e) < e).to(tl.int32), 0)
    tl.store(starts + e, at)
    for first in range(0, pairs, BLOCK):
        mine = (tl.load(experts + first + i, mask=first + i < pairs, other=-1) == e).to(tl.int32)
        tl.store(places + first + i, at + tl.cumsum(mine, 0) - mine, mask=mine > 0)
        at += tl.sum(mine, 0)


@triton.jit
def triton_to_pairs(x, y, places, w, out, dots, k, C: constexpr, BLOCK: constexpr):
    pair = tl.program_id(0).to(tl.int64)
    x += pair // k * C
    to = tl.load(places + pair) * C
    acc = tl.zeros([BLOCK], tl.float32)
    for first in range(0, C, BLOCK):
        c = first + tl.arange(0, BLOCK)
        v = tl.load(x + c, mask=c < C, other=0.0).to(tl.float32)
        if y is not None:
            acc += v * tl.load(y + to + c, mask=c < C, other=0.0).to(tl.float32)
            v *= tl.load(w + pair)
        tl.store(out + to + c, v.to(out.dtype.element_ty), mask=c < C)
    if y is not None:
        tl.store(dots + pair, tl.sum(acc, 0))


@triton.jit
def triton_expert_matmul(
    b, a, c, starts, N, K, b_n, b_k,
    EXPERTS: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr,
):  # fmt: skip
    """
    A tile of c^T = b^T a^T, so that the weights are the 64 rows that wgmma needs: BLOCK_N rows of one expert, which
    follows from how many each has. The last programs find none.
    """
    tile = tl.program_id(1)
    i = tl.arange(0, EXPERTS)
    tiles = tl.cdiv(tl.load(starts + 1 + i) - tl.load(starts + i), BLOCK_N)
    e = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int64), 0)
    if e == EXPERTS:
        return
    tile -= tl.sum(tl.where(i < e, tiles, 0), 0)
    m = tl.load(starts + e) + tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    end = tl.load(starts + e + 1)
    _multiply_tile(b + e * N * K, a, c, n, m, N, end, K, b_n, b_k, 1, K, 1, N, False, BLOCK_K)


@triton.jit
def triton_combine(y, places, w, out, k, C, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for i in range(row * k, (row + 1) * k):
        v = tl.load(y + tl.load(places + i) * C + c, mask=c < C, other=0.0).to(tl.float32)
        acc = tl.fma(tl.load(w + i), v, acc)
    tl.store(out + row * C + c, acc.to(out.dtype.element_ty), mask=c < C)


def _expert_config(weight, M, N):
    """Tiles of products (M, N), one for each expert."""
    sizes = _matmul_config(M, N, weight.dtype, True, False, card(weight))
    names = "BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages"
    return dict(zip(names, sizes))


def _expert_matmul(a, b, starts):
    """a (N * k, K) @ b (E, K, N), each row of a with its expert's."""
    E, K, N = b.shape
    pairs = len(a)
    c = a.new_empty(pairs, N)
    if not use_triton(a):
        _share(cpu_expert_matmul, E * -(-N // PANEL), 2 * pairs * K * N, a, panels_of(b), starts, c, K, N)
        return c
    config = _expert_config(b, E * N, -(-pairs // E))  # as if all had as many rows
    tiles = pairs // config["BLOCK_N"] + min(pairs, E)  # at most
    grid = -(-N // config["BLOCK_M"]), tiles
    args = b, a, c, starts, N, K, b.stride(2), b.stride(1)
    _launch(triton_expert_matmul, grid, *args, EXPERTS=len(starts) - 2, **config)
    return c


def _to_pairs(x, y, places, w):
    """(rows of x (N, C), times w (N, k) if there are any, at their places: (N * k, C); their products with y's)."""
    N, k = places.shape
    C = x.shape[1]
    out = x.new_empty(N * k, C)
    dots = None if y is None else torch.empty_like(w)
    args = _aligned(x), y, places, w, out, dots, k, C
    on_rows(cpu_to_pairs, triton_to_pairs, N, 3 * out.numel(), args, (N * k,), _lanes(C))
    return out, dots


class RouterLogits(torch.autograd.Function):
    """x (N, C) @ router (E, C)^T in float32, whatever x is."""

    @staticmethod
    def forward(ctx, x, router):
        ctx.save_for_backward(x, router)
        return matmul(x, router.t(), torch.float32)

    @staticmethod
    def backward(ctx, grad):
        x, router = ctx.saved_tensors
        return matmul(grad, router.float()).to(x.dtype), matmul(grad.t(), x.float()).to(router.dtype)


class Choose(torch.autograd.Function):
    """Logits z (N, E) float32 -> (w, experts), (N, k) each, the likeliest first."""

    @staticmethod
    def forward(ctx, z, k):
        N, E = z.shape
        w = z.new_empty(N, k)
        experts = torch.empty_like(w, dtype=torch.int64)
        on_rows(cpu_choose, triton_choose, N, 20 * N * E, (z, experts, w, E, k), (N,), _lanes(E))
        ctx.E = E
        ctx.save_for_backward(w, experts)
        ctx.mark_non_differentiable(experts)
        return w, experts

    @staticmethod
    def backward(ctx, grad, _):
        w, experts = ctx.saved_tensors
        mean = row_sums((w * grad).double())[:, None].float()
        return w.new_zeros(len(w), ctx.E).scatter_(1, experts, w * (grad - mean)), None


class ToPairs(torch.autograd.Function):
    """Each row of x (N, C) at the places (N, k) of its pairs: (N * k, C)."""

    @staticmethod
    def forward(ctx, x, places):
        ctx.save_for_backward(places)
        return _to_pairs(x, None, places, None)[0]

    @staticmethod
    def backward(ctx, grad):
        (places,) = ctx.saved_tensors
        return Combine.forward(_NoGradient(), grad, torch.ones_like(places, dtype=torch.float32), places), None


class ExpertMatmul(torch.autograd.Function):
    """Rows of x (N * k, K), each times the transpose of its expert's weight (E, N, K)."""

    @staticmethod
    def forward(ctx, x, weight, starts):
        ctx.save_for_backward(x, weight, starts)
        return _expert_matmul(x, weight.transpose(1, 2), starts)

    @staticmethod
    def backward(ctx, grad):
        x, weight, starts = ctx.saved_tensors
        grad = grad.contiguous()
        E, N, K = weight.shape
        d_weight = torch.empty_like(weight)
        args = grad, x, d_weight, starts, N, K, 0, 1, N, K, 1, K, 1, False
        config = _expert_config(weight, N, K * E)
        grid = _tiles(N, K, config["BLOCK_M"], config["BLOCK_N"]), E
        on_rows(cpu_expert_gradients, triton_matmul, E, 2 * len(x) * N * K, args, grid, config)
        return _expert_matmul(grad, weight, starts), d_weight, None


class Combine(torch.autograd.Function):
    """Sums (N, C) of the pairs y (N * k, C) of each row, each times its w (N, k)."""

    @staticmethod
    def forward(ctx, y, w, places):
        ctx.save_for_backward(y, w, places)
        N, k = places.shape
        out = y.new_empty(N, y.shape[1])
        on_elements(cpu_combine, triton_combine, out.shape, 2 * k, y.contiguous(), places, w, out, k)
        return out

    @staticmethod
    def backward(ctx, grad):
        y, w, places = ctx.saved_tensors
        return *_to_pairs(grad, y, places, w), None


def moe(x, router, gate_up, down, k, routed=None, first=0, add=None):
    """
    x (N, C) through the k experts of each row -> (N, C). router (E, C), gate_up (E, 2 F, C), down (E, C, F).
    Differentiable. routed: a list that gets the router's logits (N, E) and the experts (N, k), the likeliest first.

    With `add` gate_up and down may be those of some experts only, from number `first`: it adds up rows that one rank
    has and the others fill with zeros. Then not differentiable.
    """
    E = len(router)
    here, C, F = down.shape
    fits = x.shape[1] == C and router.shape == (E, C) and gate_up.shape == (here, 2 * F, C) and (here == E or add)
    message = "x, router, gate_up, down {}, {}, {}, {}: (N, C), (E, C), (E, 2 F, C), (E, C, F) are needed"
    check(fits, message, x, router, gate_up, down)
    check(0 < k <= E, "{} experts of {} for a token: 1 to all are needed", k, E)
    check_operands(x, router, gate_up, down)
    z = _apply(RouterLogits, x, router)
    w, experts = _apply(Choose, z, k)
    if routed is not None:
        routed += [z, experts]
    places = torch.empty_like(experts)
    starts = experts.new_zeros(_block(E) + 2)
    pairs = experts.numel()
    args = experts, starts, places, pairs
    on_rows(cpu_by_expert, triton_by_expert, 1, pairs, args, (len(starts) - 1,), _lanes(pairs))
    if add:
        starts = starts[torch.arange(first, first + _block(here) + 2, device=x.device).clamp(max=first + here)]
    y = _apply(ExpertMatmul, _apply(ToPairs, x, places), gate_up, starts)
    y = _apply(ExpertMatmul, swiglu(*y.chunk(2, 1)), down, starts)
    if add:
        pair = torch.arange(pairs, device=x.device)[:, None]
        y = add(y.masked_fill_((pair < starts[0]) | (pair >= starts[here]), 0.0))
    return _apply(Combine, y, w, places)


# ------------------------------------------------------------------------------------------------------------------
# attention: o = p v / rowsum(p), p = exp(q k^T * scale - m), over the keys of one sequence in order; m is the row's
# largest score, which has no order. Backward (Dao 2023, algorithm 2): ds = p * (do v^T - rowsum(do * o)).
#
# Sums begin at the sequence's first key, and tiles of keys lie at absolute positions. A key in a row's future adds an
# exact zero, and so does a tile of them. So neither the batch, nor the chunk of a prefill, nor the pages of the cache
# can be seen.

# Speed only: query rows of a tile ..
QUERIES = 64  # .. on a CPU
DECODE_ROWS = 64  # .. of a decode step: 16 would be enough, but mma.sync instead of wgmma
PREFILL_ROWS = 128  # .. of a prefill, a packed batch or dQ
BACKWARD_ROWS = 64  # .. of dK and dV
ROWS_OF_WARPS = 64  # .. on cards without TMA, where it is also the keys of one of dK and dV
BACKWARD_KEYS = 128  # keys of a program of dK and dV: 64 for each of two groups of warps, or both compute the same
DECODE_PROGRAMS = 528  # of a decode step: with fewer (token, head) pairs, the splits go to several; 4 per SM
PREFILL_STAGES = 5  # of a paged prefill, which is alone on its SM; the index of a page has one. A guess


class Plan:
    """
    Where the queries and keys of each sequence are; made once per forward, used by every layer.

    q_lens (B,) queries of each sequence, kv_lens (B,) its keys, of which the queries' are the last. Over a paged cache:
    page_table (any, >= max kv_lens), the cache row of each position, and requests (B,), the table's row of each
    sequence. Without a page_table the keys are packed as the queries are. first, row: see `packed_plan`; of each token
    a row of its own.

    The Triton kernels read every number from the device: no step waits for it. A captured CUDA graph replays with what
    kv_lens, page_table and requests then hold; q_lens, of which the plan keeps running sums (B,), must stay. Keep the
    plan as long as the graph. The CPU makes its indices at the first use.
    """

    def __init__(self, q_lens, kv_lens, page_table=None, requests=None, first=..., row=None):
        self.q_lens = q_lens
        self.kv_lens = kv_lens
        self.page_table = page_table
        self.requests = requests
        self.first = first
        self.row = row
        self.B = len(q_lens)
        self.q_ends = q_lens.cumsum(0)
        self._ends = {}

    def ends(self, per_token, rows):
        """For Triton: running sums (B,) of each sequence's tiles of `rows` rows, with `per_token` rows to a token."""
        if (per_token, rows) not in self._ends:
            tiles = (self.q_lens * per_token + (rows - 1)) // rows
            self._ends[per_token, rows] = tiles.cumsum(0)
        return self._ends[per_token, rows]

    def spread(self, x):
        """x (U, ..) as (N, ..), a row for each token: in training only."""
        return x if self.row is None else F.embedding(self.row, x.flatten(1)).view(-1, *x.shape[1:])

    @functools.cached_property
    def queries(self):
        return int(self.q_ends[-1]) if self.B else 0

    @functools.cached_property
    def cpu_indices(self):
        """
        For the CPU: (tokens of the packed batch, rows of the keys), (any,) int32 each; and for each sequence, (B,)
        int64 each, where its queries begin in the first, how many they are, where its keys begin in the second, how
        many.
        """
        starts = self.q_ends - self.q_lens
        tokens = torch.arange(self.queries, dtype=torch.int32)
        if self.page_table is None:
            rows = torch.arange(self.kv_lens.sum(), dtype=torch.int32)
            first = self.kv_lens.cumsum(0) - self.kv_lens
        else:
            rows = self.page_table.int()
            first = self.requests * self.page_table.stride(0)
        numbers = (x.long().contiguous() for x in (starts, self.q_lens, first, self.kv_lens))
        return tuple(map(_flat, (tokens, rows, *numbers)))

    @functools.cached_property
    def cpu_pairs(self):
        """Query times key of each sequence, added: what the work of a loop is reckoned from."""
        _, _, _, q_lens, _, kv_lens = self.cpu_indices
        return int((q_lens * kv_lens).sum())


def packed_plan(lengths, device=None, ids=None):
    """
    The plan of a packed batch of whole sequences, `lengths` (B,) tokens each, for training. ids (N,): their tokens, if
    those with one prefix share a row of q, k and v: the rows are of the tokens `first` (U,), each token's is in `row`.
    """
    lengths = torch.as_tensor(lengths, device=device).contiguous()  # as the Triton kernels read them
    if ids is None:
        return Plan(lengths, lengths)
    nodes = {}  # a prefix tree, {(first token with the prefix before, id): the first with both}, as indices of `alike`
    alike = []  # of each token the first with its prefix
    for tokens in ids.cpu().split(lengths.tolist()):
        node = None
        for token in tokens.tolist():
            node = nodes.setdefault((node, token), len(alike))
            alike.append(node)
    first, row = torch.tensor(alike, device=ids.device).unique(return_inverse=True)
    ends = torch.searchsorted(first, lengths.cumsum(0))  # a sequence's first ones are its last tokens
    return Plan(ends.diff(prepend=ends.new_zeros(1)), lengths, first=first, row=row)


def paged_plan(q_lens, kv_lens, page_table, requests):
    """
    The plan of a prefill chunk or a decode step over a paged cache, which differ in these numbers only: see Plan.

    q_lens (B,) new tokens, kv_lens (B,) tokens in the cache with the new ones.
    """
    each = q_lens, kv_lens, requests
    fits = page_table.stride(1) == 1 and all(x.device == page_table.device and x.is_contiguous() for x in each)
    check(fits, "paged_plan: all four on one device, the numbers and the entries of a page_table's row side by side")
    return Plan(q_lens, kv_lens, page_table, requests)


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


# On Triton the softmax is online (Milakov and Gimelshein 2018; Dao 2023, algorithm 1). Per split of SPLIT keys, over
# its tiles of KEYS keys in order, with s = q k^T:
#     m' = max(m, max s), a = 2^((m - m') c), p = 2^(s c - m' c), l' = a l + p 1, o' = a o + p v, c = scale / ln 2,
# and over the splits in order the same with a split's (m, l, o) in a tile's place: `_merge`. A hidden key or tile of
# them changes no bit (m' = m, a = 1, p = 0), and no operation mixes rows. Backward has p = 2^(s c - lse).
#
# lse and rowsum(do * o) lie as (HK, N, G), so that those of a tile of rows are side by side, and then come some numbers
# that are read with a last tile and thrown away.
#
# The copy engine (TMA), where there is one, brings a packed batch's k and v to forward and dq. Past a tensor's end it
# fills in zeros; with Triton's ragged descriptors, whose addresses wrap round at 2^64, it does so past a sequence's.


@triton.jit
def _find(ends, B, at):
    """The sequence that `at` lies in: how many of the running sums it has passed; B beyond the last."""
    passed = 0
    for first in range(0, B, 256):
        i = first + tl.arange(0, 256)
        passed += tl.sum((tl.load(ends + i, mask=i < B, other=2147483647) <= at).to(tl.int32), 0)
    return passed


@triton.jit
def _before(ends, b):
    return tl.load(ends + b - 1, mask=b > 0, other=0).to(tl.int32)


@triton.jit
def _merge(m, den, o, m_new, l_new, o_new, c):
    """Two softmaxes over other keys are one; (-1e30, 0, 0) is the empty one and changes no bit."""
    top = tl.maximum(m, m_new)
    a = tl.exp2((m - top) * c)
    b = tl.exp2((m_new - top) * c)
    return top, den * a + l_new * b, o * a[:, None] + o_new * b[:, None]


@triton.jit
def _finish(m, den, o, c):
    """The output, and the logarithm of base 2 of the row's sum, which backward needs."""
    return o * tl.div_rn(1.0, den)[:, None], tl.fma(m, c, tl.log2(den))


@triton.jit
def _row_tile(tile, q_ends, tile_ends, b, GROUPS: constexpr, ROWS: constexpr):
    """
    (where the sequence starts in the pack, its length; of a tile's rows: the query of the sequence, the head of the
    group, its token in the pack, whether there is one).
    """
    start = _before(q_ends, b)
    length = _before(q_ends, b + 1) - start
    row = (tile - _before(tile_ends, b)) * ROWS + tl.arange(0, ROWS)
    query = row // GROUPS
    return start, length, query, row % GROUPS, (start + query).to(tl.int64), query < length


@triton.jit
def _key_tile(x, start, length, first, head, x_s, x_h, KEYS: constexpr, D: constexpr, TMA: constexpr):
    """(KEYS, D) of a packed sequence's keys or values from `first` on; zeros past its end."""
    if TMA:
        return load_ragged(x, start, length, [first, head, 0]).reshape(KEYS, D)
    else:
        at = first + tl.arange(0, KEYS)
        row = x + head.to(tl.int64) * x_h + (start + at).to(tl.int64) * x_s
        return tl.load(row[:, None] + tl.arange(0, D)[None, :], mask=(at < length)[:, None], other=0.0)


@triton.jit(do_not_specialize=["N", "B", "splits", "LANES"])
def triton_attention(
    q, k, v, out, lse, part_m, part_l, q_ends, tile_ends, kv_lens, pages, requests, pages_r, c, N, B, splits, LANES,
    q_n, q_h, k_s, k_h, v_s, v_h,
    HEADS: constexpr, GROUPS: constexpr, D: constexpr, KEYS: constexpr, SPLIT: constexpr,
    ROWS: constexpr, PAGED: constexpr, PARTS: constexpr, TMA: constexpr,
):  # fmt: skip
    """A tile of rows, (query, head of the group) pairs. PARTS: out takes each split's sums for `triton_merge_parts`."""
    # the last tiles see the most keys: first come the long ones
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    lane = tl.program_id(2)
    b = _find(tile_ends, B, tile)
    if b == B:
        return
    start, length, query, group, token, valid = _row_tile(tile, q_ends, tile_ends, b, GROUPS, ROWS)
    kv_len = tl.load(kv_lens + b).to(tl.int32)
    position = kv_len - length + query
    last = tl.max(tl.where(valid, position, -1), 0) + 1  # keys that some row sees
    seen = tl.min(position, 0) + 1  # keys that every row sees: their tiles need no mask
    if PAGED:
        pages += tl.load(requests + b).to(tl.int64) * pages_r
        k += head.to(tl.int64) * k_h
        v += head.to(tl.int64) * v_h
    d = tl.arange(0, D)[None, :]
    ones = tl.full([KEYS, 16], 1.0, q.dtype.element_ty)
    column = (head * GROUPS + group).to(tl.int64)
    x = tl.load(q + (token * q_n + column * q_h)[:, None] + d, mask=valid[:, None], other=0.0)
    row = token * (HEADS * GROUPS) + column
    m = tl.full([ROWS], -1e30, tl.float32)
    den = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, D], tl.float32)
    for split in range(lane, tl.cdiv(last, SPLIT), LANES):
        sm = tl.full([ROWS], -1e30, tl.float32)
        so = tl.zeros([ROWS, D], tl.float32)
        sums = tl.zeros([ROWS, 16], tl.float32)
        for first in range(split * SPLIT, min(last, (split + 1) * SPLIT), KEYS):
            # foreign rows hold anything: 0 * NaN would be NaN, so neither k nor v is read past the sequence
            if PAGED:
                at = first + tl.arange(0, KEYS)
                here = at < kv_len
                key = tl.load(pages + at, mask=here, other=0).to(tl.int64)
                kt = tl.load(k + key[:, None] * k_s + d, mask=here[:, None], other=0.0)
                vt = tl.load(v + key[:, None] * v_s + d, mask=here[:, None], other=0.0)
            else:
                kt = _key_tile(k, start, kv_len, first, head, k_s, k_h, KEYS, D, TMA)
                vt = _key_tile(v, start, kv_len, first, head, v_s, v_h, KEYS, D, TMA)
            s = tl.dot(x, kt.T, input_precision="ieee")
            if first + KEYS > seen:
                s = tl.where(first + tl.arange(0, KEYS)[None, :] <= position[:, None], s, float("-inf"))
            top = tl.maximum(sm, tl.max(s, 1))
            a = tl.exp2((sm - top) * c)
            p = tl.exp2(tl.fma(s, c, (-top * c)[:, None])).to(q.dtype.element_ty)
            sums = tl.dot(p, ones, sums * a[:, None], input_precision="ieee")
            so = tl.dot(p, vt, so * a[:, None], input_precision="ieee")
            sm = top
        sl = tl.max(sums, 1)
        if PARTS:
            at = row * splits + split
            tl.store(part_m + at, sm, mask=valid)
            tl.store(part_l + at, sl, mask=valid)
            tl.store(out + at[:, None] * D + d, so, mask=valid[:, None])
        else:
            m, den, o = _merge(m, den, o, sm, sl, so, c)
    if not PARTS:
        o, den = _finish(m, den, o, c)
        tl.store(out + row[:, None] * D + d, o.to(out.dtype.element_ty), mask=valid[:, None])
        tl.store(lse + (head.to(tl.int64) * N + token) * GROUPS + group, den, mask=valid)


@triton.jit(do_not_specialize=["B", "splits"])
def triton_merge_parts(
    part_o, part_m, part_l, out, q_ends, kv_lens, c, B, splits, H: constexpr, D: constexpr, SPLIT: constexpr,
):  # fmt: skip
    """The splits of one (token, head) row, in order."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(0) // H
    b = _find(q_ends, B, token)
    if b == B:
        return
    seen = tl.load(kv_lens + b).to(tl.int32) - _before(q_ends, b + 1) + token + 1
    one = tl.arange(0, 1)
    d = tl.arange(0, D)[None, :]
    m = tl.full([1], -1e30, tl.float32)
    den = tl.zeros([1], tl.float32)
    o = tl.zeros([1, D], tl.float32)
    for split in range(tl.cdiv(seen, SPLIT)):
        at = row * splits + split + one
        sm = tl.load(part_m + at)
        sl = tl.load(part_l + at)
        so = tl.load(part_o + at[:, None] * D + d)
        m, den, o = _merge(m, den, o, sm, sl, so, c)
    o, den = _finish(m, den, o, c)
    tl.store(out + (row + one)[:, None] * D + d, o.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["R"])
def triton_attention_delta(
    grad, out, delta, R, HEADS: constexpr, GROUPS: constexpr, D: constexpr, ROWS: constexpr,
):  # fmt: skip
    """rowsum(do * o), laid out as lse."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)[None, :]
    at = row[:, None] * D + d
    inside = (row < R)[:, None]
    x = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    token = row // (HEADS * GROUPS)
    column = row % (HEADS * GROUPS)
    to = (column // GROUPS * (R // (HEADS * GROUPS)) + token) * GROUPS + column % GROUPS
    tl.store(delta + to, tl.sum(x * y, 1), mask=row < R)


@triton.jit(do_not_specialize=["N", "B"])
def triton_attention_dq(
    q, k, v, grad, lse, delta, dq, q_ends, tile_ends, c, scale, N, B, q_n, q_h, k_s, k_h, v_s, v_h,
    HEADS: constexpr, GROUPS: constexpr, D: constexpr, ROWS: constexpr, KEYS: constexpr,
    TMA: constexpr,
):  # fmt: skip
    """dq = sum over the key tiles in order of ds k."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    b = _find(tile_ends, B, tile)
    if b == B:
        return
    start, length, query, group, token, valid = _row_tile(tile, q_ends, tile_ends, b, GROUPS, ROWS)
    d = tl.arange(0, D)[None, :]
    column = (head * GROUPS + group).to(tl.int64)
    row = token * (HEADS * GROUPS) + column
    x = tl.load(q + (token * q_n + column * q_h)[:, None] + d, mask=valid[:, None], other=0.0)
    g = tl.load(grad + row[:, None] * D + d, mask=valid[:, None], other=0.0)
    at_row = (head.to(tl.int64) * N + token) * GROUPS + group
    top = tl.load(lse + at_row, mask=valid, other=0.0)[:, None]
    mean = tl.load(delta + at_row, mask=valid, other=0.0)[:, None]
    seen = tl.min(query, 0) + 1  # keys that every row sees; a row that is not valid has g = 0, and so ds = 0
    acc = tl.zeros([ROWS, D], tl.float32)
    for first in range(0, tl.max(tl.where(valid, query, -1), 0) + 1, KEYS):
        kt = _key_tile(k, start, length, first, head, k_s, k_h, KEYS, D, TMA)
        vt = _key_tile(v, start, length, first, head, v_s, v_h, KEYS, D, TMA)
        s = tl.dot(x, kt.T, input_precision="ieee")
        p = tl.exp2(tl.fma(s, c, -top))
        if first + KEYS > seen:
            p = tl.where((first + tl.arange(0, KEYS)[None, :] <= query[:, None]) & valid[:, None], p, 0.0)
        dp = tl.dot(g, vt.T, input_precision="ieee")
        ds = (p * (dp - mean)).to(q.dtype.element_ty)
        acc = tl.dot(ds, kt, acc, input_precision="ieee")
    tl.store(dq + row[:, None] * D + d, (acc * scale).to(dq.dtype.element_ty), mask=valid[:, None])


@triton.jit(do_not_specialize=["N", "B"])
def triton_attention_dkv(
    q, k, v, grad, lse, delta, dk, dv, q_ends, key_ends, c, scale, N, B, q_n, q_h, k_s, k_h, v_s, v_h,
    HEADS: constexpr, GROUPS: constexpr, D: constexpr, ROWS: constexpr, KEYS: constexpr,
):  # fmt: skip
    """
    dk = sum ds^T q, dv = sum p^T do over the rows of the sequence, query by query and within one head by head, from the
    first query of the tile of ROWS in which some query sees some key of this tile: those before would add zeros.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    b = _find(key_ends, B, tile)
    if b == B:
        return
    start = _before(q_ends, b)
    end = _before(q_ends, b + 1)
    length = end - start
    first_key = (tile - _before(key_ends, b)) * KEYS
    at = first_key + tl.arange(0, KEYS)
    d = tl.arange(0, D)[None, :]
    here = (at < length)[:, None]
    s_row = (start + at).to(tl.int64)
    kt = tl.load(k + head.to(tl.int64) * k_h + s_row[:, None] * k_s + d, mask=here, other=0.0)
    vt = tl.load(v + head.to(tl.int64) * v_h + s_row[:, None] * v_s + d, mask=here, other=0.0)
    dk_acc = tl.zeros([KEYS, D], tl.float32)
    dv_acc = tl.zeros([KEYS, D], tl.float32)
    rows = length * GROUPS
    statistics = (head.to(tl.int64) * N + start) * GROUPS
    q += (head * GROUPS).to(tl.int64) * q_h
    grad += head.to(tl.int64) * (GROUPS * D)
    lse += statistics
    delta += statistics
    for first in range(first_key * GROUPS // ROWS * ROWS, rows, ROWS):
        r = first + tl.arange(0, ROWS)
        token = (start + r // GROUPS).to(tl.int64)
        group = r % GROUPS
        valid = (r < rows)[:, None]
        x = tl.load(q + (token * q_n + group * q_h)[:, None] + d, mask=valid, other=0.0)
        g = tl.load(grad + ((token * (HEADS * GROUPS) + group) * D)[:, None] + d, mask=valid, other=0.0)
        # past the sequence anything
        top = tl.load(lse + r)[None, :]
        mean = tl.load(delta + r)[None, :]
        s = tl.dot(kt, x.T, input_precision="ieee")
        p = tl.exp2(tl.fma(s, c, -top))
        if (first < (first_key + KEYS - 1) * GROUPS) | (first + ROWS > rows):  # not every row sees every key
            i = tl.arange(0, ROWS)[None, :]
            p = tl.where((at[:, None] * GROUPS - first <= i) & (i < rows - first), p, 0.0)
            mean = tl.where(i < rows - first, mean, 0.0)
        dv_acc = tl.dot(p.to(g.dtype), g, dv_acc, input_precision="ieee")
        dp = tl.dot(vt, g.T, input_precision="ieee")
        ds = (p * (dp - mean)).to(x.dtype)
        dk_acc = tl.dot(ds, x, dk_acc, input_precision="ieee")
    # computed again from what is read again: the loop has no registers to keep these in
    at = tl.load(q_ends + b - 1, mask=b > 0, other=0, volatile=True).to(tl.int32) + first_key + tl.arange(0, KEYS)
    to = (at.to(tl.int64) * HEADS + head)[:, None] * D + d
    here = (at < end)[:, None]
    tl.store(dk + to, (dk_acc * scale).to(dk.dtype.element_ty), mask=here)
    tl.store(dv + to, dv_acc.to(dv.dtype.element_ty), mask=here)


LOG2_E = 1.4426950408889634


def _attention_config(x, rows, warps, stages, keys=None):
    """
    Keys and rows per tile, warps and stages, for queries x. float32 has no tensor core here: small tiles, or registers
    spill. keys: of dK and dV, where keys take the place of rows.
    """
    if x.dtype == torch.float32:
        keys = KEYS_FLOAT32
        rows = 16
        warps = 8
        stages = 1
    elif not card(x).tma:
        keys, rows = (ROWS_OF_WARPS, KEYS_OF_WARPS) if keys else (KEYS_OF_WARPS, ROWS_OF_WARPS)
        warps = 8
        stages = 3
    keys = keys or KEYS
    return dict(
        KEYS=keys,
        ROWS=rows,
        num_warps=warps,
        num_stages=stages,
        **EXACT,
    )


def _by_copy_engine(k, v, keys):
    """k and v (N, HK, D) in tiles of `keys` keys of one head."""
    return [create_ragged_descriptor(x, [keys, 1, x.shape[2]]) for x in (k, v)]


class CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan, scale):
        q = q.contiguous()
        k = k.contiguous()
        v = v.contiguous()
        N, H, D = q.shape
        HK = k.shape[1]
        out = _contiguous_like(q)
        stats = q.new_empty(N, H, 2)
        ctx.save_for_backward(q, k, v, out, stats)
        ctx.plan = plan
        ctx.tail = plan.cpu_indices, H, HK, D, float(scale)
        _share(cpu_attention, plan.B * HK, 4 * H * D * plan.cpu_pairs, q, k, v, out, stats, *ctx.tail)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, *_ = saved = ctx.saved_tensors
        grads = [_contiguous_like(x) for x in (q, k, v)]
        _, H, HK, D, _ = ctx.tail
        work = 10 * H * D * ctx.plan.cpu_pairs
        _share(cpu_attention_backward, ctx.plan.B * HK, work, grad.contiguous(), *saved, *grads, *ctx.tail)
        return *grads, None, None


class TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan, scale):
        # a clone has the strides of its shape; `contiguous` may leave those of a dim of 1
        q, k, v = (x if _lies_for_tma(x) else x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
        N, H, D = q.shape
        heads = k.shape[1]
        groups = H // heads
        shape = dict(HEADS=heads, GROUPS=groups, D=D)
        strides = *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]
        c = scale * LOG2_E
        paged = plan.page_table is not None
        tma = not paged and card(q).tma
        out = q.new_empty(N, H, D)
        lse = q.new_empty(N * H + BACKWARD_ROWS, dtype=torch.float32)
        pages, requests = (plan.page_table, plan.requests) if paged else (plan.q_ends, plan.q_ends)
        # decode has few rows: several programs share the splits that one may have, and a second kernel merges them
        decode = paged and N <= plan.B
        splits = triton.cdiv(pages.shape[1], SPLIT) if decode else 1
        parts = splits > 1
        lanes = min(splits, triton.cdiv(DECODE_PROGRAMS, max(1, N * heads)))
        rows = DECODE_ROWS if decode else PREFILL_ROWS
        stages = PREFILL_STAGES if paged and not decode else 3
        config = _attention_config(q, rows, 4 if decode else 8, stages)
        # without tokens no tile: TMA takes no empty tensor
        ends = plan.ends(groups, config["ROWS"])
        tiles = N * groups // config["ROWS"] + min(N, plan.B)
        part_o = out
        part_m = part_l = lse
        if parts:
            part_o = q.new_empty(N, H, splits, D, dtype=torch.float32)
            part_m, part_l = q.new_empty(2, N, H, splits, dtype=torch.float32)
        key_tiles = _by_copy_engine(k, v, config["KEYS"]) if tma else (k, v)
        args = q, *key_tiles, part_o, lse, part_m, part_l, plan.q_ends, ends, plan.kv_lens, pages, requests
        args += pages.stride(0), c, N, plan.B, splits, lanes, *strides
        flags = dict(shape, SPLIT=SPLIT, PAGED=paged, PARTS=parts, TMA=tma)
        _launch(triton_attention, (tiles, heads, lanes), *args, **flags, **config)
        if parts:
            args = part_o, part_m, part_l, out, plan.q_ends, plan.kv_lens, c, plan.B, splits
            _launch(triton_merge_parts, (N * H,), *args, H=H, D=D, SPLIT=SPLIT, num_warps=1, **EXACT)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tail = plan, scale, shape, strides, tma
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        plan, scale, shape, strides, tma = ctx.tail
        N, H, _ = q.shape
        heads = k.shape[1]
        groups = H // heads
        check(plan.page_table is None, "attention over a paged_plan has no gradient: train on a packed_plan")
        grad = _aligned(grad)
        delta = torch.empty_like(lse)
        args = grad, out, delta, N * H
        grid = (triton.cdiv(N * H, DELTA_ROWS),)
        _launch(triton_attention_delta, grid, *args, **shape, ROWS=DELTA_ROWS, num_warps=DELTA_WARPS, **EXACT)
        dq, dk, dv = (_contiguous_like(x) for x in (q, k, v))
        dq_config = _attention_config(q, PREFILL_ROWS, 8, 3)
        # an odd group's lse are copied one by one, which takes registers: half the rows, or they spill
        rows, stages = (BACKWARD_ROWS // 2, 4) if groups % 2 else (BACKWARD_ROWS, 3)
        dkv_config = _attention_config(q, rows, 8, stages, BACKWARD_KEYS)
        rows = dq_config["ROWS"]
        keys = dkv_config["KEYS"]
        sequences = min(N, plan.B)
        rest = grad, lse, delta
        tail = scale * LOG2_E, scale, N, plan.B, *strides
        key_tiles = _by_copy_engine(k, v, dq_config["KEYS"]) if tma else (k, v)
        args = q, *key_tiles, *rest, dq, plan.q_ends, plan.ends(groups, rows), *tail
        grid = N * groups // rows + sequences, heads
        _launch(triton_attention_dq, grid, *args, **shape, TMA=tma, **dq_config)
        args = q, k, v, *rest, dk, dv, plan.q_ends, plan.ends(1, keys), *tail
        grid = N // keys + sequences, heads
        _launch(triton_attention_dkv, grid, *args, **shape, **dkv_config)
        return dq, dk, dv, None, None


def attention(q, k, v, plan, scale):
    """
    Causal attention of packed queries q (N, H, D) over keys and values k, v (S, HK, D) -> (N, H, D).

    `plan` says which rows of k and v belong to which query; H must be a multiple of HK. Differentiable for a
    `packed_plan` only. On a GPU D is 64 or 128, H / HK at most 8, scale above 0.
    """
    check_operands(q, k, v)
    check(plan.q_lens.is_cuda == q.is_cuda, "the plan is not on q's device={}: pass device to packed_plan", q.device)
    check(q.dim() == k.dim() == 3, "q {} and k {}: (tokens, heads, D) are needed", q, k)
    _, H, D = q.shape
    HK = k.shape[1]
    fits = k.shape[2] == D and v.shape == k.shape and H % HK == 0
    check(fits, "q, k, v {}, {}, {}: one D, and query heads a multiple of the key heads are needed", q, k, v)
    if plan.row is not None and use_triton(q):  # its kernels know whole sequences alone
        out = attention(*map(plan.spread, (q, k, v)), packed_plan(plan.kv_lens), scale)
        return F.embedding(plan.first, out.flatten(1)).view(q.shape)
    if not use_triton(q):
        keys = len(k) if plan.page_table is None else len(q)
        message = "the plan is of {} tokens, there are {} queries and {} keys"
        check(plan.queries == len(q) == keys, message, plan.queries, len(q), len(k))
        k, v = map(plan.spread, (k, v))
        return _apply(CpuAttention, q, k, v, plan, scale)
    check(D in (64, 128), "head dims {}: 64 or 128 are needed", D)
    check(H <= 8 * HK, "{} query heads over {} key heads: the group must be 1 to 8 heads", H, HK)
    check(scale > 0, "scale={}: the largest score is taken before the scale, which must be above 0", scale)
    return TritonAttention.apply(q, k, v, plan, scale)


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
    weights = sum([(panels_of(m.weight.mT), _for_loop(m.bias)) for m in linear], tuple(map(_for_loop, norms)))
    return [*map(_flat, caches)], weights, *map(_for_loop, sizes)


def layers_on_cpu(x, rope, where, plan, layers):
    """
    (x, residual), (N, C) each, whose sum is what these layers make of embeddings x, which are overwritten. Threads part
    at the first layer and meet after the last: a sequence needs no other's rows, and to wake a thread takes as long as
    a small layer.

    rope: cos and sin (N, D/2). where (N,): the rows of the caches that get the tokens' keys and values.
    """
    residual = torch.full_like(x, -0.0)  # x + -0.0 is x, also where x is -0.0
    work = 2 * len(x) * sum(w.size for _, weights, *_ in layers for w in weights)
    _share(cpu_layers, plan.B, work, x, residual, *rope, where, plan.cpu_indices, layers)
    return x, residual


# ------------------------------------------------------------------------------------------------------------------
# the head: log p_v = (z_v - m) - log sum_u exp(z_u - m), z = hidden weight^T / t, m = max z, t the temperature, and the
# entropy = -sum_v p_v log p_v, row by row what a sampler computes from the engine's logits, without keeping (N, V)
# numbers. d log p_y / dz = onehot(y) - p, d entropy / dz = -p (log p + entropy): backward makes the logits again.
#
# `softmax_stats` makes that sum, on a CPU as `sum_of` does, on Triton lane by lane and then over the lanes: orders that
# follow from V. log_softmax and token_logprobs both start from it.


def head_logits(hidden, weight):
    """hidden (M, C) @ weight (V, C)^T -> (M, V) float32, accumulated and returned in float32. Not differentiable."""
    return matmul(hidden, weight.t(), out_dtype=torch.float32)


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


@triton.jit
def triton_softmax_stats(z, t, stats, V: constexpr, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    t = tl.load(t)
    m = tl.full([BLOCK], -1e30, tl.float32)
    den = tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):
        x = tl.load(z + row * V + first + i, mask=first + i < V, other=float("-inf"))
        x = tl.div_rn(x.to(tl.float32), t)
        top = tl.maximum(m, x)
        den = den * tl.exp(m - top) + tl.exp(x - top)
        m = top
    top = tl.max(m, 0)
    tl.store(stats + row * 2, top)
    den = tl.sum(den * tl.exp(m - top), 0)
    tl.store(stats + row * 2 + 1, tl.log(den))


@triton.jit
def _log_prob(z, t, stats):
    return (tl.div_rn(z.to(tl.float32), t) - tl.load(stats)) - tl.load(stats + 1)


@triton.jit
def triton_log_softmax(z, t, stats, out, V: constexpr, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(z + row * V + c, mask=c < V, other=0.0)
    x = _log_prob(logits, tl.load(t), stats + row * 2)
    tl.store(out + row * V + c, x.to(out.dtype.element_ty), mask=c < V)


@triton.jit
def triton_token_logprobs(z, t, stats, targets, logprobs, entropy, V: constexpr, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    t = tl.load(t)
    z += row * V
    stats += row * 2
    acc = tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):
        x = _log_prob(tl.load(z + first + i, mask=first + i < V, other=0.0), t, stats)
        acc += tl.where((first + i < V) & (x > float("-inf")), tl.exp(x) * x, 0.0)
    tl.store(entropy + row, -tl.sum(acc, 0))
    tl.store(logprobs + row, _log_prob(tl.load(z + tl.load(targets + row)), t, stats))


@triton.jit
def triton_token_grads(
    z, t, stats, targets, entropy, grad, entropy_grad, dz, V: constexpr, BLOCK: constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t = tl.load(t)
    logits = tl.load(z + row * V + c, mask=c < V, other=0.0)
    x = _log_prob(logits, t, stats + row * 2)
    p = tl.exp(x)
    g = tl.div_rn(tl.load(grad + row), t)
    d = tl.where(c == tl.load(targets + row), 1 - p, -p) * g
    if entropy_grad is not None:
        e = tl.div_rn(tl.load(entropy_grad + row), t)
        d -= tl.where(p > 0, p * (x + tl.load(entropy + row)), 0.0) * e
    tl.store(dz + row * V + c, d.to(dz.dtype.element_ty), mask=c < V)


def _on_logits(loop, kernel, work, z, *args):
    """A row of z (M, V) is one program's work."""
    M, V = z.shape
    on_rows(loop, kernel, M, work * M * V, (z, *args, V), (M,), _lanes(V))


def softmax_stats(z, t):
    """Of each row of logits z (M, V) the largest z / t and the log of the sum of exp(z / t - largest): (M, 2)."""
    stats = z.new_empty(len(z), 2, dtype=torch.float32)
    _on_logits(cpu_softmax_stats, triton_softmax_stats, 10, z, t, stats)
    return stats


def _kept_logits(first, h, weight, targets, t, rule):
    """The logits (m, V) of the rows h (m, C), `first` of all and the next, -inf where the rule leaves a token out."""
    z = head_logits(h, weight)
    if rule is None:
        return z
    cuts, kept, found = rule
    rows, columns = kept[:, (kept[0] >= first) & (kept[0] < first + len(h))]
    known = rows - first
    rows = torch.cat([known, torch.arange(len(h), device=h.device)])
    columns = torch.cat([columns, targets])  # a token that was drawn is kept in any case
    values = z[rows, columns]
    if len(known.unique()) < len(h):  # else there is nothing left to find
        cut(z, cuts.expand(len(h), 3), t)
    z[known] = -math.inf
    z[rows, columns] = values
    if found is not None:
        found.append((z > -math.inf).nonzero().t() + torch.tensor([[first], [0]], device=h.device))
    return z


class TokenLogprobs(torch.autograd.Function):
    """(log-probs, entropies) (N,) of targets (N,); t (1,); rule: ((1, 3) as for `cut`, kept, found), or None."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, t, rule):
        N = len(hidden)
        stats = hidden.new_empty(N, 2, dtype=torch.float32)
        logprobs = stats.new_empty(N)
        entropy = stats.new_empty(N)
        rows = hidden, stats, targets, logprobs, entropy
        for i, (h, of_chunk, *rest) in enumerate(zip(*(x.split(CHUNK) for x in rows))):
            z = _kept_logits(i * CHUNK, h, weight, rest[0], t, rule)
            _on_logits(cpu_softmax_stats, triton_softmax_stats, 10, z, t, of_chunk)
            _on_logits(cpu_token_logprobs, triton_token_logprobs, 10, z, t, of_chunk, *rest)
        ctx.save_for_backward(hidden, weight, targets, t, entropy, stats)
        ctx.rule = rule
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, entropy_grad):
        hidden, weight, targets, t, entropy, stats = ctx.saved_tensors
        d_hidden = []
        # float32: a sum over chunks in bfloat16 would lose the small ones
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        rows = [hidden, stats, targets, entropy, grad.contiguous()]
        if entropy_grad is not None:
            rows.append(entropy_grad.contiguous())
        for i, (h, *args) in enumerate(zip(*(x.split(CHUNK) for x in rows))):
            if entropy_grad is None:
                args.append(None)
            z = _kept_logits(i * CHUNK, h, weight, args[1], t, ctx.rule)
            dz = z if h.dtype == z.dtype else torch.empty_like(z, dtype=h.dtype)
            on_elements(cpu_token_grads, triton_token_grads, z.shape, 20, z, t, *args, dz)
            d_hidden.append(matmul(dz, weight))
            if d_weight is not None:
                matmul(dz.t(), h, out=d_weight)
        return torch.cat(d_hidden), None if d_weight is None else d_weight.to(weight.dtype), None, None, None


def token_logprobs(hidden, weight, targets, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, kept=None, found=None):
    """
    Log-probs of `targets` (N,) under softmax(hidden @ weight^T / temperature) over the tokens that the sampling rule
    keeps (see Sampling), and that softmax's entropies, both (N,) float32.

    hidden (N, C), weight (V, C). Gradients flow to hidden and weight, while what is kept is constant; the log-probs
    must be in the loss, the entropies need not be. kept (2, K) int64: pairs of a row and a token, all that these rows
    keep, in place of what the rule says. found: a list that gets such pairs of all rows, in parts.
    """
    fits = hidden.shape[1:] == weight.shape[1:] and targets.shape == hidden.shape[:1]
    check(fits, "hidden, weight, targets {}, {}, {}: (N, C), (V, C), (N,) are needed", hidden, weight, targets)
    check_operands(hidden, weight)
    if not use_triton(hidden) and len(targets):  # a loop would read what lies beside the row
        least = int(targets.min())
        most = int(targets.max())
        check(0 <= least and most < len(weight), "targets {} to {}: below {} are needed", least, most, len(weight))
    # divided by a tensor: by a Python number, CUDA would multiply by a rounded reciprocal
    t = torch.tensor([temperature], dtype=torch.float32, device=hidden.device)
    targets = _aligned(targets.long())
    rule = None
    if Sampling(temperature, top_p, top_k, min_p).cuts():
        kept = targets.new_empty(2, 0) if kept is None else kept
        rule = t.new_tensor([[top_p, top_k, min_p]]), kept, found
    return TokenLogprobs.apply(hidden, weight, targets, t, rule)


def log_softmax(x, dim, half_to_float):
    """aten::_log_softmax along the last dim. On a CPU other types than float32 are left to torch."""
    if not use_triton(x) and x.dtype != torch.float32:
        return torch._log_softmax(x, dim, half_to_float, out=torch.empty_like(x))
    last = x.dim() > 0 and dim % x.dim() == x.dim() - 1
    check(last, "log_softmax: dim={} of {}; only the last one is written", dim, x.dim())
    check_operands(x)
    out = x.new_empty(x.shape, dtype=torch.float32 if half_to_float else None)
    z = _aligned(x.reshape(-1, max(1, x.shape[-1])))
    t = z.new_ones(1, dtype=torch.float32)
    on_elements(cpu_log_softmax, triton_log_softmax, z.shape, 10, z, t, softmax_stats(z, t), out)
    return out


def softmax(x, dim, half_to_float):
    """aten::_softmax along the last dim: no log-prob needs it, but SGLang's sampler draws from it."""
    return torch.exp(log_softmax(x, dim, half_to_float))


# ------------------------------------------------------------------------------------------------------------------
# sampling rules. The tokens of a row are ranked by x = z / t, the larger first, equal ones by column. A token is kept
# if fewer than top_k are before it, if their mass is below top_p of the row's, and if x >= the largest + log min_p. So
# the kept ones are the first of the ranking, and at least one. Every algorithm finds the same, as no sum has an order:
# a mass, exp(x - largest), is counted in whole units of 2^-30. Log-probs are then those of what is left: the others get
# the logit -inf.
#
# The search is a bisection over the floats, as whole numbers, for the lowest rank that is kept. Of the tokens that
# share it the first columns are.


class Sampling(NamedTuple):
    """How tokens are drawn, and so what a log-prob is of: the softmax of logits / temperature over the kept tokens."""

    temperature: float = 1.0
    top_p: float = 1.0  # 1: all
    top_k: int = 0  # 0: all
    min_p: float = 0.0  # as a part of the likeliest token's probability; 0: all

    def cuts(self):
        """Whether it leaves out any token."""
        return self[1:] != Sampling()[1:]


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


@triton.jit
def _rank_int64(x):
    """`_rank`."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _ranked(z, t, m, c, V: constexpr):
    """(rank, mass) of the tokens c of a row."""
    x = tl.div_rn(tl.load(z + c, mask=c < V, other=float("-inf")).to(tl.float32), t)
    return _rank_int64(x), (tl.exp(x - m) * 2.0**30).to(tl.int64)


@triton.jit
def _all_above(z, t, m, rank, V: constexpr, BLOCK: constexpr):
    """`_above`."""
    n = tl.zeros([BLOCK], tl.int64)
    mass = tl.zeros([BLOCK], tl.int64)
    for first in range(0, V, BLOCK):
        ranks, masses = _ranked(z, t, m, first + tl.arange(0, BLOCK), V)
        n += (ranks > rank).to(tl.int64)
        mass += tl.where(ranks > rank, masses, 0)
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
    enough = tl.maximum((whole.to(tl.float64) * top_p).to(tl.int64), 1)
    enough = tl.where(top_p < 1, enough, whole + 1)
    most = tl.where(top_k > 0, top_k, V)
    high = _rank_int64(m)
    low = _rank_int64(m + tl.log(tl.load(rules + 2))) - 1
    while high - low > 1:
        middle = (low + high) >> 1
        n, mass = _all_above(z, t, m, middle, V, BLOCK)
        fits = (n < most) & (mass < enough)
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle)
    n, mass = _all_above(z, t, m, high, V, BLOCK)
    for first in range(0, V, BLOCK):
        c = first + tl.arange(0, BLOCK)
        ranks, masses = _ranked(z, t, m, c, V)
        last = ((ranks == high) & (c < V)).to(tl.int64)
        before = tl.cumsum(last, 0) - last
        fits = (n + before < most) & (mass + before * masses < enough)
        tl.store(z + c, float("-inf"), mask=(c < V) & (ranks <= high) & ((ranks < high) | ~fits))
        n += tl.sum(last, 0)
        mass += tl.sum(last * masses, 0)


def cut(z, rules, t=None):
    """
    Writes -inf over those of the logits z (M, V), at temperatures t (1,) or 1, that a rule leaves out. rules (M, 3)
    float32: top_p, top_k and min_p of each row, as in Sampling.
    """
    fits = z.is_contiguous() and rules.shape == (len(z), 3)
    check(fits, "logits {}, rules {}: (M, V), contiguous, and (M, 3) are needed", z, rules)
    t = z.new_ones(1, dtype=torch.float32) if t is None else t
    _on_logits(cpu_cut, triton_cut, 100, z, t, softmax_stats(z, t), rules.contiguous())


# ------------------------------------------------------------------------------------------------------------------
# the embedding's gradient: dw[v] = sum of the gradients of v's tokens, in their order
#
# The loop goes from token to token. On Triton a stable sort brings equal ids together, and one program adds a run of
# them; no atomics.


@loop
def cpu_embedding_backward(grad, ids, out, C, pad):
    for i in range(len(ids)):
        for c in range(C if ids[i] != pad else 0):
            out[ids[i] * C + c] += grad[i * C + c]


@triton.jit(do_not_specialize=["N"])
def triton_embedding_backward(grad, ids, order, out, pad, N, C, BLOCK: constexpr):
    """One program per run of equal ids: the others see that they are not the first of one."""
    i = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(ids + i)
    if (v != tl.load(ids + i - 1, mask=i > 0, other=-1)) & (v != pad):
        acc = tl.zeros([BLOCK], tl.float32)
        same = 1
        while same == 1:
            acc += tl.load(grad + tl.load(order + i) * C + c, mask=c < C, other=0.0).to(tl.float32)
            i += 1
            same = (tl.load(ids + i, mask=i < N, other=-1) == v).to(tl.int32)
        tl.store(out + v * C + c, acc.to(out.dtype.element_ty), mask=c < C)


def embedding_backward(grad, ids, rows, padding_idx, scale_grad_by_freq):
    """aten::embedding_dense_backward: grad (..., C) of ids (...) -> (rows, C)."""
    check(not scale_grad_by_freq, "scale_grad_by_freq=True: the embedding's gradient is written without it")
    check(grad.shape[:-1] == ids.shape, "grad {} of ids {}: one row for each is needed", grad, ids)
    C = grad.shape[-1]
    out = grad.new_zeros(rows, C)
    grad = grad.reshape(-1, C).contiguous()
    ids = ids.flatten().long()
    if not use_triton(grad):
        cpu_embedding_backward(*map(_flat, (grad, ids, out)), C, padding_idx)
        return out
    check_operands(grad)
    ids, order = torch.sort(ids, stable=True)
    N = len(ids)
    on_elements(None, triton_embedding_backward, (N, C), 0, grad, ids, order, out, padding_idx, N)
    return out


# ------------------------------------------------------------------------------------------------------------------
# the sampler's noise: no sum at all, but a hash of the sample's seed, the position and the token, so that no neighbour
# and no other step can be seen in it. A draw is a largest number and a smallest column, neither of which has an order.


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


@triton.jit
def _mix_uint32(h, k):
    k = k.to(tl.uint32) * 0xCC9E2D51
    h ^= ((k << 15) | (k >> 17)) * 0x1B873593
    return ((h << 13) | (h >> 19)) * 5 + 0xE6546B64


@triton.jit
def _murmur_hash_uint32(seed, position, column):
    """`murmur_hash32` in uint32, whose products wrap by themselves."""
    h = _mix_uint32(_mix_uint32(0, seed), seed >> 32)
    h = _mix_uint32(_mix_uint32(h, position), column) ^ 16
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def triton_draw(logprobs, seeds, positions, scores, columns, V: constexpr, BLOCK: constexpr):
    """Of one block of a row, the largest score and the first column that has it, into (B, blocks) each."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    h = tl.minimum(_murmur_hash_uint32(tl.load(seeds + row), tl.load(positions + row), c), 0xFFFFFFFE)
    u = h.to(tl.float64) * (1 / 4294967295)  # as torch on CUDA divides; of one hash in 750 it is an ulp below
    score = tl.load(logprobs + row * V + c, mask=c < V, other=float("-inf")).to(tl.float64)
    score -= tl.log(tl.minimum(-tl.log(u), 1.7976931348623157e308))
    score = tl.where(score == score, score, float("inf"))  # the first NaN is taken, as torch.argmax does
    top = tl.max(score, 0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(scores + at, top)
    tl.store(columns + at, tl.min(tl.where(score == top, c, V), 0))


def draw(logprobs, seeds, positions):
    """
    A token (B, 1) int64 from each row of logprobs (B, V): the first column with the largest log-prob + noise. seeds
    (B,) int64 and positions (B,) are hashed. It takes the place of SGLang's multinomial_with_seed, and draws the same
    tokens but for one hash in 2^32.

    The noise is -log(-log(u)), u = hash / (2^32 - 1) in float64. Of the hash 2^32 - 1 that is +inf, and once in 2^32
    draws a token was taken whatever its probability: of 151,936 tokens to draw from, one in 28,000 (sglang issue 25106,
    mended after 0.5.17). Of 2^32 - 2, u is 1 - 2^-32 and the noise 22.2, so the two largest hashes now stand for the
    same tail. Every other hash keeps its noise, bit for bit.

    The other end is finite as it is: -log(0) is clamped to 1.8e308, and the noise of hash 0 is -709.8, where an exact
    draw from that end would be near -3. So a token with hash 0 is not taken unless all others are as good as
    impossible, which takes at most 2^-32 off its probability: less than a float32 log-prob tells apart.
    """
    check_operands(logprobs)
    fits = logprobs.dim() == 2 and seeds.shape == positions.shape == logprobs.shape[:1]
    check(fits, "logprobs, seeds, positions {}, {}, {}: (B, V), (B,), (B,) are needed", logprobs, seeds, positions)
    B, V = logprobs.shape
    args = logprobs.contiguous(), seeds.long().contiguous(), positions.long().contiguous()
    if not use_triton(logprobs):
        tokens = torch.zeros(B, 1, dtype=torch.int64)
        _share(cpu_draw, B, 60 * B * V, *args, tokens, V)
        return tokens
    grid = B, -(-V // ELEMENTS)
    scores = logprobs.new_empty(grid, dtype=torch.float64)
    columns = logprobs.new_empty(grid, dtype=torch.int64)
    # not EXACT: torch.compile, and so SGLang, fuses a step of libdevice's float64 logarithm
    _launch(triton_draw, grid, *args, scores, columns, V=V, BLOCK=ELEMENTS, num_warps=ELEMENT_WARPS)
    return columns.gather(1, scores.argmax(1, keepdim=True))


# ------------------------------------------------------------------------------------------------------------------
# bit_sum: sum over elements of bits * odd(row) * odd(column) mod 2^64, for hashes. Whole numbers' sums have no order.

BIT_SUM_TILE = 4096  # elements of a program's step


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


@triton.jit
def triton_bit_sum(x, odd_rows, odd_columns, sums, R, C, ROWS: constexpr, COLUMNS: constexpr):
    """Adds up ROWS rows, then to sums ()."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    x += r[:, None] * C
    acc = tl.zeros([ROWS, COLUMNS], tl.int64)
    for first in range(0, C, COLUMNS):
        c = first + tl.arange(0, COLUMNS)
        inside = (r < R)[:, None] & (c < C)[None, :]
        odd = tl.load(odd_columns + c, mask=c < C, other=0)
        acc += tl.load(x + c[None, :], mask=inside, other=0).to(tl.int64) * odd[None, :]
    of_rows = tl.sum(acc, 1) * tl.load(odd_rows + r, mask=r < R, other=0)
    tl.atomic_add(sums, tl.sum(of_rows, 0))


def bit_sum(x, odd_rows, odd_columns):
    """x (R, C) of whole numbers, the factors (R,) and (C,) int64 -> () int64."""
    R = len(odd_rows)
    C = len(odd_columns)
    check(x.shape == (R, C), "bit_sum: x {} beside {} and {} factors", x, R, C)
    args = x.contiguous(), odd_rows, odd_columns
    if not use_triton(x):
        return torch.tensor(cpu_bit_sum(*map(_flat, args)))
    sums = odd_rows.new_zeros(())
    columns = min(BIT_SUM_TILE // 4, _block(C))
    rows = BIT_SUM_TILE // columns
    _launch(triton_bit_sum, (-(-R // rows),), *args, sums, R, C, ROWS=rows, COLUMNS=columns, num_warps=4)
    return sums


# ------------------------------------------------------------------------------------------------------------------
# AdamW: m = m + (1 - b1) (g - m), v = b2 v + (1 - b2) g^2, w = w (1 - lr decay) - lr / c1 m / (sqrt(v / c2) + eps),
# c = 1 - b^step (Loshchilov and Hutter 2019, algorithm 2). Element by element, so there is no order; but torch's own
# rounds in other places where its vectors are of another width.


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


@functools.lru_cache(2)  # all parameters are at the same step
def _bias_correction(beta, step):
    """1 - beta^step. Decimal: for powers of floats Python asks the C library, which computes them in its own way."""
    return float(1 - Decimal(beta) ** step)


class AdamW(torch.optim.AdamW):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for w in group["params"]:
                if use_triton(w):
                    return super().step()
                state = self.state[w]
                b1, b2 = group["betas"]
                lr = group["lr"]
                state["step"] += 1
                c1, c2 = (_bias_correction(b, int(state["step"])) for b in (b1, b2))
                keep = 1 - lr * group["weight_decay"]
                numbers = 1 - b1, b2, 1 - b2, keep, lr / c1, math.sqrt(c2), group["eps"]
                _share(cpu_adamw, w.numel(), 20 * w.numel(), w, w.grad, state["exp_avg"], state["exp_avg_sq"], *numbers)


# ------------------------------------------------------------------------------------------------------------------
# what formulas in plain torch need: sum and mean, which torch cuts into parts for a GPU's SMs or a CPU's vectors; on a
# CPU also exp, log and std, which follow the width of its vectors. Sums are `row_sums` in float64, rounded once.


@loop
def cpu_exp(x, y):
    for i in range(len(x)):
        y[i] = exp(x[i])


@loop
def cpu_log(x, y):
    for i in range(len(x)):
        y[i] = log(np.float64(x[i]))


def _element_wise(loop, its_own):
    """An aten operator on float32; other types are left to torch."""

    def operator(x):
        if x.dtype != torch.float32:
            return its_own(x, out=torch.empty_like(x, dtype=x.dtype if x.is_floating_point() else torch.float32))
        x = x.contiguous()
        y = torch.empty_like(x)
        loop(_flat(x), _flat(y))
        return y

    return operator


def _reduction(of_rows, its_own):
    """An aten operator that takes x, the dims to reduce and keepdim. Other types than floats are left to torch."""

    def operator(x, dim=None, keepdim=False, dtype=None, **options):
        if not x.is_floating_point():
            out = x.new_empty(0, dtype=dtype or torch.int64)
            return its_own(x, dim or list(range(x.dim())), keepdim, dtype=dtype, out=out)
        dims = [d % x.dim() for d in dim or range(x.dim())]
        others = [d for d in range(x.dim()) if d not in dims]
        R = math.prod(x.shape[d] for d in others)
        C = math.prod(x.shape[d] for d in dims)
        rows = x.permute([*others, *dims]).reshape(R, C)
        y = of_rows(rows.double(), **options).to(dtype or x.dtype)
        return y.view([1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims])

    return operator


def _mean(rows):
    return row_sums(rows) / rows.shape[1]


def _std(rows, correction=None):
    off = rows - _mean(rows)[:, None]
    return (row_sums(off * off) / (rows.shape[1] - (1 if correction is None else correction))).sqrt()


def power(base, exponents):
    """aten::pow of a number and a float tensor, in decimal arithmetic: RoPE's frequencies need it, once."""
    if not exponents.is_floating_point() or not base > 0:
        dtype = torch.result_type(base, exponents)
        return torch.pow(base, exponents, out=torch.empty_like(exponents, dtype=dtype))
    powers = [float(Decimal(base) ** Decimal(x)) for x in exponents.flatten().tolist()]
    return torch.tensor(powers, dtype=exponents.dtype).view(exponents.shape)


# ------------------------------------------------------------------------------------------------------------------
# the switch, thrown in the trainer and in the engine's scheduler process alike

_library = None
M_TRIM_THRESHOLD = -1  # of glibc's malloc.h
M_MMAP_THRESHOLD = -3


def enable_batch_invariant(cpu_threads=1, cores=""):
    """
    Replaces torch's kernels of the operators named below by ours, in this process, for CPU and CUDA tensors.
    cpu_threads: of a loop. torch itself keeps one: several would wait for each other, and for our loops, by spinning.
    cores: the path of cores.share_cores; then a loop has an equal share of the cores with the other ranks that work.
    """
    global _library, threads, working
    threads = cpu_threads
    if cores:
        with open(cores, "r+b") as file:
            working = mmap.mmap(file.fileno(), 0)
    torch.set_num_threads(1)
    keep_memory = ctypes.CDLL(None).mallopt  # a step's memory stays with the process
    keep_memory(M_TRIM_THRESHOLD, 2**30)
    keep_memory(M_MMAP_THRESHOLD, 2**30)
    if _library is not None:
        return
    add = _reduction(row_sums, torch.sum)
    average = _reduction(_mean, torch.mean)
    both = {
        "mm": mm,
        "addmm": addmm,
        "_log_softmax": log_softmax,
        "_softmax": softmax,
        "sum": add,
        "sum.dim_IntList": add,
        "mean": average,
        "mean.dim": average,
        "embedding_dense_backward": embedding_backward,
    }
    on_cpu = {
        "exp": _element_wise(cpu_exp, torch.exp),
        "log": _element_wise(cpu_log, torch.log),
        "std.correction": _reduction(_std, torch.std),
        "pow.Scalar": power,
    }
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that aten's kernels are replaced, which is what we want
        for device, operators in dict(CPU=both if INTERPRET else both | on_cpu, CUDA=both).items():
            for name, operator in operators.items():
                _library.impl(name, operator, device, allow_override=True)


def give_memory_back():
    """Gives the system what this process has of memory and does not use."""
    torch.cuda.empty_cache()
    ctypes.CDLL(None).malloc_trim(0)


def disable_batch_invariant():
    """Gives torch its kernels back: for tests, which show the difference."""
    global _library
    if _library is not None:
        _library._destroy()
    _library = None


# ------------------------------------------------------------------------------------------------------------------
# the two paths: which of an operator's twins computes, and how it is started

ELEMENTS = 1024  # numbers of a row that one program of an elementwise kernel takes ..
ELEMENT_WARPS = 4  # .. and its warps
WORTH_THREADS = 2e7  # operations that are worth waking another thread
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # tests: CPU tensors take the Triton path too


class Card(NamedTuple):
    """What the tiles of a compute capability follow."""

    shared: int  # KB of shared memory that a program may have
    sms: int  # of the usual card; speed only
    tma: bool  # products by groups of warps, from shared memory that the copy engine fills; else by each warp


CARDS = {
    (8, 0): Card(163, 108, False),
    (8, 6): Card(99, 84, False),
    (8, 9): Card(99, 128, False),
    (9, 0): Card(227, 132, True),
    (10, 0): Card(227, 148, True),
    (12, 0): Card(99, 170, False),
}
CAPABILITIES = ", ".join(f"{major}.{minor}" for major, minor in CARDS)


@functools.cache  # torch takes microseconds to answer, and every launch asks
def _card_of(device):
    return CARDS.get(torch.cuda.get_device_capability(device))


def card(x):
    """The Card that x lies on, None if CARDS has none; of a tensor that is on no GPU, as in tests, a Hopper."""
    return _card_of(x.device) if x.is_cuda else CARDS[9, 0]


def device_kind(device):
    """'cpu', or a GPU with its compute capability, 'cuda 9.0': what has bits of its own."""
    return device if device == "cpu" else "cuda {}.{}".format(*torch.cuda.get_device_capability())


def use_triton(x):
    """Whether x takes the Triton path: the loops are for CPUs, and for no other device."""
    return not x.is_cpu or INTERPRET


def check(fits, message, *args):
    """Raises ValueError unless `fits`; the message says the shape of an arg that is a tensor."""
    if not fits:
        said = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in args]
        raise ValueError(message.format(*said))


def check_operands(x, *others):
    """Raises ValueError unless x's path can compute with x, and `others` have its device and dtype."""
    by_triton = use_triton(x)
    if by_triton and not INTERPRET and (x.device.type != "cuda" or card(x) is None):
        raise ValueError(f"device={x.device}: the Triton operators are for compute capabilities {CAPABILITIES}")
    for y in others:
        if y.dtype != x.dtype or y.device != x.device:
            raise ValueError(f"{y.dtype} on {y.device} beside {x.dtype} on {x.device}: operands must agree")
    if not by_triton and x.dtype != torch.float32:  # the loops would read other bits as float32
        raise ValueError(f"dtype={x.dtype}: the CPU operators know float32")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dtype={x.dtype}: the Triton operators know bfloat16 and float32")


def on_rows(loop, kernel, units, work, args, grid, config):
    """
    The twin for the device, with the same args. On a CPU the loop over `units`, which has `work` operations; on Triton
    the kernel on a grid of programs, with config, which follows from the shape alone.
    """
    if use_triton(args[0]):
        _launch(kernel, grid, *args, **config)
    else:
        _share(loop, units, work, *args)


def on_elements(loop, kernel, shape, work, *args):
    """The twin for what is computed number by number in `shape`, `work` operations each; its last argument is C."""
    R, C = shape
    config = dict(BLOCK=ELEMENTS, num_warps=ELEMENT_WARPS, **EXACT)
    on_rows(loop, kernel, R, work * R * C, (*args, C), (R, -(-C // ELEMENTS)), config)


def _launch(kernel, grid, *args, **config):
    if 0 not in grid:
        with torch.cuda.device_of(next(x for x in args if isinstance(x, torch.Tensor))):
            kernel[grid](*args, **config)


def _aligned(x):
    """x, contiguous and at a multiple of 16 bytes: Triton's layout, and with it `tl.sum`, may depend on these."""
    if x is None:
        return None
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


class _NoGradient:
    def save_for_backward(self, *_):
        pass

    mark_non_differentiable = save_for_backward


def _apply(function, *args):
    """function.apply(*args) if a gradient may be asked for, else forward alone: `apply` is slower than some loops."""
    return function.apply(*args) if torch.is_grad_enabled() else function.forward(_NoGradient(), *args)


def _contiguous_like(x):
    """A new tensor for a result of x's shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _block(width):
    return max(MIN_BLOCK, triton.next_power_of_2(width))


class _Memory:
    """What NumPy takes for an array. Not Tensor.numpy(), after which FSDP2 cannot resize the tensor's storage."""

    def __init__(self, x, size, dtype):
        self.owner = x
        where = x.data_ptr(), False
        self.__array_interface__ = {"data": where, "shape": (size,), "typestr": dtype, "version": 3}


def _flat(x):
    """
    The memory of a CPU tensor from its first element to its last, as a NumPy array that loops index by x's strides.
    Loops check nothing: their callers have compared the shapes.
    """
    dtype = LOOP_DTYPES.get(x.dtype)
    if dtype is None or not x.is_cpu:
        raise ValueError(f"{x.dtype} on {x.device}: the CPU operators know float32")
    size = x.numel()
    if size == 0:
        return NOTHING.view(dtype)
    if not x.is_contiguous():
        size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
    return np.asarray(_Memory(x, size, dtype))


def _for_loop(x):
    """An operator's argument as a loop takes it."""
    if isinstance(x, torch.Tensor):
        return _flat(x)
    if x is None:
        return NOTHING
    return np.float32(x) if isinstance(x, float) else x


threads = 1  # of a loop; torch itself gets one only (enable_batch_invariant)
working = None  # of each rank of this machine a byte, 1 while it works, in memory that they share
_pool = functools.cache(lambda process: ThreadPoolExecutor(os.cpu_count()))  # a fork has none of its parent's threads


def _share(loop, units, work, *args):
    """
    loop(first, last, *args) over all units, by several threads if `work` is worth it: a number of operations, in those
    of a matmul that take as long.
    """
    args = [*map(_for_loop, args)]
    most = threads if working is None else os.cpu_count() // max(1, sum(working[:]))
    shares = min(most, units)  # so that no share is empty: a loop may read its first unit
    if shares <= 1 or work < WORTH_THREADS:
        return loop(0, units, *args) if units else None
    ends = [units * i // shares for i in range(shares + 1)]
    pool = _pool(os.getpid())
    others = [pool.submit(loop, *part, *args) for part in zip(ends[1:], ends[2:])]
    loop(0, ends[1], *args)
    for other in others:
        other.result()


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
NOTHING = np.zeros(0, np.float32)
LEAST = np.finfo(np.float32).min
MASS = np.float32(2**30)
LOOP_DTYPES = {torch.float32: "<f4", torch.float64: "<f8", torch.int16: "<i2", torch.int32: "<i4", torch.int64: "<i8"}
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
        _say("compiling its loops for this CPU, once: up to half a minute")

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
