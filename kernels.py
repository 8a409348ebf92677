"""
Batch-invariant operators: one definition, called by the rollout engine and by the trainer.

A library kernel picks its tile shapes from the number of rows it is given, and so adds the same numbers in another
order when a row has other neighbours. One rule prevents that, and every operator here keeps it:

    the order in which one row's numbers are added depends on that row's own length and on the constants of this
    file, never on how many rows there are, who the neighbours are, or how the work was cut.

This file holds the CPU operators (float32). What torch 2.11 does on a CPU by itself, and what we do about it:

    matmul        rows differ unless their number is a multiple of 16, and columns differ between thread counts
                  unless *their* number is: so both are padded with zeros to a multiple of TILE.
    silu          the vectorised body and the scalar tail of torch's loop differ in the last bit, so the result
                  depends on a number's position: written as x / (1 + exp(-x)), whose two operations agree.
    attention     SDPA adds a decode step in another order than a prefill: a softmax over fixed key tiles at absolute
                  positions, the same for packed training, chunked prefill and decode.
    RMSNorm, RoPE, log_softmax, embedding, elementwise arithmetic: already row-invariant, left as they are.

`tests/test_kernels.py` checks each of these bit for bit; and a run checks the sum of them at every token it trains on.

Letters: N tokens of a packed batch, B sequences, Tq the most queries of a sequence, L keys (a multiple of TILE_KV),
Hq / Hkv query / key-value heads, D head dim, V vocabulary.
"""

import warnings

import torch
import torch.nn.functional as F

TILE = 16  # rows and columns of a matmul come in multiples of this
TILE_Q = 8  # query rows of a softmax tile come in multiples of this
TILE_KV = 16  # keys per softmax tile, counted from position 0 of the sequence; small, for the short sequences of a CPU
CHUNK = 1024  # rows of logits held at a time; fixed, since the head's weight gradient is added chunk by chunk


# ------------------------------------------------------------------------------------------------------------------
# matmul and silu: these replace the aten kernels, so that any model reaches them, forward and backward


def _pad(x, rows, cols):
    """x (R, C) with zeros appended up to a multiple of `rows` rows and `cols` columns."""
    down, right = -x.shape[0] % rows, -x.shape[1] % cols
    return F.pad(x, (0, right, 0, down)) if down or right else x


def mm(a, b):
    """a (M, K) @ b (K, N) -> (M, N). Zero rows and columns fill the last tiles, so each call has whole tiles only."""
    (M, _), N = a.shape, b.shape[1]
    a, b = _pad(a, TILE, 1), _pad(b, 1, TILE)
    out = a.new_empty(a.shape[0], b.shape[1])
    torch.mm(a, b, out=out)  # aten::mm.out is torch's own kernel: only aten::mm is replaced by this function
    return out[:M, :N].contiguous()


def addmm(bias, a, b, *, beta=1, alpha=1):
    """beta * bias + alpha * (a @ b); torch's own starts the sum with the bias, another order."""
    out = mm(a, b)
    if alpha != 1:
        out = out * alpha
    return out + (bias if beta == 1 else bias * beta)


def silu(x):
    """x * sigmoid(x), as x / (1 + exp(-x))."""
    return x / (1 + torch.exp(-x))


def silu_backward(grad, x):
    """d silu / dx = s * (1 + x * (1 - s)) with s = sigmoid(x)."""
    s = 1 / (1 + torch.exp(-x))
    return grad * (s * (1 + x * (1 - s)))


# ------------------------------------------------------------------------------------------------------------------
# what both models call for the rest of a layer, in the libraries' own order of operations


def rms_norm(x, weight, eps, residual=None):
    """y = x * rsqrt(mean(x^2) + eps) * weight over the last dim; with a residual: (y of s, s), s = x + residual."""
    s = x if residual is None else x + residual
    h = s.float()
    y = (weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps))).to(x.dtype)
    return y if residual is None else (y, s)


def rope_table(inv_freq, positions):
    """cos and sin (N, D / 2) float32 of the angles position * inv_freq; positions (N,), inv_freq (D / 2,)."""
    angle = positions.float()[:, None] * inv_freq
    return angle.cos(), angle.sin()


