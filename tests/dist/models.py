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


class IntegerModel(nn.Module):
    """Small integer weights, so with integer data every sum in training is exact; parameters some ranks don't use."""

    NUM_IN, NUM_OUT = 6, 3
    EVEN = False

    def __init__(self, num_blocks: int = 2, dim: int = 5) -> None:
        super().__init__()
        self.stem = nn.Linear(self.NUM_IN, dim)
        self.blocks = nn.ModuleList([IntegerBlock(dim, self.EVEN) for _ in range(num_blocks)])
        self.head = nn.Linear(dim, self.NUM_OUT, bias=False)
        self.shift = nn.Parameter(torch.ones(()))
        self.sometimes = nn.Parameter(torch.ones(self.NUM_OUT))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in self.parameters():
                if p.ndim == 2:  # at most two entries a row, so that numbers stay small
                    p.zero_()
                    for row in p:
                        where = torch.randperm(len(row), generator=generator)[:2]
                        row[where] = torch.randint(2, (2,), generator=generator) * 2.0 - 1.0
                elif p.ndim == 1:
                    p.copy_(torch.randint(2, p.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_used = self.EVEN or x[0, 0] > 0
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = self.head(x) + self.shift
        return x + self.sometimes if is_used else x


class EvenIntegerModel(IntegerModel):
    """Every rank uses everything. Lanes in a random order keep step across ranks only if ranks do the same."""

    EVEN = True


class IntegerBlock(nn.Module):
    def __init__(self, dim: int, even: bool) -> None:
        super().__init__()
        self.even = even
        self.sometimes = nn.Parameter(torch.ones(dim))
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.even or x[0].sum() % 2 >= 1:
            x = x + self.sometimes
        return torch.relu(self.linear(x))


class TinyModel(nn.Module):
    """Three elements in two units: most ranks hold none of them."""

    NUM_IN, NUM_OUT = 1, 1

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(1, 1, bias=False)])
        self.pair = nn.Parameter(torch.tensor([1.0, 2.0]))
        with torch.no_grad():
            self.blocks[0].weight.fill_(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x) * self.pair[0] + self.pair[1]


def integers_for(step: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Integers -1, 0, 1 as fp64, other ones in every step."""
    generator = torch.Generator().manual_seed(2000 + step)
    return torch.randint(-1, 2, shape, generator=generator).double()
