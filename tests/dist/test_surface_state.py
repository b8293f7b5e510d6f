"""State in and out of a sharded model, which modules become units, and over which ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.dist import state_cases as cases
from tests.dist.pool import Pool

pytestmark = pytest.mark.dist

CASES = [cases.full_state, cases.loading, cases.info, cases.average, cases.weight_decay_groups]


@pytest.mark.parametrize(
    ("strategy", "world", "lane"), [("layerzero", 4, "late"), ("zero3", 2, "threads"), ("zero1", 2, "threads")]
)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_state(pool: Pool, case: Callable[..., Any], strategy: str, world: int, lane: str) -> None:
    pool.run(case, world, strategy=strategy, lane=lane)


@pytest.mark.parametrize("case", [cases.unit_choice, cases.errors_of_units], ids=lambda c: c.__name__)
def test_units(pool: Pool, case: Callable[..., Any]) -> None:
    pool.run(case, 4 if case is cases.errors_of_units else 2, strategy="layerzero", lane="threads")


@pytest.mark.parametrize(
    "case", [cases.mesh_dimension, cases.mesh_flattened, cases.schedules], ids=lambda c: c.__name__
)
def test_meshes_and_schedules(pool: Pool, case: Callable[..., Any]) -> None:
    pool.run(case, 4, lane="late" if case is cases.schedules else "threads")
