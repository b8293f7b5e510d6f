"""Full state in and out, averages of weights, meta-device models, choice of units, meshes and options."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import layerzero as lz
from tests.dist.models import Block, OddModel
from tests.dist.twins import MAIN, Layer, Net, Twins, data, loss_of, no_sync

# ---------------------------------------------------------------------------- state


def full_state(strategy: str, lane: str) -> None:
    """`full_state_dict` is the plain model's: keys in order, values, tied aliases, dtype; on one rank or all."""
    torch.manual_seed(3)
    plain = OddModel()
    model: Any = copy.deepcopy(plain)
    lz.shard(model, units=[Block], sharding=strategy, zero3_size=2, param_dtype="bf16")
    want = plain.state_dict()
    for cpu in (True, False):
        got = lz.full_state_dict(model, cpu=cpu)
        assert list(got) == list(want)
        for name, value in got.items():
            frozen = name.startswith("frozen") or name == "blocks.1.up.bias"
            assert value.shape == want[name].shape and not value.requires_grad
            assert value.dtype is (torch.bfloat16 if frozen else torch.float32)
            assert torch.equal(value, want[name].to(value.dtype)), name
        assert got["head.weight"].data_ptr() == got["embed.weight"].data_ptr()
        got["pair"].zero_()  # a copy
    assert torch.equal(lz.full_state_dict(model)["pair"], want["pair"])
    only = lz.full_state_dict(model, rank0_only=True)
    assert list(only) == (list(want) if dist.get_rank() == 0 else [])
    with pytest.raises(lz.ShardingError, match="is not sharded"):
        lz.full_state_dict(plain)


