"""The samples of image files: each with the caption and the metadata that stand beside it, here or behind URLs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from core.errors import SampleError, SourceError
from core.units import Sample, Unit
from sources.base import Moved
from sources.extensions import Extensions, extensions_of
from sources.fields import decode_file, decode_metadata
from sources.inside import read_if_there, read_inside
from sources.remote import fetch_all
from sources.storage import SAMPLE_MAX_BYTES, join


def local_sample(root: str, ordinal: int, relative: str, size: int, wanted: Extensions, moved: Moved) -> Sample:
    """The sample of the image `relative`, of `size` bytes when it was planned, in a folder of this machine.

    Args:
        root: the folder, links resolved.
    """
    stem = wanted.stem(relative)
    return _sample(
        ordinal,
        relative,
        wanted,
        lambda: read_inside(root, relative, size, moved),
        lambda extension: read_if_there(root, stem + extension, moved),
    )


def remote_samples(unit: Unit, moved: Moved) -> Iterator[Sample]:
    """One sample per planned file, fetched several at a time. Storage that is away fails the unit."""
    beside = dict(unit.options).get("beside", "")
    wanted = extensions_of(unit.options)
    extensions = ["", *(extension for extension in wanted.beside if extension in beside.split(","))]
    urls, sizes = [], []
    for relative, size in unit.items:
        for extension in extensions:
            name = wanted.stem(relative) + extension if extension else relative
            urls.append(join(unit.source, name))
            sizes.append(None if extension else size)
    contents = fetch_all(urls, sizes, moved)
    for ordinal, (relative, size) in enumerate(unit.items):
        found = {extension: next(contents) for extension in extensions}
        image = partial(_usable, found[""], join(unit.source, relative), size)
        yield _sample(ordinal, relative, wanted, image, partial(_beside, found))


def _beside(found: Mapping[str, bytes | SourceError], extension: str) -> bytes | None:
    return optional(found.get(extension))


def _sample(
    ordinal: int,
    relative: str,
    wanted: Extensions,
    image_of: Callable[[], bytes],
    beside: Callable[[str], bytes | None],
) -> Sample:
    """The sample of an image, or why it has none.

    Args:
        beside: what the file holds that stands beside the image with this extension, None where there is none.
    """
    image = text = metadata = error = None
    try:
        image = image_of()
        for extension in wanted.texts:
            if (data := beside(f".{extension}")) is not None:
                text = decode_file(data)
                break
        if (data := beside(".json")) is not None:
            metadata = decode_metadata(data)
    except SampleError as problem:
        error = (problem.code, problem.message)
    return Sample(ordinal=ordinal, key=relative, image=image, text=text, metadata=metadata, error=error)


def _usable(found: bytes | SourceError, url: str, size: int) -> bytes:
    """The image, or why this one has no row; a SourceError that concerns the storage as a whole is raised again."""
    if size > SAMPLE_MAX_BYTES:
        raise SampleError("too_large", f"{url} has {size} bytes, more than {SAMPLE_MAX_BYTES}")
    if isinstance(found, bytes):
        if len(found) != size:
            raise SampleError("source_changed", f"{url} had {size} bytes when planned, now {len(found)}")
        return found
    if found.transient:
        raise found
    raise SampleError(found.code, found.message) from found


def optional(found: bytes | SourceError | None) -> bytes | None:
    """The content of a file beside an image, None where there is none; raises as `_usable` does."""
    if isinstance(found, SourceError):
        if found.code == "source_missing":
            return None
        raise found if found.transient else SampleError(found.code, found.message)
    return found
