"""A checkpoint made by hand with everything the format has, and the reader that its documentation shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from layerzero.checkpoint import folder as folders
from layerzero.checkpoint.manifest import (
    Entry,
    Manifest,
    OptimizerGroup,
    OptimizerRecord,
    Piece,
    SavedBy,
    Space,
    TensorRecord,
)
from layerzero.checkpoint.storage import DTYPE_NAMES, Blob, write_file

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "checkpoint-format.md"


def blocks_of(language: str) -> list[str]:
    """Code blocks of the format's documentation."""
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def documented_reader(block_nbytes: int | None = None) -> dict[str, Any]:
    """Its functions, by name."""
    names: dict[str, Any] = {"__name__": "reader"}
    [source] = blocks_of("python")
    exec(compile(source, DOCUMENT, "exec"), names)
    if block_nbytes is not None:
        names["BLOCK_NBYTES"] = block_nbytes
    return names


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) * 100 - 50).to(dtype)


class Handmade:
    """Two tensor-parallel ranks with two data-parallel ranks each wrote it.

    ``a.weight`` is cut along dim 1 and ``a.bias`` along dim 0; ``emb`` is tied, ``norm`` and the empty ``none`` share
    its space; ``count`` is a buffer; ``emb`` and ``a.weight`` have optimizer states in fp32, and weights in bf16.
    """

    def __init__(self) -> None:
        bf16 = torch.bfloat16
        self.tensors: dict[tuple[str, str], torch.Tensor] = {
            ("a.weight", "value"): values((4, 5), bf16, 1), ("a.bias", "value"): values((5,), bf16, 2),
            ("emb", "value"): values((6, 3), torch.float32, 3), ("norm", "value"): values((), torch.float32, 4),
            ("count", "value"): values((2, 2), torch.int64, 5), ("none", "value"): torch.empty(0, 3),
            ("a.weight", "exp_avg"): values((4, 5), torch.float32, 6),
            ("a.bias", "exp_avg"): values((5,), torch.float32, 7), ("emb", "exp_avg"): values((6, 3), torch.float32, 8),
            ("emb", "exp_avg_sq"): values((6, 3), torch.float32, 9),
        }  # fmt: skip
        self.extra = values((7,), torch.int16, 10)
        self._blobs: dict[str, list[Blob]] = {}
        self._pieces: list[tuple[str, str, str, str, str, int, int]] = []

    def write(self, root: Path, step: int = 3) -> Path:
        """Save it as that step; returns the step's folder."""
        self._blobs, self._pieces = {}, []
        draft = folders.open_draft(root, step, overwrite=False)
        spaces = []
        for rank, (first, last) in enumerate(((0, 3), (3, 5))):
            name, cols = f"a.weight@tp{rank}", last - first
            entries = (
                Entry(name="a.weight", start=0, shape=(4, cols), dim=1, offset=first),
                Entry(name="a.bias", start=4 * cols, shape=(cols,), dim=0, offset=first),
            )
            spaces.append(Space(name=name, numel=5 * cols, entries=entries))
            for state in ("value", "exp_avg"):
                weight, bias = self.tensors["a.weight", state], self.tensors["a.bias", state]
                flat = torch.cat([weight[:, first:last].reshape(-1), bias[first:last]])
                self._piece(f"tp{rank}-0", name, state, 0, flat[:7])
                self._piece(f"tp{rank}-1", name, state, 7, flat[7:])
        entries = (
            Entry(name="none", start=0, shape=(0, 3)), Entry(name="emb", start=0, shape=(6, 3)),
            Entry(name="norm", start=18, shape=()),
        )  # fmt: skip
        spaces.append(Space(name="emb", numel=20, entries=entries))
        flat = torch.cat([self.tensors["emb", "value"].reshape(-1), self.tensors["norm", "value"].reshape(1)])
        self._piece("tp0-0", "emb", "value", 0, flat[:10])
        self._piece("tp0-1", "emb", "value", 10, flat[10:])
        for state in ("exp_avg", "exp_avg_sq"):
            self._piece("tp0-1", "emb", state, 0, self.tensors["emb", state].reshape(-1))
        entry = Entry(name="count", start=0, shape=(2, 2))
        spaces.append(Space(name="count", numel=4, entries=(entry,)))
        self._piece("tp0-0", "count", "value", 0, self.tensors["count", "value"].reshape(-1))
        entry = Entry(name="extra.0", start=0, shape=(7,))
        spaces.append(Space(name="extra:", of="extra", numel=7, entries=(entry,)))
        self._piece("tp0-0", "extra:", "value", 0, self.extra)
        return folders.commit(draft, self._manifest(draft, step, tuple(spaces)), None)

    def _piece(self, rank: str, space: str, state: str, start: int, flat: torch.Tensor) -> None:
        file, key, dtype = f"rank-{rank}.safetensors", f"{space}/{state}/{start}", DTYPE_NAMES[flat.dtype]
        self._blobs.setdefault(file, []).append(Blob(key, dtype, (flat.numel(),), lambda: iter([flat])))
        self._pieces.append((file, key, space, state, dtype, start, start + flat.numel()))

    def _manifest(self, draft: Path, step: int, spaces: tuple[Space, ...]) -> Manifest:
        checksums = {
            (file, blob.key): crc
            for file, blobs in self._blobs.items()
            for blob, crc in zip(blobs, write_file(draft / file, blobs), strict=True)
        }
        pieces = tuple(
            Piece(file=f, key=k, space=space, state=state, dtype=dtype, start=start, stop=stop, crc32=checksums[f, k])
            for f, k, space, state, dtype, start, stop in self._pieces
        )  # fmt: skip
        tensors = {
            name: TensorRecord(
                kind="buffer" if name == "count" else "parameter", shape=tuple(t.shape), trainable=name != "count",
                aliases=("head.weight", "b.tied") if name == "emb" else (),
            )
            for (name, state), t in self.tensors.items()
            if state == "value"
        }  # fmt: skip
        names = ("a.weight", "a.bias", "emb")
        group = OptimizerGroup(params=names, options={"lr": 0.5, "betas": {"__tuple__": [0.9, 0.99]}})
        scalars = {name: {"step": {"__number__": ["F32", 3.0]}} for name in names}
        return Manifest(
            step=step, saved_by=SavedBy(layerzero="0", torch="2", world_size=4, sharding="zero3"),
            files={path.name: path.stat().st_size for path in draft.iterdir()}, tensors=tensors,
            extra_tensors={"extra.0": TensorRecord(kind="extra", shape=(7,))}, spaces=spaces, pieces=pieces,
            optimizer=OptimizerRecord(classes=("Adam",), groups=(group,), scalars=scalars), left_out=("vae",),
            extra={"data": {"__tensor__": "extra.0"}, "at": {"__tuple__": [1, None]}}, rank_extra=(1, None, "x", 2),
        )  # fmt: skip
