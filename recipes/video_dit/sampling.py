"""Samples clips for held-out captions from what a run has trained."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

import layerzero as lz
from recipes.video_dit.clips import clip_frames, load_clips
from recipes.video_dit.model import VideoDiffusion
from recipes.video_dit.report import SampledClip
from recipes.video_dit.settings import Settings
from recipes.video_dit.trainer import Trainer, build_module


def sample_held_out(
    trainer: Trainer, settings: Settings, engine: lz.LayerZeROConfig, checkpoints: Path
) -> list[SampledClip]:
    """Samples `clips_per_rank` captions on every data-parallel rank; all ranks get all clips.

    Args:
        checkpoints: holds the final one, where a pipeline's weights are taken from.
    """
    first_clips = {clip.shot.index: clip for clip in reversed(load_clips("held_out"))}
    clips = [first_clips[shot] for shot in sorted(first_clips)]
    count = settings.sampling.clips_per_rank
    if count == 0:
        return []
    module, mesh = trainer.module, trainer.mesh
    if mesh.pp is not None:
        module, mesh = _join_stages(settings, engine, checkpoints, trainer.device)
    rank, num_ranks = mesh.coordinate("dp"), mesh.size("dp")
    wanted = [clips[index % len(clips)] for index in range(count * num_ranks)]
    mine = wanted[rank * count : (rank + 1) * count]
    generator = torch.Generator(trainer.device).manual_seed(settings.seed + rank)
    module.eval()
    sampled = module.sample([clip.caption for clip in mine], settings.sampling, generator)
    gathered = [torch.empty_like(sampled) for _ in range(num_ranks)]
    dist.all_gather(gathered, sampled.contiguous(), group=mesh.device_mesh["dp"].get_group())
    pairs = zip(wanted, torch.cat(gathered).cpu(), strict=True)
    return [SampledClip(clip.caption, clip_frames(clip), frames) for clip, frames in pairs][: len(clips)]


def _join_stages(
    settings: Settings, engine: lz.LayerZeROConfig, checkpoints: Path, device: torch.device
) -> tuple[VideoDiffusion, lz.ParallelMesh]:
    """The whole transformer over all ranks, which a pipeline's stages would make wait for each other in every step."""
    mesh = lz.ParallelMesh(cp=settings.cp, tp=settings.tp)
    module, _ = build_module(settings, engine, mesh, device)
    lz.load(checkpoints, module, step=settings.steps)
    return module, mesh
