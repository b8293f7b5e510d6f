"""Every source layout read at every target layout, in one process, through the code that saves and loads."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from layerzero.checkpoint import folder as folders
from layerzero.checkpoint.capture import Captured
from layerzero.checkpoint.manifest import VALUE
from layerzero.checkpoint.model_state import Named
from layerzero.checkpoint.reshard import Placement
from layerzero.checkpoint.shares import merge, piece_blobs, piece_records
from layerzero.checkpoint.source import Source, Wanted
from layerzero.checkpoint.storage import write_file
from layerzero.layout import GroupLayout, Range, TensorParallel
from layerzero.sharding import Sharding

SHAPES = {"odd": (7, 13), "row": (6, 10), "bias": (5,), "scalar": (), "nothing": (0, 3), "deep": (2, 3, 4, 2)}
CUT = {"odd": 0, "row": 1, "deep": 2}  # dims that tensor parallelism shards; 13 and 7 divide by nothing
STATES = {VALUE: 0.0, "exp_avg": 0.25, "exp_avg_sq": 0.5}


@dataclass(frozen=True)
class Layout:
    """One way of distributing the tensors over processes."""

    name: str
    sharding: Sharding
    num_ranks: int  # data-parallel
    tensor_parallel: int = 1

    def __str__(self) -> str:
        return f"{self.name}-{self.num_ranks}" + (f"-tp{self.tensor_parallel}" if self.tensor_parallel > 1 else "")

    @property
    def axes(self):
        return self.sharding.resolve(self.num_ranks)

    def groups(self, tp_rank: int) -> Iterator[tuple[GroupLayout, list[tuple[str, Placement]]]]:
        """Param groups of one tensor-parallel rank: sharded tensors and replicated ones apart."""
        for cut in (True, False):
            names = [n for n in SHAPES if (n in CUT and self.tensor_parallel > 1) is cut]
            placed = [(n, self.placement(n, tp_rank)) for n in names]
            if placed:
                yield GroupLayout(tuple(p.shape for _, p in placed), self.axes), placed

    def placement(self, name: str, tp_rank: int) -> Placement:
        shape = SHAPES[name]
        if name not in CUT or self.tensor_parallel == 1:
            return Placement.whole(shape)
        cut = TensorParallel(CUT[name], tp_rank, self.tensor_parallel)
        return Placement(shape, CUT[name], cut.indices(shape).start, cut.local_shape(shape))


def strategies(num_ranks: int) -> list[Layout]:
    inner = next(size for size in (2, 3, 1) if num_ranks % size == 0)
    return [
        Layout("ddp", Sharding.ddp(), num_ranks),
        Layout("zero1", Sharding.zero1(), num_ranks),
        Layout("zero3", Sharding.zero3(), num_ranks),
        Layout("hsdp", Sharding.hsdp(inner), num_ranks),
        Layout("layerzero", Sharding.layerzero(inner), num_ranks),
    ]


LAYOUTS = [layout for n in (1, 2, 3, 4, 8) for layout in strategies(n)]
TP_LAYOUTS = [Layout("layerzero1", Sharding.layerzero(1), n, tp) for n in (1, 2) for tp in (1, 2, 3, 4, 8)]


@cache
def whole(name: str, state: str) -> torch.Tensor:
    shape = SHAPES[name]
    first = 1000.0 * list(SHAPES).index(name)
    return (torch.arange(first, first + torch.Size(shape).numel()) + STATES[state]).view(shape)


def local(name: str, state: str, placement: Placement, held: Range) -> torch.Tensor:
    full = whole(name, state)
    if placement.dim is not None:
        full = full.narrow(placement.dim, placement.offset, placement.shape[placement.dim])
    return full.reshape(-1)[held.start : held.stop]


def write(layout: Layout, root: Path) -> Source:
    shares = []
    draft = folders.open_draft(root, 0, overwrite=False)
    for tp_rank in range(layout.tensor_parallel):
        for rank in range(layout.num_ranks):
            captured = Captured()
            for group, placed in layout.groups(tp_rank):
                named = []
                for i, (name, placement) in enumerate(placed):
                    held = group.held(i, rank, layout.axes.num_optimizer)
                    tensor = local(name, VALUE, placement, held)
                    named.append(Named(name, (), "parameter", tensor, placement, held, True, writes=True))
                states = {
                    n.name: {s: local(n.name, s, n.placement, n.held) for s in STATES if s != VALUE} for n in named
                }
                if named[0].placement.dim is not None or tp_rank == 0:
                    captured.add_group(group, rank, f"{named[0].name}@{tp_rank}", named, states)
            file = f"rank-{tp_rank}-{rank}.safetensors"
            blobs = list(piece_blobs(captured.pieces))
            checksums = write_file(draft / file, blobs)
            shares.append(
                {
                    "tensors": {n: r.model_dump() for n, r in captured.tensors.items()},
                    "spaces": [s.model_dump() for s in captured.spaces], "extra_tensors": {}, "optimizer": None,
                    "left_out": [], "extra": None, "rank_extra": None,
                    "saved_by": {"layerzero": "", "torch": "", "world_size": layout.num_ranks, "sharding": layout.name},
                    "pieces": list(piece_records(file, blobs, checksums)),
                }
            )  # fmt: skip
    nbytes = {path.name: path.stat().st_size for path in draft.iterdir()}
    return Source.open(folders.commit(draft, merge(shares, 0, nbytes), keep=None))


def read_and_compare(source: Source, layout: Layout) -> int:
    """Number of elements that were compared."""
    wanted: list[Wanted] = []
    expected: list[torch.Tensor] = []
    for tp_rank in range(layout.tensor_parallel):
        for rank in range(layout.num_ranks):
            for group, placed in layout.groups(tp_rank):
                for i, (name, placement) in enumerate(placed):
                    held = group.held(i, rank, layout.axes.num_optimizer)
                    for state in STATES:
                        expected.append(local(name, state, placement, held))
                        out = torch.full((held.numel,), float("nan"))
                        wanted.append(Wanted(name, state, placement, held, out))
    source.read(wanted)
    for want, right in zip(wanted, expected, strict=True):
        assert torch.equal(want.out, right), (want.name, want.state, want.held)
    return sum(right.numel() for right in expected)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Layout, Source]]:
    root = tmp_path_factory.mktemp("checkpoints")
    yield {layout: write(layout, root / str(layout)) for layout in dict.fromkeys([*LAYOUTS, *TP_LAYOUTS])}
    shutil.rmtree(root)


@pytest.mark.parametrize("target", LAYOUTS, ids=str)
def test_every_source_at_this_layout(sources: dict[Layout, Source], target: Layout) -> None:
    held = 3 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
    for source in LAYOUTS:
        assert read_and_compare(sources[source], target) >= held


@pytest.mark.parametrize("target", TP_LAYOUTS, ids=str)
def test_every_tensor_parallel_source_at_this_layout(sources: dict[Layout, Source], target: Layout) -> None:
    for source in TP_LAYOUTS:
        assert read_and_compare(sources[source], target) > 0


def test_every_element_is_written_once(sources: dict[Layout, Source]) -> None:
    per_copy = 4 * 3 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
    for source in sources.values():
        assert sum(piece.nbytes for piece in source.manifest.pieces) == per_copy
