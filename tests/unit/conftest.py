"""Fixtures of several unit tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from embq.core.run.layout import Layout
from embq.producer.enqueue import Request
from embq.sources.reader_options import ReadOptions


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """An output folder, made and empty."""
    layout = Layout(tmp_path / "out")
    layout.make()
    return layout


@pytest.fixture
def request_(tmp_path: Path) -> Request:
    """A request to embed in/a.txt and in/b.txt, 25 lines each, in six units."""
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        (tmp_path / "in" / f"{name}.txt").write_text("".join(f"{name} {n}\n" for n in range(25)))
    return Request(
        inputs=(str(tmp_path / "in" / "*.txt"),),
        output=tmp_path / "out",
        models=("stub:4",),
        modalities=(),
        precision="fp32",
        part_rows=1000,
        options=ReadOptions(unit_samples=10),
        version="test",
    )
