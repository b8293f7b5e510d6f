"""Parts of the video recipe on the ranks of the pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import layerzero as lz
from recipes.video_dit import train
from recipes.video_dit.checkpoints import Checkpoints, Progress
from recipes.video_dit.sampling import sample_held_out
from recipes.video_dit.settings import SamplingSettings, Settings, TransformerSettings
from recipes.video_dit.trainer import build_trainer

ENGINE = lz.LayerZeROConfig.from_yaml(train.HERE / "layerzero.yaml").replace(param_dtype="fp32", reduce_dtype="fp32")


def short_settings(**layout: Any) -> Settings:
    transformer = TransformerSettings(num_layers=4, num_heads=2, head_dim=16, ffn_dim=64, patch_size=(4, 3, 4))
    sampling = SamplingSettings(steps=1, clips_per_rank=1)
    values = {
        "steps": 4, "save_every": 1, "batch_size": 1, "transformer": transformer, "sampling": sampling,
        "optimizer": {"lr": 4e-2},  # with the warm-up as it is, so that blocks get gradients beside the zeroed head
    }  # fmt: skip
    return Settings.model_validate({**values, **layout})


def short_training(folder: str, parts: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Losses, norms and learning rates of a few steps, and the mean pixel of each sampled clip.

    Args:
        folder: for checkpoints, one a step.
        parts: layouts, each used until after step ``stop``; the next one goes on from the checkpoint.
    """
    seen: dict[str, list[float]] = {"norms": [], "lrs": []}
    losses: list[torch.Tensor] = []
    for part in parts:
        layout = {name: value for name, value in part.items() if name != "stop"}
        settings = short_settings(**layout)
        trainer = build_trainer(settings, ENGINE, torch.device("cpu"))
        checkpoints = Checkpoints(Path(folder), settings, settings.micro_batches * trainer.mesh.size("dp"))
        done = checkpoints.restore(trainer.module, trainer.optimizer, trainer.schedule)
        assert done.step == len(losses)
        for step in range(done.step, part["stop"]):
            seen["lrs"] += trainer.schedule.get_last_lr()
            loss, norm = trainer.step(step)
            losses.append(loss)
            seen["norms"].append(norm.item())
            progress = Progress(step + 1)
            checkpoints.save(trainer.module, trainer.optimizer, trainer.schedule, progress).wait()
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    seen["losses"] = (mean / dist.get_world_size()).tolist()
    sampled = sample_held_out(trainer, settings, ENGINE, Path(folder))
    seen["pixels"] = [clip.sampled.float().mean().item() for clip in sampled]
    return seen


def refusals(layouts: list[dict[str, Any]]) -> list[str]:
    """What the recipe says to layouts that don't fit."""
    messages = []
    for layout in layouts:
        try:
            build_trainer(short_settings(**layout), ENGINE, torch.device("cpu"))
        except lz.ConfigError as error:
            messages.append(str(error))
    return messages
