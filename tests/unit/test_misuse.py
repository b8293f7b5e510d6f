"""Arguments of a wrong kind or in a wrong order: the error says what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import layerzero as lz


def test_something_else_than_a_configuration() -> None:
    cases: list[tuple[Any, str]] = [
        ("config.yml", r"got str: pass LayerZeROConfig\.from_yaml\('config\.yml'\)"),
        (Path("a.json"), r"LayerZeROConfig\.from_json\('a\.json'\)"),
        ({"zero3_size": 1}, r"got dict: pass LayerZeROConfig\.from_dict\(values\)"),
        (8, r"got int: pass a LayerZeROConfig, or options by name"),
    ]
    for config, message in cases:
        with pytest.raises(lz.ConfigError, match=message):
            lz.shard(nn.Linear(2, 2), config)


def test_checkpoint_arguments_in_another_order(tmp_path: Path) -> None:
    model: Any = lz.shard(nn.Linear(2, 2), units=[], min_num_params=1)
    optimizer: Any = torch.optim.SGD(model.parameters())
    path: Any = tmp_path / "run"
    for name, call in (("lz.save", lz.save), ("lz.load", lz.load)):
        order = rf"The order is {name}\(path, model, optimizer\)"
        with pytest.raises(lz.CheckpointError, match=rf"path: expected a str or a Path, got ShardedLinear\. {order}"):
            call(model, optimizer, path)
        with pytest.raises(lz.CheckpointError, match=rf"model: expected a sharded nn\.Module.*, got SGD\. {order}"):
            call(path, optimizer, model)
        with pytest.raises(lz.CheckpointError, match=rf"optimizer: expected.*, got \w*Path\. {order}"):
            call(str(path), model, path)
    assert not path.exists()
    lz.save(path, [model], [optimizer])
    lz.load(path, (model,), (optimizer,))


def test_warnings_name_the_line_that_called_the_library() -> None:
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda grad: grad)
    with pytest.warns(lz.LayerZeROWarning, match="'weight' has gradient hooks") as caught:
        lz.shard(model, units=[])
    assert caught[0].filename == __file__
    assert "lz.shard(model, units=[])" in Path(__file__).read_text().splitlines()[caught[0].lineno - 1]
