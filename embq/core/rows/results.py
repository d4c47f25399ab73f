"""A unit's result as bytes: Arrow IPC for the rows, then Arrow IPC for the failures. Worker and writer share it.

Rows: ordinal int32, key string, one fixed-size list per embedding of what the run stores of a vector, the cosine of
image and text if it was asked for, caption string, the columns of metadata that the run has, metadata string (JSON
text of what is in none of them), and, where texts are cut into chunks, the document and where in it the chunk stands.
Failures: ordinal int32 (null for the whole unit), key, code, message, attempt int32 (1: the first).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from embq.core.errors import OutputError
from embq.core.rows.arrow_messages import is_compressed
from embq.core.rows.metadata import fill_columns
from embq.core.rows.spec import Column, RowSpec
from embq.core.units import Failure, Sample

if TYPE_CHECKING:
    import numpy as np

FAILURE_SCHEMA = pa.schema(
    [
        pa.field("ordinal", pa.int32()),
        pa.field("key", pa.string(), nullable=False),
        pa.field("code", pa.string(), nullable=False),
        pa.field("message", pa.string(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
    ]
)

ARROW_DTYPES = {"float16": pa.float16(), "float32": pa.float32(), "int8": pa.int8(), "binary": pa.uint8()}
"""Type of stored vectors -> type of one item of the list; an item of binary holds eight numbers."""

COLUMN_ARROW = {
    "string": pa.string(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "json": pa.string(),
}
"""Type of a column of metadata, see `embq.core.rows.spec.COLUMN_TYPES` -> Arrow type."""


def embedding_columns(outputs: Sequence[str]) -> tuple[str, ...]:
    """Columns of `embq.core.models.ModelConfig.output_names`, in their order: "embedding" for one vector a row."""
    if len(outputs) == 1:
        return ("embedding",)
    return tuple(f"{output}_embedding" for output in outputs)


PASSAGE_FIELDS = (
    pa.field("document", pa.string(), nullable=False),
    pa.field("chunk", pa.int32(), nullable=False),
    pa.field("chunks", pa.int32(), nullable=False),
    pa.field("char_start", pa.int64(), nullable=False),
    pa.field("char_end", pa.int64(), nullable=False),
)
"""Columns of a row's chunk, in a run with chunks; see `embq.core.units.Passage`."""


def row_schema(
    outputs: Sequence[str],
    dims: Mapping[str, int],
    rows: RowSpec,
    *,
    compared: Sequence[str] = (),
    chunked: bool = False,
) -> pa.Schema:
    """Schema of a result's rows.

    Args:
        outputs: names of a row's vectors, `embq.core.models.ModelConfig.output_names`.
        dims: output -> length of its vectors, as the model returns them.
        compared: columns of similarities, see `embq.core.models.ModelConfig.compared`.
        chunked: whether the rows are chunks of texts.
    """
    columns = zip(embedding_columns(outputs), outputs, strict=True)
    return pa.schema(
        [
            pa.field("ordinal", pa.int32(), nullable=False),
            pa.field("key", pa.string(), nullable=False),
            *(pa.field(name, vector_type(rows, dims[output])) for name, output in columns),
            *(pa.field(name, pa.float32()) for name in compared),
            pa.field("caption", pa.string()),
            *metadata_fields(rows),
            *(PASSAGE_FIELDS if chunked else ()),
        ]
    )


def metadata_fields(rows: RowSpec) -> tuple[pa.Field, ...]:
    """The run's columns of metadata, and the JSON text of the fields without a column."""
    columns = (pa.field(column.name, COLUMN_ARROW[column.type]) for column in rows.columns)
    return (*columns, pa.field("metadata", pa.string()))


def vector_widths(schema: pa.Schema) -> dict[str, int]:
    """Length of the lists in each column of vectors."""
    return {field.name: field.type.list_size for field in schema if pa.types.is_fixed_size_list(field.type)}


def unlike(schema: pa.Schema, expected_schema: pa.Schema) -> list[str]:
    """The columns in which a schema differs from the wanted one; lengths of vectors are not compared."""
    fields, expected = [_without_width(field) for field in schema], [_without_width(field) for field in expected_schema]
    if fields == expected:
        return []
    differing = {field.name for field in fields if field not in expected} | {
        field.name for field in expected if field not in fields
    }
    return sorted(differing or {field.name for field in fields})


def _without_width(field: pa.Field) -> pa.Field:
    return field.with_type(pa.list_(field.type.value_field, 1)) if pa.types.is_fixed_size_list(field.type) else field


def vector_type(rows: RowSpec, dim: int) -> pa.DataType:
    """Type of a column of embeddings, where the model gives vectors of `dim` numbers."""
    return pa.list_(ARROW_DTYPES[rows.dtype], rows.width(dim))


