"""Whether the files that records name are there, whole, of one schema, and with ids that follow each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from core.commits import Commit, CommittedFile
from core.durable import file_sha256
from core.errors import OutputError
from core.layout import Layout, RunInfo
from core.reader import file_tables
from core.results import ARROW_DTYPES, FAILURE_SCHEMA, PASSAGE_FIELDS, embedding_columns, vector_widths
from embq.verification.findings import Findings

SHARED_NONCE = ".shared"
"""By this file in the staging folder workers know that they share storage with the writer; it stays."""


@dataclass(frozen=True, slots=True)
class Footer:
    """What a file says of itself: rows, columns, and of each of its groups the rows, lowest and highest id."""

    rows: int
    schema: pa.Schema
    ids: list[tuple[int, tuple[int, int]]]


class Cursor:
    """The rows of some tables, in order, holding one table at a time. OutputError where the file ends in damage."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self._table: pa.Table | None = None

    def take(self, count: int) -> pa.Table:
        """The next `count` rows, or what is left of them."""
        pieces: list[pa.Table] = []
        while count > 0:
            if self._table is None or self._table.num_rows == 0:
                self._table = next(self._tables, None)
                if self._table is None:
                    break
            piece = self._table.slice(0, count)
            self._table = self._table.slice(piece.num_rows)
            pieces.append(piece)
            count -= piece.num_rows
        return pa.concat_tables(pieces) if pieces else pa.table({})

    def rest(self) -> int:
        """How many rows are left; they are gone afterwards."""
        left: int = 0 if self._table is None else self._table.num_rows
        for table in self._tables:
            left += table.num_rows
        return left


