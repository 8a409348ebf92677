"""
The kernels that neither the copy engine nor a tensor core is needed for, as compiled for a Hopper, executed on a CPU by
tests/ptx.py: their bits are those of Triton's interpreter, which knows nothing of a compiler or of threads.

    pytest tests/test_ptx.py
"""

import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import one_digest
import ptx
import pytest
import torch
import triton
from gpu_bits import patched
from pretend.interpreter import install
from test_kernels import all_same, both_ways
from test_triton import HOPPER, Compiled, bf16, f32, mutant
from triton.runtime.jit import JITFunction

import kernels
from onecurve import float32


def numbers(*shape, dtype=f32):
    """Of many sizes; some are zero, some denormal."""
    x = torch.randn(shape) * 2.0 ** torch.randint(-8, 8, shape)
    flat = x.view(-1)
    flat[::7] = 0
    flat[3::11] *= 1e-38
    return x.to(dtype)


def norms(k, dtype):
    """Of widths with a remainder, without, and beyond a block; one weight is frozen."""
    found = []
    for R, C in ((37, 98), (40, 128), (9, 2100), (5, 1024)):
        weight = numbers(C, dtype=dtype)
        operands = numbers(R, C, dtype=dtype), weight
        if C == 1024:
            operands = operands[:1]
        grad = numbers(R, C, dtype=dtype)
        found += both_ways(lambda x, w=weight: k.rms_norm(x, w, 1e-6), operands, grad)
    return found


