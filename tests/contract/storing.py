"""An output folder of any format, without a broker, and rows of every kind of value for it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from embq.core.formats.folders import row_folders
from embq.core.models import ModelConfig
from embq.core.rows.results import PASSAGE_FIELDS, clean_text, row_schema
from embq.core.rows.spec import Column, RowSpec
from embq.core.run.commit_log import CommitLog
from embq.core.run.layout import Layout
from embq.core.run.reader import row_tables
from embq.core.run.run_info import RunInfo
from embq.core.units import Unit
from embq.writer.accept import Accepted
from embq.writer.commit import Committer
from tests.support.outputs.run_case import write_run

FINGERPRINT = "f" * 32
COLUMNS = (
    Column(name="url", type="string", path=("url",)),
    Column(name="size.width", type="int64", path=("size", "width")),
    Column(name="100 %b", type="float64", path=("100 %b",)),
    Column(name="ok", type="bool", path=("ok",)),
    Column(name="é.x", type="json", path=("é", "x")),
)
TEXTS = ["", "a", "Ångström ☃ \U0001f600", clean_text("cut \ud800 short"), "line\nbreak\ttab", "x" * 5000, "\0a\0", "�"]


def metadata_values(name: str, rows: int, offset: int) -> list[object]:
    """Values of a column of metadata, with nulls among them."""
    kinds: dict[str, Callable[[int], object]] = {
        "url": lambda i: TEXTS[i % len(TEXTS)],
        "size.width": lambda i: [0, -(2**63), 2**63 - 1][i % 3],
        "100 %b": lambda i: [0.0, -0.1, 1e300][i % 3],
        "ok": lambda i: i % 2 == 0,
        "é.x": lambda i: '{"nested": [1, null]}',
    }
    return [None if (i + offset) % 4 == 3 else kinds[name](i + offset) for i in range(rows)]


def vectors_of(rows: int, dim: int, type_: pa.DataType, offset: int) -> pa.Array:
    """Vectors that differ from row to row, in any stored type."""
    values = (np.arange(rows * dim).reshape(rows, dim) * 7 + offset * 13) % 251
    flat = (values - 125 if type_ != pa.uint8() else values).astype(type_.to_pandas_dtype()).reshape(-1)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat, type_), dim)


def rows_table(schema: pa.Schema, rows: int, offset: int = 0) -> pa.Table:
    """`rows` rows of a schema without id and unit_id, in two pieces where there are several."""
    columns: dict[str, pa.Array] = {}
    for field in schema:
        if pa.types.is_fixed_size_list(field.type):
            columns[field.name] = vectors_of(rows, field.type.list_size, field.type.value_type, offset)
        elif field.name == "ordinal":
            columns[field.name] = pa.array(range(rows), field.type)
        elif field.name == "key":
            columns[field.name] = pa.array([f"{TEXTS[i % len(TEXTS)][:9]}/{offset}/{i}" for i in range(rows)])
        elif field.name in ("caption", "metadata"):
            texts = [None if i % 5 == 4 else TEXTS[(i + offset) % len(TEXTS)] for i in range(rows)]
            columns[field.name] = pa.array(texts, pa.string())
        elif field.name == "document":
            columns[field.name] = pa.array([f"text {i}" for i in range(rows)])
        elif field in PASSAGE_FIELDS:
            columns[field.name] = pa.array(range(rows), field.type)
        else:
            columns[field.name] = pa.array(metadata_values(field.name, rows, offset), field.type)
    table = pa.table(list(columns.values()), schema=schema)
    half = rows // 2
    return pa.concat_tables([table.slice(0, half), table.slice(half)]) if half else table


def float32_schema(dim: int) -> pa.Schema:
    """Schema of rows with one long vector."""
    return row_schema(("text",), {"text": dim}, RowSpec(dtype="float32"))


class Output:
    """An output folder of one format, without a broker, and what was committed to it."""

    def __init__(
        self,
        root: Path,
        format: str,
        *,
        schema: pa.Schema | None = None,
        modalities: tuple[str, ...] = ("text",),
        dtype: str = "float16",
        columns: tuple[Column, ...] = COLUMNS,
    ) -> None:
        self.root = root
        self.layout = Layout(root)
        units = [Unit(kind="lines", source=f"/nowhere/{number}.txt", stop=9) for number in range(9)]
        spec = RowSpec(dtype=dtype, columns=columns)
        info = write_run(root, units, rows=spec, format=format)
        model = ModelConfig(spec="stub:3", modalities=modalities, precision="fp32")
        self.info: RunInfo = replace(info, model=model)
        self.unit_ids = [unit.unit_id for unit in units]
        names = self.info.model.output_names
        self.schema = schema or row_schema(names, {name: 3 + i for i, name in enumerate(names)}, spec)
        self.committed: list[pa.Table] = []
        self.committer = self.begin()

    def begin(self, writer: str = "w") -> Committer:
        """The next writer."""
        log = CommitLog(self.layout)
        committer = Committer(self.layout, self.info, log, log.replay(9), writer=writer, version="0")
        committer.take_epoch()
        committer.fingerprint = FINGERPRINT
        return committer

    def commit(self, *rows: int, table: pa.Table | None = None) -> None:
        """One part, with so many rows of each of the next units."""
        first = self.committer.state.count
        results = []
        for u, count in enumerate(rows, start=first):
            made = rows_table(self.schema, count, offset=u) if table is None else table
            results.append(
                Accepted(
                    entry="0-1",
                    u=u,
                    unit_id=self.unit_ids[u],
                    token="t",
                    rows=made,
                    failures=pa.table({"ordinal": []}),
                    quarantined="",
                    staged="",
                    bytes=0,
                )
            )
        start = sum(one.num_rows for one in self.committed)
        self.committer.commit(results)
        for result in results:
            ids = pa.array(range(start, start + result.rows.num_rows), pa.int64())
            unit_ids = pa.array([result.unit_id] * result.rows.num_rows)
            self.committed.append(result.rows.add_column(0, "id", ids).append_column("unit_id", unit_ids))
            start += result.rows.num_rows

    def wanted(self) -> pa.Table:
        return pa.concat_tables(self.committed)

    def files(self) -> set[str]:
        """Names in the folders of rows and of unfinished files."""
        folders = (*row_folders(self.layout, self.info), self.layout.temporary)
        return {f"{folder.name}/{path.name}" for folder in folders for path in folder.iterdir()}

    def named(self) -> set[str]:
        return {file.path for commit in CommitLog(self.layout).read() for file in commit.files}

    def assert_exact(self) -> None:
        """The reader gives what was committed, and nothing else lies about."""
        found = pa.concat_tables(row_tables(self.root))
        wanted = self.wanted()
        assert found.column_names == wanted.column_names
        assert found.schema.types == wanted.schema.types
        for name in wanted.column_names:
            assert found[name].to_pylist() == wanted[name].to_pylist(), name
        assert self.files() == self.named()
        for file in (file for commit in CommitLog(self.layout).read() for file in commit.files):
            assert hashlib.sha256((self.root / file.path).read_bytes()).hexdigest() == file.sha256
