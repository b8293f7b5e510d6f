"""What differs between two checkpoints, whatever layouts they were saved with; one process, nothing distributed."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from layerzero.checkpoint.manifest import VALUE
from layerzero.checkpoint.source import Source
from layerzero.checkpoint.tools import Progress


@dataclass(frozen=True)
class Difference:
    """One thing that differs.

    Attributes:
        name: of the tensor, or what of the optimizer it is.
        state: "value", or an optimizer state.
        what: "only in a", "only in b", "shape", "values", or "optimizer".
        detail: what is there and there, for people.
        max_abs: largest absolute difference of values; nan where one is a number and the other is not.
    """

    name: str
    state: str
    what: str
    detail: str = ""
    max_abs: float | None = None


@dataclass(frozen=True)
class Comparison:
    """What differs, and how much was compared.

    Attributes:
        num_tensors: pairs of tensors, states included, of which every element was compared.
        dtypes: names of tensors stored in another dtype; not a difference by itself.
    """

    differences: tuple[Difference, ...]
    num_tensors: int
    dtypes: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    optimizer: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Compare two checkpoints, or plain safetensors files, by tensor names; aliases count as names.

    Memory is bounded by two parts of a tensor, see `Source.chunks`. Checksums are verified on the way.

    Args:
        optimizer: compare optimizer states and options too.

    Raises:
        CheckpointError: one can't be read.
    """
    one, two = Source.open(Path(a)), Source.open(Path(b))
    found = [
        Difference(name, VALUE, f"only in {side}", detail=str(list(x.manifest.tensors[stored].shape)))
        for side, x, y in (("a", one, two), ("b", two, one))
        for name, stored in x.by_name.items()
        if name not in y.by_name
    ]
    pairs: dict[tuple[str, str], str] = {}  # names they are stored under, with the first that both have
    for name in one.by_name:
        if name in two.by_name:
            pairs.setdefault((one.by_name[name], two.by_name[name]), name)
    with_states = optimizer and None not in (one.manifest.optimizer, two.manifest.optimizer)
    jobs: list[tuple[str, str, str]] = []
    for (left, right), shown in pairs.items():
        shapes = [list(source.manifest.tensors[name].shape) for source, name in ((one, left), (two, right))]
        if shapes[0] != shapes[1]:
            found.append(Difference(shown, VALUE, "shape", detail=f"{shapes[0]} and {shapes[1]}"))
            continue
        states = [source.states.get(name, set()) for source, name in ((one, left), (two, right))]
        jobs.append((left, right, VALUE))
        if with_states:
            for state in sorted(states[0] ^ states[1]):
                found.append(Difference(shown, state, f"only in {'a' if state in states[0] else 'b'}"))
            jobs += [(left, right, state) for state in sorted((states[0] & states[1]) - {VALUE})]
    if optimizer:
        found += _optimizer_differences(one, two, pairs)
    dtypes = [
        f"{pairs[left, right]}, {state}"
        for left, right, state in jobs
        if one.dtype(left, state) != two.dtype(right, state)
    ]
    total = sum(prod(one.manifest.tensors[left].shape) * _itemsize(one, left, state) for left, _, state in jobs)
    done = 0
    for left, right, state in jobs:
        largest = 0.0
        for x, y in zip(one.chunks(left, state), two.chunks(right, state), strict=True):
            largest = _larger(largest, _max_abs(x, y))
            done += x.numel() * x.element_size()
            if progress is not None:
                progress(done, total)
        if largest != 0:
            found.append(Difference(pairs[left, right], state, "values", f"up to {largest:.6g} apart", largest))
    return Comparison(tuple(found), len(jobs), tuple(dtypes))


def _itemsize(source: Source, name: str, state: str) -> int:
    dtype = source.dtype(name, state)
    return 0 if dtype is None else dtype.itemsize


def _larger(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def _max_abs(x: torch.Tensor, y: torch.Tensor) -> float:
    if x.dtype is y.dtype and torch.equal(x, y):  # also what doubles can't tell apart
        return 0.0
    if x.is_complex() or y.is_complex():
        x, y = (torch.view_as_real(t.to(torch.complex128)) for t in (x, y))
    wide = [t.to(torch.float64) for t in (x, y)]
    same = (wide[0] == wide[1]) | (wide[0].isnan() & wide[1].isnan())  # infinities minus themselves are not a number
    gap = torch.where(same, 0.0, (wide[0] - wide[1]).abs())
    largest = float(gap.max()) if gap.numel() else 0.0
    if largest == 0 and not x.is_floating_point() and not torch.equal(x, y.to(x.dtype)):
        return 1.0  # large integers that are one double
    return largest


def _optimizer_differences(one: Source, two: Source, pairs: dict[tuple[str, str], str]) -> Iterator[Difference]:
    records = [source.manifest.optimizer for source in (one, two)]
    left, right = records
    if left is None or right is None:
        if left is not right:
            yield Difference("optimizer", "", f"only in {'b' if left is None else 'a'}")
        return
    if left.classes != right.classes:
        yield Difference("optimizer", "", "optimizer", f"{', '.join(left.classes)} and {', '.join(right.classes)}")
    options = [{name: group.options for group in record.groups for name in group.params} for record in (left, right)]
    for (a, b), shown in pairs.items():
        for what, x, y in (
            ("options", options[0].get(a), options[1].get(b)),
            ("states", left.scalars.get(a), right.scalars.get(b)),
        ):
            if x != y:
                keys = sorted(k for k in {**(x or {}), **(y or {})} if (x or {}).get(k) != (y or {}).get(k))
                detail = "; ".join(f"{k} {(x or {}).get(k)!r} and {(y or {}).get(k)!r}" for k in keys[:4])
                yield Difference(shown, what, "optimizer", detail)
