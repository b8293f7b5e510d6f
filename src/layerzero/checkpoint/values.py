"""Plain data as JSON and back, with tensors set aside. Nothing else is accepted, so nothing is ever executed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from layerzero.checkpoint.storage import DTYPES, dtype_name
from layerzero.errors import CheckpointError

_TAGS = ("__tuple__", "__dict__", "__tensor__", "__number__", "__bytes__")


def encode(value: Any, set_aside: Callable[[torch.Tensor], str], where: str) -> Any:
    """``value`` as JSON: None, bool, int, float, str, bytes, lists, tuples, dicts of these, and tensors.

    Args:
        set_aside: stores a tensor and returns the name by which `decode` asks for it.
        where: what the value is called in errors.

    Raises:
        CheckpointError: something else is in it; names the place.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        dtype = dtype_name(value, where)
        if value.ndim == 0 and not value.is_complex():
            return {"__number__": [dtype, value.item()]}
        return {"__tensor__": set_aside(value.detach())}
    if isinstance(value, (bytes, bytearray)):
        return {"__bytes__": bytes(value).hex()}
    if isinstance(value, (list, tuple)):
        items = [encode(item, set_aside, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"__tuple__": items}
    if isinstance(value, dict):
        plain = all(type(key) is str for key in value) and not any(tag in value for tag in _TAGS)
        pairs = [
            (encode(key, set_aside, f"a key of {where}"), encode(item, set_aside, f"{where}[{key!r}]"))
            for key, item in value.items()
        ]
        return dict(pairs) if plain else {"__dict__": [list(pair) for pair in pairs]}
    for kind in (bool, int, float, str):  # numpy's float64 is a float, an IntEnum an int
        if isinstance(value, kind):
            return kind(value)
    raise CheckpointError(
        f"{where}: a {type(value).__name__} can't be saved; expected None, bool, int, float, str, bytes, a tensor, or "
        f"lists, tuples and dicts of these"
    )


def decode(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Inverse of `encode`; ``tensor`` gives the tensor of a name.

    Raises:
        CheckpointError: not what `encode` makes.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and next(iter(value)) in _TAGS:
        [(tag, content)] = value.items()
        try:
            if tag == "__tensor__" and isinstance(content, str):
                return tensor(content)
            if tag == "__number__":
                dtype, number = content
                return torch.tensor(number, dtype=DTYPES[dtype])
            if tag == "__bytes__":
                return bytes.fromhex(content)
            if tag == "__tuple__" and isinstance(content, list):
                return tuple(decode(item, tensor) for item in content)
            if tag == "__dict__":
                return {decode(key, tensor): decode(item, tensor) for key, item in content}
        except (KeyError, OverflowError, RuntimeError, TypeError, ValueError):
            pass
        raise CheckpointError(f"malformed value under {tag}")
    return {key: decode(item, tensor) for key, item in value.items()}


def names_of_tensors(value: Any) -> set[str]:
    """Names that `decode` would ask for."""
    if isinstance(value, list):
        return set().union(*(names_of_tensors(item) for item in value))
    if isinstance(value, dict):
        if len(value) == 1 and isinstance(value.get("__tensor__"), str):
            return {value["__tensor__"]}
        return set().union(*(names_of_tensors(item) for item in value.values()))
    return set()
