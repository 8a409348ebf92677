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

Each operator is one public function, which checks its operands and picks by device: `cpu_*` and `Cpu*`, loops in
float32 that Numba compiles and that are to be read as the reference, or `triton_*` and `Triton*` on an NVIDIA GPU of
one of CARDS (bfloat16, or float32 without TF32). A section is always in this order: the equation, why its order is
fixed, the CPU's path, the Triton kernels, the autograd Function that launches them, the public function.

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
H / HK, D head dim, C width, F width of the MLP, V vocabulary; M, N, K of a matmul (M, K) @ (K, N).
"""

import ctypes
import functools
import math
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
import triton
import triton.language as tl
from llvmlite import ir
from numba import types
from numba.core import cgutils, event
from numba.extending import intrinsic, models, register_model
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged
from triton.tools.tensor_descriptor import TensorDescriptor


def cpu_features():
    """The features of this CPU, or those for which Numba is told to compile."""
    told = numba.config.CPU_FEATURES
    return llvmlite.binding.get_host_cpu_features().flatten() if told is None else told


# Part of the order of addition: whoever tunes one of these changes the bits of engine and trainer alike, and with them
# every curve that was ever recorded. On both devices:
CHUNK = 1024  # rows of logits held at a time: the head's weight gradient is added chunk by chunk

# On a CPU:
VECTOR = 16  # a row's sum is this number of sums side by side, whatever the width of the machine's vectors

# On Triton, where block and warps are the layout in which `tl.sum` adds a row:
KEYS, KEYS_FLOAT32 = 64, 16  # keys per softmax tile, counted from position 0 of the sequence ..
KEYS_OF_WARPS = 32  # .. and on cards without TMA, where each warp multiplies for itself and has fewer registers free
SPLIT = 1024  # keys whose softmax is taken apart from the others', counted from position 0: decode's unit of work
SUM_ROWS = 64  # rows a weight gradient adds before the next level of sums
MIN_BLOCK = 16  # a row's block is the power of two that holds it, and at least this
NORM_BLOCK = 2048  # numbers a norm's program holds: as many rows as fit, or one long row
NORM_WARPS, LONG_NORM_WARPS = 4, 8  # of a norm's program; long is a row beyond NORM_BLOCK
LANES, LANE_WARPS = 4096, 8  # partial sums of a long row (log-probs, `row_sums`), and the warps that hold them
DELTA_ROWS, DELTA_WARPS = 16, 4  # rows and warps of a program of rowsum(do * o), in attention's backward


class Card(NamedTuple):
    """What the tiles of a compute capability follow."""

    shared: int  # KB of shared memory that a program may have
    sms: int  # of the usual card; speed only
    tma: bool  # products by groups of warps, from shared memory that the copy engine fills; else by each warp


CARDS = {
    (8, 0): Card(163, 108, False), (8, 6): Card(99, 84, False), (8, 9): Card(99, 128, False),
    (9, 0): Card(227, 132, True), (10, 0): Card(227, 148, True), (12, 0): Card(99, 170, False),
}  # fmt: skip
CAPABILITIES = ", ".join(f"{major}.{minor}" for major, minor in CARDS)

# Speed only, never seen in the bits. The figures are guesses until measured on a card, as are the warps and stages of
# attention.
TILES = (  # BLOCK_M, BLOCK_N, BLOCK_K, warps, stages of a matmul's program; an SM has room for 8 warps of them
    (128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (64, 128, 64, 4, 4), (64, 64, 128, 4, 3),
    (64, 32, 128, 4, 4), (64, 16, 128, 4, 4), (32, 64, 128, 4, 4), (16, 64, 128, 4, 4),
)  # fmt: skip
PRODUCTS = 128  # of a matmul that take an SM as long as to load one of their numbers
DECODE_ROWS = 64  # query rows of a decode tile: 16 would be enough, but mma.sync instead of wgmma
DECODE_PROGRAMS = 528  # of a decode step: with fewer (token, head) pairs, the splits go to several; 4 per SM
PREFILL_ROWS, BACKWARD_ROWS = 128, 64  # query rows of a tile of a prefill, a packed batch or dQ, and of dK and dV
PAGED_STAGES = 5  # the index of a page has its own: with 4, as with 3, no keys are on their way during the products
ROWS_OF_WARPS = 64  # query rows of a tile, and keys of one of dK and dV, on cards without TMA
BACKWARD_KEYS = 128  # keys of a program of dK and dV: 64 for each of two groups of warps, or both compute the same
HASHED = 1 << 24  # elements of `bit_sum` that are multiplied at a time
COLUMNS = 256  # columns that a program of `triton_column_sums` adds, each for itself
MERGED = 64  # rows and columns of a program of `triton_lora`
ELEMENTS, ELEMENT_WARPS = 1024, 4  # numbers of a row that one program of an elementwise kernel takes, and its warps

# The same of the CPU's loops: the tile of a matmul that the registers hold (512 bits, or 256) ..
TILE_ROWS, TILE_VECTORS = (8, 2) if "+avx512f" in cpu_features() else (6, 1)
PANEL = TILE_VECTORS * VECTOR  # .. and its columns, which lie together when it reads them
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
BLOCK_ROWS, QUERIES = 128, 64  # rows of a matmul's unit of work, and query rows of attention's
WORTH_THREADS = 2e7  # operations that are worth waking another thread

EXACT = {"enable_fp_fusion": False}  # no a * b + c in one rounding, unless it is written as one
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # tests: CPU tensors take the Triton path too


# ------------------------------------------------------------------------------------------------------------------
# which path


def card(x):
    """The Card that x lies on, None if CARDS has none; of a tensor that is on no GPU, as in tests, a Hopper."""
    return CARDS.get(torch.cuda.get_device_capability(x.device) if x.is_cuda else (9, 0))


def device_kind(device):
    """'cpu', or a GPU with its compute capability, 'cuda 9.0': what has bits of its own."""
    return device if device == "cpu" else "cuda {}.{}".format(*torch.cuda.get_device_capability())


def use_triton(x):
    """Whether x takes the Triton path: the loops are for CPUs, and for no other device."""
    return not x.is_cpu or INTERPRET


def check_operands(x, *others):
    """Raises ValueError unless x's path can compute with x, and `others` have its device and dtype."""
    on_a_gpu = use_triton(x) and not INTERPRET
    if on_a_gpu and (x.device.type != "cuda" or card(x) is None):
        raise ValueError(f"device={x.device}: the Triton operators are for compute capabilities {CAPABILITIES}")
    for y in others:
        if (y.dtype, y.device) != (x.dtype, x.device):
            raise ValueError(f"{y.dtype} on {y.device} beside {x.dtype} on {x.device}: operands must agree")
    if not use_triton(x) and x.dtype != torch.float32:  # the loops would read other bits as float32
        raise ValueError(f"dtype={x.dtype}: the CPU operators know float32")
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


class _NoGradient:
    def save_for_backward(self, *_):
        pass


def _apply(function, *args):
    """function.apply(*args) if a gradient may be asked for, else forward alone: `apply` is slower than some loops."""
    return function.apply(*args) if torch.is_grad_enabled() else function.forward(_NoGradient(), *args)


def _contiguous_like(x):
    """A new tensor for a result of x's shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _block(width):
    return max(MIN_BLOCK, triton.next_power_of_2(width))


# ------------------------------------------------------------------------------------------------------------------
# loops: what the CPU's operators are written in. Numba compiles them as they stand: in the order that is written, a
# product and a sum in one rounding only where it says `fma`, which is the same number on every CPU. Elements that have
# nothing to do with each other are still computed side by side, in vectors as wide as the machine has them.
#
# Where the order of a sum must not follow that width, numbers are held in tiles: rows x vectors x VECTOR of them, which
# LLVM cuts into the registers that the machine has. `exp` and the like are ours: those of the libraries differ.


FLOATS, INT32, INT64 = ir.VectorType(ir.FloatType(), VECTOR), ir.IntType(32), ir.IntType(64)
LOAD, STORE, FMA = f"masked.load.v{VECTOR}f32.p0", f"masked.store.v{VECTOR}f32.p0", f"fma.v{VECTOR}f32"
ZERO, ONE, ONES, NOTHING = np.float32(0), np.float32(1), np.ones(VECTOR, np.float32), np.zeros(0, np.float32)
LEAST = np.finfo(np.float32).min
LOOP_DTYPES = {torch.float32: "<f4", torch.float64: "<f8", torch.int32: "<i4", torch.int64: "<i8"}
# Constants of `exp`, `log` and `cos_sin`. To add WHOLE32 or WHOLE64 and subtract it again rounds to a whole number.
WHOLE32, LOG2_E32 = np.float32(1.5 * 2**23), np.float32(1.4426950408889634)
EXP_ENDS = np.float32(-104), np.float32(89)  # exp is 0 from the first down, infinite from the second up
LN2_32 = np.float32(-0.693359375), np.float32(2.12194440e-4)  # -ln 2 as a sum, the first number with few bits
EXP = 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1
EXP = tuple(map(np.float32, EXP))
WHOLE64, HALF_PI = 1.5 * 2**52, (1.5707963267948966, 6.123233995736766e-17)
LOG_SHIFT = (0x3FF00000 - 0x3FE6A09E) << 32  # the bits of 1 minus those of sqrt(1/2)
LN2_64 = 6.93147180369123816490e-01, 1.90821492927058770002e-10
LOG = (
    1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01,
    2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01,
)  # fmt: skip
COS = (
    -1.13596475577881948265e-11, 2.08757232129817482790e-09, -2.75573143513906633035e-07, 2.48015872894767294178e-05,
    -1.38888888888741095749e-03, 4.16666666666666019037e-02,
)  # fmt: skip
SIN = (
    1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06, -1.98412698298579493134e-04,
    8.33333333332248946124e-03, -1.66666666666666324348e-01,
)  # fmt: skip


@functools.cache
def _say(text):
    """Prints a line, once in a process."""
    print(f"kernels.py: {text}", file=sys.stderr, flush=True)


class CompileListener(event.Listener):
    """Says in one line why a first start takes longer."""

    def on_start(self, _):
        _say("compiling its loops for this CPU, once: up to half a minute")

    def on_end(self, _):
        pass


event.register("numba:compile", CompileListener())


def loop(function, **options):
    """Compiled at its first call. The result is kept beside this file, or where NUMBA_CACHE_DIR says."""
    options |= dict(nogil=True, error_model="numpy")
    try:
        return numba.njit(function, cache=True, **options)
    except (RuntimeError, OSError):
        _say("no folder for compiled loops can be written (NUMBA_CACHE_DIR): they are compiled at each start")
        return numba.njit(function, **options)


class Tile(types.Type):
    def __init__(self, rows, vectors):
        super().__init__(f"Tile({rows}, {vectors})")
        self.rows, self.vectors = rows, vectors


@register_model(Tile)
class TileModel(models.PrimitiveModel):
    def __init__(self, manager, tile):
        super().__init__(manager, tile, ir.ArrayType(FLOATS, tile.rows * tile.vectors))


def _llvm(builder, name, result, *args):
    """Calls LLVM's own function of this name."""
    kind = ir.FunctionType(result, [x.type for x in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}"), args)


def _in_all_lanes(builder, x):
    first = builder.insert_element(ir.Constant(ir.VectorType(x.type, VECTOR), ir.Undefined), x, INT32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(INT32, VECTOR), [0] * VECTOR))


