"""Saves a run every so many steps, and finds where an interrupted one goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import layerzero as lz
from recipes.video_dit.settings import Settings

KEEP = 2
LAYOUT = {"cp", "tp", "pp", "micro_batches"}  # settings that only say how ranks share the work


@dataclass(frozen=True)
class Progress:
    """What a run has behind it."""

    step: int = 0
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Checkpoints:
    """Of one run, in its output folder. The order of data and noise follows from the step, so it needs no state."""

    folder: Path
    settings: Settings
    clips_per_step: int

    def restore(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler
    ) -> Progress:
        """Load the latest checkpoint of an unfinished run, however it was split; nothing where there is none.

        Raises:
            SystemExit: it was started with other settings.
        """
        step = lz.latest_step(self.folder)
        if step is None or step >= self.settings.steps:
            return Progress()
        loaded = lz.load(self.folder, module, optimizer)
        started_with, now = loaded.extra["settings"], self._comparable()
        changed = [key for key in now if started_with.get(key) != now[key]]
        if changed:
            raise SystemExit(
                f"{self.folder.parent} holds a run at step {step} with other settings: "
                f"{', '.join(changed)}. Use these again, choose another --output, or start anew with --fresh."
            )
        before = loaded.extra.get("clips_per_step", self.clips_per_step)
        if before != self.clips_per_step and dist.get_rank() == 0:
            print(f"Note: this run had {before} clips per step so far, now {self.clips_per_step}.", flush=True)
        schedule.load_state_dict(loaded.extra["schedule"])
        return Progress(loaded.step, loaded.extra["losses"])

    def due(self, step: int) -> bool:
        """Whether to save after so many steps."""
        return step % self.settings.save_every == 0 or step == self.settings.steps

    def save(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        progress: Progress,
    ) -> lz.Saved:
        """Snapshot, and write in the background."""
        extra = {
            "settings": self._comparable(), "clips_per_step": self.clips_per_step, "losses": progress.losses,
            "schedule": schedule.state_dict(),
        }  # fmt: skip
        return lz.save(
            self.folder, module, optimizer, step=progress.step, extra=extra, keep=KEEP, background=True, overwrite=True
        )

    def _comparable(self) -> dict[str, Any]:
        return self.settings.model_dump(mode="json", exclude=LAYOUT)
