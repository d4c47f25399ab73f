"""Kinds "jsonl" and "lines": files with one text per line, as units of consecutive lines.

Every line is a sample, a blank one too (`empty_text`): counts then follow from the line ends alone, and a worker
needs no more than its slice. The line end behind the last line makes no further sample.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from embq.core.errors import SampleError, SourceError
from embq.core.units import Sample, Unit, is_unicode
from embq.sources.access.files import name_of
from embq.sources.columns import ID_COLUMNS, TEXT_COLUMNS, Column, chosen_key
from embq.sources.decode import compact_json, decode_text, parse_object
from embq.sources.formats.text_files import open_planned, open_text, read_lines, split_lines
from embq.sources.interface import SAMPLE_MAX_BYTES, Fields, Moved, Source, unwatched
from embq.sources.reader_options import ALL, ReadOptions
from embq.sources.unusable import COMPRESSION_CODES


class LinesSource(Source):
    """One text per line; the key is "<file name>:<line number from 1>"."""

    kind = "lines"
    modalities: tuple[str, ...] = ("text",)

    def split(self, path: str, options: ReadOptions) -> Iterator[Unit]:
        """Units of `unit_samples` lines, from one pass over the file."""
        return split_lines(Unit(kind=self.kind, source=path), options.unit_samples, options.unit_bytes)

    def read(self, unit: Unit, on_progress: Moved = unwatched) -> Iterator[Sample]:
        """One sample per line."""
        for ordinal, key, line in _keyed_lines(unit, on_progress):
            text = error = None
            try:
                text = _decode_line(line)
                error = _problem_of(text)
            except SampleError as problem:
                error = (problem.code, problem.message)
            yield Sample(ordinal=ordinal, key=key, text=text, error=error)


class JsonLinesSource(Source):
    """One JSON object per line: a text, perhaps an id, and further fields, which become metadata.

    The key is the id, a string or an integer; a line without one has the key "<file name>:<line number from 1>". An
    id that its unit has seen before makes the later line a `duplicate_key`.
    """

    kind = "jsonl"
    modalities: tuple[str, ...] = ("text",)

    def holds(self, path: str, options: ReadOptions) -> tuple[str, ...]:
        """Texts. A field that the user named must be in one of the first lines.

        Raises SourceError `missing_column` if it is in none of them, `wrong_column_type` if ids are floats.
        A damaged file fails when it is read.
        """
        named = {"--text-column": options.text_column, "--id-column": options.id_column}
        try:
            counts, floats = _first_fields(path)
        except SourceError:
            if any(named.values()):
                raise
            return self.modalities
        for option, name in named.items():
            if name and counts and name not in counts:
                summary = ", ".join(f"{field} ({count:,})" for field, count in counts.most_common(20))
                raise SourceError(
                    f"{path}: none of its first {_LOOK_LINES:,} lines has a field {name!r}; they have {summary}",
                    code="missing_column",
                    next_step=f"check {option}, or leave the file out",
                )
        columns = _Columns.of(dict(options.columns))
        identity = next((name for name in columns.ids if name in counts), "")
        if identity in floats and identity not in (columns.metadata_names or ()):
            chosen_key([Column(name=identity, role="other", type="float")], {}, path)
        return self.modalities

    def fields(self, path: str, options: ReadOptions) -> Fields:
        """The fields of the first lines."""
        names = frozenset(_first_fields(path)[0])
        texts = _Columns.of(dict(options.columns)).texts
        return Fields(names=names, text=next((name for name in texts if name in names), ""), is_guess=False)

    def split(self, path: str, options: ReadOptions) -> Iterator[Unit]:
        """Units of `unit_samples` lines, from one pass over the file; columns that the user named go along."""
        unit = Unit(kind=self.kind, source=path, options=options.columns)
        return split_lines(unit, options.unit_samples, options.unit_bytes)

    def read(self, unit: Unit, on_progress: Moved = unwatched) -> Iterator[Sample]:
        """One sample per line."""
        columns = _Columns.of(dict(unit.options))
        keys: set[str] = set()
        for ordinal, key, line in _keyed_lines(unit, on_progress):
            sample = _parse(ordinal, key, line, columns)
            if sample.key in keys and sample.error is None:
                message = f"line {unit.first + ordinal + 1} repeats the id of an earlier line"
                sample = Sample(ordinal=ordinal, key=sample.key, error=("duplicate_key", message))
            keys.add(sample.key)
            yield sample

    def may_have_metadata(self, unit: Unit) -> bool:
        """True for any file that was planned: only its lines tell."""
        return unit.samples is not None

    def first_metadata(self, unit: Unit, most: int) -> Iterator[str]:
        """From the first lines."""
        for sample in islice(self.read(unit), most):
            if sample.metadata is not None and sample.error is None:
                yield sample.metadata


_LOOK_LINES, _LOOK_BYTES = 1_000, 1 << 22
"""Part of a file that is read to find its fields; it ends with whichever bound comes first."""


def _first_fields(path: str) -> tuple[Counter[str], set[str]]:
    """The fields of the first lines, with the number of lines that have each, and those that hold a float.

    Lines that are no objects have none.
    """
    counts: Counter[str] = Counter()
    floats: set[str] = set()
    try:
        with open_planned(Unit(kind="jsonl", source=path)) as (_, file):
            remaining = _LOOK_BYTES
            for number in range(_LOOK_LINES):
                line = file.readline(remaining)
                remaining -= len(line)
                line = _without_mark(line, number)
                if not line or remaining <= 0:
                    break
                with suppress(SampleError):
                    fields = parse_object(decode_text(line), "bad_json")
                    counts.update(fields.keys())
                    floats.update(name for name, value in fields.items() if isinstance(value, float))
    except SourceError as error:
        if error.code not in COMPRESSION_CODES:
            raise
    return counts, floats


def _keyed_lines(unit: Unit, on_progress: Moved) -> Iterator[tuple[int, str, bytes | None]]:
    """(ordinal, key by line number, line) of each line."""
    name = name_of(unit)
    with open_text(unit, on_progress) as file:
        for ordinal, line in enumerate(read_lines(file, unit)):
            number = unit.first + ordinal
            yield ordinal, f"{name}:{number + 1}", None if line is None else _without_mark(line, number)


def _without_mark(line: bytes, number: int) -> bytes:
    """A line of a file, of the first one (0) without a byte order mark."""
    return line if number else line.removeprefix(BOM_UTF8)


def _decode_line(line: bytes | None) -> str:
    if line is None:
        raise SampleError("too_large", f"the line has more than {SAMPLE_MAX_BYTES} bytes")
    return decode_text(line)


def _problem_of(text: str) -> tuple[str, str] | None:
    """Code and message of a text that cannot be embedded; None for any other."""
    if not text or text.isspace():
        return "empty_text", "the text is empty or only white space"
    if not is_unicode(text):
        return "text_not_utf8", "the text holds half a surrogate pair (\\ud800 to \\udfff), which UTF-8 cannot hold"
    return None


class _Columns(NamedTuple):
    """Fields that a line's text and id may come from, in this order, and those that become metadata.

    Attributes:
        needs_id: a line without one is a failure.
        metadata_names: None for all that are left.
    """

    texts: Sequence[str]
    ids: Sequence[str]
    needs_id: bool
    metadata_names: frozenset[str] | None

    @classmethod
    def of(cls, named: Mapping[str, str]) -> _Columns:
        """Those that a unit's options name, or the usual ones."""
        text, identity = named.get("text_column", ""), named.get("id_column", "")
        names = frozenset(named.get("metadata_columns", ALL).split(","))
        return cls(
            (text,) if text else TEXT_COLUMNS,
            (identity,) if identity else ID_COLUMNS,
            bool(identity),
            None if ALL in names else names,
        )


