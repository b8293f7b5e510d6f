"""What a sharded module is to the code that uses it: calls, parameters, buffers and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.dist import module_cases as cases
from tests.dist.pool import Pool

pytestmark = pytest.mark.dist

WAYS = [("layerzero", 4, "late"), ("zero3", 2, "threads"), ("zero1", 2, "threads")]
CASES = [
    cases.outside_calls, cases.declared_method, cases.read_unsharded, cases.direct_reads, cases.lora,
    cases.edit_inside_forward, cases.penalty_beside_frozen, cases.freezing_later, cases.tied, cases.odd, cases.integer_parameters,
    cases.vectorised,
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "world", "lane"), WAYS, ids=[w[0] for w in WAYS])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_equals_plain_pytorch(pool: Pool, case: Callable[..., Any], strategy: str, world: int, lane: str) -> None:
    pool.run(case, world, strategy=strategy, lane=lane)


@pytest.mark.parametrize("case", [cases.ignored, cases.buffers, cases.input_is_not_touched], ids=lambda c: c.__name__)
def test_what_is_not_sharded(pool: Pool, case: Callable[..., Any]) -> None:
    pool.run(case, 2, strategy="layerzero", lane="threads")


@pytest.mark.parametrize(
    ("strategy", "world", "lane", "dtype"),
    [("layerzero", 4, "late", "fp32"), ("layerzero", 4, "threads", "bf16"), ("zero1", 2, "threads", "bf16")],
)
def test_edits_of_unsharded_parameters_stay(pool: Pool, strategy: str, world: int, lane: str, dtype: str) -> None:
    pool.run(cases.edit_unsharded, world, strategy=strategy, lane=lane, dtype=dtype)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_nested_inputs_and_outputs(pool: Pool, dtype: str) -> None:
    pool.run(cases.nested_casts, 2, strategy="layerzero", lane="late", dtype=dtype)
