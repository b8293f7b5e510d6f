"""The training module: frozen encoders, Wan transformer, flow matching and sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import nn
from torch.nn import functional as F

from layerzero.parallel.wan import WanStage
from recipes.video_dit.clips import CLIP_FRAMES
from recipes.video_dit.settings import FlowSettings, SamplingSettings, TransformerSettings
from recipes.video_dit.text import TEXT_DIM, TextEncoder
from recipes.video_dit.vae import LATENT_CHANNELS, FrameVAE, load_vae

NUM_TIMESTEPS = 1000  # noise levels that the transformer can tell apart
NUM_POSITION_CHANNELS = 3
LATENT_SHAPE = (LATENT_CHANNELS, CLIP_FRAMES, 9, 16)  # channels, frames, rows, columns


@dataclass(frozen=True)
class FlowBatch:
    """Clips on their way from data to noise; see `VideoDiffusion.forward`."""

    latents: torch.Tensor
    timesteps: torch.Tensor
    text_states: torch.Tensor
    target: torch.Tensor  # of the latents' shape

    @classmethod
    def join(cls, batches: Sequence[FlowBatch]) -> FlowBatch:
        """One after the other."""
        return cls(*(torch.cat([getattr(b, field.name) for b in batches]) for field in fields(cls)))

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Arguments of the model."""
        return self.latents, self.timesteps, self.text_states


def flow_loss(velocity: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean flow-matching loss."""
    return F.mse_loss(velocity, target)


class VideoDiffusion(nn.Module):
    """Text-to-video diffusion on the latents of a frozen VAE.

    `vae` and `text_encoder` are frozen and stay in fp32: the engine's `ignored_modules` names them. Both always
    give the same result for the same input, so a clip is encoded when it is first seen and its latents (72 KiB)
    are kept. Random crops or a sampled posterior would need an encoding each time.
    """

    positions: torch.Tensor

    def __init__(self, transformer: TransformerSettings, flow: FlowSettings) -> None:
        super().__init__()
        self.flow = flow
        self.vae: FrameVAE = load_vae()
        self.text_encoder = TextEncoder()
        self.transformer: WanTransformer3DModel | WanStage = build_transformer(transformer)
        self.register_buffer("positions", position_channels(), persistent=False)
        self._latents: dict[int, torch.Tensor] = {}
        self._text_states: dict[str, torch.Tensor] = {}

    def train(self, mode: bool = True) -> VideoDiffusion:
        super().train(mode)
        self.vae.eval()  # frozen networks never get dropout
        self.text_encoder.eval()
        return self

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Direction from data to noise, fp32 of shape [B, *LATENT_SHAPE].

        Args:
            inputs: noisy latents [B, *LATENT_SHAPE], timesteps [B] and text states, as `FlowBatch.inputs`. Timesteps
                are integers because a noise level rounded to bf16 would be another noise level. A stage of a pipeline
                takes what the one before it returned, and returns what the next one takes.
        """
        if isinstance(self.transformer, WanStage):
            return self.transformer(*(self._with_positions(*inputs) if self.transformer.is_first else inputs))
        return self.transformer(*self._with_positions(*inputs), return_dict=False)[0].float()

    def _with_positions(
        self, latents: torch.Tensor, timesteps: torch.Tensor, text_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype = self.transformer.patch_embedding.weight.dtype
        positions = self.positions.expand(len(latents), -1, -1, -1, -1)
        return torch.cat([latents, positions], dim=1).to(dtype), timesteps, text_states.to(dtype)

    def prepare(
        self,
        frames: torch.Tensor,
        captions: Sequence[str],
        clip_ids: Sequence[int],
        generator: torch.Generator,
    ) -> FlowBatch:
        """What to train on.

        Args:
            frames: uint8 of shape [B, CLIP_FRAMES, 3, 72, 128].
            captions: one for each clip.
            clip_ids: what to remember the clips' latents by.
            generator: source of noise, noise levels and dropped captions, on the frames' device.
        """
        latents = self.encode_clips(frames, clip_ids)
        timesteps, dropped = self._draw_conditions(len(captions), generator)
        states = self.encode_captions(["" if drop else text for text, drop in zip(captions, dropped, strict=True)])
        noise = torch.randn(latents.shape, generator=generator, device=latents.device)
        sigmas = (timesteps / NUM_TIMESTEPS).view(-1, 1, 1, 1, 1)
        return FlowBatch((1 - sigmas) * latents + sigmas * noise, timesteps, states, noise - latents)

    def encode_clips(self, frames: torch.Tensor, clip_ids: Sequence[int]) -> torch.Tensor:
        """Latents of shape [B, *LATENT_SHAPE]; encodes only clips that were not seen before."""
        for clip, clip_id in zip(frames, clip_ids, strict=True):
            if clip_id not in self._latents:
                self._latents[clip_id] = self.vae.encode(clip).transpose(0, 1)
        return torch.stack([self._latents[clip_id] for clip_id in clip_ids])

    def encode_captions(self, captions: Sequence[str]) -> torch.Tensor:
        """States of shape [B, tokens, TEXT_DIM]; encodes only captions that were not seen before."""
        for caption in captions:
            if caption not in self._text_states:
                self._text_states[caption] = self.text_encoder([caption])[0]
        return torch.stack([self._text_states[caption] for caption in captions])

    @torch.no_grad()
    def sample(self, captions: Sequence[str], settings: SamplingSettings, generator: torch.Generator) -> torch.Tensor:
        """Clips for captions, uint8 of shape [B, CLIP_FRAMES, 3, 72, 128].

        Euler steps with classifier-free guidance. Collective: every rank needs the same number of steps, but
        may have captions of its own.
        """
        device = generator.device
        scheduler = FlowMatchEulerDiscreteScheduler(NUM_TIMESTEPS, shift=self.flow.noise_shift)
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / settings.steps, settings.steps).tolist(), device=device)
        states = self.encode_captions([*captions, *[""] * len(captions)])
        latents = torch.randn((len(captions), *LATENT_SHAPE), generator=generator, device=device)
        for time in scheduler.timesteps:
            timesteps = time.round().long().expand(len(states))
            guided, free = self(latents.repeat(2, 1, 1, 1, 1), timesteps, states).chunk(2)
            latents = scheduler.step(free + settings.guidance * (guided - free), time, latents, return_dict=False)[0]
        return self.vae.decode(latents.transpose(1, 2))

    def _draw_conditions(self, batch_size: int, generator: torch.Generator) -> tuple[torch.Tensor, list[bool]]:
        """Timesteps (logit-normal, then shifted; int64 in 1..NUM_TIMESTEPS) and which captions to drop."""
        device = generator.device
        sigmas = torch.randn(batch_size, generator=generator, device=device).sigmoid()
        sigmas = self.flow.noise_shift * sigmas / (1 + (self.flow.noise_shift - 1) * sigmas)
        timesteps = (sigmas * NUM_TIMESTEPS).round().clamp(1, NUM_TIMESTEPS).long()
        dropped = torch.rand(batch_size, generator=generator, device=device) < self.flow.caption_dropout
        return timesteps, dropped.tolist()


