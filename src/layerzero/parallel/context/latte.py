"""Context parallelism for diffusers' Latte: frames split in spatial blocks, patches split in temporal ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from layerzero.errors import ShardingError
from layerzero.parallel.context.group import NUM_CHECKED_FORWARDS, ContextParallel

_TIMESTEP = 4  # place of the timestep among the arguments of a block


def parallelize_latte(model: Any, context: ContextParallel) -> None:
    """Hooks; see `parallelize`."""
    hooks = _LatteHooks(context, model)
    model.register_forward_pre_hook(hooks.before_model, with_kwargs=True)
    model.register_forward_hook(hooks.after_model)
    for index, block in enumerate(model.temporal_transformer_blocks):
        switch = _Switch(context, hooks, is_first=index == 0)
        block.register_forward_pre_hook(switch.before)
        block.register_forward_hook(switch.after)


class _LatteHooks:
    """The model's own code sees a video of this rank's frames."""

    def __init__(self, context: ContextParallel, model: Any) -> None:
        self.context = context
        self.num_frames = 0
        self.num_unchecked = NUM_CHECKED_FORWARDS
        # The model adds it to all frames it sees, unless it sees one only. Here it is added where a block sees them
        # all; the buffer in its place adds nothing.
        self.frame_positions: torch.Tensor = model.temp_pos_embed
        model.temp_pos_embed = model.temp_pos_embed.new_zeros(1, 1, 1)

    def before_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """[B, C, F, H, W] to this rank's frames."""
        names = (
            "hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask",
            "enable_temporal_attentions", "return_dict",
        )  # fmt: skip
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        if self.num_unchecked:
            self.num_unchecked -= 1
            self.context.check_alike({name: kwargs.get(name) for name in names[:4]})
        video = kwargs["hidden_states"]
        self.num_frames = video.size(2)
        if self.num_frames < self.context.size:
            raise ShardingError(
                f"{self.num_frames} frames can't be split over {self.context.size} context-parallel ranks"
            )
        return (), {**kwargs, "hidden_states": self.context.split(video, 2)}

    def after_model(self, model: nn.Module, args: Any, output: Any) -> Any:
        """The whole video from the ranks' frames."""
        if isinstance(output, tuple):
            return (self.context.gather(output[0], 2, self.num_frames), *output[1:])
        output.sample = self.context.gather(output.sample, 2, self.num_frames)
        return output


class _Switch:
    """Around a temporal block: all frames of some patches instead of all patches of some frames.

    Patches of all samples are one dimension of rows that don't depend on each other, and split as such.
    """

    def __init__(self, context: ContextParallel, hooks: _LatteHooks, is_first: bool) -> None:
        self.context = context
        self.hooks = hooks
        self.is_first = is_first
        self.num_rows = 0

    def before(self, block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Hidden states [rows, f, D] to [some rows, F, D], and their timestep embeddings [rows, E] likewise."""
        hidden, timestep = args[0], args[_TIMESTEP]
        self.num_rows = hidden.size(0)
        hidden = self.context.switch(hidden, gather_dim=1, split_dim=0, length=self.hooks.num_frames)
        if self.is_first and self.hooks.num_frames > 1:
            hidden = hidden + self.hooks.frame_positions.to(hidden)
        return (hidden, *args[1:_TIMESTEP], self.context.split(timestep, 0), *args[_TIMESTEP + 1 :])

    def after(self, block: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """[some rows, F, D] to [rows, f, D]."""
        return self.context.switch(output, gather_dim=0, split_dim=1, length=self.num_rows)
