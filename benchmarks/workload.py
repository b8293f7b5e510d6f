"""What every system trains: a transformer language model on token batches that differ from rank to rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Workload:
    """Sizes of model and batch; the defaults have 20.1 M parameters.

    Attributes:
        sequence: tokens per sample.
        batch: samples per rank and micro-batch.
        dtype: of compute and of gradients on the wire, "bf16" or "fp32"; main parameters are fp32 throughout.
    """

    layers: int = 6
    width: int = 512
    heads: int = 8
    vocabulary: int = 1024
    sequence: int = 128
    batch: int = 1
    dtype: str = "bf16"
    learning_rate: float = 1e-4

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's."""
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[self.dtype]

    def model(self, device: torch.device | str = "cpu") -> Transformer:
        """The model in fp32 with the same values on every rank."""
        torch.manual_seed(0)
        with torch.device(device):
            return Transformer(self)

    def batches(self, rank: int, device: torch.device | str = "cpu", num: int = 4) -> list[torch.Tensor]:
        """``num`` batches of token ids [batch, sequence + 1], int64, different on every rank."""
        generator = torch.Generator().manual_seed(1000 + rank)
        shape = (self.batch, self.sequence + 1)
        return [torch.randint(self.vocabulary, shape, generator=generator).to(device) for _ in range(num)]

    def optimizer(self, params) -> torch.optim.Optimizer:
        """The same optimizer for every system: fused, which is the fast one on CPUs too."""
        return torch.optim.AdamW(params, lr=self.learning_rate, fused=True)


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.heads = w.heads
        self.norm1, self.norm2 = nn.LayerNorm(w.width), nn.LayerNorm(w.width)
        self.qkv, self.proj = nn.Linear(w.width, 3 * w.width), nn.Linear(w.width, w.width)
        self.up, self.down = nn.Linear(w.width, 4 * w.width), nn.Linear(4 * w.width, w.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(b, s, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Transformer(nn.Module):
    """Decoder-only language model; the forward returns the loss of next-token prediction, a scalar."""

    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(w.vocabulary, w.width), nn.Embedding(w.sequence, w.width)
        self.blocks = nn.ModuleList(Block(w) for _ in range(w.layers))
        self.norm, self.head = nn.LayerNorm(w.width), nn.Linear(w.width, w.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids[:, :-1]) + self.positions.weight[: ids.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
