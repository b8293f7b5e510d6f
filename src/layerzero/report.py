"""What a sharded model holds and sends: measured by the engine, and by formula for any strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from layerzero.collectives import CONTROL
from layerzero.engine import Engine
from layerzero.errors import ConfigError
from layerzero.group import ParamGroup
from layerzero.layout import GroupLayout, padding_ratio
from layerzero.module import engine_of
from layerzero.sharding import Axes, Sharding

_MAIN_NBYTES = 4  # fp32
_NUM_ADAM_STATES = 2


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of model state on this rank.

    Attributes:
        main: fp32 parameters that the optimizer steps.
        model: compute-dtype parameters; 0 where they are the same memory as `main`.
        optimizer: the optimizer's states for Adam (two fp32 values per element of `main`).
        main_grad: fp32 gradients from a synchronised backward to ``zero_grad``, with the flat buffers' padding, which
            one rank alone does without.
        grad_accum: fp32 gradients held between micro-batches, while accumulating; padding likewise.
        buffers: memory beside the states that has stayed from step to step so far: gradients on their way out, what
            lanes on the host receive in, and on CPUs the sums of whole gradients (``accumulate="full"``), in which
            `grad_accum` then lies.
        unsharded: largest sum of gathered parameters alive at once, in bytes, root unit included.
        padding_ratio: padding over parameter elements.
        persistent: ``main + model + optimizer``.
    """

    main: int
    model: int
    optimizer: int
    main_grad: int
    grad_accum: int
    buffers: int
    unsharded: int
    padding_ratio: float

    @property
    def persistent(self) -> int:
        """Bytes held for as long as training lasts."""
        return self.main + self.model + self.optimizer

    def __str__(self) -> str:
        rows = [
            ("main parameters, fp32", self.main),
            ("model parameters, compute dtype", self.model),
            ("optimizer states, Adam", self.optimizer),
            ("persistent", self.persistent),
            ("gradients, until zero_grad", self.main_grad),
            ("gradients while accumulating", self.grad_accum),
            ("buffers that stay", self.buffers),
            ("unsharded parameters, at most", self.unsharded),
        ]
        body = [(name, _mib(nbytes)) for name, nbytes in rows]
        return _table(("model state on this rank", "MiB"), body) + f"\npadding {self.padding_ratio:.3%} of parameters"


@dataclass(frozen=True)
class TrafficRow:
    """One kind of collective along one axis, per optimizer step and rank."""

    op: str
    axis: int
    size: int
    num: float
    nbytes: float


@dataclass(frozen=True)
class TrafficReport:
    """Collectives since construction (or the last reset) per optimizer step, from the engine's counters.

    Attributes:
        rows: one per operation and axis, innermost axis first; control messages have axis -1.
        num_steps: synchronised backwards counted.
        peak_unsharded_units: units other than the root that were gathered at once, at most.
        communication_seconds: per step, while at least one lane was at work: in collectives, waiting for other
            ranks there included, or in the sums and copies around them. None where lanes are streams.
        exposed_seconds: per step, while the compute thread waited for a lane. None where lanes are streams.
    """

    rows: tuple[TrafficRow, ...]
    num_steps: int
    peak_unsharded_units: int
    communication_seconds: float | None = None
    exposed_seconds: float | None = None

    @property
    def exposed_share(self) -> float | None:
        """Part of the communication that compute did not hide: `exposed_seconds` over `communication_seconds`.

        0 means that the step takes as long as it would with an infinitely fast network and free processors for
        the lanes; 1 that compute stood still whenever something was sent. None where it is not measured.
        """
        if self.communication_seconds is None or self.exposed_seconds is None:
            return None
        return self.exposed_seconds / self.communication_seconds if self.communication_seconds else 0.0

    def nbytes(self, axis: int) -> float:
        """Bytes per step this rank sends along ``axis``."""
        return sum(row.nbytes for row in self.rows if row.axis == axis)

    def __str__(self) -> str:
        body = [
            (
                row.op, "-" if row.axis == CONTROL else f"{row.axis} (x{row.size})", f"{row.num:.1f}", _mib(row.nbytes),
            )
            for row in self.rows
        ]  # fmt: skip
        table = _table(("operation", "axis", "collectives/step", "MiB sent/step"), body)
        what = "of model states and gradients; activations of tensor, context and pipeline parallelism are not counted"
        units = f"at most {self.peak_unsharded_units} units unsharded beside the root"
        text = f"{table}\n{what}\n{self.num_steps} steps; {units}"
        if self.exposed_share is None:
            return text
        return f"{text}\n{self.communication_seconds:.3f} s communicating per step, {self.exposed_share:.0%} exposed"


