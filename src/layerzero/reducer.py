"""The reduction queue: every trainable unit once per backward, in the same order on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from layerzero.buffers import HandOvers
from layerzero.collectives import Control, Traffic
from layerzero.grads import GradSource, attach_grads, attach_pending, run_user_hooks
from layerzero.group import ParamGroup
from layerzero.lanes import Event
from layerzero.profiling import span
from layerzero.unit import Unit

_NUM_CHECKED_BACKWARDS = 2
"""Backwards in which gradients of plain parameters are compared over tensor-parallel ranks."""

PATIENCE = 5.0
"""Seconds; see [Note: late ranks]."""


class Reducer:
    """Reduces units in a canonical order.

    [Note: late ranks]
    A rank on which parameters of a unit go unused may know only at the end of its backward that the unit's gradients
    are there, and until then needs the others to gather units with it. So nothing in a backward may wait for a
    reduction to end, which needs all ranks. To bound the gradients in flight a reduction that finds no free staging
    buffer does wait, but for so long only: then it, and those after it, are put off, to the end of the backward if
    need be. The next backward waits a tenth as long, and each that need not put anything off a little longer again.
    Where lanes are streams the device waits instead, and it waits for ever.

    The order is reverse registration order in the first backward, then the order in which units became
    ready on data-parallel rank 0, sent to all once. A unit that is ready early waits its turn, and at the
    end of a backward whatever is left is reduced with zeros for missing gradients; so gradients that exist
    on some ranks only can neither hang nor pair up wrongly.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        controls: Sequence[Control],
        traffic: Traffic,
        source: GradSource,
        hand_overs: HandOvers,
        eager: bool,
    ) -> None:
        """``controls`` reach the data-parallel, then the tensor-parallel ranks.

        ``eager`` reduces a unit as soon as it may be, else after the next unit's gather was issued.
        """
        self._units = units
        self._hand_overs = hand_overs
        self._order = [u for u in reversed(units) if u.trainable_groups]
        self._controls = controls
        self._traffic = traffic
        self._source = source
        self._eager = eager
        self._ready: list[Unit] = []
        self._queue: deque[ParamGroup] = deque()  # put off
        self._patience = PATIENCE
        self._waits = True  # in this backward
        self._next = 0
        self._events: list[Event] = []
        self._recorded = False
        self._num_checked = 0
        self._held = False  # a synchronised backward is reduced, or about to be, and not attached
        self.sync = True

    @property
    def order(self) -> list[Unit]:
        """Units with trainable parameters as they are reduced; the same on every rank."""
        return self._order

    def ready(self, unit: Unit) -> None:
        """``unit`` has all gradients this backward will give it."""
        unit.grads_ready = True
        self._ready.append(unit)
        if self._eager:
            self.advance()

    def advance(self) -> None:
        """Start the reduction of every ready unit whose turn it is."""
        while self._next < len(self._order) and self._order[self._next].grads_ready:
            unit = self._order[self._next]
            self._next += 1
            unit.reduced = True
            if self._num_checked < _NUM_CHECKED_BACKWARDS:
                for group in unit.trainable_groups:
                    group.check_replicas()
            self._queue.extend(unit.trainable_groups)
        self._reduce_queued()

    def _reduce_queued(self, at_end: bool = False) -> None:
        while self._queue:
            group = self._queue[0]
            if not at_end and not group.reduces_at_once(self.sync, self._patience if self._waits else 0.0):
                if self._waits:
                    self._waits = False
                    self._patience /= 10
                return
            self._queue.popleft()
            with span("pack", group.params[0].info.unit):
                self._events.append(group.reduce(self.sync))

    def finish(self, hold: bool) -> None:
        """End of a backward: reduce what is left, and set ``grad`` of the sharded parameters.

        ``hold`` leaves the reductions of a synchronised backward running; `wait` and `attach` follow.
        """
        ready = [u for u in self._ready if u.trainable_groups]
        for unit in self._order[self._next :]:
            unit.grads_ready = True
        self.advance()
        self._reduce_queued(at_end=True)
        self._traffic.num_backwards += 1
        self._num_checked += 1
        if not self._recorded:
            self._recorded = True
            self._agree_on_order(ready)
        self.reset()
        if self.sync:
            self._traffic.num_synced_backwards += 1
            self._held = True
            if not hold:
                self.wait()
                self.attach()
        else:
            for unit in self._order:
                attach_pending(unit, self._source)
            self._source.invalidate()
            self._events.clear()

    def wait(self) -> bool:
        """Order the caller after the last synchronised backward's reductions; whether there is one to `attach`."""
        with span("wait", "reductions"):
            for event in self._events:
                event.wait()
        self._events.clear()
        self._hand_overs.clear()
        return self._held

    def attach(self, scale: float = 1.0) -> None:
        """Set ``grad`` of the sharded parameters to ``scale`` times what was reduced."""
        self._held = False
        for unit in self._order:
            attach_grads(unit, self._source, scale)
        self._source.invalidate()
        try:
            for unit in self._order:
                run_user_hooks(unit)
        finally:
            self._source.invalidate()

    def abandon(self) -> bool:
        """Forget a backward that did not end; whether some units' gradients were already added to earlier ones."""
        reduced = [unit for unit in self._order if unit.reduced]
        if self.sync:
            for unit in reduced:
                for group in unit.trainable_groups:
                    group.drop_reduced()
        self._events.clear()
        self.reset()
        return bool(reduced)

    def reset(self) -> None:
        """Get ready for the next backward."""
        self._ready.clear()
        self._queue.clear()
        self._next = 0
        if self._waits:
            self._patience = min(PATIENCE, self._patience * 1.1)
        self._waits = True
        for unit in self._order:
            unit.grads_ready = unit.reduced = False

    def _agree_on_order(self, ready: list[Unit]) -> None:
        mine = ready + [u for u in self._order if u not in ready]
        ids = torch.tensor([u.index for u in mine], dtype=torch.int64, device=self._controls[0].device)
        for control in self._controls:
            control.broadcast(ids)
        self._order = [self._units[i] for i in ids.tolist()]
