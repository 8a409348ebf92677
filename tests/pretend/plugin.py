"""
Pretend CUDA: `train_grpo.py --device=cuda`, trainer and SGLang's scheduler, on a machine without a card. Control flow
is CUDA's, the Triton kernels run in the interpreter, and what a card would refuse is written down.

A function mode sends what is asked for on 'cuda' to the CPU, and marks its storage as being on the card: the mark is
handed on by every function, and a function of marked and unmarked tensors is one that a card refuses. torch.cuda's
names are stubs; NCCL's groups are gloo's. `note` writes an event to a file of this process, for tests to read.

Not pretended: the compiler, time, NCCL's and CUDA's own errors.
"""

import builtins
import gc
import json
import os
import sys
import threading
import time
import traceback
import types
import weakref
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path

MEMORY = int(os.environ.get("PRETEND_BYTES", 2 << 30))  # of the card
HERE = threading.local()
IN_ORDER = "PRETEND_ORDER" in os.environ  # whether accesses are looked at that nothing keeps in order
ROOT = str(Path(__file__).parents[2])
gc.set_threshold = lambda *_: None  # a collection as often as by default: the interpreter leaves cycles with tensors


def capability(*_):
    """Of the card, (major, minor)."""
    return tuple(map(int, os.environ.get("PRETEND_CAPABILITY", "9.0").split(".")))


def note(event, **what):
    """Appends an event to this process's file in the folder PRETEND_LOG."""
    if folder := os.environ.get("PRETEND_LOG"):
        thread = threading.current_thread().name
        line = dict(event=event, time=time.monotonic(), thread=thread, title=" ".join(sys.argv[:1]), **what)
        with open(f"{folder}/{os.getpid()}.jsonl", "a") as f:
            f.write(json.dumps(line, default=str) + "\n")


def place_in_project():
    """'train_grpo.py:100' of the innermost frame that is the project's own; '' where there is none."""
    for frame, line in traceback.walk_stack(None):
        _, _, file = os.path.abspath(frame.f_code.co_filename).partition(f"{ROOT}/")
        if file and not file.startswith(("tests/", ".venv/")):
            return f"{file}:{line}"
    return ""


# ---- which tensors are on the card


class Held:
    """Bytes of the storages that are on the card, now and at most."""

    now = most = 0

    class Bytes:
        """Of one storage; FSDP2 frees a storage by making it small."""

        size = 0

        def __init__(self, size):
            self.change(size)

        def change(self, size):
            Held.now += size - self.size
            Held.most = max(Held.most, Held.now)
            self.size = size


def storage_of(x):
    x = getattr(x, "_local_tensor", x)  # a DTensor's
    try:
        return x.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a tensor without one
        return None


def is_marked(x):
    storage = storage_of(x)
    return storage is not None and hasattr(storage, "on_card")


def mark(x):
    storage = storage_of(x)
    if storage is None or hasattr(storage, "on_card") or x.is_meta:
        return
    storage.on_card = Held.Bytes(storage.nbytes())
    weakref.finalize(storage, storage.on_card.change, 0)
    for region in getattr(HERE, "regions", ()):
        region.append(weakref.ref(storage))


def tensors_in(xs):
    """The tensors among these arguments or results, and those one list deeper."""
    for x in xs:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from (y for y in x if isinstance(y, torch.Tensor))


def some_marked(tensors):
    return any(map(is_marked, tensors))


def on_card(x):
    """Whether x says 'cuda', as a device or a string."""
    return isinstance(x, str) and x.partition(":")[0] == "cuda" or isinstance(x, torch.device) and x.type == "cuda"


# Functions that may have operands on both places: copies, what changes no element, an index.
BOTH = """copy_ _foreach_copy_ set_ __set__ __get__ __getitem__ __setitem__ index_put_ index_select to type_as is_
is_same_size is_set_to new_empty new_zeros new_ones new_full new_tensor empty_like zeros_like ones_like swap_tensors
shares_memory _has_compatible_shallow_copy_type is_floating_point result_type""".split()


