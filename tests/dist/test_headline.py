"""The headline comparison compares like with like."""

from __future__ import annotations

import pytest

from benchmarks.headline_rank import SYSTEMS
from tests.dist import headline_cases
from tests.dist.pool import Pool

pytestmark = pytest.mark.dist


def test_both_systems_train_like_one_process(pool: Pool) -> None:
    for losses in pool.run(headline_cases.losses_of_both, 4):
        assert len(set(losses["plain"])) == 4 and len(losses) == 1 + len(SYSTEMS) == 3
        for name in SYSTEMS:
            assert losses[name] == pytest.approx(losses["plain"], rel=1e-5), name
