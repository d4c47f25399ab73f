"""Tar archives in memory, and what the strict reader makes of them."""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from embq.core.errors import SourceError
from embq.sources.formats.tar_headers import BLOCK, TarMember, parse_members

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

__all__ = ["members_of", "outcome_of", "tar_of", "zstd"]


def tar_of(
    members: Sequence[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT, *, pad: bool = False, **fields: object
) -> bytes:
    """An archive of regular members, ending in exactly two zero blocks unless `pad`."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=form, encoding="utf-8") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(content))
        end = tar.offset
    data = sink.getvalue()
    return data if pad else data[: end + 2 * BLOCK]


def members_of(path: Path) -> list[tuple[str, bytes]]:
    """Name and content of every regular member, by Python's own reader."""
    with tarfile.open(path) as tar:
        return [(info.name, file.read()) for info in tar if (file := tar.extractfile(info)) is not None]


def outcome_of(data: bytes) -> list[TarMember] | str:
    """The members, or the code of the error."""
    try:
        return parse_members(data, "s.tar")
    except SourceError as error:
        return error.code
