"""
What can be known of the Triton operators without a GPU: rules on the code compiled for each of kernels.CARDS, and the
interpreter.

    pytest tests/test_triton.py
    python tests/test_triton.py                    # every kernel for every card: 3 minutes; pytest takes some of them

The rules look for what would make a row's bits depend on its batch or on timing; mutants show that they find it. What
only a GPU can show is not here: that tensor cores add in one order for every tile, and that the code runs.
"""

import itertools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from gpu_bits import WIDTHS, patched, product
from test_kernels import adamw_state, imported
from trials import of_this_commit
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import kernels
from onecurve import float32

HOPPER = 9, 0
OTHERS = [capability for capability in kernels.CARDS if capability != HOPPER]
A_WORD_OR_TWO = 16  # bytes that ptxas puts on the stack to reach a step of occupancy; not on Hopper ..
WITHOUT_A_MERGE = 80  # .. and more in attention over one split, for 128 or 168 registers
# Operations on floats whose results IEEE 754 leaves no choice in ..
FOLLOWED = (
    r"(fma|add|sub|mul|div|sqrt)\.rn\.(f32|f32x2|f64)"
    r"|(add|fma)\.rn\.bf16(x2)?"
    r"|(max|min|neg|abs|selp|mov|setp\.\w+|redux\.sync\.max)(\.NaN)?\.(f32|f64|bf16)"
    r"|cvt\.(rn\.|rzi\.)?([fsu](8|16|32|64)|bf16|bf16x2)\.([fsu](8|16|32|64)|bf16)"
    r"|(ld|st)\..*"
)
# .. and the tensor core's step of k16, of which there is a public model
STEP = (
    r"(wgmma\.mma_async|mma)\.sync\.aligned\.m(64n\d+|16n8)k16\.\S*f32\.bf16\.bf16(\.f32)?"
    r"|tcgen05\.mma\.\S*kind::f16|tcgen05\.(?!mma)\S+"
)
REDUCTION = r'"tt\.(reduce|scan)"\(.*?\).*?<\{axis = (\d+) : i32.*?\}> \(\{(.*?)tt\.\w+\.return.*?\}\)'
REDUCTION += r" : \(tensor<([\dx]+)x(\w+)"
bf16 = torch.bfloat16
f32 = torch.float32


