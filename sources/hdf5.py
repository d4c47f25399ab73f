"""Kind "hdf5": datasets of strings in an HDF5 file, such as `batches/0/text`, `batches/1/text`, ... of a notebook.

Datasets whose paths differ in numbers only are read as one, in order of the numbers. Nothing outside of the file is
read: external links, external storage and virtual datasets are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from core.errors import ConfigError, InputError, SourceError
from core.log import Events
from core.units import UNIT_SPEC_MAX_BYTES, Sample, Unit
from sources.base import Moved, ReadOptions, unwatched
from sources.columns import ID_COLUMNS, TEXT_COLUMNS, Choice, named_columns
from sources.inspection import DIED, inspect, marked, refuse_marked
from sources.rows import UNUSABLE_CODES, RowSamples, readable_now
from sources.storage import open_unchanged, stat_file
from sources.tables import table_errors

log = Events("sources")

SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5")

_SLICE_ROWS = 256
"""Read at once, so that a unit of long texts is not in memory as a whole."""

_CACHE_BYTES = 64 << 20
"""For chunks: one that does not fit is decompressed again for each slice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """One dataset.

    Attributes:
        path: from the root of the file, without a slash in front.
        rows: its length.
        role: "text", "integer" or "other".
        type: for messages.
    """

    path: str
    rows: int
    role: str
    type: str

    @property
    def family(self) -> str:
        """The path with "*" for each number: what its siblings in other batches have in common."""
        return "/".join("*" if part.isdecimal() else part for part in self.path.split("/"))

    @property
    def order(self) -> tuple[tuple[int, str], ...]:
        """Sorts numbers as numbers: 2 before 10."""
        return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in self.path.split("/"))


class Hdf5Source:
    """Strings in units of at most `unit_samples`, each of which says its datasets and its first row.

    The key is the value of a dataset of ids with as many rows beside the texts, else "<file name>:<row from 1>", where
    rows are counted through the whole file.
    """

    kind = "hdf5"
    modalities: tuple[str, ...] = ("text",)

    def holds(self, path: str, options: ReadOptions) -> tuple[str, ...]:
        """Texts; SourceError where it is not clear which, or the file is damaged or cannot be read."""
        unit = self._whole(path, options)
        _choose(_datasets(inspect(unit)), unit)
        return self.modalities

    def split(self, path: str, options: ReadOptions) -> Iterator[Unit]:
        """Units that also fit into a hint, however long the paths are.

        A file that is damaged, or lacks the dataset, gives one unit that fails, and the rest of the run goes on.
        """
        unit = self._whole(path, options)
        try:
            chosen, ids = _choose(_datasets(inspect(unit)), unit)
        except SourceError as error:
            if error.code not in UNUSABLE_CODES:
                raise
            log.warning("table_unusable", path=path, code=error.code, why=error.message)
            yield marked(unit) if error.code == DIED else unit
            return
        if ids:
            unit = replace(unit, options=tuple(sorted({**dict(unit.options), "ids": ids}.items())))
        overhead = len(json.dumps(unit.describe(), separators=(",", ":"))) + 60
        items: list[tuple[str, int]] = []
        first = start = rows = 0
        length = overhead
        for dataset in chosen:
            at = 0
            while at < dataset.rows:
                size = len(json.dumps([dataset.path, dataset.rows])) + 1
                if items and (rows == options.unit_samples or length + size > UNIT_SPEC_MAX_BYTES):
                    yield replace(unit, start=start, first=first, samples=rows, items=tuple(items))
                    first, rows, items, length = first + rows, 0, [], overhead
                if not items:
                    start = at
                taken = min(dataset.rows - at, options.unit_samples - rows)
                items.append((dataset.path, taken))
                at, rows, length = at + taken, rows + taken, length + size
        if items:
            yield replace(unit, start=start, first=first, samples=rows, items=tuple(items))
        elif not first:
            raise InputError(f"{path}: its datasets of strings are empty", code="empty_input", next_step="leave it out")

    def inspect(self, unit: Unit) -> list[list[Any]]:
        """The datasets of a file, as JSON has them: what `split` and `holds` have another process look up."""
        with _opened(unit, unwatched) as file:
            return [[one.path, one.rows, one.role, one.type] for one in _survey(file, unit.source)]

    def read(self, unit: Unit, moved: Moved = unwatched) -> Iterator[Sample]:
        """One sample per string."""
        refuse_marked(unit)
        if unit.samples is None:
            with _opened(unit, moved) as file:
                _choose(_survey(file, unit.source), unit)
            raise readable_now(unit)
        samples = RowSamples(unit, moved)
        named = dict(unit.options)
        with _opened(unit, moved) as file:
            start = unit.start
            for path, rows in unit.items:
                text = _dataset(file, path, unit)
                ids = _dataset(file, _beside(path, named["ids"]), unit) if named.get("ids") else None
                choice = Choice(text=path, image="", is_link=False, key=named.get("ids", ""), metadata=())
                for at in range(start, start + rows, _SLICE_ROWS):
                    moved()
                    stop = min(at + _SLICE_ROWS, start + rows)
                    with _file_errors(unit.source):
                        texts = text[at:stop]
                        keys = ids[at:stop] if ids is not None else [None] * len(texts)
                    for value, key in zip(texts, keys, strict=True):
                        yield samples.sample(choice, identity=_key(key), text=bytes(value), image=None, others={})
                start = 0

    def _whole(self, path: str, options: ReadOptions) -> Unit:
        return Unit(kind=self.kind, source=path, etag=stat_file(path).version, options=named_columns(options))


