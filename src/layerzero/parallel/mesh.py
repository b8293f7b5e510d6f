"""`ParallelMesh`: which rank does what when data parallelism is combined with other ways of splitting a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from layerzero.errors import ConfigError, ShardingError

Dimension = Literal["pp", "dp", "cp", "tp"]
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
"""Pipeline, data, context and tensor parallel: the default order, outermost first."""


class ParallelMesh:
    """All ranks, as pipeline stages x data-parallel x context-parallel x tensor-parallel ranks.

    Ranks that differ in their dp and cp coordinates only hold the same parameters and see different tokens; they
    are one *ZeRO-1 group*, over which gradients are averaged and optimizer states sharded. The *ZeRO-3 group*
    is its innermost part, `zero3_size` consecutive ranks of it. ``lz.shard(model, mesh=mesh)`` uses it. With
    ``pp=1, dp=2, cp=2, tp=2``::

        rank           0    1    2    3    4    5    6    7
        (dp, cp, tp)  000  001  010  011  100  101  110  111
        ZeRO-1 group   A    B    A    B    A    B    A    B

    A dimension's submesh is a `torch.distributed.device_mesh.DeviceMesh`, so its process group is
    ``mesh.cp.get_group()`` and it can be handed to whatever takes a DeviceMesh. Every rank has to build the mesh.

    Attributes:
        device_mesh: dimensions larger than 1, and dp always, outermost first.
        zero1: one-dimensional mesh of this rank's ZeRO-1 group, cp inside dp in the default order.
        zero3_size: ranks in a ZeRO-3 group where given here; else the configuration's.
    """

    device_mesh: DeviceMesh
    zero1: DeviceMesh
    zero3_size: int | None

    def __init__(
        self,
        *,
        pp: int = 1,
        dp: int | None = None,
        cp: int = 1,
        tp: int = 1,
        order: Sequence[Dimension] = DIMENSIONS,
        zero3_size: int | None = None,
        device_type: str | None = None,
    ) -> None:
        """Collective over all ranks.

        Args:
            pp, dp, cp, tp: sizes; dp defaults to what the others leave of the world size.
            order: the four dimensions, outermost first: neighbours along the last have consecutive ranks.
            zero3_size: ranks in a ZeRO-3 group, a divisor of dp x cp.
            device_type: "cpu", "cuda", ...; by default where the default process group communicates.

        Raises:
            ConfigError: sizes that do not multiply to the world size, a bad order or zero3_size.
            ShardingError: without torch.distributed.
        """
        if not dist.is_initialized():
            raise ShardingError("ParallelMesh: call torch.distributed.init_process_group first")
        if sorted(order) != sorted(DIMENSIONS):
            raise ConfigError(f"ParallelMesh: order must name each of {', '.join(DIMENSIONS)} once, got {list(order)}")
        self._sizes = _check_sizes({"pp": pp, "dp": dp, "cp": cp, "tp": tp}, dist.get_world_size())
        self.zero3_size = zero3_size
        zero1_size = self._sizes["dp"] * self._sizes["cp"]
        if zero3_size is not None and (zero3_size < 1 or zero1_size % zero3_size):
            raise ConfigError(
                f"ParallelMesh: zero3_size = {zero3_size} must divide dp x cp = {self._sizes['dp']} x "
                f"{self._sizes['cp']} = {zero1_size}, the ranks that hold the same parameters"
            )
        kept = [d for d in order if d == "dp" or self._sizes[d] > 1]
        kind = device_type or _default_device_type()
        self.device_mesh = init_device_mesh(kind, tuple(self._sizes[d] for d in kept), mesh_dim_names=tuple(kept))
        self.zero1 = self._flat([d for d in kept if d in ("dp", "cp")], kind)

    def _flat(self, dimensions: list[str], kind: str) -> DeviceMesh:
        if len(dimensions) == 1:
            return self.device_mesh[dimensions[0]]
        ranks = self.device_mesh[tuple(dimensions)].mesh.flatten().tolist()
        # DeviceMesh's own flattening is private. Groups are made in step by all ranks, as DeviceMesh does.
        group, _ = dist.new_subgroups_by_enumeration(_all_flat(self.device_mesh, dimensions))
        assert isinstance(group, dist.ProcessGroup) and dist.get_process_group_ranks(group) == ranks
        return DeviceMesh.from_group(group, kind, mesh_dim_names=("zero1",))

    def size(self, dimension: Dimension) -> int:
        """Ranks along a dimension.

        Raises:
            ConfigError: for a name that is none of pp, dp, cp and tp; so does `coordinate`.
        """
        self._has(dimension)
        return self._sizes[dimension]

    def coordinate(self, dimension: Dimension) -> int:
        """This rank's position along a dimension, 0 where its size is 1."""
        return self.device_mesh.get_local_rank(dimension) if self._has(dimension) else 0

    def _has(self, dimension: Dimension) -> bool:
        if dimension not in self._sizes:
            raise ConfigError(f"ParallelMesh has the dimensions {', '.join(DIMENSIONS)}, got {dimension!r}")
        return dimension in (self.device_mesh.mesh_dim_names or ())

    def _submesh(self, dimension: Dimension) -> DeviceMesh | None:
        return self.device_mesh[dimension] if self._sizes[dimension] > 1 else None

    @property
    def pp(self) -> DeviceMesh | None:
        """This rank's pipeline, or None for one stage."""
        return self._submesh("pp")

    @property
    def dp(self) -> DeviceMesh | None:
        """Ranks that see other samples of the batch and have this rank's place otherwise, or None."""
        return self._submesh("dp")

    @property
    def cp(self) -> DeviceMesh | None:
        """Ranks that share this rank's samples, each with a part of their tokens, or None."""
        return self._submesh("cp")

    @property
    def tp(self) -> DeviceMesh | None:
        """Ranks that share this rank's tokens, each with a part of the parameters, or None."""
        return self._submesh("tp")

    def __repr__(self) -> str:
        names = self.device_mesh.mesh_dim_names or ()
        return f"ParallelMesh({', '.join(f'{d}={self.device_mesh.size(i)}' for i, d in enumerate(names))})"


