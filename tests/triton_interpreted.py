"""
The Triton operators in Triton's interpreter, on a CPU: indexing, masks, paging, gradients and the order of addition.

    TRITON_INTERPRET=1 pytest tests/triton_interpreted.py

Run by test_triton.py in a process of its own, since the switch is read when the kernels are defined. The interpreter's
own `tl.dot` adds by numpy, in an order that depends on the shape; pretend/interpreter.py models the tensor core's.
"""

import functools
import itertools
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import gpu_bits
import one_digest
import pytest
import torch
import torch.nn.functional as F
from gpu_bits import patched
from pretend.graph import Recorder
from pretend.interpreter import add_as_tensor_core, install, tensor_core
from test_kernels import (
    Sequences,
    all_close,
    all_same,
    attend,
    attend64,
    attend_with_shared_rows,
    both_ways,
    close,
    cuts_are_right,
    differing,
    doubles,
    draws,
    gradients,
    leaves,
    matmul64,
    mixture_in_parts,
    norm_rope,
    normal,
    qkv,
    reference,
    rope,
    rows_of_a_mixture_are_alone,
    same,
    textbook_logprobs,
    textbook_mixture,
    textbook_norm,
    textbook_rope,
    textbook_swiglu,
    ties,
)
from test_trainer import DEFAULTS, make_samples
from test_triton import REVERSED_K, SPLIT_K, bf16, mutant
from triton.runtime import interpreter

import kernels
import train_grpo as train
from onecurve import float32
from onecurve.cpu import loops
from onecurve.models import dense
from onecurve.models.dense import check_model
from onecurve.models.folders import make_scratch_model
from sync import LeafSum, Ranks

assert kernels.INTERPRET, "TRITON_INTERPRET=1 is needed"


install()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("part", gpu_bits.PARTS, ids=lambda part: part.__name__)
def test_what_a_card_is_to_be_asked_finds_nothing_here_and_its_controls_are_caught(part):
    for row in part(gpu_bits.sizes(quick=True)):
        line, well = row.finish()
        assert well, line


# ---- matmul


def operand(rows, columns, layout, dtype=torch.float32):
    """A random matrix that lies row by row (N), or column by column (T)."""
    if layout == "N":
        return torch.randn(rows, columns).to(dtype)
    return torch.randn(columns, rows).to(dtype).t()


@pytest.mark.parametrize(
    "M,N,K",
    [
        (1, 1, 1),
        (1, 70, 40),
        (5, 130, 16),
        (70, 33, 100),
        (65, 66, 64),
        (3, 0, 5),
        (7, 9, 0),
    ],
)
@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_matmul_in_every_layout_is_the_cpus_chain(M, N, K, layout):
    a = operand(M, K, layout[0])
    b = operand(K, N, layout[1])
    assert same(kernels.matmul(a, b), by_loops(lambda: kernels.matmul(a, b)))


def test_matmul_takes_odd_strides():
    x = torch.randn(40, 99)[::2, 1::3]
    y = torch.randn(66, 50)[::2]
    assert same(kernels.matmul(x, y), by_loops(lambda: kernels.matmul(x, y)))


def rows_that_see_tiles():
    """The rows of one product that differ under some tile shape, by pointers or by the copy engine, swapped or not."""
    x, w = normal((70, 128), (96, 128))
    whole = kernels.matmul(x, w.t())
    one_sm = kernels.CARDS[9, 0]._replace(sms=1)  # a program takes many tiles
    paths = kernels._for_tma, lambda _: None
    found = []
    places = (0, 70), (9, 1), (20, 33)
    for config in (
        (64, 16, 128, 4, 3),
        (64, 64, 16, 4, 3),
        (128, 32, 64, 4, 3),
        (16, 128, 32, 4, 3),
    ):
        for path in paths:
            with patched(_matmul_config=lambda *_: config, _for_tma=path, card=lambda _: one_sm):
                found += differing(lambda rows: kernels.matmul(x[rows], w.t()), whole, *places)
    return found


def test_a_row_of_matmul_sees_neither_its_batch_nor_tiles_nor_the_path():
    assert not rows_that_see_tiles()
    x, w = normal((90, 50), (70, 50))  # K of no whole step, and no copy engine: 200 bytes to a row
    whole = kernels.matmul(x, w.t())
    for M in (1, 33, 90):  # K's last step is filled with zeros, not with what lies behind
        wide = torch.full((M, 60), torch.nan)
        high = torch.full((71, 60), torch.inf)
        wide[-1, :50] = x[-1]
        high[:70, :50] = w
        found = kernels.matmul(wide[:, :50], high[:70, :50].t())
        assert same(found[-1:], whole[-1:])


def test_split_k_and_a_reversed_k_are_caught(tmp_path):
    with patched(triton_matmul=mutant(tmp_path, *SPLIT_K).triton_matmul):
        assert rows_that_see_tiles()
    with patched(triton_matmul_tma=mutant(tmp_path, *REVERSED_K).triton_matmul_tma):
        assert rows_that_see_tiles()


@pytest.mark.parametrize(
    "N,K,R",
    [
        (1, 1, 1),
        (70, 40, 4),
        (65, 130, 17),
        (0, 5, 2),
    ],
)
def test_a_merge_is_the_loops_and_a_row_is_alone(N, K, R):
    weight, A, B = normal((N, K), (R, K), (N, R))
    whole = kernels.merge(weight, A, B, 1.5)
    assert same(whole, by_loops(lambda: kernels.merge(weight, A, B, 1.5)))
    places = (0, 1), (5, 17), (60, 10)
    assert not differing(lambda rows: kernels.merge(weight[rows], A, B[rows], 1.5), whole, *places)
    assert same(kernels.merge(weight, A, torch.zeros(N, R), 1.5), weight)
    assert N == 0 or not same(kernels.merge(weight, A, B, 1.25), whole)


