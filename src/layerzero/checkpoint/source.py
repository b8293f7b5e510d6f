"""An opened checkpoint: its manifest held against its files, and ranges read from it with their checksums verified."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from layerzero.checkpoint import folder as folders
from layerzero.checkpoint.manifest import VALUE, Entry, Manifest, Piece, SavedBy, Space, TensorRecord
from layerzero.checkpoint.reshard import Copy, Placement, coalesce, cut, overlap
from layerzero.checkpoint.storage import DTYPES, TensorFile, check_regular, crc32
from layerzero.checkpoint.values import decode
from layerzero.errors import CheckpointError
from layerzero.layout import Range

_INDEX_SUFFIX = ".safetensors.index.json"


@dataclass(frozen=True)
class Wanted:
    """Elements ``held`` of a tensor placed at ``placement``, to be written into ``out`` (1-D, any dtype and device)."""

    name: str
    state: str
    placement: Placement
    held: Range
    out: torch.Tensor


@dataclass(frozen=True)
class _Located:
    """An entry of a space, with the pieces that overlap it for one state."""

    entry: Entry
    placement: Placement
    pieces: tuple[int, ...]


class Source:
    """A checkpoint folder, or plain safetensors files; opened without reading any tensor."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """
        Raises:
            CheckpointError: a file is absent, a link, of another size, or holds something else than it should.
        """
        self.folder = folder
        self.manifest = manifest
        self.by_name = dict(_names(manifest))
        self._files: dict[str, TensorFile] = {}
        for name, nbytes in manifest.files.items():
            path = folder / name
            found = check_regular(path)
            if found != nbytes:
                raise CheckpointError(f"{path}: {found} bytes, expected {nbytes}: truncated or altered")
            self._files[name] = TensorFile(path)
        for piece in manifest.pieces:
            file = self._files[piece.file]
            if piece.key not in file.keys:
                raise CheckpointError(f"{file.path}: tensor {piece.key!r} is not in it")
            shape = file.shape(piece.key)
            numel = 1
            for size in shape:
                numel *= size
            if file.dtype(piece.key) != piece.dtype or numel != piece.stop - piece.start:
                raise CheckpointError(
                    f"{file.path}: tensor {piece.key!r} is {file.dtype(piece.key)} of shape {list(shape)}, expected "
                    f"{piece.dtype} with {piece.stop - piece.start} elements"
                )

    @classmethod
    def open(cls, path: Path, step: int | None = None) -> Source:
        """A checkpoint folder, a run's folder with several, a ``.safetensors`` file, or a folder of such files."""
        if step is None and not folders.is_step_folder(path) and not folders.steps(path):
            files = plain_files(path)
            if files:
                return cls(files[0].parent, plain_manifest(files))
        folder = folders.resolve(path, step)
        return cls(folder, folders.read_manifest(folder))

    # ------------------------------------------------------------------ tensors

    @cached_property
    def states(self) -> dict[str, set[str]]:
        """Elementwise states of every tensor of the model."""
        return self.manifest.states()

    @cached_property
    def _located(self) -> dict[tuple[str, str], list[_Located]]:
        by_space: dict[tuple[str, str], list[int]] = {}
        for i, piece in enumerate(self.manifest.pieces):
            by_space.setdefault((piece.space, piece.state), []).append(i)
        spaces = {space.name: space for space in self.manifest.spaces}
        located: dict[tuple[str, str], list[_Located]] = {}
        for (name, state), indices in by_space.items():
            space = spaces[name]
            indices.sort(key=lambda i: self.manifest.pieces[i].start)
            for entry in space.entries:
                inside = tuple(i for i in indices if self.manifest.pieces[i].range.intersect(entry.range).numel)
                place = _Located(entry, self.manifest.placement(space, entry), inside)
                located.setdefault((entry.name, state), []).append(place)
        return located

    def dtype(self, name: str, state: str) -> torch.dtype | None:
        """Stored dtype; None for a tensor without elements."""
        for place in self._located.get((name, state), ()):
            for i in place.pieces:
                return DTYPES[self.manifest.pieces[i].dtype]
        return None

    def read(self, wanted: Iterable[Wanted], verify: bool = True) -> None:
        """Fill every ``out``, piece by piece in the order of the files, and no block of a piece twice.

        Raises:
            CheckpointError: damaged or unreadable data; what was read before it stays written.
        """
        jobs: dict[int, list[tuple[Copy, int]]] = {}
        outs: list[torch.Tensor] = []
        for want in wanted:
            number = len(outs)
            outs.append(want.out)
            for place in self._located.get((want.name, want.state), ()):
                for i in place.pieces:
                    held = self.manifest.pieces[i].range.intersect(place.entry.range)
                    to_piece = place.entry.start - self.manifest.pieces[i].start
                    for c in overlap(place.placement, held.shift(-place.entry.start), want.placement, want.held):
                        copy = Copy(c.source + to_piece, c.target - want.held.start, c.numel)
                        jobs.setdefault(i, []).append((copy, number))
        for i in sorted(jobs, key=lambda i: (self.manifest.pieces[i].file, self.manifest.pieces[i].start)):
            self._read_piece(self.manifest.pieces[i], jobs[i], outs, verify)

    def _read_piece(self, piece: Piece, jobs: list[tuple[Copy, int]], outs: list[torch.Tensor], verify: bool) -> None:
        by_block: dict[int, dict[int, list[Copy]]] = {}
        for copy, number in jobs:
            for block, part in cut(copy, piece.block_numel):
                by_block.setdefault(block, {}).setdefault(number, []).append(part)
        for block in sorted(by_block):
            first = block * piece.block_numel
            data = self.read_block(piece, block, verify)
            for number, parts in by_block[block].items():
                for part in coalesce(parts):
                    size = (part.num, part.numel)
                    source = data.as_strided(size, (part.source_stride, 1), data.storage_offset() + part.source - first)
                    out = outs[number]
                    target = out.as_strided(size, (part.target_stride, 1), out.storage_offset() + part.target)
                    target.copy_(source)

    def read_block(self, piece: Piece, block: int, verify: bool = True) -> torch.Tensor:
        """One block of a piece, 1-D, in host memory.

        Raises:
            CheckpointError: it can't be read, or its checksum is wrong.
        """
        start = block * piece.block_numel
        stop = min(start + piece.block_numel, piece.stop - piece.start)
        data = self._files[piece.file].read(piece.key, start, stop)
        if verify and piece.crc32 is not None and crc32(data.contiguous()) != piece.crc32[block]:
            raise CheckpointError(
                f"{self.folder / piece.file}: tensor {piece.key!r} is damaged: its elements {start} to {stop} do not "
                f"match their checksum"
            )
        return data

    def num_blocks(self, piece: Piece) -> int:
        """Blocks of a piece."""
        return -(-(piece.stop - piece.start) // piece.block_numel)

    def full(self, name: str, state: str = VALUE, of: str = "model") -> torch.Tensor:
        """A whole tensor in its stored dtype, in host memory."""
        records = self.manifest.tensors if of == "model" else self.manifest.extra_tensors
        shape = records[name].shape
        out = torch.empty(shape, dtype=self.dtype(name, state) or torch.float32)
        self.read([Wanted(name, state, Placement.whole(shape), Range(0, out.numel()), out.view(-1))])
        return out

    def decode(self, value: Any) -> Any:
        """Data of ``extra`` with its tensors read."""

        def tensor(name: str) -> torch.Tensor:
            if name not in self.manifest.extra_tensors:
                raise CheckpointError(f"{self.folder}: extra data asks for a tensor {name!r} that is not there")
            return self.full(name, of="extra")

        try:
            return decode(value, tensor)
        except RecursionError:
            raise CheckpointError(f"{self.folder}: extra data is nested too deeply") from None


def _names(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Every name and alias, with the name a tensor is stored under."""
    for name, record in manifest.tensors.items():
        yield name, name
        for alias in record.aliases:
            yield alias, name


# ---------------------------------------------------------------------------- plain safetensors


def plain_files(path: Path) -> list[Path]:
    """Safetensors files at ``path``: itself, those of the index in it, or all in it; empty if there are none.

    Raises:
        CheckpointError: an index that is malformed or names files elsewhere.
    """
    if path.suffix == ".safetensors" and path.is_file():
        return [path]
    if path.name.endswith(_INDEX_SUFFIX) and path.is_file():
        return _indexed(path)
    if not path.is_dir():
        return []
    indices = sorted(path.glob(f"*{_INDEX_SUFFIX}"))
    if len(indices) > 1:
        raise CheckpointError(
            f"{path}: several index files ({', '.join(i.name for i in indices)}): give the path of one"
        )
    return _indexed(indices[0]) if indices else sorted(path.glob("*.safetensors"))


def _indexed(index: Path) -> list[Path]:
    try:
        if check_regular(index) > 1 << 30:
            raise ValueError("too large")
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ValueError("it names files in other folders")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not a usable index of safetensors files: {error}") from None
    return [index.parent / name for name in names]


def plain_manifest(files: list[Path]) -> Manifest:
    """A manifest for files that have none: every tensor is a space, and a piece without checksums.

    Raises:
        CheckpointError: unreadable, or two files hold the same tensor.
    """
    tensors: dict[str, TensorRecord] = {}
    spaces, pieces = [], []
    for path in files:
        file = TensorFile(path)
        for key in sorted(file.keys):
            if key in tensors:
                raise CheckpointError(f"{path}: tensor {key!r} is in another file too")
            shape, dtype = file.shape(key), file.dtype(key)
            if dtype not in DTYPES:
                raise CheckpointError(f"{path}: tensor {key!r} has dtype {dtype}, which is not supported")
            tensors[key] = TensorRecord(kind="parameter", shape=shape)
            entry = Entry(name=key, start=0, shape=shape)
            spaces.append(Space(name=key, numel=entry.range.numel, entries=(entry,)))
            if entry.range.numel:
                pieces.append(
                    Piece.model_construct(
                        file=path.name, key=key, space=key, state=VALUE, dtype=dtype, start=0, stop=entry.range.numel,
                        crc32=None,
                    )
                )  # fmt: skip
    return Manifest.model_construct(
        step=0, saved_by=SavedBy(layerzero="", torch="", world_size=1, sharding=""),
        files={path.name: check_regular(path) for path in files}, tensors=tensors, spaces=tuple(spaces),
        pieces=tuple(pieces),
    )  # fmt: skip
