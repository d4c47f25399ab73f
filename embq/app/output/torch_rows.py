"""Rows of a run as a torch dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import FileIO
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import IterableDataset, get_worker_info

from embq.core.errors import OutputError
from embq.core.formats.part import Cursor


class Parts(Protocol):
    """Rows in parts, as `embq.app.output.output.Output` has them."""

    def __len__(self) -> int: ...

    def matrices(self, column: str) -> list[np.memmap] | None:
        """The vectors of each part, mapped; None if they are not .npy files of this machine."""

    def part_rows(self) -> list[int]:
        """Rows of each part, in the order of ids."""

    def part_tables(self, number: int, columns: Sequence[str], start: int, stop: int) -> Iterator[pa.Table]:
        """The rows of a part from `start` up to `stop`."""

    def restored(self, table: pa.Table, column: str) -> np.ndarray:
        """Vectors of a table: (rows, dim)."""


class TorchRows(IterableDataset[dict[str, Any]]):
    """Batches of rows in the order of ids; each loader worker of each rank has a stretch of its own.

    Args:
        output: the rows.
        column: of the vectors.
        batch_size: rows of a batch; the last one of a worker has fewer.
        columns: further columns, as lists.
    """

    def __init__(self, output: Parts, column: str, batch_size: int, columns: Sequence[str]) -> None:
        self._output, self._column, self._batch_size, self._columns = output, column, batch_size, tuple(columns)

    def __len__(self) -> int:
        """Batches of one process."""
        return -(-len(self._output) // self._batch_size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        first, last = share(len(self._output))
        if not self._columns and (matrices := self._output.matrices(self._column)) is not None:
            yield from self._plain(matrices, first, last)
            return
        cursor = Cursor(self._tables(first, last))
        while (table := cursor.read(self._batch_size)).num_rows:
            batch: dict[str, Any] = {
                "id": torch.from_numpy(table["id"].to_numpy().copy()),
                self._column: torch.from_numpy(self._vectors(table)),
            }
            yield batch | {name: table[name].to_pylist() for name in self._columns}

    def _plain(self, matrices: list[np.memmap], first: int, last: int) -> Iterator[dict[str, Any]]:
        """Batches of .npy files, read straight into the tensors."""
        at = first
        while at < last:
            rows = min(self._batch_size, last - at)
            block = np.empty((rows, matrices[0].shape[1]), matrices[0].dtype)
            self._fill(block, matrices, at)
            yield {"id": torch.arange(at, at + rows), self._column: torch.from_numpy(block)}
            at += rows

    def _fill(self, block: np.ndarray, matrices: list[np.memmap], at: int) -> None:
        """Rows from `at` on, from one part or several."""
        filled, begin = 0, 0
        for matrix in matrices:
            start = at + filled - begin
            if filled < len(block) and start < len(matrix):
                rows = min(len(block) - filled, len(matrix) - start)
                with open(str(matrix.filename), "rb", buffering=0) as file:
                    file.seek(matrix.offset + start * matrix[0].nbytes)
                    _read_into(file, block[filled : filled + rows].data.cast("B"))
                filled += rows
            begin += len(matrix)

    def _vectors(self, table: pa.Table) -> np.ndarray:
        """A copy, made once: arrays of Arrow are not writable, and those of several batches are not in one place."""
        pieces = [pa.Table.from_batches([batch]) for batch in table.select([self._column]).to_batches()]
        return np.concatenate([self._output.restored(piece, self._column) for piece in pieces])

    def _tables(self, first: int, last: int) -> Iterator[pa.Table]:
        names = list(dict.fromkeys(["id", self._column, *self._columns]))
        at = 0
        for number, rows in enumerate(self._output.part_rows()):
            start, stop = max(first - at, 0), min(last - at, rows)
            if start < stop:
                yield from self._output.part_tables(number, names, start, stop)
            at += rows


def _read_into(file: FileIO, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        if not (count := file.readinto(buffer[done:])):
            raise OutputError(f"{file.name} ends too early", next_step="embq verify tells more", code="part_damaged")
        done += count


def share(rows: int) -> tuple[int, int]:
    """The stretch of the rows that is for this loader worker of this rank."""
    rank, ranks = 0, 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    worker = get_worker_info()
    number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
    mine, of = rank * count + number, ranks * count
    return rows * mine // of, rows * (mine + 1) // of
