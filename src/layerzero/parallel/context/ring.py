"""Ring attention (Liu et al., 2023): torch's own, behind checks of what it can do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from layerzero.errors import ShardingError
from layerzero.parallel.context.group import ContextParallel


@contextlib.contextmanager
def ring_attention(
    context: ContextParallel, *, buffers: Sequence[torch.Tensor], buffer_seq_dims: Sequence[int]
) -> Iterator[None]:
    """Inside, `scaled_dot_product_attention` runs as ring attention over the group; run the backward inside, too.

    It needs no division of heads, so the group may be larger than their number; `ulysses_attention` sends less where
    the heads suffice. This is ``torch.distributed.tensor.experimental.context_parallel``, a prototype of torch: each
    tensor of ``buffers`` (inputs, labels, tables of positions; no parameters) is cut in place to this rank's part and
    restored at the end. Parts are not consecutive: rank r holds chunks r and 2 * size - 1 - r of 2 * size, which
    balances causal masks, so positions have to be among the buffers.

    Args:
        buffers: tensors with the whole sequence, on the accelerator.
        buffer_seq_dims: the sequence dimension of each.

    Raises:
        ShardingError: on a CPU, for which torch has no ring attention, or if a length is no multiple of 2 * size.
    """
    if context.mesh is None:
        yield
        return
    kinds = {buffer.device.type for buffer in buffers}
    if not buffers or kinds & {"cpu", "meta"}:
        raise ShardingError(
            f"ring_attention: torch's ring attention runs on accelerators only, got buffers on {sorted(kinds)}. "
            f"Use ulysses_attention, which runs everywhere, in a group of at most as many ranks as there are heads."
        )
    for i, (buffer, dim) in enumerate(zip(buffers, buffer_seq_dims, strict=True)):
        if buffer.size(dim) % (2 * context.size):
            raise ShardingError(
                f"ring_attention: dimension {dim} of buffer {i} has length {buffer.size(dim)}, expected a multiple of "
                f"2 x {context.size} ranks: pad it, or use ulysses_attention, which takes any length"
            )
    from torch.distributed.tensor.experimental import context_parallel

    with context_parallel(context.mesh, buffers=list(buffers), buffer_seq_dims=list(buffer_seq_dims)):
        yield
