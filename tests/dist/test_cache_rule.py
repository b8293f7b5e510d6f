"""The cache rule: whatever changes the main parameters, the next pass computes with the new values."""

from __future__ import annotations

import pytest

from tests.dist import cache_cases as cases
from tests.dist.pool import Pool

pytestmark = pytest.mark.dist

SOME = ("adamw fused", "through data", "one through data", "load", "swap by data", "unsharded data")
"""Mutations that need different ways of being noticed."""

RUNS = [("layerzero", 4, "late", "fp32", name) for name in cases.MUTATIONS]
RUNS += [("layerzero", 4, "threads", "bf16", name) for name in SOME]
RUNS += [("layerzero-keep", 4, "random" if name == "load" else "late", "fp32", name) for name in SOME]
RUNS += [("layerzero-keep", 4, "threads", "bf16", name) for name in ("in place", "unsharded")]
RUNS += [("zero3", 2, "late", "fp32", name) for name in SOME]
RUNS += [("zero1", 2, "threads", "fp32", name) for name in SOME]
RUNS += [("hsdp", 4, "threads", "bf16", name) for name in SOME[:3]]


@pytest.mark.parametrize(
    ("strategy", "world", "lane", "dtype", "name"), RUNS, ids=[f"{r[0]}-{r[3]}-{r[4]}" for r in RUNS]
)
def test_the_next_pass_sees_the_new_values(
    pool: Pool, strategy: str, world: int, lane: str, dtype: str, name: str
) -> None:
    compared = pool.run(cases.mutation, world, name=name, strategy=strategy, lane=lane, dtype=dtype)
    assert compared == [3 * (len(cases.BEFORE) - (name in cases.HIDDEN))] * world


@pytest.mark.parametrize("lane", ["late", "threads"])
@pytest.mark.parametrize("strategy", ["layerzero", "layerzero-keep"])
def test_edits_of_frozen_parameters_between_micro_batches(pool: Pool, strategy: str, lane: str) -> None:
    assert pool.run(cases.frozen_edit, 4, strategy=strategy, lane=lane) == [4] * 4
