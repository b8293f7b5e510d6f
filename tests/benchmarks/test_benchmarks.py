"""The benchmark scripts on tiny sizes, so that they keep working; what they compute is checked, not how fast."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import testbed
from tests.benchmarks import system_cases
from tests.dist.pool import Pool

ROOT = Path(__file__).resolve().parents[2]


def start(module: str, *arguments: str, scratch: str = "", **options: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": "1"}
    if scratch:
        env["TMPDIR"] = scratch
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, **options)


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    process = start(module, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


ONE_BY_ONE = {
    "host_cost": ["--world-sizes", "8,16", "--units", "3", "--repeats", "1"],
    "one_process": ["--rounds", "2", "--layers", "1", "--width", "64"],
    "gpu": ["--small", "--no-tests", "--steps", "2"],
}
"""Scripts that run their systems one by one, each in a single process, and so leave cores to each other."""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, subprocess.Popen[str]]]]:
    """All of `ONE_BY_ONE` at once: the folder of their reports and logs, and their processes."""
    folder = tmp_path_factory.mktemp("one_by_one")
    processes = {}
    for name, arguments in ONE_BY_ONE.items():
        with (folder / f"{name}.txt").open("w") as log:
            output = str(folder / f"{name}.json")
            processes[name] = start(name, *arguments, "--output", output, stdout=log, stderr=subprocess.STDOUT)
    yield folder, processes
    for process in processes.values():
        process.kill()
        process.wait()


@pytest.fixture
def report_of(started: tuple[Path, dict[str, subprocess.Popen[str]]]) -> Callable[[str], dict[str, Any]]:
    folder, processes = started

    def report(name: str) -> dict[str, Any]:
        assert processes[name].wait() == 0, (folder / f"{name}.txt").read_text()
        return json.loads((folder / f"{name}.json").read_text())

    return report


TINY = ["--layers", "2", "--width", "64", "--sequence", "16", "--vocabulary", "64"]


def run_testbed(tmp_path: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    output = tmp_path / "report.json"
    done = run("testbed", *TINY, "--rounds", "1", "--output", str(output), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(output.read_text())


@pytest.mark.slow
class TestTestbed:
    def test_one_node(self, tmp_path: Path) -> None:
        out, report = run_testbed(tmp_path, "--one-node", "--systems", "hsdp-sync-last", "--micro-batches", "1,2")
        assert "One node" in out and "hsdp-sync-last" in out
        (systems,) = report["groups"]
        assert set(systems) == set(report["systems"]) == {"layerzero", "hsdp-sync-last"}
        assert report["systems"]["hsdp-sync-last"]["num_rounds"] == 1
        for system in systems.values():
            assert not system["error"]
            assert all(len(system["seconds"][m]) == 1 and system["seconds"][m][0] > 0 for m in ("1", "2"))
            assert system["sent_nbytes"] == {} and system["peak_nbytes"] > 0
        numel = report["configuration"]["num_parameters"]
        ours, theirs = systems["layerzero"]["optimizer_nbytes"], systems["hsdp-sync-last"]["optimizer_nbytes"]
        assert 2 * numel <= ours < 2.3 * numel  # 8 bytes over four ranks, and the root unit's padding
        assert 3.8 * numel <= theirs < 4.6 * numel
        assert "exposed" in systems["layerzero"]["report"]

    @pytest.mark.usefixtures("two_nodes")
    def test_two_nodes_send_what_the_formula_says_and_leave_nothing(self, tmp_path: Path) -> None:
        _, report = run_testbed(tmp_path, "--systems", "layerzero", "--micro-batches", "1,2", "--width", "256")
        sent, formula = report["groups"][0]["layerzero"]["sent_nbytes"], report["configuration"]["formula_sent_nbytes"]
        assert formula == 2 * report["configuration"]["num_parameters"]
        for micro_batches in ("1", "2"):
            assert formula < sent[micro_batches][0] < 1.05 * formula  # headers weigh more in small messages
        spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        mine = [int(pid) for pid in re.findall(r"layerzero-(\d+)-", spaces)]
        assert not [pid for pid in mine if not Path(f"/proc/{pid}").exists()]

    def test_a_rank_that_dies_ends_its_system_alone(self, tmp_path: Path) -> None:
        output = tmp_path / "report.json"
        systems = ["--one-node", "--micro-batches", "1", "--systems", "hsdp-sync-last,compute"]
        with tempfile.TemporaryDirectory() as scratch:  # pytest's own is too deep for a socket
            process = start(
                "testbed", *TINY, *systems, "--rounds", "25", "--output", str(output), scratch=scratch,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                while not output.exists():  # is written after every round
                    assert process.poll() is None
                    time.sleep(0.01)
                os.kill(ranks_of("hsdp-sync-last", scratch)[0], signal.SIGKILL)
                out, _ = process.communicate()
            finally:
                process.kill()
            assert process.returncode == 1 and "hsdp-sync-last (failed)" in out
            assert not list(Path(scratch).glob("layerzero-*")) and not list(Path(scratch).glob("torchelastic_*"))
        systems = json.loads(output.read_text())["systems"]
        assert systems["hsdp-sync-last"]["errors"] and systems["hsdp-sync-last"]["num_rounds"] < 25
        assert systems["compute"]["num_rounds"] == 25 and not systems["compute"]["errors"]


def ranks_of(system: str, scratch: str) -> list[int]:
    """Process ids."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # ended meanwhile
            command = path.read_bytes().decode(errors="replace").split("\0")
            if {"benchmarks.rank", f"--system={system}"} <= set(command) and "torch.distributed.run" not in command:
                found += [int(path.parent.name)] if f"--socket={scratch}/" in " ".join(command) else []
    return found


def test_every_system_trains(pool: Pool) -> None:
    """All but DeepSpeed's; together their ranks hold at least fp32 parameters and two fp32 states."""
    numel = sum(p.numel() for p in system_cases.WORK.model("meta").parameters())
    ranks = pool.run(system_cases.two_steps, 4)
    assert set(ranks[0]) == {name for name in testbed.SYSTEMS if not name.startswith("deepspeed")}
    for name in set(ranks[0]) - {"compute", "communication"}:
        params, optimizer = (sum(held) for held in zip(*(rank[name] for rank in ranks), strict=True))
        assert params >= 4 * numel and optimizer >= 8 * numel, name


def test_host_cost(report_of: Callable[[str], dict[str, Any]]) -> None:
    rows = report_of("host_cost")["rows"]
    assert [(r["system"], r["world_size"]) for r in rows] == [
        ("layerzero", 8), ("layerzero-streams", 8), ("hsdp", 8), ("plain", 8),
        ("layerzero", 16), ("layerzero-streams", 16), ("hsdp", 16),
    ]  # fmt: skip
    for row in rows:
        assert row["step_seconds"] > 0 and row["bookkeeping_nbytes"] > 0
        assert (row["collectives_seconds"] > 0) is (row["system"] != "plain")


def test_one_process(report_of: Callable[[str], dict[str, Any]]) -> None:
    report = report_of("one_process")
    for clock in ("cpu", "wall"):
        assert report[clock]["median_ratio"] > 0 and [len(v) for v in report[clock]["seconds"].values()] == [2, 2]


def test_gpu_script_on_the_cpu(report_of: Callable[[str], dict[str, Any]]) -> None:
    systems = report_of("gpu")["systems"]
    assert len(systems) == 6 and all(s["seconds"] > 0 and s["params_nbytes"] > 0 for s in systems.values())
    assert systems["layerzero of 8"]["optimizer_nbytes"] < systems["plain"]["optimizer_nbytes"] / 6
