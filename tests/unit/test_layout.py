"""Layout of a param group: tiling, nesting, padding, and gathers that need no copy."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerzero.layout import ALIGNMENT, MIN_ALIGNMENT, GroupLayout, Range, alignment, padding_ratio
from layerzero.sharding import Axes

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=6).map(tuple)


@st.composite
def all_axes(draw: st.DrawFn) -> Axes:
    sizes = tuple(draw(st.lists(st.integers(2, 4), max_size=3)))
    optimizer = draw(st.integers(0, len(sizes)))
    return Axes(sizes, draw(st.integers(0, optimizer)), draw(st.integers(0, optimizer)), optimizer)


layouts = st.builds(GroupLayout, shapes, all_axes())


class TestParams:
    @given(layouts)
    def test_parameters_tile_the_buffer_before_the_padding(self, layout: GroupLayout) -> None:
        covered = sorted((r.start, r.stop) for r in layout.params if r.numel)
        ends = [0, *(stop for _, stop in covered)]
        assert [start for start, _ in covered] == ends[:-1]
        assert ends[-1] == layout.used_numel == sum(prod(shape) for shape in layout.shapes)
        assert [r.numel for r in layout.params] == [prod(shape) for shape in layout.shapes]

    @given(layouts)
    def test_padding_is_less_than_one_block_per_rank(self, layout: GroupLayout) -> None:
        multiple = layout.axes.world_size * alignment(layout.used_numel, layout.axes.world_size)
        assert layout.numel % multiple == 0
        assert 0 <= layout.padding_numel < multiple
        assert layout.used_numel + layout.padding_numel == layout.numel
        assert padding_ratio([layout]) == (layout.padding_numel / layout.used_numel if layout.used_numel else 0)

    @given(layouts)
    def test_aligned_parameters_start_aligned(self, layout: GroupLayout) -> None:
        for r in layout.params:
            if r.numel % ALIGNMENT == 0:
                assert r.start % ALIGNMENT == 0 or not r.numel

    @given(st.integers(0, 10**9), st.integers(1, 10**4))
    def test_alignment_is_the_largest_that_pads_little(self, numel: int, world_size: int) -> None:
        chosen = alignment(numel, world_size)
        assert chosen in (8, 16, 32, 64)
        if chosen > MIN_ALIGNMENT:
            assert chosen * world_size <= 0.001 * numel
        if chosen < ALIGNMENT:
            assert 2 * chosen * world_size > 0.001 * numel

    @pytest.mark.parametrize("sizes", [(8,), (8, 8), (8, 64)])
    def test_padding_of_a_real_block_is_small(self, sizes: tuple[int, ...]) -> None:
        block = ((4096, 4096),) * 4 + ((11008, 4096),) * 3 + ((4095,),) * 2
        assert 0 < padding_ratio([GroupLayout(block, Axes(sizes, 1, 1, len(sizes)))]) < 1e-3

    def test_padding_ratio_of_no_parameters(self) -> None:
        assert padding_ratio([]) == 0.0
        assert padding_ratio([GroupLayout(((0, 3),), Axes((2,), 1, 1, 1))]) == 0.0


class TestSlices:
    @given(layouts)
    def test_slices_of_every_degree_tile_the_buffer(self, layout: GroupLayout) -> None:
        axes = layout.axes
        for num_axes in range(len(axes.sizes) + 1):
            slices = {layout.slice(rank, num_axes) for rank in range(axes.world_size)}
            assert len(slices) == (axes.degree(num_axes) if layout.numel else 1)
            ends = [0]
            for r in sorted(slices, key=lambda r: r.start):
                assert r.start == ends[-1] and r.numel == layout.numel // axes.degree(num_axes)
                assert r.numel % alignment(layout.used_numel, axes.world_size) == 0
                ends.append(r.stop)
            assert ends[-1] == layout.numel

    @given(layouts)
    def test_slices_nest(self, layout: GroupLayout) -> None:
        for rank in range(layout.axes.world_size):
            for num_axes in range(len(layout.axes.sizes)):
                outer, inner = layout.slice(rank, num_axes), layout.slice(rank, num_axes + 1)
                assert outer.start <= inner.start and inner.stop <= outer.stop

    @given(layouts)
    def test_replicas_hold_the_same_slice(self, layout: GroupLayout) -> None:
        axes = layout.axes
        for num_axes in range(len(axes.sizes)):
            for rank in range(axes.world_size):
                for outer in range(num_axes, len(axes.sizes)):
                    for other in axes.neighbours(rank, outer):
                        assert layout.slice(other, num_axes) == layout.slice(rank, num_axes)

    @given(layouts)
    @settings(max_examples=50)
    def test_outer_axis_first_gathers_are_contiguous(self, layout: GroupLayout) -> None:
        """Plain concatenation in coordinate order, one axis at a time, rebuilds the buffer on every rank."""
        axes = layout.axes
        whole = list(range(layout.numel))
        held = {}
        for rank in range(axes.world_size):
            r = layout.slice(rank, len(axes.sizes))
            held[rank] = whole[r.start : r.stop]
        for axis in reversed(range(len(axes.sizes))):
            held = {
                rank: [x for other in axes.neighbours(rank, axis) for x in held[other]]
                for rank in range(axes.world_size)
            }
            for rank, piece in held.items():
                r = layout.slice(rank, axis)
                assert piece == whole[r.start : r.stop]
        assert all(piece == whole for piece in held.values())

    @given(layouts)
    @settings(max_examples=50)
    def test_inner_axis_first_scatters_are_contiguous(self, layout: GroupLayout) -> None:
        """Keeping one's block of ``coordinate`` along each axis, innermost first, arrives at one's slice."""
        axes = layout.axes
        for rank in range(axes.world_size):
            piece = list(range(layout.numel))
            for axis, (coordinate, size) in enumerate(zip(axes.coordinates(rank), axes.sizes, strict=True)):
                length = len(piece) // size
                piece = piece[coordinate * length : (coordinate + 1) * length]
                r = layout.slice(rank, axis + 1)
                assert piece == list(range(r.start, r.stop))

    def test_innermost_axis_is_most_significant(self) -> None:
        layout = GroupLayout(((256,),), Axes((2, 2), 1, 1, 2))
        assert layout.numel == 256
        assert [layout.slice(rank, 2).start for rank in range(4)] == [0, 128, 64, 192]
        assert [layout.slice(rank, 1).start for rank in range(4)] == [0, 128, 0, 128]


class TestHeld:
    @given(layouts)
    def test_held_ranges_partition_every_parameter(self, layout: GroupLayout) -> None:
        axes = layout.axes
        for index, param in enumerate(layout.params):
            for num_axes in range(len(axes.sizes) + 1):
                inner = range(axes.degree(num_axes))  # the first ranks: one of each set of replicas
                parts = sorted((r.start, r.stop) for rank in inner if (r := layout.held(index, rank, num_axes)).numel)
                ends = [0, *(stop for _, stop in parts)]
                assert [start for start, _ in parts] == ends[:-1] and ends[-1] == param.numel

    @given(layouts)
    def test_held_elements_lie_in_the_slice(self, layout: GroupLayout) -> None:
        for rank in range(layout.axes.world_size):
            r = layout.slice(rank, layout.axes.num_optimizer)
            for index, param in enumerate(layout.params):
                held = layout.held(index, rank, layout.axes.num_optimizer)
                if held.numel:
                    assert r.start <= param.start + held.start and param.start + held.stop <= r.stop


class TestRange:
    @pytest.mark.parametrize(
        ("a", "b", "common"),
        [((0, 5), (3, 9), (3, 5)), ((0, 5), (5, 9), (5, 5)), ((0, 3), (5, 9), (5, 5)), ((2, 4), (0, 9), (2, 4))],
    )
    def test_intersect(self, a: tuple[int, int], b: tuple[int, int], common: tuple[int, int]) -> None:
        assert Range(*a).intersect(Range(*b)) == Range(*common)
        assert Range(*b).intersect(Range(*a)).numel == Range(*common).numel

    def test_shift_and_numel(self) -> None:
        assert Range(3, 5).shift(-3) == Range(0, 2)
        assert Range(5, 3).numel == 0
