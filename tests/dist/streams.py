"""A simulated accelerator that finds missing stream dependencies on a CPU.

Operations run at once, but each is stamped with the vector clock of the stream it was issued to; recording
and waiting for events copies and merges clocks as a device would order work. Every access to a storage is
then checked: it has to happen after the last write to it, and a write after all reads too. Memory that is
freed goes back to the stream that allocated it, so the stream's next allocation must happen after every
other stream's use, as in torch's caching allocators.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

Clock = dict[int, int]


def merge(into: Clock, other: Clock) -> None:
    for stream, time in other.items():
        into[stream] = max(into.get(stream, 0), time)


class Stream:
    count = 0

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        Stream.count += 1
        self.index = Stream.count
        self.clock: Clock = {self.index: 0}

    def wait_event(self, event: Event) -> None:
        merge(self.clock, event.clock)


class Event:
    def __init__(self) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream) -> None:
        self.clock = dict(stream.clock)


class Device:
    """What the engine uses of ``torch.cuda``."""

    Event = Event
    Stream = Stream

    def __init__(self) -> None:
        self.streams = [Stream()]  # the last one is current; the first is the compute stream
        self.host: Clock = {}

    def current_stream(self) -> Stream:
        return self.streams[-1]

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.streams.append(stream)
        try:
            yield
        finally:
            self.streams.pop()

    def tick(self) -> Stream:
        """Issue one operation to the current stream."""
        stream = self.current_stream()
        merge(stream.clock, self.host)
        stream.clock[stream.index] += 1
        return stream


class _Memory:
    def __init__(self, storage: torch.UntypedStorage, allocated_by: int) -> None:
        self.alive = StorageWeakRef(storage)
        self.allocated_by = allocated_by
        self.write: tuple[int, int] = (0, 0)  # stream, time
        self.reads: Clock = {}


class RaceDetector(TorchDispatchMode):
    """Records every conflict between streams in `races`."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._memory: dict[int, _Memory] = {}
        self._freed: dict[int, list[Clock]] = defaultdict(list)  # by allocating stream: last uses elsewhere
        self.races: list[str] = []
        self.num_ops: Clock = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if "_local_scalar_dense" in name or name.startswith("aten.equal"):
            merge(self._device.host, self._device.current_stream().clock)
        stream = self._device.tick()
        self.num_ops[stream.index] += 1
        if name.startswith("c10d."):
            self._collective(name, stream, args)
            return out
        schema = func._schema
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if views or "empty" in name or name.startswith("aten.detach"):
            if not views:
                self._touch_all(out, stream, write=True, name=name)
            return out
        for spec, value in zip(schema.arguments, args, strict=False):
            write = spec.alias_info is not None and spec.alias_info.is_write
            self._touch_all(value, stream, write, name)
        self._touch_all(out, stream, write=True, name=name)
        return out

    def _collective(self, name: str, stream: Stream, args: Any) -> None:
        first, *others = args
        in_place = "allreduce" in name or "broadcast" in name or "recv" in name or "send" in name
        self._touch_all(first, stream, "send" not in name, name)
        if not in_place:
            self._touch_all(others[0], stream, False, name)

    def _touch_all(self, value: Any, stream: Stream, write: bool, name: str) -> None:
        if isinstance(value, torch.Tensor):
            if value.numel():
                self.touch(value.untyped_storage(), stream, write, name)
        elif isinstance(value, list | tuple):
            for item in value:
                self._touch_all(item, stream, write, name)

    def touch(self, storage: torch.UntypedStorage, stream: Stream, write: bool, name: str) -> None:
        """One access of ``stream``, already ticked."""
        key = storage._cdata
        memory = self._memory.get(key)
        if memory is None:
            self._collect()
            self._allocate(stream, name)
            memory = self._memory[key] = _Memory(storage, stream.index)
        self._require(stream, *memory.write, f"{name} {'writes' if write else 'reads'} what {{}} may still write")
        if write:
            for reader, time in memory.reads.items():
                self._require(stream, reader, time, f"{name} overwrites what {{}} may still read")
            memory.write, memory.reads = (stream.index, stream.clock[stream.index]), {}
        else:
            memory.reads[stream.index] = stream.clock[stream.index]

    def _require(self, stream: Stream, other: int, time: int, what: str) -> None:
        if other and other != stream.index and stream.clock.get(other, 0) < time:
            where = [f"{f.name}:{f.lineno}" for f in traceback.extract_stack() if "/layerzero/" in f.filename][-3:]
            self.races.append(f"stream {stream.index}: {what.format(f'stream {other}')} ({' > '.join(where)})")

    def _collect(self) -> None:
        """Note memory that was freed since the last look."""
        for key in [k for k, m in self._memory.items() if m.alive.expired()]:
            memory = self._memory.pop(key)
            uses = dict(memory.reads)
            merge(uses, dict([memory.write]))
            self._freed[memory.allocated_by].append(uses)

    def _allocate(self, stream: Stream, name: str) -> None:
        """``stream`` may be handed any memory that was freed to it."""
        for uses in self._freed.pop(stream.index, []):
            for other, time in uses.items():
                self._require(stream, other, time, f"{name} allocates memory that {{}} may still use")


@contextlib.contextmanager
def simulated_streams() -> Iterator[RaceDetector]:
    """Models sharded inside run on simulated streams; leave the context after the last step."""
    from layerzero.buffers import TransientBuffer
    from layerzero.lanes import Lanes

    device = Device()
    detector = RaceDetector(device)
    make, alloc, free = Lanes.make, TransientBuffer.alloc, TransientBuffer.free

    def tracked(change: Any, name: str) -> Any:
        def method(buffer: TransientBuffer) -> None:
            change(buffer)
            detector.touch(buffer.flat.untyped_storage(), device.tick(), True, name)

        return method

    Lanes.make = classmethod(lambda cls, on: cls.on_streams(device, on))  # type: ignore[assignment]
    TransientBuffer.alloc = tracked(alloc, "alloc")
    TransientBuffer.free = tracked(free, "free")
    try:
        with detector:
            yield detector
    finally:
        Lanes.make, TransientBuffer.alloc, TransientBuffer.free = make, alloc, free
