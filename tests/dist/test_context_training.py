"""Context parallelism under the engine: parameters, gradients and norms of one process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from tests.dist import context_models, context_training
from tests.dist.pool import Pool

pytestmark = pytest.mark.dist

MESHES = {"cp2-dp2": (2, 2), "cp4": (1, 4), "dp4": (4, 1)}  # (dp, cp)


@pytest.mark.parametrize("mesh", MESHES)
def test_token_model(pool: Pool, mesh: str) -> None:
    dp, cp = MESHES[mesh]
    configurations = [
        {"name": "tokens", "dp": dp, "cp": cp, "strategy": strategy, "micro": micro, "lane": lane, "dtype": dtype}
        for (strategy, micro), lane, dtype in zip(
            product(["layerzero", "zero1", "zero3"], [1, 4]),
            ["threads", "late", "threads", "late", "late", "threads"],
            ["fp32", "fp32", "bf16", "fp32", "fp32", "fp32"],
            strict=True,
        )
    ]
    assert pool.run(context_training.cases, 4, configurations=configurations) == [6] * 4


@pytest.mark.parametrize("strategy", ["layerzero", "zero1", "zero3"])
@pytest.mark.parametrize("micro", [1, 4])
def test_same_tokens_in_another_shape(pool: Pool, strategy: str, micro: int) -> None:
    assert min(pool.run(context_training.same_tokens, 4, strategy=strategy, micro=micro)) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "wan", "latte"])
def test_real_models(pool: Pool, name: str) -> None:
    """Lengths and heads don't divide: Llama 9 tokens, 4 heads; Wan 8 tokens, 2 heads; Latte 2 frames."""
    configurations = [
        {"name": name, "dp": 2, "cp": 2, "strategy": "layerzero", "micro": 4},
        {"name": name, "dp": 2, "cp": 2, "strategy": "layerzero", "micro": 1, "recompute": True, "lane": "late"},
        {"name": name, "dp": 2, "cp": 2, "strategy": "zero1", "micro": 1, "dtype": "bf16"},
        {"name": name, "dp": 1, "cp": 4, "strategy": "zero3", "micro": 4},
    ]
    if name == "latte":
        configurations.pop()  # two frames
    num = len(configurations)
    assert pool.run(context_training.cases, 4, timeout=280, configurations=configurations) == [num] * 4


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "case",
    [
        context_models.wan_shapes,
        context_models.latte_shapes,
        context_models.different_samples_refused,
        context_models.llama_sequences,
        context_models.other_language_models,
    ],
    ids=lambda case: case.__name__,
)
def test_shapes_and_options_of_real_models(pool: Pool, case: Callable[[], None], ranks: int) -> None:
    pool.run(case, ranks)
