"""Decodes pictures as embq does for embedding, and leaves out those that fail."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from embq.core.errors import InputError, SampleError
from embq.sources.decode import decode_file
from embq.training.shards.pictures import LeftOut, Listing, Picture
from embq.training.shards.processes import each
from embq.training.shards.writing import MEMBER_MAX_BYTES, ShardSettings, members, shard_settings

CHUNK = 256
"""Pictures that a process looks at before it reports."""


def of_a_size(listing: Listing) -> Listing:
    """The listing without empty pictures, and without those too large for a tar archive."""
    unfit = {one.name: problem for one in listing.pictures if (problem := _unfit(one)) is not None}
    pictures = [one for one in listing.pictures if one.name not in unfit] if unfit else listing.pictures
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
    desk = shard_settings(listing, metadata=metadata, temporary=Path())
    found: dict[str, LeftOut] = {}
    left = iter(listing.pictures)
    chunks: Iterator[Sequence[Picture]] = iter(lambda: list(islice(left, CHUNK)), [])
    needed = min(processes, -(-len(listing.pictures) // CHUNK))
    for count, bad in each(partial(_look, desk), chunks, max(1, needed)):
        looked(count)
        found |= {one.name: one for one in bad}
    pictures = [one for one in listing.pictures if one.name not in found]
    bad = [found[one.name] for one in listing.pictures if one.name in found]
    return replace(listing, pictures=pictures, left_out=(*listing.left_out, *bad))


def _look(desk: ShardSettings, pictures: Sequence[Picture]) -> tuple[int, list[LeftOut]]:
    from embq.worker.embedders.image.decoding import quiet_pillow

    quiet_pillow()
    found = (_problem(desk, picture) for picture in pictures)
    return len(pictures), [one for one in found if one is not None]


def _problem(desk: ShardSettings, picture: Picture) -> LeftOut | None:
    try:
        made = members(picture, desk)
        require_decodable(made[picture.extension])
        if "txt" in made and not decode_file(made["txt"]).strip():
            raise SampleError("empty_text", "the caption is empty or white space")
    except InputError as error:
        if error.code == "source_changed":
            raise
        return LeftOut(picture.name, error.code, error.message.removeprefix(os.path.join(desk.root, "")))
    return None


def require_decodable(data: bytes) -> None:
    """SampleError where an image cannot be decoded to its end."""
    from embq.worker.embedders.image.decoding import open_image

    open_image(data, least=1)  # a JPEG at an eighth of its size: every bit is read, few pixels are made
