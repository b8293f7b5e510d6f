"""Pipeline parallelism: schedules of ``torch.distributed.pipelining`` over sharded stages.

[Note: pipelines]
Every stage is a module of its own, sharded by ``lz.shard`` over its own data-parallel ranks. A schedule runs ``k``
forwards and backwards of each stage, several in flight; `Pipeline.step` makes them one optimizer step:

* All backwards but a stage's last only accumulate, and no forward compares checksums or sends messages.
* The last backward's reductions start as units get ready and keep running while other stages finish: a stage
  first passes its input's gradient on. They are waited for when the schedule is over.
* Then copies of tied parameters add up their gradients. Doing that in the lanes would deadlock: the last stage
  would wait for the first one's gradient before it sends what that one needs to compute it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from layerzero.collectives import Control, SumComm
from layerzero.engine import Engine
from layerzero.errors import ShardingError
from layerzero.grads import largest
from layerzero.group import ParamGroup
from layerzero.mesh import Mesh
from layerzero.module import engine_of
from layerzero.parallel.mesh import ParallelMesh

if TYPE_CHECKING:  # half a second that only pipelines need
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle


@dataclass(frozen=True)
class _Tie:
    """Copies of one parameter on several stages, at my data- and tensor-parallel coordinates."""

    name: str
    groups: tuple[ParamGroup, ...]  # mine, by stage
    comm: SumComm | None  # over the ranks that hold any; None where all are mine
    first_rank: int  # global rank that holds the first stage's copy

    def start_equal(self) -> None:
        """Every copy takes the values of the first stage's."""
        flats = [g.model if g.main is None else g.main for g in self.groups]
        if self.comm is not None:
            self.comm.broadcast(flats[0], self.first_rank)
        for flat in flats[1:]:
            flat.copy_(flats[0])

    def add_up(self) -> None:
        """Every copy gets the sum of all copies' reduced gradients."""
        total, *others = [g.reduced for g in self.groups]
        for other in others:
            total.add_(other)
        if self.comm is not None:
            self.comm.all_reduce_sum(total)
        for other in others:
            other.copy_(total)