def _h5py() -> ModuleType:
    try:
        import h5py
    except ImportError as error:
        raise ConfigError(
            "HDF5 files are read with h5py, which is not installed", next_step="pip install 'embq[hdf5]'"
        ) from error
    module: ModuleType = h5py
    return module


def _file_errors(path: str) -> AbstractContextManager[None]:
    """As `table_errors`; what h5py raises at damage depends on which part of the library saw it."""
    return table_errors(path, RuntimeError, LookupError, TypeError)


@contextmanager
def _opened(unit: Unit, moved: Moved) -> Iterator[Any]:
    """The file, open for reading, the version that was planned."""
    h5py = _h5py()
    with open_unchanged(unit, "source_changed", moved) as file:
        with _file_errors(unit.source):
            opened = h5py.File(file, "r", rdcc_nbytes=_CACHE_BYTES)
        with opened:
            yield opened


def _survey(file: Any, source: str) -> list[_Found]:
    """All datasets with one dimension that lie in this file itself, in order."""
    h5py = _h5py()
    found: list[_Found] = []

    def look(path: str | bytes, node: Any) -> None:
        if isinstance(node, h5py.Dataset) and len(node.shape or ()) == 1 and not node.is_virtual and not node.external:
            role, kind = ("integer" if node.dtype.kind in "iu" else "other"), str(node.dtype)
            if h5py.check_string_dtype(node.dtype) is not None:
                role, kind = "text", "strings"
            name = path if isinstance(path, str) else path.decode("utf-8", "surrogateescape")
            found.append(_Found(path=name, rows=int(node.shape[0]), role=role, type=kind))

    with _file_errors(source):
        file.visititems(look)  # it follows no links
    return sorted(found, key=lambda one: one.order)


def _datasets(listed: list[list[Any]]) -> list[_Found]:
    return [_Found(path=path, rows=rows, role=role, type=type_) for path, rows, role, type_ in listed]


def _choose(found: Sequence[_Found], unit: Unit) -> tuple[list[_Found], str]:
    """The datasets of texts in order, and the name of the ids beside them, "" where there are none.

    Raises SourceError `missing_column` or `ambiguous_column`.
    """
    named = dict(unit.options)
    families: dict[str, list[_Found]] = {}
    for one in found:
        if one.role == "text":
            families.setdefault(one.family, []).append(one)
    wanted = named.get("text_column", "").strip("/")
    chosen = (
        _wanted(found, families, wanted, unit) if wanted else _only(found, families, named.get("id_column", ""), unit)
    )
    if [one.path for one in chosen] != [wanted]:
        _refuse_gaps(found, chosen, unit)
    return chosen, _ids(found, chosen, named.get("id_column", ""), unit)


def _refuse_gaps(found: Sequence[_Found], chosen: Sequence[_Found], unit: Unit) -> None:
    """Raise SourceError where one of several batches has other datasets and not the chosen one: texts would be lost."""
    batches = {one.family.rpartition("/")[0] for one in chosen if one.family != one.path}
    there = {one.path.rpartition("/")[0] for one in chosen}
    for one in found:
        group = one.path.rpartition("/")[0]
        if one.family.rpartition("/")[0] in batches and group not in there:
            beside = [other for other in found if other.path.rpartition("/")[0] == group]
            raise SourceError(
                f"{unit.source}: {group} has no {_last(chosen[0].path)!r}, which others beside it have; "
                f"it has {_shown(beside)}",
                code="missing_column",
                next_step="write the file with the same datasets in each batch, or leave it out",
            )