def check_places(func, tensors):
    """Notes a function of tensors on both places, for which a card has no kernel."""
    name = getattr(func, "__name__", str(func))
    marks = {is_marked(x) for x in tensors if x.dim() and not x.is_meta}
    if len(marks) == 2 and name not in BOTH:
        note("mixed", name=name, place=place_in_project())


def pretend_mode():
    from torch.overrides import TorchFunctionMode

    Tensor = torch.Tensor
    properties = {
        Tensor.device.__get__: lambda: torch.device("cuda", torch.cuda.current_device()),
        Tensor.is_cuda.__get__: lambda: True,
        Tensor.is_cpu.__get__: lambda: False,
        Tensor.get_device: lambda: torch.cuda.current_device(),
    }

    names = "item tolist numpy cpu __bool__ __int__ __float__ __index__ nonzero".split()
    WAITS = {getattr(Tensor, name) for name in names}

    class Pretend(TorchFunctionMode):
        def __torch_function__(self, func, kinds, args=(), kwargs=None):
            kwargs = kwargs or {}
            if func is torch.device:
                return func(*args, **kwargs)
            if func in WAITS and getattr(HERE, "recorder", None) and is_marked(args[0]):
                raise RuntimeError(f"{func.__name__}: the host waits for the card while a graph is captured")
            if func in properties:
                return properties[func]() if is_marked(args[0]) else func(*args, **kwargs)
            if func is Tensor.pin_memory:
                return args[0]
            if func is Tensor.cuda:
                return moved_to(args[0], True)
            if func is Tensor.cpu:
                return moved_to(args[0], False)
            asked = any(map(on_card, args)) or any(map(on_card, kwargs.values()))
            elsewhere = is_cpu(kwargs.get("device"))
            if func is Tensor.to and (asked or any(is_cpu(x) for x in (*args[1:], *kwargs.values()))):
                rest = [None if on_card(x) or is_cpu(x) else x for x in args[1:]]
                named = {k: x for k, x in kwargs.items() if k in ("dtype", "copy", "non_blocking")}
                named |= {"dtype": x for x in rest if isinstance(x, torch.dtype)}
                return moved_to(args[0], asked, **named)
            args = tuple("cpu" if on_card(x) else x for x in args)
            kwargs = {k: "cpu" if on_card(x) else x for k, x in kwargs.items() if k != "pin_memory"}
            given = [*tensors_in(args), *tensors_in(kwargs.values())]
            if func is Tensor.to and len(given) > 1:  # to another tensor's place
                return moved_to(args[0], is_marked(args[1]), dtype=args[1].dtype)
            self.look(func, given, args)
            result = func(*args, **kwargs)
            results = [*tensors_in([result])]
            if asked or any(map(is_marked, given)):
                before = {id(storage_of(x)) for x in given}
                for x in results:  # what was on the host and is written to stays there
                    if not elsewhere and id(storage_of(x)) not in before:
                        mark(x)
                if IN_ORDER:
                    name = getattr(func, "__name__", "").partition(".")[0]
                    order.function(name, args, given, results, kwargs.get("non_blocking"))
            elif IN_ORDER:
                for x in given:
                    order.host_reads(getattr(func, "__name__", ""), x)
            return result

        def look(self, func, given, args):
            if given:
                check_places(func, given)
            if str(func).startswith("_c10d_functional") and args[-1] in NCCL:  # DTensor's way
                note("collective", op=str(func), group=args[-1], ranks=NCCL[args[-1]], shape=[*given[0].shape])

    return Pretend


def is_cpu(x):
    return isinstance(x, str) and x == "cpu" or isinstance(x, torch.device) and x.type == "cpu"


def moved_to(x, card, dtype=None, copy=False, non_blocking=False):
    """x on the card or off it: really another tensor where that changes."""
    moves = x.dim() and is_marked(x) != card or is_marked(x) != card
    result = x.to(dtype=dtype or x.dtype, copy=bool(copy or moves))
    if card:
        mark(result)
    if IN_ORDER and (card or is_marked(x)):
        order.function("to", (x,), [x], [result], non_blocking)
    return result


