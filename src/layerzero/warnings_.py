"""Warnings, once per text and on the first rank of each node only."""

from __future__ import annotations

import os
import warnings


class LayerZeROWarning(UserWarning):
    """Something legal that is probably not meant."""


def warn(message: str) -> None:
    """Warn the user's code, on local rank 0."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        warnings.warn(message, LayerZeROWarning, stacklevel=3)
