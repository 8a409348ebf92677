"""
What a card may do at the same time: a clock for each stream (Lamport's, as a vector), which grows with each function
that touches memory of the card and learns another stream's where one waits for the other. An access that is not after
the last write is noted as a race, and memory that is given back while another stream may still use it as freed early.

The host has one clock for all threads of a process: a wait in one of them counts for all. What autograd computes inside
of torch is not seen.
"""

import threading
import traceback
import weakref

from pretend import plugin

LOCK = threading.RLock()
HOST = {}  # {stream: its time up to which the host knows that all is done}
WAITS = set("item tolist numpy __bool__ __int__ __float__ __index__ nonzero equal allclose".split())
PENDING = {}  # {id of a collective's Work: the stream on which NCCL has it}
FREED = {}  # {stream: the Uses of its memory that nobody has any more}
LANES = {}  # {name of a group: NCCL's own stream for it}


def learn(clock, other):
    for key, time in other.items():
        clock[key] = max(clock.get(key, 0), time)


class Use:
    """Who wrote a storage last, and who has read it since: {stream: time}."""

    def __init__(self, stream):
        self.home, self.writer, self.readers, self.place = stream, None, {}, ""
        self.recorded = set()  # streams whose use the allocator waits for

    def of_others(self):
        return {**self.readers, **dict([self.writer] if self.writer else [])}


def use_of(x, stream=None):
    """The Use of a tensor's storage; None where nobody has noted one."""
    storage = plugin.storage_of(x)
    if storage is None:
        return None
    if not hasattr(storage, "use") and stream is not None:
        storage.use = Use(stream)
        weakref.finalize(storage, lambda use: FREED.setdefault(stream, []).append(use), storage.use)
        reuse(stream)
    return getattr(storage, "use", None)


def access(reads, writes, stream=None):
    """A function on the card that reads and writes these tensors, on the current stream."""
    if getattr(plugin.HERE, "recorder", None):
        return  # on a card a capture computes nothing
    with LOCK:
        stream = stream or plugin.current_stream()
        clock = stream.clock
        learn(clock, HOST)
        clock[stream] = clock.get(stream, 0) + 1
        for x, writing in (*((x, False) for x in reads), *((x, True) for x in writes)):
            use = use_of(x, stream)
            if use is None:
                continue
            before = [use.writer] if use.writer else []
            before += use.readers.items() if writing else []
            if any(clock.get(other, 0) < time for other, time in before):
                plugin.note("race", place=plugin.place_in_project(), wrote=use.place, shape=[*x.shape])
            if writing:
                use.writer, use.readers, use.place = (stream, clock[stream]), {}, plugin.place_in_project()
            else:
                use.readers[stream] = clock[stream]


def host_reads(name, x):
    """The host looks at memory of its own, which a stream may still be writing."""
    use = use_of(x)
    if use and use.writer and HOST.get(use.writer[0], 0) < use.writer[1]:
        plugin.note("race", name=name, place=plugin.place_in_project(), wrote=use.place, shape=[*x.shape])


def function(name, args, given, results, non_blocking):
    """A function of torch, of tensors on the card, the host, or both."""
    there = {id(plugin.storage_of(x)) for x in given}
    writes = [x for x in results if id(plugin.storage_of(x)) not in there]
    if name.endswith("_") and not name.endswith("__") or name == "__setitem__":
        writes += plugin.tensors_in(args[:1])
    if name in WAITS:
        access(given, [])
        host_waits()
    elif writes:
        access([x for x in given if not any(x is y for y in writes)], writes)
        if len({plugin.is_marked(x) for x in (*given, *writes)}) == 2 and not non_blocking:
            host_waits()


def host_waits(stream=None):
    functions = [frame.f_code.co_name for frame, _ in traceback.walk_stack(None)]
    plugin.note("wait", place=plugin.place_in_project(), functions=functions)
    with LOCK:
        learn(HOST, (stream or plugin.current_stream()).clock)


def reuse(stream):
    """New memory of a stream may be what was freed before: all that used it must be done by then."""
    for use in FREED.pop(stream, ()):
        for other, time in use.of_others().items():
            if other not in use.recorded and max(stream.clock.get(other, 0), HOST.get(other, 0)) < time:
                plugin.note("freed early", place=plugin.place_in_project(), wrote=use.place)


def give_away(storages):
    """Memory that goes at once: the host must know that all that used it are done."""
    for use in (storage.use for storage in storages if hasattr(storage, "use")):
        if any(HOST.get(stream, 0) < time for stream, time in use.of_others().items()):
            plugin.note("freed early", place=plugin.place_in_project(), wrote=use.place)


def record_stream(x, stream):
    if use := use_of(x):
        use.recorded.add(stream)


def collective(group, reads, writes, work):
    """NCCL's stream waits for the current one, which waits for it in turn at once, or at work.wait()."""
    with LOCK:
        current = plugin.current_stream()
        lane = LANES.setdefault(group, plugin.Stream())
        learn(lane.clock, current.clock)
        access(reads, writes, lane)
        if work is None:
            learn(current.clock, lane.clock)
        else:
            PENDING[id(work)] = lane


def waited(work):
    with LOCK:
        if lane := PENDING.pop(id(work), None):
            learn(plugin.current_stream().clock, lane.clock)