def _wanted(found: Sequence[_Found], families: dict[str, list[_Found]], wanted: str, unit: Unit) -> list[_Found]:
    if exact := [one for one in found if one.path == wanted and one.role == "text"]:
        return exact
    fitting = [name for name in families if name == wanted or name.endswith(f"/{wanted}")]
    if not fitting:
        raise SourceError(
            f"{unit.source}: no dataset of strings {wanted!r}; it has {_shown(found)}",
            code="missing_column",
            next_step="name one with --text-column, such as batches/*/text, or leave the file out",
        )
    if len(fitting) > 1:
        raise _ambiguous(unit, families, fitting)
    return families[fitting[0]]


def _only(found: Sequence[_Found], families: dict[str, list[_Found]], ids: str, unit: Unit) -> list[_Found]:
    free = [name for name in families if _last(name) not in (*ID_COLUMNS, ids)]
    if len({one.family for one in found}) == 1:
        free = list(families)  # as of a table with one column
    if not free:
        raise SourceError(
            f"{unit.source}: no dataset of strings with one dimension; it has {_shown(found)}",
            code="missing_column",
            next_step="write the texts as a dataset of strings, or leave the file out",
        )
    if len(free) > 1:
        for known in TEXT_COLUMNS:
            by_name = [name for name in free if _last(name) in (known, f"{known}s")]
            if len(by_name) == 1:
                return families[by_name[0]]
            if by_name:
                break
        raise _ambiguous(unit, families, free)
    return families[free[0]]


def _ids(found: Sequence[_Found], chosen: Sequence[_Found], wanted: str, unit: Unit) -> str:
    """The name of the ids that stand beside every chosen dataset, with as many rows."""
    there = {one.path: one for one in found if one.role in ("text", "integer")}
    names = [wanted] if wanted else [form for name in ID_COLUMNS for form in (name, f"{name}s")]
    for name in names:
        beside = [there.get(_beside(one.path, name)) for one in chosen]
        if all(
            ids is not None and ids.path != one.path and ids.rows == one.rows
            for ids, one in zip(beside, chosen, strict=True)
        ):
            return name
    if wanted:
        raise SourceError(
            f"{unit.source}: no ids {wanted!r} with as many rows beside {_shown(chosen)}; it has {_shown(found)}",
            code="missing_column",
            next_step="check --id-column, or leave it away to have rows counted",
        )
    return ""


def _beside(path: str, name: str) -> str:
    """The path of a dataset in the same group."""
    folder = path.rpartition("/")[0]
    return f"{folder}/{name}" if folder else name


def _last(path: str) -> str:
    return path.rpartition("/")[2].lower()


def _dataset(file: Any, path: str, unit: Unit) -> Any:
    """A dataset of this very file; SourceError `source_changed` where there is none."""
    h5py = _h5py()
    with _file_errors(unit.source):
        node: Any = file
        for part in path.split("/"):
            if not isinstance(node.get(part, getlink=True) if isinstance(node, h5py.Group) else None, h5py.HardLink):
                node = None
                break
            node = node[part]
        if isinstance(node, h5py.Dataset) and not node.is_virtual and not node.external:
            return node
    raise SourceError(
        f"{unit.source}: has no dataset {path!r} of its own",
        code="source_changed",
        next_step="put the planned file back, or plan a new run",
    )


def _key(value: Any) -> bytes | int | None:
    """An id as bytes or int: numpy has types of its own for both."""
    return value if value is None else bytes(value) if isinstance(value, bytes) else int(value)


def _shown(found: Sequence[_Found]) -> str:
    """Paths by family with types, for a message."""
    families: dict[str, str] = {}
    for one in found:
        families.setdefault(one.family, one.type)
    listed = [f"{name} ({kind})" for name, kind in families.items()]
    return ", ".join(listed[:10]) + (f" and {len(listed) - 10} more" if len(listed) > 10 else "") if listed else "none"


def _ambiguous(unit: Unit, families: dict[str, list[_Found]], names: Sequence[str]) -> SourceError:
    candidates = [families[name][0] for name in names]
    return SourceError(
        f"{unit.source}: more than one dataset may hold the texts: {_shown(candidates)}",
        code="ambiguous_column",
        next_step=f"say which: --text-column '{names[0]}'",
    )
