"""What each kind of configuration value may be: annotated types for the fields of LayerZeROConfig.

A check turns every accepted spelling into the one form that is held, or raises a ValueError that says what
was expected, what was found and what to do; pydantic adds the key.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, PlainValidator

from layerzero._config_file import show
from layerzero.errors import LayerZeroError
from layerzero.sharding import STRATEGIES, Sharding

TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_SHORT_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_DTYPE_SPELLINGS = {
    **{name: name for name in TORCH_DTYPES},
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float": "fp32",
}
DEGREES = ("params", "grads", "optimizer")


def nearest(word: object, choices: Iterable[str], otherwise: str = "") -> str:
    """The closing advice of an error: the choice that `word` is probably a misspelling of."""
    folded = str(word).lower().replace("-", "_")
    by_folded = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(folded, by_folded, n=1, cutoff=0.5)
    return f"Did you mean {by_folded[found[0]]!r}?" if found else otherwise


def _wrong(expected: str, value: object, advice: str) -> ValueError:
    if isinstance(value, str) and value.lower() in ("none", "nil", "~") and "null" in expected:
        advice = "In YAML and JSON, none is written null."
    return ValueError(f"expected {expected}, got {show(value)}. {advice}")


def _check_flag(value: object) -> object:
    if not isinstance(value, bool):
        raise _wrong("true or false", value, "Write it without quotes.")
    return value


def _check_integer(minimum: int, optional: bool = False, or_all: bool = False) -> Callable[[object], object]:
    expected = f"an integer >= {minimum}" + (", or null" if optional else "") + (", or all" if or_all else "")
    advice = "Write a plain number, without quotes or a fraction."
    if or_all:
        advice = "Write all for every unit, or a plain number without quotes."

    def check(value: object) -> object:
        if (value is None and optional) or (isinstance(value, str) and value == "all" and or_all):
            return value
        # bool is an int to Python, never to someone who writes a configuration.
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise _wrong(expected, value, advice)
        return value

    return check


def _check_choice(*choices: str) -> Callable[[object], object]:
    def check(value: object) -> object:
        if not isinstance(value, str) or value not in choices:
            raise _wrong("one of " + ", ".join(choices), value, nearest(value, choices, f"Write {choices[0]}."))
        return value

    return check


def _check_dtype(value: object) -> object:
    if value is None:
        return None
    if isinstance(value, torch.dtype) and value in _SHORT_NAMES:
        return _SHORT_NAMES[value]
    spelling = value.lower().removeprefix("torch.") if isinstance(value, str) else ""
    if spelling not in _DTYPE_SPELLINGS:
        advice = nearest(spelling, _DTYPE_SPELLINGS, "Write bf16 if your device computes in it.")
        raise _wrong("fp16, bf16 or fp32, or null", value, advice)
    return _DTYPE_SPELLINGS[spelling]


def _check_names(what: str, example: str, min_parts: int) -> Callable[[object], object]:
    expected = f"a list of {what} such as {example}, or null"

    def check_one(value: object) -> str:
        name = f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else value
        if not isinstance(name, str) or name != name.strip() or not all(name.split(".")):
            raise _wrong(expected, value, "Write each name as dotted words.")
        if len(name.split(".")) < min_parts:
            raise _wrong(expected, value, "Write the module that defines it too, before a dot.")
        return name

    def check(value: object) -> object:
        if value is None:
            return None
        if isinstance(value, str | type):
            return (check_one(value),)
        if not isinstance(value, Sequence | set | frozenset) or isinstance(value, bytes | bytearray):
            raise _wrong(expected, value, "Write a list, also for a single name.")
        return tuple(check_one(item) for item in value) or None

    return check


def _check_sharding(value: object) -> str | Sharding:
    if isinstance(value, Sharding):
        return value
    if isinstance(value, str) and value.lower() in STRATEGIES:
        return value.lower()
    degree = 'an integer >= 1 or "all"'
    expected = f"one of {', '.join(STRATEGIES)}, or a mapping of {', '.join(DEGREES)} to {degree}"
    if not isinstance(value, Mapping):
        raise _wrong(expected, value, nearest(value, STRATEGIES, "Write layerzero for hierarchical ZeRO."))
    for key, number in value.items():
        if key not in DEGREES:
            raise ValueError(f"unknown degree {show(key)}. {nearest(key, DEGREES, 'Remove it.')}")
        is_count = isinstance(number, int) and not isinstance(number, bool) and number >= 1
        if not is_count and number != "all":
            raise ValueError(f'expected {key} to be {degree}, got {show(number)}. Write "all" for every rank.')
    if missing := [key for key in DEGREES if key not in value]:
        raise ValueError(f"expected three degrees, got {show(dict(value))}. Add {', '.join(missing)}.")
    try:
        return Sharding(**value)
    except (ValueError, LayerZeroError) as error:
        raise ValueError(str(error)) from None


def _check_path(value: object) -> object:
    if value is None:
        return None
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path:
        raise _wrong("a path, or null", value, "Write null to start afresh.")
    return path


def _check_init_fn(value: object) -> Callable[..., Any] | None:
    if value is not None and not callable(value):
        raise _wrong(
            "null, or a callable given from Python",
            value,
            "Nothing is imported from a configuration: use config.replace(param_init_fn=function).",
        )
    return value


Flag = Annotated[bool, BeforeValidator(_check_flag)]
Count = Annotated[int, BeforeValidator(_check_integer(1))]
NonNegative = Annotated[int, BeforeValidator(_check_integer(0))]
CountOrAll = Annotated[int | Literal["all"], BeforeValidator(_check_integer(0, or_all=True))]
OptionalCount = Annotated[int | None, BeforeValidator(_check_integer(1, optional=True))]
Timing = Annotated[
    Literal["BACKWARD_PRE", "BACKWARD_POST"], BeforeValidator(_check_choice("BACKWARD_PRE", "BACKWARD_POST"))
]
Accumulate = Annotated[Literal["shard", "full"], BeforeValidator(_check_choice("shard", "full"))]
DType = Annotated[Literal["fp16", "bf16", "fp32"], BeforeValidator(_check_dtype)]
OptionalDType = Annotated[Literal["fp16", "bf16", "fp32"] | None, BeforeValidator(_check_dtype)]
ClassNames = Annotated[
    tuple[str, ...] | None, BeforeValidator(_check_names("module.Class names", "my_models.dit.Block", 2))
]
ModuleNames = Annotated[
    tuple[str, ...] | None, BeforeValidator(_check_names("dotted attribute names", "text_encoder", 1))
]
OptionalPath = Annotated[str | None, BeforeValidator(_check_path)]
ShardingChoice = Annotated[str | Sharding, PlainValidator(_check_sharding)]
InitFunction = Annotated[Callable[..., Any] | None, PlainValidator(_check_init_fn)]
