"""Dtypes at the boundary of a sharded model, and walking nested inputs and outputs."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

_LEAVES = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)


@dataclasses.dataclass(frozen=True)
class Casts:
    """What happens to floating-point tensors at the outermost forward.

    Attributes:
        inputs: dtype to cast inputs to; None leaves them.
        outputs: dtype to cast lower-precision outputs to; None leaves them.
    """

    inputs: torch.dtype | None
    outputs: torch.dtype | None

    def cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Floating inputs in the compute dtype; integers, complex numbers and everything else unchanged."""
        if self.inputs is None:
            return args, kwargs
        dtype = self.inputs

        def cast(x: torch.Tensor) -> torch.Tensor:
            return x.to(dtype) if x.is_floating_point() and x.dtype is not dtype else x

        return map_tensors(cast, args), map_tensors(cast, kwargs)

    def cast_outputs(self, outputs: Any) -> Any:
        """Half-precision outputs in the wider dtype, so that losses are computed in it."""
        if self.outputs is None:
            return outputs
        dtype = self.outputs

        def cast(x: torch.Tensor) -> torch.Tensor:
            return x.to(dtype) if x.is_floating_point() and x.dtype.itemsize < dtype.itemsize else x

        return map_tensors(cast, outputs)


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], obj: Any) -> Any:
    """A copy of a nested structure with ``fn`` applied to every tensor; dataclasses are copied shallowly."""
    if isinstance(obj, torch.Tensor):
        return fn(obj)
    if isinstance(obj, _LEAVES):
        return obj
    return pytree.tree_map(lambda leaf: _map_leaf(fn, leaf), obj)


def _map_leaf(fn: Callable[[torch.Tensor], torch.Tensor], leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return fn(leaf)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        new = copy.copy(leaf)
        for f in dataclasses.fields(leaf):
            object.__setattr__(new, f.name, map_tensors(fn, getattr(leaf, f.name)))
        return new
    return leaf


def find_tensors(obj: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Every tensor in a nested structure, looking into the attributes of objects ``depth`` levels down."""
    if isinstance(obj, torch.Tensor):
        yield obj
        return
    if isinstance(obj, _LEAVES) or depth == 0:
        return
    for leaf in pytree.tree_leaves(obj):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif not isinstance(leaf, (*_LEAVES, type, torch.nn.Module)) and not callable(leaf):
            for value in _parts(leaf):
                yield from find_tensors(value, depth - 1)


def _parts(obj: Any) -> Iterator[Any]:
    """What an object that is no pytree container holds: items of a mapping or sequence, attributes, slots."""
    if isinstance(obj, Mapping):
        yield from obj.values()
    elif isinstance(obj, Sequence):
        yield from obj
    yield from getattr(obj, "__dict__", {}).values()
    for cls in type(obj).__mro__:
        for name in vars(cls).get("__slots__", ()):
            yield getattr(obj, name, None)


def require_grad_tensors(obj: Any, exclude: Any = (), since: int = sys.maxsize) -> list[torch.Tensor]:
    """Tensors of a structure that carry gradients and are not among ``exclude``'s.

    Those that were modified in place (``x += ...``) are: their autograd node has a sequence number from ``since`` on.
    """
    if isinstance(obj, torch.Tensor):  # the usual case, without the walk
        return [obj] if obj.requires_grad and obj is not exclude else []
    known = {id(t) for t in find_tensors(exclude)}
    return [t for t in find_tensors(obj) if t.requires_grad and (id(t) not in known or _made_since(t, since))]


def _made_since(tensor: torch.Tensor, since: int) -> bool:
    node = tensor.grad_fn
    return node is not None and node._sequence_nr() >= since
