"""Tensor and sequence parallelism for diffusers' Wan transformer, after Megatron-LM (Korthikanti et al., 2022).

The opponent of the headline comparison, tuned for CPUs: weights of attention and feed-forward are split over the ranks;
between them each rank holds a part of the tokens. Collectives are those of `ContextParallel`, because gloo's own
reduce-scatter, which torch's `parallelize_module` ends up with, is an all-reduce and sends twice the bytes.

Per block there are an all-gather before and a reduce-scatter after each of the two attentions and the feed-forward, and
one number per token and attention for the norms of query and key, which span all heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from layerzero.parallel.context import ContextParallel
from layerzero.parallel.context.wan import _rotate, _WanHooks
from layerzero.parallel.wan import SplitNorms


def parallelize_wan(model: Any, ranks: ContextParallel) -> list[nn.Parameter]:
    """Split ``model`` in place; returns the parameters whose gradients are to be summed over the ranks afterwards.

    Those are the ones that all ranks hold and use for their own tokens. The output is whole on every rank, so give each
    rank its `1 / size` of the loss.
    """
    hooks = _WanHooks(ranks, tuple(model.config.patch_size))
    for block in model.blocks:
        for attention in (block.attn1, block.attn2):
            if attention.heads % ranks.size:
                raise ValueError(f"{attention.heads} heads can't be split over {ranks.size} ranks")
            attention.heads //= ranks.size
            for name in ("to_q", "to_k", "to_v"):
                setattr(attention, name, _column(getattr(attention, name), ranks))
            for name in ("norm_q", "norm_k"):
                norm = getattr(attention, name)
                norm.weight = nn.Parameter(ranks.split(norm.weight.detach(), 0))
            attention.to_out[0] = _RowLinear(attention.to_out[0], ranks)
            attention.set_processor(_Processor(ranks, hooks))
        block.ffn.net[0].proj = _column(block.ffn.net[0].proj, ranks)
        block.ffn.net[2] = _RowLinear(block.ffn.net[2], ranks)
        block.ffn.register_forward_pre_hook(lambda _, args: (ranks.gather(args[0], 1, hooks.length),))
    model.register_forward_pre_hook(hooks.before_model, with_kwargs=True)
    model.rope.register_forward_pre_hook(hooks.before_rope)
    model.patch_embedding.register_forward_pre_hook(hooks.before_patches)
    model.patch_embedding.register_forward_hook(hooks.after_patches)
    model.condition_embedder.register_forward_hook(
        lambda _module, _args, out: tuple(None if x is None else _SumOfGradients.apply(ranks, x) for x in out)
    )
    model.proj_out.register_forward_hook(hooks.after_projection)
    shared = [model.scale_shift_table, *model.patch_embedding.parameters(), *model.proj_out.parameters()]
    for block in model.blocks:
        shared += [block.scale_shift_table, *block.norm2.parameters()]
        shared += [block.attn1.to_out[0].bias, block.attn2.to_out[0].bias, block.ffn.net[2].bias]
    return shared


def sum_gradients(grads: Sequence[torch.Tensor], ranks: ContextParallel) -> None:
    """In place: the sum over the ranks, in one collective."""
    summed = ranks.comm.all_reduce_sum(torch.cat([grad.reshape(-1) for grad in grads]))
    for grad, total in zip(grads, summed.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


class _Processor:
    """Attention of this rank's heads over the whole sequence; local tokens [B, s, D] in and out."""

    def __init__(self, ranks: ContextParallel, hooks: _WanHooks) -> None:
        self.ranks, self.hooks = ranks, hooks

    def __call__(
        self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: Any = None, attention_mask: Any = None,
        rotary_emb: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        tokens = self.ranks.gather(hidden_states, 1, self.hooks.length)
        source = tokens if encoder_hidden_states is None else encoder_hidden_states
        query, key = SplitNorms.apply(
            self.ranks, attn.norm_q.eps, attn.to_q(tokens), attn.norm_q.weight, attn.to_k(source), attn.norm_k.weight
        )
        query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in (query, key, attn.to_v(source)))
        if rotary_emb is not None:
            cos, sin = rotary_emb
            query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value)))
        return attn.to_out[0](out.transpose(1, 2).flatten(2))


class _RowLinear(nn.Module):
    """Weight split along its inputs: the ranks' results are summed and split along tokens, then the bias is added."""

    def __init__(self, linear: nn.Linear, ranks: ContextParallel) -> None:
        super().__init__()
        self.ranks = ranks
        self.weight = nn.Parameter(ranks.split(linear.weight.detach(), 1))
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ranks.reduce_scatter(F.linear(x, self.weight), 1) + self.bias


def _column(linear: nn.Linear, ranks: ContextParallel) -> nn.Linear:
    """This rank's rows of the weight, for its part of the outputs."""
    part = nn.Linear(linear.in_features, len(ranks.part(linear.out_features)), device="meta")
    part.weight = nn.Parameter(ranks.split(linear.weight.detach(), 0))
    part.bias = nn.Parameter(ranks.split(linear.bias.detach(), 0))
    return part


class _LeanNorm(nn.Module):
    """The model's RMS norm with the code of `SplitNorms`; torch's keeps four fp32 tensors for the backward on CPUs."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.eps
        self.ranks = ContextParallel.of(None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return SplitNorms.apply(self.ranks, self.eps, x, self.weight)[0]


def use_lean_norms(model: Any) -> None:
    """Give an unsplit model the norms that the split one has, so that a comparison is about the split alone."""
    for block in model.blocks:
        for attention in (block.attn1, block.attn2):
            attention.norm_q, attention.norm_k = _LeanNorm(attention.norm_q), _LeanNorm(attention.norm_k)


class _SumOfGradients(torch.autograd.Function):
    """Identity on what all ranks hold and use for tokens of their own; its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, ranks: ContextParallel, x: torch.Tensor) -> torch.Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return None, ctx.ranks.comm.all_reduce_sum(grad)
