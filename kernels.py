"""
Batch-invariant operators: one definition, called by the rollout engine and by the trainer.

A library kernel picks its tile shapes from the number of rows it is given, and so adds the same numbers in another
order when a row has other neighbours. One rule prevents that, and every operator here keeps it:

    the order in which one row's numbers are added depends on that row's own length and on the constants of this
    file, never on how many rows there are, who the neighbours are, or how the work was cut.

Each operator is one public function that picks by device: plain torch in float32 on a CPU, which is also the reference,
and Triton on an NVIDIA GPU of compute capability 9.0 (bfloat16, or float32 without TF32). What torch 2.11 does on a CPU
by itself, and what we do about it:

    matmul        rows differ unless their number is a multiple of 16, and columns differ between thread counts
                  unless *their* number is: so both are padded with zeros to a multiple of TILE. On Intel processors
                  MKL also cuts sums over some 400 terms between threads: `enable_batch_invariant` asks it not to.
    silu          the vectorised body and the scalar tail of torch's loop differ in the last bit, so the result
                  depends on a number's position: written as x / (1 + exp(-x)), whose two operations agree.
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

import os
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

TILE = 16  # rows and columns of a matmul come in multiples of this
TILE_Q = 8  # query rows of a softmax tile come in multiples of this
TILE_KV = 16  # keys per softmax tile, counted from position 0 of the sequence; small, for the short sequences of a CPU
CHUNK = 1024  # rows of logits held at a time; fixed, since the head's weight gradient is added chunk by chunk

# Triton's own, part of the order of addition
KEYS = 64  # keys per softmax tile, counted from position 0 of the sequence; 16 in float32
SPLIT = 1024  # keys whose softmax is taken apart from the others', counted from position 0: decode's unit of work
SUM_ROWS = 64  # rows a weight gradient adds before the next level of sums
LANES = 4096  # partial sums of a long row

# not part of it; the figures are guesses until measured on a card, as are those of the `_config` functions
DECODE_ROWS = 64  # query rows of a decode tile: 16 would be enough, but mma.sync instead of wgmma
DECODE_PROGRAMS = 528  # of a decode step: with fewer (token, head) pairs, the splits go to several; 4 per SM
SMS = 132  # of an H100 or H200
EXACT = {"enable_fp_fusion": False}
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # tests: CPU tensors take the Triton path too


# ------------------------------------------------------------------------------------------------------------------
# which path


def _triton(x, *others):
    """Whether x takes the Triton path; the tensors that go with it must be of its device and dtype."""
    if x.device.type == "cpu" and not INTERPRET:
        return False
    if not INTERPRET and (x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) != (9, 0)):
        raise ValueError(f"device={x.device}: the operators are written for CPUs and for compute capability 9.0")
    for y in (x, *others):
        if y.device != x.device:
            raise ValueError(f"device={y.device} beside {x.device}: all operands must be on one device")
        if y.dtype != x.dtype:
            raise ValueError(f"dtype={y.dtype} beside {x.dtype}: all operands must have one dtype")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dtype={x.dtype}: the Triton operators know bfloat16 and float32")
    return True


def _launch(kernel, grid, *args, **config):
    if 0 not in grid:
        with torch.cuda.device_of(next(x for x in args if isinstance(x, torch.Tensor))):
            kernel[grid](*args, **config)


def _aligned(x):
    """x, contiguous and at a multiple of 16 bytes: Triton's layout, and with it `tl.sum`, may depend on these."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


# ------------------------------------------------------------------------------------------------------------------
# matmul and silu: these replace the aten kernels, so that any model reaches them, forward and backward


def _pad(x, rows, cols):
    """x (R, C) with zeros appended up to a multiple of `rows` rows and `cols` columns."""
    down, right = -x.shape[0] % rows, -x.shape[1] % cols
    return F.pad(x, (0, right, 0, down)) if down or right else x


def mm(a, b):
    """a (M, K) @ b (K, N) -> (M, N). Zero rows and columns fill the last tiles, so each call has whole tiles only."""
    if _triton(a, b):
        return matmul(a, b)
    (M, _), N = a.shape, b.shape[1]
    a, b = _pad(a, TILE, 1), _pad(b, 1, TILE)
    out = a.new_empty(a.shape[0], b.shape[1])
    torch.mm(a, b, out=out)  # aten::mm.out is torch's own kernel: only aten::mm is replaced by this function
    return out[:M, :N].contiguous()


def addmm(bias, a, b, *, beta=1, alpha=1):
    """beta * bias + alpha * (a @ b), rounded once; torch's own starts the sum with the bias, another order."""
    out = matmul(a, b, out_dtype=torch.float32) if _triton(a, b) else mm(a, b)
    if alpha != 1:
        out = out * alpha
    return (out + (bias if beta == 1 else bias * beta)).to(a.dtype)


# matmul on Triton: c[m, n] = sum_k a[m, k] b[k, n].
# One accumulator takes the k16 steps of its element in the order of K, whatever tile the element is in; other rows and
# columns never enter it, and the zeros that fill the last step of K add nothing. Reference: torch.mm in float64.


