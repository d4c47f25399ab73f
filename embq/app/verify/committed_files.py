"""Checks committed files: existence, size, hash, schema and consecutive ids."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from embq.app.verify.findings import Findings
from embq.app.verify.metadata import columns_of
from embq.core.errors import OutputError, OutsideError
from embq.core.formats.folders import row_folders
from embq.core.formats.part import Cursor, Part, opened
from embq.core.rows.results import ARROW_DTYPES, FAILURE_SCHEMA, PASSAGE_FIELDS, embedding_columns, vector_widths
from embq.core.run.commits import Commit, CommittedFile
from embq.core.run.layout import Layout
from embq.core.run.reader import part_tables
from embq.core.run.run_info import RunInfo
from embq.core.storage.durable import file_sha256, names_in

SHARED_NONCE = ".shared"
"""Marker file in the staging folder that tells workers that they share storage with the writer; it is not litter."""


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
        """Accept any id at the start of the next part: a record is missing."""
        self._next_id = None

    def rows(self, commit: Commit) -> Cursor | None:
        """The record's rows, to be read in order; None if one of their files is damaged."""
        parts = _parts(commit)[0]
        for files in parts:
            self._check_first_id(files[0])
        sound = [self._is_whole(commit, files) for files in parts]
        return Cursor(table for files in parts for table in self._read(files)) if all(sound) else None

    def failures(self, commit: Commit) -> Cursor | None:
        """The record's failures, to be read in order; None if one of their files is damaged."""
        parts = _parts(commit)[1]
        sound = [self._is_whole(commit, files) for files in parts]
        tables = (table for files in parts for table in part_tables(self._layout.root, files))
        return Cursor(tables) if all(sound) else None

    def look_at(self, commit: Commit) -> None:
        """Check sizes and footers of the record's files; rows are not read."""
        rows, failures = _parts(commit)
        for files in rows:
            self._check_first_id(files[0])
        for files in (*rows, *failures):
            sizes = [self._check_size(commit, file) for file in files]
            if all(sizes):
                self._look_into(commit, files)
        units = {"rows": sum(unit.rows for unit in commit.units), "failures": sum(u.failures for u in commit.units)}
        for kind, recorded in units.items():
            if (present := sum(file.rows for file in commit.files if file.kind == kind)) != recorded:
                name = f"{commit.n:08d}.json"
                self._findings.add("counts", name, f"its files have {present} {kind}, its units {recorded}")

    def unnamed(self) -> list[str]:
        """Files that are in no record: parts, failures, temporary files, and staged results that were not accepted."""
        layout = self._layout
        staged = (layout.staging, layout.staged_parts)
        present = (
            f"{folder.name}/{name}"
            for folder in (*row_folders(layout, self._info), layout.failures, layout.temporary, *staged)
            if folder.is_dir()
            for name in names_in(folder)
        )
        return sorted(set(present) - self._named - {f"{layout.staging.name}/{SHARED_NONCE}"})

    def _read(self, files: list[CommittedFile]) -> Iterator[pa.Table]:
        position = 0
        for table in part_tables(self._layout.root, files):
            self._check_ids(files[0], table, position)
            position += table.num_rows
            yield table

    def _check_size(self, commit: Commit, file: CommittedFile) -> bool:
        """Check that the file exists, is in one record only, and has the recorded size."""
        add = self._findings.add
        if file.path in self._named:
            add("file_once", file.path, f"record {commit.n} names it, and an earlier record does too")
        self._named.add(file.path)
        try:
            size = file.place(self._layout.root).stat().st_size
        except OutsideError as error:
            add("file_readable", file.path, error.message)
            return False
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
            digest = file_sha256(file.place(self._layout.root))
        except OSError as error:
            self._findings.add("file_readable", file.path, f"it cannot be read: {error.strerror}")
            return False
        if digest != file.sha256:
            self._findings.add("file_hash", file.path, f"its sha256 is {digest}, its record says {file.sha256}")
        return digest == file.sha256

    def _is_whole(self, commit: Commit, files: list[CommittedFile]) -> bool:
        checks = [self._check_size(commit, file) and self._check_hash(file) for file in files]
        return all(checks) and self._look_into(commit, files)

    def _look_into(self, commit: Commit, files: list[CommittedFile]) -> bool:
        """Check the footers of aligned files against record and run: rows, columns, ids, model."""
        try:
            with opened(self._layout.root, files) as part:
                return self._check_part(commit, files, part)
        except OutputError as error:
            self._findings.add("file_readable", files[0].path, error.message)
            return False

    def _check_part(self, commit: Commit, files: list[CommittedFile], part: Part) -> bool:
        for file, rows in zip(files, part.rows, strict=True):
            if rows != file.rows:
                self._findings.add("file_rows", file.path, f"it has {rows} rows, its record says {file.rows}")
            self.count += 1
            self.bytes += file.bytes
        if len(set(part.rows)) > 1:
            self._findings.add("file_rows", files[0].path, f"its rows and those of the files beside it: {part.rows}")
            return False
        if files[0].kind == "rows":
            self._check_footer_ids(files[0], part.ids())
        return self._check_schema(commit, files[0], part.schema)

    def _check_schema(self, commit: Commit, file: CommittedFile, schema: pa.Schema) -> bool:
        """Check columns and types, and that all rows have one schema and one fingerprint."""
        types = {"unit_id": pa.string(), "key": pa.string(), "ordinal": pa.int32()}
        if file.kind == "failures":
            types |= {field.name: field.type for field in FAILURE_SCHEMA}
            if "attempt" not in schema.names:  # of a version that did not count them
                del types["attempt"]
        else:
            types |= {"id": pa.int64(), "caption": pa.string(), **columns_of(self._info)}
            if self._info.model.chunking is not None:
                types |= {field.name: field.type for field in PASSAGE_FIELDS}
            if self._info.rows.similarity:
                types |= dict.fromkeys(self._info.model.compared, pa.float32())
            if self._schema is None:
                self._schema = schema
            elif not schema.equals(self._schema):
                self._findings.add("schema", file.path, "its columns differ from those of the first rows")
        unexpected: list[str] = []
        wrong = [name for name, type_ in types.items() if name not in schema.names or schema.field(name).type != type_]
        if file.kind == "rows":
            embeddings = embedding_columns(self._info.model.output_names)
            wrong += [
                name
                for name in embeddings
                if name not in schema.names or not self._holds_vectors(schema.field(name).type)
            ]
            if unexpected := [name for name in schema.names if name not in types and name not in embeddings]:
                self._findings.add("schema", file.path, f"it has columns that the run has not: {', '.join(unexpected)}")
            if any(commit.widths.get(name) != width for name, width in vector_widths(schema).items()):
                self._findings.add("schema", file.path, f"its record says that vectors have {commit.widths} numbers")
            inside = (schema.metadata or {}).get(b"embq.fingerprint", b"").decode("utf-8", "replace")
            if inside != commit.fingerprint:
                self._findings.add("fingerprint", file.path, f"model {inside}, its record says {commit.fingerprint}")
        if wrong:
            self._findings.add("schema", file.path, f"columns missing or of another type: {', '.join(wrong)}")
        return not wrong and not unexpected

    def _holds_vectors(self, type_: pa.DataType) -> bool:
        """True if a column of this type can hold the stored form of a vector."""
        rows = self._info.rows
        if not pa.types.is_fixed_size_list(type_) or type_.value_type != ARROW_DTYPES[rows.dtype]:
            return False
        return not rows.truncate_dim or type_.list_size == rows.width(rows.truncate_dim)

    def _check_footer_ids(self, file: CommittedFile, groups: list[tuple[int, tuple[int, int]]]) -> None:
        """Check the lowest and highest ids in a file's footer."""
        first = file.first_id
        for rows, ids in groups:
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


def _parts(commit: Commit) -> tuple[list[list[CommittedFile]], list[list[CommittedFile]]]:
    """The files of a record, grouped by what is opened together: of rows, and of failures."""
    return list(map(list, commit.parts)), [[file] for file in commit.files if file.kind == "failures"]


def read_failed(findings: Findings, commit: Commit, error: OutputError) -> None:
    """Add a violation: a file of `commit` could not be read to its end although its hash is right."""
    findings.add("file_readable", f"record {commit.n}", error.message)
