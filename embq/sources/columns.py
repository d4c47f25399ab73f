"""Chooses the columns of a table for text, image, key and metadata: named by the user, or found if unambiguous."""

from __future__ import annotations

import difflib
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from embq.core.errors import SourceError
from embq.sources.interface import Fields
from embq.sources.reader_options import ALL

TEXT_COLUMNS = ("text", "caption", "content", "document", "passage", "body")
"""Names of text columns, in order of preference; the user's choice goes first."""

ID_COLUMNS = ("id", "key", "_id", "doc_id")
"""Names of key columns, in order of preference; the user's choice goes first."""

IMAGE_COLUMNS = ("image", "img", "image_bytes", "jpg", "jpeg", "png", "webp", "bytes")
"""Columns of bytes with such a name hold images, whatever else the table has."""

LINK_COLUMNS = ("image_path", "image_file", "image")
"""Columns of strings with such a name hold the paths of images. URLs are read only if the user names the column."""

_KEYS = ("text", "integer", "exact")
"""Roles of columns that can hold keys."""

_PLAIN = (*_KEYS, "other")
"""Roles of columns that can become JSON, which has no bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table.

    Attributes:
        name: as the table has it.
        role: "text", "integer", "exact" (a UUID, decimal, date or time, which text gives exactly), "bytes", "image" (a
            struct of bytes and path), "opaque" (with bytes among other values) or "other".
        type: the type's name in the table's own words, for messages.
        inner: whether it is a field of a struct, named as in doc.text; it is taken only where the user names it.
    """

    name: str
    role: str
    type: str
    inner: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenColumns:
    """The columns that are taken from each row; "" if there is none.

    Attributes:
        text: column of the text or caption.
        image: column of the image.
        is_link: whether that column holds paths or URLs instead of bytes.
        key: column of the key.
        metadata: columns that become metadata, in the user's order.
    """

    text: str
    image: str
    is_link: bool
    key: str
    metadata: tuple[str, ...]

    @property
    def modalities(self) -> tuple[str, ...]:
        """Modalities that samples of this table can have."""
        return (("image",) if self.image else ()) + (("text",) if self.text else ())

    @property
    def metadata_only(self) -> ChosenColumns:
        """The same metadata, and nothing else."""
        return ChosenColumns(text="", image="", is_link=False, key="", metadata=self.metadata)

    @property
    def names(self) -> list[str]:
        """The columns that must be read, each once."""
        return list(dict.fromkeys((*filter(None, (self.text, self.image, self.key)), *self.metadata)))


def choose(columns: Sequence[Column], named: Iterable[tuple[str, str]], path: str) -> ChosenColumns:
    """The choice for a table with `columns`; `path` is named in errors.

    Args:
        columns: all columns of the table.
        named: columns that the user named, as units carry them.

    Raises SourceError `missing_column`, `ambiguous_column` or `wrong_column_type`.
    """
    options = dict(named)
    given, columns = columns, [_as_text(column, options) for column in columns]
    image = _image(columns, options, path)
    text = _text(columns, options, path, image.name if image else "")
    requested = tuple(name for name in options.get("metadata_columns", "").split(",") if name)
    key = chosen_key(columns, options, path, text, (image.name if image else "", *requested))
    metadata = requested
    if ALL in requested:
        taken = set(filter(None, (text, image.name if image else "", key)))
        metadata = tuple(c.name for c in given if not c.inner and c.name not in taken and c.role in _PLAIN)
    else:
        for name in requested:
            _typed(given, name, (*_PLAIN, "opaque"), "--metadata-columns", path)
    choice = ChosenColumns(
        text=text,
        image=image.name if image else "",
        is_link=image is not None and image.role == "text",
        key=key,
        metadata=metadata,
    )
    refuse_duplicates(choice.names, [column.name for column in columns], path)
    return choice


