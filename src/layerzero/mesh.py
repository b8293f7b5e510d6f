"""The data-parallel group: its ranks, my place in it, and process groups per axis."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from layerzero.errors import ShardingError
from layerzero.sharding import Axes


@dataclass(frozen=True)
class Mesh:
    """One rank's view of the data-parallel group.

    Attributes:
        ranks: global ranks of the group, in data-parallel order.
        rank: this process's data-parallel rank, an index into `ranks`.
    """

    ranks: tuple[int, ...]
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> Mesh:
        """The whole world, or the ranks of a DeviceMesh whose dimensions are all data-parallel.

        Pass one dimension (``mesh["dp"]``) or several of a larger mesh (``mesh["dp", "cp"]``); several are
        flattened with the last one innermost. Without torch.distributed the group is this one process.

        Raises:
            ShardingError: if a mesh is given before torch.distributed is initialised, or does not hold
                this rank.
        """
        if mesh is None:
            if not (dist.is_available() and dist.is_initialized()):
                if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                    raise ShardingError(
                        f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but torch.distributed is not initialised, so every "
                        f"rank would train alone: call torch.distributed.init_process_group before lz.shard"
                    )
                return cls((0,), 0)
            return cls(tuple(range(dist.get_world_size())), dist.get_rank())
        if not dist.is_initialized():
            raise ShardingError("mesh= needs torch.distributed: call torch.distributed.init_process_group first")
        ranks = tuple(mesh.mesh.flatten().tolist())
        if dist.get_rank() not in ranks:
            raise ShardingError(f"rank {dist.get_rank()} is not in the data-parallel mesh of ranks {list(ranks)}")
        return cls(ranks, ranks.index(dist.get_rank()))

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)

    def new_group(self) -> dist.ProcessGroup | None:
        """A process group of its own over all ranks; None for one rank."""
        return self._new_group(self.ranks) if self.size > 1 else None

    def new_axis_groups(self, axes: Axes, which: range) -> dict[int, dist.ProcessGroup]:
        """A process group of its own per axis in ``which``, holding this rank."""
        return {axis: self._new_group(tuple(self.ranks[r] for r in axes.neighbours(self.rank, axis))) for axis in which}

    @staticmethod
    def _new_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
        # Local synchronisation: only members take part, so that pipeline stages and tensor-parallel
        # replicas need not construct their groups in step with each other.
        group = dist.new_group(list(ranks), use_local_synchronization=True, timeout=default_timeout())
        assert isinstance(group, dist.ProcessGroup)
        _made.add(group)
        return group


_made: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def end_gloo_groups() -> None:
    """End those made here that are still there, at the end of a program that did not end them itself.

    Otherwise gloo's threads, when the interpreter is gone, often end the process by SIGABRT ("terminate called without
    an active exception"), which makes a run that was through a failed one.
    """
    for group in list(_made):
        if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map and dist.get_backend(group) == "gloo":
            dist.destroy_process_group(group)


def default_timeout() -> timedelta | None:
    """The timeout the user gave ``init_process_group``, which `new_group` does not inherit."""
    for backend in ("cpu", torch.accelerator.current_accelerator()):
        with contextlib.suppress(RuntimeError, AttributeError, TypeError):
            return dist.group.WORLD._get_backend(torch.device(backend)).options._timeout  # type: ignore[union-attr]
    return None


def compute_device(mesh: DeviceMesh | None, params: Sequence[torch.Tensor]) -> torch.device:
    """Where sharded state lives: the mesh's device type, else where the parameters are."""
    kind = mesh.device_type if mesh is not None else None
    if kind is None:
        kinds = {p.device.type for p in params} - {"meta"}
        if len(kinds) > 1:
            raise ShardingError(f"parameters lie on several devices {sorted(kinds)}: move the module to one first")
        kind = kinds.pop() if kinds else None
    on_gpu_backend = dist.is_initialized() and "gloo" not in str(dist.get_backend())
    accelerator = torch.accelerator.current_accelerator()
    if kind in (None, "cpu") and accelerator is not None and on_gpu_backend and dist.get_backend() != "fake":
        kind = accelerator.type  # as DDP users expect, a CPU-built module moves to where its collectives run
    if kind in (None, "cpu"):
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())
