"""Versions of an index: immutable records of their files, and the pointer to the current one.

```
INDEX/CURRENT                 name of the current version, replaced by rename
INDEX/v0003/version.json      its record; beside it the report and other small files
INDEX/files/                  payloads of versions; a file is never changed, and versions share them
```

In a bucket a version is there as soon as its record is, which is created last; CURRENT follows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from embq.core.errors import EmbqError, InputError, MalformedError, OutputError, TryLaterError, UsageError, command_line
from embq.core.run.layout import part_of_run, run_above
from embq.core.run.run_info import load_run
from embq.core.storage import beneath
from embq.core.storage.durable import denied, reading, unusable
from embq.core.storage.objects import ObjectPath
from embq.core.storage.paths import Place, is_url, refuse_missing, refuse_unnameable
from embq.index.collection.opening import Collection
from embq.index.index_files.files import File, asking, damaged, from_json, read_json, read_small, to_json
from embq.index.plan.index_plan import IndexPlan

SCHEMA = 1
CURRENT, RECORD = "CURRENT", "version.json"
NAME = re.compile(r"v[0-9]{4,18}")
CURRENT_BYTES = 100
"""Limit of the pointer."""
ATTEMPTS = 20
"""Attempts to open the current version if it was swept away meanwhile."""

T = TypeVar("T")
Where = TypeVar("Where", Path, ObjectPath)
Run = TypeVar("Run", bound=Place)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListsFile(File):
    """A file of inverted lists: those from `first` to before `last`."""

    first: int
    last: int

    @classmethod
    def of(cls, file: File, *, first: int, last: int) -> ListsFile:
        """A payload that holds these lists."""
        return cls(path=file.path, bytes=file.bytes, sha256=file.sha256, first=first, last=last)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRangeFile(File):
    """A file of vectors or identities of the rows with the ids from `first_id` on."""

    first_id: int
    rows: int

    @classmethod
    def of(cls, file: File, *, first_id: int, rows: int) -> RowRangeFile:
        """A payload that holds these rows."""
        return cls(path=file.path, bytes=file.bytes, sha256=file.sha256, first_id=first_id, rows=rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One version.

    Attributes:
        index: folder of this machine with its files; empty of one that was only looked up in a bucket.
        name: "v0001" and so on; "" of a version that is not published yet.
        trained: the template.
        groups: lists of the index as it was built, then those of each addition; the ranges of a group cover all lists.
        rows: vectors for exact re-ranking, by id; () if there are none.
        identity: identity files, by id.
        next_id: one more than the highest id.
        excluded: rows that are in no list because they have no direction.
        deleted: rows that are no answer any more.
        deleted_file: a bit for each id, those of deleted rows set; None if none is.
        search: the search parameters that tuning chose: "nprobe" and "k_factor".
        build: id of the build that trained the template.
        created: time of its publication; that of the version before while it is not published.
        notes: what else a change of the index keeps from version to version, JSON-ready.
    """

    index: Path
    name: Annotated[str, Meta(pattern=rf"\A(?:{NAME.pattern})?\Z")]
    plan: IndexPlan
    collection: Collection
    trained: File
    groups: tuple[tuple[ListsFile, ...], ...]
    rows: tuple[RowRangeFile, ...]
    identity: tuple[RowRangeFile, ...]
    next_id: int
    excluded: int
    deleted: int
    deleted_file: File | None
    search: Mapping[str, int]
    build: str
    created: str
    notes: Mapping[str, Any]

    @property
    def path(self) -> Path:
        """Folder of the version."""
        return self.index / self.name

    @property
    def n(self) -> int:
        """Rows that can be an answer."""
        return self.next_id - self.excluded - self.deleted

    @property
    def dropped(self) -> int:
        """Deleted rows that are in no list any more."""
        return int(self.notes.get("dropped", 0))

    def files(self) -> Iterable[File]:
        """All files that it consists of."""
        yield self.trained
        for group in self.groups:
            yield from group
        yield from self.rows
        yield from self.identity
        if self.deleted_file is not None:
            yield self.deleted_file

    def record(self) -> dict[str, Any]:
        """Content of version.json."""
        fields = to_json(self)
        del fields["index"]
        return {"schema": SCHEMA, **fields}


def current_name(index: Place) -> str:
    """The name of the current version; "" if there is none."""
    if isinstance(index, ObjectPath):
        with asking(index):
            exists = (index / CURRENT).exists()
        return parsed_name(read_small(index / CURRENT, CURRENT_BYTES), index / CURRENT) if exists else ""
    try:
        return parsed_name(beneath.read_bytes(index, CURRENT, most_bytes=CURRENT_BYTES), index / CURRENT)
    except FileNotFoundError:
        return ""
    except (OSError, MalformedError) as error:
        raise (
            denied(error, index / CURRENT)
            or unusable(error, index)
            or OutputError(f"{index / CURRENT} cannot be read: {error}", code="index_damaged")
        ) from error


def parsed_name(data: bytes, where: Place) -> str:
    """The name of the version that a file CURRENT names; OutputError if it names none."""
    name = data.decode("ascii", "replace").strip()
    if len(data) > CURRENT_BYTES or not NAME.fullmatch(name):
        raise OutputError(f"{where} does not name a version", code="index_damaged")
    return name


