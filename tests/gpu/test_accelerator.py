"""The engine on an accelerator. Without one the same cases run on the CPU, so that they are known to work."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.dist.pool import Pool
from tests.gpu.cases import memory_case, overlap_case, parity_case

HAS_ACCELERATOR = torch.accelerator.current_accelerator(check_available=True) is not None
pytestmark = [pytest.mark.dist, *([pytest.mark.gpu] if HAS_ACCELERATOR else [])]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="module", params=["0", "1"] if HAS_ACCELERATOR else ["0"])
def blocking_or_not(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Ranks whose kernels run one by one, and ranks whose kernels don't: equal numbers mean no forgotten wait."""
    before = os.environ.get("CUDA_LAUNCH_BLOCKING")
    os.environ["CUDA_LAUNCH_BLOCKING"] = request.param
    pool = Pool()
    try:
        yield pool
    finally:
        pool.close()
        if before is None:
            del os.environ["CUDA_LAUNCH_BLOCKING"]
        else:
            os.environ["CUDA_LAUNCH_BLOCKING"] = before


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("sharding", ["zero3", "layerzero"])
def test_parity(blocking_or_not: Pool, sharding: str, micro: int) -> None:
    options = {"sharding": sharding, **({"zero3_size": 2} if sharding == "layerzero" else {})}
    for off, moved in blocking_or_not.run(parity_case, 4, options=options, micro=micro):
        assert off < 1e-4 < 1e-2 < moved


def test_parity_with_gradients_in_host_memory(blocking_or_not: Pool) -> None:
    options = {"sharding": "layerzero", "zero3_size": 2, "accumulate": "full", "offload_grads": True}
    for off, moved in blocking_or_not.run(parity_case, 4, options=options, micro=3):
        assert off < 1e-4 < 1e-2 < moved


@pytest.mark.parametrize("depth", [0, 1])
def test_memory_bounds(ranks: Pool, depth: int) -> None:
    for reply in ranks.run(memory_case, 2, prefetch_depth=depth):
        # Streams run in order; threads may gather later than they could.
        assert reply["units"] == 1 + depth if reply["peak"] else reply["units"] <= 1 + depth
        assert reply["peak"] < reply["bound"]


def test_gathers_overlap_compute(ranks: Pool) -> None:
    for reply in ranks.run(overlap_case, 2):
        assert reply["gathers"] >= 6 and reply["compute"] > 0
        assert reply["overlapping"] > 0
