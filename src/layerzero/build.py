"""Builds units: materialises, initialises and broadcasts parameters, and lays them out in flat buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from layerzero.buffers import views
from layerzero.collectives import Control
from layerzero.errors import ShardingError
from layerzero.group import Param, ParamGroup, ParamInfo, Runtime, is_cut
from layerzero.layout import GroupLayout, Range, TensorParallel
from layerzero.sharding import Axes
from layerzero.tensor_parallel import Spec, TensorRanks, local_of
from layerzero.unit import Unit
from layerzero.units import OwnedParam, UnitPlan
from layerzero.warnings_ import warn


@dataclass(frozen=True)
class BuildOptions:
    """How parameters become flat buffers.

    Attributes:
        dtype: compute dtype of floating-point parameters.
        buffer_dtype: dtype of floating-point buffers; None leaves them.
        broadcast: take the values of data-parallel rank 0.
        init: gives values to a meta module's own parameters and buffers in place, if given.
        model_fqn: from a name in the module to the one in the whole model.
        tied: by name in the module, the name that copies of the parameter on several stages have in common.
        model_init: otherwise the model's own way to do so (transformers' ``_init_weights``), after torch's.
    """

    axes: Axes
    dtype: torch.dtype
    buffer_dtype: torch.dtype | None
    broadcast: bool
    init: Callable[[nn.Module], None] | None
    model_init: Callable[[nn.Module], None] | None
    model_fqn: Callable[[str], str] = str
    tied: Mapping[str, str] = field(default_factory=dict)


def build_unit(
    plan: UnitPlan,
    modules: Sequence[nn.Module],
    index: int,
    options: BuildOptions,
    runtime: Runtime,
    control: Control,
    buffers: dict[torch.Tensor, torch.Tensor],
) -> Unit:
    """One unit on this rank.

    Args:
        modules: those whose parameters and buffers move with it.
        buffers: what replaced each buffer so far, so that shared ones stay shared; added to.
    """
    device = runtime.lanes.device
    specs = [Spec.of(entry.param) for entry in plan.params]  # meta parameters become plain ones
    _materialise(plan, modules, device, options.init, options.model_init)
    _prepare_buffers(modules, device, options, control, buffers)
    by_kind: dict[tuple[torch.dtype, bool, bool, str | None], list[_Entry]] = {}
    for entry, spec in zip(plan.params, specs, strict=True):
        p = entry.param
        if p.requires_grad and not p.is_floating_point():
            raise ShardingError(
                f"parameter {entry.fqns[0]!r} is trainable and {p.dtype}: only real floats can be trained"
            )
        dtype = options.dtype if p.is_floating_point() else p.dtype
        described = _Entry(entry, spec, _info(entry, spec, plan.name, options, runtime.tensor))
        kind = (dtype, p.requires_grad, is_cut(described.info), described.info.tied_to)
        by_kind.setdefault(kind, []).append(described)
    groups = [
        _build_group(entries, dtype, trainable, options, runtime, control)
        for (dtype, trainable, *_), entries in by_kind.items()
    ]
    return Unit(plan.name, index, groups, is_root=index == 0)


@dataclass(frozen=True)
class _Entry:
    """A parameter to be laid out."""

    owned: OwnedParam
    spec: Spec | None
    info: ParamInfo

    def local(self) -> torch.Tensor:
        """This rank's initial values."""
        param = self.owned.param.detach()
        whole = self.spec is not None and type(param) is torch.Tensor
        return self.spec.local(param) if self.spec is not None and whole else local_of(param)


def _info(
    entry: OwnedParam, spec: Spec | None, unit: str, options: BuildOptions, tensor: TensorRanks | None
) -> ParamInfo:
    name, *aliases = entry.fqns
    tied_to = next((options.tied[fqn] for fqn in entry.fqns if fqn in options.tied), None)
    cut = spec.cut if spec is not None else None
    if cut is None and tensor is not None:
        cut = TensorParallel(None, tensor.rank, tensor.size)
    shape = tuple(entry.param.shape)
    return ParamInfo(name, shape, Range(0, 0), unit, tuple(aliases), cut, options.model_fqn(name), tied_to)


