"""
SGLang's loan of memory, pretended: what is made inside of `region` is filled with 0x7F bytes when it is lent, which are
3e38 as numbers and an index beyond all memory, and comes back with them.
"""

import mmap
import os
from contextlib import contextmanager, nullcontext
from pathlib import Path


class Saver:
    enabled = True

    def __init__(self):
        self.regions = {}  # {tag: weak references to storages}
        self.lent = 0  # bytes
        with open(__file__) as file:  # seen in /proc, as the library would be
            self.mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)

    @contextmanager
    def region(self, tag="default", enable_cpu_backup=False):
        from pretend.plugin import HERE

        made = self.regions.setdefault(tag, [])
        HERE.regions = (*getattr(HERE, "regions", ()), made)
        try:
            yield
        finally:
            HERE.regions = HERE.regions[:-1]

    def cuda_graph(self, cuda_graph, **options):
        import torch

        return torch.cuda.graph(cuda_graph, **options)

    def disable(self):
        return nullcontext()

    def lend(self, tag, sign):
        storages = [storage for ref in self.regions.get(tag, ()) if (storage := ref()) is not None]
        self.lent += sign * sum(storage.nbytes() for storage in storages)
        Path(os.environ["PRETEND_LOG"], f"lent.{os.getpid()}").write_text(str(self.lent))
        return storages

    def pause(self, tag=None):
        from pretend.order import give_away
        from pretend.plugin import IN_ORDER, note

        storages = self.lend(tag, 1)
        if IN_ORDER:
            give_away(storages)
        for storage in storages:
            storage.fill_(0x7F)
        note("lent", tag=tag, storages=len(storages))

    def resume(self, tag=None):
        self.lend(tag, -1)


torch_memory_saver = Saver()
configure_subprocess = nullcontext
