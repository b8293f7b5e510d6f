"""Trains the video diffusion transformer, sharded by layerzero.

torchrun --nproc-per-node 4 recipes/video_dit/train.py --config recipes/video_dit/demo.yaml --output runs/demo
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from pydantic import ValidationError

import layerzero as lz

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as a script, Python only knows this folder

from recipes.video_dit import report
from recipes.video_dit.checkpoints import Checkpoints, Progress
from recipes.video_dit.runlog import RunLog
from recipes.video_dit.sampling import sample_held_out
from recipes.video_dit.settings import Settings
from recipes.video_dit.trainer import Trainer, build_trainer

HERE = Path(__file__).parent


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
    checkpoints = Checkpoints(output / "checkpoints", settings, clips_per_step)
    done = Progress() if fresh else checkpoints.restore(trainer.module, trainer.optimizer, trainer.schedule)
    if done.step and dist.get_rank() == 0:
        folder = checkpoints.folder / f"step-{done.step:08d}"
        print(f"Going on from step {done.step} ({folder}); --fresh starts anew.", flush=True)
    ready = time.perf_counter()
    with RunLog(
        output, steps=settings.steps, every=settings.log_every, clips_per_step=clips_per_step, losses=done.losses
    ) as log:
        train(trainer, settings, log, checkpoints, done.step)
    trained = time.perf_counter()
    engine_report = report.engine_report(trainer.module, settings.micro_batches)
    sampled = sample_held_out(trainer, settings, engine, checkpoints.folder)
    if dist.get_rank() == 0:
        write_results(output, log.losses, engine_report, sampled)
        tenths = report.Tenths.of(log.losses)
        summary = {
            "num_trained_params": trainer.num_params,
            "num_ranks": dist.get_world_size(),
            "mesh": str(trainer.mesh),
            "steps": settings.steps,
            "resumed_at_step": done.step,
            "clips_per_step": clips_per_step,
            "loss_first_tenth": tenths.first,
            "loss_last_tenth": tenths.last,
            "seconds_setup": ready - start,
            "seconds_training": trained - ready,
            "steps_timed": settings.steps - done.step,
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
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks, which share the weights of blocks.")] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages, which hold consecutive blocks.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Clips per data-parallel rank and micro-batch.")] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Micro-batches per optimizer step.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, data order and noise.")] = None,
    fresh: Annotated[bool, typer.Option(help="Start anew where OUTPUT holds an unfinished run.")] = False,
) -> None:
    """Trains, or goes on with the unfinished run in OUTPUT.

    Then writes the loss curve, sampled clips and the engine's memory and traffic to OUTPUT.
    """
    overrides = {
        "steps": steps, "cp": cp, "tp": tp, "pp": pp, "batch_size": batch_size, "micro_batches": micro_batches,
        "seed": seed,
    }  # fmt: skip
    try:
        run(Settings.from_yaml(config, **overrides), lz.LayerZeROConfig.from_yaml(engine), output, fresh)
    except (lz.ConfigError, ValidationError) as error:
        raise SystemExit(f"error: {error}") from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
