"""
A GPU's programs on a CPU: the PTX of a kernel, instruction by instruction, each of them for all threads at once. Of
Triton's interpreter nothing is in it, so the two can agree by IEEE 754 alone. And here a kernel has been compiled: its
layouts, shuffles, shared memory, folded constants and fused products are those that a card is given.

A register is an array of whole numbers, one for each thread, or one for all; an instruction reads them as the type in
its name. Global memory is this process's, at its own addresses. Threads of a warp may diverge: of the blocks of
instructions with which some of them continue, the first is executed, for those threads.

Some things are stricter than on a card, so that faults are seen: addresses must be aligned; shared memory begins as
NaN, and what is copied to it in the background arrives as late as it may; warps come one after the other, each as far
as the next barrier; a barrier and a shuffle must find all threads of their program or warp. What is not here: the copy
engine, the tensor core, and what ptxas makes of the text.
"""

import functools
import itertools
import operator
import re

import numpy as np
from pretend.interpreter import fuse_all

PROGRAMS = 256  # executed side by side
SIZES = {"%rs": 2, "%r": 4, "%rd": 8}  # of registers, in bytes
INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*);")
ADDRESS = re.compile(r"\[\s*(\S+?)\s*(?:\+\s*(-?\d+)\s*)?\]")
FIRST = 4096  # this process has nothing below


class Everything:
    __array_interface__ = dict(shape=(1 << 47,), typestr="|u1", data=(FIRST, False), version=3)


MEMORY = np.asarray(Everything())


