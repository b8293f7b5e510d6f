"""The accelerator lane on a simulated device: right numbers, and no access that the streams leave unordered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import layerzero as lz
import layerzero.group
from layerzero.group import _Reduction
from layerzero.lanes import StreamLane
from layerzero.module import engine_of
from tests.dist import parity
from tests.dist.models import Block, OddModel
from tests.dist.pool import Pool
from tests.dist.streams import simulated_streams


class _Forgetful(_Reduction):
    """Lets go of what the reduce lane made as soon as the sync lane has been told to read it."""

    handed_over = property(lambda self: None, lambda self, value: None)  # type: ignore[assignment]


def stream_case(strategy: str, micro: int, dtype: str, options: dict[str, Any], break_lane: str = "") -> dict[str, Any]:
    _, world = parity.rank_and_size()
    before, want = parity.odd_reference(world, micro, dtype)
    torch.manual_seed(7)
    model = OddModel()
    run = StreamLane.run
    with simulated_streams() as detector:
        if break_lane == "hand over":
            layerzero.group._Reduction = _Forgetful
        options = {**parity.STRATEGIES[strategy], **options, "zero3_size": 2}
        lz.shard(model, units=[Block], param_dtype=dtype, buffer_dtype=dtype, **options)
        if break_lane and break_lane != "hand over":
            broken = getattr(engine_of(model).lanes, break_lane)
            StreamLane.run = lambda lane, fn, after=(): run(lane, fn, () if lane is broken else after)
        try:
            got = parity.sharded(model, parity.Setup(micro, parity.lm_loss, parity.odd_batches(world, micro)))
        finally:
            StreamLane.run = run
            layerzero.group._Reduction = _Reduction
    parity.compare(want, got, before, dtype)
    return {"races": detector.races[:5], "streams": len(detector.num_ops)}


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("strategy", list(parity.STRATEGIES))
def test_no_unordered_access(pool: Pool, strategy: str, micro: int) -> None:
    for reply in pool.run(stream_case, 4, strategy=strategy, micro=micro, dtype="bf16", options={}):
        assert reply["races"] == []
        assert reply["streams"] >= 2


@pytest.mark.parametrize(
    "options",
    [
        {"prefetch_depth": 0}, {"prefetch_depth": 2, "backward_prefetch": "BACKWARD_POST"},
        {"keep_num_params": 1300}, {"keep_num_params": 10**9, "accumulate": "full"},
    ],
)  # fmt: skip
def test_no_unordered_access_with_other_schedules(pool: Pool, options: dict[str, Any]) -> None:
    for reply in pool.run(stream_case, 4, strategy="layerzero", micro=2, dtype="fp32", options=options):
        assert reply["races"] == []


@pytest.mark.parametrize("lane", ["unshard", "refresh", "reduce", "sync", "hand over"])
def test_a_missing_dependency_is_seen(pool: Pool, lane: str) -> None:
    replies = pool.run(stream_case, 4, strategy="layerzero", micro=2, dtype="bf16", options={}, break_lane=lane)
    assert all(reply["races"] for reply in replies)
