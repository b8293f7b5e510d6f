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
    """All-gathers between two degrees of one layout into one buffer, outermost axis first.

    Intermediate pieces are gathered in place inside the result.
    """

    def __init__(
        self, out: torch.Tensor, layout: GroupLayout, rank: int, comms: Mapping[int, AxisComm], axes: range
    ) -> None:
        """Into ``out``, 1-D of degree ``axes.start``, from degree ``axes.stop``; no axes copy."""
        self._out = out
        base = layout.slice(rank, axes.start).start
        places = [(comms[axis], layout.slice(rank, axis).shift(-base)) for axis in reversed(axes)]
        self._moves = [(comm, out[place.start : place.stop]) for comm, place in places]

    def __call__(self, shard: torch.Tensor) -> None:
        """Gather from ``shard``, this rank's 1-D slice of the higher degree and of the same dtype.

        It may be its place in ``out``.
        """
        for comm, piece in self._moves:
            comm.all_gather(piece, shard)
            shard = piece
        if not self._moves and self._out.data_ptr() != shard.data_ptr():
            self._out.copy_(shard)


class Staged:
    """A flat buffer that gradients are packed into.

    Attributes:
        wire: the buffer, 1-D.
        views: full-shape views of it, one for each parameter.
    """

    def __init__(self, wire: torch.Tensor, layout: GroupLayout) -> None:
        self.wire = wire
        self.views = views(wire, layout)
        self._padding = wire[layout.used_numel :] if layout.padding_numel else None

    def pack(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Copy full-shape gradients of any dtype into their places; zeros where there is None and in the padding."""
        present = [(v, g) for v, g in zip(self.views, grads, strict=True) if g is not None]
        if present:
            torch._foreach_copy_([v for v, _ in present], [g for _, g in present])
        for view, grad in zip(self.views, grads, strict=True):
            if grad is None:
                view.zero_()
        self.zero_padding()

    def zero_padding(self) -> None:
        """Zeros behind the last parameter."""
        if self._padding is not None:
            self._padding.zero_()


class PackBuffers:
    """Two staging buffers for gradients on their way out, shared by all param groups.

    Taking one waits for the reduction that still reads it, which bounds full-size gradients in flight to
    two param groups and orders the reuse.
    """

    def __init__(self, lanes: Lanes, count: int = 2) -> None:
        self._device = lanes.device
        self._flats: list[torch.Tensor | None] = [None] * count
        self._wires: list[dict[tuple[int, torch.dtype], torch.Tensor]] = [{} for _ in range(count)]
        self._busy: list[Event | None] = [None] * count
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(flat.numel() for flat in self._flats if flat is not None)

    def is_free(self, timeout: float) -> bool:
        """Whether `take` would not wait, or stop waiting within ``timeout`` seconds."""
        busy = self._busy[self._next]
        return busy is None or busy.is_done(timeout)

    def take(self, numel: int, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
        """A slot number and a 1-D buffer of ``numel`` elements that nothing reads any more.

        The same tensor each time, until the slot has to grow.
        """
        slot, self._next = self._next, (self._next + 1) % len(self._flats)
        busy, self._busy[slot] = self._busy[slot], None
        if busy is not None:
            busy.wait()
        wire = self._wires[slot].get((numel, dtype))
        if wire is None:
            flat, nbytes = self._flats[slot], numel * dtype.itemsize
            if flat is None or flat.numel() < nbytes:
                self._wires[slot].clear()
                self._flats[slot] = flat = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._wires[slot][numel, dtype] = wire = flat[:nbytes].view(dtype)
        return slot, wire

    def reading(self, slot: int, event: Event) -> None:
        """Whatever ``event`` completes reads the slot until then."""
        self._busy[slot] = event


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
