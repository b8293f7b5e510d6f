"""A checkpoint's weights as plain safetensors files, as ``from_pretrained`` of transformers and diffusers reads them.

[Note: export]
Files are written in a hidden folder beside their place and get their names when all of them are on disk. Of several,
the index gets its name first: it lists files that are not there yet, so that whoever reads a killed export is told.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from layerzero.checkpoint.folder import check_space, is_step_folder, sync_folder, write_synced
from layerzero.checkpoint.manifest import VALUE
from layerzero.checkpoint.source import Source
from layerzero.checkpoint.storage import DTYPE_NAMES, Blob, write_file
from layerzero.checkpoint.tools import Progress
from layerzero.errors import CheckpointError

_DRAFT = ".layerzero-export"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\Z")


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Attributes:
        files: safetensors files, and the index where there are several.
        num_tensors: names, aliases included.
        nbytes: of all tensors.
    """

    folder: Path
    files: tuple[str, ...]
    num_tensors: int
    nbytes: int


@dataclass(frozen=True)
class _Output:
    """A tensor of the output: its name there, and the name it is stored under here."""

    name: str
    stored: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    step: int | None = None,
    dtype: torch.dtype | None = None,
    max_shard_nbytes: int = 5 * 10**9,
    prefix: str = "",
    aliases: bool = True,
    name: str = "model",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write the weights (parameters and buffers) into folder ``out`` as ``name.safetensors``, or as several files and
    their index where that is larger than ``max_shard_nbytes``.

    One process; memory for a part of a tensor (for one whole tensor where it was saved in tensor-parallel shards).

    Args:
        dtype: of floating-point tensors; by default as stored. Others keep theirs.
        prefix: of a submodule, such as ``transformer``: only its tensors, named from there.
        aliases: write tied tensors under each of their names; else under the first.
        name: of the files: ``model`` for transformers, ``diffusion_pytorch_model`` for diffusers.
        overwrite: replace an earlier export of this name.

    Raises:
        CheckpointError: unreadable or damaged; nothing has the prefix; the output exists; a number doesn't fit into
            ``dtype``; no space.
    """
    folder = Path(out)
    _check_target(folder, name, overwrite)
    source = Source.open(Path(path), step)
    outputs = list(_outputs(source, prefix, aliases, dtype))
    files = dict(_files(outputs, max_shard_nbytes, name))
    nbytes = sum(output.nbytes for output in outputs)
    folder.mkdir(parents=True, exist_ok=True)
    check_space(folder, nbytes, "Free some, or export elsewhere.")
    draft = folder / _DRAFT
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        report = _Meter(progress, nbytes)
        for file, held in files.items():
            write_file(draft / file, [_blob(source, output, report) for output in held])
        names = list(files)
        if len(files) > 1:
            names.insert(0, _index_name(name))
            write_synced(draft / names[0], _index(files, nbytes))
        _publish(draft, folder, name, names)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Exported(folder, tuple(names), len(outputs), nbytes)


def _check_target(folder: Path, name: str, overwrite: bool) -> None:
    if not _NAME.match(name):
        raise CheckpointError(f"name: expected a file name without extension such as 'model', got {name!r}")
    if os.path.lexists(folder) and not folder.is_dir():
        raise CheckpointError(f"{folder}: not a folder")
    if is_step_folder(folder):
        raise CheckpointError(f"{folder}: is a checkpoint itself; choose another folder")
    there = _earlier(folder, name)
    if there and not overwrite:
        raise CheckpointError(f"{there[0]} exists already: choose another folder, or overwrite it (--force)")


def _index_name(name: str) -> str:
    return f"{name}.safetensors.index.json"


def _earlier(folder: Path, name: str) -> list[Path]:
    """Files of an export of that name; first those without which it can't be mistaken for complete."""
    entries = [folder / _index_name(name), folder / f"{name}.safetensors"]
    shard = re.compile(rf"{re.escape(name)}-\d{{5}}-of-\d{{5}}\.safetensors\Z")
    shards = [folder / n for n in sorted(os.listdir(folder)) if shard.match(n)] if folder.is_dir() else []
    return [path for path in [*entries, *shards] if os.path.lexists(path)]


def _publish(draft: Path, folder: Path, name: str, names: list[str]) -> None:
    """See [Note: export]."""
    for path in _earlier(folder, name):
        path.unlink()
    sync_folder(folder)
    for file in names:
        os.rename(draft / file, folder / file)
        sync_folder(folder)


def _outputs(source: Source, prefix: str, aliases: bool, dtype: torch.dtype | None) -> Iterator[_Output]:
    if prefix and not prefix.endswith("."):
        prefix += "."
    empty = True
    for stored, record in source.manifest.tensors.items():
        names = [n[len(prefix) :] for n in (stored, *record.aliases) if n.startswith(prefix) and n != prefix]
        there = source.dtype(stored, VALUE) or torch.float32
        kept = there if dtype is None or not there.is_floating_point else dtype
        for name in names if aliases else names[:1]:
            empty = False
            yield _Output(name, stored, record.shape, kept)
    if empty:
        first = ", ".join(list(source.manifest.tensors)[:5])
        raise CheckpointError(f"{source.folder}: no tensor's name starts with {prefix!r}; the first are {first}")


def _files(outputs: list[_Output], max_nbytes: int, name: str) -> Iterator[tuple[str, list[_Output]]]:
    shards: list[list[_Output]] = [[]]
    filled = 0
    for output in outputs:
        if shards[-1] and filled + output.nbytes > max_nbytes:
            shards.append([])
            filled = 0
        shards[-1].append(output)
        filled += output.nbytes
    for number, shard in enumerate(shards, 1):
        file = f"{name}.safetensors" if len(shards) == 1 else f"{name}-{number:05d}-of-{len(shards):05d}.safetensors"
        # Large items first, so that every tensor is aligned to its own.
        yield file, sorted(shard, key=lambda output: -output.dtype.itemsize)


def _index(files: dict[str, list[_Output]], nbytes: int) -> bytes:
    where = {output.name: file for file, held in files.items() for output in held}
    content = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(where.items()))}
    return (json.dumps(content, indent=2) + "\n").encode()


class _Meter:
    """Adds up the bytes that are done."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._done, self._total = 0, total

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)


def _blob(source: Source, output: _Output, meter: _Meter) -> Blob:
    def parts() -> Iterator[torch.Tensor]:
        for part in source.chunks(output.stored):
            converted = part.to(output.dtype)
            if _is_narrower(converted.dtype, part.dtype) and bool((converted.isinf() & part.isfinite()).any()):
                largest = float(part[part.isfinite()].abs().max())
                raise CheckpointError(
                    f"tensor {output.stored!r}: {largest:.6g} does not fit into {output.dtype}; choose bf16 or fp32"
                )
            yield converted
            meter.add(converted.numel() * converted.element_size())

    return Blob(output.name, DTYPE_NAMES[output.dtype], output.shape, parts)


def _is_narrower(dtype: torch.dtype, other: torch.dtype) -> bool:
    return dtype is not other and torch.finfo(dtype).max < torch.finfo(other).max
