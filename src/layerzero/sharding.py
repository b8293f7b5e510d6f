"""Degrees, named strategies and rank axes. Pure integers: no torch, no processes.

[Note: vocabulary]
A *degree* is the number of consecutive data-parallel ranks over which one of the three model states
(parameters, gradients, optimizer states) is sharded. An *axis* is one link of the divisibility chain
``1 | ... | N`` made of the degrees, the node size and the data-parallel size ``N``; axes are listed
innermost (consecutive ranks, fastest link) first, so every degree is a prefix of the axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from layerzero.errors import ConfigError

Degree = int | Literal["all"]
"""A positive number of ranks, or ``"all"`` for the whole data-parallel group."""

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp", "mics", "layerzero")


@dataclass(frozen=True)
class Sharding:
    """How many consecutive data-parallel ranks share each model state.

    Attributes:
        params: degree of the compute-dtype parameters that persist between units.
        grads: degree of the gradients accumulated between micro-batches.
        optimizer: degree of the fp32 main parameters and the optimizer states.
    """

    params: Degree
    grads: Degree
    optimizer: Degree

    def __post_init__(self) -> None:
        for name in ("params", "grads", "optimizer"):
            degree = getattr(self, name)
            if degree != "all" and (not isinstance(degree, int) or isinstance(degree, bool) or degree < 1):
                raise ConfigError(f'sharding degree {name}: expected a positive int or "all", got {degree!r}')

    @classmethod
    def ddp(cls) -> Sharding:
        """Everything replicated."""
        return cls(1, 1, 1)

    @classmethod
    def zero1(cls) -> Sharding:
        """Optimizer states over all ranks (Rajbhandari et al., 2020)."""
        return cls(1, 1, "all")

    @classmethod
    def zero2(cls) -> Sharding:
        """Gradients and optimizer states over all ranks."""
        return cls(1, "all", "all")

    @classmethod
    def zero3(cls) -> Sharding:
        """All three states over all ranks; FSDP's full shard."""
        return cls("all", "all", "all")

    @classmethod
    def hsdp(cls, size: int) -> Sharding:
        """All three states over ``size`` consecutive ranks, replicated outside."""
        return cls(size, size, size)

    @classmethod
    def mics(cls, size: int) -> Sharding:
        """MiCS (Zhang et al., 2022): the same degrees as :meth:`hsdp`."""
        return cls.hsdp(size)

    @classmethod
    def layerzero(cls, zero3_size: int, accumulate: Literal["shard", "full"] = "shard") -> Sharding:
        """Hierarchical ZeRO: parameters in a ZeRO-3 group, optimizer states over all ranks.

        ``accumulate="full"`` keeps full gradients between micro-batches, as MindSpeed does.
        """
        return cls(zero3_size, 1 if accumulate == "full" else zero3_size, "all")

    @classmethod
    def named(cls, name: str, size: int, accumulate: Literal["shard", "full"] = "shard") -> Sharding:
        """The strategy ``name`` with ``size`` ranks in its inner group, where it has one.

        Raises:
            ConfigError: if there is no such strategy.
        """
        if name not in STRATEGIES:
            raise ConfigError(f"unknown strategy {name!r}: expected one of {', '.join(STRATEGIES)}")
        takes_size = name in ("hsdp", "mics", "layerzero")
        sharding: Sharding = getattr(cls, name)(size) if takes_size else getattr(cls, name)()
        return cls(sharding.params, 1, sharding.optimizer) if accumulate == "full" else sharding

    def resolve(self, world_size: int, node_size: int | None = None) -> Axes:
        """The axes of a data-parallel group of ``world_size`` ranks.

        Raises:
            ConfigError: if the degrees, ``node_size`` and ``world_size`` form no divisibility chain, or
                if parameters or gradients are sharded over more ranks than optimizer states.
        """
        degrees = {n: world_size if d == "all" else d for n, d in vars(self).items()}
        links = {**degrees, "data-parallel size": world_size}
        if node_size is not None:
            links["node_size"] = node_size
        chain = sorted({1, *links.values()})
        for inner, outer in pairwise(chain):
            if outer % inner:
                names = {v: " = ".join(k for k in links if links[k] == v) for v in chain}
                raise ConfigError(
                    f"{names[inner]} = {inner} must divide {names[outer]} = {outer}. The degrees, the node size "
                    f"and the data-parallel size have to form a divisibility chain, for example 1 | 8 | 64; got "
                    f"{' | '.join(map(str, chain))}. Change zero3_size or node_size, or use another number of ranks."
                )
        if chain[-1] != world_size:
            names = ", ".join(f"{k} = {v}" for k, v in links.items() if v > world_size)
            raise ConfigError(
                f"{names} is larger than the data-parallel group of {world_size} ranks: "
                f"lower zero3_size, node_size or the degrees in sharding, or start more ranks"
            )
        for name in ("params", "grads"):
            if degrees[name] > degrees["optimizer"]:
                raise ConfigError(
                    f"{name} degree {degrees[name]} exceeds optimizer degree {degrees['optimizer']}: "
                    f"a rank would update parameters it does not hold. Raise the optimizer degree."
                )
        sizes = tuple(outer // inner for inner, outer in pairwise(chain))
        return Axes(sizes, *(chain.index(degrees[n]) for n in ("params", "grads", "optimizer")))


@dataclass(frozen=True)
class Axes:
    """Axis sizes of a data-parallel group, innermost first, and the prefix each state is sharded on.

    Rank 5 of ``sizes=(2, 4)`` sits at ``coordinates(5) == (1, 2)``::

        axis 1 (outer)   0       1       2       3
        axis 0 (inner) [0 1]   [2 3]   [4 5]   [6 7]

    Attributes:
        sizes: ranks along each axis, each at least 2; empty for one rank.
        num_params, num_grads, num_optimizer: how many leading axes shard that state.
    """

    sizes: tuple[int, ...]
    num_params: int
    num_grads: int
    num_optimizer: int

    def __post_init__(self) -> None:
        assert all(size >= 2 for size in self.sizes), self.sizes
        assert 0 <= self.num_params <= self.num_optimizer <= len(self.sizes), self
        assert 0 <= self.num_grads <= self.num_optimizer, self

    @property
    def world_size(self) -> int:
        """Ranks in the data-parallel group."""
        return self.degree(len(self.sizes))

    def degree(self, num_axes: int) -> int:
        """Ranks over which a state sharded on the first ``num_axes`` axes is spread."""
        product = 1
        for size in self.sizes[:num_axes]:
            product *= size
        return product

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Position of data-parallel ``rank`` on every axis."""
        coordinates = []
        for size in self.sizes:
            coordinates.append(rank % size)
            rank //= size
        return tuple(coordinates)

    def neighbours(self, rank: int, axis: int) -> tuple[int, ...]:
        """Data-parallel ranks that differ from ``rank`` on ``axis`` only, in coordinate order."""
        stride = self.degree(axis)
        first = rank - self.coordinates(rank)[axis] * stride
        return tuple(first + i * stride for i in range(self.sizes[axis]))
