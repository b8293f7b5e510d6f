"""Bytes per rank are exactly those of the design's table plus padding, and gathered ones come and go."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import layerzero as lz
from layerzero.buffers import TransientBuffer
from layerzero.lanes import Lanes
from layerzero.module import engine_of
from tests.dist.formulas import Strategy, expected_memory
from tests.dist.models import Block, OddModel
from tests.dist.parity import drain, lm_loss, odd_batches, rank_and_size
from tests.dist.pool import Pool
from tests.dist.test_counts import DTYPES, EIGHT_RANKS, FOUR_RANKS, ODD_UNITS, groups_of, train_step

pytestmark = pytest.mark.dist


def live_nbytes() -> int:
    """Bytes of all storages that any tensor object of this process refers to."""
    storages: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for item in gc.get_objects():
            if issubclass(type(item), torch.Tensor):
                storage = item.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def storage_nbytes(tensors: Any) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def settles(condition: Callable[[], bool]) -> bool:
    """Whether ``condition`` comes true: gloo's threads may hold a finished collective's tensors a moment longer."""
    for _ in range(500):
        if condition():
            return True
        time.sleep(0.01)
    return False


def assert_live(want: int, moment: str) -> None:
    if not settles(lambda: live_nbytes() == want):
        raise AssertionError(f"{moment}: expected {want} bytes, {live_nbytes() - want} more are alive")


# ---------------------------------------------------------------------------- persistent bytes


def persistent_case(options: dict[str, Any], strategy: dict[str, Any]) -> dict[str, int]:
    """Every live byte at four moments of a step, against the formulas."""
    s = Strategy(**{**strategy, "sizes": tuple(strategy["sizes"])})
    rank, world = rank_and_size()
    batch = odd_batches(world, 2)(0)[rank]
    lm_loss(OddModel(), batch[0]).backward()  # whatever torch allocates once
    gc.collect()
    before = live_nbytes()

    model = OddModel()
    groups = groups_of(model, ODD_UNITS)
    lz.shard(model, units=[Block], **options)
    want, report = expected_memory(groups, s), lz.memory_report(model)
    drain(model)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert_live(before + want.main + want.model + buffers, "after sharding")
    engine = engine_of(model)
    for unit in engine.units:
        for group in unit.groups:
            gathered = group.unsharded.untyped_storage()
            assert gathered.nbytes() == 0 if s.num_params else gathered.nbytes() > 0

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        train_step(model, optimizer, 2, step)
    drain(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    held = sum(p.numel() for p in trained)
    states = storage_nbytes(v for state in optimizer.state.values() for v in state.values())
    assert states == 8 * held + 4 * len(trained), "two fp32 values per held element, and a step count per parameter"
    assert 0 <= want.main - 4 * held <= want.main, "padding has main parameters but no state"

    # Two staging buffers for gradients on their way out, shared by all groups and as large as the largest.
    flats = [flat for flat in engine.units[0].groups[0]._rt.pack_buffers._flats if flat is not None]
    largest = max(s.numel(g) for g in groups if g.trainable)
    assert storage_nbytes(flats) <= 2 * largest * s.wire_nbytes and bool(flats) is bool(s.sizes)
    # What a lane that reduces receives in: at most the largest group less this rank's own slice of it.
    comms = engine.units[0].groups[0].comms
    received = [c.scratch._flat for lane in (comms.reduce, comms.sync) for c in lane.values()]
    assert storage_nbytes(received) <= 2 * largest * s.wire_nbytes and bool(received) is bool(s.sizes)
    assert all(c.scratch._flat.numel() == 0 for lane in (comms.unshard, comms.refresh) for c in lane.values())
    # Whole gradients keep their memory from step to step on a CPU.
    kept = want.grad_accum if engine.units[0].groups[0].whole_grads is not None else 0
    rest = before + want.main + want.model + buffers + states + storage_nbytes(flats) + storage_nbytes(received) + kept
    assert_live(rest, "at rest")

    with model.no_sync():
        lm_loss(model, batch[0]).backward()
    drain(model)
    # One rank keeps gradients as autograd made them, without the flat buffers' padding.
    padding = 0 if s.sizes else 4 * sum(s.numel(g) - g.used_numel for g in groups if g.trainable)
    assert_live(rest - kept + want.grad_accum - padding + 4 * len(trained), "accumulating")
    assert all(isinstance(p.grad, torch.Tensor) for p in trained)

    lm_loss(model, batch[1]).backward()
    drain(model)
    assert_live(rest + want.main_grad - padding, "after the synchronised backward, which ends accumulation")
    shards = [StorageWeakRef(p.grad.local.untyped_storage()) for p in trained]
    assert not any(ref.expired() for ref in shards)
    gc.disable()
    try:
        optimizer.zero_grad(set_to_none=True)
        assert all(ref.expired() for ref in shards)
    finally:
        gc.enable()
    assert_live(rest, "after zero_grad")

    after = lz.memory_report(model)
    assert report.buffers == 0 and replace(report, buffers=after.buffers) == after
    assert after.buffers == storage_nbytes(flats) + storage_nbytes(received) + kept
    assert (report.main, report.model, report.main_grad, report.grad_accum) == (
        want.main, want.model, want.main_grad, want.grad_accum,
    )  # fmt: skip
    assert report.optimizer == 2 * want.main and report.persistent == 3 * want.main + want.model
    used = sum(g.used_numel for g in groups)
    assert report.padding_ratio == pytest.approx(sum(map(s.numel, groups)) / used - 1)
    own = lz.compare_strategies(model).rows[0]
    assert (own.persistent_nbytes, own.accumulating_nbytes) == (report.persistent, report.grad_accum)
    return {"held": held, "trainable": sum(g.used_numel for g in groups if g.trainable)}


class TestPersistentBytes:
    @pytest.mark.parametrize("name", FOUR_RANKS)
    def test_four_ranks(self, pool: Pool, name: str) -> None:
        for dtype in ("fp32", "bf16") if name in ("zero3", "layerzero") else ("bf16",):
            self.run(pool, FOUR_RANKS[name], dtype)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", EIGHT_RANKS)
    def test_eight_ranks(self, pool: Pool, name: str) -> None:
        self.run(pool, EIGHT_RANKS[name], "bf16-reduce-fp32")

    def test_one_rank(self, pool: Pool) -> None:
        self.run(pool, ({"sharding": "layerzero", "zero3_size": 1}, (), (0, 0, 0)), "bf16")

    @staticmethod
    def run(pool: Pool, entry: tuple[Any, ...], dtype: str) -> None:
        options, sizes, (params, grads, optimizer) = entry
        param_dtype, reduce_dtype, compute_nbytes, wire_nbytes = DTYPES[dtype]
        s = Strategy(sizes, params, grads, optimizer, compute_nbytes, wire_nbytes)
        options = {**options, "param_dtype": param_dtype, "reduce_dtype": reduce_dtype, "buffer_dtype": param_dtype}
        replies = pool.run(persistent_case, s.degree(len(sizes)), options=options, strategy=vars(s))
        replicas = s.degree(len(sizes)) // s.degree(optimizer)
        assert sum(r["held"] for r in replies) == replicas * replies[0]["trainable"], "every element has one owner"


# ---------------------------------------------------------------------------- gathered bytes


class Chain(nn.Module):
    """Equal blocks and a root with parameters of its own."""

    def __init__(self, num_blocks: int = 5, dim: int = 16) -> None:
        super().__init__()
        self.stem = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList([Block(dim, 2 * dim) for _ in range(num_blocks)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def peak_case(options: dict[str, Any], in_order: bool = False) -> list[list[int]]:
    """Per step: most units gathered at once beside the root (measured, counted), most bytes, and the report's."""
    rank, _ = rank_and_size()
    model = Chain()
    live: dict[int, int] = {}
    lock = threading.Lock()
    peak = {"units": 0, "nbytes": 0}
    alloc, free = TransientBuffer.alloc, TransientBuffer.free
    lz.shard(model, units=[Block], **options)
    engine = engine_of(model)
    roots = {id(group._transient) for group in engine.units[0].groups}

    def counting_alloc(self: TransientBuffer) -> None:
        assert self.flat.untyped_storage().nbytes() == 0, "gathered twice"
        with lock:
            alloc(self)
            live[id(self)] = self.flat.untyped_storage().nbytes()
            peak["units"] = max(peak["units"], len(live.keys() - roots))
            peak["nbytes"] = max(peak["nbytes"], sum(live.values()))

    def counting_free(self: TransientBuffer) -> None:
        with lock:
            free(self)
            assert self.flat.untyped_storage().nbytes() == 0
            live.pop(id(self), None)

    patch = pytest.MonkeyPatch()
    patch.setattr(TransientBuffer, "alloc", counting_alloc)
    patch.setattr(TransientBuffer, "free", counting_free)
    if in_order:  # as on a stream, so that how far gathers run ahead does not depend on the threads' timing
        patch.setattr(Lanes, "are_threads", False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found = []
    try:
        for _ in range(3):
            peak.update(units=0, nbytes=0)
            lz.traffic_report(model, reset=True)
            model(torch.full((2, 16), 1.0 + rank)).square().sum().backward()
            drain(model)
            assert not live, "everything is freed at rest"
            counted = lz.traffic_report(model).peak_unsharded_units
            found.append([peak["units"], counted, peak["nbytes"], lz.memory_report(model).unsharded])
            optimizer.step()
            optimizer.zero_grad()
    finally:
        patch.undo()
    return found


@pytest.mark.parametrize("timing", ["BACKWARD_PRE", "BACKWARD_POST"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_units_gathered_at_once(pool: Pool, depth: int, timing: str) -> None:
    options = {"sharding": "zero3", "prefetch_depth": depth, "backward_prefetch": timing}
    first, *steady = pool.run(peak_case, 2, options=options, in_order=True)[0]
    assert first[:2] == [1, 1]  # no order is known yet, so nothing is gathered ahead
    for measured, counted, nbytes, reported in steady:
        assert measured == counted == 1 + depth
        assert nbytes == reported
    for measured, counted, nbytes, reported in pool.run(peak_case, 2, options=options)[0]:
        assert 1 <= measured <= counted <= 1 + depth and nbytes <= reported


def kept_case(keep_num_params: int | str) -> list[list[str]]:
    """Units beside the root whose bytes are there after each pass of a step, then after an evaluation."""
    rank, _ = rank_and_size()
    model = Chain()
    lz.shard(model, units=[Block], sharding="zero3", keep_num_params=keep_num_params)
    engine = engine_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.full((2, 16), 1.0 + rank)

    def gathered() -> list[str]:
        drain(model)
        return [u.name for u in engine.units for g in u.groups if g.unsharded.untyped_storage().nbytes()]

    found = []
    for _ in range(2):
        with model.no_sync():
            for _ in range(2):
                model(x).square().sum().backward()
                found.append(gathered())
        model(x).square().sum().backward()
        found.append(gathered())
        optimizer.step()
        optimizer.zero_grad()
    with model.no_sync():
        model(x).square().sum().backward()
    with torch.no_grad():
        model(x)
    found.append(gathered())
    return found


@pytest.mark.parametrize("keep_num_params", [0, 3000, 10**9, "all"])
def test_kept_units_stay_until_the_last_backward(pool: Pool, keep_num_params: int | str) -> None:
    every = ["", *(f"blocks.{i}" for i in range(5))]
    kept = {0: [], 3000: ["", "blocks.0", "blocks.1"], 10**9: every, "all": every}[keep_num_params]
    for found in pool.run(kept_case, 2, keep_num_params=keep_num_params):
        assert found[:6] == [kept, kept, []] * 2
        assert found[6] == []  # parameters may change after an evaluation


@pytest.mark.parametrize("keep_num_params", [3000, 10**9])
def test_most_bytes_with_kept_units(pool: Pool, keep_num_params: int) -> None:
    options = {"sharding": "zero3", "keep_num_params": keep_num_params}
    _, *steady = pool.run(peak_case, 2, options=options, in_order=True)[0]
    for measured, counted, nbytes, reported in steady:
        assert measured == counted == (4 if keep_num_params == 3000 else 5)
        assert nbytes == reported


@pytest.mark.parametrize("sharding", ["ddp", "zero2"])
def test_whole_parameters_are_never_gathered(pool: Pool, sharding: str) -> None:
    assert pool.run(peak_case, 2, options={"sharding": sharding})[0] == [[0, 0, 0, 0]] * 3


# ---------------------------------------------------------------------------- the end of a model


def deletion_case(moment: str, sharding: dict[str, Any]) -> int:
    """Deletes a model at some moment, without the garbage collector; how many storages had been watched."""
    rank, world = rank_and_size()
    batch = odd_batches(world, 2)(0)[rank]
    gc.collect()
    before = live_nbytes()
    known = set(threading.enumerate())
    gc.disable()
    try:
        model = OddModel()
        lz.shard(model, units=[Block], sharding=sharding, param_dtype="bf16", buffer_dtype="bf16")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if moment != "sharded":
            for step in range(2):
                train_step(model, optimizer, 2, step, clip=True)
        if moment == "evaluated":
            with torch.no_grad():
                model(batch[0])
        if moment == "accumulating":
            with model.no_sync():
                lm_loss(model, batch[0]).backward()
        if moment == "gradients":
            lm_loss(model, batch[0]).backward()
        if moment == "forward":
            model(batch[0])
        drain(model)
        engine = engine_of(model)
        tensors = [t for u in engine.units for g in u.groups for t in (g.main, g.model, g.unsharded) if t is not None]
        storages = [StorageWeakRef(t.untyped_storage()) for t in tensors]
        objects = [weakref.ref(model), weakref.ref(engine), weakref.ref(engine.units[1]), weakref.ref(model.blocks[0])]
        threads = [t for t in threading.enumerate() if t not in known]
        assert threads and all(t.name.startswith("layerzero-") for t in threads)
        del engine, tensors, optimizer
        gc.collect()  # torch's optimizers are reference cycles
        assert not any(ref.expired() for ref in storages)
        del model
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), thread.name
        assert [ref() for ref in objects] == [None] * len(objects)
        assert settles(lambda: all(ref.expired() for ref in storages))
        assert settles(lambda: live_nbytes() == before)
    finally:
        gc.enable()
    return len(storages)


@pytest.mark.parametrize("moment", ["sharded", "trained", "evaluated", "accumulating", "gradients", "forward"])
def test_deleting_a_model_frees_everything_at_once(pool: Pool, moment: str) -> None:
    sharding = {"params": 1 if moment == "sharded" else 2, "grads": 2, "optimizer": 2}
    assert min(pool.run(deletion_case, 2, moment=moment, sharding=sharding)) >= 8


def test_deleting_a_model_with_two_axes(pool: Pool) -> None:
    sharding = {"params": 2, "grads": 2, "optimizer": 4}
    assert min(pool.run(deletion_case, 4, moment="trained", sharding=sharding)) >= 8
