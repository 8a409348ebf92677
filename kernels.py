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

Each operator is one public function, which checks its operands and picks by device: `cpu_*` and `Cpu*`, plain torch in
float32, which is also the reference, or `triton_*` and `Triton*` on an NVIDIA GPU of compute capability 9.0 (bfloat16,
or float32 without TF32). A section is always in this order: the equation, why its order is fixed, the CPU's path, the
Triton kernels, the autograd Function that launches them, the public function.

What torch 2.11 does on a CPU by itself, and what we do about it:

    matmul        rows differ unless their number is a multiple of 16, and columns differ between thread counts
                  unless *their* number is: so both are padded with zeros to a multiple of TILE. On Intel processors
                  MKL also cuts sums over some 400 terms between threads: `enable_batch_invariant` asks it not to.
    silu          the vectorised body and the scalar tail of torch's loop differ in the last bit, so the result
                  depends on a number's position: SwiGLU has x / (1 + exp(-x)), whose two operations agree.
    attention     SDPA adds a decode step in another order than a prefill: a softmax over fixed key tiles at absolute
                  positions, the same for packed training, chunked prefill and decode.
    RMSNorm, RoPE, log_softmax, embedding, elementwise arithmetic: already row-invariant, left as they are.

What the Triton kernels do about it:

    matmul        every sum of bfloat16 products is one chain of tensor-core steps of k16, in the order of K, in one
                  accumulator: no split-K. Within a step the tensor core adds 16 products and the accumulator by the
                  exponents alone (MMA-Sim, a public model of it), so tile shapes, warps, stages, TMA or pointers and
                  swapping A and B do not enter, and may follow the number of rows.
    row sums      `tl.sum` adds in an order that depends on the layout, which Triton takes from block shape, warps and
                  the alignment of the pointers: all three are made functions of the row's length alone.
    attention     key tiles of 64 and splits of 1024 keys at absolute positions, one inner loop, one merge; the softmax
                  denominator is a product with ones, on the tensor core.
    contraction   the compiler may fuse a * b + c in one kernel and not in its twin: switched off in every kernel that
                  computes on rows or elements (EXACT); where a fused step pays it is written as `tl.fma`.
    gradients     no atomics: sums over rows go in row order, cut at constants of this file.

`tests/test_kernels.py` checks the CPU operators bit for bit, `tests/test_triton.py` what can be known of the others
without a GPU; and a run checks the sum of them at every token it trains on.

Letters: N tokens of a packed batch, B sequences, Tq the most queries of a sequence, L keys (a multiple of TILE_KV),
Hq / Hkv query / key-value heads, D head dim, V vocabulary; M, N, K of a matmul (M, K) @ (K, N).
"""

import functools
import os
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

# Part of the order of addition: whoever tunes one of these changes the bits of engine and trainer alike, and with them
# every curve that was ever recorded. On both devices:
CHUNK = 1024  # rows of logits held at a time: the head's weight gradient is added chunk by chunk

# On a CPU:
TILE = 16  # rows and columns of a matmul come in multiples of this
TILE_Q = 8  # query rows of a softmax tile come in multiples of this
TILE_KV = 16  # keys per softmax tile, counted from position 0 of the sequence; small, for the short sequences of a CPU

# On Triton, where block and warps are the layout in which `tl.sum` adds a row:
KEYS, KEYS_FLOAT32 = 64, 16  # keys per softmax tile, counted from position 0 of the sequence
SPLIT = 1024  # keys whose softmax is taken apart from the others', counted from position 0: decode's unit of work
SUM_ROWS = 64  # rows a weight gradient adds before the next level of sums
MIN_BLOCK = 16  # a row's block is the power of two that holds it, and at least this
NORM_BLOCK = 2048  # numbers a norm's program holds: as many rows as fit, or one long row
NORM_WARPS, LONG_NORM_WARPS = 4, 8  # of a norm's program; long is a row beyond NORM_BLOCK
LANES, LANE_WARPS = 4096, 8  # partial sums of a long row (log-probs, `row_sums`), and the warps that hold them
DELTA_ROWS, DELTA_WARPS = 16, 4  # rows and warps of a program of rowsum(do * o), in attention's backward

# Speed only, never seen in the bits. The figures are guesses until measured on a card, as are those of
# `_matmul_config` and the warps and stages of attention.
SMS = 132  # of an H100 or H200
DECODE_ROWS = 64  # query rows of a decode tile: 16 would be enough, but mma.sync instead of wgmma
DECODE_PROGRAMS = 528  # of a decode step: with fewer (token, head) pairs, the splits go to several; 4 per SM
PREFILL_ROWS, BACKWARD_ROWS = 128, 64  # query rows of a tile of a prefill or a packed batch, and of its backward
COLUMNS = 256  # that a program of `triton_column_sums` adds, each for itself
ELEMENTS, ELEMENT_WARPS = 1024, 4  # numbers of a row that one program of an elementwise kernel takes, and its warps

EXACT = {"enable_fp_fusion": False}  # no a * b + c in one rounding, unless it is written as one
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # tests: CPU tensors take the Triton path too


# ------------------------------------------------------------------------------------------------------------------
# which path


def use_triton(x):
    """Whether x takes the Triton path: plain torch is for CPUs, and for no other device."""
    return x.device.type != "cpu" or INTERPRET


def check_operands(x, *others):
    """Raises ValueError unless the Triton kernels can take x, and the others are of its device and dtype."""
    if not INTERPRET and (x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) != (9, 0)):
        raise ValueError(f"device={x.device}: the Triton operators are written for compute capability 9.0")
    for y in others:
        if (y.dtype, y.device) != (x.dtype, x.device):
            raise ValueError(f"{y.dtype} on {y.device} beside {x.dtype} on {x.device}: operands must agree")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dtype={x.dtype}: the Triton operators know bfloat16 and float32")


def _launch(kernel, grid, *args, **config):
    if 0 not in grid:
        with torch.cuda.device_of(next(x for x in args if isinstance(x, torch.Tensor))):
            kernel[grid](*args, **config)


def _launch_on_elements(kernel, rows, width, *args, **flags):
    """For a kernel that computes number by number; a program takes ELEMENTS numbers of a row."""
    grid = rows, triton.cdiv(width, ELEMENTS)
    _launch(kernel, grid, *args, **flags, BLOCK=ELEMENTS, num_warps=ELEMENT_WARPS, **EXACT)


def _aligned(x):
    """x, contiguous and at a multiple of 16 bytes: Triton's layout, and with it `tl.sum`, may depend on these."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _contiguous_like(x):
    """A new tensor for a result of x's shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _block(width):
    return max(MIN_BLOCK, triton.next_power_of_2(width))


# ------------------------------------------------------------------------------------------------------------------
# matmul: c[m, n] = sum_k a[m, k] b[k, n]. `mm` and `addmm` replace the aten kernels, so that any model reaches them,
# forward and backward.
#
# On a CPU each call has whole tiles only, so that torch has nothing to choose. On Triton one accumulator takes the k16
# steps of its element in the order of K, whatever tile the element is in; other rows and columns never enter it, and
# the zeros that fill the last step of K add nothing.


def _pad(x, rows, cols):
    """x (R, C) with zeros appended up to a multiple of `rows` rows and `cols` columns."""
    down, right = -x.shape[0] % rows, -x.shape[1] % cols
    return F.pad(x, (0, right, 0, down)) if down or right else x


def cpu_mm(a, b):
    """Zero rows and columns fill the last tiles."""
    (M, _), N = a.shape, b.shape[1]
    a, b = _pad(a, TILE, 1), _pad(b, 1, TILE)
    out = a.new_empty(a.shape[0], b.shape[1])
    torch.mm(a, b, out=out)  # aten::mm.out is torch's own kernel: only aten::mm is replaced by this function
    return out[:M, :N].contiguous()


@triton.jit
def _tile_at(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of an output tile; GROUP rows of tiles go together, so that L2 serves b to all of them."""
    down, across = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = tile // (GROUP * across) * GROUP
    height = min(down - first, GROUP)
    tile = tile % (GROUP * across)
    return first + tile % height, tile // height


