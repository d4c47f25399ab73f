"""Command line: entry point, shared options and the translation of options to a run request."""

from embq.app.cli.entry_point import main

__all__ = ["main"]
