"""Trains the frame VAE on the training shots and writes `vae.safetensors` and `vae.json`.

python recipes/video_dit/train_vae.py

About eight minutes on two CPU cores. The result is committed: training the transformer does not need this.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as a script, Python only knows this folder

from recipes.video_dit.clips import load_frames, shot_frame_indices
from recipes.video_dit.vae import FrameVAE, psnr, save_vae, to_frames, to_pixels

KL_WEIGHT = 1e-4  # small: a nearly deterministic code that still has no gaps for the transformer to fall into


def training_loss(vae: FrameVAE, pixels: torch.Tensor) -> torch.Tensor:
    posterior = vae.posterior(pixels)
    reconstruction = vae.reconstruct(posterior.sample())
    # The absolute error keeps edges; the squared error is what PSNR measures.
    difference = reconstruction - pixels
    kl = posterior.kl().mean() / posterior.mean[0].numel()
    return difference.square().mean() + 0.1 * difference.abs().mean() + KL_WEIGHT * kl


def fit(vae: FrameVAE, frames: torch.Tensor, *, steps: int, batch_size: int, lr: float) -> None:
    optimizer = torch.optim.AdamW(vae.parameters(), lr=lr, weight_decay=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    for step in track(range(steps), description="VAE"):
        pixels = to_pixels(frames[torch.randint(len(frames), (batch_size,))])
        if step % 2:
            pixels = pixels.flip(-1)
        loss = training_loss(vae, pixels.contiguous(memory_format=torch.channels_last))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 500 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def measure_latents(vae: FrameVAE, frames: torch.Tensor) -> None:
    """Sets the normalisation from every fourth frame."""
    latents = torch.cat([vae.posterior(to_pixels(batch)).mode() for batch in frames[::4].split(64)])
    vae.latents_mean.copy_(latents.mean(dim=(0, 2, 3)).view(-1, 1, 1))
    vae.latents_std.copy_(latents.std(dim=(0, 2, 3)).view(-1, 1, 1))


@torch.no_grad()
def reconstruction_psnr(vae: FrameVAE, frames: torch.Tensor) -> float:
    batches = [to_frames(vae.reconstruct(vae.posterior(to_pixels(batch)).mode())) for batch in frames.split(64)]
    return psnr(torch.cat(batches), frames)


def main(
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 8000,
    batch_size: Annotated[int, typer.Option(help="Frames per step.")] = 4,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-3,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    torch.manual_seed(seed)
    frames = load_frames()
    train, held_out = frames[shot_frame_indices("train")], frames[shot_frame_indices("held_out")]
    vae = FrameVAE().to(memory_format=torch.channels_last)
    start = time.perf_counter()
    fit(vae, train, steps=steps, batch_size=batch_size, lr=lr)
    seconds = time.perf_counter() - start
    vae.eval()
    measure_latents(vae, train)
    facts = {
        "held_out_psnr_db": round(reconstruction_psnr(vae, held_out), 2),
        "training_steps": steps,
    }
    save_vae(vae, facts)
    num_params = sum(parameter.numel() for parameter in vae.parameters())
    print(f"{num_params:,} parameters, {seconds:.0f} s, {facts}")


if __name__ == "__main__":
    typer.run(main)
