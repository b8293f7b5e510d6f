"""The testbed's arguments, what it does where a system dies, and its report; ranks are stand-ins."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import typer
from rich.console import Console

from benchmarks import testbed
from benchmarks.jobs import JobError, Shape, Task
from benchmarks.links import OneNode, bits_per_second
from benchmarks.testbed_report import Group, as_json, summary, table
from benchmarks.workload import Workload


def call(*arguments: str) -> None:
    app = typer.Typer()
    app.command()(testbed.main)
    typer.main.get_command(app).main(list(arguments), standalone_mode=False)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--micro-batches", "x"], ["--micro-batches", "whole numbers", '"x"']),
        (["--micro-batches", "0"], ["--micro-batches", "from 1 on"]),
        (["--micro-batches", "1,1"], ["--micro-batches", "different"]),
        (["--micro-batches", "1,"], ["--micro-batches", "whole numbers"]),
        (["--dtype", "fp16"], ["--dtype", "bf16 or fp32"]),
        (["--rate", "nonsense"], ["--rate", "mbit"]),
        (["--rate", "1bit"], ["--rate", "1kbit to 1tbit"]),
        (["--width", "60"], ["--width", "multiple of 8"]),
        (["--layers", "0"], ["--layers", "1"]),
        (["--rounds", "0"], ["--rounds", "1"]),
        (["--alive", "1"], ["--alive", "2"]),
        (["--systems", "ddp-zero9"], ["--systems", "ddp-zero9", "ddp-zero1"]),
        (["--systems", "zero1,fsdp2,zero1"], ["--systems", "more than once: zero1"]),
        (["--systems", "deepspeed", "--deepspeed-python", "/no/python"], ["--deepspeed-python", "/no/python"]),
        (["--output", "/dev/null/below/report.json"], ["--output", "/dev/null/below/report.json"]),
        (["--output", "/"], ["--output", "directory"]),
    ],
    ids=" ".join,
)
def test_wrong_arguments(arguments: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testbed, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(typer.BadParameter) as caught:
        call(*arguments)
    assert all(words in caught.value.format_message() for words in expected)


def test_output_is_checked_before_and_stays_as_it_is(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "a" / "b" / "new.json"
    old.write_text("{}")
    testbed._check_writable(old)
    testbed._check_writable(new)
    assert old.read_text() == "{}" and new.parent.is_dir() and not new.exists()


@pytest.mark.parametrize(
    ("rate", "bits"), [("1gbit", 1e9), ("1.5Mbit", 1.5e6), ("10mbps", 8e7), ("1kibit", 1024), (".5mbit", 5e5)]
)
def test_rates_in_units_of_tc(rate: str, bits: float) -> None:
    assert bits_per_second(rate) == bits


def test_slow_links_get_time() -> None:
    """At 10 Mbit/s fully sharded parameters of the default workload take some 380 s for four micro-batches."""
    plan = testbed.Plan(1, (1, 4))
    assert 180 < testbed.request_seconds(Workload(), plan, "1gbit") < 600
    assert testbed.request_seconds(Workload(), plan, "10mbit") * 2 / 3 > 2 * 380


class StandIn:
    """A job whose steps take 2 s, LayerZeRO's 1 s, until the request at which it is to die."""

    dies: ClassVar[dict[tuple[str, int], str]] = {}  # by name and group, before which request
    started: ClassVar[list[str]] = []

    def __init__(self, name: str, python: str, nodes: Any, task: Task, folder: Path) -> None:
        self.name, self.closed = name, False
        self.dies_at = self.dies.get((name, int(folder.name)), "")
        self.asked: list[str] = []
        self.started.append(name)

    def wait_until_built(self) -> None:
        self.ask("build")

    def ask(self, do: str, **_: Any) -> list[dict[str, Any]]:
        assert not self.closed
        self.asked.append(do)
        if self.dies_at == f"{do} {self.asked.count(do)}":
            raise JobError(f"{self.name}: rank 0 ended")
        seconds = 1.0 if self.name == "layerzero" else 2.0
        return [{"seconds": seconds, "params": 4, "optimizer": 8, "buffers": 2, "peak": 16, "report": "exposed"}]

    def close(self) -> None:
        self.closed = True


