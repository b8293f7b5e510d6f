"""Killed ranks and full disks: whatever happens to a save, the checkpoints that are visible are whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist import checkpoint_cases as cases
from tests.dist.pool import ROOT, Pool

pytestmark = pytest.mark.dist


def test_killed_at_any_moment(tmp_path: Path) -> None:
    kills = 60
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.dist.crash_driver", str(tmp_path), "7", str(kills)],
        env=env, text=True, capture_output=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, *attempts, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert min(first["totals"]) >= 6 and first["latest"] == 1 and len(attempts) == kills
    for attempt in attempts:
        assert attempt["latest"] == max(attempt["steps"]), attempt
    survived = [a["latest"] == a["step"] for a in attempts]
    assert any(survived) and not all(survived)  # kills hit before and after the moment of truth
    assert last["latest"] == last["step"] and len(last["steps"]) == 3
    assert last["left"] == ["latest", *(f"step-{step:08d}" for step in last["steps"])]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB, where this user may mount one."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("foreseen", [True, False], ids=["foreseen", "unforeseen"])
def test_full_disk(pool: Pool, small_disk: Path, foreseen: bool) -> None:
    for text, again in pool.run(cases.full_disk, 2, folder=str(small_disk), foreseen=foreseen):
        assert ("MiB are free" if foreseen else "No space left on device") in text
        assert "keep=" in text or not foreseen
        assert again == 1
