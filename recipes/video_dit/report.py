"""What a finished run leaves to look at: loss curve, contact sheet, engine report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")

import torch
from matplotlib import pyplot as plt
from torch import nn

import layerzero as lz
from recipes.video_dit.clips import ATTRIBUTION, CLIP_FRAMES

SHEET_FRAMES = 4  # of each clip's 16


@dataclass(frozen=True)
class Tenths:
    """Mean loss over the first and the last tenth of the steps."""

    first: float
    last: float

    @classmethod
    def of(cls, losses: Sequence[float]) -> Tenths:
        count = max(1, len(losses) // 10)
        return cls(fmean(losses[:count]), fmean(losses[-count:]))


@dataclass(frozen=True)
class SampledClip:
    """What the film shows and what the model made of the caption, both uint8 [CLIP_FRAMES, 3, H, W]."""

    caption: str
    real: torch.Tensor
    sampled: torch.Tensor


def write_loss_curve(path: Path, losses: Sequence[float]) -> None:
    tenths = Tenths.of(losses)
    steps = range(1, len(losses) + 1)
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, losses, color="0.75", linewidth=1, label="each step")
    axes.plot(steps, _smooth(losses), color="C0", linewidth=2, label="smoothed")
    axes.set_title(f"Flow-matching loss: first tenth {tenths.first:.3f}, last tenth {tenths.last:.3f}")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write_contact_sheet(path: Path, clips: Sequence[SampledClip]) -> None:
    """One row for each clip: caption above, frames of the film on the left, sampled ones on the right."""
    figure, grid = plt.subplots(len(clips), 2, figsize=(13, 1.25 * len(clips) + 0.7), squeeze=False)
    for row, clip in zip(grid, clips, strict=True):
        for axes, frames in zip(row, (clip.real, clip.sampled), strict=True):
            axes.imshow(_strip(frames).numpy())
            axes.set_axis_off()
        row[0].set_title(clip.caption, fontsize=9, loc="left", pad=3)
    grid[0][0].set_title(f"FILM, held-out shots\n{clips[0].caption}", fontsize=9, loc="left", pad=3)
    grid[0][1].set_title("SAMPLED for the same captions\n", fontsize=9, loc="left", pad=3)
    figure.text(0.01, 0.005, f"Film: {ATTRIBUTION}", fontsize=7)
    figure.subplots_adjust(left=0.01, right=0.99, top=1 - 0.55 / figure.get_figheight(), bottom=0.02, wspace=0.02)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def engine_report(module: nn.Module, micro_batches: int) -> str:
    """The engine's own figures for the run so far, beside other strategies' for the same model."""
    tables = {
        "Memory of one rank": lz.memory_report(module),
        "Traffic of one rank": lz.traffic_report(module),
        "The same model under other strategies": lz.compare_strategies(module, micro_batches=micro_batches),
    }
    return "\n\n".join(f"## {title}\n\n```\n{table}\n```" for title, table in tables.items())


def _smooth(losses: Sequence[float]) -> list[float]:
    """Exponential moving average, corrected for its start."""
    decay = 1 - 1 / max(2.0, len(losses) / 50)
    average, weight, smoothed = 0.0, 0.0, []
    for loss in losses:
        average = decay * average + (1 - decay) * loss
        weight = decay * weight + (1 - decay)
        smoothed.append(average / weight)
    return smoothed


def _strip(frames: torch.Tensor) -> torch.Tensor:
    """Some frames side by side, [H, W, 3]."""
    chosen = frames[torch.linspace(0, CLIP_FRAMES - 1, SHEET_FRAMES).long()]
    return torch.cat(list(chosen.permute(0, 2, 3, 1)), dim=1)
