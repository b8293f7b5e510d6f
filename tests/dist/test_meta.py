"""Models built on the meta device, and whose initial values count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.dist import state_cases as cases
from tests.dist.pool import Pool

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(("strategy", "world"), [("layerzero", 4), ("zero3", 2), ("zero1", 2)])
@pytest.mark.parametrize("case", [cases.meta_reset, cases.rank0_wins], ids=lambda c: c.__name__)
def test_values_of_rank_0(pool: Pool, case: Callable[..., Any], strategy: str, world: int) -> None:
    pool.run(case, world, strategy=strategy, lane="threads")


@pytest.mark.parametrize("case", [cases.meta_init_fn, cases.meta_without_init], ids=lambda c: c.__name__)
def test_initialisation(pool: Pool, case: Callable[..., Any]) -> None:
    pool.run(case, 2, strategy="layerzero", lane="threads")
