"""
Pretend CUDA in every process of a run, spawned schedulers too, by PYTHONPATH alone: each library named below is patched
right after its own import. Nothing is imported here, or torchrun's and multiprocessing's helpers would wait for torch.
"""

import importlib.abc
import importlib.util
import sys
from pathlib import Path

PATCHED = (
    "torch",
    "sync",
    "triton.runtime.interpreter",
    "sglang.srt.managers.scheduler",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.distributed.parallel_state",
)


class Patching(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module as everybody else does, and has pretend.plugin patch it once it is there."""

    def find_spec(self, name, path, target=None):
        if name not in PATCHED:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        own = spec.loader.exec_module

        def exec_module(module):
            own(module)
            from pretend import plugin

            plugin.PATCHES[name](module)

        spec.loader.exec_module = exec_module
        return spec


sys.path.append(str(Path(__file__).parents[2]))
sys.meta_path.insert(0, Patching())
