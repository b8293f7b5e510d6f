"""A unit: the param groups of one module that move together, their phase, and its place in a backward."""

from __future__ import annotations

import enum
import weakref

from layerzero.errors import ShardingError
from layerzero.group import Param, ParamGroup
from layerzero.lanes import DONE, Event


class Phase(enum.Enum):
    """Where a unit's parameters are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


_LEGAL = {
    (Phase.SHARDED, Phase.GATHERING),  # demand or prefetch
    (Phase.GATHERING, Phase.UNSHARDED),  # the gather's event was waited for
    (Phase.GATHERING, Phase.SHARDED),  # a prefetch nobody used
    (Phase.UNSHARDED, Phase.SHARDED),  # after forward, after backward
}


class Unit:
    """Parameters that move together: one module's, less those of units below it.

    Attributes:
        name: the module's name; empty for the root.
        index: registration order, the id compared across ranks.
        forward_depth: nested forwards that need the parameters now.
        active: backward uses between "gradient arrived at the output" and "inputs' gradients are done".
        pending: grad-enabled forwards that track their inputs and whose backward has not finished.
        fired: ids of the trainable parameters that got a gradient in this backward.
        num_fires: how often they did; more than once each under reentrant checkpoints only.
        fired_nested: some did in a nested backward, that is, under a reentrant checkpoint.
        expected_fires: `num_fires` at the end of the last backward with nested ones; 0 if there was none.
        num_no_grad_forwards: forwards in training mode without grad, which reentrant checkpoints recompute.
        track_inputs: watch the inputs' gradients, because trainable parameters alone don't tell when the
            unit's backward is over (some are frozen, or went unused before).
    """

    def __init__(self, name: str, index: int, groups: list[ParamGroup], is_root: bool) -> None:
        self.name = name
        self.index = index
        self.groups = groups
        self.is_root = is_root
        self.trainable_groups = [g for g in groups if g.trainable]
        self.params = [p for g in groups for p in g.params]
        self._phase = Phase.SHARDED
        self._sharded_slots = [(d, name, p.sharded) for p in self.params for d, name in p.slots]
        self._unsharded_slots = [(d, name, p.unsharded) for p in self.params for d, name in p.slots]
        self.unshard_event: Event = DONE
        self.refresh_event: Event = DONE
        self.has_frozen = any(not g.trainable for g in groups)
        self.num_trainable = sum(len(g.params) for g in self.trainable_groups)
        self.forward_depth = 0
        self.held = 0  # by `unsharded()`
        self.kept_for_backward = False  # `unsharded()` ended, but its graph may still need the bytes
        self.registered = False  # whether modules see full-shape parameters
        self.active: set[object] = set()
        self.pending: weakref.WeakSet[object] = weakref.WeakSet()  # a graph that is dropped takes its uses along
        self.fired: set[int] = set()
        self.num_fires = 0
        self.fired_nested = False
        self.expected_fires = 0
        self.num_no_grad_forwards = 0
        self.track_inputs = self.has_frozen
        self.grads_ready = False
        self.reduced = False

    def __repr__(self) -> str:
        return f"unit {self.name!r}" if self.name else "the root unit"

    @property
    def phase(self) -> Phase:
        """Where the parameters are; assigning an illegal successor raises."""
        return self._phase

    @phase.setter
    def phase(self, new: Phase) -> None:
        if (self._phase, new) not in _LEGAL:
            raise AssertionError(f"{self!r}: illegal transition {self._phase.value} -> {new.value}")
        self._phase = new

    def all_arrived(self) -> bool:
        """Whether all gradients that this backward gives the trainable parameters are there."""
        if self.fired_nested:
            expected = self.expected_fires or self.num_trainable * self.num_no_grad_forwards
            return 0 < expected <= self.num_fires
        return len(self.fired) >= self.num_trainable

    def register_unsharded(self) -> None:
        """Make the modules see full-shape parameters; follows ``requires_grad_`` calls made at rest."""
        self.registered = True
        for slots, name, param in self._unsharded_slots:
            slots[name] = param
        for group in self.groups:
            for param in group.params:
                if param.sharded.requires_grad is not param.unsharded.requires_grad:
                    self._follow_requires_grad(group, param)

    def _follow_requires_grad(self, group: ParamGroup, param: Param) -> None:
        wanted = param.sharded.requires_grad
        if wanted and not group.trainable:
            raise ShardingError(
                f"parameter {param.info.fqn!r} was frozen when {self!r} was sharded, so it has no fp32 main copy "
                f"and cannot be trained. Set requires_grad before lz.shard; freezing later is possible."
            )
        param.unsharded.requires_grad_(wanted)
        self.num_trainable += 1 if wanted else -1
        self.track_inputs = self.has_frozen = True

    def register_sharded(self) -> None:
        """Make the modules see this rank's slices again."""
        self.registered = False
        for slots, name, param in self._sharded_slots:
            slots[name] = param