def _vectors(builder, tile, pointer, at, stride, left):
    """Yields for each vector of a tile its number, and (pointer, alignment, mask of its columns below `left`)."""
    for i in range(tile.rows * tile.vectors):
        row, first = divmod(i, tile.vectors)
        if row and not first:
            at = builder.add(at, stride)
        columns = ir.Constant(ir.VectorType(INT64, VECTOR), list(range(first * VECTOR, (first + 1) * VECTOR)))
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
        out, zeros = ir.Constant(context.get_value_type(tile), None), ir.Constant(FLOATS, None)
        for i, where in _vectors(builder, tile, _pointer(context, builder, x, args[2]), *args[3:]):
            out = builder.insert_value(out, _llvm(builder, LOAD, FLOATS, *where, zeros), i)
        return out

    return tile(rows, vectors, x, at, stride, left), generate


@intrinsic(prefer_literal=True)
def store(_, tile, x, at, stride, left):
    """Writes a tile to where `load` would read it; columns from `left` on are left as they are."""

    def generate(context, builder, signature, args):
        for i, where in _vectors(builder, tile, _pointer(context, builder, x, args[1]), *args[2:]):
            _llvm(builder, STORE, ir.VoidType(), builder.extract_value(args[0], i), *where)
        return context.get_dummy_value()

    return types.void(tile, x, at, stride, left), generate


@intrinsic
def add_outer(_, tile, a, at, stride, b, first):
    """The tile with a[at + r * stride] * b[first ..] added to each row r, product and sum in one rounding."""

    def generate(context, builder, signature, args):
        out, x, at, stride, y, first = args
        x, y = _pointer(context, builder, a, x), builder.gep(_pointer(context, builder, b, y), [first])
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
        for i in range(tile.rows * tile.vectors):
            old, *factors = (builder.extract_value(t, i) for t in args)
            args = builder.insert_value(args[0], _llvm(builder, FMA, FLOATS, *factors, old), i), *args[1:]
        return args[0]

    return tile(tile, x, y), generate


@intrinsic
def total(_, tile):
    """The sum of a tile of one vector: its two halves are added until one number is left."""

    def generate(context, builder, signature, args):
        x, half = builder.extract_value(args[0], 0), VECTOR // 2
        while half:
            upper = ir.Constant(ir.VectorType(INT32, VECTOR), [*range(half, VECTOR)] + [0] * half)
            x, half = builder.fadd(x, builder.shuffle_vector(x, x, upper)), half // 2
        return builder.extract_element(x, INT32(0))

    return types.float32(tile), generate


