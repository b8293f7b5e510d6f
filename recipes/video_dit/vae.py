"""Frame-wise variational autoencoder: 8x smaller in space, 8 channels, fixed latent normalisation."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

WEIGHTS = Path(__file__).parent / "vae.safetensors"
CONFIG = Path(__file__).parent / "vae.json"

LATENT_CHANNELS = 8
SPATIAL_FACTOR = 8
PIXEL_BLOCK = 4
NUM_LEVELS = 2


def build_autoencoder() -> AutoencoderKL:
    return AutoencoderKL(
        in_channels=3 * PIXEL_BLOCK**2,
        out_channels=3 * PIXEL_BLOCK**2,
        down_block_types=("DownEncoderBlock2D",) * NUM_LEVELS,
        up_block_types=("UpDecoderBlock2D",) * NUM_LEVELS,
        block_out_channels=(64, 96),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        mid_block_add_attention=False,
    )


class FrameVAE(nn.Module):
    """Turns uint8 frames into normalised latents and back, one frame at a time.

    Frames are [..., 3, H, W] uint8, latents [..., 8, H/8, W/8] with mean 0 and standard deviation 1 per channel
    over the training frames. The network sees 4x4 blocks of pixels as channels: convolutions at full resolution
    would take most of the time, and in equal time this reconstructs better.
    """

    latents_mean: torch.Tensor
    latents_std: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.autoencoder = build_autoencoder()
        self.register_buffer("latents_mean", torch.zeros(LATENT_CHANNELS, 1, 1))
        self.register_buffer("latents_std", torch.ones(LATENT_CHANNELS, 1, 1))

    def posterior(self, pixels: torch.Tensor):
        """Latent distribution of [B, 3, H, W] pixels in [-1, 1], not normalised."""
        return self.autoencoder.encode(F.pixel_unshuffle(pixels, PIXEL_BLOCK)).latent_dist

    def reconstruct(self, latents: torch.Tensor) -> torch.Tensor:
        """Pixels of latents as `posterior` gives them, [B, 3, H, W], about [-1, 1]."""
        return F.pixel_shuffle(self.autoencoder.decode(latents).sample, PIXEL_BLOCK)

    @torch.no_grad()
    def encode(self, frames: torch.Tensor) -> torch.Tensor:
        pixels = to_pixels(frames.flatten(0, -4))
        latents = (self.posterior(pixels).mode() - self.latents_mean) / self.latents_std
        return latents.unflatten(0, frames.shape[:-3])

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        flat = latents.flatten(0, -4) * self.latents_std + self.latents_mean
        return to_frames(self.reconstruct(flat)).unflatten(0, latents.shape[:-3])


def to_pixels(frames: torch.Tensor) -> torch.Tensor:
    return frames.float() / 127.5 - 1


def to_frames(pixels: torch.Tensor) -> torch.Tensor:
    return ((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def psnr(frames: torch.Tensor, expected: torch.Tensor) -> float:
    """Peak signal-to-noise ratio of uint8 frames in dB, from the mean squared error over all of them."""
    error = (frames.float() - expected.float()).square().mean()
    return (10 * torch.log10(255**2 / error)).item()


def save_vae(vae: FrameVAE, facts: dict[str, float]) -> None:
    """Weights as fp16 (half the size, no visible loss); normalisation and measured facts as JSON."""
    state = vae.autoencoder.state_dict()
    save_file({name: tensor.half().contiguous() for name, tensor in state.items()}, WEIGHTS)
    config = {
        "latents_mean": vae.latents_mean.flatten().tolist(),
        "latents_std": vae.latents_std.flatten().tolist(),
        **facts,
    }
    CONFIG.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_vae() -> FrameVAE:
    """The trained VAE, frozen, in fp32 and evaluation mode."""
    vae = FrameVAE()
    vae.autoencoder.load_state_dict({name: tensor.float() for name, tensor in load_file(WEIGHTS).items()})
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    vae.latents_mean.copy_(torch.tensor(config["latents_mean"]).view(-1, 1, 1))
    vae.latents_std.copy_(torch.tensor(config["latents_std"]).view(-1, 1, 1))
    return vae.requires_grad_(False).eval()
