"""Values of Arrow record batches: roles of columns, and rows as samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from embq.core.errors import SampleError
from embq.core.units import Sample
from embq.sources.columns import ChosenColumns, Column
from embq.sources.rows import RowSamples


class Values(NamedTuple):
    """Values of the chosen columns of a batch, each a list with one value for each row.

    Attributes:
        keys, texts, images: of the columns that hold them, else None for each row.
        links: paths or URLs of images, likewise.
        metadata: by column.
    """

    keys: list[Any]
    texts: list[bytes | None]
    images: list[bytes | None]
    links: list[bytes | None]
    metadata: dict[str, list[Any]]


def values_of(batch: pa.RecordBatch, choice: ChosenColumns) -> Values:
    """The values of the columns that were chosen; raises what pyarrow raises if it cannot convert one."""
    nothing: list[bytes | None] = [None] * batch.num_rows
    images, links = nothing, nothing
    if choice.is_link:
        links = _bytes_of(_column(batch, choice.image))
    elif choice.image:
        images, links = _images_of(_column(batch, choice.image))
    return Values(
        keys=_keys_of(_column(batch, choice.key)) if choice.key else nothing,
        texts=_texts_of(_column(batch, choice.text)) if choice.text else nothing,
        images=images,
        links=links,
        metadata={name: _values_of(_column(batch, name)) for name in choice.metadata},
    )


def samples_of(values: Values, choice: ChosenColumns, rows: RowSamples) -> Iterator[Sample]:
    """One sample for each row."""
    for row, image in enumerate(rows.images(values.images, values.links)):
        yield rows.sample(
            choice,
            identity=values.keys[row],
            text=values.texts[row],
            image=image,
            fields={name: of_column[row] for name, of_column in values.metadata.items()},
        )


def check(batch: pa.RecordBatch) -> None:
    """Raise ArrowInvalid where offsets, indices or lengths in a batch lead out of it, as damage in an IPC file does.

    Arrow itself trusts a message, and reads memory that is not its own. Strings may hold any bytes.
    """
    for column in batch.columns:
        _check(column)


def _check(column: pa.Array) -> None:
    if isinstance(column, pa.ExtensionArray):
        _check(column.storage)
    elif isinstance(column, pa.DictionaryArray):
        column.validate()
        _check(column.indices)
        _check(column.dictionary)
        bounds = pc.min_max(column.indices)
        least, most = bounds["min"].as_py(), bounds["max"].as_py()
        if least is not None and not 0 <= least <= most < len(column.dictionary):
            raise pa.ArrowInvalid(f"indices from {least} to {most} of a dictionary of {len(column.dictionary)}")
    elif isinstance(column, pa.StructArray):
        column.validate()
        for field in range(column.type.num_fields):
            _check(column.field(field))
    elif (as_bytes := _BYTES_OF.get(column.type)) is not None:
        pa.Array.from_buffers(as_bytes, len(column), column.buffers(), offset=column.offset).validate(full=True)
    else:
        column.validate(full=True)


_BYTES_OF = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
"""Types that are checked without a look at whether they hold UTF-8: that is asked of each value later."""


def columns_of(schema: pa.Schema) -> list[Column]:
    """The columns of a table as `embq.sources.columns` sees them, and behind them the fields of its structs."""
    inner = islice(((name, kind) for name, kind in _inner_fields(schema, "", _MAX_DEPTH)), _MAX_INNER)
    named = [(field.name, field.type, False) for field in schema]
    named += [(name, kind, True) for name, kind in inner if name not in schema.names]
    return [Column(name=name, role=_role(kind), type=_short(str(kind)), inner=inner) for name, kind, inner in named]


_MAX_INNER, _MAX_DEPTH = 10_000, 8
"""Fields of structs that can be named, and the names that lead to one."""


def _inner_fields(fields: Iterable[pa.Field], above: str, depth: int) -> Iterator[tuple[str, pa.DataType]]:
    for field in fields:
        if above:
            yield above + field.name, field.type
        if pa.types.is_struct(field.type) and depth > 1:
            yield from _inner_fields(field.type, f"{above}{field.name}.", depth - 1)


def outer_name(schema: pa.Schema, name: str) -> str:
    """The column of a table that holds what `columns_of` calls `name`."""
    return name if name in schema.names else next(outer for outer in schema.names if name.startswith(f"{outer}."))


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    """The column of that name, or the field of a struct, which is null where the struct is."""
    outer = outer_name(batch.schema, name)
    column = batch.column(outer)
    while outer != name:
        field = next(f.name for f in column.type if f"{name}.".startswith(f"{outer}.{f.name}."))
        outer, column = f"{outer}.{field}", pc.struct_field(column, field)
    return column


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _role(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if _is_uuid(kind):
        return "exact"
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "text"
    if pa.types.is_integer(kind):
        return "integer"
    if pa.types.is_decimal(kind) or pa.types.is_temporal(kind):
        return "exact"
    if _is_bytes(kind):
        return "bytes"
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0 and _is_bytes(kind.field("bytes").type):
        return "image"
    return "opaque" if _has_bytes(kind) else "other"


def _is_uuid(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "arrow.uuid"


def _has_bytes(kind: pa.DataType) -> bool:
    """True if bytes are among its values, at any depth."""
    if _is_uuid(kind):
        return False
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return _is_bytes(kind) or any(_has_bytes(kind.field(at).type) for at in range(kind.num_fields))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def _plain(column: pa.Array) -> pa.Array:
    """The column without dictionary and extension type."""
    if isinstance(column, pa.ExtensionArray):
        return _plain(column.storage)
    return _plain(_decoded(column)) if pa.types.is_dictionary(column.type) else column


def _decoded(column: pa.DictionaryArray) -> pa.Array:
    """The column without its dictionary."""
    values = column.dictionary
    if pa.types.is_string_view(values.type) or pa.types.is_binary_view(values.type):
        values = values.cast(pa.large_binary())  # Arrow cannot take from views
    return values.take(column.indices)


def _bytes_of(column: pa.Array) -> list[bytes | None]:
    """The values of a column of strings or bytes as bytes, so that one that is not UTF-8 harms no other."""
    values: list[bytes | None] = _plain(column).cast(pa.large_binary()).to_pylist()
    return values


def _texts_of(column: pa.Array) -> list[bytes | None]:
    """The values of a column of texts, without the zeros that fill those of a fixed length."""
    column = _plain(column)
    values = _bytes_of(column)
    if pa.types.is_fixed_size_binary(column.type):
        return [value if value is None else value.rstrip(b"\0") for value in values]
    return values


def _images_of(column: pa.Array) -> tuple[list[bytes | None], list[bytes | None]]:
    """The bytes, and if there are none the paths, of a column of bytes or of structs {bytes, path}."""
    column = _plain(column)
    if not pa.types.is_struct(column.type):
        return _bytes_of(column), [None] * len(column)
    fields = dict(zip((field.name for field in column.type), column.flatten(), strict=True))
    paths = fields.get("path")
    if paths is None or _role(paths.type) != "text":
        return _bytes_of(fields["bytes"]), [None] * len(column)
    return _bytes_of(fields["bytes"]), _bytes_of(paths)


def _keys_of(column: pa.Array) -> list[Any]:
    if _role(column.type) == "exact":
        return _values_of(column)
    column = _plain(column)
    return column.to_pylist() if pa.types.is_integer(column.type) else _bytes_of(column)


def _values_of(column: pa.Array) -> list[Any]:
    """The values of any column, times as text; a SampleError stands for one that cannot be had."""
    kind = column.type
    if pa.types.is_dictionary(kind) and _role(kind) != "text":
        return _values_of(_decoded(column))
    if pa.types.is_duration(kind):
        counts = column.cast(pa.int64()).to_pylist()
        return [None if count is None else f"PT{_seconds(count, _DIGITS[kind.unit])}" for count in counts]
    if pa.types.is_interval(kind):
        return [None if mdn is None else f"P{mdn[0]}M{mdn[1]}DT{_seconds(mdn[2], 9)}" for mdn in column.to_pylist()]
    if pa.types.is_struct(kind):
        return _objects_of(column)
    if pa.types.is_map(kind):
        ends = column.offsets.to_pylist()
        keys, items = (_values_of(part[ends[0] : ends[-1]]) for part in (column.keys, column.items))
        pairs = list(zip(keys, items, strict=True))
        rows = (pairs[start - ends[0] : stop - ends[0]] for start, stop in pairwise(ends))
        return [row if valid else None for row, valid in zip(rows, column.is_valid().to_pylist(), strict=True)]
    if isinstance(column, _LISTS):
        inner = iter(_values_of(column.flatten()))
        lengths = pc.list_value_length(column).to_pylist()
        return [None if length is None else list(islice(inner, length)) for length in lengths]
    if pa.types.is_temporal(kind):
        return _times_of(column)
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError):
        values = [_value_of(column[row]) for row in range(len(column))]
    return values


def _times_of(column: pa.Array) -> list[str | None]:
    """Times as text; in UTC where this machine does not know their zone, as in a container without tzdata."""
    try:
        return list(column.cast(pa.string()).to_pylist())
    except pa.ArrowInvalid:
        if getattr(column.type, "tz", None) is None:
            raise
        times = column.cast(pa.timestamp(column.type.unit)).cast(pa.string()).to_pylist()
        return [None if time is None else f"{time}Z" for time in times]


_LISTS = (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray, pa.ListViewArray, pa.LargeListViewArray)
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
"""Unit of a duration -> decimal places of its seconds."""


def _seconds(count: int, digits: int) -> str:
    """Seconds as ISO 8601 has them, from a count of units of 10^-digits s."""
    seconds, rest = divmod(abs(count), 10**digits)
    return f"{'-' if count < 0 else ''}{seconds}{f'.{rest:0{digits}d}' if digits else ''}S"


def _objects_of(column: pa.StructArray) -> list[Any]:
    names = [field.name for field in column.type]
    if len(set(names)) < len(names):
        doubled = SampleError("bad_metadata", f"two fields of an object have one name: {', '.join(names)}")
        return [doubled if valid else None for valid in column.is_valid().to_pylist()]
    fields = [_values_of(field) for field in column.flatten()]
    return [
        {name: values[row] for name, values in zip(names, fields, strict=True)} if valid else None
        for row, valid in enumerate(column.is_valid().to_pylist())
    ]


def _value_of(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError) as error:
        return SampleError("bad_metadata", f"a value cannot be read: {error}")
