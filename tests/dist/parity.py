"""Sharded training against one process training on the concatenated batch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import layerzero as lz
from layerzero import collectives, lanes
from layerzero.module import engine_of
from tests.dist.models import (
    Block,
    EvenIntegerModel,
    IntegerBlock,
    IntegerModel,
    OddModel,
    TinyModel,
    integers_for,
    token_loss,
    tokens_for,
)

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"sharding": "ddp"},
    "zero1": {"sharding": "zero1"},
    "zero2": {"sharding": "zero2"},
    "zero3": {"sharding": "zero3"},
    "hsdp": {"sharding": "hsdp"},
    "layerzero": {"sharding": "layerzero"},
    "layerzero-full": {"sharding": "layerzero", "accumulate": "full"},
}

STEPS = 4

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]
Batches = Callable[[int], torch.Tensor]
"""The batch of a step, [ranks, micro-batches, ...]."""


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def lane_context(kind: str) -> contextlib.AbstractContextManager[None]:
    """``threads``, ``late`` or ``random:<seed>``."""
    if kind == "threads":
        return contextlib.nullcontext()
    name, _, seed = kind.partition(":")
    return lanes.adversarial(name, int(seed or 0))  # type: ignore[arg-type]


def drain(model: nn.Module) -> None:
    """Wait until every lane of a sharded model has run what it was given."""
    lanes_ = engine_of(model).lanes
    for lane in (lanes_.refresh, lanes_.unshard, lanes_.reduce, lanes_.sync):
        lane.run(lambda: None).wait()


@dataclass
class Training:
    """What a training run computed, step by step.

    Attributes:
        grads: mean gradients before clipping, by parameter name: whole ones of the reference, this rank's
            flat slices of a sharded model with the range they hold; None where there is none.
        state: the full state at the end.
        num_missing: how often a backward of one rank left a parameter without gradient.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, Any]] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    num_missing: int = 0


@dataclass(frozen=True)
class Setup:
    """How both sides train.

    Attributes:
        micro: micro-batches per step.
        average: divide the loss by ``micro``; without it micro-batches are summed.
        optimizer: name of a torch optimizer and its options.
        cast_buffers: whether floating-point buffers have the compute dtype too.
        no_sync: accumulate all micro-batches but the last under `no_sync`; without it every backward reduces.
    """

    micro: int
    loss: Loss
    batches: Batches
    clip: float | None = 0.5
    steps: int = STEPS
    average: bool = True
    optimizer: tuple[str, dict[str, Any]] = ("AdamW", {"lr": 1e-2, "weight_decay": 0.1})
    cast_buffers: bool = True
    no_sync: bool = True

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        name, options = self.optimizer
        return getattr(torch.optim, name)([p for p in model.parameters() if p.requires_grad], **options)

    @property
    def divisor(self) -> int:
        return self.micro if self.average else 1


