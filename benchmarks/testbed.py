"""Step time, bytes on the slow link and memory of LayerZeRO beside its peers, on two nodes made from one machine.

    python -m benchmarks.testbed --output benchmarks/results/mine.json

As root on Linux the nodes are network namespaces joined by a link of the given rate; otherwise all ranks share one
node and only compute and memory mean anything. Systems run in their own processes, a few alive at once, and take
turns within each round; every ratio is between LayerZeRO's and a system's steps of the same rounds.
"""

from __future__ import annotations

import json
import platform
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.jobs import ROOT, Job, JobError, Shape
from benchmarks.links import Nodes, OneNode, TwoNodes, why_not_two_nodes
from benchmarks.workload import Workload

US = "layerzero"
PEERS = (
    "layerzero-keep", "layerzero-lean", "zero1", "fsdp2", "fsdp2-node", "hsdp-allreduce-last", "hsdp-sync-last",
    "hsdp-keep", "ddp-zero1", "deepspeed", "deepspeed-hpz",
)  # fmt: skip
FLOORS = ("compute", "communication")


@dataclass
class Measured:
    """What was measured of one system; lists have one entry per round.

    Attributes:
        seconds: by number of micro-batches, of a step on the slowest rank.
        ratios: by number of micro-batches, LayerZeRO's step in the same round over this system's.
        sent_nbytes: by number of micro-batches, bytes node 0 sent per step.
        params_nbytes, optimizer_nbytes: held between steps, on the rank that holds most.
        peak_nbytes: resident memory in a step above that before construction, on the rank that needs most.
        error: why there are no numbers.
    """

    seconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    ratios: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    sent_nbytes: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    params_nbytes: int = 0
    optimizer_nbytes: int = 0
    peak_nbytes: int = 0
    report: str = ""
    error: str = ""


@dataclass(frozen=True)
class Plan:
    """How to measure.

    Attributes:
        micro_batches: numbers of micro-batches per step to measure at.
        alive: systems whose processes exist at once, LayerZeRO's included.
    """

    rounds: int
    micro_batches: tuple[int, ...]
    alive: int
    warm_up: int = 3


def measure(
    names: Sequence[str], nodes: Nodes, shape: Shape, workload: Workload, plan: Plan, pythons: dict[str, str],
    console: Console, save: Callable[[dict[str, Measured]], None],
) -> dict[str, Measured]:  # fmt: skip
    """All systems ``names``, LayerZeRO among them; ``save`` gets what there is after every group of systems."""
    results = {name: Measured() for name in [US, *names]}
    others = [n for n in names if n != US]
    size = max(1, plan.alive - 1)
    groups = [others[i : i + size] for i in range(0, len(others), size)] or [[]]
    num_turns = sum(len(group) + 1 for group in groups) * plan.rounds
    with tempfile.TemporaryDirectory(prefix="layerzero-bench-") as folder, Progress(console=console) as progress:
        task = progress.add_task("rounds", total=num_turns)
        for number, group in enumerate(groups):
            jobs: list[Job] = []
            here = Path(folder) / str(number)
            here.mkdir()
            try:
                for name in [US, *group]:
                    progress.update(task, description=f"start {name}")
                    jobs.append(Job(name, pythons.get(name, sys.executable), nodes, shape, workload, here))
                    try:
                        _prepare(jobs[-1], results[name], plan)
                    except JobError as error:
                        results[name].error = str(error)
                        jobs.pop().close()
                        if name == US:  # without it there is nothing to compare with
                            break
                if not jobs or jobs[0].name != US:
                    for name in group:
                        results[name].error = f"not measured, as {US} did not start beside it: {results[US].error}"
                    continue
                results[US].error = ""
                for number_of_round in range(plan.rounds):
                    progress.update(task, description=f"round {number_of_round + 1} of {', '.join(group)}")
                    _round(jobs, results, nodes, plan, number_of_round)
                    progress.advance(task, len(group) + 1)
                for job in jobs:
                    results[job.name].report = job.ask("traffic")[0]["report"]
                save(results)
            finally:
                for job in jobs:
                    job.close()
    return results


def _prepare(job: Job, result: Measured, plan: Plan) -> None:
    job.wait_until_built()
    for micro_batches in plan.micro_batches:  # first iterations record orders, build buckets, ...
        job.ask("steps", micro_batches=micro_batches, count=plan.warm_up if micro_batches == 1 else 1)
    replies = job.ask("memory", micro_batches=max(plan.micro_batches))
    # LayerZeRO is built once for each group of others.
    result.params_nbytes = max(result.params_nbytes, *(r["params"] for r in replies))
    result.optimizer_nbytes = max(result.optimizer_nbytes, *(r["optimizer"] for r in replies))
    result.peak_nbytes = max(result.peak_nbytes, *(r["peak"] for r in replies))


