"""Arrow record batches as rows. This file, and what reads parquet and Arrow files, is where pyarrow is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from core.errors import SampleError
from core.units import Sample
from sources.columns import Choice, Column
from sources.rows import RowSamples


def samples_of(batch: pa.RecordBatch, choice: Choice, rows: RowSamples) -> Iterator[Sample]:
    """One sample for each row of `batch`."""
    nothing: list[bytes | None] = [None] * batch.num_rows
    texts = _bytes_of(batch.column(choice.text)) if choice.text else nothing
    images, links = nothing, nothing
    if choice.is_link:
        links = _bytes_of(batch.column(choice.image))
    elif choice.image:
        images, links = _images_of(batch.column(choice.image))
    keys = _keys_of(batch.column(choice.key)) if choice.key else nothing
    metadata = [_values_of(batch.column(name)) for name in choice.metadata]
    for row, image in enumerate(rows.images(images, links)):
        yield rows.sample(
            choice,
            identity=keys[row],
            text=texts[row],
            image=image,
            others={name: values[row] for name, values in zip(choice.metadata, metadata, strict=True)},
        )


def check(batch: pa.RecordBatch) -> None:
    """Raise ArrowInvalid where offsets, indices or lengths in a batch lead out of it, as damage in an IPC file does.

    Arrow itself believes what a message says, and reads memory that is not its own. Strings may hold any bytes.
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
    """The columns of a table as `sources.columns` sees them."""
    return [Column(name=field.name, role=_role(field.type), type=_short(str(field.type))) for field in schema]


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _role(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "text"
    if pa.types.is_integer(kind):
        return "integer"
    if _is_bytes(kind):
        return "bytes"
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return "image" if _is_bytes(kind.field("bytes").type) else "other"
    return "other"


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
        column = column.storage
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _bytes_of(column: pa.Array) -> list[bytes | None]:
    """The values of a column of strings or bytes as bytes, so that one that is not UTF-8 harms no other."""
    values: list[bytes | None] = _plain(column).cast(pa.large_binary()).to_pylist()
    return values


def _images_of(column: pa.Array) -> tuple[list[bytes | None], list[bytes | None]]:
    """The bytes, and where there are none the paths, of a column of bytes or of structs {bytes, path}."""
    column = _plain(column)
    if not pa.types.is_struct(column.type):
        return _bytes_of(column), [None] * len(column)
    fields = dict(zip((field.name for field in column.type), column.flatten(), strict=True))
    paths = fields.get("path")
    if paths is None or _role(paths.type) != "text":
        return _bytes_of(fields["bytes"]), [None] * len(column)
    return _bytes_of(fields["bytes"]), _bytes_of(paths)


def _keys_of(column: pa.Array) -> list[Any]:
    column = _plain(column)
    return column.to_pylist() if pa.types.is_integer(column.type) else _bytes_of(column)


def _values_of(column: pa.Array) -> list[Any]:
    """The values of any column; a SampleError stands for one that cannot be had."""
    if pa.types.is_temporal(column.type):
        column = column.cast(pa.string())
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError):
        values = [_value_of(column[row]) for row in range(len(column))]
    return values


def _value_of(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError) as error:
        return SampleError("bad_metadata", f"a value cannot be read: {error}")
