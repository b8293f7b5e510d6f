"""The only caller of torch.distributed collectives; counts operations and bytes per axis.

[Note: bytes]
A traffic count is what one rank has to *send* with a bandwidth-optimal algorithm: ``(m - 1)`` times its
shard for an all-gather over ``m`` ranks of shards, ``(m - 1)/m`` of its buffer for a reduce-scatter, twice
that for an all-reduce. Small messages are counted apart, under the axis `CONTROL`: "control" from the compute
thread (structure check, reduction order, norms), "check" from the unshard lane (ids of units).

[Note: reductions on CPU]
gloo implements reduce-scatter as an all-reduce, which sends twice the bytes, and it sums in the wire dtype.
Here a reduction is an exchange of slices in the wire dtype followed by a local sum in fp32: half the bytes and
one rounding per axis. Ranks that share a memory bus are limited by it, so the sum, its scaling, the addition to
earlier micro-batches and the rounding for the next axis are one pass over cache-sized chunks; as separate
operations they took three times as long as the exchange itself.

[Note: copies in gloo]
gloo's all-gather gathers into a buffer of its own and copies it out, and its all-to-all copies this rank's own
slice. On axes of up to `_FEW` ranks a gather is one broadcast per rank, straight into place, and an exchange is
sends and receives: the same bytes on the wire. On larger axes the host's time for so many messages counts more.
Up to `_SMALL_NBYTES` a copy costs less than the operations it saves.

[Note: host time]
Nearly every call of torch gives the interpreter's lock away and takes it back, two switches of threads where
another one waits for it: with small units most of what a lane costs. So lanes keep the views they need.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist

Op = Literal["unshard", "refresh", "reduce", "sync", "control", "check", "exchange", "tensor", "tied"]
CONTROL = -1
"""Axis number under which is counted what follows no axis: control messages, and sums over tensor-parallel ranks or
over pipeline stages with tied parameters."""


def _pick(*names: str):
    for name in names:
        if hasattr(dist, name):
            return getattr(dist, name)
    raise ImportError(f"this torch has none of torch.distributed.{'/'.join(names)}")


_FEW = 2
_SMALL_NBYTES = 1 << 16
"""Of a slice. With gloo and two ranks one gather is the faster up to four times this; an exchange breaks even here."""
_CHUNK_NUMEL = 1 << 16
"""Elements summed at a time: twice 256 KiB of fp32 stay in a core's cache."""

