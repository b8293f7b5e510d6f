"""Misuse that would hang or train wrong is an error that says what to do instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.dist import error_cases as cases
from tests.dist.pool import CaseError, Pool

pytestmark = pytest.mark.dist

CASES = [
    cases.misuse, cases.late_parameters, cases.surrounding_ddp, cases.gradients_of_gradients, cases.replaced_storage,
    cases.replaced_parameter, cases.optimizers, cases.disagreement,
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "world", "lane"), [("layerzero", 4, "threads"), ("zero3", 2, "late")])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_refused(pool: Pool, case: Callable[..., Any], strategy: str, world: int, lane: str) -> None:
    pool.run(case, world, strategy=strategy, lane=lane)


@pytest.mark.parametrize(("strategy", "work"), [("zero3", "unshard"), ("ddp", "reduce")])
def test_survivors_of_a_lost_rank_say_what_failed(pool: Pool, strategy: str, work: str) -> None:
    with pytest.raises(CaseError) as caught:
        pool.run(cases.lost_rank, 2, strategy=strategy, unit="layers.0")
    text = str(caught.value)
    assert re.search(rf"layerzero\.{work} of (unit '[\w.]+'|the root unit) failed on rank 0\. If another rank ended", text)
    assert "rank 1: the process died" in text
