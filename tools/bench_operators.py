"""
Each operator at the shapes of Qwen3, alternately with the library's, on a GPU: time, share of the roof, bits.

    python tools/bench_operators.py

Random numbers, several sets of inputs where one would fit the cache, CUDA graphs, medians. The roof is the larger of
bytes / copy rate and operations / matmul rate, both rates measured in the same run. Host: what the CPU takes for a call
that no graph replays. Bits: elements in which a few rows computed alone differ from the same rows among all. Exit
status 1: an element differs or an operator failed; 2: no GPU.
"""

import contextlib
import math
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))  # for its shapes and how it compares
from gpu_bits import DEVICE, MODELS, VOCABULARY, differing, linears, machine, random  # noqa: E402

import kernels  # noqa: E402

TOKENS = 8192  # of a training leaf
HEAD_TOKENS = 4096  # of a leaf for the head, whose library alternative holds the logits several times
DECODE = 16, 64, 512  # rows of a decode step's matmuls
PACKS = (8, 1024), (2, 4096)  # sequences, tokens each
CACHES = (16, 2048), (128, 2048)  # decoded sequences, keys each
D = 128  # head dim
HOST_CALLS = 200  # a card's queue holds some 1,000 launches
FEW = slice(3, 8)  # rows that are also computed alone


class Case(NamedTuple):
    """An operator at a shape. With "eager" in its name: what it allocates or copies cannot be captured in a graph."""

    name: str
    shape: str
    size: int  # bytes: each input and output once
    operations: int
    make: Callable  # () -> {"ours" or a library's name: call} on fresh inputs
    bits: Callable  # () -> [outputs of a few rows], [those rows of the outputs of many]


# ---- the operators


def calls_backward(forwards, inputs):
    """{name: call} of a backward pass of each of `forwards` {name: forward}, which ran before and keeps its graph."""

    def call(forward):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = forward(*leaves)
        outputs = out if isinstance(out, tuple) else (out,)
        grads = [torch.randn_like(x) for x in outputs]
        return lambda: torch.autograd.grad(out, leaves, grads, retain_graph=True)

    return {name: call(forward) for name, forward in forwards.items()}


def rowwise(name, shape, size, passes, ours, library, theirs, inputs):
    """
    Forward and backward of an operator that works on each row by itself. passes: how many tensors of `size` elements
    each of the two reads and writes; theirs: the library's function, which is called `library`; inputs() -> tensors.
    """

    def make():
        xs = inputs()
        return {"ours": lambda: ours(*xs), library: lambda: theirs(*xs)}

    def bits(back):
        # The rows' own inputs come first; the others, such as a norm's weight, have one dim.
        def run(pick):
            torch.manual_seed(1)
            xs = [(x[pick] if x.dim() > 1 else x).detach().requires_grad_(back) for x in inputs()]
            out = ours(*xs)
            out = out if isinstance(out, tuple) else (out,)
            if not back:
                return out
            grads = [((i + 1.0) * x.detach() + 0.5) for i, x in enumerate(out)]
            return [g for g in torch.autograd.grad(out, xs, grads) if g.dim() > 1]

        return run(FEW), [x[FEW] for x in run(slice(None))]

    def make_backward():
        return calls_backward({"ours": ours, library: theirs}, inputs())

    yield Case(name, shape, passes[0] * size * 2, 0, make, partial(bits, False))
    yield Case(f"{name} backward", shape, passes[1] * size * 2, 0, make_backward, partial(bits, True))


