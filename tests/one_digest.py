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
from onecurve.cpu import host, loops  # noqa: E402
from onecurve.models import folders  # noqa: E402
from onecurve.models.dense import check_model  # noqa: E402

NUMBERS = np.random.default_rng(0)  # whole numbers alone, which no library computes in a way of its own
CONFIG = train.DEFAULTS | dict(
    scratch_args="num_hidden_layers=1, hidden_size=64, intermediate_size=128",
    lanes=2, leaf_tokens=100, kl_coef=0.1, entropy_coef=0.01, learning_rate=1e-3, lr_decay_steps=9, strict=False,
)  # fmt: skip
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
    return torch.from_numpy(NUMBERS.integers(-(2**23), 2**23, shape)).float() * (scale / 2**23)


def digest(*tensors):
    h = hashlib.sha256()
    for x in tensors:
        h.update(f"{x.dtype} {tuple(x.shape)}".encode() + x.detach().contiguous().numpy().tobytes())
    return h.hexdigest()[:16]


def gradients(out, *inputs):
    """`out`'s results and the gradients of their sum, weighted so that no two count the same."""
    outs = out if isinstance(out, tuple) else (out,)
    weights = [torch.arange(x.numel()).remainder(13).sub(6).div(8).view(x.shape) for x in outs]
    return *outs, *torch.autograd.grad(outs, inputs, weights)


