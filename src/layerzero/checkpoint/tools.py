"""What a checkpoint holds, and whether it holds it undamaged; one process, nothing distributed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from layerzero.checkpoint.folder import MANIFEST
from layerzero.checkpoint.manifest import VALUE, Manifest
from layerzero.checkpoint.source import Source
from layerzero.checkpoint.storage import DTYPE_NAMES, DTYPES
from layerzero.checkpoint.values import decode, refuse_tensor
from layerzero.errors import CheckpointError

Progress = Callable[[int, int], None]
"""Told the bytes that are done, and of how many."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint.

    Attributes:
        kind: "parameter", "buffer" or "extra".
        states: dtype by state, such as ``{"value": "F32", "exp_avg": "F32"}``; without those of a tensor that has no
            elements.
        num_shards: parts it is stored in, along a tensor-parallel dim.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    numel: int
    trainable: bool
    aliases: tuple[str, ...]
    states: dict[str, str]
    num_shards: int


@dataclass(frozen=True)
class OptimizerInfo:
    """What of optimizers is in a checkpoint.

    Attributes:
        groups: options, encoded, with ``num_params``.
        elementwise: dtypes of the states with a value per element, by state.
        scalars: states with one value per parameter.
    """

    classes: tuple[str, ...]
    groups: list[dict[str, Any]]
    elementwise: dict[str, list[str]]
    scalars: list[str]


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint holds.

    Attributes:
        kind: "layerzero" or "safetensors".
        world_size: ranks it was saved by.
        files: bytes of every file.
        extra: encoded; see ``docs/checkpoint-format.md``.
        num_rank_extra: ranks that saved data of their own.
    """

    folder: str
    kind: str
    step: int
    layerzero: str
    torch: str
    world_size: int
    sharding: str
    files: dict[str, int]
    tensors: list[TensorInfo]
    extra_tensors: list[TensorInfo]
    optimizer: OptimizerInfo | None
    left_out: tuple[str, ...]
    extra: Any
    num_rank_extra: int

    def as_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return asdict(self)


def inspect(path: str | os.PathLike[str], step: int | None = None) -> Inspection:
    """Describe a checkpoint, or plain safetensors files, from what the manifest and the files' headers say.

    Raises:
        CheckpointError: it can't be opened.
    """
    source = Source.open(Path(path), step)
    m = source.manifest
    return Inspection(
        folder=str(source.folder), kind="safetensors" if source.is_plain else "layerzero", step=m.step,
        layerzero=m.saved_by.layerzero, torch=m.saved_by.torch, world_size=m.saved_by.world_size,
        sharding=m.saved_by.sharding, files=dict(m.files), tensors=list(_tensor_infos(source)),
        extra_tensors=[
            TensorInfo(name, r.kind, r.shape, prod(r.shape), False, (), _dtypes(source, name, {VALUE}), 1)
            for name, r in m.extra_tensors.items()
        ],
        optimizer=_optimizer_info(source), left_out=m.left_out, extra=m.extra,
        num_rank_extra=sum(value is not None for value in m.rank_extra or ()),
    )  # fmt: skip


def _tensor_infos(source: Source) -> Iterator[TensorInfo]:
    shards: dict[str, int] = {}
    for space in source.manifest.spaces:
        for entry in space.entries if space.of == "model" else ():
            shards[entry.name] = shards.get(entry.name, 0) + 1
    for name, r in source.manifest.tensors.items():
        states = _dtypes(source, name, source.states.get(name, set()))
        yield TensorInfo(name, r.kind, r.shape, prod(r.shape), r.trainable, r.aliases, states, shards[name])


def _dtypes(source: Source, name: str, states: set[str]) -> dict[str, str]:
    found = {state: source.dtype(name, state) for state in sorted(states, key=lambda s: (s != VALUE, s))}
    return {state: DTYPE_NAMES[dtype] for state, dtype in found.items() if dtype is not None}


def _optimizer_info(source: Source) -> OptimizerInfo | None:
    record = source.manifest.optimizer
    if record is None:
        return None
    elementwise: dict[str, set[str]] = {}
    for name, states in source.states.items():
        for state, dtype in _dtypes(source, name, states - {VALUE}).items():
            elementwise.setdefault(state, set()).add(dtype)
    scalars = set().union(*(states for states in record.scalars.values()))
    groups = [{"num_params": len(group.params), **group.options} for group in record.groups]
    return OptimizerInfo(
        record.classes, groups, {state: sorted(found) for state, found in sorted(elementwise.items())}, sorted(scalars)
    )


@dataclass(frozen=True)
class Verification:
    """What a verification found.

    Attributes:
        nbytes: read and compared with checksums; 0 for plain safetensors files, which have none.
        num_checksums: that were compared.
        problems: what is wrong, one line each with file and entry; empty if all is well.
    """

    folder: str
    nbytes: int
    num_checksums: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(path: str | os.PathLike[str], step: int | None = None, *, progress: Progress | None = None) -> Verification:
    """Read all of a checkpoint and compare it with its checksums; memory for one block of 4 MiB.

    Also wrong: what a file or the folder holds beyond what the manifest lists, and values that can't be decoded.

    Raises:
        CheckpointError: there is no checkpoint to be found.
    """
    try:
        source = Source.open(Path(path), step, tolerate=True)
    except CheckpointError as error:
        if not os.path.lexists(path):
            raise
        return Verification(str(path), 0, 0, (str(error),))
    problems = [*source.problems, *_strays(source), *_undecodable(source)]
    total = sum(piece.nbytes for piece in source.manifest.pieces)
    done = compared = num_checksums = 0
    for piece in source.manifest.pieces:
        usable = piece.file in source.files and source.mismatch(piece) is None
        for block in range(piece.num_blocks):
            nbytes = source.block_range(piece, block).numel * DTYPES[piece.dtype].itemsize
            if usable:
                try:
                    source.read_block(piece, block)
                except CheckpointError as error:
                    problems.append(str(error))
                if piece.crc32 is not None:
                    num_checksums, compared = num_checksums + 1, compared + nbytes
            done += nbytes
            if progress is not None:
                progress(done, total)
    return Verification(str(source.folder), compared, num_checksums, tuple(problems))


def _strays(source: Source) -> Iterator[str]:
    """What no part of the manifest accounts for."""
    if source.is_plain:
        return
    covered: dict[str, set[str]] = {}
    for piece in source.manifest.pieces:
        covered.setdefault(piece.file, set()).add(piece.key)
    for name, file in source.files.items():
        for key in sorted(file.keys - covered.get(name, set())):
            yield f"{file.path}: tensor {key!r} is covered by no piece"
    for name in sorted(set(os.listdir(source.folder)) - {MANIFEST, *source.manifest.files}):
        yield f"{source.folder}: {name!r} is not listed in the manifest"


def _undecodable(source: Source) -> Iterator[str]:
    def named(name: str) -> torch.Tensor:
        if name not in source.manifest.extra_tensors:
            raise CheckpointError(f"extra data asks for a tensor {name[:100]!r} that is not there")
        return torch.empty(0)  # its bytes are verified where they lie

    for where, value in _encoded(source.manifest):
        try:
            decode(value, refuse_tensor if where.startswith("optimizer") else named, where)
        except CheckpointError as error:
            yield f"{source.folder / MANIFEST}: {error}"


def _encoded(m: Manifest) -> Iterator[tuple[str, Any]]:
    yield "extra", m.extra
    for rank, value in enumerate(m.rank_extra or ()):
        yield f"rank_extra of rank {rank}", value
    if m.optimizer is not None:
        for number, group in enumerate(m.optimizer.groups):
            yield f"optimizer group {number}", group.options
        for name, states in m.optimizer.scalars.items():
            yield f"optimizer state of {name!r}", states
