"""Trains the video diffusion transformer, sharded by layerzero.

torchrun --nproc-per-node 4 recipes/video_dit/train.py --config recipes/video_dit/demo.yaml --output runs/demo
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

import layerzero as lz
from layerzero.parallel.context import ContextParallel, parallelize

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as a script, Python only knows this folder

from recipes.video_dit import report
from recipes.video_dit.batches import DataOrder
from recipes.video_dit.checkpoints import Checkpoints, Progress
from recipes.video_dit.clips import clip_frames, load_clips
from recipes.video_dit.model import VideoDiffusion
from recipes.video_dit.runlog import RunLog
from recipes.video_dit.settings import OptimizerSettings, Settings

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Trainer:
    """A sharded module with its optimizer and schedule."""

    module: VideoDiffusion  # and an lz.ShardedModule, since lz.shard
    mesh: lz.ParallelMesh
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    order: DataOrder
    max_grad_norm: float
    device: torch.device
    num_params: int

    def step(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimizer step; returns this rank's mean loss and the global gradient norm before clipping."""
        losses: list[torch.Tensor] = []
        *first, last = range(self.order.micro_batches)
        with self.module.no_sync():
            for index in first:
                losses.append(self._forward_backward(step, index))
        losses.append(self._forward_backward(step, last))
        grad_norm = self.module.clip_grad_norm_(self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return torch.stack(losses).mean(), grad_norm

    def _forward_backward(self, step: int, index: int) -> torch.Tensor:
        clips = self.order.micro_batch(step, index)
        frames = torch.stack([clip_frames(clip) for clip in clips]).to(self.device)
        generator = torch.Generator(self.device).manual_seed(self.order.noise_seed(step, index))
        loss = self.module(frames, [clip.caption for clip in clips], [clip.index for clip in clips], generator)
        (loss / self.order.micro_batches).backward()
        return loss.detach()


def start_distributed() -> torch.device:
    """Joins the group that torchrun describes: one process for each accelerator, or CPU processes."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(dist.get_default_backend_for_device(device), device_id=device)
    return device


def build_trainer(settings: Settings, engine: lz.LayerZeROConfig, device: torch.device) -> Trainer:
    torch.manual_seed(settings.seed)
    mesh = lz.ParallelMesh(cp=settings.cp)
    module = VideoDiffusion(settings.transformer, settings.flow).to(device)
    num_params = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    parallelize(module.transformer, ContextParallel.of(mesh))
    lz.shard(module, engine, mesh=mesh)
    lz.forward_method(module, "velocity")  # sampling calls it outside of forward
    options = settings.optimizer
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trainable, lr=options.lr, betas=options.betas, weight_decay=options.weight_decay, fused=True
    )
    order = DataOrder(
        load_clips("train"),
        settings.seed,
        mesh.coordinate("dp"),  # ranks that share clips draw the same clips and the same noise
        mesh.size("dp"),
        settings.batch_size,
        settings.micro_batches,
    )
    schedule = warmup_cosine(optimizer, options, settings.steps)
    return Trainer(module, mesh, optimizer, schedule, order, options.max_grad_norm, device, num_params)


def warmup_cosine(
    optimizer: torch.optim.Optimizer, options: OptimizerSettings, steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up, then a cosine down to `final_lr_ratio`."""

    def ratio(step: int) -> float:
        if step < options.warmup_steps:
            return (step + 1) / options.warmup_steps
        progress = (step - options.warmup_steps) / max(1, steps - options.warmup_steps)
        return options.final_lr_ratio + (1 - options.final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, ratio)


def sample_held_out(trainer: Trainer, settings: Settings) -> list[report.SampledClip]:
    """Samples `clips_per_rank` captions on every data-parallel rank; all ranks get all clips."""
    first_clips = {clip.shot.index: clip for clip in reversed(load_clips("held_out"))}
    clips = [first_clips[shot] for shot in sorted(first_clips)]
    count = settings.sampling.clips_per_rank
    if count == 0:
        return []
    rank, num_ranks = trainer.mesh.coordinate("dp"), trainer.mesh.size("dp")
    wanted = [clips[index % len(clips)] for index in range(count * num_ranks)]
    mine = wanted[rank * count : (rank + 1) * count]
    generator = torch.Generator(trainer.device).manual_seed(settings.seed + rank)
    trainer.module.eval()
    sampled = trainer.module.sample([clip.caption for clip in mine], settings.sampling, generator)
    gathered = [torch.empty_like(sampled) for _ in range(num_ranks)]
    dist.all_gather(gathered, sampled.contiguous(), group=trainer.mesh.device_mesh["dp"].get_group())
    pairs = zip(wanted, torch.cat(gathered).cpu(), strict=True)
    return [report.SampledClip(clip.caption, clip_frames(clip), frames) for clip, frames in pairs][: len(clips)]


def write_results(output: Path, losses: list[float], engine_report: str, sampled: list[report.SampledClip]) -> None:
    report.write_loss_curve(output / "loss.png", losses)
    if sampled:
        report.write_contact_sheet(output / "samples.png", sampled)
    (output / "report.md").write_text(f"# Memory and traffic\n\n{engine_report}\n", encoding="utf-8")


def train(trainer: Trainer, settings: Settings, log: RunLog, checkpoints: Checkpoints, first_step: int) -> None:
    """All steps from `first_step` on, with a checkpoint every so many."""
    saved: lz.Saved | None = None
    for step in range(first_step, settings.steps):
        lr = trainer.schedule.get_last_lr()[0]
        log.step(*trainer.step(step), lr)
        if checkpoints.due(step + 1):
            log.flush()
            progress = Progress(step + 1, log.losses)
            saved = checkpoints.save(trainer.module, trainer.optimizer, trainer.schedule, progress)
    if saved is not None:
        saved.wait()


def run(settings: Settings, engine: lz.LayerZeROConfig, output: Path, fresh: bool = False) -> None:
    start = time.perf_counter()
    device = start_distributed()
    if dist.get_rank() == 0:
        output.mkdir(parents=True, exist_ok=True)
    trainer = build_trainer(settings, engine, device)
    clips_per_step = settings.batch_size * settings.micro_batches * trainer.mesh.size("dp")
    checkpoints = Checkpoints(output / "checkpoints", settings)
    done = Progress() if fresh else checkpoints.restore(trainer.module, trainer.optimizer, trainer.schedule)
    ready = time.perf_counter()
    with RunLog(
        output, steps=settings.steps, every=settings.log_every, clips_per_step=clips_per_step, losses=done.losses
    ) as log:
        train(trainer, settings, log, checkpoints, done.step)
    trained = time.perf_counter()
    engine_report = report.engine_report(trainer.module, settings.micro_batches)
    sampled = sample_held_out(trainer, settings)
    if dist.get_rank() == 0:
        write_results(output, log.losses, engine_report, sampled)
        tenths = report.Tenths.of(log.losses)
        summary = {
            "num_trained_params": trainer.num_params,
            "num_ranks": dist.get_world_size(),
            "steps": settings.steps,
            "resumed_at_step": done.step,
            "clips_per_step": clips_per_step,
            "loss_first_tenth": tenths.first,
            "loss_last_tenth": tenths.last,
            "seconds_setup": ready - start,
            "seconds_training": trained - ready,
            "seconds_sampling_and_report": time.perf_counter() - trained,
        }
        (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        print(engine_report, json.dumps(summary, indent=2), f"Written to {output}", sep="\n\n")


def main(
    config: Annotated[Path, typer.Option(help="Settings of the run (YAML).")] = HERE / "demo.yaml",
    engine: Annotated[Path, typer.Option(help="LayerZeRO configuration (YAML or JSON).")] = HERE / "layerzero.yaml",
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/demo"),
    steps: Annotated[int | None, typer.Option(help="Optimizer steps, instead of the settings'.")] = None,
    cp: Annotated[int | None, typer.Option(help="Context-parallel ranks, which share clips.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Clips per data-parallel rank and micro-batch.")] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Micro-batches per optimizer step.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, data order and noise.")] = None,
    fresh: Annotated[bool, typer.Option(help="Start anew where OUTPUT holds an unfinished run.")] = False,
) -> None:
    """Trains, or goes on with the unfinished run in OUTPUT.

    Then writes the loss curve, sampled clips and the engine's memory and traffic to OUTPUT.
    """
    overrides = {
        "steps": steps, "cp": cp, "batch_size": batch_size, "micro_batches": micro_batches, "seed": seed,
    }  # fmt: skip
    try:
        run(Settings.from_yaml(config, **overrides), lz.LayerZeROConfig.from_yaml(engine), output, fresh)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
