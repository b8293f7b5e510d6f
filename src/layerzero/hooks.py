"""Module hooks: turn calls of modules into calls of the engine."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from layerzero.engine import Engine
from layerzero.errors import ShardingError
from layerzero.group import Param
from layerzero.precision import find_tensors, map_tensors, require_grad_tensors
from layerzero.running import Frame
from layerzero.tensor_parallel import local_of
from layerzero.unit import Unit, Use


class ModuleHook:
    """Unshards what a module needs around its forward, unless that is already the case.

    Every unit's module has one, and so does every module that owns parameters, so that a submodule called
    from outside its unit's forward finds its parameters too. Its own forward hook such a submodule gets with
    the first call of that kind. Most are never called so, and with both hooks everywhere the forward of six
    transformer blocks took 0.7 ms more.
    """

    def __init__(self, engine: Engine, module: nn.Module, units: tuple[Unit, ...]) -> None:
        self.engine = engine
        self._running = engine.running
        self.units = units
        self.module = weakref.ref(module)
        self._gathered = {
            g.unsharded.untyped_storage()._cdata for u in units for g in u.groups if g.layout.axes.num_params
        }
        self._post_id = -1
        self._frames: list[Frame | None] = []  # of calls with a forward hook; None for one inside another
        self._is_boundary = False  # of the last forward outside a backward; a recomputation casts alike
        self._is_unit = False

    def install(self, module: nn.Module, is_unit: bool) -> None:
        """Register before hooks that read parameters, such as torch's weight_norm."""
        module.register_forward_pre_hook(self.pre, prepend=True, with_kwargs=True)
        self._is_unit = is_unit
        if is_unit:
            self._install_post(module)

    def _install_post(self, module: nn.Module) -> None:
        # The first one, whenever it comes: the user's hooks see what a caller will see.
        handle = module.register_forward_hook(self.post, prepend=not self._is_unit, with_kwargs=True, always_call=True)
        self._post_id = handle.id

    def pre(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook."""
        if self._running.outside:
            self.engine.forget_interrupted()
        has_post = self._post_id in module._forward_hooks
        if self._is_inside():
            if has_post:
                self._frames.append(None)
            return None
        if not has_post:
            self._install_post(module)
        frame = Frame(None if self._is_unit else sys._getframe(1))
        self._frames.append(frame)
        return self._enter(frame, args, kwargs)

    def _is_inside(self) -> bool:
        """Whether a forward around this one has what it needs."""
        if not self._running.depth:
            return False
        for unit in self.units:  # noqa: SIM110 - runs at every call of a module; a generator takes longer
            if not unit.forward_depth:
                return False
        return True

    def _enter(
        self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Whatever raises here, `_leave` undoes what was done before."""
        engine = self.engine
        in_backward = engine.in_backward()
        outermost = self._running.depth == 0
        if not in_backward:
            self._is_boundary = outermost
            if outermost:
                if DistributedDataParallel._active_ddp_module is not None:
                    _refuse_surrounding_ddp(engine)
                engine.begin_pass(of_root=self.units[0].is_root)
        frame.starts_pass = outermost and not in_backward
        self._running.enter(frame)
        for unit in self.units:
            engine.pre_forward(unit, in_backward)
            frame.uses.append(None)
        if self._is_boundary:
            args, kwargs = engine.casts.cast_inputs(args, kwargs)
        for i, unit in enumerate(self.units):
            frame.uses[i] = use = engine.begin_use(unit, in_backward)
            if use is not None and unit.track_inputs:
                args, kwargs = _watch_inputs(engine, use, args, kwargs)
        frame.first_node = torch.autograd._get_sequence_nr()
        return args, kwargs

    def post(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Forward hook; also called when the forward raised, or a pre-hook, then with ``output`` None."""
        frame = self._frames.pop() if self._frames else None
        return None if frame is None else self._leave(frame, args, kwargs, output)

    def _leave(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        engine = self.engine
        if not self._running.leave(frame):
            return None
        grad_tensors: list[torch.Tensor] = []
        try:
            if self._gathered:
                output = _without_parameters(output, self._gathered)
            if self._is_boundary:
                output = engine.casts.cast_outputs(output)
            if torch.is_grad_enabled():
                grad_tensors = require_grad_tensors(output, (args, kwargs), frame.first_node)
        finally:
            for unit, use in zip(self.units, frame.uses, strict=False):  # a failed `_enter` has entered fewer
                engine.post_forward(unit, use, grad_tensors)
            if frame.starts_pass:
                engine.end_pass()
        return output

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``fn`` as if it were the module's forward."""
        if self._running.outside:
            self.engine.forget_interrupted()
        if self._is_inside():
            return fn(*args, **kwargs)
        frame = Frame()
        output = replaced = None
        try:
            args, kwargs = self._enter(frame, args, kwargs)
            output = fn(*args, **kwargs)
        finally:
            replaced = self._leave(frame, args, kwargs, output)
        return output if replaced is None else replaced


def _without_parameters(output: Any, gathered: set[int]) -> Any:
    """``output`` with copies of tensors that lie in these storages of parameters: their bytes are about to go."""

    def is_parameter(tensor: torch.Tensor) -> bool:
        if is_functorch_wrapped_tensor(tensor):  # inside torch.func; it has no storage to ask for
            return False
        return tensor.layout is torch.strided and local_of(tensor).untyped_storage()._cdata in gathered

    if not any(is_parameter(t) for t in find_tensors(output)):
        return output
    return map_tensors(lambda t: t.clone() if is_parameter(t) else t, output)


class _InputsWatch(torch.autograd.Function):
    """Identity whose backward runs when all gradients of the inputs are computed."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.done = done
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.done()
        return (None, *grads)


def _watch_inputs(engine: Engine, use: Use, args: Any, kwargs: Any) -> tuple[Any, Any]:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    where = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
    if where:
        use.tracked = True
        watched = _InputsWatch.apply(partial(engine.inputs_done, use), *(leaves[i] for i in where))
        for i, tensor in zip(where, watched, strict=True):
            leaves[i] = tensor
    return pytree.tree_unflatten(leaves, spec)


def install_param_hooks(engine: Engine, unit: Unit) -> None:
    """Tell the engine when a parameter's gradient is there; refuse gradients that bypass it."""
    # Weak: the hooks hang on tensors that the unit owns, and `del model` has to free memory at once.
    weak_engine, weak_unit = weakref.ref(engine), weakref.ref(unit)

    def arrived(tensor: torch.Tensor) -> None:
        engine, unit = weak_engine(), weak_unit()
        if engine is not None and unit is not None:
            engine.grad_arrived(unit, tensor)

    for group in unit.trainable_groups:
        for param in group.params:
            param.unsharded.register_post_accumulate_grad_hook(arrived)
            param.refusal = partial(_refuse_direct_gradient, describe(param))
            param.sharded.register_hook(param.refusal)


def describe(param: Param) -> str:
    """Name of a parameter and its unit, for errors."""
    unit = f"unit {param.info.unit!r}" if param.info.unit else "the root unit"
    return f"parameter {param.info.fqn!r} of {unit}"


REMEDIES = (
    "Read it inside `with model.unsharded(submodule):`, or declare the method that reads it with "
    'lz.forward_method(module, "name").'
)


DDP_REFUSED = (
    "lz.shard replaces DistributedDataParallel: use the sharded model as it is; its backward reduces gradients over "
    "all data-parallel ranks"
)


def _refuse_surrounding_ddp(engine: Engine) -> None:
    """DDP's constructor asks the module it wraps, not those inside it; its forward says which one runs."""
    ddp = DistributedDataParallel._active_ddp_module
    sharded = {id(p.sharded) for u in engine.units for p in u.params}
    if ddp is not None and any(id(p) in sharded for p in ddp._module_parameters):
        raise ShardingError(
            f"DistributedDataParallel is around a {type(ddp.module).__name__} that contains a sharded model, and has "
            f"overwritten its slices with those of rank 0: build the model anew. {DDP_REFUSED}"
        )


def _refuse_direct_gradient(what: str, _grad: torch.Tensor) -> None:
    raise ShardingError(
        f"{what} was read outside its unit's forward, where it is only this rank's slice, and a gradient now reaches "
        f"the slice directly: it would never be reduced over the ranks. {REMEDIES}"
    )
