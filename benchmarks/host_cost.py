"""Host time and memory of LayerZeRO's and FSDP2's own bookkeeping, as one rank of up to thousands.

    python -m benchmarks.host_cost --output benchmarks/results/mine.json

Collectives send nothing (torch's "fake" process group) and tensors are small, so what is left is Python. Time inside
the fake collectives is measured and taken out: they copy an all-gather's input to the place of every rank, one by one,
which no real one does. The plain model's step is measured beside both: it is compute that every system has to do.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import layerzero as lz
import layerzero.collectives
from benchmarks.jobs import ROOT
from layerzero.lanes import Lanes

SYSTEMS = ("layerzero", "layerzero-streams", "hsdp", "plain")


@dataclass(frozen=True)
class Setting:
    """One measurement.

    Attributes:
        system: "layerzero-streams" has its lanes as on an accelerator, where they are streams: all host work is done
            by the calling thread, as FSDP2's is on every device. Here these streams order nothing, like FSDP2's.
        units: blocks of two linear layers of ``width``; a unit's parameters divide by ``world_size * 8`` at the
            default width up to 4096 ranks, so that no size is favoured by padding.
        ranks_per_node: ZeRO-3 group, or HSDP's shard group.
    """

    system: str
    world_size: int
    units: int = 64
    width: int = 128
    ranks_per_node: int = 4
    steps: int = 12


@dataclass(frozen=True)
class HostCost:
    """What one setting costs.

    Attributes:
        construction_seconds: of `lz.shard` or ``fully_shard`` over all units.
        step_seconds: median CPU time of all threads per training step, optimizer included, collectives not.
        collectives_seconds: the same inside calls of the fake collectives.
        wall_seconds: median time a step takes on idle processors, collectives included.
        bookkeeping_nbytes: Python memory that construction and the first steps allocated and kept.
    """

    construction_seconds: float
    step_seconds: float
    collectives_seconds: float
    wall_seconds: float
    bookkeeping_nbytes: int


class Block(nn.Module):
    """A unit with two weights and no biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x))


def build(setting: Setting) -> tuple[nn.Module, Callable[[nn.Module], object]]:
    """The plain model, and what shards it in place."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(setting.width) for _ in range(setting.units)))
    if setting.system == "plain":
        return model.bfloat16(), lambda m: m
    if setting.system.startswith("layerzero"):
        if setting.system == "layerzero-streams":
            Lanes.make = classmethod(lambda cls, device: cls.on_streams(HostStreams, device))
        options = {"sharding": "layerzero", "zero3_size": setting.ranks_per_node, "node_size": setting.ranks_per_node}
        return model, lambda m: lz.shard(
            m, units=[Block], param_dtype="bf16", reduce_dtype="bf16", sync_module_states=False, **options
        )

    def hsdp(m: nn.Module) -> nn.Module:
        shape = (setting.world_size // setting.ranks_per_node, setting.ranks_per_node)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for block in m:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        return fully_shard(m, mesh=mesh, mp_policy=policy)

    return model, hsdp


class HostStreams:
    """torch's streams of the CPU, which run everything at once, with the interface of an accelerator's."""

    Event = torch.cpu.Event
    current_stream = staticmethod(torch.cpu.current_stream)
    stream = staticmethod(torch.cpu.stream)

    @staticmethod
    def Stream(device: torch.device, priority: int) -> torch.cpu.Stream:
        """A stream of ``device``, which is the CPU."""
        return torch.cpu.Stream(priority)


class CollectiveTime:
    """CPU time inside torch.distributed's collectives, whoever calls them on whatever thread."""

    NAMES = (
        "all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor", "all_reduce",
        "all_to_all_single", "broadcast", "isend", "irecv",
    )  # fmt: skip

    def __init__(self) -> None:
        self._spent: list[float] = []
        self._inside = threading.local()
        for name in self.NAMES:
            if hasattr(dist, name):
                setattr(dist, name, self._timed(getattr(dist, name)))
        lz.collectives._all_gather = self._timed(lz.collectives._all_gather)

    def _timed(self, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if getattr(self._inside, "value", False):
                return function(*args, **kwargs)
            self._inside.value, started = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._spent.append(time.thread_time() - started)
                self._inside.value = False

        return call

    def take(self) -> float:
        """Seconds since the last call of this."""
        spent, self._spent = sum(self._spent), []
        return spent


def measure(setting: Setting) -> HostCost:
    """In this process, which must not have a process group yet."""
    dist.init_process_group("fake", rank=0, world_size=setting.world_size)
    collectives = CollectiveTime()
    x = torch.ones(4, setting.width)
    if setting.system == "plain":
        x = x.bfloat16()

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[tuple[float, float, float]]:
        seconds = []
        for _ in range(count):
            collectives.take()
            started, wall = time.process_time(), time.perf_counter()
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            total, fake = time.process_time() - started, collectives.take()
            seconds.append((total - fake, fake, time.perf_counter() - wall))
        return seconds

    def construct(setting: Setting) -> tuple[float, nn.Module, torch.optim.Optimizer]:
        model, shard = build(setting)
        started = time.perf_counter()
        shard(model)
        seconds = time.perf_counter() - started
        return seconds, model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    steps(*construct(replace(setting, units=1))[1:], 1)  # whatever torch imports or caches once
    construction, model, optimizer = construct(setting)
    steps(model, optimizer, 4)
    gc.collect()
    gc.disable()
    own, fake, wall = (
        statistics.median(values) for values in zip(*steps(model, optimizer, setting.steps), strict=True)
    )
    gc.enable()
    del model, optimizer
    gc.collect()
    tracemalloc.start()
    kept = construct(setting)
    steps(*kept[1:], 3)
    gc.collect()
    nbytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return HostCost(construction, own, fake, wall, nbytes)


def measure_apart(setting: Setting) -> HostCost:
    """In a process of its own."""
    env = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.host_cost", "--only", json.dumps(asdict(setting))]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{setting}: {done.stderr[-2000:]}")
    return HostCost(**json.loads(done.stdout.splitlines()[-1]))


