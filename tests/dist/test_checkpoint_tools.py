"""Checkpoints of real processes through the tools, plain files into sharded models, and the documented example."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from layerzero import checkpoint
from layerzero.checkpoint.folder import read_manifest
from tests.dist import tools_cases as cases
from tests.dist.models import OddModel
from tests.dist.pool import Pool
from tests.unit.handmade import blocks_of, documented_reader

pytestmark = pytest.mark.dist


def test_documented_example(pool: Pool, tmp_path: Path) -> None:
    pool.run(cases.documented_example, 2, folder=str(tmp_path))
    folder = tmp_path / "step-00000100"
    [shown] = map(json.loads, blocks_of("json"))
    made = json.loads(json.dumps(read_manifest(folder).model_dump()))
    [options], [abridged] = ([g.pop("options") for g in m["optimizer"]["groups"]] for m in (made, shown))
    assert abridged.items() <= options.items() and len(abridged) == 2
    saved_by = made.pop("saved_by")
    assert set(saved_by) == set(shown.pop("saved_by")) and saved_by["world_size"] == 2
    assert made == shown
    names = sorted([*os.listdir(folder), *os.listdir(tmp_path)])
    assert names == ["latest", "manifest.json", *sorted(shown["files"]), "step-00000100"]
    read = documented_reader()["read_checkpoint"](folder)
    weight = torch.frombuffer(read["model", "weight", "value"], dtype=torch.float32)
    assert weight.tolist() == [i - 0.5 for i in range(12)]
    assert set(read) == {("model", n, s) for n in ("weight", "bias") for s in ("value", "momentum_buffer")}


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of one seed by two layouts, and of another seed."""
    root = tmp_path_factory.mktemp("saved")
    for name, world, sharding, seed in (("a", 2, "zero3", 0), ("a2", 2, "ddp", 0), ("b", 2, "zero3", 1)):
        pool.run(cases.save_odd_model, world, folder=str(root / name), sharding=sharding, seed=seed)
    return root


def test_tools_on_a_real_checkpoint(saved: Path) -> None:
    found = checkpoint.inspect(saved / "a")
    assert (found.step, found.world_size, found.kind, found.num_rank_extra) == (1, 2, "layerzero", 2)
    shapes = {name: tuple(value.shape) for name, value in OddModel().state_dict().items()}
    told = {name: t.shape for t in found.tensors for name in (t.name, *t.aliases)}
    assert told == shapes
    assert found.optimizer is not None and list(found.optimizer.elementwise) == ["exp_avg", "exp_avg_sq"]
    assert found.optimizer.scalars == ["step"] and found.optimizer.groups[0]["lr"] == 1e-2
    verified = checkpoint.verify(saved / "a")
    assert verified.ok and verified.num_checksums > 10 and verified.nbytes < sum(found.files.values())
    same = checkpoint.diff(saved / "a", saved / "a2", optimizer=True)
    assert same.same and same.num_tensors > 60  # values and two states
    other = checkpoint.diff(saved / "a", saved / "b", optimizer=True)
    assert {d.what for d in other.differences} == {"values"} and len(other.differences) > 50


@pytest.fixture(scope="module")
def plain(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights in one file, in a folder with it, in several files with an index, and behind links."""
    root = tmp_path_factory.mktemp("plain")
    checkpoint.export(saved / "a", root / "one")
    checkpoint.export(saved / "a", root / "several", max_shard_nbytes=3000)
    (root / "cache").mkdir()
    for name in os.listdir(root / "several"):
        (root / "cache" / name).symlink_to(root / "several" / name)
    assert len(list((root / "several").glob("*.safetensors"))) > 3
    return {
        "file": root / "one" / "model.safetensors", "folder": root / "one", "index folder": root / "several",
        "index": root / "several" / "model.safetensors.index.json", "links": root / "cache",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "world", "sharding"),
    [("file", 4, "zero3"), ("folder", 1, "zero3"), ("index folder", 4, "layerzero"), ("index", 2, "ddp"), ("links", 2, "zero3")],
)
def test_plain_files_into_sharded_models(
    pool: Pool, plain: dict[str, Path], kind: str, world: int, sharding: str
) -> None:
    path, expected = str(plain[kind]), str(plain["file"])
    ranks: list[dict[str, Any]] = pool.run(cases.load_plain, world, path=path, expected=expected, sharding=sharding)
    for rank in ranks:
        held = {name: numel for name, numel in rank["held"].items() if numel}
        assert rank["read"] == held  # not an element more than this rank keeps
    if world > 1 and sharding != "ddp":
        assert max(sum(rank["read"].values()) for rank in ranks) < 0.75 * ranks[0]["total"]


def test_plain_files_that_do_not_fit(pool: Pool, plain: dict[str, Path], tmp_path: Path) -> None:
    weights = load_file(plain["file"])
    weights["pair"] = torch.ones(3)
    del weights["blocks.1.up.bias"]
    save_file(weights | {"more": torch.ones(1)}, tmp_path / "x.safetensors")
    texts = pool.run(cases.load_plain_that_does_not_fit, 2, path=str(tmp_path))
    for text in texts:
        assert "missing: blocks.1.up.bias;" in text and "unexpected: more;" in text
        assert "different: pair ([3] there, [2] here)" in text


def test_without_pickle(pool: Pool, tmp_path: Path) -> None:
    pool.run(cases.save_and_load_without_pickle, 2, folder=str(tmp_path))


@pytest.mark.parametrize("aliases", [True, False])
def test_exported_llama(pool: Pool, tmp_path: Path, aliases: bool) -> None:
    from transformers import LlamaForCausalLM

    expected = pool.run(cases.train_pretrained, 2, folder=str(tmp_path), kind="llama")[0]
    result = checkpoint.export(tmp_path / "run", tmp_path, aliases=aliases, max_shard_nbytes=20_000)
    assert len(result.files) > 2 and result.files[0] == "model.safetensors.index.json"
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {name: cases.checksum(value) for name, value in model.state_dict().items()} == expected
    held = {name for file in result.files[1:] for name in load_file(tmp_path / file)}
    assert ("lm_head.weight" in held) is aliases and "model.embed_tokens.weight" in held


def test_exported_wan(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import WanTransformer3DModel

    monkeypatch.setattr(WanTransformer3DModel, "_keep_in_fp32_modules", None)  # that one needs accelerate to be installed
    expected = pool.run(cases.train_pretrained, 2, folder=str(tmp_path), kind="wan")[0]
    checkpoint.export(tmp_path / "run", tmp_path, name="diffusion_pytorch_model")
    model = WanTransformer3DModel.from_pretrained(tmp_path)
    assert {name: cases.checksum(value) for name, value in model.state_dict().items()} == expected and len(expected) > 50
    half = checkpoint.export(tmp_path / "run", tmp_path / "half", dtype=torch.bfloat16, prefix="blocks.1")
    weights = load_file(tmp_path / "half" / half.files[0])
    assert weights and all(value.dtype is torch.bfloat16 for value in weights.values())
    for name, value in weights.items():
        assert torch.equal(value, model.state_dict()[f"blocks.1.{name}"].bfloat16())
