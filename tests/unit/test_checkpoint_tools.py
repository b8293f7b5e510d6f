"""inspect, verify, export and diff, as functions and as commands; one process, nothing distributed."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import layerzero as lz
from layerzero import checkpoint, cli
from layerzero.checkpoint import manifest, source, storage
from layerzero.cli.app import app
from tests.unit.handmade import Handmade


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something distributed was used")

    for name in ("init_process_group", "new_group", "barrier", "all_reduce"):
        monkeypatch.setattr(dist, name, refuse)
    monkeypatch.setattr(manifest, "BLOCK_NBYTES", 16)
    monkeypatch.setattr(storage, "BLOCK_NBYTES", 16)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    Handmade().write(tmp_path / "run")
    return tmp_path / "run"


def command(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["ckpt", *map(str, args)], catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


def damage(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


class TestInspect:
    def test_what_is_told(self, run: Path) -> None:
        found = checkpoint.inspect(run)
        assert (found.step, found.kind, found.world_size, found.sharding) == (3, "layerzero", 4, "zero3")
        told = {t.name: t for t in found.tensors}
        assert told["a.weight"].states == {"value": "BF16", "exp_avg": "F32"} and told["a.weight"].num_shards == 2
        assert told["emb"].aliases == ("head.weight", "b.tied") and told["none"].states == {}
        assert told["count"].kind == "buffer" and told["emb"].numel == 18 and told["emb"].shape == (6, 3)
        assert found.optimizer is not None and found.optimizer.scalars == ["step"]
        assert found.optimizer.elementwise == {"exp_avg": ["F32"], "exp_avg_sq": ["F32"]}
        assert found.left_out == ("vae",) and found.num_rank_extra == 3 and found.extra_tensors[0].shape == (7,)
        assert json.loads(command("inspect", run, "--json")) == json.loads(json.dumps(found.as_dict()))

    def test_printed(self, run: Path) -> None:
        text = command("inspect", run, "--tensors")
        for part in (
            "step-00000003", "4 ranks", "zero3", "5 parameters, 1 buffers", "Adam", "exp_avg F32", "step per parameter",
            "lr 0.5", "left out", "vae", "rank-tp0-0.safetensors", "head.weight, b.tied", "[4, 5]", "of 3 ranks",
        ):  # fmt: skip
            assert part in text, part
        assert "head.weight" not in command("inspect", run)

    def test_strangers_cannot_control_the_terminal(self, tmp_path: Path) -> None:
        name = "\x1b[31mred[bold]\n\u202e"
        save_file({name: torch.ones(1)}, tmp_path / "x.safetensors")
        text = command("inspect", tmp_path, "--tensors")
        assert "\x1b" not in text and "\u202e" not in text and "\\x1b[31mred[bold]" in text

    def test_nothing_there(self, tmp_path: Path) -> None:
        assert "no such folder" in command("inspect", tmp_path / "absent", code=2)
        assert "holds no step 9; there: none" in command("inspect", tmp_path, "--step", 9, code=2)


class TestVerify:
    def test_good(self, run: Path) -> None:
        told: list[tuple[int, int]] = []
        found = checkpoint.verify(run, progress=lambda done, total: told.append((done, total)))
        pieces = manifest.loads((run / "step-00000003" / "manifest.json").read_bytes(), "x").pieces
        assert found.ok and found.nbytes == sum(p.nbytes for p in pieces)
        assert found.num_checksums == sum(p.num_blocks for p in pieces) > 20
        assert told == sorted(told) and told[-1] == (found.nbytes, found.nbytes)
        assert "ok: " in command("verify", run)
        assert json.loads(command("verify", run, "--json"))["ok"] is True

    def test_every_block_is_read(self, run: Path) -> None:
        """A bit anywhere in the data of any file is found, and all are named."""
        folder = run / "step-00000003"
        for path in folder.glob("*.safetensors"):
            header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
            for at in range(header, path.stat().st_size, 5):
                damage(path, at)
                [problem] = checkpoint.verify(run).problems
                assert path.name in problem and "damaged" in problem
                damage(path, at)
        for path in folder.glob("*.safetensors"):
            damage(path)
        assert len(checkpoint.verify(run).problems) == len(list(folder.glob("*.safetensors"))) == 4

    def test_printed(self, run: Path) -> None:
        damage(run / "step-00000003" / "rank-tp1-0.safetensors")
        text = command("verify", run, code=1)
        assert "rank-tp1-0.safetensors: tensor 'a.weight@tp1/exp_avg/0' is damaged" in text and "DAMAGED" in text

    @pytest.mark.parametrize(
        ("harm", "told"),
        [
            (lambda f: (f / "rank-tp0-0.safetensors").unlink(), "rank-tp0-0.safetensors: can't be read"),
            (lambda f: os.truncate(f / "rank-tp0-0.safetensors", 99), "rank-tp0-0.safetensors: 99 bytes, expected"),
            (lambda f: (f / "notes").touch(), "'notes' is not listed"),
            (lambda f: damage(f / "manifest.json"), "manifest.json: not a layerzero manifest"),
            (lambda f: damage(f / "manifest.json", 300), "manifest.json: its digest does not match"),
        ],
    )  # fmt: skip
    def test_the_rest_is_verified_all_the_same(self, run: Path, harm: Any, told: str) -> None:
        folder = run / "step-00000003"
        harm(folder)
        found = checkpoint.verify(folder)
        assert len(found.problems) == 1 and told in found.problems[0]
        assert (found.num_checksums > 10) is (told[:8] != "manifest")

    def test_bytes_of_no_piece_and_values_of_no_form(self, run: Path) -> None:
        folder = run / "step-00000003"
        path = folder / "manifest.json"
        content = json.loads(path.read_bytes())["content"]
        content["pieces"] = [p for p in content["pieces"] if p["state"] != "exp_avg_sq"]
        content["rank_extra"][1] = {"__float__": "1"}
        content["optimizer"]["scalars"]["emb"]["step"] = {"__tensor__": "extra.0"}
        path.write_bytes(manifest.seal(json.dumps(content).encode()))
        problems = checkpoint.verify(run).problems
        assert len(problems) == 3
        assert "rank-tp0-1.safetensors: tensor 'emb/exp_avg_sq/0' is covered by no piece" in problems[0]
        assert "rank_extra of rank 1: malformed value under __float__" in problems[1]
        assert "an optimizer value asks for tensor 'extra.0'" in problems[2]

    def test_plain_files(self, tmp_path: Path) -> None:
        save_file({"x": torch.ones(3)}, tmp_path / "x.safetensors")
        found = checkpoint.verify(tmp_path)
        assert found.ok and found.num_checksums == found.nbytes == 0
        assert "no checksums" in command("verify", tmp_path)
        os.truncate(tmp_path / "x.safetensors", 70)
        assert "x.safetensors: not a usable" in command("verify", tmp_path, code=1)
        assert "no such folder" in command("verify", tmp_path / "absent", code=2)


class TestExport:
    def names(self, prefix: str = "") -> dict[str, torch.Tensor]:
        found = {name: t for (name, state), t in Handmade().tensors.items() if state == "value"}
        found |= dict.fromkeys(("head.weight", "b.tied"), found["emb"])
        return {name.removeprefix(prefix): t for name, t in found.items() if name.startswith(prefix)}

    @pytest.mark.parametrize("chunk", [source._CHUNK_NUMEL, 4])
    def test_one_file(self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
        monkeypatch.setattr(source, "_CHUNK_NUMEL", chunk)
        told: list[tuple[int, int]] = []
        result = checkpoint.export(run, tmp_path / "out", progress=lambda done, total: told.append((done, total)))
        loaded = load_file(tmp_path / "out" / "model.safetensors")
        expected = self.names()
        assert set(loaded) == set(expected) and result.num_tensors == len(expected) == 8
        for name, tensor in expected.items():
            assert torch.equal(loaded[name], tensor) and loaded[name].dtype is tensor.dtype, name
        assert told[-1] == (result.nbytes, result.nbytes) and os.listdir(result.folder) == ["model.safetensors"]
        with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_dtype(self, run: Path, tmp_path: Path, dtype: torch.dtype) -> None:
        name = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
        command("export", run, tmp_path / "out", "--dtype", name)
        for key, value in load_file(tmp_path / "out" / "model.safetensors").items():
            tensor = self.names()[key]
            assert torch.equal(value, tensor if key == "count" else tensor.to(dtype)), key

    def test_several_files(self, run: Path, tmp_path: Path) -> None:
        result = checkpoint.export(run, tmp_path / "out", max_shard_nbytes=100, name="diffusion_pytorch_model")
        index = json.loads((tmp_path / "out" / "diffusion_pytorch_model.safetensors.index.json").read_text())
        assert sorted(os.listdir(tmp_path / "out")) == sorted(result.files) and len(result.files) > 4
        assert index["metadata"]["total_size"] == result.nbytes == sum(t.nbytes for t in self.names().values())
        total = {name: t for file in result.files[1:] for name, t in load_file(tmp_path / "out" / file).items()}
        assert set(total) == set(index["weight_map"]) == set(self.names())
        for file in result.files[1:]:
            held = load_file(tmp_path / "out" / file)
            assert len(held) == 1 or sum(t.nbytes for t in held.values()) <= 100
            assert {name for name, where in index["weight_map"].items() if where == file} == set(held)
        assert result.files[1] == f"diffusion_pytorch_model-00001-of-{len(result.files) - 1:05d}.safetensors"
        assert checkpoint.diff(run, tmp_path / "out").same

    def test_prefix_and_aliases(self, run: Path, tmp_path: Path) -> None:
        for prefix, options, names in (
            ("a", [], {"weight", "bias"}), ("a.", [], {"weight", "bias"}), ("b", [], {"tied"}),
            ("b", ["--no-aliases"], {"tied"}),
            ("", ["--no-aliases"], {"a.weight", "a.bias", "emb", "norm", "count", "none"}),
        ):  # fmt: skip
            command("export", run, tmp_path / "out", "--prefix", prefix, "--force", *options)
            assert set(load_file(tmp_path / "out" / "model.safetensors")) == names
        assert "no tensor's name starts with 'x.'" in command("export", run, tmp_path / "new", "--prefix", "x", code=2)
        assert not (tmp_path / "new").exists()

    def test_nothing_is_overwritten(self, run: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        command("export", run, out, "--max-shard-size", "0.1KB")
        several = sorted(os.listdir(out))
        (out / "config.json").write_text("{}")
        assert "exists already" in command("export", run, out, code=2)
        assert sorted(os.listdir(out)) == sorted([*several, "config.json"])
        command("export", run, out, "--force")
        assert sorted(os.listdir(out)) == ["config.json", "model.safetensors"]  # no shard is left to be mixed in
        command("export", run, out, "--name", "other")
        assert "is a checkpoint itself" in command("export", run, run / "step-00000003", code=2)
        assert "not a folder" in command("export", run, out / "config.json", code=2)
        assert "expected a file name" in command("export", run, out, "--name", "../x", code=2)
        assert "expected a size" in command("export", run, tmp_path / "new", "--max-shard-size", "5 apples", code=2)

    def test_numbers_that_do_not_fit(self, tmp_path: Path) -> None:
        save_file({"big": torch.tensor([1.0, -1e5]), "inf": torch.tensor([float("inf")])}, tmp_path / "x.safetensors")
        out = tmp_path / "out"
        text = command("export", tmp_path / "x.safetensors", out, "--dtype", "fp16", code=2)
        assert "tensor 'big': 100000 does not fit into torch.float16" in text and os.listdir(out) == []
        command("export", tmp_path / "x.safetensors", out, "--dtype", "bf16")
        assert load_file(out / "model.safetensors")["inf"].item() == float("inf")

    def test_damaged_data_is_not_exported(self, run: Path, tmp_path: Path) -> None:
        damage(run / "step-00000003" / "rank-tp0-0.safetensors", -20)
        assert "is damaged" in command("export", run, tmp_path / "out", code=2)
        assert os.listdir(tmp_path / "out") == []

    @pytest.mark.parametrize("size", [100, 10**9])
    def test_killed_at_any_point(self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        """Without clean-up, as a killed process leaves it: never something that loads and is not complete."""
        exporting = importlib.import_module("layerzero.checkpoint.export")  # the name is the function's too
        full = checkpoint.export(run, tmp_path / "full", max_shard_nbytes=size)
        num_steps = 2 * len(full.files) + 1
        for fatal in range(num_steps):
            out = tmp_path / f"out{fatal}"
            with monkeypatch.context() as patch:
                done = 0

                def step(function: Any, fatal: int = fatal) -> Any:
                    def counted(*args: Any, **kwargs: Any) -> Any:
                        nonlocal done
                        if done == fatal:
                            raise KeyboardInterrupt
                        done += 1
                        return function(*args, **kwargs)

                    return counted

                patch.setattr(exporting, "write_file", step(exporting.write_file))
                patch.setattr(exporting, "write_synced", step(exporting.write_synced))
                patch.setattr(os, "rename", step(os.rename))
                patch.setattr(exporting.shutil, "rmtree", lambda *args, **kwargs: None)
                try:
                    checkpoint.export(run, out, max_shard_nbytes=size)
                    assert fatal == num_steps - 1
                except KeyboardInterrupt:
                    with pytest.raises(lz.CheckpointError):
                        checkpoint.inspect(out)
            command("export", run, out, "--max-shard-size", size, "--force")
            assert checkpoint.diff(out, tmp_path / "full").same and sorted(os.listdir(out)) == sorted(full.files)


class TestDiff:
    def other(self, tmp_path: Path, **changes: torch.Tensor | None) -> Path:
        weights = {n: t for (n, s), t in Handmade().tensors.items() if s == "value"} | {"head.weight": torch.ones(0)}
        weights["head.weight"] = weights["b.tied"] = weights["emb"]
        named = {name.replace("_", "."): t for name, t in changes.items()}
        weights = {n: t.clone() for n, t in {**weights, **named}.items() if t is not None}
        save_file(weights, tmp_path / "other.safetensors")
        return tmp_path / "other.safetensors"

    def test_same(self, run: Path, tmp_path: Path) -> None:
        found = checkpoint.diff(run, self.other(tmp_path))
        assert found.same and found.num_tensors == 8 and not found.dtypes
        assert "no difference; 8 pairs" in command("diff", run, tmp_path / "other.safetensors")
        assert checkpoint.diff(run, run, optimizer=True).num_tensors == 10

    def test_each_kind(self, run: Path, tmp_path: Path) -> None:
        made = Handmade().tensors
        weight = made["a.weight", "value"].float()
        weight[2, 3] += 0.25
        count = made["count", "value"].clone()
        count[1, 1] -= 3
        path = self.other(
            tmp_path, a_weight=weight, count=count, norm=None, more=torch.ones(2), a_bias=torch.ones(6),
        )  # fmt: skip
        found = checkpoint.diff(run, path)
        told = {(d.name, d.what): d for d in found.differences}
        assert set(told) == {
            ("norm", "only in a"), ("more", "only in b"), ("a.bias", "shape"), ("a.weight", "values"),
            ("count", "values"),
        }  # fmt: skip
        assert told["a.weight", "values"].max_abs == pytest.approx(0.25, abs=1e-6)
        assert told["count", "values"].max_abs == 3 and told["a.bias", "shape"].detail == "[5] and [6]"
        assert found.dtypes == ("a.weight, value",)
        text = command("diff", run, path, code=1)
        assert "up to 0.25 apart" in text and "5 differences" in text and "another dtype" in text
        assert json.loads(command("diff", run, path, "--json", code=1))["same"] is False

    def test_dtype_alone_is_no_difference(self, run: Path, tmp_path: Path) -> None:
        found = checkpoint.diff(run, self.other(tmp_path, a_bias=Handmade().tensors["a.bias", "value"].double()))
        assert found.same and found.dtypes == ("a.bias, value",)

    def test_not_a_number_and_large_integers(self, tmp_path: Path) -> None:
        nan, inf = float("nan"), float("inf")
        sides = []
        for i, shift in enumerate((0, 1)):
            tensors = {
                "nan": torch.tensor([nan, inf, 1.0]), "some": torch.tensor([nan if i else 1.0]),
                "inf": torch.tensor([inf if i else -inf]), "large": torch.tensor([2**62 + shift]),
            }  # fmt: skip
            save_file(tensors, tmp_path / f"{i}.safetensors")
            sides.append(tmp_path / f"{i}.safetensors")
        found = {d.name: d.max_abs for d in checkpoint.diff(*sides).differences}
        assert set(found) == {"some", "inf", "large"}
        assert found["some"] != found["some"] and found["inf"] == inf and found["large"] == 1

    def test_optimizer(self, run: Path, tmp_path: Path) -> None:
        made = Handmade()
        made.tensors["emb", "exp_avg_sq"] += 1
        folder = made.write(tmp_path / "two")
        path = folder / "manifest.json"
        content = json.loads(path.read_bytes())["content"]
        content["optimizer"]["groups"][0]["options"]["lr"] = 0.25
        content["optimizer"]["scalars"]["a.bias"]["step"] = {"__number__": ["F32", 4.0]}
        path.write_bytes(manifest.seal(json.dumps(content).encode()))
        assert checkpoint.diff(run, folder).same
        found = checkpoint.diff(run, folder, optimizer=True)
        told = {(d.name, d.state): d for d in found.differences}
        assert set(told) == {
            ("emb", "exp_avg_sq"), ("a.bias", "states"), *((n, "options") for n in ("a.weight", "a.bias", "emb")),
        }  # fmt: skip
        assert told["emb", "exp_avg_sq"].max_abs == pytest.approx(1, abs=1e-4)
        assert told["emb", "options"].detail == "lr 0.5 and 0.25"
        without = tmp_path / "plain"
        checkpoint.export(run, without)
        [only] = checkpoint.diff(run, without, optimizer=True).differences
        assert (only.name, only.what) == ("optimizer", "only in a")


def test_without_typer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "layerzero.cli.app")
    with pytest.raises(SystemExit, match="needs typer and rich, and typer is missing: pip install"):
        cli.main()
