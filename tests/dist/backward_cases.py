"""Forwards and backwards in any legal order, and gradients that exist on some ranks only."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
from torch import nn

import layerzero as lz
from layerzero import reducer
from tests.dist.twins import Layer, Net, Twins, data, loss_of, no_sync


def twins_of(strategy: str, lane: str, build: Any = Net, **options: Any) -> Twins:
    return Twins(build, strategy, lane, **{"units": [Layer], **options})


# ---------------------------------------------------------------------------- orders


def several_forwards(strategy: str, lane: str) -> None:
    """Three forwards, then one backward of their sum; then one backward each, in both orders, without no_sync."""
    twins = twins_of(strategy, lane)

    def summed(net: Any, rank: int) -> None:
        sum(loss_of(net, rank, s) for s in range(3)).backward()  # type: ignore[union-attr]

    def in_order(net: Any, rank: int) -> None:
        losses = [loss_of(net, rank, s) for s in range(3)]
        for loss in losses:
            loss.backward()

    def reversed_order(net: Any, rank: int) -> None:
        losses = [loss_of(net, rank, s) for s in range(3)]
        for loss in reversed(losses):
            loss.backward()

    for script in (summed, in_order, reversed_order):
        twins.train(script)


def interleaved(strategy: str, lane: str) -> None:
    """One-forward-one-backward with two in flight; only the last backward is synchronised."""
    twins = twins_of(strategy, lane)

    def script(net: Any, rank: int) -> None:
        with no_sync(net):
            waiting = [loss_of(net, rank, 0)]
            for s in range(1, 4):
                waiting.append(loss_of(net, rank, s))
                waiting.pop(0).backward()
        waiting.pop().backward()

    twins.train(script, steps=3)


def interleaved_from_the_start(strategy: str, lane: str) -> None:
    """F F B F B B, the first iteration included, with frozen parameters and an unused one in the units."""

    class Partly(Layer):
        def __init__(self, dim: int, hidden: int) -> None:
            super().__init__(dim, hidden)
            self.processor[0].requires_grad_(False)
            self.unused = nn.Parameter(torch.ones(3))

    def build() -> nn.Module:
        net = Net()
        net.layers = nn.ModuleList([Partly(7, 11) for _ in range(3)])
        return net

    twins = twins_of(strategy, lane, build)

    def script(net: Any, rank: int) -> None:
        with no_sync(net):
            a, b = loss_of(net, rank, 0), loss_of(net, rank, 1)
            a.backward()
            c = loss_of(net, rank, 2)
            b.backward()
        c.backward()

    twins.train(script, steps=3, make=lambda ps: torch.optim.SGD(ps, lr=0.1))


def retained_graph(strategy: str, lane: str) -> None:
    """Two backwards through one graph, synchronised or not."""
    twins = twins_of(strategy, lane)

    def synced(net: Any, rank: int) -> None:
        loss = loss_of(net, rank, 0)
        loss.backward(retain_graph=True)
        loss.backward()

    def first_unsynced(net: Any, rank: int) -> None:
        loss = loss_of(net, rank, 0)
        with no_sync(net):
            loss.backward(retain_graph=True)
        (2 * loss).backward()

    def parts(net: Any, rank: int) -> None:
        out = net(data(rank, 3, 4, 5))
        out[:, 0].pow(2).mean().backward(retain_graph=True)
        out[:, 1:].abs().mean().backward()

    for script in (synced, first_unsynced, parts):
        twins.train(script)


class Twice(Net):
    """The second layer runs three times, the last unit twice in a row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.layers
        return self.out(c(c(b(a(b(a(b(self.inp(x)))))))))


def used_twice(strategy: str, lane: str) -> None:
    """A module several times in one forward, plain and in several forwards in flight."""
    twins = twins_of(strategy, lane, Twice)

    def script(net: Any, rank: int) -> None:
        with no_sync(net):
            one, two = loss_of(net, rank, 0), loss_of(net, rank, 1)
            one.backward()
        two.backward()

    twins.train(lambda net, rank: loss_of(net, rank, 5).backward(), steps=2)
    twins.train(script, steps=2)


