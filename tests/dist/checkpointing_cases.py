"""Activation checkpointing in and around units, against plain PyTorch that checkpoints nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import layerzero as lz
from tests.dist.twins import Layer, Net, Twins, data, loss_of, no_sync


class CheckpointedLayer(Layer):
    """Checkpoints its own processor, or a part that reads a parameter of the unit directly."""

    inside = "none"
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        if self.inside == "processor":
            return x + self.gain * checkpoint(self.processor, h, use_reentrant=self.reentrant)
        if self.inside == "part":
            return x + checkpoint(lambda h: self.gain * self.processor(h), h, use_reentrant=self.reentrant)
        return x + self.gain * self.processor(h)


class CheckpointedNet(Net):
    """Where `forward` checkpoints is chosen per instance; plain clones checkpoint nothing."""

    where = "none"
    reentrant = False
    calls = 0

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([CheckpointedLayer(7, 11) for _ in range(4)])
        if frozen:
            for layer in self.layers[:3]:
                layer.processor[0].requires_grad_(False)
                layer.gain.requires_grad_(False)
            self.layers[2].requires_grad_(False)

    def run(self, fn: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(fn, x, use_reentrant=self.reentrant) if self.where != "none" else fn(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        first, second, third, fourth = self.layers
        if self.where in ("none", "units"):
            for layer in self.layers:
                x = self.run(layer, x)
        elif self.where == "region":
            x = self.run(lambda x: second(first(x)), x)
            x = self.run(lambda x: fourth(third(x)), x)
        elif self.where == "half":
            x = self.run(second, first(x))
            x = fourth(self.run(third, x))
        return self.out(x)


class SharedNet(CheckpointedNet):
    """One unit is used twice in a region, and once more outside any."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        first, second, third, fourth = self.layers
        x = self.run(lambda x: first(second(first(x))), x)
        x = self.run(second, x)
        x = first(third(x))
        return self.out(fourth(x))


def _configure(net: Any, where: str, inside: str, reentrant: bool) -> None:
    net.where, net.reentrant = where, reentrant
    for layer in net.layers:
        layer.inside, layer.reentrant = inside, reentrant


def training(strategy: str, lane: str, where: str, inside: str, reentrant: bool, early_stop: bool, model: str) -> None:
    """Three steps of two micro-batches."""
    build = {
        "plain": CheckpointedNet, "frozen": lambda: CheckpointedNet(frozen=True), "shared": SharedNet,
    }[model]  # fmt: skip
    twins = Twins(build, strategy, lane, units=[Layer])
    recomputed = []
    _configure(twins.model, where, inside, reentrant)
    twins.model.layers[1].processor[0].register_forward_pre_hook(lambda *_: recomputed.append(1))

    def script(net: nn.Module, rank: int) -> None:
        with no_sync(net):
            loss_of(net, rank, 1).backward()
        loss_of(net, rank, 2).backward()

    with set_checkpoint_early_stop(early_stop):
        twins.train(script, steps=3)
    assert len(recomputed) > 3 * 2 * (2 if model == "shared" else 1), "nothing was recomputed"


def around_root(strategy: str, lane: str) -> None:
    """Non-reentrant works around the whole model; reentrant is refused, and training goes on after."""
    twins = Twins(Net, strategy, lane, units=[Layer])

    def script(net: nn.Module, rank: int) -> None:
        x = data(rank, 1, 4, 5).requires_grad_()
        checkpoint(net, x, use_reentrant=False).pow(2).mean().backward()

    twins.train(script, steps=2)
    x = data(twins.rank, 1, 4, 5).requires_grad_()
    with pytest.raises(lz.ShardingError, match=r"reentrant.*use_reentrant=False"):
        checkpoint(twins.model, x, use_reentrant=True).pow(2).mean().backward()
    twins.check_params()
    twins.train(script, steps=2)


class _Seen(nn.Module):
    """Remembers the dtypes that reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(7, 7)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dtypes.append(x.dtype)
        return self.lin(x)


class _Seeing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = _Seen(), _Seen()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.b, self.a(x), use_reentrant=False)


def casts(strategy: str, lane: str) -> None:
    """A recomputed forward sees the dtypes of the first one, also where a unit itself is the boundary."""
    model: Any = _Seeing()
    twins = Twins(_Seeing, strategy, lane, tol=5e-2, units=[_Seen], param_dtype="bf16")
    model = twins.model

    def inner(net: Any, rank: int) -> None:
        net(data(rank, 1, 4, 7)).pow(2).mean().backward()

    twins.each(inner)
    twins.check_grads()
    assert model.a.dtypes == [torch.bfloat16]
    assert model.b.dtypes == [torch.bfloat16] * 2

    def direct(net: Any, rank: int) -> None:  # the checkpointed unit is called from outside, with fp32
        checkpoint(net.a, data(rank, 2, 4, 7).requires_grad_(), use_reentrant=False).pow(2).mean().backward()

    twins.each(direct)
    twins.check_grads()
    assert model.a.dtypes == [torch.bfloat16] * 3

    def mixed(net: Any, rank: int) -> None:  # inside the model and by itself, before either's backward
        loss = net(data(rank, 3, 4, 7)).pow(2).mean()
        aside = net.b(data(rank, 4, 4, 7)).pow(2).mean()
        (loss + aside).backward()

    twins.each(mixed)
    twins.check_grads()
    assert model.b.dtypes == [torch.bfloat16] * 5
