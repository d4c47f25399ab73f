"""Kind "arrow": IPC files and streams (.arrow, .feather), and folders that the `datasets` library saved.

The headers of the messages tell how many rows each batch has, so planning reads no batch. The batches of a file are
those that its footer lists; a stream is walked from its first byte.
"""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from embq.core.errors import InputError, SourceError
from embq.core.rows.arrow_messages import CONTINUATION, DICTIONARY_BATCH, listed_blocks, offset, scalar
from embq.core.units import Unit
from embq.sources.access.files import open_unchanged, stat_file
from embq.sources.formats.tables import TableSource
from embq.sources.interface import unwatched

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIXES = (".arrow", ".feather", ".ipc", ".arrows")

_MAGIC = b"ARROW1"

_FILE_START = 8

_SCHEMA, _RECORD_BATCH = 1, 3

_HEADER_MAX_BYTES = 256_000_000
"""A longer header is taken for damage; headers grow with the columns, not with the rows."""


class ArrowTable:
    """An IPC file or stream that is open."""

    def __init__(self, file: io.BufferedIOBase, path: str) -> None:
        from pyarrow import ipc

        from embq.sources.formats.arrow_values import columns_of

        self._file = file
        self._path = path
        self._is_file = file.read(len(_MAGIC)) == _MAGIC
        self._batches, self._has_dictionaries = _footer_batches(file, path) if self._is_file else _walk(file, path)
        self.rows = sum(batch.rows for batch in self._batches)
        self.groups = [(batch.rows, batch.end - batch.at) for batch in self._batches]
        file.seek(0)
        self._reader = ipc.open_file(file) if self._is_file else ipc.open_stream(file)
        self._schema: pa.Schema = self._reader.schema
        self.columns = columns_of(self._schema)
        if self._is_file and self._reader.num_record_batches != len(self._batches):
            raise ValueError(
                f"{self._reader.num_record_batches} batches for the library, {len(self._batches)} in the footer"
            )

    def batches(self, row: int, names: list[str]) -> tuple[int, Iterator[pa.RecordBatch]]:
        """Batches from the one that holds `row` on; a batch is the least that can be read."""
        start = number = 0
        while number < len(self._batches) - 1 and start + self._batches[number].rows <= row:
            start += self._batches[number].rows
            number += 1
        if not self._is_file and self._has_dictionaries:
            return 0, _checked(self._reader)  # dictionaries may change on the way
        return start, _checked(self._from(number, names))

    def _from(self, number: int, names: list[str]) -> Iterator[pa.RecordBatch]:
        from pyarrow import ipc

        from embq.sources.formats.arrow_values import outer_name

        if self._is_file:
            outer = dict.fromkeys(outer_name(self._schema, name) for name in names)
            fields = [self._schema.get_field_index(name) for name in outer]
            options = ipc.IpcReadOptions(included_fields=fields, use_threads=False)
            self._file.seek(0)
            reader = ipc.open_file(self._file, options=options)
            for i in range(number, len(self._batches)):
                yield reader.get_batch(i)
            return
        for batch in self._batches[number:]:
            self._file.seek(batch.at)
            yield ipc.read_record_batch(ipc.read_message(self._file), self._schema)


