"""Measurements. Each module prints a table and writes build/bench/<name>.json, with the machine it ran on.

With BENCH_RESULTS=bench/results the result replaces the one that the documentation quotes.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path


def _help(argv: list[str]) -> None:
    """For `python -m bench.NAME --help`: print the docstring of that module, before it imports anything large."""
    name = argv[argv.index("-m") + 1] if "-m" in argv else ""
    path = Path(__file__).parents[1].joinpath(*name.split(".")).with_suffix(".py")
    if name.startswith("bench.") and "--help" in argv and path.exists():
        print(ast.get_docstring(ast.parse(path.read_text())))
        sys.exit()


_help(sys.orig_argv)
