"""Ranges in profiler traces, and how much of the communication the compute thread had to wait for."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from contextlib import AbstractContextManager
from types import TracebackType

import torch
import torch.distributed as dist

_NOTHING = contextlib.nullcontext()


def span(what: str, unit: str) -> AbstractContextManager[object]:
    """A profiler range ``layerzero.<what> <unit>``; costs next to nothing while no profiler runs.

    Ranges of lanes are on the lanes' threads. torch.profiler shows other threads than its own only with
    ``experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)``; ``layerzero.wait``,
    on the compute thread, shows always.
    """
    # The flag is of the process: the public function asks for the calling thread, and lanes have their own.
    if not getattr(torch.autograd.profiler, "_is_profiler_enabled", True):
        return _NOTHING
    return torch.profiler.record_function(f"layerzero.{what} {unit or '(root)'}")


class LaneJob:
    """What a lane does for one unit: a `span`, and a note that says so in an error raised inside."""

    __slots__ = ("_span", "_unit", "_what")

    def __init__(self, what: str, unit: str) -> None:
        self._what = what
        self._unit = unit

    def __enter__(self) -> None:
        self._span = span(self._what, self._unit)
        self._span.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._span.__exit__(kind, error, trace)
        if error is not None and sys.version_info >= (3, 11):  # which has notes
            unit = f"unit {self._unit!r}" if self._unit else "the root unit"
            rank = dist.get_rank() if dist.is_initialized() else 0
            error.add_note(
                f"layerzero.{self._what} of {unit} failed on rank {rank}. If another rank ended or raised, the cause "
                f"is in its output."
            )


class LaneClock:
    """Host time of one model's thread lanes, in seconds.

    Attributes:
        working: while at least one lane was at work: collectives, waiting for other ranks in them included, and
            the sums and copies around them.
        exposed: while the compute thread waited for a lane.
    """

    def __init__(self) -> None:
        self.working = 0.0
        self.exposed = 0.0
        self._num_working = 0
        self._since = 0.0
        self._lock = threading.Lock()

    def start(self) -> None:
        """A lane starts a closure."""
        with self._lock:
            if not self._num_working:
                self._since = time.perf_counter()
            self._num_working += 1

    def stop(self) -> None:
        """A lane finished a closure."""
        with self._lock:
            self._num_working -= 1
            if not self._num_working:
                self.working += time.perf_counter() - self._since

    def reset(self) -> None:
        """Start from zero; a closure that is under way counts from now."""
        with self._lock:
            self.working = self.exposed = 0.0
            self._since = time.perf_counter()
