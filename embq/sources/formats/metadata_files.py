"""Files of captions and metadata for the images beside and below them, by `file_name`: `datasets`' imagefolder."""

from __future__ import annotations

import csv
import io
import os
import posixpath
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any
from unicodedata import normalize

from embq.core.errors import SampleError, SourceError
from embq.core.units import Unit, canonical_json, json_text, json_value
from embq.sources.access.files import read_inside, stat_file
from embq.sources.columns import TEXT_COLUMNS, find_name
from embq.sources.decode import decode_file
from embq.sources.formats.delimited_rows import DELIMITERS
from embq.sources.interface import SAMPLE_MAX_BYTES, unwatched
from embq.sources.reader_options import ReadOptions
from embq.sources.reader_process import client
from embq.sources.rows import without_images

METADATA_FILES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""Names of these files, on this machine. Of several in a folder the first is taken."""

FILE_NAME = "file_name"
"""Their column of the image's path, relative to their folder. A file without it is of another kind, and left alone."""

_TABLE = ReadOptions(text_column=FILE_NAME, id_column=FILE_NAME, metadata_columns=("*",)).columns

_TABLE_MAX_CHARS = 4 * SAMPLE_MAX_BYTES
"""Most characters of a table's rows as JSON; its file, which is compressed, has at most `SAMPLE_MAX_BYTES`."""

Rows = dict[str, dict[str, Any]]
"""The other fields of each row by its `file_name`, as it is written and as `_plain_path` writes it."""

Content = Callable[[str, int | None], bytes | None]
"""Content of a file of the folder by name and planned size. A file that was not planned has no size; None if it is
missing. Raises SampleError if the file cannot be used, SourceError if the storage is away."""


def metadata_files_of(relative: str) -> Iterator[str]:
    """Relative paths at which a file with an image's caption and metadata may be, the nearest first."""
    folder = relative
    while folder:
        folder = folder[: folder.rstrip("/").rfind("/") + 1]
        yield from (folder + file for file in METADATA_FILES)


def fields_of(root: str, relative: str, content: Content) -> tuple[str | None, dict[str, Any]]:
    """Caption, or None, and other fields of an image in the metadata file of a folder that is nearest to it.

    Raises SampleError `bad_metadata` if that file cannot be read.
    """
    for file in metadata_files_of(relative):
        if (data := content(file, None)) is not None:
            row = _row_of(_rows(root, file, data), relative[file.rfind("/") + 1 :])
            fields = {} if row is None else dict(row)
            texts = {name: value for name, value in fields.items() if isinstance(value, str)}
            return fields.pop(find_name(texts, TEXT_COLUMNS), None), fields
    return None, {}


def unmatched(root: str, files: Collection[str], images: Iterable[str]) -> Iterator[str]:
    """A line for each metadata file with rows that name no image, or with images beside or below it without a row.

    Args:
        files: relative paths of the metadata files of a local folder.
        images: relative paths of its images.
    """
    matched, without = Counter[str](), Counter[str]()
    counts: dict[str, tuple[int, str]] = {}  # file -> number of its rows, and the first one's name

    @lru_cache(maxsize=2)
    def rows_of(file: str) -> Rows:
        try:
            rows = _rows(root, file, read_inside(os.path.realpath(root), file, None, unwatched))
        except (SampleError, SourceError):  # which its images tell of
            rows = {}
        counts[file] = len(set(map(id, rows.values()))), next(iter(rows), "")
        return rows

    for relative in images:
        if file := next((file for file in metadata_files_of(relative) if file in files), ""):
            row = _row_of(rows_of(file), relative[file.rfind("/") + 1 :])
            (without if row is None else matched)[file] += 1
    for file in sorted(files):
        if file not in counts:
            rows_of(file)
        rows, first = counts[file]
        facts = []
        if (lost := rows - matched[file]) > 0:
            example = "" if matched[file] else f", such as {first!r}"
            facts.append(f"rows that name no image: {lost:,} of {rows:,}{example}")
        if rows and without[file]:
            facts.append(f"images without a row: {without[file]:,}")
        if facts:
            yield f"{os.path.join(root, file)}: {'; '.join(facts)}"


def _row_of(rows: Rows, relative: str) -> dict[str, Any] | None:
    row = rows.get(relative)
    return rows.get(_plain_path(relative)) if row is None else row


def _plain_path(name: str) -> str:
    """A path as any system writes it: one slash between its parts, composed accents, and no `./`."""
    return normalize("NFC", posixpath.normpath(name.replace("\\", "/")))


def _rows(root: str, file: str, data: bytes) -> Rows:
    path = os.path.join(root, file)
    rows = _parsed(path, stat_file(path).version if path.endswith(".parquet") else "", data)
    if isinstance(rows, SampleError):
        raise SampleError(rows.code, rows.message)
    return rows


@lru_cache(maxsize=2)
def _parsed(path: str, version: str, data: bytes) -> Rows | SampleError:
    """The rows of a file with a `file_name`; for one that cannot be read the error, so that it is read once."""
    try:
        if path.endswith(".parquet"):
            records = list(_of_table(path, version))
        elif path.endswith(".csv"):
            records = _of_csv(decode_file(data))
        else:
            records = [json_value(line) for line in decode_file(data).split("\n") if line.strip()]
        named = [row for row in records if FILE_NAME in row and json_text(row) and canonical_json(row).encode()]
        by_name = {row.pop(FILE_NAME): row for row in named if isinstance(row[FILE_NAME], str)}
        return {**{_plain_path(name): row for name, row in by_name.items()}, **by_name}
    except SampleError as error:
        return error
    except (csv.Error, ValueError, RecursionError, TypeError, AttributeError) as error:
        return SampleError("bad_metadata", f"{path}: a line is no row: {error!r}")


def _of_csv(text: str) -> list[dict[str, Any]]:
    """The rows of a file whose header has a `file_name`, by the delimiter that gives it."""
    if text[:5].strip('"').lower().startswith("sep="):  # Excel's line before the header
        text = text.partition("\n")[2]
    for delimiter in DELIMITERS:
        reader = csv.DictReader(io.StringIO(text, newline=""), restkey="rest", strict=True, delimiter=delimiter)
        if FILE_NAME in (reader.fieldnames or ()):
            return list(reader)
    return []


def _of_table(path: str, version: str) -> Iterator[dict[str, Any]]:
    """The rows of a parquet file, read in the reader process; none if it has no `file_name` of texts."""
    unit = without_images(Unit(kind="parquet", source=path, etag=version, options=_TABLE))
    remaining = _TABLE_MAX_CHARS
    try:
        unit = replace(unit, samples=client.inspect(unit)["rows"])
        for sample in client.read(unit, (), unwatched):
            remaining -= len(sample.metadata or "")
            if remaining < 0:
                raise SampleError("bad_metadata", f"{path}: its rows have more than {_TABLE_MAX_CHARS:,} characters")
            if sample.error is None:
                yield {**json_value(sample.metadata or "{}"), FILE_NAME: sample.key}
    except SourceError as error:
        if error.transient:
            raise
        if error.code not in ("missing_column", "wrong_column_type"):
            raise SampleError("bad_metadata", error.message) from error
