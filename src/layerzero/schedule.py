"""When units are gathered and freed: recorded order, prefetch, bound on units in flight."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from layerzero.collectives import Traffic
from layerzero.desync import END_OF_BACKWARD, DesyncCheck
from layerzero.lanes import Lanes
from layerzero.profiling import LaneJob, span
from layerzero.unit import Phase, Unit

_AT_REST = (Phase.SHARDED, Phase.KEPT)
_MAX_TRACE_PER_UNIT = 64  # forwards that are never followed by a backward must not grow the trace forever


@dataclass(frozen=True)
class ScheduleOptions:
    """What of the configuration concerns gathering.

    Attributes:
        prefetch_depth: units gathered ahead of the running one.
        forward_prefetch: gather ahead in the forward pass.
        backward_prefetch_pre: in backward, gather ahead before the current unit's backward, else after it.
        limit: hold the number of unsharded units to ``1 + prefetch_depth``, not counting the ancestors of
            the running unit.
        keep_numel: elements of units that may stay unsharded from one use to the next within an optimizer step.
    """

    prefetch_depth: int
    forward_prefetch: bool
    backward_prefetch_pre: bool
    limit: bool
    keep_numel: int


class Schedule:
    """Follows the order in which units are needed, and gathers ahead from the order of the last time.

    Passes with and without grad have records of their own: a training record runs from the first forward
    to the end of the backward, an evaluation record over one forward.

    Attributes:
        kept: units that stay unsharded between uses, until parameters change.
    """

    def __init__(
        self, units: Sequence[Unit], options: ScheduleOptions, lanes: Lanes, traffic: Traffic, check: DesyncCheck
    ) -> None:
        self._units = units
        self._options = options
        self._lanes = lanes
        self._traffic = traffic
        self._check = check
        self._gathers = {u: any(g.layout.axes.num_params for g in u.groups) for u in units}
        self._gathers_any = any(self._gathers.values())
        self.kept = _choose_kept([u for u in units if self._gathers[u]], options.keep_numel)
        self._last_use = False  # parameters may change after this pass or backward
        self._live: list[Unit] = []
        self._prefetched: list[Unit] = []
        self._grad = True
        self._records: dict[bool, list[Unit]] = {True: [], False: []}
        self._trace: dict[bool, list[Unit]] = {True: [], False: []}
        self._position = {True: 0, False: 0}
        self._last_demand: tuple[Unit, bool] | None = None
        self._in_its_backward: Unit | None = None  # the next one is gathered when it is over
        self._num_allocated = 0
        self._allocated_lock = threading.Lock()  # the unshard lane and the compute thread count

    # ------------------------------------------------------------------ passes

    def begin_pass(self, grad_enabled: bool) -> None:
        """The outermost forward starts."""
        self._grad = grad_enabled
        self._last_use = not grad_enabled
        if not grad_enabled or len(self._trace[True]) > _MAX_TRACE_PER_UNIT * len(self._units):
            self._restart(grad_enabled)

    def end_pass(self) -> None:
        """A pass is over: remember its order."""
        if self._trace[self._grad]:
            self._records[self._grad] = self._trace[self._grad]
        self._restart(self._grad)

    def announce_end(self) -> None:
        """No more gathers in this backward; said before waiting for reductions that other ranks must join."""
        self.prefetch_after_backward()
        if self._check.enabled:
            self._lanes.unshard.run(lambda: self._check.compare(END_OF_BACKWARD))
        self._check.backward_ended()

    def end_backward(self) -> None:
        """Free everything that need not stay, and remember the order."""
        self._grad = True
        self.end_pass()
        give_back = self.drop if self._last_use else self.reshard
        for unit in self._units:
            if not unit.forward_depth:
                give_back(unit)

    def _restart(self, grad: bool) -> None:
        self._trace[grad] = []
        self._position[grad] = 0

    def enter_backward(self, last_use: bool) -> None:
        """From here on units are needed for a backward; ``last_use`` if it is the last before parameters change."""
        self._grad = True
        self._last_use = last_use
        self._in_its_backward = None

    # ------------------------------------------------------------------ demand and release

    def demand(self, unit: Unit, in_backward: bool) -> None:
        """Unshard ``unit`` for compute that follows, and gather ahead."""
        self.prefetch_after_backward()
        self._follow(unit, in_backward)
        if unit.phase in _AT_REST:
            self._gather(unit)
        if self._options.backward_prefetch_pre if in_backward else self._options.forward_prefetch:
            self.prefetch(unit)
        elif in_backward:
            self._in_its_backward = unit
        if unit.phase is Phase.GATHERING:
            with span("wait", unit.name):
                unit.unshard_event.wait()
            unit.phase = Phase.UNSHARDED
            if unit in self._prefetched:
                self._prefetched.remove(unit)
        if not unit.registered:
            unit.register_unsharded()

    def needed_next(self, unit: Unit) -> bool:
        """Whether the record says that ``unit`` itself is needed again before any other non-root unit."""
        for upcoming in self._upcoming():
            if not upcoming.is_root:
                return upcoming is unit
        return False

    def gathers_per_step(self, unit: Unit, micro_batches: int) -> int:
        """How often ``unit`` is gathered in an optimizer step of the recorded (else the registered) order."""
        if unit in self.kept:
            return 1
        if unit.is_root:
            return micro_batches
        order = [u for u in self._records[True] or [*self._units, *reversed(self._units)] if not u.is_root]
        before = [None, *order]
        return micro_batches * sum(now is unit and last is not unit for last, now in zip(before, order, strict=False))

    def backward_over(self, unit: Unit) -> None:
        """The unit's parameters are no longer needed by this backward."""
        self.reshard(unit)
        self.prefetch_after_backward()

    def prefetch_after_backward(self) -> None:
        """Once per demand in a backward, before the next one: ranks know at different moments that it is over."""
        unit, self._in_its_backward = self._in_its_backward, None
        if unit is not None:
            self.prefetch(unit)

    def to_rest(self) -> None:
        """Make modules see slices, also of units whose bytes stay for the backward."""
        for unit in self._live:
            if unit.registered:
                unit.register_sharded()

    def reshard(self, unit: Unit) -> None:
        """Give back the gathered parameters, once compute issued so far has read them; a kept unit stays."""
        if unit.phase in _AT_REST or unit.held:
            return
        if unit.registered:
            unit.register_sharded()
        was_gathered = unit.phase is Phase.UNSHARDED
        self._live.remove(unit)
        if unit in self._prefetched:  # nobody came for it; a left-over entry would free a later use under way
            self._prefetched.remove(unit)
        if unit in self.kept and not self._last_use:
            unit.phase = Phase.KEPT
            unit.last_use_event = self._lanes.compute()
        else:
            self._free(unit, was_gathered)

    def drop(self, unit: Unit) -> None:
        """Like `reshard`, also of a unit that may stay: its parameters changed, or are about to."""
        self.reshard(unit)
        if unit.phase is Phase.KEPT:
            self._free(unit, was_gathered=False)

    def _free(self, unit: Unit, was_gathered: bool) -> None:
        unit.phase = Phase.SHARDED
        if not self._gathers[unit]:
            return
        for group in unit.groups:
            group.invalidate_unsharded()

        def free() -> None:
            for group in unit.groups:
                group.free()
            self._count_allocated(unit, -1)

        if was_gathered and self._lanes.are_threads:  # compute is done with it when its calls return
            free()
        else:
            self._lanes.unshard.run(free, after=[unit.last_use_event, self._lanes.compute()])

    def _count_allocated(self, unit: Unit, change: int) -> None:
        if unit.is_root:
            return
        with self._allocated_lock:
            self._num_allocated += change
            self._traffic.peak_unsharded_units = max(self._traffic.peak_unsharded_units, self._num_allocated)

    # ------------------------------------------------------------------ order and prefetch

    def _follow(self, unit: Unit, in_backward: bool) -> None:
        """Append to the trace, and move the position in the record past this demand."""
        grad = self._grad
        trace = self._trace[grad]
        again, self._last_demand = self._last_demand == (unit, in_backward), (unit, in_backward)
        if again and in_backward and trace:
            return  # the recomputation right after the gradient arrived
        trace.append(unit)
        record, position = self._records[grad], self._position[grad]
        if position < len(record) and record[position] is unit:
            self._position[grad] = position + 1
        elif unit in record[position:]:  # the order changed; catch up with it
            self._position[grad] = record.index(unit, position) + 1

    def _upcoming(self) -> list[Unit]:
        position = self._position[self._grad]
        return self._records[self._grad][position : position + 2 * self._options.prefetch_depth + 4]

    def prefetch(self, current: Unit) -> None:
        """Gather the units that the record names next, within the bound; free prefetches it does not name.

        Ranks must decide alike, and may differ in whether a unit whose backward began is done with; see
        `Unit.stays_after`. Such units are neither counted nor gathered.
        """
        if not self._gathers_any:
            return
        depth = self._options.prefetch_depth
        named: list[Unit] = []
        for unit in self._upcoming():
            skipped = unit is current or unit.is_root or unit.forward_depth or unit.phase is Phase.KEPT
            skipped = skipped or (unit.begun and not unit.has_frozen)
            if not skipped and unit not in named:
                named.append(unit)
        if self._options.limit:
            # One more than `depth`: the unit around the running one gets its gradient in between, as current.
            for unit in [u for u in self._prefetched if u not in named[: depth + 1] and u is not current]:
                self.reshard(unit)
        missing = [u for u in named[:depth] if u.phase is Phase.SHARDED]
        if missing and self._options.limit:
            others = [u for u in self._live if u is not current and not u.is_root and not u.forward_depth]
            counted = [u for u in others if not u.begun or u in self._prefetched]
            del missing[max(0, depth - len(counted)) :]
        for unit in missing:
            self._gather(unit)
            self._prefetched.append(unit)

    def _gather(self, unit: Unit) -> None:
        is_kept = unit.phase is Phase.KEPT
        unit.phase = Phase.GATHERING
        self._live.append(unit)
        if not self._gathers[unit]:
            unit.unshard_event = unit.refresh_event
            return
        if is_kept:
            return  # the event of the gather that brought it is still the unit's
        check = self._check if self._check.enabled else None

        def job() -> None:
            with LaneJob("unshard", unit.name):
                if check is not None:
                    check.compare(unit.index)
                self._count_allocated(unit, 1)
                try:
                    for group in unit.groups:
                        group.unshard()
                except BaseException:  # out of memory, for example
                    for group in unit.groups:
                        group.free()
                    self._count_allocated(unit, -1)
                    raise

        try:
            unit.unshard_event = self._lanes.unshard.run(job, after=[unit.refresh_event, self._lanes.compute()])
        except BaseException:  # a lane that is a stream runs the job here
            unit.phase = Phase.SHARDED
            self._live.remove(unit)
            raise


def _choose_kept(units: Sequence[Unit], keep_numel: int) -> frozenset[Unit]:
    """Units that stay, in registration order as long as they fit: the same on every rank, whatever runs."""
    kept = []
    for unit in units:
        numel = sum(g.layout.numel for g in unit.groups)
        if numel <= keep_numel:
            keep_numel -= numel
            kept.append(unit)
    return frozenset(kept)
