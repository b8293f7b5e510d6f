"""`ContextParallel`: the ranks that share samples, and moving tensors between their parts."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from layerzero.collectives import ActivationComm, Traffic
from layerzero.errors import DesyncError, ShardingError
from layerzero.parallel.context.exchange import Exchange, Gather, Move, ReduceScatter
from layerzero.parallel.mesh import ParallelMesh

NUM_CHECKED_FORWARDS = 2
"""Forwards of a parallelized model whose inputs are compared; a wrong data loader shows in the first."""


@dataclass(frozen=True, eq=False)
class ContextParallel:
    """One context-parallel group, as this rank sees it. Every method that communicates is collective in the group.

    Attributes:
        rank: this rank's position in the group.
        size: ranks in the group; 1 makes everything the identity.
        comm: its collectives; ``comm.traffic`` counts them.
        mesh: the group as a one-dimensional mesh, None for one rank.
    """

    rank: int
    size: int
    comm: ActivationComm
    mesh: DeviceMesh | None = field(default=None, repr=False)

    @classmethod
    def of(cls, mesh: ParallelMesh | DeviceMesh | None) -> ContextParallel:
        """The cp dimension of a `ParallelMesh`, or a one-dimensional DeviceMesh; None is this rank alone.

        Raises:
            ShardingError: if a DeviceMesh has several dimensions.
        """
        if isinstance(mesh, ParallelMesh):
            mesh = mesh.cp
        if mesh is None:
            return cls(0, 1, ActivationComm(None, 1, Traffic()))
        if mesh.ndim != 1:
            raise ShardingError(
                f'ContextParallel: expected a mesh of one dimension, got {mesh.mesh_dim_names}: pass mesh["cp"]'
            )
        group = mesh.get_group()
        size = dist.get_world_size(group)
        comm = ActivationComm(group if size > 1 else None, size, Traffic())
        return cls(dist.get_rank(group), size, comm, mesh)

    def parts(self, length: int) -> tuple[int, ...]:
        """Elements of every rank's part of a dimension; see [Note: parts]."""
        short, num_longer = divmod(length, self.size)
        return tuple(short + (rank < num_longer) for rank in range(self.size))

    def part(self, length: int) -> range:
        """This rank's part of a dimension."""
        parts = self.parts(length)
        start = sum(parts[: self.rank])
        return range(start, start + parts[self.rank])

    def split(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a tensor that all ranks of the group hold, as memory of its own."""
        mine = self.part(whole.size(dim))
        part = whole.narrow(dim, mine.start, len(mine))
        return part if self.size == 1 else part.clone(memory_format=torch.contiguous_format)

    def gather(self, part: torch.Tensor, dim: int, length: int | None = None) -> torch.Tensor:
        """The whole tensor on every rank from its parts; ``length`` as in `switch`."""
        if self.size == 1:
            return part
        parts = self._parts_of(part, dim, length)
        return Gather.apply(self.comm, self.rank, dim % part.ndim, parts, part)

    def reduce_scatter(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of the sum over the ranks of their tensors; the transpose of `gather`."""
        if self.size == 1:
            return whole
        dim %= whole.ndim
        return ReduceScatter.apply(self.comm, self.rank, dim, self.parts(whole.size(dim)), whole)

    def switch(
        self, tensor: torch.Tensor, *, gather_dim: int, split_dim: int, length: int | None = None
    ) -> torch.Tensor:
        """From a tensor split along ``gather_dim`` to the same tensor split along ``split_dim``.

        The dynamic sequence parallelism of Zhao et al. (2024): a video model that attends over space and then
        over time keeps each attention local by switching between them. One all-to-all, of which a rank sends
        ``(size - 1) / size`` of its part.

        Args:
            tensor: part along ``gather_dim``, whole along ``split_dim``.
            length: of the whole ``gather_dim``; None where all parts are equally long.

        Raises:
            ShardingError: if the part is not as long as this rank's part of ``length`` has to be.
        """
        if self.size == 1:
            return tensor
        gather_dim, split_dim = gather_dim % tensor.ndim, split_dim % tensor.ndim
        parts = self._parts_of(tensor, gather_dim, length)
        move = Move(gather_dim, split_dim, parts, self.ranges(tensor.size(split_dim)))
        return Exchange.apply(self.comm, self.rank, (move,), tensor)[0]

    def check_alike(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Compare shapes and values on all ranks of the group, through a checksum on the host.

        Raises:
            DesyncError: names the first tensor that differs, on every rank.
        """
        texts = {name: f"{tuple(t.shape)} {t.dtype} {_checksum(t)}" for name, t in tensors.items() if t is not None}
        device = next((t.device for t in tensors.values() if t is not None), torch.device("cpu"))
        mine = torch.tensor([zlib.crc32(text.encode()) for text in texts.values()], dtype=torch.int64, device=device)
        all_ranks = self.comm.all_gather(mine, "control").view(self.size, -1)
        for name, column in zip(texts, all_ranks.unbind(1), strict=True):
            if len(set(column.tolist())) > 1:
                raise DesyncError(
                    f"ranks that share samples were given different {name} (here {texts[name].rpartition(' ')[0]}): "
                    f"they need the same samples and the same noise. Choose data and seeds by the data-parallel "
                    f'coordinate, mesh.coordinate("dp"), not by the rank.'
                )

    def ranges(self, length: int) -> tuple[tuple[int, int], ...]:
        """(start, length) of every rank's part of a dimension."""
        parts = self.parts(length)
        return tuple((sum(parts[:rank]), parts[rank]) for rank in range(self.size))

    def _parts_of(self, tensor: torch.Tensor, dim: int, length: int | None) -> tuple[int, ...]:
        held = tensor.size(dim)
        parts = self.parts(held * self.size if length is None else length)
        if parts[self.rank] != held:
            raise ShardingError(
                f"context-parallel rank {self.rank} of {self.size} holds {held} elements of dimension {dim}, expected "
                f"{parts[self.rank]} of {length}: split the tensor with ContextParallel.split, or pass its own length"
            )
        return parts


def _checksum(tensor: torch.Tensor) -> int:
    """Of the bytes and their places."""
    total = 0
    for chunk in tensor.detach().reshape(-1).contiguous().view(torch.uint8).split(1 << 20):
        weights = torch.arange(1, len(chunk) + 1, device=chunk.device)
        total = (total * 31 + int((chunk.to(torch.int64) * weights).sum())) % (2**61 - 1)
    return total
