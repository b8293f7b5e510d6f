"""Settings of one run, read from YAML; the engine has a file of its own."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TransformerSettings(_Section):
    """Shape of the Wan transformer. `patch_size` divides the latents' 16 frames x 9 rows x 16 columns."""

    num_layers: PositiveInt = 4
    num_heads: PositiveInt = 4
    head_dim: PositiveInt = 64
    ffn_dim: PositiveInt = 1024
    patch_size: tuple[PositiveInt, PositiveInt, PositiveInt] = (8, 1, 2)


class FlowSettings(_Section):
    """Flow matching. `noise_shift` > 1 spends more of training and of sampling on the noisy half."""

    noise_shift: PositiveFloat = 5.0
    caption_dropout: float = 0.1


class OptimizerSettings(_Section):
    lr: PositiveFloat = 2e-3
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.01
    warmup_steps: PositiveInt = 20
    final_lr_ratio: float = 0.05
    max_grad_norm: PositiveFloat = 1.0


class SamplingSettings(_Section):
    steps: PositiveInt = 20
    guidance: float = 3.0
    clips_per_rank: NonNegativeInt = 3


class Settings(_Section):
    """A step sees `batch_size` x `micro_batches` x (ranks / (`cp` x `tp` x `pp`)) clips.

    `cp` ranks share the tokens of each clip, `tp` ranks share the weights of each block, and `pp` stages of a pipeline
    hold consecutive blocks and work on different micro-batches at a time.
    """

    seed: NonNegativeInt = 0
    steps: PositiveInt = 240
    cp: PositiveInt = 1
    tp: PositiveInt = 1
    pp: PositiveInt = 1
    micro_batches: PositiveInt = 2
    batch_size: PositiveInt = 2
    log_every: PositiveInt = 10
    save_every: PositiveInt = 40
    transformer: TransformerSettings = TransformerSettings()
    flow: FlowSettings = FlowSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    sampling: SamplingSettings = SamplingSettings()

    @classmethod
    def from_yaml(cls, path: Path, **overrides: object) -> Settings:
        """Reads the file; overrides that are not None replace top-level keys."""
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        values |= {key: value for key, value in overrides.items() if value is not None}
        return cls.model_validate(values)
