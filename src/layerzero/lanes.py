"""Lanes: ordered asynchronous work. The only place that knows how asynchrony works.

A lane runs closures in order and returns an event for each. On an accelerator a lane is a stream and its
event a device event; on CPU a lane is one worker thread and its event a lock. The engine is the same for
both: it says what a closure comes `after`, and waits on events.

[Note: adversarial lanes]
A missing wait is a rare wrong number on a GPU and usually no wrong number at all with threads. The
adversarial lane makes it a certain one: a closure runs only when something waits for it ("late") or at a
seeded random legal moment ("random"), and memory that is not gathered yet or no longer is filled with NaN.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from layerzero.mesh import end_gloo_groups
from layerzero.profiling import LaneClock

LaneKind = Literal["auto", "late", "random"]
_kind: ContextVar[tuple[LaneKind, int]] = ContextVar("lane_kind", default=("auto", 0))


class Event(Protocol):
    """Completion of one closure."""

    def wait(self) -> None:
        """Order the caller's work after the closure; raise what it raised."""
        ...

    def is_done(self, timeout: float) -> bool:
        """Whether `wait` would not keep the caller waiting for other ranks, within ``timeout`` seconds."""
        ...


class Lane(Protocol):
    """Closures in order."""

    def run(self, fn: Callable[[], None], after: Sequence[Event | None] = ()) -> Event:
        """Run ``fn`` once everything in ``after`` is done; returns its event at once."""
        ...


class _Done:
    def wait(self) -> None:
        pass

    def is_done(self, timeout: float) -> bool:
        return True


DONE: Event = _Done()


# ---------------------------------------------------------------------------- threads


_is_lane: ContextVar[bool] = ContextVar("is_lane", default=False)  # every thread has a context of its own


class _ThreadEvent:
    __slots__ = ("_clock", "_lock", "error")

    def __init__(self, clock: LaneClock | None) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._lock.acquire()
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        self.error = error
        self._lock.release()

    def wait(self) -> None:
        self.is_done(timeout=-1)
        if self.error is not None:
            raise self.error

    def is_done(self, timeout: float) -> bool:
        done = self._lock.acquire(blocking=False)
        if not done:
            started = time.perf_counter()
            done = self._lock.acquire(timeout=timeout)
            if self._clock is not None and not _is_lane.get():
                self._clock.exposed += time.perf_counter() - started
        if done:
            self._lock.release()
        return done


class ThreadLane:
    """One daemon thread; started at the first closure."""

    def __init__(self, name: str, clock: LaneClock | None = None) -> None:
        self._name = name
        self._clock = clock
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._started = False

    def run(self, fn: Callable[[], None], after: Sequence[Event | None] = ()) -> Event:
        if not self._started:
            self._started = True
            thread = threading.Thread(
                target=_work, args=(self._queue, self._clock), name=f"layerzero-{self._name}", daemon=True
            )
            thread.start()
            weakref.finalize(self, self._queue.put, None)
            _threads[thread] = self._queue
        event = _ThreadEvent(self._clock)
        self._queue.put((fn, after, event))
        return event


_threads: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[Any]] = weakref.WeakKeyDictionary()


@atexit.register
def _end() -> None:
    """Let every lane finish before process groups are torn down; a lane that hangs is left behind, with its groups."""
    for jobs in _threads.values():
        jobs.put(None)
    for thread in list(_threads):
        thread.join(timeout=10)
    if not any(thread.is_alive() for thread in _threads):
        end_gloo_groups()


def _work(jobs: queue.SimpleQueue[Any], clock: LaneClock | None) -> None:
    torch.set_grad_enabled(False)
    _is_lane.set(True)
    clock = clock or LaneClock()
    failure: BaseException | None = None
    while (job := jobs.get()) is not None:
        fn, after, event = job
        if failure is None:  # after a failure later collectives would pair up wrongly across ranks
            try:
                for other in after:
                    if other is not None:
                        other.wait()
                clock.start()
                try:
                    fn()
                finally:
                    clock.stop()
            except BaseException as error:
                failure = error
        event.finish(failure)
        del job, fn, after, event  # an idle thread must not keep buffers alive


# ---------------------------------------------------------------------------- streams


class _StreamEvent:
    __slots__ = ("_event", "_module")

    def __init__(self, module: Any, stream: Any) -> None:
        self._module = module
        self._event = module.Event()
        self._event.record(stream)

    def wait(self) -> None:
        self._module.current_stream().wait_event(self._event)

    def is_done(self, timeout: float) -> bool:
        return True  # the device waits, not the caller


