"""Ranks, groups and refusals of `ParallelMesh`."""

from __future__ import annotations

import pytest

from tests.dist import mesh_cases as cases
from tests.dist.pool import Pool

pytestmark = pytest.mark.dist


def test_every_dimension(pool: Pool) -> None:
    layouts = pool.run(cases.layout, 8, options={"dp": 2, "cp": 2, "tp": 2})
    for rank, place in enumerate(layouts):
        dp, cp, tp = rank // 4, rank // 2 % 2, rank % 2
        assert place["coordinates"] == [0, dp, cp, tp] and place["sizes"] == [1, 2, 2, 2]
        assert place["pp"] is None
        assert place["dp"] == [2 * cp + tp, 4 + 2 * cp + tp]
        assert place["cp"] == [4 * dp + tp, 4 * dp + 2 + tp]
        assert place["tp"] == [4 * dp + 2 * cp, 4 * dp + 2 * cp + 1]
        assert place["zero1"] == [tp, 2 + tp, 4 + tp, 6 + tp]


def test_order_changes_neighbours(pool: Pool) -> None:
    layouts = pool.run(cases.layout, 8, options={"pp": 2, "cp": 2, "order": ["cp", "tp", "dp", "pp"]})
    assert [place["coordinates"] for place in layouts] == [
        [pp, dp, cp, 0] for cp in (0, 1) for dp in (0, 1) for pp in (0, 1)
    ]
    assert layouts[0]["zero1"] == [0, 2, 4, 6] and layouts[7]["zero1"] == [1, 3, 5, 7]
    assert layouts[0]["pp"] == [0, 1] and layouts[0]["cp"] == [0, 4] and layouts[0]["tp"] is None


def test_only_tensor_parallel(pool: Pool) -> None:
    layouts = pool.run(cases.layout, 4, options={"tp": 4})
    assert [place["zero1"] for place in layouts] == [[0], [1], [2], [3]]
    assert all(place["dp"] is None and place["tp"] == [0, 1, 2, 3] for place in layouts)


def test_refused(pool: Pool) -> None:
    pool.run(cases.refused, 4)
    pool.run(cases.two_sizes_refused, 4)
    pool.run(cases.refused_without_distributed, 1, init=False)


def test_shards_over_dp_and_cp(pool: Pool) -> None:
    """Gradients are means over the ZeRO-1 group, and the launcher's node size is counted in its ranks."""
    kwargs = {"options": {"dp": 2, "cp": 2, "zero3_size": 2}, "patch_local_world_size": 2}
    assert pool.run(cases.shards_over_dp_and_cp, 4, **kwargs) == [{"axes": [2, 2], "zero3_size": 2}] * 4
    kwargs = {"options": {"cp": 4, "tp": 2, "zero3_size": 1}, "patch_local_world_size": 4}
    assert pool.run(cases.shards_over_dp_and_cp, 8, **kwargs) == [{"axes": [2, 2], "zero3_size": 1}] * 8


def test_own_groups_end_with_the_program(pool: Pool) -> None:
    for before, training, at_end in pool.run(cases.end_of_program, 4):
        assert before == at_end < training