def reference(main: nn.Module, setup: Setup, dtype: torch.dtype = torch.float32) -> Training:
    """One process on all ranks' batches; forward and backward in ``dtype``, everything else in ``main``'s dtype."""
    compute = main if dtype is next(main.parameters()).dtype else copy.deepcopy(main).to(dtype)
    for (_, buffer), (name, _) in zip(main.named_buffers(), list(compute.named_buffers()), strict=True):
        if not setup.cast_buffers:
            owner, _, key = name.rpartition(".")
            compute.get_submodule(owner)._buffers[key] = buffer
    optimizer = setup.make_optimizer(main)
    run = Training()
    for step in range(setup.steps):
        batch = setup.batches(step)
        world = len(batch)
        with torch.no_grad():
            for p, c in zip(main.parameters(), compute.parameters(), strict=True):
                if p is not c:
                    c.copy_(p)
        total = 0.0
        sums: dict[str, torch.Tensor] = {}
        for r in range(world):
            for m in range(setup.micro):
                loss = setup.loss(compute, batch[r, m]) / setup.divisor
                loss.backward()
                total += loss.item() / world
                for (name, p), c in zip(main.named_parameters(), compute.parameters(), strict=True):
                    run.num_missing += c.grad is None
                    if c.grad is not None:
                        sums[name] = sums.get(name, 0) + c.grad.to(p.dtype) / world
                    c.grad = None
        for name, p in main.named_parameters():
            p.grad = sums.get(name)
            if p.grad is None and p.requires_grad and world > 1:
                p.grad = torch.zeros_like(p)  # no rank knows that the others have no gradient either
        run.losses.append(total)
        run.grads.append({n: None if p.grad is None else p.grad.clone() for n, p in main.named_parameters()})
        run.norms.append(nn.utils.clip_grad_norm_(main.parameters(), setup.clip or float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
    run.state = {k: v.clone() for k, v in main.state_dict().items()}
    return run


def sharded(model: nn.Module, setup: Setup) -> Training:
    """The same training on this rank's batches of a sharded model."""
    rank, world = rank_and_size()
    optimizer = setup.make_optimizer(model)
    run = Training()
    for step in range(setup.steps):
        batch = setup.batches(step)[rank]
        total = torch.zeros((), dtype=torch.float64)
        for m in range(setup.micro):
            with model.no_sync() if setup.no_sync and m < setup.micro - 1 else contextlib.nullcontext():
                loss = setup.loss(model, batch[m]) / setup.divisor
                loss.backward()
                total += loss.detach().double() / world
        if world > 1:
            dist.all_reduce(total)
        run.losses.append(total.item())
        run.grads.append(local_grads(model))
        clip = setup.clip or float("inf")
        method = model.clip_grad_norm_ if step % 2 else lambda c: nn.utils.clip_grad_norm_(model.parameters(), c)
        run.norms.append(method(clip).item())
        optimizer.step()
        optimizer.zero_grad()
    run.state = lz.full_state_dict(model)
    return run


def local_grads(model: nn.Module) -> dict[str, Any]:
    """This rank's gradients: (start, stop, values [stop - start]) by name, or None."""
    found: dict[str, Any] = {}
    for name, p in model.named_parameters():
        r = lz.param_info(p).global_range
        found[name] = None if p.grad is None else (r.start, r.stop, p.grad.local.clone().flatten())
    return found


def lm_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return token_loss(model(tokens), tokens)


# ---------------------------------------------------------------------------- comparison


def compare(want: Training, got: Training, before: dict[str, torch.Tensor], dtype: str) -> None:
    """Assert closeness, and that there was something to compare and that it moved.

    fp32 is compared element by element. bf16 is compared with a bf16 reference, and what the engine rounds
    on the wire is left as an error relative to the whole gradient and to the whole movement.
    """
    assert list(got.state) == list(want.state)
    for name, tensor in want.state.items():
        assert got.state[name].shape == tensor.shape, name
    moved = sum(not torch.equal(tensor, before[name]) for name, tensor in want.state.items())
    assert moved >= 5 and len(set(want.losses)) == len(want.losses) > 1
    assert all(norm > 0 for norm in want.norms)
    steps = enumerate(zip(want.grads, got.grads, strict=True))
    compared = sum(_compare_grads(w, g, dtype, step) for step, (w, g) in steps)
    if rank_and_size()[0] == 0:
        assert compared
    if dtype == "fp32":
        torch.testing.assert_close(got.losses, want.losses, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(got.norms, want.norms, rtol=1e-4, atol=1e-4)
        for name, tensor in want.state.items():
            torch.testing.assert_close(got.state[name], tensor, rtol=2e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
        return
    torch.testing.assert_close(got.losses[0], want.losses[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.losses, want.losses, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(got.norms, want.norms, rtol=3e-2, atol=3e-2)
    names = [n for n, t in want.state.items() if t.is_floating_point() and not torch.equal(t, before[n])]
    error = relative_error((got.state[n] - before[n], want.state[n] - before[n]) for n in names)
    assert error < BF16_MOVEMENT, f"parameters moved elsewhere, by {error:.3f} of their movement"
    still = [n for n in want.state if n not in names]
    for name in still:
        torch.testing.assert_close(got.state[name].float(), want.state[name].float(), rtol=1e-2, atol=0)


BF16_GRADS = 6e-3
BF16_MOVEMENT = 3e-2


def _compare_grads(want: dict[str, Any], got: dict[str, Any], dtype: str, step: int) -> int:
    pairs = []
    for name, grad in want.items():
        if grad is None:
            held = got[name]
            assert held is None or not held[2].any(), f"step {step}, {name}: a gradient from nowhere"
            continue
        assert got[name] is not None, f"step {step}, {name}: no gradient"
        start, stop, values = got[name]
        pairs.append((values, grad.flatten()[start:stop]))
        if dtype == "fp32":
            torch.testing.assert_close(
                *pairs[-1], rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"gradient of {n} in step {step}: {m}"
            )
    if dtype != "fp32" and step == 0:  # later ones are taken at other points
        error = relative_error(pairs)
        assert error < BF16_GRADS, f"gradients in step {step} differ by {error:.4f} of their norm"
    return sum(want.numel() for _, want in pairs)


def relative_error(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Norm of all differences over the norm of all wanted values; infinite for nan."""
    differences, wanted = 0.0, 0.0
    for got, want in pairs:
        differences += (got.double() - want.double()).square().sum().item()
        wanted += want.double().square().sum().item()
    ratio = (differences / wanted) ** 0.5 if wanted else float(differences > 0)
    return ratio if ratio == ratio else float("inf")


# ---------------------------------------------------------------------------- cases


def odd_batches(world: int, micro: int, vocab: int = 17) -> Batches:
    return lambda step: tokens_for(step, vocab, world * micro * 2).view(world, micro, 2, -1)


@cache
def odd_reference(world: int, micro: int, dtype: str) -> tuple[dict[str, torch.Tensor], Training]:
    torch.manual_seed(7)
    model = OddModel()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    setup = Setup(micro, lm_loss, odd_batches(world, micro))
    return before, reference(model, setup, torch.bfloat16 if dtype == "bf16" else torch.float32)


def odd_model_case(
    strategy: str, micro: int, dtype: str, lane: str, zero3_size: int = 8, extra: dict[str, Any] | None = None
) -> None:
    """`OddModel` under one strategy against plain PyTorch. Ranks start from different weights: rank 0's win."""
    rank, world = rank_and_size()
    before, want = odd_reference(world, micro, dtype)
    torch.manual_seed(7 + rank)
    model = OddModel()
    options = {"zero3_size": zero3_size, "param_dtype": dtype, "buffer_dtype": dtype, **STRATEGIES.get(strategy, {})}
    with lane_context(lane):
        lz.shard(model, units=[Block], **{**options, **(extra or {})})
    setup = Setup(micro, lm_loss, odd_batches(world, micro))
    if lane != "threads":  # fused steps change parameters without a trace in their versions
        setup = replace(setup, optimizer=("AdamW", {**setup.optimizer[1], "fused": True}))
    compare(want, sharded(model, setup), before, dtype)


def odd_model_cases(configurations: list[dict[str, Any]]) -> int:
    """Several `odd_model_case`s in one world; names the configuration that failed."""
    for configuration in configurations:
        try:
            odd_model_case(**configuration)
        except Exception as error:
            raise AssertionError(f"configuration {configuration}") from error
    return len(configurations)


# ---------------------------------------------------------------------------- exact sums


def _product_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Inputs and output weights side by side in ``batch`` [rows, inputs + outputs]."""
    return (model(batch[..., : model.NUM_IN]) * batch[..., model.NUM_IN :]).sum()  # type: ignore[index]


def _exact_setup(model: type[nn.Module], world: int, micro: int, dtype: torch.dtype) -> Setup:
    shape = (world, micro, 2, model.NUM_IN + model.NUM_OUT)  # type: ignore[operator]
    return Setup(
        micro, _product_loss, lambda step: integers_for(step, shape).to(dtype), clip=None,
        steps=2 if dtype.itemsize >= 4 else 1, average=False, optimizer=("SGD", {"lr": world / 4, "momentum": 0.5}),
    )  # fmt: skip


@cache
def _exact_reference(model: type[nn.Module], world: int, micro: int, dtype: torch.dtype) -> Training:
    """Computed in ``dtype``; asserts that numbers have bits to spare, so that no sum is rounded in any order."""
    run = reference(model(), _exact_setup(model, world, micro, dtype), dtype)
    assert bool(run.num_missing) is (model is IntegerModel)
    wide = reference(model().double(), _exact_setup(model, world, micro, torch.float64), torch.float64)
    spare = {torch.float32: 24 - 4, torch.float16: 11 - 2, torch.bfloat16: 8 - 2}[dtype]
    for grads, wide_grads in zip(run.grads, wide.grads, strict=False):
        assert all(torch.equal(grads[n].double(), g) and _num_bits(g) <= spare for n, g in wide_grads.items())
        assert sum(int(g.count_nonzero()) for g in grads.values()) >= 1
    if dtype is torch.float32:
        assert all(torch.equal(run.state[n].double(), t) for n, t in wide.state.items())
    return run


def _num_bits(tensor: torch.Tensor) -> int:
    """Bits that hold every element as a multiple of one power of two."""
    for exponent in range(64):
        scaled = tensor * 2.0**exponent
        if torch.equal(scaled, scaled.round()):
            return int(scaled.abs().max().item()).bit_length()
    raise AssertionError("not dyadic")


def exact_case(
    micro: int,
    dtype: str,
    lane: str,
    sharding: Any,
    tiny: bool = False,
    no_sync: bool = True,
    options: dict[str, Any] | None = None,
) -> None:
    """Gradients and parameters equal plain PyTorch's bit for bit where no sum is rounded."""
    rank, world = rank_and_size()
    kind: type[nn.Module] = TinyModel if tiny else EvenIntegerModel if lane.startswith("random") else IntegerModel
    units = [nn.Linear] if tiny else [IntegerBlock]
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    want = _exact_reference(kind, world, micro, compute)
    model = kind()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rank)  # rank 0's win
    with lane_context(lane):
        lz.shard(model, sharding=sharding, units=units, param_dtype=dtype, **(options or {}))
    setup = replace(_exact_setup(kind, world, micro, compute), no_sync=no_sync)
    got = sharded(model, setup)
    compared = 0
    for step in range(setup.steps):
        for name, grad in want.grads[step].items():
            start, stop, values = got.grads[step][name]
            part = grad.flatten()[start:stop]
            torch.testing.assert_close(values, part, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")
            compared += stop - start
    torch.testing.assert_close(got.losses, want.losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(got.norms, want.norms, rtol=1e-6, atol=0)
    for name, tensor in want.state.items():
        torch.testing.assert_close(got.state[name], tensor, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")
    changed = sum(int((want.state[n] != before[n]).sum()) for n in before)
    assert changed >= (1 if tiny else 20) and (compared or tiny or rank)


def exact_cases(configurations: list[dict[str, Any]]) -> int:
    """Several `exact_case`s in one world; names the configuration that failed."""
    for configuration in configurations:
        try:
            exact_case(**configuration)
        except Exception as error:
            raise AssertionError(f"configuration {configuration}") from error
    return len(configurations)


# ---------------------------------------------------------------------------- one rank


class WithUnused(OddModel):
    """`OddModel` with a parameter that gets no gradient, in the root and in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.tensor([3.0, 4.0]))
        self.blocks[2].unused = nn.Parameter(torch.tensor(5.0))


def plain_training(model: nn.Module, setup: Setup) -> Training:
    """What a user without layerzero writes."""
    optimizer = setup.make_optimizer(model)
    run = Training()
    for step in range(setup.steps):
        batch = setup.batches(step)[0]
        total = torch.zeros((), dtype=torch.float64)
        for m in range(setup.micro):
            loss = setup.loss(model, batch[m]) / setup.divisor
            loss.backward()
            total += loss.detach().double()
        run.losses.append(total.item())
        run.grads.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        run.norms.append(nn.utils.clip_grad_norm_(model.parameters(), setup.clip or float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
    run.state = {k: v.clone() for k, v in model.state_dict().items()}
    return run


def one_rank_case(strategy: str, micro: int, lane: str, optimizer: list[Any], dtype: str = "fp32") -> int:
    """Bit for bit like plain PyTorch, and no collective at all; how many gradients were compared."""
    assert rank_and_size() == (0, 1)
    torch.manual_seed(7)
    plain, model = WithUnused(), WithUnused()
    model.load_state_dict(plain.state_dict())
    before = {k: v.clone() for k, v in plain.state_dict().items()}
    setup = Setup(micro, lm_loss, odd_batches(1, micro), optimizer=(optimizer[0], optimizer[1]))
    want = plain_training(plain, setup) if dtype == "fp32" else reference(plain, setup, torch.bfloat16)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective with one rank")

    patch = pytest.MonkeyPatch()
    for module in (dist, collectives):
        for name in ("all_gather_into_tensor", "all_to_all_single", "all_reduce", "broadcast", "reduce_scatter_tensor",
                     "all_gather", "barrier", "new_group", "_all_gather", "_reduce_scatter"):  # fmt: skip
            if hasattr(module, name):
                patch.setattr(module, name, refuse)
    try:
        with lane_context(lane):
            lz.shard(model, units=[Block], **STRATEGIES[strategy], zero3_size=1, param_dtype=dtype, buffer_dtype=dtype)
        got = sharded(model, setup)
    finally:
        patch.undo()
    assert lz.traffic_report(model).rows == ()
    assert got.losses == want.losses and len(set(want.losses)) == STEPS
    assert got.norms == want.norms
    compared = 0
    for step in range(STEPS):
        for name, grad in want.grads[step].items():
            held = got.grads[step][name]
            assert (held is None) is (grad is None), f"{name}: a gradient on one side only"
            if grad is not None:
                assert torch.equal(held[2], grad.flatten()), f"gradient of {name} in step {step}"
                compared += 1
    assert want.grads[0]["unused"] is None and want.grads[0]["blocks.2.unused"] is None
    assert list(got.state) == list(want.state)
    for name, tensor in want.state.items():
        want_tensor = tensor.bfloat16() if dtype == "bf16" and got.state[name].dtype is torch.bfloat16 else tensor
        assert torch.equal(got.state[name], want_tensor), name
    assert sum(not torch.equal(before[n], t) for n, t in want.state.items()) > 10
    return compared