def operators():
    """{name: hash} of every public operator on a CPU, forward and backward."""
    x, w, v = (numbers(*shape).requires_grad_() for shape in ((70, 96), (50, 96), (96,)))
    q, k, y = (numbers(70, heads, 32).requires_grad_() for heads in (4, 2, 2))
    cos, sin = kernels.rope_table(1e6 ** (-torch.arange(16) / 16), torch.arange(70) * 97)
    ids, z, a = torch.arange(70).remainder(9), numbers(70, 50, scale=20), numbers(70, 96).requires_grad_()
    yield "matmul", kernels.matmul(x, w.t()), kernels.matmul(x.t(), a), kernels.matmul(x, w.t(), out=z.clone())
    yield "addmm", kernels.addmm(numbers(50), x, w.t(), alpha=0.3, beta=2)
    yield "rms_norm", *gradients(kernels.rms_norm(x, v, 1e-6, a), x, v)
    yield "norm_rope", *gradients(kernels.norm_rope(q, k, cos, sin, v[:32], v[32:64], 1e-6), q, k, v)
    yield "rope", cos, sin, *kernels.norm_rope(q, k, cos, sin)
    yield "swiglu", *gradients(kernels.swiglu(x, a), x, a)
    yield "attention", *gradients(kernels.attention(q, k, y, kernels.packed_plan([40, 1, 29]), 0.2), q, k, y)
    experts = w[:6], q.view(-1)[:4608].view(6, 8, 96), k.view(-1)[:2304].view(6, 96, 4)
    yield "moe", *gradients(kernels.moe(x, *experts, 2), x, w, q, k)
    yield "token_logprobs", *gradients(kernels.token_logprobs(x, w, ids, 0.7), x, w)
    yield "cut", *gradients(kernels.token_logprobs(x, w, ids, 0.7, 0.9, 20, 0.02), x, w)
    yield "log_softmax", kernels.log_softmax(z, -1, False), kernels.softmax(z, -1, False)
    yield "embedding", kernels.embedding_backward(x.detach(), ids, 9, 3, False)
    yield "draw", kernels.draw(kernels.log_softmax(z, -1, False), ids * 2**40, torch.arange(70))
    yield "bit_sum", kernels.bit_sum(x.detach().view(torch.int32), ids * 2 + 1, torch.arange(96) * 2**50 + 1)
    moved = torch.nn.Parameter(x.detach().clone())
    optimizer = loops.AdamW([moved], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer.state[moved] = dict(step=torch.tensor(2.0), exp_avg=a.detach().clone(), exp_avg_sq=z.new_ones(70, 96))
    moved.grad = a.detach().clone()
    optimizer.step()
    yield "adamw", moved, *optimizer.state[moved].values()


def formulas():
    """{name: hash} of what formulas in plain torch use, with the operators that stand when it is called."""
    x = numbers(40, 1001, scale=4.0).requires_grad_()
    yield "exp", *gradients(torch.exp(x), x)
    yield "log", *gradients(torch.log(x.abs() + 1e-3), x)
    yield "sum", *gradients(x.sum(), x), x.sum(0), x.sum(-1, keepdim=True)
    yield "mean", *gradients(x.mean(), x), x.mean(0), x.mean(-1)
    yield "std", *gradients(x.std(), x), x.std(1, keepdim=True)
    yield "pow", 1.0 / (1e6 ** (torch.arange(0, 128, 2) / 128))
    yield "mm", *gradients(torch.nn.functional.linear(x, x[:7], x[0, :7]), x)
    yield "log_softmax", *gradients(torch.log_softmax(x, -1), x), torch.softmax(x, -1).detach()


def made_up_groups(step):
    """Two groups of four samples, as if the weights of this step had sampled them; three tokens of each were given."""
    rng, rows = random.Random(0), []
    for _ in range(8):
        tokens = [rng.randrange(98) for _ in range(rng.randrange(6, 40))]
        logprobs = [0.0] * 3 + [-rng.randrange(2**20) / 2**18 for _ in tokens[3:]]
        rows.append((tokens, logprobs, [i >= 3 for i in range(len(tokens))]))
    scores = torch.tensor([0.0, 1, 0.3, 0.1, 1, 1, 0, 0.7])
    for first in (0, 4):
        tokens, logprobs, mask = (torch.tensor(sum(part, [])) for part in zip(*rows[first : first + 4]))
        tensors = dict(
            prompt_tokens=torch.zeros(0).long(), tokens=tokens, logprobs=logprobs, loss_mask=mask,
            lengths=torch.tensor([len(row[0]) for row in rows[first : first + 4]]),
            truncated=torch.tensor([i % 3 == 0 for i in range(first, first + 4)]),
            rewards=scores[first : first + 4], weight_version=torch.full_like(tokens, step), sample=torch.arange(4),
            turns=torch.ones(4).long(), turn=torch.zeros_like(tokens), turn_rewards=scores[first : first + 4],
        )  # fmt: skip
        yield sync.Group(tensors, dict(prompt=first // 4, step=step))


def updates(folder, ranks):
    """{algorithm: hash} of the weights, moments and figures after two updates on made-up samples."""
    folders.make_scratch_model(folder, CONFIG)
    yield "weights from scratch", (folder / "model.safetensors").read_bytes()
    for name, change in ALGORITHMS.items():
        c = types.SimpleNamespace(**CONFIG | change)
        c.reference = str(folder)
        trainer = train.Trainer(c, ranks, check_model(folder, vars(c)), folder, "cpu")
        record = []
        for step in range(2):
            metrics, hashes = train.learn(trainer, step, [*made_up_groups(step)], c)
            # not the time it took, nor how far the made-up log-probs are from the trainer's
            outside = ("check_seconds", "logprob_mismatch_tokens", "logprob_mismatch_max")
            record.append(({name: x for name, x in metrics.items() if name not in outside}, hashes))
        yield f"algorithm {name}", json.dumps(record).encode()


def order():
    """The prompts of the first steps."""
    rows = rewards.load_rows(train.DEFAULTS | dict(dataset="arithmetic:0:10", eval_size=20))
    yield "data", json.dumps(rows).encode()
    yield "order", json.dumps([rewards.rows_of_step(len(rows[0]), 8, step, 1) for step in range(20)]).encode()


def main():
    found = {f"torch's own {name}": digest(*x) for name, *x in formulas()}
    kernels.enable_batch_invariant(int(sys.argv[1]))
    host.WORTH_THREADS = 0
    found |= {f"formula {name}": digest(*x) for name, *x in formulas()}
    found |= {f"operator {name}": digest(*x) for name, *x in operators()}
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        ranks = sync.Ranks(0, 1, 1, 0, DeviceMesh.from_group(dist.group.WORLD, "cpu"), None)
        for name, x in (*updates(Path(folder) / "model", ranks), *order()):
            found[name] = hashlib.sha256(x).hexdigest()[:16]
        dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
