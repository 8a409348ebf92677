"""
Triton's interpreter as a card computes, after `install()`: bfloat16 is decoded before a product and rounded to nearest
even, and `tl.dot` adds as a tensor core does; of float32 it is a chain of fused multiply-adds, as Triton compiles it,
and `tl.fma` is one rounding. Threads take turns: a kernel that is interpreted changes Triton's module
`language` for as long as it runs.

What no kernel sees, and most of its time would go to, is left out: Triton would look for what to change in `language`
not once in a launch, but at each call of a function inside a kernel, too; it would compute each sum of 32 bits again in
64, for an assertion that is off; and it would make the same types again and again.
"""

import dataclasses
import functools
import math
import threading

import numba
import numpy as np
import triton.language as tl
from numba.extending import intrinsic
from triton.runtime import interpreter

plain_cast, plain_fp_to_fp = interpreter.InterpreterBuilder.cast_impl, interpreter.InterpreterBuilder.create_fp_to_fp
plain_reduction, plain_scan = interpreter.ReduceOps.apply_impl, interpreter.ScanOps.apply_impl


def decoded(handle):
    """The float32 or float64 values of a tensor of the interpreter, which holds bfloat16 as uint16."""
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data


def nearest_even(x):
    """float32 -> the bits of bfloat16 as uint16. The interpreter's own conversion cuts them off."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


@intrinsic
def fused(_, x, y, z):
    """x * y + z in one rounding."""
    return z(x, y, z), lambda context, builder, signature, args: builder.fma(*args)


@numba.njit(cache=True)
def fuse_all(x, y, z, out):
    for i in range(len(out)):
        out[i] = fused(x[i], y[i], z[i])


def fma(self, x, y, z):
    arrays = np.broadcast_arrays(x.data, y.data, z.data)
    assert len({array.dtype for array in arrays}) == 1  # a float64 beside numbers of float32 would be cut off
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    out = np.empty_like(flat[0])
    fuse_all(*flat, out)
    return interpreter.TensorHandle(out.reshape(arrays[0].shape), z.dtype.scalar)


@numba.njit(cache=True)
def add_in_order(a, b, acc):
    """acc (M, N) += a (M, K) @ b (K, N), product by product in the order of K."""
    for m in range(a.shape[0]):
        for k in range(a.shape[1]):
            for n in range(b.shape[1]):
                acc[m, n] = fused(a[m, k], b[k, n], acc[m, n])


@numba.njit(cache=True)
def exponents(x):
    """Of each float32; a subnormal's, and zero's, is the least normal one's."""
    bits = x.view(np.int32)
    return np.maximum(bits >> 23 & 255, 1) - 127


def tensor_core(capability):
    """(products of a step, bits behind the point) of a card of this compute capability, by MMA-Sim."""
    return (8, 24) if capability < (9, 0) else (16, 25)


@numba.njit(cache=True)
def add_as_tensor_core(a, b, acc, products, fraction):
    """
    acc (M, N) += a (M, K) @ b (K, N), bfloat16's numbers as float32, as a card does (MMA-Sim, arXiv:2511.10909): step
    by step, the products and the accumulator are aligned at the largest exponent (a product's is the sum of its
    factors'), cut off behind `fraction` bits and added exactly; the sum is cut off to a float32.
    """
    a_exponents, b_exponents = exponents(a), exponents(b)
    total = np.empty(acc.shape[1])
    for m in range(a.shape[0]):
        for first in range(0, a.shape[1], products):
            step = range(first, min(first + products, a.shape[1]))
            top = np.where(acc[m] == 0, -133, exponents(acc[m]))
            for k in step:
                for n in range(len(top)):
                    if a[m, k] != 0 and b[k, n] != 0:
                        top[n] = max(top[n], a_exponents[m, k] + b_exponents[k, n])
            scale = ((fraction + 1023 - top).astype(np.int64) << 52).view(np.float64)  # 2^(fraction - top)
            for n in range(len(top)):
                total[n] = np.trunc(acc[m, n] * scale[n])
            for k in step:
                for n in range(len(top)):
                    total[n] += np.trunc(np.float64(a[m, k]) * b[k, n] * scale[n])
            for n in range(len(top)):
                exact = total[n] / scale[n] + 0.0  # no zero is negative
                near = np.float32(exact)
                beyond = abs(near) > abs(exact) and abs(exact) < 2.0**128
                acc[m, n] = np.nextafter(near, np.float32(0.0)) if beyond else near


