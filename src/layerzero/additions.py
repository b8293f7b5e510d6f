"""Notices trainable parameters that came into a model after `lz.shard`: no rank would ever reduce their gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

from layerzero.errors import ShardingError


class Additions:
    """The modules and parameters of ``root`` as they were when this was made, by their number."""

    def __init__(self, root: nn.Module, ignored: Iterable[nn.Module]) -> None:
        """What is below ``ignored`` modules may change."""
        self._root = weakref.ref(root)
        self._ignored = weakref.WeakSet(ignored)
        self._num = _num_parts(root)

    def refuse(self, sharded: Iterable[nn.Parameter]) -> None:
        """Compare with the model at rest, whose managed parameters are ``sharded``; most times at the cost of a walk.

        Raises:
            ShardingError: names what was added.
        """
        root = self._root()
        if root is None or (num := _num_parts(root)) == self._num:
            return
        known = {id(p) for p in sharded} | {id(p) for m in self._ignored for p in m.parameters()}
        added = [name for name, p in root.named_parameters() if p.requires_grad and id(p) not in known]
        if added:
            raise ShardingError(
                f"trainable parameters that were added after lz.shard: {', '.join(added[:4])} ({len(added)} in all). "
                f"Their gradients would never be reduced, so ranks would drift apart. Add them before lz.shard."
            )
        self._num = num


def _num_parts(root: nn.Module) -> int:
    return sum(1 + len(module._parameters) for module in root.modules())
