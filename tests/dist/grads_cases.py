"""What `p.grad` is: global norms and checks, loss scaling, and refusal while it is not synchronised."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import layerzero as lz
from layerzero.grads import GradShard
from tests.dist.models import TinyModel
from tests.dist.twins import Layer, Net, Twins, data, loss_of

INF = float("inf")


def norms(strategy: str, lane: str) -> None:
    """Norms of order 1, 2, 3 and inf are those of one process, through either function, and gradients are scaled."""
    twins = Twins(Net, strategy, lane, units=[Layer])
    twins.each(lambda net, rank: loss_of(net, rank, 0).backward())
    twins.average()
    plain = list(twins.clones[0].parameters())
    before = [p.grad.clone() for p in plain if p.grad is not None]
    locals_before = [p.grad.local.clone() for p in twins.model.parameters()]
    for order in (1, 2, 3.0, INF):
        wanted = nn.utils.clip_grad_norm_(plain, 1e9, order)
        ways = [
            twins.model.clip_grad_norm_,
            lambda c, n: nn.utils.clip_grad_norm_(twins.model.parameters(), c, n),
            lambda c, n: nn.utils.clip_grad_norm_(twins.model.parameters(), c, n, foreach=False),
        ]
        for clip in ways:
            for max_norm in (1e9, float(wanted) / 3):
                got = clip(max_norm, order)
                twins.close(got, wanted, f"norm of order {order}")
                scale = min(1.0, max_norm / (float(wanted) + 1e-6))
                for p, full in zip(twins.model.parameters(), before, strict=True):
                    twins.close(p.grad.local.reshape(-1), twins.slice_of(p, full * scale), "clipped gradient")
                again = clip(1e9, order)  # nothing remembered from before the scaling
                twins.close(again, wanted * scale, "norm after clipping")
                for p, old in zip(twins.model.parameters(), locals_before, strict=True):
                    p.grad.copy_(old)
    some = [twins.model.out.weight, twins.model.layers[2].gain]
    wanted = torch.stack([twins.clones[0].out.weight.grad.norm(), twins.clones[0].layers[2].gain.grad.norm()]).norm()
    twins.close(nn.utils.clip_grad_norm_(some, 1e9), wanted, "norm of some")
    twins.close(twins.model.out.weight.grad.norm(), twins.clones[0].out.weight.grad.norm(), "norm of one")
    assert len({float(nn.utils.clip_grad_norm_(plain, 1e9, order)) for order in (1, 2, 3.0, INF)}) == 4


def not_finite(strategy: str, lane: str) -> None:
    """One bad number on one rank shows in every rank's norm, of every order."""
    for bad in (float("nan"), INF):
        model: Any = Twins(Net, strategy, lane, units=[Layer]).model
        loss_of(model, dist.get_rank(), 0).backward()
        grad = model.layers[2].processor[0].weight.grad
        if lz.param_info(model.layers[2].processor[0].weight).global_range.stop == 77:
            grad.local.view(-1)[-1] = bad
        for order in (1, 2, INF):
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], order)
            assert norm.isnan() if bad != bad else norm.isinf(), (order, norm)
            with pytest.raises(RuntimeError, match="non-finite"):
                model.clip_grad_norm_(1.0, order, error_if_nonfinite=True)


def refused(strategy: str, lane: str) -> None:
    """Reading or stepping a gradient that is still accumulating is an error; zeroing and going on is not."""
    for carried in (False, True):
        _refused(strategy, lane, carried)


def _refused(strategy: str, lane: str, carried: bool) -> None:
    twins = Twins(Net, strategy, lane, units=[Layer])
    model = twins.model
    if carried:
        twins.each(lambda net, rank: loss_of(net, rank, 0).backward())
    for clone in twins.clones:
        loss_of(clone, twins.clones.index(clone), 1).backward()
    with model.no_sync():
        loss_of(model, twins.rank, 1).backward()
    p = model.out.weight
    assert isinstance(p.grad, GradShard) and p.grad.shape == p.shape and "out.weight" in repr(p.grad)
    makers = [
        lambda ps: torch.optim.AdamW(ps, foreach=False), lambda ps: torch.optim.AdamW(ps, foreach=True),
        lambda ps: torch.optim.AdamW(ps, fused=True), lambda ps: torch.optim.SGD(ps, lr=0.1, foreach=False),
    ]  # fmt: skip
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    uses: list[Any] = [
        lambda: p.grad + 1, lambda: p.grad.norm(), lambda: p.grad.clone(), lambda: p.grad.sum(),
        lambda: p.grad.mul_(0.5), lambda: float(p.grad.view(-1)[0]), lambda: p.grad.tolist(),
        lambda: model.clip_grad_norm_(1.0), lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: torch._foreach_mul_([q.grad for q in model.parameters()], 0.5), lambda: p.grad.local.clone(),
        lambda: scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1)),
        *(make(list(model.parameters())).step for make in makers),
    ]  # fmt: skip
    before = [q.detach().clone() for q in model.parameters()]
    for use in uses:
        with pytest.raises(lz.ShardingError, match=r"not synchronised yet.*no_sync\(\)"):
            use()
    assert all(torch.equal(a, b.detach()) for a, b in zip(before, model.parameters(), strict=True))
    twins.each(lambda net, rank: loss_of(net, rank, 2).backward())
    twins.check_grads(min_nonzero=len(twins.names))


