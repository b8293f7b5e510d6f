"""Everything that can change the main parameters, and what runs next: the model must see the new values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.dist.twins import Layer, Net, Twins, data, loss_of, no_sync, unsharded

BEFORE = ("nothing", "step", "evaluation", "open forward", "backward", "unsynced backward", "unsharded", "two forwards")
AFTER = ("train", "evaluate, then train")

Mutation = Callable[[Twins], None]


def _train(net: nn.Module, rank: int) -> torch.Tensor:
    loss = loss_of(net, rank, 1)
    loss.backward()
    return loss.detach()


@torch.no_grad()
def _evaluate(net: nn.Module, rank: int) -> torch.Tensor:
    net.eval()
    out = net(data(rank, 2, 4, 5)).float()
    net.train()
    return out


def _open(net: nn.Module, rank: int) -> torch.Tensor:
    return loss_of(net, rank, 3).detach()  # leaves a graph to nobody, the root stays gathered


def _prepare(twins: Twins, before: str) -> None:
    if before == "step":
        twins.each(_train)
        twins.step()
    elif before == "evaluation":
        twins.each(_evaluate)
    elif before == "open forward":
        twins.each(_open)
    elif before == "backward":
        twins.each(_train)
    elif before == "unsynced backward":

        def unsynced(net: Any, rank: int) -> None:
            with no_sync(net):
                _train(net, rank)

        twins.each(unsynced)
    elif before == "unsharded":  # with grad, so that the bytes stay for a backward

        def read(net: Any, rank: int) -> torch.Tensor:
            with unsharded(net, net.layers[1]):
                return net.layers[1].gain.float().sum().detach()

        twins.each(read)
    elif before == "two forwards":
        twins.each(_open)
        twins.each(_open)


def sweep(mutate: Mutation, strategy: str, lane: str, dtype: str, hidden: bool, grows: bool) -> int:
    """``mutate`` in every situation, and every kind of pass after it. Returns the number of passes compared.

    Args:
        hidden: no tensor version shows the mutation on every rank, so it is not looked for between micro-batches.
        grows: start again from the first weights after each comparison.
    """
    twins = Twins(Net, strategy, lane, tol=2e-5 if dtype == "fp32" else 6e-2, units=[Layer], param_dtype=dtype)
    twins.optimize(lambda ps: torch.optim.SGD(ps, lr=0.05))
    num = 0
    for after in AFTER:
        for before in BEFORE:
            if hidden and before == "unsynced backward":
                continue
            _prepare(twins, before)
            old = _evaluate(twins.clones[0], 0)
            mutate(twins)
            new = _evaluate(twins.clones[0], 0)
            assert (old - new).abs().max() > 3 * twins.tol * (1 + new.abs().max()), "too small a change to be seen"
            for what in after.split(", then "):
                twins.each(_train if what == "train" else _evaluate)
                num += 1
            twins.check_grads()
            for net in (*twins.clones, twins.model):
                net.zero_grad()
            if grows:
                twins.each(lambda net, rank: _load(net, 1.0))
    twins.check_params()
    return num


# ---------------------------------------------------------------------------- mutations


class _Factor:
    """1.6 and its inverse in turn, so that numbers stay in range."""

    def __init__(self) -> None:
        self._up = False

    def next(self) -> float:
        self._up = not self._up
        return 1.6 if self._up else 1 / 1.6


def _edits(edit: Callable[[nn.Module, float], None]) -> Mutation:
    factor = _Factor()

    def mutate(twins: Twins) -> None:
        by = factor.next()
        twins.each(lambda net, rank: edit(net, by))

    return mutate


@torch.no_grad()
def _in_place(net: nn.Module, by: float) -> None:
    for p in net.parameters():
        p.mul_(by)


def _through_data(net: nn.Module, by: float) -> None:
    for p in net.parameters():
        p.data.copy_(p.data * by)


@torch.no_grad()
def _where_not_empty(net: nn.Module, by: float) -> None:
    for p in net.parameters():
        if p.numel():
            p.mul_(by)


def _one_through_data(net: Any, by: float) -> None:
    for p in (net.layers[1].gain, net.out.bias):  # small: some ranks hold nothing of them
        if p.numel():
            p.data.add_(by - 1.1)


def _foreach(net: nn.Module, by: float) -> None:
    torch._foreach_mul_([p.detach() for p in net.parameters()], by)


def _unsharded(net: Any, by: float) -> None:
    with unsharded(net), torch.no_grad():
        for p in net.parameters():
            p.mul_(by)


def _unsharded_data(net: Any, by: float) -> None:
    with torch.no_grad(), unsharded(net, net.layers[1]):
        for p in net.layers[1].parameters():
            p.data.mul_(by)
        net.layers[1].gain.data[:2] = by


def _load(net: nn.Module, by: float, prefix: str = "") -> None:
    torch.manual_seed(3)
    state = {prefix + k: v * by for k, v in Net().state_dict().items()}
    target = net if not prefix else nn.ModuleDict({prefix[:-1]: net})
    target.load_state_dict(state)


def _swap(write: Callable[[nn.Parameter, torch.Tensor], None]) -> Mutation:
    """Averaged weights in, evaluate, the others back in, evaluate; what is left is a little edit."""
    factor = _Factor()

    def mutate(twins: Twins) -> None:
        by = factor.next()
        backups = [[p.detach().clone() for p in net.parameters()] for net in (*twins.clones, twins.model)]

        def put(net: nn.Module, rank: int, scale: float) -> None:
            backup = backups[-1 if net is twins.model else rank]
            for p, value in zip(net.parameters(), backup, strict=True):
                write(p, value * scale)

        for scale in (0.5, 1.0, by):
            twins.each(lambda net, rank, s=scale: put(net, rank, s))
            twins.each(_evaluate)

    return mutate


def _write_data(p: nn.Parameter, value: torch.Tensor) -> None:
    p.data.copy_(value)


@torch.no_grad()
def _write_copy(p: nn.Parameter, value: torch.Tensor) -> None:
    p.copy_(value)


class _Foreign:
    """An optimizer that is none of torch's and writes through ``.data``."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params

    def step(self) -> None:
        for p in self.params:
            if p.grad is not None:
                p.data.sub_(p.grad.data.clamp(-0.02, 0.02), alpha=10)

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None


