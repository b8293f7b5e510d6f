"""Context parallelism equals one process, piece by piece."""

from __future__ import annotations

import pytest

from tests.dist import context_cases as cases
from tests.dist.pool import Pool

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_attention_equals_one_process(pool: Pool, ranks: int) -> None:
    """Lengths and heads that divide or don't, fewer heads than ranks, key heads shared across ranks."""
    assert pool.run(cases.attention_equals_one_process, ranks) == [len(cases.SHAPES) * 4] * ranks


def test_collectives_of_larger_groups(pool: Pool) -> None:
    assert pool.run(cases.one_collective_for_all_ranks, 3) == [len(cases.SHAPES) * 4 + 10] * 3


@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_traffic(pool: Pool, ranks: int) -> None:
    """Two all-to-alls each way; query, key, value and output cross once: (size - 1) / size of a part each."""
    part = 16 // ranks * 8 * 4 * 4  # bytes of one tensor's part
    nbytes = 4 * part * (ranks - 1) // ranks
    assert pool.run(cases.attention_traffic, ranks) == [[2, nbytes, 2, nbytes]] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_switch_and_gather(pool: Pool, ranks: int) -> None:
    assert pool.run(cases.switch_and_gather, ranks) == [10] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_of_a_mean(pool: Pool, ranks: int) -> None:
    pool.run(cases.shares, ranks)


def test_wrong_shapes_are_refused(pool: Pool) -> None:
    pool.run(cases.wrong_shapes_refused, 4)
