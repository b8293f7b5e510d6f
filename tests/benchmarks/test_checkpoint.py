from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_checkpoint_benchmark_on_a_tiny_model(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        + ["benchmarks/checkpoint.py", "--dim", "32", "--num-layers", "1", "--rounds", "1", "--no-record"]
        + ["--folder", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if "layerzero" in line or "FSDP2" in line]
    assert len(rows) == 2
    assert not list(tmp_path.iterdir())