def turns(k, dtype):
    """Of heads of a strided tensor, as the engine's are, and of a whole one; with norms and without."""
    found = []
    for D in (98, 128):
        angle = torch.randn(7, D // 2)
        fused = numbers(7, 6, D, dtype=dtype)
        operands = numbers(7, 4, D, dtype=dtype), fused[:, 2:4], *numbers(2, D, dtype=dtype)
        grads = [numbers(*x.shape, dtype=dtype) for x in operands[:2]]

        def turn(q, h, *weights):
            return k.norm_rope(q, h, angle.cos(), angle.sin(), *weights, eps=1e-6)

        for n in (2, 4):
            found += both_ways(turn, operands[:n], *grads)
        parts = numbers(7, 8, D, dtype=dtype).split([4, 2, 2], 1)
        cache = torch.zeros(2, 9, 2, D, dtype=dtype)
        to = angle.cos(), angle.sin(), *cache, torch.tensor([8, 0, 3, 5, 1, 7, 2])
        found += k.norm_rope_to_cache(*parts, *to, *operands[2:], 1e-6), cache
    return found


def gates(k, dtype):
    x = numbers(3, 2300, dtype=dtype)
    return both_ways(k.swiglu, (x[:, :1100], x[:, 1200:]), numbers(3, 1100, dtype=dtype))


def sums(k, dtype):
    x = numbers(3, 70).double() * torch.pi
    long = numbers(2, 5000 if dtype == bf16 else 300)  # one is as long as an array of lanes, and more
    out = torch.empty(2, dtype=dtype)
    return k.row_sums(x), k.row_sums(long.double()), k.row_sums(long, out, True)


def logits(V):
    """Some are -inf, of the last row's most; some are equal."""
    z = (9 * torch.randn(3, V)).bfloat16().float()
    z[:, 1::3] = -torch.inf
    z[2, 300:] = -torch.inf
    return z


def heads(k, dtype):
    """Of logits, which are float32 beside either type; and an embedding's gradient."""
    z = logits(4500 if dtype == bf16 else 700)
    t = torch.tensor([0.7])
    ids = torch.tensor([0, 96, 5])
    stats = k.softmax_stats(z, t)
    logprobs, entropy = numbers(2, 3)
    k._on_logits(k.triton_token_logprobs, 0, z, t, stats, ids, logprobs, entropy)
    found = [stats, logprobs, entropy, *(k.log_softmax(x, -1, False) for x in (z, z.to(dtype)))]
    for entropy_grad in (None, numbers(3)):
        dz = torch.empty_like(z, dtype=dtype)
        args = z, t, stats, ids, entropy, numbers(3), entropy_grad, dz
        k.on_elements(k.triton_token_grads, z.shape, 0, *args)
        found.append(dz)
    ids = torch.tensor([[5, 2, 5, 0], [89, 5, 2, 0]])
    return [*found, k.embedding_backward(numbers(2, 4, 1100, dtype=dtype), ids, 90, 0, False)]


def experts(k, dtype):
    z = numbers(40, 37)
    _, chosen = k.Choose.apply(z, 3)
    found = [chosen, *both_ways(lambda z: k.Choose.apply(z, 3)[0], (z,), numbers(40, 3))]
    places = torch.empty_like(chosen)
    starts = chosen.new_zeros(66)
    config = k._lanes(places.numel())
    k.on_rows(k.triton_by_expert, 1, 0, (chosen, starts, places, places.numel()), (65,), config)
    x = numbers(40, 98, dtype=dtype)
    pairs = both_ways(lambda x: k.ToPairs.apply(x, places), (x,), numbers(120, 98, dtype=dtype))
    mixed = both_ways(lambda y, w: k.Combine.apply(y, w, places), (pairs[0], found[1]), x)
    return [*found, places, starts, *pairs, *mixed]


def rest(k, dtype):
    """Of attention and LoRA in bfloat16, what tensor cores have no part in."""
    N, H, D, splits = 5, 4, 128, 3
    x, y = numbers(2, N, H, D, dtype=bf16)
    delta = torch.zeros(N * H + 64)
    k._launch(k.triton_attention_delta, (2,), x, y, delta, N * H, 2, 2, D, ROWS=16, num_warps=4, **k.EXACT)
    ends = torch.tensor([2, 5], dtype=torch.int32)
    kv_lens = torch.tensor([1500, 3000])
    merged = torch.empty(N, H, D, dtype=bf16)
    parts = numbers(N, H, splits, D), numbers(N, H, splits) / 64, torch.rand(N, H, splits)
    sizes = dict(H=H, D=D, SPLIT=1024, num_warps=1)
    k._launch(k.triton_merge_parts, (N * H,), *parts, merged, ends, kv_lens, 0.3, 2, splits, **sizes, **k.EXACT)
    weight = numbers(70, 98)
    thirds = torch.empty(70, 3 * 98, dtype=bf16)
    k.on_elements(k.triton_split, weight.shape, 0, weight.t().contiguous().t(), thirds, 1, 70)
    return delta, merged, thirds


def operators(k, dtype):
    """Every one, in float32 without a tensor core."""
    return [x.detach() for _, *tensors in one_digest.operators(k) for x in tensors]


def others(k, dtype):
    """What `operators` leaves out."""
    ends = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 89, -104, 1e-45])
    x = torch.cat([numbers(2000), ends])
    z = logits(1300)
    rules = torch.tensor([[0.9, 0, 0], [1, 40, 0], [0.95, 30, 0.01]])
    k.cut(z, rules, torch.tensor([0.7]))
    drawn = k.draw(k.log_softmax(z, -1, False), torch.tensor([1, 2, 1 << 40]), torch.arange(3))
    odd = torch.randint(-(1 << 62), 1 << 62, (737,))
    whole = torch.randint(-30000, 30000, (37, 700)).to(torch.int16)
    summed = k.bit_sums([(whole, odd[:37], odd[37:]), (whole[:5], odd[:5], odd[37:])])
    product = k.matmul(numbers(63, 70).t(), numbers(33, 63).t())
    merged = k.merge(numbers(70, 64), numbers(4, 64), numbers(70, 4), 2.0)
    pages = torch.randperm(45, dtype=torch.int32)[None].repeat(2, 1)
    plan = k.paged_plan(torch.tensor([1, 4]), torch.tensor([40, 9]), pages, torch.tensor([1, 0]))
    attended = k.attention(torch.randn(5, 6, 32), *torch.randn(2, 45, 2, 32), plan, 0.2)
    return k.ON_CARDS["exp"](x), k.ON_CARDS["log"](x), z, drawn, summed, product, merged, attended


