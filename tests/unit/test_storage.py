"""Files against the safetensors library's own reader and writer."""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import layerzero as lz
from layerzero.checkpoint import storage
from layerzero.checkpoint.storage import DTYPES, Blob, TensorFile, check_regular, crc32, header_of, write_file


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    numel = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(high, (numel,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


def blob(key: str, tensor: torch.Tensor, *sizes: int) -> Blob:
    """In parts of these sizes, the last one as large as need be."""
    flat, name = tensor.reshape(-1), storage.dtype_name(tensor, key)
    parts = flat.split([*sizes, flat.numel() - sum(sizes)])
    return Blob(key, name, tuple(tensor.shape), lambda: iter(parts))


class TestWriting:
    @pytest.mark.parametrize("name", DTYPES)
    @pytest.mark.parametrize("block", [4 << 20, 16])
    def test_every_dtype_is_what_the_library_reads(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, block: int
    ) -> None:
        monkeypatch.setattr(storage, "BLOCK_NBYTES", block)
        tensor = random_tensor(DTYPES[name], (3, 7))
        tensors = {"b": tensor, "scalar": tensor[0, 0], "empty": tensor[:0], "turned": tensor.T, "a": tensor[1]}
        checksums = write_file(tmp_path / "x.safetensors", [blob(key, t) for key, t in tensors.items()])
        loaded = safetensors.torch.load_file(tmp_path / "x.safetensors")
        assert set(loaded) == set(tensors)
        for (key, t), crcs in zip(tensors.items(), checksums, strict=True):
            assert loaded[key].dtype is t.dtype and loaded[key].shape == t.shape and bits(loaded[key]) == bits(t)
            data = bytes(bits(t))
            assert crcs == [zlib.crc32(data[at : at + block]) for at in range(0, len(data), block)]

    @given(st.lists(st.integers(0, 9), max_size=5), st.integers(1, 6), st.integers(0, 2**32))
    def test_parts_and_blocks_may_end_anywhere(self, sizes: list[int], items: int, seed: int) -> None:
        tensor = random_tensor(torch.float32, (sum(sizes) + 3,), seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(storage, "BLOCK_NBYTES", 4 * items)
            read, write = os.pipe()
            try:
                crcs = storage._write_blob(write, blob("x", tensor, *sizes))
                data = os.read(read, 10_000)
            finally:
                os.close(read)
                os.close(write)
        assert data == bytes(bits(tensor))
        assert crcs == [zlib.crc32(data[at : at + 4 * items]) for at in range(0, len(data), 4 * items)]

    def test_short_writes_are_continued(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        original, calls = os.write, []

        def short(fd: int, data: memoryview) -> int:
            calls.append(len(data))
            return original(fd, data[: max(1, len(data) // 2)])

        monkeypatch.setattr(os, "write", short)
        tensor = random_tensor(torch.int32, (50,))
        write_file(tmp_path / "x.safetensors", [blob("x", tensor)])
        assert torch.equal(safetensors.torch.load_file(tmp_path / "x.safetensors")["x"], tensor) and len(calls) > 8

    def test_header(self, tmp_path: Path) -> None:
        tensor = random_tensor(torch.bfloat16, (3,))
        header = header_of([blob("ü", tensor), blob("b", tensor)])
        assert int.from_bytes(header[:8], "little") == len(header) - 8 and len(header) % 8 == 0
        assert json.loads(header[8:]) == {
            "__metadata__": {"format": "pt"},
            "ü": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]},
            "b": {"dtype": "BF16", "shape": [3], "data_offsets": [6, 12]},
        }
        write_file(tmp_path / "none.safetensors", [])
        assert safetensors.torch.load_file(tmp_path / "none.safetensors") == {}

    def test_never_over_a_file_that_is_there(self, tmp_path: Path) -> None:
        (tmp_path / "target").write_text("keep")
        (tmp_path / "link").symlink_to(tmp_path / "target")
        for name in ("target", "link"):
            with pytest.raises(FileExistsError):
                write_file(tmp_path / name, [])
        assert (tmp_path / "target").read_text() == "keep"

    @pytest.mark.parametrize(
        "tensor",
        [torch.zeros(2, dtype=torch.complex128), torch.zeros(2).to_sparse(), torch.zeros(2, device="meta")],
        ids=str,
    )
    def test_what_has_no_form(self, tensor: torch.Tensor) -> None:
        with pytest.raises(lz.CheckpointError, match=r"'w': a tensor of .* can't be saved"):
            storage.dtype_name(tensor, "'w'")


class TestReading:
    @given(st.data())
    def test_ranges(self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
        shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=4)))
        tensor = random_tensor(torch.int16, shape, 1)
        path = tmp_path_factory.mktemp("ranges") / "x.safetensors"
        safetensors.torch.save_file({"x": tensor}, path)
        start = data.draw(st.integers(0, tensor.numel()))
        stop = data.draw(st.integers(start, tensor.numel()))
        part = TensorFile(path).read("x", start, stop)
        assert part.shape == (stop - start,) and part.is_contiguous() and part.dtype is torch.int16
        assert torch.equal(part, tensor.reshape(-1)[start:stop])

    def test_boxes_are_exact(self) -> None:
        random.seed(0)
        for shape in ((3, 4, 5), (1, 60), (60, 1), (2, 1, 30)):
            index = torch.arange(60).view(shape)
            for start in range(60):
                stop = random.randint(start + 1, 60)
                found = [index[box].reshape(-1) for box in storage._boxes(shape, start, stop)]
                assert torch.cat(found).tolist() == list(range(start, stop))
                assert len(found) <= 2 * len(shape) - 1

    def test_absent_keys(self, tmp_path: Path) -> None:
        write_file(tmp_path / "x.safetensors", [blob("x", torch.ones(2))])
        with pytest.raises(lz.CheckpointError, match=r"x\.safetensors: 'y' can't be read"):
            TensorFile(tmp_path / "x.safetensors").read("y", 0, 1)

    def test_checksum(self) -> None:
        tensor = random_tensor(torch.float64, (5,))
        assert crc32(tensor) == zlib.crc32(bytes(bits(tensor))) and crc32(tensor[:0]) == 0


def odd_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Names with what is said of them."""
    good = folder / "good.safetensors"
    write_file(good, [blob("x", torch.arange(10))])
    data = good.read_bytes()
    header = data[: 8 + int.from_bytes(data[:8], "little")]
    broken = {
        "empty": b"", "short": data[:5], "cut": data[:-1], "longer": data + b"\0", "header only": header,
        "pickle": b"\x80\x04N.", "huge header": (2**63 - 1).to_bytes(8, "little") + data[8:],
        "no json": data[:8] + b"x" * (len(header) - 8) + data[len(header) :],
        "huge shape": header.replace(b"[10]", b"[9999999999999999999]") + data[len(header) :],
        "wrong shape": data.replace(b"[10]", b"[11]"), "wrong dtype": data.replace(b"I64", b"I32"),
        "no dtype": data.replace(b"I64", b"Q64"), "hole": data.replace(b"[0,80]", b"[8,80]"),
    }  # fmt: skip
    for name, content in broken.items():
        (folder / name).write_bytes(content)
        yield name, "not a usable safetensors file"
    (folder / "link").symlink_to(good)
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    yield from ((name, "not a plain file") for name in ("link", "folder", "pipe"))
    yield "absent", "can't be read"
    yield "zero\0byte", "can't be read"


def test_odd_files(tmp_path: Path) -> None:
    told = list(odd_files(tmp_path))
    for name, problem in told:
        with pytest.raises(lz.CheckpointError) as error:
            TensorFile(tmp_path / name)
        assert problem in str(error.value) and str(tmp_path / name) in str(error.value)
    assert len(told) == 18
    assert check_regular(tmp_path / "good.safetensors") == check_regular(tmp_path / "link", follow_links=True) > 80
    assert TensorFile(tmp_path / "link", follow_links=True).keys == {"x"}
