"""Tensor-parallel models under the engine, against one process on the concatenated batch."""

from __future__ import annotations

import contextlib
import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import layerzero as lz
from layerzero.collectives import SumComm
from layerzero.module import engine_of
from layerzero.parallel.context import ContextParallel
from layerzero.tensor_parallel import part_of
from tests.dist.parity import lane_context
from tests.dist.transformer import DIM, Layer, Transformer, batch_for, loss_of_logits, make_transformer, parallelize, share_samples

STEPS = 3
CLIP = 0.5


@dataclass
class Trained:
    """What a run computed: gradients (before clipping) and norms by step, and the final parameters."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, torch.Tensor]] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    # A large eps: Adam divides by the gradient's size, which would make rounding errors of tiny gradients large.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-3)


def alone(model: Transformer, data_size: int, micro: int, norm_type: float = 2.0) -> Trained:
    """One process on all data-parallel ranks' micro-batches."""
    run, optimizer = Trained(), adam(model)
    for step in range(STEPS):
        total = 0.0
        for rank in range(data_size):
            for m in range(micro):
                tokens, targets = batch_for(step, rank, m)
                loss = loss_of_logits(model(tokens), targets) / (micro * data_size)
                loss.backward()
                total += loss.item()
        run.losses.append(total)
        run.grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        run.norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP, norm_type).item())
        optimizer.step()
        optimizer.zero_grad()
    run.state = {n: p.detach().clone() for n, p in model.named_parameters()}
    return run


def sharded(model: nn.Module, mesh: lz.ParallelMesh, micro: int, norm_type: float = 2.0) -> Trained:
    """The same on this rank's micro-batches, or its part of them."""
    context = ContextParallel.of(mesh)
    run, optimizer = Trained(), adam(model)
    for step in range(STEPS):
        total = 0.0
        for m in range(micro):
            tokens, targets = (context.split(t, 1) for t in batch_for(step, mesh.coordinate("dp"), m))
            with model.no_sync() if m < micro - 1 else contextlib.nullcontext():
                loss = loss_of_logits(model(tokens), targets) / micro
                loss.backward()
                total += loss.item()
        run.losses.append(total)
        run.grads.append({n: p.grad.local.flatten().clone() for n, p in model.named_parameters()})
        clip = model.clip_grad_norm_ if step % 2 else lambda *a: nn.utils.clip_grad_norm_(model.parameters(), *a)
        run.norms.append(clip(CLIP, norm_type).item())
        optimizer.step()
        optimizer.zero_grad()
    run.state = lz.full_state_dict(model)
    return run


