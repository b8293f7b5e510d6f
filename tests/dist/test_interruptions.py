"""Exceptions and interrupts in every phase: training goes on as if they had not been."""

from __future__ import annotations

import pytest

from tests.dist import interruption_cases as cases
from tests.dist.pool import Pool

pytestmark = pytest.mark.dist

DISTURBANCES = [
    "interrupted_submodule", "interrupted_recomputation", "interrupted_forward_method", "interrupted_in_unsharded",
    "refused_forward_method", "failed_cast", "failed_copies", "failed_user_hook",
    "failed_user_hook_on_added_gradients", "failed_user_pre_hook", "restored_hooks",
]  # fmt: skip


@pytest.mark.parametrize("when", [0, 2], ids=["first", "later"])
@pytest.mark.parametrize("strategy", ["layerzero", "zero3"])
@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_training_goes_on(pool: Pool, disturbance: str, strategy: str, when: int) -> None:
    pool.run(cases.goes_on, 2, disturbance=disturbance, strategy=strategy, when=when)


@pytest.mark.parametrize(
    ("synced", "fails_synced"), [(False, True), (False, False), (True, False)], ids=["synced", "no_sync", "later"]
)
@pytest.mark.parametrize(
    ("world", "strategy", "accumulate"),
    [(1, "layerzero", "shard"), (2, "layerzero", "shard"), (2, "layerzero", "full"), (2, "zero3", "shard")],
)
def test_incomplete_gradients_are_refused(
    pool: Pool, world: int, strategy: str, accumulate: str, synced: bool, fails_synced: bool
) -> None:
    how = {"synced": synced, "fails_synced": fails_synced}
    pool.run(cases.failed_micro_batch, world, strategy=strategy, accumulate=accumulate, **how)


@pytest.mark.parametrize("world", [1, 2])
def test_after_a_reduction_that_could_not_start(pool: Pool, world: int) -> None:
    pool.run(cases.failed_last_reduction, world)


def test_a_failed_gather_can_be_repeated(pool: Pool) -> None:
    pool.run(cases.failed_gather, 2)


def test_a_users_hook_sees_what_the_caller_sees(pool: Pool) -> None:
    pool.run(cases.late_hook_order, 2)
