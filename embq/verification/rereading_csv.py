"""Compressed texts and csv read a second time: by the standard library, from the beginning of each file.

As in `rereading`, nothing of `sources` is used here but what the documentation promises about columns and keys.
"""

from __future__ import annotations

import atexit
import csv
import itertools
import os
import re
from collections.abc import Iterator
from typing import IO, Any

from core.units import Unit
from embq.verification.decompression import opened
from embq.verification.rereading_tables import Row, key_of, linked, pick

CSV_FIELD_MAX_BYTES = 64_000_000


class _Kept:
    """The one file that was read last, so that slices of it are not each reached from its beginning."""

    def __init__(self) -> None:
        self._key: tuple[str, str] | None = None
        self._file: IO[bytes] | None = None
        self.rows: tuple[int, Iterator[list[str] | None], list[str]] | None = None
        atexit.register(self.close)

    def open(self, unit: Unit) -> IO[bytes]:
        """The text, decompressed; anywhere in it."""
        key = (unit.source, unit.etag)
        if self._file is None or self._key != key:
            self.close()
            self._key, self._file = key, opened(unit.source, dict(unit.options).get("compression", ""))
        return self._file

    def close(self) -> None:
        """Let go of it."""
        if self._file is not None:
            self._file.close()
        self._file = self._key = self.rows = None


KEPT = _Kept()


def csv_rows(unit: Unit, _images: bool) -> Iterator[Row]:
    """The rows of a slice of a .csv or .tsv, counted from the beginning of the file."""
    csv.field_size_limit(CSV_FIELD_MAX_BYTES)
    file = KEPT.open(unit)
    if KEPT.rows is None or KEPT.rows[0] > unit.first:
        file.seek(0)
        lines = (line.decode("latin-1") for line in file)
        first = next(lines).removeprefix("\xef\xbb\xbf")  # the bytes of a byte order mark
        delimiter = "\t" if re.search(r"\.(tsv|tab)(\.\w+)?$", unit.source.lower()) else _first_of(first)
        reader = csv.reader(itertools.chain([first], lines), delimiter=delimiter, strict=True)
        head = [(key_of(name.encode("latin-1"))) for name in next(reader)]
        KEPT.rows = (0, _records(reader, len(head)), head)
    position, records, head = KEPT.rows
    text, image, key = pick(dict.fromkeys(head, "text"), dict(unit.options))
    others = _other_columns(head, dict(unit.options), (text, image, key))
    folder = os.path.dirname(unit.source)
    rows = itertools.islice(records, unit.first - position, unit.first - position + (unit.samples or 0))
    for number, fields in enumerate(rows, start=unit.first + 1):
        KEPT.rows = (number, records, head)
        row = {} if fields is None else {n: f.encode("latin-1") for n, f in zip(head, fields, strict=True)}
        link = row.get(image) if image else None
        yield (
            key_of(row.get(key) if key else None) or f"{os.path.basename(unit.source)}:{number}",
            linked(folder, os.fsdecode(link)) if link else None,
            row.get(text) if text else None,
            {name: key_of(row[name]) for name in others if name in row},
        )


def _other_columns(head: list[str], named: dict[str, str], taken: tuple[str, ...]) -> list[str]:
    wanted = named.get("metadata_columns", "*").split(",")
    return [name for name in head if not name or name not in taken] if "*" in wanted else wanted


def _first_of(line: str) -> str:
    return next((one for one in ",;\t" if one in line), ",")


def _records(reader: Any, columns: int) -> Iterator[list[str] | None]:
    """The rows; None for one that is not as the header says."""
    while True:
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error:
            yield None
            continue
        if fields or columns == 1:
            fields = fields or [""]
            yield fields if len(fields) == columns else None