def _build_group(
    entries: list[_Entry],
    dtype: torch.dtype,
    trainable: bool,
    options: BuildOptions,
    runtime: Runtime,
    control: Control,
) -> ParamGroup:
    layout = GroupLayout(tuple(e.info.local_shape for e in entries), options.axes)
    full = torch.zeros(layout.numel, dtype=torch.float32 if trainable else dtype, device=runtime.lanes.device)
    for view, entry in zip(views(full, layout), entries, strict=True):
        view.copy_(entry.local())
    if options.broadcast and full.numel():
        control.broadcast(full.view(torch.uint8))
        if runtime.tensor is not None and not is_cut(entries[0].info):
            runtime.tensor.control.broadcast(full.view(torch.uint8))
    params = []
    for entry in entries:
        if entry.owned.param._backward_hooks or entry.owned.param._post_accumulate_grad_hooks:
            warn(
                f"parameter {entry.info.fqn!r} has gradient hooks, which are lost: register them after lz.shard, on "
                f"the parameters at rest. They then get this rank's slice of the reduced gradient."
            )
        slots = [(module._parameters, key) for module, key in entry.owned.owners]
        params.append(Param(entry.info, slots, trainable, entry.spec))
    return ParamGroup(params, layout, full, dtype, runtime)


def _materialise(
    plan: UnitPlan,
    modules: Sequence[nn.Module],
    device: torch.device,
    init: Callable[[nn.Module], None] | None,
    model_init: Callable[[nn.Module], None] | None,
) -> None:
    """Give meta parameters and buffers memory, then values; refuse to leave any without."""
    empty: dict[nn.Module, list[tuple[str, torch.Tensor]]] = {}
    for entry in plan.params:
        if entry.param.is_meta:
            entry.param = nn.Parameter(_unset(entry.param, device), requires_grad=entry.param.requires_grad)
            for module, key in entry.owners:
                module._parameters[key] = entry.param
                empty.setdefault(module, []).append((key, entry.param))
    for module in modules:
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = new = _unset(buffer, device)
                empty.setdefault(module, []).append((key, new))
    for module in empty:
        if init is not None:
            init(module)
            continue
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
        if model_init is not None:
            model_init(module)
    for module, names in empty.items():
        left = [key for key, _ in names if _is_unset(getattr(module, key))]
        if left:
            raise ShardingError(
                f"{type(module).__name__} in unit {plan.name or '(root)'!r} was built on the meta device and nothing "
                f"gave values to its {', '.join(map(repr, left))}: it has no reset_parameters() that sets them. Pass "
                f"param_init_fn=, a function that initialises one module's own parameters and buffers in place."
            )


def _unset(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Whole also where modules will see a DTensor, so that a module's own initialisation works as it would alone.
    return torch.full(like.shape, _mark(like.dtype), dtype=like.dtype, device=device)


def _mark(dtype: torch.dtype) -> float:
    """What memory without values is filled with; positions in a buffer of zeros would be silently wrong."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return torch.iinfo(dtype).min if dtype.is_signed else 0  # of bools and bytes any value may be meant


def _is_unset(tensor: torch.Tensor) -> bool:
    if not tensor.numel():
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.detach().isnan().any())
    return tensor.dtype.is_signed and bool((tensor == _mark(tensor.dtype)).all())


def _prepare_buffers(
    modules: Sequence[nn.Module],
    device: torch.device,
    options: BuildOptions,
    control: Control,
    done: dict[torch.Tensor, torch.Tensor],
) -> None:
    for module in modules:
        for key, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer not in done:
                cast = options.buffer_dtype if buffer.is_floating_point() else None
                new = buffer.detach().to(device=device, dtype=cast).contiguous()  # expanded ones get own memory
                if options.broadcast and new.numel():
                    control.broadcast(local_of(new).view(-1).view(torch.uint8))
                done[buffer] = new
            module._buffers[key] = done[buffer]
