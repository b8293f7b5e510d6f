"""Plain data as JSON and back, with tensors set aside. Nothing else is accepted, so nothing is ever executed.

[Note: tags]
What JSON has no form for is an object with one key, its tag: ``__tuple__``, ``__dict__`` (pairs, where keys are not
all strings or one is a tag), ``__bytes__`` (hexadecimal), ``__float__`` ("nan", "inf", "-inf"), ``__number__`` (a
tensor without dims: dtype and value), ``__tensor__`` (the name of a tensor stored elsewhere).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from layerzero.checkpoint.storage import DTYPES, dtype_name
from layerzero.errors import CheckpointError
from layerzero.grads import GradShard

_TAGS = ("__tuple__", "__dict__", "__tensor__", "__number__", "__bytes__", "__float__")
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MAX_DEPTH = 50  # three levels of JSON each at most, and JSON of more than 200 is not read
_MAX_BITS = 4096


def encode(value: Any, set_aside: Callable[[torch.Tensor], str], where: str, *, depth: int = 0) -> Any:
    """``value`` as JSON: None, bool, int, float, str, bytes, lists, tuples, dicts of these, and tensors.

    Args:
        set_aside: stores a tensor and returns the name by which `decode` asks for it.
        where: what the value is called in errors.
        depth: containers around it.

    Raises:
        CheckpointError: something else is in it; names the place.
    """
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{where[:200]}...: nested more than {_MAX_DEPTH} deep, or contains itself")
    if isinstance(value, torch.Tensor):
        if isinstance(value, GradShard) or hasattr(value, "_layerzero_info"):
            raise CheckpointError(
                f"{where}: a parameter or gradient of a sharded model is this rank's slice only: save the model, "
                f"layerzero.full_state_dict(model), or grad.local in what each rank saves of its own"
            )
        return _encode_tensor(value.detach(), set_aside, where)
    if isinstance(value, (bytes, bytearray)):
        return {"__bytes__": bytes(value).hex()}
    if isinstance(value, (list, tuple)):
        items = [encode(item, set_aside, f"{where}[{i}]", depth=depth + 1) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"__tuple__": items}
    if isinstance(value, dict):
        plain = all(type(key) is str for key in value) and not any(tag in value for tag in _TAGS)
        pairs = [
            [
                encode(key, set_aside, f"a key of {where}", depth=depth + 1),
                encode(item, set_aside, f"{where}[{key!r}]", depth=depth + 1),
            ]
            for key, item in value.items()
        ]
        return dict(pairs) if plain else {"__dict__": pairs}
    return _encode_simple(value, where)


def _encode_tensor(tensor: torch.Tensor, set_aside: Callable[[torch.Tensor], str], where: str) -> Any:
    dtype = dtype_name(tensor, where)
    if tensor.ndim == 0 and not tensor.is_complex():
        return {"__number__": [dtype, _encode_simple(tensor.item(), where)]}
    return {"__tensor__": set_aside(tensor.resolve_conj().resolve_neg())}


def _encode_simple(value: Any, where: str) -> Any:
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            value = kind(value)  # numpy's float64 is a float, an IntEnum an int
            break
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
    if type(value) is int and value.bit_length() > _MAX_BITS:
        raise CheckpointError(f"{where}: a number of {value.bit_length()} bits; {_MAX_BITS} are the most")
    if type(value) is str and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise CheckpointError(f"{where}: {value!r} is not valid Unicode; save it as bytes") from None
    if value is None or type(value) in (bool, int, float, str):
        return value
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    raise CheckpointError(
        f"{where}: a {name} can't be saved; expected None, bool, int, float, str, bytes, a tensor, or "
        f"lists, tuples and dicts of these"
    )


def decode(value: Any, tensor: Callable[[str], torch.Tensor], where: str = "optimizer") -> Any:
    """Inverse of `encode`.

    Args:
        tensor: gives the tensor of a name.
        where: what the value is called in errors.

    Raises:
        CheckpointError: not what `encode` makes; or what ``tensor`` raises.
    """
    if isinstance(value, list):
        return [decode(item, tensor, where) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and next(iter(value)) in _TAGS:
        [(tag, content)] = value.items()
        return _decode_tagged(tag, content, tensor, where)
    return {key: decode(item, tensor, where) for key, item in value.items()}


def _decode_tagged(tag: str, content: Any, tensor: Callable[[str], torch.Tensor], where: str) -> Any:
    try:
        match tag, content:
            case "__tensor__", str():
                return tensor(content)
            case "__number__", [str(dtype), number]:
                return _decode_number(dtype, decode(number, tensor, where))
            case "__bytes__", str():
                return bytes.fromhex(content)
            case "__float__", str():
                return _NON_FINITE[content]
            case "__tuple__", list():
                return tuple(decode(item, tensor, where) for item in content)
            case "__dict__", list():
                return {decode(key, tensor, where): decode(item, tensor, where) for key, item in content}
    except CheckpointError:
        raise
    except (KeyError, RuntimeError, TypeError, ValueError):
        pass
    raise CheckpointError(f"{where}: malformed value under {tag}")


def _decode_number(name: str, number: Any) -> torch.Tensor:
    dtype = DTYPES[name]
    kind = float if dtype.is_floating_point else bool if dtype is torch.bool else int
    if type(number) is not kind:
        raise TypeError
    return torch.tensor(number, dtype=dtype)


def refuse_tensor(name: str) -> torch.Tensor:
    """The ``tensor`` of `decode` for optimizers' values."""
    raise CheckpointError(f"an optimizer value asks for tensor {name!r}, where only numbers are expected")
