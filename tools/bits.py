"""
The GPU's operators, bit for bit: whatever a row's neighbours, tiles, chunks, pages and repeats are, its bits must stay.

    python tools/bits.py                                   # one GPU of compute capability 9.0
    python tools/bits.py --quick                           # every 23rd size, one model, a fifth of the repeats
    TRITON_INTERPRET=1 python tools/bits.py --quick        # a CPU: this script's own logic, tiny shapes, float32

Prints a Markdown table while it goes. A case is one tensor compared with the one it must equal, as integers; a number
that is not finite counts as differing. Fresh memory is filled with NaN, so nothing stays unwritten unseen. Each
comparison has a negative control: the library's operator, or ours with one thing moved, must differ. Exit status 1: an
element differs, a control was not caught, a part failed or was not reached in time.
"""

import argparse
import contextlib
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
import triton

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import kernels  # noqa: E402
from configurator import commit  # noqa: E402

bf16, f32 = torch.bfloat16, torch.float32
CUDA = torch.cuda.is_available() and not kernels.INTERPRET
DTYPES, KINDS = ((bf16, f32), "bf16, fp32") if CUDA else ((f32,), "fp32")
DEVICE = "cuda" if CUDA else "cpu"
# hidden, query heads, key heads, MLP of Qwen3; head dim 128
MODELS = {"0.6B": (1024, 16, 8, 3072), "8B": (4096, 32, 8, 12288)}
VOCABULARY = 151936
# BLOCK_M, BLOCK_N, BLOCK_K, warps, stages: those of kernels._matmul_config, and others that it may choose one day
TILES = (
    (64, 16, 128, 4, 8), (64, 32, 128, 4, 4), (64, 64, 128, 4, 3), (64, 128, 64, 4, 4), (128, 128, 64, 8, 4),
    (128, 256, 64, 8, 3), (64, 64, 16, 4, 4), (64, 64, 32, 4, 1), (128, 64, 64, 4, 3), (64, 256, 64, 4, 3),
    (64, 64, 256, 4, 2), (128, 32, 64, 8, 4),
)  # fmt: skip
LOW_TILES = ((16, 64, 64, 4, 3), (32, 64, 64, 4, 3), (16, 128, 128, 4, 3))  # under 64 rows Triton takes mma.sync


def linears(model):
    """{name: (N, K)} of a model's weight matrices."""
    hidden, heads, kv_heads, mlp = MODELS[model]
    qkv = (heads + 2 * kv_heads) * 128
    return {"qkv": (qkv, hidden), "o": (hidden, heads * 128), "gate_up": (2 * mlp, hidden), "down": (hidden, mlp)}


def random(*shape, dtype=bf16):
    return torch.randn(*shape, device=DEVICE).to(dtype if CUDA else f32)


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def differing(a, b):
    """How many elements of a and b differ, on the device."""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)} cannot be compared")
    return (bits(a) != bits(b)).sum()


def machine():
    """Card, driver, versions, date and commit: the last line of a table of figures."""
    card = "a CPU, interpreted" if kernels.INTERPRET else "a CPU"
    if CUDA:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            driver = subprocess.run(query, capture_output=True, text=True).stdout.split()[:1]
        except OSError:
            driver = []
        card = f"{torch.cuda.get_device_name()}, driver {(driver or ['unknown'])[0]}"
    versions = f"torch {torch.__version__}, triton {triton.__version__}, Python {sys.version.split()[0]}"
    return f"{card}, {versions}, {time.strftime('%Y-%m-%d')}, commit {commit()}"


