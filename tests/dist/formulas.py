"""The tables of ``docs/design.md`` once more, written from parameter sizes alone: what the engine is held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Group:
    """One param group: parameters of one unit with equal ``requires_grad``."""

    unit: str
    used_numel: int
    trainable: bool
    gathers: int
    """In one steady micro-batch: 1 where the unit stays gathered from forward to backward, else 2."""
    kept: bool = False
    """Gathered once per step."""


@dataclass(frozen=True)
class Strategy:
    """Axis sizes, innermost first, and how many of them shard each state."""

    sizes: tuple[int, ...]
    num_params: int
    num_grads: int
    num_optimizer: int
    compute_nbytes: int
    wire_nbytes: int

    def degree(self, num_axes: int) -> int:
        return prod(self.sizes[:num_axes])

    def numel(self, group: Group) -> int:
        """With padding: a multiple on every rank of 64 elements, or less where that is over 0.1 %, at least 8."""
        world = self.degree(len(self.sizes))
        multiple = world * next((a for a in (64, 32, 16) if 1000 * a * world <= group.used_numel), 8)
        return (group.used_numel + multiple - 1) // multiple * multiple

    @property
    def aliased(self) -> bool:
        """fp32 compute at equal degrees: parameters and main parameters are one memory."""
        return self.compute_nbytes == 4 and self.num_params == self.num_optimizer


Traffic = dict[tuple[str, int], tuple[int, int]]
"""(kind, axis) -> (collectives, bytes sent by one rank) in one optimizer step."""


def expected_traffic(groups: Sequence[Group], s: Strategy, micro: int) -> Traffic:
    """Kinds: unshard, refresh, scatter (a reduce-scatter), all-reduce."""
    total: Traffic = {}

    def add(kind: str, axis: int, num: int, nbytes: int) -> None:
        have = total.get((kind, axis), (0, 0))
        total[kind, axis] = (have[0] + num, have[1] + num * nbytes)

    for group in groups:
        for axis, size in enumerate(s.sizes):
            shard = s.numel(group) // s.degree(axis + 1)
            sent = shard * (size - 1)
            if axis < s.num_params:
                add("unshard", axis, 1 if group.kept else micro * group.gathers, sent * s.compute_nbytes)
            if not group.trainable:
                continue
            if s.num_params <= axis < s.num_optimizer:
                add("refresh", axis, 1, sent * s.compute_nbytes)
            if axis < s.num_grads:
                add("scatter", axis, micro, sent * s.wire_nbytes)
            elif axis < s.num_optimizer:
                add("scatter", axis, 1, sent * s.wire_nbytes)
            else:
                whole = s.numel(group) // s.degree(s.num_optimizer)
                add("all-reduce", axis, 1, 2 * (whole // size) * (size - 1) * s.wire_nbytes)
    return total


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, padding included."""

    main: int
    model: int
    main_grad: int
    grad_accum: int


def expected_memory(groups: Sequence[Group], s: Strategy) -> Memory:
    trainable = sum(s.numel(g) for g in groups if g.trainable)
    frozen = sum(s.numel(g) for g in groups if not g.trainable)
    cached = frozen if s.aliased else frozen + trainable
    return Memory(
        main=4 * trainable // s.degree(s.num_optimizer),
        model=s.compute_nbytes * cached // s.degree(s.num_params),
        main_grad=4 * trainable // s.degree(s.num_optimizer),
        grad_accum=4 * trainable // s.degree(s.num_grads),
    )
