"""Small indices of small runs, built in this process by `embq index`."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from embq.app.cli import entry_point
from embq.core.errors import Exit


def build_index(root: Path, *options: str, output: str, to: Path | None = None) -> Path:
    """Build the index of an output of a run, or build it anew, and publish it; gives its folder."""
    index = to or root / "index" / output
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        command = ["index", root, "--vector-name", output, "--output", index, "--overwrite", "--quiet", *options]
        status = entry_point.run([str(word) for word in command])
    assert status == Exit.DONE, said.getvalue()
    return index
