"""The cache rule: whatever changes the main parameters, the next pass computes with the new values."""

from __future__ import annotations

import pytest

from tests.dist import cache_cases as cases
from tests.dist.pool import Pool

pytestmark = pytest.mark.dist

WAYS = [
    ("layerzero", 4, "late", "fp32"), ("layerzero", 4, "threads", "bf16"), ("zero3", 2, "late", "fp32"),
    ("zero1", 2, "threads", "fp32"), ("hsdp", 4, "threads", "bf16"),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "world", "lane", "dtype"), WAYS, ids=[f"{w[0]}-{w[3]}" for w in WAYS])
@pytest.mark.parametrize("name", list(cases.MUTATIONS))
def test_the_next_pass_sees_the_new_values(
    pool: Pool, name: str, strategy: str, world: int, lane: str, dtype: str
) -> None:
    compared = pool.run(cases.mutation, world, name=name, strategy=strategy, lane=lane, dtype=dtype)
    assert compared == [4 * (len(cases.BEFORE) - (name in cases.HIDDEN))] * world
