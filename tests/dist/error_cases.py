"""Misuse: every one is refused early, says what, where and what to do, and leaves a model that still trains."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import layerzero as lz
from layerzero.lanes import adversarial
from tests.dist.twins import MAIN, Layer, Net, Twins, loss_of


def _still_trains(twins: Twins) -> None:
    for net in (*twins.clones, twins.model):
        net.zero_grad()
    twins.optimizers = []
    twins.train(lambda net, rank: loss_of(net, rank, 5).backward(), steps=2)


def misuse(strategy: str, lane: str) -> None:
    """Asking a sharded module for what it can't give."""
    twins = Twins(Net, strategy, lane, units=[Layer], param_dtype="fp32")
    model = twins.model
    once: list[tuple[str, Any]] = [
        (r"Net' is sharded already.*once", lambda: lz.shard(model, **MAIN)),
        (r"'inner' is sharded already", lambda: lz.shard(nn.ModuleDict({"inner": model}), **MAIN)),
        (r"Layer' is sharded already", lambda: lz.shard(model.layers[0], **MAIN)),
        (r"state_dict\(\) of a sharded model.*lz\.full_state_dict", lambda: model.state_dict()),
        (r"state_dict\(\).*lz\.full_state_dict", lambda: nn.ModuleDict({"inner": model}).state_dict()),
        (r"state_dict\(\).*'layers\.0\.", lambda: nn.ModuleDict({"layers": model.layers}).state_dict()),
        (r"can't be deep-copied.*_foreach_lerp_.*full_state_dict", lambda: copy.deepcopy(model)),
        (r"can't be deep-copied", lambda: copy.deepcopy(model.layers[1])),
        (r"can't be pickled.*full_state_dict", lambda: pickle.dumps(model)),
        (r"can't be moved or cast.*torch\.float16.*param_dtype", lambda: model.half()),
        (r"can't be moved or cast.*bfloat16", lambda: model.to(torch.bfloat16)),
        (r"can't be moved or cast.*meta", lambda: model.to("meta")),
        (r"can't be moved or cast.*float64", lambda: model.layers[0].double()),
        (r"lz\.shard replaces DistributedDataParallel: use the sharded model as it is", lambda: DDP(model)),
        (r"lz\.shard replaces DistributedDataParallel", lambda: DDP(model.layers[0])),
        (r"is not sharded: call lz\.shard", lambda: lz.forward_method(nn.Linear(1, 1), "forward")),
    ]
    for pattern, use in once:
        with pytest.raises(lz.ShardingError, match=pattern):
            use()
    with pytest.raises(lz.ConfigError, match=r"'odd' has degree 7, but the model's axes have \[1, "):
        lz.compare_strategies(model, {"odd": lz.Sharding.hsdp(7)})
    assert model.to("cpu") is model and model.float() is model and model.to(torch.float32) is model
    assert isinstance(model, Net) and isinstance(model, lz.ShardedModule) and isinstance(model.layers[0], Layer)
    _still_trains(twins)


def surrounding_ddp(strategy: str, lane: str) -> None:
    """DDP around a module that contains a sharded one; around one whose sharded part it is told to ignore it is fine."""
    model: Any = Net()
    lz.shard(model, units=[Layer], sharding=strategy, zero3_size=2)
    outer = nn.Sequential(nn.Linear(5, 5), model)
    DDP._set_params_and_buffers_to_ignore_for_model(outer, [f"1.{name}" for name, _ in model.named_parameters()])
    DDP(outer)(torch.ones(2, 5)).sum().backward()
    even = nn.Linear(64, 64, bias=False)
    lz.shard(even, units=[], sharding=strategy, zero3_size=2)
    wrapped = DDP(nn.Sequential(even))
    with pytest.raises(lz.ShardingError, match=r"is around a Sequential.*build the model anew.*lz\.shard replaces"):
        wrapped(torch.ones(1, 64))


