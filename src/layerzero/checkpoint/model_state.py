"""What of sharded models goes into a checkpoint, by name: the same walk for saving and for loading."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from layerzero.checkpoint.reshard import Placement
from layerzero.engine import Engine
from layerzero.errors import CheckpointError
from layerzero.group import Param
from layerzero.layout import Range
from layerzero.module import engine_of, hooks_by_module

Kind = Literal["parameter", "buffer"]


@dataclass(frozen=True)
class Named:
    """A tensor of the model as this rank holds it.

    Attributes:
        name: in the whole model; ``aliases`` are further names of it.
        kind: "parameter" or "buffer".
        tensor: this rank's part at rest.
        placement: where the tensor that ``held`` counts elements of lies in the whole one.
        held: elements of it that ``tensor`` is.
        writes: whether this rank saves it, where it isn't shared by a param group.
    """

    name: str
    aliases: tuple[str, ...]
    kind: Kind
    tensor: torch.Tensor
    placement: Placement
    held: Range
    trainable: bool
    writes: bool

    @property
    def flat(self) -> torch.Tensor:
        """`tensor` as one dimension; a view."""
        return self.tensor.detach().view(-1)


@dataclass(frozen=True)
class ModelState:
    """A model, or one of several pipeline stages, as checkpoints see it.

    Attributes:
        sharded: by param group, in the order of the group's params.
        whole: buffers, and parameters of ignored modules.
        first_rank: global rank of data-parallel rank 0: tells stages and tensor-parallel ranks apart.
        left_out: ignored modules that nothing trains: their weights come from elsewhere.
    """

    engine: Engine
    sharded: list[list[Named]]
    whole: list[Named]
    first_rank: int
    left_out: tuple[str, ...]

    def all(self) -> Iterator[Named]:
        """Everything that has a name."""
        for group in self.sharded:
            yield from group
        yield from self.whole


def named_param(param: Param, in_model: Callable[[str], str]) -> Named:
    """A sharded parameter; ``in_model`` gives names in the whole model."""
    info = param.info
    cut = info.tensor_parallel
    placement = Placement.whole(info.global_shape)
    if cut is not None and cut.dim is not None:
        placement = Placement(info.global_shape, cut.dim, cut.indices(info.global_shape).start, info.local_shape)
    return Named(
        info.model_fqn, tuple(map(in_model, info.aliases)), "parameter", param.sharded, placement, info.global_range,
        param.sharded.requires_grad, writes=cut is None or cut.dim is not None or cut.rank == 0,
    )  # fmt: skip


def check_arguments(call: str, path: object, model: object, optimizer: object) -> None:
    """Refuse arguments in another order than ``path, model, optimizer``.

    Raises:
        CheckpointError: names the first argument that can't be meant.
    """
    models = list(model) if isinstance(model, Sequence) and not isinstance(model, str | bytes) else [model]
    wrong = None
    if not isinstance(path, str | bytes | os.PathLike):
        wrong = f"path: expected a str or a Path, got {type(path).__name__}"
    elif other := [m for m in models if not isinstance(m, nn.Module)]:
        wrong = f"model: expected a sharded nn.Module, or a list of them, got {type(other[0]).__name__}"
    elif isinstance(optimizer, str | bytes | os.PathLike | nn.Module):
        wrong = f"optimizer: expected an optimizer, a list of them or None, got {type(optimizer).__name__}"
    if wrong is not None:
        raise CheckpointError(f"{wrong}. The order is {call}(path, model, optimizer)")


def model_states(model: nn.Module | Sequence[nn.Module], include_ignored: bool) -> list[ModelState]:
    """Of one sharded model, or of the pipeline stages on this rank.

    Raises:
        ShardingError: one is not sharded.
        CheckpointError: two tensors have the same name.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    states = [_model_state(m, include_ignored) for m in models]
    seen: set[str] = set()
    for named in (n for state in states for n in state.all()):
        if named.name in seen:
            raise CheckpointError(f"two tensors of the models given are called {named.name!r}: pass whole-model names")
        seen.add(named.name)
    return states


def _model_state(root: nn.Module, include_ignored: bool) -> ModelState:
    engine = engine_of(root)
    engine.refresher.wait()
    sharded = [
        [named_param(param, engine.model_fqn) for param in group.params]
        for unit in engine.units
        for group in unit.groups
    ]
    params = [param for unit in engine.units for param in unit.params]
    managed = {id(p) for param in params for p in (param.sharded, param.unsharded)}
    cuts = {param.info.tensor_parallel for param in params} - {None}
    writes = engine.rank == 0 and not any(cut.rank for cut in cuts if cut is not None)
    left_out: list[str] = []
    found: dict[int, tuple[torch.Tensor, Kind, list[str]]] = {}
    for prefix, module in root.named_modules(remove_duplicate=False):
        if module not in hooks_by_module:
            below = prefix.startswith(tuple(f"{name}." for name in left_out))
            if not below and not _is_below_kept(root, prefix):
                left_out.append(prefix)
                below = True
            if below and not include_ignored:
                continue
        kinds: tuple[tuple[Kind, Mapping[str, torch.Tensor | None]], ...]
        kinds = (("parameter", module._parameters), ("buffer", module._buffers))
        for kind, tensors in kinds:
            for key, tensor in tensors.items():
                if tensor is None or id(tensor) in managed or key in module._non_persistent_buffers_set:
                    continue
                name = engine.model_fqn(f"{prefix}.{key}" if prefix else key)
                found.setdefault(id(tensor), (tensor, kind, []))[2].append(name)
    whole = [
        Named(
            names[0], tuple(names[1:]), kind, tensor, Placement.whole(tensor.shape), Range(0, tensor.numel()),
            tensor.requires_grad, writes,
        )
        for tensor, kind, names in found.values()
    ]  # fmt: skip
    return ModelState(
        engine, sharded, whole, engine.control.first_global_rank(), tuple(map(engine.model_fqn, left_out))
    )


def _is_below_kept(root: nn.Module, prefix: str) -> bool:
    """Whether the outermost ignored module at or above ``prefix`` is trained, and so has to be saved."""
    module, parts = root, prefix.split(".")
    for part in parts:
        module = getattr(module, part)
        if module not in hooks_by_module:
            return any(p.requires_grad for p in module.parameters())
    return True
