"""
Lesson 10: one seed, three machines.

    uv run learn/lessons/10_machines.py
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLD = dict(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="", ATEN_CPU_CAPABILITY="default")  # one without AVX
MACHINES = {"a CPU of today": {}, "a CPU of 2003": OLD, "a card": dict(TRITON_INTERPRET="1")}


def compute():
    """Prints a hash of each result."""
    sys.path[:0] = map(str, (ROOT, ROOT / "tests"))
    import numpy as np
    import torch

    import kernels

    kernels.FLOAT32 = kernels.INTERPRET
    if kernels.INTERPRET:  # a card's kernels, each operation of which numpy computes
        from pretend.interpreter import install

        install()

    def show(name, x):
        print(name, hashlib.sha256(x.detach().numpy()).hexdigest()[:8])

    rng = np.random.default_rng(1)
    x, w = (torch.from_numpy(rng.integers(-(2**15), 2**15, n)).float() / 2**14 for n in ((40, 200), (200, 70)))
    hidden = x.clone().requires_grad_()
    kernels.token_logprobs(hidden, w.t().contiguous(), torch.arange(40))[0].sum().backward()
    show("torch.log_softmax", torch.log_softmax(x, -1))
    show("ours: x @ w", kernels.matmul(x, w))
    show("ours: log_softmax", kernels.log_softmax(x, -1, False))
    show("ours: the gradient of log-probs", hidden.grad)


def on(env):
    command = [sys.executable, __file__, "compute"]
    return subprocess.Popen(command, env=os.environ | env, stdout=subprocess.PIPE, text=True)


if sys.argv[1:] == ["compute"]:
    compute()
else:
    computing = [on(env) for env in MACHINES.values()]
    results = [process.communicate()[0].splitlines() for process in computing]
    for name, (theirs, *ours) in zip(MACHINES, results):
        print(name)
        if name != "a card":
            print("    torch.log_softmax", "as today's" if theirs == results[0][0] else "with other bits")
        for line in ours:
            print("   ", line)
