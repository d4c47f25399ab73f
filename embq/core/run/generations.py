"""Generations: the units that were added to a run after it was planned.

The run's first units are described by `run.json`, which never changes. What is added later is a generation: segments of
its own in the folder of the manifest, and a record `gen-0001.json` that names them, created exclusively after they are
durable. A reader sees all of a generation or nothing of it; segments that no record names are orphans.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from embq.core import wire
from embq.core.errors import MalformedError, OutputError
from embq.core.storage import beneath
from embq.core.storage.durable import denied, names_in, write_first
from embq.core.storage.paths import Place
from embq.core.units import sealed
from embq.core.wire import Count, RunId, ShortText, UnitCount, Word

SCHEMA = 1
MOST_BYTES = 1 << 26
"""Limit of run.json and of a generation's record: some hundred thousand names of inputs."""

SegmentName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.parquet\Z")]
PREFIX = "gen-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Units that were added together.

    Attributes:
        number: from 1, without gaps; what `run.json` describes is number 0.
        run: run id.
        first: index of its first unit: all units of the generations before it.
        units: number of its units, at least one.
        samples: number of its samples, or None if only reading tells.
        digest: hash over its unit ids in order.
        segments: names of its segments, in order.
        inputs: absolute paths, patterns and URLs; () for a generation of retries, which adds no sample.
        options: reader options and selection that shaped the units.
        version: embq version that planned it.
        created: UTC time, ISO 8601; information only.
    """

    number: Annotated[int, Meta(ge=1, le=10**9)]
    run: RunId
    first: UnitCount
    units: Annotated[int, Meta(ge=1, le=100_000_000)]
    samples: Count | None
    digest: Word
    segments: tuple[SegmentName, ...]
    inputs: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    version: ShortText
    created: ShortText

    @property
    def is_retry(self) -> bool:
        """True if its units retry samples of earlier units."""
        return not self.inputs


def exists(folder: Place, number: int) -> bool:
    """True if generation `number` of the manifest in `folder` is there."""
    return _path(folder, number).exists()


def read_generations(folder: Place) -> Iterator[Generation]:
    """The generations of the manifest in `folder`, in order.

    Raises OutputError if a record is damaged, or missing before a later one.
    """
    number, first = 1, -1
    while True:
        path = _path(folder, number)
        try:
            data = beneath.read_bytes(folder.parent, f"{folder.name}/{path.name}", most_bytes=MOST_BYTES)
        except FileNotFoundError:
            break
        except OSError as error:
            raise denied(error, path) or OutputError(f"{path} cannot be read: {error.strerror}") from error
        generation = _parse(data, path)
        if generation.number != number or (first >= 0 and generation.first != first):
            raise _damaged(path, f"it does not follow generation {number - 1}")
        yield generation
        number, first = number + 1, generation.first + generation.units
    path = _path(folder, number)
    records = (name for name in names_in(folder) if name.startswith(PREFIX) and name.endswith(".json"))
    later = [name for name in records if (len(name), name) > (len(path.name), path.name)]  # 10000 is behind 9999
    if later:
        raise _damaged(path, f"it is missing, though {min(later)} is there")


def append(folder: Place, generation: Generation, *, temporary: Path) -> None:
    """Commit a generation whose segments are durable. TryLaterError if another process took its number.

    Args:
        temporary: folder for the unfinished file, on the same file system.
    """
    path = _path(folder, generation.number)
    body: dict[str, Any] = {"schema": SCHEMA, **asdict(generation), "options": dict(generation.options)}
    text = json.dumps(sealed(body), indent=1, ensure_ascii=False) + "\n"
    unfinished = temporary / f"manifest-{path.stem}.{secrets.token_hex(4)}.json"
    write_first(path, text.encode("utf-8", "surrogateescape"), temporary=unfinished)


def leftovers(folder: Place, first: Collection[str] = ()) -> list[Place]:
    """Segments that no record names: of planning that was killed, or is in progress.

    Args:
        first: the segments that run.json names.
    """
    named = {*first, *(name for generation in read_generations(folder) for name in generation.segments)}
    segments = (name for name in names_in(folder) if name.startswith(PREFIX) and name.endswith(".parquet"))
    return [folder / name for name in sorted(segments) if name not in named]


def _path(folder: Place, number: int) -> Place:
    return folder / f"{PREFIX}{number:04d}.json"


def _parse(data: bytes, path: Place) -> Generation:
    what = "a generation's record"
    try:
        body = wire.read(dict[str, Any], data.decode("utf-8", "surrogateescape"), what=what, most_bytes=MOST_BYTES)
        if sealed(body) != body:
            raise _damaged(path, "its hash does not match its content")
        if body.get("schema") != SCHEMA:
            raise OutputError(f"{path} has schema {body.get('schema')}, this embq reads {SCHEMA}")
        options = wire.convert(dict[str, str], body.get("options"), what=what)
        return wire.convert(Generation, {**body, "options": sorted(options.items())}, what=what)
    except (MalformedError, UnicodeEncodeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Place, why: object) -> OutputError:
    return OutputError(
        f"{path} is damaged: {why}",
        next_step="restore it from a backup; committed rows are safe",
        code="manifest_damaged",
    )
