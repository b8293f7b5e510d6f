"""`parallelize_wan` beyond what the video recipe's tests of layouts show."""

from __future__ import annotations

import pytest

from tests.dist import wan_cases as cases
from tests.dist.pool import Pool

pytestmark = pytest.mark.dist


def test_recomputed_blocks(pool: Pool) -> None:
    for compared, num_forwards in pool.run(cases.recomputing_case, 4):
        assert compared > 5_000 and num_forwards == 2 * cases.MICRO


def test_refusals(pool: Pool) -> None:
    for heads, blocks, size, flat, twice, stage, sharded in pool.run(cases.refusals_case, 4):
        assert "num_attention_heads = 2" in heads and "tp = 4" in heads
        assert "3 blocks can't be split into 4 stages" in blocks
        assert "latent_size" in size and "got (4, 4)" in flat
        assert "split before" in twice and "got WanStage" in stage and "sharded already" in sharded


def test_frozen_parameters_stay_frozen(pool: Pool) -> None:
    for trainable in pool.run(cases.frozen_case, 2):
        assert len(trainable) == 12 and all(".ffn." in name for name in trainable)


def test_unlike_inputs_of_a_pipeline(pool: Pool) -> None:
    messages = pool.run(cases.unlike_inputs_case, 4)
    assert [bool(message) for message in messages] == [True, True, False, False]
    assert all("different latents" in message for message in messages[:2])
