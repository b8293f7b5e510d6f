"""States of random number generators as plain data, for ``rank_extra=`` of `layerzero.save`."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def rng_state() -> dict[str, Any]:
    """States of Python's, torch's and, where it is imported, numpy's generators, and of this process's accelerator."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, [int(key) for key in keys], *rest)
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned; generators this process does not have are passed over."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        name, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((name, keys, *rest))
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type])