def loading(strategy: str, lane: str) -> None:
    """Strict loading names missing and unexpected keys and wrong shapes; full tensors of any dtype are sliced."""
    model: Any = Twins(Net, strategy, lane, units=[Layer]).model
    torch.manual_seed(5)
    state = {k: v + 0.25 for k, v in Net().state_dict().items()}
    model.load_state_dict(state)
    assert all(torch.equal(lz.full_state_dict(model)[k], v) for k, v in state.items())

    wrong = {k: v for k, v in state.items() if k not in ("out.bias", "layers.1.gain")} | {"new.weight": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*layers\.1\.gain.*out\.bias.*Unexpected key.*new\.weight"):
        model.load_state_dict(wrong)
    result = model.load_state_dict(wrong, strict=False)
    assert sorted(result.missing_keys) == ["layers.1.gain", "out.bias"] and result.unexpected_keys == ["new.weight"]
    for bad in (torch.ones(3, 8), torch.ones(7, 3), torch.ones(21)):
        with pytest.raises(RuntimeError, match=r"out\.weight"):
            model.load_state_dict({**state, "out.weight": bad})
    with pytest.raises(lz.ShardingError, match="assign=False"):
        model.load_state_dict(state, assign=True)

    model.load_state_dict({k: v.double() * 2 for k, v in state.items()})
    full = lz.full_state_dict(model)
    assert all(torch.equal(full[k], v * 2) and full[k].dtype is torch.float32 for k, v in state.items())
    model.layers[1].load_state_dict({k[9:]: v for k, v in state.items() if k.startswith("layers.1.")})
    assert torch.equal(lz.full_state_dict(model)["layers.1.gain"], state["layers.1.gain"])


def info(strategy: str, lane: str) -> None:
    """Names, shapes, units and ranges; the ranges of all ranks cover every element, once per replica."""
    model: Any = Twins(OddModel, strategy, lane, units=[Block]).model
    shapes = {n: p.shape for n, p in OddModel().named_parameters()}
    assert [n for n, _ in model.named_parameters()] == list(shapes)
    covered = []
    for name, p in model.named_parameters():
        i = lz.param_info(p)
        assert i.fqn == name and i.global_shape == tuple(shapes[name])
        assert i.unit == (".".join(name.split(".")[:2]) if name.startswith("blocks") else "")
        assert type(p) is nn.Parameter and p.is_leaf and p.numel() == i.global_range.numel
        held_scalar = not i.global_shape and p.numel() == 1
        assert p.ndim == (0 if held_scalar else max(1, len(i.global_shape))) and p.shape[1:].numel() == 1
        covered.append((name, i.global_range.start, i.global_range.stop))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, covered)
    for index, (name, shape) in enumerate(shapes.items()):
        times = torch.zeros(shape.numel(), dtype=torch.int64)
        for ranges in everyone:
            times[ranges[index][1] : ranges[index][2]] += 1
        frozen = name.startswith("frozen") or name == "blocks.1.up.bias"
        replicas = {"zero1": 1, "zero3": 1, "layerzero": 1}[strategy]
        if frozen:
            replicas = {"zero1": dist.get_world_size(), "zero3": 1, "layerzero": dist.get_world_size() // 2}[strategy]
        assert (times == replicas).all(), name
    with pytest.raises(lz.ShardingError, match="not a parameter of a sharded model"):
        lz.param_info(nn.Parameter(torch.ones(1)))


def average(strategy: str, lane: str) -> None:
    """An average of weights kept in slices, updated by one foreach call, swapped in to evaluate, and exported."""
    twins = Twins(Net, strategy, lane, units=[Layer])
    twins.optimize(lambda ps: torch.optim.AdamW(ps, lr=1e-2))
    nets = [*twins.clones, twins.model]
    averages = [[p.detach().clone() for p in net.parameters()] for net in nets]
    for step in range(3):
        twins.each(lambda net, rank, step=step: loss_of(net, rank, step).backward())
        twins.step()
        for net, kept in zip(nets, averages, strict=True):
            torch._foreach_lerp_(kept, [p.detach() for p in net.parameters()], 0.3)
    backups = [[p.detach().clone() for p in net.parameters()] for net in nets]
    for values in (averages, backups):
        for net, kept in zip(nets, values, strict=True):
            with torch.no_grad():
                torch._foreach_copy_([p.detach() for p in net.parameters()], kept)
        twins.check_params()

        def evaluate(net: Any, rank: int) -> torch.Tensor:
            with torch.no_grad():
                return net(data(rank, 9, 4, 5))

        twins.each(evaluate)


def weight_decay_groups(strategy: str, lane: str) -> None:
    """No decay for ``p.ndim < 2`` picks the same parameters on every rank, empty slices included."""
    twins = Twins(Net, strategy, lane, units=[Layer])

    def groups(ps: list[nn.Parameter]) -> torch.optim.Optimizer:
        decay, rest = [p for p in ps if p.ndim >= 2], [p for p in ps if p.ndim < 2]
        assert len(decay) == 8 and len(rest) == 17
        groups = [{"params": decay, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2)

    twins.train(lambda net, rank: loss_of(net, rank, 0).backward(), steps=3, make=groups)


# ---------------------------------------------------------------------------- meta device


class MetaLayer(nn.Module):
    """A parameter and a non-persistent buffer of its own, both set by `reset_parameters`."""

    def __init__(self, fill: float = 2.0) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.full((5,), fill))
        self.register_buffer("angles", torch.arange(5.0), persistent=False)
        self.fill = fill

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.fill_(self.fill)
            self.angles.copy_(torch.arange(5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.scale + self.angles


class MetaNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MetaLayer(), MetaLayer(3.0)])
        self.out = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def meta_reset(strategy: str, lane: str) -> None:
    """Materialised unit by unit through reset_parameters; rank 0's values; then trains like any."""
    torch.manual_seed(100 + dist.get_rank())
    with torch.device("meta"):
        model: Any = MetaNet()
    lz.shard(model, units=[MetaLayer], sharding=strategy, zero3_size=2)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    full = lz.full_state_dict(model)
    assert full["layers.1.scale"].tolist() == [3.0] * 5 and full["layers.0.lin.weight"].std() > 0.1
    assert model.layers[0].angles.tolist() == list(range(5))
    plain = MetaNet()
    plain.load_state_dict(full)
    out = model(data(dist.get_rank(), 0, 4, 5))
    torch.testing.assert_close(out, plain(data(dist.get_rank(), 0, 4, 5)))
    out.sum().backward()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, full["out.weight"].sum().item())
    assert len(set(everyone)) == 1


