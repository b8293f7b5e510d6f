"""Gradients of a model on one rank: kept as autograd made them."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import layerzero as lz
from layerzero.grads import _plain
from layerzero.own_grads import OwnGrads
from tests.dist.interruption_cases import Chain, Fails


def test_what_autograd_made_is_the_result() -> None:
    first, second = torch.ones(3), torch.full((3,), 2.0)
    grads = OwnGrads(2, set())
    grads.add([first, None], zeroed=[0, 1])
    grads.add([second, None], zeroed=[])
    total, nothing = grads.take()
    assert total is first and total.tolist() == [3, 3, 3] and nothing is None
    assert second.tolist() == [2, 2, 2]
    assert grads.take() == [None, None]


def test_zeroed_starts_anew_and_other_forms_are_copied() -> None:
    grads = OwnGrads(1, set())
    grads.add([torch.ones(2, 3)], zeroed=[])
    grads.add([torch.arange(6, dtype=torch.bfloat16).view(3, 2).t()], zeroed=[0])
    (total,) = grads.take()
    assert total is not None and total.dtype is torch.float32 and total.is_contiguous()
    assert total.tolist() == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize("param_dtype", ["fp32", "bf16"])
def test_two_micro_batches_equal_plain_torch(param_dtype: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    model.load_state_dict(plain.state_dict())
    lz.shard(model, units=[nn.Linear], param_dtype=param_dtype)
    x, y = torch.randn(2, 3, 4), torch.randn(3, 4)
    with model.no_sync():
        model(x[0]).float().square().sum().backward()
    model(x[1]).float().square().sum().backward()
    kept = [p.grad for p in model.parameters()]
    if param_dtype == "fp32":
        for part in x:
            plain(part).square().sum().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            assert torch.equal(mine.grad.local.flatten(), theirs.grad.flatten())
    assert all(g is not None and g.local.dtype is torch.float32 for g in kept)
    before = [g.local.clone() for g in kept if g is not None]
    model.zero_grad()
    model(y).float().sum().backward()  # what a user kept of an earlier step stays as it was
    assert all(torch.equal(g.local, b) for g, b in zip(kept, before, strict=True) if g is not None)


class Sum(nn.Module):
    """Two parameters whose gradients autograd makes as views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.a[None] + self.b[None])


@pytest.mark.parametrize("accumulate", [False, True], ids=["synchronised", "no_sync"])
def test_gradients_in_shared_memory(accumulate: bool) -> None:
    model = lz.shard(Sum(), units=[])
    for step in range(3):
        with model.no_sync() if accumulate and step < 2 else contextlib.nullcontext():
            model(torch.ones(1, 4)).sum().backward()
    assert [p.grad.local.tolist() for p in model.parameters() if p.grad is not None] == [[3.0] * 4] * 2
    model.a.grad.mul_(2)
    assert model.b.grad.local.tolist() == [3.0] * 4


def test_a_failed_backward_leaves_nothing() -> None:
    model = lz.shard(Chain(nn.Linear(2, 2), nn.Linear(2, 2)), units=[nn.Linear])
    for fail in (False, True, False):
        Fails.fail = fail
        with pytest.raises(RuntimeError, match="meant to") if fail else contextlib.nullcontext():
            model(torch.ones(1, 2)).sum().backward()
    assert model[1].bias.grad.local.tolist() == [2.0, 2.0]


def test_operators_on_gradients() -> None:
    model = lz.shard(nn.Linear(3, 2, bias=True), units=[])
    model(torch.tensor([[1.0, 2.0, 3.0]])).sum().backward()
    grad = model.weight.grad
    plain = grad.local.clone()
    for operate in (
        lambda g: g[:2], lambda g: g[0], lambda g: g[None], lambda g: g[[0, 1]], lambda g: 1 - g, lambda g: 5 / g,
        lambda g: 2**g, lambda g: g // 2, lambda g: g == 3, lambda g: g > 1, lambda g: -g, lambda g: abs(g - 2),
    ):  # fmt: skip
        assert torch.equal(_plain(operate(grad)), operate(plain))
    grad[:1].mul_(2)
    plain[:1].mul_(2)
    grad[1] += 1
    plain[1] += 1
    grad[2] = 7
    plain[2] = 7
    grad *= 3
    plain *= 3
    grad[3:].zero_()
    plain[3:].zero_()
    assert grad is model.weight.grad and torch.equal(grad.local, plain)


def test_hooks_see_what_is_new() -> None:
    model = lz.shard(nn.Linear(2, 1, bias=False), units=[])
    model.weight.register_hook(lambda grad: grad * 2)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad.local.flatten().tolist() == [6.0, 6.0]
