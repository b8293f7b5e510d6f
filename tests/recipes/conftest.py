"""Recipes are folders of scripts beside the package, so their tests need the repository's root."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.dist.conftest import pool

__all__ = ["pool"]
