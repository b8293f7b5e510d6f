"""`layerzero.save`: every rank writes its share, and the step becomes visible all at once."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from layerzero._version import __version__
from layerzero.checkpoint import folder as folders
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
from layerzero.checkpoint.model_state import ModelState, model_states
from layerzero.checkpoint.optimizer_state import OptimizerState, as_list, read_optimizers
from layerzero.checkpoint.ranks import Ranks
from layerzero.checkpoint.storage import Blob, header_of, write_file
from layerzero.checkpoint.values import encode
from layerzero.errors import CheckpointError, DesyncError

_RESERVE_NBYTES = 1 << 20  # for the manifest and the file system's own


class Saved:
    """A checkpoint that was saved, or is being saved in the background.

    Attributes:
        folder: where it is, or will be.
        step: its number.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.folder = folder
        self.step = step
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether nothing is being written any more."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Block until the checkpoint is visible; returns its folder.

        Raises:
            CheckpointError: it could not be written; raised once, here or by the next save or load.
        """
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.folder

    def _start(self, job: _Job) -> None:
        def run() -> None:
            try:
                job.run()
            except BaseException as error:
                self._error = error

        # Not a daemon: an interpreter that exits lets the checkpoint be finished first.
        self._thread = threading.Thread(target=run, name="layerzero checkpoint")
        self._thread.start()


_pending: list[Saved] = []  # at most one


def wait_for_pending() -> None:
    """Finish a background save before its folder or its process group is used again.

    Raises:
        CheckpointError: it failed.
    """
    while _pending:
        _pending.pop().wait()


def save(
    path: str | os.PathLike[str],
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: int | None = None,
    extra: Any = None,
    rank_extra: Any = None,
    keep: int | None = None,
    background: bool = False,
    overwrite: bool = False,
    include_ignored: bool = False,
) -> Saved:
    """Save a training state into folder ``path``/step-NNNNNNNN. Call it on every rank of the job, between steps.

    Each rank writes what it holds, as safetensors, and no rank gathers anything. A killed or failed save leaves the
    earlier checkpoints as they were. ``docs/checkpoint-format.md`` describes the files.

    Args:
        path: the run's folder, on a file system that all ranks share.
        model: the sharded model, or the pipeline stages on this rank.
        optimizer: one, or several of disjoint parameters; None saves weights only.
        step: number of the checkpoint; by default the highest one there plus one.
        extra: None, bools, numbers, strings, bytes, tensors, and lists, tuples and dicts of these (a schedule's or a
            scaler's ``state_dict()``, the position in the data); rank 0's is saved.
        rank_extra: the same, saved for every rank (`rng_state`); comes back when the number of ranks is the same.
        keep: how many checkpoints stay in the folder, this one included; None for all.
        background: copy to host memory and return; write while training goes on. Errors are raised by
            ``wait()`` of what is returned, or by the next save or load.
        overwrite: replace a step that exists.
        include_ignored: also save ignored modules that nothing trains. By default their weights have to come from
            where they came from at construction.

    Raises:
        CheckpointError: it can't be written (no space, no permission, a value in ``extra``), on every rank; or an
            earlier background save failed.
        DesyncError: ranks disagree on path, step or options.
    """
    wait_for_pending()
    job = _prepare(
        _Request(Path(path), step, keep, background, overwrite), model, as_list(optimizer), extra, rank_extra,
        include_ignored,
    )  # fmt: skip
    saved = Saved(job.draft.parent / folders.step_name(job.step), job.step)
    if background:
        saved._start(job)
        _pending.append(saved)
    else:
        job.run()
    return saved


@dataclass(frozen=True)
class _Request:
    path: Path
    step: int | None
    keep: int | None
    background: bool
    overwrite: bool


@dataclass
class _Job:
    """Everything a save needs from here on, without touching the model."""

    ranks: Ranks
    draft: Path
    step: int
    keep: int | None
    pieces: list[LocalPiece]
    described: dict[str, Any]  # this rank's part of the manifest, as JSON

    def run(self) -> None:
        """Write, sync, and commit. Collective."""
        file = f"rank-{self.ranks.rank:05d}.safetensors"
        blobs = list(_blobs(self.pieces))
        error: Exception | None = None
        checksums: list[list[int]] = []
        try:
            if blobs:
                checksums = write_file(self.draft / file, blobs)
        except Exception as e:
            error = e
        self.pieces = []
        with self._discarding_draft():
            self.ranks.agree(f"checkpoint {self.step} was not saved, earlier ones are as they were", error)
        shares = self.ranks.gather_to_first({**self.described, "pieces": list(_records(file, blobs, checksums))})
        try:
            if shares is not None:
                folders.commit(self.draft, self._manifest(shares), self.keep)
        except Exception as e:
            error = e
        with self._discarding_draft():
            self.ranks.agree_on_first(f"checkpoint {self.step} was not saved, earlier ones are as they were", error)

    @contextlib.contextmanager
    def _discarding_draft(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self.ranks.rank == 0:
                folders.discard(self.draft)
            raise

    def _manifest(self, shares: list[dict[str, Any]]) -> Manifest:
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
            files[file] = os.path.getsize(self.draft / file)
        return Manifest(
            step=self.step, saved_by=SavedBy(**shares[0]["saved_by"]), files=files, tensors=tensors,
            extra_tensors=extra_tensors, spaces=tuple(spaces.values()), pieces=tuple(pieces),
            optimizer=_merged_optimizers([s["optimizer"] for s in shares if s["optimizer"] is not None]),
            left_out=tuple(dict.fromkeys(name for s in shares for name in s["left_out"])), extra=shares[0]["extra"],
            rank_extra=tuple(s["rank_extra"] for s in shares),
        )  # fmt: skip


def _prepare(
    request: _Request,
    model: nn.Module | Sequence[nn.Module],
    optimizers: list[Optimizer],
    extra: Any,
    rank_extra: Any,
    include_ignored: bool,
) -> _Job:
    ranks = Ranks.all()
    captured, described, error = Captured(), {}, None
    try:
        if request.keep is not None and request.keep < 1:
            raise CheckpointError(f"keep: expected at least 1, got {request.keep}")
        if request.step is not None and not 0 <= request.step < 10**18:
            raise CheckpointError(f"step: expected a number from 0, got {request.step}")
        states = model_states(model, include_ignored)
        optimizer = _optimizer_state(states, optimizers) if optimizers else None
        for state in states:
            captured.add_model(state, optimizer)
        described = _describe(ranks, states, optimizer, captured, extra, rank_extra, include_ignored)
    except Exception as e:
        error = e
    options = [str(request.path), request.step, request.keep, request.background, request.overwrite, include_ignored]
    told = ranks.gather(options)
    for rank, other in enumerate(told):
        if other != told[0]:
            raise DesyncError(f"lz.save: rank 0 was called with {told[0]}, rank {rank} with {other}")
    ranks.agree("nothing was saved", error)
    if request.background:
        captured.pieces = [piece.in_host_memory() for piece in captured.pieces]
    blobs = list(_blobs(captured.pieces))
    nbytes = ranks.gather(sum(b.nbytes for b in blobs) + len(header_of(blobs)))
    answer: list[Any] = []
    try:
        if ranks.rank == 0:
            step = request.step
            if step is None:
                step = max(folders.steps(request.path), default=-1) + 1
            draft = folders.open_draft(request.path, step, request.overwrite)
            answer = [step, str(draft)]
            _check_space(draft, sum(nbytes))
    except Exception as e:
        error = e
        if answer:
            folders.discard(Path(answer[1]))
    ranks.agree_on_first("nothing was saved", error)
    step, draft = ranks.from_first(answer)
    return _Job(ranks, Path(draft), step, request.keep, captured.pieces, described)


def _optimizer_state(states: list[ModelState], optimizers: list[Optimizer]) -> OptimizerState:
    return read_optimizers(optimizers, {id(n.tensor): n for state in states for n in state.all()})


def _check_space(draft: Path, nbytes: int) -> None:
    free = shutil.disk_usage(draft).free
    if nbytes + _RESERVE_NBYTES > free:
        raise CheckpointError(
            f"{draft.parent}: {nbytes / 2**20:.0f} MiB are needed and {free / 2**20:.0f} MiB are free. Free some, use "
            f"keep=, or save elsewhere."
        )


def _describe(
    ranks: Ranks,
    states: list[ModelState],
    optimizer: OptimizerState | None,
    captured: Captured,
    extra: Any,
    rank_extra: Any,
    include_ignored: bool,
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
        "left_out": [] if include_ignored else [name for state in states for name in state.left_out],
        "saved_by": SavedBy(
            layerzero=__version__,
            torch=torch.__version__,
            world_size=ranks.size,
            sharding=str(engine.config.resolve_sharding()),
        ).model_dump(),
        **encoded,
    }


def _blobs(pieces: Sequence[LocalPiece]) -> Iterator[_PieceBlob]:
    count: dict[tuple[str, str], int] = {}
    for piece in pieces:
        number = count[piece.space, piece.state] = count.get((piece.space, piece.state), -1) + 1
        key = f"{piece.space}/{piece.state}" + (f"/{number}" if number else "")
        yield _PieceBlob(
            key, piece.dtype, (piece.stop - piece.start,), lambda parts=piece.parts: iter(parts), piece=piece
        )


@dataclass(frozen=True)
class _PieceBlob(Blob):
    """A piece as a tensor of this rank's file."""

    piece: LocalPiece = field(kw_only=True)


def _records(file: str, blobs: Sequence[_PieceBlob], checksums: list[list[int]]) -> Iterator[dict[str, Any]]:
    for blob, crc in zip(blobs, checksums, strict=True):
        piece = blob.piece
        yield {
            "file": file, "key": blob.key, "space": piece.space, "state": piece.state, "dtype": piece.dtype,
            "start": piece.start, "stop": piece.stop, "crc32": crc,
        }  # fmt: skip


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