Measure = Callable[..., list[Group]]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Measure:
    monkeypatch.setattr(testbed, "Job", StandIn)

    def run(dies: dict[tuple[str, int], str], alive: int = 2) -> list[Group]:
        StandIn.dies, StandIn.started = dies, []
        plan = testbed.Plan(3, (2,), alive)
        task = Task(Shape(), Workload(), 1)
        saved: list[str] = []
        groups = testbed.measure(
            ["fsdp2", "zero1"], OneNode(), task, plan, {}, Console(file=io.StringIO()),
            lambda groups: saved.append(json.dumps(as_json(groups, {}))),
        )  # fmt: skip
        assert json.loads(saved[-1]) == json.loads(json.dumps(as_json(groups, {})))
        table(groups, plan.micro_batches)
        return groups

    return run


def rounds(groups: list[Group]) -> list[dict[str, int]]:
    return [{name: len(measured.seconds[2]) for name, measured in group.items()} for group in groups]


def test_all_live(measure: Measure) -> None:
    groups = measure({})
    assert rounds(groups) == [{"layerzero": 3, "fsdp2": 3}, {"layerzero": 3, "zero1": 3}]
    systems = summary(groups)
    assert {name: s["num_rounds"] for name, s in systems.items()} == {"layerzero": 6, "fsdp2": 3, "zero1": 3}
    assert systems["layerzero"]["groups"] == [0, 1] and systems["zero1"]["groups"] == [1]
    assert systems["zero1"]["median_ratio"] == {2: 0.5} and not systems["zero1"]["errors"]


def test_a_system_dies_in_its_second_round(measure: Measure) -> None:
    groups = measure({("fsdp2", 1): "steps 3"})  # one to warm up
    assert rounds(groups) == [{"layerzero": 2, "fsdp2": 1}, {"layerzero": 3, "zero1": 3}]
    systems = summary(groups)
    assert systems["fsdp2"]["errors"] == ["fsdp2: rank 0 ended"] and systems["fsdp2"]["median_ratio"] == {2: 0.5}
    assert not systems["layerzero"]["errors"] and not systems["zero1"]["errors"]


def test_the_others_of_its_group_go_on(measure: Measure) -> None:
    assert rounds(measure({("fsdp2", 1): "steps 3"}, alive=3)) == [{"layerzero": 3, "fsdp2": 1, "zero1": 3}]


@pytest.mark.parametrize(
    ("request_", "ours", "theirs"), [("build 1", 0, 0), ("memory 1", 0, 0), ("steps 2", 0, 1), ("steps 3", 1, 2)]
)
def test_layerzero_dies_and_starts_again(measure: Measure, request_: str, ours: int, theirs: int) -> None:
    groups = measure({("layerzero", 1): request_})
    assert rounds(groups) == [{"layerzero": ours, "fsdp2": theirs}, {"layerzero": 3, "zero1": 3}]
    assert groups[0]["layerzero"].error == "layerzero: rank 0 ended"
    assert f"{theirs} of 3 rounds, as layerzero died" in groups[0]["fsdp2"].error
    assert summary(groups)["layerzero"]["num_rounds"] == 3 + ours


def test_layerzero_dies_at_its_report(measure: Measure) -> None:
    groups = measure({("layerzero", 2): "traffic 1"})
    assert rounds(groups)[1] == {"layerzero": 3, "zero1": 3} and groups[1]["layerzero"].error


def test_nothing_runs_alone_beside_what_did_not_start(measure: Measure) -> None:
    groups = measure({("fsdp2", 1): "build 1"})
    assert rounds(groups) == [{"layerzero": 0, "fsdp2": 0}, {"layerzero": 3, "zero1": 3}]
    measure({("layerzero", 1): "build 1"})
    assert StandIn.started == ["layerzero", "layerzero", "zero1"]
