"""The kinds of input by name, how a path tells its kind, and the worker's gate to them."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from sys import getsizeof

from core.errors import InputError, SourceError
from core.process.limits import unit_bytes
from core.units import Sample, Unit
from sources import compressed, inspection
from sources.arrow import ARROW
from sources.arrow import SUFFIXES as ARROW_SUFFIXES
from sources.base import Described, Inspected, Moved, ReadOptions, Source, unwatched
from sources.delimited import DelimitedSource
from sources.files import FilesSource
from sources.folder_walk import is_image, shown, walk_images
from sources.hdf5 import SUFFIXES as HDF5_SUFFIXES
from sources.hdf5 import Hdf5Source
from sources.inspection import DIED, GUARDED
from sources.parquet import PARQUET
from sources.parquet import SUFFIXES as PARQUET_SUFFIXES
from sources.rows import within
from sources.saved_datasets import saved_files
from sources.storage import is_folder, join, list_names
from sources.tar import COMPRESSED_SUFFIXES, TarSource
from sources.texts import JsonLinesSource, LinesSource
from sources.urls import check_url, is_url, path_of
from sources.urls import is_inside as is_inside_url
from sources.wanted import read_wanted

SOURCES: dict[str, Source] = {
    source.kind: source
    for source in (
        TarSource(),
        FilesSource(),
        PARQUET,
        ARROW,
        Hdf5Source(),
        DelimitedSource(),
        JsonLinesSource(),
        LinesSource(),
    )
}

SUPPORTED = (
    "a folder of images, .tar shards, .parquet, .arrow, .h5, .csv, .tsv or .jsonl files, "
    ".txt files with one text per line, a folder of such files"
)
"""What a user may name as input, for messages."""

_TEXT_SUFFIXES = {".csv": "csv", ".tsv": "csv", ".tab": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "lines"}
"""Of files that may be compressed."""

_SUFFIXES = {
    ".tar": "tar",
    **dict.fromkeys(PARQUET_SUFFIXES, "parquet"),
    **dict.fromkeys(ARROW_SUFFIXES, "arrow"),
    **dict.fromkeys(HDF5_SUFFIXES, "hdf5"),
    **_TEXT_SUFFIXES,
}

_TABLES = ("parquet", "arrow", "hdf5")


def source_for(kind: str) -> Source:
    """The source that reads units of `kind`; SourceError `unknown_kind` where there is none."""
    try:
        return SOURCES[kind]
    except KeyError:
        raise SourceError(
            f"no source reads units of kind {kind!r}",
            code="unknown_kind",
            next_step=f"known kinds: {', '.join(SOURCES)}; is this worker older than the run?",
        ) from None


def kind_of(path: str) -> str | None:
    """The kind that a file's name tells, or None. A compressed shard is of kind "tar", which then refuses it."""
    name = (path_of(path) if is_url(path) else path).lower()
    if name.endswith(COMPRESSED_SUFFIXES):
        return "tar"
    stem, suffix = os.path.splitext(name)
    if suffix in compressed.SUFFIXES:
        return _TEXT_SUFFIXES.get(os.path.splitext(stem)[1])
    return _SUFFIXES.get(suffix)


def modalities_of(kind: str, path: str, options: ReadOptions) -> tuple[str, ...]:
    """What the samples of one input can have; raises as `Inspected.holds` does."""
    source = SOURCES[kind]
    return source.holds(path, options) if isinstance(source, Inspected) else source.modalities


def may_have_metadata(unit: Unit) -> bool:
    """Whether a look at a unit may tell what metadata its samples have."""
    source = SOURCES.get(unit.kind)
    return isinstance(source, Described) and DIED not in dict(unit.options) and source.may_have_metadata(unit)


