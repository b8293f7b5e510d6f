"""Namespaces and what runs in them go away however the testbed ends."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.links import OneNode, TwoNodes, why_not_two_nodes

ROOT = Path(__file__).resolve().parents[2]

ENDING = """
import os, signal, subprocess, sys
from benchmarks.links import TwoNodes
nodes = TwoNodes("1gbit")
child = subprocess.Popen([*nodes.command(0), "sleep", "600"])
print(child.pid, flush=True)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
raise KeyboardInterrupt
"""


def namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"layerzero-{pid}-")]


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize("how", ["kill", "interrupt"])
def test_nothing_is_left(how: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ENDING, how], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])},
    )  # fmt: skip
    assert process.stdout is not None
    with process.stdout:
        child = int(process.stdout.readline())
    assert process.wait(30) != 0
    for _ in range(300):
        if not namespaces(process.pid) and not Path(f"/proc/{child}/exe").exists():
            break
        time.sleep(0.05)
    assert namespaces(process.pid) == []
    assert not Path(f"/proc/{child}/exe").exists()


@pytest.mark.usefixtures("two_nodes")
def test_the_link_counts_what_crosses_it() -> None:
    nodes = TwoNodes("1gbit")
    try:
        assert len(namespaces(os.getpid())) == 2
        before = nodes.sent_nbytes()
        assert before is not None
        ping = [*nodes.command(0), sys.executable, "-c",
                "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
                f"[s.sendto(bytes(1000), ('{nodes.address(1)}', 9)) for _ in range(50)]"]  # fmt: skip
        subprocess.run(ping, check=True)
        assert nodes.sent_nbytes() - before >= 50_000  # type: ignore[operator]
    finally:
        nodes.close()
    assert namespaces(os.getpid()) == []


def test_without_root_there_is_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in str(why_not_two_nodes())
    assert OneNode().sent_nbytes() is None and OneNode().command(0) == []


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
@pytest.mark.parametrize("capability", ["net_admin", "sys_admin"])
def test_as_root_without_capabilities_there_is_one_node(capability: str) -> None:
    """As in a container."""
    code = "from benchmarks.links import why_not_two_nodes; print(why_not_two_nodes())"
    done = subprocess.run(
        ["setpriv", f"--bounding-set=-{capability}", sys.executable, "-c", code], cwd=ROOT, check=True,
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "more rights" in done.stdout and "ermitted" in done.stdout
    assert not [pid for pid in re.findall(r"layerzero-(\d+)-", str(os.listdir("/run/netns"))) if not alive(int(pid))]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