def read_version(index: Place, name: str) -> Version:
    """One version; OutputError if its record is missing or damaged."""
    folder = index if isinstance(index, Path) else Path()
    return parsed_version(folder, read_json(index / name / RECORD), str(index / name / RECORD))


def parsed_version(index: Path, data: Mapping[str, Any], where: str) -> Version:
    """A version from its record; OutputError if that is of another schema, or damaged.

    Args:
        where: path or URL of the record, for messages.
    """
    if data.get("schema") != SCHEMA:
        raise OutputError(
            f"{where} has schema {data.get('schema')}, this embq reads {SCHEMA}",
            next_step="use the embq version that made the index, or build it again",
            code="index_damaged",
        )
    version = from_json(Version, {**data, "index": str(index)}, where)
    ends = [0, *(file.first_id + file.rows for file in version.identity)]
    identity_follows = [file.first_id for file in version.identity] == ends[:-1] and version.next_id == ends[-1]
    rows_fit = all(file.bytes == 2 * version.plan.dim * file.rows for file in version.rows)
    deleted_bytes = 0 if version.deleted_file is None else version.deleted_file.bytes
    if not identity_follows or not rows_fit or deleted_bytes > -(-version.next_id // 8):
        raise damaged(f"{where} does not describe the rows of an index")
    return version


def find_current(index: Place) -> Version | None:
    """The current version; None if there is no index, OutputError if it is damaged."""
    name = current_name(index)
    return read_version(index, name) if name else None


def read_current(index: Place) -> Version:
    """The current version; InputError if there is no index, OutputError if it is damaged."""
    current = find_current(index)
    if current is None:
        raise InputError(
            f"{index} holds no finished index", next_step="build one with `embq index OUT`", code="no_index"
        )
    return current


def open_current(index: Path, opened: Callable[[Version], T]) -> T:
    """The current version as `opened` opens its files; again if it was swept away meanwhile.

    Raises InputError if there is no index, OutputError if a file of it is missing or damaged.
    """
    for _ in range(ATTEMPTS):
        name = current_name(index)
        try:
            return opened(read_current(index))
        except EmbqError as error:
            # The version may have been swept away while it was opened, when two more were published meanwhile.
            if error.code != "index_damaged" or current_name(index) == name:
                raise
    raise TryLaterError(f"{index} changes faster than it can be opened", next_step="try again")


def index_path(text: str) -> Path:
    """The absolute path of an index that is to be changed or exported; UsageError for a URL."""
    if is_url(text):
        raise UsageError(
            f"{text}: on an object store an index is built, searched and served, and neither changed nor exported",
            next_step="copy it to a folder, and upload it again after a change: all else first, CURRENT last",
        )
    return Path(text).absolute()


def indexes_below(run: Run) -> dict[str, Run]:
    """Name -> place of each finished index of a run, by name; OutsideError if one is behind a link."""
    folder = run / "index"
    with reading(folder):
        names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        return {name: beneath.below(run, f"index/{name}") for name in names if (folder / name / CURRENT).exists()}


def no_index(path: Place, indexes: Iterable[str] = (), output: str | None = None) -> InputError:
    """The error for a folder without an index, or without one of the vectors `output`, with what can be done there.

    Args:
        indexes: names of the vectors that it has an index of.
    """
    if (run := run_above(path)) is not None:
        return part_of_run(path, run)
    if not isinstance(path, Path):
        return InputError(f"{path} holds no finished index", next_step="upload a finished index to it", code="no_index")
    if not any(path.iterdir()):
        return InputError(
            f"{path} holds neither a run nor an index",
            next_step=f"check the name; {command_line('run', 'INPUT', '-o', path)} makes a run there",
            code="no_index",
        )
    names, option = ", ".join(indexes), []
    what = f"{path} holds no finished index" + (f" of {output!r}; there is one of {names}" if names else "")
    if output is not None and (path / "run.json").exists():
        outputs = [spec.name for spec in load_run(path).model.outputs]
        if output not in outputs:
            return InputError(
                f"{what}, and the run has no vectors of that name",
                next_step=f"leave --vector-name out, or give one of: {', '.join(outputs)}",
                code="no_index",
            )
        option = ["--vector-name", output] if len(outputs) > 1 else []
    return InputError(what, next_step=f"build one with: {command_line('index', path, *option)}", code="no_index")


def resolve_index(path: Where, output: str | None = None) -> Where:
    """The place of an index from what a user named: that folder, a version in it, or the output folder of a run.

    Args:
        output: which of a run's vectors; None if it has an index of one only.

    Raises InputError if there is none, or several.
    """
    if isinstance(path, Path):
        refuse_unnameable(os.path.abspath(path))
        refuse_missing(path)
    with reading(path):
        if (path / CURRENT).exists():
            return path
        if isinstance(path, Path) and NAME.fullmatch(path.name) and (path / RECORD).exists():
            return path.parent
    indexes = indexes_below(path)
    if output is not None and output in indexes:
        return indexes[output]
    if not indexes or output is not None:
        raise no_index(path, indexes, output)
    if len(indexes) > 1:
        raise InputError(
            f"{path} has an index of {' and of '.join(indexes)}",
            next_step=f"add --vector-name {next(iter(indexes))}, or give {next(iter(indexes.values()))}",
            code="which_index",
        )
    return next(iter(indexes.values()))