# ---- norms and elementwise


def norm(x, weight):
    return kernels.rms_norm(x, weight, 1e-6)


def test_row_sums_in_other_types_and_of_squares():
    for R, C in ((1, 1), (3, 70), (2, 5000), (0, 4)):
        x = torch.randn(R, C, dtype=torch.float64)
        out = kernels.row_sums(x)
        assert close(out, x.sum(1), 1e-9)
        for dtype in (torch.float32, bf16):
            assert torch.equal(kernels.row_sums(x, out.to(dtype) * 0), out.to(dtype))
        x = x.float()
        squares = kernels.row_sums(x, torch.zeros_like(out), True)
        assert torch.equal(squares, kernels.row_sums(x.double() ** 2))
        assert R == 0 or not torch.equal(squares, kernels.row_sums((x * x).double()))  # squares in float32


def int64s(n):
    """Odd numbers, large enough that products overflow."""
    return torch.randint(-(2**62), 2**62, (n,)) | 1


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_bit_sums_are_those_of_int64_products_and_see_every_bit(dtype):
    ends = torch.iinfo(dtype)
    sizes = (1, 1), (500, 1), (7, 700), (0, 4), (98, 64)
    numbers = [(torch.randint(ends.min, ends.max, size, dtype=dtype), *map(int64s, size)) for size in sizes]
    right = [((x * columns).sum(1) * rows).sum() for x, rows, columns in numbers]
    assert kernels.bit_sums(numbers).tolist() == right
    assert by_loops(lambda: kernels.bit_sums(numbers)).tolist() == right
    with patched(PROGRAMS=2):
        assert kernels.bit_sums(numbers).tolist() == right
    numbers[2][0][6, 699] ^= 1
    found = kernels.bit_sums(numbers).tolist()
    assert [a != b for a, b in zip(found, right)] == [False, False, True, False, False]


# ---- attention


def test_attention_takes_strided_lengths_and_packs_without_tokens():
    inputs = qkv(75, 3, 1, 64)
    grad = torch.randn(75, 3, 64)
    whole = attend(kernels, inputs, [5, 70], grad)
    strided = torch.tensor([[5, 9], [70, 9]])[:, 0]
    assert all_same(attend(kernels, inputs, strided, grad), whole)
    for lengths in ([0], [0, 0]):
        found = attend(kernels, qkv(0, 3, 1, 64), lengths, grad[:0])
        assert [len(x) for x in found] == [0, 0, 0, 0]


def test_tokens_with_one_prefix_have_one_row():
    attend_with_shared_rows((2, 1, 64))


def test_attention_takes_what_the_copy_engine_does_not():
    inputs = qkv(33, 2, 1, 64)
    plan = kernels.packed_plan([33])
    out = kernels.attention(*inputs, plan, 0.2)
    odd = []
    for x in inputs:  # rows, and where they begin
        wide = F.pad(x.flatten(1), (1, 2))
        odd.append(wide[:, 1:-2].unflatten(1, x.shape[1:]))
    assert same(kernels.attention(*odd, plan, 0.2), out)
    one = [x[:1] for x in odd]  # a row, whose stride says nothing
    assert same(kernels.attention(*one, kernels.packed_plan([1]), 0.2), out[:1])


def test_decode_within_and_beyond_a_split_of_the_real_size_equals_prefill():
    sequences = Sequences([90, 3], 2, 1, 64)
    assert same(*sequences.step([(0, 89, 90), (1, 2, 3)]))  # a table of one split: nothing to merge
    sequences = Sequences([1090], 1, 1, 64)
    for i in (1023, 1024, 1089):
        assert same(*sequences.step([(0, i, i + 1)]))
    assert same(*sequences.step([(0, 1000, 1090)]))


SIGN_OF_ZERO = ("o = tl.fma(o, tl.div_rn(1.0, den)[:, None], 0.0)  #", "o *= tl.div_rn(1.0, den)[:, None]  #")


@pytest.mark.parametrize("change", [None, SIGN_OF_ZERO, ("den = sl", "den = sl + 1")])
def test_one_split_computes_as_several_do(change, tmp_path):
    q, k, v = qkv(128, 1, 1, 64)
    q[:] = 1
    k[:64] = -9  # what is far below the next scores and next to nothing underflows to -0.0, which stays
    v[:64] = -1e-38
    v[64:] = -0.0
    plan = kernels.packed_plan([128])
    out = (mutant(tmp_path, change) if change else kernels).attention(q, k, v, plan, 0.2)
    plan.most = kernels.SPLIT + 1
    assert same(kernels.attention(q, k, v, plan, 0.2), out) is not bool(change)


TILES = (16, 16), (16, 32), (32, 64), (64, 16)  # rows of a tile, and keys of one of dK and dV


def in_tiles(k, groups, rows, keys, others=1.0, dtype=torch.float32):
    """Output and gradients of a sequence of 70 tokens between two others, which are multiplied by `others`."""
    torch.manual_seed(groups)
    inputs = [x.to(dtype) for x in qkv(110, groups, 1, 64)]
    grad = torch.randn(110, groups, 64).to(dtype)
    for x in (*inputs, grad):
        x[:20] *= others
        x[90:] *= others

    def config(*args):
        return dict(ROWS=rows, KEYS=keys if len(args) > 4 else 16)

    with mock.patch.object(k, "_attention_config", config):
        found = attend(k, inputs, [20, 70, 20], grad)
    return [x[20:90] for x in found]


@functools.cache
def in_first_tiles(groups):
    return in_tiles(kernels, groups, *TILES[0])


def differing_tiles(k, groups, tiles):
    """Yields the tile sizes whose results are not those of kernels.py's first, and if rows beside it were NaN."""
    for size, others in itertools.product(tiles, (torch.nan, 1.0)):
        if not all_same(in_tiles(k, groups, *size, others), in_first_tiles(groups)):
            yield size, others