def rope(q, k, cos, sin):
    """(x1 cos - x2 sin, x2 cos + x1 sin) of the two halves of each head: q (N, Hq, D), k (N, Hkv, D) -> the same."""

    def rotate(x):
        (x1, x2), c, s = x.float().chunk(2, -1), cos[:, None], sin[:, None]
        return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1).to(x.dtype)

    return rotate(q), rotate(k)


def swiglu(gate, up):
    """silu(gate) * up."""
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def head_logits(hidden, weight):
    """hidden (M, H), weight (V, H) -> hidden @ weight^T, (M, V) float32."""
    return (hidden @ weight.t()).float()


def row_sums(x):
    """x (R, C) -> the sum of each row, (R,)."""
    return x.sum(1)


# ------------------------------------------------------------------------------------------------------------------
# attention


class Plan:
    """
    Where the queries and keys of each sequence are; made once per forward, used by every layer.

    q_rows     (B, Tq)  row of each query in the packed batch; an unused entry repeats a valid row
    positions  (B, Tq)  absolute position of each query
    q_unpad    (N,)     index into B * Tq of each packed query
    kv_rows    (B, L)   row of each key in the packed batch or in the paged cache; an unused entry repeats the first
    kv_unpad   (N,)     index into B * L of each packed key, in training; None over a cache
    """

    def __init__(self, q_rows, positions, q_unpad, kv_rows, kv_unpad=None):
        self.q_rows, self.positions, self.q_unpad = q_rows, positions, q_unpad
        self.kv_rows, self.kv_unpad = kv_rows, kv_unpad
        self._tiles = {}

    def tiles(self, heads, groups):
        """
        The keys cut into n tiles, for all layers: rows of (row, head) pairs (n * B * Hkv * TILE_KV,), and where a
        query does not see a key (n, B * Hkv, R, TILE_KV).
        """
        if (heads, groups) not in self._tiles:
            rows = self.kv_rows.view(len(self.kv_rows), -1, TILE_KV).transpose(0, 1)[:, :, None]  # (n, B, 1, TILE_KV)
            rows = rows * heads + torch.arange(heads, device=rows.device)[:, None]
            at = torch.arange(self.kv_rows.shape[1], device=rows.device).view(-1, 1, 1, TILE_KV)
            q_at = self.positions.repeat_interleave(groups, dim=1)  # (B, Tq * groups)
            q_at = F.pad(q_at, (0, -q_at.shape[1] % TILE_Q)).repeat_interleave(heads, dim=0)
            self._tiles[heads, groups] = rows.flatten(), at > q_at[:, :, None]
        return self._tiles[heads, groups]


