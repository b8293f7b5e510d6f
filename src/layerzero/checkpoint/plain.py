"""Safetensors files without a manifest of ours, such as those that transformers and diffusers save."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from layerzero.checkpoint.manifest import VALUE, Entry, Manifest, Piece, SavedBy, Space, TensorRecord, first_problem
from layerzero.checkpoint.storage import DTYPES, TensorFile, check_regular
from layerzero.errors import CheckpointError

_INDEX_SUFFIX = ".safetensors.index.json"
_MAX_INDEX_NBYTES = 1 << 30


@dataclass(frozen=True)
class PlainFiles:
    """Safetensors files without a manifest of ours.

    Attributes:
        names: of tensors, with the name of the file that an index says they are in.
    """

    paths: tuple[Path, ...] = ()
    names: dict[str, str] = field(default_factory=dict)


def plain_files(path: Path) -> PlainFiles:
    """Those at ``path``: itself, those of the index in it, or all in it; empty if there are none.

    Raises:
        CheckpointError: an index that is malformed or names files elsewhere.
    """
    if path.suffix == ".safetensors" and os.path.isfile(path):
        return PlainFiles((path,))
    if path.name.endswith(_INDEX_SUFFIX) and os.path.isfile(path):
        return _indexed(path)
    if not os.path.isdir(path):
        return PlainFiles()
    indices = sorted(path.glob(f"*{_INDEX_SUFFIX}"))
    if len(indices) > 1:
        raise CheckpointError(
            f"{path}: several index files ({', '.join(i.name for i in indices)}): give the path of one"
        )
    return _indexed(indices[0]) if indices else PlainFiles(tuple(sorted(path.glob("*.safetensors"))))


def _indexed(index: Path) -> PlainFiles:
    try:
        if check_regular(index, follow_links=True) > _MAX_INDEX_NBYTES:
            raise ValueError("too large")
        names = _Index.model_validate_json(index.read_bytes(), strict=True).weight_map
    except ValidationError as error:
        raise CheckpointError(f"{index}: not a usable index of safetensors files: {first_problem(error)}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{index}: not a usable index of safetensors files: {error}") from None
    return PlainFiles(tuple(index.parent / name for name in sorted(set(names.values()))), names)


class _Index(BaseModel):
    weight_map: dict[str, Annotated[str, Field(pattern=r"^[^/\\\x00]+\.safetensors$", max_length=255)]]


def plain_manifest(plain: PlainFiles) -> Manifest:
    """A manifest for files that have none: every tensor is a space, and a piece without checksums.

    Raises:
        CheckpointError: unreadable, or two files hold the same tensor, or not the ones of the index.
    """
    tensors: dict[str, TensorRecord] = {}
    spaces, pieces = [], []
    files: dict[str, TensorFile] = {path.name: TensorFile(path, follow_links=True) for path in plain.paths}
    for key, name in plain.names.items():
        if key not in files[name].keys:
            raise CheckpointError(f"{files[name].path}: tensor {key!r} is not in it, though the index says so")
    for name, file in files.items():
        for key in sorted(file.keys):
            if key in tensors:
                raise CheckpointError(
                    f"{file.path}: tensor {key!r} is in another file too; give the path of the file or index to use"
                )
            shape, dtype = file.shape(key), file.dtype(key)
            if dtype not in DTYPES:
                raise CheckpointError(f"{file.path}: tensor {key!r} has dtype {dtype}, which is not supported")
            try:
                tensors[key] = TensorRecord(kind="parameter", shape=shape)
                entry = Entry(name=key, start=0, shape=shape)
                spaces.append(Space(name=key, numel=entry.range.numel, entries=(entry,)))
            except ValidationError as error:
                raise CheckpointError(f"{file.path}: tensor {key[:100]!r}: {first_problem(error)}") from None
            if entry.range.numel:
                pieces.append(
                    Piece.model_construct(
                        file=name, key=key, space=key, state=VALUE, dtype=dtype, start=0, stop=entry.range.numel,
                        crc32=None,
                    )
                )  # fmt: skip
    try:
        return Manifest.model_construct(
            step=0, saved_by=SavedBy(layerzero="", torch="", world_size=1, sharding=""),
            files={name: file.nbytes for name, file in files.items()}, tensors=tensors, spaces=tuple(spaces),
            pieces=tuple(pieces),
        )  # fmt: skip
    except ValueError as error:  # what a manifest is checked for beyond types
        raise CheckpointError(f"{plain.paths[0].parent}: {error}") from None
