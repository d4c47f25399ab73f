"""The committed rows of a run in Python: as tables, arrays, tensors and searches."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from embq.app.output.html import facts_html
from embq.core.arguments import check, listed, path_text, python_errors, refused, whole_number
from embq.core.errors import InputError, OutputError
from embq.core.extras import missing
from embq.core.filter.condition import given_conditions
from embq.core.filter.evaluation import matches, typed
from embq.core.formats.base import vectors
from embq.core.formats.npy import mapped
from embq.core.formats.part import opened
from embq.core.rows.results import embedding_columns
from embq.core.rows.vectors import restored
from embq.core.run.checkpoint import committed
from embq.core.run.commit_log import committed_parts
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.run.reader import part_tables
from embq.core.run.standing_failures import standing_failures
from embq.core.settings import spool_folder
from embq.core.storage.objects import ObjectPath
from embq.core.storage.paths import Place, place

if TYPE_CHECKING:
    from embq import Index
    from embq.app.output.torch_rows import TorchRows


class Output:
    """The committed rows of a run, in the order of their ids, as they were when it was opened.

    Attributes:
        root: output folder or URL.
        run, model, precision, dtype: of the run; dtype is that of stored vectors.
        rows_count: committed rows, also `len(output)`.
        failures_count: failures that stand.
        complete: whether every unit of the run is done.
        vector_columns: columns of vectors, such as ("embedding",).
        dims: column of vectors -> length of a vector.

    Args:
        path: output folder of a run; s3:// and gs:// URLs as well.

    Raises InputError if there is no run, OutputError if its records are damaged.
    """

    @python_errors()
    def __init__(self, path: str | PathLike[str] | ObjectPath) -> None:
        self.root: Place = path if isinstance(path, ObjectPath) else place(path_text("path", path))
        self._info, self._state = committed(self.root)
        self._parts = list(committed_parts(self.root))
        info, state = self._info, self._state
        self.run, self.model, self.precision = info.run, info.model.spec, info.model.precision
        self.dtype = info.rows.dtype
        self.rows_count, self.failures_count = state.rows, state.failures
        self.complete = state.count == info.units
        self.vector_columns = embedding_columns(info.model.output_names)
        bits = 8 if self.dtype == "binary" else 1
        self.dims = {name: bits * state.widths[name] for name in self.vector_columns if name in state.widths}

    def __len__(self) -> int:
        return self.rows_count

    def __fspath__(self) -> str:
        """Its folder or URL: functions that take one take an opened output as well."""
        return str(self.root)

    def __repr__(self) -> str:
        return f"<embq output {self.root}: {self.rows_count:,} rows of {self.model}>"

    def _repr_html_(self) -> str:
        dims = ", ".join(f"{name} ({dim})" for name, dim in self.dims.items()) or ", ".join(self.vector_columns)
        return facts_html(
            {
                "run": f"{self.run} in {self.root}",
                "model": f"{self.model} in {self.precision}",
                "rows": f"{self.rows_count:,}" + ("" if self.complete else " so far"),
                "failures": f"{self.failures_count:,}",
                "vectors": f"{dims}, stored as {self.dtype}",
                "columns": ", ".join(self.schema.names),
            }
        )

    @property
    def json_columns(self) -> frozenset[str]:
        """Columns with JSON texts."""
        return frozenset({"metadata"} | {column.name for column in self._info.rows.columns if column.type == "json"})

    @cached_property
    def schema(self) -> pa.Schema:
        """Of `tables`; empty before the first row is committed."""
        if not self._parts:
            return pa.schema([])
        with opened(self.root, self._parts[0]) as part:
            return part.schema.remove_metadata()

    def tables(self, columns: Sequence[str] | None = None, where: Iterable[Any] = ()) -> Iterator[pa.Table]:
        """The rows, a bounded number at a time; vectors as they are stored.

        Args:
            columns: None for all: id, ordinal, key, vectors, caption, metadata, unit_id and others.
            where: conditions that all rows satisfy, as `embq.search` takes them.

        Raises InputError `no_column` and `bad_filter`, OutputError if a file is missing or damaged.
        """
        types = {field.name: field.type for field in self.schema}
        with python_errors():
            selected = list(types) if columns is None else listed("columns", columns, "names of columns")
            if absent := [name for name in selected if not isinstance(name, str) or name not in types]:
                raise InputError(
                    f"rows have no column {', '.join(map(str, absent))}",
                    next_step=f"they have {', '.join(types)}",
                    code="no_column",
                )
            conditions = given_conditions(where)
            tests = [typed(condition, types) for condition in conditions] if types else []
        needed = list(dict.fromkeys([*selected, *(test.column for test in tests)]))
        for files in self._parts:
            for table in part_tables(self.root, files, needed):
                for test in tests:
                    table = table.filter(matches(table[test.column].combine_chunks(), test))
                yield table.select(selected).replace_schema_metadata(None)

    def rows(self, columns: Sequence[str] | None = None, where: Iterable[Any] = ()) -> Iterator[dict[str, Any]]:
        """The rows as dicts, vectors as arrays of shape (dim,); arguments and errors as of `tables`."""
        for table in self.tables(columns, where):
            blocks = {name: self.restored(table, name) for name in self.vector_columns if name in table.column_names}
            plain = table.drop_columns([*blocks]).to_pylist() if len(blocks) < table.num_columns else [{}] * len(table)
            for number, row in enumerate(plain):
                values = row | {name: block[number] for name, block in blocks.items()}
                yield {name: values[name] for name in table.column_names}

    def table(self, columns: Sequence[str] | None = None, where: Iterable[Any] = ()) -> pa.Table:
        """All rows in memory; arguments and errors as of `tables`."""
        tables = list(self.tables(columns, where))
        fields = [self.schema.field(name) for name in columns or self.schema.names]
        return pa.concat_tables(tables) if tables else pa.schema(fields).empty_table()

    def to_pandas(self, columns: Sequence[str] | None = None, where: Iterable[Any] = ()) -> Any:
        """All rows as a pandas.DataFrame; vectors are arrays of shape (dim,)."""
        _require("pandas")
        import pandas as pd

        return pd.DataFrame(list(self.rows(columns, where)), columns=list(columns or self.schema.names))

    def to_polars(self, columns: Sequence[str] | None = None, where: Iterable[Any] = ()) -> Any:
        """All rows as a polars.DataFrame."""
        _require("polars")
        import polars as pl

        return pl.from_arrow(self.table(columns, where))

    def to_hf(self, columns: Sequence[str] | None = None, where: Iterable[Any] = ()) -> Any:
        """All rows as a datasets.Dataset."""
        _require("datasets")
        import datasets

        return datasets.Dataset(self.table(columns, where).combine_chunks())

    def vectors(self, vector_name: str | None = None, *, mmap: bool = False, dtype: Any = None) -> np.ndarray:
        """Vectors of shape (rows, dim), in the order of ids.

        Args:
            vector_name: which, if rows have several vectors.
            mmap: True keeps them on disk: the file of the run if it is a single .npy, else an unnamed file in
                EMBQ_SPOOL or the temporary folder, which is gone with the array.
            dtype: None for that of the run; float32 if it stores int8 or binary.
        """
        name = self._vector_column(vector_name)
        default_dtype = np.dtype(self.dtype if self.dtype.startswith("float") else np.float32)
        try:
            target_dtype = default_dtype if dtype is None else np.dtype(dtype)
        except (TypeError, ValueError):
            raise refused("dtype", dtype, "a dtype of numpy, such as float32") from None
        shape = (self.rows_count, self.dims.get(name, 0))
        if mmap and (matrix := self._only_npy(name)) is not None and matrix.dtype == target_dtype:
            return matrix
        if mmap and self.rows_count:
            with tempfile.TemporaryFile(dir=spool_folder()) as file:
                values: np.ndarray = np.memmap(file, target_dtype, "w+", shape=shape)
        else:
            values = np.empty(shape, target_dtype)
        at = 0
        for table in self.tables([name]):
            block = self.restored(table, name)
            values[at : at + len(block)] = block
            at += len(block)
        return values

    def failures(self) -> pa.Table:
        """The failures that stand: key, source, code, message, attempt, unit_id; the key of a whole unit is ""."""
        names = ("key", "source", "code", "message", "attempt", "unit_id")
        tables = [table.select([name for name in names if name != "source"]) for table in standing_failures(self.root)]
        if not tables:
            return pa.table({name: pa.array([], pa.string()) for name in names})
        table = pa.concat_tables(tables)
        ids = table["unit_id"].cast(pa.string()).to_pylist()
        sources = Manifest(Layout(self.root)).sources(set(ids))
        return table.append_column("source", pa.array([sources.get(id_) for id_ in ids], pa.string())).select(names)

    def torch(
        self, *, batch_size: int = 1024, columns: Sequence[str] = (), vector_name: str | None = None
    ) -> TorchRows:
        """A torch `IterableDataset` of batches: {"id": int64 (b,), COLUMN: (b, dim), ...}, for `DataLoader(...,
        batch_size=None)`. Its workers and the ranks of torch.distributed share the rows out: each comes once.

        Args:
            batch_size: rows of a batch, 1 or more.
            columns: further columns, as lists.
            vector_name: which, if rows have several.
        """
        from embq.app.output.torch_rows import TorchRows

        column, rows = self._vector_column(vector_name), whole_number("batch_size", batch_size, 1)
        return TorchRows(self, column, rows, listed("columns", columns, "names of columns"))

    def index(self, vector_name: str | None = None) -> Index:
        """The index of the run, opened once for many searches.

        Args:
            vector_name: which of the vectors of a run, if several are indexed.
        """
        from embq import Index

        return Index(str(self.root), vector_name)

    def matrices(self, column: str) -> list[np.memmap] | None:
        """The vectors of each part, mapped, if they are .npy files of this machine; else None."""
        files = [file for part in self._parts for file in part if file.kind == "vectors" and file.column == column]
        paths = [path for file in files if isinstance(path := file.place(self.root), Path)]
        if not paths or len(paths) < len(self._parts):
            return None
        matrices = [matrix for path in paths if isinstance(matrix := mapped(path), np.memmap)]
        if sum(map(len, matrices)) != self.rows_count:
            raise OutputError(
                f"the files of {column} in {self.root} do not have the rows of their records",
                next_step="restore them from a backup; embq verify tells which",
                code="part_damaged",
            )
        return matrices

    def part_rows(self) -> list[int]:
        """Rows of each part, in the order of ids."""
        return [next(file.rows for file in files if file.kind == "rows") for files in self._parts]

    def part_tables(self, number: int, columns: Sequence[str], start: int, stop: int) -> Iterator[pa.Table]:
        """The rows of a part from `start` up to `stop`; raises as `tables` does."""
        with opened(self.root, self._parts[number]) as part:
            yield from part.tables(columns, start, stop)

    def restored(self, table: pa.Table, column: str) -> np.ndarray:
        """Vectors of a table, (rows, dim): as they are stored if these are floats, else float32."""
        values = vectors(table, column)
        return values if self.dtype.startswith("float") else restored(values, self._info.rows)

    def _vector_column(self, name: str | None) -> str:
        """The column of the vectors of a name, such as "image", or of the column's own."""
        check(vector_name=name)
        if name is None and len(self.vector_columns) == 1:
            return self.vector_columns[0]
        columns = dict(zip(self._info.model.output_names, self.vector_columns, strict=True))
        columns |= {column: column for column in self.vector_columns}
        if name not in columns:
            named = "each row has several vectors" if name is None else f"there are no vectors {name!r}"
            raise InputError(named, next_step=f"name one of {', '.join(columns)}", code="which_output")
        return columns[name]

    def _only_npy(self, column: str) -> np.ndarray | None:
        matrices = self.matrices(column)
        return matrices[0] if matrices is not None and len(matrices) == 1 else None


def open_output(path: str | PathLike[str] | ObjectPath) -> Output:
    """See `embq.open`."""
    return Output(path)


def _require(package: str) -> None:
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise missing(package, next_step=f"pip install {package}")
