"""Carries a plan out: shards by several processes, then what stands beside them."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from core.errors import EmbqError, InputError, OutputError, TryLaterError
from core.storage.durable import NO_SPACE, NOT_WRITABLE, overwrite
from training.shards.account import size_of
from training.shards.pattern import Pattern
from training.shards.plan import Plan, Slice
from training.shards.processes import each
from training.shards.record import Record, path_of, require_same
from training.shards.sizes import CLASSES, SIZES, classes_beside, rendered, sizes_beside
from training.shards.writing import Desk, as_listed, write_shard

OVERHEAD_BYTES = 2048
"""Of a sample at most, beside the picture: headers of members, and what they are filled up with."""

AGAIN = "run the same command again: shards that are complete are not written again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What a conversion did.

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
    kept: Callable[[Slice], None] = lambda _: None,
    wrote: Callable[[Slice], None] = lambda _: None,
) -> Converted:
    """Write the shards of a plan that are not there, then `classes.json`, `sizes.json` and the record of it.

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
    with _disk_errors(pattern.folder), _alone(pattern):
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
            with _workshop(pattern) as temporary:
                desk = as_listed(plan.listing, metadata=plan.layout.metadata, temporary=temporary)
                size = _write(left, partial(_written, pattern, desk), min(processes, len(left)), wrote)
        if plan.listing.classes is not None:
            _place(pattern.folder / CLASSES, rendered(list(plan.listing.classes)))
        known = sizes_beside(str(pattern.folder)) or {}
        _place(pattern.folder / SIZES, rendered(dict(sorted((known | plan.sizes()).items()))))
        record.done().write(path_of(pattern))
    return Converted(written=len(left), kept=plan.shards - len(left), bytes=size)


def classes_there(folder: Path) -> tuple[str, ...] | None:
    """The classes of the shards that are in a folder already, by index; None where there are none."""
    known = classes_beside(str(folder))
    return None if known is None else tuple(known)


def _written(pattern: Pattern, desk: Desk, slice_: Slice) -> tuple[Slice, int]:
    return slice_, write_shard(slice_, pattern.path(slice_.shard), desk)


def _write(
    left: list[Slice],
    write: Callable[[Slice], tuple[Slice, int]],
    processes: int,
    wrote: Callable[[Slice], None],
) -> int:
    total = 0
    for slice_, size in each(write, left, processes):
        wrote(slice_)
        total += size
    return total


def _place(path: Path, data: bytes) -> None:
    overwrite(path, data, temporary=path.with_name(f".{path.name}.{secrets.token_hex(4)}"))


def _require_classes(folder: Path, classes: tuple[str, ...] | None) -> None:
    known = classes_there(folder)
    if classes is not None and known is not None and known != classes:
        raise InputError(
            f"{folder / CLASSES}: names other classes than these pictures have",
            code="other_classes",
            next_step="write these shards into a folder of their own",
        )


def _require_room(folder: Path, left: list[Slice]) -> None:
    """OutputError where the disk has no room for the shards that are left: better now than after an hour."""
    needed = sum(one.bytes + OVERHEAD_BYTES * len(one.pictures) for one in left)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OutputError(
            f"{folder}: the shards need about {size_of(needed)}, and {size_of(free)} are free",
            code="no_space",
            next_step="make room, or write them to another disk",
        )


@contextmanager
def _workshop(pattern: Pattern) -> Iterator[Path]:
    """A folder for unfinished shards, emptied of what a killed attempt left there."""
    folder = pattern.folder / f".{pattern.stem or 'shards'}-unfinished"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _alone(pattern: Pattern) -> Iterator[None]:
    """Hold the folder for the length of the block; TryLaterError where another conversion has it."""
    pattern.folder.mkdir(parents=True, exist_ok=True)
    path = pattern.folder / ".converting"
    while True:
        with open(path, "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise TryLaterError(
                    f"{pattern.folder}: another conversion writes there", next_step="wait for it, or stop it"
                ) from error
            if not _is(path, lock.fileno()):
                continue  # whoever held it has removed it meanwhile
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Translate what the operating system says about the folder of the shards; complete shards stay."""
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