def main(
    world_sizes: Annotated[str, typer.Option(help="comma-separated")] = "8,64,512,4096",
    units: int = Setting.units,
    width: int = Setting.width,
    repeats: Annotated[int, typer.Option(help="processes per setting, in turns; medians are reported")] = 3,
    output: Annotated[Path | None, typer.Option(help="write everything measured here, as JSON")] = None,
    only: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure host cost beside FSDP2's."""
    if only:
        torch.set_num_threads(1)
        print(json.dumps(asdict(measure(Setting(**json.loads(only))))))
        return
    sizes = [int(n) for n in world_sizes.split(",")]
    settings = [Setting(s, n, units, width) for n in sizes for s in SYSTEMS if s != "plain" or n == sizes[0]]
    found: dict[Setting, list[HostCost]] = {s: [] for s in settings}
    for _ in range(repeats):
        for setting in settings:
            found[setting].append(measure_apart(setting))
    table = Table("ranks", "system", "construction, s", "CPU per step, ms", "collectives, ms",
                  "step, ms", "bookkeeping, MB",
                  header_style="bold")  # fmt: skip
    rows = []
    for setting, costs in found.items():
        cost = HostCost(*(statistics.median(getattr(c, f) for c in costs) for f in asdict(costs[0])))
        rows.append({**asdict(setting), **asdict(cost)})
        table.add_row(
            str(setting.world_size), setting.system, f"{cost.construction_seconds:.2f}",
            f"{cost.step_seconds * 1e3:.1f}", f"{cost.collectives_seconds * 1e3:.1f}",
            f"{cost.wall_seconds * 1e3:.1f}", f"{cost.bookkeeping_nbytes / 1e6:.2f}",
        )  # fmt: skip
    Console().print(table)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        head = {
            "date": time.strftime("%Y-%m-%d"),
            "command": shlex.join(["python", "-m", "benchmarks.host_cost", *sys.argv[1:]]), "torch": torch.__version__,
            "machine": platform.platform(), "repeats": repeats,
        }  # fmt: skip
        output.write_text(json.dumps({"configuration": head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
