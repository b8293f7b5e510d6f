"""Attention over a split sequence by exchanging it for heads (DeepSpeed Ulysses, Jacobs et al., 2023)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from layerzero.errors import ShardingError
from layerzero.parallel.context.exchange import Exchange, Move
from layerzero.parallel.context.group import ContextParallel

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Query, key and value [B, S, heads, D] to output [B, S, query heads, D]; key and value may have fewer heads."""


def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: ContextParallel,
    *,
    length: int | None = None,
    attention: Attention | None = None,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Self-attention where each rank holds a part of the sequence, for all heads.

    Each rank gets the whole sequence for a part of the heads, attends, and gives the result back: two all-to-alls, one
    of them for query, key and value together. Heads need not divide; where ranks share a key head, both get it.

    Args:
        query: [B, local S, H, D].
        key, value: [B, local S, H / g, D] for some g: heads 0 .. g-1 of the query share head 0, and so on.
        length: S; None where all ranks hold equally many tokens.
        attention: what to do with the whole sequence instead of torch's `scaled_dot_product_attention`; the arguments
            below are then not used.
        attn_mask: for the whole sequence, [S, S], [B, 1, S, S] or [B, H, S, S].
        is_causal, scale, dropout_p: as for `scaled_dot_product_attention`.

    Returns:
        [B, local S, H, D].

    Raises:
        ShardingError: on lengths or numbers of heads that don't go together.
    """
    num_heads, num_key_heads = query.size(2), key.size(2)
    if key.size(1) != query.size(1) or num_heads % num_key_heads:
        raise ShardingError(
            f"ulysses_attention: expected key and value of the query's local length and a divisor of its heads, got "
            f"query {list(query.shape)}, key {list(key.shape)}"
        )
    ranges = context.ranges(num_heads)
    shared_by = num_heads // num_key_heads
    key_ranges = tuple(_key_range(start, count, shared_by) for start, count in ranges)
    first, count = ranges[context.rank]
    if attention is None:
        heads = [head // shared_by - key_ranges[context.rank][0] for head in range(first, first + count)]
        mask = attn_mask
        if mask is not None and mask.ndim == 4 and mask.size(1) > 1:
            mask = mask[:, first : first + count]
        attention = _Sdpa(heads, mask, is_causal, scale, dropout_p)
    if context.size == 1:
        return attention(query, key, value)
    parts = context._parts_of(query, 1, length)
    moves = (Move(1, 2, parts, ranges), *(Move(1, 2, parts, key_ranges) for _ in range(2)))
    whole = Exchange.apply(context.comm, context.rank, moves, query, key, value)
    out = attention(*whole) if count else whole[0]  # fewer heads than ranks: nothing to do but to take part
    back = Move(2, 1, context.parts(num_heads), context.ranges(sum(parts)))
    return Exchange.apply(context.comm, context.rank, (back,), out)[0]


def _key_range(start: int, count: int, shared_by: int) -> tuple[int, int]:
    """(first, number) of the key heads that query heads ``start .. start + count`` use."""
    first = start // shared_by
    return first, -(-(start + count) // shared_by) - first if count else 0


class _Sdpa:
    def __init__(
        self, heads: list[int], mask: torch.Tensor | None, is_causal: bool, scale: float | None, dropout_p: float
    ) -> None:
        self.heads = heads  # key head of every query head
        self.mask = mask
        self.is_causal = is_causal
        self.scale = scale
        self.dropout_p = dropout_p

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        repeats = len(self.heads) // max(1, key.size(2))
        is_regular = self.heads == [i // repeats for i in range(repeats * key.size(2))] if repeats else False
        if not is_regular:  # the part of the heads begins or ends inside those that share a key head
            index = torch.tensor(self.heads, device=key.device)
            key, value = key.index_select(2, index), value.index_select(2, index)
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), self.mask, self.dropout_p,
            self.is_causal and self.mask is None, scale=self.scale, enable_gqa=query.size(2) != key.size(2),
        )  # fmt: skip
        return out.transpose(1, 2)