@contextmanager
def inside():
    """The mode, where it is not there already: a thread and autograd's engine begin without any."""
    from torch.overrides import _get_current_function_mode_stack

    if any(type(mode).__name__ == "Pretend" for mode in _get_current_function_mode_stack()):
        yield
    else:
        with Mode():
            yield


def entering(f, marking=lambda given: False):
    """
    f, which autograd's engine, the dispatcher or a thread calls, under the mode. marking: of the tensors it takes,
    whether these and what it gives are on the card.
    """

    @wraps(f)
    def under_the_mode(*args, **kwargs):
        with inside():
            given = [*tensors_in(args)]
            marks = marking(given)
            for x in given if marks else ():
                mark(x)
            result = f(*args, **kwargs)
            for x in tensors_in([result]) if marks else ():
                mark(x)
            return result

    return under_the_mode


# ---- torch.cuda


class Stream:
    count, every = 0, weakref.WeakSet()

    def __init__(self, *_, **__):
        Stream.count += 1
        self.cuda_stream = self.stream_id = Stream.count
        self.device = "cuda"
        self.clock = {}
        Stream.every.add(self)

    def wait_stream(self, other):
        order.learn(self.clock, other.clock)

    def wait_event(self, event):
        order.learn(self.clock, event.clock)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        order.host_waits(self)

    def query(self):
        return True

    def __enter__(self):
        self.outer = current_stream()
        HERE.stream = self

    def __exit__(self, *_):
        HERE.stream = self.outer


class Event:
    def __init__(self, *_, **__):
        self.clock = {}

    def record(self, stream=None):
        self.clock = dict((stream or current_stream()).clock)

    def wait(self, stream=None):
        (stream or current_stream()).wait_event(self)

    def synchronize(self):
        order.host_waits(self)

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


class stream:
    """torch.cuda.stream: one object may be entered again and again."""

    def __init__(self, wanted):
        self.wanted, self.outer = wanted, []

    def __enter__(self):
        self.outer.append(current_stream())
        HERE.stream = self.wanted or self.outer[-1]

    def __exit__(self, *_):
        HERE.stream = self.outer.pop()


DEFAULT = Stream()


def current_stream(*_):
    return getattr(HERE, "stream", DEFAULT)


class device:
    def __init__(self, index=None):
        self.index = index

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def mem_get_info(*_):
    """(free, all) bytes of the card, over the processes that share it: what is lent counts as free."""
    lenders = Path(os.environ.get("PRETEND_LOG", "/nonexistent")).glob("lent.*")
    return MEMORY // 2 + sum(int(lent.read_text() or 0) for lent in lenders), MEMORY


def properties_of(*_):
    major, minor = capability()
    return types.SimpleNamespace(
        name="Pretended", major=major, minor=minor, total_memory=MEMORY, warp_size=32,
        multi_processor_count=132, shared_memory_per_block_optin=232448, L2_cache_size=50 << 20, gcnArchName="",
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, uuid="pretended", is_integrated=False,
    )  # fmt: skip


def answers(**values):
    """Functions that always answer the same; each an object of its own, or torch._dynamo refuses them."""
    return {name: (lambda *_, answer=answer, **__: answer) for name, answer in values.items()}


def chosen_gpu(index=None):
    if index is not None:
        chosen_gpu.index = index if isinstance(index, int) else getattr(index, "index", None) or 0
    return chosen_gpu.index


chosen_gpu.index = 0


