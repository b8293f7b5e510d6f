from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()
