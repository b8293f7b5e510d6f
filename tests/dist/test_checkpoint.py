from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.dist import checkpoint_cases as cases
from tests.dist.pool import Pool

pytestmark = pytest.mark.dist

PAIRS = [
    (("ddp", 2), ("layerzero:2", 4)),
    (("zero1", 3), ("zero3", 2)),
    (("zero2", 4), ("ddp", 1)),
    (("zero3", 4), ("hsdp:2", 4)),
    (("hsdp:2", 4), ("zero3", 3)),
    (("layerzero:2", 4), ("zero3", 1)),
    (("layerzero:2", 4), ("layerzero:4", 8)),
    (("full:4", 8), ("layerzero:2", 2)),
    (("zero3", 1), ("zero1", 2)),
]


def assemble(ranks: list[dict[str, Any]], key: str = "slices") -> dict[tuple[str, str], dict[int, float]]:
    """Every element by parameter and state; replicas have to agree."""
    whole: dict[tuple[str, str], dict[int, float]] = {}
    for rank in ranks:
        for name, start, states in rank[key]:
            for state, values in states.items():
                elements = whole.setdefault((name, state), {})
                for i, value in enumerate(values, start):
                    assert elements.setdefault(i, value) == value
    return whole


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_reshards(pool: Pool, tmp_path: Path, source: tuple[str, int], target: tuple[str, int]) -> None:
    saved = pool.run(cases.train_and_save, source[1], folder=str(tmp_path), sharding=source[0], steps=3)
    loaded = pool.run(cases.load_and_step, target[1], folder=str(tmp_path), sharding=target[0], steps=3)
    expected = assemble(saved)
    assert assemble(loaded) == expected
    before, moments = assemble(loaded, "before"), [k for k in expected if k[1] == "exp_avg_sq"]
    assert before["head.weight" if ("head.weight", "value") in before else "embed.weight", "value"] != expected
    assert sum(any(expected[k].values()) for k in moments) > 10
    for rank in loaded:
        assert rank["adam_steps"] == [3.0]
        assert rank["lr"] == pytest.approx([1e-2 * 0.9**4, 3e-3 * 0.9**4])
        assert math.isclose(rank["next"], saved[0]["next"], rel_tol=1e-5)


@pytest.mark.parametrize("optimizer", ["SGD", "ASGD", "NAdam", "Adagrad", "Rprop"])
def test_other_optimizers(pool: Pool, tmp_path: Path, optimizer: str) -> None:
    options = {"folder": str(tmp_path), "steps": 2, "optimizer": optimizer}
    saved = pool.run(cases.train_and_save, 2, sharding="zero3", **options)
    loaded = pool.run(cases.load_and_step, 4, sharding="layerzero:2", **options)
    assert assemble(loaded) == assemble(saved)
    assert math.isclose(loaded[0]["next"], saved[0]["next"], rel_tol=1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("sharding", "world"), [("layerzero:2", 4), ("zero3", 2), ("ddp", 2), ("full:2", 4)])
def test_resume_equals_no_interruption(pool: Pool, tmp_path: Path, sharding: str, world: int, dtype: str) -> None:
    pool.run(cases.resume_equals_no_interruption, world, folder=str(tmp_path), sharding=sharding, dtype=dtype)


@pytest.mark.parametrize("sharding", ["layerzero:2", "zero3", "zero1"])
def test_first_forward_after_load(pool: Pool, tmp_path: Path, sharding: str) -> None:
    pool.run(cases.first_forward_after_load_uses_new_weights, 4, folder=str(tmp_path), sharding=sharding)


def test_background(pool: Pool, tmp_path: Path) -> None:
    [first, *_] = pool.run(cases.background_save, 4, folder=str(tmp_path), sharding="layerzero:2")
    assert first["latest"] == 2


def test_failed_saves(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for messages in pool.run(cases.failed_saves_leave_the_others, 2, folder=str(tmp_path)):
        full, background, *values, keep, step, stranger, desync, path = messages
        for text in (full, background):
            assert "No space left" in text and "rank 1" in text and "earlier ones" in text
        assert [v.split(": ")[1] for v in values] == ["extra", "extra['a'][1][2]", "extra"]
        assert "keep" in keep and "exists already" in step and "overwrite=True" in step
        assert "SGD: parameter 0 of group 0" in stranger
        assert "rank 0" in desync and "rank 1" in desync
        assert "file" in path


def test_differences_are_named(pool: Pool, tmp_path: Path) -> None:
    for told in pool.run(cases.differences, 2, folder=str(tmp_path)):
        text = told["text"]
        for name in ("missing: added", "pair", "blocks.2.down.weight", "blocks.0.up.bias ([29] there, [31] here)"):
            assert name in text
        assert "strict=False" in text
        assert told["missing"] == ["added"]
        assert {"pair", "blocks.2.gain"} < set(told["unexpected"])
        assert told["mismatched"] == ["blocks.0.up.bias ([29] there, [31] here)"]
        assert "optimizer (AdamW there, SGD here)" in told["class"]
        assert "no step 5; there: 0" in told["step"] and "no such folder" in told["none"]


def test_weights_only(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(cases.weights_only, 2, folder=str(tmp_path)):
        assert "states of AdamW (none were saved)" in text


def test_param_groups(pool: Pool, tmp_path: Path) -> None:
    pool.run(cases.param_groups, 4, folder=str(tmp_path))


def test_resume_from_configuration(pool: Pool, tmp_path: Path) -> None:
    for forgotten, absent in pool.run(cases.resume_from_configuration, 4, folder=str(tmp_path)):
        assert "lz.resume(model, optimizer)" in forgotten
        assert "no such folder" in absent


def test_ignored_modules(pool: Pool, tmp_path: Path) -> None:
    pool.run(cases.ignored_modules, 2, folder=str(tmp_path))


def test_retention(pool: Pool, tmp_path: Path) -> None:
    for seen in pool.run(cases.retention, 2, folder=str(tmp_path)):
        assert seen == [[5], [5, 10], [10, 15], [15, 20], [16, 20]]


def test_ranks_that_disagree(pool: Pool, tmp_path: Path) -> None:
    for told in pool.run(cases.ranks_that_disagree, 2, folder=str(tmp_path)):
        assert "NoneType" in told["path"] and "rank 1" in told["path"]
        assert "step: expected a whole number from 0, got 2.5" in told["step"]
        assert "optimizers is ['AdamW'] on rank 0 and [] on rank 1" in told["optimizer"]
        assert "rank 1" in told["list"]
        assert "home0" in told["cwd"] and "home1" in told["cwd"] and "working folder" in told["cwd"]
        assert "inference_mode" in told["inference"]


def test_copies_that_differ(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(cases.copies_that_differ, 2, folder=str(tmp_path)):
        assert "(0)" in text and "(1)" in text and "all ranks share" in text


def test_one_rank_waits(pool: Pool, tmp_path: Path) -> None:
    pool.run(cases.one_rank_waits, 2, folder=str(tmp_path))


def test_no_room_for_a_copy(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(cases.no_room_for_a_copy, 2, folder=str(tmp_path), timeout=60):
        assert "nothing was saved" in text and "no room for a copy" in text and "rank 1" in text


def test_untied_into_tied(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(cases.untied_into_tied, 2, folder=str(tmp_path)):
        assert "a.weight, b.weight (one tensor here, different values there)" in text