class Files:
    """Checks the files of one record after the other.

    Attributes:
        count, bytes: of the files that are whole.
    """

    def __init__(self, layout: Layout, info: RunInfo, findings: Findings) -> None:
        self.count = 0
        self.bytes = 0
        self._layout = layout
        self._info = info
        self._findings = findings
        self._named: set[str] = set()
        self._schema: pa.Schema | None = None
        self._next_id: int | None = 0

    def forget_ids(self) -> None:
        """A record is missing: the next part may begin with any id."""
        self._next_id = None

    def open(self, commit: Commit, kind: str) -> Cursor | None:
        """The record's files of one kind, to be read in order; None where one of them cannot be relied on."""
        files = [file for file in commit.files if file.kind == kind]
        sound = [self._is_whole(commit, file) for file in files]
        if kind == "rows":
            for file in files:
                self._check_first_id(file)
        if not all(sound):
            return None
        return Cursor(self._read(files))

    def look_at(self, commit: Commit) -> None:
        """Check the record's files by their sizes and by what they say of themselves; their rows are not read."""
        for file in commit.files:
            footer = self._footer(file) if self._check_size(commit, file) else None
            if footer is not None:
                self._check_footer(commit, file, footer)
            if file.kind == "rows":
                self._check_ids_said(file, footer)
                self._check_first_id(file)
        units = {"rows": sum(unit.rows for unit in commit.units), "failures": sum(u.failures for u in commit.units)}
        for kind, said in units.items():
            if (there := sum(file.rows for file in commit.files if file.kind == kind)) != said:
                name = f"{commit.n:08d}.json"
                self._findings.add("counts", name, f"its files have {there} {kind}, its units {said}")

    def unnamed(self) -> list[str]:
        """Files that no record names: among parts and failures, unfinished ones, and results that nobody took."""
        layout = self._layout
        there = (
            f"{folder.name}/{path.name}"
            for folder in (layout.parts, layout.failures, layout.temporary, layout.staging)
            if folder.is_dir()
            for path in folder.iterdir()
        )
        return sorted(set(there) - self._named - {f"{layout.staging.name}/{SHARED_NONCE}"})

    def _read(self, files: list[CommittedFile]) -> Iterator[pa.Table]:
        for file in files:
            position = 0
            for table in file_tables(self._layout.root, file):
                if file.kind == "rows":
                    self._check_ids(file, table, position)
                position += table.num_rows
                yield table

    def _check_size(self, commit: Commit, file: CommittedFile) -> bool:
        """Whether the file is there, named once, with as many bytes as its record says."""
        add = self._findings.add
        if file.path in self._named:
            add("file_once", file.path, f"record {commit.n} names it, and an earlier record does too")
        self._named.add(file.path)
        try:
            size = (self._layout.root / file.path).stat().st_size
        except FileNotFoundError:
            add("file_there", file.path, f"record {commit.n} names it and it is not there")
            return False
        except OSError as error:
            add("file_readable", file.path, f"it cannot be read: {error.strerror}")
            return False
        if size != file.bytes:
            add("file_bytes", file.path, f"it has {size} bytes, its record says {file.bytes}")
        return size == file.bytes

    def _check_hash(self, file: CommittedFile) -> bool:
        try:
            digest = file_sha256(self._layout.root / file.path)
        except OSError as error:
            self._findings.add("file_readable", file.path, f"it cannot be read: {error.strerror}")
            return False
        if digest != file.sha256:
            self._findings.add("file_hash", file.path, f"its sha256 is {digest}, its record says {file.sha256}")
        return digest == file.sha256

    def _footer(self, file: CommittedFile) -> Footer | None:
        try:
            with pq.ParquetFile(self._layout.root / file.path) as parquet:
                return Footer(parquet.metadata.num_rows, parquet.schema_arrow, _ids_of_groups(parquet.metadata))
        except (OSError, pa.ArrowException) as error:
            self._findings.add("file_readable", file.path, f"it is not a parquet file: {error}")
            return None

    def _is_whole(self, commit: Commit, file: CommittedFile) -> bool:
        if not self._check_size(commit, file) or not self._check_hash(file):
            return False
        footer = self._footer(file)
        return footer is not None and self._check_footer(commit, file, footer)

    def _check_footer(self, commit: Commit, file: CommittedFile, footer: Footer) -> bool:
        """Whether what the file says of itself is what its record and its run say: rows, columns, model."""
        if footer.rows != file.rows:
            self._findings.add("file_rows", file.path, f"it has {footer.rows} rows, its record says {file.rows}")
        self.count += 1
        self.bytes += file.bytes
        return self._check_schema(commit, file, footer.schema)

    def _check_schema(self, commit: Commit, file: CommittedFile, schema: pa.Schema) -> bool:
        """Whether the columns are there with their types; also that rows have one schema and one fingerprint."""
        wanted = {"unit_id": pa.string(), "key": pa.string(), "ordinal": pa.int32()}
        if file.kind == "failures":
            wanted |= {field.name: field.type for field in FAILURE_SCHEMA}
        else:
            wanted["id"] = pa.int64()
            if self._info.model.chunking is not None:
                wanted |= {field.name: field.type for field in PASSAGE_FIELDS}
            if self._schema is None:
                self._schema = schema
            elif not schema.equals(self._schema):
                self._findings.add("schema", file.path, "its columns differ from those of the first rows")
        wrong = [name for name, type_ in wanted.items() if name not in schema.names or schema.field(name).type != type_]
        if file.kind == "rows":
            dtype = ARROW_DTYPES[self._info.rows.dtype]
            wrong += [
                name
                for name in embedding_columns(self._info.model.output_names)
                if name not in schema.names
                or not pa.types.is_fixed_size_list(schema.field(name).type)
                or schema.field(name).type.value_type != dtype
            ]
            if any(commit.widths.get(name) != width for name, width in vector_widths(schema).items()):
                self._findings.add("schema", file.path, f"its record says that vectors have {commit.widths} numbers")
            inside = (schema.metadata or {}).get(b"embq.fingerprint", b"").decode("utf-8", "replace")
            if inside != commit.fingerprint:
                self._findings.add("fingerprint", file.path, f"model {inside}, its record says {commit.fingerprint}")
        if wrong:
            self._findings.add("schema", file.path, f"columns missing or of another type: {', '.join(wrong)}")
        return not wrong

    def _check_ids_said(self, file: CommittedFile, footer: Footer | None) -> None:
        """Whether the lowest and highest ids that a footer names are those of rows that count up."""
        first = file.first_id
        for rows, ids in footer.ids if footer is not None else ():
            if ids != (first, first + rows - 1):
                self._findings.add("ids", file.path, f"its ids do not count up from {file.first_id}")
                return
            first += rows

    def _check_first_id(self, file: CommittedFile) -> None:
        if self._next_id is not None and file.first_id != self._next_id:
            self._findings.add("ids", file.path, f"its first id is {file.first_id}, the next one is {self._next_id}")
        self._next_id = file.first_id + file.rows

    def _check_ids(self, file: CommittedFile, table: pa.Table, position: int) -> None:
        ids = table["id"].to_numpy()
        first = file.first_id + position
        if not np.array_equal(ids, np.arange(first, first + len(ids))):
            self._findings.add("ids", file.path, f"its ids do not count up from {file.first_id}")


def _ids_of_groups(footer: pq.FileMetaData) -> list[tuple[int, tuple[int, int]]]:
    """Rows, lowest and highest id of each row group; empty where one does not say so."""
    found = []
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        columns = (group.column(i) for i in range(group.num_columns))
        ids = next((column.statistics for column in columns if column.path_in_schema == "id"), None)
        if ids is None or not ids.has_min_max:
            return []
        found.append((group.num_rows, (ids.min, ids.max)))
    return found


def read_failed(findings: Findings, commit: Commit, error: OutputError) -> None:
    """Record that a file of `commit` could not be read to its end although its hash is right."""
    findings.add("file_readable", f"record {commit.n}", error.message)