def evaluation_between(strategy: str, lane: str) -> None:
    """Evaluation between forward and backward, in training mode and not, and forwards never followed by a backward."""
    twins = twins_of(strategy, lane)

    def script(net: Any, rank: int) -> torch.Tensor:
        loss = loss_of(net, rank, 0)
        with torch.no_grad():
            aside = loss_of(net, rank, 1)
        net.eval()
        with torch.inference_mode():
            aside = aside + loss_of(net, rank, 2)
        net.train()
        loss_of(net, rank, 3)
        loss.backward()
        return aside

    twins.train(script, steps=3)


def raises_midway(strategy: str, lane: str) -> None:
    """An exception in a user's forward or backward, on every rank; then training goes on correctly."""
    twins = twins_of(strategy, lane)

    def good(net: Any, rank: int) -> None:
        loss_of(net, rank, 0).backward()

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError("in backward")

    def bad_forward(*_: Any) -> None:
        raise ZeroDivisionError("in forward")

    twins.train(good)
    for attempt in range(2):
        for sync in (True, False):
            place = twins.model.layers[1].processor
            handle = place.register_forward_pre_hook(bad_forward)
            with contextlib.suppress(ZeroDivisionError):
                loss_of(twins.model, twins.rank, 1)
                raise AssertionError("nothing was raised")
            handle.remove()
            handle = place.register_forward_hook(lambda m, a, out: Broken.apply(out))
            with contextlib.suppress(ZeroDivisionError), contextlib.ExitStack() as stack:
                if not sync:
                    stack.enter_context(twins.model.no_sync())
                loss_of(twins.model, twins.rank, 2).backward()
                raise AssertionError("nothing was raised")
            handle.remove()
            assert [lz.param_info(p).fqn for p in twins.model.parameters()] == twins.names  # at rest again
            twins.check_params()
            for optimizer in twins.optimizers:
                optimizer.zero_grad()
            twins.train(good, steps=1 + attempt)


# ---------------------------------------------------------------------------- accumulation


def two_losses(strategy: str, lane: str) -> None:
    """Synchronised backwards accumulate until zero_grad, over losses and over steps without zero_grad."""
    twins = twins_of(strategy, lane)

    def script(net: Any, rank: int) -> None:
        loss_of(net, rank, 0).backward()
        loss_of(net, rank, 1).backward()

    twins.train(script)
    twins.each(script)
    twins.step(zero=False)
    twins.check_grads()
    twins.each(lambda net, rank: loss_of(net, rank, 2).backward())
    for clone in twins.clones:  # what `step` left is the mean already
        assert all(p.grad is not None for p in clone.parameters())
    twins.check_grads()


def unsynced_first(strategy: str, lane: str) -> None:
    """no_sync before the first forward, nested, and around forwards or backwards only."""
    twins = twins_of(strategy, lane)

    def outer_first(net: Any, rank: int) -> None:
        with no_sync(net):
            with no_sync(net):
                loss_of(net, rank, 0).backward()
            loss_of(net, rank, 1).backward()
        loss_of(net, rank, 2).backward()

    def around_the_backward(net: Any, rank: int) -> None:
        loss = loss_of(net, rank, 3)
        with no_sync(net):
            loss.backward()
            later = loss_of(net, rank, 4)
        later.backward()

    def around_an_exception(net: Any, rank: int) -> None:
        with contextlib.suppress(KeyError), no_sync(net):
            raise KeyError
        loss_of(net, rank, 5).backward()

    for script in (outer_first, around_the_backward, around_an_exception):
        twins.train(script, steps=2)


def zeroing(strategy: str, lane: str) -> None:
    """Zeroing between unsynchronised and synchronised backwards starts fresh, for all parameters or for some."""
    twins = twins_of(strategy, lane)
    twins.optimize(lambda ps: torch.optim.SGD(ps, lr=0.1))

    def zero(net: Any, how: str) -> None:
        for name, p in net.named_parameters():
            if how == "some" and "layers.1" not in name and "norm" not in name and name != "out.weight":
                continue
            if how in ("none", "some"):
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()

    def script(net: Any, rank: int, how: str, before: bool, between: int) -> None:
        if before:
            loss_of(net, rank, 9).backward()  # a synchronised gradient that is never stepped
        with no_sync(net):
            for s in range(between):
                loss_of(net, rank, s).backward()
        zero(net, how)
        with no_sync(net):
            loss_of(net, rank, 3).backward()
        loss_of(net, rank, 4).backward()

    for how in ("none", "zero", "some"):
        for before in (False, True):
            for between in (0, 1, 2):
                twins.each(lambda net, rank, h=how, b=before, n=between: script(net, rank, h, b, n))
                twins.check_grads(min_nonzero=len(twins.names))
                twins.step()
    for set_to_none in (True, False):
        for how in ("optimizer", "module"):
            twins.each(lambda net, rank: script(net, rank, "nothing", False, 2))
            for net, optimizer in zip([*twins.clones, twins.model], twins.optimizers, strict=True):
                (optimizer if how == "optimizer" else net).zero_grad(set_to_none=set_to_none)
            twins.each(lambda net, rank: script(net, rank, "nothing", False, 1))
            twins.check_grads(min_nonzero=len(twins.names))
            twins.step()
    twins.check_params()


