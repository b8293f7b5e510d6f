"""Flat buffers: storage that comes and goes, views into it, and moves between degrees."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from layerzero.collectives import AxisComm
from layerzero.lanes import Event, Lanes
from layerzero.layout import GroupLayout, Range


class TransientBuffer:
    """A flat tensor whose bytes come and go while the tensor and its storage object stay.

    Views of it, and tensors autograd saved from those views, are valid whenever the bytes are there
    again; torch's FSDP relies on the same property of ``untyped_storage().resize_``.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, poison: bool) -> None:
        self.flat = torch.empty(numel, dtype=dtype, device=device)  # 1-D
        self._storage = self.flat.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self._poison = poison  # the bytes are there until the first `free`, so that views can be made

    @property
    def nbytes(self) -> int:
        """Bytes when present."""
        return self._nbytes

    def alloc(self) -> None:
        """Bring the bytes back, uninitialised."""
        if not self._poison:
            self._storage.resize_(self._nbytes)

    def free(self) -> None:
        """Give the bytes back."""
        if not self._poison:
            self._storage.resize_(0)

    def invalidate(self) -> None:
        """Under adversarial lanes, turn the content into NaN now; otherwise nothing."""
        if self._poison:
            poison(self.flat)


def poison(flat: torch.Tensor) -> None:
    """Overwrite with a value no test can mistake for a right one."""
    flat.detach().fill_(float("nan") if flat.is_floating_point() or flat.is_complex() else 111)


def views(flat: torch.Tensor, layout: GroupLayout) -> list[torch.Tensor]:
    """Every parameter's full-shape view of an unsharded buffer, in registration order."""
    return [flat[r.start : r.stop].view(shape) for r, shape in zip(layout.params, layout.shapes, strict=True)]


class Gather:
    """All-gathers of one layout between two degrees, outermost axis first.

    Intermediate pieces are gathered in place inside the result. Where they lie is worked out once.
    """

    def __init__(self, layout: GroupLayout, rank: int, comms: Mapping[int, AxisComm], axes: range) -> None:
        """From degree ``axes.stop`` to degree ``axes.start``; no axes copy."""
        base = layout.slice(rank, axes.start).start
        self._moves: list[tuple[AxisComm, Range]] = []
        for axis in reversed(axes):
            self._moves.append((comms[axis], layout.slice(rank, axis).shift(-base)))

    def __call__(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Fill ``out``, 1-D of the lower degree, from ``shard``, this rank's 1-D slice of the higher one.

        Both have the same dtype; ``shard`` may be its place in ``out``.
        """
        for comm, place in self._moves:
            piece = out[place.start : place.stop] if place.numel < out.numel() else out
            comm.all_gather(piece, shard)
            shard = piece
        if not self._moves and out.data_ptr() != shard.data_ptr():
            out.copy_(shard)


def pack(grads: Sequence[torch.Tensor | None], out_views: Sequence[torch.Tensor], tail: torch.Tensor) -> None:
    """Copy gradients into their places in a flat buffer, zeros where there is none and in the padding.

    Args:
        grads: full-shape gradients, or None; any dtype.
        out_views: full-shape views of the buffer.
        tail: the padding's view of the buffer.
    """
    present = [(v, g) for v, g in zip(out_views, grads, strict=True) if g is not None]
    if present:
        torch._foreach_copy_([v for v, _ in present], [g for _, g in present])
    for view, grad in zip(out_views, grads, strict=True):
        if grad is None:
            view.zero_()
    tail.zero_()


class PackBuffers:
    """Two staging buffers for gradients on their way out, shared by all param groups.

    Taking one waits for the reduction that still reads it, which bounds full-size gradients in flight to
    two param groups and orders the reuse.
    """

    def __init__(self, lanes: Lanes, count: int = 2) -> None:
        self._device = lanes.device
        self._flats: list[torch.Tensor | None] = [None] * count
        self._busy: list[Event | None] = [None] * count
        self._next = 0

    def take(self, numel: int, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
        """A slot number and a 1-D buffer of ``numel`` elements that nothing reads any more."""
        slot, self._next = self._next, (self._next + 1) % len(self._flats)
        busy, self._busy[slot] = self._busy[slot], None
        if busy is not None:
            busy.wait()
        flat = self._flats[slot]
        nbytes = numel * dtype.itemsize
        if flat is None or flat.numel() < nbytes:
            self._flats[slot] = flat = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return slot, flat[:nbytes].view(dtype)

    def reading(self, slot: int, event: Event) -> None:
        """Whatever ``event`` completes reads the slot until then."""
        self._busy[slot] = event

    def release(self) -> None:
        """Give the memory back; every reader must be done."""
        self._flats = [None] * len(self._flats)


class HandOvers:
    """Keeps tensors that the reduce lane made alive until the sync lane has read them.

    An accelerator's allocator gives memory freed by one stream back to that stream, which must therefore not
    run ahead of a reader on another. Dropping them on the reduce lane, after the reader, orders that without
    waiting on the host; ``limit`` of them may be outstanding.
    """

    def __init__(self, lanes: Lanes, limit: int = 4) -> None:
        self._lanes = lanes
        self._limit = limit
        self._outstanding: deque[tuple[Event, Callable[[], None]]] = deque()

    def add(self, read: Event, drop: Callable[[], None]) -> None:
        """``drop`` lets go of a tensor whose reader is done at ``read``."""
        self._outstanding.append((read, drop))
        if len(self._outstanding) > self._limit:
            event, oldest = self._outstanding.popleft()
            self._lanes.reduce.run(oldest, after=[event])

    def clear(self) -> None:
        """Drop all; the caller is ordered after every reader."""
        while self._outstanding:
            self._outstanding.popleft()[1]()


def held_view(flat: torch.Tensor, offset: int, held: Range, ndim: int) -> torch.Tensor:
    """View of ``flat[offset : offset + held.numel]`` with shape ``(k, 1, ..., 1)``; ``()`` for a held 0-d one."""
    part = flat[offset : offset + held.numel]
    if ndim == 0:
        return part.view(()) if held.numel else part
    return part.view(held.numel, *(1,) * (ndim - 1))
