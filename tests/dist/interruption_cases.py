"""What fails or is interrupted half-way, and training that goes on afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import layerzero as lz
from layerzero.module import engine_of


class Inner(nn.Module):
    """Owns parameters and is no unit."""

    interrupt = False

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Inner.interrupt:
            raise KeyboardInterrupt
        return self.linear(x).tanh() * self.scale


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.frozen = Inner(), nn.Parameter(torch.full((8,), 0.5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False) * self.frozen

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.frozen


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    mask: torch.Tensor = dataclasses.field(init=False)  # never set: walking over its fields fails


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.out = nn.Sequential(Block(), Block()), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor | Batch) -> torch.Tensor:
        return self.out(self.blocks(x.x if isinstance(x, Batch) else x))


X = torch.linspace(-1, 1, 32).view(4, 8)


def interrupted_submodule(model: Any) -> None:
    with torch.no_grad(), interrupted():
        model.blocks[0].inner(X)


def interrupted_recomputation(model: Any) -> None:
    loss = model(X).square().mean()
    with interrupted():
        loss.backward()
    model.zero_grad()


def interrupted_forward_method(model: Any) -> None:
    lz.forward_method(model.blocks[1], "scaled")
    with interrupted():
        model.blocks[1].scaled(X)


def interrupted_in_unsharded(model: Any) -> None:
    with interrupted(), model.unsharded(), torch.no_grad():
        model(X)


def refused_forward_method(model: Any) -> None:
    block = model.blocks[0]
    lz.forward_method(block, "scaled")
    block.frozen.requires_grad_(True)
    for call in (block.scaled, block, block.scaled):
        with pytest.raises(lz.ShardingError, match="was frozen when"):
            call(X)
    block.frozen.requires_grad_(False)


def failed_cast(model: Any) -> None:
    with pytest.raises(AttributeError, match="mask"):
        model(Batch(X))


def failed_copies(model: Any) -> None:
    engine = engine_of(model)

    def fail(_unit: Any) -> None:
        raise MemoryError("no room for copies")

    engine.lend_copies = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError), model.unsharded():
        pass
    del engine.lend_copies


def failed_user_hook(model: Any) -> None:
    def refuse(_param: torch.Tensor) -> None:
        raise ValueError("a check of the user's")

    handle = model.out.weight.register_post_accumulate_grad_hook(refuse)
    with pytest.raises(ValueError, match="a check"):
        model(X).square().mean().backward()
    handle.remove()
    model.zero_grad()


def failed_user_hook_on_added_gradients(model: Any) -> None:
    """What a hook that never got its turn would have been told is no part of a later step."""
    fails = [False]

    def refuse(_grad: torch.Tensor) -> None:
        if fails[0]:
            raise ValueError("a check of the user's")

    handles = [p.register_hook(refuse) for p in model.parameters() if p.requires_grad]
    model(X).square().mean().backward()
    fails[0] = True
    with pytest.raises(ValueError, match="a check"):
        model(X).square().mean().backward()
    fails[0] = False
    model.zero_grad()
    model(X).square().mean().backward()
    first = [p.grad.local.clone() for p in model.parameters() if p.requires_grad]
    for handle in handles:
        handle.remove()
    model.zero_grad()
    model(X).square().mean().backward()
    for grad, p in zip(first, (p for p in model.parameters() if p.requires_grad), strict=True):
        torch.testing.assert_close(grad, p.grad.local)
    model.zero_grad()


def failed_user_pre_hook(model: Any) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("before the engine's hook")

    for module in (model, model.blocks[0].inner):
        handle = module.register_forward_pre_hook(refuse, prepend=True)
        with pytest.raises(ValueError, match="before the engine's"):
            module(X)
        handle.remove()


def restored_hooks(model: Any) -> None:
    inner = model.blocks[0].inner
    before = inner._forward_hooks.copy()
    with torch.no_grad():
        inner(X)
        inner._forward_hooks = before
        inner(X)


@contextlib.contextmanager
def interrupted() -> Any:
    Inner.interrupt = True
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        Inner.interrupt = False


def goes_on(disturbance: str, strategy: str, when: int) -> None:
    """Losses equal plain PyTorch's, although a function of this module came between after ``when`` steps."""
    disturb: Callable[[Any], None] = globals()[disturbance]
    losses = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        model = Model()
        if is_sharded:
            lz.shard(model, units=[Block], sharding=strategy, zero3_size=1)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        for step in range(5):
            if is_sharded and step == when:
                disturb(model)
            loss = model(X).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert engine_of(model).running.depth == 0
    assert all(u.forward_depth == u.held == 0 for u in engine_of(model).units)
    assert losses[:5] == pytest.approx(losses[5:], rel=1e-5), (losses[:5], losses[5:])