def fields_of(choice: ChosenColumns, names: Iterable[str], named: Iterable[tuple[str, str]]) -> Fields:
    """The columns of a file with the column of its texts, which is a guess if neither its name nor the user says so."""
    is_guess = bool(choice.text) and "text_column" not in dict(named) and choice.text.lower() not in TEXT_COLUMNS
    return Fields(names=frozenset(names), text=choice.text, is_guess=is_guess)


def _as_text(column: Column, options: Mapping[str, str]) -> Column:
    """The column; as one of texts if it holds bytes and is called like texts, or named by the user.

    Hive, Impala and old versions of Spark write strings to parquet as bytes without an annotation.
    """
    called = column.name == options.get("text_column") or (
        column.name.lower() in TEXT_COLUMNS and column.name != options.get("image_column")
    )
    return replace(column, role="text") if called and column.role == "bytes" else column


def refuse_duplicates(chosen: Iterable[str], names: Sequence[str], path: str) -> None:
    """Raise SourceError `ambiguous_column` if a wanted name is that of several columns."""
    counts = Counter(names)
    for name in chosen:
        if counts[name] > 1:
            at = [str(number) for number, other in enumerate(names, 1) if other == name]
            raise SourceError(
                f"{path}: columns {', '.join(at[:-1])} and {at[-1]} have one name, {name!r}",
                code="ambiguous_column",
                next_step="give each column its own name, or name only others with --text-column, --image-column, "
                "--id-column and --metadata-columns",
            )


def left_out(columns: Sequence[Column], named: Iterable[tuple[str, str]], choice: ChosenColumns) -> list[Column]:
    """The columns that "*" should have taken as metadata, and that cannot become JSON."""
    if ALL not in dict(named).get("metadata_columns", "").split(","):
        return []
    return [c for c in columns if not c.inner and c.role not in _PLAIN and c.name not in choice.names]


def shown(columns: Iterable[Column]) -> str:
    """Names and types of columns, for a message."""
    listed = [f"{column.name} ({column.type})" for column in columns]
    return ", ".join(listed[:20]) + (f" and {len(listed) - 20} more" if len(listed) > 20 else "") if listed else "none"


def _image(columns: Sequence[Column], options: Mapping[str, str], path: str) -> Column | None:
    if name := options.get("image_column"):
        return _typed(columns, name, ("bytes", "image", "text"), "--image-column", path)
    columns = _outer(columns)
    free = [column for column in columns if column.name != options.get("text_column")]
    data = [column for column in free if column.role in ("bytes", "image")]
    by_name = _first(data, IMAGE_COLUMNS) or _first([c for c in free if c.role == "text"], LINK_COLUMNS)
    structs = [column for column in data if column.role == "image"]
    if by_name:
        return by_name
    if len(structs) == 1:
        return structs[0]
    texts = [column for column in columns if column.role == "text"]
    if options.get("text_column") or _first(texts, TEXT_COLUMNS):
        return None  # it is a table of texts, and other bytes in it may be anything
    if len(data) > 1:
        raise _ambiguous(path, "images", data, "--image-column")
    return data[0] if data else None


def _text(columns: Sequence[Column], options: Mapping[str, str], path: str, image: str) -> str:
    if name := options.get("text_column"):
        return _typed(columns, name, ("text",), "--text-column", path).name
    columns = _outer(columns)
    taken = {image, options.get("id_column")}
    texts = [column for column in columns if column.role == "text" and column.name not in taken]
    if by_name := _first(texts, TEXT_COLUMNS):
        return by_name.name
    if image:
        return ""  # only the user knows which of the other strings is a caption
    candidates = [column for column in texts if column.name.lower() not in ID_COLUMNS]
    if len(columns) == 1:
        candidates = texts  # a list of texts, whatever it is called; beside other columns, ids are no texts
    if len(candidates) > 1:
        raise _ambiguous(path, "texts", candidates, "--text-column")
    if not candidates:
        raise SourceError(
            f"{path}: no column of texts or images; it has {shown(columns)}",
            code="missing_column",
            next_step=_ONE_ROW_EACH
            if any(map(_is_list, columns))
            else "name the column with --text-column or --image-column, or leave the file out"
            if any(column.role in ("text", "bytes", "image") for column in columns)
            else "cast the column that is to be embedded to strings, or leave the file out",
        )
    return candidates[0].name


