"""Lanes: order, events, failures, and that the adversarial ones are late, legal and poisonous."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerzero.buffers import PackBuffers, Staged, TransientBuffer, held_view, poison
from layerzero.lanes import DONE, Lanes, LateLane, ThreadLane, adversarial
from layerzero.layout import GroupLayout, Range
from layerzero.profiling import LaneClock
from layerzero.sharding import Axes

CPU = torch.device("cpu")
KINDS: dict[str, Callable[[], Any]] = {
    "threads": lambda: ThreadLane("test"),
    "late": LateLane,
    "random": lambda: LateLane(random.Random(3)),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


class TestEveryLane:
    @every_kind
    def test_runs_in_order(self, make: Callable[[], Any]) -> None:
        lane, done = make(), []
        events = [lane.run(lambda i=i: done.append(i)) for i in range(20)]
        events[-1].wait()
        assert done == list(range(20))
        for event in events:
            event.wait()  # again: nothing runs twice
        assert done == list(range(20))

    @every_kind
    def test_waits_for_events_of_another_lane(self, make: Callable[[], Any]) -> None:
        first, second, done = make(), make(), []
        gate = threading.Event()
        opened = LateLane().run(gate.set) if make is not KINDS["threads"] else None
        event = first.run(lambda: done.append(f"first {gate.wait(10)}"), after=[opened])
        last = second.run(lambda: done.append("second"), after=[event, None, DONE])
        gate.set()
        last.wait()
        assert done == ["first True", "second"]

    @every_kind
    def test_no_grad_inside(self, make: Callable[[], Any]) -> None:
        lane, modes = make(), []
        lane.run(lambda: modes.append(torch.is_grad_enabled())).wait()
        assert modes == [False] and torch.is_grad_enabled()

    @every_kind
    def test_waiting_raises_what_the_closure_raised(self, make: Callable[[], Any]) -> None:
        lane = make()

        def fail() -> None:
            raise ValueError("closure 7")

        with pytest.raises(ValueError, match="closure 7"):
            lane.run(fail).wait()

    @every_kind
    def test_after_a_failure_nothing_runs_and_everything_raises(self, make: Callable[[], Any]) -> None:
        lane, done = make(), []

        def fail() -> None:
            raise ValueError("first failure")

        before = lane.run(lambda: done.append("before"))
        events = [lane.run(fail), lane.run(lambda: done.append("after"))]
        other = make().run(lambda: done.append("other lane"), after=[events[1]])
        before.wait()
        for event in [*events, other, *events]:  # also a second time
            with pytest.raises(ValueError, match="first failure"):
                event.wait()
        assert done == ["before"]


class TestThreads:
    def test_runs_beside_the_caller(self) -> None:
        lane, names = ThreadLane("unshard"), []
        lane.run(lambda: names.append(threading.current_thread())).wait()
        assert names[0] is not threading.current_thread()
        assert names[0].name == "layerzero-unshard" and names[0].daemon

    def test_no_thread_before_the_first_closure_and_none_after_the_lane(self) -> None:
        lane, threads = ThreadLane("brief"), []
        assert "layerzero-brief" not in [t.name for t in threading.enumerate()]
        lane.run(lambda: threads.append(threading.current_thread())).wait()
        del lane
        threads[0].join(30)
        assert not threads[0].is_alive()

    def test_idle_thread_keeps_nothing_alive(self) -> None:
        class Payload:
            pass

        lane, payload = ThreadLane("test"), Payload()
        seen = weakref.ref(payload)
        lane.run(lambda payload=payload: None).wait()
        gc.disable()
        try:
            del payload
            for _ in range(1000):  # the thread lets go right after it let the caller go on
                if seen() is None:
                    break
                time.sleep(0.005)
            assert seen() is None
        finally:
            gc.enable()


class TestClock:
    def test_counts_work_and_what_the_caller_waited_for(self) -> None:
        clock = LaneClock()
        lane = ThreadLane("test", clock)
        lane.run(lambda: time.sleep(0.05)).wait()
        lane.run(lambda: None).wait()  # the first closure's end has been noted before the second starts
        assert clock.working >= 0.05 and clock.exposed > 0
        clock.reset()
        assert clock.working == clock.exposed == 0

    def test_waiting_for_what_is_done_is_not_exposed(self) -> None:
        clock = LaneClock()
        done = threading.Event()
        event = ThreadLane("test", clock).run(done.set)
        assert done.wait(10)
        while event._lock.locked():  # type: ignore[attr-defined]
            time.sleep(0.001)
        event.wait()
        assert clock.exposed == 0

    def test_lanes_that_wait_for_each_other_are_neither_working_nor_exposed(self) -> None:
        clock, gate, done = LaneClock(), threading.Event(), threading.Event()
        first = ThreadLane("first").run(lambda: gate.wait(10) and None)
        second = ThreadLane("second", clock).run(done.set, after=[first])
        time.sleep(0.02)
        assert clock.working == 0
        gate.set()
        assert done.wait(10)
        second.wait()
        assert clock.working < 10

    def test_overlapping_work_counts_once(self) -> None:
        clock, both = LaneClock(), threading.Barrier(2)
        started = time.perf_counter()
        events = [ThreadLane(n, clock).run(lambda: both.wait(10) and None) for n in ("first", "second")]
        for event in events:
            event.wait()
        for lane in (ThreadLane("third", clock),):
            lane.run(lambda: None).wait()
        assert 0 < clock.working <= time.perf_counter() - started


class TestAdversarial:
    def test_late_runs_nothing_before_it_is_waited_for(self) -> None:
        lane, done = LateLane(), []
        events = [lane.run(lambda i=i: done.append(i)) for i in range(5)]
        assert done == []
        events[2].wait()
        assert done == [0, 1, 2]
        events[4].wait()
        assert done == [0, 1, 2, 3, 4]

    def test_late_is_late_across_lanes(self) -> None:
        first, second, done = LateLane(), LateLane(), []
        for i in range(3):
            event = first.run(lambda i=i: done.append(("first", i)))
        second.run(lambda: done.append(("second", 0)))
        last = second.run(lambda: done.append(("second", 1)), after=[event])
        first.run(lambda: done.append(("first", 3)))
        last.wait()
        assert done == [("second", 0), ("first", 0), ("first", 1), ("first", 2), ("second", 1)]

    def schedule(self, seed: int, plan: list[tuple[int, list[int]]], waits: list[int]) -> list[int]:
        """Order in which closures of three lanes run; closure i is on lane plan[i][0] after those in plan[i][1]."""
        rng, order = random.Random(seed), []
        lanes, events = [LateLane(rng) for _ in range(3)], []
        for i, (lane, after) in enumerate(plan):
            events.append(lanes[lane].run(lambda i=i: order.append(i), after=[events[j] for j in after]))
        for i in waits:
            events[i].wait()
        for event in events:
            event.wait()
        return order

    @given(st.data(), st.integers(0, 2**16))
    def test_random_is_legal(self, data: st.DataObject, seed: int) -> None:
        count = data.draw(st.integers(1, 12))
        plan = [
            (data.draw(st.integers(0, 2)), data.draw(st.lists(st.integers(0, i - 1), max_size=2)) if i else [])
            for i in range(count)
        ]
        order = self.schedule(seed, plan, data.draw(st.lists(st.integers(0, count - 1), max_size=3)))
        assert sorted(order) == list(range(count)), "each closure once"
        place = {i: order.index(i) for i in order}
        for i, (lane, after) in enumerate(plan):
            assert all(place[j] < place[i] for j in after)
            assert all(place[j] < place[i] for j in range(i) if plan[j][0] == lane)

    def test_random_follows_its_seed_and_seeds_differ(self) -> None:
        plan = [(i % 3, []) for i in range(12)]
        orders = {seed: tuple(self.schedule(seed, plan, [])) for seed in range(20)}
        assert all(tuple(self.schedule(seed, plan, [])) == order for seed, order in orders.items())
        assert len(set(orders.values())) > 5


class TestMake:
    def test_threads_by_default(self) -> None:
        lanes = Lanes.make(CPU)
        assert isinstance(lanes.unshard, ThreadLane) and not lanes.poison
        assert len({id(lane) for lane in (lanes.unshard, lanes.refresh, lanes.reduce, lanes.sync)}) == 4
        assert lanes.compute() is DONE

    @pytest.mark.parametrize("kind", ["late", "random"])
    def test_adversarial_inside_the_context_only(self, kind: Any) -> None:
        with adversarial(kind, seed=5):
            lanes = Lanes.make(CPU)
        assert isinstance(lanes.unshard, LateLane) and lanes.poison
        assert not Lanes.make(CPU).poison
        with pytest.raises(RuntimeError), adversarial(kind):
            raise RuntimeError
        assert not Lanes.make(CPU).poison


class TestBuffers:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64])
    def test_poison_is_nan(self, dtype: torch.dtype) -> None:
        flat = torch.ones(8, dtype=dtype)
        poison(flat)
        assert flat.isnan().all()

    def test_poison_of_integers_is_no_likely_value(self) -> None:
        flat = torch.zeros(8, dtype=torch.int64)
        poison(flat)
        assert (flat == 111).all()

    def test_poisoned_buffer_is_nan_from_invalidate_on_and_keeps_its_bytes(self) -> None:
        buffer = TransientBuffer(16, torch.float32, CPU, poison=True)
        view = buffer.flat[4:8]
        buffer.alloc()
        buffer.flat.fill_(1)
        buffer.invalidate()
        assert view.isnan().all()
        buffer.free()
        assert buffer.flat.untyped_storage().nbytes() == 64

    def test_bytes_come_and_go_while_views_stay(self) -> None:
        buffer = TransientBuffer(16, torch.float32, CPU, poison=False)
        view = buffer.flat[4:8]
        buffer.free()
        assert buffer.flat.untyped_storage().nbytes() == 0
        buffer.alloc()
        buffer.flat.copy_(torch.arange(16.0))
        assert view.tolist() == [4, 5, 6, 7]
        buffer.invalidate()  # nothing without poison
        assert view.tolist() == [4, 5, 6, 7]

    def test_pack_buffers_wait_for_the_reader_of_the_slot_they_reuse(self) -> None:
        with adversarial("late"):
            lanes = Lanes.make(CPU)
        buffers, read = PackBuffers(lanes, count=2), []
        for i in range(4):
            slot, flat = buffers.take(4, torch.float32)
            assert slot == i % 2 and len(read) == max(0, i - 1)
            flat.fill_(i)
            buffers.reading(slot, lanes.reduce.run(lambda flat=flat: read.append(flat.tolist())))
        assert read == [[0.0] * 4, [1.0] * 4]

    def test_pack_buffers_grow_and_change_dtype(self) -> None:
        buffers = PackBuffers(Lanes.make(CPU), count=1)
        _, small = buffers.take(4, torch.bfloat16)
        _, large = buffers.take(8, torch.float32)
        _, again = buffers.take(2, torch.bfloat16)
        assert small.dtype is again.dtype is torch.bfloat16 and large.dtype is torch.float32
        assert (small.numel(), large.numel(), again.numel()) == (4, 8, 2)
        assert again.data_ptr() == large.data_ptr() != small.data_ptr()

    def test_pack_writes_every_element(self) -> None:
        layout = GroupLayout(((2, 3), (4,), (0, 3), ()), Axes((2,), 1, 1, 1))
        flat = torch.full((layout.numel,), float("nan"))
        grads = [torch.arange(6.0).view(2, 3), None, torch.empty(0, 3), torch.tensor(9.0)]
        Staged(flat, layout).pack(grads)
        assert layout.padding_numel > 0
        assert flat.tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 0, 0, 9] + [0] * layout.padding_numel

    def test_held_view_has_the_dims_of_its_parameter(self) -> None:
        flat = torch.arange(8.0)
        assert held_view(flat, 2, Range(5, 8), 3).shape == (3, 1, 1)
        assert held_view(flat, 2, Range(5, 8), 1).tolist() == [2, 3, 4]
        assert held_view(flat, 8, Range(5, 5), 2).shape == (0, 1)
        assert held_view(flat, 7, Range(0, 1), 0).shape == ()
        assert held_view(flat, 0, Range(0, 0), 0).shape == (0,)