def local_work(strategy: str, lane: str) -> None:
    """Elementwise work on gradients is this rank's, and what would need all ranks says so."""
    twins = Twins(Net, strategy, lane, units=[Layer])
    twins.each(lambda net, rank: loss_of(net, rank, 0).backward())
    twins.average()

    def work(net: Any, rank: int) -> None:
        with torch.no_grad():
            for i, p in enumerate(net.parameters()):
                p.grad.mul_(2.0).clamp_(-0.05, 0.05)
                p.grad += 0.1 * p.grad.sign()
                if i % 2:
                    p.grad = p.grad.detach().clone() * 0.5
            torch._foreach_add_([p.grad for p in net.parameters()], 0.01)

    twins.each(work)
    for p, plain in zip(twins.model.parameters(), twins.clones[twins.rank].parameters(), strict=True):
        local = p.grad.local if isinstance(p.grad, GradShard) else p.grad
        assert plain.grad is not None
        twins.close(local.reshape(-1), twins.slice_of(p, plain.grad), "edited gradient")
    grad = twins.model.inp.weight.grad
    for name in ("sum", "nansum", "prod", "mean", "max", "argmax", "median", "std", "any", "count_nonzero"):
        with pytest.raises(lz.ShardingError, match=r"inp\.weight.*this rank's only"):
            getattr(grad, name)()
    for fn in (torch.var_mean, torch.aminmax, lambda g: torch.dot(g.flatten(), g.flatten())):
        with pytest.raises(lz.ShardingError, match=r"inp\.weight.*this rank's only"):
            fn(grad)
    for order in (2, float("inf"), "nuc"):
        with pytest.raises(lz.ShardingError, match=r"inp\.weight.*norm of a matrix"):
            torch.linalg.norm(grad, order)
    for same in (torch.linalg.norm(grad), torch.linalg.norm(grad, "fro"), torch.norm(grad), grad.norm(2)):
        assert torch.equal(same, torch.linalg.vector_norm(grad, 2)) and same > 0


# ---------------------------------------------------------------------------- loss scaling


def scaled(strategy: str, lane: str, model: str, dtype: str, optimizer: str) -> list[float]:
    """torch's GradScaler, unmodified: an inf on one rank makes all skip, and the scale falls on all alike."""
    build = TinyModel if model == "tiny" else Net
    width = 1 if model == "tiny" else 5
    tol = 2e-5 if dtype == "fp32" else 2e-2
    options = {"units": [nn.Linear if model == "tiny" else Layer]}
    twins = Twins(build, strategy, lane, tol=tol, param_dtype=dtype, **options)
    kwargs = {"fused": {"fused": True}, "loop": {}}[optimizer]
    twins.optimize(lambda ps: torch.optim.AdamW(ps, lr=1e-2, eps=1e-3, **kwargs))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    scales, moved = [], []
    for step in range(6):
        bad = {1: 0, 4: twins.world - 1}.get(step)  # the rank whose data overflows

        def loss_for(net: nn.Module, rank: int, step: int = step, bad: int | None = bad) -> torch.Tensor:
            x = data(rank, step, 4, width)
            return net(x * INF if rank == bad else x).float().pow(2).mean()

        before = [p.detach().clone() for p in twins.model.parameters()]
        model_optimizer = twins.optimizers[-1]
        scaler.scale(loss_for(twins.model, twins.rank)).backward()
        norm = None
        if step % 2 == 0:
            scaler.unscale_(model_optimizer)
            norm = nn.utils.clip_grad_norm_(twins.model.parameters(), 0.05)
        scaler.step(model_optimizer)
        scaler.update()
        model_optimizer.zero_grad()
        scales.append(scaler.get_scale())
        moved.append(any(not torch.equal(a, b.detach()) for a, b in zip(before, twins.model.parameters(), strict=True)))
        if bad is None:
            for rank, clone in enumerate(twins.clones):
                loss_for(clone, rank).backward()
            twins.average()
            for clone, plain_optimizer in zip(twins.clones, twins.optimizers[:-1], strict=True):
                if step % 2 == 0:
                    wanted = nn.utils.clip_grad_norm_(clone.parameters(), 0.05)
                    twins.close(norm, wanted, "norm after unscale_")
                plain_optimizer.step()
                plain_optimizer.zero_grad()
        else:
            assert norm is None or not norm.isfinite()
    holds_some = any(p.numel() for p in twins.model.parameters())
    assert moved == [holds_some and step not in (1, 4) for step in range(6)]
    twins.check_params()
    return scales


def two_optimizers(strategy: str, lane: str) -> None:
    """A second optimizer whose gradients are finite still steps; one over frozen-out ranks' parts does not hang."""
    model: Any = Twins(Net, strategy, lane, units=[Layer]).model
    first = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    second = torch.optim.SGD([model.out.weight, model.out.bias], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(model, dist.get_rank(), 0)).backward()
    with contextlib.suppress(StopIteration):
        if dist.get_rank() == 0:
            next(p for p in model.layers.parameters() if p.grad.local.numel()).grad.view(-1)[0] = INF
    before = [p.detach().clone() for p in model.layers.parameters()]
    out = model.out.weight.detach().clone()
    for optimizer in (first, second):
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(a, b.detach()) for a, b in zip(before, model.layers.parameters(), strict=True))
    assert not out.numel() or not torch.equal(out, model.out.weight.detach())
