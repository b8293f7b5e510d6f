"""The systems that a testbed compares: LayerZeRO, torch's own, and floors. DeepSpeed is in `deepspeed_system`.

Each is set up as its documentation advises for speed at the same precision: fp32 main parameters and AdamW
states, compute and gradients on the wire in the workload's dtype.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import layerzero as lz
from benchmarks.workload import Block, Workload
from layerzero.module import engine_of


@dataclass(frozen=True)
class Place:
    """Where one rank runs.

    Attributes:
        ranks_per_node: size of a node, which is the ZeRO-3 group of hierarchical systems.
    """

    rank: int
    world_size: int
    ranks_per_node: int
    device: torch.device

    @property
    def num_nodes(self) -> int:
        """Nodes of equal size."""
        return self.world_size // self.ranks_per_node


@dataclass(frozen=True)
class StateNbytes:
    """Bytes of model state that a rank holds for as long as training lasts, counted from the tensors themselves.

    Attributes:
        params: main parameters and every other lasting copy of parameters.
        optimizer: the optimizer's states.
        buffers: of gradients and communication, as far as they stay from step to step; DeepSpeed's are not counted.
    """

    params: int
    optimizer: int
    buffers: int = 0


class System(ABC):
    """One way to train the workload; constructing it builds model and optimizer on this rank."""

    @abstractmethod
    def step(self, batches: list[torch.Tensor]) -> None:
        """One optimizer step over these micro-batches."""

    def state(self) -> StateNbytes:
        """Bytes held between steps."""
        return StateNbytes(0, 0)

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """End what the process group's end would trip over."""


def storage_nbytes(tensors: Iterable[object]) -> int:
    """Bytes behind ``tensors``, local shards of DTensors included, each storage once."""
    found = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.detach().untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def optimizer_nbytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's states, step counters aside."""
    values = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()]
    return storage_nbytes(values)


class LayerZeRO(System):
    """Parameters and gradients over the node, optimizer over everything; ``options`` as for `lz.shard`."""

    def __init__(self, workload: Workload, place: Place, **options) -> None:
        options = {
            "sharding": "layerzero", "zero3_size": place.ranks_per_node, "node_size": place.ranks_per_node,
            "param_dtype": workload.dtype, "reduce_dtype": workload.dtype, **options,
        }  # fmt: skip
        self.model = lz.shard(workload.model(place.device), units=[Block], **options)
        self.optimizer = workload.optimizer(self.model.parameters())

    def step(self, batches: list[torch.Tensor]) -> None:
        *first, last = batches
        with self.model.no_sync():
            for ids in first:
                (self.model(ids) / len(batches)).backward()
        (self.model(last) / len(batches)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> StateNbytes:
        groups = [g for u in engine_of(self.model).units for g in u.groups]
        held = [t for g in groups for t in (g.main, g.model)]
        return StateNbytes(storage_nbytes(held), optimizer_nbytes(self.optimizer), lz.memory_report(self.model).buffers)


class FSDP2(System):
    """``fully_shard``.

    Args:
        mesh: shape of the device mesh; two numbers are HSDP, replicas first.
        reshard_after_forward: as in ``fully_shard``.
        hold_back: what gradients of all but the last micro-batch are kept from: "all_reduce" between
            replicas, "sync" any reduction (kept unsharded), or nothing.
        prefetch: units gathered ahead, explicitly.
        keep: parameters stay unsharded until the last micro-batch's backward.
        asynchronous: gathers ahead don't block the calling thread; on CPUs they do otherwise. Not a public option.
    """

    def __init__(
        self, workload: Workload, place: Place, mesh: tuple[int, ...],
        reshard_after_forward: bool | int = True, hold_back: str = "", prefetch: int = 1, keep: bool = False,
        asynchronous: bool = False,
    ) -> None:  # fmt: skip
        names = ("replicate", "shard")[-len(mesh) :]
        options = {
            "mesh": init_device_mesh(place.device.type, mesh, mesh_dim_names=names),
            "mp_policy": MixedPrecisionPolicy(param_dtype=workload.torch_dtype, reduce_dtype=workload.torch_dtype),
        }
        self.model = workload.model(place.device)
        self.hold_back, self.keep = hold_back, keep
        blocks = list(self.model.blocks)
        for block in blocks:
            fully_shard(block, reshard_after_forward=False if keep else reshard_after_forward, **options)
        fully_shard(self.model, **options)
        self.model.set_modules_to_forward_prefetch(blocks[:prefetch])
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + prefetch])
            block.set_modules_to_backward_prefetch(blocks[max(0, i - prefetch) : i][::-1])
        self.model._set_unshard_async_op(asynchronous)
        self.optimizer = workload.optimizer(self.model.parameters())

    def step(self, batches: list[torch.Tensor]) -> None:
        for i, ids in enumerate(batches):
            is_last = i == len(batches) - 1
            self.model.set_is_last_backward(is_last)
            if self.keep:
                self.model.set_reshard_after_backward(is_last)
            if self.hold_back == "all_reduce":
                self.model.set_requires_all_reduce(is_last)
            elif self.hold_back == "sync":
                self.model.set_requires_gradient_sync(is_last)
            (self.model(ids) / len(batches)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> StateNbytes:
        return StateNbytes(storage_nbytes(self.model.parameters()), optimizer_nbytes(self.optimizer))


class DDPZero1(System):
    """DistributedDataParallel with ZeroRedundancyOptimizer; mixed precision by autocast, gradients compressed."""

    def __init__(self, workload: Workload, place: Place) -> None:
        self.workload = workload
        self.model = DistributedDataParallel(
            workload.model(place.device), gradient_as_bucket_view=True, broadcast_buffers=False
        )
        if workload.dtype == "bf16":
            on_cpu = place.device.type == "cpu"  # DDP refuses bf16 over gloo; fp16 is as many bytes
            self.model.register_comm_hook(
                None, default_hooks.fp16_compress_hook if on_cpu else default_hooks.bf16_compress_hook
            )
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(), torch.optim.AdamW, lr=workload.learning_rate, fused=True,
            parameters_as_bucket_view=True,
        )  # fmt: skip
        self.device = place.device

    def step(self, batches: list[torch.Tensor]) -> None:
        for i, ids in enumerate(batches):
            with self.model.no_sync() if i < len(batches) - 1 else contextlib.nullcontext(), self._autocast():
                loss = self.model(ids) / len(batches)
                # The backward starts inside no_sync, where DDP decides about reduction, and outside autocast's concern.
                loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)  # gradients are views of DDP's buckets

    def _autocast(self):
        return torch.autocast(self.device.type, self.workload.torch_dtype, enabled=self.workload.dtype != "fp32")

    def state(self) -> StateNbytes:
        buckets = storage_nbytes(p.grad for p in self.model.parameters())  # gradients are views of them
        return StateNbytes(storage_nbytes(self.model.parameters()), optimizer_nbytes(self.optimizer.optim), buckets)