@pytest.mark.parametrize("groups", [1, 4, 5])
def test_a_gradient_sees_neither_tiles_nor_what_lies_beside_its_sequence(groups):
    assert list(differing_tiles(kernels, groups, TILES)) == []


EDGES = (
    # forward's mask begins a tile too late
    ("if first + KEYS > seen:\n                s", "if first > seen:\n                s"),
    # that of dk and dv ends too early
    ("(first < (first_key + KEYS - 1) * GROUPS)", "(first < first_key * GROUPS)"),
    # forward reads a value past the sequence
    ("_key_tile(v, start, kv_len,", "_key_tile(v, start, kv_len + 1,"),
    # dq does not read its last key
    ("_key_tile(k, start, length,", "_key_tile(k, start, length - 1,"),
    # dk and dv read a row of the next sequence
    ("load_ragged(grad, start, length,", "load_ragged(grad, start, length + 1,"),
)


@pytest.mark.in_turn
@pytest.mark.parametrize("edge", EDGES)
def test_a_wrong_edge_of_the_tiles_is_caught(edge, tmp_path):
    changed = mutant(tmp_path, edge)
    assert any(differing_tiles(changed, 4, TILES[1:3]))


def test_a_plan_replays_with_the_lengths_and_pages_its_tensors_then_hold():
    """As a captured graph does: the tensors are written in place, and no number was read when the plan was made."""
    q, k, v = qkv(100, 2, 1, 64)
    out = kernels.attention(q, k, v, kernels.packed_plan([100]), 0.2)
    kv_lens = torch.tensor([10, 1])
    table = torch.zeros(3, 100, dtype=torch.int32)
    requests = torch.tensor([0, 0])
    plan = kernels.paged_plan(torch.tensor([1, 1]), kv_lens, table, requests)
    for at, request in ((4, 1), (99, 2)):
        kv_lens[0] = at + 1
        kv_lens[1] = 1
        table[request] = torch.arange(100)
        requests[:] = request
        rows = [at, 0]
        assert same(kernels.attention(q[rows], k, v, plan, 0.2), out[rows])


def test_what_attention_cannot_do_is_refused_by_name():
    plan = kernels.packed_plan([3])
    half = [x.half() for x in qkv(3, 2, 1, 64)]
    for inputs, scale, words in (
        (qkv(3, 2, 1, 32), 1, "head dims 32"),
        (qkv(3, 9, 1, 64), 1, "9 query"),
        (qkv(3, 2, 1, 64), 0, "scale=0"),
        (half, 1, "float16"),
    ):
        with pytest.raises(ValueError, match=words):
            kernels.attention(*inputs, plan, scale)
    one = torch.ones(1, dtype=torch.long)
    paged = kernels.paged_plan(one, one, one[None], one * 0)
    out = kernels.attention(*leaves(qkv(1, 1, 1, 64)), paged, 1)
    with pytest.raises(ValueError, match="paged_plan has no gradient"):
        out.sum().backward()


# ---- the sampler's noise

LARGE = 32_768  # numbers of a block: a draw sees none, there is nothing to add; the interpreter takes its time for each


@patched(ELEMENTS=LARGE)
def test_a_draw_is_that_of_the_plain_formula():
    for args, tokens in draws():
        assert torch.equal(kernels.draw(*args), tokens)


def test_a_draw_is_the_same_in_blocks_of_any_size_and_for_a_row_alone():
    for args, tokens in (ties(), list(draws())[2]):
        for size in (16, 1024, 4096):
            rows = slice(5) if size > 16 else slice(1, 2)
            with patched(ELEMENTS=size):
                found = kernels.draw(*(x[rows] for x in args))
            assert torch.equal(found, tokens[rows])


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "change",
    {
        "0xFFFFFFFE)\n": "0xFFFFFFFF)\n",
        "tl.minimum(_log(u) * -1.0, 1.7976931348623157e308)": "_log(u) * -1.0",
        "tl.min(tl.where(score == top, c, V), 0)": "tl.max(tl.where(score == top, c, 0), 0)",
        'tl.where(score == score, score, float("inf"))': "score",
        "seed >> 32": "seed >> 31",
    }.items(),
)
def test_a_wrong_draw_is_caught(change, tmp_path):
    changed = mutant(tmp_path, change)
    changed.ELEMENTS = LARGE
    assert not all(torch.equal(changed.draw(*args), tokens) for args, tokens in draws())


# ---- sampling rules, and the head and the embedding


def test_a_rule_keeps_what_the_cpus_loop_keeps_whatever_the_block():
    for lanes in (128, 4096):
        with patched(LANES=lanes):
            assert cuts_are_right(kernels)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "change",
    {
        "(mass + before * masses < enough)": "(mass + before * masses <= enough)",
        "bits = (x + 0.0).to": "bits = x.to",
        "tl.cumsum(last, 0) - last": "tl.cumsum(last, 0, reverse=True) - last",
        ".to(tl.float32)), 0) - 1": ".to(tl.float32)), 0)",
    }.items(),
)
def test_a_wrong_rule_is_caught(change, tmp_path):
    changed = mutant(tmp_path, change)
    changed.LANES = 64
    assert not cuts_are_right(changed)