@triton.jit
def _tile_at(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of an output tile; GROUP rows of tiles go together, so that L2 serves b to all of them."""
    down, across = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = tile // (GROUP * across) * GROUP
    height = min(down - first, GROUP)
    tile = tile % (GROUP * across)
    return first + tile % height, tile // height


@triton.jit
def _matmul(
    a, b, c, M, N, K, a_z, a_m, a_k, b_z, b_k, b_n, c_z, c_m, c_n,
    ADD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Any strides, any alignment; z counts the matrices of a bmm. ADD: the chain goes on from what c holds."""
    row, col = _tile_at(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, 8)
    z = tl.program_id(1).to(tl.int64)
    m, n, k = row * BLOCK_M + tl.arange(0, BLOCK_M), col * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    inside_m, inside_n = (m < M)[:, None], (n < N)[None, :]
    m, n = m.to(tl.int64)[:, None], n.to(tl.int64)[None, :]
    a += z * a_z + m * a_m + k[None, :].to(tl.int64) * a_k
    b += z * b_z + n * b_n + k[:, None].to(tl.int64) * b_k
    c += z * c_z + m * c_m + n * c_n
    if ADD:
        acc = tl.load(c, mask=inside_m & inside_n, other=0.0)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for left in range(K, 0, -BLOCK_K):
        x = tl.load(a, mask=inside_m & (k < left)[None, :], other=0.0)
        y = tl.load(b, mask=inside_n & (k < left)[:, None], other=0.0)
        acc = tl.dot(x, y, acc, input_precision="ieee")
        a += a_k * BLOCK_K
        b += b_k * BLOCK_K
    tl.store(c, acc.to(c.dtype.element_ty), mask=inside_m & inside_n)


@triton.jit(do_not_specialize=["K", "PROGRAMS"])  # as a constant, K = 1 would be laid out in too much shared memory
def _matmul_tma(
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
        if ADD:
            acc = tl.load(at, mask=inside, other=0.0)
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            if A_MK:
                x = a.load([m, k])
            else:
                x = a.load([k, m]).T
            if B_NK:
                y = b.load([n, k]).T
            else:
                y = b.load([k, n])
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
    a (M, K) @ b (K, N) -> (M, N), or a (Z, M, K) @ b (Z, K, N) -> (Z, M, N); any strides; accumulated in float32.

    out_dtype: of the result, a's unless given. out: a float32 result to which the product is added, in the same chain.
    """
    if not _triton(a, b):
        raise ValueError(f"device={a.device}: matmul is the GPU's; mm and head_logits pick by device")
    if a.dim() != b.dim() or a.dim() not in (2, 3) or a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        raise ValueError(f"shapes {tuple(a.shape)} and {tuple(b.shape)} do not multiply")
    if out_dtype not in (None, a.dtype, torch.float32):
        raise ValueError(f"out_dtype={out_dtype}: {a.dtype} or float32")
    M, N, K, add = a.shape[-2], b.shape[-1], a.shape[-1], out is not None
    if add and (out.dtype != torch.float32 or out.shape != (*a.shape[:-1], N)):
        raise ValueError(f"out={out.dtype} {tuple(out.shape)}: it must be float32 and of the product's shape")
    c = out if add else a.new_empty(*a.shape[:-1], N, dtype=out_dtype or a.dtype)
    result = c
    if 0 in c.shape:
        return result
    if M <= 64 < N:  # the weights' columns become the rows: c^T = b^T a^T
        a, b, c, M, N = b.mT, a.mT, c.mT, N, M
    x, y = (_for_tma(a), _for_tma(b.t())) if a.dim() == 2 and K else (None, None)
    tma, aligned = bool(x and y), c.stride(-2) % 16 == 0
    block_m, block_n, block_k, warps, stages = _matmul_config(M, N, a.dtype, tma, aligned)
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    config = dict(BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages)
    if tma:
        programs = min(tiles, SMS) if block_n == 256 else tiles
        blocks = ([block, block_k] if k else [block_k, block] for block, k in ((block_m, x[1]), (block_n, y[1])))
        descriptors = [TensorDescriptor.from_tensor(t, block) for (t, _), block in zip((x, y), blocks)]
        args = (c, *descriptors, M, N, K, *c.stride(), programs, x[1], y[1], add)
        _launch(_matmul_tma, (programs,), *args, **config)
    else:
        a, b, c = (t if t.dim() == 3 else t[None] for t in (a, b, c))
        _launch(_matmul, (tiles, len(a)), a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride(), add, **config)
    return result


def silu(x):
    """x * sigmoid(x), as x / (1 + exp(-x))."""
    return x / (1 + torch.exp(-x))


def silu_backward(grad, x):
    """d silu / dx = s * (1 + x * (1 - s)) with s = sigmoid(x)."""
    s = 1 / (1 + torch.exp(-x))
    return grad * (s * (1 + x * (1 - s)))


# ------------------------------------------------------------------------------------------------------------------
# row operators. A program holds whole rows, and how many, in which block and by how many warps follows from the row's
# length, which is a constant of the compiled kernel: so `tl.sum` has one order per length.


@triton.jit(do_not_specialize=["R"])
def _column_sums(x, out, R, C, ROWS: tl.constexpr, BLOCK: tl.constexpr):
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
        grid = len(out), triton.cdiv(x.shape[1], 256)
        _launch(_column_sums, grid, x, out, *x.shape, ROWS=SUM_ROWS, BLOCK=256, **EXACT)
        x = out
    return x[0]


@triton.jit(do_not_specialize=["C"])
def _row_sums(x, out, C, BLOCK: tl.constexpr, ACC: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    x += row.to(tl.int64) * C
    acc = tl.zeros([BLOCK], ACC)
    for first in range(0, C, BLOCK):
        acc += tl.load(x + first + i, mask=first + i < C, other=0.0).to(ACC)
    tl.store(out + row, tl.sum(acc, 0))


def row_sums(x):
    """
    The sums of x (R, C) along its rows -> (R,), float32, or float64 where x is. For the gradient norm.

    y_r = sum_c x_rc. CPU: the row's two halves, padded to a power of two, are added until one is left. GPU: LANES
    partial sums, each in order, then their sum. Both orders follow from C. A row is one program's work: cut a long
    tensor into rows of one fixed length first.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if x.is_cuda or INTERPRET:
        if dtype == torch.float32:
            _triton(x)
        out, x = x.new_empty(len(x), dtype=dtype), _aligned(x)
        acc = tl.float64 if dtype == torch.float64 else tl.float32
        block = min(LANES, max(16, triton.next_power_of_2(x.shape[1])))
        _launch(_row_sums, (len(x),), x, out, x.shape[1], BLOCK=block, ACC=acc, num_warps=8, **EXACT)
        return out
    width = triton.next_power_of_2(max(1, x.shape[1]))
    x = F.pad(x.to(dtype), (0, width - x.shape[1]))
    while width > 1:
        width //= 2
        x = x[:, :width] + x[:, width:]
    return x[:, 0]


@triton.jit(do_not_specialize=["R"])
def _rms_norm(
    x, residual, weight, y, s, scale, eps, R,
    C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    row, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)[None, :]
    inside, row = (row < R)[:, None] & (c < C), row.to(tl.int64)
    at = row[:, None] * C + c
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        v = (v + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(s.dtype.element_ty)
        tl.store(s + at, v, mask=inside)
        v = v.to(tl.float32)
    r = tl.rsqrt(tl.sum(v * v, 1) / C + eps)
    tl.store(scale + row, r, mask=row < R)
    w = tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(y + at, (v * r[:, None] * w).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["R"])
def _rms_norm_backward(
    grad, s_grad, s, weight, scale, dx, dw, R,
    C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, STEPS: tl.constexpr,
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
        unit = tl.load(s + at, mask=inside, other=0.0).to(tl.float32) * r
        acc += g * unit
        g = g * w
        g = r * (g - unit * (tl.sum(g * unit, 1) / C)[:, None])
        if RESIDUAL:
            g += tl.load(s_grad + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, g.to(dx.dtype.element_ty), mask=inside)
    tl.store(dw + block.to(tl.int64) * C + c, tl.sum(acc, 0)[None, :], mask=c < C)


def _row_config(C):
    block = max(16, triton.next_power_of_2(C))
    if block > 16384:
        raise ValueError(f"width={C}: a norm's row must fit one program, at most 16384")
    return dict(ROWS=max(1, 2048 // block), BLOCK=block, num_warps=8 if block > 2048 else 4, **EXACT)


class RMSNorm(torch.autograd.Function):
    """
    y_i = w_i x_i r, r = (mean_j x_j^2 + eps)^-1/2 (Zhang and Sennrich 2019, eq. 4). With n = x r, h = g w:
    dx = r (h - n mean(h n)), dw = sum over rows of g n. A row's sum is its program's own; dw goes by blocks of rows.
    """

    @staticmethod
    def forward(ctx, x, weight, eps, residual):
        C = x.shape[-1]
        R = x.numel() // max(1, C)
        config = _row_config(C)
        y, scale = torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(R, dtype=torch.float32)
        s = torch.empty_like(y) if residual is not None else None
        x = _aligned(x)
        args = x, x if s is None else _aligned(residual), _aligned(weight), y, y if s is None else s, scale
        grid = (triton.cdiv(R, config["ROWS"]),)
        _launch(_rms_norm, grid, *args, eps, R, C=C, RESIDUAL=s is not None, **config)
        ctx.save_for_backward(x if s is None else s, weight, scale)
        ctx.residual = s is not None
        ctx.set_materialize_grads(False)
        return (y, s) if s is not None else y

    @staticmethod
    def backward(ctx, grad, s_grad=None):
        s, weight, scale = ctx.saved_tensors
        C, R = s.shape[-1], len(scale)
        config = _row_config(C)
        grad = torch.zeros_like(s) if grad is None else grad
        dx = torch.empty_like(s, memory_format=torch.contiguous_format)
        blocks = triton.cdiv(R, SUM_ROWS)
        dw = weight.new_zeros(max(1, blocks), C, dtype=torch.float32)
        steps = max(1, SUM_ROWS // config["ROWS"])
        args = (_aligned(t) for t in (grad, grad if s_grad is None else s_grad, s, weight, scale))
        grid = (triton.cdiv(R, steps * config["ROWS"]),)
        flags = dict(C=C, RESIDUAL=s_grad is not None, STEPS=steps)
        _launch(_rms_norm_backward, grid, *args, dx, dw, R, **flags, **config)
        return dx, _sum_of_rows(dw).to(weight.dtype), None, dx if ctx.residual else None


def rms_norm(x, weight, eps, residual=None):
    """
    x (..., C) * rsqrt(mean(x^2) + eps) * weight (C,), in float32, rounded once to x's dtype.

    With a residual: s = x + residual, rounded, takes x's place, and (y, s) is returned. Differentiable.
    """
    if weight.shape != x.shape[-1:] or residual is not None and residual.shape != x.shape:
        raise ValueError(f"weight {tuple(weight.shape)} or residual does not fit x {tuple(x.shape)}")
    if _triton(x, weight, *(() if residual is None else (residual,))):
        return RMSNorm.apply(x, weight, eps, residual)
    s = x if residual is None else x + residual
    y = _normed(s.float(), weight, eps).to(x.dtype)
    return y if residual is None else (y, s)


def _normed(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


# ------------------------------------------------------------------------------------------------------------------
# q/k-norm and RoPE in one pass over the heads: a row is one head of one token


def rope_table(inv_freq, positions):
    """cos and sin (N, D/2) float32 of position * inv_freq (Su et al. 2021, eq. 15); both sides take them from here."""
    angle = positions.float()[:, None] * inv_freq.float()
    return angle.cos(), angle.sin()


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
def _norm_rope(
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
def _norm_rope_backward(
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


class NormRoPE(torch.autograd.Function):
    """
    n = x without weights, else as in RMSNorm, over one head; then (n1 c - n2 s, n2 c + n1 s), n1 and n2 its halves.
    Backward turns the other way, then as RMSNorm's.
    """

    @staticmethod
    def config(q, k, norm):
        (N, HQ, D), HK = q.shape, k.shape[1]
        return N * (HQ + HK), dict(HQ=HQ, HK=HK, D=D, NORM=norm, **_row_config(D))

    @staticmethod
    def forward(ctx, q, k, cos, sin, q_weight, k_weight, eps):
        q, k = (x if _heads_lie_side_by_side(x) else _aligned(x) for x in (q, k))
        weights = (q, k) if q_weight is None else (_aligned(q_weight), _aligned(k_weight))
        saved = q, k, *weights, _aligned(cos), _aligned(sin)
        ctx.save_for_backward(*saved)
        ctx.norm, ctx.eps = q_weight is not None, eps
        q_out, k_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
        R, config = NormRoPE.config(q, k, ctx.norm)
        args = *saved, q_out, k_out, eps, R, q.stride(0), k.stride(0)
        _launch(_norm_rope, (triton.cdiv(R, config["ROWS"]),), *args, **config)
        return q_out, k_out

    @staticmethod
    def backward(ctx, q_grad, k_grad):
        q, k, q_weight, *_ = ctx.saved_tensors
        dq, dk = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
        R, config = NormRoPE.config(q, k, ctx.norm)
        steps = max(1, SUM_ROWS // config["ROWS"])
        blocks = triton.cdiv(R, steps * config["ROWS"])
        dw = q.new_zeros(max(1, blocks) if ctx.norm else 1, 2 * q.shape[2], dtype=torch.float32)
        args = _aligned(q_grad), _aligned(k_grad), *ctx.saved_tensors, dq, dk, dw, ctx.eps, R, q.stride(0), k.stride(0)
        _launch(_norm_rope_backward, (blocks,), *args, STEPS=steps, **config)
        dw = _sum_of_rows(dw).to(q_weight.dtype).chunk(2) if ctx.norm else (None, None)
        return dq, dk, None, None, *dw, None


def _heads_lie_side_by_side(x):
    """Whether x (N, H, D) can be walked as it is, with the layout that a new tensor would have."""
    return x.stride()[1:] == (x.shape[2], 1) and x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0


def norm_rope(q, k, cos, sin, q_weight=None, k_weight=None, eps=0.0):
    """
    Rotary positions (Su et al. 2021, eq. 34, NeoX halves) of q (N, Hq, D) and k (N, Hkv, D); cos, sin (N, D/2) float32.

    With weights (D,) each head is normed as in `rms_norm` before. All in float32, rounded once; new tensors;
    differentiable in q, k and the weights. One sum per head, over D alone.
    """
    if cos.dtype != torch.float32 or sin.dtype != torch.float32 or cos.shape != (len(q), q.shape[2] // 2):
        raise ValueError(f"cos {cos.dtype} {tuple(cos.shape)}: float32 ({len(q)}, {q.shape[2] // 2}) is needed")
    weights = [w for w in (q_weight, k_weight) if w is not None]
    if len(weights) == 1 or any(w.shape != q.shape[2:] for w in weights):
        raise ValueError(f"weights {[tuple(w.shape) for w in weights]}: none, or two of q's head dim {q.shape[2]}")
    if _triton(q, k, *weights):
        return NormRoPE.apply(q, k, cos, sin, q_weight, k_weight, eps)

    def turn(x, weight):
        x = x.float() if weight is None else _normed(x.float(), weight, eps)
        (x1, x2), c, s = x.chunk(2, -1), cos[:, None], sin[:, None]
        return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1).to(q.dtype)

    return turn(q, q_weight), turn(k, k_weight)


# ------------------------------------------------------------------------------------------------------------------
# SwiGLU: element by element, so there is no order


@triton.jit
def _swiglu(gate, up, out, C, gate_r, up_r, BLOCK: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + row * gate_r + c, mask=c < C, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_r + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(out + row * C + c, (g / (1 + tl.exp(-g)) * u).to(out.dtype.element_ty), mask=c < C)


@triton.jit
def _swiglu_backward(grad, gate, up, d_gate, d_up, C, gate_r, up_r, BLOCK: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.load(grad + row * C + c, mask=c < C, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_r + c, mask=c < C, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_r + c, mask=c < C, other=0.0).to(tl.float32)
    s = 1 / (1 + tl.exp(-g))
    tl.store(d_gate + row * C + c, (d * u * (s * (1 + g * (1 - s)))).to(d_gate.dtype.element_ty), mask=c < C)
    tl.store(d_up + row * C + c, (d * (g * s)).to(d_up.dtype.element_ty), mask=c < C)


class SwiGLU(torch.autograd.Function):
    """silu(g) u, silu(g) = g / (1 + exp(-g)) (Shazeer 2020, eq. 5); d silu / dg = s (1 + g (1 - s)), s = sigmoid(g)."""

    @staticmethod
    def grid(x):
        return x.shape[0], triton.cdiv(x.shape[1], 1024)

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        if not _triton(gate, up):
            return (silu(gate.float()) * up.float()).to(gate.dtype)
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        args = gate, up, out, gate.shape[1], gate.stride(0), up.stride(0)
        _launch(_swiglu, SwiGLU.grid(gate), *args, BLOCK=1024, num_warps=4, **EXACT)
        return out

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        if not _triton(gate, up):
            d, g, u = grad.float(), gate.float(), up.float()
            return silu_backward(d * u, g).to(gate.dtype), (d * silu(g)).to(up.dtype)
        d_gate, d_up = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (gate, up))
        args = grad.contiguous(), gate, up, d_gate, d_up, gate.shape[1], gate.stride(0), up.stride(0)
        _launch(_swiglu_backward, SwiGLU.grid(gate), *args, BLOCK=1024, num_warps=4, **EXACT)
        return d_gate, d_up


def swiglu(gate, up):
    """silu(gate) * up, (..., C) each, in float32, rounded once; the rows may be strided. Differentiable."""
    if gate.shape != up.shape:
        raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} differ")
    C = gate.shape[-1]
    flat = [x.reshape(-1, C) if x.stride(-1) == 1 else x.contiguous().view(-1, C) for x in (gate, up)]
    return SwiGLU.apply(*flat).view(gate.shape)


# ------------------------------------------------------------------------------------------------------------------
# attention


class Plan:
    """
    Where the queries and keys of each sequence are; made once per forward, used by every layer.

    q_rows     (B, Tq)  row of each query in the packed batch; an unused entry repeats a valid row
    positions  (B, Tq)  absolute position of each query
    q_unpad    (N,)     index into B * Tq of each packed query
    kv_rows    (B, L)   row of each key in the packed batch or in the paged cache; an unused entry repeats the first
    kv_unpad   (N,)     index into B * L of each packed key, in training; None over a cache
    """

    def __init__(self, q_rows, positions, q_unpad, kv_rows, kv_unpad=None):
        self.q_rows, self.positions, self.q_unpad = q_rows, positions, q_unpad
        self.kv_rows, self.kv_unpad = kv_rows, kv_unpad
        self._tiles = {}

    def tiles(self, heads, groups):
        """
        The keys cut into n tiles, for all layers: rows of (row, head) pairs (n * B * Hkv * TILE_KV,), and where a
        query does not see a key (n, B * Hkv, R, TILE_KV).
        """
        if (heads, groups) not in self._tiles:
            rows = self.kv_rows.view(len(self.kv_rows), -1, TILE_KV).transpose(0, 1)[:, :, None]  # (n, B, 1, TILE_KV)
            rows = rows * heads + torch.arange(heads, device=rows.device)[:, None]
            at = torch.arange(self.kv_rows.shape[1], device=rows.device).view(-1, 1, 1, TILE_KV)
            q_at = self.positions.repeat_interleave(groups, dim=1)  # (B, Tq * groups)
            q_at = F.pad(q_at, (0, -q_at.shape[1] % TILE_Q)).repeat_interleave(heads, dim=0)
            self._tiles[heads, groups] = rows.flatten(), at > q_at[:, :, None]
        return self._tiles[heads, groups]


def packed_plan(lengths, device=None):
    """The plan of a packed batch of whole sequences, `lengths` (B,) tokens each, for training."""
    lengths = torch.as_tensor(lengths, device=device)
    if lengths.is_cuda or INTERPRET:
        return TilePlan(lengths, lengths)
    L = -(-int(lengths.max()) // TILE_KV) * TILE_KV
    at = torch.arange(L, device=lengths.device)
    valid = at < lengths[:, None]
    rows = (lengths.cumsum(0) - lengths)[:, None] + torch.where(valid, at, 0)
    unpad = valid.flatten().nonzero()[:, 0]
    return Plan(rows, at.expand(rows.shape), unpad, rows, unpad)


def paged_plan(q_lens, kv_lens, page_table, requests):
    """
    The plan of a prefill chunk or a decode step over a paged cache.

    q_lens (B,) new tokens, kv_lens (B,) tokens in the cache with the new ones, page_table (any, >= max kv_lens) the
    cache row of each position, requests (B,) the table's row of each sequence. Prefill, any chunk of it and decode
    differ in these numbers only. On a GPU nothing is read back: see TilePlan for what a captured graph may change.
    """
    if page_table.is_cuda or INTERPRET:
        if any(x.device != page_table.device for x in (q_lens, kv_lens, requests)) or page_table.stride(1) != 1:
            raise ValueError("paged_plan: all four on one device, and the entries of a page_table's row side by side")
        return TilePlan(q_lens, kv_lens, page_table, requests)
    Tq, L = int(q_lens.max()), -(-int(kv_lens.max()) // TILE_KV) * TILE_KV
    at = torch.arange(max(Tq, L), device=q_lens.device)
    q_valid, kv_valid = at[:Tq] < q_lens[:, None], at[:L] < kv_lens[:, None]
    q_rows = (q_lens.cumsum(0) - q_lens)[:, None] + torch.where(q_valid, at[:Tq], 0)
    positions = (kv_lens - q_lens)[:, None] + torch.where(q_valid, at[:Tq], 0)
    table = F.pad(page_table[requests, :L], (0, max(0, L - page_table.shape[1])))
    # an unused key repeats the sequence's first one: it is masked, but 0 * NaN of a foreign page would still be NaN
    kv_rows = torch.where(kv_valid, table, table[:, :1]).long()
    return Plan(q_rows, positions, q_valid.flatten().nonzero()[:, 0], kv_rows)


def _queries(x, rows, groups):
    """Packed (N, Hq, D) -> (B * Hkv, R, D), the queries that share a key head as rows, R a multiple of TILE_Q."""
    (B, Tq), (_, Hq, D) = rows.shape, x.shape
    x = x[rows].view(B, Tq, Hq // groups, groups, D).transpose(1, 2).reshape(-1, Tq * groups, D)
    return F.pad(x, (0, 0, 0, -x.shape[1] % TILE_Q))


def _packed_queries(x, plan, heads, groups):
    """The inverse of `_queries`: (B * Hkv, R, D) -> (N, Hq, D)."""
    (B, Tq), D = plan.q_rows.shape, x.shape[-1]
    x = x[:, : Tq * groups].view(B, -1, Tq, groups, D).transpose(1, 2).reshape(B * Tq, heads, D)
    return x[plan.q_unpad]


def _add_in_order(parts):
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


class Attention(torch.autograd.Function):
    """
    o = sum_t p_t v_t / sum_t l_t, p_t = exp(q k_t^T * scale - m), l_t the row sums of p_t, over key tiles t of one
    sequence in order; m is the row's largest score, which has no order. A key in a row's future adds an exact zero, and
    so does a tile of them. So neither the batch, nor the chunk of a prefill, nor the pages of the cache can be seen.
    Backward (Dao 2023, algorithm 2, for one block of queries): ds = p * (do v^T - rowsum(do * o)).
    """

    @staticmethod
    def forward(ctx, q, k, v, plan, scale):
        heads, D = k.shape[1:]
        groups = q.shape[1] // heads
        rows, masked = plan.tiles(heads, groups)
        tiles = len(masked)
        x = _queries(q, plan.q_rows, groups)
        k, v = (
            t.reshape(-1, D).index_select(0, rows).view(-1, TILE_KV, D) for t in (k, v)
        )  # (tiles * B * Hkv, TILE_KV, D)
        s = torch.bmm(x.repeat(tiles, 1, 1), k.transpose(1, 2)).mul_(scale).view(masked.shape)
        s.masked_fill_(masked, float("-inf"))
        p = torch.exp(s.sub_(s.amax((0, 3), keepdim=True)))
        total = _add_in_order(p.sum(-1, keepdim=True))
        out = _add_in_order(torch.bmm(p.flatten(0, 1), v).view(tiles, *x.shape)) / total
        ctx.save_for_backward(x, k, v, out, p, total)
        ctx.plan, ctx.scale, ctx.heads = plan, scale, (q.shape[1], heads)
        return _packed_queries(out, plan, q.shape[1], groups)

    @staticmethod
    def backward(ctx, grad):
        x, k, v, out, p, total = ctx.saved_tensors
        plan, (q_heads, heads), (tiles, D) = ctx.plan, ctx.heads, (len(p), x.shape[-1])
        groups = q_heads // heads
        # a gathered gradient would count a repeated (padding) row twice: those queries get zeros
        grad_rows = grad.new_zeros(plan.q_rows.numel(), *grad.shape[1:])
        grad_rows[plan.q_unpad] = grad
        every_row = torch.arange(plan.q_rows.numel(), device=grad.device).view(plan.q_rows.shape)
        do = _queries(grad_rows, every_row, groups)
        p = p / total
        dp = torch.bmm(do.repeat(tiles, 1, 1), v.transpose(1, 2)).view(p.shape)
        ds = (p * (dp - (do * out).sum(-1, keepdim=True)) * ctx.scale).flatten(0, 1)
        dq = _add_in_order(torch.bmm(ds, k).view(tiles, *x.shape))
        dk = torch.bmm(ds.transpose(1, 2), x.repeat(tiles, 1, 1))
        dv = torch.bmm(p.flatten(0, 1).transpose(1, 2), do.repeat(tiles, 1, 1))

        def packed_keys(t):  # (tiles * B * Hkv, TILE_KV, D) -> (N, Hkv, D)
            t = t.view(tiles, -1, heads, TILE_KV, D).permute(1, 0, 3, 2, 4)
            return t.reshape(-1, heads, D)[plan.kv_unpad]

        return _packed_queries(dq, plan, q_heads, groups), packed_keys(dk), packed_keys(dv), None, None


# attention on Triton: the same function, its softmax online (Milakov and Gimelshein 2018; Dao 2023, algorithm 1).
# Per split of SPLIT keys, over its tiles of KEYS keys in order, with s = q k^T:
#     m' = max(m, max s), a = 2^((m - m') c), p = 2^(s c - m' c), l' = a l + p 1, o' = a o + p v, c = scale / ln 2,
# and over the splits in order the same with a split's (m, l, o) in a tile's place: `_merge`. Tiles and splits
# lie at absolute positions, a hidden key or tile of them changes no bit (m' = m, a = 1, p = 0), and no operation mixes
# rows: so packed training, any chunk of a prefill and decode add a row alike. Reference: Attention above.


class TilePlan:
    """
    What `Plan` is to the CPU. The kernels read every number from the device: no step waits for it.

    A captured CUDA graph replays with what kv_lens, page_table and requests then hold; q_lens, of which the plan keeps
    running sums (B,), must stay. Keep the plan as long as the graph.
    """

    def __init__(self, q_lens, kv_lens, page_table=None, requests=None):
        self.q_lens, self.kv_lens, self.B = q_lens, kv_lens, len(q_lens)
        self.q_ends = q_lens.cumsum(0)
        self.page_table, self.requests = page_table, requests
        self._ends = {}

    def ends(self, per_token, rows):
        """Running sums (B,) of the tiles of `rows` rows of each sequence, `per_token` rows to a token."""
        if (per_token, rows) not in self._ends:
            self._ends[per_token, rows] = ((self.q_lens * per_token + (rows - 1)) // rows).cumsum(0)
        return self._ends[per_token, rows]


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
def _split(
    q, position, first, last, kv_len, k, v, k_s, v_s, pages, kv_start, c,
    D: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """(m, den, o) of the queries q over the keys first .. last - 1 of one split: the inner loop of every use."""
    d = tl.arange(0, D)[None, :]
    m, den, o = tl.full([ROWS], -1e30, tl.float32), tl.zeros([ROWS, 16], tl.float32), tl.zeros([ROWS, D], tl.float32)
    ones = tl.full([KEYS, 16], 1.0, v.dtype.element_ty)
    for tile in range(first, last, KEYS):
        at = tile + tl.arange(0, KEYS)
        # foreign rows hold anything: 0 * NaN would be NaN, so neither k nor v is read past the sequence
        here = at < kv_len
        if PAGED:
            row = tl.load(pages + at, mask=here, other=0).to(tl.int64)
        else:
            row = (kv_start + at).to(tl.int64)
        x = tl.load(k + row[:, None] * k_s + d, mask=here[:, None], other=0.0)
        y = tl.load(v + row[:, None] * v_s + d, mask=here[:, None], other=0.0)
        s = tl.dot(q, x.T, input_precision="ieee")
        s = tl.where(at[None, :] <= position[:, None], s, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1))
        a = tl.exp2((m - top) * c)
        p = tl.exp2(tl.fma(s, c, (-top * c)[:, None])).to(v.dtype.element_ty)
        den = tl.dot(p, ones, den * a[:, None], input_precision="ieee")
        o = tl.dot(p, y, o * a[:, None], input_precision="ieee")
        m = top
    return m, tl.max(den, 1), o


@triton.jit
def _finish(m, den, o, c):
    """The output, and the logarithm of base 2 of the row's sum, which backward needs."""
    return o * tl.div_rn(1.0, den)[:, None], tl.fma(m, c, tl.log2(den))


@triton.jit
def _row_tile(tile, q_ends, tile_ends, b, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """(query of the sequence, head of the group, its token in the pack, whether there is one) of a tile's rows."""
    start = _before(q_ends, b)
    row = (tile - _before(tile_ends, b)) * ROWS + tl.arange(0, ROWS)
    query = row // GROUPS
    return query, row % GROUPS, (start + query).to(tl.int64), query < _before(q_ends, b + 1) - start


@triton.jit(do_not_specialize=["B", "splits", "LANES"])
def _attention(
    q, k, v, out, lse, part_m, part_l, q_ends, tile_ends, kv_lens, pages, requests, pages_r, c, B, splits, LANES,
    q_n, q_h, k_s, k_h, v_s, v_h,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, PAGED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One tile of rows, (query, head of the group) pairs. PARTS: out takes each split's sums, for `_merge_parts`."""
    # the last tiles see the most keys: first come the long ones
    tile, head, lane = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b = _find(tile_ends, B, tile)
    if b == B:
        return
    query, group, token, valid = _row_tile(tile, q_ends, tile_ends, b, GROUPS, ROWS)
    start = _before(q_ends, b)
    kv_len = tl.load(kv_lens + b).to(tl.int32)
    position = kv_len - (_before(q_ends, b + 1) - start) + query
    last = tl.max(tl.where(valid, position, -1), 0) + 1  # keys that some row sees
    if PAGED:
        pages += tl.load(requests + b).to(tl.int64) * pages_r
    d = tl.arange(0, D)[None, :]
    column = (head * GROUPS + group).to(tl.int64)
    x = tl.load(q + (token * q_n + column * q_h)[:, None] + d, mask=valid[:, None], other=0.0)
    k += head.to(tl.int64) * k_h
    v += head.to(tl.int64) * v_h
    row = token * (HEADS * GROUPS) + column
    m, den, o = tl.full([ROWS], -1e30, tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, D], tl.float32)
    for split in range(lane, tl.cdiv(last, SPLIT), LANES):
        end = min(last, (split + 1) * SPLIT)
        sm, sl, so = _split(
            x, position, split * SPLIT, end, kv_len, k, v, k_s, v_s, pages, start, c, D, KEYS, ROWS, PAGED
        )  # fmt: skip
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
def _merge_parts(
    part_o, part_m, part_l, out, q_ends, kv_lens, c, B, splits,
    H: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr,
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
def _attention_delta(grad, out, delta, R, D: tl.constexpr, ROWS: tl.constexpr):
    row, d = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    at, inside = row[:, None] * D + d, (row < R)[:, None]
    x = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta + row, tl.sum(x * y, 1), mask=row < R)


@triton.jit(do_not_specialize=["B"])
def _attention_dq(
    q, k, v, grad, lse, delta, dq, q_ends, tile_ends, c, scale, B, q_n, q_h, k_s, k_h, v_s, v_h,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dq = sum over the key tiles in order of ds k."""
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    b = _find(tile_ends, B, tile)
    if b == B:
        return
    query, group, token, valid = _row_tile(tile, q_ends, tile_ends, b, GROUPS, ROWS)
    start = _before(q_ends, b)
    length = _before(q_ends, b + 1) - start
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
def _attention_dkv(
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
    keys, rows, warps, stages = (16, 16, 8, 1) if dtype == torch.float32 else (KEYS, rows, warps, stages)
    return dict(KEYS=keys, ROWS=rows, num_warps=warps, num_stages=stages, **EXACT)


class TileAttention(torch.autograd.Function):
    """`attention` over a TilePlan. Backward as above (Dao 2023, algorithm 2), with p = 2^(s c - lse)."""

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
        config = _attention_config(q.dtype, DECODE_ROWS if decode else 128, 4 if parts else 8, 3)
        ends, tiles = plan.ends(groups, config["ROWS"]), N * groups // config["ROWS"] + plan.B
        part_o = q.new_empty(N, H, splits, D, dtype=torch.float32) if parts else out
        part_m, part_l = q.new_empty(2, N, H, splits, dtype=torch.float32) if parts else (lse, lse)
        args = q, k, v, part_o, lse, part_m, part_l, plan.q_ends, ends, plan.kv_lens, pages, requests
        args += pages.stride(0), c, plan.B, splits, lanes, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]
        flags = dict(HEADS=heads, GROUPS=groups, D=D, SPLIT=SPLIT, PAGED=paged, PARTS=parts)
        _launch(_attention, (tiles, heads, lanes), *args, **flags, **config)
        if parts:
            args = part_o, part_m, part_l, out, plan.q_ends, plan.kv_lens, c, plan.B, splits
            _launch(_merge_parts, (N * H,), *args, H=H, D=D, SPLIT=SPLIT, num_warps=1, **EXACT)
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
        args = grad, out, delta, N * H
        _launch(_attention_delta, (triton.cdiv(N * H, 16),), *args, D=D, ROWS=16, num_warps=4, **EXACT)
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        dq_config, dkv_config = _attention_config(q.dtype, 64, 4, 3), _attention_config(q.dtype, 64, 8, 2)
        rows, keys = dq_config["ROWS"], dkv_config["KEYS"]
        args, c = (q, k, v, grad, lse, delta), scale * LOG2_E
        tail = c, scale, plan.B, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]
        flags = dict(HEADS=heads, GROUPS=groups, D=D)
        grid, ends = (N * groups // rows + plan.B, heads), plan.ends(groups, rows)
        _launch(_attention_dq, grid, *args, dq, plan.q_ends, ends, *tail, **flags, **dq_config)
        grid, ends = (N // keys + plan.B, heads), plan.ends(1, keys)
        _launch(_attention_dkv, grid, *args, dk, dv, plan.q_ends, ends, *tail, **flags, **dkv_config)
        return dq, dk, dv, None, None


def attention(q, k, v, plan, scale):
    """
    Causal attention of packed queries q (N, Hq, D) over keys and values k, v (S, Hkv, D) -> (N, Hq, D).

    `plan` says which rows of k and v belong to which query; Hq must be a multiple of Hkv. Differentiable for a
    `packed_plan` only. On a GPU D is 64 or 128, Hq / Hkv at most 8, scale above 0.
    """
    if not _triton(q, k, v):
        return Attention.apply(q, k, v, plan, scale)
    if not isinstance(plan, TilePlan) or plan.q_lens.is_cuda != q.is_cuda:
        raise ValueError(f"the plan is not on q's device={q.device}: pass device to packed_plan")
    (_, H, D), heads = q.shape, k.shape[1]
    if D not in (64, 128) or k.shape[2] != D or v.shape != k.shape:
        raise ValueError(f"head dims {D}, {k.shape[2]}, {v.shape[2]}: 64 or 128, the same for q, k and v")
    if H % heads or H > 8 * heads:
        raise ValueError(f"{H} query heads over {heads} key heads: the group must be 1 to 8 whole heads")
    if scale <= 0:
        raise ValueError(f"scale={scale}: the largest score is taken before the scale, which must be above 0")
    return TileAttention.apply(q, k, v, plan, scale)


# ------------------------------------------------------------------------------------------------------------------
# the head: log-probs of chosen tokens, without keeping (N, V) numbers
#
# On Triton: log p_v = (z_v - m) - log sum_u exp(z_u - m), m = max z. `_softmax_stats` alone makes that sum, lane by
# lane and then over the lanes, an order that follows from V; log_softmax and token_logprobs both start from it.


@triton.jit
def _softmax_stats(z, t, stats, V: tl.constexpr, BLOCK: tl.constexpr):
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
def _log_softmax(z, t, stats, out, V: tl.constexpr, BLOCK: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = _log_prob(tl.load(z + row * V + c, mask=c < V, other=0.0), tl.load(t), stats + row * 2)
    tl.store(out + row * V + c, x.to(out.dtype.element_ty), mask=c < V)


@triton.jit
def _token_logprobs(z, t, stats, targets, logprobs, entropy, V: tl.constexpr, BLOCK: tl.constexpr):
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
def _token_grads(
    z, t, stats, targets, entropy, grad, entropy_grad, dz,
    V: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, c, t = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.load(t)
    x = _log_prob(tl.load(z + row * V + c, mask=c < V, other=0.0), t, stats + row * 2)
    p = tl.exp(x)
    d = tl.where(c == tl.load(targets + row), 1 - p, -p) * tl.div_rn(tl.load(grad + row), t)
    if ENTROPY:
        d -= tl.where(p > 0, p * (x + tl.load(entropy + row)), 0.0) * tl.div_rn(tl.load(entropy_grad + row), t)
    tl.store(dz + row * V + c, d.to(dz.dtype.element_ty), mask=c < V)


def _softmax_rows(z, t):
    """(z as the kernels need it, stats (M, 2), the kernels' constants) of scores z (M, V) at temperature t (1,)."""
    z, stats = _aligned(z), z.new_empty(len(z), 2, dtype=torch.float32)
    block = min(LANES, max(16, triton.next_power_of_2(z.shape[1])))
    config = dict(V=z.shape[1], BLOCK=block, num_warps=8, **EXACT)
    _launch(_softmax_stats, (len(z),), z, t, stats, **config)
    return z, stats, config


def gpu_log_softmax(x, dim, half_to_float):
    """aten::_log_softmax along the last dim."""
    if dim % max(1, x.dim()) != x.dim() - 1 or x.dim() == 0:
        raise ValueError(f"log_softmax: dim={dim} of {x.dim()}; only the last one is written")
    _triton(x)
    out = torch.empty(x.shape, dtype=torch.float32 if half_to_float else x.dtype, device=x.device)
    t = torch.ones(1, dtype=torch.float32, device=x.device)
    z, stats, config = _softmax_rows(x.reshape(-1, x.shape[-1]), t)
    _launch(_log_softmax, (len(z), triton.cdiv(z.shape[1], config["BLOCK"])), z, t, stats, out, **config)
    return out


def gpu_softmax(x, dim, half_to_float):
    """aten::_softmax along the last dim: no log-prob needs it, but SGLang's sampler draws from it."""
    return torch.exp(gpu_log_softmax(x, dim, half_to_float))


def head_logits(hidden, weight):
    """hidden (M, H) @ weight (V, H)^T -> (M, V) float32, accumulated and returned in float32. Not differentiable."""
    if _triton(hidden, weight):
        return matmul(hidden, weight.t(), out_dtype=torch.float32)
    return (hidden @ weight.t()).float()


class TokenLogprobs(torch.autograd.Function):
    """
    logprob_i = z_i[target_i] - log sum_v exp(z_i[v]), z = hidden weight^T / temperature, and the entropy of z_i's
    distribution, H_i. Row by row what a sampler computes from the engine's logits. The backward pass makes the logits
    again, with p = softmax(z_i): d logprob_i / dz_i = onehot(target_i) - p, d H_i / dz_i = -p (log p + H_i).
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        logprobs, entropy = [], []
        # divided by a tensor: by a Python number, CUDA would multiply by a rounded reciprocal
        t = torch.tensor(temperature, dtype=torch.float32, device=hidden.device)
        saved = []
        for h, target in zip(hidden.split(CHUNK), targets.split(CHUNK)):
            if _triton(h, weight):
                z, stats, config = _softmax_rows(head_logits(h, weight), t)
                logprobs.append(z.new_empty(len(z)))
                entropy.append(z.new_empty(len(z)))
                args = z, t, stats, _aligned(target), logprobs[-1], entropy[-1]
                _launch(_token_logprobs, (len(z),), *args, **config)
                saved.append(stats)
                continue
            logp = torch.log_softmax(head_logits(h, weight) / t, -1)
            logprobs.append(logp.gather(1, target[:, None])[:, 0])
            entropy.append(-(logp.exp() * logp).sum(-1))
        logprobs, entropy = torch.cat(logprobs), torch.cat(entropy)
        ctx.save_for_backward(hidden, weight, targets, t, entropy, *saved)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, entropy_grad):
        hidden, weight, targets, t, entropy, *saved = ctx.saved_tensors
        # float32: a sum over chunks in bfloat16 would lose the small ones
        d_hidden, d_weight = [], torch.zeros_like(weight, dtype=torch.float32)
        for i, (h, target, g) in enumerate(zip(hidden.split(CHUNK), targets.split(CHUNK), grad.split(CHUNK))):
            if _triton(h, weight):
                z, dz = _aligned(head_logits(h, weight)), h.new_empty(len(h), len(weight))
                g, eg = (g if x is None else x.split(CHUNK)[i] for x in (grad, entropy_grad))
                args = z, t, saved[i], target.contiguous(), entropy.split(CHUNK)[i], g.contiguous(), eg.contiguous(), dz
                flags = dict(V=len(weight), ENTROPY=entropy_grad is not None, BLOCK=1024, num_warps=4, **EXACT)
                _launch(_token_grads, (len(h), triton.cdiv(len(weight), 1024)), *args, **flags)
                d_hidden.append(matmul(dz, weight))
                matmul(dz.t(), h, out=d_weight)
                continue
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


def token_logprobs(hidden, weight, targets, temperature=1.0):
    """
    Log-probs of `targets` (N,) under softmax(hidden @ weight^T / temperature), and the entropies, both (N,) float32.

    hidden (N, H), weight (V, H). Gradients flow to hidden and weight; the log-probs must have one.
    """
    return TokenLogprobs.apply(hidden, weight, targets, temperature)


# ------------------------------------------------------------------------------------------------------------------
# the embedding's gradient: dw[v] = sum of the gradients of v's tokens, in the order of the tokens


@triton.jit(do_not_specialize=["N"])
def _embedding_backward(grad, ids, order, out, N, C, pad, BLOCK: tl.constexpr):
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
    """aten::embedding_dense_backward: grad (..., C) of ids (...) -> (rows, C). Stable sort, then runs; no atomics."""
    if scale_grad_by_freq:
        raise ValueError("scale_grad_by_freq=True: the embedding's gradient is written without it")
    _triton(grad)
    C = grad.shape[-1]
    grad, out = grad.reshape(-1, C).contiguous(), grad.new_zeros(rows, C)
    ids, order = torch.sort(ids.reshape(-1).long(), stable=True)
    args = grad, ids, order, out, len(ids), C, padding_idx
    _launch(_embedding_backward, (len(ids), triton.cdiv(C, 1024)), *args, BLOCK=1024, num_warps=4, **EXACT)
    return out


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
        cpu = dict(mm=mm, addmm=addmm, silu=silu, silu_backward=silu_backward)
        gpu = dict(mm=matmul, bmm=matmul, addmm=addmm, _log_softmax=gpu_log_softmax, _softmax=gpu_softmax)
        gpu["embedding_dense_backward"] = embedding_backward
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that aten's kernels are replaced, which is what we want
            for device, kernels in dict(CPU=gpu if INTERPRET else cpu, CUDA=gpu).items():
                for name, kernel in kernels.items():
                    _library.impl(name, kernel, device, allow_override=True)


def disable_batch_invariant():
    """Gives torch its kernels back: for `batch_invariant=False` and for tests that show the difference."""
    global _library
    if _library is not None:
        _library._destroy()
    _library = None