_all_gather = _pick("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _pick("reduce_scatter_single", "reduce_scatter_tensor")


@dataclass
class Count:
    """Collectives issued and bytes this rank sent in them."""

    num: int = 0
    nbytes: int = 0


@dataclass
class Traffic:
    """Counters by (operation, axis). Each lane writes its own keys only, so no lock is needed."""

    counts: dict[tuple[Op, int], Count] = field(default_factory=lambda: defaultdict(Count))
    peak_unsharded_units: int = 0
    num_synced_backwards: int = 0
    num_backwards: int = 0
    _paused: bool = False

    def add(self, op: Op, axis: int, nbytes: int) -> None:
        """Count one collective."""
        if self._paused:
            return
        count = self.counts[op, axis]
        count.num += 1
        count.nbytes += nbytes

    def reset(self) -> None:
        """Start counting from zero."""
        self.counts.clear()
        self.peak_unsharded_units = self.num_synced_backwards = self.num_backwards = 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing inside is counted: it is no part of training."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __iter__(self) -> Iterator[tuple[Op, int, Count]]:
        for (op, axis), count in sorted(self.counts.items()):
            yield op, axis, count


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class _Rows:
    flat: torch.Tensor  # [m * n]
    whole: torch.Tensor  # the same as [m, n]
    rows: tuple[torch.Tensor, ...]  # m views [n]


class Scratch:
    """Host memory that one lane uses within one job at a time: grows to what the largest needs and stays."""

    def __init__(self) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._taken: dict[tuple[int, int, torch.dtype], _Rows] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._flat.numel()

    def take(self, num_rows: int, numel: int, dtype: torch.dtype) -> _Rows:
        """Uninitialised until the next call."""
        known = self._taken.get((num_rows, numel, dtype))
        if known is not None:
            return known
        nbytes = num_rows * numel * dtype.itemsize
        if self._flat.numel() < nbytes:
            self._taken.clear()
            self._flat = torch.empty(nbytes, dtype=torch.uint8)
        flat = self._flat[:nbytes].view(dtype)
        whole = flat.view(num_rows, numel)
        self._taken[num_rows, numel, dtype] = made = _Rows(flat, whole, whole.unbind())
        return made


@dataclass(frozen=True)
class AxisComm:
    """Collectives of one lane along one axis.

    Attributes:
        group: process group of the ranks along the axis, used by this lane only.
        size: ranks in it.
        op: what the lane's traffic is counted as.
        axis: axis number, innermost 0.
        scratch: the lane's.
    """

    group: dist.ProcessGroup
    size: int
    op: Op
    axis: int
    traffic: Traffic
    scratch: Scratch = field(default_factory=Scratch)

    def global_ranks(self) -> list[int]:
        """Global ranks along the axis, in coordinate order."""
        return dist.get_process_group_ranks(self.group)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """``out`` [size * n] becomes the ``shard`` [n] of every rank; ``shard`` may be its place in ``out``."""
        self.traffic.add(self.op, self.axis, _nbytes(shard) * (self.size - 1))
        _gather(out, shard, self.group)

    def reduce_scatter_mean(
        self, wire: torch.Tensor, accum: torch.Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Mean over the axis of this rank's slice of ``wire`` [n], plus ``accum``, in ``dtype`` [n / size].

        Summed in fp32. ``accum`` [n / size] is fp32 and is itself the result where ``dtype`` is fp32 too.
        """
        self.traffic.add(self.op, self.axis, _nbytes(wire) // self.size * (self.size - 1))
        return self._reduce_scatter_mean(wire, accum, dtype)

    def _reduce_scatter_mean(self, wire: torch.Tensor, accum: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        numel = wire.numel() // self.size
        if not wire.is_cpu:
            shard = wire.new_empty(numel)
            _reduce_scatter(shard, wire, op=dist.ReduceOp.AVG, group=self.group)
            return (shard if accum is None else accum.add_(shard)).to(dtype)
        rows = _exchange(wire, self.group, self.scratch)
        if isinstance(rows, torch.Tensor):
            return _mean_at_once(rows, accum, dtype)
        out = accum if accum is not None and dtype is torch.float32 else wire.new_empty(numel, dtype=dtype)
        add_in_chunks(rows, accum, out, 1.0 / self.size)
        return out

    def all_reduce_mean(self, wire: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Mean over the axis of ``wire`` [n], rounded once to the wire dtype, as ``dtype`` [n]; same on every rank."""
        self.traffic.add(self.op, self.axis, 2 * (_nbytes(wire) // self.size) * (self.size - 1))
        shard = self._reduce_scatter_mean(wire, None, wire.dtype)
        out = torch.empty_like(wire)
        _gather(out, shard, self.group)
        return out.to(dtype)


@dataclass(frozen=True)
class SumComm:
    """Sums over ranks outside the data-parallel group that hold the same parameters.

    Attributes:
        group: process group used by one lane, or by the compute thread, only.
        size: ranks in it.
        op: what the traffic is counted as.
    """

    group: dist.ProcessGroup
    size: int
    op: Op
    traffic: Traffic

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """In-place sum, equal bit by bit on every rank."""
        self.traffic.add(self.op, CONTROL, 2 * _nbytes(tensor) * (self.size - 1) // self.size)
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def broadcast(self, tensor: torch.Tensor, global_rank: int) -> torch.Tensor:
        """In-place broadcast from one of the ranks; not counted, as it is no part of training."""
        dist.broadcast(tensor, src=global_rank, group=self.group)
        return tensor


@dataclass(frozen=True)
class Control:
    """Small collectives over the whole data-parallel (or tensor-parallel) group, called from the compute thread.

    With one rank every method is the identity and nothing is sent.
    """

    group: dist.ProcessGroup | None
    size: int
    device: torch.device
    traffic: Traffic

    def first_global_rank(self) -> int:
        """Global rank of data-parallel rank 0."""
        if self.group is None:  # alone, be it in the world or in a stage or tensor-parallel rank of its own
            return dist.get_rank() if dist.is_initialized() else 0
        return dist.get_process_group_ranks(self.group)[0]

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """In-place all-reduce of a small tensor."""
        if self.group is not None:
            self.traffic.add("control", CONTROL, 2 * _nbytes(tensor) * (self.size - 1) // self.size)
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """In-place broadcast from the group's rank 0."""
        if self.group is not None:
            self.traffic.add("control", CONTROL, _nbytes(tensor))
            dist.broadcast(tensor, group_src=0, group=self.group)
        return tensor

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """``data`` of every rank, in rank order. Raw bytes on the wire: objects would travel as pickles."""
        if self.group is None:
            return [data]
        lengths = self._gather(torch.tensor([len(data)], dtype=torch.int64)).tolist()
        width = max(1, *lengths)
        padded = torch.zeros(width, dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
        rows = self._gather(padded).view(self.size, width)
        return [bytes(row[:n].tolist()) for row, n in zip(rows, lengths, strict=True)]

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(self.device)
        out = tensor.new_empty(tensor.numel() * self.size)
        self.traffic.add("control", CONTROL, _nbytes(tensor) * (self.size - 1))
        _all_gather(out, tensor, group=self.group)
        return out.cpu()


@dataclass(frozen=True)
class ActivationComm:
    """Collectives of activations inside a group that shares samples, called from the compute thread.

    Counted as "exchange" along axis 0 of a `Traffic` of its own. One rank sends nothing.
    """

    group: dist.ProcessGroup | None
    size: int
    traffic: Traffic

    def exchange(self, pieces: Sequence[torch.Tensor], numels: Sequence[int]) -> list[torch.Tensor]:
        """``pieces[r]``, flat and contiguous, goes to rank r; what came from each rank, ``numels[r]`` elements.

        This rank's own piece is returned as it is.
        """
        if self.group is None:
            return list(pieces)
        me = self.group.rank()
        others = [(me + i) % self.size for i in range(1, self.size)]
        self.traffic.add("exchange", 0, sum(_nbytes(pieces[r]) for r in others))
        if pieces[me].device.type == "cpu" and self.size <= _FEW:
            received = [pieces[me] if r == me else pieces[me].new_empty(n) for r, n in enumerate(numels)]
            works = [dist.irecv(received[r], group=self.group, group_src=r) for r in others if numels[r]]
            works += [dist.isend(pieces[r], group=self.group, group_dst=r) for r in others if pieces[r].numel()]
            for work in works:
                if work is not None:
                    work.wait()
            return received
        send_numels = [0 if r == me else pieces[r].numel() for r in range(self.size)]
        receive_numels = [0 if r == me else n for r, n in enumerate(numels)]
        send = torch.cat([piece for r, piece in enumerate(pieces) if r != me])
        parts = send.new_empty(sum(receive_numels))
        dist.all_to_all_single(parts, send, receive_numels, send_numels, group=self.group)
        return [pieces[me] if r == me else part for r, part in enumerate(parts.split(receive_numels))]

    def all_gather(self, part: torch.Tensor, op: Op = "exchange") -> torch.Tensor:
        """``part`` [n] of every rank, [size * n] in rank order."""
        if self.group is None:
            return part
        self.traffic.add(op, CONTROL if op == "control" else 0, _nbytes(part) * (self.size - 1))
        out = part.new_empty(part.numel() * self.size)
        if out.is_cpu and self.size <= _FEW:
            _gather_into_place(out, part, self.group)
        else:
            _all_gather(out, part, group=self.group)
        return out

    def all_reduce_sum(self, small: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, a new tensor."""
        out = small.clone()
        if self.group is not None:
            self.traffic.add("control", CONTROL, 2 * _nbytes(small) * (self.size - 1) // self.size)
            dist.all_reduce(out, group=self.group)
        return out


def sum_in_fp32(rows: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum over dim 0 of ``rows`` [m, n], or of m tensors [n], in fp32 [n]; always a new tensor."""
    if len(rows) > 8 and isinstance(rows, torch.Tensor):
        return rows.sum(0, dtype=torch.float32)
    total = rows[0].to(torch.float32, copy=True)
    for row in rows[1:]:  # adds without a copy of all rows in fp32, which `sum` makes of half precision
        total.add_(row)
    return total


def _gather(out: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    if out.is_cpu and group.size() <= _FEW and _nbytes(shard) > _SMALL_NBYTES:
        _gather_into_place(out, shard, group)
    else:
        _all_gather(out, shard, group=group)


def _gather_into_place(out: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All-gather on a CPU; see [Note: copies in gloo]."""
    places = out.view(group.size(), -1).unbind()
    mine = places[group.rank()]
    if mine.data_ptr() != shard.data_ptr():
        mine.copy_(shard)
    works = [dist.broadcast(p, group_src=i, group=group, async_op=True) for i, p in enumerate(places)]
    for work in works:
        if work is not None:
            work.wait()


def _exchange(wire: torch.Tensor, group: dist.ProcessGroup, scratch: Scratch) -> list[torch.Tensor] | torch.Tensor:
    """This rank's slice of ``wire`` [m * n] as every rank along the axis has it: m tensors [n] or one [m, n]."""
    size, me = group.size(), group.rank()
    numel = wire.numel() // size
    if size > _FEW:
        received = scratch.take(size, numel, wire.dtype)
        dist.all_to_all_single(received.flat, wire, group=group)
        return received.whole
    is_small = numel * wire.itemsize <= _SMALL_NBYTES
    slices = wire.chunk(size)
    received = scratch.take(size if is_small else size - 1, numel, wire.dtype)
    rows = list(received.rows)
    if not is_small:
        rows.insert(me, slices[me])
    others = [(me + i) % size for i in range(1, size)]
    works = [dist.irecv(rows[r], group=group, group_src=r) for r in others]
    works += [dist.isend(slices[r], group=group, group_dst=r) for r in others]
    if is_small:
        rows[me].copy_(slices[me])
    for work in works:
        if work is not None:
            work.wait()
    return received.whole if is_small else rows


def _mean_at_once(rows: torch.Tensor, accum: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Mean of ``rows`` [m, n], summed in fp32, plus ``accum`` [n], which is the result where ``dtype`` is fp32 too."""
    scale, total = 1.0 / rows.shape[0], rows.sum(0, dtype=torch.float32)
    if accum is None:
        mean = total.mul_(scale)
    else:
        mean = torch.add(accum, total, alpha=scale, out=accum if dtype is torch.float32 else total)
    return mean if dtype is torch.float32 else mean.to(dtype)


def add_in_chunks(
    rows: Sequence[torch.Tensor], accum: torch.Tensor | None, out: torch.Tensor, scale: float = 1.0
) -> None:
    """On the host, ``out`` [n] = ``scale`` times the sum of ``rows``, each [n], plus ``accum`` [n], rounded once.

    Summed in fp32, in which ``accum`` is; it may be ``out``. Rows and ``out`` are of any dtype and contiguous.
    """
    is_fp32 = out.dtype is torch.float32
    buffers = torch.empty(2, min(_CHUNK_NUMEL, out.numel()), dtype=torch.float32)
    outs = out.split(_CHUNK_NUMEL)
    accums = [None] * len(outs) if accum is None else accum.split(_CHUNK_NUMEL)
    chunks = zip(*(row.split(_CHUNK_NUMEL) for row in rows), strict=True)
    for mine, before, part in zip(chunks, accums, outs, strict=True):
        total, term = buffers[:, : part.numel()].unbind()
        total.copy_(mine[0])
        for row in mine[1:]:
            total.add_(term.copy_(row))  # an addition of mixed dtypes takes twice as long
        into = part if is_fp32 else total
        if before is None:
            torch.mul(total, scale, out=into)
        else:
            torch.add(before, total, alpha=scale, out=into)
        if not is_fp32:
            part.copy_(total)


def all_gather_ids(value: int, comm: AxisComm, device: torch.device) -> list[int]:
    """``value`` of every rank along an axis, on the group that carries the axis's gathers."""
    out = torch.empty(comm.size, dtype=torch.int64, device=device)
    comm.traffic.add("check", CONTROL, 8 * (comm.size - 1))
    _all_gather(out, torch.tensor([value], dtype=torch.int64, device=device), group=comm.group)
    return out.tolist()
