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

    the order in which one row's numbers are added depends on that row's own length and on constants, never on how
    many rows there are, who the neighbours are, or how the work was cut.

The operators; E is the engine, T the trainer:

    operator               equation                                what fixes the order             who calls it
    matmul, mm, addmm      a b; bias + a b                         a chain in the order of K        E T, each layer
    linear, SplitLinear    a b by equal parts of K                 a chain a part, then one tree    E; T with parts
    LoRALinear, merge      x (W + s B A)^T                         a chain over the adapters' rank  T
    row_sums               sum x in float64                        the row's length                 T; sum, mean, std
    rms_norm               w x / sqrt(mean x^2 + eps)              the row's length                 E T
    rope_table, norm_rope  a head normed, turned by its position   the head's length                E T
    norm_rope_to_cache     the same, k and v into a cache          the head's length                E
    swiglu                 silu(g) u                               no sum                           E T
    moe                    sum w_e mlp_e(x) of k experts           the slots of the token           E T of a mixture
    attention              softmax(scale q k^T) v                  the keys from position 0         E T
    token_logprobs         log softmax(h W^T / t)_y, and entropy   the vocabulary's size            T
    head_logits            h W^T                                   a chain in the order of C        E
    log_softmax, softmax   log softmax(z), softmax(z)              the vocabulary's size            E; users' losses
    cut                    z, -inf where a rule drops a token      no order: whole numbers          E T under a rule
    embedding_backward     sum of the gradients of an id's tokens  the order of the tokens          T
    draw                   argmax(log p + noise)                   no sum                           E
    bit_sums               hashes of whole numbers                 no order: whole numbers          E T
    AdamW                  a step of the weights                   no sum                           T

Each is a public function that checks its operands and picks by device: the kernel `triton_*`, for an NVIDIA GPU of one
of CARDS, in bfloat16, or on a CPU the loop of that name in onecurve/cpu/loops.py, in float32. A section has the
equation, why its order is fixed, the kernel, the autograd Function over kernel and loop, the public function. How one
of the two is chosen and started is at the end. A run with `--dtype=float32` takes what adds from onecurve/float32.py,
and then has the loops' bits on a card. `naive_*`, on this page, is a CPU's order of addition in plain words.

What the Triton kernels do about the order:

    matmul        every sum of bfloat16 products is one chain of tensor-core steps of k16, in the order of K, in one
                  accumulator: no split-K. Within a step the tensor core adds 16 products and the accumulator by the
                  exponents alone (MMA-Sim, a public model of it), so tile shapes, warps, stages, TMA or pointers and
                  swapping A and B do not enter, and may follow the number of rows.
    row sums      `tl.sum` would add in an order that depends on the layout, which Triton takes from block shape, warps
                  and the alignment of the pointers: it is given two numbers at a time (`_total`).
    attention     key tiles of one size and splits of 1024 keys at absolute positions, one inner loop, one merge; the
                  softmax denominator is a product with ones, on the tensor core.
    contraction   the compiler may fuse a * b + c in one kernel and not in its twin: switched off (EXACT); where a fused
                  step pays it is written as `tl.fma`.
    functions     `exp` and the like are the loops' polynomials; `/` and roots are rounded as IEEE 754 says. So all of
                  it is written down, the tensor core's step included, and a CPU can follow a card bit for bit.
    gradients     no atomics: sums over rows go in row order, cut at constants of this file.

`tests/test_kernels.py` checks the loops bit for bit, `tests/test_triton.py` what can be known of the kernels without a
GPU: that they are right, and that the code compiled for each card has no operation that a CPU could not repeat. And a
run checks the sum of them at every token it trains on.

Letters: N tokens of a packed batch, B sequences, T queries and L keys of a sequence, H query heads, HK key heads, G =
H / HK, D head dim, C width, F width of the MLP, V vocabulary; E experts, k of them for a token; M, N, K of a matmul
(M, K) @ (K, N).
"""

import functools
import math
import os
import warnings
from decimal import Decimal
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language import constexpr
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged
from triton.tools.tensor_descriptor import TensorDescriptor

from onecurve.cpu import host, loops

# Part of the order of addition: whoever tunes one of these changes the bits of engine and trainer alike, and with them
# every curve that was ever recorded. On both devices (a CPU has one more, SUM_TOKENS, in its loops):
VECTOR = constexpr(loops.VECTOR)  # sums side by side that a loop makes of a row; on Triton of a token's experts
CHUNK = 1024  # rows of logits held at a time: the head's weight gradient is added chunk by chunk

# On Triton:
SUM_ROWS = 64  # rows that a norm's weight gradient adds before `row_sums` takes over ..
NORM_BLOCK = 2048  # .. in so many sums side by side as rows of the norm are as long as this; and at least one
KEYS = 64  # keys per softmax tile, counted from position 0 of the sequence ..
KEYS_OF_WARPS = 32  # .. and on cards without TMA, where each warp multiplies for itself and has fewer registers free
SPLIT = 1024  # keys whose softmax is taken apart from the others', counted from position 0: decode's unit of work
LANES = 4096  # partial sums of a long row (log-probs, `row_sums`)
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
    VECTOR = loops.VECTOR
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
    exp = loops.exp
    out = np.zeros_like(q)
    for t, row in enumerate(q):
        seen = len(k) - len(q) + t + 1
        s = naive_matmul(row[None], k[:seen].T)[0]
        m = s.max() * scale
        p = np.array([exp(x * scale - m) for x in s])
        denominator = naive_dot(p, np.ones(seen))
        o = naive_matmul(p[None], v[:seen])[0]
        out[t] = o / denominator
    return out


# ------------------------------------------------------------------------------------------------------------------
# what Triton's kernels compute with, operation by operation, since the compiler's `/`, `tl.sqrt`, `tl.rsqrt`, `tl.exp`,
# `tl.exp2` and `tl.log` of float32 are approximate, each card's in its own way. IEEE 754 leaves no choice in +, -, *,
# `tl.div_rn`, `tl.sqrt_rn` and `tl.fma`, and none in a sum of two: so a CPU can follow every operation of a card but
# the tensor core's, whose rule is public. Polynomials and their numbers are those of the loops.
#
# A number beside float64 is made one first: Triton would round it to float32. Its unary minus is 0 - x, which makes
# +0.0 of +0.0: `x * -1.0`.

LEAST = constexpr(float(loops.LEAST))
EXP_FIRST, EXP_LAST = (constexpr(float(x)) for x in loops.EXP_ENDS)
LOG2_E = constexpr(float(loops.LOG2_E32))
WHOLE32 = constexpr(float(loops.WHOLE32))
WHOLE32_BITS = constexpr(int(loops.WHOLE32.view(np.int32)))  # x + WHOLE32 has x as a whole number in its last bits
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
# 2^r for r from -1/2 to 1/2, exactly 1 at 0, at most 3e-6 off: attention rounds p to bfloat16, by 2e-3
EXP2 = constexpr((9.582852945e-3, 5.590642616e-2, 2.402409911e-1, 6.931241751e-1, 1.0))


@triton.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@triton.jit
def _total(x, HALVES: constexpr = False):
    """
    The sum of each row of x (rows, n): neighbours, or the two halves, are added until one number is left, whatever the
    layout is.
    """
    for _ in tl.static_range(_log2(x.shape[1])):
        if HALVES:
            x = tl.sum(x.reshape(x.shape[0], 2, x.shape[1] // 2), 1)
        else:
            x = tl.sum(x.reshape(x.shape[0], x.shape[1] // 2, 2), 2)
    return x.reshape(x.shape[0])


@triton.jit
def _sum(x):
    """Of x (n,)."""
    return tl.max(_total(x[None, :]), 0)


@triton.jit
def _polynomial(x, C: constexpr, N: constexpr):
    y = tl.full(x.shape, C[0], x.dtype)
    for i in tl.static_range(1, N):
        y = tl.fma(y, x, tl.full(x.shape, C[i], x.dtype))
    return y


@triton.jit
def _exp(x):
    """Of float32."""
    x = tl.maximum(x, EXP_FIRST, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, EXP_LAST, propagate_nan=tl.PropagateNan.ALL)
    whole = tl.fma(x, LOG2_E, WHOLE32)
    n = whole - WHOLE32
    r = tl.fma(n, LN2_32_LOW, tl.fma(n, LN2_32_HIGH, x))
    y = tl.fma(_polynomial(r, EXP, 6), r * r, r) + 1.0
    n = whole.to(tl.int32, bitcast=True) - WHOLE32_BITS
    half = n >> 1
    y *= ((half + 127) << 23).to(tl.float32, bitcast=True)
    y *= ((n - half + 127) << 23).to(tl.float32, bitcast=True)
    return y


@triton.jit
def _exp2(x):
    """
    Of float32 up to 127, in as few steps as can be, since attention waits for it: the whole number is added to the
    exponent. Below 2^-126 it is too small, and 0 from 2^-127 down.
    """
    x = tl.maximum(x, -127.0, propagate_nan=tl.PropagateNan.ALL)
    whole = x + WHOLE32
    r = x - (whole - WHOLE32)
    exponent = whole.to(tl.int32, bitcast=True) << 23
    return (_polynomial(r, EXP2, 5).to(tl.int32, bitcast=True) + exponent).to(tl.float32, bitcast=True)


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


# ------------------------------------------------------------------------------------------------------------------
# matmul: c[m, n] = sum_k a[m, k] b[k, n]. `mm` and `addmm` replace the aten kernels, so that any model reaches them,
# forward and backward.
#
# One accumulator takes what belongs to its element in the order of K, whatever tile the element is in: on a CPU product
# by product, on Triton by steps of k16, whose last one is filled with zeros, which add nothing. Other rows and columns
# never enter it.

# Speed only, never seen in the bits. The tiles for few rows, and attention's, were tried on an H200 with Qwen3-8B's
# shapes; all others, and those for other cards, are guesses until measured.
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
    at = c + rows.to(tl.int64) * c_m + cols.to(tl.int64) * c_n
    inside = (rows < M) & (cols < N)
    return at, inside


@triton.jit
def _fill(x, inside):
    """
    What is outside of K becomes -0.0, by which a sum of -0.0 stays as it is in a CPU's loop, which has no such step. Of
    a literal -0.0, and of its unary minus, Triton makes 0.0.
    """
    if x.dtype == tl.float32:
        negative_zero = tl.full([], -2147483648, tl.int32).to(tl.float32, bitcast=True)
        x = tl.where(inside, x, negative_zero)
    return x


@triton.jit
def _multiply_tile(
    a, b, c, m, n, M, N, K, a_m, a_k, b_k, b_n, c_m, c_n, ADD: constexpr, BLOCK_K: constexpr,
):  # fmt: skip
    """The rows m below M and the columns n below N of c = a b. ADD: the chain continues from the values in c."""
    k = tl.arange(0, BLOCK_K)
    inside_m = (m < M)[:, None]
    inside_n = (n < N)[None, :]
    m = m.to(tl.int64)[:, None]
    n = n.to(tl.int64)[None, :]
    a += m * a_m + k[None, :].to(tl.int64) * a_k
    b += n * b_n + k[:, None].to(tl.int64) * b_k
    c += m * c_m + n * c_n
    inside = inside_m & inside_n
    if ADD:
        acc = tl.load(c, mask=inside, other=0.0)
    else:
        acc = tl.zeros(inside.shape, tl.float32)
    for left in range(K, 0, -BLOCK_K):
        inside_k = k < left
        x = tl.load(a, mask=inside_m & inside_k[None, :], other=0.0)
        y = tl.load(b, mask=inside_n & inside_k[:, None], other=0.0)
        x = _fill(x, inside_k[None, :])
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
        end = tl.load(starts + part + 1)
        K = (end - first).to(tl.int32)
        a += first * a_k
        b += first * b_k
        c += part * M * N
    tile = tl.program_id(0)
    row, col = _tile_at(tile, M, N, BLOCK_M, BLOCK_N, 8)
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
    Flattened, the loops over tiles and K are one: a tile is stored while the next one's loads are under way. It is
    stored in halves, since the stages leave no shared memory for a whole one. With ADD the accumulator is read from c,
    and each flattened load would have to be waited for.
    """
    HALF: constexpr = BLOCK_N // 2
    first = tl.program_id(0)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(first, tiles, PROGRAMS, flatten=not ADD):
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
        halves = tl.split(acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1))
        for i in tl.static_range(2):
            at, inside = _part(c, m, n + i * HALF, M, N, c_m, c_n, BLOCK_M, HALF)
            tl.store(at, halves[i].to(c.dtype.element_ty), mask=inside)


