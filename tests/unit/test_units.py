"""Units: identity by content."""

from __future__ import annotations

from dataclasses import replace

import pytest

from embq.core.errors import MalformedError
from embq.core.units import Unit, canonical_json, content_hash

UNIT = Unit(
    kind="files",
    source="/data/photos",
    stop=12,
    samples=2,
    etag="17-12",
    items=(("a.jpg", 5), ("b/\udcff.jpg", 7)),
    options=(("id_column", "id"),),
)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "tar"},
        {"source": "/data/photos2"},
        {"start": 1},
        {"stop": 13},
        {"first": 1},
        {"samples": None},
        {"etag": "18-12"},
        {"items": (("a.jpg", 5), ("b/\udcfe.jpg", 7))},
        {"options": ()},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_is_part_of_a_units_identity(change: dict[str, object]) -> None:
    assert replace(UNIT, **change).unit_id != UNIT.unit_id  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "described",
    [
        {},
        {**UNIT.describe(), "func": "os.system"},
        {name: value for name, value in UNIT.describe().items() if name != "etag"},
        {**UNIT.describe(), "start": None},
        {**UNIT.describe(), "items": 3},
    ],
)
def test_a_description_of_another_shape_is_refused(described: dict[str, object]) -> None:
    with pytest.raises(MalformedError, match="unit is malformed"):
        Unit.from_description(described)


def test_equal_values_have_equal_canonical_json() -> None:
    assert canonical_json({"b": 1, "a": "ä"}) == '{"a":"ä","b":1}'
    assert content_hash({"a": 1, "b": 2}) == content_hash({"b": 2, "a": 1})
    assert len(content_hash("\udcff")) == 32