def matmul_case(layout, name, M, N, K):
    """
    One product of a weight (N, K) and M rows: y = x w^T (NT), dx = dy w (NN) or dw = dy^T x (TN). The head's is in
    float32, the others in the type of their operands.
    """
    rows, columns, depth = {"NT": (M, N, K), "NN": (M, K, N), "TN": (N, K, M)}[layout]
    dtype = torch.float32 if name == "head" else None

    def operands():
        a = random(rows, depth) if layout[0] == "N" else random(depth, rows).t()
        b = random(depth, columns) if layout[1] == "N" else random(columns, depth).t()
        return a, b

    def make():
        a, b = operands()
        return {
            "ours": lambda: kernels.matmul(a, b, out_dtype=dtype),
            "torch.mm": lambda: torch.mm(a, b).to(dtype or a.dtype),
        }

    def bits():
        a, b = operands()
        few, many = (kernels.matmul(x, b, out_dtype=torch.float32) for x in (a[FEW], a))
        return [few], [many[FEW]]

    size = 2 * (rows * depth + depth * columns) + (4 if dtype else 2) * rows * columns
    return Case(f"matmul {layout}", f"{name} {rows}x{columns}x{depth}", size, 2 * rows * columns * depth, make, bits)


def matmuls(model):
    for name, (N, K) in linears(model).items():
        for layout, M in (*(("NT", M) for M in (*DECODE, TOKENS)), ("NN", TOKENS), ("TN", TOKENS)):
            yield matmul_case(layout, name, M, N, K)
    for M in DECODE:
        yield matmul_case("NT", "head", M, VOCABULARY, MODELS[model][0])


def norm(x, w):
    return F.rms_norm(x, w.shape, w, 1e-6)


def sum_and_norm(x, residual, w):
    s = x + residual
    return norm(s, w), s


def norms(model):
    hidden = MODELS[model][0]
    shape = f"{TOKENS}x{hidden}"
    size = TOKENS * hidden
    weight = random(hidden)

    def ours(x, w):
        return kernels.rms_norm(x, w, 1e-6)

    def ours_of_sum(x, residual, w):
        return kernels.rms_norm(x, w, 1e-6, residual)

    def inputs():
        return random(TOKENS, hidden), weight

    def inputs_of_sum():
        return random(TOKENS, hidden), random(TOKENS, hidden), weight

    yield from rowwise("rms_norm", shape, size, (2, 3), ours, "F.rms_norm", norm, inputs)
    added = "x + r, F.rms_norm"
    yield from rowwise("rms_norm + residual", shape, size, (4, 4), ours_of_sum, added, sum_and_norm, inputs_of_sum)


def swiglus(model):
    mlp = MODELS[model][3]

    def theirs(gate, up):
        return F.silu(gate) * up

    def inputs():
        return random(TOKENS, mlp), random(TOKENS, mlp)

    shape = f"{TOKENS}x{mlp}"
    yield from rowwise("swiglu", shape, TOKENS * mlp, (3, 5), kernels.swiglu, "F.silu(g) * u", theirs, inputs)


def norm_ropes(model):
    _, heads, kv_heads, _ = MODELS[model]
    frequencies = 1e6 ** -(torch.arange(0, D, 2, device=DEVICE) / D)
    cos, sin = kernels.rope_table(frequencies, torch.arange(TOKENS, device=DEVICE))
    wide_cos, wide_sin = (x.repeat(1, 2).bfloat16()[:, None] for x in (cos, sin))

    def ours(q, k, *weights):
        at = FEW if len(q) == 5 else slice(None)  # the same positions for few rows as for many
        return kernels.norm_rope(q, k, cos[at], sin[at], *weights, 1e-6)

    def rotate(x):
        return x * wide_cos + torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1) * wide_sin

    def theirs(q, k, *weights):
        return tuple(rotate(norm(x, w)) for x, w in zip((q, k), weights))

    def inputs():
        return random(TOKENS, heads, D), random(TOKENS, kv_heads, D), random(D), random(D)

    size = TOKENS * (heads + kv_heads) * D
    shape = f"{TOKENS} x ({heads} + {kv_heads}) x {D}"
    yield from rowwise("norm_rope", shape, size, (2, 3), ours, "F.rms_norm, RoPE", theirs, inputs)


