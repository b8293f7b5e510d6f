"""A unit: the param groups of one module that move together, their phase, and its place in a backward."""

from __future__ import annotations

import enum
import weakref

import torch

from layerzero.errors import ShardingError
from layerzero.group import Param, ParamGroup
from layerzero.lanes import DONE, Event
from layerzero.tensor_parallel import local_of


class Phase(enum.IntEnum):  # whose hash, unlike that of an Enum, is no call of Python code
    """Where a unit's parameters are."""

    SHARDED = enum.auto()
    GATHERING = enum.auto()
    UNSHARDED = enum.auto()
    KEPT = enum.auto()  # not in use, and the bytes stay for the next use


_LEGAL = {
    (Phase.SHARDED, Phase.GATHERING),  # demand or prefetch
    (Phase.GATHERING, Phase.UNSHARDED),  # the gather's event was waited for
    (Phase.GATHERING, Phase.SHARDED),  # a prefetch nobody used
    (Phase.UNSHARDED, Phase.SHARDED),  # after forward, after backward
    (Phase.UNSHARDED, Phase.KEPT),  # the same, of a unit that may stay
    (Phase.GATHERING, Phase.KEPT),
    (Phase.KEPT, Phase.GATHERING),  # demand: the gather that was, or still is, under way
    (Phase.KEPT, Phase.SHARDED),  # the parameters changed, or are about to
}


class Use:
    """One grad-enabled forward of a unit; lives as long as its autograd graph."""

    __slots__ = ("__weakref__", "of_pass", "recomputed", "task", "tracked", "unit")

    def __init__(self, unit: Unit, recomputed: bool = False, of_pass: int = -1) -> None:
        self.unit = unit
        self.recomputed = recomputed
        self.of_pass = of_pass  # number of the outermost forward it belongs to
        self.task = -1  # autograd's id of the backward, possibly a nested one, that reached it
        self.tracked = False  # whether its inputs' gradients are watched


class Unit:
    """Parameters that move together: one module's, less those of units below it.

    Attributes:
        name: the module's name; empty for the root.
        index: registration order, the id compared across ranks.
        forward_depth: nested forwards that need the parameters now.
        active: backward uses between "gradient arrived at the output" and "inputs' gradients are done".
        pending: grad-enabled forwards whose backward has not finished.
        begun: uses that a gradient reached in this backward.
        fires: how many gradients of trainable parameters arrived in this backward, by autograd's id of it;
            there are several ids under reentrant checkpoints only, whose backwards are nested.
        fired_nested: some did in a nested backward.
        num_no_grad_forwards: forwards without grad since the last backward that one may recompute.
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
        self.last_use_event: Event = DONE  # of a kept unit: whoever frees it may be on another stream
        self.has_frozen = any(not g.trainable for g in groups)  # or had: all ranks know
        self.num_trainable = sum(len(g.params) for g in self.trainable_groups)
        self.forward_depth = 0
        self.held = 0  # by `unsharded()`
        self.lent: dict[Param, torch.Tensor] = {}  # copies that modules see inside `unsharded()`
        self.registered = False  # whether modules see full-shape parameters
        self.active: set[Use] = set()
        self.begun: set[Use] = set()
        self.pending: weakref.WeakSet[Use] = weakref.WeakSet()  # a graph that is dropped takes its uses along
        self.fires: dict[int, int] = {}
        self.fired_nested = False
        self._known_fires: dict[tuple[int, bool], int] = {}
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
            raise AssertionError(f"{self!r}: illegal transition {self._phase.name} -> {new.name}")
        self._phase = new

    @property
    def in_use(self) -> bool:
        """Whether a forward or a backward that is under way needs the parameters."""
        return self.forward_depth > 0 or bool(self.active)

    @property
    def is_reentrant(self) -> bool:
        """Whether nested backwards may give gradients too."""
        return self.fired_nested or self.num_no_grad_forwards > 0

    def stays_after(self, use: Use | None) -> bool:
        """Whether uses of the same pass keep the parameters in a backward that is done with ``use``.

        When all gradients are there is known on this rank only, where some go unused on some ranks. Ranks that gave
        the parameters back between two uses would gather alone, so none does, unless frozen parameters make all
        ranks watch the inputs.
        """
        if self.has_frozen:
            return False
        again = use is not None and any(other.of_pass == use.of_pass for other in self.pending if other is not use)
        return again or self.num_no_grad_forwards > 1

    def all_arrived_in(self, task: int) -> bool:
        """Whether the backward with this id gave every trainable parameter its gradient."""
        return self.fires.get(task, 0) >= self.num_trainable

    def all_arrived(self) -> bool:
        """Whether all gradients that this backward and those nested in it give are there."""
        expected = self.num_trainable
        if self.is_reentrant:
            key = num_nested, has_outer = self._forwards()
            expected = self._known_fires.get(key, self.num_trainable * (num_nested + has_outer))
        return 0 < expected <= sum(self.fires.values())

    def _forwards(self) -> tuple[int, bool]:
        outer = bool(self.pending) or any(not use.recomputed for use in self.begun)
        return self.num_no_grad_forwards, outer

    def learn_fires(self) -> None:
        """At the end of a backward: the same forwards will give as many gradients, if none went unused."""
        if self.is_reentrant and self.fires and all(self.all_arrived_in(task) for task in self.fires):
            self._known_fires[self._forwards()] = sum(self.fires.values())

    def register_unsharded(self) -> None:
        """Make the modules see full-shape parameters; follows ``requires_grad_`` calls made at rest.

        Not while a graph is alive that was made before such a call: its gradients still arrive.
        """
        if not (self.pending or self.begun):
            for group in self.groups:
                for param in group.params:
                    if param.sharded.requires_grad is not param.unsharded.requires_grad:
                        self._follow_requires_grad(group, param)
        self.registered = True
        for slots, name, param in self._unsharded_slots:
            slots[name] = param

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
        self._known_fires.clear()

    def lend(self, copies: dict[Param, torch.Tensor]) -> None:
        """Make the modules see ``copies`` instead of the unsharded parameters."""
        self.lent = copies
        for param, copy in copies.items():
            copy._is_param = True  # an nn.Parameter to isinstance
            for slots, name in param.slots:
                slots[name] = copy

    def take_back(self) -> None:
        """End of `lend`: carry edits of the copies over."""
        for param, copy in self.lent.items():
            param.local.data.copy_(local_of(copy.detach()))
        if self.lent:
            self.lent = {}
            self.register_unsharded()

    def register_sharded(self) -> None:
        """Make the modules see this rank's slices again."""
        self.registered = False
        for slots, name, param in self._sharded_slots:
            slots[name] = param
