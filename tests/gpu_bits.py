"""
The GPU's operators, bit for bit: whatever a row's neighbours, tiles, chunks, pages and repeats are, its bits must stay.

    python tests/gpu_bits.py                                   # one GPU of kernels.CARDS
    python tests/gpu_bits.py --quick                           # every 23rd size, one model, a fifth of the repeats
    TRITON_INTERPRET=1 python tests/gpu_bits.py --quick        # a CPU: this script's own logic, tiny shapes, float32

Prints a Markdown table while it goes. A case is one tensor compared with the one it must equal, as integers; a number
that is not finite counts as differing. Fresh memory is filled with NaN, so nothing stays unwritten unseen. Each
comparison has a negative control: the library's operator, or ours with one thing moved, must differ. Exit status 1: an
element differs, a control was not caught or a part failed. pytest does not collect this file.
"""

import argparse
import itertools
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import kernels  # noqa: E402
from onecurve.run.versions import commit  # noqa: E402

bf16 = torch.bfloat16
f32 = torch.float32
CUDA = torch.cuda.is_available() and not kernels.INTERPRET
DTYPE = bf16 if CUDA else f32
DEVICE = "cuda" if CUDA else "cpu"
# hidden, query heads, key heads, MLP of Qwen3; head dim 128
MODELS = {"0.6B": (1024, 16, 8, 3072), "8B": (4096, 32, 8, 12288)}
VOCABULARY = 151936


def linears(model):
    """{name: (N, K)} of a model's weight matrices."""
    hidden, heads, kv_heads, mlp = MODELS[model]
    qkv = (heads + 2 * kv_heads) * 128
    return {
        "qkv": (qkv, hidden),
        "o": (hidden, heads * 128),
        "gate_up": (2 * mlp, hidden),
        "down": (hidden, mlp),
    }


def all_tiles():
    """Those that kernels._matmul_config chooses from, some as they are alone on an SM; or may one day."""
    tiles = [
        *kernels.TILES,
        (64, 128, 64, 4, 8),
        (16, 64, 128, 4, 8),
        (64, 64, 16, 4, 4),
        (64, 64, 32, 4, 1),
        (128, 64, 64, 4, 3),
        (64, 256, 64, 4, 3),
        (64, 64, 256, 4, 2),
        (128, 32, 64, 8, 4),
    ]
    if not CUDA:
        return tiles
    room = kernels.card(random(1)).shared * 1024
    fitting = []
    for tile in tiles:
        m, n, k, _, stages = tile
        if 2 * stages * (m + n) * k <= room:
            fitting.append(tile)
    return fitting


def all_attention(quick):
    """[(head dim, query heads of a key head, key heads, lengths)] on a GPU."""
    long = [3000, 1, 1025, 1024, 1023, 64]
    short = [1100, 3, 65, 64, 1]
    groups = (1, 4, 5) if quick else range(1, 9)
    return [
        *((D, g, 2, short) for D in (64, 128) for g in groups),
        (128, 2, 8, long),
        (128, 4, 8, long),
    ]


def short_splits(_, rows, *__):
    return dict(ROWS=rows // 4, KEYS=64)


def sizes(quick):
    """How much of everything; on a CPU as little as runs every line that needs no GPU."""
    tiny = {"tiny": {"qkv": (96, 40), "o": (33, 128)}}
    names = ["0.6B"] if quick else MODELS
    models = {name: linears(name) for name in names}
    edges = [M + i for M in (512, 1024, 2048, 4096) for i in (-1, 0, 1)]
    few_tiles = (64, 16, 128, 4, 3), (128, 32, 64, 4, 3), (16, 64, 32, 4, 3)
    few_attention = [(64, 2, 1, [150, 5, 64]), (128, 1, 1, [70, 5, 64])]
    pairs = dict(  # on a CPU, on a GPU
        models=(tiny, models),
        head=((98, 40), (VOCABULARY, 1024)),
        D=(64, 128),
        V=(98, VOCABULARY),
        tokens=(90, 1111),
        Ms=([1, 2, 17, 33, 65], [*range(1, 301, 23 if quick else 1), *edges]),
        R=(70, 4200),
        tiles=(few_tiles, all_tiles()),
        few=([1, 17, 65], [1, 2, 16, 17, 33, 64, 65, 129, 300, 512, 1000, 2048]),
        mixture=((5, 24, 2), (64, 320, 8)),
        rows=(24, 2100),
        head_rows=(30, 1100),
        widths=((48, 66), (1024, 4096)),
        sums=((5000,), (70, 4096, 1 << 20)),
        counts=((1, 17), (1, 2, 3, 8, 16, 17, 64, 129, 255, 256, 700)),
        repeats=(1, 10 if quick else 50),
        K=(128, 4096),
        splits_of_sums=(300, 40_000),
        # splits of 64 keys on a CPU, so that short sequences have three: of two the order is not seen
        splits=(dict(SPLIT=64, _attention_config=short_splits), dict(KEYS=64)),
        chunks=((19, 64), (33, 64, 500, 1000, 1024)),
        attention=(few_attention, all_attention(quick)),
    )
    return SimpleNamespace(**{name: pair[CUDA] for name, pair in pairs.items()})


def random(*shape, dtype=DTYPE):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def offset(M, R):
    """Where M of R rows begin: for each M elsewhere."""
    return M * 37 % (R - M + 1) if M < R else 0


def on_device(x):
    return torch.tensor(x, device=DEVICE)


def bits(x):
    of_size = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(of_size[x.element_size()])


def differing(a, b):
    """How many elements of a and b differ, on the device."""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)} cannot be compared")
    return (bits(a) != bits(b)).sum()


