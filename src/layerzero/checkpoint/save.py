"""`layerzero.save`: every rank writes its share, and the step becomes visible all at once."""

from __future__ import annotations

import contextlib
import operator
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from layerzero.checkpoint import folder as folders
from layerzero.checkpoint.capture import Captured, LocalPiece
from layerzero.checkpoint.model_state import ModelState, check_arguments, model_states
from layerzero.checkpoint.optimizer_state import OptimizerState, as_list, read_optimizers
from layerzero.checkpoint.ranks import Ranks
from layerzero.checkpoint.shares import describe, merge, piece_blobs, piece_records
from layerzero.checkpoint.storage import header_of, write_file
from layerzero.errors import CheckpointError
from layerzero.warnings_ import warn


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
                with contextlib.suppress(Warning):  # turned into an error, it would end up nowhere
                    warn(f"the background save of checkpoint {self.step} failed: {error}")

        # Not a daemon: an interpreter that exits lets the checkpoint be finished first.
        self._thread = threading.Thread(target=run, name="layerzero checkpoint")
        self._thread.start()


_pending: list[Saved] = []  # at most one


def wait_for_pending(ranks: Ranks) -> None:
    """Finish a background save before its folder or its process group is used again. Collective.

    Raises:
        CheckpointError: it failed, and `Saved.wait` has not said so on every rank.
    """
    error: Exception | None = None
    try:
        while _pending:
            _pending.pop().wait()
    except Exception as e:
        error = e
    ranks.agree("an earlier save in the background failed", error)


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
    earlier checkpoints as they were. Gradients are not saved, nor what `no_sync` accumulated. One job at a time may
    save into a folder. ``docs/checkpoint-format.md`` describes the files.

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
    ranks = Ranks.all()
    wait_for_pending(ranks)
    request: _Request | None = None
    error: Exception | None = None
    try:
        check_arguments("lz.save", path, model, optimizer)
        classes = [type(o).__name__ for o in as_list(optimizer)]
        request = _Request(
            os.path.abspath(path), _whole("step", step, 0), _whole("keep", keep, 1), bool(background), bool(overwrite),
            bool(include_ignored), classes,
        )  # fmt: skip
    except Exception as e:
        error = e
    ranks.agree("nothing was saved", error)
    assert request is not None
    ranks.check_same("lz.save", vars(request))
    job = _prepare(ranks, request, model, as_list(optimizer), extra, rank_extra)
    saved = Saved(job.draft.parent / folders.step_name(job.step), job.step)
    if background:
        saved._start(job)
        _pending.append(saved)
    else:
        job.run()
    return saved


@dataclass(frozen=True)
class _Request:
    """Arguments that have to be the same on every rank."""

    path: str
    step: int | None
    keep: int | None
    background: bool
    overwrite: bool
    include_ignored: bool
    optimizers: list[str]


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
        blobs = list(piece_blobs(self.pieces))
        error: Exception | None = None
        checksums: list[list[int]] = []
        try:
            if blobs:
                checksums = write_file(self.draft / file, blobs)
        except FileNotFoundError as e:
            error = CheckpointError(f"{e}: the folder has to be on a file system that all ranks share")
        except Exception as e:
            error = e
        self.pieces = []
        with self._discarding_draft():
            self.ranks.agree(f"checkpoint {self.step} was not saved, earlier ones are as they were", error)
        shares = self.ranks.gather_to_first({**self.described, "pieces": list(piece_records(file, blobs, checksums))})
        try:
            if shares is not None:
                nbytes = {name: os.path.getsize(self.draft / name) for name in os.listdir(self.draft)}
                folders.commit(self.draft, merge(shares, self.step, nbytes), self.keep)
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


def _whole(name: str, value: Any, least: int) -> int | None:
    """A whole number of any kind (numpy's too), or None."""
    try:
        number = None if value is None else operator.index(value)
        if isinstance(value, bool) or (number is not None and not least <= number < 10**18):
            raise TypeError
    except TypeError:
        raise CheckpointError(f"{name}: expected a whole number from {least}, got {value!r}") from None
    return number


def _prepare(
    ranks: Ranks,
    request: _Request,
    model: nn.Module | Sequence[nn.Module],
    optimizers: list[Optimizer],
    extra: Any,
    rank_extra: Any,
) -> _Job:
    captured, described, error = Captured(), {}, None
    try:
        states = model_states(model, request.include_ignored)
        optimizer = _optimizer_state(states, optimizers) if optimizers else None
        for state in states:
            captured.add_model(state, optimizer)
        described = describe(ranks, states, optimizer, captured, extra, rank_extra)
        left_out = () if request.include_ignored else (name for state in states for name in state.left_out)
        described["left_out"] = list(left_out)
        if request.background:  # here, so that a rank without room for it tells the others
            captured.pieces = [piece.in_host_memory() for piece in captured.pieces]
    except Exception as e:
        error = e
    ranks.agree("nothing was saved", error)
    blobs = list(piece_blobs(captured.pieces))
    nbytes = ranks.gather(sum(b.nbytes for b in blobs) + len(header_of(blobs)))
    answer: list[Any] = []
    try:
        if ranks.rank == 0:
            step = request.step
            if step is None:
                step = max(folders.steps(Path(request.path)), default=-1) + 1
            draft = folders.open_draft(Path(request.path), step, request.overwrite)
            answer = [step, str(draft)]
            folders.check_space(draft.parent, sum(nbytes), "Free some, use keep=, or save elsewhere.")
    except Exception as e:
        error = e
        if answer:
            folders.discard(Path(answer[1]))
    ranks.agree_on_first("nothing was saved", error)
    step, draft = ranks.from_first(answer)
    return _Job(ranks, Path(draft), step, request.keep, captured.pieces, described)


def _optimizer_state(states: list[ModelState], optimizers: list[Optimizer]) -> OptimizerState:
    return read_optimizers(optimizers, {id(n.tensor): n for state in states for n in state.all()})
