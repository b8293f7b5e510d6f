"""The cache rule: `model` is rebuilt at the next unshard after anything changed `main`.

[Note: when the cache may be trusted]
Tensor versions show most in-place edits but neither ``AdamW(fused=True)`` nor writes through ``.data``,
and a decision to refresh must be the same on every rank because refreshing is collective. Hence:

* After a synchronised backward, an optimizer step or a load everything is stale. All ranks know.
* In the forward that follows an unsynchronised backward (micro-batches) the cache is trusted, up to
  versions. This is the path that must cost nothing.
* Also inside `no_sync()`, where a pipeline schedule has several micro-batches in flight: a forward that starts
  while an earlier one awaits its backward trusts the cache, up to versions.
* Around any other pass (evaluation, the first one after it, a forward outside `no_sync()` while an earlier one
  has not had its backward) a weighted checksum of `main` is compared with the one taken then, and the ranks agree
  on the result in one small message. Training passes keep a checksum only once such a forward has been seen.

The order of refreshes is the same on every rank, whatever order its units run in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from layerzero.collectives import Control
from layerzero.group import ParamGroup
from layerzero.lanes import Lanes
from layerzero.profiling import LaneJob
from layerzero.unit import Unit

_CHECKSUM_CHUNK = 1 << 20


class Refresher:
    """Decides at the start of a pass which units to refresh, and starts it on the refresh lane."""

    def __init__(self, units: Sequence[Unit], lanes: Lanes, control: Control) -> None:
        self._units = [u for u in units if any(not g.aliased for g in u.trainable_groups)]
        self._all_units = list(units)
        self._all_trainable = [g for u in units for g in u.trainable_groups]
        self._aliased = [g for g in self._all_trainable if g.aliased]
        self._frozen = [g for u in units for g in u.groups if not g.trainable]
        self._lanes = lanes
        self._control = control
        self._window_open = False  # the last pass was a training one, and nothing marked all stale since
        self._unfinished = False  # that pass has not had a backward
        self._keep_checksums = False

    def mark_all_stale(self) -> None:
        """Something every rank knows of changed the main parameters."""
        self._window_open = False
        for group in self._all_trainable:
            group.stale = True

    def backward_over(self) -> None:
        """The last pass had its backward."""
        self._unfinished = False

    def begin_pass(
        self, grad_enabled: bool, accumulating: bool, order: Iterable[Unit], release: Callable[[Unit], None]
    ) -> None:
        """Refresh what is stale, soonest needed first; ``release`` what was gathered from other values.

        ``accumulating`` says that the pass is inside `no_sync()`. ``order`` is the same on every rank.
        """
        if self._window_open and grad_enabled and (accumulating or not self._unfinished):
            for group in self._all_trainable:
                group.stale = group.stale or group.changed_in_place()
            if any(g.stale for g in self._all_trainable) or any(g.changed_in_place() for g in self._frozen):
                for unit in self._all_units:
                    release(unit)
        else:
            self._keep_checksums = self._keep_checksums or (self._window_open and grad_enabled)
            for unit in self._all_units:
                for group in unit.groups:
                    group.check_storage()
            self._verify()
            for unit in self._all_units:
                release(unit)
        for group in (*self._aliased, *self._frozen):
            group.mark_refreshed()
        self._window_open = self._unfinished = grad_enabled
        keep_checksum = self._keep_checksums or not grad_enabled
        waiting = {u for u in self._units if any(g.stale for g in u.trainable_groups)}
        for unit in order:
            if unit in waiting:
                self._refresh(unit, keep_checksum)

    def wait(self) -> None:
        """Order the caller after every refresh; before anything may write `main` again."""
        for unit in self._units:
            unit.refresh_event.wait()

    def _refresh(self, unit: Unit, keep_checksum: bool) -> None:
        groups = [g for g in unit.trainable_groups if g.stale and not g.aliased]
        for group in groups:
            group.invalidate_model()
            group.mark_refreshed()
            if keep_checksum:
                group.checksum = checksum(group)

        def job() -> None:
            with LaneJob("refresh", unit.name):
                for group in groups:
                    group.refresh()

        # After the last gather from `model`, which this overwrites, and after the writes to `main`.
        unit.refresh_event = self._lanes.refresh.run(job, after=[unit.unshard_event, self._lanes.compute()])

    def _verify(self) -> None:
        """Mark what changed behind our back; the same units on every rank."""
        unsure = [u for u in self._units if not all(g.stale for g in u.trainable_groups)]
        if not unsure:
            return
        changed = torch.tensor([any(_changed(g) for g in u.trainable_groups) for u in unsure], dtype=torch.int32)
        if any(g.layout.axes.num_optimizer > g.layout.axes.num_params for u in unsure for g in u.trainable_groups):
            on_device = changed.to(self._lanes.device)
            changed = self._control.all_reduce(on_device, dist.ReduceOp.MAX).cpu()
        for unit, is_changed in zip(unsure, changed.tolist(), strict=True):
            for group in unit.trainable_groups:
                group.stale = group.stale or bool(is_changed)


def _changed(group: ParamGroup) -> bool:
    if group.stale or group.changed_in_place() or group.checksum is None:
        return True
    return not torch.equal(group.checksum, checksum(group))


def checksum(group: ParamGroup) -> torch.Tensor:
    """Position-weighted integer sum of the bits of `main`: one int64 on the device."""
    assert group.main is not None
    bits = group.main.detach().view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHECKSUM_CHUNK):  # bounds the memory of the products
        part = bits[start : start + _CHECKSUM_CHUNK]
        weights = torch.arange(2 * start + 1, 2 * (start + part.numel()), 2, device=bits.device)
        total += (part * weights).sum()
    return total
