"""Checkpoints and plain files for tests of the tools, made by real processes, and what ranks read of them."""

from __future__ import annotations

import builtins
import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import layerzero as lz
from layerzero.checkpoint.storage import TensorFile
from tests.dist.models import Block, OddModel, token_loss, tokens_for


def documented_example(folder: str) -> None:
    """What docs/checkpoint-format.md shows."""
    model: Any = nn.Linear(3, 4)
    with torch.no_grad():
        model.weight.copy_(torch.arange(12.0).view(4, 3))
        model.bias.copy_(torch.arange(12.0, 16.0))
    lz.shard(model, sharding="zero3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    model(torch.ones(1, 3)).sum().backward()  # every gradient is 1
    optimizer.step()
    lz.save(folder, model, optimizer, step=100, extra={"epoch": 2, "betas": (0.5, float("inf"))})
