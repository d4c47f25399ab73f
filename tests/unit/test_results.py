"""Results as bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embq.core.errors import OutputError
from embq.core.rows.results import (
    DecodedResult,
    ResultDecoder,
    clean_text,
    embedding_columns,
    encode_result,
    failure_batch,
    row_schema,
)
from embq.core.rows.spec import RowSpec
from embq.core.units import Failure, Sample

SAMPLES = [
    Sample(ordinal=0, key="a", text="ä\udcff", metadata='{"n":1}'),
    Sample(ordinal=2, key="b\udc80", text=None),
]
FAILURES = [Failure(ordinal=1, key="c\udcff", code="decode", message=" two\nlines\t")]


def encode(dtype: str = "float16", modalities: tuple[str, ...] = ("text",)) -> bytes:
    dims = {"text": 3, "image": 2}
    vectors = {
        column: np.arange(2 * dims[modality], dtype=dtype).reshape(2, dims[modality])
        for column, modality in zip(embedding_columns(modalities), modalities, strict=True)
    }
    return encode_result(SAMPLES, vectors, FAILURES, row_schema(modalities, dims, RowSpec(dtype=dtype)))


def decode(data: Any, dtype: str = "float16", modalities: tuple[str, ...] = ("text",)) -> DecodedResult:
    """Decode a result of a run whose vector lengths are not known yet."""
    schema = row_schema(modalities, dict.fromkeys(modalities, 9), RowSpec(dtype=dtype))
    return ResultDecoder(schema).decode(data)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_result_survives_its_bytes(dtype: str) -> None:
    result = decode(encode(dtype), dtype)
    assert result.rows.schema.equals(row_schema(("text",), {"text": 3}, RowSpec(dtype=dtype)))
    assert result.rows.to_pylist() == [
        {"ordinal": 0, "key": "a", "embedding": [0, 1, 2], "caption": "ä\\udcff", "metadata": '{"n":1}'},
        {"ordinal": 2, "key": "b\\udc80", "embedding": [3, 4, 5], "caption": None, "metadata": None},
    ]
    assert result.failures.to_pylist() == [
        {"ordinal": 1, "key": "c\\udcff", "code": "decode", "message": "two lines", "attempt": 1}
    ]


def test_a_result_of_two_modalities_has_a_column_for_each() -> None:
    rows = decode(encode(modalities=("image", "text")), modalities=("image", "text")).rows
    assert rows["image_embedding"].to_pylist() == [[0, 1], [2, 3]]
    assert rows["text_embedding"].to_pylist() == [[0, 1, 2], [3, 4, 5]]


def test_a_result_without_rows_keeps_its_schema() -> None:
    schema = row_schema(("text",), {"text": 3}, RowSpec())
    whole = Failure(ordinal=None, key="", code="tar", message="x")
    data = encode_result([], {"embedding": np.empty((0, 3), "float16")}, [whole], schema)
    result = decode(data)
    assert (result.rows.num_rows, result.rows.schema) == (0, schema)
    assert result.failures["ordinal"].null_count == 1


def test_a_result_may_be_read_from_any_buffer_without_a_copy() -> None:
    data = encode()
    assert decode(memoryview(data)).rows.equals(decode(data).rows)
    address = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    column = decode(data).rows["embedding"].chunk(0).values.buffers()[1]
    assert address <= column.address < address + len(data)


def test_a_result_that_was_cut_anywhere_is_refused() -> None:
    data = encode()
    for length in [*range(0, len(data), 7), len(data) - 8, len(data) - 1]:
        with pytest.raises(OutputError) as caught:
            decode(data[:length])
        assert caught.value.code == "bad_result"


def test_messages_are_one_line_of_at_most_a_thousand_characters() -> None:
    batch = failure_batch([Failure(ordinal=0, key="k", code="c", message="ab \n" * 1000)])
    (message,) = batch["message"].to_pylist()
    assert message == ("ab " * 1000)[:1000]


@given(st.text() | st.binary().map(lambda raw: raw.decode("utf-8", "surrogateescape")))
def test_cleaned_text_is_utf8_and_unchanged_where_it_was(text: str) -> None:
    cleaned = clean_text(text)
    pa.array([cleaned], pa.string()).validate(full=True)
    assert clean_text(cleaned) == cleaned
    if not any("\ud800" <= c <= "\udfff" for c in text):
        assert cleaned == text