def _round(jobs: list[Job], results: dict[str, Measured], nodes: Nodes, plan: Plan, number: int) -> None:
    for micro_batches in plan.micro_batches:
        count = 2 if micro_batches == 1 else 1
        turn = number % len(jobs)
        seconds = {}
        for job in jobs[turn:] + jobs[:turn]:
            before = nodes.sent_nbytes()
            replies = job.ask("steps", micro_batches=micro_batches, count=count)
            after = nodes.sent_nbytes()
            seconds[job.name] = max(r["seconds"] for r in replies)
            if before is not None and after is not None:
                results[job.name].sent_nbytes[micro_batches].append((after - before) // count)
        for name, value in seconds.items():
            results[name].seconds[micro_batches].append(value)
            results[name].ratios[micro_batches].append(seconds[US] / value)


def formula_nbytes(workload: Workload, shape: Shape) -> int:
    """Bytes a node has to send per step by LayerZeRO's formula, whatever the number of micro-batches.

    Gradients to their optimizer shards and updated parameters back: each ``P (m - 1) / m`` elements per node,
    over ``m`` nodes.
    """
    numel = sum(p.numel() for p in workload.model("meta").parameters())
    return 2 * numel * workload.torch_dtype.itemsize * (shape.num_nodes - 1) // shape.num_nodes


def table(results: dict[str, Measured], micro_batches: Sequence[int]) -> Table:
    """One row per system."""
    out = Table("system", header_style="bold")
    for m in micro_batches:
        for head in (f"step, {m} mb\ns", "LayerZeRO's\nratio", "sent\nMB/step"):
            out.add_column(head, justify="right")
    for head in ("parameters\nMB/rank", "optimizer\nMB/rank", "peak\nMB/rank"):
        out.add_column(head, justify="right")
    for name, r in results.items():
        cells = [name]
        if r.error:
            out.add_row(name, "failed: " + r.error.strip().splitlines()[-1][:60])
            continue
        for m in micro_batches:
            sent = f"{statistics.median(r.sent_nbytes[m]) / 1e6:.1f}" if r.sent_nbytes[m] else "-"
            cells += [f"{statistics.median(r.seconds[m]):.3f}", f"{statistics.median(r.ratios[m]):.2f}", sent]
        cells += [f"{n / 1e6:.1f}" if n else "-" for n in (r.params_nbytes, r.optimizer_nbytes, r.peak_nbytes)]
        out.add_row(*cells)
    return out


def as_json(results: dict[str, Measured], configuration: dict[str, object]) -> dict[str, object]:
    """Everything measured, with medians."""
    systems = {
        name: {
            **vars(r),
            "median_seconds": {m: statistics.median(v) for m, v in r.seconds.items()},
            "median_ratio": {m: statistics.median(v) for m, v in r.ratios.items()},
            "median_sent_nbytes": {m: statistics.median(v) for m, v in r.sent_nbytes.items()},
        }
        for name, r in results.items()
        if r.seconds or r.error
    }
    return {"configuration": configuration, "systems": systems}


def main(
    rate: Annotated[str, typer.Option(help="rate of the link, in tc's units")] = "1gbit",
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    micro_batches: Annotated[str, typer.Option(help="numbers of micro-batches per step, comma-separated")] = "1,4",
    systems: Annotated[str, typer.Option(help="peers and floors to measure, comma-separated; default all")] = "",
    alive: Annotated[int, typer.Option(min=1, help="systems whose processes exist at once: idle ones wake up too")] = 2,
    deepspeed_python: Annotated[Path, typer.Option(help="a Python that has torch, deepspeed and pydantic")] = Path(
        ".venv-deepspeed/bin/python"
    ),
    one_node: Annotated[bool, typer.Option(help="no namespaces: all ranks on this machine")] = False,
    output: Annotated[Path | None, typer.Option(help="write everything measured here, as JSON")] = None,
    layers: int = Workload.layers,
    width: int = Workload.width,
    sequence: int = Workload.sequence,
    vocabulary: int = Workload.vocabulary,
    dtype: str = Workload.dtype,
) -> None:
    """Compare LayerZeRO with its peers on two slow-linked nodes."""
    console = Console(width=200 if not sys.stdout.isatty() else None)
    known = [*PEERS, *FLOORS]
    names = [n.strip() for n in systems.split(",") if n.strip()] or known
    if unknown := [n for n in names if n not in [US, *known]]:
        raise typer.BadParameter(f"unknown systems {unknown}; known are {known}", param_hint="--systems")
    deepspeed_python = ROOT / deepspeed_python
    if not deepspeed_python.exists():
        if skipped := [n for n in names if n.startswith("deepspeed")]:
            console.print(f"{deepspeed_python} is missing (make bench-deepspeed builds it): without {skipped}")
        names = [n for n in names if not n.startswith("deepspeed")]
    workload = Workload(layers=layers, width=width, sequence=sequence, vocabulary=vocabulary, dtype=dtype)
    plan = Plan(rounds, tuple(int(m) for m in micro_batches.split(",")), alive)
    shape = Shape()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` runs
    missing = "--one-node" if one_node else why_not_two_nodes()
    if missing:
        console.print(f"One node ({missing}): no slow link, so times say little about hierarchy, and bytes nothing.")
    configuration = {
        "date": time.strftime("%Y-%m-%d"), "rate": None if missing else rate,
        "command": shlex.join(["python", "-m", "benchmarks.testbed", *sys.argv[1:]]),
        "workload": asdict(workload), "shape": asdict(shape), "rounds": rounds, "torch": torch.__version__,
        "machine": platform.platform(), "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_parameters": sum(p.numel() for p in workload.model("meta").parameters()),
        "formula_sent_nbytes": formula_nbytes(workload, shape),
    }  # fmt: skip

    def save(results: dict[str, Measured]) -> None:
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(as_json(results, configuration), indent=1) + "\n")

    nodes: Nodes = OneNode() if missing else TwoNodes(rate)
    try:
        pythons = {n: str(deepspeed_python) for n in names if n.startswith("deepspeed")}
        results = measure(names, nodes, shape, workload, plan, pythons, console, save)
    finally:
        nodes.close()
    save(results)
    console.print(table(results, plan.micro_batches))
    console.print(f"LayerZeRO's formula: {configuration['formula_sent_nbytes'] / 1e6:.1f} MB sent per node and step")
    for name, result in results.items():
        if result.error:
            console.print(f"[bold]{name} failed[/bold]\n{result.error}", markup=True, highlight=False)
    if any(r.error for r in results.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
