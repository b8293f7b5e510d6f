"""Context parallelism for diffusers' Wan video transformer.

Tokens are frames x rows x columns of patches, in this order, so a rank's part of the tokens lies in some
consecutive frames: only those are embedded. Blocks see local tokens, the output projection's result is gathered.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from layerzero.errors import ShardingError
from layerzero.parallel.context.attention import ulysses_attention
from layerzero.parallel.context.group import NUM_CHECKED_FORWARDS, ContextParallel


class UlyssesWanProcessor:
    """Attention processor for the self-attention of ``WanTransformerBlock``.

    ``rotary_emb`` is (cos, sin, number of tokens in the whole sequence), the tables for local tokens, as
    `parallelize` makes the model pass it.
    """

    def __init__(self, context: ContextParallel) -> None:
        self.context = context

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor, int] | None = None,
    ) -> torch.Tensor:
        """Local tokens [B, s, D] in and out."""
        if encoder_hidden_states is not None or attention_mask is not None or rotary_emb is None:
            raise ShardingError("UlyssesWanProcessor: expected self-attention with rotary embedding and no mask")
        if getattr(attn, "fused_projections", False):
            query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        cos, sin, length = rotary_emb
        query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in (attn.norm_q(query), attn.norm_k(key), value))
        out = ulysses_attention(_rotate(query, cos, sin), _rotate(key, cos, sin), value, self.context, length=length)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3)))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of interleaved pairs: ``x`` [B, s, H, D], tables [1, s, 1, D] with each angle twice."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 0::2]
    return torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2).type_as(x)


def parallelize_wan(model: Any, context: ContextParallel) -> None:
    """Hooks and processors; see `parallelize`."""
    for block in model.blocks:
        block.attn1.set_processor(UlyssesWanProcessor(context))
    hooks = _WanHooks(context, tuple(model.config.patch_size))
    model.register_forward_pre_hook(hooks.before_model, with_kwargs=True)
    model.rope.register_forward_pre_hook(hooks.before_rope)
    model.patch_embedding.register_forward_pre_hook(hooks.before_patches)
    model.patch_embedding.register_forward_hook(hooks.after_patches)
    model.rope.register_forward_hook(hooks.after_rope)
    model.proj_out.register_forward_hook(hooks.after_projection)


class _WanHooks:
    """What happens to one call's tensors; `length` is set where a forward starts, outside any recomputed part."""

    def __init__(self, context: ContextParallel, patch_size: tuple[int, ...]) -> None:
        self.context = context
        self.patch_size = patch_size
        self.length = 0  # tokens of the sample
        self.tokens_per_frame = 0
        self.num_unchecked = NUM_CHECKED_FORWARDS

    def before_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Compare inputs; split one timestep per token."""
        names = ("hidden_states", "timestep", "encoder_hidden_states", "encoder_hidden_states_image", "return_dict")
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        if self.num_unchecked:
            self.num_unchecked -= 1
            self.context.check_alike({name: kwargs.get(name) for name in names[:4]})
        if kwargs["timestep"].ndim == 2:
            kwargs["timestep"] = self.context.split(kwargs["timestep"], 1)
        return (), kwargs

    def before_rope(self, module: nn.Module, args: tuple[torch.Tensor]) -> None:
        """Note the number of tokens; the first thing to be called, also in a stage of a pipeline."""
        frames, *sides = args[0].shape[2:]
        self.tokens_per_frame = math.prod(n // p for n, p in zip(sides, self.patch_size[1:], strict=True))
        self.length = frames // self.patch_size[0] * self.tokens_per_frame
        if self.length < self.context.size:
            raise ShardingError(f"{self.length} tokens can't be split over {self.context.size} context-parallel ranks")

    def _frames(self) -> tuple[int, int]:
        """First and last + 1 of the frames (of patches) that hold local tokens."""
        mine = self.context.part(self.length)
        return mine.start // self.tokens_per_frame, -(-mine.stop // self.tokens_per_frame)

    def before_patches(self, module: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
        """[B, C, F, H, W] to the frames needed here."""
        first, last = self._frames()
        step = self.patch_size[0]
        return args[0][:, :, first * step : last * step]

    def after_patches(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """[B, D, frames, rows, columns] to local tokens [B, D, s], which the model transposes to [B, s, D]."""
        mine = self.context.part(self.length)
        return output.flatten(2).narrow(2, mine.start - self._frames()[0] * self.tokens_per_frame, len(mine))

    def after_rope(self, module: nn.Module, args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, ...]:
        """Tables [1, S, 1, D] to local ones, and S for the processor."""
        cos, sin = output
        return self.context.split(cos, 1), self.context.split(sin, 1), self.length

    def after_projection(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """Local tokens [B, s, P] to all of them."""
        return self.context.gather(output, 1, self.length)
