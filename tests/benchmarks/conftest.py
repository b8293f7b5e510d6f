from __future__ import annotations

import pytest

from benchmarks.links import why_not_two_nodes


@pytest.fixture(scope="session")
def two_nodes() -> None:
    """For tests that make network namespaces."""
    if missing := why_not_two_nodes():
        pytest.skip(missing)
