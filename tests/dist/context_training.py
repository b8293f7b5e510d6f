"""Sharded training with context parallelism against one process on the same samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

import layerzero as lz
from layerzero.parallel.context import ContextParallel, mean_share, parallelize, ulysses_attention
from tests.dist.parity import STRATEGIES, Setup, Training, compare, lane_context, rank_and_size, reference, sharded
from tests.dist.test_real_models import MODELS

STEPS = 3


# ---------------------------------------------------------------------------- a model written for it


class TokenBlock(nn.Module):
    """Grouped-query attention and a feed-forward, with sizes that divide by nothing in particular."""

    def __init__(self, context: ContextParallel, heads: int = 6, key_heads: int = 3, head_dim: int = 4) -> None:
        super().__init__()
        dim = heads * head_dim
        self.context, self.head_dim = context, head_dim
        self.norm = nn.LayerNorm(dim)
        self.query, self.value = nn.Linear(dim, dim), nn.Linear(dim, key_heads * head_dim)
        self.key = nn.Linear(dim, key_heads * head_dim, bias=False)  # softmax doesn't see a bias: Adam would scale noise
        self.out = nn.Linear(dim, dim, bias=False)
        self.feed = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 29), nn.GELU(), nn.Linear(29, dim))

    def forward(self, x: torch.Tensor, length: int) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.head_dim)) for layer in (self.query, self.key, self.value))
        x = x + self.out(ulysses_attention(q, k, v, self.context, length=length, is_causal=True).flatten(2))
        return x + self.feed(x)


class TokenModel(nn.Module):
    """Whole token sequences in, logits of this rank's tokens out."""

    def __init__(self, context: ContextParallel, vocab: int = 19, length: int = 11) -> None:
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(vocab, 24)
        self.place = nn.Parameter(torch.randn(length, 24))
        self.blocks = nn.ModuleList([TokenBlock(context) for _ in range(3)])
        self.head = nn.Linear(24, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.size(1)
        local = self.context.split(tokens, 1)
        x = self.embed(local) + self.place[list(self.context.part(length))]
        for block in self.blocks:
            x = block(x, length)
        return self.head(x)


def token_losses(model: TokenModel, items: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy and weight of this rank's tokens; samples have lengths of their own, the rest is padding."""
    rows = []
    for item in items.flatten().tolist():
        generator = torch.Generator().manual_seed(item)
        rows.append((torch.randint(19, (12,), generator=generator), 3 + item % 9))
    tokens = torch.stack([row for row, _ in rows])
    kept = torch.stack([torch.arange(11) < n for _, n in rows]).float()
    targets = model.context.split(tokens[:, 1:], 1)
    logits = model(tokens[:, :-1])
    losses = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return losses, model.context.split(kept, 1).flatten()


def sample_loss(model: nn.Module, item: torch.Tensor) -> torch.Tensor:
    """Every item counts the same, however long it is."""
    assert isinstance(model, TokenModel)
    return mean_share(*token_losses(model, item), over=model.context)


ALONE = ContextParallel.of(None)
BUILDERS: dict[str, tuple[Callable[[ContextParallel], nn.Module], Any, list[Any]]] = {
    "tokens": (TokenModel, sample_loss, [TokenBlock]),
    **{
        name: (lambda context, make=make: parallelize(make(), context), loss, [unit])
        for name, (make, loss, unit) in MODELS.items()
    },
}


# ---------------------------------------------------------------------------- against one process


def setup_of(name: str, dp: int, micro: int) -> Setup:
    def batches(step: int) -> torch.Tensor:
        return torch.arange(dp * micro).view(dp, micro) + 1000 * step

    return Setup(micro, BUILDERS[name][1], batches, clip=1.0, steps=STEPS, cast_buffers=False)


@cache
def one_process(name: str, dp: int, micro: int, dtype: str) -> tuple[dict[str, torch.Tensor], Training]:
    torch.manual_seed(11)
    model = BUILDERS[name][0](ALONE)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    return before, reference(model, setup_of(name, dp, micro), torch.bfloat16 if dtype == "bf16" else torch.float32)


def case(
    name: str, dp: int, cp: int, strategy: str, micro: int, dtype: str = "fp32", lane: str = "threads",
    recompute: bool = False,
) -> None:  # fmt: skip
    """``dp`` items are trained on at a time; the ``cp`` ranks of a group share one."""
    before, want = one_process(name, dp, micro, dtype)
    mesh = lz.ParallelMesh(dp=dp, cp=cp, zero3_size=2)
    context = ContextParallel.of(mesh)
    build, _, units = BUILDERS[name]
    torch.manual_seed(11 + rank_and_size()[0])
    model = build(context)
    if recompute:
        enable = getattr(model, "gradient_checkpointing_enable", None) or model.enable_gradient_checkpointing
        enable()
    with lane_context(lane):
        lz.shard(model, mesh=mesh, units=units, param_dtype=dtype, **STRATEGIES[strategy])
    setup = setup_of(name, dp, micro)
    batches = setup.batches
    got = sharded(model, replace(setup, batches=lambda step: batches(step).repeat_interleave(cp, 0)))
    compare(want, got, before, dtype)
    assert (context.comm.traffic.counts["exchange", 0].num > 0) is (cp > 1)


def cases(configurations: list[dict[str, Any]]) -> int:
    """Several `case`s in one world; names the configuration that failed."""
    for configuration in configurations:
        try:
            case(**configuration)
        except Exception as error:
            raise AssertionError(f"configuration {configuration}") from error
    return len(configurations)


# ---------------------------------------------------------------------------- dp x cp against dp


def same_tokens(strategy: str, micro: int) -> int:
    """dp2 x cp2 trains like dp4 on the same samples of unequal lengths; how many numbers were compared."""
    states = []
    for dp, cp in ((4, 1), (2, 2)):
        mesh = lz.ParallelMesh(dp=dp, cp=cp)
        context = ContextParallel.of(mesh)
        torch.manual_seed(3)
        model: Any = TokenModel(context)
        lz.shard(model, mesh=mesh, units=[TokenBlock], zero3_size=2, **STRATEGIES[strategy])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        norms = []
        for step in range(STEPS):
            samples = torch.arange(8 * micro).view(micro, dp, 8 // dp)[:, mesh.coordinate("dp")] + 1000 * step
            for index, items in enumerate(samples):
                model_loss = mean_share(*token_losses(model, items), over=mesh) / micro
                if index < micro - 1:
                    with model.no_sync():
                        model_loss.backward()
                else:
                    model_loss.backward()
            norms.append(model.clip_grad_norm_(1.0).item())
            optimizer.step()
            optimizer.zero_grad()
        states.append((norms, lz.full_state_dict(model)))
    (norms_a, state_a), (norms_b, state_b) = states
    torch.testing.assert_close(norms_a, norms_b, rtol=1e-4, atol=1e-5)
    torch.manual_seed(3)
    moved = 0
    for (name, start), a, b in zip(TokenModel(ALONE).state_dict().items(), state_a.values(), state_b.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
        moved += int((a != start).sum())
    return moved
