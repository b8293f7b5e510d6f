"""Optimizer states by parameter name, told apart: elementwise tensors, and values for a whole parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from layerzero.checkpoint.manifest import VALUE
from layerzero.checkpoint.model_state import Named
from layerzero.checkpoint.values import encode
from layerzero.errors import CheckpointError

_HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how an optimizer computes, not what: never taken from a checkpoint."""

_NAMES = "param_names"  # what torch keeps when parameters are given with their names; ours are the model's


@dataclass(frozen=True)
class OptimizerState:
    """Of this rank.

    Attributes:
        elementwise: by parameter's name and state, shaped as the parameter at rest.
        scalars: encoded, by parameter's name and state.
        groups: encoded options with the names of the parameters they hold for.
    """

    classes: list[str]
    elementwise: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[tuple[list[str], dict[str, Any]]] = field(default_factory=list)


def as_list(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """One, several or none."""
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def names_of_params(optimizer: Optimizer, named: dict[int, Named]) -> list[list[str]]:
    """By param group, from tensors of the model by identity.

    Raises:
        CheckpointError: one is not of the model.
    """
    for i, group in enumerate(optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            if id(p) not in named:
                raise CheckpointError(
                    f"{type(optimizer).__name__}: parameter {j} of group {i}, of shape {tuple(p.shape)}, is not one of "
                    f"the model's: build the optimizer after lz.shard, from parameters of the model given here"
                )
    return [[named[id(p)].name for p in group["params"]] for group in optimizer.param_groups]


def read_optimizers(optimizers: Sequence[Optimizer], named: dict[int, Named]) -> OptimizerState:
    """Raises: CheckpointError: something in it can't be saved; names it."""
    result = OptimizerState([type(o).__name__ for o in optimizers])
    for optimizer in optimizers:
        scalar_keys = _scalar_keys(optimizer)
        for group, names in zip(optimizer.param_groups, names_of_params(optimizer, named), strict=True):
            options = {k: v for k, v in group.items() if k not in ("params", _NAMES)}
            encoded = {k: encode(v, _refuse_tensor, f"optimizer option {k!r}") for k, v in options.items()}
            result.groups.append((names, encoded))
            for p, name in zip(group["params"], names, strict=True):
                for key, value in optimizer.state.get(p, {}).items():
                    if key == VALUE:
                        raise CheckpointError(f"{type(optimizer).__name__} has a state called {key!r}: rename it")
                    if is_elementwise(value, p, key, scalar_keys):
                        result.elementwise.setdefault(name, {})[key] = value
                    else:
                        where = f"optimizer state {key!r} of {name!r}"
                        result.scalars.setdefault(name, {})[key] = encode(value, _refuse_tensor, where)
    return result


def is_elementwise(value: Any, p: torch.Tensor, key: str, scalar_keys: set[str]) -> bool:
    """Whether a state has a value for every element of ``p`` at rest."""
    if not isinstance(value, torch.Tensor) or value.shape != p.shape:
        return False
    return p.ndim > 0 or key not in scalar_keys


def _scalar_keys(optimizer: Optimizer) -> set[str]:
    """States that are one value even for parameters without dims, where shapes don't tell."""
    keys = {"step"}
    for p, state in optimizer.state.items():
        if isinstance(p, torch.Tensor) and p.ndim:
            keys |= {k for k, v in state.items() if isinstance(v, torch.Tensor) and v.ndim == 0}
    return keys


def _refuse_tensor(tensor: torch.Tensor) -> str:
    raise CheckpointError(
        f"a tensor of shape {tuple(tensor.shape)} is neither one value nor one for every element of its parameter"
    )


def shared_options(groups: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Options that all of ``groups`` (encoded) agree on, and the names of those they don't; without how-options."""
    first, *others = groups
    same = {k: v for k, v in first.items() if k not in (*_HOW, _NAMES) and all(k in o and o[k] == v for o in others)}
    return same, [k for k in first if k not in _HOW and k not in same]
