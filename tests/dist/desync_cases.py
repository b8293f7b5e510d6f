"""A unit whose forward runs on some ranks of its ZeRO-3 group only. The process is lost after: each case runs once."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist

import layerzero as lz
from tests.dist.twins import Layer, Net, Twins, data, loss_of, no_sync


class Skipping(Net):
    """Skips some layers where told so."""

    skip: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for i, layer in enumerate(self.layers):
            if i not in self.skip:
                x = layer(x)
        return self.out(x)


def skipped(
    strategy: str, lane: str, which: int, after: int, micro: bool, options: dict[str, Any], catch: bool = True
) -> str:
    """Rank 1 skips a unit from step ``after`` on. Returns the error, which has to come at once and on every rank."""
    twins = Twins(Skipping, strategy, lane, units=[Layer], **options)
    model, rank = twins.model, dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(after + 3):
            model.skip = (which,) if rank == 1 and step >= after else ()
            if micro:
                with no_sync(model):
                    loss_of(model, rank, step).backward()
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    except lz.DesyncError as error:
        assert step == after, (step, after)
        if not catch:  # the process ends, and with it its connections to the others
            raise
        return str(error)
    return "no error"


def dummy_call(strategy: str, lane: str) -> None:
    """What the error advises works: call the unit with dummy input, times zero."""

    class Advised(Skipping):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inp(x)
            for i, layer in enumerate(self.layers):
                x = x + layer(x[:1] * 0) * 0 if i in self.skip else layer(x)
            return self.out(x)

    twins = Twins(Advised, strategy, lane, units=[Layer], desync_check=True)

    def script(net: Any, rank: int) -> None:
        net.skip = (rank % 3,)
        loss_of(net, rank, 0).backward()

    twins.train(script, steps=4)


def eval_skipped(strategy: str, lane: str) -> str:
    """The same in evaluation: rank 0 evaluates with other layers than the rest."""
    twins = Twins(Skipping, strategy, lane, units=[Layer])
    twins.model.skip = (1,) if dist.get_rank() == 0 else ()
    with contextlib.suppress(StopIteration), torch.no_grad():
        try:
            twins.model(data(0, 0, 4, 5))
            twins.model(data(0, 1, 4, 5))
        except lz.DesyncError as error:
            return str(error)
    return "no error"
