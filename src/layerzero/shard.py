"""`lz.shard`: choose units, build them, and make the module a `ShardedModule`."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from layerzero.additions import Additions
from layerzero.agreement import check_ranks_agree, describe_config, describe_structure
from layerzero.buffers import HandOvers, PackBuffers
from layerzero.build import BuildOptions, build_unit
from layerzero.checkpoint import load
from layerzero.collectives import AxisComm, Control, Op, Scratch, SumComm, Traffic
from layerzero.config import LayerZeROConfig
from layerzero.desync import DesyncCheck
from layerzero.engine import Engine
from layerzero.errors import ConfigError, DesyncError, LayerZeroError, ShardingError
from layerzero.grads import GradSource
from layerzero.group import Comms, Runtime
from layerzero.hooks import ModuleHook, install_param_hooks
from layerzero.lanes import Lanes
from layerzero.mesh import Mesh, compute_device
from layerzero.module import become_guarded, become_sharded, hooks_by_module
from layerzero.optimizers import mark_replaced, mark_sharded
from layerzero.parallel.mesh import ParallelMesh
from layerzero.parallel.stage import StageNames
from layerzero.precision import Casts
from layerzero.reducer import Reducer
from layerzero.refresh import Refresher
from layerzero.schedule import Schedule, ScheduleOptions
from layerzero.sharding import Axes, Sharding
from layerzero.state import install_state_dict_hooks
from layerzero.tensor_parallel import TensorRanks, find_mesh
from layerzero.unit import Unit
from layerzero.units import UnitPlan, UnitPredicate, UnitSpec, choose_units, find_ignored, plan_units
from layerzero.warnings_ import warn


def shard(
    module: nn.Module,
    config: LayerZeROConfig | None = None,
    *,
    mesh: DeviceMesh | ParallelMesh | None = None,
    sharding: Sharding | str | None = None,
    units: Sequence[UnitSpec] | UnitPredicate | None = None,
    stage: StageNames | None = None,
    **options: Any,
) -> nn.Module:
    """Shard ``module`` in place for data-parallel training; returns it.

    Afterwards ``module.parameters()`` are fp32 slices, plain `nn.Parameter`s of shape ``(k, 1, ..., 1)`` with
    ``k`` possibly 0, under unchanged names; inside forward and backward modules see full-shape parameters in
    the compute dtype. Build the optimizer after this call. Call it on every rank with the same arguments.

    Args:
        module: any module; parameters may be on the meta device. Rank 0's values win unless
            ``sync_module_states=False``.
        config: a configuration; the default for keyword use is `LayerZeROConfig()` with fp32 dtypes.
        mesh: data-parallel dimension(s) of a DeviceMesh, or a `ParallelMesh`, of which dp x cp is used (and its
            zero3_size, where it has one); the whole world if None. Parameters that are DTensors over its
            tensor-parallel dimension stay so.
        sharding: three degrees, or a strategy's name; instead of the configuration's.
        units: modules that are gathered as a whole: class names, classes, modules, or a predicate over
            modules; instead of the configuration's ``transformer_layers``. With neither these nor
            ``min_num_params``, blocks that the model itself declares as indivisible are taken.
        stage: names that matter beyond this module, if it is one stage of a pipeline.
        **options: any key of `LayerZeROConfig`, overriding ``config``.

    Raises:
        ConfigError: bad degrees, unknown options, classes or names not found.
        ShardingError: something in the module can't be sharded, or already is.
        CheckpointError: ``ckpt_load_path`` can't be loaded.
        DesyncError: ranks disagree on configuration or model.
    """
    if torch.is_inference_mode_enabled():
        raise ShardingError("lz.shard inside torch.inference_mode(): its tensors can't be trained; shard outside of it")
    config = _configuration(config, sharding, options)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"lz.shard: expected an nn.Module, got {type(module).__name__}")
    if any(isinstance(m, DistributedDataParallel) for m in module.modules()):
        raise ConfigError(
            "lz.shard: the module is wrapped in DistributedDataParallel, which lz.shard replaces: unwrap it"
        )
    for name, sub in module.named_modules():
        if sub in hooks_by_module:
            raise ShardingError(
                f"{name or type(module).__name__!r} is sharded already: shard the outermost module, once"
            )
    if isinstance(mesh, ParallelMesh):
        config = _with_zero3_size_of(mesh, config)
        mesh = mesh.zero1
    group = Mesh.of(mesh)
    traffic = Traffic()
    control = Control(group.new_group(), group.size, _device(module, config, mesh), traffic)
    if "zero3_size" not in config.model_fields_set:  # the default must not refuse a smaller or odd group
        config = config.replace(zero3_size=math.gcd(config.zero3_size, group.size))
    stage = stage if stage is not None else StageNames()
    stage.check(module)
    plan = _plan_together(module, config, units, group, control)
    _warn_about(module, config, plan)
    places = _Places(group, control, _tensor_ranks(plan, group, control.device, traffic), traffic)
    with traffic.paused():  # rank 0's values go to all, once
        engine, by_module = _build(module, plan, config, places, stage)
    _install(engine, by_module)
    if config.ckpt_load_path is not None:
        engine.resume_pending = load(config.ckpt_load_path, module).has_optimizer
    return module


@dataclass(frozen=True)
class _Places:
    """Ranks that a model is spread over."""

    group: Mesh
    control: Control
    tensor: TensorRanks | None
    traffic: Traffic


@dataclass(frozen=True)
class _Plan:
    """What this rank makes of the configuration."""

    axes: Axes
    ignored: set[nn.Module]
    units: list[UnitPlan]  # the root's first
    tensor_mesh: DeviceMesh | None


def _plan_together(
    module: nn.Module,
    config: LayerZeROConfig,
    units: Sequence[UnitSpec] | UnitPredicate | None,
    group: Mesh,
    control: Control,
) -> _Plan:
    """Plan, and compare with every rank; an error on one rank only must not leave the others waiting for it."""
    check_ranks_agree(describe_config(config), control, group.ranks)
    plan: _Plan | None = None
    failure: LayerZeroError | None = None
    try:
        axes = config.resolve_sharding().resolve(group.size, _node_size(config, group))
        ignored = find_ignored(module, config.ignored_modules or ())
        specs = units if units is not None else (config.transformer_layers or None)
        unit_plans = plan_units(module, choose_units(module, specs, config.min_num_params, ignored), ignored)
        tensor_mesh = find_mesh(((e.fqns[0], e.param) for unit in unit_plans for e in unit.params), group.ranks)
        plan = _Plan(axes, ignored, unit_plans, tensor_mesh)
    except LayerZeroError as error:
        failure = error
    structure = {} if plan is None else describe_structure(module, plan.units, plan.axes, plan.ignored)
    try:
        check_ranks_agree({"construction": str(failure or "ok"), **structure}, control, group.ranks)
    except DesyncError:
        if failure is None:
            raise
    if failure is not None:
        raise failure
    assert plan is not None
    return plan


def _tensor_ranks(plan: _Plan, group: Mesh, device: torch.device, traffic: Traffic) -> TensorRanks | None:
    mesh = plan.tensor_mesh
    if mesh is None:
        return None
    ranks = Mesh.of(mesh)
    lane_group = ranks.new_group()
    if lane_group is None:
        return None
    control = Control(mesh.get_group(), ranks.size, device, traffic)
    return TensorRanks(mesh, ranks.rank, control, SumComm(lane_group, ranks.size, "tensor", traffic))


def _configuration(config: LayerZeROConfig | None, sharding: Sharding | str | None, options: dict[str, Any]):
    if config is None:
        param_dtype = options.get("param_dtype", "fp32")
        options = {"param_dtype": param_dtype, "reduce_dtype": param_dtype, **options}
        config = LayerZeROConfig()
    elif not isinstance(config, LayerZeROConfig):
        raise ConfigError(_not_a_config(config))
    if sharding is not None:
        options = {**options, "sharding": sharding}
    config = config.replace(**options) if options else config
    return config


def _not_a_config(value: object) -> str:
    made = "a LayerZeROConfig"
    if isinstance(value, Mapping):
        made = "LayerZeROConfig.from_dict(values)"
    elif isinstance(value, str | os.PathLike):
        reader = "from_json" if str(value).endswith(".json") else "from_yaml"
        made = f"LayerZeROConfig.{reader}({os.fspath(value)!r})"
    return f"lz.shard: expected a LayerZeROConfig, got {type(value).__name__}: pass {made}, or options by name"


def _with_zero3_size_of(mesh: ParallelMesh, config: LayerZeROConfig) -> LayerZeROConfig:
    if mesh.zero3_size in (None, config.zero3_size):
        return config
    if "zero3_size" in config.model_fields_set:
        raise ConfigError(
            f"zero3_size is {config.zero3_size} in the configuration and {mesh.zero3_size} in the mesh: give one"
        )
    return config.replace(zero3_size=mesh.zero3_size)


def _device(module: nn.Module, config: LayerZeROConfig, mesh: DeviceMesh | None) -> torch.device:
    ignored = tuple(f"{name}." for name in config.ignored_modules or ())
    return compute_device(mesh, [p for name, p in module.named_parameters() if not name.startswith(ignored)])


def _node_size(config: LayerZeROConfig, group: Mesh) -> int | None:
    """The configured node size, else the launcher's where it fits the other degrees."""
    if config.node_size is not None:
        return config.node_size
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not local.isdecimal() or int(local) < 1:
        return None
    per_node = {len(list(ranks)) for _, ranks in groupby(rank // int(local) for rank in group.ranks)}
    if len(per_node) > 1 or not 1 < (node_size := per_node.pop()) < group.size:
        return None
    try:
        config.resolve_sharding().resolve(group.size, node_size)
    except ConfigError:
        return None
    return node_size


def _warn_about(module: nn.Module, config: LayerZeROConfig, plan: _Plan) -> None:
    ignored, axes = plan.ignored, plan.axes
    trainable = [
        n for n, m in module.named_modules() if m in ignored and any(p.requires_grad for p in m.parameters(False))
    ]
    if trainable and axes.world_size > 1:
        warn(
            f"ignored modules hold trainable parameters ({', '.join(trainable[:4])}): their gradients are never "
            f"reduced, so ranks drift apart. Freeze them, wrap them in torch's DistributedDataParallel for replicated "
            f"synchronisation, or do not ignore them."
        )
    if len(plan.units) == 1 and axes.num_params:
        warn(
            f"no units were chosen, so all of {type(module).__name__} is gathered at once. Name the repeated block "
            f"(transformer_layers, units=) or set min_num_params to hold only a few blocks unsharded."
        )


def _build(
    module: nn.Module, plan: _Plan, config: LayerZeROConfig, places: _Places, stage: StageNames
) -> tuple[Engine, dict[nn.Module, Unit]]:
    axes, group, control, traffic = plan.axes, places.group, places.control, places.traffic
    lanes = Lanes.make(control.device)

    def comms(op: Op, which: range) -> dict[int, AxisComm]:
        groups, scratch = group.new_axis_groups(axes, which), Scratch()
        return {axis: AxisComm(groups[axis], axes.sizes[axis], op, axis, traffic, scratch) for axis in which}

    split = max(axes.num_grads, 1) if axes.sizes else 0
    all_comms = Comms(
        unshard=comms("unshard", range(axes.num_params)),
        refresh=comms("refresh", range(axes.num_params, axes.num_optimizer)),
        reduce=comms("reduce", range(split)),
        sync=comms("sync", range(split, len(axes.sizes))),
    )
    hand_overs = HandOvers(lanes)
    runtime = Runtime(
        group.rank, all_comms, lanes, PackBuffers(lanes), hand_overs, config.reduce_torch_dtype, config.offload_grads,
        places.tensor,
    )  # fmt: skip
    options = BuildOptions(
        axes, config.param_torch_dtype, config.buffer_torch_dtype, config.sync_module_states,
        config.param_init_fn,
        getattr(module, "_init_weights", None), stage.in_model, stage.tied,
    )  # fmt: skip
    modules = _modules_of_units(module, plan)
    units, by_module, buffers = [], {}, {}
    for index, unit_plan in enumerate(plan.units):
        unit = build_unit(unit_plan, modules[unit_plan.module], index, options, runtime, control, buffers)
        units.append(unit)
        by_module |= dict.fromkeys(modules[unit_plan.module], unit)
        for entry in unit_plan.params:
            mark_replaced(entry.param, entry.fqns[0])
        unit_plan.params.clear()  # the full parameters of this unit are not needed any more
        unit.register_sharded()
    schedule = Schedule(
        units,
        ScheduleOptions(
            config.prefetch_depth, config.forward_prefetch, config.backward_prefetch == "BACKWARD_PRE",
            config.limit_all_gathers, sys.maxsize if config.keep_num_params == "all" else config.keep_num_params,
        ),
        lanes, traffic,
        DesyncCheck([u.name for u in units], all_comms.unshard, config.desync_check, control.device),
    )  # fmt: skip
    controls = [control] if places.tensor is None else [control, places.tensor.control]
    source = GradSource(units, controls)
    eager = config.backward_reduce_scatter == "BACKWARD_PRE"
    casts = Casts(
        config.param_torch_dtype if config.autocast_input else None,
        torch.float32 if config.autocast_output else None,
    )
    engine = Engine(
        units=units, config=config, axes=axes, rank=group.rank, lanes=lanes, control=control, traffic=traffic,
        schedule=schedule, reducer=Reducer(units, controls, traffic, source, hand_overs, eager),
        refresher=Refresher(units, lanes, control), grad_source=source, casts=casts,
        additions=Additions(module, plan.ignored), tensor=places.tensor,
        model_fqn=stage.in_model,
    )  # fmt: skip
    return engine, by_module


def _modules_of_units(root: nn.Module, plan: _Plan) -> dict[nn.Module, list[nn.Module]]:
    """Every managed module under the unit it lies in, each once."""
    tops = {unit.module for unit in plan.units}
    found: dict[nn.Module, list[nn.Module]] = {top: [] for top in tops}
    seen: set[nn.Module] = set()

    todo = [(root, root)]  # no recursive closure: it would be a cycle that keeps the model alive after `del model`
    while todo:
        module, top = todo.pop()
        if module in plan.ignored or module in seen:
            continue
        seen.add(module)
        top = module if module in tops else top
        found[top].append(module)
        todo += [(child, top) for child in reversed(list(module.children()))]
    return found


def _install(engine: Engine, by_module: dict[nn.Module, Unit]) -> None:
    owners: dict[int, dict[Unit, None]] = {}  # id of a module's `_parameters` -> units of its parameters
    for unit in engine.units:
        for param in unit.params:
            mark_sharded(param.sharded, engine)
            for slots, _ in param.slots:
                owners.setdefault(id(slots), {})[unit] = None
        install_param_hooks(engine, unit)
    tops: set[Unit] = set()
    for module, unit in by_module.items():
        is_top = unit not in tops  # the first module walked of a unit is the unit's own
        tops.add(unit)
        needed = dict.fromkeys([unit] if is_top else []) | owners.get(id(module._parameters), {})
        hook = ModuleHook(engine, module, tuple(needed) or (unit,))
        hooks_by_module[module] = hook
        if needed:
            hook.install(module, is_top)
            install_state_dict_hooks(module, engine)
        if is_top:
            become_sharded(module)
        elif needed and not type(module).__module__.startswith("torch."):
            become_guarded(module)
