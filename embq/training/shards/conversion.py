"""Writes the shards of a plan with several processes, then sizes.json, classes.json and the record."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from embq.core.errors import EmbqError, InputError, OutputError
from embq.core.service.progress_line import size_text
from embq.core.storage.durable import NO_SPACE, NOT_WRITABLE, overwrite
from embq.training.run.folder import exclusive
from embq.training.shards.conversion_plan import Pattern, Plan, ShardPlan
from embq.training.shards.pictures import LeftOut
from embq.training.shards.processes import each
from embq.training.shards.shard_set import RECORD
from embq.training.shards.sizes import CLASSES, SIZES, classes_beside, rendered, sizes_beside
from embq.training.shards.writing import ShardSettings, shard_settings, write_shard

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Settings and state of a conversion, in a file beside its shards.

    Attributes:
        digest: see `Plan.digest`.
        source: what was converted, as the user named it.
        seed: see `Layout`.
        samples_per_shard: see `Layout`.
        metadata: see `Layout`.
        shards: how many there are in the end.
        samples: in all of them.
        classes: how many; None without classes.
        left_out: pictures that became no samples.
        finished: whether all shards are there.
    """

    digest: str
    source: str
    seed: int | None
    samples_per_shard: int
    metadata: bool
    shards: int
    samples: int
    classes: int | None
    left_out: tuple[LeftOut, ...]
    finished: bool = False

    @staticmethod
    def of(plan: Plan, source: str) -> Record:
        """The record of a plan that is not carried out yet."""
        layout, classes = plan.layout, plan.listing.classes
        return Record(
            digest=plan.digest(),
            source=source,
            seed=layout.seed,
            samples_per_shard=layout.samples_per_shard,
            metadata=layout.metadata,
            shards=plan.shards,
            samples=len(plan.order),
            classes=None if classes is None else len(classes),
            left_out=plan.listing.left_out,
        )

    def write(self, path: Path) -> None:
        """Write it, durably."""
        shape = {"schema": SCHEMA, **asdict(self), "left_out": [one._asdict() for one in self.left_out]}
        overwrite(path, json.dumps(shape, indent=1).encode() + b"\n")


def path_of(pattern: Pattern) -> Path:
    """Path of the record."""
    return pattern.folder / (f"{pattern.stem}-{RECORD}" if pattern.stem else RECORD)


def require_same(plan: Plan, record: Record) -> bool:
    """True where an earlier attempt of this conversion may have written shards.

    Raises InputError where what is there is of another conversion, or nobody knows of which.
    """
    pattern = plan.layout.pattern
    there = pattern.there()
    before = _read(path_of(pattern))
    if before is None:
        if there:
            raise InputError(
                f"{pattern.folder / there[0]}: is there already, and no conversion is known that made it",
                code="other_conversion",
                next_step="name the shards otherwise, or write them into another folder",
            )
        return False
    if before.get("digest") != record.digest:
        raise InputError(
            f"{path_of(pattern)}: these shards are of another conversion: {_differences(before, record)}",
            code="other_conversion",
            next_step="name the shards otherwise, write them into another folder, or remove those and this file",
        )
    if strange := sorted(set(there) - plan.sizes().keys()):
        raise InputError(
            f"{pattern.folder / strange[0]}: is none of the {plan.shards:,} shards of this conversion",
            code="other_conversion",
            next_step="move it away, or name the shards otherwise",
        )
    return True


def _read(path: Path) -> dict[str, Any] | None:
    try:
        said = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise InputError(f"{path}: is not what embq wrote", next_step="remove it with the shards that belong to it")
    return said


def _differences(before: dict[str, Any], record: Record) -> str:
    now = asdict(record)
    names = ("seed", "samples_per_shard", "metadata", "samples", "classes")
    differ = [f"{name} was {before.get(name)} and is {now[name]}" for name in names if before.get(name) != now[name]]
    return ", ".join(differ) or "pictures have changed since"


OVERHEAD_BYTES = 2048
"""Most that a sample takes beside the picture: headers of members, and padding."""

