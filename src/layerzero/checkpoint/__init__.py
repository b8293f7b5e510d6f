"""Checkpoints: pickle-free, crash-safe, read at any layout. See ``docs/checkpoint-format.md``.

Downwards: `save` and `load` use `capture`, `shares` and `source`, which use `model_state`, `optimizer_state`, `ranks`,
`plain`, `folder` and `storage`; `manifest` and `reshard` are pure. `inspect`, `verify`, `diff` and `export` need one
process and nothing but `source`.
"""

from layerzero.checkpoint.compare import Comparison, Difference, diff
from layerzero.checkpoint.export import Exported, export
from layerzero.checkpoint.folder import latest_step
from layerzero.checkpoint.load import Loaded, load, resume
from layerzero.checkpoint.rng import rng_state, set_rng_state
from layerzero.checkpoint.save import Saved, save
from layerzero.checkpoint.tools import Inspection, OptimizerInfo, TensorInfo, Verification, inspect, verify

__all__ = [
    "Comparison",
    "Difference",
    "Exported",
    "Inspection",
    "Loaded",
    "OptimizerInfo",
    "Saved",
    "TensorInfo",
    "Verification",
    "diff",
    "export",
    "inspect",
    "latest_step",
    "load",
    "resume",
    "rng_state",
    "save",
    "set_rng_state",
    "verify",
]