def machine():
    """Card, driver, versions, date and commit: the last line of a table of figures."""
    card = "a CPU, interpreted" if kernels.INTERPRET else "a CPU"
    if CUDA:
        query = "nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -1"
        found = subprocess.run(query, shell=True, capture_output=True, text=True)
        driver = found.stdout.strip() or "unknown"
        capability = "{}.{}".format(*torch.cuda.get_device_capability())
        card = f"{torch.cuda.get_device_name()}, compute capability {capability}, driver {driver}"
    versions = f"torch {torch.__version__}, triton {triton.__version__}, Python {sys.version.split()[0]}"
    return f"{card}, {versions}, {time.strftime('%Y-%m-%d')}, commit {commit()}"


patched = partial(mock.patch.multiple, kernels)  # with patched(SPLIT=64): kernels.py with another constant or function


def each(x):
    return x if isinstance(x, (tuple, list)) else (x,)


class Row:
    """A line of the table. Counts stay on the device, so that no comparison waits for it."""

    def __init__(self, operator, varied):
        self.operator = operator
        self.varied = varied
        self.cases = 0
        self.differing = 0
        self.controls = {}
        self.library = []  # (elements of the library's result that differ from ours, all of them): no fault, to know

    def check(self, ours, expected):
        for a, b in zip(each(ours), each(expected), strict=True):
            self.cases += 1
            self.differing += differing(a, b) + (~torch.isfinite(b)).sum()

    def again(self, f, expected, times):
        """f's results beside a second stream that keeps the card busy, so that programs are scheduled otherwise."""
        for _ in range(times):
            if CUDA:
                with torch.cuda.stream(torch.cuda.Stream()):
                    x = random(4096, 4096)
                    for _ in range(1 + int(torch.randint(4, ()))):
                        x @ x
            self.check(f(), expected)

    def control(self, name, ours, expected):
        for a, b in zip(each(ours), each(expected), strict=True):
            before = self.controls.get(name, 0)
            self.controls[name] = before + differing(a, b)

    def finish(self):
        """(the line, whether all is well)."""
        counts = {name: int(n) for name, n in self.controls.items()}
        caught = bool(counts) and all(counts.values())
        bad = int(self.differing)
        verdict = "caught: " if caught else "NOT CAUGHT: "
        verdict += ", ".join(f"{name} {n}" for name, n in counts.items())
        if self.library:
            differ, every = map(sum, zip(*self.library))
            verdict += f"; the library's own: {int(differ)} of {every} differ"
        line = f"| {self.operator} | {self.varied} | {self.cases} | {bad} | {verdict} |"
        return line, caught and not bad


def weights_of(results, R, at):
    """Random gradients of the results' rows, those at these of R."""
    weights = []
    for i, out in enumerate(results):
        generator = torch.Generator(DEVICE).manual_seed(i)
        drawn = torch.randn(R or len(out), *out.shape[1:], generator=generator, device=DEVICE)
        weights.append(drawn[at].to(out.dtype))
    return weights


