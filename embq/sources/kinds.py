"""Kinds of input by name, and the kind of a path."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from embq.core import plugins
from embq.core.errors import ConfigError, InputError, SourceError
from embq.core.plugins import Plugin
from embq.core.storage.paths import is_url
from embq.core.units import Unit
from embq.sources.access.files import is_folder, join, list_names
from embq.sources.access.urls import path_of
from embq.sources.extensions import ALL
from embq.sources.formats import compressed
from embq.sources.formats.arrow import ARROW, saved_files
from embq.sources.formats.arrow import SUFFIXES as ARROW_SUFFIXES
from embq.sources.formats.delimited import DelimitedSource
from embq.sources.formats.hdf5 import SUFFIXES as HDF5_SUFFIXES
from embq.sources.formats.hdf5 import Hdf5Source
from embq.sources.formats.image_folder import FilesSource, shown, walk_with
from embq.sources.formats.lines import JsonLinesSource, LinesSource
from embq.sources.formats.parquet import PARQUET
from embq.sources.formats.parquet import SUFFIXES as PARQUET_SUFFIXES
from embq.sources.formats.tar import COMPRESSED_SUFFIXES, TarSource
from embq.sources.interface import Source
from embq.sources.maps import OPTION as MAP
from embq.sources.reader_options import ReadOptions

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
"""The kinds of input, for messages."""

_TEXT_SUFFIXES = {".csv": "csv", ".tsv": "csv", ".tab": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "lines"}
"""Extensions of files that may be compressed -> kind."""

_SUFFIXES = {
    ".tar": "tar",
    **dict.fromkeys(PARQUET_SUFFIXES, "parquet"),
    **dict.fromkeys(ARROW_SUFFIXES, "arrow"),
    **dict.fromkeys(HDF5_SUFFIXES, "hdf5"),
    **_TEXT_SUFFIXES,
}

GUARDED = ("parquet", "arrow", "hdf5")
"""Kinds whose parsers can crash or exhaust memory: they run in a reader process."""


def source_for(kind: str) -> Source:
    """The source that reads units of `kind`; SourceError `unknown_kind` where there is none."""
    if kind in SOURCES:
        return SOURCES[kind]
    try:
        if (plugin := plugins.enabled(plugins.SOURCES).get(kind)) is not None:
            return _of_plugin(plugin)
    except ConfigError as error:
        raise SourceError(error.message, code="unknown_kind", next_step=error.next_step) from error
    raise SourceError(
        f"no source reads units of kind {kind!r}",
        code="unknown_kind",
        next_step=plugins.how_to_enable(plugins.SOURCES, kind)
        or f"known kinds: {', '.join(SOURCES)}; is this worker older than the run?",
    )


@cache
def _of_plugin(plugin: Plugin) -> Source:
    source: Source = plugin.load()()
    if source.kind != plugin.name:
        raise ConfigError(
            f"{plugin}: the source calls its kind {source.kind!r}",
            next_step="give the entry point and `kind` the same name",
        )
    return source


def is_guarded(kind: str) -> bool:
    """True where units are read in a reader process: kinds of plug-ins are."""
    return kind in GUARDED or kind not in SOURCES


def split(kind: str, path: str, options: ReadOptions) -> Iterator[Unit]:
    """The units of one input, with the run's map; raises as `Source.split` does."""
    units = source_for(kind).split(path, options)
    return (with_map(unit, options) for unit in units) if options.map else units


def with_map(unit: Unit, options: ReadOptions) -> Unit:
    """The unit with the run's map."""
    if not options.map:
        return unit
    return replace(unit, options=tuple(sorted((*unit.options, (MAP, options.map)))))


def kind_of(path: str) -> str | None:
    """The kind of a file by its name, or None."""
    name = (path_of(path) if is_url(path) else path).lower()
    if name.endswith(COMPRESSED_SUFFIXES):
        return "tar"
    stem, suffix = os.path.splitext(name)
    if suffix in compressed.SUFFIXES:
        return _TEXT_SUFFIXES.get(os.path.splitext(stem)[1])
    return _SUFFIXES.get(suffix) or _kind_of_plugin(name)


def _kind_of_plugin(name: str) -> str | None:
    for kind, plugin in plugins.enabled(plugins.SOURCES).items():
        if name.endswith(tuple(_of_plugin(plugin).suffixes)):
            return kind
    return None


def detect(path: str, wanted: str = "", image_keys: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """(kind, path) of each input that `path` stands for: the file itself, or the inputs in the folder.

    A folder stands for its .tar shards, else for the images in it and below it, else for its tables or its text files;
    as in a shell, hidden files are left out. A folder that the `datasets` library saved stands for its Arrow files.
    `wanted` is the only kind to look for; a file is then of this kind, whatever its name. `image_keys` are the
    extensions of images; () takes all known.

    Raises InputError where the folder holds shards and loose images, or tables and texts, or nothing to embed, or where
    a file's name tells no kind.
    """
    kind = wanted or kind_of(path)
    if kind == "tar" and not wanted:  # planning looks at each of very many shards once
        return [(kind, path)]
    if not is_folder(path):
        if kind is None:
            raise InputError(
                f"{path}: a file of this name is no input"
                + (": images are read by the folder" if ALL.is_image(path) else ""),
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
    image = next((relative for relative, _ in walk_with(image_keys, path, others)), None)
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
    """The inputs in a folder without images and shards; `others` counts its files, for a message."""
    found = [(kind, name) for kind, name in inside if kind is not None]
    tables = [name for kind, name in found if is_guarded(kind)]
    if tables and len(tables) < len(found):
        text = next(name for kind, name in found if not is_guarded(kind))
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