@pytest.mark.parametrize("rule", [(1.0,), (0.7,), (0.7, 0.9, 20, 0.02)], ids=str)
@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-5), (bf16, 4e-3)], ids=str)
def test_token_logprobs_are_right_both_ways_and_equal_the_samplers(rule, dtype, bound, monkeypatch):
    temperature, *cut = rule
    N = 7 if cut else 20  # the interpreter takes a second for what a rule keeps of a row
    monkeypatch.setattr(kernels, "CHUNK", N // 2)  # several chunks, whose weight gradients are one chain
    hidden, weight = leaves(normal((N, 16), (98, 16), dtype=dtype))
    targets = torch.randint(98, (N,))
    with torch.no_grad():
        logits = kernels.head_logits(hidden, weight) / torch.tensor(temperature)
    if cut:
        kernels.cut(logits, torch.tensor([cut]).repeat(N, 1))
    sampler = kernels.log_softmax(logits, -1, False)
    if cut:
        targets = sampler.exp().multinomial(1)[:, 0]  # kept ones
    ours = kernels.token_logprobs(hidden, weight, targets, *rule)
    logprobs, _ = ours
    assert same(sampler.gather(1, targets[:, None])[:, 0], logprobs)
    theirs = textbook_logprobs(hidden, weight, targets, temperature, logits > -torch.inf)
    assert all_close(ours, theirs)
    one, _ = kernels.token_logprobs(hidden[5:6], weight, targets[5:6], *rule)
    assert same(one, logprobs[5:6])
    grads = torch.randn(2, N)
    for n in (1, 2):  # of log-probs alone, and of entropies, too
        found, wanted = (gradients(x[:n], (hidden, weight), grads[:n]) for x in (ours, theirs))
        assert max(errors(found, wanted)) < bound
    if dtype == bf16 and not cut:  # with logits in bfloat16
        assert not close((hidden @ weight.t()).float() / temperature, logits, 1e-3)


# ---- law L17: float32 by the kernels of onecurve/float32.py has the bits of the CPU's loops


def in_float32(work, module=float32):
    """What `work` gives by these kernels."""
    with patched(FLOAT32=True, _float32=lambda: module):
        return work()


def by_loops(work):
    with patched(INTERPRET=False):
        return work()


def hashes():
    return {name: one_digest.digest(*tensors) for name, *tensors in one_digest.operators()}


def test_L17_every_operator_has_the_bits_of_its_loop():
    right = by_loops(hashes)
    assert len(right) > 12
    assert in_float32(hashes) == right


def test_L17_formulas_in_plain_torch_have_the_bits_of_the_loops():
    x = 2 * torch.randn(9, 101)
    x[0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    double = torch.randn(70, 333, dtype=torch.float64)
    positions = torch.arange(0, 90_000, 1500)
    formulas = kernels.ON_CARDS
    found = in_float32(lambda: [formulas["exp"](x), formulas["log"](x.abs())])
    assert all_same(found, [loops.aten_exp(x), loops.aten_log(x.abs())])

    def work():
        return kernels.row_sums(double), *rope(kernels, 32, positions)

    assert all_same(in_float32(work), by_loops(work))
    divide = formulas["div.Tensor"]
    assert same(divide(x, 3.3), x / 3.3)
    assert same(divide(x, torch.tensor(3.3)), x / 3.3)
    assert not same(x * (1 / torch.tensor(3.3)), x / 3.3)  # what CUDA's kernel computes
    assert same(divide(torch.arange(7), 3), torch.arange(7) / 3)


def packed(lengths, heads, kv_heads, D):
    """Attention of such a pack and its gradients."""
    N = sum(lengths)
    inputs = qkv(N, heads, kv_heads, D)
    grad = torch.randn(N, heads, D)
    return lambda: attend(kernels, inputs, lengths, grad)


def normed(N, heads, C):
    x, weight, grad = normal((N, heads, C), (C,), (N, heads, C))
    return lambda: both_ways(norm, (x, weight), grad)


def head(V):
    hidden, weight, grad, entropy_grad = normal((7, 24), (V, 24), (7,), (7,))
    targets = torch.arange(7) % V
    return lambda: both_ways(lambda *x: kernels.token_logprobs(*x, targets, 0.7), (hidden, weight), grad, entropy_grad)


def masked():
    z = 20 * torch.randn(5, 98)
    z[:, ::3] = -torch.inf
    z[4, 1:] = -torch.inf
    return lambda: [kernels.log_softmax(z, -1, False)]


def gated():
    gate, up = (5 * torch.randn(9, 260)).chunk(2, -1)
    grad = torch.randn(9, 130)
    gate[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -0.0])
    return lambda: both_ways(kernels.swiglu, (gate, up), grad)


def multiplied():
    """K of no whole step, and of products that are too small for a number, whose sum is -0."""
    x, w, out = normal((40, 99), (33, 99), (40, 33))
    small = torch.full((3, 17), -1e-30), torch.full((17, 3), 1e-30)
    return lambda: [kernels.matmul(x, w.t()), kernels.matmul(x, w.t(), out=out.clone()), kernels.matmul(*small)]


EDGED = {
    "matmul": multiplied,
    "norm": lambda: normed(70, 1, 98),
    "heads": lambda: normed(70, 3, 20),
    "swiglu": gated,
    "head": lambda: head(98),
    "masked": masked,
    "attention": lambda: packed([40, 0, 13], 2, 1, 32),
    "groups": lambda: packed([1, 33], 5, 1, 16),
}


@pytest.mark.parametrize("edged", EDGED)
def test_L17_edges_have_the_bits_of_the_loops(edged):
    work = EDGED[edged]()
    assert all_same(in_float32(work), by_loops(work))


def test_L17_training_equals_prefill_equals_decode_among_strange_rows():
    """Packed training is by the loops."""
    sequences = by_loops(lambda: Sequences([40, 3, 65], 3, 1, 32))
    steps = sequences.steps((19, 64))
    for step in (*steps["prefill"], *steps["chunks"][:2], *steps["decode"][:3]):
        assert same(*in_float32(lambda: sequences.step(step))), step


UNDIVIDED = "p = _probabilities(s, seen & inside, top, scale)"
AGAINST_THE_LOOPS = {
    "neighbours are added first": ("norm", ("return _total(acc, True)", "return _total(acc)")),
    "a product and a sum, each rounded": ("norm", ("acc = tl.fma(u, v, acc)", "acc += u * v")),
    "1 / D": ("norm", ("tl.div_rn(_dots(x, x, inside, D), D * 1.0)", "_dots(x, x, inside, D) * (1.0 / D)")),
    "a norm's weight by other blocks": ("norm", ("block = SUM_TOKENS * H", "block = SUM_TOKENS * H // 2")),
    "keys of a tile first": (
        "attention",
        ("o = tl.dot(p, vt, o, input", "o = o + tl.dot(p, vt, tl.zeros([ROWS, D], tl.float32), input"),
    ),
    "the maximum is scaled with the score": (
        "attention",
        ("_exp(s * scale - top)", "_exp((s - tl.div_rn(top, scale)) * scale)"),
    ),
    "p undivided in backward": (
        "attention",
        ("p = tl.div_rn(_probabilities(s, seen & inside, top, scale), den)", UNDIVIDED),
    ),
    "float32's log": ("head", ("_log(_total(sums, True).to(tl.float64))", "tl.log(_total(sums, True))")),
}


@pytest.mark.in_turn
@pytest.mark.parametrize("name", AGAINST_THE_LOOPS)
def test_L17_another_order_or_rounding_is_caught(name, tmp_path):
    edged, *changes = AGAINST_THE_LOOPS[name]
    work = EDGED[edged]()
    module = mutant(tmp_path, *changes, of=float32)
    assert not all_same(in_float32(work, module), by_loops(work))


TO_THE_END = """    c += m * c_m + n * c_n
    a += K // BLOCK_K * BLOCK_K * a_k
    b += K // BLOCK_K * BLOCK_K * b_k
"""
OTHER_CHAINS = {
    "K from its end": (
        ("    c += m * c_m + n * c_n\n", TO_THE_END),
        ("for left in range(K, 0, -BLOCK_K):", "for left in range(K % BLOCK_K, K + 1, BLOCK_K):"),
        ("        a += a_k * BLOCK_K", "        a -= a_k * BLOCK_K"),
        ("        b += b_k * BLOCK_K", "        b -= b_k * BLOCK_K"),
    ),
    "the last step is filled with 0.0": (("_fill(x, inside_k[None, :])", "x"),),
}


@pytest.mark.in_turn
@pytest.mark.parametrize("name", OTHER_CHAINS)
def test_L17_another_chain_is_caught(name, tmp_path):
    work = EDGED["matmul"]()
    changed = mutant(tmp_path, *OTHER_CHAINS[name])
    with patched(triton_matmul=changed.triton_matmul):
        assert not all_same(in_float32(work), by_loops(work))


# ---- bfloat16, in which a GPU computes, on a card with TMA and on one without; and the optimizer


@pytest.fixture(params=[(9, 0), (8, 6)], ids=str)
def card(request):
    """Its tiles, and how they are loaded."""
    card = kernels.CARDS[request.param]
    with patched(card=lambda _: card):
        yield card


def rounded_once(ours, exact, slack=1e-6):
    """Whether `ours` is `exact` (float64) rounded to the nearest bfloat16; slack: of float32's sums, by the largest."""
    _, exponent = torch.frexp(exact)
    bound = torch.ldexp(torch.ones_like(exact), exponent - 9)  # half of the last of 8 bits
    if len(exact):
        bound += slack * exact.abs().amax()
    near = (ours.double() - exact).abs() <= bound
    return ours.dtype == bf16 and ours.shape == exact.shape and bool(near.all())


def all_rounded_once(ours, exact):
    return all(rounded_once(a, b) for a, b in zip(ours, exact, strict=True))


@pytest.mark.parametrize(
    "M,N,K",
    [
        (5, 130, 16),
        (70, 33, 100),
        (130, 72, 64),
    ],
)
@pytest.mark.parametrize("layout", ["NT", "TN"])
def test_a_matmul_of_bfloat16_is_rounded_once(card, M, N, K, layout):
    a = operand(M, K, layout[0], bf16)
    b = operand(K, N, layout[1], bf16)
    bias = torch.randn(N).to(bf16)
    exact = matmul64(a, b)
    whole = kernels.matmul(a, b)
    sums = kernels.matmul(a, b, out_dtype=torch.float32)
    assert rounded_once(whole, exact)
    assert close(sums, exact, 1e-4)
    assert torch.equal(whole, sums.to(bf16))
    assert rounded_once(kernels.addmm(bias, a, b), exact + bias.double())
    assert not rounded_once(whole + bias, exact + bias.double())  # twice
    cut_off = (sums.view(torch.int32) & ~0xFFFF).view(torch.float32)
    assert not rounded_once(cut_off.to(bf16), exact)


@pytest.mark.parametrize(
    "acc,products,hopper,ampere",
    [
        (1.0, [2**-24] * 2, 1 + 2**-23, 1 + 2**-23),  # one after the other would be 1
        (1.0, [2**-26] * 15, 1.0, 1.0),  # added exactly and rounded 1 + 2**-22
        (1.0, [2**-25] * 15, 1 + 3 * 2**-23, 1.0),  # rounded 1 + 4 * 2**-23
        (-1.0, [2**-25], 2**-24 - 1, -1.0),  # rounded -1
        (2.0**24, [1.0] + [0.0] * 7 + [-(2.0**24)], 1.0, 0.0),  # one step, two steps
        (0.0, [1.0] * 16 + [2**-25] * 4, 16.0, 16.0),  # two steps, three
    ],
)
def test_a_step_of_a_tensor_core_is_aligned_and_cut_off(acc, products, hopper, ampere):
    a = torch.ones(1, len(products), dtype=bf16)
    b = torch.tensor(products)[:, None].to(bf16)
    for capability, total in (((9, 0), hopper), ((8, 6), ampere)):
        found = torch.tensor([[acc]])
        add_as_tensor_core(a.float().numpy(), b.float().numpy(), found.numpy(), *tensor_core(capability))
        assert found.item() == total, capability


def test_every_tile_of_bfloat16_gives_the_same_bits_on_either_path():
    """By the copy engine and by pointers."""
    x, w = normal((70, 128), (96, 128), dtype=bf16)
    whole = kernels.matmul(x, w.t(), out_dtype=torch.float32)
    for capability, config in itertools.product(((9, 0), (8, 6)), kernels.TILES):
        with patched(card=lambda _: kernels.CARDS[capability], _matmul_config=lambda *_: config):
            some = kernels.matmul(x[3:20], w.t(), out_dtype=torch.float32)
        assert same(some, whole[3:20])


@pytest.mark.parametrize(
    "shape",
    [
        (5, 64),
        (3, 4, 64),
        (1, 100),
        (70, 33),
        (0, 64),
        (130, 16),
        (70, 192),
        (2, 3000),
    ],
)
def test_a_norm_of_bfloat16_is_rounded_once_after_its_residual_was(shape):
    x, residual, weight, grad = normal(shape, shape, shape[-1:], shape, dtype=bf16)
    y, s = kernels.rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(s, x + residual)
    ours = both_ways(norm, (s, weight), grad)
    right = both_ways(textbook_norm, doubles((s, weight)), grad)
    assert torch.equal(ours[0], y)
    assert all_rounded_once(ours, right)
    _, frozen = both_ways(lambda x: norm(x, weight), [s], grad)
    assert torch.equal(frozen, ours[1])
    if shape == (70, 192):
        not_rounded = x.double() + residual.double()
        assert not rounded_once(y, textbook_norm(not_rounded, weight.double()))


@pytest.mark.parametrize(
    "N,heads,kv_heads,D",
    [
        (7, 4, 2, 64),
        (70, 5, 1, 128),
        (7, 1, 1, 8),
        (1, 2, 2, 16),
        (0, 4, 2, 64),
    ],
)
@pytest.mark.parametrize("normed", [True, False])
def test_a_turn_of_bfloat16_is_rounded_once_with_its_norm(normed, N, heads, kv_heads, D):
    q, k = normal((N, heads, D), (N, kv_heads, D), dtype=bf16)
    weights = normal((D,), (D,), dtype=bf16) if normed else []
    inputs = q, k, *weights
    grads = normal(q.shape, k.shape, dtype=bf16)
    cos, sin = rope(kernels, D, torch.arange(3, 3 + N))
    ours, exact = norm_rope(cos, sin)
    found = both_ways(ours, inputs, *grads)
    right = both_ways(exact, doubles(inputs), *grads)
    assert all_rounded_once(found, right)
    turned = found[:2]
    nans = torch.full((N, 1, D), torch.nan, dtype=bf16)
    infs = torch.full((N, 2, D), torch.inf, dtype=bf16)
    v = torch.randn_like(k)
    fused = torch.cat((nans, q, k, v, infs), 1)
    _, *views, v, _ = fused.split([1, heads, kv_heads, kv_heads, 2], 1)
    assert all_same(ours(*views, *weights), turned)
    places = torch.randperm(N + 3)[:N]
    of_one, of_several = (torch.zeros(2, N + 3, kv_heads, D, dtype=bf16) for _ in range(2))
    for cache, in_one in ((of_one, True), (of_several, False)):
        norms = (*weights, 1e-6) if normed else ()
        q_there = kernels.norm_rope_to_cache(*views, v, cos, sin, *cache, places, *norms, in_one=in_one)
        assert same(q_there, turned[0])
    assert same(of_one, of_several)
    assert all_same(of_one[:, places], (turned[1], v))
    if normed and N == 70:  # as if the norm were an operator of its own
        rounded = textbook_norm(q.double(), weights[0].double()).to(bf16)
        twice = textbook_rope(rounded.double(), cos, sin).to(bf16)
        assert not rounded_once(twice, right[0])


@pytest.mark.parametrize("shape", [(1, 1), (33, 1100), (2, 3, 64), (0, 8)])
def test_swiglu_of_bfloat16_is_rounded_once_on_halves_of_one_tensor(shape):
    both = torch.randn(*shape[:-1], 2 * shape[-1]) * 3
    gate, up = both.to(bf16).chunk(2, -1)
    grad = torch.randn(shape).to(bf16)
    ours = both_ways(kernels.swiglu, (gate, up), grad)
    right = both_ways(textbook_swiglu, doubles((gate, up)), grad)
    assert all_rounded_once(ours, right)
    if shape == (33, 1100):
        assert not rounded_once(F.silu(gate) * up, right[0])  # torch's, which rounds the silu


def error(a, b):
    """|a - b| / |b|, of all numbers together."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def errors(ours, theirs):
    return [error(a, b) for a, b in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize("groups,D", [(3, 64), (4, 128)])
def test_attention_of_bfloat16_is_right_forward_and_backward(card, groups, D):
    lengths = [5, 0, 70, 1, 150]
    scale = D**-0.5
    inputs = [x.to(bf16) for x in qkv(sum(lengths), 2 * groups, 2, D)]
    grad = torch.randn(inputs[0].shape).to(bf16)
    out, *grads = attend(kernels, inputs, lengths, grad, scale)
    right, *right_grads = attend64(inputs, lengths, grad, scale)
    other = reference(*inputs, lengths, scale * 1.05)
    bound = 4e-3  # probabilities and results are bfloat16, half of whose last bit is 2^-9 = 2e-3 on an average
    assert error(out, right) < bound < error(other, right)
    assert max(errors(grads, right_grads)) < 2 * bound


def test_gradients_of_bfloat16_see_neither_tiles_nor_card_nor_neighbours(card):
    with patched(card=lambda _: kernels.CARDS[9, 0]):
        first = in_tiles(kernels, 4, *TILES[0], dtype=bf16)
    for size in TILES[1:3]:
        assert all_same(in_tiles(kernels, 4, *size, torch.nan, bf16), first), size


PAST_THE_END = (
    ("(at < length)[:, None]\n        d =", "(at < length + 1)[:, None]\n        d ="),
    ("(start + at).to(tl.int64) * x_s", "(start + at + 1).to(tl.int64) * x_s"),
)


@pytest.mark.in_turn
@pytest.mark.parametrize("edge", PAST_THE_END)
def test_a_wrong_edge_of_keys_read_by_pointers_is_caught(edge, tmp_path):
    changed = mutant(tmp_path, edge)
    changed.card = lambda _: kernels.CARDS[8, 6]
    assert any(differing_tiles(changed, 4, TILES[:1]))


def test_training_equals_prefill_equals_chunks_equals_decode_in_bfloat16(card):
    with patched(SPLIT=128):
        sequences = Sequences([150, 3, 70], 4, 2, 64, bf16)
        steps = sequences.steps((64,))
        for step in (*steps["prefill"][:1], *steps["chunks"], *steps["decode"][:4]):
            assert torch.equal(*sequences.step(step)), step
    with patched(SPLIT=64):
        assert not torch.equal(*sequences.step([(0, 100, 150)]))  # the comparison can fail


def test_a_merge_and_an_embeddings_gradient_of_bfloat16_are_rounded_once():
    weight, A, B = normal((70, 40), (4, 40), (70, 4))
    weight = weight.to(bf16)
    assert rounded_once(kernels.merge(weight, A, B, 1.5), weight.double() + 1.5 * matmul64(B, A))
    grad = torch.randn(60, 33).to(bf16)
    ids = torch.arange(60) % 3
    by_token = grad.view(20, 3, 33)  # ids by column
    right = by_token.double().sum(0)
    assert rounded_once(kernels.embedding_backward(grad, ids, 3, -1, False), right)
    assert not rounded_once(functools.reduce(torch.add, by_token), right)  # rounded at each token


@pytest.mark.parametrize("r", [4, 16])
def test_adapters_beside_bfloat16_have_the_gradients_of_float32(r):
    x, weight, grad = normal((150, 40), (70, 40), (150, 70), dtype=bf16)
    A, B = normal((r, 40), (70, r))

    def adapted(A, B):
        return kernels.LoRALinear.apply(x, weight, None, A, B, 0.5)

    _, *found = both_ways(adapted, (A, B), grad)
    g = 0.5 * matmul64(grad.t(), x)
    right = matmul64(B.t(), g), matmul64(g, A.t())
    assert all(x.is_contiguous() for x in found)
    assert max(errors(found, right)) < 1e-6
    assert min(errors([x.to(bf16) for x in found], right)) > 1e-4
    assert error(matmul64(g, A.to(bf16).t()), right[1]) > 1e-4  # with its first eight bits alone
    b = A.t()
    high = b.to(bf16)
    middle = (b - high).to(bf16)
    low = (b - high - middle).to(bf16)
    high, middle, low = (kernels.matmul(x, part, torch.float32) for part in (high, middle, low))
    assert same(kernels._float32_mm(x, b), high + (middle + low))


# ---- mixtures of experts


def mixture(dtype, N=24, C=24, E=6, width=20):
    """Operands, of which the second expert's router is the first's and the last's is never chosen; a gradient."""
    torch.manual_seed(0)
    tensors = normal((N, C), (E, C), (E, 2 * width, C), (E, C, width), (N, C))
    for x in tensors:
        x *= 0.5
    x, router, *_ = tensors
    x[:, 0] = 1
    router *= 0.2
    router[1] = router[0]
    router[2, 0] = 1  # it takes all tokens
    router[-1, 0] = -2
    return [t.to(dtype) for t in tensors]


def tiny_blocks(k, tile=(16, 16, 16, 4, 2)):
    """A module with many blocks, and several tiles of an expert's rows."""
    k.LANES = 16
    k.ELEMENTS = 16
    k._matmul_config = lambda *_: tile
    return k


def mixed(k, *operands, grad):
    """Output and gradients."""
    return both_ways(lambda *x: k.moe(*x, 3), operands, grad)


@functools.cache
def mixed_in_parts(dtype):
    """(output, gradients of gate_up and down)."""
    *operands, grad = mixture(dtype)
    return mixture_in_parts(operands, grad)


@functools.cache
def right_gradients(dtype):
    """(output, gradients) of a plain loop in float64."""
    *operands, grad = mixture(dtype)
    return both_ways(lambda *x: textbook_mixture(*x, 3), doubles(operands), grad)


def is_right(k, dtype=torch.float32):
    """To the bit, as far as there is no sum of which the interpreter does not say the order."""
    _, experts = k.Choose.apply(-torch.full((1, 6), torch.nan), 3)
    if experts.tolist() != [[0, 1, 2]]:  # a row may hold anything, but not an expert that is none
        return False
    *operands, grad = mixture(dtype)
    parts = mixed_in_parts(dtype)
    if not torch.equal(k.moe(*operands, 3), parts[0]):  # which most mistakes change, and takes a third of the time
        return False
    found = mixed(k, *operands, grad=grad)
    out, _, _, d_gate_up, d_down = found
    if d_gate_up[-1].any() or d_down[-1].any():
        return False
    bound = 2e-6 if dtype == torch.float32 else 1e-2
    alike = map(torch.equal, (out, d_gate_up, d_down), parts)
    return all(alike) and all(e < bound for e in errors(found, right_gradients(dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, bf16], ids=str)
def test_a_mixture_is_its_parts_to_the_bit_and_right_with_all_gradients(dtype, card, tmp_path):
    assert is_right(kernels, dtype)
    changed = mutant(tmp_path)
    changed.card = kernels.card
    for tile in ((16, 16, 16, 4, 2), (64, 32, 32, 4, 2)):
        assert is_right(tiny_blocks(changed, tile), dtype)


def test_a_row_of_a_mixture_sees_neither_its_batch_nor_rows_of_nan():
    *operands, grad = mixture(torch.float32)
    rows_of_a_mixture_are_alone(operands, grad, 3)


LAST = (  # of equal logits
    ("<< 24) - i\n", "<< 24) - (E - 1 - i)\n"),
    ("e = -tl.max(keys, 0) & 0xFFFFFF", "e = E - 1 - (-tl.max(keys, 0) & 0xFFFFFF)"),
)
ROUNDED = (  # to bfloat16, as elsewhere: the router's logits, and each expert's part of a token
    (
        "matmul(x, router.t(), torch.float32)",
        "matmul(x, router.t()).float()",
    ),
    (
        "acc = tl.fma(tl.load(w + i), v, acc)",
        "acc += (tl.load(w + i) * v).to(out.dtype.element_ty).to(tl.float32)",
    ),
)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "change",
    [
        *ROUNDED,
        LAST,
        ("tl.where(inside, keys, TAKEN)", "tl.where(i < E + 1, keys, TAKEN)"),  # an expert that is none, beside NaN
        ("at + tl.cumsum(mine, 0) - mine", "at + tl.cumsum(mine, 0, reverse=True) - mine"),  # from the last token
        ("x += pair // k * C", "x += pair % k * C"),
        ("tl.store(dots + pair, _sum(acc))", "tl.store(dots + pair, tl.max(acc, 0))"),
        ("end = tl.load(starts + e + 1)", "end = tl.load(starts + e + 1) - 1"),
        ("K = (end - first)", "K = (end - first - 1)"),
        (
            "for i in range(row * k, (row + 1) * k):\n        place =",
            "for j in range(k):\n        i = row * k + k - 1 - j\n        place =",
        ),
    ],
)
def test_a_wrong_mixture_is_caught(change, tmp_path):
    changes = change if change is LAST else [change]
    changed = tiny_blocks(mutant(tmp_path, *changes))
    assert not is_right(changed, bf16 if change in ROUNDED else torch.float32)


# ---- a trainer on one card: its bits are FSDP2's, and how much it starts, which a small model waits for


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of models with one and with two layers."""
    sizes = "hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=64, intermediate_size=64"
    folders = [tmp_path_factory.mktemp("model") for _ in range(2)]
    for layers, folder in enumerate(folders, 1):
        make_scratch_model(folder, DEFAULTS | dict(scratch_args=f"num_hidden_layers={layers}, {sizes}"))
    return folders


@pytest.fixture
def one_card(mesh):
    """Makes a Trainer in bfloat16 of a model's folder."""

    def make(folder, **change):
        c = SimpleNamespace(**DEFAULTS | dict(leaf_tokens=64) | change)
        trainer = train.Trainer(c, Ranks(0, 1, 1, 0, mesh, None), check_model(folder, vars(c)), folder, "cpu")
        for group in trainer.optimizer.param_groups:
            group["foreach"] = True  # as on a card
        return trainer

    kernels.enable_batch_invariant()
    with patched(compute_dtype=lambda _: bf16):
        yield make
    kernels.disable_batch_invariant()


def test_one_card_rounds_and_adds_as_fsdp2_does(one_card, models):
    samples = [s._replace(returns=s.advantages) for s in make_samples(2)]
    found = []
    for sharded in (True, False):
        with mock.patch.object(dense, "is_sharded", lambda *_: sharded):
            trainer = one_card(models[0], lanes=2, advantage="gae", strict=False)
        found.append([trainer.update(samples, step, 0.01) for step in range(2)])
    fsdp2, alone = found
    assert fsdp2 == alone
    (_, first), (_, second) = alone
    assert all(first["weights"][name] != second["weights"][name] for name in first["weights"])


class Launches(Recorder):
    """Notes the names of aten operators that compute or copy, and of Triton's kernels, in the place of running them."""

    def note(self, name, step):
        self.steps.append(name)  # a step has the tensors, and autograd would not take them over

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default or func.namespace == "profiler":
            return func(*args, **kwargs or {})
        return super().__torch_dispatch__(func, kinds, args, kwargs)


def launches_of(work):
    """Counter of the names of what is started."""
    with Launches() as noted:
        run = functools.partialmethod(lambda executor, *_, **__: noted.note(executor.fn.__name__, None))
        with mock.patch.object(interpreter.GridExecutor, "__call__", run):
            work()
    return Counter(noted.steps)


def launches_in(trainer):
    """Of a forward pass, of both passes of two leaves that are added, and of the step with its norm and hashes."""
    leaves = [train.pack(make_samples(2), "cpu") for _ in range(3)]
    grads = [torch.zeros_like(s.data) for s in trainer.shards]

    def forward():
        return trainer.model.token_logprobs(leaves.pop()).logprobs.sum()

    def both_passes():
        sums = LeafSum(2, trainer.model)
        for _ in range(2):
            sums.backward(forward())

    def step():
        trainer.apply(grads, 0.1, "")

    step()  # makes the hashes' factors
    return [launches_of(work) for work in (forward, both_passes, step)]


@pytest.mark.parametrize(
    "change,of_layer,of_rest",
    [
        ({}, (15, 92, 12), (18, 79, 29)),
        (dict(lora_rank=4), (22, 364, 15), (18, 43, 25)),
    ],
    ids=["full", "lora"],
)
def test_a_layer_and_a_step_start_no_more_kernels_than_they_need(change, of_layer, of_rest, one_card, models):
    """A small model waits for them longer than for the card."""
    one, two = (launches_in(one_card(folder, **change)) for folder in models)
    assert tuple(b.total() - a.total() for a, b in zip(one, two)) == of_layer
    assert tuple(a.total() - n for a, n in zip(one, of_layer)) == of_rest
    swiglu = kernels.swiglu
    with patched(swiglu=lambda *x: swiglu(*x) * 1):
        more, *_ = launches_in(one_card(models[0], **change))
    assert more - one[0] == {"aten::mul.Tensor": 1}