@intrinsic
def transpose(_, tile):
    """The transpose of a tile of VECTOR rows, one vector each."""

    def generate(context, builder, signature, args):
        # Row i of the upper half and row i of the lower one, number by number in turn; log2(VECTOR) times.
        half, rows = VECTOR // 2, [builder.extract_value(args[0], i) for i in range(VECTOR)]
        pairs = [VECTOR * (i % 2) + i // 2 for i in range(2 * VECTOR)]
        masks = [ir.Constant(ir.VectorType(INT32, VECTOR), x) for x in (pairs[:VECTOR], pairs[VECTOR:])]
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
    n, half = np.int32(n), np.int32(n) >> 1  # 2^n in two factors: one alone would end before the denormal numbers
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
    s, half = f / (2.0 + f), 0.5 * f * f
    y = k * LN2_64[0] - ((half - (s * (half + s * s * polynomial(s * s, LOG)) + k * LN2_64[1])) - f)
    y = y if x > 0.0 else (-np.inf if x == 0.0 else np.nan)
    return y if x < np.inf else x


@loop
def cos_sin(x):
    """(cos x, sin x) of a float64 below 10^6: x = n pi / 2 + r, |r| <= pi / 4 (fdlibm, k_cos.c and k_sin.c)."""
    n = fma(x, 2.0 / np.pi, WHOLE64) - WHOLE64
    r = fma(-n, HALF_PI[1], fma(-n, HALF_PI[0], x))
    z, n = r * r, np.int64(n)
    c, s = fma(z * z, polynomial(z, COS), 1.0 - 0.5 * z), fma(z * r, polynomial(z, SIN), r)
    c, s = (s, c) if n & 1 else (c, s)
    return (-c if (n + 1) & 2 else c), (-s if n & 2 else s)


@loop
def dot(x, at, y, to, n):
    """sum x[at + i] y[to + i] of n float32: VECTOR sums of every VECTOR-th product in order, then their `total`."""
    tile = load(1, 1, x, at, 0, 0)
    for i in range(0, n, VECTOR):
        tile = add_product(tile, load(1, 1, x, at + i, 0, n - i), load(1, 1, y, to + i, 0, n - i))
    return total(tile)


@loop
def sum_of(x, at, n):
    """The sum of n float32 from x[at] on, in the order of `dot`."""
    tile = load(1, 1, x, at, 0, 0)
    for i in range(0, n, VECTOR):
        tile = add_product(tile, load(1, 1, x, at + i, 0, n - i), load(1, 1, ONES, 0, 0, VECTOR))
    return total(tile)


@functools.partial(loop, fastmath={"nnan", "nsz"})  # else LLVM uses no vectors; a maximum has no order to keep
def largest(x, at, n):
    y, row = x[at], x[at:]
    for i in range(n):
        y = row[i] if row[i] > y else y
    return y


class _Memory:
    """What NumPy takes for an array. Not Tensor.numpy(), after which FSDP2 cannot resize the tensor's storage."""

    def __init__(self, x, size):
        self.kept, where = x, (x.data_ptr(), False)
        self.__array_interface__ = dict(data=where, shape=(size,), typestr=LOOP_DTYPES[x.dtype], version=3)


def _flat(x):
    """
    The memory of a CPU tensor from its first element to its last, as a NumPy array that loops index by x's strides.
    Loops check nothing: their callers have compared the shapes.
    """
    if not x.is_cpu or x.dtype not in LOOP_DTYPES:
        raise ValueError(f"{x.dtype} on {x.device}: the CPU operators know float32")
    if not x.numel():
        return NOTHING.view(LOOP_DTYPES[x.dtype])
    size = x.numel() if x.is_contiguous() else 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
    return np.asarray(_Memory(x, size))


threads = 1  # of a loop; torch itself gets one only (enable_batch_invariant)
_pool = functools.cache(lambda process: ThreadPoolExecutor(os.cpu_count()))  # a fork has none of its parent's threads


def _share(loop, units, work, *args):
    """loop(first, last, *args) over all units, by several threads if `work`, the number of operations, is worth it."""
    shares = min(threads, units)  # so that no share is empty: a loop may read its first unit
    if shares <= 1 or work < WORTH_THREADS:
        return loop(0, units, *args) if units else None
    ends = [units * i // shares for i in range(shares + 1)]
    others = [_pool(os.getpid()).submit(loop, *part, *args) for part in zip(ends[1:], ends[2:])]
    loop(0, ends[1], *args)
    for other in others:
        other.result()


# ------------------------------------------------------------------------------------------------------------------
# matmul: c[m, n] = sum_k a[m, k] b[k, n]. `mm` and `addmm` replace the aten kernels, so that any model reaches them,
# forward and backward.
#
# One accumulator takes what belongs to its element in the order of K, whatever tile the element is in: on a CPU product
# by product, on Triton by steps of k16, whose last one is filled with zeros, which add nothing. Other rows and columns
# never enter it.


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
    b_k or b_n is 1.
    """
    for n in range(first * PANEL, last * PANEL, VECTOR):
        to, whole = n // PANEL * PANEL * K + n % PANEL, K // VECTOR * VECTOR if b_n != 1 and n + VECTOR <= N else 0
        for k in range(0, whole, VECTOR):
            store(transpose(load(VECTOR, 1, b, n * b_n + k, b_n, VECTOR)), packed, to + k * PANEL, PANEL, VECTOR)
        for k in range(whole, K):
            if b_n == 1:
                store(load(1, 1, b, k * b_k + n, 0, N - n), packed, to + k * PANEL, 0, VECTOR)
            else:
                for i in range(VECTOR):
                    packed[to + k * PANEL + i] = b[(n + i) * b_n + k] if n + i < N else ZERO


@loop
def cpu_multiply(a, at, a_m, a_k, M, K, packed, start, depth, first, last, c, to, c_m, N, add):
    """
    c[to + m c_m + n] = sum_k a[at + m a_m + k a_k] b[k, n], added to what is there if `add`: one chain of `fma` in the
    order of K. b: the rows from `start` on of the panels first .. last of `packed` (panels, depth, PANEL).
    """
    for panel in range(first, last):
        b, n = (panel * depth + start) * PANEL, panel * PANEL
        whole = M // TILE_ROWS * TILE_ROWS
        for m in range(0, whole, TILE_ROWS):
            tile = load(TILE_ROWS, TILE_VECTORS, c, to + m * c_m + n, c_m, N - n if add else 0)
            for k in range(K):
                tile = add_outer(tile, a, at + m * a_m + k * a_k, a_m, packed, b + k * PANEL)
            store(tile, c, to + m * c_m + n, c_m, N - n)
        for m in range(whole, M):
            row = load(1, TILE_VECTORS, c, to + m * c_m + n, c_m, N - n if add else 0)
            for k in range(K):
                row = add_outer(row, a, at + m * a_m + k * a_k, a_m, packed, b + k * PANEL)
            store(row, c, to + m * c_m + n, c_m, N - n)


@loop
def cpu_matmul_blocks(first, last, a, a_m, a_k, packed, c, M, N, K, add):
    """Units are blocks of BLOCK_ROWS rows, panel by panel: what `first` to `last` read of a stays in the cache."""
    across = panels(N)
    for unit in range(first, last):
        m, panel = unit // across * BLOCK_ROWS, unit % across
        rows = min(BLOCK_ROWS, M - m)
        cpu_multiply(a, m * a_m, a_m, a_k, rows, K, packed, 0, K, panel, panel + 1, c, m * N, N, N, add)


# An engine makes this a dict, {where b is: (b, its panels)} and layers, and clears it when its weights change. Its b
# are weights only, and its a have often so few rows that to pack the panels takes as long as the product.
kept = None


def _panels_of(b):
    where = b.data_ptr(), b.shape, b.stride()
    if kept and where in kept:
        return kept[where][1]
    (K, N), across = b.shape, -(-b.shape[1] // PANEL)
    packed = np.empty(across * K * PANEL, np.float32)
    _share(cpu_pack, across, K * N, _flat(b), *b.stride(), K, N, packed)
    if kept is not None:
        kept[where] = b, packed
    return packed


def cpu_matmul(a, b, out=None):
    """a (M, K) @ b (K, N) -> (M, N), any strides. out: a contiguous result to which the product is added."""
    (M, K), N, add = a.shape, b.shape[1], out is not None
    c = out if add else a.new_empty(M, N)
    if 1 not in b.stride():
        b = b.contiguous()
    units, tail = -(-M // BLOCK_ROWS) * -(-N // PANEL), (_panels_of(b), _flat(c), M, N, K, add)
    _share(cpu_matmul_blocks, units, 2 * M * N * K, _flat(a), *a.stride(), *tail)
    return c


@triton.jit
def _tile_at(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of an output tile; GROUP rows of tiles go together, so that L2 serves b to all of them."""
    down, across = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = tile // (GROUP * across) * GROUP
    height = min(down - first, GROUP)
    tile = tile % (GROUP * across)
    return first + tile % height, tile // height


@triton.jit
def _part(c, m, n, M, N, c_m, c_n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Pointers to the (ROWS, COLUMNS) of c from (m, n) on, and which of them lie inside."""
    rows, cols = (m + tl.arange(0, ROWS))[:, None], (n + tl.arange(0, COLUMNS))[None, :]
    return c + rows.to(tl.int64) * c_m + cols.to(tl.int64) * c_n, (rows < M) & (cols < N)


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
    """
    The same chain, fed by the copy engine. A_MK, B_NK: the descriptor's matrix lies (M, K), (N, K), K contiguous.
    Flattened, the loops over tiles and K are one: a tile is stored while the next one's loads are under way. It goes in
    halves, since the stages leave no shared memory for a whole one. With ADD, whose accumulator is read from c, the
    flattened loads would be waited for one by one.
    """
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N), PROGRAMS, flatten=not ADD):
        row, col = _tile_at(tile, M, N, BLOCK_M, BLOCK_N, 8)
        m, n = row * BLOCK_M, col * BLOCK_N
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
    An estimate, in numbers loaded per k: of the SM that has most of the tiles, and of a tile what it loads (not what
    lies beyond the matrix) and what it multiplies.
    """
    work = min(block_m, M) + min(block_n, N) + block_m * block_n / PRODUCTS
    return -(-_tiles(M, N, block_m, block_n) // sms) * work


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
    block_m, block_n, block_k, warps, stages = min(table, key=lambda tile: _tile_time(M, N, *tile[:2], card.sms))
    while 16 * stages * (block_m + block_n) * block_k // warps > 1024 * card.shared:  # of the programs of an SM
        block_k //= 2
    alone = _tiles(M, N, block_m, block_n) <= card.sms  # on its SM, whose shared memory is then for its stages
    return block_m, block_n, block_k, warps, stages * 8 // warps if alone else stages


def _lies_for_tma(x):
    """Whether the last dim is contiguous, and the others begin at multiples of 16 bytes: what TMA can read."""
    return x.stride(-1) == 1 and not any(n % 16 for n in (x.data_ptr(), *(n * x.itemsize for n in x.stride()[:-1])))


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
    if not fits or out is not None and out.shape != (len(a), b.shape[1]):
        raise ValueError(f"shapes {tuple(a.shape)} and {tuple(b.shape)} do not multiply")
    check_operands(a, b)
    if out is not None and (out.dtype, out.device, out.is_contiguous()) != (torch.float32, a.device, True):
        raise ValueError(f"out {out.dtype} on {out.device}: contiguous float32 on a's device is needed")
    if not use_triton(a):
        return cpu_matmul(a, b, out)
    (M, K), N, add = a.shape, b.shape[1], out is not None
    result = c = out if add else a.new_empty(M, N, dtype=out_dtype or a.dtype)
    if 0 in c.shape:
        return result
    x, y = (_for_tma(a), _for_tma(b.t())) if K else (None, None)
    wide, aligned, on = bool(x and y), c.stride(0) % 16 == 0, card(a)
    block_m, block_n, block_k, warps, stages = _matmul_config(M, N, a.dtype, wide, aligned, on)
    if block_m < 64:  # which wgmma needs, so the columns become the rows: c^T = b^T a^T
        a, b, c, x, y, M, N, block_m, block_n = b.t(), a.t(), c.t(), y, x, N, M, block_n, block_m
    tiles = _tiles(M, N, block_m, block_n)
    config = dict(BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages)
    if wide and on.tma:
        programs = min(tiles, on.sms * 8 // warps)  # all that are under way at once, which take tile after tile
        blocks = ([block, block_k] if k else [block_k, block] for block, k in ((block_m, x[1]), (block_n, y[1])))
        descriptors = [TensorDescriptor.from_tensor(t, block) for (t, _), block in zip((x, y), blocks)]
        args = (c, *descriptors, M, N, K, *c.stride(), programs, x[1], y[1], add)
        _launch(triton_matmul_tma, (programs,), *args, **config)
    else:
        _launch(triton_matmul, (tiles,), a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride(), add, **config)
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
    return split_matmul(a[:, :half], b[:half], split // 2).add_(split_matmul(a[:, half:], b[half:], split // 2))


def linear(x, weight, bias, split=1, gather=None):
    """
    x (M, K) @ weight (N, K)^T + bias (N,) or None -> (M, N), not differentiable. split: number of products into which K
    is cut here. gather: if other ranks have more parts of K, gather(the float32 sum here) -> (ranks, M, N), all sums.
    """
    if split == 1 and not gather:
        return mm(x, weight.t()) if bias is None else addmm(bias, x, weight.t())
    y = split_matmul(x, weight.t(), split)
    y = tree_sum(gather(y)) if gather else y
    return (y if bias is None else y + bias).to(x.dtype)


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


# ------------------------------------------------------------------------------------------------------------------
# LoRA (Hu et al. 2021, arXiv:2106.09685): W' = W + scale B A, with the matrices A (r, K) and B (N, r) learned. The
# engine gets W', and the trainer multiplies by it, too: the adapters apart, x A^T B^T, would be other numbers. An
# element's sum over r is one chain, whichever rows of W are merged with it.


@triton.jit(do_not_specialize=["N"])
def triton_lora(weight, A, B, out, scale, N, K, R, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr):
    n, k, r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1) * BLOCK, tl.arange(0, BLOCK_R)
    k += tl.arange(0, BLOCK)
    inside, inside_n, inside_k, n = (n < N)[:, None] & (k < K), (n < N)[:, None], k < K, n.to(tl.int64)[:, None]
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for first in range(0, R, BLOCK_R):
        x = tl.load(B + n * R + first + r, mask=inside_n & (first + r < R), other=0.0)
        y = tl.load(A + (first + r)[:, None].to(tl.int64) * K + k, mask=inside_k & (first + r < R)[:, None], other=0.0)
        acc = tl.dot(x, y, acc, input_precision="ieee")
    merged = tl.load(weight + n * K + k, mask=inside, other=0.0).to(tl.float32) + scale * acc
    tl.store(out + n * K + k, merged.to(out.dtype.element_ty), mask=inside)


def merge(weight, A, B, scale):
    """weight (N, K) + scale * B (N, r) @ A (r, K), in float32, rounded once to weight's dtype. A and B are float32."""
    if weight.shape != (len(B), A.shape[1]) or B.shape[1] != len(A):
        shapes = [tuple(x.shape) for x in (weight, A, B)]
        raise ValueError(f"weight, A, B {shapes}: (N, K), (r, K), (N, r) are needed")
    check_operands(A, B, weight.new_empty(0, dtype=torch.float32))
    if not use_triton(weight):
        return cpu_matmul(B, A).mul_(scale).add_(weight).to(weight.dtype)
    weight, A, B, (N, K) = *map(_aligned, (weight, A, B)), weight.shape
    out, grid = torch.empty_like(weight), (triton.cdiv(N, MERGED), triton.cdiv(K, MERGED))
    _launch(triton_lora, grid, weight, A, B, out, scale, N, K, len(A), BLOCK=MERGED, BLOCK_R=16, **EXACT)
    return out


class LoRALinear(torch.autograd.Function):
    """
    x (T, K) @ W'^T + bias (N,) or None. With g the gradient of W', dB = scale g A^T and dA = scale B^T g; g itself,
    which is grad^T x, is never made: r numbers of a token take its place on the way.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, A, B, scale, split=1):
        ctx.save_for_backward(x, weight, A, B)
        ctx.scale, merged = scale, merge(weight, A, B, scale)
        return linear(x, merged, bias, split) if split > 1 else torch.nn.functional.linear(x, merged, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight, A, B = ctx.saved_tensors
        # W' is made again: kept, it would be a second model in memory.
        dx = torch.mm(grad, merge(weight, A, B, ctx.scale)) if ctx.needs_input_grad[0] else None
        x, grad = x.float(), grad.float()
        dA = torch.mm((torch.mm(grad, B) * ctx.scale).t(), x)
        dB = torch.mm(grad.t(), torch.mm(x, A.t()) * ctx.scale)
        return dx, None, None, dA, dB, None, None


# ------------------------------------------------------------------------------------------------------------------
# row_sums: y_r = sum_c x_rc, for the gradient norm
#
# On a CPU one number after the other. On Triton LANES partial sums, each in order, and then their sum, an order that
# follows from C.


@loop
def cpu_row_sums(first, last, x, C, out):
    for row in range(first, last):
        y = 0.0
        for i in range(row * C, (row + 1) * C):
            y += x[i]
        out[row] = y


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
    out, x = x.new_empty(len(x)), _aligned(x)
    if not use_triton(x):
        _share(cpu_row_sums, len(x), x.numel(), _flat(x), x.shape[1], _flat(out))
        return out
    block = min(LANES, _block(x.shape[1]))
    _launch(triton_row_sums, (len(x),), x, out, x.shape[1], BLOCK=block, num_warps=LANE_WARPS, **EXACT)
    return out


# ------------------------------------------------------------------------------------------------------------------
# RMSNorm: y_i = w_i x_i r, r = (mean_j x_j^2 + eps)^-1/2 (Zhang and Sennrich 2019, eq. 4).
# With n = x r, h = g w: dx = r (h - n mean(h n)), dw = sum over rows of g n.
#
# A program holds whole rows, and how many, in which block and by how many warps follows from the row's length, which is
# a constant of the compiled kernel: so `tl.sum` has one order per length. dw is added by blocks of SUM_ROWS rows.


@loop
def _norm_scale(x, at, C, eps):
    return ONE / np.sqrt(dot(x, at, x, at, C) / np.float32(C) + eps)


@loop
def _turn_row(y, cos, sin, half, sign):
    other = y[half:]
    for i in range(half):
        a, b, s = y[i], other[i], sign * sin[i]
        y[i], other[i] = a * cos[i] - b * s, b * cos[i] + a * s


@loop
def cpu_norm_rope(first, last, x, x_n, weight, cos, sin, y, H, C, eps):
    """Tokens first .. last of x, H rows of C each, x_n apart. An empty weight skips the norm, an empty cos the turn."""
    half = C // 2
    for row in range(first * H, last * H):
        at = row // H * x_n + row % H * C
        of, to = x[at:], y[row * C :]
        scale = _norm_scale(x, at, C, eps) if len(weight) else ONE
        for i in range(C):
            to[i] = of[i] * scale * weight[i] if len(weight) else of[i]
        if len(cos):
            _turn_row(to, cos[row // H * half :], sin[row // H * half :], half, ONE)


@loop
def cpu_norm_rope_backward(first, last, x, x_n, weight, cos, sin, dx, dw, H, C, eps):
    """dx holds the gradient and becomes x's; dw (blocks, C) gets the sum over each SUM_ROWS tokens' rows, in order."""
    half = C // 2
    for row in range(first * SUM_ROWS * H, min(last * SUM_ROWS * H, len(dx) // C)):
        at = row // H * x_n + row % H * C
        of, to = x[at:], dx[row * C :]
        if len(cos):
            _turn_row(to, cos[row // H * half :], sin[row // H * half :], half, -ONE)
        if len(weight):
            scale, part = _norm_scale(x, at, C, eps), dw[row // H // SUM_ROWS * C :]
            for i in range(C):
                part[i] += to[i] * (of[i] * scale)
                to[i] *= weight[i]
            mean = dot(dx, row * C, x, at, C) * scale / np.float32(C)
            for i in range(C):
                to[i] = scale * (to[i] - of[i] * scale * mean)


class CpuNormRope(torch.autograd.Function):
    """x (N, H, C): normed where there is a weight (C,), turned where there are cos and sin (N, C / 2)."""

    @staticmethod
    def operands(x, *others):
        return _flat(x), x.stride(0), *(NOTHING if t is None else _flat(t.contiguous()) for t in others)

    @staticmethod
    def forward(ctx, x, weight, cos, sin, eps):
        x = x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
        y, ctx.eps, saved = _contiguous_like(x), np.float32(eps), (x, weight, cos, sin)
        _share(cpu_norm_rope, len(x), 8 * x.numel(), *CpuNormRope.operands(*saved), _flat(y), *x.shape[1:], ctx.eps)
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, weight, *_ = saved = ctx.saved_tensors
        dx, blocks = grad.clone(memory_format=torch.contiguous_format), -(-len(x) // SUM_ROWS)
        dw = x.new_zeros(0 if weight is None else blocks, x.shape[2])
        tail = _flat(dx), _flat(dw), *x.shape[1:], ctx.eps
        _share(cpu_norm_rope_backward, blocks, 16 * x.numel(), *CpuNormRope.operands(*saved), *tail)
        return dx, None if weight is None else row_sums(dw.t().double()).float(), None, None, None


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
    s = x if residual is None else x + residual  # not in the kernel: the engine passes residuals, the trainer none
    check_operands(x, weight, s)
    if use_triton(x):
        y = TritonRMSNorm.apply(s, weight, eps)
    else:
        y = _apply(CpuNormRope, s.reshape(-1, 1, s.shape[-1]), weight, None, None, eps).view(s.shape)
    return y if residual is None else (y, s)


# ------------------------------------------------------------------------------------------------------------------
# norm_rope: n = x without weights, else as in RMSNorm, over one head; then (n1 c - n2 s, n2 c + n1 s), n1 and n2 its
# halves (Su et al. 2021, eq. 34, NeoX halves). Backward turns the other way, then as RMSNorm's.
#
# A row is one head of one token: one sum per head, over D alone.


@loop
def cpu_rope_table(first, last, angle, cos, sin):
    for i in range(first, last):
        cos[i], sin[i] = cos_sin(np.float64(angle[i]))


def rope_table(inv_freq, positions):
    """cos and sin (N, D/2) float32 of position * inv_freq (Su et al. 2021, eq. 15); both sides take them from here."""
    angle = positions.float()[:, None] * inv_freq.float()
    if use_triton(angle):
        return angle.cos(), angle.sin()
    cos, sin = torch.empty_like(angle), torch.empty_like(angle)
    _share(cpu_rope_table, angle.numel(), 40 * angle.numel(), *map(_flat, (angle, cos, sin)))
    return cos, sin


@triton.jit
def _head(q, k, q_n, k_n, row, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr):
    """Where rows begin, if rows are numbered token by token, the heads of q first and then those of k."""
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
    """Whether the kernels can read x (N, H, D) as it is, in the layout that a new tensor would have."""
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
    Rotary positions of q (N, H, D) and k (N, HK, D), each head normed before where there are weights (D,); cos, sin
    (N, D/2) float32 as `rope_table` gives them. All in float32, rounded once; new tensors; differentiable in q, k and
    the weights.
    """
    if q.dim() != 3 or k.dim() != 3 or (len(k), k.shape[2]) != (len(q), q.shape[2]) or q.shape[2] % 2:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)}: (N, heads, D) with an even D are needed")
    for x in (cos, sin):
        if x.dtype != torch.float32 or x.shape != (len(q), q.shape[2] // 2):
            raise ValueError(f"cos or sin {x.dtype} {tuple(x.shape)}: float32 ({len(q)}, {q.shape[2] // 2}) is needed")
    weights = [w for w in (q_weight, k_weight) if w is not None]
    if len(weights) == 1 or any(w.shape != q.shape[2:] for w in weights):
        raise ValueError(f"weights {[tuple(w.shape) for w in weights]}: none, or two of q's head dim {q.shape[2]}")
    check_operands(q, k, *weights)
    if not use_triton(q):
        return tuple(_apply(CpuNormRope, x, w, cos, sin, eps) for x, w in ((q, q_weight), (k, k_weight)))
    return TritonNormRope.apply(q, k, cos, sin, q_weight, k_weight, eps)


# ------------------------------------------------------------------------------------------------------------------
# SwiGLU: silu(g) u, silu(g) = g / (1 + exp(-g)) (Shazeer 2020, eq. 5); d silu / dg = s (1 + g (1 - s)), s = sigmoid(g).
#
# Element by element, so there is no order.


@loop
def cpu_swiglu(first, last, gate, gate_r, up, up_r, y, C):
    for row in range(first, last):
        g, u, to = gate[row * gate_r :], up[row * up_r :], y[row * C :]
        for c in range(C):
            to[c] = g[c] / (ONE + exp(-g[c])) * u[c]


@loop
def cpu_swiglu_backward(first, last, grad, gate, gate_r, up, up_r, d_gate, d_up, C):
    for row in range(first, last):
        d, g, u = grad[row * C :], gate[row * gate_r :], up[row * up_r :]
        dg, du = d_gate[row * C :], d_up[row * C :]
        for c in range(C):
            e = ONE + exp(-g[c])  # infinite for a g below -88, and the gradient then 0: g times exp(-g) would be NaN
            s = ONE / e
            dg[c] = d[c] * u[c] * (s * (ONE + g[c] * (ONE - s)))
            du[c] = d[c] * (g[c] / e)


class CpuSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        y, (R, C) = _contiguous_like(gate), gate.shape
        _share(cpu_swiglu, R, 20 * R * C, _flat(gate), gate.stride(0), _flat(up), up.stride(0), _flat(y), C)
        return y

    @staticmethod
    def backward(ctx, grad):
        (gate, up), (R, C) = ctx.saved_tensors, grad.shape
        d_gate, d_up = _contiguous_like(gate), _contiguous_like(up)
        args = _flat(grad.contiguous()), _flat(gate), gate.stride(0), _flat(up), up.stride(0)
        _share(cpu_swiglu_backward, R, 40 * R * C, *args, _flat(d_gate), _flat(d_up), C)
        return d_gate, d_up


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
    check_operands(*flat)
    if not use_triton(gate):
        return _apply(CpuSwiGLU, *flat).view(gate.shape)
    return TritonSwiGLU.apply(*flat).view(gate.shape)


# ------------------------------------------------------------------------------------------------------------------
# attention: o = p v / rowsum(p), p = exp(q k^T * scale - m), over the keys of one sequence in order; m is the row's
# largest score, which has no order. Backward (Dao 2023, algorithm 2): ds = p * (do v^T - rowsum(do * o)).
#
# Sums begin at the sequence's first key, and tiles of keys lie at absolute positions. A key in a row's future adds an
# exact zero, and so does a tile of them. So neither the batch, nor the chunk of a prefill, nor the pages of the cache
# can be seen.


class Plan:
    """
    Where the queries and keys of each sequence are; made once per forward, used by every layer.

    q_lens (B,) queries of each sequence, kv_lens (B,) its keys, of which the queries' are the last. Over a paged cache:
    page_table (any, >= max kv_lens), the cache row of each position, and requests (B,), the table's row of each
    sequence. Without a page_table the keys are packed as the queries are.

    The Triton kernels read every number from the device: no step waits for it. A captured CUDA graph replays with what
    kv_lens, page_table and requests then hold; q_lens, of which the plan keeps running sums (B,), must stay. Keep the
    plan as long as the graph. The CPU makes its indices at the first use.
    """

    def __init__(self, q_lens, kv_lens, page_table=None, requests=None):
        self.q_lens, self.kv_lens, self.B = q_lens, kv_lens, len(q_lens)
        self.q_ends = q_lens.cumsum(0)
        self.page_table, self.requests = page_table, requests
        self._ends = {}

    def ends(self, per_token, rows):
        """For Triton: running sums (B,) of each sequence's tiles of `rows` rows, with `per_token` rows to a token."""
        if (per_token, rows) not in self._ends:
            self._ends[per_token, rows] = ((self.q_lens * per_token + (rows - 1)) // rows).cumsum(0)
        return self._ends[per_token, rows]

    def check(self, N, S):
        """For the CPU: raises ValueError unless the plan is of N queries over S rows of keys."""
        if self.queries != N or self.page_table is None and self.queries != S:
            raise ValueError(f"the plan is of {self.queries} tokens, there are {N} queries and {S} keys")

    @functools.cached_property
    def queries(self):
        return int(self.q_ends[-1]) if self.B else 0

    @functools.cached_property
    def for_loops(self):
        """
        For the CPU: (rows of the packed batch, rows of the keys), (any,) int32 each; and for each sequence, (B,) int64
        each, where its queries begin in the first, how many they are, where its keys begin in the second, how many.
        """
        starts, tokens = self.q_ends - self.q_lens, torch.arange(self.queries, dtype=torch.int32)
        rows, first = tokens, starts
        if self.page_table is not None:
            rows, first = self.page_table.int(), self.requests * self.page_table.stride(0)
        numbers = (x.long().contiguous() for x in (starts, self.q_lens, first, self.kv_lens))
        return _flat(tokens), _flat(rows), *map(_flat, numbers)


def packed_plan(lengths, device=None):
    """The plan of a packed batch of whole sequences, `lengths` (B,) tokens each, for training."""
    lengths = torch.as_tensor(lengths, device=device).contiguous()  # as the Triton kernels read them
    return Plan(lengths, lengths)


def paged_plan(q_lens, kv_lens, page_table, requests):
    """
    The plan of a prefill chunk or a decode step over a paged cache, which differ in these numbers only: see Plan.

    q_lens (B,) new tokens, kv_lens (B,) tokens in the cache with the new ones.
    """
    each = q_lens, kv_lens, requests
    if any(x.device != page_table.device or not x.is_contiguous() for x in each) or page_table.stride(1) != 1:
        cure = "the numbers and the entries of a page_table's row side by side"
        raise ValueError(f"paged_plan: all four on one device, {cure}")
    return Plan(q_lens, kv_lens, page_table, requests)


@loop
def _bring(x, rows, first, n, row_size, at, width, out):
    """Copies to `out`, end to end, the `width` numbers from `at` on of the rows rows[first : first + n] of x."""
    for i in range(n):
        start = np.int64(rows[first + i]) * row_size + at
        for j in range(0, width, VECTOR):
            store(load(1, 1, x, start + j, 0, width - j), out, i * width + j, 0, width - j)


@loop
def _scores_to_probabilities(s, at, keys, width, scale, m):
    """A row of `width` scores becomes exp(score * scale - m), and 0 beyond the first `keys`, which are all it sees."""
    row = s[at : at + width]
    for i in range(keys):
        row[i] = exp(row[i] * scale - m)
    row[keys:] = ZERO


@loop
def cpu_attention(first, last, q, k, v, out, stats, plan, H, HK, D, scale):
    """
    Units are (sequence, key head) pairs. A unit's queries, token by token and within one head by head, are multiplied
    QUERIES rows at a time with its keys and values, which lie together for all of them.
    """
    tokens, rows, q_starts, q_lens, kv_starts, kv_lens = plan
    G, longest = H // HK, kv_lens.max()
    x, y = np.empty(q_lens.max() * G * D, np.float32), np.empty(padded(longest) * D, np.float32)
    keys, values = np.empty((longest + PANEL) * D, np.float32), np.empty((D + PANEL) * longest, np.float32)
    s, o = np.empty(QUERIES * longest, np.float32), np.empty(QUERIES * D, np.float32)
    for unit in range(first, last):
        b, head = unit // HK, unit % HK
        T, L = q_lens[b], kv_lens[b]
        _bring(q, tokens, q_starts[b], T, H * D, head * G * D, G * D, x)
        _bring(k, rows, kv_starts[b], L, HK * D, head * D, D, y)
        cpu_pack(0, panels(L), y, 1, D, D, padded(L), keys)
        _bring(v, rows, kv_starts[b], L, HK * D, head * D, D, y)
        cpu_pack(0, panels(D), y, D, 1, L, D, values)
        for r in range(0, T * G, QUERIES):
            R = min(QUERIES, T * G - r)
            seen = L - T + (r + R - 1) // G + 1  # keys that some row of the block sees
            cpu_multiply(x, r * D, D, 1, R, D, keys, 0, D, 0, panels(seen), s, 0, seen, seen, False)
            for i in range(R):
                mine = L - T + (r + i) // G + 1
                at = ((q_starts[b] + (r + i) // G) * H + head * G + (r + i) % G) * 2
                stats[at] = largest(s, i * seen, mine) * scale
                _scores_to_probabilities(s, i * seen, mine, seen, scale, stats[at])
                stats[at + 1] = sum_of(s, i * seen, mine)
            cpu_multiply(s, 0, seen, 1, R, seen, values, 0, L, 0, panels(D), o, 0, D, D, False)
            for i in range(R):
                at = (q_starts[b] + (r + i) // G) * H + head * G + (r + i) % G
                to, of = out[at * D :], o[i * D :]
                for j in range(D):
                    to[j] = of[j] / stats[at * 2 + 1]


@loop
def cpu_attention_backward(first, last, grad, q, k, v, out, stats, dq, dk, dv, plan, H, HK, D, scale):
    """The units and blocks of `cpu_attention`. dk and dv are chains over the query rows in order, dq over the keys."""
    tokens, _, starts, lens, _, _ = plan
    G, longest = H // HK, lens.max()
    of_rows, of_keys = np.empty((3, longest * G * D), np.float32), np.empty((4, padded(longest) * D), np.float32)
    scores = np.empty((2, QUERIES * longest), np.float32)
    packed = np.empty((5, (longest * G + PANEL) * (D + PANEL)), np.float32)
    x, g, dx, p, ds = of_rows[0], of_rows[1], of_rows[2], scores[0], scores[1]
    y, z, dy, dz = of_keys[0], of_keys[1], of_keys[2], of_keys[3]
    for unit in range(first, last):
        b, head = unit // HK, unit % HK
        T = lens[b]
        _bring(q, tokens, starts[b], T, H * D, head * G * D, G * D, x)
        _bring(grad, tokens, starts[b], T, H * D, head * G * D, G * D, g)
        _bring(k, tokens, starts[b], T, HK * D, head * D, D, y)
        _bring(v, tokens, starts[b], T, HK * D, head * D, D, z)
        cpu_pack(0, panels(T), y, 1, D, D, padded(T), packed[0])
        cpu_pack(0, panels(T), z, 1, D, D, padded(T), packed[1])
        cpu_pack(0, panels(D), y, D, 1, T, D, packed[2])
        cpu_pack(0, panels(D), x, D, 1, T * G, D, packed[3])
        cpu_pack(0, panels(D), g, D, 1, T * G, D, packed[4])
        dy[:], dz[:] = ZERO, ZERO
        for r in range(0, T * G, QUERIES):
            R = min(QUERIES, T * G - r)
            seen = (r + R - 1) // G + 1
            cpu_multiply(x, r * D, D, 1, R, D, packed[0], 0, D, 0, panels(seen), p, 0, seen, seen, False)
            cpu_multiply(g, r * D, D, 1, R, D, packed[1], 0, D, 0, panels(seen), ds, 0, seen, seen, False)
            for i in range(R):
                at = (starts[b] + (r + i) // G) * H + head * G + (r + i) % G
                _scores_to_probabilities(p, i * seen, (r + i) // G + 1, seen, scale, stats[at * 2])
                delta = dot(grad, at * D, out, at * D, D)
                p_row, ds_row = p[i * seen :], ds[i * seen :]
                for j in range(seen):
                    p_row[j] /= stats[at * 2 + 1]
                    ds_row[j] = p_row[j] * (ds_row[j] - delta) * scale
            cpu_multiply(p, 0, 1, seen, seen, R, packed[4], r, T * G, 0, panels(D), dz, 0, D, D, True)
            cpu_multiply(ds, 0, 1, seen, seen, R, packed[3], r, T * G, 0, panels(D), dy, 0, D, D, True)
            cpu_multiply(ds, 0, seen, 1, R, seen, packed[2], 0, T, 0, panels(D), dx, r * D, D, D, False)
        for t in range(T):
            at = (starts[b] + t) * HK + head
            dq[at * G * D : (at + 1) * G * D] = dx[t * G * D : (t + 1) * G * D]
            dk[at * D : (at + 1) * D] = dy[t * D : (t + 1) * D]
            dv[at * D : (at + 1) * D] = dz[t * D : (t + 1) * D]


class CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan, scale):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        (N, H, D), HK = q.shape, k.shape[1]
        q_lens, kv_lens = plan.for_loops[3], plan.for_loops[5]
        out, stats, scale = _contiguous_like(q), q.new_empty(N, H, 2), np.float32(scale)
        args = *map(_flat, (q, k, v, out, stats)), plan.for_loops, H, HK, D, scale
        _share(cpu_attention, plan.B * HK, 4 * H * D * int((q_lens * kv_lens).sum()), *args)
        ctx.save_for_backward(q, k, v, out, stats)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, stats = ctx.saved_tensors
        (_, H, D), HK, plan, lens = q.shape, k.shape[1], ctx.plan.for_loops, ctx.plan.for_loops[3]
        dq, dk, dv = [_contiguous_like(x) for x in (q, k, v)]
        args = *map(_flat, (grad.contiguous(), q, k, v, out, stats, dq, dk, dv)), plan, H, HK, D, ctx.scale
        _share(cpu_attention_backward, ctx.plan.B * HK, 10 * H * D * int((lens * lens).sum()), *args)
        return dq, dk, dv, None, None


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


@triton.jit
def _key_tile(x, start, length, first, head, x_s, x_h, KEYS: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr):
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
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, PAGED: tl.constexpr, PARTS: tl.constexpr, TMA: tl.constexpr,
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
    seen = tl.min(position, 0) + 1  # keys that every row sees: their tiles need no mask
    if PAGED:
        pages += tl.load(requests + b).to(tl.int64) * pages_r
        k += head.to(tl.int64) * k_h
        v += head.to(tl.int64) * v_h
    d, ones = tl.arange(0, D)[None, :], tl.full([KEYS, 16], 1.0, q.dtype.element_ty)
    column = (head * GROUPS + group).to(tl.int64)
    x = tl.load(q + (token * q_n + column * q_h)[:, None] + d, mask=valid[:, None], other=0.0)
    row = token * (HEADS * GROUPS) + column
    m, den, o = tl.full([ROWS], -1e30, tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, D], tl.float32)
    for split in range(lane, tl.cdiv(last, SPLIT), LANES):
        sm, so = tl.full([ROWS], -1e30, tl.float32), tl.zeros([ROWS, D], tl.float32)
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
def triton_attention_delta(
    grad, out, delta, R, HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """rowsum(do * o), laid out as lse."""
    row, d = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    at, inside = row[:, None] * D + d, (row < R)[:, None]
    x = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    token, column = row // (HEADS * GROUPS), row % (HEADS * GROUPS)
    to = (column // GROUPS * (R // (HEADS * GROUPS)) + token) * GROUPS + column % GROUPS
    tl.store(delta + to, tl.sum(x * y, 1), mask=row < R)


@triton.jit(do_not_specialize=["N", "B"])
def triton_attention_dq(
    q, k, v, grad, lse, delta, dq, q_ends, tile_ends, c, scale, N, B, q_n, q_h, k_s, k_h, v_s, v_h,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    TMA: tl.constexpr,
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
    start, end = _before(q_ends, b), _before(q_ends, b + 1)
    length = end - start
    first_key = (tile - _before(key_ends, b)) * KEYS
    at = first_key + tl.arange(0, KEYS)
    d, here, s_row = tl.arange(0, D)[None, :], (at < length)[:, None], (start + at).to(tl.int64)
    kt = tl.load(k + head.to(tl.int64) * k_h + s_row[:, None] * k_s + d, mask=here, other=0.0)
    vt = tl.load(v + head.to(tl.int64) * v_h + s_row[:, None] * v_s + d, mask=here, other=0.0)
    dk_acc, dv_acc = tl.zeros([KEYS, D], tl.float32), tl.zeros([KEYS, D], tl.float32)
    rows, statistics = length * GROUPS, (head.to(tl.int64) * N + start) * GROUPS
    q += (head * GROUPS).to(tl.int64) * q_h
    grad += head.to(tl.int64) * (GROUPS * D)
    lse += statistics
    delta += statistics
    for first in range(first_key * GROUPS // ROWS * ROWS, rows, ROWS):
        r = first + tl.arange(0, ROWS)
        token, group, valid = (start + r // GROUPS).to(tl.int64), r % GROUPS, (r < rows)[:, None]
        x = tl.load(q + (token * q_n + group * q_h)[:, None] + d, mask=valid, other=0.0)
        g = tl.load(grad + ((token * (HEADS * GROUPS) + group) * D)[:, None] + d, mask=valid, other=0.0)
        top, mean = tl.load(lse + r)[None, :], tl.load(delta + r)[None, :]  # past the sequence anything
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
    to, here = (at.to(tl.int64) * HEADS + head)[:, None] * D + d, (at < end)[:, None]
    tl.store(dk + to, (dk_acc * scale).to(dk.dtype.element_ty), mask=here)
    tl.store(dv + to, dv_acc.to(dv.dtype.element_ty), mask=here)


LOG2_E = 1.4426950408889634


def _attention_config(x, rows, warps, stages, keys=None):
    """
    Keys and rows per tile, warps and stages, for queries x. float32 has no tensor core here: small tiles, or registers
    spill. keys: of dK and dV, where keys take the place of rows.
    """
    if x.dtype == torch.float32:
        keys, rows, warps, stages = KEYS_FLOAT32, 16, 8, 1
    elif not card(x).tma:
        keys, rows = (ROWS_OF_WARPS, KEYS_OF_WARPS) if keys else (KEYS_OF_WARPS, ROWS_OF_WARPS)
        warps, stages = 8, 3
    keys = keys or KEYS
    return dict(KEYS=keys, ROWS=rows, num_warps=warps, num_stages=stages, **EXACT)


def _by_copy_engine(k, v, keys):
    """k and v (N, HK, D) in tiles of `keys` keys of one head."""
    return [create_ragged_descriptor(x, [keys, 1, x.shape[2]]) for x in (k, v)]


class TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan, scale):
        # a clone has the strides of its shape; `contiguous` may leave those of a dim of 1
        q, k, v = (x if _lies_for_tma(x) else x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
        (N, H, D), heads = q.shape, k.shape[1]
        groups, c, paged = H // heads, scale * LOG2_E, plan.page_table is not None
        out, lse = q.new_empty(N, H, D), q.new_empty(N * H + BACKWARD_ROWS, dtype=torch.float32)
        pages, requests = (plan.page_table, plan.requests) if paged else (plan.q_ends, plan.q_ends)
        # decode has few rows: several programs share the splits that one may have, and a second kernel merges them
        decode = paged and N <= plan.B
        splits = triton.cdiv(pages.shape[1], SPLIT) if decode else 1
        parts, lanes = splits > 1, min(splits, triton.cdiv(DECODE_PROGRAMS, max(1, N * heads)))
        rows, stages = DECODE_ROWS if decode else PREFILL_ROWS, PAGED_STAGES if paged else 3
        config = _attention_config(q, rows, 4 if parts else 8, stages)
        # without tokens no tile: TMA takes no empty tensor
        ends, tiles = plan.ends(groups, config["ROWS"]), N * groups // config["ROWS"] + min(N, plan.B)
        part_o = q.new_empty(N, H, splits, D, dtype=torch.float32) if parts else out
        part_m, part_l = q.new_empty(2, N, H, splits, dtype=torch.float32) if parts else (lse, lse)
        tma = not paged and card(q).tma
        key_tiles = _by_copy_engine(k, v, config["KEYS"]) if tma else (k, v)
        args = q, *key_tiles, part_o, lse, part_m, part_l, plan.q_ends, ends, plan.kv_lens, pages, requests
        args += pages.stride(0), c, N, plan.B, splits, lanes, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]
        flags = dict(HEADS=heads, GROUPS=groups, D=D, SPLIT=SPLIT, PAGED=paged, PARTS=parts, TMA=tma)
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
        flags = dict(HEADS=heads, GROUPS=groups, D=D)
        args, grid = (grad, out, delta, N * H), (triton.cdiv(N * H, DELTA_ROWS),)
        _launch(triton_attention_delta, grid, *args, **flags, ROWS=DELTA_ROWS, num_warps=DELTA_WARPS, **EXACT)
        dq, dk, dv = (_contiguous_like(x) for x in (q, k, v))
        dq_config = _attention_config(q, PREFILL_ROWS, 8, 3)
        # an odd group's lse are copied one by one, which takes registers: half the rows, or they spill
        rows, stages = (BACKWARD_ROWS // 2, 4) if groups % 2 else (BACKWARD_ROWS, 3)
        dkv_config = _attention_config(q, rows, 8, stages, BACKWARD_KEYS)
        rows, keys, sequences = dq_config["ROWS"], dkv_config["KEYS"], min(N, plan.B)
        rest, tail = (grad, lse, delta), (scale * LOG2_E, scale, N, plan.B)
        tail += *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]
        tma = card(q).tma
        key_tiles = _by_copy_engine(k, v, dq_config["KEYS"]) if tma else (k, v)
        args = q, *key_tiles, *rest, dq, plan.q_ends, plan.ends(groups, rows), *tail
        _launch(triton_attention_dq, (N * groups // rows + sequences, heads), *args, **flags, TMA=tma, **dq_config)
        args = q, k, v, *rest, dk, dv, plan.q_ends, plan.ends(1, keys), *tail
        _launch(triton_attention_dkv, (N // keys + sequences, heads), *args, **flags, **dkv_config)
        return dq, dk, dv, None, None


def attention(q, k, v, plan, scale):
    """
    Causal attention of packed queries q (N, H, D) over keys and values k, v (S, HK, D) -> (N, H, D).

    `plan` says which rows of k and v belong to which query; H must be a multiple of HK. Differentiable for a
    `packed_plan` only. On a GPU D is 64 or 128, H / HK at most 8, scale above 0.
    """
    check_operands(q, k, v)
    if plan.q_lens.is_cuda != q.is_cuda:
        raise ValueError(f"the plan is not on q's device={q.device}: pass device to packed_plan")
    if q.dim() != 3 or k.dim() != 3:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)}: (tokens, heads, D) are needed")
    (_, H, D), heads = q.shape, k.shape[1]
    if not use_triton(q):
        if k.shape[2] != D or v.shape != k.shape or H % heads:
            shapes = [tuple(x.shape) for x in (q, k, v)]
            raise ValueError(f"q, k, v {shapes}: one D, and query heads a multiple of the key heads are needed")
        plan.check(len(q), len(k))
        return _apply(CpuAttention, q, k, v, plan, scale)
    if D not in (64, 128) or k.shape[2] != D or v.shape != k.shape:
        raise ValueError(f"head dims {D}, {k.shape[2]}, {v.shape[2]}: 64 or 128, the same for q, k and v")
    if H % heads or H > 8 * heads:
        raise ValueError(f"{H} query heads over {heads} key heads: the group must be 1 to 8 whole heads")
    if scale <= 0:
        raise ValueError(f"scale={scale}: the largest score is taken before the scale, which must be above 0")
    return TritonAttention.apply(q, k, v, plan, scale)


# ------------------------------------------------------------------------------------------------------------------
# a decoder layer of an engine on a CPU: the loops above, one after the other, in one call. They take a few microseconds
# each, and between calls from Python, through the engine's own code, a CPU's caches have forgotten them each time.


@loop
def _linear(x, M, K, weight, bias, y, N):
    cpu_matmul_blocks(0, -(-M // BLOCK_ROWS) * panels(N), x, K, 1, weight, y, M, N, K, False)
    if len(bias):
        for m in range(M):
            row = y[m * N :]
            for n in range(N):
                row[n] += bias[n]


@loop
def _store_rows(x, at, stride, width, where, cache):
    for i in range(len(where)):
        for j in range(0, width, VECTOR):
            store(load(1, 1, x, at + i * stride + j, 0, width - j), cache, where[i] * width + j, 0, width - j)


@loop
def cpu_layer(
    first, last, x, residual, weights, eps, cos, sin, keys, values, where, plan, nothing, C, H, HK, D, F, scale
):
    """
    Units are sequences. Their rows of x and residual (N, C) become the next layer's; keys and values get rows `where`
    (N,). weights: CpuLayer's.
    """
    tokens, rows, q_starts, q_lens, kv_starts, kv_lens = plan
    start, end = q_starts[first], q_starts[last - 1] + q_lens[last - 1]
    plan = tokens, rows, q_starts[first:last] - start, q_lens[first:last], kv_starts[first:last], kv_lens[first:last]
    x, residual, where, M = x[start * C : end * C], residual[start * C : end * C], where[start:end], end - start
    cos, sin = cos[start * D // 2 :], sin[start * D // 2 :]
    norm, qkv, qkv_bias, q_norm, k_norm, o, o_bias, second_norm, gate_up, gate_up_bias, down, down_bias = weights
    width = (H + 2 * HK) * D
    normed, wide = np.empty(M * C, np.float32), np.empty(M * max(width, 2 * F), np.float32)
    q, k, out = (np.empty(M * H * D, np.float32), np.empty(M * HK * D, np.float32), np.empty(M * H * D, np.float32))
    stats, hidden = np.empty(M * H * 2, np.float32), np.empty(M * F, np.float32)
    residual += x
    cpu_norm_rope(0, M, residual, C, norm, nothing, nothing, normed, 1, C, eps)
    _linear(normed, M, C, qkv, qkv_bias, wide, width)
    cpu_norm_rope(0, M, wide, width, q_norm, cos, sin, q, H, D, eps)
    cpu_norm_rope(0, M, wide[H * D :], width, k_norm, cos, sin, k, HK, D, eps)
    _store_rows(k, 0, HK * D, HK * D, where, keys)
    _store_rows(wide, (H + HK) * D, width, HK * D, where, values)
    cpu_attention(0, (last - first) * HK, q, keys, values, out, stats, plan, H, HK, D, scale)
    _linear(out, M, H * D, o, o_bias, x, C)
    residual += x
    cpu_norm_rope(0, M, residual, C, second_norm, nothing, nothing, normed, 1, C, eps)
    _linear(normed, M, C, gate_up, gate_up_bias, wide, 2 * F)
    cpu_swiglu(0, M, wide, 2 * F, wide[F:], 2 * F, hidden, F)
    _linear(hidden, M, F, down, down_bias, x, C)


class CpuLayer:
    """
    One layer's weights as `cpu_layer` wants them. linear: (weight (N, K), bias (N,) or None) of the projections to q, k
    and v, to o, to gate and up, and down; norms: the weights of the two norms; head_norms: those of q and k, or ().
    heads: number of query and of key heads.
    """

    def __init__(self, linear, norms, head_norms, eps, heads, head_dim, scale):
        qkv, o, gate_up, down = ((_panels_of(w.t()), NOTHING if b is None else _flat(b)) for w, b in linear)
        first, second, *of_heads = map(_flat, (*norms, *head_norms))
        self.weights = (first, *qkv, *(of_heads or (NOTHING, NOTHING)), *o, second, *gate_up, *down)
        self.eps, self.tail = np.float32(eps), (*heads, head_dim, linear[3][0].shape[1], np.float32(scale))


def cpu_layers_in_turn(first, last, each):
    for args in each:
        cpu_layer(first, last, *args)


def cpu_layers(layers, x, rope, caches, where, plan):
    """
    Embeddings x (M, C) through these CpuLayers: x, overwritten, and the residual (M, C) to add. caches: (keys, values)
    of each layer. Threads part at the first layer and meet after the last: a sequence needs no other's, and to wake a
    thread takes as long as a small layer.
    """
    residual = torch.full_like(x, -0.0)  # x + -0.0 is x, also where x is -0.0
    before, (*rope, where) = tuple(map(_flat, (x, residual))), map(_flat, (*rope, where))
    shared = where, plan.for_loops, NOTHING, x.shape[1]
    each = [(*before, m.weights, m.eps, *rope, *map(_flat, kv), *shared, *m.tail) for m, kv in zip(layers, caches)]
    _share(cpu_layers_in_turn, plan.B, 2 * len(x) * sum(w.size for m in layers for w in m.weights), each)
    return x, residual


# ------------------------------------------------------------------------------------------------------------------
# the head: log p_v = (z_v - m) - log sum_u exp(z_u - m), z = hidden weight^T / temperature, m = max z, and the entropy
# H = -sum_v p_v log p_v, row by row what a sampler computes from the engine's logits, without keeping (N, V) numbers.
# d log p_t / dz = onehot(t) - p, d H / dz = -p (log p + H): the backward pass makes the logits again.
#
# One function makes that sum, `_log_sum` on a CPU and `triton_softmax_stats` on Triton, lane by lane and then over the
# lanes, an order that follows from V; log_softmax and token_logprobs both start from it.


def head_logits(hidden, weight):
    """hidden (M, H) @ weight (V, H)^T -> (M, V) float32, accumulated and returned in float32. Not differentiable."""
    return matmul(hidden, weight.t(), out_dtype=torch.float32)


@loop
def _log_sum(z, at, V, scratch):
    """(the largest of V logits, the log of the sum of exp(z - largest)); scratch (V,) is overwritten."""
    m, row = largest(z, at, V), z[at:]
    for i in range(V):
        scratch[i] = exp(row[i] - m)
    return m, np.float32(log(np.float64(sum_of(scratch, 0, V))))


@loop
def cpu_log_softmax(first, last, z, out, V):
    scratch = np.empty(V, np.float32)
    for row in range(first, last):
        (m, log_sum), of, to = _log_sum(z, row * V, V, scratch), z[row * V :], out[row * V :]
        for i in range(V):
            to[i] = (of[i] - m) - log_sum


@loop
def cpu_token_logprobs(first, last, z, targets, logprobs, entropy, V):
    scratch = np.empty(V, np.float32)
    for row in range(first, last):
        (m, log_sum), of = _log_sum(z, row * V, V, scratch), z[row * V :]
        for i in range(V):
            x = (of[i] - m) - log_sum
            scratch[i] = exp(x) * max(x, LEAST)  # 0 times -inf would be NaN
        logprobs[row], entropy[row] = (of[targets[row]] - m) - log_sum, -sum_of(scratch, 0, V)


@loop
def cpu_token_grads(first, last, z, t, targets, entropy, grad, entropy_grad, V):
    """The logits z become their gradients."""
    scratch = np.empty(V, np.float32)
    for row in range(first, last):
        (m, log_sum), of = _log_sum(z, row * V, V, scratch), z[row * V :]
        g, e, H = grad[row] / t, entropy_grad[row] / t, entropy[row]
        for i in range(V):
            x = (of[i] - m) - log_sum
            p = exp(x)
            of[i] = -p * g - p * (max(x, LEAST) + H) * e
        of[targets[row]] += g


class CpuTokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, t):
        (N, _), V = hidden.shape, len(weight)
        logprobs, entropy, targets = hidden.new_empty(N), hidden.new_empty(N), targets.contiguous()
        for h, *rest in zip(*(x.split(CHUNK) for x in (hidden, targets, logprobs, entropy))):
            z = head_logits(h, weight).div_(t)
            _share(cpu_token_logprobs, len(h), 20 * z.numel(), *map(_flat, (z, *rest)), V)
        ctx.save_for_backward(hidden, weight, targets, t, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, entropy_grad):
        hidden, weight, targets, t, entropy = ctx.saved_tensors
        d_hidden, d_weight = [], torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grads = grad.contiguous(), entropy_grad.contiguous()
        for h, *rest in zip(*(x.split(CHUNK) for x in (hidden, targets, entropy, *grads))):
            z = head_logits(h, weight).div_(t)
            _share(cpu_token_grads, len(h), 30 * z.numel(), _flat(z), np.float32(t), *map(_flat, rest), len(weight))
            d_hidden.append(matmul(z, weight))
            if d_weight is not None:
                matmul(z.t(), h, out=d_weight)
        return torch.cat(d_hidden), d_weight, None, None


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
        d_hidden, d_weight = [], torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        V, eg = len(weight), grad if entropy_grad is None else entropy_grad
        rows = hidden, stats, targets, entropy, grad.contiguous(), eg.contiguous()
        for h, *args in zip(*(x.split(CHUNK) for x in rows)):
            z, dz, entropies = head_logits(h, weight), h.new_empty(len(h), V), entropy_grad is not None
            _launch_on_elements(triton_token_grads, len(h), V, z, t, *args, dz, V=V, ENTROPY=entropies)
            d_hidden.append(matmul(dz, weight))
            if d_weight is not None:
                matmul(dz.t(), h, out=d_weight)
        return torch.cat(d_hidden), None if d_weight is None else d_weight.to(weight.dtype), None, None


def token_logprobs(hidden, weight, targets, temperature=1.0):
    """
    Log-probs of `targets` (N,) under softmax(hidden @ weight^T / temperature), and the entropies, both (N,) float32.

    hidden (N, H), weight (V, H). Gradients flow to hidden and weight; the log-probs must be in the loss, the entropies
    need not be.
    """
    if hidden.shape[1:] != weight.shape[1:] or targets.shape != hidden.shape[:1]:
        shapes = [tuple(x.shape) for x in (hidden, weight, targets)]
        raise ValueError(f"hidden, weight, targets {shapes}: (N, H), (V, H), (N,) are needed")
    check_operands(hidden, weight)
    # divided by a tensor: by a Python number, CUDA would multiply by a rounded reciprocal
    t = torch.tensor(temperature, dtype=torch.float32, device=hidden.device)
    if not use_triton(hidden):
        if len(targets) and not (0 <= int(targets.min()) and int(targets.max()) < len(weight)):
            raise ValueError(f"targets {int(targets.min())} to {int(targets.max())}: below {len(weight)} are needed")
        return CpuTokenLogprobs.apply(hidden, weight, targets.long(), t)
    return TritonTokenLogprobs.apply(hidden, weight, targets, t)


def log_softmax(x, dim, half_to_float):
    """aten::_log_softmax along the last dim. On a CPU other types than float32 are left to torch."""
    if not use_triton(x) and x.dtype != torch.float32:
        return torch._log_softmax(x, dim, half_to_float, out=torch.empty_like(x))
    if dim % max(1, x.dim()) != x.dim() - 1 or x.dim() == 0:
        raise ValueError(f"log_softmax: dim={dim} of {x.dim()}; only the last one is written")
    out = torch.empty(x.shape, dtype=torch.float32 if half_to_float else x.dtype, device=x.device)
    if not use_triton(x):
        z, V = x.contiguous(), x.shape[-1]
        _share(cpu_log_softmax, x.numel() // max(1, V), 20 * x.numel(), _flat(z), _flat(out), V)
        return out
    check_operands(x)
    z, t = _aligned(x.reshape(-1, x.shape[-1])), torch.ones(1, dtype=torch.float32, device=x.device)
    stats, config = z.new_empty(len(z), 2, dtype=torch.float32), _softmax_config(z.shape[1])
    _launch(triton_softmax_stats, (len(z),), z, t, stats, **config)
    _launch(triton_log_softmax, (len(z), triton.cdiv(z.shape[1], config["BLOCK"])), z, t, stats, out, **config)
    return out


def softmax(x, dim, half_to_float):
    """aten::_softmax along the last dim: no log-prob needs it, but SGLang's sampler draws from it."""
    return torch.exp(log_softmax(x, dim, half_to_float))


# ------------------------------------------------------------------------------------------------------------------
# the embedding's gradient: dw[v] = sum of the gradients of v's tokens, in their order
#
# On Triton a stable sort brings equal ids together, and one program adds a run of them; no atomics.


@loop
def cpu_embedding_backward(grad, ids, out, C, pad):
    for i in range(len(ids)):
        for c in range(C if ids[i] != pad else 0):
            out[ids[i] * C + c] += grad[i * C + c]


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
    if grad.shape[:-1] != ids.shape:
        raise ValueError(f"grad {tuple(grad.shape)} of ids {tuple(ids.shape)}: one row for each is needed")
    C = grad.shape[-1]
    grad, out = grad.reshape(-1, C).contiguous(), grad.new_zeros(rows, C)
    if not use_triton(grad):
        cpu_embedding_backward(_flat(grad), _flat(ids.reshape(-1).long()), _flat(out), C, padding_idx)
        return out
    check_operands(grad)
    ids, order = torch.sort(ids.reshape(-1).long(), stable=True)
    args = grad, ids, order, out, len(ids), C, padding_idx
    _launch_on_elements(triton_embedding_backward, len(ids), C, *args)
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
            u = np.float64(min(murmur_hash32(seeds[row], positions[row], i), 0xFFFFFFFE)) / 4294967295.0
            scores[i] = np.float64(logprobs[row * V + i]) - log(min(-log(u), 1.7976931348623157e308))
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
def triton_draw(logprobs, seeds, positions, scores, columns, V: tl.constexpr, BLOCK: tl.constexpr):
    """Of one block of a row, the largest score and the first column that has it, into (B, blocks) each."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    h = tl.minimum(_murmur_hash_uint32(tl.load(seeds + row), tl.load(positions + row), c), 0xFFFFFFFE)
    u = h.to(tl.float64) * (1 / 4294967295)  # as torch on CUDA divides; of one hash in 750 it is an ulp below
    score = tl.load(logprobs + row * V + c, mask=c < V, other=float("-inf")).to(tl.float64)
    score -= tl.log(tl.minimum(-tl.log(u), 1.7976931348623157e308))
    score = tl.where(score == score, score, float("inf"))  # the first NaN is taken, as torch.argmax does
    top, at = tl.max(score, 0), row * tl.num_programs(1) + tl.program_id(1)
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
    if logprobs.dim() != 2 or seeds.shape != logprobs.shape[:1] or positions.shape != logprobs.shape[:1]:
        shapes = [tuple(x.shape) for x in (logprobs, seeds, positions)]
        raise ValueError(f"logprobs, seeds, positions {shapes}: (B, V), (B,), (B,) are needed")
    (B, V), args = logprobs.shape, (logprobs.contiguous(), seeds.long().contiguous(), positions.long().contiguous())
    if not use_triton(logprobs):
        tokens = torch.zeros(B, 1, dtype=torch.int64)
        _share(cpu_draw, B, 60 * B * V, *map(_flat, (*args, tokens)), V)
        return tokens
    grid = B, triton.cdiv(V, ELEMENTS)
    scores, columns = (logprobs.new_empty(grid, dtype=dtype) for dtype in (torch.float64, torch.int64))
    # not EXACT: torch.compile, and so SGLang, fuses a step of libdevice's float64 logarithm
    _launch(triton_draw, grid, *args, scores, columns, V=V, BLOCK=ELEMENTS, num_warps=ELEMENT_WARPS)
    return columns.gather(1, scores.argmax(1, keepdim=True))


# ------------------------------------------------------------------------------------------------------------------
# bit_sum: sum over elements of bits * odd(row) * odd(column) mod 2^64, for hashes. Whole numbers' sums have no order.


@loop
def cpu_bit_sum(x, odd_rows, odd_columns):
    C, y = len(odd_columns), 0
    for row in range(len(odd_rows)):
        of_row, of = 0, x[row * C :]
        for c in range(C):
            of_row += np.int64(of[c]) * odd_columns[c]
        y += of_row * odd_rows[row]
    return y


def bit_sum(x, odd_rows, odd_columns):
    """x (R, C) of whole numbers, the factors (R,) and (C,) int64 -> () int64."""
    if x.shape != (len(odd_rows), len(odd_columns)):
        raise ValueError(f"bit_sum: x {tuple(x.shape)} beside {len(odd_rows)} and {len(odd_columns)} factors")
    if x.dtype == torch.int32 and not use_triton(x):
        return torch.tensor(cpu_bit_sum(*map(_flat, (x.contiguous(), odd_rows, odd_columns))))
    # Some rows at a time: their int64 products take four times a bfloat16 weight's room.
    size, sums = max(1, HASHED // len(odd_columns)), odd_rows.new_zeros(())
    for some, odd in zip(x.split(size), odd_rows.split(size)):
        sums += ((some * odd_columns).sum(1) * odd).sum()
    return sums


# ------------------------------------------------------------------------------------------------------------------
# AdamW: m = m + (1 - b1) (g - m), v = b2 v + (1 - b2) g^2, w = w (1 - lr decay) - lr / c1 m / (sqrt(v / c2) + eps),
# c = 1 - b^step (Loshchilov and Hutter 2019, algorithm 2). Element by element, so there is no order; but torch's own
# rounds in other places where its vectors are of another width.


@loop
def cpu_adamw(first, last, w, g, m, v, rest1, b2, rest2, keep, rate, root, eps):
    w, g, m, v = w[first:last], g[first:last], m[first:last], v[first:last]
    for i in range(last - first):
        m[i] = fma(rest1, g[i] - m[i], m[i])
        v[i] = fma(rest2 * g[i], g[i], b2 * v[i])
        w[i] = w[i] * keep - rate * m[i] / (np.sqrt(v[i]) / root + eps)


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
                state, (b1, b2), lr = self.state[w], group["betas"], group["lr"]
                state["step"] += 1
                c1, c2 = (_bias_correction(b, int(state["step"])) for b in (b1, b2))
                numbers = 1 - b1, b2, 1 - b2, 1 - lr * group["weight_decay"], lr / c1, math.sqrt(c2), group["eps"]
                tensors = map(_flat, (w, w.grad, state["exp_avg"], state["exp_avg_sq"]))
                _share(cpu_adamw, w.numel(), 20 * w.numel(), *tensors, *map(np.float32, numbers))


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
        size = (math.prod(x.shape[d] for d in part) for part in (others, dims))
        rows = x.permute([*others, *dims]).reshape(*size)
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
        return torch.pow(base, exponents, out=torch.empty_like(exponents, dtype=torch.result_type(base, exponents)))
    powers = [float(Decimal(base) ** Decimal(x)) for x in exponents.flatten().tolist()]
    return torch.tensor(powers, dtype=exponents.dtype).view(exponents.shape)


# ------------------------------------------------------------------------------------------------------------------
# the switch, thrown in the trainer and in the engine's scheduler process alike

_library = None


def enable_batch_invariant(cpu_threads=1):
    """
    Replaces torch's kernels of the operators named below by ours, in this process, for CPU and CUDA tensors.
    cpu_threads: of a loop. torch itself keeps one: several would wait for each other, and for our loops, by spinning.
    """
    global _library, threads
    threads = cpu_threads
    torch.set_num_threads(1)
    # A step's memory stays with the process; a C library other than glibc has no such switch.
    keep_memory = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)
    keep_memory(M_TRIM_THRESHOLD, 2**30), keep_memory(M_MMAP_THRESHOLD, 2**30)
    if _library is not None:
        return
    add, average = _reduction(row_sums, torch.sum), _reduction(_mean, torch.mean)
    both = dict(mm=mm, addmm=addmm, _log_softmax=log_softmax, _softmax=softmax)
    both["embedding_dense_backward"] = embedding_backward
    both |= {"sum": add, "sum.dim_IntList": add, "mean": average, "mean.dim": average}
    on_cpu = {
        "exp": _element_wise(cpu_exp, torch.exp), "log": _element_wise(cpu_log, torch.log),
        "std.correction": _reduction(_std, torch.std), "pow.Scalar": power,
    }  # fmt: skip
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that aten's kernels are replaced, which is what we want
        for device, operators in dict(CPU=both if INTERPRET else both | on_cpu, CUDA=both).items():
            for name, operator in operators.items():
                _library.impl(name, operator, device, allow_override=True)


def disable_batch_invariant():
    """Gives torch its kernels back: for tests, which show the difference."""
    global _library
    if _library is not None:
        _library._destroy()
    _library = None
