"""Generations: the units that were added to a run after it was planned.

The run's first units are described by `run.json`, which never changes. What is added later is a generation: segments of
its own in the folder of the manifest, and a record `gen-0001.json` that names them, created exclusively after they are
durable. So a reader sees all of a generation or nothing of it; segments that no record names are leftovers.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from core.durable import output_error, write_new
from core.errors import OutputError, TryLaterError
from core.places import Place
from core.units import canonical_json

SCHEMA = 1
PREFIX = "gen-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What was added at once.

    Attributes:
        number: from 1, without gaps; what `run.json` describes is number 0.
        run: run id.
        first: index of its first unit: all units of the generations before it.
        units: number of its units, at least one.
        samples: number of its samples, or None where only reading tells.
        digest: hash over its unit ids in order.
        segments: names of its segments, in order.
        inputs: as the user gave them; () for a generation of retries, which adds no sample.
        options: reader options and selection that shaped the units.
        version: embq version that planned it.
        created: UTC time, ISO 8601; information only.
    """

    number: int
    run: str
    first: int
    units: int
    samples: int | None
    digest: str
    segments: tuple[str, ...]
    inputs: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    version: str
    created: str

    @property
    def is_retry(self) -> bool:
        """Whether its units do samples of earlier units again."""
        return not self.inputs


def exists(folder: Place, number: int) -> bool:
    """Whether generation `number` of the manifest in `folder` is there."""
    return _path(folder, number).exists()


def read_generations(folder: Place) -> Iterator[Generation]:
    """The generations of the manifest in `folder`, in order.

    Raises OutputError where a record is damaged, or missing before a later one.
    """
    number, first = 1, -1
    while True:
        path = _path(folder, number)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            break
        except OSError as error:
            raise OutputError(f"{path} cannot be read: {error.strerror}") from error
        generation = _parse(data, path)
        if generation.number != number or (first >= 0 and generation.first != first):
            raise _damaged(path, f"it does not follow generation {number - 1}")
        yield generation
        number, first = number + 1, generation.first + generation.units
    if later := sorted(path.name for path in folder.glob(f"{PREFIX}*.json") if path.name > _path(folder, number).name):
        raise _damaged(_path(folder, number), f"it is missing, though {later[0]} is there")


def append(folder: Place, generation: Generation, *, temporary: Path) -> None:
    """Make a generation real; its segments are durable. TryLaterError where another one took its number.

    Args:
        temporary: folder for the unfinished file, on the same file system.
    """
    path = _path(folder, generation.number)
    body: dict[str, Any] = {"schema": SCHEMA, **asdict(generation), "options": dict(generation.options)}
    text = json.dumps({**body, "sha256": _digest(body)}, indent=1, ensure_ascii=False) + "\n"
    unfinished = temporary / f"manifest-{path.stem}.{secrets.token_hex(4)}.json"
    try:
        write_new(path, text.encode("utf-8", "surrogateescape"), temporary=unfinished)
    except FileExistsError as error:
        raise TryLaterError(
            f"{path} was written by another process at the same time", next_step="give the same command again"
        ) from error
    except OSError as error:
        raise output_error(error, path) from error


def leftovers(folder: Place, first: Collection[str] = ()) -> list[Place]:
    """Segments that nothing names: of plans that were killed, or are at work.

    Args:
        first: the segments that run.json names.
    """
    named = {*first, *(name for generation in read_generations(folder) for name in generation.segments)}
    there: Iterable[Place] = folder.glob(f"{PREFIX}*.parquet")
    return [path for path in sorted(there, key=str) if path.name not in named]


def _path(folder: Place, number: int) -> Place:
    return folder / f"{PREFIX}{number:04d}.json"


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(body).encode("utf-8", "surrogateescape")).hexdigest()


def _parse(data: bytes, path: Place) -> Generation:
    try:
        body = json.loads(data.decode("utf-8", "surrogateescape"))
        said, schema = body.pop("sha256"), body["schema"]
        if _digest(body) != said:
            raise _damaged(path, "its hash does not match its content")
        if schema != SCHEMA:
            raise OutputError(f"{path} has schema {schema}, this embq reads {SCHEMA}")
        del body["schema"]
        body["options"] = tuple(sorted(body["options"].items()))
        body["segments"], body["inputs"] = tuple(body["segments"]), tuple(body["inputs"])
        return Generation(**body)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(path, "it is not a generation's record") from error


def _damaged(path: Place, why: str) -> OutputError:
    return OutputError(
        f"{path} is damaged: {why}",
        next_step="restore it from a backup; committed rows are safe",
        code="manifest_damaged",
    )
