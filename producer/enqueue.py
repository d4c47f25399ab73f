"""Make a run: plan its units, write the manifest durably, and tell the broker that it exists."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import redis

from core.commits import CommitLog
from core.durable import output_error
from core.embedded import in_use, kept_off
from core.errors import InputError
from core.layout import Layout, RunInfo, load_run, run_id
from core.manifest import write_manifest
from core.models import ModelConfig, ModelSpec
from core.registry import RunRecord, register
from core.units import Unit
from producer.plan import plan
from sources.base import ReadOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a user asks for; see the options of `embq run` for the meaning of each field."""

    inputs: tuple[str, ...]
    output: Path
    model: str
    modalities: tuple[str, ...]
    precision: str
    dtype: str
    part_rows: int
    options: ReadOptions
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A run that stands in its output folder. `new` is False where it stood there before."""

    info: RunInfo
    new: bool
    warnings: tuple[str, ...]


def prepare(request: Request) -> Planned:
    """Plan the run and write it to its output folder, or find it there.

    Raises InputError for inputs that cannot be used, and where the folder holds another run or foreign files.
    """
    spec = ModelSpec.parse(request.model)
    planned = plan(request.inputs, request.options, request.modalities)
    config = ModelConfig(spec=str(spec), modalities=planned.modalities, precision=request.precision)
    layout = Layout(Path(os.path.abspath(request.output)))
    if layout.run_json.exists():
        return Planned(info=_same_run(layout, request, config, planned.units), new=False, warnings=planned.warnings)
    _refuse_foreign_files(layout)
    layout.make()
    with open(layout.writer / "plan.lock", "w") as lock:
        # Of two plans at the same time the second finds the first one's run, and never touches its manifest.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if layout.run_json.exists():
            return Planned(info=_same_run(layout, request, config, planned.units), new=False, warnings=planned.warnings)
        summary = write_manifest(layout, planned.units)
        info = RunInfo(
            run="",
            inputs=request.inputs,
            options=_options(request.options),
            model=config,
            dtype=request.dtype,
            part_rows=request.part_rows,
            units=summary.units,
            samples=summary.samples,
            manifest_digest=summary.digest,
            version=request.version,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        info = replace(info, run=run_id(info.identity(), layout.root))
        info.publish(layout)
    return Planned(info=info, new=True, warnings=planned.warnings)


def announce(client: redis.Redis, info: RunInfo, output: Path) -> None:
    """Make the run known to the resident producer, writer and workers; repeating it changes nothing."""
    register(client, record_of(info, output))


def hand_over(client: redis.Redis, info: RunInfo, output: Path) -> None:
    """Make the run known to resident services; TryLaterError where an `embq run` is at work on it."""
    broker = Layout(output).broker
    with kept_off(broker) as alone:
        if not alone:
            raise in_use(broker)
        announce(client, info, output)


def record_of(info: RunInfo, output: Path) -> RunRecord:
    """The run as the services know it."""
    return RunRecord(run=info.run, output=os.path.abspath(output), model=info.model, dtype=info.dtype, units=info.units)


def _options(options: ReadOptions) -> tuple[tuple[str, str], ...]:
    return (
        ("id_column", options.id_column),
        ("text_column", options.text_column),
        ("unit_samples", str(options.unit_samples)),
    )


def _same_run(layout: Layout, request: Request, config: ModelConfig, units: Iterable[Unit]) -> RunInfo:
    there = load_run(layout.root)
    digest = hashlib.sha256()
    for unit in units:
        digest.update(unit.unit_id.encode())
    asked = replace(there, model=config, dtype=request.dtype, manifest_digest=digest.hexdigest()[:32])
    old, new = there.identity(), asked.identity()
    differences = [f"{name}: {old[name]} there, {new[name]} asked for" for name in old if old[name] != new[name]]
    if differences:
        begun = CommitLog(layout).replay(there.units).count > 0
        raise InputError(
            f"{request.output} holds another run: " + "; ".join(differences),
            next_step=f"choose another --output, or go on with the run that is there: embq resume {request.output}"
            + ("" if begun else " (or remove the folder: nothing of it is committed)"),
            code="other_run",
        )
    return there


def _refuse_foreign_files(layout: Layout) -> None:
    ours = {"manifest", "commits", "parts", "failures", "_staging", "_tmp", "_writer", "_broker", "_logs", "index"}
    try:
        names = sorted(entry.name for entry in layout.root.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise output_error(error, layout.root) from error
    if foreign := [name for name in names if name not in ours]:
        raise InputError(
            f"--output {layout.root} is not empty and holds no embq run (it has {', '.join(foreign[:3])})",
            next_step="choose an empty or a new folder",
            code="foreign_output",
        )
