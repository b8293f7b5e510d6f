"""docs/checkpoint-format.md: its reader reads what the library writes, and both agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from layerzero.checkpoint import manifest, storage
from layerzero.checkpoint.source import Source
from tests.unit.handmade import Handmade, documented_reader


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("block", [None, 16])
def test_documented_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int | None) -> None:
    if block is not None:
        monkeypatch.setattr(manifest, "BLOCK_NBYTES", block)
        monkeypatch.setattr(storage, "BLOCK_NBYTES", block)
    made = Handmade()
    folder = made.write(tmp_path)
    read = documented_reader(block)["read_checkpoint"](folder)
    expected = {("model", *key): as_bytes(t) for key, t in made.tensors.items() if t.numel()}
    expected["extra", "extra.0", "value"] = as_bytes(made.extra)
    assert {key: bytes(data) for key, data in read.items()} == expected
    source = Source.open(folder)
    for (name, state), tensor in made.tensors.items():
        full = source.full(name, state)
        assert torch.equal(full, tensor) and full.dtype is tensor.dtype
        assert torch.equal(torch.cat(list(source.chunks(name, state))), tensor.reshape(-1))
    assert torch.equal(source.decode(source.manifest.extra)["data"], made.extra)


def test_documented_reader_compares_checksums(tmp_path: Path) -> None:
    folder = Handmade().write(tmp_path)
    path = folder / "rank-tp0-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(AssertionError):
        documented_reader()["read_checkpoint"](folder)
