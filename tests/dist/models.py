"""Models with the shapes that break sharded training, and data that differs on every rank."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """Residual block with sizes that divide by nothing in particular."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.7))  # 0-d

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class OddModel(nn.Module):
    """Prime widths, a scalar, an empty parameter, a parameter smaller than any group, tied and frozen ones."""

    def __init__(self, dim: int = 13, hidden: int = 29, num_blocks: int = 3, vocab: int = 17) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.frozen = nn.Linear(dim, dim).requires_grad_(False)
        self.blocks = nn.ModuleList([Block(dim, hidden) for _ in range(num_blocks)])
        self.blocks[1].up.bias.requires_grad_(False)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.pair = nn.Parameter(torch.tensor([0.5, -0.25]))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("shift", torch.tensor([0.1]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.embed(tokens)) + self.shift + self.pair.sum() + self.nothing.sum()
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Next-token cross entropy in fp32."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def tokens_for(step: int, vocab: int, rows: int, length: int = 6) -> torch.Tensor:
    """The whole (global) batch of a step, [rows, length] int64; ranks take their own rows of it."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(vocab, (rows, length), generator=generator)