def detect(path: str, wanted: str = "", image_keys: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """(kind, path) of each input that `path` stands for: itself, or what its folder holds.

    A folder stands for its .tar shards, else for the images in it and below it, else for its tables or its text files;
    as in a shell, hidden files are left out. A folder that the `datasets` library saved stands for its Arrow files.
    `wanted` is the only kind to look for; a file is then of this kind, whatever its name. `image_keys` are the
    extensions of images; () takes all known.

    Raises InputError where the folder holds shards and loose images, or tables and texts, or nothing to embed, or where
    a file's name tells no kind.
    """
    kind = wanted or kind_of(path)
    if not is_folder(path):
        if kind is None:
            raise InputError(
                f"{path}: a file of this name is no input"
                + (": images are read by the folder" if is_image(path) else ""),
                next_step=f"name {SUPPORTED}",
            )
        return [(kind, path)]
    if wanted == "files":
        return [("files", path)]
    names = list_names(path)
    if wanted in ("", "arrow") and (saved := saved_files(path, names)) is not None:
        return [("arrow", name) for name in saved]
    inside = [(kind_of(name), join(path, name)) for name in names if not name.startswith(".")]
    if wanted:
        return _of_kind(path, wanted, inside)
    shards = [(kind, name) for kind, name in inside if kind == "tar"]
    others: Counter[str] = Counter()
    image = next((relative for relative, _ in walk_images(path, others, image_keys)), None)
    if shards and image:
        raise InputError(
            f"{path}: holds {len(shards)} tar shards and loose images such as {image}",
            next_step=f"name what you mean: '{path}/*.tar' for the shards, or the folder of the images",
        )
    if shards:
        return shards
    if image:
        return [("files", path)]
    return _tables_or_texts(path, inside, others)


def _of_kind(path: str, wanted: str, inside: Sequence[tuple[str | None, str]]) -> list[tuple[str, str]]:
    found = [(kind, name) for kind, name in inside if kind == wanted]
    if not found:
        raise InputError(f"{path}: no file of kind {wanted!r} in this folder", code="empty_input")
    return found


def _tables_or_texts(
    path: str, inside: Sequence[tuple[str | None, str]], others: Counter[str]
) -> list[tuple[str, str]]:
    """The files of a folder without images and shards; `others` counts what is there, for a message."""
    found = [(kind, name) for kind, name in inside if kind is not None]
    tables = [name for kind, name in found if kind in _TABLES]
    if tables and len(tables) < len(found):
        text = next(name for kind, name in found if kind not in _TABLES)
        raise InputError(
            f"{path}: holds tables such as {os.path.basename(tables[0])} and texts such as {os.path.basename(text)}",
            next_step=f"name what you mean, for example '{path}/*{os.path.splitext(tables[0])[1]}'",
        )
    if not found:
        raise InputError(
            f"{path}: nothing to embed in this folder; found: {shown(others)}",
            code="empty_input",
            next_step=f"name {SUPPORTED}; --image-key names other extensions; for files in subfolders a pattern "
            f"such as '{path}/**/*.tar'",
        )
    return found


def check_source(source: str) -> None:
    """Raise SourceError `shard_scheme_denied` for a command, or a URL of a scheme that is not read."""
    if source.startswith("pipe:"):
        raise SourceError(
            f"{source!r}: commands are not run",
            code="shard_scheme_denied",
            next_step="name the file itself: instead of pipe:aws s3 cp s3://BUCKET/KEY - write s3://BUCKET/KEY",
        )
    if is_url(source):
        check_url(source)


def fetchable(unit: Unit, roots: Sequence[str]) -> bool:
    """Whether the unit is one whole file behind a URL that may be read, so that it can be fetched before its turn.

    Args:
        roots: as for `read`.
    """
    try:
        check_source(unit.source)
        return unit.kind == TarSource.kind and is_url(unit.source) and _is_allowed(unit.source, roots)
    except SourceError:  # reading it says why
        return False


def is_here(unit: Unit, roots: Sequence[str]) -> bool:
    """Whether this machine has what a unit names: its path is there, or it is a URL, and it may be read.

    Nothing is read, and of a folder the first file stands for all. What is no path at all is here: reading it says why.

    Args:
        roots: as for `read`.
    """
    try:
        check_source(unit.source)
        if not _is_allowed(unit.source, roots):
            return False
    except SourceError:
        return True
    if is_url(unit.source):
        return True
    first = unit.items[0][0] if unit.kind == FilesSource.kind and unit.items else ""
    return os.path.exists(os.path.join(unit.source, first) if first else unit.source)


def read(unit: Unit, roots: Sequence[str], *, moved: Moved = unwatched) -> Iterator[Sample]:
    """The samples of a unit that came over the network, as its `Source.read` gives them; of a retry, those that it
    does again, with the ordinals that they have in the unit that was planned first.

    Args:
        unit: what to read.
        roots: the folders and URLs that units may lie in, links resolved; empty allows all.
        moved: called whenever bytes have come in.

    Tables are read in a process of their own, under a limit of memory: see `sources.inspection`.

    Raises SourceError `shard_scheme_denied`, `source_denied` or `unknown_kind` at once, later what the source does, and
    `too_large` where the texts of the unit are more than a unit may have.
    """
    check_source(unit.source)
    if not _is_allowed(unit.source, roots):
        raise SourceError(
            f"{unit.source}: outside of what the worker on {socket.gethostname()} may read ({', '.join(roots)})",
            code="source_denied",
            next_step="start that worker with the input's folder in EMBQ_ROOTS, or move the input; then embq retry",
        )
    source_for(unit.kind)
    samples = inspection.read(unit, roots, moved) if unit.kind in GUARDED else read_here(unit, roots, moved=moved)
    return _bounded(unit, samples)


def read_here(unit: Unit, roots: Sequence[str], *, moved: Moved = unwatched) -> Iterator[Sample]:
    """What `read` gives, read in this process whatever the kind; nothing is checked before."""
    return read_wanted(source_for(unit.kind), within(unit, roots) if roots else unit, moved)


def _bounded(unit: Unit, samples: Iterator[Sample]) -> Iterator[Sample]:
    """The samples; SourceError `too_large` where their texts together are more than `unit_bytes`."""
    left = most = unit_bytes()
    try:
        for sample in samples:
            left -= getsizeof(sample.text) + getsizeof(sample.metadata)
            if left < 0:
                raise SourceError(
                    f"{unit.source}: texts and metadata of one unit take more than {most:,} bytes",
                    code="too_large",
                    next_step="plan it with a smaller --unit-size, or give the worker more memory",
                )
            yield sample
    finally:
        if isinstance(samples, Generator):  # a reader process that is left halfway ends now
            samples.close()


def _is_allowed(source: str, roots: Sequence[str]) -> bool:
    if is_url(source):
        return not roots or any(is_inside_url(source, root) for root in roots)
    try:
        os.fsencode(source)
        real = os.path.realpath(source)
    except ValueError as error:  # a zero byte, or a character that no file name can have
        raise SourceError(f"{source!r}: not a path", code="source_missing") from error
    return not roots or any(_is_inside(real, os.path.realpath(root)) for root in roots if not is_url(root))


def _is_inside(path: str, root: str) -> bool:
    return os.path.commonpath([path, root]) == root