class Compiled:
    """A launch as it would reach the GPU: its name, constants and what the compiler made of it."""

    def __init__(self, fn, args, grid, options, capability):
        self.name = fn.__name__
        self.grid = grid
        self.options = options
        self.capability = capability
        self.card = kernels.CARDS[capability]
        major, minor = capability
        self.target = GPUTarget("cuda", 10 * major + minor, 32)
        backend = make_backend(self.target)
        bind = create_function_from_signature(fn.signature, fn.params, backend)
        bound, specialization, _ = bind(*args, **options)
        parsed, signature, constants, attributes = fn._pack_args(backend, options, bound, specialization, None)
        types = " ".join(map(str, signature.values()))
        self.half = "bf16" in types
        self.tma = "tensordesc" in types
        self.key = (self.name, str(specialization), str(constants), str(options))
        self.source = ASTSource(fn, signature, constants, attributes)
        self.parsed = vars(parsed)

    def compile(self):
        code = triton.compile(self.source, target=self.target, options=self.parsed)
        self.ptx = code.asm["ptx"]
        self.ir = code.asm["ttgir"]
        self.shared = code.metadata.shared
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        path = Path(os.environ.get("TMPDIR", "/tmp")) / f"onecurve-{os.getpid()}.cubin"
        path.write_bytes(code.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
        path.unlink()
        self.registers = int(re.search(r"REG:(\d+)", usage)[1])
        self.stack = int(re.search(r"STACK:(\d+)", usage)[1])
        return self

    def programs_per_sm(self):
        """How many an SM holds: 65,536 registers, given out to threads by 8; 1 KB more of shared memory for each."""
        threads = 32 * self.options["num_warps"]
        eights = -(-self.registers // 8)
        by_registers = 65536 // (eights * 8 * threads)
        by_memory = (self.card.shared + 1) * 1024 // (self.shared + 1024)
        return min(by_registers, by_memory)

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


def launched(work, capability=HOPPER, k=kernels):
    """What `work` of module k launches on such a card, each specialization once, in the place of running it."""
    found = {}

    def run(self, *args, grid, warmup=False, **options):
        launch = Compiled(self, args, grid, options, capability)
        launch = found.setdefault(launch.key, launch)
        launch.grid = max(launch.grid, grid)
        assert max(grid[1:], default=1) <= 65535, launch  # CUDA's bound

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        patch.setattr(k, "INTERPRET", True)  # CPU and meta tensors take the Triton path; nothing is interpreted
        patch.setattr(k, "card", lambda _: k.CARDS[capability])
        work()
    return list(found.values())


def compiled(work, capability=HOPPER, k=kernels):
    return [x.compile() for x in launched(work, capability, k)]


def faults(x):
    """The rules a compiled kernel breaks: above all, that a CPU can follow each of its operations on floats."""
    found = []
    operations = set(re.findall(r"(?:^|[;{])\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)(?=\s)", x.ptx, re.M))
    for name in sorted(operations):
        floats = re.search(r"f(16|32|64)|^(cp\.reduce|red\.async|multimem)", name) and not re.fullmatch(FOLLOWED, name)
        if floats and not (x.half and re.fullmatch(STEP, name)):
            found.append(name)
    for kind, axis, body, shape, of in re.findall(REDUCTION, x.ir, re.S):
        steps = set(re.findall(r'= "?([\w.]+)', body))
        two = steps == {"arith.addf"} and shape.split("x")[int(axis)] == "2"
        if "f" in of and (kind == "scan" or not (two or steps <= {"arith.maxnumf", "arith.minnumf"})):
            found.append(f"a float {kind}")  # whose order is the layout's
    if re.search(r"\b(atom|red)\.\S*add\.\S*(f16|f32|f64)", x.ptx):
        found.append("float atomics")
    products = set(re.findall(r"(%\w+)(?::\d+)? = \S*(?:dot|dot_wait|tc_gen5_mma)\b", x.ir))
    added = re.findall(r"arith\.addf (%\w+)(?:#\d+)?, (%\w+)", x.ir)
    if products & {*sum(added, ())}:
        found.append("a second accumulator")
    if x.name == "triton_matmul" and not x.half:  # a chain is one product and sum after the other
        sizes = [x.options[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")]
        steps = math.prod(sizes) // (32 * x.options["num_warps"])
        fused = x.ptx.count("fma.rn.f32 ") + 2 * x.ptx.count("fma.rn.f32x2 ")
        if fused % steps or not fused:
            found.append("no chain")
    if x.stack > allowed_stack(x):
        found.append(f"spills: {x.stack} bytes of stack")
    if x.shared > x.card.shared * 1024:
        found.append(f"{x.shared} bytes of shared memory")
    if x.tma and not x.card.tma:  # Triton would read its descriptors number by number
        found.append("TMA")
    return found


def allowed_stack(x):
    if x.capability == HOPPER:
        return 0
    return WITHOUT_A_MERGE if x.options.get("ONE") else A_WORD_OR_TWO


def all_faults(found):
    return {repr(x): faults(x) for x in found if faults(x)}


# ---- what is launched


def empty(*shape, dtype=bf16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def leaf(*shape, dtype=bf16):
    return empty(*shape, dtype=dtype).requires_grad_()


def back(out):
    """Launch the gradients."""
    out.backward(torch.empty_like(out))


def multiply(M, N, K, layout="NN", dtype=bf16, out=False, k=kernels):
    """Launch a product of operands that lie row by row (N) or column by column (T); out: go on with float32 sums."""
    a = empty(M, K, dtype=dtype) if layout[0] == "N" else empty(K, M, dtype=dtype).t()
    b = empty(K, N, dtype=dtype) if layout[1] == "N" else empty(N, K, dtype=dtype).t()
    k.matmul(a, b, out=empty(M, N, dtype=f32) if out else None)


def matmuls():
    for M in (1, 20, 64, 100, 512, 4096):  # every bucket of the table
        for N in (1024, 4096, 12288):
            multiply(M, N, 4096, "NT")
    kernels.head_logits(empty(1024, 4096), empty(151936, 4096))
    multiply(4096, 4096, 12288)
    multiply(12288, 4096, 4096, "TN")
    multiply(12288, 4096, 4096, "TN", out=True)
    multiply(151936, 4096, 1, "TN", out=True)  # one token of a chunk
    for rank in (1, 32):  # LoRA's gradients, three numbers for one
        kernels.matmul(empty(16384, 4096).t(), empty(16384, 3 * rank), f32)
    multiply(1024, 151001, 4096, "NT")  # rows of the result that are not aligned
    multiply(4096, 4096, 4097)  # rows of no multiple of 16 bytes: by pointers
    multiply(2048, 4104, 17, out=True)
    multiply(7, 70, 129, "NT")
    multiply(100, 70, 64, "NT", f32)
    multiply(100, 70, 63, "NT", f32)


def attention_of(dtype, D, groups):
    """Both ways in packs of one and of several splits, then prefill, decode, and decode over a table of one split."""
    q = leaf(3005, groups * 8, D, dtype=dtype)
    k = leaf(3005, 8, D, dtype=dtype)
    v = leaf(3005, 8, D, dtype=dtype)
    for lengths in ([5, 1000, 1000, 1000], [5, 3000]):
        back(kernels.attention(q, k, v, kernels.packed_plan(lengths), 0.1))
    pages = torch.zeros(9, 5000, dtype=torch.int32)
    kv_lens = torch.tensor([200, 1003])
    requests = torch.tensor([3, 4])
    for q_lens, table in (([100, 3], pages), ([1, 1], pages), ([1, 1], pages[:, :1024])):
        plan = kernels.paged_plan(torch.tensor(q_lens), kv_lens, table, requests)
        rows = empty(sum(q_lens), groups * 8, D, dtype=dtype)
        kernels.attention(rows, k.detach(), v.detach(), plan, 0.1)


def attentions():
    for groups in (4, 5):
        attention_of(bf16, 128, groups)
    attention_of(bf16, 64, 8)


def norms():
    for C in (128, 1024, 4096):
        back(kernels.rms_norm(leaf(70, C), leaf(C), 1e-6))
    back(kernels.rms_norm(leaf(70, C), empty(C), 1e-6))  # frozen
    kernels.rms_norm(empty(70, C), empty(C), 1e-6, empty(70, C))
    angle = empty(7, 64, dtype=f32)
    for norms in ((leaf(128), leaf(128), 1e-6), ()):
        fused = empty(7, 48, 128)
        engines = fused[:, :32], fused[:, 32:40]
        trainers = empty(7, 32, 128), empty(7, 8, 128)
        for q, k in (engines, trainers):
            turned = kernels.norm_rope(q.requires_grad_(), k.requires_grad_(), angle, angle, *norms)
            torch.autograd.backward(turned, [torch.empty_like(x) for x in turned])
        cache = empty(2, 99, 8, 128)
        places = empty(7, dtype=torch.long)
        kernels.norm_rope_to_cache(*engines, fused[:, 40:], angle, angle, *cache, places, *norms)


def by_number():
    """In float32 for either type."""
    kernels.rope_table(torch.zeros(16), torch.zeros(7, dtype=torch.long))
    numbers = torch.zeros(70, 96)
    weight = torch.nn.Parameter(numbers)
    weight.grad = numbers
    optimizer = kernels.AdamW([dict(params=[weight])])
    optimizer.state[weight] = adamw_state(numbers, numbers)
    optimizer.step()
    kernels.ON_CARDS["exp"](numbers)
    kernels.ON_CARDS["log"](torch.empty(1 << 27, device="meta"))


def elementwise():
    gate = leaf(7, 12288)
    back(kernels.swiglu(gate, gate))
    kernels._float32_mm(empty(70, 4096), empty(4096, 32, dtype=f32))
    by_number()


def mixture_of(E, C, width, k, rows, dtype=bf16):
    """The last number of rows with its gradients."""
    router = leaf(E, C, dtype=dtype)
    gate_up = leaf(E, 2 * width, C, dtype=dtype)
    down = leaf(E, C, width, dtype=dtype)
    for N in rows:
        out = kernels.moe(leaf(N, C, dtype=dtype), router, gate_up, down, k)
    back(out)


def mixtures():
    """Qwen3-30B-A3B's."""
    mixture_of(128, 2048, 768, 8, (1, 256, 4096))


def small_mixtures():
    mixture_of(6, 33, 17, 2, (40,))
    mixture_of(6, 64, 32, 2, (40,), f32)


def merges():
    for N, K, R in ((4096, 4096, 32), (1024, 4096, 1), (12289, 4097, 17)):
        kernels.merge(empty(N, K), empty(R, K, dtype=f32), empty(N, R, dtype=f32), 2.0)


def heads():
    hidden = torch.zeros(7, 64, requires_grad=True)
    weight = torch.zeros(151, 64, requires_grad=True)
    ids = torch.zeros(7, dtype=torch.long)
    for outputs in (1, 2):  # the log-probs without the entropies, and with them
        found = kernels.token_logprobs(hidden, weight, ids)
        sum(x.sum() for x in found[:outputs]).backward()
    logits = empty(7, 151936, dtype=f32)
    kernels.cut(logits, empty(7, 3, dtype=f32))
    kernels.log_softmax(logits, -1, False)
    kernels.log_softmax(logits.to(bf16), -1, False)
    kernels.embedding_backward(torch.zeros(7, 64, dtype=bf16), ids, 90, -1, False)
    kernels.row_sums(empty(7, 4096, dtype=torch.float64))
    kernels.row_sums(empty(7, 4096, dtype=f32), empty(7, dtype=torch.float64), True)
    kernels.draw(logits, *empty(2, 7, dtype=torch.long))
    for x in (torch.zeros(7, 4096, dtype=torch.int32), torch.zeros(7, 1, dtype=torch.int16)):
        kernels.bit_sums([(x, *(torch.zeros(n, dtype=torch.long) for n in x.shape))])


WORKS = matmuls, attentions, norms, elementwise, mixtures, small_mixtures, merges, heads


def waits(x):
    """Whether some of a matmul's programs wait for others, or a tile's first loads for the last tile's store."""
    if x.name != "triton_matmul_tma" or not x.half:
        return False
    one_loop = r"^( +)\S+ = ttng\.warp_group_dot .*^\1ttng\.async_tma_copy.*^\1 +tt\.store"  # of the deeper block
    flattened = re.search(one_loop, x.ir, re.M | re.S)
    adds = "tt.load" in x.ir
    too_many = x.grid[0] > x.programs_per_sm() * x.card.sms
    return too_many or not (flattened or adds)


@pytest.mark.parametrize("work", WORKS, ids=lambda f: f.__name__)
def test_every_kernel_that_is_launched_compiles_for_hopper_by_the_rules(work):
    found = compiled(work)
    assert found
    assert all_faults(found) == {}
    by_tma = {x for x in found if "cp.async.bulk.tensor" in x.ptx}
    products = [x for x in found if x.half and ".dot" in x.ir]
    if work is matmuls:  # the shapes reach every tile of the table, by the copy engine and by pointers
        assert {x.name for x in found} == {"triton_matmul", "triton_matmul_tma"}
        tma = {x for x in found if x.name == "triton_matmul_tma"}
        assert {x.options["BLOCK_N"] for x in tma} == {16, 32, 64, 128, 256}
        assert all("wgmma" in x.ptx for x in found if x.half)
        assert not any(map(waits, found))
        assert by_tma == tma
    if work is norms:  # rows are on their way while others are computed
        assert sum("cp.async.cg" in x.ptx for x in found) == 4
    if work is mixtures:  # the same instruction, however few rows an expert has
        tiles = {x.options["BLOCK_N"] for x in found if x.name == "triton_expert_matmul"}
        assert len(tiles) > 1
        assert all("wgmma" in x.ptx for x in products)
    if work is attentions:  # one instruction for all uses, whatever the tile
        assert all("wgmma" in x.ptx and " mma.sync" not in x.ptx for x in products)
        assert {x.options.get("PARTS") for x in found if x.name == "triton_attention"} == {True, False}
        tiles = {x for x in found if x.options.get("TMA")}
        assert {x.name for x in tiles} == {f"triton_attention{end}" for end in ("", "_dq", "_dkv")}
        assert by_tma == tiles


def some():
    """Of each kernel that follows the card: a shape for each of its tiles, or nearly so."""
    for M in (1, 64, 100, 512, 4096):
        multiply(M, 4096, 4096, "NT")
    multiply(12288, 4096, 4096, "TN", out=True)
    multiply(100, 70, 129)
    starts = empty(18, dtype=torch.long)
    back(kernels.ExpertMatmul.apply(empty(512, 4096), leaf(16, 1024, 4096), starts))
    attention_of(bf16, 128, 4)


@pytest.mark.parametrize("capability", [of_this_commit(OTHERS)], ids=str)
def test_the_kernels_compile_for_the_other_cards_within_the_rules(capability):
    found = compiled(some, capability)
    assert all_faults(found) == {}
    tiles = {(x.options["BLOCK_M"], x.options["BLOCK_N"]) for x in found if x.name.startswith("triton_matmul")}
    assert len(tiles) > 3
    assert len({x.name for x in found}) > 5
    # one instruction for all uses, whatever the tile
    instruction = r"\btcgen05\.mma\.\S+kind::f16\b" if capability == (10, 0) else r"\bmma\.sync\.aligned\.m16n8k16\b"
    products = [x for x in found if "dot" in x.ir or "mma" in x.ir]
    assert len(products) > 10
    assert all(re.search(instruction, x.ptx) for x in products)
    assert not any("wgmma" in x.ptx for x in found)
    if not kernels.CARDS[capability].tma:  # 16 bytes at a time, while others are multiplied; not from odd addresses
        assert sum("cp.async.cg.shared.global" not in x.ptx for x in products) == 1


def test_tiles_beyond_shared_memory_and_tma_on_other_cards_are_caught(tmp_path):
    """What kernels.py would do if its table said that 8.6 has what a Hopper has."""
    for wrong, fault in (
        ("Card(227, 84, False)", "bytes of shared memory"),
        ("Card(99, 84, True)", "TMA"),
    ):
        changed = mutant(tmp_path, ("Card(99, 84, False)", wrong))
        found = compiled(lambda: multiply(1, 4096, 4096, "NT", k=changed), (8, 6), changed)
        assert any(fault in each for x in found for each in faults(x)), wrong


def test_a_pack_without_tokens_launches_nothing(tmp_path):
    """The copy engine takes no empty tensor."""

    def launched_by(k):
        def work():
            back(k.attention(leaf(0, 4, 64), leaf(0, 1, 64), leaf(0, 1, 64), k.packed_plan([0, 0]), 0.1))

        return launched(work)

    assert launched_by(kernels) == []
    assert launched_by(mutant(tmp_path, ('"] + min(N, plan.B)', '"] + plan.B')))
    assert launched_by(mutant(tmp_path, ("sequences = min(N, plan.B)", "sequences = plan.B")))


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
    for change in (
        ("on.sms * 8 // warps", "on.sms * 16 // warps"),
        ("flatten=not ADD", "flatten=False"),
    ):
        changed = mutant(tmp_path, change)
        (x,) = compiled(lambda: multiply(4096, 4096, 4096, k=changed))
        assert faults(x) == []
        assert waits(x)


def test_every_kernel_of_the_file_is_among_those_compiled():
    """A kernel nobody launches here would escape the rules."""
    names = {x.name for work in WORKS for x in launched(work)}
    written = re.findall(r"^@triton\.jit.*\ndef (triton_\w+)\(", Path(kernels.__file__).read_text(), re.M)
    assert len(written) > 15
    assert set(written) == names


# ---- float32 in the order of the loops


def in_float32():
    """Every operator, at shapes with edges."""
    for K, layout in ((64, "NT"), (63, "NT"), (64, "TN")):
        multiply(100, 70, K, layout, f32, out=layout == "TN")
    back(kernels.rms_norm(leaf(70, 98, dtype=f32), leaf(98, dtype=f32), 1e-6))
    angle = empty(7, 16, dtype=f32)
    q = leaf(7, 3, 32, dtype=f32)
    turned = kernels.norm_rope(q, q, angle, angle, leaf(32, dtype=f32), leaf(32, dtype=f32), 1e-6)
    torch.autograd.backward(turned, [torch.empty_like(x) for x in turned])
    gate = leaf(7, 128, dtype=f32)
    back(kernels.swiglu(gate, gate))
    attention_of(f32, 32, 3)
    mixture_of(6, 64, 32, 2, (40,), f32)
    kernels.merge(*(empty(*shape, dtype=f32) for shape in ((70, 64), (4, 64), (70, 4))), 2.0)
    hidden = torch.zeros(7, 64, requires_grad=True)
    weight = torch.zeros(98, 64, requires_grad=True)
    ids = torch.zeros(7, dtype=torch.long)
    logprobs, entropy = kernels.token_logprobs(hidden, weight, ids, 0.7, 0.9)
    (logprobs.sum() + entropy.sum()).backward()
    logprobs = kernels.log_softmax(empty(7, 98, dtype=f32), -1, False)
    kernels.draw(logprobs, *empty(2, 7, dtype=torch.long))
    kernels.embedding_backward(torch.zeros(7, 64), ids, 90, -1, False)
    by_number()


def launched_in_float32(work, capability=HOPPER):
    with patched(FLOAT32=True):
        return launched(work, capability)


def test_in_float32_a_card_computes_by_operations_that_a_cpu_has_too():
    found = [x.compile() for x in launched_in_float32(in_float32)]
    assert all_faults(found) == {}
    written = re.findall(r"^def (triton_\w+)\(", Path(float32.__file__).read_text(), re.M)
    assert len(written) > 9
    assert set(written) <= {x.name for x in found}


# ---- mutants: what the rules are for


def mutant(folder, *changes, of=kernels):
    """kernels.py, or another file, with its text changed, as a module of its own."""
    text = Path(of.__file__).read_text()
    for old, new in changes:
        assert old in text, f"not in {of.__name__}: {old}"
        text = text.replace(old, new)
    count = len(list(folder.iterdir()))
    path = folder / f"mutant{count}.py"
    path.write_text(text)
    module = imported(path)
    module.INTERPRET = True
    return module


SPLIT_K = (
    (
        "    for left in range(K, 0, -BLOCK_K):",
        "    half = acc * 0\n    for left in range(K, 0, -BLOCK_K):",
    ),
    (
        'acc = tl.dot(x, y, acc, input_precision="ieee")\n        a +=',
        "acc, half = half, tl.dot(x, y, acc)\n        a +=",
    ),
    (
        "tl.store(c, acc.to",
        "tl.store(c, (acc + half).to",
    ),
)
REVERSED_K = (("for k in range(0, K, BLOCK_K):", "for k in range(K - BLOCK_K, -1, -BLOCK_K):"),)


def test_gpu_bits_has_both_forms_of_an_operand_and_every_width_of_wgmma():
    operands = empty(64, 4096), empty(4096, 256), empty(64, 256, dtype=f32)
    form = r"wgmma\.mma_async\S+\.m64n(\d+)k16\.\S+\s+\{[^}]*\},\s*(\{|%rd)"
    found = set()
    for (N, warps), computed in itertools.product(WIDTHS, (False, True)):
        (x,) = compiled(lambda: product[(1,)](*operands, 1.0, 4096, N, computed, num_warps=warps))
        for width, of in re.findall(form, x.ptx):
            found.add((int(width), "registers" if of == "{" else "shared"))
    assert found == set(itertools.product((8, 16, 32, 64, 128, 256), ("registers", "shared")))


def test_a_kind_of_device_has_its_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    assert kernels.device_kind("cpu") == "cpu"
    assert kernels.device_kind("cuda") == "cuda 8.6"
    with patched(FLOAT32=True):
        assert kernels.device_kind("cuda") == "cpu"


def test_split_k_is_caught(tmp_path):
    changed = mutant(tmp_path, *SPLIT_K)
    (x,) = compiled(lambda: multiply(100, 70, 129, k=changed))
    assert faults(x) == ["add.f32"]


def of_attention(k):
    q = leaf(30, 4, 64)
    v = leaf(30, 2, 64)
    back(k.attention(q, v, v, k.packed_plan([30]), 0.1))


def of_rows(k):
    x = empty(7, 64)
    back(k.swiglu(leaf(7, 64), x))
    k.rms_norm(x, empty(64), 1e-6)
    k.log_softmax(x, -1, False)


ASSEMBLY = "tl.inline_asm_elementwise('{ ex2.approx.f32 $0, $1; }', '=f,f', [tl.fma(s, c, -top)], tl.float32, True, 1)"
PLUS = "@triton.jit\ndef _plus(a, b):\n    return tl.fma(b, 1.0, a)\n\n\n@triton.jit\ndef _sum(x):"
FOLLOWED_NO_MORE = {  # (what is launched, a change, the fault of some kernel)
    "atomics": (of_attention, ("tl.store(dq + d,", "tl.atomic_add(dq + d,"), "float atomics"),
    "dq by tiles of keys": (
        of_attention,
        ("acc = tl.dot(ds, kt, acc, ", "acc += tl.dot(ds, kt, acc * 0, "),
        "a second accumulator",
    ),
    "a card's exp2": (of_attention, ("p = _exp2(", "p = tl.exp2("), "ex2.approx.ftz.f32"),
    "a card's exp": (of_rows, ("1 + _exp(g", "1 + tl.exp(g"), "ex2.approx.f32"),
    "a card's quotient": (of_rows, ("tl.div_rn(1.0, e)", "1.0 / e"), "div.full.f32"),
    "a card's log": (of_rows, ("_log(den.to(tl.float64))", "tl.log(den.to(tl.float64))"), "rcp.approx.ftz.f64"),
    "a sum by its layout": (of_rows, ("_total(x)[:, None]", "tl.sum(x, 1)[:, None]"), "a float reduce"),
    "another sum by its layout": (of_rows, ("_total(x)[:, None]", "tl.reduce(x, 1, _plus)[:, None]"), "a float reduce"),
    "a card's exp2 by assembly": (of_attention, ("p = _exp2(tl.fma(s, c, -top))", f"p = {ASSEMBLY}"), "ex2.approx.f32"),
    "contraction": (of_rows, ('EXACT = {"enable_fp_fusion": False}', "EXACT = {}"), "mul.f32"),
}


@pytest.mark.in_turn
@pytest.mark.parametrize("name", FOLLOWED_NO_MORE)
def test_what_a_cpu_could_not_follow_is_caught(name, tmp_path):
    work, change, fault = FOLLOWED_NO_MORE[name]
    changed = mutant(tmp_path, change, ("@triton.jit\ndef _sum(x):", PLUS))
    found = [faults(x) for x in compiled(lambda: work(changed))]
    assert fault in sum(found, []), found


def test_tf32_and_its_k8_steps_are_caught(tmp_path):
    changed = mutant(tmp_path, ('input_precision="ieee"', 'input_precision="tf32"'))
    (x,) = compiled(lambda: multiply(100, 70, 64, dtype=f32, k=changed))
    for x.half in (False, True):  # as if it were said to be a bfloat16 kernel
        assert any("k8.f32.tf32" in fault for fault in faults(x))


def test_spills_and_too_much_shared_memory_are_caught(tmp_path):
    changed = mutant(tmp_path)
    changed._matmul_config = lambda *_: (128, 256, 64, 4, 5)
    (x,) = compiled(lambda: multiply(4096, 4096, 4096, k=changed))
    found = " ".join(faults(x))
    assert "spills" in found
    assert "shared memory" in found


# ---- the interpreter, in a process of its own


def test_the_operators_are_right_and_batch_invariant_in_the_interpreter(interpreter):
    output, _ = interpreter.communicate()
    assert interpreter.returncode == 0, output[-6000:]
    assert int(re.search(r"(\d+) passed", output)[1]) > 60


# ---- a machine without a GPU


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
        found = compiled(work, capability)
        wrong = all_faults(found)
        failed |= bool(wrong)
        registers = max(x.registers for x in found)
        shared = max(x.shared for x in found)
        most = f"{registers} registers, {shared} bytes of shared memory"
        print(f"{capability} {work.__name__}: {len(found)} kernels, at most {most}: {wrong or 'all within the rules'}")
    for capability in kernels.CARDS:
        found = [x.compile() for x in launched_in_float32(in_float32, capability)]
        wrong = all_faults(found)
        failed |= bool(wrong)
        print(f"{capability} in float32: {len(found)} kernels: {wrong or 'as a CPU computes'}")
    sys.exit(failed)
