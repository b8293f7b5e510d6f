"""An opened checkpoint: its manifest held against its files, and ranges read from it with their checksums verified."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch

from layerzero.checkpoint import folder as folders
from layerzero.checkpoint.manifest import VALUE, Entry, Manifest, Piece
from layerzero.checkpoint.plain import plain_files, plain_manifest
from layerzero.checkpoint.reshard import Copy, Placement, coalesce, cut, overlap
from layerzero.checkpoint.storage import DTYPES, TensorFile, check_regular, crc32
from layerzero.checkpoint.values import decode
from layerzero.errors import CheckpointError
from layerzero.layout import Range

_CHUNK_NUMEL = 16 << 20


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
    pieces: Sequence[Piece]


class Source:
    """A checkpoint folder, or plain safetensors files; opened without reading any tensor."""

    def __init__(self, folder: Path, manifest: Manifest, *, is_plain: bool = False, tolerate: bool = False) -> None:
        """
        Args:
            is_plain: files without a manifest; caches of downloads keep them as links, so these are followed.
            tolerate: keep what is wrong in ``problems`` instead of raising.

        Raises:
            CheckpointError: a file is absent, a link, of another size, or holds something else than it should.
        """
        self.folder = folder
        self.manifest = manifest
        self.is_plain = is_plain
        self.by_name = dict(_names(manifest))
        self.files: dict[str, TensorFile] = {}
        self.problems: list[str] = []
        for problem in self._open_files():
            if not tolerate:
                raise CheckpointError(problem)
            self.problems.append(problem)

    def _open_files(self) -> Iterator[str]:
        for name, nbytes in self.manifest.files.items():
            path = self.folder / name
            try:
                found = check_regular(path, follow_links=self.is_plain)
                if found != nbytes:
                    raise CheckpointError(f"{path}: {found} bytes, expected {nbytes}: truncated or altered")
                self.files[name] = TensorFile(path, follow_links=self.is_plain)
            except CheckpointError as error:
                yield str(error)
        for piece in self.manifest.pieces:
            problem = self.mismatch(piece) if piece.file in self.files else None
            if problem is not None:
                yield problem

    def mismatch(self, piece: Piece) -> str | None:
        """How a piece differs from what its file says it holds."""
        file = self.files[piece.file]
        if piece.key not in file.keys:
            return f"{file.path}: tensor {piece.key!r} is not in it"
        shape, dtype, numel = file.shape(piece.key), file.dtype(piece.key), piece.stop - piece.start
        if dtype != piece.dtype or prod(shape) != numel:
            return (
                f"{file.path}: tensor {piece.key!r} is {dtype} of shape {list(shape)}, expected {piece.dtype} with "
                f"{numel} elements"
            )
        return None

    @classmethod
    def open(cls, path: Path, step: int | None = None, *, tolerate: bool = False) -> Source:
        """A checkpoint folder, a run's folder with several, a ``.safetensors`` file, or a folder of such files.

        Raises:
            CheckpointError: there is none, or it can't be trusted; ``tolerate`` as above.
        """
        if step is None and not folders.has_step_name(path) and not folders.steps(path):
            plain = plain_files(path)
            if plain.paths:
                return cls(plain.paths[0].parent, plain_manifest(plain), is_plain=True, tolerate=tolerate)
        folder = folders.resolve(path, step)
        return cls(folder, folders.read_manifest(folder), tolerate=tolerate)

    def fingerprint(self) -> str:
        """Short digest that tells this checkpoint from others: of its manifest, or of plain files' names and sizes."""
        if self.is_plain:
            content = repr(sorted(self.manifest.files.items())).encode()
        else:
            content = (self.folder / folders.MANIFEST).read_bytes()
        return hashlib.sha256(content).hexdigest()[:16]

    # ------------------------------------------------------------------ tensors

    @cached_property
    def states(self) -> dict[str, set[str]]:
        """Elementwise states of every tensor of the model."""
        return self.manifest.states()

    @cached_property
    def _located(self) -> dict[tuple[str, str], list[_Located]]:
        spaces = {space.name: space for space in self.manifest.spaces}
        located: dict[tuple[str, str], list[_Located]] = {}
        for (name, state), pieces in self.manifest.sorted_pieces().items():
            space = spaces[name]
            for entry in space.entries:
                inside = pieces.overlapping(entry.range)
                if inside:
                    place = _Located(entry, self.manifest.placement(space, entry), inside)
                    located.setdefault((entry.name, state), []).append(place)
        return located

    def dtype(self, name: str, state: str) -> torch.dtype | None:
        """Stored dtype; None for a tensor without elements."""
        for place in self._located.get((name, state), ()):
            return DTYPES[place.pieces[0].dtype]
        return None

    def read(self, wanted: Iterable[Wanted], verify: bool = True) -> None:
        """Fill every ``out``, piece by piece in the order of the files, and no block of a piece twice.

        Raises:
            CheckpointError: damaged or unreadable data; what was read before it stays written.
        """
        jobs: dict[int, tuple[Piece, list[tuple[Copy, int]]]] = {}
        outs: list[torch.Tensor] = []
        for want in wanted:
            number = len(outs)
            outs.append(want.out)
            places = self._located.get((want.name, want.state), ())
            if want.held.numel and not places:
                raise CheckpointError(f"{self.folder}: no {want.state} of tensor {want.name!r} is stored")
            for place in places:
                for piece in place.pieces:
                    held = piece.range.intersect(place.entry.range)
                    to_piece = place.entry.start - piece.start
                    for c in overlap(place.placement, held.shift(-place.entry.start), want.placement, want.held):
                        copy = Copy(c.source + to_piece, c.target - want.held.start, c.numel)
                        jobs.setdefault(id(piece), (piece, []))[1].append((copy, number))
        for piece, copies in sorted(jobs.values(), key=lambda job: (job[0].file, job[0].start)):
            self._read_piece(piece, copies, outs, verify)

    def _read_piece(self, piece: Piece, jobs: list[tuple[Copy, int]], outs: list[torch.Tensor], verify: bool) -> None:
        by_block: dict[int, dict[int, list[Copy]]] = {}
        for copy, number in jobs:
            for block, part in cut(copy, piece.block_numel):
                by_block.setdefault(block, {}).setdefault(number, []).append(part)
        for block in sorted(by_block):
            if verify and piece.crc32 is not None:
                first = block * piece.block_numel
                data = self.read_block(piece, block)
            else:  # no more than what is wanted
                copies = [part for parts in by_block[block].values() for part in parts]
                first, last = min(c.source for c in copies), max(c.source + c.numel for c in copies)
                data = self.files[piece.file].read(piece.key, first, last)
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
        inside = self.block_range(piece, block)
        data = self.files[piece.file].read(piece.key, inside.start, inside.stop)
        if verify and piece.crc32 is not None and crc32(data) != piece.crc32[block]:
            raise CheckpointError(
                f"{self.folder / piece.file}: tensor {piece.key!r} is damaged: its elements {inside.start} to "
                f"{inside.stop} do not match their checksum"
            )
        return data

    def block_range(self, piece: Piece, block: int) -> Range:
        """Elements of a piece, counted from its start, that a block holds."""
        start = block * piece.block_numel
        return Range(start, min(start + piece.block_numel, piece.stop - piece.start))

    def full(self, name: str, state: str = VALUE, of: Literal["model", "extra"] = "model") -> torch.Tensor:
        """A whole tensor in its stored dtype, in host memory.

        Raises:
            CheckpointError: damaged, not stored, or larger than memory. Sizes are those of files that are there.
        """
        records = self.manifest.tensors if of == "model" else self.manifest.extra_tensors
        shape = records[name].shape
        dtype = self.dtype(name, state)
        if dtype is None and prod(shape):
            raise CheckpointError(f"{self.folder}: no {state} of tensor {name!r} is stored")
        try:
            out = torch.empty(shape, dtype=dtype or torch.float32)
        except RuntimeError as error:
            raise CheckpointError(f"{self.folder}: tensor {name!r} of shape {list(shape)}: {error}") from None
        self.read([Wanted(name, state, Placement.whole(shape), Range(0, out.numel()), out.view(-1))])
        return out

    def chunks(self, name: str, state: str = VALUE) -> Iterator[torch.Tensor]:
        """A tensor of the model in row-major order, in 1-D parts that bound the memory it takes.

        A tensor stored in tensor-parallel shards is held as a whole while its parts are given out.

        Raises:
            CheckpointError: as `full`.
        """
        shape = self.manifest.tensors[name].shape
        places = self._located.get((name, state), ())
        if not places or places[0].entry.dim is not None:
            yield from self.full(name, state).view(-1).split(_CHUNK_NUMEL)
            return
        dtype = DTYPES[places[0].pieces[0].dtype]
        for start in range(0, prod(shape), _CHUNK_NUMEL):
            held = Range(start, min(start + _CHUNK_NUMEL, prod(shape)))
            out = torch.empty(held.numel, dtype=dtype)
            self.read([Wanted(name, state, Placement.whole(shape), held, out)])
            yield out

    def decode(self, value: Any) -> Any:
        """Data of ``extra`` with its tensors read."""

        def tensor(name: str) -> torch.Tensor:
            if name not in self.manifest.extra_tensors:
                raise CheckpointError(f"{self.folder}: extra data asks for a tensor {name[:100]!r} that is not there")
            return self.full(name, of="extra")

        try:
            return decode(value, tensor, f"{self.folder / folders.MANIFEST}: extra data")
        except RecursionError:
            raise CheckpointError(f"{self.folder}: extra data is nested too deeply") from None


def _names(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Every name and alias, with the name a tensor is stored under."""
    for name, record in manifest.tensors.items():
        yield name, name
        for alias in record.aliases:
            yield alias, name
