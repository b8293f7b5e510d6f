"""`GradShard`: a slice of the synchronised gradient whose norms and inf/nan checks answer for the whole.

Torch's own ``clip_grad_norm_`` and ``GradScaler.unscale_`` reduce gradients to one number. On a slice that
number must be the global one, the same on every rank, or ranks clip differently and skip different steps.
`GradShard` intercepts those reductions; everything elementwise runs on the local slice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from layerzero.collectives import Control
from layerzero.errors import ShardingError

if TYPE_CHECKING:
    from layerzero.group import Param
    from layerzero.unit import Unit


class GradSource:
    """Global statistics of one model's gradients, one collective for all parameters at a time.

    The per-parameter norms of an order are computed once and kept until any gradient changes, because torch
    asks for them parameter by parameter.
    """

    def __init__(self, units: Sequence[Unit], controls: Sequence[Control]) -> None:
        """``controls``: one for each direction in which slices are spread: data- and tensor-parallel."""
        self._groups = [g for u in units for g in u.trainable_groups]
        self._params: list[Param] = [p for g in self._groups for p in g.params]
        self._index = {id(p.sharded): i for i, p in enumerate(self._params)}
        self._controls = controls
        self.pipeline: Control | None = None  # over the pipeline's stages, of which this model is one
        self._norms: dict[float, tuple[torch.Tensor, list[_Stamp]]] = {}
        self.weak = weakref.ref(self)  # what gradients hold

    def invalidate(self) -> None:
        """Some gradient changed."""
        self._norms.clear()

    def norm(self, shard: GradShard, order: float) -> torch.Tensor:
        """Norm of the whole gradient that ``shard`` is a slice of: fp32 scalar. Collective on first use."""
        if self.pipeline is not None:
            raise ShardingError(
                f"a norm of the gradient of {shard._fqn!r} was asked for outside its pipeline: the model is one of "
                f"several stages, and clipping by its own norm would scale stages differently. Use "
                f"Pipeline.clip_grad_norm_ or Pipeline.grad_norm."
            )
        index = self._index[shard.param_id]
        current = self._params[index].sharded.grad
        if not (shard.is_whole or shard is current):
            _refuse_whole_check(shard)
        known = self._norms.get(order)
        if known is None or not known[1][index].fits(current):
            stamps = [_Stamp(p.sharded.grad) for p in self._params]
            self._norms[order] = known = (self.all_norms(order), stamps)
        return known[0][index]

    def all_norms(self, order: float) -> torch.Tensor:
        """Norm of every trainable parameter's gradient, fp32 [parameters]; 0 for what another stage counts. Collective.

        Raises:
            ShardingError: while a gradient is pending.
        """
        if not order > 0:
            raise ShardingError(f"norm of order {order} of sharded gradients: expected a positive order or inf")
        counted = [g.counts for g in self._groups for _ in g.params]
        locals_ = [p.sharded.grad if c else None for p, c in zip(self._params, counted, strict=True)]
        filled = [(i, g.local) for i, g in enumerate(locals_) if isinstance(g, GradShard) and g.local.numel()]
        norms = torch.zeros(len(self._params), dtype=torch.float32, device=self._controls[0].device)
        if filled:
            values = torch._foreach_norm([g for _, g in filled], order)
            where = torch.tensor([i for i, _ in filled], device=norms.device)
            norms[where] = torch.stack(list(values)).float()
        if order == float("inf"):
            return largest(norms, self._controls)
        norms.pow_(order)
        for control in self._controls:
            control.all_reduce(norms, dist.ReduceOp.SUM)
        return norms.pow_(1.0 / order)

    def any_rank(self, found_inf: torch.Tensor) -> None:
        """In place: the largest value over all ranks of the model."""
        for control in (*self._controls, *([self.pipeline] if self.pipeline is not None else [])):
            control.all_reduce(found_inf, dist.ReduceOp.MAX)


def largest(norms: torch.Tensor, controls: Sequence[Control]) -> torch.Tensor:
    """Elementwise maximum of fp32 ``norms`` of any shape over the ranks; nan where it is on any rank. Collective."""
    inf = float("inf")  # some backends' MAX drops nan, so it travels beside
    both = torch.stack([norms.nan_to_num(nan=inf, posinf=inf), norms.isnan().float()])
    for control in controls:
        control.all_reduce(both, dist.ReduceOp.MAX)
    return both[0].masked_fill(both[1] > 0, float("nan"))


def refuse_pending(grad: torch.Tensor | None) -> None:
    """Raise if ``grad`` is a gradient that is still being accumulated."""
    if isinstance(grad, GradShard) and grad.pending:
        raise ShardingError(_REFUSED_WHILE_PENDING.format(fqn=grad._fqn))


def is_pending(grad: torch.Tensor | None) -> bool:
    """Whether ``grad`` stands for gradients of earlier micro-batches, which were not zeroed."""
    return isinstance(grad, GradShard) and grad.pending and not grad._layerzero_zeroed


def is_added_to(grad: torch.Tensor | None) -> bool:
    """Whether the next backward adds to ``grad``."""
    return grad is not None and not getattr(grad, "_layerzero_zeroed", False)


_REFUSED_WHILE_PENDING = (
    "the gradient of parameter {fqn!r} is not synchronised yet: the last backward ran inside no_sync(). Run the last "
    "micro-batch's backward outside no_sync() before the optimizer step, clipping or reading gradients."
)


class GradShard(torch.Tensor):
    """This rank's slice of one parameter's gradient, fp32, shaped like the parameter at rest.

    Attributes:
        param_id: ``id`` of the sharded parameter.
        pending: the gradient is still being accumulated under ``no_sync()``; only zeroing is allowed.
        is_whole: this is the gradient (or a view of all of it) and not something computed from it, so that a
            norm of it can be answered for all ranks.
        carried: pending, and `local` holds an earlier synchronised gradient that the next one is added to.
    """

    param_id: int
    pending: bool = False
    carried: bool = False
    is_whole: bool = True
    _local: torch.Tensor
    _fqn: str
    _layerzero_zeroed: bool = False
    _source: weakref.ref[GradSource]

    @classmethod
    def make(cls, local: torch.Tensor, param: Param, source: GradSource, pending: bool = False) -> GradShard:
        """Wrap ``local``."""
        shard = local.as_subclass(cls)
        shard._local = local
        shard.param_id = id(param.sharded)
        shard._fqn = param.info.fqn
        shard._source = source.weak
        if pending:
            shard.pending = True
        return shard

    @property
    def local(self) -> torch.Tensor:
        """The same elements as a plain tensor.

        Raises:
            ShardingError: while the gradient is pending.
        """
        refuse_pending(self)
        return self._local

    def source(self) -> GradSource:
        """Where global answers come from."""
        source = self._source()
        if source is None:
            raise ShardingError(f"the sharded model of gradient {self._fqn!r} is gone")
        return source

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":  # optimizers ask every gradient whether it is sparse: a tenth of their host time
            with torch._C.DisableTorchFunctionSubclass():
                answer = func(*args)
            if not isinstance(answer, torch.Tensor):
                return answer
        kwargs = kwargs or {}
        shards = _shards_in(args) + _shards_in(tuple(kwargs.values()))
        if any(s.pending for s in shards):
            return _on_pending(func, name, shards, args, kwargs)
        if func in _NORMS:
            return _NORMS[func](*args, **kwargs)
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            return _unscale(*args, **kwargs)
        if func in _WHOLE_CHECKS:
            return _WHOLE_CHECKS[func](shards[0])
        out = func(*_plain(args), **_plain(kwargs))
        written = _shards_in(args[:1])
        if written and (name in _INPLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))):
            for shard in written:
                shard._layerzero_zeroed |= name in ("zero_", "_foreach_zero_")
                shard.source().invalidate()
            return args[0] if isinstance(args[0], GradShard) and isinstance(out, torch.Tensor) else out
        if isinstance(out, torch.Tensor) and not any(out is a for a in args):
            return shards[0].derive(out, name)  # still a slice: a sum over it would still be this rank's only
        return out

    def derive(self, local: torch.Tensor, name: str) -> GradShard:
        """What function ``name`` made of this slice, elementwise or by viewing it."""
        new = local.as_subclass(GradShard)
        new._local = local
        new.param_id, new._fqn, new._source = self.param_id, self._fqn, self._source
        new.is_whole = self.is_whole and name in _WHOLE_VIEWS
        return new

    def __repr__(self, *, tensor_contents: object = None) -> str:
        state = "pending" if self.pending else repr(self.local)
        return f"GradShard({self._fqn}: {state})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardingError(
            "gradients of a sharded model cannot be pickled; use grad.local.clone() for this rank's part"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.local.clone()


_INPLACE_OPERATORS = {"__set__", "__setitem__"} | {
    f"__i{name}__"
    for name in (
        "add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift",
    )
}  # fmt: skip
_WHOLE_VIEWS = {"detach", "__get__", "flatten", "ravel", "view", "reshape", "contiguous", "float", "to", "clone"}
"""Functions whose result has the elements of the slice, unchanged; told by name, so that all ranks agree."""


class _Stamp:
    """Tells whether a gradient was replaced or written to since; an id alone may be that of a later tensor."""

    __slots__ = ("_local", "_version")

    def __init__(self, grad: torch.Tensor | None) -> None:
        local = _plain(grad)
        self._local = None if local is None else weakref.ref(local)
        self._version = 0 if local is None else local._version

    def fits(self, grad: torch.Tensor | None) -> bool:
        local = _plain(grad)
        if self._local is None or local is None:
            return self._local is local
        return self._local() is local and self._version == local._version


_HOLDERS = (GradShard, list, tuple)
_NESTED = (*_HOLDERS, dict)


def _shards_in(values: Sequence[Any]) -> list[GradShard]:
    found = []
    for value in values:
        if isinstance(value, _HOLDERS):
            found += [value] if isinstance(value, GradShard) else _shards_in(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, GradShard):
        return value._local
    if isinstance(value, list | tuple):  # of hundreds of tensors in optimizers
        return type(value)([_plain(v) if isinstance(v, _NESTED) else v for v in value])
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


_PENDING_ALLOWED = {"__get__", "__set__", "detach_", "requires_grad_", "size", "dim", "numel", "is_floating_point"}


def _on_pending(func: Any, name: str, shards: list[GradShard], args: Any, kwargs: Any) -> Any:
    if name in ("zero_", "_foreach_zero_"):
        for shard in shards:
            shard._layerzero_zeroed = True
            shard.carried = False
        return args[0]
    if name in _PENDING_ALLOWED:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    for shard in shards:
        refuse_pending(shard)
    raise AssertionError("called without a pending gradient")


# ------------------------------------------------------------------ reductions with a global answer


def _vector_norm(x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, out: Any = None):
    if dim is not None or keepdim or out is not None:
        raise ShardingError(
            "norms of a GradShard along a dimension are not defined; use grad.local for this rank's part"
        )
    norm = x.source().norm(x, float(ord))
    return norm if dtype is None else norm.to(dtype)


def _linalg_norm(
    A: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, out: Any = None, dtype: Any = None
):
    if A.ndim > 1 and ord not in (None, "fro"):
        raise ShardingError(
            f"torch.linalg.norm(grad, {ord!r}) of the gradient of {A._fqn!r} is a norm of a matrix, of which this rank "
            f"has a slice only. Use torch.linalg.vector_norm(grad, p) for a global norm of its elements."
        )
    return _norm(A, ord, dim, keepdim, out, dtype)


def _norm(x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None):
    return _vector_norm(x, 2 if p in (None, "fro") else p, dim, keepdim, dtype=dtype, out=out)


def _foreach_norm(tensors: Sequence[torch.Tensor], ord: float = 2, dtype: Any = None) -> list[torch.Tensor]:
    norms = [_vector_norm(t, ord) if isinstance(t, GradShard) else torch.linalg.vector_norm(t, ord) for t in tensors]
    return norms if dtype is None else [n.to(dtype) for n in norms]


_NORMS: dict[Any, Callable[..., Any]] = {
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.norm: _linalg_norm,
    torch.norm: _norm,
    torch.Tensor.norm: _norm,
    torch._foreach_norm: _foreach_norm,
}


def _unscale(grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    filled = [_plain(g) for g in grads if g.numel()]
    if filled:
        torch._amp_foreach_non_finite_check_and_unscale_(filled, found_inf, inv_scale)
    for source in dict.fromkeys(g.source() for g in grads if isinstance(g, GradShard)):  # alike on every rank
        source.any_rank(found_inf)
        source.invalidate()


def _refuse_whole_check(shard: GradShard) -> Any:
    raise ShardingError(
        f"a single number over (something computed from) the gradient of {shard._fqn!r} would be this rank's only. Use "
        f"model.clip_grad_norm_, torch.nn.utils.clip_grad_norm_ or torch.linalg.vector_norm(grad, p) for a global norm "
        f"(inf or nan show in it), or grad.local for this rank's part."
    )


_WHOLE_CHECK_NAMES = (
    "sum", "nansum", "prod", "mean", "nanmean", "max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "median",
    "nanmedian", "quantile", "nanquantile", "std", "var", "std_mean", "var_mean", "logsumexp", "count_nonzero", "dot",
    "vdot", "inner", "any", "all",
)  # fmt: skip
_WHOLE_CHECKS: dict[Any, Callable[[GradShard], Any]] = {
    getattr(where, name): _refuse_whole_check
    for where in (torch, torch.Tensor)
    for name in _WHOLE_CHECK_NAMES
    if hasattr(where, name)  # some are functions only
}


# ------------------------------------------------------------------ setting `p.grad`


def attach_grads(unit: Unit, source: GradSource, scale: float = 1.0) -> None:
    """After a synchronised backward: ``grad`` of every trainable parameter is its slice of ``scale * main_grad``.

    A gradient that is already there (no ``zero_grad`` since the last synchronised backward) is added.
    """
    for group in unit.trainable_groups:
        for param, local in zip(group.params, group.take_grads(scale), strict=True):
            param.earlier_grad = None  # left over where a hook raised before this parameter's turn
            p = param.sharded
            if not p.requires_grad:
                continue
            old = p.grad
            if old is not None and (getattr(old, "carried", False) or not getattr(old, "pending", False)):
                if local is None:
                    local = _plain(old)
                elif _tensor_hooks(param):
                    param.earlier_grad = _plain(old)  # hooks see what is new; `run_user_hooks` adds this
                else:
                    local.add_(_plain(old))
            p.grad = None if local is None else GradShard.make(local, param, source)


def attach_pending(unit: Unit, source: GradSource) -> None:
    """After a backward under ``no_sync()``: mark ``grad`` as not ready, at no memory."""
    for group in unit.trainable_groups:
        for param in group.params:
            p = param.sharded
            old = p.grad
            if p.requires_grad and old is None:
                local = torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape)
                p.grad = GradShard.make(local, param, source, pending=True)
            elif isinstance(old, GradShard):
                old.carried = old.carried or not old.pending
                old.pending = True
                old._layerzero_zeroed = False


def _tensor_hooks(param: Param) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
    """What the user registered with ``register_hook`` on the parameter at rest."""
    return [hook for hook in (param.sharded._backward_hooks or {}).values() if hook is not param.refusal]


def run_user_hooks(unit: Unit) -> None:
    """Hooks registered on the parameters at rest: autograd never reaches those, so they run here, on slices.

    Once per synchronised backward, with the gradient of all its micro-batches.
    """
    for group in unit.trainable_groups:
        for param in group.params:
            p, earlier = param.sharded, param.earlier_grad
            param.earlier_grad = None
            if p.grad is None:
                continue
            for hook in _tensor_hooks(param):
                changed = hook(p.grad)
                if changed is not None:
                    p.grad = changed
            if earlier is not None:
                p.grad.add_(earlier)
            for hook in list((p._post_accumulate_grad_hooks or {}).values()):
                hook(p)
