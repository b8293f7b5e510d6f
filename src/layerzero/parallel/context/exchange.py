"""Ragged all-to-all between two dimensions, and all-gather along one, as autograd functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from layerzero.collectives import ActivationComm, sum_in_fp32


@dataclass(frozen=True)
class Move:
    """How one tensor goes from being split along one dimension to being split along another.

    Attributes:
        gather_dim: split over the ranks before, whole after.
        split_dim: whole before, split after.
        parts: elements along `gather_dim` that each rank holds before.
        ranges: (start, length) along `split_dim` that each rank gets. They may overlap, as the key heads do that
            several ranks' query heads share; gradients of overlapping ranges add up.
    """

    gather_dim: int
    split_dim: int
    parts: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]

    @property
    def offsets(self) -> list[int]:
        """Where each rank's part starts along `gather_dim`."""
        return list(accumulate(self.parts, initial=0))[:-1]

    def piece(self, shape: Sequence[int], source: int, target: int) -> list[int]:
        """Shape of what rank ``source`` sends to rank ``target``; ``shape`` is the tensor's on any rank."""
        sizes = list(shape)
        sizes[self.gather_dim], sizes[self.split_dim] = self.parts[source], self.ranges[target][1]
        return sizes


class Exchange(torch.autograd.Function):
    """Several tensors of one dtype at once, in one collective."""

    @staticmethod
    def forward(
        ctx: Any, comm: ActivationComm, rank: int, moves: tuple[Move, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.comm, ctx.rank, ctx.moves = comm, rank, moves
        ctx.shapes = [t.shape for t in tensors]
        ranks = range(comm.size)
        pairs = list(zip(moves, tensors, strict=True))
        received = _all_to_all(
            comm,
            rank,
            [[x.narrow(m.split_dim, *m.ranges[target]) for m, x in pairs] for target in ranks],
            [[m.piece(x.shape, source, rank) for m, x in pairs] for source in ranks],
        )
        return tuple(torch.cat([pieces[i] for pieces in received], m.gather_dim) for i, m in enumerate(moves))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        comm, rank, moves = ctx.comm, ctx.rank, ctx.moves
        ranks = range(comm.size)
        received = _all_to_all(
            comm,
            rank,
            [
                [g.narrow(m.gather_dim, m.offsets[target], m.parts[target]) for m, g in zip(moves, grads, strict=True)]
                for target in ranks
            ],
            [[m.piece(s, rank, source) for m, s in zip(moves, ctx.shapes, strict=True)] for source in ranks],
        )
        return (None, None, None, *(_assemble(m, [p[i] for p in received]) for i, m in enumerate(moves)))


def _assemble(move: Move, pieces: list[torch.Tensor]) -> torch.Tensor:
    """The tensor before the exchange from its pieces; overlapping ones are added."""
    ends = [start + length for start, length in move.ranges]
    if all(start == end for (start, _), end in zip(move.ranges, [0, *ends], strict=False)):
        return torch.cat(pieces, move.split_dim)
    shape = list(pieces[0].shape)
    shape[move.split_dim] = max(ends)
    whole = pieces[0].new_zeros(shape)
    for (start, length), piece in zip(move.ranges, pieces, strict=True):
        whole.narrow(move.split_dim, start, length).add_(piece)
    return whole


def _all_to_all(
    comm: ActivationComm, rank: int, pieces: list[list[torch.Tensor]], shapes: list[list[list[int]]]
) -> list[list[torch.Tensor]]:
    """``pieces[target]`` of this rank go to rank ``target``; what came from each source, of the given shapes."""
    if comm.size == 1:
        return pieces
    own = pieces[rank]
    rows = [own[0].new_empty(0) if target == rank else _end_to_end(row) for target, row in enumerate(pieces)]
    received = comm.exchange(rows, [sum(map(math.prod, row)) for row in shapes])
    return [
        own if source == rank else [x.view(s) for x, s in zip(flat.split([*map(math.prod, row)]), row, strict=True)]
        for source, (flat, row) in enumerate(zip(received, shapes, strict=True))
    ]


def _end_to_end(pieces: list[torch.Tensor]) -> torch.Tensor:
    """All pieces, flat; one that is contiguous already is not copied."""
    flat = [piece.reshape(-1).contiguous() for piece in pieces]  # reshaping may leave an expanded tensor expanded
    return flat[0] if len(flat) == 1 else torch.cat(flat)


class Gather(torch.autograd.Function):
    """Parts along a dimension become the whole on every rank. Backward: `ReduceScatter`."""

    @staticmethod
    def forward(
        ctx: Any, comm: ActivationComm, rank: int, dim: int, parts: tuple[int, ...], part: torch.Tensor
    ) -> torch.Tensor:
        ctx.comm, ctx.rank, ctx.dim, ctx.parts = comm, rank, dim, parts
        return _all_gather(comm, dim, parts, part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return None, None, None, None, _reduce_scatter(ctx.comm, ctx.rank, ctx.dim, ctx.parts, grad)


class ReduceScatter(torch.autograd.Function):
    """Each rank's part along a dimension of the sum of all ranks' tensors, in fp32. Backward: `Gather`."""

    @staticmethod
    def forward(
        ctx: Any, comm: ActivationComm, rank: int, dim: int, parts: tuple[int, ...], whole: torch.Tensor
    ) -> torch.Tensor:
        ctx.comm, ctx.dim, ctx.parts = comm, dim, parts
        return _reduce_scatter(comm, rank, dim, parts, whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return None, None, None, None, _all_gather(ctx.comm, ctx.dim, ctx.parts, grad)


def _all_gather(comm: ActivationComm, dim: int, parts: tuple[int, ...], part: torch.Tensor) -> torch.Tensor:
    if len(set(parts)) == 1 and all(n == 1 for n in part.shape[:dim]):  # the ranks' parts are the whole, end to end
        shape = list(part.shape)
        shape[dim] = sum(parts)
        return comm.all_gather(part.reshape(-1)).view(shape)
    rows = part.movedim(dim, 0)
    padded = torch.cat([rows, rows.new_zeros(max(parts) - len(rows), *rows.shape[1:])])  # all-gather takes equal parts
    gathered = comm.all_gather(padded.reshape(-1)).view(comm.size, *padded.shape)
    return torch.cat([piece[:n] for piece, n in zip(gathered, parts, strict=True)]).movedim(0, dim).contiguous()


def _reduce_scatter(
    comm: ActivationComm, rank: int, dim: int, parts: tuple[int, ...], whole: torch.Tensor
) -> torch.Tensor:
    pieces = [[piece] for piece in whole.split(parts, dim)]
    shape = list(pieces[rank][0].shape)
    rows = [row[0].reshape(-1) for row in _all_to_all(comm, rank, pieces, [[shape] for _ in parts])]
    return sum_in_fp32(rows).to(whole.dtype).view(shape)
