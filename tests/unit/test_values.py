"""Plain data to JSON and back, what is refused, and what a stranger's JSON can't do."""

from __future__ import annotations

import enum
import json
import math
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import layerzero as lz
from layerzero.checkpoint.storage import DTYPES
from layerzero.checkpoint.values import decode, encode

scalars = (
    st.none() | st.booleans() | st.integers(-(2**130), 2**130) | st.floats() | st.binary(max_size=5)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
)  # fmt: skip
keys = (
    st.text(st.sampled_from("ab_"), max_size=3)
    | st.integers()
    | st.sampled_from(["__tuple__", "__tensor__"])
    | st.none()
)
data = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


def through_json(value: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    aside: dict[str, torch.Tensor] = {}

    def set_aside(tensor: torch.Tensor) -> str:
        name = f"t{len(aside)}"
        aside[name] = tensor
        return name

    text = json.dumps(encode(value, set_aside, "value"), allow_nan=False)
    return decode(json.loads(text), aside.__getitem__), aside


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    return a == b


class TestRoundTrip:
    @given(data)
    def test_data(self, value: Any) -> None:
        back, aside = through_json(value)
        assert same(back, value) and not aside

    @pytest.mark.parametrize("name", DTYPES)
    def test_tensors_of_every_dtype(self, name: str) -> None:
        dtype = DTYPES[name]
        for number in (0, 1, 3):
            scalar = torch.tensor(number).to(dtype)
            back, aside = through_json({"a": scalar})
            assert back["a"].dtype is dtype and back["a"].shape == () and back["a"].item() == scalar.item()
            assert bool(aside) is dtype.is_complex  # real numbers stand in the manifest
        vector = torch.tensor([0, 1, 3]).to(dtype)
        back, aside = through_json((vector, [vector]))
        assert back[0] is aside["t0"] and back[1][0] is aside["t1"] and aside["t0"].dtype is dtype

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3.4e38, 1e-45])
    def test_numbers_of_tensors_are_exact(self, value: float) -> None:
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            tensor = torch.tensor(value, dtype=dtype)
            back = through_json(tensor)[0]
            assert back.dtype is dtype and torch.equal(back.nan_to_num(), tensor.nan_to_num())
            assert bool(back.isnan()) is math.isnan(value)

    def test_largest_integers(self) -> None:
        for value, dtype in ((2**64 - 1, torch.uint64), (-(2**63), torch.int64), (2**53 + 1, torch.int64)):
            assert through_json(torch.tensor(value, dtype=dtype))[0].item() == value

    def test_subclasses_become_what_they_are(self) -> None:
        class Colour(enum.IntEnum):
            RED = 3

        back, _ = through_json([Colour.RED, numpy.float64(0.5), bytearray(b"ab")])
        assert back == [3, 0.5, b"ab"] and [type(b) for b in back] == [int, float, bytes]

    def test_views_are_resolved(self) -> None:
        tensor = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64)
        for view in (tensor.conj(), tensor.conj().imag):
            _, aside = through_json(view)
            assert not aside["t0"].is_conj() and not aside["t0"].is_neg() and torch.equal(aside["t0"], view)

    def test_tensors_lose_their_graph(self) -> None:
        _, aside = through_json(torch.ones(2, requires_grad=True))
        assert not aside["t0"].requires_grad


class TestRefused:
    @pytest.mark.parametrize(
        ("value", "place"),
        [
            ({"a": [1, {2: object()}]}, r"extra\['a'\]\[1\]\[2\]: a object can't be saved"),
            ((1, {3}), r"extra\[1\]: a set"),
            ({frozenset(): 1}, "a key of extra: a frozenset"),
            (print, "builtin_function"),
            ({"a": torch.ones(2, device="meta")}, r"extra\['a'\].*meta"),
            (torch.ones(2).to_sparse(), "sparse"),
            (torch.tensor(1j, dtype=torch.complex128), "complex128"),
            (1 << 5000, "5001 bits"),
            (["\ud800"], r"extra\[0\].*not valid Unicode"),
            ({"\udcff": 1}, r"extra.*not valid Unicode"),
        ],
    )
    def test_names_the_place(self, value: Any, place: str) -> None:
        with pytest.raises(lz.CheckpointError, match=place):
            encode(value, lambda t: "t", "extra")

    def test_containing_itself(self) -> None:
        loop: list[Any] = []
        loop.append({"again": loop})
        with pytest.raises(lz.CheckpointError, match=r"extra\[0\].*nested"):
            encode(loop, lambda t: "t", "extra")

    def test_the_deepest_that_is_written_can_be_read(self) -> None:
        from pydantic import TypeAdapter

        value: Any = 0
        for _ in range(25):
            value = {1: (value,)}
        encoded = encode(value, lambda t: "t", "extra")
        text = json.dumps({"content": {"rank_extra": [encoded]}})
        again = TypeAdapter(Any).validate_json(text)["content"]["rank_extra"][0]
        assert decode(again, lambda name: torch.empty(0)) == value
        with pytest.raises(lz.CheckpointError, match="nested"):
            encode([value], lambda t: "t", "extra")


class TestStrangers:
    @pytest.mark.parametrize(
        "value",
        [
            {"__number__": ["F32", [1.0, 2.0]]}, {"__number__": ["F32", "1"]}, {"__number__": ["F32", 1]},
            {"__number__": ["I64", 1.5]}, {"__number__": ["I64", True]}, {"__number__": ["U8", 300]},
            {"__number__": ["I64", 2**70]}, {"__number__": ["C64", 1.0]}, {"__number__": ["F99", 1.0]},
            {"__number__": ["F32"]}, {"__number__": 3}, {"__number__": [["F32"], 1.0]}, {"__number__": {}},
            {"__tensor__": ["a"]}, {"__tensor__": None}, {"__tensor__": "absent"}, {"__bytes__": "0g"},
            {"__bytes__": 5}, {"__bytes__": "é"}, {"__float__": "1e9"}, {"__float__": 1.0}, {"__tuple__": "ab"},
            {"__tuple__": {}}, {"__dict__": [1]}, {"__dict__": [[1]]}, {"__dict__": [[[], 1]]}, {"__dict__": {}},
            {"__dict__": [[1, 2, 3]]}, {"__dict__": [[{"__dict__": []}, 1]]},
        ],
    )  # fmt: skip
    def test_malformed(self, value: Any) -> None:
        with pytest.raises(lz.CheckpointError, match="malformed value under __"):
            decode([value], {}.__getitem__)

    def test_what_reading_a_tensor_raises_comes_through(self) -> None:
        def damaged(name: str) -> torch.Tensor:
            raise lz.CheckpointError(f"{name} is damaged")

        with pytest.raises(lz.CheckpointError, match="x is damaged"):
            decode({"a": {"__tuple__": [{"__tensor__": "x"}]}}, damaged)
