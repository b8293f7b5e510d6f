"""Parts of the video recipe on the ranks of the pool."""

from __future__ import annotations

import torch

import layerzero as lz
from recipes.video_dit import train
from recipes.video_dit.settings import SamplingSettings, Settings, TransformerSettings


def short_training(cp: int) -> dict[str, list[float]]:
    """Losses and norms of a few steps, and the mean pixel of each sampled clip."""
    transformer = TransformerSettings(num_layers=2, num_heads=2, head_dim=16, ffn_dim=64, patch_size=(4, 3, 4))
    settings = Settings(
        steps=3, cp=cp, batch_size=1, transformer=transformer, sampling=SamplingSettings(steps=1, clips_per_rank=1)
    )
    engine = lz.LayerZeROConfig.from_yaml(train.HERE / "layerzero.yaml").replace(
        param_dtype="fp32", reduce_dtype="fp32"
    )
    trainer = train.build_trainer(settings, engine, torch.device("cpu"))
    steps = [trainer.step(step) for step in range(settings.steps)]
    losses = torch.stack([loss for loss, _ in steps])
    torch.distributed.all_reduce(losses)
    sampled = train.sample_held_out(trainer, settings)
    return {
        "losses": (losses / torch.distributed.get_world_size()).tolist(),
        "norms": [norm.item() for _, norm in steps],
        "pixels": [clip.sampled.float().mean().item() for clip in sampled],
    }
