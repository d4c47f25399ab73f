"""Kinds "jsonl" and "lines": files with one text per line, as units of consecutive lines.

Every line is a sample, a blank one too (`empty_text`): counts then follow from the line ends alone, and a worker
needs no more than its slice. The line end behind the last line makes no further sample.
"""

from __future__ import annotations

import shlex
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from embq.core.errors import SampleError, SourceError
from embq.core.units import Sample, Unit, is_unicode
from embq.sources.access.files import name_of
from embq.sources.columns import ID_COLUMNS, TEXT_COLUMNS, Column, chosen_key, find_name, suggestion
from embq.sources.decode import compact_json, decode_text, form_of_json, parse_object
from embq.sources.formats.text_files import (
    HEAD_BYTES,
    open_planned,
    open_text,
    part_of_lines,
    read_lines,
    refuse_head,
    split_lines,
)
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

    def part(self, unit: Unit, first: int, samples: int | None = None) -> Unit:
        """The unit of some of its lines, which are found by reading those before them."""
        return part_of_lines(unit, first, samples)


class JsonLinesSource(Source):
    """One JSON object per line: a text, perhaps an id, and further fields, which become metadata.

    The key is the id, a string or an integer; a line without one has the key "<file name>:<line number from 1>". An
    id that its unit has seen before makes the later line a `duplicate_key`.
    """

    kind = "jsonl"
    modalities: tuple[str, ...] = ("text",)

    def holds(self, path: str, options: ReadOptions) -> tuple[str, ...]:
        """Texts. One of the first lines must have a text, and one each field that the user named.

        Raises SourceError `missing_column` if none of them has it, `wrong_column_type` if ids are floats,
        `table_damaged` for JSON of another form. A damaged file fails when it is read.
        """
        named = [("--text-column", options.text_column), ("--id-column", options.id_column)]
        named += [("--metadata-columns", name) for name in options.metadata_columns if name != ALL]
        try:
            counts, texts, floats = _first_fields(path, [name for _, name in named])
        except SourceError as error:
            if any(name for _, name in named) or error.code == "table_damaged":
                raise
            return self.modalities
        for option, name in named:
            if name and counts and not counts[name]:
                raise SourceError(
                    f"{path}: none of its first {_LOOK_LINES:,} lines has a field {name!r}; "
                    f"they have {_listed(counts)}",
                    code="missing_column",
                    next_step=f"{suggestion(name, {**texts, **counts})}check {option}, or leave the file out"
                    + ("; '*' keeps all fields" if option == "--metadata-columns" else ""),
                )
        columns = _Columns.of(dict(options.columns))
        if counts and not (columns.text or find_name(counts, TEXT_COLUMNS)):
            near = find_name({name.rpartition(".")[2]: 0 for name in texts}, TEXT_COLUMNS)
            usual = [name for name in texts if near and name.rpartition(".")[2] == near]
            named_so = next(iter(usual or [name for name in texts if name.lower() not in ID_COLUMNS]), "")
            raise SourceError(
                f"{path}: none of its first {_LOOK_LINES:,} lines has a field {', '.join(TEXT_COLUMNS[:-1])} or "
                f"{TEXT_COLUMNS[-1]}; they have {_listed(counts)}",
                code="missing_column",
                next_step=f"name the field of the texts: --text-column {shlex.quote(named_so)}"
                if named_so
                else "write each text as a string in a field text, or leave the file out",
            )
        identity = columns.id or find_name(counts, ID_COLUMNS)
        if identity in floats and identity not in (columns.metadata_names or ()):
            chosen_key([Column(name=identity, role="other", type="float")], {}, path)
        return self.modalities

    def fields(self, path: str, options: ReadOptions) -> Fields:
        """The fields of the first lines."""
        counts, _, _ = _first_fields(path, [options.text_column])
        text = options.text_column or find_name(counts, TEXT_COLUMNS)
        return Fields(names=frozenset(counts), text=text, is_guess=False)

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

    def part(self, unit: Unit, first: int, samples: int | None = None) -> Unit:
        """The unit of some of its lines, which are found by reading those before them."""
        return part_of_lines(unit, first, samples)

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


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{field} ({count:,})" for field, count in counts.most_common(20))