def compare(model: nn.Module, want: Trained, got: Trained, before: dict[str, torch.Tensor]) -> int:
    """Assert equality up to fp32 rounding; number of elements of gradients compared on this rank."""
    torch.testing.assert_close(got.norms, want.norms, rtol=1e-4, atol=1e-6)
    compared = 0
    for step, grads in enumerate(got.grads):
        for name, p in model.named_parameters():
            info = lz.param_info(p)
            r = info.global_range
            part = part_of(want.grads[step][name], info.tensor_parallel).flatten()[r.start : r.stop]
            torch.testing.assert_close(grads[name], part, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"grad {n}: {m}")
            compared += int((part != 0).sum())
    assert set(got.state) == set(want.state)
    for name, tensor in want.state.items():
        torch.testing.assert_close(got.state[name], tensor, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
        assert not torch.equal(tensor, before[name])
    return compared


def replicas_equal(model: nn.Module, mesh: DeviceMesh | None) -> int:
    """Replicated parameters and gradients are the same bits on all tensor-parallel ranks; how many there were."""
    count = 0
    assert mesh is not None
    for name, p in model.named_parameters():
        cut = lz.param_info(p).tensor_parallel
        assert cut is not None
        if cut.dim is None:
            mine = p.detach().flatten().contiguous()
            others = [torch.empty_like(mine) for _ in range(cut.size)]
            dist.all_gather(others, mine, group=mesh.get_group())
            assert all(torch.equal(mine, other) for other in others), name
            count += 1
    return count


def train_cases(data: int, context: int, configurations: list[dict[str, Any]]) -> list[int]:
    """One parity run per configuration; elements compared in each."""
    mesh = _mesh(data, context)
    return [_train(mesh, **c) for c in configurations]


def _train(
    mesh: lz.ParallelMesh,
    sequence: bool,
    micro: int,
    lane: str = "threads",
    norm_type: float = 2.0,
    reentrant: bool | None = None,
    **sharding: Any,
) -> int:
    reference = make_transformer()
    model = share_samples(copy.deepcopy(reference), ContextParallel.of(mesh))
    model.reentrant = reentrant
    before = {n: p.detach().clone() for n, p in reference.named_parameters()}
    want = alone(reference, mesh.size("dp"), micro, norm_type)
    with lane_context(lane):
        if mesh.tp is not None:
            parallelize(model, mesh.tp, sequence)
        lz.shard(model, mesh=mesh, units=[Layer], **sharding)
        got = sharded(model, mesh, micro, norm_type)
        compared = compare(model, want, got, before)
    assert mesh.tp is None or replicas_equal(model, mesh.tp) == 4 * 6 + 2
    return compared


def dropped_sum_is_noticed() -> str:
    """Without the sum over tensor-parallel ranks, norms' weights under sequence parallelism go wrong; the complaint."""
    keep = SumComm.all_reduce_sum
    SumComm.all_reduce_sum = lambda self, tensor: tensor  # type: ignore[method-assign]
    try:
        _train(_mesh(2), True, 1, sharding="layerzero", zero3_size=2)
    except AssertionError as error:
        return str(error)
    finally:
        SumComm.all_reduce_sum = keep  # type: ignore[method-assign]
    return ""


def _mesh(data: int, context: int = 1) -> lz.ParallelMesh:
    return lz.ParallelMesh(dp=data, cp=context, tp=dist.get_world_size() // (data * context))


def _small(sequence: bool = True, seed: int = 0, **options: Any) -> tuple[nn.Module, Transformer, lz.ParallelMesh]:
    """A sharded model on 2 x 2 ranks, the plain one it was made of, and the mesh."""
    mesh, reference = _mesh(2), make_transformer(seed, num_layers=2)
    model = parallelize(copy.deepcopy(reference), mesh.tp, sequence)
    return lz.shard(model, mesh=mesh, units=[Layer], **options), reference, mesh


def _backward(model: nn.Module, scale: float = 1.0) -> None:
    tokens, targets = batch_for(0, 0, 0)
    (loss_of_logits(model(tokens), targets) * scale).backward()


def info_case() -> list[Any]:
    """What `param_info` says; checked against the shapes of the plain model."""
    model, reference, mesh = _small(sharding="zero1")
    rank, seen = mesh.coordinate("tp"), []
    whole = {n: tuple(p.shape) for n, p in reference.named_parameters()}
    for name, p in model.named_parameters():
        info = lz.param_info(p)
        assert info.fqn == info.model_fqn == name and info.global_shape == whole[name] and info.tied_to is None
        cut = info.tensor_parallel
        assert cut is not None and (cut.rank, cut.size) == (rank, 2)
        assert p.ndim == len(info.local_shape)
        assert not p.numel() or info.global_range.stop <= math.prod(info.local_shape)
        seen.append([name, cut.dim, list(info.local_shape)])
    return seen


def state_case() -> None:
    """Full state out and in, with sharded, uneven and replicated parameters; reads inside `unsharded`."""
    model, reference, mesh = _small(sharding="layerzero", zero3_size=2)
    full = lz.full_state_dict(model)
    for name, p in reference.named_parameters():
        assert torch.equal(full[name], p)
    only = lz.full_state_dict(model, rank0_only=True)
    assert bool(only) == (dist.get_rank() == 0)
    other = make_transformer(seed=7, num_layers=2)
    model.load_state_dict(other.state_dict())
    again = lz.full_state_dict(model)
    assert all(torch.equal(again[n], p) and not torch.equal(p, full[n]) for n, p in other.named_parameters())
    with model.unsharded(), torch.no_grad():
        for name, p in model.named_parameters():
            seen = p.full_tensor() if isinstance(p, DTensor) else p
            assert torch.equal(seen, again[name]), name
            p.mul_(2.0)
    doubled = lz.full_state_dict(model)
    assert all(torch.equal(doubled[n], 2 * v) for n, v in again.items())
    with model.unsharded(model.layers["0"]):  # type: ignore[index]
        weight = model.layers["0"].mlp.up.weight  # type: ignore[index,union-attr]
        assert isinstance(weight, DTensor) and tuple(weight.shape) == (64, 32)
        (weight.to_local() ** 2).sum().backward()
    grad = model.layers["0"].mlp.up.weight.grad  # type: ignore[index,union-attr]
    assert grad is not None and bool(grad.local.any())


def ignored_case() -> None:
    """A tensor-parallel module that is left alone is whole in the state of rank 0, which the others help to gather."""
    mesh = lz.ParallelMesh(dp=1, tp=2)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))
    want = {name: value.clone() for name, value in model.state_dict().items()}
    model[0].requires_grad_(False)
    parallelize_module(model, mesh.tp, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    lz.shard(model, mesh=mesh, ignored_modules=["0"], units=[nn.Linear])
    for rank0_only in (False, True):
        state = lz.full_state_dict(model, rank0_only=rank0_only)
        assert set(state) == (set() if rank0_only and dist.get_rank() else set(want))
        for name, value in state.items():
            assert value.shape == want[name].shape and value.any()


def starting_values_case() -> None:
    """Replicas start equal whatever the ranks' seeds, and meta modules get the values of a module by itself."""
    mesh = _mesh(2)
    model = parallelize(make_transformer(seed=dist.get_rank(), num_layers=2), mesh.tp, sequence=False)
    lz.shard(model, mesh=mesh, units=[Layer], sharding="layerzero", zero3_size=2)
    assert replicas_equal(model, mesh.tp) == 2 * 6 + 2
    with torch.device("meta"):
        empty = Transformer(2)
    torch.manual_seed(5)
    lz.shard(parallelize(empty, mesh.tp, sequence=True), mesh=mesh, units=[Layer], sharding="zero3")
    assert replicas_equal(empty, mesh.tp) == 2 * 6 + 2
    full = lz.full_state_dict(empty)
    weight, bias = full["layers.1.mlp.up.weight"], full["layers.1.norm1.weight"]
    assert torch.equal(bias, torch.ones_like(bias)) and 0.05 < float(weight.std()) < 0.15
    assert not torch.equal(weight[:32], weight[32:])  # tensor-parallel ranks hold parts of one matrix
    _backward(empty)


def scaler_case() -> list[float]:
    """An overflow on one rank makes all skip; otherwise gradients are unscaled and every norm agrees."""
    model, _, mesh = _small(sharding="layerzero", zero3_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    scaler.scale(torch.zeros(()))  # starts it; the losses are scaled by hand
    _backward(model, 2.0**10)
    name = "layers.0.mlp.up.weight"
    grads = dict(model.named_parameters())
    if dist.get_rank() == 3 and grads[name].numel():
        grads[name].grad.local.view(-1)[0] = float("inf")  # type: ignore[union-attr]
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    optimizer.zero_grad()
    _backward(model, 2.0**9)
    scaler.unscale_(optimizer)
    norms = [nn.utils.get_total_norm([p.grad for p in model.parameters()], p).item() for p in (1.0, 2.0, math.inf)]  # type: ignore[misc]
    scaler.step(optimizer)
    assert not all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    return norms


def plain_norms() -> list[float]:
    """What `scaler_case` has to return."""
    model = make_transformer(num_layers=2)
    _backward(model)
    return [nn.utils.get_total_norm([p.grad for p in model.parameters()], p).item() for p in (1.0, 2.0, math.inf)]  # type: ignore[misc]


def half_precision_case() -> None:
    """bf16 compute with fp32 main parameters: DTensors in the compute dtype, replicas equal after steps."""
    model, _, mesh = _small(sharding="layerzero", zero3_size=2, param_dtype="bf16")
    dtypes = set()
    model.layers["1"].mlp.up.register_forward_pre_hook(lambda m, _: dtypes.add((type(m.weight), m.weight.dtype)))  # type: ignore[index,union-attr]
    optimizer = adam(model)
    for _ in range(2):
        _backward(model)
        optimizer.step()
        optimizer.zero_grad()
    assert dtypes == {(DTensor, torch.bfloat16)}
    assert replicas_equal(model, mesh.tp) == 2 * 6 + 2


def refusals_case() -> list[str]:
    """The errors for what can't be right."""
    messages = []
    mesh = _mesh(2)
    model = parallelize(make_transformer(num_layers=2), mesh.tp, sequence=True)
    try:
        lz.shard(model, units=[Layer], sharding="zero1")  # the whole world
    except lz.ConfigError as error:
        messages.append(str(error))
    flat = init_device_mesh("cpu", (4,))
    mixed = parallelize(make_transformer(num_layers=2), mesh.tp, sequence=True)
    mixed.norm = parallelize_module(nn.LayerNorm(DIM), flat, SequenceParallel())
    try:
        lz.shard(mixed, mesh=mesh, units=[Layer], sharding="zero1")
    except lz.ShardingError as error:
        messages.append(str(error))
    return messages


def plain_partial_case() -> str:
    """Plain norms on a cut sequence have partial gradients, which nobody sums: refused in the first backward."""
    mesh = _mesh(2)
    names = [f"layers.{i}.{n}" for i in "01" for n in ("norm1", "norm2")]
    model = make_transformer(num_layers=2)
    model = parallelize(model, mesh.tp, sequence=True, skip=names)
    lz.shard(model, mesh=mesh, units=[Layer], sharding="zero1")
    try:
        _backward(model)
    except lz.ShardingError as error:
        return str(error)
    return ""


def traffic_case() -> dict[str, Any]:
    """Sums over tensor-parallel ranks per step, with three micro-batches, and the elements that enter them."""
    model, _, _ = _small(sharding="layerzero", zero3_size=2)
    for _ in range(2):
        sharded_step(model)
    rows = {row.op: [row.num, row.nbytes] for row in lz.traffic_report(model).rows if row.axis == -1}
    replicated = [g.layout.numel // 2 for u in engine_of(model).units for g in u.trainable_groups if g.is_replicated]
    return {"sums": rows["tensor"], "elements": sum(replicated), "groups": len(replicated)}


def sharded_step(model: nn.Module) -> None:
    for m in range(3):
        with model.no_sync() if m < 2 else contextlib.nullcontext():
            _backward(model)
    for p in model.parameters():
        p.grad = None
