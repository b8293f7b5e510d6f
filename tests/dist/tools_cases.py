"""Checkpoints and plain files for tests of the tools, made by real processes, and what ranks read of them."""

from __future__ import annotations

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
from tests.dist import test_real_models as models
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


def save_odd_model(folder: str, sharding: str, seed: int) -> None:
    """A step of AdamW on data that differs by rank, and what cannot be seen from weights: extra data of every kind."""
    torch.manual_seed(seed)
    model: Any = OddModel()
    lz.shard(model, sharding=sharding, units=[Block])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    tokens = tokens_for(dist.get_rank(), 17, 4)
    token_loss(model(tokens), tokens).backward()
    optimizer.step()
    extra = {"tensor": torch.arange(5.0), "at": (1, b"x")}
    lz.save(folder, model, optimizer, step=1, extra=extra, rank_extra=lz.rng_state())


class CountedReads:
    """Elements that `TensorFile.read` returned, by key."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.numel: dict[str, int] = {}
        original = TensorFile.read

        def read(file: TensorFile, key: str, start: int, stop: int) -> torch.Tensor:
            data = original(file, key, start, stop)
            self.numel[key] = self.numel.get(key, 0) + data.numel()
            return data

        patch.setattr(TensorFile, "read", read)


def load_plain(path: str, expected: str, sharding: str) -> dict[str, Any]:
    """Loads plain files; compares with the same weights in ``expected``, and returns what was read here."""
    from safetensors.torch import load_file

    torch.manual_seed(99)
    model: Any = OddModel()
    lz.shard(model, sharding=sharding, units=[Block], zero3_size=2)
    before = lz.full_state_dict(model)
    with pytest.MonkeyPatch.context() as patch:
        reads = CountedReads(patch)
        loaded = lz.load(path, model)
    assert (loaded.step, loaded.has_optimizer, loaded.missing, loaded.unexpected) == (0, False, (), ())
    full, right = lz.full_state_dict(model), load_file(expected)
    assert set(right) <= set(full) and len(right) > 20
    assert all(torch.equal(full[name], value) for name, value in right.items())
    assert not torch.equal(before["embed.weight"], full["embed.weight"])
    held: dict[str, int] = {}
    for p in model.parameters():
        info = lz.param_info(p)
        held[info.fqn] = p.numel() * (2 if info.aliases else 1)  # read, and compared with what it is tied to here
        held |= dict.fromkeys(info.aliases, p.numel())
    buffers = {name: b.numel() for name, b in model.named_buffers()}
    return {"read": reads.numel, "held": {**held, **buffers}, "total": sum(v.numel() for v in right.values())}


def load_plain_that_does_not_fit(path: str) -> str:
    """The error, the same on every rank; nothing was changed."""
    model: Any = OddModel()
    lz.shard(model, sharding="zero3", units=[Block])
    before = lz.full_state_dict(model)
    with pytest.raises(lz.CheckpointError) as error:
        lz.load(path, model)
    assert all(torch.equal(before[name], value) for name, value in lz.full_state_dict(model).items())
    return str(error.value)


def save_and_load_without_pickle(folder: str) -> None:
    """Saving, loading and resuming with everything of pickle raising."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("pickle was used")

    model: Any = OddModel()
    lz.shard(model, sharding="zero3", units=[Block])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    tokens = tokens_for(dist.get_rank(), 17, 4)
    token_loss(model(tokens), tokens).backward()
    optimizer.step()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("load", "loads", "Unpickler", "dump", "dumps", "Pickler", "_Unpickler", "_Pickler"):
            patch.setattr(pickle, name, refuse)
        for name in ("load", "save"):
            patch.setattr(torch, name, refuse)
        for name in ("_object_to_tensor", "_tensor_to_object"):
            patch.setattr(dist.distributed_c10d, name, refuse)
        state = lz.rng_state()
        lz.save(folder, model, optimizer, extra={"a": [torch.ones(2)]}, rank_extra=state, background=True).wait()
        lz.save(folder, model, optimizer, extra={"a": [torch.ones(2)]}, rank_extra=state)
        loaded = lz.load(folder, model, optimizer)
        lz.set_rng_state(loaded.rank_extra)
        assert torch.equal(loaded.extra["a"][0], torch.ones(2)) and loaded.step == 1


def train_pretrained(folder: str, kind: str) -> dict[str, str]:
    """Shards and saves a model of transformers or diffusers; returns checksums of its weights by name."""
    torch.manual_seed(1)
    build: Callable[[], Any] = getattr(models, kind)
    model, loss = build(), {"llama": models.llama_loss, "wan": models.video_loss}[kind]
    model.save_config(folder) if kind == "wan" else model.config.save_pretrained(folder)
    lz.shard(model, sharding="zero3", min_num_params=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss(model, torch.tensor(dist.get_rank())).backward()
    optimizer.step()
    lz.save(Path(folder) / "run", model, optimizer)
    return {name: checksum(value) for name, value in lz.full_state_dict(model).items()}


def checksum(tensor: torch.Tensor) -> str:
    """Of values, shape and dtype."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"