@functools.cache
def dtype_of(kind):
    if kind == "pred":
        return np.dtype(bool)
    return np.dtype(kind[0].translate(str.maketrans("bs", "ui")) + str(int(kind[1:]) // 8))


def bits(x):
    return x.view(f"u{x.itemsize}")


def wide(x):
    return x.astype(f"{x.dtype.kind}{2 * x.itemsize}")


# ---- what instructions compute


def fma(*operands):
    n = max(map(len, operands))
    arrays = [np.ascontiguousarray(x if len(x) == n else x.repeat(n)) for x in operands]
    out = np.empty_like(arrays[0])
    fuse_all(*arrays, out)
    return out


def larger(a, b):
    """+0.0 is larger than -0.0, and a number than NaN."""
    if a.dtype.kind != "f":
        return np.maximum(a, b)
    zero = (bits(a) & bits(b)).view(a.dtype)
    return np.where(a == b, zero, np.where((a > b) | np.isnan(b), a, b))


def permuted(a, b, selector):
    """Each four bits of the selector name one of the eight bytes of a and b."""
    assert not (selector & 0x8888).any(), "a byte's sign"
    both = wide(b) << 32 | a
    each = (both >> 8 * (selector >> i & 7) << 2 * i & 255 << 2 * i for i in range(0, 16, 4))
    return functools.reduce(operator.or_, each).astype(a.dtype)


def converted(x, to):
    if to.startswith("bf16"):  # half of the last place is added, and to an odd number a little more
        x = bits(x)
        return (x + 0x7FFF + (x >> 16 & 1) >> 16).astype(np.uint16)
    dtype = dtype_of(to)
    if x.dtype.kind == "f" and dtype.kind != "f":  # the nearest there is, but for 2^63
        ends = np.iinfo(dtype)
        x = np.where(x == x, x, 0).astype(float).clip(ends.min, np.nextafter(ends.max + 1.0, 0))
    return x.astype(dtype)


COMPUTED = {
    "neg": operator.neg,
    "not": operator.invert,
    "popc": lambda a: np.bitwise_count(a).astype(np.uint32),
    "sqrt.rn": np.sqrt,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "mul.lo": operator.mul,
    "mul.hi": lambda a, b: (wide(a) * wide(b) >> 8 * a.itemsize).astype(a.dtype),
    "mul.wide": lambda a, b: wide(a) * wide(b),
    "mad.lo": lambda a, b, c: a * b + c,
    "mad.wide": lambda a, b, c: bits(wide(a) * wide(b)) + c,
    "div.s32": lambda a, b: (a / b).astype(np.int32),  # rounded to float64, which holds it
    "div.rn": operator.truediv,
    "fma.rn": fma,
    "max": larger,
    "max.NaN": np.maximum,
    "min": lambda a, b: -larger(-a, -b) if a.dtype.kind == "f" else np.minimum(a, b),
    "min.NaN": np.minimum,
    "shl": operator.lshift,  # by more than all bits: numpy has 0, or the sign, as well
    "shr": operator.rshift,
    "shf.l.wrap": lambda a, b, n: ((wide(b) << 32 | a) << (n & 31) >> 32).astype(a.dtype),
    "bfe": lambda a, first, length: a << 8 * a.itemsize - first - length >> 8 * a.itemsize - length,
    "prmt": permuted,
    "selp": lambda a, b, chosen: np.where(chosen, a, b),
    "setp.ne": lambda a, b: (a < b) | (a > b),  # false of NaN, as the others are
    "setp.num": lambda a, b: (a == a) & (b == b),
}
for name in ("eq", "lt", "le", "gt", "ge"):
    COMPUTED[f"setp.{name}"] = getattr(operator, name)
for end in ("", ".rn"):  # without an end ptxas may fuse a product with a sum; LLVM has fused what it could
    COMPUTED |= {"add" + end: operator.add, "sub" + end: operator.sub, "mul" + end: operator.mul}
THIRD = {"mad.wide": "u64", "selp": "pred"}  # types of third operands that are not the instruction's
OF_WARPS = {"add": np.add, "min": np.minimum, "max": np.maximum}


# ---- a kernel's text


def names_in(operand):
    """Of one register, or of several in braces."""
    return [x.strip() for x in operand.strip("{} ").split(",")]


@functools.cache
def parsed(text):
    """(types of the parameters, blocks of instructions, {label: block})."""
    head, body = text.split("\n{", 1)
    types = re.findall(r"\.param \.(\w+) .*?_param_\d+", head)
    blocks = [[]]
    labels = {}
    for line in body.split("\n}")[0].splitlines():
        line = line.split("//")[0].strip()
        if line.startswith("$") and f"\t{line[:-1]};" in body:
            labels[line[:-1]] = len(blocks)
            blocks.append([])
        elif line and line[0] not in "$.":
            found = INSTRUCTION.fullmatch(line)
            if not found:
                raise NotImplementedError(line)
            negated, guard, name, rest = found.groups()
            operands = [x.strip() for x in re.findall(r"\{.*?\}|\[.*?\]|[^\s,][^,]*", rest)]
            blocks[-1].append((guard, negated == "!", name, operands, line))
            if name in ("bra", "bra.uni", "ret"):
                blocks.append([])
    return types, blocks, labels


@functools.cache
def constant(text, kind):
    dtype = dtype_of(kind)
    number = int(text[2:], 16) if text[:2] in ("0f", "0d") else int(text.rstrip("U"), 0)
    if kind == "pred":
        return np.array([number != 0])
    return np.array([number % (1 << 8 * dtype.itemsize)], f"u{dtype.itemsize}").view(dtype)


def execute(text, grid, arguments, threads, shared):
    """A kernel's text on a grid of programs of so many threads, with so many bytes of shared memory."""
    types, blocks, labels = parsed(text)
    arguments = [*arguments, 0, 0]  # Triton's scratch
    parameters = [np.array([x], dtype_of(kind)) for x, kind in zip(arguments, types, strict=True)]
    grid = (*grid, 1, 1)[:3]
    places = np.array(list(itertools.product(*map(range, grid))), np.uint32)
    with np.errstate(all="ignore"):
        for first in range(0, len(places), PROGRAMS):
            here = places[first : first + PROGRAMS]
            memory = np.full((len(here), -(-shared // 16) * 16), 0xFF, np.uint8)
            warps = [Warp(i, here, grid, parameters, memory).run(blocks, labels) for i in range(threads // 32)]
            while True:  # a warp continues until it waits at a barrier, or ends, and then the next one
                waiting = [next(warp, None) for warp in warps]
                assert all(np.array_equal(x, waiting[0]) for x in waiting), "a warp is not at a barrier"
                if waiting[0] is None:
                    break


class Warp:
    """One and the same of some programs, with all their threads side by side."""

    def __init__(self, number, places, grid, parameters, shared):
        self.N = 32 * len(places)
        self.parameters = parameters
        self.size = shared.shape[1]
        self.shared = shared.reshape(-1)
        self.bases = np.arange(len(places)).repeat(32) * self.size
        self.copies = [[]]  # to shared memory, in groups
        self.registers = {"%tid.x": np.tile(np.arange(32, dtype=np.uint32) + 32 * number, len(places))}
        for axis, name in enumerate("xyz"):
            self.registers[f"%ctaid.{name}"] = places[:, axis].repeat(32)
            self.registers[f"%nctaid.{name}"] = np.array([grid[axis]], np.uint32)

    def run(self, blocks, labels):
        """Yields the programs in which it waits at a barrier."""
        at = np.zeros(self.N, int)
        while (block := at.min()) < len(blocks):
            here = at == block
            at[here] += 1
            for guard, negated, name, operands, line in blocks[block]:
                self.mask = here & (self.registers[guard] != negated) if guard else here
                if name in ("bra", "bra.uni"):
                    at[self.mask] = labels[operands[0]]
                elif name == "ret":
                    at[self.mask] = len(blocks)
                elif name == "bar.sync":
                    self.together()
                    yield self.mask[::32]
                else:
                    try:
                        self.step(name, *operands)
                    except Exception as error:
                        raise NotImplementedError(line) from error

    def step(self, name, *operands):
        first, *kinds = name.split(".")
        method = getattr(self, first, None)
        if method:
            method(kinds, *operands)
            return
        out, *operands = operands
        operation, _, kind = name.rpartition(".")
        kinds = [kind] * len(operands)
        if operation in THIRD:
            kinds[2] = THIRD[operation]
        compute = COMPUTED.get(operation) or COMPUTED[name]
        self.write(out, compute(*map(self.read, operands, kinds)))

    # -- operands

    def read(self, operand, kind):
        if kind == "bf16":
            return (self.read(operand, "u16").astype(np.uint32) << 16).view(np.float32)
        if operand.startswith("%"):
            x = self.registers[operand]
            dtype = dtype_of(kind)
            return (x if x.itemsize == dtype.itemsize else x.astype(f"u{dtype.itemsize}")).view(dtype)
        return constant(operand.replace("global_smem", "0"), kind)

    def active(self, operand, kind):
        """Of each thread that takes part."""
        return np.broadcast_to(self.read(operand, kind), self.N)[self.mask]

    def write(self, operand, value):
        if value.dtype != bool:
            value = bits(value.astype(f"{value.dtype.kind}{SIZES[operand.rstrip('0123456789')]}"))
        if not self.mask.all():
            value = np.where(self.mask, value, self.registers.get(operand, np.zeros(1, value.dtype)))
        self.registers[operand] = value

    def put(self, operand, active):
        """The numbers of the threads that take part."""
        value = np.zeros(self.N, active.dtype)
        value[self.mask] = active
        self.write(operand, value)

    def place(self, operand, space, size, count):
        """Memory as numbers of so many bytes, and where each thread that takes part has its: (threads, count)."""
        base, offset = ADDRESS.fullmatch(operand).groups()
        at = self.active(base, "s64" if space == "global" else "u32").astype(int) + int(offset or 0)
        assert not (at % (size * count)).any(), "misaligned"
        memory = MEMORY
        if space == "global":
            at -= FIRST
        else:
            assert ((at >= 0) & (at + size * count <= self.size)).all(), "outside"
            memory = self.shared
            at += self.bases[self.mask]
        return memory.view(f"u{size}"), at[:, None] // size + np.arange(count)

    def vector(self, kinds, operand, names):
        """(type, pairs of a name and its places in memory, memory)"""
        space, *count, kind = kinds
        names = names_in(names)
        assert count == [f"v{len(names)}"][: len(names) - 1]
        memory, at = self.place(operand, space, dtype_of(kind).itemsize, len(names))
        return kind, zip(names, at.T), memory

    def together(self):
        """All threads of a program take part, or none of them."""
        mask = self.mask.reshape(-1, 32)
        assert (mask.all(1) == mask.any(1)).all(), "some threads are missing"

    # -- memory

    def mov(self, kinds, out, value):
        """{a, b} are the lower and the upper half of a register."""
        if "{" not in out + value:
            self.write(out, self.read(value, kinds[0]))
            return
        size = dtype_of(kinds[0]).itemsize
        values = names_in(value)
        parts = np.broadcast_arrays(*(self.read(each, f"b{8 * size // len(values)}") for each in values))
        x = np.stack(parts, 1).copy()  # contiguous
        outs = names_in(out)
        for i, each in enumerate(outs):
            if each != "_":
                self.write(each, x.view(f"u{size // len(outs)}")[:, i])

    def ld(self, kinds, out, operand):
        if kinds[0] == "param":
            x = self.parameters[int(operand.rpartition("_")[2][:-1])]
            self.write(out, x.view(dtype_of(kinds[1])))
            return
        kind, names, memory = self.vector(kinds, operand, out)
        for name, at in names:
            self.put(name, memory[at].view(dtype_of(kind)))

    def st(self, kinds, operand, value):
        kind, names, memory = self.vector(kinds, operand, value)
        for name, at in names:
            memory[at] = self.active(name, kind)

    def atom(self, kinds, _, operand, value):
        """What was there before is not known, as nobody may use it."""
        assert kinds == ["global", "gpu", "acq_rel", "add", "u64"]
        memory, at = self.place(operand, "global", 8, 1)
        for i, x in zip(at, self.active(value, "u64")):
            memory[i] += x

    def cp(self, kinds, first="", source="", size="", given=""):
        if kinds[1] == "commit_group":
            self.copies.append([])
        elif kinds[1] == "wait_group":
            while len(self.copies) > int(first) + 1:
                for memory, at, words in self.copies.pop(0):
                    memory[at] = words
        else:
            assert kinds[2:] == ["shared", "global"]
            count = int(size, 0) // 4
            memory, at = self.place(source, "global", 4, count)
            here = 4 * np.arange(count) < self.active(given, "u32")[:, None]  # the rest is 0
            words = np.zeros(at.shape, np.uint32)
            words[here] = memory[at[here]]
            self.copies[-1].append((*self.place(first, "shared", 4, count), words))

    def matrices(self, kinds, operand):
        """Of shared memory, by two bytes, the places of each warp's matrices of 8 x 8: (count, warps, 8, 8)."""
        self.together()
        mask = self.mask
        count = int(kinds[3][1])
        self.mask = mask & (np.arange(self.N) % 32 < 8 * count)  # each of these threads has the address of a row
        memory, at = self.place(operand, "shared", 2, 8)
        self.mask = mask
        at = at.reshape(-1, count, 8, 8).swapaxes(0, 1)
        return memory, at.swapaxes(2, 3) if "trans" in kinds else at

    def ldmatrix(self, kinds, out, operand):
        memory, at = self.matrices(kinds, operand)
        for each, places in zip(names_in(out), at):
            self.put(each, memory[places.reshape(-1)].view(np.uint32))

    def stmatrix(self, kinds, operand, value):
        memory, at = self.matrices(kinds, operand)
        for each, places in zip(names_in(value), at):
            memory[places.reshape(-1)] = self.active(each, "u32").view(np.uint16)

    # -- between threads, and between types

    def bar(self, kinds, _):
        assert kinds == ["warp", "sync"]
        self.together()

    def shfl(self, kinds, out, value, lane, bound, members):
        _, mode, kind = kinds
        assert members == "-1" and bound == ("0" if mode == "up" else "31")
        self.together()
        x = self.active(value, kind)
        n = self.active(lane, "s32")
        own = np.arange(len(n)) % 32
        source = {"bfly": own ^ n, "idx": n & 31, "up": np.where(own < n, own, own - n)}[mode]
        self.put(out, x[np.arange(len(n)) - own + source])

    def redux(self, kinds, out, value, members):
        _, operation, kind = kinds
        assert (self.active(members, "s32") == -1).all()
        self.together()
        x = self.active(value, kind).reshape(-1, 32)
        self.put(out, OF_WARPS[operation].reduce(x, 1, dtype=x.dtype).repeat(32))

    def cvt(self, kinds, out, *operands):
        *mode, to, kind = kinds
        assert mode in ([], ["rn"], ["rzi"]) and (mode == ["rzi"]) == (kind[0] == "f" and to[0] in "us")
        upper, *lower = [converted(self.read(x, kind), to) for x in operands]
        for x in lower:
            upper = upper.astype(np.uint32) << 16 | x
        self.write(out, upper)