# ---------------------------------------------------------------------------- missing gradients


class Branchy(Layer):
    """Which parts run is chosen from outside."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(dim, hidden)
        self.extra = nn.Linear(dim, dim)
        self.never = nn.Parameter(torch.ones(5))
        self.use_extra = True
        self.factor = 1.0
        self.detach = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.use_extra:
            y = y + self.extra(x)
        if self.detach:
            y = y.detach()
        return x + self.factor * (y - x)


class BranchyNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Branchy(7, 11) for _ in range(4)])
        self.aside = nn.Linear(7, 7)
        self.use_aside = True
        self.order = [0, 1, 2, 3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for i in self.order:
            x = self.layers[i](x)
        if self.use_aside:
            x = x + self.aside(x)
        return self.out(x)


def sgd(ps: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(ps, lr=0.1)


def rank_dependent_parts(strategy: str, lane: str) -> None:
    """Parts of units, and of the root, that run on some ranks only; other ones in every step."""
    twins = twins_of(strategy, lane, BranchyNet, units=[Branchy])
    twins.optimize(sgd)
    for step in range(6):

        def script(net: Any, rank: int, step: int = step) -> None:
            for micro in range(2):
                for i, layer in enumerate(net.layers):
                    layer.use_extra = (rank + i + step + micro) % 3 != 0
                net.use_aside = (rank + step) % 2 == 0
                with no_sync(net) if micro == 0 else contextlib.nullcontext():
                    loss_of(net, rank, 10 * step + micro).backward()

        twins.each(script)
        twins.check_grads()
        twins.step()
    twins.check_params()


class Experts(nn.Module):
    """Runs the experts it is told."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.shared = nn.Linear(dim, dim)
        self.experts = nn.ModuleList([nn.Linear(dim, dim) for _ in range(3)])
        self.chosen = [0, 1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.shared(x)
        for i in self.chosen:
            y = y + self.experts[i](x)
        return torch.tanh(y)


class ExpertsNet(BranchyNet):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts(7) for _ in range(4)])


def _train_experts(strategy: str, lane: str, orders: list[list[int]], all_until: int, **options: Any) -> None:
    with mock.patch.object(reducer, "PATIENCE", 0.1):
        twins = twins_of(strategy, lane, ExpertsNet, units=[Experts], **options)
    twins.optimize(sgd)
    for step in range(all_until + 2 * len(orders)):

        def script(net: Any, rank: int, step: int = step) -> None:
            net.order = orders[step % len(orders)]
            for layer in net.layers:
                layer.chosen = [0, 1, 2] if step < all_until or rank % 2 == 0 else [0]
            loss_of(net, rank, step).backward()

        twins.each(script)
        twins.check_grads()
        twins.step()
    twins.check_params()


def unused_on_one_rank(strategy: str, lane: str) -> None:
    """One rank learns only at the end of its backward that units have all their gradients; others need not wait."""
    _train_experts(strategy, lane, [[0, 1, 2, 3]], all_until=0)
    _train_experts(strategy, lane, [[0, 1, 2, 3]], all_until=3)


def unused_on_one_rank_in_changing_order(strategy: str, lane: str) -> None:
    """The same with units that run twice, or not as recorded: ranks have to gather alike."""
    for prefetch in ("BACKWARD_PRE", "BACKWARD_POST"):
        for orders in ([[0, 1, 0, 3]], [[0, 1, 2, 3], [0, 2, 1, 3], [0, 3, 0], [3, 1, 2, 1]]):
            _train_experts(strategy, lane, orders, all_until=3, desync_check=True, backward_prefetch=prefetch)


