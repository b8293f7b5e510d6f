"""What a checkpoint folder holds: the schema of ``manifest.json`` and the checks it passes before any use. Pure.

[Note: spaces]
A *space* is a flat range of elements, such as the flat buffer of one param group, in which *entries* lie: whole
tensors, or a tensor-parallel shard of one. A *piece* is one tensor of one safetensors file; it holds a contiguous
range of a space for one *state*: ``value``, or an elementwise optimizer state such as ``exp_avg``. A parameter is
found by its entries, its bytes by the pieces that overlap them. Neither the number of ranks nor the degrees that a
checkpoint was saved with matter for reading it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import prod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from layerzero.checkpoint.reshard import Placement
from layerzero.errors import CheckpointError
from layerzero.layout import Range

FORMAT = "layerzero-checkpoint"
VERSION = 1
VALUE = "value"
"""The state that is the tensor itself."""

BLOCK_NBYTES = 4 << 20
"""Every so many bytes of a piece have a checksum of their own, so that part of a piece can be verified."""

_ITEM_NBYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip

Size = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
Name = Annotated[str, Field(min_length=1, max_length=4096)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors$", max_length=255)]
Shape = Annotated[tuple[Size, ...], Field(max_length=64)]
DTypeName = Literal[
    "F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "C64", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8",
    "BOOL",
]  # fmt: skip


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Entry(_Record):
    """A tensor, or its shard along ``dim``, in a space; row-major from element ``start`` of the space.

    Attributes:
        shape: of what lies here.
        dim: the dim along which it is a shard; None for the whole tensor.
        offset: index along ``dim`` of the first row of the shard.
    """

    name: Name
    start: Size
    shape: Shape
    dim: Size | None = None
    offset: Size = 0

    @property
    def range(self) -> Range:
        """Elements of the space."""
        return Range(self.start, self.start + prod(self.shape))


class Space(_Record):
    """A flat range of ``numel`` elements; ``of`` says whose tensors its entries are."""

    name: Name
    of: Literal["model", "extra"] = "model"
    numel: Size
    entries: tuple[Entry, ...]


class Piece(_Record):
    """Elements ``start`` to ``stop`` of a space, stored as the one-dimensional tensor ``key`` of ``file``.

    Attributes:
        crc32: of every block of `BLOCK_NBYTES`, the last one shorter; None where there are no checksums.
    """

    file: FileName
    key: Name
    space: Name
    state: Name
    dtype: DTypeName
    start: Size
    stop: Size
    crc32: tuple[Annotated[int, Field(ge=0, lt=2**32, strict=True)], ...] | None

    @property
    def range(self) -> Range:
        """Elements of the space."""
        return Range(self.start, self.stop)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return (self.stop - self.start) * _ITEM_NBYTES[self.dtype]

    @property
    def block_numel(self) -> int:
        """Elements with a checksum of their own."""
        return BLOCK_NBYTES // _ITEM_NBYTES[self.dtype]


class TensorRecord(_Record):
    """A tensor of the model or of ``extra``, whole: full shape over tensor-parallel ranks."""

    kind: Literal["parameter", "buffer", "extra"]
    shape: Shape
    trainable: bool = False
    aliases: tuple[Name, ...] = ()


class OptimizerGroup(_Record):
    """Hyper-parameters, encoded (see `values.py`), of the parameters named."""

    params: tuple[Name, ...]
    options: dict[str, Any]


class OptimizerRecord(_Record):
    """What optimizers hold beside elementwise states.

    Attributes:
        scalars: encoded states that are one value for a whole parameter, by parameter and state.
    """

    classes: tuple[Name, ...]
    groups: tuple[OptimizerGroup, ...]
    scalars: dict[Name, dict[Name, Any]]


class SavedBy(_Record):
    """Where a checkpoint came from; for people, not needed to read it."""

    layerzero: str
    torch: str
    world_size: Size
    sharding: str


class Manifest(_Record):
    """See the module; made by `layerzero.save`, validated as a whole on construction.

    Attributes:
        files: bytes of every file.
        tensors: of the model, by name; ``extra_tensors`` of ``extra``.
        left_out: ignored modules that were not saved.
        extra: encoded data of the user; ``rank_extra`` by rank.
    """

    format: Literal["layerzero-checkpoint"] = FORMAT
    version: Literal[1] = VERSION
    step: Size
    saved_by: SavedBy
    files: dict[FileName, Size]
    tensors: dict[Name, TensorRecord]
    extra_tensors: dict[Name, TensorRecord] = {}
    spaces: tuple[Space, ...]
    pieces: tuple[Piece, ...]
    optimizer: OptimizerRecord | None = None
    left_out: tuple[Name, ...] = ()
    extra: Any = None
    rank_extra: tuple[Any, ...] | None = None

    def model_post_init(self, _context: Any) -> None:
        for problem in _problems(self):
            raise ValueError(problem)

    def record(self, space: Space, name: str) -> TensorRecord:
        """The tensor that an entry of ``space`` belongs to."""
        return (self.tensors if space.of == "model" else self.extra_tensors)[name]

    def placement(self, space: Space, entry: Entry) -> Placement:
        """Where an entry lies in its whole tensor."""
        return Placement(self.record(space, entry.name).shape, entry.dim, entry.offset, entry.shape)

    def states(self) -> dict[str, set[str]]:
        """Elementwise states of every tensor of the model, ``value`` included."""
        by_space: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            by_space.setdefault(piece.space, []).append(piece)
        found: dict[str, set[str]] = {}
        for space in self.spaces:
            if space.of == "model":
                for piece in by_space.get(space.name, ()):
                    for entry in space.entries:
                        if entry.range.intersect(piece.range).numel:
                            found.setdefault(entry.name, set()).add(piece.state)
        return found


def dumps(manifest: Manifest) -> str:
    """The text of ``manifest.json``: the content, and a digest of it."""
    content = manifest.model_dump()
    return json.dumps({"sha256": _digest(content), "content": content}, indent=1) + "\n"


def loads(text: str | bytes, where: str) -> Manifest:
    """Inverse of `dumps`.

    Raises:
        CheckpointError: not such a text, another version, altered, or inconsistent; ``where`` names the file.
    """
    try:
        outer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid JSON ({error}); the checkpoint can't be used") from None
    if not isinstance(outer, dict) or set(outer) != {"sha256", "content"} or not isinstance(outer["content"], dict):
        raise CheckpointError(f"{where}: not a layerzero manifest: expected the keys sha256 and content")
    content = outer["content"]
    if content.get("format") == FORMAT and content.get("version") != VERSION:
        raise CheckpointError(
            f"{where}: format version {content.get('version')!r}, but this layerzero reads version {VERSION}: use the "
            f"release that wrote it, or a newer one"
        )
    try:
        if outer["sha256"] != _digest(content):
            raise CheckpointError(f"{where}: its digest does not match its content: it was altered or damaged")
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{where}: {place + ': ' if place else ''}{first['msg']}") from None
    except (RecursionError, ValueError) as error:
        raise CheckpointError(f"{where}: {error}") from None


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# ---------------------------------------------------------------------------- consistency


def _problems(m: Manifest) -> Iterator[str]:
    """What is wrong, one sentence each; nothing is allocated by a declared size."""
    spaces = {space.name: space for space in m.spaces}
    if len(spaces) != len(m.spaces):
        yield "two spaces have the same name"
    shards: dict[tuple[str, str], list[Entry]] = {}
    for space in m.spaces:
        named = m.tensors if space.of == "model" else m.extra_tensors
        end = 0
        for entry in sorted(space.entries, key=lambda e: (e.start, e.range.stop)):
            if entry.name not in named:
                yield f"space {space.name!r}: entry {entry.name!r} is no tensor of the manifest"
                return
            if entry.start < end or entry.range.stop > space.numel:
                yield f"space {space.name!r}: entry {entry.name!r} overlaps another or leaves the space"
            end = max(end, entry.range.stop)
            shards.setdefault((space.of, entry.name), []).append(entry)
    for of, named in (("model", m.tensors), ("extra", m.extra_tensors)):
        for name, record in named.items():
            yield from _check_shards(name, record, shards.get((of, name), []))
    yield from _check_aliases(m)
    yield from _check_pieces(m, spaces)


def _check_shards(name: str, record: TensorRecord, entries: list[Entry]) -> Iterator[str]:
    if not entries:
        yield f"tensor {name!r} has no entry in any space"
        return
    dim = entries[0].dim
    if any(e.dim != dim for e in entries) or (dim is None and len(entries) > 1):
        yield f"tensor {name!r}: its entries contradict each other"
        return
    if dim is None:
        if entries[0].shape != record.shape or entries[0].offset:
            yield f"tensor {name!r}: entry of shape {entries[0].shape}, expected {record.shape}"
        return
    if dim >= len(record.shape):
        yield f"tensor {name!r}: sharded along dim {dim}, but it has {len(record.shape)}"
        return
    end = 0
    for entry in sorted(entries, key=lambda e: (e.offset, e.shape)):
        rest = (*record.shape[:dim], *record.shape[dim + 1 :])
        if len(entry.shape) != len(record.shape) or (*entry.shape[:dim], *entry.shape[dim + 1 :]) != rest:
            yield f"tensor {name!r}: shard of shape {entry.shape} along dim {dim} of {record.shape}"
            return
        if entry.offset != end:
            yield f"tensor {name!r}: its shards along dim {dim} leave a gap or overlap at {end}"
            return
        end += entry.shape[dim]
    if end != record.shape[dim]:
        yield f"tensor {name!r}: its shards cover {end} of {record.shape[dim]} along dim {dim}"


def _check_aliases(m: Manifest) -> Iterator[str]:
    seen = set(m.tensors)
    for name, record in m.tensors.items():
        for alias in record.aliases:
            if alias in seen:
                yield f"tensor {name!r}: its alias {alias!r} is another tensor's name"
            seen.add(alias)


def _check_pieces(m: Manifest, spaces: dict[str, Space]) -> Iterator[str]:
    stored: set[tuple[str, str]] = set()
    nbytes = dict.fromkeys(m.files, 0)
    by_state: dict[tuple[str, str], list[Range]] = {}
    for piece in m.pieces:
        where = f"piece {piece.key!r} of {piece.file}"
        if piece.space not in spaces:
            yield f"{where}: space {piece.space!r} does not exist"
            return
        if piece.file not in m.files:
            yield f"{where}: the file is not listed under files"
            return
        if (piece.file, piece.key) in stored:
            yield f"{where} is listed twice"
        stored.add((piece.file, piece.key))
        if piece.stop < piece.start or piece.stop > spaces[piece.space].numel:
            yield f"{where}: range {piece.start}..{piece.stop} leaves space {piece.space!r}"
        if piece.crc32 is not None and len(piece.crc32) != -(-piece.nbytes // BLOCK_NBYTES):
            yield f"{where}: {len(piece.crc32)} checksums for {piece.nbytes} bytes"
        nbytes[piece.file] += piece.nbytes
        by_state.setdefault((piece.space, piece.state), []).append(piece.range)
    for file, total in nbytes.items():
        if total > m.files[file]:
            yield f"{file}: pieces of {total} bytes in a file of {m.files[file]}"
    for (name, state), ranges in by_state.items():
        ranges.sort(key=lambda r: (r.start, r.stop))
        if any(a.stop > b.start for a, b in pairwise(ranges)):
            yield f"space {name!r}: pieces of state {state!r} overlap"
            return
    for name, space in spaces.items():
        for state in {s for n, s in by_state if n == name} | {VALUE}:
            merged = _merge(by_state.get((name, state), []))
            for entry in space.entries:
                held = sum(r.intersect(entry.range).numel for r in merged)
                if held != entry.range.numel and (held or state == VALUE):
                    yield f"tensor {entry.name!r}: {held} of {entry.range.numel} elements of state {state!r} are there"


def _merge(ranges: Iterable[Range]) -> list[Range]:
    merged: list[Range] = []
    for r in ranges:
        if merged and merged[-1].stop == r.start:
            merged[-1] = Range(merged[-1].start, r.stop)
        else:
            merged.append(r)
    return merged
