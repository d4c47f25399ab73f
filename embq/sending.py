"""`embq enqueue --upload` and `--inline`: plan here, and send the run to the writer's machine."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path, PurePosixPath

import click
import redis
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from core.errors import UsageError
from core.storage.objects import ObjectPath
from producer.enqueue import Request, prepare
from producer.upload import Delivered, Inputs, Parcel, deliver, pack

PLAIN_EVERY_S = 10.0


def send_run(
    client: redis.Redis, request: Request, *, inline: bool, as_json: bool, priority: int | None = None
) -> None:
    """Plan a run into a temporary folder of this machine, send it, and say whether this machine may leave."""
    output = str(request.output)
    if isinstance(request.output, ObjectPath):
        raise UsageError(
            f"--output {output}: --upload and --inline go into a folder of the writer's machine",
            next_step="leave them out: this machine writes the plan to the object store itself",
        )
    if not PurePosixPath(output).is_absolute():
        raise UsageError(
            f"--output {output}: with --upload this is a folder of the writer's machine",
            next_step="give its absolute path there, for example --output /data/out",
        )
    inputs = Inputs(output) if inline else None
    with tempfile.TemporaryDirectory(prefix="embq-enqueue-") as folder:
        planned = prepare(
            replace(request, output=Path(folder) / "run"), relocate=inputs.relocate if inputs is not None else None
        )
        for warning in planned.warnings:
            click.echo(f"warning: {warning}", err=True)
        parcel = pack(Path(folder) / "run", output, inputs, priority)
        with _Display(parcel) as display:
            delivered = deliver(client, parcel, display.report)
    _tell(parcel, delivered, as_json=as_json)


def _tell(parcel: Parcel, delivered: Delivered, *, as_json: bool) -> None:
    info, end = parcel.info, delivered.end
    # Until a writer has taken it, only it knows whether the folder holds a run to which this is added.
    run = end.run if end is not None else info.run
    units = end.units if end is not None else info.units
    added = end.added if end is not None else None
    if as_json:
        said = {"schema": 1, "run": run, "units": units, "accepted": end is not None}
        said["precision"] = info.model.precision
        if end is not None:
            said |= {"new": added is None, "added": added or 0}
        click.echo(json.dumps(said))
    elif end is not None and added == 0:
        click.echo(f"run {run} is already enqueued: {units:,} units; nothing was added")
    else:
        count, total = (added, end.samples) if end is not None and added else (units, info.samples)
        samples = f", {total:,} samples" if total is not None else ""
        told = f"added to {units - count:,}" if added else "enqueued"
        click.echo(f"run {run}: {count:,} units{samples} {told} for {info.model.spec}")
    if end is not None:
        click.echo("the writer has it on its disk; this machine may leave", err=True)
    else:
        click.echo(
            "the broker has it on its disk, and no writer has taken it yet: one will as soon as it runs; "
            "this machine may leave",
            err=True,
        )
    click.echo(f"watch it with: embq status {run} --watch", err=True)


class _Display:
    """A bar on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, parcel: Parcel) -> None:
        self._total = sum(file.bytes for file in parcel.upload.files)
        self._progress = Progress(
            TextColumn("sending"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[why]}"),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
            transient=True,
        )
        self._task = self._progress.add_task("sending", total=self._total, why="")
        self._said = time.monotonic()

    def __enter__(self) -> _Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def report(self, done: int, total: int, why: str) -> None:
        """Show how far it is, and what it waits for."""
        self._progress.update(self._task, completed=done, why=f"waits: {why}" if why else "")
        if not sys.stderr.isatty() and time.monotonic() - self._said > PLAIN_EVERY_S:
            self._said = time.monotonic()
            waits = f"; waits: {why}" if why else "" if done else "; no writer has taken anything yet"
            click.echo(f"sending: {done / 1e6:.1f} of {total / 1e6:.1f} MB are on the writer's disk{waits}", err=True)