def clean_text(text: str) -> str:
    """`text` with lone surrogates, which neither UTF-8 nor Arrow can hold, written as backslash escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def text_array(texts: Sequence[str | None]) -> pa.Array:
    """Texts as Arrow holds them, each as `clean_text` gives it."""
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:  # a lone surrogate, which few have
        return pa.array([None if text is None else clean_text(text) for text in texts], pa.string())


def encode_result(
    samples: Sequence[Sample],
    vectors: Mapping[str, np.ndarray],
    failures: Sequence[Failure],
    schema: pa.Schema,
    columns: tuple[Column, ...] = (),
) -> bytes:
    """The bytes of one unit's result.

    Args:
        samples: the embedded samples, in order of their ordinals; without any, `vectors` is ignored.
        vectors: column name -> array of shape (len(samples), width), already in the stored dtype; of a similarity,
            float32 of shape (len(samples),).
        failures: the samples (or the unit) without a row.
        schema: from `row_schema`.
        columns: the run's columns of metadata.
    """
    return encode_batches(row_batch(samples, vectors, schema, columns), failure_batch(failures))


def encode_batches(*batches: pa.RecordBatch) -> bytes:
    """Each batch as an Arrow IPC stream, one behind the other."""
    sink = pa.BufferOutputStream()
    for batch in batches:
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def row_batch(
    samples: Sequence[Sample], vectors: Mapping[str, np.ndarray], schema: pa.Schema, columns: tuple[Column, ...] = ()
) -> pa.RecordBatch:
    """The rows of one unit as a batch of the schema; see `encode_result`."""
    if not samples:
        return pa.RecordBatch.from_pylist([], schema)
    metadata = metadata_arrays(samples, columns)
    arrays: list[pa.Array] = []
    for field in schema:
        if field.name in vectors:
            arrays.append(_array_of(vectors[field.name], field.type))
        elif field.name in metadata:
            arrays.append(metadata[field.name])
        elif field.name == "caption":
            arrays.append(text_array([sample.text for sample in samples]))
        elif field.name == "key":
            arrays.append(text_array([sample.key for sample in samples]))
        elif field in PASSAGE_FIELDS:
            arrays.append(pa.array([_of_passage(s, field.name) for s in samples], field.type))
        else:
            arrays.append(pa.array([getattr(s, field.name) for s in samples], field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array_of(values: np.ndarray, type_: pa.DataType) -> pa.Array:
    if not pa.types.is_fixed_size_list(type_):
        return pa.array(values, type_)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1), type_.value_type), type=type_)


def metadata_arrays(samples: Sequence[Sample], columns: tuple[Column, ...]) -> dict[str, pa.Array]:
    """The columns of `metadata_fields`, by name."""
    texts = [sample.metadata for sample in samples]
    if not columns:
        return {"metadata": pa.array(texts, pa.string())}
    cells, rest = fill_columns(texts, columns)
    filled = {
        column.name: pa.array(values, COLUMN_ARROW[column.type]) for column, values in zip(columns, cells, strict=True)
    }
    return {**filled, "metadata": pa.array(rest, pa.string())}


def _of_passage(sample: Sample, column: str) -> str | int:
    passage = sample.passage
    if passage is None:
        raise ValueError(f"sample {sample.key!r} is no chunk")
    values: dict[str, str | int] = {
        "document": clean_text(passage.document),
        "chunk": passage.number,
        "chunks": passage.count,
        "char_start": passage.start,
        "char_end": passage.end,
    }
    return values[column]


def failure_batch(failures: Sequence[Failure]) -> pa.RecordBatch:
    """Failures as one record batch of `FAILURE_SCHEMA`; keys and messages made safe for UTF-8 and one line."""
    if not failures:
        return _no_failures()
    return pa.RecordBatch.from_pydict(
        {
            "ordinal": [f.ordinal for f in failures],
            "key": [clean_text(f.key) for f in failures],
            "code": [f.code for f in failures],
            "message": [clean_text(" ".join(f.message.split()))[:1000] for f in failures],
            "attempt": [f.attempt for f in failures],
        },
        schema=FAILURE_SCHEMA,
    )


@cache
def _no_failures() -> pa.RecordBatch:
    """Made once, and late: the first array imports pyarrow.compute, which takes long."""
    return pa.RecordBatch.from_pylist([], FAILURE_SCHEMA)


@dataclass(frozen=True, slots=True)
class DecodedResult:
    """A decoded result: `rows` as a table of `row_schema`, `failures` as a table of `FAILURE_SCHEMA`."""

    rows: pa.Table
    failures: pa.Table


class ResultDecoder:
    """Decodes results of one run. Not safe to share between threads.

    Their bytes may be hostile. Arrow verifies the metadata of each message; what it leaves to its caller is done here:
    the metadata is no longer than that of the schema that is expected, only the messages that `encode_result` writes
    are there, the schema is compared before rows are read, no body is compressed (a few bytes can say that they become
    many), and all offsets, lengths and texts are validated. So reading takes no more memory than the result itself.

    Args:
        schema: what `row_schema` gives for the run; lengths of vectors are not compared.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._rows = _TableReader(schema)
        self._failures = _TableReader(FAILURE_SCHEMA)

    def decode(self, data: Any) -> DecodedResult:
        """The result in a bytes-like object, without copying it; OutputError if it is not one."""
        return DecodedResult(*_tables(data, self._rows, self._failures))

    def decode_failures(self, data: Any) -> pa.Table:
        """The failures of a result whose rows are elsewhere; OutputError as `decode`."""
        (failures,) = _tables(data, self._failures)
        return failures


