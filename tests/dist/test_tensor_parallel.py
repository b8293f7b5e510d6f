"""Tensor-parallel models train like one process, keep their replicas equal and count every element once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist import tensor_cases as cases
from tests.dist.pool import Pool

pytestmark = pytest.mark.dist

STRATEGIES: dict[str, dict[str, Any]] = {
    "layerzero": {"sharding": "layerzero", "zero3_size": 2},
    "zero1": {"sharding": "zero1"},
    "zero3": {"sharding": "zero3"},
}
SCHEDULES = [(False, 1, "threads"), (True, 4, "late"), (True, 1, "random:3"), (False, 4, "threads")]


class TestParity:
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_two_by_two(self, pool: Pool, strategy: str) -> None:
        configurations = [{"sequence": s, "micro": m, "lane": lane, **STRATEGIES[strategy]} for s, m, lane in SCHEDULES]
        compared = pool.run(cases.train_cases, 4, data=2, context=1, configurations=configurations, timeout=240)
        assert all(n > 20_000 for ranks in compared for n in ranks)

    def test_checkpointed_activations(self, pool: Pool) -> None:
        configurations = [
            {"sequence": r, "micro": 2, "lane": "late", "reentrant": r, **STRATEGIES["layerzero"]}
            for r in (False, True)
        ]
        assert pool.run(cases.train_cases, 4, data=2, context=1, configurations=configurations, timeout=240)

    def test_data_parallel_alone(self, pool: Pool) -> None:
        """The same model and comparison on four data-parallel ranks."""
        configurations = [{"sequence": False, "micro": m, **s} for s in STRATEGIES.values() for m in (1, 4)]
        assert pool.run(cases.train_cases, 4, data=4, context=1, configurations=configurations, timeout=240)

    @pytest.mark.slow
    def test_hierarchy(self, pool: Pool) -> None:
        """Two tensor-parallel ranks, ZeRO-3 groups of two, optimizer states over four."""
        configuration = {"sequence": True, "micro": 4, **STRATEGIES["layerzero"]}
        compared = pool.run(cases.train_cases, 8, data=4, context=1, configurations=[configuration], timeout=240)
        assert all(ranks[0] > 10_000 for ranks in compared)

    @pytest.mark.slow
    def test_hierarchy_with_context_parallelism(self, pool: Pool) -> None:
        """ZeRO-3 groups are the two context-parallel ranks, optimizer states over the four of dp x cp; tp 2 beside."""
        configuration = {"sequence": True, "micro": 2, **STRATEGIES["layerzero"]}
        compared = pool.run(cases.train_cases, 8, data=2, context=2, configurations=[configuration], timeout=240)
        assert all(ranks[0] > 10_000 for ranks in compared)

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_with_context_parallelism(self, pool: Pool, strategy: str) -> None:
        """Two context-parallel by two tensor-parallel ranks: both cut the sequence."""
        configurations = [{"sequence": m > 1, "micro": m, **STRATEGIES[strategy]} for m in (1, 4)]
        compared = pool.run(cases.train_cases, 4, data=1, context=2, configurations=configurations, timeout=240)
        assert all(n > 20_000 for ranks in compared for n in ranks)

    @pytest.mark.parametrize("norm_type", [1.0, float("inf")])
    def test_one_data_parallel_rank(self, pool: Pool, norm_type: float) -> None:
        configurations = [
            {"sequence": s, "sharding": "zero3", "micro": 2, "norm_type": norm_type} for s in (False, True)
        ]
        assert pool.run(cases.train_cases, 2, data=1, context=1, configurations=configurations, timeout=240)

    def test_dropped_sum_is_noticed(self, pool: Pool) -> None:
        for message in pool.run(cases.dropped_sum_is_noticed, 4):
            assert message


class TestState:
    def test_param_info(self, pool: Pool) -> None:
        by_rank = pool.run(cases.info_case, 4)
        first, second = ({name: (dim, shape) for name, dim, shape in rows} for rows in by_rank[:2])
        assert first["embed.weight"] == (0, [22, 32]) and second["embed.weight"] == (0, [21, 32])  # 43 over two
        assert first["layers.1.mlp.up.weight"] == (0, [32, 32]) and first["layers.1.mlp.down.weight"] == (1, [32, 32])
        assert first["layers.0.norm1.weight"] == first["layers.0.mlp.down.bias"] == (None, [32])
        assert by_rank[0] == by_rank[2] and by_rank[1] == by_rank[3]

    def test_full_state_and_unsharded(self, pool: Pool) -> None:
        pool.run(cases.state_case, 4)

    def test_ignored_modules(self, pool: Pool) -> None:
        pool.run(cases.ignored_case, 2)

    def test_starting_values(self, pool: Pool) -> None:
        pool.run(cases.starting_values_case, 4)

    def test_half_precision(self, pool: Pool) -> None:
        pool.run(cases.half_precision_case, 4)


class TestNorms:
    def test_scaler_and_norms(self, pool: Pool) -> None:
        want = cases.plain_norms()
        for norms in pool.run(cases.scaler_case, 4):
            assert norms == pytest.approx(want, rel=1e-5)


class TestTraffic:
    def test_one_sum_per_step(self, pool: Pool) -> None:
        """Replicated gradients are summed at the optimizer degree, once per step, in fp32."""
        for seen in pool.run(cases.traffic_case, 4):
            assert seen["groups"] == 3
            assert seen["sums"] == [3, seen["elements"] * 4]


class TestRefusals:
    def test_wrong_meshes(self, pool: Pool) -> None:
        for world, several in pool.run(cases.refusals_case, 4):
            assert "in one data-parallel group" in world and "mesh['dp']" in world
            assert "over different ranks" in several and "'norm.weight'" in several

    def test_plain_parameters_with_partial_gradients(self, pool: Pool) -> None:
        for message in pool.run(cases.plain_partial_case, 4):
            assert "norm1.weight" in message and "SequenceParallel" in message
