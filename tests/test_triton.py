"""
What can be known of the Triton operators without a GPU: rules on the code compiled for each of kernels.CARDS, and the
interpreter.

    pytest tests/test_triton.py
    python tests/test_triton.py                    # every kernel for every card: 3 minutes; pytest takes some of them

The rules look for what would make a row's bits depend on its batch or on timing; mutants show that they find it. What
only a GPU can show is not here: that tensor cores add in one order for every tile, and that the code runs.
"""

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from gpu_bits import WIDTHS, product
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import kernels

HOPPER = 9, 0
OTHERS = [capability for capability in kernels.CARDS if capability != HOPPER]
A_WORD_OR_TWO = 16  # bytes that ptxas puts on the stack to reach a step of occupancy; not on Hopper, where only ..
SHORT_DECODE = 32  # .. decode over one split has some: with four warps it took 182 us there, with eight and none 236
CHAINS = (
    "triton_matmul",
    "triton_matmul_tma",
    "triton_attention_dq",
    "triton_attention_dkv",
    "triton_expert_matmul",
)  # bfloat16: every sum is the tensor core's
bf16, f32 = torch.bfloat16, torch.float32


class Compiled:
    """A launch as it would reach the GPU: its name, constants and what the compiler made of it."""

    def __init__(self, fn, args, grid, options, capability):
        self.capability, self.card = capability, kernels.CARDS[capability]
        self.target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
        backend = make_backend(self.target)
        bound, specialization, _ = create_function_from_signature(fn.signature, fn.params, backend)(*args, **options)
        parsed, signature, constants, attributes = fn._pack_args(backend, options, bound, specialization, None)
        self.name, self.grid, self.options = fn.__name__, grid, options
        self.half = any("bf16" in str(kind) for kind in signature.values())
        self.tma = any("tensordesc" in str(kind) for kind in signature.values())
        self.key = (self.name, str(specialization), str(constants), str(options))
        self.args = fn, ASTSource(fn, signature, constants, attributes), parsed.__dict__

    def compile(self):
        _, source, options = self.args
        code = triton.compile(source, target=self.target, options=options)
        self.ptx, self.ir, self.shared = code.asm["ptx"], code.asm["ttgir"], code.metadata.shared
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        path = Path(os.environ.get("TMPDIR", "/tmp")) / f"onecurve-{os.getpid()}.cubin"
        path.write_bytes(code.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
        path.unlink()
        self.registers, self.stack = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK"))
        return self

    def programs_per_sm(self):
        """How many an SM holds: 65,536 registers, given out to threads by 8; 1 KB more of shared memory for each."""
        threads = 32 * self.options["num_warps"]
        shared = (self.card.shared + 1) * 1024 // (self.shared + 1024)
        return min(65536 // (-(-self.registers // 8) * 8 * threads), shared)

    def __repr__(self):
        return f"{self.name} {self.capability} {self.options}"


@pytest.fixture(scope="module", autouse=True)
def interpreter():
    """The run of tests/triton_interpreted.py, begun before the first test here and read by the last: it is slow."""
    env = os.environ | dict(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "pytest", "-x", "-n0", "-W", "ignore", "tests/triton_interpreted.py"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run = subprocess.Popen(command, cwd=Path(__file__).parent.parent, env=env, **pipes)
    yield run
    run.kill()
    run.wait()


def launches(work, compiled=True, capability=HOPPER, k=kernels):
    """What `work` of module k launches on such a card, each specialization once, in the place of running it."""
    found = {}

    def run(self, *args, grid, warmup=False, **options):
        launch = Compiled(self, args, grid, options, capability)
        launch = found.setdefault(launch.key, launch)
        launch.grid = max(launch.grid, grid)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        patch.setattr(k, "INTERPRET", True)  # CPU and meta tensors take the Triton path; nothing is interpreted
        patch.setattr(k, "card", lambda _: k.CARDS[capability])
        work()
    return [x.compile() if compiled else x for x in found.values()]


def faults(x):
    """The rules a compiled kernel breaks."""
    mma = set(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync\.aligned\.(\S+)", x.ptx))
    found = [
        f"{m}: not a k16 step" for m in mma if x.half and not re.match(r"m(64n\d+|16n8)k16\.\S*f32\.bf16\.bf16", m)
    ]
    if "tf32" in x.ptx or mma and not x.half:
        found.append("TF32")
    if re.search(r"\b(atom|red)\.\S*add\.\S*(f16|f32|f64)", x.ptx):
        found.append("float atomics")
    chain = x.name in CHAINS or x.options.get("PARTS")
    if x.half and chain and re.search(r"\badd\.\S*f32\b", x.ptx):
        found.append("a second accumulator")
    # the attention's and combine's fused steps are written; triton_softmax_stats' and triton_cut's are the logarithm's
    fused = "triton_matmul", "triton_expert_matmul", "triton_attention", "triton_lora", "triton_combine"
    fused += "triton_softmax_stats", "triton_cut"
    if not x.name.startswith(fused) and re.search(r"\bfma\.\S*f32\b", x.ptx):
        found.append("contraction")
    short_decode = x.name == "triton_attention" and x.options["ROWS"] == kernels.DECODE_ROWS and not x.options["PARTS"]
    if x.stack > (short_decode * SHORT_DECODE if x.capability == HOPPER else A_WORD_OR_TWO):
        found.append(f"spills: {x.stack} bytes of stack")
    if x.shared > x.card.shared * 1024:
        found.append(f"{x.shared} bytes of shared memory")
    if x.tma and not x.card.tma:  # Triton would read its descriptors number by number
        found.append("TMA")
    return found


def empty(*shape, dtype=bf16, device="meta"):
    return torch.empty(*shape, dtype=dtype, device=device)


def matmuls(k=kernels):
    for M in (1, 20, 64, 100, 512, 4096):  # every bucket of the table
        for N in (1024, 4096, 12288):
            k.matmul(empty(M, 4096), empty(N, 4096).t())
    k.head_logits(empty(1024, 4096), empty(151936, 4096))
    k.matmul(empty(4096, 12288), empty(12288, 4096))
    k.matmul(empty(4096, 12288).t(), empty(4096, 4096))
    k.matmul(empty(4096, 12288).t(), empty(4096, 4096), out=empty(12288, 4096, dtype=f32))
    k.matmul(empty(1, 151936).t(), empty(1, 4096), out=empty(151936, 4096, dtype=f32))  # one token of a chunk
    for rank in (1, 32):  # LoRA's gradients, three numbers for one
        k.matmul(empty(16384, 4096).t(), empty(16384, 3 * rank), f32)
    k.matmul(empty(1024, 4096), empty(151001, 4096).t())  # rows of the result that are not aligned
    k.matmul(empty(4096, 4097), empty(4097, 4096))  # rows of no multiple of 16 bytes: by pointers
    k.matmul(empty(2048, 17), empty(17, 4104), out=empty(2048, 4104, dtype=f32))
    k.matmul(empty(7, 129), empty(70, 129).t())
    k.matmul(empty(100, 64, dtype=f32), empty(70, 64, dtype=f32).t())
    k.matmul(empty(100, 63, dtype=f32), empty(70, 63, dtype=f32).t())


def attentions(cases=((bf16, 128, 4), (bf16, 128, 5), (bf16, 64, 8), (f32, 64, 2), (f32, 128, 4))):
    pages, requests = torch.zeros(9, 5000, dtype=torch.int32), torch.tensor([3, 4])
    for dtype, D, groups in cases:
        q, k, v = (empty(3005, heads * 8, D, dtype=dtype).requires_grad_() for heads in (groups, 1, 1))
        out = kernels.attention(q, k, v, kernels.packed_plan([5, 3000]), 0.1)
        out.backward(torch.empty_like(out))
        for q_lens, table in (([100, 3], pages), ([1, 1], pages), ([1, 1], pages[:, :1024])):
            plan = kernels.paged_plan(torch.tensor(q_lens), torch.tensor([200, 1003]), table, requests)
            kernels.attention(empty(sum(q_lens), groups * 8, D, dtype=dtype), k.detach(), v.detach(), plan, 0.1)


def norms():
    for C in (128, 1024, 4096):
        x, w = empty(70, C).requires_grad_(), empty(C).requires_grad_()
        kernels.rms_norm(x, w, 1e-6).backward(empty(70, C))
    angle = empty(7, 64, dtype=f32)
    for norms in ((empty(128).requires_grad_(), empty(128).requires_grad_(), 1e-6), ()):
        qkv = empty(7, 48, 128)
        for q, k in (
            (qkv[:, :32], qkv[:, 32:40]),
            (empty(7, 32, 128), empty(7, 8, 128)),
        ):  # the engine's, the trainer's
            turned = kernels.norm_rope(q.requires_grad_(), k.requires_grad_(), angle, angle, *norms)
            torch.autograd.backward(turned, [torch.empty_like(x) for x in turned])


def elementwise():
    gate = empty(7, 12288).requires_grad_()
    kernels.swiglu(gate, gate).backward(empty(7, 12288))


def mixtures(dtype=bf16, sizes=(128, 2048, 768), k=8, rows=(1, 256, 4096)):
    """Qwen3-30B-A3B's; the last number of rows with its gradients."""
    E, C, width = sizes
    weights = [empty(*shape, dtype=dtype).requires_grad_() for shape in ((E, C), (E, 2 * width, C), (E, C, width))]
    for N in rows:
        x = empty(N, C, dtype=dtype).requires_grad_()
        out = kernels.moe(x, *weights, k)
    out.backward(torch.empty_like(out))


def small_mixtures():
    mixtures(sizes=(6, 33, 17), k=2, rows=(40,))
    mixtures(f32, (6, 64, 32), 2, (40,))


def merges():
    for N, K, R in ((4096, 4096, 32), (1024, 4096, 1), (12289, 4097, 17)):
        kernels.merge(empty(N, K), empty(R, K, dtype=f32), empty(N, R, dtype=f32), 2.0)


def heads():
    hidden, weight = torch.zeros(7, 64, requires_grad=True), torch.zeros(151, 64, requires_grad=True)
    for outputs in (1, 2):  # the log-probs without the entropies, and with them
        found = kernels.token_logprobs(hidden, weight, torch.zeros(7, dtype=torch.long))
        sum(x.sum() for x in found[:outputs]).backward()
    kernels.cut(empty(7, 151936, dtype=f32), empty(7, 3, dtype=f32))
    kernels.log_softmax(empty(7, 151936), -1, False)
    kernels.log_softmax(empty(7, 151936, dtype=f32), -1, False)
    kernels.embedding_backward(torch.zeros(7, 64, dtype=bf16), torch.zeros(7, dtype=torch.long), 90, -1, False)
    kernels.row_sums(empty(7, 4096, dtype=torch.float64))
    kernels.draw(empty(7, 151936, dtype=f32), *empty(2, 7, dtype=torch.long))
    for x in (empty(7, 4096, dtype=torch.int32), empty(7, 1, dtype=torch.int16)):
        kernels.bit_sum(x, *(empty(n, dtype=torch.long) for n in x.shape))


def waits(x):
    """Whether some of a matmul's programs wait for others, or a tile's first loads for the last tile's store."""
    if x.name != "triton_matmul_tma" or not x.half:
        return False
    one_loop = r"^( +)\S+ = ttng\.warp_group_dot .*^\1ttng\.async_tma_copy.*^\1 +tt\.store"  # of the deeper block
    flattened, add = re.search(one_loop, x.ir, re.M | re.S), "tt.load" in x.ir
    return x.grid[0] > x.programs_per_sm() * x.card.sms or not (flattened or add)


WORKS = matmuls, attentions, norms, elementwise, mixtures, small_mixtures, merges, heads


@pytest.mark.parametrize("work", WORKS, ids=lambda f: f.__name__)
def test_every_kernel_that_is_launched_compiles_for_hopper_within_the_rules(work):
    found = launches(work)
    assert found and {repr(x): faults(x) for x in found if faults(x)} == {}
    if work is matmuls:  # the shapes reach every tile of the table, by the copy engine and by pointers
        assert {x.name for x in found} == {"triton_matmul", "triton_matmul_tma"}
        assert {x.options["BLOCK_N"] for x in found if x.name == "triton_matmul_tma"} == {16, 32, 64, 128, 256}
        assert all("wgmma" in x.ptx for x in found if x.half)
        assert not any(map(waits, found))
        assert all(("cp.async.bulk.tensor" in x.ptx) == (x.name == "triton_matmul_tma") for x in found)
    if work is mixtures:  # the same instruction, however few rows an expert has
        tiles = {x.options["BLOCK_N"] for x in found if x.name == "triton_expert_matmul"}
        assert len(tiles) > 1 and all("wgmma" in x.ptx for x in found if x.half and ".dot" in x.ir)
    if work is attentions:  # one instruction for all uses, whatever the tile
        assert all("wgmma" in x.ptx and " mma.sync" not in x.ptx for x in found if x.half and ".dot" in x.ir)
        assert {x.options.get("PARTS") for x in found if x.name == "triton_attention"} == {True, False}
        packed = [x for x in found if x.options.get("PAGED") is False or x.name == "triton_attention_dq"]
        assert packed and all(("cp.async.bulk.tensor" in x.ptx) == (x in packed) for x in found)


def some(k=kernels):
    """Of each kernel that follows the card: a shape for each of its tiles, or nearly so."""
    for M, N in ((1, 4096), (64, 4096), (100, 4096), (512, 4096), (4096, 4096)):
        k.matmul(empty(M, 4096), empty(N, 4096).t())
    k.matmul(empty(4096, 12288).t(), empty(4096, 4096), out=empty(12288, 4096, dtype=f32))
    k.matmul(empty(100, 129), empty(129, 70))
    x, weight, starts = empty(512, 4096), empty(16, 1024, 4096).requires_grad_(), empty(18, dtype=torch.long)
    k.ExpertMatmul.apply(x, weight, starts).backward(empty(512, 1024))
    attentions(((bf16, 128, 4),))


@pytest.mark.parametrize("capability", OTHERS, ids=str)
def test_the_kernels_compile_for_the_other_cards_within_the_rules(capability):
    found = launches(some, capability=capability)
    assert {repr(x): faults(x) for x in found if faults(x)} == {}
    tiles = {(x.options["BLOCK_M"], x.options["BLOCK_N"]) for x in found if x.name.startswith("triton_matmul")}
    assert len(tiles) > 3 and len({x.name for x in found}) > 5
    # one instruction for all uses, whatever the tile
    instruction = r"\btcgen05\.mma\.\S+kind::f16\b" if capability == (10, 0) else r"\bmma\.sync\.aligned\.m16n8k16\b"
    products = [x for x in found if "dot" in x.ir or "mma" in x.ir]
    assert len(products) > 10 and all(re.search(instruction, x.ptx) for x in products)
    assert {"wgmma" in x.ptx for x in found} == {False}
    if not kernels.CARDS[capability].tma:  # 16 bytes at a time, while others are multiplied; not from odd addresses
        assert sum("cp.async.cg.shared.global" not in x.ptx for x in products) == 1


def test_a_tile_beyond_a_cards_shared_memory_and_tma_where_there_is_none_are_caught(tmp_path):
    """What kernels.py would do if its table said that 8.6 has what a Hopper has."""
    for wrong, fault in (("Card(227, 84, False)", "bytes of shared memory"), ("Card(99, 84, True)", "TMA")):
        changed = mutant(tmp_path, ("Card(99, 84, False)", wrong))
        found = launches(lambda: changed.matmul(empty(1, 4096), empty(4096, 4096).t()), capability=(8, 6), k=changed)
        assert any(fault in each for x in found for each in faults(x)), wrong


def test_a_pack_without_tokens_launches_nothing(tmp_path):
    """The copy engine takes no empty tensor."""

    def work(k):
        q, key, v = (empty(0, heads, 64).requires_grad_() for heads in (4, 1, 1))
        out = k.attention(q, key, v, k.packed_plan([0, 0]), 0.1)
        out.backward(torch.empty_like(out))

    assert launches(lambda: work(kernels), compiled=False) == []
    for change in (('"] + min(N, plan.B)', '"] + plan.B'), ("sequences = min(N, plan.B)", "sequences = plan.B")):
        changed = mutant(tmp_path, change)
        assert launches(lambda: work(changed), compiled=False)


# Measured on an H200 (docs/results.md): for weights of Qwen3-8B (N, K) and 16, 32, 64, 128, 256, 512 rows the tile of
# kernels.TILES, with its step of K and its stages, that takes at most 1.055 times as long as the fastest tried.
FASTEST = {
    (6144, 4096): "16x64x256,4 32x64x128,8 64x64x128,6 64x128x64,8 128x128x64,5 128x256x64,3",
    (4096, 4096): "16x64x256,4 32x64x128,8 64x64x128,6 64x64x128,6 64x128x64,8 128x128x64,5",
    (24576, 4096): "16x64x128,4 32x64x128,4 64x128x64,4 128x256x64,3 128x128x64,5 128x256x64,3",
    (4096, 12288): "16x64x256,4 32x64x128,8 64x64x128,6 64x64x128,6 64x128x64,8 128x128x64,5",
}


def slow_choices(k):
    """The products of FASTEST for which another tile is taken."""
    found = []
    for (N, K), fastest in FASTEST.items():
        for M, tile in zip((16, 32, 64, 128, 256, 512), fastest.split()):
            m, n, step, _, stages = k._matmul_config(M, N, bf16, True, True, k.CARDS[HOPPER])
            if f"{m}x{n}x{step},{stages}" != tile:
                found.append((M, N, K))
    return found


def test_a_matmul_takes_the_tile_that_was_the_fastest_on_a_card(tmp_path):
    assert slow_choices(kernels) == []
    for change in (
        ("// sms) * work", "/ sms) * work"),  # parts of a wave, as if the last were full
        ("= min(table, key", "= max(table, key"),
        ("1.85 * tiles", "0 * tiles"),  # as if only the SMs took time
        ("loads = block_m + block_n", "loads = min(block_m, M) + min(block_n, N)"),
        ("block_k *= 2\n", "stages *= 2\n"),
    ):
        assert slow_choices(mutant(tmp_path, change)), change


def test_programs_that_wait_for_others_or_for_a_store_are_caught(tmp_path):
    for change in (("on.sms * 8 // warps", "on.sms * 16 // warps"), ("flatten=not ADD", "flatten=False")):
        changed = mutant(tmp_path, change)
        (x,) = launches(lambda: changed.matmul(empty(4096, 4096), empty(4096, 4096)))
        assert faults(x) == [] and waits(x)


def test_every_kernel_of_the_file_is_among_those_compiled():
    """A kernel nobody launches here would escape the rules."""
    names = {x.name for work in WORKS for x in launches(work, compiled=False)}
    written = re.findall(r"^@triton\.jit.*\ndef (triton_\w+)\(", Path(kernels.__file__).read_text(), re.M)
    assert len(written) > 15 and set(written) == names


def codes_of_rows(k, C):
    """The kernels that norms and log-probs of rows of C numbers launch: of any number of rows, at any place."""

    def work(M, first):
        x = torch.zeros(M * C + 64, dtype=bf16)[first : first + M * C].view(M, C)
        k.rms_norm(x if M % 2 else x[None], torch.zeros(C, dtype=bf16), 1e-6)  # a model's (1, N, C) is the same
        k.rms_norm(x, torch.zeros(C, dtype=bf16), 1e-6, x)  # the engine's, with a residual
        k.log_softmax(x, -1, False)

    found = {}
    for M, first in ((1, 0), (2, 0), (16, 0), (17, 0), (700, 0), (1, 1), (16, 8), (33, 3)):
        for x in launches(lambda: work(M, first), compiled=False):
            found.setdefault(x.name, set()).add(x.key)
    return found


def test_a_row_has_the_same_code_in_every_batch_at_every_address_and_with_a_residual(tmp_path):
    """`tl.sum` adds as its layout says, which Triton may take from a number of rows or a pointer's alignment."""
    for C in (128, 4096, 98):
        found = codes_of_rows(kernels, C)
        assert set(found) == {"triton_norm_rope", "triton_softmax_stats", "triton_log_softmax"}
        assert {name: len(codes) for name, codes in found.items()} == dict.fromkeys(found, 1)
    changed = mutant(tmp_path, ("return x if x.data_ptr() % 16 == 0 else x.clone()", "return x"))
    assert all(len(codes) > 1 for codes in codes_of_rows(changed, 98).values())
    changed = mutant(tmp_path, ('@triton.jit(do_not_specialize=["R"])', "@triton.jit"))
    assert len(codes_of_rows(changed, 98)["triton_norm_rope"]) > 1


def test_queries_and_keys_have_one_kernel_for_every_batch_and_in_a_fused_qkv():
    def turn(N, HQ, HK, fused):
        qkv, angle, w = empty(N, HQ + 2 * HK, 64), empty(N, 32, dtype=f32), empty(64)
        q, k = qkv[:, :HQ], qkv[:, HQ : HQ + HK]
        kernels.norm_rope(*((q, k) if fused else (empty(*q.shape), empty(*k.shape))), angle, angle, w, w, 1e-6)

    def kernels_of(HQ):
        return {x.key for N in (1, 2, 16, 33) for f in (0, 1) for x in launches(lambda: turn(N, HQ, 1, f), False)}

    four, five = kernels_of(4), kernels_of(5)  # of the queries, and of the keys
    assert len(four) == len(five) == 2 and len(four & five) == 1


@triton.jit
def log_float64(x, y):
    i = tl.arange(0, 128)  # one for each thread
    tl.store(y + i, tl.log(tl.load(x + i)))


def test_the_draws_logarithm_is_compiled_as_torch_compile_does():
    """Whose option is Triton's own default: with EXACT, a step of each of the two would not be fused."""
    x = empty(128, dtype=torch.float64)
    (log,) = launches(lambda: log_float64[(1,)](x, x))
    draw = next(x for x in launches(heads, compiled=False) if x.name == "triton_draw").compile()
    steps, columns = log.ptx.count("fma.rn.f64"), draw.options["BLOCK"] // (32 * draw.options["num_warps"])
    assert steps > 10 and draw.ptx.count("fma.rn.f64") == 2 * columns * steps


# ---- mutants: what the rules are for


def mutant(folder, *changes):
    """kernels.py with its text changed, as a module of its own."""
    text = Path(kernels.__file__).read_text()
    for old, new in changes:
        assert text.count(old) >= 1, f"not in kernels.py: {old}"
        text = text.replace(old, new)
    path = Path(folder) / f"mutant{len(list(Path(folder).iterdir()))}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.INTERPRET = True
    return module


SPLIT_K = (
    ("    for left in range(K, 0, -BLOCK_K):", "    half = acc * 0\n    for left in range(K, 0, -BLOCK_K):"),
    (
        'acc = tl.dot(x, y, acc, input_precision="ieee")\n        a +=',
        "acc, half = half, tl.dot(x, y, acc)\n        a +=",
    ),
    ("tl.store(c, acc.to", "tl.store(c, (acc + half).to"),
)
REVERSED_K = (("for k in range(0, K, BLOCK_K):", "for k in range(K - BLOCK_K, -1, -BLOCK_K):"),)


def test_gpu_bits_has_both_forms_of_an_operand_and_every_width_of_the_instruction():
    a, b, c = empty(64, 4096), empty(4096, 256), empty(64, 256, dtype=f32)
    found = set()
    for (N, warps), computed in itertools.product(WIDTHS, (False, True)):
        args = a, b, c, 1.0, 4096, N, computed
        (x,) = launches(lambda: product[(1,)](*args, num_warps=warps))
        form = r"wgmma\.mma_async\S+\.m64n(\d+)k16\.\S+\s+\{[^}]*\},\s*(\{|%rd)"
        found |= {(int(width), "registers" if of == "{" else "shared") for width, of in re.findall(form, x.ptx)}
    assert found == set(itertools.product((8, 16, 32, 64, 128, 256), ("registers", "shared")))


def test_a_kind_of_device_has_its_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    assert (kernels.device_kind("cpu"), kernels.device_kind("cuda")) == ("cpu", "cuda 8.6")


def test_split_k_is_caught(tmp_path):
    changed = mutant(tmp_path, *SPLIT_K)
    (x,) = launches(lambda: changed.matmul(empty(100, 129), empty(129, 70)))
    assert faults(x) == ["a second accumulator"]


def test_atomics_in_a_gradient_are_caught(tmp_path):
    changed = mutant(tmp_path, ("tl.store(dq + row[:, None] * D + d,", "tl.atomic_add(dq + row[:, None] * D + d,"))
    q, k = empty(30, 4, 64).requires_grad_(), empty(30, 2, 64).requires_grad_()

    def work():
        out = changed.attention(q, k, k, changed.packed_plan([30]), 0.1)
        out.backward(empty(30, 4, 64))

    assert [faults(x) for x in launches(work) if x.name == "triton_attention_dq"] == [["float atomics"]]


def test_tf32_and_its_k8_steps_are_caught(tmp_path):
    changed = mutant(tmp_path, ('input_precision="ieee"', 'input_precision="tf32"'))
    (x,) = launches(lambda: changed.matmul(empty(100, 64, dtype=f32), empty(64, 70, dtype=f32)))
    assert faults(x) == ["TF32"]
    x.half = True  # as if it were said to be a bfloat16 kernel
    assert any("not a k16 step" in fault for fault in faults(x))


def test_contraction_spills_and_too_much_shared_memory_are_caught(tmp_path):
    changed = mutant(tmp_path, ('EXACT = {"enable_fp_fusion": False}', "EXACT = {}"))
    (x,) = launches(lambda: changed.swiglu(empty(7, 64).requires_grad_(), empty(7, 64)).backward(empty(7, 64)))[1:]
    assert faults(x) == ["contraction"]
    changed._matmul_config = lambda *_: (128, 256, 64, 4, 5)
    (x,) = launches(lambda: changed.matmul(empty(4096, 4096), empty(4096, 4096)))
    found = " ".join(faults(x))
    assert "spills" in found and "shared memory" in found


# ---- the interpreter, in a process of its own


def test_the_operators_are_right_and_batch_invariant_in_the_interpreter(interpreter):
    output, _ = interpreter.communicate()
    assert interpreter.returncode == 0, output[-6000:]
    assert int(re.search(r"(\d+) passed", output)[1]) > 60


# ---- the CPU's path of the same functions, and a machine without a GPU


def test_on_a_cpu_a_row_of_the_new_operators_does_not_see_its_batch():
    torch.manual_seed(0)
    x, residual, w, up = torch.randn(67, 4, 64), torch.randn(67, 4, 64), torch.randn(64), torch.randn(67, 4, 64)
    cos, sin = kernels.rope_table(1.0 / 10000 ** (torch.arange(0, 64, 2) / 64), torch.arange(67))

    def run(rows):
        a, b = kernels.norm_rope(x[rows], up[rows], cos[rows], sin[rows])
        a = torch.cat((a, *kernels.norm_rope(x[rows], up[rows], cos[rows], sin[rows], w, w + 1, 1e-6)), 1)
        normed = kernels.rms_norm(x[rows], w, 1e-6, residual[rows])
        return (*normed, kernels.rms_norm(x[rows], w, 1e-6), a, b, kernels.swiglu(x[rows], up[rows]))

    whole = run(slice(0, 67))
    assert all(
        torch.equal(a, b[i : i + n]) for i, n in ((0, 1), (3, 5), (50, 17)) for a, b in zip(run(slice(i, i + n)), whole)
    )
    angle = torch.arange(67.0).double()[:, None] / 10000 ** (torch.arange(0, 64, 2).double() / 64)
    z = torch.view_as_complex(torch.stack((x[..., :32], x[..., 32:]), -1).double()) * torch.exp(1j * angle)[:, None]
    assert torch.allclose(whole[3][:, :4].double(), torch.cat((z.real, z.imag), -1), atol=1e-4)


def test_on_a_cpu_the_sum_of_a_row_follows_its_length_alone_and_torchs_does_not():
    torch.manual_seed(0)
    x = torch.randn(64, 100_000, dtype=torch.float64)
    whole = kernels.row_sums(x)
    assert torch.allclose(whole, x.sum(1), atol=1e-9)
    assert all(torch.equal(kernels.row_sums(x[i : i + n]), whole[i : i + n]) for i, n in ((0, 1), (5, 7), (40, 24)))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # which share one row, but not one of many rows
    try:
        assert any(not torch.equal(x[i : i + 1].sum(1), x.sum(1)[i : i + 1]) for i in range(64))
        assert torch.equal(kernels.row_sums(x[:1]), whole[:1])
    finally:
        torch.set_num_threads(threads)
    assert kernels.row_sums(x[:, :0]).tolist() == [0] * 64
    with pytest.raises(ValueError, match="dtype=torch.float32"):
        kernels.row_sums(x.float())


def test_on_a_cpu_swiglu_has_the_gradient_of_silu_even_where_exp_overflows():
    gate = torch.tensor([-200.0, -3, 0, 5, 200], requires_grad=True)
    up = torch.randn(5, requires_grad=True)
    ours = torch.autograd.grad(kernels.swiglu(gate, up).sum(), (gate, up))
    theirs = torch.autograd.grad((torch.nn.functional.silu(gate.double()) * up.double()).sum(), (gate, up))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs))


def test_the_switch_registers_the_gpus_operators_too_and_gives_them_back():
    def registered(name):
        return bool(re.search(r"^CUDA: .*kernels\.py", torch._C._dispatch_dump(f"aten::{name}"), re.M))

    names = ["mm", "addmm", "_log_softmax", "_softmax", "embedding_dense_backward"]
    names += ["sum", "sum.dim_IntList", "mean", "mean.dim"]
    assert not any(map(registered, names))
    kernels.enable_batch_invariant()
    try:
        assert all(map(registered, names))
    finally:
        kernels.disable_batch_invariant()
    assert not any(map(registered, names))


def test_a_device_the_operators_do_not_know_is_refused():
    with pytest.raises(ValueError, match="device=meta"):
        kernels.rms_norm(empty(2, 64), empty(64), 1e-6)


if __name__ == "__main__":
    failed = False
    for capability, work in itertools.product(kernels.CARDS, WORKS):
        found = launches(work, capability=capability)
        wrong = {repr(x): faults(x) for x in found if faults(x)}
        failed |= bool(wrong)
        most = f"{max(x.registers for x in found)} registers, {max(x.shared for x in found)} bytes of shared memory"
        print(f"{capability} {work.__name__}: {len(found)} kernels, at most {most}: {wrong or 'all within the rules'}")
    sys.exit(failed)
