"""What this rank writes: pieces of spaces, without copying; see [Note: spaces] in manifest.py.

Every element is written once, by a rank that holds it: a param group's buffer is cut along all axes, also those
along which it is replicated, so the work is even.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from layerzero.checkpoint.manifest import VALUE, Entry, Space, TensorRecord
from layerzero.checkpoint.model_state import ModelState, Named
from layerzero.checkpoint.optimizer_state import OptimizerState
from layerzero.checkpoint.storage import DTYPES, dtype_name
from layerzero.layout import GroupLayout


@dataclass(frozen=True)
class LocalPiece:
    """A piece this rank writes: ``parts`` end to end from element ``start`` of the space, all of one dtype."""

    space: str
    state: str
    dtype: str
    start: int
    parts: tuple[torch.Tensor, ...]  # 1-D

    @property
    def stop(self) -> int:
        """End in the space."""
        return self.start + sum(part.numel() for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes to write."""
        return (self.stop - self.start) * DTYPES[self.dtype].itemsize

    def in_host_memory(self) -> LocalPiece:
        """With parts that nothing else writes."""
        return replace(self, parts=tuple(part.to("cpu", copy=True) for part in self.parts))


@dataclass
class Captured:
    """This rank's share of a checkpoint.

    Attributes:
        spaces: those that this rank describes; the pieces of one may be on other ranks.
    """

    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    extra_tensors: dict[str, TensorRecord] = field(default_factory=dict)
    spaces: list[Space] = field(default_factory=list)
    pieces: list[LocalPiece] = field(default_factory=list)

    def add_model(self, state: ModelState, optimizer: OptimizerState | None) -> None:
        """Parameters, buffers, and elementwise optimizer states."""
        elementwise = {} if optimizer is None else optimizer.elementwise
        groups = (group for unit in state.engine.units for group in unit.groups)
        for group, named in zip(groups, state.sharded, strict=True):
            if named[0].writes:  # else another tensor-parallel rank has the same
                space = named[0].name + (f"@{state.first_rank}" if state.first_rank else "")
                self.add_group(group.layout, group.rank, space, named, elementwise)
        self._add_whole(state.whole, elementwise)

    def add_extra(self, tensors: dict[str, torch.Tensor], space: str) -> None:
        """Tensors of the user, by name."""
        entries, at = [], 0
        for name, tensor in tensors.items():
            self.extra_tensors[name] = TensorRecord(kind="extra", shape=tuple(tensor.shape))
            entries.append(Entry(name=name, start=at, shape=tuple(tensor.shape)))
            flat = tensor.contiguous().reshape(-1)
            self._add_piece(space, VALUE, at, [flat], name)
            at += flat.numel()
        if entries:
            self.spaces.append(Space(name=space, of="extra", numel=at, entries=tuple(entries)))

    def _describe(self, named: Named) -> None:
        self.tensors[named.name] = TensorRecord(
            kind=named.kind, shape=named.placement.full, trainable=named.trainable, aliases=named.aliases
        )

    def add_group(
        self,
        layout: GroupLayout,
        rank: int,
        space: str,
        named: Sequence[Named],
        elementwise: dict[str, dict[str, torch.Tensor]],
    ) -> None:
        """A param group's parameters and their states, as data-parallel ``rank`` holds them."""
        if rank == 0:
            for n in named:
                self._describe(n)
            entries = tuple(
                Entry(
                    name=n.name, start=layout.params[i].start, shape=n.placement.shape, dim=n.placement.dim,
                    offset=n.placement.offset,
                )
                for i, n in enumerate(named)
            )  # fmt: skip
            self.spaces.append(Space(name=space, numel=layout.used_numel, entries=entries))
        mine = layout.slice(rank, len(layout.axes.sizes))
        order = sorted(range(len(named)), key=lambda i: layout.params[i].start)
        states = dict.fromkeys(key for n in named for key in elementwise.get(n.name, {}))
        for state in [VALUE, *states]:
            held: list[tuple[int, torch.Tensor, str]] = []
            for i in order:
                n, at = named[i], layout.params[i].start
                tensor = n.tensor if state == VALUE else elementwise.get(n.name, {}).get(state)
                part = mine.intersect(layout.params[i]).shift(-at - n.held.start)
                if tensor is not None and part.numel:
                    flat = tensor.detach().reshape(-1)[part.start : part.stop]
                    held.append((at + n.held.start + part.start, flat, n.name))
            for start, parts, name in _runs(held):
                self._add_piece(space, state, start, parts, name)

    def _add_whole(self, whole: Iterable[Named], elementwise: dict[str, dict[str, torch.Tensor]]) -> None:
        for n in whole:
            if n.writes:
                self._describe(n)
                self.spaces.append(
                    Space(
                        name=n.name, numel=n.held.numel, entries=(Entry(name=n.name, start=0, shape=n.placement.full),)
                    )
                )
                for state, tensor in {VALUE: n.tensor, **elementwise.get(n.name, {})}.items():
                    self._add_piece(n.name, state, 0, [tensor.detach().reshape(-1)], n.name)

    def _add_piece(self, space: str, state: str, start: int, parts: Sequence[torch.Tensor], name: str) -> None:
        if sum(part.numel() for part in parts):
            dtype = dtype_name(parts[0], f"{name!r}, {state}")
            self.pieces.append(LocalPiece(space, state, dtype, start, tuple(parts)))


def _runs(held: list[tuple[int, torch.Tensor, str]]) -> Iterator[tuple[int, list[torch.Tensor], str]]:
    """Joins what lies end to end in a space and is of one dtype; neighbours in memory become one view."""
    run: list[torch.Tensor] = []
    first, stop, first_name = 0, -1, ""
    for start, flat, name in held:
        if run and (start != stop or flat.dtype is not run[0].dtype):
            yield first, run, first_name
            run = []
        if not run:
            first, first_name = start, name
        last = run[-1] if run else None
        if last is not None and _follows(last, flat):
            run[-1] = last.as_strided((last.numel() + flat.numel(),), (1,))
        else:
            run.append(flat)
        stop = start + flat.numel()
    if run:
        yield first, run, first_name


def _follows(last: torch.Tensor, flat: torch.Tensor) -> bool:
    return (
        last.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        and last.storage_offset() + last.numel() == flat.storage_offset()
        and last.is_contiguous() and flat.is_contiguous()
    )  # fmt: skip
