"""Misuse that would hang or train wrong is an error that says what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.dist import error_cases as cases
from tests.dist.pool import Pool

pytestmark = pytest.mark.dist

CASES = [
    cases.misuse, cases.gradients_of_gradients, cases.replaced_storage, cases.replaced_parameter,
    cases.optimizers, cases.disagreement,
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "world", "lane"), [("layerzero", 4, "threads"), ("zero3", 2, "late")])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_refused(pool: Pool, case: Callable[..., Any], strategy: str, world: int, lane: str) -> None:
    pool.run(case, world, strategy=strategy, lane=lane)
