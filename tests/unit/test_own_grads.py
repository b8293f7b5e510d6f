"""Gradients of a model on one rank: kept as autograd made them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import layerzero as lz
from layerzero.own_grads import OwnGrads


def test_what_autograd_made_is_the_result() -> None:
    first, second = torch.ones(3), torch.full((3,), 2.0)
    grads = OwnGrads(2)
    grads.add([first, None], zeroed=[0, 1])
    grads.add([second, None], zeroed=[])
    total, nothing = grads.take()
    assert total is first and total.tolist() == [3, 3, 3] and nothing is None
    assert second.tolist() == [2, 2, 2]
    assert grads.take() == [None, None]


def test_zeroed_starts_anew_and_other_forms_are_copied() -> None:
    grads = OwnGrads(1)
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
