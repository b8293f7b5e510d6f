"""Which elements go where when a tensor is read at another layout than it was saved with. Pure integers.

[Note: runs]
A shard of a row-major tensor along ``dim`` is a row of equal runs of the whole tensor: one per index of the
dims before it. A flat slice of a shard cuts the first and the last of them short. What a reader wants and what a
piece holds are both such rows, and a copy is where they overlap. Without sharding along a dim, or along the
first, there is one run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from layerzero.layout import Range


@dataclass(frozen=True)
class Placement:
    """Where a tensor lies in the whole one, ``full`` its shape.

    Attributes:
        dim: the dim along which it is a shard; None for all of it.
        offset: index along ``dim`` of its first row.
        shape: its own shape.
    """

    full: tuple[int, ...]
    dim: int | None
    offset: int
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Placement:
        """All of a tensor."""
        return cls(tuple(shape), None, 0, tuple(shape))

    def runs(self, held: Range) -> Iterator[tuple[Range, int]]:
        """Contiguous elements of the whole tensor that ``held`` (elements of this one) is, ascending, each with the
        place in this tensor where it starts."""
        if not held.numel:
            return
        if self.dim is None or self.shape == self.full:
            yield held, held.start
            return
        inner = prod(self.full[self.dim + 1 :])
        mine, whole = self.shape[self.dim] * inner, self.full[self.dim] * inner
        for row in range(held.start // mine, -(-held.stop // mine)):
            part = held.intersect(Range(row * mine, (row + 1) * mine))
            yield part.shift(row * (whole - mine) + self.offset * inner), part.start


@dataclass(frozen=True)
class Copy:
    """``num`` copies of ``numel`` elements, from one flat tensor to another, each so many elements further on."""

    source: int
    target: int
    numel: int
    num: int = 1
    source_stride: int = 0
    target_stride: int = 0


def overlap(source: Placement, held: Range, target: Placement, wanted: Range) -> Iterator[Copy]:
    """What ``held`` of one placement gives to ``wanted`` of another, in elements of these two tensors; ascending.

    Both are placements in the same whole tensor.
    """
    if source.full == target.full and (source.dim, source.offset, source.shape) == (
        target.dim, target.offset, target.shape,
    ):  # fmt: skip
        both = held.intersect(wanted)
        if both.numel:
            yield Copy(both.start, both.start, both.numel)
        return
    sources, targets = source.runs(held), target.runs(wanted)
    a, b = next(sources, None), next(targets, None)
    while a is not None and b is not None:
        both = a[0].intersect(b[0])
        if both.numel:
            yield Copy(a[1] + both.start - a[0].start, b[1] + both.start - b[0].start, both.numel)
        if a[0].stop <= b[0].stop:
            a = next(sources, None)
        else:
            b = next(targets, None)


def coalesce(copies: Iterable[Copy]) -> Iterator[Copy]:
    """The same copies (``num`` 1 each) with equally spaced ones of equal size made one."""
    last: Copy | None = None
    for copy in copies:
        if last is not None and copy.numel == last.numel:
            at = last.num - 1
            strides = (
                copy.source - last.source - at * last.source_stride,
                copy.target - last.target - at * last.target_stride,
            )
            if min(strides) >= last.numel and (last.num == 1 or strides == (last.source_stride, last.target_stride)):
                last = Copy(last.source, last.target, last.numel, last.num + 1, *strides)
                continue
        if last is not None:
            yield last
        last = copy
    if last is not None:
        yield last


def cut(copy: Copy, every: int) -> Iterator[tuple[int, Copy]]:
    """A single copy cut where its source crosses a multiple of ``every``; each with the number of its block."""
    assert copy.num == 1
    done = 0
    while done < copy.numel:
        at = copy.source + done
        numel = min(copy.numel - done, every - at % every)
        yield at // every, Copy(at, copy.target + done, numel)
        done += numel