def _parse(ordinal: int, key: str, line: bytes | None, columns: _Columns) -> Sample:
    """The sample of one line. An error found after the id was read carries the id as its key."""
    text_name = id_name = ""
    try:
        decoded = _decode_line(line)
        if not decoded or decoded.isspace():
            raise SampleError("empty_text", "the line is blank")
        fields = parse_object(decoded, "bad_json")
        for text_name in columns.texts:
            if text_name in fields:
                break
        for id_name in columns.ids:
            if columns.needs_id or (id_name in fields and id_name != text_name):
                break
        else:
            id_name = ""
        identity, text = fields.get(id_name) if id_name else None, fields.get(text_name)
        if (isinstance(identity, str) and identity) or type(identity) is int:
            key = str(identity)
        elif columns.needs_id or (isinstance(identity, float) and id_name not in (columns.metadata_names or ())):
            raise SampleError("missing_id", f"no string or integer in {id_name!r}; {_line_fields(fields)}")
        else:
            id_name = ""  # not a key, so it stays among the metadata
        if not isinstance(text, str):
            expected = repr(text_name) if len(columns.texts) == 1 else f"any of {', '.join(columns.texts)}"
            raise SampleError("missing_text", f"no string in {expected}; {_line_fields(fields)}")
        if columns.metadata_names is not None:
            rest = {name: value for name, value in fields.items() if name in columns.metadata_names}
        else:
            rest = fields
            rest.pop(text_name, None)
            if id_name:
                rest.pop(id_name, None)
        metadata = compact_json(rest, "bad_json") if rest else None
    except SampleError as problem:
        return Sample(ordinal=ordinal, key=key, error=(problem.code, problem.message))
    return Sample(ordinal=ordinal, key=key, text=text, metadata=metadata, error=_problem_of(text))


def _line_fields(fields: dict[str, Any]) -> str:
    """The line's fields with their types, for a message."""
    shown = [f"{name} ({type(value).__name__})" for name, value in list(fields.items())[:10]]
    return f"the line has {', '.join(shown) or 'no field'}{', ...' if len(fields) > 10 else ''}"
