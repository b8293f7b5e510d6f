"""What the testbed measured, as a table and as JSON."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.jobs import ROOT

US = "layerzero"


@dataclass
class Measured:
    """What was measured of one system in one group of systems; lists have one entry per round of that group.

    A round's entry has the same index for all systems of the group. Every other system is in one group only, LayerZeRO
    is in all of them, with processes of its own in each. What died before the last round has fewer entries, and an
    ``error``.

    Attributes:
        seconds: by number of micro-batches, of a step on the slowest rank.
        sent_nbytes: by number of micro-batches, bytes node 0 sent per step.
        params_nbytes, optimizer_nbytes, buffers_nbytes: held between steps, on the rank that holds most; buffers of
            gradients and communication, DeepSpeed's not counted.
        peak_nbytes: in steps of the largest number of micro-batches only: resident memory above that before
            construction, on the rank that needs most.
        report: LayerZeRO's own, of its traffic.
        error: why there are no numbers, or not all.
    """

    seconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    sent_nbytes: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    params_nbytes: int = 0
    optimizer_nbytes: int = 0
    buffers_nbytes: int = 0
    peak_nbytes: int = 0
    report: str = ""
    error: str = ""


Group = dict[str, Measured]
"""By name, the systems that took turns with each other: LayerZeRO and one or more others."""

UNITS = {
    "seconds": "seconds per optimizer step, on the slowest rank; by number of micro-batches, one entry per round",
    "sent_nbytes": "bytes that node 0 sent per optimizer step, without headers of the frames packets are cut into; "
    "as seconds",
    "median_ratio": "LayerZeRO's seconds over the system's, of the same round of the same group; no unit",
    "num_rounds": "rounds of which the medians are: of all its groups for layerzero, of its one group for the others",
    "params_nbytes": "bytes held between steps, on the rank that holds most",
    "optimizer_nbytes": "as params_nbytes",
    "buffers_nbytes": "as params_nbytes: buffers of gradients and communication, DeepSpeed's not counted",
    "peak_nbytes": "bytes of resident memory in two steps of the largest number of micro-batches, above those before "
    "the model was built, on the rank that needs most",
    "rate": "of the link, in tc's units",
    "warm_up": "steps of one micro-batch before the first round; of other numbers one, and two for the memory",
    "load_average": "processes, over one minute, before the first group",
}

MEMORY = ("params_nbytes", "optimizer_nbytes", "buffers_nbytes", "peak_nbytes")


def summary(groups: Sequence[Group]) -> dict[str, dict[str, Any]]:
    """By system, medians over its rounds in all of its groups, and the most memory in any."""
    out = {}
    for name in dict.fromkeys(name for group in groups for name in group):
        mine = [group for group in groups if name in group]
        found = [group[name] for group in mine]
        seconds, ratios, sent = ({} for _ in range(3))
        for m in dict.fromkeys(m for measured in found for m in measured.seconds):
            seconds[m] = [s for measured in found for s in measured.seconds.get(m, [])]
            sent[m] = [n for measured in found for n in measured.sent_nbytes.get(m, [])]
            # Of unequal length where one died: those before are still of the same rounds.
            ratios[m] = [
                ours / theirs
                for group in mine
                for ours, theirs in zip(group[US].seconds.get(m, []), group[name].seconds.get(m, []), strict=False)
            ]
        out[name] = {
            "groups": [i for i, group in enumerate(groups) if name in group],
            "num_rounds": min((len(s) for s in seconds.values()), default=0),
            **{
                f"median_{what}": {m: statistics.median(v) for m, v in values.items() if v}
                for what, values in (("seconds", seconds), ("ratio", ratios), ("sent_nbytes", sent))
            },
            **{what: max(getattr(measured, what) for measured in found) for what in MEMORY},
            "errors": [measured.error for measured in found if measured.error],
        }
    return out


def as_json(groups: Sequence[Group], configuration: dict[str, object]) -> dict[str, object]:
    """Everything measured, group by group, and the summary by system."""
    return {
        "configuration": configuration,
        "units": UNITS,
        "systems": summary(groups),
        "groups": [{name: vars(measured) for name, measured in group.items()} for group in groups],
    }


def table(groups: Sequence[Group], micro_batches: Sequence[int]) -> Table:
    """One row per system; those that failed have what was measured before, or the reason."""
    most = max(micro_batches)
    out = Table(
        "system", header_style="bold",
        caption="Medians over rounds. LayerZeRO took turns with each group of the others, so its row is of all their "
        f"rounds; a ratio is of a system's own. Peak: at {most} mb only.",
    )  # fmt: skip
    out.add_column("rounds", justify="right")
    for m in micro_batches:
        for head in (f"step, {m} mb\ns", "LayerZeRO's\nratio", "sent\nMB/step"):
            out.add_column(head, justify="right")
    for head in ("parameters", "optimizer", "buffers", f"peak, {most} mb"):
        out.add_column(f"{head}\nMB/rank", justify="right")

    def cell(value: float | None, digits: int) -> str:
        return f"{value:.{digits}f}" if value else "-"

    for name, s in summary(groups).items():
        if not s["num_rounds"]:
            out.add_row(name, "0", "failed" if s["errors"] else "no rounds")
            continue
        cells = [name + (" (failed)" if s["errors"] else ""), str(s["num_rounds"])]
        for m in micro_batches:
            sent = s["median_sent_nbytes"].get(m, 0) / 1e6
            cells += [cell(s["median_seconds"].get(m), 3), cell(s["median_ratio"].get(m), 2), cell(sent, 1)]
        cells += [cell(s[what] / 1e6, 1) for what in MEMORY]
        out.add_row(*cells)
    return out


def of_this_machine() -> dict[str, object]:
    """What the numbers depend on besides the command."""
    cpus = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":", 1)[1].strip() for line in cpus if line.startswith("model name")), "")
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "machine": platform.platform(), "cpu": model or platform.processor(), "num_processors": os.cpu_count(),
        "load_average": os.getloadavg()[0], "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__, "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": None if changes is None else bool(changes),
    }  # fmt: skip


def _git(*arguments: str) -> str | None:
    """None without git, or outside of a repository."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
