"""`parallelize`: context parallelism for models of diffusers and transformers, which stay as they are."""

from __future__ import annotations

import weakref

from torch import nn

from layerzero.errors import ShardingError
from layerzero.parallel.context.group import ContextParallel
from layerzero.parallel.context.language import parallelize_language_model
from layerzero.parallel.context.latte import parallelize_latte
from layerzero.parallel.context.wan import parallelize_wan

_BY_CLASS = {
    "WanTransformer3DModel": parallelize_wan,
    "LatteTransformer3DModel": parallelize_latte,
    "PreTrainedModel": parallelize_language_model,
}


_done: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def parallelize(model: nn.Module, context: ContextParallel) -> nn.Module:
    """Let the ranks of ``context`` share each sample that ``model`` is called with; returns it, changed in place.

    Call the model as before, with the same whole inputs on every rank of the group: each rank works on its part of
    the tokens. Call it before ``lz.shard``. Models, told by the names of their classes:

    * diffusers' ``WanTransformer3DModel``: Ulysses in self-attention; the output is whole on every rank.
    * diffusers' ``LatteTransformer3DModel``: frames are split in spatial blocks, patches in temporal ones; the
      output is whole on every rank.
    * a causal language model of transformers: Ulysses in self-attention; logits are this rank's part (`split` labels
      likewise), and with ``labels`` the loss is the whole sequence's.

    Dropout draws from each rank's own generator, so give ranks different seeds for it; noise and other random inputs
    have to be the same on the ranks of a group.

    The first forwards compare the inputs between the ranks.

    Raises:
        ShardingError: for other models, or parts of those that can't be split; a second time for the same model.
        DesyncError: in a forward, if the ranks were given different inputs.
    """
    for cls in type(model).__mro__:
        if cls.__name__ in _BY_CLASS:
            if model in _done:
                raise ShardingError(f"context.parallelize: this {cls.__name__} was parallelized before: call it once")
            _done.add(model)
            if context.size > 1:
                _BY_CLASS[cls.__name__](model, context)
            return model
    raise ShardingError(
        f"context.parallelize knows {', '.join(_BY_CLASS)}, got {type(model).__name__}: split its inputs with "
        f"ContextParallel.split and call ulysses_attention, or ContextParallel.switch, in its attention"
    )
