"""What a sharded module is to its user: the mixed-in class, contexts, and functions on sharded modules."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from layerzero.engine import Engine
from layerzero.errors import LayerZeroError, ShardingError
from layerzero.grads import GradShard
from layerzero.guard import GUARDED_ERRORS, guarded_methods, names_in_traceback
from layerzero.hooks import DDP_REFUSED, REMEDIES, ModuleHook, describe
from layerzero.state import full_state_dict as _full_state_dict

hooks_by_module: weakref.WeakKeyDictionary[nn.Module, ModuleHook] = weakref.WeakKeyDictionary()
"""The hook of every module in a sharded tree, ignored ones excepted."""


class ShardedModule:
    """Mixed into the class of a sharded module and of every unit in it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except LayerZeroError:
            raise
        except GUARDED_ERRORS as error:
            assert isinstance(self, nn.Module)
            message = _explain(self, error)
            if message is None:
                raise
            raise ShardingError(message) from error
        except Exception:
            raise
        except BaseException:  # torch calls no forward hooks for a KeyboardInterrupt
            engine_of(self).abandon_forward()
            raise

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backwards inside only accumulate: gradients don't leave the grads degree. As in torch's DDP."""
        return _no_sync(engine_of(self))

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the gradients of the sharded parameters to a global norm; returns the norm before, an fp32 scalar.

        The same number as ``torch.nn.utils.clip_grad_norm_``, which also works. One small collective.
        """
        engine = engine_of(self)
        with_grad = [p for u in engine.units for p in u.params if p.sharded.grad is not None]
        for p in with_grad:
            grad = p.sharded.grad
            if grad is not None and not isinstance(grad, GradShard):  # replaced by the user: a slice all the same
                p.sharded.grad = GradShard.make(grad, p, engine.grad_source)
        params = [p.sharded for p in with_grad]
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)

    def unsharded(self, submodule: nn.Module | None = None) -> contextlib.AbstractContextManager[None]:
        """Parameters of ``submodule`` (default: all) have their full shape inside. Enter on every rank.

        In-place edits made inside are kept; make the same on every rank. What is computed inside with grad can be
        differentiated, before or after the context ends. For that, modules see copies of the parameters; under
        ``torch.no_grad()`` they see the gathered ones, at half the memory.
        """
        assert isinstance(self, nn.Module)
        return _unsharded(self if submodule is None else submodule)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        engine = engine_of(self)
        probe = torch.empty(0, device=engine.control.device)
        moved = fn(probe)
        if moved.dtype is not probe.dtype or moved.device != probe.device:
            raise ShardingError(
                f"a sharded module can't be moved or cast (here to {moved.device}, {moved.dtype}): its parameters are "
                f"slices of the engine's buffers. Move it before lz.shard, and choose the compute dtype by param_dtype."
            )
        assert isinstance(self, nn.Module)
        for module in self.modules() if recurse else ():
            if module not in hooks_by_module:  # ignored: not the engine's
                nn.Module._apply(module, fn, recurse=False)
        return self

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Sequence[str]:
        # DistributedDataParallel's constructor reads this on every rank, before its first collective. Without an
        # error here it would compare and broadcast slices of different sizes, and then hang or fail inside torch.
        raise ShardingError(DDP_REFUSED)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        raise ShardingError(
            "a sharded module can't be deep-copied: its parameters are slices of buffers shared with a running "
            "engine. For an average of weights, keep [p.detach().clone() for p in model.parameters()] and update it "
            "with torch._foreach_lerp_; for a full copy, use lz.full_state_dict(model)."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardingError("a sharded module can't be pickled: save full weights from lz.full_state_dict(model)")


@cache
def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    body = {**guarded_methods(cls, _explain), "__module__": cls.__module__}
    return type(f"Sharded{cls.__name__}", (ShardedModule, cls), body)


@cache
def _guarded_class(cls: type[nn.Module]) -> type[nn.Module]:
    body = guarded_methods(cls, _explain)
    return (
        type(cls.__name__, (cls,), {**body, "__module__": cls.__module__, "__qualname__": cls.__qualname__})
        if body
        else cls
    )


def become_sharded(module: nn.Module) -> None:
    """Mix `ShardedModule` into the class of a unit's module."""
    module.__class__ = _sharded_class(type(module))


def become_guarded(module: nn.Module) -> None:
    """Let the methods of another owner of parameters explain reads of slices; its class keeps its name."""
    module.__class__ = _guarded_class(type(module))


def _explain(module: nn.Module, error: Exception) -> str | None:
    """Why a method failed, if it read a parameter outside its unit's forward."""
    frames = list(names_in_traceback(error))
    called = (hooks_by_module.get(owner) for owner, method, _ in frames if method in ("forward", "_call_impl"))
    entered = {unit for hook in called if hook is not None for unit in hook.units}  # these had their parameters
    for owner, _, names in frames:
        # Of two children with a `weight`, `self.embed.weight` reads that of the one the method names.
        for reader in (owner, *(c for name, c in owner._modules.items() if c is not None and name in names)):
            hook = hooks_by_module.get(reader)
            for unit in hook.units if hook is not None else ():
                for param in unit.params if not unit.registered and unit not in entered else ():
                    if any(key in names and slots is reader._parameters for slots, key in param.slots):
                        return (
                            f"{describe(param)} was read in a method of {type(owner).__name__} outside the unit's "
                            f"forward, where it is only this rank's slice (error: {error}). {REMEDIES}"
                        )
    return None


# ---------------------------------------------------------------------------- contexts


def engine_of(module: object) -> Engine:
    """The engine of a sharded module or any module below one.

    Raises:
        ShardingError: if it is not sharded.
    """
    hook = hooks_by_module.get(module) if isinstance(module, nn.Module) else None
    if hook is None:
        raise ShardingError(f"{type(module).__name__} is not sharded: call lz.shard(model, ...) first")
    return hook.engine


@contextlib.contextmanager
def _no_sync(engine: Engine) -> Iterator[None]:
    before, engine.sync = engine.sync, False
    try:
        yield
    finally:
        engine.sync = before


@contextlib.contextmanager
def _unsharded(module: nn.Module) -> Iterator[None]:
    engine = engine_of(module)
    units = list(dict.fromkeys(u for m in module.modules() if m in hooks_by_module for u in hooks_by_module[m].units))
    if engine.running.outside:
        engine.forget_interrupted()
    with contextlib.ExitStack() as undo:
        if engine.running.depth == 0 and not engine.in_backward():
            engine.begin_pass(of_root=False)
            undo.callback(engine.end_pass)
        engine.running.enter_context()
        undo.callback(engine.running.leave_context)
        for unit in units:
            engine.pre_forward(unit, in_backward=False)
            unit.held += 1
            undo.callback(engine.end_unsharded, unit)
            if unit.held == 1 and torch.is_grad_enabled():
                engine.lend_copies(unit)
        yield


def full_state_dict(model: nn.Module, *, rank0_only: bool = False, cpu: bool = True) -> dict[str, torch.Tensor]:
    """Full parameters (trainable ones in fp32) and persistent buffers under their plain names. Collective.

    Args:
        model: the module given to `shard`.
        rank0_only: other ranks take part and get an empty dict.
        cpu: copy to host memory; else keep on the device.

    Raises:
        ShardingError: if ``model`` is not sharded.
    """
    return _full_state_dict(model, engine_of(model), rank0_only, cpu)


def forward_method(module: nn.Module, name: str) -> None:
    """Let ``module.name(...)`` find full-shape parameters, as the module's forward does.

    For methods that read parameters directly instead of calling submodules. It covers the parameters of the
    unit that ``module`` lies in, and of the units whose parameters it owns.

    Raises:
        ShardingError: if the module is not sharded or has no such method.
    """
    engine_of(module)
    hook, fn = hooks_by_module[module], getattr(type(module), name, None)
    if not callable(fn):
        raise ShardingError(f"forward_method: {type(module).__name__} has no method {name!r}")

    def as_forward(*args: Any, **kwargs: Any) -> Any:
        target = hook.module()
        return hook.call(lambda *a, **k: fn(target, *a, **k), *args, **kwargs)

    object.__setattr__(module, name, as_forward)
