"""Writes one shard, complete under its name or not at all, with the bytes that webdataset's ShardWriter writes."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from embq.core.errors import InputError, SampleError
from embq.core.storage.durable import drop, publish
from embq.sources.access.files import source_errors
from embq.sources.decode import compact_json, decode_metadata, parse_object
from embq.training.shards.conversion_plan import ShardPlan
from embq.training.shards.pictures import Listing, Picture

OWNER = "bigdata"
"""User and group of every member, as in webdataset's archives."""

MODE = 0o444

MEMBER_MAX_BYTES = 8 << 30
"""Less than that a header can say in digits."""


class Archive:
    """A tar archive under construction.

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
        """Append the end of the archive; returns its bytes. The file stays open."""
        self._tar.close()
        return self._file.tell()


BUFFER_BYTES = 4 << 20
"""Written at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSettings:
    """Settings that all shards of a conversion share.

    Attributes:
        root: folder that names of pictures are relative to.
        classes: see `Listing`.
        metadata: see `Layout`.
        temporary: folder for shards that are not complete, on the file system of the others.
    """

    root: str
    classes: tuple[str, ...] | None
    metadata: bool
    temporary: Path


def write_shard(slice_: ShardPlan, path: Path, desk: ShardSettings) -> int:
    """Write a shard, durably, replacing an earlier one; returns its bytes.

    Raises InputError where a picture is not as it was planned or cannot be read, OSError where the shard cannot be
    written.
    """
    temporary = desk.temporary / f"{path.name}.{os.getpid()}"
    try:
        with open(temporary, "wb", buffering=BUFFER_BYTES) as file:
            archive = Archive(file)
            for number, picture in enumerate(slice_.pictures, slice_.first):
                archive.add(f"{number:08d}", members(picture, desk))
            size = archive.close()
        publish(temporary, path)
    except BaseException:
        with suppress(OSError):
            drop(temporary)
        raise
    return size


def members(picture: Picture, desk: ShardSettings) -> dict[str, bytes]:
    """Extension -> content of a picture's sample: the picture, and `cls`, `txt` and `json` where there are such.

    Raises InputError where a file is not as it was planned, cannot be read, or is metadata that is no JSON object.
    """
    sides = {one.extension: one.size for one in picture.beside}
    stem = picture.name.rpartition(".")[0]
    made = {picture.extension: _content(desk.root, picture.name, picture.size)}
    if picture.label is not None:
        made["cls"] = str(picture.label).encode()
    if picture.caption is not None:
        made["txt"] = picture.caption.encode()
    elif "txt" in sides:
        made["txt"] = _content(desk.root, f"{stem}.txt", sides["txt"])
    if desk.metadata:
        metadata = picture.metadata or "{}"
        if "json" in sides:
            metadata = _object(_content(desk.root, f"{stem}.json", sides["json"]), f"{stem}.json")
        made["json"] = _account(picture, metadata, desk.classes).encode()
    return made


def shard_settings(listing: Listing, *, metadata: bool, temporary: Path) -> ShardSettings:
    """The settings for the pictures of a listing."""
    return ShardSettings(root=listing.root, classes=listing.classes, metadata=metadata, temporary=temporary)


def _account(picture: Picture, metadata: str, classes: tuple[str, ...] | None) -> str:
    """Metadata of a sample: that of the picture, with its file name and class."""
    fields = parse_object(metadata, "bad_metadata") | {"file": picture.name}
    if picture.label is not None and classes is not None:
        fields["class"] = classes[picture.label]
    try:
        return compact_json(fields, "bad_metadata")
    except SampleError as error:
        raise _unusable(picture.name, error.message, error.code) from error


def _object(data: bytes, name: str) -> str:
    try:
        return decode_metadata(data)
    except SampleError as error:
        raise _unusable(name, error.message, error.code) from error


def _content(root: str, name: str, size: int) -> bytes:
    path = os.path.join(root, name)
    with source_errors(path), open(path, "rb", buffering=0) as file:
        data = file.readall()
    if len(data) != size:
        raise InputError(
            f"{path}: has {len(data):,} bytes, and had {size:,} when the conversion began",
            code="source_changed",
            next_step="wait until it is written, then run the same command again",
        )
    return data


def _unusable(name: str, why: str, code: str) -> InputError:
    return InputError(
        f"{name}: {why}", code=code, next_step="mend it, or run the same command with --check, which leaves such out"
    )
