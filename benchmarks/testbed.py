"""Step time, bytes on the slow link and memory of LayerZeRO beside its peers, on two nodes made from one machine.

    python -m benchmarks.testbed --output benchmarks/results/mine.json

As root on Linux the nodes are network namespaces joined by a link of the given rate; otherwise all ranks share one
node and only compute and memory mean anything. Systems run in their own processes. Those of LayerZeRO and of one other
system (``--alive`` for more) are alive at once and take turns within each round; every ratio is between LayerZeRO's and
a system's steps of the same rounds.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.jobs import ROOT, Job, JobError, Shape, Task
from benchmarks.links import Nodes, OneNode, TwoNodes, bits_per_second, why_not_two_nodes
from benchmarks.testbed_report import US, Group, Measured, as_json, of_this_machine, table
from benchmarks.watchdog import exit_on_signals, workspace
from benchmarks.workload import Workload

SYSTEMS = {
    "layerzero": 'sharding="layerzero", keep_num_params="all", accumulate="full", the ZeRO-3 group being a node',
    "layerzero-keep": 'as layerzero without accumulate="full": gradients are reduced in every micro-batch',
    "layerzero-lean": "as layerzero with neither: parameters are gathered in every forward and backward",
    "zero1": 'LayerZeRO with sharding="zero1"',
    "fsdp2": "fully_shard over all ranks",
    "fsdp2-keep": "as fsdp2, parameters unsharded and gradients unreduced until the last micro-batch's backward",
    "fsdp2-node": "fully_shard over all ranks, reshard_after_forward=ranks of a node",
    "hsdp-allreduce-last": "fully_shard on a (nodes, ranks) mesh, all-reduce between nodes in the last micro-batch",
    "hsdp-sync-last": "fully_shard on a (nodes, ranks) mesh, gradients reduced in the last micro-batch only",
    "hsdp-keep": "as hsdp-sync-last, parameters unsharded until the last micro-batch's backward",
    "hsdp-keep-async": "as hsdp-keep, gathers ahead don't block the calling thread (_set_unshard_async_op)",
    "ddp-zero1": "DistributedDataParallel with compressed gradients and ZeroRedundancyOptimizer",
    "deepspeed": "DeepSpeed ZeRO-3, overlap_comm, default bucket sizes",
    "deepspeed-hpz": "as deepspeed, zero_hpz_partition_size=ranks of a node",
    "compute": "floor: forward, backward and a share of the optimizer's work; nothing is sent",
    "communication": "floor: the collectives of a LayerZeRO step; nothing is computed",
}
"""In words, in the order of measuring; `benchmarks.systems` builds them."""


@dataclass(frozen=True)
class Plan:
    """How to measure.

    Attributes:
        micro_batches: numbers of micro-batches per step to measure at.
        alive: systems whose processes exist at once, LayerZeRO's included.
        warm_up: steps of one micro-batch before the first round; of other numbers there is one, and two for the memory.
    """

    rounds: int
    micro_batches: tuple[int, ...]
    alive: int = 2
    warm_up: int = 3


def measure(
    names: Sequence[str], nodes: Nodes, task: Task, plan: Plan, pythons: dict[str, str],
    console: Console, save: Callable[[list[Group]], object],
) -> list[Group]:  # fmt: skip
    """All systems ``names`` in groups, LayerZeRO in each; ``save`` gets what there is after every round.

    A system that dies has an error in its group, and the others go on. Where LayerZeRO dies its group ends, as there is
    nothing to compare with; the next one has a new LayerZeRO.
    """
    others = [name for name in names if name != US]
    size = plan.alive - 1
    groups: list[Group] = []
    with workspace() as folder, Progress(console=console) as progress:
        bar = progress.add_task("rounds", total=plan.rounds * max(1, -(-len(others) // size)))
        for start in range(0, max(1, len(others)), size):
            group = {name: Measured() for name in [US, *others[start : start + size]]}
            groups.append(group)
            here = folder / str(len(groups))
            here.mkdir()
            jobs: dict[str, Job] = {}
            try:
                for name in group:
                    progress.update(bar, description=f"start {name}")
                    if _is_worth_it(group):
                        jobs[name] = Job(name, pythons.get(name, sys.executable), nodes, task, here)
                        with _errors_go_to(group[name], jobs[name]):
                            _prepare(jobs[name], group[name], plan)
                for number in range(plan.rounds):
                    if _is_worth_it(group):
                        progress.update(bar, description=f"round {number + 1} of {', '.join(group)}")
                        _round(jobs, group, nodes, plan, number)
                        save(groups)
                    progress.advance(bar)
                if not group[US].error:
                    with _errors_go_to(group[US], jobs[US]):
                        group[US].report = jobs[US].ask("traffic")[0]["report"]
                _explain_missing(group, plan)
                save(groups)
            finally:
                for job in jobs.values():
                    job.close()
    return groups


def _is_worth_it(group: Group) -> bool:
    """Whether there is something left to compare: LayerZeRO, and another unless it was asked for alone."""
    others = [measured for name, measured in group.items() if name != US]
    return not group[US].error and not (others and all(measured.error for measured in others))


@contextlib.contextmanager
def _errors_go_to(measured: Measured, job: Job) -> Iterator[None]:
    try:
        yield
    except JobError as error:
        measured.error = str(error)
        job.close()


def _prepare(job: Job, measured: Measured, plan: Plan) -> None:
    job.wait_until_built()
    for micro_batches in plan.micro_batches:  # first iterations record orders, build buckets, ...
        job.ask("steps", micro_batches=micro_batches, count=plan.warm_up if micro_batches == 1 else 1)
    replies = job.ask("memory", micro_batches=max(plan.micro_batches))
    measured.params_nbytes = max(r["params"] for r in replies)
    measured.optimizer_nbytes = max(r["optimizer"] for r in replies)
    measured.buffers_nbytes = max(r["buffers"] for r in replies)
    measured.peak_nbytes = max(r["peak"] for r in replies)


def _round(jobs: dict[str, Job], group: Group, nodes: Nodes, plan: Plan, number: int) -> None:
    names = list(group)
    turn = number % len(names)
    for micro_batches in plan.micro_batches:
        count = 2 if micro_batches == 1 else 1
        for name in names[turn:] + names[:turn]:
            measured = group[name]
            if measured.error:
                continue
            with _errors_go_to(measured, jobs[name]):
                before = nodes.sent_nbytes()
                replies = jobs[name].ask("steps", micro_batches=micro_batches, count=count)
                after = nodes.sent_nbytes()
                measured.seconds[micro_batches].append(max(r["seconds"] for r in replies))
                if before is not None and after is not None:
                    measured.sent_nbytes[micro_batches].append((after - before) // count)


def _explain_missing(group: Group, plan: Plan) -> None:
    """Where LayerZeRO died, the others have fewer rounds through no fault of their own."""
    for name, measured in group.items():
        if group[US].error and not measured.error:
            rounds = min((len(seconds) for seconds in measured.seconds.values()), default=0)
            measured.error = f"{name}: {rounds} of {plan.rounds} rounds, as {US} died beside it (its error is above)"


def formula_nbytes(workload: Workload, shape: Shape) -> int:
    """Bytes a node has to send per step by LayerZeRO's formula, whatever the number of micro-batches.

    Gradients to their optimizer shards and updated parameters back: each ``P (m - 1) / m`` elements per node,
    over ``m`` nodes.
    """
    return 2 * _numel(workload) * workload.torch_dtype.itemsize * (shape.num_nodes - 1) // shape.num_nodes


def request_seconds(workload: Workload, plan: Plan, rate: str | None) -> float:
    """Seconds after which a request counts as hung: three minutes, and what its steps take at worst.

    That is a rank at a billion floating-point operations a second, and a link at a quarter of its rate that gets all
    parameters twice and all gradients once in every micro-batch.
    """
    micro_batches = max(plan.warm_up, 2 * max(plan.micro_batches))  # in the longest request
    compute = 6 * _numel(workload) * workload.batch * workload.sequence / 1e9
    nbytes = 3 * _numel(workload) * workload.torch_dtype.itemsize
    link = 4 * 8 * nbytes / bits_per_second(rate) if rate else 0
    return 180 + micro_batches * (compute + link)


def _numel(workload: Workload) -> int:
    return sum(p.numel() for p in workload.model("meta").parameters())


def main(
    rate: Annotated[str, typer.Option(help="rate of the link, in tc's units")] = "1gbit",
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    micro_batches: Annotated[str, typer.Option(help="numbers of micro-batches per step, comma-separated")] = "1,4",
    systems: Annotated[str, typer.Option(help="peers and floors to measure, comma-separated; default all")] = "",
    alive: Annotated[int, typer.Option(min=2, help="systems whose processes exist at once: idle ones wake up too")] = 2,
    deepspeed_python: Annotated[Path, typer.Option(help="a Python that has torch, deepspeed and pydantic")] = Path(
        ".venv-deepspeed/bin/python"
    ),
    one_node: Annotated[bool, typer.Option(help="no namespaces: all ranks on this machine")] = False,
    output: Annotated[Path | None, typer.Option(help="write everything measured here, as JSON")] = None,
    layers: Annotated[int, typer.Option(min=1)] = Workload.layers,
    width: Annotated[int, typer.Option(min=1, help=f"a multiple of {Workload.heads}")] = Workload.width,
    sequence: Annotated[int, typer.Option(min=1)] = Workload.sequence,
    vocabulary: Annotated[int, typer.Option(min=1)] = Workload.vocabulary,
    dtype: Annotated[str, typer.Option(help="bf16 or fp32")] = Workload.dtype,
) -> None:
    """Compare LayerZeRO with its peers on two slow-linked nodes."""
    console = Console(width=200 if not sys.stdout.isatty() else None)
    names = _names(systems)
    deepspeed = ROOT / deepspeed_python
    can_run = deepspeed.is_file() and os.access(deepspeed, os.X_OK)
    skipped = [n for n in names if n.startswith("deepspeed") and not can_run]
    if skipped:
        what = f"{deepspeed} is missing (make bench-deepspeed builds it)"
        if systems:
            raise typer.BadParameter(f"{what}, and {', '.join(skipped)} need it", param_hint="--deepspeed-python")
        console.print(f"{what}: without {', '.join(skipped)}")
    plan = Plan(rounds, _numbers(micro_batches), alive)
    try:
        bits_per_second(rate)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--rate") from None
    if width % Workload.heads:
        raise typer.BadParameter(f"expected a multiple of {Workload.heads} heads, got {width}", param_hint="--width")
    if dtype not in ("bf16", "fp32"):
        raise typer.BadParameter(f'expected bf16 or fp32, got "{dtype}"', param_hint="--dtype")
    if output is not None:
        _check_writable(output)
    workload = Workload(layers=layers, width=width, sequence=sequence, vocabulary=vocabulary, dtype=dtype)

    exit_on_signals()
    missing = "--one-node" if one_node else why_not_two_nodes()
    if missing:
        console.print(f"One node ({missing}): no slow link, so times say little about hierarchy, and bytes nothing.")
    task = Task(Shape(), workload, request_seconds(workload, plan, None if missing else rate))
    configuration = {
        "date": time.strftime("%Y-%m-%d"), "rate": None if missing else rate,
        "command": shlex.join(["python", "-m", "benchmarks.testbed", *sys.argv[1:]]),
        "workload": asdict(workload), "shape": asdict(task.shape), **asdict(plan), **of_this_machine(),
        "systems": {name: SYSTEMS[name] for name in dict.fromkeys([US, *names]) if name not in skipped},
        "skipped": skipped, "num_parameters": _numel(workload),
        "formula_sent_nbytes": formula_nbytes(workload, task.shape),
    }  # fmt: skip

    def save(groups: list[Group]) -> bool:
        if output is None:
            return True
        try:
            output.write_text(json.dumps(as_json(groups, configuration), indent=1) + "\n")
        except OSError as error:  # what was measured is still worth a table
            console.print(f"can't write {output}: {error}")
            return False
        return True

    nodes: Nodes = OneNode() if missing else TwoNodes(rate)
    try:
        pythons = {n: str(deepspeed) for n in names if n.startswith("deepspeed")}
        groups = measure([n for n in names if n not in skipped], nodes, task, plan, pythons, console, save)
    finally:
        nodes.close()
    console.print(table(groups, plan.micro_batches))
    console.print(f"LayerZeRO's formula: {formula_nbytes(workload, task.shape) / 1e6:.1f} MB sent per node and step")
    errors = [measured.error for group in groups for measured in group.values() if measured.error]
    for error in errors:
        console.print(error, markup=False, highlight=False)
    if errors or not save(groups):
        raise typer.Exit(1)


def _names(systems: str) -> list[str]:
    names = [n.strip() for n in systems.split(",") if n.strip()] or [n for n in SYSTEMS if n != US]
    if unknown := [n for n in names if n not in SYSTEMS]:
        raise typer.BadParameter(f"unknown systems {unknown}; known are {list(SYSTEMS)}", param_hint="--systems")
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise typer.BadParameter(f"named more than once: {', '.join(twice)}", param_hint="--systems")
    return names


def _numbers(micro_batches: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(m) for m in micro_batches.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1 or len(set(numbers)) < len(numbers):
        expected = "expected different whole numbers from 1 on, separated by commas"
        raise typer.BadParameter(f'{expected}, got "{micro_batches}"', param_hint="--micro-batches")
    return numbers


def _check_writable(path: Path) -> None:
    """Before measuring: makes the folder, and leaves the file as it is."""
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise typer.BadParameter(f"can't write {path}: {error}", param_hint="--output") from None


if __name__ == "__main__":
    typer.run(main)