def run(f, rows, others, backward, at=slice(None), R=None):
    """
    ([results, and gradients of the rows], [gradients of the others]) of f(*rows, *others). at: where in R rows these
    are, for a row to get the same gradient whatever is beside it.
    """

    def learned(xs):
        return [x.detach().requires_grad_(backward and x.is_floating_point()) for x in xs]

    rows = learned(rows)
    others = learned(others)
    out = each(f(*rows, *others))
    results = [x.detach() for x in out]
    if not backward:
        return results, []
    own = [x for x in rows if x.requires_grad]
    shared = [x for x in others if x.requires_grad]
    found = torch.autograd.grad(out, own + shared, weights_of(out, R, at))
    return [*results, *found[: len(own)]], [*found[len(own) :]]


def right(row, f, reference, rows, others=(), backward=True, slack=1):
    """
    Against float64, forward and backward: |ours - reference| / |reference|. A wrong operator may be invariant. slack 0:
    the nearest floats to it.
    """

    def coarse(x):  # to the 10 bits that TF32 keeps, or to the 3 of fp8
        if CUDA:
            return x.to(torch.float8_e4m3fn).to(x.dtype)
        rounded = (x.float().view(torch.int32) + 0x1000) & ~0x1FFF
        return rounded.view(f32).to(x.dtype)

    def results(f, kind):
        def turned(xs):
            return [kind(x) if x.is_floating_point() else x for x in xs]

        out, shared = run(f, turned(rows), turned(others), backward)
        return out + shared

    def error(found):
        errors = [(a.double() - b).norm() / b.norm() for a, b in zip(found, exact, strict=True)]
        return float(torch.stack(errors).max())  # NaN where one is

    bound = (slack or 1) * (2e-2 if CUDA else 1e-5)
    exact = results(reference, torch.Tensor.double)
    mine = results(f, torch.clone)
    row.cases += len(mine)
    row.differing += not error(mine) < bound
    nearest = [b.to(a.dtype) for a, b in zip(mine, exact)]
    if slack:
        row.control("float64, rounded", nearest, mine)
    else:
        row.check(mine, nearest)
    name = "every error of coarse inputs"
    beyond = error(results(f, coarse)) > bound
    row.controls[name] = int(beyond and row.controls.get(name, 1))


# ---- matmul


def matrix(rows, columns, order):
    """N: its rows are along the memory; T: its columns."""
    if order == "N":
        return random(rows, columns)
    return random(columns, rows).t()


def always(x, *_):
    return x


def cuts(N):
    """(first, end) of some of N columns."""
    half = N // 2
    most = N * 3 // 4
    return (0, half), (half, most), (most, N), (5, N - 3), (N - 1, N)


def matmul(size):
    """Every number of rows. TN has its rows along the memory, so that most offsets are read by pointers, not by TMA."""
    shapes = [shape for weights in size.models.values() for shape in weights.values()]
    shapes.append(size.head)
    mm = partial(kernels.matmul, out_dtype=f32)
    # cuBLAS without split-K, which only its Lt can leave out: its sums may be ours, and it take a kernel's place
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    library = partial(torch.mm, out_dtype=f32) if CUDA else torch.mm
    pointers = partial(always, None)
    paths = []
    for tile in size.tiles:
        config = partial(always, tile)
        paths += [(config, kernels._for_tma), (config, pointers)]
    paths.append((kernels._matmul_config, pointers))
    for layout in ("NT", "NN", "TN"):
        row = Row(f"matmul {layout}", f"{', '.join(size.models)}: {len(size.Ms)} sizes M, at other offsets; again")
        cut = Row(f"matmul {layout}, cut", f"columns; by pointers; {len(size.tiles)} other tiles, by TMA and pointers")
        for shape in shapes:
            N, K = reversed(shape) if layout == "NN" else shape
            if layout == "TN":
                K = size.tokens
            a = matrix(size.R, K, layout[0])
            b = matrix(K, N, layout[1])
            whole = mm(a, b)
            for M in size.Ms:
                at = offset(M, size.R)
                row.check(mm(a[at : at + M], b), whole[at : at + M])
            few = () if cut.controls else size.few  # other cuts are other kernels, to be compiled: of one shape
            for M in few:
                for first, end in cuts(N):
                    cut.check(mm(a[:M], b[:, first:end]), whole[:M, first:end])
                for config, path in paths:
                    with patched(_matmul_config=config, _for_tma=path):
                        cut.check(mm(a[:M], b), whole[:M])
            row.library.append((differing(library(a, b), whole), whole.numel()))
            row.again(lambda: [mm(a, b)], [whole], size.repeats)
            for line in (row, cut):
                line.control("reversed K", mm(a.flip(1), b.flip(0)), whole)
            corner = [a[:65, :90]], [b[:90, :99]]
            right(row, mm, torch.mm, *corner, backward=False)
        yield from (row, cut)


