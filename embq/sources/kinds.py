"""Kinds of input by name, and the kind of a path."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

from embq.core import plugins
from embq.core.errors import ConfigError, InputError, SourceError
from embq.core.plugins import Plugin
from embq.core.run.layout import MARKS
from embq.core.storage.paths import is_url
from embq.core.units import Unit
from embq.sources.access.files import NOT_STREAMED, is_folder, join, list_names, with_name
from embq.sources.access.urls import path_of
from embq.sources.extensions import ALL, Extensions
from embq.sources.formats import compressed
from embq.sources.formats.arrow import ARROW, saved_files
from embq.sources.formats.arrow import SUFFIXES as ARROW_SUFFIXES
from embq.sources.formats.delimited import DelimitedSource
from embq.sources.formats.image_folder import FilesSource, images_of, shown, walk
from embq.sources.formats.lines import JsonLinesSource, LinesSource
from embq.sources.formats.metadata_files import METADATA_FILES, unmatched
from embq.sources.formats.parquet import PARQUET
from embq.sources.formats.parquet import SUFFIXES as PARQUET_SUFFIXES
from embq.sources.formats.tar import COMPRESSED_SUFFIXES, TarSource
from embq.sources.interface import Source
from embq.sources.maps import OPTION as MAP
from embq.sources.partitions import with_partition, without_partition
from embq.sources.reader_options import ROWS, ReadOptions, format_of

SOURCES: dict[str, Source] = {
    source.kind: source
    for source in (
        TarSource(),
        FilesSource(),
        PARQUET,
        ARROW,
        DelimitedSource(),
        JsonLinesSource(),
        LinesSource(),
    )
}

SUPPORTED = (
    "a folder of images, .tar shards, .parquet, .arrow, .csv, .tsv or .jsonl files, "
    ".txt files with one text per line, a folder of such files"
)
"""The kinds of input, for messages."""

_TEXT_SUFFIXES = {".csv": "csv", ".tsv": "csv", ".tab": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "lines"}
"""Extensions of files that may be compressed -> kind."""

_SUFFIXES = {
    ".tar": "tar",
    **dict.fromkeys(PARQUET_SUFFIXES, "parquet"),
    **dict.fromkeys(ARROW_SUFFIXES, "arrow"),
    **_TEXT_SUFFIXES,
}

GUARDED = ("parquet", "arrow")
"""Kinds whose parsers can crash or exhaust memory: they run in a reader process."""

HDF5_SUFFIXES = (".h5", ".hdf5")
"""Extensions of files that the example of a plug-in reads, for messages."""

MAX_OTHERS = 20
"""Files of no kind for each text or table of a folder: more are a repository or a home, not a data set."""

NAMED = (*ROWS, "lines")
"""Kinds whose keys have the name of the file, where rows have no id."""


def source_for(kind: str) -> Source:
    """The source that reads units of `kind`; SourceError `unknown_kind` if there is none."""
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
    """True if units are read in a reader process: kinds of plug-ins are."""
    return kind in GUARDED or kind not in SOURCES


def split(kind: str, path: str, options: ReadOptions, name: str = "") -> Iterator[Unit]:
    """The units of one input, with what every kind carries; raises as `Source.split` does.

    Args:
        name: of a file in its keys, see `FILE_NAME`; "" for its own.
    """
    units = source_for(kind).split(path, without_partition(options, path))
    return (carrying(unit, options, name) for unit in units)


def carrying(unit: Unit, options: ReadOptions, name: str = "") -> Unit:
    """The unit with the columns of its folders, the run's map, and the name of its file."""
    unit = with_partition(unit, options)
    if name and unit.kind in NAMED:
        unit = with_name(unit, name)
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


