"""
What of a run can be had without an engine, as hashes: a line of JSON {piece: hash}. test_laws.py starts it in a process
per setting, since torch, Numba and MKL read theirs once.

    ATEN_CPU_CAPABILITY=default python tests/one_digest.py 2      # the number of threads
"""

import hashlib
import json
import random
import sys
import tempfile
import types
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import kernels  # noqa: E402
import rewards  # noqa: E402
import sync  # noqa: E402
import train_grpo as train  # noqa: E402
from onecurve.cpu import host  # noqa: E402
from onecurve.models import folders  # noqa: E402
from onecurve.models.dense import check_model  # noqa: E402

NUMBERS = np.random.default_rng(0)  # whole numbers alone, which no library computes in a way of its own
CONFIG = train.DEFAULTS | dict(
    scratch_args="num_hidden_layers=1, hidden_size=64, intermediate_size=128",
    lanes=2,
    leaf_tokens=100,
    kl_coef=0.1,
    entropy_coef=0.01,
    learning_rate=1e-3,
    lr_decay_steps=9,
    strict=False,
)
ALGORITHMS = {
    "grpo, ppo": dict(kl_estimator="k3", importance="truncate", dual_clip=3.0),
    "gae": dict(advantage="gae", kl_in_reward=True, kl_estimator="k1", importance="mask", importance_floor=0.5),
    "rloo, gspo": dict(advantage="rloo", loss="gspo", loss_aggregation="sequence", kl_estimator="k2"),
    "reinforce++, cispo": dict(advantage="reinforce++", loss="cispo", loss_aggregation="constant"),
    "reinforce++_baseline": dict(advantage="reinforce++_baseline", temperature=0.7, weight_decay=0.1),
    "grpo of adapters": dict(lora_rank=4, weight_decay=0.1),
    "distill, pg": dict(advantage="distill", loss="pg", kl_estimator="k1"),
}


def numbers(*shape, scale=2.0):
    drawn = NUMBERS.integers(-(2**23), 2**23, shape)
    return torch.from_numpy(drawn).float() * (scale / 2**23)


def inputs(*shape):
    return numbers(*shape).requires_grad_()


def digest(*tensors):
    h = hashlib.sha256()
    for x in tensors:
        h.update(f"{x.dtype} {tuple(x.shape)}".encode())
        h.update(x.detach().contiguous().numpy().tobytes())
    return h.hexdigest()[:16]


def gradients(out, *inputs):
    """`out`'s results and the gradients of their sum, weighted so that no two count the same."""
    outs = out if isinstance(out, tuple) else (out,)
    weights = []
    for x in outs:
        cycle = torch.arange(x.numel()).remainder(13)
        weights.append(cycle.sub(6).div(8).view(x.shape))
    return *outs, *torch.autograd.grad(outs, inputs, weights)


