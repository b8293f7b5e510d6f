"""Gradients at rest: one number for the whole model on every rank, and errors where there is none yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.dist import grads_cases as cases
from tests.dist.pool import Pool

pytestmark = pytest.mark.dist

WAYS = [("layerzero", 4, "late"), ("zero3", 2, "threads"), ("ddp", 2, "threads"), ("hsdp", 4, "threads")]


@pytest.mark.parametrize(("strategy", "world", "lane"), WAYS, ids=[w[0] for w in WAYS])
@pytest.mark.parametrize("case", [cases.norms, cases.not_finite, cases.local_work], ids=lambda c: c.__name__)
def test_one_answer_for_all_ranks(pool: Pool, case: Callable[..., Any], strategy: str, world: int, lane: str) -> None:
    pool.run(case, world, strategy=strategy, lane=lane)


@pytest.mark.parametrize(("strategy", "world", "lane"), [("layerzero", 4, "late"), ("zero1", 2, "threads")])
def test_an_unsynchronised_gradient_is_refused(pool: Pool, strategy: str, world: int, lane: str) -> None:
    pool.run(cases.refused, world, strategy=strategy, lane=lane)


@pytest.mark.parametrize(
    ("strategy", "world", "lane", "model", "dtype", "optimizer"),
    [
        ("layerzero", 4, "late", "net", "fp32", "loop"),
        ("layerzero", 4, "threads", "net", "fp16", "fused"),
        ("layerzero", 4, "threads", "tiny", "fp32", "loop"),
        ("layerzero", 4, "late", "tiny", "fp32", "fused"),
        ("zero3", 3, "threads", "tiny", "fp16", "loop"),
        ("zero1", 2, "threads", "net", "fp32", "fused"),
        ("ddp", 2, "threads", "net", "fp32", "loop"),
    ],
)
def test_loss_scaling_skips_on_all_ranks_together(
    pool: Pool, strategy: str, world: int, lane: str, model: str, dtype: str, optimizer: str
) -> None:
    scales = pool.run(cases.scaled, world, strategy=strategy, lane=lane, model=model, dtype=dtype, optimizer=optimizer)
    assert scales == [[256.0, 128.0, 128.0, 128.0, 64.0, 64.0]] * world


@pytest.mark.parametrize(("strategy", "world", "lane"), [("layerzero", 4, "threads"), ("zero3", 2, "late")])
def test_optimizers_are_scaled_apart(pool: Pool, strategy: str, world: int, lane: str) -> None:
    pool.run(cases.two_optimizers, world, strategy=strategy, lane=lane)
