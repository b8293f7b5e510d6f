"""A param group's buffers and what is done with them: refresh, unshard, reduce. No hooks, no order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from layerzero.buffers import Gather, HandOvers, PackBuffers, Staged, TransientBuffer, held_view, poison, views
from layerzero.collectives import AxisComm, Scratch
from layerzero.errors import ShardingError
from layerzero.lanes import DONE, Event, Lanes
from layerzero.layout import GroupLayout, Range, TensorParallel
from layerzero.own_grads import OwnGrads
from layerzero.profiling import LaneJob
from layerzero.tensor_parallel import Spec, TensorRanks, check_replicas
from layerzero.whole_grads import WholeGrads


@dataclass(frozen=True)
class Comms:
    """Collectives of each lane, by axis."""

    unshard: dict[int, AxisComm] = field(default_factory=dict)
    refresh: dict[int, AxisComm] = field(default_factory=dict)
    reduce: dict[int, AxisComm] = field(default_factory=dict)
    sync: dict[int, AxisComm] = field(default_factory=dict)


@dataclass(frozen=True)
class Runtime:
    """What every param group of one sharded model shares."""

    rank: int  # data-parallel
    comms: Comms
    lanes: Lanes
    pack_buffers: PackBuffers
    hand_overs: HandOvers
    reduce_dtype: torch.dtype
    offload_grads: bool
    tensor: TensorRanks | None = None  # of a tensor-parallel model
    own_storages: set[int] = field(default_factory=set)  # see `OwnGrads`


@dataclass(frozen=True)
class ParamInfo:
    """What a sharded parameter is a slice of.

    Attributes:
        fqn: name in ``named_parameters()``; further names of a tied parameter are in ``aliases``.
        global_shape: shape of the whole parameter, over all tensor-parallel ranks.
        global_range: elements this rank holds of the flattened part of `local_shape`; without tensor
            parallelism, of the whole parameter.
        unit: name of the unit that gathers it; empty for the root.
        tensor_parallel: how the parameter is cut before data-parallel ranks share it; None without tensor
            parallelism. Replicated parameters of a tensor-parallel model have one with ``dim=None``.
        model_fqn: name in the whole model, of which the sharded module may be a pipeline stage.
        tied_to: name that copies of this parameter on several pipeline stages have in common, if there are any.
    """

    fqn: str
    global_shape: tuple[int, ...]
    global_range: Range
    unit: str
    aliases: tuple[str, ...] = ()
    tensor_parallel: TensorParallel | None = None
    model_fqn: str = ""
    tied_to: str | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part that this rank's data-parallel group shares: what modules compute with locally."""
        cut = self.tensor_parallel
        return self.global_shape if cut is None else cut.local_shape(self.global_shape)


class Param:
    """One parameter: the slice at rest and the full-shape tensor in use.

    Attributes:
        slots: the owners' `_parameters` dicts and keys: no reference to the module tree.
        spec: what kind of DTensor modules see; None for a plain tensor.
        local: view of the gathered buffer in the parameter's local shape, with a version counter of its own.
        unsharded: what modules see in forward and backward: a leaf over ``local``.
        sharded: what modules see at rest.
    """

    def __init__(
        self, info: ParamInfo, slots: list[tuple[dict[str, Any], str]], trainable: bool, spec: Spec | None = None
    ) -> None:
        self.info = info
        self.slots = slots
        self.spec = spec
        self.trainable = trainable
        self.local: torch.Tensor  # these three are set by the group once its buffers exist
        self.unsharded: nn.Parameter
        self.sharded: nn.Parameter
        self.refusal: Callable[..., Any] | None = None  # our hook on `sharded`; others there are the user's
        self.earlier_grad: torch.Tensor | None = None  # of earlier backwards, while the user's hooks run on the new one


@dataclass
class _Reduction:
    """One reduction under way; one that an exception abandoned must not get in the way of the next."""

    value: torch.Tensor | None = None
    handed_over: torch.Tensor | None = None  # from the reduce lane to the sync lane

    def drop_handed_over(self) -> None:
        self.handed_over = None