def _plugin_for(suffixes: Iterable[str]) -> str:
    """The next step for files that a plug-in reads; "" if none is of its extensions."""
    if set(suffixes).isdisjoint(HDF5_SUFFIXES):
        return ""
    return plugins.how_to_enable(plugins.SOURCES, "hdf5") or (
        "HDF5 files are read by a plug-in: docs/how-to/contribute/plug-ins.md shows one and how it is enabled; "
        "or write their texts as .jsonl or .parquet"
    )


class Listing:
    """Numbers of files, or of images in folders, that are taken, by kind, and that are left, by extension or reason.

    Attributes:
        header: the names in the first line of the first .csv, for people.
        warnings: one line each, about what is taken.
    """

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.taken: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.header = ""

    def __str__(self) -> str:
        """One line, for people; "" for one file alone that has no header."""
        if not self.left_out and self.taken.total() == 1:
            return self.header
        taken = ", ".join(f"{format_of(kind)} ({count:,})" for kind, count in self.taken.items())
        header = f"; {self.header}" if self.header else ""
        return f"taken: {taken or 'nothing'}; left out: {shown(self.left_out)}{header}"


def detect(
    path: str, only_kind: str = "", image_keys: tuple[str, ...] = (), listing: Listing | None = None
) -> list[tuple[str, str]]:
    """(kind, path) of each input that `path` stands for: the file itself, or the inputs in the folder and below it.

    A folder stands for its files of one kind: shards, images, or one kind of tables or texts. A folder that the
    `datasets` library saved stands for its Arrow files, the output folder of a run for its rows.

    Args:
        only_kind: the only kind to look for; a file is then of this kind, whatever its name. "" takes the only one.
        image_keys: extensions of images; () takes all known.
        listing: counts the images of a folder, and what is left out.

    Raises InputError if the folder holds files of several kinds, or nothing to embed, or where a file's name tells
    no kind.
    """
    kind = only_kind or kind_of(path)
    if kind == "tar" and not only_kind:  # planning looks at each of very many shards once
        return [(kind, path)]
    if not is_folder(path):
        if kind is None:
            is_stream = not is_url(path) and not os.path.isfile(path)
            raise InputError(
                f"{path}: {'it is no file' if is_stream else 'a file of this name is no input'}"
                + (": images are read by the folder" if ALL.is_image(path) else ""),
                next_step=f"{NOT_STREAMED}; then name {SUPPORTED}"
                if is_stream
                else _plugin_for([os.path.splitext(path.lower())[1]])
                or f"tell its kind with --input-format if its name does not, or name {SUPPORTED}",
            )
        return [(kind, path)]
    names = list_names(path)
    if MARKS.issubset(names):
        path = join(path, "parts" if "parts" in names else "metadata")  # of a run in npy
        names = list_names(path)
    listing = listing or Listing()
    if only_kind in ("", "arrow") and (saved := saved_files(path, names)) is not None:
        return [("arrow", name) for name in saved]
    by_kind = _files_below(path, only_kind, image_keys, listing)
    if not by_kind:
        what = f"no file of kind {format_of(only_kind)!r}" if only_kind else "nothing to embed"
        raise InputError(
            f"{path}: {what} in this folder or below it; found: {shown(listing.left_out)}",
            code="empty_input",
            next_step=_plugin_for(listing.left_out) or f"name {SUPPORTED}; --image-key names other extensions",
        )
    if len(by_kind) > 1:
        kinds = [f"{format_of(kind)} ({files[0]})" for kind, files in by_kind.items()]
        raise InputError(
            f"{path}: holds inputs of several kinds: {', '.join(kinds)}",
            next_step=f"choose one: --input-format {' or '.join(map(format_of, by_kind))}",
        )
    ((kind, files),) = by_kind.items()
    if kind == "files":
        return [(kind, path)]
    return [(kind, join(path, name)) for name in files]