@triton.jit
def product(a, b, c, one, K, N: tl.constexpr, COMPUTED: tl.constexpr):
    """c (64, N) = a (64, K) @ N columns of b (K, 256). COMPUTED: a comes from registers, not from shared memory."""
    m = tl.arange(0, 64)[:, None]
    n = tl.arange(0, N)[None, :]
    k = tl.arange(0, 64)
    acc = tl.zeros([64, N], tl.float32)
    for first in range(0, K, 64):
        x = tl.load(a + m * K + first + k[None, :])
        if COMPUTED:
            x = (x.to(tl.float32) * one).to(x.dtype)
        y = tl.load(b + (first + k)[:, None] * 256 + n)
        acc = tl.dot(x, y, acc, input_precision="ieee")
    tl.store(c + m * N + n, acc)


# Columns of a program and its warps: on a Hopper an instruction has half of the first's, for two groups of warps, and
# all of the others'. Fewer would be a warp's mma.sync, which is in no kernel there.
WIDTHS = (16, 8), (16, 4), (32, 4), (64, 4), (128, 4), (256, 4)


def operand_forms(size):
    """What all tiles of a matmul and attention's products rely on: one instruction's sums, however wide, from where."""
    row = Row("one chain of products", "8 to 256 columns of an instruction; a from registers and from shared memory")
    a = random(64, size.K)
    b = random(size.K, 256)

    def columns(a, b, N=256, warps=4, computed=False):
        c = torch.empty(64, N, device=DEVICE)
        kernels._launch(product, (1,), a, b, c, 1.0, size.K, N=N, COMPUTED=computed, num_warps=warps)
        return c

    whole = columns(a, b)
    for (N, warps), computed in itertools.product(WIDTHS, (False, True)):
        for first in range(0, 256, N):
            part = columns(a, b[:, first:], N, warps, computed)
            row.check(part, whole[:, first : first + N])
    row.again(lambda: [columns(a, b, computed=True)], [whole], size.repeats)
    row.control("reversed K", columns(a.flip(1), b.flip(0)), whole)
    yield row


def tensor_core(size):
    """Products of many sizes, beside the public rule of how such a card adds them."""
    from pretend.interpreter import add_as_tensor_core, tensor_core

    rule = tensor_core(torch.cuda.get_device_capability() if CUDA else (9, 0))
    row = Row("matmul NT, its bits", f"64 x 256 sums of {size.K} products, as MMA-Sim says")
    x, w = (torch.randn(n, size.K).mul(torch.randn(n, size.K).mul(5).exp2()).to(bf16) for n in (64, 256))
    ours = kernels.matmul(x.to(DEVICE), w.to(DEVICE).t(), out_dtype=f32).cpu()
    expected = torch.zeros_like(ours)
    add_as_tensor_core(x.float().numpy(), w.float().t().contiguous().numpy(), expected.numpy(), *rule)
    row.check(ours, expected)
    row.control("each sum rounded once", (x.double() @ w.double().t()).float(), expected)
    yield row


# ---- attention


def pack(s, grad, order, poison=None):
    """{sequence: [out, dq, dk, dv]} of a pack in this order; where one is given, the others are NaN and Inf."""
    lens = [s.lengths[i] for i in order]
    every = torch.arange(s.N).split(s.lengths)
    rows = torch.cat([every[i] for i in order]).to(DEVICE)
    inputs = [t[rows] for t in (s.q, s.k, s.v)]
    g = grad[rows]
    bads = torch.inf, torch.nan, torch.inf, torch.nan
    for t, bad in zip((*inputs, g), bads):
        for i, part in zip(order, t.split(lens)):
            if poison not in (None, i):
                part.fill_(bad)
    for t in inputs:
        t.requires_grad_()
    out = kernels.attention(*inputs, kernels.packed_plan(lens, DEVICE), s.scale)
    found = out.detach(), *torch.autograd.grad(out, inputs, g)
    parts = [t.split(lens) for t in found]
    return {i: [part[j] for part in parts] for j, i in enumerate(order)}


