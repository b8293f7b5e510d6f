"""Checks at construction that all ranks were given the same model and configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from torch import nn

from layerzero.collectives import Control
from layerzero.config import LayerZeROConfig
from layerzero.errors import DesyncError
from layerzero.sharding import Axes
from layerzero.units import UnitPlan


def describe_config(config: LayerZeROConfig) -> dict[str, Any]:
    """Every key of the configuration, by a name a user recognises."""
    return {f"config {k}": v for k, v in config.replace(param_init_fn=None).to_dict().items()}


def describe_structure(
    root: nn.Module, plans: Sequence[UnitPlan], axes: Axes, ignored: set[nn.Module]
) -> dict[str, Any]:
    """Units, parameters and buffers, by a name a user recognises."""
    described: dict[str, Any] = {"axes": list(axes.sizes), "units": [plan.name for plan in plans]}
    for plan in plans:
        for entry in plan.params:
            p = entry.param
            described[f"parameter {entry.fqns[0]}"] = {
                "shape": list(p.shape),
                "dtype": str(p.dtype),
                "requires_grad": p.requires_grad,
                "unit": plan.name,
                "names": entry.fqns,
                "placements": str(getattr(p, "placements", None)),  # of a DTensor
            }
    for prefix, module in root.named_modules():
        for key, buffer in module._buffers.items() if module not in ignored else ():
            if buffer is not None:
                name = f"{prefix}.{key}" if prefix else key
                described[f"buffer {name}"] = {"shape": list(buffer.shape), "dtype": str(buffer.dtype)}
    return described


def check_ranks_agree(described: dict[str, Any], control: Control, ranks: Sequence[int]) -> None:
    """Compare with every rank.

    Raises:
        DesyncError: names what differs, with the value of this rank group's first member and of the one that differs.
    """
    text = json.dumps(described, sort_keys=True).encode()
    digests = control.gather_bytes(hashlib.sha256(text).digest())
    if len(set(digests)) == 1:
        return
    first, *others = [json.loads(t) for t in control.gather_bytes(text)]
    for i, other in enumerate(others, start=1):
        keys = [*first, *(k for k in other if k not in first)]
        for key in sorted(keys, key=lambda k: k != "construction"):  # a failure explains what is absent
            mine, theirs = first.get(key, "(absent)"), other.get(key, "(absent)")
            if mine != theirs:
                raise DesyncError(
                    f"ranks disagree on {key}: rank {ranks[0]} has {json.dumps(mine)}, rank {ranks[i]} has "
                    f"{json.dumps(theirs)}. Build the same model with the same configuration on every rank."
                )
    raise AssertionError("digests differ but texts don't")
