"""Turns a shape error from a parameter read outside its unit's forward into one that says so.

At rest a parameter is a plain slice of shape ``(k, 1, ..., 1)``; a method that reads it directly fails
somewhere inside torch. Methods of a sharded model's own classes are wrapped to name the parameter.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from layerzero.errors import LayerZeroError, ShardingError

GUARDED_ERRORS = (RuntimeError, ValueError, IndexError, TypeError)


def guarded_methods(cls: type[nn.Module], explain: Callable[[nn.Module, Exception], str | None]) -> dict[str, Any]:
    """Wrappers for the methods ``cls`` adds to nn.Module, except ``forward``.

    ``explain`` gets the module and the error and returns the message of the error to raise instead, or None.
    """
    wrapped: dict[str, Any] = {}
    for base in cls.__mro__:
        if base is nn.Module or base.__module__.startswith("torch."):
            continue
        for name, fn in vars(base).items():
            plain = isinstance(fn, types.FunctionType) and not hasattr(nn.Module, name) and name != "forward"
            if plain and not name.startswith("__") and name not in wrapped and not _is_generator(fn):
                wrapped[name] = _guard(fn, explain)
    return wrapped


def _is_generator(fn: Any) -> bool:
    return inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn)


def _guard(fn: Callable[..., Any], explain: Callable[[nn.Module, Exception], str | None]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def guarded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return fn(self, *args, **kwargs)
        except LayerZeroError:
            raise
        except GUARDED_ERRORS as error:
            message = explain(self, error)
            if message is None:
                raise
            raise ShardingError(message) from error

    return guarded


def names_in_traceback(error: BaseException) -> Iterator[tuple[nn.Module, str, frozenset[str]]]:
    """``self``, the method and the attribute names used, for every module's frame the error passed through."""
    traceback = error.__traceback__
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            code = traceback.tb_frame.f_code
            yield owner, code.co_name, frozenset(code.co_names)
        traceback = traceback.tb_next