def _check_sizes(sizes: dict[str, int | None], world_size: int) -> dict[str, int]:
    """All sizes as positive numbers whose product is the world size."""
    text = " x ".join(f"{name}={'?' if size is None else size}" for name, size in sizes.items())
    given = [size for size in sizes.values() if size is not None]
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in given):
        raise ConfigError(f"ParallelMesh: sizes must be positive integers, got {text}")
    product = math.prod(given)
    whole = {name: world_size // product if size is None else size for name, size in sizes.items()}
    if math.prod(whole.values()) != world_size:
        verb = "does not divide" if len(given) < len(sizes) else "is not"
        raise ConfigError(
            f"ParallelMesh: {text}, and {product} {verb} the world size of {world_size}: change a size or start "
            f"another number of ranks"
        )
    return whole


def _all_flat(mesh: DeviceMesh, dimensions: list[str]) -> list[list[int]]:
    """Ranks of every group that spans the given dimensions, in mesh order."""
    names = list(mesh.mesh_dim_names or ())
    inside = [names.index(d) for d in dimensions]
    outside = [i for i in range(len(names)) if i not in inside]
    ranks = torch.arange(mesh.size()).view(mesh.shape).permute(*outside, *inside)
    return ranks.reshape(-1, math.prod(mesh.shape[i] for i in inside)).tolist()


def _default_device_type() -> str:
    accelerator = torch.accelerator.current_accelerator()
    on_accelerator = accelerator is not None and dist.get_backend() not in ("gloo", "fake")
    return accelerator.type if on_accelerator and accelerator is not None else "cpu"
