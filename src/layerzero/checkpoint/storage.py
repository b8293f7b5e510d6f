"""Safetensors files: written as a stream, with checksums, and read by ranges.

The safetensors library reads; it writes only tensors that are whole in memory, so writing is done here: the
header is a length and a JSON object, and the data follows in its order.
"""

from __future__ import annotations

import ctypes
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from layerzero.checkpoint.manifest import BLOCK_NBYTES
from layerzero.errors import CheckpointError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""torch dtypes by their name in safetensors files."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_MAX_HEADER_NBYTES = 100_000_000  # the safetensors library refuses larger ones


def dtype_name(tensor: torch.Tensor, what: str) -> str:
    """Name of a tensor's dtype in safetensors files.

    Raises:
        CheckpointError: it has none.
    """
    name = DTYPE_NAMES.get(tensor.dtype)
    if name is None or tensor.layout is not torch.strided or tensor.is_meta:
        raise CheckpointError(f"{what}: a tensor of {tensor.dtype}, {tensor.layout} on {tensor.device} can't be saved")
    return name


@dataclass(frozen=True)
class Blob:
    """One tensor of a file to be written: ``parts`` end to end, all of one dtype, on any device."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


def header_of(blobs: Sequence[Blob]) -> bytes:
    """What a safetensors file of these tensors starts with."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for blob in blobs:
        header[blob.key] = {"dtype": blob.dtype, "shape": list(blob.shape), "data_offsets": [at, at + blob.nbytes]}
        at += blob.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data that starts on a multiple of 8 bytes can be mapped as tensors
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, blobs: Sequence[Blob]) -> list[list[int]]:
    """Write a new file and sync it to disk; returns the checksums of every tensor's blocks.

    Host memory beyond the tensors themselves is one block.

    Raises:
        OSError: as from the system.
    """
    with open(path, "xb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(header_of(blobs)))
        checksums = [_write_blob(file.fileno(), blob) for blob in blobs]
        os.fsync(file.fileno())
    return checksums


def _write_blob(fd: int, blob: Blob) -> list[int]:
    checksums: list[int] = []
    crc, filled, nbytes = 0, 0, 0
    for part in blob.parts():
        # A single element may have any stride, and then can't be viewed as bytes.
        flat = part.contiguous().as_strided((part.numel(),), (1,)).view(torch.uint8)
        at = 0
        while at < flat.numel():
            chunk = flat[at : at + BLOCK_NBYTES - filled].cpu()
            data = as_bytes(chunk)
            crc = zlib.crc32(data, crc)
            _write_all(fd, data)
            at, filled, nbytes = at + len(data), filled + len(data), nbytes + len(data)
            if filled == BLOCK_NBYTES:
                checksums.append(crc)
                crc = filled = 0
    if filled:
        checksums.append(crc)
    assert nbytes == blob.nbytes, f"{blob.key}: {nbytes} bytes, planned {blob.nbytes}"
    return checksums


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, not copied; valid while the tensor lives. (numpy is not required here.)"""
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())).cast("B")


# ---------------------------------------------------------------------------- reading


def check_regular(path: Path, *, follow_links: bool = False) -> int:
    """Bytes of a plain file.

    Raises:
        CheckpointError: absent, a link, or anything but a plain file.
    """
    try:
        status = os.stat(path, follow_symlinks=follow_links)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise CheckpointError(f"{path}: can't be read ({getattr(error, 'strerror', None) or error})") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: not a plain file; links and special files are not followed")
    return status.st_size


class TensorFile:
    """A safetensors file opened for reading ranges of its tensors; nothing is read before it is asked for."""

    def __init__(self, path: Path, *, follow_links: bool = False) -> None:
        """
        Raises:
            CheckpointError: absent, a link, truncated, or no safetensors file.
        """
        self.nbytes = check_regular(path, follow_links=follow_links)
        self.path = path
        try:
            self._file: Any = safe_open(path, framework="pt")
            self.keys = frozenset(self._file.keys())
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path}: not a usable safetensors file: {error}") from None

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._file.get_slice(key).get_shape())

    def dtype(self, key: str) -> str:
        """Name of a tensor's dtype."""
        return self._file.get_slice(key).get_dtype()

    def read(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Elements ``start`` to ``stop`` of a tensor in row-major order, 1-D and contiguous, in host memory.

        Nothing else is read from the file.

        Raises:
            CheckpointError: if it can't be.
        """
        try:
            part = self._file.get_slice(key)
            shape = tuple(part.get_shape())
            if not shape:
                return self._file.get_tensor(key).reshape(1)[start:stop]
            if start >= stop:
                return part[0:0].reshape(-1)
            boxes = [part[box].reshape(-1) for box in _boxes(shape, start, stop)]
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{self.path}: {key!r} can't be read: {error}") from None
        return boxes[0] if len(boxes) == 1 else torch.cat(boxes)


def _boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int | slice, ...]]:
    """Indices of a tensor of ``shape`` that together select elements ``start`` to ``stop``, row-major and in order."""
    if len(shape) == 1:
        yield (slice(start, stop),)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside one row
        yield from ((last, *box) for box in _boxes(shape[1:], start - last * row, stop - last * row))
        return
    if start < first * row:
        yield from ((first - 1, *box) for box in _boxes(shape[1:], start - (first - 1) * row, row))
    if first < last:
        yield (slice(first, last),)
    if last * row < stop:
        yield from ((last, *box) for box in _boxes(shape[1:], 0, stop - last * row))


def crc32(tensor: torch.Tensor) -> int:
    """Checksum of a contiguous host tensor's bytes."""
    return zlib.crc32(as_bytes(tensor))