def position_channels() -> torch.Tensor:
    """Frame, row and column from -1 to 1, [NUM_POSITION_CHANNELS, *LATENT_SHAPE[1:]].

    Wan's rotary embedding only knows distances. That sky is above grass is then learnt slowly, which a long
    training can afford and a short one cannot.
    """
    axes = [torch.linspace(-1, 1, size) for size in LATENT_SHAPE[1:]]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"))


def build_transformer(settings: TransformerSettings) -> WanTransformer3DModel:
    """A Wan transformer with the initial weights of the Wan release; diffusers leaves torch's."""
    transformer = WanTransformer3DModel(
        patch_size=settings.patch_size,
        num_attention_heads=settings.num_heads,
        attention_head_dim=settings.head_dim,
        in_channels=LATENT_CHANNELS + NUM_POSITION_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=TEXT_DIM,
        freq_dim=256,
        ffn_dim=settings.ffn_dim,
        num_layers=settings.num_layers,
        rope_max_seq_len=32,
    )
    for module in transformer.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    nn.init.xavier_uniform_(transformer.patch_embedding.weight.flatten(1))
    for embedder in (
        transformer.condition_embedder.text_embedder,
        transformer.condition_embedder.time_embedder,
    ):
        for linear in (embedder.linear_1, embedder.linear_2):
            nn.init.normal_(linear.weight, std=0.02)
    nn.init.zeros_(transformer.proj_out.weight)  # the first prediction is the mean
    return transformer
