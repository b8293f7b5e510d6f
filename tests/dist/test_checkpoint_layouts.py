from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from layerzero.checkpoint.source import Source
from tests.dist import checkpoint_layout_cases as cases
from tests.dist.pool import Pool

pytestmark = pytest.mark.dist

RANKS = {"one": 1, "dp4": 4, "cp4": 4, "tp2 dp2": 4, "pp2 dp2": 4, "pp2 dp2 tied": 4, "pp2 tp2 dp2": 8}
UNTIED = [layout for layout in RANKS if "tied" not in layout]


def tensors(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Every tensor with every state, whole."""
    source = Source.open(folder)
    return {(name, state): source.full(name, state) for name in source.states for state in source.states[name]}


@pytest.mark.parametrize("source", ["tp2 dp2", "cp4", "pp2 tp2 dp2", "one"])
def test_saved_by_any_and_loaded_by_all(pool: Pool, tmp_path: Path, source: str) -> None:
    folder = tmp_path / "source"
    [expected, *_] = pool.run(cases.train_and_save, RANKS[source], layout=source, folder=str(folder))
    saved = tensors(folder)
    assert {state for _, state in saved} == {"value", "exp_avg", "exp_avg_sq"} and len(saved) > 100
    assert not any(t.isnan().any() for t in saved.values())
    for ranks in sorted({RANKS[layout] for layout in UNTIED}):
        layouts = [layout for layout in UNTIED if RANKS[layout] == ranks]
        for losses in pool.run(
            cases.load_save_and_step, ranks, layouts=layouts, source=str(folder), folder=str(tmp_path)
        ):
            for layout, loss in zip(layouts, losses, strict=True):
                assert math.isclose(loss, expected, rel_tol=1e-5), (layout, loss, expected)
                again = tensors(tmp_path / layout)
                assert again.keys() == saved.keys()
                assert all(torch.equal(again[key], saved[key]) for key in saved), layout


def test_tied_stages(pool: Pool, tmp_path: Path) -> None:
    """Copies of a tied parameter on two stages are saved under both names, and come back equal."""
    folder = tmp_path / "source"
    [expected, *_] = pool.run(cases.train_and_save, 4, layout="pp2 dp2 tied", folder=str(folder))
    saved = tensors(folder)
    assert torch.equal(saved["embed.weight", "value"], saved["head.weight", "value"])
    for [loss] in pool.run(
        cases.load_save_and_step, 4, layouts=["pp2 dp2 tied"], source=str(folder), folder=str(tmp_path)
    ):
        assert math.isclose(loss, expected, rel_tol=1e-6)