def operators(module=kernels):
    """(name, tensors ..) of every public operator of the module, forward and backward, of the same inputs each time."""
    global NUMBERS
    NUMBERS = np.random.default_rng(0)
    x = inputs(70, 96)
    w = inputs(50, 96)
    v = inputs(96)
    q = inputs(70, 4, 32)
    k = inputs(70, 2, 32)
    y = inputs(70, 2, 32)
    z = numbers(70, 50, scale=20)
    a = inputs(70, 96)
    ids = torch.arange(70).remainder(9)
    frequencies = 1e6 ** (-torch.arange(16) / 16)
    cos, sin = module.rope_table(frequencies, torch.arange(70) * 97)
    into = module.matmul(x, w.t(), out=z.clone())
    yield "matmul", module.matmul(x, w.t()), module.matmul(x.t(), a), into
    yield "addmm", module.addmm(numbers(50), x, w.t(), alpha=0.3, beta=2)
    yield "rms_norm", *gradients(module.rms_norm(x, v, 1e-6, a), x, v)
    turned = module.norm_rope(q, k, cos, sin, v[:32], v[32:64], 1e-6)
    yield "norm_rope", *gradients(turned, q, k, v)
    yield "rope", cos, sin, *module.norm_rope(q, k, cos, sin)
    yield "swiglu", *gradients(module.swiglu(x, a), x, a)
    attended = module.attention(q, k, y, module.packed_plan([40, 1, 29]), 0.2)
    yield "attention", *gradients(attended, q, k, y)
    router = w[:6]
    gate_up = q.view(-1)[:4608].view(6, 8, 96)
    down = k.view(-1)[:2304].view(6, 96, 4)
    mixed = module.moe(x, router, gate_up, down, 2)
    yield "moe", *gradients(mixed, x, w, q, k)
    plain = module.token_logprobs(x, w, ids, 0.7)
    yield "token_logprobs", *gradients(plain, x, w)
    few = x[:6]
    cut = module.token_logprobs(few, w, ids[:6], 0.7, 0.9, 20, 0.02)
    yield "cut", *gradients(cut, few, w)
    logprobs = module.log_softmax(z, -1, False)
    yield "log_softmax", logprobs, module.softmax(z, -1, False)
    yield "row_sums", module.row_sums(z.double())
    yield "embedding", module.embedding_backward(x.detach(), ids, 9, 3, False)
    yield "draw", module.draw(logprobs, ids * 2**40, torch.arange(70))
    bits = x.detach().view(torch.int32)
    factors = torch.arange(96) * 2**50 + 1
    yield "bit_sums", module.bit_sums([(bits, ids * 2 + 1, factors)])
    moved = torch.nn.Parameter(x.detach().clone())
    moved.grad = a.detach().clone()
    optimizer = module.AdamW([dict(params=[moved])], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer.state[moved] = dict(
        step=torch.tensor(2.0),
        exp_avg=a.detach().clone(),
        exp_avg_sq=z.new_ones(70, 96),
    )
    optimizer.step()
    yield "adamw", moved, *optimizer.state[moved].values()


def formulas():
    """(name, tensors ..) of what formulas in plain torch use, with the operators that stand when it is called."""
    x = numbers(40, 1001, scale=4.0).requires_grad_()
    yield "exp", *gradients(torch.exp(x), x)
    yield "log", *gradients(torch.log(x.abs() + 1e-3), x)
    yield "sqrt", *gradients(torch.sqrt(x.abs()), x)
    yield "sum", *gradients(x.sum(), x), x.sum(0), x.sum(-1, keepdim=True)
    yield "mean", *gradients(x.mean(), x), x.mean(0), x.mean(-1)
    yield "std", *gradients(x.std(), x), x.std(1, keepdim=True)
    yield "pow", 1.0 / (1e6 ** (torch.arange(0, 128, 2) / 128))
    product = torch.nn.functional.linear(x, x[:7], x[0, :7])
    yield "mm", *gradients(product, x)
    yield "log_softmax", *gradients(torch.log_softmax(x, -1), x), torch.softmax(x, -1).detach()


def made_up_groups(step):
    """Two groups of four samples, as if the weights of this step had sampled them; three tokens of each were given."""
    rng = random.Random(0)
    rows = []
    for _ in range(8):
        tokens = [rng.randrange(98) for _ in range(rng.randrange(6, 40))]
        logprobs = [-rng.randrange(2**20) / 2**18 for _ in tokens[3:]]
        rows.append((tokens, [0.0] * 3 + logprobs))
    scores = torch.tensor([0.0, 1, 0.3, 0.1, 1, 1, 0, 0.7])
    for first in (0, 4):
        group = slice(first, first + 4)
        columns = zip(*rows[group])
        tokens, logprobs = (torch.tensor(sum(column, [])) for column in columns)
        lengths = [len(tokens) for tokens, _ in rows[group]]
        places = torch.cat([torch.arange(n) for n in lengths])
        tensors = dict(
            prompt_tokens=torch.zeros(0).long(),
            tokens=tokens,
            logprobs=logprobs,
            loss_mask=places >= 3,
            lengths=torch.tensor(lengths),
            truncated=torch.arange(first, first + 4) % 3 == 0,
            rewards=scores[group],
            weight_version=torch.full_like(tokens, step),
            sample=torch.arange(4),
            turns=torch.ones(4).long(),
            turn=torch.zeros_like(tokens),
            turn_rewards=scores[group],
        )
        yield sync.Group(tensors, dict(prompt=first // 4, step=step))


def updates(folder, ranks):
    """{algorithm: hash} of the weights, moments and figures after two updates on made-up samples."""
    # not the time it took, nor how far the made-up log-probs are from the trainer's
    outside = ("check_seconds", "logprob_mismatch_tokens", "logprob_mismatch_max")
    folders.make_scratch_model(folder, CONFIG)
    yield "weights from scratch", (folder / "model.safetensors").read_bytes()
    for name, change in ALGORITHMS.items():
        c = types.SimpleNamespace(**CONFIG | change | dict(reference=str(folder)))
        trainer = train.Trainer(c, ranks, check_model(folder, vars(c)), folder, "cpu")
        record = []
        for step in range(2):
            metrics, hashes = train.learn(trainer, step, [*made_up_groups(step)], c)
            inside = {name: x for name, x in metrics.items() if name not in outside}
            record.append((inside, hashes))
        yield f"algorithm {name}", json.dumps(record).encode()


def order():
    """The prompts of the first steps."""
    rows = rewards.load_rows(train.DEFAULTS | dict(dataset="arithmetic:0:10", eval_size=20))
    yield "data", json.dumps(rows).encode()
    n = len(rows[0])
    chosen = [rewards.rows_of_step(n, 8, step, 1) for step in range(20)]
    yield "order", json.dumps(chosen).encode()


def main():
    found = {}

    def note(kind, pieces):
        for name, *tensors in pieces:
            found[f"{kind} {name}"] = digest(*tensors)

    note("torch's own", formulas())
    kernels.enable_batch_invariant(int(sys.argv[1]))
    host.WORTH_THREADS = 0
    note("formula", formulas())
    note("operator", operators())
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
        ranks = sync.Ranks(0, 1, 1, 0, mesh, None)
        for name, x in (*updates(Path(folder) / "model", ranks), *order()):
            found[name] = hashlib.sha256(x).hexdigest()[:16]
        dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