class ParamGroup:
    """Parameters of one unit with equal dtype, ``requires_grad`` and tensor-parallel placement, in one flat buffer.

    [Note: buffers]
    ``main`` (fp32, optimizer degree) is what the optimizer steps; a frozen group has none. ``model``
    (compute dtype, params degree) is a cache of it and is the same tensor where dtype and degree agree.
    ``unsharded`` (compute dtype, degree 1) has bytes only while the unit is unsharded, and is the same
    tensor as ``model`` where the params degree is 1.
    """

    def __init__(
        self, params: Sequence[Param], layout: GroupLayout, full: torch.Tensor, dtype: torch.dtype, runtime: Runtime
    ) -> None:
        """``full`` is the 1-D flat buffer [layout.numel] of initial values, in ``dtype`` when frozen."""
        self.params = list(params)
        self.layout = layout
        self.dtype = dtype
        self.trainable = params[0].trainable
        self.rank = runtime.rank
        self.comms = runtime.comms
        self._rt = runtime
        axes = layout.axes
        device = runtime.lanes.device

        def own(num_axes: int, as_dtype: torch.dtype) -> torch.Tensor:
            r = layout.slice(runtime.rank, num_axes)
            return full[r.start : r.stop].to(as_dtype, copy=True)

        self.main = own(axes.num_optimizer, torch.float32) if self.trainable else None
        self.aliased = self.trainable and dtype is torch.float32 and axes.num_params == axes.num_optimizer
        self.model = self.main if self.main is not None and self.aliased else own(axes.num_params, dtype)
        self._source = self.model if self.main is None else self.main  # what is at rest, of which others are made
        self._transient: TransientBuffer | None = None
        if axes.num_params:
            self._transient = TransientBuffer(layout.numel, dtype, device, runtime.lanes.poison)
        self.unsharded = self._transient.flat if self._transient is not None else self.model
        for param, view in zip(self.params, views(self.unsharded, layout), strict=True):
            # `.data =` keeps the tensor's own version counter: refilling the buffer between forward and
            # backward is then no in-place modification in autograd's eyes.
            param.local = view.new_empty(0)
            param.local.data = view
            seen = param.local if param.spec is None else param.spec.wrap(param.local)
            param.unsharded = nn.Parameter(seen, requires_grad=self.trainable)
        self._make_sharded()
        between = range(axes.num_params, axes.num_optimizer if self.trainable else axes.num_params)
        start = self.slice.start - layout.slice(runtime.rank, axes.num_params).start
        self._main_in_model = self.model[start : start + self.slice.numel]  # where `main` lies in `model`
        self._gather_model = Gather(self.model, layout, runtime.rank, runtime.comms.refresh, between)
        self._gather_unsharded = Gather(
            self.unsharded, layout, runtime.rank, runtime.comms.unshard, range(axes.num_params)
        )
        self.free()
        self.grad_accum: torch.Tensor | None = None  # fp32, grads degree
        self.with_grad: set[int] = set()  # kept with one rank only, where "no gradient" is known to be global
        self.is_replicated = runtime.tensor is not None and not any(is_cut(p.info) for p in self.params)
        has_replicas = axes.degree(axes.num_optimizer) <= runtime.rank
        has_tensor_replicas = self.is_replicated and runtime.tensor is not None and runtime.tensor.rank > 0
        self.counts = not (has_replicas or has_tensor_replicas)  # in norms: one of each set of replicas must
        self.tied_to = params[0].info.tied_to  # then there is one parameter, of which other stages have copies
        on_host = not runtime.offload_grads or device.type == "cpu"  # where gradients are wanted is where they are
        has_no_sums = runtime.tensor is None and self.tied_to is None
        self.own_grads = None
        if not axes.sizes and has_no_sums and on_host:
            self.own_grads = OwnGrads(len(self.params), runtime.own_storages)
        self.whole_grads = None
        if axes.sizes and not axes.num_grads and not self.is_replicated and on_host:
            self.whole_grads = WholeGrads(layout, device)
        self._reduction: _Reduction | None = None
        self._staged: dict[int, Staged] = {}  # by slot of `pack_buffers`
        self.stale = False
        self._version = self._source._version
        self.checksum: torch.Tensor | None = None

    def _make_sharded(self) -> None:
        axes = self.layout.axes
        flat, num_axes = self._source, axes.num_params if self.main is None else axes.num_optimizer
        self.slice = self.layout.slice(self._rt.rank, num_axes)
        self._places: list[tuple[torch.Size, tuple[int, ...], int]] = []  # shapes, strides and offsets in the slice
        for i, param in enumerate(self.params):
            held = self.layout.held(i, self._rt.rank, num_axes)
            offset = max(0, min(self.layout.params[i].start + held.start - self.slice.start, flat.numel()))
            view = held_view(flat, offset, held, len(param.info.global_shape))
            param.sharded = nn.Parameter(view, requires_grad=self.trainable)
            param.info = replace(param.info, global_range=held)
            param.sharded._layerzero_info = param.info  # type: ignore[attr-defined]
            self._places.append((view.shape, view.stride(), offset))

    def shared_buffers(self) -> Iterator[PackBuffers | Scratch]:
        """Memory that stays from step to step and that other groups use too."""
        yield self._rt.pack_buffers
        for lane in (self.comms.unshard, self.comms.refresh, self.comms.reduce, self.comms.sync):
            yield from (comm.scratch for comm in lane.values())

    # ------------------------------------------------------------------ refresh: main -> model

    def changed_in_place(self) -> bool:
        """Whether an in-place operation touched what is at rest since `mark_refreshed`; ``.data`` hides it."""
        return self._source._version != self._version

    def check_storage(self) -> None:
        """Raise if a parameter no longer lies in the flat buffer, or modules have another one at rest."""
        storage = self._source.untyped_storage().data_ptr()
        for param, (*_, offset) in zip(self.params, self._places, strict=True):
            p = param.sharded  # ranks that hold nothing of it notice too, so that all raise together
            if p.untyped_storage().data_ptr() != storage or p.storage_offset() != offset:
                raise ShardingError(
                    f"parameter {param.info.fqn!r} was moved out of the engine's buffer (`p.data = ...`, "
                    f"module.to(...) or similar): its new values would be ignored. Write into it instead "
                    f"(`p.copy_(...)` under torch.no_grad), and choose device and dtype before sharding."
                )
            if any(slots.get(name) is not p for slots, name in param.slots):
                raise ShardingError(
                    f"parameter {param.info.fqn!r} was replaced after lz.shard (`module.name = nn.Parameter(...)`, "
                    f"torch.func.functional_call or similar): the new one would be ignored. Write into the old one "
                    f"instead (`p.copy_(...)` under torch.no_grad, or inside `with model.unsharded():` in full shape)."
                )

    def mark_refreshed(self) -> None:
        """Whatever is gathered or refreshed from now on is made from what is at rest now."""
        self._version = self._source._version
        self.stale = False
        self.checksum = None

    def refresh(self) -> None:
        """Lane job: rebuild `model` from every rank's `main`."""
        assert self.main is not None
        self._main_in_model.copy_(self.main)
        self._gather_model(self._main_in_model)

    # ------------------------------------------------------------------ unshard, reshard

    def unshard(self) -> None:
        """Lane job: gather the full parameters."""
        if self._transient is None:
            return
        self._transient.alloc()
        self._gather_unsharded(self.model)

    def free(self) -> None:
        """Lane job: give the gathered bytes back."""
        if self._transient is not None:
            self._transient.free()

    def invalidate_unsharded(self) -> None:
        """From now on nothing may read the gathered values; see [Note: adversarial lanes]."""
        if self._transient is not None:
            self._transient.invalidate()

    def invalidate_model(self) -> None:
        """From now until the refresh job has run nothing may read `model`."""
        if self._rt.lanes.poison and not self.aliased:
            poison(self.model)

    # ------------------------------------------------------------------ reduce: unsharded grads -> main_grad

    def reduces_at_once(self, sync: bool, timeout: float) -> bool:
        """Whether `reduce` waits at most ``timeout`` seconds for earlier reductions, which peers have to join."""
        adds_only = self.own_grads is not None or (self.whole_grads is not None and not sync)
        return adds_only or not self.layout.axes.sizes or self._rt.pack_buffers.is_free(timeout)

    def reduce(self, sync: bool) -> Event:
        """Pack the gradients and start their reduction; accumulate only unless ``sync``."""
        rt, axes = self._rt, self.layout.axes
        zeroed = [i for i, p in enumerate(self.params) if p.sharded.grad is None or is_zeroed(p.sharded.grad)]
        self.with_grad.difference_update(zeroed)
        grads, is_sum = self._local_grads()
        for param in self.params:
            param.unsharded.grad = None
        if self.own_grads is not None:
            self.own_grads.add(grads, zeroed)
            return DONE
        if self.whole_grads is not None and not sync:
            self.whole_grads.add(grads, zeroed)
            return DONE
        slot, wire = self._pack(grads, is_sum, zeroed)
        split = max(axes.num_grads, 1) if axes.sizes else 0
        has_outer = len(axes.sizes) > split
        reduction = self._reduction = _Reduction()

        def inner() -> None:
            with LaneJob("reduce", self.params[0].info.unit):
                self._drop_accumulated(zeroed)
                value = self._reduce_inner(wire, sync)
                if sync:
                    for axis in range(axes.num_grads, split):
                        value = self._reduce_axis(value, axis, rt.comms.reduce)
                    reduction.value = value if has_outer else self._sum_replicas(value)

        def outer() -> None:
            with LaneJob("sync", self.params[0].info.unit):
                value = reduction.value
                assert value is not None
                reduction.handed_over = value if rt.lanes.module is not None else None
                for axis in range(split, len(axes.sizes)):
                    value = self._reduce_axis(value, axis, rt.comms.sync)
                reduction.value = self._sum_replicas(value)

        event = rt.lanes.reduce.run(inner, after=[rt.lanes.compute()])
        if slot >= 0:
            rt.pack_buffers.reading(slot, event)
        if sync and has_outer:
            event = rt.lanes.sync.run(outer, after=[event])
            if rt.lanes.module is not None:  # threads share one allocator
                rt.hand_overs.add(event, reduction.drop_handed_over)
        return event

    def _pack(
        self, grads: Sequence[torch.Tensor | None], is_sum: Sequence[bool], zeroed: Sequence[int]
    ) -> tuple[int, torch.Tensor]:
        """The gradients, plus earlier micro-batches' where those are whole, as a flat buffer [numel] in its slot."""
        rt = self._rt
        if self.layout.axes.sizes:
            slot, wire = rt.pack_buffers.take(self.layout.numel, rt.reduce_dtype)
            staged = self._staged.get(slot)
            if staged is None or staged.wire is not wire:
                self._staged[slot] = staged = Staged(wire, self.layout)
        else:  # one rank: what is packed is the result
            slot, wire = -1, self.model.new_empty(self.layout.numel, dtype=torch.float32)
            staged = Staged(wire, self.layout)
            self.with_grad.update(i for i, grad in enumerate(grads) if grad is not None)
        if self.whole_grads:
            self.whole_grads.take(grads, zeroed, staged)
        else:
            staged.pack(grads)
        if rt.tensor is not None and self.is_replicated:
            whole = [
                v for v, part, grad in zip(staged.views, is_sum, grads, strict=True) if grad is not None and not part
            ]
            if whole:
                torch._foreach_mul_(whole, 1.0 / rt.tensor.size)
        return slot, wire

    def _local_grads(self) -> tuple[list[torch.Tensor | None], list[bool]]:
        """Of every parameter: the gradient's local tensor, and whether tensor-parallel ranks hold parts of a sum."""
        grads: list[torch.Tensor | None] = [param.unsharded.grad for param in self.params]
        is_sum = [False] * len(grads)
        if self._rt.tensor is None:
            return grads, is_sum
        for i, (param, grad) in enumerate(zip(self.params, grads, strict=True)):
            if param.spec is not None and grad is not None:
                grads[i], is_sum[i] = param.spec.local_grad(grad)
        return grads, is_sum

    def check_replicas(self) -> None:
        """Raise if tensor-parallel ranks hold different gradients of a plain parameter; see there."""
        plain = [p for p in self.params if p.spec is None]
        if self._rt.tensor is not None and plain:
            check_replicas([p.info.fqn for p in plain], [p.unsharded.grad for p in plain], self._rt.tensor)

    def _sum_replicas(self, value: torch.Tensor) -> torch.Tensor:
        """Lane job: the last move of a reduction, over the tensor-parallel ranks that hold the same parameters."""
        if self._rt.tensor is None or not self.is_replicated:
            return value
        return self._rt.tensor.comm.all_reduce_sum(value.float())

    def _reduce_inner(self, wire: torch.Tensor, sync: bool) -> torch.Tensor:
        """Mean over the axes inside the grads degree, plus earlier micro-batches'; kept unless ``sync``."""
        rt, num_grads = self._rt, self.layout.axes.num_grads
        accum = self.grad_accum
        if not num_grads or (accum is not None and accum.device != wire.device):
            value = wire
            for axis in range(num_grads):
                value = rt.comms.reduce[axis].reduce_scatter_mean(value.to(rt.reduce_dtype))
            return self._accumulate(value, sync)
        value = wire
        for axis in range(num_grads - 1):
            value = rt.comms.reduce[axis].reduce_scatter_mean(value, dtype=rt.reduce_dtype)
        dtype = self._wire_after(num_grads - 1) if sync else torch.float32
        value = rt.comms.reduce[num_grads - 1].reduce_scatter_mean(value, accum, dtype)
        if sync:
            self.grad_accum = None
        elif accum is None:
            self.grad_accum = self._to_accum(value)
        return value

    def _wire_after(self, axis: int) -> torch.dtype:
        """Dtype in which what was reduced along ``axis`` is wanted: that of the wire if it goes on, else fp32."""
        return self._rt.reduce_dtype if axis + 1 < len(self.layout.axes.sizes) else torch.float32

    def _reduce_axis(self, value: torch.Tensor, axis: int, comms: dict[int, AxisComm]) -> torch.Tensor:
        wire = value.to(self._rt.reduce_dtype)
        if axis < self.layout.axes.num_optimizer:
            return comms[axis].reduce_scatter_mean(wire, dtype=self._wire_after(axis))
        return comms[axis].all_reduce_mean(wire, dtype=self._wire_after(axis))

    def _accumulate(self, value: torch.Tensor, sync: bool) -> torch.Tensor:
        """Add ``value`` at the grads degree to what earlier micro-batches left; what they sum to."""
        if self.grad_accum is None:
            if not sync:
                self.grad_accum = self._to_accum(value)
            return value
        if self.grad_accum.device == value.device:
            total = self.grad_accum.add_(value)
        else:  # through the device, so that nothing waits for the host
            total = self.grad_accum.to(value.device, non_blocking=True).add_(value)
            if not sync:
                self.grad_accum.copy_(total, non_blocking=True)
        if sync:
            self.grad_accum = None
        return total

    def _to_accum(self, value: torch.Tensor) -> torch.Tensor:
        if self._rt.offload_grads and value.device.type != "cpu":
            host = torch.empty(value.numel(), dtype=torch.float32, pin_memory=True)
            return host.copy_(value, non_blocking=True)
        # A result of a reduction is ours to keep; the packed buffer is not.
        return value.to(torch.float32, copy=self.layout.axes.num_grads == 0 and bool(self.layout.axes.sizes))

    def drop_reduced(self) -> None:
        """Forget the gradient of a synchronised backward that did not end."""
        self._reduction = None
        if self.own_grads is not None:
            self.own_grads.take()

    @property
    def is_reduced(self) -> bool:
        """Whether there is a synchronised gradient that nobody took."""
        return self._reduction is not None and self._reduction.value is not None

    @property
    def reduced(self) -> torch.Tensor:
        """The synchronised gradient [main numel], fp32, after the reduction's event and before `take_main_grad`."""
        assert self._reduction is not None and self._reduction.value is not None
        self._reduction.value = self._reduction.value.float()
        return self._reduction.value

    def take_main_grad(self) -> torch.Tensor:
        """The synchronised gradient [main numel], fp32; call after the reduction's event."""
        value, self._reduction = self.reduced, None
        return value

    def take_grads(self, scale: float) -> list[torch.Tensor | None]:
        """``scale`` times every parameter's synchronised gradient, fp32, shaped like the parameter at rest.

        None where there is certainly none on any rank; call after the reduction's event.
        """
        if self.own_grads is not None:
            sums = self.own_grads.take()
            present = [s for s in sums if s is not None]
            if scale != 1.0 and present:
                torch._foreach_mul_(present, scale)
            places = zip(sums, self._places, strict=True)
            return [None if s is None else s.as_strided(shape, stride) for s, (shape, stride, _) in places]
        main_grad = self.take_main_grad()
        if scale != 1.0:
            main_grad.mul_(scale)
        known = range(len(self.params)) if self.layout.axes.sizes else frozenset(self.with_grad)
        self.with_grad.clear()
        return [self._grad_view(main_grad, i) if i in known else None for i in range(len(self.params))]

    def _grad_view(self, main_grad: torch.Tensor, index: int) -> torch.Tensor:
        shape, stride, offset = self._places[index]
        return main_grad.as_strided(shape, stride, main_grad.storage_offset() + offset)

    def write_back(self) -> None:
        """Keep edits of the unsharded parameters, which are the same on every rank: both `main` and `model` follow.

        Elements that were not edited keep the precision they have in `main`.
        """
        flat = self._source
        edited = self.unsharded[self.slice.start : self.slice.stop]
        bits, before = edited.view(torch.uint8), flat.to(self.dtype).view(torch.uint8)
        differs = (bits != before).view(-1, edited.element_size()).any(1)
        if bool(differs.any()):
            flat.copy_(torch.where(differs, edited.to(flat.dtype), flat))
            self.checksum = None
            self._version = flat._version
        if self._transient is not None and not self.aliased:
            r = self.layout.slice(self._rt.rank, self.layout.axes.num_params)
            self.model.copy_(self.unsharded[r.start : r.stop])

    def _drop_accumulated(self, zeroed: Sequence[int]) -> None:
        """Lane job: forget earlier micro-batches of parameters whose grad was zeroed since."""
        if self.grad_accum is None:
            return
        if len(zeroed) == len(self.params):
            self.grad_accum = None
            return
        r = self.layout.slice(self._rt.rank, self.layout.axes.num_grads)
        parts = [part for i in zeroed if (part := self.layout.params[i].intersect(r).shift(-r.start)).numel]
        if parts and self._rt.lanes.module is not None and self.grad_accum.device != self.model.device:
            self._rt.lanes.module.current_stream().synchronize()  # else the copy to the host may overtake the zeros
        for part in parts:
            self.grad_accum[part.start : part.stop].zero_()


def is_cut(info: ParamInfo) -> bool:
    """Whether tensor-parallel ranks hold different parts of the parameter."""
    return info.tensor_parallel is not None and info.tensor_parallel.dim is not None


def is_zeroed(grad: torch.Tensor) -> bool:
    """Whether a pending gradient was zeroed in place; see `layerzero.grads`."""
    return getattr(grad, "_layerzero_zeroed", False)