def late_parameters(strategy: str, lane: str) -> None:
    """Trainable parameters that come after lz.shard are refused; frozen ones, and those of ignored modules, are not."""
    torch.manual_seed(0)
    net: Any = Net()
    net.extra = nn.Linear(2, 2).requires_grad_(False)
    with adversarial(lane) if lane != "threads" else contextlib.nullcontext():
        lz.shard(net, units=[Layer], sharding=strategy, zero3_size=2, ignored_modules=["extra"])
    loss_of(net, dist.get_rank(), 0).backward()
    net.layers[1].adapter = nn.Linear(7, 7).requires_grad_(False)
    net.extra.adapter = nn.Linear(2, 2)
    loss_of(net, dist.get_rank(), 1).backward()
    added: list[tuple[str, Any]] = [
        (r"after lz\.shard: layers\.0\.scale \(1 in all\).*before lz\.shard", (net.layers[0], "scale", nn.Parameter(torch.ones(3)))),
        (r"after lz\.shard: head\.weight, head\.bias \(2 in all\)", (net, "head", nn.Linear(3, 3))),
        (r"after lz\.shard: out\.weight, out\.bias \(2 in all\)", (net, "out", nn.Linear(7, 3))),
        (r"after lz\.shard: layers\.1\..*in all\)", (net.layers, "1", Layer(7, 11))),
    ]
    for pattern, (owner, name, value) in added:
        before = getattr(owner, name, None)
        setattr(owner, name, value)
        with pytest.raises(lz.ShardingError, match=pattern):
            loss_of(net, dist.get_rank(), 2)
        with torch.no_grad():
            loss_of(net, dist.get_rank(), 2)
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
    loss_of(net, dist.get_rank(), 3).backward()


