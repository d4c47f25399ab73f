"""Writes the shards of a plan with several processes, then sizes.json, classes.json and the record."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from embq.core.errors import EmbqError, InputError, OutputError
from embq.core.service.progress_line import size_text
from embq.core.storage.beneath import read_small
from embq.core.storage.durable import output_error, overwrite
from embq.training.run.folder import exclusive
from embq.training.run.scratch import scratch
from embq.training.shards.conversion_plan import ConversionPlan, Pattern, ShardPlan
from embq.training.shards.processes import each
from embq.training.shards.shard_set import RECORD
from embq.training.shards.sizes import CLASSES, SIZES, classes_beside, rendered, sizes_beside
from embq.training.shards.writing import ShardSettings, shard_settings, write_shard


def record_of(plan: ConversionPlan, source: str) -> dict[str, Any]:
    """The record of a conversion, in a file beside its shards: its settings, and `finished`, whether all are there.

    Args:
        source: what is converted, as the user named it.
    """
    layout, classes = plan.layout, plan.listing.classes
    return {
        "schema": 1,
        "digest": plan.digest(),
        "source": source,
        "seed": layout.seed,
        "samples_per_shard": layout.samples_per_shard,
        "metadata": layout.metadata,
        "shards": plan.shards,
        "samples": len(plan.order),
        "classes": None if classes is None else len(classes),
        "left_out": [picture._asdict() for picture in plan.listing.left_out],
        "finished": False,
    }


def path_of(pattern: Pattern) -> Path:
    """Path of the record."""
    return pattern.folder / (f"{pattern.stem}-{RECORD}" if pattern.stem else RECORD)


def require_same(plan: ConversionPlan, record: Mapping[str, Any]) -> None:
    """InputError if shards of another conversion, or of an unknown one, have names of the pattern."""
    pattern = plan.layout.pattern
    existing = pattern.existing()
    earlier = _read(path_of(pattern))
    if earlier is None:
        if existing:
            raise InputError(
                f"{pattern.folder / existing[0]}: is there already, and no conversion is known that made it",
                code="other_conversion",
                next_step="name the shards otherwise, or write them into another folder",
            )
        return
    if earlier.get("digest") != record["digest"]:
        raise InputError(
            f"{path_of(pattern)}: these shards are of another conversion: {_differences(earlier, record)}",
            code="other_conversion",
            next_step="name the shards otherwise, write them into another folder, or remove those and this file",
        )
    if strange := sorted(set(existing) - plan.sizes().keys()):
        raise InputError(
            f"{pattern.folder / strange[0]}: is none of the {plan.shards:,} shards of this conversion",
            code="other_conversion",
            next_step="move it away, or name the shards otherwise",
        )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(read_small(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise InputError(f"{path}: is not what embq wrote", next_step="remove it with the shards that belong to it")
    return content


def _differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = ("seed", "samples_per_shard", "metadata", "samples", "classes")
    differ = [f"{name} was {earlier.get(name)} and is {now[name]}" for name in names if earlier.get(name) != now[name]]
    return ", ".join(differ) or "pictures have changed since"


OVERHEAD_BYTES = 2048
"""Most that a sample takes beside the picture: headers of members, and padding."""

AGAIN = "run the same command again: shards that are complete are not written again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """Result of a conversion.

    Attributes:
        written: shards that it wrote.
        skipped: shards that an earlier attempt had written.
    """

    written: int
    skipped: int


def convert(
    plan: ConversionPlan,
    source: str,
    *,
    processes: int,
    skipped: Callable[[ShardPlan], None] = lambda _: None,
    wrote: Callable[[ShardPlan], None] = lambda _: None,
) -> Converted:
    """Write the missing shards of a plan, then `classes.json`, `sizes.json` and the record.

    A shard has its name only when it is complete, and the record says of which conversion, so what is there and is of
    this one is whole.

    Args:
        source: what the user named.
        processes: that write at once.
        skipped: called for each shard that is there already.
        wrote: called for each shard that was written.

    Raises InputError for pictures that are not as planned and for a folder that holds other shards, OutputError if
    it cannot be written, TryLaterError if another conversion is at work there.
    """
    pattern, record = plan.layout.pattern, record_of(plan, source)
    with _disk_errors(pattern.folder), _locked(pattern.folder):
        require_same(plan, record)
        _require_classes(pattern.folder, plan.listing.classes)
        existing = set(pattern.existing())
        missing = []
        for shard in plan.slices():
            if pattern.name(shard.shard) in existing:
                skipped(shard)
            else:
                missing.append(shard)
        _require_room(pattern.folder, missing)
        if missing:
            _write(path_of(pattern), record)
            with scratch(pattern.folder, f".{pattern.stem or 'shards'}-unfinished-") as temporary:
                settings = shard_settings(plan.listing, metadata=plan.layout.metadata, temporary=temporary)
                for shard in each(partial(_written, pattern, settings), missing, min(processes, len(missing))):
                    wrote(shard)
        if plan.listing.classes is not None:
            overwrite(pattern.folder / CLASSES, rendered(list(plan.listing.classes)))
        counts = sizes_beside(str(pattern.folder)) or {}
        overwrite(pattern.folder / SIZES, rendered(dict(sorted((counts | plan.sizes()).items()))))
        _write(path_of(pattern), {**record, "finished": True})
    return Converted(written=len(missing), skipped=plan.shards - len(missing))


def _write(path: Path, record: Mapping[str, Any]) -> None:
    overwrite(path, json.dumps(record, indent=1).encode() + b"\n")


def _written(pattern: Pattern, settings: ShardSettings, shard: ShardPlan) -> ShardPlan:
    write_shard(shard, pattern.path(shard.shard), settings)
    return shard


def _require_classes(folder: Path, classes: tuple[str, ...] | None) -> None:
    recorded = classes_beside(str(folder))
    if classes is not None and recorded is not None and recorded != list(classes):
        raise InputError(
            f"{folder / CLASSES}: names other classes than these pictures have",
            code="other_classes",
            next_step="write these shards into a folder of their own",
        )


def _require_room(folder: Path, missing: list[ShardPlan]) -> None:
    """OutputError if the disk has no room for the remaining shards."""
    needed = sum(shard.bytes + OVERHEAD_BYTES * len(shard.pictures) for shard in missing)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OutputError(
            f"{folder}: the shards need about {size_text(needed)}, and {size_text(free)} are free",
            code="no_space",
            next_step="make room, or write them to another disk",
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Create the folder and hold it; TryLaterError if another conversion holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / ".converting", f"{folder}: another conversion writes there", "wait for it, or stop it"):
        yield


_NEXT_STEPS = {
    "no_space": f"make room, then {AGAIN}",
    "not_writable": "give write permission, or write the shards into another folder",
    "output": f"check the folder and the disk, then {AGAIN}",
}


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Translate OSError of the shards' folder to OutputError."""
    try:
        yield
    except EmbqError:
        raise
    except OSError as error:
        raise output_error(error, Path(error.filename or folder), next_steps=_NEXT_STEPS) from error