def packed_plan(lengths, device=None):
    """The plan of a packed batch of whole sequences, `lengths` (B,) tokens each, for training."""
    lengths = torch.as_tensor(lengths, device=device)
    L = -(-int(lengths.max()) // TILE_KV) * TILE_KV
    at = torch.arange(L, device=lengths.device)
    valid = at < lengths[:, None]
    rows = (lengths.cumsum(0) - lengths)[:, None] + torch.where(valid, at, 0)
    unpad = valid.flatten().nonzero()[:, 0]
    return Plan(rows, at.expand(rows.shape), unpad, rows, unpad)


def paged_plan(q_lens, kv_lens, page_table, requests):
    """
    The plan of a prefill chunk or a decode step over a paged cache.

    q_lens (B,) new tokens, kv_lens (B,) tokens in the cache with the new ones, page_table (any, >= max kv_lens) the
    cache row of each position, requests (B,) the table's row of each sequence. Prefill, any chunk of it and decode
    differ in these numbers only.
    """
    Tq, L = int(q_lens.max()), -(-int(kv_lens.max()) // TILE_KV) * TILE_KV
    at = torch.arange(max(Tq, L), device=q_lens.device)
    q_valid, kv_valid = at[:Tq] < q_lens[:, None], at[:L] < kv_lens[:, None]
    q_rows = (q_lens.cumsum(0) - q_lens)[:, None] + torch.where(q_valid, at[:Tq], 0)
    positions = (kv_lens - q_lens)[:, None] + torch.where(q_valid, at[:Tq], 0)
    table = F.pad(page_table[requests, :L], (0, max(0, L - page_table.shape[1])))
    # an unused key repeats the sequence's first one: it is masked, but 0 * NaN of a foreign page would still be NaN
    kv_rows = torch.where(kv_valid, table, table[:, :1]).long()
    return Plan(q_rows, positions, q_valid.flatten().nonzero()[:, 0], kv_rows)


def _queries(x, rows, groups):
    """Packed (N, Hq, D) -> (B * Hkv, R, D), the queries that share a key head as rows, R a multiple of TILE_Q."""
    (B, Tq), (_, Hq, D) = rows.shape, x.shape
    x = x[rows].view(B, Tq, Hq // groups, groups, D).transpose(1, 2).reshape(-1, Tq * groups, D)
    return F.pad(x, (0, 0, 0, -x.shape[1] % TILE_Q))


def _packed_queries(x, plan, heads, groups):
    """The inverse of `_queries`: (B * Hkv, R, D) -> (N, Hq, D)."""
    (B, Tq), D = plan.q_rows.shape, x.shape[-1]
    x = x[:, : Tq * groups].view(B, -1, Tq, groups, D).transpose(1, 2).reshape(B * Tq, heads, D)
    return x[plan.q_unpad]


def _add_in_order(parts):
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


class Attention(torch.autograd.Function):
    """
    o = sum_t p_t v_t / sum_t l_t, p_t = exp(q k_t^T * scale - m), l_t the row sums of p_t, over key tiles t of one
    sequence in order; m is the row's largest score, which has no order. A key in a row's future adds an exact zero, and
    so does a tile of them. So neither the batch, nor the chunk of a prefill, nor the pages of the cache can be seen.
    Backward (Dao 2023, algorithm 2, for one block of queries): ds = p * (do v^T - rowsum(do * o)).
    """

    @staticmethod
    def forward(ctx, q, k, v, plan, scale):
        heads, D = k.shape[1:]
        groups = q.shape[1] // heads
        rows, masked = plan.tiles(heads, groups)
        tiles = len(masked)
        x = _queries(q, plan.q_rows, groups)
        k, v = (
            t.reshape(-1, D).index_select(0, rows).view(-1, TILE_KV, D) for t in (k, v)
        )  # (tiles * B * Hkv, TILE_KV, D)
        s = torch.bmm(x.repeat(tiles, 1, 1), k.transpose(1, 2)).mul_(scale).view(masked.shape)
        s.masked_fill_(masked, float("-inf"))
        p = torch.exp(s.sub_(s.amax((0, 3), keepdim=True)))
        total = _add_in_order(p.sum(-1, keepdim=True))
        out = _add_in_order(torch.bmm(p.flatten(0, 1), v).view(tiles, *x.shape)) / total
        ctx.save_for_backward(x, k, v, out, p, total)
        ctx.plan, ctx.scale, ctx.heads = plan, scale, (q.shape[1], heads)
        return _packed_queries(out, plan, q.shape[1], groups)

    @staticmethod
    def backward(ctx, grad):
        x, k, v, out, p, total = ctx.saved_tensors
        plan, (q_heads, heads), (tiles, D) = ctx.plan, ctx.heads, (len(p), x.shape[-1])
        groups = q_heads // heads
        # a gathered gradient would count a repeated (padding) row twice: those queries get zeros
        grad_rows = grad.new_zeros(plan.q_rows.numel(), *grad.shape[1:])
        grad_rows[plan.q_unpad] = grad
        every_row = torch.arange(plan.q_rows.numel(), device=grad.device).view(plan.q_rows.shape)
        do = _queries(grad_rows, every_row, groups)
        p = p / total
        dp = torch.bmm(do.repeat(tiles, 1, 1), v.transpose(1, 2)).view(p.shape)
        ds = (p * (dp - (do * out).sum(-1, keepdim=True)) * ctx.scale).flatten(0, 1)
        dq = _add_in_order(torch.bmm(ds, k).view(tiles, *x.shape))
        dk = torch.bmm(ds.transpose(1, 2), x.repeat(tiles, 1, 1))
        dv = torch.bmm(p.flatten(0, 1).transpose(1, 2), do.repeat(tiles, 1, 1))

        def packed_keys(t):  # (tiles * B * Hkv, TILE_KV, D) -> (N, Hkv, D)
            t = t.view(tiles, -1, heads, TILE_KV, D).permute(1, 0, 3, 2, 4)
            return t.reshape(-1, heads, D)[plan.kv_unpad]

        return _packed_queries(dq, plan, q_heads, groups), packed_keys(dk), packed_keys(dv), None, None


def attention(q, k, v, plan, scale):
    """
    Causal attention of packed queries q (N, Hq, D) over keys and values k, v (S, Hkv, D) -> (N, Hq, D).

    `plan` says which rows of k and v belong to which query; Hq must be a multiple of Hkv. Differentiable for a
    `packed_plan` only.
    """
    return Attention.apply(q, k, v, plan, scale)


def packed_attention(module, q, k, v, mask, scaling, plan, **_):
    """`attention` under the interface of transformers' attention functions: (1, heads, N, D) -> (1, N, Hq, D)."""
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    return attention(q, k, v, plan, scaling)[None], None


# ------------------------------------------------------------------------------------------------------------------
# the head: log-probs of chosen tokens, without keeping (N, V) numbers


class TokenLogprobs(torch.autograd.Function):
    """
    logprob_i = z_i[target_i] - log sum_v exp(z_i[v]), z = hidden weight^T / temperature, and the entropy of z_i's
    distribution, H_i. Row by row what a sampler computes from the engine's logits. The backward pass makes the logits
    again, with p = softmax(z_i): d logprob_i / dz_i = onehot(target_i) - p, d H_i / dz_i = -p (log p + H_i).
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        logprobs, entropy = [], []
        # divided by a tensor: by a Python number, CUDA would multiply by a rounded reciprocal
        t = torch.tensor(temperature, dtype=torch.float32, device=hidden.device)
        for h, target in zip(hidden.split(CHUNK), targets.split(CHUNK)):
            logp = torch.log_softmax((h @ weight.t()).float() / t, -1)
            logprobs.append(logp.gather(1, target[:, None])[:, 0])
            entropy.append(-(logp.exp() * logp).sum(-1))
        ctx.save_for_backward(hidden, weight, targets, t)
        ctx.set_materialize_grads(False)
        return torch.cat(logprobs), torch.cat(entropy)

    @staticmethod
    def backward(ctx, grad, entropy_grad):
        hidden, weight, targets, t = ctx.saved_tensors
        d_hidden, d_weight = [], torch.zeros_like(weight)
        for i, (h, target, g) in enumerate(zip(hidden.split(CHUNK), targets.split(CHUNK), grad.split(CHUNK))):
            z = (h @ weight.t()).float() / t
            dz = -torch.softmax(z, -1)
            dz[torch.arange(len(h), device=h.device), target] += 1
            dz = dz * (g[:, None] / t)
            if entropy_grad is not None:
                logp = torch.log_softmax(z, -1)
                surprise = logp - (logp.exp() * logp).sum(-1, keepdim=True)
                dz -= logp.exp() * surprise * (entropy_grad.split(CHUNK)[i][:, None] / t)
            dz = dz.to(weight.dtype)
            d_hidden.append(dz @ weight)
            d_weight += dz.t() @ h
        return torch.cat(d_hidden), d_weight, None, None


def token_logprobs(hidden, weight, targets, temperature=1.0):
    """
    Log-probs of `targets` (N,) under softmax(hidden @ weight^T / temperature), and the entropies, both (N,) float32.

    hidden (N, H), weight (V, H). Gradients flow to hidden and weight; the log-probs must have one.
    """
    return TokenLogprobs.apply(hidden, weight, targets, temperature)


# ------------------------------------------------------------------------------------------------------------------
# the switch, thrown in the trainer and in the engine's scheduler process alike

_library = None


def enable_batch_invariant():
    """Replaces torch's CPU kernels of mm, addmm, silu and silu_backward in this process by the ones above."""
    global _library
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that aten's kernels are replaced, which is what we want
            for name in ("mm", "addmm", "silu", "silu_backward"):
                _library.impl(name, globals()[name], "CPU", allow_override=True)


def disable_batch_invariant():
    """Gives torch its kernels back: for `batch_invariant=False` and for tests that show the difference."""
    global _library
    if _library is not None:
        _library._destroy()
    _library = None
