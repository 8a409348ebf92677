"""
CUDA graphs, pretended: a capture notes each aten operator and each launch of a Triton kernel with its tensors, a replay
does the same to the same memory. Python that chose them is not asked again, and what would wait for the card raises.
"""

import torch
from pretend import plugin
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


def ours():
    """The operators whose CPU kernels are Python: they are entered, so that what they launch is noted."""
    import kernels

    names = ("mm", "addmm", "_log_softmax", "_softmax")
    return {getattr(torch.ops.aten, name).default: getattr(kernels, name.lstrip("_")) for name in names}


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.steps, self.ours = [], ours()

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default or func is torch.ops.aten.nonzero.default:
            raise RuntimeError(f"{func}: the host waits for the card while a graph is captured")
        if func in self.ours:
            with self:
                return self.ours[func](*args, **kwargs)
        out = func(*args, **kwargs)
        name = func.name()
        before = {x.untyped_storage().data_ptr() for x in tensors_of((args, kwargs))}
        results = tensors_of(out)
        if name.startswith("c10d::"):
            self.note(name, lambda: [w.wait() for w in tree_leaves(func(*args, **kwargs)) if hasattr(w, "wait")])
        elif func._schema.is_mutable:
            self.note(name, lambda: func(*args, **kwargs))
        elif "empty" in name or before & {x.untyped_storage().data_ptr() for x in results}:
            pass  # the same memory at each replay
        else:
            self.note(name, lambda: copy_all(results, func(*args, **kwargs)))
        return out

    def note(self, name, step):
        self.steps.append((name, step))


BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # {bytes of a number: integers as wide}


def bits(x):
    return x.view(BITS[x.element_size()])


def operands(args, kwargs):
    """A launch's tensors, those behind descriptors, too."""
    return [x for x in (getattr(x, "base", x) for x in (*args, *kwargs.values())) if isinstance(x, torch.Tensor)]


def tensors_of(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def copy_all(into, out):
    for x, new in zip(into, tensors_of(out)):
        x.copy_(new)


class CUDAGraph:
    def __init__(self, *_, **__):
        self.recorder = None

    def capture_begin(self, *_, **__):
        self.recorder = plugin.HERE.recorder = Recorder()
        self.recorder.__enter__()

    def capture_end(self):
        self.recorder.__exit__(None, None, None)
        plugin.HERE.recorder = None
        plugin.note("captured", steps=[name for name, _ in self.recorder.steps])

    def replay(self):
        plugin.note("replayed", steps=len(self.recorder.steps))
        with torch.no_grad():
            for _, step in self.recorder.steps:
                step()

    def pool(self):
        return (0, 0)

    def reset(self):
        self.recorder = None


class graph:
    """torch.cuda.graph."""

    def __init__(self, cuda_graph, pool=None, stream=None, **_):
        self.cuda_graph, self.stream = cuda_graph, plugin.stream(stream)

    def __enter__(self):
        torch.cuda.synchronize()  # as torch's own does
        self.stream.__enter__()
        self.cuda_graph.capture_begin()

    def __exit__(self, *_):
        self.cuda_graph.capture_end()
        self.stream.__exit__()


def patch_launches(interpreter):
    """Has a launch noted where a graph is captured, and where an operand is not on the card."""
    plain = interpreter.GridExecutor.__call__

    def ordered(executor, *args, **kwargs):
        given = operands(args, kwargs)
        if not (plugin.IN_ORDER and plugin.some_marked(given)):
            return plain(executor, *args, **kwargs)
        with torch._C.DisableTorchFunction():
            before = [x.clone() for x in given]
            plain(executor, *args, **kwargs)
            changed = [not torch.equal(bits(x), bits(y)) for x, y in zip(given, before)]
        reads, writes = ([x for x, c in zip(given, changed) if c == kind] for kind in (False, True))
        plugin.order.access(reads, writes)

    def launch(executor, *args, **kwargs):
        if len({plugin.is_marked(x) for x in operands(args, kwargs) if x.dim()}) == 2:
            plugin.note("mixed", name=executor.fn.__name__, place=plugin.place_in_project())
        if recorder := getattr(plugin.HERE, "recorder", None):
            recorder.note(executor.fn.__name__, lambda: ordered(executor, *args, **kwargs))
            with _disable_current_modes():
                return ordered(executor, *args, **kwargs)
        return ordered(executor, *args, **kwargs)

    interpreter.GridExecutor.__call__ = launch
