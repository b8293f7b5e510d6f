"""A benchmark's folder and what was started with a socket in it go away however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ENDING = """
import subprocess, sys, time
from benchmarks.watchdog import exit_on_signals, workspace
exit_on_signals()
with workspace() as folder:
    idle = [sys.executable, "-c", "import time; time.sleep(600)", f"--socket={folder}/a.socket"]
    child = subprocess.Popen(idle, start_new_session=True)
    (folder / "a.torchrun").mkdir()
    print(folder, child.pid, flush=True)
    if sys.argv[1] != "end":
        time.sleep(600)
"""


@pytest.mark.parametrize("how", ["end", "SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_nothing_is_left(how: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ENDING, how], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout is not None
    with process.stdout:
        folder, child = process.stdout.readline().split()
    if how != "end":
        process.send_signal(getattr(signal, how))
    code = process.wait(30)
    assert code == {"end": 0, "SIGINT": -2, "SIGTERM": 143, "SIGHUP": 129, "SIGKILL": -9}[how]
    deadline = time.monotonic() + 20
    while (Path(folder).exists() or Path(f"/proc/{child}/exe").exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(folder).exists() and not Path(f"/proc/{child}/exe").exists()
