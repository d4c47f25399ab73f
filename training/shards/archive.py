"""Samples into a tar archive: the bytes that webdataset's TarWriter writes, at the speed of a copy.

webdataset leaves the archive to `tarfile` in a form for pipes, which cuts each picture into pieces of 10 kB and makes
each header twice: half of the time of a conversion. And whoever imports webdataset imports torch. A test compares the
bytes with those of webdataset's ShardWriter.
"""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from typing import BinaryIO

from sources.tar_members import BLOCK

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
        self._bytes = 0

    def add(self, key: str, members: Mapping[str, bytes]) -> None:
        """Append a sample: its members next to each other, by extension.

        Args:
            key: ASCII without a dot; with an extension at most 100 bytes.
            members: extension -> content, shorter than `MEMBER_MAX_BYTES`.
        """
        for extension in sorted(members):
            content = members[extension]
            self._write(_header(f"{key}.{extension}", len(content)))
            self._write(content)
            self._write(bytes(-len(content) % BLOCK))

    def close(self) -> int:
        """Append the end of the archive, filled up to a whole record; gives its bytes. The file stays open."""
        self._write(bytes(2 * BLOCK))
        self._write(bytes(-self._bytes % tarfile.RECORDSIZE))
        return self._bytes

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._bytes += len(data)


def _template() -> bytes:
    info = tarfile.TarInfo()
    info.mode, info.mtime = MODE, 0
    info.uname = info.gname = OWNER
    return info.tobuf(tarfile.USTAR_FORMAT)


_TEMPLATE = _template()
"""A header but for name, size and checksum, which stand at bytes 0, 124 and 148 (POSIX.1-1988, ustar)."""


def _header(name: str, size: int) -> bytes:
    header = bytearray(_TEMPLATE)
    stored = name.encode("ascii")
    header[: len(stored)] = stored
    header[124:136] = b"%011o\0" % size
    header[148:156] = 8 * b" "
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)
