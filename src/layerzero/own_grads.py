"""Gradients that no other rank has a part of: what autograd made is the result, without a copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


class OwnGrads:
    """The gradients of one param group of a model on one rank, tensor by tensor.

    Autograd hands over each gradient it made, so with fp32 parameters nothing is copied, and what earlier
    micro-batches left is added as autograd itself would have added it.
    """

    def __init__(self, count: int) -> None:
        self._sums: list[torch.Tensor | None] = [None] * count

    def add(self, grads: Sequence[torch.Tensor | None], zeroed: Iterable[int]) -> None:
        """Add full-shape gradients, strided and of any dtype, to the fp32 sums; those at ``zeroed`` start anew."""
        for i in zeroed:
            self._sums[i] = None
        for i, grad in enumerate(grads):
            total = self._sums[i]
            if grad is not None:
                self._sums[i] = grad.to(torch.float32).contiguous() if total is None else total.add_(grad)

    def take(self) -> list[torch.Tensor | None]:
        """The sums, full-shape fp32 and contiguous; None where no gradient arrived since the last call."""
        sums = self._sums
        self._sums = [None for _ in sums]
        return sums
