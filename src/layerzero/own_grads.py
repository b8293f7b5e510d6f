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
        self._addresses = [0] * count  # of the sums' memory; 0 where there is none
        self._storages = storages

    def add(self, grads: Sequence[torch.Tensor | None], zeroed: Iterable[int]) -> None:
        """Add full-shape gradients, strided and of any dtype, to the fp32 sums; those at ``zeroed`` start anew."""
        for i in zeroed:
            if self._sums[i] is not None:
                self._sums[i] = None
                self._storages.discard(self._addresses[i])
                self._addresses[i] = 0
        for i, (grad, total) in enumerate(zip(grads, self._sums, strict=True)):
            if grad is None:
                continue
            if total is None:
                self._keep(i, grad)
            else:
                total.add_(grad)

    def take(self) -> list[torch.Tensor | None]:
        """The sums, full-shape fp32 and contiguous; None where no gradient arrived since the last call."""
        sums = list(self._sums)
        self._storages.difference_update(self._addresses)
        for i in range(len(sums)):
            self._sums[i], self._addresses[i] = None, 0
        return sums

    def _keep(self, index: int, grad: torch.Tensor) -> None:
        if grad.dtype is not torch.float32 or not grad.is_contiguous():
            grad = grad.to(torch.float32).contiguous()
        storage = grad.untyped_storage()
        address = storage.data_ptr()
        if address in self._storages or storage.nbytes() > grad.nbytes:
            grad = grad.clone()
            address = grad.untyped_storage().data_ptr()
        self._storages.add(address)
        self._sums[index], self._addresses[index] = grad, address
