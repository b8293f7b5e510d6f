"""Collectives and bytes per step are exactly those of the design's table."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import layerzero as lz
from layerzero import collectives
from layerzero.module import engine_of
from tests.dist.formulas import Group, Strategy, Traffic, expected_traffic
from tests.dist.models import Block, OddModel
from tests.dist.parity import drain, lane_context, lm_loss, odd_batches, rank_and_size
from tests.dist.pool import Pool

pytestmark = pytest.mark.dist

OPS = {"unshard": "unshard", "refresh": "refresh", "reduce": "scatter", "sync": "scatter"}
"""Operation names of the engine's counters -> kinds of the formula; reductions outside `optimizer` are all-reduces."""


class Wiretap:
    """Counts the calls of torch.distributed itself, and bytes sent, by the ranks of the process group."""

    def __init__(self) -> None:
        self.gathers: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self.exchanges: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self.others: list[str] = []

    def clear(self) -> None:
        self.gathers.clear()
        self.exchanges.clear()
        self.others.clear()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        patch = pytest.MonkeyPatch()
        gather, exchange = collectives._all_gather, dist.all_to_all_single
        broadcast, send = dist.broadcast, dist.isend

        def all_gather(out: torch.Tensor, shard: torch.Tensor, group: Any) -> None:
            ranks = tuple(dist.get_process_group_ranks(group))
            if len(ranks) < rank_and_size()[1] or shard.is_floating_point():
                self.gathers[ranks].append((len(ranks) - 1) * shard.numel() * shard.element_size())
            else:
                self.others.append("all_gather")
            gather(out, shard, group=group)

        def all_to_all_single(out: torch.Tensor, value: torch.Tensor, group: Any) -> None:
            ranks = tuple(dist.get_process_group_ranks(group))
            self.exchanges[ranks].append(value.numel() * value.element_size() // len(ranks) * (len(ranks) - 1))
            exchange(out, value, group=group)

        def broadcast_piece(piece: torch.Tensor, group_src: int, group: Any, async_op: bool = False) -> Any:
            """One of the broadcasts that make up a gather: this rank's own counts as its part of the gather."""
            ranks = tuple(dist.get_process_group_ranks(group))
            if not async_op:
                self.others.append("broadcast")
            elif group_src == group.rank():
                self.gathers[ranks].append((len(ranks) - 1) * piece.numel() * piece.element_size())
            return broadcast(piece, group_src=group_src, group=group, async_op=async_op)

        def send_piece(piece: torch.Tensor, group: Any, group_dst: int) -> Any:
            """One of the sends that make up an exchange: the first peer's starts an exchange, others add to it."""
            ranks = tuple(dist.get_process_group_ranks(group))
            if group_dst == (group.rank() + 1) % len(ranks):
                self.exchanges[ranks].append(0)
            self.exchanges[ranks][-1] += piece.numel() * piece.element_size()
            return send(piece, group=group, group_dst=group_dst)

        def other(name: str, original: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.others.append(name)
                return original(*args, **kwargs)

            return call

        patch.setattr(collectives, "_all_gather", all_gather)
        patch.setattr(dist, "all_to_all_single", all_to_all_single)
        patch.setattr(dist, "broadcast", broadcast_piece)
        patch.setattr(dist, "isend", send_piece)
        names = [
            "all_reduce", "reduce", "gather", "scatter", "all_gather", "all_gather_into_tensor",
            "all_gather_object", "broadcast_object_list", "reduce_scatter", "reduce_scatter_tensor", "all_to_all",
            "barrier", "send", "recv", "batch_isend_irecv", "all_gather_single",
            "reduce_scatter_single", "all_gather_coalesced", "all_reduce_coalesced",
        ]  # fmt: skip
        for name in names:
            if hasattr(dist, name):
                patch.setattr(dist, name, other(name, getattr(dist, name)))
        try:
            yield
        finally:
            patch.undo()


def groups_of(model: nn.Module, units: dict[str, int], kept: Sequence[str] = ()) -> list[Group]:
    """Param groups of an unsharded model by size; ``units`` are name -> gathers per micro-batch, the root is ''."""
    sizes: dict[tuple[str, bool], int] = {}
    for name, p in model.named_parameters():
        unit = next((u for u in units if u and name.startswith(u + ".")), "")
        sizes[unit, p.requires_grad] = sizes.get((unit, p.requires_grad), 0) + p.numel()
    return [Group(u, numel, trainable, units[u], u in kept) for (u, trainable), numel in sizes.items()]


ODD_UNITS = {"": 1, "blocks.0": 2, "blocks.1": 2, "blocks.2": 1}


def measured_traffic(report: Any, num_optimizer: int) -> Traffic:
    total: Traffic = {}
    for row in report.rows:
        if row.axis == collectives.CONTROL:
            continue
        kind = "all-reduce" if OPS[row.op] == "scatter" and row.axis >= num_optimizer else OPS[row.op]
        num, nbytes = total.get((kind, row.axis), (0, 0))
        assert row.num == int(row.num) and row.nbytes == int(row.nbytes)
        total[kind, row.axis] = (num + int(row.num), nbytes + int(row.nbytes))
    return total


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, micro: int, step: int, clip: bool = False) -> None:
    rank, world = rank_and_size()
    batch = odd_batches(world, micro)(step)[rank]
    for m in range(micro):
        with contextlib.nullcontext() if m == micro - 1 else model.no_sync():  # type: ignore[operator]
            lm_loss(model, batch[m]).backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def neighbours(sizes: tuple[int, ...], rank: int, axis: int) -> tuple[int, ...]:
    stride = 1
    for size in sizes[:axis]:
        stride *= size
    return tuple(r for r in range(dist.get_world_size()) if r % stride == rank % stride
                 and r // (stride * sizes[axis]) == rank // (stride * sizes[axis]))  # fmt: skip


def step_case(
    options: dict[str, Any], strategy: dict[str, Any], micro: int, lane: str, units: dict[str, int] | None = None,
    kept: Sequence[str] = (),
) -> dict[str, list[float]]:
    """Two steady steps: counters, real calls and formula agree. Returns what was sent, by "kind axis"."""
    s = Strategy(**{**strategy, "sizes": tuple(strategy["sizes"])})
    rank, _ = rank_and_size()
    model = OddModel()
    want = expected_traffic(groups_of(model, units or ODD_UNITS, kept), s, micro)
    tap = Wiretap()
    with tap.listening():
        with lane_context(lane):
            lz.shard(model, units=[Block], **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            train_step(model, optimizer, micro, step)
        drain(model)
        lz.traffic_report(model, reset=True)
        tap.clear()
        for step in range(2, 4):
            train_step(model, optimizer, micro, step)
        drain(model)
        report = lz.traffic_report(model)
        calls = (dict(tap.gathers), dict(tap.exchanges), list(tap.others))
    assert report.num_steps == 2
    assert measured_traffic(report, s.num_optimizer) == want
    assert calls[2] == [], calls[2]
    assert all(row.axis != collectives.CONTROL for row in report.rows)

    gathers, exchanges = dict(calls[0]), dict(calls[1])
    for axis in range(len(s.sizes)):
        ranks = neighbours(s.sizes, rank, axis)
        kinds = {kind: want[kind, a] for kind, a in want if a == axis}
        halves = kinds.get("all-reduce", (0, 0))
        for found, names in ((gathers, ["unshard", "refresh"]), (exchanges, ["scatter"])):
            sent = found.pop(ranks, [])
            assert len(sent) == 2 * (sum(kinds.get(n, (0, 0))[0] for n in names) + halves[0]), (axis, names)
            assert sum(sent) == 2 * (sum(kinds.get(n, (0, 0))[1] for n in names) + halves[1] // 2), (axis, names)
    assert not gathers and not exchanges, "a collective over ranks that are no axis"

    own = lz.compare_strategies(model, micro_batches=micro).rows[0]
    assert own.sent_nbytes == tuple(int(report.nbytes(axis)) for axis in range(len(s.sizes)))
    return {f"{kind} {axis}": list(sent) for (kind, axis), sent in want.items()}


# name, options, axis sizes, and how many axes shard parameters, gradients and optimizer states
FOUR_RANKS: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, int, int]]] = {
    "ddp": ({"sharding": "ddp"}, (4,), (0, 0, 0)),
    "ddp-nodes": ({"sharding": "ddp", "node_size": 2}, (2, 2), (0, 0, 0)),
    "zero1": ({"sharding": "zero1"}, (4,), (0, 0, 1)),
    "zero2-nodes": ({"sharding": "zero2", "node_size": 2}, (2, 2), (0, 2, 2)),
    "zero3": ({"sharding": "zero3"}, (4,), (1, 1, 1)),
    "zero3-nodes": ({"sharding": "zero3", "node_size": 2}, (2, 2), (2, 2, 2)),
    "hsdp": ({"sharding": "hsdp", "zero3_size": 2}, (2, 2), (1, 1, 1)),
    "layerzero": ({"sharding": "layerzero", "zero3_size": 2}, (2, 2), (1, 1, 2)),
    "layerzero-full": ({"sharding": "layerzero", "zero3_size": 2, "accumulate": "full"}, (2, 2), (1, 0, 2)),
    "degrees-2-4-4": ({"sharding": {"params": 2, "grads": 4, "optimizer": 4}}, (2, 2), (1, 2, 2)),
    "degrees-1-2-2": ({"sharding": {"params": 1, "grads": 2, "optimizer": 2}}, (2, 2), (0, 1, 1)),
}
EIGHT_RANKS: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, int, int]]] = {
    "layerzero-3-axes": ({"sharding": "layerzero", "zero3_size": 2, "node_size": 4}, (2, 2, 2), (1, 1, 3)),
    "degrees-2-4-all": ({"sharding": {"params": 2, "grads": 4, "optimizer": "all"}}, (2, 2, 2), (1, 2, 3)),
}
DTYPES = {"fp32": ("fp32", "fp32", 4, 4), "bf16": ("bf16", "bf16", 2, 2), "bf16-reduce-fp32": ("bf16", "fp32", 2, 4)}


