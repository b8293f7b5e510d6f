"""What a rank's loss has to be where tokens are spread over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from layerzero.collectives import ActivationComm, Traffic
from layerzero.parallel.context.group import ContextParallel
from layerzero.parallel.mesh import ParallelMesh


def mean_share(
    values: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    over: ParallelMesh | DeviceMesh | ContextParallel,
    total: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's share in the weighted mean of ``values`` over all ranks of a group: a scalar.

    The mean of the ranks' shares is ``sum(weights * values) / sum(weights)`` over all of them. Since gradients are
    averaged over the data- and context-parallel ranks, backward from the share trains on that mean, however unevenly
    tokens, padding or masks are spread. Plain local means do so only where all ranks have the same sum of weights.

    Args:
        values: losses of this rank's tokens, any shape; may be empty.
        weights: of the same shape, such as 0 for padding; None is 1 everywhere.
        over: the ranks whose tokens form one mean. A `ParallelMesh` means dp x cp: every token of the batch counts the
            same. A `ContextParallel` means the ranks that share samples: every dp rank counts the same.
        total: the sum of weights over all those ranks, where it is known; else one small all-reduce finds it. With
            several micro-batches pass that of the whole step, and don't divide the loss by their number.
    """
    comm = _comm(over)
    weighted = values if weights is None else values * weights
    if total is None:
        mine = values.new_tensor(values.numel()) if weights is None else weights.detach().sum().to(values.dtype)
        total = comm.all_reduce_sum(mine.float())
    if isinstance(total, torch.Tensor):
        total = total.clamp(min=torch.finfo(total.dtype).tiny) if total.is_floating_point() else total.clamp(min=1)
    return weighted.sum(dtype=torch.float32) * comm.size / total


def _comm(over: ParallelMesh | DeviceMesh | ContextParallel) -> ActivationComm:
    if isinstance(over, ContextParallel):
        return over.comm
    mesh = over.zero1 if isinstance(over, ParallelMesh) else over
    group = mesh.get_group()
    size = dist.get_world_size(group)
    return ActivationComm(group if size > 1 else None, size, Traffic())
