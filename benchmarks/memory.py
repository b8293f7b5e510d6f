"""Resident memory of a process, as the benchmarks count it."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path


def resident_nbytes(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` (its peak) of this process, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field} in /proc/self/status")


def trim() -> None:
    """Give freed memory back, so that resident bytes are bytes in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