class StreamLane:
    """One high-priority stream of an accelerator."""

    def __init__(self, module: Any, device: torch.device) -> None:
        """``module`` is the device's torch module, such as `torch.cuda`."""
        self._module = module
        self._stream = module.Stream(device=device, priority=-1)

    def run(self, fn: Callable[[], None], after: Sequence[Event | None] = ()) -> Event:
        with self._module.stream(self._stream), torch.no_grad():
            for event in after:
                if event is not None:
                    event.wait()
            fn()
            return _StreamEvent(self._module, self._stream)


# ---------------------------------------------------------------------------- adversarial


class _LateEvent:
    __slots__ = ("_lane", "done", "error")

    def __init__(self, lane: LateLane) -> None:
        self._lane = lane
        self.done = False
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        self.done, self.error = True, error

    def wait(self) -> None:
        while not self.done:
            self._lane.step()
        if self.error is not None:
            raise self.error

    def is_done(self, timeout: float) -> bool:
        return self.done


class LateLane:
    """Runs a closure when something waits for it, or at a seeded random moment before."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._jobs: deque[tuple[Callable[[], None], Sequence[Event | None], _LateEvent]] = deque()
        self._rng = rng
        self._failure: BaseException | None = None  # as in a thread's lane, nothing runs after it

    def run(self, fn: Callable[[], None], after: Sequence[Event | None] = ()) -> Event:
        event = _LateEvent(self)
        self._jobs.append((fn, after, event))
        if self._rng is not None:
            for _ in range(self._rng.randrange(len(self._jobs) + 1)):
                self.step()
        return event

    @torch.no_grad()
    def step(self) -> None:
        """Run the oldest closure, and first what it comes after."""
        if not self._jobs:
            return
        fn, after, event = self._jobs.popleft()
        if self._failure is None:
            try:
                for other in after:
                    if other is not None:
                        other.wait()
                fn()
            except BaseException as error:
                self._failure = error
        event.finish(self._failure)


# ---------------------------------------------------------------------------- the engine's four


_NAMES = ("unshard", "refresh", "reduce", "sync")


@dataclass
class Lanes:
    """The engine's lanes. Each that communicates has process groups of its own.

    Attributes:
        unshard: all-gathers inside the params degree, and frees what it gathered.
        refresh: all-gathers between the optimizer and the params degree.
        reduce: reductions on the inner axes, every micro-batch.
        sync: reductions on the outer axes, last micro-batch only.
        poison: fill memory that holds no valid value with NaN.
        clock: where lanes are threads, how long they worked and were waited for.
    """

    unshard: Lane
    refresh: Lane
    reduce: Lane
    sync: Lane
    poison: bool
    device: torch.device
    module: Any = None  # the device's torch module where lanes are streams
    clock: LaneClock | None = None

    @classmethod
    def make(cls, device: torch.device) -> Lanes:
        """Lanes for ``device``; adversarial ones inside :func:`adversarial`."""
        kind, seed = _kind.get()
        if kind != "auto":
            rng = random.Random(seed) if kind == "random" else None
            return cls(*(LateLane(rng) for _ in _NAMES), poison=True, device=device)
        if device.type in ("cpu", "meta"):
            clock = LaneClock()
            return cls(*(ThreadLane(name, clock) for name in _NAMES), poison=False, device=device, clock=clock)
        return cls.on_streams(torch.get_device_module(device), device)

    @classmethod
    def on_streams(cls, module: Any, device: torch.device) -> Lanes:
        """Lanes that are streams of ``module``."""
        return cls(*(StreamLane(module, device) for _ in _NAMES), poison=False, device=device, module=module)

    @property
    def are_threads(self) -> bool:
        """Whether lanes are threads beside the one that computes, on the host."""
        return self.clock is not None

    def compute(self) -> Event:
        """An event for all compute issued so far by the calling thread."""
        if self.module is None:
            return DONE  # CPU compute is finished when its call returns
        return _StreamEvent(self.module, self.module.current_stream())


@contextlib.contextmanager
def adversarial(kind: Literal["late", "random"] = "late", seed: int = 0) -> Iterator[None]:
    """Models sharded inside get adversarial lanes. For tests; see [Note: adversarial lanes]."""
    token = _kind.set((kind, seed))
    try:
        yield
    finally:
        _kind.reset(token)
