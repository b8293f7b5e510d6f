"""Pipelines of sharded stages train like one process, whatever the schedule, and reduce once per step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist import pipeline_cases as cases
from tests.dist.pool import Pool

pytestmark = pytest.mark.dist

STRATEGIES: dict[str, dict[str, Any]] = {
    "layerzero": {"sharding": "layerzero", "zero3_size": 2},
    "zero1": {"sharding": "zero1"},
    "zero3": {"sharding": "zero3"},
}


class TestParity:
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_two_stages_of_two(self, pool: Pool, strategy: str) -> None:
        configurations = [
            {"schedule": "gpipe", "micro": 1, "static": True},
            {"schedule": "1f1b", "micro": 4, "lane": "late", "norm_type": 1.0},
            {"schedule": "1f1b", "micro": 4, "tied": True, "norm_type": float("inf")},
            {"schedule": "interleaved", "micro": 4, "tied": True, "lane": "random:1"},
            {"schedule": "1f1b", "micro": 3, "reentrant": False, "static": True, "lane": "late"},
        ]
        configurations = [{**c, **STRATEGIES[strategy]} for c in configurations]
        compared = pool.run(
            cases.train_cases, 4, pipeline=2, data=2, context=1, configurations=configurations, timeout=240
        )
        assert all(n > 20_000 for ranks in compared for n in ranks)

    @pytest.mark.slow
    def test_hierarchy(self, pool: Pool) -> None:
        """Two stages of four ranks: ZeRO-3 groups of two, optimizer states over four."""
        configuration = {"schedule": "1f1b", "micro": 4, "tied": True, **STRATEGIES["layerzero"]}
        compared = pool.run(
            cases.train_cases, 8, pipeline=2, data=4, context=1, configurations=[configuration], timeout=240
        )
        assert all(ranks[0] > 5_000 for ranks in compared)

    @pytest.mark.slow
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_with_tensor_parallelism(self, pool: Pool, strategy: str) -> None:
        """Two stages of two data-parallel by two tensor-parallel ranks."""
        configurations = [
            {"schedule": "1f1b", "micro": 4, "sequence": True, "tied": True},
            {"schedule": "gpipe", "micro": 1, "sequence": False},
        ]
        configurations = [{**c, **STRATEGIES[strategy]} for c in configurations]
        compared = pool.run(
            cases.train_cases, 8, pipeline=2, data=2, context=1, configurations=configurations, timeout=240
        )
        assert all(n > 5_000 for ranks in compared for n in ranks)

    @pytest.mark.slow
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_with_context_parallelism(self, pool: Pool, strategy: str) -> None:
        """Two stages of two data-parallel by two context-parallel ranks, which together shard the optimizer."""
        configurations = [{"schedule": "1f1b", "micro": 4, "tied": True}, {"schedule": "gpipe", "micro": 1}]
        configurations = [{**c, **STRATEGIES[strategy]} for c in configurations]
        compared = pool.run(
            cases.train_cases, 8, pipeline=2, data=2, context=2, configurations=configurations, timeout=240
        )
        assert all(n > 5_000 for ranks in compared for n in ranks)

    def test_four_stages(self, pool: Pool) -> None:
        configurations = [
            {"schedule": "1f1b", "micro": 6, "sharding": "ddp"},
            {"schedule": "gpipe", "micro": 2, "sharding": "zero3"},
            {"schedule": "1f1b", "micro": 4, "reentrant": False, "sharding": "zero3"},
        ]
        assert pool.run(cases.train_cases, 4, pipeline=4, data=1, context=1, configurations=configurations, timeout=240)

    def test_dropped_tie_is_noticed(self, pool: Pool) -> None:
        for message in pool.run(cases.dropped_tie_is_noticed, 2):
            assert message


class TestTraffic:
    @pytest.mark.slow
    @pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
    def test_outer_axis_once_per_step(self, pool: Pool, schedule: str) -> None:
        """Two stages of four ranks in ZeRO-3 groups of two; every number exact, no control message at all."""
        micro = 4
        for stages in pool.run(cases.traffic_case, 8, schedule=schedule, micro=micro):
            for seen in stages:
                units, rows = seen["units"], seen["rows"]
                assert seen["steps"] == 1
                assert rows["sync 1"] == rows["refresh 1"] == units
                assert rows["reduce 0"] == micro * units
                assert set(rows) == {"sync 1", "refresh 1", "reduce 0", "unshard 0"}

    def test_no_message_for_micro_batches_in_flight(self, pool: Pool) -> None:
        for under_no_sync, outside in pool.run(cases.in_flight_case, 4):
            assert under_no_sync == 0 and outside == 2


class TestSteps:
    def test_evaluation_accumulation(self, pool: Pool) -> None:
        pool.run(cases.several_steps_case, 4)

    def test_schedule_without_pipeline(self, pool: Pool) -> None:
        pool.run(cases.plain_schedule_case, 4)

    def test_half_precision(self, pool: Pool) -> None:
        for rank, (dtypes, losses) in enumerate(pool.run(cases.half_precision_case, 4)):
            assert dtypes == (["torch.int64"] if rank < 2 else ["torch.bfloat16", "torch.float32"])
            half, full = losses[: len(losses) // 2], losses[len(losses) // 2 :]
            assert half == pytest.approx(full, rel=2e-2) and half != full if rank >= 2 else losses == []

    def test_frozen_stage(self, pool: Pool) -> None:
        first, last = pool.run(cases.frozen_stage_case, 2)
        assert first == last

    def test_scaler(self, pool: Pool) -> None:
        pool.run(cases.scaler_case, 4)


class TestCheckpoints:
    def test_other_layouts_go_on(self, pool: Pool, tmp_path: Path) -> None:
        compared = pool.run(cases.checkpoint_case, 4, folder=str(tmp_path))
        assert all(n > 25 for n in compared)


class TestNames:
    def test_names_in_the_whole_model(self, pool: Pool) -> None:
        for rank, found in enumerate(pool.run(cases.names_case, 2)):
            layer = f"layers.{2 * rank + 1}.mlp.up.weight"
            assert found == ["1.mlp.up.weight", layer, "decoder.1.mlp.up.weight"]


class TestRefusals:
    def test_errors(self, pool: Pool) -> None:
        for torch_clip, model_clip, name, single, shapes, plain, split, uneven in pool.run(cases.refusals_case, 2):
            assert "Pipeline.clip_grad_norm_" in torch_clip and "Pipeline.clip_grad_norm_" in model_clip
            assert "no parameter 'layers.9.norm1.weight'" in name
            assert "no other stage has a copy" in single and "'embed.weight'" in single
            assert "copies of 'E' differ" in shapes and "[43, 32]" in shapes
            assert "not sharded" in plain
            assert "InterleavedZeroBubble" in split
            assert "argument 0 has 3 samples" in uneven and "2 micro-batches" in uneven
