"""Context-parallel exchanges, attention and loss shares against one process."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import layerzero as lz
from layerzero import collectives
from layerzero.parallel.context import ContextParallel, mean_share, parallelize, ring_attention, ulysses_attention
from tests.dist.parity import rank_and_size

# (length, query heads, key heads)
SHAPES = [(8, 4, 4), (7, 5, 5), (9, 6, 2), (11, 3, 1), (6, 8, 4), (13, 7, 7), (10, 6, 3), (12, 2, 1)]


def context_of_all() -> ContextParallel:
    return ContextParallel.of(lz.ParallelMesh(cp=rank_and_size()[1]))


def random(seed: int, *shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **options)


def leaves(whole: torch.Tensor, context: ContextParallel, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole tensor and this rank's part of it, as leaves."""
    return whole.clone().requires_grad_(), context.split(whole, dim).requires_grad_()


def close(got: torch.Tensor | None, want: torch.Tensor | None, what: Any) -> None:
    assert got is not None and want is not None, what
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda m: f"{what}: {m}")


# ---------------------------------------------------------------------------- attention


def attention_equals_one_process() -> int:
    """Outputs and gradients of `ulysses_attention`, with different weights on every rank's output."""
    context = context_of_all()
    done = 0
    for (length, heads, key_heads), how in product(SHAPES, ["full", "causal", "mask", "mask-per-head"]):
        what = (length, heads, key_heads, how)
        whole, parts = zip(
            *(leaves(random(seed, 2, length, h, 6), context, 1) for seed, h in enumerate((heads, key_heads, key_heads))),
            strict=True,
        )
        mask = None
        if how.startswith("mask"):
            mask = random(9, 2, heads if how == "mask-per-head" else 1, length, length) > -0.5
            mask |= torch.eye(length, dtype=torch.bool)
        q, k, v = (x.transpose(1, 2) for x in whole)
        want = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=how == "causal", scale=0.3, enable_gqa=True
        )
        want = want.transpose(1, 2)
        got = ulysses_attention(*parts, context, length=length, attn_mask=mask, is_causal=how == "causal", scale=0.3)
        weights = random(5, *want.shape)
        (want * weights).sum().backward()
        (got * context.split(weights, 1)).sum().backward()
        close(got, context.split(want, 1), what)
        for whole_leaf, part in zip(whole, parts, strict=True):
            assert whole_leaf.grad is not None
            close(part.grad, context.split(whole_leaf.grad, 1), what)
            assert part.grad is not None and (part.grad.any() or not part.numel())
        done += 1
    return done


def one_collective_for_all_ranks() -> int:
    """The same with all-to-all and all-gather, as on accelerators and in large groups."""
    patch = pytest.MonkeyPatch()
    patch.setattr(collectives, "_FEW", 1)
    try:
        return attention_equals_one_process() + switch_and_gather()
    finally:
        patch.undo()


def attention_traffic() -> list[int]:
    """Collectives and bytes of a forward and a backward where everything divides."""
    context = context_of_all()
    parts = [context.split(random(i, 1, 16, 8, 4), 1).requires_grad_() for i in range(3)]
    out = ulysses_attention(*parts, context)
    ((op, _, count),) = context.comm.traffic
    forward = [count.num, count.nbytes]
    out.sum().backward()
    assert op == "exchange" and len(list(context.comm.traffic)) == 1
    return [*forward, count.num - forward[0], count.nbytes - forward[1]]


def wrong_shapes_refused() -> None:
    context = context_of_all()
    x = torch.zeros(1, 3, 4, 2)
    with pytest.raises(lz.ShardingError, match="query"):
        ulysses_attention(x, x[:, :, :3], x[:, :, :3], context)
    with pytest.raises(lz.ShardingError, match="query"):
        ulysses_attention(x, x[:, :2], x[:, :2], context)
    with pytest.raises(lz.ShardingError, match=r"holds 3 elements of dimension 1, expected \d+ of 40"):
        ulysses_attention(x, x, x, context, length=40)
    with pytest.raises(lz.ShardingError, match="one dimension"):
        ContextParallel.of(lz.ParallelMesh(dp=2, cp=2).device_mesh)
    with pytest.raises(lz.ShardingError, match="accelerators only"), ring_attention(context, buffers=[x], buffer_seq_dims=[1]):
        raise AssertionError
    with pytest.raises(lz.ShardingError, match="WanTransformer3DModel, LatteTransformer3DModel"):
        parallelize(torch.nn.Linear(2, 2), context)


# ---------------------------------------------------------------------------- moving parts


def switch_and_gather() -> int:
    """Values and gradients for every pair of dimensions, lengths that divide and that don't."""
    context = context_of_all()
    done = 0
    for shape, (first, second) in product([(4, 8, 12), (5, 7, 9)], [(0, 1), (1, 0), (0, 2), (2, 1), (-1, 0)]):
        whole = random(3, *shape)
        part = context.split(whole, first).requires_grad_()
        switched = context.switch(part, gather_dim=first, split_dim=second, length=shape[first])
        close(switched, context.split(whole, second), (shape, first, second))
        back = context.switch(switched, gather_dim=second, split_dim=first, length=shape[second])
        close(back, part, "back")
        weights = random(4, *shape)
        (switched * context.split(weights, second)).sum().backward()
        close(part.grad, context.split(weights, first), "gradient of a switch")
        part.grad = None
        gathered = context.gather(part, first, shape[first])
        close(gathered, whole, "gathered")
        (gathered * weights * (1 + context.rank)).sum().backward()
        close(part.grad, context.split(weights, first) * sum(range(1, context.size + 1)), "gradient of a gather")
        part.grad = None
        mine = (whole * (1 + context.rank)).requires_grad_()
        summed = context.reduce_scatter(mine, first)
        close(summed, context.split(whole, first) * sum(range(1, context.size + 1)), "sum")
        (summed * context.split(weights, first)).sum().backward()
        close(mine.grad, weights, "gradient of a sum")
        done += 1
    return done


# ---------------------------------------------------------------------------- loss


def shares() -> None:
    """The mean of the shares is the mean over all tokens, whatever the spread, and so are their gradients."""
    rank, world = rank_and_size()
    mesh = lz.ParallelMesh(dp=world // 2, cp=2)
    context = ContextParallel.of(mesh)
    generator = torch.Generator().manual_seed(rank)
    losses = torch.randn(3 + rank, generator=generator).requires_grad_()
    kept = (torch.rand(3 + rank, generator=generator) > 0.3).float()
    kept[0] = 1
    for weights in (None, kept):
        mine = torch.ones_like(kept) if weights is None else weights
        for over, group, size in (
            (mesh, mesh.zero1.get_group(), world), (context, context.mesh and context.mesh.get_group(), 2)
        ):  # fmt: skip
            sums = torch.stack([(losses.detach() * mine).sum(), mine.sum()])
            dist.all_reduce(sums, group=group)
            share = mean_share(losses, weights, over=over)
            known = mean_share(losses, weights, over=over, total=sums[1].item())
            assert known.item() == pytest.approx(share.item(), rel=1e-6)
            total = share.detach().clone()
            dist.all_reduce(total, group=group)
            close(total / size, sums[0] / sums[1], "value")
            (grad,) = torch.autograd.grad(share, losses)
            close(grad / size, mine / sums[1], "gradient")
    empty = mean_share(torch.zeros(0).requires_grad_(), over=mesh)
    assert empty.item() == 0 and empty.requires_grad