def _first_fields(path: str, named: Sequence[str]) -> tuple[Counter[str], dict[str, int], set[str]]:
    """The fields of the first lines: how many lines have each, the names of texts, and of floats.

    Lines that are no objects have none. Of fields in objects those that the user named are counted. Texts are strings,
    also in objects, named as in doc.text.
    """
    counts: Counter[str] = Counter()
    texts: dict[str, int] = {}
    floats: set[str] = set()
    try:
        with open_planned(Unit(kind="jsonl", source=path)) as (unit, file):
            if form_of_json(head := file.peek(HEAD_BYTES)) is not None:
                refuse_head(unit, head)
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
                    counts.update(name for name in named if name not in fields and _value(fields, name) is not None)
                    floats.update(name for name, value in fields.items() if isinstance(value, float))
                    if len(texts) < _LOOK_LINES:
                        texts.update(dict.fromkeys(_names_of_texts(fields), 0))
    except SourceError as error:
        if error.code not in COMPRESSION_CODES:
            raise
    return counts, texts, floats


def _names_of_texts(fields: dict[str, Any]) -> Iterator[str]:
    for outer, value in fields.items():
        if isinstance(value, str):
            yield outer
        elif isinstance(value, dict):
            yield from (f"{outer}.{name}" for name, inner in value.items() if isinstance(inner, str))


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
    """Fields that the user named, and those that become metadata.

    Attributes:
        text, id: "" for the first of the usual ones that a line has. A line without a named id is a failure.
        metadata_names: None for all that are left.
    """

    text: str
    id: str
    metadata_names: frozenset[str] | None

    @classmethod
    def of(cls, named: Mapping[str, str]) -> _Columns:
        """Those that a unit's options name, or the usual ones."""
        names = frozenset(named.get("metadata_columns", ALL).split(","))
        return cls(named.get("text_column", ""), named.get("id_column", ""), None if ALL in names else names)


def _parse(ordinal: int, key: str, line: bytes | None, columns: _Columns) -> Sample:
    """The sample of one line. An error found after the id was read carries the id as its key."""
    try:
        decoded = _decode_line(line)
        if not decoded or decoded.isspace():
            raise SampleError("empty_text", "the line is blank")
        fields = parse_object(decoded, "bad_json")
        text_name = columns.text or find_name(fields, TEXT_COLUMNS)
        id_name = columns.id or find_name(fields, ID_COLUMNS)
        if id_name == text_name and not columns.id:
            id_name = find_name({name: 0 for name in fields if name != text_name}, ID_COLUMNS)
        identity, text = _value(fields, id_name) if id_name else None, _value(fields, text_name) if text_name else None
        if (isinstance(identity, str) and identity) or type(identity) is int:
            key = str(identity)
        elif columns.id or (isinstance(identity, float) and id_name not in (columns.metadata_names or ())):
            raise SampleError("missing_id", f"no string or integer in {id_name!r}; {_line_fields(fields)}")
        else:
            id_name = ""  # not a key, so it stays among the metadata
        if not isinstance(text, str):
            expected = repr(columns.text) if columns.text else f"any of {', '.join(TEXT_COLUMNS)}"
            raise SampleError("missing_text", f"no string in {expected}; {_line_fields(fields)}")
        if columns.metadata_names is not None:
            rest = {name: value for name, value in fields.items() if name in columns.metadata_names}
            inner = ((name, _value(fields, name)) for name in sorted(columns.metadata_names - rest.keys()))
            rest.update((name, value) for name, value in inner if value is not None)
        else:
            rest = fields
            _remove(rest, text_name)
            if id_name:
                _remove(rest, id_name)
        metadata = compact_json(rest, "bad_json") if rest else None
    except SampleError as problem:
        return Sample(ordinal=ordinal, key=key, error=(problem.code, problem.message))
    return Sample(ordinal=ordinal, key=key, text=text, metadata=metadata, error=_problem_of(text))


def _value(fields: dict[str, Any], name: str) -> Any:
    """The value of a field, or of one in objects, named as in doc.text; None if there is none."""
    value = fields.get(name)
    if value is None and "." in name and name not in fields:
        outer, _, rest = name.partition(".")
        inner = fields.get(outer)
        return _value(inner, rest) if isinstance(inner, dict) else None
    return value


def _remove(fields: dict[str, Any], name: str) -> None:
    """Remove the field that `_value` finds, and objects that are empty then."""
    if name not in fields and "." in name:
        outer, _, rest = name.partition(".")
        if isinstance(inner := fields.get(outer), dict):
            _remove(inner, rest)
            if not inner:
                del fields[outer]
        return
    fields.pop(name, None)


def _line_fields(fields: dict[str, Any]) -> str:
    """The line's fields with their types, for a message."""
    shown = [f"{name} ({type(value).__name__})" for name, value in list(fields.items())[:10]]
    inner = [name for name in _names_of_texts(fields) if name.rpartition(".")[2].lower() in TEXT_COLUMNS]
    hint = f"; a text inside an object is named as in --text-column {shlex.quote(inner[0])}" if inner else ""
    return f"the line has {', '.join(shown) or 'no field'}{', ...' if len(fields) > 10 else ''}{hint}"
