"""Ranges in profiler traces, and how much of the communication the compute thread had to wait for."""

from __future__ import annotations

import contextlib
import threading
import time
from contextlib import AbstractContextManager

import torch

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
