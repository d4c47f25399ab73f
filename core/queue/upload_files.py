"""What a laptop sends to an output folder that only the writer can reach: files, in numbered pieces.

How they get there: `core.queue.uploads`.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Annotated

import msgspec
from msgspec import Meta

from core import wire
from core.errors import InputError
from core.queue import keys
from core.queue.control import LEAST_PRIORITY, MOST_PRIORITY
from core.run.layout import INPUTS
from core.units import content_hash
from core.wire import MOST_BYTES, Count, PathText, RunId, Sha256

PIECE_BYTES = 1 << 20
"""Bytes of one piece, before compression."""

MOST_UPLOAD_BYTES = 64 << 20
"""Bytes of what is announced of an upload: 300,000 files."""

_SAFE = re.compile(rf"run\.json|manifest/\d{{5}}\.parquet|{INPUTS}/[0-9a-f]{{5,16}}(/[^/\0]+)+")
"""What an upload may write. An upload comes over the network, and must not reach anything else."""


class UploadFile(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """One file of an upload; in JSON an array.

    Attributes:
        path: where it goes, relative to the output folder.
        bytes: its size.
        mtime_ns: its modification time, which is part of its version in units; 0 where nobody cares.
        sha256: hex digest of its content.
    """

    path: PathText
    bytes: Count
    mtime_ns: Annotated[int, Meta(ge=-(2**62), le=2**62)]
    sha256: Sha256

    @property
    def pieces(self) -> int:
        """Number of pieces; an empty file has none."""
        return -(-self.bytes // PIECE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """What a laptop sends: the files of a planned run, `run.json` last.

    Where the output folder holds a run of the same model already, the units that this one lacks are added to it.

    Attributes:
        run: id of the run that they make, unless they are added to another.
        output: absolute path of the output folder on the writer's machine.
        record: the run's record, as it will be announced.
        files: in the order in which they are sent.
        priority: what the run is to have, or None to leave it as it is; no part of what the upload is.
    """

    run: RunId
    output: PathText
    record: Annotated[str, Meta(max_length=MOST_BYTES)]
    files: tuple[UploadFile, ...]
    priority: Annotated[int, Meta(ge=LEAST_PRIORITY, le=MOST_PRIORITY)] | None = None

    @property
    def name(self) -> str:
        """What the broker knows it by: a hash of what it is."""
        return content_hash([self.run, self.output, [[file.path, file.sha256] for file in self.files]])[:16]

    def to_json(self) -> str:
        """The upload as JSON text."""
        return json.dumps({"v": keys.VERSION, **msgspec.to_builtins(self)})

    @classmethod
    def from_json(cls, text: str | bytes) -> Upload | None:
        """The upload in `text`; None where another version of embq wrote it.

        Raises MalformedError, and InputError where it names a path that no upload may write.
        """
        fields = wire.read_version(text, keys.VERSION, what="upload", most_bytes=MOST_UPLOAD_BYTES)
        if fields is None:
            return None
        upload = wire.convert(cls, fields, what="upload")
        paths = {file.path for file in upload.files}
        folders = {str(above) for path in paths for above in PurePosixPath(path).parents}
        for file in upload.files:
            if not _SAFE.fullmatch(file.path) or {".", ".."} & set(file.path.split("/")) or file.path in folders:
                raise InputError(f"an upload may not write {file.path!r}", code="outside_root")
        if len(paths) != len(upload.files):
            raise InputError("an upload may not write a file twice", code="outside_root")
        return upload


class Pieces:
    """The pieces of an upload by number, in the order of its files.

    Attributes:
        count: number of all pieces.
        starts: the number of the first piece of each file.
    """

    def __init__(self, files: Sequence[UploadFile]) -> None:
        self.starts = list(accumulate((file.pieces for file in files), initial=0))
        self.count = self.starts.pop()
        self._bytes = list(accumulate((file.bytes for file in files), initial=0))

    def place(self, number: int) -> tuple[int, int]:
        """(index of the file, offset in it) of a piece."""
        # Of files that begin with the same piece all but the last are empty.
        index = bisect_right(self.starts, number) - 1
        return index, (number - self.starts[index]) * PIECE_BYTES

    def bytes_before(self, number: int) -> int:
        """Bytes of all pieces before `number`."""
        if number >= self.count:
            return self._bytes[-1]
        index, offset = self.place(number)
        return self._bytes[index] + offset