def gradients_of_gradients(strategy: str, lane: str) -> None:
    """create_graph=True is refused, in backward and in grad; training goes on after."""
    twins = Twins(Net, strategy, lane, units=[Layer])
    model = twins.model
    with pytest.raises(lz.ShardingError, match="create_graph=True"):
        loss_of(model, twins.rank, 0).backward(create_graph=True)
    x = torch.randn(4, 5, requires_grad=True)
    with pytest.raises(lz.ShardingError, match="create_graph=True"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    _still_trains(twins)
    # Gradients of inputs alone are no misuse.
    got = torch.autograd.grad(model(x).pow(2).sum(), x)[0]
    want = torch.autograd.grad(twins.clones[0](x).pow(2).sum(), x)[0]
    twins.close(got, want, "gradient of the input")
    _still_trains(twins)


def replaced_storage(strategy: str, lane: str) -> None:
    """`p.data = other` is refused on every rank at the next forward, also where the rank holds nothing of it."""
    for name in ("layers.1.gain", "out.weight", "inp.bias"):
        model: Any = Twins(Net, strategy, lane, units=[Layer]).model
        loss_of(model, dist.get_rank(), 0).backward()
        p = model.get_parameter(name)
        p.data = p.data.clone()
        with pytest.raises(lz.ShardingError, match=rf"'{name}' was moved out of the engine's buffer.*copy_"):
            loss_of(model, dist.get_rank(), 1)
    model = Twins(Net, strategy, lane, units=[Layer]).model
    vector = torch.zeros(sum(p.numel() for p in model.parameters()))
    torch.nn.utils.vector_to_parameters(vector, model.parameters())
    with pytest.raises(lz.ShardingError, match=r"was moved out of the engine's buffer"):
        with torch.no_grad():
            loss_of(model, dist.get_rank(), 1)


def replaced_parameter(strategy: str, lane: str) -> None:
    """A module's new parameter, for good or within `functional_call`, is refused; the old one put back trains on."""
    twins = Twins(Net, strategy, lane, units=[Layer])
    model: Any = twins.model
    loss_of(model, dist.get_rank(), 0).backward()
    model.zero_grad()
    old, model.out.bias = model.out.bias, nn.Parameter(torch.zeros(3))
    with pytest.raises(lz.ShardingError, match=r"'out.bias' was replaced after lz.shard.*unsharded"):
        loss_of(model, dist.get_rank(), 1)
    model.out.bias = old
    other = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    with pytest.raises(lz.ShardingError, match=r"was replaced after lz.shard.*functional_call"):
        torch.func.functional_call(model, other, (torch.zeros(4, 5),))
    _still_trains(twins)


def optimizers(strategy: str, lane: str) -> None:
    """Optimizers built too early or not elementwise are refused at their first step, before they change anything."""
    plain = Net()
    early = torch.optim.AdamW(plain.parameters())
    partly = torch.optim.SGD([{"params": [plain.out.weight]}, {"params": [nn.Parameter(torch.ones(1))]}], lr=0.1)
    lz.shard(plain, units=[Layer], **{**MAIN, "sharding": strategy})
    model: Any = plain
    loss_of(model, dist.get_rank(), 0).backward()
    before = lz.full_state_dict(model)
    with pytest.raises(lz.ShardingError, match=r"AdamW was built before lz\.shard.*25 parameters.*'inp\.weight'"):
        early.step()
    with pytest.raises(lz.ShardingError, match=r"SGD was built before lz\.shard.*1 parameters.*'out\.weight'"):
        partly.step()

    class Sign(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad.sign(), alpha=group["lr"])

    matrices = [p for p in model.parameters() if p.ndim == 2]
    makers = [
        lambda: torch.optim.LBFGS(model.parameters()), lambda: torch.optim.Adafactor(model.parameters()),
        lambda: torch.optim.Muon(matrices), lambda: Sign(model.parameters()),
    ]  # fmt: skip
    for make in makers:
        optimizer = make()
        name = type(optimizer).__name__
        with pytest.raises(lz.ShardingError, match=rf"{name} is not known to be elementwise.*register_elementwise"):
            optimizer.step(lambda: torch.zeros(()))
    after = lz.full_state_dict(model)
    assert all(torch.equal(after[k], v) for k, v in before.items())
    lz.register_elementwise_optimizer(Sign)
    Sign(model.parameters()).step()
    assert not torch.equal(lz.full_state_dict(model)["out.weight"], before["out.weight"])

    class MyAdam(torch.optim.Adam):  # a subclass of a known one is known
        pass

    late = MyAdam(model.layers[0].parameters())
    late.step()
    late.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    late.step()
    stale = MyAdam(model.layers[0].parameters())
    other = nn.Linear(2, 2)
    stale.add_param_group({"params": list(other.parameters())})
    stale.step()
    lz.shard(other, units=[], **MAIN)  # sharded between two steps of an optimizer that holds it
    with pytest.raises(lz.ShardingError, match=r"built before lz\.shard"):
        stale.step()


def disagreement(strategy: str, lane: str) -> None:
    """Ranks that differ in configuration or model fail at construction, on every rank, with both values."""
    rank = dist.get_rank()
    last = rank == dist.get_world_size() - 1

    class Other(Layer):
        pass

    def net(hidden: int = 11, num_layers: int = 3, frozen: bool = False, dtype: Any = torch.float32) -> nn.Module:
        model = Net(hidden=hidden, num_layers=num_layers).to(dtype)
        model.out.bias.requires_grad_(not frozen)
        return model

    def with_other() -> nn.Module:
        model = net()
        model.layers[1] = Other(7, 11)
        return model

    options = {"sharding": strategy, "zero3_size": 2, "units": [Layer]}
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        (r"config param_dtype: .*\"fp32\".*\"bf16\"", net, {"param_dtype": "bf16" if last else "fp32"}),
        (r"config prefetch_depth: .* 1, .* 2", net, {"prefetch_depth": 2 if last else 1}),
        (r"config zero3_size: .* 2, .* 4", net, {"zero3_size": 4 if last else 2}),
        (r"layers\.0\.processor\.0\.bias: .*\[11\].*\[13\]", lambda: net(13 if last else 11), {}),
        (r"parameter layers\.2\.gain: .*\[7\].*absent", lambda: net(num_layers=2 if last else 3), {}),
        (r"parameter out\.bias: .*true.*false", lambda: net(frozen=last), {}),
        (r"parameter inp\.bias: .*float32.*float64", lambda: net(dtype=torch.float64 if last else torch.float32), {}),
        (r"parameter layers\.0\.gain: .*layers\.0.*unit\": \"\"", net, {"units": [Layer] if last else ["LayerNorm"]}),
    ]
    for pattern, build, changes in cases:
        with pytest.raises(lz.DesyncError, match=pattern) as caught:
            lz.shard(build(), **{**options, **changes})
        text = str(caught.value)
        assert text.startswith("ranks disagree on")
        assert "rank 0 has" in text and f"rank {dist.get_world_size() - 1} has" in text
    twins = Twins(with_other, strategy, lane, units=[Layer])  # nothing is left behind
    twins.train(lambda net, rank: loss_of(net, rank, 5).backward(), steps=1)


def lost_rank(strategy: str, unit: str) -> None:
    """Rank 1 ends when it comes to ``unit``'s forward."""
    torch.manual_seed(0)
    model: Any = Net()
    lz.shard(model, units=[Layer], sharding=strategy)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, 0, 0).backward()
    optimizer.step()
    if dist.get_rank() == 1:
        model.get_submodule(unit).register_forward_pre_hook(lambda *_: os._exit(1), prepend=True)
    loss_of(model, 0, 1).backward()
    dist.barrier()
