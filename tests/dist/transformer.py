"""A small transformer that can be cut over layers (pipeline stages) and over features (tensor parallel)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from layerzero.parallel.context import ContextParallel, ulysses_attention

VOCAB, DIM, HEADS, LENGTH = 43, 32, 4, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.o = nn.Linear(DIM, DIM)
        self.context = ContextParallel.of(None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (f(x).unflatten(-1, (-1, DIM // HEADS)) for f in (self.q, self.k, self.v))
        return self.o(ulysses_attention(query, key, value, self.context, is_causal=True).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """All of it, or the layers of one pipeline stage, under the names they have in the whole."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(num_layers)})
        self.norm: nn.Module | None = nn.LayerNorm(DIM)
        self.head: nn.Module | None = nn.Linear(DIM, VOCAB, bias=False)
        self.reentrant: bool | None = None  # whether activation checkpoints of layers are, if there are any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))

    def keep_stage(self, index: int, num_stages: int) -> Transformer:
        """Drop what other stages hold; in place."""
        names = list(self.layers)
        each = len(names) // num_stages
        self.layers = nn.ModuleDict({n: self.layers[n] for n in names[index * each : (index + 1) * each]})
        if index > 0:
            self.embed = None
        if index < num_stages - 1:
            self.norm = self.head = None
        return self


def make_transformer(seed: int = 0, num_layers: int = 4) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(num_layers)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:  # norms start alike and biases at 0 otherwise, whatever the seed
                p.add_(torch.randn_like(p), alpha=0.1)
    return model


def share_samples(model: Transformer, context: ContextParallel) -> Transformer:
    """Context parallel: ranks hold parts of the sequence between attentions."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.context = context
    return model


def parallelize(model: Transformer, mesh: DeviceMesh | None, sequence: bool, skip: Iterable[str] = ()) -> Transformer:
    """Tensor parallel, with the norms and residuals cut along the sequence if ``sequence``; ``skip``s modules."""
    assert mesh is not None
    outside = Shard(1) if sequence else Replicate()
    plan: dict[str, object] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=outside),
        "head": ColwiseParallel(input_layouts=outside, output_layouts=Replicate()),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    for i in model.layers:
        layer = f"layers.{i}"
        plan |= {f"{layer}.attention.{name}": ColwiseParallel() for name in "qkv"}
        plan[f"{layer}.mlp.up"] = ColwiseParallel()
        plan[f"{layer}.attention.o"] = plan[f"{layer}.mlp.down"] = RowwiseParallel(output_layouts=outside)
        if sequence:
            plan[f"{layer}.norm1"] = plan[f"{layer}.norm2"] = SequenceParallel()
            for part in ("attention", "mlp"):
                plan[f"{layer}.{part}"] = PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                )
    modules = dict(model.named_modules())
    kept = {name: style for name, style in plan.items() if modules.get(name) is not None and name not in skip}
    return parallelize_module(model, mesh, kept)  # type: ignore[arg-type]


def batch_for(step: int, data_rank: int, micro: int, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and next tokens [rows, LENGTH] of one micro-batch of one data-parallel rank."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * data_rank + micro)
    tokens = torch.randint(VOCAB, (rows, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of_logits(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
