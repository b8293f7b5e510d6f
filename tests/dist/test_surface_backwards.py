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
]  # fmt: skip
WAYS = [("layerzero", 4, "late"), ("zero3", 2, "threads"), ("zero1", 2, "random:5"), ("layerzero-full", 4, "threads")]


@pytest.mark.parametrize(("strategy", "world", "lane"), WAYS, ids=[w[0] for w in WAYS])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_equals_plain_pytorch(pool: Pool, case: Callable[..., Any], strategy: str, world: int, lane: str) -> None:
    pool.run(case, world, strategy=strategy, lane=lane)


def test_a_whole_zero3_group_may_skip_a_unit(pool: Pool) -> None:
    # Not on late lanes: they start no collective before something waits for it, and a skipped unit's refresh is one
    # that the other group may wait for first.
    pool.run(cases.skipped_by_a_replica, 4, strategy="layerzero", lane="threads")
