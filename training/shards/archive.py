"""Samples into a tar archive: the bytes that webdataset's ShardWriter writes.

By the standard library, to which webdataset leaves the archive as well. Whoever imports webdataset imports torch, which
a machine that only holds pictures has no use for; and its form of archive, the one for pipes, cuts each picture into
pieces of 10 kB, which makes a sample dearer by a quarter. A test compares the bytes with those of webdataset.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from typing import BinaryIO

OWNER = "bigdata"
"""User and group of every member, as webdataset has it: not those of whoever converts."""

MODE = 0o444

MEMBER_MAX_BYTES = 8 << 30
"""Less than that a header can say in digits."""


class Archive:
    """A tar archive under way.

    Args:
        file: where it is written to, from here on.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._tar = tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115 - see `close`

    def add(self, key: str, members: Mapping[str, bytes]) -> None:
        """Append a sample: its members next to each other, by extension.

        Args:
            key: ASCII without a dot; with an extension at most 100 bytes.
            members: extension -> content, shorter than `MEMBER_MAX_BYTES`.
        """
        for extension in sorted(members):
            content = members[extension]
            header = tarfile.TarInfo(f"{key}.{extension}")
            header.size = len(content)
            header.mode, header.mtime = MODE, 0
            header.uname = header.gname = OWNER
            self._tar.addfile(header, io.BytesIO(content))

    def close(self) -> int:
        """Append the end of the archive, filled up to a whole record; gives its bytes. The file stays open."""
        self._tar.close()
        return self._file.tell()
