"""A sharded model beside plain PyTorch: one clone per rank in this process, each fed that rank's data.

Data-parallel training is the mean of the clones' gradients, so everything a script does to a model (several
backwards, zeroing, skipped parts) is done to every clone and to the sharded model alike, and compared after.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import layerzero as lz
from layerzero.grads import GradShard
from tests.dist.parity import lane_context, rank_and_size

MAIN = {"sharding": "layerzero", "zero3_size": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "layerzero": MAIN,
    "layerzero-full": {**MAIN, "accumulate": "full"},
    "layerzero-keep": {**MAIN, "keep_num_params": "all"},
    "zero3": {"sharding": "zero3"},
    "zero1": {"sharding": "zero1"},
    "hsdp": {"sharding": "hsdp", "zero3_size": 2},
    "ddp": {"sharding": "ddp"},
}

Script = Callable[[Any, int], Any]


def data(rank: int, seed: int, *shape: int) -> torch.Tensor:
    """Normal numbers that differ by rank and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank))


def no_sync(model: Any) -> contextlib.AbstractContextManager[None]:
    return model.no_sync() if isinstance(model, lz.ShardedModule) else contextlib.nullcontext()


def unsharded(model: Any, submodule: nn.Module | None = None) -> contextlib.AbstractContextManager[None]:
    return model.unsharded(submodule) if isinstance(model, lz.ShardedModule) else contextlib.nullcontext()


class Twins:
    """The sharded model, and one plain clone for every rank."""

    def __init__(
        self, build: Callable[[], nn.Module], strategy: str = "layerzero", lane: str = "threads", tol: float = 2e-5,
        **options: Any,
    ) -> None:  # fmt: skip
        self.rank, self.world = rank_and_size()
        self.tol = tol
        torch.manual_seed(7)
        plain = build()
        self.clones = [copy.deepcopy(plain) for _ in range(self.world)]
        self.names = [n for n, _ in plain.named_parameters()]
        self.model: Any = plain
        with lane_context(lane):
            lz.shard(self.model, **{**OPTIONS[strategy], **options})
        self.optimizers: list[Any] = []
        self.num_compared = 0

    # ------------------------------------------------------------------ doing the same to all

    def each(self, script: Script) -> Any:
        """Run ``script(model, rank)`` on every clone and on the sharded model; compares and returns what it returns."""
        wanted = [script(clone, rank) for rank, clone in enumerate(self.clones)][self.rank]
        got = script(self.model, self.rank)
        if wanted is not None:
            self.close(got, wanted, "the script's result")
        return got

    def optimize(self, make: Callable[[list[nn.Parameter]], Any]) -> None:
        """Build an optimizer for the trainable parameters of every model."""
        models = [*self.clones, self.model]
        self.optimizers = [make([p for p in m.parameters() if p.requires_grad]) for m in models]

    def step(self, zero: bool = True) -> None:
        """One optimizer step everywhere, from the mean gradient."""
        self.average()
        for optimizer in self.optimizers:
            optimizer.step()
            if zero:
                optimizer.zero_grad()

    def train(self, script: Script, steps: int = 2, make: Any = None, min_moved: int | None = None) -> None:
        """``steps`` times: the script, gradients compared, a step; then parameters compared, and that they moved."""
        before = [p.detach().clone() for p in self.clones[0].parameters()]
        self.optimize(make or (lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1)))
        for _ in range(steps):
            self.each(script)
            self.check_grads()
            self.step()
        self.check_params()
        moved = [not torch.equal(a, b) for a, b in zip(before, self.clones[0].parameters(), strict=True)]
        assert sum(moved) > (len(moved) // 2 if min_moved is None else min_moved - 1)

    # ------------------------------------------------------------------ comparing

    def mean_grads(self) -> list[torch.Tensor | None]:
        """What every rank's gradient should be, by parameter: full shape, None where no rank has one."""
        means: list[torch.Tensor | None] = []
        for params in zip(*(c.parameters() for c in self.clones), strict=True):
            grads = [p.grad for p in params if p.grad is not None]
            means.append(sum(grads[1:], grads[0]) / self.world if grads else None)
        return means

    def average(self) -> None:
        """Give every clone the mean gradient; zeros where no rank has one, which the sharded model can't know."""
        means = self.mean_grads()
        for clone in self.clones:
            for p, mean in zip(clone.parameters(), means, strict=True):
                if p.requires_grad:
                    p.grad = torch.zeros_like(p) if mean is None else mean.clone()

    def check_grads(self, min_nonzero: int = 1) -> None:
        """The sharded gradients are the slices of the mean."""
        nonzero = 0
        for name, param, mean in zip(self.names, self.model.parameters(), self.mean_grads(), strict=True):
            if not param.requires_grad:
                assert param.grad is None, name
                continue
            want = self.slice_of(param, torch.zeros(lz.param_info(param).global_shape) if mean is None else mean)
            assert isinstance(param.grad, GradShard) or (param.grad is None and mean is None), name
            have = want * 0 if param.grad is None else param.grad.local.reshape(-1)
            self.close(have, want, f"gradient of {name}")
            nonzero += int(mean is not None and bool(mean.any()))
        assert nonzero >= min_nonzero, "nothing was compared"
        self.num_compared += nonzero

    def check_params(self) -> None:
        """The sharded parameters are slices of the clones', and so is what `full_state_dict` returns."""
        full = lz.full_state_dict(self.model)
        for name, param, plain in zip(self.names, self.model.parameters(), self.clones[0].parameters(), strict=True):
            self.close(param.detach().reshape(-1), self.slice_of(param, plain.detach()), name)
            self.close(full[name], plain.detach(), name)

    @staticmethod
    def slice_of(param: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        """The part of a full tensor that ``param`` is."""
        held = lz.param_info(param).global_range
        return full.reshape(-1)[held.start : held.stop]

    def close(self, got: Any, want: Any, what: str) -> None:
        torch.testing.assert_close(
            got, want, rtol=self.tol, atol=self.tol, check_dtype=False, msg=lambda m: f"{what}: {m}"
        )


# ---------------------------------------------------------------------------- a model most cases use


class Layer(nn.Module):
    """A residual layer with an odd width, a 1-D parameter and a submodule that can be called by itself."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.processor = nn.Sequential(nn.Linear(dim, hidden), nn.Tanh(), nn.Linear(hidden, dim))
        self.gain = nn.Parameter(torch.full((dim,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.processor(self.norm(x))


class Net(nn.Module):
    """Layers between two projections that belong to the root."""

    def __init__(self, dim: int = 7, hidden: int = 11, num_layers: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(5, dim)
        self.layers = nn.ModuleList([Layer(dim, hidden) for _ in range(num_layers)])
        self.out = nn.Linear(dim, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def loss_of(model: nn.Module, rank: int, seed: int) -> torch.Tensor:
    """A loss on data of this rank."""
    return model(data(rank, seed, 4, 5)).float().pow(2).mean()