def run_steps(
    pool: Pool, entry: tuple[Any, ...], dtype: str, micro: int, lane: str, kept: Sequence[str] = ()
) -> dict[str, list[float]]:
    options, sizes, (params, grads, optimizer) = entry
    param_dtype, reduce_dtype, compute_nbytes, wire_nbytes = DTYPES[dtype]
    strategy = {
        "sizes": sizes, "num_params": params, "num_grads": grads, "num_optimizer": optimizer,
        "compute_nbytes": compute_nbytes, "wire_nbytes": wire_nbytes,
    }  # fmt: skip
    options = {**options, "param_dtype": param_dtype, "reduce_dtype": reduce_dtype, "buffer_dtype": param_dtype}
    world = 1
    for size in sizes:
        world *= size
    first, *others = pool.run(
        step_case, world, options=options, strategy=strategy, micro=micro, lane=lane, kept=list(kept)
    )
    assert all(other == first for other in others)
    return first


class TestSteadySteps:
    @pytest.mark.parametrize("name", FOUR_RANKS)
    def test_four_ranks(self, pool: Pool, name: str) -> None:
        number = list(FOUR_RANKS).index(name)
        dtypes, lanes = list(DTYPES), ["threads", "late"]
        one = run_steps(pool, FOUR_RANKS[name], dtypes[number % 3], 1, lanes[number % 2])
        three = run_steps(pool, FOUR_RANKS[name], dtypes[number % 3], 3, lanes[(number + 1) % 2])
        self.check_slow_axes(FOUR_RANKS[name], one, three)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", EIGHT_RANKS)
    def test_eight_ranks(self, pool: Pool, name: str) -> None:
        one = run_steps(pool, EIGHT_RANKS[name], "bf16", 1, "threads")
        three = run_steps(pool, EIGHT_RANKS[name], "bf16", 3, "late")
        self.check_slow_axes(EIGHT_RANKS[name], one, three)

    @pytest.mark.parametrize(
        ("keep_num_params", "kept"),
        [(10**9, ODD_UNITS), (2000, ["", "blocks.0"]), (1000, [""]), (10, [])],
        ids=["all", "root-and-one", "root", "none"],
    )
    @pytest.mark.parametrize("name", ["layerzero", "layerzero-full", "zero3-nodes"])
    def test_kept_units(self, pool: Pool, name: str, keep_num_params: int, kept: Sequence[str]) -> None:
        options, *rest = FOUR_RANKS[name]
        entry = ({**options, "keep_num_params": keep_num_params}, *rest)
        number = len(kept) + len(name)
        run_steps(pool, entry, list(DTYPES)[number % 3], 3, ["threads", "late"][number % 2], kept)

    @staticmethod
    def check_slow_axes(entry: tuple[Any, ...], one: dict[str, Any], three: dict[str, Any]) -> None:
        """Axes outside params and grads carry the same whatever the number of micro-batches."""
        params, grads, _ = entry[2]
        assert one.keys() == three.keys() and one
        for key, sent in one.items():
            is_slow = int(key.split()[1]) >= max(params, grads) or key.startswith("refresh")
            if is_slow:
                assert three[key] == sent
            elif int(key.split()[1]) < (params if key.startswith("unshard") else grads):
                assert three[key] == [3 * x for x in sent]


