"""Context parallelism for causal language models of transformers.

The model is called with whole sequences. Before its forward they become this rank's part, with the positions of that
part; the attention function that is registered with transformers attends over the whole sequence for some of the
heads. Masks are built for the whole sequence by transformers' own code, so sliding windows and padding are its own.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import nn

from layerzero.errors import ShardingError
from layerzero.parallel.context.attention import ulysses_attention
from layerzero.parallel.context.group import NUM_CHECKED_FORWARDS, ContextParallel

IMPLEMENTATION = "layerzero_ulysses"
"""Name of the attention function and of its masks in transformers' registries."""

_LENGTH = "layerzero_length"  # keyword that carries the whole sequence's length down to the attention
_IGNORED = -100  # label of tokens without loss, as in transformers

_contexts: weakref.WeakKeyDictionary[nn.Module, ContextParallel] = weakref.WeakKeyDictionary()


def parallelize_language_model(model: Any, context: ContextParallel) -> None:
    """Registration and hooks; see `parallelize`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if getattr(model.config, "is_encoder_decoder", False):
        raise ShardingError(f"{type(model).__name__}: encoder-decoder models can't be split by context.parallelize")
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
    model.set_attn_implementation(IMPLEMENTATION)
    for module in model.modules():
        _contexts[module] = context
    hooks = _LanguageHooks(context)
    model.register_forward_pre_hook(hooks.before, with_kwargs=True)
    model.register_forward_hook(hooks.after)


class _LanguageHooks:
    """Whole sequences in, this rank's part through the model, the whole sequence's loss out."""

    def __init__(self, context: ContextParallel) -> None:
        self.context = context
        self.num_unchecked = NUM_CHECKED_FORWARDS

    def before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Split what has one element per token; labels are shifted first, across the edges of parts."""
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        name = "input_ids" if given.get("input_ids") is not None else "inputs_embeds"
        if self.num_unchecked:
            self.num_unchecked -= 1
            names = (name, "attention_mask", "position_ids", "labels", "shift_labels")
            self.context.check_alike({n: given[n] for n in names if isinstance(given.get(n), torch.Tensor)})
        batch_size, length = given[name].shape[:2]
        _refuse(model, given, length, self.context.size)
        given[name] = self.context.split(given[name], 1)
        positions = given.get("position_ids")
        if positions is None:
            positions = torch.arange(length, device=given[name].device).unsqueeze(0)
        elif given.get("attention_mask") is None and bool((positions.diff(dim=-1) != 1).any()):
            raise ShardingError(
                "context.parallelize: position_ids restart inside a sequence, so several are packed into one: pass a "
                "4-dimensional attention_mask [B, 1, S, S] that keeps them apart"
            )
        if given.get("attention_mask") is None:  # from its shape, masks get to know the length
            given["attention_mask"] = torch.ones(batch_size, length, dtype=torch.bool, device=given[name].device)
        given["position_ids"] = self.context.split(positions, -1)
        given[_LENGTH] = length
        if given.get("labels") is not None:
            self._split_labels(model, given)
        return (), given

    def _split_labels(self, model: Any, given: dict[str, Any]) -> None:
        if not type(model).__name__.endswith("ForCausalLM"):
            raise ShardingError(f"context.parallelize: labels of {type(model).__name__} can't be split")
        labels, shifted = given.pop("labels"), given.get("shift_labels")
        if shifted is None:
            shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
        num_items = given.get("num_items_in_batch")
        if num_items is None:
            num_items = (shifted != _IGNORED).sum()
        given["labels"] = given["shift_labels"] = self.context.split(shifted, 1)
        given["num_items_in_batch"] = num_items / self.context.size  # the mean over ranks divides the sum again

    def after(self, model: Any, args: Any, output: Any) -> Any:
        """The mean of the ranks' losses in place of this rank's."""
        loss = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor) or loss.ndim:
            return None
        loss = _MeanOfRanks.apply(self.context, loss)
        if isinstance(output, tuple):
            return (loss, *output[1:])
        output.loss = loss
        return None


def _refuse(model: Any, given: dict[str, Any], length: int, size: int) -> None:
    cache = given.get("cache") if given.get("cache") is not None else given.get("past_key_values")
    use_cache = given.get("use_cache")
    if cache is not None or (getattr(model.config, "use_cache", False) if use_cache is None else use_cache):
        raise ShardingError(
            "context.parallelize: a key-value cache can't be split: call the model with use_cache=False"
        )
    if not isinstance(given.get("logits_to_keep", 0), int) or given.get("logits_to_keep", 0):
        raise ShardingError("context.parallelize: logits_to_keep counts local tokens only; leave it out")
    if length < size:
        raise ShardingError(f"{length} tokens can't be split over {size} context-parallel ranks")


class _MeanOfRanks(torch.autograd.Function):
    """Mean over the ranks, which all go on to compute the same from it: so the gradient is each rank's own."""

    @staticmethod
    def forward(ctx: Any, context: ContextParallel, loss: torch.Tensor) -> torch.Tensor:
        return context.comm.all_reduce_sum(loss) / context.size

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return (None, *grads)


def _mask(batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Mask [B, 1, S, S] for the whole sequence, None where it is plainly causal; S is the padding mask's length."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(batch_size, kv_length, kv_length, *args, **kwargs)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Query [B, H, s, D], key and value [B, heads, s, D] of local tokens to [B, s, H, D]; as transformers calls it."""
    context = _contexts.get(module)
    if context is None or kwargs.get(_LENGTH) is None:
        raise ShardingError(
            f"{type(module).__name__}: attention {IMPLEMENTATION!r} doesn't know the whole sequence's length: call the "
            f"model that was given to context.parallelize; it has to hand the keywords of its forward to its attention"
        )
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ShardingError(f"{type(module).__name__}: {name} is not supported with context parallelism")
    is_causal = kwargs.get("is_causal")
    is_causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    out = ulysses_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), context, length=kwargs[_LENGTH],
        attn_mask=attention_mask, is_causal=is_causal, scale=scaling, dropout_p=dropout,
    )  # fmt: skip
    return out, None