def patch_torch(module):
    global torch, Mode
    torch = module
    Mode = pretend_mode()
    global order
    from pretend import order
    from pretend.graph import CUDAGraph, graph

    cuda = torch.cuda
    cards = int(os.environ.get("PRETEND_CARDS", 8))
    names = dict(
        Stream=Stream, Event=Event, stream=stream, StreamContext=type("StreamContext", (stream,), {}),
        current_stream=current_stream, device=device, device_of=device,
        mem_get_info=mem_get_info, get_device_properties=properties_of, set_device=chosen_gpu,
        current_device=lambda: chosen_gpu.index, default_stream=lambda *_: DEFAULT,
        set_stream=lambda s: setattr(HERE, "stream", s), memory_allocated=lambda *_: Held.now,
        max_memory_allocated=lambda *_: Held.most, memory_reserved=lambda *_: Held.now, CUDAGraph=CUDAGraph,
        graph=graph, synchronize=lambda *_: [order.host_waits(s) for s in Stream.every],
        get_device_capability=capability, is_current_stream_capturing=lambda: bool(getattr(HERE, "recorder", None)),
    ) | answers(
        is_available=True, device_count=cards, get_device_name="Pretended", empty_cache=None,
        is_initialized=True, init=None, _lazy_init=None, ipc_collect=None,
        reset_peak_memory_stats=None, manual_seed_all=None, manual_seed=None,
        is_bf16_supported=True, can_device_access_peer=False, memory_stats={}, get_arch_list=["sm_90"],
        graph_pool_handle=(0, 0), _is_in_bad_fork=False,
    )  # fmt: skip
    for name, stub in names.items():
        setattr(cuda, name, stub)
    device_module = torch.get_device_module
    torch.get_device_module = lambda x=None: cuda if x is None or on_card(x) else device_module(x)
    torch.Generator = generator_on_cpu(torch.Generator)
    run = threading.Thread.run
    threading.Thread.run = entering(run)
    Tensor = torch.Tensor
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        own = getattr(Tensor, name)
        setattr(Tensor, name, lambda self, hook, own=own: own(self, entering(hook, bool)))
    Tensor.record_stream = order.record_stream  # torch's own wants a stream of a card
    function = torch.autograd.function.BackwardCFunction
    function.apply = entering(function.apply, bool)
    variable = torch.autograd.Variable
    variable._execution_engine = Engine(variable._execution_engine)
    impl = torch.library.Library.impl
    entered = partial(entering, marking=some_marked)
    torch.library.Library.impl = lambda self, name, f, *args, **kw: impl(self, name, entered(f), *args, **kw)
    resize = torch.UntypedStorage.resize_

    def resize_and_count(storage, size):
        if hasattr(storage, "on_card"):
            storage.on_card.change(size)
        return resize(storage, size)

    torch.UntypedStorage.resize_ = resize_and_count
    patch_groups()
    own_print = builtins.print

    @wraps(own_print)
    def noted_print(*args, **kwargs):
        own_print(*args, **kwargs)
        if args and str(args[0]).startswith("digest "):
            note("digest")

    builtins.print = noted_print
    Mode().__enter__()


def generator_on_cpu(own):
    class Kind(type):
        def __instancecheck__(cls, x):
            return isinstance(x, own)

    class Generator(own, metaclass=Kind):
        def __new__(cls, device="cpu"):
            return own("cpu")

    return Generator


class Engine:
    """Autograd's engine, whose callbacks run under the mode."""

    def __init__(self, own):
        self.own = own

    def queue_callback(self, f):
        self.own.queue_callback(entering(f))

    def __getattr__(self, name):
        return getattr(self.own, name)


# ---- process groups: NCCL's are gloo's, and noted


