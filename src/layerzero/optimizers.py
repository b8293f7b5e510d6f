"""Watches torch optimizers: refuses ones that would train wrong, and tells the engine when one has stepped."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from layerzero.engine import Engine
from layerzero.errors import ShardingError
from layerzero.grads import refuse_pending

_ELEMENTWISE = {
    "Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop", "Lion",
    "FusedAdam", "FusedSGD", "DeepSpeedCPUAdam",
}  # fmt: skip
"""Classes (and bases of classes) whose update of an element reads nothing but that element's own state."""

_registered: weakref.WeakSet[type] = weakref.WeakSet()
_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, list[weakref.ref[Engine]]]]
_seen = weakref.WeakKeyDictionary()


def register_elementwise_optimizer(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Declare that ``cls`` updates every element from that element's parameter, gradient and state alone.

    Only such optimizers may step flat slices. Usable as a class decorator.
    """
    _registered.add(cls)
    return cls


def mark_replaced(param: torch.nn.Parameter, fqn: str) -> None:
    """``param`` was replaced by a slice: an optimizer that still holds it must not step."""
    param._layerzero_replaced = fqn  # type: ignore[attr-defined]
    _seen.clear()  # an optimizer that has stepped before may hold it


def mark_sharded(param: torch.nn.Parameter, engine: Engine) -> None:
    """``param`` is a slice managed by ``engine``."""
    param._layerzero_engine = weakref.ref(engine)  # type: ignore[attr-defined]


def _inspect(optimizer: torch.optim.Optimizer) -> tuple[int, list[weakref.ref[Engine]]]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    replaced = [p._layerzero_replaced for p in params if hasattr(p, "_layerzero_replaced")]
    if replaced:
        raise ShardingError(
            f"{type(optimizer).__name__} was built before lz.shard and holds {len(replaced)} parameters that the "
            f"model no longer uses ({', '.join(map(repr, replaced[:3]))}{', ...' if len(replaced) > 3 else ''}): its "
            f"steps would change nothing. Call lz.shard(model, ...) first and build the optimizer from "
            f"model.parameters() afterwards."
        )
    engines: dict[int, weakref.ref[Engine]] = {}
    for p in params:
        ref = getattr(p, "_layerzero_engine", None)
        if ref is not None:
            engines[id(ref())] = ref
    if any(engine is not None and engine.resume_pending for engine in (ref() for ref in engines.values())):
        raise ShardingError(
            f"ckpt_load_path names a checkpoint with optimizer states, but only the weights were loaded so far: call "
            f"lz.resume(model, optimizer) once {type(optimizer).__name__} is built, or lz.resume(model) to go on with "
            f"fresh optimizer states."
        )
    if engines and not _is_elementwise(type(optimizer)):
        raise ShardingError(
            f"{type(optimizer).__name__} is not known to be elementwise. A rank holds flat slices of parameters, cut "
            f"anywhere, so an optimizer that looks at whole matrices or at all parameters together (Adafactor, Muon, "
            f"Shampoo, LBFGS) would compute something else. Use one of torch's elementwise optimizers; if this one is "
            f"elementwise, declare it with lz.register_elementwise_optimizer({type(optimizer).__name__})."
        )
    return len(params), list(engines.values())


def _is_elementwise(cls: type) -> bool:
    return any(base in _registered or base.__name__ in _ELEMENTWISE for base in cls.__mro__)


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    known = _seen.get(optimizer)
    if known is None or known[0] != sum(len(group["params"]) for group in optimizer.param_groups):
        _seen[optimizer] = _inspect(optimizer)
    for group in optimizer.param_groups:  # before weight decay, which some optimizers apply without the gradient
        for p in group["params"]:
            refuse_pending(p.grad)


def _after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for ref in _seen[optimizer][1] if optimizer in _seen else ():
        engine = ref()
        if engine is not None:
            engine.refresher.mark_all_stale()


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