def log_probs(model):
    hidden = MODELS[model][0]
    w = random(VOCABULARY, hidden) / hidden**0.5
    targets = torch.randint(VOCABULARY, (HEAD_TOKENS,), device=DEVICE)
    library = "log_softmax(h w^T)"

    def ours(h, w):
        return kernels.token_logprobs(h, w, targets[FEW] if len(h) == 5 else targets)[0]

    def theirs(h, w):
        return torch.log_softmax((h @ w.t()).float(), -1).gather(1, targets[:, None])[:, 0]

    def make():
        h = random(HEAD_TOKENS, hidden)
        return {"ours": lambda: ours(h, w), library: lambda: theirs(h, w)}

    def make_backward():
        return calls_backward({"ours": ours, library: theirs}, (random(HEAD_TOKENS, hidden), w))

    def bits(back):
        def run(h):
            h = h.detach().requires_grad_(back)
            out = ours(h, w)
            return torch.autograd.grad(out, h, torch.ones_like(out))[0] if back else out

        h = random(HEAD_TOKENS, hidden)
        return [run(h[FEW])], [run(h)[FEW]]

    operations = 2 * HEAD_TOKENS * VOCABULARY * hidden
    size = 2 * (HEAD_TOKENS * hidden + VOCABULARY * hidden)
    shape = f"{HEAD_TOKENS}x{VOCABULARY}x{hidden}"
    yield Case("log-probs, eager", shape, size, operations, make, partial(bits, False))
    yield Case("log-probs backward, eager", shape, 2 * size, 2 * operations, make_backward, partial(bits, True))


def library_attention(q, k, v, scale, causal):
    """{backend: SDPA} of those that take the shape; q, k, v (B, heads, n, D)."""
    found = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):

        def call(backend=backend):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)

        try:
            call()
            found["SDPA " + backend.name.split("_")[0].lower()] = call
        except RuntimeError:  # this backend does not take it
            pass
    return found


