"""Degrees, named strategies and axes."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from layerzero.errors import ConfigError
from layerzero.sharding import STRATEGIES, Axes, Sharding

# strategy -> degrees with 4 ranks in a ZeRO-3 group and 32 ranks in all, by the table of the design
TABLE = {
    "ddp": (1, 1, 1),
    "zero1": (1, 1, 32),
    "zero2": (1, 32, 32),
    "zero3": (32, 32, 32),
    "hsdp": (4, 4, 4),
    "mics": (4, 4, 4),
    "layerzero": (4, 4, 32),
}


def degrees(axes: Axes) -> tuple[int, int, int]:
    return axes.degree(axes.num_params), axes.degree(axes.num_grads), axes.degree(axes.num_optimizer)


@st.composite
def shardings(draw: st.DrawFn) -> tuple[Sharding, int, int | None]:
    """Legal degrees, world size and node size."""
    quotients = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    chain = [prod(quotients[:i]) for i in range(len(quotients) + 1)]
    world = chain[-1]
    optimizer = draw(st.sampled_from(chain))
    inner = st.sampled_from([c for c in chain if c <= optimizer])
    node = draw(st.none() | st.sampled_from(chain))

    def written(degree: int) -> int | str:
        return draw(st.sampled_from([degree, "all"])) if degree == world else degree

    made = Sharding(*(written(d) for d in (draw(inner), draw(inner), optimizer)))  # type: ignore[arg-type]
    return made, world, node


class TestNamedStrategies:
    @pytest.mark.parametrize("name", STRATEGIES)
    def test_degrees_are_those_of_the_design(self, name: str) -> None:
        assert degrees(Sharding.named(name, size=4).resolve(32)) == TABLE[name]

    @pytest.mark.parametrize("name", STRATEGIES)
    def test_full_accumulation_changes_the_grads_degree_only(self, name: str) -> None:
        full = Sharding.named(name, size=4, accumulate="full").resolve(32)
        params, _, optimizer = TABLE[name]
        assert degrees(full) == (params, 1, optimizer)

    def test_constructors_agree_with_names(self) -> None:
        assert Sharding.layerzero(4) == Sharding.named("layerzero", 4)
        assert Sharding.layerzero(4, accumulate="full") == Sharding.named("layerzero", 4, accumulate="full")
        assert Sharding.mics(4) == Sharding.hsdp(4) == Sharding.named("hsdp", 4)
        assert Sharding.ddp() != Sharding.zero1() != Sharding.zero2() != Sharding.zero3()

    def test_degenerate_layerzero(self) -> None:
        assert degrees(Sharding.layerzero(1).resolve(8)) == degrees(Sharding.zero1().resolve(8))
        assert degrees(Sharding.layerzero(8).resolve(8)) == degrees(Sharding.zero3().resolve(8))

    def test_axes_of_layerzero(self) -> None:
        assert Sharding.layerzero(8).resolve(64) == Axes((8, 8), 1, 1, 2)
        assert Sharding.layerzero(4).resolve(64, node_size=8) == Axes((4, 2, 8), 1, 1, 3)
        assert Sharding.ddp().resolve(64, node_size=8) == Axes((8, 8), 0, 0, 0)

    @pytest.mark.parametrize("name", STRATEGIES)
    def test_one_rank_has_no_axes(self, name: str) -> None:
        assert Sharding.named(name, size=1).resolve(1) == Axes((), 0, 0, 0)


class TestResolve:
    @given(shardings())
    def test_degrees_and_node_size_are_prefixes_of_the_axes(self, case: tuple[Sharding, int, int | None]) -> None:
        sharding, world, node = case
        axes = sharding.resolve(world, node)
        want = tuple(world if d == "all" else d for d in (sharding.params, sharding.grads, sharding.optimizer))
        assert degrees(axes) == want
        assert axes.world_size == prod(axes.sizes) == world
        prefixes = [axes.degree(i) for i in range(len(axes.sizes) + 1)]
        assert node is None or node in prefixes
        assert set(prefixes) == {1, *want, world} | ({node} if node else set()), "an axis nobody asked for"

    @given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
    def test_everything_else_is_refused(self, params: int, grads: int, optimizer: int, world: int) -> None:
        chain = sorted({params, grads, optimizer, world})
        legal = all(b % a == 0 for a, b in pairwise(chain)) and chain[-1] == world
        legal = legal and max(params, grads) <= optimizer
        if legal:
            assert degrees(Sharding(params, grads, optimizer).resolve(world)) == (params, grads, optimizer)
            return
        with pytest.raises(ConfigError) as error:
            Sharding(params, grads, optimizer).resolve(world)
        assert any(str(n) in str(error.value) for n in chain)

    @given(shardings(), st.integers(2, 50))
    def test_node_size_off_the_chain_is_refused(self, case: tuple[Sharding, int, int | None], node: int) -> None:
        sharding, world, _ = case
        assume(world % node)
        with pytest.raises(ConfigError, match=f"node_size.* {node}"):
            sharding.resolve(world, node)

    def test_not_dividing_names_both_numbers_and_what_to_change(self) -> None:
        with pytest.raises(ConfigError) as error:
            Sharding.layerzero(6).resolve(64)
        for part in ("params = grads = 6", "data-parallel size = 64", "1 | 6 | 64", "zero3_size"):
            assert part in str(error.value)

    def test_larger_than_the_group(self) -> None:
        with pytest.raises(ConfigError, match=r"params = 8, grads = 8 is larger than .* 4 ranks"):
            Sharding.layerzero(8).resolve(4)

    @pytest.mark.parametrize("name", ["params", "grads"])
    def test_wider_than_the_optimizer(self, name: str) -> None:
        with pytest.raises(ConfigError, match=f"{name} degree 4 exceeds optimizer degree 2"):
            Sharding(**{"params": 1, "grads": 1, "optimizer": 2, name: 4}).resolve(8)

    @pytest.mark.parametrize("bad", [0, -1, 2.0, True, "every", None])
    @pytest.mark.parametrize("name", ["params", "grads", "optimizer"])
    def test_bad_degree_is_named(self, name: str, bad: object) -> None:
        with pytest.raises(ConfigError, match=f"degree {name}: .*got {bad!r}"):
            Sharding(**{"params": 1, "grads": 1, "optimizer": 1, name: bad})  # type: ignore[arg-type]

    def test_unknown_strategy_lists_the_known_ones(self) -> None:
        with pytest.raises(ConfigError) as error:
            Sharding.named("zero4", size=2)
        assert "'zero4'" in str(error.value) and all(name in str(error.value) for name in STRATEGIES)


class TestAxes:
    @given(shardings())
    def test_coordinates_count_the_ranks_innermost_first(self, case: tuple[Sharding, int, int | None]) -> None:
        axes = case[0].resolve(case[1], case[2])
        for rank in range(axes.world_size):
            coordinates = axes.coordinates(rank)
            assert rank == sum(c * axes.degree(i) for i, c in enumerate(coordinates))
            assert all(0 <= c < size for c, size in zip(coordinates, axes.sizes, strict=True))

    @given(shardings())
    def test_neighbours_differ_on_one_axis(self, case: tuple[Sharding, int, int | None]) -> None:
        axes = case[0].resolve(case[1], case[2])
        for axis, size in enumerate(axes.sizes):
            seen = []
            for rank in range(axes.world_size):
                ranks = axes.neighbours(rank, axis)
                assert len(ranks) == size and ranks[axes.coordinates(rank)[axis]] == rank
                assert all(axes.neighbours(other, axis) == ranks for other in ranks)
                for position, other in enumerate(ranks):
                    mine, its = list(axes.coordinates(rank)), axes.coordinates(other)
                    mine[axis] = position
                    assert tuple(mine) == its
                seen.append(ranks)
            assert sorted(r for ranks in set(seen) for r in ranks) == list(range(axes.world_size))

    def test_inner_axes_are_consecutive_ranks(self) -> None:
        axes = Axes((2, 4), 1, 1, 2)
        assert axes.coordinates(5) == (1, 2)
        assert axes.neighbours(5, 0) == (4, 5)
        assert axes.neighbours(5, 1) == (1, 3, 5, 7)