@contextlib.contextmanager
def patched(**names):
    """kernels.py with other constants or functions."""
    before = {name: getattr(kernels, name) for name in names}
    try:
        for name, value in names.items():
            setattr(kernels, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(kernels, name, value)


class Row:
    """A line of the table. Counts stay on the device, so that no comparison waits for it."""

    def __init__(self, operator, varied, judged=True):
        self.operator, self.varied, self.cases, self.differing, self.controls = operator, varied, 0, 0, {}
        self.judged = judged  # else for information: what differs is no fault of ours
        self.varied += "" if judged else "; for information"

    def check(self, ours, expected):
        for a, b in zip(*(x if isinstance(x, (tuple, list)) else (x,) for x in (ours, expected)), strict=True):
            self.cases += 1
            self.differing += differing(a, b) + (~torch.isfinite(b)).sum()

    def control(self, name, ours, expected):
        for a, b in zip(*(x if isinstance(x, (tuple, list)) else (x,) for x in (ours, expected)), strict=True):
            self.controls[name] = self.controls.get(name, 0) + differing(a, b)

    def finish(self):
        """(the line, whether all is well)."""
        counts = {name: int(n) for name, n in self.controls.items()}
        caught, bad = any(counts.values()), int(self.differing)
        verdict = ("caught: " if caught else "NOT CAUGHT: ") + ", ".join(f"{k} {n}" for k, n in counts.items())
        line = f"| {self.operator} | {self.varied} | {self.cases} | {bad} | {verdict} |"
        return line, caught and not (bad and self.judged)


class Skipped(Exception):
    """A row that cannot be made here: its name."""


# ---- matmul


def mm(a, b):
    """torch's own, with the float32 result that ours is compared by."""
    return torch.mm(a, b, out_dtype=f32) if a.dtype == bf16 else torch.mm(a, b)


def product(layout, K, N, R, dtype=bf16):
    """(a(first, M) -> (M, K), b (K, N)) with R rows of a to choose from; T: stored transposed."""
    x = random(R, K, dtype=dtype) if layout[0] == "N" else random(K, R, dtype=dtype)
    b = random(K, N, dtype=dtype) if layout[1] == "N" else random(N, K, dtype=dtype).t()
    return (lambda at, M: x[at : at + M] if layout[0] == "N" else x[:, at : at + M].t()), b


def ours(a, b):
    return kernels.matmul(a, b, out_dtype=f32)


def reversed_k(a, b):
    return ours(a.flip(1), b.flip(0))


def matmul_rows(size):
    """Every number of rows. TN has its rows along the memory, so that most offsets are read by pointers, not by TMA."""
    for layout in ("NT", "NN", "TN"):
        row = Row(f"matmul {layout}", f"M = {size.Ms_text} of {size.R} rows, at other offsets; {size.models_text}")
        shapes = [shape for model in size.models for shape in size.linears(model).values()]
        if layout == "NT":  # the head
            shapes += [(size.V, size.hidden(model)) for model in size.models]
        for dtype, (N, K) in [(bf16, s) for s in shapes] + [(f32, shapes[0])] * CUDA:
            N, K = (K, N) if layout == "NN" else (N, K)
            K = size.tokens if layout == "TN" else K
            a, b = product(layout, K, N, size.R, dtype)
            whole, library = ours(a(0, size.R), b), mm(a(0, size.R), b)
            for M in size.Ms:
                at = M * 37 % (size.R - M + 1)
                row.check(ours(a(at, M), b), whole[at : at + M])
                if M in size.few:
                    row.control("torch.mm", mm(a(at, M), b), library[at : at + M])
            row.control("reversed K", reversed_k(a(0, 64), b), whole[:64])
        yield row


def matmul_columns(size):
    """The engine multiplies by q, k and v weights in one matrix, the trainer by each alone."""
    row = Row("matmul columns", "N cut into q, k, v and at odd places")
    for model in size.models:
        (N, K), few = size.linears(model)["qkv"], size.few
        a, b = product("NT", K, N, max(few))
        library = mm(a(0, max(few)), b)
        for M in few:
            whole = ours(a(0, M), b)
            for first, last in ((0, N // 2), (N // 2, N * 3 // 4), (N * 3 // 4, N), (5, N - 3), (N - 1, N)):
                row.check(ours(a(0, M), b[:, first:last]), whole[:, first:last])
                row.control("torch.mm", mm(a(0, M), b[:, first:last]), library[:M, first:last])
        row.control("reversed K", reversed_k(a(0, 64), b), ours(a(0, 64), b))
    yield row


def recorded(work):
    """The PTX of everything that `work` launches."""
    texts = []

    def launch(kernel, grid, *args, **config):
        texts.append(kernel[grid](*args, **config).asm["ptx"])

    with patched(_launch=launch):
        work()
    return "".join(texts)


def under(tiles, path, a, b):
    """The product with one tile shape, by TMA or by pointers."""
    with patched(_matmul_config=lambda *_: tiles, _for_tma=kernels._for_tma if path == "TMA" else lambda _: None):
        return ours(a, b)


def matmul_tiles(size):
    shapes = [("NT", *size.linears(size.models[0])["down"], M) for M in (17, 200)]
    shapes += [
        ("NN", *size.linears(size.models[-1])["qkv"], 129),
        ("TN", size.hidden(size.models[-1]), size.tokens, 128),
    ]
    rows = [
        Row("matmul tiles", f"{len(size.tiles)} tile shapes, each by TMA and by pointers, pairwise"),
        Row("matmul TMA", "TMA against pointers, the table's own tiles, every bucket of M"),
    ]
    for layout, N, K, M in shapes:
        a, b = product(layout, K, N, M)
        whole = ours(a(0, M), b)
        for tiles in size.tiles:  # all equal to one: pairwise equal
            for path in ("TMA", "pointers"):
                rows[0].check(under(tiles, path, a(0, M), b), whole)
        rows[0].control("reversed K", reversed_k(a(0, M), b), whole)
        a, b = product(layout, K, N, max(size.few))
        for M in size.few:
            whole = ours(a(0, M), b)
            with patched(_for_tma=lambda _: None):
                rows[1].check(ours(a(0, M), b), whole)
            rows[1].control("reversed K", reversed_k(a(0, M), b), whole)
    yield from rows
    if not CUDA:
        raise Skipped("matmul mma")
    row = Row("matmul mma", "mma.sync (16- and 32-row tiles, used nowhere) against wgmma (64 and more)", judged=False)
    for layout, N, K, M in shapes:
        a, b = product(layout, K, N, M)
        whole = ours(a(0, M), b)
        for tiles in LOW_TILES:
            text = recorded(lambda: row.check(under(tiles, "pointers", a(0, M), b), whole))
            if "mma.sync" not in text:
                raise ValueError(f"{tiles} was not compiled to mma.sync: nothing was compared")
        text = recorded(lambda: ours(a(0, M), b))
        if "wgmma" not in text or "cp.async.bulk.tensor" not in text:
            raise ValueError("the table's tiles were not compiled to wgmma and TMA: nothing was compared")
        row.control("reversed K", reversed_k(a(0, M), b), whole)
    yield row


def matmul_oracle(size):
    """cuBLAS without split-K adds in the order of K too: an oracle that shares no code with ours."""
    if not CUDA:
        raise Skipped("matmul = torch.mm")
    rows = [  # a few rows may be multiplied by a kernel of another kind there
        Row("matmul = torch.mm", "split-K reductions off; M of 64 and more"),
        Row("matmul = torch.mm", "split-K reductions off; M from 2 to 63", judged=False),
    ]
    flags = torch.backends.cuda.matmul
    before = flags.allow_bf16_reduced_precision_reduction, torch.backends.cuda.preferred_blas_library()
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt")  # split-K can be switched off there only
        flags.allow_bf16_reduced_precision_reduction = (False, False)
        for model in size.models:
            for N, K in size.linears(model).values():
                for layout in ("NT", "NN", "TN"):
                    a, b = product(layout, K, N, max(size.few))
                    for M in (M for M in size.few if M > 1):
                        row = rows[M < 64]
                        row.check(ours(a(0, M), b), mm(a(0, M), b))
                        row.control("reversed K", reversed_k(a(0, M), b), mm(a(0, M), b))
    finally:
        flags.allow_bf16_reduced_precision_reduction = before[0]
        torch.backends.cuda.preferred_blas_library(before[1])
    yield from rows


# ---- attention


class Sequences:
    """Random sequences, packed, and the same keys in a paged cache whose other rows hold NaN and Inf."""

    def __init__(self, lengths, heads, kv_heads, D, dtype=bf16):
        self.lengths, self.N, self.scale = lengths, sum(lengths), D**-0.5
        self.start = [sum(lengths[:i]) for i in range(len(lengths))]
        self.q = random(self.N, heads, D, dtype=dtype)
        self.k, self.v = (random(self.N, kv_heads, D, dtype=dtype) for _ in "kv")
        self.out = self.packed(self.q, self.k, self.v)
        self.turn_pages()

    def packed(self, q, k, v):
        return kernels.attention(q, k, v, kernels.packed_plan(self.lengths, DEVICE), self.scale)

    def turn_pages(self):
        slots = torch.randperm(self.N + 100, device=DEVICE)
        slots, unused = slots[: self.N], slots[self.N :]
        shape = self.N + 100, *self.k.shape[1:]
        self.keys, self.values = (
            torch.full(shape, x, dtype=self.k.dtype, device=DEVICE) for x in (torch.nan, torch.inf)
        )
        self.keys[slots], self.values[slots] = self.k, self.v
        B = len(self.lengths)
        self.requests = torch.randperm(B + 5, device=DEVICE)[:B]
        self.table = unused[0].int().repeat(B + 5, max(self.lengths) + 30)  # a poisoned row
        for r, s, n in zip(self.requests.tolist(), self.start, self.lengths):
            self.table[r, :n] = slots[s : s + n]

    def step(self, chunks):
        """(result, what it must be) of an engine step over chunks (sequence, first token, last + 1)."""
        rows = torch.cat([torch.arange(self.start[i] + a, self.start[i] + b) for i, a, b in chunks]).to(DEVICE)
        lens = (torch.tensor(x, device=DEVICE) for x in ([b - a for _, a, b in chunks], [b for _, _, b in chunks]))
        plan = kernels.paged_plan(*lens, self.table, self.requests[[i for i, _, _ in chunks]])
        return kernels.attention(self.q[rows], self.keys, self.values, plan, self.scale), self.out[rows]


def sdpa(q, k, v, causal, scale):
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def decode_batches(n):
    """Every position of a sequence, in batches of changing size: so with changing shares of the splits."""
    sizes, at = (64, 3, 17, 1, 7, 256, 2), 0
    for i in range(n):
        size = sizes[i % len(sizes)]
        if at < n:
            yield [(0, t, t + 1) for t in range(at, min(at + size, n))]
        at += size


def attention(size):
    names = "all of a batch, and each alone", f"chunks of {size.chunks} keys, and all kinds in one step"
    rows = [
        Row("attention prefill = packed", f"{names[0]}; permuted pages, poisoned cache"),
        Row("attention chunks = packed", names[1]),
        Row("attention decode = packed", "one by one, batches of 1 to 256; one program per split or for all"),
        Row("attention neighbours", "the other sequences of the pack are NaN and Inf"),
    ]
    with patched(**size.small_attention):
        for dtype, D, groups, kv_heads, lengths in size.attention:
            s = Sequences(lengths, groups * kv_heads, kv_heads, D, dtype)
            n = lengths[0]
            for _ in range(2):
                rows[0].check(*s.step([(i, 0, m) for i, m in enumerate(lengths)]))
                for i, m in enumerate(lengths):
                    rows[0].check(*s.step([(i, 0, m)]))
                s.turn_pages()
            for c in size.chunks:
                for a in range(0, n, c):
                    rows[1].check(*s.step([(0, a, min(a + c, n))]))
            rows[1].check(*s.step([(1, 0, lengths[1]), (0, n // 2, n // 2 + 1), (2, 3, lengths[2] - 1), (0, 0, 70)]))
            for batch in decode_batches(n):
                rows[2].check(*s.step(batch))
            last = [(i, m - 1, m) for i, m in enumerate(lengths)]
            for programs in (1, 100000):
                with patched(DECODE_PROGRAMS=programs):
                    rows[2].check(*s.step(last))
            for i, m in enumerate(lengths):
                at = slice(s.start[i], s.start[i] + m)
                q, k, v = (torch.full_like(x, y) for x, y in ((s.q, torch.inf), (s.k, torch.nan), (s.v, torch.inf)))
                q[at], k[at], v[at] = s.q[at], s.k[at], s.v[at]
                rows[3].check(s.packed(q, k, v)[at], s.out[at])
            if not rows[0].controls:  # the first case is enough: other splits are other kernels, to be compiled
                with patched(SPLIT=kernels.SPLIT // 2):
                    steps = [(0, 0, n)], [(0, n // 2, n)], [(0, t, t + 1) for t in range(n - 60, n)]
                    for row, step in zip(rows, steps):
                        row.control("moved splits", *s.step(step))
                    rows[3].control("moved splits", s.packed(s.q, s.k, s.v), s.out)
            if (D, groups) == (128, 4):
                q, k, v = (x[:n] for x in (s.q, s.k, s.v))
                whole = sdpa(q, k, v, True, s.scale)
                for t in (n // 3, n // 2, n - 1):
                    one = sdpa(q[t : t + 1], k[: t + 1], v[: t + 1], False, s.scale)
                    rows[2].control("SDPA", one, whole[t : t + 1])
        yield from rows
        if not CUDA:
            raise Skipped("attention mma")
        row = Row("attention mma", "16-row decode tiles (mma.sync, used nowhere) against 64-row (wgmma)", judged=False)
        s = Sequences(lengths, groups * kv_heads, kv_heads, D)
        with patched(DECODE_ROWS=16):
            text = recorded(lambda: row.check(*s.step([(i, m - 1, m) for i, m in enumerate(lengths)])))
            if "mma.sync" not in text:
                raise ValueError("not compiled to mma.sync: nothing was compared")
            for batch in decode_batches(lengths[0]):
                row.check(*s.step(batch))
            with patched(SPLIT=kernels.SPLIT // 2):
                row.control("moved splits", *s.step(batch))
        yield row


def attention_graph(size):
    """What the engine does: one captured graph, replayed with what lengths, pages and queries then hold."""
    if not CUDA:
        raise Skipped("attention in a CUDA graph")
    row = Row("attention in a CUDA graph", "a captured decode step, replayed with other lengths, requests and pages")
    for B in (1, 8, 64):
        s = Sequences([3000, 1024, 1025, 700, 64, 1], 32, 8, 128)
        ones = torch.ones(B, dtype=torch.long, device=DEVICE)
        kv_lens, requests, table, q = ones.clone(), s.requests[:1].repeat(B), s.table.clone(), s.q[:B].clone()
        plan = kernels.paged_plan(ones, kv_lens, table, requests)

        keys, values = s.keys, s.values

        def step():
            return kernels.attention(q, keys, values, plan, s.scale)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        for _ in range(size.repeats):
            which = torch.randint(len(s.lengths), (B,), device=DEVICE)
            lengths, start = (torch.tensor(x, device=DEVICE)[which] for x in (s.lengths, s.start))
            at = (torch.rand(B, device=DEVICE) * lengths).long()
            s.turn_pages()
            new = (keys, s.keys), (values, s.values), (table, s.table), (q, s.q[start + at])
            for old, other in (*new, (kv_lens, at + 1), (requests, s.requests[which])):
                old.copy_(other)
            graph.replay()
            row.check(out, s.out[start + at])
            kv_lens.copy_((at // 2) + 1)  # stale lengths
            graph.replay()
            row.control("stale lengths", out, s.out[start + at])
    yield row


# ---- operators on rows


def placed(x, shift):
    """A copy of x that begins `shift` elements behind an aligned address, with NaN before and behind."""
    if not x.is_floating_point():
        return x.clone()
    room = torch.full((x.numel() + shift + 64,), torch.nan, dtype=x.dtype, device=x.device)
    room[shift : shift + x.numel()] = x.flatten()
    return room[shift : shift + x.numel()].view(x.shape)


def some_rows(row, f, *inputs, check=None):
    """f of some of the rows, at other offsets and alignments, against those rows of f of all."""
    whole, R = f(*inputs), len(inputs[0])
    several = isinstance(whole, tuple)
    for M in (1, 2, 3, 5, 8, 16, 17, 31, 64, 100, 129, 255, 256, 700, R):
        if M <= R:
            at = M * 37 % (R - M + 1)
            expected = tuple(x[at : at + M] for x in whole) if several else whole[at : at + M]
            parts = [[x[at : at + M] for x in inputs]]
            if check is None:
                parts += [[placed(x, shift) for x in parts[0]] for shift in (0, 1, 8)]
            for part in parts:
                (check or row.check)(f(*part), expected)
    return whole


def row_operators(size):
    def library(row, name, f, x):
        some_rows(row, f, x, check=lambda a, b: row.control(name, a, b))

    R = size.rows
    row = Row("rms_norm", f"rows, offsets, alignments; with and without residual; {KINDS}")
    for dtype in DTYPES:
        for C in size.widths:
            x, residual, w = random(R, C, dtype=dtype), random(R, C, dtype=dtype), random(C, dtype=dtype)
            plain = some_rows(row, lambda x: kernels.rms_norm(x, w, 1e-6), x)
            _, s = some_rows(row, lambda x, r: kernels.rms_norm(x, w, 1e-6, r), x, residual)
            row.check(kernels.rms_norm(s, w, 1e-6), kernels.rms_norm(x, w, 1e-6, residual)[0])
            row.control("row rolled", kernels.rms_norm(x.roll(1, 1), w.roll(1), 1e-6).roll(-1, 1), plain)
            library(row, "torch.mean", lambda x: x.float().pow(2).mean(-1), x)
    yield row
    inv_freq = 1.0 / 1e6 ** (torch.arange(0, size.D, 2, device=DEVICE) / size.D)
    positions = torch.arange(R, device=DEVICE) * 19
    row = Row("rope_table", "rows, offsets")
    cos, sin = some_rows(row, lambda p: kernels.rope_table(inv_freq, p), positions)
    row.control("angle in float64", (positions.double()[:, None] * inv_freq.double()).cos().float(), cos)
    yield row
    row = Row("norm_rope", f"rows, offsets, alignments, views of a fused qkv; with and without norm; {KINDS}")
    for dtype in DTYPES:
        fused = random(R, 12, size.D, dtype=dtype)
        q, k = fused[:, :8].contiguous(), fused[:, 8:10].contiguous()
        fused[:, 10:] = torch.nan
        for norms in ((random(size.D, dtype=dtype), random(size.D, dtype=dtype), 1e-6), ()):
            whole = some_rows(row, lambda *x: kernels.norm_rope(*x, *norms), q, k, cos, sin)
            row.check(kernels.norm_rope(fused[:, :8], fused[:, 8:10], cos, sin, *norms), whole)
            rounded = kernels.norm_rope(q, k, cos.bfloat16().float(), sin.bfloat16().float(), *norms)
            row.control("table in bf16", rounded, whole)
    yield row
    row = Row("swiglu", f"rows, offsets, alignments, halves of one tensor; {KINDS}")
    for dtype in DTYPES:
        for C in size.widths:
            both = random(R, 2 * C, dtype=dtype) * 4
            gate, up = both[:, :C].contiguous(), both[:, C:].contiguous()
            whole = some_rows(row, kernels.swiglu, gate, up)
            row.check(kernels.swiglu(both[:, :C], both[:, C:]), whole)
            row.control("gate rounded in between", F.silu(gate) * up, whole)
    yield row
    for name, f in (("log_softmax", kernels.log_softmax), ("softmax", kernels.softmax)):
        row = Row(name, f"rows of {size.V}, offsets, alignments; {KINDS}")
        for dtype in DTYPES:
            z = random(size.head_rows, size.V, dtype=dtype) * 3
            whole = some_rows(row, lambda z: f(z, -1, False), z)
            row.control("row rolled", f(z.roll(1, 1), -1, False).roll(-1, 1), whole)
        yield row
    row = Row("token_logprobs", "rows, offsets, alignments, across a chunk's end; equal to the sampler's log_softmax")
    for H in size.widths[:1] if size.quick else size.widths:
        h, w = random(size.head_rows, H), random(size.V, H) / H**0.5
        targets = torch.randint(size.V - 1, (len(h),), device=DEVICE)
        whole = some_rows(row, lambda h, t: kernels.token_logprobs(h, w, t, 0.7), h, targets)
        z = kernels.head_logits(h, w) / torch.tensor(0.7, device=DEVICE)
        row.check(kernels.log_softmax(z, -1, False).gather(1, targets[:, None])[:, 0], whole[0])
        with patched(CHUNK=16):
            row.check(kernels.token_logprobs(h, w, targets, 0.7), whole)
        rolled = kernels.token_logprobs(h, w.roll(1, 0), targets + 1, 0.7)
        row.control("vocabulary rolled", rolled, whole)
    yield row
    row = Row("row_sums", "rows, offsets, alignments; fp64")
    for C in size.sums:
        x = torch.randn(40, C, device=DEVICE)
        for x in (x.double(),):
            whole = some_rows(row, kernels.row_sums, x)
            row.control("row rolled", kernels.row_sums(x.roll(1, 1)), whole)
            library(row, "torch.sum", lambda x: x.sum(1), x)
    yield row


# ---- backward


class Busy:
    """A second stream that keeps the card busy, so that programs are scheduled otherwise each time."""

    def __init__(self):
        if CUDA:
            self.stream, self.x = torch.cuda.Stream(), random(4096, 4096)
            self.out = torch.empty_like(self.x)
            self.x.record_stream(self.stream), self.out.record_stream(self.stream)

    def more(self):
        if CUDA:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                for _ in range(1 + int(torch.randint(4, ()))):
                    torch.mm(self.x, self.x, out=self.out)


def gradients(f, rows, others, pick):
    """(gradients of the rows' inputs, of the others) where only the rows `pick` are given, in that order."""
    wanted = [x[pick].detach().clone() for x in rows], [x.detach().clone() for x in others]
    for x in sum(wanted, []):
        x.requires_grad_(x.is_floating_point())
    out = f(*wanted[0], *wanted[1])
    out = out if isinstance(out, tuple) else (out,)
    grads = []
    for i, o in enumerate(out):  # one gradient per row, whatever is picked
        generator = torch.Generator(DEVICE).manual_seed(i)
        grads.append(torch.randn(len(rows[0]), *o.shape[1:], generator=generator, device=DEVICE).to(o.dtype)[pick])
    wanted = [[x for x in xs if x.requires_grad] for xs in wanted]
    found = torch.autograd.grad(out, sum(wanted, []), grads, allow_unused=True)
    return [[g for g in gs if g is not None] for gs in (found[: len(wanted[0])], found[len(wanted[0]) :])]


def backward(size):
    R, busy = size.rows, Busy()
    angle = torch.rand(R, size.D // 2, device=DEVICE)
    C, H, n = size.widths[-1], size.widths[0], size.backward_head_rows

    def norm(x, w):
        return kernels.rms_norm(x, w, 1e-6)

    def norm_of_sum(x, residual, w):
        return kernels.rms_norm(x, w, 1e-6, residual)

    cases = {
        "rms_norm": (norm, [random(R, C)], [random(C)]),
        "rms_norm + residual": (norm_of_sum, [random(R, C), random(R, C)], [random(C)]),
        "norm_rope": (
            lambda *x: kernels.norm_rope(*x, 1e-6),
            [random(R, 8, size.D), random(R, 2, size.D), angle.cos(), angle.sin()], [random(size.D), random(size.D)],
        ),
        "swiglu": (kernels.swiglu, [random(R, C), random(R, C)], []),
        "token_logprobs": (
            lambda h, t, w: kernels.token_logprobs(h, w, t, 0.7),
            [random(n, H), torch.randint(size.V, (n,), device=DEVICE)], [random(size.V, H) / H**0.5],
        ),
    }  # fmt: skip
    repeated = Row(
        "backward, again", f"{size.repeats} times beside a busy stream: {', '.join(cases)}, attention, NN, TN"
    )
    permuted = Row("backward, pack permuted", "rows in another order, and some alone: dx of the same operators")
    for f, rows, others in cases.values():
        everything = torch.arange(len(rows[0]), device=DEVICE)
        dx, dw = gradients(f, rows, others, everything)
        for _ in range(size.repeats):
            busy.more()
            repeated.check(sum(gradients(f, rows, others, everything), []), dx + dw)
        picks = torch.randperm(len(everything)), torch.arange(5, 22), torch.tensor([7])
        for pick in (p.to(DEVICE) for p in picks):
            mine, theirs = gradients(f, rows, others, pick)
            permuted.check(mine, [x[pick] for x in dx])
            if len(pick) == len(everything):
                permuted.control("dw, a sum over the pack", theirs, dw)
                repeated.control("another order of rows", theirs, dw)
    N, K = size.linears(size.models[0])["qkv"]
    for layout in ("NN", "TN"):
        a, b = product(layout, K, N, 300)
        whole = ours(a(0, 300), b)
        for _ in range(size.repeats):
            busy.more()
            repeated.check(ours(a(0, 300), b), whole)
    packs = Row("attention backward", "sequences in another order, and each alone; neighbours NaN and Inf")
    with patched(**size.small_attention):
        for dtype, D, groups, kv_heads, lengths in size.attention_backward:
            s = Sequences(lengths, groups * kv_heads, kv_heads, D, dtype)
            grad = random(s.N, groups * kv_heads, D, dtype=dtype)

            def grads(order, poison=None):
                """{sequence: (dq, dk, dv)} of a pack; the gradients of all others than `poison` are its neighbours'."""
                rows = torch.cat([torch.arange(s.start[i], s.start[i] + lengths[i]) for i in order]).to(DEVICE)
                x, y, z, g = (t[rows].clone() for t in (s.q, s.k, s.v, grad))
                at, lens = 0, [lengths[i] for i in order]
                for i, m in zip(order, lens):
                    if poison not in (None, i):
                        y[at : at + m], z[at : at + m], g[at : at + m] = torch.nan, torch.inf, torch.nan
                    at += m
                x, y, z = (t.requires_grad_() for t in (x, y, z))
                out = kernels.attention(x, y, z, kernels.packed_plan(lens, DEVICE), s.scale)
                parts = [t.split(lens) for t in torch.autograd.grad(out, (x, y, z), g)]
                return {i: [p[j] for p in parts] for j, i in enumerate(order)}

            order = list(range(len(lengths)))
            first = grads(order)
            for other in (order[::-1], order[1:] + order[:1], *([i] for i in order)):
                for i, parts in grads(other).items():
                    packs.check(parts, first[i])
            for i in order:
                packs.check(grads(order, poison=i)[i], first[i])
            for _ in range(size.repeats):
                busy.more()
                repeated.check(sum(grads(order).values(), []), sum(first.values(), []))
            if not packs.controls:
                with patched(SPLIT=kernels.SPLIT // 2, KEYS=kernels.KEYS // 2):
                    for i, parts in grads(order).items():
                        packs.control("moved splits and tiles", parts, first[i])
    yield from (repeated, permuted, packs)
    row = Row("embedding gradient", f"{size.repeats} times beside a busy stream; other tokens removed; {KINDS}")
    for dtype in DTYPES:
        C, words = size.widths[0], 97
        grad, ids = random(4 * R, C, dtype=dtype), torch.randint(words, (4 * R,), device=DEVICE)
        whole = kernels.embedding_backward(grad, ids, words, -1, False)
        some = ids < words // 2
        alone = kernels.embedding_backward(grad[some], ids[some], words, -1, False)
        row.check(alone[: words // 2], whole[: words // 2])
        row.control("reversed tokens", kernels.embedding_backward(grad.flip(0), ids.flip(0), words, -1, False), whole)
        torch.use_deterministic_algorithms(False)
        atomic = torch.zeros(words, C, device=DEVICE).index_add_(0, ids, grad.float())
        for _ in range(size.repeats):
            busy.more()
            row.check(kernels.embedding_backward(grad, ids, words, -1, False), whole)
            again = torch.zeros(words, C, device=DEVICE).index_add_(0, ids, grad.float())
            row.control("torch.index_add_", again, atomic)
        torch.use_deterministic_algorithms(True, warn_only=True)
    yield row


# ---- right, not only the same


def right(size):
    """Against float64: |ours - reference| / |reference|. A wrong operator may be invariant."""

    def tf32(x):  # to the 10 bits that TF32 keeps
        return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(f32)

    for dtype, bound, coarse in ((f32, 1e-5, tf32), (bf16, 2e-2, lambda x: x.to(torch.float8_e4m3fn).to(x.dtype))):
        if dtype == bf16 and not CUDA:
            raise Skipped("against float64, bfloat16")
        errors, misses, H = [], [], size.widths[-1]
        row = Row(f"against float64, {str(dtype)[6:]}", "")
        w, x, r, h = (random(*shape, dtype=dtype) for shape in ((H,), (65, H), (65, H), (65, H)))
        b = random(99, H, dtype=dtype) / H**0.5
        q, k, v = (random(size.tokens, heads, size.D, dtype=dtype) for heads in (4, 2, 2))
        targets = torch.randint(99, (65,), device=DEVICE)
        plan = kernels.packed_plan([size.tokens], DEVICE)

        def logprobs(h, b):
            return torch.log_softmax(h @ b.t() / 0.7, -1).gather(1, targets[:, None])[:, 0]

        cos, sin = kernels.rope_table(torch.rand(size.D // 2, device=DEVICE), torch.arange(size.tokens, device=DEVICE))

        def normed(x, w):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w

        def turned(q, k, *weights):
            x1, x2 = torch.cat([normed(x, w) for x, w in zip((q, k), weights)], 1).chunk(2, -1)
            c, s = cos[:, None], sin[:, None]
            return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1)

        def embedding(grad):
            return torch.zeros(99, H, dtype=grad.dtype, device=DEVICE).index_add_(0, targets, grad.detach())

        pairs = {  # ours, the reference, inputs, whether it can be differentiated
            "matmul": (lambda a, b: ours(a, b.t()), lambda a, b: a @ b.t(), (x, b), False),
            "matmul TN": (lambda a, b: ours(a.t(), b), lambda a, b: a.t() @ b, (x, r), False),
            "rms_norm": (
                lambda x, r, w: kernels.rms_norm(x, w, 1e-6, r)[0], lambda x, r, w: normed(x + r, w), (x, r, w), True,
            ),
            "swiglu": (kernels.swiglu, lambda g, u: F.silu(g) * u, (x, r), True),
            "norm_rope": (
                lambda q, k, *w: torch.cat(kernels.norm_rope(q, k, cos, sin, *w, 1e-6), 1), turned,
                (q, k, *random(2, size.D, dtype=dtype)), True,
            ),
            "embedding": (
                lambda grad: kernels.embedding_backward(grad.detach(), targets, 99, -1, False), embedding, (x,), False,
            ),
            "log-probs": (lambda h, b: kernels.token_logprobs(h, b, targets, 0.7)[0], logprobs, (h, b), True),
            "attention": (
                lambda q, k, v: kernels.attention(q, k, v, plan, size.D**-0.5),
                lambda q, k, v: sdpa(q, k, v, True, size.D**-0.5), (q, k, v), True,
            ),
        }  # fmt: skip

        def run(f, inputs, kind):
            inputs = [x.detach().to(kind).requires_grad_() for x in inputs]
            out = f(*inputs)
            generator = torch.Generator(DEVICE).manual_seed(0)
            grad = torch.randn(out.shape, generator=generator, device=DEVICE).to(dtype).to(out.dtype)
            return [out.detach()], (out, inputs, grad)

        def error(a, b):
            return ((a.double() - b).norm() / b.norm()).item()

        for name, (f, reference, inputs, differentiable) in pairs.items():
            found = []
            for inputs_of in (inputs, [coarse(x) for x in inputs]):
                mine, (out, leaves, grad) = run(f, inputs_of, inputs[0].dtype)
                theirs, (out64, leaves64, grad64) = run(reference, inputs, torch.float64)
                if differentiable:
                    mine += torch.autograd.grad(out, leaves, grad)
                    theirs += torch.autograd.grad(out64, leaves64, grad64)
                found.append(max(error(a, b) if a.isfinite().all() else float("inf") for a, b in zip(mine, theirs)))
            errors.append(found[0])
            misses.append(found[1])
            row.cases += len(mine)
            row.differing += not found[0] < bound
        row.varied = f"forward and backward of {', '.join(pairs)}: error at most {max(errors):.1e}, bound {bound:.0e}"
        name = "inputs in TF32" if dtype == f32 else "inputs in fp8"
        row.controls = {
            f"{name}, least error {min(misses):.1e}, operators beyond the bound:": sum(m > bound for m in misses)
        }
        if not all(m > bound for m in misses):  # each operator's comparison must be able to fail
            row.controls = {name: 0}
        yield row


PARTS = right, matmul_rows, matmul_columns, matmul_tiles, matmul_oracle, attention, attention_graph
PARTS += row_operators, backward


class Size:
    """How much of everything; on a CPU as little as runs every line that needs no GPU."""

    def __init__(self, quick):
        self.quick, self.D, self.small_attention = quick, 128, {}
        if not CUDA:
            self.quick, self.D, self.models, self.V, self.R = True, 64, ["tiny"], 98, 70
            self.Ms, self.few, self.tokens = [1, 2, 17, 33, 65, 70], [1, 17, 65], 90
            self.rows, self.head_rows, self.backward_head_rows = 24, 6, 30
            self.widths, self.sums = (48, 66), (70, 5000)
            self.tiles = (64, 16, 128, 4, 3), (128, 32, 64, 4, 3), (16, 64, 32, 4, 3)
            self.repeats, self.chunks = 2, (19, 64)
            # splits of 128 keys, so that short sequences have several
            self.small_attention = dict(
                SPLIT=128, _attention_config=lambda _, rows, *__: dict(ROWS=rows // 4, KEYS=kernels.KEYS)
            )
            self.attention = [(f32, 64, 2, 1, [150, 5, 64]), (f32, 128, 4, 1, [135, 5, 64])]
            self.attention_backward = [(f32, 64, 3, 1, [70, 33, 140])]
            self.models_text = "tiny shapes"
        else:
            self.models, self.V, self.R, self.tiles = (["0.6B"] if quick else ["0.6B", "8B"]), VOCABULARY, 4200, TILES
            around = [M + i for M in (512, 1024, 2048, 4096) for i in (-1, 0, 1)]
            self.Ms = [*range(1, 301, 23 if quick else 1), *around]
            self.few, self.tokens = [1, 2, 16, 17, 33, 64, 65, 129, 300, 512, 1000, 2048], 1111
            self.rows, self.head_rows, self.backward_head_rows = 2100, 260, 1100
            self.widths, self.sums = (1024, 4096), (70, 4096, 100_003, 1 << 20)
            self.repeats, self.chunks = (10 if quick else 50), (33, 64, 500, 1000, 1024)
            long, short = [3000, 1, 1025, 1024, 1023, 64], [1100, 3, 65, 64, 1]
            heads = [(D, g) for D in (64, 128) for g in ((1, 4, 5) if quick else range(1, 9))]
            self.attention = [(bf16, D, g, 2, short) for D, g in heads if (D, g) != (128, 4)]
            self.attention += [(f32, 64, 2, 1, short), (bf16, 128, 2, 8, long), (bf16, 128, 4, 8, long)]
            heads = [(D, g) for D in (64, 128) for g in ((1, 4) if quick else (1, 2, 4, 5, 8))]
            self.attention_backward = [(bf16, D, g, 2, short) for D, g in heads] + [(f32, 64, 2, 1, short)]
            self.models_text = "Qwen3 " + " and ".join(self.models)
        self.Ms_text = f"{len(self.Ms)} sizes from {min(self.Ms)} to {max(self.Ms)}"

    def linears(self, model):
        return linears(model) if CUDA else {"qkv": (96, 40), "o": (33, 32), "gate_up": (70, 48), "down": (66, 128)}

    def hidden(self, model):
        return MODELS[model][0] if CUDA else 40


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.__name__ for part in PARTS]
    parser.add_argument("parts", nargs="*", choices=[[], *names], default=[], metavar="part", help=", ".join(names))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--minutes", type=float, default=9.0, help="no part begins later")
    args = parser.parse_args()
    if not CUDA and not kernels.INTERPRET:
        print("no CUDA device: set TRITON_INTERPRET=1 to run this on a CPU", file=sys.stderr)
        sys.exit(2)
    if not CUDA:  # the interpreter's tl.dot, as a model of the tensor core's
        sys.path.insert(0, str(ROOT / "tests"))
        import triton_interpreted  # noqa: F401
    warnings.simplefilter("ignore")  # torch names every operator that has no deterministic form
    torch.use_deterministic_algorithms(True, warn_only=True)  # this also fills fresh memory with NaN
    torch.manual_seed(0)
    size, started, good = Size(args.quick), time.monotonic(), True
    print("| operator | varied | cases | differing elements | negative control |\n|---|---|---|---|---|", flush=True)
    for part in PARTS:
        if part.__name__ not in (args.parts or names):
            continue
        began = time.monotonic()
        if began - started > args.minutes * 60:
            print(f"| {part.__name__} | not run: {args.minutes:.0f} minutes are over | 0 | | NOT CAUGHT |", flush=True)
            good = False
            continue
        try:
            for row in part(size):
                line, well = row.finish()
                good &= well
                print(line, flush=True)
            if CUDA:
                torch.cuda.empty_cache()
        except Skipped as row:
            print(f"| {row} | skipped: needs CUDA | 0 | | |", flush=True)
        except Exception as e:  # the other parts still say something
            text = str(e).strip().splitlines() or [""]
            print(f"| {part.__name__} | FAILED: {type(e).__name__}: {text[0][:200]} | 0 | | NOT CAUGHT |", flush=True)
            good = False
        print(f"{part.__name__}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(f"\n{machine()}, {time.monotonic() - started:.0f} s")
    sys.exit(not good)


if __name__ == "__main__":
    main()