AGAIN = "run the same command again: shards that are complete are not written again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """Result of a conversion.

    Attributes:
        written: shards that it wrote.
        kept: shards that an earlier attempt had written.
        bytes: of the shards that it wrote.
    """

    written: int
    kept: int
    bytes: int


def convert(
    plan: Plan,
    source: str,
    *,
    processes: int,
    kept: Callable[[ShardPlan], None] = lambda _: None,
    wrote: Callable[[ShardPlan], None] = lambda _: None,
) -> Converted:
    """Write the missing shards of a plan, then `classes.json`, `sizes.json` and the record.

    A shard has its name only when it is complete, and the record says of which conversion, so what is there and is of
    this one is whole.

    Args:
        source: what the user named.
        processes: that write at once.
        kept: called for each shard that is there already.
        wrote: called for each shard that was written.

    Raises InputError for pictures that are not as planned and for a folder that holds other shards, OutputError where
    it cannot be written, TryLaterError where another conversion is at work there.
    """
    pattern, record = plan.layout.pattern, Record.of(plan, source)
    with _disk_errors(pattern.folder), _locked(pattern.folder):
        require_same(plan, record)
        _require_classes(pattern.folder, plan.listing.classes)
        there = set(pattern.there())
        left = []
        for one in plan.slices():
            if pattern.name(one.shard) in there:
                kept(one)
            else:
                left.append(one)
        _require_room(pattern.folder, left)
        size = 0
        if left:
            record.write(path_of(pattern))
            with _unfinished_folder(pattern) as temporary:
                desk = shard_settings(plan.listing, metadata=plan.layout.metadata, temporary=temporary)
                for one, written in each(partial(_written, pattern, desk), left, min(processes, len(left))):
                    wrote(one)
                    size += written
        if plan.listing.classes is not None:
            overwrite(pattern.folder / CLASSES, rendered(list(plan.listing.classes)))
        known = sizes_beside(str(pattern.folder)) or {}
        overwrite(pattern.folder / SIZES, rendered(dict(sorted((known | plan.sizes()).items()))))
        replace(record, finished=True).write(path_of(pattern))
    return Converted(written=len(left), kept=plan.shards - len(left), bytes=size)


def _written(pattern: Pattern, desk: ShardSettings, slice_: ShardPlan) -> tuple[ShardPlan, int]:
    return slice_, write_shard(slice_, pattern.path(slice_.shard), desk)


def _require_classes(folder: Path, classes: tuple[str, ...] | None) -> None:
    known = classes_beside(str(folder))
    if classes is not None and known is not None and known != list(classes):
        raise InputError(
            f"{folder / CLASSES}: names other classes than these pictures have",
            code="other_classes",
            next_step="write these shards into a folder of their own",
        )


def _require_room(folder: Path, left: list[ShardPlan]) -> None:
    """OutputError where the disk has no room for the remaining shards."""
    needed = sum(one.bytes + OVERHEAD_BYTES * len(one.pictures) for one in left)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OutputError(
            f"{folder}: the shards need about {size_text(needed)}, and {size_text(free)} are free",
            code="no_space",
            next_step="make room, or write them to another disk",
        )


@contextmanager
def _unfinished_folder(pattern: Pattern) -> Iterator[Path]:
    """A folder for incomplete shards, emptied first of what a killed attempt left."""
    folder = pattern.folder / f".{pattern.stem or 'shards'}-unfinished"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Create the folder and hold it; TryLaterError where another conversion holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / ".converting", f"{folder}: another conversion writes there", "wait for it, or stop it"):
        yield


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Translate OSError of the shards' folder to OutputError."""
    try:
        yield
    except EmbqError:
        raise
    except OSError as error:
        if error.errno in NO_SPACE:
            raise OutputError(
                f"no space left for the shards in {folder}", code="no_space", next_step=f"make room, then {AGAIN}"
            ) from error
        if error.errno in (*NOT_WRITABLE, errno.EEXIST):
            raise OutputError(
                f"{error.filename or folder}: cannot be written: {error.strerror}",
                code="not_writable",
                next_step="give write permission, or write the shards into another folder",
            ) from error
        raise OutputError(
            f"{error.filename or folder}: {error.strerror or error}", next_step=f"check the disk, then {AGAIN}"
        ) from error