def _tables(data: Any, *readers: _TableReader) -> list[pa.Table]:
    """The tables in a bytes-like object, one for each reader."""
    try:
        view = memoryview(data).cast("B")
        stream = pa.BufferReader(data)
        tables = [reader.read(stream, view) for reader in readers]
        if stream.tell() != len(view):
            raise _bad("there are bytes behind its end")
    except (pa.ArrowException, ValueError, TypeError, OSError, EOFError, struct.error) as error:
        raise _bad(error) from error
    return tables


def _bad(why: object, code: str = "bad_result") -> OutputError:
    return OutputError(f"a result is not readable: {' '.join(str(why).split())[:300]}", code=code)


_MESSAGE = struct.Struct("<Ii")
_MARK = 0xFFFFFFFF


class _TableReader:
    """Reads streams of one schema, one batch and an end.

    Args:
        expected: the schema; lengths of vectors are not compared.
    """

    def __init__(self, expected: pa.Schema) -> None:
        self._expected = expected
        self._most_bytes = 2 * expected.serialize().size + 1024
        self._checked: tuple[bytes, pa.Schema] | None = None
        self._required = [(i, field.name) for i, field in enumerate(expected) if not field.nullable]
        self._vectors = [(i, field.name) for i, field in enumerate(expected) if _is_vector(field)]

    def read(self, stream: pa.BufferReader, view: memoryview) -> pa.Table:
        """The next stream as a table."""
        schema = self._schema(_next_message(stream, view, "schema", self._most_bytes))
        message = _next_message(stream, view, "record batch", self._most_bytes)
        if is_compressed(memoryview(message.metadata)):  # verified by now
            raise _bad("it is compressed")
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate(full=True)
        for i, name in self._required:
            if batch.column(i).null_count:
                raise _bad(f"its column {name} has nulls")
        for i, name in self._vectors:
            if _has_nulls(batch.column(i)):
                raise _bad(f"its column {name} has nulls")
        if _MESSAGE.unpack_from(view, stream.tell()) != (_MARK, 0):
            raise _bad("there is no end behind its rows")
        stream.seek(_MESSAGE.size, 1)
        return pa.Table.from_batches([batch])

    def _schema(self, message: pa.Message) -> pa.Schema:
        """The wanted schema with the lengths that the message gives to vectors."""
        written = message.metadata.to_pybytes()
        if self._checked is None or self._checked[0] != written:  # the same in all results of one version of Arrow
            schema = pa.ipc.read_schema(message)
            if differing := unlike(schema, self._expected):
                raise _bad(f"its columns are not those of the run: {', '.join(differing)[:200]}", "wrong_schema")
            fields = [_with_width(field, schema.field(i).type) for i, field in enumerate(self._expected)]
            self._checked = written, pa.schema(fields)
        return self._checked[1]


def _next_message(stream: pa.BufferReader, view: memoryview, type_: str, most: int) -> pa.Message:
    # Looked at before Arrow walks through the metadata, which may take time and memory many times its length.
    mark, length = _MESSAGE.unpack_from(view, stream.tell())
    if mark != _MARK or not 0 < length <= most:
        raise _bad(f"there is no {type_} of at most {most} bytes of metadata")
    message = pa.ipc.read_message(stream)
    if message.type != type_:
        raise _bad(f"there is a {message.type} for a {type_}")
    return message


def _is_vector(field: pa.Field) -> bool:
    return bool(pa.types.is_fixed_size_list(field.type))


def _with_width(field: pa.Field, written: pa.DataType) -> pa.Field:
    if not _is_vector(field):
        return field
    if written.list_size < 1:
        raise _bad(f"its vectors have {written.list_size} numbers")
    return field.with_type(pa.list_(field.type.value_field, written.list_size))


def _has_nulls(vectors: pa.FixedSizeListArray) -> bool:
    return bool(vectors.null_count or vectors.values.null_count)