def _tiles(M, N, block_m, block_n):
    return -(-M // block_m) * -(-N // block_n)


def _tile_time(M, N, block_m, block_n, sms):
    """
    An estimate, in numbers loaded per k: the loads (beyond the matrix's end as well) and products of the SM with most
    of the tiles; or, if longer, the loads of all SMs, as a good half of them keep memory busy. Fitted to an H200's
    times.
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
    add = out is not None
    fits = a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0]
    if fits and add:
        fits = out.shape == (len(a), b.shape[1])
    check(fits, "shapes {} and {} do not multiply", a, b)
    check_operands(a, b)
    if add:
        fits = out.dtype == torch.float32 and out.device == a.device and out.is_contiguous()
        check(fits, "out {} on {}: contiguous float32 on a's device is needed", out.dtype, out.device)
    if not use_triton(a):
        return loops.cpu_matmul(a, b, out)
    M, K = a.shape
    N = b.shape[1]
    result = out if add else a.new_empty(M, N, dtype=out_dtype or a.dtype)
    if 0 in result.shape:
        return result
    c = result
    x = _for_tma(a)
    y = _for_tma(b.t())
    wide = bool(K and x and y)
    aligned = c.stride(0) % 16 == 0
    on = card(a)
    block_m, block_n, block_k, warps, stages = _matmul_config(M, N, a.dtype, wide, aligned, on)
    # Of a b whose columns lie K apart in shared memory, lanes would wait for each other: tensor cores read such a one
    apart = a.dtype == torch.float32 and a.stride(1) == b.stride(0) == 1
    if apart or block_m < 64:  # which wgmma needs, so the columns become the rows: c^T = b^T a^T
        a, b = b.t(), a.t()
        if apart:
            b = b.contiguous()
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
    if wide and on.tma and not FLOAT32:  # the copy engine fills with 0.0
        programs = min(tiles, on.sms * 8 // warps)  # all that are under way at once, which take tile after tile
        descriptors = []
        for (operand, contiguous_k), block in ((x, block_m), (y, block_n)):
            tile = [block, block_k] if contiguous_k else [block_k, block]
            descriptors.append(TensorDescriptor.from_tensor(operand, tile))
        args = c, *descriptors, M, N, K, *c.stride(), programs, x[1], y[1], add
        _launch(triton_matmul_tma, (programs,), *args, **config)
    else:
        strides = *a.stride(), *b.stride(), *c.stride()
        args = a, b, c, None, M, N, K, *strides, add
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
    if beta != 1:
        bias = bias * beta
    return (out + bias).to(a.dtype)


# ------------------------------------------------------------------------------------------------------------------
# split products: a b as the sum of products over equal parts of K, a chain of float32 each, added as a binary tree and
# rounded once. Where an engine runs on several GPUs (Shoeybi et al. 2019, arXiv:1909.08053), each has some of the parts
# of o_proj and down_proj, and the tree continues across the GPUs: so its sum does not depend on who has which part. The
# other cuts there, of heads, columns and the vocabulary, leave every sum whole on one GPU.


class SplitLinear(torch.autograd.Function):
    """`linear` of a whole weight, differentiable; its gradients are not split, as they sum over other dims than K."""

    @staticmethod
    def forward(ctx, x, weight, bias, split):
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias, split)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        dx = torch.mm(grad, weight)
        d_weight = torch.mm(grad.t(), x)
        d_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return dx, d_weight, d_bias, None


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
    if gather:
        y = tree_sum(gather(y))
    if bias is not None:
        y = y + bias
    return y.to(x.dtype)


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
        inside_r = first + r < R
        x = tl.load(B + n * R + first + r, mask=inside_n & inside_r, other=0.0)
        inside = inside_k & inside_r[:, None]
        row = A + (first + r)[:, None].to(tl.int64) * K
        y = tl.load(row + k, mask=inside, other=0.0)
        x = _fill(x, inside_r)
        acc = tl.dot(x, y, acc, input_precision="ieee")
    inside = inside_n & inside_k
    weight += n * K
    w = tl.load(weight + k, mask=inside, other=0.0).to(tl.float32)
    w += scale * acc
    out += n * K
    tl.store(out + k, w.to(out.dtype.element_ty), mask=inside)


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
        dx = None
        if ctx.needs_input_grad[0]:
            merged = merge(weight, A, B, ctx.scale)  # again: kept, it would be a second model in memory
            dx = torch.mm(grad, merged)
        g_B = _float32_mm(grad, B) * ctx.scale
        x_A = _float32_mm(x, A.t()) * ctx.scale
        dA = _float32_mm(g_B.t(), x)
        dB = _float32_mm(grad.t(), x_A)
        return dx, None, None, dA, dB, None, None


@triton.jit
def triton_split(x, parts, x_r, x_c, C, BLOCK: constexpr):
    """Each row of x as three of the parts' type side by side, whose sum it is."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    rest = tl.load(x + row * x_r + c * x_c, mask=inside, other=0.0)
    for i in tl.static_range(3):
        part = rest.to(parts.dtype.element_ty)
        tl.store(parts + (row * 3 + i) * C + c, part, mask=inside)
        rest -= part.to(tl.float32)


def _float32_mm(a, b):
    """
    a (M, K) @ b (K, N) -> (M, N) float32; one of them is float32. If the other is bfloat16, on a GPU, it is cut into
    three bfloat16 numbers, each with 8 of its 24 bits: tensor cores do not multiply float32.
    """
    if a.dtype == b.dtype or not use_triton(a):
        return torch.mm(a.float(), b.float())
    if a.dtype == torch.float32:
        return _float32_mm(b.t(), a.t()).t().contiguous()
    parts = a.new_empty(len(b), 3 * b.shape[1])
    on_elements(triton_split, b.shape, 6, b, parts, *b.stride())
    high, middle, low = matmul(a, parts, torch.float32).chunk(3, 1)
    return high + (middle + low)


def merge(weight, A, B, scale):
    """weight (N, K) + scale * B (N, r) @ A (r, K), in float32, rounded once to weight's dtype. A and B are float32."""
    fits = B.shape[1] == len(A) and weight.shape == (len(B), A.shape[1])
    check(fits, "weight, A, B {}, {}, {}: (N, K), (r, K), (N, r) are needed", weight, A, B)
    check_operands(A, B, weight.new_empty(0, dtype=torch.float32))
    if not use_triton(weight):
        out = loops.cpu_matmul(B, A)
        return out.mul_(scale).add_(weight).to(weight.dtype)
    weight, A, B = (x.contiguous() for x in (weight, A, B))
    N, K = weight.shape
    out = torch.empty_like(weight)
    grid = -(-N // LORA_TILE), -(-K // LORA_TILE)
    args = weight, A, B, out, scale, N, K, len(A)
    _launch(triton_lora, grid, *args, BLOCK=LORA_TILE, BLOCK_R=16, **EXACT)
    return out


# ------------------------------------------------------------------------------------------------------------------
# row_sums: y_r = sum_c x_rc, for the gradient norm, a weight's gradient, and sums and means of plain torch
#
# On a CPU one number after the other. On Triton LANES partial sums, each in order, and then their sum, an order that
# follows from C.


@triton.jit(do_not_specialize=["C"])
def triton_row_sums(x, out, C, SQUARED: constexpr, BLOCK: constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    x += row.to(tl.int64) * C
    acc = tl.zeros([BLOCK], tl.float64)
    for first in range(0, C, BLOCK):
        inside = first + i < C
        v = tl.load(x + first + i, mask=inside, other=0.0).to(tl.float64)
        acc += v * v if SQUARED else v
    total = _sum(acc)
    if out.dtype.element_ty != tl.float64:  # as torch rounds, by way of float32
        total = total.to(tl.float32).to(out.dtype.element_ty)
    tl.store(out + row, total)


@functools.cache
def _lanes(C):
    return dict(BLOCK=min(LANES, _block(C)), num_warps=8, **EXACT)


def row_sums(x, out=None, squared=False):
    """
    The sums of x (R, C) float64 along its rows -> (R,), or into `out` and then rounded to its type. squared: of x * x,
    and x is float32.

    A row is one program's work: cut a long tensor into rows of one fixed length first.
    """
    check(squared or x.dtype == torch.float64, "dtype={}: row_sums adds float64", x.dtype)
    R, C = x.shape
    x = x.contiguous()
    if use_triton(x) and not FLOAT32:
        out = x.new_empty(R) if out is None else out
        _launch(triton_row_sums, (R,), x, out, C, squared, **_lanes(C))
        return out
    if squared:
        x = x.double().square_()
    if use_triton(x):
        sums = _float32().row_sums(x)
    else:
        sums = x.new_empty(R)
        host.share(loops.cpu_row_sums, R, R * C, x, sums, C)
    return sums if out is None else out.copy_(sums)


# ------------------------------------------------------------------------------------------------------------------
# RMSNorm: y_i = w_i n_i, n = x r, r = (mean_j x_j^2 + eps)^-1/2 (Zhang and Sennrich 2019, eq. 4).
# RoPE: (y1 c - y2 s, y2 c + y1 s), y1 and y2 the halves of a head (Su et al. 2021, eq. 34, NeoX halves). Here the norm,
# the turn, or the turn of what was normed. Backward turns the other way, to g, and with h = g w: dx = r (h - n mean(h
# n)), dw = sum over rows of g n.
#
# A row is one head of one token, or a whole token. A program holds whole rows, and how many follows from their length.
# dw is the `row_sums` of blocks: of SUM_ROWS rows on Triton, of SUM_TOKENS tokens on a CPU.


@triton.jit
def triton_rope_table(angle, cos, sin, N, BLOCK: constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < N
    x = tl.load(angle + i, mask=inside, other=0.0)
    c, s = _cos_sin(x.to(tl.float64))
    tl.store(cos + i, c.to(tl.float32), mask=inside)
    tl.store(sin + i, s.to(tl.float32), mask=inside)


def rope_table(inv_freq, positions):
    """cos and sin (N, D/2) float32 of position * inv_freq (Su et al. 2021, eq. 15); both sides take them from here."""
    angle = positions.float()[:, None] * inv_freq.float()
    cos = torch.empty_like(angle)
    sin = torch.empty_like(angle)
    on_numbers(triton_rope_table, 40, angle, cos, sin)
    return cos, sin


@triton.jit
def _turn(cos, sin, row, i, inside, sign, H: constexpr, D: constexpr):
    """(i of a row's other half, cos, +-sin): y_i = x_i cos +- x_other sin, with `sign` in the first half."""
    HALF: constexpr = D // 2
    at = (row // H).to(tl.int64)[:, None] * HALF + i % HALF
    s = tl.load(sin + at, mask=inside, other=0.0)
    s *= tl.where(i < HALF, sign, -sign)
    other = (i + HALF) % D
    c = tl.load(cos + at, mask=inside, other=0.0)
    return other, c, s


@triton.jit
def _mean_of(x, D: constexpr):
    """(rows, 1) of rows of D numbers in x (rows, block)."""
    total = _total(x)[:, None]
    return total * (1.0 / D) if D & (D - 1) == 0 else tl.div_rn(total, D * 1.0)


@triton.jit
def _rms(x, eps, D: constexpr):
    """1 / rms (rows, 1) of the rows x."""
    return tl.div_rn(1.0, tl.sqrt_rn(_mean_of(x * x, D) + eps))


@triton.jit(do_not_specialize=["R"])
def triton_norm_rope(
    x, weight, cos, sin, y, eps, x_n, R, H: constexpr, D: constexpr, ROWS: constexpr, BLOCK: constexpr,
    residual=None, sums=None, places=None,
):  # fmt: skip
    """
    ROWS of the R rows, which are H for a token. No weight: no norm; no cos: no turn. With a residual, which lies as x
    does, x + residual takes x's place and goes to sums. places: the rows of y that the tokens' results go to.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)[None, :]
    inside = (row < R)[:, None] & (i < D)
    token = (row // H).to(tl.int64)
    at = token * x_n + row % H * D
    x += at[:, None]
    v = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        v += tl.load(residual + at[:, None] + i, mask=inside, other=0.0).to(tl.float32)
        rounded = v.to(sums.dtype.element_ty)
        tl.store(sums + at[:, None] + i, rounded, mask=inside)
        v = rounded.to(tl.float32)
    if weight is not None:
        r = _rms(v, eps, D)
        v *= r
        v *= tl.load(weight + i, mask=i < D, other=0.0).to(tl.float32)
    if cos is not None:
        other, c, s = _turn(cos, sin, row, i, inside, -1.0, H, D)
        u = tl.load(x + other, mask=inside, other=0.0).to(tl.float32)
        if weight is not None:
            u *= r
            u *= tl.load(weight + other, mask=i < D, other=0.0).to(tl.float32)
        v = v * c + u * s
    if places is not None:
        token = tl.load(places + token, mask=row < R, other=0).to(tl.int64)
    y += (token * H + row % H)[:, None] * D
    tl.store(y + i, v.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N"])
def triton_norm_rope_to_cache(
    q, k, v, q_weight, k_weight, cos, sin, y, keys, values, places, eps, x_n, N,
    H: constexpr, HK: constexpr, D: constexpr, ROWS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    R = N * HK
    if part == 0:
        triton_norm_rope(q, q_weight, cos, sin, y, eps, x_n, N * H, H, D, ROWS, BLOCK)
    elif part == 1:
        triton_norm_rope(k, k_weight, cos, sin, keys, eps, x_n, R, HK, D, ROWS, BLOCK, places=places)
    else:
        triton_norm_rope(v, None, None, None, values, eps, x_n, R, HK, D, ROWS, BLOCK, places=places)


@triton.jit(do_not_specialize=["R"])
def triton_norm_rope_backward(
    grad, x, weight, cos, sin, dx, dw, eps, x_n, R, H: constexpr, D: constexpr,
    ROWS: constexpr, BLOCK: constexpr, STEPS: constexpr,
):  # fmt: skip
    """dx of STEPS * ROWS rows, a block, and their share of dw (D, blocks)."""
    block = tl.program_id(0)
    i = tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    if weight is not None:
        w = tl.load(weight + i, mask=i < D, other=0.0).to(tl.float32)
    for step in tl.range(STEPS, num_stages=2 if cos is None else 1):  # heads have many programs, and no wait
        row = (block * STEPS + step) * ROWS + tl.arange(0, ROWS)
        inside = (row < R)[:, None] & (i < D)
        at = row.to(tl.int64)[:, None] * D
        g = tl.load(grad + at + i, mask=inside, other=0.0).to(tl.float32)
        if cos is not None:
            other, c, s = _turn(cos, sin, row, i, inside, 1.0, H, D)
            g *= c
            u = tl.load(grad + at + other, mask=inside, other=0.0).to(tl.float32)
            g += u * s
        if weight is not None:
            x_at = (row // H).to(tl.int64) * x_n + row % H * D
            n = tl.load(x + x_at[:, None] + i, mask=inside, other=0.0).to(tl.float32)
            r = _rms(n, eps, D)
            n *= r
            acc += g * n
            g *= w
            g = r * (g - n * _mean_of(g * n, D))
        tl.store(dx + at + i, g.to(dx.dtype.element_ty), mask=inside)
    if dw is not None:
        share = _total(acc.T)[None, :]
        dw += i.to(tl.int64) * tl.num_programs(0)
        tl.store(dw + block, share.to(tl.float64), mask=i < D)


@functools.cache
def _norm_config(D):
    block = _block(D)
    check(block <= 16384, "width={}: a norm's row must fit one program, at most 16384", D)
    rows = max(1, NORM_BLOCK // block)
    return dict(ROWS=rows, BLOCK=block, num_warps=8 if block > NORM_BLOCK else 4, **EXACT)


class NormRope(torch.autograd.Function):
    """x (N, H, D), whose tokens may be strided: normed with a weight (D,), turned with cos and sin (N, D / 2)."""

    @staticmethod
    def forward(ctx, x, weight, cos, sin, eps, **residual):
        N, H, D = x.shape
        x = x if x.stride()[1:] == (D, 1) else x.contiguous()
        weight, cos, sin = (y if y is None else y.contiguous() for y in (weight, cos, sin))
        ctx.save_for_backward(x, weight, cos, sin)
        x_n = x.stride(0)
        R = N * H
        ctx.tail = eps, x_n, R, H, D
        y = _contiguous_like(x)
        config = _norm_config(D)
        grid = (-(-R // config["ROWS"]),)
        args = x, weight, cos, sin, y, *ctx.tail
        on_rows(triton_norm_rope, N, 100 * R * D, args, grid, config | residual)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, weight, *_ = saved = ctx.saved_tensors
        N, H, D = x.shape
        R = N * H
        config = _norm_config(D)
        steps = max(1, SUM_ROWS // config["ROWS"])
        by_triton = use_triton(x)
        rows = steps * config["ROWS"] if by_triton and not FLOAT32 else loops.SUM_TOKENS * H
        blocks = -(-R // rows)
        dx = _contiguous_like(x)
        dw = None
        if ctx.needs_input_grad[1]:
            dw = x.new_empty(D, blocks, dtype=torch.float64) if by_triton else x.new_zeros(blocks, D)
        args = grad.contiguous(), *saved, dx, dw, *ctx.tail
        config = dict(config, STEPS=steps)
        if by_triton and FLOAT32:
            _float32().norm_rope_backward(*args)
        else:
            on_rows(triton_norm_rope_backward, blocks, 200 * R * D, args, (blocks,), config)
        if dw is not None:
            dw = row_sums(dw if by_triton else dw.t().double(), torch.empty_like(weight))
        return dx, dw, None, None, None


def rms_norm(x, weight, eps, residual=None):
    """
    x (..., C) * rsqrt(mean(x^2) + eps) * weight (C,), in float32, rounded once to x's dtype. Differentiable.

    With a residual: s = x + residual, rounded, takes x's place, and (y, s) is returned.
    """
    fits = weight.shape == x.shape[-1:] and (residual is None or residual.shape == x.shape)
    check(fits, "weight {} or residual does not fit x {}", weight, x)
    check_operands(x, weight, x if residual is None else residual)
    rows = -1, 1, x.shape[-1]
    in_one = residual is not None and use_triton(x) and not FLOAT32  # an engine's: one launch
    if in_one and not (torch.is_grad_enabled() and any(y.requires_grad for y in (x, weight, residual))):
        x = x.contiguous()
        s = torch.empty_like(x)
        sum_too = dict(residual=residual.contiguous(), sums=s)
        y = NormRope.forward(_NoGradient(), x.view(rows), weight, None, None, eps, **sum_too)
        return y.view(x.shape), s
    s = x if residual is None else x + residual
    y = _apply(NormRope, s.reshape(rows), weight, None, None, eps).view(s.shape)
    return y if residual is None else (y, s)


def _check_heads(q, k, cos, sin, *weights):
    fits = q.dim() == k.dim() == 3 and q.shape[::2] == k.shape[::2]
    fits = fits and q.shape[2] % 2 == 0
    check(fits, "q {} and k {}: (N, heads, D) with an even D are needed", q, k)
    N, _, D = q.shape
    fits = all(x.dtype == torch.float32 and x.shape == (N, D // 2) for x in (cos, sin))
    check(fits, "cos {} and sin {}: float32 ({}, {}) is needed", cos, sin, N, D // 2)
    weights = [w for w in weights if w is not None]
    fits = len(weights) != 1 and all(w.shape == (D,) for w in weights)
    check(fits, "weights of {}: none, or two of q's head dim {}", [len(w) for w in weights], D)
    check_operands(q, k, *weights)


def norm_rope(q, k, cos, sin, q_weight=None, k_weight=None, eps=0.0):
    """
    Rotary positions of q (N, H, D) and k (N, HK, D), each head normed before where there are weights (D,); cos, sin
    (N, D/2) float32 as `rope_table` gives them. All in float32, rounded once; new tensors; differentiable in q, k and
    the weights.
    """
    _check_heads(q, k, cos, sin, q_weight, k_weight)
    q = _apply(NormRope, q, q_weight, cos, sin, eps)
    k = _apply(NormRope, k, k_weight, cos, sin, eps)
    return q, k


def norm_rope_to_cache(q, k, v, cos, sin, keys, values, places, *norms, in_one=True):
    """
    q (N, H, D) of `norm_rope`, whose k, and v (N, HK, D), are written to the rows `places` (N,) of keys and values
    (any, HK, D), contiguous. On a card in one launch, if in_one; q, k and v are parts of one product then.
    """
    if not use_triton(q) or FLOAT32 or not in_one:
        q, keys[places] = norm_rope(q, k, cos, sin, *norms)
        values[places] = v
        return q
    q_weight, k_weight, eps = norms or (None, None, 0.0)
    _check_heads(q, k, cos, sin, q_weight, k_weight)
    N, H, D = q.shape
    HK = k.shape[1]
    fits = v.shape == k.shape and q.stride() == k.stride() == v.stride() and q.stride()[1:] == (D, 1)
    fits = fits and all(x.is_contiguous() and x.shape[1:] == k.shape[1:] for x in (keys, values))
    check(fits, "v {} or a cache {} does not fit k {}", v, keys, k)
    y = _contiguous_like(q)
    config = _norm_config(D)
    grid = -(-N * max(H, HK) // config["ROWS"]), 3
    args = q, k, v, q_weight, k_weight, cos, sin, y, keys, values, places, eps, q.stride(0), N
    _launch(triton_norm_rope_to_cache, grid, *args, H=H, HK=HK, D=D, **config)
    return y


# ------------------------------------------------------------------------------------------------------------------
# SwiGLU: silu(g) u, silu(g) = g / (1 + exp(-g)) (Shazeer 2020, eq. 5); d silu / dg = s (1 + g (1 - s)), s = sigmoid(g).
#
# Element by element, so there is no order.


@triton.jit
def triton_swiglu(gate, up, y, gate_r, up_r, C, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    gate += row * gate_r
    g = tl.load(gate + c, mask=inside, other=0.0).to(tl.float32)
    up += row * up_r
    u = tl.load(up + c, mask=inside, other=0.0).to(tl.float32)
    v = tl.div_rn(g, 1 + _exp(g * -1.0)) * u
    y += row * C
    tl.store(y + c, v.to(y.dtype.element_ty), mask=inside)


@triton.jit
def triton_swiglu_backward(grad, gate, up, d_gate, d_up, gate_r, up_r, C, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    grad += row * C
    d = tl.load(grad + c, mask=inside, other=0.0).to(tl.float32)
    gate += row * gate_r
    g = tl.load(gate + c, mask=inside, other=0.0).to(tl.float32)
    up += row * up_r
    u = tl.load(up + c, mask=inside, other=0.0).to(tl.float32)
    e = 1 + _exp(g * -1.0)
    s = tl.div_rn(1.0, e)
    dg = d * u * (s * (1 + g * (1 - s)))
    du = d * tl.div_rn(g, e)
    d_gate += row * C
    tl.store(d_gate + c, dg.to(d_gate.dtype.element_ty), mask=inside)
    d_up += row * C
    tl.store(d_up + c, du.to(d_up.dtype.element_ty), mask=inside)


class SwiGLU(torch.autograd.Function):
    """gate and up (R, C), whose rows may be strided."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        y = _contiguous_like(gate)
        strides = gate.stride(0), up.stride(0)
        on_elements(triton_swiglu, y.shape, 100, gate, up, y, *strides)
        return y

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        d_gate = _contiguous_like(gate)
        d_up = _contiguous_like(up)
        strides = gate.stride(0), up.stride(0)
        args = grad.contiguous(), gate, up, d_gate, d_up, *strides
        on_elements(triton_swiglu_backward, grad.shape, 100, *args)
        return d_gate, d_up


def swiglu(gate, up):
    """silu(gate) * up, (..., C) each, in float32, rounded once; the rows may be strided. Differentiable."""
    check(gate.shape == up.shape, "gate {} and up {} differ", gate, up)
    rows = [x if x.stride(-1) == 1 else x.contiguous() for x in (gate, up)]
    rows = [x.reshape(-1, x.shape[-1]) for x in rows]
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
# On Triton the host does nothing, so that a decode step can be a CUDA graph: an expert's program counts the pairs
# before its own, and a product's program finds its expert and rows from these counts. The number of programs is the
# most that these pairs and experts can need. A tile is computed as by `triton_matmul`, so no tile is seen in a row.


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
    tl.store(w + i, tl.div_rn(p, _total(sums, True)), mask=inside)


@triton.jit
def triton_by_expert(experts, starts, places, pairs, BLOCK: constexpr):
    """An expert's program counts the pairs of those before it, and then numbers its own."""
    e = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    at = 0
    for first in range(0, pairs, BLOCK):
        inside = first + i < pairs
        its = tl.load(experts + first + i, mask=inside, other=e)
        before = (its < e).to(tl.int32)
        at += tl.sum(before, 0)
    tl.store(starts + e, at)
    for first in range(0, pairs, BLOCK):
        inside = first + i < pairs
        its = tl.load(experts + first + i, mask=inside, other=-1)
        mine = (its == e).to(tl.int32)
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
        inside = c < C
        v = tl.load(x + c, mask=inside, other=0.0).to(tl.float32)
        if y is not None:
            u = tl.load(y + to + c, mask=inside, other=0.0).to(tl.float32)
            acc += v * u
            v *= tl.load(w + pair)
        tl.store(out + to + c, v.to(out.dtype.element_ty), mask=inside)
    if y is not None:
        tl.store(dots + pair, _sum(acc))


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
    rows = tl.load(starts + 1 + i) - tl.load(starts + i)
    tiles = tl.cdiv(rows, BLOCK_N)
    before = tl.cumsum(tiles, 0) <= tile
    e = tl.sum(before.to(tl.int64), 0)
    if e == EXPERTS:
        return
    tile -= tl.sum(tl.where(i < e, tiles, 0), 0)
    first = tl.load(starts + e)
    m = first + tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    end = tl.load(starts + e + 1)
    b += e * N * K
    _multiply_tile(b, a, c, n, m, N, end, K, b_n, b_k, 1, K, 1, N, False, BLOCK_K)


@triton.jit
def triton_combine(y, places, w, out, k, C, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    acc = tl.zeros([BLOCK], tl.float32)
    for i in range(row * k, (row + 1) * k):
        place = tl.load(places + i)
        v = tl.load(y + place * C + c, mask=inside, other=0.0).to(tl.float32)
        acc = tl.fma(tl.load(w + i), v, acc)
    out += row * C
    tl.store(out + c, acc.to(out.dtype.element_ty), mask=inside)


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
        units = E * -(-N // loops.PANEL)
        work = 2 * pairs * K * N
        args = a, loops.panels_of(b), starts, c, K, N
        host.share(loops.cpu_expert_matmul, units, work, *args)
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
    args = x.contiguous(), y, places, w, out, dots, k, C
    on_rows(triton_to_pairs, N, 3 * out.numel(), args, (N * k,), _lanes(C))
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
        dx = matmul(grad, router.float()).to(x.dtype)
        d_router = matmul(grad.t(), x.float()).to(router.dtype)
        return dx, d_router


class Choose(torch.autograd.Function):
    """Logits z (N, E) float32 -> (w, experts), (N, k) each, the likeliest first."""

    @staticmethod
    def forward(ctx, z, k):
        N, E = z.shape
        w = z.new_empty(N, k)
        experts = torch.empty_like(w, dtype=torch.int64)
        args = z, experts, w, E, k
        on_rows(triton_choose, N, 20 * N * E, args, (N,), _lanes(E))
        ctx.E = E
        ctx.save_for_backward(w, experts)
        ctx.mark_non_differentiable(experts)
        return w, experts

    @staticmethod
    def backward(ctx, grad, _):
        w, experts = ctx.saved_tensors
        mean = row_sums((w * grad).double())[:, None].float()
        dz = w.new_zeros(len(w), ctx.E)
        return dz.scatter_(1, experts, w * (grad - mean)), None


class ToPairs(torch.autograd.Function):
    """Each row of x (N, C) at the places (N, k) of its pairs: (N * k, C)."""

    @staticmethod
    def forward(ctx, x, places):
        ctx.save_for_backward(places)
        return _to_pairs(x, None, places, None)[0]

    @staticmethod
    def backward(ctx, grad):
        (places,) = ctx.saved_tensors
        ones = torch.ones_like(places, dtype=torch.float32)
        return Combine.forward(_NoGradient(), grad, ones, places), None


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
        work = 2 * len(x) * N * K
        on_rows(triton_matmul, E, work, args, grid, config, "cpu_expert_gradients")
        dx = _expert_matmul(grad, weight, starts)
        return dx, d_weight, None


class Combine(torch.autograd.Function):
    """Sums (N, C) of the pairs y (N * k, C) of each row, each times its w (N, k)."""

    @staticmethod
    def forward(ctx, y, w, places):
        ctx.save_for_backward(y, w, places)
        N, k = places.shape
        out = y.new_empty(N, y.shape[1])
        on_elements(triton_combine, out.shape, 2 * k, y.contiguous(), places, w, out, k)
        return out

    @staticmethod
    def backward(ctx, grad):
        y, w, places = ctx.saved_tensors
        dy, dw = _to_pairs(grad, y, places, w)
        return dy, dw, None


def moe(x, router, gate_up, down, k, routed=None, first=0, add=None):
    """
    x (N, C) through the k experts of each row -> (N, C). router (E, C), gate_up (E, 2 F, C), down (E, C, F).
    Differentiable. routed: a list that gets the router's logits (N, E) and the experts (N, k), the likeliest first.

    With `add` gate_up and down may be those of some experts only, from number `first`: it adds up rows that one rank
    has and the others fill with zeros. Then not differentiable.
    """
    E = len(router)
    here, C, F = down.shape
    fits = x.shape[1] == C and router.shape == (E, C) and gate_up.shape == (here, 2 * F, C)
    fits = fits and (here == E or add)
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
    on_rows(triton_by_expert, 1, pairs, args, (len(starts) - 1,), _lanes(pairs))
    if add:
        e = torch.arange(first, first + _block(here) + 2, device=x.device)
        starts = starts[e.clamp(max=first + here)]
    y = _apply(ToPairs, x, places)
    y = _apply(ExpertMatmul, y, gate_up, starts)
    y = swiglu(*y.chunk(2, 1))
    y = _apply(ExpertMatmul, y, down, starts)
    if add:
        pair = torch.arange(pairs, device=x.device)[:, None]
        elsewhere = (pair < starts[0]) | (pair >= starts[here])
        y = add(y.masked_fill_(elsewhere, 0.0))
    return _apply(Combine, y, w, places)


# ------------------------------------------------------------------------------------------------------------------
# attention: o = p v / rowsum(p), p = exp(q k^T * scale - m), over the keys of one sequence in order; m is the row's
# largest score, which has no order. Backward (Dao 2023, algorithm 2): ds = p * (do v^T - rowsum(do * o)).
#
# Sums begin at the sequence's first key, and tiles of keys lie at absolute positions. A key in a row's future adds an
# exact zero, and so does a tile of them. So the result depends neither on the batch, nor on the chunk of a prefill, nor
# on the pages of the cache.

# Speed only: query rows of a tile ..
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
    sequence. Without a page_table the keys are packed as the queries are. most: keys that a sequence may have. first,
    row: see `packed_plan`; of each token a row of its own.

    The Triton kernels read every number from the device: no step waits for it. A captured CUDA graph replays with the
    then current kv_lens, page_table and requests; q_lens must stay, since the plan keeps running sums (B,) of it. Keep
    the plan as long as the graph. The CPU makes its indices at the first use.
    """

    def __init__(self, q_lens, kv_lens, most, page_table=None, requests=None, first=..., row=None):
        self.q_lens = q_lens
        self.kv_lens = kv_lens
        self.most = most
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
        if self.row is None:
            return x
        return F.embedding(self.row, x.flatten(1)).view(-1, *x.shape[1:])

    @functools.cached_property
    def queries(self):
        return int(self.q_ends[-1]) if self.B else 0

    @functools.cached_property
    def cpu_indices(self):
        """
        For the CPU: (tokens of the packed batch, rows of the keys), (any,) int32 each; and for each sequence, (B,)
        int64 each, the start of its queries in the first, their number, the start of its keys in the second, their
        number.
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
        return tuple(map(host.flat, (tokens, rows, *numbers)))

    @functools.cached_property
    def cpu_pairs(self):
        """The sum over sequences of queries times keys, from which a loop's work is estimated."""
        _, _, _, q_lens, _, kv_lens = self.cpu_indices
        return int((q_lens * kv_lens).sum())


def packed_plan(lengths, device=None, ids=None):
    """
    The plan of a packed batch of whole sequences, `lengths` (B,) tokens each, on the CPU, for training. With ids (N,),
    their tokens on the CPU, those with the same prefix share a row of q, k and v: rows are of the tokens `first` (U,),
    and `row` has each token's.
    """
    lengths = torch.as_tensor(lengths)
    each = lengths.tolist()
    most = max(each, default=0)

    def there(x):
        return x.to(device or x.device, non_blocking=True).contiguous()  # as the Triton kernels read them

    if ids is None:
        lengths = there(lengths)
        return Plan(lengths, lengths, most)
    nodes = {}  # a prefix tree, {(first token with the prefix before, id): the first with both}, as indices of `alike`
    alike = []  # of each token the first with its prefix
    for tokens in ids.split(each):
        node = None
        for token in tokens.tolist():
            node = nodes.setdefault((node, token), len(alike))
            alike.append(node)
    first, row = torch.tensor(alike).unique(return_inverse=True)
    ends = torch.searchsorted(first, lengths.cumsum(0))  # a sequence's first ones are its last tokens
    q_lens = ends.diff(prepend=ends.new_zeros(1))
    return Plan(there(q_lens), there(lengths), most, first=there(first), row=there(row))


def paged_plan(q_lens, kv_lens, page_table, requests):
    """
    The plan of a prefill chunk or a decode step over a paged cache, which differ in these numbers only: see Plan.

    q_lens (B,) new tokens, kv_lens (B,) tokens in the cache with the new ones.
    """
    each = q_lens, kv_lens, requests
    fits = all(x.device == page_table.device and x.is_contiguous() for x in each)
    fits = fits and page_table.stride(1) == 1
    check(fits, "paged_plan: all four on one device, the numbers and the entries of a page_table's row side by side")
    return Plan(q_lens, kv_lens, page_table.shape[1], page_table, requests)


# On Triton the softmax is online (Milakov and Gimelshein 2018; Dao 2023, algorithm 1). Per split of SPLIT keys, over
# its tiles of KEYS keys in order, with s = q k^T:
#     m' = max(m, max s), a = 2^((m - m') c), p = 2^(s c - m' c), l' = a l + p 1, o' = a o + p v, c = scale / ln 2,
# and over the splits in order the same with a split's (m, l, o) in a tile's place: `_merge`. A hidden key or tile of
# them changes no bit (m' = m, a = 1, p = 0), and no operation mixes rows. Backward has p = 2^(s c - lse).
#
# lse and rowsum(do * o) lie as (HK, N, G), so that those of a tile of rows are side by side, and then come some numbers
# that are read with a last tile and thrown away.
#
# The copy engine (TMA), where there is one, brings a packed batch's k and v to forward and dq, and its q and do to dkv.
# Past a tensor's end it fills in zeros; with Triton's ragged descriptors, whose addresses wrap round at 2^64, it does
# so past a sequence's.


@triton.jit
def _find(ends, B, at):
    """The sequence that `at` lies in: how many of the running sums it has passed; B beyond the last."""
    passed = 0
    for first in range(0, B, 256):
        i = first + tl.arange(0, 256)
        end = tl.load(ends + i, mask=i < B, other=2147483647)
        passed += tl.sum((end <= at).to(tl.int32), 0)
    return passed


@triton.jit
def _before(ends, b):
    end = tl.load(ends + b - 1, mask=b > 0, other=0)
    return end.to(tl.int32)


@triton.jit
def _merge(m, den, o, m_new, l_new, o_new, c):
    """Two softmaxes over other keys are one; (-1e30, 0, 0) is the empty one and changes no bit."""
    top = tl.maximum(m, m_new)
    a = _exp2((m - top) * c)
    b = _exp2((m_new - top) * c)
    den = den * a + l_new * b
    o = o * a[:, None] + o_new * b[:, None]
    return top, den, o


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
    group = row % GROUPS
    token = (start + query).to(tl.int64)
    valid = query < length
    return start, length, query, group, token, valid


@triton.jit
def _key_tile(x, start, length, first, head, x_s, x_h, KEYS: constexpr, D: constexpr, TMA: constexpr):
    """(KEYS, D) of a packed sequence's keys or values from `first` on; zeros past its end."""
    if TMA:
        return load_ragged(x, start, length, [first, head, 0]).reshape(KEYS, D)
    else:
        at = first + tl.arange(0, KEYS)
        row = x + head.to(tl.int64) * x_h + (start + at).to(tl.int64) * x_s
        here = (at < length)[:, None]
        d = tl.arange(0, D)[None, :]
        return tl.load(row[:, None] + d, mask=here, other=0.0)


@triton.jit(do_not_specialize=["N", "B", "splits", "LANES"])
def triton_attention(
    q, k, v, out, lse, part_m, part_l, q_ends, tile_ends, kv_lens, pages, requests, pages_r, c, N, B, splits, LANES,
    q_n, q_h, k_s, k_h, v_s, v_h,
    HEADS: constexpr, GROUPS: constexpr, D: constexpr, KEYS: constexpr, SPLIT: constexpr,
    ROWS: constexpr, PAGED: constexpr, PARTS: constexpr, ONE: constexpr, TMA: constexpr,
):  # fmt: skip
    """
    A tile of rows, (query, head of the group) pairs. PARTS: out takes each split's sums for `triton_merge_parts`. ONE:
    no sequence has a second split, which saves the registers of a merge.
    """
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
    inside = valid[:, None]
    q_row = q + (token * q_n + column * q_h)[:, None]
    x = tl.load(q_row + d, mask=inside, other=0.0)
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
                key = tl.load(pages + at, mask=here, other=0).to(tl.int64)[:, None]
                here = here[:, None]
                kt = tl.load(k + key * k_s + d, mask=here, other=0.0)
                vt = tl.load(v + key * v_s + d, mask=here, other=0.0)
            else:
                kt = _key_tile(k, start, kv_len, first, head, k_s, k_h, KEYS, D, TMA)
                vt = _key_tile(v, start, kv_len, first, head, v_s, v_h, KEYS, D, TMA)
            s = tl.dot(x, kt.T, input_precision="ieee")
            if first + KEYS > seen:
                sees = first + tl.arange(0, KEYS)[None, :] <= position[:, None]
                s = tl.where(sees, s, float("-inf"))
            top = tl.maximum(sm, tl.max(s, 1))
            a = _exp2((sm - top) * c)
            shift = (-top * c)[:, None]
            p = _exp2(tl.fma(s, c, shift)).to(q.dtype.element_ty)
            sums = tl.dot(p, ones, sums * a[:, None], input_precision="ieee")
            so = tl.dot(p, vt, so * a[:, None], input_precision="ieee")
            sm = top
        sl = tl.max(sums, 1)
        if PARTS:
            at = row * splits + split
            tl.store(part_m + at, sm, mask=valid)
            tl.store(part_l + at, sl, mask=valid)
            tl.store(out + at[:, None] * D + d, so, mask=inside)
        elif ONE:
            m = sm
            den = sl
            o = so
        else:
            m, den, o = _merge(m, den, o, sm, sl, so, c)
    if not PARTS:
        o = tl.fma(o, tl.div_rn(1.0, den)[:, None], 0.0)  # `_merge` may have made 0.0 of -0.0
        out += row[:, None] * D
        tl.store(out + d, o.to(out.dtype.element_ty), mask=inside)
        if not PAGED:
            lse += (head.to(tl.int64) * N + token) * GROUPS + group
            log_sum = _log(den.to(tl.float64)).to(tl.float32)
            tl.store(lse, tl.fma(m, c, log_sum * LOG2_E), mask=valid)


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
    kv_len = tl.load(kv_lens + b).to(tl.int32)
    seen = kv_len - _before(q_ends, b + 1) + token + 1
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
    o = tl.fma(o, tl.div_rn(1.0, den)[:, None], 0.0)
    out += (row + one)[:, None] * D
    tl.store(out + d, o.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["R"])
def triton_attention_delta(
    grad, out, delta, R, HEADS: constexpr, GROUPS: constexpr, D: constexpr, ROWS: constexpr,
):  # fmt: skip
    """rowsum(do * o), laid out as lse."""
    H: constexpr = HEADS * GROUPS
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)[None, :]
    at = row[:, None] * D + d
    inside = (row < R)[:, None]
    x = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    token = row // H
    column = row % H
    head = column // GROUPS
    N = R // H
    delta += (head * N + token) * GROUPS + column % GROUPS
    tl.store(delta, _total(x * y), mask=row < R)


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
    inside = valid[:, None]
    q_row = q + (token * q_n + column * q_h)[:, None]
    x = tl.load(q_row + d, mask=inside, other=0.0)
    g = tl.load(grad + row[:, None] * D + d, mask=inside, other=0.0)
    at = (head.to(tl.int64) * N + token) * GROUPS + group
    top = tl.load(lse + at, mask=valid, other=0.0)[:, None]
    mean = tl.load(delta + at, mask=valid, other=0.0)[:, None]
    seen = tl.min(query, 0) + 1  # keys that every row sees; a row that is not valid has g = 0, and so ds = 0
    last = tl.max(tl.where(valid, query, -1), 0) + 1  # keys that some row sees
    acc = tl.zeros([ROWS, D], tl.float32)
    for first in range(0, last, KEYS):
        kt = _key_tile(k, start, length, first, head, k_s, k_h, KEYS, D, TMA)
        vt = _key_tile(v, start, length, first, head, v_s, v_h, KEYS, D, TMA)
        s = tl.dot(x, kt.T, input_precision="ieee")
        p = _exp2(tl.fma(s, c, -top))
        if first + KEYS > seen:
            sees = first + tl.arange(0, KEYS)[None, :] <= query[:, None]
            p = tl.where(sees & inside, p, 0.0)
        dp = tl.dot(g, vt.T, input_precision="ieee")
        ds = (p * (dp - mean)).to(q.dtype.element_ty)
        acc = tl.dot(ds, kt, acc, input_precision="ieee")
    dq += row[:, None] * D
    tl.store(dq + d, (acc * scale).to(dq.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N", "B"])
def triton_attention_dkv(
    q, k, v, grad, lse, delta, dk, dv, q_ends, key_ends, c, scale, N, B, q_n, q_h, k_s, k_h, v_s, v_h,
    HEADS: constexpr, GROUPS: constexpr, D: constexpr, ROWS: constexpr, KEYS: constexpr,
    TMA: constexpr,
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
    length = _before(q_ends, b + 1) - start
    first_key = (tile - _before(key_ends, b)) * KEYS
    at = first_key + tl.arange(0, KEYS)
    d = tl.arange(0, D)[None, :]
    here = (at < length)[:, None]
    s_row = (start + at).to(tl.int64)[:, None]
    k += head.to(tl.int64) * k_h
    kt = tl.load(k + s_row * k_s + d, mask=here, other=0.0)
    v += head.to(tl.int64) * v_h
    vt = tl.load(v + s_row * v_s + d, mask=here, other=0.0)
    dk_acc = tl.zeros([KEYS, D], tl.float32)
    dv_acc = tl.zeros([KEYS, D], tl.float32)
    rows = length * GROUPS
    statistics = (head.to(tl.int64) * N + start) * GROUPS
    if not TMA:
        q += (head * GROUPS).to(tl.int64) * q_h
        grad += head.to(tl.int64) * (GROUPS * D)
    lse += statistics
    delta += statistics
    for first in range(first_key * GROUPS // ROWS * ROWS, rows, ROWS):
        r = first + tl.arange(0, ROWS)
        if TMA:
            place = [first // GROUPS, head * GROUPS, 0]
            x = load_ragged(q, start, length, place).reshape(ROWS, D)
            g = load_ragged(grad, start, length, place).reshape(ROWS, D)
        else:
            token = (start + r // GROUPS).to(tl.int64)
            group = r % GROUPS
            valid = (r < rows)[:, None]
            q_row = q + (token * q_n + group * q_h)[:, None]
            x = tl.load(q_row + d, mask=valid, other=0.0)
            g_row = grad + ((token * (HEADS * GROUPS) + group) * D)[:, None]
            g = tl.load(g_row + d, mask=valid, other=0.0)
        # past the sequence these hold anything
        top = tl.load(lse + r)[None, :]
        mean = tl.load(delta + r)[None, :]
        s = tl.dot(kt, x.T, input_precision="ieee")
        p = _exp2(tl.fma(s, c, -top))
        if (first < (first_key + KEYS - 1) * GROUPS) | (first + ROWS > rows):  # not every row sees every key
            i = tl.arange(0, ROWS)[None, :]
            sees = at[:, None] * GROUPS - first <= i
            inside = i < rows - first
            p = tl.where(sees & inside, p, 0.0)
            mean = tl.where(inside, mean, 0.0)
        dv_acc = tl.dot(p.to(g.dtype), g, dv_acc, input_precision="ieee")
        dp = tl.dot(vt, g.T, input_precision="ieee")
        ds = (p * (dp - mean)).to(x.dtype)
        dk_acc = tl.dot(ds, x, dk_acc, input_precision="ieee")
    # computed again from what is read again: the loop has no registers to keep it in
    before = tl.load(key_ends + b - 1, mask=b > 0, other=0, volatile=True).to(tl.int32)
    at = (tile - before) * KEYS + tl.arange(0, KEYS)
    to = ((start + at).to(tl.int64) * HEADS + head)[:, None] * D + d
    here = (at < length)[:, None]
    tl.store(dk + to, (dk_acc * scale).to(dk.dtype.element_ty), mask=here)
    tl.store(dv + to, dv_acc.to(dv.dtype.element_ty), mask=here)


def _attention_config(x, rows, warps, stages, keys=None):
    """Keys and rows per tile, warps and stages, for queries x. keys: of dK and dV, where they stand for rows."""
    if not card(x).tma:
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


def _by_copy_engine(tma, a, b, tokens, heads=1):
    """a and b (N, heads, D) in tiles of so many tokens and heads, if tma."""
    return [create_ragged_descriptor(x, [tokens, heads, x.shape[2]]) if tma else x for x in (a, b)]


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
        c = scale / math.log(2)
        paged = plan.page_table is not None
        tma = not paged and card(q).tma
        out = q.new_empty(N, H, D)
        lse = q.new_empty(N * H + BACKWARD_ROWS, dtype=torch.float32)
        pages = plan.page_table if paged else plan.q_ends
        requests = plan.requests if paged else plan.q_ends
        # decode has few rows: several programs share the splits that one may have, and a second kernel merges them
        decode = paged and N <= plan.B
        splits = triton.cdiv(plan.most, SPLIT) if decode else 1
        parts = splits > 1
        lanes = min(splits, triton.cdiv(DECODE_PROGRAMS, max(1, N * heads)))
        rows = DECODE_ROWS if decode else PREFILL_ROWS
        warps = 4 if decode else 8
        stages = PREFILL_STAGES if paged and not decode else 3
        config = _attention_config(q, rows, warps, stages)
        # without tokens no tile: TMA takes no empty tensor
        ends = plan.ends(groups, config["ROWS"])
        tiles = N * groups // config["ROWS"] + min(N, plan.B)
        part_o = out
        part_m = part_l = lse
        if parts:
            part_o = q.new_empty(N, H, splits, D, dtype=torch.float32)
            part_m, part_l = q.new_empty(2, N, H, splits, dtype=torch.float32)
        key_tiles = _by_copy_engine(tma, k, v, config["KEYS"])
        args = q, *key_tiles, part_o, lse, part_m, part_l, plan.q_ends, ends, plan.kv_lens, pages, requests
        args += pages.stride(0), c, N, plan.B, splits, lanes, *strides
        flags = dict(shape, SPLIT=SPLIT, PAGED=paged, PARTS=parts, ONE=plan.most <= SPLIT, TMA=tma)
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
        grad = grad.contiguous()
        delta = torch.empty_like(lse)
        args = grad, out, delta, N * H
        grid = (triton.cdiv(N * H, 16),)
        config = dict(ROWS=16, num_warps=4, **EXACT)
        _launch(triton_attention_delta, grid, *args, **shape, **config)
        dq, dk, dv = (_contiguous_like(x) for x in (q, k, v))
        dq_config = _attention_config(q, PREFILL_ROWS, 8, 3)
        # an odd group's lse are copied one by one, which takes registers: half the rows, or they spill
        rows, stages = (BACKWARD_ROWS // 2, 4) if groups % 2 else (BACKWARD_ROWS, 3)
        dkv_config = _attention_config(q, rows, 8, stages, BACKWARD_KEYS)
        rows = dq_config["ROWS"]
        keys = dkv_config["KEYS"]
        sequences = min(N, plan.B)
        rest = grad, lse, delta
        tail = scale / math.log(2), scale, N, plan.B, *strides
        key_tiles = _by_copy_engine(tma, k, v, dq_config["KEYS"])
        args = q, *key_tiles, *rest, dq, plan.q_ends, plan.ends(groups, rows), *tail
        grid = N * groups // rows + sequences, heads
        _launch(triton_attention_dq, grid, *args, **shape, TMA=tma, **dq_config)
        rows = dkv_config["ROWS"]
        tma = tma and rows % groups == 0 and _lies_for_tma(grad)
        q, grad = _by_copy_engine(tma, q, grad, rows // groups, groups)
        args = q, k, v, grad, lse, delta, dk, dv, plan.q_ends, plan.ends(1, keys), *tail
        grid = N // keys + sequences, heads
        _launch(triton_attention_dkv, grid, *args, **shape, TMA=tma, **dkv_config)
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
        whole = map(plan.spread, (q, k, v))
        out = attention(*whole, packed_plan(plan.kv_lens), scale)
        return F.embedding(plan.first, out.flatten(1)).view(q.shape)
    if not use_triton(q):
        keys = len(k) if plan.page_table is None else len(q)
        message = "the plan is of {} tokens, there are {} queries and {} keys"
        check(plan.queries == len(q) == keys, message, plan.queries, len(q), len(k))
        k, v = map(plan.spread, (k, v))
        return _apply(loops.CpuAttention, q, k, v, plan, scale)
    if FLOAT32:
        check(D >= 16 and D & (D - 1) == 0, "head dims {}: in float32 a power of two from 16 on is needed", D)
        return _apply(_float32().Attention, q, k, v, plan, float(scale))
    check(D in (64, 128), "head dims {}: 64 or 128 are needed", D)
    check(H <= 8 * HK, "{} query heads over {} key heads: the group must be 1 to 8 heads", H, HK)
    check(scale > 0, "scale={}: the largest score is taken before the scale, which must be above 0", scale)
    return TritonAttention.apply(q, k, v, plan, scale)


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


@triton.jit
def triton_softmax_stats(z, t, stats, V: constexpr, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    t = tl.load(t)
    m = tl.full([BLOCK], -1e30, tl.float32)
    den = tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):
        inside = first + i < V
        x = tl.load(z + row * V + first + i, mask=inside, other=float("-inf"))
        x = tl.div_rn(x.to(tl.float32), t)
        larger = x > m
        e = _exp(tl.where(larger, m - x, x - m))  # that of the other, of 0, is 1
        den = tl.where(larger, den * e + 1.0, den + e)
        m = tl.where(larger, x, m)
    top = tl.max(m, 0)
    stats += row * 2
    tl.store(stats, top)
    den = _total((den * _exp(m - top))[None, :])
    tl.store(stats + 1 + tl.arange(0, 1), _log(den.to(tl.float64)).to(tl.float32))


@triton.jit
def _log_prob(z, t, stats):
    x = tl.div_rn(z.to(tl.float32), t)
    return (x - tl.load(stats)) - tl.load(stats + 1)


@triton.jit
def triton_log_softmax(z, t, stats, out, V: constexpr, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < V
    z += row * V
    logits = tl.load(z + c, mask=inside, other=0.0)
    x = _log_prob(logits, tl.load(t), stats + row * 2)
    out += row * V
    tl.store(out + c, x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def triton_token_logprobs(z, t, stats, targets, logprobs, entropy, V: constexpr, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    t = tl.load(t)
    z += row * V
    stats += row * 2
    acc = tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):
        logits = tl.load(z + first + i, mask=first + i < V, other=float("-inf"))
        x = _log_prob(logits, t, stats)
        acc += _exp(x) * tl.maximum(x, LEAST)
    tl.store(entropy + row, _sum(acc) * -1.0)
    logprobs += row
    logit = tl.load(z + tl.load(targets + row))
    tl.store(logprobs, _log_prob(logit, t, stats))


@triton.jit
def triton_token_grads(
    z, t, stats, targets, entropy, grad, entropy_grad, dz, V: constexpr, BLOCK: constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t = tl.load(t)
    inside = c < V
    z += row * V
    logits = tl.load(z + c, mask=inside, other=0.0)
    x = _log_prob(logits, t, stats + row * 2)
    p = _exp(x)
    g = tl.div_rn(tl.load(grad + row), t)
    e = 0.0
    if entropy_grad is not None:
        e = tl.div_rn(tl.load(entropy_grad + row), t)
    d = p * -1.0 * g - p * (tl.maximum(x, LEAST) + tl.load(entropy + row)) * e
    target = tl.load(targets + row)
    d = tl.where(c == target, d + g, d)
    dz += row * V
    tl.store(dz + c, d.to(dz.dtype.element_ty), mask=inside)


def _on_logits(kernel, work, z, *args):
    """A row of z (M, V) is one program's work."""
    M, V = z.shape
    on_rows(kernel, M, work * M * V, (z, *args, V), (M,), _lanes(V))


def softmax_stats(z, t):
    """Of each row of logits z (M, V) the largest z / t and the log of the sum of exp(z / t - largest): (M, 2)."""
    stats = z.new_empty(len(z), 2, dtype=torch.float32)
    _on_logits(triton_softmax_stats, 10, z, t, stats)
    return stats


def _kept_logits(first, h, weight, targets, t, rule):
    """The logits (m, V) of the rows h (m, C), `first` of all and the next, -inf where the rule leaves a token out."""
    z = head_logits(h, weight)
    if rule is None:
        return z
    cuts, kept, found = rule
    here = (kept[0] >= first) & (kept[0] < first + len(h))
    rows, columns = kept[:, here]
    known = rows - first
    every = torch.arange(len(h), device=h.device)
    rows = torch.cat([known, every])
    columns = torch.cat([columns, targets])  # a token that was drawn is kept in any case
    values = z[rows, columns]
    if len(known.unique()) < len(h):  # else there is nothing left to find
        cut(z, cuts.expand(len(h), 3), t)
    z[known] = -math.inf
    z[rows, columns] = values
    if found is not None:
        pairs = (z > -math.inf).nonzero().t()
        found.append(pairs + torch.tensor([[first], [0]], device=h.device))
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
        chunks = zip(*(x.split(CHUNK) for x in rows))
        for i, (h, of_chunk, *rest) in enumerate(chunks):
            z = _kept_logits(i * CHUNK, h, weight, rest[0], t, rule)
            _on_logits(triton_softmax_stats, 10, z, t, of_chunk)
            _on_logits(triton_token_logprobs, 10, z, t, of_chunk, *rest)
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
        chunks = zip(*(x.split(CHUNK) for x in rows))
        for i, (h, *args) in enumerate(chunks):
            if entropy_grad is None:
                args.append(None)
            z = _kept_logits(i * CHUNK, h, weight, args[1], t, ctx.rule)
            dz = z if h.dtype == z.dtype else torch.empty_like(z, dtype=h.dtype)
            on_elements(triton_token_grads, z.shape, 20, z, t, *args, dz)
            d_hidden.append(matmul(dz, weight))
            if d_weight is not None:
                matmul(dz.t(), h, out=d_weight)
        if d_weight is not None:
            d_weight = d_weight.to(weight.dtype)
        return torch.cat(d_hidden), d_weight, None, None, None


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
    t = hidden.new_full((1,), temperature, dtype=torch.float32)  # a copy would wait for the card
    targets = targets.long().contiguous()
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
    z = x.reshape(-1, max(1, x.shape[-1])).contiguous()
    t = z.new_ones(1, dtype=torch.float32)
    stats = softmax_stats(z, t)
    on_elements(triton_log_softmax, z.shape, 10, z, t, stats, out)
    return out


def softmax(x, dim, half_to_float):
    """aten::_softmax along the last dim, for formulas in plain torch: no log-prob needs it."""
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
    """The distribution of draws, and so of log-probs: the softmax of logits / temperature over the kept tokens."""

    temperature: float = 1.0
    top_p: float = 1.0  # 1: all
    top_k: int = 0  # 0: all
    min_p: float = 0.0  # as a part of the likeliest token's probability; 0: all

    def cuts(self):
        """Whether it leaves out any token."""
        return self[1:] != Sampling()[1:]


@triton.jit
def _rank_int64(x):
    """`_rank`."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _ranked(z, t, m, c, V: constexpr):
    """(rank, mass) of the tokens c of a row."""
    logits = tl.load(z + c, mask=c < V, other=float("-inf"))
    x = tl.div_rn(logits.to(tl.float32), t)
    rank = _rank_int64(x)
    mass = (_exp(x - m) * 2.0**30).to(tl.int64)
    return rank, mass


@triton.jit
def _all_above(z, t, m, rank, V: constexpr, BLOCK: constexpr):
    """`_above`."""
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


def cut(z, rules, t=None):
    """
    Writes -inf over those of the logits z (M, V), at temperatures t (1,) or 1, that a rule leaves out. rules (M, 3)
    float32: top_p, top_k and min_p of each row, as in Sampling.
    """
    fits = z.is_contiguous() and rules.shape == (len(z), 3)
    check(fits, "logits {}, rules {}: (M, V), contiguous, and (M, 3) are needed", z, rules)
    t = z.new_ones(1, dtype=torch.float32) if t is None else t
    _on_logits(triton_cut, 100, z, t, softmax_stats(z, t), rules.contiguous())


# ------------------------------------------------------------------------------------------------------------------
# the embedding's gradient: dw[v] = sum of the gradients of v's tokens, in their order
#
# The loop goes from token to token. On Triton a stable sort brings equal ids together, and one program adds a run of
# them; no atomics.


@triton.jit(do_not_specialize=["N"])
def triton_embedding_backward(grad, ids, order, out, pad, N, C, BLOCK: constexpr):
    """One program per run of equal ids: the others see that they are not the first of one."""
    i = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(ids + i)
    previous = tl.load(ids + i - 1, mask=i > 0, other=-1)
    if (v != previous) & (v != pad):
        inside = c < C
        acc = tl.zeros([BLOCK], tl.float32)
        same = 1
        while same == 1:
            row = grad + tl.load(order + i) * C
            acc += tl.load(row + c, mask=inside, other=0.0).to(tl.float32)
            i += 1
            following = tl.load(ids + i, mask=i < N, other=-1)
            same = (following == v).to(tl.int32)
        out += v * C
        tl.store(out + c, acc.to(out.dtype.element_ty), mask=inside)


def embedding_backward(grad, ids, rows, padding_idx, scale_grad_by_freq):
    """aten::embedding_dense_backward: grad (..., C) of ids (...) -> (rows, C)."""
    check(not scale_grad_by_freq, "scale_grad_by_freq=True: the embedding's gradient is written without it")
    check(grad.shape[:-1] == ids.shape, "grad {} of ids {}: one row for each is needed", grad, ids)
    C = grad.shape[-1]
    out = grad.new_zeros(rows, C)
    grad = grad.reshape(-1, C).contiguous()
    ids = ids.flatten().long()
    if not use_triton(grad):
        loops.cpu_embedding_backward(*map(host.flat, (grad, ids, out)), C, padding_idx)
        return out
    check_operands(grad)
    ids, order = torch.sort(ids, stable=True)
    N = len(ids)
    on_elements(triton_embedding_backward, (N, C), 0, grad, ids, order, out, padding_idx, N)
    return out


# ------------------------------------------------------------------------------------------------------------------
# the sampler's noise: no sum at all, but a hash of the sample's seed, the position and the token, so that no neighbour
# and no other step can be seen in it. A draw is a largest number and a smallest column, neither of which has an order.


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
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    h = tl.minimum(_murmur_hash_uint32(seed, position, c), 0xFFFFFFFE)
    h = h.to(tl.float64)
    u = tl.fma(h, tl.full(h.shape, 2.0**-64 + 2.0**-96, tl.float64), h * 2.0**-32)  # h / (2^32 - 1), rounded once
    inside = c < V
    logprobs += row * V
    score = tl.load(logprobs + c, mask=inside, other=float("-inf")).to(tl.float64)
    score -= _log(tl.minimum(_log(u) * -1.0, 1.7976931348623157e308))
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
    fixed after 0.5.17). Of 2^32 - 2, u is 1 - 2^-32 and the noise 22.2, so the two largest hashes now stand for the
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
        host.share(loops.cpu_draw, B, 60 * B * V, *args, tokens, V)
        return tokens
    grid = B, -(-V // ELEMENTS)
    scores = logprobs.new_empty(grid, dtype=torch.float64)
    columns = logprobs.new_empty(grid, dtype=torch.int64)
    _launch(triton_draw, grid, *args, scores, columns, V=V, BLOCK=ELEMENTS, num_warps=2 * ELEMENT_WARPS, **EXACT)
    return columns.gather(1, scores.argmax(1, keepdim=True))


# ------------------------------------------------------------------------------------------------------------------
# bit_sums: sum over elements of bits * odd(row) * odd(column) mod 2^64, for hashes. Whole numbers' sums have no order.
#
# A model has hundreds of tensors: on Triton one launch takes them all, whose places it reads from a table.

BIT_SUM_TILE = 16, 256  # rows and columns of a program's step
PROGRAMS = 1024  # of a tensor, at most


def _table(operands, rows):
    """
    Of operands [(tensor, ..), ..] the addresses, and each first one's shape, from which one launch takes them all; and
    the launch's grid: a program takes so many rows at a time.
    """
    places = [(*(x.data_ptr() for x in each), *each[0].shape) for each in operands]
    most = max(len(each[0]) for each in operands)
    grid = min(-(-most // rows), PROGRAMS), len(places)
    return torch.tensor(places, device=operands[0][0].device), grid


@triton.jit
def triton_bit_sums(like, table, sums, ROWS: constexpr, COLUMNS: constexpr):
    """Adds up some rows of a tensor of like's type, then to its sum."""
    tensor = tl.program_id(1)
    table += tensor * 5
    x = tl.load(table).to(like.dtype)
    odd_rows = tl.load(table + 1).to(table.dtype)
    odd_columns = tl.load(table + 2).to(table.dtype)
    R = tl.load(table + 3)
    C = tl.load(table + 4)
    acc = tl.zeros([ROWS], tl.int64)
    for top in range(tl.program_id(0) * ROWS, R, tl.num_programs(0) * ROWS):
        r = top + tl.arange(0, ROWS)
        of_rows = tl.zeros([ROWS, COLUMNS], tl.int64)
        for first in range(0, C, COLUMNS):
            c = first + tl.arange(0, COLUMNS)
            inside = (r < R)[:, None] & (c < C)[None, :]
            odd = tl.load(odd_columns + c, mask=c < C, other=0)
            numbers = tl.load(x + r[:, None] * C + c[None, :], mask=inside, other=0).to(tl.int64)
            of_rows += numbers * odd[None, :]
        acc += tl.sum(of_rows, 1) * tl.load(odd_rows + r, mask=r < R, other=0)
    tl.atomic_add(sums + tensor, tl.sum(acc, 0))


def bit_sums(numbers):
    """
    [(x (R, C) of whole numbers, contiguous and all of one type, factors (R,) and (C,) int64), ..] -> their sums int64.
    """
    for x, odd_rows, odd_columns in numbers:
        fits = x.shape == (len(odd_rows), len(odd_columns))
        check(fits, "bit_sums: x {} beside {} and {} factors", x, len(odd_rows), len(odd_columns))
    if not use_triton(x):
        return torch.tensor([loops.cpu_bit_sum(*map(host.flat, each)) for each in numbers])
    table, grid = _table(numbers, BIT_SUM_TILE[0])
    sums = table.new_zeros(len(table))
    _launch(triton_bit_sums, grid, x, table, sums, *BIT_SUM_TILE, num_warps=4)
    return sums


# ------------------------------------------------------------------------------------------------------------------
# AdamW: m = m + (1 - b1) (g - m), v = b2 v + (1 - b2) g^2, w = w (1 - lr decay) - lr / c1 m / (sqrt(v / c2) + eps),
# c = 1 - b^step (Loshchilov and Hutter 2019, algorithm 2). Element by element, so there is no order; but torch's own
# rounds as a CPU's vectors and a GPU's compiler have it.


@triton.jit
def triton_adamw(like, table, rest1, b2, rest2, keep, rate, root, eps, BLOCK: constexpr):
    table += tl.program_id(1) * 5
    w = tl.load(table).to(like.dtype)
    g = tl.load(table + 1).to(like.dtype)
    m = tl.load(table + 2).to(like.dtype)
    v = tl.load(table + 3).to(like.dtype)
    N = tl.load(table + 4)
    for start in range(tl.program_id(0) * BLOCK, N, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
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


@functools.lru_cache(2)  # all parameters are at the same step
def _bias_correction(beta, step):
    """1 - beta^step. Decimal: for powers of floats Python asks the C library, which computes them in its own way."""
    return float(1 - Decimal(beta) ** step)


class AdamW(torch.optim.AdamW):
    """torch's, with a step of our own, for float32 weights (contiguous) whose states are there."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            states = [self.state[w] for w in group["params"]]
            if not states:
                continue
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            b1, b2 = group["betas"]
            c1, c2 = (_bias_correction(b, int(steps[0])) for b in (b1, b2))
            lr = group["lr"]
            keep = 1 - lr * group["weight_decay"]
            factors = 1 - b1, b2, 1 - b2, keep, lr / c1, math.sqrt(c2), group["eps"]
            tensors = [(w, w.grad, s["exp_avg"], s["exp_avg_sq"]) for w, s in zip(group["params"], states)]
            like = tensors[0][0]
            if use_triton(like):
                table, grid = _table([[x.view(-1) for x in each] for each in tensors], ELEMENTS)
                _launch(triton_adamw, grid, like, table, *factors, ELEMENTS, num_warps=2 * ELEMENT_WARPS, **EXACT)
            else:
                for each in tensors:
                    N = each[0].numel()
                    host.share(loops.cpu_adamw, N, 20 * N, *each, *factors)


# ------------------------------------------------------------------------------------------------------------------
# what formulas in plain torch need: sum and mean, which torch cuts into parts for a GPU's SMs or a CPU's vectors; on a
# CPU also exp, log, std and sqrt, which follow its vectors or its maker. Sums are `row_sums` in float64, rounded once.


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
        shape = [1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims]
        return y.view(shape)

    return operator


def _mean(rows):
    return row_sums(rows) / rows.shape[1]


def _std(rows, correction=None):
    off = rows - _mean(rows)[:, None]
    if correction is None:
        correction = 1
    variance = row_sums(off * off) / (rows.shape[1] - correction)
    return variance.sqrt()


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


def _divide(x, y):
    """
    aten::div.Tensor. By a number torch would multiply by its rounded reciprocal on a card; by a tensor that lies there
    it divides.
    """
    dtype = torch.result_type(x, y)
    if dtype in (torch.float32, torch.float64) and (not isinstance(y, torch.Tensor) or y.is_cpu and y.dim() == 0):
        y = x.new_full((), float(y), dtype=dtype)
    if not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    return torch.div(x, y, out=x.new_empty(0, dtype=dtype))


ON_CARDS = {
    "exp": loops.element_wise(lambda x, y: on_numbers(triton_exp, 0, x, y), torch.exp),
    "log": loops.element_wise(lambda x, y: on_numbers(triton_log, 0, x, y), torch.log),
    "div.Tensor": _divide,
}


# ------------------------------------------------------------------------------------------------------------------
# the switch, thrown in the trainer and in the engine's scheduler process alike

_library = None


def enable_batch_invariant(cpu_threads=1, cores=""):
    """
    Replaces torch's kernels of the operators named below by ours, in this process, for CPU and CUDA tensors.
    cpu_threads: of a loop. cores: the path of host.share_cores; then a loop has an equal share of the cores with the
    other ranks that work.
    """
    global _library
    host.prepare(cpu_threads, cores)
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
        "std.correction": _reduction(_std, torch.std),
        "embedding_dense_backward": embedding_backward,
    }
    on_cpu = {
        "exp": loops.aten_exp,
        "log": loops.aten_log,
        "sqrt": loops.aten_sqrt,  # a card's own is as IEEE 754 says
        "pow.Scalar": loops.aten_pow,
    }
    if INTERPRET:
        on_cpu |= ON_CARDS
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that aten's kernels are replaced, which is what we want
        tables = dict(CPU=both | on_cpu, CUDA=both | ON_CARDS)
        for device, operators in tables.items():
            for name, operator in operators.items():
                _library.impl(name, operator, device, allow_override=True)


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
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # tests: CPU tensors take the Triton path too
FLOAT32 = False  # `choose_dtype` sets it: cards compute in float32, and then with the loops' bits (onecurve/float32.py)


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


@functools.cache  # torch takes microseconds to answer, and every launch needs it
def _card_of(device):
    return CARDS.get(torch.cuda.get_device_capability(device))


def card(x):
    """The Card that x lies on, None if CARDS has none; of a tensor that is on no GPU, as in tests, a Hopper."""
    return _card_of(x.device) if x.is_cuda else CARDS[9, 0]


def device_kind(device):
    """'cpu', or a GPU with its compute capability, 'cuda 9.0': what has bits of its own. 'cpu' is float32 anywhere."""
    return "cpu" if device == "cpu" or FLOAT32 else "cuda {}.{}".format(*torch.cuda.get_device_capability())


def choose_dtype(device, dtype):
    """At a process's start: in what its models compute on this device. dtype: the config's key."""
    global FLOAT32
    FLOAT32 = device == "cuda" and dtype == "float32"


def compute_dtype(device):
    """Of the models on this device."""
    return torch.bfloat16 if device == "cuda" and not FLOAT32 else torch.float32


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
    if x.dtype != torch.float32 and (FLOAT32 or not by_triton):  # the loops would read other bits as float32
        raise ValueError(f"dtype={x.dtype}: the {'float32' if by_triton else 'CPU'} operators know float32")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dtype={x.dtype}: the Triton operators know bfloat16 and float32")


@functools.cache
def _float32():
    """Triton kernels with the loops' bits."""
    from onecurve import float32

    return float32


def on_rows(kernel, units, work, args, grid, config, loop=None):
    """
    On Triton the kernel on a grid of programs, with config, which follows from the shape alone. On a CPU, with the same
    args, the loop over `units`, which has `work` operations: that of the kernel's name unless another is given.
    """
    if use_triton(args[0]):
        _launch(kernel, grid, *args, **config)
    else:
        loop = loop or kernel.__name__.replace("triton_", "cpu_")
        host.share(getattr(loops, loop), units, work, *args)


def on_elements(kernel, shape, work, *args):
    """`on_rows` for elementwise work over `shape`, `work` operations each; the last argument is C."""
    R, C = shape
    config = dict(BLOCK=ELEMENTS, num_warps=ELEMENT_WARPS, **EXACT)
    grid = R, -(-C // ELEMENTS)
    on_rows(kernel, R, work * R * C, (*args, C), grid, config)


def on_numbers(kernel, work, x, *args):
    """`on_rows` for tensors as large as x, all contiguous, whose numbers have nothing to do with each other."""
    N = x.numel()
    grid = (-(-N // ELEMENTS),)
    if use_triton(x):
        _launch(kernel, grid, x, *args, N, BLOCK=ELEMENTS, num_warps=ELEMENT_WARPS, **EXACT)
    else:
        host.share(getattr(loops, kernel.__name__.replace("triton_", "cpu_")), N, work * N, x, *args)


def _launch(kernel, grid, *args, **config):
    if 0 in grid:
        return
    if FLOAT32:
        kernel = getattr(_float32(), kernel.__name__, kernel)
    tensor = next(x for x in args if isinstance(x, torch.Tensor))
    with torch.cuda.device_of(tensor):
        kernel[grid](*args, **config)


class _NoGradient:
    def save_for_backward(self, *_):
        pass

    mark_non_differentiable = save_for_backward


def _apply(function, *args):
    """function.apply(*args) if a gradient may be needed, else forward alone: `apply` is slower than some loops."""
    if torch.is_grad_enabled():
        return function.apply(*args)
    return function.forward(_NoGradient(), *args)


def _contiguous_like(x):
    """A new tensor for a result of x's shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _block(width):
    """The power of two that holds a row; at least 16, for small tiles' sake."""
    return max(16, triton.next_power_of_2(width))
