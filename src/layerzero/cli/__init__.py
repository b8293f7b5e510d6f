"""The ``layerzero`` command: parses and prints. What it does is in `layerzero.checkpoint`."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the console script."""
    try:
        from layerzero.cli.app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("typer", "rich"):
            raise
        sys.exit(f"The layerzero command needs typer and rich, and {error.name} is missing: pip install typer rich")
    app()