def patch_groups():
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    patch_work(dist)
    helper, destroy = c10d._new_process_group_helper, dist.destroy_process_group

    def make_group(size, rank, global_ranks, backend, store, group_name, *args, **kwargs):
        kwargs.pop("device_id", None)
        asked = str(backend)
        backend = "gloo" if "nccl" in asked else backend
        if "nccl" in asked:
            kwargs["backend_options"] = None
        made = helper(size, rank, global_ranks, backend, store, group_name, *args, **kwargs)
        group = made[0] if isinstance(made, tuple) else made
        if isinstance(group, dist.ProcessGroup):
            NCCL.update({group_name: [*global_ranks]} if "nccl" in asked else {})
            name = f"{group_name} {store_key(store)}"
            note("group", name=str(group_name), backend=asked, size=size, rank=rank, key=name)
        return made

    def end_group(group=None):
        names = [c10d._world.pg_names[group]] if group is not None else [*c10d._world.pg_names.values()]
        note("destroy begins", names=names)
        destroy(group)
        note("destroy", names=names)

    c10d._new_process_group_helper = make_group
    c10d.destroy_process_group = dist.destroy_process_group = end_group
    for name in ("init_process_group", "new_group"):
        own = getattr(c10d, name)

        def without_device(*args, own=own, **kwargs):
            kwargs.pop("device_id", None)
            return own(*args, **kwargs)

        setattr(c10d, name, wraps(own)(without_device))
        setattr(dist, name, getattr(c10d, name))
    for name in COLLECTIVES:
        own = getattr(c10d, name)

        def noted(*args, own=own, name=name, **kwargs):
            if getattr(HERE, "in_collective", False):  # torch calls itself once more, for the function mode
                return own(*args, **kwargs)
            group = kwargs.get("group") or next((x for x in args if isinstance(x, dist.ProcessGroup)), None)
            group_name = c10d._world.pg_names.get(group)
            if group_name in NCCL:
                first = next(tensors_in(args), None)
                shape = [*first.shape] if first is not None else []
                note("collective", op=name, group=str(group_name), ranks=NCCL[group_name], shape=shape)
            HERE.in_collective = True
            try:
                work = own(*args, **kwargs)
            finally:
                HERE.in_collective = False
            if IN_ORDER and group_name in NCCL:
                first, *others = [*tensors_in(args)] or [None]
                sends = name == "broadcast" and group.rank() == kwargs.get("src")
                reads, writes = (args[:1], []) if sends else (others, [first])
                order.collective(group_name, reads, [x for x in writes if x is not None], work)
            return work

        setattr(c10d, name, wraps(own)(noted))
        setattr(dist, name, getattr(c10d, name))


def patch_work(dist):
    own = dist.Work.wait

    def wait(self, *args):
        done = own(self, *args)
        order.waited(self)
        return done

    dist.Work.wait = wait


NCCL = {}  # {name: ranks} of the groups that were to be NCCL's
COLLECTIVES = (
    "broadcast all_reduce all_gather_into_tensor reduce_scatter_tensor all_to_all_single all_gather barrier".split()
)


def store_key(store):
    return type(store).__name__


# ---- Triton and SGLang


def patch_interpreter(module):
    from pretend.graph import patch_launches
    from pretend.interpreter import install

    install(capability())
    patch_launches(module)


def patch_memory_pool(module):
    module.can_use_store_cache = lambda *_: False  # nvcc would compile it


def patch_parallel_state(module):
    coordinator = module.GroupCoordinator
    own = coordinator.__init__

    def without_nccl(self, *args, **options):
        own(self, *args, **options | dict(use_pynccl=False, use_custom_allreduce=False))

    coordinator.__init__ = without_nccl
    # past the custom operator, which CUDA's dispatch key alone has
    coordinator.all_gather_into_tensor = coordinator._all_gather_into_tensor


def patch_scheduler(module):
    own = module.dispatch_event_loop

    def dispatch(scheduler):
        torch.cuda.synchronize()  # SGLang relies on the time between its start and its first request
        own(scheduler)

    module.dispatch_event_loop = dispatch


def patch_sync(module):
    own = module.WeightSync.publish

    def publish(self, version, *args):
        note("publish", version=version, held=Held.now, most=Held.most)
        own(self, version, *args)

    module.WeightSync.publish = publish
    bit_sums = module.kernels.bit_sums

    def seen(numbers):  # its launch has them as addresses
        tensors = [x for each in numbers for x in each]
        check_places(bit_sums, tensors)
        if IN_ORDER and some_marked(tensors):
            order.access(tensors, [])
        return bit_sums(numbers)

    module.kernels.bit_sums = seen


PATCHES = {
    "sync": patch_sync,
    "sglang.srt.managers.scheduler": patch_scheduler,
    "torch": patch_torch,
    "triton.runtime.interpreter": patch_interpreter,
    "sglang.srt.mem_cache.memory_pool": patch_memory_pool,
    "sglang.srt.distributed.parallel_state": patch_parallel_state,
}