def meta_init_fn(strategy: str, lane: str) -> None:
    """`param_init_fn` gets every module with meta tensors of its own, and wins over reset_parameters."""
    seen = []

    @torch.no_grad()
    def init(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        for p in module.parameters(recurse=False):
            p.fill_(0.125)
        for b in module.buffers(recurse=False):
            b.fill_(7.0)

    with torch.device("meta"):
        model: Any = MetaNet()
    lz.shard(model, units=[MetaLayer], sharding=strategy, zero3_size=2, param_init_fn=init)
    assert sorted(seen) == ["Linear", "Linear", "Linear", "MetaLayer", "MetaLayer"]
    assert all((v == 0.125).all() for v in lz.full_state_dict(model).values())
    assert model.layers[1].angles.tolist() == [7.0] * 5


def meta_without_init(strategy: str, lane: str) -> None:
    """A module that nothing initialises is named, with what it lacks; tied meta parameters stay tied."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bare = nn.Parameter(torch.ones(3))

    class Forgets(MetaLayer):
        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.scale.fill_(1.0)

    class Positions(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.register_buffer("ids", torch.arange(3), persistent=False)

    class Rotation(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.register_buffer("phases", torch.ones(3, dtype=torch.complex64))

    for cls, what in ((Bare, "bare"), (Forgets, "angles"), (Positions, "ids"), (Rotation, "phases")):
        with torch.device("meta"):
            model = nn.Sequential(cls(), nn.Linear(3, 3))
        with pytest.raises(lz.ShardingError, match=rf"{cls.__name__} in unit '0'.*'{what}'.*param_init_fn="):
            lz.shard(model, units=[cls], sharding=strategy, zero3_size=2)
    with torch.device("meta"):
        counted: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    lz.shard(counted, units=[], sharding=strategy, zero3_size=2)
    assert counted[1].num_batches_tracked == 0
    with torch.device("meta"):
        tied: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
        tied[1].weight = tied[0].weight
    lz.shard(tied, units=[], sharding=strategy, zero3_size=2)
    full = lz.full_state_dict(tied)
    assert torch.equal(full["0.weight"], full["1.weight"]) and full["0.weight"].std() > 0.05
    assert len(list(tied.parameters())) == 2


def rank0_wins(strategy: str, lane: str) -> None:
    """By default rank 0's weights are everyone's; without broadcast every rank keeps what its slices come from."""
    for sync in (True, False):
        torch.manual_seed(50 + dist.get_rank())
        model: Any = Net()
        mine = {k: v.clone() for k, v in model.state_dict().items()}
        lz.shard(model, units=[Layer], sharding=strategy, zero3_size=2, sync_module_states=sync)
        torch.manual_seed(50)
        first = Net().state_dict()
        for name, p in model.named_parameters():
            source = first if sync else mine
            assert torch.equal(p.detach().reshape(-1), Twins.slice_of(p, source[name])), name


# ---------------------------------------------------------------------------- choice of units


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(2, 2)
        self.encoder = nn.ModuleList([Layer(7, 11) for _ in range(2)])
        self.decoder = nn.Sequential(Layer(7, 11), nn.Linear(7, 7))
        self.big = nn.Linear(30, 30)


def unit_choice(strategy: str, lane: str) -> None:
    """Units by name, suffix, class, module, predicate, size and the model's own declaration."""

    def units(model: nn.Module | None = None, **options: Any) -> list[str]:
        model = model or Wide()
        lz.shard(model, sharding=strategy, zero3_size=2, **options)
        return list(dict.fromkeys(lz.param_info(p).unit for p in model.parameters()))

    layers = ["", "encoder.0", "encoder.1", "decoder.0"]
    assert units(units=["Layer"]) == layers
    assert units(units=["twins.Layer"]) == units(units=["tests.dist.twins.Layer"]) == layers
    assert units(transformer_layers=["tests.dist.twins.Layer"]) == layers
    assert units(units=[Layer]) == layers
    assert units(units=["Layer", nn.LayerNorm])[1:3] == ["encoder.0", "encoder.0.norm"]
    assert units(units=lambda m: isinstance(m, nn.Linear) and m.in_features == 30) == ["", "big"]
    model = Wide()
    assert units(model, units=[model.encoder[1], model.big]) == ["", "encoder.1", "big"]
    assert units(min_num_params=900) == ["", "big"]
    assert units(min_num_params=180) == ["", "encoder.0", "encoder.1", "decoder.0", "big"]
    declared: Any = Wide()
    declared._no_split_modules = ["Layer"]
    assert units(declared) == layers


def errors_of_units(strategy: str, lane: str) -> None:
    """Names that match nothing list near ones; containers and foreign modules are refused."""
    cases: list[tuple[str, dict[str, Any]]] = [
        (r"no module of class 'Layr'.*near ones: .*tests\.dist\.twins\.Layer", {"units": ["Layr"]}),
        (r"no module of class 'other\.Layer'.*tests\.dist\.twins\.Layer", {"transformer_layers": ["other.Layer"]}),
        (r"no module of class .*Block", {"units": [Block]}),
        (r"the given Layer is no", {"units": [Layer(7, 11)]}),
        (r"'encoder' is a ModuleList, which has no forward", {"units": ["ModuleList"]}),
        (r"expected class names, classes or modules, got 3", {"units": [3]}),
        (r"no submodule 'encodr'; did you mean 'encoder'", {"ignored_modules": ["encodr"]}),
        (r"zero3_size.*3|3.*divi", {"zero3_size": 3}),
        (r"zero3_siz.*zero3_size", {"zero3_siz": 2}),
        (r"param_dtype.*fp17", {"param_dtype": "fp17"}),
    ]
    for pattern, options in cases:
        with pytest.raises(lz.ConfigError, match=pattern):
            lz.shard(Wide(), **{"sharding": strategy, "zero3_size": 2, **options})
    for degrees in ((3, 3, 4), (4, 4, 2), (8, 8, 8)):
        with contextlib.suppress(lz.ConfigError):
            lz.shard(Wide(), sharding=lz.Sharding(*degrees), units=[Layer])
            raise AssertionError(degrees)
    shared = Wide()
    shared.decoder[1] = shared.small = nn.Linear(7, 7)
    shared.small = nn.Linear(7, 7)
    shared.small.weight = shared.decoder[1].weight
    with pytest.raises(lz.ShardingError, match=r"'decoder\.1\.weight' is shared with an ignored module"):
        lz.shard(shared, units=[Layer], ignored_modules=["small"], **MAIN)
    with pytest.raises(lz.ConfigError, match=r"expected an nn\.Module"):
        lz.shard(nn.Linear, **MAIN)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------- meshes and options


def mesh_dimension(lane: str) -> None:
    """Data parallelism over one dimension of a mesh: groups of the other dimension train apart."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    for name, other in (("dp", "tp"), ("tp", "dp")):
        torch.manual_seed(mesh[other].get_local_rank())  # another model in each group
        plain = Net()
        clones = [copy.deepcopy(plain) for _ in range(2)]
        model: Any = plain
        lz.shard(model, units=[Layer], mesh=mesh[name], **{**MAIN, "zero3_size": 1 if name == "dp" else 2})
        ranks = mesh[name].mesh.tolist()
        assert rank in ranks
        loss_of(model, rank, 0).backward()
        for clone, r in zip(clones, ranks, strict=True):
            loss_of(clone, r, 0).backward()
        for p, a, b in zip(model.parameters(), clones[0].parameters(), clones[1].parameters(), strict=True):
            want = Twins.slice_of(p, (a.grad + b.grad) / 2)
            torch.testing.assert_close(p.grad.local.reshape(-1), want, rtol=2e-5, atol=2e-5)
        norm = model.clip_grad_norm_(1.0)
        everyone = [torch.empty(()) for _ in range(4)]
        dist.all_gather(everyone, norm)
        assert len({n.item() for n in everyone}) == 2


def mesh_flattened(lane: str) -> None:
    """Two dimensions of a mesh as one data-parallel group: the same numbers as the whole world."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "tp", "cp"))
    for given in (mesh["dp", "cp"], mesh["dp", "cp"]._flatten("dp_cp")):
        twins = Twins(Net, "layerzero", lane, units=[Layer], mesh=given)
        twins.train(lambda net, rank: loss_of(net, rank, 0).backward())
    with pytest.raises(lz.ShardingError, match=r"rank \d is not in"):
        lz.shard(Net(), mesh=_Elsewhere(), **MAIN)  # type: ignore[arg-type]


class _Elsewhere:
    """A mesh of ranks that this process is not among."""

    device_type = "cpu"
    mesh = torch.tensor([100, 101])


def schedules(lane: str) -> None:
    """Prefetch, bounds and timings change when things happen, never the numbers, to the last bit."""
    ways: list[dict[str, Any]] = [
        {}, {"prefetch_depth": 0}, {"prefetch_depth": 2}, {"prefetch_depth": 5, "limit_all_gathers": False},
        {"forward_prefetch": False}, {"limit_all_gathers": False}, {"backward_prefetch": "BACKWARD_POST"},
        {"backward_reduce_scatter": "BACKWARD_POST"}, {"prefetch_depth": 0, "backward_prefetch": "BACKWARD_POST"},
        {"backward_prefetch": "BACKWARD_POST", "backward_reduce_scatter": "BACKWARD_POST", "prefetch_depth": 2},
        {"desync_check": True}, {"offload_grads": True}, {"offload_grads": True, "accumulate": "full"},
    ]  # fmt: skip
    results = []
    for way in ways:
        twins = Twins(Net, "layerzero", lane, units=[Layer], **way)

        def script(net: Any, rank: int) -> None:
            with torch.no_grad():
                loss_of(net, rank, 3)
            with no_sync(net):
                loss_of(net, rank, 0).backward()
            loss_of(net, rank, 1).backward()

        twins.train(script, steps=3)
        results.append(lz.full_state_dict(twins.model))
    for way, result in zip(ways, results, strict=True):
        if way.get("accumulate") != "full":  # sums in another order
            assert all(torch.equal(v, results[0][k]) for k, v in result.items()), way
