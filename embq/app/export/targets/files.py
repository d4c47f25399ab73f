"""Rows as files: a dataset folder of Hugging Face, and the tables of TensorFlow's Embedding Projector."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from embq.app.export.targets.target import RUN, TargetRows, other_form, run_in
from embq.core.errors import TryLaterError
from embq.core.formats.base import vectors
from embq.core.storage import beneath
from embq.core.storage.durable import fsync_file, fsync_folder, try_lock, write_new

ACCOUNT, METADATA = "embq.json", "metadata.tsv"
"""File beside the tables with the run and the columns; file with a line for each row."""
ACCOUNT_BYTES = 16 << 20


class _Folder:
    """A folder that one export at a time fills.

    Args:
        destination: the folder.
    """

    _rows: TargetRows

    def __init__(self, destination: str) -> None:
        self.name = destination
        self._folder = Path(destination)
        self._lock: int | None = None

    def close(self) -> None:
        """Let others write there."""
        if self._lock is not None:
            os.close(self._lock)

    def _occupy(self, rows: TargetRows) -> None:
        """Make the folder and lock it; TryLaterError if another export writes there."""
        self._rows = rows
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        if not try_lock(self._lock):
            raise TryLaterError(f"another export writes in {self.name}", next_step="wait until it ends", code="busy")


class HuggingFace(_Folder):
    """A folder that `datasets.load_dataset` reads and `hf upload` pushes; see `targets.target.Target`."""

    batch_rows = 65_536  # one file
    errors = (OSError, pa.ArrowInvalid)

    def open(self, rows: TargetRows) -> str | None:
        """See `Target`."""
        self._occupy(rows)
        with beneath.folder(self._folder, "data", make=True):  # OutsideError if it is a link
            pass
        for path in (self._folder / "data").glob("*.unfinished"):
            path.unlink()
        runs = set()
        for path in self._files():
            schema = pq.read_schema(beneath.require_regular(path))
            if not schema.remove_metadata().equals(rows.schema):
                raise other_form(self.name, ", ".join(schema.names), ", ".join(rows.schema.names))
            runs.add(run_in(schema))
        return max(runs - {rows.run}, default=rows.run if runs else None)

    def ids(self) -> Iterator[np.ndarray]:
        """See `Target`."""
        for path in self._files():
            yield pq.read_table(path, columns=["id"])["id"].to_numpy()

    def write(self, table: pa.Table) -> None:
        """See `Target`: a file, which gets its name when it is complete."""
        path = self._folder / "data" / f"rows-{table['id'][0].as_py():012d}.parquet"
        unfinished = path.with_suffix(".unfinished")
        pq.write_table(table.replace_schema_metadata({RUN: self._rows.run.encode()}), unfinished)
        fsync_file(unfinished)
        unfinished.rename(path)
        fsync_folder(path.parent)

    def finish(self) -> None:
        """Write the dataset card, if there is none."""
        rows, card = self._rows, self._folder / "README.md"
        listed = "\n".join(f"- `{name}`: {dim} numbers" for name, dim in rows.dims.items())
        text = (
            "---\nconfigs:\n- config_name: default\n  data_files: data/*.parquet\n---\n"
            f"# Embeddings of {rows.model}\n\n`id` counts the rows, `key` names the input.\n\n{listed}\n"
        )
        if not card.exists():
            write_new(card, text.encode(), temporary=self._folder / "_README.md")

    def _files(self) -> list[Path]:
        return sorted((self._folder / "data").glob("*.parquet"))


class Tsv(_Folder):
    """`metadata.tsv` and a file of vectors beside it, row by row; see `embq.app.export.targets.target.Target`.

    The projector loads both from a browser: 100,000 rows are much for it.
    """

    batch_rows = 10_000
    errors = (OSError, ValueError)

    def open(self, rows: TargetRows) -> str | None:
        """See `Target`. Lines that a killed export left in one file alone are cut."""
        self._occupy(rows)
        account = self._folder / ACCOUNT
        if not account.exists():
            text = json.dumps({"run": rows.run, "columns": rows.schema.names}).encode() + b"\n"
            write_new(account, text, temporary=self._folder / f"_{ACCOUNT}")
        try:
            form = json.loads(beneath.read_bytes(self._folder, ACCOUNT, most_bytes=ACCOUNT_BYTES))
        except RecursionError:
            form = None
        columns = form.get("columns") if isinstance(form, dict) else None
        if columns != rows.schema.names:
            raise other_form(self.name, f"the columns {columns}", ", ".join(rows.schema.names))
        if not self._count_lines(METADATA):
            header = "\t".join(["id", *(_cell(field.name) for field in rows.payload_fields)])
            with self._appending(METADATA) as file:
                file.write(f"{header}\n".encode())
        complete = min(self._count_lines(METADATA) - 1, *map(self._count_lines, self._vectors.values()))
        self._cut(METADATA, complete + 1)
        for name in self._vectors.values():
            self._cut(name, complete)
        return str(form.get("run"))

    def ids(self) -> Iterator[np.ndarray]:
        """See `Target`."""
        with beneath.reader(self._folder, METADATA) as file:
            file.readline()
            while lines := file.readlines(1 << 20):
                yield np.array([int(line.partition(b"\t")[0]) for line in lines], np.int64)

    def write(self, table: pa.Table) -> None:
        """See `Target`."""
        for column, name in self._vectors.items():
            block = vectors(table, column).astype(np.float32)
            columns = pa.table({str(number): block[:, number] for number in range(block.shape[1])})
            options = pyarrow.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
            with self._appending(name) as file:
                pyarrow.csv.write_csv(columns, file, options)
        rows = table.select(["id", *(field.name for field in self._rows.payload_fields)])
        with self._appending(METADATA) as file:
            for row in zip(*(column.to_pylist() for column in rows.columns), strict=True):
                file.write(("\t".join(map(_cell, row)) + "\n").encode())

    def finish(self) -> None:
        """All is written."""

    @property
    def _vectors(self) -> dict[str, str]:
        """Column of vectors -> name of its file."""
        names = list(self._rows.dims)
        return {name: "vectors.tsv" if len(names) == 1 else f"{name}.tsv" for name in names}

    @contextmanager
    def _appending(self, name: str) -> Iterator[IO[bytes]]:
        """A file of the folder to append to, created if it is missing; durable at the end of the block."""
        with open(beneath.open_appending(self._folder / name), "ab") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def _count_lines(self, name: str) -> int:
        with open(beneath.open_file(self._folder, name, os.O_RDONLY | os.O_CREAT, 0o666), "rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))

    def _cut(self, name: str, lines: int) -> None:
        """Truncate a file after this many lines."""
        with open(beneath.open_file(self._folder, name, os.O_RDWR), "rb+") as file:
            for _ in range(lines):
                file.readline()
            file.truncate(file.tell())


def _cell(value: object) -> str:
    """A value on one line: white space and control characters become spaces."""
    text = "" if value is None else str(value)
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)
