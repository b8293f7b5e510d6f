"""Long sequences: tensor parallelism with ZeRO-1 against context parallelism with LayerZeRO, on four ranks.

    python -m benchmarks.headline --output benchmarks/results/headline

Trains diffusers' Wan transformer on one video per step, over a sweep of sequence lengths. Step times: both systems live
in the same processes and take turns within every round. Memory: each system in processes of its own, from the kernel's
count of resident bytes. ``--nodes 2`` puts two ranks each in two network namespaces joined by a slow link (root only).
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import matplotlib

matplotlib.use("Agg")

import torch
import typer
from matplotlib import pyplot as plt
from rich.console import Console

from benchmarks.headline_rank import SYSTEMS, TOKENS_PER_FRAME, Workload
from benchmarks.jobs import ROOT, free_port
from benchmarks.links import Nodes, OneNode, TwoNodes, bits_per_second, why_not_two_nodes
from benchmarks.watchdog import exit_on_signals

RANKS = 4
US, PEER = "cp+layerzero", "tp+zero1"
NAMES = {US: "context parallel 4 + LayerZeRO", PEER: "tensor parallel 4 + ZeRO-1"}


def run_ranks(nodes: Nodes, job: dict[str, Any], timeout: float) -> dict[str, Any]:
    """What rank 0 of `benchmarks.headline_rank` wrote for ``job``."""
    with tempfile.TemporaryDirectory(prefix="layerzero-headline-") as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": nodes.interface, "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        if job["measure"] != "time":  # large tensors get pages of their own, so that resident bytes are bytes in use
            environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
        port = free_port()
        with log.open("w", encoding="utf-8") as file:
            launchers = [
                subprocess.Popen(
                    [*nodes.command(node), sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes.count}"]
                    + [f"--node-rank={node}", f"--nproc-per-node={RANKS // nodes.count}"]
                    + [f"--master-addr={nodes.address(0)}", f"--master-port={port}", f"--log-dir={folder}/torchrun"]
                    + ["-m", "benchmarks.headline_rank", json.dumps({**job, "result": str(result)})],
                    cwd=ROOT, env=environment, stdout=file, stderr=file,
                )
                for node in range(nodes.count)
            ]  # fmt: skip
            try:
                codes = [launcher.wait(timeout) for launcher in launchers]
            finally:
                for launcher in launchers:
                    launcher.kill()
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}:\n{log.read_text(encoding='utf-8')[-4000:]}")
        return json.loads(result.read_text(encoding="utf-8"))


def measure(
    nodes: Nodes, work: Workload, lengths: list[int], rounds: int, memory: dict[str, Any], console: Console
) -> dict[str, Any]:
    """Step times of both systems, and their memory unless ``memory`` has it."""
    job = {"workload": asdict(work), "lengths": lengths, "rounds": rounds}
    console.print("step times")
    times = run_ranks(nodes, {**job, "measure": "time"}, timeout=1800)
    for name in SYSTEMS if not memory else ():
        console.print(f"memory of {name}")
        memory[name] = run_ranks(nodes, {**job, "measure": name}, timeout=900)
    ratios = {}
    for length in lengths:
        ours, theirs = (times["seconds"][str(length)][name] for name in (US, PEER))
        ratios[length] = {
            "seconds": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
            "peak": peak(memory[US], length) / peak(memory[PEER], length),
        }
    return {
        "workload": asdict(work), "lengths": lengths, "rounds": rounds, "nodes": nodes.count, "ranks": RANKS,
        "torch": torch.__version__, "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "command": " ".join(["python -m benchmarks.headline", *sys.argv[1:]]), "times": times, "memory": memory,
        "ratios": ratios,
    }  # fmt: skip


def peak(memory: dict[str, Any], length: int) -> int:
    """Most resident bytes above those before construction, on the rank that needs most."""
    return memory["at_rest"] + memory["in_step"][str(length)]


def crossing(ratios: dict[int, dict[str, float]], what: str) -> str:
    """The first length from which on context parallelism stays ahead."""
    ahead = [length for length in ratios if all(r[what] < 1 for n, r in ratios.items() if n >= length)]
    return f"from {ahead[0]} tokens on" if ahead else "at no length of the sweep"


def plot(result: dict[str, Any], path: Path) -> None:
    """Step time and peak memory over sequence length, and the ratio of both."""
    lengths = result["lengths"]
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for color, name in (("C0", US), ("C1", PEER)):
        seconds = [statistics.median(result["times"]["seconds"][str(n)][name]) for n in lengths]
        memory = result["memory"][name]
        axes[0].plot(lengths, seconds, "o-", color=color, label=NAMES[name])
        axes[1].plot(lengths, [peak(memory, n) / 2**20 for n in lengths], "o-", color=color, label="peak")
        axes[1].plot(
            lengths, [memory["saved"][str(n)] / 2**20 for n in lengths], "--", color=color, label="activations"
        )
    axes[0].set_title("step time (s)")
    axes[1].set_title("memory of one rank (MiB)")
    axes[2].plot(lengths, [result["ratios"][n]["seconds"] for n in lengths], "o-", color="C2", label="step time")
    axes[2].plot(lengths, [result["ratios"][n]["peak"] for n in lengths], "s-", color="C3", label="peak memory")
    axes[2].axhline(1, color="0.5", linewidth=1)
    axes[2].set_title("context parallel / tensor parallel")
    axes[2].set_ylim(bottom=0)
    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [str(n) for n in lengths])
        ax.set_xlabel("tokens per sample")
        ax.legend(fontsize=8)
    for ax in axes[:2]:
        ax.set_yscale("log")
    where = "one node" if result["nodes"] == 1 else f"two nodes of two ranks, {result['link'] or 'slow link'} between"
    figure.suptitle(f"Wan transformer, {where}")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def report(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    work, lengths, mib = result["workload"], result["lengths"], 2**20
    lines = [
        f"# Context parallel + LayerZeRO against tensor parallel + ZeRO-1, {result['nodes']} node(s) of "
        f"{RANKS // result['nodes']} ranks",
        "",
        f"`{result['command']}`; torch {result['torch']}, {result['cores']} cores, {RANKS} ranks, "
        f"link {result['link']}. Wan transformer: {', '.join(f'{key} {value}' for key, value in work.items())}. "
        f"Medians of {result['rounds']} interleaved rounds; ratios are medians of each round's ratio.",
        "",
        "| tokens | CP, s | TP, s | ratio | CP, MiB sent | TP, MiB sent | CP, MiB at peak | TP, MiB at peak | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    times, memory = result["times"], result["memory"]
    for n in lengths:
        ours, theirs = (statistics.median(times["seconds"][str(n)][name]) for name in (US, PEER))
        sent = [times["sent_activations"][str(n)][name] + times["sent_model_states"][name] for name in (US, PEER)]
        peaks = [peak(memory[name], n) for name in (US, PEER)]
        ratio = result["ratios"][n]
        lines.append(
            f"| {n} | {ours:.3f} | {theirs:.3f} | **{ratio['seconds']:.3f}** "
            f"| {sent[0] / mib:.1f} | {sent[1] / mib:.1f} | {peaks[0] / mib:.1f} | {peaks[1] / mib:.1f} "
            f"| **{ratio['peak']:.3f}** |"
        )
    longest = str(lengths[-1])
    lines += [
        "",
        f"Step time: context parallelism is ahead {crossing(result['ratios'], 'seconds')}. Peak memory: "
        f"{crossing(result['ratios'], 'peak')}.",
        "",
        f"Memory of one rank in MiB, the rank that needs most, at {longest} tokens:",
        "",
        "| | parameters | gradients | optimizer | saved for the backward | at rest, resident | in a step, on top |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in (US, PEER):
        m = memory[name]
        values = (
            m["parameters"],
            m["gradients"],
            m["optimizer"],
            m["saved"][longest],
            m["at_rest"],
            m["in_step"][longest],
        )
        lines.append(f"| {NAMES[name]} | {' | '.join(f'{value / mib:.1f}' for value in values)} |")
    lines += [
        "",
        "The first four are bytes of tensors; the last two are resident bytes, whose sum is the peak. Losses of the "
        "first steps at the shortest length: "
        + "; ".join(
            f"{name} {', '.join(f'{loss:.5f}' for loss in times['losses'][str(lengths[0])][name][:3])}"
            for name in SYSTEMS
        )
        + ".",
    ]
    return "\n".join(lines) + "\n"


def main(
    output: Annotated[Path, typer.Option(help="Results: this name with .json, .md and .png.")],
    lengths: Annotated[str, typer.Option(help="Tokens per sample, multiples of 256.")] = "512,1024,2048,4096,8192",
    rounds: Annotated[int, typer.Option(help="Measured steps of each system at each length.")] = 3,
    nodes: Annotated[int, typer.Option(help="1, or 2 joined by a slow link.")] = 1,
    rate: Annotated[str, typer.Option(help="Of that link, in tc's units.")] = "1gbit",
    dim: Annotated[int, typer.Option(help="Width of the model.")] = 256,
    layers: Annotated[int, typer.Option(help="Blocks of the model.")] = 4,
    recompute: Annotated[bool, typer.Option(help="Keep only block inputs for the backward, in both systems.")] = False,
    memory_from: Annotated[Path | None, typer.Option(help="Earlier .json; memory does not depend on the link.")] = None,
) -> None:
    """Measures, and writes a report with a plot."""
    console = Console()
    work = Workload(dim=dim, ffn_dim=4 * dim, layers=layers, recompute=recompute)
    sweep = [int(n) for n in lengths.split(",")]
    if any(n % TOKENS_PER_FRAME for n in sweep):
        raise typer.BadParameter(f"lengths must be multiples of {TOKENS_PER_FRAME}")
    if nodes == 2 and (missing := why_not_two_nodes()):
        raise typer.BadParameter(f"two nodes: {missing}")
    try:
        bits_per_second(rate)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--rate") from None
    exit_on_signals()
    memory: dict[str, Any] = {}
    if memory_from is not None:
        earlier = json.loads(memory_from.read_text(encoding="utf-8"))
        if earlier["workload"] != asdict(work) or not set(sweep) <= set(earlier["lengths"]):
            raise typer.BadParameter(f"{memory_from} has another workload or other lengths")
        memory = earlier["memory"]
    where: Nodes = TwoNodes(rate) if nodes == 2 else OneNode()
    try:
        result = measure(where, work, sweep, rounds, memory, console)
    finally:
        where.close()
    result["link"] = rate if nodes == 2 else None
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    text = report(result)
    output.with_suffix(".md").write_text(text, encoding="utf-8")
    plot(result, output.with_suffix(".png"))
    console.print(text, markup=False)


if __name__ == "__main__":
    typer.run(main)
