"""Samples of pictures: checked, and written as a shard that is complete under its name or absent.

A shard has the bytes that webdataset's ShardWriter writes.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from embq.core.errors import InputError, SampleError
from embq.core.storage.durable import publish
from embq.sources.access.files import source_errors
from embq.sources.decode import compact_json, decode_file, decode_metadata, parse_object
from embq.training.shards.conversion_plan import ShardPlan
from embq.training.shards.pictures import LeftOut, Listing, Picture
from embq.training.shards.processes import each

OWNER = "bigdata"
"""User and group of every member, as in webdataset's archives."""

MODE = 0o444

MEMBER_MAX_BYTES = 8 << 30
"""Less than that a header can say in digits."""


BUFFER_BYTES = 4 << 20
"""Written at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSettings:
    """Settings that all shards of a conversion share.

    Attributes:
        root: folder that names of pictures are relative to.
        classes: see `Listing`.
        metadata: see `Layout`.
        temporary: folder for shards that are not complete, on the file system of the others; the caller removes it.
    """

    root: str
    classes: tuple[str, ...] | None
    metadata: bool
    temporary: Path


def write_shard(shard: ShardPlan, path: Path, settings: ShardSettings) -> None:
    """Write a shard, durably, replacing an earlier one.

    Each sample's members lie next to each other, by extension.

    Raises InputError if a picture is not as it was planned or cannot be read, OSError if the shard cannot be written.
    """
    temporary = settings.temporary / f"{path.name}.{os.getpid()}"
    with (
        open(temporary, "wb", buffering=BUFFER_BYTES) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for number, picture in enumerate(shard.pictures, shard.first):
            for extension, content in sorted(members(picture, settings).items()):
                header = tarfile.TarInfo(f"{number:08d}.{extension}")
                header.size, header.mode, header.mtime = len(content), MODE, 0
                header.uname = header.gname = OWNER
                archive.addfile(header, io.BytesIO(content))
    publish(temporary, path)


def members(picture: Picture, settings: ShardSettings) -> dict[str, bytes]:
    """Extension -> content of a picture's sample: the picture, and `cls`, `txt` and `json` if it has them.

    Raises InputError if a file is not as it was planned, cannot be read, or is metadata that is no JSON object.
    """
    sides = {side.extension: side.size for side in picture.beside}
    stem = picture.name.rpartition(".")[0]
    content = {picture.extension: _content(settings.root, picture.name, picture.size)}
    if picture.label is not None:
        content["cls"] = str(picture.label).encode()
    if picture.caption is not None:
        content["txt"] = picture.caption.encode()
    elif "txt" in sides:
        content["txt"] = _content(settings.root, f"{stem}.txt", sides["txt"])
    if settings.metadata:
        metadata = picture.metadata or "{}"
        if "json" in sides:
            metadata = _object(_content(settings.root, f"{stem}.json", sides["json"]), f"{stem}.json")
        content["json"] = _account(picture, metadata, settings.classes).encode()
    return content


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


CHUNK = 256
"""Pictures that a process looks at before it reports."""


def of_a_size(listing: Listing) -> Listing:
    """The listing without empty pictures, and without those too large for a tar archive."""
    unfit = {picture.name: problem for picture in listing.pictures if (problem := _unfit(picture)) is not None}
    pictures = [picture for picture in listing.pictures if picture.name not in unfit] if unfit else listing.pictures
    return replace(listing, pictures=pictures, left_out=(*listing.left_out, *unfit.values()))


def _unfit(picture: Picture) -> LeftOut | None:
    if not picture.size:
        return LeftOut(picture.name, "unidentified", "the file is empty")
    if picture.size >= MEMBER_MAX_BYTES:
        return LeftOut(picture.name, "too_large", f"{picture.size:,} bytes are more than a tar archive takes")
    return None


def checked(listing: Listing, *, metadata: bool, processes: int, looked: Callable[[int], None]) -> Listing:
    """The listing without pictures that cannot be decoded, or whose caption or metadata cannot be read.

    Args:
        metadata: see `Layout`.
        processes: that look at once.
        looked: called with the number of pictures that were looked at.
    """
    settings = shard_settings(listing, metadata=metadata, temporary=Path())
    unusable: dict[str, LeftOut] = {}
    remaining = iter(listing.pictures)
    chunks: Iterator[Sequence[Picture]] = iter(lambda: list(islice(remaining, CHUNK)), [])
    needed = min(processes, -(-len(listing.pictures) // CHUNK))
    for count, bad in each(partial(_check, settings), chunks, max(1, needed)):
        looked(count)
        unusable |= {picture.name: picture for picture in bad}
    pictures = [picture for picture in listing.pictures if picture.name not in unusable]
    bad = [unusable[picture.name] for picture in listing.pictures if picture.name in unusable]
    return replace(listing, pictures=pictures, left_out=(*listing.left_out, *bad))


def _check(settings: ShardSettings, pictures: Sequence[Picture]) -> tuple[int, list[LeftOut]]:
    from embq.worker.embedders.image.decoding import quiet_pillow

    quiet_pillow()
    return len(pictures), [bad for picture in pictures if (bad := _problem(settings, picture)) is not None]


def _problem(settings: ShardSettings, picture: Picture) -> LeftOut | None:
    try:
        content = members(picture, settings)
        require_decodable(content[picture.extension])
        if "txt" in content and not decode_file(content["txt"]).strip():
            raise SampleError("empty_text", "the caption is empty or white space")
    except InputError as error:
        if error.code == "source_changed":
            raise
        return LeftOut(picture.name, error.code, error.message.removeprefix(os.path.join(settings.root, "")))
    return None


def require_decodable(data: bytes) -> None:
    """SampleError if an image cannot be decoded to its end."""
    from embq.worker.embedders.image.decoding import open_image

    open_image(data, least=1)  # a JPEG at an eighth of its size: every bit is read, few pixels are made
