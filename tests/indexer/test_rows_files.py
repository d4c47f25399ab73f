"""Rows for re-ranking that do not fit into memory are read alone, without what lies around them on the disk."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from embq.index.index_files import rows as rows_files

DIM, ROWS = 64, 1_000
SMAPS = Path("/proc/self/smaps")


@pytest.mark.skipif(not SMAPS.exists(), reason="only Linux tells the advice for a mapping")
@pytest.mark.parametrize(("memory", "alone"), [(ROWS * DIM, True), (1 << 30, False)])
def test_rows_are_read_alone_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int, alone: bool
) -> None:
    file = tmp_path / "rows"
    vectors = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM).astype(np.float16)
    file.write_bytes(vectors.tobytes())
    span = SimpleNamespace(first_id=0, rows=ROWS, bytes=file.stat().st_size, check=lambda _: file)
    version: Any = SimpleNamespace(rows=(span,), index=tmp_path, plan=SimpleNamespace(metric="cosine"))
    monkeypatch.setattr(rows_files, "memory_bytes", lambda: memory)
    found = rows_files.RowsFiles(version, DIM)
    assert np.array_equal(found.read(np.array([999, 3])), vectors[[999, 3]].astype(np.float32))
    mapping = SMAPS.read_text().split(str(file))[1]
    assert ("rr" in mapping.split("VmFlags:")[1].splitlines()[0].split()) is alone
    monkeypatch.setattr(rows_files, "MADV_WILLNEED", 9_999)  # the kernel refuses it, where it is told
    with pytest.raises(OSError, match="Invalid argument") if alone else nullcontext():
        found.read(np.array([999, 3]))
