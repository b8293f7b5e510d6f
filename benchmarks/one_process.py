"""What the engine costs where there is nothing to shard: one process in fp32 beside plain PyTorch, steps in turns.

CPU time leaves out what other programs took of the processors; time is what a user waits.

python -m benchmarks.one_process --output benchmarks/results/mine.json
"""

from __future__ import annotations

import gc
import json
import platform
import shlex
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.gpu import Plain
from benchmarks.systems import LayerZeRO, Place
from benchmarks.workload import Workload


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 15,
    layers: int = Workload.layers,
    width: int = Workload.width,
    batch: Annotated[int, typer.Option(min=1, help="samples of 128 tokens")] = Workload.batch,
    output: Annotated[Path | None, typer.Option(help="write everything measured here, as JSON")] = None,
) -> None:
    """Measure LayerZeRO's step over plain PyTorch's."""
    torch.set_num_threads(1)
    workload = Workload(layers=layers, width=width, batch=batch, dtype="fp32")
    place = Place(0, 1, 1, torch.device("cpu"))
    systems = {"plain": Plain(workload, place), "layerzero": LayerZeRO(workload, place, node_size=None)}
    batches = workload.batches(0, num=1)
    cpu: dict[str, list[float]] = {name: [] for name in systems}
    wall: dict[str, list[float]] = {name: [] for name in systems}
    gc.disable()
    for number in range(rounds + 3):
        names = list(systems) if number % 2 else list(systems)[::-1]
        for name in names:
            started = time.perf_counter(), time.process_time()
            systems[name].step(batches)
            if number >= 3:
                wall[name].append(time.perf_counter() - started[0])
                cpu[name].append(time.process_time() - started[1])
    measured = {}
    for what, seconds in (("cpu", cpu), ("wall", wall)):
        ratio = statistics.median(a / b for a, b in zip(seconds["layerzero"], seconds["plain"], strict=True))
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        print(f"{what} time: plain {medians['plain']:.4f} s, LayerZeRO {medians['layerzero']:.4f} s; ratio {ratio:.3f}")
        measured[what] = {"seconds": seconds, "median_seconds": medians, "median_ratio": ratio}
    if output is not None:
        head = {
            "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "machine": platform.platform(),
            "command": shlex.join(["python", "-m", "benchmarks.one_process", *sys.argv[1:]]),
            "workload": asdict(workload), "rounds": rounds,
        }  # fmt: skip
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps({"configuration": head, **measured}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