@dataclass(frozen=True)
class StrategyRow:
    """What one strategy would hold and send for a model, by formula.

    Attributes:
        persistent_nbytes: main, model and Adam states per rank.
        accumulating_nbytes: gradients held between micro-batches.
        sent_nbytes: bytes one rank sends per optimizer step along every axis of the comparison.
    """

    name: str
    persistent_nbytes: int
    accumulating_nbytes: int
    sent_nbytes: tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    """Strategies side by side on one model; ``str()`` is a table."""

    rows: tuple[StrategyRow, ...]
    axis_sizes: tuple[int, ...]
    micro_batches: int

    def __str__(self) -> str:
        axes = [f"MiB sent/step, axis {i} (x{size})" for i, size in enumerate(self.axis_sizes)]
        body = [
            (r.name, _mib(r.persistent_nbytes), _mib(r.accumulating_nbytes), *map(_mib, r.sent_nbytes))
            for r in self.rows
        ]
        head = ("strategy", "MiB persistent", "MiB accumulating", *axes)
        return _table(head, body) + f"\nper rank, {self.micro_batches} micro-batches per step"


def memory_report(model: nn.Module) -> MemoryReport:
    """Bytes of model state on this rank, from the engine's own buffers.

    Raises:
        ShardingError: if ``model`` is not sharded.
    """
    engine = engine_of(model)
    groups = [g for u in engine.units for g in u.groups]
    main = sum(_nbytes(g.main) for g in groups if g.main is not None)
    trainable = [g for g in groups if g.trainable]
    accum = sum(g.layout.numel // engine.axes.degree(engine.axes.num_grads) * 4 for g in trainable)
    return MemoryReport(
        main=main,
        model=sum(_nbytes(g.model) for g in groups if g.model is not g.main),
        optimizer=_NUM_ADAM_STATES * main,
        main_grad=main,
        grad_accum=accum,
        buffers=_buffers_nbytes(groups),
        unsharded=_largest_unsharded(engine),
        padding_ratio=padding_ratio(engine.layouts),
    )


def _buffers_nbytes(groups: Sequence[ParamGroup]) -> int:
    shared = {id(buffer): buffer.nbytes for group in groups for buffer in group.shared_buffers()}
    return sum(shared.values()) + sum(g.whole_grads.nbytes for g in groups if g.whole_grads is not None)


def traffic_report(model: nn.Module, reset: bool = False) -> TrafficReport:
    """Collectives per optimizer step from the engine's counters; ``reset`` starts counting anew.

    Raises:
        ShardingError: if ``model`` is not sharded.
    """
    engine = engine_of(model)
    traffic, steps = engine.traffic, max(1, engine.traffic.num_synced_backwards)
    rows = tuple(
        TrafficRow(op, axis, engine.axes.sizes[axis] if axis != CONTROL else engine.axes.world_size,
                   count.num / steps, count.nbytes / steps)
        for op, axis, count in sorted(traffic, key=lambda row: (row[1] == CONTROL, row[1]))
    )  # fmt: skip
    clock = engine.lanes.clock
    report = TrafficReport(
        rows, traffic.num_synced_backwards, traffic.peak_unsharded_units,
        communication_seconds=None if clock is None else clock.working / steps,
        exposed_seconds=None if clock is None else clock.exposed / steps,
    )  # fmt: skip
    if reset:
        traffic.reset()
        if clock is not None:
            clock.reset()
    return report


def compare_strategies(
    model: nn.Module, strategies: Mapping[str, Sharding] | None = None, *, micro_batches: int = 1
) -> Comparison:
    """What other strategies would hold and send for this model on these ranks, in its dtypes.

    Args:
        model: a sharded model.
        strategies: by display name; by default ZeRO-1, ZeRO-3 and HSDP next to the model's own.
        micro_batches: per optimizer step.

    Raises:
        ShardingError: if ``model`` is not sharded.
        ConfigError: a strategy's degrees are none of those that the model's axes have.
    """
    engine = engine_of(model)
    axes = engine.axes
    node = axes.degree(axes.num_params) if 0 < axes.num_params < len(axes.sizes) else axes.degree(1)
    own = engine.config.resolve_sharding()
    strategies = strategies or {
        f"{engine.config.sharding if isinstance(engine.config.sharding, str) else 'own degrees'} (this model)": own,
        "zero1": Sharding.zero1(),
        "zero3": Sharding.zero3(),
        f"hsdp({node})": Sharding.hsdp(node),
    }
    param, grad = engine.config.param_torch_dtype, engine.config.reduce_torch_dtype
    rows = []
    for name, sharding in strategies.items():
        resolved = _on_axes(name, sharding, axes)
        sent = [0] * len(axes.sizes)
        for unit in engine.units:
            for group in unit.groups:
                gathers = engine.schedule.gathers_per_step(unit, micro_batches)
                for axis, nbytes in enumerate(
                    sent_per_axis(group.layout.numel, resolved, param, grad, gathers, micro_batches, group.trainable)
                ):
                    sent[axis] += nbytes
        rows.append(_strategy_row(name, engine.layouts_trainable, engine.layouts_frozen, resolved, param, tuple(sent)))
    return Comparison(tuple(rows), axes.sizes, micro_batches)


def sent_per_axis(
    numel: int,
    axes: Axes,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    num_gathers: int,
    micro_batches: int,
    trainable: bool = True,
) -> Iterator[int]:
    """Bytes one rank sends per optimizer step along each axis, for one param group of ``numel`` elements.

    The table of moves between degrees in ``docs/design.md``, as integers.
    """
    for axis, size in enumerate(axes.sizes):
        shard = numel // axes.degree(axis + 1)
        nbytes = 0
        if axis < axes.num_params:
            nbytes += num_gathers * shard * (size - 1) * param_dtype.itemsize
        if trainable and axes.num_params <= axis < axes.num_optimizer:
            nbytes += shard * (size - 1) * param_dtype.itemsize
        if trainable and axis < axes.num_grads:
            nbytes += micro_batches * shard * (size - 1) * reduce_dtype.itemsize
        elif trainable and axis < axes.num_optimizer:
            nbytes += shard * (size - 1) * reduce_dtype.itemsize
        elif trainable:
            nbytes += 2 * (numel // axes.degree(axes.num_optimizer)) // size * (size - 1) * reduce_dtype.itemsize
        yield nbytes


def _on_axes(name: str, sharding: Sharding, axes: Axes) -> Axes:
    """``sharding`` on the axes of the comparison; its degrees must be prefixes of them."""
    degrees = [axes.degree(i) for i in range(len(axes.sizes) + 1)]
    other = {d for d in vars(sharding).values() if d != "all"} - set(degrees)
    if other:
        raise ConfigError(
            f"compare_strategies: {name!r} has degree {min(other)}, but the model's axes have {degrees}: compare "
            f"degrees among these, or shard the model with a node_size that adds one"
        )
    at = [degrees.index(axes.world_size if d == "all" else d) for d in vars(sharding).values()]
    return Axes(axes.sizes, *at)


def _strategy_row(
    name: str,
    trainable: Sequence[GroupLayout],
    frozen: Sequence[GroupLayout],
    axes: Axes,
    param_dtype: torch.dtype,
    sent: tuple[int, ...],
) -> StrategyRow:
    params, grads, optimizer = (axes.degree(n) for n in (axes.num_params, axes.num_grads, axes.num_optimizer))
    numel = sum(layout.numel for layout in trainable)
    aliased = param_dtype is torch.float32 and params == optimizer
    model = (0 if aliased else numel // params) + sum(layout.numel for layout in frozen) // params
    persistent = model * param_dtype.itemsize + (1 + _NUM_ADAM_STATES) * _MAIN_NBYTES * (numel // optimizer)
    return StrategyRow(name, persistent, _MAIN_NBYTES * (numel // grads), sent)


def _largest_unsharded(engine: Engine) -> int:
    def size(unit) -> int:
        return sum(g.layout.numel * g.dtype.itemsize for g in unit.groups if g.layout.axes.num_params)

    always = {engine.units[0], *engine.schedule.kept}
    others = sorted((size(u) for u in engine.units if u not in always), reverse=True)
    return sum(map(size, always)) + sum(others[: 1 + engine.config.prefetch_depth])


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.2f}"


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([line(head), "  ".join("-" * w for w in widths), *map(line, body)])
