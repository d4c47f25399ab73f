"""A run: its immutable `run.json`, and the generations that were added since."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from embq.core import wire
from embq.core.errors import InputError, MalformedError, OutputError
from embq.core.models import REFERENCE, ModelConfig
from embq.core.rows.spec import FORMATS, RowSpec
from embq.core.run.generations import MOST_BYTES, Generation, SegmentName, read_generations
from embq.core.run.layout import Layout, part_of_run, run_above
from embq.core.storage import beneath
from embq.core.storage.durable import denied, names_in, write_first
from embq.core.storage.paths import Place
from embq.core.units import content_hash
from embq.core.wire import Count, RunId, ShortText, UnitCount, Word

SCHEMA = 1

MOST_BATCH_SIZE = 1 << 20
MOST_PREPARE_THREADS = 1_024
"""Limits of what a run may ask of its workers: samples per batch, and threads per process."""
USUAL_BATCH_SIZE, USUAL_THREADS_PER_CORE = 16_384, 4
"""Limits of what a worker does of that for a run, whose folder or record may come from anybody. More has to be asked
for where the worker is started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDefaults:
    """Options of workers that a run asks for, if they were not started with their own.

    Attributes:
        batch_size: samples per batch; 0 leaves it to the embedder.
        prepare_threads: decoding and tokenising threads per process; 0 leaves it to the worker.
    """

    batch_size: Annotated[int, Meta(ge=0, le=MOST_BATCH_SIZE)] = 0
    prepare_threads: Annotated[int, Meta(ge=0, le=MOST_PREPARE_THREADS)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """A run. All of it is frozen when it is planned, except for the units that are added later.

    Also the form of run.json, in the order of its fields, which is without `added`.

    Attributes:
        run: run id, 16 hex digits.
        inputs: absolute paths, patterns and URLs of the first plan.
        options: reader options and selection that shaped the first units.
        model: config of the model.
        rows: content of its rows.
        format: format of its parts, one of `embq.core.rows.spec.FORMATS`.
        part_rows: most rows of one part.
        units: number of units in the manifest, with all generations.
        samples: number of samples, with all generations, or None if only reading tells.
        manifest_digest: hash over the ids of the first units in order.
        version: embq version that planned the run.
        created: UTC time, ISO 8601; information only.
        added: the generations that were added, in order.
        workers: defaults of its workers; no part of its identity.
        segments: names of the segments of the manifest that the run was planned with, in order; () in records of
            older versions of embq, whose segments are all those with names that begin with a digit.
    """

    run: RunId
    inputs: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    model: ModelConfig
    rows: RowSpec
    format: Annotated[str, Meta(pattern=rf"\A({'|'.join(FORMATS)})\Z")]
    part_rows: Annotated[int, Meta(ge=1, le=2**40)]
    units: UnitCount
    samples: Count | None
    manifest_digest: Word
    segments: tuple[SegmentName, ...] = ()
    version: ShortText
    created: ShortText
    workers: WorkerDefaults = WorkerDefaults()
    added: tuple[Generation, ...] = ()

    @property
    def first_units(self) -> int:
        """Number of units that the run was planned with."""
        return self.units - sum(generation.units for generation in self.added)

    @property
    def retries(self) -> int:
        """Number of units that retry samples of earlier ones."""
        return sum(generation.units for generation in self.added if generation.is_retry)

    @property
    def ends(self) -> tuple[int, ...]:
        """Number of units after each generation: a log may be closed at each of them."""
        return (self.first_units, *(generation.first + generation.units for generation in self.added))

    def notes(self, *, fingerprint: str, version: str) -> dict[str, str]:
        """Notes on the run for the metadata of its files of rows.

        Args:
            version: of the embq that writes them.
        """
        return {
            "embq.run": self.run,
            "embq.model": self.model.spec,
            "embq.fingerprint": fingerprint,
            "embq.version": version,
            **{f"embq.{name.replace(' ', '_')}": str(value) for name, value in self.rows.identity().items()},
        }

    def identity(self) -> dict[str, Any]:
        """The values that decide the run's id: two runs with equal ones are the same run."""
        cut = {} if self.model.chunking is None else {"chunks": str(self.model.chunking)}
        return {
            "inputs (units)": self.manifest_digest,
            "model": self.model.spec,
            "modality": ",".join(self.model.modalities),
            "precision": self.model.precision,
            **self.rows.identity(),
            "output format": self.format,
            **cut,
            **({} if self.model.decode == REFERENCE else {"decode": self.model.decode}),
        }

    def publish(self, layout: Layout) -> None:
        """Write run.json of a new run, which commits it."""
        body: dict[str, Any] = {
            "schema": SCHEMA,
            **asdict(self),
            "options": dict(self.options),
            "model": self.model.describe(),
            "rows": self.rows.describe(),
        }
        del body["added"]
        if self.workers == WorkerDefaults():
            del body["workers"]
        # A unique name: an orphan of a killed process must not look like another process at the same time.
        temporary = layout.temporary / f"run-{self.run}.{secrets.token_hex(4)}.json"
        write_first(layout.run_json, json.dumps(body, indent=1).encode() + b"\n", temporary=temporary)


def run_id(identity: dict[str, Any], output: Place) -> str:
    """Run id: 16 hex digits over the identity and the output, so that planning again finds the same run."""
    return content_hash([identity, str(output)])[:16]


def load_run(root: Place) -> RunInfo:
    """The run of an output folder as it is now; InputError if the folder holds none."""
    layout = Layout(root)
    layout.refuse_links()
    try:
        planned = _read(layout)
    except (FileNotFoundError, NotADirectoryError) as error:
        if (above := run_above(root)) is not None:
            raise part_of_run(root, above) from error
        why = "it does not exist" if isinstance(root, Path) and not root.exists() else "it has no run.json"
        raise InputError(
            f"{root} is not an embq output folder: {why}",
            next_step="give the folder that `embq run --output` or `embq enqueue --output` made",
        ) from error
    except OSError as error:
        raise denied(error, layout.run_json) or OutputError(f"{layout.run_json} cannot be read: {error}") from error
    added = tuple(read_generations(layout.manifest))
    if added and (added[0].first != planned.units or any(generation.run != planned.run for generation in added)):
        raise OutputError(
            f"{layout.manifest} holds generations of another run",
            next_step="restore the folder from a backup",
            code="manifest_damaged",
        )
    counts = [planned.samples, *(generation.samples for generation in added)]
    return replace(
        planned,
        units=planned.units + sum(generation.units for generation in added),
        samples=None if None in counts else sum(count for count in counts if count is not None),
        added=added,
    )


def first_segments(layout: Layout) -> list[str]:
    """The names of the segments of the manifest that a run was planned with, in order."""
    try:
        named = _read(layout).segments
    except FileNotFoundError:
        named = ()
    except OSError as error:
        raise denied(error, layout.run_json) or OutputError(f"{layout.run_json} cannot be read: {error}") from error
    numbered = (name for name in names_in(layout.manifest) if name[:1].isdigit() and name.endswith(".parquet"))
    return list(named) or sorted(numbered)


def _read(layout: Layout) -> RunInfo:
    """The run as it was planned, of run.json; OSError if it cannot be read, OutputError if it is damaged."""
    data = beneath.read_bytes(layout.root, layout.run_json.name, most_bytes=MOST_BYTES)
    try:
        body = wire.read(dict[str, Any], data, what=str(layout.run_json), most_bytes=MOST_BYTES)
        if body.get("schema") != SCHEMA:
            raise OutputError(
                f"{layout.run_json} has schema {body.get('schema')}, this embq reads {SCHEMA}",
                next_step="use the embq version that made the run",
            )
        options = wire.convert(dict[str, str], body.get("options"), what=str(layout.run_json))
        body |= {"options": sorted(options.items()), "added": ()}
        return wire.convert(RunInfo, body, what=str(layout.run_json))
    except MalformedError as error:
        raise OutputError(f"{layout.run_json} cannot be read: {error.message}") from error
