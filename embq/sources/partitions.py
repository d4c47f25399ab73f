"""Columns of partitioned data sets: the folders `name=value` above a file of rows, as Hive and Spark write them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Any
from urllib.parse import unquote

from embq.core.storage.paths import is_url
from embq.core.units import Sample, Unit, canonical_json, json_text, json_value
from embq.sources.access.urls import path_of
from embq.sources.reader_options import ALL, ROWS, ReadOptions

OPTION = "partition"
"""Option of a unit: the columns as a JSON object."""


def columns_above(path: str) -> dict[str, str | int | None]:
    """The columns that the folders of a file give. As for pyarrow, digits are an integer."""
    folders = (path_of(path) if is_url(path) else path).split("/")[:-1]
    pairs = [unquote(part).partition("=") for part in takewhile(lambda part: "=" in part[1:], reversed(folders))]
    return {
        name: None if text.startswith("__HIVE_DEFAULT") else int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else text
        for name, _, text in reversed(pairs)
    }


def without_partition(options: ReadOptions, path: str) -> ReadOptions:
    """The options for the file itself, which may lack the columns of its folders."""
    names = columns_above(path)
    return replace(options, metadata_columns=tuple(name for name in options.metadata_columns if name not in names))


def with_partition(unit: Unit, options: ReadOptions) -> Unit:
    """The unit with those columns of its folders that become metadata: all, or those that the user named."""
    names = options.metadata_columns
    values = columns_above(unit.source) if unit.kind in ROWS else {}
    if metadata := {name: value for name, value in values.items() if not names or ALL in names or name in names}:
        return replace(unit, options=tuple(sorted((*unit.options, (OPTION, canonical_json(metadata))))))
    return unit


def partition_of(unit: Unit) -> dict[str, Any]:
    """The columns that a unit carries; {} for none."""
    return dict(json.loads(dict(unit.options).get(OPTION, "{}")))


def add_partition(samples: Iterator[Sample], unit: Unit) -> Iterator[Sample]:
    """The samples with the columns of the unit among their metadata."""
    values = partition_of(unit)
    for sample in samples:
        if sample.error is None:
            sample.metadata = merged(values, sample.metadata)
        yield sample


def merged(values: dict[str, Any], metadata: str | None) -> str:
    """Metadata as JSON text with `values` before its own fields, which stand above values of the same name."""
    own = json_value(metadata) if metadata and any(f'"{name}' in metadata for name in values) else {}
    added = json_text({name: value for name, value in values.items() if name not in own})
    return added if metadata in (None, "{}") else metadata if added == "{}" else f"{added[:-1]},{metadata[1:]}"
