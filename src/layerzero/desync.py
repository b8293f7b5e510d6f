"""Detects ranks that gather different units, which would otherwise hang or mix up parameters.

Before a gather every rank of the ZeRO-3 group sends the id of the unit it is about to gather, on the same
process group and in the same order as the gathers, so a rank that skipped a unit meets the others at the
comparison and not at a collective of another size. The end of a backward sends an id of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from layerzero.collectives import AxisComm, all_gather_ids
from layerzero.errors import DesyncError

END_OF_BACKWARD = -1
NUM_CHECKED_BACKWARDS = 2
"""Backwards after which the check stops unless `desync_check` is set: one message per gather is not free."""


class DesyncCheck:
    """Compares unit ids along the axes of the ZeRO-3 group; called from the unshard lane only."""

    def __init__(self, names: Sequence[str], comms: Mapping[int, AxisComm], always: bool, device: torch.device) -> None:
        self._names = names
        self._comms = comms
        self._always = always
        self._device = device
        self._num_backwards = 0

    @property
    def enabled(self) -> bool:
        """Whether gathers are being compared now; changes at the end of a backward on every rank alike."""
        return bool(self._comms) and (self._always or self._num_backwards < NUM_CHECKED_BACKWARDS)

    def compare(self, unit_index: int) -> None:
        """Lane job: raise `DesyncError` unless every rank along every axis says the same id."""
        for comm in self._comms.values():
            ids = all_gather_ids(unit_index, comm, self._device)
            if len(set(ids)) > 1:
                places = "; ".join(f"position {i} {self._say(unit)}" for i, unit in enumerate(ids))
                raise DesyncError(
                    f"ranks of one ZeRO-3 group run different units (axis {comm.axis} of the group, "
                    f"ranks {comm.global_ranks()}): {places}. A unit is gathered by all ranks of its group "
                    f"together, so none may skip its forward, not in an evaluation either: call it on every rank, with "
                    f"dummy input multiplied by zero where there is nothing to do, or make it no unit."
                )

    def backward_ended(self) -> None:
        """Count a backward; call where every rank does."""
        self._num_backwards += 1

    def _say(self, unit_index: int) -> str:
        if unit_index == END_OF_BACKWARD:
            return "finished its backward"
        return f"gathers unit {self._names[unit_index] or '(root)'!r}"