def late_hook_order() -> None:
    """A user's hook on a submodule sees what its caller will see, whenever the submodule was first called."""
    for called_before in (False, True):
        model = lz.shard(Model(), units=[Block], param_dtype="bf16")
        inner, seen = model.blocks[0].inner, []
        if called_before:
            inner(X)
        inner.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output.dtype))
        assert inner(X).dtype is torch.float32 and seen == [torch.float32]


class Fails(torch.autograd.Function):
    """Identity whose backward raises when told to."""

    fail = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Fails.fail:
            raise RuntimeError("meant to")
        return grad


class Chain(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](Fails.apply(self[0](x)))


def failed_micro_batch(strategy: str, accumulate: str, synced: bool, fails_synced: bool) -> None:
    """Gradients that a failed backward made incomplete are refused until they are zeroed."""
    torch.manual_seed(0)
    model = lz.shard(Chain(nn.Linear(8, 8), nn.Linear(8, 8)), units=[nn.Linear], sharding=strategy, accumulate=accumulate,
                     zero3_size=1)  # fmt: skip
    with contextlib.nullcontext() if synced else model.no_sync():
        model(X).sum().backward()
    Fails.fail = True
    with pytest.raises(RuntimeError, match="meant to"), contextlib.nullcontext() if fails_synced else model.no_sync():
        model(X).sum().backward()
    Fails.fail = False
    for _ in range(2):
        with pytest.raises(lz.ShardingError, match="failed half-way.*zero_grad"):
            model(X).sum().backward()
    model.zero_grad()
    with model.no_sync():
        model(X).sum().backward()
    model(X).sum().backward()
    grad = model[1].bias.grad.local
    assert torch.equal(grad, torch.full_like(grad, 8.0))  # two micro-batches of four rows


def failed_last_reduction() -> None:
    """Reductions that can't start at the end of a backward, memory being out, leave the next one as it should be."""
    torch.manual_seed(0)
    model = lz.shard(Chain(*(nn.Linear(8, 8) for _ in range(2))), units=[nn.Linear], sharding="zero3",
                     backward_reduce_scatter="BACKWARD_POST")  # fmt: skip
    (group,) = engine_of(model).units[1].groups
    wanted: list[torch.Tensor] = []
    for is_first in (True, False):
        if not is_first:
            with model.no_sync():
                model(X).sum().backward()
        reduce = group.reduce

        def fail(_sync: bool) -> Any:
            raise MemoryError("no room to pack")

        group.reduce = fail  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            model(X).sum().backward()
        group.reduce = reduce  # type: ignore[method-assign]
        if not is_first:
            with pytest.raises(lz.ShardingError, match="failed half-way.*zero_grad"):
                model(X).sum().backward()
        model.zero_grad()
        model(X).sum().backward()
        grads = [p.grad.local.clone() for p in model.parameters()]
        wanted = grads if is_first else wanted
        assert all(torch.equal(a, b) and b.any() for a, b in zip(grads, wanted, strict=True) if a.numel())
        model.zero_grad()
        model(X).sum().backward()
        assert all(torch.equal(a, p.grad.local) for a, p in zip(grads, model.parameters(), strict=True))
        model.zero_grad()


def failed_gather() -> None:
    """A lane that is a stream runs gathers in the calling thread, where memory may be out."""
    from layerzero.buffers import TransientBuffer
    from tests.dist.streams import simulated_streams

    with simulated_streams() as detector:
        torch.manual_seed(0)
        model = lz.shard(Chain(*(nn.Linear(8, 8) for _ in range(2))), units=[nn.Linear], sharding="zero3")
        for _ in range(2):
            model(X).sum().backward()
            model.zero_grad()
        alloc, calls = TransientBuffer.alloc, [0]

        def fail_second(buffer: TransientBuffer) -> None:
            calls[0] += 1
            if calls[0] == 2:
                raise MemoryError("no room to gather")
            alloc(buffer)

        with model.no_sync():
            model(X).sum().backward()
            TransientBuffer.alloc = fail_second  # type: ignore[method-assign]
            try:
                with pytest.raises(MemoryError):
                    model(X)
            finally:
                TransientBuffer.alloc = alloc  # type: ignore[method-assign]
            model(X).sum().backward()  # trusts what is there, as micro-batches do
        model(X).sum().backward()
        grad = model[1].bias.grad
        assert torch.equal(grad.local, torch.full_like(grad.local, 12.0)), grad.local
        assert not detector.races, detector.races[:3]
