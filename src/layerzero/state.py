"""Full state in and out of a sharded model, and the errors for asking in the wrong way."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from layerzero.buffers import Gather, views
from layerzero.engine import Engine
from layerzero.errors import ShardingError
from layerzero.group import ParamGroup, ParamInfo
from layerzero.tensor_parallel import part_of


def param_info(param: torch.Tensor) -> ParamInfo:
    """What a parameter of a sharded model is a slice of.

    Raises:
        ShardingError: if ``param`` is not a sharded parameter.
    """
    info = getattr(param, "_layerzero_info", None)
    if info is None:
        raise ShardingError("param_info: not a parameter of a sharded model (take it from model.parameters() at rest)")
    return info


def gather_full(engine: Engine, group: ParamGroup) -> torch.Tensor:
    """The whole flat buffer [numel] of a param group, from `main` (fp32) or a frozen group's `model`. Collective."""
    axes, rank = group.layout.axes, group.rank
    source, num_axes = (group.model, axes.num_params) if group.main is None else (group.main, axes.num_optimizer)
    inner = group.layout.slice(rank, axes.num_params)
    partial = source.new_empty(inner.numel)
    full = source.new_empty(group.layout.numel)

    def outer_job() -> None:
        Gather(partial, group.layout, rank, group.comms.refresh, range(axes.num_params, num_axes))(source)

    def inner_job() -> None:
        Gather(full, group.layout, rank, group.comms.unshard, range(axes.num_params))(partial)

    # On the lanes that own these process groups, so that the order of collectives is the engine's.
    done = engine.lanes.refresh.run(outer_job, after=[engine.lanes.compute()])
    engine.lanes.unshard.run(inner_job, after=[done]).wait()
    return full


def install_state_dict_hooks(module: nn.Module, engine: Engine) -> None:
    """On a module that owns sharded parameters: refuse `state_dict`, and slice what is loaded."""
    weak_engine = weakref.ref(engine)

    def refuse(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        raise ShardingError(
            f"state_dict() of a sharded model holds slices only (asked for {prefix or type(module).__name__!r}). Use "
            f"lz.full_state_dict(model), which is collective and returns full parameters."
        )

    def slice_full(
        module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        error_messages: list[str] = rest[-1]
        for key, param in module._parameters.items():
            info = getattr(param, "_layerzero_info", None)
            full = state_dict.get(prefix + key)
            if param is None or info is None or full is None:
                continue
            if local_metadata.get("assign_to_params_buffers"):
                raise ShardingError(
                    f"load_state_dict(assign=True) would replace the slice of {info.fqn!r} by a tensor the engine does "
                    f"not know. Use assign=False."
                )
            if tuple(full.shape) == info.global_shape:
                r = info.global_range
                local = part_of(full.detach(), info.tensor_parallel)
                state_dict[prefix + key] = local.reshape(-1)[r.start : r.stop].view(param.shape)
            else:
                error_messages.append(
                    f"size mismatch for {prefix + key}: got {tuple(full.shape)}, expected the full shape "
                    f"{info.global_shape}"
                )
                state_dict[prefix + key] = param.detach()
            engine = weak_engine()
            if engine is not None:
                engine.refresher.mark_all_stale()

    module.register_state_dict_pre_hook(refuse)
    module.register_load_state_dict_pre_hook(slice_full)


def full_state_dict(root: nn.Module, engine: Engine, rank0_only: bool, cpu: bool) -> dict[str, torch.Tensor]:
    """See `layerzero.full_state_dict`."""
    values: dict[int, torch.Tensor] = {}  # by id of the parameter a module may hold now
    keep = not rank0_only or engine.rank == 0  # of each tensor-parallel rank: those have to join
    engine.refresher.wait()
    with torch.no_grad(), engine.traffic.paused():
        for unit in engine.units:
            for group in unit.groups:
                full = gather_full(engine, group)
                for view, param in zip(views(full, group.layout), group.params, strict=True) if keep else ():
                    whole = view if param.spec is None else param.spec.wrap(view).full_tensor()
                    value = whole.to("cpu" if cpu else view.device, copy=True)
                    values[id(param.sharded)] = values[id(param.unsharded)] = value
    ordered: dict[str, torch.Tensor] = {}
    returns = not (rank0_only and engine.tensor is not None and engine.tensor.rank)
    for prefix, module in root.named_modules(remove_duplicate=False) if keep else ():
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or key in module._non_persistent_buffers_set:
                continue
            value = values.get(id(tensor))
            if value is None:  # not the engine's
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                value = whole.detach().to("cpu" if cpu else tensor.device, copy=True) if returns else whole
            if returns:
                ordered[f"{prefix}.{key}" if prefix else key] = value
    return ordered
