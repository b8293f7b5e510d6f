"""Where every parameter lies in a param group's flat buffer, and which slice each rank holds. Pure integers.

[Note: mixed radix]
A buffer of ``numel`` elements is cut along the axes with the *innermost axis most significant*: the slice
at coordinates ``(c1, c2, ...)`` of axes ``(a1, a2, ...)`` starts at ``c1*n/a1 + c2*n/(a1*a2) + ...``.
Slices nest: the slice on ``k + 1`` axes lies inside the slice on ``k`` axes. Gathering the outer axis
first therefore yields one contiguous piece, and gathering the inner axis then yields the whole buffer in
place, so an unsharded parameter is a view and never a copy::

    axes (2, 2), numel 8     |        c1 = 0         |        c1 = 1         |
                             | c2 = 0    | c2 = 1    | c2 = 0    | c2 = 1    |
    elements                   0  1        2  3        4  5        6  7
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod

from layerzero.sharding import Axes

ALIGNMENT = 64
"""Elements that every rank's slice is a multiple of where that costs little: 128 bytes of bf16."""

MIN_ALIGNMENT = 8
"""The same where parameters are few or ranks many: 16 bytes of bf16, one vector load."""


def alignment(numel: int, world_size: int) -> int:
    """The largest power of two up to `ALIGNMENT` that pads ``numel`` elements by 0.1 % at most, if any does."""
    fits = [a for a in (64, 32, 16) if a * world_size * 1000 <= numel]
    return fits[0] if fits else MIN_ALIGNMENT


@dataclass(frozen=True)
class Range:
    """Half-open range of elements."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements, 0 when empty."""
        return max(0, self.stop - self.start)

    def intersect(self, other: Range) -> Range:
        """Common part; an empty range when there is none."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))

    def shift(self, offset: int) -> Range:
        """The same range counted from ``-offset``."""
        return Range(self.start + offset, self.stop + offset)


@dataclass(frozen=True)
class TensorParallel:
    """How one parameter lies over the ranks of a tensor-parallel group.

    Attributes:
        dim: dim of the whole parameter that is cut; None when every rank holds all of it.
        rank: this process's tensor-parallel rank.
        size: tensor-parallel ranks.
    """

    dim: int | None
    rank: int
    size: int

    def indices(self, shape: Sequence[int]) -> Range:
        """Indices along `dim` of the whole parameter of ``shape`` that this rank holds.

        As ``torch.chunk`` cuts: ``ceil(n / size)`` each, where the last ranks get less or nothing.
        """
        assert self.dim is not None
        n = shape[self.dim]
        each = -(-n // self.size)
        return Range(min(n, self.rank * each), min(n, (self.rank + 1) * each))

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of this rank's part of a parameter of ``shape``."""
        if self.dim is None:
            return tuple(shape)
        return (*shape[: self.dim], self.indices(shape).numel, *shape[self.dim + 1 :])


@dataclass(frozen=True)
class GroupLayout:
    """Layout of one param group's flat buffer.

    Parameters lie end to end. Those whose size is a multiple of `ALIGNMENT` come first, so that odd-sized
    ones misalign nothing but each other; the tail is padded to a multiple of ``world size x alignment``.

    Attributes:
        shapes: global shape of every parameter, in registration order.
        axes: the data-parallel axes the buffer is cut along.
        params: the range of every parameter in the buffer, in registration order.
        numel: elements of the buffer, padding included.
    """

    shapes: tuple[tuple[int, ...], ...]
    axes: Axes
    params: tuple[Range, ...] = field(init=False)
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        numels = [prod(shape) for shape in self.shapes]
        order = sorted(range(len(numels)), key=lambda i: numels[i] % ALIGNMENT != 0)
        starts = accumulate((numels[i] for i in order), initial=0)
        ranges = {i: Range(start, start + numels[i]) for i, start in zip(order, starts, strict=False)}
        object.__setattr__(self, "params", tuple(ranges[i] for i in range(len(numels))))
        multiple = self.axes.world_size * alignment(sum(numels), self.axes.world_size)
        object.__setattr__(self, "numel", -(-sum(numels) // multiple) * multiple)
        self._check()

    def _check(self) -> None:
        taken = 0
        for r in sorted(self.params, key=lambda r: (r.start, r.stop)):
            assert r.start == taken, "parameters must tile the buffer without gaps or overlap"
            taken = r.stop
        assert taken <= self.numel and self.numel % self.axes.world_size == 0

    @cached_property
    def used_numel(self) -> int:
        """Elements that belong to parameters."""
        return sum(r.numel for r in self.params)

    @property
    def padding_numel(self) -> int:
        """Elements at the tail that belong to no parameter."""
        return self.numel - self.used_numel

    def slice(self, rank: int, num_axes: int) -> Range:
        """The slice data-parallel ``rank`` holds of a state sharded on the first ``num_axes`` axes."""
        start, length = 0, self.numel
        for c, size in zip(self.axes.coordinates(rank)[:num_axes], self.axes.sizes, strict=False):
            length //= size
            start += c * length
        return Range(start, start + length)

    def held(self, index: int, rank: int, num_axes: int) -> Range:
        """The part of parameter ``index`` that ``rank`` holds, counted in the parameter's own elements."""
        param = self.params[index]
        return param.intersect(self.slice(rank, num_axes)).shift(-param.start)


def padding_ratio(layouts: Sequence[GroupLayout]) -> float:
    """Padding over used elements, for a whole model."""
    used = sum(layout.used_numel for layout in layouts)
    return sum(layout.padding_numel for layout in layouts) / used if used else 0.0
