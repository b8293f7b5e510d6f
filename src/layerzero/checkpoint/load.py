"""`layerzero.load`: every rank reads the ranges it needs, whatever layout they were saved with."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from layerzero.checkpoint import folder as folders
from layerzero.checkpoint.manifest import VALUE
from layerzero.checkpoint.model_state import ModelState, Named, check_arguments, model_states
from layerzero.checkpoint.optimizer_state import as_list, names_of_params, shared_options
from layerzero.checkpoint.ranks import Ranks
from layerzero.checkpoint.save import wait_for_pending
from layerzero.checkpoint.source import Source, Wanted
from layerzero.checkpoint.values import decode, refuse_tensor
from layerzero.errors import CheckpointError, DesyncError
from layerzero.module import engine_of
from layerzero.warnings_ import warn


@dataclass(frozen=True)
class Loaded:
    """What a load found.

    Attributes:
        step: the number given to `save`; 0 for plain safetensors files.
        has_optimizer: whether it holds optimizer states.
        extra: what was given to `save`, tensors in host memory.
        rank_extra: of this rank; None if the checkpoint is of another number of ranks.
        missing: names of the model (and "optimizer state of ...") that the checkpoint lacks: they keep their values.
        unexpected: names of the checkpoint that the model lacks.
        mismatched: what has another shape there, with both: not loaded.
    """

    folder: Path
    step: int
    has_optimizer: bool = False
    extra: Any = None
    rank_extra: Any = None
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()


def load(
    path: str | os.PathLike[str],
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: int | None = None,
    strict: bool = True,
) -> Loaded:
    """Load a checkpoint into a sharded model, and optimizers, of any layout. Call it on every rank of the job.

    Number of ranks, strategy, tensor-parallel and pipeline layout, param groups and compute dtype may all differ from
    those it was saved with. Each rank reads only what it needs and verifies the checksums of what it reads.

    Args:
        path: a run's folder, of which the latest checkpoint is taken; a checkpoint's folder; or plain safetensors: a
            file, or a folder with files and their index, for weights only.
        model: the sharded model, or the pipeline stages on this rank.
        optimizer: one or several, as built after ``lz.shard``; None loads weights only. Hyper-parameters are loaded by
            parameter; where a group here joins ones that differed, those keep their present value and a warning says
            so.
        step: a certain checkpoint of a run's folder.
        strict: refuse missing, unexpected and mismatched names, listing them; else load the rest and return them.

    Raises:
        CheckpointError: absent, damaged, or not fitting the model; on every rank. Names and shapes are compared before
            anything is changed.
        DesyncError: ranks disagree on the arguments.
    """
    ranks = Ranks.all()
    wait_for_pending(ranks)
    plan: _Plan | None = None
    seen = ""  # the checkpoint, so that ranks which see another one notice
    error: Exception | None = None
    arguments: dict[str, Any] = {}
    try:
        if torch.is_inference_mode_enabled():
            raise CheckpointError("lz.load inside torch.inference_mode(): its tensors can't be trained; load outside")
        check_arguments("lz.load", path, model, optimizer)
        kinds = [type(o).__name__ for o in as_list(optimizer)]
        number = None if step is None else operator.index(step)
        arguments = {"path": os.path.abspath(path), "step": number, "strict": bool(strict), "optimizers": kinds}
    except Exception as e:
        error = e
    ranks.agree("nothing was loaded", error)
    ranks.check_same("lz.load", arguments)
    if ranks.rank == 0:
        with contextlib.suppress(OSError):  # where nothing can be written, nothing is left to recover
            folders.recover(Path(path))
    ranks.gather(None)  # the others look only now
    try:
        source = Source.open(Path(path), arguments["step"])
        plan = _plan(source, model_states(model, include_ignored=True), as_list(optimizer))
        seen = f"{source.folder} ({source.fingerprint()})"
    except Exception as e:
        error = e
    ranks.agree("nothing was loaded", error)
    assert plan is not None
    plan.find_unexpected(ranks, seen)
    try:
        if strict:
            plan.refuse_differences()
    except CheckpointError as e:
        error = e
    ranks.agree("nothing was loaded", error)
    result: Loaded | None = None
    try:
        plan.run()
        result = plan.result(ranks)
    except Exception as e:
        error = e
    ranks.agree("the model may now hold a mixture; load another checkpoint before going on", error)
    assert result is not None
    for state in plan.states:
        state.engine.resume_pending = False
    return result


def resume(
    model: nn.Module | Sequence[nn.Module], optimizer: Optimizer | Sequence[Optimizer] | None = None
) -> Loaded | None:
    """Load the checkpoint that the configuration's ``ckpt_load_path`` names; None if it names none.

    ``lz.shard`` has loaded the weights; this also loads the optimizers' states and returns ``extra``. Without
    ``optimizer`` training goes on from the weights with fresh states.

    Raises:
        ShardingError, CheckpointError, DesyncError: as from `load`.
    """
    engines = [engine_of(m) for m in ([model] if isinstance(model, nn.Module) else model)]
    path = engines[0].config.ckpt_load_path
    result = None if path is None else load(path, model, optimizer)
    for engine in engines:
        engine.resume_pending = False
    return result


@dataclass
class _Plan:
    """What to read and what differs; made without communication and without changing anything."""

    source: Source
    states: list[ModelState]
    wanted: list[Wanted] = field(default_factory=list)
    optimizers: list[tuple[Optimizer, dict[str, Any]]] = field(default_factory=list)  # with a state_dict to load
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # not contiguous, and what is read
    used: set[str] = field(default_factory=set)  # tensors of the checkpoint
    optimized: set[str] = field(default_factory=set)  # of those, with a param group here
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def find_unexpected(self, ranks: Ranks, seen: str) -> None:
        """What no rank uses: other pipeline stages take theirs. ``seen`` has to be the same everywhere. Collective."""
        first = any(state.engine.rank == 0 for state in self.states)
        told = ranks.gather([seen, *((sorted(self.used), sorted(self.optimized)) if first else ((), ()))])
        folders = dict.fromkeys(folder for folder, _, _ in told)
        if len(folders) > 1:
            raise DesyncError(
                f"lz.load: ranks see different checkpoints: {', '.join(folders)}. The folder has to be on a file "
                f"system that all ranks share."
            )
        used = set().union(*(names for _, names, _ in told))
        self.unexpected += [name for name in self.source.manifest.tensors if name not in used]
        record = self.source.manifest.optimizer
        if self.optimizers and record is not None:
            optimized = set().union(*(names for _, _, names in told))
            saved = [name for group in record.groups for name in group.params]
            self.unexpected += [f"optimizer state of {name}" for name in saved if name in used - optimized]

    def refuse_differences(self) -> None:
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "different": self.mismatched}
        lines = [f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names]
        if lines:
            raise CheckpointError(
                f"{self.source.folder} does not fit the model. {'; '.join(lines)}. Pass strict=False to load the rest."
            )

    def run(self) -> None:
        try:
            with torch.no_grad():
                self.source.read(self.wanted)
            for optimizer, state_dict in self.optimizers:
                optimizer.load_state_dict(state_dict)
            for tensor, read in self.copies:
                with torch.no_grad():
                    tensor.copy_(read.view(tensor.shape))
        finally:  # ranks that fail at different places must not decide differently what to refresh
            for state in self.states:
                state.engine.refresher.mark_all_stale()
        for text in self.warnings:
            warn(text)

    def result(self, ranks: Ranks) -> Loaded:
        manifest = self.source.manifest
        rank_extra = manifest.rank_extra
        mine = rank_extra[ranks.rank] if rank_extra is not None and len(rank_extra) == ranks.size else None
        return Loaded(
            self.source.folder, manifest.step, manifest.optimizer is not None, self.source.decode(manifest.extra),
            self.source.decode(mine), tuple(self.missing), tuple(self.unexpected), tuple(self.mismatched),
        )  # fmt: skip


def _plan(source: Source, states: list[ModelState], optimizers: list[Optimizer]) -> _Plan:
    plan = _Plan(source, states)
    names_there: dict[int, list[str]] = {}  # by id of the tensor here; several where it is tied only here
    for state in states:
        for named in state.all():
            names = [source.by_name[name] for name in (named.name, *named.aliases) if name in source.by_name]
            plan.used.update(names)
            if not names:
                if not named.name.startswith(tuple(f"{prefix}." for prefix in state.left_out)):
                    plan.missing.append(named.name)
                continue
            shape = source.manifest.tensors[names[0]].shape
            if shape != named.placement.full:
                plan.mismatched.append(f"{named.name} ({list(shape)} there, {list(named.placement.full)} here)")
                continue
            names_there[id(named.tensor)] = names
            if any(not _equal(source, names[0], other, named) for other in names[1:]):
                plan.mismatched.append(f"{', '.join(names)} (one tensor here, different values there)")
            out = named.tensor.detach()
            if not out.is_contiguous():
                plan.copies.append((out, out := torch.empty_like(out, memory_format=torch.contiguous_format)))
            plan.wanted.append(Wanted(names[0], VALUE, named.placement, named.held, out.view(-1)))
    by_id = {id(n.tensor): n for state in states for n in state.all()}
    for optimizer in optimizers:
        _plan_optimizer(plan, optimizer, by_id, names_there)
    return plan


def _plan_optimizer(
    plan: _Plan, optimizer: Optimizer, by_id: dict[int, Named], names_there: dict[int, list[str]]
) -> None:
    record, kind = plan.source.manifest.optimizer, type(optimizer).__name__
    names_of_params(optimizer, by_id)  # refuses strangers
    if record is None:
        plan.missing.append(f"states of {kind} (none were saved)")
        return
    if kind not in record.classes:
        plan.mismatched.append(f"optimizer ({', '.join(record.classes)} there, {kind} here)")
        return
    options = {name: group.options for group in record.groups for name in group.params}
    members = {name: group.params for group in record.groups for name in group.params}
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    index = 0
    for number, group in enumerate(optimizer.param_groups):
        found: list[dict[str, Any]] = []
        here = {k: v for k, v in group.items() if k != "params"}
        indices = range(index, index + len(group["params"]))
        index = indices.stop
        for i, p in zip(indices, group["params"], strict=True):
            names = names_there.get(id(p))
            state[i] = dict(optimizer.state.get(p, {}))  # kept where there is none to load
            if names is None:
                continue  # the weight is missing or mismatched, and was listed
            name = next((n for n in names if n in options), None)
            if name is None:
                plan.missing.append(f"optimizer state of {by_id[id(p)].name}")
                continue
            plan.optimized.update(names)
            if options[name] not in found:
                found.append(options[name])
            state[i] = _state_of(plan, optimizer.state.get(p, {}), p, by_id[id(p)], name, members[name])
        same, differing = shared_options(found) if found else ({}, [])
        loaded = {k: decode(v, refuse_tensor) for k, v in same.items()}
        if differing:
            plan.warnings.append(
                f"param group {number} of {kind} joins parameters that were saved with different values of "
                f"{', '.join(differing)}: these keep their present values"
            )
        groups.append({**here, **loaded, "params": list(indices)})
    plan.optimizers.append((optimizer, {"state": {i: s for i, s in state.items() if s}, "param_groups": groups}))


def _state_of(
    plan: _Plan, present: Mapping[str, Any], p: torch.Tensor, named: Named, name: str, members: tuple[str, ...]
) -> dict[str, Any]:
    """A parameter's states, to be filled; ``present`` ones of the right kind are written in place."""
    source = plan.source
    keys = source.states.get(name, set()) - {VALUE}
    if 0 in named.placement.full:  # a tensor without elements has no pieces; its states exist all the same
        keys = set().union(*(source.states.get(member, set()) for member in members)) - {VALUE}
    state: dict[str, Any] = {}
    for key in sorted(keys):
        dtype, old = source.dtype(name, key) or p.dtype, present.get(key)
        reusable = isinstance(old, torch.Tensor) and old.shape == p.shape and old.dtype is dtype and old.is_contiguous()
        new = torch.empty(0, dtype=dtype, device=p.device)
        state[key] = old if reusable else new.new_empty(p.shape)  # contiguous whatever p is
        plan.wanted.append(Wanted(name, key, named.placement, named.held, state[key].view(-1)))
    record = source.manifest.optimizer
    assert record is not None
    for key, value in record.scalars.get(name, {}).items():
        state[key] = decode(value, refuse_tensor)
    return state


def _equal(source: Source, name: str, other: str, named: Named) -> bool:
    """Whether two stored tensors are the same where this rank holds them."""
    if source.manifest.tensors[other].shape != named.placement.full:
        return False
    both = [torch.empty(named.held.numel, dtype=named.tensor.dtype) for _ in range(2)]
    source.read(
        [Wanted(n, VALUE, named.placement, named.held, out) for n, out in zip((name, other), both, strict=True)]
    )
    return torch.equal(both[0].nan_to_num(), both[1].nan_to_num())


def _listed(names: list[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
