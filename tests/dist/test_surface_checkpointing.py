"""Activation checkpointing: torch's reentrant and non-reentrant, wherever a user puts it."""

from __future__ import annotations

import pytest

from tests.dist import checkpointing_cases as cases
from tests.dist.pool import Pool

pytestmark = pytest.mark.dist

PLACES = [
    pytest.param(where, inside, model, id=f"{where}-{inside}-{model}")
    for where, inside, model in [
        ("units", "none", "plain"),
        ("units", "none", "frozen"),
        ("units", "processor", "plain"),
        ("none", "processor", "plain"),
        ("none", "part", "frozen"),
        ("region", "none", "plain"),
        ("region", "none", "frozen"),
        ("half", "part", "frozen"),
        ("units", "none", "shared"),
        ("units", "processor", "shared"),
    ]
]


@pytest.mark.parametrize(("where", "inside", "model"), PLACES)
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize(("strategy", "world", "lane"), [("layerzero", 4, "late"), ("zero3", 2, "threads")])
def test_training_with_checkpoints_equals_training_without(
    pool: Pool, where: str, inside: str, model: str, reentrant: bool, strategy: str, world: int, lane: str
) -> None:
    pool.run(
        cases.training, world, strategy=strategy, lane=lane, where=where, inside=inside, reentrant=reentrant,
        early_stop=world == 2, model=model,
    )  # fmt: skip


@pytest.mark.parametrize(("strategy", "world", "lane"), [("layerzero", 4, "late"), ("zero1", 2, "threads")])
def test_checkpoint_around_the_root(pool: Pool, strategy: str, world: int, lane: str) -> None:
    pool.run(cases.around_root, world, strategy=strategy, lane=lane)


@pytest.mark.parametrize(("strategy", "world", "lane"), [("layerzero", 4, "late"), ("zero3", 2, "threads")])
def test_recomputation_applies_the_same_casts(pool: Pool, strategy: str, world: int, lane: str) -> None:
    pool.run(cases.casts, world, strategy=strategy, lane=lane)