EITHER = norms, turns, gates, sums, heads, experts
CASES = [(work, bf16) for work in (*EITHER, rest)] + [(work, f32) for work in (*EITHER, operators, others)]
if turn := os.environ.get("ONECURVE_TURN"):  # of a run of all tests: a commit has a third
    CASES = CASES[int(turn) :: 3]
REFUSED = ["kernels.triton_matmul_tma", *(f"kernels.triton_attention{end}" for end in ("", "_dq", "_dkv"))]


def results(work, dtype, k=kernels):
    torch.manual_seed(0)
    with patched(FLOAT32=dtype == f32, SUM_ROWS=8):  # fewer, or a wide norm takes long
        found = work(k, dtype)
    # a NaN may have any bits
    return [x.masked_fill(x.isnan(), torch.nan) if x.is_floating_point() else x for x in found]


compiled = {}


def run(kernel, *args, grid, warmup=False, **options):
    """In the place of a kernel's own: by tests/ptx.py."""
    x = Compiled(kernel, args, grid, options, HOPPER)
    key = kernel, x.key
    if key not in compiled:
        compiled[key] = triton.compile(x.source, target=x.target, options=x.parsed)
    code = compiled[key]
    given = dict(zip(kernel.arg_names, args)) | options
    given = [given[name] for name, kind in x.source.signature.items() if kind != "constexpr"]
    given = [y.data_ptr() if isinstance(y, torch.Tensor) else y for y in given]
    ptx.execute(code.asm["ptx"], grid, given, 32 * code.metadata.num_warps, code.metadata.shared)


@contextmanager
def as_on_a_card():
    with mock.patch.object(JITFunction, "run", run), patched(INTERPRET=True):
        yield


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """{case: its results} of compiled code, and of Triton's interpreter, in a process that defines its kernels anew."""
    path = tmp_path_factory.mktemp("interpreted") / "results"
    root = Path(__file__).parent.parent
    env = os.environ | dict(TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONPATH=str(root))
    process = subprocess.Popen([sys.executable, __file__, path], cwd=root, env=env)
    try:
        with as_on_a_card():
            found = all_results()
        assert process.wait() == 0
    finally:
        process.kill()
    return found, torch.load(path)  # tensors alone, which the process above has written


def all_results():
    return {f"{work.__name__} {dtype}": results(work, dtype) for work, dtype in CASES}


@pytest.mark.parametrize("work,dtype", CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_compiled_code_has_the_interpreters_bits(work, dtype, both):
    ours, interpreted = (of[f"{work.__name__} {dtype}"] for of in both)
    assert all_same(ours, interpreted)
    if work is operators:
        assert all_same(ours, operators(kernels, f32))  # by the loops


def test_every_kernel_without_copy_engine_or_tensor_core_is_among_them(both):
    written = set()
    for module in (kernels, float32):
        text = Path(module.__file__).read_text()
        written |= {f"{module.__name__}.{name}" for name in re.findall(r"^def (triton_\w+)\(", text, re.M)}
    left = written - {f"{kernel.module}.{kernel.__name__}" for kernel, _ in compiled}
    assert left >= {*REFUSED} if turn else left == {*REFUSED}


@pytest.mark.parametrize(
    "work,dtype,change",
    [
        (gates, f32, ('EXACT = {"enable_fp_fusion": False}', "EXACT = {}")),  # products and sums are one rounding
        (rest, bf16, ("x.shape[1] // 2, 2), 2)", "2, x.shape[1] // 2), 1)")),  # halves are added, not neighbours
    ],
)
def test_contraction_and_another_order_are_caught(work, dtype, change, tmp_path):
    with as_on_a_card():
        assert not all_same(results(work, dtype, mutant(tmp_path, change)), results(work, dtype))


def test_a_missing_barrier_is_caught(monkeypatch):
    execute = ptx.execute

    def without(text, *args):
        execute(text.replace("bar.sync", "bar.warp.sync"), *args)

    with as_on_a_card():
        right = results(sums, bf16)
        monkeypatch.setattr(ptx, "execute", without)
        assert not all_same(results(sums, bf16), right)


if __name__ == "__main__":
    install()
    torch.save(all_results(), sys.argv[1])