def dot(capability):
    """float32: a chain. bfloat16: the steps of such a card's tensor core."""

    def method(self, a, b, d, input_precision, max_num_imprecise_acc):
        acc = d.data.copy()
        operands = np.ascontiguousarray(decoded(a)), np.ascontiguousarray(decoded(b)), acc
        if a.dtype.scalar == tl.float32:
            add_in_order(*operands)
        else:
            add_as_tensor_core(*operands, *tensor_core(capability))
        return interpreter.TensorHandle(acc, d.dtype.scalar)

    return method


def reduced(self, inputs):
    """
    A float's `tl.sum` over more than two numbers has an order, which the compiler chooses, as has any other reduction
    but a maximum, which passes by NaN and takes 0.0 for more than -0.0.
    """
    (x, *_) = inputs
    data = x.handle.data
    if not np.issubdtype(data.dtype, np.floating):
        return plain_reduction(self, inputs)
    if self.combine_fn == tl.standard._sum_combine and data.shape[self.axis] == 2:
        return self.to_tensor(np.add(*np.moveaxis(data, self.axis, 0)), x.dtype)
    assert self.combine_fn == tl.standard._elementwise_max, data.shape
    most = np.fmax.reduce(data, self.axis)
    zero = np.add.reduce(np.where(data == 0, data, -0.0), self.axis, initial=-0.0)
    return self.to_tensor(np.where(most == 0, zero, most).astype(data.dtype), x.dtype)


def larger(x, y):
    return np.where((x == 0) & (y == 0), x + y, np.fmax(x, y))


def smaller(x, y):
    return -larger(-x, -y)


def in_order_of_its_own(self, inputs):
    assert not any(x.dtype.is_floating() for x in inputs)
    return plain_scan(self, inputs)


def convert(otherwise):
    """A conversion of the builder, with bfloat16 to and from float32 as a card does it."""

    def method(self, src, dst_type, *mode):
        kinds = src.dtype.scalar, dst_type.scalar
        if kinds == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(decoded(src), tl.float32)
        if kinds == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(nearest_even(src.data), tl.bfloat16)
        return otherwise(self, src, dst_type, *mode)

    return method


def make_types_once():
    """Triton makes the type and shape of every intermediate result anew, with their names; here equal ones are one."""
    plain_block, plain_dtype = tl.core.block_type.__init__, interpreter._get_np_dtype
    blocks, dtypes = {}, {}

    def init_tuple_type(self, types, fields=None):
        self.types, self.fields = types, fields or [""] * len(types)

    def name_of(self):
        return "[" + ",".join(f"{key}:{x}" for key, x in zip(self.fields, self.types)) + "]"

    def init_block(self, element_ty, shape):
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            plain_block(self, element_ty, shape)
            blocks[key] = vars(self)
        self.__dict__.update(blocks[key])

    @functools.cache
    def shape_of(sizes):
        return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))

    def init_tensor(self, handle, kind):
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = shape_of((*kind.shape,) if kind.is_block() else ())

    def np_dtype(kind):
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = plain_dtype(kind)
        return dtypes[name]

    tl.core.tuple_type.__init__ = init_tuple_type
    tl.core.tuple_type.name = property(name_of)
    tl.core.block_type.__init__ = init_block
    tl.core.tensor.__init__ = init_tensor
    interpreter._get_np_dtype = np_dtype


def install(capability=(9, 0)):
    launch, lock = interpreter.GridExecutor.__call__, threading.RLock()
    patch, patched = interpreter._patch_lang, set()

    def one_at_a_time(self, *args, **kwargs):
        with lock:
            patched.clear()
            return launch(self, *args, **kwargs)

    def patch_once(function):
        module = id(function.__globals__)
        if module not in patched:
            patched.add(module)
            return patch(function)

    interpreter.GridExecutor.__call__ = one_at_a_time
    interpreter._patch_lang = patch_once
    options = interpreter.interpreter_builder.options
    assert not options.debug  # nothing is asserted
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    make_types_once()
    builder = interpreter.InterpreterBuilder
    interpreter.ReduceOps.apply_impl = reduced
    interpreter.ScanOps.apply_impl = in_order_of_its_own
    builder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, larger)
    builder.create_minnumf = lambda self, x, y: self.binary_op(x, y, smaller)
    builder.create_dot = dot(capability)
    builder.create_fma = fma
    builder.cast_impl = convert(plain_cast)
    builder.create_fp_to_fp = convert(plain_fp_to_fp)
    builder.get_bf16 = lambda self, value: interpreter.TensorHandle(nearest_even(np.array([value])), tl.bfloat16)
    np.seterr(all="ignore")
