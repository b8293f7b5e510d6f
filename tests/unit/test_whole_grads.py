"""Full gradients between micro-batches: sums in fp32, rounded once."""

from __future__ import annotations

import pytest
import torch

from layerzero.buffers import Staged
from layerzero.collectives import _CHUNK_NUMEL
from layerzero.layout import GroupLayout
from layerzero.sharding import Axes
from layerzero.whole_grads import WholeGrads

SHAPES = [(5, 3), (), (0, 4), (2, _CHUNK_NUMEL), (7,)]


def layout() -> GroupLayout:
    return GroupLayout(SHAPES, Axes((2,), 1, 0, 1))


def made(micro: int, dtype: torch.dtype) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(micro)
    grads = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    grads[0] = grads[0].t().contiguous().t()  # strided like a transposed weight's
    return [*grads[:-1], None] if micro == 1 else [*grads]


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num", [2, 3])
def test_sums(num: int, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    whole = WholeGrads(layout(), torch.device("cpu"))
    assert not whole
    for micro in range(num - 1):
        whole.add(made(micro, dtype), zeroed=[1] if micro == 1 else [])
        assert whole
    out = Staged(torch.full((layout().numel,), float("nan"), dtype=out_dtype), layout())
    whole.take(made(num - 1, dtype), [], out)
    assert not whole and not out.wire.isnan().any() and not out.wire[layout().used_numel :].any()
    for i, (shape, view) in enumerate(zip(SHAPES, out.views, strict=True)):
        terms = [made(micro, dtype)[i] for micro in range(1 if i == 1 and num == 3 else 0, num)]
        want = torch.zeros(shape)
        for term in terms:
            want = want if term is None else want + term.float()
        torch.testing.assert_close(view, want.to(out_dtype), rtol=0, atol=0)


def test_zeroed_before_the_last() -> None:
    whole = WholeGrads(layout(), torch.device("cpu"))
    whole.add(made(0, torch.float32), [])
    out = Staged(torch.empty(layout().numel), layout())
    last = made(2, torch.float32)
    whole.take([None, *last[1:]], range(len(SHAPES)), out)
    assert not out.views[0].any()
    for view, grad in list(zip(out.views, last, strict=True))[1:]:
        assert grad is not None and torch.equal(view, grad)


def test_the_next_step_starts_anew_in_the_same_memory() -> None:
    whole = WholeGrads(layout(), torch.device("cpu"))
    out = Staged(torch.empty(layout().numel), layout())
    places = []
    for _ in range(2):
        whole.add(made(0, torch.float32), [])
        assert whole._sums is not None
        places.append(whole._sums.wire)
        whole.take([None] * len(SHAPES), [], out)
        for view, grad in zip(out.views, made(0, torch.float32), strict=True):
            assert torch.equal(view, torch.zeros_like(view) if grad is None else grad)
    assert places[0] is places[1]
