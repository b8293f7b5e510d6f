"""Every strategy trains like one process on the concatenated batch."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import pytest

from layerzero.sharding import Sharding
from tests.dist.parity import STRATEGIES, exact_cases, odd_model_cases, one_rank_case
from tests.dist.pool import Pool

pytestmark = pytest.mark.dist

# The full grid is
#
#     strategy     the seven of STRATEGIES and the three-axis chains
#     ranks        2, 3, 4, 8
#     micro        1, 3 micro-batches
#     dtype        fp32, bf16
#     lane         threads, late, random (any seed)
#     schedule     the variants of SCHEDULES
#
# Two ranks take the whole product over the first five with one schedule each. More ranks take, for every
# strategy and chain, each value of each factor at least once, in combinations that change from one strategy
# to the next. Besides, `test_exact` runs *every* legal triple of degrees over 2, 4 and 8 ranks.

SCHEDULES: list[dict[str, Any]] = [
    {},
    {"prefetch_depth": 0},
    {"backward_prefetch": "BACKWARD_POST"},
    {"prefetch_depth": 2},
    {"backward_reduce_scatter": "BACKWARD_POST"},
    {"limit_all_gathers": False, "prefetch_depth": 3},
    {"forward_prefetch": False},
    {"desync_check": True},
    {"keep_num_params": 10**9},
    {"keep_num_params": 1300, "prefetch_depth": 2},  # the root and a block of OddModel
]

# (micro, dtype, lane); in each of the first two lists every value of every factor occurs.
COVERING = [(3, "fp32", "late"), (1, "bf16", "threads"), (3, "bf16", "random:{seed}")]
MIRRORED = [(3, "bf16", "late"), (1, "fp32", "random:{seed}"), (3, "fp32", "threads")]
EXACT_RECIPES = [(3, "fp32", "late"), (3, "bf16", "threads"), (1, "fp32", "random:{seed}"), (1, "fp16", "late")]


def odd(strategy: str, micro: int, dtype: str, lane: str, **extra: Any) -> dict[str, Any]:
    return {"strategy": strategy, "micro": micro, "dtype": dtype, "lane": lane, "extra": extra}


def exact(micro: int, dtype: str, lane: str, sharding: Any, **options: Any) -> dict[str, Any]:
    return {"micro": micro, "dtype": dtype, "lane": lane, "sharding": sharding, "options": options}


class TestTwoRanks:
    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_whole_grid(self, pool: Pool, strategy: str, dtype: str) -> None:
        schedules = cycle(SCHEDULES)
        for _ in range(list(STRATEGIES).index(strategy)):
            next(schedules)
        configurations = [
            odd(strategy, micro, dtype, lane, zero3_size=2, **next(schedules))
            for micro, lane in product([1, 3], ["threads", "late", f"random:{len(strategy)}"])
        ]
        assert pool.run(odd_model_cases, 2, configurations=configurations) == [len(configurations)] * 2


class TestMoreRanks:
    def run(self, pool: Pool, ranks: int, number: int, strategy: str, **extra: Any) -> None:
        covering = [COVERING, MIRRORED][number % 2]
        configurations = [
            odd(strategy, micro, dtype, lane.format(seed=number), **SCHEDULES[(number + i) % len(SCHEDULES)], **extra)
            for i, (micro, dtype, lane) in enumerate(covering)
        ]
        assert pool.run(odd_model_cases, ranks, configurations=configurations) == [len(configurations)] * ranks

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_three_ranks(self, pool: Pool, strategy: str) -> None:
        number = list(STRATEGIES).index(strategy)
        self.run(pool, 3, number, strategy, zero3_size=1 if strategy == "layerzero" else 3)

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_four_ranks(self, pool: Pool, strategy: str) -> None:
        self.run(pool, 4, list(STRATEGIES).index(strategy), strategy, zero3_size=2)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("strategy", "extra"),
        [
            pytest.param("zero3", {"node_size": 4}, id="zero3-node4"),
            pytest.param("hsdp", {"zero3_size": 2, "node_size": 4}, id="hsdp2-node4"),
            pytest.param("layerzero", {"zero3_size": 2}, id="layerzero2"),
            pytest.param("layerzero", {"zero3_size": 2, "node_size": 4}, id="layerzero2-node4"),
            pytest.param("layerzero-full", {"zero3_size": 2, "node_size": 4}, id="layerzero2-full-node4"),
            pytest.param("degrees", {"sharding": {"params": 2, "grads": 4, "optimizer": "all"}}, id="2-4-all"),
            pytest.param("degrees", {"sharding": {"params": 4, "grads": 2, "optimizer": 4}}, id="4-2-4"),
        ],
    )
    def test_eight_ranks(
        self, pool: Pool, request: pytest.FixtureRequest, strategy: str, extra: dict[str, Any]
    ) -> None:
        self.run(pool, 8, len(request.node.callspec.id), strategy, **extra)


def legal_triples(ranks: int) -> list[tuple[int, int, int]]:
    """All degrees that are powers of two, gradients and parameters spread no wider than optimizer states."""
    degrees = [d for d in (1, 2, 4, 8) if d <= ranks]
    return [(p, g, o) for o, p, g in product(degrees, degrees, degrees) if p <= o and g <= o]


class TestExact:
    """fp32 with exactly representable sums: rtol = 0 and atol = 0 in every order of summation."""

    def configurations(self, ranks: int, optimizer: int, per_triple: int) -> list[dict[str, Any]]:
        made = []
        for params, grads, wanted in legal_triples(ranks):
            for i in range(per_triple if wanted == optimizer else 0):
                number = len(made) + optimizer + i
                micro, dtype, lane = EXACT_RECIPES[(number if per_triple == 1 else i) % len(EXACT_RECIPES)]
                options = dict(SCHEDULES[number % len(SCHEDULES)])
                if dtype == "bf16" and number % 2:
                    options["reduce_dtype"] = "fp32"
                options["node_size"] = [None, 2, ranks][number % 3]
                sharding = {"params": params, "grads": grads, "optimizer": wanted}
                made.append(exact(micro, dtype, lane.format(seed=number), sharding, **options))
        return made

    def test_covers_every_triple(self) -> None:
        assert [len(legal_triples(n)) for n in (2, 4, 8)] == [5, 14, 30]
        for ranks in (2, 4, 8):
            assert all(Sharding(*t).resolve(ranks) for t in legal_triples(ranks))

    @pytest.mark.parametrize(
        ("ranks", "optimizer"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4), (8, 8)],
        ids=lambda n: str(n),
    )  # fmt: skip
    def test_exact(self, pool: Pool, ranks: int, optimizer: int) -> None:
        configurations = self.configurations(ranks, optimizer, per_triple={2: 4, 4: 3, 8: 1}[ranks])
        assert pool.run(exact_cases, ranks, configurations=configurations) == [len(configurations)] * ranks

    @pytest.mark.parametrize("size", [1, 4], ids=["group-of-one", "group-of-all"])
    def test_degenerate_groups(self, pool: Pool, size: int) -> None:
        names = product(["layerzero", "hsdp", "mics"], ["threads", "late"])
        configurations = [
            exact(3, "fp32", lane, name, zero3_size=size, node_size=node)
            for (name, lane), node in zip(names, cycle([None, 2, 4]), strict=False)
        ]
        assert pool.run(exact_cases, 4, configurations=configurations) == [len(configurations)] * 4

    def test_every_backward_synchronised(self, pool: Pool) -> None:
        """Without `no_sync` gradients of micro-batches add up at the optimizer degree."""
        recipes = product(["ddp", "zero2", "hsdp", "layerzero"], [("fp32", "late"), ("bf16", "threads")])
        configurations = [
            {**exact(3, dtype, lane, name, zero3_size=2), "no_sync": False} for name, (dtype, lane) in recipes
        ]
        assert pool.run(exact_cases, 4, configurations=configurations) == [len(configurations)] * 4

    @pytest.mark.parametrize("ranks", [4, 8])
    def test_model_smaller_than_the_world(self, pool: Pool, ranks: int) -> None:
        names = ["ddp", "zero1", "zero2", "zero3", "hsdp", "layerzero"]
        configurations = [
            {**exact(micro, dtype, lane, name, zero3_size=2), "tiny": True}
            for name, (micro, dtype, lane) in zip(names, cycle(EXACT_RECIPES[:2]), strict=False)
        ]
        assert pool.run(exact_cases, ranks, configurations=configurations) == [len(configurations)] * ranks


class TestOneRank:
    """No collective, and the bits of plain PyTorch."""

    ADAMW = ("AdamW", {"lr": 1e-2, "weight_decay": 0.1})

    @pytest.mark.parametrize("init", [False, True], ids=["without-distributed", "world-of-one"])
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_strategies(self, pool: Pool, strategy: str, init: bool) -> None:
        for micro, lane in ((1, "threads"), (3, "late")):
            kwargs = {"strategy": strategy, "micro": micro, "lane": lane, "optimizer": self.ADAMW}
            assert pool.run(one_rank_case, 1, init=init, **kwargs)[0] > 50

    @pytest.mark.parametrize(
        "optimizer",
        [
            ("AdamW", {"lr": 1e-2, "fused": True}),
            ("AdamW", {"lr": 1e-2, "foreach": True}),
            ("AdamW", {"lr": 1e-2, "amsgrad": True}),
            ("SGD", {"lr": 1e-1, "momentum": 0.9, "nesterov": True}),
            ("RMSprop", {"lr": 1e-3}),
        ],
        ids=["adamw-fused", "adamw-foreach", "adamw-amsgrad", "sgd-nesterov", "rmsprop"],
    )
    def test_optimizers(self, pool: Pool, optimizer: Any) -> None:
        kwargs = {"strategy": "layerzero", "micro": 3, "lane": "random:1", "optimizer": optimizer}
        assert pool.run(one_rank_case, 1, **kwargs)[0] > 50

    @pytest.mark.parametrize("lane", ["threads", "late"])
    def test_bf16_compute_with_fp32_main_parameters(self, pool: Pool, lane: str) -> None:
        kwargs = {"strategy": "layerzero", "micro": 3, "lane": lane, "optimizer": self.ADAMW, "dtype": "bf16"}
        assert pool.run(one_rank_case, 1, **kwargs)[0] > 50
