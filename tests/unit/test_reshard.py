"""Copies between placements against brute force: every element of both by its index in the whole tensor."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from layerzero.checkpoint.reshard import Copy, Placement, coalesce, cut, overlap
from layerzero.layout import Range


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(0, 5), max_size=4)))


@st.composite
def placements(draw: st.DrawFn, full: tuple[int, ...]) -> Placement:
    if not full or draw(st.booleans()):
        return Placement.whole(full)
    dim = draw(st.integers(0, len(full) - 1))
    offset = draw(st.integers(0, full[dim]))
    size = draw(st.integers(0, full[dim] - offset))
    return Placement(full, dim, offset, (*full[:dim], size, *full[dim + 1 :]))


@st.composite
def ranges(draw: st.DrawFn, placement: Placement) -> Range:
    start = draw(st.integers(0, prod(placement.shape)))
    return Range(start, draw(st.integers(start, prod(placement.shape))))


@st.composite
def sides(draw: st.DrawFn) -> tuple[Placement, Range, Placement, Range]:
    full = draw(shapes())
    source, target = draw(placements(full)), draw(placements(full))
    return source, draw(ranges(source)), target, draw(ranges(target))


def indices(placement: Placement) -> torch.Tensor:
    """For every element of the placed tensor its index in the whole one, 1-D."""
    whole = torch.arange(prod(placement.full)).view(placement.full)
    if placement.dim is not None:
        whole = whole.narrow(placement.dim, placement.offset, placement.shape[placement.dim])
    return whole.reshape(-1)


class TestRuns:
    def test_nothing_held_is_no_run(self) -> None:
        for placement in (Placement((3,), 0, 0, (2,)), Placement.whole((3,)), Placement((0, 3), 1, 1, (0, 2))):
            assert not list(placement.runs(Range(1, 1))) and not list(placement.runs(Range(0, 0)))

    @given(st.data())
    def test_runs_are_the_elements(self, data: st.DataObject) -> None:
        placement = data.draw(placements(data.draw(shapes())))
        held = data.draw(ranges(placement))
        found = [
            (i, start + k) for run, start in placement.runs(held) for k, i in enumerate(range(run.start, run.stop))
        ]
        where = indices(placement).tolist()
        assert found == [(where[place], place) for place in range(held.start, held.stop)]
        assert all(run.numel for run, _ in placement.runs(held))


class TestOverlap:
    @given(sides())
    def test_every_common_element_once(self, sides: tuple[Placement, Range, Placement, Range]) -> None:
        source, held, target, wanted = sides
        copies = list(overlap(*sides))
        pairs = [(c.source + k, c.target + k) for c in copies for k in range(c.numel)]
        place_of = {
            int(i): place for place, i in enumerate(indices(source).tolist()) if held.start <= place < held.stop
        }
        expected = [
            (place_of[i], place)
            for place, i in enumerate(indices(target).tolist())
            if wanted.start <= place < wanted.stop and i in place_of
        ]
        assert sorted(pairs) == sorted(expected)
        assert pairs == sorted(pairs) and all(c.num == 1 and c.numel for c in copies)

    @given(sides())
    def test_coalesced_copies_are_the_same_ones(self, sides: tuple[Placement, Range, Placement, Range]) -> None:
        copies = list(overlap(*sides))
        merged = list(coalesce(copies))
        apart = [
            Copy(m.source + n * m.source_stride, m.target + n * m.target_stride, m.numel)
            for m in merged
            for n in range(m.num)
        ]
        assert apart == copies

    def test_columns_are_one_strided_copy(self) -> None:
        shard = Placement((6, 8), 1, 2, (6, 3))
        [copy] = coalesce(overlap(shard, Range(0, 18), Placement.whole((6, 8)), Range(0, 48)))
        assert copy == Copy(0, 2, 3, num=6, source_stride=3, target_stride=8)
        assert len(list(overlap(shard, Range(0, 18), Placement.whole((6, 8)), Range(0, 48)))) == 6

    def test_unequal_spacing_is_not_joined(self) -> None:
        copies = [Copy(0, 0, 2), Copy(4, 4, 2), Copy(9, 9, 2), Copy(14, 14, 2), Copy(20, 20, 1), Copy(22, 22, 1)]
        assert list(coalesce(copies)) == [
            Copy(0, 0, 2, 2, 4, 4), Copy(9, 9, 2, 2, 5, 5), Copy(20, 20, 1, 2, 2, 2),
        ]  # fmt: skip


class TestCut:
    @given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 40), st.integers(1, 9))
    def test_cut_at_every_multiple(self, source: int, target: int, numel: int, every: int) -> None:
        parts = list(cut(Copy(source, target, numel), every))
        elements = [(c.source + k, c.target + k) for _, c in parts for k in range(c.numel)]
        assert elements == [(source + k, target + k) for k in range(numel)]
        for block, c in parts:
            assert c.source // every == (c.source + c.numel - 1) // every == block
        assert [block for block, _ in parts] == sorted({(source + k) // every for k in range(numel)})
