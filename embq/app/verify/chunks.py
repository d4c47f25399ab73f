"""Checks the rows of a chunked text: each chunk once, at its stated offsets, and no text left out.

The splitters are not used: chunks are checked against the text itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from embq.core import wire

COLUMNS = ("document", "chunk", "chunks", "char_start", "char_end")


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """One row of a chunked text, as stored."""

    key: str
    document: str
    chunk: int
    chunks: int
    start: int
    end: int
    text: str | None


class Documents:
    """The rows and failures of one unit, grouped by text."""

    def __init__(self, rows: pa.Table, failures: pa.Table) -> None:
        self.parts: dict[int, list[ChunkRow]] = {}
        self.failed: dict[int, list[str]] = {}
        for ordinal, *values in zip(*_columns(rows), strict=True) if rows.num_rows else ():
            self.parts.setdefault(ordinal, []).append(ChunkRow(*values))
        for ordinal, key in zip(*_pairs(failures), strict=True) if failures.num_rows else ():
            self.failed.setdefault(ordinal, []).append(key)

    @property
    def ordinals(self) -> set[int]:
        """The texts that have a row or a failure."""
        return {*self.parts, *self.failed}

    def check(self, ordinal: int, key: str, text: str | None) -> str:
        """The first fault in the rows and failures of one text, or "".

        Args:
            key: the key of the text in the source.
            text: the text in the source; None if it could not be read.
        """
        parts = sorted(self.parts.get(ordinal, ()), key=lambda part: part.chunk)
        failed = self.failed.get(ordinal, [])
        if not parts and failed == [f"{key}#"]:
            return ""
        if not parts and not failed:
            return "neither a row nor a failure"
        if wrong := next((part for part in parts if part.document != key or part.key != f"{key}#{part.chunk}"), None):
            return f"a row with the key {wrong.key!r} of {wrong.document!r}"
        return self._numbers(key, parts, failed) or ("" if text is None else self.content(text, parts, bool(failed)))

    def _numbers(self, key: str, parts: Sequence[ChunkRow], failed: Sequence[str]) -> str:
        """Check that chunk numbers are complete and unique; without a row their total is not known."""
        numbers = [part.chunk for part in parts]
        for name in failed:
            document, _, number = name.rpartition("#")
            chunk = wire.decimal(number)
            if document != key or chunk is None:
                return f"a failure with the key {name!r}"
            numbers.append(chunk)
        counts = {part.chunks for part in parts} or {len(numbers)}
        if counts != {len(numbers)} or sorted(numbers) != list(range(len(numbers))):
            totals = " or ".join(str(count) for count in sorted(counts))
            return f"chunks {_ranges(sorted(numbers))}, and its rows say that it has {totals}"
        return ""

    def content(self, text: str, parts: Sequence[ChunkRow], incomplete: bool) -> str:
        """Check that each chunk is the slice it states, with only white space in between."""
        end = 0
        for part in parts:
            if part.text != text[part.start : part.end] or not part.text or part.text != part.text.strip():
                return f"chunk {part.chunk} is not what stands between characters {part.start} and {part.end}"
            if not incomplete and text[end : part.start].strip():
                return f"what stands between characters {end} and {part.start} is in no chunk"
            end = max(end, part.end)
        if not incomplete and text[end:].strip():
            return f"what stands behind character {end} is in no chunk"
        return ""


def _columns(rows: pa.Table) -> list[list[Any]]:
    return [rows[name].to_pylist() for name in ("ordinal", "key", *COLUMNS, "caption")]


def _pairs(failures: pa.Table) -> list[list[Any]]:
    return [failures[name].to_pylist() for name in ("ordinal", "key")]


def _ranges(numbers: Sequence[int]) -> str:
    """The first numbers, and how many there are more."""
    shown = ", ".join(str(number) for number in numbers[:8])
    return shown + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