def _steps(make: Callable[[list[nn.Parameter]], Any]) -> Mutation:
    kept: list[Any] = []

    def mutate(twins: Twins) -> None:
        if not kept:
            kept.extend(make(list(net.parameters())) for net in (*twins.clones, twins.model))
        for net in (*twins.clones, twins.model):
            net.zero_grad()
        twins.each(_train)
        twins.average()
        for optimizer in kept:
            optimizer.step()
            optimizer.zero_grad()

    return mutate


def _adamw(**how: Any) -> Mutation:
    # A large epsilon: where a gradient is nearly zero, its rounding must not decide the step.
    return _steps(lambda ps: torch.optim.AdamW(ps, lr=0.5, eps=0.05, weight_decay=0.1, **how))


MUTATIONS: dict[str, Callable[[], Mutation]] = {
    "adamw": _adamw,
    "adamw foreach": lambda: _adamw(foreach=True),
    "adamw fused": lambda: _adamw(fused=True),
    "sgd": lambda: _steps(lambda ps: torch.optim.SGD(ps, lr=3.0)),
    "foreign optimizer": lambda: _steps(_Foreign),
    "in place": lambda: _edits(_in_place),
    "through data": lambda: _edits(_through_data),
    "where not empty": lambda: _edits(_where_not_empty),
    "one through data": lambda: _edits(_one_through_data),
    "foreach": lambda: _edits(_foreach),
    "unsharded": lambda: _edits(_unsharded),
    "unsharded data": lambda: _edits(_unsharded_data),
    "load": lambda: _edits(_load),
    "load into a parent": lambda: _edits(lambda net, by: _load(net, by, "net.")),
    "swap by data": lambda: _swap(_write_data),
    "swap by copy": lambda: _swap(_write_copy),
}


HIDDEN = ("through data", "where not empty", "one through data")
STEPS = ("adamw", "adamw foreach", "adamw fused", "sgd", "foreign optimizer")


def mutation(name: str, strategy: str, lane: str, dtype: str) -> int:
    return sweep(MUTATIONS[name](), strategy, lane, dtype, hidden=name in HIDDEN, grows=name in STEPS)


def frozen_edit(strategy: str, lane: str) -> int:
    """Frozen parameters, edited in several ways between two micro-batches of one step; how many ways."""

    def build() -> Net:
        net = Net()
        net.layers[1].requires_grad_(False)
        return net

    twins = Twins(build, strategy, lane, units=[Layer])

    @torch.no_grad()
    def in_place(net: Any) -> None:
        for p in net.layers[1].parameters():
            p.mul_(1.5)

    def load(net: Any) -> None:
        _load(net, 0.7)

    def unsharded_edit(net: Any) -> None:
        with unsharded(net, net.layers[1]), torch.no_grad():
            net.layers[1].gain.mul_(1.5)

    def freeze(net: Any) -> None:
        net.layers[0].gain.requires_grad_(False).mul_(1.5)
        net.layers[0].gain.requires_grad_(True)

    edits = (in_place, load, unsharded_edit, freeze)
    for edit in edits:
        with contextlib.ExitStack() as stack:
            for net in (*twins.clones, twins.model):
                stack.enter_context(no_sync(net))
            twins.each(_train)
            old = _evaluate(twins.clones[0], 0)
            twins.each(lambda net, rank, edit=edit: edit(net))
            assert not torch.allclose(old, _evaluate(twins.clones[0], 0))
            twins.each(_train)
        twins.each(_train)
        twins.check_grads()
        for net in (*twins.clones, twins.model):
            net.zero_grad()
    return len(edits)
