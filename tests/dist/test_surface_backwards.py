"""Several forwards and backwards in flight, accumulation, and gradients missing on some ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.dist import backward_cases as cases
from tests.dist.pool import Pool

pytestmark = pytest.mark.dist

CASES = [
    cases.several_forwards, cases.interleaved, cases.interleaved_from_the_start, cases.retained_graph,
    cases.used_twice, cases.evaluation_between, cases.raises_midway, cases.two_losses, cases.unsynced_first,
    cases.zeroing, cases.zeroing_one_unit, cases.rank_dependent_parts, cases.ignored_outputs, cases.changing_order,
    cases.backward_inside_forward, cases.in_place, cases.unused_on_one_rank,
    cases.unused_on_one_rank_in_changing_order, cases.detached_weight,
]  # fmt: skip
ACCUMULATING = [cases.interleaved, cases.two_losses, cases.zeroing, cases.rank_dependent_parts]
RUNS = [("layerzero", 4, "late", case) for case in CASES]
RUNS += [("zero3", 2, "threads", case) for case in CASES]
RUNS += [("zero1", 2, "random:5", case) for case in CASES[:10]]
RUNS += [("layerzero-keep", 4, "late" if i % 2 else "threads", case) for i, case in enumerate(CASES)]
RUNS += [("layerzero-full", 4, "threads", case) for case in ACCUMULATING]


@pytest.mark.parametrize(("strategy", "world", "lane", "case"), RUNS, ids=[f"{r[0]}-{r[3].__name__}" for r in RUNS])
def test_equals_plain_pytorch(pool: Pool, strategy: str, world: int, lane: str, case: Callable[..., Any]) -> None:
    pool.run(case, world, strategy=strategy, lane=lane)


def test_a_whole_zero3_group_may_skip_a_unit(pool: Pool) -> None:
    # Not on late lanes: they start no collective before something waits for it, and a skipped unit's refresh is one
    # that the other group may wait for first.
    pool.run(cases.skipped_by_a_replica, 4, strategy="layerzero", lane="threads")
