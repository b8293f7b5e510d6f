"""Full gradients between micro-batches, added up where they were made: nothing is packed or sent for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from layerzero.buffers import pack, views
from layerzero.collectives import CHUNK_NUMEL
from layerzero.layout import GroupLayout


class WholeGrads:
    """fp32 sums of one param group's gradients over earlier micro-batches; no memory while there are none.

    All gradients given are full-shape or None, strided and of any dtype. ``zeroed`` are indices of parameters whose
    earlier gradients are forgotten.
    """

    def __init__(self, layout: GroupLayout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._flat: torch.Tensor | None = None
        self._sums: list[torch.Tensor] = []

    def __bool__(self) -> bool:
        return self._flat is not None

    def add(self, grads: Sequence[torch.Tensor | None], zeroed: Iterable[int]) -> None:
        """Add the gradients of a micro-batch."""
        if self._flat is None:
            self._flat = torch.empty(self._layout.numel, dtype=torch.float32, device=self._device)
            self._sums = views(self._flat, self._layout)
            pack(grads, self._sums, self._flat[self._layout.used_numel :])
            return
        self._add_into(self._sums, grads, zeroed)

    def take(self, grads: Sequence[torch.Tensor | None], zeroed: Iterable[int], out: Sequence[torch.Tensor]) -> None:
        """The sums and the gradients of the last micro-batch go to ``out``, full-shape, rounded once; see `add`."""
        self._add_into(out, grads, zeroed)
        self._flat, self._sums = None, []

    def _add_into(
        self, out: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], zeroed: Iterable[int]
    ) -> None:
        for i in zeroed:
            self._sums[i].zero_()
        for total, grad, into in zip(self._sums, grads, out, strict=True):
            if grad is not None:
                _add(total, grad, into)
            elif into is not total:
                into.copy_(total)


def _add(total: torch.Tensor, grad: torch.Tensor, out: torch.Tensor) -> None:
    """``out``, of any dtype and maybe ``total`` itself, becomes fp32 ``total`` plus ``grad``, all of one shape.

    On a CPU in chunks: an addition of mixed dtypes takes nearly twice as long as conversions inside the cache.
    """
    if total.device.type != "cpu" or total.numel() <= CHUNK_NUMEL or not grad.is_contiguous():
        out.copy_(total.add_(grad))
        return
    chunk = torch.empty(CHUNK_NUMEL, dtype=torch.float32)
    flats = (t.view(-1).split(CHUNK_NUMEL) for t in (total, grad, out))
    for earlier, new, into in zip(*flats, strict=True):
        term = chunk[: new.numel()].copy_(new)
        if out is total:
            into.add_(term)
        else:
            into.copy_(term.add_(earlier))