def ignored_outputs(strategy: str, lane: str) -> None:
    """A unit's forward runs on every rank, but its output is multiplied by zero, detached or dropped on some."""
    twins = twins_of(strategy, lane, BranchyNet, units=[Branchy])
    twins.optimize(sgd)
    for step in range(6):

        def script(net: Any, rank: int, step: int = step) -> None:
            for i, layer in enumerate(net.layers):
                layer.factor = float((rank + i + step) % 2)
                layer.detach = (rank + i + step) % 4 == 3
            loss = loss_of(net, rank, step)
            if loss.requires_grad:
                loss.backward()

        twins.each(script)
        twins.check_grads()
        twins.step()
    twins.check_params()


def changing_order(strategy: str, lane: str) -> None:
    """Units run in another order in every step, and some are skipped on all ranks in some steps."""
    twins = twins_of(strategy, lane, BranchyNet, units=[Branchy])
    twins.optimize(sgd)
    orders = [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0], [0, 1, 2, 3], [1, 1, 3, 0], [], [3, 0, 1, 2], [0, 1, 2, 3]]
    for step, order in enumerate(orders):

        def script(net: Any, rank: int, order: list[int] = order, step: int = step) -> Any:
            net.order = order
            net.use_aside = step % 2 == 0
            with torch.no_grad():
                value = loss_of(net, rank, step)
            with no_sync(net):
                loss_of(net, rank, step).backward()
            loss_of(net, rank, step + 20).backward()
            return value

        twins.each(script)
        twins.check_grads()
        twins.step()
    twins.check_params()


def skipped_by_a_replica(strategy: str, lane: str) -> None:
    """A whole ZeRO-3 group may skip a unit that others run: nothing is gathered between groups."""
    twins = twins_of(strategy, lane, BranchyNet, units=[Branchy])
    twins.optimize(sgd)
    for step in range(4):

        def script(net: Any, rank: int, step: int = step) -> None:
            group = rank // 2
            net.order = [i for i in range(4) if (i + step + group) % 3]
            loss_of(net, rank, step).backward()

        twins.each(script)
        twins.check_grads()
        twins.step()
    twins.check_params()


def zeroing_one_unit(strategy: str, lane: str) -> None:
    """The same with a single unit: its earlier reduction may still be under way when the next one starts."""
    twins = Twins(lambda: nn.Linear(5, 3), strategy, lane)
    twins.optimize(sgd)
    for how in ("none", "zero"):

        def script(net: Any, rank: int, how: str = how) -> None:
            with no_sync(net):
                loss_of(net, rank, 0).backward()
            for p in net.parameters():
                if how == "none":
                    p.grad = None
                else:
                    p.grad.zero_()
            with no_sync(net):
                loss_of(net, rank, 1).backward()
            loss_of(net, rank, 2).backward()

        twins.each(script)
        twins.check_grads(min_nonzero=2)
        twins.step()
    twins.check_params()


class Forces(Net):
    """Runs a backward inside its forward, and needs its parameters after it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        where = x.detach().requires_grad_()
        with torch.enable_grad():
            (force,) = torch.autograd.grad(super().forward(where).sum(), where)
        return super().forward(x + force.detach())


def backward_inside_forward(strategy: str, lane: str) -> None:
    twins = twins_of(strategy, lane, Forces)

    def script(net: Any, rank: int) -> None:
        with no_sync(net):
            loss_of(net, rank, 0).backward()
        loss_of(net, rank, 1).backward()

    twins.train(script)


class InPlace(nn.Module):
    """Adds to its input, which it returns in a tuple, as layers of language models do."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        x += self.down(torch.tanh(self.up(torch.tanh(x))))
        return x, None


class InPlaceNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([InPlace(7, 11) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x, _ = layer(x)
        return self.out(x)


def in_place(strategy: str, lane: str) -> None:
    """An input that a unit modified in place is an output of it."""
    twins_of(strategy, lane, InPlaceNet, units=[InPlace]).train(lambda net, rank: loss_of(net, rank, 0).backward())


class Detached(nn.Module):
    """Its first operation needs a weight in backward that has its gradient by then."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim) / dim**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x @ self.weight.detach()) @ self.weight)


class DetachedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Detached(7) for _ in range(3)])


def detached_weight(strategy: str, lane: str) -> None:
    twins = twins_of(strategy, lane, DetachedNet, units=[Detached])
    twins.train(lambda net, rank: loss_of(net, rank, 0).backward())
