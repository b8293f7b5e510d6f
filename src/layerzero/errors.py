"""The errors that layerzero raises on purpose.

Every message says what happened, to which key, unit or rank, and what to do instead. Broken internal
invariants are `assert` statements, not members of this family.
"""

from __future__ import annotations

from collections.abc import Sequence


class LayerZeroError(Exception):
    """Base of every error that layerzero raises for something its user can change."""


class ConfigError(LayerZeroError, ValueError):
    """A configuration that cannot be read, or holds an unknown key or an unusable value.

    Attributes:
        problems: one line per problem found, without the file's name; empty when the message is all there is.
    """

    def __init__(self, message: str, *, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class ShardingError(LayerZeroError, RuntimeError):
    """A sharded model, or something used with it, was used in a way that would fail or train wrong."""


class DesyncError(LayerZeroError, RuntimeError):
    """Ranks that must agree (on the configuration, the model or the order of units) do not."""


class CheckpointError(LayerZeroError, RuntimeError):
    """A checkpoint that can't be written, is damaged or malformed, or does not fit the model."""
