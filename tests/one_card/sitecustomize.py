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


def run_on_card_0(args, ports, _, *rest):
    """In the place of SGLang's; by name, since a process that is spawned for it gets it by name."""
    import sglang.srt.managers.scheduler  # noqa: F401

    OnCard0.run(args, ports, 0, *rest)


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
            OnCard0.run = module.run_scheduler_process
            module.run_scheduler_process = run_on_card_0

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, OnCard0())
