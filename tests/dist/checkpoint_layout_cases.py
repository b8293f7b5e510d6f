"""One model as a single process, over tensor-, context-, data- and pipeline-parallel ranks, through checkpoints."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import layerzero as lz
from layerzero.parallel.context import ContextParallel, ulysses_attention
from tests.dist.pipeline_cases import Stages, group_of, mesh_of
from tests.dist.tensor_cases import adam
from tests.dist.transformer import DIM, HEADS, Attention, Layer, batch_for, loss_of_logits, make_transformer, parallelize

PARTS = [(rank, micro) for rank in range(2) for micro in range(2)]  # of every step's batch


def rows_for(step: int, share: int, shares: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and next tokens of one of ``shares`` equal parts of a step's batch."""
    each = len(PARTS) // shares
    parts = [batch_for(step, *part) for part in PARTS[share * each : (share + 1) * each]]
    tokens, targets = (torch.cat(rows) for rows in zip(*parts, strict=True))
    return tokens, targets


class ContextAttention(Attention):
    """The same attention over sequences cut over context-parallel ranks."""

    context: ContextParallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, DIM // HEADS)) for f in (self.q, self.k, self.v))
        length = x.size(1) * self.context.size
        return self.o(ulysses_attention(q, k, v, self.context, length=length, is_causal=True).flatten(2))


class Plain:
    """Data parallel, with tensor or context parallel ranks inside."""

    def __init__(self, seed: int, *, tp: int = 1, cp: int = 1, sharding: Any) -> None:
        self.model = make_transformer(seed)
        self.mesh = lz.ParallelMesh(tp=tp, cp=cp)
        if self.mesh.tp is not None:
            parallelize(self.model, self.mesh.tp, sequence=True)
        self.context = ContextParallel.of(self.mesh)
        for layer in self.model.layers.values() if cp > 1 else ():
            layer.attention.__class__ = ContextAttention
            layer.attention.context = self.context
        lz.shard(self.model, mesh=self.mesh, units=[Layer], sharding=sharding)
        self.optimizer = adam(self.model)

    @property
    def modules(self) -> list[nn.Module]:
        return [self.model]

    def step(self, step: int) -> float:
        rows = rows_for(step, self.mesh.coordinate("dp"), self.mesh.size("dp"))
        inputs, targets = (self.context.split(part, 1) for part in rows)
        loss = loss_of_logits(self.model(inputs), targets)
        loss.backward()
        self._update()
        return mean_over(loss.detach(), self.mesh.zero1.get_group())

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Piped:
    """Two pipeline stages on every rank's pipeline, data parallel outside."""

    def __init__(self, seed: int, *, data: int, sharding: Any, tied: bool = False, tensor: bool = False) -> None:
        mesh = mesh_of(2, data)
        self.data_rank, self.data = mesh.coordinate("dp"), data
        self.group = group_of(mesh)
        self.stages = Stages(
            make_transformer(seed), mesh, micro=2, tied=tied, sequence=True if tensor else None, sharding=sharding
        )
        self.optimizer = self.stages.optimizer
        self.data_group = mesh.zero1.get_group()

    @property
    def modules(self) -> list[nn.Module]:
        return self.stages.modules

    def step(self, step: int) -> float:
        tokens, targets = rows_for(step, self.data_rank, self.data)
        losses: list[torch.Tensor] = []
        self.stages.pipeline.step(
            *((tokens,) if self.stages.has_first else ()), target=targets if self.stages.has_last else None,
            losses=losses,
        )  # fmt: skip
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.all_reduce(loss, op=dist.ReduceOp.SUM, group=self.group)  # the first stage has none
        return mean_over(loss, self.data_group)


def mean_over(value: torch.Tensor, group: Any) -> float:
    total = value.clone()
    dist.all_reduce(total, group=group)
    return total.item() / dist.get_world_size(group)


def make(layout: str, seed: int) -> Plain | Piped:
    zero = lz.Sharding.layerzero
    return {
        "one": lambda: Plain(seed, sharding="zero3"),
        "dp4": lambda: Plain(seed, sharding=zero(2)),
        "cp4": lambda: Plain(seed, cp=4, sharding=zero(2)),
        "tp2 dp2": lambda: Plain(seed, tp=2, sharding=zero(1)),
        "tp2 cp1 zero3": lambda: Plain(seed, tp=2, sharding="zero3"),
        "pp2 dp2": lambda: Piped(seed, data=2, sharding=zero(2)),
        "pp2 dp2 tied": lambda: Piped(seed, data=2, sharding="zero3", tied=True),
        "pp2 tp2 dp2": lambda: Piped(seed, data=2, sharding="zero1", tensor=True),
    }[layout]()


def train_and_save(layout: str, folder: str) -> float:
    run = make(layout, seed=0)
    for step in range(2):
        run.step(step)
    lz.save(folder, run.modules, run.optimizer)
    return run.step(2)


def load_save_and_step(layouts: list[str], source: str, folder: str) -> list[float]:
    """Next-step loss of every layout after loading; what each loaded is saved again."""
    losses = []
    for layout in layouts:
        run = make(layout, seed=99)
        with contextlib.ExitStack():
            loaded = lz.load(source, run.modules, run.optimizer)
        assert loaded.missing == loaded.unexpected == ()
        lz.save(f"{folder}/{layout}", run.modules, run.optimizer)
        losses.append(run.step(2))
    return losses