def _checked(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches, none of which leads out of itself."""
    from embq.sources.formats.arrow_values import check

    for batch in batches:
        check(batch)
        yield batch


class _Message(NamedTuple):
    """A message: its place and header.

    Attributes:
        at: offset of its prefix.
        end: offset behind its body.
        kind: Arrow's number of its type; 0 for the end marker of a stream.
        rows: of a record batch.
        body: length of its body.
    """

    at: int
    end: int
    kind: int = 0
    rows: int = 0
    body: int = 0


def _walk(file: io.BufferedIOBase, path: str) -> tuple[list[_Message], bool]:
    """The record batches of a stream, and whether there are dictionaries.

    Raises SourceError `table_damaged` if a message does not fit into the file, or there is no end marker: the stream
    may be cut between two batches.
    """
    size = file.seek(0, os.SEEK_END)
    batches: list[_Message] = []
    dictionaries = False
    at = 0
    while (message := _message(file, at, size, path)).kind:
        if message.kind == _RECORD_BATCH:
            batches.append(message)
        dictionaries = dictionaries or message.kind == DICTIONARY_BATCH
        at = message.end
    if message.end != size:
        raise _damaged(path, "there is data behind its end", message.end)
    return batches, dictionaries


def _footer_batches(file: io.BufferedIOBase, path: str) -> tuple[list[_Message], bool]:
    """The record batches of a file in the order of its footer, and whether there are dictionaries.

    Raises SourceError `table_damaged` if there is no footer, or it does not match the file: a batch that is
    none, two that overlap, or one that is left out.
    """
    try:
        dictionaries, batches, stop = listed_blocks(file, most_bytes=_HEADER_MAX_BYTES)
    except ValueError as error:
        raise _damaged(path, str(error), file.seek(0, os.SEEK_END)) from error
    listed = [(DICTIONARY_BATCH, *block) for block in dictionaries] + [(_RECORD_BATCH, *block) for block in batches]
    messages: list[_Message] = []
    for kind, at, header, body in listed:
        if not _FILE_START <= at < stop:
            raise _damaged(path, "its footer names a batch outside of it", stop)
        message = _message(file, at, stop, path)
        if (message.kind, message.body) != (kind, body) or message.end > at + header + body:
            raise _damaged(path, "its footer names a batch that is none", at)
        messages.append(message)
    end = _FILE_START
    for message in sorted((*messages, _Message(stop, stop))):
        if message.at < end:
            raise _damaged(path, "its footer names batches that overlap", message.at)
        _refuse_left_out(file, end, message.at, path)
        end = message.end
    return [message for message in messages if message.kind == _RECORD_BATCH], bool(dictionaries)


def _refuse_left_out(file: io.BufferedIOBase, start: int, stop: int, path: str) -> None:
    """Raise SourceError if a batch stands between two offsets: the footer has lost it.

    Else there are the schema, which polars writes without a prefix, the end marker and padding.
    """
    if stop - start > _HEADER_MAX_BYTES:
        raise _damaged(path, "there is data that its footer does not name", start)
    file.seek(start)
    data = file.read(stop - start)
    at = -1
    while (at := data.find(CONTINUATION, at + 1)) >= 0:
        with suppress(SourceError):
            if _message(file, start + at, stop, path).kind in (DICTIONARY_BATCH, _RECORD_BATCH):
                break
    else:
        return
    raise _damaged(path, "its footer does not name a batch", start + at)


def _message(file: io.BufferedIOBase, at: int, stop: int, path: str) -> _Message:
    """The message at an offset; SourceError `table_damaged` if there is none that ends before `stop`."""
    file.seek(at)
    prefix = file.read(4)
    start = at + 4
    if prefix == CONTINUATION:  # what is older than 2019 has none
        prefix = file.read(4)
        start = at + 8
    if len(prefix) < 4:
        raise _damaged(path, "it has no end marker, so it may be cut", at)
    length = int.from_bytes(prefix, "little", signed=True)
    if length == 0:
        return _Message(at, start)
    if not 0 < length <= min(_HEADER_MAX_BYTES, stop - start):
        raise _damaged(path, "a message does not fit into it", at)
    try:
        kind, rows, body = _header(file.read(length))
    except (struct.error, ValueError) as error:
        raise _damaged(path, "a message has a broken header", at) from error
    if body < 0 or rows < 0 or start + length + body > stop:
        raise _damaged(path, "it is cut inside a message", at)
    return _Message(at, start + length + body, kind, rows, body)


def _header(data: bytes) -> tuple[int, int, int]:
    """Type, rows (of a record batch) and body length of a message: a FlatBuffers table of Arrow's Message.fbs."""
    message = struct.unpack_from("<I", data)[0]
    kind = scalar(data, message, 1, "<B")
    if kind not in (_SCHEMA, DICTIONARY_BATCH, _RECORD_BATCH):
        raise ValueError(f"a message of type {kind}")
    rows = 0
    if kind == _RECORD_BATCH:
        at = offset(data, message, 2)
        if not at:
            raise ValueError("a batch without description")
        batch = at + struct.unpack_from("<I", data, at)[0]
        rows = scalar(data, batch, 0, "<q")
        nodes = offset(data, batch, 1)
        count, first = struct.unpack_from("<Iq", data, nodes + struct.unpack_from("<I", data, nodes)[0])
        if not nodes or not count or first != rows:
            raise ValueError("a batch and its first column differ in length")
    return kind, rows, scalar(data, message, 3, "<q")


def _damaged(path: str, what: str, at: int) -> SourceError:
    return SourceError(f"{path}: {what} (at byte {at})", code="table_damaged", next_step="copy or write the file again")


ARROW = TableSource("arrow", ArrowTable)

DICTIONARY, STATE, INFO = "dataset_dict.json", "state.json", "dataset_info.json"


def saved_files(path: str, names: list[str]) -> list[str] | None:
    """The Arrow files of a saved dataset, or of all splits of one, as paths; None for any other folder.

    Args:
        path: the folder.
        names: what it holds.

    Raises InputError if files of its own list are missing.
    """
    if DICTIONARY in names:
        splits = _listed(path, DICTIONARY, "splits")
        return [file for split in splits for file in _files(f"{path.rstrip('/')}/{_plain(path, split)}")]
    return _files(path) if STATE in names and INFO in names else None


def _files(path: str) -> list[str]:
    state = _load(path, STATE)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise InputError(
            f"{path}: is a selection of a dataset, not the rows themselves",
            next_step="save it again, with dataset.flatten_indices().save_to_disk(...)",
        )
    return [
        f"{path.rstrip('/')}/{_plain(path, entry.get('filename') if isinstance(entry, dict) else None)}"
        for entry in _listed(path, STATE, "_data_files")
    ]


def _listed(path: str, name: str, field: str) -> list[Any]:
    listed = _load(path, name).get(field)
    if not isinstance(listed, list):
        raise _broken(path, f"{name} has no list {field!r}")
    return listed


def _load(path: str, name: str) -> dict[str, Any]:
    file = f"{path.rstrip('/')}/{name}"
    unit = Unit(kind="arrow", source=file, etag=stat_file(file).version)
    with open_unchanged(unit, "source_changed", unwatched) as opened:
        data = opened.read(10_000_000)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"{name} is not JSON") from error
    if not isinstance(value, dict):
        raise _broken(path, f"{name} is no JSON object")
    return value


def _plain(path: str, name: object) -> str:
    if not isinstance(name, str) or not name or "/" in name or name in (".", ".."):
        raise _broken(path, f"it names {name!r}, which is no file of this folder")
    return name


def _broken(path: str, what: str) -> InputError:
    return InputError(f"{path}: looks like a saved dataset, and {what}", next_step="save the dataset again")
