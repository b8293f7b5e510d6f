"""Ranges in a torch.profiler trace carry the unit's name; the traffic report tells how much was exposed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import layerzero as lz
from tests.dist.models import Block, OddModel
from tests.dist.parity import drain
from tests.dist.pool import Pool
from tests.dist.test_counts import train_step

pytestmark = pytest.mark.dist


def ranges_case(all_threads: bool) -> dict[str, Any]:
    """Names of our ranges in one steady step, those on other threads than the caller's, and the report's times."""
    model = OddModel()
    lz.shard(model, units=[Block], sharding="layerzero", zero3_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        train_step(model, optimizer, 2, step)
    drain(model)
    lz.traffic_report(model, reset=True)
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=all_threads)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
        with torch.profiler.record_function("caller"):
            train_step(model, optimizer, 2, 2)
        drain(model)
    events = [e for e in profiler.events() or [] if e.name.startswith("layerzero.")]
    caller = next(e.thread for e in profiler.events() or [] if e.name == "caller")
    report = lz.traffic_report(model, reset=True)
    after = lz.traffic_report(model)
    return {
        "names": sorted({e.name for e in events}),
        "elsewhere": sorted({e.name for e in events if e.thread != caller}),
        "seconds": [report.communication_seconds, report.exposed_seconds],
        "share": report.exposed_share,
        "after": [after.communication_seconds, after.exposed_seconds],
        "text": str(report),
    }


def test_every_lane_shows_its_units(pool: Pool) -> None:
    units = ["(root)", *(f"blocks.{i}" for i in range(3))]
    for reply in pool.run(ranges_case, 4, all_threads=True):
        lanes = {f"layerzero.{lane} {unit}" for lane in ("unshard", "refresh", "reduce", "sync") for unit in units}
        assert set(reply["elsewhere"]) == lanes
        own = set(reply["names"]) - lanes
        assert {f"layerzero.pack {unit}" for unit in units} <= own
        assert {name.split()[0] for name in own} == {"layerzero.pack", "layerzero.wait"}


def test_waits_show_in_an_ordinary_profile(pool: Pool) -> None:
    for reply in pool.run(ranges_case, 4, all_threads=False):
        assert reply["elsewhere"] == []
        assert "layerzero.wait reductions" in reply["names"]


def test_exposed_share(pool: Pool) -> None:
    for reply in pool.run(ranges_case, 4, all_threads=False):
        communicating, exposed = reply["seconds"]
        assert communicating > 0 and exposed > 0
        assert reply["share"] == exposed / communicating
        assert f"{reply['share']:.0%} exposed" in reply["text"]
        assert reply["after"] == [0, 0]


def stream_report_case() -> list[Any]:
    from tests.dist.streams import simulated_streams

    model = OddModel()
    with simulated_streams():
        lz.shard(model, units=[Block], sharding="zero3")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train_step(model, optimizer, 1, 0)
    report = lz.traffic_report(model)
    return [report.exposed_share, "exposed" in str(report), report.num_steps]


def test_no_share_where_lanes_are_streams(pool: Pool) -> None:
    assert pool.run(stream_report_case, 2) == [[None, False, 1]] * 2
