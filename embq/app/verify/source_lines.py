"""Finds the lines of text files that were changed after planning, as a retry finds them."""

from __future__ import annotations

from dataclasses import replace

from embq.core.errors import EmbqError
from embq.core.units import Unit
from embq.sources.formats.delimited_rows import read_header
from embq.sources.formats.text_files import open_text, skip_lines, split_lines
from embq.sources.interface import unwatched
from embq.sources.kinds import source_for

SLICED = ("jsonl", "lines", "csv")
"""Kinds whose units are slices of a file by bytes."""

EVERY = 1_000
"""Lines between two places that are kept."""


class SourceLines:
    """Byte offsets of lines; those of the last source are kept."""

    def __init__(self) -> None:
        self._of: tuple[str, str] | None = None
        self._slices: list[Unit] = []
        self._last: Unit | None = None

    def placed(self, unit: Unit) -> Unit:
        """The unit with the current byte range of its lines; unchanged if the source cannot be read."""
        assert unit.samples is not None
        try:
            if unit.kind == "csv":
                return self._placed_rows(unit)
            if self._of != (unit.source, unit.etag):
                whole_source = replace(unit, start=0, stop=0, first=0, samples=None, retry=None)
                self._of, self._slices = (unit.source, unit.etag), list(split_lines(whole_source, EVERY))
            if self._slices[0].etag != unit.etag:
                return unit
            start = self._at(unit.first)
            return replace(unit, start=start, stop=self._at(unit.first + unit.samples))
        except EmbqError:
            return unit  # reading it says why

    def _at(self, line: int) -> int:
        """The offset of the first byte of a line, counted from 0; that of the end if there are fewer."""
        of = self._slices[min(line // EVERY, len(self._slices) - 1)]
        at, remaining = of.start, line - of.first
        with open_text(of, unwatched) as text:
            text.seek(at)
            return at + skip_lines(text, remaining)

    def _placed_rows(self, unit: Unit) -> Unit:
        """Of a table, whose rows may have several lines: found behind those that were found last."""
        assert unit.samples is not None
        last = self._last
        if last is None or (last.source, last.etag) != (unit.source, unit.etag) or last.first > unit.first:
            with open_text(unit, unwatched) as text:
                last = replace(unit, start=read_header(text, unit)[2], first=0)
        part = source_for(unit.kind).part(last, unit.first - last.first, unit.samples)
        self._last = replace(unit, start=part.start, stop=part.stop)
        return self._last
