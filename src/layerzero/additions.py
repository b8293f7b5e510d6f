"""Notices trainable parameters that came into a model after `lz.shard`: no rank would ever reduce their gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

from layerzero.errors import ShardingError


class Additions:
    """The modules of ``root``, and how many parameters each has, as they were when this was made."""

    def __init__(self, root: nn.Module, ignored: Iterable[nn.Module]) -> None:
        """What is below ``ignored`` modules may change."""
        self._root = weakref.ref(root)
        self._ignored = weakref.WeakSet(ignored)
        self._known = _modules_of(root)

    def refuse(self, sharded: Iterable[nn.Parameter]) -> None:
        """Compare with the model at rest, whose managed parameters are ``sharded``; most times at the cost of a walk.

        Raises:
            ShardingError: names what was added.
        """
        root = self._root()
        if root is None or self._is_known(root):
            return
        known = {id(p) for p in sharded} | {id(p) for m in self._ignored for p in m.parameters()}
        added = [name for name, p in root.named_parameters() if p.requires_grad and id(p) not in known]
        if added:
            raise ShardingError(
                f"trainable parameters that were added after lz.shard: {', '.join(added[:4])} ({len(added)} in all). "
                f"Their gradients would never be reduced, so ranks would drift apart. Add or replace modules before "
                f"lz.shard."
            )
        self._known = _modules_of(root)

    def _is_known(self, root: nn.Module) -> bool:
        modules = list(root.modules())
        return len(modules) == len(self._known) and all(
            known() is module and len(module._parameters) == num_params
            for module, (known, num_params) in zip(modules, self._known, strict=True)
        )


def _modules_of(root: nn.Module) -> list[tuple[weakref.ref[nn.Module], int]]:
    return [(weakref.ref(module), len(module._parameters)) for module in root.modules()]
