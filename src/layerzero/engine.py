"""One sharded model at run time: what happens at each point of a forward and a backward.

[Note: when a unit's backward is over]
Autograd runs a parameter's gradient accumulation once per backward, after every use of the parameter in
the graph. So once all trainable parameters of a unit have fired, its gradients are final and none of their
weights is needed any more; this covers modules used twice and parameters used in several places. Two
cases need more:

* Frozen parameters never fire, and unused ones don't either. A unit that has them (or had them in an
  earlier backward) passes its inputs through an identity whose backward runs when all gradients of the
  inputs are done; the unit's own nodes were created later and therefore run before it.
* Every reentrant checkpoint runs a backward of its own inside, and a parameter fires once in each of those
  and once in the surrounding one. When it did in one of them, that one needs the weights no longer. Its
  gradient is final once it fired as often as in the last backward with the same forwards; before one is
  known, as often as there were forwards without grad that may be recomputed, and forwards with grad.

The weights stay until another unit is needed, for they may have been used through ``.detach()`` too: autograd runs a
parameter's accumulation at once, but what is left of the unit's nodes before those of units that ran earlier.

Whatever is not over by then is over at the end of the backward, which autograd announces by a callback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

import torch

from layerzero.additions import Additions
from layerzero.collectives import Control, Traffic
from layerzero.config import LayerZeROConfig
from layerzero.errors import ShardingError
from layerzero.grads import GradSource, is_added_to, is_pending
from layerzero.lanes import Lanes
from layerzero.layout import GroupLayout
from layerzero.precision import Casts
from layerzero.reducer import Reducer
from layerzero.refresh import Refresher
from layerzero.running import Running
from layerzero.schedule import Schedule
from layerzero.sharding import Axes
from layerzero.tensor_parallel import TensorRanks
from layerzero.unit import Unit, Use


@dataclass(eq=False)
class Engine:
    """Reacts to forwards and backwards of a sharded module. Made by ``lz.shard``; see there.

    Attributes:
        units: in registration order, the root first.
        rank: this process's data-parallel rank.
        tensor: tensor-parallel ranks, if parameters are DTensors.
        sync: whether the next backward reduces to the optimizer shards (false inside ``no_sync()``).
        hold: leave the reductions of a synchronised backward running; the reducer's `wait` and `attach` follow.
        probing: a backward now is one over inputs only, for the shapes of gradients: nothing is reduced.
        running: forwards that are under way.
        model_fqn: from a name in this module to the one in the whole model, of which it may be a stage.
        resume_pending: whether the weights come from a checkpoint whose optimizer states were not asked for yet.
    """

    units: list[Unit]
    config: LayerZeROConfig
    axes: Axes
    rank: int
    lanes: Lanes
    control: Control
    traffic: Traffic
    schedule: Schedule
    reducer: Reducer
    refresher: Refresher
    grad_source: GradSource
    casts: Casts
    additions: Additions
    tensor: TensorRanks | None = None
    model_fqn: Callable[[str], str] = str
    sync: bool = True
    hold: bool = False
    probing: bool = False
    running: Running = field(default_factory=Running)
    resume_pending: bool = False
    _has_lost_grads: bool = False  # a backward failed after some of its gradients were added to earlier ones
    _lost_synced: bool = True  # only in synchronised ones, which leave earlier synchronised gradients as they are
    _may_recompute: bool = False  # forwards without grad in this pass may be a reentrant checkpoint's
    _has_grad: bool = True  # this pass
    _num_passes: int = 0
    _over: list[Unit] = field(default_factory=list)  # all their gradients are there
    _in_backward: bool = False
    _graph_task: int = -1

    @property
    def layouts(self) -> list[GroupLayout]:
        """Layout of every param group."""
        return [g.layout for u in self.units for g in u.groups]

    @property
    def layouts_trainable(self) -> list[GroupLayout]:
        """Layout of every trainable param group."""
        return [g.layout for u in self.units for g in u.trainable_groups]

    @property
    def layouts_frozen(self) -> list[GroupLayout]:
        """Layout of every frozen param group."""
        return [g.layout for u in self.units for g in u.groups if not g.trainable]

    # ------------------------------------------------------------------ forward

    def in_backward(self) -> bool:
        """Whether the caller runs inside a backward; clears up after one that raised."""
        running = torch._C._current_graph_task_id() != -1
        if self._in_backward and not running:
            self._abandon_backward()
        return running

    def begin_pass(self, of_root: bool) -> None:
        """The outermost forward starts, outside a backward; ``of_root`` if it is the whole model's."""
        self._has_grad = grad_enabled = torch.is_grad_enabled()
        self._may_recompute = grad_enabled or not of_root
        self._num_passes += 1
        if of_root and grad_enabled:
            self.additions.refuse(p.sharded for u in self.units for p in u.params)
        self.schedule.begin_pass(grad_enabled)
        self.refresher.begin_pass(grad_enabled, not self.sync, reversed(self.reducer.order), self._drop)

    def end_pass(self) -> None:
        """The outermost forward is over."""
        if not self._has_grad:
            self.schedule.end_pass()
            self.refresher.wait()
            for unit in self.units:
                if unit.is_root:
                    self._release(unit)
        self.schedule.to_rest()

    def pre_forward(self, unit: Unit, in_backward: bool) -> None:
        """``unit``'s parameters are needed from here on."""
        if unit.forward_depth == 0:
            try:
                if in_backward:
                    self._end_over(unit)
                self.schedule.demand(unit, in_backward)
            except BaseException:
                self._release(unit)
                raise
        unit.forward_depth += 1

    def post_forward(self, unit: Unit, use: Use | None, grad_tensors: list[torch.Tensor]) -> None:
        """The forward that needed ``unit`` is over; ``grad_tensors`` are its outputs that carry gradients."""
        unit.forward_depth -= 1
        if use is not None:
            for tensor in grad_tensors:
                tensor.register_hook(lambda _grad: self.pre_backward(use))
        if unit.forward_depth:
            return
        if self.in_backward():
            return  # a recomputation: unsharded until the unit's gradients are done
        if use is None and self._may_recompute and unit.num_trainable:
            unit.num_no_grad_forwards += 1
        if use is not None and grad_tensors and (unit.is_root or self.schedule.needed_next(unit)):
            return
        self._release(unit)

    def begin_use(self, unit: Unit, in_backward: bool) -> Use | None:
        """Called in a forward; None where no backward can follow."""
        if not torch.is_grad_enabled():
            return None
        use = Use(unit, in_backward, self._num_passes)
        if not in_backward:  # a recomputed forward stands for one that is counted
            unit.pending.add(use)
        return use

    def lend_copies(self, unit: Unit) -> None:
        """Let modules see copies of the full parameters, which autograd may keep after the bytes are given back."""
        use = Use(unit)
        unit.pending.add(use)
        unit.lend({p: p.unsharded.clone() for p in unit.params})
        for copy in unit.lent.values():
            if copy.requires_grad:
                copy.register_hook(lambda _grad: self._copy_reached(use))

    def _copy_reached(self, use: Use) -> None:
        self._enter_backward()
        use.unit.begun.add(use)

    def end_unsharded(self, unit: Unit) -> None:
        """One ``model.unsharded()`` over ``unit`` ended."""
        unit.held -= 1
        try:
            if not unit.held:
                with torch.no_grad():
                    unit.take_back()
                    for group in unit.groups:
                        group.write_back()
        finally:
            unit.forward_depth -= 1
            self._release(unit)

    def _release(self, unit: Unit) -> None:
        if not unit.in_use:
            self.schedule.reshard(unit)

    def _drop(self, unit: Unit) -> None:
        if not unit.in_use:
            self.schedule.drop(unit)

    # ------------------------------------------------------------------ backward

    def _enter_backward(self) -> None:
        if self._in_backward:
            return
        if self._has_lost_grads:
            self._check_lost_grads()
        self._in_backward = True
        self._graph_task = torch._C._current_graph_task_id()
        if _inside_nested_backward():
            self._abandon_backward()
            raise ShardingError(
                "a reentrant activation checkpoint surrounds the whole backward of the sharded model, so the end of "
                "the backward can't be seen. Use checkpoint(..., use_reentrant=False), or checkpoint inside the model."
            )
        self.reducer.sync = self.sync
        self.schedule.enter_backward(last_use=self.sync)
        torch.autograd.Variable._execution_engine.queue_callback(_BackwardEnd(self))

    def _check_lost_grads(self) -> None:
        lost = is_pending if self._lost_synced else is_added_to
        pending = [p for u in self.units for p in u.params if lost(p.sharded.grad)]
        if pending:
            self._clear_unsharded_grads()
            raise ShardingError(
                f"an earlier backward failed half-way, and the gradients of this step's micro-batches are incomplete "
                f"since: {pending[0].info.fqn!r} and {len(pending) - 1} more. Call zero_grad() and start the step anew."
            )
        self._has_lost_grads, self._lost_synced = False, True

    def pre_backward(self, use: Use) -> None:
        """A gradient arrived at an output of this use of the unit."""
        if torch.is_grad_enabled():
            raise ShardingError(
                f"backward with create_graph=True through {use.unit!r}: gradients of gradients are not supported, "
                f"because sharded parameters are freed and reduced as the first backward runs."
            )
        self._enter_backward()
        unit = use.unit
        use.task = torch._C._current_graph_task_id()
        over = unit.num_trainable > 0 and not unit.track_inputs and unit.all_arrived_in(use.task)
        if over or unit.reduced or use in unit.active:
            return
        self._end_over(unit)
        self.schedule.prefetch_after_backward()  # before this unit's backward counts as begun
        unit.active.add(use)
        unit.begun.add(use)
        self.schedule.demand(unit, in_backward=True)
        self.reducer.advance()

    def inputs_done(self, use: Use) -> None:
        """All gradients of the tracked inputs of this use are computed."""
        self._enter_backward()
        unit = use.unit
        unit.active.discard(use)
        unit.pending.discard(use)
        if unit.fires and not unit.pending and (not unit.is_reentrant or unit.all_arrived()):
            self._gradients_final(unit)
        if not unit.in_use and not unit.stays_after(use):
            self.schedule.backward_over(unit)

    def grad_arrived(self, unit: Unit, param: torch.Tensor) -> None:
        """A parameter's gradient was accumulated."""
        if not self._in_backward:
            self._enter_backward()
        if unit.reduced:
            raise ShardingError(
                f"{unit!r} got a gradient after it was reduced: a parameter that went unused in other steps was used "
                f"again in a way that can't be foreseen. Make that part a unit of its own, or use "
                f"checkpoint(..., use_reentrant=False) if it is checkpointed."
            )
        grad = param.grad
        if grad is not None and (grad.requires_grad or grad.layout is not torch.strided):
            what = "gradients of gradients (create_graph=True)" if grad.requires_grad else f"gradients of {grad.layout}"
            raise ShardingError(f"{unit!r} got {what}, which are not supported; sparse ones come from sparse=True")
        task = torch._C._current_graph_task_id()
        unit.fires[task] = fires = unit.fires.get(task, 0) + 1
        unit.fired_nested |= task != self._graph_task
        if fires < unit.num_trainable and not unit.is_reentrant:
            return  # for speed: what follows would find the same
        final = unit.all_arrived()
        if final:
            self._gradients_final(unit)
        if final or unit.all_arrived_in(task):
            # A checkpoint inside the unit's forward gives gradients in a task nested in the one of the unit's use.
            unit.active = {use for use in unit.active if use.tracked or not (final or use.task == task)}
            if not unit.in_use and (final or not unit.stays_after(None)):
                self._over.append(unit)

    def _end_over(self, now: Unit) -> None:
        """Units whose gradients were all there before ``now`` is needed; see [Note: when a unit's backward is over]."""
        over, self._over = self._over, []
        for unit in over:
            if unit is not now and not unit.in_use:
                self.schedule.backward_over(unit)

    def _gradients_final(self, unit: Unit) -> None:
        if not unit.grads_ready:
            self.reducer.ready(unit)

    def end_backward(self) -> None:
        """Autograd is done with the outermost backward."""
        if not self._in_backward:
            return
        if self.probing:
            self._abandon_backward()
            return
        with torch.no_grad():
            for unit in self.units:
                if any(not unit.all_arrived_in(task) for task in unit.fires):
                    unit.track_inputs = True  # some went unused: watch the inputs from now on
                unit.learn_fires()
            try:
                self.schedule.announce_end()  # while it is known which units' backwards began
                self._clear_backward_state()
                self.reducer.finish(self.hold)
            except BaseException:  # no room for a reduction, for example, or a hook of the user's
                self._clear_backward_state()
                self._forget_gradients()
                raise
            finally:
                self.schedule.end_backward()
                self.refresher.backward_over()
                if self.reducer.sync:
                    self.refresher.wait()
                    self.refresher.mark_all_stale()

    def backward_dropped(self, graph_task: int) -> None:
        """Autograd gave up the backward with this id; without effect after `end_backward`."""
        if self._in_backward and self._graph_task == graph_task:
            self._abandon_backward()

    def _clear_backward_state(self) -> None:
        self._in_backward = False
        self._over.clear()
        for unit in self.units:
            unit.active.clear()
            unit.pending -= unit.begun
            unit.begun.clear()
            unit.fires.clear()
            unit.fired_nested = False
            unit.num_no_grad_forwards = 0

    def abandon_forward(self) -> None:
        """An interrupt unwound all forwards: only ``unsharded()`` contexts still need parameters."""
        self.running.abandon()
        for unit in self.units:
            unit.forward_depth = unit.held
            unit.pending.clear()
            self._drop(unit)

    def forget_interrupted(self) -> None:
        """Call where `running` has calls from outside: some may have been unwound."""
        if self.running.were_interrupted():
            self.abandon_forward()

    def _abandon_backward(self) -> None:
        """A backward raised half-way: drop its gradients."""
        self._clear_backward_state()
        self._forget_gradients()
        for unit in self.units:
            unit.pending.clear()
            self._drop(unit)

    def _forget_gradients(self) -> None:
        """Of a backward that failed."""
        lost = self.reducer.abandon()
        self._has_lost_grads |= lost
        self._lost_synced &= self.reducer.sync or not lost
        self._clear_unsharded_grads()

    def _clear_unsharded_grads(self) -> None:
        for unit in self.units:
            for param in unit.params:
                param.unsharded.grad = None


class _BackwardEnd:
    """What autograd calls at the end of a backward. It drops it uncalled when the backward raised."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._graph_task = torch._C._current_graph_task_id()

    def __call__(self) -> None:
        self._engine.end_backward()

    def __del__(self) -> None:
        self._engine.backward_dropped(self._graph_task)


def _inside_nested_backward() -> bool:
    """Whether this thread runs a backward that was started by a node of another one."""
    frame: FrameType | None = sys._getframe(2)
    started = False
    while frame is not None:
        name = frame.f_code.co_name
        if name == "_engine_run_backward":
            started = True
        elif started and name == "apply" and frame.f_code.co_filename.endswith("function.py"):
            return True
        frame = frame.f_back
    return False
