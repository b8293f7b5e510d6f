"""Gradients that no other rank has a part of: what autograd made is the result, without a copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


class OwnGrads:
    """The gradients of one param group of a model on one rank, tensor by tensor.

    Autograd hands over each gradient it made, so with fp32 parameters nothing is copied, and what earlier
    micro-batches left is added as autograd itself would have added it. Only a gradient that shares memory with
    another one is copied, since what is kept here is written to later: two parameters that are added to each other
    through views get one and the same.
    """

    def __init__(self, count: int, storages: set[int]) -> None:
        """``storages``: addresses of the memory that all groups of the model keep here."""
        self._sums: list[torch.Tensor | None] = [None] * count
        self._storages = storages

    def add(self, grads: Sequence[torch.Tensor | None], zeroed: Iterable[int]) -> None:
        """Add full-shape gradients, strided and of any dtype, to the fp32 sums; those at ``zeroed`` start anew."""
        for i in zeroed:
            self._forget(i)
        for i, grad in enumerate(grads):
            total = self._sums[i]
            if grad is None:
                continue
            if total is None:
                self._keep(i, grad.to(torch.float32).contiguous())
            else:
                total.add_(grad)

    def take(self) -> list[torch.Tensor | None]:
        """The sums, full-shape fp32 and contiguous; None where no gradient arrived since the last call."""
        sums = list(self._sums)
        for i in range(len(sums)):
            self._forget(i)
        return sums

    def _keep(self, index: int, grad: torch.Tensor) -> None:
        storage = grad.untyped_storage()
        if storage.data_ptr() in self._storages or storage.nbytes() > grad.numel() * grad.element_size():
            grad = grad.clone()
        self._storages.add(grad.untyped_storage().data_ptr())
        self._sums[index] = grad

    def _forget(self, index: int) -> None:
        total, self._sums[index] = self._sums[index], None
        if total is not None:
            self._storages.discard(total.untyped_storage().data_ptr())
