"""What every part format provides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A file that was written: its rows, its size and the hash of its bytes."""

    rows: int
    bytes: int
    sha256: str


class Store(Protocol):
    """One part format."""

    suffix: str

    def write(self, table: pa.Table, path: Path, *, temporary: Path, metadata: Mapping[str, str]) -> Stored:
        """Write a table as one closed file under its final name, durably. OutputError leaves nothing behind."""
        ...