def control_case(desync_check: bool) -> list[list[float]]:
    """Control messages of each step, [number, bytes], clipping on."""
    model = OddModel()
    lz.shard(model, units=[Block], sharding="layerzero", zero3_size=2, desync_check=desync_check)
    at_first = lz.traffic_report(model).rows
    assert 0 < sum(row.nbytes for row in at_first) < 1000, "checks of the structure; the initial values are not counted"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(5):
        lz.traffic_report(model, reset=True)
        train_step(model, optimizer, 2, step, clip=True)
        drain(model)
        rows = [row for row in lz.traffic_report(model).rows if row.axis == collectives.CONTROL]
        assert {row.op for row in rows} == {"control"} | ({"check"} if desync_check or step < 1 else set())
        found.append([sum(row.num for row in rows), sum(row.nbytes for row in rows)])
    return found


class TestControlMessages:
    @pytest.mark.parametrize("always", [False, True], ids=["desync-check-at-first", "desync-check-always"])
    def test_counted_apart(self, pool: Pool, always: bool) -> None:
        per_step = pool.run(control_case, 4, desync_check=always)[0]
        num_trainable = sum(p.requires_grad for p in OddModel().parameters())
        norms = [1, 2 * 4 * num_trainable * 3 // 4]
        # Two micro-batches, each 6 gathers (two units twice, one and the root once) and the end of a backward.
        checks = [14, 14 * 8]
        if always:
            assert per_step[2:] == [[n + c for n, c in zip(norms, checks, strict=True)]] * 3
        else:
            assert per_step[2:] == [norms] * 3
            assert per_step[0][0] > norms[0]  # the first backwards are checked, and the order is agreed on


def refresh_case(lane: str) -> list[int]:
    """Refresh collectives per step of three micro-batches followed by two evaluations."""
    rank, world = rank_and_size()
    model = OddModel()
    with lane_context(lane):
        lz.shard(model, units=[Block], sharding="layerzero", zero3_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = odd_batches(world, 2)(0)[rank]
    found = []
    for step in range(3):
        lz.traffic_report(model, reset=True)
        train_step(model, optimizer, 3, step)
        with torch.no_grad():
            outputs = [model(batch[0]) for _ in range(2)]
        assert torch.equal(*outputs)
        report = lz.traffic_report(model)
        found.append(int(sum(row.num for row in report.rows if row.op == "refresh")))
    return found


@pytest.mark.parametrize("lane", ["threads", "late"])
def test_one_refresh_per_optimizer_step(pool: Pool, lane: str) -> None:
    # One trainable group in each of the four units. The first forward of all refreshes, because parameters may have
    # been edited since; then only the evaluation after each step finds new ones, and training after it none.
    assert pool.run(refresh_case, 4, lane=lane) == [[8, 4, 4]] * 4


def gathers_case(prefetch_depth: int) -> list[dict[str, int]]:
    """Gathers of each unit per micro-batch, iteration by iteration."""
    model = OddModel()
    lz.shard(model, units=[Block], sharding="zero3", prefetch_depth=prefetch_depth)
    engine = engine_of(model)
    counts: dict[str, int] = defaultdict(int)
    for unit in engine.units:
        for group in unit.groups[:1]:
            original = group.unshard

            def counting(unit: Any = unit, original: Any = original) -> None:
                counts[unit.name] += 1
                original()

            group.unshard = counting  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(3):
        counts.clear()
        train_step(model, optimizer, 1, step)
        found.append(dict(counts))
    return found


@pytest.mark.parametrize("prefetch_depth", [0, 1, 2])
def test_last_unit_is_kept_once_the_order_is_known(pool: Pool, prefetch_depth: int) -> None:
    first, *steady = pool.run(gathers_case, 2, prefetch_depth=prefetch_depth)[0]
    assert first == {"": 1, "blocks.0": 2, "blocks.1": 2, "blocks.2": 2}
    assert steady == [ODD_UNITS, ODD_UNITS]


def reduction_case() -> dict[str, Any]:
    """One reduction of values whose bf16 sum depends on the order, on every rank."""
    rank, world = rank_and_size()
    traffic = collectives.Traffic()
    group = dist.new_group(list(range(world)))
    comm = collectives.AxisComm(group, world, "sync", 0, traffic)
    values = torch.stack([torch.linspace(0.1, 3.7, 64 * world) * (r + 1) * 1.01**r for r in range(world)]).bfloat16()
    want = values.float().mean(0)
    n = values.shape[1] // world
    scattered = comm.reduce_scatter_mean(values[rank].clone())
    torch.testing.assert_close(scattered, want[rank * n : (rank + 1) * n], rtol=1e-6, atol=0)
    reduced = comm.all_reduce_mean(values[rank].clone())
    torch.testing.assert_close(reduced, want.bfloat16().float(), rtol=0, atol=0.02)
    wrong = values[0].clone()
    for other in values[1:]:
        wrong += other
    assert not torch.equal((wrong / world).float(), want), "the values do not tell fp32 sums from bf16 ones"
    return {"counts": [(op, c.num, c.nbytes) for op, _, c in traffic], "bits": reduced.tolist()}


def test_reductions_sum_in_fp32_and_agree_on_every_rank(pool: Pool) -> None:
    replies = pool.run(reduction_case, 4)
    assert all(a == b for a, b in pairwise(replies))
    wire = 64 * 4 * 2  # bytes of bf16
    assert replies[0]["counts"] == [["sync", 2, wire * 3 // 4 + 2 * wire * 3 // 4]]
