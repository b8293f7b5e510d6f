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
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import prod
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from layerzero.checkpoint.consistency import problems
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


_R = TypeVar("_R", bound="_Record")
_IN_FILE = "in a file"  # context of validation


class _Record(BaseModel):
    """Defaults are for records made here; in a file every field stands."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="after")
    def _is_complete(self: _R, info: ValidationInfo) -> _R:
        if info.context == _IN_FILE and len(self.model_fields_set) < len(type(self).model_fields):
            lacking = [name for name in type(self).model_fields if name not in self.model_fields_set]
            raise ValueError(f"lacks {', '.join(lacking)}")
        return self


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
        crc32: of every block of `BLOCK_NBYTES`, the last one shorter; None only for files that have no manifest.
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
    def num_blocks(self) -> int:
        """Checksums it has to have."""
        return -(-self.nbytes // BLOCK_NBYTES)

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
        for problem in problems(self):
            raise ValueError(problem)

    def record(self, space: Space, name: str) -> TensorRecord:
        """The tensor that an entry of ``space`` belongs to."""
        return (self.tensors if space.of == "model" else self.extra_tensors)[name]

    def placement(self, space: Space, entry: Entry) -> Placement:
        """Where an entry lies in its whole tensor."""
        return Placement(self.record(space, entry.name).shape, entry.dim, entry.offset, entry.shape)

    def states(self) -> dict[str, set[str]]:
        """Elementwise states of every tensor of the model that has elements, ``value`` included."""
        spaces = {space.name: space for space in self.spaces}
        found: dict[str, set[str]] = {}
        for (name, state), pieces in self.sorted_pieces().items():
            if spaces[name].of == "model":
                for entry in spaces[name].entries:
                    if pieces.overlapping(entry.range):
                        found.setdefault(entry.name, set()).add(state)
        return found

    def sorted_pieces(self) -> dict[tuple[str, str], SortedPieces]:
        """By name of the space and state."""
        found: dict[tuple[str, str], list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault((piece.space, piece.state), []).append(piece)
        return {key: SortedPieces(pieces) for key, pieces in found.items()}


class SortedPieces:
    """The pieces of one state of a space, in their order there. They are disjoint, so that those at a range are found
    by bisection: a unit of a thousand tensors saved by a thousand ranks would otherwise take a million comparisons."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = sorted(pieces, key=lambda p: (p.start, p.stop))
        self._starts = [p.start for p in self.pieces]
        self._stops = [p.stop for p in self.pieces]

    def overlapping(self, r: Range) -> Sequence[Piece]:
        """Those that hold elements of ``r``."""
        if not r.numel:
            return ()
        return self.pieces[bisect_right(self._stops, r.start) : bisect_left(self._starts, r.stop)]


_HEAD = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n"content": (?=\{)')
_TAIL = b"}\n"


class _Outline(BaseModel):
    """What every version of the format has."""

    format: str
    version: Any


def dumps(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``: a digest, and the content it is of as it stands in the file."""
    return seal(json.dumps(manifest.model_dump(), indent=1, allow_nan=False).encode())


def seal(content: bytes) -> bytes:
    """Content with its digest."""
    digest = hashlib.sha256(content).hexdigest()
    return b'{"sha256": "%s",\n"content": ' % digest.encode() + content + _TAIL


def loads(data: bytes, where: str) -> Manifest:
    """Inverse of `dumps`. The digest is compared before anything is parsed.

    Raises:
        CheckpointError: no such bytes, another version, altered, or inconsistent; ``where`` names the file.
    """
    head = _HEAD.match(data)
    if head is None or not data.endswith(_TAIL):
        raise CheckpointError(
            f"{where}: not a layerzero manifest: expected a digest, then the content, as it was written"
        )
    content = data[head.end() : -len(_TAIL)]
    if hashlib.sha256(content).hexdigest().encode() != head[1]:
        raise CheckpointError(f"{where}: its digest does not match its content: it was altered or damaged")
    try:
        outline = _Outline.model_validate_json(content)
        if outline.format == FORMAT and outline.version != VERSION:
            raise CheckpointError(
                f"{where}: format version {str(outline.version)[:40]!r}, but this layerzero reads version {VERSION}: "
                f"use the release that wrote it, or a newer one"
            )
        manifest = Manifest.model_validate_json(content, strict=True, context=_IN_FILE)
    except ValidationError as error:
        raise CheckpointError(f"{where}: {first_problem(error)}") from None
    for piece in manifest.pieces:
        if piece.crc32 is None:
            raise CheckpointError(f"{where}: piece {piece.key!r} of {piece.file} has no checksums")
    return manifest


def first_problem(error: ValidationError) -> str:
    """The first thing that pydantic found wrong, with its place."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"]))
    shown = place if len(place) <= 300 else f"{place[:300]}..."
    return f"{shown!r}: {first['msg']}" if place else first["msg"]
