"""Full gradients between micro-batches, added up where they were made: nothing is packed or sent for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from layerzero.buffers import Staged
from layerzero.collectives import add_in_chunks
from layerzero.layout import GroupLayout

_Grads = Sequence[torch.Tensor | None]


class WholeGrads:
    """fp32 sums of one param group's gradients over earlier micro-batches; no memory before there are any.

    On CPUs the memory stays from step to step: mapping it anew, page by page, made a step of four micro-batches of the
    testbed (20 M parameters, two ranks to a core) a sixth slower, 3.0 instead of 2.6 s. Accelerators' allocators keep
    what is freed themselves.

    Gradients given are full-shape or None, strided and of any dtype. ``zeroed`` are indices of parameters whose
    earlier gradients are forgotten. They are added at once: gradients that stayed as autograd made them until there
    are several would save passes over memory, but the next backward then writes to memory that is not in the cache,
    or not even mapped, which took longer.
    """

    def __init__(self, layout: GroupLayout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._sums: Staged | None = None
        self._kept: Staged | None = None

    def __bool__(self) -> bool:
        return self._sums is not None

    @property
    def nbytes(self) -> int:
        """Bytes that stay from step to step."""
        return 0 if self._kept is None else self._kept.wire.nbytes

    def add(self, grads: _Grads, zeroed: Iterable[int]) -> None:
        """Add the gradients of a micro-batch, after which others follow."""
        if self._sums is None:
            self._sums = self._kept
            if self._sums is None:
                flat = torch.empty(self._layout.numel, dtype=torch.float32, device=self._device)
                self._sums = Staged(flat, self._layout)
            self._kept = self._sums if self._device.type == "cpu" else None
            self._sums.pack(grads)
        else:
            self._add_into(self._sums, grads, zeroed)

    def take(self, grads: _Grads, zeroed: Iterable[int], out: Staged) -> None:
        """Fill ``out``, of any dtype, with the sums over earlier micro-batches and the last one, rounded once."""
        self._add_into(out, grads, zeroed)
        out.zero_padding()
        self._sums = None

    def _add_into(self, out: Staged, grads: _Grads, zeroed: Iterable[int]) -> None:
        assert self._sums is not None
        for i in zeroed:
            self._sums.views[i].zero_()
        for grad, total, into in zip(grads, self._sums.views, out.views, strict=True):
            if grad is None:
                if into is not total:
                    into.copy_(total)
            elif into.is_cpu:
                add_in_chunks([grad.reshape(-1)], total.view(-1), into.view(-1))
            elif into is total:
                total.add_(grad)
            else:
                into.copy_(total.add_(grad))
