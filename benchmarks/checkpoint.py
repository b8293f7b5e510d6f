"""Saving and loading a training state: layerzero beside torch.distributed.checkpoint, same state, same run.

torchrun --standalone --nproc-per-node 4 benchmarks/checkpoint.py

Both hold a transformer in fp32 with Adam's two states, sharded over all ranks (layerzero ZeRO-3, FSDP2 full shard), and
sync their files to disk. Rounds are interleaved; a round's time is the slowest rank's; the table gives medians. Peak
host memory is what a rank's private memory rises to during the call, over what it was before. Loading finds the files
in the page cache.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import layerzero as lz

RESULTS = Path(__file__).parent / "results"


def build(dim: int, num_layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.TransformerEncoderLayer(dim, 8, 4 * dim, dropout=0.0, batch_first=True) for _ in range(num_layers)]
    )


def take_a_step(model: nn.Module, optimizer: torch.optim.Optimizer, dim: int) -> None:
    """So that optimizer states exist."""
    model(torch.randn(1, 2, dim)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class LayerZeRO:
    name = "layerzero"

    def __init__(self, dim: int, num_layers: int) -> None:
        self.model = lz.shard(build(dim, num_layers), sharding="zero3", units=[nn.TransformerEncoderLayer])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        take_a_step(self.model, self.optimizer, dim)

    def save(self, folder: Path) -> None:
        lz.save(folder, self.model, self.optimizer)

    def load(self, folder: Path) -> None:
        lz.load(folder, self.model, self.optimizer)


class FSDP2:
    name = "FSDP2 + torch.distributed.checkpoint"

    def __init__(self, dim: int, num_layers: int) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = build(dim, num_layers)
        for layer in self.model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        take_a_step(self.model, self.optimizer, dim)

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class MemoryPeak:
    """Highest private memory of this process inside the context, over that at its start; sampled every 2 ms.

    Pages of files that are mapped are not counted: they are the page cache's.
    """

    def __enter__(self) -> MemoryPeak:
        ctypes.CDLL(None).malloc_trim(0)  # or freed memory that malloc kept would hide what is allocated next
        self.before = self.nbytes = _private_nbytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.002):
            self.nbytes = max(self.nbytes, _private_nbytes())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.nbytes = max(self.nbytes, _private_nbytes()) - self.before


def _private_nbytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


def measure(function: Callable[[], None]) -> tuple[float, int]:
    """Seconds on the slowest rank, and bytes by which the worst rank's memory rose."""
    dist.barrier()
    with MemoryPeak() as peak:
        start = time.perf_counter()
        function()
        seconds = time.perf_counter() - start
    values = torch.tensor([seconds, peak.nbytes], dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values[0].item(), int(values[1].item())


def run(root: Path, dim: int, num_layers: int, rounds: int) -> dict[str, Any]:
    systems = [LayerZeRO(dim, num_layers), FSDP2(dim, num_layers)]
    times: dict[str, dict[str, list[float]]] = {s.name: {"save": [], "load": []} for s in systems}
    peaks: dict[str, dict[str, list[int]]] = {s.name: {"save": [], "load": []} for s in systems}
    nbytes: dict[str, int] = {}
    for number in range(rounds + 1):  # the first one warms up
        for system in systems if number % 2 else reversed(systems):
            folder = root / f"{number}-{system.name.split()[0]}"
            for what, call in (("save", system.save), ("load", system.load)):
                seconds, peak = measure(lambda call=call, folder=folder: call(folder))
                if number:
                    times[system.name][what].append(seconds)
                    peaks[system.name][what].append(peak)
            dist.barrier()
            if dist.get_rank() == 0:
                nbytes[system.name] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
                shutil.rmtree(folder)
            dist.barrier()
    num_params = sum(p.numel() for p in build(dim, num_layers).parameters())
    rows = [
        {
            "system": s.name,
            "save_seconds": statistics.median(times[s.name]["save"]),
            "load_seconds": statistics.median(times[s.name]["load"]),
            "save_peak_mib": statistics.median(peaks[s.name]["save"]) / 2**20,
            "load_peak_mib": statistics.median(peaks[s.name]["load"]) / 2**20,
            "files_mib": nbytes.get(s.name, 0) / 2**20,
        }
        for s in systems
    ]
    return {
        "date": date.today().isoformat(), "torch": torch.__version__, "python": platform.python_version(),
        "cores": os.cpu_count(), "ranks": dist.get_world_size(), "num_params": num_params, "dim": dim,
        "num_layers": num_layers, "rounds": rounds, "rows": rows,
    }  # fmt: skip


COLUMNS = {
    "system": "system", "save_seconds": "save, s", "load_seconds": "load, s", "save_peak_mib": "save peak, MiB",
    "load_peak_mib": "load peak, MiB", "files_mib": "files, MiB",
}  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    digits = {"save_seconds": 3, "load_seconds": 3}
    return [row[key] if key == "system" else f"{row[key]:.{digits.get(key, 0)}f}" for key in COLUMNS]


def write(result: dict[str, Any], command: str) -> Path:
    ours, peer = result["rows"]
    lines = [
        "# Saving and loading",
        "",
        f"{result['date']}, torch {result['torch']}, Python {result['python']}, {result['cores']} cores, "
        f"{result['ranks']} ranks. {result['num_params'] / 1e6:.1f} M fp32 parameters with Adam states "
        f"(width {result['dim']}, {result['num_layers']} layers). Medians of {result['rounds']} interleaved rounds; "
        "peak is what the worst rank's private memory rose by during the call.",
        "",
        f"    {command}",
        "",
        "| " + " | ".join(COLUMNS.values()) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(cells(row)) + " |" for row in result["rows"]),
        "",
        f"layerzero takes {ours['save_seconds'] / peer['save_seconds']:.2f} of the peer's time to save and "
        f"{ours['load_seconds'] / peer['load_seconds']:.2f} to load. layerzero's includes checksums of every block, on "
        "both ways; the peer's metadata is a pickle.",
        "",
    ]
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{result['date']}-checkpoint.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    path.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return path


def main(
    dim: Annotated[int, typer.Option(help="Width.")] = 768,
    num_layers: Annotated[int, typer.Option(help="Layers.")] = 4,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 7,
    folder: Annotated[Path | None, typer.Option(help="Where to write; a temporary folder by default.")] = None,
    record: Annotated[bool, typer.Option(help="Write benchmarks/results.")] = True,
) -> None:
    """Both systems in turn; prints a table and writes a dated report."""
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        chosen = [scratch]
        dist.broadcast_object_list(chosen)
        result = run(Path(chosen[0]), dim, num_layers, rounds)
        dist.barrier()
    if dist.get_rank() == 0:
        table = Table(*COLUMNS.values())
        for row in result["rows"]:
            table.add_row(*cells(row))
        Console().print(table)
        if record:
            options = f"--dim {dim} --num-layers {num_layers} --rounds {rounds}"
            ranks = dist.get_world_size()
            print(write(result, f"torchrun --standalone --nproc-per-node {ranks} benchmarks/checkpoint.py {options}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