def sdpa(q, k, v):
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def attention(size):
    from test_kernels import Sequences  # here: it needs pytest, and whoever takes a shape from this file does not

    rows = dict(
        prefill=Row("attention prefill = packed", "all of a batch, and each alone; permuted pages, poisoned cache"),
        chunks=Row("attention chunks = packed", f"chunks of {size.chunks} keys, and all kinds in one step"),
        decode=Row("attention decode = packed", "batches of 1 to 256; one program per split or for all"),
    )
    packs = Row("attention packs", "forward and backward: again; in another order, each alone, beside NaN and Inf")
    with patched(**size.splits):
        for D, groups, kv_heads, lengths in size.attention:
            s = Sequences(lengths, groups * kv_heads, kv_heads, D, DTYPE, DEVICE)
            steps = s.steps(size.chunks)
            grad = torch.randn_like(s.q)
            order = list(range(len(lengths)))
            for how, row in rows.items():
                s.turn_pages()
                for step in steps[how]:
                    row.check(*s.step(step))
            for programs in (1, 100000):
                with patched(DECODE_PROGRAMS=programs):
                    rows["decode"].check(*s.step(steps["decode"][0]))
            first = pack(s, grad, order)
            for other in (order[::-1], *([i] for i in order)):
                for i, parts in pack(s, grad, other).items():
                    packs.check(parts, first[i])
            for i in order:
                packs.check(pack(s, grad, order, poison=i)[i], first[i])
            whole = sum(first.values(), [])
            packs.again(lambda: sum(pack(s, grad, order).values(), []), whole, size.repeats)
            if not packs.controls:  # the first case is enough: other splits are other kernels, to be compiled
                with patched(SPLIT=kernels.SPLIT // 2, KEYS=kernels.KEYS // 2):
                    for how, row in rows.items():
                        most_keys = max(steps[how], key=lambda step: step[0][2])
                        row.control("moved splits", *s.step(most_keys))
                    packs.control("moved splits", pack(s, grad, order)[0], first[0])
            plan = kernels.packed_plan(lengths[:1], DEVICE)
            f = partial(kernels.attention, plan=plan, scale=s.scale)
            alone = [x[: lengths[0]] for x in (s.q, s.k, s.v)]
            right(packs, f, sdpa, alone)
    yield from (*rows.values(), packs)


def captured(step):
    """(a CUDA graph of step(), what it writes)."""
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiled before the capture
        step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


def graph_after_a_loan(size):
    """A captured decode step whose cache was lent to a trainer in between, as by SGLang's resume_memory_occupation."""
    from test_kernels import Sequences
    from torch_memory_saver import torch_memory_saver as saver

    saver.hook_mode = "torch"  # SGLang's process has it preloaded; here it is an allocator of this process
    row = Row("a graph after a loan", "a captured decode step; its memory is given away, full of NaN, and taken again")
    s = Sequences([3000, 1025, 64], 32, 8, 128, bf16, DEVICE)
    ends = on_device(s.lengths)
    at = on_device(s.start) + ends - 1
    with saver.region(tag="kv_cache"):
        keys = s.keys.clone()
        values = s.values.clone()
    plan = kernels.paged_plan(torch.ones_like(ends), ends, s.table, s.requests)
    q = s.q[at].clone()
    graph, out = captured(lambda: kernels.attention(q, keys, values, plan, s.scale))
    for _ in range(size.repeats):
        graph.replay()
        row.check(out, s.out[at])
        torch.cuda.synchronize()
        saver.pause("kv_cache")
        lent = torch.full((keys.numel() * 2,), torch.nan, dtype=bf16, device=DEVICE)
        del lent
        torch.cuda.empty_cache()
        saver.resume("kv_cache")
        keys.zero_()
        values.zero_()
        graph.replay()
        row.control("without its keys", out, s.out[at])
        keys.copy_(s.keys)
        values.copy_(s.values)
    yield row


def attention_graph(size):
    """What the engine does: one captured graph, replayed with what lengths, pages and queries then hold."""
    from test_kernels import Sequences

    row = Row("attention in a CUDA graph", "a captured decode step, replayed with other lengths, requests and pages")
    for B in (1, 8, 64):
        s = Sequences([3000, 1024, 1025, 700, 64, 1], 32, 8, 128, bf16, DEVICE)
        ones = torch.ones(B, dtype=torch.long, device=DEVICE)
        keys = s.keys
        values = s.values
        table = s.table
        q = s.q[:B].clone()
        kv_lens = ones.clone()
        requests = s.requests[:1].repeat(B)
        plan = kernels.paged_plan(ones, kv_lens, table, requests)
        graph, out = captured(partial(kernels.attention, q, keys, values, plan, s.scale))
        for _ in range(size.repeats):
            which = torch.randint(len(s.lengths), (B,), device=DEVICE)
            lengths = on_device(s.lengths)[which]
            at = (torch.rand(B, device=DEVICE) * lengths).long()
            rows = on_device(s.start)[which] + at
            s.turn_pages()
            keys.copy_(s.keys)
            values.copy_(s.values)
            table.copy_(s.table)
            q.copy_(s.q[rows])
            kv_lens.copy_(at + 1)
            requests.copy_(s.requests[which])
            graph.replay()
            row.check(out, s.out[rows])
            kv_lens.copy_((at // 2) + 1)
            graph.replay()
            row.control("stale lengths", out, s.out[rows])
    yield row


def mixture_graph(size):
    """What the engine does: a captured step finds the tiles of experts from the rows that it then has."""
    row = Row("a mixture in a CUDA graph", "a captured step, replayed with other rows; all rows alike")
    E, width, k = size.mixture
    router = random(E, 1024)
    gate_up = random(E, 2 * width, 1024) / 32
    down = random(E, 1024, width) / width**0.5
    x, other = random(2, 64, 1024)

    def mixed(x):
        return kernels.moe(x, router, gate_up, down, k)

    with torch.no_grad():
        graph, out = captured(lambda: mixed(x))
        for _ in range(size.repeats):
            for rows in (random(64, 1024), random(1, 1024).repeat(64, 1)):
                x.copy_(rows)
                graph.replay()
                row.check(out, mixed(rows))
        row.control("other rows", mixed(other), out)
    yield row


# ---- operators on rows


class Case(NamedTuple):
    """An operator of rows that must not see each other: f(*rows, *others)."""

    name: str
    f: Callable
    reference: Callable  # the same in torch's own operators
    rows: list
    others: list = ()  # what all rows share, such as a weight
    backward: bool = True
    slack: float = 1  # by how much it may be farther from float64 than the rest


def mixture(x, router, gate_up, down, k):
    z, experts = (x @ router.t()).topk(k)
    gate, up = (x @ gate_up.mT).chunk(2, -1)
    y = (F.silu(gate) * up) @ down.mT  # of all experts
    of_chosen = y[experts, torch.arange(len(x), device=x.device)[:, None]]
    return (z.softmax(1)[..., None] * of_chosen).sum(1)


def token_logprobs(h, targets, w):
    logp = torch.log_softmax(h @ w.t() / 0.7, -1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(1, targets[:, None])[:, 0], entropy


def cos_sin(positions, frequencies):
    angle = (positions.float()[:, None] * frequencies.float()).double()
    return angle.cos(), angle.sin()


def operators(size):
    from test_kernels import textbook_norm, textbook_rope, textbook_swiglu

    R = size.rows
    D = size.D
    H = size.widths[0]
    inv_freq = 1e6 ** -(torch.arange(0, D, 2, device=DEVICE) / D)

    def norm_rope(q, k, positions, *weights):
        eps = (1e-6,) if weights else ()
        return kernels.norm_rope(q, k, *kernels.rope_table(inv_freq, positions), *weights, *eps)

    def turned(q, k, positions, *weights):
        heads = map(textbook_norm, (q, k), weights) if weights else (q, k)
        return tuple(textbook_rope(x, *kernels.rope_table(inv_freq, positions)) for x in heads)

    for C in size.widths:
        x = random(R, C)
        y = random(R, C)
        w = random(C)
        yield Case("rms_norm", lambda x, w: kernels.rms_norm(x, w, 1e-6), textbook_norm, [x], [w])
        yield Case(
            "rms_norm with a residual",
            lambda x, r, w: kernels.rms_norm(x, w, 1e-6, r),
            lambda x, r, w: (textbook_norm(x + r, w), x + r),
            [x, y],
            [w],
        )
        yield Case("swiglu", kernels.swiglu, textbook_swiglu, [x, y])
    E, width, k = size.mixture
    # of the router's, too: the softmax of large logits would show their rounding many times over
    router = random(E, H) / H**0.5
    gate_up = random(E, 2 * width, H) / H**0.5
    down = random(E, H, width) / width**0.5
    weights = [router, gate_up, down]
    yield Case("moe", partial(kernels.moe, k=k), partial(mixture, k=k), [random(R, H)], weights)
    heads = [random(R, 8, D), random(R, 2, D)]
    positions = torch.arange(R, device=DEVICE) * 19
    yield Case("rope_table", lambda p, f: kernels.rope_table(f, p), cos_sin, [positions], [inv_freq], False, slack=0)
    yield Case("norm_rope, no norm", norm_rope, turned, [*heads, positions])
    yield Case("norm_rope", norm_rope, turned, [*heads, positions], [random(D), random(D)])
    yield Case(
        "token_logprobs",
        lambda h, targets, w: kernels.token_logprobs(h, w, targets, 0.7),
        token_logprobs,
        [random(size.head_rows, H), torch.randint(size.V, (size.head_rows,), device=DEVICE)],
        [random(size.V, H) / H**0.5],
    )
    yield Case(
        "log_softmax, softmax",
        lambda z: (kernels.log_softmax(z, -1, False), kernels.softmax(z, -1, False)),
        lambda z: (torch.log_softmax(z, -1), torch.softmax(z, -1)),
        [random(size.head_rows, size.V) * 3],
        backward=False,
        slack=5,
    )
    if CUDA:  # of LoRA's gradients
        K = size.widths[1]
        a = torch.randn(K, 96, device=DEVICE)
        yield Case(
            "float32 beside bfloat16",
            lambda x: kernels._float32_mm(x, a),
            lambda x: x @ a.to(x.dtype),
            [random(R, K)],
            backward=False,
            slack=2.5e-3,
        )
    for C in size.sums:
        x = torch.randn(40, C, dtype=torch.float64, device=DEVICE)
        yield Case("row_sums", kernels.row_sums, lambda x: x.sum(1), [x], backward=False)


def views(x):
    """x; copies that begin 0, 1 and 8 elements behind an aligned address; one whose rows are parts of longer ones."""
    poison = torch.nan if x.is_floating_point() else -1
    copies = []
    for i in (0, 1, 8):
        room = x.new_full((x.numel() + 64,), poison)
        copies.append(room[i : i + x.numel()].view(x.shape))
    wide = torch.empty_like(x)
    if x.dim() > 1:
        rows, width, *rest = x.shape
        wide = x.new_full((rows, width + 9, *rest), poison)[:, 8:-1]
    return [x, *(copy.copy_(x) for copy in (*copies, wide))]


def check_case(row, c, size):
    whole, shared = run(c.f, c.rows, c.others, c.backward)
    R = len(c.rows[0])
    picks = [torch.arange(M) + offset(M, R) for M in size.counts if M < R]
    picks.append(torch.randperm(R))
    for pick in picks:
        pick = pick.to(DEVICE)
        expected = [x[pick] for x in whole]
        for rows in zip(*(views(x[pick]) for x in c.rows)):
            ours, _ = run(c.f, rows, c.others, c.backward, pick, R)
            row.check(ours, expected)

    def again():
        results, gradients = run(c.f, c.rows, c.others, c.backward)
        return results + gradients

    row.again(again, whole + shared, size.repeats)
    right(row, *c[1:])
    if c.name == "token_logprobs":
        h, targets = c.rows
        (w,) = c.others
        z = kernels.head_logits(h, w) / on_device(0.7)  # as the sampler does
        of_all = kernels.log_softmax(z, -1, False)
        row.check(of_all.gather(1, targets[:, None])[:, 0], whole[0])
        with patched(CHUNK=16):
            row.check(c.f(h, targets, w), whole[:2])


def on_rows(size):
    found = {}
    for c in operators(size):
        row = Row(c.name, "rows forward and backward; offsets, alignments, strides; again")
        check_case(found.setdefault(c.name, row), c, size)
    yield from found.values()


def total_and_mean(x):
    return x.sum(0), x.mean(0)


def sums(size):
    """Of plain torch: a bias's gradient, means; with the switch thrown they are ours."""
    row = Row("sum and mean of plain torch", "columns and rows of a matrix alone; again")
    for dtype in (DTYPE, f32, torch.float64):
        x = torch.randn(size.splits_of_sums, 70, dtype=torch.float64, device=DEVICE).to(dtype)
        theirs = total_and_mean(x)
        exact = total_and_mean(x.double())
        kernels.enable_batch_invariant()
        try:
            whole = total_and_mean(x)
            for first, n in ((0, 1), (3, 7), (5, 64)):
                part = x[:, first : first + n]
                row.check(total_and_mean(part), [y[first : first + n] for y in whole])
                column = part[:, 0]
                row.check([column.sum(), column.mean()], [y[first] for y in whole])
            row.again(lambda: total_and_mean(x), whole, size.repeats)
            if dtype == torch.float64:
                row.control("reversed rows", x.flip(0).sum(0), whole[0])
            else:  # rounded once: in float64 no order is seen after that
                row.check(whole, [y.to(dtype) for y in exact])
        finally:
            kernels.disable_batch_invariant()
        for a, b in zip(theirs, whole):
            row.library.append((differing(a, b), a.numel()))
    yield row


def embedding(size):
    row = Row("embedding gradient", "the gradients of some tokens alone; again")
    N = 4 * size.rows

    def f(grad, ids):
        return kernels.embedding_backward(grad, ids, 23, -1, False)

    def exact(grad, ids):
        return grad.new_zeros(23, grad.shape[1]).index_add_(0, ids, grad)

    for dtype in {DTYPE, f32}:
        grad = random(N, size.widths[0], dtype=dtype)
        ids = torch.randperm(N, device=DEVICE) % 23
        whole = f(grad, ids)
        some = ids < 9
        row.check(f(grad[some], ids[some])[:9], whole[:9])
        row.again(lambda: [f(grad, ids)], [whole], size.repeats)
        row.control("reversed tokens", f(grad.flip(0), ids.flip(0)), whole)
        right(row, f, exact, [grad, ids], backward=False)
    yield row


def by_sglang(logprobs, seeds, positions):
    """SGLang's draw as torch.compile has it, of a hash that has its largest value replaced by the one below."""
    from sglang.srt.layers import sampler

    def finite(*args, own=sampler.murmur_hash32):
        return own(*args).double().clamp_(max=2**32 - 2)

    with mock.patch.object(sampler, "murmur_hash32", finite):
        return sampler.multinomial_with_seed(logprobs, seeds, positions)


def draw(size):
    from test_kernels import ENDS, ends, plain_draw, ties

    row = Row("draw", "rows; SGLang's own draw and a plain formula, ties, both ends of the hash; again")
    R = size.head_rows
    z = random(R, size.V, dtype=f32) * 3
    seeds = torch.randint(-(2**63), 2**63 - 1, (R,), device=DEVICE)
    positions = torch.randint(40_000, (R,), device=DEVICE)
    logprobs = kernels.log_softmax(z, -1, False)
    args = logprobs, seeds, positions
    whole = kernels.draw(*args)
    for M in size.counts:
        at = offset(M, R)
        part = slice(at, at + M)
        for rows in zip(*(views(x[part]) for x in args)):
            row.check(kernels.draw(*rows), whole[part])
            row.check(plain_draw(*rows), whole[part])
    for args_of, tokens in (ties(), *map(ends, ENDS)):
        row.check(kernels.draw(*(x.to(DEVICE) for x in args_of)), tokens.to(DEVICE))
    row.again(lambda: kernels.draw(*args), whole, size.repeats)
    if CUDA:
        row.check(by_sglang(*args), whole)
        graph, out = captured(partial(kernels.draw, *args))
        for x in (seeds, positions):  # the graph reads what these then hold
            x.add_(1)
        graph.replay()
        row.check(out, by_sglang(*args))
    row.control("other seeds", kernels.draw(logprobs, seeds + 2**40, positions), whole)
    yield row


PARTS = [matmul, tensor_core, operand_forms, attention, on_rows, sums, embedding, draw]
PARTS += [attention_graph, graph_after_a_loan, mixture_graph] * CUDA


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.__name__ for part in PARTS]
    parser.add_argument("parts", nargs="*", choices=[[], *names], default=[], metavar="part", help=", ".join(names))
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if not CUDA and not kernels.INTERPRET:
        print("no CUDA device: set TRITON_INTERPRET=1 to run this on a CPU", file=sys.stderr)
        sys.exit(2)
    if not CUDA:  # the interpreter's tl.dot, as a model of the tensor core's
        import triton_interpreted  # noqa: F401
    warnings.simplefilter("ignore")  # torch names every operator that has no deterministic form
    torch.use_deterministic_algorithms(True, warn_only=True)  # this also fills fresh memory with NaN
    torch.manual_seed(0)
    started = time.monotonic()
    good = True
    print("| operator | varied | cases | differing elements | negative control |\n|---|---|---|---|---|", flush=True)
    for part in PARTS:
        if part.__name__ not in (args.parts or names):
            continue
        began = time.monotonic()
        try:
            for row in part(sizes(args.quick)):
                line, well = row.finish()
                good &= well
                print(line, flush=True)
        except Exception as e:  # the other parts still say something
            text = str(e).strip().splitlines() or [""]
            print(f"| {part.__name__} | FAILED: {type(e).__name__}: {text[0][:200]} | 0 | | NOT CAUGHT |", flush=True)
            good = False
        print(f"{part.__name__}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(f"\n{machine()}, {time.monotonic() - started:.0f} s", flush=True)
    os._exit(not good)  # at an ordinary exit torch_memory_saver would take freeing its memory for an error


if __name__ == "__main__":
    main()
