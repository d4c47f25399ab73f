"""Small indices of small runs, built and asked in this process by `embq index` and `embq search`."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from embq.app.cli import entry_point
from embq.core.errors import Exit
from embq.core.rows.spec import RowSpec
from tests.support.outputs.build import build, write_jsonl, write_tar


def build_index(root: Path, *options: str, output: str, to: Path | None = None) -> Path:
    """Build the index of an output of a run, or build it anew, and publish it; gives its folder."""
    index = to or root / "index" / output
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        command = ["index", root, "--vector-name", output, "--output", index, "--overwrite", "--quiet", *options]
        status = entry_point.run([str(word) for word in command])
    assert status == Exit.DONE, said.getvalue()
    return index


def texts(folder: Path, rows: int) -> Path:
    """An input of texts with metadata: `text N`, for N from 0."""
    lines: list[object] = [
        {"id": f"k{i}", "text": f"text {i}", "url": f"http://x/{i}", "n": i if i % 2 else None} for i in range(rows)
    ]
    return write_jsonl(folder / "texts.jsonl", lines)


def pairs_indexed(folder: Path, count: int, *, dim: int) -> Path:
    """A run of images with captions, `image N` and `caption N`, with an index of each."""
    members = []
    for i in range(count):
        members += [(f"s{i:02d}.jpg", f"image {i}".encode()), (f"s{i:02d}.txt", f"caption {i}".encode())]
    shard, rows = write_tar(folder / "a.tar", members), RowSpec(normalize=True)
    root = build(folder / "pairs", [shard], model=f"stub:{dim}", modalities=("image", "text"), rows=rows)
    for output in ("image", "text"):
        build_index(root, output=output)
    return root


def search_refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, code and all that is said of a search that is refused."""
    status = entry_point.run(["search", *arguments])
    said = capsys.readouterr()
    assert said.out == ""
    head, _, message = said.err.partition("]: ")
    assert "Traceback" not in said.err
    assert "next:" in message
    return status, head.removeprefix("error["), message
