"""Checkpoints: pickle-free, crash-safe, read at any layout. See ``docs/checkpoint-format.md``.

Downwards: `save`, `load` and `export` use `capture` and `source`, which use `model_state`, `optimizer_state`, `ranks`,
`folder` and `storage`; `manifest` and `reshard` are pure.
"""

from layerzero.checkpoint.folder import latest_step
from layerzero.checkpoint.load import Loaded, load, resume
from layerzero.checkpoint.rng import rng_state, set_rng_state
from layerzero.checkpoint.save import Saved, save

__all__ = ["Loaded", "Saved", "latest_step", "load", "resume", "rng_state", "save", "set_rng_state"]