class ComputeAlone(System):
    """Floor: forward, backward and this rank's share of the optimizer's work, and nothing is sent."""

    def __init__(self, workload: Workload, place: Place) -> None:
        self.model = workload.model(place.device).to(workload.torch_dtype)
        numel = sum(p.numel() for p in self.model.parameters()) // place.world_size
        self.main = nn.Parameter(torch.zeros(numel, device=place.device))
        self.main.grad = torch.zeros_like(self.main)
        self.optimizer = workload.optimizer([self.main])

    def step(self, batches: list[torch.Tensor]) -> None:
        for ids in batches:
            (self.model(ids) / len(batches)).backward()
        self.model.zero_grad()
        self.optimizer.step()


class CommunicationAlone(LayerZeRO):
    """Floor: the collectives of a LayerZeRO step, unit by unit on its own lanes, and no compute.

    Inside the node there is one gather and one reduction per step, as for parameters and gradients that are kept.
    """

    def step(self, batches: list[torch.Tensor]) -> None:
        engine = engine_of(self.model)
        events = []
        with torch.no_grad():
            for unit in engine.units:
                for group in unit.groups:
                    events += [*self._slow(group, engine), *self._fast(group, engine)]
            for event in events:
                event.wait()

    def _slow(self, group, engine) -> Iterator:
        comms, dtype = group.comms, group.model.dtype
        for axis, comm in comms.refresh.items():
            out = torch.empty(group.layout.numel // engine.axes.degree(axis), dtype=dtype)
            yield engine.lanes.refresh.run(lambda c=comm, o=out: c.all_gather(o, o[: o.numel() // c.size].clone()))
        for axis, comm in comms.sync.items():
            wire = torch.zeros(group.layout.numel // engine.axes.degree(axis), dtype=dtype)
            yield engine.lanes.sync.run(lambda c=comm, w=wire: c.reduce_scatter_mean(w))

    def _fast(self, group, engine) -> Iterator:
        comms, dtype, numel = group.comms, group.model.dtype, group.layout.numel
        for comm in comms.unshard.values():
            out = torch.empty(numel, dtype=dtype)
            yield engine.lanes.unshard.run(lambda c=comm, o=out: c.all_gather(o, o[: o.numel() // c.size].clone()))
        for comm in comms.reduce.values():
            wire = torch.zeros(numel, dtype=dtype)
            yield engine.lanes.reduce.run(lambda c=comm, w=wire: c.reduce_scatter_mean(w))


def _deepspeed(**options) -> Callable[[Workload, Place], System]:
    def build(workload: Workload, place: Place) -> System:
        from benchmarks.deepspeed_system import DeepSpeedZero3  # an optional extra

        return DeepSpeedZero3(workload, place, hpz="hpz" in options)

    return build


FAST = {"keep_num_params": "all", "accumulate": "full"}
"""Options that give memory, all in all less than HSDP needs, for time."""

SYSTEMS: dict[str, Callable[[Workload, Place], System]] = {
    "layerzero": lambda w, p: LayerZeRO(w, p, **FAST),
    "layerzero-keep": lambda w, p: LayerZeRO(w, p, keep_num_params="all"),
    "layerzero-lean": LayerZeRO,
    "zero1": lambda w, p: LayerZeRO(w, p, sharding="zero1"),
    "fsdp2": lambda w, p: FSDP2(w, p, (p.world_size,)),
    "fsdp2-keep": lambda w, p: FSDP2(w, p, (p.world_size,), hold_back="sync", keep=True),
    "fsdp2-node": lambda w, p: FSDP2(w, p, (p.world_size,), reshard_after_forward=p.ranks_per_node),
    "hsdp-allreduce-last": lambda w, p: FSDP2(w, p, (p.num_nodes, p.ranks_per_node), hold_back="all_reduce"),
    "hsdp-sync-last": lambda w, p: FSDP2(w, p, (p.num_nodes, p.ranks_per_node), hold_back="sync"),
    "hsdp-keep": lambda w, p: FSDP2(w, p, (p.num_nodes, p.ranks_per_node), hold_back="sync", keep=True),
    "hsdp-keep-async": lambda w, p: FSDP2(
        w, p, (p.num_nodes, p.ranks_per_node), hold_back="sync", keep=True, asynchronous=True
    ),
    "ddp-zero1": DDPZero1,
    "deepspeed": _deepspeed(),
    "deepspeed-hpz": _deepspeed(hpz=True),
    "compute": ComputeAlone,
    "communication": CommunicationAlone,
}
NEEDS_DEEPSPEED = ("deepspeed", "deepspeed-hpz")
