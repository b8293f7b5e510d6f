"""What tests/gpu runs on every rank: on the accelerator where there is one, else the same on the CPU.

One accelerator serves all ranks, which NCCL and its kin refuse, so collectives of device tensors go through host
memory and gloo here. They are issued on the lane's stream as real ones are: what a lane forgets to wait for is
as wrong as it would be there.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import layerzero as lz
from layerzero import collectives
from tests.dist.models import Block
from tests.dist.parity import drain, rank_and_size

WIDTH, LAYERS = 64, 4


def device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)


class Stack(nn.Module):
    """Blocks and a root with a parameter of odd size."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.stem = nn.Linear(7, width)
        self.blocks = nn.ModuleList([Block(width, 2 * width) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def batch(rank: int, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + micro)
    return torch.randn(8, 7, generator=generator).to(device())


def arrive_late(out: torch.Tensor, host: torch.Tensor) -> None:
    """Copy to the device after some milliseconds, without keeping the host: who doesn't wait for it reads what was."""
    if out.device.type != "cuda":
        out.copy_(host)
        return
    torch.cuda._sleep(10_000_000)
    out.copy_(host.pin_memory(), non_blocking=True)


@contextlib.contextmanager
def host_collectives() -> Iterator[None]:
    """Device tensors travel through host memory, and arrive late."""
    gather, reduce, broadcast = (
        collectives._all_gather, dist.all_reduce, dist.broadcast,
    )  # fmt: skip

    def all_gather(out: torch.Tensor, shard: torch.Tensor, group: Any) -> None:
        host = torch.empty(out.shape, dtype=out.dtype)
        gather(host, shard.cpu(), group=group)
        arrive_late(out, host)

    def reduce_scatter(shard: torch.Tensor, wire: torch.Tensor, op: Any, group: Any) -> None:
        host = wire.float().cpu()
        reduce(host, group=group)
        mine = host.view(group.size(), -1)[group.rank()] / (group.size() if op == dist.ReduceOp.AVG else 1)
        arrive_late(shard, mine)

    def through_host(function: Any) -> Any:
        def call(tensor: torch.Tensor, **kwargs: Any) -> Any:
            if tensor.device.type == "cpu":
                return function(tensor, **kwargs)
            host = tensor.cpu()
            function(host, **kwargs)
            arrive_late(tensor, host)
            return None

        return call

    patch = pytest.MonkeyPatch()
    if device().type != "cpu":
        patch.setattr(collectives, "_all_gather", all_gather)
        patch.setattr(collectives, "_reduce_scatter", reduce_scatter)
        patch.setattr(dist, "all_reduce", through_host(reduce))
        patch.setattr(dist, "broadcast", through_host(broadcast))
    try:
        yield
    finally:
        patch.undo()


def parity_case(options: dict[str, Any], micro: int, steps: int = 4) -> list[float]:
    """Largest difference from one process on all ranks' data, largest movement, and the norms seen."""
    rank, world = rank_and_size()
    torch.manual_seed(3)
    reference = Stack().to(device())
    torch.manual_seed(3)
    model = Stack().to(device())
    start = [p.detach().clone() for p in reference.parameters()]
    with host_collectives():
        lz.shard(model, units=[Block], **options)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, model)]
        for step in range(steps):
            for m in range(micro):
                everyone = torch.cat([batch(r, step, m) for r in range(world)])
                (loss_of(reference, everyone) / micro).backward()
                with contextlib.nullcontext() if m == micro - 1 else model.no_sync():  # type: ignore[operator]
                    (loss_of(model, batch(rank, step, m)) / micro).backward()
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (reference, model)]
            torch.testing.assert_close(norms[1].cpu(), norms[0].cpu(), rtol=1e-4, atol=1e-6)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        full = lz.full_state_dict(model)
    want = {n: p.detach().cpu() for n, p in reference.named_parameters()}
    off = max(float((full[n].cpu() - p).abs().max()) for n, p in want.items())
    moved = min(
        float((p.detach().cpu() - s.cpu()).abs().max()) for p, s in zip(reference.parameters(), start, strict=True)
    )
    return [off, moved]


def memory_case(prefetch_depth: int) -> dict[str, int]:
    """Units gathered at once, and on an accelerator the peak of allocated bytes beside a bound."""
    model = Stack(width=512, layers=8).to(device())
    on_device = device().type != "cpu"
    memory = torch.get_device_module(device().type) if on_device else None
    with host_collectives():
        lz.shard(model, units=[Block], sharding="zero3", param_dtype="bf16", prefetch_depth=prefetch_depth)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(4):
            if step == 3 and memory is not None:
                memory.synchronize()
                memory.reset_peak_memory_stats()
            loss_of(model, batch(0, step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        drain(model)
    traffic, report = lz.traffic_report(model), lz.memory_report(model)
    found = {"units": traffic.peak_unsharded_units, "peak": 0, "bound": 1}
    if memory is not None:
        memory.synchronize()
        whole = sum(g.layout.numel * 2 for u in lz.module.engine_of(model).units for g in u.groups)
        # State, gradients, gathered units, gradients of three units on their way out, activations and slack.
        staging = 3 * 2 * report.unsharded
        found |= {
            "peak": memory.max_memory_allocated(),
            "bound": report.persistent + report.main_grad + report.unsharded + staging + whole // 4 + (16 << 20),
        }
    return found


def overlap_case() -> dict[str, int]:
    """Pairs of (gather, compute) that ran at the same time in a steady step, from the profiler's trace."""
    with host_collectives():
        return _overlap()


def _overlap() -> dict[str, int]:
    model = Stack(width=512, layers=6).to(device())
    on_device = device().type != "cpu"
    lz.shard(model, units=[Block], sharding="zero3", param_dtype="bf16")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    patch = pytest.MonkeyPatch()

    def slow(out: torch.Tensor, shard: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """A gather that takes a while on its lane."""
        if on_device:
            torch.cuda._sleep(2_000_000)
        else:
            time.sleep(0.005)
        out.view(-1, shard.numel()).copy_(shard.view(1, -1))

    patch.setattr(collectives, "_all_gather", slow)
    patch.setattr(collectives, "_gather_into_place", slow)

    def step() -> None:
        loss_of(model, batch(0, 0, 0)).backward()
        optimizer.zero_grad()

    try:
        for _ in range(3):
            step()
        drain(model)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        with profile(activities=activities, experimental_config=config) as profiler:
            step()
            drain(model)
            if on_device:
                torch.accelerator.synchronize()
    finally:
        patch.undo()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    if on_device:
        kernels = [e for e in events if e.get("cat") == "kernel"]
        gathers = [e for e in kernels if "spin" in e["name"] or "sleep" in e["name"].lower()]
        compute = [e for e in kernels if e not in gathers]
        where = "stream"
        apart = [(g, c) for g in gathers for c in compute if g["args"][where] != c["args"][where]]
    else:
        gathers = [e for e in events if e["name"].startswith("layerzero.unshard")]
        compute = [e for e in events if e["name"] == "aten::addmm" or e["name"] == "aten::mm"]
        apart = [(g, c) for g in gathers for c in compute if g["tid"] != c["tid"]]
    both = [1 for g, c in apart if g["ts"] < c["ts"] + c["dur"] and c["ts"] < g["ts"] + g["dur"]]
    return {"gathers": len(gathers), "compute": len(compute), "overlapping": len(both)}
