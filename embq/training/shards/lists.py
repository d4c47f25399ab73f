"""Reads lists of pictures: .csv, .tsv, .jsonl, or a path on each line."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from embq.core.errors import InputError, SampleError
from embq.core.storage.paths import is_url
from embq.sources.access.files import source_errors
from embq.sources.decode import IMAGE_EXTENSIONS, compact_json, parse_object
from embq.training.shards.pictures import LeftOut, Listing, Picture, indices, numbered, require_pictures

PATHS = ("path", "file", "filepath", "filename", "file_name", "image", "image_path")
CLASSES = ("class", "label", "cls", "class_name")
CAPTIONS = ("caption", "text", "txt", "title")
"""Columns or fields that are taken for each, in this order; the others become metadata."""

TABLES, OBJECTS = (".csv", ".tsv"), (".jsonl", ".ndjson")


class _Row(NamedTuple):
    """A row of a list; "" and None if it has no value."""

    line: int
    path: str
    label: str
    caption: str | None
    metadata: str | None


def listed(
    path: str,
    *,
    vocab: Sequence[str] | None,
    with_classes: bool,
    allow_empty: bool,
    looked: Callable[[int], None] = lambda _: None,
) -> Listing:
    """The pictures of a list, in its order. Paths are relative to the folder of the list.

    A .csv or .tsv has a header, a .jsonl an object on each line; any other file has a path on each line, and may have
    a class behind a tab. Classes that are numbers are indices; others are counted as folders of classes are.

    Raises InputError if the list cannot be read as one, a path is missing or is no picture's, only some rows have
    a class, or a class is refused as in `class_folders`.
    """
    rows = list(_rows(path))
    if not rows:
        raise InputError(f"{path}: names no pictures", code="empty_input", next_step="write one path on each line")
    root = os.path.dirname(path) or "."
    labels = [row.label for row in rows] if with_classes else []
    index = _index(rows, path, vocab) if any(labels) else None
    pictures, left_out = _pictures(rows, root, index, looked)
    classes = None if index is None else tuple(vocab or index)
    if classes is not None and vocab is None and not allow_empty:
        require_pictures(Counter(labels), classes, path)
    return Listing(root=root, pictures=pictures, classes=classes, left_out=tuple(left_out))


def _index(rows: Sequence[_Row], path: str, vocab: Sequence[str] | None) -> Mapping[str, int]:
    if without := [row.line for row in rows if not row.label]:
        raise InputError(
            f"{path}: {len(without):,} of {len(rows):,} pictures have no class, the first in line {without[0]}",
            next_step="give each a class, or take none: --no-classes",
        )
    names = {row.label for row in rows}
    numbers = numbered(names)
    if numbers is None or (vocab is not None and (names <= set(vocab) or len(numbers) > len(vocab))):
        return indices(names, vocab)
    return {name: number for number, name in enumerate(numbers)}


def _pictures(
    rows: Sequence[_Row], root: str, index: Mapping[str, int] | None, looked: Callable[[int], None]
) -> tuple[list[Picture], list[LeftOut]]:
    pictures, missing = [], []
    for row in rows:
        if is_url(row.path) or row.path.rpartition(".")[2].lower() not in IMAGE_EXTENSIONS:
            raise InputError(
                f"line {row.line} of the list: {row.path!r} is not the path of a picture",
                next_step=f"name files of this machine that end in .{', .'.join(IMAGE_EXTENSIONS)}",
            )
        try:
            with source_errors(os.path.join(root, row.path)):
                status = os.stat(os.path.join(root, row.path))
        except InputError as error:
            missing.append(LeftOut(row.path, error.code, error.message))
            continue
        looked(1)
        label = None if index is None else index[row.label]
        pictures.append(Picture(row.path, status.st_size, status.st_mtime_ns, label, row.caption, row.metadata))
    return pictures, missing


def _rows(path: str) -> Iterator[_Row]:
    kind = os.path.splitext(path)[1].lower()
    try:
        with source_errors(path), open(path, encoding="utf-8-sig", newline="") as file:
            if kind in TABLES:
                yield from _of_table(file, path, "\t" if kind == ".tsv" else ",")
            elif kind in OBJECTS:
                yield from _of_objects(file, path)
            else:
                yield from _of_lines(file)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8: {error}", next_step="write the list in UTF-8") from error


def _of_lines(lines: Iterator[str]) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        name, _, label = line.rstrip("\r\n").partition("\t")
        if name:
            yield _Row(number, name, label, None, None)


def _of_table(lines: Iterator[str], path: str, delimiter: str) -> Iterator[_Row]:
    reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
    try:
        names = reader.fieldnames or []
        if not set(PATHS) & set(names):
            raise InputError(
                f"{path}: no column of paths among {', '.join(names) or 'none'}",
                code="missing_column",
                next_step=f"name it one of {', '.join(PATHS)}",
            )
        for fields in reader:
            if None in fields or None in fields.values():
                raise InputError(
                    f"{path}: line {reader.line_num} has more or fewer fields than the header",
                    next_step="quote fields that hold the delimiter, quotes or line ends",
                )
            yield _row(reader.line_num, fields, path)
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num}: {error}", next_step="mend that line") from error


def _of_objects(lines: Iterator[str], path: str) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _row(number, parse_object(line, "bad_json"), path)
            except SampleError as error:
                raise InputError(f"{path}: line {number}: {error.message}", next_step="mend that line") from error


def _row(line: int, fields: Mapping[str, object], path: str) -> _Row:
    taken = {
        aliases[0]: next((name for name in aliases if fields.get(name) not in (None, "")), "")
        for aliases in (PATHS, CLASSES, CAPTIONS)
    }
    if not taken["path"]:
        raise InputError(
            f"{path}: line {line} has no path",
            code="missing_column",
            next_step=f"each needs one of {', '.join(PATHS)}",
        )
    rest = {name: value for name, value in fields.items() if name not in taken.values()}
    caption = fields[taken["caption"]] if taken["caption"] else None
    return _Row(
        line,
        str(fields[taken["path"]]),
        str(fields[taken["class"]]) if taken["class"] else "",
        None if caption is None else caption if isinstance(caption, str) else json.dumps(caption),
        compact_json(rest, "bad_metadata") if rest else None,
    )
