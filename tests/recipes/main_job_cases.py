"""The shortened main job on ranks of the pool, which have imported all of it before they start."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from recipes.video_dit import train

JOB = Path(__file__).with_name("video_dit_job.py")


def main_job(*, config: str, engine: str, output: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("build_trainer", "sample_held_out"):
            patch.setattr(train, name, getattr(train, name))  # the job replaces them
        patch.setattr(train, "start_distributed", lambda: torch.device("cpu"))
        patch.setattr(dist, "destroy_process_group", lambda: None)  # both are the pool's
        patch.setattr(sys, "argv", ["", config, engine, output])
        runpy.run_path(str(JOB), run_name="__main__")
