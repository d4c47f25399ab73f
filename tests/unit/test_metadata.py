"""The columns of metadata: which ones a run gets, and that fields and columns together always hold every value once."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embq.core.errors import MalformedError
from embq.core.rows.metadata import MOST_COLUMNS, RESERVED, fill_columns, find_columns
from embq.core.rows.results import ResultDecoder, encode_result, row_schema
from embq.core.rows.spec import Column, RowSpec
from embq.core.units import Sample, json_text


def found(*samples: object) -> dict[str, str]:
    """Name -> type of the columns for samples with such metadata."""
    return {column.name: column.type for column in find_columns([json_text(one) for one in samples])}


@pytest.mark.parametrize(
    ("values", "type_"),
    [
        ([True, False], "bool"),
        ([1, -5], "int64"),
        ([2**63 - 1, -(2**63)], "int64"),
        ([1, 2.5], "float64"),
        ([2**53, -(2**53), 0.5], "float64"),
        (["a", ""], "string"),
        ([None, "a", None], "string"),
        ([2**53 + 1, 0.5], "json"),
        ([2**63], "json"),
        ([1, True], "json"),
        ([1, "1"], "json"),
        ([[1, 2]], "json"),
        (["a", ["a"]], "json"),
    ],
)
def test_a_column_has_the_type_that_every_value_fits(values: list[Any], type_: str) -> None:
    assert found(*({"f": value} for value in values)) == {"f": type_}


def test_fields_of_nested_objects_are_named_by_the_way_to_them() -> None:
    assert found({"size": {"w": 1, "h": {"px": 2.0}}, "b": True}) == {
        "size.w": "int64",
        "size.h.px": "float64",
        "b": "bool",
    }
    assert found({"a": "text"}, {"a": {"b": 1}}) == {"a": "string", "a.b": "int64"}
    deep: Any = 1
    for _ in range(9):
        deep = {"d": deep}
    assert found(deep, deep["d"]) == {".".join("d" * 8): "int64"}, "eight names at most"


def test_nulls_and_empty_objects_make_no_column() -> None:
    assert found({"a": None, "b": {}, "c": {"d": None}}) == {}
    assert find_columns([]) == ()


@pytest.mark.parametrize("name", [*sorted(RESERVED), "ID", "Metadata", "image_embedding", "x_Embedding"])
def test_a_reserved_name_is_kept_apart(name: str) -> None:
    (column,) = find_columns([json_text({name: 1})])
    assert column == Column(name=f"json_{name}", type="int64", path=(name,))


@pytest.mark.parametrize(
    ("metadata", "first"),
    [
        ({"a.b": 1, "a": {"b": 2}}, ("a.b",)),
        ({"a": {"b": 2}, "a.b": 1}, ("a", "b")),
        ({"json_id": 1, "id": 2}, ("json_id",)),
        ({"URL": 1, "url": 2}, ("URL",)),
    ],
)
def test_of_two_fields_with_one_name_the_second_stays_json(metadata: dict[str, Any], first: tuple[str, ...]) -> None:
    text = json_text(metadata)
    columns = find_columns([text])
    assert [column.path for column in columns] == [first]
    cells, (rest,) = fill_columns([text], columns)
    assert len(json.loads(rest or "")) == 1
    assert restored(columns, [cell[0] for cell in cells], rest) == flat(metadata)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0b", "a\nb", "x" * 201, "\ud800"])
def test_a_name_that_no_column_can_have_stays_json(name: str) -> None:
    text = json_text({name: 1})
    assert find_columns([text]) == ()


def test_the_fields_that_occur_most_often_get_the_columns() -> None:
    rare = [{f"rare{i}": 1, "often": 1} for i in range(MOST_COLUMNS + 10)]
    names = list(found(*rare, {"late": 1}, {"late": 2}))
    assert len(names) == MOST_COLUMNS
    assert names[:3] == ["rare0", "often", "rare1"], "in order of their first occurrence"
    assert names[-1] == "late"


# --- filling ---

COLUMNS = find_columns(['{"n":1,"x":1.5,"s":"a","b":true,"j":[1],"o":{"p":1}}'])


@pytest.mark.parametrize(
    ("metadata", "filled", "rest"),
    [
        ({"n": 2, "s": "ä"}, {"n": 2, "s": "ä"}, None),
        ({"n": None, "x": None, "new": None, "o": {"p": None}}, {}, None),
        ({"n": 3.0}, {}, {"n": 3.0}),
        ({"n": "3"}, {}, {"n": "3"}),
        ({"n": True}, {}, {"n": True}),
        ({"n": 2**63}, {}, {"n": 2**63}),
        ({"x": 2}, {"x": 2.0}, None),
        ({"x": 2**53 + 1}, {}, {"x": 2**53 + 1}),
        ({"b": 1}, {}, {"b": 1}),
        ({"s": 1}, {}, {"s": 1}),
        ({"s": "\ud800"}, {}, {"s": "\ud800"}),
        ({"j": "a"}, {"j": '"a"'}, None),
        ({"j": ["\ud800", {"k": None}]}, {"j": '["\\ud800",{"k":null}]'}, None),
        ({"j": {"k": 1}}, {}, {"j": {"k": 1}}),
        ({"n": {"p": 1}, "o": 5}, {}, {"n": {"p": 1}, "o": 5}),
        ({"o": {"p": 1, "q": 2}, "new": {"deep": {}}}, {"o.p": 1}, {"o": {"q": 2}, "new": {"deep": {}}}),
    ],
)
def test_what_does_not_fit_its_column_exactly_stays_json(
    metadata: dict[str, Any], filled: dict[str, Any], rest: dict[str, Any] | None
) -> None:
    cells, (left,) = fill_columns([json_text(metadata)], COLUMNS)
    there = {column.name: cell[0] for column, cell in zip(COLUMNS, cells, strict=True) if cell[0] is not None}
    assert (there, None if left is None else json.loads(left)) == (filled, rest)
    assert all(type(there[name]) is type(filled[name]) for name in there)


def test_samples_without_metadata_leave_their_row_empty() -> None:
    cells, rest = fill_columns([None, '{"n":1}', None], COLUMNS)
    assert [cell[0] for cell in cells] == [cell[2] for cell in cells] == [None] * len(COLUMNS)
    assert (cells[0], rest) == ([None, 1, None], [None, None, None])


def test_the_chunks_of_a_text_have_its_metadata_each() -> None:
    text = '{"n":1,"new":2}'
    cells, rest = fill_columns([text, text, '{"n":3}'], COLUMNS)
    assert (cells[0], rest) == ([1, 1, 3], ['{"new":2}', '{"new":2}', None])


def test_lists_that_are_nested_without_end_stay_as_they_are() -> None:
    text = '{"n":1,"j":' + "[" * 100_000 + "]" * 100_000 + "}"
    cells, rest = fill_columns([text, '{"n":2}'], COLUMNS)
    assert (cells[0], rest) == ([None, 2], [text, None])
    assert [column.name for column in find_columns([text, '{"n":1}'])] == ["n"]


def test_a_result_has_the_columns_of_its_run_between_caption_and_metadata() -> None:
    rows = RowSpec(columns=COLUMNS)
    schema = row_schema(("text",), {"text": 2}, rows)
    samples = [Sample(ordinal=0, key="a", metadata='{"n":7,"x":0.5,"s":"t","b":false,"j":[1],"o":{"p":2},"more":1}')]
    data = encode_result(samples, {"embedding": np.zeros((1, 2), "float16")}, [], schema, COLUMNS)
    table = ResultDecoder(schema).decode(data).rows
    assert table.schema.equals(schema)
    assert table.column_names[3:] == ["caption", "n", "x", "s", "b", "j", "o.p", "metadata"]
    assert [str(table.schema.field(name).type) for name in ("n", "x", "s", "b", "j")] == [
        "int64",
        "double",
        "string",
        "bool",
        "string",
    ]
    (row,) = table.to_pylist()
    assert [row[name] for name in ("n", "x", "s", "b", "j", "o.p")] == [7, 0.5, "t", False, "[1]", 2]
    assert row["metadata"] == '{"more":1}'


def test_a_column_survives_its_description() -> None:
    rows = RowSpec(columns=COLUMNS)
    assert RowSpec.from_description(json.loads(json.dumps(rows.describe()))) == rows
    with pytest.raises(MalformedError, match=r"columns\[0\]\[1\]"):
        RowSpec.from_description({**rows.describe(), "columns": [["n", "decimal", ["n"]]]})


# --- whatever comes ---

NAMES = st.sampled_from(["a", "b", "a.b", "id", "", "A", "ä", "\ud800"]) | st.text(max_size=3)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.sampled_from([0, 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, -0.0])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(), max_size=4)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=8
)
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=6)


def flat(values: dict[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Every field that is not null; an object without fields is one."""
    out: dict[tuple[str, ...], Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            out |= flat(value, (*path, name))
        elif value is not None:
            out[*path, name] = value
    return out


def restored(columns: tuple[Column, ...], cells: list[Any], rest: str | None) -> dict[tuple[str, ...], Any]:
    """The fields of a sample, from its row alone; a field that is there twice is an error."""
    out = flat(json.loads(rest)) if rest is not None else {}
    for column, cell in zip(columns, cells, strict=True):
        if cell is not None:
            assert column.path not in out
            out[column.path] = json.loads(cell) if column.type == "json" else cell
    return out


def same(a: Any, b: Any) -> bool:
    """Equality of JSON: a number is its value, and true is none."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, float) and a == 0.0 == b:
        return math.copysign(1, a) == math.copysign(1, b)
    return type(a) is type(b) and a == b if isinstance(a, (str, list, dict)) else bool(a == b)


@given(st.lists(OBJECTS, max_size=4), st.lists(OBJECTS, min_size=1, max_size=4))
def test_any_object_comes_back_from_columns_and_metadata(first: list[Any], later: list[Any]) -> None:
    columns = find_columns([json_text(one) for one in first])
    samples = [*first, *later]
    rows = RowSpec(columns=columns)
    schema = row_schema(("text",), {"text": 1}, rows)
    vectors = {"embedding": np.zeros((len(samples), 1), "float16")}
    encoded = [Sample(ordinal=i, key="", metadata=json_text(one)) for i, one in enumerate(samples)]
    table = ResultDecoder(schema).decode(encode_result(encoded, vectors, [], schema, columns)).rows
    for row, one in zip(table.to_pylist(), samples, strict=True):
        fields = restored(columns, [row[column.name] for column in columns], row["metadata"])
        wanted = flat(one)
        assert fields.keys() == wanted.keys()
        assert all(same(wanted[path], value) for path, value in fields.items())