class Pipeline:
    """A schedule of torch's pipelining over stages that `layerzero.shard` has sharded.

    Example::

        mesh = lz.ParallelMesh(pp=2)
        stage_module = build_stage(mesh.coordinate("pp"))  # with the whole model's names, or StageNames
        lz.shard(stage_module, config, mesh=mesh)
        stage = PipelineStage(stage_module, mesh.coordinate("pp"), 2, device, group=mesh.pp.get_group())
        pipeline = lz.Pipeline(Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn), mesh)
        pipeline.step(batch, target=target)
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    Half-precision stages pass activations on in ``param_dtype`` when all but the last are sharded with
    ``autocast_output=False``.
    """

    def __init__(
        self, schedule: PipelineScheduleSingle | PipelineScheduleMulti, mesh: DeviceMesh | ParallelMesh
    ) -> None:
        """Make it on every rank of the pipeline, after `layerzero.shard`.

        Args:
            schedule: over stages whose modules are sharded.
            mesh: the pipeline dimension of a DeviceMesh, or a `ParallelMesh`.

        Raises:
            ShardingError: if a stage is not sharded, the schedule splits backwards into inputs' and weights'
                gradients (zero-bubble schedules), or copies of a tied parameter differ in shape or sharding.
        """
        self.schedule = schedule
        self._stages = sorted(_stages_of(schedule), key=lambda stage: stage.stage_index)
        self._engines = [engine_of(stage.submod) for stage in self._stages]
        if _splits_backward(schedule):
            raise ShardingError(
                f"{type(schedule).__name__} computes gradients of weights apart from those of inputs, which sharded "
                f"stages don't support: use ScheduleGPipe, Schedule1F1B or ScheduleInterleaved1F1B"
            )
        dimension = mesh.pp if isinstance(mesh, ParallelMesh) else mesh
        ranks = Mesh.of(dimension) if dimension is not None else Mesh((dist.get_rank(),), 0)
        traffic = self._engines[0].traffic
        group = dimension.get_group() if dimension is not None and ranks.size > 1 else None
        self._control = Control(group, ranks.size, self._engines[0].control.device, traffic)
        self._ties = self._find_ties(ranks)
        with torch.no_grad():
            for tie in self._ties:
                tie.start_equal()
        for engine in self._engines:
            engine.refresher.mark_all_stale()
            if self._stages[0].num_stages > 1:
                engine.grad_source.pipeline = self._control

    # ------------------------------------------------------------------ a step

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """``schedule.step`` with the same arguments and result; gradients are reduced over all ranks afterwards.

        With ``scale_grads`` (torch's default) gradients are means over micro-batches. Another `step` before
        ``zero_grad`` adds to them.

        Raises:
            ShardingError: if the samples don't divide by the schedule's micro-batches, which torch would cut unevenly.
        """
        self._check_samples(args, kwargs)
        scales: dict[Engine, float] = {}
        with contextlib.ExitStack() as stack:
            for stage, engine in zip(self._stages, self._engines, strict=True):
                stack.enter_context(_accumulating(stage, engine, scales))
            result = self.schedule.step(*args, **kwargs)
        with torch.no_grad():
            reduced = [engine.reducer.wait() for engine in self._engines]
            for tie in self._ties:
                if all(group.is_reduced for group in tie.groups):
                    tie.add_up()
            for engine, has_grads in zip(self._engines, reduced, strict=True):
                if has_grads:
                    engine.reducer.attach(scales.get(engine, 1.0))
        return result

    def _check_samples(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if getattr(self.schedule, "_args_chunk_spec", None) or getattr(self.schedule, "_kwargs_chunk_spec", None):
            return  # the user says how to cut
        given = [*((f"argument {i}", value) for i, value in enumerate(args)), *kwargs.items()]
        num = self.schedule._n_microbatches
        for name, value in given:
            if isinstance(value, torch.Tensor) and value.ndim and len(value) % num:
                raise ShardingError(
                    f"Pipeline.step: {name} has {len(value)} samples, which can't be cut into the schedule's {num} "
                    f"micro-batches of equal size; drop or add some"
                )

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """``schedule.eval`` with the same arguments and result, without grad."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for stage in self._stages:  # some schedules scale gradients without having computed any
                stack.enter_context(_replaced(stage, "scale_grads", lambda _factor: None))
            return self.schedule.eval(*args, **kwargs)

    # ------------------------------------------------------------------ norms

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """Norm of all stages' gradients, every element counted once: fp32 scalar, equal everywhere. Collective."""
        order = float(norm_type)
        norms = torch.cat([engine.grad_source.all_norms(order) for engine in self._engines])
        if order == float("inf"):
            own = norms.max() if len(norms) else norms.new_zeros(())  # a stage may have nothing to train
            return largest(own, [self._control])
        return self._control.all_reduce(norms.pow(order).sum(), dist.ReduceOp.SUM).pow(1.0 / order)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all stages' gradients to a global norm; returns the norm before, as `grad_norm` does. Collective.

        Raises:
            RuntimeError: if ``error_if_nonfinite`` and the norm is inf or nan.
        """
        total = self.grad_norm(norm_type)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(f"the norm of order {norm_type} of the pipeline's gradients is {total.item()}")
        params = [p.sharded for e in self._engines for u in e.units for p in u.params if p.sharded.grad is not None]
        nn.utils.clip_grads_with_norm_(params, max_norm, total)
        return total

    # ------------------------------------------------------------------ tied parameters

    def _find_ties(self, ranks: Mesh) -> list[_Tie]:
        mine: dict[str, list[tuple[int, ParamGroup]]] = {}
        for stage, engine in zip(self._stages, self._engines, strict=True):
            for group in (g for u in engine.units for g in u.groups if g.tied_to is not None):
                mine.setdefault(str(group.tied_to), []).append((stage.stage_index, group))
        described = {name: [[i, *_describe(g)] for i, g in copies] for name, copies in mine.items()}
        gathered = [json.loads(text) for text in self._control.gather_bytes(json.dumps(described).encode())]
        ties = []
        for name in sorted({name for held in gathered for name in held}):
            copies = sorted([*copy, rank] for rank, held in enumerate(gathered) for copy in held.get(name, ()))
            _check_copies(name, copies)
            if name not in mine:
                continue
            holders = sorted({ranks.ranks[copy[-1]] for copy in copies})
            first_rank = ranks.ranks[copies[0][-1]]
            groups = tuple(group for _, group in sorted(mine[name], key=lambda copy: copy[0]))
            comm = None
            if len(holders) > 1:
                process_group = Mesh(tuple(holders), holders.index(ranks.ranks[ranks.rank])).new_group()
                assert process_group is not None
                comm = SumComm(process_group, len(holders), "tied", self._engines[0].traffic)
            for i, group in enumerate(groups):
                group.counts = group.counts and ranks.rank == copies[0][-1] and i == 0
            ties.append(_Tie(name, groups, comm, first_rank))
        return ties


def _stages_of(schedule: Any) -> Sequence[Any]:
    return schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]


def _splits_backward(schedule: Any) -> bool:
    orders = [getattr(schedule, name, None) or {} for name in ("pipeline_order", "pipeline_order_with_comms")]
    actions = [action for order in orders for actions in order.values() for action in actions if action is not None]
    return any(a.computation_type.name in ("BACKWARD_INPUT", "BACKWARD_WEIGHT", "OVERLAP_F_B") for a in actions)


@contextlib.contextmanager
def _accumulating(stage: Any, engine: Engine, scales: dict[Engine, float]) -> Iterator[None]:
    """While the schedule runs: only the stage's last backward reduces, and gradients are scaled afterwards."""
    backward = stage.backward_maybe_with_nosync

    def backward_of_stage(backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> Any:
        engine.sync, engine.probing = last_backward, False
        try:
            return backward(backward_type, bwd_kwargs, last_backward=last_backward)
        finally:
            engine.sync, engine.probing = False, True

    def remember_scale(factor: float) -> None:
        scales[engine] = 1.0 / factor

    before = engine.sync
    # Before its first step a stage finds out the shapes of gradients by a backward over its inputs.
    engine.sync, engine.hold, engine.probing = False, True, True
    try:
        with _replaced(stage, "backward_maybe_with_nosync", backward_of_stage):
            with _replaced(stage, "scale_grads", remember_scale):
                yield
    finally:
        engine.sync, engine.hold, engine.probing = before, False, False


@contextlib.contextmanager
def _replaced(stage: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Shadow a method of one object for a while."""
    setattr(stage, name, method)
    try:
        yield
    finally:
        delattr(stage, name)


def _describe(group: ParamGroup) -> list[Any]:
    (param,) = group.params
    cut = param.info.tensor_parallel
    return [
        list(param.info.global_shape), [cut.dim, cut.size] if cut is not None else None, list(group.layout.axes.sizes),
        [group.layout.axes.num_params, group.layout.axes.num_optimizer], group.trainable, str(group.dtype),
        param.info.fqn,
    ]  # fmt: skip


def _check_copies(name: str, copies: list[Any]) -> None:
    if len(copies) < 2:
        raise ShardingError(
            f"parameter {copies[0][-2]!r} of stage {copies[0][0]} is tied to {name!r}, but no other stage has a copy: "
            f"give the same name in StageNames(tied=...) on all of them"
        )
    for copy in copies[1:]:
        if copy[1:-2] != copies[0][1:-2]:
            raise ShardingError(
                f"copies of {name!r} differ: {copies[0][-2]!r} of stage {copies[0][0]} has {copies[0][1:-2]}, "
                f"{copy[-2]!r} of stage {copy[0]} has {copy[1:-2]} (shape, tensor-parallel dim and ranks, axes, "
                f"degrees, trainable, dtype). Shard the stages alike."
            )
