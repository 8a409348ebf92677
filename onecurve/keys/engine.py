"""
SGLang's engine: its memory, its arguments, and how weights travel to it.
Code: rollout_server.py, onecurve/sglang/. Manual: docs/scale.md.
"""

import os

from configurator import arguments, at_most, choice, named_arguments, on_cpu, positive, power_of_2, roles, untouched

tp_split = 1  # parts into which the sums of o_proj and down_proj are cut, a power of two; rollout_tp divides it
engine_memory = 0.6  # share for weights and cache, of what is free of a GPU when the engine starts
engine_args = ""  # any of SGLang's ServerArgs, such as 'max_running_requests=64, disable_radix_cache=True'
engine_timeout = 600.0  # seconds of silence after which an engine counts as dead
# 'broadcast' or 'ipc' (to an engine of the same rank); '': ipc if colocated on CUDA, else broadcast
weight_sync = ""

SPARE = 8  # tokens beside a sample's that SGLang wants in its context and its cache: with fewer it cuts the sample


def rules(c):
    yield from choice(c, "weight_sync", "broadcast ipc")
    yield from positive(c, "tp_split engine_memory engine_timeout")
    yield from at_most(c, 1, "engine_memory")
    yield from power_of_2(c, "tp_split")
    if not c.batch_invariant:
        yield from untouched(c, "tp_split", "is for --batch_invariant=True")
    why = f"does not divide tp_split={c.tp_split}, the parts of a sum; use a tp_split of which it is a divisor"
    yield "rollout_tp", c.tp_split % c.rollout_tp == 0, why
    yield from arguments(c, "engine_args", "arguments of SGLang's ServerArgs, such as 'max_running_requests=64'")
    tokens = c.max_prompt_tokens + c.max_new_tokens + SPARE
    cache = named_arguments(c.engine_args).get("max_total_tokens", tokens)
    fits = type(cache) is int and cache >= tokens
    yield "engine_args", fits, f"one sample may take max_total_tokens={tokens}; use more"
    trainers, engines = roles(vars(c), c.world)
    why = "engine and trainer must be one process; use --colocate or another transport"
    yield "weight_sync", c.weight_sync != "ipc" or trainers == engines == c.world, why
    if on_cpu(vars(c)):
        yield "dtype", c.dtype != "bfloat16", "is for cards, and this run is on a CPU; use float32"
    else:
        yield "dtype", c.dtype != "float32" or c.batch_invariant, "on a card it needs --batch_invariant=True"
    machine = os.uname().machine
    why = f"SGLang has engines for x86_64 and aarch64, and this is {machine}; use a mode without an engine, such as sft"
    yield "device", machine in ("x86_64", "aarch64") or not (engines and on_cpu(vars(c))), why
