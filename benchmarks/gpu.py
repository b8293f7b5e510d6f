"""One accelerator: is the engine right on it, and how fast and large is a step beside plain PyTorch and FSDP2.

    python -m benchmarks.gpu --output benchmarks/results/mine.json      # a transformer of about 1 B parameters
    python -m benchmarks.gpu --small                                    # the same on a CPU, for the script's sake

Runs tests/gpu first. Then every system in a process of its own: as the only rank, and as one of eight whose
collectives send nothing ("of 8"), which leaves kernels, allocations and host time of a real rank's step.
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
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.jobs import ROOT
from benchmarks.memory import resident_nbytes, trim
from benchmarks.systems import FSDP2, LayerZeRO, Place, StateNbytes, System, optimizer_nbytes, storage_nbytes
from benchmarks.workload import Workload

LARGE = Workload(layers=20, width=2048, heads=16, vocabulary=32000, sequence=2048, batch=2)
SMALL = Workload(layers=2, width=64, heads=4, vocabulary=64, sequence=16)
RANKS = 8


class Plain(System):
    """One process: fp32 parameters, compute in the workload's dtype by autocast."""

    def __init__(self, workload: Workload, place: Place) -> None:
        self.model: nn.Module = workload.model(place.device)
        self.optimizer = workload.optimizer(self.model.parameters())
        self.autocast = torch.autocast(
            place.device.type, workload.torch_dtype, enabled=workload.torch_dtype is not torch.float32
        )

    def step(self, batches: list[torch.Tensor]) -> None:
        for ids in batches:
            with self.autocast:
                loss = self.model(ids) / len(batches)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> StateNbytes:
        return StateNbytes(storage_nbytes(self.model.parameters()), optimizer_nbytes(self.optimizer))


SYSTEMS = {
    "plain": (1, Plain),
    "layerzero": (1, LayerZeRO),
    "fsdp2": (1, lambda w, p: FSDP2(w, p, (1,))),
    "layerzero of 8": (RANKS, LayerZeRO),
    "fsdp2 of 8": (RANKS, lambda w, p: FSDP2(w, p, (RANKS,))),
    "hsdp of 8": (RANKS, lambda w, p: FSDP2(w, p, (2, RANKS // 2))),
}


@dataclass(frozen=True)
class Cost:
    """Of one step: median seconds of each, peak bytes allocated on the device (resident on a CPU), state held."""

    seconds: float
    peak_nbytes: int
    params_nbytes: int
    optimizer_nbytes: int


def measure(name: str, workload: Workload, steps: int) -> Cost:
    """In this process."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)
    world_size, build = SYSTEMS[name]
    dist.init_process_group("fake", rank=0, world_size=world_size)
    trim()
    resident_before = resident_nbytes("VmRSS")
    system = build(workload, Place(0, world_size, max(1, world_size // 2), device))
    batches = workload.batches(0, device, num=1)

    def one_step() -> float:
        started = time.perf_counter()
        system.step(batches)
        if accelerator is not None:
            torch.accelerator.synchronize()
        return time.perf_counter() - started

    for _ in range(3):
        one_step()
    gc.collect()
    if accelerator is not None:
        torch.get_device_module(device).reset_peak_memory_stats()
    seconds = statistics.median(one_step() for _ in range(steps))
    if accelerator is not None:
        peak = torch.get_device_module(device).max_memory_allocated()
    else:
        peak = resident_nbytes("VmHWM") - resident_before
    state = system.state()
    return Cost(seconds, peak, state.params, state.optimizer)


def measure_apart(name: str, small: bool, steps: int) -> Cost:
    """In a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--only", name, "--steps", str(steps)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*command, *(["--small"] if small else [])], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-3000:]}")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def main(
    small: Annotated[bool, typer.Option(help="sizes for a CPU")] = False,
    steps: Annotated[int, typer.Option(min=1)] = 9,
    tests: Annotated[bool, typer.Option(help="run tests/gpu first")] = True,
    output: Annotated[Path | None, typer.Option(help="write everything measured here, as JSON")] = None,
    only: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Check and measure the engine on one accelerator."""
    workload = SMALL if small else LARGE
    if only:
        print(json.dumps(asdict(measure(only, workload, steps))))
        return
    console = Console()
    if torch.accelerator.current_accelerator(check_available=True) is None and not small:
        console.print("No accelerator is available: use --small to run the same on the CPU.")
        raise typer.Exit(1)
    if tests:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
        subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/gpu"], cwd=ROOT, env=env, check=True)
    costs = {name: measure_apart(name, small, steps) for name in SYSTEMS}
    table = Table("system", "step, ms", "peak, MB", "parameters, MB", "optimizer, MB", header_style="bold")
    for name, c in costs.items():
        sizes = (f"{n / 1e6:.1f}" for n in (c.peak_nbytes, c.params_nbytes, c.optimizer_nbytes))
        table.add_row(name, f"{c.seconds * 1e3:.1f}", *sizes)
    console.print(table)
    if output is not None:
        head = {
            "date": time.strftime("%Y-%m-%d"), "command": shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]),
            "torch": torch.__version__, "machine": platform.platform(), "workload": asdict(workload), "steps": steps,
            "num_parameters": sum(p.numel() for p in workload.model("meta").parameters()),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        }  # fmt: skip
        output.parent.mkdir(parents=True, exist_ok=True)
        rows = {name: asdict(c) for name, c in costs.items()}
        output.write_text(json.dumps({"configuration": head, "systems": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