def chosen_key(
    columns: Sequence[Column], options: Mapping[str, str], path: str, text: str = "", taken: Sequence[str] = ()
) -> str:
    """The column of keys; "" if rows are counted.

    A column that is called like one of keys, and cannot hold any, is refused unless the user named it as something
    else (`taken`): its values would be lost.
    """
    if name := options.get("id_column"):
        return _typed(columns, name, _KEYS, "--id-column", path).name
    free = [column for column in _outer(columns) if column.name != text]
    if match := _first([column for column in free if column.role in _KEYS], ID_COLUMNS):
        return match.name
    if match := _first([c for c in free if c.name not in taken and c.type != "null"], ID_COLUMNS):
        raise SourceError(
            f"{path}: no keys can be made of column {match.name!r}, which is of type {match.type}",
            code="wrong_column_type",
            next_step="write it as text or integers, name another column with --id-column, or keep it as metadata with "
            f"--metadata-columns {match.name} and have the rows counted",
        )
    return ""


def _first(columns: Sequence[Column], names: Sequence[str]) -> Column | None:
    """The column whose name, in either case, comes first in `names`."""
    by_name = {column.name: column for column in reversed(columns)}
    name = find_name(by_name, names)
    return by_name[name] if name else None


def find_name(names: dict[str, Any], usual: Sequence[str]) -> str:
    """The first of `usual`, which are in lower case, that is among `names` in either case, as it is written there."""
    if usual[0] in names:  # in nearly every line of most files
        return usual[0]
    written = {name.lower(): name for name in reversed(names)}
    return next((name if name in names else written[name] for name in usual if name in written), "")


def suggestion(name: str, names: Iterable[str]) -> str:
    """The beginning of a next step, "did you mean ...? ", where one of `names` is near to `name`."""
    short = {other.lower(): other for other in islice(names, 1_000) if len(other) <= 100}
    near = difflib.get_close_matches(name[:100].lower(), short, n=3)
    return f"did you mean {' or '.join(repr(short[other]) for other in near)}? " if near else ""


def _outer(columns: Sequence[Column]) -> list[Column]:
    return [column for column in columns if not column.inner]


_ONE_ROW_EACH = "give each item of a list a row of its own, as with unnest() of DuckDB or explode() of pandas"


def _is_list(column: Column) -> bool:
    return column.type.partition("<")[0].endswith(("list", "list_view"))


def _typed(columns: Sequence[Column], name: str, roles: Sequence[str], option: str, path: str) -> Column:
    refuse_duplicates([name], [column.name for column in columns], path)
    column = next((column for column in columns if column.name == name), None)
    if column is None:
        raise SourceError(
            f"{path}: no column {name!r}; it has {shown(columns)}",
            code="missing_column",
            next_step=f"{suggestion(name, (c.name for c in columns))}check {option}, or leave the file out",
        )
    if column.role not in roles:
        usable = [other for other in columns if other.role in roles]
        raise SourceError(
            f"{path}: column {name!r} is of type {column.type}; usable: {shown(usable)}",
            code="wrong_column_type",
            next_step=_ONE_ROW_EACH
            if _is_list(column)
            else f"name another column with {option}"
            if usable
            else "cast it to strings, or leave the file out",
        )
    return column


def _ambiguous(path: str, what: str, candidates: Sequence[Column], option: str) -> SourceError:
    return SourceError(
        f"{path}: more than one column may hold the {what}: {shown(candidates)}",
        code="ambiguous_column",
        next_step=f"say which: {option} {shlex.quote(candidates[0].name)}",
    )