@triton.jit
def triton_matmul(
    a, b, c, M, N, K, a_m, a_k, b_k, b_n, c_m, c_n,
    ADD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Any strides, any alignment. ADD: the chain goes on from what c holds."""
    row, col = _tile_at(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, 8)
    m, n, k = row * BLOCK_M + tl.arange(0, BLOCK_M), col * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    inside_m, inside_n = (m < M)[:, None], (n < N)[None, :]
    m, n = m.to(tl.int64)[:, None], n.to(tl.int64)[None, :]
    a += m * a_m + k[None, :].to(tl.int64) * a_k
    b += n * b_n + k[:, None].to(tl.int64) * b_k
    c += m * c_m + n * c_n
    inside = inside_m & inside_n
    acc = tl.load(c, mask=inside, other=0.0) if ADD else tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for left in range(K, 0, -BLOCK_K):
        x = tl.load(a, mask=inside_m & (k < left)[None, :], other=0.0)
        y = tl.load(b, mask=inside_n & (k < left)[:, None], other=0.0)
        acc = tl.dot(x, y, acc, input_precision="ieee")
        a += a_k * BLOCK_K
        b += b_k * BLOCK_K
    tl.store(c, acc.to(c.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["K", "PROGRAMS"])  # as a constant, K = 1 would be laid out in too much shared memory
def triton_matmul_tma(
    c, a, b, M, N, K, c_m, c_n, PROGRAMS,
    A_MK: tl.constexpr, B_NK: tl.constexpr, ADD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The same chain, fed by the copy engine. A_MK, B_NK: the descriptor's matrix lies (M, K), (N, K), K contiguous."""
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N), PROGRAMS):
        row, col = _tile_at(tile, M, N, BLOCK_M, BLOCK_N, 8)
        m, n = row * BLOCK_M, col * BLOCK_N
        rows, cols = (m + tl.arange(0, BLOCK_M))[:, None], (n + tl.arange(0, BLOCK_N))[None, :]
        at = c + rows.to(tl.int64) * c_m + cols.to(tl.int64) * c_n
        inside = (rows < M) & (cols < N)
        acc = tl.load(at, mask=inside, other=0.0) if ADD else tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            x = a.load([m, k]) if A_MK else a.load([k, m]).T
            y = b.load([n, k]).T if B_NK else b.load([k, n])
            acc = tl.dot(x, y, acc, input_precision="ieee")
        tl.store(at, acc.to(c.dtype.element_ty), mask=inside)


def _matmul_config(M, N, dtype, tma, aligned):
    """
    (BLOCK_M, BLOCK_N, BLOCK_K, warps, stages): follows the shape for speed, and is never seen in the bits. Registers
    suffice for the largest tiles where TMA loads, and for the very largest where the result's rows are aligned too.
    """
    if dtype == torch.float32:
        return 64, 64, 16, 4, 2
    if N <= 64:  # decode after the swap: the weights' bytes are the whole cost, so many of them under way
        stages = 4 if N <= 32 else 3
        return 64, max(16, triton.next_power_of_2(N)), 128, 4, stages if M > 64 * SMS else 2 * stages
    if not tma:
        return 128, 64, 32, 8, 3
    table = ((128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (64, 128, 64, 4, 4))
    for block_m, block_n, block_k, warps, stages in table[not aligned :]:
        if triton.cdiv(M, block_m) * triton.cdiv(N, block_n) >= SMS:
            return block_m, block_n, block_k, warps, stages
    return 64, 64, 128, 4, 3


def _for_tma(x):
    """(x or its transpose, whether K is the contiguous dim) of x (rows, K), or None where TMA cannot read x."""
    contiguous_k = x.stride(1) == 1
    y = x if contiguous_k else x.t()
    row = y.stride(0)
    if y.stride(1) != 1 or y.data_ptr() % 16 or row * y.element_size() % 16 or row < y.shape[1]:
        return None
    return y, contiguous_k


def matmul(a, b, out_dtype=None, out=None):
    """
    Triton's a (M, K) @ b (K, N) -> (M, N); any strides; accumulated in float32.

    out_dtype: of the result, a's unless given. out: a float32 result to which the product is added, in the same chain.
    """
    check_operands(a, b)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"shapes {tuple(a.shape)} and {tuple(b.shape)} do not multiply")
    (M, K), N, add = a.shape, b.shape[1], out is not None
    result = c = out if add else a.new_empty(M, N, dtype=out_dtype or a.dtype)
    if 0 in c.shape:
        return result
    if M <= 64 < N:  # the weights' columns become the rows: c^T = b^T a^T
        a, b, c, M, N = b.t(), a.t(), c.t(), N, M
    x, y = (_for_tma(a), _for_tma(b.t())) if K else (None, None)
    tma, aligned = bool(x and y), c.stride(0) % 16 == 0
    block_m, block_n, block_k, warps, stages = _matmul_config(M, N, a.dtype, tma, aligned)
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    config = dict(BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages)
    if tma:
        programs = min(tiles, SMS) if block_n == 256 else tiles
        blocks = ([block, block_k] if k else [block_k, block] for block, k in ((block_m, x[1]), (block_n, y[1])))
        descriptors = [TensorDescriptor.from_tensor(t, block) for (t, _), block in zip((x, y), blocks)]
        args = (c, *descriptors, M, N, K, *c.stride(), programs, x[1], y[1], add)
        _launch(triton_matmul_tma, (programs,), *args, **config)
    else:
        _launch(triton_matmul, (tiles,), a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride(), add, **config)
    return result


def mm(a, b):
    """aten::mm, a (M, K) @ b (K, N) -> (M, N)."""
    return matmul(a, b) if use_triton(a) else cpu_mm(a, b)


def addmm(bias, a, b, *, beta=1, alpha=1):
    """aten::addmm, beta * bias + alpha * (a @ b), rounded once; torch's own starts the sum with the bias."""
    out = matmul(a, b, out_dtype=torch.float32) if use_triton(a) else cpu_mm(a, b)
    if alpha != 1:
        out = out * alpha
    return (out + (bias if beta == 1 else bias * beta)).to(a.dtype)


# ------------------------------------------------------------------------------------------------------------------
# row_sums: y_r = sum_c x_rc, for the gradient norm
#
# On a CPU the row's two halves, padded to a power of two, are added until one is left. On Triton LANES partial sums,
# each in order, and then their sum. Both orders follow from C.


def cpu_row_sums(x):
    width = triton.next_power_of_2(max(1, x.shape[1]))
    x = F.pad(x, (0, width - x.shape[1]))
    while width > 1:
        width //= 2
        x = x[:, :width] + x[:, width:]
    return x[:, 0]


