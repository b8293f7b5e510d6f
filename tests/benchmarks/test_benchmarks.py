"""The benchmark scripts on tiny sizes, so that they keep working; what they compute is checked, not how fast."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


TINY = ["--rounds", "1", "--layers", "2", "--width", "64", "--sequence", "16", "--vocabulary", "64"]


def can_make_nodes() -> bool:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return False
    return subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode == 0


def run_testbed(tmp_path: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    output = tmp_path / "report.json"
    done = run("testbed", *TINY, "--output", str(output), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(output.read_text())


@pytest.mark.slow
class TestTestbed:
    def test_one_node(self, tmp_path: Path) -> None:
        out, report = run_testbed(tmp_path, "--one-node", "--systems", "hsdp-sync-last", "--micro-batches", "1,2")
        assert "One node" in out and "hsdp-sync-last" in out
        systems = report["systems"]
        assert set(systems) == {"layerzero", "hsdp-sync-last"}
        for system in systems.values():
            assert not system["error"]
            assert all(len(system["seconds"][m]) == 1 and system["seconds"][m][0] > 0 for m in ("1", "2"))
            assert system["sent_nbytes"] == {} and system["peak_nbytes"] > 0
        numel = report["configuration"]["num_parameters"]
        ours, theirs = systems["layerzero"]["optimizer_nbytes"], systems["hsdp-sync-last"]["optimizer_nbytes"]
        assert 2 * numel <= ours < 2.3 * numel  # 8 bytes over four ranks, and the root unit's padding
        assert 3.8 * numel <= theirs < 4.6 * numel
        assert "exposed" in systems["layerzero"]["report"]

    @pytest.mark.skipif(not can_make_nodes(), reason="needs root, ip and tc")
    def test_two_nodes_send_what_the_formula_says_and_leave_nothing(self, tmp_path: Path) -> None:
        _, report = run_testbed(tmp_path, "--systems", "communication", "--micro-batches", "1,2", "--width", "256")
        sent, formula = report["systems"]["layerzero"]["sent_nbytes"], report["configuration"]["formula_sent_nbytes"]
        assert formula == 2 * report["configuration"]["num_parameters"]
        for micro_batches in ("1", "2"):
            assert formula < sent[micro_batches][0] < 1.05 * formula  # headers weigh more in small messages
        spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        mine = [int(pid) for pid in re.findall(r"layerzero-(\d+)-", spaces)]
        assert not [pid for pid in mine if not Path(f"/proc/{pid}").exists()]

    def test_unknown_system(self) -> None:
        done = run("testbed", "--systems", "ddp-zero9")
        assert done.returncode != 0 and "ddp-zero9" in done.stderr


def test_host_cost(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    done = run("host_cost", "--world-sizes", "8,16", "--units", "3", "--repeats", "1", "--output", str(output))
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["rows"]
    assert [(r["system"], r["world_size"]) for r in rows] == [
        ("layerzero", 8), ("hsdp", 8), ("plain", 8), ("layerzero", 16), ("hsdp", 16),
    ]  # fmt: skip
    for row in rows:
        assert row["step_seconds"] > 0 and row["bookkeeping_nbytes"] > 0
        assert (row["collectives_seconds"] > 0) is (row["system"] != "plain")


def test_one_process(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    done = run("one_process", "--rounds", "2", "--layers", "1", "--width", "64", "--output", str(output))
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text())
    assert report["median_ratio"] > 0 and [len(v) for v in report["seconds"].values()] == [2, 2]


def test_gpu_script_on_the_cpu(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    done = run("gpu", "--small", "--no-tests", "--steps", "2", "--output", str(output))
    assert done.returncode == 0, done.stderr
    systems = json.loads(output.read_text())["systems"]
    assert len(systems) == 6 and all(s["seconds"] > 0 and s["params_nbytes"] > 0 for s in systems.values())
    assert systems["layerzero of 8"]["optimizer_nbytes"] < systems["plain"]["optimizer_nbytes"] / 6
