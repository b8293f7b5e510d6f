"""What has to hold in a manifest beyond the types of its fields. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerzero.checkpoint.manifest import Entry, Manifest, Space, TensorRecord

_VALUE = "value"


def problems(m: Manifest) -> Iterator[str]:
    """What is wrong, one sentence each. Nothing is allocated by a declared size, and all of it takes ``n log n``."""
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
    yield from _check_names(m)
    yield from _check_pieces(m, spaces)
    yield from _check_held(m, spaces)


def _check_shards(name: str, record: TensorRecord, entries: list[Entry]) -> Iterator[str]:
    if prod(max(size, 1) for size in record.shape) >= 2**63:  # without elements too: strides have to fit
        yield f"tensor {name!r}: no tensor can have shape {record.shape}"
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


def _check_names(m: Manifest) -> Iterator[str]:
    seen = set(m.tensors)
    for name, record in m.tensors.items():
        if record.kind == "extra":
            yield f"tensor {name!r}: of the model, but said to be extra"
        for alias in record.aliases:
            if alias in seen:
                yield f"tensor {name!r}: its alias {alias!r} is another tensor's name"
            seen.add(alias)
    for name, record in m.extra_tensors.items():
        if record.kind != "extra" or record.aliases or record.trainable:
            yield f"extra tensor {name!r}: described as one of the model"
    if m.optimizer is not None:
        named = [name for group in m.optimizer.groups for name in group.params]
        for name in [*named, *m.optimizer.scalars]:
            if name not in m.tensors:
                yield f"the optimizer has a parameter {name!r} that is no tensor of the manifest"


def _check_pieces(m: Manifest, spaces: Mapping[str, Space]) -> Iterator[str]:
    stored: set[tuple[str, str]] = set()
    nbytes = dict.fromkeys(m.files, 0)
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
        if piece.stop <= piece.start or piece.stop > spaces[piece.space].numel:
            yield f"{where}: range {piece.start}..{piece.stop} is empty or leaves space {piece.space!r}"
        if piece.crc32 is not None and len(piece.crc32) != piece.num_blocks:
            yield f"{where}: {len(piece.crc32)} checksums for {piece.nbytes} bytes"
        nbytes[piece.file] += piece.nbytes
    for file, total in nbytes.items():
        if total > m.files[file]:
            yield f"{file}: pieces of {total} bytes in a file of {m.files[file]}"


def _check_held(m: Manifest, spaces: Mapping[str, Space]) -> Iterator[str]:
    """Values and states are there in full or, states only, not at all."""
    by_state = m.sorted_pieces()
    for (name, state), found in by_state.items():
        if any(a.stop > b.start for a, b in pairwise(found.pieces)):
            yield f"space {name!r}: pieces of state {state!r} overlap"
            return
        if state != _VALUE and spaces[name].of == "extra":
            yield f"space {name!r}: extra data with a state {state!r}"
    states: dict[str, set[str]] = {}
    for name, state in by_state:
        states.setdefault(name, set()).add(state)
    for name, space in spaces.items():
        for state in states.get(name, set()) | {_VALUE}:
            found = by_state.get((name, state))
            for entry in space.entries:
                pieces = [] if found is None else found.overlapping(entry.range)
                held = sum(p.range.intersect(entry.range).numel for p in pieces)
                if held != entry.range.numel and (held or state == _VALUE):
                    yield f"tensor {entry.name!r}: {held} of {entry.range.numel} elements of state {state!r} are there"
                if len({p.dtype for p in pieces}) > 1:
                    yield f"tensor {entry.name!r}: state {state!r} is stored in several dtypes"
