"""Ranks of a ZeRO-3 group that run different units get an error that names units and ranks, not a hang."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.dist import desync_cases as cases
from tests.dist.pool import CaseError, Pool

pytestmark = pytest.mark.dist

ALWAYS = {"desync_check": True}


@pytest.mark.parametrize(
    ("strategy", "world", "lane", "which", "after", "micro", "options"),
    [
        ("zero3", 2, "threads", 1, 0, False, {}),  # a middle unit, in the first step
        ("zero3", 2, "late", 0, 0, False, {}),  # the first unit
        ("zero3", 2, "threads", 2, 0, True, {}),  # the last unit
        ("layerzero", 2, "threads", 1, 5, True, ALWAYS),  # after many steps
    ],
)
def test_a_skipped_unit_is_named(
    pool: Pool, strategy: str, world: int, lane: str, which: int, after: int, micro: bool, options: dict[str, Any]
) -> None:
    replies = pool.run(
        cases.skipped, world, timeout=40, strategy=strategy, lane=lane, which=which, after=after, micro=micro,
        options=options,
    )  # fmt: skip
    for text in replies:
        assert re.search(rf"ranks \[0, 1\].*'layers\.{which}'.*dummy input multiplied by zero", text), text


def test_other_groups_are_not_left_waiting(pool: Pool) -> None:
    with pytest.raises(CaseError) as caught:
        pool.run(
            cases.skipped, 4, timeout=40, strategy="layerzero", lane="threads", which=2, after=1, micro=True,
            options=ALWAYS, catch=False,
        )  # fmt: skip
    first, second = str(caught.value).split("rank 1: ")[:2]
    for text in (first, second.split("rank 2: ")[0]):
        assert re.search(r"DesyncError: .*ranks \[0, 1\].*'layers\.2'", text), text


def test_a_unit_skipped_in_evaluation_is_named(pool: Pool) -> None:
    for text in pool.run(cases.eval_skipped, 2, timeout=40, strategy="zero3", lane="threads"):
        assert re.search(r"ranks \[0, 1\].*'layers\.1'", text), text


@pytest.mark.parametrize(("strategy", "world", "lane"), [("layerzero", 4, "late"), ("zero3", 2, "threads")])
def test_what_the_error_advises_works(pool: Pool, strategy: str, world: int, lane: str) -> None:
    pool.run(cases.dummy_call, world, strategy=strategy, lane=lane)
