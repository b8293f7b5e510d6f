"""Each rank's part of a manifest as JSON, and the manifest that rank 0 makes of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from layerzero._version import __version__
from layerzero.checkpoint.capture import Captured, LocalPiece
from layerzero.checkpoint.manifest import (
    Manifest,
    OptimizerGroup,
    OptimizerRecord,
    Piece,
    SavedBy,
    Space,
    TensorRecord,
)  # fmt: skip
from layerzero.checkpoint.model_state import ModelState
from layerzero.checkpoint.optimizer_state import OptimizerState
from layerzero.checkpoint.ranks import Ranks
from layerzero.checkpoint.storage import Blob
from layerzero.checkpoint.values import encode


def piece_blobs(pieces: Sequence[LocalPiece]) -> Iterator[PieceBlob]:
    """Pieces as tensors of a file, under keys that tell what they are."""
    count: dict[tuple[str, str], int] = {}
    for piece in pieces:
        number = count[piece.space, piece.state] = count.get((piece.space, piece.state), -1) + 1
        key = f"{piece.space}/{piece.state}" + (f"/{number}" if number else "")
        yield PieceBlob(
            key, piece.dtype, (piece.stop - piece.start,), lambda parts=piece.parts: iter(parts), piece=piece
        )


@dataclass(frozen=True)
class PieceBlob(Blob):
    """A piece as a tensor of this rank's file."""

    piece: LocalPiece = field(kw_only=True)


def piece_records(file: str, blobs: Sequence[PieceBlob], checksums: list[list[int]]) -> Iterator[dict[str, Any]]:
    """The manifest's records of pieces that were written."""
    for blob, crc in zip(blobs, checksums, strict=True):
        piece = blob.piece
        yield {
            "file": file, "key": blob.key, "space": piece.space, "state": piece.state, "dtype": piece.dtype,
            "start": piece.start, "stop": piece.stop, "crc32": crc,
        }  # fmt: skip


def describe(
    ranks: Ranks,
    states: list[ModelState],
    optimizer: OptimizerState | None,
    captured: Captured,
    extra: Any,
    rank_extra: Any,
) -> dict[str, Any]:
    """This rank's part of the manifest; adds the tensors of ``extra`` to what is captured."""
    encoded: dict[str, Any] = {}
    for label, value in (("extra", extra if ranks.rank == 0 else None), ("rank_extra", rank_extra)):
        tensors: dict[str, torch.Tensor] = {}
        space = label if label == "extra" else f"rank-{ranks.rank:05d}"

        def set_aside(tensor: torch.Tensor, tensors: dict[str, torch.Tensor] = tensors, space: str = space) -> str:
            name = f"{space}.{len(tensors)}"
            tensors[name] = tensor
            return name

        encoded[label] = encode(value, set_aside, label)
        captured.add_extra(tensors, f"{space}:")
    engine = states[0].engine
    describes = any(state.engine.rank == 0 for state in states)
    return {
        "tensors": {name: record.model_dump() for name, record in captured.tensors.items()},
        "extra_tensors": {name: record.model_dump() for name, record in captured.extra_tensors.items()},
        "spaces": [space.model_dump() for space in captured.spaces],
        "optimizer": None
        if optimizer is None or not describes
        else [optimizer.classes, optimizer.scalars, optimizer.groups],
        "saved_by": SavedBy(
            layerzero=__version__,
            torch=torch.__version__,
            world_size=ranks.size,
            sharding=str(engine.config.resolve_sharding()),
        ).model_dump(),
        **encoded,
    }


def merge(shares: list[dict[str, Any]], step: int, nbytes: dict[str, int]) -> Manifest:
    """The manifest of what all ranks wrote; ``nbytes`` of every file there."""
    tensors: dict[str, TensorRecord] = {}
    extra_tensors: dict[str, TensorRecord] = {}
    spaces: dict[str, Space] = {}
    pieces: list[Piece] = []
    placed: set[tuple[Any, ...]] = set()
    files: dict[str, int] = {}
    for share in shares:
        for name, record in share["tensors"].items():
            tensors.setdefault(name, TensorRecord(**record))
        extra_tensors |= {name: TensorRecord(**record) for name, record in share["extra_tensors"].items()}
        for space in map(Space.model_validate, share["spaces"]):
            # A tensor that two pipeline stages hold is taken from the first of them.
            entries = [e for e in space.entries if (space.of, e.name, e.dim, e.offset) not in placed]
            placed |= {(space.of, e.name, e.dim, e.offset) for e in entries}
            if entries:
                spaces[space.name] = space.model_copy(update={"entries": tuple(entries)})
        pieces += [Piece.model_validate(piece) for piece in share["pieces"]]
    pieces = [piece for piece in pieces if piece.space in spaces]
    for file in dict.fromkeys(piece.file for piece in pieces):
        files[file] = nbytes[file]
    return Manifest(
        step=step, saved_by=SavedBy(**shares[0]["saved_by"]), files=files, tensors=tensors,
        extra_tensors=extra_tensors, spaces=tuple(spaces.values()), pieces=tuple(pieces),
        optimizer=_merged_optimizers([s["optimizer"] for s in shares if s["optimizer"] is not None]),
        left_out=tuple(dict.fromkeys(name for s in shares for name in s["left_out"])), extra=shares[0]["extra"],
        rank_extra=tuple(s["rank_extra"] for s in shares) if any(s["rank_extra"] is not None for s in shares) else None,
    )  # fmt: skip


def _merged_optimizers(shares: list[Any]) -> OptimizerRecord | None:
    """Of all pipeline stages; each describes the parameters it holds."""
    if not shares:
        return None
    classes: dict[str, None] = {}
    scalars: dict[str, dict[str, Any]] = {}
    groups: list[tuple[list[str], dict[str, Any]]] = []
    for names, values, own in shares:
        classes |= dict.fromkeys(names)
        for name, states in values.items():
            scalars.setdefault(name, states)
        for params, options in own:
            same = next((known for known, o in groups if o == options), None)
            if same is None:
                groups.append((list(params), options))
            else:
                known = set(same)
                same += [p for p in params if p not in known]
    return OptimizerRecord(
        classes=tuple(classes),
        groups=tuple(OptimizerGroup(params=tuple(params), options=options) for params, options in groups),
        scalars=scalars,
    )