def _files_below(path: str, only_kind: str, image_keys: tuple[str, ...], listing: Listing) -> dict[str, list[str]]:
    """Relative paths of the files of a folder and below it, sorted, by kind; of images the first alone. What is read
    beside images, or is no input, is left out."""
    extensions = Extensions(images=image_keys) if image_keys else ALL
    images: Counter[str] = Counter()  # by the folders that hold them
    near: dict[str, int] = {}  # what has a name but for its extension: 1 an image, 2 a text; of names in a row
    texts = captions = 0
    by_kind: dict[str, list[str]] = {}
    unknown: Counter[str] = Counter()  # what is no input, by extension
    for relative, _ in walk(path, listing.left_out, sizes=False):
        folder = os.path.dirname(relative)
        near = {stem: mask for stem, mask in near.items() if relative.startswith(f"{stem}.")}
        of_writer = "/_" in f"/{folder}"  # of Spark and Delta Lake: the state of a writer
        is_image = extensions.is_image(relative)
        if is_image or (relative[-4:].lower() == ".txt" and (folder in images or not of_writer)):
            stem = extensions.stem(relative) if is_image else relative[:-4]
            bits = near.get(stem, 0)
            near[stem] = bits | (1 if is_image else 2)
            captions += near[stem] == 3 > bits
        if is_image:
            images[folder] += 1
            by_kind.setdefault("files", [relative])
        elif (kind := kind_of(relative)) == "lines" and folder in images and only_kind in ("", "files"):
            texts += 1  # the paths of many millions of captions are not kept
        elif kind is None:
            unknown[os.path.splitext(relative)[1].lower() or "no extension"] += 1
        elif of_writer:
            listing.left_out["in a folder whose name begins with _"] += 1
        else:
            by_kind.setdefault(kind, []).append(relative)
    listing.left_out.update(unknown)
    if images and only_kind in ("", "files"):
        if lone := texts + len(by_kind.pop("lines", ())) - captions:
            listing.left_out["texts beside no image"] += lone
        described: set[str] = set()
        for kind in ("csv", "jsonl", "parquet") if not is_url(path) else ():
            files = by_kind.pop(kind, [])
            described.update(name for name in files if os.path.basename(name) in METADATA_FILES)
            if files := [name for name in files if name not in described]:
                by_kind[kind] = files
        if described:
            pairs = images_of(walk(path, Counter(), sizes=False), Counter(), extensions)
            listing.warnings += unmatched(path, described, (name for name, _ in pairs))
        listing.taken["files"] += images.total()
    for kind in by_kind.keys() - {only_kind} if only_kind else ():
        files = by_kind.pop(kind)
        listing.left_out[f"of kind {format_of(kind)}"] += images.total() if kind == "files" else len(files)
    named = images.keys() | {os.path.splitext(name)[0] for name in by_kind.get("tar", ())}
    saved = {os.path.dirname(name) for name in by_kind.get("arrow", ()) if "/cache-" not in f"/{name}"}
    # img2dataset writes a table beside each shard, or folder of images, and of its name.
    records = [name for name in by_kind.get("parquet", ()) if not only_kind and os.path.splitext(name)[0] in named]
    caches = [name for name in by_kind.get("arrow", ()) if "/cache-" in f"/{name}" and os.path.dirname(name) in saved]
    for reason, kind, names in ("records of img2dataset", "parquet", records), ("cache of datasets", "arrow", caches):
        if names:
            listing.left_out[reason] += len(names)
            by_kind[kind] = sorted(set(by_kind[kind]) - set(names))
    by_kind = {kind: files for kind, files in by_kind.items() if files}
    sole = next(iter(by_kind)) if len(by_kind) == 1 and not only_kind else ""
    if sole in _TEXT_SUFFIXES.values() and unknown.total() > MAX_OTHERS * len(by_kind[sole]):
        raise InputError(
            f"{path}: {len(by_kind[sole]):,} of its files could be inputs, such as {by_kind[sole][0]}, among "
            f"{unknown.total():,} that are none: {shown(unknown)}",
            next_step=f"name the files themselves, or take them with --input-format {format_of(sole)}",
        )
    return by_kind
