"""Warnings, once per text and on the first rank of each node only."""

from __future__ import annotations

import os
import sys
import warnings

_FOLDER = os.path.dirname(__file__) + os.sep


class LayerZeROWarning(UserWarning):
    """Something legal that is probably not meant."""


def warn(message: str) -> None:
    """Warn the user's code, at its line that called the library, on local rank 0."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        warnings.warn(message, LayerZeROWarning, stacklevel=_levels_to_user())


def _levels_to_user() -> int:
    """The ``stacklevel`` with which `warn` names the innermost line outside this package.

    Counted here, as ``skip_file_prefixes`` needs Python 3.12.
    """
    level, frame = 1, sys._getframe(1)  # that of `warn`
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_FOLDER):
        level, frame = level + 1, frame.f_back
    return level
