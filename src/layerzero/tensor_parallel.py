"""Tensor-parallel parameters: torch's DTensors to the modules, plain local tensors to the engine.

[Note: tensor parallelism]
``torch.distributed.tensor.parallel.parallelize_module`` makes parameters DTensors on a mesh of tensor-parallel
ranks. Data-parallel groups are then formed per tensor-parallel rank: the flat buffers hold each rank's *local*
tensors, and ranks of one data-parallel group hold the same ones. In forward and backward a module sees a DTensor
over a view of the gathered buffer.

Replicated parameters lie in param groups of their own. Their gradients are summed over the tensor-parallel
ranks once per optimizer step, after the reduction over the data-parallel ranks, when they are smallest. A
gradient that torch calls partial (a norm's weight under sequence parallelism) enters that sum as it is; one that
is replicated, or that belongs to a plain parameter, enters divided by the number of ranks. So replicas stay equal
bit by bit even where their gradients were not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from layerzero.collectives import Control, SumComm
from layerzero.errors import ConfigError, ShardingError
from layerzero.layout import TensorParallel


@dataclass(frozen=True)
class TensorRanks:
    """The tensor-parallel ranks of a model.

    Attributes:
        mesh: one-dimensional; its own process group serves the compute thread, as torch's DTensors use it.
        rank: this process's place in it.
        control: small collectives from the compute thread.
        comm: sums of replicated gradients, on the lane that ends a reduction.
    """

    mesh: DeviceMesh
    rank: int
    control: Control
    comm: SumComm

    @property
    def size(self) -> int:
        """Tensor-parallel ranks."""
        return self.mesh.size()


@dataclass(frozen=True)
class Spec:
    """What kind of DTensor a parameter is."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    cut: TensorParallel

    @classmethod
    def of(cls, param: torch.Tensor) -> Spec | None:
        """None for a plain tensor."""
        if not isinstance(param, DTensor):
            return None
        placement = param.placements[0]
        dim = placement.dim % len(param.shape) if isinstance(placement, Shard) else None
        mesh = param.device_mesh
        cut = TensorParallel(dim, mesh.get_local_rank(), mesh.size())
        return cls(mesh, tuple(param.placements), tuple(param.shape), cut)

    def wrap(self, local: torch.Tensor) -> DTensor:
        """A DTensor over ``local``, sharing its memory."""
        strides = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=tuple(strides)
        )

    def local(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole plain tensor, as a view."""
        return part_of(whole, self.cut)

    def local_grad(self, grad: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """This rank's gradient, and whether the ranks' sum is the parameter's gradient rather than each of them.

        Collective over the tensor-parallel ranks only for a placement that neither fits the parameter nor is
        a partial sum.
        """
        if not isinstance(grad, DTensor):
            return grad, False
        placement = grad.placements[0]
        is_sum = self.cut.dim is None and isinstance(placement, Partial) and placement.reduce_op == "sum"
        if not is_sum and tuple(grad.placements) != self.placements:
            grad = grad.redistribute(placements=self.placements)
        return local_of(grad), is_sum


def part_of(whole: torch.Tensor, cut: TensorParallel | None) -> torch.Tensor:
    """The part of a whole parameter that this tensor-parallel rank's data-parallel group shares, as a view."""
    if cut is None or cut.dim is None:
        return whole
    indices = cut.indices(whole.shape)
    return whole.narrow(cut.dim, indices.start, indices.numel)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, complete; any other tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor._local_tensor  # `to_local` would be recorded by autograd
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def find_mesh(params: Iterable[tuple[str, nn.Parameter]], data_ranks: Sequence[int]) -> DeviceMesh | None:
    """The mesh that the DTensors among ``params`` lie on; None if there are none.

    Args:
        params: names and parameters.
        data_ranks: global ranks of this process's data-parallel group.

    Raises:
        ConfigError: if a data-parallel rank is also a tensor-parallel one.
        ShardingError: for DTensors on several meshes, on one of several dims, or with another placement than
            `Shard` or `Replicate`.
    """
    found: tuple[str, DeviceMesh] | None = None
    for fqn, param in params:
        if not isinstance(param, DTensor):
            continue
        mesh, placement = param.device_mesh, param.placements[0]
        if mesh.ndim != 1:
            raise ShardingError(
                f"parameter {fqn!r} is a DTensor on a {mesh.ndim}-dimensional mesh. lz.shard takes parameters that are "
                f"parallelized over one dim (mesh['tp']) and shards them over the data-parallel ranks itself."
            )
        if type(placement) not in (Shard, Replicate):
            raise ShardingError(f"parameter {fqn!r} is a DTensor placed as {placement}: expected Shard or Replicate")
        if found is None:
            found = fqn, mesh
        elif mesh.mesh.flatten().tolist() != found[1].mesh.flatten().tolist():
            raise ShardingError(
                f"parameters {found[0]!r} and {fqn!r} are DTensors over different ranks "
                f"({found[1].mesh.tolist()} and {mesh.mesh.tolist()}): expected one tensor-parallel group"
            )
    if found is None:
        return None
    ranks = found[1].mesh.flatten().tolist()
    both = sorted(set(ranks) & set(data_ranks))
    if len(both) > 1:
        raise ConfigError(
            f"parameter {found[0]!r} is a DTensor over ranks {ranks}, and ranks {both} of them are in one "
            f"data-parallel group: pass the data-parallel dims of the mesh, as in lz.shard(model, mesh=mesh['dp'])"
        )
    return found[1]


def check_replicas(names: Sequence[str], grads: Sequence[torch.Tensor | None], ranks: TensorRanks) -> None:
    """Raise if plain parameters got gradients that differ between tensor-parallel ranks.

    A plain parameter used on a part of the sequence or of the features gets a part of its gradient, without
    torch knowing it. Compared are the norm and one random projection of each, with a margin that no rounding
    reaches; what is mathematically zero is left out.

    Raises:
        ShardingError: names the parameters.
    """
    mine = torch.zeros(2, len(names), dtype=torch.float64)
    for i, grad in enumerate(grads):
        if grad is not None and grad.numel():
            flat = grad.detach().flatten().double()
            weights = torch.arange(flat.numel(), device=flat.device, dtype=torch.float64).mul_(2.399963).cos_()
            mine[:, i] = torch.stack([flat.norm(), (flat * weights).sum() * math.sqrt(2)]).cpu()
    device, control = ranks.control.device, ranks.control
    largest = control.all_reduce(torch.cat([mine, -mine]).float().to(device), torch.distributed.ReduceOp.MAX).cpu()
    norm, spread = largest[0], largest[:2] + largest[2:]
    margin = torch.stack([0.05 * norm, 0.2 * norm]) + 1e-3 * (norm.max() if len(names) else 0.0)
    wrong = ((spread > margin).any(0) | spread.isnan().any(0)).nonzero().flatten().tolist()
    if wrong and bool(largest.isfinite().all()):
        raise ShardingError(
            f"plain parameters of a tensor-parallel model got different gradients on different tensor-parallel ranks: "
            f"{', '.join(repr(names[i]) for i in wrong[:4])}. They were used on a part of the activations, so each "
            f"rank has a part of the gradient. Include their modules in the plan of parallelize_module "
            f"(SequenceParallel for norms), which makes them DTensors whose gradients are summed."
        )
