"""
Several ranks on one card, by PYTHONPATH alone: in every process of a run, SGLang's schedulers too. NCCL refuses a card
that it finds twice on one host, so each process is a host of its own, and NCCL's ranks talk over sockets.
"""

import importlib.abc
import importlib.util
import os
import sys

os.environ["NCCL_HOSTID"] = f"one card, process {os.getpid()}"  # before NCCL reads it
if "LOCAL_RANK" in os.environ:
    os.environ["LOCAL_RANK"] = "0"  # the card that a rank takes


class OnCard0(importlib.abc.MetaPathFinder):
    """The ranks of an engine would take cards one after the other: here each takes the first."""

    def find_spec(self, name, path, target=None):
        if name != "sglang.srt.managers.scheduler":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        own = spec.loader.exec_module

        def exec_module(module):
            own(module)
            run = module.run_scheduler_process
            module.run_scheduler_process = lambda args, ports, _, *rest: run(args, ports, 0, *rest)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, OnCard0())