def packed_attention(model, B, n):
    """B sequences of n tokens, end to end; alone: the last of them."""
    _, heads, kv_heads, _ = MODELS[model]
    plan, alone = (kernels.packed_plan([n] * b, DEVICE) for b in (B, 1))

    def inputs():
        return [random(B * n, h, D) for h in (heads, kv_heads, kv_heads)]

    def make(back):
        xs = inputs()
        batched = [x.view(B, n, -1, D).transpose(1, 2).contiguous() for x in xs]
        if back:
            xs, batched = ([x.requires_grad_() for x in each] for each in (xs, batched))
        calls = {"ours": lambda: kernels.attention(*xs, plan, D**-0.5)}
        calls |= library_attention(*batched, D**-0.5, True)
        if not back:
            return calls

        def call(forward, leaves):
            out = forward()
            grad = torch.randn_like(out)
            return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)

        return {name: call(forward, xs if name == "ours" else batched) for name, forward in calls.items()}

    def bits(back):
        def run(xs, plan):
            leaves = [x.detach().requires_grad_(back) for x in xs]
            out = kernels.attention(*leaves, plan, D**-0.5)
            return torch.autograd.grad(out, leaves, out.detach()) if back else [out]

        xs = inputs()
        return run([x[-n:] for x in xs], alone), [x[-n:] for x in run(xs, plan)]

    shape = f"{B} x {n}, {heads}/{kv_heads} heads"
    operations = 2 * B * n * n * heads * D  # half of 4 n^2: it is causal
    size = 2 * B * n * (2 * heads + 2 * kv_heads) * D
    yield Case("attention", shape, size, operations, partial(make, False), partial(bits, False))
    backward = partial(make, True), partial(bits, True)
    yield Case("attention backward", shape, 2 * size, operations * 5 // 2, *backward)


def decode_attention(model, B, n):
    """One token of each of B sequences, whose n keys lie anywhere in the cache; alone: the last five."""
    _, heads, kv_heads, _ = MODELS[model]
    table = torch.randperm(B * n, device=DEVICE).view(B, n).int()
    ones = torch.ones(B, dtype=torch.long, device=DEVICE)
    requests = torch.arange(B, device=DEVICE)
    all_of_them, five = (kernels.paged_plan(ones[:b], ones[:b] * n, table, requests[-b:]) for b in (B, 5))

    def inputs():
        return random(B, heads, D), random(B * n, kv_heads, D), random(B * n, kv_heads, D)

    def make():
        q, k, v = inputs()
        batched = (t.view(B, n, kv_heads, D).transpose(1, 2).contiguous() for t in (k, v))
        calls = {"ours": lambda: kernels.attention(q, k, v, all_of_them, D**-0.5)}
        return calls | library_attention(q[:, :, None], *batched, D**-0.5, False)

    def bits():
        q, k, v = inputs()
        few = kernels.attention(q[-5:], k, v, five, D**-0.5)
        many = kernels.attention(q, k, v, all_of_them, D**-0.5)
        return [few], [many[-5:]]

    shape = f"{B} x {n} keys, {heads}/{kv_heads} heads"
    return Case("attention decode", shape, 4 * B * n * kv_heads * D, 4 * B * n * heads * D, make, bits)


def embedding_case(model):
    hidden = MODELS[model][0]
    ids = torch.randint(VOCABULARY, (TOKENS,), device=DEVICE)
    options = VOCABULARY, -1, False  # rows, no padding id, no scale by frequency

    def make():
        grad = random(TOKENS, hidden)
        return {
            "ours": lambda: kernels.embedding_backward(grad, ids, *options),
            "torch": lambda: torch.ops.aten.embedding_dense_backward(grad, ids, *options),
        }

    def bits():
        grad = random(TOKENS, hidden)
        low = ids < VOCABULARY // 2
        few, many = (kernels.embedding_backward(grad[x], ids[x], *options) for x in (low, low | ~low))
        return [few[: VOCABULARY // 2]], [many[: VOCABULARY // 2]]

    shape = f"{TOKENS} of {VOCABULARY}x{hidden}"
    return Case("embedding backward, eager", shape, 2 * (TOKENS + VOCABULARY) * hidden, 0, make, bits)


def row_sums_case(model):
    """Of an MLP's gradient, in rows of one fixed length."""
    hidden, _, _, mlp = MODELS[model]
    rows = hidden * mlp * 3 // 65536

    def inputs():
        return torch.randn(rows, 65536, dtype=torch.float64, device=DEVICE)

    def make():
        x = inputs()
        return {"ours": lambda: kernels.row_sums(x), "torch.sum": lambda: x.sum(1)}

    def bits():
        x = inputs()
        return [kernels.row_sums(x[FEW])], [kernels.row_sums(x)[FEW]]

    return Case("row_sums", f"{rows}x65536 float64", 8 * hidden * mlp * 3, 0, make, bits)


def cases(model):
    """The Cases of a model, one after the other: what they hold is freed when the next operator's are made."""
    for operator in (matmuls, norms, swiglus, norm_ropes, log_probs):
        yield from operator(model)
    for pack in PACKS:
        yield from packed_attention(model, *pack)
    for cache in CACHES:
        yield decode_attention(model, *cache)
    yield embedding_case(model)
    yield row_sums_case(model)


# ---- how they are timed


def medians(calls, budget=0.3):
    """Seconds of each call, alternately: [(median, distance of the quartiles / median)]. budget: seconds for all."""
    times, rounds = [[] for _ in calls], 5
    while len(times[0]) < rounds:
        for call, found in zip(calls, times):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        if len(times[0]) == 1:
            rounds = max(5, min(50, int(budget / sum(t[0] for t in times))))
    quartiles = [statistics.quantiles(t, n=4) for t in times]
    return [(q[1], (q[2] - q[0]) / q[1]) for q in quartiles]


def ceilings():
    """(bytes read and written per second by a copy, operations per second of a large bfloat16 torch.mm)."""
    source, x = random(1 << 30), random(8192, 8192)
    target = torch.empty_like(source)
    calls = [lambda: target.copy_(source), lambda: x @ x]
    medians(calls)  # warm
    (copy, _), (product, _) = medians(calls, 1.0)
    return 2 * source.nbytes / copy, 2 * 8192**3 / product


def captured(calls, stream):
    """The calls, one after the other, as one CUDA graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    graph.replay()
    return graph.replay


def seconds_of(case, long, stream):
    """{name: (median of a call, spread)}. long: a call takes so long that its launch does not show."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    sets = [case.make() for _ in range(max(1, min(16, math.ceil(4 * cache / case.size))))]
    times = 1 if long or "eager" in case.name else math.ceil(16 / len(sets))  # or the launch would be part of the time
    calls = {name: [each[name] for each in sets] * times for name in sets[0]}
    if "eager" in case.name:
        runs = {name: lambda each=each: [call() for call in each] for name, each in calls.items()}
    else:
        runs = {"ours": captured(calls.pop("ours"), stream)}
        for name, each in calls.items():
            with contextlib.suppress(RuntimeError):  # a library that cannot be captured
                runs[name] = captured(each, stream)
    medians([*runs.values()], 0.0)  # warm
    count = len(sets) * times
    return {name: (t / count, spread) for name, (t, spread) in zip(runs, medians([*runs.values()]))}


def host_seconds(call):
    """Of a call that does not wait for the card."""
    call()
    torch.cuda.synchronize()
    began = perf_counter()
    for _ in range(HOST_CALLS):
        call()
    seconds = perf_counter() - began
    torch.cuda.synchronize()
    return seconds / HOST_CALLS


def row_of(case, bandwidth, rate, stream):
    """(a case's columns of the table, whether all bits are equal)."""
    few, many = case.bits()
    different = sum(int(differing(a, b)) for a, b in zip(few, many, strict=True))
    long = case.size / bandwidth + case.operations / rate > 1e-4
    found = seconds_of(case, long, stream)
    mine, spread = found.pop("ours")
    roof = max(case.size / bandwidth, case.operations / rate)
    theirs = "none | |"
    if found:
        best = min(found, key=found.get)
        theirs = f"{best} | {found[best][0] * 1e6:.1f} | {found[best][0] / mine:.2f}"
    host = host_seconds(case.make()["ours"])
    times = f"{mine * 1e6:.1f} | {spread:.0%} | {roof * 1e6:.1f} | {roof / mine:.2f} | {host * 1e6:.0f}"
    return f"{times} | {theirs} | {f'{different} DIFFER' if different else 'equal'}", not different


def main():
    if not torch.cuda.is_available():
        print("error: tools/bench_operators.py needs a CUDA device", file=sys.stderr)
        sys.exit(2)
    good = True
    stream = torch.cuda.Stream()  # the one that graphs are captured on: a backward pass runs where its forward ran
    with torch.cuda.stream(stream):
        bandwidth, rate = ceilings()
        print(f"copy {bandwidth / 1e12:.2f} TB/s, torch.mm of 8192^3 in bfloat16 {rate / 1e12:.0f} TFLOP/s\n")
        timed = "us | spread | roof us | roof / us | host us | library | us | library / ours"
        print(f"| Qwen3 | operator | shape | {timed} | bits |")
        print("|---|---|---|---|---|---|---|---|---|---|---|---|")
        for model in MODELS:
            for case in cases(model):
                try:
                    row, equal = row_of(case, bandwidth, rate, stream)
                except Exception as e:  # the other operators still say something
                    row, equal = f"FAILED: {type(e).__name__}: {str(e)[:120]!r}", False
                print(f"| {model} | {case.name} | {case.shape} | {row} |", flush=True)
                good &= equal
    print(f"\n{machine()}")
    sys.exit(not good)


if __name__ == "__main__":
    main()
