"""Calls outside a unit's forward, parameters of every kind, and dtypes at the boundary."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import layerzero as lz
from tests.dist.models import Block, OddModel, token_loss, tokens_for
from tests.dist.twins import Layer, Net, Twins, data, loss_of, no_sync, unsharded

# ---------------------------------------------------------------------------- calls outside a unit's forward


class Head(nn.Module):
    """A loss in a method that calls the module itself, and one that reads its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3, 4)
        self.scale = nn.Parameter(torch.tensor([1.5, 0.5, -1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x * self.scale)

    def loss(self, feats: torch.Tensor) -> torch.Tensor:
        return self(feats).pow(2).mean()

    def direct(self, feats: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(feats, self.proj.weight).pow(2).mean()

    def scaled(self, feats: torch.Tensor) -> torch.Tensor:
        return (feats * self.scale).pow(2).mean()

    def total(self) -> torch.Tensor:
        return self.scale.sum() * 2


class WithHead(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = Head()
        self.outer = nn.Parameter(torch.ones(3, 3))
        self.embed = nn.Embedding(6, 3)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)

    def reads_root(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.outer

    def reads_child(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.embed.weight)


def with_head(strategy: str, lane: str) -> Twins:
    return Twins(WithHead, strategy, lane, units=[Layer, Head])


def outside_calls(strategy: str, lane: str) -> None:
    """Submodules and methods called directly, with gradients, alone and beside the model's forward."""
    twins = with_head(strategy, lane)

    def submodule(net: Any, rank: int) -> torch.Tensor:
        out = net.layers[1].processor(data(rank, 1, 4, 7))
        out = out + net.layers[2](out)
        out.pow(2).mean().backward()
        return out.detach()

    def leaf(net: Any, rank: int) -> torch.Tensor:
        out = net.layers[0].processor[2](net.layers[0].norm(data(rank, 1, 4, 7)).repeat(1, 2)[:, :11])
        with no_sync(net):
            out.sum().backward()
        net.out(data(rank, 2, 4, 7)).pow(2).sum().backward()
        return out.detach()

    def method(net: Any, rank: int) -> torch.Tensor:
        loss = net.head.loss(net.features(data(rank, 2, 4, 5)))
        loss.backward()
        return loss.detach()

    def beside(net: Any, rank: int) -> None:
        out = net(data(rank, 3, 4, 5))
        aside = net.layers[1].processor(data(rank, 4, 4, 7)).pow(2).mean()
        (net.head.loss(out) + aside + net.layers[1](data(rank, 5, 4, 7)).mean()).backward()

    def without_grad(net: Any, rank: int) -> torch.Tensor:
        with torch.no_grad():
            out = net.layers[1].processor(data(rank, 1, 4, 7))
        net.head.loss(data(rank, 4, 4, 3)).backward()
        return out

    for script in (submodule, leaf, method, beside, without_grad, submodule):
        twins.each(script)
        twins.check_grads()
        for net in (*twins.clones, twins.model):
            net.zero_grad()
    twins.train(lambda net, rank: (beside(net, rank), method(net, rank))[1], steps=3)


def declared_method(strategy: str, lane: str) -> None:
    """`forward_method` lets a method read parameters, of its unit and of the root."""
    twins = with_head(strategy, lane)
    lz.forward_method(twins.model.head, "direct")
    lz.forward_method(twins.model.head, "total")
    lz.forward_method(twins.model, "reads_root")

    def script(net: Any, rank: int) -> torch.Tensor:
        feats = net(data(rank, 1, 4, 5))
        loss = net.head.direct(net.reads_root(feats)) + net.head.direct(feats)
        with torch.no_grad():
            total = net.head.total()
        loss.backward()
        return loss.detach() + total

    twins.train(script, steps=3)
    with pytest.raises(lz.ShardingError, match="no method 'nothing'"):
        lz.forward_method(twins.model.head, "nothing")
    twins.model.head.attached = lambda x: x  # of the object, not of its class
    with pytest.raises(lz.ShardingError, match="no method 'attached'"):
        lz.forward_method(twins.model.head, "attached")


def read_unsharded(strategy: str, lane: str) -> None:
    """Full parameters inside `unsharded`, to look at and to differentiate, at every moment of a step."""
    twins = with_head(strategy, lane)
    shapes = {n: tuple(p.shape) for n, p in twins.clones[0].named_parameters()}

    def penalty(net: Any, submodule: nn.Module) -> torch.Tensor:
        with unsharded(net, submodule):
            return sum(p.pow(2).sum() for p in submodule.parameters())  # type: ignore[return-value]

    def alone(net: Any, rank: int) -> torch.Tensor:
        value = penalty(net, net.layers[1]) * (rank + 1)
        value.backward()
        return value.detach()

    def before_forward(net: Any, rank: int) -> None:
        value = penalty(net, net)
        (value * 0.1 + loss_of(net, rank, 1)).backward()

    def between(net: Any, rank: int) -> None:
        loss = loss_of(net, rank, 1)
        value = penalty(net, net.head)
        with no_sync(net):
            loss.backward()
        value.backward()

    def only_looked_at(net: Any, rank: int) -> torch.Tensor:
        loss = loss_of(net, rank, 2)
        value = penalty(net, net.layers[0]).detach()
        loss.backward()
        return value

    for script in (alone, before_forward, between, only_looked_at):
        twins.train(script, steps=2, make=lambda ps: torch.optim.SGD(ps, lr=0.05), min_moved=5)
        # Left gathered for a backward that never comes: the next forward must not use it after the step.
        twins.each(lambda net, rank: penalty(net, net.layers[2]).detach())
        twins.each(lambda net, rank: loss_of(net, rank, 3).backward())
        twins.step()
        twins.each(lambda net, rank: loss_of(net, rank, 4).detach())
    with twins.model.unsharded():
        assert {n: tuple(p.shape) for n, p in twins.model.named_parameters()} == shapes
    with twins.model.unsharded(twins.model.layers[0]), twins.model.unsharded():
        assert twins.model.out.weight.shape == (3, 7)
    assert [lz.param_info(p).fqn for p in twins.model.parameters()] == twins.names


def edit_unsharded(strategy: str, lane: str, dtype: str) -> None:
    """Edits made inside `unsharded` stay, elements that were not edited keep their fp32 values."""
    twins = Twins(WithHead, strategy, lane, units=[Layer, Head], param_dtype=dtype, tol=2e-5)
    twins.model.head.requires_grad_(False)
    for clone in twins.clones:
        clone.head.requires_grad_(False)

    @torch.no_grad()
    def edit(net: Any, rank: int) -> None:
        with unsharded(net, net.layers[1]):
            net.layers[1].gain[3] = 4.0
            net.layers[1].processor[0].weight.data[2:5, 1] = -0.5
        with unsharded(net):
            net.out.weight.copy_(torch.arange(21.0).view(3, 7) / 8)
            net.head.scale.fill_(0.25)

    before = {n: p.detach().clone() for n, p in twins.clones[0].named_parameters()}
    twins.each(edit)
    twins.check_params()
    changed = [n for n, p in twins.clones[0].named_parameters() if not torch.equal(p, before[n])]
    assert changed == ["layers.1.gain", "layers.1.processor.0.weight", "out.weight", "head.scale"]
    if dtype == "fp32":
        twins.each(lambda net, rank: loss_of(net, rank, 2).detach())


class EditsInside(Net):
    """Changes a small parameter in every forward: few ranks hold a part of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), unsharded(self, self.layers[1]):
            self.layers[1].gain.mul_(1.25)
        with unsharded(self, self.layers[2]):
            with torch.no_grad():
                self.layers[2].gain.add_(0.125)
            penalty = self.layers[2].gain.sum()
        return super().forward(x) + penalty


def edit_inside_forward(strategy: str, lane: str) -> None:
    """Edits during a forward show in the rest of it, in the next micro-batch and after the step."""
    twins = Twins(EditsInside, strategy, lane, units=[Layer])

    def script(net: Any, rank: int) -> torch.Tensor:
        with no_sync(net):
            loss_of(net, rank, 0).backward()
        loss = loss_of(net, rank, 1)
        loss.backward()
        return loss.detach()

    twins.train(script, steps=3, make=lambda ps: torch.optim.SGD(ps, lr=0.01))


def direct_reads(strategy: str, lane: str) -> None:
    """A slice read by mistake is an error that names parameter, unit and both remedies."""
    twins = with_head(strategy, lane)
    model: Any = twins.model
    x = data(twins.rank, 1, 4, 3)
    remedies = r"model\.unsharded\(submodule\).*forward_method"
    with pytest.raises(lz.ShardingError, match=rf"'head\.proj\.weight' of unit 'head'.*{remedies}"):
        model.head.direct(x)
    with pytest.raises(lz.ShardingError, match=rf"'outer' of the root unit.*{remedies}"):
        model.reads_root(x)
    with pytest.raises(lz.ShardingError, match=rf"'embed\.weight' of the root unit.*{remedies}"):
        model.reads_child(x)  # not of `inp`, the first child with a weight
    small = Twins(WithHead, strategy, lane, units=[Layer, Head]).model
    whole = small.head.scale.numel() == 3
    if whole:  # all of it lies on this rank: the shape fits, the gradient gives it away
        with pytest.raises(lz.ShardingError, match=rf"'head\.scale' of unit 'head'.*{remedies}"):
            small.head.scaled(x).backward()
    holders = [None] * dist.get_world_size()
    dist.all_gather_object(holders, whole)
    assert any(holders) or strategy != "layerzero"
    dist.barrier()
    assert isinstance(model.head, Head)
    loss_of(model, twins.rank, 1).backward()  # nothing is left in a bad state
    with pytest.raises(RuntimeError, match="mine") as caught:
        raise_own(model)
    assert not isinstance(caught.value, lz.LayerZeroError)


def raise_own(model: Any) -> None:
    def loss(feats: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("mine")

    model.head.forward = loss
    model.head.loss(torch.zeros(1))


# ---------------------------------------------------------------------------- parameters of every kind


class LoRA(nn.Module):
    """A frozen base and two trainable factors in one unit."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, dim) * 0.3)
        self.up = nn.Parameter(torch.randn(dim, 2) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x)) + x @ self.down.T @ self.up.T


class LoRANet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 7).requires_grad_(False)
        self.layers = nn.ModuleList([LoRA(7) for _ in range(3)])
        self.layers[2].requires_grad_(False)
        self.out = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def lora(strategy: str, lane: str) -> None:
    """Frozen beside trainable: frozen ones have no gradient, no main copy, and never move."""
    twins = Twins(LoRANet, strategy, lane, units=[LoRA])
    frozen = {n: p.detach().clone() for n, p in twins.clones[0].named_parameters() if not p.requires_grad}

    def script(net: Any, rank: int) -> None:
        with no_sync(net):
            loss_of(net, rank, 0).backward()
        loss_of(net, rank, 1).backward()

    optimizer = lambda ps: torch.optim.AdamW(ps, lr=1e-2)  # noqa: E731
    twins.optimize(optimizer)
    for _ in range(3):
        twins.each(script)
        twins.check_grads(min_nonzero=6)
        twins.step()
    twins.check_params()
    full = lz.full_state_dict(twins.model)
    assert all(torch.equal(full[n], value) for n, value in frozen.items())


def penalty_beside_frozen(strategy: str, lane: str) -> None:
    """A penalty on full parameters, computed before the forward, whose gradients come after the unit's own."""
    twins = Twins(LoRANet, strategy, lane, units=[LoRA])

    def script(net: Any, rank: int) -> None:
        with unsharded(net, net.layers[0]):
            penalty = net.layers[0].up.abs().sum() + net.layers[0].down.pow(2).sum()
        hidden = net.layers[0](net.inp(data(rank, 0, 4, 5)).requires_grad_()).mean()
        (penalty * 0.1 + loss_of(net, rank, 0) + hidden).backward()

    twins.train(script, steps=3, min_moved=6)


def freezing_later(strategy: str, lane: str) -> None:
    """requires_grad_(False) after sharding is followed, and undone; a parameter frozen at first can't be trained."""
    twins = Twins(LoRANet, strategy, lane, units=[LoRA])
    twins.optimize(lambda ps: torch.optim.SGD(ps, lr=0.1))

    def script(net: Any, rank: int) -> None:
        loss_of(net, rank, 0).backward()

    for freeze in ((), ("layers.0", "out"), ("layers.1.down",), ()):
        for net in (*twins.clones, twins.model):
            for name, p in net.named_parameters():
                if "base" not in name and "inp" not in name and "layers.2" not in name:
                    p.requires_grad_(not name.startswith(freeze) if freeze else True)
        for _ in range(2):
            twins.each(script)
            twins.check_grads(min_nonzero=2)
            twins.step()
    twins.check_params()
    twins.model.layers[1].base.weight.requires_grad_(True)
    with pytest.raises(lz.ShardingError, match=r"'layers\.1\.base\.weight' was frozen.*before lz\.shard"):
        loss_of(twins.model, twins.rank, 0)


class WithAside(Net):
    """A frozen encoder below a dotted name, and a trainable module that may be ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))})
        self.aside["encoder"].requires_grad_(False)
        self.extra = nn.Linear(3, 3)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.aside["encoder"](x)
        self.seen.append(x.dtype)
        return self.extra(super().forward(x).float())


def ignored(strategy: str, lane: str) -> None:
    """Ignored modules keep their parameters, dtype and values; trainable ones are warned about and not reduced."""
    torch.manual_seed(7 + dist.get_rank())
    model: Any = WithAside()
    weight = model.aside["encoder"][0].weight
    value = weight.detach().clone()
    extra = model.extra.weight.detach().clone()
    with pytest.warns(lz.LayerZeROWarning, match=r"trainable parameters \(extra\).*DistributedDataParallel"):
        lz.shard(
            model, units=[Layer], sharding=strategy, zero3_size=2, param_dtype="bf16", autocast_input=False,
            buffer_dtype="bf16", ignored_modules=["aside.encoder", "extra"],
        )  # fmt: skip
    encoder = model.aside["encoder"]
    assert encoder[0].weight is weight and torch.equal(weight, value) and encoder[1].running_mean.dtype is torch.float32
    assert torch.equal(model.extra.weight, extra), "not broadcast either"
    x = data(dist.get_rank(), 1, 4, 5)

    def through(net: Any) -> torch.Tensor:
        return net.extra(Net.forward(net, net.aside["encoder"](x).bfloat16()).float())

    model.forward = lambda x: through(model)
    model(x).pow(2).mean().backward()
    mine = model.extra.weight.grad
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    assert type(mine) is torch.Tensor and not torch.allclose(everyone[0], everyone[-1])
    assert weight.grad is None and model.out.weight.grad is not None
    full = lz.full_state_dict(model)
    assert torch.equal(full["aside.encoder.0.weight"], value) and full["out.weight"].dtype is torch.float32
    model.float()  # ignored modules may still be moved and cast


def buffers(strategy: str, lane: str) -> None:
    """Buffers: rank 0's values, the asked dtype, integers untouched, updates stay local, tied ones stay tied."""

    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 3)
            self.register_buffer("table", torch.full((2, 3), float(dist.get_rank())))
            self.register_buffer("count", torch.tensor(dist.get_rank() + 5))
            self.register_buffer("hidden", torch.full((3,), dist.get_rank() + 0.5), persistent=False)
            self.register_buffer("spread", torch.tensor([[dist.get_rank() + 1.0]]).expand(2, 3))
            self.register_buffer("slice", torch.full((2, 5), dist.get_rank() + 1.0)[:1, ::2])
            self.register_buffer("nothing", None)
            self.register_buffer("empty", torch.empty(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return self.lin(x + self.table[0] + self.hidden)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Buffered(), Buffered()
            self.b.table = self.a.table

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    for dtype, expected in ((None, torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        model: Any = Two()
        with_options = {} if dtype is None else {"buffer_dtype": dtype}
        lz.shard(model, units=[Buffered], sharding=strategy, zero3_size=2, **with_options)
        for part in (model.a, model.b):
            assert part.table.dtype is expected and part.hidden.dtype is expected
            assert part.table.unique().tolist() == [0.0] and part.hidden.unique().tolist() == [0.5]
            assert part.spread.tolist() == [[1.0] * 3] * 2 and part.slice.tolist() == [[1.0] * 3]
            assert part.count.dtype is torch.int64 and part.count.item() == 5 and part.nothing is None
        assert model.b.table is model.a.table
        if dtype is None:
            model(data(dist.get_rank(), 0, 2, 3))
            assert model.a.count.item() == 6
            state = lz.full_state_dict(model)
            assert "a.table" in state and "b.count" in state and not any("hidden" in k for k in state)
    mine: Any = Two()
    lz.shard(mine, units=[Buffered], sharding=strategy, zero3_size=2, sync_module_states=False)
    assert mine.a.count.item() == 5 + dist.get_rank() and mine.a.hidden[0] == dist.get_rank() + 0.5


class Tied(nn.Module):
    """Tied inside a unit, between two units, between a unit and the root, and a whole module with two parents."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.layers = nn.ModuleList([Layer(7, 7) for _ in range(3)])
        first, second, third = self.layers
        first.processor[2].weight = first.processor[0].weight
        second.processor[0].weight = third.processor[0].weight
        third.norm.bias = self.inp.bias
        second.norm = third.norm
        self.out = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def tied(strategy: str, lane: str) -> None:
    """Tied parameters are one parameter: owned by the lowest common unit, with all gradients added up."""
    twins = Twins(Tied, strategy, lane, units=[Layer])
    info = {lz.param_info(p).fqn: lz.param_info(p) for p in twins.model.parameters()}
    assert info["layers.0.processor.0.weight"].unit == "layers.0"
    assert info["layers.0.processor.0.weight"].aliases == ("layers.0.processor.2.weight",)
    assert info["layers.1.processor.0.weight"].unit == "" and info["layers.1.norm.weight"].unit == ""
    assert "layers.1.norm.bias" in info["inp.bias"].aliases

    def script(net: Any, rank: int) -> None:
        with no_sync(net):
            loss_of(net, rank, 0).backward()
        loss_of(net, rank, 1).backward()

    twins.train(script, steps=3)
    full, plain = lz.full_state_dict(twins.model), twins.clones[0].state_dict()
    assert list(full) == list(plain)
    assert full["inp.bias"].data_ptr() == full["layers.1.norm.bias"].data_ptr()


def odd(strategy: str, lane: str) -> None:
    """Scalars, empties, primes, tied and frozen together, with missing gradients for some of them."""
    twins = Twins(OddModel, strategy, lane, units=[Block])

    def script(net: Any, rank: int) -> None:
        tokens = tokens_for(0, 17, 8).view(4, 2, -1)[rank]
        with no_sync(net):
            token_loss(net(tokens), tokens).backward()
        token_loss(net(tokens.flip(0)), tokens.flip(0)).backward()

    twins.train(script, steps=3)


# ---------------------------------------------------------------------------- dtypes


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    ids: torch.Tensor
    name: str = "batch"


class Holder:
    """An output that torch knows nothing about."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Nested(nn.Module):
    """Takes and returns every kind of structure; remembers dtypes."""

    def __init__(self, returns: str = "dict") -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(5, 6) for _ in range(2)])
        self.out = nn.Linear(5, 3)
        self.returns = returns
        self.seen: dict[str, Any] = {}

    def forward(self, batch: Batch, pair: Any, *, options: dict[str, Any], mask: torch.Tensor | None = None) -> Any:
        tensors = {
            "x": batch.x, "ids": batch.ids, "first": pair[0], "deep": pair[1][0]["deep"], "flag": options["flag"],
            "double": options["double"], "param": self.out.weight,
        }  # fmt: skip
        self.seen = {k: v.dtype for k, v in tensors.items()}
        assert batch.name == "batch" and options["text"] == "text" and mask is None
        x = batch.x + pair[0] + pair[1][0]["deep"] + options["double"].to(batch.x.dtype)
        hidden = self.layers[1](self.layers[0](x))
        out = self.out(hidden)
        values = {"loss": out.pow(2).mean(), "out": out, "ids": batch.ids, "hidden": (hidden,)}
        if self.returns == "dict":
            return values
        if self.returns == "tuple":
            return tuple(values.values())
        if self.returns == "dataclass":
            return Batch(values["loss"], values["ids"])
        return Holder(inner=Holder(values=[values["loss"]]), ids=batch.ids)


def _loss_in(out: Any) -> torch.Tensor:
    if isinstance(out, dict):
        return out["loss"]
    if isinstance(out, tuple):
        return out[0]
    return out.x if isinstance(out, Batch) else out.inner.values[0]


def nested_casts(strategy: str, lane: str, dtype: str) -> None:
    """Floating tensors in nested inputs and outputs are cast, all else passes; gradients are right each way."""
    low = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    for returns in ("dict", "tuple", "dataclass", "object"):
        for cast_in in (True, False):
            for cast_out in (True, False):
                twins = Twins(
                    lambda r=returns: Nested(r), strategy, lane, tol=2e-5 if dtype == "fp32" else 6e-2, units=[Layer],
                    param_dtype=dtype, autocast_input=cast_in, autocast_output=cast_out,
                )  # fmt: skip

                def script(net: Any, rank: int, cast_in: bool = cast_in, model: Any = twins.model) -> torch.Tensor:
                    def x(seed: int) -> torch.Tensor:
                        value = data(rank, seed, 4, 5)
                        return value if cast_in or net is not model else value.to(low)

                    out = net(
                        Batch(x(0), torch.arange(4)), (x(1), [{"deep": x(2)}]),
                        options={"flag": torch.tensor(True), "text": "text", "double": data(rank, 3, 5).double()},
                    )  # fmt: skip
                    loss = _loss_in(out)
                    loss.float().backward()
                    net.last = out
                    return loss.detach().float()

                twins.each(script)
                twins.check_grads(min_nonzero=10)
                seen = twins.model.seen
                assert seen["x"] is seen["first"] is seen["deep"] is seen["param"] is low
                assert seen["ids"] is torch.int64 and seen["flag"] is torch.bool
                assert seen["double"] is (low if cast_in else torch.float64)
                out = twins.model.last
                looked_into = returns != "object"
                assert _loss_in(out).dtype is (torch.float32 if cast_out and looked_into else low)
                ids = out["ids"] if isinstance(out, dict) else out[2] if isinstance(out, tuple) else out.ids
                assert ids.dtype is torch.int64
                if returns == "dict":
                    assert out["hidden"][0].dtype is out["loss"].dtype


def input_is_not_touched(strategy: str, lane: str) -> None:
    """The caller's own structures keep their tensors, and a boundary inside gets the compute dtype too."""
    model: Any = Net()
    lz.shard(model, units=[Layer], sharding=strategy, zero3_size=2, param_dtype="bf16")
    x = data(dist.get_rank(), 0, 4, 7)
    assert model.layers[1].processor(x).dtype is torch.float32 and x.dtype is torch.float32
    nested: Any = Nested()
    lz.shard(nested, units=[Layer], sharding=strategy, zero3_size=2, param_dtype="bf16")
    y = data(dist.get_rank(), 0, 4, 5)
    batch, pair = Batch(y, torch.arange(4)), [y, [{"deep": y}]]
    options = {"flag": torch.tensor(True), "text": "text", "double": y.double()}
    nested(batch, pair, options=options)
    assert batch.x is y and pair[0] is y and pair[1][0]["deep"] is y and options["double"].dtype is torch.float64


def integer_parameters(strategy: str, lane: str) -> None:
    """Integer and boolean frozen parameters are gathered like any, and never cast."""

    class Coded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.arange(-6, 7, dtype=torch.int8), requires_grad=False)
            self.flags = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
            self.scale = nn.Parameter(torch.full((13,), 0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.codes.dtype is torch.int8 and self.flags.tolist() == [True, False, True]
            return x * self.codes * self.scale

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twins = Twins(Coded, strategy, lane)
    twins.train(lambda net, rank: net(data(rank, 0, 4, 13)).pow(2).mean().backward(), steps=2, min_moved=1)
    assert lz.full_state_dict(twins.model)["codes"].tolist() == list(range(-6, 7))


def vectorised(strategy: str, lane: str) -> None:
    """torch.vmap over the model."""
    twins = Twins(Net, strategy, lane, units=[Layer])
    twins.each(lambda net, rank: torch.vmap(net)(data(rank, 0, 4, 5)))
    twins.train(lambda net, rank: loss_of(net, rank, 0).backward())