@triton.jit(do_not_specialize=["C"])
def triton_row_sums(x, out, C, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    x += row.to(tl.int64) * C
    acc = tl.zeros([BLOCK], tl.float64)
    for first in range(0, C, BLOCK):
        acc += tl.load(x + first + i, mask=first + i < C, other=0.0)
    tl.store(out + row, tl.sum(acc, 0))


def row_sums(x):
    """
    The sums of x (R, C) float64 along its rows -> (R,).

    A row is one program's work: cut a long tensor into rows of one fixed length first.
    """
    if x.dtype != torch.float64:
        raise ValueError(f"dtype={x.dtype}: row_sums adds float64")
    if not use_triton(x):
        return cpu_row_sums(x)
    out, x = x.new_empty(len(x)), _aligned(x)
    block = min(LANES, _block(x.shape[1]))
    _launch(triton_row_sums, (len(x),), x, out, x.shape[1], BLOCK=block, num_warps=LANE_WARPS, **EXACT)
    return out


# ------------------------------------------------------------------------------------------------------------------
# RMSNorm: y_i = w_i x_i r, r = (mean_j x_j^2 + eps)^-1/2 (Zhang and Sennrich 2019, eq. 4).
# With n = x r, h = g w: dx = r (h - n mean(h n)), dw = sum over rows of g n.
#
# A program holds whole rows, and how many, in which block and by how many warps follows from the row's length, which is
# a constant of the compiled kernel: so `tl.sum` has one order per length. dw is added by blocks of SUM_ROWS rows.


def cpu_rms_norm(x, weight, eps):
    """In float32, and returned so."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


@triton.jit(do_not_specialize=["R"])
def triton_rms_norm(x, weight, y, scale, eps, R, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)[None, :]
    inside, row = (row < R)[:, None] & (c < C), row.to(tl.int64)
    at = row[:, None] * C + c
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(v * v, 1) / C + eps)
    tl.store(scale + row, r, mask=row < R)
    w = tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(y + at, (v * r[:, None] * w).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["R"])
def triton_rms_norm_backward(
    grad, x, weight, scale, dx, dw, R, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """dx of STEPS * ROWS rows, and their share of dw."""
    block, c = tl.program_id(0), tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(STEPS):
        row = (block * STEPS + step) * ROWS + tl.arange(0, ROWS)
        inside, row = (row < R)[:, None] & (c < C), row.to(tl.int64)
        at = row[:, None] * C + c
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(scale + row, mask=row < R, other=0.0)[:, None]
        unit = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * r
        acc += g * unit
        g = g * w
        g = r * (g - unit * (tl.sum(g * unit, 1) / C)[:, None])
        tl.store(dx + at, g.to(dx.dtype.element_ty), mask=inside)
    tl.store(dw + block.to(tl.int64) * C + c, tl.sum(acc, 0)[None, :], mask=c < C)


@triton.jit(do_not_specialize=["R"])
def triton_column_sums(x, out, R, C, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out (R / ROWS, C): ROWS rows of x (R, C), added one after the other."""
    block, col = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for i in range(ROWS):
        row = block * ROWS + i
        acc += tl.load(x + row.to(tl.int64) * C + col, mask=(col < C) & (row < R), other=0.0)
    tl.store(out + block.to(tl.int64) * C + col, acc, mask=col < C)


def _sum_of_rows(x):
    """(R, C) -> (C,) float32: blocks of SUM_ROWS rows in order, then blocks of those sums, until one is left."""
    while len(x) > 1:
        out = x.new_empty(triton.cdiv(len(x), SUM_ROWS), x.shape[1])
        grid = len(out), triton.cdiv(x.shape[1], COLUMNS)
        _launch(triton_column_sums, grid, x, out, *x.shape, ROWS=SUM_ROWS, BLOCK=COLUMNS, **EXACT)
        x = out
    return x[0]


def _norm_config(C):
    block = _block(C)
    if block > 16384:
        raise ValueError(f"width={C}: a norm's row must fit one program, at most 16384")
    warps = LONG_NORM_WARPS if block > NORM_BLOCK else NORM_WARPS
    return dict(ROWS=max(1, NORM_BLOCK // block), BLOCK=block, num_warps=warps, **EXACT)


class TritonRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        x, weight, C = _aligned(x), _aligned(weight), x.shape[-1]
        R, config = x.numel() // max(1, C), dict(C=C, **_norm_config(C))
        y, scale = _contiguous_like(x), x.new_empty(R, dtype=torch.float32)
        _launch(triton_rms_norm, (triton.cdiv(R, config["ROWS"]),), x, weight, y, scale, eps, R, **config)
        ctx.save_for_backward(x, weight, scale)
        ctx.config = config
        return y

    @staticmethod
    def backward(ctx, grad):
        (x, weight, scale), config, dx = ctx.saved_tensors, ctx.config, _contiguous_like(grad)
        R, steps = len(scale), max(1, SUM_ROWS // config["ROWS"])
        blocks = triton.cdiv(R, steps * config["ROWS"])
        dw = weight.new_zeros(max(1, blocks), config["C"], dtype=torch.float32)
        args = *map(_aligned, (grad, x, weight, scale)), dx, dw, R
        _launch(triton_rms_norm_backward, (blocks,), *args, STEPS=steps, **config)
        return dx, _sum_of_rows(dw).to(weight.dtype), None


def rms_norm(x, weight, eps, residual=None):
    """
    x (..., C) * rsqrt(mean(x^2) + eps) * weight (C,), in float32, rounded once to x's dtype. Differentiable.

    With a residual: s = x + residual, rounded, takes x's place, and (y, s) is returned.
    """
    if weight.shape != x.shape[-1:] or residual is not None and residual.shape != x.shape:
        raise ValueError(f"weight {tuple(weight.shape)} or residual does not fit x {tuple(x.shape)}")
    s = x if residual is None else x + residual  # the engine has residuals, the trainer none: so it is no kernel's work
    if use_triton(x):
        check_operands(x, weight, s)
        y = TritonRMSNorm.apply(s, weight, eps)
    else:
        y = cpu_rms_norm(s, weight, eps).to(x.dtype)
    return y if residual is None else (y, s)


# ------------------------------------------------------------------------------------------------------------------
# norm_rope: n = x without weights, else as in RMSNorm, over one head; then (n1 c - n2 s, n2 c + n1 s), n1 and n2 its
# halves (Su et al. 2021, eq. 34, NeoX halves). Backward turns the other way, then as RMSNorm's.
#
# A row is one head of one token: one sum per head, over D alone.


def rope_table(inv_freq, positions):
    """cos and sin (N, D/2) float32 of position * inv_freq (Su et al. 2021, eq. 15); both sides take them from here."""
    angle = positions.float()[:, None] * inv_freq.float()
    return angle.cos(), angle.sin()


def cpu_norm_rope(q, k, cos, sin, q_weight, k_weight, eps):
    def turn(x, weight):
        x = x.float() if weight is None else cpu_rms_norm(x, weight, eps)
        (x1, x2), c, s = x.chunk(2, -1), cos[:, None], sin[:, None]
        return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1).to(q.dtype)

    return turn(q, q_weight), turn(k, k_weight)


@triton.jit
def _head(q, k, q_n, k_n, row, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr):
    """Where rows begin that are, token by token, the heads of q and then those of k."""
    token, head = (row // (HQ + HK)).to(tl.int64), row % (HQ + HK)
    return tl.where(head < HQ, q + token * q_n + head * D, k + token * k_n + (head - HQ) * D)[:, None]


@triton.jit
def _turn(cos, sin, row, i, inside, sign, H: tl.constexpr, D: tl.constexpr):
    """(i of a row's other half, cos, +-sin): y_i = x_i cos +- x_other sin, with `sign` in the first half."""
    at = (row // H).to(tl.int64)[:, None] * (D // 2) + i % (D // 2)
    s = tl.load(sin + at, mask=inside, other=0.0) * tl.where(i < D // 2, sign, -sign)
    return (i + D // 2) % D, tl.load(cos + at, mask=inside, other=0.0), s


@triton.jit(do_not_specialize=["R"])
def triton_norm_rope(
    q, k, q_weight, k_weight, cos, sin, q_out, k_out, eps, R, q_n, k_n,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, i = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)[None, :]
    inside = (row < R)[:, None] & (i < D)
    other, c, s = _turn(cos, sin, row, i, inside, -1.0, HQ + HK, D)
    at = _head(q, k, q_n, k_n, row, HQ, HK, D)
    x = tl.load(at + i, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(at + other, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        r = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        w = _head(q_weight, k_weight, 0, 0, row, HQ, HK, 0)
        x = x * r * tl.load(w + i, mask=inside, other=0.0).to(tl.float32)
        y = y * r * tl.load(w + other, mask=inside, other=0.0).to(tl.float32)
    out = _head(q_out, k_out, HQ * D, HK * D, row, HQ, HK, D) + i
    tl.store(out, (x * c + y * s).to(q_out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["R"])
def triton_norm_rope_backward(
    q_grad, k_grad, q, k, q_weight, k_weight, cos, sin, dq, dk, dw, eps, R, q_n, k_n,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """dq and dk of STEPS * ROWS rows, and their share of dw (2, D), for q's weight and k's."""
    block, i = tl.program_id(0), tl.arange(0, BLOCK)[None, :]
    q_acc, k_acc = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(STEPS):
        row = (block * STEPS + step) * ROWS + tl.arange(0, ROWS)
        inside = (row < R)[:, None] & (i < D)
        other, c, s = _turn(cos, sin, row, i, inside, 1.0, HQ + HK, D)
        at = _head(q_grad, k_grad, HQ * D, HK * D, row, HQ, HK, D)
        g = tl.load(at + i, mask=inside, other=0.0).to(tl.float32) * c
        g += tl.load(at + other, mask=inside, other=0.0).to(tl.float32) * s
        if NORM:
            unit = tl.load(_head(q, k, q_n, k_n, row, HQ, HK, D) + i, mask=inside, other=0.0).to(tl.float32)
            r = tl.rsqrt(tl.sum(unit * unit, 1) / D + eps)[:, None]
            unit *= r
            of_q = (row % (HQ + HK) < HQ)[:, None]
            q_acc += tl.where(of_q, g * unit, 0.0)
            k_acc += tl.where(of_q, 0.0, g * unit)
            w = _head(q_weight, k_weight, 0, 0, row, HQ, HK, 0)
            g *= tl.load(w + i, mask=inside, other=0.0).to(tl.float32)
            g = r * (g - unit * (tl.sum(g * unit, 1) / D)[:, None])
        tl.store(_head(dq, dk, HQ * D, HK * D, row, HQ, HK, D) + i, g.to(dq.dtype.element_ty), mask=inside)
    if NORM:
        tl.store(dw + block * 2 * D + i, tl.sum(q_acc, 0)[None, :], mask=i < D)
        tl.store(dw + block * 2 * D + D + i, tl.sum(k_acc, 0)[None, :], mask=i < D)


def _heads_lie_side_by_side(x):
    """Whether x (N, H, D) can be walked as it is, with the layout that a new tensor would have."""
    return x.stride()[1:] == (x.shape[2], 1) and x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0


class TritonNormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, q_weight, k_weight, eps):
        q, k = (x if _heads_lie_side_by_side(x) else _aligned(x) for x in (q, k))
        (N, HQ, D), HK, norm = q.shape, k.shape[1], q_weight is not None
        weights = (_aligned(q_weight), _aligned(k_weight)) if norm else (q, k)
        saved = q, k, *weights, _aligned(cos), _aligned(sin)
        q_out, k_out = _contiguous_like(q), _contiguous_like(k)
        R, config = N * (HQ + HK), dict(HQ=HQ, HK=HK, D=D, NORM=norm, **_norm_config(D))
        tail = eps, R, q.stride(0), k.stride(0)
        _launch(triton_norm_rope, (triton.cdiv(R, config["ROWS"]),), *saved, q_out, k_out, *tail, **config)
        ctx.save_for_backward(*saved)
        ctx.tail, ctx.config = tail, config
        return q_out, k_out

    @staticmethod
    def backward(ctx, q_grad, k_grad):
        (q, k, q_weight, *_), config = ctx.saved_tensors, ctx.config
        dq, dk, steps = _contiguous_like(q), _contiguous_like(k), max(1, SUM_ROWS // config["ROWS"])
        blocks = triton.cdiv(ctx.tail[1], steps * config["ROWS"])
        dw = q.new_zeros(max(1, blocks) if config["NORM"] else 1, 2 * config["D"], dtype=torch.float32)
        args = _aligned(q_grad), _aligned(k_grad), *ctx.saved_tensors, dq, dk, dw, *ctx.tail
        _launch(triton_norm_rope_backward, (blocks,), *args, STEPS=steps, **config)
        dw = _sum_of_rows(dw).to(q_weight.dtype).chunk(2) if config["NORM"] else (None, None)
        return dq, dk, None, None, *dw, None


def norm_rope(q, k, cos, sin, q_weight=None, k_weight=None, eps=0.0):
    """
    Rotary positions of q (N, Hq, D) and k (N, Hkv, D), each head normed before where there are weights (D,); cos, sin
    (N, D/2) float32 as `rope_table` gives them. All in float32, rounded once; new tensors; differentiable in q, k and
    the weights.
    """
    if cos.dtype != torch.float32 or sin.dtype != torch.float32 or cos.shape != (len(q), q.shape[2] // 2):
        raise ValueError(f"cos {cos.dtype} {tuple(cos.shape)}: float32 ({len(q)}, {q.shape[2] // 2}) is needed")
    weights = [w for w in (q_weight, k_weight) if w is not None]
    if len(weights) == 1 or any(w.shape != q.shape[2:] for w in weights):
        raise ValueError(f"weights {[tuple(w.shape) for w in weights]}: none, or two of q's head dim {q.shape[2]}")
    if not use_triton(q):
        return cpu_norm_rope(q, k, cos, sin, q_weight, k_weight, eps)
    check_operands(q, k, *weights)
    return TritonNormRope.apply(q, k, cos, sin, q_weight, k_weight, eps)


# ------------------------------------------------------------------------------------------------------------------
# SwiGLU: silu(g) u, silu(g) = g / (1 + exp(-g)) (Shazeer 2020, eq. 5); d silu / dg = s (1 + g (1 - s)), s = sigmoid(g).
#
# Element by element, so there is no order.


class CpuSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        g = gate.float()
        return (g / (1 + torch.exp(-g)) * up.float()).to(gate.dtype)

    @staticmethod
    def backward(ctx, grad):
        d, g, u = (x.float() for x in (grad, *ctx.saved_tensors))
        e = 1 + torch.exp(-g)  # infinite for a g below -88, and the gradient then 0: autograd's own would be NaN
        s = 1 / e
        return (d * u * (s * (1 + g * (1 - s)))).to(grad.dtype), (d * (g / e)).to(grad.dtype)


@triton.jit
def triton_swiglu(gate, up, out, C, gate_r, up_r, BLOCK: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + row * gate_r + c, mask=c < C, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_r + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(out + row * C + c, (g / (1 + tl.exp(-g)) * u).to(out.dtype.element_ty), mask=c < C)


@triton.jit
def triton_swiglu_backward(grad, gate, up, d_gate, d_up, C, gate_r, up_r, BLOCK: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.load(grad + row * C + c, mask=c < C, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_r + c, mask=c < C, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_r + c, mask=c < C, other=0.0).to(tl.float32)
    s = 1 / (1 + tl.exp(-g))
    tl.store(d_gate + row * C + c, (d * u * (s * (1 + g * (1 - s)))).to(d_gate.dtype.element_ty), mask=c < C)
    tl.store(d_up + row * C + c, (d * (g * s)).to(d_up.dtype.element_ty), mask=c < C)


class TritonSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        out, (R, C) = _contiguous_like(gate), gate.shape
        _launch_on_elements(triton_swiglu, R, C, gate, up, out, C, gate.stride(0), up.stride(0))
        return out

    @staticmethod
    def backward(ctx, grad):
        (gate, up), (R, C) = ctx.saved_tensors, grad.shape
        d_gate, d_up = _contiguous_like(gate), _contiguous_like(up)
        args = grad.contiguous(), gate, up, d_gate, d_up, C, gate.stride(0), up.stride(0)
        _launch_on_elements(triton_swiglu_backward, R, C, *args)
        return d_gate, d_up


def swiglu(gate, up):
    """silu(gate) * up, (..., C) each, in float32, rounded once; the rows may be strided. Differentiable."""
    if gate.shape != up.shape:
        raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} differ")
    C = gate.shape[-1]
    flat = [x.reshape(-1, C) if x.stride(-1) == 1 else x.contiguous().view(-1, C) for x in (gate, up)]
    if not use_triton(gate):
        return CpuSwiGLU.apply(*flat).view(gate.shape)
    check_operands(*flat)
    return TritonSwiGLU.apply(*flat).view(gate.shape)


# ------------------------------------------------------------------------------------------------------------------
# attention: o = sum_t p_t v_t / sum_t l_t, p_t = exp(q k_t^T * scale - m), l_t the row sums of p_t, over key tiles t of
# one sequence in order; m is the row's largest score, which has no order.
# Backward (Dao 2023, algorithm 2): ds = p * (do v^T - rowsum(do * o)).
#
# Tiles lie at absolute positions. A key in a row's future adds an exact zero, and so does a tile of them. So neither
# the batch, nor the chunk of a prefill, nor the pages of the cache can be seen.


class Plan:
    """
    Where the queries and keys of each sequence are; made once per forward, used by every layer.

    q_lens (B,) queries of each sequence, kv_lens (B,) its keys, of which the queries' are the last. Over a paged cache:
    page_table (any, >= max kv_lens), the cache row of each position, and requests (B,), the table's row of each
    sequence. Without: the keys are packed as the queries are.

    The Triton kernels read every number from the device: no step waits for it. A captured CUDA graph replays with what
    kv_lens, page_table and requests then hold; q_lens, of which the plan keeps running sums (B,), must stay. Keep the
    plan as long as the graph. The CPU makes its indices at the first use.
    """

    def __init__(self, q_lens, kv_lens, page_table=None, requests=None):
        self.q_lens, self.kv_lens, self.B = q_lens, kv_lens, len(q_lens)
        self.q_ends = q_lens.cumsum(0)
        self.page_table, self.requests = page_table, requests
        self._ends, self._tiles = {}, {}

    def ends(self, per_token, rows):
        """Triton's: running sums (B,) of the tiles of `rows` rows of each sequence, `per_token` rows to a token."""
        if (per_token, rows) not in self._ends:
            self._ends[per_token, rows] = ((self.q_lens * per_token + (rows - 1)) // rows).cumsum(0)
        return self._ends[per_token, rows]

    @functools.cached_property
    def cpu_rows(self):
        """
        q_rows (B, Tq), the row of each query in the packed batch; unpad (N,), the index into B * Tq of each packed
        query; kv_rows (B, L), the row of each key in the packed batch or in the cache. An unused entry repeats a valid
        row.
        """
        L = -(-int(self.kv_lens.max()) // TILE_KV) * TILE_KV
        Tq = L if self.page_table is None else int(self.q_lens.max())
        at = torch.arange(L, device=self.q_lens.device)
        valid = at[:Tq] < self.q_lens[:, None]
        q_rows = (self.q_ends - self.q_lens)[:, None] + torch.where(valid, at[:Tq], 0)
        unpad = valid.flatten().nonzero()[:, 0]
        if self.page_table is None:
            return q_rows, unpad, q_rows
        table = F.pad(self.page_table[self.requests, :L], (0, max(0, L - self.page_table.shape[1])))
        # an unused key repeats the sequence's first one: it is masked, but 0 * NaN of a foreign page would still be NaN
        return q_rows, unpad, torch.where(at < self.kv_lens[:, None], table, table[:, :1]).long()

    def cpu_tiles(self, heads, groups):
        """
        The keys cut into n tiles, for all layers: rows of (row, head) pairs (n * B * Hkv * TILE_KV,), and where a
        query does not see a key (n, B * Hkv, R, TILE_KV).
        """
        if (heads, groups) not in self._tiles:
            q_rows, _, kv_rows = self.cpu_rows
            rows = kv_rows.view(self.B, -1, TILE_KV).transpose(0, 1)[:, :, None]  # (n, B, 1, TILE_KV)
            rows = rows * heads + torch.arange(heads, device=rows.device)[:, None]
            at = torch.arange(kv_rows.shape[1], device=rows.device)
            q_at = (self.kv_lens - self.q_lens)[:, None] + at[: q_rows.shape[1]].repeat_interleave(groups)
            q_at = F.pad(q_at, (0, -q_at.shape[1] % TILE_Q)).repeat_interleave(heads, dim=0)  # (B * Hkv, R)
            self._tiles[heads, groups] = rows.flatten(), at.view(-1, 1, 1, TILE_KV) > q_at[:, :, None]
        return self._tiles[heads, groups]


def packed_plan(lengths, device=None):
    """The plan of a packed batch of whole sequences, `lengths` (B,) tokens each, for training."""
    lengths = torch.as_tensor(lengths, device=device)
    return Plan(lengths, lengths)


def paged_plan(q_lens, kv_lens, page_table, requests):
    """
    The plan of a prefill chunk or a decode step over a paged cache, which differ in these numbers only: see Plan.

    q_lens (B,) new tokens, kv_lens (B,) tokens in the cache with the new ones.
    """
    if any(x.device != page_table.device for x in (q_lens, kv_lens, requests)) or page_table.stride(1) != 1:
        raise ValueError("paged_plan: all four on one device, and the entries of a page_table's row side by side")
    return Plan(q_lens, kv_lens, page_table, requests)


def _queries(x, rows, groups):
    """Packed (N, Hq, D) -> (B * Hkv, R, D), the queries that share a key head as rows, R a multiple of TILE_Q."""
    (B, Tq), (_, Hq, D) = rows.shape, x.shape
    x = x[rows].view(B, Tq, Hq // groups, groups, D).transpose(1, 2).reshape(-1, Tq * groups, D)
    return F.pad(x, (0, 0, 0, -x.shape[1] % TILE_Q))


def _packed_queries(x, plan, heads, groups):
    """The inverse of `_queries`: (B * Hkv, R, D) -> (N, Hq, D)."""
    q_rows, unpad, _ = plan.cpu_rows
    (B, Tq), D = q_rows.shape, x.shape[-1]
    return x[:, : Tq * groups].view(B, -1, Tq, groups, D).transpose(1, 2).reshape(B * Tq, heads, D)[unpad]


class CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan, scale):
        (heads, D), groups = k.shape[1:], q.shape[1] // k.shape[1]
        rows, masked = plan.cpu_tiles(heads, groups)
        x, tiles = _queries(q, plan.cpu_rows[0], groups), len(masked)
        # (tiles * B * Hkv, TILE_KV, D)
        k, v = (t.reshape(-1, D).index_select(0, rows).view(-1, TILE_KV, D) for t in (k, v))
        s = torch.bmm(x.repeat(tiles, 1, 1), k.transpose(1, 2)).mul_(scale).view(masked.shape)
        s.masked_fill_(masked, float("-inf"))
        p = torch.exp(s.sub_(s.amax((0, 3), keepdim=True)))
        total = functools.reduce(torch.add, p.sum(-1, keepdim=True))
        out = functools.reduce(torch.add, torch.bmm(p.flatten(0, 1), v).view(tiles, *x.shape)) / total
        ctx.save_for_backward(x, k, v, out, p, total)
        ctx.plan, ctx.scale, ctx.heads = plan, scale, (q.shape[1], heads)
        return _packed_queries(out, plan, q.shape[1], groups)

    @staticmethod
    def backward(ctx, grad):
        x, k, v, out, p, total = ctx.saved_tensors
        plan, (q_heads, heads), (tiles, D) = ctx.plan, ctx.heads, (len(p), x.shape[-1])
        groups, (q_rows, unpad, _) = q_heads // heads, plan.cpu_rows
        # a gathered gradient would count a repeated (padding) row twice: those queries get zeros
        grad_rows = grad.new_zeros(q_rows.numel(), *grad.shape[1:])
        grad_rows[unpad] = grad
        every_row = torch.arange(q_rows.numel(), device=grad.device).view(q_rows.shape)
        do = _queries(grad_rows, every_row, groups)
        p = p / total
        dp = torch.bmm(do.repeat(tiles, 1, 1), v.transpose(1, 2)).view(p.shape)
        ds = (p * (dp - (do * out).sum(-1, keepdim=True)) * ctx.scale).flatten(0, 1)
        dq = functools.reduce(torch.add, torch.bmm(ds, k).view(tiles, *x.shape))
        dk = torch.bmm(ds.transpose(1, 2), x.repeat(tiles, 1, 1))
        dv = torch.bmm(p.flatten(0, 1).transpose(1, 2), do.repeat(tiles, 1, 1))

        def packed_keys(t):  # (tiles * B * Hkv, TILE_KV, D) -> (N, Hkv, D)
            t = t.view(tiles, -1, heads, TILE_KV, D).permute(1, 0, 3, 2, 4)
            return t.reshape(-1, heads, D)[unpad]

        return _packed_queries(dq, plan, q_heads, groups), packed_keys(dk), packed_keys(dv), None, None


# On Triton the softmax is online (Milakov and Gimelshein 2018; Dao 2023, algorithm 1). Per split of SPLIT keys, over
# its tiles of KEYS keys in order, with s = q k^T:
#     m' = max(m, max s), a = 2^((m - m') c), p = 2^(s c - m' c), l' = a l + p 1, o' = a o + p v, c = scale / ln 2,
# and over the splits in order the same with a split's (m, l, o) in a tile's place: `_merge`. A hidden key or tile of
# them changes no bit (m' = m, a = 1, p = 0), and no operation mixes rows. Backward has p = 2^(s c - lse).


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
    a, b = tl.exp2((m - top) * c), tl.exp2((m_new - top) * c)
    return top, den * a + l_new * b, o * a[:, None] + o_new * b[:, None]


@triton.jit
def _finish(m, den, o, c):
    """The output, and the logarithm of base 2 of the row's sum, which backward needs."""
    return o * tl.div_rn(1.0, den)[:, None], tl.fma(m, c, tl.log2(den))


@triton.jit
def _row_tile(tile, q_ends, tile_ends, b, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """
    (where the sequence starts in the pack, its length; of a tile's rows: the query of the sequence, the head of the
    group, its token in the pack, whether there is one).
    """
    start = _before(q_ends, b)
    length = _before(q_ends, b + 1) - start
    row = (tile - _before(tile_ends, b)) * ROWS + tl.arange(0, ROWS)
    query = row // GROUPS
    return start, length, query, row % GROUPS, (start + query).to(tl.int64), query < length


@triton.jit(do_not_specialize=["B", "splits", "LANES"])
def triton_attention(
    q, k, v, out, lse, part_m, part_l, q_ends, tile_ends, kv_lens, pages, requests, pages_r, c, B, splits, LANES,
    q_n, q_h, k_s, k_h, v_s, v_h,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, PAGED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A tile of rows, (query, head of the group) pairs. PARTS: out takes each split's sums for `triton_merge_parts`."""
    # the last tiles see the most keys: first come the long ones
    tile, head, lane = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b = _find(tile_ends, B, tile)
    if b == B:
        return
    start, length, query, group, token, valid = _row_tile(tile, q_ends, tile_ends, b, GROUPS, ROWS)
    kv_len = tl.load(kv_lens + b).to(tl.int32)
    position = kv_len - length + query
    last = tl.max(tl.where(valid, position, -1), 0) + 1  # keys that some row sees
    if PAGED:
        pages += tl.load(requests + b).to(tl.int64) * pages_r
    d, ones = tl.arange(0, D)[None, :], tl.full([KEYS, 16], 1.0, v.dtype.element_ty)
    column = (head * GROUPS + group).to(tl.int64)
    x = tl.load(q + (token * q_n + column * q_h)[:, None] + d, mask=valid[:, None], other=0.0)
    k += head.to(tl.int64) * k_h
    v += head.to(tl.int64) * v_h
    row = token * (HEADS * GROUPS) + column
    m, den, o = tl.full([ROWS], -1e30, tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, D], tl.float32)
    for split in range(lane, tl.cdiv(last, SPLIT), LANES):
        sm, so = tl.full([ROWS], -1e30, tl.float32), tl.zeros([ROWS, D], tl.float32)
        sums = tl.zeros([ROWS, 16], tl.float32)
        for first in range(split * SPLIT, min(last, (split + 1) * SPLIT), KEYS):
            at = first + tl.arange(0, KEYS)
            # foreign rows hold anything: 0 * NaN would be NaN, so neither k nor v is read past the sequence
            here = at < kv_len
            key = (tl.load(pages + at, mask=here, other=0) if PAGED else start + at).to(tl.int64)
            kt = tl.load(k + key[:, None] * k_s + d, mask=here[:, None], other=0.0)
            vt = tl.load(v + key[:, None] * v_s + d, mask=here[:, None], other=0.0)
            s = tl.dot(x, kt.T, input_precision="ieee")
            s = tl.where(at[None, :] <= position[:, None], s, float("-inf"))
            top = tl.maximum(sm, tl.max(s, 1))
            a = tl.exp2((sm - top) * c)
            p = tl.exp2(tl.fma(s, c, (-top * c)[:, None])).to(v.dtype.element_ty)
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
        tl.store(lse + row, den, mask=valid)


@triton.jit(do_not_specialize=["B", "splits"])
def triton_merge_parts(
    part_o, part_m, part_l, out, q_ends, kv_lens, c, B, splits, H: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The splits of one (token, head) row, in order."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(0) // H
    b = _find(q_ends, B, token)
    if b == B:
        return
    seen = tl.load(kv_lens + b).to(tl.int32) - _before(q_ends, b + 1) + token + 1
    one, d = tl.arange(0, 1), tl.arange(0, D)[None, :]
    m, den, o = tl.full([1], -1e30, tl.float32), tl.zeros([1], tl.float32), tl.zeros([1, D], tl.float32)
    for split in range(tl.cdiv(seen, SPLIT)):
        at = row * splits + split + one
        sm, sl, so = tl.load(part_m + at), tl.load(part_l + at), tl.load(part_o + at[:, None] * D + d)
        m, den, o = _merge(m, den, o, sm, sl, so, c)
    o, den = _finish(m, den, o, c)
    tl.store(out + (row + one)[:, None] * D + d, o.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["R"])
def triton_attention_delta(grad, out, delta, R, D: tl.constexpr, ROWS: tl.constexpr):
    row, d = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    at, inside = row[:, None] * D + d, (row < R)[:, None]
    x = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta + row, tl.sum(x * y, 1), mask=row < R)


@triton.jit(do_not_specialize=["B"])
def triton_attention_dq(
    q, k, v, grad, lse, delta, dq, q_ends, tile_ends, c, scale, B, q_n, q_h, k_s, k_h, v_s, v_h,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dq = sum over the key tiles in order of ds k."""
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    b = _find(tile_ends, B, tile)
    if b == B:
        return
    start, length, query, group, token, valid = _row_tile(tile, q_ends, tile_ends, b, GROUPS, ROWS)
    d = tl.arange(0, D)[None, :]
    column = (head * GROUPS + group).to(tl.int64)
    row = token * (HEADS * GROUPS) + column
    x = tl.load(q + (token * q_n + column * q_h)[:, None] + d, mask=valid[:, None], other=0.0)
    g = tl.load(grad + row[:, None] * D + d, mask=valid[:, None], other=0.0)
    top = tl.load(lse + row, mask=valid, other=0.0)[:, None]
    mean = tl.load(delta + row, mask=valid, other=0.0)[:, None]
    k += head.to(tl.int64) * k_h
    v += head.to(tl.int64) * v_h
    acc = tl.zeros([ROWS, D], tl.float32)
    for first in range(0, tl.max(tl.where(valid, query, -1), 0) + 1, KEYS):
        at = first + tl.arange(0, KEYS)
        here, s_row = (at < length)[:, None], (start + at).to(tl.int64)[:, None]
        kt = tl.load(k + s_row * k_s + d, mask=here, other=0.0)
        vt = tl.load(v + s_row * v_s + d, mask=here, other=0.0)
        s = tl.dot(x, kt.T, input_precision="ieee")
        p = tl.exp2(tl.fma(s, c, -top))
        p = tl.where((at[None, :] <= query[:, None]) & valid[:, None], p, 0.0)
        dp = tl.dot(g, vt.T, input_precision="ieee")
        ds = (p * (dp - mean)).to(k.dtype.element_ty)
        acc = tl.dot(ds, kt, acc, input_precision="ieee")
    tl.store(dq + row[:, None] * D + d, (acc * scale).to(dq.dtype.element_ty), mask=valid[:, None])


@triton.jit(do_not_specialize=["B"])
def triton_attention_dkv(
    q, k, v, grad, lse, delta, dk, dv, q_ends, key_ends, c, scale, B, q_n, q_h, k_s, k_h, v_s, v_h,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """
    dk = sum ds^T q, dv = sum p^T do over the rows of the sequence, query by query and within one head by head, from the
    first query of the tile of ROWS in which some query sees some key of this tile: those before would add zeros.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    b = _find(key_ends, B, tile)
    if b == B:
        return
    start = _before(q_ends, b)
    length = _before(q_ends, b + 1) - start
    first_key = (tile - _before(key_ends, b)) * KEYS
    at = first_key + tl.arange(0, KEYS)
    d, here, s_row = tl.arange(0, D)[None, :], (at < length)[:, None], (start + at).to(tl.int64)
    kt = tl.load(k + head.to(tl.int64) * k_h + s_row[:, None] * k_s + d, mask=here, other=0.0)
    vt = tl.load(v + head.to(tl.int64) * v_h + s_row[:, None] * v_s + d, mask=here, other=0.0)
    dk_acc, dv_acc = tl.zeros([KEYS, D], tl.float32), tl.zeros([KEYS, D], tl.float32)
    for first in range(first_key * GROUPS // ROWS * ROWS, length * GROUPS, ROWS):
        r = first + tl.arange(0, ROWS)
        query, column = r // GROUPS, (head * GROUPS + r % GROUPS).to(tl.int64)
        valid, token = query < length, (start + query).to(tl.int64)
        row = token * (HEADS * GROUPS) + column
        x = tl.load(q + (token * q_n + column * q_h)[:, None] + d, mask=valid[:, None], other=0.0)
        g = tl.load(grad + row[:, None] * D + d, mask=valid[:, None], other=0.0)
        top = tl.load(lse + row, mask=valid, other=0.0)[None, :]
        mean = tl.load(delta + row, mask=valid, other=0.0)[None, :]
        s = tl.dot(kt, x.T, input_precision="ieee")
        p = tl.exp2(tl.fma(s, c, -top))
        p = tl.where((at[:, None] <= query[None, :]) & valid[None, :], p, 0.0)
        dv_acc = tl.dot(p.to(g.dtype), g, dv_acc, input_precision="ieee")
        dp = tl.dot(vt, g.T, input_precision="ieee")
        ds = (p * (dp - mean)).to(x.dtype)
        dk_acc = tl.dot(ds, x, dk_acc, input_precision="ieee")
    to = (s_row * HEADS + head)[:, None] * D + d
    tl.store(dk + to, (dk_acc * scale).to(dk.dtype.element_ty), mask=here)
    tl.store(dv + to, dv_acc.to(dv.dtype.element_ty), mask=here)


LOG2_E = 1.4426950408889634


def _attention_config(dtype, rows, warps, stages):
    """Keys and rows per tile, warps and stages. float32 has no tensor core here: small tiles, or registers spill."""
    keys, rows, warps, stages = (KEYS_FLOAT32, 16, 8, 1) if dtype == torch.float32 else (KEYS, rows, warps, stages)
    return dict(KEYS=keys, ROWS=rows, num_warps=warps, num_stages=stages, **EXACT)


class TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan, scale):
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        (N, H, D), heads = q.shape, k.shape[1]
        groups, c, paged = H // heads, scale * LOG2_E, plan.page_table is not None
        out, lse = q.new_empty(N, H, D), q.new_empty(N, H, dtype=torch.float32)
        pages, requests = (plan.page_table, plan.requests) if paged else (plan.q_ends, plan.q_ends)
        # decode has few rows: several programs share the splits that one may have, and a second kernel merges them
        decode = paged and N <= plan.B
        splits = triton.cdiv(pages.shape[1], SPLIT) if decode else 1
        parts, lanes = splits > 1, min(splits, triton.cdiv(DECODE_PROGRAMS, max(1, N * heads)))
        config = _attention_config(q.dtype, DECODE_ROWS if decode else PREFILL_ROWS, 4 if parts else 8, 3)
        ends, tiles = plan.ends(groups, config["ROWS"]), N * groups // config["ROWS"] + plan.B
        part_o = q.new_empty(N, H, splits, D, dtype=torch.float32) if parts else out
        part_m, part_l = q.new_empty(2, N, H, splits, dtype=torch.float32) if parts else (lse, lse)
        args = q, k, v, part_o, lse, part_m, part_l, plan.q_ends, ends, plan.kv_lens, pages, requests
        args += pages.stride(0), c, plan.B, splits, lanes, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]
        flags = dict(HEADS=heads, GROUPS=groups, D=D, SPLIT=SPLIT, PAGED=paged, PARTS=parts)
        _launch(triton_attention, (tiles, heads, lanes), *args, **flags, **config)
        if parts:
            args = part_o, part_m, part_l, out, plan.q_ends, plan.kv_lens, c, plan.B, splits
            _launch(triton_merge_parts, (N * H,), *args, H=H, D=D, SPLIT=SPLIT, num_warps=1, **EXACT)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        plan, scale, (N, H, D), heads = ctx.plan, ctx.scale, q.shape, k.shape[1]
        if plan.page_table is not None:
            raise ValueError("attention over a paged_plan has no gradient: train on a packed_plan")
        groups, grad, delta = H // heads, _aligned(grad), torch.empty_like(lse)
        args, grid = (grad, out, delta, N * H), (triton.cdiv(N * H, DELTA_ROWS),)
        _launch(triton_attention_delta, grid, *args, D=D, ROWS=DELTA_ROWS, num_warps=DELTA_WARPS, **EXACT)
        dq, dk, dv = (_contiguous_like(x) for x in (q, k, v))
        dq_config, dkv_config = (_attention_config(q.dtype, BACKWARD_ROWS, *x) for x in ((4, 3), (8, 2)))
        args, rows, keys = (q, k, v, grad, lse, delta), dq_config["ROWS"], dkv_config["KEYS"]
        tail = scale * LOG2_E, scale, plan.B, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]
        flags = dict(HEADS=heads, GROUPS=groups, D=D)
        grid, ends = (N * groups // rows + plan.B, heads), plan.ends(groups, rows)
        _launch(triton_attention_dq, grid, *args, dq, plan.q_ends, ends, *tail, **flags, **dq_config)
        grid, ends = (N // keys + plan.B, heads), plan.ends(1, keys)
        _launch(triton_attention_dkv, grid, *args, dk, dv, plan.q_ends, ends, *tail, **flags, **dkv_config)
        return dq, dk, dv, None, None


def attention(q, k, v, plan, scale):
    """
    Causal attention of packed queries q (N, Hq, D) over keys and values k, v (S, Hkv, D) -> (N, Hq, D).

    `plan` says which rows of k and v belong to which query; Hq must be a multiple of Hkv. Differentiable for a
    `packed_plan` only. On a GPU D is 64 or 128, Hq / Hkv at most 8, scale above 0.
    """
    if not use_triton(q):
        return CpuAttention.apply(q, k, v, plan, scale)
    check_operands(q, k, v)
    if plan.q_lens.is_cuda != q.is_cuda:
        raise ValueError(f"the plan is not on q's device={q.device}: pass device to packed_plan")
    (_, H, D), heads = q.shape, k.shape[1]
    if D not in (64, 128) or k.shape[2] != D or v.shape != k.shape:
        raise ValueError(f"head dims {D}, {k.shape[2]}, {v.shape[2]}: 64 or 128, the same for q, k and v")
    if H % heads or H > 8 * heads:
        raise ValueError(f"{H} query heads over {heads} key heads: the group must be 1 to 8 whole heads")
    if scale <= 0:
        raise ValueError(f"scale={scale}: the largest score is taken before the scale, which must be above 0")
    return TritonAttention.apply(q, k, v, plan, scale)


# ------------------------------------------------------------------------------------------------------------------
# the head: log p_v = (z_v - m) - log sum_u exp(z_u - m), z = hidden weight^T / temperature, m = max z, and the entropy
# H = -sum_v p_v log p_v, row by row what a sampler computes from the engine's logits, without keeping (N, V) numbers.
# d log p_t / dz = onehot(t) - p, d H / dz = -p (log p + H): the backward pass makes the logits again.
#
# On a CPU torch's log_softmax is row-invariant. On Triton `triton_softmax_stats` alone makes that sum, lane by lane and
# then over the lanes, an order that follows from V; log_softmax and token_logprobs both start from it.


def head_logits(hidden, weight):
    """hidden (M, H) @ weight (V, H)^T -> (M, V) float32, accumulated and returned in float32. Not differentiable."""
    w = weight.t()
    return matmul(hidden, w, out_dtype=torch.float32) if use_triton(hidden) else (hidden @ w).float()


class CpuTokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, t):
        ctx.save_for_backward(hidden, weight, targets, t)
        ctx.set_materialize_grads(False)
        logprobs, entropy = [], []
        for h, target in zip(hidden.split(CHUNK), targets.split(CHUNK)):
            logp = torch.log_softmax(head_logits(h, weight) / t, -1)
            logprobs.append(logp.gather(1, target[:, None])[:, 0])
            entropy.append(-(logp.exp() * logp).sum(-1))
        return torch.cat(logprobs), torch.cat(entropy)

    @staticmethod
    def backward(ctx, grad, entropy_grad):
        hidden, weight, targets, t = ctx.saved_tensors
        # float32: a sum over chunks in bfloat16 would lose the small ones
        d_hidden, d_weight = [], torch.zeros_like(weight, dtype=torch.float32)
        for i, (h, target, g) in enumerate(zip(*(x.split(CHUNK) for x in (hidden, targets, grad)))):
            z = head_logits(h, weight) / t
            dz = -torch.softmax(z, -1)
            dz[torch.arange(len(h), device=h.device), target] += 1
            dz = dz * (g[:, None] / t)
            if entropy_grad is not None:
                logp = torch.log_softmax(z, -1)
                surprise = logp - (logp.exp() * logp).sum(-1, keepdim=True)
                dz -= logp.exp() * surprise * (entropy_grad.split(CHUNK)[i][:, None] / t)
            dz = dz.to(weight.dtype)
            d_hidden.append(dz @ weight)
            d_weight += dz.t() @ h
        return torch.cat(d_hidden), d_weight.to(weight.dtype), None, None


@triton.jit
def triton_softmax_stats(z, t, stats, V: tl.constexpr, BLOCK: tl.constexpr):
    """stats (M, 2): the largest z / t of a row, and the log of the row's sum of exp(z / t - largest)."""
    row, i, t = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.load(t)
    m, den = tl.full([BLOCK], -1e30, tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):
        x = tl.load(z + row * V + first + i, mask=first + i < V, other=float("-inf"))
        x = tl.div_rn(x.to(tl.float32), t)
        top = tl.maximum(m, x)
        den = den * tl.exp(m - top) + tl.exp(x - top)
        m = top
    top = tl.max(m, 0)
    tl.store(stats + row * 2, top)
    tl.store(stats + row * 2 + 1, tl.log(tl.sum(den * tl.exp(m - top), 0)))


@triton.jit
def _log_prob(z, t, stats):
    return (tl.div_rn(z.to(tl.float32), t) - tl.load(stats)) - tl.load(stats + 1)


@triton.jit
def triton_log_softmax(z, t, stats, out, V: tl.constexpr, BLOCK: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = _log_prob(tl.load(z + row * V + c, mask=c < V, other=0.0), tl.load(t), stats + row * 2)
    tl.store(out + row * V + c, x.to(out.dtype.element_ty), mask=c < V)


@triton.jit
def triton_token_logprobs(z, t, stats, targets, logprobs, entropy, V: tl.constexpr, BLOCK: tl.constexpr):
    row, i, t = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.load(t)
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
    z, t, stats, targets, entropy, grad, entropy_grad, dz, V: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, c, t = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.load(t)
    x = _log_prob(tl.load(z + row * V + c, mask=c < V, other=0.0), t, stats + row * 2)
    p = tl.exp(x)
    d = tl.where(c == tl.load(targets + row), 1 - p, -p) * tl.div_rn(tl.load(grad + row), t)
    if ENTROPY:
        d -= tl.where(p > 0, p * (x + tl.load(entropy + row)), 0.0) * tl.div_rn(tl.load(entropy_grad + row), t)
    tl.store(dz + row * V + c, d.to(dz.dtype.element_ty), mask=c < V)


def _softmax_config(V):
    return dict(V=V, BLOCK=min(LANES, _block(V)), num_warps=LANE_WARPS, **EXACT)


class TritonTokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, t):
        N, config, targets = len(hidden), _softmax_config(len(weight)), _aligned(targets)
        stats, logprobs, entropy = (hidden.new_empty(n, dtype=torch.float32) for n in ((N, 2), N, N))
        for h, of_chunk, *rest in zip(*(x.split(CHUNK) for x in (hidden, stats, targets, logprobs, entropy))):
            z = head_logits(h, weight)
            _launch(triton_softmax_stats, (len(h),), z, t, of_chunk, **config)
            _launch(triton_token_logprobs, (len(h),), z, t, of_chunk, *rest, **config)
        ctx.save_for_backward(hidden, weight, targets, t, entropy, stats)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, entropy_grad):
        hidden, weight, targets, t, entropy, stats = ctx.saved_tensors
        # float32: a sum over chunks in bfloat16 would lose the small ones
        d_hidden, d_weight = [], torch.zeros_like(weight, dtype=torch.float32)
        V, eg = len(weight), grad if entropy_grad is None else entropy_grad
        rows = hidden, stats, targets, entropy, grad.contiguous(), eg.contiguous()
        for h, *args in zip(*(x.split(CHUNK) for x in rows)):
            z, dz, entropies = head_logits(h, weight), h.new_empty(len(h), V), entropy_grad is not None
            _launch_on_elements(triton_token_grads, len(h), V, z, t, *args, dz, V=V, ENTROPY=entropies)
            d_hidden.append(matmul(dz, weight))
            matmul(dz.t(), h, out=d_weight)
        return torch.cat(d_hidden), d_weight.to(weight.dtype), None, None


def token_logprobs(hidden, weight, targets, temperature=1.0):
    """
    Log-probs of `targets` (N,) under softmax(hidden @ weight^T / temperature), and the entropies, both (N,) float32.

    hidden (N, H), weight (V, H). Gradients flow to hidden and weight; the log-probs must have one.
    """
    # divided by a tensor: by a Python number, CUDA would multiply by a rounded reciprocal
    t = torch.tensor(temperature, dtype=torch.float32, device=hidden.device)
    if not use_triton(hidden):
        return CpuTokenLogprobs.apply(hidden, weight, targets, t)
    check_operands(hidden, weight)
    return TritonTokenLogprobs.apply(hidden, weight, targets, t)


def log_softmax(x, dim, half_to_float):
    """aten::_log_softmax along the last dim, on Triton."""
    if dim % max(1, x.dim()) != x.dim() - 1 or x.dim() == 0:
        raise ValueError(f"log_softmax: dim={dim} of {x.dim()}; only the last one is written")
    check_operands(x)
    out = torch.empty(x.shape, dtype=torch.float32 if half_to_float else x.dtype, device=x.device)
    z, t = _aligned(x.reshape(-1, x.shape[-1])), torch.ones(1, dtype=torch.float32, device=x.device)
    stats, config = z.new_empty(len(z), 2, dtype=torch.float32), _softmax_config(z.shape[1])
    _launch(triton_softmax_stats, (len(z),), z, t, stats, **config)
    _launch(triton_log_softmax, (len(z), triton.cdiv(z.shape[1], config["BLOCK"])), z, t, stats, out, **config)
    return out


def softmax(x, dim, half_to_float):
    """aten::_softmax along the last dim, on Triton: no log-prob needs it, but SGLang's sampler draws from it."""
    return torch.exp(log_softmax(x, dim, half_to_float))


# ------------------------------------------------------------------------------------------------------------------
# the embedding's gradient, on Triton: dw[v] = sum of the gradients of v's tokens
#
# A stable sort brings equal ids together, and one program adds a run of them in the order of the tokens; no atomics.


@triton.jit(do_not_specialize=["N"])
def triton_embedding_backward(grad, ids, order, out, N, C, pad, BLOCK: tl.constexpr):
    """One program per run of equal ids: the others see that they are not the first of one."""
    i, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
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
    if scale_grad_by_freq:
        raise ValueError("scale_grad_by_freq=True: the embedding's gradient is written without it")
    check_operands(grad)
    C = grad.shape[-1]
    grad, out = grad.reshape(-1, C).contiguous(), grad.new_zeros(rows, C)
    ids, order = torch.sort(ids.reshape(-1).long(), stable=True)
    args = grad, ids, order, out, len(ids), C, padding_idx
    _launch_on_elements(triton_embedding_backward, len(ids), C, *args)
    return out


# ------------------------------------------------------------------------------------------------------------------
# the sampler's noise: no sum at all, but a hash of the sample's seed, the position and the token, so that no neighbour
# and no other step can be seen in it


def murmur_hash32(seed, positions, columns):
    """
    MurmurHash3 (Appleby, 32 bits) of seed (B,) uint64, position (B,) and column (V,) -> (B, V) int64 in [0, 2^32):
    bit for bit SGLang's Triton kernel, so that a CPU run draws the noise a GPU run would. An int64 product wraps, but
    its low 32 bits, which are all that is kept, are right.
    """
    mask = 0xFFFFFFFF

    def rotate(x, r):
        return ((x << r) | (x >> (32 - r))) & mask

    def mix(h, k):
        h = rotate(h ^ (rotate(k * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask), 13)
        return (h * 5 + 0xE6546B64) & mask

    seed = seed.view(torch.int64)
    h = mix(torch.zeros_like(seed), seed & mask)
    h = mix(mix(h, (seed >> 32) & mask), positions.long() & mask)
    h = mix(h[:, None], columns.long()[None] & mask) ^ 16  # 16 bytes hashed
    h = (h ^ (h >> 16)) * 0x85EBCA6B & mask
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & mask
    return h ^ (h >> 16)


def finite_hash(hash32, seed, positions, columns):
    """
    What the function `hash32` (SGLang's or ours) gives, its largest value replaced by the one below; (B, V) float64.

    SGLang draws the token with the largest log-prob + noise, -log(-log(x)) with x = hash / (2^32 - 1) in float64. Of
    the hash 2^32 - 1 that is +inf, and once in 2^32 draws a token was taken whatever its probability: of 151,936 tokens
    to draw from, one in 28,000 (sglang issue 25106, mended after 0.5.17). Of 2^32 - 2, x is 1 - 2^-32 and the noise
    22.2, so the two largest hashes now stand for the same tail. Every other hash keeps its noise, bit for bit.

    The other end is finite as it is: log(0) is clamped to -1.8e308, and the noise of hash 0 is -709.8, where an exact
    draw from that end would be near -3. So a token with hash 0 is not taken unless all others are as good as
    impossible, which takes at most 2^-32 off its probability: less than a float32 log-prob tells apart.

    float64 holds each hash exactly, and torch knows no minimum of uint32. SGLang's own conversion then has nothing to
    do; on CUDA torch.compile makes all this part of the kernel that makes the noise.
    """
    return hash32(seed, positions, columns).double().clamp_(max=2**32 - 2)


# ------------------------------------------------------------------------------------------------------------------
# the switch, thrown in the trainer and in the engine's scheduler process alike

_library = None


def enable_batch_invariant():
    """
    Replaces torch's kernels of the named operators in this process by the ones above, for CPU and CUDA tensors. To be
    called before the first matmul, which is when MKL reads its switch for reproducible sums (and not again).
    """
    global _library
    if "GenuineIntel" in Path("/proc/cpuinfo").read_text():  # elsewhere MKL would fall back to code 3 to 5 times slower
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        both = dict(mm=mm, addmm=addmm)
        cuda = both | dict(_log_softmax=log_softmax, _softmax=softmax, embedding_dense_backward=embedding_backward)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that aten's kernels are replaced, which is what we want
            for device, operators in dict(CPU=cuda if INTERPRET else both, CUDA=cuda).items():
                for name, operator in operators.items():
                    _library.impl(name, operator, device, allow_override=True)


def disable_batch_invariant():
    """Gives torch its kernels back: for tests, which show the difference."""
    global _library
    if _library is not None:
        _library._destroy()
    _library = None
